"""The transaction that commits tokens, KV and captured rows."""

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.lens import readout
from tests.engine.coin_engine import PROMPT


@pytest.mark.parametrize("drafter", ["ngram", "lens"])
def test_where_captured_rows_cannot_be_read_nothing_is_committed(
    served: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = served.prompt(PROMPT, sites="STCZ", keep_rejected=True)
    before = branch.tokens, branch.activations.positions()
    with monkeypatch.context() as patch:
        patch.setattr(readout, "read_there", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room for Z")))
        with pytest.raises(MemoryError):
            branch.generate(4, drafter=drafter, window=4)
    assert (branch.tokens, branch.activations.positions()) == before
    served.check_integrity()
    assert branch.generate(4, drafter=drafter).tokens == served.prompt(PROMPT).generate(4).tokens
