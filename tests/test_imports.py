"""Imports point one way, and `import replaylens` is light. Each rule has a planted source that must break it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "replaylens"
LAYERS: dict[str, set[str]] = {
    "tasks": set(),
    "kernels": set(),
    "engine": {"tasks", "kernels"},
    "probes": {"engine", "tasks", "kernels"},
    "views": {"probes", "engine", "tasks", "kernels"},
    "commands": {"views", "probes", "engine", "tasks", "kernels"},
    "cli": {"commands", "views", "probes", "engine", "tasks", "kernels"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""what each part may import of the others; itself it always may"""
ON_DEMAND: dict[str, set[str]] = {"engine": {"views"}, "probes": {"views"}}
"""what a part may import of those above it, but within functions only: an object draws itself when it is shown"""
LINKS = ("engine", "kernels", "probes", "tasks")
HEAVY = {"transformer_lens", "transformers", "triton", "ray", "gguf", "matplotlib", "sklearn", "pandas"}
"""imported where they are used, never when a module is"""
HEAVY_AT_TOP = {"tasks": HEAVY, "engine": HEAVY, "views": HEAVY, "__init__": HEAVY, "kernels": HEAVY - {"triton"}}
NOT_LOADED = ("transformer_lens", "transformers", "triton", "ray")
SECONDS = 2.0


# The checker


def imported(tree: ast.AST) -> Iterator[str]:
    """Every absolute dotted name that the tree imports, anywhere in it, or reaches through `replaylens.`"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "replaylens":
            yield f"replaylens.{node.attr}"
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func).split(".")[-1]:  # import_module("...")
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def at_top(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                waiting.append(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                waiting += child.body


def faults(source: str, part: str | None) -> list[str]:
    """What is wrong with the imports of a file of `part` (None: a file outside the package, free to import any)."""
    tree = ast.parse(source)
    early = {name for node in at_top(tree) if isinstance(node, ast.Import | ast.ImportFrom) for name in imported(node)}
    found = ["relative import" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    for name in imported(tree):
        words = name.split(".")
        if words[0] in LINKS:
            found.append(f"bare {words[0]}")
        if part and words[0] == "replaylens" and len(words) > 1 and not words[1].startswith("__"):
            if words[1] not in LAYERS:
                found.append(f"{name}: import it from the file where it lives")
            elif words[1] in ON_DEMAND.get(part, set()) and name not in early:
                continue
            elif words[1] != part and words[1] not in LAYERS[part]:
                found.append(f"{part} imports {words[1]}")
    for node in at_top(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            loads = {name.split(".")[0] for name in imported(node)}
            found += [f"{name} at the top" for name in sorted(loads & HEAVY_AT_TOP.get(part or "", set()))]
    return found


def sources() -> Iterator[tuple[Path, str | None]]:
    """All our files, each with its part."""
    for link in LINKS:
        yield from ((file, link) for file in sorted((ROOT / link).rglob("*.py")))
    for folder in ("views", "commands"):
        yield from ((file, folder) for file in sorted((PACKAGE / folder).rglob("*.py")))
    yield from ((file, file.stem) for file in sorted(PACKAGE.glob("*.py")))
    for folder in ("tests", "benchmarks", "notebooks"):
        yield from ((file, None) for file in sorted((ROOT / folder).rglob("*.py")))


# The promises


def test_imports_point_one_way() -> None:
    """tasks, kernels <- engine <- probes <- views <- commands <- cli; nothing bare, relative or heavy."""
    checked = list(sources())
    assert {part for _, part in checked} == {*LAYERS, None}, "a part has no files, or there is a new one: add its rule"
    wrong = {str(file.relative_to(ROOT)): bad for file, part in checked if (bad := faults(file.read_text(), part))}
    assert wrong == {}


PLANTED: dict[str, tuple[str | None, str, str]] = {
    "tasks above itself": ("tasks", "from replaylens.engine.model.decoder import Decoder", "tasks imports engine"),
    "kernels above itself": ("kernels", "import replaylens.engine.model.ops", "kernels imports engine"),
    "kernels and tasks": ("kernels", "from replaylens import tasks", "kernels imports tasks"),
    "engine above itself": ("engine", "def f():\n    from replaylens.probes import x", "engine imports probes"),
    "probes above themselves": ("probes", "from replaylens.commands import fetch", "probes imports commands"),
    "views at the top of engine": ("engine", "from replaylens.views import live", "engine imports views"),
    "views above themselves": ("views", "def f():\n    from replaylens.commands import fetch", "views imports commands"),
    "commands above themselves": ("commands", "import replaylens.cli", "commands imports cli"),
    "through an attribute": ("engine", "import replaylens\nreplaylens.probes.fit()", "engine imports probes"),
    "by a string": ("tasks", "importlib.import_module('replaylens.engine')", "tasks imports engine"),
    "for types only": ("tasks", "if TYPE_CHECKING:\n    from replaylens.engine import x", "tasks imports engine"),
    "a public name": ("engine", "from replaylens import Probe", "replaylens.Probe: import it from the file"),
    "bare": ("engine", "import tasks.coin", "bare tasks"),
    "bare, from": ("probes", "from engine import model", "bare engine"),
    "bare, in a test": (None, "from kernels import matmul", "bare kernels"),
    "relative": ("engine", "from . import model", "relative import"),
    "relative, upwards": ("engine", "from ..tasks import coin", "relative import"),
    "heavy": ("engine", "import transformers", "transformers at the top"),
    "heavy, from": ("tasks", "from sklearn.linear_model import Ridge", "sklearn at the top"),
    "heavy, in try": ("engine", "try:\n    import gguf\nexcept ImportError:\n    pass", "gguf at the top"),
    "heavy, in except": ("engine", "try:\n    x\nexcept ImportError:\n    import ray", "ray at the top"),
    "heavy, in a class": ("engine", "class A:\n    import pandas as pd", "pandas at the top"),
    "heavy, in if": ("__init__", "if True:\n    import transformer_lens", "transformer_lens at the top"),
    "heavy, in kernels": ("kernels", "import matplotlib.pyplot as plt", "matplotlib at the top"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_checker_finds_what_is_planted(plant: str) -> None:
    """Negative control: a source that breaks one rule gives that one complaint."""
    part, source, complaint = PLANTED[plant]
    found = faults(source, part)
    assert len(found) == 1 and found[0].startswith(complaint)


@pytest.mark.parametrize(
    "part, source",
    [
        ("engine", "from replaylens.tasks import get\nfrom replaylens.kernels import matmul\nimport torch"),
        ("engine", "def f():\n    import transformers"),
        ("engine", "if TYPE_CHECKING:\n    import transformers"),
        ("engine", "import replaylens\nprint(replaylens.__version__)"),
        ("engine", "def _repr_html_(self):\n    from replaylens.engine.pictures.summary import run_html"),
        ("engine", "if TYPE_CHECKING:\n    from replaylens.engine.pictures.paths import Tree"),
        ("views", "from replaylens.engine.dump.reader import Dump\nfrom replaylens.probes import x"),
        ("kernels", "import triton.language as tl"),
        ("tasks", "from replaylens.tasks.coin import Coin"),
        (None, "from replaylens.probes import x\nfrom tests.engine.packed import y\nimport sklearn"),
    ],
)
def test_checker_lets_pass_what_is_allowed(part: str | None, source: str) -> None:
    """The other control: the checker does not complain of everything."""
    assert faults(source, part) == []


def python(code: str, folder: Path) -> Any:
    """What the code prints as JSON, run by a fresh interpreter away from the checkout."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = f"print(json.dumps([name for name in {NOT_LOADED} if name in sys.modules]))"


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    """`import replaylens` brings in none of the heavy packages; the same question finds one that was imported."""
    assert python(f"import json, sys, replaylens; {LOADED}", tmp_path) == []
    assert python(f"import json, sys, triton; {LOADED}", tmp_path) == ["triton"]


def test_import_is_quick(tmp_path: Path) -> None:
    """`import replaylens` adds less than 2 s to `import torch`; the better of two, since the machine is shared."""
    code = "import json, time, torch; t = time.perf_counter(); import replaylens; print(time.perf_counter() - t)"
    assert min(float(python(code, tmp_path)) for _ in range(2)) < SECONDS


def test_public_names_load_on_demand(tmp_path: Path) -> None:
    """Every name that the package offers is there when asked for, and not before; another name lists them."""
    code = """
import json, sys, replaylens
early = [name for name in replaylens._WHERE if name in vars(replaylens)]
missing = [name for name in replaylens.__all__ if getattr(replaylens, name, None) is None]
try:
    replaylens.nonsense
except AttributeError as error:
    print(json.dumps([early, missing, sorted(dir(replaylens)) == sorted(replaylens.__all__), str(error)]))
"""
    early, missing, listed, error = python(code, tmp_path)
    assert (early, missing, listed) == ([], [], True)
    assert "no attribute 'nonsense'" in error and "tasks" in error


# The layout


def test_links_are_links() -> None:
    """The parts lie at the top of the repository and are reached through relative links, so that a clone has them."""
    for link in LINKS:
        assert (PACKAGE / link).is_symlink() and (PACKAGE / link).readlink() == Path("../..") / link
        assert (PACKAGE / link).resolve() == ROOT / link


def test_kernels_is_no_regular_package() -> None:
    """A folder `kernels` with an __init__.py would shadow the package of that name that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for link in set(LINKS) - {"kernels"}:
        assert (ROOT / link / "__init__.py").exists()
