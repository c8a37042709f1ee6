"""`ExamplePath`: one token path of an example, with its captured rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from replaylens.engine.request.recording import Recording
from replaylens.tasks import Example, Reading, path_offsets


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
    correct: bool
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
