"""`Region`: the shards of a local dump, mapped one after the other into one range of addresses.

Rows of any shards, in any order, are then one `index_select`: a loop over shards would cost more than the copies themselves.
Pages that were touched once are read again at the speed of memory.
"""

import ctypes
import mmap
import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.dump.manifest import Manifest
from replaylens.engine.dump.shard import ShardFile
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump

_MAP_FIXED = 0x10
"""on Linux and macOS; Python's mmap cannot place a mapping"""
_FAILED = ctypes.c_void_p(-1).value


class Region:
    """Reserved addresses for all shards. A shard is mapped, read-only, when a row of it is first taken."""

    def __init__(self, store: Store, manifest: Manifest, shard: Callable[[int], ShardFile]) -> None:
        """`shard` opens and checks a shard by number."""
        self.store, self.manifest, self._shard = store, manifest, shard
        unit = mmap.ALLOCATIONGRANULARITY
        sizes = [-(-entry.bytes // unit) * unit for entry in manifest.shards]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._memory = mmap.mmap(-1, int(self._starts[-1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        self._first = {name: np.full(len(sizes), -1, dtype=np.int64) for name in manifest.sites}
        """place of each shard's first row of a site, in bytes from the beginning; -1: not mapped"""
        array = np.frombuffer(self._memory, dtype=np.uint8)
        self._address = int(array.ctypes.data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the array is read-only: nothing here writes
            self._bytes = torch.from_numpy(array)

    def take(self, name: str, entry: int | None, shards: np.ndarray, rows: np.ndarray) -> Tensor:
        """Rows of a site (or the given layer of Z) by shard and row within it: [rows, ...]. The caller owns the result."""
        site, first = self.manifest.sites[name], self._first[name]
        self._map(np.unique(shards[first[shards] < 0]).tolist())
        shape = site.shape if entry is None else site.shape[1:]
        width = site.row_bytes if entry is None else site.row_bytes // site.shape[0]
        places = first[shards] + rows * site.row_bytes + (0 if entry is None else entry % site.shape[0] * width)
        every = self._bytes.as_strided([len(self._bytes) - width + 1, width], [1, 1])  # the bytes from each place on
        picked = every.index_select(0, torch.from_numpy(places))
        dtype: torch.dtype = getattr(torch, site.dtype)
        return picked.view(dtype).view(len(rows), *shape)

    def copy(self, name: str, shard: int, row: int, out: Tensor) -> None:
        """Mutates: fill a contiguous tensor with adjacent rows of a shard, from `row` on."""
        if self._first[name][shard] < 0:
            self._map([shard])
        start = int(self._first[name][shard]) + row * self.manifest.sites[name].row_bytes
        flat = out.view(-1).view(torch.uint8)
        flat.copy_(self._bytes[start : start + len(flat)])

    def _map(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            opened, start = self._shard(number), int(self._starts[number])
            self._place(self.store.path(opened.entry.name), start, opened.entry.bytes)
            for name, first in self._first.items():
                first[number] = start + opened.starts[name]

    def _place(self, path: str, start: int, size: int) -> None:
        """Map a file over its reserved addresses. They are given back together, with `_memory`."""
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                flags = mmap.MAP_PRIVATE | _MAP_FIXED
                if _libc_mmap()(self._address + start, size, mmap.PROT_READ, flags, file, 0) == _FAILED:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(file)
        except OSError as error:
            raise BadDump(f"{path} cannot be mapped: {error.strerror}.") from error


@cache
def _libc_mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return call
