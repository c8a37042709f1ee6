"""`StreamingStatistics`: count, mean and covariance of captured rows, without keeping them.

Rows are added up in chunks of a fixed size, in the order in which they are given, in float64: the result is a function of
the rows and their order, whatever pieces they come in.
"""

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest

CHUNK = 256
"""rows per product; part of the order of summation, hence of the bits"""


class StreamingStatistics:
    """Moments of one stream of rows [n, d]. `add` takes pieces of any length."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)
        self._waiting = torch.empty(0, width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Mutates: more rows, after all earlier ones."""
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise BadRequest(f"rows of shape {tuple(rows.shape)}; wanted is [n, {self.width}]")
        waiting = torch.cat([self._waiting, rows.double()])
        whole = len(waiting) // CHUNK * CHUNK
        for chunk in waiting[:whole].split(CHUNK):
            self._take(chunk)
        self._waiting = waiting[whole:].clone()
        self.count += len(rows)

    def _take(self, chunk: Tensor) -> None:
        padded = torch.zeros(CHUNK, self.width, dtype=torch.float64)  # a short last chunk runs through the same product
        padded[: len(chunk)] = chunk
        self._sum += padded.sum(0)
        self._products += padded.T @ padded

    def moments(self) -> tuple[Tensor, Tensor]:
        """(mean [d], covariance [d, d], divided by n), float64. Changes nothing: more rows may follow."""
        if not self.count:
            raise BadRequest("no rows were added")
        rest = StreamingStatistics(self.width)
        rest._sum, rest._products = self._sum.clone(), self._products.clone()
        if len(self._waiting):
            rest._take(self._waiting)
        mean = rest._sum / self.count
        return mean, rest._products / self.count - torch.outer(mean, mean)
