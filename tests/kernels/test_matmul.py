import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.launch import GemmTile
from replaylens.kernels.matmul import batched_matmul, matmul

# rows, depth, columns: one row, odd numbers, a depth that no block divides, more columns than one tile
SHAPES = [(1, 96, 64), (3, 40, 33), (17, 200, 80), (129, 72, 48)]
LARGE = [(1, 4096, 1024), (3, 576, 1000), (17, 1000, 1536), (129, 4104, 640), (700, 1536, 520)]

CPU_TILES = [GemmTile(16, 16, 32, 4, 3), GemmTile(64, 64, 32, 4, 3), GemmTile(32, 32, 32, 4, 3, persistent=True)]
FP32_TILES = [GemmTile(16, 32, 16, 4, 2), GemmTile(32, 64, 32, 4, 3), GemmTile(64, 64, 16, 4, 3)]
GPU_TILES = [
    GemmTile(16, 32, 64, 4, 4),
    GemmTile(16, 64, 128, 4, 4),
    GemmTile(32, 64, 64, 4, 4),
    GemmTile(64, 64, 128, 4, 3),
    GemmTile(128, 128, 64, 8, 3),
    GemmTile(128, 256, 64, 8, 3, persistent=True),
    GemmTile(128, 128, 64, 8, 6, persistent=True),
    GemmTile(128, 64, 64, 4, 6, persistent=True),
    GemmTile(64, 64, 128, 4, 5, persistent=True),
    GemmTile(64, 32, 256, 4, 4, persistent=True),
    GemmTile(32, 32, 256, 4, 5, persistent=True),
]


def tiles_of(case):
    return CPU_TILES if not case.gpu else FP32_TILES if case.dtype == torch.float32 else GPU_TILES


def problem(case, rows, depth, columns):
    return case.randn(rows, depth, seed=rows), case.randn(depth, columns, seed=1, scale=depth**-0.5)


def test_agrees_with_float64(case):
    for rows, depth, columns in LARGE if case.gpu else SHAPES:
        x, w = problem(case, rows, depth, columns)
        bias, residual = case.randn(columns, seed=2), case.randn(rows, columns, seed=3)
        want = reference.matmul(x.double(), w.double(), bias.double(), residual.double())
        case.close(matmul(x, w, bias, residual, out=case.poison(rows, columns)), want)
        case.close(matmul(x, w.T.contiguous().T, out=case.poison(rows, columns)), x.double() @ w.double())


def test_a_row_does_not_know_its_batch(case, same):
    rows, depth, columns = (700, 4104, 1032) if case.gpu else (129, 72, 48)
    x, w = problem(case, rows, depth, columns)
    full = matmul(x, w)
    pieces = [(0, 1), (5, 1), (rows - 1, 1), (2, 3), (40, 17), (0, 64)] + [(11, 129), (0, 300)] * case.gpu
    for start, count in pieces:
        same(matmul(x[start : start + count], w, out=case.poison(count, columns)), full[start : start + count])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(case.device)
    same(matmul(x[order], w), full[order])


def test_every_tile_gives_the_same_bits(case, same):
    rows, depth, columns = (129, 1000, 1032) if case.gpu else (35, 72, 48)
    x, w = problem(case, rows, depth, columns)
    full = matmul(x, w)
    for tile in tiles_of(case):
        same(matmul(x, w, out=case.poison(rows, columns), tile=tile), full)
        if case.gpu or not tile.persistent:  # the interpreter's product of a transposed tile adds in another order
            same(matmul(x, w.T.contiguous().T, tile=tile), full)


def test_fusing_moves_no_bits(case, same):
    rows, depth, columns = (129, 1000, 1032) if case.gpu else (17, 72, 48)
    x, w = problem(case, rows, depth, columns)
    bias, residual = case.randn(columns, seed=2), case.randn(rows, columns, seed=3)
    for tile in [None, *tiles_of(case)]:
        out = matmul(x, w, bias, residual, tile=tile)
        same(out, (residual.float() + matmul(x, w, bias, tile=tile).float()).to(case.dtype))
    in_place = residual.clone()
    same(matmul(x, w, bias, in_place, out=in_place), out)
    same(matmul(x, w, out_dtype=torch.float32).to(case.dtype), matmul(x, w))


def test_splitting_the_depth_moves_bits(case):
    """Negative control: splitting the depth, as libraries do for few rows, is not the canonical sum."""
    x, w = problem(case, 16, 512, 64)
    halves = [matmul(x[:, s], w[s], out_dtype=torch.float32) for s in (slice(0, 256), slice(256, 512))]
    assert not torch.equal(halves[0] + halves[1], matmul(x, w, out_dtype=torch.float32))


def test_errors_say_what_is_wrong(case):
    x, w = problem(case, 3, 40, 33)
    for call, says in (
        (lambda: matmul(x[:, :39].contiguous(), w), r"w has shape \(40, 33\)\. Expected \(39, any\)"),
        (lambda: matmul(x, w.double()), r"w is torch\.float64"),
        (lambda: matmul(x.double(), w.double()), "The kernels take bfloat16, float16 or float32"),
        (lambda: matmul(x, w, bias=x[0]), "bias has shape"),
        (lambda: matmul(x, w, residual=x), "residual has shape"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    assert matmul(x[:0], w).shape == (0, 33)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_small_products_have_the_bits_of_single_ones(case, same, transposed):
    batch, rows, depth, columns = (5, 70, 130, 90) if case.gpu else (3, 18, 35, 70)
    x = case.randn(batch, rows, depth, seed=1)
    w = case.randn(batch, columns, depth, seed=2).transpose(1, 2) if transposed else case.randn(batch, depth, columns, seed=2)
    got = batched_matmul(x, w)
    case.close(got, torch.bmm(x.double(), w.double()))
    for i in range(batch):
        same(got[i], matmul(x[i], w[i]))
    same(batched_matmul(x[1:2, 3:5].contiguous(), w[1:2]), got[1:2, 3:5])
