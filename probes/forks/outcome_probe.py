"""`outcome_probe`: how much of the coming outcome distribution can be read off the state at the fork?

A multinomial logistic probe predicts the outcome shares of each fork's rollouts from the state there, on held-out roots. Its
loss is the cross-entropy, which no distribution minimises but the true one, and which is linear in the shares: a fork with
few rollouts makes it noisy, not biased. What the text alone predicts, and shuffled outcomes, are the baselines.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from replaylens.probes.checks import folds_and_seed, same_length
from replaylens.probes.controls import bags
from replaylens.probes.errors import BadRows, ProbeError, SharedRows
from replaylens.probes.forks.distributions import entropy, shares
from replaylens.probes.intervals import LEVEL, Estimate, corrected_p, difference_over_groups, one_sided_bounds
from replaylens.probes.permutations import shuffled_order
from replaylens.probes.registry import smoothed, solve_chosen
from replaylens.probes.report import Report, score_line
from replaylens.probes.rows import Cell
from replaylens.probes.solvers import solve
from replaylens.probes.splits import Split, fold_of_groups
from replaylens.probes.verdicts import of_line, with_controls

LOSS, GAIN = "log-loss, nats", "gain, nats"
FREQUENCIES, SHUFFLED, UNTRAINED = "outcome frequencies", "shuffled", "untrained"
ESTIMATORS = ("logistic-cv", "logistic")
Key = str | tuple[str, int]


def outcome_probe(
    states: Mapping[Key, np.ndarray],
    counts: np.ndarray,
    groups: np.ndarray,
    *,
    tokens: Sequence[np.ndarray],
    untrained: Mapping[Key, np.ndarray] | None = None,
    estimator: str = "logistic-cv",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Predict the outcome distribution of rollouts from the state at the fork, against the text alone.

    states     by site, or by site and layer: [forks, d], the state of the last token before the fork
    counts     int64 [forks, outcomes]: outcomes of the rollouts from each fork
    groups     [forks]: forks of one root are one group; folds, intervals and shuffles keep it together
    tokens     [forks]: the tokens of the path up to each fork, for the baselines that see only the text
    untrained  the same states of a model with random weights: one more baseline, cell by cell
    estimator  logistic-cv (its regularisation chosen by inner folds) or logistic (C = 1)
    """
    if estimator not in ESTIMATORS:
        raise ProbeError(f"{estimator!r} gives no probabilities of outcomes. Use {' or '.join(ESTIMATORS)}.")
    folds, seed = folds_and_seed(folds, seed)
    data = _Forks.of(states, counts, groups, tokens, untrained, folds, seed)
    texts = _texts(tokens)
    losses = {name: data.losses(x, estimator) for name, x in texts.items()}
    losses[FREQUENCIES] = data.frequencies()
    cells = {str(cell): data.losses(x, estimator) for cell, x in data.states.items()}
    order = shuffled_order(np.arange(len(groups)), data.groups, seed)
    controls = {f"{SHUFFLED} at {cell}": data.shuffled(order).losses(x, estimator) for cell, x in data.states.items()}
    if untrained is not None:
        losses |= {f"{UNTRAINED} {cell}": data.losses(x, estimator) for cell, x in data.untrained.items()}
    lines = [*_scores(losses | cells | controls, data), *_gains(cells, losses, data, folds, seed)]
    _judge(lines, len(np.unique(data.groups)))
    settings = dict(estimator=estimator, folds=folds, seed=seed, rollouts=int(counts.sum()), outcomes=counts.shape[1])
    return Report("outcome_probe", lines, data.about(), settings, data.notes(), _say(lines))


@dataclass(frozen=True, eq=False)
class _Forks:
    """The forks with their folds."""

    states: dict[Cell, np.ndarray]
    untrained: dict[Cell, np.ndarray]
    target: np.ndarray
    """[forks, outcomes]: shares"""
    total: np.ndarray
    """[forks]: rollouts"""
    groups: np.ndarray
    split: Split

    @classmethod
    def of(
        cls,
        states: Mapping[Key, np.ndarray],
        counts: np.ndarray,
        groups: np.ndarray,
        tokens: Sequence[np.ndarray],
        untrained: Mapping[Key, np.ndarray] | None,
        folds: int,
        seed: int,
    ) -> "_Forks":
        groups = np.asarray(groups)
        same_length(groups=groups, counts=counts.T, tokens=np.arange(len(tokens)), **{str(k): x.T for k, x in states.items()})
        total = counts.sum(1)
        if (total == 0).any() or (counts.sum(0) > 0).sum() < 2:
            raise BadRows(
                f"{int((total == 0).sum())} of {len(total)} forks have no rollouts, and {int((counts.sum(0) > 0).sum())} "
                f"outcomes occur. Give forks with rollouts, and at least two outcomes."
            )
        _require_apart(tokens, groups)
        inside = np.arange(folds)[:, None] == fold_of_groups(groups, folds, seed)
        split = Split("root", ~inside, inside, groups)
        blank = {} if untrained is None else {_cell(key): x for key, x in untrained.items()}
        seen = counts[:, counts.sum(0) > 0]
        return cls({_cell(key): x for key, x in states.items()}, blank, shares(seen), total, groups, split)

    def shuffled(self, order: np.ndarray) -> "_Forks":
        """The same with outcomes exchanged between groups."""
        return _Forks(self.states, self.untrained, self.target[order], self.total[order], self.groups, self.split)

    def losses(self, x: np.ndarray, estimator: str) -> np.ndarray:
        """[forks]: cross-entropy of the held-out prediction, in nats."""
        rows = torch.as_tensor(np.asarray(x), dtype=torch.float64)[None]
        aim = self.target[:, 1:] if self.target.shape[1] == 2 else self.target
        train = self.split.train[None]
        if estimator == "logistic-cv":
            solution, _ = solve_chosen("logistic", rows, aim[None], train, self.groups)
        else:
            solution = solve(estimator, rows, aim[None], train)
        scores = solution.scores(rows)[0, 0].numpy()  # [folds, forks, k]
        if aim.shape[1] == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], -1)
        log_p = scores - np.logaddexp.reduce(scores, -1, keepdims=True)
        return self._judged([smoothed(each, int(fit.sum())) for each, fit in zip(log_p, self.split.train, strict=True)])

    def frequencies(self) -> np.ndarray:
        """[forks]: cross-entropy of the mean shares of the training forks."""
        means = (np.log(self.target[fit].mean(0).clip(1e-300)) for fit in self.split.train)
        log_p = [
            np.tile(smoothed(mean, int(fit.sum())), (len(fit), 1)) for mean, fit in zip(means, self.split.train, strict=True)
        ]
        return self._judged(log_p)

    def _judged(self, log_p: Sequence[np.ndarray]) -> np.ndarray:
        out = np.empty(len(self.groups))
        for said, held in zip(log_p, self.split.test, strict=True):
            out[held] = -(self.target[held] * said[held]).sum(1)
        return out

    @property
    def floor(self) -> np.ndarray:
        """[forks]: entropy of each fork's own distribution, the loss of a probe that knows it."""
        return entropy(self.target, self.total)

    def about(self) -> dict[str, Any]:
        content = hashlib.sha256()
        for x in (*self.states.values(), self.target):
            content.update(np.ascontiguousarray(x).tobytes())
        roots = len(np.unique(self.groups))
        return {
            "task": None,
            "knobs": {},
            "digest": content.hexdigest(),
            "fingerprint": None,
            "rows": len(self.total),
            "roots": roots,
        }

    def notes(self) -> list[str]:
        return [] if self.untrained else ["Skipped the untrained model: no states of one were given (untrained=)."]


def _cell(key: Key) -> Cell:
    return Cell(key, None) if isinstance(key, str) else Cell(*key)


def _require_apart(tokens: Sequence[np.ndarray], groups: np.ndarray) -> None:
    """Raise SharedRows if forks of two groups have the same path, and so the same state."""
    seen: dict[bytes, int] = {}
    for number, path in enumerate(tokens):
        first = seen.setdefault(np.asarray(path, dtype=np.int64).tobytes(), number)
        if groups[first] != groups[number]:
            raise SharedRows(
                f"Forks {first} and {number} have the same path but different groups, {groups[first]} and "
                f"{groups[number]}: a probe fitted on one would be tested on the other. Give both the same group."
            )


def _texts(tokens: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Features of the text alone, by name."""
    bag = bags([np.asarray(path) for path in tokens]).astype(np.float64)
    last = np.array([path[-1] for path in tokens])
    one_hot = (last[:, None] == np.unique(last)[None]).astype(np.float64)
    length = np.array([[len(path)] for path in tokens], dtype=np.float64)
    return {
        "length": length,
        "last token": one_hot,
        "bag of tokens": bag,
        "whole text": np.column_stack([bag, one_hot, length]),
    }


def _scores(losses: dict[str, np.ndarray], data: _Forks) -> list[dict[str, Any]]:
    """Loss of everything, with the share of what can be explained: 0 for the frequencies, 1 for the true distributions."""
    folds, room = len(data.split), float((losses[FREQUENCIES] - data.floor).mean())
    lines = []
    for name, loss in losses.items():
        score = difference_over_groups(loss, data.groups, folds=folds, bounded=False)
        part = float((losses[FREQUENCIES] - loss).mean()) / room if room > 0 else float("nan")
        lines.append(score_line(name, LOSS, score, len(loss), share_explained=part))
    return lines


def _gains(
    cells: dict[str, np.ndarray], losses: dict[str, np.ndarray], data: _Forks, folds: int, seed: int
) -> list[dict[str, Any]]:
    """Loss of each baseline minus that of each cell; the low ends are one-sided and hold for all of them jointly."""
    pairs = [
        (cell, name) for cell in cells for name in losses if not name.startswith(UNTRAINED) or name == f"{UNTRAINED} {cell}"
    ]
    gains = np.stack([losses[name] - cells[cell] for cell, name in pairs])
    low = one_sided_bounds(gains, data.groups, seed=seed, folds=folds).low
    p = corrected_p(gains, data.groups, folds)
    lines = []
    for (cell, name), gain, least, chance in zip(pairs, gains, low, p, strict=True):
        found = difference_over_groups(gain, data.groups, folds=folds, bounded=False)
        score = Estimate(found.value, float(least), found.high)
        lines.append(score_line(f"{cell} against {name}", GAIN, score, len(gain), cell=None, p=float(chance), state=cell))
    return lines


def _judge(lines: list[dict[str, Any]], groups: int) -> None:
    """Mutates the lines of cells: adds the verdict, for which a cell has to gain over every baseline."""
    gains = [line for line in lines if line["metric"] == GAIN]
    cells = list(dict.fromkeys(line["state"] for line in gains))
    for score in (line for line in lines if line["metric"] == LOSS and line["what"] in cells):
        against = []
        for line in (line for line in gains if line["state"] == score["what"]):
            error = (line["high"] - line["accuracy"]) / float(stats.t.ppf((1 + LEVEL) / 2, groups - 1))
            upper = 2 * line["accuracy"] - line["low"]
            against.append((float(line["low"] <= 0), line["accuracy"], upper, error, line["what"].partition(" against ")[2]))
        score |= with_controls(against, groups, len(gains)).columns


def _say(lines: list[dict[str, Any]]) -> list[str]:
    """One sentence per cell. The lowest bound decides, which need not be that of the least gain: both are named."""
    scores = {line["what"]: line for line in lines if line["metric"] == LOSS}
    said = []
    for cell in dict.fromkeys(line["state"] for line in lines if line["metric"] == GAIN):
        own = [line for line in lines if line["metric"] == GAIN and line["state"] == cell]
        least, lowest = min(own, key=lambda line: line["accuracy"]), min(own, key=lambda line: line["low"])
        verdict = of_line(scores[cell])
        name, decisive = (line["what"].removeprefix(f"{cell} against ") for line in (least, lowest))
        rest = f" The lowest bound decides: {lowest['low']:+.3f} over {decisive} (gain {lowest['accuracy']:+.3f})."
        said.append(
            f"{verdict}: {cell} tells more of the coming outcomes than every baseline. Loss {scores[cell]['accuracy']:.3f} "
            f"nats, {scores[cell]['share_explained']:.0%} of what can be explained; least gain {least['accuracy']:+.3f} nats "
            f"over {name} ({least['low']:+.3f} to {least['high']:+.3f}).{rest if lowest['low'] < least['low'] else ''}"
        )
    return said
