"""`Batch`: rows of any number of branches, packed for one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.engine.errors import InternalError, NonFinite
from replaylens.engine.memory.pages import PagePool, PageTable, page_matrix
from replaylens.engine.request.edits import Hook
from replaylens.engine.request.placed import PlacedEdit
from replaylens.kernels.definition import CHUNK

if TYPE_CHECKING:
    from replaylens.kernels.cpu_attention import HostRows

# ---- batch -----------------------------------------------------------------------------------------------------------


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


class Batch:
    """Packed rows."""

    def __init__(self, segments: list[Segment], pool: PagePool, device: str = "cpu") -> None:
        if not segments or not all(s.tokens for s in segments):
            raise InternalError("A batch has no segments, or a segment without rows.")
        self.segments, self.pool = segments, pool
        self.offsets = [0, *accumulate(len(s.tokens) for s in segments)]
        self.num_rows = self.offsets[-1]
        # numpy reads a list in a sixth of torch's time, and the device waits meanwhile
        tokens = np.concatenate([np.array(s.tokens) for s in segments])
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        self.tokens = torch.tensor(tokens).to(device, non_blocking=True)
        self.positions = torch.tensor(positions).to(device, non_blocking=True)

    def on(self, device: torch.device) -> "Batch":
        """The same rows on another device."""
        if device == self.tokens.device:
            return self
        other = Batch.__new__(Batch)
        other.segments, other.pool, other.num_rows, other.offsets = self.segments, self.pool, self.num_rows, self.offsets
        other.tokens, other.positions = self.tokens.to(device), self.positions.to(device)
        return other

    @cached_property
    def cuts_edges(self) -> bool:
        """Whether an edit may change an edge of a row's attention."""
        return any(edit.on_pattern and edit.touches(s.start, s.end) for s in self.segments for edit in s.edits)

    @property
    def edits_inside(self) -> bool:
        """Whether an edit changes the inside of an attention, or of a recurrence, whose rows begin with their chunk."""
        states = ((edit, s) for s in self.segments for edit in s.edits if edit.inside and not edit.on_pattern)
        return self.cuts_edges or any(edit.touches(s.start - s.start % CHUNK, s.end) for edit, s in states)

    @property
    def sequence(self) -> NDArray[np.int32]:
        """The segment of every row."""
        return np.repeat(np.arange(len(self.segments), dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def write_slots(self) -> Tensor:
        """The slot of every row's KV: [rows]."""
        return torch.tensor([slot for s in self.segments for slot in self.pool.slots(s.table, s.start, s.end)])

    @cached_property
    def paged(self) -> "HostRows":
        """The rows and the pages of their keys, as the attention of a CPU reads them. Tables are padded, so that a recorded
        pass serves many lengths."""
        from replaylens.kernels.cpu_attention import HostRows  # loads the compiler, which a GPU does not need

        longest = max(len(s.table.pages) for s in self.segments)
        pages = page_matrix([s.table for s in self.segments], (len(self.segments), 1 << (longest - 1).bit_length()))
        order = sorted(range(len(pages)), key=lambda i: pages[i].tobytes()) if len(pages) > 1 else [0]
        rows = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in order])
        there = torch.from_numpy
        sequence, tables = there(self.sequence.astype(np.int64)), there(pages.astype(np.int64))
        return HostRows(sequence, self.positions, tables, self.pool.page_size, there(rows))

    def row(self, segment: int, position: int) -> int:
        """The packed row of a position of a segment."""
        return self.offsets[segment] + position - self.segments[segment].start

    def logit_rows(self) -> list[int]:
        """The packed rows that need logits, in order."""
        ends = self.offsets[1:]
        return [row for end, s in zip(ends, self.segments, strict=True) for row in range(end - s.num_logits, end)]


# ---- finite ----------------------------------------------------------------------------------------------------------
# `finite`: rejects NaN and infinity before anything of a pass is committed.
#
# NaN in one row would spread to its neighbours in a block of the cache, and through the prefix index to other branches.


def finite(x: Tensor, what: str) -> Tensor:
    """`x` itself. Raises NonFinite if it holds NaN or infinity."""
    if x.device.type == "cpu" and x.dtype == torch.float32:  # numpy takes a tenth of torch's time
        fine = bool(np.isfinite(x.numpy(force=True)).all())
    else:
        fine = bool(torch.isfinite(x).all())
    if not fine:
        raise not_finite(what)
    return x


TOLD = (
    "", "keys or values", "keys or values", "inputs of a convolution", "keys", "decays", "updates of a recurrent state",
    "recurrent states",
)  # fmt: skip
"""what kernels say that is not finite, by number"""


def not_finite(what: str) -> NonFinite:
    """The error for a pass that computed non-finite logits, activations or thoughts."""
    return NonFinite(f"The model gave NaN or infinite {what}. Nothing of this pass was committed. Check edits and weights.")


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
