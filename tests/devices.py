"""Devices for tests of bits: the CPU, and a CUDA device under the marker `gpu`."""

import pytest

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""for `parametrize` and for a fixture's `params`"""


def with_devices(names: tuple[str, ...], slow: tuple[str, ...] = (), cpu_only: tuple[str, ...] = ()) -> list[object]:
    """Pairs (name, device) for a fixture's `params`. On a CPU, those in `slow` run with the marker `slow` only."""
    on_cpu = [pytest.param((name, "cpu"), id=name, marks=[pytest.mark.slow] if name in slow else []) for name in names]
    on_cuda = [name for name in names if name not in cpu_only]
    return [*on_cpu, *(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in on_cuda)]
