"""Gradients through edits: added vectors let them pass, replaced rows stop them, projections project them."""

import pytest
import torch
from torch import Tensor

from replaylens import errors
from replaylens.engine.gradients.backward import through_edits
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from tests.engine.gradients.reference import difference, of_decoder
from tests.toy_model import VOCAB, engine, random_model

TOKENS = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(6)).tolist()
WIDE = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))
EDITS = {
    "add": Edit("S", "add", WIDE[0], [2, 20], [1], factor=2.0),
    "set": Edit("T", "set", WIDE[:2], [3, 4], [0]),
    "zero": Edit("C", "zero", None, slice(5, None), [0]),
    "scale": Edit("blocks.0.attn.hook_z", "scale", None, slice(3, None), factor=-0.7, heads=[1, 3]),
    "project_out": Edit("blocks.1.ln2.hook_in", "project_out", WIDE, None),
    "resample": Edit("embed.hook_out", "resample", WIDE, [1, 2, 3], seed=4),
    "queries": Edit("blocks.1.attn.hook_rot_q", "zero", None, -1),
    "keys": Edit("blocks.0.attn.k.hook_out", "set", torch.ones(2, 8), 6),
    "neurons": Edit("blocks.0.mlp.in.hook_out", "add", torch.ones(48), None),
    "norm": Edit("blocks.0.ln1.hook_out", "zero", None, [9]),
}


def metric(logits: Tensor) -> Tensor:
    return logits[3] - logits[8]


@pytest.mark.parametrize("what", [*EDITS, "all"])
def test_agrees_with_autograd(what: str) -> None:
    """At every site that has a gradient at all. The stream before a stopped gradient has the zeros that autograd gives it."""
    edits = list(EDITS.values()) if what == "all" else [EDITS[what]]
    subject = engine(random_model(gain=4.0))
    sites = [site for site in subject.sites.in_order() if site not in subject.sites.read_only]
    ours = subject.prompt(TOKENS, edits=edits).gradients(metric, sites)
    truth = of_decoder(random_model(gain=4.0).double(), TOKENS, metric, place_all(edits, subject.sites, len(TOKENS)))
    for site, expected in truth.items():
        if expected.any():
            assert difference(ours[site], expected) < 1e-5, site
        else:
            assert not ours[site].any()


def test_where_the_gradient_stops() -> None:
    """A replaced row has a gradient of its own, after the edit, and passes none on."""
    subject, site = engine(), "blocks.1.hook_in"
    ours = subject.prompt(TOKENS, edits=[Edit(site, "zero")]).gradients(metric, [site, "blocks.0.hook_out"])
    assert ours[site].any() and not ours["blocks.0.hook_out"].any()


def test_rows_without_the_edit_are_left_alone() -> None:
    g, x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    edits = place_all([Edit("S", "add", WIDE[0], [1], [0]), Edit("S", "zero", None, [1], [0])], engine().sites, 4)
    assert torch.equal(through_edits(g, x, edits[:1]), g)
    stopped = through_edits(g, x, edits)
    assert not stopped[1].any() and torch.equal(stopped[[0, 2, 3]], g[[0, 2, 3]])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("blocks.1.attn.hook_z", "zero", None, None, heads=[1, 3]),
        Edit("S", "add", WIDE[0], None, [1], keep_norm=True),
        Edit("S", "add", WIDE[0], None, [1], when=WIDE[1]),
        Edit("S", "add", WIDE[0], None, [1], keep_norm=True, when=WIDE[1]),
        Edit("S", "project_out", WIDE[:2], None, [1], when=WIDE[2]),
        Edit("blocks.1.attn.hook_z", "add", WIDE[0].view(4, 8), None, heads=[1, 3], keep_norm=True),
    ],
)
def test_edits_of_heads_lengths_and_conditions(edit: Edit) -> None:
    """Edits that depend on the value they change: the gradient includes that."""
    subject = engine(random_model(gain=4.0))
    ours = subject.prompt(TOKENS, edits=[edit]).gradients(metric, "STC")
    truth = of_decoder(random_model(gain=4.0).double(), TOKENS, metric, place_all([edit], subject.sites, len(TOKENS)))
    assert max(difference(ours[site], truth[site]) for site in ours) < 1e-5


def test_no_gradient_through_an_edited_pattern() -> None:
    branch = engine().prompt(TOKENS, edits=[Edit("blocks.0.attn.hook_pattern", "mask", None, [5], keys=[2])])
    with pytest.raises(errors.NoGradient, match="hook_pattern"):
        branch.gradients(metric, "S")


def test_a_row_that_the_condition_leaves_alone_keeps_its_gradient() -> None:
    """Also where the edit would have no derivative: here it would shrink the row to nothing."""
    subject = engine()
    row = subject.prompt(TOKENS, sites="S").activations["blocks.1.hook_in"][5]
    edit = Edit("blocks.1.hook_in", "add", -row, keep_norm=True, when=-row, positions=[5])
    plain, edited = (subject.prompt(TOKENS, edits=edits).gradients(metric, "S") for edits in ([], [edit]))
    assert all(torch.equal(plain[site], edited[site]) for site in plain)
    turned = Edit("blocks.1.hook_in", "add", row, keep_norm=True, when=row.flip(0), positions=slice(4, None))
    other = subject.prompt(TOKENS, edits=[turned]).gradients(metric, "S")
    assert any(not torch.equal(plain[site], other[site]) for site in plain), "control"


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with norms"])
def test_an_edit_after_clipping_does_not_open_what_was_cut_off(norm: bool) -> None:
    """Which queries are at the bound is decided before the edit."""
    changes = dict(clip_qkv=0.4, qk_norm=norm)
    site = "blocks.0.attn.q_norm.hook_out" if norm else "blocks.0.attn.q.hook_out"
    edits, subject = [Edit(site, "add", torch.full((4, 8), -0.3))], engine(random_model(gain=4.0, **changes))
    ours = subject.prompt(TOKENS, edits=edits).gradients(metric, "S")
    truth = of_decoder(random_model(gain=4.0, **changes).double(), TOKENS, metric, place_all(edits, subject.sites, len(TOKENS)))
    assert max(difference(ours[name], truth[name]) for name in ours if truth[name].any()) < 1e-5


def test_a_bfloat16_condition_holds_where_it_held_in_the_pass() -> None:
    """Rounded to bfloat16, the direction is at a right angle to the row, so that the pass leaves the row alone and its gradient
    passes. Control: in float32 the condition holds, the row is zeroed, and the gradient stops."""
    site, g, x = "blocks.0.hook_in", torch.zeros(1, 32), torch.zeros(1, 32)
    g[0, :2], x[0, 0], x[0, 1] = 1.0, 1.0, -1.0
    direction = torch.zeros(32)
    direction[0], direction[1] = 1.001, 1.0
    (edit,) = place_all([Edit(site, "zero", when=direction)], engine().sites, 1)
    for dtype, passes in ((torch.bfloat16, True), (torch.float32, False)):
        row = x.to(dtype)
        assert torch.equal(edit.apply(row, [0]), row) == passes, "what the pass does"
        assert torch.equal(through_edits(g, row, [edit]), g) == passes
        assert passes or not through_edits(g, row, [edit]).any()


def test_a_bfloat16_direction_is_projected_out_as_the_pass_rounds_it() -> None:
    draw = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(4))
    (edit,) = place_all([Edit("blocks.0.hook_in", "project_out", WIDE[0])], engine().sites, 1)
    rounded = edit.vectors[0].bfloat16().float()
    found = through_edits(draw[0], draw[1].bfloat16(), [edit])
    torch.testing.assert_close(found, draw[0] - (draw[0] @ rounded)[:, None] * rounded, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found, draw[0] - (draw[0] @ edit.vectors[0])[:, None] * edit.vectors[0], rtol=1e-6, atol=1e-5)
