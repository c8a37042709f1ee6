"""`Shipment`: captured rows that may still be on their way to the host, and `View`: some of them."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

SiteGroup = tuple[tuple[str, ...], Tensor]
"""names of sites, and their stacked rows [sites, rows, ...]"""
_counting = threading.Lock()


class Shipment:
    """Rows of several sites, possibly still on their way. Reading one waits for it."""

    def __init__(
        self, groups: Iterable[SiteGroup], pieces: int, sparse: Callable[["Shipment"], object] = lambda block: None
    ) -> None:
        self._groups = list(groups)
        self._at = {name: (x, i) for names, x in self._groups for i, name in enumerate(names)}
        self.num_rows = self._groups[0][1].shape[1] if self._groups else 0
        self._waiting, self._landed = pieces, threading.Event()
        self._error: BaseException | None = None
        self._views: weakref.WeakSet[View] = weakref.WeakSet()
        self._live, self._sparse = 0, sparse
        if not pieces:
            self._landed.set()

    def __getitem__(self, site: str) -> Tensor:
        """All rows of a site: [rows, ...]. The caller must not change it."""
        self.wait()
        stacked, i = self._at[site]
        return stacked[i]

    def groups(self) -> list[SiteGroup]:
        """All rows of all sites. The caller must not change them."""
        self.wait()
        return self._groups

    def wait(self) -> None:
        """Return when all rows are there; raises what went wrong on their way."""
        self._landed.wait()
        if self._error is not None:
            raise self._error

    @property
    def lost(self) -> bool:
        """Whether something went wrong on their way. Waits for them."""
        self._landed.wait()
        return self._error is not None

    def landed(self, error: BaseException | None = None) -> None:
        """Mutates: one more piece has arrived, or is lost."""
        with _counting:
            self._waiting -= 1
            self._error = self._error or error
            if not self._waiting:
                self._landed.set()

    def view(self, sites: Iterable[str], first: int, end: int) -> "View":
        """Rows [first, end) of some sites."""
        view = View(self, tuple(sites), first, end)
        self._views.add(view)
        self._live += end - first
        return view

    def dropped(self, count: int) -> None:
        """Mutates: nobody needs `count` of the rows any more. If few are left, they move out, so that the rest can be freed."""
        before, self._live = self._live, self._live - count
        if self._live * 4 < self.num_rows <= before * 4 and self._live:
            self._sparse(self)

    def compact(self) -> None:
        """Mutates: every view takes a copy of its rows and lets go of the block. Lost rows stay for their readers to see."""
        for view in [] if self.lost else list(self._views):
            view.own()


class View(Mapping[str, Tensor]):
    """Some rows of a block, by site."""

    def __init__(self, block: Shipment, sites: tuple[str, ...], first: int, end: int) -> None:
        self._block: Shipment | None = block
        self._sites, self._first, self._end = sites, first, end
        self._rows: dict[str, Tensor] = {}

    def __getitem__(self, site: str) -> Tensor:
        block = self._block  # read once: another thread may be in `own`
        return self._rows[site] if block is None else block[site][self._first : self._end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def own(self) -> None:
        """Mutates: copies the rows and lets go of the block."""
        if self._block is not None:
            self._rows = {site: self[site].clone() for site in self._sites}
            self._block = None

    def __del__(self) -> None:
        if self._block is not None:
            self._block.dropped(self._end - self._first)
