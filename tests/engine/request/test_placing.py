"""Edits that would silently change something else than was asked for."""

import pytest
import torch

from replaylens import Edit, Engine
from replaylens.engine.errors import BadEdit, BadRequest, UnknownSite
from replaylens.tasks.texts import GivenTexts
from tests.toy_model import engine, random_model

TOKENS = list(range(1, 20))
ROWS, HEADS, PATTERN = "blocks.1.hook_in", "blocks.0.attn.hook_z", "blocks.1.attn.hook_pattern"


@pytest.mark.parametrize("positions", [[3, 7], [7, 3], [-1, 0], [5, -2, 1]])
@pytest.mark.parametrize("site", [ROWS, HEADS])
def test_every_row_goes_to_its_position(site: str, positions: list[int]) -> None:
    """A branch's own rows change nothing, in whatever order positions are given. Rows of other positions do."""
    subject = engine()
    own = subject.prompt(TOKENS, sites=[site]).activations[site]
    plain = subject.logits(TOKENS)
    assert torch.equal(subject.logits(TOKENS, edits=[Edit.interchange(site, own[positions], positions)]), plain)
    assert not torch.equal(subject.logits(TOKENS, edits=[Edit.interchange(site, own[positions[::-1]], positions)]), plain)


@pytest.mark.parametrize(
    "edit, says",
    [
        (Edit(ROWS, "set", torch.zeros(2, 32), positions=[3, 3]), "twice"),
        (Edit(PATTERN, "zero", positions=slice(5, None), keys=slice(5, None)), "no end"),
        (Edit(PATTERN, "mask", positions=14, keys=slice(0, 3 * 10**7)), "shorter"),
        (Edit("blocks.*.hook_out", "zero", layers=[0, 99]), "layer 99"),
        (Edit("blocks.*.hook_out", "zero", layers=[-1, 0]), "layer -1"),
        (Edit("S", "resample", torch.randn(0, 32)), "no rows"),
    ],
)
def test_refused(edit: Edit, says: str) -> None:
    with pytest.raises(BadEdit, match=says):
        engine().logits(TOKENS, edits=[edit])


def test_edits_of_a_text_must_fit_the_model() -> None:
    """They come from another engine, or from a file."""
    deep, flat = engine(random_model(0, num_layers=4)), engine(random_model(0, num_layers=2))
    task = deep.texts([deep.prompt(TOKENS, edits=[Edit("blocks.3.hook_in", "zero")])])
    with pytest.raises((BadEdit, UnknownSite), match=r"blocks\.3"):
        flat.replay(task, sites="S")


@pytest.mark.parametrize("change", [{"op": "x"}, {"heads": [99]}, {"heads": [-1]}, {"start": "a"}, {"picks": [-1]}])
def test_damaged_edits_of_a_text(change: dict[str, object]) -> None:
    subject = engine()
    task = subject.texts([subject.prompt(TOKENS, edits=[Edit(HEADS, "zero", positions=3, heads=[1])])])
    (given,) = [example.given for example in task.examples()]
    assert given is not None
    raw = {**given.to_json(), "edits": [{**given.edits[0], **change}]}
    with pytest.raises((BadEdit, BadRequest)):
        replayed(subject, raw)


def replayed(subject: Engine, raw: dict[str, object]) -> object:
    return subject.replay(GivenTexts(texts=[raw]), sites="S")
