"""Waves on disk: killed and resumed gives the same digest; damage is found; another plan is refused."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import VERIFIED, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadFile,
    BadRequest,
    BadTexts,
    ClusterFailed,
    DumpWriteFailed,
    FingerprintMismatch,
    PlanMismatch,
    Unsealed,
)
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.extras import cluster
from replaylens.extras.cluster import resample_on_cluster
from replaylens.rollouts import rollouts as folder
from replaylens.rollouts.drawing import plan_rollouts
from replaylens.rollouts.plan import Answer
from replaylens.rollouts.rollouts import Rollouts, WaveFolder
from replaylens.tasks.tokenizer import WordTokenizer
from tests.dumps.fake_ray import FakeRay
from tests.toy_model import engine

HOT = Sampling(temperature=1.2, seed=5, ignore_eos=True)
ANSWER = Answer.regex(r"\b(1\d)\b")


def path() -> Branch:
    return engine().prompt([1, 2, 3]).force([4, 5, 6, 7])


def drawn(branch: Branch, folder: Path | None = None, n: int = 6, wave: int | None = 4) -> Rollouts:
    return branch.resample(
        n, at=[4, 6], sampling=HOT, max_new=6, answer=ANSWER, sites="S", keep=["fork", 0], wave=wave, folder=folder
    )


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    return drawn(path())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what was drawn, to copy and to damage."""
    folder = tmp_path_factory.mktemp("whole")
    drawn(path(), folder)
    return folder


def test_a_folder_has_what_was_drawn(tmp_path: Path, reference: Rollouts) -> None:
    found = drawn(path(), tmp_path / "new" / "folder")
    loaded = Rollouts.load(tmp_path / "new" / "folder")
    assert found.digest == loaded.digest == reference.digest
    assert loaded.plan == reference.plan and loaded.frame.equals(reference.frame) and loaded.index.equals(reference.index)
    for site in reference.states:
        assert torch.equal(loaded.states[site], reference.states[site])
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [
        "plan.json",
        *(f"wave-0000{i}.{kind}" for i in range(3) for kind in ("json", "safetensors")),
    ]


def test_a_huge_plan_is_not_enumerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished follows from what the folder holds, not from a look for every wave that the plan has."""
    plan, _ = plan_rollouts(path(), 6, at=[4, 6], sampling=HOT, max_new=6)
    files = folder.WaveFolder.create(tmp_path, dataclasses.replace(plan, n=10**12), 4)
    asked = list[int]()

    def counted(self: folder.WaveFolder, number: int, kind: str) -> Path:
        asked.append(number)
        assert len(asked) < 100, "every wave is looked for"
        return tmp_path / f"wave-{number:05d}.{kind}"

    monkeypatch.setattr(folder.WaveFolder, "_file", counted)
    for name in ("wave-00003.json", "wave-123456.json", "wave-00004.safetensors", "wave-0000005.json"):
        (tmp_path / name).touch()
    (tmp_path / f"wave-{files.num_waves:05d}.json").touch()  # one more than the plan has
    with pytest.raises(BadFile, match=f"has {5 * 10**11 - 2} unfinished waves of {5 * 10**11}"):
        Rollouts.load(tmp_path)


def test_resumed_in_the_middle(tmp_path: Path, reference: Rollouts) -> None:
    """A stream that is left in its first wave, while the second one was drawn: the rest is drawn by the next call, which draws
    nothing twice."""
    stream = path().stream_rollouts(
        6, at=[4, 6], sampling=HOT, max_new=6, answer=ANSWER, sites="S", keep=["fork", 0], wave=4, folder=tmp_path
    )
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(BadFile, match="1 unfinished waves"):
        Rollouts.load(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    left = [f"wave-00002.json.{7:032x}.part", f"plan.json.{8:032x}.part"]  # processes were killed while they wrote
    for name in (*left, "mine.part"):
        (tmp_path / name).write_bytes(b"{")
    assert drawn(path(), tmp_path, wave=2).digest == reference.digest, "the folder keeps its size of waves"
    assert [file.name for file in tmp_path.glob("*.part")] == ["mine.part"], "only what is ours is removed"
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


SCRIPT = """
import sys
from tests.rollouts.test_folder import drawn, path
from pathlib import Path
from replaylens.rollouts.rollouts import WaveFolder
write = WaveFolder.write
def slow(self, number, rollouts):
    write(self, number, rollouts)
    print(number, flush=True)
    sys.stdin.readline()
WaveFolder.write = slow
drawn(path(), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, reference: Rollouts) -> None:
    """SIGKILL on a process between two waves."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        os.kill(process.pid, signal.SIGKILL)
    assert (tmp_path / "wave-00000.json").exists() and not (tmp_path / "wave-00001.json").exists()
    assert drawn(path(), tmp_path).digest == reference.digest


def test_damage(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    rows = tmp_path / "wave-00001.safetensors"
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    with pytest.raises(BadFile, match="was changed"):
        drawn(path(), tmp_path)
    file = tmp_path / "wave-00000.json"
    raw = json.loads(file.read_text())
    for wrong in ({**raw, "rollouts": raw["rollouts"][1:]}, {**raw, "more": 1}, [], {"rollouts": [{}], "sha256": None}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(BadFile):
            Rollouts.load(tmp_path)


def test_missing_rows(tmp_path: Path, reference: Rollouts) -> None:
    """Rows that were deleted: the message says what to do, and doing it works."""
    found = drawn(path(), tmp_path)
    (tmp_path / "wave-00001.safetensors").unlink()
    text = r"wave-00001\.safetensors is missing\. Delete wave-00001\.json, and resume to draw the wave again"
    for look in (lambda: drawn(path(), tmp_path), lambda: Rollouts.load(tmp_path), lambda: found.states["blocks.0.hook_in"]):
        with pytest.raises(BadFile, match=text):
            look()
    (tmp_path / "wave-00001.json").unlink()
    assert drawn(path(), tmp_path).digest == reference.digest


@pytest.mark.parametrize(
    "change", ["outcome", "tokens", "seed", "position", "order", "rows", "plan", "fewer", "none", "longer"]
)
def test_changed_records(whole: Path, tmp_path: Path, change: str) -> None:
    """Whatever was changed in the file of a wave, it is refused, also if the digest was made anew for what the plan knows."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "wave-00000.json"
    raw = json.loads(file.read_text())
    first = raw["rollouts"][0]
    match change:
        case "outcome":
            first["outcome"] = "other"
        case "tokens":
            first["tokens"][0] = -7
        case "order":
            raw["rollouts"].reverse()
        case "rows":
            raw["sha256"] = None
        case "plan":
            del raw["plan"]
        case "none" | "longer":
            first["tokens"] = [] if change == "none" else [9] * 7
            raw["digest"] = folder._digest(raw["rollouts"], raw["sha256"], raw["plan"])
        case "fewer":
            raw["rollouts"].pop()
            raw["digest"] = folder._digest(raw["rollouts"], raw["sha256"], raw["plan"])
        case _:
            first[change] += 1
            raw["digest"] = folder._digest(raw["rollouts"], raw["sha256"], raw["plan"])
    file.write_text(json.dumps(raw))
    with pytest.raises(BadFile, match=r"was changed|other rollouts|has 3 rollouts instead of 4|a rollout of [07] tokens"):
        Rollouts.load(tmp_path)


def test_other_folders(tmp_path: Path) -> None:
    drawn(path(), tmp_path / "a")
    with pytest.raises(PlanMismatch, match="n"):
        drawn(path(), tmp_path / "a", n=5)
    with pytest.raises(PlanMismatch, match="tokens"):
        drawn(engine().prompt([1, 2, 9]).force([4, 5, 6, 7]), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(BadFile, match=r"not empty, and holds no rollouts but mine\.txt"):
        drawn(path(), tmp_path / "b")
    for content in ("{", "[]", '{"wave": 0}', '{"wave": 2, "plan": {}}'):
        (tmp_path / "b" / "plan.json").write_text(content)
        for look in (lambda: Rollouts.load(tmp_path / "b"), lambda: drawn(path(), tmp_path / "b")):
            with pytest.raises(BadFile, match=r"plan\.json is (not JSON|invalid|damaged)"):
                look()
    with pytest.raises(BadFile):
        Rollouts.load(tmp_path / "missing")


def test_what_is_written_comes_back_as_it_is_read(tmp_path: Path) -> None:
    streamed = list(
        path().stream_rollouts(6, at=[4, 6], sampling=HOT, max_new=6, answer=ANSWER, sites="S", wave=4, folder=tmp_path)
    )
    files = folder.WaveFolder.open(tmp_path)
    read = [each for number in range(files.num_waves) for each in files.read(number)]
    assert [each.to_json() for each in streamed] == [each.to_json() for each in read] and len(streamed) == 12
    for own, other in zip(streamed, read, strict=True):
        assert {type(value) for value in vars(own).values()} == {type(value) for value in vars(other).values()}
        assert all(torch.equal(own.states[site], other.states[site]) for site in other.states)


def first_token(text: str) -> str | None:
    return text.split()[0] if text.split() else None


def last_token(text: str) -> str | None:
    return text.split()[-1] if text.split() else None


def read_by(answer: Answer | None, folder: Path, n: int = 4) -> Rollouts:
    return path().resample(n, sampling=HOT, max_new=4, answer=answer, wave=2, folder=folder)


def test_a_folder_with_a_function_goes_on(tmp_path: Path) -> None:
    """The file holds the function's name. The same call goes on; another function, or none, is another plan."""
    answer = Answer.function(first_token)
    stream = path().stream_rollouts(4, sampling=HOT, max_new=4, answer=answer, wave=2, folder=tmp_path)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    whole = path().resample(4, sampling=HOT, max_new=4, answer=answer)
    for _ in range(2):
        found = read_by(answer, tmp_path)
        assert found.digest == whole.digest and found.plan == whole.plan
        assert None not in found.frame["outcome"].tolist()
    assert Rollouts.load(tmp_path).outcomes().outcomes == whole.outcomes().outcomes
    for other in (Answer.function(last_token), Answer.function(first_token, stop=True), Answer.regex("1"), None):
        with pytest.raises(PlanMismatch, match="another plan: answer="):
            read_by(other, tmp_path)
    with pytest.raises(PlanMismatch, match=r"another plan: n=\d+, not \d+\. Use its options"):
        read_by(answer, tmp_path, n=3)


def test_a_folder_without_a_function_is_not_taken_for_one_with(tmp_path: Path) -> None:
    read_by(None, tmp_path)
    with pytest.raises(PlanMismatch, match="another plan: answer="):
        read_by(Answer.function(first_token), tmp_path)


def test_threads_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the middle of writing one file: both finish, and nothing else is left."""
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(folder.os, "fsync", lambda descriptor: both.wait())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: folder._write(tmp_path / "a.json", b"{}"), range(2)))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.json", b"{}")]


def test_a_file_that_cannot_be_written_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(folder.os, "fsync", full)
    with pytest.raises(DumpWriteFailed, match=r"a\.json: No space left.*Finished waves are kept"):
        folder._write(tmp_path / "a.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_the_part_of_a_live_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process starts on the folder while a part is written."""
    plan, _ = plan_rollouts(path(), 6, [4, 6], HOT, 6)
    seen = list[list[Path]]()

    def another(descriptor: int) -> None:
        monkeypatch.undo()
        folder._remove_parts(tmp_path)
        seen.append(list(tmp_path.glob("*.part")))

    monkeypatch.setattr(folder.os, "fsync", another)
    folder.WaveFolder.create(tmp_path, plan, 3)
    assert len(seen[0]) == 1 and [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_part_that_was_removed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared disk whose locks do not reach other machines, one of them may take the part for a dead one's."""

    def another(descriptor: int) -> None:
        monkeypatch.undo()
        next(tmp_path.glob("*.part")).unlink()

    monkeypatch.setattr(folder.os, "fsync", another)
    folder._write(tmp_path / "a.json", b"{}")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.json", b"{}")]


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing"])
def test_impossible_folders(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "a"
    if kind == "a link to nothing":
        target.symlink_to(tmp_path / "nothing")
    else:
        target.write_text("mine")
    with pytest.raises(BadRequest, match="Cannot write to"):
        drawn(path(), target / "b" if kind == "below a file" else target)


def test_a_link_to_a_folder(tmp_path: Path, reference: Rollouts) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert drawn(path(), tmp_path / "link").digest == Rollouts.load(tmp_path / "real").digest == reference.digest


@pytest.mark.parametrize("name", ["movie.part", ".hidden", "wave-00000.safetensors", "sub"])
def test_a_folder_of_somebody_else(tmp_path: Path, name: str) -> None:
    """Whatever the names are, nothing is written beside files that are not ours."""
    (tmp_path / "sub").mkdir() if name == "sub" else (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(BadFile, match=name) as caught:
        drawn(path(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and "elete" not in str(caught.value)


def test_a_changed_plan(whole: Path, tmp_path: Path, reference: Rollouts) -> None:
    """Two other tokens of the prompt: no rollout shows it, so the plan has its own hash."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "plan.json"
    raw = json.loads(file.read_text())
    raw["plan"]["tokens"][:2] = [8, 9]
    file.write_text(json.dumps(raw))
    for look in (lambda: Rollouts.load(tmp_path), lambda: drawn(path(), tmp_path)):
        with pytest.raises(BadFile, match=r"plan\.json was changed"):
            look()
    raw["wave"] += 1
    del raw["sha256"]
    file.write_text(json.dumps(raw))
    with pytest.warns(Unsealed), pytest.raises(BadFile, match="drawn for another plan"):
        Rollouts.load(tmp_path)  # who removes the hash meets that of the waves


@pytest.mark.parametrize(
    "answer", [{}, {"regex": "("}, {"regex": "(", "stop": True}, {"regex": 3, "stop": True}, {"choices": [1]}]
)
def test_a_damaged_answer(whole: Path, tmp_path: Path, answer: object) -> None:
    """Its hash is made anew, so that only what it says is wrong."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "plan.json"
    raw = json.loads(file.read_text())
    raw["plan"]["answer"] = answer
    file.write_bytes(folder._plan_file(raw["plan"], raw["wave"]))
    for look in (lambda: Rollouts.load(tmp_path), lambda: drawn(path(), tmp_path)):
        with pytest.raises(BadFile, match=r"plan\.json is damaged: Invalid (answer|regular expression)"):
            look()


def test_a_plan_of_another_folder(tmp_path: Path) -> None:
    """Its hash is right, and positions, numbers and seeds are those of the waves; the prompt is not."""
    drawn(path(), tmp_path / "a")
    drawn(engine().prompt([1, 2, 9]).force([4, 5, 6, 7]), tmp_path / "b")
    (tmp_path / "a" / "plan.json").write_bytes((tmp_path / "b" / "plan.json").read_bytes())
    with pytest.raises(BadFile, match="drawn for another plan"):
        Rollouts.load(tmp_path / "a")


def test_a_folder_of_an_older_version(whole: Path, tmp_path: Path, reference: Rollouts) -> None:
    """It has no hash of the plan: reading it warns, and the call that made it adds the hash."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "plan.json", *tmp_path.glob("wave-*.json")):
        raw = json.loads(file.read_text())
        if "rollouts" in raw:
            raw["digest"] = folder._digest(raw["rollouts"], raw["sha256"], None)
            del raw["plan"]
        else:
            del raw["sha256"]
        file.write_text(json.dumps(raw))
    with pytest.warns(Unsealed, match="no SHA-256.*Resume"):
        assert Rollouts.load(tmp_path).digest == reference.digest
    with warnings.catch_warnings():
        warnings.simplefilter("error", Unsealed)
        assert drawn(path(), tmp_path).digest == Rollouts.load(tmp_path).digest == reference.digest


def test_a_folder_that_another_worker_starts_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan appears between two looks: the folder is shared, with the size of waves that it has by then."""
    plan, _ = plan_rollouts(path(), 6, [4, 6], HOT, 6)
    look = Path.iterdir

    def late(self: Path) -> Iterator[Path]:
        monkeypatch.setattr(Path, "iterdir", look)
        folder.WaveFolder.create(tmp_path, plan, 3)
        return look(self)

    monkeypatch.setattr(Path, "iterdir", late)
    assert folder.WaveFolder.create(tmp_path, plan, 5).wave == 3


def test_threads_share_a_folder(tmp_path: Path, reference: Rollouts) -> None:
    branch = path()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: drawn(branch, tmp_path).digest, range(3)))
    assert {*found, Rollouts.load(tmp_path).digest} == {reference.digest}
    assert not list(tmp_path.glob("*.part"))


# ---- dumps -----------------------------------------------------------------------------------------------------------
# Rollouts as texts: a dump of their kept rows verifies from its folder, and holds the rows that were captured.


@pytest.mark.slow
@pytest.mark.parametrize("edited", [False, True])
def test_a_dump_of_rollouts(tmp_path: Path, edited: bool) -> None:
    subject = Engine.load("coin-plain")
    edits = [Edit("S", "zero", positions=[2], layers=[1])] if edited else []
    branch = subject.prompt("A coin's state is heads.", edits=edits).force(" Alice flips. Bob flips. What's the state? A:")
    options = {"sites": "S", "keep": ["fork", "sentences", "answer"], "replace": " Carol flips." if edited else None}
    found = branch.resample(4, at="sentences", max_new=10, answer=Answer.regex("heads|tails"), **options)  # type: ignore[arg-type]
    task = subject.texts(found)
    plan = make_plan(subject, task, len(task), sites="S", positions="label:place", rejected=False)
    dump = write_dump(subject, plan, tmp_path / "dump")
    assert dump is not None and verify(dump.url, Engine.load("coin-plain"), sample=1.0).status == VERIFIED
    frame = dump.to_pandas()
    kept = found.index.drop_duplicates(["position", "number", "token"])
    assert len(frame) == len(kept)
    assert frame["position"].tolist() == kept["token"].tolist() and frame["fork"].tolist() == kept["position"].tolist()
    assert frame["rollout"].tolist() == kept["number"].tolist()
    rows = found.states["blocks.2.hook_in"][kept.index.tolist()]
    assert torch.equal(dump.to_torch("blocks.2.hook_in"), rows)
    first = frame[frame["place"] == "fork"].groupby("fork")["outcome"].count()
    assert first.sum() == sum(each.outcome is not None for each in found)


def test_a_replay_of_rollouts(served: Engine) -> None:
    branch = served.prompt("A coin's state is heads.").force(" Alice flips.")
    found = branch.resample(3, at=[3, 6, 9], max_new=4)
    run = served.replay(found, sites="S")
    assert [result.tokens for result in run] == [[*branch.tokens[: each.position], *each.tokens] for each in found]
    for result, each in zip(run, found, strict=True):  # the chain is no prompt; of a fork within the prompt, what it keeps is
        prompt = min(branch.root_length, each.position)
        assert result.num_prompt == prompt and result.example.prompt == served.text.decode(branch.tokens[:prompt])
        assert result.example.completion == served.text.decode(result.tokens[prompt:])
    hot = Sampling(temperature=1.0, ignore_eos=True)
    (text,) = served.texts(branch.resample(1, max_new=3, sites="S", keep=["last", "all", 0], sampling=hot)).knobs.texts
    assert text["spans"]["place"] == [[9, 10, "all+0"], [10, 11, "all"], [11, 12, "last+all"]]
    with pytest.raises(BadTexts, match="labels of their own"):
        served.replay(found, labels={"x": [1] * 6})


def test_one_dump_of_several_chains(served: Engine, tmp_path: Path) -> None:
    """Rows of all chains lie in one dump, with the number of their chain, and have the bits that were captured."""
    options = {"max_new": 6, "sites": "S", "keep": ["fork", "last"]}
    chains = [
        served.prompt(f"A coin's state is {face}.").force(" Alice flips. Bob flips.").resample(2, at="sentences", **options)  # type: ignore[arg-type]
        for face in ("heads", "tails", "heads")
    ]
    task = served.texts(chains)
    dump = write_dump(
        served, make_plan(served, task, len(task), sites="S", positions="label:place", rejected=False), tmp_path / "dump"
    )
    assert dump is not None and verify(dump.url, served, sample="all").status == VERIFIED
    frame = dump.to_pandas()
    assert frame["chain"].tolist() == [number for number, found in enumerate(chains) for _ in range(len(found.index))]
    rows = torch.cat([found.states["blocks.1.hook_in"] for found in chains])
    assert torch.equal(dump.to_torch("blocks.1.hook_in"), rows)
    with pytest.raises(BadTexts, match="separate calls"):
        served.texts([chains[0], "A coin's state is heads."])


# ---- command ---------------------------------------------------------------------------------------------------------
# `replaylens resample`: one command from a chain to counts, rows and a dump that verifies.

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
    assert str(mine.identifier) in done.output and Rollouts.load(out).digest == mine.digest
    checked = CliRunner().invoke(app, ["verify", done.output.split("rows kept\n")[1].split()[0], "--in", str(out), "--quiet"])
    assert checked.exit_code == 0, "what is printed is what `verify` takes"
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


@pytest.mark.parametrize("words", [("report", "--out", "page.html"), ("inspect",), ("diff", "nothing")])
def test_a_folder_of_rollouts_is_no_dump(tmp_path: Path, words: tuple[str, ...], rollouts: Path) -> None:
    """Finished or not, rollouts are named as such; an unfinished dump still is one (test_resume.py)."""
    for given in (rollouts, tmp_path):
        shutil.copyfile(rollouts / "plan.json", tmp_path / "plan.json")  # no wave is finished
        done = CliRunner().invoke(app, [words[0], str(given), *words[1:]])
        assert done.exit_code == 2 and "UnfinishedDump" not in done.output, done.output
        assert "holds rollouts, not a dump" in done.output and "--dump" in done.output


def test_unfinished_rollouts_are_not_verified(tmp_path: Path, rollouts: Path) -> None:
    shutil.copyfile(rollouts / "plan.json", tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 1 and "unfinished waves" in done.output


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
        (("--prompt", PROMPT, "--at", "word"), "Unknown at 'word'"),
        (("--prompt", PROMPT, "--answer", "a", "--choice", "b"), "two ways"),
        (("--prompt", PROMPT, "--after", "b"), "--after"),
        (("--prompt", PROMPT, "--dump", "d"), "--dump writes"),
        (("--prompt", PROMPT, "--at", "sentences"), "there are none"),
        (("--file", "nowhere.jsonl"), "nowhere"),
        (("--chat", "nowhere.json"), "nowhere"),
        (("--prompt", "x", "--chat", "y"), "Give one of --prompt"),
        (("--prompt", PROMPT, "--sites", "S", "--keep", "first"), "--keep 'first'"),
        (("--prompt", PROMPT, "--keep", "first"), "--keep has no effect without --sites"),
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
    assert done.exit_code == 2 and done.stderr.startswith("BadRequest: ") and "is not a folder" in done.stderr


def test_a_line_that_is_no_chain(tmp_path: Path) -> None:
    file = tmp_path / "chains.jsonl"
    for line in ("[]", "{", '{"chain": "a"}', '{"prompt": "a", "chian": "b"}'):
        file.write_text(line)
        done = call("--file", str(file), "--out", str(tmp_path / "out"), "--quiet")
        assert done.exit_code == 2 and "Line 1" in done.output


# ---- cluster ---------------------------------------------------------------------------------------------------------
# Rollouts on a stand-in for Ray: the same digest on any number of workers, also when some die. `make cluster` starts Ray.

OPTIONS: dict[str, Any] = {
    "at": "sentences",
    "sampling": Sampling(temperature=1.0, seed=3),
    "max_new": 8,
    "answer": Answer.regex("heads|tails"),
    "sites": "S",
    "keep": ["fork", "last"],
    "wave": 4,
}
Dies = Callable[[int, str, tuple[Any, ...]], bool]


@pytest.fixture(scope="module")
def reference_of_cluster() -> Rollouts:
    """In this process, without waves."""
    return Engine.load("coin-plain").prompt(PROMPT).force(CHAIN).resample(7, **{**OPTIONS, "wave": None})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    """Replace Ray by a stand-in."""

    def install(dies: Dies = lambda *call: False) -> FakeRay:
        ray = FakeRay(2, dies)

        @contextmanager
        def connected(address: str) -> Iterator[FakeRay]:
            yield ray

        monkeypatch.setattr(cluster, "connected", connected)
        return ray

    return install


def drawn_of_cluster(folder: Path, **more: Any) -> Rollouts:
    return resample_on_cluster("coin-plain", folder, PROMPT, 7, chain=CHAIN, **{**OPTIONS, **more})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(fake: Any, reference_of_cluster: Rollouts, tmp_path: Path, workers: int) -> None:
    ray = fake()
    found = drawn_of_cluster(tmp_path, workers=workers)
    assert found.digest == reference_of_cluster.digest and ray.started == workers
    assert len(list(tmp_path.glob("wave-*.json"))) == 4


def test_dead_workers_are_replaced(fake: Any, reference_of_cluster: Rollouts, tmp_path: Path) -> None:
    """The first worker dies on its second wave."""
    written: list[int] = []

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        written.extend([actor] * (actor == 1 and method == "write"))
        return actor == 1 and len(written) > 1

    ray = fake(dies)
    assert drawn_of_cluster(tmp_path, workers=2).digest == reference_of_cluster.digest and ray.started == 3
    assert ray.killed == 3, "none outlives the call, and holds a place of the cluster"


def test_the_command_starts_one_cluster_for_all_chains(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one takes many seconds. `connected` within `connected` takes the one that runs."""
    fake()
    depth, starts, once = 0, 0, cluster.connected

    @contextmanager
    def counted(address: str) -> Iterator[Any]:
        nonlocal depth, starts
        starts, depth = starts + (depth == 0), depth + 1
        with once(address) as ray:
            yield ray
        depth -= 1

    monkeypatch.setattr(cluster, "connected", counted)
    (tmp_path / "chains.jsonl").write_text(
        "".join(json.dumps({"prompt": PROMPT, "chain": chain}) + "\n" for chain in (CHAIN, " Bob flips."))
    )
    given = ["resample", "--file", str(tmp_path / "chains.jsonl"), "--n", "3", "--max-new", "4", "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*given, "--workers", "2", "--quiet"])
    assert told.exit_code == 0 and len(list((tmp_path / "out").iterdir())) == 2, told.output
    assert (starts, depth) == (1, 0)


def test_a_wave_that_kills_every_worker(fake: Any, reference_of_cluster: Rollouts, tmp_path: Path) -> None:
    """It ends with a named error; the others are kept, and the next call goes on with them."""
    fake(lambda actor, method, args: method == "write" and args[1] == 2)
    with pytest.raises(ClusterFailed, match="Wave 2"):
        drawn_of_cluster(tmp_path, workers=1)
    fake()
    assert drawn_of_cluster(tmp_path, workers=2).digest == reference_of_cluster.digest


def test_other_workers_are_refused(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    created = WaveFolder.create

    def with_another_model(folder: Any, plan: Any, wave: int, made_by: Any) -> WaveFolder:
        from dataclasses import replace

        return created(folder, replace(plan, fingerprint="0" * 64), wave)

    monkeypatch.setattr(WaveFolder, "create", with_another_model)
    with pytest.raises(FingerprintMismatch):
        drawn_of_cluster(tmp_path)


def test_functions_are_not_sent(fake: Any, tmp_path: Path) -> None:
    fake()
    with pytest.raises(BadRequest, match="at cannot be sent"):
        drawn_of_cluster(tmp_path, at=lambda position, text: True)
    with pytest.raises(BadRequest, match="function"):
        drawn_of_cluster(tmp_path, answer=Answer.function(str.upper))
