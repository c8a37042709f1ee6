"""The same decoder as the library would run it: cuBLAS for every product, SDPA over a contiguous cache for attention.

A strict baseline. Norms, rotary and activation are our fused kernels, which are faster than torch's; attention is the fastest
of SDPA's backends at that shape; every pass and step is a CUDA graph of its own for its exact length, which no server could
keep. It promises nothing about bits.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import seconds
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, TorchOps

PAGE = 16
"""slots by which the kernels count; page 0 means none, so that the cache begins behind it"""
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""q [sequences, rows, heads, d_head], k and v [sequences, kv_heads, keys, d_head], scale -> like q"""


class ContiguousCache:
    """Keys and values, every sequence's in one piece: [layers, 2, slots, kv_heads, d_head]."""

    def __init__(self, config: ModelConfig, sequences: int, longest: int, like: Tensor) -> None:
        self.sequences, self.room = sequences, -(-longest // PAGE) * PAGE
        slots = PAGE + sequences * self.room
        self.data = like.new_zeros(config.num_layers, 2, slots, config.num_kv_heads, config.d_head)
        pages = 1 + torch.arange(sequences * self.room // PAGE, dtype=torch.int32, device=like.device)
        self.pages = pages.view(sequences, -1)

    def keys_and_values(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` positions of all sequences: twice [sequences, kv_heads, length, d_head]."""
        both = self.data[layer, :, PAGE:].unflatten(1, (self.sequences, self.room))[:, :, :length].transpose(2, 3)
        return both[0], both[1]


class LibraryOps:
    """One pass over `rows` new positions of every sequence, the last of which is position length - 1."""

    def __init__(self, cache: ContiguousCache, rows: int, length: int, attend: Attend) -> None:
        self.cache, self.num_rows, self.length, self._attend = cache, rows, length, attend
        count, device = cache.sequences, cache.data.device
        self.sequence = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(rows)
        self.positions = torch.arange(length - rows, length, device=device).repeat(count)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        assert not spec.softcap and not spec.window and observe is None, "the baseline is a plain Llama"
        q = self._store(heads, spec.layer).unflatten(0, (self.cache.sequences, self.num_rows))
        return self._attend(q, *self.cache.keys_and_values(spec.layer, self.length), spec.scale).flatten(0, 1)

    def _store(self, heads: Heads, layer: int) -> Tensor:
        """Turn queries and keys, keep keys and values; the turned queries."""
        raise NotImplementedError


class LibraryCpuOps(LibraryOps, TorchOps):
    """For the tests of this file."""

    def _store(self, heads: Heads, layer: int) -> Tensor:
        q, k, v = self.turned(heads)
        slots = PAGE + self.sequence.long() * self.cache.room + self.positions
        self.cache.data[layer, 0, slots], self.cache.data[layer, 1, slots] = k, v
        return q


def library_ops(cache: ContiguousCache, rows: int, length: int, attend: Attend) -> Any:
    """The ops for the cache's device."""
    if cache.data.device.type == "cpu":
        return LibraryCpuOps(cache, rows, length, attend)
    return library_cuda_ops()(cache, rows, length, attend)


@cache
def library_cuda_ops() -> Any:
    """The class of the library's products and attention beside our elementwise kernels; made here, since it needs triton."""
    from replaylens.engine.passes.cuda import FastHeadOps
    from replaylens.kernels.rope import rotate, rotate_and_store
    from replaylens.kernels.shared import PagedRows

    class LibraryCudaOps(LibraryOps, FastHeadOps):
        """One pass on the device."""

        def __init__(self, cache: ContiguousCache, rows: int, length: int, attend: Attend) -> None:
            super().__init__(cache, rows, length, attend)
            self.rows = PagedRows(self.sequence, self.positions.int(), cache.pages, max_keys=length)

        def unembed(self, x: Tensor, table: Tensor) -> Tensor:
            """In 16 bits: to choose a token, the library needs no more."""
            return x @ table.t()

        def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
            return rotate(x, rotary.table, self.rows)

        def _store(self, heads: Heads, layer: int) -> Tensor:
            assert heads.rotary is not None
            keys, values = self.cache.data[layer]
            table = heads.rotary.table
            return rotate_and_store(heads.q, heads.k, heads.v, table, self.rows, keys, values, page_size=PAGE)

    return LibraryCudaOps


class LibraryDecoder:
    """The decoder over its own contiguous cache, for a fixed number of sequences."""

    def __init__(self, model: Decoder, sequences: int, longest: int) -> None:
        self.model, self.device = model, model.embed.device.type
        self.cache = ContiguousCache(self.model.config, sequences, longest, self.model.embed)
        self.chosen: dict[str, str] = {}
        """which of SDPA's backends was the fastest, for a pass and for a step"""

    @torch.inference_mode()
    def prompt(self, tokens: Tensor) -> Callable[[], Tensor]:
        """A pass over prompts [sequences, length]: logits of the last tokens [sequences, vocab]."""
        length = tokens.shape[1]
        ops = library_ops(self.cache, length, length, self._fastest("prompt", length, length))
        last = torch.arange(length - 1, tokens.numel(), length, device=tokens.device)
        rows = tokens.flatten()
        return torch.inference_mode()(lambda: self._logits(rows, ops, last))

    @torch.inference_mode()
    def step(self, tokens: Tensor, length: int) -> Callable[[], Tensor]:
        """A decode step that puts tokens [sequences] at position length - 1; it chooses the next ones, too."""
        ops = library_ops(self.cache, 1, length, self._fastest("step", 1, length))
        chosen = torch.empty_like(tokens)

        def work() -> Tensor:
            logits = self._logits(tokens, ops)
            chosen.copy_(logits.argmax(-1))
            return logits

        return torch.inference_mode()(work)

    def _logits(self, tokens: Tensor, ops: Any, rows: Tensor | None = None) -> Tensor:
        residual = self.model(tokens, ops.positions, ops)
        return self.model.logits(residual if rows is None else residual[rows], ops)

    def _fastest(self, kind: str, rows: int, length: int) -> Attend:
        """Of the ways to ask SDPA for this attention, the one that takes least time here."""
        c, count = self.model.config, self.cache.sequences
        q = torch.randn(count, rows, c.num_heads, c.d_head, device=self.cache.data.device).to(self.cache.data.dtype)
        k, v = self.cache.keys_and_values(0, length)
        found: dict[str, tuple[float, Attend]] = {}
        for name, attend in ways(rows, self.device).items():
            try:
                work = graphed(lambda attend=attend: attend(q, k, v, c.scale), self.device)
            except RuntimeError:  # this backend does not do this shape
                continue
            found[name] = min(seconds(work, "wall")[0] for _ in range(5)), attend
        self.chosen[kind] = min(found, key=lambda name: found[name][0])
        return found[self.chosen[kind]][1]


def ways(rows: int, device: str) -> dict[str, Attend]:
    """How SDPA can be asked: the backends, with query heads grouped by it or, for one row, laid out as rows of their group."""
    backends = dict(
        flash=SDPBackend.FLASH_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION, efficient=SDPBackend.EFFICIENT_ATTENTION
    )  # fmt: skip
    within: dict[str, Any] = {name: partial(sdpa_kernel, backend) for name, backend in backends.items()}
    asked = within if device == "cuda" else {"any": nullcontext}
    found: dict[str, Attend] = {f"{name}, grouped": partial(_grouped, each) for name, each in asked.items()}
    if rows == 1:
        found |= {f"{name}, group as rows": partial(_as_rows, each) for name, each in asked.items()}
    return found


def _grouped(within: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    with within():
        causal = q.shape[1] > 1
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _as_rows(within: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    groups = q[:, 0].unflatten(1, (k.shape[1], -1))  # [sequences, kv_heads, group, d_head]: all see the same keys
    with within():
        out = F.scaled_dot_product_attention(groups, k, v, scale=scale)
    return out.flatten(1, 2)[:, None]


def graphed(work: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """The work as a CUDA graph; its result is overwritten by the next call. On a CPU the work itself."""
    if device == "cpu":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and finds its algorithms
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        result = work()

    def replay(held: Callable[[], Tensor]) -> Tensor:
        graph.replay()
        return result

    return partial(replay, work)  # the graph reads the work's tensors: they must live as long as it does
