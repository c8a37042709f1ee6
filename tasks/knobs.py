"""Knobs: the fields of a task's frozen settings, with their help text, conversion and checks.

A conversion runs before the settings are built (3 becomes the range (3, 3)); their `__post_init__` only checks. A knob
marked `wording` changes the words, never the events. It is not part of the key of the random draws, so an index has the
same events in every rendering.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from replaylens.tasks.errors import BadKnob

Convert = Callable[[str, Any], Any]


def knob(default: Any, help: str, *, convert: Convert | None = None, wording: bool = False) -> Any:
    """Declare one knob of a settings dataclass."""
    return field(default=default, metadata={"help": help, "convert": convert, "wording": wording})


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings that every task has."""

    seed: int = knob(0, "seed of the random draws; each seed gives other examples")

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0)

    def canonical(self, *, events_only: bool = False) -> str:
        """The settings as one line of JSON, the same on every platform; `events_only` leaves out the wording."""
        chosen = {
            spec.name: getattr(self, spec.name) for spec in fields(self) if not (events_only and spec.metadata["wording"])
        }
        return json.dumps(chosen, sort_keys=True)


def as_range(name: str, value: Any) -> tuple[int, int]:
    """Convert 3 to (3, 3) and any pair of integers to a tuple."""
    pair = (value, value) if isinstance(value, int) else value
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise BadKnob(name, value, "Give one integer or a pair (min, max).")
    return pair[0], pair[1]


def check_range(name: str, value: tuple[int, int], *, least: int, most: int) -> None:
    """Raise BadKnob unless both ends are integers in [least, most], in order."""
    for end in value:
        check_whole(name, end, least=least, most=most)
    if value[0] > value[1]:
        raise BadKnob(name, value, "The minimum exceeds the maximum. Swap them.")


def check_whole(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Raise BadKnob unless the value is an integer (not a bool) in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadKnob(name, value, "Give an integer.")
    if value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadKnob(name, value, f"Give an integer {bounds}.")


def check_probability(name: str, value: Any) -> None:
    """Raise BadKnob unless the value is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadKnob(name, value, "Give a probability, a number from 0 to 1.")


def check_choice(name: str, value: Any, options: Sequence[str]) -> None:
    """Raise BadKnob unless the value is one of the options."""
    if value not in options:
        raise BadKnob(name, value, f"Use one of {', '.join(options)}.")
