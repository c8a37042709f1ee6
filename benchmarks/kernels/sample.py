"""Unembed and draw in one kernel against the library's product and argmax, 4096 x 128256, bf16, weights [N, K]."""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare
from replaylens.kernels import reference
from replaylens.kernels.matmul import matmul
from replaylens.kernels.sample import sample, sample_logits

DEPTH, VOCAB = 4096, 128256


def measure(report: Report, rows: int, w: Tensor) -> None:
    x = torch.randn(rows, DEPTH, device="cuda", dtype=torch.bfloat16)
    seed = torch.arange(rows, device="cuda")
    noise = (seed, seed.int(), torch.ones(rows, device="cuda", dtype=torch.float64))
    logits = matmul(x, w, out_dtype=torch.float32)
    some = slice(0, 16)
    want = reference.sample(logits[some], *(y[some] for y in noise))
    greedy = torch.equal(sample(x, w)[0], logits.argmax(1))
    drawn = torch.equal(sample(x, w, *noise)[0][some], want)
    from_logits = torch.equal(sample_logits(logits, *noise)[0][some], want)
    library = lambda: torch.mm(x, w).argmax(1)  # noqa: E731
    report.add(f"greedy rows {rows}", greedy, compare(lambda: sample(x, w), library))
    report.add(f"drawn rows {rows} (library: greedy)", drawn, compare(lambda: sample(x, w, *noise), library))
    times = compare(lambda: sample_logits(logits, *noise), lambda: torch.multinomial(logits.softmax(-1), 1))
    report.add(f"from logits rows {rows} (library: multinomial)", from_logits, times)


def main() -> None:
    report = Report("sample", __doc__)
    w = (torch.randn(VOCAB, DEPTH, device="cuda", dtype=torch.bfloat16) / DEPTH**0.5).T
    for rows in (1, 8, 16, 64, 256):
        measure(report, rows, w)
    report.save()


if __name__ == "__main__":
    main()
