"""Shard files: safetensors, written without a second copy in memory, read row by row.

A local shard is memory-mapped. From a remote shard, only the header and the wanted rows are fetched.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.dump.manifest import ShardEntry, SiteEntry
from replaylens.engine.dump.pieces import pieces_of
from replaylens.engine.dump.store import HashingFile, Store
from replaylens.engine.errors import BadDump, StoreFailed

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_HEADER = 100_000_000
_USUAL_HEADER = 1 << 14
"""bytes read first; most headers are shorter, so that one request suffices"""


def write_shard(file: HashingFile, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors [rows, ...] as safetensors, without metadata and sorted by name: equal tensors give equal bytes."""
    header, offset = {}, 0
    for name in sorted(tensors):
        pieces = pieces_of(tensors, name)
        end = offset + sum(x.numel() * x.element_size() for x in pieces)
        code, shape = _CODES[str(pieces[0].dtype).removeprefix("torch.")], [sum(map(len, pieces)), *pieces[0].shape[1:]]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    file.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        for x in pieces_of(tensors, name):
            if x.numel():
                file.write(x.view(_BITS[x.element_size()]).numpy().reshape(-1))


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
            raw = json.loads((begin + rest)[8 : 8 + length])
            raw.pop("__metadata__", None)
            found = {name: (entry["dtype"], list(entry["shape"])) for name, entry in raw.items()}
            ranges = {name: tuple(8 + length + int(at) for at in entry["data_offsets"]) for name, entry in raw.items()}
        except StoreFailed:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise self._damaged(error) from None
        self._check(found)
        for name, (start, end) in ranges.items():
            fits = end - start == self.entry.rows * self.sites[name].row_bytes and start >= 8 and end <= self.entry.bytes
            if not fits:
                raise BadDump(f"{self.store.url}/{self.entry.name}: the rows of {name} lie outside the file.")
        return {name: (start, end) for name, (start, end) in ranges.items()}

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


def _bounds(chosen: np.ndarray) -> tuple[int, int]:
    return (int(chosen.min()), int(chosen.max()) + 1) if len(chosen) else (0, 0)
