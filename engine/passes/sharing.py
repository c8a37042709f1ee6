"""`Sharing`: which rows of a pass read the same keys, so that a CUDA device reads them once (`kernels/shared.py`).

Whether a run of shared keys is worth a tile is a matter of cost; the bits of a row do not depend on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.passes.batch import Batch, SharedRun, shared_runs
from replaylens.kernels.gpus import Gpu, gpu_of
from replaylens.kernels.launch import KV_BLOCK, attention_tile, heads_together, next_power_of_2
from replaylens.kernels.shared import SharedKeys, SharedLevel, rows_per_tile

MAX_LEVELS = 3
"""each level is one more launch per layer"""
_WORTH_RUN = 512
"""keys that a run must save"""


@dataclass(frozen=True)
class KeyLayout:
    """What the keys of a layer look like."""

    page_size: int
    heads: int
    kv_heads: int
    d_head: int
    """of values"""
    dtype: torch.dtype
    gpu: Gpu
    rest: int = 0
    """columns of a key beyond its value, if values are the first columns of keys; 0: they are stored beside them"""

    @classmethod
    def of(cls, cache: KVCache) -> "KeyLayout":
        kv_heads, width = cache.data.shape[3:]
        d_head = cache.value_width
        return cls(
            cache.pool.page_size, cache.num_heads, kv_heads, d_head, cache.data.dtype, gpu_of(cache.data.device), width - d_head
        )

    @property
    def unit(self) -> int:
        """Keys that are shared together: a block, or a page if it is larger. 0: pages and blocks do not fit together."""
        small, large = sorted((self.page_size, KV_BLOCK))
        return large if large % small == 0 else 0

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value."""
        return self.kv_heads * (self.d_head + (self.rest or self.d_head)) * self.dtype.itemsize

    @property
    def group(self) -> int:
        """Query heads that share a program."""
        return heads_together(self.heads, self.kv_heads, self.d_head, self.dtype, self.gpu)

    @property
    def full(self) -> bool:
        """Whether the query heads of one row fill a tile, so that every row has tiles of its own with or without sharing. Wide
        values in float32 leave no registers for states."""
        return self.rows_per_tile(1 << 10) < 2 or (self.d_head > 256 and self.dtype == torch.float32)

    def rows_per_tile(self, longest: int) -> int:
        """How many rows of one sequence share a tile if no sequence has more than `longest` rows."""
        return rows_per_tile(self.heads, self.kv_heads, self.d_head, self.dtype, longest, self.gpu)


class LevelShape(NamedTuple):
    """What the launch of a level depends on."""

    tiles: int
    pairs: int
    max_keys: int


class Sharing:
    """The shared keys of packed rows, on the host."""

    def __init__(self, runs: Sequence[SharedRun], counts: Sequence[int], layout: KeyLayout) -> None:
        """counts  number of rows of each sequence"""
        group, key = layout.group, (layout.d_head, layout.dtype, layout.gpu)
        offsets = np.cumsum([0, *counts])
        self.begun = np.zeros((int(offsets[-1]), 2), dtype=np.int32)
        self.tiles: list[NDArray[np.int32]] = []
        self.order: list[NDArray[np.int32]] = []
        self.shape: tuple[LevelShape, ...] = ()
        for level in range(max(run.level for run in runs) + 1):
            mine = [run for run in runs if run.level == level]
            rows = [np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in run.sequences]) for run in mine]
            height = attention_tile(max(map(len, rows)) * group, *key, group, split=False).rows
            self._add(level, mine, rows, height, group)

    def _add(self, level: int, runs: list[SharedRun], rows: list[NDArray[np.int64]], height: int, group: int) -> None:
        tiles, place, per_tile = [], 0, max(1, height // group)
        for run, own in zip(runs, rows, strict=True):
            self.begun[own] = run.end, level
            for first in range(0, len(own), per_tile):
                tiles.append((place + first, min(per_tile, len(own) - first), run.begin, run.end))
            place += len(own)
        self.tiles.append(np.array(tiles, dtype=np.int32))
        self.order.append(np.concatenate(rows).astype(np.int32))
        longest = max(run.end - run.begin for run in runs)
        self.shape += (LevelShape(next_power_of_2(len(tiles)), height, next_power_of_2(longest)),)

    def load(self, keys: SharedKeys) -> None:
        """Mutates `keys`, which was made by `room` for this shape and at least as many rows."""
        _fill(keys.begun, self.begun)
        for level, tiles, order in zip(keys.levels, self.tiles, self.order, strict=True):
            _fill(level.tiles, tiles)
            _fill(level.order, order)

    def keys(self, device: torch.device) -> SharedKeys:
        """The same on a device."""
        made = room(self.shape, len(self.begun), device)
        self.load(made)
        return made


def room(shape: tuple[LevelShape, ...], rows: int, device: torch.device) -> SharedKeys:
    """Tensors for any sharing of this shape: nothing is shared until it is loaded."""
    zeros = lambda *size: torch.zeros(size, dtype=torch.int32, device=device)  # noqa: E731
    levels = tuple(SharedLevel(zeros(tiles, 4), zeros(rows), pairs, keys) for tiles, pairs, keys in shape)
    return SharedKeys(levels, zeros(rows, 2))


def find_sharing(
    pages: NDArray[np.int32], computed: Sequence[int], counts: Sequence[int], layout: KeyLayout, worth: int
) -> Sharing | None:
    """The sharing of a pass that saves most, or None if none is worth its launches.

    pages     of each sequence: [sequences, pages]
    computed  keys of each sequence that are in the cache before the pass
    worth     bytes per layer that a level must save
    """
    unit = layout.unit
    if not unit or layout.full:
        return None
    found = shared_runs(pages, computed, unit, layout.page_size, MAX_LEVELS)
    runs = [run for run in found if run.saved >= min(_WORTH_RUN, worth)]
    kept: list[SharedRun] = []
    ends: dict[int, int] = {}
    """sequence -> where what is kept of it ends"""
    for level in range(MAX_LEVELS):
        mine = [run for run in runs if run.level == level and all(ends.get(s, 0) == run.begin for s in run.sequences)]
        if not mine or sum(run.saved for run in mine) * layout.key_bytes < worth:
            break
        kept += mine
        ends.update((sequence, run.end) for run in mine for sequence in run.sequences)
    return Sharing(kept, counts, layout) if kept else None


def sharing_of(batch: Batch, pages: NDArray[np.int32], cache: KVCache) -> Sharing | None:
    """Which rows of a batch share keys that are worth reading once. pages: [at least its segments, pages]"""
    starts, counts = [s.start for s in batch.segments], [len(s.tokens) for s in batch.segments]
    return find_sharing(pages[: len(starts)], starts, counts, KeyLayout.of(cache), cache.worth_sharing)


def _fill(target: torch.Tensor, values: NDArray[np.int32]) -> None:
    """Copies values into the first rows of the target; the rest is zero."""
    padded = np.zeros(tuple(target.shape), dtype=np.int32)
    padded[: len(values)] = values
    target.copy_(torch.from_numpy(padded), non_blocking=True)
