"""X^T X in a fixed order against torch, 32768 rows; what torch gives depends on its choice of algorithm."""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, error
from replaylens.kernels.gram import gram

ROWS = 32768


def measure(report: Report, what: str, x: Tensor, inner: torch.dtype, want: Tensor) -> None:
    out = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device="cuda")
    check = error(gram(x, inner=inner), want) < 1e-6
    report.add(what, check, compare(lambda: gram(x, out=out, inner=inner), lambda: x.T @ x, rounds=3))


def main() -> None:
    report = Report("gram", __doc__)
    for width in (576, 4096):
        x = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16)
        want = x.double().T @ x.double()
        measure(report, f"width {width}, bf16, float32 sums, float64 total", x, torch.float32, want)
        measure(report, f"width {width}, float32, float32 sums, float64 total", x.float(), torch.float32, want)
        measure(report, f"width {width}, float64", x.double(), torch.float64, want)
    report.save()


if __name__ == "__main__":
    main()
