"""Splits: the examples to fit a model or a probe on, and those to test it on.

The root, a hash of the prompt, decides the side: a prompt is on the train side or on the test side of ALL splits,
whatever the task's knobs. So no prompt, and no branch of one, is ever on both sides.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice

from replaylens.tasks.errors import BadSplit, TooFewPrompts
from replaylens.tasks.task import AnyTask, Example, require_room_for

# ---- kept ------------------------------------------------------------------------------------------------------------
# The examples of a task on one side of a split, as many as wanted; a task with no prompt there is an error, not a wait.

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


# ---- splits ----------------------------------------------------------------------------------------------------------

_TEST_SHARE = 5  # one root in five is a test root


def is_test_root(root: str) -> bool:
    """Whether the prompt with this root id is on the test side."""
    return int(root, 16) % _TEST_SHARE == 0


@dataclass(frozen=True)
class Side:
    """The first `count` examples of a task whose roots are on this side. TooFewPrompts, on iteration, if there is none."""

    task: AnyTask
    count: int
    test: bool

    def __post_init__(self) -> None:
        if self.count < 1:
            raise BadSplit(f"Bad count {self.count}. A side needs at least one example.")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Example]:
        name = "test" if self.test else "training"
        yield from islice(kept(self.task, lambda example: is_test_root(example.root) == self.test, name), self.count)

    def examples(self) -> list[Example]:
        """The examples, in the order of their indices."""
        require_room_for(self)
        return list(self)


@dataclass(frozen=True)
class TaskSplit:
    """A train side and one or more test sides by name. Train and test never share a root; checked on construction."""

    name: str
    train: Side
    tests: Mapping[str, Side]

    def __post_init__(self) -> None:
        if not self.tests:
            raise BadSplit(f"Split {self.name!r} has no test side. Give at least one.")
        if self.train.test or not all(side.test for side in self.tests.values()):
            raise BadSplit(f"Split {self.name!r} mixes its sides. Use train roots for train and test roots for tests.")


def iid(task: AnyTask, *, train: int = 1000, test: int = 200) -> TaskSplit:
    """The same task on both sides."""
    return _split("iid", task, {"iid": task}, train, test)


def length(task: AnyTask, *, longest: int | None = None, train: int = 1000, test: int = 200) -> TaskSplit:
    """Train on up to N = `longest` steps (default: the task's maximum), test on 2N and 4N."""
    least, most = getattr(task.knobs, task.length_knob)
    longest = most if longest is None else longest
    if longest < least:
        raise BadSplit(f"longest={longest} is below the task's minimum length. Give at least {least}.")
    short = task.with_knobs(**{task.length_knob: (least, longest)})
    tests = {f"{k}N": task.with_knobs(**{task.length_knob: k * longest}) for k in (2, 4)}
    return _split("length", short, tests, train, test)


def names(task: AnyTask, *, train: int = 1000, test: int = 200) -> TaskSplit:
    """Train on one pool of names, test on the other."""
    _need(task, "names", "names")
    tests = {"held-out": task.with_knobs(names="held-out")}
    return _split("names", task.with_knobs(names="train"), tests, train, test)


def phrasing(task: AnyTask, *, train: int = 1000, test: int = 200) -> TaskSplit:
    """Hold out the negation: train on "leaves it alone", test on "does not flip"."""
    _need(task, "phrasing", "phrasing")
    tests = {"standard": task.with_knobs(phrasing="standard")}
    return _split("phrasing", task.with_knobs(phrasing="idle"), tests, train, test)


def p_shift(task: AnyTask, *, p: float, train: int = 1000, test: int = 200) -> TaskSplit:
    """Train at the task's own flip rate, test at `p`."""
    _need(task, "p_shift", "p")
    if p == task.knobs.p:
        raise BadSplit(f"p={p} is the task's own flip rate, so nothing shifts. Choose another value.")
    return _split("p_shift", task, {f"p={p}": task.with_knobs(p=p)}, train, test)


def branch_depth(task: AnyTask, *, deepest: int | None = None, train: int = 1000, test: int = 200) -> TaskSplit:
    """Train on branches of up to `deepest` roads, test on branches of twice that depth."""
    _need(task, "branch_depth", "depth")
    least, most = task.knobs.depth
    deepest = most if deepest is None else deepest
    if deepest < least:
        raise BadSplit(f"deepest={deepest} is below the task's minimum depth. Give at least {least}.")
    shallow = task.with_knobs(depth=(least, deepest))
    return _split("branch_depth", shallow, {"2x": task.with_knobs(depth=2 * deepest)}, train, test)


def _split(name: str, train: AnyTask, tests: Mapping[str, AnyTask], train_count: int, test_count: int) -> TaskSplit:
    sides = {key: Side(task, test_count, test=True) for key, task in tests.items()}
    return TaskSplit(name, Side(train, train_count, test=False), sides)


def _need(task: AnyTask, split: str, knob: str) -> None:
    if not hasattr(task.knobs, knob):
        raise BadSplit(f"Split {split!r} needs the knob {knob!r}, which task {task.name!r} does not have. Use another task.")
