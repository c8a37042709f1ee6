"""`attention`: the attention patterns of a text, head by head, and what kind of head each one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.options import verb
from replaylens.engine.request.values import integer, shown, whole
from replaylens.engine.serving.core import Core
from replaylens.workbench.drawing import Grid, figure, view
from replaylens.workbench.heads import chosen_layers
from replaylens.workbench.metric import words

_MAX_CELLS = 20_000
"""of all patterns in a notebook; above, the summary is shown"""
_KINDS = {
    "previous": "previous token",
    "first": "first token",
    "own": "own token",
    "induction": "induction",
}


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """The attention patterns of one text."""

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    pattern: Tensor
    """[layers, heads, queries, keys]"""
    path: tuple[int, ...]
    """token ids"""

    def __repr__(self) -> str:
        layers, heads = self.pattern.shape[:2]
        return f"AttentionResult({layers} layers, {heads} heads, {len(self.tokens)} tokens)"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per head: where its attention goes, as means over queries, and the entropy of its pattern in nats.

        `induction` is NaN if no token occurs twice. The first query, which sees one key only, is left out.
        """
        weights = self.pattern.double().numpy()
        n = weights.shape[-1]
        queries = np.arange(1, n)
        repeats = [(q, k + 1) for q in range(n) for k in range(q) if self.path[k] == self.path[q] and k + 1 < q]
        lines = []
        for i, layer in enumerate(self.layers):
            for head, p in enumerate(weights[i]):
                rows = p[1:]
                spread = -(rows * np.log(np.where(rows > 0, rows, 1.0))).sum(-1).mean() if n > 1 else np.nan
                line = {"layer": layer, "head": head, "entropy": spread}
                line["previous"] = p[queries, queries - 1].mean() if n > 1 else np.nan
                line["first"] = rows[:, 0].mean() if n > 1 else np.nan
                line["own"] = p[queries, queries].mean() if n > 1 else np.nan
                by_query: dict[int, float] = {}
                for q, k in repeats:  # several earlier occurrences: their weights add up
                    by_query[q] = by_query.get(q, 0.0) + p[q, k]
                line["induction"] = float(np.mean(list(by_query.values()))) if by_query else np.nan
                lines.append(line)
        return pd.DataFrame(lines)

    def grid(self, layer: int, head: int) -> Grid:
        """One pattern, queries from top to bottom."""
        if integer(layer) not in self.layers:
            raise BadRequest(f"Invalid layer={shown(layer)}. This result has layers {', '.join(map(str, self.layers))}.")
        at = self.layers.index(int(layer))
        p = self.pattern[at, whole("head", head, 0, self.pattern.shape[1] - 1)].numpy()
        hidden = np.where(np.tril(np.ones_like(p, dtype=bool)), p, np.nan)
        return Grid(f"L{layer}H{head}", self.tokens[::-1], self.tokens, hidden[::-1])

    def plot(self, layer: int | None = None, head: int | None = None) -> Figure:
        """One head's pattern; all heads of a layer; or, without a layer, the summary: layers by heads."""
        if layer is None:
            if len(self.tokens) == 1:
                raise BadRequest("A single token attends to itself only, so there is nothing to sum up. Give a longer text.")
            return figure(self._summary(), "mean attention", "layer", "head")
        heads = range(self.pattern.shape[1]) if head is None else [head]
        return figure([self.grid(layer, h) for h in heads], "attention", "query", "key")

    def _summary(self) -> list[Grid]:
        frame, heads = self.frame, self.pattern.shape[1]
        grids = []
        for kind, title in _KINDS.items():
            values = frame[kind].to_numpy(dtype=float).reshape(len(self.layers), heads)
            if np.isfinite(values).any():
                grids.append(Grid(title, [str(l) for l in self.layers], [str(h) for h in range(heads)], values))
        return grids

    def _repr_html_(self) -> str:
        grids = self._summary()
        if self.pattern.numel() <= _MAX_CELLS:
            grids += [self.grid(layer, head) for layer in self.layers for head in range(self.pattern.shape[1])]
        return view(grids, note="Rows are queries or layers, columns are keys or heads.")


@verb
def attention(engine: Core, text: Prompt, *, layers: Sequence[int] | None = None) -> AttentionResult:
    """The attention patterns of a text. On a CPU only: the kernels of a GPU never store them.

    layers  those to keep; None: all

    >>> from replaylens import Engine, attention
    >>> result = attention(Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A:")
    >>> result.pattern.shape  # [layers, heads, queries, keys]
    torch.Size([4, 4, 15, 15])
    """
    chosen = chosen_layers(layers, engine.config.num_layers)
    names = [engine.sites.resolve(f"blocks.{layer}.attn.hook_pattern") for layer in chosen]
    branch = engine.prompt(text, sites=names)
    try:
        path = branch.tokens
        rows = torch.stack([branch.activations[name][..., : len(path)] for name in names])  # [layers, queries, heads, keys]
    finally:
        branch.release()
    return AttentionResult(words(engine, path), tuple(chosen), rows.transpose(1, 2).contiguous(), tuple(path))
