"""Tasks of installed distributions: entry points of the group `replaylens.tasks`, found by name and loaded on first use."""

import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from replaylens.tasks.definition import check_definition
from replaylens.tasks.errors import BrokenPlugin, TaskNameTaken
from replaylens.tasks.task import AnyTask

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "replaylens.tasks"


class PluginWarning(UserWarning):
    """An installed task cannot be used, and something else is used instead."""


def entries() -> dict[str, "tuple[EntryPoint, ...]"]:
    """The declared tasks by name, of the distributions on sys.path. Reads metadata only; nothing is imported."""
    return _entries(tuple(sys.path))


@cache
def _entries(path: tuple[str, ...]) -> dict[str, "tuple[EntryPoint, ...]"]:
    from importlib.metadata import entry_points  # takes as long as all tasks together

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, distribution(entry))):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def distribution(entry: "EntryPoint") -> str:
    """The distribution of an entry point, as an error names it."""
    return "an unknown distribution" if entry.dist is None else f"distribution {entry.dist.name} {entry.dist.version}"


def load(name: str) -> type[AnyTask]:
    """Import the one declared task of this name. BrokenPlugin if that fails; TaskNameTaken if several declare it."""
    entry, *others = entries()[name]
    if others:
        raise TaskNameTaken(name, distribution(entry), distribution(others[0]))
    try:
        task: Any = entry.load()
    except (Exception, SystemExit) as error:
        raise BrokenPlugin(name, distribution(entry), entry.value, f"{type(error).__name__}: {error}") from error
    try:
        check_definition(task)
    except Exception as error:  # making the task's labels runs its code
        raise BrokenPlugin(name, distribution(entry), entry.value, f"{type(error).__name__}: {error}") from error
    if task.name != name:
        problem = f"the class is named {task.name!r}, and its entry point {name!r}"
        raise BrokenPlugin(name, distribution(entry), entry.value, problem)
    return task


def holder(task: type[AnyTask]) -> str | None:
    """The distribution that declares a task of this name elsewhere than in the class's own package, if there is one."""
    package = task.__module__.partition(".")[0]
    foreign = [e for e in entries().get(task.name, ()) if e.module.partition(".")[0] != package]
    return distribution(foreign[0]) if foreign else None


def warn_of_shadowed(name: str) -> None:
    """Warn if a distribution declares the name of a built-in task, which is used instead."""
    for entry in entries().get(name, ()):
        taken = TaskNameTaken(name, distribution(entry), "replaylens itself")
        warnings.warn(f"{taken} The task of replaylens is used.", PluginWarning, stacklevel=3)
