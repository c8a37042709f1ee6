"""Task: makes examples, and reads any text of its kind back into events and labels. Example: one prompt with its answer."""

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from operator import index as as_index
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from replaylens.tasks.errors import BadKnob, TaskError, unknown
from replaylens.tasks.reading import (
    NEXT_ACTION,
    SHUFFLED,
    Event,
    GivenText,
    Label,
    Offset,
    Reading,
    Scene,
    Span,
    Step,
    read_script,
)

# ---- draws -----------------------------------------------------------------------------------------------------------
# Stateless randomness: every draw is a hash of its purpose.
#
# A draw depends only on the key (task, knobs, seed), the example's index, the purpose in words and a running number, not
# on earlier draws, the platform or the Python version. Adding a draw never shifts the others.

T = TypeVar("T")

_BITS = 64
_BAD_INDEX = "Bad example index {!r}. Give an integer of at least 0."


class Draws:
    """All draws of one example. Immutable: the same purpose and place always give the same value."""

    __slots__ = ("_base",)

    def __init__(self, key: str, index: int) -> None:
        self._base = hashlib.blake2b(f"{key}\n{index}".encode(), digest_size=_BITS // 8, person=b"replaylens.tasks")

    def bits(self, purpose: str, place: int = 0) -> int:
        """An integer, uniform on [0, 2**64)."""
        drawn = self._base.copy()
        drawn.update(f"\n{purpose}\n{place}".encode())
        return int.from_bytes(drawn.digest(), "big")

    def below(self, n: int, purpose: str, place: int = 0) -> int:
        """An integer, uniform on [0, n) up to a bias of n / 2**64."""
        return self.bits(purpose, place) * n >> _BITS

    def between(self, bounds: tuple[int, int], purpose: str, place: int = 0) -> int:
        """An integer, uniform on the closed interval `bounds`."""
        low, high = bounds
        return low + self.below(high - low + 1, purpose, place)

    def chance(self, p: float, purpose: str, place: int = 0) -> bool:
        """True with probability p: never for p = 0, always for p = 1."""
        return (self.bits(purpose, place) >> 11) * 2.0**-53 < p  # 53 bits: the comparison is exact in a double

    def pick(self, options: Sequence[T], purpose: str, place: int = 0) -> T:
        """One of the options, each equally likely."""
        return options[self.below(len(options), purpose, place)]

    def order(self, items: Sequence[T], purpose: str) -> list[T]:
        """The items in a uniformly random order; the first k of them are a random sample."""
        left = list(items)
        return [left.pop(self.below(len(left), purpose, place)) for place in range(len(items))]


# ---- knobs -----------------------------------------------------------------------------------------------------------
# Knobs: the fields of a task's frozen settings, with their help text, conversion and checks.
#
# A conversion runs before the settings are built (3 becomes the range (3, 3)); their `__post_init__` only checks. A knob
# marked `wording` changes the words, never the events. It is not part of the key of the random draws, so an index has the
# same events in every rendering.

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


# ---- task ------------------------------------------------------------------------------------------------------------

K = TypeVar("K", bound=Knobs)


class KnownZero(NamedTuple):
    """A label that the text does not determine: a probe for it must score at chance."""

    label: str
    chance: float
    """Exact accuracy of the best guess: the probability of the most likely value."""
    why: str


@dataclass(frozen=True)
class Story:
    """A task's output for one index: the text in two parts, the answer within it, and the events."""

    prompt: str
    completion: str
    answer: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Example:
    """A pure function of (task, knobs, seed, index). Labels are read from the text on first use.

    `text` is prompt + completion. `answer` is the part of the completion that answers the question, with its leading
    space: the word to score. `maker` is the task, whose reader gives the labels. `given` is a text of the user's own, whose
    tokens and labels need no reader.
    """

    task: str
    knobs: str
    index: int
    prompt: str
    completion: str
    answer: str
    events: tuple[Event, ...]
    maker: "Task[Any]" = field(repr=False, compare=False)
    given: GivenText | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The whole text, as a model is trained on it."""
        return self.prompt + self.completion

    @cached_property
    def root(self) -> str:
        """Group id for splits. Equal prompts share it, whatever their index, so no prompt is on both sides."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]

    @cached_property
    def reading(self) -> Reading:
        """The text's labels, from the same reader that reads a model's continuations."""
        return self.maker.read(self.text, self.index)

    def read(self, continuation: str) -> Reading:
        """Labels of the prompt with another continuation, even a wrong or broken one."""
        return self.maker.read(self.prompt + continuation, self.index)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Labels by character."""
        return self.reading.spans

    @property
    def steps(self) -> tuple[Step, ...]:
        """The events with their positions in the text."""
        return self.reading.steps

    @property
    def thoughts(self) -> list[tuple[int, str]]:
        """For each step: the character count after which the new state can be inferred, and that state in words."""
        return self.reading.thoughts

    def labels_at(self, offsets: Iterable[Offset], names: Sequence[str] | None = None) -> dict[str, list[Label]]:
        """Labels per token, from the tokens' (start, end); see `Reading.labels_at`."""
        return self.reading.labels_at(offsets, names)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the example, labels included: equal digests mean equal examples."""
        content: Mapping[str, object] = {
            "task": self.task,
            "knobs": json.loads(self.knobs),
            "index": self.index,
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
            "events": [asdict(event) for event in self.events],
            "spans": [[span.start, span.end, dict(span.labels)] for span in self.spans],
            "steps": [asdict(step) for step in self.steps],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def require_room_for(which: Sized) -> None:
    """TaskError if this machine has no memory for so many examples. Makes none."""
    from replaylens.engine.machine import EXAMPLE_BYTES, require_room

    try:
        count = len(which)
    except OverflowError:  # of a range
        count = sys.maxsize
    require_room(f"examples={count}", memory=count * EXAMPLE_BYTES, error=TaskError)


class Task(ABC, Generic[K]):
    """A family of texts with exact ground truth. `Task(**knobs)`; an unknown or impossible knob is an error.

    A subclass names itself, declares its knobs, and implements `write`, `scene`, `vocabulary`, `answers` and
    `next_action_chance`. Tasks with equal knobs are equal.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    knobs_class: ClassVar[type[Knobs]]
    length_knob: ClassVar[str]
    """The knob for the number of steps in a text; the length split varies it."""

    state_label: ClassVar[str]
    """The label of the task's true state."""
    claims: ClassVar[tuple[str, str]]
    """Two labels to compare: the truth, and the text's claim about it. They differ where the text is wrong."""
    step_label: ClassVar[str] = "actions"
    """The label that counts steps: the position `step` is where it grows. A task without this label has no steps."""

    knobs: K

    def __init__(self, /, **knobs: Any) -> None:
        self.knobs = self._settings(knobs)

    @classmethod
    def _settings(cls, knobs: dict[str, Any]) -> Any:
        specs = {spec.name: spec for spec in fields(cls.knobs_class)}
        for given in knobs:
            if given not in specs:
                raise TaskError(unknown("knob", given, specs, of=f" of task {cls.name!r}"))
        converts = {name: specs[name].metadata["convert"] for name in knobs}
        return cls.knobs_class(**{n: converts[n](n, v) if converts[n] else v for n, v in knobs.items()})

    @abstractmethod
    def write(self, draws: Draws) -> Story:
        """Write the text of one index; all choices come from `draws`."""

    @abstractmethod
    def scene(self) -> Scene:
        """A fresh scene whose script reads this task's texts."""

    @classmethod
    @abstractmethod
    def vocabulary(cls) -> tuple[str, ...]:
        """Every word of the task's texts and thoughts, for all knobs; sorted, leading spaces included."""

    @abstractmethod
    def answers(self) -> tuple[str, ...]:
        """Every answer an example can have, with its leading space."""

    @abstractmethod
    def next_action_chance(self) -> float:
        """Probability of the most likely next action, wherever the label has a value."""

    def example(self, index: int) -> Example:
        """The example at this index: a pure function of (task, knobs, seed, index)."""
        story = self.write(self._draws(index))
        return Example(
            task=self.name,
            knobs=self._knobs_line,
            index=index,
            prompt=story.prompt,
            completion=story.completion,
            answer=story.answer,
            events=story.events,
            maker=self,
        )

    def examples(self, which: int | Iterable[int]) -> list[Example]:
        """The first `which` examples, or those at the given indices."""
        if isinstance(which, bool):
            raise TaskError(_BAD_INDEX.format(which))
        try:
            count = as_index(which)  # type: ignore[arg-type]  # it says if it cannot
        except TypeError:  # several, or nothing of the kind
            if not isinstance(which, Iterable):
                raise TaskError(_BAD_INDEX.format(which)) from None
            if isinstance(which, Sized):
                require_room_for(which)
            return [self.example(index) for index in which]
        if not 0 <= count <= sys.maxsize:  # no list is longer
            raise TaskError(_BAD_INDEX.format(which))
        require_room_for(range(count))
        return [self.example(index) for index in range(count)]

    def read(self, text: str, index: int | None = None, known: Reading | None = None) -> Reading:
        """Events and labels of any text: a prompt with any continuation, right or wrong, cut anywhere.

        `index`: that of the prompt's example; without it the label `shuffled` is None. `known`: this task's reading of
        a text with the same beginning; saves time and changes nothing. Raises UnreadableText if the text does not begin
        like a text of this task.
        """
        shuffled = None if index is None else self._draws(index).below(2, SHUFFLED)
        return read_script(self.scene(), text, f"task {self.name!r}", shuffled, known)

    def thoughts(self, example: Example) -> list[tuple[int, str]]:
        """For each step of the example: (characters read when the new state can be inferred, the state in words)."""
        return example.thoughts

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """Every label of this task's texts."""
        return (*self.scene().label_names, NEXT_ACTION, SHUFFLED)

    @property
    def known_zero(self) -> tuple[KnownZero, ...]:
        """The labels that no probe can read, with the exact accuracy of guessing."""
        return (
            KnownZero(NEXT_ACTION, self.next_action_chance(), "drawn independently of the text before it"),
            KnownZero(SHUFFLED, 0.5, "a fair coin per example, drawn independently of its text"),
        )

    def with_knobs(self, **changes: Any) -> Self:
        """The same task with some knobs changed."""
        return type(self)(**{spec.name: getattr(self.knobs, spec.name) for spec in fields(self.knobs)} | changes)

    def _draws(self, index: int) -> Draws:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise TaskError(_BAD_INDEX.format(index))
        return Draws(self._key, index)

    @cached_property
    def _key(self) -> str:
        return f"{self.name}\n{self.knobs.canonical(events_only=True)}"

    @cached_property
    def _knobs_line(self) -> str:
        return self.knobs.canonical()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.name == other.name and self.knobs == other.knobs

    def __hash__(self) -> int:
        return hash((self.name, self.knobs))

    def __repr__(self) -> str:
        shown = ", ".join(f"{spec.name}={getattr(self.knobs, spec.name)!r}" for spec in fields(self.knobs))
        return f"{type(self).__name__}({shown})"


AnyTask = Task[Any]
