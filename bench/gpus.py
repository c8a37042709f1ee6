"""`python -m bench gpus`: shared memory and registers of every kernel in every tile that the rules choose, on GPUs elsewhere.

Triton compiles for a GPU without one. Launches on tensors of a CPU, with the facts of each known GPU imposed, end in its own
compilation instead of a launch, so that what is compiled is what a launch there would compile. Nothing is computed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import RESULTS, commit
from replaylens.kernels import gpus
from replaylens.kernels.gpus import KNOWN, Gpu

REGISTERS, OF_BLOCK = 255, 65536
"""most registers of a thread, and of a block"""
HEADS = (64, 96, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
MODULES = (
    "attention", "edges", "edit", "grouped", "lens", "matmul", "norm", "parts", "prefill", "recurrent", "recurrent_rows",
    "rope", "route", "sample", "shared", "split",
)  # fmt: skip
"""of kernels"""
_TILE = ("ROWS", "COLUMNS", "DEPTH", "HEAD", "REST", "BLOCK", "STAGES")
"""arguments of a kernel that are its tile"""


@dataclass(frozen=True)
class Compiled:
    """A kernel in a tile, compiled for a GPU."""

    gpu: str
    """the first known one that launches it"""
    sm: int
    kernel: str
    dtype: str
    tile: str
    shared: int
    rule: int
    """bytes that `kernels/launch.py` reckons with; 0: its size is the same everywhere"""
    limit: int
    registers: int
    threads: int
    spilled: int
    """bytes of a thread's registers that lie in memory"""

    @property
    def fits(self) -> bool:
        room = self.shared <= self.limit and (not self.rule or self.shared <= self.rule)
        return room and self.registers <= REGISTERS and self.registers * self.threads <= OF_BLOCK

    def __str__(self) -> str:
        what = f"{self.gpu:6} sm_{self.sm:<4} {self.kernel.strip('_').removesuffix('_kernel'):12} {self.dtype:9} {self.tile:46}"
        more = f"{self.registers:>4} registers" + (f", {self.spilled} bytes spilled" if self.spilled else "")
        more += "" if self.fits else f"  DOES NOT FIT (rule: {self.rule:,})"
        return f"{what} {self.shared:>9,} of {self.limit:,} bytes, {more}"


# ---- compiling -------------------------------------------------------------------------------------------------------


class _Elsewhere:
    """A driver of Triton for a device that is not here."""

    sm = 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.sm  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(gpu: Gpu, found: dict[Any, Compiled]) -> Iterator[None]:
    """Mutates `found`: meanwhile launches are compiled for a GPU, and noted once each. Kernels must not be interpreted."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, elsewhere = JITFunction.run, _Elsewhere()
    elsewhere.sm = 10 * gpu.capability[0] + gpu.capability[1]
    before = driver._active

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        names = [parameter.name for parameter in self.params]
        given = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
        key = elsewhere.sm, id(made)
        if key not in found:
            floats = (str(x.dtype)[6:] for x in map(_tensor, args) if isinstance(x, Tensor) and x.is_floating_point())
            tile = [f"{name.lower()} {given[name]}" for name in _TILE if name in given]
            tile += [f"{made.metadata.num_warps} warps", f"{made.metadata.num_stages} stages"]
            registers, spilled = _resources(made.asm["cubin"])
            name, threads = self.fn.__name__, 32 * getattr(made.metadata, "warps", made.metadata.num_warps)
            dtype, shared = next(floats, "-"), made.metadata.shared
            rule = _rule(name, given, made.metadata, dtype, gpu)
            row = (gpu.name, elsewhere.sm, name, dtype, ", ".join(tile), shared, rule, gpu.shared)
            found[key] = Compiled(*row, registers, threads, spilled)
            _KEPT.append(made)
        return made

    JITFunction.run = run
    driver.set_active(elsewhere)
    try:
        with gpus.imposed(gpu.name):
            yield
    finally:
        JITFunction.run = launch
        driver._active = before


def _rule(name: str, given: dict[str, Any], options: Any, dtype: str, gpu: Gpu) -> int:
    """The bytes that the launch tables reckon with for a kernel."""
    from replaylens.kernels.launch import AttentionTile, GemmTile, attention_bytes, product_bytes

    kind, how = getattr(torch, dtype, None), (options.num_warps, options.num_stages)
    if name in ("_attention_kernel", "_shared_kernel", "_split_kernel"):
        return attention_bytes(AttentionTile(given["ROWS"], *how), given["HEAD"], kind, gpu)
    if name in ("_rows_kernel", "_persistent_kernel", "_batched_kernel", "_few_kernel", "_lines_kernel", "_grouped_kernel"):
        copied = name == "_persistent_kernel" or bool(given.get("COPIED"))
        tile = GemmTile(given["ROWS"], given["COLUMNS"], given["DEPTH"], *how, copied)
        return product_bytes(tile, torch.float32 if name == "_lines_kernel" else kind, gpu, bool(given.get("GATED")))
    return 0


_KEPT: list[Any] = []
"""what was compiled, so that no other has its id"""


def _tensor(x: Any) -> Any:
    return getattr(x, "base", x)  # of a descriptor


def _resources(binary: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills) of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


# ---- launches --------------------------------------------------------------------------------------------------------
# Every launcher, in every tile that its rule chooses for the imposed GPU. Tensors are never read.

ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024, 2048, 8192)
COLUMNS = (64, 256, *(512 * n for n in range(1, 32)), 131072)


def _new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def products(dtype: torch.dtype, gpu: Gpu) -> None:
    """Of a dense model, by weights of either layout, whole and with a rest."""
    from replaylens.kernels import matmul
    from replaylens.kernels.launch import gemm_tile

    choices = product(ROWS, COLUMNS, (False, True), (False, True) if gpu.copies else (False,))
    tiles = {(gemm_tile(rows, 0, columns, dtype, gpu, turned, copies), rows <= 64) for rows, columns, turned, copies in choices}
    for tile, few in sorted(tiles, key=str):
        both = ((2048, 16384, False), (2040, 16344, True))  # whole, and with a rest
        for depth, columns, turned in both if dtype == torch.bfloat16 else both[:1]:
            rows = min(tile.rows, 8) if tile.rows <= 8 else 64 if few else 1024
            w = _new(columns, depth, dtype=dtype).t() if turned else _new(depth, columns, dtype=dtype)
            residual = _new(rows, columns, dtype=dtype)
            matmul.matmul(
                _new(rows, depth, dtype=dtype), w, None if turned else _new(columns, dtype=dtype), residual, tile=tile
            )
            if dtype == torch.float32 and few:  # stored in bfloat16
                for some in (columns, 512):  # of few columns, each part has a program of its own
                    matmul.matmul(_new(rows, depth, dtype=dtype), _new(depth, some, dtype=torch.bfloat16), tile=tile)
            if not tile.persistent and not turned and few and dtype != torch.float16:
                with _instead(matmul, "gemm_tile", tile):
                    matmul.batched_matmul(_new(2, 64, 256, dtype=dtype), _new(2, 256, 512, dtype=dtype))
    if dtype == torch.float32:
        from replaylens.kernels.parts import lines

        for columns in (1, 16, 64):
            lines(_new(2, 3, 512, dtype=dtype), _new(2, 512, columns, dtype=dtype), _new(2, columns, dtype=dtype))


@contextmanager
def _instead(module: Any, name: str, answer: Any) -> Iterator[None]:
    """Meanwhile a function of a module gives this answer."""
    before = getattr(module, name)
    setattr(module, name, lambda *given: answer)
    try:
        yield
    finally:
        setattr(module, name, before)


def attentions(dtype: torch.dtype, gpu: Gpu, d_head: int, rest: int = 0) -> None:
    """Attention of either path and of shared keys, in each tile: of single rows, of prompts, of many heads per KV head."""
    from replaylens.kernels.attention import attention
    from replaylens.kernels.launch import attention_tile, heads_together
    from replaylens.kernels.shared import PagedRows, SharedKeys, SharedLevel
    from replaylens.kernels.split import split_attention

    group = 16 if rest or dtype == torch.float32 else 8
    kv_heads = 1 if rest else 2
    own, seen = heads_together(group * kv_heads, kv_heads, d_head, dtype, gpu), set()
    for pairs, split, short in product((1, 64, 1024), (True, False), (False, True)):
        tile = attention_tile(max(pairs, own), d_head, dtype, gpu, own, split, short)
        if tile in seen:
            continue
        seen.add(tile)
        per_tile, tiled = max(1, tile.rows // own), pairs > 1
        keys = _new(256 * 16, kv_heads, d_head + rest, dtype=dtype)
        values = keys[..., :d_head] if rest else _new(*keys.shape, dtype=dtype)
        q = _new(per_tile if tiled else 1, kv_heads * group, d_head + rest, dtype=dtype)
        level = SharedLevel(_new(1, 4), _new(len(q)), tile.rows, 1024)
        shared = SharedKeys((level,), _new(len(q), 2)) if short or tiled else None
        at = (_new(len(q)), _new(len(q)), _new(1, 256), _new(1, 2) if tiled else None)
        rows = PagedRows(*at, per_tile=per_tile if tiled else 0, shared=shared)
        attention(q, keys, values, rows, 0.125, tile=tile, split=split, shared_tile=tile, split_shared=split)
        if not short and dtype != torch.float16:  # float16 has the tiles of bfloat16
            split_attention(q, keys, values, replace(rows, shared=None), 0.125, split=64 if split else 4096)


def prefills(dtype: torch.dtype, gpu: Gpu, d_head: int) -> None:
    """The warp-specialised kernel."""
    from replaylens.kernels.prefill import _HEAD_SIZES, prefill

    if gpu.specialises and dtype != torch.float32 and d_head in _HEAD_SIZES:
        q, cache = _new(32, 8, d_head, dtype=dtype), _new(4096, 2, d_head, dtype=dtype)
        for softcap, window, page in ((0.0, 0, 16), (30.0, 100, 64)):
            prefill(q, cache, cache, q, _new(1, 2), _new(32), _new(32), _new(1, 256), 0.125, softcap, window, page)


def rotations(dtype: torch.dtype, gpu: Gpu, d_head: int) -> None:
    """What is done with heads besides attention."""
    from replaylens.kernels.attention import PagedRows
    from replaylens.kernels.edges import CutPairs, cut_edges
    from replaylens.kernels.norm import norm, norm_pair
    from replaylens.kernels.rope import can_fuse, norm_rotate_and_store, rotate_and_store

    rows, table = PagedRows(_new(8), _new(8), _new(1, 256)), _new(512, 2, d_head // 2, dtype=torch.float32)
    q, k, cache = (_new(m, h, d_head, dtype=dtype) for m, h in ((8, 8), (8, 2), (4096, 2)))
    rotate_and_store(q, k, k, table, rows, cache, cache)
    weights, both = (_new(d_head, dtype=dtype), _new(d_head, dtype=dtype)), _new(8, 10, d_head, dtype=dtype)
    if can_fuse(d_head, table):
        norm_rotate_and_store(q, k, k, weights, 1e-6, "rms", table, rows, cache, cache)
    norm_pair(both, 8, weights, 1e-6, "rms")
    norm(q, weights[0])
    cut = CutPairs(_new(2), _new(2), _new(2, 64, dtype=torch.uint8), _new(2, 64, dtype=torch.float32))
    cut_edges(q, q, cache, cache, rows, cut, 0.125)


def experts(dtype: torch.dtype, gpu: Gpu) -> None:
    """Of a mixture: routing, plans and grouped products."""
    from replaylens.kernels import grouped, route
    from replaylens.kernels.launch import grouped_rows

    for rows, count, kind in product((1, 2, 16, 64, 256, 4096), (8, 128), ("softmax", "sigmoid")):
        top, logits, spec = 8 if count > 8 else 2, _new(rows, count, dtype=dtype), route.RouteSpec(8 if count > 8 else 2, kind)
        route.route(logits, spec, logits[0])
        route.choice_scores(logits, spec, logits[0])
        chosen = _new(rows, top, dtype=torch.int64)
        made = route.plan(chosen, count, grouped_rows(chosen.numel(), count, dtype))
        up, down = _new(count, 512, 512, dtype=dtype), _new(count, 256, 512, dtype=dtype)
        pairs = grouped.grouped_matmul(_new(rows, 512, dtype=dtype), up, None, made, top, "silu", True)
        out = grouped.grouped_matmul(pairs, down, None, made, 1)
        turned = down.transpose(1, 2).contiguous().transpose(1, 2)
        grouped.grouped_matmul(pairs, turned, _new(count, 512, dtype=dtype), made, 1)
        grouped.combine(out.unflatten(0, chosen.shape), _new(rows, top, dtype=torch.float32), None)


def lenses(dtype: torch.dtype, gpu: Gpu) -> None:
    """The logit lens, with the copy engine where there is one, and without it, as for rows that are not aligned."""
    from replaylens.kernels import lens

    for vocab, turned in ((32768, True), (5000, False)):
        w = _new(vocab, 512, dtype=dtype).t() if turned else _new(512, vocab, dtype=dtype)
        targets, layers = _new(64, 4 if turned else 64, dtype=torch.int64), 64 if turned else 2
        with _instead(lens, "copyable", gpu.copies and turned):
            x = _new(layers, 64, 512, dtype=dtype)
            lens.lens(x, w, _new(512, dtype=dtype), final=layers - 1, targets=targets, softcap=30.0)


def recurrences(dtype: torch.dtype, gpu: Gpu) -> None:
    """Of a hybrid: convolutions, rates, recurrences of single rows, of many, and of prompts."""
    from replaylens.kernels.attention import PagedRows
    from replaylens.kernels.recurrent import rates, recur, short_conv
    from replaylens.kernels.recurrent_rows import RecurrentMemory

    heads, key_heads = 8, 4
    for d, width, delta in ((128, 128, True), (64, 64, False), (256, 256, True)):
        at = (512, 512 + key_heads * d, 512 + key_heads * d + heads * width)
        for rows, single in ((4, True), (256, True), (64, False)):
            entries, states = _new(1024, at[2] + heads, dtype=torch.float32), _new(16, heads, d, width, dtype=torch.float32)
            memory = RecurrentMemory(entries, states, at, _new(17), _new(17), 64)
            paged = PagedRows(_new(rows), _new(rows), _new(1, 16), single=single)
            q, v = _new(rows, key_heads, d, dtype=dtype), _new(rows, heads, width, dtype=dtype)
            decay, beta = _new(rows, heads, dtype=torch.float32), _new(rows, heads, dtype=dtype) if delta else None
            recur(q, q, v, decay, beta, memory, paged)
            short_conv(_new(rows, 512, dtype=dtype), memory, _new(4, 512, dtype=dtype), _new(512, dtype=dtype), paged, delta)
    rates(_new(8, 16, dtype=dtype), _new(8, dtype=torch.float32), _new(8, dtype=dtype), 1.0)


def others(dtype: torch.dtype, gpu: Gpu) -> None:
    """Row by row: norms, activations, edits, choices."""
    from replaylens.kernels.edit import edit_rows, keep_lengths
    from replaylens.kernels.norm import activation, norm, norm_scale
    from replaylens.kernels.sample import judge, sample_logits

    for width in (64, 576, 4096, 16384):
        x, w = _new(8, width, dtype=dtype), _new(width, dtype=dtype)
        norm(x, w, gate=x)
        norm(x, w, w, kind="layer")
        norm_scale(x)
        keep_lengths(x, x, _new(8))
    for kind, gated in (("silu", True), ("gelu", False), ("clamped_swiglu", True), ("gelu_tanh", True)):
        activation(_new(8, 4096, dtype=dtype), kind, gated)
    edit_rows(_new(8, 4096, dtype=dtype), _new(8), _new(8), _new(2, 4096, dtype=dtype))
    for vocab in (1000, 131072):
        logits, seed = _new(8, vocab, dtype=dtype), _new(8, dtype=torch.int64)
        sample_logits(logits)
        sample_logits(logits, seed, seed, _new(8, dtype=torch.float64))
    judge(*(_new(*shape, dtype=torch.int64) for shape in ((8,), (2, 4), (2,), (2,))))


Launches = Callable[[torch.dtype, Gpu], None]
TOPICS: dict[str, Launches] = {
    **{f.__name__: f for f in (products, experts, lenses, recurrences, others)},
    **{
        f"{f.__name__} {d}": lambda dtype, gpu, f=f, d=d: f(dtype, gpu, d)  # type: ignore[misc]
        for f, d in product((attentions, prefills, rotations), HEADS)
    },
    "latents": lambda dtype, gpu: attentions(dtype, gpu, 512, 64),
}
"""what is launched, by name; the head size follows"""


# ---- the proof -------------------------------------------------------------------------------------------------------


def compiled(names: Iterable[str], topics: Iterable[str], dtypes: Iterable[str] = DTYPES) -> list[Compiled]:
    """Everything that these GPUs launch, in this process. A launch that is refused by name compiles nothing."""
    found: dict[Any, Compiled] = {}
    with torch.inference_mode():
        for name, topic, dtype in product(names, topics, dtypes):
            with compiling(KNOWN[name], found), suppress(Refused):
                try:
                    TOPICS[topic](getattr(torch, dtype), KNOWN[name])
                except ValueError as error:
                    if "shared memory" not in str(error):
                        raise
                    raise Refused from error
    return list(found.values())


class Refused(Exception):
    """A launch does not fit, and says so."""


def _together(names: tuple[str, ...], topic: str, dtype: str) -> list[Compiled]:
    torch.set_num_threads(1)
    return compiled(names, [topic], [dtype])


def proof(names: Sequence[str], topics: Sequence[str], dtypes: Sequence[str], processes: int) -> Iterator[list[Compiled]]:
    """As `compiled`, in processes; GPUs of one compute capability are compiled together."""
    by_sm: dict[tuple[int, int], tuple[str, ...]] = {}
    for name in names:
        by_sm[KNOWN[name].capability] = (*by_sm.get(KNOWN[name].capability, ()), name)
    work = [(names, topic, dtype) for topic in topics for dtype in dtypes for names in by_sm.values()]
    if processes == 1:
        for each in work:
            yield _together(*each)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from (done.result() for done in [pool.submit(_together, *each) for each in work])


def kernels() -> set[str]:
    """The names of all kernels that are launched."""
    from triton.runtime.jit import JITFunction

    modules = [import_module(f"replaylens.kernels.{name}") for name in MODULES]
    found = {
        (x.fn.__module__, x.fn.__name__) for module in modules for x in vars(module).values() if isinstance(x, JITFunction)
    }
    return {name for _, name in found if name.endswith("_kernel")}


def record(rows: list[Compiled]) -> dict[str, Any]:
    """For docs/performance.md: of each kernel and compute capability the tile that takes most of the shared memory."""
    from triton import __version__

    most: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.shared):
        most.setdefault(row.kernel.strip("_").removesuffix("_kernel"), {})[f"sm_{row.sm}"] = asdict(row)
    limits = {f"sm_{row.sm}": row.limit for row in sorted(rows, key=lambda row: row.sm)}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    proof = {"commit": commit(["bench/results"]), "machine": f"Triton {__version__} without a GPU", "arithmetic": "any"}
    return {"name": "gpus", "date": date, "proof": {**proof, "compiled": len(rows), "limits": limits, "largest": most}}


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if everything fits."""
    parser = argparse.ArgumentParser(prog="python -m bench gpus", description=__doc__)
    parser.add_argument("--gpus", nargs="+", default=list(KNOWN), choices=list(KNOWN), metavar="NAME")
    parser.add_argument("--topics", nargs="+", default=list(TOPICS), choices=list(TOPICS), metavar="TOPIC")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES), metavar="DTYPE")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    parser.add_argument("--record", action="store_true", help="write the largest of each kernel for docs/performance.md")
    given = parser.parse_args(words)
    rows: list[Compiled] = []
    for some in proof(given.gpus, given.topics, given.dtypes, given.processes):
        rows += some
        print(*map(str, some), sep="\n", end="\n" if some else "", flush=True)
    if given.out:
        given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    large = [row for row in rows if not row.fits]
    missing = kernels() - {row.kernel for row in rows} if given.topics == list(TOPICS) else set()
    print(
        f"{len(rows)} compiled for {', '.join(given.gpus)}: {len(large)} do not fit", *(f"not compiled: {x}" for x in missing)
    )
    if given.record and not large and not missing:
        (RESULTS / "gpus.json").write_text(json.dumps(record(rows), indent=1) + "\n", encoding="utf-8")
    return 1 if large or missing else 0


if __name__ == "__main__":
    sys.exit(main())
