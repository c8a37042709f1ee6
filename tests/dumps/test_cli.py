"""The commands: their output, their files and their exit codes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from replaylens import Edit, tasks
from replaylens.cli import COMMANDS
from replaylens.cli import app as whole_app
from replaylens.commands import options
from replaylens.commands.dump import diff as diff_command
from replaylens.commands.dump import dump as dump_command
from replaylens.commands.dump import verify as verify_command
from replaylens.commands.inspect import inspect
from replaylens.commands.options import engine_for
from replaylens.commands.replay import replay
from replaylens.dumps.maker import PlanKeywords, make_plan, write_dump
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import VERIFIED, Comparison, Verification, diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadEdit, BadRequest, Caveat, PlanMismatch
from replaylens.engine.machine import in_bytes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.records import DTYPES
from replaylens.engine.request.sampling import Sampling
from replaylens.probes.report import Report
from replaylens.replay.replayer import ReplayOptions
from replaylens.replay.run import Run
from replaylens.rollouts.plan import Answer
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import GivenTexts
from replaylens.training import trainer
from replaylens.weights import hub, loading, opening
from replaylens.weights.opening import default_dtype
from tests.drawings import SENTENCE, rollouts
from tests.dumps.conftest import EXAMPLES, NEW, PER_SHARD, written
from tests.dumps.damage import edit_manifest, flip_bit
from tests.engine.reference import decoder

app = typer.Typer()
for command in (dump_command, replay, inspect, verify_command, diff_command):
    app.command()(command)

SAME = ["--n", str(EXAMPLES), "--knob", "flips=1,3", "--max-new", str(NEW), "--shard-examples", str(PER_SHARD)]
"""the options of the reference dump"""


def run(*words: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def dump_words(model_folder: Path) -> list[str]:
    return ["dump", "--model", str(model_folder), *SAME]


def test_dump(dump_words: list[str], reference: Dump, tmp_path: Path, watched: None) -> None:
    code, out, err = run(*dump_words, "--out", tmp_path / "d", "--batch", 3)
    assert code == 0 and f"digest {reference.digest}" in out and f"{reference.manifest.rows} rows in 3 shards" in out
    assert "7/7" in err and "example/s" in err, "a progress bar with a rate"
    code, out, err = run(*dump_words, "--out", tmp_path / "e", "--json", "--quiet")
    facts = json.loads(out)
    assert code == 0 and err == "" and (facts["digest"], facts["rows"]) == (reference.digest, reference.manifest.rows)


def test_parts(dump_words: list[str], reference: Dump, tmp_path: Path) -> None:
    code, out, _ = run(*dump_words, "--out", tmp_path, "--shard", "1/2", "--quiet")
    assert code == 0 and "the dump is not finished yet" in out
    code, out, _ = run(*dump_words, "--out", tmp_path, "--resume", "--json", "--quiet")
    assert code == 0 and json.loads(out)["digest"] == reference.digest


def test_writers_and_no_probabilities(dump_words: list[str], reference: Dump, tmp_path: Path) -> None:
    code, out, _ = run(*dump_words, "--out", tmp_path / "d", "--writers", 2, "--json", "--quiet")
    assert code == 0 and json.loads(out)["digest"] == reference.digest
    code, out, _ = run(*dump_words, "--out", tmp_path / "e", "--no-probabilities", "--json", "--quiet")
    assert code == 0 and json.loads(out)["digest"] != reference.digest
    code, out, _ = run("inspect", tmp_path / "e", "--json")
    assert code == 0 and json.loads(out)["plan"]["probabilities"] is False
    code, _, err = run(*dump_words, "--out", tmp_path / "f", "--writers", 2, "--workers", 2)
    assert code == 2 and "--writers does not work with Ray" in err
    assert not (tmp_path / "f").exists()


def test_memory_url(dump_words: list[str], reference: Dump) -> None:
    assert run(*dump_words, "--out", "memory://cli", "--quiet")[0] == 0
    code, out, _ = run("diff", "memory://cli", reference.url, "--quiet")
    assert code == 0 and out.startswith("the same content\n")


BAD: dict[str, tuple[list[str], str]] = {
    "an unknown task": (["--task", "cards"], "cards"),
    "an unknown knob": (["--knob", "sides=3"], "sides"),
    "a knob without a value": (["--knob", "flips"], "key=value"),
    "an unknown site": (["--sites", "blocks.9.hook_in"], "blocks.9.hook_in"),
    "an unknown drafter": (["--drafter", "oracle"], "oracle"),
    "an unknown dtype": (["--dtype", "int8"], "int8"),
    "an unknown stored dtype": (["--stored-dtype", "int8"], "--stored-dtype int8"),
    "what is stored for what is computed": (["--dtype", "bfloat16"], "give --stored-dtype bfloat16"),
    "unknown positions": (["--positions", "odd"], "odd"),
    "an impossible part": (["--shard", "3/3"], "0 <= i < n"),
    "a part that is none": (["--shard", "first"], "Give i/n"),
    "part and Ray": (["--shard", "0/2", "--ray", "local"], "Give either --shard, or --ray"),
    "an unknown model": (["--model", "/nowhere"], "/nowhere"),
    "part and workers": (["--shard", "0/2", "--workers", "2"], "or --ray and --workers"),
    "nothing to store": (["--sites", ""], "stores nothing"),
    "a knob given twice": (["--knob", "flips=2"], "--knob flips is given twice: 1,3 and 2"),
    "no drafter": (["--drafter", "none"], "give --window 1"),
    "a drafter without a model": (["--drafter", "model"], "with --draft-model"),
    "a model that does not draft": (["--draft-model", "coin-draft"], "would not be used"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(dump_words: list[str], tmp_path: Path, name: str) -> None:
    """Exit code 2, one line that names the fault, and nothing written."""
    words, complaint = BAD[name]
    code, _, err = run(*dump_words, "--out", tmp_path / "d", "--quiet", *words)
    assert code == 2 and complaint in err and "Traceback" not in err and not (tmp_path / "d").exists()


def test_an_empty_path_is_not_the_current_folder(
    dump_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*dump_words, "--out", "", "--quiet")
    assert code == 2 and "--out is empty" in err and not list(tmp_path.iterdir())


def test_a_corrected_command_can_follow_one_that_failed_at_once(model_folder: Path, tmp_path: Path) -> None:
    words = ["dump", "--model", model_folder, "--n", 2, "--max-new", 3, "--out", tmp_path / "d", "--quiet"]
    code, _, err = run(*words, "--knob", "flips=500")
    assert code == 2 and "exceed the model's" in err and not (tmp_path / "d").exists()
    assert run(*words, "--knob", "flips=2")[0] == 0


def test_workers_are_used(dump_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are used also without --ray; they then run on this machine."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("replaylens.extras.cluster.dump_on_cluster", lambda *_, **options: asked.update(options))
    code, _, _ = run(*dump_words, "--out", tmp_path, "--workers", 1)
    assert code == 0 and (asked["address"], asked["workers"]) == ("local", 1)


def test_draft_model(dump_words: list[str], tmp_path: Path) -> None:
    code, _, err = run(*dump_words, "--out", tmp_path, "--drafter", "model", "--draft-model", "coin-draft", "--quiet")
    assert code == 0, err
    assert Dump.open(tmp_path).manifest.plan.drafter_settings["weights"] == Engine.load("coin-draft").fingerprint.weights


def test_window_one_drafts_nothing(model_folder: Path) -> None:
    code, out, _ = run("replay", "--model", model_folder, "--n", 1, "--max-new", 3, "--window", 1, "--quiet")
    assert code == 0 and "nothing drafted" in out


def test_existing_dump(dump_words: list[str], copy: Path) -> None:
    code, _, err = run(*dump_words, "--out", copy)
    assert code == 2 and "FolderExists" in err and "Resume it" in err


def test_replay(model_folder: Path) -> None:
    code, out, _ = run("replay", "--model", model_folder, "--n", 2, "--max-new", 3, "--quiet")
    assert code == 0 and "2 examples" in out and "of drafts accepted" in out and "[1] A coin" in out
    code, out, _ = run("replay", "--model", model_folder, "--n", 2, "--max-new", 3, "--quiet", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["examples"]) == 2 and found["examples"][0]["statistics"]["drafted"] > 0
    assert any(example["rejected"] for example in found["examples"])


def test_inspect(reference: Dump, tmp_path: Path) -> None:
    code, out, _ = run("inspect", reference.url)
    assert code == 0 and reference.digest in out and "plan: drafter" in out and "face (string)" in out
    code, out, _ = run("inspect", reference.url, "--json")
    assert json.loads(out)["sites"]["blocks.0.hook_in"] == {"dtype": "float32", "shape": [32]}
    assert run("inspect", tmp_path)[0] == 2
    (tmp_path / "plan.json").write_text("{}")
    code, _, err = run("inspect", tmp_path)
    assert code == 2 and "Resume the dump" in err


def test_what_was_computed_and_what_is_stored(dump_words: list[str], reference: Dump, tmp_path: Path) -> None:
    """`dump`, `inspect` and `diff` name both; the arithmetic of one with other numbers is that of its fingerprint."""
    computed = "portable-1 (float32, the same bits on every machine)"
    code, out, _ = run(*dump_words, "--out", tmp_path / "d", "--dtype", "float32", "--stored-dtype", "bfloat16", "--quiet")
    assert code == 0 and f"computed in {computed}, stored in bfloat16\n" in out
    lines = dict(line.split(maxsplit=1) for line in run("inspect", tmp_path / "d")[1].splitlines())
    assert lines["arithmetic"] == computed
    facts = json.loads(run("inspect", tmp_path / "d", "--json")[1])
    assert (facts["arithmetic"], facts["stored_dtype"]) == (computed, "bfloat16")
    out = run("diff", reference.url, tmp_path / "d", "--quiet")[1]
    assert "arithmetic: portable-1 on both sides\nplan: dtype: float32 here, bfloat16 there" in out
    of_gpu = replace(reference.manifest.fingerprint, canonical="cuda3", dtype="bfloat16", device="H200", torch="2", triton="3")
    assert of_gpu.computed == "cuda3 (bfloat16 on H200 with torch 2 and triton 3)"


def test_every_command_that_chooses_a_device_chooses_the_arithmetic() -> None:
    group = typer.main.get_command(whole_app)
    commands = {name: {each.name: each for each in group.get_command(None, name).params} for name in COMMANDS}  # type: ignore[attr-defined]
    chooses = {name for name, found in commands.items() if "device" in found}
    assert chooses >= {"doctor", "warm", "replay", "dump", "verify", "resample", "report", "probe", "steer"}
    for name in chooses - {"train"}:  # whose recipe says it
        assert commands[name]["dtype"].opts == ["--dtype"] and all(each in commands[name]["dtype"].help for each in DTYPES), (
            name
        )


def test_the_arithmetic_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the commands are those of `Engine.load`, whose certificate says what was examined."""
    assert Engine.load("coin-draft", dtype="float32").certificate.arithmetic == "portable-1 (float32)"
    for given in ("int8", torch.int8, torch.float64, 32):
        with pytest.raises(BadRequest, match="Use one of float32, bfloat16, float16"):
            Engine.load("coin-draft", dtype=given)  # type: ignore[arg-type]
    for other in ("bfloat16", torch.bfloat16):
        with pytest.raises(BadRequest, match="A CPU computes in float32 only, and dtype='bfloat16' was given"):
            Engine.load("coin-draft", dtype=other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(opening, "require_gpu", lambda device: None)
    assert default_dtype("cuda") is torch.bfloat16
    assert all(default_dtype("cuda", name) is default_dtype("cuda", getattr(torch, name)) for name in DTYPES)
    assert default_dtype("cuda", "float32") is torch.float32


def test_verify(model_folder: Path, reference: Dump, copy: Path, tmp_path: Path) -> None:
    for words in ([], ["--sample", "20%"]):
        code, out, _ = run("verify", reference.url, "--model", model_folder, "--quiet", *words)
        assert code == 0 and out.startswith("verified: ")
    code, out, _ = run("verify", reference.url, "--model", model_folder, "--quiet", "--sample", "7")
    assert code == 0 and f"7 of {reference.manifest.rows} rows compared" in out
    for bad in (["--sample", "0"], ["--sample", "2.5"], ["--sample", "nan"], ["--sample", "7", "--all"]):
        code, _, err = run("verify", reference.url, "--model", model_folder, "--quiet", *bad)
        assert code == 2 and "sample" in err and "Give" in err
    flip_bit(copy / "shard-00002.safetensors")
    code, out, _ = run("verify", copy, "--model", model_folder, "--quiet")
    assert code == 1 and "shard-00002.safetensors was changed" in out
    code, out, _ = run("verify", copy, "--model", model_folder, "--quiet", "--json")
    assert code == 1 and json.loads(out)["status"] == "mismatch"
    code, _, err = run("verify", reference.url, "--model", model_folder, "--sample", "lots", "--quiet")
    assert code == 2 and "--sample lots" in err
    code, out, err = run("verify", tmp_path / "nowhere", "--model", model_folder, "--quiet")
    assert code == 2 and not out and err.startswith("BadDump: ") and "nowhere does not exist" in err


@pytest.mark.parametrize("fault", ["malformed", "edited", "missing", "cut", "flipped"])
def test_one_exit_code_for_one_fault(copy: Path, model_folder: Path, fault: str) -> None:
    """Whether `verify` or `inspect` finds it. `inspect` does not look into the files, and says so."""
    shard = copy / "shard-00002.safetensors"
    match fault:
        case "malformed":
            (copy / "manifest.json").write_text("{}")
        case "edited":
            edit_manifest(copy, lambda raw: raw["plan"]["knobs"].update(p=0.25), sealed=False)
        case "missing":
            shard.unlink()
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "flipped":
            flip_bit(shard)
    verified, seen = run("verify", copy, "--model", model_folder, "--quiet"), run("inspect", copy)
    expected = 2 if fault in ("malformed", "edited") else 1
    assert verified[0] == expected and seen[0] == (0 if fault == "flipped" else expected)
    if expected == 2:
        assert verified[2] == seen[2] and seen[2].startswith("BadDump: ")
        return
    said = {"missing": "shard-00002.safetensors is missing", "cut": "shard-00002.safetensors has "}.get(fault, "sizes match")
    assert said in seen[1] and f"content was not hashed: replaylens verify {copy}" in seen[1]
    facts = json.loads(run("inspect", copy, "--json")[1])
    assert facts["hashed"] is False and bool(facts["problems"]) == (fault != "flipped")


def test_verify_with_another_model(reference: Dump, model_folder: Path, tmp_path: Path) -> None:
    from replaylens.training import embedded as zoo

    model, tokenizer = zoo.load(model_folder)
    model.embed[3, 3] += 1
    zoo.save(model, tokenizer, tmp_path)
    code, out, _ = run("verify", reference.url, "--model", tmp_path, "--quiet")
    assert code == 2 and out.startswith("other fingerprint") and "weights: " in out


@pytest.mark.slow
def test_the_embedded_model_that_made_a_dump_is_found(tmp_path: Path, reference: Dump, copy: Path) -> None:
    """Finds also a Thinking-States model. If the model is not embedded, the command asks for --model but still checks the
    files."""
    words = ["dump", "--model", "coin-thinking", "--n", 2, "--knob", "flips=1", "--sites", "S", "--quiet"]
    assert run(*words, "--out", tmp_path / "thinking")[0] == 0
    code, out, _ = run("verify", tmp_path / "thinking", "--all", "--quiet")
    assert code == 0 and out.startswith("verified: 2 examples")
    code, out, _ = run("verify", reference.url, "--quiet")
    assert code == 2 and "Name its model with --model" in out
    flip_bit(copy / "shard-00002.safetensors")
    code, out, _ = run("verify", copy, "--quiet")
    assert code == 1 and "shard-00002.safetensors was changed" in out


def test_the_fetched_model_that_made_a_dump_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its config first, so that no other is loaded."""
    loaded, load = list[str](), Engine.load
    for name in ("llama", "gpt2"):
        loading.save(decoder(name), tmp_path / name)
    monkeypatch.setattr(hub, "PACKAGED", dict.fromkeys(("absent", "gpt2", "llama")))
    monkeypatch.setattr(hub, "is_fetched", lambda name: name != "absent")
    monkeypatch.setattr(hub, "model_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(Engine, "load", lambda name, **how: loaded.append(name) or load(tmp_path / name, **how))
    made = Engine(decoder("llama")).replay([[1, 2, 3]], sites="S").save(tmp_path / "dump")
    found = engine_for(made, None, "cpu", None)
    assert found is not None and found.fingerprint.weights == made.manifest.fingerprint.weights and loaded == ["llama"]


def test_diff(dump_words: list[str], reference: Dump, tmp_path: Path) -> None:
    run(*dump_words, "--out", tmp_path, "--drafter", "tree", "--quiet")
    code, out, _ = run("diff", reference.url, tmp_path, "--quiet")
    assert code == 1 and out.startswith("example 0, branch ") and "drafter: lens here, tree there" in out
    code, out, _ = run("diff", reference.url, tmp_path, "--accepted", "--quiet", "--json")
    assert code == 0 and json.loads(out)["same"] is True
    assert run("diff", reference.url, tmp_path / "nowhere", "--quiet")[0] == 2
    flip_bit(tmp_path / "shard-00001.safetensors")
    code, out, err = run("diff", tmp_path, tmp_path, "--quiet")
    assert code == 2 and not out and "shard-00001.safetensors was changed" in err


@pytest.mark.slow
def test_interrupt_leaves_a_resumable_dump(dump_words: list[str], model_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C in a real process: exit code 130, no lock remains, and --resume completes the dump."""
    words = [*dump_words, "--out", str(tmp_path / "d"), "--n", "2000", "--shard-examples", "2", "--quiet"]
    child = subprocess.Popen(
        [sys.executable, "-m", "replaylens", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
    )
    deadline = time.monotonic() + 90
    while not list((tmp_path / "d").glob("part-*.json")) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    try:
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130 and "Interrupted. To continue, run" in err and "Traceback" not in err
    assert not list((tmp_path / "d").glob("lock-*")) and not list((tmp_path / "d").glob("*.tmp"))
    assert (tmp_path / "d" / "plan.json").exists()


def test_only_a_dump_is_resumed(dump_words: list[str], tmp_path: Path) -> None:
    """A mistyped folder is not taken for a new one."""
    for folder in (tmp_path / "nowhere", tmp_path):
        code, _, err = run(*dump_words, "--out", folder, "--resume")
        assert code == 2 and err.startswith("BadRequest: ") and "holds no dump to resume. Leave out --resume" in err
    assert not list(tmp_path.iterdir())


def test_shards_without_a_plan_are_nobodys(
    dump_words: list[str], engine: Engine, planned: Callable[..., DumpPlan], reference: Dump, tmp_path: Path
) -> None:
    """No file says what they are rows of: neither the command nor the call takes the folder, and nothing in it changes. The
    call begins a dump in an empty folder, resumed or not."""
    for file in Path(reference.url).iterdir():
        if file.name not in ("plan.json", "manifest.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    code, _, err = run(*dump_words, "--out", tmp_path, "--resume")
    assert code == 2 and err.startswith("BadRequest: ") and "holds no dump to resume. Leave out --resume" in err
    for resume in (True, False):
        with pytest.raises(BadDump, match=r"is not empty, and holds no dump but .*Choose a new or an empty folder"):
            write_dump(engine, planned(), tmp_path, resume=resume)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "empty").mkdir()
    made = written(engine, planned(), tmp_path / "empty", resume=True)
    assert made.digest == reference.digest


def test_a_dump_says_which_task_it_takes(tmp_path: Path) -> None:
    """First of all, where none was given; what is printed as JSON stays JSON."""
    words = ("dump", "--n", "1", "--sites", "S", "--quiet", "--out")
    code, out, _ = run(*words, tmp_path / "a")
    assert code == 0 and out.splitlines()[0] == "no --task given: examples of coin"
    code, out, err = run(*words, tmp_path / "b", "--json")
    assert code == 0 and json.loads(out)["rows"] and err == ""
    code, out, err = run(*words, tmp_path / "c", "--task", "coin")
    assert code == 0 and "no --task" not in out + err


def test_messages_name_what_the_shell_has(tmp_path: Path) -> None:
    words = ("dump", "--n", "1", "--sites", "S", "--quiet", "--out")
    run(*words, tmp_path / "d")
    for more, said in (
        (("d",), "Resume it (--resume), or use another folder"),
        (("e", "--writers", "9999"), "--writers 9999 asks for 9,999 threads"),
        (("e", "--ranks", "9999"), "--ranks 9999 asks for 9,999 processes"),
        (("e", "--dtype", "float8"), "Unknown --dtype 'float8'"),
    ):
        done = CliRunner().invoke(whole_app, [*words, str(tmp_path / more[0]), *more[1:]])
        assert done.exit_code == 2 and said in done.stderr, done.stderr
    done = CliRunner().invoke(whole_app, ["replay", "--n", "1", "--dtype", "bfloat16"])
    assert done.exit_code == 2 and "--dtype 'bfloat16' was given. Use --dtype 'float32', or --device 'cuda'" in done.stderr


@pytest.mark.parametrize("left", ["lock-0-of-1", "plan.json.77-0123abcd.tmp"])
def test_a_writer_that_died_before_its_plan_is_resumed(
    dump_words: list[str], reference: Dump, tmp_path: Path, left: str
) -> None:
    """By the same command, as after any other kill; beside a file of somebody else, the folder is none of ours."""
    (tmp_path / left).touch()
    (tmp_path / "mine.txt").touch()
    code, _, err = run(*dump_words, "--out", tmp_path, "--resume")
    assert code == 2 and "holds no dump to resume" in err
    (tmp_path / "mine.txt").unlink()
    code, out, _ = run(*dump_words, "--out", tmp_path, "--resume", "--json", "--quiet")
    assert code == 0 and json.loads(out)["digest"] == reference.digest


OUTPUTS = {
    "train": ("train", "coin-draft", "--steps", "1", "--out"),
    "board": ("replay", "--board"),
    "report": ("report", "DUMP", "--out"),
    "probe": ("probe", "DUMP", "--out"),
    "probes": ("probe", "DUMP", "--save-probes"),
    "steer": ("steer", "DUMP", "--out"),
    "demo": ("demo", "--out"),
}


IMPOSSIBLE = ("below a file", "a file", "a link to nothing", "a long name", "read-only")
PAIRS = [(name, kind) for name in OUTPUTS for kind in IMPOSSIBLE if (name, kind) != ("board", "a file")]
"""a board replaces the file that it is given"""


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_outputs_are_checked_before_the_work(
    reference: Dump, tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that cannot be written is no use: the command says so before it reads a model or a dump."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the work has begun")

    for each in (Engine, Dump):
        monkeypatch.setattr(each, "load" if each is Engine else "open", work)
    monkeypatch.setattr(trainer, "train", work)
    out = tmp_path / ("out.svg" if name == "board" else "out")
    match kind:
        case "below a file":
            out.write_text("mine")
            out = out / "deeper.svg"
        case "a file":
            out.write_text("mine")
        case "a link to nothing":
            out.symlink_to(tmp_path / "nothing")
        case "a long name":
            out = tmp_path / ("x" * 300 + ".svg")
        case "read-only":  # as on a read-only file system; root may write anywhere else
            monkeypatch.setattr(os, "access", lambda path, mode, **_: not (mode & os.W_OK))
    words = [word.replace("DUMP", reference.url) for word in OUTPUTS[name]]
    done = CliRunner().invoke(whole_app, [*words, str(out)])
    assert done.exit_code == 2 and done.stderr.startswith("BadRequest: "), (done.stderr, done.exception)
    assert "the work has begun" not in done.stderr


def test_files_of_others_are_not_overwritten(reference: Dump, tmp_path: Path) -> None:
    """By pages, probe reports and trained models, under whatever names."""
    for file in ("page.html", "summary.txt", "report.json", "tokenizer.json"):
        folder = tmp_path / file.split(".")[0]
        folder.mkdir()
        (folder / file).write_text("mine")
        words = {
            "page.html": ("report", reference.url, "--out", folder / file),
            "tokenizer.json": ("train", "coin-draft", "--steps", "1", "--out", folder),
        }.get(file, ("probe", reference.url, "--out", folder))
        done = CliRunner().invoke(whole_app, [str(word) for word in words])
        assert done.exit_code == 2 and file in done.stderr and "elete" not in done.stderr, done.stderr
        assert [(each.name, each.read_text()) for each in folder.iterdir()] == [(file, "mine")]


def test_a_page_replaces_a_page(reference: Dump, tmp_path: Path) -> None:
    """Negative control: what we wrote before is replaced."""
    words = ["report", reference.url, "--verify", "0", "--trees", "0", "--quiet", "--out", str(tmp_path / "page.html")]
    for _ in range(2):
        assert CliRunner().invoke(whole_app, words).exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_sizes_are_never_rounded_to_nothing() -> None:
    assert [in_bytes(n) for n in (12, 999, 1000, 20_500, 3_140_000, 2.5e9)] == [
        "12 bytes", "999 bytes", "1.0 kB", "20.5 kB", "3.1 MB", "2.5 GB",
    ]  # fmt: skip


# ---- texts -----------------------------------------------------------------------------------------------------------
# Dumps of given texts: they hold the texts, verify from the folder alone, and keep positions by name.

TEXTS = ["A coin's state is heads. Alice flips", "A coin's state is tails.", " Alice flips. Alice flips"]
LABELS = {"up": [True, False, None], "score": [0.1, 1 / 3, 2.0], "word": [None, [None, *"bcdef"], None]}
SITE = "blocks.2.hook_in"


@pytest.fixture(scope="module")
def coin_of_texts() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture(scope="module")
def texts(coin_of_texts: Engine) -> GivenTexts:
    return coin_of_texts.texts(TEXTS, labels=LABELS)


@pytest.fixture(scope="module")
def dump(coin_of_texts: Engine, texts: GivenTexts, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    plan = make_plan(coin_of_texts, texts, len(texts), sites=[SITE], examples_per_shard=2)
    made = written(coin_of_texts, plan, tmp_path_factory.mktemp("texts") / "d", batch=1)
    return made


def test_a_run_and_a_plan_write_the_same_dump(coin_of_texts: Engine, texts: GivenTexts, dump: Dump, tmp_path: Path) -> None:
    saved = coin_of_texts.replay(TEXTS, labels=LABELS, sites=[SITE], drafter="lens").save(tmp_path / "d", examples_per_shard=2)
    assert saved.digest == dump.digest and saved.manifest.plan == dump.manifest.plan
    assert dump.manifest.labels == {"up": "bool", "score": "double", "word": "string", "shuffled": "int64"}
    frame = dump.to_pandas()
    assert frame[frame["example"] == 1]["score"].tolist() == [1 / 3] * 6, "all 64 bits of a number"
    assert frame[frame["example"] == 1]["word"].tolist()[1:] == list("bcdef") and frame["correct"].isna().all()
    other = coin_of_texts.replay(TEXTS, labels=LABELS | {"score": [0.1, 1 / 3 + 1e-12, 2.0]}, sites=[SITE]).save(tmp_path / "e")
    assert other.digest != dump.digest, "the control: a label that differs in its last bits"
    assert torch.equal(dump.array(SITE)[:], saved.array(SITE)[:])


def test_the_folder_alone_is_replayed(dump: Dump, tmp_path: Path) -> None:
    copy = shutil.copytree(dump.url, tmp_path / "copy")
    assert verify(copy, Engine.load("coin-plain"), sample="all")
    assert Dump.open(copy).manifest.plan.make_task().examples()[1].prompt == TEXTS[1]
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace("is tails.", "is heads."))
    with pytest.raises(BadDump, match="its seal is broken"):
        verify(copy, Engine.load("coin-plain"), sample="all")
    with pytest.raises(BadDump, match="seal"):
        Dump.open(copy)


def test_other_texts_are_another_dump(coin_of_texts: Engine, dump: Dump, tmp_path: Path) -> None:
    """Under a plan with another label or another token, the rows do not verify, and the dump cannot be resumed."""
    plan = dump.manifest.plan
    raw = json.loads(json.dumps(plan.knobs))
    raw["texts"][1]["labels"]["score"] = 0.5
    other = replace(plan, knobs=raw)
    (line,) = plan.differences(other)
    assert re.fullmatch(r"knobs: .*3 texts, SHA-256 .* here, .*3 texts, SHA-256 .* there", line) and len(line) < 200
    with pytest.raises(PlanMismatch, match="3 texts"):
        write_dump(coin_of_texts, other, dump.url, resume=True)
    assert DumpPlan.from_json(plan.to_json()) == plan != other


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        ("text:s. A", [(0, 6), (2, 3)]),
        ("label:word", [(1, position) for position in range(1, 6)]),
        ("label:up", [(0, p) for p in range(8)] + [(1, p) for p in range(6)]),
        ("-2:", [(0, 6), (0, 7), (1, 4), (1, 5), (2, 3), (2, 4)]),
        ("last-1", [(0, 6), (1, 4), (2, 3)]),
        (5, [(0, 5), (1, 5)]),
    ],
)
def test_positions_by_name(
    coin_of_texts: Engine, texts: GivenTexts, tmp_path: Path, positions: Any, kept: list[tuple[int, int]]
) -> None:
    plan = make_plan(coin_of_texts, texts, len(texts), sites=[SITE], positions=positions)
    made = written(coin_of_texts, plan, tmp_path / "d")
    assert list(zip(made.index["example"], made.index["position"], strict=True)) == kept
    assert verify(tmp_path / "d", coin_of_texts, sample="all"), "without being told the positions again"


def test_a_dump_without_rows_says_so(coin_of_texts: Engine, texts: GivenTexts, tmp_path: Path) -> None:
    plan = make_plan(coin_of_texts, texts, len(texts), sites=[SITE], positions="text:nowhere")
    with pytest.warns(Caveat, match=r"has no rows: positions='text:nowhere' chooses none of 3 examples"):
        made = written(coin_of_texts, plan, tmp_path / "d")
    assert len(made.index["example"]) == 0 and verify(tmp_path / "d", coin_of_texts, sample="all")


def test_positions_that_texts_do_not_have(coin_of_texts: Engine, texts: GivenTexts) -> None:
    for positions, saying in (
        ("steps", "have no steps"),
        ("label:wrod", "did you mean 'word'"),
        ("text:", "Unknown positions"),
    ):
        with pytest.raises(BadRequest, match=saying):
            make_plan(coin_of_texts, texts, 3, sites="S", positions=positions)
    for examples in (len(texts) + 1, [0, len(texts)]):
        with pytest.raises(BadRequest, match=f"Text {len(texts)} was asked for, but there are only {len(texts)}"):
            make_plan(coin_of_texts, texts, examples, sites="S")


def test_texts_too_large_for_a_plan(coin_of_texts: Engine, texts: GivenTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaylens.dumps.plan.MAX_TEXT_BYTES", 100)
    with pytest.raises(BadRequest, match="Write several dumps"):
        make_plan(coin_of_texts, texts, 3, sites="S")


def test_the_command(dump: Dump, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    columns = [{"q": text} | {name: LABELS[name][i] for name in LABELS} for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, columns)))
    words = ["dump", "--texts", path, "--text", "q", "--label", "up,score", "--label", "word"]
    words += ["--sites", SITE, "--shard-examples", 2, "--quiet", "--out", tmp_path / "d"]
    code, out, err = run(*words)
    assert code == 0 and f"digest {dump.digest}" in out, err
    path.unlink()
    code, out, _ = run("verify", tmp_path / "d", "--all", "--quiet")
    assert code == 0 and "3 examples replayed" in out
    code, out, _ = run("inspect", tmp_path / "d")
    assert code == 0 and "3 texts, SHA-256" in out and TEXTS[0] not in out


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (["--texts", "q.jsonl", "--task", "coin"], "Leave out --task"),
        (["--texts", "q.jsonl", "--knob", "flips=2"], "Leave out --task and --knob"),
        (["--label", "up"], "Give --texts"),
        (["--texts", "none.jsonl"], "Cannot read none.jsonl"),
        (["--texts", "q.jsonl", "--workers", "2"], "does not work with Ray"),
        (["--task", "texts"], "Give at least one text"),
    ],
)
def test_commands_that_cannot_be(words: list[str], saying: str, tmp_path: Path) -> None:
    code, _, err = run("dump", *words, "--quiet", "--out", tmp_path / "d")
    assert code == 2 and saying in " ".join(err.split())


def test_inspect_shows_the_edits_of_branches(coin_of_texts: Engine, tmp_path: Path) -> None:
    root = coin_of_texts.prompt(TEXTS[0])
    edits = [
        Edit("blocks.1.attn.hook_z", "zero", positions=[2, 4], heads=[3]),
        Edit("S", "add", torch.ones(128), layers=[2], positions=slice(3, None)),
        Edit("S", "zero", layers=[1], positions=slice(1, 4)),
    ]
    (edited,) = root.fork(edits=edits)
    coin_of_texts.replay([root, edited], sites="S", edits=[Edit("T", "zero", layers=[0])]).save(tmp_path / "d")
    code, out, _ = run("inspect", tmp_path / "d")
    lines = [" ".join(line.split()) for line in out.splitlines() if line.startswith("edit")]
    assert code == 0 and lines == [
        "edit of every example zero at T, all positions, layers [0]",
        "edit of text 1 set of shape [4, 32] at blocks.1.attn.o.hook_in, positions [2, 4], heads [3]",
        "edit of text 1 add of shape [128] at blocks.2.hook_in, positions 3 to the end",
        "edit of text 1 zero at blocks.1.hook_in, positions 1 to 3",
    ]


def test_the_command_that_verifies_says_all_that_it_needs() -> None:
    assert options.verify_command("d") == options.verify_command("d", device="cpu") == "replaylens verify d --all"
    said = options.verify_command("my dump", "org/m@main", "tasks.py:Own", "cuda", ["sae=a folder", "other=b"], "float32")
    given = ["--model", "org/m@main", "--task", "tasks.py:Own", "--device", "cuda", "--dtype", "float32"]
    assert shlex.split(said)[2:] == ["my dump", "--all", *given, "--features", "sae=a folder", "--features", "other=b"]


def test_a_branch_that_ended_is_not_continued(coin_of_texts: Engine) -> None:
    """Replaying it with max_new generates nothing after its end; one that has not ended goes on."""
    root = coin_of_texts.prompt("A coin's state is heads. Alice flips. What's the state? A:")
    (ended,), (cut,) = root.fork(), root.fork()
    ended.generate(12), cut.generate(1)
    assert ended.finish_reason == "eos" and cut.finish_reason is None
    again, longer = coin_of_texts.replay([ended, cut], max_new=3)
    assert again.tokens == ended.tokens and len(longer.tokens) > cut.length


# ---- edits -----------------------------------------------------------------------------------------------------------
# Dumps of edited runs: the plan holds the interventions, so these dumps resume, verify and diff like any other.

Planned = Callable[..., DumpPlan]


@pytest.fixture(scope="module")
def edits(engine: Engine) -> list[Edit]:
    torch.manual_seed(4)
    width = engine.config.d_model
    return [
        Edit("S", "add", torch.randn(width), positions=slice(-3, None), layers=[1], factor=2.0),
        Edit("blocks.0.mlp.hook_out", "project_out", torch.randn(2, width), positions=[2, 4]),
        Edit("blocks.1.attn.hook_out", "zero", positions=-1),
    ]


@pytest.fixture(scope="module")
def edited(engine: Engine, planned: Planned, edits: list[Edit], tmp_path_factory: pytest.TempPathFactory) -> Dump:
    dump = written(engine, planned(edits=edits), tmp_path_factory.mktemp("edited") / "d", batch=3)
    return dump


def test_edits_change_the_dump_and_its_plan_says_so(edited: Dump, reference: Dump) -> None:
    assert edited.accepted_digest != reference.accepted_digest
    remarks = diff(edited, reference).remarks
    assert any("other interventions" in line for line in remarks)


def test_it_is_verified_from_its_own_plan(engine: Engine, edited: Dump) -> None:
    opened = Dump.open(edited.url)
    assert opened.manifest.plan == edited.manifest.plan and len(opened.manifest.plan.edits) == 3
    assert verify(edited.url, engine, sample="all").status == VERIFIED


def test_rejected_paths_are_recomputed_under_the_edits(
    engine: Engine, model: Decoder, tokenizer: WordTokenizer, planned: Planned, edits: list[Edit], tmp_path: Path
) -> None:
    """A verifier without that drafter takes rejected paths from the dump. Edits before the end of the prompt affect them."""
    dump = written(engine, planned(edits=edits, drafter="model", window=5, examples=4), tmp_path)
    assert dump.manifest.accepted_rows < dump.manifest.rows, "the test needs rejected rows"
    verdict = verify(tmp_path, Engine(model, tokenizer), sample="all")
    assert verdict and verdict.rows == dump.manifest.rows and not verdict.notes, verdict


def test_a_saved_run_is_the_same_dump(engine: Engine, coin: AnyTask, edits: list[Edit], edited: Dump, tmp_path: Path) -> None:
    run = engine.replay(coin.examples(EXAMPLES), sites="STCZ", drafter="lens", max_new=NEW, edits=edits)
    assert isinstance(run, Run)
    assert run.save(tmp_path / "d", examples_per_shard=PER_SHARD).digest == edited.digest


def test_an_edited_run_without_the_last_stream_cannot_be_saved(
    engine: Engine, coin: AnyTask, edits: list[Edit], tmp_path: Path
) -> None:
    run = engine.replay(coin.examples(2), sites="T", drafter="lens", max_new=NEW, edits=edits)
    assert isinstance(run, Run)
    with pytest.raises(BadRequest, match="Capture S, too"):
        run.save(tmp_path / "d")


def test_edits_survive_json(edits: list[Edit]) -> None:
    for edit in edits:
        back = Edit.from_json(edit.to_json())
        assert back.to_json() == edit.to_json()
        assert (back.value is None) == (edit.value is None)
        assert edit.value is None or torch.equal(back.value, edit.value)
    with pytest.raises(BadEdit, match="Not an edit"):
        Edit.from_json({"site": "S"})


# ---- options ---------------------------------------------------------------------------------------------------------
# Every option of a command reaches the call that it stands for. What is called is replaced; whole calls are compared.


class Calls:
    """Stands for functions, and notes how they are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.made = monkeypatch, dict[str, tuple[tuple[Any, ...], dict[str, Any]]]()

    def replace(self, where: str, result: Any) -> None:
        name = where.rpartition(".")[2]

        def call(*given: Any, **options: Any) -> Any:
            self.made[name] = (given, options)
            return result

        self.monkeypatch.setattr(where, call)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def told(words: str) -> str:
    """The output of a command line that succeeds."""
    done = CliRunner().invoke(whole_app, shlex.split(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_options_of_probe(calls: Calls, tmp_path: Path) -> None:
    found = Report("question", [{"a": 1}], {}, {}, findings=["Found."], notes=["Note."])
    calls.replace("replaylens.probes.sweeps.sweep", found)
    calls.replace("replaylens.commands.probe._open", "the dump")
    calls.replace("replaylens.commands.probe.engine_for", "the engine")
    assert told("probe d --quiet") == "Found.\nNote.\n"
    usual: dict[str, Any] = {
        "sites": None, "positions": None, "estimators": ("logistic",), "split": "root", "engine": None, "resume": None,
        "jobs": 1,
        "backend": None, "progress": False, "folds": 5, "permutations": 99, "metric": "auto", "branches": "accepted",
        "controls": True, "code_length": False, "precision": "double", "device": "cpu", "seed": 0, "layers": None,
        "residualise": (),
    }  # fmt: skip
    assert calls.made == {"_open": (("d", True, None), {}), "sweep": (("the dump", ("state",)), usual)}
    said = told(
        f"probe d --label 'face, parity' --sites ST --layers 1,3 --positions 'step,\"text:a, b\",query-1'"
        f" --estimators ridge,logistic"
        f" --split depth:3 --folds 4 --permutations 19 --metric auroc --branches all --model m --task t"
        f" --no-controls --residualise"
        f" position,steps --code-length --precision single --device cuda"
        f" --dtype float32 --jobs 2 --backend loky --resume {tmp_path}/r --seed 7"
        f" --no-check --out {tmp_path}/o --json"
    )
    assert json.loads(said) == json.loads((tmp_path / "o" / "report.json").read_text()) and json.loads(said)["rows"] == [
        {"a": 1}
    ]
    other = {
        "sites": "ST", "positions": ("step", "text:a, b", "query-1"), "estimators": ("ridge", "logistic"), "split": "depth:3",
        "engine": "the engine", "resume": f"{tmp_path}/r", "jobs": 2, "backend": "loky", "progress": True, "folds": 4,
        "permutations": 19, "metric": "auroc", "branches": "all", "controls": False, "code_length": True, "precision": "single",
        "device": "cuda", "seed": 7, "layers": (1, 3), "residualise": ("position", "steps"),
    }  # fmt: skip
    assert calls.made["sweep"] == (("the dump", ("face", "parity")), other)
    assert calls.made["_open"] == (("d", False, "t"), {})
    assert calls.made["engine_for"] == (("the dump", "m", "cuda", "float32"), {})


@pytest.mark.parametrize("test", ["steer", "ablate", "interchange"])
def test_options_of_steer(calls: Calls, tmp_path: Path, test: str) -> None:
    calls.replace(f"replaylens.probes.causal.{test}", Report(test, [], {}, {}, findings=["Found."]))
    for where, result in {
        "commands.probe._open": "the dump", "commands.probe._unseen": ["prompts"],
        "commands.probe.engine_for": "its maker",
        "probes.probe.fit_probe": "a probe",
        "probes.probe.placebo_probes": ["placebo"],
        "probes.probe.LinearProbe.load": "a saved probe",
    }.items():  # fmt: skip
        calls.replace(f"replaylens.{where}", result)
    more = {"factor": 1.0} if test == "steer" else {}
    assert told(f"steer d --test {test}") == "Found.\n"
    assert calls.made["fit_probe"] == (
        ("the dump", "state"),
        {"site": "S", "layer": None, "position": "query", "estimator": "mass-mean"},
    )
    assert calls.made[test] == (
        ("its maker", "a probe", ["prompts"]),
        {"placebos": 8, "seed": 0, "untrained": ["placebo"], **more},
    )
    assert calls.made["_unseen"] == (("the dump", 100), {}) and calls.made["engine_for"] == (
        ("the dump", None, "cpu", None),
        {},
    )
    factor = "--factor 2.5" if test == "steer" else ""
    told(
        f"steer d --test {test} --label face --site T --layer 2 --position step --estimator ridge {factor} --n 9"
        f" --placebos 3"
        f" --model m --task t --device cuda --dtype float32 --seed 4 --no-check --out {tmp_path}/o"
    )
    more = {"factor": 2.5} if test == "steer" else {}
    assert calls.made["fit_probe"] == (
        ("the dump", "face"),
        {"site": "T", "layer": 2, "position": "step", "estimator": "ridge"},
    )
    assert calls.made[test] == (
        ("its maker", "a probe", ["prompts"]),
        {"placebos": 3, "seed": 4, "untrained": ["placebo"], **more},
    )
    assert calls.made["placebo_probes"] == (("the dump", "a probe"), {"count": 3, "seed": 4})
    assert calls.made["_open"] == (("d", False, "t"), {}) and calls.made["_unseen"] == (("the dump", 9), {})
    assert (
        calls.made["engine_for"][0] == ("the dump", "m", "cuda", "float32")
        and (tmp_path / "o" / "summary.txt").read_text() == "Found.\n"
    )
    del calls.made["fit_probe"]
    told(f"steer d --test {test} --probe {tmp_path}/p")
    assert calls.made[test][0] == ("its maker", "a saved probe", ["prompts"]) and "fit_probe" not in calls.made


IDLE = {
    "probe d --dtype banana": "--dtype has no effect without --model",
    "probe d --dtype float32 --folds 3": "--dtype has no effect without --model",
    "probe d --estimators ridge,lda --code-length": "--code-length has no effect with --estimators ridge,lda",
    "probe d --split length:3 --folds 4": "--folds has no effect with --split length:3",
    "steer d --test ablate --factor 2": "--factor has no effect with --test ablate",
    "steer d --probe p --layer 3": "--layer has no effect with --probe p",
    "steer d --probe p --estimator mass-mean": "--estimator has no effect with --probe p",
    "report PROBES --dtype banana": "--dtype has no effect without a dump",
    "report PROBES --verify 1": "--verify has no effect without a dump",
    "report PROBES --device cuda": "--device has no effect without a dump",
    "report d --verify 0 --features x=y": "--features has no effect with --verify 0",
    "reproduce --list --json": "--json has no effect with --list",
    "reproduce induction --list": "has no effect with --list",
    "dump --out OUT --text x": "--text has no effect without --texts",
    "resample --out OUT --prompt A --keep all": "--keep has no effect without --sites",
}


@pytest.mark.parametrize("line", IDLE)
def test_options_without_an_effect_are_refused(line: str, calls: Calls, tmp_path: Path) -> None:
    """Exit code 2 and one sentence, before the dump is opened or a model loaded."""
    calls.replace("replaylens.commands.probe._open", "the dump")
    if line.startswith("report d"):
        calls.replace("replaylens.commands.report._open", ("the dump", ()))
    Report("question", [{"a": 1}], {}, {}).save(tmp_path / "probes", figures=False)
    words = line.replace("PROBES", str(tmp_path / "probes")).replace("OUT", str(tmp_path / "out"))
    words += f" --out {tmp_path}/page.html" * line.startswith("report")
    done = CliRunner().invoke(whole_app, shlex.split(words))
    assert done.exit_code == 2 and IDLE[line] in done.stderr, (done.exit_code, done.stderr, done.exception)
    assert done.stderr.strip().endswith("or leave it out.") and not calls.made.keys() - {"_open"}


def test_options_of_resample(calls: Calls, tmp_path: Path) -> None:
    branch = SimpleNamespace()
    drawn = rollouts()
    drawn.plan.to_json = dict  # type: ignore[method-assign]
    seen: list[tuple[int, dict[str, Any]]] = []
    branch.resample = lambda n, **options: (seen.append((n, options)), drawn)[1]
    calls.replace("replaylens.engine.engine.Engine.load", "the engine")
    calls.replace("replaylens.rollouts.drawing.chain_of", nullcontext(branch))
    calls.replace("replaylens.commands.resample._write_dump", None)
    said = told(f"resample --out {tmp_path}/r --prompt 'A coin.' --quiet").splitlines()
    usual: dict[str, Any] = {
        "folder": tmp_path / "r", "progress": False, "at": None, "max_new": 64, "sites": None, "replace": None, "wave": None,
        "keep": ["sentences", "answer", "last"], "sampling": Sampling(temperature=1.0, seed=0), "answer": None,
    }  # fmt: skip
    assert seen == [(20, usual)] and calls.made["chain_of"] == (("the engine", "A coin.", ""), {})
    assert (
        calls.made["load"] == (("coin-plain",), {"device": "cpu", "dtype": None, "cache_tokens": None})
        and "_write_dump" not in calls.made
    )
    assert said == [
        "position\theads\ttails\tno answer\ttext", f"4\t0.000\t0.667\t0.333\t{SENTENCE[:60]!r}",
        "9\t1.000\t0.000\t0.000\t'Bob $waits$.'",
        "15\t0.667\t0.000\t0.333\t''", f"{tmp_path}/r: 9 rollouts, 0 rows kept", str(drawn.identifier),
    ]  # fmt: skip
    seen.clear()
    out = told(
        f"resample --out {tmp_path}/r --prompt 'A coin.' --chain ' It turns.' --model m --device cuda"
        f" --dtype float32 --at 3,5 --n 7"
        f" --max-new 9"
        f" --temperature 0.5 --seed 3 --choice ' a' --choice ' b' --after ' So' --replace ' No.' --sites S"
        f" --keep fork,-2 --wave 4"
        f" --cache-tokens 64 --dump {tmp_path}/d --json"
    )
    other = {
        "folder": tmp_path / "r", "progress": True, "at": [3, 5], "max_new": 9, "sites": "S", "replace": " No.", "wave": 4,
        "keep": ["fork", -2], "sampling": Sampling(temperature=0.5, seed=3), "answer": Answer.choices([" a", " b"],
        after=" So"),
    }  # fmt: skip
    assert seen == [(7, other)] and calls.made["chain_of"] == (("the engine", "A coin.", " It turns."), {})
    assert calls.made["load"] == (("m",), {"device": "cuda", "dtype": "float32", "cache_tokens": 64})
    assert calls.made["_write_dump"] == (("the engine", drawn, f"{tmp_path}/d", True), {})
    counts = drawn.outcomes()
    facts = {
        "path": f"{tmp_path}/r",
        "digest": drawn.digest,
        "identifier": str(drawn.identifier),
        "rollouts": 9,
        "positions": [4, 9, 15],
        "outcomes": counts.outcomes,
    }
    assert json.loads(out) == facts | {
        "counts": counts.counts.tolist(),
        "shares": counts.shares.tolist(),
        "texts": counts.texts,
    }
    told(f"resample --out {tmp_path}/r --prompt x --answer 'is (.*)' --at sentences --quiet")
    assert (seen[-1][1]["answer"], seen[-1][1]["at"]) == (Answer.regex("is (.*)"), "sentences")


def test_options_of_replay(calls: Calls) -> None:
    engine = SimpleNamespace(sites=SimpleNamespace(per_layer=lambda letter: [f"{letter}0", f"{letter}1"]))
    seen: list[tuple[Any, dict[str, Any]]] = []
    engine.replay = lambda examples, **options: (seen.append((examples, options)), Run(engine, [], ReplayOptions()))[1]  # type: ignore[arg-type]
    calls.replace("replaylens.engine.engine.Engine.load", engine)
    assert told("replay --quiet") == "0 examples, nan% correct, nothing drafted\n"
    usual = {
        "drafter": "lens",
        "window": None,
        "sampling": Sampling(),
        "max_new": None,
        "batch": 32,
        "sites": ["S1"],
        "progress": False,
    }
    assert seen == [(tasks.get("coin")().examples(3), usual)]
    assert calls.made["load"] == (("coin-plain",), {"device": "cpu", "dtype": None, "draft_model": None, "record": False})
    words = "replay --task counts --knob people=2 --n 2 --model m --device cuda --dtype float16"
    words += " --drafter model --draft-model d --window 3"
    out = told(f"{words} --temperature 0.5 --seed 4 --max-new 8 --batch 5 --json")
    assert json.loads(out)["examples"] == [] and json.loads(out)["acceptance"] is None
    other = {"drafter": "model", "window": 3, "sampling": Sampling(temperature=0.5, seed=4), "max_new": 8, "batch": 5}
    assert seen[1] == (tasks.get("counts")(people=2).examples(2), other | {"sites": ["S1"], "progress": True})
    assert calls.made["load"] == (("m",), {"device": "cuda", "dtype": "float16", "draft_model": "d", "record": False})


def test_options_of_dump(calls: Calls, tmp_path: Path) -> None:
    calls.replace(
        "replaylens.engine.engine.Engine.load", engine := SimpleNamespace(texts=lambda *given, **options: (given, options))
    )
    calls.replace("replaylens.dumps.maker.make_plan", "the plan")
    calls.replace("replaylens.dumps.maker.write_dump", None)
    calls.replace("replaylens.commands.dump.encoders", {"encoders": 1})
    said = told(f"dump --out {tmp_path}/d --quiet")
    assert said == f"no --task given: examples of coin\n{tmp_path}/d: this part is done; the dump is not finished yet\n"
    own, unasked = signature(make_plan).parameters, {"edits", "top_k", "targets", "full"}
    usual: dict[str, Any] = {name: own[name].default for name in (*PlanKeywords.__annotations__, "keep") if name not in unasked}
    usual |= {"sampling": Sampling(), "features": {"encoders": 1}}
    assert calls.made["make_plan"] == ((engine, tasks.get("coin")(), 100), usual)
    how = {"part": (0, 1), "writers": 1, "batch": 32, "resume": False, "progress": False}
    assert calls.made["write_dump"] == ((engine, "the plan", f"{tmp_path}/d"), how) and calls.made["encoders"] == ((None,), {})
    assert calls.made["load"] == (("coin-plain",), {"device": "cpu", "dtype": None, "draft_model": None})
    out = told(
        f"dump --out {tmp_path}/d --task counts --knob people=2 --n 5 --model m --device cuda --sites S"
        f" --drafter model --draft-model"
        f" d --window 3 --positions query --dtype float32 --stored-dtype float16"
        f" --no-rejected --no-probabilities --features f --keep 9"
        f" --temperature 0.5"
        f" --seed 4 --max-new 8 --shard-examples 6 --batch 7 --shard 2/3 --writers 2 --json"
    )
    assert json.loads(out) == {"path": f"{tmp_path}/d", "finished": False}
    other = {
        "sites": "S", "drafter": "model", "window": 3, "positions": "query", "stored_dtype": "float16", "rejected": False,
        "probabilities": False, "max_new": 8, "examples_per_shard": 6, "sampling": Sampling(temperature=0.5, seed=4),
        "features": {"encoders": 1}, "keep": 9,
    }  # fmt: skip
    assert calls.made["make_plan"] == ((engine, tasks.get("counts")(people=2), 5), other)
    how = {"part": (2, 3), "writers": 2, "batch": 7, "resume": False, "progress": True}
    assert calls.made["write_dump"][1] == how and calls.made["encoders"] == ((["f"],), {})
    assert calls.made["load"] == (("m",), {"device": "cuda", "dtype": "float32", "draft_model": "d"})
    engine.texts = lambda *given, **options: [given, options]
    for n, count in (("", 2), ("--n 1", 1), ("--n 9", 2)):
        told(f"dump --out {tmp_path}/d --texts t.jsonl --text said --label 'a, b' --label c {n} --quiet")
        given = [("t.jsonl",), {"text": "said", "labels": ["a", "b", "c"]}]
        assert calls.made["make_plan"][0] == (engine, given, count)


def test_options_of_verify_and_diff(calls: Calls, reference: Dump) -> None:
    calls.replace("replaylens.engine.engine.Engine.load", "the engine")
    calls.replace("replaylens.commands.dump.encoders", {"encoders": 1})
    calls.replace("replaylens.commands.dump.know_task", None)
    calls.replace("replaylens.dumps.verify.verify", Verification(VERIFIED))
    calls.replace("replaylens.dumps.verify.diff", Comparison(None, (), ("portable-1", "portable-1")))
    assert told(f"verify {reference.url} --model m --quiet").startswith("verified")
    usual = {"progress": False, "sample": "all", "seed": 0, "batch": 32, "features": {"encoders": 1}}
    assert calls.made["verify"] == ((reference.url, "the engine"), usual)
    told(f"verify {reference.url} --model m --device cuda --sample 7 --task t --features f --seed 5 --batch 3")
    other = {"progress": True, "sample": 7, "seed": 5, "batch": 3, "features": {"encoders": 1}}
    assert calls.made["verify"] == ((reference.url, "the engine"), other) and calls.made["know_task"] == (
        ("t", reference.url),
        {},
    )
    assert calls.made["load"] == (("m",), {"device": "cuda", "dtype": "float32"}), "the arithmetic of the dump"
    told(f"verify {reference.url} --model m --device cuda --dtype bfloat16 --features f")
    assert calls.made["load"][1]["dtype"] == "bfloat16" and calls.made["encoders"] == ((["f"],), {})
    for given, wanted in (("0.25", 0.25), ("25%", 0.25), ("all", "all"), ("12", 12)):
        told(f"verify {reference.url} --model m --sample {given}")
        assert calls.made["verify"][1]["sample"] == wanted and type(calls.made["verify"][1]["sample"]) is type(wanted)
    told("diff a b")
    assert calls.made["diff"] == (("a", "b"), {"accepted": False, "progress": True})
    assert json.loads(told("diff a b --accepted --quiet --json"))["same"] is True
    assert calls.made["diff"] == (("a", "b"), {"accepted": True, "progress": False})
