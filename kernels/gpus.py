"""A GPU as a row of facts: read from the device, known by name without one, or imposed for a trial.

Tiles, numbers of programs and sizes of memory follow from these facts (`kernels/launch.py`, `engine/memory/cache.py`). None of
them sets the order of a sum, so they move no bit: a GPU computes the same with the facts of another one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

OLDEST = (8, 0)
"""the least compute capability: earlier tensor cores know no bfloat16, and earlier copies into shared memory wait"""
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 1): 227, (10, 3): 227, (11, 0): 227}
"""KiB of shared memory that a block may have, by compute capability; of others, 99"""
_KEPT = 1024
"""bytes of a multiprocessor's shared memory that the system keeps for each block"""


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: launches look tiles up by it
class Gpu:
    """What a launch and a cache need to know of a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    """bytes"""
    bandwidth: float
    """of that memory, bytes per second; 0: not known"""
    shared: int
    """bytes of shared memory that a block may have"""
    copies: bool
    """whether it has the bulk tensor copy engine (Hopper and later)"""
    specialises: bool
    """whether it has the instructions of `kernels/prefill.py` (Hopper alone)"""

    def __str__(self) -> str:
        bandwidth = f", {self.bandwidth * 1e-9:,.0f} GB/s" if self.bandwidth else ""
        parts = [
            f"sm_{self.capability[0]}{self.capability[1]}, {self.multiprocessors} multiprocessors",
            f"{self.shared:,} bytes of shared memory per block, {self.memory / 2**30:.1f} GiB{bandwidth}",
            f"copy engine: {'yes' if self.copies else 'no'}, warp-specialised prefill: {'yes' if self.specialises else 'no'}",
        ]
        return f"{self.name}: {'; '.join(parts)}"

    def facts(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def _made(name: str, capability: tuple[int, int], multiprocessors: int, memory: int, bandwidth: float, shared: int = 0) -> Gpu:
    shared = shared or 1024 * _SHARED.get(capability, 99)
    return Gpu(name, capability, multiprocessors, memory, bandwidth, shared, capability >= (9, 0), capability[0] == 9)


_ROWS = (
    ("A100", (8, 0), 108, 80, 2039),
    ("A10", (8, 6), 72, 24, 600),
    ("3090", (8, 6), 82, 24, 936),
    ("A6000", (8, 6), 84, 48, 768),
    ("L4", (8, 9), 58, 24, 300),
    ("4090", (8, 9), 128, 24, 1008),
    ("L40S", (8, 9), 142, 48, 864),
    ("H100", (9, 0), 132, 80, 3350),
    ("H200", (9, 0), 132, 141, 4800),
    ("B200", (10, 0), 148, 180, 8000),
    ("5090", (12, 0), 170, 32, 1792),
)
KNOWN = {name: _made(name, sm, count, memory * 2**30, speed * 1e9) for name, sm, count, memory, speed in _ROWS}
"""by name: what is sold, with the memory of its data sheet; a device tells its own"""
MEASURED = KNOWN["H200"]
"""the GPU that launch tables were measured on. Triton's interpreter, on a CPU, runs its launches"""

IMPOSED = "REPLAYLENS_GPU"
"""environment variable: a name of `KNOWN` whose facts every device of this process is to have"""
_imposed: Gpu | None = None


def known(name: str) -> Gpu:
    """The facts of a GPU by name. Raises ValueError for other names."""
    if name not in KNOWN:
        raise ValueError(f"Unknown GPU {name[:40]!r}. Use one of {', '.join(KNOWN)}.")
    return KNOWN[name]


@contextmanager
def imposed(facts: "str | Gpu") -> Iterator[Gpu]:
    """Meanwhile every device of this process has the facts of another GPU. It moves no bit, and what fits the smaller one
    fits the larger."""
    global _imposed
    before, _imposed = _imposed, facts if isinstance(facts, Gpu) else known(facts)
    try:
        yield _imposed
    finally:
        _imposed = before


def gpu_of(device: torch.device) -> Gpu:
    """The facts of a device."""
    return _imposed or _of(device)


def num_multiprocessors(device: torch.device) -> int:
    """The number of programs that run at once. It is 1 on a CPU without imposed facts: the interpreter runs them one by one."""
    return gpu_of(device).multiprocessors if _imposed or device.type == "cuda" else 1


@lru_cache(maxsize=16)
def _of(device: torch.device) -> Gpu:
    if name := os.environ.get(IMPOSED):
        return known(name)
    return MEASURED if device.type != "cuda" else read(torch.cuda.get_device_properties(device))


def read(found: Any) -> Gpu:
    """The facts in torch's properties of a device."""
    speed = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8  # kHz, twice per cycle
    shared = getattr(found, "shared_memory_per_multiprocessor", _KEPT) - _KEPT  # 0, if torch does not say it: by capability
    return _made(found.name, (found.major, found.minor), found.multi_processor_count, found.total_memory, speed, shared)
