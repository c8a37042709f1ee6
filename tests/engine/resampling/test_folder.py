"""Waves on disk: killed and resumed gives the same digest; damage is found; another plan is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from replaylens.engine.errors import BadRollouts, DumpWriteFailed, PlanMismatch, UnsealedRollouts
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling import rollouts as folder
from replaylens.engine.resampling.drawing import plan_rollouts
from replaylens.engine.resampling.plan import Answer
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.serving.branch import Branch
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
    with pytest.raises(BadRollouts, match=f"has {5 * 10**11 - 2} unfinished waves of {5 * 10**11}"):
        Rollouts.load(tmp_path)


def test_resumed_in_the_middle(tmp_path: Path, reference: Rollouts) -> None:
    """A stream that is left after its second wave: the rest is drawn by the next call, which draws nothing twice."""
    stream = path().stream_rollouts(
        6, at=[4, 6], sampling=HOT, max_new=6, answer=ANSWER, sites="S", keep=["fork", 0], wave=4, folder=tmp_path
    )
    for _ in range(5):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(BadRollouts, match="1 unfinished waves"):
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
from tests.engine.resampling.test_folder import drawn, path
from pathlib import Path
from replaylens.engine.resampling.rollouts import WaveFolder
write = WaveFolder.write
def slow(self, number, rollouts):
    write(self, number, rollouts)
    print(number, flush=True)
    sys.stdin.readline()
WaveFolder.write = slow
drawn(path(), Path(sys.argv[1]))
"""


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


def test_damage(tmp_path: Path) -> None:
    drawn(path(), tmp_path)
    rows = tmp_path / "wave-00001.safetensors"
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    with pytest.raises(BadRollouts, match="was changed"):
        drawn(path(), tmp_path)
    file = tmp_path / "wave-00000.json"
    raw = json.loads(file.read_text())
    for wrong in ({**raw, "rollouts": raw["rollouts"][1:]}, {**raw, "more": 1}, [], {"rollouts": [{}], "sha256": None}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(BadRollouts):
            Rollouts.load(tmp_path)


def test_missing_rows(tmp_path: Path, reference: Rollouts) -> None:
    """Rows that were deleted: the message says what to do, and doing it works."""
    found = drawn(path(), tmp_path)
    (tmp_path / "wave-00001.safetensors").unlink()
    text = r"wave-00001\.safetensors is missing\. Delete wave-00001\.json, and resume to draw the wave again"
    for look in (lambda: drawn(path(), tmp_path), lambda: Rollouts.load(tmp_path), lambda: found.states["blocks.0.hook_in"]):
        with pytest.raises(BadRollouts, match=text):
            look()
    (tmp_path / "wave-00001.json").unlink()
    assert drawn(path(), tmp_path).digest == reference.digest


@pytest.mark.parametrize(
    "change", ["outcome", "tokens", "seed", "position", "order", "rows", "plan", "fewer", "none", "longer"]
)
def test_changed_records(tmp_path: Path, change: str) -> None:
    """Whatever was changed in the file of a wave, it is refused, also if the digest was made anew for what the plan knows."""
    drawn(path(), tmp_path)
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
    with pytest.raises(BadRollouts, match=r"was changed|other rollouts|has 3 rollouts instead of 4|a rollout of [07] tokens"):
        Rollouts.load(tmp_path)


def test_other_folders(tmp_path: Path) -> None:
    drawn(path(), tmp_path / "a")
    with pytest.raises(PlanMismatch, match="n"):
        drawn(path(), tmp_path / "a", n=5)
    with pytest.raises(PlanMismatch, match="tokens"):
        drawn(engine().prompt([1, 2, 9]).force([4, 5, 6, 7]), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(BadRollouts, match=r"not empty, and holds no rollouts but mine\.txt"):
        drawn(path(), tmp_path / "b")
    for content in ("{", "[]", '{"wave": 0}', '{"wave": 2, "plan": {}}'):
        (tmp_path / "b" / "plan.json").write_text(content)
        for look in (lambda: Rollouts.load(tmp_path / "b"), lambda: drawn(path(), tmp_path / "b")):
            with pytest.raises(BadRollouts, match=r"plan\.json is (not JSON|invalid|damaged)"):
                look()
    with pytest.raises(BadRollouts):
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
        with pytest.raises(PlanMismatch, match=r"Other: answer\."):
            read_by(other, tmp_path)
    with pytest.raises(PlanMismatch, match=r"Other: n\."):
        read_by(answer, tmp_path, n=3)


def test_a_folder_without_a_function_is_not_taken_for_one_with(tmp_path: Path) -> None:
    read_by(None, tmp_path)
    with pytest.raises(PlanMismatch, match=r"Other: answer\."):
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
    with pytest.raises(DumpWriteFailed, match="Cannot create the folder"):
        drawn(path(), target / "b" if kind == "below a file" else target)


def test_a_link_to_a_folder(tmp_path: Path, reference: Rollouts) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert drawn(path(), tmp_path / "link").digest == Rollouts.load(tmp_path / "real").digest == reference.digest


@pytest.mark.parametrize("name", ["movie.part", ".hidden", "wave-00000.safetensors", "sub"])
def test_a_folder_of_somebody_else(tmp_path: Path, name: str) -> None:
    """Whatever the names are, nothing is written beside files that are not ours."""
    (tmp_path / "sub").mkdir() if name == "sub" else (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(BadRollouts, match=name) as caught:
        drawn(path(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and "elete" not in str(caught.value)


def test_a_changed_plan(tmp_path: Path, reference: Rollouts) -> None:
    """Two other tokens of the prompt: no rollout shows it, so the plan has its own hash."""
    drawn(path(), tmp_path)
    file = tmp_path / "plan.json"
    raw = json.loads(file.read_text())
    raw["plan"]["tokens"][:2] = [8, 9]
    file.write_text(json.dumps(raw))
    for look in (lambda: Rollouts.load(tmp_path), lambda: drawn(path(), tmp_path)):
        with pytest.raises(BadRollouts, match=r"plan\.json was changed"):
            look()
    raw["wave"] += 1
    del raw["sha256"]
    file.write_text(json.dumps(raw))
    with pytest.warns(UnsealedRollouts), pytest.raises(BadRollouts, match="drawn for another plan"):
        Rollouts.load(tmp_path)  # who removes the hash meets that of the waves


@pytest.mark.parametrize(
    "answer", [{}, {"regex": "("}, {"regex": "(", "stop": True}, {"regex": 3, "stop": True}, {"choices": [1]}]
)
def test_a_damaged_answer(tmp_path: Path, answer: object) -> None:
    """Its hash is made anew, so that only what it says is wrong."""
    drawn(path(), tmp_path)
    file = tmp_path / "plan.json"
    raw = json.loads(file.read_text())
    raw["plan"]["answer"] = answer
    file.write_bytes(folder._plan_file(raw["plan"], raw["wave"]))
    for look in (lambda: Rollouts.load(tmp_path), lambda: drawn(path(), tmp_path)):
        with pytest.raises(BadRollouts, match=r"plan\.json is damaged: Invalid (answer|regular expression)"):
            look()


def test_a_plan_of_another_folder(tmp_path: Path) -> None:
    """Its hash is right, and positions, numbers and seeds are those of the waves; the prompt is not."""
    drawn(path(), tmp_path / "a")
    drawn(engine().prompt([1, 2, 9]).force([4, 5, 6, 7]), tmp_path / "b")
    (tmp_path / "a" / "plan.json").write_bytes((tmp_path / "b" / "plan.json").read_bytes())
    with pytest.raises(BadRollouts, match="drawn for another plan"):
        Rollouts.load(tmp_path / "a")


def test_a_folder_of_an_older_version(tmp_path: Path, reference: Rollouts) -> None:
    """It has no hash of the plan: reading it warns, and the call that made it adds the hash."""
    drawn(path(), tmp_path)
    for file in (tmp_path / "plan.json", *tmp_path.glob("wave-*.json")):
        raw = json.loads(file.read_text())
        if "rollouts" in raw:
            raw["digest"] = folder._digest(raw["rollouts"], raw["sha256"], None)
            del raw["plan"]
        else:
            del raw["sha256"]
        file.write_text(json.dumps(raw))
    with pytest.warns(UnsealedRollouts, match="no SHA-256.*Resume"):
        assert Rollouts.load(tmp_path).digest == reference.digest
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsealedRollouts)
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
