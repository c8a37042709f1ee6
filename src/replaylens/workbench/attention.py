"""`attention`: the attention patterns of a text, head by head, and what kind of head each one is."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable, visible
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_int, integer, short_repr, verb
from replaylens.views.html import fragment, tag, void
from replaylens.views.maps import draw
from replaylens.workbench.ablate import chosen_layers
from replaylens.workbench.drawing import Grid, figure, paragraph, table, words

_MAX_CELLS = 400_000
"""of all patterns in a notebook, one byte for about every second of them; above, the summary is shown"""
_KINDS = {
    "previous": "previous token",
    "first": "first token",
    "own": "own token",
    "induction": "induction",
}


@dataclass(frozen=True, eq=False)
class AttentionResult(Citable):
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

    def grid(self, layer: int, head: int, first: bool = True) -> Grid:
        """One pattern, queries from top to bottom. `first=False` hides the first token, on which much attention often rests."""
        if integer(layer) not in self.layers:
            raise BadRequest(f"Invalid layer={short_repr(layer)}. This result has layers {', '.join(map(str, self.layers))}.")
        at = self.layers.index(int(layer))
        p = self.pattern[at, as_int("head", head, 0, self.pattern.shape[1] - 1)].numpy()
        hidden = np.where(np.tril(np.ones_like(p, dtype=bool)), p, np.nan)
        if not first:
            hidden[:, 0] = np.nan
        return Grid(f"L{layer}H{head}", self.tokens[::-1], self.tokens, hidden[::-1])

    def plot(self, layer: int | None = None, head: int | None = None, *, first: bool = True) -> Figure:
        """One head's pattern; all heads of a layer; or, without a layer, the summary: layers by heads.

        first  False: patterns without the first token, so that what else a head attends to has the whole colour scale
        """
        if layer is None:
            if len(self.tokens) == 1:
                raise BadRequest("A single token attends to itself only, so there is nothing to sum up. Give a longer text.")
            return self._shown(figure(self._summary(), "mean attention", "layer", "head"))
        heads = range(self.pattern.shape[1]) if head is None else [head]
        return self._shown(figure([self.grid(layer, h, first) for h in heads], "attention", "query", "key"))

    def _summary(self) -> list[Grid]:
        frame, heads = self.frame, self.pattern.shape[1]
        grids = []
        for kind, title in _KINDS.items():
            values = frame[kind].to_numpy(dtype=float).reshape(len(self.layers), heads)
            if np.isfinite(values).any():
                grids.append(Grid(title, [str(l) for l in self.layers], [str(h) for h in range(heads)], values))
        return grids

    def _repr_html_(self) -> str:
        """One view: a token under the mouse shows where a chosen head attends from there. Below it, a summary of all heads."""
        parts = [] if self.pattern.numel() > _MAX_CELLS else [self._explorer()]
        tables = tag("div", *(draw(table(grid)) for grid in self._summary()), class_="rl-beside")
        note = paragraph("Mean attention by kind of key. Rows are layers, columns are heads.")
        return fragment(*parts, *([tables, note] if len(self.tokens) > 1 else []))

    def _explorer(self) -> Markup:
        """The text, with a byte per weight for the script. Without scripts: what the first head's last query attends to."""
        heads = [f"L{layer}H{head}" for layer in self.layers for head in range(self.pattern.shape[1])]
        lower = np.tril_indices(len(self.tokens))
        weights = np.rint(self.pattern.flatten(0, 1).numpy()[:, lower[0], lower[1]] * 255).clip(0, 255).astype(np.uint8)
        last = self.pattern[0, 0, -1].tolist()
        words = [
            tag("span", visible(text), class_="rl-key rl-cell", style=f"--v:{weight:.0%}", tabindex=0)
            for text, weight in zip(self.tokens, last, strict=True)
        ]
        choice = tag("select", *(tag("option", name, value=i) for i, name in enumerate(heads)), aria_label="head")
        sink = tag("label", void("input", type="checkbox", class_="rl-sink"), " hide the first token")
        about = tag("span", "a stronger colour gets more attention from the framed token", class_="rl-quiet rl-count")
        bar = tag("div", tag("b", "Attention"), choice, sink, about, class_="rl-head")
        packed = base64.b64encode(weights.tobytes()).decode()
        return tag("div", bar, tag("div", *words, class_="rl-keys rl-heat"), class_="rl-attention", data_weights=packed)


@verb
def attention(engine: Engine, text: Prompt, *, layers: Sequence[int] | None = None) -> AttentionResult:
    """The attention patterns of a text. On a CPU only: the kernels of a GPU never store them.

    layers  those to keep; None: all that have attention

    >>> from replaylens import Engine, attention
    >>> result = attention(Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A:")
    >>> result.pattern.shape  # [layers, heads, queries, keys]
    torch.Size([4, 4, 15, 15])
    """
    chosen = engine.config.layers_with("attn") if layers is None else chosen_layers(layers, engine.config.num_layers)
    names = [engine.sites.resolve(f"blocks.{layer}.attn.hook_pattern") for layer in chosen]
    if not names:
        raise BadRequest(f"No layer of this {engine.config.family} model has attention. Capture its mixer sites instead.")
    branch = engine.prompt(text, sites=names)
    try:
        path = branch.tokens
        rows = torch.stack([branch.activations[name][..., : len(path)] for name in names])  # [layers, queries, heads, keys]
    finally:
        branch.release()
    pattern, by = rows.transpose(1, 2).contiguous(), (engine.fingerprint,)
    return AttentionResult(words(engine, path), tuple(chosen), pattern, tuple(path), made_by=by)
