"""`ProbeRows`: labelled activation rows for probes, from a dump, from runs in memory, or from arrays computed elsewhere.

rows = ProbeRows.of(Dump.open("dumps/coin"))
here = rows.accepted().at("step")
X, y, roots = here.matrix("S", 2), here.target("face").values, here.roots
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from replaylens.dumps.files import frame_of
from replaylens.dumps.maker import plan_of_run
from replaylens.dumps.plan import DumpPlan, named
from replaylens.dumps.reader import Dump
from replaylens.dumps.rows import assemble
from replaylens.dumps.rows import probabilities as token_probabilities
from replaylens.engine.engine import Engine
from replaylens.engine.errors import FingerprintMismatch, UnknownSite, no_such
from replaylens.engine.model.sites import warn_of_mixed_experts
from replaylens.engine.request.values import as_instance
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import Ids, feature_ids
from replaylens.probes.arrays import OWN, FromArrays
from replaylens.probes.checks import mask_of
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, ProbeError
from replaylens.probes.positions import OF_ARRAYS, OF_TASKS, PositionFunction, RowPosition, add_last, add_places, example_keys
from replaylens.probes.sources import (
    LETTERS,
    About,
    ArraySource,
    DumpSource,
    FeatureSource,
    JoinedSource,
    MemorySource,
    RowSource,
    StoredFeatureSource,
    Subset,
    WiderSource,
    planned_features,
)
from replaylens.replay.replayer import Result
from replaylens.replay.run import Run
from replaylens.tasks.reading import SHUFFLED
from replaylens.tasks.splits import is_test_root
from replaylens.tasks.texts import GivenTexts

# ---- target ----------------------------------------------------------------------------------------------------------
# `Target`: the values that a probe predicts.

MAX_CLASSES = 64
"""an integer label with more values than this is a number to regress on, not classes"""


@dataclass(frozen=True, eq=False)
class Target:
    """The values that a probe predicts: one per row, missing ones marked."""

    name: str
    values: np.ndarray
    """classes as text, or numbers as float64"""
    present: np.ndarray
    """bool: whether the row has a value"""
    kind: str
    """class or number"""

    @property
    def classes(self) -> np.ndarray:
        return np.unique(self.values[self.present]) if self.kind == "class" else np.array([])

    def __getitem__(self, chosen: np.ndarray) -> "Target":
        return replace(self, values=self.values[chosen], present=self.present[chosen])


def make_target(name: str, values: Any, kind: str = "auto") -> Target:
    """A target from any column of values; None and NaN are missing values.

    Floats are numbers, also whole ones: a missing value more or less changes no kind. Few integers are classes.
    """
    column = pd.Series(values).reset_index(drop=True)
    present = column.notna().to_numpy()
    if kind == "auto":
        number = pd.api.types.is_float_dtype(column) or (
            pd.api.types.is_integer_dtype(column) and column.nunique() > MAX_CLASSES
        )
        kind = "number" if number else "class"
    if kind == "number":
        return Target(name, column.to_numpy(dtype=np.float64, na_value=np.nan), present, kind)
    if kind != "class":
        raise ProbeError(f"Unknown kind {kind!r}. Use 'auto', 'class' or 'number'.")
    return Target(name, np.where(present, column.astype(object).map(_class_name), "").astype(str), present, kind)


def _class_name(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One site of the model: a letter and a layer, or a site name."""

    site: str
    layer: int | None

    def __str__(self) -> str:
        return self.site if self.layer is None else f"{self.site}{self.layer}"


LARGEST = 1e100
"""value of a row: sums of squares, and their products, have to stay finite"""
LATER = ("logprob", "entropy")
"""columns of the index of a run that are computed when they are asked for: they take the unembedding of every row"""


class RunFrame(pd.DataFrame):
    """The index of rows of a run, complete once `frame["logprob"]` or `frame["entropy"]` is read."""

    _columns_later: Callable[[], dict[str, np.ndarray]]

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame  # what is cut out of the index has other rows

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and key in LATER)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key in LATER and not super().__contains__(key):
            for name, column in self._columns_later().items():
                self[name] = column
        return super().__getitem__(key)


@dataclass(frozen=True, eq=False)
class ProbeRows(FromArrays):
    """Rows with their index. Immutable: `at`, `where` and the like return a narrower view."""

    frame: pd.DataFrame
    """one line per row: the dump's index and the columns of `positions.add_places`"""
    source: RowSource
    numbers: np.ndarray
    """row numbers in the source, ascending"""
    wider: "ProbeRows | None" = None
    """the rows that these were narrowed from, if any"""

    def __post_init__(self) -> None:
        if not all(name in self.frame.columns for name in LATER):
            frame = RunFrame(self.frame)
            object.__setattr__(frame, "_columns_later", partial(self.source.later, self.numbers))
            object.__setattr__(self, "frame", frame)

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, given: "Dump | Run | ProbeRows") -> "ProbeRows":
        """From a dump, a run with captured sites, or rows already made."""
        if isinstance(given, ProbeRows):
            return given
        if not isinstance(given, Dump | Run):
            hint = f" Open the dump first: Dump.open({given!r})." if isinstance(given, str | Path) else ""
            hint = hint or " Of activations from elsewhere, make rows with ProbeRows.of_arrays."
            raise ProbeError(f"Cannot probe a {type(given).__name__}. Give a Dump, a Run or ProbeRows.{hint}")
        if isinstance(given, Dump):
            if given.filters:
                raise ProbeError("The dump is filtered, but steps need whole paths. Give the whole dump and narrow the rows.")
            positions = given.manifest.plan.positions
            return cls._placed(given.to_pandas(), DumpSource(given), positions in ("all", "steps"))
        plan = plan_of_run(given.engine, given[0].example.maker, [r.example.index for r in given], given.options)
        return cls.of_results(given.engine, plan, given.results, lambda: given.probabilities)

    @classmethod
    def of_results(
        cls,
        engine: Engine,
        plan: DumpPlan,
        results: Sequence[Result],
        probabilities: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> "ProbeRows":
        """The rows that a dump with this plan would hold of these results, bit for bit.

        probabilities  gives log-probability and entropy of the rows, when one of them is read from the frame; default: they
                       are computed then, each time
        """
        content = assemble(engine, replace(plan, probabilities=False), results)
        frame = frame_of(content.index)
        read = probabilities or partial(token_probabilities, engine, plan, results)
        if plan.probabilities:
            frame = frame.drop(columns=list(LATER))
        about = About(plan.task, plan.knobs, "", engine.fingerprint, maker=results[0].example.maker if results else None)
        letters = {letter: engine.sites.per_layer(letter) for letter in LETTERS}
        source = MemorySource(dict(content.tensors), letters, about, lambda: dict(zip(LATER, read(), strict=True)))
        return cls._placed(frame, source, plan.positions in ("all", "steps"))

    @classmethod
    def _from_arrays(cls, frame: pd.DataFrame, source: ArraySource) -> "ProbeRows":
        return cls(frame, source, np.arange(len(frame)))

    @classmethod
    def _placed(cls, frame: pd.DataFrame, source: RowSource, knows_steps: bool) -> "ProbeRows":
        frame = frame.reset_index(drop=True)
        placed = (
            add_last(frame) if source.about.of_texts else add_places(frame, source.about.step_label if knows_steps else None)
        )
        return cls(placed, source, np.arange(len(frame)))

    @classmethod
    def join(cls, **parts: "ProbeRows") -> "ProbeRows":
        """Rows of several dumps or runs of one engine as one; the column `part` names their origin.

        Rows of different tasks keep the labels that all of them have, and no task: see `transfer_across`. Group ids of rows
        from arrays name the same group in every part.
        Raises FingerprintMismatch for different engines: their difference would look like one between the parts.
        """
        if not parts:
            raise ProbeError("Nothing to join. Give parts by name, such as ProbeRows.join(a=rows, b=others).")
        parts = {name: cls.of(rows) for name, rows in parts.items()}
        if len({rows.about.task is None for rows in parts.values()}) != 1:
            raise ProbeError("Some of the rows come from arrays, others from a task. Join rows of one kind.")
        how: Literal["outer", "inner"] = "outer" if len({rows.about.task for rows in parts.values()}) == 1 else "inner"
        if len({"key" in rows.frame for rows in parts.values()}) != 1:
            raise ProbeError("The rows cannot be told apart: only some parts have keys. Give keys= to all of them, or to none.")
        made = {name: rows.about.fingerprint for name, rows in parts.items() if rows.about.fingerprint is not None}
        for name, other in made.items():
            first = next(iter(made))
            if other != made[first]:
                lines = "; ".join(made[first].differences(other))
                raise FingerprintMismatch(
                    f"{first!r} and {name!r} come from different engines ({lines}). Join one engine's rows."
                )
        _require_widths(parts)
        whole = {name: rows.whole for name, rows in parts.items()}
        if len({isinstance(rows.frame, RunFrame) for rows in whole.values()}) > 1:
            for rows in whole.values():
                rows.frame[LATER[0]]  # a dump has these columns, so all parts get them
        frame = pd.concat([_part(name, rows) for name, rows in whole.items()], join=how, ignore_index=True)
        if all(rows.about.task is None for rows in parts.values()):
            frame = _one_vocabulary(frame)
        source = JoinedSource([Subset(rows.source, rows.numbers) for rows in whole.values()], [len(r) for r in whole.values()])
        joined = cls(frame, source, np.arange(len(frame)))
        kept = np.concatenate([np.isin(whole[name].numbers, rows.numbers) for name, rows in parts.items()])
        return joined if kept.all() else joined.where(kept)

    # ---- properties ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        task = "no task" if self.about.task is None else f"task {self.about.task}"
        return f"ProbeRows({len(self)} rows of {self.frame['root'].nunique()} roots, {task})"

    @property
    def about(self) -> About:
        return self.source.about

    @property
    def whole(self) -> "ProbeRows":
        """All rows that these were narrowed from, to look up whole prompts and paths in."""
        return self if self.wider is None else self.wider

    @property
    def roots(self) -> np.ndarray:
        """The root prompt of each row."""
        return self.frame["root"].to_numpy(dtype=str)

    @property
    def default_positions(self) -> tuple[str, ...]:
        """Where a sweep looks by default: steps and query of a task, the last token of given texts, else every row."""
        if self.about.of_texts:
            return ("last",)
        return ("all",) if self.about.task is None else ("step", "query")

    @property
    def default_sites(self) -> tuple[str, ...]:
        """What a sweep looks at by default: those of S, T and C that are stored; of rows from arrays, every site."""
        if self.about.task is None:
            return tuple(self.source.sites())
        return ("".join(letter for letter in LETTERS if self.source.letters(letter)) or "STC",)

    @property
    def has_tokens(self) -> bool:
        """Whether every row has a token."""
        return bool(self.frame["token"].notna().all())

    @property
    def in_test_side(self) -> np.ndarray:
        """[rows] bool: whether the row's root is on the test side of its task; without a task, of a hash of its group."""
        sides = {root: is_test_root(root if self.about.task else _hex(root)) for root in np.unique(self.roots)}
        return np.array([sides[root] for root in self.roots])

    def known(self, column: str) -> pd.Series:
        """A column of the index. Raises MissingLabel if no row has a value."""
        if column not in self.frame or self.frame[column].isna().all():
            raise MissingLabel(f"No row has {column!r}. Give it among the labels of rows from arrays; text comes with tokens=.")
        return self.frame[column]

    def require(self, engine: Engine) -> None:
        """Raise FingerprintMismatch if another engine computed the rows, ProbeError if they come from arrays."""
        if self.about.task is None:
            raise ProbeError("These rows come from arrays: no engine is known to have computed them. Leave out the engine.")
        mine = self.about.fingerprint
        if mine is not None and mine != engine.fingerprint:
            lines = "; ".join(engine.fingerprint.differences(mine))
            raise FingerprintMismatch(f"These rows come from another engine ({lines}). Load the engine that computed them.")

    # ---- narrowing ----------------------------------------------------------------------------------------------

    def where(self, mask: np.ndarray | pd.Series) -> "ProbeRows":
        """The rows selected by a mask (one boolean per row). Raises BadRows for another length, or for row numbers."""
        keep = mask_of("mask", mask, len(self))
        return ProbeRows(self.frame[keep].reset_index(drop=True), self.source, self.numbers[keep], self.whole)

    def at(self, position: str | int | PositionFunction) -> "ProbeRows":
        """The rows at a position; see `positions`."""
        return self.at_position(self.position(position))

    def at_position(self, position: RowPosition) -> "ProbeRows":
        """The rows at a parsed position. Places such as a substring are looked up on whole paths."""
        if position.kind not in ("tokens", "last", "text"):
            return self.where(position.mask(self.frame))
        every = self.whole
        return self.where(position.mask(every.frame)[np.searchsorted(every.numbers, self.numbers)])

    def position(self, spec: str | int | PositionFunction) -> RowPosition:
        """A parsed position. Raises BadPosition, which lists the forms that these rows have."""
        arrays = self.about.task is None or self.about.of_texts
        kinds, of = (OF_ARRAYS, "given texts or arrays") if arrays else (OF_TASKS, "a task")
        return RowPosition.parse(spec, kinds, f"position of {of}")

    def renumbered(self) -> "ProbeRows":
        """The same rows, numbered from 0, without the rows that they were narrowed from."""
        return ProbeRows(self.frame, Subset(self.source, self.numbers), np.arange(len(self)))

    def accepted(self) -> "ProbeRows":
        return self.where(self.frame["accepted"].to_numpy(dtype=bool))

    def rejected(self) -> "ProbeRows":
        return self.where(~self.frame["accepted"].to_numpy(dtype=bool))

    # ---- input of estimators ------------------------------------------------------------------------------------

    def cells(self, sites: str | Sequence[str], layers: Sequence[int] | None = None) -> list[Cell]:
        """Every cell of the sites: letters and others with layers, at all layers or those given; or stored names."""
        words = re.split(r"[,\s]+", sites) if isinstance(sites, str) else list(sites)
        cells: list[Cell] = []
        known: set[int] = set()
        where: dict[str, str] = {}
        for word in filter(None, words):
            for site in word if set(word) <= set(LETTERS) else [word]:
                stored = self.source.letters(site)
                if not stored and site in LETTERS:
                    has = ", ".join(self.source.sites())
                    raise UnknownSite(
                        f"Site {site} was not captured. Dump or replay with sites that include it. There are {has}."
                    )
                known |= stored.keys()
                if stored:
                    where[site] = ", ".join(map(str, stored))
                cells += [Cell(site, n) for n in stored if layers is None or n in layers] if stored else [Cell(site, None)]
        if layers is not None and not known:
            raise UnknownSite(
                f"layers={list(layers)} are of letters, and sites {' '.join(words)!r} name none. Leave layers out."
            )
        if known and (missing := sorted(set(layers or ()) - known)):
            listed = "; ".join(f"{letter} is stored at layers {numbers}" for letter, numbers in where.items())
            raise UnknownSite(f"No layer {missing[0]}. {listed}. Give one of these: sweeps do not count from the end.")
        if len(set(cells)) < len(cells):
            twice = next(cell for cell in cells if cells.count(cell) > 1)
            raise ProbeError(f"{twice} is named twice by sites {' '.join(words)!r}. Give each site once.")
        if not cells:
            raise UnknownSite(f"No cells for sites {' '.join(words)!r} at layers {layers}. Give other sites or layers.")
        return cells

    def cell(self, site: str, layer: int | None = None) -> Cell:
        """One cell: a letter with its layer, or a stored name. Raises UnknownSite, which lists the layers."""
        if site in LETTERS and layer is None:
            stored = ", ".join(str(each.layer) for each in self.cells(site))
            raise UnknownSite(f"Site {site} needs a layer. Give one of {stored}.")
        return self.cells(site, [layer])[0] if site in LETTERS and layer is not None else Cell(site, layer)

    def matrix(self, site: str, layer: int | None = None) -> np.ndarray:
        """[rows, d], in float32 or wider. Raises BadRows if a row is not finite. Warns of columns that mix experts."""
        if self.about.task is not None:  # rows from arrays are as their caller chose them, under any name
            warn_of_mixed_experts(site)
        x = self.source.take(site, layer, self.numbers)
        x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        bad = ~torch.isfinite(x).all(1)
        if bool(bad.any()):
            raise BadRows(
                f"{Cell(site, layer)}: {int(bad.sum())} of {len(x)} rows contain NaN or infinity, the first at row "
                f"{int(bad.nonzero()[0])}. Leave them out with where(), or dump again."
            )
        if x.numel() and (most := float(x.abs().max())) > LARGEST:
            raise BadRows(
                f"{Cell(site, layer)}: values reach {most:.0e}, whose squares leave double precision. Scale the rows."
            )
        return x.numpy()

    def target(self, label: str, kind: str = "auto") -> Target:
        """The label's values; `state` is the task's true state. Raises MissingLabel, which lists the labels.

        kind  class, number, or auto: text and booleans are classes, integers too if they take few values
        """
        name = label
        if self.about.task is None and label not in self.frame:
            extra = " The state is a task's, and rows from arrays have no task." if label == "state" else ""
            raise MissingLabel(no_such("label", label, [n for n in self.frame if n not in OWN]) + extra)
        if label == "state" and label not in self.frame:
            name = self.about.make_task().state_label
        if name not in self.frame:
            known = self.frame if self.about.several else self.about.make_task().label_names
            own = [n for n in known if n in self.frame]
            raise MissingLabel(no_such("label", label, own))
        return make_target(label, self.frame[name], kind)


def _part(name: str, rows: ProbeRows) -> pd.DataFrame:
    """The table of a part. Texts of several dumps have equal numbers, and with them equal coins `shuffled`, which a probe could
    read off what the number stands for: each part turns its coins over by a coin of its own."""
    frame = rows.frame.assign(part=name)
    if rows.about.task == GivenTexts.name and SHUFFLED in frame and hashlib.blake2b(name.encode()).digest()[0] % 2:
        frame[SHUFFLED] = 1 - frame[SHUFFLED]
    return frame


def _one_vocabulary(frame: pd.DataFrame) -> pd.DataFrame:
    """Tokens that rows from arrays have as text, numbered over all parts: each part numbered its own. Raises BadRows if others
    have ids."""
    named = frame.groupby("part")["text"].agg(lambda text: bool(text.notna().all()))
    known = frame.groupby("part")["token"].agg(lambda token: bool(token.notna().all()))
    if not named.any():
        return frame
    if (known & ~named).any():
        text, ids = named.idxmax(), (known & ~named).idxmax()
        raise BadRows(f"Part {text!r} has its tokens as text, part {ids!r} as ids. Give both the same way.")
    there = frame["text"].notna().to_numpy()
    token = frame["token"].to_numpy(dtype=np.float64)
    token[there] = np.unique(frame.loc[there, "text"].to_numpy(dtype=str), return_inverse=True)[1]
    return frame.assign(token=token.astype(np.int64) if there.all() else token)


def _require_widths(parts: "dict[str, ProbeRows]") -> None:
    """Raise BadRows unless every site of arrays has the same number of columns in all parts that have it."""
    first: dict[str, tuple[str, int]] = {}
    for name, rows in parts.items():
        for site, width in rows.source.widths().items() if isinstance(rows.source, ArraySource) else ():
            part, other = first.setdefault(site, (name, width))
            if width != other:
                raise BadRows(f"{site} has {other} columns in {part!r}, {width} in {name!r}. Join rows of one model and site.")


def _hex(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()


# ---- feature columns -------------------------------------------------------------------------------------------------
# `with_features`: features of a sparse autoencoder as one more site of rows.


def with_features(
    rows: ProbeRows, features: SparseFeatures | str, columns: Ids | None = None, *, name: str = "features"
) -> ProbeRows:
    """The same rows with one more site, `name`: the activations of chosen features, encoded when a probe asks for them.

    rows     of a dump, a run or arrays that hold the site of the features. What the stream leaving block l is called there
             (S at layer l + 1, hook_resid_post) makes no difference
    features a sparse autoencoder; or the name of features that the dump stores, of which the strongest of each row are known
    columns  the features to keep, in this order; default: all, [rows, number of features]
    name     of the new site

    Raises UnknownSite if the rows lack the site, BadRows for a name that they already have.
    """
    rows = ProbeRows.of(as_instance("rows", rows, ProbeRows, "ProbeRows; of a dump or a run: ProbeRows.of(...)"))
    stored = named(planned_features(rows.source), features) if isinstance(features, str) else None
    if stored is None:
        features = as_instance(
            "features", features, SparseFeatures, "the result of SparseFeatures.load, or the name of stored ones"
        )
    width = len(features) if stored is None else stored.width
    chosen = list(range(width)) if columns is None else feature_ids("columns", columns, width)
    if not chosen:
        raise BadRows("No features were chosen. Give at least one in columns.")
    if name in (*rows.source.sites(), *LETTERS, "Z"):
        raise BadRows(f"The rows already have a site {name!r}. Give another name.")
    source: WiderSource
    if stored is not None:
        source = StoredFeatureSource(rows.source, stored, chosen, name)
    else:
        assert isinstance(features, SparseFeatures)
        source = FeatureSource(rows.source, features, chosen, name)
    wider = None if rows.wider is None else replace(rows.wider, source=source)
    return replace(rows, source=source, wider=wider)


# ---- sequence rows ---------------------------------------------------------------------------------------------------
# Rows of several positions side by side, for probes that read a whole path.


def sequences(
    rows: ProbeRows, label: str, site: str, layer: int | None, positions: Sequence[str]
) -> tuple[np.ndarray, Target, np.ndarray]:
    """(X [examples, positions * d], the label at the last position, roots); an absent position is all zeros.

    Every position must select at most one row of an example's accepted path ("step:2", "query-1", "12").
    """
    rows = rows.accepted()
    if not len(positions):
        raise BadPosition("positions=[] names none. Give at least one, such as 'step:1' and 'query'.")
    last = rows.at(positions[-1])
    target = last.target(label)
    last, target = last.where(target.present), target[target.present]
    if not len(last):
        raise BadRows(f"No row at position {positions[-1]!r} has the label {label!r}. Give another last position.")
    place = {key: i for i, key in enumerate(example_keys(last.frame))}
    if len(place) != len(last):
        raise BadRows(f"Position {positions[-1]!r} has several rows per example. Use one such as 'query' or 'step:3'.")
    blocks = []
    for position in positions:
        here = rows.at(position)
        here = here.where(np.array([key in place for key in example_keys(here.frame)], dtype=bool))
        if len(set(example_keys(here.frame))) != len(here):
            raise BadRows(f"Position {position!r} has several rows per example. Use one such as 'query' or 'step:3'.")
        found = here.matrix(site, layer)
        block = np.zeros((len(last), found.shape[1]), dtype=found.dtype)
        block[[place[key] for key in example_keys(here.frame)]] = found
        blocks.append(block)
    return np.concatenate(blocks, 1), target, last.roots
