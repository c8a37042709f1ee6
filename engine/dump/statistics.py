"""`SiteStatistics`: mean, standard deviation and mean norm of a site's rows, the same bits however the rows are stored.

Sums are float64 and taken in a fixed order: rows in blocks from the first on, each block as a tree of additions. So shards,
threads and machines have no influence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.dump.array import SiteArray
from replaylens.engine.errors import BadRequest

_BLOCK = 2048


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """Of all rows of a site. Each tensor is float64, in the shape of a row."""

    rows: int
    mean: Tensor
    std: Tensor
    """of each coordinate, over the rows (divided by their number)"""
    mean_norm: float
    """mean of the rows' Euclidean norms"""

    @property
    def unit_scale(self) -> float:
        """The factor that gives the rows the mean norm sqrt(d), as sparse autoencoders are trained on."""
        return float(self.mean.numel()) ** 0.5 / self.mean_norm


def statistics(array: SiteArray) -> SiteStatistics:
    """One pass over the rows. Blocks are merged as Chan, Golub and LeVeque do, which is stable."""
    if not len(array):
        raise BadRequest("No row of the dump is selected, so it has no statistics. Widen the conditions of `where`.")
    mean = squares = torch.zeros(array.shape[1:], dtype=torch.float64)
    norms, done = 0.0, 0
    for first in range(0, len(array), _BLOCK):
        x = array[first : first + _BLOCK].double()
        here, total = len(x), done + len(x)
        own = _sum(x) / here
        shift = own - mean
        squares = squares + _sum((x - own).square()) + shift.square() * (done * here / total)
        mean = mean + shift * (here / total)
        norms += float(_sum(_sum(x.flatten(1).square().t()).sqrt()))
        done = total
    return SiteStatistics(done, mean, (squares / done).sqrt(), norms / done)


def _sum(x: Tensor) -> Tensor:
    """The sum over the first dimension, as a tree: halves are added to each other until one is left."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        added = x[: len(x) - half] + x[half:]
        x = added if len(added) == half else torch.cat([added, x[half - 1 : half]])
    return x[0]
