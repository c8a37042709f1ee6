"""Latent attention in the kernels: values that are columns of their keys, and products with a weight per head."""

import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.attention import attention
from replaylens.kernels.launch import heads_together
from replaylens.kernels.matmul import head_matmul, head_plan, matmul
from replaylens.kernels.shared import rows_per_tile
from tests.kernels.test_attention import PAGE, lengths, setting, some

WIDE = pytest.mark.gpu  # DeepSeek's own widths: too many numbers for the interpreter
SHAPES = [
    (6, 13, 6),
    (20, 300, 2),
    pytest.param(16, 512, 64, marks=WIDE),
    pytest.param(128, 512, 64, marks=WIDE),
    pytest.param(40, 256, 32, marks=WIDE),
]


def latent(case, heads, rank, rest):
    """Values are the first columns of keys."""
    made = setting(case, lengths(case), heads, 1, rank + rest)
    made.v = made.k[..., :rank]
    return made


@pytest.mark.parametrize(("heads", "rank", "rest"), SHAPES)
def test_every_schedule_has_the_same_bits(case, same, heads, rank, rest):
    """Decode, a prefill in tiles and a window cut elsewhere; the values are those of float64."""
    s, chosen = latent(case, heads, rank, rest), some(case)[: 12 if case.gpu else 2]
    got = s.attend(chosen)
    want = reference.attention(
        s.q[chosen].double(), s.k.double(), s.v.double(), s.rows.sequence[chosen], s.rows.position[chosen],
        s.rows.page_table, PAGE, 0.3,
    )  # fmt: skip
    # a score is one float32 sum over all columns, in their order: at a fixed scale its error grows with their number
    case.close(got, want, slack=max(1.0, (rank + rest) / 256))
    per_tile = rows_per_tile(heads, 1, rank, case.dtype, 64)
    last, count = chosen[0], 400 if case.gpu else 2
    rows = list(range(last + 1 - count, last + 1))
    for split in (True, False):
        same(s.attend(chosen, split=split), got)
        same(s.attend(rows, per_tile=per_tile, split=split)[-1:], got[:1])
    block, split = s.blocks.get("kv_block", 64), s.blocks.get("kv_split", 512)
    assert not torch.equal(s.attend(chosen, kv_block=block // 2, kv_split=split), got), "control: other blocks"


def test_heads_are_divided_among_programs_if_values_are_wide():
    assert heads_together(128, 512, torch.bfloat16) == 64
    assert heads_together(128, 512, torch.float32) == 16
    assert heads_together(20, 300, torch.float32) == 10
    assert heads_together(40, 512, torch.bfloat16) == 40
    assert heads_together(128, 256, torch.bfloat16) == 128


def test_widths_that_do_not_fit_are_refused(case):
    s = setting(case, [5], 2, 1, 514)
    with pytest.raises(ValueError, match=r"Values have 513 columns and keys 1 more\. At most 512 and 64"):
        attention(s.q, s.k, s.k[..., :513], s.rows, 0.3)
    with pytest.raises(ValueError, match="Values have 400 columns and keys 114 more"):
        attention(s.q, s.k, s.k[..., :400], s.rows, 0.3)


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(6, 13, 7), (3, 40, 70), pytest.param(128, 128, 512, marks=WIDE)])
def test_products_by_head_have_the_bits_of_each_head_alone(case, same, heads, inputs, outputs):
    """At any number of rows; weights and rows may be views."""
    count = 700 if case.gpu else 19
    x = case.randn(count, heads, inputs + 3, seed=1)[..., :inputs]
    w = case.randn(heads, outputs, inputs, seed=2).transpose(1, 2)
    plan = lambda rows: head_plan(rows, heads, case.dtype, x.device)  # noqa: E731
    whole = head_matmul(x, w, plan(count))
    case.close(whole, torch.einsum("rhi,hio->rho", x.double(), w.double()))
    for head in range(0, heads, 2 if heads < 10 else 37):
        same(matmul(x[:, head].contiguous(), w[head].contiguous()), whole[:, head])
    for rows in (1, 2, 17, 65, 200) if case.gpu else (1, 2):
        same(head_matmul(x[:rows], w, plan(rows)), whole[:rows])
    assert plan(0).num_tiles == heads and head_matmul(x[:0], w, plan(0)).shape == (0, heads, outputs)
