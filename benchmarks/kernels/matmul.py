"""Canonical products against the library's, on the shapes of an 8B decoder in bf16, weights stored [K, N] and [N, K]."""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, copies, error
from replaylens.kernels.matmul import matmul

SHAPES = {
    "qkv": (4096, 6144),
    "attention out": (4096, 4096),
    "gate+up": (4096, 28672),
    "down": (14336, 4096),
    "unembed": (4096, 128256),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def weights(depth: int, columns: int, transposed: bool) -> list[tuple[Tensor]]:
    """Enough copies to be larger than the cache; each stored [K, N], or [N, K] and viewed as [K, N]."""
    make = lambda: torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5  # noqa: E731
    first = make()
    stored = [first, *(make() for _ in range(copies(first) - 1))]
    return [(w.T if transposed else w.T.contiguous(),) for w in stored]


def layout(transposed: bool) -> str:
    return "[N, K]" if transposed else "[K, N]"


def right(x: Tensor, w: Tensor, out: Tensor) -> bool:
    """A few rows against float64, and a row alone against the batch."""
    rows = torch.arange(0, len(x), max(1, len(x) // 4), device=x.device)[:4]
    close = error(out[rows], x[rows].double() @ w.double()) < 8e-3
    return close and torch.equal(matmul(x[-1:], w), out[-1:])


def product(report: Report, name: str, ws: list[tuple[Tensor]], rows: int, transposed: bool) -> None:
    depth, columns = SHAPES[name]
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    check = right(x, ws[0][0], matmul(x, ws[0][0], out=out))
    times = compare(lambda w: matmul(x, w, out=out), lambda w: torch.mm(x, w, out=out), ws)
    equal = torch.equal(torch.mm(x, ws[0][0]), matmul(x, ws[0][0]))
    report.add(f"{name} {layout(transposed)} rows {rows}", check, times, library_equal=equal)


def main() -> None:
    report = Report("matmul", __doc__)
    for name, shape in SHAPES.items():
        for transposed in (False, True):
            ws = weights(*shape, transposed)
            for rows in ROWS:
                product(report, name, ws, rows, transposed)
    report.save()


if __name__ == "__main__":
    main()
