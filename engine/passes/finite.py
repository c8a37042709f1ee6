"""`finite`: rejects NaN and infinity before anything of a pass is committed.

NaN in one row would spread to its neighbours in a block of the cache, and through the prefix index to other branches.
"""

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import NonFinite


def finite(x: Tensor, what: str) -> Tensor:
    """`x` itself. Raises NonFinite if it holds NaN or infinity."""
    if x.device.type == "cpu" and x.dtype == torch.float32:  # numpy takes a tenth of torch's time
        fine = bool(np.isfinite(x.numpy(force=True)).all())
    else:
        fine = bool(torch.isfinite(x).all())
    if not fine:
        raise not_finite(what)
    return x


def not_finite(what: str) -> NonFinite:
    """The error for a pass that computed non-finite logits, activations or thoughts."""
    return NonFinite(f"The model gave NaN or infinite {what}. Nothing of this pass was committed. Check edits and weights.")
