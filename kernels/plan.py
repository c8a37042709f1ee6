"""Which rows go to which expert: the (row, slot) pairs of a mixture, sorted by expert and cut into tiles, on the device.

A pair is numbered row * top + slot. `order` lists the pairs by expert, pairs of one expert by number. A tile is up to
`tile_rows` neighbours in that list with the same expert. The number of tiles depends on the data, which the host never
sees: there is room for the worst case, and the tiles past the end are empty. So a plan has static shapes, as CUDA graphs need.

No sum of a row depends on a plan: it decides which rows are computed together, and moves no bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import next_power_of_2, require

_CHUNK = 1024
"""pairs that a program looks at together"""


@dataclass(frozen=True)
class Plan:
    """The tiles of a pass, one expert each."""

    tiles: Tensor
    """[tiles, 4] int32: expert, first place in `order`, number of pairs, 0; or [pairs] int64, the expert of every pair, each
    of which is a tile of its own"""
    order: Tensor
    """[pairs] int32: pairs by expert"""
    ends: Tensor
    """[experts] int32: the place in `order` after the last pair of every expert"""
    tile_rows: int
    """the most pairs of a tile"""
    planned: bool
    """False: every pair is a tile of its own; `order` and `ends` mean nothing"""

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)


@triton.jit
def _plan_kernel(
    CHOSEN, ORDER, TILES, ENDS, pairs, capacity, EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """One program per expert. Each counts all pairs, so that none waits for another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(CHOSEN + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)  # the rest: a bin of its own
        count += tl.histogram(chosen, BINS)
    tiles = (count + ROWS - 1) // ROWS
    before = bins < expert
    first = tl.sum(tl.where(before, count, 0), 0)
    tile = tl.sum(tl.where(before, tiles, 0), 0)
    mine = tl.sum(tl.where(bins == expert, count, 0), 0)
    end = tile + (mine + ROWS - 1) // ROWS
    if expert == EXPERTS - 1:
        end = capacity  # the last expert writes the empty tiles, too
    lane = tl.arange(0, 64)
    for start in range(tile, end, 64):
        at = start + lane
        place = first + (at - tile) * ROWS
        left = tl.minimum(tl.maximum(first + mine - place, 0), ROWS)
        tl.store(TILES + at * 4, tl.zeros((64,), tl.int32) + expert, mask=at < end)
        tl.store(TILES + at * 4 + 1, place, mask=at < end)
        tl.store(TILES + at * 4 + 2, left, mask=at < end)
    tl.store(ENDS + expert, first + mine)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = tl.load(CHOSEN + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32) == expert
        hits = hit.to(tl.int32)
        tl.store(ORDER + first + tl.cumsum(hits, 0) - 1, pair, mask=hit)
        first += tl.sum(hits, 0)


def plan(chosen: Tensor, experts: int, tile_rows: int) -> Plan:
    """The tiles of chosen [rows, top] int64. A row's experts differ: with one row, every pair is a tile of its own."""
    require(chosen.dim() == 2, "chosen has shape {}. Expected [rows, top].", chosen.shape)
    require(chosen.dtype == torch.int64, "chosen is {}. Expected int64.", chosen.dtype)
    require(chosen.is_contiguous(), "chosen must be contiguous.")
    pairs = chosen.numel()
    if len(chosen) <= 1:
        return Plan(chosen.flatten(), chosen, chosen, tile_rows, planned=False)
    return sorted_plan(chosen, experts, tile_rows, worst_tiles(pairs, experts, tile_rows))


def sorted_plan(chosen: Tensor, experts: int, tile_rows: int, capacity: int) -> Plan:
    """The plan of any number of rows, with `order` and `ends`, and room for `capacity` tiles."""
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=chosen.device)  # noqa: E731
    pairs = chosen.numel()
    made = Plan(new(capacity, 4), new(pairs), new(experts), tile_rows, planned=True)
    chunk = min(_CHUNK, max(128, next_power_of_2(pairs)))
    _plan_kernel[(experts,)](
        chosen, made.order, made.tiles, made.ends, pairs, capacity, experts, tile_rows, chunk, next_power_of_2(experts + 1),
        num_warps=4,
    )  # fmt: skip
    return made


def worst_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """The most tiles that any choice can need: each expert that is chosen at all may leave one tile with a single pair."""
    return (pairs + min(pairs, experts) * (tile_rows - 1)) // tile_rows
