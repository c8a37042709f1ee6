"""`StreamingStatistics`: count, mean and covariance of captured rows, without keeping them.

Rows are summed in float64, in chunks of a fixed size and in the given order. The result depends on the rows and their order
alone, whatever pieces they arrive in.
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
        """Mutates: adds rows after all earlier ones."""
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise BadRequest(f"The rows have shape {tuple(rows.shape)}. Give rows of shape [n, {self.width}].")
        waiting = torch.cat([self._waiting, rows.double()])
        whole = len(waiting) // CHUNK * CHUNK
        for chunk in waiting[:whole].split(CHUNK):
            self._take(chunk)
        self._waiting = waiting[whole:].clone()
        self.count += len(rows)

    def _take(self, chunk: Tensor) -> None:
        padded = torch.zeros(CHUNK, self.width, dtype=torch.float64)  # a short last chunk takes the same product
        padded[: len(chunk)] = chunk
        self._sum += padded.sum(0)
        self._products += padded.T @ padded

    def moments(self) -> tuple[Tensor, Tensor]:
        """(mean [d], covariance [d, d], divided by n), float64. Mutates nothing: more rows may follow."""
        if not self.count:
            raise BadRequest("No rows were added. Add rows first.")
        rest = StreamingStatistics(self.width)
        rest._sum, rest._products = self._sum.clone(), self._products.clone()
        if len(self._waiting):
            rest._take(self._waiting)
        mean = rest._sum / self.count
        return mean, rest._products / self.count - torch.outer(mean, mean)
