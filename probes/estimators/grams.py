"""`Grams`: second moments of many subsets of the same rows, at the cost of one.

Folds and labels with missing values give many training sets over the same rows. Rows that belong to the same sets form an
atom; each atom is summed once, and a set is the sum of its atoms.
"""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_ROWS = 512
"""squared at a time"""


class Grams:
    """Statistics of x [cells, rows, d] over sets [sets, rows] (bool): everything that closed-form probes need.

    Rows are first centred on their overall mean (`shift`), so that a large common mean costs no precision.
    """

    def __init__(self, x: Tensor, sets: np.ndarray) -> None:
        self.sets = torch.as_tensor(sets, device=x.device)
        self.shift = torch.where(_constant(x), x[:, 0], x.mean(1))  # [cells, d]; a constant's mean may round, but must be 0
        self.x = x - self.shift[:, None]
        self.counts = self.sets.sum(1).to(x.dtype)  # [sets]
        weights = self.sets.to(x.dtype)
        self.means = torch.einsum("sn,bnd->bsd", weights, self.x) / self.counts[:, None]
        self._sets = sets

    @cached_property
    def second(self) -> Tensor:
        """[cells, sets, d, d]: sum of x^T x about each set's own mean."""
        b, _, d = self.x.shape
        total = self.x.new_zeros(b, len(self.sets), d, d)
        for rows, members in _atoms(self._sets):
            part = self.x[:, torch.as_tensor(rows, device=self.x.device)]
            total[:, torch.as_tensor(members, device=self.x.device)] += (part.mT @ part)[:, None]
        return total - torch.einsum("s,bsd,bse->bsde", self.counts, self.means, self.means)

    @cached_property
    def deviations(self) -> Tensor:
        """[cells, sets, d]: standard deviation of each column in each set; 0 for a constant column."""
        weights = self.sets.to(self.x.dtype)
        squares = self.x.new_zeros(len(self.x), *weights.shape[:1], self.x.shape[2])
        for first in range(0, weights.shape[1], _ROWS):  # the squares of all rows at once would be a second copy of them
            squares += weights[:, first : first + _ROWS] @ self.x[:, first : first + _ROWS].square()
        squares /= self.counts[:, None]
        variance = (squares - self.means.square()).clamp_min(0)
        floor = torch.finfo(self.x.dtype).eps * 10 * squares
        return torch.where(variance > floor, variance.sqrt(), torch.zeros_like(variance))

    @cached_property
    def scales(self) -> Tensor:
        """[cells, sets, d]: the same, with 1 for a constant column: what columns are divided by."""
        return torch.where(self.deviations > 0, self.deviations, torch.ones_like(self.deviations))


def _constant(x: Tensor) -> Tensor:
    """[cells, d]: whether all rows of a column are equal; most columns are ruled out by two rows."""
    constant = x[:, 0] == x[:, -1]
    maybe = constant.any(0)
    if bool(maybe.any()):
        constant[:, maybe] = (x[:, :, maybe] == x[:, :1, maybe]).all(1)
    return constant


def _atoms(sets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows, sets that contain them) for every distinct membership; rows in no set are left out."""
    packed = np.ascontiguousarray(np.packbits(sets, axis=0).T)  # [rows, bytes]: a row's membership as one key
    keys = packed.view(f"V{packed.shape[1]}")[:, 0]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return [(np.flatnonzero(place == i), np.flatnonzero(sets[:, row])) for i, row in enumerate(first) if sets[:, row].any()]
