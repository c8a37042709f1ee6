"""`ExamplePath`: one token path of an example, with its captured rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from replaylens.engine.request.capture import Recording
from replaylens.tasks import Example, Reading, WordTokenizer, path_offsets


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

    @cached_property
    def _text(self) -> tuple[str, list[tuple[int, int]]]:
        if not isinstance(self.tokenizer, WordTokenizer):
            return path_offsets(self.tokenizer, self.tokens)
        words = {token: self.tokenizer.decode([token]) for token in set(self.tokens)}
        pieces = [words[token] for token in self.tokens]  # a word's text does not depend on its neighbours
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return "".join(pieces), list(zip([0, *ends[:-1]], ends, strict=True))

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
        return self.example.maker.read(self.text, self.example.index)
