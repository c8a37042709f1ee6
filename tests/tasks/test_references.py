"""`--task` with module:Class and file.py:Class, in every command that takes a task or a dump."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.commands.train import Changes, changed_thinking
from replaylens.engine.training import embedded_thinking as thinking_zoo
from tests.tasks.square import own_registry, write_files

COIN = "replaylens.tasks.coin:Coin"
OWN_COIN = """
from replaylens.tasks.coin import Coin

class OwnCoin(Coin):
    name = "own-coin"
"""


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_registry():
        yield


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
    "probe": ["--sites", "S", "--layers", "3", "--positions", "query", "--estimators", "ridge", "--quiet"],
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
