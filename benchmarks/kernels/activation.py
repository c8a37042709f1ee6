"""silu(gate) * up against torch, width 14336, bf16."""

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Report, copies, error, microseconds
from replaylens.kernels import reference
from replaylens.kernels.activation import activation

WIDTH = 14336


def main() -> None:
    report = Report("activation", __doc__ or "")
    for rows in (1, 64, 512, 2048):
        x = torch.randn(rows, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
        sets = [torch.randn_like(x) for _ in range(min(64, copies(x)))]
        out = activation(x, "silu", gated=True)
        check = error(out, reference.activation(x.double(), "silu", True)) < 8e-3
        ours = microseconds([lambda x=x: activation(x, "silu", True) for x in sets])  # type: ignore[misc]
        theirs = microseconds([lambda x=x: F.silu(x[:, :WIDTH]) * x[:, WIDTH:] for x in sets])  # type: ignore[misc]
        report.add(f"gated silu rows {rows}", check, ours, theirs)
    report.save()


if __name__ == "__main__":
    main()
