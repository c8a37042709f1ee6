"""Runs that stop in the middle, for tests of resuming."""

from collections.abc import Callable


class Interrupted(Exception):
    """Stands for a crash."""


def interrupt_at(step: int) -> Callable[[int, float], None]:
    """A callback for every step of a training run. Stops the run after `step`."""

    def after_step(done: int, loss: float) -> None:
        if done == step:
            raise Interrupted

    return after_step
