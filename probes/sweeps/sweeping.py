"""`sweep`: probes over sites x layers x positions x labels x estimators, with controls and statistics, in one call."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import no_such
from replaylens.engine.progress import hidden
from replaylens.engine.request.values import items, shown, whole
from replaylens.engine.run import Run
from replaylens.probes.checks import folds_and_seed, layer_list, names, once
from replaylens.probes.data.groups import GIVEN, grouped, histories, independent, with_groups
from replaylens.probes.data.positions import Position, PositionFunction
from replaylens.probes.data.rows import LATER, Cell, ProbeRows
from replaylens.probes.design.controls import require_same_rows, untrained_rows
from replaylens.probes.design.goals import CONTROL, LABEL, Goal, goals_at
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, ProbeError, TooFewGroups, UnknownEstimator
from replaylens.probes.fitting import registry
from replaylens.probes.fitting.heldout import Held, held_out
from replaylens.probes.fitting.online_code import OnlineCode, online_codes
from replaylens.probes.fitting.parts import Parts
from replaylens.probes.fitting.refit import exchanged, label_orders, refitted
from replaylens.probes.reports.report import Report
from replaylens.probes.scoring.permutations import EXCHANGED, PERMUTATIONS, Null, exchanged_share, why_no_exchange
from replaylens.probes.sweeps.backend import joblib_backend
from replaylens.probes.sweeps.named_splits import NEEDS_BOTH, MakeSplit, own_split, splitter
from replaylens.probes.sweeps.settings import SweepSettings
from replaylens.probes.sweeps.sweep_position import SweepPosition
from replaylens.probes.sweeps.tabulate import tabulate

MEMORY_MB = 1024
"""of rows loaded together; on a CPU its value changes no bit"""


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
    layers: Sequence[int] | None = None,
    folds: int = 5,
    branches: str = "accepted",
    controls: bool = True,
    residualise: Sequence[str] = (),
    code_length: bool = False,
    seed: int = 0,
    metric: str = "auto",
    permutations: int = PERMUTATIONS,
    precision: str = "double",
    device: str = "cpu",
) -> Report:
    """Fit and test every combination. Equal rows and settings give equal reports, bit for bit.

    Rows with the same path are one observation and count once; roots that share one are one group (see `groups`). A label or
    position without usable rows is skipped, and the report's notes say so; an error is raised only if nothing is left.

    sites, positions
             default: S, T and C, as far as they are stored, at steps and query; of given texts, at their last token; of rows
             from arrays, every site at every row
    split    root (cross-validation over groups of roots), another value of `SweepSettings.split`, or a function from rows to
             a `Split`
    engine   the engine that computed the rows: adds an untrained model as a control. Raises OtherFingerprint for another one
    untrained
             the same rows of a model with random weights, where no engine can make them; the same control. True: the engine
             of the given run makes them
    groups   what more than the prompt makes rows alike, such as the topic or the author of your own texts, or words to hold
             out: a column of the index (a label, `text`), or one value per example or per row. Prompts that share a value are
             one group: in one fold, exchanged together. Held-out words leave a control task nothing to memorise
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
    folds, seed = folds_and_seed(folds, seed)
    settings = SweepSettings(
        labels=names("label", label),
        sites=names("sites", rows.default_sites if sites is None else sites),
        positions=once("positions", [place.spec for place in places]),
        estimators=names("estimators", estimators, UnknownEstimator),
        split=split if isinstance(split, str) else getattr(split, "__name__", "own"),
        untrained=engine is not None or untrained is not None,
        layers=None if layers is None else layer_list(layers),
        folds=folds,
        branches=branches,
        controls=controls,
        residualise=names("residualise", residualise),
        code_length=code_length,
        seed=seed,
        groups=groups if groups is None or isinstance(groups, str) else GIVEN,
        metric=metric,
        permutations=whole("permutations", permutations, 0, error=ProbeError),
        precision=precision,
        device=device,
    )
    if whole("jobs", jobs, error=ProbeError) == 0:
        raise ProbeError("jobs=0 runs nothing. Give a number of processes, or -1 for one per core.")
    blank = _blank(rows, settings, engine, untrained)
    if groups is not None and not isinstance(groups, str):
        rows = with_groups(rows, groups)
    make_split = splitter(settings) if isinstance(split, str) else partial(own_split, split)
    with joblib_backend(backend):
        return _Sweep(rows, settings, places, make_split, blank, resume, jobs, progress).run()


def _maker(given: Any, engine: Engine | None, untrained: ProbeRows | bool | None) -> tuple[Engine | None, ProbeRows | None]:
    """(engine, rows) of the untrained control, at most one of them. Raises ProbeError for True without a run."""
    if isinstance(untrained, ProbeRows) or not untrained:
        if untrained is not None and not isinstance(untrained, ProbeRows | bool):
            raise ProbeError(f"Invalid untrained={shown(untrained)}. Give ProbeRows, or True for a run.")
        return engine, untrained or None
    if untrained is not True:
        raise ProbeError(f"Invalid untrained={shown(untrained)}. Give ProbeRows, or True for a run.")
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
    positions: Sequence[Position]
    make_split: MakeSplit
    blank: ProbeRows | None
    resume: str | Path | None
    jobs: int
    progress: bool

    def run(self) -> Report:
        chosen = self._branches(self.rows)
        cells = chosen.cells(self.settings.sites, self.settings.layers)
        parts = Parts(self.resume, self.settings.key(_digest(self.rows) + (self.blank.about.digest if self.blank else "")))
        places = [self._place(chosen, cells, position) for position in self.positions]
        probed = [place for place in places if place.goals]
        if not probed:
            raise BadRows(f"No label can be probed at any position. {' '.join(_notes(places))}")
        with tqdm(total=len(probed) * len(cells), unit="cell", disable=hidden(self.progress)) as bar:
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

    def _place(self, chosen: ProbeRows, cells: list[Cell], at: Position) -> SweepPosition:
        """The rows, groups, split and goals of one position; without goals if none can be probed there."""
        settings, found, position = self.settings, chosen.at_position(at), at.spec
        if not len(found):
            return SweepPosition.nothing(position, found, "there is no row; give rows of that position, or choose another")
        if settings.groups is not None:
            found = grouped(found, settings.groups)
        labels = [found.target(label) for label in settings.labels] if settings.split == "root" else []
        here = independent(found, labels)  # another split could part rows of one observation
        try:
            split = self.make_split(here.rows).check(here.rows, here.keys)
        except TooFewGroups as error:
            return SweepPosition.nothing(position, found, str(error))
        paths = histories(here.rows) if settings.controls else None
        how: dict[str, Any] = dict(with_controls=settings.controls, seed=settings.seed, metric=settings.metric)
        goals, skipped = goals_at(here.rows, here.groups, paths, settings.labels, split.train, **how)
        skipped += [("the beginning", here.note)] if here.note else []
        if here.num_torn:
            why = f"{here.num_torn} rows share their path with a row of another label, and no probe can read both"
            skipped.append(("counting equal rows once", why))
        return SweepPosition(position, here.rows, here.groups, split, goals, cells, skipped, paths, here.copies)

    def _fill(self, place: SweepPosition, parts: Parts, bar: Any) -> None:
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

    def _fit(self, place: SweepPosition, rows: ProbeRows, batch: list[Cell], estimator: str) -> Held:
        masks = (place.split.train, place.split.test)
        x = self._load(rows, batch)
        how: dict[str, Any] = dict(nuisance=self._nuisance(place), groups=place.groups, jobs=self.jobs)
        return held_out(estimator, x, place.goals, *masks, **how)

    def _nuisance(self, place: SweepPosition) -> np.ndarray | None:
        return _numbers(place.rows, self.settings.residualise) if self.settings.residualise else None

    def _test(
        self, place: SweepPosition, batch: list[Cell], estimator: str, number: int, held: Held, parts: Parts, name: str
    ) -> None:
        """Mutates `place`: adds the scores on permuted labels, where the estimator can be fitted often enough."""
        goal, settings = place.goals[number], self.settings
        roots, groups = place.rows.roots, place.groups
        if len(place.split) == 1:  # the labels of the tested rows took no part in any fit
            how = (roots, groups, place.tested(goal), settings.permutations, settings.seed)
            place.add_null(estimator, goal, batch, exchanged(held.of(number, goal, place.tested(goal)), goal, *how))
        elif (spec := registry.get(estimator)).swept == "together" and not spec.inner:
            orders = label_orders(goal, roots, groups, settings.permutations, settings.seed)
            labels = goal.codes[goal.present]
            if (share := exchanged_share(labels, _within(orders, goal.present))) < EXCHANGED:
                why = f"{why_no_exchange(labels, groups[goal.present], share)}. A t test is made instead"
                place.skipped.append((f"the permutation test of {goal.label!r}", why))
                return

            def make() -> dict[str, np.ndarray]:
                x = _single(self._load(place.rows, batch))
                null = refitted(estimator, x, goal, orders, place.split, nuisance=self._nuisance(place))
                return {"observed": null.observed, "drawn": null.drawn, "constant": _constant(null)}

            place.add_null(estimator, goal, batch, Null(**parts.arrays(name, make, ("observed", "drawn", "constant"))))

    def _extras(self, place: SweepPosition, here: ProbeRows, batch: list[Cell], parts: Parts, part: str) -> None:
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
        dtype = torch.float64 if self.settings.precision == "double" else torch.float32
        stacked = torch.stack([torch.from_numpy(rows.matrix(cell.site, cell.layer)).to(dtype) for cell in batch])
        return stacked.to(self.settings.device)


def _notes(places: Sequence[SweepPosition]) -> list[str]:
    """What was skipped, and why."""
    found = [(what, place.position, why.removesuffix(".")) for place in places for what, why in place.skipped]
    return list(dict.fromkeys(f"Skipped {what} at position {position!r}: {why}." for what, position, why in found))


def _constant(null: Null) -> np.ndarray:
    return np.zeros(1 + len(null.drawn)) if null.constant is None else null.constant


def _within(orders: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Orders of all rows as orders of the rows that are present, which exchange labels among themselves."""
    place = np.cumsum(present) - 1
    return np.asarray(place[orders[:, present]])


def _single(x: Tensor) -> Tensor:
    """Rows in single precision: a test is as exact in it, and twice as fast. Centre and scale are taken out before."""
    centred = x - x.mean(1, keepdim=True)
    scale = centred.abs().amax((1, 2), keepdim=True)
    return (centred / torch.where(scale > 0, scale, torch.ones_like(scale))).float()


def _positions(rows: ProbeRows, given: Any) -> list[Position]:
    """The positions, parsed."""
    single = isinstance(given, str | int | float | np.number) or callable(given)
    found = [given] if single else items("positions", given, "a position, or a list of them", BadPosition)
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
