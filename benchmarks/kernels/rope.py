"""Rotate q and k and write k and v to their pages against the same in torch, 32 + 8 + 8 heads of 128, bf16."""

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, error
from replaylens.kernels import reference
from replaylens.kernels.launch import PAGE_SIZE
from replaylens.kernels.rope import rotate_and_store
from replaylens.kernels.shared import PagedRows

HEADS, KV_HEADS, D_HEAD = 32, 8, 128


def measure(report: Report, rows: int) -> None:
    packed = torch.randn(rows, HEADS + 2 * KV_HEADS, D_HEAD, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angle = torch.rand(4096, D_HEAD // 2, device="cuda")
    table = torch.stack([angle.cos(), angle.sin()], dim=1)
    number = torch.arange(rows, device="cuda", dtype=torch.int32)
    pages = torch.arange(1, -(-rows // PAGE_SIZE) + 1, device="cuda", dtype=torch.int32).view(1, -1)
    where = PagedRows(torch.zeros_like(number), number, pages)
    slot = reference.slots(where.sequence, number, pages, PAGE_SIZE)
    k_cache = torch.zeros((pages.numel() + 1) * PAGE_SIZE, KV_HEADS, D_HEAD, device="cuda", dtype=torch.bfloat16)
    v_cache, k_other, v_other = torch.zeros_like(k_cache), torch.zeros_like(k_cache), torch.zeros_like(k_cache)

    def library() -> Tensor:
        k_other[slot] = reference.rotate(k, table, number)
        v_other[slot] = v
        return reference.rotate(q, table, number)

    turned = rotate_and_store(q, k, v, table, where, k_cache, v_cache)
    check = error(turned, reference.rotate(q.double(), table.double(), number)) < 8e-3
    check &= error(k_cache[slot], reference.rotate(k.double(), table.double(), number)) < 8e-3
    check &= torch.equal(v_cache[slot], v)
    times = compare(lambda: rotate_and_store(q, k, v, table, where, k_cache, v_cache), library)
    report.add(f"rotate and store rows {rows}", check, times)


def main() -> None:
    report = Report("rope", __doc__)
    for rows in (1, 64, 512, 2048):
        measure(report, rows)
    report.save()


if __name__ == "__main__":
    main()
