"""The package's own files agree: ranges and pins, make targets and CI, skips and their reasons."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TARGETS = {"demo", "test", "lint", "type", "bench", "notebooks", "slow", "gpu", "smollm2", "clean"}
QUARANTINES = ROOT / "tests" / "QUARANTINES.md"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(text: str) -> dict[str, str]:
    """Package -> version, from a constraints file. Anything but an exact pin is an error."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact and re.fullmatch(r"[\w.]+", version), f"not an exact pin: {line!r}"
            assert canonicalize_name(name) not in out, f"pinned twice: {name}"
            out[canonicalize_name(name)] = version
    return out


def unmet(requirements: list[str], pinned: dict[str, str]) -> list[str]:
    """The requirements that no pin satisfies."""
    wanted = [Requirement(text) for text in requirements]
    return [str(r) for r in wanted if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0.dev0"))]


# Pins


def test_pins_satisfy_the_ranges() -> None:
    """Every package that pyproject requires, in any extra, is pinned to a version within its range."""
    project = pyproject()["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert len(wanted) > 20
    assert unmet(wanted, pins((ROOT / "constraints.txt").read_text())) == []


def test_pins_control() -> None:
    """Negative control: a pin outside its range and a package without a pin are found."""
    assert unmet(["a>=2", "b>=1", "c_d<3"], {"a": "1.9", "c-d": "2.0"}) == ["a>=2", "b>=1"]
    for line in ("a>=2", "a==1\nA==2", "a==1.*"):
        with pytest.raises(AssertionError):
            pins(line)


PACKAGE = ("engine", "kernels", "probes", "tasks", "src")
"""our folders with sources of the package"""


@dataclass(frozen=True)
class Read:
    """What the tests ask of a source."""

    imports: frozenset[str]
    """top-level packages"""
    classes: dict[str, set[str]]
    """at any level, with their plain bases"""
    aliases: set[str]
    """capitalised names assigned at the top: types"""


@cache
def read(source: str) -> Read:
    """Read once for all tests: parsing takes longest."""
    nodes, assigned = list[ast.AST](), list[ast.expr]()
    for node in (tree := ast.parse(source)).body:
        assigned += node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    waiting: list[ast.AST] = [tree]
    while waiting:  # statements only
        nodes.append(node := waiting.pop())
        waiting += [each for name in ("body", "orelse", "finalbody", "handlers", "cases") for each in getattr(node, name, ())]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return Read(
        frozenset(name.partition(".")[0] for node in nodes for name in _named(node)),
        {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes},
        {t.id for t in assigned if isinstance(t, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", t.id)},
    )


@cache
def imported(room: str) -> frozenset[str]:
    """The top-level packages that the sources of a folder import. Those of tests and docs are read by line: parsing them takes
    seconds, and what a script within a test imports is used, too."""
    texts = [file.read_text() for file in (ROOT / room).rglob("*.py")]
    if room in PACKAGE:
        return frozenset(name for text in texts for name in read(text).imports)
    return frozenset(name for text in texts for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))


def _named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module else []
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@cache
def distributions() -> dict[str, set[str]]:
    """Imported name -> the installed packages that have it."""
    return {name: set(map(canonicalize_name, found)) for name, found in packages_distributions().items()}


def undeclared(names: Iterable[str], requirements: list[str]) -> set[str]:
    """The imported packages that no requirement names; what nobody has installed is not known."""
    declared, known = {canonicalize_name(Requirement(text).name) for text in requirements}, distributions()
    return {name for name in set(names) - set(sys.stdlib_module_names) if name in known and not declared & known[name]}


def unused(names: Iterable[str], requirements: list[str]) -> set[str]:
    """The required packages that are not imported; of what nobody has installed, the imported names are not known."""
    needed = (Requirement(text) for text in requirements)
    used = {package for name in names for package in distributions().get(name, ())}
    there = {package for packages in distributions().values() for package in packages}
    return {canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate()} & there - used


def test_what_is_imported_is_required() -> None:
    """Otherwise it is installed only as long as another package requires it. What only developers install does not count."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for name in extras if name not in ("dev", "docs") for each in extras[name])]
    names = [name for room in PACKAGE for name in imported(room)]
    assert undeclared(names, wanted) <= {"replaylens", "datasets", "peft"}, "whoever gives one has it"
    without = [text for text in wanted if not text.startswith("huggingface-hub")]
    assert "huggingface_hub" in undeclared(names, without), "the control"


def test_what_is_required_is_imported() -> None:
    """The package imports what it depends on. An extra may also name a tool that is run, or a plugin."""
    project = pyproject()["project"]
    own = [name for room in PACKAGE for name in imported(room)]
    assert unused(own, project["dependencies"]) == set()
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    names = [*own, *(name for room in ("tests", "notebooks", "docs") for name in imported(room))]
    tools = {"ruff", "pytest-xdist", "jupyterlab", "ipykernel", "mkdocs-material"} | {"ipywidgets"}  # the last: tqdm's bars
    assert unused(names, extras) == tools
    assert unused(own, ["numpy>=2", "pytest>=8", "triton; platform_system == 'Nowhere'"]) == {"pytest"}, "the control"


def test_torch_and_its_triton_are_pinned() -> None:
    """The bits depend on this pair. The Makefile installs the same torch."""
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")
    named = re.findall(r"torch==([\w.]+)", (ROOT / "Makefile").read_text())
    assert set(named) == {"2.13.0"}


def test_version_is_told_once() -> None:
    """pyproject and the package state the same version."""
    import replaylens

    assert pyproject()["project"]["version"] == replaylens.__version__


def told(readme: str, project: str, citation: str) -> set[str]:
    """Where README, pyproject and CITATION say that the project is published; empty where one says nothing."""
    clones = re.findall(r"git clone (\S+)", readme)
    urls = tomllib.loads(project)["project"].get("urls", {})
    return {*(clones or [""]), urls.get("Repository", ""), *(re.findall(r"^repository-code: (\S+)$", citation, re.M) or [""])}


def test_where_the_project_is_published_is_told_once() -> None:
    """And the first command of the README works as typed in the folder that one has."""
    import replaylens as rl

    readme, project, citation = ((ROOT / name).read_text() for name in ("README.md", "pyproject.toml", "CITATION.cff"))
    assert told(readme, project, citation) == {rl.PUBLISHED}
    first = re.findall(r"^```sh\n(?:git clone .*\n)?(.*)", readme, re.MULTILINE)[0]
    assert re.match(r"make (\w+)", first)[1] in re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)  # type: ignore[index]
    texts = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    assert [path.name for path, text in texts.items() if re.search(r"git clone (?:URL|<|\.\.\.)", text)] == []


def test_where_it_is_published_control() -> None:
    """Negative control: one of the three that says something else, or nothing, is found."""
    here, project = "https://example.org/r", '[project.urls]\nRepository = "https://example.org/r"\n'
    citation = f"repository-code: {here}\n"
    assert told(f"git clone {here}", "[project]\n" + project, citation) == {here}
    assert (
        told("make demo", "[project]\n" + project, citation) == {here, ""} == told(f"git clone {here}", "[project]\n", citation)
    )


def test_all_errors_are_found_in_one_light_module() -> None:
    """`import replaylens.errors` has the classes themselves, is `rl.errors`, and loads neither torch nor pandas."""
    code = """
import sys
import replaylens.errors as errors
import replaylens as rl
assert rl.errors is errors and not {"torch", "numpy", "pandas"} & set(sys.modules)
from replaylens.engine.errors import BadRequest, BadRequest
from replaylens.probes.errors import OneClass, Caveat
from replaylens.tasks.errors import UnknownTask
for kind in (BadRequest, BadRequest, OneClass, Caveat, UnknownTask):
    assert getattr(errors, kind.__name__) is kind and kind.__name__ in errors.__all__
assert "Iterable" not in errors.__all__
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "src")


def test_old_names_of_errors() -> None:
    """Renamed errors keep their old names for one version."""
    from replaylens import errors

    assert errors.OtherModel is errors.ModelMismatch and errors.EngineBug is errors.InternalError
    assert errors.OtherPlan is errors.PlanMismatch and errors.OtherSweep is errors.PlanMismatch
    assert errors.OtherFingerprint is errors.FingerprintMismatch


def test_errors_are_defined_in_the_modules_of_errors() -> None:
    """An error or warning that is defined elsewhere would be missing from `rl.errors`."""
    from replaylens import errors

    known, strange = set(errors.__all__) | {"Exception", "Warning", "UserWarning"}, []
    for path in (p for room in ("engine", "probes", "tasks") for p in (ROOT / room).rglob("*.py") if p.name != "errors.py"):
        strange += [f"{path.name}: {name}" for name, bases in read(path.read_text()).classes.items() if bases & known]
    assert strange == ["registry.py: PluginWarning"], "the one that a filter names by its module"


# Make and CI


def make_targets(text: str) -> set[str]:
    """The plain targets with a rule."""
    return {m[1] for line in text.splitlines() if (m := re.match(r"([a-z][\w-]*)\s*:(?!=)", line))}


def test_makefile_has_its_targets() -> None:
    """Every promised target has a rule, and all are phony, so make never treats a folder as an up-to-date target."""
    text = (ROOT / "Makefile").read_text()
    assert make_targets(text) >= TARGETS
    phony = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert phony and set(phony[1].split()) >= TARGETS
    assert make_targets("a: b\n\tc\nB := 3\nd-e:\n") == {"a", "d-e"}


def test_make_test_lints_types_and_tests() -> None:
    """`make -n test` runs ruff, the type checker and pytest on any machine."""
    plan = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(word in plan for word in ("ruff check", "ruff format --check", "mypy", "pytest"))


def test_ci_runs_make_test() -> None:
    """CI installs a browser and then runs what a user runs. The script is executable and stops at the first error."""
    script = ROOT / ".ci" / "run"
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', ".ci/browser", "exec make test"]
    assert script.stat().st_mode & 0o111 and (ROOT / ".ci" / "browser").stat().st_mode & 0o111


MACHINES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "a browser": ({"chromium": "", "apt-get": "", "id": "echo 0"}, [], ""),
    "root": ({"apt-get": "", "id": "echo 0"}, ["-qq update", "-qq -y --no-install-recommends install chromium"], ""),
    "sudo": (
        {"apt-get": "", "id": "echo 1000", "sudo": 'shift; "$@"'},
        ["-qq update", "-qq -y --no-install-recommends install chromium"],
        "",
    ),
    "sudo that asks": ({"apt-get": "", "id": "echo 1000", "sudo": "exit 1"}, [], "apt-get needs root or passwordless sudo"),
    "a plain user": ({"apt-get": "", "id": "echo 1000"}, [], "apt-get needs root or passwordless sudo"),
    "no apt-get": ({"id": "echo 0"}, [], "this machine has no apt-get"),
    "no network": ({"apt-get": "exit 100", "id": "echo 0"}, ["-qq update"], "apt-get update failed"),
}
"""the programs on a machine, the calls of apt-get, and why no browser is installed"""


@pytest.mark.parametrize("machine", MACHINES)
def test_ci_installs_a_browser_where_it_can(machine: str, tmp_path: Path) -> None:
    programs, asked, reason = MACHINES[machine]
    log = tmp_path / "asked"
    for name, body in ({"timeout": 'shift; "$@"', "true": ""} | programs).items():
        note = f'echo "$@" >> {log}\n' if name == "apt-get" else ""
        (tmp_path / name).write_text(f"#!/bin/bash\n{note}{body}\n")
        (tmp_path / name).chmod(0o755)
    command = ["/bin/bash", str(ROOT / ".ci" / "browser")]
    ran = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert (log.read_text().splitlines() if log.exists() else []) == asked
    assert f"No browser installed: {reason}." in ran.stdout if reason else ran.stdout == ""
    assert ran.stderr == ""


# What must not be in the files


def tracked() -> list[Path]:
    """The repository's files, without links and binaries."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return [f for f in files if f.is_file() and not f.is_symlink() and b"\0" not in f.read_bytes()[:4096]]


HOSTS = [".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))]
INDEX = re.compile("|".join([*map(re.escape, HOSTS), "--(extra-)?index" + "-url", "--find" + "-links", "--trusted" + "-host"]))
"""package indexes by name or option, assembled here so that this file does not contain one"""


def test_no_package_index_is_named() -> None:
    """The user chooses the package index, so no file names one."""
    wrong = {str(f.relative_to(ROOT)): m[0] for f in tracked() if (m := INDEX.search(f.read_text(errors="replace")))}
    assert wrong == {}


def test_index_control() -> None:
    """Negative control: the pattern finds an address and an option."""
    for planted in ("https://" + HOSTS[0] + "/simple", "files." + HOSTS[1], "pip install --index" + "-url x y"):
        assert INDEX.search(planted)
    assert not INDEX.search("pip install -c constraints.txt torch==2.13.0")


# Names


def type_names(source: str) -> set[str]:
    """The classes of a module at any level, and its type aliases."""
    return {*read(source).classes, *read(source).aliases}


def named_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Type names that several modules define, with their modules."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in type_names(source):
            homes.setdefault(name, []).append(module)
    return {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}


def test_every_type_has_a_name_of_its_own() -> None:
    """A name means one class or alias in the whole package, so messages and pages can use it alone."""
    folders = ("engine", "kernels", "probes", "tasks", "src/replaylens")
    files = [f for f in tracked() if f.suffix == ".py" and str(f.relative_to(ROOT)).startswith(tuple(f"{n}/" for n in folders))]
    assert len(files) > 150
    assert named_twice({str(f.relative_to(ROOT)): f.read_text() for f in files}) == {}


def test_names_control() -> None:
    """Negative control: a class, a class in a function and an alias are found. Constants and functions are not."""
    planted = {
        "a.py": "class One: ...\nTwo = dict[str, int]\nLIMIT = 3\n_P = 1\ndef make(): ...",
        "b.py": "def f():\n    class One: ...\nLIMIT = 4\n_P = 2\ndef make(): ...",
        "c.py": "Two: TypeAlias = list[int]\nthree = 3",
    }
    assert named_twice(planted) == {"One": ["a.py", "b.py"], "Two": ["a.py", "c.py"]}


# Texts


def without_encoding(source: str) -> list[str]:
    """Calls that read or write a text as the locale says: `read_text`, `write_text` and `open` without an encoding."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _text_file(node)]
    return [ast.unparse(call) for call in calls if "encoding" not in {each.arg for each in call.keywords}]


def _text_file(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in ("read_text", "write_text")
    modes = [each.value for each in call.args[1:2] if isinstance(each, ast.Constant)]
    return isinstance(call.func, ast.Name) and call.func.id == "open" and not any("b" in str(mode) for mode in modes)


def test_texts_are_utf_8_in_every_locale() -> None:
    files = (file for room in PACKAGE for file in (ROOT / room).rglob("*.py"))
    wrong = {
        file.name: bad
        for file in files
        if "open(" in (text := file.read_text()) or "_text(" in text
        if (bad := without_encoding(text))
    }
    assert wrong == {}
    planted = ["p.read_text()", "p.write_text('x')", "open(p)", "open(p, 'w')"]
    right = ["open(p, 'rb')", "p.read_text(encoding='utf-8')", "open(p, encoding='utf-8')", "Dump.open(p)"]
    assert without_encoding("\n".join([*planted, *right])) == planted, "the control"


# Skips


def skips(source: str) -> Iterator[str]:
    """The tests of a module that may be skipped, by a mark (also under another name) or a call."""
    marks = {"skip", "skipif", "xfail", "importorskip"}
    if not re.search(rf"\.({'|'.join(marks)})\b|\bimport\b.*\b(mark|{'|'.join(marks)})\b", source):
        return  # parsing all tests takes seconds
    tree = ast.parse(source)
    marks |= {  # fetched = pytest.mark.skipif(...)
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and marks & _names(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "pytestmark" in marks or any(isinstance(n, ast.Expr) and marks & _names(n) for n in tree.body):
        yield "*"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and marks & _names(node):
            yield node.name


def _names(node: ast.AST) -> set[str]:
    """Every name and attribute under a node."""
    return {n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Name)}


def unlisted(file: str, source: str, quarantines: str) -> list[str]:
    """The skips of a file without a line in the quarantine table. A line names `file::test`."""
    return [name for name in skips(source) if f"{file}::{name}" not in quarantines]


def test_every_skip_has_its_line() -> None:
    """Every skipped test has a line in QUARANTINES.md that says when and why."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    text = QUARANTINES.read_text()
    wrong = {name: bad for f in files if (bad := unlisted(name := str(f.relative_to(ROOT / "tests")), f.read_text(), text))}
    assert wrong == {}


def test_quarantine_lines_are_about_tests_that_exist() -> None:
    """Every line names an existing test and has a condition and a reason."""
    of_file = cache(lambda file: set(skips((ROOT / "tests" / file).read_text())))
    for line in QUARANTINES.read_text().splitlines():
        if line.startswith("| `"):
            test, when, why = (cell.strip() for cell in line.strip("|").split("|"))
            file, _, name = test.strip("`").partition("::")
            assert when and why and (ROOT / "tests" / file).is_file(), line
            assert name in of_file(file), line


PLANTED = {
    "mark": "@pytest.mark.skip(reason='x')\ndef test_a(): ...",
    "condition": "@pytest.mark.skipif(True, reason='x')\ndef test_a(): ...",
    "expected failure": "@pytest.mark.xfail\ndef test_a(): ...",
    "call": "def test_a():\n    pytest.skip('x')",
    "missing package": "def test_a():\n    x = pytest.importorskip('x')",
    "by another name": "gone = pytest.mark.skipif(True, reason='x')\n@gone\ndef test_a(): ...",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_skip_control(plant: str) -> None:
    """Negative control: each way to skip is found, and accepted once it has a line."""
    assert unlisted("test_x.py", PLANTED[plant], "") == ["test_a"]
    assert unlisted("test_x.py", PLANTED[plant], "| `test_x.py::test_a` | never | no reason |") == []
    assert unlisted("test_x.py", "def test_a(): assert 1", "") == []


def test_skip_of_a_whole_module_control() -> None:
    """A module-wide mark or importorskip applies to the whole module."""
    assert unlisted("test_x.py", "pytestmark = pytest.mark.skipif(True, reason='x')", "") == ["*"]
    assert unlisted("test_x.py", "pytest.importorskip('x')\ndef test_a(): ...", "") == ["*"]
