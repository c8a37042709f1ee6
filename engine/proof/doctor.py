"""The doctor: shows on this device that every op gives a row the same bits in any batch.

For each op and shape of the loaded model it compares, on one thread, a row alone, in a batch, at another offset and with
other neighbours. For attention it also compares other piece sizes, window cuts and padding. It then compares more threads
with one: the engine uses only numbers of threads that give the same bits. Negative controls that must differ (matrix-vector
products, one product over all keys) show that the comparison detects differences.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.lens import lens as readout
from replaylens.engine.model import modes
from replaylens.engine.model.config import MixtureConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Experts, HeadLinear, Linear, Norm, Rotary
from replaylens.engine.model.ops import visible
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import KV_BLOCK, TILE, ceiling
from replaylens.engine.passes.products import Allowed, Certificate, Finding, Products, Shape, can_pack
from replaylens.engine.records import LensSpec

# ---- examination -----------------------------------------------------------------------------------------------------
# `Examination`: the findings of a doctor, on one thread and on more.


class Examination:
    """Findings for one model. Runs within `modes.canonical(1)`: one thread gives the reference."""

    def __init__(self, threads: tuple[int, ...]) -> None:
        self.findings: list[Finding] = []
        self.more = [count for count in threads if count > 1]
        """numbers of threads on which no op has differed so far"""
        self.generator = torch.Generator().manual_seed(2024)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def note(self, op: str, shape: str, check: str, equal: bool, control: bool = False) -> None:
        self.findings.append(Finding(op, shape, check, equal, control))

    def on_more_threads(self, op: str, shape: str, same: Callable[[], bool]) -> None:
        """Check `same` on every number of threads in `more`, and remove those on which it does not hold."""
        for count in list(self.more):
            if not self.on(count, op, shape, same):
                self.more.remove(count)

    def on(self, count: int, op: str, shape: str, same: Callable[[], bool]) -> bool:
        """Record and return whether `same` holds on `count` threads."""
        with modes.canonical(count):
            equal = torch.get_num_threads() == count and same()
        self.findings.append(Finding(op, shape, f"on {count} threads", equal, threads=count))
        return equal


# ---- doctor products -------------------------------------------------------------------------------------------------
# The doctor's examination of products: which variants give the one-thread bits of the 16-row tile, on how many threads.

_COUNTS = (512, 256, 128, 64, 32)
_TOTALS = (16, 32, 48, 80, 112, 176, 336, 496)
"""numbers of rows that combine several counts"""
_PACKED_TOTALS = (*range(1, 18), 31, 33, 48, 63, 64, 65, 97, 128)
_FEW = (8, 4, 2)
"""row counts below the tile: an expert often gets a few rows only"""
_EXPERT_TOTALS = (*range(1, 18), 31, 33, 47, 65)
"""numbers of rows that an expert may get"""
_LARGE = 8e6
"""number of weights from which fewer rows are compared"""


@dataclass(frozen=True)
class _Subject:
    """One product of the model and its shape."""

    name: str
    shape: Shape
    product: Callable[[Tensor, Products], Tensor]
    weight: Tensor
    """[inputs, outputs]"""
    of_expert: bool = False
    """whether any number of rows is multiplied with it"""

    @property
    def num_rows(self) -> int:
        """The number of rows to compare."""
        return 512 if self.weight.numel() < _LARGE else 128


def examine_products(model: Decoder, seen: Examination) -> dict[int, Allowed]:
    """The variants with canonical bits by number of threads. Checks that a row's bits do not depend on the rest of its tile."""
    found = {count: Allowed({}) for count in (1, *seen.more)}
    examined: set[Shape] = set()
    for subject in _subjects(model):
        x = seen.random(subject.num_rows, subject.shape[0])
        reference = _examine_tile(subject, x, seen)
        one = _on_one_thread(subject, x, reference, seen)
        for count, allowed in found.items():
            some = one if count == 1 else _on_more_threads(count, subject, x, reference, one, seen)
            found[count] = _also(allowed, some, subject.shape if subject.shape in examined else None)
        examined.add(subject.shape)
    return found


def _also(allowed: Allowed, some: Allowed, again: Shape | None) -> Allowed:
    """What is allowed for more shapes. `again`: a shape that another product has, with other strides; both must agree."""
    if again is None:
        return Allowed(allowed.row_counts | some.row_counts, allowed.packed | some.packed)
    counts = tuple(count for count in allowed.row_counts.get(again, ()) if count in some.row_counts.get(again, ()))
    return Allowed({**allowed.row_counts, again: counts}, allowed.packed - ({again} - some.packed))


def _subjects(model: Decoder) -> list[_Subject]:
    """One product of every shape; of the products by head, one of every shape and order in memory."""
    found: dict[Shape, _Subject] = {}
    by_head: dict[tuple[Shape, bool], _Subject] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shape = (module.weight.shape[0], module.weight.shape[1])
            found.setdefault(shape, _Subject(name, shape, partial(_linear, module), module.weight))
        elif isinstance(module, Experts):
            for part, weight in (("up", module.up[-1]), ("down", module.down[-1])):  # the last: it may begin anywhere
                shape = (weight.shape[0], weight.shape[1])
                found[shape] = _Subject(f"{name}.{part}", shape, partial(_expert, weight), weight, of_expert=True)
        elif isinstance(module, HeadLinear):
            for turned, weight in ((False, module.weight), (True, module.weight.transpose(1, 2))):
                shape, which = (weight.shape[1], weight.shape[2]), f"{name} by head{', transposed' if turned else ''}"
                by_head.setdefault((shape, turned), _Subject(which, shape, partial(_by_head, weight), weight[0]))
    table = model.unembedding
    shape = (table.shape[1], len(table))
    found[shape] = _Subject("unembed", shape, partial(_unembed, table), table.t())
    return [*found.values(), *by_head.values()]


def _by_head(weight: Tensor, x: Tensor, products: Products) -> Tensor:
    """Of the first of two heads; more would take longer and show nothing new, since each is a product of its own."""
    return products.by_head(x[:, None].expand(-1, len(weight[:2]), -1), weight[:2])[:, 0]


def _linear(linear: Linear, x: Tensor, products: Products) -> Tensor:
    return products.linear(x, linear)


def _expert(weight: Tensor, x: Tensor, products: Products) -> Tensor:
    return products.few(x, weight)


def _unembed(table: Tensor, x: Tensor, products: Products) -> Tensor:
    return products.unembed(x, table)


def _examine_tile(subject: _Subject, x: Tensor, seen: Examination) -> Tensor:
    """The product of x tile by tile, on one thread. Records whether a row's place in the tile or its neighbours matter."""
    shape, only_tile = subject.shape, Products({1: Allowed({subject.shape: (TILE,)})})
    product = lambda rows: subject.product(rows, only_tile)  # noqa: E731
    reference = product(x)
    note = partial(seen.note, subject.name, str([*shape]))
    order = torch.randperm(TILE, generator=seen.generator)
    note("row at another offset of the tile", torch.equal(product(x[:TILE][order]), reference[:TILE][order]))
    alone = torch.zeros(TILE, shape[0], dtype=x.dtype)
    alone[0] = x[3]
    note("row alone in a zero-padded tile", torch.equal(product(alone)[0], reference[3]))
    fast = torch.mv(subject.weight.t(), x[0])
    note("control: matrix-vector product", torch.equal(fast, torch.mm(x[:TILE], subject.weight)[0]), control=True)
    if subject.of_expert:
        library = all(torch.equal(x[:n] @ subject.weight, reference[:n]) for n in _EXPERT_TOTALS)
        note("control: the library's product of an expert's rows", library, control=True)
    return reference


def _on_one_thread(subject: _Subject, x: Tensor, reference: Tensor, seen: Examination) -> Allowed:
    """The row counts that agree with the tile, and the packed variant if it agrees."""
    shape, same = subject.shape, partial(_same, subject, x, reference)
    counts = tuple(c for c in _COUNTS if c <= subject.num_rows and same({1: Allowed({shape: (c, TILE)})}, [c]))
    few = tuple(c for c in _FEW if subject.of_expert and same({1: Allowed({shape: (c,)})}, [subject.num_rows]))
    tiles = Allowed({shape: (*counts, TILE, *few)})
    equal = same({1: tiles}, _TOTALS)
    seen.note(subject.name, str([*shape]), "any number of rows", equal)
    if subject.of_expert:
        seen.note(subject.name, str([*shape]), "any number of an expert's rows", same({1: tiles}, _EXPERT_TOTALS))
    packed = Allowed(tiles.row_counts, frozenset({shape}))
    return packed if can_pack(subject.weight) and same({1: packed}, _PACKED_TOTALS) else tiles


def _on_more_threads(count: int, subject: _Subject, x: Tensor, reference: Tensor, one: Allowed, seen: Examination) -> Allowed:
    """The variants in `one` that agree on `count` threads, alone and mixed with rows that run on one thread."""
    shape, some = subject.shape, Allowed({})

    def all_agree() -> bool:
        nonlocal some
        same = lambda allowed, totals: _same(subject, x, reference, {1: one, count: allowed}, totals)  # noqa: E731
        counts = tuple(c for c in one.row_counts[shape] if same(Allowed({shape: (c,)}), (c, 4 * c)))
        some = Allowed({shape: counts})
        packed = Allowed({shape: counts}, frozenset({shape}))
        if one.packed and same(packed, _PACKED_TOTALS):
            some = packed
        if not same(some, (*_TOTALS, *_EXPERT_TOTALS) if subject.of_expert else _TOTALS):
            some = Allowed({})
        return some == one

    seen.on(count, subject.name, str([*shape]), all_agree)
    return some


def _same(subject: _Subject, x: Tensor, reference: Tensor, allowed: dict[int, Allowed], totals: Iterable[int]) -> bool:
    """Whether the first n rows have the bits of the reference, for every n in `totals` up to len(x)."""
    products = Products(allowed)
    return all(torch.equal(subject.product(x[:n], products), reference[:n]) for n in totals if n <= len(x))


# ---- doctor ----------------------------------------------------------------------------------------------------------

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
