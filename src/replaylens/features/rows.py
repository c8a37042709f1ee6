"""`FeatureRows`: the active features of some rows, stored sparse."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.display import visible
from replaylens.engine.errors import BadRange, BadRequest, NotCertified
from replaylens.engine.request.values import as_int, as_list, integer
from replaylens.kernels.cpu import Panels, product

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# ---- rows ------------------------------------------------------------------------------------------------------------

_SHOWN_ROWS = 200
"""of a table in a notebook"""
_SHOWN_FEATURES = 5
"""per row of that table"""
Ids = int | Iterable[int]


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """The active features of each row, by ascending number. All others are zero."""

    offsets: Tensor
    """[rows + 1] int64: row i has the entries [offsets[i], offsets[i + 1])"""
    indices: Tensor
    """[entries] int32: the feature"""
    values: Tensor
    """[entries] float32: its activation, above zero"""
    width: int
    """the number of features, active or not"""
    positions: tuple[int, ...] | None = None
    """of the rows on their branch"""
    words: tuple[str, ...] | None = None
    """text of the rows' tokens"""

    @classmethod
    def of_dense(cls, pieces: Iterable[Tensor], width: int) -> "FeatureRows":
        """From activations [n, width] on any device, piece by piece, none of them below zero. The result is on the CPU."""
        counts, indices, values = [torch.zeros(1, dtype=torch.int64)], [], []
        for piece in pieces:
            row, index = piece.nonzero(as_tuple=True)  # row by row, features ascending
            values.append(piece[row, index].cpu())
            counts.append(torch.bincount(row.cpu(), minlength=len(piece)))
            indices.append(index.cpu().to(torch.int32))
        empty = torch.empty(0, dtype=torch.float32)
        return cls(
            torch.cat(counts).cumsum(0), torch.cat([empty.to(torch.int32), *indices]), torch.cat([empty, *values]), width
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        mean = len(self.values) / max(1, len(self))
        return f"FeatureRows({len(self)} rows, {self.width} features, {mean:.1f} active per row)"

    def row(self, i: int) -> tuple[Tensor, Tensor]:
        """(indices, values) of one row; negative numbers count from the end. Raises BadRange."""
        at = integer(i)
        if at is None or not -len(self) <= at < len(self):
            raise BadRange(f"No row {i!r:.40}. There are {len(self)} rows.")
        first, end = self.offsets[at % len(self)], self.offsets[at % len(self) + 1]
        return self.indices[first:end], self.values[first:end]

    @property
    def counts(self) -> Tensor:
        """[rows]: the number of active features (L0)."""
        return self.offsets.diff()

    @cached_property
    def rows_of_entries(self) -> Tensor:
        """[entries]: the row of each entry."""
        return torch.repeat_interleave(torch.arange(len(self)), self.counts)

    def columns(self, features: Ids) -> Tensor:
        """The activations of chosen features: [rows, chosen], in the order given. Raises BadRequest for an unknown one."""
        chosen = feature_ids("features", features, self.width)
        place = torch.full((self.width,), -1)
        place[chosen] = torch.arange(len(chosen))
        column = place[self.indices.long()]
        out = torch.zeros(len(self), len(chosen), dtype=torch.float32)
        there = column >= 0
        out[self.rows_of_entries[there], column[there]] = self.values[there]
        return out

    def dense(self) -> Tensor:
        """[rows, width]"""
        out = torch.zeros(len(self), self.width, dtype=torch.float32)
        out[self.rows_of_entries, self.indices.long()] = self.values
        return out

    def strongest(self, n: int) -> list[int]:
        """The n features with the largest activation at any row, largest first; fewer if fewer are active."""
        most = np.zeros(self.width, dtype=np.float32)
        np.maximum.at(most, self.indices.numpy(), self.values.numpy())
        order = np.lexsort((np.arange(self.width), -most))[: as_int("n", n, 1)]
        return [int(i) for i in order if most[i] > 0]

    def frame(self) -> "pd.DataFrame":
        """One line per active feature of a row: row, position and token if known, feature, activation."""
        import pandas as pd

        row = self.rows_of_entries.numpy()
        columns: dict[str, np.ndarray] = {"row": row}
        if self.positions is not None:
            columns["position"] = np.array(self.positions, dtype=np.int64)[row]
        if self.words is not None:
            columns["token"] = np.array(self.words, dtype=object)[row]
        return pd.DataFrame(columns | {"feature": self.indices.numpy(), "activation": self.values.numpy()})

    def plot(self, features: Ids | None = None) -> "Figure":
        """A heat map of features by rows; default: the 20 strongest features."""
        from replaylens.engine.display import picture, plain

        chosen = self.strongest(20) if features is None else feature_ids("features", features, self.width)
        if not chosen or not len(self):
            raise BadRequest("No feature is active, so there is nothing to plot. Give features, or other rows.")
        figure = picture(2 + 0.3 * len(self), 1.5 + 0.22 * len(chosen))
        axis = figure.subplots()
        image = axis.imshow(self.columns(chosen).T.numpy(), aspect="auto", cmap="viridis", vmin=0.0)
        axis.set(ylabel="feature", yticks=range(len(chosen)), yticklabels=chosen, xlabel="token" if self.words else "row")
        if self.words is not None:
            axis.set_xticks(range(len(self)), [plain(word) for word in self.words], rotation=90, fontsize=7)
        figure.colorbar(image, ax=axis, label="activation")
        return figure

    def _repr_html_(self) -> str:
        from replaylens.views.html import fragment, tag

        lines = []
        for i in range(min(len(self), _SHOWN_ROWS)):
            indices, values = self.row(i)
            top = values.argsort(descending=True, stable=True)[:_SHOWN_FEATURES].tolist()
            entries = "  ".join(f"{int(indices[t])}: {float(values[t]):.3g}" for t in top)
            name = visible(self.words[i]) if self.words is not None else ""
            at = i if self.positions is None else self.positions[i]
            lines.append(tag("tr", tag("td", at), tag("td", name), tag("td", len(indices)), tag("td", entries)))
        head = tag("tr", *(tag("th", word) for word in ("position", "token", "active", "strongest features")))
        more = f", the first {_SHOWN_ROWS} shown" if len(self) > _SHOWN_ROWS else ""
        return fragment(tag("p", f"{self!r}{more}"), tag("table", head, *lines))


def feature_ids(name: str, given: Ids, width: int) -> list[int]:
    """Feature numbers as a list; BadRequest for an unknown one or one that is given twice."""
    single = integer(given)
    listed = [single] if single is not None else as_list(name, given, "feature numbers", BadRequest)
    found = [as_int(name, each, 0, width - 1) for each in listed]
    if len(set(found)) < len(found):
        raise BadRequest(f"Invalid {name}: a feature is given twice. Give each once.")
    return found


# ---- product ---------------------------------------------------------------------------------------------------------
# The product of an encoder: a row's bits depend neither on the other rows nor on threads. The doctor examines the shapes of
# the model only, so on a GPU the encoder's shape is examined here, at its first use.


class RowProduct:
    """The product with one weight on a CPU, which must not change afterwards."""

    def __init__(self, weight: Tensor) -> None:
        """weight  [inputs, outputs]"""
        self.panels = Panels.of(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, inputs] -> [n, outputs]"""
        return product(rows.contiguous(), self.panels)


class KernelProduct:
    """The product with one weight on a GPU, which must not change afterwards."""

    def __init__(self, weight: Tensor) -> None:
        """weight  [inputs, outputs]"""
        self.weight = weight
        self._certified = False

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, inputs] -> [n, outputs], float32. Raises NotCertified."""
        from replaylens.kernels.matmul import matmul  # needs triton

        if not self._certified:
            self._examine()
        return matmul(rows.contiguous(), self.weight)

    def _examine(self) -> None:
        """Mutates: certified, or NotCertified if the bits of a row depend on the number of rows."""
        from replaylens.kernels.matmul import matmul

        generator = torch.Generator(self.weight.device).manual_seed(0)
        many = torch.randn(17, self.weight.shape[0], generator=generator, device=self.weight.device, dtype=torch.float32)
        together = matmul(many, self.weight)
        parts = (slice(0, 1), slice(3, 4), slice(1, 10))
        if not all(torch.equal(matmul(many[some], self.weight), together[some]) for some in parts):
            raise _not_certified(self.weight)
        self._certified = True


def _not_certified(weight: Tensor) -> NotCertified:
    return NotCertified(
        f"On this machine, a product of shape {list(weight.shape)} gives a row other bits in another tile, so "
        "features would depend on the rows they are encoded with. Run `replaylens doctor`; use another build of torch."
    )
