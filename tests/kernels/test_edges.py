import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.edges import HIDDEN, REPLACED, CutPairs, cut_edges
from replaylens.kernels.shared import PagedRows

PAGE = 16
OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0}, "window": {"window": 9}, "both": {"softcap": 3.0, "window": 70}}


def made(case, length, heads=4, kv_heads=2, d_head=16):
    """One sequence over scattered pages, with one query row for every position, and edges cut at random."""
    pages = -(-length // PAGE)
    table = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).to(torch.int32)[None].to(case.device)
    slots = (pages + 1) * PAGE
    q, k, v = (case.randn(n, h, d_head, seed=h + n) for n, h in ((length, heads), (slots, kv_heads), (slots + 1, kv_heads)))
    position = torch.arange(length, dtype=torch.int32, device=case.device)
    kinds = case.ints(length, heads, length, below=12, seed=4, dtype=torch.uint8)
    kinds[kinds > HIDDEN + REPLACED] = 0
    index = torch.arange(length, device=case.device)
    kinds[index, :, index] = 0  # a row sees itself
    return q, k, v[:slots], PagedRows(torch.zeros_like(position), position, table), kinds


def weights(kinds):
    """Of replaced edges; NaN elsewhere."""
    draw = torch.rand(kinds.shape, generator=torch.Generator().manual_seed(6)).to(kinds.device)
    return draw.masked_fill((kinds & REPLACED) == 0, float("nan"))


def pairs(kinds, chosen, sets):
    """The cut of some (row, head) pairs. sets: replaced edges have weights of their own, otherwise zero"""
    row, head = (torch.tensor(each, dtype=torch.int32, device=kinds.device) for each in zip(*chosen, strict=True))
    at = row.long(), head.long()
    return CutPairs(row, head, kinds[at].contiguous(), weights(kinds)[at].nan_to_num().contiguous() if sets else None)


@pytest.mark.parametrize("sets", [False, True], ids=["zero", "set"])
@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_float64_and_touches_no_other_pair(case, same, name, sets):
    length, options = 300 if case.gpu else 70, OPTIONS[name]
    q, k, v, rows, kinds = made(case, length)
    chosen = [(row, head) for row in (1, 8, 63, 64, length - 1) for head in (0, 3)]
    before = case.randn(*q.shape, seed=9)
    out = before.clone()
    cut_edges(out, q, k, v, rows, pairs(kinds, chosen, sets), 0.3, page_size=PAGE, **options)
    wide = (q.double(), k.double(), v.double(), rows.sequence, rows.position, rows.page_table, PAGE, 0.3)
    replaced = weights(kinds).double() * (1.0 if sets else 0.0)
    truth = reference.attention(*wide, **options, hidden=(kinds & HIDDEN) != 0, replaced=replaced)
    plain = reference.attention(*wide, **options)
    row, head = (list(each) for each in zip(*chosen, strict=True))
    case.close(out[row, head], truth[row, head], slack=4)
    assert float((plain - truth)[row, head].abs().max()) > 0.1, "control: the edges matter"
    out[row, head] = before[row, head]
    same(out, before)


@pytest.mark.parametrize(("width", "d_value"), [(19, 13), (276, 270)])
def test_sinks_slopes_and_values_that_are_columns_of_keys(case, same, width, d_value):
    q, k, _, rows, kinds = made(case, 40, heads=4, kv_heads=1, d_head=width)
    v, chosen = k[..., :d_value], [(39, 0), (20, 3), (7, 2)]
    more = dict(sinks=case.randn(4, seed=8) + 2.0, slopes=case.randn(4, seed=9).float() / 16)
    out = case.poison(40, 4, d_value)
    cut_edges(out, q, k, v, rows, pairs(kinds, chosen, True), 0.3, page_size=PAGE, **more)
    wide = (q.double(), k.double(), v.double(), rows.sequence, rows.position, rows.page_table, PAGE, 0.3)
    cut = dict(hidden=(kinds & HIDDEN) != 0, replaced=weights(kinds).double())
    truth = reference.attention(*wide, **cut, **{name: x.double() for name, x in more.items()})
    row, head = (list(each) for each in zip(*chosen, strict=True))
    case.close(out[row, head], truth[row, head], slack=4)
    for name, x in more.items():
        without = reference.attention(*wide, **cut, **{name: x.double()})
        assert float((without - truth)[row, head].abs().max()) > 0.01, f"control: more than {name} matters"
    alone = case.poison(40, 4, d_value)
    cut_edges(alone, q, k, v, rows, pairs(kinds, chosen[1:2], True), 0.3, page_size=PAGE, **more)
    same(alone[20, 3], out[20, 3])


def test_a_pair_has_the_same_bits_alone(case, same):
    q, k, v, rows, kinds = made(case, 40)
    chosen = [(row, head) for row in (7, 21, 39) for head in range(4)]
    together = torch.zeros_like(q)
    cut_edges(together, q, k, v, rows, pairs(kinds, chosen, False), 0.3, page_size=PAGE)
    alone = torch.zeros_like(q[21:22])
    single = PagedRows(rows.sequence[:1], rows.position[21:22], rows.page_table)
    cut = CutPairs(*(torch.tensor([n], dtype=torch.int32, device=q.device) for n in (0, 2)), kinds[21:22, 2])
    cut_edges(alone, q[21:22], k, v, single, cut, 0.3, page_size=PAGE)
    same(alone[0, 2], together[21, 2])
