"""`Answer`: how the outcome of a rollout is read: by a regular expression, by choice tokens, or by a function.

| kind     | outcome                                                                    | early stop |
|----------|----------------------------------------------------------------------------|------------|
| regex    | the first group of the first match in the generated text, or the match     | yes        |
| choices  | the likeliest of some tokens as the next one, with the probability of each | no         |
| function | what the function returns for the generated text                           | on request |

A rollout stops early once its answer is certain. A match that ends where the text ends may still grow (a 4 may become a 42),
so a rollout stops only when something follows the match. Its tokens up to there are the same as without the stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import flag, instance, items

NO_ANSWER, OTHER = "no answer", "other"
"""the outcome of rollouts without an answer; the probability of all tokens besides the choices"""
_HALF = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Found:
    """An answer, and the number of characters of the text up to its end."""

    outcome: str
    end: int


@dataclass(frozen=True)
class Answer:
    """How to read the outcome of a rollout. Make one with `Answer.regex`, `Answer.choices` or `Answer.function`.

    >>> Answer.regex(r"answer is (\\d+)").read("So the answer is 42.")
    Found(outcome='42', end=19)
    >>> Answer.regex(r"answer is (\\d+)").certain("So the answer is 4")
    False
    """

    pattern: str | None = None
    tokens: tuple[str | int, ...] = ()
    after: str = ""
    """of choices: text that is forced before the choice"""
    reader: Callable[[str], str | None] | None = None
    stop: bool = True
    """whether a rollout stops once its answer is certain"""

    @classmethod
    def regex(cls, pattern: str, *, stop: bool = True) -> Answer:
        """The first match in the generated text: its first group that took part, or all of it, without outer white space."""
        try:
            re.compile(instance("pattern", pattern, str, "a regular expression"))
        except re.error as error:
            raise BadRequest(f"Invalid regular expression {pattern!r:.60}: {error}.") from error
        return cls(pattern=pattern, stop=flag("stop", stop))

    @classmethod
    def choices(cls, choices: Sequence[str | int], *, after: str = "") -> Answer:
        """The probabilities of some tokens as the next one, read from the logits: exact, at temperature 1, without a sample.

        choices  two or more single tokens, as text (with its leading space, if it has one) or ids
        after    text that is forced at the end of the rollout before they are read, such as "\\nAnswer:"

        With max_new=0, the answer is forced right at the fork, and one rollout is all there is to know.
        """
        tokens = tuple(items("choices", choices, "a list of tokens, as text or ids"))
        if len(tokens) < 2 or len(set(tokens)) < len(tokens):
            raise BadRequest(f"Invalid choices={list(tokens)}. Give at least two different tokens.")
        return cls(tokens=tokens, after=instance("after", after, str, "a text"), stop=False)

    @classmethod
    def function(cls, reader: Callable[[str], str | None], *, stop: bool = False) -> Answer:
        """What a function makes of the generated text: the name of the outcome, or None.

        stop  also call it after every token, and stop the rollout at the first text for which it returns an outcome
        """
        if not callable(reader):
            raise BadRequest(f"Invalid function={reader!r:.60}. Give a function from the text to the outcome, or to None.")
        return cls(reader=reader, stop=flag("stop", stop))

    def read(self, text: str) -> Found | None:
        """The answer in a finished text; None: there is none."""
        text = text.rstrip(_HALF)
        if self.pattern is not None:
            return _group(re.search(self.pattern, text))
        found = None if self.reader is None else self.reader(text)
        if found is None:
            return None
        return Found(instance("outcome", found, str, "the name of the outcome as text, or None"), len(text))

    def certain(self, text: str) -> bool:
        """Whether a text that may go on has an answer that will not grow."""
        if self.pattern is None:
            return self.read(text) is not None
        text = text.rstrip(_HALF)
        found = re.search(self.pattern, text)
        return found is not None and found.end() < len(text)

    def to_json(self) -> dict[str, Any]:
        """Plain values. A function is known by its name alone."""
        if self.reader is not None:
            name = f"{getattr(self.reader, '__module__', '')}.{getattr(self.reader, '__qualname__', 'function')}"
            return {"function": name, "stop": self.stop}
        if self.pattern is not None:
            return {"regex": self.pattern, "stop": self.stop}
        return {"choices": list(self.tokens), "after": self.after}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Answer:
        """Inverse of `to_json`; BadRequest for a function, which is not in the file, and for other values."""
        match raw:
            case {"regex": str(pattern), "stop": bool(stop), **rest} if not rest:
                return cls.regex(pattern, stop=stop)
            case {"choices": [*tokens], "after": str(after), **rest} if not rest:
                return cls.choices(tokens, after=after)
            case {"function": name}:
                raise BadRequest(f"The answer is read by a function ({name}), which no file holds. Give it again.")
        raise BadRequest(f"Invalid answer={raw!r:.60}: neither a regular expression nor choices.")


def _group(found: re.Match[str] | None) -> Found | None:
    if found is None:
        return None
    number = next((i for i, text in enumerate(found.groups(), 1) if text is not None), 0)
    return Found(found[number].strip(), found.end(number))
