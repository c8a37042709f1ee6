"""`ThinkingBlocks`: the thinking block T and the compression block C in canonical arithmetic, on the backbone's device.

Both are single blocks over a few rows, with a cache of their own that lasts for one thought. Their products have the shapes
of the backbone's blocks, so its certificate covers them. The thoughts of many chunks are decoded together, and no chunk's bits
depend on the others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model import modes
from replaylens.engine.passes import lens
from replaylens.engine.passes.batch import Batch, Segment, finite
from replaylens.engine.passes.runner import Runner
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.serving.lock import EngineLock, reading
from replaylens.thinking.model import (
    COMPRESS_SITE,
    THINK_SITE,
    ChunkStates,
    ThinkingDecoder,
    ThoughtSteps,
    all_ended,
    applied,
    edited,
    ended,
    largest,
)
from replaylens.thinking.thoughts import TOP_K, Thought

if TYPE_CHECKING:
    from replaylens.thinking.graphs import ThoughtGraph

Tokens = tuple[int, ...]
TOGETHER = 128
"""chunks that are decoded together; changes no bit"""
MAX_KNOWN = 4096
"""compressed thoughts that are cached: C depends on the thought alone"""
AHEAD = 4
"""steps that a device decodes before the host looks whether all thoughts have ended; changes no bit"""


class ThinkingBlocks:
    """T and C of one model. Changes nothing outside its own cache."""

    def __init__(self, model: ThinkingDecoder, runner: Runner, lock: EngineLock) -> None:
        self.model, self.config, self.runner, self.lock = model, model.thinking, runner, lock
        if not model.config.tied_embeddings:  # the certificate covers only tables with the memory layout of the backbone's
            model.think_unembed.data = model.think_unembed.data.t().contiguous().t()
        self.pool = PagePool(TOGETHER + 1, self.config.chunk + self.config.compressed)
        one_layer = replace(model.config, num_layers=1, windows=model.config.windows[:1], rotary_layers=(), weights_of=())
        self.cache = KVCache(one_layer, self.pool, model.backbone.embed.dtype, runner.device)
        self._known: dict[Tokens, Tensor] = {}
        self._spare = PageTable()
        """with a page that padding rows of graphs may write to, once there is a graph"""
        self._decoded: Counter[int] = Counter()
        self._graphs: dict[int, ThoughtGraph] = {}

    # ---- T ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def think(self, chunks: Sequence[ChunkStates], read: bool = False, full: bool = False) -> list[Thought]:
        """The greedy thought of every chunk. `read` reads their distributions now, not on demand; `full` keeps whole ones."""
        with modes.canonical():
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
        steered = any(edit.site == THINK_SITE for chunk in chunks for edit in chunk.edits)
        try:
            tokens, rows = (self._decode if steered or self.runner.device == "cpu" else self._decode_ahead)(chunks, tables)
        finally:
            for table in tables:
                self.pool.release(table)
        eos = self.config.eos_token  # a thought that reaches the limit is cut off with it
        said = [tuple(words) if words[-1] == eos else (*words, eos) for words in tokens]
        self._learn(said)
        return [self._thought(*each, full) for each in zip(chunks, said, rows, strict=True)]

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
            for n, token in zip(open_, largest(self._logits(rows[-1])).tolist(), strict=True):
                tokens[n].append(token)
            open_ = [n for n in open_ if tokens[n][-1] != config.eos_token]
            if not open_:
                break
            words = torch.tensor([tokens[n][-1] for n in open_], device=self.runner.device)
            x = self.model.thought_embedding(words, torch.full_like(words, step))
        together, of = torch.cat(rows).cpu(), torch.tensor(owners)  # one copy from the device for all steps
        return tokens, [together[of == n] for n in range(len(chunks))]

    def _decode_ahead(self, chunks: Sequence[ChunkStates], tables: list[PageTable]) -> tuple[list[list[int]], list[Tensor]]:
        """As `_decode`, for a device that would wait for the host after every token. All chunks take all steps, `AHEAD` of them
        without a look at the tokens; what comes after <EOS> is dropped. Precondition: no edits of T."""
        config, eos, count = self.config, self.config.eos_token, len(chunks)
        rows, graph = torch.cat([chunk.hidden for chunk in chunks]), self._graph(count)
        segments = [self._segment(table, 0, config.chunk) for table in tables]
        if graph is not None:
            graph.begin([table.pages[0] for table in tables], rows)
            for taken in range(1, config.max_thought - 1):
                if taken % AHEAD == 1 % AHEAD and all_ended(graph.steps.said[:taken, :count], eos):
                    return ended(graph.steps.cut(taken, count), eos)
                graph.take()
            return ended(graph.steps.cut(config.max_thought - 1, count), eos)
        steps = [self._step(segments, rows)]
        for taken in range(1, config.max_thought - 1):
            if taken % AHEAD == 1 % AHEAD and all_ended(torch.stack([said for said, *_ in steps]), eos):
                break
            words, start = steps[-1][0], config.chunk + taken - 1
            x = self.model.thought_embedding(words, torch.full_like(words, taken - 1))
            steps.append(self._step([self._segment(table, start, 1) for table in tables], x))
        return ended(ThoughtSteps(*map(torch.stack, zip(*steps, strict=True))), eos)

    def _step(self, segments: list[Segment], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A step of T over new rows x [rows, d_model], which stays on the device: a step of `ThoughtSteps`."""
        rows = self._last_rows(segments, x)
        logits = self._raw_logits(rows)
        return largest(logits), rows, torch.isfinite(logits).all(-1) & torch.isfinite(rows).all(-1)

    def _graph(self, count: int) -> "ThoughtGraph | None":
        """The graph for so many thoughts, captured once their number has occurred often enough; None: launch the kernels."""
        if self.runner.device == "cpu":
            return None
        from replaylens.thinking import graphs  # its kernels need triton, which a CPU machine may lack

        size = next(size for size in graphs.SIZES if size >= count)
        self._decoded[size] += 1
        if size not in self._graphs and self._decoded[size] >= graphs.WORTH:
            self.pool.reserve(self._spare, 0, 1)
            self._graphs[size] = graphs.ThoughtGraph(self.model, self.cache, size, self._spare.pages[0])
        return self._graphs.get(size)

    def _edited(self, rows: Tensor, chunks: Sequence[ChunkStates], step: int) -> Tensor:
        """T's rows [chunks, d_model] of one step under the chunks' edits, which are applied on the CPU."""
        if not any(edit.site == THINK_SITE for chunk in chunks for edit in chunk.edits):
            return rows
        room = self.config.max_thought
        changed = [edited(row, chunk, step, room) for row, chunk in zip(rows.cpu(), chunks, strict=True)]
        return torch.stack(changed).to(rows.device)

    def _thought(self, chunk: ChunkStates, said: Tokens, rows: Tensor, full: bool) -> Thought:
        """The record of one thought, with its state."""
        compressed = self.compressed(said, chunk.number, chunk.edits)
        return Thought(said, rows, partial(self._distribution, full), compressed, self.state(compressed))

    @reading
    @torch.inference_mode()
    def _distribution(self, full: bool, rows: Tensor) -> Rows:
        """The distribution that each step was chosen from, by T's rows [steps, d_model], stored like Z. Row by row these are
        the logits of `_decode`, to the bit; they are computed again because most are never read and all are large."""
        with modes.canonical():
            logits = self._logits(rows).cpu()
            spec = LensSpec((), top_k=TOP_K, full=full)
            read = lens.statistics(spec, lens.log_softmax(logits)[:, None], [0] * len(logits))
        kept = ("entropy", "top_ids", "top_logprobs", "full")
        return {f"thinking.{name}": read[f"Z.{name}"][:, 0] for name in kept if f"Z.{name}" in read}

    # ---- C ------------------------------------------------------------------------------------------------------

    def check(self, thought: Sequence[int]) -> Tokens:
        """A given thought, with its <EOS>; BadRequest if T could not have decoded it."""
        said, eos = tuple(thought), self.config.eos_token
        known = all(type(t) is int and 0 <= t < self.model.config.vocab_size for t in said)
        if not said or not known or said[-1] != eos or eos in said[:-1]:
            raise BadRequest(
                f"Invalid thought {said}. Give token ids of the vocabulary with a single <EOS>, {eos}, at the end."
            )
        if len(said) > self.config.max_thought:
            raise BadRequest(f"A thought has {len(said)} tokens with <EOS>, but max_thought is {self.config.max_thought}.")
        return said

    def compressed(self, thought: Tokens, chunk: int = 0, edits: Sequence[PlacedEdit] = ()) -> Tensor:
        """C over a thought, padded to c tokens: [rows, d_model]; no rows for an empty thought."""
        if len(thought) == 1:
            return torch.empty(0, self.model.config.d_model, dtype=self.model.backbone.embed.dtype)
        self._learn([thought])
        rows, mine = self._known[thought], [edit for edit in edits if edit.site == COMPRESS_SITE]
        if mine:
            with modes.canonical():
                for edit in mine:
                    rows = applied(edit, rows, chunk * self.config.compressed)
        return rows

    def state(self, compressed: Tensor) -> Tensor:
        """The state S: the last c rows of C's output; exactly zero for an empty thought. [c, d_model]"""
        if not len(compressed):
            return compressed.new_zeros(self.config.chunk, compressed.shape[1])
        return compressed[-self.config.chunk :]

    def forget(self) -> None:
        """Mutates the cache: drop all compressed thoughts. Costs time, changes no bit."""
        self._known.clear()

    @torch.inference_mode()
    def _learn(self, thoughts: Sequence[Tokens]) -> None:
        """Mutates the cache: compress the thoughts that are not known yet, in one pass."""
        new = [thought for thought in dict.fromkeys(thoughts) if len(thought) > 1 and thought not in self._known]
        if len(self._known) + len(new) > MAX_KNOWN:
            self._known.clear()
            new = [thought for thought in dict.fromkeys(thoughts) if len(thought) > 1]
        if new:
            self._known |= dict(zip(new, self._compress(new), strict=True))

    def _compress(self, thoughts: Sequence[Tokens]) -> list[Tensor]:
        """C over each thought, at most `TOGETHER` of them, padded to c tokens: [rows, d_model], on the CPU."""
        filled = [[*thought, *[self.config.eos_token] * (self.config.chunk - len(thought))] for thought in thoughts]
        tables = [PageTable() for _ in filled]
        try:
            for table, tokens in zip(tables, filled, strict=True):
                self.cache.copy(self.pool.reserve(table, 0, len(tokens)))
            batch = self._batch([Segment(table, 0, tokens) for table, tokens in zip(tables, filled, strict=True)])
            with modes.canonical():
                out = self.model.run_compress(batch.tokens, batch.positions, self.runner.ops(batch, self.cache))
        finally:
            for table in tables:
                self.pool.release(table)
        sizes = [len(tokens) for tokens in filled]
        return [rows.clone() for rows in finite(out[: sum(sizes)], "thoughts").cpu().split(sizes)]

    # ---- passes -------------------------------------------------------------------------------------------------

    def _segment(self, table: PageTable, start: int, rows: int) -> Segment:
        self.cache.copy(self.pool.reserve(table, start, start + rows))
        return Segment(table, start, [0] * rows)  # T reads states instead of tokens

    def _pass(self, segments: list[Segment], x: Tensor) -> Tensor:
        """`_last_rows`, checked."""
        return finite(self._last_rows(segments, x), "thoughts")

    def _last_rows(self, segments: list[Segment], x: Tensor) -> Tensor:
        """T over new rows x [rows, d_model]: the last row of each segment."""
        batch = self._batch(segments)
        out = self.model.run_think(x.to(self.runner.device), batch.positions, self.runner.ops(batch, self.cache))
        return out[[end - 1 for end in batch.offsets[1:]]]

    def _logits(self, rows: Tensor) -> Tensor:
        """`_raw_logits`, checked."""
        return finite(self._raw_logits(rows), "thoughts")

    def _raw_logits(self, rows: Tensor) -> Tensor:
        """The logits [rows, vocab] of T's output rows [rows, d_model]."""
        return self.model.thought_logits(rows.to(self.runner.device), self.runner.head_ops())

    def _batch(self, segments: list[Segment]) -> Batch:
        return Batch(segments, self.pool, self.runner.device)
