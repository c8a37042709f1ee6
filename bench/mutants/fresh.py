"""Fresh mutants: faults drawn from the sources by a seed, that no one has seen before.

Each is one changed comparison, constant, argument, sign, min or max, `sorted` or `and` in a function. They are planted in the
running process, one at a time, and each test runs again with those whose function it calls: so a few dozen take minutes. Tests
that work in processes of their own do not see them.
"""

import ast
import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.conftest import LONG
from tests.rerun import ROOT, Rerun

ROOMS = ("engine", "probes", "tasks", "src/replaylens")
_LEFT_OUT = ("cuda", "extras/cluster.py", "replaylens/training", "commands/train.py", "extras/reproduce.py", "passes/graphs.py",
             "passes/bursts.py", "passes/sharing.py", "extras/wire.py", "kernels/", "bridges/lm_eval_model.py",
             "bridges/inspect_provider.py")  # fmt: skip
"""needs a GPU, a cluster, another package or hours"""
_OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
          ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Is: ast.IsNot,
          ast.IsNot: ast.Is}  # fmt: skip
_NO_EFFECT = ("strict", "progress", "stacklevel", "fmt", "missing_ok")
"""arguments that only check, or draw a bar"""
_CALLS = {"min": "max", "max": "min", "sorted": "list", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fresh:
    """The change of one node: its number among those of its module that can be changed."""

    file: str
    number: int
    line: int
    function: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def _changed(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Another node, and what it does; None if there is none."""
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        other: ast.AST = ast.Compare(node.left, [_OTHER[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.BoolOp(_OTHER[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        other = ast.BinOp(node.left, _OTHER[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        other = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        other = ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        kept = [each for each in node.keywords if node.func.id != "sorted"]
        other = ast.Call(ast.Name(_CALLS[node.func.id], ast.Load()), node.args, kept)
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in (None, *_NO_EFFECT):
        other = ast.Call(node.func, node.args, node.keywords[:-1])
    else:
        return None
    return other, f"{text} -> {ast.unparse(other)}"


class _Change(ast.NodeTransformer):
    """Changes the node with a number; without one, notes them all."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.seen, self.inside = number, 0, 0
        self.found: list[tuple[int, int, str, str]] = []
        self.function = ""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.FunctionDef):
            if node.name.startswith("__") and node.name != "__init__":
                return node
            self.inside += 1
            self.function = node.name
            node.body = [self.visit(each) for each in node.body]
            self.inside -= 1
            return node
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign) and self.inside:
            return node  # words of errors, and types
        if isinstance(node, ast.keyword) and node.arg in _NO_EFFECT:
            return node
        change = _changed(node) if self.inside else None
        if change is not None:
            self.seen += 1
            self.found.append((self.seen, node.lineno, self.function, change[1]))  # type: ignore[attr-defined]
            if self.seen == self.number:
                return ast.copy_location(change[0], node)
        return self.generic_visit(node)


def drawn(count: int, seed: int) -> list[Fresh]:
    """So many changes, from as many modules as there are; the same for the same sources and seed."""
    draws, files = random.Random(seed), []
    for room in ROOMS:
        files += [str(each.relative_to(ROOT)) for each in sorted((ROOT / room).rglob("*.py")) if room in str(each.resolve())]
    files = [each for each in dict.fromkeys(files) if not any(part in each for part in _LEFT_OUT)]
    found = []
    while len(found) < count:
        file = draws.choice(files)
        all_ = _Change()
        all_.visit(ast.parse((ROOT / file).read_text()))
        if all_.found:
            found.append(Fresh(file, *draws.choice(all_.found)))
    return list(dict.fromkeys(found))


def module_of(file: str) -> str:
    path = file.removeprefix("src/replaylens/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"replaylens.{path}"


def _functions(code: CodeType, name: str = "") -> dict[str, CodeType]:
    """Qualified name -> code of functions and methods, not of those inside functions."""
    found = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & 2:  # a function: its names are its own
                found[each.co_qualname] = each
            else:
                found |= _functions(each)
    return found


NOTED = set[int]()
"""numbers of the planted functions that were called"""


class Planting:
    """Mutants in the functions of this process, which note that they are called."""

    def __init__(self, mutants: Sequence[Fresh]) -> None:
        self.mutants = mutants
        self.codes: dict[Fresh, tuple[FunctionType, CodeType, CodeType]] = {}
        """mutant -> function, its code that notes the call, the changed code"""
        for i, mutant in enumerate(mutants):
            module, source = import_module(module_of(mutant.file)), (ROOT / mutant.file).read_text()
            file = str(module.__file__)
            plain, tree = _functions(compile(source, file, "exec")), _Change(mutant.number).visit(ast.parse(source))
            changed = _functions(compile(ast.fix_missing_locations(tree), file, "exec"))
            names = [key for key in plain if _parts(plain[key]) != _parts(changed[key])]
            for each in gc.get_objects():
                if type(each) is FunctionType and each.__code__.co_filename == file and each.__code__.co_qualname in names:
                    noting = _functions(compile(_noting(ast.parse(source), i), file, "exec"))[names[0]]
                    self.codes[mutant] = each, noting, changed[names[0]]
        for function, noting, _ in self.codes.values():
            function.__code__ = noting

    def asked(self, test: str) -> list[Fresh]:
        """Those whose function was called since the last test."""
        found = [self.mutants[i] for i in sorted(NOTED)]
        NOTED.clear()
        return [each for each in found if each in self.codes]

    @contextmanager
    def planted(self, mutant: Fresh, does: bool) -> Iterator[None]:
        function, noting, changed = self.codes[mutant]
        function.__code__ = changed if does else noting
        try:
            yield
        finally:
            function.__code__ = noting
            NOTED.clear()


def _parts(code: CodeType) -> Any:
    """What makes two codes differ."""
    return [_parts(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts], code.co_code, code.co_names


def _noting(tree: ast.Module, number: int) -> ast.Module:
    """Every function notes the number when it is called."""
    note = ast.parse(f"__import__('bench.mutants.fresh', fromlist=['NOTED']).NOTED.add({number})").body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body.insert(1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0, note)
    return ast.fix_missing_locations(tree)


def near(mutant: Fresh, most: int = 5) -> list[str]:
    """Files of tests that name the mutant's module, the function, or lie in a folder or file with the module's name; these
    first that do most of it."""
    module, stem = module_of(mutant.file), Path(mutant.file).stem
    room, function = str(Path(mutant.file).parent).removeprefix("src/replaylens/"), mutant.function
    ranked = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file, source = str(path.relative_to(ROOT)), path.read_text()
        if file.startswith(("tests/gpu/", "bench/peers/", "bench/mutants/", "tests/notebooks/")):
            continue
        signs = (f"{module} import" in source, stem in path.stem, file.startswith(f"tests/{room}/"))
        points = 4 * signs[0] + 3 * signs[1] + 2 * signs[2] + (function in source)
        ranked.append((-points, file in (f"tests/{each}" for each in LONG), file))
    return [file for points, _, file in sorted(ranked)[:most] if points < 0]


def run(mutants: Sequence[Fresh], most: int = 5) -> dict[Fresh, str]:
    """Mutant -> the test that noticed it, among the files next to it."""
    planting, by_file = Planting(mutants), dict[str, list[Fresh]]()
    for mutant in mutants:
        for file in near(mutant, most):
            by_file.setdefault(file, []).append(mutant)
    rerun = Rerun(
        planting.asked,
        planting.planted,
        worth=lambda test: any(each not in rerun.noticed for each in by_file[test.partition("::")[0]]),
    )
    return dict(rerun.run(sorted(by_file)).noticed)
