"""`Feed`: a dump's rows in shuffled batches, for training. The order is a function of the seed alone; it can be resumed.

feed = dump.feed([("S", 2), ("C", 1)], batch_size=4096, seed=0)
for batch in feed:  # one epoch
    x = batch["blocks.2.hook_in"]  # [4096, d_model]
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from replaylens.engine.dump.array import Located, gather, shard_starts
from replaylens.engine.dump.files import DumpFiles
from replaylens.engine.dump.order import BLOCK_ROWS, POOL_BLOCKS, RowOrder
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import flag, shown, whole

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
        self.batch_size = whole("batch_size", batch_size, 1)
        self.epochs = None if epochs is None else whole("epochs", epochs, 1)
        self.drop_last = flag("drop_last", drop_last)
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
            raise BadRequest(f"Invalid site={shown(site)}. Give one of {', '.join(self.sites)}.")
        return (batch[key] for batch in self)

    def loader(self, workers: int = 0, pin_memory: bool = False) -> Iterator[dict[str, Tensor]]:
        """The same batches in the same order, read ahead by other processes. `state_dict` counts those handed out."""
        workers = whole("workers", workers, 0)
        if not workers and not pin_memory:
            yield from self
            return
        end = self._end()
        self.files.check(range(len(self.files.manifest.shards)))  # once, and not in every worker
        batches = DataLoader(self, batch_size=None, num_workers=workers, pin_memory=flag("pin_memory", pin_memory))
        for batch in batches:
            if workers:  # the processes have their own copies of the position
                self._advance(self.position + len(batch[ROW]), end)
            yield batch
        self.position = end or self.position

    def set_epoch(self, epoch: int) -> None:
        """Mutates: continue at the beginning of an epoch, counted from 0."""
        self.position = whole("epoch", epoch, 0) * self.order.count

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and what the order depends on. Plain values, for JSON or torch.save."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Mutates: continue from a saved position, with the same rows whatever the batch size. BadRequest for another order."""
        if not isinstance(state, dict) or set(state) != {"position", *self._identity()}:
            raise BadRequest(f"state={shown(state)} was not made by a feed's state_dict.")
        if wrong := [name for name, value in self._identity().items() if state[name] != value]:
            shows = "; ".join(f"{name} {shown(state[name])}, here {shown(self._identity()[name])}" for name in wrong)
            raise BadRequest(f"The state belongs to a feed with another order of rows: {shows}. Make the feed as it was.")
        self.position = whole("position", state["position"], 0)

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
