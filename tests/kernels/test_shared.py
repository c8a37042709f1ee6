"""Attention that reads shared keys once has the bits of attention in which every row reads its own."""

import random

import numpy as np
import pytest
import torch

from replaylens.engine.passes.sharing import MAX_LEVELS, KeyLayout, find_sharing
from replaylens.kernels.attention import attention
from replaylens.kernels.gpus import MEASURED, gpu_of
from replaylens.kernels.launch import KV_BLOCK, KV_SPLIT, AttentionTile, heads_together, next_power_of_2
from replaylens.kernels.shared import PagedRows, SharedKeys, SharedLevel, plan_tiles
from tests.devices import swept

PAGE = 16


class Tree:
    """Sequences whose tables share the pages of a random tree, with the tiles that read them once."""

    def __init__(self, case, seed, heads=4, kv_heads=2, d_head=16, decode=True, rest=0):
        """rest  columns of keys beyond their values, which are then the first columns of keys"""
        self.case, self.chance = case, random.Random(seed)
        self.block, self.split = (KV_BLOCK, KV_SPLIT) if case.gpu else (16, 32)
        self.group = heads // kv_heads
        self.tables, self.runs, self.free = [], [], 1
        self._grow([], 0, 0, list(range(12 if case.gpu else 4)))
        width = max(len(table) for table in self.tables)
        pages = torch.tensor([table + [0] * (width - len(table)) for table in self.tables], dtype=torch.int32)
        own = [1 if decode else self.chance.randint(1, 7 if case.gpu else 3) for _ in self.tables]
        ends = [len(table) * PAGE - self.chance.randint(0, PAGE - 7) for table in self.tables]
        self.sequences = [s for s, count in enumerate(own) for _ in range(count)]
        positions = [end - count + i for end, count in zip(ends, own, strict=True) for i in range(count)]
        self.rows_of = [[i for i, s in enumerate(self.sequences) if s == number] for number in range(len(own))]
        cache = lambda i: case.randn(self.free * PAGE, kv_heads, d_head + rest, seed=seed + i)  # noqa: E731
        self.q, self.k, self.v = case.randn(len(positions), heads, d_head + rest, seed=seed), cache(1), cache(2)
        if rest:
            self.v = self.k[..., :d_head]
        self.plain = (case.tensor(self.sequences), case.tensor(positions), pages.to(case.device))

    def _grow(self, shared, keys, level, members):
        """Give the members a run of pages in common, then divide them. The last page of a table is always its own."""
        longest = (3 * self.split if self.case.gpu else self.split + self.block) // PAGE
        if len(members) == 1 or level == 3:
            for _ in members:
                own = self.chance.randint(1, longest)
                self.tables.append(shared + list(range(self.free, self.free + own)))
                self.free += own
            return
        blocks = self.chance.randint(1, longest * PAGE // self.block)
        more = blocks * self.block // PAGE
        mine, first = shared + list(range(self.free, self.free + more)), len(self.tables)
        self.free += more
        cut = self.chance.randint(1, len(members) - 1)
        self._grow(mine, keys + blocks * self.block, level + 1, members[:cut])
        self._grow(mine, keys + blocks * self.block, level + 1, members[cut:])
        self.runs.append((level, list(range(first, len(self.tables))), keys, keys + blocks * self.block))

    def shared(self, per_tile, levels=3):
        begun = torch.zeros(len(self.sequences), 2, dtype=torch.int32)
        made = []
        for level in range(levels):
            order, tiles, longest = [], [(0, 0, 0, 0)], 0
            for _, members, begin, end in (run for run in self.runs if run[0] == level):
                rows = [row for s in members for row in self.rows_of[s]]
                self.chance.shuffle(rows)
                for i in range(0, len(rows), per_tile):
                    tiles.append((len(order) + i, len(rows[i : i + per_tile]), begin, end))
                order += rows
                begun[rows] = torch.tensor([end, level], dtype=torch.int32)
                longest = max(longest, end - begin)
            if not order:
                break
            made.append(SharedLevel(self.case.tensor(tiles), self.case.tensor(order), per_tile * self.group, longest))
        return SharedKeys(tuple(made), begun.to(self.case.device))

    def attend(self, shared=None, per_tile=0, **options):
        tiles = plan_tiles(self.sequences, per_tile).to(self.q.device) if per_tile else None
        rows = PagedRows(*self.plain, tiles, shared=shared)
        out = torch.full_like(self.q[..., : self.v.shape[-1]], float("nan"))
        return attention(
            self.q, self.k, self.v, rows, 0.3, out=out, page_size=PAGE, kv_block=self.block, kv_split=self.split, **options
        )


@pytest.mark.parametrize(
    ("split", "split_shared", "softcap"),
    swept([(False, False, 0.0), (True, True, 5.0), (False, True, 0.0)], (True, True, 5.0)),
)
@pytest.mark.parametrize("decode", swept([True, False], True))
def test_trees_of_any_shape_have_the_bits_of_each_row_alone(case, same, split, split_shared, softcap, decode):
    tile = AttentionTile(16, 4, 1)
    for seed in range(6 if case.gpu else 1):
        tree = Tree(case, seed + 10 * split, decode=decode)
        alone = tree.attend(softcap=softcap)
        for levels, rows in ((3, 8), (1, 3), (2, 5)) if case.gpu else ((3, 2),):
            schedule = dict(split=split, split_shared=split_shared, tile=tile, shared_tile=tile)
            found = tree.attend(tree.shared(rows, levels), 0 if decode else 8 if case.gpu else 2, softcap=softcap, **schedule)
            same(found, alone)


@pytest.mark.parametrize(("split", "latent"), swept([(True, True), (False, True), (True, False)], (True, True)))
def test_sinks_slopes_and_latents_have_the_bits_of_each_row_alone(case, same, split, latent):
    """A sink is merged after all keys, shared and own ones. Values that are columns of their keys; heads of two programs."""
    shape = dict(heads=6, kv_heads=1, d_head=13, rest=6) if latent else {}
    if latent and case.gpu:
        shape = dict(heads=24, kv_heads=1, d_head=200 if case.dtype == torch.float32 else 300, rest=6)  # wider: never shared
    tree = Tree(case, 3, decode=split, **shape)
    tree.group = heads_together(tree.group, 1, tree.v.shape[-1], tree.q.dtype, gpu_of(tree.q.device))
    sinks = case.randn(tree.q.shape[1], seed=5) + 0.9 * tree.q.shape[2] ** 0.5  # as large as the largest of many scores
    height = max(16, next_power_of_2(tree.group))
    tile = AttentionTile(height, 4, 1)
    schedule = dict(split=split, split_shared=split, tile=tile, shared_tile=tile)
    more = dict(sinks=sinks, slopes=case.randn(tree.q.shape[1], seed=6).float() / 64)
    alone = tree.attend(**more)
    same(tree.attend(tree.shared(height // tree.group), 0 if split else height // tree.group, **more, **schedule), alone)
    assert not torch.equal(tree.attend(slopes=more["slopes"]), alone), "control: the sinks matter"
    assert not torch.equal(tree.attend(sinks=sinks), alone), "control: the slopes matter"


def test_a_missing_block_of_shared_keys_is_seen(case):
    """Control: the states matter."""
    tree = Tree(case, 1)
    shared = tree.shared(8)
    tile = AttentionTile(16, 4, 1)
    right = tree.attend(shared, tile=tile, shared_tile=tile)
    shared.levels[0].tiles[1, 3] -= tree.block
    assert not torch.equal(tree.attend(shared, tile=tile, shared_tile=tile), right)


def test_shared_keys_are_read_through_one_table(case, same):
    """Where rows share keys, wrong pages in all tables but that of a tile's first row change nothing; alone, they do."""
    tree, tile = Tree(case, 1), AttentionTile(16, 4, 1)
    shared = tree.shared(8, levels=1)
    right = tree.attend(shared, tile=tile, shared_tile=tile)
    pages = tree.plain[2]
    for first, rows, begin, end in shared.levels[0].tiles.tolist():
        others = [tree.sequences[row] for row in shared.levels[0].order[first + 1 : first + rows].tolist()]
        pages[others, begin // PAGE : end // PAGE] = 0
    same(tree.attend(shared, tile=tile, shared_tile=tile), right)
    assert not torch.equal(tree.attend(tile=tile), right)


def test_windows_read_their_own_keys(case, same):
    tree = Tree(case, 2)
    window = 3 * tree.block
    same(tree.attend(tree.shared(8), window=window), tree.attend(window=window))


def test_tiles_that_cannot_hold_their_rows_are_refused(case):
    tree = Tree(case, 2)
    with pytest.raises(ValueError, match="cannot hold"):
        tree.attend(tree.shared(9), shared_tile=AttentionTile(16, 4, 1))


# ---- sharing ----------------------------------------------------------------------------------------------------------
# Which rows share keys: found from page tables, chosen by cost.

LAYOUT = KeyLayout(16, 8, 2, 128, torch.bfloat16, MEASURED)
UNIT = 64


def tables(*paths: list[int]) -> np.ndarray:
    """Page tables of paths whose entries stand for units of 64 keys."""
    pages = [[4 * unit + i for unit in path for i in range(4)] for path in paths]
    width = max(map(len, pages))
    return np.array([own + [0] * (width - len(own)) for own in pages], dtype=np.int32)


def found(paths: list[list[int]], counts: list[int] | None = None, worth: int = 1):
    computed = [UNIT * len(path) for path in paths]
    return find_sharing(tables(*paths), computed, counts or [1] * len(paths), LAYOUT, worth)


def test_branches_of_one_prompt_are_one_run() -> None:
    sharing = found([[1, 2, 3, 7], [1, 2, 3, 8, 9], [1, 2, 3]])
    assert sharing is not None and len(sharing.tiles) == 1
    assert sharing.tiles[0].tolist() == [[0, 3, 0, 3 * UNIT]]
    assert sharing.begun.tolist() == [[3 * UNIT, 0]] * 3


def test_a_prefix_of_a_prefix_is_the_next_level() -> None:
    sharing = found([[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 6], [1, 2, 7]])
    assert sharing is not None
    assert [tiles[:, 1:].tolist() for tiles in sharing.tiles] == [[[4, 0, 2 * UNIT]], [[2, 2 * UNIT, 4 * UNIT]]]
    assert sharing.begun.tolist() == [[4 * UNIT, 1], [4 * UNIT, 1], [2 * UNIT, 0], [2 * UNIT, 0]]


def test_rows_that_share_nothing_have_no_state() -> None:
    sharing = found([[5, 6], [1, 2, 3], [1, 2, 4], [8]], counts=[2, 3, 1, 1])
    assert sharing is not None
    assert sharing.begun.tolist() == [[0, 0]] * 2 + [[2 * UNIT, 0]] * 4 + [[0, 0]]
    assert sharing.order[0].tolist() == [2, 3, 4, 5]


def test_keys_that_the_pass_itself_computes_are_not_shared() -> None:
    pages = tables([1, 2], [1, 2])
    sharing = find_sharing(pages, [UNIT, UNIT + 63], [1, 1], LAYOUT, 1)
    assert sharing is not None and sharing.begun[:, 0].tolist() == [UNIT, UNIT]
    assert find_sharing(pages, [UNIT - 1, 2 * UNIT], [1, 1], LAYOUT, 1) is None


@pytest.mark.parametrize("paths", [[[1, 2]], [[1, 2], [3, 2]], [[], []]])
def test_nothing_shared(paths: list[list[int]]) -> None:
    assert find_sharing(tables(*paths) if any(paths) else np.zeros((2, 1), np.int32), [UNIT * len(p) for p in paths],
                        [1] * len(paths), LAYOUT, 1) is None  # fmt: skip


def test_sharing_must_be_worth_its_launch() -> None:
    paths = [[1, 2, 3, i] for i in range(10, 20)]
    saved = 9 * 3 * UNIT * LAYOUT.key_bytes
    assert found(paths, worth=saved) is not None
    assert found(paths, worth=saved + 1) is None


def test_pages_that_do_not_fit_blocks_are_not_shared() -> None:
    layout = KeyLayout(24, 8, 2, 128, torch.bfloat16, MEASURED)
    assert layout.unit == 0
    assert find_sharing(np.ones((2, 9), np.int32), [200, 200], [1, 1], layout, 1) is None
    assert KeyLayout(128, 8, 2, 128, torch.bfloat16, MEASURED).unit == 128


def test_latents_are_shared_unless_the_heads_of_a_row_fill_a_tile() -> None:
    """A latent is stored once. 128 heads fill two tiles, so sharing would save no product; wide float32 values have no room."""
    lite, full = (KeyLayout(16, heads, 1, 512, torch.bfloat16, MEASURED, rest=64) for heads in (16, 128))
    assert lite.key_bytes == full.key_bytes == 576 * 2 and (lite.group, full.group) == (16, 64)
    paths = [[1, 2, 3, 7], [1, 2, 3, 8]]
    shared = lambda layout: find_sharing(tables(*paths), [4 * UNIT] * 2, [1, 1], layout, 1)  # noqa: E731
    assert shared(lite) is not None and shared(full) is None
    assert shared(KeyLayout(16, 4, 1, 512, torch.float32, MEASURED, rest=64)) is None
    assert shared(KeyLayout(16, 6, 1, 13, torch.float32, MEASURED, rest=6)) is not None


def test_random_trees_share_only_equal_pages() -> None:
    """Every tile's rows agree on its keys; levels continue each other; no row reads a key twice or skips one."""
    for seed in range(60):
        chance = random.Random(seed)
        paths: list[list[int]] = [[1]]
        for _ in range(chance.randint(1, 40)):
            parent = chance.choice(paths)
            fresh = [chance.randint(2, 10**6) for _ in range(chance.randint(0, 5))]
            paths.append(parent[: chance.randint(0, len(parent))] + fresh or [chance.randint(2, 9)])
        counts = [chance.randint(1, 4) for _ in paths]
        sharing = found(paths, counts)
        if sharing is None:
            continue
        owner = [s for s, count in enumerate(counts) for _ in range(count)]
        ends = np.zeros(len(owner), dtype=int)
        assert len(sharing.tiles) <= MAX_LEVELS
        for level, (tiles, order) in enumerate(zip(sharing.tiles, sharing.order, strict=True)):
            assert len(set(order.tolist())) == len(order)
            for place, num_rows, begin, end in tiles.tolist():
                rows = order[place : place + num_rows]
                assert num_rows and begin < end and (ends[rows] == begin).all()
                assert len({tuple(paths[owner[row]][begin // UNIT : end // UNIT]) for row in rows}) == 1
                assert all(len(paths[owner[row]]) * UNIT >= end for row in rows)
                assert (sharing.begun[rows, 1] >= level).all()
                ends[rows] = end
        assert (sharing.begun[:, 0] == ends).all()
