"""`ThinkingBlocks`: the thinking block T and the compression block C in canonical arithmetic, on the backbone's device.

Both are single blocks over a few rows, with a cache of their own that lasts for one thought. Their products have the shapes
of the backbone's blocks, so its certificate covers them. The thoughts of many chunks are decoded together, and no chunk's bits
depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.errors import BadThought
from replaylens.engine.lens import readout
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.finite import finite
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import LensSpec, Rows
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.serving.lock import EngineLock, reading
from replaylens.engine.thinking.model import COMPRESS_SITE, THINK_SITE, ThinkingDecoder
from replaylens.engine.thinking.thoughts import TOP_K, Thought

Tokens = tuple[int, ...]
TOGETHER = 128
"""chunks that are decoded together; changes no bit"""
MAX_KNOWN = 4096
"""compressed thoughts that are cached: C depends on the thought alone"""


@dataclass(frozen=True, eq=False)
class ChunkStates:
    """The rows of one chunk that T reads."""

    number: int
    hidden: Tensor
    """[c, d_model]"""
    edits: tuple[PlacedEdit, ...] = ()
    """on T and C, by chunk and step"""


class ThinkingBlocks:
    """T and C of one model. Changes nothing outside its own cache."""

    def __init__(self, model: ThinkingDecoder, runner: Runner, lock: EngineLock) -> None:
        self.model, self.config, self.runner, self.lock = model, model.thinking, runner, lock
        if not model.config.tied_embeddings:  # the certificate covers only tables with the memory layout of the backbone's
            model.think_unembed.data = model.think_unembed.data.t().contiguous().t()
        self.pool = PagePool(TOGETHER, self.config.chunk + self.config.compressed)
        one_layer = replace(model.config, num_layers=1, windows=model.config.windows[:1], rotary_layers=())
        self.cache = KVCache(one_layer, self.pool, model.backbone.embed.dtype, runner.device)
        self._known: dict[Tokens, Tensor] = {}

    # ---- T ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def think(self, chunks: Sequence[ChunkStates], read: bool = False, full: bool = False) -> list[Thought]:
        """The greedy thought of every chunk. `read` reads their distributions now, not on demand; `full` keeps whole ones."""
        with self.runner.canonical(min(len(chunks), TOGETHER) * self.config.chunk):
            found = [t for i in range(0, len(chunks), TOGETHER) for t in self._think(chunks[i : i + TOGETHER], full)]
            return self._read(found, full) if read else found

    def _read(self, thoughts: list[Thought], full: bool) -> list[Thought]:
        """The thoughts with their distributions, read together."""
        sizes = [len(thought.hidden) for thought in thoughts]
        rows = self._distribution(full, torch.cat([thought.hidden for thought in thoughts]))
        parts: list[Rows] = [{} for _ in thoughts]
        for site, values in rows.items():
            for part, own in zip(parts, values.split(sizes), strict=True):
                part[site] = own
        return [replace(thought, source=part) for thought, part in zip(thoughts, parts, strict=True)]

    def _think(self, chunks: Sequence[ChunkStates], full: bool) -> list[Thought]:
        tables = [PageTable() for _ in chunks]
        try:
            said = self._decode(chunks, tables)
        finally:
            for table in tables:
                self.pool.release(table)
        return [self._thought(*each, full) for each in zip(chunks, *said, strict=True)]

    def _decode(self, chunks: Sequence[ChunkStates], tables: list[PageTable]) -> tuple[list[list[int]], list[Tensor]]:
        """Tokens by chunk and step, and T's rows [steps, d_model] by chunk, on the CPU. Reserves pages in `tables`."""
        config = self.config
        tokens: list[list[int]] = [[] for _ in chunks]
        owners: list[int] = []
        rows: list[Tensor] = []
        open_ = list(range(len(chunks)))
        x = torch.cat([chunk.hidden for chunk in chunks])
        for step in range(config.max_thought - 1):
            start = 0 if step == 0 else config.chunk + step - 1
            segments = [self._segment(tables[i], start, config.chunk if step == 0 else 1) for i in open_]
            rows.append(self._edited(self._pass(segments, x), [chunks[n] for n in open_], step))
            owners += open_
            for n, token in zip(open_, _largest(self._logits(rows[-1])), strict=True):
                tokens[n].append(token)
            open_ = [n for n in open_ if tokens[n][-1] != config.eos_token]
            if not open_:
                break
            words = torch.tensor([tokens[n][-1] for n in open_], device=self.runner.device)
            x = self.model.thought_embedding(words, torch.full_like(words, step))
        together, of = torch.cat(rows).cpu(), torch.tensor(owners)  # one copy from the device for all steps
        return tokens, [together[of == n] for n in range(len(chunks))]

    def _edited(self, rows: Tensor, chunks: Sequence[ChunkStates], step: int) -> Tensor:
        """T's rows [chunks, d_model] of one step under the chunks' edits, which are applied on the CPU."""
        if not any(edit.site == THINK_SITE for chunk in chunks for edit in chunk.edits):
            return rows
        room = self.config.max_thought
        edited = [_edited(row, chunk, step, room) for row, chunk in zip(rows.cpu(), chunks, strict=True)]
        return torch.stack(edited).to(rows.device)

    def _thought(self, chunk: ChunkStates, tokens: list[int], rows: Tensor, full: bool) -> Thought:
        """The record of one thought, with its state. A thought that reaches the limit is cut off with <EOS>."""
        said = tuple(tokens) if tokens[-1] == self.config.eos_token else (*tokens, self.config.eos_token)
        compressed = self.compressed(said, chunk.number, chunk.edits)
        return Thought(said, rows, partial(self._distribution, full), compressed, self.state(compressed))

    @reading
    @torch.inference_mode()
    def _distribution(self, full: bool, rows: Tensor) -> Rows:
        """The distribution that each step was chosen from, by T's rows [steps, d_model], stored like Z. Row by row these are
        the logits of `_decode`, to the bit; they are computed again because most are never read and all are large."""
        with self.runner.canonical(len(rows)):
            logits = self._logits(rows).cpu()
            spec = LensSpec((), top_k=TOP_K, full=full)
            read = readout.statistics(spec, logits.log_softmax(-1)[:, None], [0] * len(logits))
        kept = ("entropy", "top_ids", "top_logprobs", "full")
        return {f"thinking.{name}": read[f"Z.{name}"][:, 0] for name in kept if f"Z.{name}" in read}

    # ---- C ------------------------------------------------------------------------------------------------------

    def check(self, thought: Sequence[int]) -> Tokens:
        """A given thought, with its <EOS>; BadThought if T could not have decoded it."""
        said, eos = tuple(thought), self.config.eos_token
        known = all(type(t) is int and 0 <= t < self.model.config.vocab_size for t in said)
        if not said or not known or said[-1] != eos or eos in said[:-1]:
            raise BadThought(
                f"Invalid thought {said}. Give token ids of the vocabulary with a single <EOS>, {eos}, at the end."
            )
        if len(said) > self.config.max_thought:
            raise BadThought(f"A thought has {len(said)} tokens with <EOS>, but max_thought is {self.config.max_thought}.")
        return said

    def compressed(self, thought: Tokens, chunk: int = 0, edits: Sequence[PlacedEdit] = ()) -> Tensor:
        """C over a thought, padded to c tokens: [rows, d_model]; no rows for an empty thought."""
        if len(thought) == 1:
            return torch.empty(0, self.model.config.d_model, dtype=self.model.backbone.embed.dtype)
        if thought not in self._known:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[thought] = self._compress(thought)
        rows, mine = self._known[thought], [edit for edit in edits if edit.site == COMPRESS_SITE]
        if mine:
            with self.runner.canonical(len(rows)):
                for edit in mine:
                    rows = _applied(edit, rows, chunk * self.config.compressed)
        return rows

    def state(self, compressed: Tensor) -> Tensor:
        """The state S: the last c rows of C's output; exactly zero for an empty thought. [c, d_model]"""
        if not len(compressed):
            return compressed.new_zeros(self.config.chunk, compressed.shape[1])
        return compressed[-self.config.chunk :]

    @torch.inference_mode()
    def _compress(self, thought: Tokens) -> Tensor:
        filled = [*thought, *[self.config.eos_token] * (self.config.chunk - len(thought))]
        table = PageTable()
        self.cache.copy(self.pool.reserve(table, 0, len(filled)))
        try:
            batch = self._batch([Segment(table, 0, filled)])
            with self.runner.canonical(batch.padded):
                out = self.model.run_compress(batch.tokens, batch.positions, self.runner.ops(batch, self.cache))
        finally:
            self.pool.release(table)
        return finite(out[: len(filled)], "thoughts").clone().cpu()

    # ---- passes -------------------------------------------------------------------------------------------------

    def _segment(self, table: PageTable, start: int, rows: int) -> Segment:
        self.cache.copy(self.pool.reserve(table, start, start + rows))
        return Segment(table, start, [0] * rows)  # T reads states instead of tokens

    def _pass(self, segments: list[Segment], x: Tensor) -> Tensor:
        """T over new rows x [rows, d_model]: the last row of each segment."""
        batch = self._batch(segments)
        out = self.model.run_think(self._padded(x, batch.padded), batch.positions, self.runner.ops(batch, self.cache))
        return finite(out[[end - 1 for end in batch.offsets[1:]]], "thoughts")

    def _logits(self, rows: Tensor) -> Tensor:
        """The logits [rows, vocab] of T's output rows [rows, d_model]."""
        tile = self.runner.tile
        padded = self._padded(rows, -(-len(rows) // tile) * tile)
        return finite(self.model.thought_logits(padded, self.runner.head_ops())[: len(rows)], "thoughts")

    def _padded(self, rows: Tensor, count: int) -> Tensor:
        padded = torch.zeros(count, rows.shape[1], dtype=rows.dtype, device=self.runner.device)
        padded[: len(rows)] = rows
        return padded

    def _batch(self, segments: list[Segment]) -> Batch:
        return Batch(segments, self.pool, self.runner.certificate.query_rows, self.runner.tile, self.runner.device)


def _largest(logits: Tensor) -> list[int]:
    """The likeliest token of each row [rows, vocab], the lowest id among equals."""
    if logits.device.type == "cpu":
        return [int(token) for token in logits.numpy().argmax(-1)]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1])
    return [int(token) for token in best.amin(-1).tolist()]


def _edited(row: Tensor, chunk: ChunkStates, step: int, room: int) -> Tensor:
    """One row of T [d_model] under the chunk's edits."""
    rows = row[None]
    for edit in (edit for edit in chunk.edits if edit.site == THINK_SITE):
        rows = _applied(edit, rows, chunk.number * room + step)
    return rows[0]


def _applied(edit: PlacedEdit, rows: Tensor, first: int) -> Tensor:
    """The edited rows [n, d_model], which are at places first, first + 1, ... of the edit's axis."""
    places = edit.positions(first, first + len(rows))
    if not places:
        return rows
    picks, out = [place - first for place in places], rows.clone()
    out[picks] = edit.apply(rows[picks], places)
    return out
