"""What an identifier names: finding it in folders, and checking reports, figures, rollouts and single rows for `verify`.

A dump is checked by `dumps.verify`. Everything here is read only; nothing in a file is executed.
"""

import json
import os
import random
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replaylens.dumps.content import KEYS
from replaylens.dumps.manifest import MANIFEST
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import MISMATCH, VERIFIED
from replaylens.engine.display import stamp_of
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, EngineError, Unsealed
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.proof.trace import is_trace
from replaylens.engine.records import Identifier
from replaylens.rollouts.drawing import redrawn
from replaylens.rollouts.plan import unit_texts
from replaylens.rollouts.rollouts import PLAN, Rollouts
from replaylens.tasks.errors import TaskError

if TYPE_CHECKING:
    from replaylens.probes.report import Report

FIGURES = (".png", ".svg", ".html")
REPORT, SWEEP = "report.json", "sweep.key"
"""as in `probes.report` and `probes.sweeps`, which need pandas"""
_DEPTH = 3
"""folders below one that are looked through for the dump of a report"""


@dataclass(frozen=True)
class Checked:
    """The verdict on something that is not a whole dump."""

    status: str
    """verified or mismatch"""
    kind: str
    """row, rollouts, report, figure, page, sweep, probe, lens, or saved: a folder of probes and lenses"""
    identifier: str
    """of what has none, its path"""
    lines: tuple[str, ...]
    """what was compared, and what was not"""

    def __str__(self) -> str:
        return "\n".join([f"{self.status}: {self.kind} {self.identifier}", *self.lines])


@dataclass(frozen=True)
class CitedFile:
    """Where an identifier leads."""

    kind: str
    """dump, row, or as in `Checked`"""
    path: str


# ---- finding ---------------------------------------------------------------------------------------------------------


def kind_of(path: str) -> str:
    """What a path holds, by its files; anything unknown must be a dump."""
    here = Path(path)
    if "://" in path:
        return "dump"
    if here.is_file() and here.suffix.lower() in FIGURES:
        return "figure"
    if (saved := _saved(here)) is not None:
        return saved
    if (here / SWEEP).is_file() and not (here / REPORT).exists():
        return "sweep"
    if (here.is_file() and here.suffix == ".json") or ((here / REPORT).is_file() and not (here / MANIFEST).exists()):
        return "report"
    if (here / PLAN).is_file() and not (here / MANIFEST).exists():
        return "rollouts" if b'"wave"' in (here / PLAN).read_bytes() else "dump"
    return "saved" if here.is_dir() and not (here / MANIFEST).exists() and saved_in(here) else "dump"


def saved_in(folder: Path) -> dict[Path, str]:
    """The probes and tuned lenses of a folder: their JSON files, and probe or lens."""
    return {path: kind for path in sorted(folder.glob("*.json")) if (kind := _saved(path)) is not None}


def _saved(path: Path) -> str | None:
    """probe or lens, if that is what one of its two files, or the name that they share, leads to."""
    if path.is_dir() or (path.exists() and path.suffix not in (".json", ".safetensors")):
        return None
    try:
        raw = json.loads(path.with_suffix(".json").read_bytes())
        fields = set(raw)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    if {"unembed", "digest"} <= fields:
        return "lens"
    return "probe" if isinstance(raw, dict) and raw.get("format") == "replaylens-probe" else None


_FILES = {
    "plan.json": "the plan of a dump or of rollouts",
    "manifest.json": "the manifest of a dump",
    "index.parquet": "the index of a dump",
    r"shard-\d+\.safetensors": "a shard of a dump",
    r"part-\d+\.(json|parquet)": "the record of a shard of a dump",
    r"wave-\d+\.(json|safetensors)": "a wave of rollouts",
    r"[0-9a-f]{24}\.npz": "a part of a sweep",
    "sweep.key": "the key of a sweep",
    "table.csv": "the table of a report",
    "summary.txt": "the summary of a report",
}
"""our files that are verified with their folder alone, by their names"""
_ELSEWHERE = {
    r"(config|replaylens|thinking|tokenizer|recipe)\.json|(model|thinking|training)\.safetensors|card\.md": (
        "a file of a model's folder. Test it with replaylens doctor {folder}."
    ),
    r"meta\.json|train-00000-of-00001\.parquet|hidden_layer\d+_shard\d+\.safetensors": (
        "a file in the format of another tool, which has no identifier. What made it makes it again."
    ),
}
"""our files that `verify` does not check, and what does"""
_GIVE = "Give the folder of a dump, of rollouts, of a report or of a sweep, a saved probe or lens, or a figure."


def require_whole(path: str) -> None:
    """BadRequest if a path is a part of something that is verified as a whole, or nothing that `verify` checks: it says what
    the path is, and what to verify instead."""
    here = Path(path)
    if "://" in path or not here.exists() or _saved(here):
        return
    if here.is_dir():
        if kind_of(path) == "dump" and not any((here / name).exists() for name in (MANIFEST, PLAN)):
            if any((here / name).exists() for name in ("config.json", "replaylens.json")):
                raise BadRequest(f"{path} is a model's folder. Test it with replaylens doctor {shlex.quote(path)}.")
            raise BadRequest(f"{path} holds nothing to verify. {_GIVE}")
        return
    folder = shlex.quote(str(here.parent))
    for names, what in _FILES.items():
        if re.fullmatch(names, here.name):
            raise BadRequest(f"{path} is {what}, which is verified as a whole: replaylens verify {folder}.")
    name = "meta.json" if here.with_name("meta.json").exists() else here.name  # whose other file is named as any probe's is
    for names, what in _ELSEWHERE.items():
        if re.fullmatch(names, name):
            raise BadRequest(f"{path} is {what.format(folder=folder)}")
    if here.suffix.lower() not in (".json", *FIGURES):
        if is_trace(here.read_bytes()):
            raise BadRequest(f"{path} is a trace. In Python, engine.replay_trace(Trace.load(PATH)) compares every commit.")
        raise BadRequest(f"{path} is not a file that replaylens verifies. {_GIVE}")


def find(wanted: Identifier, folders: Sequence[str]) -> CitedFile:
    """What has this identifier in some folders, or below them. BadRequest says how much was looked at."""
    seen, damaged, shown = 0, 0, ""
    for found in (each for folder in folders for each in _candidates(folder)):
        seen += 1
        try:
            with warnings.catch_warnings(action="ignore"):
                if found.kind in _NAMES and _NAMES[found.kind](found.path, wanted):
                    return CitedFile("row", found.path) if wanted.row is not None else found
                if found.kind == "figure" and not shown and _shows(found.path, wanted):
                    shown = found.path
        except EngineError:
            damaged += 1
    unread = f", of which {damaged} could not be read" * bool(damaged)
    where = ", ".join(folders)
    figure = f" {shown} shows it: check that file with replaylens verify {shlex.quote(shown)}." * bool(shown)
    raise BadRequest(
        f"{wanted} is in none of {seen} results below {where}{unread}.{figure} Name another folder with --in. A result of the "
        "workbench (lens, patch, ablate, ...) has no file: the same call in Python gives the same digest, as replaylens "
        "reproduce NAME does for a published figure."
    )


def _candidates(folder: str, depth: int | None = None) -> Iterator[CitedFile]:
    """What is in a folder, or at most so many folders below it."""
    if "://" in folder:
        yield CitedFile("dump", folder)
        return
    if not Path(folder).exists():
        raise BadRequest(f"{folder} does not exist. Name the folder to look in with --in.")
    if Path(folder).is_file():
        yield CitedFile(kind_of(folder), folder)
    for here, below, files in os.walk(folder):
        deep = depth is not None and len(Path(here).relative_to(folder).parts) >= depth
        below[:] = sorted(each for each in below if not each.startswith(".") and not deep)
        if not {MANIFEST, PLAN, REPORT}.isdisjoint(files):
            yield CitedFile(kind_of(here), here)
        for name in sorted(files):
            if Path(name).suffix.lower() in FIGURES:
                yield CitedFile("figure", str(Path(here) / name))


def _dump_is(path: str, wanted: Identifier) -> bool:
    dump = Dump.open(path, check_files=False)
    if wanted.row is None:
        return wanted.digest in (dump.digest, dump.accepted_digest)
    return stored_row(dump, wanted) == wanted


def stored_row(dump: Dump, wanted: Identifier) -> Identifier | None:
    """The identifier of the row at the place of `wanted`; None if the dump has no such row."""
    assert wanted.row is not None
    if wanted.row[0] not in dump.manifest.plan.examples:
        return None
    content = dump.files.content(dump.files.shard_of(wanted.row[0]))
    keys = np.stack([content.index.column(key).to_numpy() for key in KEYS], axis=1)
    (rows,) = np.nonzero((keys == wanted.row).all(1))
    return content.row_identifier(int(rows[0])) if len(rows) else None


def _figure_is(path: str, wanted: Identifier) -> bool:
    stamp = stamp_of(Path(path).read_bytes())
    return stamp is not None and stamp.identifier == str(wanted)


def _shows(path: str, wanted: Identifier) -> bool:
    stamp = stamp_of(Path(path).read_bytes())
    return stamp is not None and str(wanted) in stamp.sources


_NAMES: dict[str, Callable[[str, Identifier], bool]] = {
    "dump": _dump_is,
    "rollouts": lambda path, wanted: Rollouts.load(path).identifier == wanted,
    "report": lambda path, wanted: _report(path).digest == wanted.digest,
    "figure": _figure_is,
}


# ---- checking --------------------------------------------------------------------------------------------------------


def check_figure(path: str) -> Checked:
    """Whether a figure, or a page, is the one that its stamp names."""
    stamp = stamp_of(Path(path).read_bytes())
    if stamp is None:
        raise BadRequest(f"{path} carries no identifier: an older version or another program wrote it. Save the figure again.")
    told = tuple(f"it shows {each}" for each in stamp.sources)
    kind = "page" if Path(path).suffix.lower() == ".html" else "figure"
    if not stamp.intact:
        return Checked(MISMATCH, kind, stamp.identifier, (f"{path} was changed: it has digest {stamp.digest}", *told))
    return Checked(VERIFIED, kind, stamp.identifier, ("the file has the digest that it carries", *told))


def _report(path: str) -> "Report":
    from replaylens.probes.report import Report

    with warnings.catch_warnings(action="ignore", category=Unsealed):  # the verdict says so
        return Report.load(path)


def check_report(path: str, folders: Sequence[str] = ()) -> Checked:
    """Whether a report has the digest and the summary of its numbers, whether the files beside it are its own, and whether its
    dump, if it is in some of the folders, gives the same report. BadFile if it is none, or was changed.
    """
    report, file = _report(path), Path(path) / REPORT if Path(path).is_dir() else Path(path)
    name, what = str(Identifier(report.digest)), report.cite().what
    raw = json.loads(file.read_text(encoding="utf-8"))
    wrong = [f"the summary in {REPORT} is not that of its numbers"] * (raw.get("summary") != report.summary())
    own, other = report.strays(file.parent) if file.name == REPORT else ([], [])
    wrong += [f"{each} is not that of {REPORT}: one of them was changed, or is of another report" for each in other]
    if wrong:
        return Checked(MISMATCH, "report", name, (what, *wrong))
    told = f"{', '.join([REPORT, *own])}: as written, with the digest of the report"
    if "digest" not in raw:
        told = f"{REPORT} is unsealed: an older version wrote it, without a digest"
    fine, line = _computed_again(report, folders)
    return Checked(VERIFIED if fine else MISMATCH, "report", name, (what, told, line))


def _computed_again(report: "Report", folders: Sequence[str]) -> tuple[bool, str]:
    """(whether nothing contradicts the report, what was computed again or taken on trust)"""
    from replaylens.probes.sweeps import again

    trust = "taken on trust: every number, because no dump"
    digest = report.source.get("digest") or ""
    if (dump := _dump_with(digest, folders)) is None:
        where = ", ".join(folders) or "any folder that was named"
        return True, f"{trust} with digest {digest[:16] or '?'} is in {where}: name its folder with --in"
    try:
        made = again(report, dump)
    except (EngineError, TaskError) as error:
        made = f"the sweep over {dump.url} fails: {error}"
    if isinstance(made, str):
        return True, f"taken on trust: every number, because {made}"
    if made.digest == report.digest:
        return True, f"reproduced: every line, note and finding, from the rows of {dump.url}; these rows are taken on trust"
    return False, f"the same call on {dump.url} gives another report, with digest {made.digest}"


def _dump_with(digest: str, folders: Sequence[str]) -> Dump | None:
    """The first dump in some folders, or a few folders below, that has this digest."""
    for folder in folders:
        for found in _candidates(folder, _DEPTH):
            with suppress(EngineError):
                if found.kind == "dump" and (dump := Dump.open(found.path)).digest == digest:
                    return dump
    return None


def check_sweep(path: str) -> Checked:
    """Whether the parts of a sweep's folder are those that were written. BadFile names the first one that is not."""
    from replaylens.probes.sweeps import check_parts

    sealed, unsealed = check_parts(Path(path))
    lines = [f"{sealed} parts have the hash that they were written with"]
    if unsealed:
        lines.append(f"{unsealed} parts are unsealed: an older version wrote them, and a resumed sweep computes them again")
    return Checked(VERIFIED, "sweep", path, (*lines, "taken on trust: every number"))


def check_saved(path: str, kind: str) -> Checked:
    """Whether a saved probe or a tuned lens, or each of a folder, is the one that was written. BadFile or BadWeights if
    it is not."""
    if kind == "saved":
        each = [(file, of, check_saved(str(file), of)) for file, of in saved_in(Path(path)).items()]
        lines = [f"{of} {file.stem}: {checked.lines[0]}" for file, of, checked in each]
        return Checked(VERIFIED, kind, path, (*lines, *_SAVED))
    if kind == "lens":
        told = f"digest {TunedLens.load(Path(path).with_suffix('.safetensors')).digest}"
    else:
        from replaylens.probes.probe import LinearProbe

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = LinearProbe.load(path)
        told = "; ".join([str(found), *("unsealed: an older version wrote it, without a hash" for _ in caught)])
    return Checked(VERIFIED, kind, path, (told, *_SAVED))


_SAVED = "the files are as written", "taken on trust: every number"


def check_rollouts(path: str, engine: Engine, sample: int | float | str, seed: int) -> Checked:
    """Draw rollouts of a folder again, or a sample of them, and compare every bit. BadFile if files are damaged."""
    found = Rollouts.load(path)
    name, count = str(found.identifier), _count(sample, len(found))
    indices = sorted(random.Random(f"{found.digest} {seed}").sample(range(len(found)), count))
    told = f"{count} of {len(found)} rollouts drawn again"
    for index, again in zip(indices, redrawn(engine, found, indices), strict=True):
        if again.digest != found[index].digest:
            where = f"rollout {found[index].number} at position {found[index].position} differs: {again.text[:80]!r} here"
            return Checked(MISMATCH, "rollouts", name, (told, where))
    if found.plan.texts != unit_texts(found.plan.positions, found.plan.tokens, engine.text):
        return Checked(MISMATCH, "rollouts", name, (told, "the texts of the plan are not those of its tokens"))
    return Checked(VERIFIED, "rollouts", name, (told, *_told(found, count)))


_UNSHOWN = ("num_prompt",)
"""parts of a plan of rollouts that no rollout shows"""


def _told(found: Rollouts, count: int) -> list[str]:
    """What drawing again reproduced, and what is taken on trust: every part of the plan is one of the two."""
    names = [each.name for each in fields(found.plan) if each.name not in _UNSHOWN]
    trusted = [f"{', '.join(_UNSHOWN)} of the plan, and the size of waves: no rollout depends on them"]
    if count < len(found):
        trusted.append(f"{len(found) - count} of {len(found)} rollouts: only their hashes were checked")
    if found.made_by is not None and (free := sorted(found.made_by.unbound)):
        trusted.append(f"{', '.join(free)} of the fingerprint: results do not depend on them")
    return [f"reproduced: {', '.join(names)}", *(f"taken on trust: {each}" for each in trusted)]


def _count(sample: int | float | str, most: int) -> int:
    """The number of a sample's rollouts."""
    if isinstance(sample, str):
        return most
    if not 0 < sample <= (most if isinstance(sample, int) else 1):  # nor if it is NaN
        if not (isinstance(sample, int) and sample > most):
            raise BadRequest(f"Invalid --sample {sample}. Give a number of rollouts from 1 on, a share up to 1.0, or all.")
        return most
    return sample if isinstance(sample, int) else max(1, round(sample * most))
