"""Launch tables: the tile that each kernel runs with. Nothing is tuned at run time.

There are two kinds of constants:

* **Canonical constants** set the order of a reduction. A change moves bits and must raise `CANONICAL_VERSION`.
* **Tiles** affect speed only. The tests prove that they do not move bits, so they may depend on the number of rows and on the
  GPU: the measured tile if it fits into the shared memory of a block, or else the nearest one that does.

All kernels are compiled without contraction of `a * b + c` (`EXACT`). The compiler may fuse the pair in one variant of a
kernel and not in another, and the two would round differently. Code that needs a single rounding calls `tl.fma`.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from replaylens.kernels.gpus import Gpu

CANONICAL_VERSION = 3
"""part of the fingerprint; raised by any change that can move a bit"""

PAGE_SIZE = 16
"""positions per page of the KV cache (layout only; no reduction depends on it)"""
KV_BLOCK = 64
"""canonical: keys per step of the softmax, counted from position 0"""
KV_SPLIT = 512
"""canonical: keys per independent partial softmax, counted from position 0; partials are merged in order"""

PERSISTENT_FROM = 1024
"""least number of rows for which products with weights [K, N] use the persistent kernel; below, its launches cost the host
more than it saves the device. Decode steps, up to 64 rows, run as graphs and use it if it is faster."""
_thread = threading.local()


@contextmanager
def in_graph() -> Iterator[None]:
    """While this thread captures a graph or warms it up, launch costs on the host do not count. Moves no bit."""
    before = getattr(_thread, "in_graph", False)
    _thread.in_graph = True
    try:
        yield
    finally:
        _thread.in_graph = before


def persistent_pays(rows: int) -> bool:
    """Whether a product of this many rows should use the persistent kernel, if available."""
    return getattr(_thread, "in_graph", False) or rows <= 64 or rows >= PERSISTENT_FROM


EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""compile options of every kernel whose arithmetic is not all inside `tl.dot`"""

FEW = 8
"""most rows in float32 whose parts are computed side by side in one program"""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class GemmTile:
    """The tiling of one product. Every tiling gives the same bits."""

    rows: int
    columns: int
    depth: int
    """of one step along the reduction"""
    warps: int
    stages: int
    persistent: bool = False
    """one program per multiprocessor loops over many tiles, fed by the bulk tensor copy engine"""


@dataclass(frozen=True)
class AttentionTile:
    """The (row, query head) pairs of one attention program. Every tile gives the same bits."""

    rows: int
    warps: int
    stages: int


# Tiles for many rows with their run times, relative to the persistent 128 x 128 tile. Measured on an H200 in bf16.
_PERSISTENT = (
    (GemmTile(128, 256, 64, 8, 3, persistent=True), 1.85),
    (GemmTile(128, 128, 64, 8, 6, persistent=True), 1.0),
    (GemmTile(128, 64, 64, 4, 6, persistent=True), 0.65),
    (GemmTile(64, 64, 128, 4, 5, persistent=True), 0.37),
)
_PLAIN = (
    (GemmTile(128, 256, 64, 8, 3), 1.95),
    (GemmTile(128, 128, 64, 8, 4), 1.1),
    (GemmTile(64, 128, 64, 4, 4), 0.65),
    (GemmTile(64, 64, 128, 4, 4), 0.42),
)


@lru_cache(maxsize=4096)
def gemm_tile(
    rows: int, depth: int, columns: int, dtype: torch.dtype, gpu: Gpu, transposed: bool = False, persistent: bool = True
) -> GemmTile:
    """The tile for x [rows, depth] @ w [depth, columns]; `transposed`: w is stored [columns, depth].

    With few rows, reading the weights dominates: each multiprocessor gets one tile with as many loads in flight as fit.
    With many rows, it is the measured tile that fills its last wave of programs best.
    """
    if dtype == torch.float32:  # no tensor cores: plain multiply-adds
        return fitted(_chains(rows, columns, gpu.multiprocessors), dtype, gpu)
    if rows <= 64:
        return fitted(_few_rows(rows, columns, persistent, gpu.multiprocessors), dtype, gpu)
    if columns <= 256:  # a router's: larger tiles would leave most multiprocessors idle
        return fitted(GemmTile(16, 32, 256, 4, 5), dtype, gpu)

    def time(option: tuple[GemmTile, float]) -> float:
        tile, each = option
        wide = tile.columns == 256 and (rows <= 128 or (transposed and not persistent))  # the plain kernel is slow on [N, K]
        small = tile.columns * tile.rows < 128 * 128 and rows > 256
        if wide or small:
            return float("inf")
        return ceil_div(ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns), gpu.multiprocessors) * each

    return fitted(min(_PERSISTENT if persistent else _PLAIN, key=time)[0], dtype, gpu)


def _few_rows(rows: int, columns: int, persistent: bool, programs: int) -> GemmTile:
    narrow, wide = columns <= 32 * programs, columns > 64 * programs
    if rows <= 16:
        if narrow:
            return GemmTile(16, 32, 256, 4, 5)
        return GemmTile(16, 128, 128, 4, 4) if wide else GemmTile(16, 64, 128, 4, 5)
    if rows <= 32:
        if wide:
            return GemmTile(32, 128, 64, 4, 5)
        return GemmTile(32, 32, 256, 4, 5, persistent) if narrow else GemmTile(32, 64, 128, 4, 5, persistent)
    if wide:
        return GemmTile(64, 128, 64, 4, 4)
    return GemmTile(64, 32, 256, 4, 4, persistent) if narrow else GemmTile(64, 64, 128, 4, 5, persistent)


def _chains(rows: int, columns: int, programs: int) -> GemmTile:
    """Measured on an H200 at the shapes of an 8B decoder, with bfloat16 weights below 65 rows."""
    if rows <= FEW:
        narrow = columns <= 32 * programs
        return GemmTile(next_power_of_2(rows), *((32, 32, 4, 4) if narrow else (64, 16, 4, 4)))
    if rows <= 16:
        return GemmTile(16, 128, 16, 4, 4)
    if rows <= 64:
        return GemmTile(64, 128, 16, 8, 3) if columns > 64 * programs and rows > 32 else GemmTile(32, 64, 16, 2, 3)
    return GemmTile(64, 128, 16, 4, 3)


def grouped_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Rows per tile of a grouped product: about twice what an expert gets on average, so that few need a second tile."""
    if dtype == torch.float32:
        return 16
    mean = pairs / experts
    return 16 if mean <= 8 else 32 if mean <= 16 else 64 if mean <= 64 else 128


@lru_cache(maxsize=1024)
def grouped_tile(rows: int, pairs: int, dtype: torch.dtype, gated: bool, gpu: Gpu) -> GemmTile:
    """The tile for pairs of one expert, `rows` at most of all `pairs`, times its weights; gated: two products at once.

    Measured on an H200 in bf16 at 8 of 128 experts of 768; `persistent` means here that the copy engine loads the weights.
    """
    if dtype == torch.float32:  # no tensor cores: plain multiply-adds
        tile = GemmTile(16, 64, 32, 4, 3)
    elif rows <= 16 and gated:
        tile = GemmTile(16, 64, 64, 4, 6) if pairs <= 16 else GemmTile(16, 64, 128, 4, 3, persistent=True)
    elif rows <= 64:
        tile = GemmTile(rows, 64, 64, 4, 4) if gated else GemmTile(rows, 128, 64, 4, 4, persistent=True)
    else:
        tile = GemmTile(128, 128, 64, 8, 3, persistent=gated)
    return fitted(tile, dtype, gpu, gated)


@lru_cache(maxsize=1024)
def heads_together(heads: int, kv_heads: int, d_head: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """How many query heads of one KV head share a program: all of them, unless there is only one KV head and its values are so
    wide that a program has room for few (float32: more than 16 would be minutes of compiling). Moves no bit."""
    group, wide = heads // kv_heads, d_head > (128 if dtype == torch.float32 else 256)
    if kv_heads > 1:
        return group
    most = min(group, 16 if dtype == torch.float32 else 64) if wide else group
    divisors = [n for n in range(most, 0, -1) if group % n == 0]
    return next((n for n in divisors if attention_bytes(_least(n, d_head, dtype), d_head, dtype, gpu) <= gpu.shared), 1)


@lru_cache(maxsize=1024)
def attention_tile(
    pairs: int, d_head: int, dtype: torch.dtype, gpu: Gpu, group: int = 1, split: bool = True, short: bool = False
) -> AttentionTile:
    """The tile for at most `pairs` (row, query head) pairs of one sequence and KV head. It holds at least `group` pairs.

    `split`: each split has its own program. There are few programs, so each keeps more loads in flight.
    `short`: the rows have few keys left, so that loads in flight do not pay.
    Raises ValueError if no tile fits into the shared memory of a block.
    """
    measured, least = _measured_attention(pairs, d_head, dtype, group, split, short), _least(group, d_head, dtype)
    fewer = (replace(measured, stages=stages) for stages in range(measured.stages, 0, -1))
    options = (*fewer, replace(least, stages=2), least)
    for tile in options:
        if attention_bytes(tile, d_head, dtype, gpu) <= gpu.shared:
            return tile
    raise ValueError(
        f"Attention of {group} query heads of {d_head} per KV head in {str(dtype).removeprefix('torch.')} takes "
        f"{attention_bytes(least, d_head, dtype, gpu):,} bytes of shared memory, and a block of {gpu.name} has {gpu.shared:,}. "
        f"Use {'bfloat16' if dtype == torch.float32 else 'another GPU'}, or device='cpu'."
    )


def _least(group: int, d_head: int, dtype: torch.dtype) -> AttentionTile:
    """The tile of one row, without loads in flight."""
    return AttentionTile(max(16, next_power_of_2(group)), 8 if d_head > 256 and dtype == torch.float32 else 4, 1)


def _measured_attention(pairs: int, d_head: int, dtype: torch.dtype, group: int, split: bool, short: bool) -> AttentionTile:
    """Measured on an H200."""
    least = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return AttentionTile(least, 4 if d_head <= 256 else 8, 1)
    if d_head > 256:
        return AttentionTile(16, 4, 2) if pairs <= 16 and least == 16 else AttentionTile(64, 8, 2)
    if pairs <= 16 and least == 16:
        return AttentionTile(16, 2, 1) if short else AttentionTile(16, 4, 5 if split and d_head <= 128 else 3)
    if d_head > 128:
        return AttentionTile(max(64, least), 8, 2)
    if pairs <= 64:
        return AttentionTile(max(64, least), 4, 3)
    return AttentionTile(max(128, least), 8, 5)


# ---- what fits -------------------------------------------------------------------------------------------------------
# Shared memory by the size of a tile. `python -m bench gpus` compares it with what the compiler takes.

_BARRIERS = 128
"""bytes of the barriers of loads, at most"""


def _in_place(rows: int, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether tensor cores read both operands out of shared memory while the next ones arrive: one step more is held."""
    return rows >= 64 and dtype != torch.float32 and gpu.capability[0] in (9, 10, 11)


def product_bytes(tile: GemmTile, dtype: torch.dtype, gpu: Gpu, gated: bool = False) -> int:
    """Of a product: the loads in flight. gated: two weights at once."""
    parts = 8 if dtype == torch.float32 and tile.rows <= FEW else 1  # side by side
    step = parts * (tile.rows + tile.columns * (2 if gated else 1)) * tile.depth * dtype.itemsize
    held = _in_place(tile.rows, dtype, gpu)
    return step * (tile.stages if held else max(1, tile.stages - 1)) + (_BARRIERS if held or tile.persistent else 0)


def fitted(tile: GemmTile, dtype: torch.dtype, gpu: Gpu, gated: bool = False) -> GemmTile:
    """The tile, if it fits; or else with fewer loads in flight, and then with smaller ones. Moves no bit."""
    while product_bytes(tile, dtype, gpu, gated) > gpu.shared:
        require(tile.depth > 16 or tile.stages > 2, "No tile of {} rows fits into a block of {}.", tile.rows, gpu.name)
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, depth=tile.depth // 2, stages=4)
    return tile


def attention_bytes(tile: AttentionTile, d_head: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """Of attention: queries, weights, and blocks of keys and values, of which every second stage brings one more."""
    width = next_power_of_2(max(d_head, 16))
    latent = width > 256  # their first columns are values
    rest = 64 if latent else 0
    if dtype == torch.float32:
        blocks = 1 if width > 128 else 2  # wide values are loaded after the scores
    elif tile.stages == 1:
        blocks = 1
    else:
        blocks = (max(1, (tile.stages - 1) // 2) + _in_place(tile.rows, dtype, gpu)) * (1 if latent else 2)
    numbers = blocks * KV_BLOCK * (width + rest) + tile.rows * (width + rest + KV_BLOCK)
    return numbers * dtype.itemsize + KV_BLOCK * 4 * (tile.stages // 2) + _BARRIERS


@dataclass(frozen=True)
class NormShape:
    """Rows per program and warps. Canonical: a sum over a tile depends on its thread layout."""

    rows: int
    block: int
    warps: int


@lru_cache(maxsize=256)
def norm_shape(width: int) -> NormShape:
    """The launch shape for rows of this width."""
    block = next_power_of_2(width)
    if block <= 512:
        return NormShape(2048 // block if block >= 128 else 16, block, 4)
    return NormShape(1, block, min(16, max(4, block // 512)))


def strip_width(rows: int, vocab: int, columns: int) -> int:
    """Vocabulary columns per strip, a multiple of `columns`: about 18 MB of final logits, but at least 4096 columns.

    At 512 rows, a strip has one tile of the product per multiprocessor.
    """
    width = max(4096, (4_400_000 // rows) // columns * columns)
    return min(width, ceil_div(vocab, columns) * columns)


@dataclass(frozen=True)
class LensShape(GemmTile):
    """The tile of the lens. Canonical: it sums over the vocabulary within a tile."""

    top_rows: int = 64
    """(row, tile) pairs per program of the top-k (speed only)"""
    top_warps: int = 8

    @property
    def vocab_tile(self) -> int:
        """Vocabulary entries per partial result: half the columns that a program multiplies at once."""
        return self.columns // 2

    @property
    def copy(self) -> bool:
        """Whether the copy engine loads the tiles."""
        return self.persistent


def lens_shape(dtype: torch.dtype) -> LensShape:
    """The tile of the lens for any number of rows."""
    if dtype == torch.float32:
        return LensShape(32, 64, 32, 4, 3, top_rows=16, top_warps=4)
    return LensShape(128, 256, 64, 8, 3, persistent=True)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below n."""
    return 1 << (n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    """The number of pieces of size `by` that cover n."""
    return -(-n // by)


def require(condition: bool, message: str, *values: object) -> None:
    """Raise ValueError unless the condition holds. Only then is the message formatted: launchers are called often."""
    if not condition:
        raise ValueError(message.format(*(tuple(v) if isinstance(v, torch.Size) else v for v in values)))


def require_float(name: str, x: Tensor) -> None:
    """Raise ValueError unless the kernels support the dtype of `x`."""
    require(x.dtype in FLOATS, "{} is {}. The kernels take bfloat16, float16 or float32.", name, x.dtype)


def require_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `x` has this shape; None leaves a dimension free."""
    fits = len(x.shape) == len(shape)
    for want, have in zip(shape, x.shape, strict=False):
        fits = fits and (want is None or want == have)
    if not fits:
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected ({wanted}).")


def require_same(name: str, x: Tensor, other: Tensor) -> None:
    """Raise ValueError unless `x` has the dtype and device of `other`."""
    same = x.dtype == other.dtype and x.device == other.device
    require(same, "{} is {} on {}. Expected {} on {}.", name, x.dtype, x.device, other.dtype, other.device)


def require_weight(name: str, w: Tensor, x: Tensor) -> None:
    """Raise ValueError unless rows `x` can be multiplied by weights `w`: of one dtype, or bfloat16 weights of float32 rows."""
    stored = x.dtype == torch.float32 and w.dtype == torch.bfloat16 and w.device == x.device
    if not stored:
        require_same(name, w, x)


def uniform(x: Tensor) -> Tensor:
    """x, or a copy of it, of the kind that contiguous tensors of its shape are.

    Triton compiles a kernel anew for addresses and strides that are multiples of 16, and loads that can be wider give the tile
    another thread layout, hence a sum over it another order. The strides of a view tell its storage, or nothing if it has one
    row. A kernel that sums over a tile must be compiled alike for all of them.
    """
    contiguous = [math.prod(x.shape[dim + 1 :]) for dim in range(x.dim() - 1)]
    if x.data_ptr() % 16 == 0 and all(_kind(a) == _kind(b) for a, b in zip(x.stride(), contiguous, strict=False)):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _kind(stride: int) -> tuple[bool, bool]:
    """What of a number becomes part of a compiled kernel."""
    return stride == 1, stride % 16 == 0


def require_rows(name: str, x: Tensor) -> None:
    """Raise ValueError unless the last dimension of `x` is contiguous."""
    contiguous = x.stride(-1) == 1 or x.shape[-1] <= 1
    require(contiguous, "{} has strides {}. Its last dimension must be contiguous.", name, x.stride())
