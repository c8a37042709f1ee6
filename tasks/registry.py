"""Registry: every task by its name. Tasks are built in, registered by their class, or declared by an installed distribution."""

from typing import TypeVar

from replaylens.tasks import plugins
from replaylens.tasks.boxes import Boxes
from replaylens.tasks.coin import Coin
from replaylens.tasks.coin_resets import CoinResets
from replaylens.tasks.coins import Coins
from replaylens.tasks.counts import Counts
from replaylens.tasks.definition import check_definition, same_task, where
from replaylens.tasks.errors import TaskNameTaken, UnknownTask
from replaylens.tasks.fork import Fork
from replaylens.tasks.hops import Hops
from replaylens.tasks.shell import Shell
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import GivenTexts
from replaylens.tasks.variables import Variables
from replaylens.tasks.words import Words

_ALL: tuple[type[AnyTask], ...] = (Coin, Coins, CoinResets, Shell, Words, Fork, Boxes, Variables, Hops, Counts)
_BUILT_IN = {task.name: task for task in _ALL}
_GIVEN: dict[str, type[AnyTask]] = {GivenTexts.name: GivenTexts}
"""known by name, so that dumps can cite them, but not listed: they write no examples"""
_REGISTERED: dict[str, type[AnyTask]] = {}
T = TypeVar("T", bound=type[AnyTask])


def names() -> tuple[str, ...]:
    """The names of all tasks: built in, registered, installed. Loads nothing, so an installed task may turn out broken."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_REGISTERED, *plugins.entries())))


def register(task: T) -> T:
    """Make a task class known by its name in this process; use it as a decorator. Returns the class.

    Raises BadTask if the class is incomplete, and TaskNameTaken if another task has the name. A class that is defined again
    (a notebook's cell that ran twice) replaces its older self.

    To make a task known in every process, its distribution declares it in pyproject.toml:

        [project.entry-points."replaylens.tasks"]
        square = "my_package.square:Square"
    """
    check_definition(task)
    require_own_name(task)
    if task.name not in (*_BUILT_IN, *_GIVEN):
        _REGISTERED[task.name] = task
    return task


def get(name: str) -> type[AnyTask]:
    """The task class of this name. Raises UnknownTask, which lists the names, and BrokenPlugin or TaskNameTaken if an
    installed distribution declares the name but its task cannot be used.

    >>> example = get("coin")(flips=2, rendering="symbols").example(0)
    >>> example.text
    '> H x x = H'
    >>> example.read(" T").labels_after(len(example.text))["claimed"]  # what another path claims
    'tails'
    """
    if name in _BUILT_IN:
        plugins.warn_of_shadowed(name)
        return _BUILT_IN[name]
    if name in _GIVEN:
        return _GIVEN[name]
    if name not in _REGISTERED:
        if name not in plugins.entries():
            raise UnknownTask(name, names())
        register(plugins.load(name))  # unless importing it has registered it already
    return _REGISTERED[name]


def require_own_name(task: type[AnyTask]) -> None:
    """Raise TaskNameTaken if the name belongs to another class: a dump that cites it would be read with the wrong task."""
    known = _BUILT_IN.get(task.name) or _GIVEN.get(task.name) or _REGISTERED.get(task.name)
    holder = None if known is None or same_task(known, task) else where(known)
    if holder is None and task.name not in (*_BUILT_IN, *_GIVEN):
        holder = plugins.holder(task)
    if holder is not None:
        raise TaskNameTaken(task.name, where(task), holder)
