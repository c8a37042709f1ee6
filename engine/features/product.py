"""The canonical product of an encoder: a row's bits depend neither on the other rows nor on the number of threads.

It is the engine's product on zero-padded tiles of 16 rows, on one thread (`engine/passes/products.py`). The doctor examines the
shapes of the model only, so the encoder's shape is examined here, at its first use.
"""

import torch
from torch import Tensor

from replaylens.engine.errors import NotCertified
from replaylens.engine.passes.batch import TILE
from replaylens.engine.passes.products import tile_product


def padded_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [n, inputs] times weight [inputs, outputs] -> [n, outputs]. Precondition: within `modes.canonical`."""
    n = len(rows)
    padded = rows.new_zeros(-(-n // TILE) * TILE, rows.shape[1])  # a new tensor, so that its alignment is always the same
    padded[:n] = rows
    return tile_product(padded, weight)[:n]


def examine(weight: Tensor) -> None:
    """NotCertified if the bits of a row depend on its tile. Precondition: within `modes.canonical`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TILE, weight.shape[0], generator=generator)
    order = torch.randperm(TILE, generator=generator)
    together = padded_product(rows, weight)
    moved = torch.equal(padded_product(rows[order], weight), together[order])
    alone = torch.equal(padded_product(rows[3:4], weight), together[3:4])
    if not (moved and alone):
        raise NotCertified(
            f"On this machine, a product of shape {list(weight.shape)} gives a row other bits in another tile, so features "
            "would depend on the rows they are encoded with. Run `replaylens doctor`, and use another build of torch."
        )
