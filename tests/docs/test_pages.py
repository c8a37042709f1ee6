"""Every shell line and Python block of README and docs runs as written, and every link has a target."""

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import replaylens as rl
from replaylens.cli import main
from replaylens.commands import training
from replaylens.dumps.reader import Dump
from replaylens.engine.model.sites import GLOBAL_SITES, layer_sites
from replaylens.extend.checks import views
from replaylens.probes import forks
from replaylens.probes.registry import ESTIMATORS
from replaylens.probes.settings import SweepSettings
from replaylens.tasks import registry
from replaylens.weights import hub
from replaylens.weights.families import FAMILIES
from tests.docs.blocks import NOTES, PAGES, ROOT, Block, anchors, blocks, links
from tests.docs.pages import FEWEST_PERMUTATIONS, GIVEN, NOT_RUN, PROCESS, SMALLER

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in [*PAGES, *NOTES]}
RUN = [page for page in PAGES if any(b.language in ("sh", "python") for b in blocks(page, TEXTS[page]))]
LONG = ("docs/workbench.md", "docs/branches.md", "docs/models.md", "docs/probes.md", "docs/extending.md", "docs/tasks.md")
"""pages whose examples take more than four seconds: `make slow` runs them"""


def smaller(text: str) -> str:
    for given, instead in SMALLER.items():
        text = text.replace(given, instead)
    return text


def reason(page: str, text: str) -> str | None:
    """Why a line or block is not run, or None if it is."""
    return next((why for start, why in NOT_RUN.get(page, {}).items() if text.startswith(start)), None)


def run_line(line: str, patch: pytest.MonkeyPatch) -> None:
    """Run one shell line, in this process to load torch only once. Only our own command is supported."""
    words = shlex.split(line, comments=True)
    with patch.context() as here:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            here.setenv(*words.pop(0).split("=", 1))
        if not words:
            return
        assert words[0] == "replaylens", f"not run and not listed in tests/docs/pages.py: {line}"
        here.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"exit code {ended.value.code}: {line}"


def run_python(block: Block, names: dict[str, Any]) -> None:
    where = f"{block.page}:{block.line}"
    variables = next((env for start, env in PROCESS.get(block.page, {}).items() if block.text.startswith(start)), None)
    if variables is None:
        exec(compile("\n" * (block.line - 1) + smaller(block.text), where, "exec"), names)
        return
    Path("snippet.py").write_text(block.text)
    if variables.items() <= os.environ.items():  # this process has been started with them: Triton needs the source's file, too
        runpy.run_path("snippet.py", run_name="snippet")
        return
    done = subprocess.run([sys.executable, "snippet.py"], capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, f"{where}: {done.stderr}"


@pytest.fixture(autouse=True)
def _own_estimators() -> Iterator[None]:
    """What a page adds to the estimators is gone after it."""
    held = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(held)


def run_page(page: str, text: str, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Run a page's lines and blocks in order, in one folder and one namespace. Returns how many ran.

    A block that is a file is written there, and later blocks can import it. Tasks are registered for this page only.
    """
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    patch.setattr(registry, "_REGISTERED", {})
    patch.setattr(training, "CARD_EXAMPLES", 2)
    defaults = {name: each.default for name, each in inspect.signature(SweepSettings).parameters.items()}
    patch.setattr(SweepSettings.__init__, "__defaults__", tuple({**defaults, "permutations": FEWEST_PERMUTATIONS}.values()))
    names: dict[str, Any] = {}
    exec(compile(GIVEN.get(page, ""), f"given for {page}", "exec"), names)
    for name in [name for name, value in names.items() if isinstance(value, ModuleType)]:
        del names[name]  # what is given are objects and files: a page imports what its snippets use
    ran = 0
    for block in blocks(page, text):
        if block.file is not None:
            Path(block.file).write_text(smaller(block.text))
            patch.delitem(sys.modules, Path(block.file).stem, raising=False)
        elif block.language == "python" and reason(page, block.text) is None:
            run_python(block, names)
            ran += 1
        for line in block.text.splitlines() if block.language == "sh" else ():
            if line.strip() and reason(page, line) is None:
                run_line(smaller(line), patch)
                ran += 1
    return ran


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in RUN])
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(FAMILIES)
    try:
        ran = run_page(page, TEXTS[page], tmp_path, monkeypatch)
    finally:  # a page adds a family
        FAMILIES.clear()
        FAMILIES.update(known)
    assert ran or page in NOT_RUN


# ---- readme and site ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    if not hub.is_fetched():
        pytest.skip("SmolLM2-135M is not fetched")
    program, shown = (b.text for b in blocks("README.md", TEXTS["README.md"]) if b.language in ("python", "text"))
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_the_readme_is_short_and_runs_in_twelve_lines() -> None:
    program = next(b.text for b in blocks("README.md", TEXTS["README.md"]) if b.language == "python")
    assert TEXTS["README.md"].count("\n") <= 120 and sum(bool(line.strip()) for line in program.splitlines()) == 12


RESOURCE = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|srcset|href)=\"?(?:https?:)?//[^>]*>|@import|url\(\"?https?:"
)


@pytest.mark.slow
def test_the_site_has_all_pages_and_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built as `make docs` does: a link without a target, or a page that is missing in the navigation, is an error."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(config)
    listed = {page for group in config.nav for pages in group.values() for each in pages for page in each.values()}
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} <= listed
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20 and [page.name for page in pages if RESOURCE.search(page.read_text())] == []
    assert RESOURCE.search('<script async src="https://x.org/a.js">') and not RESOURCE.search('<a href="https://x.org">')


# ---- digests ---------------------------------------------------------------------------------------------------------
# Lines of the studies that make a dump end with its digest, which every machine gives.

STUDIES = "".join(TEXTS[page] for page in NOTES)
CITED = re.findall(r"^(replaylens dump .*?--out (\w+)) +# digest (\w+)$", STUDIES, re.M)


def has_digest(line: str, name: str, digest: str, patch: pytest.MonkeyPatch) -> bool:
    """Whether a shell line makes the dump that it cites."""
    run_line(line, patch)
    return Dump.open(name).digest.startswith(digest)


@pytest.mark.slow
@pytest.mark.parametrize("line, name, digest", CITED)
def test_digests_of_results(line: str, name: str, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert has_digest(line, name, digest, monkeypatch)


def test_digests_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a dump of other examples has another digest. Every dump that a study makes cites its own."""
    monkeypatch.chdir(tmp_path)
    line = "replaylens dump --task coin --n 2 --sites S --knob seed={} --quiet --out {}"
    run_line(line.format(0, "a"), monkeypatch)
    digest = Dump.open("a").digest
    assert has_digest(line.format(0, "b"), "b", digest[:8], monkeypatch)
    assert not has_digest(line.format(1, "c"), "c", digest[:8], monkeypatch)
    assert 0 < len(CITED) == STUDIES.count("\nreplaylens dump ")


PLANTED = {
    "a command that fails": "```sh\nreplaylens inspect nowhere\n```\n",
    "an unknown option": "```sh\nreplaylens tasks list --colour\n```\n",
    "a command that is not ours": "```sh\nrm -rf x\n```\n",
    "a snippet that raises": "```python\nimport replaylens as rl\nrl.tasks.get('coinn')\n```\n",
    "a name that the page never made": "```python\nprint(engine)\n```\n",
}


@pytest.mark.parametrize("what", PLANTED)
def test_snippets_control(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a snippet that fails is found."""
    with pytest.raises((AssertionError, NameError, ValueError)):
        run_page("docs/planted.md", PLANTED[what], tmp_path, monkeypatch)


def test_snippets_import_what_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what a page is given hides no missing import."""
    monkeypatch.setitem(GIVEN, "docs/planted.md", "import json\nknown = json.dumps(1)")
    assert run_page("docs/planted.md", "```python\nknown\n```\n", tmp_path, monkeypatch) == 1
    with pytest.raises(NameError, match="json"):
        run_page("docs/planted.md", "```python\njson.dumps(known)\n```\n", tmp_path, monkeypatch)


def test_a_block_can_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run by itself, and the blocks after it import it."""
    page = "```python\n# planted.py\nVALUE = 1 / ({})\n```\n```python\nimport planted\nassert planted.VALUE == 0.5\n```\n"
    assert run_page("docs/planted.md", page.format(2), tmp_path, monkeypatch) == 1
    with pytest.raises(ZeroDivisionError):
        run_page("docs/planted.md", page.format("0 + 0"), tmp_path, monkeypatch)


def test_lists_are_about_something() -> None:
    """Every entry of tests/docs/pages.py matches a snippet, and every omission has a reason."""
    for page, starts in NOT_RUN.items():
        lines = [line for b in blocks(page, TEXTS[page]) for line in (b.text.splitlines() if b.language == "sh" else [b.text])]
        for start, why in starts.items():
            assert why and any(line.startswith(start) for line in lines), f"{page}: {start!r}"
    everything = "".join(b.text for page in RUN for b in blocks(page, TEXTS[page]))
    assert [given for given in SMALLER if given not in everything] == []
    for page, starts in PROCESS.items():
        assert all(any(b.text.startswith(start) for b in blocks(page, TEXTS[page])) for start in starts)


# Links


def broken(page: str, text: str) -> list[str]:
    """Links of a page without a target, including anchors."""
    wrong = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *NOTES])
def test_links(page: str) -> None:
    assert broken(page, TEXTS[page]) == []


def test_links_control() -> None:
    text = "[a](nowhere.md) [b](docs/concepts.md#no-such) [c](docs/concepts.md) [d](#here)\n## Here\n"
    assert broken("planted.md", text) == ["nowhere.md", "docs/concepts.md#no-such", "#here"]


# ---- docstrings ------------------------------------------------------------------------------------------------------
# The examples in the docstrings of public names run and give the output shown.

PUBLIC: dict[str, Any] = {
    "Engine": rl.Engine,
    "Branch": rl.Branch,
    "Run": rl.Run,
    "Dump": rl.Dump,
    "Edit": rl.Edit,
    "Sampling": rl.Sampling,
    "attribution_patching": rl.attribution_patching,
    "tasks.get": rl.tasks.get,
    "probes.sweep": rl.probes.sweep,
    "probes.fit_probe": rl.probes.fit_probe,
    "probes.ProbeRows.of_arrays": rl.probes.ProbeRows.of_arrays,
    "probes.cross_validate": rl.probes.cross_validate,
    "probes.solve": rl.probes.solve,
    "probes.outcome_curve": rl.probes.outcome_curve,
    "probes.importance": rl.probes.importance,
    "probes.change_points": rl.probes.change_points,
    "lens": rl.lens,
    "patch": rl.patch,
    "path_patch": rl.path_patch,
    "ablate": rl.ablate,
    "attention": rl.attention,
}


def failures(name: str, subject: Any, names: dict[str, Any]) -> tuple[int, int, str]:
    """(examples, failures, output) of a docstring, without its methods."""
    said: list[str] = []
    found = doctest.DocTestFinder(recurse=False).find(subject, name, globs=dict(names))
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test, out=said.append)
    return runner.tries, runner.failures, "".join(said)


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = PUBLIC[name]
    tries, failed, said = failures(name, subject, {subject.__name__: subject})
    assert tries and not failed, said


def test_examples_control() -> None:
    """Negative control: an example with the wrong output is found."""

    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    assert failures("wrong", wrong, {})[:2] == (1, 1)


# ---- architecture ----------------------------------------------------------------------------------------------------
# docs/architecture.md matches the code: paths exist, rooms have the import test's order, and names are defined as stated.

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_PATH = re.compile(r"`([a-z_]+/[\w/]*(?:\.\w+)?)`")
_NAME = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)")


def missing_paths(text: str) -> list[str]:
    """Paths in backticks that do not exist."""
    return [path for path in _PATH.findall(text) if not (ROOT / path).exists()]


def rooms() -> Iterator[str]:
    """Sub-packages and files of the engine, and sub-packages of `src/replaylens`, spelled as on the page."""
    for entry in sorted([*(ROOT / "engine").iterdir(), *(ROOT / "src" / "replaylens").iterdir()]):
        if entry.is_dir() and not entry.is_symlink() and (entry / "__init__.py").exists():
            yield f"{entry.relative_to(ROOT)}/"
        elif entry.suffix == ".py" and entry.parent.name == "engine" and entry.name != "__init__.py":
            yield f"engine/{entry.name}"


def undefined(text: str) -> list[str]:
    """Names given as `Class.method` (`file`) that are not fully defined in that file."""
    wrong = []
    for name, path in _NAME.findall(text):
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        if not all(re.search(rf"^\s*(?:def|class) {word}\b", source, re.MULTILINE) for word in name.split(".")):
            wrong.append(f"{name} ({path})")
    return wrong


def test_paths_exist() -> None:
    assert _PATH.findall(PAGE) and missing_paths(PAGE) == []


def test_every_room_has_a_line() -> None:
    lines = {line.split("|")[1].strip().strip("`") for line in PAGE.splitlines() if line.startswith(("| `engine/", "| `src/"))}
    files = {f"src/replaylens/{name}.py" for name in ("boundary", "errors", "moved")}
    assert lines == set(rooms()) | files


def test_names_are_defined_where_the_page_says() -> None:
    assert len(_NAME.findall(PAGE)) > 20 and undefined(PAGE) == []


def test_control() -> None:
    """Negative control: a missing path, class or method is found."""
    text = "`engine/loop/nothing.py`, `Loop.step` (`engine/loop/loop.py`), `Loop.leap` (`engine/loop/loop.py`)"
    assert missing_paths(text) == ["engine/loop/nothing.py"]
    assert undefined(text) == ["Loop.leap (engine/loop/loop.py)"]


# ---- decided ---------------------------------------------------------------------------------------------------------
# `docs/examples/decided.py`: its parts, and that the page says what its result files do.

ROOT_OF_DECIDED = Path(__file__).parents[2]
PAGE_OF_DECIDED = (ROOT_OF_DECIDED / "docs" / "notes" / "decided.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decided_script", ROOT_OF_DECIDED / "docs" / "examples" / "decided.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decided_script"] = module
    spec.loader.exec_module(module)
    return module


def result(model: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((ROOT_OF_DECIDED / "bench" / "results" / f"decided-{model}.json").read_text())
    return found


@pytest.mark.parametrize("model", ["coin-plain", "smollm2"])
def test_the_page_has_the_shares_of_the_result_files(model: str, script: ModuleType) -> None:
    lines = script.tables(result(model)).splitlines()
    rows = [line.split("|", 2)[2].strip() for line in lines if line.startswith("| sentence")]
    assert rows and all(row in PAGE_OF_DECIDED for row in rows), rows


def test_the_page_has_the_change_points() -> None:
    for text in result("coin-plain")["tokens"]["texts"]:  # type: ignore[index]
        (change,) = text["changes"]
        assert change["text"] == " Is" and f"[{change['low']}, {change['high']}], size {change['size']:.2f}" in PAGE_OF_DECIDED


def test_a_false_sentence_differs_in_its_face_only(script: ModuleType) -> None:
    assert script.false_of(" Irene flips: heads.") == " Irene flips: tails."
    assert script._face("A coin is tails up. Al flips the coin. Bo does not flip the coin.") == "heads"


def test_forks_of_one_chain(script: ModuleType) -> None:
    """Before each sentence, and after each false step: states, outcomes, and what was said last."""
    engine, examples = rl.Engine.load("coin-plain"), script.coin("steps", 2, 2, seed=4)
    forks = script.steps_forks(engine, examples[:1], "", (1, 2), script.FINAL, 2, 30)
    assert forks.false == [False] * 3 + [True] * 2 and forks.sentence == [0, 1, 2, 0, 1]
    assert forks.right[:3] == [1.0, 1.0, 1.0], "the model makes no mistakes of its own"
    assert forks.stated[0] == "" and forks.stated[3] == script.OTHER[forks.stated[1]]
    assert all(rows.shape == (2, engine.config.d_model) for rows in forks.states)


# ---- everyday jobs ---------------------------------------------------------------------------------------------------
# The jobs of docs/quickstart.md.

JOBS = TEXTS["docs/quickstart.md"].split("\n## ")[2]


@pytest.mark.slow
def test_the_jobs_run_on_the_real_model() -> None:
    if not hub.is_fetched():
        pytest.skip("SmolLM2-135M is not fetched")
    names: dict[str, Any] = {}
    for block in blocks("docs/quickstart.md", JOBS):
        if block.language == "python":
            exec(compile(block.text, f"docs/quickstart.md, jobs:{block.line}", "exec"), names)
    outcomes = names["rollouts"].outcomes()
    assert outcomes.outcomes[outcomes.counts[0].argmax()] == "fruit" and len(names["ablated"].frame) == 270


# ---- names ---------------------------------------------------------------------------------------------------------------


def listed() -> list[str]:
    """The lines of the tables of sites: what the registry of sites says, each name once."""
    found = [f"| `{name}` | {shape} | `{alias}` |" for name, (shape, alias) in GLOBAL_SITES.items() if alias]
    found += [f"| `{name}` | {shape} | |" for name, (shape, alias) in GLOBAL_SITES.items() if not alias]
    for name, (shape, alias) in ({**layer_sites(False, False), **layer_sites(True, True)}).items():
        found.append(
            f"| `{name}` | {shape} | {', '.join(f'`{each}`' for each in (alias or '').split())} |".replace("|  |", "| |")
        )
    return [line.replace("| one |", "| 1 |") for line in found]


def test_every_site_and_view_has_its_name_on_a_page() -> None:
    """Sites by the registry, those of a model with every kind of layer among them; results by their classes."""
    page = TEXTS["docs/concepts.md"].partition("## Names of sites and results")[2]
    rows = [line for line in page.splitlines() if line.startswith("| `") and "hook_" in line]
    assert sorted(rows) == sorted(listed()), "\n".join(listed())
    engine = rl.Engine.load("coin-plain")
    named = {line.split("`")[1] for line in rows}
    assert {re.sub(r"^blocks\.\d+\.", "", name) for name in engine.sites.in_order()} <= named and len(named) > 50
    for module in pkgutil.iter_modules(forks.__path__):
        importlib.import_module(f"{forks.__name__}.{module.name}")
    said = set(re.findall(r"`(\w+)`", page.rpartition("|")[2]))
    own = {name for name, view in views().items() if view.__module__.startswith("replaylens.")}
    assert said == own, sorted(own)
