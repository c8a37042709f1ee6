"""Gradients through latent attention. `tests/engine/model/test_families.py` compares every site with float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.gradients import derivatives
from replaylens.engine.model.loading import load
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from tests.engine.gradients.reference import difference, of_decoder
from tests.engine.gradients.test_autograd import TOLERANCE, errors_against_hugging_face, metric
from tests.engine.passes.packed import sequences
from tests.engine.reference import decoder
from tests.families import LATENT_NAMES, hugging_face

NAME, ATTN = "deepseek-v3", "blocks.0.attn."
TOKENS = sequences((70,), seed=8)[0].tolist()  # more than the rows that are computed together
EDITS = [
    Edit(ATTN + "hook_kv_latent", "add", torch.ones(13), [3, 60]),
    Edit(ATTN + "kv_a_layernorm.hook_in", "zero", None, [5]),
    Edit(ATTN + "hook_rot_k", "set", torch.ones(1, 6), 6),
    Edit(ATTN + "hook_rot_q", "zero", None, [-1]),
    Edit(ATTN + "hook_q_latent", "project_out", torch.ones(1, 11), None),
    Edit("blocks.1.attn.hook_q", "add", torch.ones(6, 13), [-1]),
    Edit("blocks.1.attn.hook_z", "zero", None, None, heads=[2]),
]


@pytest.mark.parametrize(
    "name", [n if n in ("deepseek-v2", "deepseek-v3") else pytest.param(n, marks=pytest.mark.slow) for n in LATENT_NAMES]
)
def test_agrees_with_hugging_face(name: str) -> None:
    """At S, T, C and the pattern of every layer."""
    found = errors_against_hugging_face(name)
    letters = "SP" if name == "minicpm3" else "STCP"  # its T and C are those before the factor on what is added
    assert len(found) == 4 * 2 + 1
    assert max(error for key, error in found.items() if key[0] in letters) < TOLERANCE


def _unchanged(g: Tensor, *_: Any) -> Tensor:
    return g


@pytest.mark.parametrize("function", ["through_rotary", "through_norm"])
def test_a_wrong_derivative_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    wrong: Callable[..., Tensor] = _unchanged
    monkeypatch.setattr(derivatives, function, wrong)
    assert max(errors_against_hugging_face(NAME).values()) > 1e-3


@pytest.mark.parametrize("edits", [*([edit] for edit in EDITS), EDITS], ids=[*(edit.site for edit in EDITS), "all"])
def test_edits_agree_with_autograd(edits: list[Edit]) -> None:
    subject = Engine(decoder(NAME))
    sites = [s for s in subject.sites.in_order() if s not in subject.sites.read_only and not s.endswith("pattern")]
    ours = subject.prompt(TOKENS, edits=edits).gradients(metric, sites)
    truth = of_decoder(load(hugging_face(NAME)).double(), TOKENS, metric, place_all(edits, subject.sites, len(TOKENS)))
    assert set(truth) == set(sites)
    assert max(difference(ours[site], truth[site]) for site in sites) < TOLERANCE


def test_the_same_bits_in_company_and_after_forks() -> None:
    engine, sites = Engine(decoder(NAME)), ["S", ATTN + "hook_kv_latent", ATTN + "hook_rot_k", ATTN + "hook_pattern"]
    alone = Engine(decoder(NAME), page_size=4).prompt(TOKENS).gradients((4, 7), sites)
    first, other = engine.prompts([TOKENS, TOKENS[:31]])
    other.force(TOKENS[31:])
    for branch in (first, other, first.fork(at=9)[0].force(TOKENS[9:])):
        found = branch.gradients((4, 7), sites)
        assert found.certified and found.value == alone.value
        assert all(torch.equal(found[site], alone[site]) for site in alone)
