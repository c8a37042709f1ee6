import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.grouped import combine, grouped_matmul
from replaylens.kernels.launch import GemmTile, grouped_rows
from replaylens.kernels.matmul import matmul
from replaylens.kernels.norm import activation
from replaylens.kernels.route import plan
from tests.devices import swept

CPU_TILES = [GemmTile(32, 16, 32, 4, 3), GemmTile(16, 32, 32, 4, 3, persistent=True)]
FP32_TILES = [GemmTile(16, 32, 16, 4, 2), GemmTile(32, 64, 32, 4, 3), GemmTile(64, 64, 16, 4, 3)]
GPU_TILES = [
    GemmTile(16, 32, 64, 4, 4),
    GemmTile(16, 32, 128, 4, 4, persistent=True),
    GemmTile(16, 64, 256, 4, 3),
    GemmTile(32, 64, 64, 4, 4, persistent=True),
    GemmTile(64, 64, 64, 4, 4),
    GemmTile(128, 64, 64, 8, 3),
    GemmTile(128, 128, 64, 8, 3, persistent=True),
]


def tiles_of(case):
    return CPU_TILES if not case.gpu else FP32_TILES if case.dtype == torch.float32 else GPU_TILES


class Problem:
    """Rows, experts and a choice in which expert 1 is everybody's and the last one nobody's."""

    def __init__(self, case, rows, bias=False, gated=True):
        self.experts, self.top = (12, 4) if case.gpu else (5, 2)
        self.depth, self.width = (1000, 520) if case.gpu else (40, 35)  # no block divides them
        self.x = case.randn(rows, self.depth, seed=rows)
        wide = self.width * (2 if gated else 1)
        self.up = case.randn(self.experts, self.depth, wide, seed=1, scale=self.depth**-0.5)
        self.down = case.randn(self.experts, self.width, self.depth, seed=2, scale=self.width**-0.5)
        self.up_bias = case.randn(self.experts, wide, seed=3) if bias else None
        self.down_bias = case.randn(self.experts, self.depth, seed=4) if bias else None
        scores = case.randn(rows, self.experts, seed=5).float()
        scores[:, 1], scores[:, -1] = 9.0, -9.0
        self.chosen = scores.topk(self.top).indices.sort(dim=1).values

    def run(self, kind="silu", gated=True, tile=None, chosen=None, x=None):
        chosen, x = self.chosen if chosen is None else chosen, self.x if x is None else x
        height = tile.rows if tile else grouped_rows(chosen.numel(), self.experts, x.dtype)
        made = plan(chosen, self.experts, height)
        hidden = grouped_matmul(x, self.up, self.up_bias, made, self.top, kind, gated, tile)
        return hidden, grouped_matmul(hidden, self.down, self.down_bias, made, 1, tile=tile)


@pytest.mark.parametrize(
    ("kind", "gated", "bias"),
    swept([("silu", True, False), ("gelu", False, True), ("clamped_swiglu", True, True)], ("clamped_swiglu", True, True)),
)
def test_agrees_with_float64_and_has_the_bits_of_one_product_per_expert(case, same, kind, gated, bias):
    for rows in (1, 150) if case.gpu else (1, 19):
        p = Problem(case, rows, bias, gated)
        hidden, out = p.run(kind, gated)
        flat = p.chosen.flatten()
        for expert in flat.unique().tolist():
            mine = (flat == expert).nonzero().flatten()
            biases = [None if b is None else b[expert] for b in (p.up_bias, p.down_bias)]
            same(hidden[mine], activation(matmul(p.x[mine // p.top], p.up[expert], biases[0]), kind, gated))
            same(out[mine], matmul(hidden[mine], p.down[expert], biases[1]))
        double = lambda x: None if x is None else x.double()  # noqa: E731
        pre = reference.grouped_matmul(p.x.double(), p.up.double(), double(p.up_bias), p.chosen)
        case.close(hidden, reference.activation(pre, kind, gated).flatten(0, 1), slack=2)
        want = reference.grouped_matmul(
            hidden.view(*p.chosen.shape, -1).double(), p.down.double(), double(p.down_bias), p.chosen
        )
        case.close(out, want.flatten(0, 1))


@pytest.mark.slow
def test_a_row_does_not_know_its_batch(case, same):
    """Alone, a row is a tile per expert; in company, expert 1 has a tile of many."""
    p = Problem(case, 150 if case.gpu else 19)
    hidden, out = (x.unflatten(0, p.chosen.shape) for x in p.run())
    pieces = [(0, 1), (7, 1), (2, 3), (1, 17)] + [(11, 129)] * case.gpu
    for start, count in pieces:
        rows = slice(start, start + count)
        some = p.run(chosen=p.chosen[rows].contiguous(), x=p.x[rows])
        same(some[0], hidden[rows].flatten(0, 1))
        same(some[1], out[rows].flatten(0, 1))
    order = torch.randperm(len(p.x), generator=torch.Generator().manual_seed(0)).to(case.device)
    same(p.run(chosen=p.chosen[order], x=p.x[order])[1], out[order].flatten(0, 1))


@pytest.mark.slow
def test_every_tile_gives_the_same_bits(case, same):
    for rows in (1, 150) if case.gpu else (1, 19):
        p = Problem(case, rows)
        if case.gpu:  # what every depth of a tile divides
            p.x, p.up, p.down = p.x[:, :768].contiguous(), p.up[:, :768, :1024].contiguous(), p.down[:, :512].contiguous()
        hidden, out = p.run()
        for tile in tiles_of(case):
            found = p.run(tile=tile)
            same(found[0], hidden)
            same(found[1], out)


def test_splitting_the_depth_moves_bits(case):
    """Negative control: the sum of two halves of K, as a library takes it at few rows, is another number."""
    p = Problem(case, 16)
    made = plan(p.chosen, p.experts, 16)
    tile = GemmTile(16, 32, 32, 4, 3)
    whole = grouped_matmul(p.x, p.up, None, made, p.top, tile=tile)
    half = p.depth // 2
    parts = [grouped_matmul(p.x[:, s], p.up[:, s], None, made, p.top, tile=tile) for s in (slice(0, half), slice(half, None))]
    assert not torch.equal((parts[0].float() + parts[1].float()).to(case.dtype), whole)


def test_the_sum_adds_rounded_terms_by_slot(case, same):
    rows, top, width = (40, 8, 2048) if case.gpu else (5, 3, 70)
    y, residual = case.randn(rows, top, width), case.randn(rows, width, seed=1)
    weights = case.randn(rows, top, seed=2).float()
    total = (y[:, 0] * weights[:, :1]).to(case.dtype)
    for slot in range(1, top):
        total = total + (y[:, slot] * weights[:, slot : slot + 1]).to(case.dtype)
    same(combine(y, weights), total)
    same(combine(y, weights, residual), residual + total)
    same(combine(y[3:4], weights[3:4]), total[3:4])
    case.close(combine(y, weights, residual), reference.combine(y.double(), weights.double(), residual.double()), slack=4)
    other = weights.flip(1), y.flip(1).contiguous()
    assert not torch.equal(combine(other[1], other[0].contiguous()), total), "negative control: another order, other bits"


def test_errors_say_what_is_wrong(case):
    p = Problem(case, 2)
    made = plan(p.chosen, p.experts, 16)
    with pytest.raises(ValueError, match="w has shape"):
        grouped_matmul(p.x[:, :-1], p.up, None, made, p.top)
    with pytest.raises(ValueError, match="The tile has 32 rows, but the plan has tiles of 16"):
        grouped_matmul(p.x, p.up, None, made, p.top, tile=GemmTile(32, 32, 32, 4, 3))
    with pytest.raises(ValueError, match="A gated product needs an activation"):
        grouped_matmul(p.x, p.up, None, made, p.top, gated=True)
    with pytest.raises(ValueError, match="bias has shape"):
        grouped_matmul(p.x, p.up, p.up[0], made, p.top)
    assert grouped_matmul(p.x[:0], p.up, None, made, p.top, "silu", True).shape == (0, p.width)
