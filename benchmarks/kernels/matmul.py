"""Canonical products against the library's, on the shapes of an 8B decoder in bf16, weights [K, N] and [N, K]."""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, copies, error, microseconds
from replaylens.kernels.activation import activation
from replaylens.kernels.matmul import certify_cublas, gated_matmul, matmul

SHAPES = {
    "qkv": (4096, 6144),
    "attention out": (4096, 4096),
    "gate+up": (4096, 28672),
    "down": (14336, 4096),
    "unembed": (4096, 128256),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def weights(depth: int, columns: int, transposed: bool) -> list[Tensor]:
    """Enough copies to be larger than the cache; each stored [K, N], or [N, K] and viewed as [K, N]."""
    make = lambda: torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5  # noqa: E731
    first = make()
    stored = [first, *(make() for _ in range(copies(first) - 1))]
    return [w.T if transposed else w.T.contiguous() for w in stored]


def right(x: Tensor, w: Tensor, out: Tensor) -> bool:
    """A few rows against float64, and a row alone against the batch."""
    rows = torch.arange(0, len(x), max(1, len(x) // 4), device=x.device)[:4]
    close = error(out[rows], x[rows].double() @ w.double()) < 8e-3
    return close and torch.equal(matmul(x[-1:], w), out[-1:])


def products(report: Report) -> None:
    for name, (depth, columns) in SHAPES.items():
        for transposed in (False, True):
            ws = weights(depth, columns, transposed)
            for rows in ROWS:
                x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
                out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
                check = right(x, ws[0], matmul(x, ws[0], out=out))
                ours = microseconds([lambda w=w: matmul(x, w, out=out) for w in ws])  # type: ignore[misc]
                theirs = microseconds([lambda w=w: torch.mm(x, w, out=out) for w in ws])  # type: ignore[misc]
                equal = certify_cublas(depth, columns, rows, torch.bfloat16, transposed)
                layout = "[N, K]" if transposed else "[K, N]"
                report.add(f"{name} {layout} rows {rows}", check, ours, theirs, library_equal=equal)


def gated(report: Report) -> None:
    depth, columns = SHAPES["gate+up"]
    for transposed in (False, True):
        ws = weights(depth, columns, transposed)
        for rows in (1, 16, 64, 512, 2048):
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            out = gated_matmul(x, ws[0], "silu")
            check = torch.equal(out, activation(matmul(x, ws[0]), "silu", gated=True))
            ours = microseconds([lambda w=w: gated_matmul(x, w, "silu", out=out) for w in ws])  # type: ignore[misc]
            theirs = microseconds([lambda w=w: activation(x @ w, "silu", True, out=out) for w in ws])  # type: ignore[misc]
            report.add(f"gated {'[N, K]' if transposed else '[K, N]'} rows {rows} (library + activation)", check, ours, theirs)


def main() -> None:
    report = Report("matmul", __doc__ or "")
    products(report)
    gated(report)
    report.save()


if __name__ == "__main__":
    main()
