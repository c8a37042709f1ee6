"""Shard files: safetensors, written without a second copy in memory, read row by row.

A local shard is memory-mapped by safetensors. From a remote shard, only the header and the wanted rows are fetched.
"""

import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replaylens.engine.dump.manifest import ShardEntry, SiteEntry
from replaylens.engine.dump.store import HashingFile, Store
from replaylens.engine.errors import BadDump, StoreFailed
from replaylens.engine.request.capture import Rows

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_HEADER = 100_000_000


def write_shard(file: HashingFile, tensors: Rows) -> None:
    """Write tensors [rows, ...] as safetensors, without metadata and sorted by name: equal tensors give equal bytes."""
    header, offset = {}, 0
    for name in sorted(tensors):
        x = tensors[name]
        end = offset + x.numel() * x.element_size()
        code = _CODES[str(x.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    file.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        if x.numel():
            file.write(x.view(_BITS[x.element_size()]).numpy().reshape(-1))


class ShardFile:
    """One shard, checked against its manifest entry before any row is read."""

    def __init__(self, store: Store, entry: ShardEntry, sites: dict[str, SiteEntry]) -> None:
        self.store, self.entry, self.sites = store, entry, sites
        self._local = self._open() if store.local else None
        self._header = None if store.local else self._fetch_header()

    def rows(self, site: str, chosen: slice | np.ndarray) -> Tensor:
        """The chosen rows of a site: [rows, ...]. The caller owns the result."""
        if self._local is not None:
            whole = self._local.get_tensor(site)  # mapped, not read
            picked = whole[chosen] if isinstance(chosen, slice) else whole[torch.from_numpy(chosen)]
            return picked.clone() if isinstance(chosen, slice) else picked
        start, end = (chosen.start, chosen.stop) if isinstance(chosen, slice) else _bounds(chosen)
        fetched = self._fetch(site, start, end)
        return fetched if isinstance(chosen, slice) else fetched[torch.from_numpy(chosen - start)]

    def _open(self) -> Any:
        try:
            opened = safe_open(self.store.path(self.entry.name), framework="pt")
            slices = {name: opened.get_slice(name) for name in list(opened.keys())}
            found = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
        except (SafetensorError, OSError) as error:
            raise self._damaged(error) from None
        self._check(found)
        return opened

    def _fetch_header(self) -> dict[str, tuple[int, int]]:
        """Byte range of each site, from the file's header."""
        try:
            length = int.from_bytes(self.store.read_range(self.entry.name, 0, 8), "little")
            if length > min(_MAX_HEADER, self.entry.bytes):
                raise ValueError(f"its header has {length} bytes")
            raw = json.loads(self.store.read_range(self.entry.name, 8, 8 + length))
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
        assert self._header is not None
        first = self._header[site][0] + start * entry.row_bytes
        raw = bytearray(self.store.read_range(self.entry.name, first, first + (end - start) * entry.row_bytes))
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not raw:
            return torch.empty([0, *entry.shape], dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(end - start, *entry.shape)


def _bounds(chosen: np.ndarray) -> tuple[int, int]:
    return (int(chosen.min()), int(chosen.max()) + 1) if len(chosen) else (0, 0)
