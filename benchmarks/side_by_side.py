"""Training runs as parallel processes on one device: each is guarded, and all agree on a number of steps."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

from benchmarks import timed_training
from benchmarks.timed_training import Clock
from replaylens.engine.training.thinking import ChunkedTexts, ThinkingRecipe

WARM, TIMED = 15, 25
"""warm-up and timed steps, by which the runs agree on a number of steps"""
Job = tuple[Callable[..., None], str, tuple[Any, ...]]
"""work, its name, and its arguments"""


class Meeting:
    """What the runs of a job agree on: a number of steps that the slowest can reach. Made before the processes start."""

    def __init__(self, context: Any, runs: int) -> None:
        self.rates, self.barrier = context.Array("d", runs), context.Barrier(runs)

    def steps(
        self, number: int, recipe: ThinkingRecipe, texts: ChunkedTexts, device: str, clock: Clock, until: float, most: int
    ) -> int:
        """The number of steps that all runs can take until `until`; called by run `number`."""
        self._meet()  # so that the pace is measured while all run
        self.rates[number] = timed_training.seconds_per_step(recipe, texts, device, WARM, TIMED)
        self._meet()
        return max(20, min(most, int(0.9 * (until - clock.now()) / max(self.rates))))

    def _meet(self) -> None:
        """Wait for the other runs, with a timeout, and not for failed ones."""
        try:
            self.barrier.wait(timeout=150)
        except BrokenBarrierError:
            print("a run is missing; the others continue", flush=True)


def run_all(context: Any, jobs: Sequence[Job], out: Path, clock: Clock, seconds: float, at_once: int) -> None:
    """All jobs, up to `at_once` in parallel, until they end or the time is up. A failure is written to failed-<name>.txt."""
    waiting = [
        context.Process(target=_guarded, args=(work, name, out, given), name=name, daemon=True) for work, name, given in jobs
    ]
    running: list[Any] = []
    while (waiting or running) and clock.now() < seconds:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(0.1)
        running = [process for process in running if process.is_alive()]
    for process in running:
        print(f"{clock.now():5.0f} s  {process.name} did not end in time", flush=True)
        process.terminate()


def _guarded(work: Callable[..., None], name: str, out: Path, arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except Exception:
        (out / f"failed-{name}.txt").write_text(traceback.format_exc())
        print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
