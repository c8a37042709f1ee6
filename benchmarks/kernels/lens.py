"""All of the lens (norm, unembed, entropy, KL, top-8, two targets) against the bare unembed products alone.

Rows of a 33-point residual stream, 4096 x 128256, bf16. The library's products write [rows, vocab] logits layer by layer and do
nothing with them; the lens leaves a few numbers per row.
"""

import torch

from benchmarks.kernels.harness import Report, microseconds
from replaylens.kernels import reference
from replaylens.kernels.lens import lens

DEPTH, VOCAB, LAYERS = 4096, 128256, 33


def main() -> None:
    report = Report("lens", __doc__ or "")
    weight = torch.ones(DEPTH, device="cuda", dtype=torch.bfloat16)
    for transposed in (False, True):
        w = torch.randn(VOCAB, DEPTH, device="cuda", dtype=torch.bfloat16) * 2 / DEPTH**0.5
        w = w.T if transposed else w.T.contiguous()
        for rows in (1, 64, 512):
            x = torch.randn(LAYERS, rows, DEPTH, device="cuda", dtype=torch.bfloat16)
            targets = torch.randint(VOCAB, (rows, 2), device="cuda")
            call = lambda: lens(x, w, weight, final=LAYERS - 1, targets=targets, k=8)  # noqa: B023, E731
            found = call()
            check = True
            for layer in (0, LAYERS - 1):
                h = reference.norm(x[:, 0].double(), weight.double(), None, 1e-5, "rms").bfloat16().double()
                z = h[[layer, LAYERS - 1]] @ w.double()
                want = reference.lens(z[:1], z[1:], targets[:1], 8)
                for name in ("log_sum_exp", "entropy", "kl", "top_log_probs", "target_log_probs"):
                    got = getattr(found, name)[layer, 0].double().flatten()
                    check &= torch.allclose(got, want[name].flatten(), rtol=1e-3, atol=2e-2)
            out = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
            theirs = LAYERS * microseconds([lambda: torch.mm(x[0], w, out=out)])  # noqa: B023
            layout = "[N, K]" if transposed else "[K, N]"
            report.add(f"{LAYERS} layers x {rows} rows {layout}", check, microseconds([call], replays=3), theirs)
    report.save()


if __name__ == "__main__":
    main()
