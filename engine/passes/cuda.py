"""Canonical arithmetic on a CUDA device, from our kernels, and the fast path.

Every kernel gives a row the same bits at any number of rows and with any tile. Nothing is padded, and the decode step itself
is canonical. The fast path uses the library's products and splits the keys of attention by the number of rows: sums are split
differently at every size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, UnsupportedModel
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import page_matrix
from replaylens.engine.model.config import Activation, ModelConfig, Routing, sigmoid
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Conv, Experts, Linear, Norm, Rotary, is_packed
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, Recurrence, softcap, weighted
from replaylens.engine.passes.batch import Batch, finite
from replaylens.engine.passes.sharing import KeyLayout, sharing_of
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.placed import PATTERN, PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels import grouped, route
from replaylens.kernels.attention import MAX_REST, MAX_VALUES, attention
from replaylens.kernels.definition import CHUNK
from replaylens.kernels.edges import HIDDEN, REPLACED, CutPairs, cut_edges
from replaylens.kernels.gpus import Gpu
from replaylens.kernels.launch import attention_tile, grouped_rows, heads_together
from replaylens.kernels.lens import lens
from replaylens.kernels.matmul import head_matmul, head_plan, matmul
from replaylens.kernels.norm import activation, norm_pair, norm_scale
from replaylens.kernels.norm import norm as norm_kernel
from replaylens.kernels.recurrent import rates, recur, short_conv
from replaylens.kernels.recurrent_rows import RecurrentMemory
from replaylens.kernels.rope import can_fuse, norm_rotate_and_store, rotate, rotate_and_store, store
from replaylens.kernels.route import Plan, plan
from replaylens.kernels.sample import judge, sample_logits
from replaylens.kernels.shared import PagedRows, plan_tiles
from replaylens.kernels.split import split_attention

# ---- choice ----------------------------------------------------------------------------------------------------------
# Sampling and draft verification on a CUDA device. Only two numbers per chain go to the host.


@dataclass(frozen=True)
class Question:
    """Which drafts of a chain are accepted, and which token is next? Precondition: the sampling is `bare`."""

    row: int
    """row of logits that verifies the first draft; the rows of the drafts follow it"""
    drafts: Sequence[int]
    sampling: Sampling
    position: int
    """of the first draft"""


def answers(logits: Tensor, questions: Sequence[Question]) -> list[tuple[int, int]]:
    """(number of accepted drafts, next token) for each question. logits [rows, vocab]"""
    chosen = draw(logits, *_rows(questions, len(logits)))
    longest = max(len(q.drafts) for q in questions)
    table = [[*q.drafts, *[-1] * (longest - len(q.drafts)), q.row, len(q.drafts)] for q in questions]
    packed = torch.tensor(table, device=logits.device)  # [chains, longest + 2]
    drafts, first, length = (x.contiguous() for x in (packed[:, :longest], packed[:, longest], packed[:, longest + 1]))
    return [(accepted, token) for accepted, token in torch.stack(judge(chosen, drafts, first, length), 1).tolist()]


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token per row of logits [rows, vocab]: [rows] int64, on the device. `positions` are those of the drawn tokens."""
    if not any(sampling.temperature for sampling in samplings):
        return sample_logits(logits)[0]
    position = torch.tensor(positions, device=logits.device)
    return sample_logits(logits, seeds(samplings, logits.device), position, temperatures(samplings, logits.device))[0]


def seeds(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """The unsigned seeds, reinterpreted as int64: [rows]."""
    return torch.tensor([s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in samplings], device=device)


def temperatures(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """[rows] float64; 0 means greedy."""
    return torch.tensor([float(s.temperature) for s in samplings], dtype=torch.float64, device=device)


def _rows(questions: Sequence[Question], rows: int) -> tuple[list[Sampling], list[int]]:
    """Sampling and position of every row. Rows without a question are greedy."""
    samplings, positions = [Sampling()] * rows, [0] * rows
    for q in questions:
        for i in range(len(q.drafts) + 1):
            samplings[q.row + i], positions[q.row + i] = q.sampling, q.position + i
    return samplings, positions


# ---- cuda experts ----------------------------------------------------------------------------------------------------
# The arithmetic of mixtures of experts on a CUDA device: routing, and products of each row with its experts.
#
# Every kernel gives a row the same bits at any number of rows, whatever the other rows choose. The host never learns which
# experts are chosen, so that passes with experts run inside CUDA graphs.


def require_supported(config: ModelConfig, dtype: torch.dtype, gpu: Gpu) -> None:
    """UnsupportedModel if the kernels cannot compute a model of this config, or a GPU has no room for its attention."""
    if config.latent is not None and (config.latent.rank > MAX_VALUES or config.rotary_dim > MAX_REST):
        raise UnsupportedModel(
            f"Latents of {config.latent.rank} and rotated keys of {config.rotary_dim} dimensions are not supported on CUDA: "
            f"the kernel has room for {MAX_VALUES} and {MAX_REST}. Use device='cpu'."
        )
    width, kv_heads = (config.d_head, config.num_kv_heads) if config.latent is None else (config.latent.rank, 1)
    group = heads_together(config.num_heads, kv_heads, width, dtype, gpu)
    try:
        attention_tile(group, width, dtype, gpu, group)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None


@lru_cache(maxsize=64)
def _spec(routing: Routing) -> route.RouteSpec:
    return route.RouteSpec(
        routing.top,
        routing.kind,
        routing.normalised,
        routing.scale,
        routing.groups,
        routing.chosen_groups,
        routing.group_best,
        routing.jitter,
    )


class ExpertOps:
    """The part of `RowOps` that belongs to experts."""

    _planned: tuple[Tensor, Plan] | None = None
    """the last plan and what it was made for: both products of a layer use it"""

    _routed: tuple[Tensor, Tensor] | None = None
    """the last weights of chosen experts, and those of all: the kernel stores both"""

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen, weights, spread = route.route(logits, _spec(routing), correction)
        self._routed = weights, spread
        return chosen, weights

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        known = self._routed
        if known is not None and known[0] is weights:
            return known[1]
        return weights.new_zeros(len(weights), experts).scatter(-1, chosen, weights)

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        return route.choice_scores(logits, _spec(routing), correction)

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        return route.choose(scores.contiguous(), _spec(routing))

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        return route.weigh(logits, chosen.contiguous(), _spec(routing))

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        made = self._plan(chosen, experts)
        hidden = grouped.grouped_matmul(x, experts.stored("up"), experts.up_bias, made, chosen.shape[1], kind, experts.gated)
        return hidden.unflatten(0, chosen.shape)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        made = self._plan(chosen, experts)
        pairs = hidden.flatten(0, 1)
        return grouped.grouped_matmul(pairs, experts.stored("down"), experts.down_bias, made, 1).unflatten(0, chosen.shape)

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        return grouped.combine(outs.contiguous(), weights.contiguous(), residual)

    def _plan(self, chosen: Tensor, experts: Experts) -> Plan:
        known = self._planned
        if known is None or known[0] is not chosen:
            up = experts.stored("up")
            dtype = torch.float32 if is_packed(experts) else up.dtype  # of the rows
            made = plan(chosen.contiguous(), len(up), grouped_rows(chosen.numel(), len(up), dtype))
            known = self._planned = chosen, made
        return known[1]


# ---- cut pairs -------------------------------------------------------------------------------------------------------
# The (row, head) pairs of a pass whose edges edits cut or set, for the attention of the kernels. A CPU's is in `cpu.py`.


class _Pair:
    """The edges of one row and head."""

    def __init__(self, first: int, position: int, most: int) -> None:
        self.seen = slice(first, position + 1)
        self.edges = np.zeros(most, dtype=np.uint8)
        self.weights = np.zeros(most, dtype=np.float32)

    def change(self, edit: PlacedEdit, keys: list[int], weights: np.ndarray | None) -> None:
        """Mutates: the later of two edits of an edge counts, except that a hidden edge stays hidden."""
        self.edges[keys] |= HIDDEN if edit.op == "mask" else REPLACED
        if edit.op != "mask":
            self.weights[keys] = 0.0 if weights is None else weights


def cut_pairs(batch: Batch, spec: AttentionSpec, heads: int) -> CutPairs | None:
    """The pairs of a layer with a changed edge to a key they see, on the batch's device; None if there are none.

    Raises BadEdit if a row sees no key.
    """
    site, most = f"blocks.{spec.layer}.{PATTERN}", max(s.end for s in batch.segments)
    found: dict[tuple[int, int], _Pair] = {}
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site != site:
                continue
            for position in edit.edited(segment.start, segment.tokens):
                first = max(0, position + 1 - spec.window) if spec.window else 0
                columns = [i for i, key in enumerate(edit.keys) if first <= key <= position]
                for head in (edit.heads or range(heads)) if columns else ():
                    pair = found.setdefault((batch.row(index, position), head), _Pair(first, position, most))
                    pair.change(edit, [edit.keys[i] for i in columns], _weights(edit, position, head, columns))
    if any((pair.edges[pair.seen] & HIDDEN).all() for pair in found.values()):
        raise BadEdit(
            f"Edits of {site} hide every key that a position sees, within its sliding window if it has one. Leave at "
            "least one, or use the op 'zero'."
        )
    return _there(found, str(batch.tokens.device)) if found else None


def _weights(edit: PlacedEdit, position: int, head: int, columns: list[int]) -> np.ndarray | None:
    """What a `set` sets these keys to; None for other ops."""
    if edit.op != "set":
        return None
    rows = edit.vectors[edit.place(position)] if edit.vectors.dim() == 3 else edit.vectors
    found: np.ndarray = rows[head, columns].numpy()
    return found


def _there(found: dict[tuple[int, int], _Pair], device: str) -> CutPairs:
    there = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)  # noqa: E731
    row, head = np.array(list(found), dtype=np.int32).T
    pairs = list(found.values())
    sets = any(pair.weights.any() for pair in pairs)
    weights = there(np.stack([pair.weights for pair in pairs])) if sets else None
    return CutPairs(there(row), there(head), there(np.stack([pair.edges for pair in pairs])), weights)


# ---- cuda ------------------------------------------------------------------------------------------------------------


class HeadOps(ExpertOps):
    """Row-wise ops: products, norms and activations, inside or outside a pass."""

    _by_head: tuple[torch.Size, Plan] | None = None
    """the last plan of products by head and the rows and heads it is for: all layers use it"""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return matmul(x, linear.stored(), linear.bias)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        return matmul(x, table.t(), out_dtype=torch.float32)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return matmul(x, linear.stored(), linear.bias, residual=residual)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype != torch.float32 or not cap:
            return softcap(x, cap)
        return activation(x / cap, "tanh", False).mul_(cap)

    def sigmoid(self, x: Tensor) -> Tensor:
        return _numbers(x, "sigmoid") if x.dtype == torch.float32 else sigmoid(x)

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        return activation(self.linear(x, linear), kind, gated)

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
        return activation(x.flatten(0, -2), kind, gated).unflatten(0, x.shape[:-1])

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs], each head times its own weight of [heads, inputs, outputs]: [rows, heads, outputs]"""
        known, shape = self._by_head, x.shape[:2]
        if known is None or known[0] != shape:
            known = self._by_head = shape, head_plan(shape[0], shape[1], x.dtype, x.device)
        return head_matmul(x, weight, known[1])


def _numbers(x: Tensor, kind: str) -> Tensor:
    """A function of every number, in float32."""
    return activation(x.float().reshape(-1, x.shape[-1]), kind, False).view(x.shape)


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

    def exp(self, x: Tensor) -> Tensor:
        return _numbers(x, "exp")

    def softplus(self, x: Tensor) -> Tensor:
        return _numbers(x, "softplus")

    def scaled_norms(self, q: Tensor, k: Tensor, norm: Norm, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        both = q.as_strided((len(q), 2 * heads, q.shape[2]), q.stride()) if _neighbours(q, k) else torch.cat([q, k], dim=1)
        out = norm_pair(both, heads, (norm.weight, norm.weight), norm.eps, norm.kind, scales)
        return out[:, :heads], out[:, heads:]

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        return norm_kernel(x, norm.weight, None, norm.eps, norm.kind, gate=gate)

    def rates(self, x: Tensor, a_log: Tensor, step_bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return rates(x, a_log, step_bias, scale)

    def short_conv(self, x: Tensor, conv: Conv, layer: int, silu: bool = False) -> Tensor:
        return short_conv(x, self._memory(layer), conv.weight, conv.bias, self.rows, silu)

    def recur(self, given: Recurrence, layer: int, observe: Callable[[Tensor], object] | None = None) -> Tensor:
        memory = self._memory(layer)
        out = recur(given.q, given.k, given.v, given.decay, given.strength, memory, self.rows)
        if observe is not None:
            observe(_states(memory, self.rows, given.k.shape[1]))
        return out

    def _memory(self, layer: int) -> RecurrentMemory:
        cache, place = self.cache, self.cache.mixed[layer]
        assert cache.mixer is not None  # the layer recurs
        at, size = cache.mixer.columns[:3], cache.pool.page_size
        return RecurrentMemory(cache.entries[place], cache.states[place], at, cache.entry_of, cache.state_of, size)

    def norm_heads(self, q_norm: Norm, k_norm: Norm, rotary: Rotary) -> bool:
        plain = not q_norm.by_head and q_norm.bias is None and k_norm.bias is None
        return plain and can_fuse(self.cache.data.shape[-1], rotary.table)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
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
        if self.cut_by is not None and q.dtype == torch.float32:
            _cut_on_host(out, q, keys, values, self.cut_by, spec, heads.sinks)
        elif self.cut_by is not None and (cut := cut_pairs(self.cut_by, spec, q.shape[1])) is not None:
            slopes = _slopes(spec.slopes, q.device)
            cut_edges(out, q, keys, values, self.rows, cut, spec.scale, spec.softcap, spec.window, size, heads.sinks, slopes)
        return out

    def over_keys(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """The values of the visible keys, weighted: [rows, heads, width of values]."""
        size, slopes = self.cache.pool.page_size, _slopes(spec.slopes, q.device)
        return attention(
            q, keys, values, self.rows, spec.scale, spec.softcap, spec.window, page_size=size, sinks=sinks, slopes=slopes
        )


@cache
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor | None:
    """ALiBi's, once per device: a graph records their address."""
    return torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None


def _cut_on_host(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None
) -> None:
    """Mutates `out`: rows with edges that edits cut or set, in portable arithmetic, which the host has, too."""
    from replaylens.engine.passes.cpu import Cut, cut_of, edged
    from replaylens.kernels.cpu_attention import HostRows

    cut = cut_of(batch, spec.layer, q.shape[1])
    if cut is None:
        return
    rows = (cut.mask.bool() | ~cut.put.isnan()).flatten(1).any(1).nonzero().flatten()
    if not len(rows):
        return
    owner = torch.tensor([i for i, segment in enumerate(batch.segments) for _ in segment.tokens])[rows]
    used, sequence = owner.unique(return_inverse=True)
    slots = [batch.pool.slots(batch.segments[i].table, 0, batch.segments[i].end) for i in used.tolist()]
    pages, first = torch.zeros(len(slots), max(map(len, slots)), dtype=torch.int64), 0
    for line, own in zip(pages, slots, strict=True):
        line[: len(own)] = torch.arange(first, first + len(own))
        first += len(own)
    every = torch.tensor([slot for own in slots for slot in own], device=keys.device)
    k = keys[every].cpu().transpose(0, 1).contiguous()
    v = k[..., : values.shape[-1]] if values.data_ptr() == keys.data_ptr() else values[every].cpu().transpose(0, 1).contiguous()
    paged = HostRows(sequence, batch.positions.cpu()[rows], pages, 1, sequence.argsort(stable=True))
    host = None if sinks is None else sinks.cpu()
    z = edged(q[rows.to(q.device)].cpu(), k, v, paged, spec, host, Cut(cut.site, cut.mask[rows], cut.put[rows]))
    out[rows.to(out.device)] = z.to(out.device)


def _states(memory: RecurrentMemory, rows: PagedRows, key_heads: int) -> Tensor:
    """The state after every row, [rows, heads, d, width], from the rows' entries: in portable arithmetic, which the host has,
    too. The kernel stores only those that end chunks."""
    from replaylens.kernels import cpu_recurrent as host

    size, heads, d, width = memory.page_size, *memory.states.shape[1:]
    owner, position, tables = (x.cpu().long() for x in (rows.sequence, rows.position, rows.page_table))
    base = position - position % CHUNK
    used = torch.zeros_like(tables, dtype=torch.bool)
    for sequence, first, last in zip(owner.tolist(), base.tolist(), position.tolist(), strict=True):
        used[sequence, max(0, first - 1) // size : last // size + 1] = True
    pages, place = tables[used].unique(return_inverse=True)
    mine = torch.zeros_like(tables)
    mine[used] = place
    there = pages.to(memory.entries.device)
    entries = memory.entries.unflatten(0, (-1, size))[memory.entry_of[there].long()].flatten(0, 1).cpu()
    held = host.LayerMemory(entries, memory.states[memory.state_of[there].long()].cpu(), memory.at, key_heads)
    out = torch.empty(len(owner), heads, d, width, dtype=torch.float32)
    places = zip(owner.tolist(), position.tolist(), base.tolist(), strict=True)
    asked = [host.Piece(sequence, 0, at + 1, 0, first, final=out[i]) for i, (sequence, at, first) in enumerate(places)]
    none = out.new_empty(0, key_heads, d), out.new_empty(0, heads, width)
    host.recur(*none, None, held, asked, mine, mine, size)
    return finite(out, "recurrent states").to(memory.states.device)


class FastCudaOps(FastHeadOps, CanonicalCudaOps):
    """The fast path."""

    def over_keys(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        if self.rows.shared is not None and not spec.window:  # reading shared keys once gains more than splits do
            return super().over_keys(q, keys, values, spec, sinks)
        size, slopes = self.cache.pool.page_size, _slopes(spec.slopes, q.device)
        more = (spec.scale, spec.softcap, spec.window, size)
        return split_attention(q, keys, values, self.rows, *more, sinks=sinks, slopes=slopes)


def device_rows(batch: Batch, cache: KVCache) -> PagedRows:
    """The rows of a batch with the pages of their keys, on the cache's device."""
    pages = page_matrix([s.table for s in batch.segments])
    sharing = sharing_of(batch, pages, cache)
    sequences = batch.sequence
    longest = max(len(s.tokens) for s in batch.segments)
    per_tile = KeyLayout.of(cache).rows_per_tile(longest)
    there = lambda x: x.to(cache.data.device, non_blocking=True)  # noqa: E731
    tiles = there(plan_tiles(sequences, per_tile)) if longest > 1 else None
    max_keys = max(s.end for s in batch.segments)
    return PagedRows(
        there(torch.from_numpy(sequences)),
        batch.positions.to(torch.int32),
        there(torch.from_numpy(pages)),
        tiles,
        max_keys,
        per_tile if tiles is not None else 0,
        sharing.keys(cache.data.device) if sharing is not None else None,
        single=longest == 1,
    )


# ---- lens ------------------------------------------------------------------------------------------------------------
# The logit lens (Z). The kernel goes over the vocabulary in tiles and never stores the logits.

_LENS_TOGETHER = 32768
"""rows times layers per launch; does not affect the bits"""


def read_lens(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    """Z of residual rows [n, layers, d], in the form of `read` (`engine/passes/lens.py`), on the device."""
    step = max(1, _LENS_TOGETHER // stacked.shape[1])
    table = model.unembedding
    targets = spec.targets_on(table.device)
    follows = torch.tensor(emitted).to(table.device, non_blocking=True)
    blocks = [
        lens_columns(model, spec, stacked[i : i + step].to(table).transpose(0, 1).contiguous(), follows[i : i + step], targets)
        for i in range(0, len(stacked), step)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def lens_columns(
    model: Decoder, spec: LensSpec, x: Tensor, follows: Tensor, targets: Tensor | None, logits: Tensor | None = None
) -> Rows:
    """Z of residual streams x [layers, rows, d] in one launch; `follows` [rows] are the next tokens, -1: none yet.

    targets  the spec's, on the device. A graph reads them again at every replay, so whoever records one must keep them
    logits   the model's own [rows, vocab], if they are known already
    -> name -> [rows, layers, ...]. Waits for nothing, so that a graph can hold it.
    """
    if not model.config.plain_logits:
        raise UnsupportedModel(
            f"Z of {model.config.family} inside a burst is not supported on CUDA: its unembedding has a bias, or a factor that "
            "is not a power of two. Capture S instead, or use device='cpu'."
        )
    norm, table, scale = model.ln_final, model.unembedding.t(), model.config.logit_scale  # table: [d, vocab]
    looked_up = follows.clamp_min(0)[:, None]
    if targets is not None:
        looked_up = torch.cat([looked_up, targets.expand(len(follows), -1)], dim=1)
    found = lens(
        x,
        table,
        norm.weight if scale == 1.0 else norm.weight * scale,  # a power of two: moves no bit of the logits but the exponent
        norm.bias if scale == 1.0 or norm.bias is None else norm.bias * scale,
        norm.eps,
        norm.kind,
        final=len(x) - 1,
        targets=looked_up,
        k=min(spec.top_k, table.shape[1]),
        softcap=model.config.logit_softcap,
        logits=None if model.config.logit_softcap else logits,  # the kernel caps them itself
    )
    assert found.kl is not None and found.target_log_probs is not None  # `final` and `targets` were given
    emitted = found.target_log_probs[..., 0].masked_fill(follows < 0, float("nan"))
    z = {
        "Z.entropy": found.entropy,
        "Z.kl": found.kl,
        "Z.emitted": emitted,
        "Z.top_ids": found.top_ids.to(torch.int32),
        "Z.top_logprobs": found.top_log_probs,
    }
    if targets is not None:
        z["Z.targets"] = found.target_log_probs[..., 1:]
    return {name: column.transpose(0, 1).contiguous() for name, column in z.items()}
