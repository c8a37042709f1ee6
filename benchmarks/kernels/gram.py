"""X^T X in a fixed order against torch, 32768 rows; what torch gives depends on its choice of algorithm."""

import torch

from benchmarks.kernels.harness import Report, error, microseconds
from replaylens.kernels.gram import gram

ROWS = 32768


def main() -> None:
    report = Report("gram", __doc__ or "")
    for width in (576, 4096):
        x = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16)
        want = x.double().T @ x.double()
        for name, rows, inner, library in (
            ("bf16, float32 sums, float64 total", x, torch.float32, lambda: x.T @ x),  # noqa: B023
            ("float32, float32 sums, float64 total", x.float(), torch.float32, lambda: x.float().T @ x.float()),  # noqa: B023
            ("float64", x.double(), torch.float64, lambda: x.double().T @ x.double()),  # noqa: B023
        ):
            out = torch.zeros(width, width, dtype=torch.float64, device="cuda")
            check = error(gram(rows, inner=inner), want) < 1e-6
            ours = microseconds([lambda: gram(rows, out=out, inner=inner)], replays=2)  # noqa: B023
            report.add(f"width {width}, {name}", check, ours, microseconds([library], replays=2))
    report.save()


if __name__ == "__main__":
    main()
