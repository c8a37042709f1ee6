"""variables: named numbers that are set, copied, added and subtracted, modulo a small number; what is one of them?

The initial values are not operations: a text of length n has n operations after them.
"""

from dataclasses import dataclass

from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_range, check_whole, knob
from replaylens.tasks.tokenizer import vocabulary_of

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
MIN_VARIABLES = 2
MIN_MODULUS, MAX_MODULUS = 2, 10
MAX_ADDED = 3
"""the largest number added or subtracted. If all numbers were equally likely, one operand alone would say nothing about the
result; small models then learn to set and to copy, but not to add"""
SET, COPY, ADD, SUBTRACT = "set", "copy", "add", "subtract"
KINDS = (SET, COPY, ADD, SUBTRACT)

_SIGNS = {" +": ADD, " -": SUBTRACT}
_QUESTION = " What is"


@dataclass(frozen=True, kw_only=True)
class VariablesKnobs(Knobs):
    """Settings of the task `variables`."""

    variables: int = knob(3, f"number of variables, {MIN_VARIABLES} to {len(NAMES)}")
    operations: tuple[int, int] = knob((1, 8), "number of operations: one number or min,max", convert=as_range)
    modulus: int = knob(10, f"values are 0 to modulus - 1; {MIN_MODULUS} to {MAX_MODULUS}, so a value is one digit")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("variables", self.variables, least=MIN_VARIABLES, most=len(NAMES))
        check_range("operations", self.operations, least=1, most=10_000)
        check_whole("modulus", self.modulus, least=MIN_MODULUS, most=MAX_MODULUS)


class Variables(Task[VariablesKnobs]):
    """Assignments to variables. The right side is a number, another variable, or the variable itself plus or minus either."""

    name = "variables"
    description = "Variables are set, copied, added and subtracted, modulo a number; what is one of them?"
    knobs_class = VariablesKnobs
    length_knob = "operations"
    state_label = "state"
    claims = ("value", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs = self.knobs
        values = {name: draws.below(knobs.modulus, "start", n) for n, name in enumerate(NAMES[: knobs.variables])}
        told = "".join(f" {name} = {value}." for name, value in values.items())
        events: list[Event] = []
        for t in range(draws.between(knobs.operations, "length")):
            event = self._drawn(draws, t, tuple(values))
            _apply(event, values, knobs.modulus)
            events.append(event)
            told += _told(event)
        asked = draws.pick(tuple(values), "asked")
        answer = f" {values[asked]}"
        return Story(f"{_opening(knobs.modulus)}{told}{_QUESTION} {asked}? A:", f"{answer}.", answer, tuple(events))

    def _drawn(self, draws: Draws, t: int, names: tuple[str, ...]) -> Event:
        """Draw an operation; all kinds are equally likely. An added or subtracted number is small, and never 0."""
        kind, target = draws.pick(KINDS, "kind", t), draws.pick(names, "target", t)
        if kind == COPY or (kind != SET and draws.chance(0.5, "by a variable", t)):
            return Event(kind, objects=(target, draws.pick([name for name in names if name != target], "other", t)))
        largest = self.knobs.modulus - 1
        number = draws.between((0, largest) if kind == SET else (1, min(MAX_ADDED, largest)), "number", t)
        return Event(kind, objects=(target, str(number)))

    def scene(self) -> Scene:
        return _VariablesScene(NAMES[: self.knobs.variables], self.knobs.modulus)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        openings = (_opening(modulus) for modulus in range(MIN_MODULUS, MAX_MODULUS + 1))
        names = (f" {name}" for name in NAMES)
        return vocabulary_of((*openings, *names, *_numbers(MAX_MODULUS), " =", *_SIGNS, ".", _QUESTION, "? A:"))

    def answers(self) -> tuple[str, ...]:
        return _numbers(self.knobs.modulus)

    def next_action_chance(self) -> float:
        return 1 / len(KINDS)


def _opening(modulus: int) -> str:
    return f"Modulo {modulus}:"


def _numbers(modulus: int) -> tuple[str, ...]:
    return tuple(f" {number}" for number in range(modulus))


def _told(event: Event) -> str:
    target, operand = event.objects
    changed = next((f"{target}{sign} " for sign, kind in _SIGNS.items() if kind == event.action), "")
    return f" {target} = {changed}{operand}."


def _apply(event: Event, values: dict[str, int], modulus: int) -> None:
    target, operand = event.objects
    number = values[operand] if operand in values else int(operand)
    now = {ADD: values[target] + number, SUBTRACT: values[target] - number}
    values[target] = now.get(event.action, number) % modulus


class _VariablesScene(Scene):
    """The variables' values. An operation takes effect at its last word, which is always recognisable."""

    def __init__(self, names: tuple[str, ...], modulus: int) -> None:
        super().__init__()
        self.names, self.modulus = names, modulus
        per_variable = tuple(f"{kind}.{name}" for name in names for kind in ("value", "touched"))
        self.label_names = (
            "state", "value", "claimed", "asked", "target", "result", "actions", "last_action", *per_variable,
        )  # fmt: skip
        self.values: dict[str, int] = {}
        self.touched: set[str] = set()
        self.target: str | None = None
        self.asked: str | None = None
        self.claimed: int | None = None

    def labels(self) -> dict[str, Label]:
        last = self.told[-1][0] if self.told else None
        labels: dict[str, Label] = {
            "state": " ".join(map(str, self.values.values())) if len(self.values) == len(self.names) else None,
            "value": None if self.asked is None else self.values[self.asked],
            "claimed": self.claimed,
            "asked": self.asked,
            "target": self.target,
            "result": self.values[last.objects[0]] if last else None,
            "actions": len(self.told),
            "last_action": last.action if last else None,
        }
        for name in self.names:
            labels[f"value.{name}"] = self.values.get(name)
            labels[f"touched.{name}"] = name in self.touched if name in self.values else None
        return labels

    def thought(self) -> str:
        target = self.told[-1][0].objects[0]
        return f" {target} {self.values[target]}"

    def script(self) -> Script:
        numbers, names = _numbers(self.modulus), tuple(f" {name}" for name in self.names)
        yield (_opening(self.modulus),)
        for name in self.names:
            yield (f" {name} =",)
            self.values[name] = int((yield numbers))
            yield (".",)
        while (piece := (yield (*names, _QUESTION) if self.told else names)) != _QUESTION:
            self.target = piece[1:]
            yield (" =",)
            yield from self._operation(self.target, numbers, names)
            yield (".",)
        self.asked = (yield names)[1:]
        yield ("? A:",)
        self.claimed = int((yield numbers))
        yield (".",)

    def _operation(self, target: str, numbers: tuple[str, ...], names: tuple[str, ...]) -> Script:
        """The right side of =. If it begins with the target's own name, the operation is an addition or a subtraction."""
        operand = yield (*names, *numbers)
        if operand != f" {target}":
            self._happen(Event(COPY if operand in names else SET, objects=(target, operand[1:])), telling=1)
            return
        kind = _SIGNS[(yield tuple(_SIGNS))]
        operand = yield (*(name for name in names if name != f" {target}"), *numbers)
        self._happen(Event(kind, objects=(target, operand[1:])), telling=3)

    def _happen(self, event: Event, telling: int) -> None:
        _apply(event, self.values, self.modulus)
        self.touched.add(event.objects[0])
        self.happen(event, pieces=2 + telling, telling=telling)
