"""Imports point one way, and `import replaylens` is light. For each rule, a planted source must break it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import replaylens

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "replaylens"
SPINE: tuple[tuple[str, ...], ...] = (
    ("moved",),
    ("boundary",),
    ("tasks", "kernels"),
    ("engine/errors", "engine/terminal"),
    ("engine/files", "engine/machine", "engine/records"),
    ("engine/model",),
    ("engine/display", "engine/request", "engine/memory"),
    ("engine/passes",),
    ("engine/proof", "engine/loop"),
    ("engine/serving",),
    ("engine/engine",),
)
"""the engine from the bottom up: a room may import itself and those below it, never its neighbours or those above"""
SHELF = {
    "features": (),
    "gradients": (),
    "rollouts": (),
    "weights": (),
    "thinking": ("weights",),
    "replay": (),
    "dumps": ("replay",),
    "training": ("thinking", "weights"),
}
"""rooms beside the engine: each may import the spine, and of the others only those named here"""
FACES = (
    ("probes",),
    ("errors",),
    ("views",),
    ("workbench",),
    ("living",),
    ("extend",),
    ("commands",),
    ("cli",),
    ("__main__",),
    ("extras",),
)
"""what people see, from the bottom up: a face may import the spine, the shelf and the faces below. What a few need is on top:
nothing imports `extras`, and everything else works without it"""
DOORS = {
    "tasks": {"engine/machine"},
    "boundary": {"engine/errors", "engine/model", "engine/request"},
    "engine/proof": {"weights"},
    "engine/serving": {"engine/engine", "gradients", "living", "rollouts", "views"},
    "engine/engine": {"replay", "views", "weights"},
    "features": {"views"},
    "rollouts": {"views"},
    "thinking": {"views"},
    "replay": {"dumps", "rollouts", "views"},
    "dumps": {"features", "weights"},
    "probes": {"views"},
    "views": {"living"},
}
"""what a room may import only within functions, when a verb needs it, or for type checkers"""
ROOMS = (*SPINE, tuple(SHELF), *FACES)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
TYPES_ONLY = {"__init__"}
"""may name anything for type checkers, and imports only the boundary at run time"""
LINKS = ("engine", "kernels", "probes", "tasks")
HEAVY = {"transformer_lens", "transformers", "triton", "ray", "gguf", "matplotlib", "sklearn", "pandas", "datasets"}
"""imported where they are used, never when a module is"""
HEAVY_AT_TOP = {"tasks": HEAVY, "engine": HEAVY, "views": HEAVY, "__init__": HEAVY, "kernels": HEAVY - {"triton"}}
SUSPECT = re.compile(rf"^\s*from\s*(\.|({'|'.join(LINKS)})\b)|^\s*import\b.*\b({'|'.join(LINKS)})\b|import\w*\(", re.MULTILINE)
"""what a bare or relative import has"""
NOT_LOADED = ("transformer_lens", "transformers", "triton", "ray")
SECONDS = 2.0


# The checker


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every absolute dotted name that the nodes import or reach through `replaylens.`"""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "replaylens":
            yield f"replaylens.{node.attr}"
        elif isinstance(node, ast.Call) and "import" in called(node.func):  # import_module("...")
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def called(function: ast.expr) -> str:
    """The last word of what is called."""
    match function:  # unparsing every call takes seconds
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ast.unparse(function).split(".")[-1]


def at_top(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, excluding functions and TYPE_CHECKING blocks."""
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


def room_of(module: str) -> str:
    """The room of a dotted name below `replaylens`: a sub-package or file of the engine, or another part."""
    words = module.split(".")[1:]
    return "/".join(words[: 2 if words[0] == "engine" else 1])


@dataclass(frozen=True)
class Imports:
    """What a source imports: relatively, anywhere by name, and when the module is imported."""

    relative: int
    anywhere: tuple[str, ...]
    at_top: tuple[str, ...]


@cache
def imports(source: str) -> Imports:
    """Read once for all tests; a tree itself is too large to keep."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Call)]
    relative = sum(isinstance(node, ast.ImportFrom) and node.level > 0 for node in nodes)
    top = (node for node in at_top(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return Imports(relative, tuple(imported(nodes)), tuple(imported(top)))


def may_import(room: str, other: str) -> bool:
    """Whether a room may import another when it is loaded."""
    if room in SHELF and other in SHELF:
        return other in SHELF[room]
    return FLOOR[other] < FLOOR[room]


def faults(source: str, room: str | None) -> list[str]:
    """Import faults of a file of `room` (None: a file outside the package, which may import any room)."""
    if room is None and not SUSPECT.search(source):
        return []  # parsing all tests takes seconds
    read = imports(source)
    found = ["relative import"] * read.relative
    for name in read.anywhere:
        words = name.split(".")
        if words[0] in LINKS:
            found.append(f"bare {words[0]}")
        if room and room not in TYPES_ONLY and words[0] == "replaylens" and len(words) > 1 and not words[1].startswith("__"):
            other = room_of(name)
            if other not in FLOOR:
                found.append(f"{name}: import it from the file where it lives")
            elif other != room and not may_import(room, other):
                if other not in DOORS.get(room, ()):
                    found.append(f"{room} imports {other}")
                elif name in read.at_top:
                    found.append(f"{room} imports {other} when it is loaded")
    part = (room or "").split("/")[0]
    loads = {name.split(".")[0] for name in read.at_top}
    return found + [f"{name} at the top" for name in sorted(loads & HEAVY_AT_TOP.get(part, set()))]


def module_of(file: Path) -> str:
    """The dotted name of a file of the package."""
    inside = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.relative_to(ROOT)
    return ".".join(("replaylens", *inside.with_suffix("").parts)).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    """All files of the package by dotted name. Each link is followed once."""
    files = [file for link in LINKS for file in (ROOT / link).rglob("*.py")]
    folders = [folder for folder in PACKAGE.iterdir() if folder.is_dir() and not folder.is_symlink()]
    files += [file for folder in folders for file in folder.rglob("*.py")]
    return {module_of(file): file for file in sorted([*files, *PACKAGE.glob("*.py")])}


def sources() -> Iterator[tuple[Path, str | None]]:
    """All our files, each with its room."""
    for module, file in modules().items():
        is_package = file.name == "__init__.py" and module.count(".") == 1 and module != "replaylens"
        yield file, "__init__" if module == "replaylens" else None if is_package else room_of(module)
    for folder in ("tests", "bench", "notebooks"):
        yield from ((file, None) for file in sorted((ROOT / folder).rglob("*.py")))


def circle(texts: dict[str, str]) -> list[str]:
    """Modules that import each other in a cycle, also through functions or type-only imports, doors aside. Empty: none."""
    arrows: dict[str, set[str]] = {}
    for module, text in texts.items():
        doors = DOORS.get(room_of(module), set())
        read = imports(text)
        names = [n for n in read.anywhere if n in read.at_top or not n.startswith("replaylens.") or room_of(n) not in doors]
        arrows[module] = {nearest(texts, name) for name in names} - {module, ""}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def nearest(texts: dict[str, str], name: str) -> str:
    """The module that an imported name belongs to, or an empty string for names outside the package."""
    while name and name not in texts:
        name = name.rpartition(".")[0]
    return name


# The promises


def test_imports_point_one_way() -> None:
    """Every import leads to a lower floor of the table, and none is bare, relative or heavy."""
    checked = list(sources())
    assert {room for _, room in checked} == {*FLOOR, "__init__", None}, "a room has no files, or there is a new one: add it"
    wrong = {str(file.relative_to(ROOT)): bad for file, room in checked if (bad := faults(file.read_text(), room))}
    assert wrong == {}


def test_no_file_is_in_a_circle() -> None:
    """Cycles within a room count too. The package's own __init__, which names everything for type checkers, is left out."""
    texts = {module: file.read_text() for module, file in modules().items() if module != "replaylens"}
    assert circle(texts) == []


def test_a_planted_circle_is_found() -> None:
    """Negative control: one more import closes a cycle, in a function as well as at the top."""
    texts = {module: file.read_text() for module, file in modules().items() if module != "replaylens"}
    plant = "\ndef f():\n    from replaylens.engine.loop.loop import Loop\n"
    texts["replaylens.engine.loop.lane"] += plant
    assert {"replaylens.engine.loop.lane", "replaylens.engine.loop.loop"} <= set(circle(texts))


PLANTED: dict[str, tuple[str | None, str, str]] = {
    "tasks above themselves": ("tasks", "from replaylens.engine.model.decoder import Decoder", "tasks imports engine/model"),
    "kernels above themselves": ("kernels", "import replaylens.engine.model.ops", "kernels imports engine/model"),
    "kernels and tasks": ("kernels", "from replaylens import tasks", "kernels imports tasks"),
    "a room above itself": (
        "engine/loop",
        "from replaylens.engine.serving.branch import Branch",
        "engine/loop imports engine/serving",
    ),
    "neighbours": (
        "engine/request",
        "from replaylens.engine.memory.tree import BranchTree",
        "engine/request imports engine/memory",
    ),
    "a room of the shelf and another": (
        "features",
        "def f():\n    from replaylens.dumps.reader import Dump",
        "features imports dumps",
    ),
    "a door at the top": (
        "engine/serving",
        "from replaylens.views.pictures import Tree",
        "engine/serving imports views when it is loaded",
    ),
    "the spine and the shelf": (
        "engine/loop",
        "def f():\n    from replaylens.dumps.reader import Dump",
        "engine/loop imports dumps",
    ),
    "engine above itself": (
        "engine/engine",
        "def f():\n    from replaylens.probes import rows",
        "engine/engine imports probes",
    ),
    "probes above themselves": ("probes", "from replaylens.commands import fetch", "probes imports commands"),
    "views above themselves": ("views", "def f():\n    from replaylens.commands import fetch", "views imports commands"),
    "commands above themselves": ("commands", "import replaylens.cli", "commands imports cli"),
    "through an attribute": (
        "engine/engine",
        "import replaylens\nreplaylens.commands.fetch()",
        "engine/engine imports commands",
    ),
    "by a string": ("tasks", "importlib.import_module('replaylens.engine.engine')", "tasks imports engine/engine"),
    "for types only": ("tasks", "if TYPE_CHECKING:\n    from replaylens.engine.engine import x", "tasks imports engine/engine"),
    "a public name": ("engine/engine", "from replaylens import Probe", "replaylens.Probe: import it from the file"),
    "a new room": (
        "engine/engine",
        "from replaylens.engine.attic import x",
        "replaylens.engine.attic.x: import it from the file",
    ),
    "bare": ("engine/engine", "import tasks.coin", "bare tasks"),
    "bare, from": ("probes", "from engine import model", "bare engine"),
    "bare, in a test": (None, "from kernels import matmul", "bare kernels"),
    "relative": ("engine/engine", "from . import model", "relative import"),
    "relative, upwards": ("engine/engine", "from ..tasks import coin", "relative import"),
    "heavy": ("engine/model", "import transformers", "transformers at the top"),
    "heavy, from": ("tasks", "from sklearn.linear_model import Ridge", "sklearn at the top"),
    "heavy, in try": ("engine/model", "try:\n    import gguf\nexcept ImportError:\n    pass", "gguf at the top"),
    "heavy, in except": ("engine/engine", "try:\n    x\nexcept ImportError:\n    import ray", "ray at the top"),
    "heavy, in a class": ("engine/engine", "class A:\n    import pandas as pd", "pandas at the top"),
    "heavy, in if": ("__init__", "if True:\n    import transformer_lens", "transformer_lens at the top"),
    "heavy, in kernels": ("kernels", "import matplotlib.pyplot as plt", "matplotlib at the top"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_checker_finds_what_is_planted(plant: str) -> None:
    """Negative control: a source that breaks one rule gives exactly that complaint."""
    room, source, complaint = PLANTED[plant]
    found = faults(source, room)
    assert len(found) == 1 and found[0].startswith(complaint)


@pytest.mark.parametrize(
    "room, source",
    [
        ("engine/model", "from replaylens.tasks import get\nfrom replaylens.kernels import matmul\nimport torch"),
        ("engine/model", "def f():\n    import transformers"),
        ("engine/model", "if TYPE_CHECKING:\n    import transformers"),
        ("engine/engine", "import replaylens\nprint(replaylens.__version__)"),
        ("engine/loop", "from replaylens.engine.loop.lane import Turn"),
        ("engine/serving", "def f():\n    from replaylens.views.pictures import Tree"),
        ("dumps", "from replaylens.engine.engine import Engine\nfrom replaylens.replay.run import Run"),
        ("views", "from replaylens.dumps.reader import Dump\nfrom replaylens.probes import rows"),
        ("__init__", "if TYPE_CHECKING:\n    from replaylens.engine.engine import Engine"),
        ("kernels", "import triton.language as tl"),
        ("tasks", "from replaylens.tasks.coin import Coin"),
        (None, "from replaylens.probes import x\nfrom tests.engine.passes.packed import y\nimport sklearn"),
    ],
)
def test_checker_lets_pass_what_is_allowed(room: str | None, source: str) -> None:
    """Negative control: the checker accepts allowed imports."""
    assert faults(source, room) == []


FACTS = f"""
before, began = set(sys.modules), time.process_time()
import replaylens
found = dict(seconds=time.process_time() - began)
heavy = lambda: [name for name in {NOT_LOADED} if name in set(sys.modules) - before]
found["heavy"] = heavy()
import triton
found["heavy with triton"] = heavy()
found["early"] = [name for name in replaylens._WHERE if name in vars(replaylens)]
found["listed"] = sorted(dir(replaylens)) == sorted(replaylens.__all__)
try:
    replaylens.nonsense
except AttributeError as error:
    found["error"] = str(error)
print(json.dumps(found), flush=True)
"""
TRIPS = {
    "replaylens.Engine.load('coin-plain')": 72,
    "replaylens.Dump.open(sys.argv[1])": 27,
    "replaylens.Engine.load('coin-thinking')": 0,
}
"""what is done in a fresh interpreter -> the most modules of replaylens that it may load; 0: a control, which must load more"""
LOADED = 'print(*sorted(name for name in sys.modules if name.startswith("replaylens.")), flush=True)\n'
BENCHMARKS = """
sys.path.insert(0, sys.argv[2])
from bench.__main__ import declared
declared()
print("triton" in sys.modules, flush=True)
"""
STEPS = [FACTS, *(f"import replaylens\n{trip}\n{LOADED}" for trip in TRIPS), BENCHMARKS]
FORKED = f"""
import json, os, sys, time, numba, torch
for step in {STEPS!r}:
    if not os.fork():  # it has loaded nothing of ours
        exec(step, dict(globals()))
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of one example."""
    folder = tmp_path_factory.mktemp("saved") / "dump"
    engine = replaylens.Engine.load("coin-plain")
    engine.replay(replaylens.tasks.get("coin")(flips=1).examples(1), sites=["S", "Z"]).save(folder)
    return folder


@pytest.fixture(scope="module")
def lines(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each of STEPS prints in an interpreter outside the checkout that has loaded torch and nothing of ours."""
    command = [sys.executable, "-c", FORKED, str(saved), str(ROOT)]
    folder = tmp_path_factory.mktemp("outside")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def fresh(lines: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines[0])
    return found


def test_a_trip_loads_only_the_rooms_that_it_needs(lines: list[str]) -> None:
    """A plain model needs the spine and weights, and reading a dump no engine. Control: a Thinking-States model needs more."""
    for most, line in zip(TRIPS.values(), lines[1:-1], strict=True):
        loaded = line.split()
        beside = [name for name in loaded if room_of(name) in {*SHELF, *(room for rooms in FACES for room in rooms)}]
        if most:
            assert len(loaded) <= most
            assert {room_of(name) for name in beside} <= {"dumps", "weights", "thinking"}, beside
        else:
            assert len(beside) > 5


def test_triton_is_not_needed_to_list_benchmarks(lines: list[str]) -> None:
    assert lines[-1] == "False"


WITHOUT_TORCH = """
import contextlib, sys, replaylens, replaylens.cli
def torch_after(what):
    print("torch after", what + ":", "torch" in sys.modules)
where = sys.argv[1]
for word in ("--version", "dupm"):
    sys.argv[1] = word
    with contextlib.suppress(SystemExit):
        replaylens.cli.main()
    torch_after(word)
dump = replaylens.Dump.open(where)
shown = [repr(dump), dump.digest, dump.accepted_digest, dump.labels, dump.columns, len(dump), dump.manifest.fingerprint]
shown += [(name, site.shape) for name, site in dump.sites.items()] + [shard.digest for shard in dump.manifest.shards]
torch_after("Dump.open")
replaylens.cli.app(["inspect", where], standalone_mode=False)
torch_after("inspect")
dump.to_torch("S", 0)
torch_after("rows")
"""


def test_only_what_computes_loads_torch(saved: Path) -> None:
    """It takes three times as long to load as all that the manifest needs. Version and misspelt commands do not load it
    either. Control: rows need it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(saved)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = [(what, "False") for what in ("--version", "dupm", "Dump.open", "inspect")] + [("rows", "True")]
    assert re.findall("torch after (.*): (.*)", done.stdout) == expected


def test_import_loads_nothing_heavy(fresh: dict[str, Any]) -> None:
    """`import replaylens` loads none of the heavy packages. Negative control: the check finds one that is imported."""
    assert fresh["heavy"] == [] and "triton" in fresh["heavy with triton"]


def test_import_is_quick(fresh: dict[str, Any]) -> None:
    """`import replaylens` adds less than 2 s of a core to `import torch`, however busy the machine is."""
    assert fresh["seconds"] < SECONDS


def test_public_names_load_on_demand(fresh: dict[str, Any]) -> None:
    """Every public name loads when it is used, and not before. The error for an unknown name lists the public ones."""
    assert (fresh["early"], fresh["listed"]) == ([], True)
    assert [name for name in replaylens.__all__ if getattr(replaylens, name, None) is None] == []
    assert "no attribute 'nonsense'" in fresh["error"] and "tasks" in fresh["error"]


# The layout


def test_links_are_links() -> None:
    """The parts are top-level folders, reached through relative links, so a clone contains them."""
    for link in LINKS:
        assert (PACKAGE / link).is_symlink() and (PACKAGE / link).readlink() == Path("../..") / link
        assert (PACKAGE / link).resolve() == ROOT / link


def test_kernels_is_no_regular_package() -> None:
    """A folder `kernels` with an __init__.py would shadow the package of that name that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for link in set(LINKS) - {"kernels"}:
        assert (ROOT / link / "__init__.py").exists()
