"""The captured rows of a burst: `BurstRows`, made of `StepBlock`s, and `StepRows` for one request."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from replaylens.engine.passes.runner import Keep
from replaylens.engine.passes.shipment import Shipment
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.recording import PickableRows


@dataclass(frozen=True)
class StepBlock:
    """The captured rows of some requests in consecutive steps."""

    rows: Shipment
    """[steps held, ...] of every site, step by step"""
    held: Sequence[int]
    """the requests"""
    steps: int

    def of(self, request: int) -> range:
        """The rows of one request."""
        if request not in self.held:
            return range(0)
        return range(self.held.index(request), self.steps * len(self.held), len(self.held))


class BurstRows:
    """The captured rows of a burst, in blocks of one step or several."""

    def __init__(self, num_requests: int, sparse: Callable[["BurstRows"], object]) -> None:
        self.blocks: dict[Keep, list[StepBlock]] = {"host": [], "device": []}
        self._live = self._all = num_requests
        self._views: weakref.WeakSet[StepRows] = weakref.WeakSet()
        self._sparse = sparse

    def view(self, request: int, keep: Keep, names: Mapping[str, str]) -> "StepRows":
        """The rows of one request, one per step that keeps it. names: site -> name in the blocks"""
        view = StepRows(self, request, keep, names)
        self._views.add(view)
        return view

    def dropped(self) -> None:
        """Mutates: one view is gone. If few are left, they move out, so that the rest can be freed."""
        self._live -= 1
        if self._live * 4 < self._all <= (self._live + 1) * 4 and self._live:
            self._sparse(self)

    def compact(self) -> None:
        """Mutates: every view takes a copy of its rows and lets go of the burst. Lost rows stay for their readers to see."""
        if not any(block.rows.lost for blocks in self.blocks.values() for block in blocks):
            for view in list(self._views):
                view.own()


class StepRows(PickableRows):
    """The rows of one request in a burst, stacked when somebody looks."""

    def __init__(self, burst: BurstRows, request: int, keep: Keep, names: Mapping[str, str]) -> None:
        self._burst: BurstRows | None = burst
        self._request, self._keep, self._names = request, keep, names
        self._rows: Rows = {}

    def __getitem__(self, site: str) -> Tensor:
        self.own()  # all sites together: one by one, picking rows out of every step takes longer than copying them
        return self._rows[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def own(self) -> None:
        """Mutates: copies the rows and lets go of the burst."""
        burst = self._burst  # read once: another thread may be here, too, with the same result
        if burst is None:
            return
        found = self._joined([(block, block.of(self._request)) for block in burst.blocks[self._keep]])
        self._rows = found
        self._burst = None
        burst.dropped()

    def picked(self, numbers: Sequence[int]) -> Rows:
        """Some of the rows, by their number, without copying the others."""
        burst = self._burst
        if burst is None:
            return {site: rows[list(numbers)] for site, rows in self._rows.items()}
        blocks = burst.blocks[self._keep]
        places = [(block, row) for block in blocks for row in block.of(self._request)]
        chosen = groupby((places[number] for number in numbers), key=lambda place: id(place[0]))
        found = [(some[0][0], [row for _, row in some]) for some in (list(them) for _, them in chosen)]
        return self._joined(found or [(blocks[0], [])])

    def _joined(self, places: Sequence[tuple[StepBlock, Sequence[int]]]) -> Rows:
        """Copies of these rows, in this order, by site."""
        wanted, found = set(self._names.values()), Rows()
        places = [(block, rows) for block, rows in places if rows] or places[:1]
        for number, (names, _) in enumerate(places[0][0].rows.groups()):
            if picked := [place for place, name in enumerate(names) if name in wanted]:
                chosen = slice(None) if len(picked) == len(names) else picked
                joined = torch.cat([block.rows.groups()[number][1][chosen][:, _index(rows)] for block, rows in places], dim=1)
                found |= {names[place]: x for place, x in zip(picked, joined, strict=True)}
        return {site: found[name] for site, name in self._names.items()}

    def __del__(self) -> None:
        if self._burst is not None:
            self._burst.dropped()


def _index(rows: Sequence[int]) -> slice | list[int]:
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)
