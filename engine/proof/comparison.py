"""`compare`: an op of a CUDA device, on a row alone and in batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from replaylens.engine.passes.certificate import Finding

ROWS = (1, 3, 16, 17, 33, 64, 129, 512)
"""batch sizes"""
Random = Callable[..., Tensor]


def compare(op: str, x: Tensor, f: Callable[[Tensor], Tensor], findings: list[Finding]) -> None:
    """Compare the first rows of x, at every batch size, with the same rows in the whole batch."""
    whole, shape = f(x.clone()), str(list(x.shape[1:]))
    for count in ROWS:
        same = torch.equal(f(x[:count].clone()), whole[:count])
        findings.append(Finding(op, shape, f"{count} rows against {len(x)}", same))
    findings.append(Finding(op, shape, "row at another offset", torch.equal(f(x[7:40].clone()), whole[7:40])))
