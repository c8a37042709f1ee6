"""What retraces a pass outside the decoder knows which wiring it knows: a model with another is refused by name.

The other wiring is what somebody would add as `docs/extending.md` says: a field of the config, and a decoder that reads it. The
engine runs it; gradients, attributions and ranks, which were written without it, refuse.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import NoGradient, UnsupportedModel
from replaylens.engine.model.config import (
    Latent,
    MixerConfig,
    MixtureConfig,
    ModelConfig,
    Rope,
    Routing,
    field_name,
    unhandled,
)
from replaylens.engine.model.decoder import Block, Decoder, Mlp
from replaylens.engine.model.ops import tapped
from replaylens.extras import ranks, replacement
from replaylens.gradients import backward
from replaylens.workbench import dla
from tests.engine.reference import Reference, differences, random_decoder
from tests.gradients.reference import difference, of_decoder
from tests.mixtures import mixture_config
from tests.toy_model import SHAPE

KINDS = (ModelConfig, Rope, Latent, MixtureConfig, Routing, MixerConfig)
OF_MIXERS = {"ModelConfig.latent", "ModelConfig.mixer", "ModelConfig.parts", "Latent.*", "MixerConfig.*"}
REFUSED = {
    # module: the fields that it does not handle
    backward: set[str](),
    replacement: {f"ModelConfig.{name}" for name in ("sinks", "clip_qkv", "attn_gate")} | OF_MIXERS,
    dla: set[str](),
    ranks: set[str](),
}
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


# ---- what is declared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_field_is_handled_or_refused(module: Any) -> None:
    """A new field of a config fails here until each of them says what it does with it."""
    names = {field_name(kind, one) for kind in KINDS for one in fields(kind)}
    whole = {name for name in module.HANDLED | REFUSED[module] if name.endswith(".*")}
    assert module.HANDLED - whole <= names and not module.HANDLED & REFUSED[module]
    known = module.HANDLED | REFUSED[module]
    assert {name for name in names if f"{name.partition('.')[0]}.*" not in whole} == known - whole


def test_what_is_not_declared_is_found_wherever_it_is() -> None:
    """Also in a config within the config, and by its value: what has its default changes nothing."""
    known = backward.HANDLED

    @dataclass(frozen=True)
    class Warmer(Routing):
        warmth: float = 0.0

    config = mixture_config("softmax of all, a shared expert with a gate")
    mixture = config.mixture
    assert mixture is not None and unhandled(config, known) == []
    for warmth, found in ((0.0, []), (0.5, ["warmth=0.5"])):
        warmer = replace(config, mixture=replace(mixture, routing=Warmer(**vars(mixture.routing), warmth=warmth)))
        assert unhandled(warmer, known) == found and unhandled(warmer, dla.HANDLED) == found
    assert unhandled(replace(config, sinks=True), known - {"ModelConfig.sinks"}) == ["sinks=True"]
    assert unhandled(config, known - {"ModelConfig.vocab_size"}) == ["vocab_size=61"], "without a default, nothing is neutral"
    assert unhandled(config, known - {"Routing.top"}) == ["top=2"] and unhandled(config, known - {"Latent.rank"}) == []


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


def refusals(engine: Engine) -> dict[str, tuple[type[Exception], Callable[[], object]]]:
    return {
        "gradients": (NoGradient, lambda: engine.prompt(PATH).gradients(PAIR, "S")),
        "attribution patching": (NoGradient, lambda: rl.attribution_patching(engine, PATH, OTHER, PAIR)),
        "integrated gradients": (NoGradient, lambda: rl.integrated_gradients(engine, PATH, OTHER, PAIR)),
        "graph": (NoGradient, lambda: rl.attribution_graph(engine, PATH, [], PAIR)),
        "dla": (UnsupportedModel, lambda: rl.dla(engine, PATH, PAIR)),
        "ranks": (UnsupportedModel, lambda: Engine.load(engine.model, ranks=2)),
        "ranks, once read": (UnsupportedModel, lambda: ranks.Ranks.take(None, engine.model)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("what", refusals(Engine(looped(1))))
def test_what_does_not_know_it_refuses(what: str) -> None:
    error, call = refusals(Engine(looped(3)))[what]
    with pytest.raises(error, match=r"does not handle loops=3 of this model's config\. \w+"):
        call()
    if what == "graph":
        replacement.needed_values(looped(1))
    elif "ranks" not in what:
        refusals(Engine(looped(1)))[what][1]()  # once through every MLP is what all of them know


def test_control_without_the_declaration_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """And say that they are certified. What is attributed to logits is checked against its sum all the same."""
    metric = lambda logits: logits[PAIR[0]] - logits[PAIR[1]]  # noqa: E731
    for module in (backward, dla):
        monkeypatch.setattr(module, "HANDLED", module.HANDLED | {"LoopedConfig.loops"})
    for loops in (1, 3):
        found = Engine(looped(loops)).prompt(PATH).gradients(PAIR, "S")
        truth = of_decoder(looped(loops).double(), PATH, metric)
        wrong = max(difference(found[site], truth[site]) for site in found)
        assert found.certified and (wrong > 0.1) == (loops > 1)
    for told in (True, False):
        with pytest.raises(UnsupportedModel, match=r"The parts of .* miss it by .* of .*, and rounding can explain"):
            rl.dla(Engine(looped(3, told)), PATH, PAIR)


@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_the_bound_on_rounding_is_small(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a wrong part does not pass for rounding; and far above what rounding does, so that no right one is refused."""
    bounds, real = [], dla._Read.bound
    monkeypatch.setattr(dla._Read, "bound", lambda self: bounds.append(real(self)) or bounds[-1])
    found = rl.dla(Engine(random_decoder(CONFIG)), PATH, PAIR, by=by)
    lost = abs(found.parts[-1].value)
    assert lost < 0.1 * bounds[0] and bounds[0] < 1e-3 * sum(abs(part.value) for part in found.parts)
