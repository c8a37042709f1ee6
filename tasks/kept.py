"""The examples of a task on one side of a split, as many as wanted; a task with no prompt there is an error, not a wait."""

from collections.abc import Callable, Iterator
from itertools import count

from replaylens.tasks.errors import TooFewPrompts
from replaylens.tasks.task import AnyTask, Example

PATIENCE = 2000
"""examples on the other side in a row before a side counts as empty. A side with one prompt in eight of many is missed that
often with a probability of 1e-116"""


def kept(task: AnyTask, keep: Callable[[Example], bool], side: str) -> Iterator[Example]:
    """The examples for which `keep` holds, by index and without end. A task with few prompts repeats them.

    side  the name of these examples in the error. TooFewPrompts after `PATIENCE` others in a row
    """
    last = -1
    for index in count():
        example = task.example(index)
        if keep(example):
            last = index
            yield example
        elif index - last == PATIENCE:
            prompts = {task.example(i).root for i in range(last + 1, index + 1)}
            raise TooFewPrompts(repr(task), task.length_knob, side, PATIENCE, len(prompts))
