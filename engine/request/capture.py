"""`CaptureSpec` and `Recording`: which sites are captured, and the captured rows, committed together with tokens and KV."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import IntegrityError, UnknownSite

HEAD_SITES = ("ln_final.hook_out", "unembed.hook_out")
"""sites after the last block: computed for captured rows only, from the residual stream that leaves the block"""

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

    def needed(self) -> frozenset[str]:
        """The sites that a pass must keep."""
        shown = {self.last if site in HEAD_SITES else site for site in self.sites}
        return frozenset(shown) | (frozenset(self.lens.sites) if self.lens else frozenset())

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

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "LensSpec":
        """Inverse of `asdict`, with lists for tuples."""
        return cls(**{**raw, "sites": tuple(raw["sites"]), "targets": tuple(raw["targets"])})


@dataclass
class Chunk:
    """Captured rows of consecutive positions [start, start + n)."""

    start: int
    rows: Rows

    @property
    def end(self) -> int:
        return self.start + len(next(iter(self.rows.values())))


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

    def append(self, start: int, rows: Rows, open_end: bool = False) -> None:
        """Mutates: rows of positions [start, ...) replace those already there. A recomputed row has the same bits."""
        skipped = max(0, self.base - start)
        if skipped < len(next(iter(rows.values()))):
            new = Chunk(start + skipped, {site: x[skipped:] for site, x in rows.items()})
            self.chunks = [*_cut(self.chunks, start), new]
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
            for site, x in chunk.rows.items():
                if chunk.start + len(x) != chunk.end:
                    raise IntegrityError(f"Captured rows of {site}: {len(x)} rows for positions [{chunk.start}, {chunk.end}).")
            expected = chunk.end

    def sites(self) -> list[str]:
        return list(self.chunks[0].rows) if self.chunks else []

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
        return [p for chunk in self.chunks for p in range(chunk.start, chunk.end)]

    def __getitem__(self, site: str) -> Tensor:
        """A copy of all rows of a site, in order of position: [rows, ...]. The rows themselves are shared with forks."""
        pieces = self.pieces(site)
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)

    def peek(self, site: str) -> Tensor:
        """As `recording[site]`, but possibly without a copy. The caller must not change it."""
        pieces = self.pieces(site)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pieces(self, site: str) -> list[Tensor]:
        """The rows of a site, chunk by chunk and without a copy. The caller must not change them."""
        chunks = self.chunks
        if not isinstance(site, str) or not chunks or site not in chunks[0].rows:
            raise UnknownSite(f"Site {site!r:.60} was not captured. Captured: {', '.join(self.sites()) or 'nothing'}.")
        pieces = [chunk.rows[site] for chunk in chunks]
        if len(pieces) > 1 and len({piece.shape[1:] for piece in pieces}) > 1:  # patterns: later rows have room for more keys
            most = max(piece.shape[-1] for piece in pieces)
            pieces = [torch.nn.functional.pad(piece, (0, most - piece.shape[-1])) for piece in pieces]
        return pieces


def _cut(chunks: list[Chunk], length: int) -> list[Chunk]:
    kept = [chunk for chunk in chunks if chunk.start < length]
    if kept and kept[-1].end > length:
        last = kept[-1]
        kept[-1] = Chunk(last.start, {site: x[: length - last.start] for site, x in last.rows.items()})
    return kept


class PassTap:
    """Keeps the wanted sites of one pass by reference: the decoder never changes them in place."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.values: Rows = {}
        self._stacked: dict[tuple[str, ...], list[tuple[list[str], Tensor]]] = {}

    def wants(self, site: str) -> bool:
        return site in self.wanted

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.values[site] = value
        return value

    def rows(self, sites: Iterable[str], start: int, end: int) -> Rows:
        """A copy of packed rows [start, end) of these sites, on the CPU."""
        names = tuple(sites)
        if names not in self._stacked:
            self._stacked[names] = self._stack(names)
        found: Rows = {}
        for group, stacked in self._stacked[names]:  # a copy, so that a long-lived branch does not keep the whole pass alive
            found.update(zip(group, stacked[:, start:end].clone().unbind(), strict=True))
        return {site: found[site] for site in names}

    def _stack(self, sites: tuple[str, ...]) -> list[tuple[list[str], Tensor]]:
        """Stack sites of equal shape, [sites, rows, ...] on the CPU: one transfer per pass, not one per site and branch."""
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for site in sites:
            groups.setdefault((self.values[site].shape, self.values[site].dtype), []).append(site)
        return [(group, torch.stack([self.values[site] for site in group]).cpu()) for group in groups.values()]
