"""Type checkers and editors see the public names of `import replaylens as rl`, although they load on first use."""

import ast
import sys
from pathlib import Path

import jedi
import pytest
from mypy import api

ROOT = Path(__file__).parents[1]
CONFIG = f"""
[mypy]
mypy_path = {ROOT / "src"}
follow_imports = skip
strict = true
[mypy-replaylens.*]
follow_imports = silent
ignore_errors = true
[mypy-torch.*,numpy.*,pandas.*]
follow_imports_for_stubs = true
"""
"""our own signatures only: `make type` checks the code behind them, and reading torch's takes a minute"""
GOOD = """
import replaylens as rl

engine: rl.Engine = rl.Engine.load("coin-plain")
branch: rl.Branch = engine.prompt("x")
engine.generate([branch], 2, drafter="lens", sampling=rl.Sampling(temperature=0.5))
text: str = rl.Engine.load("coin-plain").prompt("x").generate(2, drafter="lens").text
branches: list[rl.Branch] = branch.fork(2)
report: rl.probes.Report = rl.probes.sweep(rl.Dump.open("dumps/coin"), "face")
rl.tasks.get("coin")
try:
    branch.rollback(to=2)
except rl.errors.BadRequest:
    pass
"""
BAD = {
    "a misspelt keyword": (
        "engine.generate([branch], 2, drafer='lens')",
        'keyword argument "drafer" for "generate"',
    ),
    "a misspelt keyword of a branch": (
        "branch.generate(2, drafer='lens')",
        'keyword argument "drafer" for "generate"',
    ),
    "a misspelt keyword of load": (
        "rl.Engine.load('x', cache_token=8)",
        'keyword argument "cache_token" for "load"',
    ),
    "a misspelt keyword of prompt": ("engine.prompt('x', site='S')", 'keyword argument "site" for "prompt"'),
    "a wrong type": ("engine.generate([branch], '2')", 'Argument 2 to "generate"'),
    "a misspelt method": ("engine.generat([branch], 2)", '"Engine" has no attribute "generat"'),
    "a misspelt name": ("rl.Engin", 'no attribute "Engin"'),
    "a misspelt function": ("rl.probes.sweeep", 'no attribute "sweeep"'),
    "a misspelt field": ("rl.Sampling(temprature=0.5)", 'Unexpected keyword argument "temprature"'),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """mypy's output for the good lines followed by the bad ones, one line each: `snippet.py:LINE: ...`."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "snippet.py").write_text(GOOD + "".join(f"{line}\n" for line, _ in BAD.values()))
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache"), "--no-error-summary"]
    said, faults, _ = api.run([*options, str(folder / "snippet.py")])
    assert faults == ""
    return [line.partition("snippet.py:")[2] for line in said.splitlines() if ": error:" in line]


def test_correct_code_passes(complaints: list[str]) -> None:
    first_bad = len(GOOD.splitlines()) + 1
    assert [line for line in complaints if int(line.partition(":")[0]) < first_bad] == []


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_an_error(complaints: list[str], mistake: str) -> None:
    at = len(GOOD.splitlines()) + 1 + list(BAD).index(mistake)
    (said,) = [line for line in complaints if line.startswith(f"{at}:")]
    assert BAD[mistake][1] in said


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("rl.", "Engine"),
        ("rl.Engine.lo", "load"),
        ("rl.probes.swe", "sweep"),
        ("rl.tasks.ge", "get"),
        ("rl.errors.BadR", "BadRequest"),
    ],
)
def test_an_editor_completes(typed: str, offered: str) -> None:
    project = jedi.Project(ROOT, sys_path=[str(ROOT / "src"), *sys.path])
    found = jedi.Script(f"import replaylens as rl\n{typed}", project=project).complete()
    assert offered in [completion.name for completion in found]


def told(tree: ast.Module) -> set[str]:
    """What a type checker sees: module:name."""
    (block,) = [node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names), "only `as` makes a name public"
    return {f"{node.module}:{alias.name}" for node in imports for alias in node.names}


def loaded(tree: ast.Module) -> dict[str, str]:
    """Where `__getattr__` looks up each name."""
    (table,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE"]
    found = ast.literal_eval(table)
    assert isinstance(found, dict)
    return found


def test_checkers_and_python_find_the_same_names() -> None:
    top, probes = (ast.parse((ROOT / file).read_text()) for file in ("src/replaylens/__init__.py", "probes/__init__.py"))
    assert told(top) == {place if ":" in place else ":".join(place.rsplit(".", 1)) for place in loaded(top).values()}
    assert told(probes) == {f"replaylens.probes.{place}:{name}" for name, place in loaded(probes).items()}
