"""`Batch`: rows of any number of branches, packed for one pass."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.engine.errors import InternalError
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.ops import visible
from replaylens.engine.request.edits import Hook
from replaylens.engine.request.placed import PlacedEdit

# ---- batch -----------------------------------------------------------------------------------------------------------

TILE = 16
"""rows of the reference tile; the canonical product is defined on zero-padded tiles of this many rows"""
KV_BLOCK = 64
"""keys per step of the attention sum, counted from absolute position 0"""


@dataclass(frozen=True)
class Segment:
    """Consecutive new rows of one branch: `tokens` at positions start, start + 1, ...

    Precondition: `table` has private, reserved slots for all of them, and canonical KV below `start`.
    """

    table: PageTable
    start: int
    tokens: list[int]
    num_logits: int = 0
    """number of final rows that need logits"""
    edits: "tuple[PlacedEdit, ...]" = ()
    hooks: "tuple[Hook, ...]" = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class AttentionGroup:
    """Pieces of segments whose attention is computed together, padded to equal numbers of rows and keys."""

    rows: Tensor
    """[pieces, query rows]: packed row of each query; padding points past the last row"""
    slots: Tensor
    """[pieces * keys]: slot of every key; padding points to the null page"""
    positions: Tensor
    """[pieces, query rows]; padding has the first position of its piece"""
    num_keys: int
    """per piece, a multiple of KV_BLOCK"""
    masks: dict[int, Tensor]
    """window -> what `ceiling` returns"""
    first_key: int = 0
    """the position of the first key"""

    def ceiling(self, window: int) -> Tensor:
        """The `ceiling` of the scores of the last keys: [pieces, query rows, 1, last keys]. All queries see the earlier keys.

        Cached per window.
        """
        if window not in self.masks:
            seen = visible(self.positions.view(-1) - self.first_key, self.num_keys, window)
            first = 0 if window else int(self.positions.min()) - self.first_key + 1
            self.masks[window] = ceiling(seen.view(*self.positions.shape, 1, self.num_keys)[..., first:])
        return self.masks[window]


class Piece(NamedTuple):
    """Rows of one segment whose attention is computed together."""

    queries: int
    """the number of rows after padding"""
    keys: int
    """the number of keys after padding"""
    row: int
    """the first packed row"""
    num_rows: int
    segment: Segment
    position: int
    """of the first row"""


def ceiling(seen: Tensor) -> Tensor:
    """Upper bounds of scores: infinity where a query sees the key, minus infinity where it does not."""
    return torch.where(seen, math.inf, -math.inf)


class Batch:
    """Packed rows. Padding rows have token 0 at position 0, write no KV, and no other row attends to them."""

    def __init__(
        self, segments: list[Segment], pool: PagePool, query_rows: tuple[int, ...], tile: int = TILE, device: str = "cpu"
    ) -> None:
        if not segments or not all(s.tokens for s in segments):
            raise InternalError("A batch has no segments, or a segment without rows.")
        self.segments, self.pool, self.query_rows = segments, pool, query_rows
        tokens = [t for s in segments for t in s.tokens]
        positions = [p for s in segments for p in range(s.start, s.start + len(s.tokens))]
        self.num_rows = len(tokens)
        self.padded = -(-self.num_rows // tile) * tile
        pad = self.padded - self.num_rows
        self.tokens = torch.tensor(tokens + [0] * pad).to(device, non_blocking=True)
        self.positions = torch.tensor(positions + [0] * pad).to(device, non_blocking=True)
        self.offsets = [0]
        for s in segments:
            self.offsets.append(self.offsets[-1] + len(s.tokens))

    @cached_property
    def cuts_edges(self) -> bool:
        """Whether an edit may change an edge of a row's attention."""
        return any(edit.on_pattern and edit.touches(s.start, s.end) for s in self.segments for edit in s.edits)

    @cached_property
    def write_slots(self) -> Tensor:
        """The slot of every row's KV: [rows]."""
        return torch.tensor([slot for s in self.segments for slot in self.pool.slots(s.table, s.start, s.end)])

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """The attention groups, used on a CPU only."""
        return self.groups_of(range(len(self.segments)), 0)

    @cached_property
    def queries(self) -> list[Tensor]:
        """For each group, the packed row of every query; padding takes row 0, and its result is dropped. [pieces * rows]"""
        return [group.rows.view(-1) * (group.rows.view(-1) < self.padded) for group in self.groups]

    @cached_property
    def query_of_row(self) -> Tensor:
        """Of every padded row, its place among the queries of all groups; padding rows take the first. [padded rows]"""
        return self.places(self.groups)

    def places(self, groups: Sequence[AttentionGroup]) -> Tensor:
        """Of every padded row, its place among the queries of these groups; padding rows take the first. [padded rows]"""
        places = torch.zeros(self.padded + 1, dtype=torch.int64)
        rows = torch.cat([group.rows.view(-1) for group in groups])
        places[rows] = torch.arange(rows.shape[0])
        return places[:-1]

    def row(self, segment: int, position: int) -> int:
        """The packed row of a position of a segment."""
        return self.offsets[segment] + position - self.segments[segment].start

    def logit_rows(self) -> list[int]:
        """The packed rows that need logits, in order."""
        ends = self.offsets[1:]
        return [row for end, s in zip(ends, self.segments, strict=True) for row in range(end - s.num_logits, end)]

    def groups_of(self, chosen: Sequence[int], first_key: int) -> list[AttentionGroup]:
        """The attention groups of some segments over their keys from `first_key` on.

        Segments are split into pieces of at most max(query_rows) rows. Pieces of equal padded size form a group.
        """
        query_rows = tuple(sorted(self.query_rows))
        largest = query_rows[-1]
        groups: dict[tuple[int, int], list[Piece]] = {}
        for index in chosen:
            offset, s = self.offsets[index], self.segments[index]
            for first in range(0, len(s.tokens), largest):
                n = min(largest, len(s.tokens) - first)
                keys = _roomy(-(-(s.start + first + n - first_key) // KV_BLOCK)) * KV_BLOCK
                piece = Piece(query_rows[bisect_left(query_rows, n)], keys, offset + first, n, s, s.start + first)
                groups.setdefault(piece[:2], []).append(piece)
        return [self._group(groups[size], first_key) for size in sorted(groups)]

    def _group(self, pieces: list[Piece], first_key: int) -> AttentionGroup:
        queries, keys = pieces[0].queries, pieces[0].keys
        query, n = np.arange(queries), np.array([piece.num_rows for piece in pieces])[:, None]
        first_row, position = (np.array([p.row for p in pieces])[:, None], np.array([p.position for p in pieces])[:, None])
        rows = np.where(query < n, first_row + query, self.padded)
        positions = position + np.where(query < n, query, 0)
        tables, ends = [p.segment.table for p in pieces], [p.position + p.num_rows for p in pieces]
        slots = self.pool.slot_rows(tables, ends, keys, first_key)
        as_tensor = torch.from_numpy
        return AttentionGroup(as_tensor(rows), as_tensor(slots.reshape(-1)), as_tensor(positions), keys, {}, first_key)


@lru_cache(maxsize=4096)
def _roomy(blocks: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ... so that pieces of similar length share a group."""
    size = 1
    while size < blocks:
        if size * 3 // 2 >= blocks and size > 1:
            return size * 3 // 2
        size *= 2
    return size


# ---- runs ------------------------------------------------------------------------------------------------------------
# `SharedRun`: keys that several sequences of a pass share, found from their page tables.
#
# Tables are sorted by their pages. Sequences that share a run of keys are then neighbours, and the largest rectangle under
# the numbers of units that neighbours have in common is the run that saves most. What its members still share after it
# belongs to the next level.


class SharedRun(NamedTuple):
    """Sequences whose tables agree on the keys [begin, end)."""

    level: int
    sequences: tuple[int, ...]
    begin: int
    end: int

    @property
    def saved(self) -> int:
        """Keys that are not read again."""
        return (len(self.sequences) - 1) * (self.end - self.begin)


def shared_runs(
    pages: NDArray[np.int32], computed: Sequence[int], unit: int, page_size: int, max_levels: int = 1
) -> list[SharedRun]:
    """Runs of keys that several sequences share, up to `max_levels` in a row, those that save most first in each.

    pages     of each sequence: [sequences, pages]
    computed  keys of each sequence that are in the cache before the pass
    unit      keys that are shared together; a multiple of the page size, or a page
    """
    if len(pages) < 2 or len(np.unique(pages[:, 0])) == len(pages):
        return []
    units = np.asarray(computed) // unit
    width = int(units.max()) * unit // page_size
    if not width:
        return []
    pages = np.ascontiguousarray(pages[:, :width])
    order = np.argsort(pages.view(np.dtype((np.void, pages.dtype.itemsize * width)))[:, 0], kind="stable")
    ordered, limit = pages[order], units[order]
    differs = np.concatenate([ordered[1:] != ordered[:-1], np.ones((len(order) - 1, 1), dtype=bool)], axis=1)
    common = np.minimum(differs.argmax(1) * page_size // unit, np.minimum(limit[1:], limit[:-1])).tolist()
    found, waiting = list[SharedRun](), [(0, len(common), 0, 0)]
    while waiting:
        first, end, base, level = waiting.pop()
        left, right, height = _largest_rectangle([count - base for count in common[first:end]])
        if not height:
            continue
        left, right = first + left, first + right
        found.append(SharedRun(level, tuple(order[left : right + 1].tolist()), base * unit, (base + height) * unit))
        waiting += [(first, max(first, left - 1), base, level), (right + 1, end, base, level)]
        if level + 1 < max_levels:
            waiting.append((left, right, base + height, level + 1))
    return found


def _largest_rectangle(heights: Sequence[int]) -> tuple[int, int, int]:
    """(first, end, height) of the largest rectangle under a histogram; height 0 if there is none."""
    best, open_bars = (0, 0, 0), list[tuple[int, int]]()
    for i, height in enumerate([*heights, 0]):
        first = i
        while open_bars and open_bars[-1][1] >= height:
            first, tall = open_bars.pop()
            if (i - first) * tall > (best[1] - best[0]) * best[2]:
                best = (first, i, tall)
        if height > 0:
            open_bars.append((first, height))
    return best
