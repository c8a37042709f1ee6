"""Canonical products by head: each head of a row times the weight of that head.

    out[r, h] = round(x[r, h] @ w[h])

It is the grouped product (`kernels/grouped.py`) with heads in place of experts: one float32 accumulator per element, which adds
in the order of k. So an element has the bits of `matmul(x[:, h], w[h])` at any number of rows.
"""

import torch
from torch import Tensor

from replaylens.kernels.grouped import grouped_matmul
from replaylens.kernels.launch import ceil_div, grouped_rows, require_shape
from replaylens.kernels.plan import Plan


def head_plan(rows: int, heads: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The tiles of a product by head, which depend on the number of rows alone. Made on the device, so graphs can hold it."""
    number = torch.arange(heads, device=device)
    tile_rows = grouped_rows(rows * heads, heads, dtype)
    if rows <= 1:  # every pair is a tile of its own
        return Plan(number, number, number, tile_rows, planned=False)
    place = torch.arange(rows, device=device)
    order = (place * heads + number[:, None]).flatten().to(torch.int32)  # pairs by head
    first = torch.arange(ceil_div(rows, tile_rows), device=device) * tile_rows
    tiles = torch.zeros(heads, len(first), 4, dtype=torch.int32, device=device)
    tiles[..., 0] = number[:, None]
    tiles[..., 1] = number[:, None] * rows + first
    tiles[..., 2] = (rows - first).clamp(max=tile_rows)
    return Plan(tiles.flatten(0, 1), order, ((number + 1) * rows).to(torch.int32), tile_rows, planned=True)


def head_matmul(x: Tensor, w: Tensor, plan: Plan) -> Tensor:
    """x [rows, heads, inputs], w [heads, inputs, outputs] -> [rows, heads, outputs]. plan: that of these rows and heads"""
    require_shape("w", w, (x.shape[1], x.shape[2], None))
    return grouped_matmul(x.flatten(0, 1), w, None, plan, 1).unflatten(0, x.shape[:2])
