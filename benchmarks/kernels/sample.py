"""Draw a token per row from given logits against the library's softmax and multinomial, vocabulary 128256, float32."""

import torch

from benchmarks.kernels.harness import Report, compare
from replaylens.kernels import reference
from replaylens.kernels.sample import sample_logits

VOCAB = 128256


def measure(report: Report, rows: int) -> None:
    logits = torch.randn(rows, VOCAB, device="cuda")
    seed = torch.arange(rows, device="cuda")
    noise = (seed, seed.int(), torch.ones(rows, device="cuda", dtype=torch.float64))
    some = slice(0, 16)
    check = torch.equal(sample_logits(logits, *noise)[0][some], reference.sample(logits[some], *(y[some] for y in noise)))
    times = compare(lambda: sample_logits(logits, *noise), lambda: torch.multinomial(logits.softmax(-1), 1))
    report.add(f"from logits rows {rows} (library: multinomial)", check, times)


def main() -> None:
    report = Report("sample", __doc__)
    for rows in (1, 8, 16, 64, 256):
        measure(report, rows)
    report.save()


if __name__ == "__main__":
    main()
