"""The benchmark against baselines, tiny and on the CPU: it runs, checks the results it times, and writes its measurements."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import baselines, library
from benchmarks.harness import Lines, chosen, run


def test_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert all(run(made, quick=True, out=out) for made in chosen(["baselines-gpu"]))
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    count = {word: sum(word in what for what in rows) for word in ("before", "prompts,", "capture", "host", "mixed", "Hugging")}
    assert count == {"before": 2, "prompts,": 2 + 7 + 2, "capture": 2, "host": 6, "mixed": 12, "Hugging": 4}
    assert rows["mixed load, at once, 0 % deterministic"]["ratio"] == 1.0
    assert len(rows["mixed load, spread, 50 % deterministic"]["rounds"]) == 1


@pytest.mark.parametrize(("section", "rows"), [(baselines.prompt_passes, None), (baselines.decode_steps, 1)])
def test_a_library_that_computes_something_else_is_not_timed(
    section: Callable[[bool], Lines], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: attention with another scale (for steps, only in the steps) is refused."""
    ways = library.ways

    def scaled(attend: library.Attend) -> library.Attend:
        return lambda q, k, v, scale: attend(q, k, v, 30 * scale)

    def wrong(asked: int, device: str) -> dict[str, library.Attend]:
        right = ways(asked, device)
        return {name: scaled(attend) for name, attend in right.items()} if rows in (None, asked) else right

    monkeypatch.setattr(library, "ways", wrong)
    with pytest.raises(AssertionError, match="computes something else"):
        next(section(True))


def test_every_way_to_ask_for_an_attention_is_the_same() -> None:
    q, k, v = torch.randn(3, 1, 4, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    first, *others = [attend(q, k, v, 0.3) for attend in library.ways(1, "cpu").values()]
    assert others and all(torch.allclose(first, other, atol=1e-6) for other in others)


def test_rows_that_differ_are_found() -> None:
    """Negative control: the check before timing capture finds rows that differ."""
    tokens, rows = {"tokens": torch.arange(3)}, {"a": torch.ones(2), "b": torch.ones(2)}
    found = {arm: dict(tokens) for arm in baselines.ARMS}
    for arm in baselines.ARMS:
        found[arm] |= {"no capture": {}, "S": {"a": torch.ones(2)}}.get(arm.partition(", on")[0], rows)
    baselines._check(found)
    found["S, on the device"]["a"] = torch.tensor([1.0, 1.0 + 2**-20])
    with pytest.raises(AssertionError, match="S, on the device: other tokens or rows"):
        baselines._check(found)
