"""All of the lens (norm, unembed, entropy, KL, top-8, two targets) against the bare unembed products alone.

Rows of a 33-point residual stream, 4096 x 128256, bf16. The library's products write [rows, vocab] logits layer by layer
and do nothing with them; the lens leaves a few numbers per row.
"""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare
from replaylens.kernels import reference
from replaylens.kernels.lens import LensStats, lens

DEPTH, VOCAB, LAYERS = 4096, 128256, 33


def right(found: LensStats, x: Tensor, w: Tensor, weight: Tensor, targets: Tensor) -> bool:
    """The first row of the first and the last layer against float64."""
    h = reference.norm(x[:, 0].double(), weight.double(), None, 1e-5, "rms").bfloat16().double()
    z = h[[0, LAYERS - 1]] @ w.double()
    for i, layer in enumerate((0, LAYERS - 1)):
        want = reference.lens(z[i : i + 1], z[1:], targets[:1], 8)
        for name in ("log_sum_exp", "entropy", "kl", "top_log_probs", "target_log_probs"):
            got = getattr(found, name)[layer, 0].double().flatten()
            if not torch.allclose(got, want[name].flatten(), rtol=1e-3, atol=2e-2):
                return False
    return True


def measure(report: Report, rows: int, w: Tensor, weight: Tensor, layout: str) -> None:
    x = torch.randn(LAYERS, rows, DEPTH, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (rows, 2), device="cuda")
    out = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)

    def ours() -> LensStats:
        return lens(x, w, weight, final=LAYERS - 1, targets=targets, k=8)

    def library() -> None:
        for layer in x:
            torch.mm(layer, w, out=out)

    check = right(ours(), x, w, weight, targets)
    report.add(f"{LAYERS} layers x {rows} rows {layout}", check, compare(ours, library, rounds=3))


def main() -> None:
    report = Report("lens", __doc__)
    weight = torch.ones(DEPTH, device="cuda", dtype=torch.bfloat16)
    stored = torch.randn(VOCAB, DEPTH, device="cuda", dtype=torch.bfloat16) * 2 / DEPTH**0.5
    for layout, w in (("[N, K]", stored.T), ("[K, N]", stored.T.contiguous())):
        for rows in (1, 64, 512):
            measure(report, rows, w, weight, layout)
    report.save()


if __name__ == "__main__":
    main()
