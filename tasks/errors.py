"""Every error the tasks raise. Each message says what was wrong and what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches


class TaskError(ValueError):
    """Base of all errors about tasks, their knobs, their texts and their tokenizer."""


class UnknownTask(TaskError):
    """No task has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(_unknown("task", name, known))


class UnknownKnob(TaskError):
    """The task has no knob of this name."""

    def __init__(self, task: str, name: str, known: Iterable[str]) -> None:
        super().__init__(_unknown(f"knob of task {task!r}", name, known))


class UnknownLabel(TaskError):
    """The task gives no label of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(_unknown("label", name, known))


class BadKnob(TaskError):
    """A knob has a value it cannot take, alone or together with the others."""

    def __init__(self, knob: str, value: object, wanted: str) -> None:
        super().__init__(f"knob {knob!r} cannot be {value!r}: {wanted}")


class BadSplit(TaskError):
    """The split cannot be made from this task, or its two sides would overlap."""


class BadIndex(TaskError):
    """An example's index is not a whole number from 0 up."""

    def __init__(self, index: object) -> None:
        super().__init__(f"an example's index is a whole number from 0 up, not {index!r}")


class UnreadableText(TaskError):
    """The text does not begin like a text of the task, so nothing in it can be labelled."""

    def __init__(self, task: str, text: str, wanted: Iterable[str]) -> None:
        openings = " or ".join(repr(opening) for opening in wanted)
        super().__init__(
            f"not a text of {task}: it begins {text[:40]!r}, and should begin {openings}; "
            f"check the task's name and its rendering"
        )


class UnknownWord(TaskError):
    """The tokenizer's vocabulary lacks a word of the text."""

    def __init__(self, word: str, offset: int) -> None:
        self.word = word
        self.offset = offset
        super().__init__(
            f"the word {word!r} at character {offset} is not in the vocabulary; "
            f"build the tokenizer from a task that uses it (a leading space is part of a word)"
        )


class UnknownToken(TaskError):
    """A token id lies outside the vocabulary."""

    def __init__(self, token: object, size: int) -> None:
        super().__init__(f"token id {token!r} is outside this vocabulary: ids run from 0 to {size - 1}")


class BadTokenizer(TaskError):
    """A tokenizer file or object cannot be used; the message says which part is wrong."""


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    nearest = get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"unknown {kind}: {name!r}{hint}. Known: {', '.join(known)}"
