"""`Moments`: means, covariance and cross-covariance of rows and their classes, whole or streamed, with the same bits.

Many probes need nothing else. Each row is extended by its one-hot class; the streaming statistics of the extended rows, with
their fixed order of summation, contain everything:

    covariance of [x, onehot(y)]  =  [[cov(x, x), cov(x, y)], [cov(y, x), cov(y, y)]]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.probes.errors import OneClass, ProbeError
from replaylens.probes.running_moments import StreamingStatistics


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
    def class_means(self) -> Tensor:
        """[k, d]"""
        return self.mean + (self.cross / self.shares).T

    @property
    def within(self) -> Tensor:
        """[d, d]: the covariance about the class means."""
        between = (self.cross / self.shares) @ self.cross.T
        return self.covariance - between


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
