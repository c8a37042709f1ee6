from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from replaylens.kernels import reference
from replaylens.kernels.attention import Workspace, attention
from replaylens.kernels.gpus import MEASURED, gpu_of
from replaylens.kernels.launch import KV_BLOCK, KV_SPLIT, AttentionTile, heads_together
from replaylens.kernels.matmul import head_matmul, head_plan, matmul
from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile
from tests.devices import covering, swept

PAGE = 16


@dataclass
class Setting:
    """Sequences scattered over pages, with one query row for every position."""

    q: Tensor
    k: Tensor
    v: Tensor
    sequences: list[int]
    rows: PagedRows
    blocks: dict[str, int]

    def attend(self, chosen=None, per_tile=0, **options):
        """Attention of all rows, or of the given ones, in tiles of up to `per_tile` rows of a sequence (0: each row alone)."""
        index = torch.arange(len(self.sequences)) if chosen is None else torch.tensor(chosen)
        sequences = [self.sequences[i] for i in index.tolist()]
        index = index.to(self.q.device)
        tiles = plan_tiles(sequences, per_tile).to(self.q.device) if per_tile else None
        rows = PagedRows(self.rows.sequence[index], self.rows.position[index], self.rows.page_table, tiles)
        out = torch.full_like(self.q[index][..., : self.v.shape[-1]], float("nan"))
        return attention(self.q[index], self.k, self.v, rows, 0.3, out=out, **{**self.blocks, **options})

    def truth(self, chosen, **options):
        """Of the given rows, in float64."""
        wide = (self.q[chosen].double(), self.k.double(), self.v.double())
        where = (self.rows.sequence[chosen], self.rows.position[chosen], self.rows.page_table, PAGE, 0.3)
        return reference.attention(*wide, *where, **options)


def setting(case, lengths, heads=4, kv_heads=2, d_head=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // PAGE) for n in lengths]
    free = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
    for s, n in enumerate(pages):
        table[s, :n] = torch.tensor([free.pop() for _ in range(n)])
    sequences = [s for s, n in enumerate(lengths) for _ in range(n)]
    positions = [p for n in lengths for p in range(n)]
    cache = lambda i: case.randn((sum(pages) + 1) * PAGE, kv_heads, d_head, seed=seed + i)  # noqa: E731
    k, v = cache(1), cache(2)
    k[:PAGE], v[:PAGE] = 0, 0
    # the interpreter uses small blocks, so few keys span many blocks and splits
    blocks = {} if case.gpu else {"kv_block": 8, "kv_split": 16}
    rows = PagedRows(case.tensor(sequences), case.tensor(positions), table.to(case.device))
    return Setting(case.randn(len(sequences), heads, d_head, seed=seed + 3), k, v, sequences, rows, blocks)


def lengths(case):
    return [1300, 9, 600] if case.gpu else [37, 3, 9]


def some(case):
    """Row numbers in no order: first and last rows of sequences, and rows around block and split boundaries."""
    return [1299, 0, 511, 512, 513, 63, 64, 1300, 1308, 1309, 1908, 1024] if case.gpu else [36, 0, 31, 32, 37, 39]


@pytest.mark.parametrize(("softcap", "window"), swept([(0.0, 0), (5.0, 0), (0.0, 19), (5.0, 600)], (5.0, 600)))
def test_agrees_with_float64(case, softcap, window):
    s = setting(case, lengths(case))
    chosen = some(case)
    got = s.attend(chosen, softcap=softcap, window=window)
    case.close(got, s.truth(chosen, softcap=softcap, window=window))


@pytest.mark.parametrize("kind, window", covering(["sinks", "slopes"], [0, 19]))
def test_sinks_and_slopes_take_part_in_the_softmax(case, same, window, kind):
    """In any schedule and beside any rows; a sink far below all scores, or a slope of zero, changes nothing."""
    s, chosen = setting(case, lengths(case) if case.gpu else [37]), some(case)[: 12 if case.gpu else 3]
    given = case.randn(4, seed=9) if kind == "sinks" else case.randn(4, seed=9).float() / 8
    got = s.attend(chosen, **{kind: given}, window=window)
    case.close(got, s.truth(chosen, window=window, **{kind: given.double()}))
    for split in (True, False):
        same(s.attend(chosen[:1], **{kind: given}, window=window, split=split), got[:1])
    rows = list(range(chosen[0] - 4, chosen[0] + 1))
    same(s.attend(rows, per_tile=8, tile=AttentionTile(16, 4, 1), **{kind: given}, window=window)[-1:], got[:1])
    plain = s.attend(chosen, window=window)
    assert not torch.equal(plain, got), "control: they matter"
    none = torch.full_like(given, -1e4 if kind == "sinks" else 0.0)
    same(s.attend(chosen, **{kind: none}, window=window), plain)


@pytest.mark.gpu  # too many rows for the interpreter
@pytest.mark.parametrize("d_head", [64, 128])
def test_sinks_in_a_long_prefill(case, same, d_head):
    """Tall tiles of many rows, as large prompts have them: every row has the bits that it has alone, with its sink."""
    s = setting(case, [2200], heads=16, kv_heads=2, d_head=d_head)
    sinks = case.randn(16, seed=9) + 8.0
    per_tile = rows_per_tile(16, 2, d_head, case.dtype, 2200, gpu_of(torch.device(case.device)))
    tiles = plan_tiles(s.sequences, per_tile).to(case.device)
    rows = PagedRows(s.rows.sequence, s.rows.position, s.rows.page_table, tiles, 2200, per_tile)
    whole = attention(s.q, s.k, s.v, rows, 0.3, sinks=sinks)
    chosen = [0, 63, 64, 511, 512, 1300, 2199]
    same(s.attend(chosen, sinks=sinks), whole[chosen])
    assert not torch.equal(attention(s.q, s.k, s.v, rows, 0.3), whole), "control: the sinks matter"


@pytest.mark.parametrize(("softcap", "window"), swept([(0.0, 0), (5.0, 19), (0.0, 600)], (0.0, 600)))
def test_decode_window_and_prefill_agree(case, same, softcap, window):
    if window == 600 and not case.gpu:
        window = 21  # as many splits in the interpreter's small blocks
    s = setting(case, lengths(case) if case.gpu else [37, 3])
    options = dict(softcap=softcap, window=window)
    full = s.attend(per_tile=8, tile=AttentionTile(16, 4, 1), split=False, **options)
    chosen = some(case)
    for split in (False, True):
        same(s.attend(chosen, split=split, **options), full[chosen])  # decode: every row alone, in any order
    start, count = (300, 400) if case.gpu else (13, 9)
    window_rows = list(range(start, start + count))  # a window with an arbitrary cut
    same(s.attend(window_rows, per_tile=8, tile=AttentionTile(32, 4, 1), split=True, **options), full[window_rows])


@pytest.mark.slow
def test_every_tile_gives_the_same_bits(case, same):
    s = setting(case, lengths(case), heads=6, kv_heads=2, d_head=24)
    first = s.attend(per_tile=5, tile=AttentionTile(16, 4, 1), split=False)
    tiles = [(10, AttentionTile(32, 8, 1))]
    if case.gpu:
        tiles = [(5, AttentionTile(16, 8, 2)), (10, AttentionTile(32, 4, 2)), (21, AttentionTile(64, 4, 1))]
    if case.gpu and case.dtype != torch.float32:
        tiles += [(21, AttentionTile(64, 8, 3)), (42, AttentionTile(128, 8, 2)), (42, AttentionTile(128, 4, 2))]
    for per_tile, tile in tiles:
        for split in (False, True):
            same(s.attend(per_tile=per_tile, tile=tile, split=split), first)


@pytest.mark.parametrize("d_head", swept([16, 64, 80, 128, 256], 16, 80))
def test_head_sizes(case, same, d_head):
    heads, kv_heads = {128: (4, 1), 256: (20, 1)}.get(d_head, (14, 2))
    s = setting(case, [700, 70] if case.gpu else [40, 5], heads, kv_heads, d_head)
    chosen = [699, 0, 701, 511, 512] if case.gpu else [39, 41]
    got = s.attend(chosen)
    case.close(got, s.truth(chosen))
    if case.gpu:
        tile = AttentionTile(32, 8, 1) if case.dtype == torch.float32 else AttentionTile(64, 8, 2)
        same(
            s.attend(
                per_tile=tile.rows // heads_together(heads, kv_heads, d_head, case.dtype, gpu_of(torch.device(case.device))),
                tile=tile,
            )[chosen],
            got,
        )


def test_pages_may_lie_anywhere(case, same):
    a = setting(case, lengths(case)[:2])
    b = setting(case, lengths(case)[:2])
    order = torch.randperm(len(b.k) // PAGE - 1, generator=torch.Generator().manual_seed(9)).to(case.device) + 1
    move = torch.cat([order.new_zeros(1), order])  # maps each old page to a new one; the null page stays
    b.rows = PagedRows(b.rows.sequence, b.rows.position, move[b.rows.page_table.long()].to(torch.int32))
    for cache in (b.k, b.v):
        cache.view(-1, PAGE, *cache.shape[1:])[move] = cache.clone().view(-1, PAGE, *cache.shape[1:])
    chosen = some(case)[:5]
    same(b.attend(chosen), a.attend(chosen))


def test_stale_slots_are_never_read(case, same):
    """Slots after a row's position in its last page, and pages without an owner, have no effect, even if they hold NaN."""
    s = setting(case, [21, 5])
    chosen = [20, 23]
    before = s.attend(chosen)
    owned = reference.slots(s.rows.sequence, s.rows.position, s.rows.page_table, PAGE)
    stale = torch.ones(len(s.k), dtype=torch.bool, device=case.device)
    stale[owned], stale[:PAGE] = False, False
    s.k[stale], s.v[stale] = float("nan"), float("nan")
    same(s.attend(chosen)[:1], before[:1])


def test_empty_tiles_and_a_shared_workspace(case, same):
    s = setting(case, lengths(case))
    chosen = some(case)[:3]
    index = torch.tensor(chosen, device=case.device)
    tiles = plan_tiles([s.sequences[i] for i in chosen], 1, capacity=5).to(case.device)
    rows = PagedRows(s.rows.sequence[index], s.rows.position[index], s.rows.page_table, tiles)
    space = Workspace.of(5, 2, 64, 16, 16, torch.device(case.device))
    for _ in range(2):  # the counters return to zero after a launch
        out = attention(s.q[index], s.k, s.v, rows, 0.3, workspace=space, tile=AttentionTile(16, 4, 1), split=True, **s.blocks)
        same(out, s.attend(chosen))
    assert not space.count.any()


def test_the_canonical_constants_matter(case):
    """Negative control: another block size or another split gives another sum."""
    s = setting(case, lengths(case))
    chosen = some(case)
    block, split = s.blocks.get("kv_block", KV_BLOCK), s.blocks.get("kv_split", KV_SPLIT)
    canonical = s.attend(chosen)
    assert not torch.equal(s.attend(chosen, kv_block=2 * block, kv_split=max(split, 2 * block)), canonical)
    assert not torch.equal(s.attend(chosen, kv_split=2 * split), canonical)


def test_errors_say_what_is_wrong(case):
    s = setting(case, [5])
    with pytest.raises(ValueError, match="The workspace is too small for 5 tiles"):
        attention(s.q, s.k, s.v, s.rows, 0.3, workspace=Workspace.of(1, 2, 1, 16, 16, s.q.device), split=True)
    with pytest.raises(ValueError, match="not a multiple of 2 KV heads"):
        attention(s.q[:, :3].contiguous(), s.k, s.v, s.rows, 0.3)
    with pytest.raises(ValueError, match=r"position is torch\.int64\. Expected int32"):
        PagedRows(s.rows.sequence, s.rows.position.long(), s.rows.page_table)
    with pytest.raises(ValueError, match="cannot hold 1 rows of 2 query heads"):
        attention(s.q, s.k, s.v, s.rows, 0.3, tile=AttentionTile(1, 4, 1))
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\)"):
        attention(s.q, s.k, s.v, s.rows, 0.3, sinks=s.q[0, :3, 0])
    with pytest.raises(ValueError, match=r"slopes is torch.float64 on"):
        attention(s.q, s.k, s.v, s.rows, 0.3, slopes=s.q[0, :, 0].double())
    with pytest.raises(ValueError, match="It must then be its first columns, with one KV head"):
        attention(s.q, s.k, s.v[..., :9], s.rows, 0.3)
    with pytest.raises(ValueError, match="3 tiles do not fit into a plan of 2"):
        plan_tiles([0, 1, 2], 4, capacity=2)


def test_plans_of_tiles():
    """Every row is in one tile, whose rows are of one sequence; only the last tile of a sequence is not full."""
    assert plan_tiles([0, 0, 0, 1], 2).tolist() == [[3, 1], [2, 1], [0, 2]]
    assert plan_tiles([4, 4], 8, capacity=3).tolist() == [[0, 2], [0, 0], [0, 0]] and not len(plan_tiles([], 2))
    chance = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 12, (int(torch.randint(1, 9, (1,), generator=chance)),), generator=chance).tolist()
        size = int(torch.randint(1, 6, (1,), generator=chance))
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        wanted = [
            [at, min(size, end - at)] for end, count in zip(ends, counts, strict=True) for at in range(end - count, end, size)
        ]
        owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).numpy()
        assert plan_tiles(owner, size).tolist() == wanted[::-1]


# ---- latent -----------------------------------------------------------------------------------------------------------
# Latent attention in the kernels: values that are columns of their keys, and products with a weight per head.

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


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "rank", "rest"), SHAPES)
def test_every_schedule_has_the_same_bits(case, same, heads, rank, rest):
    """Decode, a prefill in tiles and a window cut elsewhere; the values are those of float64."""
    s, chosen = latent(case, heads, rank, rest), some(case)[: 12 if case.gpu else 2]
    got = s.attend(chosen)
    want = s.truth(chosen)
    # a score is one float32 sum over all columns, in their order: at a fixed scale its error grows with their number
    case.close(got, want, slack=max(1.0, (rank + rest) / 256))
    per_tile = rows_per_tile(heads, 1, rank, case.dtype, 64, gpu_of(torch.device(case.device)))
    last, count = chosen[0], 400 if case.gpu else 2
    rows = list(range(last + 1 - count, last + 1))
    for split in (True, False):
        same(s.attend(chosen, split=split), got)
        same(s.attend(rows, per_tile=per_tile, split=split)[-1:], got[:1])
    block, split = s.blocks.get("kv_block", 64), s.blocks.get("kv_split", 512)
    assert not torch.equal(s.attend(chosen, kv_block=block // 2, kv_split=split), got), "control: other blocks"


def test_heads_are_divided_among_programs_if_values_are_wide():
    assert heads_together(128, 1, 512, torch.bfloat16, MEASURED) == 64
    assert heads_together(128, 1, 512, torch.float32, MEASURED) == 16
    assert heads_together(20, 1, 300, torch.float32, MEASURED) == 10
    assert heads_together(40, 1, 256, torch.float32, MEASURED) == 10
    assert heads_together(40, 2, 256, torch.float32, MEASURED) == 20
    assert heads_together(40, 1, 512, torch.bfloat16, MEASURED) == 40
    assert heads_together(128, 1, 256, torch.bfloat16, MEASURED) == 128


def test_widths_that_do_not_fit_are_refused(case):
    s = setting(case, [5], 2, 1, 514)
    with pytest.raises(ValueError, match=r"Values have 513 columns and keys 1 more\. At most 512 and 64"):
        attention(s.q, s.k, s.k[..., :513], s.rows, 0.3)
    with pytest.raises(ValueError, match="Values have 400 columns and keys 114 more"):
        attention(s.q, s.k, s.k[..., :400], s.rows, 0.3)


@pytest.mark.slow
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
