"""Shell behaviour: completion, version, suggestions, exit codes, quiet and JSON modes, colours."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import replaylens
from replaylens import cli
from replaylens.cli import COMMANDS, app, main
from replaylens.commands import reporting
from replaylens.commands.dump import KEPT
from replaylens.commands.options import FETCHED
from replaylens.commands.report import TREES
from replaylens.commands.reporting import in_shell_words
from replaylens.dumps.plan import KINDS
from replaylens.engine.errors import SlowCluster
from replaylens.engine.request.positions import forms
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.views.page import MAX_TREES
from replaylens.weights import hub
from replaylens.weights.zoo import PLAIN, THINKING
from tests.dumps.damage import edit_manifest

COLOUR = re.compile(r"\x1b\[[\d;]*(3[0-7]|9[0-7]|38;|4[0-7])[\d;]*m")
"""an escape sequence that sets a colour; bold and underline do not count"""


class Shell(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shell]:
    """Run the installed script `replaylens` with these words and variables, in this process to load torch only once."""

    def call(*words: str, **environment: str) -> Shell:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["replaylens", *words])
            with pytest.raises(SystemExit) as ended:
                main()
        return Shell(int(ended.value.code or 0), *capfd.readouterr())

    return call


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


# Loading


def test_every_command_is_there() -> None:
    """The table and the help agree: each name has a line of help. The command behind each is asked for its own help below."""
    code, out, _ = run("--help")
    assert code == 0 and all(re.search(rf"│ {name} +\w", out) for name in COMMANDS)


UNNEEDED = ("torch", "numba", "numpy", "pyarrow", "pandas", "scipy", "sklearn", "matplotlib", "transformers", "asyncio", "tqdm")
HELP = f"""
import contextlib, io, json, sys
from replaylens import cli
found = {{}}
for words in (["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            cli.app(words)
        except SystemExit as ended:
            code = ended.code
    loaded = [name for name in {UNNEEDED} if name in sys.modules]
    found[" ".join(words)] = len(said.getvalue()) if code == 0 else 0, len(sys.modules), loaded
import replaylens.probes.intervals
print(json.dumps([found, [name for name in {UNNEEDED} if name in sys.modules]]))
"""


def test_help_and_version_load_nothing_that_computes() -> None:
    """Half a second instead of the five of torch and numba. No command's module needs them before it runs."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    found, later = json.loads(done.stdout)
    assert all(said for said, _, _ in found.values()) and len(found) == len(COMMANDS) + 2
    assert {name: (count, loaded) for name, (_, count, loaded) in found.items() if loaded or count > 600} == {}
    assert "numpy" in later, "control: what computes loads it"


def test_names_that_help_repeats() -> None:
    """Modules that help does not load say the same."""
    assert forms(KINDS[:-1]) == KEPT and tuple(hub.PACKAGED) == FETCHED and TREES == MAX_TREES
    assert (*zoo.names(), *thinking_zoo.names()) == (*PLAIN, *THINKING)


def test_version() -> None:
    assert run("--version")[:2] == (0, f"{replaylens.__version__}\n")


# Completion


Completed = Callable[[str], list[str]]


@pytest.fixture
def completed(shell: Callable[..., Shell]) -> Completed:
    """Completions that bash offers for a line with the cursor at its end."""

    def offered(line: str) -> list[str]:
        asked = {"_REPLAYLENS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = shell(**asked)
        assert done.code == 0, done.err
        return done.out.split()

    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("replaylens d", ["demo", "doctor", "dump", "diff"]),
        ("replaylens --v", ["--version"]),
        ("replaylens tasks s", ["show"]),
        ("replaylens tasks show coin", ["coin", "coins", "coin-resets"]),
        ("replaylens verify --s", ["--sample", "--seed"]),
        ("replaylens dump --drafter l", ["lens"]),
        ("replaylens dump --model coin-t", ["coin-thinking"]),
        ("replaylens dump --task f", ["fork"]),
        ("replaylens nothing", []),
    ],
)
def test_completion(completed: Completed, line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_completion_script(shell: Callable[..., Shell], kind: str) -> None:
    """The script that a shell sources calls back through our own variable."""
    done = shell(_REPLAYLENS_COMPLETE=f"source_{kind}")
    assert done.code == 0 and "_REPLAYLENS_COMPLETE" in done.out


# Errors that suggest the fix

WRONG = {
    "command": (["dupm"], "Did you mean 'dump'?"),
    "option": (["verify", "x", "--sampel", "1"], "--sample"),
    "task": (["dump", "--out", "OUT", "--task", "coinn"], "did you mean 'coin'?"),
    "task to show": (["tasks", "show", "boxs"], "did you mean 'boxes'?"),
    "knob": (["replay", "--knob", "flipz=2"], "did you mean 'flips'?"),
    "label": (["tasks", "show", "coin", "--labels", "faze"], "did you mean 'face'?"),
    "model": (["dump", "--out", "OUT", "--model", "coin-plian"], "did you mean 'coin-plain'?"),
    "model that does not exist": (["dump", "--out", "OUT", "--model", "/nope/x.gguf"], "/nope/x.gguf does not exist"),
    "model to train": (["train", "coin-drafd"], "did you mean 'coin-draft'?"),
    "model to fetch": (["fetch", "smolm2"], "did you mean 'smollm2'?"),
    "model to examine": (["doctor", "smolm2"], "did you mean 'smollm2'?"),
    "site": (["dump", "--out", "OUT", "--sites", "blocks.0.hook_inn"], "Nearest: blocks.0.hook_in"),
    "drafter": (["dump", "--out", "OUT", "--drafter", "lenz"], "did you mean 'lens'?"),
    "dump": (["inspect", "OUT/nothing"], "does not exist"),
    "knob given twice": (["replay", "--knob", "flips=2", "--knob", "flips=3"], "flips is given twice"),
    "no drafter": (["replay", "--drafter", "none"], "give --window 1"),
    "nobody who drafts": (["replay", "--model", "coin-draft", "--drafter", "model"], "with --draft-model"),
    "Thinking-States model": (["train", "coin-thinkin"], "did you mean 'coin-thinking'?"),
    "no dump": (["probe"], "`replaylens dump` makes one"),
    "device": (["dump", "--out", "OUT", "--device", "tpu"], "Use 'cpu' or 'cuda'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_name_is_answered_with_the_nearest(shell: Callable[..., Shell], what: str, tmp_path: Path) -> None:
    """A misspelt name gives exit code 2, the suggestion on stderr, no traceback, and no output files."""
    words, hint = WRONG[what]
    done = shell(*(word.replace("OUT", str(tmp_path / "out")) for word in words))
    said = " ".join(done.err.replace("│", " ").split())
    assert done.code == 2 and hint in said and "Traceback" not in said
    assert done.out == "" and not (tmp_path / "out").exists()


def test_a_far_name_gets_no_suggestion(shell: Callable[..., Shell]) -> None:
    """Negative control: a name unlike any known one gets only the list."""
    done = shell("train", "gpt-5")
    assert done.code == 2 and "did you mean" not in done.err and "coin-plain" in done.err


def test_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours without the line of code, like errors; those of other libraries as Python shows them."""

    def command(**_: object) -> None:
        warnings.warn("Waiting for a worker: 30 s so far.", SlowCluster, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    monkeypatch.setattr(cli, "app", command)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main()
    first, rest = capsys.readouterr().err.split("\n", 1)
    assert (
        first == "SlowCluster: Waiting for a worker: 30 s so far." and "UserWarning: something else" in rest and ".py:" in rest
    )


# Exit codes, quiet and JSON modes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of four examples."""
    where = tmp_path_factory.mktemp("dumps") / "small"
    code, out, err = run("dump", "--out", str(where), "--n", "4", "--knob", "flips=1,3", "--quiet", "--sites", "SZ")
    assert (code, err) == (0, "") and "digest" in out
    return where


def test_exit_code_says_yes_or_no(small: Path, tmp_path: Path) -> None:
    """0: verified or equal. 1: not. 2: undecidable. Every command uses the codes of `replaylens.cli`."""
    other = tmp_path / "other"
    assert run("dump", "--out", str(other), "--n", "3", "--knob", "flips=1,3", "--quiet", "--sites", "SZ")[0] == 0
    assert run("verify", str(small), "--all", "--quiet")[0] == 0
    assert run("diff", str(small), str(small), "--quiet")[0] == 0
    assert run("diff", str(small), str(other), "--quiet")[0] == 1
    shard = other / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert run("verify", str(other), "--quiet")[0] == 1
    assert run("verify", str(small), "--model", "coin-draft", "--quiet")[0] == 2  # another fingerprint: undecidable
    assert run("diff", str(small), str(tmp_path / "nowhere"), "--quiet")[0] == 2


@pytest.mark.slow
def test_steer_finds_the_model_of_a_dump(tmp_path: Path) -> None:
    """`steer` finds the dump's model, also one that thinks. If the model is not embedded, `steer` asks for --model."""
    dump = ["dump", "--model", "coin-thinking", "--n", "12", "--knob", "flips=1,3", "--sites", "blocks.2.hook_in", "--quiet"]
    assert run(*dump, "--out", str(tmp_path / "d"))[0] == 0
    words = ["steer", str(tmp_path / "d"), "--site", "blocks.2.hook_in", "--n", "2", "--placebos", "1"]
    code, out, err = run(*words)
    assert code == 0 and "random direction" in out, err
    edit_manifest(tmp_path / "d", lambda raw: raw["fingerprint"].update(weights="0" * 64))
    code, out, err = run(*words)
    assert (code, out) == (2, "") and "Name its model with --model" in err


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (["--label", "faze"], "'face'"),
        (["--estimators", "logistics"], "'logistic'"),
        (["--positions", "stepp"], "Use all, "),
    ],
)
def test_a_wrong_name_in_a_dump(small: Path, wrong: list[str], hint: str) -> None:
    """A wrong label, estimator or position of `probe` gets a suggestion as well."""
    code, out, err = run("probe", str(small), "--quiet", "--sites", "S", "--folds", "2", *wrong)
    assert (code, out) == (2, "") and hint in err


def test_json_modes(small: Path, tmp_path: Path) -> None:
    """Every command that prints facts has --json, which prints only JSON to stdout."""
    page = ["report", str(small), "--out", str(tmp_path / "page.html"), "--verify", "0.3"]
    commands = [
        ["tasks", "list"],
        ["tasks", "show", "coin", "--n", "1"],
        ["inspect", str(small)],
        ["verify", str(small), "--quiet"],
        ["diff", str(small), str(small), "--quiet"],
        ["replay", "--n", "1", "--quiet"],
        ["probe", "--list"],
        [*page, "--quiet"],
        ["doctor"],
    ]
    for words in commands:
        code, out, err = run(*words, "--json")
        assert code == 0 and json.loads(out) and err == "", words
    listed = json.loads(run("tasks", "list", "--json")[1])
    assert listed[0]["name"] == "coin" and listed[0]["knobs"]["flips"]["default"] == [1, 8] and "face" in listed[0]["labels"]
    written = json.loads(run(*page, "--quiet", "--json")[1])
    assert written["verdict"]["status"] == "verified" and written["bytes"] == (tmp_path / "page.html").stat().st_size


def test_quiet_modes(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: None) -> None:
    """Progress goes to stderr, and --quiet silences it. Negative control: without --quiet, stderr is not empty."""
    assert "example" in run("verify", str(small), "--all")[2]
    assert run("verify", str(small), "--all", "--quiet")[2] == ""
    monkeypatch.setitem(zoo.RECIPES, "coin-draft", replace(zoo.recipe("coin-draft"), pool=16, longest=1, batch=8))
    monkeypatch.setattr("replaylens.commands.training.CARD_EXAMPLES", 1)
    monkeypatch.setattr("replaylens.commands.training.CARD_LENGTHS", (1,))
    train = ["train", "coin-draft", "--steps", "1", "--out"]
    assert "step" in run(*train, str(tmp_path / "a"))[2]
    assert run(*train, str(tmp_path / "b"), "--quiet")[2] == ""


def test_no_color(shell: Callable[..., Shell]) -> None:
    """NO_COLOR turns colours off, even if they are forced. Negative control: without NO_COLOR there are colours."""
    words = ["replay", "--n", "1", "--quiet"]
    assert COLOUR.search(shell(*words, FORCE_COLOR="1").out)
    assert not COLOUR.search(shell(*words, FORCE_COLOR="1", NO_COLOR="1").out)
    plain = shell(*words)
    assert "\x1b" not in plain.out and "1 examples" in plain.out  # a pipe gets no escape sequences at all


HELP_AND_ERROR = """
import contextlib, sys, replaylens.cli
for words in (["tasks", "--help"], ["dupm"]):
    sys.argv[1:] = words
    with contextlib.suppress(SystemExit):
        replaylens.cli.main()
    print("--next--", flush=True)
    print("--next--", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_no_color_in_help_and_errors() -> None:
    """NO_COLOR also holds for typer's output. typer reads the variables at import, so each value needs its own process."""
    for more, coloured in (({}, [True, True]), ({"NO_COLOR": "1"}, [False, False])):
        command, asked = [sys.executable, "-c", HELP_AND_ERROR], {**os.environ, "FORCE_COLOR": "1", **more}
        done = subprocess.run(command, capture_output=True, text=True, env=asked)
        parts = zip(done.stdout.split("--next--")[:2], done.stderr.split("--next--")[:2], strict=True)
        assert [bool(COLOUR.search(out + err)) for out, err in parts] == coloured


def test_interrupt(shell: Callable[..., Shell], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C gives exit code 130, also in a command that cannot be resumed."""

    def stop(model: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replaylens.engine.proof.certificates.examine", stop)
    done = shell("doctor")
    assert done.code == 130 and "Traceback" not in done.err


# Words of the shell


def test_errors_name_options_as_the_shell_does(shell: Callable[..., Shell], tmp_path: Path) -> None:
    """An option of a call is an option of the command; what belongs to code that is written out stays."""
    out = str(tmp_path / "out")
    words = ("dump", "--out", out, "--n", "2", "--sites", "S", "--quiet")
    assert shell(*words).code == 0
    again = shell(*words)
    assert again.code == 2 and "Resume it (--resume)" in again.err and "resume=True" not in again.err
    for line, said in (
        ("replay --n 1 --max-new 999999", "--max-new 999999 exceeds"),
        ("dump --out NEW --n 999999999999999999999", "Invalid --n 999999999999999999999"),
        ("reproduce", "No figure given. Name one of "),
    ):
        done = shell(*line.replace("NEW", f"{out}-new").split())
        assert done.code == 2 and said in done.err and not re.search(r"\w=\d", done.err), done.err


@dataclass
class Option:
    name: str
    opts: list[str]
    secondary_opts: list[str]


def test_only_options_of_the_running_command_are_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [Option("device", ["--device"], []), Option("check", ["--check"], ["--no-check"])]
    with monkeypatch.context() as patch:
        patch.setattr(reporting, "_parameters", lambda: options)
        assert in_shell_words("Give device='cpu', or check=False.") == "Give --device 'cpu', or --no-check."
        assert in_shell_words("Use Engine.load(x, device='cpu') or a=b.") == "Use Engine.load(x, device='cpu') or a=b."
    assert in_shell_words("device='cpu'") == "device='cpu'", "outside a command, as it is"
