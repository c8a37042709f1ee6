"""Attention of the fast path: the right values within rounding, an order of summation that depends on the company."""

import os
import subprocess
import sys

import pytest
import torch

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps, device_rows
from replaylens.kernels.shared import PagedRows, plan_tiles
from replaylens.kernels.split import split_attention, split_length
from replaylens.weights import loading
from tests.devices import swept
from tests.kernels.test_attention import PAGE, Setting, lengths, setting, some


def split_rows(s: Setting, chosen: list[int], per_tile: int = 0) -> PagedRows:
    index = torch.tensor(chosen, device=s.q.device)
    tiles = plan_tiles([s.sequences[i] for i in chosen], per_tile, len(chosen) + 1).to(s.q.device) if per_tile else None
    return PagedRows(s.rows.sequence[index], s.rows.position[index], s.rows.page_table, tiles, per_tile=per_tile)


def attend(s: Setting, chosen: list[int], split: int, per_tile: int = 0, softcap: float = 0.0, window: int = 0) -> torch.Tensor:
    block = s.blocks.get("kv_block", 64)
    rows = split_rows(s, chosen, per_tile)
    return split_attention(s.q[chosen], s.k, s.v, rows, 0.3, softcap, window, PAGE, block, split * block)


@pytest.mark.parametrize(
    ("softcap", "window", "split"),
    swept([(0.0, 0, 1), (5.0, 19, 1), (0.0, 600, 3), (5.0, 0, 100)], (0.0, 600, 3), (5.0, 0, 100)),
)
def test_agrees_with_float64_for_every_split(case, softcap, window, split):
    s = setting(case, lengths(case))
    chosen = some(case)[:4]
    case.close(attend(s, chosen, split, softcap=softcap, window=window), s.truth(chosen, softcap=softcap, window=window))


@pytest.mark.parametrize("rest", [0, 6])
def test_sinks_slopes_and_values_that_are_columns_of_keys(case, rest):
    s = setting(case, lengths(case), heads=6, kv_heads=1 if rest else 2, d_head=13 + rest)
    chosen = some(case)[:2]
    s.v = s.k[..., :13] if rest else s.v
    sinks, slopes = case.randn(6, seed=9), case.randn(6, seed=8).float() / 64
    want = s.truth(chosen, sinks=sinks.double(), slopes=slopes.double())
    block = s.blocks.get("kv_block", 64)
    for split in (1, 100):
        sizes = (0.3, 0.0, 0, PAGE, block, split * block)
        case.close(split_attention(s.q[chosen], s.k, s.v, split_rows(s, chosen), *sizes, sinks, slopes), want)


def test_tiles_of_several_rows(case):
    """A prefill in tiles, the last of them empty, gives the values of each row alone."""
    s = setting(case, lengths(case))
    rows = list(range(100, 400)) if case.gpu else list(range(20, 28))
    case.close(attend(s, rows, 2, per_tile=4), attend(s, rows, 2).double())


def test_the_split_moves_bits(case):
    """Negative control: this is why drafts are verified. With the canonical kernel, no schedule moves a bit."""
    s = setting(case, lengths(case))
    chosen = some(case)[:3]
    assert not torch.equal(attend(s, chosen, 1), attend(s, chosen, 100))
    assert torch.equal(s.attend(chosen, split=True), s.attend(chosen, split=False))


def test_more_requests_get_longer_splits():
    """At 132 multiprocessors and 3 KV heads: a request alone has one block per program, 128 requests have one program each."""
    found = [split_length(3 * requests, 1024, 64, 132) for requests in (1, 8, 32, 64, 128)]
    assert found == [64, 128, 384, 512, 1024]
    assert split_length(3, 1, 64, 132) == 64 and split_length(10**6, 5000, 64, 132) == 5056


def test_a_split_is_a_multiple_of_the_block(case):
    s = setting(case, [5])
    with pytest.raises(ValueError, match="split 7 is not a multiple of kv_block 64"):
        split_attention(s.q, s.k, s.v, s.rows, 0.3, split=7)


def test_a_fast_pass_computes_the_same_function_and_leaves_canonical_bits_alone(case):
    """Same values within rounding. A canonical pass after a fast one has the bits of one before it."""
    config = ModelConfig(2, 32, 4, 2, 8, 48, 61, 256, rotary_dim=8)
    model = loading.build(config, dict(Decoder(config).initialize(0).state_dict()), case.dtype).to(case.device)
    pool = PagePool(32, PAGE)
    cache = KVCache(config, pool, case.dtype, case.device, kernels=True)
    cache.data[:, :, PAGE:] = case.randn(*cache.data[:, :, PAGE:].shape)  # as if earlier passes had written it
    tables, last = [PageTable(), PageTable()], (69, 2)
    for table, position in zip(tables, last, strict=True):
        pool.reserve(table, 0, position + 1)
    segments = [Segment(table, position, [5 + position % 7], 1) for table, position in zip(tables, last, strict=True)]

    def run(ops: type[CanonicalCudaOps]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = Batch(segments, pool, case.device)
        made = ops(cache, device_rows(batch, cache))
        residual = model(batch.tokens, batch.positions, made)[: batch.num_rows]
        return residual, model.logits(residual, made)

    before, fast, after = run(CanonicalCudaOps), run(FastCudaOps), run(CanonicalCudaOps)
    assert fast[1].dtype == torch.float32
    for mine, canonical, again in zip(fast, before, after, strict=True):
        case.close(mine, canonical.double(), slack=4)
        assert torch.equal(canonical, again) and not torch.equal(mine, canonical)


COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from replaylens.kernels import recurrent, recurrent_rows, split
from replaylens.kernels.attention import PagedRows

launched = []
JITFunction.run = lambda self, *args, grid, warmup, **options: launched.append((self, args, options))
split.num_multiprocessors = lambda device: 132
types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
for number in (1, 400):  # several splits, one split
    q, cache = (torch.zeros(n, 3, 64, dtype=torch.bfloat16) for n in (number, 1024))
    rows = PagedRows(*(torch.zeros(n, dtype=torch.int32) for n in (number, number)), torch.zeros(1, 64, dtype=torch.int32))
    split.split_attention(q, cache, cache, rows, 0.125)
zeros = lambda *shape, dtype=torch.int32: torch.zeros(*shape, dtype=dtype)
memory = recurrent_rows.RecurrentMemory(torch.zeros(128, 424), torch.zeros(2, 4, 32, 64), (32, 96, 352), zeros(2), zeros(2), 64)
for single, many in ((True, 0), (True, 1 << 20), (False, 0)):
    recurrent_rows.MANY, rows = many, PagedRows(zeros(3), zeros(3), zeros(3, 2), single=single)
    q, v, beta = (zeros(3, *shape, dtype=torch.bfloat16) for shape in ((2, 32), (4, 64), (4,)))
    recurrent.recur(q, q, v, torch.zeros(3, 4), beta, memory, rows)
for kernel, args, options in launched:
    named = dict(zip((p.name for p in kernel.params), args, strict=True))
    fixed = {p.name: named[p.name] for p in kernel.params if p.is_constexpr}
    kinds = {int: "i32", float: "fp32"}
    types_of = {
        name: "constexpr" if name in fixed else types[x.dtype] if isinstance(x, torch.Tensor) else kinds[type(x)]
        for name, x in named.items()
    }
    source = ASTSource(fn=kernel, signature=types_of, constexprs=fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled")
"""


@pytest.mark.slow
def test_compiles_for_a_gpu_on_machines_without_one(tmp_path):
    """The interpreter has no types. A tensor of another dtype where nothing is split did not compile. Of recurrences: three
    kernels of many rows, one of few, and five of a walk."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["compiled"] * 11, done.stderr[-2000:]
