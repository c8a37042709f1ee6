"""Registry: every task by its name. Tasks are built in, registered by their class, or declared by an installed distribution."""

import re
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from replaylens import boundary
from replaylens.tasks.errors import BadTask, UnknownTask, name_taken
from replaylens.tasks.task import AnyTask, Knobs, Task
from replaylens.tasks.texts import GivenTexts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# ---- definition ------------------------------------------------------------------------------------------------------
# What a task class must declare before it is registered, and what makes two classes the same task.

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


def check_definition(task: Any) -> None:
    """Raise BadTask unless this is a task class whose declarations are complete. Makes no examples; `check` does."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise BadTask(f"Cannot register {task!r}. Give a subclass of replaylens.tasks.Task, not an instance.")
    here = f"Task class {task.__qualname__}"
    for name in ("name", "description", "knobs_class", "length_knob", "state_label", "claims"):
        if not hasattr(task, name):
            raise BadTask(f"{here} has no {name!r}. Set it as a class attribute.")
    if isabstract(task):
        missing = ", ".join(sorted(task.__abstractmethods__))
        raise BadTask(f"{here} does not implement {missing}. Implement every abstract method of Task.")
    if not (isinstance(task.name, str) and _NAME.fullmatch(task.name)):
        raise BadTask(f"{here} has the name {task.name!r}. Use lower-case letters and digits, joined by - or _.")
    if not (isinstance(task.knobs_class, type) and issubclass(task.knobs_class, Knobs)):
        raise BadTask(f"{here} has knobs_class {task.knobs_class!r}. Give a dataclass derived from tasks.task.Knobs.")
    _check_knobs(task, here)


def _check_knobs(task: type[AnyTask], here: str) -> None:
    known = {spec.name: spec for spec in fields(task.knobs_class)}
    for spec in known.values():
        if not {"help", "convert", "wording"} <= spec.metadata.keys():
            raise BadTask(f"{here}: the knob {spec.name!r} is a plain field. Declare it with tasks.task.knob(default, help).")
    if task.length_knob not in known:
        raise BadTask(f"{here} has length_knob {task.length_knob!r}, but its knobs are {', '.join(sorted(known))}.")
    labels = task().label_names
    steps = () if task.step_label == Task.step_label else (task.step_label,)
    for label in (task.state_label, *task.claims, *steps):
        if label not in labels:
            raise BadTask(f"{here} names the label {label!r}, but its scene has the labels {', '.join(labels)}.")


def same_task(a: type[AnyTask], b: type[AnyTask]) -> bool:
    """Whether two classes are one definition, loaded twice: a notebook's cell that ran again, or a file that was imported
    under two module names."""
    return a is b or _origin(a) == _origin(b)


def _origin(task: type[AnyTask]) -> tuple[str, str]:
    file = getattr(sys.modules.get(task.__module__), "__file__", None)
    return (task.__module__ if file is None else str(Path(file).resolve())), task.__qualname__


def where(task: type[AnyTask]) -> str:
    """The class as an error names it."""
    return f"class {task.__module__}:{task.__qualname__}"


# ---- plugins ---------------------------------------------------------------------------------------------------------
# Tasks of installed distributions: entry points of the group `replaylens.tasks`, found by name and loaded on first use.

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


def load_plugin(name: str) -> type[AnyTask]:
    """Import the one declared task of this name. BadTask if that fails, or if several declare it."""
    entry, *others = entries()[name]
    if others:
        raise name_taken(name, distribution(entry), distribution(others[0]))
    try:
        task: Any = entry.load()
    except (Exception, SystemExit) as error:
        raise _broken(entry, f"{type(error).__name__}: {error}") from error
    try:
        check_definition(task)
    except Exception as error:  # making the task's labels runs its code
        raise _broken(entry, f"{type(error).__name__}: {error}") from error
    if task.name != name:
        raise _broken(entry, f"the class is named {task.name!r}, and its entry point {name!r}")
    return task


def _broken(entry: "EntryPoint", problem: str) -> BadTask:
    return BadTask(
        f"Task {entry.name!r} of {distribution(entry)} cannot be loaded from {entry.value!r}: {problem.rstrip('.')}. Update or "
        "uninstall that distribution."
    )


def holder_of(task: type[AnyTask]) -> str | None:
    """The distribution that declares a task of this name elsewhere than in the class's own package, if there is one."""
    package = task.__module__.partition(".")[0]
    foreign = [e for e in entries().get(task.name, ()) if e.module.partition(".")[0] != package]
    return distribution(foreign[0]) if foreign else None


def warn_of_shadowed(name: str) -> None:
    """Warn if a distribution declares the name of a built-in task, which is used instead."""
    for entry in entries().get(name, ()):
        taken = name_taken(name, distribution(entry), "replaylens itself")
        boundary.warn(f"{taken} The task of replaylens is used.", PluginWarning)


# ---- registry --------------------------------------------------------------------------------------------------------

BUILT_IN = {
    "coin": "coin:Coin",
    "coins": "coins:Coins",
    "coin-resets": "coin_resets:CoinResets",
    "shell": "shell:Shell",
    "words": "words:Words",
    "fork": "fork:Fork",
    "boxes": "boxes:Boxes",
    "variables": "variables:Variables",
    "hops": "hops:Hops",
    "counts": "counts:Counts",
}
"""name -> module:class; loaded on first use"""
_GIVEN: dict[str, type[AnyTask]] = {GivenTexts.name: GivenTexts}
"""known by name, so that dumps can cite them, but not listed: they write no examples"""
_REGISTERED: dict[str, type[AnyTask]] = {}
T = TypeVar("T", bound=type[AnyTask])


def names() -> tuple[str, ...]:
    """The names of all tasks: built in, registered, installed. Loads nothing, so an installed task may turn out broken."""
    return tuple(dict.fromkeys((*BUILT_IN, *_REGISTERED, *entries())))


def register(task: T) -> T:
    """Make a task class known by its name in this process; use it as a decorator. Returns the class.

    Raises BadTask if the class is incomplete, or another task has the name. A class that is defined again
    (a notebook's cell that ran twice) replaces its older self.

    To make a task known in every process, its distribution declares it in pyproject.toml:

        [project.entry-points."replaylens.tasks"]
        square = "my_package.square:Square"
    """
    check_definition(task)
    require_own_name(task)
    if task.name not in (*BUILT_IN, *_GIVEN):
        _REGISTERED[task.name] = task
    return task


def get(name: str) -> type[AnyTask]:
    """The task class of this name. Raises UnknownTask, which lists the names, and BadTask if an
    installed distribution declares the name but its task cannot be used.

    >>> example = get("coin")(flips=2, rendering="symbols").example(0)
    >>> example.text
    '> H x x = H'
    >>> example.read(" T").labels_after(len(example.text))["claimed"]  # what another path claims
    'tails'
    """
    if not isinstance(name, str):
        raise UnknownTask(repr(name)[:60], names())
    if name in BUILT_IN:
        warn_of_shadowed(name)
        return _built_in(name)
    if name in _GIVEN:
        return _GIVEN[name]
    if name not in _REGISTERED:
        if name not in entries():
            raise UnknownTask(name, names())
        register(load_plugin(name))  # unless importing it has registered it already
    return _REGISTERED[name]


def _built_in(name: str) -> type[AnyTask]:
    module, _, attribute = BUILT_IN[name].partition(":")
    found: type[AnyTask] = getattr(import_module(f"replaylens.tasks.{module}"), attribute)
    return found


def require_own_name(task: type[AnyTask]) -> None:
    """Raise BadTask if the name belongs to another class: a dump that cites it would be read with the wrong task."""
    own = _built_in(task.name) if task.name in BUILT_IN else None
    known = own or _GIVEN.get(task.name) or _REGISTERED.get(task.name)
    holder = None if known is None or same_task(known, task) else where(known)
    if holder is None and task.name not in (*BUILT_IN, *_GIVEN):
        holder = holder_of(task)
    if holder is not None:
        raise name_taken(task.name, where(task), holder)


# ---- loading ---------------------------------------------------------------------------------------------------------
# Tasks by a reference to their code, as the command line takes them: module:Class or file.py:Class.


def load(reference: str) -> type[AnyTask]:
    """The task of a name, `package.module:Class` or `path/to/file.py:Class`. The latter two run that code, and register the
    class, so that dumps and recipes find it by its name in this process.

    BadTask if the code cannot be imported, and as in `register`.
    """
    source, colon, attribute = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    if not colon:
        return get(reference)
    if not source or not attribute.isidentifier():
        raise BadTask(f"Cannot read {reference!r} as a task. Give a name, module:Class or file.py:Class.")
    found: Any = getattr(module_of(source), attribute, None)
    if found is None:
        raise BadTask(f"{source} has no {attribute!r}. Give the name of a task class in it.")
    return register(found)


def module_of(source: str) -> ModuleType:
    """The module of a name or of a .py file, whose code runs. BadTask if it cannot be imported."""
    try:
        return _file(Path(source)) if source.endswith(".py") else import_module(source)
    except (Exception, SystemExit) as error:
        hint = "" if source.endswith(".py") else f" If {source} is a file, give {source.replace('.', '/')}.py:NAME."
        raise BadTask(f"Cannot import {source!r} ({type(error).__name__}: {error}).{hint}") from error


def _file(path: Path) -> ModuleType:
    """The module of a file, under its path as name: a file is run once, and never mistaken for an installed module."""
    name = str(path.resolve())
    if name not in sys.modules:
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # the path ends in .py
        module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
