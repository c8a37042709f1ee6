"""NaN and infinity are never committed, whichever row of a pass they are in and whether or not it has logits."""

import pytest
import torch

from replaylens import Engine
from replaylens.engine.errors import NonFinite
from replaylens.engine.memory.tree import TokenState
from tests.toy_model import Reference, continuation, engine, random_model

BAD = 7


@pytest.fixture
def poisoned() -> Engine:
    """Token 7 has activations that overflow."""
    model = random_model(norm="layer")
    model.embed[BAD] = 3e38
    return engine(model)


@pytest.mark.parametrize("forced", [[BAD], [8, BAD], [8, 9, 10, BAD], [BAD, 8, 9]])
def test_forced_tokens_that_overflow(poisoned: Engine, forced: list[int]) -> None:
    """A pass without logits: the rows themselves are looked at, the first, the last and the only one."""
    branch = poisoned.prompt([1, 2, 3], sites="S")
    before = branch.kv()
    with pytest.raises(NonFinite, match="Nothing of this pass was committed"):
        branch.force(forced)
    assert branch.tokens == [1, 2, 3] and TokenState.DRAFT not in branch.states
    assert branch.certified and torch.equal(branch.kv(), before)
    assert branch.activations.positions() == [0, 1, 2]
    assert branch.force([4]).generate(4).generated == [4, *continuation(poisoned.model, [1, 2, 3, 4], 4)]
    assert torch.equal(branch.kv(), Reference(poisoned.model, branch.tokens).kv[: branch.lane.computed])
    poisoned.check_integrity()


@pytest.mark.parametrize("prompt", [[BAD], [1, BAD], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_prompts_that_overflow(poisoned: Engine, prompt: list[int]) -> None:
    """Nothing stays behind: no branch, no page, nothing in the prefix index."""
    free = poisoned.runner.pool.num_free
    with pytest.raises(NonFinite):
        poisoned.prompt(prompt)
    assert poisoned.loop.lanes == {} and len(poisoned.prefix) == 0 and poisoned.runner.pool.num_free == free


def test_a_neighbour_of_one_row_fails_alone(poisoned: Engine) -> None:
    """Two one-row requests in one pass: the bad one is named, the good one goes on to its own bits."""
    good, bad = poisoned.prompts([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(NonFinite):
        poisoned.force_all([good, bad], [[8], [BAD]])
    assert bad.tokens == [4, 5, 6] and good.tokens == [1, 2, 3, 8]
    assert torch.equal(good.kv(), Reference(poisoned.model, good.tokens).kv)
