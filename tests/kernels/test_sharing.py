"""Which rows share keys: found from page tables, chosen by cost."""

import random

import numpy as np
import pytest
import torch

from replaylens.engine.passes.cuda import MAX_LEVELS, KeyLayout, find_sharing

LAYOUT = KeyLayout(16, 8, 2, 128, torch.bfloat16)
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
    layout = KeyLayout(24, 8, 2, 128, torch.bfloat16)
    assert layout.unit == 0
    assert find_sharing(np.ones((2, 9), np.int32), [200, 200], [1, 1], layout, 1) is None
    assert KeyLayout(128, 8, 2, 128, torch.bfloat16).unit == 128


def test_latents_are_shared_unless_the_heads_of_a_row_fill_a_tile() -> None:
    """A latent is stored once. 128 heads fill two tiles, so sharing would save no product; wide float32 values have no room."""
    lite, full = (KeyLayout(16, heads, 1, 512, torch.bfloat16, rest=64) for heads in (16, 128))
    assert lite.key_bytes == full.key_bytes == 576 * 2 and (lite.group, full.group) == (16, 64)
    paths = [[1, 2, 3, 7], [1, 2, 3, 8]]
    shared = lambda layout: find_sharing(tables(*paths), [4 * UNIT] * 2, [1, 1], layout, 1)  # noqa: E731
    assert shared(lite) is not None and shared(full) is None
    assert shared(KeyLayout(16, 4, 1, 512, torch.float32, rest=64)) is None
    assert shared(KeyLayout(16, 6, 1, 13, torch.float32, rest=6)) is not None


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
