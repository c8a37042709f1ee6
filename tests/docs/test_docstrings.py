"""The examples in the docstrings of public names run and give the output shown."""

import doctest
from pathlib import Path
from typing import Any

import pytest

import replaylens as rl

PUBLIC: dict[str, Any] = {
    "Engine": rl.Engine,
    "Branch": rl.Branch,
    "Run": rl.Run,
    "Dump": rl.Dump,
    "Edit": rl.Edit,
    "Sampling": rl.Sampling,
    "attribution_patching": rl.attribution_patching,
    "tasks.get": rl.tasks.get,
    "probes.sweep": rl.probes.sweep,
    "probes.fit_probe": rl.probes.fit_probe,
    "probes.ProbeRows.of_arrays": rl.probes.ProbeRows.of_arrays,
    "probes.cross_validate": rl.probes.cross_validate,
    "probes.solve": rl.probes.solve,
    "probes.outcome_curve": rl.probes.outcome_curve,
    "probes.importance": rl.probes.importance,
    "probes.change_points": rl.probes.change_points,
    "lens": rl.lens,
    "patch": rl.patch,
    "path_patch": rl.path_patch,
    "ablate": rl.ablate,
    "attention": rl.attention,
}


def failures(name: str, subject: Any, names: dict[str, Any]) -> tuple[int, int, str]:
    """(examples, failures, output) of a docstring, without its methods."""
    said: list[str] = []
    found = doctest.DocTestFinder(recurse=False).find(subject, name, globs=dict(names))
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test, out=said.append)
    return runner.tries, runner.failures, "".join(said)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = PUBLIC[name]
    tries, failed, said = failures(name, subject, {subject.__name__: subject})
    assert tries and not failed, said


def test_examples_control() -> None:
    """Negative control: an example with the wrong output is found."""

    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    assert failures("wrong", wrong, {})[:2] == (1, 1)
