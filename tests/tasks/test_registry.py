"""Registration by decorator, entry point and reference to code. Clashes and broken tasks have named errors."""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.tasks import registry as plugins
from replaylens.tasks.coin import Coin
from replaylens.tasks.errors import BadTask, BrokenPlugin, CannotImport, TaskNameTaken, UnknownTask
from replaylens.tasks.task import Knobs
from tests.tasks.square import file_of_page, own_registry, square_module

BUILT_IN = ("coin", "coins", "coin-resets", "shell", "words", "fork", "boxes", "variables", "hops", "counts")


@pytest.fixture(autouse=True)
def registry() -> Iterator[dict[str, Any]]:
    with own_registry() as registered:
        yield registered


@pytest.fixture
def square() -> Any:
    return square_module().Square


_NUMBER = count()


def renamed(task: type, name: str) -> Any:
    """A task class of this name; each call makes another definition."""
    return type(f"Renamed{next(_NUMBER)}", (task,), {"name": name})


# The decorator


def test_a_registered_task_is_known_by_name(square: Any) -> None:
    with pytest.raises(UnknownTask, match=r"Unknown task 'square'\. Known: boxes, .* import the module with its @tasks\.regis"):
        tasks.get("square")
    assert tasks.register(square) is square
    assert tasks.get("square") is square and tasks.names() == (*BUILT_IN, "square")
    tasks.register(square)
    assert tasks.names() == (*BUILT_IN, "square")


def test_a_class_that_is_defined_again_replaces_itself() -> None:
    """As when a notebook's cell runs twice."""
    first, again = square_module().Square, square_module().Square
    assert first is not again
    tasks.register(first)
    assert tasks.register(again) is tasks.get("square") is again


def test_names_are_not_shared(square: Any) -> None:
    tasks.register(square)
    for name, holder in {"square": r"class square_of_the_page:Square", "coin": r"class replaylens\.tasks\.coin:Coin"}.items():
        with pytest.raises(TaskNameTaken, match=rf"Task name '{name}' is taken: .*, and so has {holder}\. .* Rename"):
            tasks.register(renamed(square, name))
    assert tasks.get("coin") is Coin and tasks.get("square") is square


def test_a_built_in_task_may_be_registered_again() -> None:
    assert tasks.register(Coin) is Coin and tasks.names() == BUILT_IN


@dataclass(frozen=True, kw_only=True)
class PlainField(Knobs):
    moves: int = 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Square One"}, "has the name 'Square One'. Use lower-case"),
        ({"name": 3}, "has the name 3"),
        ({"length_knob": "steps"}, "length_knob 'steps', but its knobs are moves, seed"),
        ({"state_label": "corner"}, "names the label 'corner', but its scene has the labels corners, actions"),
        ({"claims": ("corners", "said")}, "names the label 'said'"),
        ({"knobs_class": dict}, "Give a dataclass derived from"),
        ({"knobs_class": PlainField}, "the knob 'moves' is a plain field. Declare it with tasks.knobs.knob"),
    ],
)
def test_incomplete_classes_are_named(square: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadTask) as caught:
        tasks.register(type("Changed", (square,), change))
    assert said in str(caught.value) and "square" not in tasks.names()


def test_missing_parts_are_named(square: Any) -> None:
    bare = type("Bare", (tasks.Task,), {"name": "bare"})
    with pytest.raises(BadTask, match="Bare has no 'description'"):
        tasks.register(bare)
    declared = {name: getattr(square, name) for name in ("name", "description", "knobs_class", "length_knob")}
    half = type("Half", (tasks.Task,), {**declared, "state_label": "corners", "claims": ("corners", "claimed")})
    with pytest.raises(BadTask, match="Half does not implement answers, next_action_chance, scene, vocabulary, write"):
        tasks.register(half)
    for wrong in (square(), "square", None, int):
        with pytest.raises(BadTask, match="Give a subclass of"):
            tasks.register(wrong)


# Entry points

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one declared task on sys.path."""

    def put(distribution: str, name: str, module: str, code: str, attribute: str = "Square") -> Path:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{name} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setitem(sys.modules, module, None)  # so that the module is forgotten at the end
        monkeypatch.delitem(sys.modules, module)
        return folder

    return put


def test_an_installed_task_is_loaded_on_first_use(install: Install) -> None:
    install("squares", "square", "squares_a", file_of_page("square.py"))
    assert tasks.names() == (*BUILT_IN, "square") and "squares_a" not in sys.modules
    assert tasks.get("square") is sys.modules["squares_a"].Square
    assert tasks.get("square")(moves=2).example(0).text.startswith("The square reads")
    assert tasks.names() == (*BUILT_IN, "square")


def test_commands_know_installed_tasks(install: Install) -> None:
    install("squares", "square", "squares_k", file_of_page("square.py"))
    done = CliRunner().invoke(app, ["tasks", "show", "square", "--n", "1"])
    assert done.exit_code == 0 and "square 0" in done.stdout
    assert "square" in CliRunner().invoke(app, ["tasks", "list"]).stdout


def test_an_installed_task_needs_no_decorator(install: Install) -> None:
    install("squares", "square", "squares_b", file_of_page("square.py").replace("@register\n", ""))
    assert tasks.get("square") is tasks.get("square") is sys.modules["squares_b"].Square


BROKEN = {
    "an import that fails": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "a syntax error": ("def", "SyntaxError"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no such class": ("", "AttributeError"),
    "not a task": ("Square = dict", "Give a subclass of"),
    "a scene that fails": (
        file_of_page("square.py").replace("return SquareScene()", "return 1 / 0").replace("@register\n", ""),
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_task_names_its_distribution(install: Install, what: str) -> None:
    code, said = BROKEN[what]
    install("squares", "square", "squares_c", code)
    with pytest.raises(BrokenPlugin, match=r"Task 'square' of distribution squares 1\.2 cannot be loaded") as caught:
        tasks.get("square")
    assert said in str(caught.value) and "uninstall" in str(caught.value)
    assert tasks.get("coin") is Coin and tasks.names() == (*BUILT_IN, "square"), "others are not affected"


def test_an_entry_point_of_another_name_is_broken(install: Install) -> None:
    install("squares", "cube", "squares_d", file_of_page("square.py"))
    with pytest.raises(BrokenPlugin, match="the class is named 'square', and its entry point 'cube'"):
        tasks.get("cube")


def test_two_distributions_with_one_name(install: Install) -> None:
    install("squares", "square", "squares_e", file_of_page("square.py"))
    install("other", "square", "squares_f", file_of_page("square.py"))
    with pytest.raises(TaskNameTaken, match=r"distribution other 1\.2 has it, and so has distribution squares 1\.2"):
        tasks.get("square")
    assert tasks.get("coin") is Coin


def test_a_registered_class_does_not_take_an_installed_name(install: Install, square: Any) -> None:
    install("squares", "square", "squares_g", file_of_page("square.py"))
    with pytest.raises(TaskNameTaken, match=r"and so has distribution squares 1\.2"):
        tasks.register(square)


def test_a_built_in_task_keeps_its_name(install: Install) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tasks.get("coin") is Coin, "the control: without the plugin there is no warning"
    install("squares", "coin", "squares_h", file_of_page("square.py"))
    with pytest.warns(plugins.PluginWarning, match=r"distribution squares 1\.2 .* The task of replaylens is used"):
        assert tasks.get("coin") is Coin
    assert tasks.names() == BUILT_IN


def test_the_list_shows_broken_tasks_beside_the_others(install: Install) -> None:
    install("squares", "square", "squares_i", "import no_such_module")
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["tasks", "list", *more])
        assert done.exit_code == 0 and "variables" in done.stdout
        assert "BrokenPlugin: Task 'square' of distribution squares 1.2" in " ".join(done.stdout.split())


# References to code


def test_a_file_is_loaded_once_and_registered(tmp_path: Path) -> None:
    (tmp_path / "square.py").write_text(file_of_page("square.py"))
    before = sys.modules.get("square")
    found = tasks.load(f"{tmp_path}/square.py:Square")
    assert tasks.load(f"{tmp_path}/../{tmp_path.name}/square.py:Square") is found is tasks.get("square") is tasks.load("square")
    assert sys.modules.get("square") is before


def test_a_module_and_its_file_are_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squares_j.py").write_text(file_of_page("square.py"))
    monkeypatch.syspath_prepend(tmp_path)
    assert tasks.load("squares_j:Square") is sys.modules["squares_j"].Square
    tasks.load(f"{tmp_path}/squares_j.py:Square")


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_module:Square", r"Cannot import 'no_such_module' .* give no_such_module\.py:Square"),
        ("no/such/file.py:Square", r"Cannot import .* no file no/such/file\.py"),
        ("replaylens.tasks.coin:Square", "has no 'Square'"),
        ("replaylens.tasks.coin:", "Give a name, module:Class or file.py:Class"),
        (":Coin", "Give a name, module:Class or file.py:Class"),
        ("replaylens.tasks.coin:Coin()", "Give a name, module:Class or file.py:Class"),
    ],
)
def test_references_that_lead_nowhere(reference: str, said: str) -> None:
    with pytest.raises(CannotImport, match=said):
        tasks.load(reference)


def test_references_to_other_things() -> None:
    assert tasks.load("coin") is tasks.load("replaylens.tasks.coin:Coin") is Coin
    with pytest.raises(UnknownTask):
        tasks.load("coinn")
    with pytest.raises(BadTask):
        tasks.load("replaylens.tasks.coin:FACES")


def test_a_file_that_fails_can_be_repaired(tmp_path: Path) -> None:
    file = tmp_path / "square.py"
    file.write_text("import no_such_module")
    with pytest.raises(CannotImport, match="no_such_module"):
        tasks.load(f"{file}:Square")
    file.write_text(file_of_page("square.py"))
    assert tasks.load(f"{file}:Square").name == "square"
