"""Errors of the tasks. Each message says what happened, what was given and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class TaskError(ValueError):
    """What a task does not have, such as a label, a knob, an index or a text; the base of all errors of the tasks."""


class UnknownTask(TaskError):
    """No task has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"{unknown('task', name, known)} A task of your own is known once it is registered: import the module with its "
            f"@tasks.register, install its entry point, or give its code, task=file.py:Class (see docs/extending.md)."
        )


class BadTask(TaskError):
    """A task that cannot be used: its class is not complete, its code cannot be imported, or another task has its name. Other
    tasks are not affected."""


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


class BadTokenizer(TaskError):
    """A tokenizer file or object cannot be used; the message says which part is wrong."""


def name_taken(name: str, new: str, holder: str) -> BadTask:
    """Two tasks have the same name, by which dumps, recipes and reports cite them."""
    return BadTask(
        f"Task name {name!r} is taken: {new} has it, and so has {holder}. Dumps and recipes cite a task by its name. "
        f"Rename one of them, or uninstall it."
    )


def unknown(kind: str, name: str, known: Iterable[str], of: str = "") -> str:
    """The message for a name that is not known: the nearest known name, then all of them."""
    known = sorted(known)
    nearest = get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"Unknown {kind} {name!r}{of}{hint}. Known: {', '.join(known)}."


# old names, until the next version
CannotImport = BrokenPlugin = TaskNameTaken = BadTask
UnknownKnob = UnknownLabel = BadIndex = NoSuchText = MixedLabel = NotForTexts = UnknownToken = TaskError
