import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.edit import ADD, KEEP, SET, ZERO, edit_rows, keep_lengths


def made(case, rows, width, vectors):
    generator = torch.Generator().manual_seed(rows + width)
    codes = torch.randint(0, 4, (rows,), generator=generator, dtype=torch.int32)
    index = torch.randint(0, vectors, (rows,), generator=generator, dtype=torch.int32)
    return case.randn(rows, width), codes, index, case.randn(vectors, width)


@pytest.mark.parametrize("vectors", [1, 5])
def test_every_row_does_what_its_code_says(case, same, vectors):
    rows, width = (129, 3000) if case.gpu else (9, 70)
    x, codes, index, table = made(case, rows, width, vectors)
    got = edit_rows(x, codes.to(x.device), index.to(x.device), table)
    for row in range(rows):
        vector = table[int(index[row])]
        truth = {KEEP: x[row], ADD: x[row] + vector, SET: vector, ZERO: torch.zeros_like(vector)}[int(codes[row])]
        same(got[row], truth)
    same(edit_rows(x[3:4], codes[3:4].to(x.device), index[3:4].to(x.device), table), got[3:4])


def test_a_kept_row_keeps_its_bits(case, same):
    """Adding zero is not enough: it turns -0 into 0."""
    x = -torch.zeros_like(case.randn(2, 16))
    nothing = torch.zeros(2, dtype=torch.int32, device=x.device)
    kept = edit_rows(x, nothing, nothing, torch.zeros_like(x[:1]))
    same(kept.view(torch.uint8), x.view(torch.uint8))
    assert not torch.equal((x + 0).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("heads", [1, 4])
def test_lengths_are_kept(case, same, heads):
    """Of single heads too; and a row's bits depend on no other row."""
    rows, width = (129, 4096) if case.gpu else (9, 72)
    before, after = case.randn(rows, width + 8, seed=1)[:, 8:], case.randn(rows, width, seed=2, scale=3.0)
    kept = case.ints(rows, below=2, seed=3)
    got = keep_lengths(before, after, kept, heads)
    case.close(got, reference.keep_lengths(before.double(), after.double(), kept, heads))
    same(got[kept == 0], after[kept == 0])
    for some in (slice(3, 4), slice(2, 8), slice(1, 9, 3)):
        same(keep_lengths(before[some], after[some], kept[some].contiguous(), heads), got[some])
    assert not torch.equal(got, after), "control: some rows are scaled"


def test_errors_say_what_is_wrong(case):
    x, codes, index, table = made(case, 4, 8, 2)
    codes, index = codes.to(x.device), index.to(x.device)
    with pytest.raises(ValueError, match="Expected int32"):
        edit_rows(x, codes.long(), index, table)
    with pytest.raises(ValueError, match="table"):
        edit_rows(x, codes, index, table[:, :4])
