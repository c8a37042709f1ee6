"""`viable_branch`: when the model takes the wrong branch, is the right one still readable, or is the wrong one held?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.data.groups import groups_of, path_keys
from replaylens.probes.data.paths import example_keys
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.design.controls import token_identity
from replaylens.probes.design.goals import Goal, make_goal
from replaylens.probes.design.splits import Split, by_answer
from replaylens.probes.errors import BadRows
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.questions.sizes import sizes
from replaylens.probes.reports.report import Report, about_rows, percent, score_line
from replaylens.probes.scoring.balanced import balanced_accuracy
from replaylens.probes.scoring.statistics import difference_over_groups

CLAIM = "wrong answers, the model's own claim"
MIN_GROUPS = 5
"""of wrong answers, for a verdict"""
TOKEN = ", by the answer's token"


def viable_branch(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    positions: Sequence[str] = ("query",),
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Fit probes for the task's truth on prompts that the model answers correctly; read those that it answers wrongly.

    The truth is the first of the task's `claims`: the face of a coin, the viable branch of a fork. On wrong answers the probe's
    class is compared with the truth and with the class that the model claims: the wrong branch counts as held only if the
    probe names it more often than chance. Accuracy is the mean over classes, since a model may err on one class more often;
    chance is 1 over their number. Every prompt is read by a probe that was fitted on other prompts, even if greedy and
    sampled runs of the same prompts are joined. Wrong answers of one class, or of fewer than 5 groups, give no verdict.

    positions  best before the answer. Rows after it contain the claim as a token; there, the answer's token alone is a control
    """
    rows = ProbeRows.of(given).accepted()
    truth, claim = rows.about.make_task().claims
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    for position in positions:
        here = rows.at(position)
        scene = _scene(here.where(here.target(truth).present), truth, claim, position, folds, seed)
        notes += scene.notes
        for cell in scene.rows.cells(sites, layers):
            lines += scene.read(cell, estimator)
    settings = dict(positions=list(positions), estimator=estimator, folds=folds, seed=seed, label=truth)
    return Report("viable_branch", lines, about_rows(rows), settings, notes, _say(lines))


@dataclass(frozen=True, eq=False)
class _Scene:
    """The rows of one position with what the model says at the end of each."""

    rows: ProbeRows
    position: str
    goal: Goal
    split: Split
    right: np.ndarray
    """[rows] bool: whether the model answers rightly"""
    claimed: np.ndarray
    """[rows]: number of the class that the model claims; -1 if it is none of the truth's"""
    by_token: np.ndarray | None
    """[rows]: the class that the row's token and claim tell; None before the answer"""
    notes: list[str]

    def read(self, cell: Cell, estimator: str) -> list[dict[str, Any]]:
        """The lines of one cell."""
        x = torch.from_numpy(self.rows.matrix(cell.site, cell.layer)).double()[None]
        held = held_out(estimator, x, [self.goal], self.split.train, self.split.test, groups=groups_of(self.rows))
        said = held.predicted[0, 0].astype(int)
        wrong, codes = ~self.right, self.goal.codes
        lines = [
            self._line(cell, "right answers", said, codes, self.right),
            self._line(cell, "wrong answers", said, codes, wrong),
        ]
        sides = [("wrong answers", codes, wrong)]
        if (known := wrong & (self.claimed >= 0)).any():
            sides.append((CLAIM, self.claimed, known))
            lines.append(self._line(cell, CLAIM, said, self.claimed, known))
        if self.by_token is not None:
            for name, wanted, side in sides:
                lines.append(self._line(cell, name + TOKEN, self.by_token, wanted, side))
                gain = ((said == wanted).astype(float) - (self.by_token == wanted))[side]
                more = difference_over_groups(gain, groups_of(self.rows)[side], folds=len(self.split))
                lines.append(self._place(cell, f"{name}, probe minus token", "difference", more, side))
        return lines

    def _line(self, cell: Cell, name: str, said: np.ndarray, wanted: np.ndarray, side: np.ndarray) -> dict[str, Any]:
        hit, groups = (said == wanted)[side], groups_of(self.rows)[side]
        score = balanced_accuracy(hit, wanted[side], groups, folds=len(self.split))
        return self._place(cell, name, "balanced accuracy", score, side, chance=1 / len(np.unique(wanted[side])))

    def _place(self, cell: Cell, name: str, metric: str, score: Any, side: np.ndarray, **more: Any) -> dict[str, Any]:
        size: dict[str, Any] = dict(position=self.position, **sizes(self.rows, side), **more)
        return score_line(f"{cell} at {self.position}: {name}", metric, score, int(side.sum()), cell, **size)


def _scene(here: ProbeRows, truth: str, claim: str, position: str, folds: int, seed: int) -> _Scene:
    here = _once(here)
    right = here.frame["correct"].to_numpy(dtype=bool)
    if right.all() or not right.any():
        raise BadRows(f"All {len(right)} answers are {'right' if right.any() else 'wrong'}. Join prompts of both kinds.")
    goal, split = make_goal(here.target(truth)), by_answer(here, folds, seed)
    goal.check(split.train)
    final = _final_claims(here, claim)
    claimed = np.array([goal.classes.index(each) if each in goal.classes else -1 for each in final])
    unknown = int((claimed[~right] < 0).sum())
    notes = []
    if unknown:
        notes.append(
            f"Skipped {unknown} of {int((~right).sum())} wrong answers at {position} in the agreement with the model's own "
            f"claim: their rows do not record a claim that is a class of {truth!r}."
        )
    return _Scene(here, position, goal, split, right, claimed, _by_token(here, claim, goal, split), notes)


def _once(here: ProbeRows) -> ProbeRows:
    """Every observation once with a right and once with a wrong answer, both in one group: sampling may give both."""
    keys = path_keys(here)
    named = replace(here, frame=here.frame.assign(key=keys, group=groups_of(here, keys)))
    return named.where(~named.frame.duplicated(["key", "correct"]))


def _final_claims(here: ProbeRows, claim: str) -> list[str]:
    """What the accepted path of each row's example claims at its end; "" if it claims nothing after the query."""
    every = here.whole.frame
    if claim not in every:
        return [""] * len(here)
    told = every[every["accepted"].astype(bool) & (every["since_query"] > 0) & every[claim].notna()].sort_values("position")
    final = dict(zip(example_keys(told), told[claim].astype(str), strict=True))
    return [final.get(key, "") for key in example_keys(here.frame)]


def _by_token(here: ProbeRows, claim: str, goal: Goal, split: Split) -> np.ndarray | None:
    """The class that the row's own token and claim tell, if any row comes after the query."""
    frame = here.frame
    if not (frame["since_query"] > 0).any():
        return None
    stated = frame[claim].astype(str) if claim in frame else ""
    return token_identity(goal.codes, (frame["token"].astype(str) + "|" + stated).to_numpy(dtype=str), split.train, split.test)


def _say(lines: list[dict[str, Any]]) -> list[str]:
    """One sentence per cell and position."""
    places: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        place, name = line["what"].split(": ")
        places.setdefault(place, {})[name] = line
    return [_sentence(place, named) for place, named in places.items()]


def _sentence(place: str, named: dict[str, dict[str, Any]]) -> str:
    right, wrong, claim = named["right answers"], named["wrong answers"], named.get(CLAIM)
    scores = f"{_percent(right)} on right answers, {_percent(wrong)} on wrong ones (chance {100 * wrong['chance']:.1f} %)"
    if claim is not None:
        scores += f", where {_percent(claim)} agree with the model's own claim"
    if not _enough(wrong):
        few = f"{wrong['groups']} groups and {(count := round(1 / wrong['chance']))} class{'es' if count > 1 else ''}"
        return f"{place}: {scores}: No verdict: wrong answers of {few}, where {MIN_GROUPS} groups and 2 classes are needed."
    claim = claim if claim is not None and _enough(claim) else None
    tokens = [named.get(f"{name}, probe minus token") for name in ("wrong answers", CLAIM)]
    reads = [line is not None and line["low"] > line["chance"] for line in (wrong, claim)]
    more = [read and (token is None or token["low"] > 0) for read, token in zip(reads, tokens, strict=True)]
    if any(token is not None for token in tokens):
        scores += "; the position contains the answer"
    if more[0]:
        verdict = "the truth is still readable" + (", and so is the wrong branch" if more[1] else "")
    elif more[1]:
        verdict = "the wrong branch is held instead"
    elif any(reads):
        verdict = "no more than the answer's token tells"
    else:
        verdict = "the truth is not readable" if claim is None else "neither the truth nor the wrong branch is readable"
    return f"{place}: {scores}: {verdict}."


def _enough(line: dict[str, Any]) -> bool:
    """Whether a score can tell anything: an accuracy of one class is 0 or 1 by the probe's bias alone."""
    return bool(line["groups"] >= MIN_GROUPS and line["chance"] < 1)


def _percent(line: dict[str, Any]) -> str:
    return percent(line["accuracy"], line["low"], line["high"])
