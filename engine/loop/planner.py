"""`Planner`: chooses the window (rows per verification) from measured costs. It changes how fast tokens come, never which."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from replaylens.engine.loop.lane import Statistics
from replaylens.engine.passes.batch import TILE

FIXED_WINDOW = 8
"""the window of reproducible drafters: the set of rejected branches must not depend on timings"""
_WINDOWS = (1, 4, 8, 16, 32)


class Planner:
    """Keeps running averages of the cost of draft steps and passes, and picks the window with the most tokens per second."""

    def __init__(self) -> None:
        self._cost: dict[str, dict[int, float]] = defaultdict(dict)
        self._costs: dict[int, list[float]] = {}
        """seconds of a step at each of `_WINDOWS`, by number of requests; forgotten at the next measurement"""

    @contextmanager
    def timing(self, kind: str, rows: int, steps: int = 1) -> Iterator[None]:
        """Measure the block, which takes `steps` equal steps over `rows` rows each."""
        begin = time.perf_counter()
        yield
        sample = (time.perf_counter() - begin) / steps
        size = rows if kind == "draft" else _size(rows)
        old = self._cost[kind].get(size)
        self._cost[kind][size] = sample if old is None else 0.8 * old + 0.2 * sample
        self._costs.clear()

    def window(self, reproducible: bool, num_requests: int, statistics: Statistics) -> int:
        """Rows per verification, including the last token's own; 1 means direct decoding."""
        if reproducible:
            return FIXED_WINDOW
        acceptance = (statistics.accepted + 8) / (statistics.drafted + 8)  # optimistic until measured
        if num_requests not in self._costs:
            self._costs[num_requests] = [self._step_cost(window, num_requests) for window in _WINDOWS]
        rates = [run / cost for run, cost in zip(_expected(acceptance), self._costs[num_requests], strict=True)]
        return _WINDOWS[rates.index(max(rates))]  # the smallest of equals

    def _step_cost(self, window: int, num_requests: int) -> float:
        """Seconds of the drafts and the verification of all requests together."""
        return self._pass_cost(window * num_requests) + (window - 1) * self._draft_cost(num_requests)

    def _draft_cost(self, num_requests: int) -> float:
        """Seconds of one draft step for all requests; before the first measurement, a third of the smallest pass each."""
        known = self._cost["draft"]
        if not known:
            return num_requests * self._pass_cost(TILE) / 3
        nearest = min(known, key=lambda k: abs(k - num_requests))
        return known[nearest] * num_requests / nearest

    def _pass_cost(self, rows: int) -> float:
        """Seconds of one pass: measured, or scaled from the nearest measured size as a fixed part and a part per row."""
        size = _size(rows)
        known = self._cost["exact"]
        if size in known:
            return known[size]
        if not known:
            return 1.0 + 0.02 * size
        nearest = min(known, key=lambda k: abs(k - size))
        return known[nearest] * (TILE + size) / (TILE + nearest)


@lru_cache(maxsize=1024)
def _expected(acceptance: float) -> list[float]:
    """The tokens that a verification is expected to yield, at each of `_WINDOWS`."""
    return [1 + sum(acceptance**i for i in range(1, window)) for window in _WINDOWS]


def _size(rows: int) -> int:
    """The size class of a pass: whole tiles, except that fewer rows than a tile may cost much less than one."""
    return rows if rows < TILE else -(-rows // TILE) * TILE
