"""NaN and infinity are never committed, in whichever row of a pass they occur and whether or not it has logits."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import NonFinite
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.request.sampling import Sampling
from tests.engine.canonical import assert_canonical, submit
from tests.toy_model import Reference, continuation, engine, random_model

BAD = 7


@pytest.fixture
def poisoned() -> Engine:
    """Token 7 has activations that overflow."""
    model = random_model(norm="layer")
    model.embed[BAD] = 3e38
    return engine(model)


@pytest.mark.parametrize("sites", ["S", "SZ"])
@pytest.mark.parametrize("forced", [[BAD], [8, BAD], [8, 9, 10, BAD], [BAD, 8, 9]])
def test_forced_tokens_that_overflow(poisoned: Engine, forced: list[int], sites: str) -> None:
    """A pass without logits: the rows themselves are checked, the first, the last and the only one.

    With Z, the row at the tip is computed again in that pass, and what it writes beside NaN does not count either.
    """
    branch = poisoned.prompt([1, 2, 3], sites=sites)
    before = branch.kv()
    with pytest.raises(NonFinite, match="Nothing of this pass was committed"):
        branch.force(forced)
    assert branch.lane.computed == (2 if "Z" in sites else 3), "what the pass wrote is computed again"
    assert branch.tokens == [1, 2, 3] and TokenState.DRAFT not in branch.record.states
    assert branch.certified and torch.equal(branch.kv(), before)
    assert branch.activations.positions() == [0, 1, 2]
    assert branch.force([4]).generate(4).generated == [4, *continuation(poisoned.model, [1, 2, 3, 4], 4)]
    assert torch.equal(branch.kv(), Reference(poisoned.model, branch.tokens).kv[: branch.lane.computed])
    poisoned.check_integrity()


@pytest.mark.parametrize("row", [0, 4, 5])
def test_rows_that_overflow_after_the_last_attention(row: int) -> None:
    """Whose keys and values are fine: every row of the result is looked at."""

    def overflow(value: torch.Tensor, hook: object) -> torch.Tensor:
        value = value.clone()
        value[0, row, 0] = torch.inf  # of six: a branch with a hook computes its prompt again
        return value

    (branch,) = engine(random_model()).prompt([1, 2, 3]).fork(hooks=[("blocks.1.mlp.hook_out", overflow)])
    with pytest.raises(NonFinite, match="infinite activations"):
        branch.force([8, 9, 10])
    assert branch.tokens == [1, 2, 3]


@pytest.mark.parametrize("prompt", [[BAD], [1, BAD], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_prompts_that_overflow(poisoned: Engine, prompt: list[int]) -> None:
    """No branch, page or entry in the prefix index remains."""
    free = poisoned.runner.pool.num_free
    with pytest.raises(NonFinite):
        poisoned.prompt(prompt)
    assert poisoned.loop.lanes == {} and len(poisoned.prefix) == 0 and poisoned.runner.pool.num_free == free


def test_one_request_with_nan_failing_its_neighbours(poisoned: Engine) -> None:
    good, bad = poisoned.prompts([[1, 2, 3], [4, 5, 6]])
    truth = continuation(poisoned.model, [1, 2, 3], 8)
    jobs = [submit(good, 8, window=4), submit(bad, 8, sampling=Sampling(logit_bias={7: 1e9}))]
    while not all(job.done for job in jobs):
        poisoned.loop.step()
    assert isinstance(jobs[1].error, NonFinite) and jobs[0].error is None
    assert bad.tokens == [4, 5, 6, 7], "7 was said; what follows it cannot be"
    assert good.generated == truth
    assert_canonical(good)
    assert bad.rollback(3).generate(3).generated == continuation(poisoned.model, [4, 5, 6], 3)


def test_a_draft_with_nan_failing_its_request(poisoned: Engine) -> None:
    """A masked key still multiplies its value by zero, and zero times NaN is NaN: such a draft is dropped."""
    branch = poisoned.prompt([1, 2, 3])
    branch.generate(8, drafter="forced", drafts={3: [[7, 7]], 5: [[1, 7]]})
    assert branch.generated == continuation(poisoned.model, [1, 2, 3], 8)
    assert_canonical(branch)


def test_nan_in_a_prompt_reaching_the_prefix_index(poisoned: Engine) -> None:
    """Rows before the NaN in the same pass are spoiled too, and other requests look up the key of their page."""
    with pytest.raises(NonFinite):
        poisoned.prompt([1, 2, 3, 4, 7])
    branch = poisoned.prompt([1, 2, 3, 4, 9])
    assert branch.generate(4).generated == continuation(poisoned.model, [1, 2, 3, 4, 9], 4)
    assert_canonical(branch)
