"""Canonical arithmetic on a CUDA device, from our kernels, and the fast path.

Every kernel gives a row the same bits at any number of rows and with any tile. Nothing is padded, and the decode step itself
is canonical. The fast path uses the library's products and splits the keys of attention by the number of rows: sums are split
differently at every size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import page_matrix
from replaylens.engine.model.config import Activation
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.model.torch_ops import weighted
from replaylens.engine.passes.batch import Batch
from replaylens.engine.passes.cuda_experts import ExpertOps
from replaylens.engine.passes.cut_pairs import cut_pairs
from replaylens.engine.passes.sharing import KeyLayout, Sharing, find_sharing
from replaylens.kernels.activation import activation
from replaylens.kernels.attention import attention
from replaylens.kernels.edges import cut_edges
from replaylens.kernels.heads import head_matmul, head_plan
from replaylens.kernels.matmul import matmul
from replaylens.kernels.norm import norm as norm_kernel
from replaylens.kernels.norm import norm_pair, norm_scale
from replaylens.kernels.norm_rope import can_fuse, norm_rotate_and_store
from replaylens.kernels.paged import PagedRows, plan_tiles
from replaylens.kernels.plan import Plan
from replaylens.kernels.rope import rotate, rotate_and_store, store
from replaylens.kernels.split import split_attention


class HeadOps(ExpertOps):
    """Row-wise ops: products, norms and activations, inside or outside a pass."""

    _by_head: tuple[torch.Size, Plan] | None = None
    """the last plan of products by head and the rows and heads it is for: all layers use it"""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return matmul(x, linear.weight, linear.bias)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        return matmul(x, table.t(), out_dtype=torch.float32)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return matmul(x, linear.weight, linear.bias, residual=residual)

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        return activation(matmul(x, linear.weight, linear.bias), kind, gated)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.by_head:
            return weighted(norm_kernel(x, _ones(x), None, norm.eps, norm.kind), norm)
        return norm_kernel(x, norm.weight, norm.bias, norm.eps, norm.kind)

    def norm_pair(self, q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm) -> tuple[Tensor, Tensor]:
        if q_norm.by_head or q_norm.bias is not None or not _neighbours(q, k):
            return self.norm(q, q_norm), self.norm(k, k_norm)
        heads = q.shape[1]
        both = q.as_strided((len(q), heads + k.shape[1], q.shape[2]), q.stride())
        out = norm_pair(both, heads, (q_norm.weight, k_norm.weight), q_norm.eps, q_norm.kind)
        return out[:, :heads], out[:, heads:]

    def norm_parts(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        plain = norm_kernel(x, _ones(x), None, norm.eps, norm.kind)  # times 1: the bits before the weights
        return norm_scale(x, norm.eps, norm.kind), plain

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        return activation(x, kind, gated)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs], each head times its own weight of [heads, inputs, outputs]: [rows, heads, outputs]"""
        known, shape = self._by_head, x.shape[:2]
        if known is None or known[0] != shape:
            known = self._by_head = shape, head_plan(shape[0], shape[1], x.dtype, x.device)
        return head_matmul(x, weight, known[1])


def _neighbours(q: Tensor, k: Tensor) -> bool:
    """Whether keys [rows, kv_heads, d_head] lie behind queries [rows, heads, d_head], as in one packed product."""
    one = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.stride() == k.stride()
    return one and k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1)


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)


class FastHeadOps(HeadOps):
    """The library's products, which may split a sum differently at every size."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return x @ linear.weight if linear.bias is None else torch.addmm(linear.bias, x, linear.weight)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return torch.addmm(residual, x, linear.weight) if linear.bias is None else residual + self.linear(x, linear)

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        return activation(self.linear(x, linear), kind, gated)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:  # rounded to bfloat16, close logits would be equal
            return torch.mm(x, table.t(), out_dtype=torch.float32)
        return (x @ table.t()).float()


class CanonicalCudaOps(HeadOps):
    """The arithmetic of committed rows."""

    def __init__(self, cache: KVCache, rows: PagedRows, cut_by: Batch | None = None) -> None:
        """cut_by  the batch of the rows, if edits cut edges of its attention"""
        self.cache, self.rows, self.cut_by = cache, rows, cut_by

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        return rotate(x, rotary.table, self.rows)

    def norm_heads(self, q_norm: Norm, k_norm: Norm, rotary: Rotary) -> bool:
        plain = not q_norm.by_head and q_norm.bias is None and k_norm.bias is None
        return plain and can_fuse(self.cache.data.shape[-1], rotary.table)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        if spec.slopes:
            raise UnsupportedModel("ALiBi is not supported on CUDA: the kernel adds nothing to scores. Use device='cpu'.")
        if observe is not None:
            raise UnsupportedModel(
                "Cannot capture attention patterns or scores on CUDA: the kernel never stores them. Use device='cpu'."
            )
        keys, values = self.cache.planes(spec.layer)
        q, size = heads.q, self.cache.pool.page_size
        if heads.v is heads.k:
            store(heads.k, heads.k, self.rows, keys, keys, size)
        elif heads.rotary is None:
            store(heads.k, heads.v, self.rows, keys, values, size)
        elif heads.norms is not None:
            q_norm, k_norm = heads.norms
            weights, table = (q_norm.weight, k_norm.weight), heads.rotary.table
            q = norm_rotate_and_store(
                q, heads.k, heads.v, weights, q_norm.eps, q_norm.kind, table, self.rows, keys, values, size
            )
        else:
            q = rotate_and_store(q, heads.k, heads.v, heads.rotary.table, self.rows, keys, values, page_size=size)
        out = self.over_keys(q, keys, values, spec, heads.sinks)
        if self.cut_by is not None and (cut := cut_pairs(self.cut_by, spec, q.shape[1])) is not None:
            cut_edges(out, q, keys, values, self.rows, cut, spec.scale, spec.softcap, spec.window, size, heads.sinks)
        return out

    def over_keys(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """The values of the visible keys, weighted: [rows, heads, width of values]."""
        size = self.cache.pool.page_size
        return attention(q, keys, values, self.rows, spec.scale, spec.softcap, spec.window, page_size=size, sinks=sinks)


class FastCudaOps(FastHeadOps, CanonicalCudaOps):
    """The fast path."""

    def over_keys(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        if self.rows.shared is not None and not spec.window:  # reading shared keys once gains more than splits do
            return super().over_keys(q, keys, values, spec, sinks)
        size = self.cache.pool.page_size
        return split_attention(q, keys, values, self.rows, spec.scale, spec.softcap, spec.window, size, sinks=sinks)


def sharing_of(batch: Batch, pages: NDArray[np.int32], cache: KVCache) -> Sharing | None:
    """Which rows of a batch share keys that are worth reading once. pages: [at least its segments, pages]"""
    starts, counts = [s.start for s in batch.segments], [len(s.tokens) for s in batch.segments]
    return find_sharing(pages[: len(starts)], starts, counts, KeyLayout.of(cache), cache.worth_sharing)


def device_rows(batch: Batch, cache: KVCache) -> PagedRows:
    """The rows of a batch with the pages of their keys, on the cache's device."""
    pages = page_matrix([s.table for s in batch.segments])
    sharing = sharing_of(batch, pages, cache)
    sequences = [i for i, s in enumerate(batch.segments) for _ in s.tokens]
    longest = max(len(s.tokens) for s in batch.segments)
    per_tile = KeyLayout.of(cache).rows_per_tile(longest)
    there = lambda x: x.to(cache.data.device, non_blocking=True)  # noqa: E731
    tiles = there(plan_tiles(sequences, per_tile)) if longest > 1 else None
    max_keys = max(s.end for s in batch.segments)
    return PagedRows(
        there(torch.tensor(sequences, dtype=torch.int32)),
        batch.positions.to(torch.int32),
        there(torch.from_numpy(pages)),
        tiles,
        max_keys,
        per_tile if tiles is not None else 0,
        sharing.keys(cache.data.device) if sharing is not None else None,
    )
