"""What a request captures (`CaptureSpec`, at the positions of a `PositionSlice`), and the rows: `Recording`."""

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import ClosedBranch, IntegrityError, UnknownSite
from replaylens.engine.model.ops import MASKED
from replaylens.engine.model.sites import KEY_SITES, SCORES, STATE
from replaylens.engine.records import LensSpec
from replaylens.engine.request.positions import PositionSlice
from replaylens.engine.request.scores import SCORED, Scorer

# ---- capture ---------------------------------------------------------------------------------------------------------
# `CaptureSpec`: which sites are captured, of which rows; `PassTap`: their values in one pass.

HEAD_SITES = ("ln_final.hook_scale", "ln_final.hook_normalized", "ln_final.hook_out", "unembed.hook_out")
"""sites after the last block: computed for captured rows only, from the residual stream that leaves the block"""

Rows = dict[str, Tensor]
"""site -> [rows, ...]"""


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of every committed row."""

    sites: tuple[str, ...]
    """resolved site names"""
    lens: LensSpec | None = None
    rejected: bool = False
    """also keep the rows of rejected drafts, on their branch"""

    last: str = ""
    """the residual stream that leaves the last block"""
    thoughts: tuple[str, ...] = ()
    """sites of thoughts, which a Thinking-States model has in addition to the rows of its passes"""

    positions: PositionSlice = field(default_factory=PositionSlice)
    """the positions that are captured"""
    keep: Literal["host", "device"] = "host"
    """where captured rows are kept: in ordinary memory, or on the model's device"""
    scored: tuple[Scorer, ...] = ()
    """whose scores are recorded, whether or not the rows are"""

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of what is recorded of every pass: sites and scores."""
        return (*self.sites, *(each.name for each in self.scored))

    def traced(self) -> dict[str, Any]:
        """As a trace stores it: the rows in place of their scores, which follow from them."""
        sites = tuple(dict.fromkeys([*self.sites, *(each.site for each in self.scored)]))
        return {name: value for name, value in asdict(replace(self, sites=sites, scored=())).items() if name != "scored"}

    def needed(self) -> frozenset[str]:
        """The sites that a pass must keep."""
        shown = {self.last if site in HEAD_SITES else site for site in self.sites} | {each.site for each in self.scored}
        return frozenset(shown) | (frozenset(self.lens.sites) if self.lens else frozenset())

    @property
    def on_device(self) -> bool:
        """Whether a device computes all of it without the host: a tuned lens, long lists of tokens and recurrent states need
        the host."""
        lens = self.lens
        if any(site.endswith(STATE) for site in self.sites):
            return False
        return lens is None or (lens.fits_kernel and lens.tuned is None)

    @property
    def lag(self) -> int:
        """How many tokens beyond its own a row depends on: Z holds the log-probability of the *next* token."""
        return 1 if self.lens else 0


class Sent(Protocol):
    """Rows of a pass that are being copied to where they are kept."""

    def view(self, sites: Iterable[str], first: int, end: int) -> Mapping[str, Tensor]:
        """Rows [first, end) of some sites."""
        ...


class PassTap:
    """Keeps the wanted sites of one pass by reference: the decoder never changes them in place."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.values: Rows = {}
        self.sent: dict[str, tuple[Sent, Mapping[int, int] | None]] = {}
        """where rows are kept -> rows being copied there, and packed row -> row of those; None: they are the same"""

    def wants(self, site: str) -> bool:
        return site in self.wanted

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.values[site] = value
        return value

    def rows(self, sites: Iterable[str], start: int, end: int) -> Rows:
        """A copy of packed rows [start, end) of these sites, on the CPU."""
        return {site: self.values[site][start:end].cpu().clone() for site in sites}

    def take(self, sites: tuple[str, ...], packed: Sequence[int], keep: str = "host") -> Mapping[str, Tensor]:
        """Some packed rows of these sites, in order, where they were sent to. Precondition: all were, one after another."""
        if not sites:
            return {}
        sent, row_of = self.sent[keep]
        first = packed[0] if row_of is None else row_of[packed[0]]
        return sent.view(sites, first, first + len(packed))

    def stacked(self, sites: Iterable[str]) -> list[tuple[tuple[str, ...], Tensor]]:
        """Sites of equal shape together, [sites, rows, ...]: one transfer per pass, not one per site and branch."""
        return [(names, torch.stack([self.values[site] for site in names])) for names in self.of_one_shape(sites)]

    def copied(self, sites: Iterable[str], packed: Sequence[int], num_rows: int) -> list[tuple[tuple[str, ...], Tensor]]:
        """The same of some packed rows on a CPU. `num_rows`: those of the pass; all of them need not be picked out."""
        found, index = [], torch.tensor(packed) if len(packed) < num_rows else None
        for names in self.of_one_shape(sites):
            like = self.values[names[0]]
            whole = _unmapped(like, (len(names), len(packed), *like.shape[1:]))
            for site, rows in zip(names, whole, strict=True):
                if index is None:
                    rows.copy_(self.values[site][:num_rows])
                else:
                    torch.index_select(self.values[site], 0, index, out=rows)
            found.append((names, whole))
        return found

    def of_one_shape(self, sites: Iterable[str]) -> list[tuple[str, ...]]:
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for site in sites:
            groups.setdefault((self.values[site].shape, self.values[site].dtype), []).append(site)
        return [tuple(names) for names in groups.values()]


# ---- recording -------------------------------------------------------------------------------------------------------
# `Recording`: the captured rows of one branch, committed together with its tokens and KV.


class RowBlock(Protocol):
    """Rows by site."""

    def __getitem__(self, site: str, /) -> Tensor: ...


Place = tuple[RowBlock, int, Mapping[str, str] | None]
"""a block of rows, the number of a row in it, and site -> its name there; None: they are the same"""
RowRun = tuple[RowBlock, Mapping[str, str] | None, int, int]
"""a block of rows, site -> its name there as of a `Place`, and consecutive rows in it: the first, and how many"""


class NamedRows(Mapping[str, Tensor]):
    """Rows by site, of which only the names are looked at unless somebody asks for a tensor."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """The sites, in order."""

    def runs(self, first: int, count: int) -> list[RowRun]:
        """Where `count` rows lie, from row `first` on."""
        return [(self, None, first, count)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, site: object) -> bool:
        return site in self.names()

    __eq__, __hash__ = object.__eq__, object.__hash__


class LazyRows(NamedRows):
    """Rows that a function finds or reads, site by site, each time that somebody looks."""

    def __init__(self, names: Callable[[], Collection[str]], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read

    def names(self) -> Collection[str]:
        return self._names()

    def __getitem__(self, site: str) -> Tensor:
        return self._read(site)


class JoinedRows(NamedRows):
    """Several mappings as one."""

    def __init__(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        self.part = {site: part for part in parts for site in part}

    def names(self) -> Collection[str]:
        return self.part.keys()

    def __getitem__(self, site: str) -> Tensor:
        return self.part[site][site]


def sliced_rows(rows: Mapping[str, Tensor], first: int, end: int) -> LazyRows:
    """Some consecutive rows of a mapping."""
    return LazyRows(rows.keys, lambda site: rows[site][first:end])


class PlacedRows(NamedRows):
    """Rows that lie in blocks with those of other requests."""

    @abstractmethod
    def place(self, number: int) -> Place:
        """Where a row lies."""

    def runs(self, first: int, count: int) -> list[RowRun]:
        return [(block, names, row, 1) for block, row, names in map(self.place, range(first, first + count))]


@dataclass
class Chunk:
    """Captured rows of the positions [start, end), possibly not of all of them."""

    start: int
    end: int
    positions: Sequence[int]
    """those that have a row, in order"""
    rows: Mapping[str, Tensor]
    """may still be in transfer to the host: reading a tensor waits for it"""
    first: int = 0
    """the row of the first of the positions"""

    def piece(self, site: str) -> Tensor:
        """The rows of a site: [positions, ...]."""
        rows, count = self.rows[site], len(self.positions)
        return rows if rows.shape[0] == count else rows[self.first : self.first + count]

    def place(self, position: int) -> Place:
        """Where the row of a position lies."""
        number = self.first + self.positions.index(position)
        return self.rows.place(number) if isinstance(self.rows, PlacedRows) else (self.rows, number, None)

    def runs(self, sites: Iterable[str]) -> list[RowRun]:
        """Where the rows of some sites lie."""
        rows, count = self.rows, len(self.positions)
        if isinstance(rows, JoinedRows) and len(parts := {id(rows.part[site]): rows.part[site] for site in sites}) == 1:
            (rows,) = parts.values()
        return rows.runs(self.first, count) if isinstance(rows, NamedRows) else [(rows, None, self.first, count)]

    def upto(self, length: int) -> "Chunk":
        """The part before position `length`."""
        return replace(self, end=min(self.end, length), positions=self.positions[: before(self.positions, length)])

    def since(self, length: int) -> "Chunk":
        """The part from position `length` on."""
        skipped = before(self.positions, length)
        return replace(self, start=length, positions=self.positions[skipped:], first=self.first + skipped)


class Recording:
    """The captured rows of one branch, by position. Rolls back with the branch; forks share their common rows.

    Reads like a dictionary from sites to tensors. It lists them by the names they were asked for, and finds them by any name.
    """

    aliases: Mapping[str, str] = {}
    """other names of sites"""
    twins: Mapping[str, str] = {}
    """sites whose rows are those of another site"""
    asked: Mapping[str, tuple[str, ...]] = {}
    """site -> the names that it is listed by; others have their own"""
    shared = False
    """whether a fork may have some of the rows, too"""
    gone = False
    """whether its rows were handed over"""

    def __init__(self, base: int = 0, chunks: Iterable[Chunk] = (), open_end: bool = False) -> None:
        self.base = base
        """the first position to capture"""
        self.chunks = list(chunks)
        self.open_end = open_end
        """whether the last row was read before its next token was known: Z.emitted is NaN, and once the token is known the row
        is read again"""

    @property
    def end(self) -> int:
        """Positions [base, end) are captured."""
        return self.chunks[-1].end if self.chunks else self.base

    def append(self, start: int, rows: Mapping[str, Tensor], open_end: bool = False) -> None:
        """Mutates: rows of positions [start, ...) replace those already there. A recomputed row has the same bits."""
        end = start + len(next(iter(rows.values())))
        self.add(Chunk(start, end, range(start, end), rows), open_end)

    def add(self, chunk: Chunk, open_end: bool = False) -> None:
        """Mutates: as `append`, with rows of some of the positions."""
        if chunk.end <= self.base:
            return
        if chunk.start < self.end:
            self.chunks = _cut(self.chunks, chunk.start)
        self.chunks.append(chunk if chunk.start >= self.base else chunk.since(self.base))
        self.open_end, self.gone = open_end, False

    def take_over(self, other: "Recording") -> None:
        """Mutates: holds the rows of `other`, which has all of these rows and more."""
        self.chunks = [c if c.start >= self.base else c.since(self.base) for c in other.chunks if c.end > self.base]
        self.open_end, self.gone = other.open_end, False
        self.shared = self.shared or other.shared

    def num_valid(self, num_tokens: int, lag: int) -> int:
        """How many positions keep their rows on a path of which only the first `num_tokens` tokens stay. A row that knows its
        next token goes with that token."""
        return num_tokens if self.open_end and self.end <= num_tokens else num_tokens - lag

    def truncate(self, length: int) -> None:
        """Mutates: drops positions from `length` on."""
        self.open_end = self.open_end and length >= self.end
        self.chunks = _cut(self.chunks, length)

    def fork(self, length: int) -> "Recording":
        """A recording of the first `length` positions that shares their tensors. Of a suffix (base > 0), it is empty."""
        if self.base:
            return self.like()
        made = self.like(self.base, _cut(self.chunks, length), self.open_end and length >= self.end)
        made.shared = self.shared = self.shared or bool(made.chunks)
        return made

    def like(self, base: int = 0, chunks: Iterable[Chunk] = (), open_end: bool = False) -> "Recording":
        """A recording of the same kind, with these rows."""
        made = self._empty(base)
        made.chunks, made.open_end = list(chunks), open_end
        made.aliases, made.twins, made.asked = self.aliases, self.twins, self.asked
        return made

    def _empty(self, base: int) -> "Recording":
        return Recording(base)

    def check_integrity(self) -> None:
        """Raise IntegrityError naming the first captured row that is missing. Changes nothing."""
        expected = self.base
        for chunk in self.chunks:
            if chunk.start != expected:
                raise IntegrityError(f"Captured rows: position {chunk.start} follows {expected - 1}; expected {expected}.")
            for site in chunk.rows:
                if (count := len(chunk.piece(site))) != len(chunk.positions):
                    raise IntegrityError(f"Captured rows of {site}: {count} rows for positions [{chunk.start}, {chunk.end}).")
            expected = chunk.end

    def sites(self) -> list[str]:
        return [site for site in self._captured() if not site.startswith(SCORED)]

    def _captured(self) -> Collection[str]:
        """The names of all that was captured, scores included."""
        return next((chunk.rows for chunk in self.chunks if chunk.rows), ())

    def has_scores(self, name: str) -> bool:
        """Whether the scores of a `Scorer` were recorded with the rows."""
        held = [chunk.rows for chunk in self.chunks if chunk.rows]
        return bool(held) and all(name in rows for rows in held)

    def scores(self, name: str) -> Tensor:
        """All recorded scores of a `Scorer`, by its name: [rows, lines], maybe without a copy. Precondition: there are some."""
        held = [chunk for chunk in self.chunks if chunk.rows]
        pieces = [chunk.piece(name) for chunk in held]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def keys(self) -> list[str]:
        """The names of the sites, as in a dictionary."""
        return [name for site in self.sites() for name in self.asked.get(site, (site,))]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """The number of names, as in a dictionary."""
        return len(self.keys())

    def __bool__(self) -> bool:
        return True  # also before its first row

    def __contains__(self, site: object) -> bool:
        return isinstance(site, str) and self._found(site) is not None

    def get(self, site: str) -> Tensor | None:
        """A copy of all rows of a site; None if it was not captured."""
        if site not in self:
            return None
        return self[site]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Sites with all their rows, as in a dictionary."""
        return ((name, self[name]) for name in self.keys())

    def __repr__(self) -> str:
        return f"Recording(positions {self.base} to {self.end - 1}, {len(self.sites())} sites)"

    def positions(self) -> list[int]:
        """The positions that have rows, in order."""
        return [p for chunk in self.chunks for p in chunk.positions]

    def __getitem__(self, site: str) -> Tensor:
        """A copy of all rows of a site, in order of position: [rows, ...]. The rows themselves are shared with forks."""
        pieces = self.pieces(site)
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def copied(self) -> Rows:
        """A copy of all rows of every site, by the names they are listed by. Sites of one shape share a piece of memory: it is
        mapped faster than many small ones."""
        pieces, found = {name: self.pieces(name) for name in self.keys()}, Rows()
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for name, own in pieces.items():
            groups.setdefault((own[0].shape[1:], own[0].dtype), []).append(name)
        for names in groups.values():
            own = pieces[names[0]]
            whole = _unmapped(own[0], (len(names), sum(map(len, own)), *own[0].shape[1:]))
            for name, rows in zip(names, whole, strict=True):
                found[name] = torch.cat(pieces[name], out=rows)
        return {name: found[name] for name in pieces}

    @property
    def sole(self) -> bool:
        """Whether there are only rows of sites, and those of each lie in one piece that no fork and no other site has."""
        pieces = [self.pieces(name) for name in self.keys()]
        places = {own[0].data_ptr() for own in pieces}
        whole = all(len(own) == 1 and not own[0].is_inference() for own in pieces)
        plain = type(self) is Recording and not self.shared  # a subclass may compute rows when they are read
        scored = any(name.startswith(SCORED) for chunk in self.chunks for name in chunk.rows)
        return plain and whole and not scored and len(places) == len(pieces)

    def handed_over(self) -> Rows:
        """As `copied`, but the rows themselves if they are `sole`. Mutates: the recording has none of them any more."""
        if not self.sole:
            return self.copied()
        found = {name: self.pieces(name)[0].contiguous() for name in self.keys()}
        self.truncate(self.base)
        self.gone = bool(found)
        return found

    def peek(self, site: str) -> Tensor:
        """As `recording[site]`, but possibly without a copy. The caller must not change it."""
        pieces = self.pieces(site)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def place(self, position: int) -> Place:
        """Where the row of a position lies. Precondition: it has one."""
        return self.chunks[bisect_right(self.chunks, position, key=lambda chunk: chunk.start) - 1].place(position)

    def pieces(self, site: str) -> list[Tensor]:
        """The rows of a site, chunk by chunk and without a copy. The caller must not change them."""
        return self._pieces(self._named(site))

    def runs(self, sites: Sequence[str]) -> list[RowRun]:
        """Where the rows of some sites lie, in order. The caller must not change them. Precondition: they have no keys."""
        captured = self._captured()
        if self.gone or any(site in self.aliases or site not in captured for site in sites):
            names = {site: self._named(site) for site in sites}
            found = [run for chunk in self.chunks if chunk.positions for run in chunk.runs(names.values())]
            return [
                (block, {site: name if there is None else there[name] for site, name in names.items()}, first, count)
                for block, there, first, count in found
            ]
        return [run for chunk in self.chunks if chunk.positions for run in chunk.runs(sites)]

    def _named(self, site: str) -> str:
        """The captured site with the rows of that name; UnknownSite if it was not captured."""
        if self.gone:
            self.require_here()
        found = self._found(site) if isinstance(site, str) else None
        if found is None:
            names = list(self.keys())
            some = f"{', '.join(names[:3])}, ... {names[-1]} ({len(names)} sites)" if len(names) > 6 else ", ".join(names)
            raise UnknownSite(
                f"Site {site!r:.60} was not captured. Captured: {some or 'nothing'}. Name it in sites= of the prompt or replay."
            )
        return found

    def require_here(self) -> None:
        """ClosedBranch if the rows were handed over."""
        if self.gone:
            raise ClosedBranch(
                "The rows of this branch were handed over by engine.activations(..., release=True). Use what it gave."
            )

    def _found(self, name: str) -> str | None:
        """The captured site with the rows of that name."""
        site, captured = self.aliases.get(name, name), self._captured()
        if site not in captured:
            site = self.twins.get(site, "")
        return site if site in captured and not site.startswith(SCORED) else None

    def _pieces(self, site: str) -> list[Tensor]:
        """The rows of a captured site, chunk by chunk."""
        return [with_keys(site, chunk.piece(site), self.end) for chunk in self.chunks if chunk.rows]


@dataclass
class _Picks:
    """Rows of one block that are wanted."""

    block: RowBlock
    names: Mapping[str, str] | None
    keys: int
    """of the paths of its rows, if a site has keys: a block has rows of paths of several lengths"""
    rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    """where they go"""


def picked(recordings: Sequence[Recording | None], positions: Sequence[Sequence[int]], together: bool = False) -> list[Rows]:
    """The rows of some positions of each recording, in their order, by captured site: copies of these alone. Those that many
    recordings have in one block are picked together. Precondition: every position has a row.

    together  those of all recordings lie in one piece of memory, one after another
    """
    picks: dict[tuple[int, int], _Picks] = {}
    counts = [0 if recording is None else len(wanted) for recording, wanted in zip(recordings, positions, strict=True)]
    asked = [(recording, wanted) for recording, wanted in zip(recordings, positions, strict=True) if recording and wanted]
    sites = asked[0][0].sites() if asked else []
    target, keyed = count(), any(site.endswith(KEY_SITES) for site in sites)
    for recording, wanted in asked:
        keys = recording.end * keyed
        for position in wanted:
            block, row, names = recording.place(position)
            found = picks.get((id(block), keys)) or picks.setdefault((id(block), keys), _Picks(block, names, keys))
            found.rows.append(row)
            found.targets.append(next(target))
    whole = _copied(list(picks.values()), sites, sum(counts))
    parts = {site: rows.split(counts) for site, rows in whole.items()}
    own = [
        {site: with_keys(site, parts[site][i], recording.end) for site in sites if counts[i]} if recording else {}
        for i, recording in enumerate(recordings)
    ]
    return own if together else [{site: rows.clone() for site, rows in each.items()} for each in own]


def _copied(picks: Sequence[_Picks], sites: Iterable[str], total: int) -> Rows:
    """The picked rows, in one tensor per site."""
    made, longest = Rows(), max((found.keys for found in picks), default=0)
    for found in picks:
        rows, targets = torch.tensor(found.rows), torch.tensor(found.targets)
        for site in sites:
            x = found.block[site if found.names is None else found.names[site]]
            if keys := site.endswith(KEY_SITES):
                x = with_keys(site, with_keys(site, x[rows], found.keys), longest)
            if site not in made:
                made[site] = x.new_empty(total, *x.shape[1:])
            scatter(made[site], targets, x, torch.arange(len(rows)) if keys else rows)
    return made


_MANY = 16


def scatter(made: Tensor, targets: Tensor, x: Tensor, rows: Tensor) -> None:
    """Mutates: made[targets] = x[rows]. Many rows on a CPU in the calling thread: one that works beside a pass must not have
    torch start as many as there are cores."""
    if len(rows) >= _MANY and x.device.type == "cpu" and x.is_contiguous() and x.numel():
        there, here = (each.view(len(each), -1).view(torch.uint8).numpy() for each in (made, x))
        there[targets.numpy()] = here[rows.numpy()]
    else:
        made.index_copy_(0, targets, x.index_select(0, rows))


def _unmapped(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised memory where `like` is, of its dtype. On a CPU from numpy, which asks for huge pages."""
    if like.device.type != "cpu" or 0 in shape:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(prod(shape) * like.element_size(), dtype=np.uint8)).view(like.dtype).view(shape)


def with_keys(site: str, rows: Tensor, count: int) -> Tensor:
    """Rows [rows, heads, keys] with `count` keys, if the site has keys: a pass leaves room for whole blocks of them, and later
    rows have more. Keys that a row does not see are masked."""
    if not site.endswith(KEY_SITES):
        return rows
    missing, rest = count - rows.shape[-1], MASKED if site.endswith(SCORES) else 0.0
    return torch.nn.functional.pad(rows, (0, missing), value=rest) if missing > 0 else rows[..., :count]


def before(positions: Sequence[int], limit: int) -> int:
    """How many of the sorted positions are below `limit`."""
    if isinstance(positions, range):
        return len(range(positions.start, max(positions.start, min(positions.stop, limit)), positions.step))
    return bisect_left(positions, limit)


def _cut(chunks: list[Chunk], length: int) -> list[Chunk]:
    kept = chunks[: bisect_left(chunks, length, key=lambda chunk: chunk.start)]
    if kept and kept[-1].end > length:
        kept[-1] = kept[-1].upto(length)
    return kept
