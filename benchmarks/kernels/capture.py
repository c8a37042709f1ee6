"""Gathering rows into the capture ring against torch's index_select, and the way to the host."""

import time

import torch

from benchmarks.kernels.harness import Report, microseconds
from replaylens.kernels.capture import CaptureRing

SITES, WIDTH = 96, 4096


def main() -> None:
    report = Report("capture", __doc__ or "")
    for rows in (64, 512):
        ring = CaptureRing(SITES, rows, WIDTH, torch.bfloat16, "cuda")
        sites = [torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(SITES)]
        order = torch.randperm(rows, device="cuda")
        ring.begin()
        for i, x in enumerate(sites):
            ring.gather(i, x, order)
        begin = time.perf_counter()
        ticket = ring.commit(rows)
        told = time.perf_counter() - begin
        got = ring.read(ticket)
        took = time.perf_counter() - begin
        check = all(torch.equal(got[i], x[order].cpu()) for i, x in enumerate(sites))
        ours = microseconds([lambda i=i, x=x: ring.gather(i, x, order) for i, x in enumerate(sites)])  # type: ignore[misc]
        theirs = microseconds([lambda x=x: x.index_select(0, order) for x in sites])  # type: ignore[misc]
        rate = ring.host[0].numel() * 2 / took / 1e9
        report.add(
            f"gather {rows} rows of one site", check, ours, theirs, commit_ms=round(told * 1e3, 2), to_host_gb_s=round(rate, 1)
        )
    report.save()


if __name__ == "__main__":
    main()
