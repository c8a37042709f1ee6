"""Registry: every task by its name."""

from replaylens.tasks.boxes import Boxes
from replaylens.tasks.coin import Coin
from replaylens.tasks.coin_resets import CoinResets
from replaylens.tasks.coins import Coins
from replaylens.tasks.errors import UnknownTask
from replaylens.tasks.fork import Fork
from replaylens.tasks.shell import Shell
from replaylens.tasks.task import AnyTask
from replaylens.tasks.variables import Variables
from replaylens.tasks.words import Words

_ALL: tuple[type[AnyTask], ...] = (Coin, Coins, CoinResets, Shell, Words, Fork, Boxes, Variables)
_TASKS = {task.name: task for task in _ALL}


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_TASKS)


def get(name: str) -> type[AnyTask]:
    """The task class of this name. Raises UnknownTask, which lists the names.

    >>> example = get("coin")(flips=2, rendering="symbols").example(0)
    >>> example.text
    '> H x x = H'
    >>> example.read(" T").labels_after(len(example.text))["claimed"]  # what another path claims
    'tails'
    """
    if name not in _TASKS:
        raise UnknownTask(name, _TASKS)
    return _TASKS[name]
