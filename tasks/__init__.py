"""Tasks with exact ground truth: texts, their events, and labels at every token of any path. Modules load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens.tasks.conformance import BrokenPromise as BrokenPromise
    from replaylens.tasks.conformance import check as check
    from replaylens.tasks.errors import TaskError as TaskError
    from replaylens.tasks.reading import Event as Event
    from replaylens.tasks.reading import Reading as Reading
    from replaylens.tasks.reading import Span as Span
    from replaylens.tasks.reading import Step as Step
    from replaylens.tasks.registry import get as get
    from replaylens.tasks.registry import load as load
    from replaylens.tasks.registry import names as names
    from replaylens.tasks.registry import register as register
    from replaylens.tasks.splits import Side as Side
    from replaylens.tasks.splits import TaskSplit as TaskSplit
    from replaylens.tasks.task import Example as Example
    from replaylens.tasks.task import KnownZero as KnownZero
    from replaylens.tasks.task import Task as Task
    from replaylens.tasks.tokenizer import WordTokenizer as WordTokenizer
    from replaylens.tasks.tokenizer import label_tokens as label_tokens
    from replaylens.tasks.tokenizer import offsets_of as offsets_of
    from replaylens.tasks.tokenizer import path_offsets as path_offsets

_WHERE = {
    "BrokenPromise": "conformance",
    "Event": "reading",
    "Example": "task",
    "KnownZero": "task",
    "Reading": "reading",
    "Side": "splits",
    "Span": "reading",
    "Step": "reading",
    "Task": "task",
    "TaskError": "errors",
    "TaskSplit": "splits",
    "WordTokenizer": "tokenizer",
    "check": "conformance",
    "get": "registry",
    "label_tokens": "tokenizer",
    "load": "registry",
    "names": "registry",
    "offsets_of": "tokenizer",
    "path_offsets": "tokenizer",
    "register": "registry",
}

__all__ = list(_WHERE)


if not TYPE_CHECKING:  # a type checker would take `__getattr__` to mean that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _WHERE:
            raise AttributeError(f"module 'replaylens.tasks' has no attribute {name!r}. It has {', '.join(sorted(_WHERE))}.")
        return getattr(import_module(f"replaylens.tasks.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
