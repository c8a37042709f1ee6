"""Reading: the labels of a task's text, character by character.

A token takes the labels in force after its LAST character. So a label holds what can be inferred from the text up to
and including the token. The one exception is `next_action`, which looks ahead on purpose.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from replaylens.tasks.errors import UnknownLabel

Label = str | int | float | bool | None
Offset = tuple[int, int]

NEXT_ACTION = "next_action"
SHUFFLED = "shuffled"
RESERVED = (
    *("example", "root", "branch", "parent", "fork_position", "position", "token", "text", "token_state", "accepted"),
    *("correct", "logprob", "entropy", "shard", "row", "depth"),
    *("step", "since_step", "until_step", "since_query", "steps", "since_last", "part", "key", "group"),
)
"""columns of dumps and of rows to probe, which no label may be named after"""


@dataclass(frozen=True)
class Event:
    """An event of the text. The labels last_action and next_action show its `action`."""

    action: str
    actor: str = ""
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """An event at characters [start, end). It can be fully inferred once `end` characters are read.

    `reveals`: start of the first word that reveals anything about the action. `thought`: the state after the step, in
    words of the task's vocabulary.
    """

    start: int
    reveals: int
    end: int
    event: Event
    thought: str


@dataclass(frozen=True)
class Span:
    """Characters [start, end) under the same labels."""

    start: int
    end: int
    labels: Mapping[str, Label]


class ReadingMark(NamedTuple):
    """What holds once `read` characters are read: the end of a piece of the grammar."""

    read: int
    labels: Mapping[str, Label]
    """without `next_action` and `shuffled`"""
    next_action_open: bool
    """whether nothing read so far reveals anything about the next action"""
    steps: int
    """number of steps so far"""


@dataclass(frozen=True)
class Reading:
    """A text with its labels. From character `readable_until` on, it breaks the task's grammar and has no labels.

    `marks`: what holds at the start and after each piece of the grammar. `complete`: the text reaches the end of the
    grammar (answer and full stop).
    """

    text: str
    marks: tuple[ReadingMark, ...] = field(repr=False)
    steps: tuple[Step, ...]
    readable_until: int
    complete: bool
    label_names: tuple[str, ...] = field(repr=False)
    shuffled: Label = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the text, in order."""
        return tuple(step.event for step in self.steps)

    @property
    def thoughts(self) -> list[tuple[int, str]]:
        """For each step: the character count after which the new state can be inferred, and that state in words."""
        return [(step.end, step.thought) for step in self.steps]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The readable characters, in runs of equal labels and no longer than a piece of the grammar.

        Labels after the n-th character belong to character n - 1, so a mark's span begins one character early.
        """
        spans: list[Span] = []
        for here, after in zip(self.marks, [*self.marks[1:], None], strict=True):
            start = max(here.read - 1, 0)
            end = self.readable_until if after is None else after.read - 1
            ahead = self._upcoming(here)
            hidden = start if ahead is None else min(max(ahead.reveals, start), end)
            spans += [Span(a, b, self.labels_after(a + 1)) for a, b in ((start, hidden), (hidden, end)) if a < b]
        return tuple(spans)

    @cached_property
    def _reads(self) -> list[int]:
        return [mark.read for mark in self.marks]

    def _mark(self, count: int) -> ReadingMark | None:
        """The last mark within the first `count` characters; None at 0 and past `readable_until`."""
        if not 0 < count <= self.readable_until:
            return None
        return self.marks[bisect_right(self._reads, count) - 1]

    def _upcoming(self, mark: ReadingMark) -> Step | None:
        """The step whose action is `next_action` at a mark, up to the first word that reveals it."""
        return self.steps[mark.steps] if mark.next_action_open and mark.steps < len(self.steps) else None

    def _next_action(self, mark: ReadingMark | None, count: int) -> Label:
        """It has a value only before the first word that reveals it; from there on it is None."""
        ahead = None if mark is None else self._upcoming(mark)
        return ahead.event.action if ahead is not None and count <= ahead.reveals else None

    def labels_after(self, count: int) -> Mapping[str, Label]:
        """Labels in force once `count` characters are read; all None at 0 and past `readable_until`."""
        return {name: values[0] for name, values in self.labels_at([(0, count)]).items()}

    def labels_at(self, offsets: Iterable[Offset], names: Sequence[str] | None = None) -> dict[str, list[Label]]:
        """Labels per token, from each token's (start, end). An empty token (a special one) has no labels."""
        wanted = self.label_names if names is None else tuple(names)
        for name in wanted:
            if name not in self.label_names:
                raise UnknownLabel(name, self.label_names)
        ends = [end if end > start else 0 for start, end in offsets]
        marks, none = [self._mark(end) for end in ends], dict.fromkeys(self.label_names)
        rows = [none if mark is None else mark.labels for mark in marks]
        found: dict[str, list[Label]] = {}
        for name in wanted:
            if name == NEXT_ACTION:
                found[name] = [self._next_action(mark, end) for mark, end in zip(marks, ends, strict=True)]
            elif name == SHUFFLED:
                found[name] = [None if mark is None else self.shuffled for mark in marks]
            else:
                found[name] = [row[name] for row in rows]
        return found
