"""Which of 64 chains' 16 drafts stand, on the device, against copying all chosen tokens to the host and comparing there."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.harness import Report
from replaylens.engine.loop.commit import judge as judge_on_host
from replaylens.kernels import reference
from replaylens.kernels.sample import judge

CHAINS, DRAFTS = 64, 16


def microseconds(call: Callable[[], Any]) -> float:
    """Of the host, which has to wait for the answer either way."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    report = Report("judge", __doc__)
    chosen = torch.randint(2, (CHAINS * (DRAFTS + 1),), device="cuda")
    drafts = torch.randint(2, (CHAINS, DRAFTS), device="cuda")
    first, length = torch.arange(CHAINS, device="cuda") * (DRAFTS + 1), torch.full((CHAINS,), DRAFTS, device="cuda")
    on_host = drafts.tolist()

    def compare_on_host() -> None:
        said = chosen.tolist()
        for i, chain in enumerate(on_host):
            judge_on_host([chain], lambda _, row, i=i: said[i * (DRAFTS + 1) + row])

    want = reference.judge(chosen, drafts, first, length)
    right = all(torch.equal(a, b) for a, b in zip(judge(chosen, drafts, first, length), want, strict=True))
    ours = lambda: torch.stack(judge(chosen, drafts, first, length)).tolist()  # noqa: E731
    report.add(f"{CHAINS} chains of {DRAFTS}", right, (microseconds(ours), microseconds(compare_on_host)))
    report.save()


if __name__ == "__main__":
    main()
