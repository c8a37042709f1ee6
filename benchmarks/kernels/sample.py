"""Unembed and draw in one kernel against the library's product and argmax, 4096 x 128256, bf16."""

import torch

from benchmarks.kernels.harness import Report, microseconds
from replaylens.kernels import reference
from replaylens.kernels.matmul import matmul
from replaylens.kernels.sample import sample, sample_logits

DEPTH, VOCAB = 4096, 128256


def main() -> None:
    report = Report("sample", __doc__ or "")
    w = (torch.randn(VOCAB, DEPTH, device="cuda", dtype=torch.bfloat16) / DEPTH**0.5).T
    for rows in (1, 8, 16, 64, 256):
        x = torch.randn(rows, DEPTH, device="cuda", dtype=torch.bfloat16)
        seed = torch.arange(rows, device="cuda")
        noise = (seed, seed.int(), torch.ones(rows, device="cuda"))
        logits = matmul(x, w, out_dtype=torch.float32)
        some = slice(0, 16)
        want = reference.sample(logits[some], *(y[some] for y in noise))
        check = torch.equal(sample(x, w, *noise)[0][some], want) and torch.equal(sample(x, w)[0], logits.argmax(1))
        library = microseconds([lambda: torch.mm(x, w).argmax(1)])  # noqa: B023
        report.add(f"greedy rows {rows}", check, microseconds([lambda: sample(x, w)]), library)  # noqa: B023
        report.add(f"drawn rows {rows} (library: greedy)", check, microseconds([lambda: sample(x, w, *noise)]), library)  # noqa: B023
        softmax = microseconds([lambda: torch.multinomial(logits.softmax(-1), 1)])  # noqa: B023
        ours = microseconds([lambda: sample_logits(logits, *noise)])  # noqa: B023
        check = torch.equal(sample_logits(logits, *noise)[0][some], want)
        report.add(f"from logits rows {rows} (library: softmax, multinomial)", check, ours, softmax)
    report.save()


if __name__ == "__main__":
    main()
