"""`ThoughtGraph`: a decode step of T as a CUDA graph. T is one block: launching its kernels takes longer than running them.

Tokens, positions and results stay on the device, so steps follow each other without the host. Padding rows write to a spare
page. Every kernel gives a row the same bits at any number of rows, so replayed and launched steps agree.

Imports kernels, which need triton: import this file only where a CUDA device computes.
"""

import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.passes.cuda import CanonicalCudaOps, HeadOps
from replaylens.engine.thinking.model import ThinkingDecoder
from replaylens.engine.thinking.steps import largest
from replaylens.kernels import launch
from replaylens.kernels.attention import PagedRows

SIZES = (16, 32, 64, 128)
"""possible numbers of rows of a graph: thoughts that are decoded together"""
WORTH = 8
"""number of decodings after which a size gets a graph"""


class ThoughtGraph:
    """One captured step over `rows` thoughts, each with a page of its own. Buffers are valid until the next `begin`."""

    def __init__(self, model: ThinkingDecoder, cache: KVCache, rows: int, spare: int) -> None:
        self.model, self.spare = model, spare
        steps, embed = model.thinking.max_thought, model.backbone.embed
        zeros = lambda *size, dtype=torch.int64: torch.zeros(size, dtype=dtype, device=embed.device)  # noqa: E731
        self.tokens, self.places, self.positions, self.step = zeros(rows), zeros(rows), zeros(rows), zeros(1)
        self.short_positions = zeros(rows, dtype=torch.int32)
        self.pages = torch.full((rows, 1), spare, dtype=torch.int32, device=embed.device)
        self.said, self.fine = zeros(steps, rows), zeros(steps, rows, dtype=torch.bool)
        """by step: the tokens, and whether the row and its logits are finite"""
        self.hidden = zeros(steps, rows, embed.shape[1], dtype=embed.dtype)
        sequence = torch.arange(rows, dtype=torch.int32, device=embed.device)
        self.ops, self.head = CanonicalCudaOps(cache, PagedRows(sequence, self.short_positions, self.pages)), HeadOps()
        self.graph = torch.cuda.CUDAGraph()
        self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with launch.in_graph():
            with torch.cuda.stream(stream):
                self._take()  # compiles the kernels; writes go to the spare page
            stream.synchronize()
            # thread_local: other threads wait for captured rows meanwhile, which a global capture would take for an error
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._take()

    def _take(self) -> None:
        x = self.model.thought_embedding(self.tokens, self.places)
        out = self.model.run_think(x, self.positions, self.ops)
        logits = self.model.thought_logits(out, self.head)
        found = largest(logits)
        fine = torch.isfinite(logits).all(-1) & torch.isfinite(out).all(-1)
        for buffer, value in ((self.said, found), (self.hidden, out), (self.fine, fine)):
            buffer.index_copy_(0, self.step, value[None])
        self.tokens.copy_(found)
        for counter in (self.places, self.positions, self.short_positions, self.step):
            counter.add_(1)

    def begin(self, pages: list[int], first: Tensor, position: int) -> None:
        """Mutates the buffers: the first words [thoughts] of thoughts in these pages, to be read at `position`."""
        count = len(pages)
        self.pages.fill_(self.spare)
        self.pages[:count, 0].copy_(torch.tensor(pages, dtype=torch.int32))
        self.tokens.zero_()
        self.tokens[:count].copy_(first)
        for counter in (self.places, self.step):
            counter.zero_()
        for counter in (self.positions, self.short_positions):
            counter.fill_(position)

    def take(self) -> None:
        """Mutates the buffers: the next step of all thoughts."""
        self.graph.replay()
