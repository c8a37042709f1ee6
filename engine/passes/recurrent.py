"""Recurrent layers on a CPU: what a pass keeps of them in the cache, and edits of their states."""

import ctypes
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.layers import Conv
from replaylens.engine.model.ops import Recurrence
from replaylens.engine.model.sites import STATE
from replaylens.engine.passes.batch import TOLD, Batch, Segment, finite, not_finite
from replaylens.engine.request.placed import PlacedEdit
from replaylens.kernels.cpu_recurrent import LayerMemory, Piece, keep, recur, recur_table, require_pages, short_conv
from replaylens.kernels.definition import CHUNK


class MixedRows:
    """Where the rows of a pass have their part of the recurrent layers' memory, the same in all layers."""

    def __init__(self, batch: Batch, cache: KVCache, told: Tensor | None = None) -> None:
        """told  [1] int64, zero: where kernels say what is not finite, as `TOLD` counts"""
        self.told = torch.zeros(1, dtype=torch.int64) if told is None else told
        self.slots, pages = cache.entry_slots(batch.write_slots), batch.paged.pages
        self.rows = replace(batch.paged, pages=cache.entry_of[pages].long())
        self.ends = cache.state_of[pages].long()
        """rooms of the sequences' states: [sequences, pages]"""
        require_pages(cache.entries[0], self.rows.pages, self.rows.page_size)
        require_pages(cache.states[0], self.ends, 1)
        starts = np.array([segment.start for segment in batch.segments])
        counts, nothing = np.diff(batch.offsets), np.zeros_like(starts)
        since = starts - starts % CHUNK
        pieces = np.arange(len(starts)), np.array(batch.offsets[:-1]), starts, counts, since, nothing, nothing
        self.pieces = torch.from_numpy(np.stack(pieces, axis=1))
        """a `Piece` of each segment without edits of its state: [sequences, 7]"""

    @property
    def inputs(self) -> list[Tensor]:
        """What differs between passes of one shape."""
        return [self.slots, self.rows.pages, self.ends, self.pieces]

    def require_finite(self) -> None:
        if told := ctypes.c_int64.from_address(self.told.data_ptr()).value:  # a tenth of int(told)
            raise not_finite(TOLD[told])


def convolve(x: Tensor, conv: Conv, layer: int, cache: KVCache, mixed: MixedRows) -> Tensor:
    """x [rows, channels], convolved with what comes before each row. Mutates the cache at the rows of the batch."""
    entries = cache.entries[cache.mixed[layer]]
    keep(x if x.stride(-1) == 1 else x.contiguous(), entries, mixed.slots, 0, mixed.told, TOLD.index("inputs of a convolution"))
    mixed.require_finite()
    return short_conv(entries, conv.weight, conv.bias, mixed.rows)


class Walk:
    """The rows of a pass through one recurrent layer. Edits of states cut a sequence into pieces: later rows begin with the
    edited state, which later passes compute again from the pages."""

    def __init__(self, given: Recurrence, layer: int, batch: Batch, cache: KVCache, mixed: MixedRows) -> None:
        """Mutates the cache at the rows of the batch."""
        mixer, entries = cache.mixer, cache.entries[cache.mixed[layer]]
        assert mixer is not None  # the layer recurs
        inputs, keys, updates, _ = mixer.columns
        keep(given.k.flatten(1), entries, mixed.slots, inputs, mixed.told, TOLD.index("keys"))
        keep(given.decay.contiguous(), entries, mixed.slots, updates, mixed.told, TOLD.index("decays"))
        mixed.require_finite()
        self.memory = LayerMemory(entries, cache.states[cache.mixed[layer]], (inputs, keys, updates), mixer.key_heads)
        self.batch, site = batch, f"blocks.{layer}.{STATE}"
        self.state_of, self.tables = cache.state_of, (mixed.rows.pages, mixed.ends)
        self.given = (
            given.q.contiguous(),
            given.v.contiguous(),
            None if given.strength is None else given.strength.contiguous(),
        )
        self.begun: list[tuple[int, Piece]] = []
        """(segment, piece with rows of it)"""
        self.edited: dict[int, Tensor] = {}
        """packed row -> the state that an edit left after it"""
        touched = lambda s, edit: edit.site == site and edit.touches(s.start - s.start % CHUNK, s.end)  # noqa: E731
        plain = [i for i, s in enumerate(batch.segments) if not any(touched(s, edit) for edit in s.edits)]
        pieces = [self._piece(i, batch.segments[i].start, batch.segments[i].end) for i in plain]
        if len(plain) == len(batch.segments):
            size, rows = batch.pool.page_size, batch.num_rows
            self.out = recur_table(*self.given, self.memory, mixed.pieces, rows, *self.tables, size, mixed.told)
            mixed.require_finite()
            return
        self.out = torch.empty(given.v.shape, dtype=torch.float32)
        self._run(pieces)
        for i in range(len(batch.segments)):
            if i not in plain:
                self._walk(i, batch.segments[i], [edit for edit in batch.segments[i].edits if edit.site == site])
        if rooms := self._ended():  # that no row has read an infinite part of a state yet does not make it finite
            finite(self.memory.states[rooms], "recurrent states")

    def _ended(self) -> list[int]:
        """The rooms with the states at the ends of the chunks that the pass completes."""
        size, found = self.batch.pool.page_size, []
        for segment in self.batch.segments:
            ends = range(segment.start - segment.start % CHUNK + CHUNK, segment.end + 1, CHUNK)
            found += [int(self.state_of[segment.table.pages[(end - 1) // size]]) for end in ends]
        return found

    def _piece(self, segment: int, start: int, end: int, since: int | None = None, initial: Tensor | None = None) -> Piece:
        row = self.batch.offsets[segment] + start - self.batch.segments[segment].start
        piece = Piece(segment, row, start, end - start, start - start % CHUNK if since is None else since, initial)
        self.begun += [(segment, piece)] if end > start else []
        return piece

    def _run(self, pieces: list[Piece]) -> None:
        """Mutates the outputs and the memory."""
        if not pieces:
            return
        found = recur(*self.given, self.memory, pieces, *self.tables, self.batch.pool.page_size)
        if found is None:
            raise not_finite("updates of a recurrent state")
        for piece in pieces:
            own = slice(piece.row, piece.row + piece.count)
            self.out[own] = finite(found[own], "recurrent states")

    def _walk(self, index: int, segment: Segment, edits: list[PlacedEdit]) -> None:
        """A sequence with edited states, from one of them to the next. Those before its first row are made again."""
        since, at, initial = segment.start - segment.start % CHUNK, segment.start, None
        for place in sorted({p for edit in edits for p in edit.positions(since, segment.end)}):
            after = torch.empty(1, *self.memory.states.shape[1:], dtype=torch.float32)
            piece = self._piece(index, min(at, place + 1), place + 1, since, initial)
            self._run([replace(piece, final=after[0])])
            for edit in edits:
                after = edit.apply(after, [place]) if edit.positions(place, place + 1) else after
            at, since, initial = max(at, place + 1), place + 1, finite(after, "recurrent states")[0].contiguous()
            if place >= segment.start:
                self.edited[self.batch.row(index, place)] = initial
            if (place + 1) % CHUNK == 0:
                room = int(self.state_of[segment.table.pages[place // self.batch.pool.page_size]])
                self.memory.states[room], initial = initial, None
        if at < segment.end:
            self._run([self._piece(index, at, segment.end, since, initial)])

    def states(self) -> Tensor:
        """The state after every row: [rows, heads, d_key, d_value]"""
        out = torch.empty(len(self.out), *self.memory.states.shape[1:], dtype=torch.float32)
        asked = []
        for segment, piece in self.begun:
            for i in range(piece.count):
                end = piece.start + i + 1
                chunk = end - 1 - (end - 1) % CHUNK
                since, initial = (piece.since, piece.initial) if piece.since >= chunk else (chunk, None)
                asked.append(Piece(segment, 0, end, 0, since, initial, out[piece.row + i]))
        recur(*self.given, self.memory, asked, *self.tables, self.batch.pool.page_size)
        for row, state in self.edited.items():
            out[row] = state
        return finite(out, "recurrent states")
