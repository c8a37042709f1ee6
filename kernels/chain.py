"""Chains of kernels: on Hopper and later, a kernel is launched while the one before it still runs, and waits for its results.

A decode step is a chain of short kernels, each of which reads what the last one wrote. Launched one after the other, the device
idles for about a microsecond between two of them. A kernel with the option `launch_pdl` may begin earlier. `follow` comes
before its first access to memory: it waits until every kernel before it has finished and what they wrote can be seen, and lets
the next kernel begin to wait. So nothing is read or written out of order, and no bit moves.

Weights depend on no kernel. `fetch_ahead` asks for them before the wait, so that memory is busy while the kernel before still
computes. It is a hint: it brings lines into the second-level cache and changes nothing.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replaylens.kernels.launch import has_copy_engine

AHEAD_BYTES = 20 << 20
"""the most that a kernel asks for ahead: it must not push out of the cache what the kernel before still reads"""
MODE = 1
AHEAD_ROWS = 64
"""with more rows, products are not bound by reading weights"""


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Comes before the first access to memory in every kernel that is launched with `chained`."""
    if CHAINED == 1:
        gdc_wait()
        gdc_launch_dependents()
    elif CHAINED == 2:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_ahead(START, chunk, number, LANES: tl.constexpr):
    """Program `number` asks for its LANES chunks of `chunk` bytes, counted from START on; chunk: a multiple of 16."""
    lane = tl.arange(0, LANES).to(tl.int64)
    address = START.to(tl.int64, bitcast=True) + (number.to(tl.int64) * LANES + lane) * chunk
    size = tl.zeros((LANES,), tl.int32) + chunk
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, size], tl.int32, is_pure=False, pack=1
    )


@lru_cache(maxsize=16)
def chained(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: whether the kernel waits, and that it may begin early."""
    return {"CHAINED": MODE, "launch_pdl": True} if has_copy_engine(device) else {"CHAINED": 0}


def chunk_ahead(w: Tensor, rows: int, programs: int, lanes: int) -> int:
    """Bytes that each lane of each program asks for ahead of a product of few rows with w; 0: nothing is to be gained."""
    if rows > AHEAD_ROWS or w.device.type != "cuda" or not has_copy_engine(w.device) or w.data_ptr() % 16:
        return 0
    if not (w.is_contiguous() or w.mT.is_contiguous()):
        return 0
    return min(w.numel() * w.element_size(), AHEAD_BYTES) // (programs * lanes) // 16 * 16
