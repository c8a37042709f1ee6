"""`sweep`: probes over sites x layers x positions x labels x estimators, with controls and statistics, in one call."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.dumps.manifest import MANIFEST, PLAN
from replaylens.dumps.reader import Dump
from replaylens.engine.display import is_stamped
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, MissingPackage, PlanMismatch, no_such
from replaylens.engine.files import require_own_folder, write_file
from replaylens.engine.machine import require_room
from replaylens.engine.request.values import as_int, as_list, short_repr, verb
from replaylens.engine.terminal import hidden
from replaylens.probes import intervals, registry
from replaylens.probes.checks import folds_and_seed, make_folder, names, once
from replaylens.probes.controls import (
    CONTROL,
    LABEL,
    ZERO,
    Goal,
    goals_at,
    majority,
    make_goal,
    require_same_rows,
    untrained_rows,
)
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, OneClass, ProbeError, TooFewGroups
from replaylens.probes.groups import GIVEN, INDEPENDENT, grouped, histories, independent, with_groups
from replaylens.probes.heldout import (
    HeldOutPredictions,
    OnlineCode,
    exchanged,
    held_out,
    label_orders,
    online_codes,
    refitted,
    require_orders,
    unconverged_together,
)
from replaylens.probes.intervals import LEVEL, corrected_p, mean_over_groups
from replaylens.probes.permutations import EXCHANGED, Null, exchanged_share, why_no_exchange, with_partners
from replaylens.probes.positions import PositionFunction, RowPosition
from replaylens.probes.probe import is_probe
from replaylens.probes.report import Report, about_rows, is_report, percent, score_line
from replaylens.probes.rows import LATER, Cell, ProbeRows
from replaylens.probes.settings import NAMED_SPLITS, NEEDS_BOTH, MakeSplit, SweepKeywords, SweepSettings, own_split, splitter
from replaylens.probes.solvers import Solution, one_hot, solve_path
from replaylens.probes.splits import Split, by_root
from replaylens.probes.tabulate import SweepPosition, tabulate
from replaylens.replay.run import Run

# ---- backend ---------------------------------------------------------------------------------------------------------
# The joblib backend on which a sweep runs its processes.


@contextmanager
def joblib_backend(name: str | None) -> Iterator[None]:
    """Use this joblib backend during the sweep. Raises ProbeError for an unknown one, MissingPackage without Ray."""
    if name is None:
        yield
        return
    import joblib

    if name == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise MissingPackage("backend='ray' needs the package ray. Install it: pip install 'ray[default]'.") from None

        register_ray()
    try:
        config = joblib.parallel_config(backend=name)
    except (ValueError, TypeError) as error:
        raise ProbeError(
            f"Unknown backend {short_repr(name)}. Use loky, multiprocessing, threading or ray. ({error})"
        ) from None
    with config:
        yield


# ---- curve -----------------------------------------------------------------------------------------------------------
# `complexity_curve`: how complex a probe has to be to read a label, after Pareto probing (Pimentel et al., arXiv 2010.02180).
#
# One cell is probed at many strengths of regularisation. Each probe has an accuracy on held-out rows and a complexity: the
# share of labels that it fits on its own training rows once they are exchanged between groups, where there is nothing to
# learn. A probe that reads a property is accurate while it can memorise little; one that needs to memorise is accurate only
# late on the curve. All strengths, folds and draws are solved together, on folds that keep groups apart.

PATH = tuple(10.0**power for power in range(-6, 3))
"""values of C"""
DRAWS = 5
"""exchanged labels that the complexity is a mean of"""
KIND = "complexity_curve"


def complexity_curve(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    site: str = "S",
    layer: int | None = None,
    position: str = "step",
    estimator: str = "logistic",
    C: Sequence[float] = PATH,
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Accuracy against complexity for one cell: one line per C, from the strongest regularisation to the weakest.

    estimator  logistic or ridge (alpha = 1 / C)

    Each accuracy has its interval over groups, and these columns: `complexity`; `train`, the accuracy on the training
    rows; `auroc`, which needs no threshold (at the strong end a probe may rank the rows well and yet call them all by the
    majority class); `norm` of the weights on standardised columns; `p_worse` of a paired test against the best C; and `pareto`,
    whether no other C is both simpler and more accurate.
    """
    if estimator not in ("logistic", "ridge"):
        raise ProbeError(f"{estimator} has no regularisation to vary. Use logistic or ridge.")
    path = sorted(set(map(float, C)))
    if not path or path[0] <= 0:
        raise ProbeError(f"C is {list(C)}. Give at least one value, all above 0.")
    folds, seed = folds_and_seed(folds, seed)
    rows = ProbeRows.of(given)
    cell = rows.cell(site, layer)
    here = independent(rows.accepted().at(position))
    if here.rows.target(label).kind != "class":
        raise BadRows(f"Label {label!r} is a number, and the curve needs classes. Give another label, or cut it into classes.")
    target = here.rows.target(label, "class")
    chosen, groups = here.rows.where(target.present), here.groups[target.present]
    goal, split = make_goal(target[target.present]), by_root(chosen, folds, seed)
    goal.check(split.train)
    x = torch.from_numpy(chosen.matrix(site, layer)).double()[None]
    orders = label_orders(goal, chosen.roots, groups, DRAWS, seed)
    codes = np.stack([goal.codes, *(goal.codes[order] for order in orders)])
    targets = one_hot(codes, len(goal.classes))
    probes = solve_path(estimator, x, targets, np.repeat(split.train[None], len(codes), 0), path)
    lines, right = [], []
    for value, probe in zip(path, probes, strict=True):
        line, correct = _point(probe, x, codes, split)
        accuracy = mean_over_groups(correct, groups, folds=folds)
        lines.append(score_line(f"C = {value:g}", "accuracy", accuracy, len(correct), cell, C=value, **line))
        right.append(correct)
    shared = dict(
        position=str(position), majority=majority(goal.codes, split.train, split.test), roots=len(np.unique(chosen.roots))
    )
    lines = [line | shared for line in lines]
    _compare(lines, np.stack(right), groups, folds)
    settings = dict(label=label, position=str(position), estimator=estimator, C=path, folds=folds, seed=seed)
    notes = [here.note] if here.note else []
    return Report(KIND, lines, about_rows(chosen), settings, notes, _say(lines, f"{label} at {cell}, {position} ({estimator})"))


def _point(probe: Solution, x: torch.Tensor, codes: np.ndarray, split: Split) -> tuple[dict[str, Any], np.ndarray]:
    """(columns of one C, whether each row is read correctly by the probe that was not fitted on it)"""
    scores = probe.scores(x)[0].numpy()  # [1 + draws, folds, rows, k]
    said = (scores[..., 0] > 0).astype(int) if scores.shape[-1] == 1 else scores.argmax(-1)
    fold = split.test.argmax(0)
    rows = np.arange(codes.shape[1])
    fitted = [[(said[t, f] == codes[t])[train].mean() for f, train in enumerate(split.train)] for t in range(len(codes))]
    spread = torch.stack([x[0, torch.from_numpy(train)].std(0, correction=0) for train in split.train])  # [folds, d]
    found = {
        "complexity": float(np.mean(fitted[1:])),
        "train": float(np.mean(fitted[0])),
        "auroc": float(intervals.auroc(scores[None, 0, fold, rows], codes[0], fold)[0]),
        "norm": float((probe.weight[0, 0] * spread[:, None]).norm(dim=(1, 2)).mean()),
    }
    return found, said[0, fold, rows] == codes[0]


def _compare(lines: list[dict[str, Any]], right: np.ndarray, groups: np.ndarray, folds: int) -> None:
    """Mutates `lines`: adds how each C compares with the best one, and whether it is on the Pareto front."""
    best = max(range(len(lines)), key=lambda i: (lines[i]["accuracy"], -i))
    worse = corrected_p(right[best].astype(float) - right, groups, folds)
    for line, p in zip(lines, worse, strict=True):
        line["p_worse"] = float(p)
        line["pareto"] = not any(_dominates(other, line) for other in lines)


def _dominates(other: dict[str, Any], line: dict[str, Any]) -> bool:
    at_least = other["accuracy"] >= line["accuracy"] and other["complexity"] <= line["complexity"]
    return bool(at_least and (other["accuracy"] > line["accuracy"] or other["complexity"] < line["complexity"]))


def _say(lines: list[dict[str, Any]], what: str) -> list[str]:
    best = max(lines, key=lambda line: line["accuracy"])
    simple = next(line for line in lines if line["p_worse"] > 1 - LEVEL)
    first = f"{what}: best accuracy {percent(best['accuracy'], best['low'], best['high'])} at {best['what']}"
    second = (
        f"The strongest regularisation that is not worse (p > {1 - LEVEL:.2f}) is {simple['what']}: accuracy "
        f"{percent(simple['accuracy'], simple['low'], simple['high'])}, complexity {100 * simple['complexity']:.1f} % "
        f"(share of exchanged labels that it fits; the majority class is {100 * simple['majority']:.1f} %)."
    )
    return [f"{first}, complexity {100 * best['complexity']:.1f} %.", second]


# ---- again -----------------------------------------------------------------------------------------------------------
# The call that a report tells of, made once more: what `replaylens verify` compares a report with.


def again(report: Report, dump: Dump) -> Report | str:
    """The report of the call that a report tells of, on a dump. In words: why the call cannot be made from its settings."""
    made, rows = _called(report, dump), report.source.get("rows")
    if isinstance(made, Report) and made.source["rows"] != rows:
        return f"it has {rows} rows, the dump {made.source['rows']}: it was made from a view of the dump"
    return made


def _called(report: Report, dump: Dump) -> Report | str:
    settings = dict(report.settings)
    if report.kind == KIND:
        cell = {name: report.lines[0][name] for name in ("site", "layer")}
        return complexity_curve(dump, settings.pop("label"), **cell, **settings)
    if report.kind != "sweep":
        return f"a {report.kind} report tells results of a model or of other inputs, which its settings do not hold"
    if settings.pop("untrained"):
        return "it compares with an untrained model"
    if settings["groups"] == GIVEN:
        return "it has groups that were given as values"
    if settings["split"].partition(":")[0] not in NAMED_SPLITS:
        return f"its split {short_repr(settings['split'])} is a function"
    return sweep(dump, settings.pop("labels"), **settings)


# ---- parts -----------------------------------------------------------------------------------------------------------
# `SweepCache`: finished parts of a sweep on disk, so that an interrupted sweep can resume.

_KEY = "sweep.key"
_PART = re.compile(r"[0-9a-f]{24}\.npz")
_SEAL, _END = 2 + 64, b"PK\5\6"
"""bytes of a seal with its length; what the last record of a zip file begins with, 22 bytes from its end if it is unsealed"""
_ARRAYS = tuple(field.name for field in fields(HeldOutPredictions))
_NULL = ("observed", "drawn", "constant")
_DELETE = "Delete it, and run the sweep again: it computes this part anew."
_ROOM = "Finished parts are kept. Make room, and run the same sweep again with the same resume=FOLDER."


class SweepCache:
    """Parts by name. Without a folder nothing is stored. Raises PlanMismatch if the folder belongs to other settings or
    rows, BadFile if a file of it was changed."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        self.folder, self.key = None if folder is None else make_folder(folder), key
        if self.folder is None:
            return
        require_own_folder(self.folder, holds_probes)
        noted = self.folder / _KEY
        if not noted.exists() or not noted.stat().st_size:  # an older version could leave it empty on a full disk
            for path in parts_in(self.folder):
                read_part(path, key)
            write_file(noted, key, advice=_ROOM)
        elif key_in(self.folder) != key:
            raise PlanMismatch(f"{folder} holds parts of another sweep. Give its settings and rows, or another folder.")

    def get(self, name: str, make: Callable[[], HeldOutPredictions]) -> HeldOutPredictions:
        """The stored predictions of this name, or else newly computed ones.

        What an earlier version wrote, without a hash or without scores, is computed again.
        """
        return HeldOutPredictions(
            **self.arrays(name, lambda: {each: getattr(made, each) for made in [make()] for each in _ARRAYS}, _ARRAYS)
        )

    def arrays(self, name: str, make: Callable[[], dict[str, np.ndarray]], expected: Sequence[str]) -> dict[str, np.ndarray]:
        """The stored arrays of this name, or else newly computed ones, stored before they are returned. Raises BadFile
        if the stored ones were changed."""
        if self.folder is None:
            return make()
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npz"
        if path.exists():
            kept = read_part(path, self.key)
            if kept is not None and kept.keys() >= set(expected):
                return {each: kept[each] for each in expected}
        made = {each: np.asarray(array) for each, array in make().items() if each in expected}
        content = BytesIO()
        np.savez(content, allow_pickle=False, **made)
        write_file(path, _sealed(content.getvalue(), self.key, path.stem), advice=_ROOM)
        return made


def holds_probes(folder: Path) -> bool:
    """Whether a folder is one that sweeps write into: with parts of one, a report, a figure or a saved probe, or with nothing
    but such folders. A dump is none, whatever else is in it."""
    there = list(folder.iterdir())
    if not {MANIFEST, PLAN}.isdisjoint(path.name for path in there):
        return False
    if any(path.name == _KEY or (path.is_file() and _is_own(path)) for path in there):
        return True
    return bool(there) and all(path.is_dir() and holds_probes(path) for path in there)


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        match path.suffix:
            case ".json":
                return is_report(path.read_bytes()) or is_probe(path.read_bytes())
            case ".png":
                return is_stamped(path.read_bytes())
    return False


def parts_in(folder: Path) -> list[Path]:
    """The parts of a sweep's folder."""
    return sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name))


def key_in(folder: Path) -> str:
    """The key of a sweep's folder. BadFile if the file is damaged."""
    found = (folder / _KEY).read_text(encoding="utf-8", errors="replace")
    if not re.fullmatch("[0-9a-f]{64}", found):
        raise BadFile(f"{folder / _KEY} is damaged: it holds no key. Restore it, or give another folder.")
    return found


def read_part(path: Path, key: str) -> dict[str, np.ndarray] | None:
    """The arrays of a part of the sweep with this key; None if an older version wrote it, without a hash. BadFile if it
    was changed after it was written, or is another's."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}. {_DELETE}") from None
    end = len(content) - _SEAL
    if content[-22:].startswith(_END) and content.endswith(b"\0\0"):
        return None
    body = content[:end] + b"\0\0"
    if not body[-22:].startswith(_END) or content != _sealed(body, key, path.stem):
        raise BadFile(f"{path} was changed after it was written, or is of another sweep: its seal is broken. {_DELETE}")
    with np.load(BytesIO(body), allow_pickle=False) as kept:
        return {each: kept[each] for each in kept.files}


def _sealed(body: bytes, key: str, name: str) -> bytes:
    """An archive with the SHA-256 of itself, and of what it is a part of, in its comment, which is the end of a zip file."""
    told = hashlib.sha256(f"{key} {name} ".encode() + body).hexdigest().encode()
    return body[:-2] + len(told).to_bytes(2, "little") + told


def check_parts(folder: Path) -> tuple[int, int]:
    """(parts of a sweep's folder that have their seal, parts of older versions without one). BadFile for the first one
    that was changed."""
    key = key_in(folder)
    kept = [read_part(path, key) is not None for path in parts_in(folder)]
    return sum(kept), len(kept) - sum(kept)


# ---- sweeping --------------------------------------------------------------------------------------------------------

MEMORY_MB = 1024
"""of rows loaded together; on a CPU its value changes no bit"""


@verb
def sweep(
    given: Dump | Run | ProbeRows,
    label: str | Sequence[str] = "state",
    *,
    sites: str | Sequence[str] | None = None,
    positions: str | PositionFunction | Sequence[str | int | PositionFunction] | None = None,
    estimators: str | Sequence[str] = ("logistic",),
    split: str | MakeSplit = "root",
    engine: Engine | None = None,
    untrained: ProbeRows | bool | None = None,
    groups: str | Sequence[Any] | None = None,
    resume: str | Path | None = None,
    jobs: int = 1,
    backend: str | None = None,
    progress: bool = False,
    **options: Unpack[SweepKeywords],
) -> Report:
    """Fit and test every combination. Equal rows and settings give equal reports, bit for bit.

    Rows with the same path are one observation and count once; roots that share one are one group (see `groups`). A label or
    position without usable rows is skipped, and the report's notes say so; an error is raised only if nothing is left.

    sites, positions
             default: S, T and C, as far as they are stored, at steps and query; of given texts, at their last token; of rows
             from arrays, every site at every row
    split    root (cross-validation over groups of roots), another value of `SweepSettings.split`, or a function from rows to
             a `Split`
    engine   the engine that computed the rows: adds an untrained model as a control. Raises FingerprintMismatch for another one
    untrained
             the same rows of a model with random weights, where no engine can make them; the same control. True: the engine
             of the given run makes them
    groups   what more than the prompt makes rows alike, such as the topic or the author of your own texts, or words to hold
             out: a column of the index (a label, `text`), or one value per example or per row. Prompts that share a value are
             one group: in one fold, exchanged together. Held-out words leave a control task nothing to memorise. Default: texts
             of your own that begin alike are one group; "independent" takes them as independent, and the verdict says so
    resume   a folder for finished parts, from which an interrupted sweep resumes
    jobs     number of processes for estimators that are fitted one by one; -1: one per core
    backend  of joblib; `ray` for a cluster
    others   see the fields of `SweepSettings`

    >>> from replaylens import Engine, tasks
    >>> run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(1, 3)).examples(40), sites="S")
    >>> report = sweep(run, "face", sites="S", layers=[0, 3], positions="query", estimators="ridge")
    >>> best = report.best("face")
    >>> best["layer"], best["accuracy"] > max(best["majority"], best["bag_of_tokens"], best["shuffled"])
    (3, True)
    """
    engine, untrained = _maker(given, engine, untrained)
    rows = _numbered(ProbeRows.of(given), engine, untrained)
    places = _positions(rows, rows.default_positions if positions is None else positions)
    settings = SweepSettings(
        labels=names("label", label),
        sites=names("sites", rows.default_sites if sites is None else sites),
        positions=once("positions", [place.spec for place in places]),
        estimators=names("estimators", estimators, ProbeError),
        split=split if isinstance(split, str) else getattr(split, "__name__", "own"),
        untrained=engine is not None or untrained is not None,
        groups=groups if groups is None or isinstance(groups, str) else GIVEN,
        **options,
    )
    require_jobs(jobs, backend)
    blank = _blank(rows, settings, engine, untrained)
    if groups is not None and not isinstance(groups, str):
        rows = with_groups(rows, groups)
    make_split = splitter(settings) if isinstance(split, str) else partial(own_split, split)
    with joblib_backend(backend):
        return _Sweep(rows, settings, places, make_split, blank, resume, jobs, progress).run()


def require_jobs(jobs: int, backend: str | None = None) -> None:
    """Raise ProbeError for a number of processes that is none, or for which this machine has no room."""
    if as_int("jobs", jobs, error=ProbeError) == 0:
        raise ProbeError("jobs=0 runs nothing. Give a number of processes, or -1 for one per core.")
    if backend != "ray":  # whose cluster has other machines
        require_room(f"jobs={short_repr(jobs)}", processes=int(jobs), error=ProbeError)


def _maker(given: Any, engine: Engine | None, untrained: ProbeRows | bool | None) -> tuple[Engine | None, ProbeRows | None]:
    """(engine, rows) of the untrained control, at most one of them. Raises ProbeError for True without a run."""
    if isinstance(untrained, ProbeRows) or not untrained:
        if untrained is not None and not isinstance(untrained, ProbeRows | bool):
            raise ProbeError(f"Invalid untrained={short_repr(untrained)}. Give ProbeRows, or True for a run.")
        return engine, untrained or None
    if untrained is not True:
        raise ProbeError(f"Invalid untrained={short_repr(untrained)}. Give ProbeRows, or True for a run.")
    if engine is None and not isinstance(given, Run):
        raise ProbeError(
            f"untrained=True needs the engine, and a {type(given).__name__} does not hold one. Give engine=, the engine that "
            f"computed the rows."
        )
    return engine or given.engine, None


def _numbered(rows: ProbeRows, engine: Engine | None, untrained: ProbeRows | None) -> ProbeRows:
    """The rows, checked against the engine and numbered like those of its untrained model, from 0 on."""
    if engine is not None and untrained is not None:
        raise ProbeError("Both an engine and rows of an untrained model are given. Give one of them.")
    if engine is None:
        return rows
    rows.require(engine)
    return rows.renumbered()


def _blank(rows: ProbeRows, settings: SweepSettings, engine: Engine | None, untrained: ProbeRows | None) -> ProbeRows | None:
    """The same rows of an untrained model, made by the engine or given; None: without this control."""
    if untrained is not None:
        require_same_rows(rows, untrained)
    return untrained if engine is None else untrained_rows(rows, engine, _stored(rows, settings), settings.seed)


@dataclass
class _Sweep:
    """One call of `sweep`."""

    rows: ProbeRows
    settings: SweepSettings
    positions: Sequence[RowPosition]
    make_split: MakeSplit
    blank: ProbeRows | None
    resume: str | Path | None
    jobs: int
    progress: bool

    def run(self) -> Report:
        chosen = self._branches(self.rows)
        cells = chosen.cells(self.settings.sites, self.settings.layers)
        parts = SweepCache(self.resume, self.settings.key(_digest(self.rows) + (self.blank.about.digest if self.blank else "")))
        places = [self._place(chosen, cells, position) for position in self.positions]
        probed = [place for place in places if place.goals]
        if not probed:
            raise BadRows(f"No label can be probed at any position. {' '.join(_notes(places))}")
        require_orders(self.settings.permutations, max(len(place.rows) for place in probed))
        with unconverged_together(), tqdm(total=len(probed) * len(cells), unit="cell", disable=hidden(self.progress)) as bar:
            for place in probed:
                self._fill(place, parts, bar)
        return tabulate(probed, self.rows, self.settings, _notes(places))

    def _branches(self, rows: ProbeRows) -> ProbeRows:
        match self.settings.branches:
            case "accepted":
                return rows if self.settings.split.partition(":")[0] in NEEDS_BOTH else rows.accepted()
            case "rejected":
                return rows.rejected()
        return rows

    def _place(self, chosen: ProbeRows, cells: list[Cell], at: RowPosition) -> SweepPosition:
        """The rows, groups, split and goals of one position; without goals if none can be probed there."""
        settings, found, position = self.settings, chosen.at_position(at), at.spec
        if not len(found):
            return SweepPosition.nothing(position, found, "there is no row; give rows of that position, or choose another")
        if settings.groups not in (None, INDEPENDENT):
            found = grouped(found, str(settings.groups))
        labels = [found.target(label) for label in settings.labels] if settings.split == "root" else []
        here = independent(found, labels, settings.groups)  # another split could part rows of one observation
        try:
            split = self.make_split(here.rows).check(here.rows, here.keys)
        except TooFewGroups as error:
            return SweepPosition.nothing(position, found, str(error))
        paths = histories(here.rows) if settings.controls else None
        how: dict[str, Any] = dict(with_controls=settings.controls, seed=settings.seed, metric=settings.metric)
        how["tested"] = np.logical_or.reduce(split.test)
        goals, skipped = goals_at(here.rows, here.groups, paths, settings.labels, split.train, **how)
        skipped += [("the beginning", here.note)] if here.note else []
        if here.num_torn:
            why = f"{here.num_torn} rows share their path with a row of another label, and no probe can read both"
            skipped.append(("counting equal rows once", why))
        for goal in (each for each in goals if each.role == ZERO):
            for estimator in settings.estimators:
                if goal.kind not in registry.get(estimator).kinds:
                    skipped.append((f"known zero {goal.label!r} with {estimator}", _UNFIT[goal.kind]))
        return SweepPosition(position, here.rows, here.groups, split, goals, cells, skipped, paths, here.copies, here.rule)

    def _fill(self, place: SweepPosition, parts: SweepCache, bar: Any) -> None:
        """Mutates `place`: predictions and permutation tests, one part per batch of cells."""
        part = f"{place.position}/{place.split.digest}"  # a custom split is identified by its masks alone
        for batch in _batches(place.rows, place.cells):
            for estimator in self.settings.estimators:
                name = f"{part}/{estimator}/{batch[0]}"
                held = parts.get(name, partial(self._fit, place, place.rows, batch, estimator))
                place.add(estimator, batch, held)
                for number, goal in enumerate(place.goals):
                    if goal.role == LABEL and self.settings.permutations:
                        self._test(place, batch, estimator, number, held, parts, f"{name}/{goal.label}/permuted")
            self._extras(place, place.rows, batch, parts, part)
            bar.update(len(batch))

    def _fit(self, place: SweepPosition, rows: ProbeRows, batch: list[Cell], estimator: str) -> HeldOutPredictions:
        masks = (place.split.train, place.split.test)
        x = self._load(rows, batch)
        how: dict[str, Any] = dict(nuisance=self._nuisance(place), groups=place.groups, jobs=self.jobs)
        return held_out(estimator, x, place.goals, *masks, **how)

    def _nuisance(self, place: SweepPosition) -> np.ndarray | None:
        return _numbers(place.rows, self.settings.residualise) if self.settings.residualise else None

    def _test(
        self,
        place: SweepPosition,
        batch: list[Cell],
        estimator: str,
        number: int,
        held: HeldOutPredictions,
        parts: SweepCache,
        name: str,
    ) -> None:
        """Mutates `place`: adds the scores on permuted labels, where the estimator can be fitted often enough."""
        goal, settings = place.goals[number], self.settings
        roots, groups = place.rows.roots, place.groups
        if len(place.split) == 1:  # the labels of the tested rows took no part in any fit
            how = (roots, groups, place.tested(goal), settings.permutations, settings.seed)
            place.add_null(estimator, goal, batch, exchanged(held.of(number, goal, place.tested(goal)), goal, *how))
        elif registry.get(estimator).refits:
            here, orders, why = _exchange(goal, roots, groups, settings, place.split.train)
            place.skipped += why
            if orders is not None:
                make = partial(self._null, place, batch, estimator, here, orders)
                place.add_null(estimator, goal, batch, Null(**parts.arrays(name, make, _NULL)))

    def _null(
        self, place: SweepPosition, batch: list[Cell], estimator: str, goal: Goal, orders: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The fields of a `Null`: scores on the labels and on permuted ones."""
        x = _single(self._load(place.rows, batch))
        null = refitted(estimator, x, goal, orders, place.split, nuisance=self._nuisance(place), jobs=self.jobs)
        return {"observed": null.observed, "drawn": null.drawn, "constant": _constant(null)}

    def _extras(self, place: SweepPosition, here: ProbeRows, batch: list[Cell], parts: SweepCache, part: str) -> None:
        """The untrained model, and the online code."""
        settings = self.settings
        if self.blank is not None:
            blank = replace(here, source=self.blank.source)
            for estimator in settings.estimators:
                name = f"{part}/untrained/{estimator}/{batch[0]}"
                made = parts.get(name, partial(self._fit, place, blank, batch, estimator))
                place.add_untrained(estimator, batch, made)
        if settings.code_length and "logistic" in settings.estimators:
            for goal in place.goals:
                if goal.role == LABEL and goal.kind == "class":
                    make = partial(self._code, place, here, batch, goal)
                    kept = parts.arrays(f"{part}/code/{goal.label}/{batch[0]}", make, OnlineCode.FIELDS)
                    place.add_code(goal, batch, kept)

    def _code(self, place: SweepPosition, rows: ProbeRows, batch: list[Cell], goal: Goal) -> dict[str, np.ndarray]:
        """The online codes of a label and its control task, as arrays over cells."""
        drawn = [other for other in place.goals if other.role == CONTROL and other.label == goal.label]
        how: dict[str, Any] = dict(seed=self.settings.seed, nuisance=self._nuisance(place))
        codes = online_codes(self._load(rows, batch), goal, drawn, place.groups, **how)
        return {name: np.array([getattr(code, name) for code in codes]) for name in OnlineCode.FIELDS}

    def _load(self, rows: ProbeRows, batch: list[Cell]) -> Tensor:
        """[cells, rows, d]"""
        matrices = [torch.from_numpy(rows.matrix(cell.site, cell.layer)) for cell in batch]
        dtype = torch.float64
        if self.settings.precision == "single":
            dtype = torch.float32
            for cell, matrix in zip(batch, matrices, strict=True):
                most = float(matrix.abs().max())
                if not _SQUARES[0] < most < _SQUARES[1] and most:
                    raise BadRows(
                        f"Values of {cell} reach {most:.0e}, whose squares leave single precision. Use precision='double' "
                        "(on the command line --precision double), or scale the rows."
                    )
        return torch.stack([matrix.to(dtype) for matrix in matrices]).to(self.settings.device)


_SQUARES = (1e-15, 1e15)
"""the largest value of a matrix whose sums of squares are neither lost nor infinite in single precision"""
_UNFIT = {"class": "the label has classes, and it is a regressor", "number": "the label is a number, and it is a classifier"}
"""kind of a goal -> why an estimator does not take it"""


def _notes(places: Sequence[SweepPosition]) -> list[str]:
    """What was skipped, and why."""
    found = [(what, place.position, why.removesuffix(".")) for place in places for what, why in place.skipped]
    return list(dict.fromkeys(f"Skipped {what} at position {position!r}: {why}." for what, position, why in found))


def _constant(null: Null) -> np.ndarray:
    return np.zeros(1 + len(null.drawn)) if null.constant is None else null.constant


def _exchange(
    goal: Goal, roots: np.ndarray, groups: np.ndarray, settings: SweepSettings, train: np.ndarray
) -> tuple[Goal, np.ndarray | None, list[tuple[str, str]]]:
    """(the goal at the rows that a permutation test uses, orders of its labels, what is skipped: name and reason).

    All rows, if groups can exchange their labels; else groups cut to the length of their partners. Without orders, neither
    changes enough labels.
    """

    def tried(present: np.ndarray) -> tuple[np.ndarray, float]:
        orders = label_orders(replace(goal, present=present), roots, groups, settings.permutations, settings.seed)
        return orders, exchanged_share(goal.codes[present], _within(orders, present))

    orders, share = tried(goal.present)
    if share >= EXCHANGED:
        return goal, orders, []
    kept = goal.present.copy()
    kept[kept] = with_partners(groups[goal.present])
    orders, share_cut = tried(kept)
    cut, count, some = replace(goal, present=kept), int(goal.present.sum()), int(kept.sum())
    if share_cut >= EXCHANGED and 2 * some >= count and _fits(cut, train):
        why = "whole groups exchange their labels, and each needs four others of its length, so longer groups were cut"
        return cut, orders, [(f"{count - some} of {count} rows in the permutation test of {goal.label!r}", why)]
    why = f"{why_no_exchange(goal.codes[goal.present], groups[goal.present], share)}. A t test is made instead"
    return goal, None, [(f"the permutation test of {goal.label!r}", why)]


def _fits(goal: Goal, train: np.ndarray) -> bool:
    """Whether every fold has two classes to fit on."""
    try:
        goal.check(train)
    except OneClass:
        return False
    return True


def _within(orders: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Orders of all rows as orders of the rows that are present, which exchange labels among themselves."""
    place = np.cumsum(present) - 1
    return np.asarray(place[orders[:, present]])


def _single(x: Tensor) -> Tensor:
    """Rows in single precision: a test is as exact in it, and twice as fast. Centre and scale are taken out before."""
    centred = x - x.mean(1, keepdim=True)
    scale = centred.abs().amax((1, 2), keepdim=True)
    return (centred / torch.where(scale > 0, scale, torch.ones_like(scale))).float()


def _positions(rows: ProbeRows, given: Any) -> list[RowPosition]:
    """The positions, parsed."""
    single = isinstance(given, str | int | float | np.number) or callable(given)
    found = [given] if single else as_list("positions", given, "a position, or a list of them", BadPosition)
    return [rows.position(each) for each in found]


def _numbers(rows: ProbeRows, names: Sequence[str]) -> np.ndarray:
    """Columns of the index [rows, names]. Raises MissingLabel for an unknown column, BadRows for a missing number."""
    frame = rows.frame
    for name in set(names) & set(LATER):
        frame[name]  # of a run, computed now
    known = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])]
    for name in names:
        if name not in known:
            telling = [each for each in known if frame[each].nunique() > 1]  # the others have nothing to remove
            raise MissingLabel(no_such("column of numbers to residualise by", name, telling))
        if missing := int(frame[name].isna().sum()):
            raise BadRows(
                f"Cannot residualise {name!r}: {missing} of {len(frame)} rows have no value. "
                f"Leave out the column, or give rows that have it."
            )
    return frame[list(names)].to_numpy(dtype=np.float64)


def _batches(rows: ProbeRows, cells: list[Cell]) -> Iterator[list[Cell]]:
    """Batches of cells of one width that fit into memory: a function of the grid, not of the parts already done."""
    one = rows.where(np.arange(len(rows)) == 0)
    widths = [one.matrix(cell.site, cell.layer).shape[1] for cell in cells]
    for width in sorted(set(widths)):
        same = [cell for cell, own in zip(cells, widths, strict=True) if own == width]
        size = max(1, int(MEMORY_MB * 2**20 // (16 * width * (len(rows) + 8 * width))))
        yield from (same[first : first + size] for first in range(0, len(same), size))


def _stored(rows: ProbeRows, settings: SweepSettings) -> list[str]:
    """Sites to capture in the untrained model."""
    return sorted({cell.site for cell in rows.cells(settings.sites, settings.layers)})


def _digest(rows: ProbeRows) -> str:
    """Identifies the rows: digest of the dump, fingerprint of the engine, hash of the index."""
    made = rows.about.fingerprint
    frames = [rows.frame] if rows.wider is None else [rows.frame, rows.wider.frame]
    index = hashlib.sha256("".join(frame.to_csv(index=False) for frame in frames).encode()).hexdigest()
    return f"{rows.about.digest}:{made.digest if made else ''}:{index}"
