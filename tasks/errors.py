"""Errors of the tasks. Each message says what happened, what was given and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class TaskError(ValueError):
    """Base of all errors about tasks, their knobs, their texts and their tokenizer."""


class UnknownTask(TaskError):
    """No task has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"{_unknown('task', name, known)} A task of your own is known once it is registered: import the module with its "
            f"@tasks.register, install its entry point, or give its code, task=file.py:Class (see docs/extending.md)."
        )


class TaskNameTaken(TaskError):
    """Two tasks have the same name, by which dumps, recipes and reports cite them."""

    def __init__(self, name: str, new: str, holder: str) -> None:
        super().__init__(
            f"Task name {name!r} is taken: {new} has it, and so has {holder}. Dumps and recipes cite a task by its name. "
            f"Rename one of them, or uninstall it."
        )


class BadTask(TaskError):
    """A class that is not a complete task. The message names the first thing that is missing."""


class BrokenPlugin(TaskError):
    """An installed distribution declares a task that cannot be loaded. Other tasks are not affected."""

    def __init__(self, name: str, distribution: str, value: str, problem: object) -> None:
        self.distribution = distribution
        super().__init__(
            f"Task {name!r} of {distribution} cannot be loaded from {value!r}: {str(problem).rstrip('.')}. Update or uninstall "
            f"that distribution."
        )


class CannotImport(TaskError):
    """A task named as module:Class or file.py:Class cannot be imported."""


class UnknownKnob(TaskError):
    """The task has no knob of this name."""

    def __init__(self, task: str, name: str, known: Iterable[str]) -> None:
        super().__init__(_unknown("knob", name, known, of=f" of task {task!r}"))


class UnknownLabel(TaskError):
    """The task has no label of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(_unknown("label", name, known))


class BadKnob(TaskError):
    """A knob has a value it cannot take, alone or together with the others."""

    def __init__(self, knob: str, value: object, wanted: str) -> None:
        super().__init__(f"Knob {knob!r} cannot be {value!r}. {wanted}")


class BadSplit(TaskError):
    """The split cannot be made from this task, or its two sides would overlap."""


class TooFewPrompts(BadSplit):
    """A task has no prompt on a side that is chosen by a hash of the prompt. `prompts` counts those on the other side."""

    def __init__(self, task: str, length_knob: str, side: str, tried: int, prompts: int) -> None:
        self.prompts = prompts
        super().__init__(
            f"No {side} example among {tried:,} of {task}: they have only {prompts} different prompt{'s' * (prompts != 1)}, "
            f"and the hash of each puts it on the other side. Set the knob {length_knob!r} to a larger number, or change other "
            f"knobs so that there are more prompts."
        )


class BadIndex(TaskError):
    """An example's index is not an integer of at least 0."""

    def __init__(self, index: object) -> None:
        super().__init__(f"Bad example index {index!r}. Give an integer of at least 0.")


class NoSuchText(TaskError):
    """The task of given texts has fewer of them."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(f"There is no text {index}: {count} were given. Use indices from 0 to {count - 1}.")


class MixedLabel(TaskError):
    """A label of given texts has values of several types."""

    def __init__(self, name: str, types: Iterable[str]) -> None:
        super().__init__(f"Label {name!r} has values of the types {' and '.join(types)}. Give values of one type.")


class NotForTexts(TaskError):
    """Given texts lack what is asked for, such as steps, claims or right answers."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Not possible with given texts. {what}")


class UnreadableText(TaskError):
    """The text does not begin like a text of the task, so it has no labels."""

    def __init__(self, task: str, text: str, wanted: Iterable[str]) -> None:
        openings = " or ".join(repr(opening) for opening in wanted)
        super().__init__(
            f"Not a text of {task}: {text[:40]!r}. It must begin with {openings}. Check the task's name and rendering."
        )


class UnknownWord(TaskError):
    """The tokenizer's vocabulary lacks a word of the text."""

    def __init__(self, word: str, offset: int) -> None:
        self.word = word
        self.offset = offset
        super().__init__(
            f"Word {word!r} at character {offset} is not in the vocabulary. "
            f"Build the tokenizer from a task that uses it (a leading space is part of a word)."
        )


class UnknownToken(TaskError):
    """A token id is outside the vocabulary."""

    def __init__(self, token: object, size: int) -> None:
        super().__init__(f"Token id {token!r} is outside the vocabulary. Use ids from 0 to {size - 1}.")


class BadTokenizer(TaskError):
    """A tokenizer file or object cannot be used; the message says which part is wrong."""


def _unknown(kind: str, name: str, known: Iterable[str], of: str = "") -> str:
    known = sorted(known)
    nearest = get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"Unknown {kind} {name!r}{of}{hint}. Known: {', '.join(known)}."
