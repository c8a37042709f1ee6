"""Knobs: the fields of a task's frozen settings, with their help text, conversion and checks.

A conversion runs before the settings are built (3 becomes the range (3, 3)); `__post_init__` of the settings only
checks. A knob marked `wording` changes how events are told, never which events happen: it is left out of the key
of the random draws, so the same index tells the same story in every rendering.
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

    seed: int = knob(0, "another seed gives other examples")

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0)

    def canonical(self, *, events_only: bool = False) -> str:
        """The settings as one line of JSON, the same on every platform; `events_only` leaves out the wording."""
        chosen = {
            spec.name: getattr(self, spec.name) for spec in fields(self) if not (events_only and spec.metadata["wording"])
        }
        return json.dumps(chosen, sort_keys=True)


def as_range(name: str, value: Any) -> tuple[int, int]:
    """Convert 3 to (3, 3) and any pair of whole numbers to a tuple."""
    pair = (value, value) if isinstance(value, int) else value
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise BadKnob(name, value, "give one whole number or a pair (least, most)")
    return pair[0], pair[1]


def check_range(name: str, value: tuple[int, int], *, least: int, most: int) -> None:
    """Both ends are whole numbers in [least, most], in order."""
    for end in value:
        check_whole(name, end, least=least, most=most)
    if value[0] > value[1]:
        raise BadKnob(name, value, "the least is larger than the most; swap them")


def check_whole(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """The value is a whole number (not a bool) in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadKnob(name, value, "it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise BadKnob(name, value, f"it must lie {bounds}")


def check_probability(name: str, value: Any) -> None:
    """The value is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadKnob(name, value, "it must be a probability, a number from 0 to 1")


def check_choice(name: str, value: Any, options: Sequence[str]) -> None:
    """The value is one of the options."""
    if value not in options:
        raise BadKnob(name, value, f"choose one of {', '.join(options)}")
