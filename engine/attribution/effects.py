"""`Attribution`: estimated effects by site and position, with the real effects beside them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_TITLES = {
    "hook_in": "residual stream",
    "attn.o.hook_in": "attention heads",
    "attn.hook_out": "attention output",
    "ln1_post.hook_out": "attention output",
    "mlp.hook_out": "MLP output",
    "ln2_post.hook_out": "MLP output",
}
"""names within a block -> titles of panels"""


@dataclass(frozen=True, eq=False)
class Attribution:
    """How much each row, replaced by another prompt's, changes the metric: in units of the metric."""

    before: float
    """the metric of the prompt that is patched"""
    after: float
    """the metric of the prompt that the rows come from"""
    sites: tuple[str, ...]
    words: tuple[str, ...]
    """the text of each token of the patched prompt"""
    estimate: Tensor
    """[sites, positions], or [sites, positions, heads]: by gradients"""
    real: Tensor | None
    """likewise, by patching, one fork per row or head; None if it was not asked for"""
    certified: bool
    """whether the bits of both are promised"""
    gap: float | None = None
    """of integrated gradients: after - before, minus the sum of the estimates. None of other attributions, which need not add
    up"""
    pairs: "tuple[Attribution, ...]" = ()
    """of a mean over pairs of prompts: that of each"""

    @classmethod
    def mean(cls, pairs: "Sequence[Attribution]") -> "Attribution":
        """The mean over pairs of prompts; BadRequest if their numbers of tokens differ."""
        require_one_length([len(pair.words) for pair in pairs])
        middle = lambda values: torch.stack(list(values)).double().mean(0).float()  # noqa: E731
        real = [pair.real for pair in pairs if pair.real is not None]
        before, after = (sum(getattr(pair, side) for pair in pairs) / len(pairs) for side in ("before", "after"))
        return cls(
            before,
            after,
            pairs[0].sites,
            common_words([pair.words for pair in pairs]),
            middle(pair.estimate for pair in pairs),
            middle(real) if real else None,
            all(pair.certified for pair in pairs),
            pairs=tuple(pairs),
        )

    def __repr__(self) -> str:
        size = f"{len(self.pairs)} pairs, " if self.pairs else ""
        size += f"{len(self.sites)} sites, {len(self.words)} positions{f', {self.heads} heads' if self.heads else ''}"
        compared = "" if self.real is None else f", correlation {self.correlation:.2f} with real effects"
        return f"Attribution({self.before:.4g} to {self.after:.4g}; {size}{compared})"

    @property
    def heads(self) -> int:
        """The number of heads with effects of their own; 0: rows have one effect for all heads together."""
        return self.estimate.shape[2] if self.estimate.dim() == 3 else 0

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimates and real effects, over all rows. NaN if one of them does not vary."""
        real = self._compared()
        return float(torch.corrcoef(torch.stack([self.estimate.flatten(), real.flatten()]).double())[0, 1])

    @property
    def frame(self) -> "pd.DataFrame":
        """One line per row, the largest estimate first; of a mean over pairs, with its 95 % interval (NaN for one pair)."""
        import pandas as pd

        lines = []
        ends = t_interval(torch.stack([pair.estimate for pair in self.pairs])) if self.pairs else None
        for at, estimate in zip(product(*map(range, self.estimate.shape)), self.estimate.flatten().tolist(), strict=True):
            line = {"site": self.sites[at[0]], "position": at[1], "token": self.words[at[1]]}
            line |= {"head": at[2]} if self.heads else {}
            line |= {"estimate": estimate} | ({} if self.real is None else {"real": float(self.real[at])})
            lines.append(line if ends is None else line | {"low": float(ends[0][at]), "high": float(ends[1][at])})
        return pd.DataFrame(lines).sort_values("estimate", key=abs, ascending=False, kind="stable", ignore_index=True)

    def worst(self, n: int = 10) -> "pd.DataFrame":
        """The rows whose estimates are furthest from their real effects."""
        n = whole("n", n, 1)
        self._compared()
        frame = self.frame
        frame["error"] = frame["estimate"] - frame["real"]
        return frame.sort_values("error", key=abs, ascending=False, kind="stable", ignore_index=True).head(n)

    def _compared(self) -> Tensor:
        if self.real is None:
            raise BadRequest("The real effects were not computed. Ask for them with compare=True.")
        return self.real

    def plot(self) -> "Figure":
        """A heat map for each kind of site, layers by tokens, or by heads as sums over positions; the real effects below, on a
        scale of their own."""
        from replaylens.engine.pictures.figure import picture, wrapped

        kinds, grids = self._kinds(), {"estimate": self.estimate}
        if self.real is not None:
            grids["real"] = self.real
        if self.heads:
            grids = {what: grid.sum(1) for what, grid in grids.items()}
        labels = [str(head) for head in range(self.heads)] or self._labels()
        figure = picture(1 + len(kinds) * max(3.0, 0.28 * len(labels)), 0.8 + len(grids) * 3.0)
        for line, (what, grid) in zip(figure.subplots(len(grids), len(kinds), squeeze=False), grids.items(), strict=True):
            most = float(grid.abs().max()) or 1.0
            colors = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
            for axis, (kind, rows) in zip(line, kinds.items(), strict=True):
                shown = axis.pcolormesh(grid[rows].numpy(), **colors)  # shapes, as a report page needs them
                axis.set(title=_TITLES.get(kind, kind), ylabel="layer")
                axis.set_yticks([i + 0.5 for i in range(len(rows))], [str(i) for i in range(len(rows))], fontsize=6)
                axis.set_xticks([i + 0.5 for i in range(len(labels))], labels, rotation=0 if self.heads else 90, fontsize=6)
            figure.colorbar(shown, ax=line, label=wrapped(f"change of the metric: {what}", 2.6))
        return figure

    def _labels(self) -> list[str]:
        from replaylens.engine.pictures.figure import plain

        return [plain(word) for word in self.words]

    def _kinds(self) -> dict[str, list[int]]:
        """Sites of one kind in layer order: their rows by the name within a block. The stream that leaves the last block
        follows those that enter blocks."""
        found: dict[str, list[int]] = {}
        for i, site in enumerate(self.sites):
            found.setdefault(re.sub(r"^blocks\.\d+\.", "", site), []).append(i)
        if "hook_in" in found and len(found.get("hook_out", [])) == 1:
            found["hook_in"] += found.pop("hook_out")
        return found

    def _repr_html_(self) -> str:
        lead = f"<p>Metric: {self.before:.3f} of the patched prompt, {self.after:.3f} of the other one."
        if self.real is not None:
            lead += f" Correlation of estimates and real effects: {self.correlation:.3f}."
        if self.gap is not None:
            lead += f" The attributions miss the difference by {self.gap:.3f}."
        return lead + "</p>" + self.frame.head(12).to_html(index=False, float_format="{:.4f}".format)


def require_one_length(counts: Sequence[int], otherwise: str = "") -> None:
    """BadRequest if pairs of prompts have different numbers of tokens, since their positions do not correspond then."""
    for number, count in enumerate(counts):
        if count != counts[0]:
            raise BadRequest(
                f"Pair {number} of {len(counts)} has {count} tokens, and the first has {counts[0]}. Positions are averaged one "
                f"by one: give pairs with the same number of tokens{otherwise}."
            )


def common_words(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The text of each position of several paths; where they differ, the first two texts."""
    distinct = [list(dict.fromkeys(words)) for words in zip(*paths, strict=True)]
    return tuple("/".join(words[:2]) + ("/..." if len(words) > 2 else "") for words in distinct)


def t_interval(values: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the 95 % t interval of the mean over pairs, [pairs, ...] -> [...] each; NaN for a single pair."""
    from scipy.stats import t

    values, count = values.double(), len(values)
    if count < 2:
        return values[0] * math.nan, values[0] * math.nan
    middle, reach = values.mean(0), float(t.ppf(0.975, count - 1)) * values.std(0) / math.sqrt(count)
    return middle - reach, middle + reach
