"""`finite`: NaN and infinity are refused before anything of a pass is committed.

NaN in one row would reach its neighbours in the cache's blocks, and whoever shares its pages through the prefix index.
"""

import torch
from torch import Tensor

from replaylens.engine.errors import NonFinite


def finite(x: Tensor, what: str) -> Tensor:
    """`x` as it is, or NonFinite."""
    if not bool(torch.isfinite(x).all()):
        raise not_finite(what)
    return x


def not_finite(what: str) -> NonFinite:
    """The error of a pass that gave such logits, activations or thoughts."""
    return NonFinite(f"the model gave NaN or infinite {what}; nothing of this pass was committed. Check edits and weights.")
