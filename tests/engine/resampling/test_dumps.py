"""Rollouts as texts: a dump of their kept rows verifies from its folder, and holds the rows that were captured."""

from pathlib import Path

import pytest
import torch

from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.verify import VERIFIED, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadTexts
from replaylens.engine.request.edits import Edit
from replaylens.engine.resampling.plan import Answer


@pytest.mark.parametrize("edited", [False, True])
def test_a_dump_of_rollouts(tmp_path: Path, edited: bool) -> None:
    subject = Engine.load("coin-plain")
    edits = [Edit("S", "zero", positions=[2], layers=[1])] if edited else []
    branch = subject.prompt("A coin's state is heads.", edits=edits).force(" Alice flips. Bob flips. What's the state? A:")
    options = {"sites": "S", "keep": ["fork", "sentences", "answer"], "replace": " Carol flips." if edited else None}
    found = branch.resample(4, at="sentences", max_new=10, answer=Answer.regex("heads|tails"), **options)  # type: ignore[arg-type]
    task = subject.texts(found)
    plan = make_plan(subject, task, len(task), sites="S", positions="label:place", rejected=False)
    dump = write_dump(subject, plan, tmp_path / "dump")
    assert dump is not None and verify(dump.url, Engine.load("coin-plain"), sample=1.0).status == VERIFIED
    frame = dump.to_pandas()
    kept = found.index.drop_duplicates(["position", "number", "token"])
    assert len(frame) == len(kept)
    assert frame["position"].tolist() == kept["token"].tolist() and frame["fork"].tolist() == kept["position"].tolist()
    assert frame["rollout"].tolist() == kept["number"].tolist()
    rows = found.states["blocks.2.hook_in"][kept.index.tolist()]
    assert torch.equal(dump.to_torch("blocks.2.hook_in"), rows)
    first = frame[frame["place"] == "fork"].groupby("fork")["outcome"].count()
    assert first.sum() == sum(each.outcome is not None for each in found)


def test_a_replay_of_rollouts(served: Engine) -> None:
    branch = served.prompt("A coin's state is heads.").force(" Alice flips.")
    found = branch.resample(3, at=[6, 9], max_new=4)
    run = served.replay(found, sites="S")
    assert [result.tokens for result in run] == [[*branch.tokens[: each.position], *each.tokens] for each in found]
    with pytest.raises(BadTexts, match="labels of their own"):
        served.replay(found, labels={"x": [1] * 6})


def test_one_dump_of_several_chains(served: Engine, tmp_path: Path) -> None:
    """Rows of all chains lie in one dump, with the number of their chain, and have the bits that were captured."""
    options = {"max_new": 6, "sites": "S", "keep": ["fork", "last"]}
    chains = [
        served.prompt(f"A coin's state is {face}.").force(" Alice flips. Bob flips.").resample(2, at="sentences", **options)  # type: ignore[arg-type]
        for face in ("heads", "tails", "heads")
    ]
    task = served.texts(chains)
    dump = write_dump(
        served, make_plan(served, task, len(task), sites="S", positions="label:place", rejected=False), tmp_path / "dump"
    )
    assert dump is not None and verify(dump.url, served, sample="all").status == VERIFIED
    frame = dump.to_pandas()
    assert frame["chain"].tolist() == [number for number, found in enumerate(chains) for _ in range(len(found.index))]
    rows = torch.cat([found.states["blocks.1.hook_in"] for found in chains])
    assert torch.equal(dump.to_torch("blocks.1.hook_in"), rows)
    with pytest.raises(BadTexts, match="separate calls"):
        served.texts([chains[0], "A coin's state is heads."])
