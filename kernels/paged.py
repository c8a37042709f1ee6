"""`PagedRows`: the rows of a pass and the pages of their keys; `plan_tiles`: which rows share a program."""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.kernels.launch import attention_tile, heads_together, require, require_shape
from replaylens.kernels.shared import SharedKeys


@dataclass(frozen=True)
class PagedRows:
    """The rows of a pass and the pages of their keys. Immutable, but the tensors may be refilled between graph replays."""

    sequence: Tensor
    """[rows] int32: index into `page_table`"""
    position: Tensor
    """[rows] int32"""
    page_table: Tensor
    """[sequences, pages] int32"""
    tiles: Tensor | None = None
    """[tiles, 2] int32 (first row, number of rows), from `plan_tiles`; None: one tile per row"""
    max_keys: int = 0
    """upper bound on position + 1; 0: as many as the page table can hold"""
    per_tile: int = 0
    """rows per tile that `tiles` was planned for; 0: the most that any plan has"""
    shared: SharedKeys | None = None
    """keys that are read once for many rows; None: every row reads its own"""

    def __post_init__(self) -> None:
        require_shape("position", self.position, tuple(self.sequence.shape))
        require(self.sequence.dim() == 1, "sequence has shape {}. Expected [rows].", self.sequence.shape)
        require(self.page_table.dim() == 2, "page_table has shape {}. Expected [sequences, pages].", self.page_table.shape)
        for name in ("sequence", "position", "page_table", "tiles"):
            x = getattr(self, name)
            if x is not None:
                require(x.dtype == torch.int32, "{} is {}. Expected int32.", name, x.dtype)
                require(x.is_contiguous(), "{} must be contiguous.", name)
                same = x.device == self.sequence.device
                require(same, "{} is on {}, but sequence is on {}.", name, x.device, self.sequence.device)


def rows_per_tile(heads: int, kv_heads: int, d_head: int, dtype: torch.dtype, longest: int) -> int:
    """How many rows of one sequence share a tile if no sequence has more than `longest` rows. d_head: of values"""
    group = heads_together(heads // kv_heads, d_head, dtype)
    return max(1, attention_tile(longest * group, d_head, dtype, group).rows // group)


def plan_tiles(sequences: list[int], per_tile: int, capacity: int = 0) -> Tensor:
    """Split packed rows into tiles of one sequence each: [tiles, 2] int32 on the CPU, padded with empty tiles to `capacity`.

    sequences  the sequence of each row

    Tiles with the most keys come last in a sequence. The plan is reversed so that their programs start first.
    """
    tiles: list[tuple[int, int]] = []
    for i, sequence in enumerate(sequences):
        if tiles and tiles[-1][1] < per_tile and sequences[i - 1] == sequence:
            tiles[-1] = (tiles[-1][0], tiles[-1][1] + 1)
        else:
            tiles.append((i, 1))
    require(not capacity or len(tiles) <= capacity, "{} tiles do not fit into a plan of {}.", len(tiles), capacity)
    tiles = tiles[::-1] + [(0, 0)] * (capacity - len(tiles))
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2)
