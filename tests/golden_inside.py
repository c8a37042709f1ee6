"""Answers of `tests/golden.json` about what is inside: constants and defaults of every module, steps of a solver, published
figures on a small model, costs of passes."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.proof.doctor import numbers
from tests.digests import _DENSE, model_of
from tests.golden import error
from tests.golden_calls import group, rl
from tests.golden_options import GROUPS

__all__ = ["GROUPS"]

# ---- constants and defaults -----------------------------------------------------------------------------------------------

_PLAIN = (int, float, str, bytes, tuple, list, dict, set, frozenset, range, MappingProxyType, np.generic, Enum)


_NAMED = re.compile(r"^(_?[A-Z]\w*(?:, _?[A-Z]\w*)*)(?:: [^=]+)? = (?!\{\}|\[\]|set\(|dict\[)", re.MULTILINE)
"""constants and types; not what is filled while it runs"""


_OF_THE_MACHINE = {"kernels.portable": {"VECTOR", "PANEL", "TILE", "STRIP", "STRIP_ROWS", "_SOURCE"}}
"""how products are cut, which moves no bit, and a hash of the source"""


def modules() -> Iterator[tuple[str, ModuleType, str]]:
    """(name, module, source) of all that needs neither Triton nor a package that may be missing."""
    root = Path(rl.__file__).parent
    for path in sorted(path for folder in (root, *root.iterdir()) for path in _sources(folder, deep=folder != root)):
        source, name = path.read_text(encoding="utf-8"), ".".join(path.relative_to(root).with_suffix("").parts)
        if not re.search(r"^(import|from) triton", source, re.MULTILINE):
            found = error(import_module, f"replaylens.{name}")
            if isinstance(found, ModuleType):
                yield name, found, source


def _sources(folder: Path, deep: bool) -> Iterator[Path]:
    return (path for path in folder.glob("**/*.py" if deep else "*.py") if not path.stem.startswith("__"))


def written(value: Any) -> Any:
    """A value as texts: numbers in full."""
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: [(each.name, written(getattr(value, each.name))) for each in fields(value)]}
    if isinstance(value, dict | MappingProxyType):
        return {str(key): written(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [written(each) for each in value]
    if isinstance(value, float | np.generic):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, _PLAIN) or value is None:
        return value
    return repr(value) if type(value).__module__ in ("typing", "types", "collections.abc") else type(value).__name__


def defaults(call: Any) -> Any:
    """What a call's parameters are if they are not given."""
    found = error(inspect.signature, getattr(call, "py_func", call))
    if isinstance(found, Exception):
        return type(found).__name__
    return {name: repr(written(each.default)) for name, each in found.parameters.items() if each.default is not each.empty}


@group
def _constants() -> dict[str, Any]:
    """Of every module and class; and the defaults of every function, method and class."""
    found: dict[str, Any] = {}
    for name, module, source in modules():
        names = {each for match in _NAMED.finditer(source) for each in match[1].split(", ")} - _OF_THE_MACHINE.get(name, set())
        values = {each: written(vars(module)[each]) for each in sorted(names)}
        own = {key: each for key, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        calls = {key: defaults(each) for key, each in own.items() if callable(each)}
        for key, kind in own.items():
            if isinstance(kind, type):
                inner = {f"{key}.{each}": value for each, value in vars(kind).items() if not each.startswith(("__", "_abc"))}
                values |= {each: written(value) for each, value in inner.items() if isinstance(value, _PLAIN)}
                calls |= {each: defaults(value) for each, value in inner.items() if inspect.isroutine(value)}
        found |= {f"{name} values": list(values.items()), f"{name} calls": [each for each in calls.items() if each[1]]}
    return {key: each for key, each in found.items() if each}


@group
def _commands() -> dict[str, Any]:
    """What every command says of itself."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from replaylens.cli import app

    commands: Any = get_command(app)
    run = CliRunner(env={"COLUMNS": "300"}).invoke
    names = (*commands.commands, "tasks list", "tasks show", "tasks check")
    return {name: (done.exit_code, done.output) for name in names for done in [run(app, [*name.split(), "--help"])]}


# ---- published figures ----------------------------------------------------------------------------------------------------


def reader(layers: int) -> Any:
    """A model that reads bytes, chats, and the words that figures ask for as one token each."""
    from tests.engine.serving.test_conversation import PLAIN, byte_tokenizer

    words = byte_tokenizer(PLAIN)
    words.add_tokens(
        [f" {each}" for each in ["Mary", "John", "Sarah", "David", "good", "bad", "Yes", "No", "yes", "no", "will", "had"]]
    )
    size = dict(_DENSE, num_layers=layers, d_model=16, num_heads=2, num_kv_heads=1, d_head=8, d_mlp=16, vocab_size=len(words))
    return Engine(model_of(ModelConfig(**{**size, "max_positions": 1024})), words)


@group
def _reproduce() -> dict[str, Any]:
    """The figures on models that have learnt nothing, with fewer texts; two with a stand-in for what they call."""
    from replaylens.extras import reproduce as module

    given: list[Any] = []

    def stand_in(result: Any) -> Any:
        def called(_: Any, *arguments: Any, **options: Any) -> Any:
            given.append([*(len(each) if isinstance(each, list) else each for each in arguments), options])
            return result

        return called

    lines = [{"what": f"interchange: {what}", "accuracy": rate} for what, rate in (("probe", 0.9), ("random direction", 0.2))]
    resampled = module._resampled
    instead = {
        "TOPICS": module.TOPICS[:4],
        "KINDS": {"bird": ("owl", "duck"), "tool": ("saw", "drill")},
        "HARMFUL": module.HARMFUL[:4],
        "HARMLESS": module.HARMLESS[:4],
        "CONTRASTS": {
            name: ((up[:2], down[:2]), own[:2], words) for name, ((up, down), own, words) in module.CONTRASTS.items()
        },
        "CUPS": module.CUPS[-60:],
        "CUP_ANSWER": rl.Answer.regex("(a|e|i|o|u)"),
        "attention": stand_in(SimpleNamespace(frame=pd.DataFrame({"layer": [0, 1, 2], "induction": [0.1, 0.5, 0.25]}))),
        "find_direction": stand_in(SimpleNamespace(basis=numbers(3, 4))),
        "interchange": stand_in(SimpleNamespace(lines=lines)),
        "_resampled": lambda load, at, n: resampled(load, at, n // 2),
    }
    few, many = reader(3), reader(23)
    small = ("thought-anchors", "forking-paths", "natural-flips")
    with patch.multiple(module, **instead):
        found = {
            name: vars(figure.make(lambda _, name=name: few if name in small else many))
            for name, figure in module.FIGURES.items()
            if name != "routing"
        }
    return {**found, "given": given}


# ---- steps of a solver ----------------------------------------------------------------------------------------------------


@group
def _solver_steps() -> dict[str, Any]:
    """Where the descent stands after few steps, with each preconditioner: a worse one finds the same probe, later."""
    from replaylens.probes import quasi_newton as module

    x = numbers(20, 2, 40, 26).double() * (1 + numbers(21, 26).abs()) + numbers(22, 26)
    codes = (x[0, :, :3] @ numbers(23, 3, 3).double() + numbers(24, 40, 3)).argmax(1)
    sets = np.stack([np.arange(40) % 5 != fold for fold in range(4)])
    targets = {
        "two classes": (codes == 0).double()[None, :, None],
        "three classes": torch.nn.functional.one_hot(codes, 3).double().expand(2, -1, -1),
    }
    ways: dict[str, dict[str, Any]] = {
        "gram": {"patience": lambda *_: 0},
        "eigenvalues": {"patience": lambda *_: 99, "_MEMORY": 2},
        "both, single precision first": {"patience": lambda *_: 2, "_LARGE": 1, "_ROUGH": 1e-1, "_SEARCHES": 1},
        "few rows": {"patience": lambda *_: 1, "_ROWS_PER_COLUMN": 0.5, "_SEEN": 4, "_BLOCK": 10, "_ROWS": 7},
    }
    found: dict[str, Any] = {}
    for name, constants in ways.items():
        for what, y in targets.items():
            where = torch.tensor([[0, 1], [2, 3]][: len(y)])
            for steps in (1, 2, 3, 6, 12):
                with patch.multiple(module, _STEPS=steps, **constants):
                    search = module.QuasiNewton(module.Grams(x, sets), y, where, 1e-4)
                    points = [search.in_rows(each) for each in search.along([0.01, 1.0])]
                found[f"{what}, {name}, {steps} steps"] = [points, sorted(search.factors), search.patience]
    rows = module.RowSpace(module.Grams(x, sets), 1)
    found["row space"] = [rows.root, (rows.x @ rows.x.mT), rows.back(rows.x.mT[:, None, None]), rows.rows]
    found["patience"] = [module.patience(n, d, k) for n in (50, 5000) for d in (64, 576, 2048) for k in (1, 3, 500)]
    found["worth"] = [module.worth_the_row_space(n, 2048, k, s) for n in (50, 500, 2000) for k in (1, 50) for s in (1, 9)]
    return found


@group
def _solvers() -> dict[str, Any]:
    """Every kind of probe where folds lack classes, a column is constant in one fold, or columns outnumber rows."""
    from replaylens.probes.solvers import one_hot, solve_path

    found: dict[str, Any] = {}
    for columns in (3, 50):
        x = numbers(40, 2, 24, columns).double()
        x[:, :, 1] = 2.0
        x[:, 8:, 2] = 0.5
        for classes in (2, 3):
            codes = np.arange(24) * classes // 24
            train = np.stack([np.arange(24) < 16, np.arange(24) % 3 > 0, np.arange(24) >= 8])
            shuffled = np.stack([codes, (codes * 5 + np.arange(24) // 5) % classes])
            for kind in ("logistic", "ridge", "mass-mean", "mass-mean-whitened")[
                : 4 if columns < 8 else 3
            ]:  # to whiten takes rows
                for dtype in (torch.float32, torch.float64):
                    own = train[1:2] if kind == "logistic" else train  # its bias has no minimum for a class without rows
                    made = solve_path(kind, x.to(dtype), one_hot(shuffled, classes), np.stack([own] * 2), [0.1, 1.0])
                    name = f"{kind}, {classes} classes, {columns} columns, {str(dtype)[6:]}"
                    found[name] = [(each.weight, each.bias) for each in made]
    return found


@group
def _planner() -> dict[str, Any]:
    """Windows that a planner chooses from the costs of passes, given here, and from what was accepted."""
    from replaylens.engine.loop import admission as module

    found: dict[str, Any] = {}
    clock = iter(numbers(30, 4000).abs().cumsum(0).tolist())
    with patch.object(module.time, "thread_time", lambda: next(clock)):
        for rows in ([], [1], [1, 20], [3, 40, 1, 40, 300]):
            planner = module.Planner()
            for number, count in enumerate(rows):
                for kind in ("exact", "draft")[: 1 + number % 2]:
                    with planner.timing(kind, count):
                        pass
            found[str(rows)] = [
                (planner._step_cost(window, requests, free), planner._draft_cost(requests), planner._pass_cost(window))
                for window in (1, 4, 17, 32)
                for requests in (1, 5)
                for free in (False, True)
            ]
    return found


@group
def _limits() -> dict[str, Any]:
    """What a device's kernels take, at the bounds."""
    from replaylens.engine.records import MAX_TARGETS, MAX_TOP, LensSpec

    cases = [(MAX_TOP + more, MAX_TARGETS + others, full) for more in (0, 1) for others in (0, 1) for full in (False, True)]
    return {"lens": [LensSpec(("",), top, tuple(range(count)), full).fits_kernel for top, count, full in cases]}


@group
def _devices() -> dict[str, Any]:
    """Which devices a model is placed on, where there are none or two."""
    from replaylens.weights.opening import placed_devices

    lists: list[Any] = [
        "cpu",
        "cuda",
        ["cuda:1"],
        ["cuda", "cuda:1"],
        ["cuda:1", "cpu"],
        ["cpu", "cuda:0"],
        [],
        ["cuda:7"],
        [3],
    ]
    found: dict[str, Any] = {}
    for count in (0, 2):
        with patch.multiple(torch.cuda, device_count=lambda count=count: count, current_device=lambda: 0):
            found[f"{count} devices"] = [
                error(placed_devices, given, device) for given in lists for device in ("cpu", "cuda", "cuda:1")
            ]
    return found
