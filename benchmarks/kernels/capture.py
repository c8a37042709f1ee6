"""Gathering rows into the capture ring against torch's index_select, and the way to the host."""

import time

import torch

from benchmarks.kernels.harness import Report, compare
from replaylens.kernels.capture import CaptureRing

SITES, WIDTH = 96, 4096


def measure(report: Report, rows: int) -> None:
    ring = CaptureRing(SITES, rows, WIDTH, torch.bfloat16, "cuda")
    sites = [torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(SITES)]
    order = torch.randperm(rows, device="cuda")
    ring.begin()
    for i, x in enumerate(sites):
        ring.gather(i, x, order)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    ticket = ring.commit(rows)
    told = time.perf_counter() - begin
    got = ring.read(ticket)
    took = time.perf_counter() - begin
    check = all(torch.equal(got[i], x[order].cpu()) for i, x in enumerate(sites))
    times = compare(lambda i, x: ring.gather(i, x, order), lambda i, x: x.index_select(0, order), list(enumerate(sites)))
    rate = round(got.numel() * got.element_size() / took / 1e9, 1)
    report.add(f"gather {rows} rows of one site", check, times, commit_ms=round(told * 1e3, 2), to_host_gb_s=rate)


def main() -> None:
    report = Report("capture", __doc__)
    for rows in (64, 512):
        measure(report, rows)
    report.save()


if __name__ == "__main__":
    main()
