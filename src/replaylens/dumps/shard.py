"""Shard files: safetensors, written without a second copy in memory, read row by row.

A local shard is memory-mapped. From a remote shard, only the header and the wanted rows are fetched.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replaylens.dumps.content import RowHash, bits_of, blocks_of, pieces_of
from replaylens.dumps.manifest import Manifest, ShardEntry, SiteEntry
from replaylens.dumps.store import HashingFile, Store
from replaylens.engine.errors import BadDump, StoreFailed
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

# ---- shard -----------------------------------------------------------------------------------------------------------

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
_MAX_HEADER = 100_000_000
_USUAL_HEADER = 1 << 14
"""bytes read first; most headers are shorter, so that one request suffices"""


def write_shard(file: HashingFile, tensors: Mapping[str, Tensor], beside: RowHash | None = None) -> None:
    """Write tensors [rows, ...] as safetensors, without metadata and sorted by name: equal tensors give equal bytes.

    beside  takes the rows, too, while they are written and the file is hashed
    """
    header, offset = {}, 0
    for name in sorted(tensors):
        pieces, layout = pieces_of(tensors, name)
        x, rows = pieces[0], layout.rows
        end = offset + rows * math.prod(x.shape[1:]) * x.element_size()
        code = _CODES[str(x.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": [rows, *x.shape[1:]], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    file.write(len(text).to_bytes(8, "little") + text)
    with ThreadPoolExecutor(1) as threads:
        for name, block in blocks_of(tensors):
            hashing = None if beside is None else threads.submit(beside.add, name, block)
            if block.numel():
                file.write(bits_of(block).numpy().reshape(-1))
            if hashing is not None:
                hashing.result()


class ShardFile:
    """One shard, checked against its manifest entry before any row is read."""

    def __init__(self, store: Store, entry: ShardEntry, sites: dict[str, SiteEntry]) -> None:
        self.store, self.entry, self.sites = store, entry, sites
        self._ranges = self._read_header()

    def rows(self, site: str, chosen: slice | np.ndarray) -> Tensor:
        """The chosen rows of a site: [rows, ...]. The caller owns the result."""
        if self.store.local:
            whole = self.mapped(site)
            return whole[chosen].clone() if isinstance(chosen, slice) else whole[torch.from_numpy(chosen)]
        start, end = (chosen.start, chosen.stop) if isinstance(chosen, slice) else _bounds(chosen)
        fetched = self._fetch(site, start, end)
        return fetched if isinstance(chosen, slice) else fetched[torch.from_numpy(chosen - start)]

    @property
    def starts(self) -> dict[str, int]:
        """The place of each site's first row in the file, in bytes."""
        return {name: start for name, (start, _) in self._ranges.items()}

    def mapped(self, site: str) -> Tensor:
        """All rows of a site in a local shard: [rows, ...], mapped, not read. What is written into the tensor stays in
        this object's own mapping: the file does not change."""
        entry, (start, _) = self.sites[site], self._ranges[site]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        shape = [self.entry.rows, *entry.shape]
        if start % dtype.itemsize:  # tensors cannot be unaligned; only an odd number of 2-byte values before leads here
            return self._fetch(site, 0, self.entry.rows)
        strides = torch.empty(shape, dtype=dtype, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(self._storage, start // dtype.itemsize, shape, strides)

    @cached_property
    def _storage(self) -> Any:
        """The file's bytes, mapped privately."""
        try:
            return torch.UntypedStorage.from_file(self.store.path(self.entry.name), False, self.entry.bytes)
        except (RuntimeError, OSError) as error:
            raise self._damaged(error) from None

    def _read_header(self) -> dict[str, tuple[int, int]]:
        """Byte range of each site, from the file's header."""
        try:
            begin = self._bytes(0, min(_USUAL_HEADER, self.entry.bytes))
            length = int.from_bytes(begin[:8], "little")
            if length > min(_MAX_HEADER, self.entry.bytes):
                raise ValueError(f"its header has {length} bytes")
            rest = self._bytes(len(begin), 8 + length) if 8 + length > len(begin) else b""
            raw = json.loads((begin + rest)[8 : 8 + length], object_pairs_hook=_unique)
            raw.pop("__metadata__", None)
            found = {name: (entry["dtype"], list(entry["shape"])) for name, entry in raw.items()}
            offsets = {name: _offsets(name, entry["data_offsets"]) for name, entry in raw.items()}
            _require_adjacent(offsets, self.entry.bytes - 8 - length)
        except StoreFailed:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise self._damaged(error) from None
        self._check(found)
        for name, (start, end) in offsets.items():
            if end - start != self.entry.rows * self.sites[name].row_bytes:
                raise self._damaged(ValueError(f"{name} has {end - start} bytes, and its rows another number"))
        return {name: (8 + length + start, 8 + length + end) for name, (start, end) in offsets.items()}

    def _bytes(self, start: int, end: int) -> bytes:
        if not self.store.local:
            return self.store.read_range(self.entry.name, start, end)
        with open(self.store.path(self.entry.name), "rb") as file:  # a tenth of the time that fsspec takes
            file.seek(start)
            return file.read(end - start)

    def _check(self, found: dict[str, tuple[str, list[int]]]) -> None:
        wanted = {name: (_CODES[s.dtype], [self.entry.rows, *s.shape]) for name, s in self.sites.items()}
        if found != wanted:
            wrong = sorted({*found, *wanted} - {name for name in wanted if found.get(name) == wanted[name]})[0]
            raise BadDump(
                f"{self.store.url}/{self.entry.name}: {wrong} is {found.get(wrong)}, but {wanted.get(wrong)} in the manifest."
            )

    def _damaged(self, error: Exception) -> BadDump:
        return BadDump(f"{self.store.url}/{self.entry.name} is not a complete safetensors file: {error}.")

    def _fetch(self, site: str, start: int, end: int) -> Tensor:
        entry = self.sites[site]
        first = self._ranges[site][0] + start * entry.row_bytes
        raw = bytearray(self._bytes(first, first + (end - start) * entry.row_bytes))
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not raw:
            return torch.empty([0, *entry.shape], dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(end - start, *entry.shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a name that stands twice: readers differ in which of the two they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"its header has {twice[:100]!r} twice")
    return found


def _offsets(name: str, given: Any) -> tuple[int, int]:
    """Where a tensor begins and ends among the data. ValueError unless these are two whole numbers in order."""
    whole = isinstance(given, list) and len(given) == 2 and all(type(at) is int for at in given)
    if not whole or not 0 <= given[0] <= given[1]:
        raise ValueError(f"the offsets of {name[:100]!r} are {str(given)[:100]}")
    return given[0], given[1]


def _require_adjacent(offsets: dict[str, tuple[int, int]], size: int) -> None:
    """ValueError unless the tensors fill the data without a gap, and none lies in another's, as the format requires."""
    at = 0
    for start, end, name in sorted((*given, name) for name, given in offsets.items()):
        if start != at:
            raise ValueError(f"{name[:100]!r} begins at byte {start} of the data, not where the tensor before it ends, at {at}")
        at = end
    if at != size:
        raise ValueError(f"its tensors have {at} bytes, its data {size}")


def _bounds(chosen: np.ndarray) -> tuple[int, int]:
    return (int(chosen.min()), int(chosen.max()) + 1) if len(chosen) else (0, 0)


# ---- mapped shards ---------------------------------------------------------------------------------------------------
# `MappedShards`: the shards of a local dump, mapped one after the other into one range of addresses.
#
# Rows of any shards, in any order, are then one `index_select`: a loop over shards would cost more than the copies
# themselves. Pages that were touched once are read again at the speed of memory.

_MAP_FIXED = 0x10
"""on Linux and macOS; Python's mmap cannot place a mapping"""
_FAILED = ctypes.c_void_p(-1).value


class MappedShards:
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


# ---- checked ---------------------------------------------------------------------------------------------------------
# `CheckedShards`: every shard is hashed once, when it is first opened, so that damage does not pass for data.
#
# The result is kept in the cache folder by the file's path, size, inode and times of change; while these stay, no later
# process hashes the shard again. The time of writing can be set back by any program, that of the inode's change cannot.

_THREADS = 8
_SETTLED_NS = 2 * 10**9
"""a file changed so recently may change again within the clock's resolution; its result is not kept"""


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))


class CheckedShards:
    """The shards of one dump and which of them are known to be intact."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest
        self._intact: set[int] = set()

    def check(self, numbers: Iterable[int]) -> None:
        """Mutates: hash the shards that were not checked before, several at a time. Raises BadDump."""
        if waiting := [number for number in dict.fromkeys(numbers) if number not in self._intact]:
            stamps = {number: self._stamp(number) for number in waiting}
            unknown = [number for number in waiting if self._line(number, stamps[number]) not in self._kept]
            if len(unknown) > 1:
                with hashing_threads() as pool:
                    list(pool.map(self._hash, unknown))  # raises the first error
            else:
                for number in unknown:
                    self._hash(number)
            self._keep(self._line(number, stamps[number]) for number in unknown if self._settled(number))
            self._intact.update(waiting)

    def trust(self, numbers: Iterable[int]) -> None:
        """Mutates: these shards were just hashed elsewhere and are intact."""
        self._intact.update(numbers)

    def _hash(self, number: int) -> None:
        shard = self.manifest.shards[number]
        try:
            found = self.store.sha256(shard.name)
        except StoreFailed:  # which says nothing about the shard
            raise
        except OSError as error:
            raise BadDump(f"{self.store.url}/{shard.name} cannot be read: {error.strerror or error}.") from error
        if found != shard.sha256:
            raise BadDump(
                f"{self.store.url}/{shard.name} was changed after it was written: its SHA-256 is {found[:16]}…, in the "
                f"manifest it is {shard.sha256[:16]}…. Resume the dump to write it again, or copy it again from an intact "
                "dump. To read it as it is, open the dump with check=False."
            )

    def _stamp(self, number: int) -> str:
        """What changes when the file does, as cheap as a stat. A file that is gone has none, and hashing it says so."""
        path = self.store.path(self.manifest.shards[number].name)
        with suppress(OSError):
            if not self.store.local:
                return str(self.store.fs.ukey(path))
            found = os.stat(path)
            return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
        return "none"

    def _settled(self, number: int) -> bool:
        if not self.store.local:
            return True
        found = os.stat(self.store.path(self.manifest.shards[number].name))
        return time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS

    def _line(self, number: int, stamp: str) -> str:
        shard = self.manifest.shards[number]
        return f"{shard.name} {stamp} {shard.sha256}"

    @property
    def _record(self) -> Path:
        from replaylens.engine.files import cache_folder

        where = os.path.realpath(self.store.root) if self.store.local else self.store.url
        return cache_folder() / "shards" / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.txt"

    @cached_property
    def _kept(self) -> set[str]:
        """The lines that earlier processes left. A line that is damaged matches no shard, which is then hashed."""
        try:
            return set(self._record.read_text(encoding="utf-8", errors="replace").splitlines())
        except OSError:
            return set()

    def _keep(self, lines: Iterable[str]) -> None:
        """Append to the record. Without a writable cache folder the next process hashes again, which costs time only."""
        if text := "".join(f"{line}\n" for line in lines):
            with suppress(OSError):
                self._record.parent.mkdir(parents=True, exist_ok=True)
                with self._record.open("a", encoding="utf-8") as file:
                    file.write(text)
