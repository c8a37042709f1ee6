"""The transaction that commits tokens, KV and captured rows."""

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.lens import lens
from replaylens.engine.request.sampling import Sampling
from tests.engine.coin_engine import PROMPT
from tests.toy_model import engine, scripted_model


@pytest.mark.parametrize("drafter", ["ngram", "lens"])
def test_where_captured_rows_cannot_be_read_nothing_is_committed(
    served: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = served.prompt(PROMPT, sites="STCZ", keep_rejected=True)
    before = branch.tokens, branch.activations.positions()
    with monkeypatch.context() as patch:
        patch.setattr(lens, "read_there", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room for Z")))
        with pytest.raises(MemoryError):
            branch.generate(4, drafter=drafter, window=4)
    assert (branch.tokens, branch.activations.positions()) == before
    served.check_integrity()
    assert branch.generate(4, drafter=drafter).tokens == served.prompt(PROMPT).generate(4).tokens


@pytest.mark.parametrize("end", [2, 3, 4])
def test_drafts_after_the_end_were_never_made(end: int) -> None:
    """They are neither counted nor kept as a rejected branch: they would depend on the window."""
    subject = engine(scripted_model({i: i + 1 for i in range(1, 9)}))
    branch = subject.prompt([1], sites="S", keep_rejected=True)
    how = Sampling(stop_tokens=(end,))
    branch.generate(7, sampling=how, drafter="forced", drafts={1: [[2, 3, 4, 5, 6]]}, window=6, keep_rejected=True)
    assert branch.generated == list(range(2, end + 1)) and branch.finish_reason == "eos"
    found = branch.statistics
    assert (found.drafted, found.accepted, found.tokens) == (end - 1, end - 1, end - 1)
    assert branch.rejected == [], "nothing was rejected"


def test_a_turn_that_fails_leaves_rows_and_pages_as_they_were() -> None:
    subject = engine(page_size=4)
    branch, failing = subject.prompt(list(range(1, 10)), sites="SZ"), [True]

    def fail(value: Tensor, context: object) -> None:
        if failing[0]:
            raise RuntimeError("no")

    (hooked,) = branch.fork(hooks=[("blocks.1.hook_in", fail)])
    before = hooked.lane.computed, hooked.lane.table.length, list(hooked.lane.table.pages), subject.runner.pool.num_free
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            hooked.force([3] * 9)
        lane = hooked.lane
        assert lane.computed <= before[0] and lane.table.length == lane.computed
        assert lane.table.pages == before[2][: len(lane.table.pages)] and subject.runner.pool.num_free >= before[3]
        subject.check_integrity()
    failing[0] = False
    assert torch.equal(hooked.force([3] * 9).kv(), subject.prompt([*range(1, 10), *[3] * 9]).kv())
