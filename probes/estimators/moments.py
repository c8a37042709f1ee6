"""`Moments`: means, covariance and cross-covariance of rows and their classes, whole or streamed, with the same bits.

Many probes need nothing else. Each row is extended by its one-hot class; the covariance of the extended rows contains
everything:

    covariance of [x, onehot(y)]  =  [[cov(x, x), cov(x, y)], [cov(y, x), cov(y, y)]]

Rows are summed in float64, in chunks of a fixed size and in the given order, as differences from the first row: so a large
common mean costs the covariance no digits, and a constant column has variance 0. The result depends on the rows and their
order alone, whatever pieces they arrive in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.probes.errors import BadRows, OneClass, ProbeError

CHUNK = 256
"""rows per product; part of the order of summation, hence of the bits"""


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of rows [n, d] with k classes, in float64."""

    count: int
    classes: tuple[str, ...]
    mean: Tensor
    """[d]"""
    covariance: Tensor
    """[d, d], divided by n"""
    cross: Tensor
    """[d, k]: covariance of the rows with each class's indicator"""
    shares: Tensor
    """[k]: relative frequency of each class"""

    @property
    def deviations(self) -> Tensor:
        """[d]: standard deviation of each column; 0 for a column that is constant up to rounding."""
        variance = self.covariance.diagonal()
        rounding = 10 * torch.finfo(variance.dtype).eps * self.mean.abs()
        return torch.where(variance > rounding.square(), variance.clamp_min(0).sqrt(), 0.0)

    @property
    def class_means(self) -> Tensor:
        """[k, d]"""
        return self.mean + (self.cross / self.shares).T

    @property
    def within(self) -> Tensor:
        """[d, d]: the covariance about the class means."""
        between = (self.cross / self.shares) @ self.cross.T
        return self.covariance - between


class StreamingStatistics:
    """Moments of one stream of rows [n, d]. `add` takes pieces of any length."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self._first = torch.zeros(width, dtype=torch.float64)
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)
        self._waiting = torch.empty(0, width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Mutates: adds rows after all earlier ones."""
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise BadRows(f"The rows have shape {tuple(rows.shape)}. Give rows of shape [n, {self.width}].")
        if not self.count and len(rows):
            self._first = rows[0].double().clone()
        waiting = torch.cat([self._waiting, rows.double()])
        whole = len(waiting) // CHUNK * CHUNK
        for chunk in waiting[:whole].split(CHUNK):
            self._take(chunk)
        self._waiting = waiting[whole:].clone()
        self.count += len(rows)

    def _take(self, chunk: Tensor) -> None:
        padded = torch.zeros(CHUNK, self.width, dtype=torch.float64)  # a short last chunk takes the same product
        padded[: len(chunk)] = chunk - self._first
        self._sum += padded.sum(0)
        self._products += padded.T @ padded

    def moments(self) -> tuple[Tensor, Tensor]:
        """(mean [d], covariance [d, d], divided by n), float64. Mutates nothing: more rows may follow."""
        if not self.count:
            raise BadRows("No rows were added. Add rows first.")
        rest = StreamingStatistics(self.width)
        rest._first, rest._sum, rest._products = self._first, self._sum.clone(), self._products.clone()
        if len(self._waiting):
            rest._take(self._waiting)
        mean = rest._sum / self.count
        return self._first + mean, rest._products / self.count - torch.outer(mean, mean)


class MomentStream:
    """Collects moments of rows that arrive in pieces. The order of the rows matters, the cuts do not."""

    def __init__(self, width: int, classes: Sequence[str]) -> None:
        if len(set(classes)) < 2:
            raise OneClass(f"The classes are {list(classes)}. Give at least two.")
        self.classes = tuple(classes)
        self.width = width
        self._place = {name: i for i, name in enumerate(self.classes)}
        self._statistics = StreamingStatistics(width + len(self.classes))

    @property
    def count(self) -> int:
        return self._statistics.count

    def add(self, rows: Tensor, values: Sequence[str] | np.ndarray) -> None:
        """Mutates: adds rows [n, d] with the class of each."""
        extended = torch.zeros(len(rows), self.width + len(self.classes), dtype=torch.float64)
        extended[:, : self.width] = rows
        for i, value in enumerate(values):
            if value not in self._place:
                raise ProbeError(f"Class {value!r} is not among {', '.join(self.classes)}. Name all classes beforehand.")
            extended[i, self.width + self._place[value]] = 1.0
        self._statistics.add(extended)

    def moments(self) -> Moments:
        """Moments of the rows so far; more may follow. Raises OneClass if a class has no rows."""
        mean, covariance = self._statistics.moments()
        d = self.width
        if bool((mean[d:] == 0).any()):
            empty = [name for name, share in zip(self.classes, mean[d:], strict=True) if share == 0]
            raise OneClass(f"No row of class {', '.join(empty)} among {self.count} rows. Fit on rows of every class.")
        return Moments(self.count, self.classes, mean[:d], covariance[:d, :d], covariance[:d, d:], mean[d:])


def moments_of(rows: np.ndarray | Tensor, values: np.ndarray) -> Moments:
    """Moments of rows in memory."""
    x = torch.as_tensor(rows)
    stream = MomentStream(x.shape[1], [str(name) for name in np.unique(values.astype(str))])
    stream.add(x, values.astype(str))
    return stream.moments()
