"""Loops: layers that have the weights of others, in models of ours and of somebody else, and everything that follows them.

A looped model must be, to the bit, the model whose layers hold copies of those weights. Somebody else's wirings stand here as
in a file of their own, made of what `replaylens.extend` has.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import replaylens as rl
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.verify import OTHER, VERIFIED, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.model.program import Program
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.placing import place_all
from replaylens.extend import FAMILIES, Block, Decoder, Linear, Part, tapped
from replaylens.tasks import WordTokenizer
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.weights import loading
from tests.devices import swept
from tests.engine.reference import Reference, decoder, differences, random_decoder, same_bits
from tests.extras.test_graph import random_transcoders
from tests.families import CORE, hugging_face
from tests.gradients.reference import difference, of_decoder
from tests.kernels.interpreted import served
from tests.mixtures import mixture_model
from tests.toy_model import SHAPE
from tests.weights.test_weights import MEMORY

PATH, OTHER_PATH, PAIR = [3, 14, 15, 9, 2, 6], [3, 14, 15, 10, 2, 6], (4, 8)
EDIT = rl.Edit("blocks.3.mlp.hook_out", "scale", factor=0.5, positions=slice(1, 4))
CONFIG = ModelConfig(**{**SHAPE, "num_layers": 6, "weights_of": (0, 1, 2, 1, 2, 5)})  # type: ignore[arg-type]
"""two rounds through a core of two layers, between a first and a last one"""


def looped(model: Decoder) -> Decoder:
    """A model of any family that goes through all layers but the first a second time."""
    c, n = model.config, model.config.num_layers
    order = [*range(n), *range(1, n)]
    again = lambda each: tuple(each[layer] for layer in order) if each else each  # noqa: E731
    lists = {name: again(getattr(c, name)) for name in ("windows", "rotary_layers", "parts")}
    mixture = None if c.mixture is None else replace(c.mixture, layers=again(c.mixture.layers))
    made = Decoder(replace(c, num_layers=len(order), weights_of=tuple(order), mixture=mixture, **lists))
    made.load_state_dict(model.state_dict())
    return made.requires_grad_(False)


def unrolled(model: Decoder) -> Decoder:
    """The same, but every layer holds its weights."""
    held, made = model.state_dict(), type(model)(replace(model.config, weights_of=()))

    def where(name: str) -> str:
        kind, *rest = name.split(".")
        return name if kind != "blocks" else ".".join([kind, str(model.config.holder(int(rest[0]))), *rest[1:]])

    made.load_state_dict({name: held[where(name)] for name in made.state_dict()})
    return made.requires_grad_(False)


# ---- somebody else's -------------------------------------------------------------------------------------------------


class Injected(Decoder):
    """What entered the core is added again before its second round."""

    def run_blocks(self, x: Tensor, positions: Tensor, ops: Any, tap: Any, first: int, end: int, rows: Any = None) -> Tensor:
        for layer in range(first, end):
            if layer == 1:
                entered = x
            x = x + entered if layer == 3 else x
            x = super().run_blocks(x, positions, ops, tap, layer, layer + 1, rows if layer == end - 1 else None)
        return x


class MoreBlock(Block):
    """One more part that writes to the stream, with weights that loops share."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gate, self.more = (Linear(config.d_model, config.d_model, bias=True) for _ in range(2))
        self.share_of = nn.Parameter(torch.empty(config.d_model, dtype=torch.float32))

    def write(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any) -> Tensor:
        x = super().write(x, rotary, ops, tap, rows)
        return x + self.share_of * ops.sigmoid(ops.linear(x, self.gate)) * ops.linear(x, self.more)


class More(Decoder):
    block = MoreBlock


class Stashed(Decoder):
    """The last block reads the embedding, which nobody hands on."""

    def embedding(self, tokens: Tensor, positions: Tensor, tap: Any = None) -> Tensor:
        x = super().embedding(tokens, positions, tap)
        self.__dict__["found"] = x * 2.0
        return x

    def run_blocks(self, x: Tensor, positions: Tensor, ops: Any, tap: Any, first: int, end: int, rows: Any = None) -> Tensor:
        x = super().run_blocks(x, positions, ops, tap, first, min(end, 5))
        if end < 6:
            return x
        x = ops.add(x, self.__dict__["found"])
        return super().run_blocks(x, positions, ops, tap, max(first, 5), end, rows)


def made(kind: type[Decoder], config: ModelConfig = CONFIG) -> Decoder:
    model = kind(config)
    generator = torch.Generator().manual_seed(1)
    held = {name: torch.randn(x.shape, generator=generator) * 0.2 for name, x in model.state_dict().items()}
    model.load_state_dict({**held, **random_decoder(config).state_dict()})
    return model.requires_grad_(False)


THEIRS: dict[str, type[Decoder]] = {"a config alone": Decoder, "injected": Injected, "one more write": More, "stashed": Stashed}


# ---- the same bits as without sharing --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", swept(CORE, "llama", "gemma2", "gpt-oss", "deepseek-v3-groups", "qwen3-next"))
def test_a_looped_model_is_its_unrolled_one(family: str) -> None:
    """Tokens, KV, states, rows, gradients and DLA; and it holds no more than the model that it goes through."""
    model = decoder(family)
    loops, plain = looped(model), unrolled(looped(model))
    ours, theirs = Engine.load(loops), Engine.load(plain)
    found = []
    for engine in (ours, theirs):
        branch = engine.prompt(PATH, sites="STCZ", edits=[replace_layer(engine)]).generate(9, drafter="lens", window=3)
        fork = branch.fork(at=4)[0].force([7, 7])
        branch.rollback(12).generate(4, drafter="ngram")
        kv = [engine.forest.held_kv(each.lane) for each in (branch, fork)]
        rows = [each.activations[site] for each in (branch, fork) for site in each.activations]
        slopes = engine.prompt(PATH).gradients(PAIR, "STC")
        parts = [torch.tensor([part.value for part in rl.dla(engine, PATH, PAIR).parts])]
        found.append([torch.tensor(branch.tokens), torch.tensor(fork.tokens), *kv, *rows, *slopes.values(), *parts])
    assert len(found[0]) == len(found[1]) and all(map(same_bits, *found))
    assert sum(x.numel() for x in ours.model.parameters()) == sum(x.numel() for x in model.parameters())
    assert weights_hash(ours.model) == weights_hash(model) != weights_hash(theirs.model)


def replace_layer(engine: Engine) -> rl.Edit:
    """An edit of the second round."""
    return rl.Edit((engine.sites.per_layer("C") or engine.sites.per_layer("T"))[-1], "scale", factor=0.5, positions=[1])


def test_attribution_graphs_are_those_of_the_unrolled_model() -> None:
    graphs = [
        rl.attribution_graph(Engine.load(model), PATH, random_transcoders(CONFIG.d_model, CONFIG.num_layers), PAIR)
        for model in (made(Decoder), unrolled(made(Decoder)))
    ]
    ours, theirs = (graph.weights for graph in graphs)
    assert ours.any() and same_bits(ours, theirs) and graphs[0].all_nodes == graphs[1].all_nodes


@pytest.mark.slow
def test_ranks_divide_them_once() -> None:
    config = replace(CONFIG, d_model=128, num_heads=8, d_head=16, rotary_dim=16, d_mlp=512)
    alone, divided = Engine.load(made(Decoder, config)), Engine.load(made(Decoder, config), ranks=2)
    try:
        panels = [x for module in divided.model.modules() for x in getattr(module, "panels", {}).values()]
        assert len(panels) == 4 * 4 + 1, "four layers hold four products each"
        assert same_bits(*(engine.prompt(PATH).generate(5).kv() for engine in (alone, divided)))
        assert alone.fingerprint.weights == divided.fingerprint.weights
    finally:
        divided.ranks.close()


def test_control_other_weights_in_the_second_round_are_other_bits() -> None:
    model = unrolled(made(Decoder))
    with torch.no_grad():
        model.blocks[3].mlp.down.weight[0, 0] += 1e-3  # type: ignore[union-attr, index, operator]
    found = [Engine(each).prompt(PATH).kv() for each in (made(Decoder), model)]
    assert torch.equal(found[0][:, :4], found[1][:, :4]) and not torch.equal(found[0], found[1]), found[0].shape


@pytest.mark.parametrize("kind", swept([Decoder, More], More))
def test_by_the_kernels_of_a_gpu(kind: type[Decoder]) -> None:
    """In Triton's interpreter: the same as of the unrolled model."""
    found, config = [], replace(CONFIG, num_layers=3, weights_of=(0, 1, 1))
    for model in (made(kind, config), unrolled(made(kind, config))):
        branch = served("cpu", model).prompt(PATH[:2], sites="S")
        found.append([branch.logits(), branch.kv(), *(branch.activations[site] for site in branch.activations)])
    assert all(map(same_bits, *found))


# ---- weights are there once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["latent", "mixture", "mixer", "more"])
def test_weights_are_there_once(kind: str, tmp_path: Path) -> None:
    """For whoever looks through the model: names, parameters, what is packed, frozen, hashed, saved and trained."""
    plain = {
        "latent": lambda: decoder("deepseek-v3-groups"),
        "mixture": lambda: mixture_model("sigmoids in groups"),
        "mixer": lambda: decoder("mamba2"),
        "more": lambda: made(More, replace(CONFIG, num_layers=2, weights_of=())),
    }[kind]()
    model = looped(plain) if kind != "more" else made(More, replace(CONFIG, num_layers=3, weights_of=(0, 1, 1)))
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    assert model.packable("cpu").keys() == plain.packable("cpu").keys()
    assert len(list(model.held())) == len(list(plain.held()))
    first, last = model.blocks[1], model.blocks[-1]
    assert isinstance(first, Block) and isinstance(last, Block) and not list(last.parameters())
    engine = Engine.load(model)
    first, last = engine.model.blocks[1], engine.model.blocks[-1]
    assert all(part.o is last.writers[i][0].o for i, (part, _) in enumerate(first.writers))  # type: ignore[operator, arg-type, union-attr]
    with torch.no_grad(), pytest.raises((BadWeights, RuntimeError)):
        last.writers[0][0].o.weight.mul_(2)  # type: ignore[operator, index, union-attr]
        engine.prompt(PATH)
    if kind == "more":
        with pytest.raises(UnsupportedModel, match=r"not the wiring of More, which is somebody else's"):
            loading.save(model, tmp_path / "model")
        return
    loading.save(model, tmp_path / "model")
    again = Engine.load(tmp_path / "model")
    assert again.config.weights_of == model.config.weights_of and not again.model.blocks[-1].state_dict()
    assert again.fingerprint.digest == Engine(model).fingerprint.digest != Engine(unrolled(model)).fingerprint.digest
    assert same_bits(again.prompt(PATH).logits(), Engine(model).prompt(PATH).logits())


def test_a_process_holds_them_once(tmp_path: Path) -> None:
    """By what the system counts, not by a number of the config: ten layers, four of which hold weights."""
    sizes = dict(d_model=512, num_heads=8, num_kv_heads=8, d_head=64, d_mlp=1408, vocab_size=512)
    for name, layers in (("tiny", (0,)), ("large", (0, *[1, 2] * 4, 9))):
        config = ModelConfig(**{**SHAPE, **sizes, "num_layers": len(layers), "weights_of": layers})  # type: ignore[arg-type]
        loading.save(Decoder(config).initialize(0), tmp_path / name)
    command = [sys.executable, "-c", MEMORY, "folder", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    held, most, weights = map(float, done.stdout.split())
    assert 48 < weights < 56 and held < 1.3 * weights and most < 1.6 * weights, (held, most, weights)


def test_gradients_of_shared_weights_add_up() -> None:
    """Training goes through every round: the gradient is the sum of those of the copies."""
    ours, theirs = made(Decoder).requires_grad_(True), unrolled(made(Decoder)).requires_grad_(True)
    for model in (ours, theirs):
        ops = SequenceOps([len(PATH)])
        rows = model(torch.tensor(PATH), torch.arange(len(PATH)), ops)
        model.logits(rows, ops).logsumexp(-1).sum().backward()
    grads = [{name: x.grad for name, x in model.named_parameters()} for model in (ours, theirs)]
    for name, grad in grads[0].items():
        layers = [n for n, held in enumerate(CONFIG.weights_of) if name.startswith(f"blocks.{held}.")]
        copies = [grads[1][f"blocks.{n}.{name.split('.', 2)[2]}"] for n in layers] or [grads[1][name]]
        assert grad is not None
        torch.testing.assert_close(grad, sum(copies), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_what_cannot_be_shared_is_named() -> None:
    for weights_of, said in (
        ((0, 1, 2), "3 entries for 6 layers"),
        ((0, 1, 2, 4, 4, 5), "layer 4 holds the weights of layer 3"),
        ((0, 0, 1, 3, 4, 5), "layer 1 holds the weights of layer 2"),
        ((-1, 1, 2, 3, 4, 5), "layer -1 holds"),
    ):
        with pytest.raises(BadConfig, match=said):
            replace(CONFIG, weights_of=weights_of)
    hybrid = decoder("bamba").config
    assert hybrid.parts[0] != hybrid.parts[1]
    with pytest.raises(BadConfig, match="weights_of names unlike layers"):
        Decoder(replace(hybrid, weights_of=(0, 0, *range(2, hybrid.num_layers))))
    with pytest.raises(UnsupportedModel, match="share weights are not divided over devices"):
        loading.load(made(Decoder), device=("cpu", "cpu"))
    with pytest.raises(UnsupportedModel, match="read more than the residual stream"):
        loading.load(made(Injected, replace(CONFIG, weights_of=())), device=("cpu", "cpu"))
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG and "weights_of" not in replace(CONFIG, weights_of=()).to_json()


def test_a_family_reads_each_weight_once() -> None:
    """A table that says so of a Llama: two rounds through all of its layers."""
    theirs, llama = hugging_face("llama"), FAMILIES["llama"]
    count = theirs.config.num_hidden_layers
    twice = replace(
        llama,
        reads={
            **llama.reads,
            "num_layers": lambda raw: 2 * raw["num_hidden_layers"],
            "weights_of": lambda raw: tuple(range(raw["num_hidden_layers"])) * 2,
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", twice)
        found = loading.load(theirs, check=False)
    assert found.config.num_layers == 2 * count
    assert all(same_bits(x, decoder("llama").state_dict()[name]) for name, x in found.state_dict().items())


def test_thinking_and_the_doctor(tmp_path: Path) -> None:
    """T and C hold copies of the weights of the last and of the first layer, whoever holds those."""
    around = ThinkingDecoder.around(made(Decoder, replace(CONFIG, weights_of=(0, 1, 2, 1, 2, 2))), ThinkingConfig(4, 3, 0, 1))
    last = around.backbone.blocks[2].state_dict()
    assert around.think.state_dict().keys() == last.keys() and all(
        same_bits(x, last[n]) for n, x in around.think.state_dict().items()
    )
    loading.save(made(Decoder), tmp_path / "model")
    for option in ([], ["--program"]):
        said = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), *option])
        assert said.exit_code == 0, said.output
    assert "linear(%" in said.stdout and "blocks.1.attn.qkv" in said.stdout and "blocks.3.attn.qkv" not in said.stdout
    assert "blocks.3.attn.hook_out" in said.stdout


# ---- somebody else's wiring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", THEIRS)
def test_bits_follow(what: str) -> None:
    """Drafts of every drafter, forks, rollback, edits, hooks and replays: what rows have one at a time."""
    model = made(THEIRS[what])
    engine, truth = Engine.load(model, page_size=4, record=True), Reference(model)
    assert type(engine.model) is THEIRS[what]
    plain = engine.prompt(PATH, sites="STCZ").generate(12, window=3)
    assert differences(plain, truth) == []
    for drafter in ("lens", "ngram", "tree", "self"):
        for _ in range(3):  # the third pass of a shape is recorded
            branch = engine.prompt(PATH, sites="STCZ").generate(12, drafter=drafter, window=3)
            assert branch.tokens == plain.tokens and differences(branch, truth) == []
    (fork,) = plain.fork(at=9)
    assert differences(fork.force([7, 7, 5]).generate(4, drafter="lens"), truth) == []
    assert differences(plain.rollback(8).generate(3), truth) == []
    edited = engine.prompt(PATH, sites="S", edits=[EDIT]).generate(3, drafter="lens")
    slow = Engine.load(model, page_size=1, max_rows=16).prompt(PATH[:1], sites="S", edits=[EDIT])
    for token in edited.tokens[1:]:
        slow.force([token])
    assert same_bits(edited.kv(), slow.kv()[: len(edited.kv())]) and not same_bits(edited.kv()[:6], plain.kv()[:6])
    assert all(same_bits(rows, slow.activations[site][: len(rows)]) for site, rows in edited.activations.items())
    assert engine.trace is not None
    again = Engine.load(model, page_size=4).replay_trace(engine.trace)
    assert again[fork.id].tokens == fork.tokens and same_bits(again[fork.id].kv(), fork.kv())


@pytest.mark.parametrize("what", THEIRS)
def test_gradients_are_autograds(what: str) -> None:
    """In float64, of every site of every round, with an edit in the second one."""
    metric = lambda logits: logits[PAIR[0]] - logits[PAIR[1]]  # noqa: E731
    engine = Engine.load(made(THEIRS[what]))
    names = [name for name in engine.sites.in_order() if name not in engine.sites.read_only and "pattern" not in name]
    for edits in ((), (EDIT,)):
        found = engine.prompt(PATH, edits=list(edits)).gradients(PAIR, names)
        truth = of_decoder(made(THEIRS[what]).double(), PATH, metric, place_all(edits, engine.sites, len(PATH)))
        assert found.certified and max(difference(found[site], truth[site]) for site in found) < 1e-5


def cells(engine: Engine) -> tuple[Tensor, Tensor]:
    """The effects of patching the stream at every layer, by the verb, and by a prompt with an edit for each cell."""
    grid = rl.patch(engine, PATH, OTHER_PATH, metric=PAIR, sites="S").effect["S"]
    clean = engine.prompt(PATH, sites="S")
    measure = lambda branch: float(branch.logits()[PAIR[0]] - branch.logits()[PAIR[1]])  # noqa: E731
    ends = [measure(engine.prompt(path)) for path in (PATH, OTHER_PATH)]
    found = torch.zeros(grid.shape)
    for layer, site in enumerate(engine.sites.per_layer("S")):
        for position in range(len(PATH)):
            edit = rl.Edit(site, "set", clean.activations[site][position], positions=[position])
            found[layer, position] = (measure(engine.prompt(OTHER_PATH, edits=[edit])) - ends[1]) / (ends[0] - ends[1])
    return grid, found


@pytest.mark.parametrize("what", THEIRS)
def test_a_grid_of_patches_is_that_of_prompts_with_edits(what: str) -> None:
    """Cells begin where the stream is all of the state, and elsewhere before."""
    engine = Engine.load(made(THEIRS[what]))
    entries = {"injected": {0, 1, 4, 5}, "stashed": set[int]()}
    assert engine.runner.entries == entries.get(what, set(range(6)))
    torch.testing.assert_close(*cells(engine), rtol=0, atol=1e-5)


def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "entries", frozenset(range(6)))


def test_control_a_state_that_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun anywhere, a grid has what an earlier pass left; and a recorded pass reads what was there when it was recorded."""
    anywhere(monkeypatch)
    engine = Engine.load(made(Stashed))
    with pytest.raises((AssertionError, RuntimeError)):
        torch.testing.assert_close(*cells(engine), rtol=0, atol=1e-5)
    with pytest.raises(UnboundLocalError):
        rl.patch(Engine.load(made(Injected)), PATH, OTHER_PATH, metric=PAIR, sites="S")
    plain = Engine(unstashed := made(Stashed), page_size=4).prompt(PATH).generate(12)
    assert Reference(unstashed).kv(tuple(plain.tokens[:-1])).shape == plain.kv().shape
    assert not same_bits(Reference(unstashed).kv(tuple(plain.tokens[:-1])), plain.kv())


def test_another_wiring_is_another_fingerprint(tmp_path: Path) -> None:
    """Of the same config and weights: a dump of one is verified by it, and is not of the other."""
    coin = rl.tasks.get("coin")(flips=(1, 3))
    words = WordTokenizer(coin.vocabulary())
    config = replace(CONFIG, vocab_size=words.vocab_size)
    engines = [Engine.load(made(kind, config), tokenizer=words) for kind in (Decoder, Injected, Injected, Stashed)]
    prints = [engine.fingerprint for engine in engines]
    assert len({each.weights for each in prints}) == len({each.config for each in prints}) == 1
    assert prints[0].canonical == "portable-1" and prints[1].canonical.startswith("portable-1:wiring ")
    assert prints[1] == prints[2] and len({each.digest for each in prints}) == 3
    write_dump(engines[1], make_plan(engines[1], coin, 5, max_new=5), tmp_path / "dump")
    assert verify(tmp_path / "dump", engines[2], sample="all").status == VERIFIED
    verdict = verify(tmp_path / "dump", engines[0], sample="all")
    assert verdict.status == OTHER and any(problem.startswith("canonical:") for problem in verdict.problems)


def test_the_program_of_packed_weights_is_that_of_the_source() -> None:
    for kind in THEIRS.values():
        model = made(kind)
        assert Program.of_wiring(model).digest == Program.of_wiring(Engine.load(model).model).digest
    assert Program.of_wiring(made(More)).digest == Program.of(More, CONFIG).digest != Program.of(Decoder, CONFIG).digest


class _Sited(nn.Module):
    """A part of a block with a site, that does not say so: no `Part`."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.site, self.scale = f"blocks.{layer}.hook_out", nn.Parameter(torch.empty(32, dtype=torch.float32))

    def forward(self, x: Tensor, tap: Any) -> Tensor:
        return tapped(tap, self.site, x * self.scale)


class _SitedPart(_Sited, Part):
    """It says so."""


class _Bare(Block):
    sited: type[nn.Module] = _Sited

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.last = self.sited(layer)

    def forward(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any = None) -> Tensor:
        found: Tensor = self.last(self.write(x, rotary, ops, tap, rows), tap)
        return found


def test_a_site_that_is_passed_twice_is_named() -> None:
    twice, once = (
        type("Twice", (Decoder,), {"block": type("TwiceBlock", (_Bare,), {"sited": sited})}) for sited in (_Sited, _SitedPart)
    )
    with pytest.raises(UnsupportedModel, match=r"passes the site blocks\.1\.hook_out twice.*`Part`"):
        _ = Engine(made(twice)).fingerprint
    model = made(once)
    assert Engine(model).runner.entries == frozenset(range(6))
    assert model.blocks[3].last.scale is model.blocks[1].last.scale  # type: ignore[union-attr]


def test_a_wiring_that_cannot_be_copied_or_followed_is_named() -> None:
    import threading

    model = made(Injected)
    model.__dict__["lock"] = threading.Lock()
    with pytest.raises(UnsupportedModel, match="wiring cannot be copied"):
        Engine.load(model)
    numbers: Callable[..., Tensor] = lambda self, x, *given: Block.write(self, x, *given) * x[0, 0].item()  # noqa: E731
    odd = made(type("Odd", (Decoder,), {"block": type("OddBlock", (Block,), {"write": numbers})}))
    engine = Engine.load(odd)
    assert engine.runner.entries == frozenset() and differences(engine.prompt([3]), Reference(odd)) == []  # one row
    with pytest.raises(UnsupportedModel, match="takes numbers out of the pass, by item"):
        _ = engine.fingerprint


@pytest.mark.parametrize("kind", [Injected, More, Stashed])
def test_logits_are_split_whole_or_not_at_all(kind: type[Decoder]) -> None:
    """What writes to the stream beside the parts is a part of its own, or refused."""
    engine = Engine.load(made(kind))
    try:
        found = rl.dla(engine, PATH, PAIR)
    except UnsupportedModel as error:
        assert "miss it by" in str(error)
    else:
        logits = engine.prompt(PATH).logits()
        assert abs(found.parts[-1].value) < 1e-4 and found.total == pytest.approx(float(logits[PAIR[0]] - logits[PAIR[1]]))


@pytest.mark.parametrize("given", [[0, 1, 1], (0.0, 1, 1), ("0", "1", "1"), (0, 2, 2), (0, 1, -1), (0, 1)])
def test_what_is_no_list_of_holders_is_named(given: Any) -> None:
    with pytest.raises(BadConfig, match="weights_of"):
        replace(CONFIG, num_layers=3, weights_of=given)
