"""`WaveFolder`: finished waves of rollouts on disk.

| file | content |
|---|---|
| `plan.json` | the plan, the number of rollouts in a wave, and the SHA-256 of both |
| `wave-00003.safetensors` | the kept rows of its rollouts, one after another; missing if none are kept |
| `wave-00003.json` | its rollouts, and the SHA-256 of their rows and plan. Written last: a wave with this file is finished |

Files appear under their names once they are complete. So a process that is killed costs the waves it was computing. The part
of a file that it leaves is removed by the next one: its lock (`flock`) ended with it.
"""

import fcntl
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from replaylens.engine.errors import BadRollouts, DumpWriteFailed, EngineError, OtherPlan, UnsealedRollouts
from replaylens.engine.records import Hash, Positive, build, parse, read
from replaylens.engine.request.recording import with_keys
from replaylens.engine.resampling.plan import ResamplePlan
from replaylens.engine.resampling.rollout import Rollout, Row, joined

PLAN = "plan.json"
_PART = re.compile(r"(plan\.json|wave-\d{5,9}\.(?:json|safetensors))\.[0-9a-f]{32}\.part")


@dataclass(frozen=True)
class RolloutRecord:
    """A rollout as a file spells it."""

    position: int
    number: int
    seed: int
    tokens: tuple[int, ...]
    text: str
    outcome: str | None
    stopped: str
    probabilities: tuple[float, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class WaveRecord:
    """A wave as a file spells it."""

    rollouts: tuple[RolloutRecord, ...]
    sha256: Hash | None
    """of the file with the rows; None: there are none"""
    digest: Hash
    """of the rollouts, `sha256` and `plan`"""
    plan: Hash | None = None
    """of the plan that they were drawn for; None: written by an older version"""


class WaveFolder:
    """The waves of one plan: wave i has the rollouts [i * wave, (i + 1) * wave). Processes may share the work."""

    def __init__(self, folder: str | Path, plan: ResamplePlan, wave: int, sha256: str) -> None:
        """`sha256`: of the plan as the folder spells it. A function that reads answers stands there by its name."""
        self.folder, self.plan, self.wave, self._plan = Path(folder), plan, wave, sha256

    @classmethod
    def create(cls, folder: str | Path, plan: ResamplePlan, wave: int) -> "WaveFolder":
        """A new folder, or the one that is there: it keeps its size of waves. OtherPlan if it has other rollouts.

        BadRollouts if the folder is not empty and holds no rollouts, DumpWriteFailed if it cannot be made or written.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DumpWriteFailed(f"Cannot create the folder {folder}: {error.strerror}. Give another path.") from error
        foreign = [file.name for file in path.iterdir() if not _PART.fullmatch(file.name)]
        if not (path / PLAN).exists():  # asked after the look: another worker may have started the folder just now
            if foreign:
                raise BadRollouts(
                    f"{folder} is not empty, and holds no rollouts but {min(foreign)[:100]}. Give a new or an empty folder."
                )
            _write(path / PLAN, _plan_file(plan.to_json(), wave))
        _remove_parts(path)
        raw, wave, sealed = _stored(path)
        if names := plan.differences(raw):
            raise OtherPlan(
                f"{folder} holds rollouts of another plan. Other: {', '.join(names)}. Use another folder, or these options."
            )
        if not sealed:  # every field was just compared
            _write(path / PLAN, _plan_file(raw, wave))
        return cls(folder, plan, wave, _sha256(raw))

    @classmethod
    def open(cls, folder: str | Path) -> "WaveFolder":
        """The folder's waves; BadRollouts if it is none, or its plan was changed.

        Warns (UnsealedRollouts) of a plan without a hash, as older versions wrote it.
        """
        raw, wave, sealed = _stored(Path(folder))
        if not sealed:
            warnings.warn(
                f"{folder}/{PLAN} has no SHA-256: an older version wrote it, and a change of it would not be noticed. Resume "
                "the folder with the call that made it, which compares the plan and adds the hash.",
                UnsealedRollouts,
                stacklevel=3,
            )
        return cls(folder, ResamplePlan.from_json(raw), wave, _sha256(raw))

    @property
    def num_waves(self) -> int:
        return -(-len(self.plan) // self.wave)

    def indices(self, number: int) -> range:
        """The rollouts of a wave."""
        return range(number * self.wave, min((number + 1) * self.wave, len(self.plan)))

    def missing(self) -> list[int]:
        """The waves that are not finished."""
        return [number for number in range(self.num_waves) if not self._file(number, "json").exists()]

    def write(self, number: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Write a finished wave. Returns it as `read` does, without reading it again."""
        digest = None
        kept = [each for each in rollouts if each.rows]
        if kept:
            content = save({site: joined(site, [each.states[site].cpu() for each in kept]) for site in kept[0].states})
            digest = hashlib.sha256(content).hexdigest()
            _write(self._file(number, "safetensors"), content)
        records = json.loads(json.dumps([each.to_json() for each in rollouts]))
        raw = {"rollouts": records, "sha256": digest, "plan": self._plan, "digest": _digest(records, digest, self._plan)}
        _write(self._file(number, "json"), json.dumps(raw).encode())
        return self._with_rows(number, rollouts)

    def read(self, number: int) -> list[Rollout]:
        """The rollouts of a finished wave, whose rows are read when they are looked at. BadRollouts if a file is damaged."""
        file, rows = self._file(number, "json"), self._file(number, "safetensors")
        raw = parse(_content(file), str(file), BadRollouts)
        record = build(WaveRecord, raw, str(file), BadRollouts)
        if _digest(raw["rollouts"], record.sha256, record.plan) != record.digest:
            raise BadRollouts(f"{file} was changed: its rollouts do not have their digest. Delete it, and resume.")
        if record.plan not in (None, self._plan):
            raise BadRollouts(
                f"{file} was drawn for another plan than that of {PLAN}: one of them is another folder's. Copy both again."
            )
        if len(record.rollouts) != len(self.indices(number)):
            raise BadRollouts(f"{file} has {len(record.rollouts)} rollouts instead of {len(self.indices(number))}. Delete it.")
        if record.sha256 is not None and not rows.exists():
            raise _missing_rows(rows)
        if record.sha256 is not None and hashlib.sha256(_content(rows)).hexdigest() != record.sha256:
            raise BadRollouts(f"{rows} was changed: it does not have the SHA-256 of {file.name}. Delete both, and resume.")
        for index, each in zip(self.indices(number), record.rollouts, strict=True):
            place, own = self.plan.rollout(index)
            planned = (self.plan.positions[place], own, self.plan.sampling_of(index).seed)
            if (each.position, each.number, each.seed) != planned:
                raise BadRollouts(f"{file} holds other rollouts than the plan. Delete it, and resume.")
            if not min(1, self.plan.max_new) <= len(each.tokens) <= self.plan.max_new:
                raise BadRollouts(
                    f"{file} has a rollout of {len(each.tokens)} tokens, and the plan has at most {self.plan.max_new}, at "
                    "least one. Delete it, and resume."
                )
        return self._with_rows(number, [Rollout(**vars(each)) for each in record.rollouts])

    def _with_rows(self, number: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with their rows in the wave's file."""
        file, ends = self._file(number, "safetensors"), accumulate((len(each.rows) for each in rollouts), initial=0)
        return [
            replace(each, states=FileRows(file, first, end, self.plan.length(index, len(each.tokens))) if first < end else {})
            for index, each, (first, end) in zip(self.indices(number), rollouts, pairwise(ends), strict=True)
        ]

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"wave-{number:05d}.{kind}"


class FileRows(Mapping[str, Tensor]):
    """Some consecutive rows of a file, read when somebody looks."""

    def __init__(self, file: Path, first: int, end: int, keys: int) -> None:
        self._file, self._first, self._end = file, first, end
        self._keys = keys
        """the number of tokens on their path; the file has as many keys as the longest path of its wave"""

    def __getitem__(self, site: str) -> Tensor:
        with self._opened() as file:
            if site not in list(file.keys()):
                raise KeyError(site)
            rows: Tensor = file.get_slice(site)[self._first : self._end]
            return with_keys(site, rows, self._keys)

    def __iter__(self) -> Iterator[str]:
        with self._opened() as file:
            return iter(list(file.keys()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _opened(self) -> Any:
        try:
            return safe_open(self._file, "pt")
        except FileNotFoundError as error:
            raise _missing_rows(self._file) from error
        except (OSError, SafetensorError) as error:
            raise BadRollouts(f"The rows in {self._file} cannot be read: {error}.") from error


@dataclass(frozen=True)
class _PlanFile:
    """The content of plan.json. Older versions wrote no hash."""

    plan: dict[str, Any]
    wave: Positive
    sha256: Hash | None = None


def _plan_file(plan: dict[str, Any], wave: int) -> bytes:
    return json.dumps({"plan": plan, "wave": wave, "sha256": _sha256([plan, wave])}, indent=1).encode()


def _stored(folder: Path) -> tuple[dict[str, Any], int, bool]:
    """The plan of a folder as JSON values, the number of rollouts in a wave, and whether their hash was there to check."""
    file = folder / PLAN
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadRollouts(f"{folder} holds no rollouts: {error}.") from error
    found = read(_PlanFile, content, str(file), BadRollouts)
    if found.sha256 not in (None, _sha256([found.plan, found.wave])):
        raise BadRollouts(f"{file} was changed: it does not have its SHA-256. Copy it again, or draw into another folder.")
    try:
        ResamplePlan.from_json(found.plan)
    except EngineError as error:
        raise BadRollouts(f"{file} is damaged: {error} Copy it again, or draw into another folder.") from error
    return found.plan, found.wave, found.sha256 is not None


def _sha256(value: Any) -> str:
    """Of a JSON value, however a file spells it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest(records: list[Any], rows: str | None, plan: str | None) -> str:
    """The SHA-256 of rollouts as JSON values, of the hash of their rows, and of their plan's if it was written."""
    return _sha256([records, rows] if plan is None else [records, rows, plan])


def _missing_rows(file: Path) -> BadRollouts:
    """The rows of a finished wave are gone. Without its other file the wave counts as not drawn."""
    return BadRollouts(f"{file} is missing. Delete {file.with_suffix('.json').name}, and resume to draw the wave again.")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadRollouts(f"{file} cannot be read: {error}.") from error


def _write(file: Path, content: bytes) -> None:
    """Write a file that appears as a whole, on disk before its name is. Threads, processes and machines may write the same."""
    while not _written(file, content):
        pass  # a machine that does not see the lock has removed the part


def _written(file: Path, content: bytes) -> bool:
    """Whether the file was written; False if its part was removed meanwhile. DumpWriteFailed if the disk refuses it."""
    part = file.with_name(f"{file.name}.{uuid4().hex}.part")
    try:
        with open(part, "wb") as opened:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX)
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
            try:
                os.replace(part, file)
            except FileNotFoundError:
                return False
    except BaseException as error:
        part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise DumpWriteFailed(
            f"Cannot write {file}: {error.strerror or error}. Finished waves are kept. Make room, and resume by the same call."
        ) from error
    return True


def _remove_parts(folder: Path) -> None:
    """Remove what killed processes left incomplete. The part of a live one is locked."""
    for part in folder.iterdir():
        if _PART.fullmatch(part.name):
            with suppress(OSError), open(os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb+") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
