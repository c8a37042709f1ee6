"""Type checkers and editors see the public names of `import replaylens as rl`, although they load on first use."""

import ast
import inspect
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jedi
import pytest
from IPython.core.oinspect import _render_signature
from mypy import api

import replaylens as rl
from replaylens.dumps.maker import PlanKeywords, ReplayKeywords, make_plan
from replaylens.engine.request.values import defines, named_options
from replaylens.engine.serving.assembly import EngineKeywords
from replaylens.engine.serving.branch import ResampleKeywords
from replaylens.engine.serving.request import GenerateKeywords, Request
from replaylens.engine.serving.verbs import CaptureKeywords, PromptKeywords
from replaylens.engine.terminal import hidden
from replaylens.extras.cluster import dump_on_cluster
from replaylens.probes.settings import SweepKeywords, SweepSettings
from replaylens.thinking.core import ThinkingEngine
from tests.devices import swept

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
        'keyword argument "drafer"',
    ),
    "a misspelt keyword of a branch": (
        "branch.generate(2, drafer='lens')",
        'keyword argument "drafer" for "generate"',
    ),
    "a misspelt keyword of load": (
        "rl.Engine.load('x', cache_token=8)",
        'keyword argument "cache_token" for "load"',
    ),
    "a misspelt keyword that is passed on": (
        "rl.probes.sweep(rl.Dump.open('x'), fold=3)",
        'keyword argument "fold" for "sweep"',
    ),
    "a wrong type that is passed on": ("branch.stream(2, window='x')", 'Argument "window" to "stream"'),
    "a misspelt keyword of prompt": ("engine.prompt('x', site='S')", 'keyword argument "site"'),
    "a wrong type": ("engine.generate([branch], '2')", 'Argument 2 has incompatible type "str"'),
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


@pytest.mark.slow
def test_correct_code_passes(complaints: list[str]) -> None:
    first_bad = len(GOOD.splitlines()) + 1
    assert [line for line in complaints if int(line.partition(":")[0]) < first_bad] == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_an_error(complaints: list[str], mistake: str) -> None:
    at = len(GOOD.splitlines()) + 1 + list(BAD).index(mistake)
    (said,) = [line for line in complaints if line.startswith(f"{at}:")]
    assert BAD[mistake][1] in said


@pytest.mark.parametrize(
    "typed, offered",
    swept(
        [
            ("rl.", "Engine"),
            ("rl.Engine.lo", "load"),
            ("rl.probes.swe", "sweep"),
            ("rl.tasks.ge", "get"),
            ("rl.errors.BadR", "BadRequest"),
            ("rl.Engine.load('coin-plain', cache_t", "cache_tokens="),
            ("rl.Engine.load('coin-plain').prompt('x', top", "top_k="),
            ("rl.Engine.load('coin-plain').prompt('x').generate(2, dra", "drafter="),
            ("rl.Engine.load('coin-plain').prompt('x').stream_rollouts(2, max", "max_new="),
            ("rl.probes.sweep(rl.Dump.open('x'), fol", "folds="),
        ],
        ("rl.", "Engine"),
        ("rl.probes.swe", "sweep"),
        ("rl.errors.BadR", "BadRequest"),
        ("rl.Engine.load('coin-plain').prompt('x').generate(2, dra", "drafter="),
    ),
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
    top = ast.parse((ROOT / "src/replaylens/__init__.py").read_text())
    assert told(top) == {place if ":" in place else ":".join(place.rsplit(".", 1)) for place in loaded(top).values()}
    for part in ("probes", "tasks"):
        tree = ast.parse((ROOT / part / "__init__.py").read_text())
        assert told(tree) == {f"replaylens.{part}.{place}:{name}" for name, place in loaded(tree).items()}


# Help and completion


def public_calls() -> Iterator[tuple[str, Any]]:
    """The verbs of `rl`, its classes, and their public methods."""
    for name in rl.__all__:
        found = getattr(rl, name)
        if inspect.isclass(found):
            yield name, found
            methods = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))]
            yield from ((f"{name}.{each}", getattr(found, each)) for each in methods)
        elif inspect.isfunction(found):
            yield name, found


def unreadable(call: Any) -> list[str]:
    """The annotations of a signature that a person does not want to read: long, or with the paths of modules."""
    signature = inspect.signature(call)
    given = [*(each.annotation for each in signature.parameters.values()), signature.return_annotation]
    shown = [inspect.formatannotation(each) for each in given if each is not inspect.Signature.empty]
    return [text for text in shown if len(text) > 48 or re.search(r"\b(replaylens|collections|typing|pathlib|numpy)\.", text)]


def test_signatures_can_be_read() -> None:
    assert {name: found for name, call in public_calls() if (found := unreadable(call))} == {}


def test_signatures_control() -> None:
    """Negative control: annotations that are no strings show the paths of modules. IPython prints signatures as they are."""

    def long(given: Sequence[str | int] | rl.Engine) -> None: ...

    assert unreadable(long) and len(list(public_calls())) > 60
    shown = _render_signature(inspect.signature(rl.patch), "patch")
    assert "clean: 'Prompts'" in shown and "metric: 'RowMetric" in shown and "replaylens." not in shown


PASSED_ON: list[tuple[Any, Any, Any]] = [
    (rl.Branch.generate, GenerateKeywords, Request),
    (rl.Engine.stream, GenerateKeywords, Request),
    (rl.Engine.prompt, PromptKeywords, rl.Engine.prompts),
    (rl.Engine.prompts, CaptureKeywords, rl.Engine.capture_spec),
    (ThinkingEngine.prompts, CaptureKeywords, rl.Engine.capture_spec),
    (rl.Engine.load, EngineKeywords, rl.Engine),
    (rl.Branch.stream_rollouts, ResampleKeywords, rl.Branch.resample),
    (dump_on_cluster, PlanKeywords, make_plan),
    (rl.probes.fit_streaming, ReplayKeywords, make_plan),
    (rl.probes.sweep, SweepKeywords, SweepSettings),
]
"""(a call, the options that it passes on, the call or class that defines them)"""


@pytest.mark.parametrize("call, bundle, owner", PASSED_ON)
def test_signatures_list_what_is_passed_on(call: Any, bundle: Any, owner: Any) -> None:
    own, held = inspect.signature(call).parameters, inspect.signature(owner).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in own.values())
    assert [(name, own[name].default) for name in bundle.__annotations__] == [
        (name, held[name].default) for name in bundle.__annotations__
    ]


@pytest.mark.parametrize("call", [make_plan, dump_on_cluster, rl.probes.fit_streaming, rl.probes.sweep])
def test_a_misspelt_option_is_named(call: Any) -> None:
    with pytest.raises(rl.errors.UnknownOption, match=r"has no option 'sits' \(did you mean 'sites'\?\)"):
        call(sits="S")


def test_options_without_an_owner_control() -> None:
    """Negative control: an owner that lacks an option, and options that nothing defines, fail when the module is loaded."""

    def other(self: Any, **options: int) -> None: ...

    with pytest.raises(AssertionError, match="does not take all of GenerateKeywords"):
        defines(GenerateKeywords)(lambda drafter="self", window=None: None)
    with pytest.raises(KeyError, match="int"):
        named_options(other)


def test_completion_shows_what_is_documented() -> None:
    """Every name that completion offers has a docstring or is in the docs; what modules share among them is hidden."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/*.py"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages)
    engine = rl.Engine.load("coin-plain")
    branch = engine.prompt("A coin's state is heads.")
    for one in (engine, branch, engine.replay(["A coin's state is heads."]), branch.resample(1, max_new=1)):
        names = [name for name in dir(one) if not name.startswith("_")]
        kinds = {name: inspect.getattr_static(type(one), name, None) for name in names}
        bare = [name for name in names if not getattr(kinds[name], "__doc__", None) or kinds[name] is None]
        assert {name for name in bare if not re.search(rf"[.`]{name}\b", text)} <= {"certificate", "options", "results"}, one
    assert {"forest", "lock", "loop", "runner", "lenses", "planted", "serve"}.isdisjoint(dir(engine))
    assert {"lane", "lock", "hold", "record"}.isdisjoint(dir(branch))
    assert {"files", "filters"}.isdisjoint(dir(object.__new__(rl.Dump))) and {"prompt", "sites", "config"} < set(dir(engine))
    assert engine.runner and branch.lane, "hidden, not gone"


def test_bars_are_quiet_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for or not, a log gets no bar. On a terminal it is shown, and a notebook draws its own."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    engine = rl.Engine.load("coin-plain")
    prompts = ["A coin's state is heads.", "A coin's state is tails."]
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        engine.replay(prompts, progress=True)
        engine.generate(engine.prompts(prompts), 2, progress=True)
        engine.logits_under(prompts[0], [[]], progress=True)
        assert bool(stream.getvalue()) is shown
        assert hidden(True) is not shown and hidden(False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not hidden(True)
    assert capsys.readouterr() == ("", "")
