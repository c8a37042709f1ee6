"""`Feed`: a dump's rows in shuffled batches, for training. The order is a function of the seed alone; it can be resumed.

feed = dump.feed([("S", 2), ("C", 1)], batch_size=4096, seed=0)
for batch in feed:  # one epoch
    x = batch["blocks.2.hook_in"]  # [4096, d_model]
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from replaylens.dumps.files import DumpFiles, Located, SiteArray, gather, shard_starts
from replaylens.engine.errors import BadRequest, MissingPackage
from replaylens.engine.request.values import as_bool, as_int, as_processes, short_repr

if TYPE_CHECKING:
    from datasets import Dataset

# ---- order -----------------------------------------------------------------------------------------------------------
# `RowOrder`: a shuffled order of rows, computed where it is needed: any part of it, in any process, without a table.
#
# The order is a function of the number of rows, the seed and the epoch. It comes from integer arithmetic alone (a Feistel
# network over row numbers), so that it is the same with every version of every library.

SHUFFLES = ("rows", "blocks")
BLOCK_ROWS, POOL_BLOCKS = 256, 256
"""of shuffle="blocks": adjacent rows that are read together, and blocks whose rows are mixed"""
_CHUNK = 1 << 16
_ROUNDS = 8
_LEAST_BITS = 6
"""halves of fewer than 3 bits would favour some permutations"""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RowOrder:
    """The endless sequence of rows: one permutation of all rows per epoch, one epoch after the other."""

    count: int
    seed: int
    shuffle: str | None
    """rows: every row anywhere. blocks: blocks of adjacent rows anywhere, rows mixed within pools of blocks. None: as stored"""

    def __post_init__(self) -> None:
        as_int("seed", self.seed, 0, _MASK)
        if self.shuffle not in (*SHUFFLES, None):
            raise BadRequest(f"Unknown shuffle={short_repr(self.shuffle)}. Use {', '.join(map(repr, SHUFFLES))} or None.")

    def rows(self, first: int, last: int) -> np.ndarray:
        """Row numbers at positions [first, last) of the sequence."""
        pieces = []
        while first < last:
            epoch, start = divmod(first, self.count)
            number, skipped = divmod(start, _CHUNK)
            piece = _chunk(self, epoch, number)[skipped : skipped + last - first]
            pieces.append(piece)
            first += len(piece)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    def of_epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Row numbers at some positions (uint64) of an epoch."""
        if self.shuffle is None:
            return positions.astype(np.int64)
        key = _mix(_mix(self.seed) ^ epoch)
        if self.shuffle == "rows":
            return permuted(positions, self.count, key).astype(np.int64)
        return self._in_pools(positions, key).astype(np.int64)

    def _in_pools(self, positions: np.ndarray, key: int) -> np.ndarray:
        """Blocks in a random order, cut into pools; the rows of each pool in a random order. The short block at the end of the
        dump stays last, so that every pool but the last has the same size."""
        full = self.count // BLOCK_ROWS
        pool_rows = BLOCK_ROWS * POOL_BLOCKS
        out = np.empty_like(positions)
        pools = positions // np.uint64(pool_rows)
        for pool in np.unique(pools).tolist():
            here, first = pools == pool, pool * pool_rows
            size = min(pool_rows, self.count - first)
            inside = permuted(positions[here] - np.uint64(first), size, _mix(key ^ (pool + 1))) + np.uint64(first)
            block, within = inside // np.uint64(BLOCK_ROWS), inside % np.uint64(BLOCK_ROWS)
            moved = block < full
            block[moved] = permuted(block[moved], full, key)
            out[here] = block * np.uint64(BLOCK_ROWS) + within
        return out


@lru_cache(8)
def _chunk(order: RowOrder, epoch: int, number: int) -> np.ndarray:
    """A part of an epoch; do not modify it. Kept, because batches are smaller than what is computed fast."""
    return order.of_epoch(epoch, np.arange(number * _CHUNK, min(order.count, (number + 1) * _CHUNK), dtype=np.uint64))


def permuted(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """Where a permutation of range(count), chosen by the key, takes each of the places (uint64).

    A Feistel network permutes the next power of two. A place that leaves the range is sent on until it is back in it, which
    takes less than two steps on average.
    """
    bits = max(_LEAST_BITS, (count - 1).bit_length())
    low = bits // 2
    keys = [_mix(key + number) & 0xFFFFFFFF for number in range(1, _ROUNDS + 1)]
    out = _feistel(places, low, bits - low, keys)
    while (outside := np.flatnonzero(out >= count)).size:
        out[outside] = _feistel(out[outside], low, bits - low, keys)
    return out


def _feistel(x: np.ndarray, low_bits: int, high_bits: int, keys: list[int]) -> np.ndarray:
    """A permutation of [0, 2^(low_bits + high_bits)); each half has at most 32 bits."""
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << high_bits) - 1)
    low, high = x.astype(np.uint32) & low_mask, (x >> np.uint64(low_bits)).astype(np.uint32)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _hash(high, key) & low_mask
        else:
            high ^= _hash(low, key) & high_mask
    return (high.astype(np.uint64) << np.uint64(low_bits)) | low


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """32 well-mixed bits of each value: the finalizer of MurmurHash3. 32-bit products are vectorised, 64-bit ones are not."""
    x = x ^ np.uint32(key)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)  # wraps around
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _mix(value: int) -> int:
    """64 well-mixed bits of a whole number: the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# ---- feed ------------------------------------------------------------------------------------------------------------

ROW = "row"
"""key of a batch: the rows' numbers in the dump's index"""
_READ_BYTES = 16 << 20
"""rows are read at least so many at a time, in one go over all shards; batches are cut from them"""


class Feed(IterableDataset[dict[str, Tensor]]):
    """Batches of rows at several sites: stored name -> [batch, ...], and "row" -> their numbers in the index.

    The rows form one endless sequence, a new permutation of all rows in every epoch, and batches are cut from it. Batch
    size, workers and shards have no influence on it. Iterating gives `epochs` epochs from where the last iteration ended.
    """

    def __init__(
        self,
        files: DumpFiles,
        sites: dict[str, tuple[str, int | None]],
        chosen: np.ndarray | None,
        order: RowOrder,
        batch_size: int,
        epochs: int | None,
        drop_last: bool,
    ) -> None:
        """`sites`: key -> stored name and layer of Z; `chosen`: rows of the dump, None: all."""
        self.files, self.sites, self.chosen, self.order = files, sites, chosen, order
        self.batch_size = as_int("batch_size", batch_size, 1)
        self.epochs = None if epochs is None else as_int("epochs", epochs, 1)
        self.drop_last = as_bool("drop_last", drop_last)
        self.position = 0
        """rows of the sequence that were handed out"""
        if not order.count:
            raise BadRequest("No row of the dump is selected, so there is nothing to feed. Widen the conditions of `where`.")
        self._starts = shard_starts(files)
        self._digest = files.manifest.digest

    def __len__(self) -> int:
        """Number of batches of a whole iteration."""
        if self.epochs is None:
            raise TypeError("A feed with epochs=None has no end.")
        rows = self.epochs * self.order.count
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The batches from `position` to the end. In a DataLoader's worker, every n-th of them, so that all workers together
        give the same batches in the same order as one process."""
        info = get_worker_info()
        mine, workers = (0, 1) if info is None else (info.id, info.num_workers)
        end = self._end()
        waiting: list[tuple[int, int]] = []
        for number, (first, last) in enumerate(self._cuts(end)):
            if number % workers == mine:
                waiting.append((first, last))
                if sum(b - a for a, b in waiting) >= self._read_rows:
                    yield from self._read(waiting, end)
                    waiting = []
        yield from self._read(waiting, end)
        self.position = end or self.position

    def activations(self, site: str | None = None) -> Iterator[Tensor]:
        """The rows of one site alone, [batch, d]: the `data_provider` that SAELens's `SAETrainer` takes.

        site  a key of the batches; may be left out if there is one
        """
        key = next(iter(self.sites)) if site is None and len(self.sites) == 1 else site
        if key is None or key not in self.sites:
            raise BadRequest(f"Invalid site={short_repr(site)}. Give one of {', '.join(self.sites)}.")
        return (batch[key] for batch in self)

    def loader(self, workers: int = 0, pin_memory: bool = False) -> Iterator[dict[str, Tensor]]:
        """The same batches in the same order, read ahead by other processes. `state_dict` counts those handed out."""
        workers = as_processes("workers", workers, 0)
        if not workers and not pin_memory:
            yield from self
            return
        end = self._end()
        self.files.check(range(len(self.files.manifest.shards)))  # once, and not in every worker
        batches = DataLoader(self, batch_size=None, num_workers=workers, pin_memory=as_bool("pin_memory", pin_memory))
        for batch in batches:
            if workers:  # the processes have their own copies of the position
                self._advance(self.position + len(batch[ROW]), end)
            yield batch
        self.position = end or self.position

    def set_epoch(self, epoch: int) -> None:
        """Mutates: continue at the beginning of an epoch, counted from 0."""
        self.position = as_int("epoch", epoch, 0) * self.order.count

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and what the order depends on. Plain values, for JSON or torch.save."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Mutates: continue from a saved position, with the same rows whatever the batch size. BadRequest for another order."""
        if not isinstance(state, dict) or set(state) != {"position", *self._identity()}:
            raise BadRequest(f"state={short_repr(state)} was not made by a feed's state_dict.")
        if wrong := [name for name, value in self._identity().items() if state[name] != value]:
            shows = "; ".join(f"{name} {short_repr(state[name])}, here {short_repr(self._identity()[name])}" for name in wrong)
            raise BadRequest(f"The state belongs to a feed with another order of rows: {shows}. Make the feed as it was.")
        self.position = as_int("position", state["position"], 0)

    # ---- internals ----------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        rows = "all" if self.chosen is None else hashlib.sha256(self.chosen.astype("<i8").tobytes()).hexdigest()
        return {"seed": self.order.seed, "shuffle": self.order.shuffle, "digest": self._digest, "rows": rows}

    def _end(self) -> int | None:
        """The position at which this iteration ends; None: never."""
        if self.epochs is None:
            return None
        size = self.epochs * self.order.count
        return (self.position // size + 1) * size

    def _cuts(self, end: int | None) -> Iterator[tuple[int, int]]:
        """Positions [first, last) of each batch from here on."""
        first = self.position
        while end is None or first < end:
            last = first + self.batch_size if end is None else min(end, first + self.batch_size)
            if self.drop_last and last - first < self.batch_size:
                return
            yield first, last
            first = last

    @property
    def _read_rows(self) -> int:
        """Rows to read in one go. Rows of a remote dump in blocks: about a pool, whose blocks are then fetched once."""
        if self.order.shuffle == "blocks" and not self.files.store.local:
            return BLOCK_ROWS * POOL_BLOCKS
        return max(1, _READ_BYTES // sum(self.files.manifest.sites[name].row_bytes for name, _ in self.sites.values()))

    def _read(self, cuts: list[tuple[int, int]], end: int | None) -> Iterator[dict[str, Tensor]]:
        """Read several batches together, and give them one by one."""
        if not cuts:
            return
        numbers = np.concatenate([self.order.rows(first, last) for first, last in cuts])
        located = Located.of(self._starts, numbers if self.chosen is None else self.chosen[numbers])
        sizes = [last - first for first, last in cuts]
        read = {key: gather(self.files, *where, located).split(sizes) for key, where in self.sites.items()}
        rows = torch.from_numpy(numbers).split(sizes)
        for at, (_, last) in enumerate(cuts):
            self._advance(last, end)
            yield {ROW: rows[at], **{key: pieces[at] for key, pieces in read.items()}}

    def _advance(self, position: int, end: int | None) -> None:
        """Mutates: before a batch is handed out, so that the state says where the next one begins. A dropped rest is passed."""
        dropped = self.drop_last and end is not None and end - position < self.batch_size
        self.position = end if dropped and end is not None else position


# ---- export ----------------------------------------------------------------------------------------------------------
# A dump as a Hugging Face `Dataset`: index columns and activations, over the mapped files where Arrow knows the dtype.


def to_dataset(files: DumpFiles, sites: dict[str, tuple[str, int | None]], chosen: np.ndarray | None) -> "Dataset":
    """The index columns of the chosen rows (None: all), and one column per site. Raises MissingPackage."""
    try:
        from datasets import Dataset
    except ImportError:
        raise MissingPackage("`to_dataset` needs the package datasets. Install it with: pip install datasets") from None
    table = arrow_table(files, sites, chosen)
    rows = "" if chosen is None else hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()
    name = hashlib.sha256(repr((files.manifest.digest, sorted(sites.items()), rows)).encode()).hexdigest()[:16]
    return Dataset(table, fingerprint=name)  # without one, datasets would hash all activations to make one


def arrow_table(files: DumpFiles, sites: dict[str, tuple[str, int | None]], chosen: np.ndarray | None) -> pa.Table:
    """One chunk per shard; a row of a site is a list of fixed length, nested if it has several dimensions."""
    lines = pa.concat_tables([files.lines(number, files.columns) for number in range(len(files.manifest.shards))])
    if chosen is not None:
        lines = lines.take(pa.array(chosen))
    for key, (name, entry) in sites.items():
        lines = lines.append_column(key, pa.chunked_array(_chunks(files, name, entry, chosen)))
    return lines


def _chunks(files: DumpFiles, name: str, entry: int | None, chosen: np.ndarray | None) -> list[Any]:
    if chosen is None and files.store.local:
        return [_arrow(x) for x in SiteArray(files, name, entry, None).pieces()]
    numbers = np.arange(files.manifest.rows) if chosen is None else chosen
    return [_arrow(gather(files, name, entry, Located.of(shard_starts(files), numbers)))]


def _arrow(x: Tensor) -> Any:
    """Without a copy, but for bfloat16, which Arrow lacks: it becomes float32 without loss."""
    x = x.float() if x.dtype is torch.bfloat16 else x
    values: Any = pa.array(x.contiguous().numpy().reshape(-1))
    for length in reversed(x.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values
