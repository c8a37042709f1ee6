"""Example: one prompt with its answer, the events behind it, and its labels."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from replaylens.tasks.reading import Event, Label, Offset, Reading, Span, Step

if TYPE_CHECKING:
    from replaylens.tasks.task import AnyTask


@dataclass(frozen=True)
class Example:
    """A pure function of (task, knobs, seed, index). Labels are read from the text on first use.

    `text` is prompt + completion. `answer` is the part of the completion that answers the question, with its leading
    space: the word to score. `maker` is the task itself, kept so that the labels come from its reader.
    """

    task: str
    knobs: str
    index: int
    prompt: str
    completion: str
    answer: str
    events: tuple[Event, ...]
    maker: "AnyTask" = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """The whole text, as a model is trained on it."""
        return self.prompt + self.completion

    @cached_property
    def root(self) -> str:
        """Group id for splits: equal prompts share it, whatever their index, so that no prompt is on both sides."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]

    @cached_property
    def reading(self) -> Reading:
        """The text's labels, from the same reader that reads a model's continuations."""
        return self.maker.read(self.text, self.index)

    def read(self, continuation: str) -> Reading:
        """Labels of another path from this prompt: the prompt with any continuation, also a wrong or broken one."""
        return self.maker.read(self.prompt + continuation, self.index)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Labels by character."""
        return self.reading.spans

    @property
    def steps(self) -> tuple[Step, ...]:
        """The events with their places in the text."""
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
