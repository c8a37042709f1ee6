"""`attribution_graph`: which features of transcoders, tokens and errors make a prediction, and through which others.

The published method (Ameisen et al. 2025, circuit tracing): in the replacement model, attention patterns and scales of norms
are held, and an MLP's output is the sum of its transcoder's features, a bias and an error. An edge is what a node adds to the
pre-activation of another, along all paths that pass no third feature. The edges into a node sum to its pre-activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.model import modes
from replaylens.engine.model.sites import layer_of
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_instance, as_int, as_list, integer, short_repr, verb
from replaylens.engine.serving.branch import Branch
from replaylens.extras.graph import Graph, Node, influence_of
from replaylens.extras.replacement import ENTRY, Entering, ReplacementModel, mlp_sites, require_place
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import FeatureRows
from replaylens.gradients.attribution import paths_of
from replaylens.gradients.backward import Tape
from replaylens.gradients.branches import tape, tape_of
from replaylens.gradients.gradients import LogitDifference
from replaylens.workbench.drawing import MetricTokens, words

CHUNK_BYTES = 1 << 26
"""of the gradients of directions that are computed together; moves no bit"""
TOP_LOGITS, TOP_SHARE = 10, 0.95
"""without a metric: the likeliest tokens, up to this number and this sum of probabilities"""

# ---- transcoders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureLayer:
    """The features that read one layer, and all that they write to: one layer, or several (cross-layer)."""

    layer: int
    reads: str
    encoder: SparseFeatures
    writers: dict[int, tuple[str, SparseFeatures]]
    """layer -> its site, and the decoder"""


def feature_layers(engine: Engine, transcoders: Sequence[SparseFeatures]) -> list[FeatureLayer]:
    """Transcoders by the layer that they read. Those that read the same site are one cross-layer transcoder: they must have the
    same encoder. BadRequest for sets that are not transcoders, or that do not fit together."""
    found = dict[int, FeatureLayer]()
    written: dict[int, str] = {}
    given = [transcoders] if isinstance(transcoders, SparseFeatures) else as_list("transcoders", transcoders, "transcoders")
    for each in given:
        features: SparseFeatures = as_instance("transcoders", each, SparseFeatures, "what SparseFeatures.load returns")
        if not features.config.transcodes:
            raise BadRequest(f"{features!r} is an autoencoder of one site. An attribution graph needs transcoders of MLPs.")
        reads, writes = features.site_in(engine), features.site_out(engine)
        layer, target = layer_of(reads), layer_of(writes)
        if layer is None or target is None or target < layer:
            raise BadRequest(f"{features!r} does not write to its own layer or a later one.")
        require_place(engine.sites, layer, reads, None)
        require_place(engine.sites, target, None, writes)
        own = found.setdefault(layer, FeatureLayer(layer, reads, features, {}))
        if own.reads != reads or not _same_encoder(own.encoder, features):
            raise BadRequest(
                f"{features!r} and {own.encoder!r} read layer {layer} with different encoders. Give one transcoder per layer; "
                "several that read a site are the parts of one cross-layer transcoder, with the same encoder."
            )
        if target in own.writers or written.setdefault(target, writes) != writes:
            raise BadRequest(f"{features!r} writes to layer {target} as another transcoder does, or at another site.")
        own.writers[target] = writes, features
    if not found:
        raise BadRequest("No transcoders were given. Load them with SparseFeatures.load.")
    return [found[layer] for layer in sorted(found)]


def _same_encoder(a: SparseFeatures, b: SparseFeatures) -> bool:
    pairs = [(getattr(a.weights, name), getattr(b.weights, name)) for name in ("W_enc", "b_enc", "threshold")]
    return a is b or all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


# ---- building --------------------------------------------------------------------------------------------------------


class _Targets(NamedTuple):
    """What edges go into: the outputs, and active features."""

    positions: list[int]
    layers: list[int]
    directions: Callable[[int], Tensor]
    """number of a target -> its direction [d]"""
    constants: Tensor
    """[targets]: the biases that belong to none of the sites"""


@dataclass(eq=False)
class _Builder:
    """The edges of one path. Columns: features, errors, tokens, edits, bias."""

    model: ReplacementModel
    sets: list[FeatureLayer]
    rows: list[FeatureRows]
    """the features of each set at all positions"""
    writing: dict[tuple[int, int], tuple[Tensor, Tensor, Any]] = field(default_factory=dict)
    """(layer that is written to, position) -> columns, activations and decoder [d, features] of what writes there"""
    errors: dict[int, Tensor] = field(default_factory=dict)
    """layer -> [rows, d]: what its MLP writes beyond its features and their bias"""
    biases: dict[int, Tensor] = field(default_factory=dict)
    """layer -> [d]: of the decoders that write there"""

    def __post_init__(self) -> None:
        counts = [len(found.indices) for found in self.rows]
        self.first = np.cumsum([0, *counts]).tolist()
        """the first column of each set, and the end of all"""
        self.entries = [
            (own.layer, int(position), int(feature))
            for own, found in zip(self.sets, self.rows, strict=True)
            for position, feature in zip(found.rows_of_entries, found.indices, strict=True)
        ]
        """(layer, position, feature) of each column"""
        self.values = torch.cat([found.values for found in self.rows])
        n, layers = self.model.num_rows, self.model.num_layers
        self.token_column = self.first[-1] + layers * n
        self.edit_column = {site: self.token_column + n * (1 + i) for i, site in enumerate(self.model.edited)}
        self.bias_column = self.token_column + n * (1 + len(self.model.edited))
        for layer, site in self.model.writes.items():
            self._prepare(layer, site)

    def _prepare(self, layer: int, site: str) -> None:
        """Mutates: what is written to a layer, and its error."""
        products = self.model.host
        left = self.model.written(site).clone()
        bias = left.new_zeros(left.shape[1])
        own = [(i, each.writers[layer][1]) for i, each in enumerate(self.sets) if layer in each.writers]
        for position in range(self.model.num_rows):
            columns, decoders = [], []
            for i, features in own:
                offsets, found = self.rows[i].offsets, self.rows[i]
                begin, end = int(offsets[position]), int(offsets[position + 1])
                if begin == end:
                    continue
                columns.append(torch.arange(begin, end) + self.first[i])
                decoders.append(features.decoder[found.indices[begin:end].long()])
                # apart from the other sets' features: where a sum is divided hangs on how many it has
                left[position] -= products.plain(self.values[columns[-1]][None], products.packed(decoders[-1]))[0]
            if columns:
                at, decoder = torch.cat(columns), torch.cat(decoders)
                self.writing[layer, position] = at, self.values[at], products.packed(decoder.mT)
        for _, features in own:
            bias += features.weights.b_dec
        self.errors[layer], self.biases[layer] = left - bias, bias

    def edges(self, targets: _Targets, chosen: Sequence[int]) -> Tensor:
        """[chosen, columns]: by position, some together. How many moves no bit."""
        out = torch.zeros(len(chosen), self.bias_column + 1, dtype=torch.float32)
        order = sorted(range(len(chosen)), key=lambda i: (targets.positions[chosen[i]], -targets.layers[chosen[i]]))
        while order:
            place = lambda i: (targets.positions[chosen[i]], targets.layers[chosen[i]])  # noqa: E731
            position, layer = place(order[0])
            room = CHUNK_BYTES // (4 * (position + 1) * self.model.width) or 1
            some = [i for i in order[:room] if place(i) == (position, layer)]
            numbers, order = [chosen[i] for i in some], order[len(some) :]
            directions = torch.stack([targets.directions(number) for number in numbers])
            found = out.new_zeros(len(some), out.shape[1])
            found[:, self.bias_column] = targets.constants[numbers]
            for entering in self.model.pull(position, layer, directions):
                self._enter(found, entering)
            out[some] = found
        return out

    def _enter(self, out: Tensor, entering: Entering) -> None:
        """Mutates: out [directions, columns]"""
        g, n = entering.gradient, entering.gradient.shape[1]
        if entering.kind == "bias":
            self._add_bias(out, g, entering.value)
        elif entering.kind == "write":
            layer = layer_of(entering.site)
            assert layer is not None
            self._enter_written(out, g, layer)
        else:
            column = self.token_column if entering.kind == "embedding" else self.edit_column[entering.site]
            out[:, column : column + n] += self._dots(g, entering.value)

    def _enter_written(self, out: Tensor, g: Tensor, layer: int) -> None:
        """Mutates: the features, the error and the bias of a layer's MLP."""
        n, column = g.shape[1], self.first[-1] + layer * self.model.num_rows
        for position in range(n):
            if (layer, position) in self.writing:
                columns, values, decoder = self.writing[layer, position]
                out[:, columns] += self.model.products.plain(g[:, position].contiguous(), decoder) * values
        out[:, column : column + n] += self._dots(g, self.errors[layer][:n])
        self._add_bias(out, g, self.biases[layer])

    def _add_bias(self, out: Tensor, g: Tensor, bias: Tensor) -> None:
        """Mutates: a bias that every row gets."""
        out[:, self.bias_column] += self.model.products.total(self._dots(g, bias))[:, 0]

    def _dots(self, g: Tensor, value: Tensor) -> Tensor:
        """[directions, rows]"""
        return self.model.products.total((g * value).flatten(2))[..., 0]


class _Outputs(NamedTuple):
    """What is explained."""

    nodes: list[Node]
    wrong: int | None
    """the token whose logit is subtracted from those of the nodes; None: the mean of all"""
    shares: list[float]
    """how much each counts"""


def _outputs(engine: Engine, logits: Tensor, likely: Tensor, metric: MetricTokens | LogitDifference | None) -> _Outputs:
    """logits [vocab] before a softcap, and probabilities"""
    shown = lambda token: repr(word(engine.text, token))  # noqa: E731
    if isinstance(metric, LogitDifference):
        metric = metric.right, metric.wrong
    if isinstance(metric, list | tuple) and len(metric) == 2:
        right, wrong = (engine._target(token) for token in metric)
        value = float(logits[right] - logits[wrong])
        name = f"logit difference {shown(right)} - {shown(wrong)}"
        return _Outputs([Node("output", None, None, right, name, value)], wrong, [1.0])
    if metric is None:
        order = likely.argsort(descending=True, stable=True)[:TOP_LOGITS].tolist()
        reached = np.cumsum([float(likely[token]) for token in order])
        tokens = order[: int(np.searchsorted(reached, TOP_SHARE)) + 1]
        shares = [float(likely[token]) for token in tokens]
    elif isinstance(metric, str) or integer(metric) is not None:
        tokens, shares = [engine._target(metric)], [1.0]  # type: ignore[arg-type]
    else:
        raise BadRequest(
            f"Invalid metric={short_repr(metric)}. Only logits are sums over nodes: give a token, a pair of tokens (their "
            "logit difference), or None for the likeliest tokens."
        )
    mean = math.fsum(logits.tolist()) / len(logits)
    nodes = [Node("output", None, None, t, f"logit {shown(t)}", float(logits[t]) - mean) for t in tokens]
    return _Outputs(nodes, None, shares)


def _selected(builder: _Builder, targets: _Targets, shares: Sequence[float], most: int) -> tuple[list[int], Tensor]:
    """The features that become nodes, ascending, and the edges [features and outputs, columns].

    All, if there are at most so many. Otherwise the most influential: the edges into them are computed a few at a time, and
    which come next is decided by the influence of all features on the nodes known so far.
    """
    count, outputs = len(builder.entries), list(range(len(builder.entries), len(targets.layers)))
    if count <= most:
        return list(range(count)), builder.edges(targets, range(len(targets.layers)))
    known, last = list[int](), builder.edges(targets, outputs)
    edges = torch.zeros(most + len(last), last.shape[1], dtype=torch.float32)  # of features known so far, then of outputs
    edges[most:] = last
    while len(known) < most:
        counted = edges[: most + len(last), : builder.bias_column].numpy()
        found = influence_of(counted, shares, known)[:count]
        found[known] = -1.0
        more = np.argsort(-found, kind="stable")[: min(most - len(known), max(64, most // 8))].tolist()
        edges[len(known) : len(known) + len(more)] = builder.edges(targets, more)
        known += more
    order = np.argsort(known, kind="stable").tolist()
    return [known[i] for i in order], edges[[*order, *range(most, len(edges))]]


@verb
def attribution_graph(
    engine: Engine,
    text: Prompt | Branch,
    transcoders: Sequence[SparseFeatures],
    metric: MetricTokens | LogitDifference | None = None,
    *,
    max_nodes: int = 4096,
) -> Graph:
    """The attribution graph of the next token's logits.

    text         a prompt, or a branch. Edits of a branch are nodes
    transcoders  of the MLPs: one per layer, or several that read the same layer with the same encoder and write to different
                 ones (cross-layer). All that an MLP without a transcoder writes is its error
    metric       a token: its logit minus the mean of all; a pair: the logit of the first minus that of the second; None: the
                 likeliest tokens, up to 10 and 95 % of the probability. Before a softcap, if the model has one
    max_nodes    features that become nodes; of more active ones, the most influential. The sum of the others is one node

    Memory: the values of the pass, the patterns of all layers, the decoder rows of active features, 64 MiB of gradients, and
    twice 4 bytes for each of `max_nodes` times each active feature, error and token.

    Raises NoGradient for models whose attention is not supported, Thinking-States models, engines on a GPU and branches with
    hook functions; BadRequest for transcoders that do not fit the model, or metrics that are no sums of logits.
    """
    most = as_int("max_nodes", max_nodes, 1)
    if not engine.plain:
        raise NoGradient("No gradient flows through thoughts, so there is no attribution graph of them. Use a plain model.")
    if engine.runner.device != "cpu":
        raise NoGradient("An attribution graph is computed on a CPU only. Load the engine with device='cpu'.")
    sets = feature_layers(engine, transcoders)
    writes = {layer: mlp_sites(engine.sites, layer)[1][0] for layer in engine.config.layers_with("mlp")}
    writes |= {layer: site for own in sets for layer, (site, _) in own.writers.items()}
    seen, certified = _seen(engine, text, {ENTRY, *writes.values(), *(own.reads for own in sets)})
    with torch.inference_mode(), modes.canonical():
        model = engine.lock.alone(lambda: ReplacementModel(seen, {own.layer: own.reads for own in sets}, writes))
        rows = [own.encoder.encode(model.value(own.reads)) for own in sets]
        builder = _Builder(model, sets, rows)
        likely = seen.logits.double().softmax(-1)
        outputs = _outputs(engine, model.last_logits, likely, metric)
        chosen, edges = _selected(builder, _targets(builder, outputs), outputs.shares, most)
    digests = (engine.fingerprint.digest, *sorted(each.digest for own in sets for _, each in own.writers.values()))
    return _graph(engine, builder, seen.tokens, outputs, chosen, edges, digests, certified)


def _seen(engine: Engine, text: Prompt | Branch, needed: set[str]) -> tuple[Tape, bool]:
    """The pass with the values of these sites, and whether its bits are promised."""
    in_order = lambda sites: tuple(site for site in engine.sites.in_order() if site in sites)  # noqa: E731
    if not isinstance(text, Branch):
        return tape_of(engine, paths_of(engine, text)[0], (), in_order(needed)), True
    if text.engine is not engine:
        raise BadRequest("The branch belongs to another engine. Give its own engine, or a prompt.")
    return tape(text, in_order(needed | {edit.site for edit in text.lane.edits})), text.certified


def _targets(builder: _Builder, outputs: _Outputs) -> _Targets:
    """The features, and after them the outputs."""
    model, entries, sets = builder.model, builder.entries, {own.layer: own.encoder.weights for own in builder.sets}
    count = len(outputs.nodes)
    towards, constants = model.towards([int(node.number or 0) for node in outputs.nodes], [outputs.wrong] * count)
    last, encoders = model.num_rows - 1, {layer: weights.W_enc.mT for layer, weights in sets.items()}
    biases = torch.tensor([float(sets[layer].b_enc[feature]) for layer, _, feature in entries], dtype=torch.float32)

    def direction(number: int) -> Tensor:
        if number >= len(entries):
            return towards[number - len(entries)]
        layer, _, feature = entries[number]
        return encoders[layer][feature]

    positions = [position for _, position, _ in entries] + [last] * count
    layers = [layer for layer, _, _ in entries] + [model.num_layers] * count
    return _Targets(positions, layers, direction, torch.cat([biases, constants]))


def _graph(
    engine: Engine,
    builder: _Builder,
    tokens: tuple[int, ...],
    outputs: _Outputs,
    chosen: list[int],
    edges: Tensor,
    digests: tuple[str, ...],
    certified: bool,
) -> Graph:
    """The columns of chosen features and of all else, with those of other features as one."""
    text, n, layers = words(engine, tokens), len(tokens), builder.model.num_layers
    nodes = [Node("feature", l, p, f, text[p], float(builder.values[i])) for i in chosen for l, p, f in [builder.entries[i]]]
    nodes += [Node("error", layer, p, None, text[p], 0.0) for layer in range(layers) for p in range(n)]
    nodes += [Node("token", None, p, token, text[p], 0.0) for p, token in enumerate(tokens)]
    columns = [*chosen, *range(len(builder.entries), builder.token_column + n)]
    for site, delta in builder.model.edited.items():
        at = delta.flatten(1).any(1).nonzero()[:, 0].tolist()
        nodes += [Node("edit", layer_of(site), p, None, site, 0.0) for p in at]
        columns += [builder.edit_column[site] + p for p in at]
    weights = edges[:, [*columns, builder.bias_column]]
    nodes.append(Node("bias", None, None, None, "", 0.0))
    others = sorted(set(range(len(builder.entries))) - set(chosen))
    if others:
        rest = [math.fsum(row[others].tolist()) for row in edges]
        weights = torch.cat([weights, torch.tensor(rest, dtype=torch.float32)[:, None]], dim=1)
        nodes.append(Node("rest", None, None, None, "", 0.0))
    with torch.inference_mode(False):
        weights = weights.clone()
    return Graph(
        (*nodes, *outputs.nodes),
        weights,
        tuple(outputs.shares),
        tokens,
        text,
        frozenset(builder.entries[i] for i in others),
        digests,
        certified,
        np.ones(len(nodes) + len(outputs.nodes), dtype=bool),
        weights.numpy() != 0,
        made_by=(engine.fingerprint,),
    )
