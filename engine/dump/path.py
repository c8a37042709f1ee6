"""`ExamplePath`: one token path of an example, with its captured rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from replaylens.engine.request.recording import Recording
from replaylens.tasks import Example, Reading, path_offsets
from replaylens.tasks.reading import SHUFFLED, Label
from replaylens.tasks.texts import GivenTexts


@dataclass(eq=False)
class ExamplePath:
    """One token path of an example, with the rows that it does not share with the accepted path: those from `base` on."""

    example: Example
    branch: int
    """0: the accepted path"""
    tokens: list[int]
    num_prompt: int
    base: int
    """position of its first own token; 0 for the accepted path"""
    correct: bool | None
    recording: Recording
    tokenizer: Any

    accepted: "ExamplePath | None" = None
    """the accepted path of the example, if this is a rejected one: up to `base` it has the same tokens"""

    @cached_property
    def _text(self) -> tuple[str, list[tuple[int, int]]]:
        known = self.accepted.offsets[: self.base] if self.accepted is not None else ()
        return path_offsets(self.tokenizer, self.tokens, known)

    @property
    def text(self) -> str:
        return self._text[0]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Characters [start, end) of each token."""
        return self._text[1]

    @cached_property
    def reading(self) -> Reading:
        """The task's reading of the text."""
        known = self.accepted.reading if self.accepted is not None else None
        return self.example.maker.read(self.text, self.example.index, known)

    def labels_at(self, positions: Sequence[int], names: Sequence[str]) -> dict[str, list[Label]]:
        """Labels of some of its tokens: those of a given text are known by position, others are read from the text."""
        given, maker = self.example.given, self.example.maker
        if given is None or not isinstance(maker, GivenTexts):
            return self.reading.labels_at([self.offsets[position] for position in positions], names)
        drawn: list[Label] = [maker.shuffled(self.example.index)] * len(positions)
        return {name: drawn if name == SHUFFLED else values for name, values in given.labels_at(positions, names).items()}
