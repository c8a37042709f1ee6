"""silu(gate) * up against torch, width 14336, bf16."""

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Report, compare, copies, error
from replaylens.kernels import reference
from replaylens.kernels.norm import activation

WIDTH = 14336


def main() -> None:
    report = Report("activation", __doc__)
    for rows in (1, 64, 512, 2048):
        x = torch.randn(rows, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
        sets = [(torch.randn_like(x),) for _ in range(min(64, copies(x)))]
        check = error(activation(x, "silu", gated=True), reference.activation(x.double(), "silu", True)) < 8e-3
        times = compare(lambda x: activation(x, "silu", True), lambda x: F.silu(x[:, :WIDTH]) * x[:, WIDTH:], sets)
        report.add(f"gated silu rows {rows}", check, times)
    report.save()


if __name__ == "__main__":
    main()
