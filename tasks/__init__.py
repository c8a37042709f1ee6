"""Tasks with exact ground truth: texts, their events, and labels at every token of any path."""

from replaylens.tasks.conformance import BrokenPromise, check
from replaylens.tasks.errors import TaskError
from replaylens.tasks.reading import Event, Reading, Span, Step
from replaylens.tasks.registry import get, load, names, register
from replaylens.tasks.splits import Side, TaskSplit
from replaylens.tasks.task import Example, KnownZero, Task
from replaylens.tasks.tokenizer import WordTokenizer, label_tokens, offsets_of, path_offsets

__all__ = [
    "BrokenPromise",
    "Event",
    "Example",
    "KnownZero",
    "Reading",
    "Side",
    "Span",
    "Step",
    "Task",
    "TaskError",
    "TaskSplit",
    "WordTokenizer",
    "check",
    "get",
    "label_tokens",
    "load",
    "names",
    "offsets_of",
    "path_offsets",
    "register",
]
