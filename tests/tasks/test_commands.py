"""`replaylens tasks list` and `replaylens tasks show`."""

import json
import re

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app

runner = CliRunner()


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["tasks", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def test_list_names_every_task_and_knob() -> None:
    output = run("list")
    for name in tasks.names():
        assert name in output
    assert "number of actors" in output and "1,8" in output


def test_labels_stand_under_their_tokens() -> None:
    output = run("show", "coin", "--n", "1", "--knob", "flips=1", "--knob", "p=1", "--labels", "face,parity")
    lines = output.splitlines()
    tokens, faces = lines[1], lines[2]
    start = "heads" if "heads" in tokens else "tails"
    after = {"heads": "tails", "tails": "heads"}[start]
    assert faces[tokens.index(start) :].startswith(start)
    assert faces[tokens.index("flips") :].startswith(after)
    assert max(map(len, lines)) <= 100


def test_every_task_can_be_shown() -> None:
    for name in tasks.names():
        assert f"{name} 1" in run("show", name, "--n", "2", "--labels", "all")


def test_json() -> None:
    shown = json.loads(run("show", "coin", "--n", "2", "--knob", "rendering=wei", "--knob", "flips=2,3", "--json"))
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
    output = run("show", *arguments, code=2)
    assert message in output and re.match("[A-Z][A-Za-z]+: ", output) and output.count("\n") == 1
