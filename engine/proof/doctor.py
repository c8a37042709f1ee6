"""The doctor: shows on this device that every op gives a row the same bits in any batch.

For each op and shape of the loaded model it compares, on one thread, a row alone, in a batch, at another offset and with
other neighbours. For attention it also compares other piece sizes, window cuts and padding. It then compares more threads
with one: the engine uses only numbers of threads that give the same bits. Negative controls that must differ (matrix-vector
products, one product over all keys) show that the comparison detects differences.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.lens import readout
from replaylens.engine.model import modes
from replaylens.engine.model.config import MixtureConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Norm
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.model.torch_ops import visible
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import KV_BLOCK, TILE, ceiling
from replaylens.engine.passes.certificate import Certificate
from replaylens.engine.proof.doctor_products import examine_products
from replaylens.engine.proof.examination import Examination
from replaylens.engine.request.capture import LensSpec

_QUERY_ROWS = (1, 2, 4, 8, 32, 64, 128)
_ROWS = (64, 63, 17)
"""numbers of rows compared on more threads; each divides differently between threads"""


@torch.inference_mode()
def examine(model: Decoder) -> Certificate:
    """Examine every op and shape of the model: the certificate lists the failures. BadRequest unless it is float32."""
    if model.embed.dtype is not torch.float32:
        raise BadRequest(
            f"The model holds {model.embed.dtype}, and the CPU engine computes in torch.float32. Give model.float(), or use "
            "Engine.load(model), which converts it."
        )
    seen = Examination(modes.thread_counts())
    with modes.canonical(1):
        seen.note("arithmetic", "float32", "rounded to nearest even, denormal numbers kept", modes.rounds_to_nearest())
        _examine_rowwise(model, seen)
        examine_lens(model.config.vocab_size, seen)
        query_rows = _examine_attention(model, seen)
        allowed = examine_products(model, seen)
    return Certificate(allowed, query_rows, tuple(seen.findings))


def require(certificate: Certificate) -> Certificate:
    """Return the certificate. Raises NotCertified with the first op and shape that failed."""
    if certificate.failures:
        bad = certificate.failures[0]
        raise NotCertified(
            f"{bad.op} {bad.shape}: '{bad.check}' gave other bits on one thread ({len(certificate.failures)} failures in all). "
            "This device does not give canonical results with this build of torch. Try another version of torch. With MKL, set "
            "MKL_CBWR=AVX2,STRICT before Python starts. `replaylens doctor` prints the whole table."
        )
    if not certificate.has_teeth:
        raise NotCertified("No negative control differed, so the comparison proves nothing. Run `replaylens doctor`.")
    return certificate


def _examine_rowwise(model: Decoder, seen: Examination) -> None:
    """Norms, activations and rotary: each must give a row the same bits at any number of rows."""
    c, ops = model.config, cpu.CpuOps()
    norms = {(*m.weight.shape, m.kind): (name, m) for name, m in model.named_modules() if isinstance(m, Norm)}
    for name, norm in norms.values():
        _compare_rows(f"{norm.kind} norm ({name})", seen.random(64, *norm.weight.shape), partial(ops.norm, norm=norm), seen)
    if c.activation == "clamped_swiglu":
        _compare_rows(f"activation {c.activation}", seen.random(64, 2 * c.d_mlp) * 6, _clamped, seen)
    else:
        _compare_rows(f"activation {c.activation}", seen.random(64, c.d_mlp) * 3, lambda x: cpu.activate(x, c.activation), seen)
    if c.mixture is not None:
        _examine_routing(c.mixture, seen)
    if c.rotary_dim:
        table = seen.random(1, 2, c.rotary_dim // 2)
        turn = lambda x: ops.rotate(x, Rotary(table, torch.zeros(len(x), dtype=torch.int64)))  # noqa: E731
        _compare_rows("rotary", seen.random(64, c.num_heads, c.d_head), turn, seen)


def _clamped(x: Tensor) -> Tensor:
    return cpu.CpuOps().activate(x, "clamped_swiglu", gated=True)


def _examine_routing(mixture: MixtureConfig, seen: Examination) -> None:
    """Which experts are chosen, and with what weights; then the sum of their outputs."""
    routing, ops = mixture.routing, cpu.CpuOps()
    correction = seen.random(mixture.num_experts) if routing.correction else None

    def routed(logits: Tensor) -> Tensor:
        chosen, weights = ops.route(logits, routing, correction)
        return torch.cat([chosen.to(weights), weights], dim=-1)

    _compare_rows("routing", seen.random(64, mixture.num_experts) * 3, routed, seen)
    weights = lambda x: routed(x[:, : mixture.num_experts, 0])[:, routing.top :]  # noqa: E731
    outs = seen.random(64, max(mixture.num_experts, routing.top), 48)
    _compare_rows("sum of experts", outs, lambda x: ops.combine(x[:, : routing.top], weights(x)), seen)


def examine_lens(vocab_size: int, seen: Examination) -> None:
    """The statistics of logits that the host computes for Z, if no kernel serves the lens."""
    _compare_rows("log-softmax", seen.random(64, vocab_size) * 3, lambda x: x.log_softmax(-1), seen)
    lens = seen.random(64, 3, vocab_size).log_softmax(-1)
    _compare_rows("lens statistics", lens, _lens_statistics, seen)
    _compare_rows("lens statistics of one layer", lens[:, :1], _lens_statistics, seen)


def _lens_statistics(log_p: Tensor) -> Tensor:
    """The parts of Z that are sums: [rows, layers, statistics]."""
    read = readout.statistics(LensSpec(()), log_p, [0] * len(log_p))
    return torch.stack([read["Z.entropy"], read["Z.kl"]], dim=-1)


def _compare_rows(op: str, x: Tensor, f: Callable[[Tensor], Tensor], seen: Examination) -> None:
    whole, shape = f(x.clone()), str(list(x.shape[1:]))
    alone = lambda: torch.cat([f(x[i : i + 1].clone()) for i in range(5)])  # noqa: E731
    seen.note(op, shape, "row alone", torch.equal(alone(), whole[:5]))
    seen.note(op, shape, "row at another offset, odd row count", torch.equal(f(x[3:10].clone()), whole[3:10]))
    same = lambda: torch.equal(alone(), whole[:5]) and all(torch.equal(f(x[:n].clone()), whole[:n]) for n in _ROWS)  # noqa: E731
    seen.on_more_threads(op, shape, same)


def _examine_attention(model: Decoder, seen: Examination) -> tuple[int, ...]:
    """The piece sizes that agree with pieces of 16 queries. Checks that the cut of windows and the padding do not matter."""
    c = model.config
    length, keys = 128, 3 * KV_BLOCK
    planes, kv_heads, width = c.kv_shape
    shape = f"{c.num_heads} heads of {width}, {kv_heads} kv heads"
    q = seen.random(length, c.num_heads, width) * c.scale
    k = seen.random(kv_heads, keys, width)
    v = seen.random(kv_heads, keys, width) if planes == 2 else k
    positions = torch.arange(keys - length, keys)

    def pieces(size: int, first: int = 0, padded: int = keys) -> Tensor:
        """Attention of queries [first, length) in pieces of `size`, with keys padded to `padded`."""
        out = []
        room = torch.zeros(kv_heads, padded - keys, width, dtype=k.dtype)
        for at in range(first, length - size + 1, size):
            bounds = ceiling(visible(positions[at : at + size], padded, 0)[None, :, None, :])
            out.append(
                cpu.attend_blocks(
                    q[None, at : at + size],
                    torch.cat([k, room], 1),
                    torch.cat([v, room], 1),
                    bounds,
                    c.attn_softcap,
                    False,
                )[0][0]
            )
        return torch.cat(out)

    reference = pieces(TILE)
    note = partial(seen.note, "attention", shape)
    note("window cut elsewhere", torch.equal(pieces(TILE, first=7), reference[7 : 7 + (length - 7) // TILE * TILE]))
    note("more padding keys", torch.equal(pieces(TILE, padded=keys + KV_BLOCK), reference))
    beside = lambda size: torch.equal(_several_sequences(q, k, v, positions, c.attn_softcap, size), reference[:size])  # noqa: E731
    note("beside other sequences", beside(TILE))
    note(
        "control: one product over all keys",
        torch.equal(_unblocked(q, k, v, positions, c.attn_softcap), reference),
        control=True,
    )
    few = partial(_few_keys, q, k, v, c.attn_softcap)
    same = lambda size: torch.equal(pieces(size), reference) and beside(size) and few(size)  # noqa: E731
    sizes = [size for size in _QUERY_ROWS if same(size)]
    seen.on_more_threads("attention", shape, lambda: same(TILE))
    for count in seen.more:
        with modes.canonical(count):
            sizes = [size for size in sizes if same(size)]
    return tuple(sorted([*sizes, TILE]))


def _few_keys(q: Tensor, k: Tensor, v: Tensor, cap: float, size: int) -> bool:
    """Whether pieces of `size` agree with pieces of 16 for one and for two blocks of keys, where libraries may choose other
    kernels than for more."""

    rows = max(size, TILE)

    def pieces(keys: int, count: int) -> Tensor:
        """The last rows of `keys` positions, in pieces of `count`."""
        return torch.cat([piece(keys, at, count) for at in range(0, rows, count)])

    def piece(keys: int, at: int, count: int) -> Tensor:
        positions = torch.arange(keys - rows + at, keys - rows + at + count)
        bounds = ceiling(visible(positions, keys, 0)[None, :, None, :])
        few_k, few_v = (x[:, :keys].contiguous() for x in (k, v))  # as the cache gathers them
        return cpu.attend_blocks(q[None, at : at + count], few_k, few_v, bounds, cap, False)[0][0]

    return all(torch.equal(pieces(keys, size), pieces(keys, TILE)) for keys in (KV_BLOCK, 2 * KV_BLOCK) if rows <= keys)


def _several_sequences(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cap: float, size: int) -> Tensor:
    """The first `size` queries, computed as the second of three sequences."""
    others = [torch.flip(x, (1,)) for x in (k, v)]
    keys, values = (torch.cat([o, x, o], dim=1) for o, x in zip(others, (k, v), strict=True))
    bounds = ceiling(visible(positions[:size], k.shape[1], 0)[None, :, None, :].expand(3, -1, -1, -1))
    queries = torch.stack([q[-size:], q[:size], q[:size]])
    return cpu.attend_blocks(queries, keys, values, bounds, cap, False)[0][1]


def _unblocked(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cap: float) -> Tensor:
    """Softmax, then one product over all keys, as libraries compute it."""
    group = q.shape[1] // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = cpu.softcap(q.transpose(0, 1) @ k.transpose(1, 2), cap)
    hidden = ~visible(positions, k.shape[1], 0)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)
