"""Gradients agree with PyTorch's autograd for every family, at every site, and a wrong derivative is detected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import errors
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import SWIGLU_LIMIT, Activation, MixtureConfig, Routing
from replaylens.engine.model.ops import AttentionSpec, clamped_swiglu
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from replaylens.engine.serving.branch import Branch
from replaylens.gradients import derivatives
from replaylens.gradients.backward import RULES, through_edits
from replaylens.gradients.branches import tape as tape_of_branch
from replaylens.gradients.derivatives import HostProducts
from replaylens.gradients.gradients import Divergence, Gradients, LogitDifference, LogProbability, derivative
from replaylens.weights.loading import load
from tests.engine.passes.packed import sequences
from tests.engine.reference import decoder, random_decoder
from tests.families import ALIKE, LATENT_NAMES, NAMES, hugging_face
from tests.gradients.reference import difference, of_decoder, of_hugging_face
from tests.toy_model import VOCAB, engine, random_model

TOLERANCE = 1e-5
"""relative, of a site's whole gradient in float32; the promise is 1e-4"""
TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(3)).tolist()
families = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in NAMES])


def metric(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[5] - 0.3 * logits[7]


def errors_against_hugging_face(name: str) -> dict[str, float]:
    """The relative error at S, T, C and the pattern of every layer."""
    subject = Engine.load(hugging_face(name), check=False)
    layers = subject.config.num_layers
    of_letter = {letter: subject.sites.per_layer(letter) for letter in "STC"}
    of_letter["P"] = [f"blocks.{layer}.attn.hook_pattern" for layer in range(layers)]
    ours = subject.prompt(TOKENS).gradients(metric, [site for sites in of_letter.values() for site in sites])
    theirs = of_hugging_face(hugging_face(name), TOKENS, metric)
    return {key: difference(ours[of_letter[key[0]][int(key[1:])]], value) for key, value in theirs.items()}


@families
def test_agrees_with_hugging_face(name: str) -> None:
    found = errors_against_hugging_face(name)
    assert len(found) == 4 * 3 + 1 and max(found.values()) < TOLERANCE


@families
def test_agrees_with_float64_at_every_site(name: str) -> None:
    """Against autograd through our decoder in float64: all sites but the patterns, which the test above covers."""
    subject = Engine.load(hugging_face(name), check=False)
    read_only = subject.sites.read_only
    sites = [site for site in subject.sites.in_order() if site not in read_only and not site.endswith("hook_pattern")]
    ours = subject.prompt(TOKENS).gradients(metric, sites)
    truth = of_decoder(load(hugging_face(name)).double(), TOKENS, metric)
    assert set(ours) == set(truth) == set(sites)
    assert max(difference(ours[site], truth[site]) for site in sites) < TOLERANCE


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_every_activation(kind: Activation, gated: bool) -> None:
    """Also for combinations that no family has. Without rotation, with partial rotation and with one key head."""
    changes: dict[str, Any] = dict(activation=kind, gated_mlp=gated, rotary_dim=4 if gated else 0, num_kv_heads=1)
    model, path = random_model(gain=4.0, **changes), [t % VOCAB for t in TOKENS]
    ours = engine(model).prompt(path).gradients(metric, "STC")
    truth = of_decoder(random_model(gain=4.0, **changes).double(), path, metric)
    assert max(difference(ours[site], truth[site]) for site in ours) < TOLERANCE


def test_gated_attention_with_sinks() -> None:
    """No family has both: the gate's gradient needs what attention reads, without the sinks' share."""
    changes: dict[str, Any] = dict(attn_gate=True, sinks=True, windows=(5, 0))
    path = [t % VOCAB for t in TOKENS]
    ours = engine(random_model(gain=4.0, **changes)).prompt(path).gradients(metric, ["S", "blocks.0.attn.hook_gate"])
    truth = of_decoder(random_model(gain=4.0, **changes).double(), path, metric)
    assert max(difference(ours[site], truth[site]) for site in ours) < TOLERANCE


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 130])
def test_every_length(length: int, window: int) -> None:
    """One row; the border between the two orders of a product; several blocks of rows, with and without a window."""
    path = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = engine(random_model(windows=(window, 0))).prompt(path).gradients(metric, "STC")
    truth = of_decoder(random_model(windows=(window, 0)).double(), path, metric)
    assert max(difference(ours[site], truth[site]) for site in ours if truth[site].any()) < TOLERANCE


def _uncapped(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, x, cap: g


def _unturned(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, rotary: g


def _unwindowed(real: Callable[..., Any]) -> Callable[..., Any]:
    def changed(g: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *more: Any) -> Any:
        return real(g, q, k, v, AttentionSpec(spec.layer, spec.scale, spec.softcap, 0), *more)

    return changed


WRONG = {
    "no soft cap": ("gemma2", derivatives, "through_softcap", _uncapped),
    "rotation not undone": ("llama", derivatives, "through_rotary", _unturned),
    "no window": ("mistral", derivatives, "through_attention", _unwindowed),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_derivative_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one derivative is wrong, and the comparison with Hugging Face says so."""
    name, module, function, wrong = WRONG[what]
    monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    assert max(errors_against_hugging_face(name).values()) > 1e-3


# ---- bits ------------------------------------------------------------------------------------------------------------
# The same bits alone, in company, after forks and preemption, on any number of threads. Everything by torch.equal.

METRIC = (3, 8)
SITES = ["S", "T", "C", "blocks.0.attn.hook_pattern", "blocks.1.attn.q.hook_out", "blocks.1.mlp.out.hook_in", "embed.hook_out"]


def path(length: int = 40, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def truth(tokens: list[int], subject: Engine | None = None, **options: Any) -> Gradients:
    """Of a prompt, alone in a fresh engine."""
    return (subject or engine()).prompt(tokens, **options).gradients(METRIC, SITES)


def same(a: Gradients, b: Gradients) -> bool:
    assert list(a) == list(b) and a.certified and b.certified
    return a.value == b.value and all(torch.equal(a[s], b[s]) and torch.equal(a.activations[s], b.activations[s]) for s in a)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_in_company_and_after_forks() -> None:
    """A prompt among others, a fork, a fork that was forced, a fork of a longer branch, and a generated path."""
    tokens, subject = path(), engine()
    expected = truth(tokens)
    alone, *others = subject.prompts([tokens, path(9, 1), path(60, 2), tokens[:30]])
    assert same(alone.gradients(METRIC, SITES), expected)
    subject.generate(others[:2], 5)
    longer = others[2].force(tokens[30:]).force(path(3, 4))
    for branch in (alone.fork()[0], others[2].fork(at=40)[0], longer.rollback(to=40), alone.fork(at=7)[0].force(tokens[7:])):
        assert same(branch.gradients(METRIC, SITES), expected)
    generated = alone.generate(6)
    assert same(generated.gradients(METRIC, SITES), truth(generated.tokens))


def test_while_other_threads_generate() -> None:
    subject, expected = engine(), truth(path())
    root = subject.prompt(path())
    others = list(subject.prompts([path(12, seed) for seed in range(4)]))
    worker = threading.Thread(target=lambda: subject.generate(others, 40))
    worker.start()
    found = [root.gradients(METRIC, SITES) for _ in range(3)]
    worker.join()
    assert all(same(each, expected) for each in found)


@pytest.mark.parametrize("options", [dict(page_size=16), dict(max_rows=16), dict(cache_tokens=64)])
def test_any_engine_options(options: dict[str, int]) -> None:
    """Also where the branch had to give up its pages to others."""
    subject = engine(**options)
    branch = subject.prompt(path())
    pushed = subject.prompt(path(60, 5)) if "cache_tokens" in options else None
    assert pushed is None or branch.lane.computed < branch.length  # preempted
    assert same(branch.gradients(METRIC, SITES), truth(path()))


def test_on_any_number_of_threads() -> None:
    """On a model and a path that are large enough for libraries to divide the work."""
    model = random_model(gain=4.0, d_model=128, d_mlp=512, d_head=32, max_positions=512)
    tokens = path(200)
    with threads(1):
        expected = truth(tokens, engine(model))
    for count in (2, 3, 4):
        with threads(count):
            assert same(truth(tokens, engine(model)), expected)
            assert torch.get_num_threads() == count


@pytest.mark.parametrize("where", ["prompt", "fork"])
def test_with_edits(where: str) -> None:
    """Edits of a prompt and of a fork, at several sites."""
    edits = [
        Edit("S", "add", torch.ones(32), [3, 9], layers=[1]),
        Edit("T", "zero", None, slice(5, 7), layers=[0]),
        Edit("C", "project_out", torch.arange(32.0), -1, layers=[0]),
    ]
    subject = engine()
    branch = subject.prompt(path(), edits=edits) if where == "prompt" else subject.prompt(path()).fork(edits=edits)[0]
    expected = truth(path(), edits=edits)
    assert same(branch.gradients(METRIC, SITES), expected)
    assert not same(truth(path()), expected)


def test_every_metric_keeps_the_promise() -> None:
    subject, other = engine(), engine()
    a, b = subject.prompts([path(), path(11, 1)])
    c, d = other.prompt(path()), other.prompt(path(11, 1))
    assert same(a.gradients(4, "S"), c.gradients(4, "S"))
    assert same(a.gradients(b, "S"), c.gradients(d.fork()[0], "S"))


def test_values_are_the_captured_rows() -> None:
    """The gradient is taken at the bits that captures, forks and dumps have."""
    branch = engine().prompt(path(), sites=[*SITES, "unembed.hook_out"], edits=[Edit("T", "zero", None, 4)])
    found = branch.gradients(METRIC)
    for site in found:
        captured = branch.activations[site]
        assert torch.equal(found.activations[site], captured[..., :40] if site.endswith("pattern") else captured)


def test_one_head() -> None:
    """Where folding heads copies nothing, the values of the pass must not change: a tape can be used again."""
    branch = engine(random_model(num_heads=1, num_kv_heads=1, d_head=32)).prompt(path(), sites=SITES)
    tape = tape_of_branch(branch, tuple(branch.gradients(METRIC)))
    first, again = (tape.gradients(lambda logits: logits[3] - logits[8], {}, True) for _ in range(2))
    assert same(first, again) and torch.equal(
        tape.value("blocks.1.attn.q.hook_out"), branch.activations["blocks.1.attn.q.hook_out"]
    )


def test_control_the_comparison_sees_rounding() -> None:
    """Negative control: autograd through the library's ops agrees to 1e-5, but has other bits."""
    ours: Gradients = truth(path())
    theirs = of_decoder(random_model(), path(), lambda logits: logits[3] - logits[8])
    site = "blocks.0.hook_in"
    assert difference(ours[site], theirs[site]) < 1e-5 and not torch.equal(ours[site], theirs[site])


def test_control_company_changes_the_bits_of_a_product() -> None:
    """Negative control: products in the company of other rows do not keep the bits, which is why a path is computed alone."""
    g = torch.randn(40, 1536, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(576, 1536, generator=torch.Generator().manual_seed(1))
    with threads(1):
        alone, together = torch.mm(weight, g[:1].t()).t(), torch.mm(weight, g.t()).t()[:1]
    assert not torch.equal(alone, together)


def test_reading_changes_nothing() -> None:
    subject = engine(record=True)
    branch: Branch = subject.prompt(path(), sites="S")
    before, events, free = branch.kv(), len(subject.trace.events), subject.runner.pool.num_free
    branch.gradients(METRIC, "STC")
    assert torch.equal(branch.kv(), before)
    assert (len(subject.trace.events), subject.runner.pool.num_free) == (events, free)
    subject.check_integrity()


# ---- edits -----------------------------------------------------------------------------------------------------------
# Gradients through edits: added vectors let them pass, replaced rows stop them, projections project them.

TOKENS_OF_EDITS = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(6)).tolist()
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


def metric_of_edits(logits: Tensor) -> Tensor:
    return logits[3] - logits[8]


@pytest.mark.parametrize("what", [*EDITS, "all"])
def test_agrees_with_autograd(what: str) -> None:
    """At every site that has a gradient at all. The stream before a stopped gradient has the zeros that autograd gives it."""
    edits = list(EDITS.values()) if what == "all" else [EDITS[what]]
    subject = engine(random_model(gain=4.0))
    sites = [site for site in subject.sites.in_order() if site not in subject.sites.read_only]
    ours = subject.prompt(TOKENS_OF_EDITS, edits=edits).gradients(metric_of_edits, sites)
    truth = of_decoder(
        random_model(gain=4.0).double(), TOKENS_OF_EDITS, metric_of_edits, place_all(edits, subject.sites, len(TOKENS_OF_EDITS))
    )
    for site, expected in truth.items():
        if expected.any():
            assert difference(ours[site], expected) < 1e-5, site
        else:
            assert not ours[site].any()


def test_where_the_gradient_stops() -> None:
    """A replaced row has a gradient of its own, after the edit, and passes none on."""
    subject, site = engine(), "blocks.1.hook_in"
    ours = subject.prompt(TOKENS_OF_EDITS, edits=[Edit(site, "zero")]).gradients(metric_of_edits, [site, "blocks.0.hook_out"])
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
        Edit("S", "add", WIDE[0], None, [1], factor=0.7, match_norm=True),
        Edit("S", "add", WIDE[0], None, [1], match_norm=True, when=WIDE[1], above=0.4),
        Edit("blocks.1.attn.hook_z", "add", WIDE[0].view(4, 8), None, heads=[1, 3], match_norm=True),
        Edit("S", "add", WIDE[0], None, [1], when=WIDE[1]),
        Edit("S", "add", WIDE[0], None, [1], keep_norm=True, when=WIDE[1]),
        Edit("S", "project_out", WIDE[:2], None, [1], when=WIDE[2]),
        Edit("blocks.1.attn.hook_z", "add", WIDE[0].view(4, 8), None, heads=[1, 3], keep_norm=True),
    ],
)
def test_edits_of_heads_lengths_and_conditions(edit: Edit) -> None:
    """Edits that depend on the value they change: the gradient includes that."""
    subject = engine(random_model(gain=4.0))
    ours = subject.prompt(TOKENS_OF_EDITS, edits=[edit]).gradients(metric_of_edits, "STC")
    truth = of_decoder(
        random_model(gain=4.0).double(),
        TOKENS_OF_EDITS,
        metric_of_edits,
        place_all([edit], subject.sites, len(TOKENS_OF_EDITS)),
    )
    assert max(difference(ours[site], truth[site]) for site in ours) < 1e-5


def test_no_gradient_through_an_edited_pattern() -> None:
    branch = engine().prompt(TOKENS_OF_EDITS, edits=[Edit("blocks.0.attn.hook_pattern", "mask", None, [5], keys=[2])])
    with pytest.raises(errors.NoGradient, match="hook_pattern"):
        branch.gradients(metric_of_edits, "S")


def test_a_row_that_the_condition_leaves_alone_keeps_its_gradient() -> None:
    """Also where the edit would have no derivative: here it would shrink the row to nothing."""
    subject = engine()
    row = subject.prompt(TOKENS_OF_EDITS, sites="S").activations["blocks.1.hook_in"][5]
    edit = Edit("blocks.1.hook_in", "add", -row, keep_norm=True, when=-row, positions=[5])
    plain, edited = (subject.prompt(TOKENS_OF_EDITS, edits=edits).gradients(metric_of_edits, "S") for edits in ([], [edit]))
    assert all(torch.equal(plain[site], edited[site]) for site in plain)
    turned = Edit("blocks.1.hook_in", "add", row, keep_norm=True, when=row.flip(0), positions=slice(4, None))
    other = subject.prompt(TOKENS_OF_EDITS, edits=[turned]).gradients(metric_of_edits, "S")
    assert any(not torch.equal(plain[site], other[site]) for site in plain), "control"


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with norms"])
def test_an_edit_after_clipping_does_not_open_what_was_cut_off(norm: bool) -> None:
    """Which queries are at the bound is decided before the edit."""
    changes = dict(clip_qkv=0.4, qk_norm=norm)
    site = "blocks.0.attn.q_norm.hook_out" if norm else "blocks.0.attn.q.hook_out"
    edits, subject = [Edit(site, "add", torch.full((4, 8), -0.3))], engine(random_model(gain=4.0, **changes))
    ours = subject.prompt(TOKENS_OF_EDITS, edits=edits).gradients(metric_of_edits, "S")
    truth = of_decoder(
        random_model(gain=4.0, **changes).double(),
        TOKENS_OF_EDITS,
        metric_of_edits,
        place_all(edits, subject.sites, len(TOKENS_OF_EDITS)),
    )
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


# ---- latent ----------------------------------------------------------------------------------------------------------
# Gradients through latent attention. `tests/weights/test_families.py` compares every site with float64.

NAME, ATTN = "deepseek-v3", "blocks.0.attn."
TOKENS_OF_LATENT = sequences((70,), seed=8)[0].tolist()  # more than the rows that are computed together
EDITS_OF_LATENT = [
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
def test_agrees_with_hugging_face_of_latent(name: str) -> None:
    """At S, T, C and the pattern of every layer."""
    found = errors_against_hugging_face(name)
    letters = "SP" if name == "minicpm3" else "STCP"  # its T and C are those before the factor on what is added
    assert len(found) == 4 * 2 + 1
    assert max(error for key, error in found.items() if key[0] in letters) < TOLERANCE


def _unchanged(g: Tensor, *_: Any) -> Tensor:
    return g


@pytest.mark.parametrize("function", ["through_rotary", "through_norm"])
def test_a_wrong_derivative_is_found_of_latent(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    wrong: Callable[..., Tensor] = _unchanged
    monkeypatch.setattr(derivatives, function, wrong)
    assert max(errors_against_hugging_face(NAME).values()) > 1e-3


@pytest.mark.parametrize(
    "edits", [*([edit] for edit in EDITS_OF_LATENT), EDITS_OF_LATENT], ids=[*(edit.site for edit in EDITS_OF_LATENT), "all"]
)
def test_edits_agree_with_autograd(edits: list[Edit]) -> None:
    subject = Engine(decoder(NAME))
    sites = [s for s in subject.sites.in_order() if s not in subject.sites.read_only and not s.endswith("pattern")]
    ours = subject.prompt(TOKENS_OF_LATENT, edits=edits).gradients(metric, sites)
    truth = of_decoder(
        load(hugging_face(NAME)).double(), TOKENS_OF_LATENT, metric, place_all(edits, subject.sites, len(TOKENS_OF_LATENT))
    )
    assert set(truth) == set(sites)
    assert max(difference(ours[site], truth[site]) for site in sites) < TOLERANCE


def test_the_same_bits_in_company_and_after_forks() -> None:
    engine, sites = Engine(decoder(NAME)), ["S", ATTN + "hook_kv_latent", ATTN + "hook_rot_k", ATTN + "hook_pattern"]
    alone = Engine(decoder(NAME), page_size=4).prompt(TOKENS_OF_LATENT).gradients((4, 7), sites)
    first, other = engine.prompts([TOKENS_OF_LATENT, TOKENS_OF_LATENT[:31]])
    other.force(TOKENS_OF_LATENT[31:])
    for branch in (first, other, first.fork(at=9)[0].force(TOKENS_OF_LATENT[9:])):
        found = branch.gradients((4, 7), sites)
        assert found.certified and found.value == alone.value
        assert all(torch.equal(found[site], alone[site]) for site in alone)


# ---- metric ----------------------------------------------------------------------------------------------------------
# Metrics, what they return, and the errors of everything that has no gradient.

PATH = list(range(1, 12))


def test_metrics_are_what_their_names_say() -> None:
    subject = engine()
    a, b = subject.prompts([PATH, PATH[:4]])
    mine, other = tape_of_branch(a, ()).logits, tape_of_branch(b, ()).logits
    p, q = other.softmax(-1), mine.softmax(-1)
    expected = {
        LogitDifference(3, 8): mine[3] - mine[8],
        LogProbability(5): mine.log_softmax(-1)[5],
        (3, 8): mine[3] - mine[8],
        5: mine.log_softmax(-1)[5],
        b: (p * (p.log() - q.log())).sum(),
        Divergence(other): (p * (p.log() - q.log())).sum(),
    }
    for metric, value in expected.items():
        assert a.gradients(metric, "S").value == pytest.approx(float(value), rel=1e-5)


def test_derivatives_in_closed_form() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    other = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    one = torch.nn.functional.one_hot(torch.tensor([3, 8]), VOCAB).float()
    expected = {
        LogitDifference(3, 8): one[0] - one[1],
        LogProbability(3): one[0] - logits.softmax(-1),
        Divergence(other): logits.softmax(-1) - other.softmax(-1),
    }
    for metric, slope in expected.items():
        torch.testing.assert_close(derivative(metric.function(int), logits)[1], slope)


def test_divergence_from_itself_has_no_slope() -> None:
    branch = engine().prompt(PATH)
    found = branch.gradients(branch.fork()[0], "S")
    assert found.value == pytest.approx(0.0, abs=1e-6) and max(float(g.abs().max()) for g in found.values()) < 1e-5


def test_tokens_as_text() -> None:
    subject = Engine.load("coin-plain")
    branch = subject.prompt("A coin's state is heads. Alice flips. What's the state? A:", sites="S")
    found = branch.gradients((" tails", " heads"))
    ids = [subject.text.encode(word, special=False)[0] for word in (" tails", " heads")]
    assert torch.equal(found["blocks.0.hook_in"], branch.gradients(LogitDifference(*ids))["blocks.0.hook_in"])
    assert found.value > 0 and list(found) == subject.sites.per_layer("S")


def test_the_mapping() -> None:
    branch = engine().prompt(PATH)
    found = branch.gradients(LogitDifference(3, 8), ["blocks.1.hook_resid_pre", "blocks.0.attn.hook_pattern"])
    assert list(found) == ["blocks.0.attn.hook_pattern", "blocks.1.hook_in"] and found.tokens == tuple(PATH)
    assert torch.equal(found["blocks.1.hook_resid_pre"], found["blocks.1.hook_in"])
    assert found["blocks.0.attn.hook_pattern"].shape == (11, 4, 11)
    expected = (found["blocks.1.hook_in"] * found.activations["blocks.1.hook_in"]).sum(-1)
    torch.testing.assert_close(found.times_input()["blocks.1.hook_in"], expected)
    found["blocks.1.hook_in"].zero_()  # a copy
    assert found["blocks.1.hook_in"].any()
    with pytest.raises(errors.UnknownSite, match=r"No gradient at site 'blocks\.0\.hook_in'"):
        found["blocks.0.hook_in"]


def test_certified() -> None:
    subject = engine()
    branch = subject.prompt(PATH)
    fast = subject.prompt(PATH).generate(2, deterministic=False)
    assert branch.gradients(LogProbability(3), "S").certified
    assert not branch.gradients(lambda logits: logits[3], "S").certified
    assert not fast.gradients(LogProbability(3), "S").certified
    assert not branch.gradients(fast, "S").certified


def test_within_inference_mode() -> None:
    branch = engine().prompt(PATH)
    expected = branch.gradients(LogProbability(3), "S")
    with torch.inference_mode():
        inside = branch.gradients(LogProbability(3), "S")
    assert all(torch.equal(inside[site], expected[site]) for site in expected)
    assert not any(x.is_inference() or x.requires_grad for x in inside.values())


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "three tokens": ((1, 2, 3), "S", errors.BadRequest, "a pair of tokens"),
    "nothing": (None, "S", errors.BadRequest, "Invalid metric=None"),
    "a class": (LogProbability, "S", errors.BadRequest, "Invalid metric="),
    "a vector": (lambda logits: logits, "S", errors.BadRequest, r"shape \(61,\)"),
    "a number": (lambda logits: 1.0, "S", errors.BadRequest, "returned 1.0"),
    "detached": (lambda logits: logits[3].detach(), "S", errors.BadRequest, "does not depend on the logits"),
    "not finite": (lambda logits: logits[3] / 0, "S", errors.BadRequest, "inf"),
    "other logits": (Divergence(torch.zeros(5)), "S", errors.BadRequest, "5 logits, but the model has 61"),
    "not logits": (Divergence("heads"), "S", errors.BadRequest, "Give a branch"),
    "an unknown token": (LogProbability(99), "S", errors.BadRequest, "Token 99"),
    "Z": (LogProbability(3), "SZ", errors.NoGradient, "logit lens"),
    "a value beside the pass": (LogProbability(3), ["blocks.0.ln1.hook_scale"], errors.NoGradient, "hook_scale"),
    "one reader of several": (LogProbability(3), ["blocks.0.attn.q.hook_in"], errors.NoGradient, "q.hook_in"),
    "no sites": (LogProbability(3), None, errors.BadRequest, "Name some"),
    "a number of sites": (LogProbability(3), 5, errors.BadRequest, "Invalid sites=5"),
    "an unknown site": (LogProbability(3), "blocks.7.hook_in", errors.UnknownSite, "Nearest"),
}


@pytest.mark.parametrize("what", BAD)
def test_errors(what: str) -> None:
    metric, sites, error, text = BAD[what]
    with pytest.raises(error, match=text):
        engine().prompt(PATH).gradients(metric, sites)


def test_the_other_branch_of_a_divergence_is_only_read() -> None:
    """It may have hook functions and edited patterns."""
    subject = engine()
    branch, halved = subject.prompt(PATH), ("blocks.0.hook_in", lambda value, hook: value / 2)
    cut = Edit("blocks.0.attn.hook_pattern", "mask", positions=5, keys=2)
    for other, certified in (
        (subject.prompt(PATH, edits=[cut]), True),
        (subject.prompt(PATH, hooks=[halved]), False),
        (subject.prompt(PATH[::-1]), True),
    ):
        found = branch.gradients(other, "S")
        wanted = branch.gradients(Divergence(other.logits()), "S")
        assert found.value > 0 and found.certified is certified
        assert all(torch.equal(found[site], wanted[site]) for site in wanted)


def test_captured_sites_without_a_gradient_are_left_out() -> None:
    branch = engine().prompt(PATH, sites=["blocks.0.ln1.hook_scale", "blocks.1.hook_in"])
    assert list(branch.gradients(LogProbability(3))) == ["blocks.1.hook_in"]


def test_what_has_no_gradient() -> None:
    """Hook functions, Thinking-States models, released branches, and calls from within a pass."""
    subject = engine()
    hooked = subject.prompt(PATH, hooks=[("blocks.0.hook_in", lambda value, hook: value)])
    with pytest.raises(errors.NoGradient, match="hook functions"):
        hooked.gradients(LogProbability(3), "S")
    thinking = Engine.load("coin-thinking").prompt("A coin's state is heads. Alice flips.")
    with pytest.raises(errors.NoGradient, match="thoughts"):
        thinking.gradients(LogProbability(3), "S")
    released = subject.prompt(PATH)
    released.release()
    with pytest.raises(errors.ClosedBranch):
        released.gradients(LogProbability(3), "S")


def test_within_a_pass() -> None:
    subject = engine()
    branch = subject.prompt(PATH)

    def hook(value: Any, context: Any) -> None:
        branch.gradients(LogProbability(3), "S")

    with pytest.raises(errors.BadRequest, match="during a pass"):
        subject.prompt(PATH, hooks=[("blocks.0.hook_in", hook)])


def test_a_name_that_goes_in_comes_out() -> None:
    found = engine().prompt(PATH).gradients((3, 8), ["blocks.1.attn.hook_in", "blocks.0.hook_resid_post"])
    assert torch.equal(found["blocks.1.attn.hook_in"], found["blocks.1.ln1.hook_out"])
    assert found["blocks.0.hook_resid_post"].shape == (len(PATH), 32) and "2 sites" in repr(found)


# ---- mixtures --------------------------------------------------------------------------------------------------------
# Gradients through mixtures of experts: transformers' autograd, edits of routing, and wrong derivatives that are detected.

TOKENS_OF_MIXTURES = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(6)).tolist()
GATE = "blocks.0.mlp.gate.hook_out"
NAMES_OF_MIXTURES = [
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe-clipped",
    "phimoe",
    "flex-olmo",
    "glm4-moe",
    "deepseek-v3-groups",
    "gpt-oss",
]


@pytest.mark.parametrize("name", NAMES_OF_MIXTURES)
def test_agrees_with_hugging_face_of_mixtures(name: str) -> None:
    """S, T, C and the patterns of every layer. The promise is 1e-4."""
    assert max(errors_against_hugging_face(name).values()) < 1e-5


def test_clamped_gates_pass_nothing_beyond_their_bounds() -> None:
    """GPT-OSS's activation, on both sides of its bounds; of tiny models, no value comes near them."""
    wide = (torch.randn(9, 16, generator=torch.Generator().manual_seed(5)) * 6).requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    assert (gate > SWIGLU_LIMIT).any() and (gate < -SWIGLU_LIMIT).any() and (up.abs() > SWIGLU_LIMIT).any()
    g = torch.randn(9, 8, generator=torch.Generator().manual_seed(6))
    (truth,) = torch.autograd.grad((clamped_swiglu(gate, up) * g).sum(), wide)
    found = derivatives.through_gate(g, wide.detach(), "clamped_swiglu", True, HostProducts(engine().runner.products))
    assert difference(found, truth) < 1e-6 and torch.equal(found == 0, truth == 0)


def decoder_of_mixtures(**routing: Any) -> Any:
    """Two layers, the first with experts and a shared one: every row matters."""
    config = random_model(gain=4.0).config
    mixed = MixtureConfig(6, 24, Routing(2, **routing), layers=(True, False), d_shared=16, shared_gate=True)
    return random_decoder(type(config)(**{**vars(config), "mixture": mixed}))


EDITS_OF_MIXTURES: dict[str, list[Edit]] = {
    "reweighted": [Edit(GATE, "reweight", experts=[1, 4], factor=0.3)],
    "forced": [Edit(GATE, "force", experts=[5], positions=slice(4, None))],
    "forbidden": [Edit(GATE, "forbid", experts=[0, 2])],
    "forbidden and forced": [Edit(GATE, "forbid", experts=[0]), Edit(GATE, "force", experts=[3, 5], positions=[2, 7])],
    "other logits": [Edit(GATE, "add", torch.linspace(-1, 1, 6), positions=[1, 3])],
    "a row of weights": [Edit("blocks.0.mlp.gate.hook_expert_weights", "set", torch.full((6,), 0.25), positions=[3])],
    "an output": [Edit("blocks.0.mlp.experts.hook_out", "zero", positions=[5])],
}


@pytest.mark.parametrize("what", EDITS_OF_MIXTURES)
def test_agrees_with_autograd_under_edits(what: str) -> None:
    model, edits = decoder_of_mixtures(), EDITS_OF_MIXTURES[what]
    subject = Engine(model.requires_grad_(False))
    sites = [site for site in subject.sites.in_order() if site not in subject.sites.read_only and "choice" not in site]
    sites = [site for site in sites if not site.endswith("hook_pattern")]
    ours = subject.prompt(TOKENS_OF_MIXTURES, edits=edits).gradients(metric, sites)
    truth = of_decoder(
        decoder_of_mixtures().double(), TOKENS_OF_MIXTURES, metric, place_all(edits, subject.sites, len(TOKENS_OF_MIXTURES))
    )
    assert ours.certified is False and set(sites) <= set(truth)
    assert max(difference(ours[site], truth[site]) for site in sites if truth[site].any()) < 1e-5
    plain = subject.prompt(TOKENS_OF_MIXTURES).gradients(metric, sites)
    assert difference(plain[GATE], truth[GATE]) > 1e-3, "the control: the edits matter"


@pytest.mark.parametrize(
    "routing",
    [
        dict(normalised=False, scale=2.5),
        dict(kind="sigmoid", scale=0.5),
        dict(kind="sigmoid", normalised=False),
        dict(kind="sigmoid", floor=0.5),  # LFM2's is 1e-6, which would not show here
        dict(kind="sparsemixer", jitter=0.3),
    ],
)
def test_every_kind_of_weights_agrees_with_autograd(routing: dict[str, Any]) -> None:
    """Also with experts that are forbidden."""
    subject = Engine(decoder_of_mixtures(**routing).requires_grad_(False))
    for edits in ([], EDITS_OF_MIXTURES["forbidden"]):
        ours = subject.prompt(TOKENS_OF_MIXTURES, edits=edits).gradients(metric, [GATE, "blocks.0.hook_in"])
        placed = place_all(edits, subject.sites, len(TOKENS_OF_MIXTURES))
        truth = of_decoder(decoder_of_mixtures(**routing).double(), TOKENS_OF_MIXTURES, metric, placed)
        assert max(difference(ours[site], truth[site]) for site in ours) < 1e-5


def test_in_company_and_after_a_fork_the_bits_are_the_same() -> None:
    subject = Engine(decoder_of_mixtures().requires_grad_(False))
    sites = [GATE, "blocks.0.mlp.experts.hook_expert_out", "blocks.0.hook_in"]
    alone = subject.prompt(TOKENS_OF_MIXTURES).gradients((3, 8), sites)
    (fork,) = subject.prompts([[5, 6], [*TOKENS_OF_MIXTURES, 7]])[1].fork(at=len(TOKENS_OF_MIXTURES))
    again = fork.gradients((3, 8), sites)
    assert alone.certified and again.value == alone.value
    assert all(torch.equal(again[site], alone[site]) and alone[site].any() for site in sites)


def _unrouted(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: ()


def _unweighted(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda back, step, g: real(back, step, g * 2)


WRONG_OF_MIXTURES = {"constant weights": ("weigh", _unrouted), "experts that count twice": ("experts_out", _unweighted)}


@pytest.mark.parametrize("what", WRONG_OF_MIXTURES)
def test_a_wrong_derivative_is_found_of_mixtures(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, wrong = WRONG_OF_MIXTURES[what]
    monkeypatch.setitem(RULES, kind, wrong(RULES[kind]))
    assert max(errors_against_hugging_face("qwen3-moe").values()) > 1e-3
