"""The doctor on a CUDA device: compares every kernel at every shape of the model, a row alone and in batches.

The negative controls, which must differ, are the library's product at one row and at many, a softmax over other blocks, and
products of experts and heads whose depth is split, and a recurrence whose chunks begin elsewhere.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool
from replaylens.engine.model.decoder import Decoder, Mixture
from replaylens.engine.model.layers import Conv, HeadLinear, Linear, Norm
from replaylens.engine.model.ops import Recurrence
from replaylens.engine.passes import cuda as cuda_lens
from replaylens.engine.passes.cuda import CanonicalCudaOps, HeadOps, require_supported
from replaylens.engine.proof.doctor import Certificate, Finding
from replaylens.engine.proof.fingerprint import arithmetic_of
from replaylens.engine.records import LensSpec
from replaylens.kernels import attention as canonical
from replaylens.kernels import recurrent_rows
from replaylens.kernels.gpus import gpu_of
from replaylens.kernels.grouped import grouped_matmul
from replaylens.kernels.launch import KV_BLOCK, KV_SPLIT, grouped_rows
from replaylens.kernels.rope import rotate
from replaylens.kernels.route import plan
from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

# ---- comparison ------------------------------------------------------------------------------------------------------
# `compare`: an op of a CUDA device, on a row alone and in batches.

ROWS = (1, 3, 16, 17, 33, 64, 129, 512)
"""batch sizes"""
RECURRED = 150
"""positions of a path through a recurrent layer"""
Random = Callable[..., Tensor]
Examining = Callable[[Decoder, Random, list[Finding]], None]
"""an op, or several; it adds its findings to the list"""


def compare(op: str, x: Tensor, f: Callable[[Tensor], Tensor], findings: list[Finding]) -> None:
    """Compare the first rows of x, at every batch size, with the same rows in the whole batch."""
    whole, shape = f(x.clone()), str(list(x.shape[1:]))
    for count in ROWS:
        same = torch.equal(f(x[:count].clone()), whole[:count])
        findings.append(Finding(op, shape, f"{count} rows against {len(x)}", same))
    findings.append(Finding(op, shape, "row at another offset", torch.equal(f(x[7:40].clone()), whole[7:40])))


# ---- doctor experts --------------------------------------------------------------------------------------------------
# The doctor on a CUDA device, for mixtures of experts: routing, products and sum of a row, alone and in batches.
#
# Other rows of a batch choose other experts, so that an expert has a row, a few, or all of them.


def examine_experts(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """Mutates `findings`: one mixture of every shape."""
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, Mixture) and (shape := module.experts.shape_of("up")) not in seen:
            seen.add(shape)
            x = random(max(ROWS), model.config.d_model)
            for part in (_routing, _hidden, _outputs, _mixed):
                compare(f"{name}{part.__name__.replace('_', ' ')}", x, partial(part, module), findings)
            _company(name, module, x, findings)
            _control_experts(name, module, x[:64], findings)


def _routed(mixture: Mixture, x: Tensor) -> tuple[HeadOps, Tensor, Tensor]:
    ops = HeadOps()
    return ops, *ops.route(ops.linear(x, mixture.router), mixture.routing, mixture.correction)


def _routing(mixture: Mixture, x: Tensor) -> Tensor:
    _, chosen, weights = _routed(mixture, x)
    return torch.cat([chosen.double(), weights.double()], dim=-1)


def _hidden(mixture: Mixture, x: Tensor) -> Tensor:
    ops, chosen, _ = _routed(mixture, x)
    return ops.experts_hidden(x, chosen, mixture.experts, mixture.kind)


def _outputs(mixture: Mixture, x: Tensor) -> Tensor:
    ops, chosen, _ = _routed(mixture, x)
    return ops.experts_out(ops.experts_hidden(x, chosen, mixture.experts, mixture.kind), chosen, mixture.experts)


def _mixed(mixture: Mixture, x: Tensor) -> Tensor:
    return mixture(x, HeadOps(), None, x if mixture.adds(None) else None)


def _company(name: str, mixture: Mixture, x: Tensor, findings: list[Finding]) -> None:
    """The first row, alone and among rows that all go to its experts."""
    ops, chosen, _ = _routed(mixture, x[:1])
    crowd = chosen.expand(len(x), -1).contiguous()
    alone = ops.experts_hidden(x[:1], chosen, mixture.experts, mixture.kind)
    among = ops.experts_hidden(x, crowd, mixture.experts, mixture.kind)
    shape = str(list(mixture.experts.up.shape))
    findings.append(Finding(name, shape, f"alone against {len(x)} rows of the same experts", torch.equal(alone, among[:1])))


def _control_experts(name: str, mixture: Mixture, x: Tensor, findings: list[Finding]) -> None:
    """The depth in two halves, as libraries split it at few rows."""
    _, chosen, _ = _routed(mixture, x)
    weight, top = mixture.experts.up, chosen.shape[1]
    made = plan(chosen, len(weight), grouped_rows(chosen.numel(), len(weight), x.dtype))
    half = x.shape[1] // 2
    whole = grouped_matmul(x, weight, None, made, top)
    first, second = (grouped_matmul(x[:, s], weight[:, s], None, made, top) for s in (slice(half), slice(half, None)))
    equal = torch.equal((first.float() + second.float()).to(x.dtype), whole)
    findings.append(Finding(name, str(list(weight.shape)), "control: the depth in two halves", equal, control=True))


# ---- doctor cuda -----------------------------------------------------------------------------------------------------


def examine(model: Decoder) -> Certificate:
    """Examine every op and shape of the model on its device. Does not raise: the certificate lists the failures.

    The parts run in threads: most of a first examination is the compilation of kernels, during which other threads go on.
    """
    require_supported(model.config, model.dtype, gpu_of(model.device))
    linears: dict[tuple[int, ...], tuple[str, Linear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            linears.setdefault(tuple(module.shape_of("weight")), (name, module))
    parts: list[Examining] = [
        *(_attention, _lens, _unembed, _recurrence, examine_experts, _by_head, _rowwise),
        *(partial(_product, *each) for each in linears.values()),
    ]
    # Triton's interpreter has one state for all threads
    with ThreadPoolExecutor(len(parts) if model.device.type == "cuda" else 1) as pool:
        found = [*pool.map(partial(_examined, model), parts)]
    # libraries keep memory for every thread that calls them
    found += [_examined(model, partial(_control, *each)) for each in linears.values()]
    return Certificate(tuple(chain(*found)), arithmetic_of(model))


@torch.no_grad()
def _examined(model: Decoder, part: Examining) -> list[Finding]:
    generator = torch.Generator(model.device).manual_seed(2024)
    findings: list[Finding] = []
    with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
        part(model, partial(torch.randn, generator=generator, device=model.device, dtype=model.dtype), findings)
    return findings


def _product(name: str, linear: Linear, model: Decoder, random: Random, findings: list[Finding]) -> None:
    compare(name, random(max(ROWS), len(linear.weight)), partial(HeadOps().linear, linear=linear), findings)


def _control(name: str, linear: Linear, model: Decoder, random: Random, findings: list[Finding]) -> None:
    weight = linear.weight
    x = random(256, len(weight))
    equal = torch.equal(x[:1] @ weight, (x @ weight)[:1])
    findings.append(Finding(name, str(list(weight.shape)), "control: the library at one row against 256", equal, control=True))


def _unembed(model: Decoder, random: Random, findings: list[Finding]) -> None:
    unembed = partial(HeadOps().unembed, table=model.stored_unembedding)
    compare("unembed", random(max(ROWS), model.config.d_model), unembed, findings)


def _by_head(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """Products with a weight per head, as latent attention has them: both ways round."""
    ops, seen = HeadOps(), set()
    for name, module in model.named_modules():
        if isinstance(module, HeadLinear):
            for weight in (module.weight, module.weight.transpose(1, 2)):
                heads, depth, _ = weight.shape
                if tuple(weight.shape) in seen:
                    continue
                seen.add(tuple(weight.shape))
                x = random(max(ROWS), heads, depth)
                compare(f"{name} by head", x, partial(ops.by_head, weight=weight), findings)
                first, second = (ops.by_head(x[..., s], weight[:, s]) for s in (slice(depth // 2), slice(depth // 2, None)))
                equal = torch.equal((first.float() + second.float()).to(x.dtype), ops.by_head(x, weight))
                shape = str(list(weight.shape))
                findings.append(Finding(name, shape, "control: the depth in two halves", equal, control=True))


def _rowwise(model: Decoder, random: Random, findings: list[Finding]) -> None:
    c, ops = model.config, HeadOps()
    norms = {(*m.weight.shape, m.kind): (name, m) for name, m in model.named_modules() if isinstance(m, Norm)}
    for name, norm in norms.values():
        x, op = random(max(ROWS), *norm.weight.shape), f"{norm.kind} norm ({name})"
        compare(op, x, partial(ops.norm, norm=norm), findings)
        equal = torch.equal(ops.norm(_packed(x), norm), ops.norm(x, norm))
        findings.append(Finding(op, str(list(x.shape[1:])), "rows of a wider product", equal))
    wide = random(max(ROWS), c.d_mlp * (2 if c.gated_mlp else 1)) * 3
    compare(f"activation {c.activation}", wide, partial(ops.activate, kind=c.activation, gated=c.gated_mlp), findings)
    if c.rotary_dim:
        table = random(1, 2, c.rotary_dim // 2).float()
        compare("rotary", random(max(ROWS), c.num_heads, c.d_head), partial(_rotate, table), findings)


def _packed(x: Tensor) -> Tensor:
    """x as a view of wider rows, whose width is a multiple of 16."""
    width = x[0].numel()
    wide = torch.zeros(len(x), width + 16 - width % 16, dtype=x.dtype, device=x.device)
    wide[:, :width] = x.flatten(1)
    return wide[:, :width].unflatten(1, x.shape[1:])


def _rotate(table: Tensor, x: Tensor) -> Tensor:
    zeros = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    return rotate(x, table, PagedRows(zeros, zeros, zeros[:1, None].contiguous()))


def _lens(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """The parts of Z that are sums over the vocabulary, if the kernel computes them and not the host."""
    if not model.config.plain_logits:
        return

    def sums(rows: Tensor) -> Tensor:
        read = cuda_lens.read_lens(LensSpec(()), model, rows, [0] * len(rows))
        return torch.stack([read["Z.entropy"], read["Z.kl"], read["Z.emitted"]])

    compare("lens statistics", random(max(ROWS), 2, model.config.d_model), lambda x: sums(x).movedim(0, -1), findings)


def _attention(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """One long sequence: all rows at once, compared with single rows and with a window cut elsewhere."""
    c, device = model.config, model.device
    length, size = min(1300, c.max_positions), 16
    pages = -(-length // size)
    _, kv_heads, width = c.kv_shape
    q = random(length, c.num_heads, width)
    k, v = (random((pages + 1) * size, kv_heads, width) for _ in range(2))
    if c.latent is not None:  # values are columns of keys
        v = k[..., : c.latent.rank]
    sinks = random(c.num_heads) if c.sinks else None
    slopes = torch.tensor(c.slopes, dtype=torch.float32, device=device) if c.slopes else None
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]
    shape = f"{c.num_heads} heads of {width}, {kv_heads} kv heads"

    def attend(index: Tensor, kv_block: int = KV_BLOCK, specialised: bool | None = None) -> Tensor:
        sequence = torch.zeros(len(index), dtype=torch.int32, device=device)
        per_tile = rows_per_tile(c.num_heads, kv_heads, v.shape[-1], q.dtype, len(index), gpu_of(q.device))
        tiles = plan_tiles([0] * len(index), per_tile).to(device) if len(index) > 1 else None
        rows = PagedRows(sequence, index.to(torch.int32), table, tiles, per_tile=per_tile if len(index) > 1 else 0)
        return canonical.attention(
            q[index],
            k,
            v,
            rows,
            c.scale,
            c.attn_softcap,
            page_size=size,
            kv_block=kv_block,
            sinks=sinks,
            slopes=slopes,
            specialised=specialised,
        )

    everything = torch.arange(length, device=device)
    whole = attend(everything, specialised=False)
    note = lambda check, equal, **more: findings.append(Finding("attention", shape, check, equal, **more))  # noqa: E731
    singles = torch.linspace(0, length - 1, 9, dtype=torch.float32).long().to(device)
    note("decode against prefill", all(torch.equal(attend(p[None]), whole[p[None]]) for p in singles))
    cut = torch.arange(length // 3 + 5, min(length, length // 3 + 70), device=device)
    note("window cut elsewhere", torch.equal(attend(cut), whole[cut]))
    pairs = rows_per_tile(c.num_heads, kv_heads, v.shape[-1], q.dtype, length, gpu_of(q.device)) * (c.num_heads // kv_heads)
    plain = sinks is None and slopes is None and c.latent is None and length > 1
    if plain and canonical.can_prefill(q, k, v, pairs, size, KV_BLOCK, KV_SPLIT):
        note("specialised warpgroups against others", torch.equal(attend(everything, specialised=True), whole))
    if length > 2 * KV_BLOCK:
        other = attend(everything, kv_block=32)
        note("control: a softmax over blocks of 32 keys", torch.equal(other, whole), control=True)


def _recurrence(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """A path through the first recurrent layer: in one pass, in others, and from another position on."""
    config, device, length, size = model.config, model.device, RECURRED, 16
    mixer, layers = config.mixer, config.layers_with("mixer")
    if mixer is None:
        return
    conv = next(module for module in model.modules() if isinstance(module, Conv))
    x, v = random(length, mixer.channels), random(length, mixer.heads, mixer.d_value)
    k = random(length, mixer.key_heads, mixer.d_key) / max(1, mixer.d_key)
    decay, strength = -random(length, mixer.heads).float().abs(), random(length, mixer.heads).sigmoid()
    table = torch.tensor([range(1, 13), [13] * 12], dtype=torch.int32, device=device)  # of the path, and a spare page

    def walk(ends: Sequence[int], first: int = 0, company: int = 0) -> Tensor:
        """company  rows of others beside single rows: together they are many, and take other kernels"""
        cache, out, start = KVCache(config, PagePool(13, size), model.dtype, device.type, kernels=True), list[Tensor](), 0
        for end in ends:
            count, more = end - start, company if end - start == 1 else 0
            rows = torch.cat([torch.arange(start, end, device=device), torch.zeros(more, dtype=torch.int64, device=device)])
            mine = torch.arange(len(rows), device=device) < count
            at = torch.where(mine, first + rows, 0).to(torch.int32)
            ops = CanonicalCudaOps(cache, PagedRows((~mine).to(torch.int32), at, table, single=count == 1))
            out.append(ops.short_conv(x[rows], conv, layers[0])[:count])
            if mixer.heads:
                rule = strength[rows] if mixer.kind == "delta" else None
                given = Recurrence(k[rows], k[rows], v[rows], decay[rows], rule)
                out[-1] = torch.cat([out[-1], ops.recur(given, layers[0])[:count].flatten(1)], dim=1)
            start = end
        return torch.cat(out)

    whole, shape = walk([length]), f"{mixer.channels} channels, states of {mixer.state_shape}"
    note = lambda check, equal, **more: findings.append(Finding("recurrence", shape, check, equal, **more))  # noqa: E731
    singles = [1, 2, 3, 62, 63, 64, 65, 66, length]
    note("decode against prefill", torch.equal(walk(singles), whole))
    note("passes cut elsewhere", torch.equal(walk([17, 63, 64, length - 3, length]), whole))
    if mixer.heads:
        many = walk(singles, company=-(-recurrent_rows.MANY // mixer.heads))
        note("decode among many against prefill", torch.equal(many, whole))
        moved = walk([length], first=7)
        note("control: chunks that begin elsewhere", torch.equal(moved, whole), control=True)
