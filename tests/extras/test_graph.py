"""Attribution graphs: planted circuits are found exactly, edges sum to pre-activations, and bits depend on the path alone."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import replaylens as rl
from replaylens import errors
from replaylens.engine.display import stamp_of
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import Latent, MixerConfig, ModelConfig
from replaylens.engine.model.decoder import Block, Decoder
from replaylens.engine.model.layers import Norm
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from replaylens.extras import attribution, replacement
from replaylens.extras.graph import Graph, GraphDiff, Node
from replaylens.features.features import SparseFeatures
from replaylens.features.weights import FeatureConfig, FeatureWeights
from replaylens.gradients.backward import Held
from replaylens.weights.loading import load
from tests.devices import swept
from tests.engine.test_wiring import LINEAR, MODELS, WRITTEN, again, written
from tests.families import hugging_face
from tests.toy_model import engine, random_model

READ, WRITE = "blocks.{}.mlp.hook_in", "blocks.{}.hook_mlp_out"
PATH = [5, 9, 33, 2, 47, 18, 9, 60]


def transcoder(
    weights: list[Tensor], layer: int, target: int | None = None, read: str = READ, write: str = WRITE
) -> SparseFeatures:
    """weights  W_enc [d, features], b_enc, W_dec [features, d], b_dec"""
    (width, count), target = weights[0].shape, layer if target is None else target
    config = FeatureConfig("transcoder", width, count, width, read.format(layer), write.format(target), False)
    return SparseFeatures(config, FeatureWeights(*weights))


def random_transcoders(width: int, layers: int, cross: bool = False, count: int = 12, **sites: str) -> list[SparseFeatures]:
    """One per layer; cross: each also writes to all later layers."""
    made = []
    for layer in range(layers):
        draw = torch.Generator().manual_seed(layer)
        encoder = [torch.randn(width, count, generator=draw) / width**0.5, 0.1 * torch.randn(count, generator=draw) - 0.2]
        for target in range(layer, layers if cross else layer + 1):
            decoder = [0.3 * torch.randn(count, width, generator=draw), 0.1 * torch.randn(width, generator=draw)]
            made.append(transcoder([*encoder, *decoder], layer, target, **sites))
    return made


def worst_gap(graph: Graph, branch: Branch | None = None, made: Sequence[SparseFeatures] = ()) -> float:
    """The largest difference of a node's pre-activation and the sum of the edges into it, relative to the sizes of the edges.

    With a branch that captures what transcoders read, or relative to the sizes of the terms of W_enc . x, if these are larger:
    a feature with few edges is one product, and float32 knows it no better than that, also in the forward pass.
    """
    sizes = graph.weights.double().abs().sum(1)
    encoders = {each.site_in(branch.engine): each.weights for each in made} if branch is not None else {}
    for i, node in enumerate(graph.targets[: graph.num_features] if branch is not None else ()):
        (site,) = (site for site in encoders if site.startswith(f"blocks.{node.layer}."))
        terms = branch.activations[site][node.position] * encoders[site].W_enc[:, node.number]  # type: ignore[union-attr]
        sizes[i] = max(float(sizes[i]), float(terms.double().abs().sum()))
    return float((graph.gaps.abs() / sizes).max())


class Past(Block):
    """Adds what enters it again: not what its first site gives, which is the same number unless it is edited."""

    def write(self, x: Tensor, rotary: Any, ops: Any, tap: Any, rows: Any) -> Tensor:
        return super().write(x, rotary, ops, tap, rows) + (x if rows is None else x[rows])


class PastSites(Decoder):
    block = Past


def test_what_enters_past_the_first_site_is_refused() -> None:
    """No node would have it: edges into features fell short of their pre-activations by 3 %."""
    model = PastSites(random_model().config)
    model.load_state_dict(random_model().state_dict())
    subject, made = engine(model.requires_grad_(False)), random_transcoders(model.config.d_model, model.config.num_layers)
    with pytest.raises(errors.NoGradient, match="past that site"):
        rl.attribution_graph(subject, PATH, made, (4, 8))


# ---- planted circuits


A, B, C, X, Y = range(5)
SEEN, FOUND_A, FOUND_B, MOVED_B, BOTH, SCRATCH = range(5, 11)
"""channels of the residual stream after those of the tokens"""


@cache
def planted() -> tuple[Engine, list[SparseFeatures]]:
    """A model that predicts X once A and B were seen.

    Attention averages over all positions: in layer 0 it moves A to SEEN, in layer 1 FOUND_B to MOVED_B.
    Layer 0: feature 0 SEEN -> FOUND_A, feature 1 B -> FOUND_B, feature 2 C -> SCRATCH, which nothing reads.
    Layer 1: feature 0 FOUND_A + 4 MOVED_B above 4 -> BOTH, which X reads.
    Transcoders are the MLPs themselves, so that there is no error.
    """
    shape: dict[str, Any] = dict(num_layers=2, d_model=16, num_heads=1, num_kv_heads=1, d_head=16, d_mlp=4, vocab_size=5)
    config = ModelConfig(
        **shape, max_positions=32, rotary_dim=0, tied_embeddings=False, gated_mlp=False, activation="relu", mlp_bias=True
    )
    model = Decoder(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    for name, parameter in model.named_parameters():
        if ".ln" in name or name.startswith("ln"):
            parameter.fill_(1.0)
    model.embed[range(5), range(5)] = 1.0
    for layer, (source, target) in enumerate([(A, SEEN), (FOUND_B, MOVED_B)]):
        block: Any = model.blocks[layer]
        block.attn.qkv.weight[source, 32] = 1.0  # values come after 16 queries and 16 keys
        block.attn.o.weight[0, target] = 2.0
    wires = [(0, 0, SEEN, FOUND_A), (0, 1, B, FOUND_B), (0, 2, C, SCRATCH), (1, 0, FOUND_A, BOTH), (1, 0, MOVED_B, BOTH)]
    for layer, neuron, source, target in wires:
        mlp: Any = model.blocks[layer].mlp  # type: ignore[union-attr]
        mlp.up.weight[source, neuron], mlp.down.weight[neuron, target] = 1.0, 1.0
    last: Any = model.blocks[1].mlp
    last.up.weight[MOVED_B, 0], last.up.bias[0] = 4.0, -4.0
    assert model.unembed is not None
    model.unembed.weight[BOTH, X] = 1.0
    parts: list[Any] = [block.mlp for block in model.blocks]
    made = [
        transcoder([p.up.weight.clone(), p.up.bias.clone(), p.down.weight.clone(), p.down.bias.clone()], layer)
        for layer, p in enumerate(parts)
    ]
    return engine(model), made


def wired(graph: Graph) -> dict[tuple[Any, Any], float]:
    """The edges by (kind, layer, position, number) of both ends."""
    short = lambda node: ("output",) if node.kind == "output" else (node.kind, node.layer, node.position, node.number)  # noqa: E731
    return {(short(s), short(t)): float(w) for s, t, w in graph.edges.itertuples(index=False)}


def feature(layer: int, position: int, number: int) -> tuple[str, int, int, int]:
    return "feature", layer, position, number


def test_planted_edges_are_found_exactly() -> None:
    """All of them, and no others. Their weights are those of the formula, in float64."""
    served, transcoders = planted()
    path = [A, C, B, C]
    graph = rl.attribution_graph(served, path, transcoders, (X, Y))
    token, bias = lambda p: ("token", None, p, path[p]), ("bias", None, None, None)
    expected = {(feature(1, 3, 0), ("output",))}
    for p in range(4):
        expected |= {(token(0), feature(0, p, 0))}  # A was seen: by attention
    for p, found in ((1, 2), (2, 1), (3, 2)):
        expected |= {(token(p), feature(0, p, found))}  # C and B themselves
    for p in (2, 3):  # both were seen
        expected |= {(feature(0, p, 0), feature(1, p, 0)), (feature(0, 2, 1), feature(1, p, 0)), (bias, feature(1, p, 0))}
    found = wired(graph)
    assert set(found) == expected

    rms = lambda *x: (sum(v * v for v in x) / 16 + served.config.norm_eps) ** -0.5  # noqa: E731
    seen = 2.0 * rms(1.0) / 4  # A at position 0, read by the last of four rows
    assert found[token(0), feature(0, 3, 0)] == pytest.approx(seen * rms(1.0, seen), rel=1e-6)
    at_b = [1.0, 2.0 * rms(1.0) / 3]  # B, SEEN
    b = rms(*at_b)
    assert found[token(2), feature(0, 2, 1)] == pytest.approx(b, rel=1e-6)
    stream_b = [*at_b, at_b[1] * b, b]  # and FOUND_A, FOUND_B
    moved = 2.0 * b * rms(*stream_b) / 4
    a, c = seen * rms(1.0, seen), rms(1.0, seen)  # FOUND_A and SCRATCH in the last row
    assert found[feature(0, 2, 1), feature(1, 3, 0)] == pytest.approx(4.0 * moved * rms(1.0, seen, a, c, moved), rel=1e-6)
    assert found[bias, feature(1, 3, 0)] == -4.0
    assert worst_gap(graph) < 1e-6


def test_pruning_leaves_what_leads_to_the_output() -> None:
    """SCRATCH and earlier copies go. Negative control: nothing goes at shares of 1 but what has no influence."""
    served, transcoders = planted()
    graph = rl.attribution_graph(served, [A, C, B, C], transcoders, (X, Y))
    kept = [node for node in graph.prune().nodes if node.kind == "feature"]
    assert {(n.layer, n.position, n.number) for n in kept} == {(1, 3, 0), (0, 3, 0), (0, 2, 1)}
    whole = graph.prune(1.0, 1.0)
    assert {n for n in whole.nodes if n.kind == "feature"} == set(kept)
    assert len([n for n in graph.nodes if n.kind == "feature"]) == 9
    assert graph.replacement == graph.completeness == 1.0
    assert not any(node.kind == "error" for node in whole.nodes)


def test_difference_across_a_fork_is_what_was_planted() -> None:
    """B on one branch, C on the other: what B does appears, and nothing before the fork differs."""
    served, transcoders = planted()
    without, with_b = served.prompt([A, C]).fork(2)
    without.force([C, C])
    with_b.force([B, C])
    before, after = (rl.attribution_graph(served, each, transcoders, (X, Y)) for each in (without, with_b))
    diff = before.diff(after)
    assert isinstance(diff, GraphDiff) and diff.shared == 2
    status = {(wired_name(s), wired_name(t)): state for s, t, *_, state in diff.edges.itertuples(index=False)}
    bias = ("bias", None, None, None)
    appeared = {(feature(1, 3, 0), ("output",)), (("token", None, 2, B), feature(0, 2, 1))}
    for p in (2, 3):
        appeared |= {(feature(0, p, 0), feature(1, p, 0)), (feature(0, 2, 1), feature(1, p, 0)), (bias, feature(1, p, 0))}
    assert {pair for pair, state in status.items() if state == "appeared"} == appeared
    assert {pair for pair, state in status.items() if state == "vanished"} == {(("token", None, 2, C), feature(0, 2, 2))}
    assert not {pair for pair, state in status.items() if state == "changed"}  # norms of C and B rows have one length
    nodes = {wired_name(node): state for node, *_, state in diff.nodes.itertuples(index=False)}
    assert nodes[feature(0, 2, 1)] == nodes[feature(1, 3, 0)] == "appeared" and nodes[feature(0, 2, 2)] == "vanished"
    assert nodes["output",] == "changed" and feature(0, 1, 0) not in nodes
    back = after.diff(before)
    assert sorted(back.edges["status"].value_counts().to_dict().items()) == [("appeared", 1), ("vanished", len(appeared))]
    assert len(before.diff(before).edges) == 0 and "8 appeared, 1 vanished" in repr(diff)


def wired_name(node: Node) -> tuple[Any, ...]:
    return ("output",) if node.kind == "output" else (node.kind, node.layer, node.position, node.number)


# ---- sums


FAMILIES = ("gpt2", "neox", "gemma2", "gemma3", "qwen3", "olmo2", "bloom", "granite", "cohere", "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_edges_sum_to_pre_activations_in_every_family(name: str) -> None:
    """LayerNorms and biases, parallel blocks, post-norms, windows, softcaps, ALiBi, factors, experts; per layer and across."""
    served = Engine.load(hugging_face(name), check=False)
    path = [token % served.config.vocab_size for token in PATH]
    made = random_transcoders(served.config.d_model, served.config.num_layers, cross=name in ("gemma2", "qwen3"))
    branch = served.prompt(path, sites=[each.site_in(served) for each in made])
    graph = rl.attribution_graph(served, branch, made, (3, 4))
    assert graph.certified and worst_gap(graph, branch, made) < 1e-6
    assert sum(node.kind == "feature" for node in graph.nodes) > 20


def _flat_pattern(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    """Each row sees all keys up to itself alike."""
    rows, heads = q.shape[:2]
    flat = torch.ones(rows, rows).tril() / torch.arange(1, rows + 1)[:, None]
    return flat.expand(k.shape[1], heads // k.shape[1], rows, rows).contiguous()


@pytest.mark.parametrize("broken", ["pattern", "scale", "value bias", "error"])
def test_sums_control(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern or a scale other than the pass had, a bias or an error that is missing: the sum misses."""
    served = Engine.load(hugging_face("gpt2"), check=False)
    made = random_transcoders(served.config.d_model, served.config.num_layers)
    if broken == "pattern":
        monkeypatch.setattr(replacement, "pattern_of", _flat_pattern)
    elif broken == "scale":
        right = Held.scale
        monkeypatch.setattr(Held, "scale", lambda *given: right(*given).roll(1, 0))
    elif broken == "value bias":
        monkeypatch.setattr(replacement.ReplacementModel, "enters", lambda *_: None)
    else:
        prepare = attribution._Builder._prepare
        monkeypatch.setattr(attribution._Builder, "_prepare", lambda self, i, s: (prepare(self, i, s), self.errors[i].zero_()))
    assert worst_gap(rl.attribution_graph(served, PATH, made, (3, 4))) > 1e-3


WHOLLY = [name for name, function in LINEAR.items() if function is WRITTEN[name]]
"""wirings whose blocks write a linear function of the stream besides"""


class FrozenOps(SequenceOps):
    """The replacement model by autograd: patterns and scales carry no gradient."""

    def attend(self, heads: Any, *rest: Any) -> Tensor:
        return super().attend(replace(heads, q=heads.q.detach(), k=heads.k.detach()), *rest)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
        out = x * ((x * x).mean(-1, keepdim=True) + norm.eps).rsqrt().detach() * norm.weight
        return out if norm.bias is None else out + norm.bias


class Leaves:
    """A tap that cuts the graph where MLPs write, and at the embedding."""

    def __init__(self, leaves: list[str]) -> None:
        self.leaves, self.values = leaves, dict[str, Tensor]()

    def wants(self, site: str) -> bool:
        return not site.endswith(("hook_attn_scores", "hook_pattern"))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.values[site] = value = value.detach().requires_grad_() if site in self.leaves else value
        return value


@pytest.mark.parametrize(
    ("name", "cross"),
    swept(
        [*((name, False) for name in ("gpt2", "gemma2", "neox", "minicpm3", *WHOLLY)), ("gpt2", True)],
        ("gpt2", False),
        ("gemma2", False),
        ("turned and stacked", False),
    ),
)
def test_edges_agree_with_float64(name: str, cross: bool) -> None:
    """Into the output and into features, against autograd through the decoder in float64. cross: a feature's edges are sums
    over the layers that it writes to, and an error is what all that write to its layer leave."""
    made_by_hand = written(name) if name in WHOLLY else hugging_face(name)
    served = Engine(made_by_hand) if isinstance(made_by_hand, Decoder) else Engine.load(made_by_hand, check=False)
    model = (written(name) if name in WHOLLY else load(hugging_face(name))).double()
    layers = served.config.num_layers
    made = random_transcoders(served.config.d_model, layers, cross)
    writes = [served.sites.resolve(WRITE.format(layer)) for layer in range(layers)]
    tap, ops = Leaves([*writes, "blocks.0.hook_in"]), FrozenOps([len(PATH)])
    rows = model(torch.tensor(PATH), torch.arange(len(PATH)), ops, tap)
    logits = model.logits(rows, ops, tap)
    graph = rl.attribution_graph(served, PATH, made, (3, 4))
    scale = served.config.logit_scale
    before_softcap = tap.values["unembed.hook_out"][-1] * scale if served.config.logit_softcap else logits[-1]
    for i in (*range(0, graph.num_features, 7), graph.num_features):
        node = graph.targets[i]
        if node.kind == "output":
            target = before_softcap[3] - before_softcap[4]
        else:
            weights = next(each.weights for each in made if each.config.hook == READ.format(node.layer))
            target = (
                tap.values[served.sites.resolve(READ.format(node.layer))][node.position]
                @ weights.W_enc[:, node.number].double()
            )
        leaves = [tap.values[site] for site in tap.leaves]
        found = torch.autograd.grad(target, leaves, retain_graph=True, allow_unused=True)
        truth = expected_edges(graph, made, {s: g for s, g in zip(tap.leaves, found, strict=True) if g is not None}, tap.values)
        error = (graph.weights[i, : len(truth)].double() - truth).abs().sum() / truth.abs().sum()
        assert float(error) < 2e-6


def expected_edges(graph: Graph, made: list[SparseFeatures], gradients: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
    """Of features, errors and tokens, from gradients in float64. What has no gradient leads nowhere."""
    out, by_layer = [], {int(s.split(".")[1]): s for s in gradients if s != "blocks.0.hook_in"}
    layer_of = lambda site: int(site.split(".")[1])  # noqa: E731
    writing = [(layer_of(each.config.hook), layer_of(each.config.hook_out), each) for each in made]
    features = [node for node in graph.all_nodes if node.kind == "feature"]
    for node in graph.all_nodes:
        edge = torch.tensor(0.0, dtype=torch.float64)
        if node.kind == "token":
            edge = gradients["blocks.0.hook_in"][node.position] @ values["blocks.0.hook_in"][node.position].detach()
        for reads, writes, each in writing if node.kind == "feature" else ():
            if reads == node.layer and writes in by_layer:
                edge = edge + gradients[by_layer[writes]][node.position] @ each.decoder[node.number].double() * node.value
        if node.kind == "error" and node.layer in by_layer:
            left = values[by_layer[node.layer]][node.position].detach()
            for reads, writes, each in writing:
                if writes == node.layer:
                    own = [n for n in features if (n.layer, n.position) == (reads, node.position)]
                    left = left - each.weights.b_dec.double() - sum(n.value * each.decoder[n.number].double() for n in own)
            edge = gradients[by_layer[node.layer]][node.position] @ left
        if node.kind in ("token", "feature", "error"):
            out.append(edge)
    return torch.stack(out)


# ---- trained transcoders

TEXT = "A coin's state is heads. Alice flips. What's the state? A:"


@cache
def coin() -> Engine:
    return Engine.load("coin-plain")


@cache
def rows_of_coin(site: str) -> Tensor:
    texts = [example.prompt for example in rl.tasks.get("coin")(flips=(1, 4)).examples(24)]
    branches = coin().prompts(texts, sites=[site])
    return torch.cat([branch.activations[site] for branch in branches])


@cache
def trained(layer: int, *targets: int) -> list[SparseFeatures]:
    """A transcoder of coin-plain from what the MLP of a layer reads to what those of some layers write, fitted in a second."""
    count, reads = 192, rows_of_coin(coin().sites.resolve(READ.format(layer)))
    writes = torch.cat([rows_of_coin(coin().sites.resolve(WRITE.format(target))) for target in targets], 1)
    draw, width = torch.Generator().manual_seed(layer), reads.shape[1]
    encoder = [torch.randn(width, count, generator=draw) / width**0.5, torch.zeros(count)]
    decoder = [torch.randn(count, writes.shape[1], generator=draw) / count**0.5, writes.mean(0)]
    weights = [each.requires_grad_() for each in (*encoder, *decoder)]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(100):
        some = torch.randint(len(reads), (64,), generator=draw)
        found = (reads[some] @ weights[0] + weights[1]).relu()
        error = (found @ weights[2] + weights[3] - writes[some]).square().sum(1).mean() / writes.var(0).sum()
        optimizer.zero_grad()
        (error + 2e-4 * (found * weights[2].norm(dim=1)).sum(1).mean()).backward()
        optimizer.step()
    fitted = [each.detach() for each in weights]
    parts = zip(fitted[2].split(width, 1), fitted[3].split(width), targets, strict=True)
    return [transcoder([*fitted[:2], w.contiguous(), b.contiguous()], layer, target) for w, b, target in parts]


@pytest.mark.slow
@pytest.mark.parametrize("cross", [False, True])
def test_trained_transcoders(cross: bool) -> None:
    """Edges sum to pre-activations within 1e-6, and features explain more than random ones do."""
    first = trained(0, 0, 1) if cross else trained(0, 0)
    made = [*first, *(each for layer in (1, 2, 3) for each in trained(layer, layer))]
    branch = coin().prompt(TEXT, sites=[each.site_in(coin()) for each in made])
    graph = rl.attribution_graph(coin(), branch, made, (" tails", " heads"))
    assert worst_gap(graph, branch, made) < 1e-6 and graph.certified
    values = torch.tensor([node.value for node in graph.targets], dtype=torch.float64)
    assert float((graph.gaps / values).abs().median()) < 1e-6
    control = rl.attribution_graph(coin(), TEXT, random_transcoders(128, 4), (" tails", " heads"))
    assert graph.replacement > 2 * control.replacement and graph.completeness > control.completeness
    pruned = graph.prune()
    assert 0 < len(pruned.edges) < len(graph.edges) / 4
    assert {node.kind for node in pruned.nodes} >= {"feature", "token", "output", "bias"}


@pytest.mark.slow
def test_an_edge_is_the_effect_of_an_ablation() -> None:
    """Of a feature of the last layer on the logits, with the scale of the final norm held. Negative control: not held."""
    served, made, last = coin(), trained(3, 3)[0], "blocks.3.hook_out"
    branch = served.prompt(TEXT, sites=[made.site_in(served), last])
    graph = rl.attribution_graph(served, branch, [made], (" tails", " heads"))
    at = branch.length - 1
    nodes = sorted((n, i) for i, n in enumerate(graph.all_nodes) if n.kind == "feature" and n.position == at)
    strong = sorted(nodes, key=lambda pair: -abs(float(graph.weights[-1, pair[1]])))[:6]
    right, wrong = (served.token_ids_of([token])[0] for token in (" tails", " heads"))
    scale = lambda each: float(each.activations[last][-1].double().square().mean() + served.config.norm_eps) ** 0.5  # noqa: E731
    value = lambda each: float(each.logits()[right] - each.logits()[wrong])  # noqa: E731
    forks = [branch.fork(edits=made.edits(branch, ablate=[int(node.number or 0)], positions=at))[0] for node, _ in strong]
    edges = torch.tensor([float(graph.weights[-1, i]) for _, i in strong])
    held = torch.tensor([value(branch) - value(each) * scale(each) / scale(branch) for each in forks])
    free = torch.tensor([value(branch) - value(each) for each in forks])
    assert torch.allclose(held, edges, atol=1e-4) and not torch.allclose(free, edges, atol=1e-2)


# ---- bits


def test_bits_depend_on_the_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch of directions, in company, on forks. Negative control: another path has other bits."""
    served, made = engine(), random_transcoders(32, 2)
    alone = rl.attribution_graph(served, PATH, made, (3, 4))
    root = served.prompt(PATH[:5])
    others = [served.prompt([7] * n) for n in (3, 9)]
    fork, other = root.fork(2)
    served.generate([*others, other], 3)
    fork.force(PATH[5:])
    monkeypatch.setattr(attribution, "CHUNK_BYTES", 1)
    assert torch.equal(rl.attribution_graph(served, fork, made, (3, 4)).weights, alone.weights)
    assert rl.attribution_graph(served, fork, made, (3, 4)).all_nodes == alone.all_nodes
    changed = rl.attribution_graph(served, [*PATH[:-1], 1], made, (3, 4))
    assert not torch.equal(changed.weights[-1], alone.weights[-1])


@pytest.mark.slow
@pytest.mark.parametrize("extra", [1, 70])
def test_nothing_before_a_fork_differs(extra: int) -> None:
    """To the bit, also where blocks of queries end. Negative control: something differs after it."""
    served, made = engine(random_model(num_kv_heads=4)), random_transcoders(32, 2)
    short = rl.attribution_graph(served, PATH, made, (3, 4))
    diff = short.diff(rl.attribution_graph(served, [*PATH, *[3, 8] * (extra // 2), 8], made, (3, 4)))
    assert diff.shared == len(PATH)
    for node in (node for line in diff.edges.itertuples(index=False) for node in line[1:2]):
        assert node.kind == "output" or node.position >= len(PATH)
    assert set(diff.edges["status"]) >= {"appeared"} and len(diff.edges) > 50


def test_pruning_makes_no_edge_vanish() -> None:
    """The difference of pruned graphs is a part of that of whole ones. Negative control: what is pruned differs."""
    served, made = engine(), random_transcoders(32, 2)
    one, other = (rl.attribution_graph(served, path, made, (3, 4)) for path in (PATH, [*PATH[:6], 1, 2]))
    lines = lambda diff: {(s.key, t.key, *rest) for s, t, *rest in diff.edges.itertuples(index=False)}  # noqa: E731
    whole, part = lines(one.diff(other)), lines(one.prune(0.6, 0.8).diff(other.prune(0.6, 0.8)))
    assert part < whole and len(part) > 10
    kept = [{(s.key, t.key) for s, t, _ in graph.prune(0.6, 0.8).edges.itertuples(index=False)} for graph in (one, other)]
    pruned_once = (kept[0] ^ kept[1]) & {(source, target) for source, target, *_, status in part if status == "changed"}
    assert pruned_once
    assert "<table" in one._repr_html_() and "bias" not in one.diff(other)._repr_html_()


def test_edits_are_nodes() -> None:
    """Sums hold on a branch with edits at any site that gradients pass. Negative control: without these nodes they miss."""
    served, made = engine(random_model(num_kv_heads=2)), random_transcoders(32, 2)
    change = torch.randn(32, generator=torch.Generator().manual_seed(1))
    edits = [
        Edit("blocks.0.hook_in", "add", change, positions=2),
        Edit("blocks.0.attn.hook_z", "zero", heads=[1]),
        Edit("blocks.0.hook_mlp_out", "scale", positions=[1, 3], factor=2.0),
        Edit("blocks.1.ln2.hook_out", "add", change, positions=-1),
        Edit("blocks.1.ln1.hook_out", "project_out", change),
        Edit("blocks.1.mlp.hook_post", "zero", positions=4),
        Edit("blocks.1.attn.hook_q", "zero", positions=5),
    ]
    plain = served.prompt(PATH)
    (edited,) = plain.fork(edits=edits)
    graph = rl.attribution_graph(served, edited, made, (3, 4))
    assert worst_gap(graph) < 2e-6
    nodes = [node for node in graph.nodes if node.kind == "edit"]
    assert {node.text for node in nodes} == {served.sites.resolve(edit.site) for edit in edits[:5]}
    assert [node.position for node in nodes if node.text == "blocks.0.hook_in"] == [2]
    columns = torch.tensor([node.kind == "edit" for node in graph.all_nodes[: graph.num_sources]])
    missed = graph.weights[:, columns].double().sum(1).abs() / graph.weights.double().abs().sum(1)
    assert float(missed.max()) > 1e-2
    diff = rl.attribution_graph(served, plain, made, (3, 4)).diff(graph)
    assert diff.shared == len(PATH) and "edit" in {source.kind for source in diff.edges["source"]}


# ---- choices


def test_too_many_features_become_one_node() -> None:
    """The most influential are nodes, with the edges that they have in the whole graph. Sums still hold."""
    served, made = engine(), random_transcoders(32, 2, count=40)
    whole, part = (rl.attribution_graph(served, PATH, made, (3, 4), max_nodes=most) for most in (4096, 100))
    assert whole.num_features > 150 and part.num_features == 100 and not whole.left_out
    assert worst_gap(part) < 1e-6 and len(part.left_out) == whole.num_features - 100
    at = {node.key: i for i, node in enumerate(whole.targets)}
    rows = [at[node.key] for node in part.targets]
    assert torch.equal(part.weights[:, :100], whole.weights[rows][:, rows[:100]])
    found = whole.influence[: whole.num_features]
    best = {whole.all_nodes[i].key for i in np.argsort(-found)[:30]}
    assert best <= {node.key for node in part.targets}
    diff = whole.diff(part)
    assert len(diff.edges) == 0 and len(diff.nodes) == 0  # what was left out is not compared


def test_outputs() -> None:
    """Without a metric, the likeliest tokens; their logits are about the mean."""
    served, made = engine(), random_transcoders(32, 2)
    logits = served.prompt(PATH).logits().double()
    graph = rl.attribution_graph(served, PATH, made)
    outputs = [node for node in graph.nodes if node.kind == "output"]
    assert [node.number for node in outputs] == logits.argsort(descending=True)[: len(outputs)].tolist()
    assert len(outputs) == 10 or sum(graph.shares) >= 0.95
    assert outputs[0].value == pytest.approx(float(logits.max() - logits.mean()), rel=1e-5) and worst_gap(graph) < 1e-6
    (single,) = [node for node in rl.attribution_graph(served, PATH, made, 7).nodes if node.kind == "output"]
    assert single.number == 7 and single.value == pytest.approx(float(logits[7] - logits.mean()), rel=1e-5)


def test_cross_layer_decoders_of_zeros_change_nothing() -> None:
    served, own = engine(), random_transcoders(32, 2)
    first = own[0].weights
    beside = transcoder([first.W_enc, first.b_enc, torch.zeros_like(first.W_dec), torch.zeros_like(first.b_dec)], 0, 1)
    plain, crossed = (rl.attribution_graph(served, PATH, made, (3, 4)) for made in (own, [*own, beside]))
    assert torch.equal(plain.weights, crossed.weights)
    with pytest.raises(errors.BadRequest, match="different models or transcoders"):
        plain.diff(crossed)


def test_layers_without_a_transcoder_are_errors() -> None:
    served, made = engine(), random_transcoders(32, 2)
    graph = rl.attribution_graph(served, PATH, made[0], (3, 4))
    assert {node.layer for node in graph.nodes if node.kind == "feature"} == {0} and worst_gap(graph) < 1e-6


@pytest.mark.parametrize("site", ["blocks.{}.hook_resid_mid", "blocks.{}.ln2.hook_normalized"])
def test_other_places_that_a_transcoder_reads(site: str) -> None:
    served, made = engine(), random_transcoders(32, 2, read=site)
    assert worst_gap(rl.attribution_graph(served, PATH, made, (3, 4))) < 1e-6


def test_json_has_what_was_kept() -> None:
    """Plain values, links between nodes that are there; biases are left out."""
    served, transcoders = planted()
    graph = rl.attribution_graph(served, [A, C, B, C], transcoders, (X, Y)).prune()
    found = json.loads(json.dumps(graph.to_json()))
    assert found["num_layers"] == 2 and len(found["tokens"]) == 4
    assert len(found["nodes"]) == len(graph.nodes) - 1 and len(found["links"]) == len(graph.edges) - 1
    (first,) = [i for i, node in enumerate(found["nodes"]) if node.get("layer") == 1]
    assert found["nodes"][first] | {"kind": "feature", "position": 3, "feature": 0} == found["nodes"][first]
    assert found["nodes"][-1]["kind"] == "logit" and found["nodes"][-1]["token"] == X
    weights = {(source, target): weight for source, target, weight in found["links"]}
    assert weights[first, len(found["nodes"]) - 1] == pytest.approx(graph.all_nodes[-1].value)


UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "values that are cut": ("torch.clamp", dict(clip_qkv=1.0)),
    "gates": ("torch.mul", dict(attn_gate=True)),
    "convolutions": ("torch.mul", dict(mixer=MixerConfig("conv", 3, 32), parts=("mixer mlp", "attn mlp"))),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_models_are_named(what: str) -> None:
    kind, shape = UNSUPPORTED[what]
    with pytest.raises(errors.NoGradient, match=f"No gradient through {kind}, which this model's wiring asks for"):
        rl.attribution_graph(engine(random_model(**shape)), PATH, random_transcoders(32, 2), (3, 4))


def test_recurrent_layers_are_named() -> None:
    served = Engine.load(hugging_face("falcon-h1"), check=False)
    with pytest.raises(errors.NoGradient, match="No gradient through"):
        rl.attribution_graph(served, PATH, random_transcoders(served.config.d_model, served.config.num_layers), (3, 4))


@pytest.mark.parametrize(
    "shape", [dict(sinks=True), dict(latent=Latent(rank=14, d_value=5), num_kv_heads=4, rotary_dim=6)], ids=["sinks", "latent"]
)
def test_other_attentions_add_up(shape: dict[str, Any]) -> None:
    """Whose patterns leave a share to sinks, and whose keys are the values."""
    served, made = engine(random_model(**shape)), random_transcoders(32, 2)
    branch = served.prompt(PATH, sites=[each.site_in(served) for each in made])
    assert worst_gap(rl.attribution_graph(served, branch, made, (3, 4)), branch, made) < 1e-6


@pytest.mark.parametrize("what", [name for name in MODELS if name not in WHOLLY])
def test_a_wiring_that_is_not_linear_is_named(what: str) -> None:
    """Whatever writes to the stream besides attention and MLP, and is no linear function of it, once norms are held."""
    with pytest.raises(errors.NoGradient, match=r"No gradient through [\w.]+( with \w+)?, which this model's wiring asks for"):
        rl.attribution_graph(Engine(MODELS[what]()), PATH, random_transcoders(32, 2), (3, 4))


def test_a_site_that_is_passed_twice_is_named() -> None:
    with pytest.raises(errors.NoGradient, match=r"passes the site blocks\.0\.mlp\.hook_out twice"):
        rl.attribution_graph(Engine(again()), PATH, random_transcoders(32, 2), (3, 4))


def test_thinking_models_are_named() -> None:
    with pytest.raises(errors.NoGradient, match="thoughts"):
        rl.attribution_graph(Engine.load("coin-thinking"), TEXT, [], (" tails", " heads"))


def test_bad_requests_are_named(tmp_path: Any) -> None:
    served, made = engine(), random_transcoders(32, 2)
    graph = rl.attribution_graph(served, PATH, made, (3, 4))
    weights = made[0].weights
    other = transcoder([weights.W_enc * 2, weights.b_enc, weights.W_dec, weights.b_dec], 0, 1)
    misplaced = random_transcoders(32, 1, read="blocks.{}.hook_resid_pre")
    backwards = random_transcoders(32, 1, write="blocks.{}.hook_attn_out", read="blocks.{}.hook_resid_pre")
    sae = SparseFeatures(
        FeatureConfig("standard", 32, 12, 32, "blocks.0.hook_mlp_out", "blocks.0.hook_mlp_out", False), weights
    )
    for transcoders, reason in (
        ([], "No transcoders"),
        ([*made, other], "different encoders"),
        ([*made, made[1]], "as another transcoder does"),
        (misplaced, "but the MLP of layer 0 reads"),
        (backwards, "but the MLP of layer 0 reads"),
        ([sae], "needs transcoders"),
        ("folder", "transcoders"),
    ):
        with pytest.raises(errors.BadRequest, match=reason):
            rl.attribution_graph(served, PATH, transcoders, (3, 4))  # type: ignore[arg-type]
    for metric in (lambda logits: logits[0], (1, 2, 3), served.prompt(PATH)):
        with pytest.raises(errors.BadRequest, match="Only logits are sums over nodes"):
            rl.attribution_graph(served, PATH, made, metric)  # type: ignore[arg-type]
    with pytest.raises(errors.BadRequest, match="another engine"):
        rl.attribution_graph(engine(), served.prompt(PATH), made, (3, 4))
    with pytest.raises(errors.NoGradient, match="hook functions"):
        hooked = served.prompt(PATH).fork(hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x)])[0]
        rl.attribution_graph(served, hooked, made, (3, 4))
    with pytest.raises(errors.BadRequest, match="from 0 to 1"):
        graph.prune(nodes=1.5)


# ---- cite and draw


def test_a_picture_shows_the_graph(tmp_path: Path) -> None:
    """Every drawn number is one of the graph's: places of nodes, ends and weights of edges. Its file names the graph."""
    served = engine(random_model())
    graph = rl.attribution_graph(served, PATH, random_transcoders(32, 2), max_nodes=8).prune(0.9, 0.9)
    figure = graph.plot()
    axis = figure.axes[0]
    parts = {each.get_gid(): each for each in axis.collections}
    lines, kinds = parts.pop("edges"), {node.kind for node in graph.nodes} - {"bias", "rest"}
    assert parts.keys() <= kinds and {"feature", "token", "output"} <= parts.keys()
    rows = {"token": lambda node: -1, "output": lambda node: 2}
    for kind, drawn in parts.items():
        at = np.asarray(drawn.get_offsets())
        places = {(round(x), int(y)) for x, y in at}
        own = [node for node in graph.nodes if node.kind == kind]
        wanted = {(len(PATH) - 1 if n.position is None else n.position, rows.get(kind, lambda n: n.layer)(n)) for n in own}
        assert places <= wanted and (kind == "error" or (places == wanted and len(at) == len(own)))
        assert len(np.unique(at, axis=0)) == len(at), "no node hides another"
    known = graph.edges[[source.kind not in ("bias", "rest") for source in graph.edges["source"]]]
    assert sorted(lines.get_array().tolist()) == sorted(known["weight"].astype(float).tolist())
    spots = {tuple(spot) for drawn in parts.values() for spot in np.asarray(drawn.get_offsets()).tolist()}
    assert all(tuple(end) in spots for segment in lines.get_segments() for end in np.asarray(segment).tolist())
    assert all(segment[0][1] < segment[1][1] for segment in lines.get_segments()), "edges lead upwards"
    figure.savefig(tmp_path / "graph.svg")
    stamp = stamp_of((tmp_path / "graph.svg").read_bytes())
    assert stamp is not None and stamp.intact and stamp.source == graph.cite().identifier


def test_a_graph_is_cited_by_its_digest() -> None:
    served, made = engine(random_model()), random_transcoders(32, 2)
    graph = rl.attribution_graph(served, PATH, made)
    fresh = rl.attribution_graph(engine(random_model()), PATH, made)
    assert graph.digest == fresh.digest and graph.cite().identifier.endswith(graph.digest)
    others = [graph.prune(0.5), rl.attribution_graph(served, PATH[:-1], made), rl.attribution_graph(served, PATH, made[:1])]
    assert len({graph.digest, *(each.digest for each in others)}) == 4
    said = str(graph.cite())
    assert all(part in said for part in (rl.__version__, "attribution graph", "portable-1", served.fingerprint.digest[:16]))


def test_weights_that_are_not_finite_are_refused() -> None:
    good = random_transcoders(32, 1)[0].weights
    for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
        for value in (torch.nan, torch.inf):
            bad = getattr(good, name).clone()
            bad.view(-1)[3] = value
            with pytest.raises(errors.BadWeights, match=f"{name} of the features holds NaN or infinity"):
                replace(good, **{name: bad})
        with pytest.raises(errors.BadWeights, match=f"{name} of the features is torch.float16. Give float32"):
            replace(good, **{name: getattr(good, name).half()})
