"""`ThoughtGraph`: the steps of T as CUDA graphs. T is one block: launching its kernels takes longer than running them.

There are two: the first step reads a chunk's rows, the next ones read the word before. Words, positions and results stay on
the device, so steps follow each other without the host. Padding rows write to a spare page. Every kernel gives a row the same
bits at any number of rows, so replayed and launched steps agree.

Imports kernels, which need triton: import this file only where a CUDA device computes.
"""

import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.passes.cuda import CanonicalCudaOps, HeadOps
from replaylens.engine.passes.graphs import recorded
from replaylens.engine.passes.sharing import KeyLayout
from replaylens.kernels.shared import PagedRows, plan_tiles
from replaylens.thinking.model import ThinkingDecoder, ThoughtSteps, largest

SIZES = (8, 16, 32, 64, 128)
"""possible numbers of thoughts of a graph, which are decoded together"""
WORTH = 8
"""number of decodings after which a size gets its graphs"""


class ThoughtGraph:
    """Captured steps of `thoughts` thoughts, each with a page of its own. Buffers are valid until the next `begin`."""

    def __init__(self, model: ThinkingDecoder, cache: KVCache, thoughts: int, spare: int) -> None:
        """spare  a page that padding rows may write to; it belongs to the caller"""
        self.model, self.spare, self.head = model, spare, HeadOps()
        steps, c, embed = model.thinking.max_thought, model.thinking.chunk, model.backbone.embed
        zeros = lambda *size, dtype=torch.int64: torch.zeros(size, dtype=dtype, device=embed.device)  # noqa: E731
        self.tokens, self.places, self.positions, self.step = zeros(thoughts), zeros(thoughts), zeros(thoughts), zeros(1)
        self.short_positions = zeros(thoughts, dtype=torch.int32)
        self.pages = torch.full((thoughts, 1), spare, dtype=torch.int32, device=embed.device)
        self.read = zeros(thoughts * c, embed.shape[1], dtype=embed.dtype)
        """the chunks' rows: [thoughts c, d_model]"""
        self.read_positions = torch.arange(c, device=embed.device).repeat(thoughts)
        self.steps = ThoughtSteps(
            zeros(steps, thoughts), zeros(steps, thoughts, embed.shape[1], dtype=embed.dtype), zeros(steps, thoughts).bool()
        )
        sequence = torch.arange(thoughts, dtype=torch.int32, device=embed.device)
        self.first_ops = CanonicalCudaOps(cache, self._chunk_rows(cache, sequence, c))
        self.next_ops = CanonicalCudaOps(cache, PagedRows(sequence, self.short_positions, self.pages))
        self.first, self.next = (recorded(step, runs=1)[0] for step in (self._first, self._next))  # on the spare page

    def _chunk_rows(self, cache: KVCache, sequence: Tensor, c: int) -> PagedRows:
        """The rows of the first step: c of each thought."""
        sequences, per_tile = sequence.repeat_interleave(c), KeyLayout.of(cache).rows_per_tile(c)
        tiles = plan_tiles(sequences.tolist(), per_tile).to(sequence.device) if c > 1 else None
        positions = self.read_positions.to(torch.int32)
        return PagedRows(sequences, positions, self.pages, tiles, max_keys=c, per_tile=per_tile if tiles is not None else 0)

    def _first(self) -> None:
        """The first words, and the counters of the second step."""
        for counter in (self.places, self.step):
            counter.zero_()
        for counter in (self.positions, self.short_positions):
            counter.fill_(self.model.thinking.chunk)
        out = self.model.run_think(self.read, self.read_positions, self.first_ops)
        self._say(out[self.model.thinking.chunk - 1 :: self.model.thinking.chunk].contiguous())

    def _next(self) -> None:
        x = self.model.thought_embedding(self.tokens, self.places)
        out = self.model.run_think(x, self.positions, self.next_ops)
        for counter in (self.places, self.positions, self.short_positions):
            counter.add_(1)
        self._say(out)

    def _say(self, rows: Tensor) -> None:
        """The words of T's rows [thoughts, d_model], and the number of the next step."""
        logits = self.model.thought_logits(rows, self.head)
        self.tokens.copy_(largest(logits))
        fine = torch.isfinite(logits).all(-1) & torch.isfinite(rows).all(-1)
        for buffer, value in zip(self.steps, (self.tokens, rows, fine), strict=True):
            buffer.index_copy_(0, self.step, value[None])
        self.step.add_(1)

    def begin(self, pages: list[int], rows: Tensor) -> None:
        """Mutates the buffers: the first step over the rows [thoughts c, d_model] of chunks with these pages."""
        self.pages.copy_(torch.tensor([*pages, *[self.spare] * (len(self.pages) - len(pages))], dtype=torch.int32)[:, None])
        self.read[: len(rows)].copy_(rows)
        self.first.replay()

    def take(self) -> None:
        """Mutates the buffers: the next step of all thoughts."""
        self.next.replay()
