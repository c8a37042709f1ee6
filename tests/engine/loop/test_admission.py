"""Admission: turns, drafts and faults."""

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.loop.loop import Loop
from replaylens.engine.request.sampling import Sampling
from tests.engine.coin_engine import PROMPT, fresh


def test_no_chains_at_a_position_are_no_drafts(served: Engine) -> None:
    branch, right = served.prompt(PROMPT), served.prompt(PROMPT).generate(4)
    assert branch.generate(4, drafter="forced", drafts={branch.length: []}).tokens == right.tokens


def test_a_fault_in_the_admission_ends_the_jobs_and_not_the_engine(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = served.prompt(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "admit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            branch.generate(2)
    assert served.loop.jobs == [] and branch.generate(2).length == served.prompt(PROMPT).length + 2
    served.check_integrity()


def test_drafts_behind_the_end_are_not_rejected(served: Engine) -> None:
    """Drafts after the end are what the model would have said if asked to continue."""
    free = served.prompt(PROMPT).generate(6, sampling=Sampling(ignore_eos=True)).generated
    branch = served.prompt(PROMPT, sites="S", keep_rejected=True)
    ending = Sampling(ignore_eos=True, stop_tokens=(free[1],))
    first = free.index(free[1])
    branch.generate(6, drafter="forced", drafts={branch.length: [free[:5]]}, sampling=ending, keep_pages=True)
    assert branch.generated == free[: first + 1] and branch.rejected == []
    assert branch.statistics.rejected == 0
    other = served.prompt(PROMPT, sites="S", keep_rejected=True)
    wrong = [*free[: first + 1], *((token + 1) % served.config.vocab_size for token in free[first + 1 : 5])]
    other.generate(6, drafter="forced", drafts={other.length: [wrong]}, sampling=ending, keep_pages=True)
    assert other.generated == branch.generated and other.rejected == []
    replayed = fresh().replay_trace(served.trace)
    assert isinstance(replayed, dict) and replayed[branch.id].tokens == branch.tokens
