"""`Pile`: captured rows of consecutive decode steps, gathered on the device until they are worth a transfer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replaylens.engine.passes.shipment import SiteGroup

ENOUGH = 1 << 20
"""bytes of a transfer: with fewer, events between the graphs of two steps cost more than copies"""


@dataclass
class Pile:
    """The rows of some requests in consecutive steps: [sites, steps requests, ...], step by step."""

    steps: range
    held: Sequence[int]
    """the requests; a range from 0 where these are the first ones"""
    groups: list[SiteGroup] = field(default_factory=list)
    _index: Tensor | None = None

    def add(self, step: int, staged: list[SiteGroup]) -> bool:
        """Mutates: takes the step's rows out of `staged` [sites, requests, ...]. Returns whether all steps are there."""
        count = len(self.held)
        if step == self.steps[0]:
            room = count * len(self.steps)
            self.groups = [(names, x.new_empty(len(x), room, *x.shape[2:])) for names, x in staged]
            if staged and not isinstance(self.held, range):
                self._index = torch.tensor(self.held).to(staged[0][1].device, non_blocking=True)
        at = (step - self.steps[0]) * count
        for (_, x), (_, target) in zip(staged, self.groups, strict=True):
            target[:, at : at + count] = x[:, :count] if self._index is None else x.index_select(1, self._index)
        return step == self.steps[-1]


def piles(held: Sequence[Sequence[int]], row_bytes: int) -> list[Pile]:
    """Piles for the requests whose rows are kept in each step: neighbours with the same ones, up to ENOUGH bytes together."""
    found: list[Pile] = []
    for step, some in enumerate(held):
        if not some:
            continue
        last = found[-1] if found else None
        most = max(1, ENOUGH // max(1, row_bytes * len(some)))
        if last is not None and last.steps.stop == step and last.held == some and len(last.steps) < most:
            last.steps = range(last.steps.start, step + 1)
        else:
            found.append(Pile(range(step, step + 1), some))
    return found
