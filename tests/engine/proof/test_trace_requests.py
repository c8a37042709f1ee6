"""Requests in a trace."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadTrace
from replaylens.engine.lens import lens as tuned_lens
from tests.engine.coin_engine import PROMPT, fresh


@pytest.mark.parametrize("meanwhile", ["generate", "force"])
def test_a_request_that_was_refused_is_not_in_the_trace(served: Engine, meanwhile: str) -> None:
    """A refused request must not end the stream's own request in the replay."""
    branch = served.prompt(PROMPT)
    stream = branch.stream(6, drafter="ngram", window=2)
    next(stream)
    before = branch.tokens
    with pytest.raises(BadRequest, match="is busy with another request"):
        branch.generate(2) if meanwhile == "generate" else branch.force(" heads")
    assert branch.tokens == before
    list(stream)
    replayed = fresh().replay_trace(served.trace)
    assert isinstance(replayed, dict) and replayed[branch.id].tokens == branch.tokens


def test_a_trace_with_a_tuned_lens_says_how_to_make_it_known(served: Engine) -> None:
    rows = torch.stack([served.prompt(PROMPT, sites="S").activations[s] for s in served.sites.letter("S")], 1)
    lens = tuned_lens.train(served.model, rows, steps=1)
    recorded, other = fresh(), fresh()
    branch = recorded.prompt(PROMPT, sites="Z", lens=lens)
    with pytest.raises(BadTrace, match="Add it with"):
        other.replay_trace(recorded.trace)
    knows = fresh()
    knows.capture_spec("Z", lens=lens)
    replayed = knows.replay_trace(recorded.trace)
    assert isinstance(replayed, dict)
    assert torch.equal(replayed[branch.id].activations["Z.kl"], branch.activations["Z.kl"])
