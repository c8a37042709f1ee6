"""Parameters of tests: devices (the CPU, and a CUDA device under the marker `gpu`), sweeps and products of values."""

from collections.abc import Iterable
from itertools import chain, product
from typing import Any

import pytest

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""for `parametrize` and for a fixture's `params`"""


def with_devices(names: tuple[str, ...], slow: tuple[str, ...] = (), cpu_only: tuple[str, ...] = ()) -> list[object]:
    """Pairs (name, device) for a fixture's `params`. On a CPU, those in `slow` run with the marker `slow` only."""
    on_cpu = [pytest.param((name, "cpu"), id=name, marks=[pytest.mark.slow] if name in slow else []) for name in names]
    on_cuda = [name for name in names if name not in cpu_only]
    return [*on_cpu, *(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in on_cuda)]


def swept(values: Iterable[Any], *kept: Any) -> list[Any]:
    """`values` for `parametrize`, with tuples spread. All but `kept`, which try each mechanism once, are slow."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    found = [value if len(value) > 1 else value[0] for value in each]
    assert all(value in found for value in kept), "what is kept is among the values"
    return [pytest.param(*one, marks=() if value in kept else pytest.mark.slow) for one, value in zip(each, found, strict=True)]


def covering(*axes: Iterable[Any]) -> list[object]:
    """All combinations for `parametrize`, with tuples spread. Those beyond a few in which every value occurs are slow."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    needed = {tuple(i % len(axis) for axis in values) for i in range(longest)}
    places = product(*(range(len(axis)) for axis in values))
    found = []
    for at in places:
        chosen = [axis[i] if isinstance(axis[i], tuple) else (axis[i],) for axis, i in zip(values, at, strict=True)]
        found.append(pytest.param(*chain(*chosen), marks=() if at in needed else pytest.mark.slow))
    return found
