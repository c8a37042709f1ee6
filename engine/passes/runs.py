"""`SharedRun`: keys that several sequences of a pass share, found from their page tables.

Tables are sorted by their pages. Sequences that share a run of keys are then neighbours, and the largest rectangle under the
numbers of units that neighbours have in common is the run that saves most. What its members still share after it belongs to
the next level.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
