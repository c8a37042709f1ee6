"""Everything that is written: whole or not at all, over own files only, and sealed. One test for all kinds of files."""

import builtins
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens.commands.cited import check_figure, check_report
from replaylens.commands.reporting import NOT_DONE, OUT_OF_REACH, exit_code
from replaylens.engine import files
from replaylens.engine.display import picture
from replaylens.engine.errors import BadRequest, DumpWriteFailed, EngineError, Unsealed
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.proof.trace import Trace
from replaylens.engine.records import Fingerprint
from replaylens.extras.bridges.formats import from_probebench, to_probebench
from replaylens.probes import report as report_module
from replaylens.probes.errors import BadFile, PlanMismatch
from replaylens.probes.probe import LinearProbe
from replaylens.probes.report import Report
from replaylens.probes.rows import Cell
from replaylens.probes.sweeps import SweepCache, check_parts
from replaylens.tasks import WordTokenizer
from replaylens.tasks.errors import TaskError
from replaylens.training import embedded as zoo
from replaylens.training.trainer import load_state, save_state
from replaylens.views.report import ReportPage
from tests.devices import swept
from tests.drawings import rollout_tree, timeline

ABOUT = {"id": "i", "name": "n", "author": "a", "category": "c", "modelId": "m", "license": "MIT", "tasks": ["t"]}
"""as ProbeBench requires"""
KEY = hashlib.sha256(b"a sweep").hexdigest()
FINGERPRINT = Fingerprint("0" * 64, "1" * 64, "float32", "cpu", "2", "none", "1", "portable-1")


def a_report(version: int) -> Report:
    line = {"what": "first", "metric": "accuracy", "accuracy": 0.1 + version / 3, "low": 0.1, "high": 0.9, "rows": 30}
    return Report("judge", [line], {"task": "coin"}, {"seed": version}, [], [f"version {version}"])


def a_probe(version: int) -> LinearProbe:
    x = np.random.default_rng(version).normal(size=(3, 4))
    told = dict(label="face", site="blocks.0.hook_in", cell=Cell("S", 0), position="query", estimator="ridge")
    return LinearProbe(x[:1], x[1, :1], x[1:], ("a", "b"), source={"version": version}, **told)  # type: ignore[arg-type]


def a_lens(version: int) -> TunedLens:
    x = torch.linspace(0, version, 2 * 3 * 3).reshape(2, 3, 3)
    return TunedLens(x, x[:, 0].contiguous(), "a" * 64)


def a_figure(folder: Path, version: int) -> None:
    made = picture(2, 2)
    made.subplots().plot([0, version])
    made.savefig(folder / "figure.png")


def a_part(version: int) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {"observed": np.linspace(0, version, 7), "drawn": np.arange(version)}


def save_part(folder: Path, version: int) -> None:
    """A part is never changed: the second version is the first one, and a second part."""
    for number in range(1, version + 1):
        SweepCache(folder, KEY).arrays(f"part {number}", a_part(number), ("observed", "drawn"))


def read_part(folder: Path) -> Any:
    """What a resumed sweep reads, and what it has yet to compute."""
    made = list[int]()

    def computed(number: int) -> Callable[[], dict[str, np.ndarray]]:
        def make() -> dict[str, np.ndarray]:
            made.append(number)
            return a_part(number)()

        return make

    kept = [SweepCache(folder, KEY).arrays(f"part {each}", computed(each), ("observed", "drawn")) for each in (1, 2)]
    assert all(np.array_equal(x["observed"], a_part(n)()["observed"]) for n, x in enumerate(kept, 1))
    return made


def intact(*names: str) -> Callable[[Path], Any]:
    """Reads stamped files, as `replaylens verify` does."""

    def read(folder: Path) -> Any:
        for name in names:
            if (checked := check_figure(str(folder / name))).status != "verified":
                raise BadRequest(str(checked))
        return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]

    return read


@dataclass(frozen=True)
class Kind:
    """One thing that is written."""

    save: Callable[[Path, int], Any]
    read: Callable[[Path], Any]
    """what a reader finds, to be compared; raises a named error for damage"""
    files: tuple[str, ...]
    """all that a save leaves"""


def page(folder: Path, version: int) -> None:
    ReportPage(probes=(a_report(version),)).save(folder / "page.html")


def trees(folder: Path, version: int) -> None:
    replace(rollout_tree(), title=f"version {version}").save(folder / "tree.html")


def boards(folder: Path, version: int) -> None:
    told = timeline()
    replace(told, frames=(replace(told.frames[0], caption=f"version {version}"),)).save(folder)


def trace(folder: Path, version: int) -> None:
    made = Trace(FINGERPRINT)
    for number in range(version):
        made.add("release", branch=number)
    made.save(folder / "a.trace")


SMALL = ModelConfig(
    num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, d_head=4, d_mlp=4, vocab_size=106, max_positions=512, rotary_dim=4
)


def a_model(version: int) -> Decoder:
    return Decoder(SMALL).initialize(version).requires_grad_(False)


def hash_of(folder: Path) -> str:
    """Of the model that is loaded, and of all its files."""
    zoo.load(folder)
    files = (folder / name for name in ("replaylens.json", "tokenizer.json", "model.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


RECIPE = replace(zoo.recipe("coin-draft"), config=SMALL)


def state_of(folder: Path) -> int:
    """The step of a saved run."""
    model = a_model(0)
    return load_state(folder / "training.safetensors", RECIPE, model, torch.optim.AdamW(model.parameters()))


def report_of(folder: Path) -> Any:
    """(digest, files of the report, others): as `verify` finds them, which reads the summary in report.json, too."""
    found = Report.load(folder)
    own, other = found.strays(folder)
    checked = check_report(str(folder))
    if (checked.status != "verified") != bool(other):
        raise BadRequest(f"{folder}: {checked}")
    return found.digest, own, other


KINDS = {
    "report": Kind(
        lambda folder, v: a_report(v).save(folder), report_of, ("judge.png", "report.json", "summary.txt", "table.csv")
    ),
    "probe": Kind(
        lambda folder, v: a_probe(v).save(folder / "probe"),
        lambda folder: LinearProbe.load(folder / "probe").weight.tolist(),
        ("probe.json", "probe.safetensors"),
    ),
    "lens": Kind(
        lambda folder, v: a_lens(v).save(folder / "lens.safetensors"),
        lambda folder: TunedLens.load(folder / "lens.safetensors").digest,
        ("lens.json", "lens.safetensors"),
    ),
    "bundle": Kind(
        lambda folder, v: to_probebench(a_probe(v), folder, ABOUT),
        lambda folder: from_probebench(folder).weight.tolist(),
        ("meta.json", "probe.safetensors"),
    ),
    "figure": Kind(a_figure, intact("figure.png"), ("figure.png",)),
    "page": Kind(page, intact("page.html"), ("page.html",)),
    "tree": Kind(trees, intact("tree.html"), ("tree.html",)),
    "board": Kind(boards, intact("000-prefill.svg"), ("000-prefill.svg",)),
    "model": Kind(
        lambda folder, v: zoo.save(a_model(v), WordTokenizer(["a", "b"]), folder),
        hash_of,
        ("model.safetensors", "replaylens.json", "tokenizer.json"),
    ),
    "state": Kind(
        lambda folder, v: save_state(
            folder / "training.safetensors", RECIPE, model := a_model(v), torch.optim.AdamW(model.parameters()), v
        ),
        state_of,
        ("training.safetensors",),
    ),
    "trace": Kind(trace, lambda folder: len(Trace.load(folder / "a.trace").events), ("a.trace",)),
}
SWEEP = Kind(save_part, read_part, ("sweep.key",))
NAMED = (EngineError, TaskError)


# ---- stopped ---------------------------------------------------------------------------------------------------------


class Disk:
    """Calls `at(n)` before the n-th call of this process that changes the disk."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self.at, self.done = at, 0

    def step(self) -> None:
        self.done += 1
        self.at(self.done - 1)

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            self.step()
            return original(*given, **options)

        return call

    def open(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "x" not in mode and "w" not in mode:
            return builtins.open(path, mode, *rest, **options)
        self.step()
        file = builtins.open(path, mode, *rest, **options)  # noqa: SIM115
        plain = file.write

        def write(data: Any) -> int:
            """Half of it, then the rest: a call can end in between."""
            plain(data[: len(data) // 2])
            file.flush()
            self.step()
            return len(data) // 2 + int(plain(data[len(data) // 2 :]))

        file.write = write  # type: ignore[method-assign]
        return file


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of equal tables are drawn once: that takes most of a report's save."""
    plain = report_module.draw_all

    def drawn(kind: str, table: Any, named: Callable[[Any], Any]) -> dict[str, bytes]:
        key = table.to_csv()
        return DRAWN[key] if key in DRAWN else DRAWN.setdefault(key, plain(kind, table, named))

    monkeypatch.setattr(report_module, "draw_all", drawn)


DRAWN: dict[str, dict[str, bytes]] = {}


@contextmanager
def watched(at: Callable[[int], None]) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(at)
        for name in ("replace", "fsync", "unlink"):
            patch.setattr(os, name, disk.counted(getattr(os, name)))
        patch.setattr(files, "open", disk.open, raising=False)
        yield disk


def saved(kind: Kind, folder: Path, version: int) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    kind.save(folder, version)
    return kind.read(folder)


def expected(kind: Kind, folder: Path) -> tuple[Any, Any, int]:
    """(what is read of the older save, of the newer one, steps of the newer save over the older one)"""
    older, newer = saved(kind, folder / "older", 1), saved(kind, folder / "newer", 2)
    again = folder / "both"
    kind.save(shutil.copytree(folder / "older", again), 2) if kind is not SWEEP else None
    assert older != newer or kind is SWEEP
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(folder / "older", again)
    with watched(lambda step: None) as disk:
        kind.save(again, 2)
    assert kind.read(again) == newer
    return older, newer, disk.done


STOPPED = [name for name in KINDS if name not in ("figure", "tree")]
"""those two are written as pages are"""


@pytest.mark.parametrize("name", swept(STOPPED, "probe", "report"))
def test_a_kill_between_any_two_steps_leaves_one_whole_save(tmp_path: Path, name: str) -> None:
    """SIGKILL before each change of the disk, and within each write: a reader finds the older save or the newer one. The next
    save works, and leaves no temporary file of a pair behind."""
    kind = KINDS[name]
    older, newer, steps = expected(kind, tmp_path)
    assert steps >= 5, "the steps were not counted"
    for fatal in range(steps):
        folder = Path(shutil.copytree(tmp_path / "older", tmp_path / f"at{fatal}"))
        if not (child := os.fork()):
            with watched(lambda step, fatal=fatal: os.kill(os.getpid(), signal.SIGKILL) if step == fatal else None):
                kind.save(folder, 2)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it was not killed"
        found = kind.read(folder)
        if name == "report":  # of four files: none is half of one, and those of the other save are named
            assert found[0] in (older[0], newer[0]) and len(found[1]) + len(found[2]) == 3
        else:
            assert found in (older, newer), f"killed at step {fatal}"
        assert saved(kind, folder, 2) == newer
        assert not list(folder.glob(f"*{files.WAITING}"))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, errno.ENOSPC) for name in STOPPED),
        *(pytest.param(name, errno.EIO, marks=() if name == "probe" else pytest.mark.slow) for name in STOPPED),
    ],
)
def test_a_disk_that_refuses_leaves_the_older_save(tmp_path: Path, name: str, number: int) -> None:
    """Each call in turn fails. The error names file, reason and advice; no temporary file stays; a removal may fail, too."""
    kind = KINDS[name]
    older, newer, steps = expected(kind, tmp_path)
    for bad in range(steps):
        folder = Path(shutil.copytree(tmp_path / "older", tmp_path / f"at{bad}"))

        def refuse(step: int, bad: int = bad) -> None:
            if step == bad:
                raise OSError(number, os.strerror(number))

        with (
            watched(refuse),
            pytest.raises(DumpWriteFailed, match=f"Cannot write .*{os.strerror(number)}.*Make room") as caught,
        ):
            kind.save(folder, 2)
        assert exit_code(caught.value) == OUT_OF_REACH and str(folder) in str(caught.value)
        found = kind.read(folder)
        assert found in (older, newer) or (name == "report" and found[0] in (older[0], newer[0]))
        assert not [path.name for path in folder.iterdir() if path.suffix == files.TEMPORARY], "a temporary file stays"
        assert saved(kind, folder, 2) == newer


def test_a_full_disk_while_a_sweep_is_resumed(tmp_path: Path) -> None:
    """Finished parts and the key stay as they are; a kill costs the part that is being written."""
    save_part(tmp_path / "older", 1)
    for number in range(100):
        folder = Path(shutil.copytree(tmp_path / "older", tmp_path / f"at{number}"))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def refuse(step: int, bad: int = number) -> None:
            if step == bad:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with watched(refuse):
                save_part(folder, 2)
            break
        except DumpWriteFailed as error:
            assert re.search(r"No space left on device. Finished parts are kept. Make room, and run the same sweep", str(error))
        assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
        assert read_part(folder) in ([], [2])
    assert number >= 5, "the steps were not counted"


# ---- own files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, kind in KINDS.items() for file in kind.files])
def test_files_of_others_stay(tmp_path: Path, name: str, file: str) -> None:
    """A file that we did not write is never replaced, whichever of ours would take its name; nor is anything else written."""
    for content in (
        b"",
        b"mine",
        b'{"format": "mine"}',
        b"\x89PNG\r\n\x1a\n" + bytes(60),
        b"<svg></svg>",
        b"<html><head></head></html>",
    ):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(NAMED, match=re.escape(file)) as caught:
            KINDS[name].save(tmp_path, 1)
        assert exit_code(caught.value) == NOT_DONE and "elete" not in str(caught.value)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(file, content)]
    (tmp_path / file).unlink()
    saved(KINDS[name], tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(KINDS[name].files), "control"


def test_models_are_not_written_over_others(tmp_path: Path) -> None:
    """Weights of one model are never beside the config of another, whoever wrote it."""
    zoo.save(a_model(1), WordTokenizer(["a"]), tmp_path)
    before = hash_of(tmp_path)
    with pytest.raises(BadRequest, match="holds a model of another config"):
        zoo.save(Decoder(replace(SMALL, norm_eps=1e-3)), WordTokenizer(["a"]), tmp_path)
    assert hash_of(tmp_path) == before
    (tmp_path / "replaylens.json").unlink()
    with pytest.raises(BadRequest, match=r"(model\.safetensors|tokenizer\.json) is a file that replaylens did not write"):
        zoo.save(a_model(2), WordTokenizer(["a"]), tmp_path)


def test_links_are_followed_as_before(tmp_path: Path) -> None:
    """A link to a page of ours is kept, and the page behind it is replaced; a link to another's file is refused."""
    (tmp_path / "deep").mkdir()
    page(tmp_path / "deep", 1)
    (tmp_path / "page.html").symlink_to(tmp_path / "deep" / "page.html")
    page(tmp_path, 2)
    assert (tmp_path / "page.html").is_symlink() and "version 2" in (tmp_path / "deep" / "page.html").read_text()


# ---- damage ----------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "zeros": lambda raw: bytes(len(raw)),
    "zeros at the end": lambda raw: raw[:-9] + bytes(9),
    "twice": lambda raw: raw + raw,
    "more": lambda raw: raw + b"\n{}",
}


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    """What can become of a file: by name, and a flipped bit in each of 48 regions."""
    yield from ((name, made) for name, change in DAMAGE.items() if (made := change(content)) != content)
    for place in sorted({int(at) for at in np.linspace(0, len(content) - 1, 48)}):
        for bit in (0, 5):
            yield f"bit {bit} of byte {place}", content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def is_found(kind: Kind, folder: Path, file: str, wanted: Any) -> bool:
    """Whether reading raises an error that names the file or its folder, or tells the file apart."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Unsealed)
            found = kind.read(folder)
    except (*NAMED, Unsealed) as error:
        assert any(name in str(error) for name in (*kind.files, folder.name)), error
        return True
    if isinstance(found, tuple):
        return file in found[2]
    return bool(found != wanted)


OPEN = ("bundle", "meta.json"), *(("model", file) for file in KINDS["model"].files), ("state", "training.safetensors")
"""the metadata of a bundle is in a form of others, who may edit it; it tells the hash of the numbers. Weights tell theirs in
every result"""
SEALED = [(name, file) for name, kind in KINDS.items() for file in kind.files if (name, file) not in OPEN]


@pytest.mark.parametrize(("name", "file"), SEALED)
def test_damage_is_found_by_name(tmp_path: Path, name: str, file: str) -> None:
    """Each region of each file flipped, zeroed, cut, doubled: no reader takes what is left for what was written."""
    kind = KINDS[name]
    wanted = saved(kind, tmp_path, 2)
    content = (tmp_path / file).read_bytes()
    for what, made in damages(content):
        (tmp_path / file).write_bytes(made)
        assert is_found(kind, tmp_path, file, wanted), what
    (tmp_path / file).write_bytes(content)
    assert kind.read(tmp_path) == wanted, "control"


def test_damage_to_a_sweep_is_found_by_name(tmp_path: Path) -> None:
    """Parts are checked when a sweep resumes, and by `verify`: also one whose arrays are zero in a file that NumPy wrote."""
    save_part(tmp_path, 2)
    parts = sorted(tmp_path.glob("*.npz"))
    assert check_parts(tmp_path) == (2, 0) and read_part(tmp_path) == []
    for path in parts:
        content = path.read_bytes()
        with np.load(path) as kept:  # the seal is no obstacle to NumPy
            arrays = {name: kept[name] for name in kept.files}
        for what, made in damages(content):
            path.write_bytes(made)
            for read in (check_parts, read_part):
                with pytest.raises(BadFile, match=f"{path.name} was changed.*Delete it"):
                    pytest.fail(f"{what}: {read(tmp_path)}")
        np.savez(made := io.BytesIO(), **{name: np.zeros_like(x) for name, x in arrays.items()})
        path.write_bytes(made.getvalue()[:-2] + content[-66:])
        with pytest.raises(BadFile, match=f"{path.name} was changed"):
            read_part(tmp_path)
        path.write_bytes(made.getvalue())
        assert check_parts(tmp_path) == (1, 1), "without a seal, it is as an older version wrote it, and computed again"
        path.write_bytes(content)
    one, other = (path.read_bytes() for path in parts)
    parts[0].write_bytes(other)
    with pytest.raises(BadFile, match=f"{parts[0].name} was changed, or is|{parts[0].name} was changed"):
        check_parts(tmp_path)
    parts[0].write_bytes(one)
    (tmp_path / "sweep.key").write_text(KEY.replace(KEY[0], "x"))
    with pytest.raises(BadFile, match=r"sweep\.key is damaged"):
        read_part(tmp_path)
    with pytest.raises(PlanMismatch):
        SweepCache(tmp_path / "other", KEY[::-1])
        SweepCache(tmp_path / "other", KEY)
    (tmp_path / "sweep.key").write_text("")  # as an older version left it on a full disk
    assert read_part(tmp_path) == [] and (tmp_path / "sweep.key").read_text() == KEY


# ---- older files -----------------------------------------------------------------------------------------------------


def test_files_of_older_versions_are_read_and_said_to_be_unsealed(tmp_path: Path) -> None:
    a_probe(1).save(tmp_path / "probe")
    a_report(1).save(tmp_path)
    for file, names in (("probe.json", ("sha256", "seal")), ("report.json", ("digest",))):
        raw = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({name: value for name, value in raw.items() if name not in names}))
    with pytest.warns(Unsealed, match=r"probe\.json has no hash"):
        assert np.array_equal(LinearProbe.load(tmp_path / "probe").weight, a_probe(1).weight)
    with pytest.warns(Unsealed, match=r"report\.json has no digest"):
        assert Report.load(tmp_path).digest == a_report(1).digest
    a_probe(2).save(tmp_path / "probe")
    a_report(2).save(tmp_path)
    with warnings.catch_warnings(action="error"):
        LinearProbe.load(tmp_path / "probe"), Report.load(tmp_path)


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    """A report at /dev/null had replaced the device."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="is a device or a pipe"):
        files.require_own(tmp_path / "pipe", lambda content: True)
