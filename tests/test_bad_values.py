"""Public calls and command lines with values that nobody should give, drawn by a seed: only named errors come out, and commands
end with the exit codes of the quickstart, without a traceback."""

import inspect
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import replaylens as rl
from replaylens import boundary, probes, tasks
from replaylens.cli import app
from replaylens.engine.errors import BadRequest, EngineError, UnknownOption
from replaylens.engine.request.values import explained, fits, in_words
from replaylens.probes.forks.importance import importance
from replaylens.tasks.errors import TaskError

NAMED = (EngineError, TaskError)
TEXT = "A coin's state is heads. Alice flips. What's the state? A:"

# Calls

BAD: tuple[Any, ...] = (
    *(None, True, -1, 0, 5, 10**30, 1.5, math.nan, math.inf, "", "x", b"x", "\0", "é" * 300),
    *([], {}, set(), [None], [1.5], ["x"], [[]], {"x": None}, object(), len, np.array(math.nan), np.zeros(0)),
    *(np.array(["x"]), slice(1.5, 3), range(3), "/nowhere/at/all", "/proc/x", Path("/proc/x/y")),
)
"""what is given in the place of an argument"""
LEFT_OUT = {"release", "add", "count", "index", "write", "outcomes", "path_offsets", "sweep", "find_direction"}
"""what ends or changes what other calls need, what belongs to Python's lists or is for tasks alone, and what takes seconds"""
SECONDS = 120


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values that calls take, by the names of their parameters."""
    folder = tmp_path_factory.mktemp("pool")
    engine = rl.Engine.load("coin-plain", record=True)
    branch = engine.prompt(TEXT, sites="S")
    run = engine.replay(tasks.get("coin")(flips=(1, 3)).examples(12), sites="S")
    rollouts = branch.resample(6, max_new=2, answer=rl.Answer.regex("heads|tails"))
    options: dict[str, Any] = {"sites": "S", "layers": [3], "positions": "query", "estimators": "ridge", "folds": 2}
    report = probes.sweep(run, "face", permutations=0, controls=False, **options)
    known = {"clean": TEXT, "corrupt": TEXT.replace("heads", "tails"), "text": TEXT, "prompt": TEXT, "prompts": [TEXT], "n": 2}
    known |= {"metric": (" heads", " tails"), "sites": "S", "site": "S", "layer": 1, "layers": [1], "position": "query"}
    known |= {"engine": engine, "branch": branch, "run": run, "given": run, "rows": probes.ProbeRows.of(run), "report": report}
    known |= {"rollouts": rollouts, "counts": rollouts.outcomes(), "dump": run.save(folder / "dump"), "path": folder / "new"}
    known |= {"label": "face", "task": tasks.get("coin")(), "name": "coin", "estimator": "ridge", "trace": engine.trace}
    known |= {
        "x": np.zeros((6, 2)),
        "y": np.arange(6) % 2,
        "groups": np.arange(6),
        "score": np.arange(6.0),
        "p": np.array([0.5]),
    }
    return known


def public(pool: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of the public modules, and the methods of the objects in the pool."""
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in (rl, probes, tasks) for name in dir(module)}
    for held in ("engine", "branch", "run", "dump", "rollouts", "rows", "report", "counts", "task", "trace"):
        own = (name for name in dir(pool[held]) if not isinstance(getattr(type(pool[held]), name, None), property))
        found |= {f"{held}.{name}": getattr(pool[held], name) for name in own}
    return {
        name: call
        for name, call in found.items()
        if not (last := name.rpartition(".")[2]).startswith("_") and last not in LEFT_OUT
        if callable(call) and not isinstance(call, type) and any(inspect.signature(call).parameters)
    }


def bad_calls(call: Callable[..., Any], pool: dict[str, Any], draw: Random, count: int) -> Iterator[dict[str, Any]]:
    """Options of which one at least is bad; the others that it needs are good where the pool has any."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in inspect.signature(call).parameters.values() if each.kind in kinds]
    for _ in range(count if taken else 0):
        worst = draw.choice(taken).name
        needed = [each.name for each in taken if each.default is each.empty and each.name != worst]
        yield {worst: draw.choice(BAD)} | {name: pool[name] if name in pool else draw.choice(BAD) for name in needed}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A TimeoutError instead of a call that does not end."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def raw_errors(pool: dict[str, Any], draw: Random, count: int, each: int) -> tuple[int, list[str]]:
    """(calls that were made, those that ended in an error without a name of ours)"""
    calls, made, raw = public(pool), 0, []
    for name in draw.sample(sorted(calls), min(count, len(calls))):
        for options in bad_calls(calls[name], pool, draw, each):
            made += 1
            try:
                with at_most(SECONDS):
                    found = calls[name](**options)
                    if inspect.isgenerator(found):
                        next(found, None)
            except NAMED:
                pass
            except Exception as error:
                raw.append(f"{name}({', '.join(f'{k}={v!r:.40}' for k, v in options.items())}): {error!r:.200}")
    return made, raw


@pytest.mark.parametrize(
    ("seed", "count", "each"),
    [(0, 90, 4), *(pytest.param(seed, 1000, 10, marks=pytest.mark.slow) for seed in range(1, 6))],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_raise_named_errors(
    pool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int, each: int
) -> None:
    monkeypatch.chdir(tmp_path)  # a bad path may be a good one here
    made, raw = raw_errors(pool, Random(seed), count, each)
    assert made >= 3 * min(count, 100) and not raw, "\n".join(raw)
    pool["engine"].check_integrity()


def test_the_fuzzer_notices(pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control: without the names, Python's own errors come out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(boundary, "_explained", lambda *given: None)
    assert raw_errors(pool, Random(0), 60, 4)[1]


def test_what_an_annotation_takes() -> None:
    for hint, good, bad in (
        (int, (1, np.int64(2)), (True, 1.5, "1", None)),
        (float, (1, 1.5, np.float32(2)), ("1", None, [1.0])),
        (str | None, ("x", None), (b"x", 1)),
        (list[int], ([1], (2,), np.arange(2), range(2)), ("x", {1: 2}, 5, ["x"], [1, "x"], ["x", 1])),
        (np.ndarray, (np.zeros(2), [1.0], [[1, 2]]), ("x", 5, ["x"], None)),
        (dict[str, int], ({"x": 1},), ([], "x")),
        (Callable[[int], int], (len, lambda x: x), (5, "x")),
        (Path, ("x", Path("x")), (5, b"x")),
        (Any, (1, None, "x"), ()),
    ):
        assert all(fits(value, hint) for value in good) and not any(fits(value, hint) for value in bad), hint
    assert in_words(list[int] | str | None) == ["a list of int", "text", "None"]


def test_only_a_wrong_argument_of_the_callers_is_explained(pool: dict[str, Any]) -> None:
    """An error with right arguments is ours, or that of the caller's own function: it comes out as it is."""
    with pytest.raises(BadRequest, match=r"Invalid counts=5 in importance\(\)\. Give an OutcomeCounts\.") as caught:
        importance(5)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(UnknownOption, match=r"importance\(\): missing a required argument: 'counts'"):
        importance()  # type: ignore[call-arg]
    assert explained(importance, (pool["counts"],), {}, KeyError("ours")) is None
    with pytest.raises(ZeroDivisionError):
        pool["branch"].gradients(lambda logits: 1 / 0)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), type("Own", (Exception,), {})()])
def test_an_error_that_no_argument_causes_comes_out_as_it_is(error: Exception) -> None:
    """Also where an argument is of another kind: a full disk was an invalid argument."""

    def work(call: Callable[[], None], count: int) -> None:
        call()

    def fail(error: Exception) -> Callable[[], None]:
        def raises() -> None:
            raise error

        return raises

    enclosed = boundary._enclosed(work)
    with pytest.raises(type(error)) as found:
        enclosed(fail(error), "x")
    assert found.value is error
    with pytest.raises(BadRequest, match=r"Invalid count='x' in .*work\(\)"):  # control
        enclosed(fail(TypeError()), "x")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: rl.Engine.load("coin-plain", devices=3), "Invalid devices=3"),
        (lambda p: p["branch"].resample(2, replace=5), "Invalid replace=5"),
        (lambda p: tasks.get(5), "Unknown task '5'"),
        (lambda p: tasks.load(None), "Unknown task 'None'"),
        (lambda p: p["task"].examples(1.5), "Bad example index 1.5"),
        (lambda p: p["run"]["a"], "Invalid index='a'"),
        (lambda p: p["rollouts"]["a"], "Invalid index='a'"),
        (lambda p: p["trace"].save("/proc/x/trace.json"), "/proc/x"),
        (lambda p: rl.Trace.load("/nowhere/trace.json"), "Cannot read '/nowhere/trace.json'"),
        (lambda p: probes.change_points(5), "Invalid counts=5 in change_points"),
        (lambda p: probes.outcome_curve(None), "Invalid counts=None in outcome_curve"),
        (lambda p: probes.false_discovery("x"), "Invalid p='x'"),
    ],
)
def test_errors_that_were_raw(pool: dict[str, Any], call: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(NAMED, match=re.escape(said)):
        call(pool)


def test_whole_numbers_of_any_kind_are_counts(pool: dict[str, Any]) -> None:
    assert pool["task"].examples(np.int64(3)) == pool["task"].examples(3) == pool["task"].examples(iter(range(3)))


# Command lines

WORDS = (
    *("", " ", "-1", "0", "1.5", "nan", "inf", "1e400", "x", "é" * 300, "/nowhere/at/all", "/proc/x", "9" * 20, "--", "[]"),
    *("=", "a=b", ",", "1,1", "None", "0/0", "5/3", "100%", "x:y", "/nowhere.py:X", "\udcff", "1:2", "file:///proc/x"),
    *("memory://x", "DUMP"),
)
LINES = {
    "tasks show": "coin --n 1",
    "tasks check": "coin --n 2",
    "inspect": "DUMP",
    "verify": "DUMP --sample 2",
    "diff": "DUMP DUMP",
    "replay": "--n 1 --max-new 2",
    "dump": "--out NEW --n 2 --sites S",
    "resample": "--out NEW --prompt Alice --n 2 --max-new 2",
    "report": "DUMP --out NEW.html --verify 0",
    "probe": "DUMP --label face --sites S --layers 1 --permutations 0 --folds 2 --estimators ridge --no-controls",
    "steer": "DUMP --n 2 --label face --layer 1 --placebos 1",
    "train": "coin-draft --steps 1 --out /proc/x",
    "demo": "--out /proc/x",
    "doctor": "x",
    "warm": "x",
    "fetch": "x",
    "reproduce": "x",
}
"""command -> words that it takes; those of commands that take seconds are refused"""
WORKS = {("train", "--out"), ("demo", "--out"), ("doctor", "model"), ("warm", "model")}
"""where any other value means seconds of work"""


def parameters(command: str) -> list[Any]:
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.get_command(None, word)
    return [
        each for each in found.params if each.name not in ("help", "show", "listed") and (command, each.opts[0]) not in WORKS
    ]


def bad_line(command: str, parameter: Any, value: str, dump: Path, new: Path) -> list[str]:
    """The words of a line on which one parameter has this value."""
    words, option = LINES[command].split(), parameter.opts[0]
    if not option.startswith("--"):
        words[0] = value
    elif getattr(parameter, "is_flag", False):
        words.append(option)
    elif option in words:
        words[words.index(option) + 1] = value
    else:
        words += [option, value]
    return [*command.split(), *(word.replace("DUMP", str(dump)).replace("NEW", str(new)) for word in words)]


@pytest.mark.parametrize(("seed", "each"), [(0, 4), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.filterwarnings("ignore")
def test_command_lines(pool: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, each: int) -> None:
    monkeypatch.chdir(tmp_path)
    draw, dump, wrong = Random(seed), Path(pool["dump"].url), []
    for command in LINES:
        for number in range(each):
            line = bad_line(
                command, draw.choice(parameters(command)), draw.choice(WORDS), dump, tmp_path / f"{command}-{number}"
            )
            with at_most(SECONDS):
                done = CliRunner().invoke(app, line)
            raised = done.exception if not isinstance(done.exception, (SystemExit, *NAMED)) else None  # `main` says named ones
            told = re.match(r"\w*(FileNotFound|Permission|IsADirectory|NotADirectory|OS|Unicode\w*)Error: ", done.stderr)
            if raised is not None or told or done.exit_code not in (0, 1, 2, 3) or "Traceback" in done.stderr:
                wrong.append(f"{line}: {done.exit_code} {raised!r} {done.stderr[:200]}")
    assert not wrong, "\n".join(wrong)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
