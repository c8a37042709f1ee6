"""Tasks by a reference to their code, as the command line takes them: module:Class or file.py:Class."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from replaylens.tasks.errors import CannotImport
from replaylens.tasks.registry import get, register
from replaylens.tasks.task import AnyTask


def load(reference: str) -> type[AnyTask]:
    """The task of a name, `package.module:Class` or `path/to/file.py:Class`. The latter two run that code, and register the
    class, so that dumps and recipes find it by its name in this process.

    CannotImport if the code cannot be imported; BadTask and TaskNameTaken as in `register`.
    """
    source, colon, attribute = reference.rpartition(":")
    if not colon:
        return get(reference)
    if not source or not attribute.isidentifier():
        raise CannotImport(f"Cannot read {reference!r} as a task. Give a name, module:Class or file.py:Class.")
    try:
        module = _file(Path(source)) if source.endswith(".py") else import_module(source)
    except (Exception, SystemExit) as error:
        hint = "" if source.endswith(".py") else f" If {source} is a file, give {source.replace('.', '/')}.py:{attribute}."
        raise CannotImport(f"Cannot import {source!r} ({type(error).__name__}: {error}).{hint}") from error
    found: Any = getattr(module, attribute, None)
    if found is None:
        raise CannotImport(f"{source} has no {attribute!r}. Give the name of a task class in it.")
    return register(found)


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
