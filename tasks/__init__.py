"""Tasks with exact ground truth: texts, their events, and labels at every token of any path."""

from replaylens.tasks.errors import TaskError
from replaylens.tasks.labels import label_tokens, offsets_of, path_offsets
from replaylens.tasks.reading import Event, Reading, Span, Step
from replaylens.tasks.registry import get, names
from replaylens.tasks.splits import Side, Split
from replaylens.tasks.task import Example, KnownZero, Task
from replaylens.tasks.tokenizer import WordTokenizer

__all__ = [
    "Event",
    "Example",
    "KnownZero",
    "Reading",
    "Side",
    "Span",
    "Split",
    "Step",
    "Task",
    "TaskError",
    "WordTokenizer",
    "get",
    "label_tokens",
    "names",
    "offsets_of",
    "path_offsets",
]
