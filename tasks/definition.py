"""What a task class must declare before it is registered, and what makes two classes the same task."""

import re
import sys
from dataclasses import fields
from inspect import isabstract
from pathlib import Path
from typing import Any

from replaylens.tasks.errors import BadTask
from replaylens.tasks.knobs import Knobs
from replaylens.tasks.task import AnyTask, Task

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
        raise BadTask(f"{here} has knobs_class {task.knobs_class!r}. Give a dataclass derived from tasks.knobs.Knobs.")
    _check_knobs(task, here)


def _check_knobs(task: type[AnyTask], here: str) -> None:
    known = {spec.name: spec for spec in fields(task.knobs_class)}
    for spec in known.values():
        if not {"help", "convert", "wording"} <= spec.metadata.keys():
            raise BadTask(f"{here}: the knob {spec.name!r} is a plain field. Declare it with tasks.knobs.knob(default, help).")
    if task.length_knob not in known:
        raise BadTask(f"{here} has length_knob {task.length_knob!r}, but its knobs are {', '.join(sorted(known))}.")
    labels = task().label_names
    for label in (task.state_label, *task.claims):
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
