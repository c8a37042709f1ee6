"""`Batch`: rows of any number of branches, packed for one pass."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from replaylens.engine.errors import EngineBug
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.ops import visible
from replaylens.engine.request.edits import Hook, PlacedEdit

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

    def ceiling(self, window: int) -> Tensor:
        """The `ceiling` of the scores of the last keys: [pieces, query rows, 1, last keys]. All queries see the earlier keys.

        Cached per window.
        """
        if window not in self.masks:
            seen = visible(self.positions.view(-1), self.num_keys, window)
            first = 0 if window else int(self.positions.min()) + 1
            self.masks[window] = ceiling(seen.view(*self.positions.shape, 1, self.num_keys)[..., first:])
        return self.masks[window]


def ceiling(seen: Tensor) -> Tensor:
    """Upper bounds of scores: infinity where a query sees the key, minus infinity where it does not."""
    return torch.where(seen, math.inf, -math.inf)


class Batch:
    """Packed rows. Padding rows have token 0 at position 0, write no KV, and no other row attends to them."""

    def __init__(
        self, segments: list[Segment], pool: PagePool, query_rows: tuple[int, ...], tile: int = TILE, device: str = "cpu"
    ) -> None:
        if not segments or not all(s.tokens for s in segments):
            raise EngineBug("A batch has no segments, or a segment without rows.")
        self.segments, self.pool, self.query_rows = segments, pool, query_rows
        tokens = [t for s in segments for t in s.tokens]
        positions = [p for s in segments for p in range(s.start, s.end)]
        self.num_rows = len(tokens)
        self.padded = -(-self.num_rows // tile) * tile
        pad = self.padded - self.num_rows
        self.tokens = torch.tensor(tokens + [0] * pad).to(device, non_blocking=True)
        self.positions = torch.tensor(positions + [0] * pad).to(device, non_blocking=True)
        self.offsets = [0]
        for s in segments:
            self.offsets.append(self.offsets[-1] + len(s.tokens))

    @cached_property
    def write_slots(self) -> Tensor:
        """The slot of every row's KV: [rows]."""
        return torch.tensor([slot for s in self.segments for slot in self.pool.slots(s.table, s.start, s.end)])

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """The attention groups, used on a CPU only."""
        return self._attention_groups(self.pool, self.query_rows)

    @cached_property
    def queries(self) -> list[Tensor]:
        """For each group, the packed row of every query; padding takes row 0, and its result is dropped. [pieces * rows]"""
        return [group.rows.view(-1) * (group.rows.view(-1) < self.padded) for group in self.groups]

    @cached_property
    def query_of_row(self) -> Tensor:
        """Of every padded row, its place among the queries of all groups; padding rows take the first. [padded rows]"""
        places = torch.zeros(self.padded + 1, dtype=torch.int64)
        rows = torch.cat([group.rows.view(-1) for group in self.groups])
        places[rows] = torch.arange(rows.shape[0])
        return places[:-1]

    def row(self, segment: int, position: int) -> int:
        """The packed row of a position of a segment."""
        return self.offsets[segment] + position - self.segments[segment].start

    def logit_rows(self) -> list[int]:
        """The packed rows that need logits, in order."""
        ends = self.offsets[1:]
        return [row for end, s in zip(ends, self.segments, strict=True) for row in range(end - s.num_logits, end)]

    def _attention_groups(self, pool: PagePool, query_rows: tuple[int, ...]) -> list[AttentionGroup]:
        """Split segments into pieces of at most max(query_rows) rows, and group pieces of equal padded size."""
        largest = max(query_rows)
        pieces = []  # (padded query rows, padded keys, first packed row, rows, segment, first position)
        for offset, s in zip(self.offsets, self.segments, strict=False):
            for first in range(0, len(s.tokens), largest):
                n = min(largest, len(s.tokens) - first)
                keys = _roomy(-(-(s.start + first + n) // KV_BLOCK)) * KV_BLOCK
                pieces.append((min(q for q in query_rows if q >= n), keys, offset + first, n, s, s.start + first))
        pieces.sort(key=lambda piece: piece[:3])
        return [self._group(list(group), pool) for _, group in groupby(pieces, key=lambda piece: piece[:2])]

    def _group(self, pieces: list[tuple[int, int, int, int, Segment, int]], pool: PagePool) -> AttentionGroup:
        queries, keys = pieces[0][0], pieces[0][1]
        rows, positions, key_slots = [], [], []
        for _, _, first_row, n, segment, first_position in pieces:
            rows.append(list(range(first_row, first_row + n)) + [self.padded] * (queries - n))
            positions.append(list(range(first_position, first_position + n)) + [first_position] * (queries - n))
            own = pool.slots(segment.table, 0, first_position + n)
            key_slots += own + [0] * (keys - len(own))
        return AttentionGroup(torch.tensor(rows), torch.tensor(key_slots), torch.tensor(positions), keys, {})


def _roomy(blocks: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ... so that pieces of similar length share a group."""
    size = 1
    while size < blocks:
        if size * 3 // 2 >= blocks and size > 1:
            return size * 3 // 2
        size *= 2
    return size
