"""What retraces a pass outside the decoder walks over its steps: a model with another wiring has right answers, or is refused.

The other wiring is what somebody would add as `docs/extending.md` says: a field of the config, and a decoder that reads it. The
engine runs it, and gradients, direct attributions and attribution graphs walk the steps of its passes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import NoGradient, UnsupportedModel
from replaylens.engine.model.config import (
    ModelConfig,
)
from replaylens.engine.model.decoder import Block, Decoder, Mlp
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.ops import SequenceOps, tapped
from replaylens.engine.model.program import Recorder
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.placing import place_all
from replaylens.gradients import backward
from replaylens.workbench import dla
from tests.engine.reference import Reference, differences, random_decoder
from tests.gradients.reference import difference, of_decoder
from tests.toy_model import SHAPE

CONFIG = ModelConfig(**SHAPE)  # type: ignore[arg-type]
PATH, OTHER, PAIR = [3, 14, 15, 9, 2, 6], [3, 14, 15, 10, 2, 6], (4, 8)


@dataclass(frozen=True)
class LoopedConfig(ModelConfig):
    """Each block goes through its MLP several times."""

    loops: int = 1


class LoopedBlock(Block):
    """The later rounds write to the stream beside `mlp.hook_out`."""

    loops = 1

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        x = super().forward(x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)
        assert isinstance(self.mlp, Mlp) and self.ln2 is not None
        for _ in range(self.loops - 1):
            x = x + ops.linear(self.mlp(ops.norm(x, self.ln2), ops, None), self.mlp.down)
        return tapped(tap, self.out_site, x)


class _Before:
    """A tap that does not see one site."""

    def __init__(self, tap: Any, site: str) -> None:
        self.tap, self.site = tap, site

    def wants(self, site: str) -> bool:
        return site != self.site and self.tap.wants(site)

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return self.tap(site, value)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tap, name)


class Looped(Decoder):
    """A decoder that reads one field more. `loops`: of a model that does not say so in its config"""

    def __init__(self, config: ModelConfig, loops: int | None = None) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(LoopedBlock(config, layer) for layer in range(config.num_layers))
        for block in self.blocks:
            block.loops = getattr(config, "loops", loops) if loops is None else loops


def looped(loops: int, told: bool = True) -> Decoder:
    model = Looped(LoopedConfig(**vars(CONFIG), loops=loops)) if told else Looped(CONFIG, loops)
    model.load_state_dict(random_decoder(CONFIG).state_dict())
    return model


# ---- a model with another wiring -------------------------------------------------------------------------------------


def test_the_engine_runs_it() -> None:
    """Tokens, KV and captured rows are those of rows one at a time; edits reach what follows them."""
    engine = Engine(looped(3), page_size=4)
    branch = engine.prompt(PATH, sites="STCZ").generate(6, drafter="ngram", window=3)
    (fork,) = branch.fork(at=4)
    truth = Reference(looped(3))
    assert differences(branch, truth) == differences(fork.force([7, 7]), truth) == []
    assert not torch.equal(branch.kv(), Engine(looped(2)).prompt(branch.tokens).kv()[: branch.lane.computed])
    grid = rl.patch(engine, PATH, OTHER, metric=PAIR, sites="S")
    assert float(grid.frame["effect"].max()) == pytest.approx(1, abs=1e-4), "the residual stream carries everything"


class _Telling(Block):
    """It passes one site more."""

    site: str

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        x = super().forward(x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)
        return tapped(tap, self.out_site, x + tapped(tap, self.site, x * x))


@pytest.mark.parametrize("name, known", [("extra.hook_out", False), ("mlp.hook_out", True)])
def test_a_site_that_the_table_lacks_is_named(name: str, known: bool) -> None:
    """When the engine is made, also where one block alone passes it. Control: a site that the table has, once more."""
    model = random_decoder(CONFIG)
    model.blocks[1].__class__, model.blocks[1].site = _Telling, f"blocks.1.{name}"
    if known:
        assert Engine(model).prompt(PATH).logits().isfinite().all()
    else:
        with pytest.raises(UnsupportedModel, match=r"passes the site blocks\.1\.extra\.hook_out, which the table of"):
            Engine(model)


# ---- gradients -------------------------------------------------------------------------------------------------------


class _Written(Block):
    """One more write to the stream, of what leaves the block: of `written`, as a function of it."""

    written: Callable[[Tensor, Any], Tensor]

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        x = super().forward(x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)
        return tapped(tap, self.out_site, x + self.written(x, ops))


WRITTEN: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "half of a cut stream": lambda x, ops: 0.5 * x.clamp(-0.3, 0.3),
    "a gate between halves": lambda x, ops: torch.cat([ops.sigmoid(x[:, ::2]) * x[:, 1::2]] * 2, dim=-1),
    "a product of parts": lambda x, ops: torch.stack([-a * b for a, b in zip(*[x.unbind(-1)] * 2, strict=True)], dim=-1),
    "a sum of both orders": lambda x, ops: (x.unflatten(-1, (2, -1)).flatten(1) + x).reshape(x.shape),
    "one number for all": lambda x, ops: x[:, :1] * x,
    "dimensions by place": lambda x, ops: torch.cat([-b * a for a, b in [x.chunk(2, -1)] * 2], -1),
    "turned and stacked": lambda x, ops: torch.stack(x.unbind(1)[::-1], 1),
    "differences and quotients": lambda x, ops: (1 - x) / (2 + x * x) - x / 4 - x.clone(),
    "turned twice": lambda x, ops: (x.transpose(0, 1) * 0.5).transpose(-1, 0),
    "whole numbers": lambda x, ops: (x * 10).to(torch.int64).to(torch.float32) * 0.1 + x * (x > 0),
    "whole numbers alone": lambda x, ops: (x * 10).to(torch.int64).to(torch.float32) * 0.1,
    "a mask that is filled": lambda x, ops: x * _mask(),
    "gathered twice": lambda x, ops: x.gather(1, torch.tensor([3, 3, 0, 9] * 8).expand(len(x), 32)),
}


def written(what: str) -> Decoder:
    model = random_decoder(CONFIG)
    for layer, old in enumerate(model.blocks):
        model.blocks[layer] = _Written(CONFIG, layer)
        model.blocks[layer].load_state_dict(old.state_dict())
        model.blocks[layer].written = WRITTEN[what]
    return model


MODELS: dict[str, Callable[[], Decoder]] = {
    "looped": lambda: looped(3),
    "looped, in no config": lambda: looped(3, told=False),
    **{what: lambda what=what: written(what) for what in WRITTEN},  # type: ignore[misc]
}


@pytest.mark.parametrize("what", MODELS)
def test_gradients_follow_any_wiring(what: str) -> None:
    """Of every site, to the accuracy of a known model, with an edit on the way, and in any batch."""
    metric = lambda logits: logits[PAIR[0]] - logits[PAIR[1]]  # noqa: E731
    engine = Engine(MODELS[what](), page_size=4)
    sites = [name for name in engine.sites.in_order() if name not in engine.sites.read_only and "pattern" not in name]
    edit = rl.Edit("blocks.0.mlp.hook_out", "scale", factor=0.5, positions=[1, 3])
    for edits in ((), (edit,)):
        found = engine.prompt(PATH, edits=list(edits)).gradients(PAIR, sites)
        truth = of_decoder(MODELS[what]().double(), PATH, metric, place_all(edits, engine.sites, len(PATH)))
        assert found.certified and max(difference(found[site], truth[site]) for site in found) < 1e-5
        longer = engine.prompt([*PATH, 5, 8], edits=list(edits)).fork(at=len(PATH))[0].gradients(PAIR, sites)
        assert all(torch.equal(longer[site], found[site]) for site in sites)


def test_what_is_built_on_gradients_follows() -> None:
    gaps = [rl.integrated_gradients(Engine(looped(3)), PATH, OTHER, PAIR, "blocks.0.hook_in", steps=n).gap for n in (2, 16)]
    assert abs(gaps[1] or 0.0) < abs(gaps[0] or 0.0) / 10, "they add up to the difference of the metric"
    assert rl.attribution_patching(Engine(looped(3)), PATH, OTHER, PAIR).frame["estimate"].abs().max() > 0


REFUSED_STEPS: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "a function without a rule": (lambda x, ops: x.cos(), "No gradient through torch.cos, which this model's wiring"),
    "an index of two tensors": (
        lambda x, ops: x[torch.arange(len(x)), torch.zeros(len(x)).long()][:, None] + x,
        "No gradient through torch.__getitem__, which",
    ),
    "a change in place": (lambda x, ops: x.add_(1.0), "changes a value in place, by add_"),
    "a row that is put": (lambda x, ops: _put(x), "changes a value in place, by __setitem__"),
    "an activation in place": (lambda x, ops: F.relu(x * 1.0, inplace=True), "changes a value in place, by relu"),
    "a result that is given": (lambda x, ops: torch.mul(x, x, out=-x), "changes a value in place, by mul"),
    "zeros that are filled": (lambda x, ops: _filled(x), "changes a value in place, by __setitem__"),
    "columns twice, by a list": (lambda x, ops: x[:, [0, 1] * 16], "through torch.__getitem__, which"),
    "a sum of three": (lambda x, ops: x.add(2.0, x), "through torch.add, which"),
    "a value that fills itself": (lambda x, ops: (y := x[0, 0]).masked_fill(torch.tensor(True), y) * x, "torch.masked_fill"),
    "a number of Python": (lambda x, ops: x[0, 0].item() * x, "takes numbers out of the pass, by item"),
    "an operation of another library": (lambda x, ops: torch.ops.aten.mul(x, x), "through torch.aten.mul, which"),
    "complex numbers": (lambda x, ops: (x.to(torch.complex64) * 1j * 1j).to(x.dtype), "through torch.to, which"),
    "numbers from outside": (lambda x, ops: x + _OUTSIDE, "neither Ops nor torch made within the pass"),
    "a factor of a sum": (lambda x, ops: x.add(x, alpha=2.0), "through torch.add with alpha, which"),
    "a bound that is a value": (lambda x, ops: x.clamp(min=x[:, :1]), "through torch.clamp with min, which"),
    "a value that is put": (lambda x, ops: x.masked_fill(x > 0, x[0, 0]), "through torch.masked_fill, which"),
    "numbers of nobody": (lambda x, ops: x + torch.from_numpy(x.numpy() * 2), "takes numbers out of the pass, by numpy"),
}


_OUTSIDE = torch.ones(32)
_SQUARE = Linear(32, 32, bias=False).requires_grad_(False)
_SQUARE.weight.copy_(torch.eye(32))


def _mask() -> Tensor:
    mask = torch.zeros(32)
    mask[3:7] = 1.0
    return mask


def _filled(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape)
    y[0] = x[0]
    return y


def _put(x: Tensor) -> Tensor:
    x[0] = 1.0
    return x


@pytest.mark.parametrize("what", REFUSED_STEPS)
def test_what_has_no_rule_is_refused_by_name(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, said = REFUSED_STEPS[what]
    monkeypatch.setitem(WRITTEN, what, function)
    branch = Engine(written(what)).prompt(PATH)
    with pytest.raises(NoGradient, match=said):
        branch.gradients(PAIR, "S")


@pytest.mark.parametrize("beside", [[], ["blocks.0.mlp.hook_out"], ["ln_final.hook_out"], ["blocks.0.hook_in"]])
def test_what_else_is_asked_changes_nothing(beside: list[str]) -> None:
    """Whether a step before the first asked site counts: the pattern of the first block has its gradient all the same."""
    pattern = "blocks.0.attn.hook_pattern"
    engine = Engine(random_decoder(CONFIG))
    every = engine.prompt(PATH).gradients(PAIR, [pattern, *(s for s in engine.sites if s.endswith("hook_in"))])
    found = engine.prompt(PATH).gradients(PAIR, [pattern, *beside])
    assert found[pattern].any() and torch.equal(found[pattern], every[pattern])


class _Short(LoopedBlock):
    """It leaves out a site."""

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        return Block.forward(self, x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)


def test_a_site_that_the_wiring_does_not_pass_is_named() -> None:
    model = looped(1)
    for block in model.blocks:
        block.__class__ = _Short
    with pytest.raises(NoGradient, match=r"No gradient at blocks\.0\.hook_out, which this model's wiring does not pass"):
        Engine(model).prompt(PATH).gradients(PAIR, ["blocks.0.hook_out", "blocks.1.hook_in"])


class _Blind(Decoder):
    """It taps no site before its blocks."""

    def embedding(self, tokens: Tensor, positions: Tensor, tap: Any = None) -> Tensor:
        return super().embedding(tokens, positions, None)


def test_a_wiring_that_does_not_begin_with_its_embedding_is_refused() -> None:
    model = _Blind(CONFIG)
    model.load_state_dict(random_decoder(CONFIG).state_dict())
    with pytest.raises(NoGradient, match=r"does not begin with the site embed\.hook_out"):
        Engine(model).prompt(PATH).gradients(PAIR, "S")


def test_control_a_rule_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backward.RULES, "torch.clamp", lambda back, step, g: [(step.args[0], g)])
    what = "half of a cut stream"
    found = Engine(written(what)).prompt(PATH).gradients(PAIR, "S")
    truth = of_decoder(written(what).double(), PATH, lambda logits: logits[PAIR[0]] - logits[PAIR[1]])
    assert max(difference(found[site], truth[site]) for site in found) > 1e-3


# ---- direct attribution ----------------------------------------------------------------------------------------------

LINEAR: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **{what: WRITTEN[what] for what in ("a sum of both orders", "turned and stacked", "a mask that is filled")},
    "differences and quotients": lambda x, ops: -1.25 * x,
}
"""what is written and linear in the stream: it belongs to the parts that wrote the stream"""


def direct(model: Decoder, change: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """What each part adds, in float64: vectors that go forward through what is linear and the scale of the final norm.

    change  what a block writes besides and is linear; what else it writes besides is a part of its own
    """
    model, rows = model.double(), dict[str, Tensor]()

    class Last:
        wants = staticmethod(lambda site: "pattern" not in site and "scores" not in site)

        def __call__(self, site: str, value: Tensor) -> Tensor:
            rows[site] = value[-1:]
            return value

    with torch.no_grad():
        stream = model(torch.tensor(PATH), torch.arange(len(PATH)), SequenceOps([len(PATH)]), Last())[-1:]
        parts = {"embedding": rows["embed.hook_out"]}
        for layer in range(CONFIG.num_layers):
            name = f"blocks.{layer}."
            own = {"attention": rows[name + "attn.hook_out"], "MLP": rows[name + "mlp.hook_out"]}
            parts |= {f"L{layer} {what}": row for what, row in own.items()}
            middle = rows[name + "hook_in"] + sum(own.values())
            parts = {what: row + change(row) for what, row in parts.items()}
            besides = rows[name + "hook_out"] - middle - change(middle)
            if besides.abs().max() > 1e-9:
                parts[f"L{layer} besides"] = besides
        scale = (stream.square().mean() + model.ln_final.eps).sqrt()
        towards = (model.unembedding[PAIR[0]] - model.unembedding[PAIR[1]]) * model.ln_final.weight / scale
        return {what: float(row @ towards) for what, row in parts.items()}


def test_a_wiring_that_fills_its_own_numbers_has_no_fingerprint() -> None:
    """It runs and has gradients; what results cite has to tell one wiring from another."""
    with pytest.raises(UnsupportedModel, match="changes a value in place, by __setitem__"):
        rl.dla(Engine(MODELS["a mask that is filled"]()), PATH, PAIR)


@pytest.mark.parametrize("what", [name for name in MODELS if name not in ("turned twice", "a mask that is filled")])
def test_direct_attribution_follows_any_wiring(what: str) -> None:
    """Each part against float64, and their sum; by head and by neuron, what is written besides stays whole."""
    truth = direct(MODELS[what](), lambda x: LINEAR[what](x, None) if what in LINEAR else 0 * x)
    for by in ("layer", "head", "neuron"):
        found = rl.dla(Engine(MODELS[what]()), PATH, PAIR, by=by)  # type: ignore[arg-type]
        sums: dict[str, float] = {"embedding": 0.0}
        for part in found.parts:
            kind = {"head": "attention", "neuron": "MLP", "other": "besides"}.get(part.kind, part.kind)
            name = kind if part.layer is None else f"L{part.layer} {kind.removesuffix(' bias')}"
            sums[name] = sums.get(name, 0.0) + part.value
        assert {name: sums[name] for name in truth} == pytest.approx(truth, abs=1e-6)
        assert set(sums) - set(truth) == {"final bias", "rounding"} and abs(sums["rounding"]) < 1e-6
        assert math.fsum(part.value for part in found.parts) == pytest.approx(found.total, abs=1e-12)
        assert len({part.name for part in found.parts}) == len(found.parts) and found.plot()


class _Instead(_Written):
    """What leaves the block is `written`, instead of being added."""

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        x = Block.forward(self, x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)
        return tapped(tap, self.out_site, self.written(x, ops))


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda x, ops: x.clamp(-0.3, 0.3), "follow torch.clamp, which"),
        (lambda x, ops: ops.linear(x, _SQUARE), "follow linear, which"),
        (lambda x, ops: x * x, "follow torch.mul, which"),
        (lambda x, ops: x[torch.arange(len(x))], "follow torch.__getitem__, which"),
        (lambda x, ops: (x.transpose(0, 1) * 0.5).transpose(-1, 0), "follow torch.transpose, which"),
        (lambda x, ops: torch.roll(x, 1, 0), "follow torch.roll, which"),
        (lambda x, ops: x.add_(1.0), "changes a value in place, by add_"),
        (lambda x, ops: x.expand(2, *x.shape)[1], "follow torch.expand, which"),
    ],
)
def test_what_ends_the_stream_is_refused_by_name(function: Any, said: str) -> None:
    """Also where only one block does so: the parts would be those after it, with all before it as one of them."""
    model = written("one number for all")
    model.blocks[0].__class__, model.blocks[0].written = _Instead, function
    for by in ("layer", "head"):
        with pytest.raises(UnsupportedModel, match=said):
            rl.dla(Engine(model), PATH, PAIR, by=by)  # type: ignore[arg-type]


def test_a_stream_that_is_normed_halved_and_put_together_is_followed() -> None:
    """Norms of the stream itself are linear, once their scales are held, and their biases are parts."""
    norm = Norm(CONFIG.d_model, "layer", 1e-5)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(3))
    model = written("one number for all")
    model.blocks[1].__class__ = _Instead
    model.blocks[1].written = lambda x, ops: torch.cat(
        [part * (1.0 + n) - 0.25 for n, part in enumerate(ops.norm(x, norm).chunk(2, dim=-1))], dim=-1
    )
    model.blocks[1].extra = norm
    found = rl.dla(Engine(model), PATH, PAIR)
    assert abs(found.parts[-1].value) < 1e-6 and [part.name for part in found.parts if part.kind == "bias"] == [
        "L1 bias",
        "L1 bias (2)",
        "L1 bias (3)",
    ]


def test_only_last_rows_are_kept() -> None:
    """Of the results of a pass; and what is gone is not taken for what has its address now."""
    engine, kept = Engine(looped(3)), []
    for last in (False, True):
        recorder = Recorder(engine.model, frozenset(engine.sites.sites), last=last)
        whole = engine.runner.whole(PATH * 3, (), PassTap(frozenset()), recorder)
        steps = [(step.kind, step.reads, step.outs) for step in recorder.steps]
        kept.append((steps, recorder.number(whole.logits), {n: x[-1:] if x.dim() else x for n, x in recorder.values.items()}))
    assert kept[0][:2] == kept[1][:2] and all(torch.equal(x, kept[1][2][n]) for n, x in kept[0][2].items())
    assert sum(x.untyped_storage().nbytes() for x in kept[1][2].values()) < 40_000


class _Again(Block):
    """The MLP writes twice, at the same sites."""

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        x = super().forward(x, rotary, ops, None if tap is None else _Before(tap, self.out_site), rows)
        assert isinstance(self.mlp, Mlp) and self.ln2 is not None
        wrote = self.mlp(ops.norm(x, self.ln2), ops, None)
        x = self._write(x, wrote, self.mlp.down, self.ln2_post, self.mlp_sites, ops, tap)
        return tapped(tap, self.out_site, x)


def again() -> Decoder:
    model = looped(1)
    for block in model.blocks:
        block.__class__ = _Again
    return model


def test_a_site_that_is_passed_twice_is_refused_by_name() -> None:
    """Control: rounds that tell nothing have parts of their own."""
    with pytest.raises(UnsupportedModel, match=r"passes the site blocks\.0\.mlp\.hook_out twice"):
        rl.dla(Engine(again()), PATH, PAIR)
    names = [part.name for part in rl.dla(Engine(looped(2)), PATH, PAIR).parts]
    assert len(set(names)) == len(names) > 6


def test_control_a_rule_that_leaves_something_out_is_refused_by_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is attributed to logits is checked against its sum all the same."""
    monkeypatch.setitem(backward.HELD, "add", lambda back, step, g: [(step.args[0], g)])
    with pytest.raises(UnsupportedModel, match=r"The parts of .* miss it by .* of .*, and rounding can explain"):
        rl.dla(Engine(looped(1)), PATH, PAIR)


def test_a_wiring_without_its_embedding_has_no_direct_attribution() -> None:
    model = _Blind(CONFIG)
    model.load_state_dict(random_decoder(CONFIG).state_dict())
    with pytest.raises(UnsupportedModel, match=r"does not begin with the site embed\.hook_out"):
        rl.dla(Engine(model), PATH, PAIR)


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_the_bound_on_rounding_is_small(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a wrong part does not pass for rounding; and far above what rounding does, so that no right one is refused."""
    bounds, real = [], dla._Writes.bound
    monkeypatch.setattr(dla._Writes, "bound", lambda self: bounds.append(real(self)) or bounds[-1])
    found = rl.dla(Engine(random_decoder(CONFIG)), PATH, PAIR, by=by)
    lost = abs(found.parts[-1].value)
    assert lost < 0.1 * bounds[0] and bounds[0] < 1e-3 * sum(abs(part.value) for part in found.parts)
