"""`PatchResult`: the metric after each patch of a grid."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.attribution.effects import common_words, require_one_length, t_interval
from replaylens.engine.errors import BadRequest
from replaylens.workbench.aligned import Direction
from replaylens.workbench.drawing import Grid, figure, paragraph, plain, view

Values = Literal["effect", "raw"]
_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output", "heads": "attention heads"}


@dataclass(frozen=True, eq=False)
class PatchResult:
    """The metric after each patch, by site: [layers, positions], or [layers, heads] of `heads`. NaN: not asked for."""

    metric: str
    direction: Direction
    base: float
    """the metric of the prompt that is patched: the corrupt one if denoising, else the clean one"""
    source: float
    """the metric of the prompt that activations are taken from"""
    raw: dict[str, Tensor]
    """site -> the metric under each patch"""
    columns: dict[str, tuple[str, ...]]
    """site -> names of its columns: tokens of the patched prompt, or heads"""
    numbers: dict[str, tuple[int, ...]]
    """site -> the positions or heads of its columns; positions are negative where pairs have different lengths"""
    layers: dict[str, tuple[int, ...]]
    """site -> the layers of its rows"""
    length: int = 0
    """tokens of the patched prompt"""
    pairs: "tuple[PatchResult, ...]" = ()
    """of a mean over pairs of prompts: the result of each"""

    @classmethod
    def mean(cls, pairs: "Sequence[PatchResult]", from_end: bool = False) -> "PatchResult":
        """The mean over pairs of prompts; BadRequest if their positions do not correspond.

        from_end  positions of prompts with different lengths correspond if they are equally far from the end
        """
        if from_end and len({pair.length for pair in pairs}) > 1:
            pairs = [pair._at_end(pairs) for pair in pairs]
        first = pairs[0]
        for site in first.raw:
            if site != "heads":
                require_one_length([pair.length for pair in pairs], ", or align='end'")
                if any(pair.numbers[site] != first.numbers[site] for pair in pairs):
                    raise BadRequest("The pairs are patched at different positions. Give positions that all of them have.")
        middle = lambda values: sum(values) / len(pairs)  # noqa: E731
        names = {pair.metric for pair in pairs}
        return cls(
            first.metric if len(names) == 1 else "metric",
            first.direction,
            middle(pair.base for pair in pairs),
            middle(pair.source for pair in pairs),
            {site: torch.stack([pair.raw[site] for pair in pairs]).double().mean(0).float() for site in first.raw},
            {site: common_words([pair.columns[site] for pair in pairs]) for site in first.raw},
            first.numbers,
            first.layers,
            first.length,
            tuple(pairs),
        )

    def _at_end(self, pairs: "Sequence[PatchResult]") -> "PatchResult":
        """This pair, with the columns that all pairs have, counted from the end: -1 is the last position."""
        raw, columns, numbers = dict(self.raw), dict(self.columns), dict(self.numbers)
        for site in self.raw.keys() - {"heads"}:
            known = set.intersection(*({number - pair.length for number in pair.numbers[site]} for pair in pairs))
            kept = [i for i, number in enumerate(self.numbers[site]) if number - self.length in known]
            if not kept:
                raise BadRequest("The pairs have no patched position in common, counted from the end. Give other positions.")
            raw[site] = self.raw[site][:, kept]
            columns[site] = tuple(self.columns[site][i] for i in kept)
            numbers[site] = tuple(self.numbers[site][i] - self.length for i in kept)
        return replace(self, raw=raw, columns=columns, numbers=numbers, length=0)

    def __repr__(self) -> str:
        grids = ", ".join(f"{site} {tuple(values.shape)}" for site, values in self.raw.items())
        count = f"; mean of {len(self.pairs)} pairs" if self.pairs else ""
        return f"PatchResult({self.metric}, {self.direction}: {self.base:.4g} to {self.source:.4g}; {grids}{count})"

    @property
    def effect(self) -> dict[str, Tensor]:
        """(raw - base) / (source - base): 0 if a patch changes nothing, 1 if it carries the whole difference over. Of several
        pairs, the mean of theirs."""
        if self.pairs:
            return {site: self._effects(site).double().mean(0).float() for site in self.raw}
        return {site: (values - self.base) / (self.source - self.base) for site, values in self.raw.items()}

    def _effects(self, site: str) -> Tensor:
        """[pairs, layers, positions or heads]"""
        return torch.stack([pair.effect[site] for pair in self.pairs])

    @property
    def frame(self) -> pd.DataFrame:
        """One line per patch, the strongest effect first; of several pairs, with the 95 % interval of its mean effect over
        pairs (NaN for a single one)."""
        lines = []
        for site, effect in self.effect.items():
            low, high = t_interval(self._effects(site)) if self.pairs else (effect, effect)
            kind = "head" if site == "heads" else "position"
            for i, layer in enumerate(self.layers[site]):
                for j, (name, number) in enumerate(zip(self.columns[site], self.numbers[site], strict=True)):
                    if effect[i, j].isnan():
                        continue
                    known = {"site": site, "layer": layer, kind: number, "token": None if kind == "head" else name}
                    known |= {"raw": float(self.raw[site][i, j]), "effect": float(effect[i, j])}
                    ends = {"low": float(low[i, j]), "high": float(high[i, j]), "pairs": len(self.pairs)}
                    lines.append(known | ends if self.pairs else known)
        return pd.DataFrame(lines).sort_values("effect", ascending=False, key=abs, kind="stable", ignore_index=True)

    def grids(self, values: Values = "effect") -> list[Grid]:
        """One grid per site."""
        if values not in ("effect", "raw"):
            raise BadRequest(f"Unknown values {values!r}. Known: effect, raw.")
        around = 0.0 if values == "effect" else self.base
        return [
            Grid(_NAMES[site], [str(layer) for layer in self.layers[site]], self.columns[site], grid.numpy(), around=around)
            for site, grid in getattr(self, values).items()
        ]

    def plot(self, values: Values = "effect") -> Figure:
        """A heat map per site: layers by positions, or layers by heads."""
        label = "effect of the patch" if values == "effect" else "metric under the patch"
        made = figure(self.grids(values), label, "layer", "head" if set(self.raw) == {"heads"} else "token")
        count = f", mean of {len(self.pairs)} pairs" if self.pairs else ""
        made.suptitle(f"Patching ({self.direction}): {plain(self.metric)}{count}", fontsize=9)
        return made

    def _repr_html_(self) -> str:
        lead = f"{self.metric}: {self.base:.3f} unpatched, {self.source:.3f} in the source prompt."
        lead += f" Means over {len(self.pairs)} pairs." if self.pairs else ""
        return view(self.grids(), paragraph(lead), note="0: the patch changes nothing; 1: it carries the difference over.")
