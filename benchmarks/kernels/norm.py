"""RMSNorm against torch, width 4096, bf16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, copies, error
from replaylens.kernels import reference
from replaylens.kernels.norm import norm

WIDTH = 4096


def measure(report: Report, rows: int, weight: Tensor) -> None:
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    sets = [(torch.randn_like(x),) for _ in range(min(64, copies(x)))]
    out = norm(x, weight, out=torch.full_like(x, float("nan")))
    close = error(out, reference.norm(x.double(), weight.double(), None, 1e-5, "rms")) < 8e-3
    check = close and torch.equal(norm(x[-1:], weight), out[-1:])
    torch_norm = lambda x: F.rms_norm(x, (WIDTH,), weight, 1e-5)  # noqa: E731
    report.add(f"norm rows {rows}", check, compare(lambda x: norm(x, weight), torch_norm, sets))


def main() -> None:
    report = Report("norm", __doc__)
    weight = torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 64, 512, 2048):
        measure(report, rows, weight)
    report.save()


if __name__ == "__main__":
    main()
