"""`WaveFolder`: finished waves of rollouts on disk.

| file | content |
|---|---|
| `plan.json` | the plan, and the number of rollouts in a wave |
| `wave-00003.safetensors` | the kept rows of its rollouts, one after another; missing if none are kept |
| `wave-00003.json` | its rollouts, and the SHA-256 of their rows. Written last: a wave with this file is finished |

Files appear under their names once they are complete. So a process that is killed costs the waves it was computing.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from replaylens.engine.errors import BadRollouts, OtherPlan
from replaylens.engine.records import Hash, build, parse
from replaylens.engine.request.recording import with_keys
from replaylens.engine.resampling.plan import ResamplePlan
from replaylens.engine.resampling.rollout import Rollout, Row, joined

PLAN = "plan.json"


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
    """of the rollouts and `sha256`"""


class WaveFolder:
    """The waves of one plan: wave i has the rollouts [i * wave, (i + 1) * wave). Processes may share the work."""

    def __init__(self, folder: str | Path, plan: ResamplePlan, wave: int) -> None:
        self.folder, self.plan, self.wave = Path(folder), plan, wave

    @classmethod
    def create(cls, folder: str | Path, plan: ResamplePlan, wave: int) -> "WaveFolder":
        """A new folder, or the one that is there: it keeps its size of waves. OtherPlan if it has other rollouts."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        used = any(file.suffix != ".part" for file in path.iterdir())  # a killed process may leave a part
        if not (path / PLAN).exists():  # asked after the look: another worker may have started the folder just now
            if used:
                raise BadRollouts(f"{folder} is not empty, and holds no rollouts. Give a new or an empty folder.")
            _write(path / PLAN, json.dumps({"plan": plan.to_json(), "wave": wave}, indent=1).encode())
        raw, wave = _stored(path)
        if names := plan.differences(raw):
            raise OtherPlan(
                f"{folder} holds rollouts of another plan. Other: {', '.join(names)}. Use another folder, or these options."
            )
        return cls(folder, plan, wave)

    @classmethod
    def open(cls, folder: str | Path) -> "WaveFolder":
        """The folder's waves; BadRollouts if it is none."""
        raw, wave = _stored(Path(folder))
        return cls(folder, ResamplePlan.from_json(raw), wave)

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
        raw = {"rollouts": records, "sha256": digest, "digest": _digest(records, digest)}
        _write(self._file(number, "json"), json.dumps(raw).encode())
        return self._with_rows(number, rollouts)

    def read(self, number: int) -> list[Rollout]:
        """The rollouts of a finished wave, whose rows are read when they are looked at. BadRollouts if a file is damaged."""
        file, rows = self._file(number, "json"), self._file(number, "safetensors")
        raw = parse(_content(file), str(file), BadRollouts)
        record = build(WaveRecord, raw, str(file), BadRollouts)
        if _digest(raw["rollouts"], record.sha256) != record.digest:
            raise BadRollouts(f"{file} was changed: its rollouts do not have their digest. Delete it, and resume.")
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


def _stored(folder: Path) -> tuple[Any, int]:
    """The plan of a folder as JSON values, and the number of rollouts in a wave."""
    try:
        raw = parse((folder / PLAN).read_bytes(), f"{folder}/{PLAN}", BadRollouts)
    except OSError as error:
        raise BadRollouts(f"{folder} holds no rollouts: {error}.") from error
    if not isinstance(raw, dict) or type(raw.get("wave")) is not int or raw["wave"] < 1:
        raise BadRollouts(f"{folder}/{PLAN} is not the plan of rollouts.")
    return raw.get("plan"), raw["wave"]


def _digest(records: list[Any], rows: str | None) -> str:
    """The SHA-256 of rollouts as JSON values, and of the hash of their rows."""
    return hashlib.sha256(json.dumps([records, rows], sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
    part = file.with_name(f"{file.name}.{uuid4().hex}.part")
    try:
        with open(part, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
