"""A GPU is a row of facts, and every tile that its rules choose fits: by the rules, and by what Triton compiles for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replaylens.kernels import gpus, launch
from replaylens.kernels.attention import attention
from replaylens.kernels.gpus import KNOWN, MEASURED, gpu_of, imposed, known, read
from replaylens.kernels.grouped import grouped_matmul
from replaylens.kernels.launch import (
    GemmTile,
    attention_bytes,
    attention_tile,
    fitted,
    gemm_tile,
    grouped_tile,
    heads_together,
    product_bytes,
)
from replaylens.kernels.lens import lens
from replaylens.kernels.matmul import matmul
from replaylens.kernels.route import plan
from replaylens.kernels.shared import PagedRows

ROOT = Path(__file__).parents[2]
HALF = (torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024, 8192)
COLUMNS = (64, 256, *(512 * n for n in range(1, 32)), 131072)

# ---- facts -----------------------------------------------------------------------------------------------------------


def test_known_gpus_have_the_limits_of_the_programming_guide() -> None:
    """Bytes of shared memory per block, by compute capability: the guide's KiB of a multiprocessor without the system's one."""
    guide = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert {gpu.capability for gpu in KNOWN.values()} == set(guide)
    for name, gpu in KNOWN.items():
        assert gpu.name == name and gpu.shared == 1024 * guide[gpu.capability] and str(gpu).startswith(f"{name}: sm_")
        assert gpu.copies == (gpu.capability >= (9, 0)) and gpu.specialises == (gpu.capability == (9, 0))


def test_a_device_tells_its_facts() -> None:
    found = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090", major=8, minor=9, multi_processor_count=128, total_memory=25_393_692_672,
        shared_memory_per_multiprocessor=102_400, memory_clock_rate=10_501_000, memory_bus_width=384,
    )  # fmt: skip
    gpu = read(found)
    assert (gpu.shared, gpu.multiprocessors, gpu.copies, gpu.specialises) == (101_376, 128, False, False)
    assert gpu.bandwidth == pytest.approx(1008e9, rel=1e-3) and gpu.memory == found.total_memory
    del found.shared_memory_per_multiprocessor, found.memory_clock_rate  # of an older torch: by compute capability
    assert read(found).shared == 101_376 and read(found).bandwidth == 0


def test_facts_are_imposed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    before = gpu_of(here)
    with imposed("4090") as gpu:
        assert gpu_of(here) is gpu is KNOWN["4090"]
        with imposed("A100"):
            assert gpu_of(here).name == "A100"
        assert gpu_of(here) is gpu
    assert gpu_of(here) is before
    monkeypatch.setenv(gpus.IMPOSED, "L4")
    gpus._of.cache_clear()
    assert gpu_of(here).name == "L4"
    monkeypatch.delenv(gpus.IMPOSED)
    gpus._of.cache_clear()


def test_an_unknown_name() -> None:
    for call in (known, lambda name: imposed(name).__enter__()):
        with pytest.raises(ValueError, match=r"Unknown GPU '6090'\. Use one of A100, A10, 3090"):
            call("6090")


# ---- rules -----------------------------------------------------------------------------------------------------------


def chosen_products(gpu: gpus.Gpu, dtype: torch.dtype) -> set[tuple[GemmTile, bool]]:
    """Every tile that the rules choose, and whether it is of two products at once."""
    copies = (False, True) if gpu.copies else (False,)
    found = {
        (gemm_tile(rows, 0, columns, dtype, gpu, turned, copied), False)
        for rows in ROWS for columns in COLUMNS for turned in (False, True) for copied in copies
    }  # fmt: skip
    heights = (16,) if dtype == torch.float32 else (16, 32, 64, 128)
    return found | {
        (grouped_tile(h, n, dtype, gated, gpu), gated) for h in heights for n in (8, 4096) for gated in (False, True)
    }


@pytest.mark.parametrize("name", KNOWN)
def test_every_tile_fits_by_the_rule(name: str) -> None:
    gpu = KNOWN[name]
    for dtype in (*HALF, torch.float32):
        for tile, gated in chosen_products(gpu, dtype):
            assert product_bytes(tile, dtype, gpu, gated) <= gpu.shared
            assert tile.stages > 1 and tile.depth >= 16, "loads are on their way while others are multiplied"
        for d_head in (16, 64, 96, 128, 256, 512):
            for heads, kv_heads in ((1, 1), (8, 1), (32, 8), (71, 1), (128, 1), (64, 4)):
                if d_head == 512 and (kv_heads > 1 or (dtype == torch.float32 and gpu.shared < 200_000)):
                    continue  # latents have one KV head, and are refused where nothing fits
                group = heads_together(heads, kv_heads, d_head, dtype, gpu)
                assert heads // kv_heads % group == 0
                for pairs in (1, 16, 17, 64, 65, 1000):
                    tile = attention_tile(max(pairs, group), d_head, dtype, gpu, group)
                    assert group <= tile.rows and attention_bytes(tile, d_head, dtype, gpu) <= gpu.shared


def test_what_was_measured_stays() -> None:
    """On the H200 the rule changes no tile: each is one of the tables as they were measured."""
    tables = {launch._few_rows(r, c, p, 132) for r in (1, 16, 17, 32, 33, 64) for c in COLUMNS for p in (False, True)}
    tables |= {tile for tile, _ in (*launch._PERSISTENT, *launch._PLAIN)}
    assert {tile for tile, _ in chosen_products(MEASURED, torch.bfloat16) if tile.rows and not tile.rows < 16} >= tables
    for tile in tables:
        assert fitted(tile, torch.bfloat16, MEASURED) == tile
    assert GemmTile(16, 128, 128, 4, 4) in tables
    assert fitted(GemmTile(16, 128, 128, 4, 4), torch.bfloat16, KNOWN["4090"]) == GemmTile(16, 128, 128, 4, 3)
    for pairs, d_head, split in ((4, 128, True), (64, 64, False), (1000, 128, False), (1000, 256, False)):
        measured = launch._measured_attention(pairs, d_head, torch.bfloat16, 4, split, False)
        assert attention_tile(pairs, d_head, torch.bfloat16, MEASURED, 4, split) == measured


def test_canonical_constants_are_those_of_every_gpu() -> None:
    """They set the order of sums: with any facts the lens, norms and blocks of keys are the same."""
    found = set()
    for name in KNOWN:
        with imposed(name):
            shapes = tuple(launch.lens_shape(dtype) for dtype in (*HALF, torch.float32))
            found.add((launch.KV_BLOCK, launch.KV_SPLIT, *map(launch.norm_shape, (64, 4096)), *map(repr, shapes)))
    assert len(found) == 1


def test_a_tile_that_cannot_fit_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"32 query heads of 256 per KV head in float32 takes [\d,]+ bytes .* block of 4090 has"
    ):
        attention_tile(32, 256, torch.float32, KNOWN["4090"], 32)
    with pytest.raises(ValueError, match="No tile of 4096 rows fits into a block of 4090"):
        fitted(GemmTile(4096, 256, 64, 8, 3), torch.bfloat16, KNOWN["4090"])


@pytest.mark.parametrize("name", ["A100", "4090", "5090"])
def test_imposed_facts_move_no_bit(name: str, case: Any, same: Any) -> None:
    """Products, attention with heads of up to 256, experts and the lens, with the device's own facts and with others."""
    device = torch.device(case.device)
    at = case.tensor(list(range(19))), case.tensor([list(range(1, 3))])
    rows = PagedRows(torch.zeros_like(at[0]), at[0], at[1])
    chosen = torch.arange(12, device=device).view(6, 2) % 3

    def computed() -> list[torch.Tensor]:
        found = [matmul(case.randn(n, 96), case.randn(96, 200, seed=1)) for n in (1, 5, 40)]
        for d_head in (64, 256):
            q, k, v = (case.randn(n, heads, d_head, seed=n) for n, heads in ((19, 4), (64, 2), (48, 2)))
            found.append(attention(q, k, torch.cat([v, v[:16]]), rows, 0.1))
        made = plan(chosen, 3, launch.grouped_rows(12, 3, case.dtype))
        found.append(grouped_matmul(case.randn(6, 64, seed=3), case.randn(3, 64, 64, seed=4), None, made, 2, "silu", True))
        x, w = case.randn(2, 3, 64, seed=5), case.randn(64, 300, seed=6)
        seen = lens(x, w, case.randn(64, seed=7), final=1, k=3)
        return [*found, seen.entropy, seen.log_sum_exp, seen.top_log_probs]

    own = computed()
    with imposed(name):
        assert gpu_of(device) is KNOWN[name]
        for mine, theirs in zip(own, computed(), strict=True):
            same(mine, theirs)


# ---- what Triton compiles --------------------------------------------------------------------------------------------
# In a process of its own: here, kernels are interpreted.

A_DOZEN = """
import json, torch
from dataclasses import asdict
from bench import gpus
from bench.gpus import KNOWN, compiling
from replaylens.kernels import launch, matmul
from replaylens.kernels.attention import PagedRows, attention

def run(name, d_head):
    found = {}
    new = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)
    with compiling(KNOWN[name], found), torch.inference_mode():
        for rows, columns, dtype in ((1, 16384, torch.bfloat16), (64, 4096, torch.float16), (5, 4096, torch.float32)):
            matmul.matmul(new(rows, 512, dtype=dtype), new(512, columns, dtype=dtype))
        at = PagedRows(*(new(1, dtype=torch.int32) for _ in range(2)), new(1, 16, dtype=torch.int32))
        q, cache = (new(n, 2, d_head, dtype=torch.float32) for n in (1, 256))
        attention(q, cache, cache, at, 0.125, split=False)
    return [asdict(row) | {"fits": row.fits} for row in found.values()]

made = [row for name in NAMES for row in run(name, 256 if name == CONTROL else 64)]
launch.fitted = lambda tile, *given: tile  # the tables as they were measured
launch.gemm_tile.cache_clear()
print(json.dumps({"made": made, "measured": run(CONTROL, 64)}))
"""


def in_process(code: str, **names: Any) -> Any:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = subprocess.run([sys.executable, "-c", given + code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_dozen_launches_fit_as_triton_compiles_them() -> None:
    """Its shared memory is what the rule says. The control: the tables that were measured do not fit an RTX 4090."""
    found = in_process(A_DOZEN, NAMES=["A100", "4090", "5090"], CONTROL="4090")
    assert len(found["made"]) >= 12 and {row["sm"] for row in found["made"]} == {80, 89, 120}
    for row in found["made"]:
        assert row["fits"] and row["shared"] <= row["rule"] <= 1.15 * row["shared"] + 128, row
        assert 0 < row["registers"] <= 255
    too_large = [row for row in found["measured"] if not row["fits"]]
    assert {row["kernel"] for row in too_large} == {"_rows_kernel", "_few_kernel"}
    assert {row["shared"] for row in too_large} >= {110_592, 147_456}, "as in the first trial, sm_89"


@pytest.mark.slow
def test_every_kernel_in_every_tile_fits() -> None:
    """Minutes of two cores: `make gpus`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-m", "bench", "gpus"], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    assert ": 0 do not fit" in done.stdout.splitlines()[-1]
