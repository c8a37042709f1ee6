"""`Rollouts`: the drawn continuations of a path, their outcomes counted, and the folder of their finished waves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from replaylens import boundary
from replaylens.engine.errors import BadFile, DumpWriteFailed, EngineError, PlanMismatch, UnknownSite, Unsealed
from replaylens.engine.files import appearing
from replaylens.engine.records import Citation, Fingerprint, Hash, Identifier, Positive, build, digest_of, parse, read
from replaylens.engine.request.capture import LazyRows, with_keys
from replaylens.engine.request.values import as_int, hides, output_path
from replaylens.rollouts.plan import NO_ANSWER, OTHER, OutcomeCounts, Race, ResamplePlan

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# ---- rollout ---------------------------------------------------------------------------------------------------------
# `Rollout`: one continuation of a path, with its seed, its outcome, and its rows at chosen places.

Row = tuple[str, int]
"""the name of a place, and the position of its token on the path"""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One rollout. `tokens` and `text` are what was generated, without the path before it."""

    position: int
    """the fork position"""
    number: int
    """its number among the rollouts at this position"""
    seed: int
    tokens: tuple[int, ...]
    text: str
    """without the end-of-sequence token"""
    outcome: str | None
    """None: no answer was found"""
    stopped: str
    """answer, eos, stop or length"""
    probabilities: tuple[float, ...] = ()
    """with choice tokens: the probability of each choice, then that of all other tokens"""
    rows: tuple[Row, ...] = ()
    """the rows that are kept, in order"""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """site -> [rows, ...]"""

    def to_json(self) -> dict[str, Any]:
        """Plain values of everything but the states."""
        plain: dict[str, Any] = json.loads(json.dumps(self.record))
        return plain

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the states; a JSON file spells tuples as lists."""
        return {name: value for name, value in vars(self).items() if name != "states"}

    @property
    def digest(self) -> str:
        """SHA-256 of everything, states included."""
        found = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode())
        for site in sorted(self.states):
            rows = self.states[site].detach().cpu().contiguous()
            found.update(f"{site} {rows.dtype} {tuple(rows.shape)}".encode())
            found.update(rows.view(torch.uint8).numpy().data if rows.numel() else b"")
        return found.hexdigest()


def joined(site: str, rows: Sequence[Tensor]) -> Tensor:
    """The rows of a site of several rollouts, one after another: [rows, ...]. Those of a site with keys, of which each rollout
    has as many as its path has tokens, get as many as the longest."""
    longest = max(each.shape[-1] for each in rows)
    return torch.cat([with_keys(site, each, longest) for each in rows])


def kept_sites(rollouts: Sequence[Rollout]) -> list[str]:
    """The sites of which these rollouts have rows."""
    return next((list(each.states) for each in rollouts if each.rows), [])


def kept_rows(rollouts: Sequence[Rollout], site: str) -> Tensor:
    """The kept rows of a site of all these rollouts. UnknownSite if there are none."""
    if site not in (sites := kept_sites(rollouts)):
        raise UnknownSite(f"Site {site!r:.60} was not captured. Captured: {', '.join(sites) or 'nothing'}.")
    return joined(site, [each.states[site] for each in rollouts if each.rows])


def _together(site: str, rows: Sequence[Tensor]) -> Tensor:
    """As `joined`, without a copy of rows that lie one after another already, as those of a wave do. Only to be read."""
    first, at = rows[0], rows[0].data_ptr()
    for each in rows:
        memory = each.untyped_storage().data_ptr()
        if not each.is_contiguous() or each.data_ptr() != at or memory != first.untyped_storage().data_ptr():
            return joined(site, rows)
        at += each.nbytes
    return first.as_strided((sum(map(len, rows)), *first.shape[1:]), first.stride())


# ---- folder ----------------------------------------------------------------------------------------------------------
# `WaveFolder`: finished waves of rollouts on disk.
#
# | file | content |
# |---|---|
# | `plan.json` | the plan, the number of rollouts in a wave, and the SHA-256 of both |
# | `wave-00003.safetensors` | the kept rows of its rollouts, one after another; missing if none are kept |
# | `wave-00003.json` | its rollouts, and the SHA-256 of their rows and plan. Written last: a wave with this file is finished |
#
# Files appear under their names once they are complete. So a process that is killed costs the waves it was computing. The
# part of a file that it leaves is removed by the next one: its lock (`flock`) ended with it.

PLAN = "plan.json"
_WAVE = re.compile(r"wave-([0-9]{5,15})\.json")
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

    def __init__(
        self, folder: str | Path, plan: ResamplePlan, wave: int, sha256: str, made_by: Fingerprint | None = None
    ) -> None:
        """`sha256`: of the plan as the folder spells it. A function that reads answers stands there by its name."""
        self.folder, self.plan, self.wave, self._plan = Path(folder), plan, wave, sha256
        self.made_by = made_by
        """of the engine that began the folder; None: an older version did"""

    @classmethod
    def create(cls, folder: str | Path, plan: ResamplePlan, wave: int, made_by: Fingerprint | None = None) -> WaveFolder:
        """A new folder, or the one that is there: it keeps its size of waves. PlanMismatch if it has other rollouts.

        BadRequest if the folder cannot be made or written, BadFile if it is not empty and holds no rollouts.
        """
        path = output_path(folder, folder=True)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DumpWriteFailed(f"Cannot create the folder {folder}: {error.strerror}. Give another path.") from error
        foreign = [file.name for file in path.iterdir() if not _PART.fullmatch(file.name)]
        if not (path / PLAN).exists():  # asked after the look: another worker may have started the folder just now
            if foreign:
                raise BadFile(
                    f"{folder} is not empty, and holds no rollouts but {min(foreign)[:100]}. Give a new or an empty folder."
                )
            _write(path / PLAN, _plan_file(plan.to_json(), wave, made_by))
        _remove_parts(path)
        found = _stored(path)
        raw, wave = found.plan, found.wave
        if different := plan.differences(raw):
            raise PlanMismatch(
                f"{folder} holds rollouts of another plan: {'; '.join(different)}. Use its options, or another folder."
            )
        if found.sha256 is None:  # every field was just compared
            _write(path / PLAN, _plan_file(raw, wave, found.made_by))
        return cls(folder, plan, wave, digest_of(raw), found.made_by)

    @classmethod
    def open(cls, folder: str | Path) -> WaveFolder:
        """The folder's waves; BadFile if it is none, or its plan was changed.

        Warns (Unsealed) of a plan without a hash, as older versions wrote it.
        """
        found = _stored(Path(folder))
        if found.sha256 is None:
            boundary.warn(
                f"{folder}/{PLAN} has no SHA-256: an older version wrote it, and a change of it would not be noticed. Resume "
                "the folder with the call that made it, which compares the plan and adds the hash.",
                Unsealed,
            )
        return cls(folder, ResamplePlan.from_json(found.plan), found.wave, digest_of(found.plan), found.made_by)

    @property
    def num_waves(self) -> int:
        return -(-len(self.plan) // self.wave)

    def indices(self, number: int) -> range:
        """The rollouts of a wave."""
        return range(number * self.wave, min((number + 1) * self.wave, len(self.plan)))

    def finished(self) -> set[int]:
        """The waves that are written, from one listing of the folder, however many the plan has."""
        names = (found for name in os.listdir(self.folder) if (found := _WAVE.fullmatch(name)))
        numbers = {int(found[1]) for found in names if self._file(int(found[1]), "json").name == found[0]}
        return {number for number in numbers if number < self.num_waves}

    def write(self, number: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Write a finished wave. Returns it as `read` does, without reading it again."""
        digest = None
        kept = [each for each in rollouts if each.rows]
        if kept:
            content = _file_of({site: _together(site, [each.states[site].cpu() for each in kept]) for site in kept[0].states})
            hashed = hashlib.sha256()
            for part in content:
                hashed.update(part)
            digest = hashed.hexdigest()
            _write(self._file(number, "safetensors"), *content)
        records = [each.record for each in rollouts]
        raw = {"rollouts": records, "sha256": digest, "plan": self._plan, "digest": _digest(records, digest, self._plan)}
        _write(self._file(number, "json"), json.dumps(raw).encode())
        return self._with_rows(number, rollouts)

    def read(self, number: int) -> list[Rollout]:
        """The rollouts of a finished wave, whose rows are read when they are looked at. BadFile if a file is damaged."""
        file, rows = self._file(number, "json"), self._file(number, "safetensors")
        raw = parse(_content(file), str(file), BadFile)
        record = build(WaveRecord, raw, str(file), BadFile)
        if _digest(raw["rollouts"], record.sha256, record.plan) != record.digest:
            raise BadFile(f"{file} was changed: its rollouts do not have their digest. Delete it, and resume.")
        if record.plan not in (None, self._plan):
            raise BadFile(
                f"{file} was drawn for another plan than that of {PLAN}: one of them is another folder's. Copy both again."
            )
        if len(record.rollouts) != len(self.indices(number)):
            raise BadFile(f"{file} has {len(record.rollouts)} rollouts instead of {len(self.indices(number))}. Delete it.")
        if record.sha256 is not None and not rows.exists():
            raise _missing_rows(rows)
        if record.sha256 is not None and hashlib.sha256(_content(rows)).hexdigest() != record.sha256:
            raise BadFile(f"{rows} was changed: it does not have the SHA-256 of {file.name}. Delete both, and resume.")
        for index, each in zip(self.indices(number), record.rollouts, strict=True):
            place, own = self.plan.rollout(index)
            planned = (self.plan.positions[place], own, self.plan.sampling_of(index).seed)
            if (each.position, each.number, each.seed) != planned:
                raise BadFile(f"{file} holds other rollouts than the plan. Delete it, and resume.")
            if not min(1, self.plan.max_new) <= len(each.tokens) <= self.plan.max_new:
                raise BadFile(
                    f"{file} has a rollout of {len(each.tokens)} tokens, and the plan has at most {self.plan.max_new}, at "
                    "least one. Delete it, and resume."
                )
        return self._with_rows(number, [Rollout(**vars(each)) for each in record.rollouts])

    def _with_rows(self, number: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with their rows in the wave's file."""
        file, ends = self._file(number, "safetensors"), accumulate((len(each.rows) for each in rollouts), initial=0)
        return [
            replace(each, states=file_rows(file, first, end, self.plan.length(index, len(each.tokens))) if first < end else {})
            for index, each, (first, end) in zip(self.indices(number), rollouts, pairwise(ends), strict=True)
        ]

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"wave-{number:05d}.{kind}"


def file_rows(file: Path, first: int, end: int, keys: int) -> LazyRows:
    """Rows [first, end) of a file, read when somebody looks.

    keys  the number of tokens on their path; the file has as many keys as the longest path of its wave
    """
    return LazyRows(partial(stored_sites, file), partial(stored_rows, file, first, end, keys))


def stored_sites(file: Path) -> list[str]:
    """The sites of a file of rows."""
    with _opened(file) as stored:
        return list(stored.keys())


def stored_rows(file: Path, first: int, end: int, keys: int, site: str) -> Tensor:
    """Rows [first, end) of a site. See `file_rows`."""
    with _opened(file) as stored:
        if site not in list(stored.keys()):
            raise KeyError(site)
        return with_keys(site, stored.get_slice(site)[first:end], keys)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except FileNotFoundError as error:
        raise _missing_rows(file) from error
    except (OSError, SafetensorError) as error:
        raise BadFile(f"The rows in {file} cannot be read: {error}.") from error


@dataclass(frozen=True)
class _PlanFile:
    """The content of plan.json. Older versions wrote neither a hash nor the parts of the fingerprint."""

    plan: dict[str, Any]
    """as JSON values"""
    wave: Positive
    """rollouts in a wave"""
    sha256: Hash | None = None
    """of both"""
    made_by: Fingerprint | None = None
    """whose digest the plan names"""


def _plan_file(plan: dict[str, Any], wave: int, made_by: Fingerprint | None = None) -> bytes:
    raw = {"plan": plan, "wave": wave, "sha256": digest_of([plan, wave])}
    return json.dumps(raw if made_by is None else raw | {"made_by": made_by.parts()}, indent=1).encode()


def _stored(folder: Path) -> _PlanFile:
    """The plan file of a folder, checked."""
    file = folder / PLAN
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise BadFile(f"{folder} holds no rollouts: {error}.") from error
    found = read(_PlanFile, content, str(file), BadFile)
    if found.sha256 not in (None, digest_of([found.plan, found.wave])):
        raise BadFile(f"{file} was changed: it does not have its SHA-256. Copy it again, or draw into another folder.")
    try:
        ResamplePlan.from_json(found.plan)
    except EngineError as error:
        raise BadFile(f"{file} is damaged: {error} Copy it again, or draw into another folder.") from error
    if found.made_by is not None and found.made_by.digest != found.plan["fingerprint"]:
        raise BadFile(f"{file} was changed: its plan has another fingerprint than made_by. Copy it again.")
    return found


def _digest(records: list[Any], rows: str | None, plan: str | None) -> str:
    """The SHA-256 of rollouts as JSON values, of the hash of their rows, and of their plan's if it was written."""
    return digest_of([records, rows] if plan is None else [records, rows, plan])


def _missing_rows(file: Path) -> BadFile:
    """The rows of a finished wave are gone. Without its other file the wave counts as not drawn."""
    return BadFile(f"{file} is missing. Delete {file.with_suffix('.json').name}, and resume to draw the wave again.")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadFile(f"{file} cannot be read: {error}.") from error


def _file_of(tensors: Mapping[str, Tensor]) -> list[Any]:
    """What a safetensors file of these tensors holds, without a copy: `save` makes two, and keeps other threads waiting."""
    empty = save({name: x[:0].contiguous() for name, x in tensors.items()})  # it knows the order and the names of dtypes
    header, end = json.loads(empty[8:]), 0
    for name, entry in header.items():
        start, end = end, end + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    flat = [tensors[name].contiguous().view(-1).view(torch.uint8).numpy() for name in header]
    return [len(text).to_bytes(8, "little") + text, *flat]


def _write(file: Path, *content: Any) -> None:
    """Write a file that appears as a whole, on disk before its name is. Threads, processes and machines may write the same."""
    while not _written(file, content):
        pass  # a machine that does not see the lock has removed the part


def _written(file: Path, content: Sequence[Any]) -> bool:
    """Whether the file was written; False if its part was removed meanwhile. DumpWriteFailed if the disk refuses it."""
    part = file.with_name(f"{file.name}.{uuid4().hex}.part")
    try:
        with appearing(file, part) as opened:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX)
            opened.writelines(content)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and file.parent.is_dir():
            return False
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


# ---- rollouts --------------------------------------------------------------------------------------------------------
# `Rollouts`: all rollouts of a plan, as a table, as counts of outcomes, and as rows of activations.

_MAX_TEXT = 48
"""characters of a fork's text in a figure"""


@hides("made_by")
@dataclass(frozen=True, eq=False)
class Rollouts:
    """The result of `branch.resample`: rollouts in order of position and number. Reads like a list of `Rollout`."""

    plan: ResamplePlan
    rollouts: tuple[Rollout, ...]
    made_by: Fingerprint | None = None
    """of the engine that drew them; None: they are those of a folder that an older version wrote"""

    @classmethod
    def load(cls, folder: str | Path) -> Rollouts:
        """The rollouts of a folder. Rows are read when they are looked at. BadFile if some are missing or damaged."""
        files = WaveFolder.open(folder)
        if missing := files.num_waves - len(files.finished()):
            raise BadFile(f"{folder} has {missing} unfinished waves of {files.num_waves}. Resume it with the same call.")
        every = tuple(rollout for number in range(files.num_waves) for rollout in files.read(number))
        return cls(files.plan, every, files.made_by)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> Rollout:
        return self.rollouts[as_int("index", index, -sys.maxsize, sys.maxsize)]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __repr__(self) -> str:
        kept = f", {len(self.index)} rows of {len(self.states)} sites" if self.plan.sites else ""
        whole = len(self) == len(self.plan)
        number = f"{self.plan.n}" if whole else f"{len(self)}, at most {self.plan.n}"
        return f"Rollouts({number} at each of {len(self.plan.positions)} positions{kept})"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per rollout: position, number, seed, tokens, text, outcome, stopped; with choices, their probabilities."""
        import pandas as pd

        names = ("position", "number", "seed", "tokens", "text", "outcome", "stopped")
        columns = {name: [getattr(each, name) for each in self.rollouts] for name in names}
        made = pd.DataFrame({**columns, "outcome": pd.Series(columns["outcome"], dtype=object)})
        for column, name in enumerate(self._choices):
            made[f"p({name})"] = [each.probabilities[column] for each in self.rollouts]
        return made

    @cached_property
    def index(self) -> pd.DataFrame:
        """One line per kept row: position and number of its rollout, place, and the position of its token on the path."""
        import pandas as pd

        lines = [(each.position, each.number, place, at) for each in self.rollouts for place, at in each.rows]
        return pd.DataFrame(lines, columns=["position", "number", "place", "token"])

    @property
    def states(self) -> Mapping[str, Tensor]:
        """The kept rows by site: [rows, ...], in the order of `index`. Patterns have as many keys as the longest path needs.
        Tensors are joined, or read from their files, when they are asked for."""
        return LazyRows(partial(kept_sites, self.rollouts), partial(kept_rows, self.rollouts))

    def outcomes(self) -> OutcomeCounts:
        """How often each outcome followed each position."""
        plan, names = self.plan, list(self._choices) or self._found_outcomes()
        counts = np.zeros((len(plan.positions), len(names)), dtype=np.int64)
        for place, drawn in enumerate(self._by_position()):
            for outcome, count in Counter(each.outcome for each in drawn).items():
                counts[place, names.index(NO_ANSWER if outcome is None else outcome)] = count
        shares = None
        if self._choices:
            shares = np.stack([np.array([each.probabilities for each in drawn]).mean(0) for drawn in self._by_position()])
        makers = () if self.made_by is None else (self.made_by,)
        return OutcomeCounts(list(plan.positions), names, counts, list(plan.texts), shares, made_by=makers)

    def settled(self, alpha: float = 0.05) -> dict[int, str | None]:
        """The likeliest answer at each position, where it is settled with this probability of an error; else None.

        The probability holds at any number of rollouts, also if it was chosen by looking at them: see `Race`.
        """
        races = {position: Race(alpha) for position in self.plan.positions}
        for each in self.rollouts:
            races[each.position].add(each.outcome)
        return {position: race.settled for position, race in races.items()}

    def _by_position(self) -> list[list[Rollout]]:
        """The rollouts of each position, of which some may have fewer than others."""
        found: dict[int, list[Rollout]] = {position: [] for position in self.plan.positions}
        for each in self.rollouts:
            found[each.position].append(each)
        return list(found.values())

    def _found_outcomes(self) -> list[str]:
        found = sorted({each.outcome for each in self.rollouts if each.outcome is not None})
        return found + [NO_ANSWER] * any(each.outcome is None for each in self.rollouts)

    @property
    def _choices(self) -> tuple[str, ...]:
        """The names of the choices, and of the rest."""
        answer = self.plan.answer
        return (*map(str, answer.tokens), OTHER) if answer is not None and answer.tokens else ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all rollouts with their rows. The same for any waves and any number of workers."""
        return hashlib.sha256("".join(each.digest for each in self.rollouts).encode()).hexdigest()

    @property
    def identifier(self) -> Identifier:
        """What the rollouts are cited by: of `digest` and of their plan, so of model, prompt and sampling, too. A function that
        reads answers does not count, since no file holds it; the answers do."""
        plan = {name: value for name, value in self.plan.to_json().items() if name != "answer"}
        return Identifier(digest_of({"plan": plan, "rollouts": self.digest}))

    def cite(self) -> Citation:
        """How to cite the rollouts: text and BibTeX with an identifier that holds on every machine."""
        plan, found = self.plan, self.identifier
        each = plan.n if len(self) == len(plan) else f"at most {plan.n}"
        what = f"{len(self)} rollouts, {each} at each of {len(plan.positions)} positions of {len(plan.tokens)} tokens"
        made = {} if self.made_by is None else self.made_by.cited
        return Citation(str(found), what, self._check, fingerprint=plan.fingerprint, **made)

    @property
    def _check(self) -> str:
        """How the rollouts are checked: by a command where a folder holds all that it needs."""
        again = "the same call of resample in Python gives rollouts with this identifier"
        if self.read_by_function:
            return f"{again}; it needs the function that read the answers, which no file holds"
        if len(self) < len(self.plan):  # they were drawn with settle=, which takes no folder
            return again
        return f"replaylens verify {self.identifier} --in FOLDER, that of resample(..., folder=FOLDER)"

    @property
    def read_by_function(self) -> bool:
        """Whether a function read the answers: then they cannot be drawn again from their folder."""
        answer = self.plan.answer
        if answer is not None:
            return answer.reader is not None
        return any(each.outcome is not None or each.stopped == "answer" for each in self)

    def plot(self) -> Figure:
        """Shares of the outcomes at each fork, one bar per fork from top to bottom, named by the text after it."""
        from replaylens.engine.display import picture, plain, short, shows
        from replaylens.views.rollouts import colours

        counts = self.outcomes()
        rows, below = range(len(counts.positions)), np.zeros(len(counts.positions))
        figure = picture(8, max(min(0.26 * len(rows), 40) + 1.2, 1.9))  # the label of the axis needs its height
        axis = figure.subplots()
        for column, (name, fill) in enumerate(zip(counts.outcomes, colours(counts.outcomes), strict=True)):
            axis.barh(rows, counts.shares[:, column], left=below, label=plain(name), color=fill)
            below = below + counts.shares[:, column]
        names = [
            f"{plain(short(text.strip() or 'the end', _MAX_TEXT))} ({at})"
            for at, text in zip(counts.positions, counts.texts, strict=True)
        ]
        axis.set_yticks(rows, names, fontsize=8)
        axis.set(xlabel="share of rollouts", xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), ylabel="fork before (position)")
        figure.legend(loc="outside upper center", ncols=min(4, len(counts.outcomes)), fontsize=8)
        return shows(figure, lambda: str(self.identifier))

    def _repr_html_(self) -> str:
        counts = self.outcomes()
        head = "".join(f"<th>{escape(name)}</th>" for name in ("position", "text", *counts.outcomes))
        lines = [
            f"<tr><td>{at}</td><td>{escape(text.strip()[:80])}</td>{''.join(f'<td>{x:.2f}</td>' for x in shares)}</tr>"
            for at, text, shares in zip(counts.positions, counts.texts, counts.shares, strict=True)
        ]
        return f"<p>{escape(repr(self))}</p><table><tr>{head}</tr>{''.join(lines)}</table>"
