"""RMSNorm with and without the residual addition against torch, width 4096, bf16."""

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import Report, copies, error, microseconds
from replaylens.kernels import reference
from replaylens.kernels.norm import add_norm, norm

WIDTH = 4096


def main() -> None:
    report = Report("norm", __doc__ or "")
    weight = torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 64, 512, 2048):
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        sets = [(torch.randn_like(x), torch.randn_like(x)) for _ in range(min(64, copies(x, x)))]
        out = norm(x, weight, out=torch.full_like(x, float("nan")))
        close = error(out, reference.norm(x.double(), weight.double(), None, 1e-5, "rms")) < 8e-3
        check = close and torch.equal(norm(x[-1:], weight), out[-1:])
        ours = microseconds([lambda s=s: norm(s[0], weight) for s in sets])  # type: ignore[misc]
        theirs = microseconds([lambda s=s: F.rms_norm(s[0], (WIDTH,), weight, 1e-5) for s in sets])  # type: ignore[misc]
        report.add(f"norm rows {rows}", check, ours, theirs)
        y, total = add_norm(*sets[0], weight)
        check = torch.equal(total, sets[0][0] + sets[0][1]) and torch.equal(y, norm(total, weight))
        ours = microseconds([lambda s=s: add_norm(*s, weight) for s in sets])  # type: ignore[misc]
        theirs = microseconds([lambda s=s: F.rms_norm(s[0] + s[1], (WIDTH,), weight, 1e-5) for s in sets])  # type: ignore[misc]
        report.add(f"add, norm rows {rows}", check, ours, theirs)
    report.save()


if __name__ == "__main__":
    main()
