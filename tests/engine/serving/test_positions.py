"""Capture of chosen positions: the rows equal those of a full capture, and no others are kept."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.sampling import Sampling

TEXT = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
LONG = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("coin-plain")


def expected(positions: str, num_prompt: int, length: int) -> list[int]:
    everything = list(range(length))
    return {
        "all": everything,
        "last": [num_prompt - 1],
        "prompt": everything[:num_prompt],
        "response": everything[num_prompt:],
        "response[:3]": everything[num_prompt : num_prompt + 3],
        "all[1::4]": everything[1::4],
    }[positions]


@pytest.mark.parametrize("drafter", ["self", "tree"])
@pytest.mark.parametrize("positions", ["all", "last", "prompt", "response", "response[:3]", "all[1::4]"])
def test_chosen_rows_are_those_of_a_full_capture(engine: Engine, positions: str, drafter: str) -> None:
    options = dict(sites="STCZ", keep_rejected=True)
    whole = engine.prompt(TEXT, **options).generate(9, drafter=drafter, sampling=LONG, final=True)
    part = engine.prompt(TEXT, positions=positions, **options)
    engine.generate([engine.prompt("A coin's state is heads"), part], 9, drafter=drafter, sampling=LONG, final=True)
    kept = part.activations.positions()
    assert kept == expected(positions, part.root_length, part.length)
    for site in part.activations.sites():
        bits = part.activations[site].contiguous().view(torch.uint8)
        assert torch.equal(bits, whole.activations[site][kept].contiguous().view(torch.uint8)), site
    for mine, theirs in zip(part.rejected, whole.rejected, strict=True):
        own = [p for p in theirs.activations.positions() if p in expected(positions, part.root_length, theirs.length)]
        assert mine.activations.positions() == own
    assert part.tree() is not None
    engine.check_integrity()


def test_forks_and_rollbacks_keep_the_choice(engine: Engine) -> None:
    root = engine.prompt(TEXT, sites="S", positions="all[::3]").generate(7, sampling=LONG, final=True)
    (fork,) = root.fork(at=root.length - 4)
    fork.generate(5, sampling=LONG, final=True)
    root.rollback(to=root.root_length + 2).generate(6, sampling=LONG, final=True)
    for branch in (root, fork):
        assert branch.activations.positions() == list(range(0, branch.length, 3))
        again = engine.prompt(branch.tokens, sites="S")
        for site in again.activations.sites():
            assert torch.equal(branch.activations[site], again.activations[site][::3])


def test_nothing_is_stacked_where_nothing_is_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.engine.request.capture import PassTap

    branch = engine.prompt(TEXT, sites="STC", positions="last")
    monkeypatch.setattr(PassTap, "stacked", lambda *_: pytest.fail("rows of the response were taken"))
    branch.generate(5, sampling=LONG, drafter="ngram")
    assert branch.activations.positions() == [branch.root_length - 1]


@pytest.mark.parametrize("options", [{"positions": "some"}, {"positions": 3}, {"keep": "disk"}, {"keep": None}])
def test_bad_choices_are_refused(engine: Engine, options: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        engine.prompt(TEXT, sites="S", **options)
