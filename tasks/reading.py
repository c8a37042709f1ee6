"""Reading: the labels of a task's text, character by character.

A token takes the labels in force after its LAST character. So a label holds what can be inferred from the text up to
and including the token. The one exception is `next_action`, which looks ahead on purpose.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from replaylens.tasks.errors import UnknownLabel

Label = str | int | bool | None
Offset = tuple[int, int]


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


@dataclass(frozen=True)
class Reading:
    """A text with its labels. From character `readable_until` on, it breaks the task's grammar and has no labels.

    `complete`: the text reaches the end of the grammar (answer and full stop).
    """

    text: str
    spans: tuple[Span, ...]
    steps: tuple[Step, ...]
    readable_until: int
    complete: bool
    label_names: tuple[str, ...] = field(repr=False)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the text, in order."""
        return tuple(step.event for step in self.steps)

    @property
    def thoughts(self) -> list[tuple[int, str]]:
        """For each step: the character count after which the new state can be inferred, and that state in words."""
        return [(step.end, step.thought) for step in self.steps]

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans]

    def labels_after(self, count: int) -> Mapping[str, Label]:
        """Labels in force once `count` characters are read; all None at 0 and past `readable_until`."""
        if not 0 < count <= self.readable_until:
            return dict.fromkeys(self.label_names)
        return self.spans[bisect_right(self._starts, count - 1) - 1].labels

    def labels_at(self, offsets: Iterable[Offset], names: Sequence[str] | None = None) -> dict[str, list[Label]]:
        """Labels per token, from each token's (start, end). An empty token (a special one) has no labels."""
        wanted = self.label_names if names is None else tuple(names)
        for name in wanted:
            if name not in self.label_names:
                raise UnknownLabel(name, self.label_names)
        rows = [self.labels_after(end if end > start else 0) for start, end in offsets]
        return {name: [row[name] for row in rows] for name in wanted}
