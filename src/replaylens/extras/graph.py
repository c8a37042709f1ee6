"""`Graph`: an attribution graph, its pruning, and `GraphDiff`: the difference of two, such as those of two branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable, picture, plain, short, visible
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import as_float, as_instance
from replaylens.workbench.drawing import paragraph

Kind = Literal["feature", "error", "token", "edit", "bias", "rest", "output"]

# ---- graph -----------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of an attribution graph."""

    kind: Kind
    layer: int | None
    position: int | None
    number: int | None
    """of a feature; of a token or an output, the token's id; of a logit difference, that of the first token"""
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
class Graph(Citable):
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
    kept_nodes: np.ndarray
    """[all nodes] bool"""
    kept_edges: np.ndarray
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
        sums = [math.fsum(row.tolist()) for row in self.weights]
        return torch.tensor([node.value - total for node, total in zip(self.targets, sums, strict=True)], dtype=torch.float64)

    # ---- cite and draw ----------------------------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        shown, count = repr("".join(self.words)[:60]), len(self.made_of) - 1
        return f"attribution graph of {shown}, {len(self.nodes)} nodes, {int(self.kept_edges.sum())} edges, {count} transcoders"

    def plot(self) -> Figure:
        """Nodes by token and layer: tokens at the bottom, outputs at the top. Features are circles, their area by influence,
        errors diamonds, edits triangles. Lines are the 500 strongest edges: red adds, blue subtracts. Prune the graph first.
        """
        return self._shown(_drawn(self))

    # ---- influence --------------------------------------------------------------------------------------------------

    def _columns(self, *kinds: Kind) -> np.ndarray:
        return np.array([node.kind in kinds for node in self.all_nodes[: self.num_sources]], dtype=bool)

    @property
    def influence(self) -> np.ndarray:
        """[sources]: the part of the outputs that passes through each, over all paths: products of edges as shares of what
        goes into their targets, without signs. Biases have none."""
        return self._influence(self.weights.numpy() * ~self._columns("bias"))

    def _influence(self, edges: np.ndarray) -> np.ndarray:
        return influence_of(edges, self.shares, range(self.num_features))

    def _normed(self, kept: np.ndarray) -> np.ndarray:
        """[targets, sources] float64: the edges as shares, without biases."""
        sizes = np.abs(self.weights.numpy().astype(np.float64)) * (kept & ~self._columns("bias"))
        return sizes / np.maximum(row_sums(sizes), 1e-300)[:, None]

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
        own = np.concatenate([self._influence(shares)[: self.num_features], self.shares])
        known = row_sums(shares * ~self._columns("error", "rest")) * own
        return math.fsum(known) / math.fsum(row_sums(shares) * own)

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
        through = np.concatenate([self._influence(normed)[:count], self.shares])
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
        return GraphDiff(self, other, len(list(takewhile(bool, same))), made_by=self.made_by)

    def to_json(self) -> dict[str, Any]:
        """What was not pruned as plain values: the nodes, links, tokens and num_layers that
        `replaylens.extras.bridges.neuronpedia.graph` takes. Biases, edits and features left out have no place there.
        """
        influence, last = [*self.influence.tolist(), *self.shares], len(self.tokens) - 1
        numbers, nodes = dict[int, int](), list[dict[str, Any]]()
        for i, node in enumerate(self.all_nodes):
            if self.kept_nodes[i] and node.kind in _KINDS:
                numbers[i] = len(nodes)
                position = last if node.position is None else node.position
                place = {name: getattr(node, field) for name, field in _KINDS[node.kind][1].items()}
                more = {"activation": node.value} if node.kind == "feature" else {}
                more |= {"probability": influence[i]} if node.kind == "output" else {"influence": influence[i]}
                nodes.append({"kind": _KINDS[node.kind][0], "position": position, **place, **more, "label": str(node)})
        rows = [*range(self.num_features), *range(self.num_sources, len(self.all_nodes))]
        pairs = [(j, rows[i], float(self.weights[i, j])) for i, j in np.argwhere(self.kept_edges).tolist() if j in numbers]
        links = [(numbers[source], numbers[target], weight) for source, target, weight in pairs]
        layers = 1 + max(node.layer or 0 for node in self.all_nodes if node.kind == "error")
        return {"nodes": nodes, "links": links, "tokens": list(self.words), "num_layers": layers}

    def _repr_html_(self) -> str:
        return _page(repr(self), self.edges)


def _page(lead: str, edges: pd.DataFrame) -> str:
    """The first edges, without those of biases, as a table."""
    shown = edges[[source.kind != "bias" for source in edges["source"]]].head(20)
    named = shown.assign(source=shown["source"].map(str), target=shown["target"].map(str))
    return str(paragraph(lead)) + named.to_html(index=False, float_format="{:.4f}".format)


_KINDS: dict[Kind, tuple[str, dict[str, str]]] = {
    "feature": ("feature", {"layer": "layer", "feature": "number"}),
    "error": ("error", {"layer": "layer"}),
    "token": ("embedding", {"token": "number"}),
    "output": ("logit", {"token": "number"}),
}
"""kind -> its name in graph files, and the fields that it has there"""


# ---- picture ---------------------------------------------------------------------------------------------------------

_MAX_EDGES = 500
"""that a picture shows"""
_MARKERS: dict[Kind, str] = {"feature": "o", "error": "D", "token": "s", "edit": "^", "output": "P"}
"""biases and the rest have no place of their own"""


def _strongest(graph: Graph) -> tuple[np.ndarray, np.ndarray, int]:
    """(source and target [edges, 2] of the edges to draw, their weights, how many there are), the strongest last."""
    targets, sources = np.nonzero(graph.kept_edges & graph._columns(*_MARKERS))
    weights = graph.weights.numpy()[targets, sources].astype(np.float64)
    order = np.argsort(np.abs(weights), kind="stable")[-_MAX_EDGES:]
    numbers = np.array([*range(graph.num_features), *range(graph.num_sources, len(graph.all_nodes))])
    return np.stack([sources, numbers[targets]], 1)[order], weights[order], len(weights)


def _places(graph: Graph, shown: Sequence[int], top: int) -> dict[int, np.ndarray]:
    """number of a node -> its token and layer [2]. Nodes of one place lie side by side; outputs are above the last token."""
    rows: dict[Kind, int] = {"token": -1, "output": top}
    by_place: dict[tuple[int, int], list[int]] = {}
    for i in shown:
        node = graph.all_nodes[i]
        position = len(graph.tokens) - 1 if node.position is None else node.position
        by_place.setdefault((position, rows.get(node.kind, node.layer or 0)), []).append(i)
    found: dict[int, np.ndarray] = {}
    for (position, layer), here in by_place.items():
        shifts = np.linspace(-0.35, 0.35, len(here)) if len(here) > 1 else np.zeros(1)
        found |= {i: np.array([position + shift, layer]) for i, shift in zip(here, shifts, strict=True)}
    return found


def _drawn(graph: Graph) -> Figure:
    pairs, weights, count = _strongest(graph)
    stays = [i for i, node in enumerate(graph.all_nodes) if graph.kept_nodes[i] and node.kind in ("token", "output", "feature")]
    shown, top = sorted({*pairs.ravel().tolist(), *stays}), 1 + max(node.layer or 0 for node in graph.all_nodes)
    places, reach = _places(graph, shown, top), float(np.abs(weights).max(initial=0.0)) or 1.0
    made = picture(min(max(4.0, 0.55 * len(graph.tokens)), 24) + 1.5, min(0.7 * (top + 2), 14) + 1.5)
    axis = made.subplots()
    ends = [np.stack([places[a], places[b]]) for a, b in pairs.tolist()]
    widths, scale = 0.3 + 2.2 * np.abs(weights) / reach, Normalize(-reach, reach)
    lines = LineCollection(ends, linewidths=widths, cmap="RdBu_r", norm=scale, array=weights, zorder=1, gid="edges")
    axis.add_collection(lines)
    influence = [*graph.influence.tolist(), *graph.shares]
    most = max(influence[i] for i in shown) or 1.0
    for kind, marker in _MARKERS.items():
        if own := [i for i in shown if graph.all_nodes[i].kind == kind]:
            sizes = [25 + 175 * influence[i] / most for i in own] if kind == "feature" else 40
            x, y = np.stack([places[i] for i in own]).T
            axis.scatter(x, y, s=sizes, marker=marker, zorder=2, edgecolors="white", gid=kind)
    words = [plain(short(visible(word), 12)) for word in graph.words]
    axis.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
    axis.set_yticks(range(-1, top + 1), ["token", *(f"layer {layer}" for layer in range(top)), "output"], fontsize=7)
    axis.set(xlim=(-0.6, len(words) - 0.4), ylim=(-1.6, top + 0.6))
    cut = f"the {len(pairs)} strongest of {count} edges" if len(pairs) < count else f"{count} edges"
    axis.set_title(f"{len(shown)} nodes, {cut}", fontsize=9)
    made.colorbar(lines, ax=axis, label="weight of an edge")
    return made


def row_sums(x: np.ndarray) -> np.ndarray:
    """[rows, n] -> [rows], added from first to last, as on every machine"""
    return x.cumsum(1)[:, -1]


def influence_of(edges: np.ndarray, outputs: Sequence[float], columns: Sequence[int]) -> np.ndarray:
    """The influence of each source [sources], in a graph without cycles.

    edges    [targets, sources], the outputs last
    outputs  how much each counts
    columns  of the targets before them. There may be fewer than targets: the others have no edges yet
    """
    first = len(edges) - len(outputs)
    sums = [float(np.abs(row).astype(np.float64).cumsum()[-1]) for row in edges]

    def shared(weights: Sequence[float], rows: Sequence[int]) -> np.ndarray:
        """What the targets of some rows hand on, added from first to last."""
        total = np.zeros(edges.shape[1], dtype=np.float64)
        for weight, row in zip(weights, rows, strict=True):
            if weight and sums[row]:
                total += np.abs(edges[row]).astype(np.float64) * (weight / sums[row])
        return total

    now, total = shared(outputs, range(first, len(edges))), np.zeros(edges.shape[1], dtype=np.float64)
    while now.any():
        total += now
        now = shared(now[list(columns)].tolist(), range(len(columns)))
    return total


def _top(scores: np.ndarray, share: float) -> np.ndarray:
    """Which of the scores are the largest that together have this share of the sum. Those equal to the last, up to rounding,
    are kept as well, zeros are not."""
    order = np.sort(scores)[::-1]
    reached = np.cumsum(order)
    last = min(int(np.searchsorted(reached, share * reached[-1])), len(order) - 1)
    return (scores >= order[last] * (1 - 1e-9)) & (scores > 0)


_DiffLine = tuple[tuple[Node, ...], list[float], list[bool]]
"""nodes, their numbers before and after, and whether each side has them"""


# ---- difference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GraphDiff(Citable):
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
        found: list[_DiffLine] = []
        for key, node in kept.items():
            if not self._left_out(node):
                values = [side[key].value if key in side else 0.0 for side in sides]
                found.append(((node,), values, [key in side for side in sides]))
        return _differing(found, "node")

    @cached_property
    def edges(self) -> pd.DataFrame:
        """One line per edge that differs: source, target, before, after, change, status. An edge that is not there is 0."""
        graphs = self.after, self.before
        sources = {node.key: node for graph in graphs for node in graph.all_nodes[: graph.num_sources]}
        targets = {node.key: node for graph in graphs for node in graph.targets}
        known = [np.array([not self._left_out(node) for node in side.values()]) for side in (targets, sources)]
        (after, kept), (before, kept_before) = (_aligned(graph, list(targets), list(sources)) for graph in graphs)
        differs = (before != after) & (kept | kept_before) & known[0][:, None] & known[1]
        rows, columns = list(targets.values()), list(sources.values())
        found: list[_DiffLine] = []
        for i, j in np.argwhere(differs).tolist():
            values = [float(before[i, j]), float(after[i, j])]
            found.append(((columns[j], rows[i]), values, [value != 0 for value in values]))
        return _differing(found, "source", "target")

    def _left_out(self, node: Node) -> bool:
        """Whether one of the graphs does not know the node's edges, because it has too many features."""
        key = (node.layer, node.position, node.number)
        return node.kind == "rest" or (node.kind == "feature" and any(key in g.left_out for g in (self.before, self.after)))

    def _repr_html_(self) -> str:
        return _page(repr(self), self.edges)


def _aligned(graph: Graph, targets: list[Any], sources: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The weights of a graph and which edges were not pruned, by the keys of other nodes; 0 of those that it does not have."""
    rows, columns = ({key: i for i, key in enumerate(side)} for side in (targets, sources))
    at = np.ix_(
        [rows[node.key] for node in graph.targets], [columns[node.key] for node in graph.all_nodes[: graph.num_sources]]
    )
    weights, kept = np.zeros((len(rows), len(columns)), dtype=np.float32), np.zeros((len(rows), len(columns)), dtype=bool)
    weights[at], kept[at] = graph.weights.numpy(), graph.kept_edges
    return weights, kept


def _differing(found: list[_DiffLine], *names: str) -> pd.DataFrame:
    """The lines whose numbers or presence differ, the largest change first."""
    lines = []
    for nodes, (before, after), there in found:
        if before != after or there[0] != there[1]:
            status = "changed" if all(there) else "appeared" if there[1] else "vanished"
            lines.append((*nodes, before, after, after - before, status))
    frame = pd.DataFrame(lines, columns=[*names, "before", "after", "change", "status"])
    return frame.sort_values("change", key=abs, ascending=False, kind="stable", ignore_index=True)
