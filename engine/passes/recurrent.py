"""Recurrent layers on a CPU: what a pass keeps of them in the cache, and edits of their states."""

from dataclasses import replace

import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.layers import Conv
from replaylens.engine.model.ops import Recurrence
from replaylens.engine.model.sites import STATE
from replaylens.engine.passes.batch import Batch, Segment, finite, not_finite
from replaylens.engine.request.placed import PlacedEdit
from replaylens.kernels.cpu_recurrent import LayerMemory, Piece, recur, short_conv
from replaylens.kernels.definition import CHUNK


def convolve(x: Tensor, conv: Conv, layer: int, batch: Batch, cache: KVCache) -> Tensor:
    """x [rows, channels], convolved with what comes before each row. Mutates the cache at the rows of the batch."""
    entries = cache.entries[cache.mixed[layer]]
    entries[cache.entry_slots(batch.write_slots), : x.shape[1]] = finite(x, "inputs of a convolution")
    return short_conv(entries, conv.weight, conv.bias, replace(batch.paged, pages=cache.entry_of[batch.paged.pages].long()))


class Walk:
    """The rows of a pass through one recurrent layer. Edits of states cut a sequence into pieces: later rows begin with the
    edited state, which later passes compute again from the pages."""

    def __init__(self, given: Recurrence, layer: int, batch: Batch, cache: KVCache) -> None:
        """Mutates the cache at the rows of the batch."""
        mixer, slots, entries = cache.mixer, cache.entry_slots(batch.write_slots), cache.entries[cache.mixed[layer]]
        assert mixer is not None  # the layer recurs
        inputs, keys, updates, _ = mixer.columns
        entries[slots, inputs:keys] = finite(given.k, "keys").flatten(1)
        entries[slots, updates:] = finite(given.decay, "decays")
        self.memory = LayerMemory(entries, cache.states[cache.mixed[layer]], (inputs, keys, updates), mixer.key_heads)
        self.batch, site = batch, f"blocks.{layer}.{STATE}"
        self.state_of, pages = cache.state_of, batch.paged.pages
        self.tables = cache.entry_of[pages].long(), cache.state_of[pages].long()
        """rooms of the sequences' entries and states: [sequences, pages] each"""
        self.given = (
            given.q.contiguous(),
            given.v.contiguous(),
            None if given.strength is None else given.strength.contiguous(),
        )
        self.out = torch.empty(given.v.shape, dtype=torch.float32)
        self.begun: list[tuple[int, Piece]] = []
        """(segment, piece with rows of it)"""
        self.edited: dict[int, Tensor] = {}
        """packed row -> the state that an edit left after it"""
        plain = [i for i, segment in enumerate(batch.segments) if not any(edit.site == site for edit in segment.edits)]
        self._run([self._piece(i, batch.segments[i].start, batch.segments[i].end) for i in plain])
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
        if sum(piece.count for piece in pieces) == len(self.out):  # the usual case: no state is edited
            self.out = finite(found, "recurrent states")
            return
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
