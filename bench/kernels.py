"""Kernels one by one on a GPU against the library, Llama-3.1-8B shapes in bfloat16. Every line is checked before
it is timed; calls are replayed as CUDA graphs, ours and theirs in turns.

`against` makes a line of any kernel; a new kernel is a generator that yields such lines.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Line, Lines, case, seconds
from bench.subjects import difference

BEYOND_CACHE = 200_000_000
"""bytes that a round of calls must touch, so that weights come from memory as they do in a model"""
WARM_S = 0.03
"""clocks need a while to rise after the host was busy with something else"""
KERNEL: dict[str, Any] = dict(ours="ours", baseline="theirs", needs="gpu", clock="device", unit="us", rounds=7, warm=0)
ROWS = (1, 64, 512, 2048)
Sets = Sequence[tuple[Any, ...]]


class Replay:
    """A graph of at least four calls, one per set of arguments in turn; calling it replays all of them."""

    def __init__(self, call: Callable[..., Any], sets: Sets = ((),)) -> None:
        self.call, self.sets = call, list(sets) * max(1, 4 // len(sets))  # the graph reads their tensors: they must live
        for arguments in self.sets[:2]:  # compile outside the capture
            call(*arguments)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for arguments in self.sets:
                call(*arguments)

    def __call__(self) -> None:
        self.graph.replay()

    def __len__(self) -> int:
        return len(self.sets)


def against(
    what: str, check: bool, ours: Callable[..., Any], theirs: Callable[..., Any], sets: Sets = ((),),
    their_sets: Sets | None = None,
) -> Line:  # fmt: skip
    """A line of two kernels, after a common warm-up. A failed check is not timed."""
    if not check:
        return Line(what, check=False)
    arms = {"ours": Replay(ours, sets), "theirs": Replay(theirs, sets if their_sets is None else their_sets)}
    spent = 0.0
    while spent < WARM_S:
        spent += sum(seconds(arm, "device")[0] for arm in arms.values())
    return Line(what, dict(arms), per={name: len(arm) for name, arm in arms.items()})


def copies(*tensors: Tensor) -> int:
    """How many sets of these tensors a round needs to be larger than the cache."""
    return max(1, -(-BEYOND_CACHE // sum(x.numel() * x.element_size() for x in tensors)))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


# Products

WEIGHTS = {
    "qkv": (4096, 6144), "attention out": (4096, 4096), "gate+up": (4096, 28672), "down": (14336, 4096),
    "unembed": (4096, 128256),
}  # fmt: skip


@case("kernels-matmul", **KERNEL, quick={"rows": (1,)})
def matmul_(rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)) -> Lines:
    """Canonical products against the library's, on the shapes of an 8B decoder in bf16, weights stored [K, N] and [N, K]."""
    from replaylens.kernels.matmul import matmul

    def right(x: Tensor, w: Tensor, out: Tensor) -> bool:
        """A few rows against float64, and a row alone against the batch."""
        some = torch.arange(0, len(x), max(1, len(x) // 4), device=x.device)[:4]
        close = difference(out[some], x[some].double() @ w.double()) < 8e-3
        return close and torch.equal(matmul(x[-1:], w), out[-1:])

    for name, (depth, columns) in WEIGHTS.items():
        for layout in ("[K, N]", "[N, K]"):
            first = randn(columns, depth) / depth**0.5
            stored = [first, *(randn(columns, depth) / depth**0.5 for _ in range(copies(first) - 1))]
            sets = [(w.T if layout == "[N, K]" else w.T.contiguous(),) for w in stored]
            for count in rows:
                x, (w,) = randn(count, depth), sets[0]
                out = torch.full((count, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
                check = right(x, w, matmul(x, w, out=out))
                ours, theirs = lambda w: matmul(x, w, out=out), lambda w: torch.mm(x, w, out=out)
                found = yield against(f"{name} {layout} rows {count}", check, ours, theirs, sets)
                found.note(library_equal=torch.equal(torch.mm(x, w), matmul(x, w)))


@case("kernels-lens", **{**KERNEL, "rounds": 3}, quick={"rows": (1,)})
def lens_(rows: tuple[int, ...] = (1, 64, 512), depth: int = 4096, vocab: int = 128256, layers: int = 33) -> Lines:
    """All of the lens (norm, unembed, entropy, KL, top-8, two targets) against the bare unembed products alone. Rows of a
    33-point residual stream, 4096 x 128256, bf16. The library's products write [rows, vocab] logits layer by layer and do
    nothing with them; the lens leaves a few numbers per row."""
    from replaylens.kernels import reference
    from replaylens.kernels.lens import LensStats, lens

    def right(found: LensStats, x: Tensor, w: Tensor, weight: Tensor, targets: Tensor) -> bool:
        """The first row of the first and the last layer against float64."""
        h = reference.norm(x[:, 0].double(), weight.double(), None, 1e-5, "rms").bfloat16().double()
        z = h[[0, layers - 1]] @ w.double()
        for i, layer in enumerate((0, layers - 1)):
            want = reference.lens(z[i : i + 1], z[1:], targets[:1], 8)
            for name in ("log_sum_exp", "entropy", "kl", "top_log_probs", "target_log_probs"):
                got = getattr(found, name)[layer, 0].double().flatten()
                if not torch.allclose(got, want[name].flatten(), rtol=1e-3, atol=2e-2):
                    return False
        return True

    weight, stored = torch.ones(depth, device="cuda", dtype=torch.bfloat16), randn(vocab, depth) * 2 / depth**0.5
    for layout, w in (("[N, K]", stored.T), ("[K, N]", stored.T.contiguous())):
        for count in rows:
            x, targets = randn(layers, count, depth), torch.randint(vocab, (count, 2), device="cuda")
            out = torch.empty(count, vocab, device="cuda", dtype=torch.bfloat16)
            ours = lambda: lens(x, w, weight, final=layers - 1, targets=targets, k=8)  # noqa: E731
            bare = lambda: [torch.mm(layer, w, out=out) for layer in x]  # noqa: E731
            check = right(ours(), x, w, weight, targets)
            yield against(f"{layers} layers x {count} rows {layout}", check, ours, bare)


# Elementwise


@case("kernels-norm", **KERNEL)
def norm_(rows: tuple[int, ...] = ROWS, width: int = 4096) -> Lines:
    """RMSNorm against torch, width 4096, bf16."""
    from replaylens.kernels import reference
    from replaylens.kernels.norm import norm

    weight = randn(width)
    for count in rows:
        x = randn(count, width)
        sets = [(torch.randn_like(x),) for _ in range(min(64, copies(x)))]
        out = norm(x, weight, out=torch.full_like(x, float("nan")))
        close = difference(out, reference.norm(x.double(), weight.double(), None, 1e-5, "rms")) < 8e-3
        check = close and torch.equal(norm(x[-1:], weight), out[-1:])
        theirs = lambda x: F.rms_norm(x, (width,), weight, 1e-5)  # noqa: E731
        yield against(f"norm rows {count}", check, lambda x: norm(x, weight), theirs, sets)


@case("kernels-activation", **KERNEL)
def activation_(rows: tuple[int, ...] = ROWS, width: int = 14336) -> Lines:
    """silu(gate) * up against torch, width 14336, bf16."""
    from replaylens.kernels import reference
    from replaylens.kernels.norm import activation

    for count in rows:
        x = randn(count, 2 * width)
        sets = [(torch.randn_like(x),) for _ in range(min(64, copies(x)))]
        check = difference(activation(x, "silu", gated=True), reference.activation(x.double(), "silu", True)) < 8e-3
        theirs = lambda x: F.silu(x[:, :width]) * x[:, width:]  # noqa: E731
        yield against(f"gated silu rows {count}", check, lambda x: activation(x, "silu", True), theirs, sets)


@case("kernels-rope", **KERNEL)
def rope_(rows: tuple[int, ...] = ROWS, heads: int = 32, kv_heads: int = 8, d_head: int = 128) -> Lines:
    """Rotate q and k and write k and v to their pages against the same in torch, 32 + 8 + 8 heads of 128, bf16."""
    from replaylens.kernels import reference
    from replaylens.kernels.launch import PAGE_SIZE
    from replaylens.kernels.rope import rotate_and_store
    from replaylens.kernels.shared import PagedRows

    for count in rows:
        q, k, v = randn(count, heads + 2 * kv_heads, d_head).split([heads, kv_heads, kv_heads], dim=1)
        angle = torch.rand(4096, d_head // 2, device="cuda")
        table = torch.stack([angle.cos(), angle.sin()], dim=1)
        number = torch.arange(count, device="cuda", dtype=torch.int32)
        pages = torch.arange(1, -(-count // PAGE_SIZE) + 1, device="cuda", dtype=torch.int32).view(1, -1)
        where = PagedRows(torch.zeros_like(number), number, pages)
        slot = reference.slots(where.sequence, number, pages, PAGE_SIZE)
        empty = torch.zeros((pages.numel() + 1) * PAGE_SIZE, kv_heads, d_head, device="cuda", dtype=torch.bfloat16)
        k_cache, v_cache, k_other, v_other = (empty.clone() for _ in range(4))

        def library() -> Tensor:
            k_other[slot] = reference.rotate(k, table, number)
            v_other[slot] = v
            return reference.rotate(q, table, number)

        ours = lambda: rotate_and_store(q, k, v, table, where, k_cache, v_cache)  # noqa: E731
        check = difference(ours(), reference.rotate(q.double(), table.double(), number)) < 8e-3
        check &= difference(k_cache[slot], reference.rotate(k.double(), table.double(), number)) < 8e-3
        check &= torch.equal(v_cache[slot], v)
        yield against(f"rotate and store rows {count}", check, ours, library)


# Choosing tokens


@case("kernels-sample", **KERNEL)
def sample_(rows: tuple[int, ...] = (1, 8, 16, 64, 256), vocab: int = 128256) -> Lines:
    """Draw a token per row from given logits against the library's softmax and multinomial, vocabulary 128256, float32."""
    from replaylens.kernels import reference
    from replaylens.kernels.sample import sample_logits

    for count in rows:
        logits, seed = randn(count, vocab, dtype=torch.float32), torch.arange(count, device="cuda")
        noise = (seed, seed.int(), torch.ones(count, device="cuda", dtype=torch.float64))
        some = slice(0, 16)
        want = reference.sample(logits[some], *(y[some] for y in noise))
        check = torch.equal(sample_logits(logits, *noise)[0][some], want)
        theirs = lambda: torch.multinomial(logits.softmax(-1), 1)  # noqa: E731
        yield against(f"from logits rows {count} (library: multinomial)", check, lambda: sample_logits(logits, *noise), theirs)


@case("kernels-judge", **{**KERNEL, "clock": "wall", "rounds": 50})
def judge_(chains: int = 64, drafts: int = 16) -> Lines:
    """Which of 64 chains' 16 drafts stand, on the device, against copying all chosen tokens to the host and comparing there.
    The host has to wait for the answer either way."""
    from replaylens.engine.loop.commit import judge as judge_on_host
    from replaylens.kernels import reference
    from replaylens.kernels.sample import judge

    chosen, drafted = (torch.randint(2, shape, device="cuda") for shape in ((chains * (drafts + 1),), (chains, drafts)))
    first, length = torch.arange(chains, device="cuda") * (drafts + 1), torch.full((chains,), drafts, device="cuda")
    on_host = drafted.tolist()

    def compare_on_host() -> None:
        said = chosen.tolist()
        for i, chain in enumerate(on_host):
            judge_on_host([chain], lambda _, row, i=i: said[i * (drafts + 1) + row])

    want = reference.judge(chosen, drafted, first, length)
    check = all(torch.equal(a, b) for a, b in zip(judge(chosen, drafted, first, length), want, strict=True))
    ours = lambda: torch.stack(judge(chosen, drafted, first, length)).tolist()  # noqa: E731
    yield Line(f"{chains} chains of {drafts}", {"ours": ours, "theirs": compare_on_host}, check=check)


# Attention

HEADS, KV_HEADS, D_HEAD, SCALE = 32, 8, 128, 128**-0.5


def paged_cache(sequences: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, page table) with pages in random order; page 0 is empty."""
    from replaylens.kernels.launch import PAGE_SIZE

    pages = -(-keys // PAGE_SIZE)
    table = (torch.randperm(sequences * pages, device="cuda", dtype=torch.int32) + 1).view(sequences, pages)
    k, v = (randn((sequences * pages + 1) * PAGE_SIZE, KV_HEADS, D_HEAD) for _ in range(2))
    k[:PAGE_SIZE], v[:PAGE_SIZE] = 0, 0
    return k, v, table


def contiguous(x: Tensor, table: Tensor, keys: int) -> Tensor:
    """[sequences, kv_heads, keys, width], what torch wants."""
    from replaylens.kernels.launch import PAGE_SIZE

    return x.view(-1, PAGE_SIZE, *x.shape[1:])[table.long()].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous()


def right(q: Tensor, k: Tensor, v: Tensor, rows: Any, out: Tensor, chosen: list[int]) -> bool:
    """Some rows against float64, and each alone against the batch."""
    from replaylens.kernels import reference
    from replaylens.kernels.attention import attention
    from replaylens.kernels.launch import PAGE_SIZE
    from replaylens.kernels.shared import PagedRows

    index = torch.tensor(chosen, device=q.device)
    sequence, position = rows.sequence[index], rows.position[index]
    wide = (q[index].double(), k.double(), v.double(), sequence, position, rows.page_table, PAGE_SIZE, SCALE)
    alone = attention(q[index], k, v, PagedRows(sequence, position, rows.page_table), SCALE)
    return difference(out[index], reference.attention(*wide)) < 8e-3 and torch.equal(alone, out[index])


@case("kernels-attention", **KERNEL)
def attention_(
    decoded: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (8, 2048), (64, 512), (64, 2048), (1, 8192), (8, 8192)),
    prompts: tuple[tuple[int, int], ...] = ((1, 512), (4, 512), (1, 2048), (1, 4096), (1, 8192), (1, 32768)),
) -> Lines:
    """Canonical paged attention against torch's attention on contiguous keys, 32 heads over 8, head size 128, bf16."""
    for sequences, keys in decoded:
        yield decode(sequences, keys)
    for sequences, length in prompts:
        q, k, v, rows, ours, theirs = prefill(sequences, length)
        chosen = [0, length // 2, length - 1, len(q) - 1]
        yield against(f"prefill {sequences} x {length} rows", right(q, k, v, rows, ours(), chosen), ours, theirs)


def decode(sequences: int, keys: int) -> Line:
    """One new row of every sequence."""
    from replaylens.kernels.attention import Workspace, attention
    from replaylens.kernels.launch import KV_SPLIT
    from replaylens.kernels.shared import PagedRows

    k, v, table = paged_cache(sequences, keys)
    sets = [(k, v), *((torch.randn_like(k), torch.randn_like(v)) for _ in range(copies(k, v) - 1))]
    number = torch.arange(sequences, device="cuda", dtype=torch.int32)
    q, rows = randn(sequences, HEADS, D_HEAD), PagedRows(number, torch.full_like(number, keys - 1), table, max_keys=keys)
    out = torch.full_like(q, float("nan"))
    space = Workspace.of(sequences, KV_HEADS, -(-keys // KV_SPLIT), 16, D_HEAD, q.device)
    check = right(q, k, v, rows, attention(q, k, v, rows, SCALE, out=out), [0, sequences - 1])
    ours = lambda k, v: attention(q, k, v, rows, SCALE, out=out, workspace=space)  # noqa: E731
    theirs = lambda k, v: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)  # noqa: E731
    flat = [(contiguous(k, table, keys), contiguous(v, table, keys)) for k, v in sets]
    return against(f"decode {sequences} x {keys} keys", check, ours, theirs, sets, flat)


def prefill(sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor, Any, Callable[..., Tensor], Callable[[], Tensor]]:
    """(q, k, v, `PagedRows` of whole prompts with the tiles of the engine; our attention, torch's)."""
    from replaylens.kernels.attention import attention
    from replaylens.kernels.gpus import gpu_of
    from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

    k, v, table = paged_cache(sequences, length)
    numbers = [s for s in range(sequences) for _ in range(length)]
    per_tile = rows_per_tile(HEADS, KV_HEADS, D_HEAD, k.dtype, length, gpu_of(k.device))
    position = torch.arange(length, device="cuda", dtype=torch.int32).repeat(sequences)
    owner = torch.tensor(numbers, device="cuda", dtype=torch.int32)
    rows = PagedRows(owner, position, table, plan_tiles(numbers, per_tile).cuda(), length, per_tile)
    q = randn(sequences * length, HEADS, D_HEAD)
    out, flat = torch.full_like(q, float("nan")), q.view(sequences, length, HEADS, D_HEAD).transpose(1, 2).contiguous()
    keys, values = contiguous(k, table, length), contiguous(v, table, length)
    ours = lambda **how: attention(q, k, v, rows, SCALE, out=out, **how)  # noqa: E731
    theirs = lambda: F.scaled_dot_product_attention(flat, keys, values, is_causal=True, enable_gqa=True)  # noqa: E731
    return q, k, v, rows, ours, theirs


@case("long-gpu.attention", ours="ours", baseline="sdpa", others=("general",), aim=">= 0.85", needs="gpu", clock="device")
def attention_of_prompts(lengths: tuple[int, ...] = (32768, 8192, 2048)) -> Lines:
    """Attention of a prompt in one pass, one layer, with both kernels, against SDPA on contiguous keys."""
    for length in lengths:
        *_, ours, theirs = prefill(1, length)
        general = partial(ours, specialised=False)
        same = torch.equal(ours().clone(), general())
        found = yield Line(f"attention of {length} rows, SDPA", {"ours": ours, "sdpa": theirs, "general": general}, check=same)
        if found.values:
            found.note(ratio_general=found.values["sdpa"] / found.values["general"])
