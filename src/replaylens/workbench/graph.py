"""`attribution_graph`: which features of transcoders, tokens and errors make a prediction, and through which others.

The published method (Ameisen et al. 2025, circuit tracing): in the replacement model, attention patterns and the scales of norms
are held, and an MLP's output is the sum of its transcoder's features, a bias and an error. An edge is what a node adds to the
pre-activation of another, along all paths that pass no third feature. The edges into a node sum to its pre-activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from replaylens.engine.display import visible, word
from replaylens.engine.errors import BadMetric, BadRequest
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.features.rows import FeatureRows
from replaylens.engine.gradients.attribution import paths_of
from replaylens.engine.gradients.branches import tape, tape_of
from replaylens.engine.gradients.gradients import LogitDifference
from replaylens.engine.gradients.replacement import (
    Entering,
    Replacement,
    blocks_of,
    edited_sites,
    needed_values,
    require_place,
)
from replaylens.engine.model import modes
from replaylens.engine.model.sites import layer_of
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_float, as_instance, as_int, as_list, integer, short_repr, verb
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.workbench.drawing import MetricTokens, paragraph, words

CHUNK_BYTES = 1 << 26
"""of the gradients of directions that are computed together; moves no bit"""
TOP_LOGITS, TOP_SHARE = 10, 0.95
"""without a metric: the likeliest tokens, up to this number and this sum of probabilities"""
Kind = Literal["feature", "error", "token", "edit", "bias", "rest", "output"]
Array = np.ndarray[Any, np.dtype[Any]]

# ---- graph -----------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of an attribution graph."""

    kind: Kind
    layer: int | None
    position: int | None
    number: int | None
    """of a feature; of a token or an output, the token's id"""
    text: str
    """of the token at the position; of an output, what it is; of an edit, its site"""
    value: float
    """of a feature its activation, of an output its logit or difference of logits; 0 of all others"""

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it the same node in another graph: kind, layer, position and number. An output is the same at any
        position."""
        named = self.text if self.kind in ("output", "edit") else ""
        return self.kind, self.layer, None if self.kind == "output" else self.position, self.number, named

    def __str__(self) -> str:
        place = "" if self.position is None or self.kind == "output" else f" at {self.position} {visible(self.text)!r}"
        match self.kind:
            case "feature":
                return f"L{self.layer} feature {self.number}{place}"
            case "error":
                return f"L{self.layer} error{place}"
            case "output":
                return self.text
        return f"{self.kind}{place}"


@dataclass(frozen=True, eq=False)
class Graph:
    """An attribution graph. `prune` gives one with fewer nodes and edges, which remembers the others."""

    all_nodes: tuple[Node, ...]
    """sources, features first, and after them the outputs; also those that were pruned"""
    weights: Tensor
    """[targets, sources] float32: targets are the features and the outputs, in the order of `all_nodes`"""
    shares: tuple[float, ...]
    """of the outputs: how much each counts in `influence`"""
    tokens: tuple[int, ...]
    words: tuple[str, ...]
    """the text of each token"""
    left_out: frozenset[tuple[int, int, int]]
    """(layer, position, feature) of active features beyond `max_nodes`, whose sum is the node "rest" """
    made_of: tuple[str, ...]
    """fingerprint of the model and digests of the transcoders"""
    certified: bool
    """whether the bits are promised: the same in any batch and on every fork"""
    kept_nodes: Array
    """[all nodes] bool"""
    kept_edges: Array
    """[targets, sources] bool"""

    def __repr__(self) -> str:
        kinds = [node.kind for node in self.nodes]
        counts = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in ("feature", "error", "token", "output"))
        return f"Graph({len(self.tokens)} tokens, {counts}, {int(self.kept_edges.sum())} edges)"

    @property
    def num_sources(self) -> int:
        return self.weights.shape[1]

    @property
    def num_features(self) -> int:
        return len(self.weights) - len(self.shares)

    @property
    def nodes(self) -> list[Node]:
        """Those that were not pruned."""
        return [node for node, kept in zip(self.all_nodes, self.kept_nodes, strict=True) if kept]

    @cached_property
    def targets(self) -> tuple[Node, ...]:
        """The nodes that edges go into, of all nodes: features and outputs."""
        return self.all_nodes[: self.num_features] + self.all_nodes[self.num_sources :]

    @property
    def edges(self) -> pd.DataFrame:
        """One line per edge that was not pruned, the strongest first: source, target, weight."""
        at = np.argwhere(self.kept_edges)
        weight = self.weights.numpy()[at[:, 0], at[:, 1]]
        frame = pd.DataFrame({
            "source": [self.all_nodes[j] for j in at[:, 1]],
            "target": [self.targets[i] for i in at[:, 0]],
            "weight": weight,
        })  # fmt: skip
        return frame.sort_values("weight", key=abs, ascending=False, kind="stable", ignore_index=True)

    @property
    def gaps(self) -> Tensor:
        """[targets]: each target's value minus the sum of all edges into it, in float64. What float32 rounded away."""
        sums = [math.fsum(row) for row in self.weights.tolist()]
        return torch.tensor([node.value - total for node, total in zip(self.targets, sums, strict=True)], dtype=torch.float64)

    # ---- influence --------------------------------------------------------------------------------------------------

    def _columns(self, *kinds: Kind) -> Array:
        return np.array([node.kind in kinds for node in self.all_nodes[: self.num_sources]], dtype=bool)

    @property
    def influence(self) -> Array:
        """[sources]: the part of the outputs that passes through each, over all paths: products of edges as shares of what
        goes into their targets, without signs. Biases have none."""
        return _influence(self._normed(np.ones_like(self.kept_edges)), self.shares)

    def _normed(self, kept: Array) -> Array:
        """[targets, sources] float64: the edges as shares, without biases."""
        sizes = np.abs(self.weights.numpy().astype(np.float64)) * (kept & ~self._columns("bias"))
        return sizes / np.maximum(_row_sums(sizes), 1e-300)[:, None]

    @property
    def replacement(self) -> float:
        """Of the influence that tokens, edits and errors have, the share that is not the errors': 1 if features explain
        everything. Features left out count as errors."""
        found = self.influence
        errors, others = (math.fsum(found[self._columns(*kinds)]) for kinds in (("error", "rest"), ("token", "edit")))
        return others / (errors + others)

    @property
    def completeness(self) -> float:
        """The share of what goes into nodes that does not come from errors, each node weighted by its influence."""
        shares = self._normed(np.ones_like(self.kept_edges))
        own = np.concatenate([_influence(shares, self.shares)[: self.num_features], self.shares])
        known = _row_sums(shares * ~self._columns("error", "rest")) * own
        return math.fsum(known) / math.fsum(_row_sums(shares) * own)

    def prune(self, nodes: float = 0.8, edges: float = 0.98) -> Graph:
        """The graph of the most influential nodes and edges. Tokens, biases and outputs stay.

        nodes  share of the influence of all nodes that the kept ones have together
        edges  likewise of the edges between kept nodes
        """
        shares = [as_float(name, value) for name, value in (("nodes", nodes), ("edges", edges))]
        if not all(0 <= share <= 1 for share in shares):
            raise BadRequest(f"Invalid nodes={nodes!r}, edges={edges!r}. Give shares of the influence, from 0 to 1.")
        count, bias = self.num_features, self._columns("bias")
        stay = self._columns("token", "bias")
        kept = _top(self.influence, shares[0]) | stay
        rows = np.concatenate([kept[:count], np.ones(len(self.shares), dtype=bool)])  # of targets
        normed = self._normed(rows[:, None] & kept)
        through = np.concatenate([_influence(normed, self.shares)[:count], self.shares])
        strong = _top((normed * through[:, None]).ravel(), shares[1]).reshape(normed.shape)
        while True:  # a node without edges takes those of others away
            strong &= rows[:, None] & kept
            found = kept & (stay | strong.any(0))
            found[:count] &= strong[:count].any(1)
            if (found == kept).all():
                break
            kept, rows = found, np.concatenate([found[:count], rows[count:]])
        strong |= rows[:, None] & bias & (self.weights.numpy() != 0)
        return replace(self, kept_nodes=np.concatenate([kept, rows[count:]]), kept_edges=strong)

    # ---- two graphs -------------------------------------------------------------------------------------------------

    def diff(self, other: Graph) -> GraphDiff:
        """What differs in another graph of the same model and transcoders, such as one of another branch.

        Of pruned graphs, the nodes and edges that either keeps are compared. Their weights are those before pruning, so that no
        edge appears to vanish because it was pruned.
        """
        as_instance("other", other, Graph, "the result of attribution_graph")
        if self.made_of != other.made_of:
            raise BadRequest("The graphs are of different models or transcoders, so their features do not correspond.")
        same = [a == b for a, b in zip(self.tokens, other.tokens, strict=False)]
        return GraphDiff(self, other, len(list(takewhile(bool, same))))

    def to_json(self) -> dict[str, Any]:
        """Nodes and links that were not pruned, as plain data, with the fields of published graph files."""
        found = self.influence.tolist() + list(self.shares)
        names = [_node_id(node, i) for i, node in enumerate(self.all_nodes)]
        nodes = [_as_json(node, names[i], found[i]) for i, node in enumerate(self.all_nodes) if self.kept_nodes[i]]
        at, rows = np.argwhere(self.kept_edges), [*range(self.num_features), *range(self.num_sources, len(self.all_nodes))]
        links = [{"source": names[j], "target": names[rows[i]], "weight": float(self.weights[i, j])} for i, j in at.tolist()]
        return {"prompt": "".join(self.words), "prompt_tokens": list(self.words), "nodes": nodes, "links": links}

    def _repr_html_(self) -> str:
        shown = self.edges.head(20).map(lambda x: str(x) if isinstance(x, Node) else x)
        return paragraph(repr(self)) + shown.to_html(index=False, float_format="{:.4f}".format)


_TYPES: dict[Kind, str] = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "rest": "mlp reconstruction error",
    "token": "embedding",
    "output": "logit",
    "bias": "bias",
    "edit": "edit",
}
"""names of kinds in graph files"""


def _node_id(node: Node, i: int) -> str:
    match node.kind:
        case "feature":
            return f"{node.layer}_{node.number}_{node.position}"
        case "token":
            return f"E_{node.number}_{node.position}"
        case "error":
            return f"error_{node.layer}_{node.position}"
    return f"{node.kind}_{i}"


def _as_json(node: Node, name: str, influence: float) -> dict[str, Any]:
    place = {"layer": node.layer, "ctx_idx": node.position, "feature": node.number, "feature_type": _TYPES[node.kind]}
    return {"node_id": name, **place, "clerp": str(node), "activation": node.value, "influence": influence}


def _row_sums(x: Array) -> Array:
    """[rows, n] -> [rows], rounded once, so that no library's order of adding matters"""
    return np.array([math.fsum(row) for row in x.tolist()], dtype=np.float64)


def _influence(shares: Array, outputs: Sequence[float]) -> Array:
    """shares [targets, sources] of a graph without cycles -> the influence of each source [sources]"""
    count = len(shares) - len(outputs)
    now = _weighted(np.array(outputs, dtype=np.float64), shares[count:])
    total = np.zeros(shares.shape[1], dtype=np.float64)
    while now.any():
        total += now
        now = _weighted(now[:count], shares[:count])
    return total


def _weighted(weights: Array, rows: Array) -> Array:
    """The weighted sum of rows, from first to last."""
    total = np.zeros(rows.shape[1], dtype=np.float64)
    for i in np.flatnonzero(weights):
        total += weights[i] * rows[i]
    return total


def _top(scores: Array, share: float) -> Array:
    """Which of the scores are the largest that together have this share of the sum. Those equal to the last are kept as well,
    zeros are not."""
    order = np.sort(scores)[::-1]
    reached = np.cumsum(order)
    last = min(int(np.searchsorted(reached, share * reached[-1])), len(order) - 1)
    return (scores >= order[last]) & (scores > 0)


# ---- difference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GraphDiff:
    """Two graphs of one model, aligned by layer, position and feature. What has the same bits in both is left out."""

    before: Graph
    after: Graph
    shared: int
    """the number of tokens that both begin with. Before it, nothing differs, unless a branch is edited"""

    def __repr__(self) -> str:
        counts = self.edges["status"].value_counts()
        found = ", ".join(f"{int(counts.get(status, 0))} {status}" for status in ("appeared", "vanished", "changed"))
        return f"GraphDiff({self.shared} shared tokens; edges: {found})"

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """One line per node whose value differs: node, before, after, change, status. A feature that is not active is 0."""
        sides = [{node.key: node for node in graph.all_nodes} for graph in (self.before, self.after)]
        kept = {node.key: node for graph in (self.after, self.before) for node in graph.nodes}
        found = []
        for key, node in kept.items():
            if not self._left_out(node):
                values = [side[key].value if key in side else 0.0 for side in sides]
                there = [key in side for side in sides]
                found.append((node, *values, there))
        return _differing(found, "node")

    @cached_property
    def edges(self) -> pd.DataFrame:
        """One line per edge that differs: source, target, before, after, change, status. An edge that is not there is 0."""
        sides = [{node.key: i for i, node in enumerate(graph.all_nodes)} for graph in (self.before, self.after)]
        rows = [{node.key: i for i, node in enumerate(graph.targets)} for graph in (self.before, self.after)]
        pairs: dict[Any, tuple[Node, Node]] = {}
        for graph in (self.after, self.before):
            for i, j in np.argwhere(graph.kept_edges).tolist():
                source, target = graph.all_nodes[j], graph.targets[i]
                pairs[source.key, target.key] = source, target
        weights = [graph.weights.tolist() for graph in (self.before, self.after)]
        found = []
        for (source, target), pair in pairs.items():
            if any(map(self._left_out, pair)):
                continue
            there = [source in side and target in row for side, row in zip(sides, rows, strict=True)]
            values = [w[r[target]][s[source]] if t else 0.0 for w, r, s, t in zip(weights, rows, sides, there, strict=True)]
            found.append((pair, *values, [value != 0 for value in values]))
        return _differing(found, "source", "target")

    def _left_out(self, node: Node) -> bool:
        """Whether one of the graphs does not know the node's edges, because it has too many features."""
        key = (node.layer, node.position, node.number)
        return node.kind == "rest" or (node.kind == "feature" and any(key in g.left_out for g in (self.before, self.after)))

    def _repr_html_(self) -> str:
        shown = self.edges.head(20).map(lambda x: str(x) if isinstance(x, Node) else x)
        return paragraph(repr(self)) + shown.to_html(index=False, float_format="{:.4f}".format)


def _differing(found: list[tuple[Any, float, float, list[bool]]], *names: str) -> pd.DataFrame:
    """The lines whose numbers or presence differ, the largest change first."""
    lines = []
    for what, before, after, there in found:
        if before != after or there[0] != there[1]:
            status = "changed" if all(there) else "appeared" if there[1] else "vanished"
            own = what if len(names) > 1 else (what,)
            lines.append((*own, before, after, after - before, status))
    frame = pd.DataFrame(lines, columns=[*names, "before", "after", "change", "status"])
    return frame.sort_values("change", key=abs, ascending=False, kind="stable", ignore_index=True)


# ---- transcoders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureLayer:
    """The features that read one layer, and all that they write to: one layer, or several (cross-layer)."""

    layer: int
    reads: str
    encoder: SparseFeatures
    writers: dict[int, tuple[str, SparseFeatures]]
    """layer -> its site, and the decoder"""


def feature_layers(engine: Core, transcoders: Sequence[SparseFeatures]) -> list[FeatureLayer]:
    """Transcoders by the layer that they read. Those that read the same site are one cross-layer transcoder: they must have the
    same encoder. BadRequest for sets that are not transcoders, or that do not fit together."""
    blocks, found = blocks_of(engine.model), dict[int, FeatureLayer]()
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
        require_place(blocks[layer], layer, reads, None)
        require_place(blocks[target], target, None, writes)
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

    model: Replacement
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
        n, layers = self.model.num_rows, len(self.model.layers)
        self.token_column = self.first[-1] + layers * n
        self.edit_column = {site: self.token_column + n * (1 + i) for i, site in enumerate(self.model.edits)}
        self.bias_column = self.token_column + n * (1 + len(self.model.edits))
        for layer in range(layers):
            self._prepare(layer)

    def _prepare(self, layer: int) -> None:
        """Mutates: what is written to a layer, and its error."""
        products, device = self.model.products, self.model.logits.device
        left = self.model.written(self.model.layers[layer].write).clone()
        bias = left.new_zeros(left.shape[1])
        own = [(i, each.writers[layer][1]) for i, each in enumerate(self.sets) if layer in each.writers]
        for position in range(self.model.num_rows):
            columns, decoders = [], []
            for i, features in own:
                offsets, found = self.rows[i].offsets, self.rows[i]
                begin, end = int(offsets[position]), int(offsets[position + 1])
                columns.append(torch.arange(begin, end) + self.first[i])
                decoders.append(features.decoder[found.indices[begin:end].long()])
            if sum(map(len, columns)):
                at, decoder = torch.cat(columns), torch.cat(decoders).to(device)
                values = self.values[at].to(device)
                left[position] -= products.plain(values[None], products.packed(decoder))[0]
                self.writing[layer, position] = at, values, products.packed(decoder.mT)
        for _, features in own:
            bias += features.weights.b_dec.to(device)
        self.errors[layer], self.biases[layer] = left - bias, bias

    def edges(self, targets: _Targets, chosen: Sequence[int]) -> Tensor:
        """[chosen, columns]: by position, some together. How many moves no bit."""
        out = torch.zeros(len(chosen), self.bias_column + 1, dtype=torch.float32)
        order = sorted(range(len(chosen)), key=lambda i: (targets.positions[chosen[i]], -targets.layers[chosen[i]]))
        while order:
            position = targets.positions[chosen[order[0]]]
            room = CHUNK_BYTES // (4 * (position + 1) * self.model.width) or 1
            some = [i for i in order[:room] if targets.positions[chosen[i]] == position]
            numbers, order = [chosen[i] for i in some], order[len(some) :]
            directions = torch.stack([targets.directions(number) for number in numbers]).to(self.model.logits.device)
            found = out.new_zeros(len(some), out.shape[1])
            found[:, self.bias_column] = targets.constants[numbers]
            for entering in self.model.pull(position, [targets.layers[number] for number in numbers], directions):
                part = found[entering.first : entering.first + len(entering.gradient)]
                self._enter(part, entering)
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
            out[:, column : column + n] += self._dots(g, entering.value).cpu()

    def _enter_written(self, out: Tensor, g: Tensor, layer: int) -> None:
        """Mutates: the features, the error and the bias of a layer's MLP."""
        n, column = g.shape[1], self.first[-1] + layer * self.model.num_rows
        for position in range(n):
            if (layer, position) in self.writing:
                columns, values, decoder = self.writing[layer, position]
                out[:, columns] += (self.model.products.plain(g[:, position].contiguous(), decoder) * values).cpu()
        out[:, column : column + n] += self._dots(g, self.errors[layer][:n]).cpu()
        self._add_bias(out, g, self.biases[layer])

    def _add_bias(self, out: Tensor, g: Tensor, bias: Tensor) -> None:
        """Mutates: a bias that every row gets."""
        out[:, self.bias_column] += self.model.products.total(self._dots(g, bias))[:, 0].cpu()

    def _dots(self, g: Tensor, value: Tensor) -> Tensor:
        """[directions, rows]"""
        return self.model.products.total((g * value).flatten(2))[..., 0]


def _outputs(engine: Core, logits: Tensor, metric: MetricTokens | LogitDifference | None) -> tuple[list[Node], Tensor, list[float]]:
    """The nodes of what is explained, their directions of the logits [n, vocab], and how much each counts."""
    at, likely = logits.shape[-1], logits.double().softmax(-1)
    shown = lambda token: repr(word(engine.text, token))  # noqa: E731
    if isinstance(metric, LogitDifference) or (isinstance(metric, list | tuple) and len(metric) == 2):
        pair = (metric.right, metric.wrong) if isinstance(metric, LogitDifference) else metric
        right, wrong = (engine._target(token) for token in pair)
        slope = torch.zeros(1, at, dtype=torch.float32)
        slope[0, right] += 1.0
        slope[0, wrong] -= 1.0
        value = float(logits[right] - logits[wrong])
        name = f"logit difference {shown(right)} - {shown(wrong)}"
        return [Node("output", None, None, None, name, value)], slope, [1.0]
    if metric is None:
        order = likely.argsort(descending=True, stable=True)[:TOP_LOGITS].tolist()
        reached = np.cumsum([float(likely[token]) for token in order])
        tokens = order[: int(np.searchsorted(reached, TOP_SHARE)) + 1]
        shares = [float(likely[token]) for token in tokens]
    elif isinstance(metric, str) or integer(metric) is not None:
        tokens, shares = [engine._target(metric)], [1.0]
    else:
        raise BadMetric(
            f"Invalid metric={short_repr(metric)}. Only logits are sums over nodes: give a token, a pair of tokens (their logit "
            "difference), or None for the likeliest tokens."
        )
    slopes = torch.full((len(tokens), at), -1.0 / at, dtype=torch.float32)
    slopes[range(len(tokens)), tokens] += 1.0
    mean = math.fsum(logits.tolist()) / at
    nodes = [Node("output", None, None, t, f"logit {shown(t)}", float(logits[t]) - mean) for t in tokens]
    return nodes, slopes, shares


def _selected(builder: _Builder, targets: _Targets, shares: Sequence[float], most: int) -> tuple[list[int], Tensor]:
    """The features that become nodes, ascending, and the edges [features and outputs, columns].

    All, if there are at most so many. Otherwise the most influential: the edges into them are computed a few at a time, and
    which come next is decided by the influence of all features on the nodes known so far.
    """
    count, outputs = len(builder.entries), list(range(len(builder.entries), len(targets.layers)))
    if count <= most:
        return list(range(count)), builder.edges(targets, range(len(targets.layers)))
    known, edges, bias = list[int](), builder.edges(targets, outputs), builder.bias_column
    while len(known) < most:
        sizes = np.abs(edges.numpy().astype(np.float64))
        sizes[:, bias] = 0.0
        sizes /= np.maximum(_row_sums(sizes), 1e-300)[:, None]
        square = np.zeros((count, sizes.shape[1]), dtype=np.float64)
        square[known] = sizes[: len(known)]
        found = _influence(np.concatenate([square, sizes[len(known) :]]), shares)[:count]
        found[known] = -1.0
        more = np.argsort(-found, kind="stable")[: min(most - len(known), max(64, most // 8))].tolist()
        edges = torch.cat([edges[: len(known)], builder.edges(targets, more), edges[len(known) :]])
        known += more
    order = np.argsort(known, kind="stable")
    return sorted(known), torch.cat([edges[order.tolist()], edges[most:]])


@verb
def attribution_graph(
    engine: Core,
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

    Memory: the values of the pass, patterns of all layers, 4 bytes for each node that edges go into times each active feature,
    error and token, and 64 MiB.

    Raises NoGradient for models whose attention is not supported, Thinking-States models and branches with hook functions;
    BadRequest for transcoders that do not fit the model, BadMetric for metrics that are not linear in the logits.
    """
    most = as_int("max_nodes", max_nodes, 1)
    needed = needed_values(engine.model)
    sets = feature_layers(engine, transcoders)
    needed |= {own.reads for own in sets} | edited_sites(engine.model) if isinstance(text, Branch) else {own.reads for own in sets}
    sites = tuple(site for site in engine.sites.in_order() if site in needed)
    if isinstance(text, Branch):
        if text.engine is not engine:
            raise BadRequest("The branch belongs to another engine. Give its own engine, or a prompt.")
        seen, certified = tape(text, sites, backward=False), text.certified
    else:
        seen, certified = tape_of(engine, paths_of(engine, text)[0], (), sites, backward=False), True
    writes = {layer: site for own in sets for layer, (site, _) in own.writers.items()}
    with torch.inference_mode(), modes.canonical():
        model = engine.lock.alone(lambda: Replacement(seen, {own.layer: own.reads for own in sets}, writes))
        rows = [own.encoder.encode(model.value(own.reads)) for own in sets]
        builder = _Builder(model, sets, rows)
        outputs, slopes, shares = _outputs(engine, model.logits.cpu(), metric)
        chosen, edges = _selected(builder, _targets(builder, slopes), shares, most)
    digests = (engine.fingerprint.digest, *sorted(each.digest for own in sets for _, each in own.writers.values()))
    return _graph(engine, builder, seen.tokens, outputs, shares, chosen, edges, digests, certified and model.products.certified)


def _targets(builder: _Builder, slopes: Tensor) -> _Targets:
    """The features, and after them the outputs."""
    model, entries, sets = builder.model, builder.entries, {own.layer: own.encoder.weights for own in builder.sets}
    towards, constants = model.towards(slopes.to(model.logits.device))
    last, encoders = model.num_rows - 1, {layer: weights.W_enc.mT for layer, weights in sets.items()}
    biases = torch.tensor([float(sets[layer].b_enc[feature]) for layer, _, feature in entries], dtype=torch.float32)

    def direction(number: int) -> Tensor:
        if number >= len(entries):
            return towards[number - len(entries)].cpu()
        layer, _, feature = entries[number]
        return encoders[layer][feature]

    positions = [position for _, position, _ in entries] + [last] * len(slopes)
    layers = [layer for layer, _, _ in entries] + [len(model.layers)] * len(slopes)
    return _Targets(positions, layers, direction, torch.cat([biases, constants.cpu()]))


def _graph(
    engine: Core,
    builder: _Builder,
    tokens: tuple[int, ...],
    outputs: list[Node],
    shares: list[float],
    chosen: list[int],
    edges: Tensor,
    digests: tuple[str, ...],
    certified: bool,
) -> Graph:
    """The columns of chosen features and of all else, with those of other features as one."""
    text, n, layers = words(engine, tokens), len(tokens), len(builder.model.layers)
    nodes = [Node("feature", l, p, f, text[p], float(builder.values[i])) for i in chosen for l, p, f in [builder.entries[i]]]
    nodes += [Node("error", layer, p, None, text[p], 0.0) for layer in range(layers) for p in range(n)]
    nodes += [Node("token", None, p, token, text[p], 0.0) for p, token in enumerate(tokens)]
    columns = [*chosen, *range(len(builder.entries), builder.token_column + n)]
    for site, delta in builder.model.edits.items():
        at = delta.flatten(1).any(1).nonzero()[:, 0].tolist()
        nodes += [Node("edit", layer_of(site), p, None, site, 0.0) for p in at]
        columns += [builder.edit_column[site] + p for p in at]
    weights = edges[:, [*columns, builder.bias_column]]
    nodes.append(Node("bias", None, None, None, "", 0.0))
    others = sorted(set(range(len(builder.entries))) - set(chosen))
    if others:
        rest = [math.fsum(row) for row in edges[:, others].tolist()]
        weights = torch.cat([weights, torch.tensor(rest, dtype=torch.float32)[:, None]], dim=1)
        nodes.append(Node("rest", None, None, None, "", 0.0))
    with torch.inference_mode(False):
        weights = weights.clone()
    return Graph(
        (*nodes, *outputs),
        weights,
        tuple(shares),
        tokens,
        text,
        frozenset(builder.entries[i] for i in others),
        digests,
        certified,
        np.ones(len(nodes) + len(outputs), dtype=bool),
        weights.numpy() != 0,
    )
