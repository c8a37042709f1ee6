"""Registration by decorator, entry point and reference to code. Clashes and broken tasks have named errors."""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.commands import tasks as commands
from replaylens.commands.training import Changes, changed_thinking
from replaylens.tasks import registry as plugins
from replaylens.tasks.coin import Coin
from replaylens.tasks.errors import (
    BadKnob,
    BadTask,
    TaskError,
    UnknownTask,
)
from replaylens.tasks.task import Knobs
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.training import embedded_thinking as thinking_zoo
from tests.tasks.square import file_of_page, own_registry, square_module, write_files

BUILT_IN = tuple(plugins.BUILT_IN)


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
        with pytest.raises(BadTask, match=rf"Task name '{name}' is taken: .*, and so has {holder}\. .* Rename"):
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
        ({"knobs_class": PlainField}, "the knob 'moves' is a plain field. Declare it with tasks.task.knob"),
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
    with pytest.raises(BadTask, match=r"Task 'square' of distribution squares 1\.2 cannot be loaded") as caught:
        tasks.get("square")
    assert said in str(caught.value) and "uninstall" in str(caught.value)
    assert tasks.get("coin") is Coin and tasks.names() == (*BUILT_IN, "square"), "others are not affected"


def test_an_entry_point_of_another_name_is_broken(install: Install) -> None:
    install("squares", "cube", "squares_d", file_of_page("square.py"))
    with pytest.raises(BadTask, match="the class is named 'square', and its entry point 'cube'"):
        tasks.get("cube")


def test_two_distributions_with_one_name(install: Install) -> None:
    install("squares", "square", "squares_e", file_of_page("square.py"))
    install("other", "square", "squares_f", file_of_page("square.py"))
    with pytest.raises(BadTask, match=r"distribution other 1\.2 has it, and so has distribution squares 1\.2"):
        tasks.get("square")
    assert tasks.get("coin") is Coin


def test_a_registered_class_does_not_take_an_installed_name(install: Install, square: Any) -> None:
    install("squares", "square", "squares_g", file_of_page("square.py"))
    with pytest.raises(BadTask, match=r"and so has distribution squares 1\.2"):
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
        assert "BadTask: Task 'square' of distribution squares 1.2" in " ".join(done.stdout.split())


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
        ("no_such_module:Square", r"Cannot import 'no_such_module' .* give no_such_module\.py:NAME"),
        ("no/such/file.py:Square", r"Cannot import .* no file no/such/file\.py"),
        ("replaylens.tasks.coin:Square", "has no 'Square'"),
        ("replaylens.tasks.coin:", "Give a name, module:Class or file.py:Class"),
        (":Coin", "Give a name, module:Class or file.py:Class"),
        ("replaylens.tasks.coin:Coin()", "Give a name, module:Class or file.py:Class"),
    ],
)
def test_references_that_lead_nowhere(reference: str, said: str) -> None:
    with pytest.raises(BadTask, match=said):
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
    with pytest.raises(BadTask, match="no_such_module"):
        tasks.load(f"{file}:Square")
    file.write_text(file_of_page("square.py"))
    assert tasks.load(f"{file}:Square").name == "square"


# ---- references ------------------------------------------------------------------------------------------------------
# `--task` with module:Class and file.py:Class, in every command that takes a task or a dump.

COIN = "replaylens.tasks.coin:Coin"
OWN_COIN = """
from replaylens.tasks.coin import Coin

class OwnCoin(Coin):
    name = "own-coin"
"""


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, a variant of coin that coin-plain can answer, and a dump of it."""
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    (folder / "own_coin.py").write_text(OWN_COIN)
    options = ("--knob", "flips=1,3", "--sites", "S", "--n", "24", "--quiet")
    with own_registry():
        code, _, said = run("dump", "--task", f"{folder}/own_coin.py:OwnCoin", "--out", str(folder / "dump"), *options)
    assert code == 0, said
    return folder


def test_replay_and_show(folder: Path) -> None:
    code, out, said = run("replay", "--task", f"{folder}/own_coin.py:OwnCoin", "--n", "2", "--quiet", "--json")
    assert code == 0 and json.loads(out)["accuracy"] == 1.0, said
    code, out, _ = run("tasks", "show", f"{folder}/own_coin.py:OwnCoin", "--n", "1", "--json")
    assert code == 0 and json.loads(out)[0]["task"] == "own-coin"


COMMANDS = {
    "verify": ["--all", "--quiet"],
    "probe": ["--sites", "S", "--layers", "3", "--positions", "query", "--estimators", "ridge", "--permutations", "0"],
    "steer": ["--layer", "3", "--n", "3", "--placebos", "1"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_dumps(folder: Path, command: str) -> None:
    """The code is needed, must be of the dump's task, and is enough."""
    asked = [command, str(folder / "dump"), *COMMANDS[command]]
    code, _, said = run(*asked)
    assert code == 2 and "UnknownTask: Unknown task 'own-coin'" in said and "--task file.py:Class" in said
    code, _, said = run(*asked, "--task", f"{folder}/square.py:Square")
    assert code == 2 and "is the task 'square', but the dump is of 'own-coin'" in said
    code, _, said = run(*asked, "--task", f"{folder}/own_coin.py:OwnCoin")
    assert code == 0, said


def test_report(folder: Path) -> None:
    asked = ["report", str(folder / "dump"), "--out", str(folder / "page.html"), "--verify", "0.1", "--quiet"]
    assert run(*asked)[0] == 2
    assert run(*asked, "--task", f"{folder}/own_coin.py:OwnCoin")[0] == 0


def test_a_damaged_dump_is_still_named_as_such(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    code, out, said = run("verify", str(tmp_path), "--task", f"{folder}/own_coin.py:OwnCoin", "--quiet")
    assert code == 2 and "manifest" in out + said


def test_ray_finds_tasks_by_name_only(folder: Path, tmp_path: Path) -> None:
    code, _, said = run("dump", "--task", COIN, "--out", str(tmp_path / "dump"), "--workers", "2")
    assert code == 2 and "workers find tasks by name. Install its entry point." in said


def test_models_that_think(folder: Path) -> None:
    recipe = changed_thinking(thinking_zoo.recipe("coin-thinking"), Changes(task=f"{folder}/square.py:Square", longest=2))
    assert [part.task for part in recipe.parts] == ["square"]
    assert recipe.config.vocab_size == 2 + len(tasks.get("square").vocabulary())


# ---- knobs -----------------------------------------------------------------------------------------------------------
# Unknown or impossible knobs raise errors that say what to do.


def test_unknown_task_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UnknownTask, match=r"'cion' \(did you mean 'coin'\?\). Known: boxes, coin, coin-resets, coins"):
        tasks.get("cion")


def test_unknown_knob_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"'flip' of task 'coin' \(did you mean 'flips'\?\). Known: .*seed, start"):
        tasks.get("coin")(flip=3)


def test_every_error_is_a_task_error_and_a_value_error() -> None:
    assert issubclass(TaskError, ValueError)
    assert all(issubclass(kind, TaskError) for kind in (BadKnob, BadTask, UnknownTask))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("coin", {"flips": 0}, "from 1 to"),
        ("coin", {"flips": (5, 2)}, "minimum exceeds the maximum"),
        ("coin", {"flips": (1, 2, 3)}, "pair"),
        ("coin", {"flips": "many"}, "pair"),
        ("coin", {"flips": 2.5}, "pair"),
        ("coin", {"flips": (1, 2.5)}, "Give an integer"),
        ("coin", {"flips": True}, "Give an integer"),
        ("coin", {"p": 1.5}, "probability"),
        ("coin", {"p": -0.1}, "probability"),
        ("coin", {"p": float("nan")}, "probability"),
        ("coin", {"p": "half"}, "probability"),
        ("coin", {"start": "edge"}, "random, heads, tails"),
        ("coin", {"names": "nobody"}, "train, held-out, all"),
        ("coin", {"phrasing": "odd"}, "standard, idle, mixed"),
        ("coin", {"rendering": "poem"}, "picture, states, wei, symbols, steps"),
        ("coin", {"verb": "turn"}, "Only the rendering 'wei'"),
        ("coin", {"verb": "toss", "rendering": "wei"}, "flip, turn"),
        ("coin", {"distractors": -1}, "from 0 to"),
        ("coin", {"distractors": 99}, "from 0 to"),
        ("coin", {"rendering": "symbols", "distractors": 1}, "no sentences"),
        ("coin", {"rendering": "symbols", "phrasing": "idle"}, "no phrasings"),
        ("coin", {"seed": -1}, "at least 0"),
        ("coin", {"seed": "x"}, "Give an integer"),
        ("coins", {"coins": 1}, "from 2 to 6"),
        ("coins", {"coins": 7}, "from 2 to 6"),
        ("coin-resets", {"reset": 2}, "probability"),
        ("shell", {"cups": 4}, "3 or 5"),
        ("shell", {"start": "heads"}, "random, fixed"),
        ("words", {"group": "S4"}, "A5, Z60, A4xZ5"),
        ("words", {"length": 0}, "from 1 to"),
        ("fork", {"depth": 1000}, "from 1 to"),
        ("boxes", {"boxes": 2}, "from 3 to 7"),
        ("boxes", {"boxes": 8}, "from 3 to 7"),
        ("variables", {"variables": 1}, "from 2 to 8"),
        ("variables", {"variables": 9}, "from 2 to 8"),
        ("variables", {"modulus": 1}, "from 2 to 10"),
        ("variables", {"modulus": 11}, "from 2 to 10"),
        ("variables", {"operations": 0}, "from 1 to"),
        ("hops", {"people": 2}, "from 4 to 12"),
        ("hops", {"relations": 5}, "from 2 to 4"),
        ("hops", {"hops": 0}, "from 1 to"),
        ("counts", {"people": 5}, "from 1 to 4"),
        ("counts", {"most": 29}, "from 30 to 99"),
        ("counts", {"change": 1}, "from 2 to 9"),
    ],
)
def test_impossible_knobs(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(BadKnob, match=message):
        tasks.get(name)(**knobs)


def test_knobs_are_frozen_and_one_number_is_a_range() -> None:
    task = tasks.get("coin")(flips=4)
    assert task.knobs.flips == (4, 4)
    assert tasks.get("coin")(flips=[2, 8]).knobs.flips == (2, 8)
    with pytest.raises(AttributeError):
        task.knobs.p = 0.9


def test_with_knobs_changes_only_what_it_is_told() -> None:
    task = tasks.get("coin")(flips=4, p=0.2)
    assert task.with_knobs(p=0.3) == tasks.get("coin")(flips=4, p=0.3)
    assert task == tasks.get("coin")(flips=4, p=0.2)
    with pytest.raises(TaskError, match="'q'"):
        task.with_knobs(q=1)


# ---- commands --------------------------------------------------------------------------------------------------------
# `replaylens tasks list` and `replaylens tasks show`.

runner = CliRunner()


def run_of_commands(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["tasks", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def test_list_names_every_task_and_knob() -> None:
    output = run_of_commands("list")
    for name in tasks.names():
        assert name in output
    assert "number of actors" in output and "1,8" in output


def test_the_list_as_json_has_values_as_they_are() -> None:
    """Defaults as numbers, ranges and words, help and labels, of every task."""
    listed = json.loads(run_of_commands("list", "--json"))
    assert [each["name"] for each in listed] == list(tasks.names())
    for each in listed:
        task = tasks.get(each["name"])
        known = {spec.name: {"default": spec.default, "help": spec.metadata["help"]} for spec in fields(task.knobs_class)}
        assert each["knobs"] == json.loads(json.dumps(known)) and each["labels"] == list(task().label_names)
        assert each["description"] == task.description
    assert listed[0]["knobs"]["flips"]["default"] == [1, 8]


@pytest.mark.parametrize(
    ("widths", "room", "lines"),
    [
        ([3, 3, 3], 9, [(0, 3)]), ([3, 3, 3], 8, [(0, 2), (2, 3)]), ([9, 1, 1], 4, [(0, 1), (1, 3)]), ([1, 9, 1], 4, [(0, 1),
        (1, 2), (2, 3)]),
        ([9], 4, [(0, 1)]), ([2, 2, 2, 2], 4, [(0, 2), (2, 4)]),
    ],
)  # fmt: skip
def test_columns_are_split_into_lines_that_fit(widths: list[int], room: int, lines: list[tuple[int, int]]) -> None:
    """As many as fit, in order; a wider one has a line of its own, and no line is empty."""
    assert list(commands._lines(widths, room)) == lines


def test_shown_tokens_and_labels_are_those_of_the_example() -> None:
    example = tasks.get("coin")(flips=2).example(0)
    tokenizer = WordTokenizer(tasks.get("coin").vocabulary())
    ids, offsets = tokenizer.encode_with_offsets(example.text)
    labels = example.labels_at(offsets, ["face", "flips"])
    shown = [line.plain for line in commands._aligned(example, tokenizer, ["face", "flips"], 40)]
    assert all(len(line) <= 40 for line in shown) and len(shown) % 4 == 0 and set(shown[3::4]) == {""}
    for row, values in ((0, [tokenizer.token(token).strip() for token in ids]), (1, labels["face"]), (2, labels["flips"])):
        found = [word for line in shown[row::4] for word in line[7:].split()]
        assert found == ["-" if value is None else str(value) for value in values]
    starts = [[line.index(word, 7) for word in dict.fromkeys(line[7:].split())] for line in shown[:2]]
    assert starts[1][0] == 7 and shown[1].startswith("face") and starts[0][0] == 7, "a label starts below its token"


def test_labels_stand_under_their_tokens() -> None:
    output = run_of_commands("show", "coin", "--n", "1", "--knob", "flips=1", "--knob", "p=1", "--labels", "face,parity")
    lines = output.splitlines()
    tokens, faces = lines[1], lines[2]
    start = "heads" if "heads" in tokens else "tails"
    after = {"heads": "tails", "tails": "heads"}[start]
    assert faces[tokens.index(start) :].startswith(start)
    assert faces[tokens.index("flips") :].startswith(after)
    assert max(map(len, lines)) <= 100


def test_every_task_can_be_shown() -> None:
    for name in tasks.names():
        assert f"{name} 1" in run_of_commands("show", name, "--n", "2", "--labels", "all")


def test_json() -> None:
    shown = json.loads(run_of_commands("show", "coin", "--n", "2", "--knob", "rendering=wei", "--knob", "flips=2,3", "--json"))
    assert [example["index"] for example in shown] == [0, 1]
    example = tasks.get("coin")(rendering="wei", flips=(2, 3)).example(0)
    assert shown[0]["digest"] == example.digest and "".join(shown[0]["tokens"]) == example.text
    assert all(len(values) == len(shown[0]["tokens"]) for values in shown[0]["labels"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cion"], "Unknown task 'cion' (did you mean 'coin'?)"),
        (["coin", "--knob", "flip=3"], "did you mean 'flips'?"),
        (["coin", "--knob", "p=2"], "Knob 'p' cannot be 2. Give a probability"),
        (["coin", "--knob", "flips=2", "--knob", "flips=3"], "--knob flips is given twice: 2 and 3"),
        (["coin", "--knob", "flips"], "Invalid --knob 'flips'. Give key=value."),
        (["coin", "--labels", "fase"], "did you mean 'face'?"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    output = run_of_commands("show", *arguments, code=2)
    assert message in output and re.match("[A-Z][A-Za-z]+: ", output) and output.count("\n") == 1


# ---- docs ------------------------------------------------------------------------------------------------------------
# docs/tasks.md matches the code: samples parse and are true, and all labels and knobs are listed.

DOC = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return DOC.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", tasks.names())
def test_labels_and_knobs_are_documented(name: str) -> None:
    task = tasks.get(name)()
    for label in task.label_names:
        assert f"`{label.split('.')[0]}" in section(name) or label == "shuffled", label
    for spec in fields(task.knobs_class):
        assert f"`{spec.name}`" in section(name) or spec.name == "seed", spec.name


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "coin"])
def test_samples_are_true(name: str) -> None:
    quoted = [line[2:].strip() for line in section(name).splitlines() if line.startswith("> ")]
    text = " ".join(quoted).replace("\\>", ">")
    reading = tasks.get(name)().read(text)
    labels = reading.labels_after(len(text))
    truth, claim = tasks.get(name).claims
    assert reading.complete and labels[truth] == labels[claim] is not None


def test_coin_renderings_are_those_of_index_3() -> None:
    for line in section("coin").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].strip("`") in ("picture", "states", "wei", "symbols", "steps"):
            example = tasks.get("coin")(rendering=cells[0].strip("`")).example(3)
            assert (cells[1], cells[2]) == (example.prompt, example.completion.strip())
