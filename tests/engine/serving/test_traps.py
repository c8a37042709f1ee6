"""Traps that a new user falls into: each says what is wrong, and what to write instead."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch

from replaylens import Edit, Engine, Sampling, tasks
from replaylens.engine.errors import BadRequest, UnknownOption

PROMPT = "A coin's state is heads. Alice flips"


@pytest.fixture(scope="module")
def served() -> Engine:
    return Engine.load("coin-plain")


Call = Callable[[Engine], Any]


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda e: e.generate("some text", 5),
            r"Invalid branches='some text'\. Give a list of branches, such as \[engine\.prom",
        ),
        (lambda e: e.generate(e.prompt(PROMPT), 5), r"Invalid branches=Branch\(.*Give a list of branches, such as"),
        (lambda e: e.generate([PROMPT], 5), "Give a Branch, such as prompt"),
        (lambda e: e.prompt(PROMPT).generate(PROMPT), "Invalid n="),
        (
            lambda e: e.prompt(PROMPT).generate(5, sampling=0.7),
            r"sampling=0\.7\. Give a Sampling, such as Sampling\(temperature",
        ),
        (lambda e: e.generate([e.prompt(PROMPT)], 5, sampling=0.7), r"Give a Sampling, such as Sampling\(temperature=0\.7\)"),
        (lambda e: e.stream(e.prompt(PROMPT), 5, sampling="greedy"), "sampling='greedy'. Give a Sampling, such as Sampling"),
        (lambda e: e.replay(tasks.get("coin")().examples(1), sampling=0.7), r"Give a Sampling, such as Sampling\(temperature"),
    ],
)
def test_wrong_kinds_of_values(served: Engine, call: Call, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        call(served)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda e: e.prompt(PROMPT).generate(PROMPT, 5), r"generate\(\) takes only n by position.* Got 2"),
        (lambda e: e.prompt(PROMPT).generate(5, 0.7), r"generate\(\) takes only n by position"),
        (lambda e: e.generate([e.prompt(PROMPT)]), r"generate\(\) needs n\."),
        (
            lambda e: e.prompt(PROMPT).generate(5, temperature=0.7),
            r"no option 'temperature'.*sampling=Sampling\(temperature=\.\.\.\)",
        ),
        (lambda e: e.generate([], 5, max_new_tokens=3), r"generate\(\) has no option 'max_new_tokens'\. It has .*drafter"),
        (lambda e: e.prompt(PROMPT, site="S"), r"prompt\(\) has no option 'site' \(did you mean 'sites'\?\)"),
        (lambda e: e.prompts([PROMPT], tokens=3), r"prompts\(\) has no option 'tokens'"),
        (lambda e: e.replay([], samplng=1), r"replay\(\) has no option 'samplng' \(did you mean 'sampling'\?\)"),
        (lambda e: e.prompt(PROMPT).fork(edit=[]), r"fork\(\) has no option 'edit' \(did you mean 'edits'\?\)"),
        (lambda e: e.run_with_cache([1], name_filter="S"), r"run_with_cache\(\) has no option 'name_filter' \(did you mean"),
        (lambda e: Engine.load("coin-plain", devise="cpu"), r"load\(\) has no option 'devise' \(did you mean 'device'\?\)"),
        (lambda e: Sampling(temprature=1), r"Sampling\(\) has no option 'temprature' \(did you mean 'temperature'\?\)"),
        (lambda e: Edit("S", "zero", position=3), r"Edit\(\) has no option 'position' \(did you mean 'positions'\?\)"),
        (lambda e: Engine.load("coin-thinking").prompt("A coin", site="S"), r"prompt\(\) has no option 'site'"),
    ],
)
def test_options_that_there_are_not(served: Engine, call: Call, says: str) -> None:
    """A named error, which is a TypeError too, as Python's own."""
    with pytest.raises(UnknownOption, match=says) as caught:
        call(served)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, BadRequest)
    assert not re.search(r"Core|__init__|positional argument", str(caught.value))


def test_asking_for_z_drops_no_row(served: Engine) -> None:
    """The last row, which a logit lens is for, is there before anything is generated, on forks and under edits as well."""
    root = served.prompt(PROMPT, sites="SZ")
    branches = [
        root,
        root.fork()[0],
        root.fork(at=5)[0],
        root.fork(edits=[Edit("S", "zero", positions=-1, layers=[2])])[0],
        served.prompt(PROMPT, sites="SZ").force(", tails"),
        served.prompt(PROMPT, sites="Z", full=True),
    ]
    for branch in branches:
        for site in branch.activations:
            assert len(branch.activations[site]) == branch.length, site
        assert branch.activations["Z.emitted"].isnan().all(-1).tolist() == [False] * (branch.length - 1) + [True]
    z, plain = root.activations["Z.top_ids"], served.prompt(PROMPT, sites=["unembed.hook_out"])
    assert int(z[-1, -1, 0]) == int(plain.activations["unembed.hook_out"][-1].argmax())
    assert torch.equal(root.activations["blocks.2.hook_in"], served.prompt(PROMPT, sites="S").activations["blocks.2.hook_in"])


@pytest.mark.usefixtures("watched")
def test_a_progress_bar_ends_at_its_end(served: Engine) -> None:
    """Also where branches stop before all their tokens."""
    task = tasks.get("coin")(flips=2)
    branches = served.prompts([example.prompt for example in task.examples(3)])
    shown = io.StringIO()
    with redirect_stderr(shown):
        served.generate(branches, 40, progress=True)
    assert all(branch.finish_reason for branch in branches), "they stop early"
    bars = re.findall(r"(\d+)%\|[^|]*\| (\d+)/(\d+)", shown.getvalue())
    done = sum(len(branch.generated) for branch in branches)
    assert bars[-1] == ("100", str(done), str(done)) and done < 120
    long = io.StringIO()
    with redirect_stderr(long):
        served.generate([served.prompt(PROMPT)], 6, sampling=Sampling(ignore_eos=True), progress=True)
    assert re.findall(r"(\d+)%\|[^|]*\| (\d+)/(\d+)", long.getvalue())[-1] == ("100", "6", "6")
