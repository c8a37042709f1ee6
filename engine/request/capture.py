"""`CaptureSpec` and `Recording`: which sites are captured, and the captured rows, committed together with tokens and KV."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from replaylens.engine.errors import IntegrityError, UnknownSite
from replaylens.engine.request.positions import Where, before

HEAD_SITES = ("ln_final.hook_out", "unembed.hook_out")
"""sites after the last block: computed for captured rows only, from the residual stream that leaves the block"""

MAX_TOP, MAX_TARGETS = 32, 63
"""limits of the lens kernel per row; the emitted token takes one more target"""

Rows = dict[str, Tensor]
"""site -> [rows, ...]"""


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of every committed row."""

    sites: tuple[str, ...]
    """resolved site names"""
    lens: "LensSpec | None" = None
    rejected: bool = False
    """also keep the rows of rejected drafts, on their branch"""

    last: str = ""
    """the residual stream that leaves the last block"""
    thoughts: tuple[str, ...] = ()
    """sites of thoughts, which a model that thinks has in addition to the rows of its passes"""

    positions: Where = field(default_factory=Where)
    """the positions that are captured"""
    keep: Literal["host", "device"] = "host"
    """where captured rows are kept: in ordinary memory, or on the model's device"""

    def needed(self) -> frozenset[str]:
        """The sites that a pass must keep."""
        shown = {self.last if site in HEAD_SITES else site for site in self.sites}
        return frozenset(shown) | (frozenset(self.lens.sites) if self.lens else frozenset())

    @property
    def on_device(self) -> bool:
        """Whether a device computes all of it without the host: a tuned lens and long lists of tokens need the host."""
        lens = self.lens
        return lens is None or (lens.fits_kernel and lens.tuned is None)

    @property
    def lag(self) -> int:
        """The number of rows at the tip that wait: Z holds the probability of the *next* token, which must be known first."""
        return 1 if self.lens else 0


@dataclass(frozen=True)
class LensSpec:
    """How Z, the logit lens at every layer, is stored."""

    sites: tuple[str, ...]
    """the residual streams it reads, in layer order; the last is the model's own output"""
    top_k: int = 8
    targets: tuple[int, ...] = ()
    """token ids whose log-probs are always kept"""
    full: bool = False
    """keep whole distributions"""
    tuned: str | None = None
    """digest of the tuned lens it is read through; None: the plain lens"""

    @property
    def fits_kernel(self) -> bool:
        """Whether the kernel of a GPU can compute it. It cannot give whole distributions or long lists."""
        return not self.full and self.top_k <= MAX_TOP and len(self.targets) <= MAX_TARGETS

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "LensSpec":
        """Inverse of `asdict`, with lists for tuples."""
        return cls(**{**raw, "sites": tuple(raw["sites"]), "targets": tuple(raw["targets"])})


@dataclass
class Chunk:
    """Captured rows of the positions [start, end), possibly not of all of them."""

    start: int
    end: int
    positions: Sequence[int]
    """those that have a row, in order"""
    rows: Mapping[str, Tensor]
    """may still be on their way to the host: looking at a tensor waits for it"""
    first: int = 0
    """the row of the first of the positions"""

    def piece(self, site: str) -> Tensor:
        """The rows of a site: [positions, ...]."""
        return self.rows[site][self.first : self.first + len(self.positions)]

    def upto(self, length: int) -> "Chunk":
        """The part before position `length`."""
        return replace(self, end=min(self.end, length), positions=self.positions[: before(self.positions, length)])

    def since(self, length: int) -> "Chunk":
        """The part from position `length` on."""
        skipped = before(self.positions, length)
        return replace(self, start=length, positions=self.positions[skipped:], first=self.first + skipped)


class Recording:
    """The captured rows of one branch, by position. Rolls back with the branch; forks share their common rows."""

    def __init__(self, base: int = 0, chunks: Iterable[Chunk] = (), open_end: bool = False) -> None:
        self.base = base
        """the first position to capture"""
        self.chunks = list(chunks)
        self.open_end = open_end
        """whether the last row was read before its next token was known; once it is known, the row must be read again"""

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
        self.open_end = open_end

    def truncate(self, length: int) -> None:
        """Mutates: drops positions from `length` on."""
        self.open_end = self.open_end and length >= self.end
        self.chunks = _cut(self.chunks, length)

    def fork(self, length: int) -> "Recording":
        """A recording of the first `length` positions that shares their tensors. Of a suffix (base > 0), it is empty."""
        if self.base:
            return self.like()
        return self.like(self.base, _cut(self.chunks, length), self.open_end and length >= self.end)

    def like(self, base: int = 0, chunks: Iterable[Chunk] = (), open_end: bool = False) -> "Recording":
        """A recording of the same kind, with these rows."""
        return Recording(base, chunks, open_end)

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
        return next((list(chunk.rows) for chunk in self.chunks if chunk.rows), [])

    def keys(self) -> list[str]:
        """The sites, as in a dictionary."""
        return self.sites()

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites())

    def __contains__(self, site: object) -> bool:
        return site in self.sites()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Sites with all their rows, as in a dictionary."""
        return ((site, self[site]) for site in self.sites())

    def __repr__(self) -> str:
        return f"Recording(positions {self.base} to {self.end - 1}, {len(self.sites())} sites)"

    def positions(self) -> list[int]:
        """The positions that have rows, in order."""
        return [p for chunk in self.chunks for p in chunk.positions]

    def __getitem__(self, site: str) -> Tensor:
        """A copy of all rows of a site, in order of position: [rows, ...]. The rows themselves are shared with forks."""
        pieces = self._pieces(site)
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def peek(self, site: str) -> Tensor:
        """As `recording[site]`, but possibly without a copy. The caller must not change it."""
        pieces = self._pieces(site)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _pieces(self, site: str) -> list[Tensor]:
        """The rows of a site, chunk by chunk."""
        known = self.sites()
        if not isinstance(site, str) or site not in known:
            raise UnknownSite(f"Site {site!r:.60} was not captured. Captured: {', '.join(known) or 'nothing'}.")
        pieces = [chunk.piece(site) for chunk in self.chunks if chunk.rows]
        if len({piece.shape[1:] for piece in pieces}) > 1:  # attention patterns: later rows have room for more keys
            most = max(piece.shape[-1] for piece in pieces)
            pieces = [torch.nn.functional.pad(piece, (0, most - piece.shape[-1])) for piece in pieces]
        return pieces


def _cut(chunks: list[Chunk], length: int) -> list[Chunk]:
    kept = chunks[: bisect_left(chunks, length, key=lambda chunk: chunk.start)]
    if kept and kept[-1].end > length:
        kept[-1] = kept[-1].upto(length)
    return kept


class Joined(Mapping[str, Tensor]):
    """Several mappings as one, read only when somebody looks."""

    def __init__(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        self._source = {site: part for part in parts for site in part}

    def __getitem__(self, site: str) -> Tensor:
        return self._source[site][site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class RowSlice(Mapping[str, Tensor]):
    """Some consecutive rows of a mapping, read only when somebody looks."""

    def __init__(self, rows: Mapping[str, Tensor], first: int, end: int) -> None:
        self._rows, self._first, self._end = rows, first, end

    def __getitem__(self, site: str) -> Tensor:
        return self._rows[site][self._first : self._end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Sent(Protocol):
    """Rows of a pass that are on their way to where they are kept."""

    def view(self, sites: Iterable[str], first: int, end: int) -> Mapping[str, Tensor]:
        """Rows [first, end) of some sites."""
        ...


class PassTap:
    """Keeps the wanted sites of one pass by reference: the decoder never changes them in place."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.values: Rows = {}
        self.sent: dict[str, tuple[Sent, Mapping[int, int] | None]] = {}
        """where rows are kept -> rows on their way there, and packed row -> row of those; None: they are the same"""
        self._stacked: dict[tuple[str, ...], list[tuple[tuple[str, ...], Tensor]]] = {}

    def wants(self, site: str) -> bool:
        return site in self.wanted

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.values[site] = value
        return value

    def rows(self, sites: Iterable[str], start: int, end: int) -> Rows:
        """A copy of packed rows [start, end) of these sites, on the CPU."""
        return dict(self.take(tuple(sites), range(start, end)))

    def take(self, sites: tuple[str, ...], packed: Sequence[int], keep: str = "host") -> Mapping[str, Tensor]:
        """Some packed rows of these sites, in order. Precondition: if they were sent, then all of these, one after another."""
        if keep in self.sent:
            sent, row_of = self.sent[keep]
            first = packed[0] if row_of is None else row_of[packed[0]]
            return sent.view(sites, first, first + len(packed))
        if sites not in self._stacked:
            self._stacked[sites] = [(names, x.cpu()) for names, x in self.stacked(sites)]
        consecutive = len(packed) > 0 and packed[-1] - packed[0] == len(packed) - 1
        which = slice(packed[0], packed[-1] + 1) if consecutive else list(packed)
        found: Rows = {}
        for names, x in self._stacked[sites]:  # a copy, so that a long-lived branch does not keep the whole pass alive
            found.update(zip(names, (x[:, which].clone() if consecutive else x[:, which]).unbind(), strict=True))
        return {site: found[site] for site in sites}

    def stacked(self, sites: Iterable[str]) -> list[tuple[tuple[str, ...], Tensor]]:
        """Sites of equal shape together, [sites, rows, ...]: one transfer per pass, not one per site and branch."""
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for site in sites:
            groups.setdefault((self.values[site].shape, self.values[site].dtype), []).append(site)
        return [(tuple(names), torch.stack([self.values[site] for site in names])) for names in groups.values()]
