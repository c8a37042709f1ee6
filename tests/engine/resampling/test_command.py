"""`replaylens resample`: one command from a chain to counts, rows and a dump that verifies."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replaylens.cli import app
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling.plan import Answer
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.tasks.tokenizer import WordTokenizer

PROMPT, CHAIN = "A coin's state is heads.", " Alice flips. Bob flips."
DRAWN = ("--at", "sentences", "--n", "3", "--max-new", "8", "--seed", "4", "--answer", "heads|tails", "--quiet")


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["resample", *words])


def test_from_a_chain_to_a_dump(tmp_path: Path) -> None:
    out, dump = str(tmp_path / "out"), str(tmp_path / "dump")
    words = ("--prompt", PROMPT, "--chain", CHAIN, *DRAWN, "--sites", "S", "--keep", "fork,sentences,-1", "--out", out)
    done = call(*words, "--dump", dump, "--wave", "2")
    assert done.exit_code == 0, done.output
    branch = Engine.load("coin-plain").prompt(PROMPT).force(CHAIN)
    mine = branch.resample(
        3,
        at="sentences",
        max_new=8,
        sampling=Sampling(temperature=1.0, seed=4),
        answer=Answer.regex("heads|tails"),
        sites="S",
        keep=["fork", "sentences", -1],
    )
    assert mine.digest in done.output and Rollouts.load(out).digest == mine.digest
    assert CliRunner().invoke(app, ["verify", dump, "--all", "--quiet"]).exit_code == 0
    again = call(*words, "--json")
    assert json.loads(again.output)["digest"] == mine.digest, "a finished folder is read"
    other = call(*words, "--temperature", "0.5")
    assert other.exit_code == 2 and "PlanMismatch" in other.output


def test_a_file_of_chains(tmp_path: Path) -> None:
    file = tmp_path / "chains.jsonl"
    tokens = Engine.load("coin-plain").tokens_of(PROMPT)
    file.write_text(json.dumps({"prompt": PROMPT, "chain": CHAIN}) + "\n\n" + json.dumps({"prompt": tokens, "chain": CHAIN}))
    kept = ("--sites", "S", "--dump", str(tmp_path / "dump"))
    done = call("--file", str(file), *DRAWN, "--out", str(tmp_path / "out"), "--json", *kept)
    assert done.exit_code == 0, done.output
    first, second = (json.loads(line) for line in done.output.splitlines()[:2])
    assert Dump.open(tmp_path / "dump").to_pandas()["chain"].unique().tolist() == [0, 1], "one dump for all chains"
    assert first["digest"] == second["digest"] and first["positions"] == [6, 9]
    assert (tmp_path / "out" / "00001" / "plan.json").exists()


def test_a_chat_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: Path) -> None:
    """Drawn after what the template writes; a tokenizer without one is named, and so is a file with something else."""
    file, out = tmp_path / "chat.json", tmp_path / "out"
    file.write_text(json.dumps([{"role": "user", "content": PROMPT}]))
    words = ("--chat", str(file), "--chain", CHAIN, *DRAWN, "--out", str(out))
    done = call(*words)
    assert done.exit_code == 2 and "WordTokenizer has no chat template" in done.output
    monkeypatch.setattr(WordTokenizer, "chat_template", "a template", raising=False)
    monkeypatch.setattr(WordTokenizer, "apply_chat_template", lambda _, chat, **__: chat[0]["content"], raising=False)
    done = call(*words)
    assert done.exit_code == 0 and Rollouts.load(out).digest == Rollouts.load(rollouts).digest, done.output
    for content, message in (('{"role": "user"}', "JSON list of messages"), ("[", "is not JSON"), ('["a"]', "JSON list")):
        file.write_text(content)
        done = call(*words)
        assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


@pytest.mark.parametrize("words", [("report", "--out", "page.html"), ("inspect",), ("verify", "--all")])
def test_a_folder_of_rollouts_is_no_dump(tmp_path: Path, words: tuple[str, ...], rollouts: Path) -> None:
    """Finished or not, rollouts are named as such; an unfinished dump still is one (test_resume.py)."""
    for folder in (rollouts, tmp_path):
        shutil.copyfile(rollouts / "plan.json", tmp_path / "plan.json")  # no wave is finished
        done = CliRunner().invoke(app, [words[0], str(folder), *words[1:]])
        assert done.exit_code == 2 and "UnfinishedDump" not in done.output, done.output
        assert "holds rollouts, not a dump" in done.output and "--dump" in done.output


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts") / "out"
    assert call("--prompt", PROMPT, "--chain", CHAIN, *DRAWN, "--out", str(folder)).exit_code == 0
    return folder


def test_choices_at_the_fork(tmp_path: Path) -> None:
    asked = ("--choice", " heads", "--choice", " tails", "--after", " What's the state? A:", "--max-new", "0", "--n", "1")
    done = call("--prompt", PROMPT, "--chain", CHAIN, "--at", "6,9", *asked, "--json", "--quiet", "--out", str(tmp_path / "o"))
    assert done.exit_code == 0, done.output
    assert [share[0] > 0.5 for share in json.loads(done.output)["shares"]] == [True, False]


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "Give one of --prompt"),
        (("--prompt", "x", "--file", "y"), "Give one of --prompt"),
        (("--prompt", PROMPT, "--at", "word"), "Invalid --at"),
        (("--prompt", PROMPT, "--answer", "a", "--choice", "b"), "two ways"),
        (("--prompt", PROMPT, "--after", "b"), "--after"),
        (("--prompt", PROMPT, "--dump", "d"), "--dump writes"),
        (("--prompt", PROMPT, "--at", "sentences"), "there are none"),
        (("--file", "nowhere.jsonl"), "nowhere"),
        (("--chat", "nowhere.json"), "nowhere"),
        (("--prompt", "x", "--chat", "y"), "Give one of --prompt"),
        (("--prompt", PROMPT, "--keep", "first"), "keep='first'"),
    ],
)
def test_bad_options(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = call(*words, "--out", str(tmp_path / "out"), "--quiet")
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of room is out of reach, as it is for a dump: once there is room, the same command goes on."""
    words = ("--prompt", PROMPT, "--n", "2", "--max-new", "2", "--quiet", "--out", str(tmp_path / "out"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = call(*words)
    assert done.exit_code == 3 and done.stderr.startswith("DumpWriteFailed: ") and "No space left" in done.stderr
    assert call(*words).exit_code == 0
    (tmp_path / "file").write_text("mine")
    done = call(*words[:-1], str(tmp_path / "file"))
    assert done.exit_code == 3 and done.stderr.startswith("DumpWriteFailed: ") and "File exists" in done.stderr


def test_a_line_that_is_no_chain(tmp_path: Path) -> None:
    file = tmp_path / "chains.jsonl"
    for line in ("[]", "{", '{"chain": "a"}', '{"prompt": "a", "chian": "b"}'):
        file.write_text(line)
        done = call("--file", str(file), "--out", str(tmp_path / "out"), "--quiet")
        assert done.exit_code == 2 and "Line 1" in done.output
