"""The captured rows of a burst: `BurstRows`, and `StepRows` for one request."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from replaylens.engine.passes.runner import Keep
from replaylens.engine.passes.shipment import Shipment
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.recording import PickableRows


class BurstRows:
    """The captured rows of a burst: one block per step, with the requests that it holds."""

    def __init__(self, num_requests: int, sparse: Callable[["BurstRows"], object]) -> None:
        self.steps: dict[Keep, list[tuple[Shipment, Sequence[int]]]] = {"host": [], "device": []}
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
        """Mutates: every view takes a copy of its rows and lets go of the burst."""
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
        found = self._stacked(self._steps(burst))
        self._rows = found
        self._burst = None
        burst.dropped()

    def picked(self, numbers: Sequence[int]) -> Rows:
        """Some of the rows, by their number, without copying the others."""
        burst = self._burst
        if burst is None:
            return {site: rows[list(numbers)] for site, rows in self._rows.items()}
        steps = self._steps(burst)
        return self._stacked([steps[number] for number in numbers])

    def _steps(self, burst: BurstRows) -> list[tuple[Shipment, int]]:
        """The blocks that hold rows of the request, and where in them."""
        return [(block, held.index(self._request)) for block, held in burst.steps[self._keep] if self._request in held]

    def _stacked(self, steps: Sequence[tuple[Shipment, int]]) -> Rows:
        wanted, found = set(self._names.values()), Rows()
        for number, (names, _) in enumerate(steps[0][0].groups()):
            if picked := [place for place, name in enumerate(names) if name in wanted]:
                chosen = slice(None) if len(picked) == len(names) else picked
                stacked = torch.stack(
                    [block.groups()[number][1][chosen, i] for block, i in steps], dim=1
                )  # [sites, steps, ...]
                found |= {names[place]: x for place, x in zip(picked, stacked, strict=True)}
        return {site: found[name] for site, name in self._names.items()}

    def __del__(self) -> None:
        if self._burst is not None:
            self._burst.dropped()
