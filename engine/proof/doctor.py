"""The doctor: shows on this device that every op gives a row the same bits whatever stands around it.

For each op and shape of the loaded model it compares a row alone, in a batch, at another offset, with other
neighbours, on one thread and on all; for attention also decode against prefill and a window cut elsewhere. A negative
control that must differ (matrix-vector products, the library's own activation) shows that the comparison has teeth.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.errors import NotCertified
from replaylens.engine.lens import readout
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import Linear, Norm, visible
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import KV_BLOCK, TILE
from replaylens.engine.passes.certificate import Certificate, Finding
from replaylens.engine.passes.products import Products, RowCounts, Shape, can_pack
from replaylens.engine.request.capture import LensSpec

_COUNTS = (512, 256, 128, 64, 32)
_TOTALS = (16, 48, 80, 112, 176, 336, 496)
"""numbers of rows that are put together from several counts"""
_PACKED_TOTALS = (*range(1, 18), 31, 33, 48, 63, 64, 65, 97, 128)
_QUERY_ROWS = (1, 2, 4, 8, 32, 64, 128)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@torch.no_grad()
def examine(model: Decoder) -> Certificate:
    """Examine every op and shape of the model. Does not raise: the certificate says what failed."""
    generator = torch.Generator().manual_seed(2024)
    findings: list[Finding] = []
    counts, packed = _examine_products(model, generator, findings)
    _examine_rowwise(model, generator, findings)
    query_rows = _examine_attention(model, generator, findings)
    return Certificate(counts, packed, query_rows, tuple(findings), torch.get_num_threads())


def require(certificate: Certificate) -> Certificate:
    """The certificate, or NotCertified naming the first op and shape that failed."""
    if certificate.failures:
        bad = certificate.failures[0]
        raise NotCertified(
            f"{bad.op} {bad.shape}: '{bad.check}' gave other bits ({len(certificate.failures)} findings in all). This device "
            "cannot give canonical results with this build of torch; `replaylens doctor` prints the whole table."
        )
    if not certificate.has_teeth:
        raise NotCertified("no negative control differed, so the comparison proves nothing here; run `replaylens doctor`")
    return certificate


Product = Callable[[Tensor, Products], Tensor]


def _products(model: Decoder) -> dict[Shape, tuple[str, Product, Tensor]]:
    """One product of every shape: (name, the function, the weight as [inputs, outputs])."""
    found: dict[Shape, tuple[str, Product, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shape = (module.weight.shape[0], module.weight.shape[1])
            found.setdefault(shape, (name, partial(_linear, module), module.weight))
    table = model.unembedding
    found[(table.shape[1], len(table))] = ("unembed", partial(_unembed, table), table.t())
    return found


def _linear(linear: Linear, x: Tensor, products: Products) -> Tensor:
    return products.linear(x, linear)


def _unembed(table: Tensor, x: Tensor, products: Products) -> Tensor:
    return products.unembed(x, table)


def _examine_products(
    model: Decoder, generator: torch.Generator, findings: list[Finding]
) -> tuple[RowCounts, frozenset[Shape]]:
    """Which row counts, and which packed weights, give the bits of the tile; and that the tile's bits are a row's own."""
    allowed: RowCounts = {}
    packed: set[Shape] = set()
    for shape, (name, product, weight) in _products(model).items():
        inputs, outputs = shape
        most = 512 if inputs * outputs < 8e6 else 128
        x = torch.randn(most, inputs, generator=generator)
        reference = _examine_tile(name, shape, product, weight, x, generator, findings)
        same = [c for c in _COUNTS if c <= most and _agrees(product, {shape: (c, TILE)}, x, reference, [c])]
        allowed[shape] = (*same, TILE)
        equal = _agrees(product, allowed, x, reference, [n for n in _TOTALS if n <= most])
        findings.append(Finding(name, str([*shape]), "any number of rows", equal))
        if can_pack(weight) and _agrees(product, allowed, x, reference, _PACKED_TOTALS, frozenset({shape})):
            packed.add(shape)
    return allowed, frozenset(packed)


def _agrees(
    product: Product,
    counts: RowCounts,
    x: Tensor,
    reference: Tensor,
    totals: Iterable[int],
    packed: frozenset[Shape] = frozenset(),
) -> bool:
    """Whether the first n rows have the reference's bits for every n of `totals`, on all threads and on one."""
    for threads in (torch.get_num_threads(), 1):
        with _threads(threads):
            products = Products(counts, packed)
            if not all(torch.equal(product(x[:n], products), reference[:n]) for n in totals):
                return False
    return True


def _examine_tile(
    name: str, shape: Shape, product: Product, weight: Tensor, x: Tensor, generator: torch.Generator, findings: list[Finding]
) -> Tensor:
    """All rows of x, tile by tile. Notes whether a row's place in the tile or its neighbours matter."""
    only_tile = Products({shape: (TILE,)})
    reference = product(x, only_tile)
    note = lambda check, equal, **more: findings.append(Finding(name, str([*shape]), check, equal, **more))  # noqa: E731
    order = torch.randperm(TILE, generator=generator)
    note("row at another offset of the tile", torch.equal(product(x[:TILE][order], only_tile), reference[:TILE][order]))
    alone = torch.zeros(TILE, shape[0])
    alone[0] = x[3]
    note("row alone in a zero-padded tile", torch.equal(product(alone, only_tile)[0], reference[3]))
    with _threads(1):
        note("one thread", torch.equal(product(x[: 2 * TILE], only_tile), reference[: 2 * TILE]))
    fast = torch.mv(weight.t(), x[0])
    note("control: matrix-vector product", torch.equal(fast, torch.mm(x[:TILE], weight)[0]), control=True)
    return reference


def _examine_rowwise(model: Decoder, generator: torch.Generator, findings: list[Finding]) -> None:
    """Norms, activations, rotary: each must give a row the same bits in any number of rows."""
    c, ops = model.config, cpu.CpuOps()
    norms = {(m.weight.shape[0], m.kind): (name, m) for name, m in model.named_modules() if isinstance(m, Norm)}
    for (width, kind), (name, norm) in norms.items():
        _compare_rows(
            f"{kind} norm ({name})",
            torch.randn(64, width, generator=generator),
            partial(ops.norm, norm=norm),
            findings,
        )
    wide = torch.randn(64, c.d_mlp, generator=generator) * 3
    _compare_rows(f"activation {c.activation}", wide, lambda x: cpu.activate(x, c.activation), findings)
    logits = torch.randn(64, c.vocab_size, generator=generator) * 3
    _compare_rows("log-softmax", logits, lambda x: x.log_softmax(-1), findings)
    lens = torch.randn(64, 3, c.vocab_size, generator=generator).log_softmax(-1)
    _compare_rows("lens statistics", lens, _lens_statistics, findings)
    _compare_rows("lens statistics of one layer", lens[:, :1], _lens_statistics, findings)
    if c.rotary_dim:
        heads = torch.randn(64, c.num_heads, c.d_head, generator=generator)
        table = torch.randn(1, 2, c.rotary_dim // 2, generator=generator)
        turn = lambda x: ops.rotate(x, Rotary(table, torch.zeros(len(x), dtype=torch.int64)))  # noqa: E731
        _compare_rows("rotary", heads, turn, findings)


def _lens_statistics(log_p: Tensor) -> Tensor:
    """What Z keeps of a row that takes a sum: [rows, layers, statistics]."""
    read = readout.statistics(LensSpec(()), log_p, [0] * len(log_p))
    return torch.stack([read["Z.entropy"], read["Z.kl"]], dim=-1)


def _compare_rows(op: str, x: Tensor, f: Callable[[Tensor], Tensor], findings: list[Finding]) -> None:
    whole, shape = f(x.clone()), str(list(x.shape[1:]))
    alone = torch.cat([f(x[i : i + 1].clone()) for i in range(5)])
    findings.append(Finding(op, shape, "row alone", torch.equal(alone, whole[:5])))
    findings.append(Finding(op, shape, "row at another offset, odd row count", torch.equal(f(x[3:10].clone()), whole[3:10])))
    with _threads(1):
        findings.append(Finding(op, shape, "one thread", torch.equal(f(x.clone()), whole)))


def _examine_attention(model: Decoder, generator: torch.Generator, findings: list[Finding]) -> tuple[int, ...]:
    """Which piece sizes agree with pieces of 16 queries; and that the cut of windows and the padding do not matter."""
    c = model.config
    length, keys = 128, 3 * KV_BLOCK
    shape = f"{c.num_heads} heads of {c.d_head}, {c.num_kv_heads} kv heads"
    q = torch.randn(length, c.num_heads, c.d_head, generator=generator) * c.scale
    k, v = (torch.randn(c.num_kv_heads, keys, c.d_head, generator=generator) for _ in range(2))
    positions = torch.arange(keys - length, keys)

    def pieces(size: int, first: int = 0, padded: int = keys) -> Tensor:
        """Attention of queries [first, length) in pieces of `size`, with room for `padded` keys."""
        out = []
        room = torch.zeros(c.num_kv_heads, padded - keys, c.d_head)
        for at in range(first, length - size + 1, size):
            hidden = ~visible(positions[at : at + size], padded, 0)[None, :, None, :]
            out.append(
                cpu.attend_blocks(
                    q[None, at : at + size],
                    torch.cat([k, room], 1),
                    torch.cat([v, room], 1),
                    hidden,
                    c.attn_softcap,
                    False,
                )[0][0]
            )
        return torch.cat(out)

    reference = pieces(TILE)
    note = lambda check, equal, **more: findings.append(Finding("attention", shape, check, equal, **more))  # noqa: E731
    note("window cut elsewhere", torch.equal(pieces(TILE, first=7), reference[7 : 7 + (length - 7) // TILE * TILE]))
    note("more padding keys", torch.equal(pieces(TILE, padded=keys + KV_BLOCK), reference))
    with _threads(1):
        note("one thread", torch.equal(pieces(TILE), reference))
    beside = lambda size: torch.equal(_several_sequences(q, k, v, positions, c.attn_softcap, size), reference[:size])  # noqa: E731
    note("beside other sequences", beside(TILE))
    note(
        "control: one product over all keys",
        torch.equal(_unblocked(q, k, v, positions, c.attn_softcap), reference),
        control=True,
    )
    same = [size for size in _QUERY_ROWS if torch.equal(pieces(size), reference) and beside(size)]
    return tuple(sorted([*same, TILE]))


def _several_sequences(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cap: float, size: int) -> Tensor:
    """The first `size` queries, computed as the second of three sequences."""
    others = [torch.flip(x, (1,)) for x in (k, v)]
    keys, values = (torch.cat([o, x, o], dim=1) for o, x in zip(others, (k, v), strict=True))
    hidden = ~visible(positions[:size], k.shape[1], 0)[None, :, None, :].expand(3, -1, -1, -1)
    queries = torch.stack([q[-size:], q[:size], q[:size]])
    return cpu.attend_blocks(queries, keys, values, hidden, cap, False)[0][1]


def _unblocked(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cap: float) -> Tensor:
    """What a library does: softmax, then one product over all keys."""
    group = q.shape[1] // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = cpu.softcap(q.transpose(0, 1) @ k.transpose(1, 2), cap)
    hidden = ~visible(positions, k.shape[1], 0)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)
