"""`LinearProbe`: a fitted direction with its provenance, saved as safetensors and JSON. Loading executes no code."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from scipy import stats
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from tqdm.auto import tqdm

from replaylens import boundary
from replaylens.dumps.maker import ReplayKeywords, plan_of_run
from replaylens.dumps.reader import Dump
from replaylens.engine import records
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, FingerprintMismatch, Unsealed
from replaylens.engine.files import saves_of, write_pair
from replaylens.engine.request.values import as_float, as_path, short_repr, verb
from replaylens.engine.serving.watch import probe_record
from replaylens.engine.terminal import hidden
from replaylens.probes import registry
from replaylens.probes.arrays import LABEL
from replaylens.probes.checks import PLACEBO_BYTES, as_draws, as_matrix, make_folder, mask_of, no_nan
from replaylens.probes.controls import make_goal
from replaylens.probes.erasers import Leace, Moments, MomentStream, row_space
from replaylens.probes.errors import BadRows, OneClass, ProbeError
from replaylens.probes.estimators import MassMeanProbe
from replaylens.probes.groups import groups_of, independent
from replaylens.probes.heldout import estimates, held_out, known_metric
from replaylens.probes.intervals import Estimate, auroc
from replaylens.probes.permutations import shuffled_order
from replaylens.probes.report import about_rows
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.sources import SITE
from replaylens.probes.splits import Split, by_root
from replaylens.replay.run import Run
from replaylens.tasks.task import Example

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- probe -----------------------------------------------------------------------------------------------------------

FORMAT, SCHEMA = "replaylens-probe", 1
_TENSORS = ("weight", "bias", "means")
_KINDS: dict[str, Any] = {"cell": tuple[str, int | None], "classes": tuple[str, ...]}
"""fields of the JSON file"""
_FIELDS = {"format", "schema", "classes", "cell", "roots", "label", "site", "position", "estimator", "source"}
"""all that an older version wrote"""


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """Scores are x @ weight.T + bias: one line for two classes (positive: the second), else one line per class."""

    weight: np.ndarray
    """[k, d], in the coordinates of the rows"""
    bias: np.ndarray
    """[k]"""
    means: np.ndarray
    """[classes, d]: mean of each class over the rows it was fitted on"""
    classes: tuple[str, ...]
    label: str
    site: str
    """the stored site, by its TransformerLens name"""
    cell: Cell
    position: str
    estimator: str
    source: dict[str, Any]
    """task, digest and fingerprint of the rows it was fitted on"""
    roots: tuple[str, ...] = ()
    """the root prompts it was fitted on, sorted; empty if unknown"""
    subspace: np.ndarray | None = None
    """[rank, d]: orthonormal directions to exchange, where they are more than the scores depend on (DAS)"""
    alarm: "Alarm | None" = None
    """when the probe gives an alarm as a monitor, and how often it does so for nothing; see `with_alarm`"""

    def __repr__(self) -> str:
        where = str(self.cell) if str(self.cell) == self.site else f"{self.cell} ({self.site})"
        return (
            f"LinearProbe({self.label} at {where}, {self.position}: {', '.join(self.classes)}; {self.estimator} on "
            f"{len(self.roots) or 'unknown'} roots, d = {self.weight.shape[1]})"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of weights, bias, classes, label and site, in float32: what `engine.watch` computes with, and dumps name."""
        return probe_record(self.label, self, self.site).digest

    def scores(self, X: Any) -> np.ndarray:
        """[rows] for two classes, else [rows, classes], of rows [rows, d]: a tensor, array, list or DataFrame."""
        rows = as_matrix(X, self.weight.shape[1])
        no_nan("matrix of rows", rows)
        found: np.ndarray = rows @ self.weight.T + self.bias
        return found[:, 0] if len(self.classes) == 2 else found

    def predict(self, X: Any) -> np.ndarray:
        """[rows]: the class of each row of X."""
        scores = self.scores(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return np.array(self.classes)[places]

    def apply(self, engine: Engine, texts: Any) -> "TokenScores":
        """Scores of every token of texts that the engine computes, whichever position the probe was fitted at.

        texts  a string, or what `Engine.replay` takes: strings, token lists, chats, branches, a task's examples

        Raises FingerprintMismatch if the probe was fitted on another engine's rows.

        >>> from replaylens import Engine, tasks
        >>> engine = Engine.load("coin-plain")
        >>> run = engine.replay(tasks.get("coin")(flips=(1, 3)).examples(24), sites="S")
        >>> probe = fit_probe(run, "face", layer=3, position="query", estimator="mass-mean")
        >>> found = probe.apply(engine, "A coin's state is heads. Alice flips. What's the state? A:")
        >>> found, found.table["predicted"].iloc[-1]
        (TokenScores(face: 1 text, 15 tokens), 'tails')
        """
        self.require(engine)
        run = engine.replay([texts] if isinstance(texts, str) else texts, sites=[self.site])
        rows = [result.activations[self.site] for result in run]
        scores = [self.scores(x.reshape(len(x), -1)) for x in rows]
        return TokenScores(self.label, self.classes, [[engine.text.token(t) for t in r.tokens] for r in run], scores)

    def require(self, engine: Engine) -> None:
        """Raise FingerprintMismatch if the probe was fitted on another engine's rows. Those of arrays have no fingerprint."""
        made = self.source.get("fingerprint")
        if made is not None and made != engine.fingerprint.digest:
            raise FingerprintMismatch(
                "This probe was fitted on rows of another engine. Load that engine, or fit the probe again."
            )

    def direction(self, origin: str, target: str) -> np.ndarray:
        """The unit vector [d] that leads from one class to another."""
        a, b = self._place(origin), self._place(target)
        if len(self.classes) == 2:
            way = self.weight[0] if b > a else -self.weight[0]
        else:
            way = self.weight[b] - self.weight[a]
        return way / max(float(np.linalg.norm(way)), 1e-300)

    def gap(self, origin: str, target: str) -> float:
        """The distance between the class means: the unit of steering, whatever the estimator."""
        return float(np.linalg.norm(self.means[self._place(target)] - self.means[self._place(origin)]))

    @property
    def basis(self) -> np.ndarray:
        """Orthonormal directions [m, d] that the scores depend on, or the probe's own subspace."""
        if self.subspace is not None:
            return self.subspace
        return row_space(self.weight - self.weight.mean(0) * (len(self.weight) > 1))

    def _place(self, name: str) -> int:
        if name not in self.classes:
            raise ProbeError(f"Unknown class {name!r}. The probe has {', '.join(self.classes)}.")
        return self.classes.index(name)

    def with_alarm(
        self,
        training: "TokenScores | Sequence[np.ndarray]",
        positive: Sequence[bool],
        negatives: "TokenScores | Sequence[np.ndarray]",
        rate: float = 0.05,
    ) -> "LinearProbe":
        """The probe as a monitor, with an alarm that at most this share of texts without cause gives.

        training   the scores of texts that it may have been fitted on, as `apply` gives them: they choose how the scores of a
                   text become one
        positive   of each training text, whether it should give an alarm
        negatives  the scores of held-out texts that should give none: they choose the threshold
        """
        return replace(self, alarm=make_alarm(training, positive, negatives, rate))

    # ---- on disk ------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write PATH.safetensors and PATH.json, which tells its hash and is sealed. Returns the path without a suffix.

        An older probe is replaced by both or by neither; BadRequest if files of these names are none.
        """
        path = _stem(path)
        make_folder(path.parent)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in _TENSORS}
        if self.subspace is not None:
            tensors["subspace"] = torch.from_numpy(np.ascontiguousarray(self.subspace))
        body = save(tensors)
        about = {
            "format": FORMAT,
            "schema": SCHEMA,
            "classes": list(self.classes),
            "cell": [self.cell.site, self.cell.layer],
            "roots": list(self.roots),
            **{name: getattr(self, name) for name in ("label", "site", "position", "estimator", "source")},
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        if self.alarm is not None:
            about["alarm"] = asdict(self.alarm)
        about["seal"] = _seal(about)
        record, data = files_of(path)
        write_pair(record, json.dumps(about, indent=1, sort_keys=True) + "\n", data, body, is_probe)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "LinearProbe":
        """Read and check a saved probe. Raises BadFile, which says what is wrong. Warns (Unsealed) of one that an older
        version wrote without a hash."""
        path = _stem(path)
        record, _ = files_of(path)
        try:
            raw = records.parse(record.read_bytes(), "its JSON file", BadFile)
            if raw["format"] != FORMAT or raw["schema"] != SCHEMA:
                raise BadFile(f"format {raw['format']} {raw['schema']} instead of {FORMAT} {SCHEMA}")
            tensors = load(_sealed(path, raw))
            arrays = {name: tensors[name].numpy() for name in _TENSORS}
            text = {name: raw[name] for name in ("label", "site", "position", "estimator", "source")}
            roots = tuple(map(str, raw.get("roots", ())))  # older files have none
            more: dict[str, Any] = {"subspace": tensors["subspace"].numpy()} if "subspace" in tensors else {}
            more |= {"alarm": Alarm(**raw["alarm"])} if "alarm" in raw else {}
            cell, classes = (records.build(kind, raw[name], name, BadFile) for name, kind in _KINDS.items())
            if wrong := [name for name, value in text.items() if not isinstance(value, dict if name == "source" else str)]:
                raise BadFile(f"{wrong[0]} is {short_repr(text[wrong[0]])}")
            probe = cls(**arrays, **more, classes=classes, cell=Cell(*cell), roots=roots, **text)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise BadFile(f"{path} is not a saved probe ({error}). Give the path of a saved probe.") from error
        return probe._checked(path)

    def _checked(self, path: Path) -> "LinearProbe":
        k, d = (1 if len(self.classes) == 2 else len(self.classes)), self.weight.shape[-1]
        shapes = {"weight": (k, d), "bias": (k,), "means": (len(self.classes), d)}
        if self.subspace is not None:
            shapes["subspace"] = (len(self.subspace), d)
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or not np.isfinite(array).all():
                raise BadFile(f"{path}: {name} has shape {array.shape}. It must be finite and have shape {shape}.")
        return self


# ---- monitors --------------------------------------------------------------------------------------------------------
# `Alarm`: a threshold for a whole text. A threshold for tokens says nothing about texts: of many tokens one is always extreme.

POOLINGS: dict[str, Callable[[np.ndarray], float]] = {
    "max": lambda scores: float(scores.max()),
    "mean": lambda scores: float(scores.mean()),
    "last": lambda scores: float(scores[-1]),
}
"""what makes one score of those of a text's tokens (arXiv 2605.18549 compares them)"""


@dataclass(frozen=True)
class Alarm:
    """When a text gives an alarm, and how often one does for nothing."""

    pooling: str
    """max, mean or last of its tokens' scores"""
    threshold: float
    """above which it is an alarm"""
    rate: float
    """share of texts without cause that give one, as held-out texts tell"""
    low: float
    high: float
    """ends of the rate's interval, 95 %"""
    negatives: int
    """held-out texts"""

    def score(self, scores: np.ndarray) -> float:
        """Of a text, from the scores of its tokens."""
        return POOLINGS[self.pooling](np.asarray(scores, dtype=np.float64))

    def __str__(self) -> str:
        rate = f"{100 * self.rate:.1f} % of texts without cause [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{self.pooling} of a text's scores above {self.threshold:.4g}, as in {rate}, by {self.negatives} held out"


def make_alarm(
    training: "TokenScores | Sequence[np.ndarray]",
    positive: Sequence[bool],
    negatives: "TokenScores | Sequence[np.ndarray]",
    rate: float = 0.05,
) -> Alarm:
    """See `LinearProbe.with_alarm`. The share of texts above the k-th largest of n held-out scores is distributed as
    Beta(k, n - k + 1), whatever the scores: k is the largest whose mean is at most the rate."""
    known, clean = _texts("training", training), _texts("negatives", negatives)
    cause = mask_of("mask of positive texts", np.asarray(positive), len(known))
    if cause.all() or not cause.any():
        kind = "positive" if cause.any() else "negative"
        raise OneClass(f"All {len(cause)} training texts are {kind}. Give texts of both kinds.")
    if not 0 < as_float("rate", rate, error=ProbeError) < 1:
        raise ProbeError(f"rate={rate} is no share of texts. Give a number between 0 and 1, such as 0.05.")
    count, place = len(clean), int(rate * (len(clean) + 1))
    if not place:
        raise BadRows(f"{count} held-out texts cannot show a rate of {rate:g}. Give at least {int(np.ceil(1 / rate)) - 1}.")
    pooled = {name: np.array([make(text) for text in known]) for name, make in POOLINGS.items()}
    areas = {name: float(auroc(scores[None, :, None], cause.astype(int))[0]) for name, scores in pooled.items()}
    best = max(areas, key=lambda name: areas[name])
    threshold = float(np.sort([POOLINGS[best](text) for text in clean])[-place])
    low, high = stats.beta.ppf([0.025, 0.975], place, count - place + 1)
    return Alarm(best, threshold, place / (count + 1), float(low), float(high), count)


def _texts(what: str, given: "TokenScores | Sequence[np.ndarray]") -> list[np.ndarray]:
    """The scores of each text [tokens]. Raises BadRows for none, for NaN, and for probes of more than two classes."""
    found = [np.asarray(each, dtype=np.float64) for each in (given.scores if isinstance(given, TokenScores) else given)]
    if not found or any(each.ndim != 1 or not len(each) for each in found):
        hint = "Give a list of arrays [tokens], such as `probe.apply(...)` of two classes."
        raise BadRows(f"The {what} are no scores of texts. {hint}")
    for each in found:
        no_nan(f"scores of {what}", each)
    return found


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a probe says at each token of some texts."""

    label: str
    classes: tuple[str, ...]
    tokens: list[list[str]]
    """[texts][tokens]"""
    scores: list[np.ndarray]
    """[texts]: [tokens] for two classes (positive: the second), else [tokens, classes]"""

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"TokenScores({self.label}: {count} text{'s' * (count != 1)}, {sum(map(len, self.tokens))} tokens)"

    @property
    def table(self) -> pd.DataFrame:
        """One line per token: text, position, token, `score` of the second of two classes or a column for each class, and
        the class `predicted`."""
        scores = np.concatenate(self.scores)
        each = {f"score {name}": scores[..., i] for i, name in enumerate(self.classes)} if scores.ndim == 2 else {}
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        sizes = [len(tokens) for tokens in self.tokens]
        return pd.DataFrame(
            {
                "text": np.repeat(np.arange(len(sizes)), sizes),
                "position": np.concatenate([np.arange(size) for size in sizes]),
                "token": [token for tokens in self.tokens for token in tokens],
                **(each or {"score": scores}),
                "predicted": np.array(self.classes)[places],
            }
        )

    def plot(self, text: int = 0) -> "Figure":
        """The scores of one text by token, a line for each class, or one for two classes."""
        from replaylens.engine.display import picture, plain

        words, scores = self.tokens[text], self.scores[text]
        figure = picture(min(0.3 * len(words), 18) + 2.5, 3.2)
        axes = figure.subplots()
        names = [f"{self.classes[1]} (above 0), {self.classes[0]} (below)"] if scores.ndim == 1 else self.classes
        for name, line in zip(names, scores.reshape(len(words), -1).T, strict=True):
            axes.plot(np.arange(len(words)), line, marker="o", markersize=3, label=name)
        axes.axhline(0, color="0.7", linewidth=1, zorder=0)
        _cut_sink(axes, scores)
        axes.set(ylabel=f"score of {self.label}", xticks=range(len(words)))
        axes.set_xticklabels([plain(word) for word in words], rotation=90, fontsize=8)
        axes.legend(fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        found: str = self.table.round(3).to_html(index=False)
        return found


_SINK = 3.0
"""times the range of all other tokens: a first token that scores farther out is the attention sink, and would flatten them"""


def _cut_sink(axes: Any, scores: np.ndarray) -> None:
    """Mutates the axes: they show the range of all tokens but the first if that is far out, whose score is written beside."""
    if len(scores) < 3:
        return
    low, high = min(float(scores[1:].min()), 0.0), max(float(scores[1:].max()), 0.0)
    room = (high - low) or 1.0
    farthest = float(scores[0].flat[np.abs(scores[0]).argmax()]) if scores.ndim > 1 else float(scores[0])
    if low - _SINK * room <= farthest <= high + _SINK * room:
        return
    axes.set_ylim(low - 0.1 * room, high + 0.1 * room)
    end = high if farthest > high else low
    axes.annotate(f"{farthest:.3g}", (0, end), textcoords="offset points", xytext=(4, 0), fontsize=8, annotation_clip=False)


def fit_probe(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    site: str = "S",
    layer: int | None = None,
    position: str = "query",
    estimator: str = "logistic",
    shuffled: bool = False,
    seed: int = 0,
) -> LinearProbe:
    """Fit one linear probe on all accepted rows at a position. Nothing is held out: test it on other roots.

    shuffled  exchange labels between roots first: an untrained probe, as a placebo for causal tests

    >>> from replaylens import Engine, tasks
    >>> run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(1, 3)).examples(24), sites="S")
    >>> probe = fit_probe(run, "face", layer=3, position="query", estimator="mass-mean")
    >>> probe.classes, probe.weight.shape
    (('heads', 'tails'), (1, 128))
    """
    spec = registry.get(estimator)
    if not spec.linear:
        raise ProbeError(f"{estimator} has no direction. Use one of {', '.join(registry.linear())}.")
    rows = ProbeRows.of(given)
    cell = rows.cell(site, layer)
    rows = rows.accepted().at(position)
    target = rows.target(label)
    rows, target = rows.where(target.present), target[target.present]
    goal = make_goal(target)
    goal.check(np.ones((1, len(rows)), dtype=bool))
    if goal.kind != "class":
        raise ProbeError(f"Label {label!r} is a number. Use a label with classes.")
    values = target.values
    if shuffled:
        values = values[shuffled_order(goal.codes, rows.roots, seed)]
    X = rows.matrix(site, layer).astype(np.float64)
    groups: dict[str, Any] = {"groups": groups_of(rows)} if spec.inner else {}
    weight, bias = coefficients(clone(spec.make()).fit(X, values, **groups))
    means = np.stack([X[values == name].mean(0) for name in goal.classes])
    stored = site if layer is None else rows.source.letters(site).get(layer, site)
    return LinearProbe(
        weight,
        bias,
        means,
        goal.classes,
        label,
        stored,
        cell,
        str(position),
        estimator,
        about_rows(rows),
        tuple(np.unique(rows.roots).tolist()),
    )


def placebo_probes(given: Dump | Run | ProbeRows, like: LinearProbe, count: int = 8, seed: int = 0) -> list[LinearProbe]:
    """Probes of the same kind, site and position as `like`, each fitted on labels exchanged between roots."""
    rows, cell, count = ProbeRows.of(given), like.cell, as_draws("count", count, each=PLACEBO_BYTES)
    how: dict[str, Any] = dict(site=cell.site, layer=cell.layer, position=like.position, estimator=like.estimator)
    return [fit_probe(rows, like.label, **how, shuffled=True, seed=seed + i) for i in range(count)]


def coefficients(fitted: Any) -> tuple[np.ndarray, np.ndarray]:
    """(weight [k, d], bias [k]) of a fitted linear estimator in the coordinates of its input, with any scaler undone."""
    scaler, last = (fitted[0], fitted[-1]) if isinstance(fitted, Pipeline) else (None, fitted)
    if not hasattr(last, "coef_"):
        raise ProbeError(f"{type(last).__name__} has no coefficients. Use a linear estimator.")
    weight, bias = np.atleast_2d(last.coef_).astype(np.float64), np.atleast_1d(last.intercept_).astype(np.float64)
    if scaler is not None:
        weight = weight / scaler.scale_
        bias = bias - weight @ scaler.mean_
    return weight, bias


def files_of(path: str | Path) -> tuple[Path, Path]:
    """(JSON file, file of the numbers) of a saved probe."""
    path = _stem(path)
    return path.with_suffix(".json"), path.with_suffix(".safetensors")


def is_probe(content: bytes) -> bool:
    """Whether a JSON file is one that `LinearProbe.save` wrote."""
    try:
        return bool(json.loads(content)["format"] == FORMAT)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _seal(about: dict[str, Any]) -> str:
    return records.digest_of({name: value for name, value in about.items() if name != "seal"})


def _sealed(path: Path, about: dict[str, Any]) -> bytes:
    """The file of numbers that belongs to a record. BadFile if one of the two was changed."""
    record, data = files_of(path)
    if "seal" not in about and "sha256" not in about and about.keys() <= _FIELDS:
        boundary.warn(
            f"{record} has no hash: an older version wrote it, and a change of it would not be noticed. Save the probe again.",
            Unsealed,
        )
        return data.read_bytes()
    if about.get("seal") != _seal(about):
        raise BadFile(f"{record.name} was changed after it was written: its seal is broken. Copy it again")
    for file in saves_of(data):
        with suppress(FileNotFoundError):
            if hashlib.sha256(content := file.read_bytes()).hexdigest() == about["sha256"]:
                return content
    why = "was changed after it was written: it does not have the SHA-256 of" if data.exists() else "is missing beside"
    raise BadFile(f"{data.name} {why} {record.name}. Copy both again")


def _stem(path: str | Path) -> Path:
    path = as_path("path", path)
    return path.with_suffix("") if path.suffix in (".json", ".safetensors") else path


# ---- crossval --------------------------------------------------------------------------------------------------------
# `cross_validate`: one probe on plain arrays, held out by group, with its interval: one cell of a sweep, without controls.


@dataclass(frozen=True, eq=False)
class CrossValidated:
    """Held-out predictions of one probe."""

    rows: np.ndarray
    """[n]: numbers of the rows that count. Of rows that are the same observation, one does"""
    predicted: np.ndarray
    """[n]: classes as text, or numbers; each from a probe that saw no row of the row's group"""
    fold: np.ndarray
    """[n]: the fold that a row is tested in"""
    score: Estimate
    """over the rows that have a value, with its interval over groups"""
    metric: str
    """accuracy, balanced_accuracy, auroc, or r2 of a number"""
    split: Split


def cross_validate(
    X: np.ndarray | torch.Tensor,
    y: Any,
    groups: Any,
    *,
    keys: Any = None,
    estimator: str = "logistic",
    kind: str = "auto",
    folds: int = 5,
    seed: int = 0,
    metric: str = "accuracy",
) -> CrossValidated:
    """Fit on all groups but one fold of them, in turn, and predict that fold.

    The predictions are those of `sweep` with the same folds and seed, bit for bit. It adds the controls and the tests, without
    which a score says little.

    X       [rows, d]; see `ProbeRows.of_arrays` for X, y, groups and keys
    metric  of classes: see `sweep`
    kind    class, number (use the estimator ridge), or auto: text, booleans and few whole numbers are classes

    Raises BadRows for arrays that do not fit, TooFewGroups for fewer groups than folds, OneClass if a fold
    leaves one class to fit on.

    >>> import numpy as np
    >>> y = np.arange(60) % 3
    >>> X = np.random.default_rng(0).normal(size=(60, 8)) + 6 * np.eye(8)[y]
    >>> found = cross_validate(X, y, groups=np.arange(60) // 3, estimator="mass-mean")
    >>> found.metric, found.score.value, found.predicted[:3].tolist(), len(found.split)
    ('accuracy', 1.0, ['0', '1', '2'], 5)
    """
    given = ProbeRows.of_arrays({SITE: X}, {LABEL: y}, groups, keys=keys)
    here = independent(given, [given.target(LABEL, kind)])
    rows = here.rows
    goal = make_goal(rows.target(LABEL, kind), metric=known_metric(metric))
    split = by_root(rows, folds, seed)
    goal.check(split.train)
    x = torch.from_numpy(rows.matrix(SITE)).double()[None]
    held, fold = held_out(estimator, x, [goal], split.train, split.test, groups=here.groups), split.test.argmax(0)
    there, said = goal.present, held.predicted[0, 0]
    how: dict[str, Any] = dict(fold=fold, groups=here.groups[there], folds=folds)
    (score,) = estimates(held.of(0, goal, there), goal, there, **how)
    predicted = np.array(goal.classes)[said.astype(np.int64)] if goal.kind == "class" else said
    return CrossValidated(rows.numbers, predicted, fold, score, goal.metric, split)


# ---- streaming -------------------------------------------------------------------------------------------------------
# Fitting while capturing: rows are added to moments and dropped; the probe is that of a fit on the dump.

FROM_MOMENTS: dict[str, Callable[[], Any]] = {
    "mass-mean": MassMeanProbe,
    "mass-mean-whitened": lambda: MassMeanProbe(whiten=True),
    "leace": Leace,
}
"""estimators that need nothing but moments"""


class StreamedMoments:
    """One `MomentStream` per cell; rows arrive in the order of their examples."""

    def __init__(self, label: str, classes: Sequence[str], sites: str | Sequence[str] = "S", position: str = "step") -> None:
        self.label, self.classes, self.sites, self.position = label, tuple(classes), sites, position
        self.streams: dict[Cell, MomentStream] = {}

    def add(self, rows: ProbeRows) -> None:
        """Mutates: adds the accepted rows at the position that have the label. Pieces of any size give the same bits."""
        rows = rows.accepted().at(self.position)
        target = rows.target(self.label, "class")
        rows, target = rows.where(target.present), target[target.present]
        for cell in rows.cells(self.sites):
            x = torch.from_numpy(rows.matrix(cell.site, cell.layer))
            if cell not in self.streams:
                self.streams[cell] = MomentStream(x.shape[1], self.classes)
            self.streams[cell].add(x, target.values)

    def moments(self) -> dict[Cell, Moments]:
        return {cell: stream.moments() for cell, stream in self.streams.items()}

    def fit(self, estimator: str) -> dict[Cell, Any]:
        """One probe or eraser per cell, bit for bit the one that `fit` gives on the dumped rows."""
        if estimator not in FROM_MOMENTS:
            raise ProbeError(f"{estimator} cannot be fitted from moments alone. Use one of {', '.join(FROM_MOMENTS)}.")
        return {cell: FROM_MOMENTS[estimator]().fit_moments(moments) for cell, moments in self.moments().items()}


@verb
def fit_streaming(
    engine: Engine,
    examples: Sequence[Example],
    label: str,
    classes: Sequence[str],
    *,
    sites: str | Sequence[str] = "S",
    position: str = "step",
    batch: int = 32,
    drafter: str = "lens",
    seed: int = 0,
    rejected: bool = False,
    progress: bool = False,
    **options: Unpack[ReplayKeywords],
) -> StreamedMoments:
    """Replay examples and keep only moments: memory does not grow with their number. Options as in `Engine.replay`.

    Examples are replayed in the order of their index, as in a dump; the order in which they are given changes no bit.
    """
    examples = sorted(examples, key=lambda example: example.index)
    collected = StreamedMoments(label, classes, sites, position)
    for first in tqdm(range(0, len(examples), batch), unit="batch", disable=hidden(progress)):
        some = examples[first : first + batch]
        run = engine.replay(some, sites=sites, drafter=drafter, seed=seed, rejected=rejected, batch=batch, **options)
        plan = plan_of_run(engine, some[0].maker, [e.index for e in some], run.options)
        collected.add(ProbeRows.of_results(engine, plan, run.results))
    return collected
