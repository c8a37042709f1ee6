"""Task variants shared by the general tests, and random walks through a task's grammar."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from replaylens import tasks
from replaylens.tasks.task import AnyTask
from tests.devices import swept

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("coin", {}),
    ("coin", {"distractors": 2, "phrasing": "mixed", "names": "all", "p": 0.3}),
    ("coin", {"rendering": "states", "distractors": 1}),
    ("coin", {"rendering": "states", "phrasing": "idle", "names": "held-out"}),
    ("coin", {"rendering": "wei"}),
    ("coin", {"rendering": "wei", "verb": "turn", "phrasing": "mixed", "start": "tails"}),
    ("coin", {"rendering": "symbols", "flips": 12}),
    ("coin", {"rendering": "steps", "distractors": 1}),
    ("coins", {}),
    ("coins", {"coins": 6, "names": "held-out", "p": 0.8}),
    ("coin-resets", {}),
    ("coin-resets", {"reset": 0.6}),
    ("shell", {}),
    ("shell", {"cups": 5, "start": "fixed", "p": 0.6}),
    ("words", {}),
    ("words", {"group": "Z60", "seed": 3}),
    ("words", {"group": "A4xZ5", "length": 6}),
    ("fork", {}),
    ("fork", {"depth": 8}),
    ("boxes", {"boxes": 7}),
    ("boxes", {"boxes": 3, "moves": 10}),
    ("variables", {}),
    ("variables", {"variables": 8, "modulus": 7, "operations": 12}),
    ("variables", {"variables": 2, "modulus": 2, "seed": 5}),
    ("hops", {}),
    ("hops", {"hops": (1, 6), "people": 12, "relations": 4}),
    ("counts", {}),
    ("counts", {"people": 4, "operations": (2, 12), "most": 99, "change": 9}),
]


def _id(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join((variant[0], *(f"{key}={value}" for key, value in variant[1].items())))


KEPT = ({"distractors": 1, "rendering": "steps"}, {"distractors": 2, "names": "all", "p": 0.3, "phrasing": "mixed"})
"""knobs of the variants that are tried always, beside the plain tasks; the others are slow"""


@pytest.fixture(
    params=[pytest.param(each, marks=pytest.mark.slow if each[1] and each[1] not in KEPT else ()) for each in VARIANTS], ids=_id
)
def task(request: pytest.FixtureRequest) -> AnyTask:
    name, knobs = request.param
    return tasks.get(name)(**knobs)


@pytest.fixture(params=swept(tasks.names(), "coin", "shell", "boxes", "hops", "fork", "counts"))
def plain_task(request: pytest.FixtureRequest) -> AnyTask:
    return tasks.get(request.param)()


Wander = Callable[[AnyTask, Callable[[Sequence[str]], str], int], str]


@pytest.fixture(scope="session")
def wander() -> Wander:
    """A text that the task's grammar allows, true or false: `choose` picks one of the possible pieces at each place."""

    def walk(task: AnyTask, choose: Callable[[Sequence[str]], str], pieces: int) -> str:
        script = task.scene().script()
        offered: Sequence[str] = next(script)
        text = ""
        for _ in range(pieces):
            piece = choose(offered)
            text += piece
            try:
                offered = script.send(piece)
            except StopIteration:
                break
        return text

    return walk
