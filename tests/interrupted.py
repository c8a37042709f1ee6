"""Runs that stop in the middle, for tests of whatever goes on afterwards."""

from collections.abc import Callable


class Interrupted(Exception):
    """Stands for a crash."""


def interrupt_at(step: int) -> Callable[[int, float], None]:
    """Called after every step of a training run; stops it after this one."""

    def after_step(done: int, loss: float) -> None:
        if done == step:
            raise Interrupted

    return after_step
