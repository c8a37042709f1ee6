"""Probes read elsewhere: on rejected branches (`transfer`), and on other tasks and runs (`transfer_across`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes.areas import balanced_accuracy
from replaylens.probes.checks import folds_and_seed
from replaylens.probes.controls import (
    DRAWS,
    Goal,
    bags,
    contexts,
    control_labels,
    majority,
    make_goal,
    position_bins,
    token_identity,
    untrained_rows,
)
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.groups import groups_of, histories, independent, why_no_histories
from replaylens.probes.heldout import held_out
from replaylens.probes.intervals import contributions, difference_over_groups, ratio_over_groups
from replaylens.probes.permutations import group_permutations
from replaylens.probes.questions.forced import sizes
from replaylens.probes.report import Report, about_rows, percent, score_line
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.splits import Split, fold_of_groups
from replaylens.probes.verdicts import (
    ERROR,
    INVERTED,
    SHOWN,
    Conclusion,
    error_of,
    family,
    of_line,
    p_over,
    with_controls,
)
from replaylens.replay.run import Run

# ---- transfer --------------------------------------------------------------------------------------------------------
# `transfer`: do probes fitted on accepted branches read rejected ones, and how much is due to shared prefixes?

ALL_CONTROLS = (SHUFFLED, TOKEN, POSITION, BAG, CONTROL_TASK, UNTRAINED) = (
    "shuffled labels", "token alone", "position alone", "bag of tokens", "control task", "untrained model",
)  # fmt: skip
"""labels exchanged between roots before the fit; the row's token; its position; tokens of its path; a random class per type of
context"""
CONTROLS = (SHUFFLED, TOKEN)
"""of transfer across tasks and runs, whose texts differ"""
_DRAWS = 4
"""shuffled fits per cell"""
_NUMBER = "Label {!r} is a number, and a transfer needs classes. Give another label, or cut it into classes."
WAYS = (("accepted", "accepted"), ("accepted", "rejected"), ("rejected", "rejected"), ("rejected", "accepted"))


def transfer(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
    engine: Engine | None = None,
) -> Report:
    """Accuracy of probes from accepted to rejected rows and back, on roots that they were not fitted on.

    The line `same roots` of each cell also fits on accepted rows of the SAME roots. Its gain is leakage through shared
    prefixes, not transfer. Only rows after the prompt count, since prompts have no rejected rows. Controls go the same way,
    from accepted to rejected rows: `ALL_CONTROLS`, the untrained model if the rows' `engine` is given. Shown: some cell is
    above every one of them and above the majority; the intervals of the differences hold for all cells jointly.

    Shown is not used: any function of the last words, whatever it means, may be readable in a model that knows them.
    """
    every = ProbeRows.of(given)
    if every.about.task is None:
        raise ProbeError("Transfer compares branches, and rows from arrays have none. Give a dump or run with rejected drafts.")
    blank: ProbeRows | None = None
    if engine is not None:
        every.require(engine)
        every = every.renumbered()
        blank = untrained_rows(every, engine, sorted({cell.site for cell in every.cells(sites, layers)}), seed)
    here = every.at(position)
    here = here.where(here.frame["since_query"] > 0)
    _require_both(here.frame["accepted"].to_numpy(dtype=bool), position)
    chosen = independent(here)
    rows, notes = chosen.rows, [chosen.note] if chosen.note else []
    target = rows.target(label)
    if target.kind != "class":
        raise BadRows(_NUMBER.format(label))
    rows, target = rows.where(target.present), target[target.present]
    accepted = rows.frame["accepted"].to_numpy(dtype=bool)
    _require_both(accepted, position, f" with a value of {label!r}")
    folds, seed = folds_and_seed(folds, seed)
    goal, groups = make_goal(target), groups_of(rows)
    inside = np.arange(folds)[:, None] == fold_of_groups(groups, folds, seed)
    ways = {(fit, test): (~inside & _side(accepted, fit), inside & _side(accepted, test)) for fit, test in WAYS}
    for (fit, test), masks in ways.items():
        Split(f"{fit} to {test}", *masks, rows.roots).check(rows)
    main, cells = ways["accepted", "rejected"], rows.cells(sites, layers)
    held = _Controls(rows, goal, groups, accepted, main, estimator, seed)
    notes += held.notes if blank is not None else [*held.notes, f"Skipped the control {UNTRAINED!r}: no engine was given."]
    lines = [_line(f"{name}: accepted to rejected", None, goal, rows, right, main) for name, right in held.of_text.items()]
    for cell in cells:
        x = torch.from_numpy(rows.matrix(cell.site, cell.layer)).double()[None]
        said = {way: _right(estimator, x, goal, groups, *masks) for way, masks in ways.items()}
        for (fit, test), masks in ways.items():
            lines.append(_line(f"{cell}: {fit} to {test}", cell, goal, rows, said[fit, test], masks))
        leaky = np.repeat(accepted[None], folds, 0), inside & ~accepted
        same = _right(estimator, x, goal, groups, *leaky)
        lines.append(_line(f"{cell}: accepted to rejected, same roots", cell, goal, rows, same, leaky))
        gain = same.astype(float) - said["accepted", "rejected"]
        leaked = difference_over_groups(gain[~accepted], groups[~accepted], folds=folds)
        size: dict[str, Any] = dict(majority=None, **sizes(rows, ~accepted))
        lines.append(score_line(f"{cell}: leakage", "difference", leaked, int((~accepted).sum()), cell, **size))
        other = None if blank is None else replace(rows, source=blank.source).matrix(cell.site, cell.layer)
        held.add(x, said["accepted", "rejected"], other)
    score = {cell: next(line for line in lines if line["what"] == f"{cell}: accepted to rejected") for cell in cells}
    right, guess = np.stack(held.right)[:, ~accepted], _guess(goal, ~accepted)
    opposite = 1 - right - guess if len(goal.classes) == 2 else None
    lines += _judged(
        list(score.values()), held.gains, right - guess, opposite, cells, "accepted to rejected", groups[~accepted], seed, folds
    )
    settings = dict(label=label, position=position, estimator=estimator, folds=folds, seed=seed)
    return Report("transfer", lines, about_rows(rows), settings, notes, _say(lines, label))


class _Controls:
    """What the way from accepted to rejected rows is held against; `gains` of each control grow by a line for every cell."""

    def __init__(
        self,
        rows: ProbeRows,
        goal: Goal,
        groups: np.ndarray,
        accepted: np.ndarray,
        masks: tuple[np.ndarray, np.ndarray],
        estimator: str,
        seed: int,
    ) -> None:
        self._goal, self._groups, self._masks, self._estimator, self._tested = goal, groups, masks, estimator, ~accepted
        self.gains: dict[str, list[np.ndarray]] = {}
        """control -> [rejected rows] of each cell"""
        self.right: list[np.ndarray] = []
        """[rows] of each cell: whether it is read correctly"""
        self.notes: list[str] = []
        tokens = rows.frame["token"].to_numpy()
        self.of_text = {TOKEN: token_identity(goal.codes, tokens, *masks) == goal.codes}
        """control -> [rows]: whether the text alone tells the class"""
        if (places := position_bins(rows.frame["position"], np.ones(len(rows), dtype=bool))) is None:
            self.notes.append(f"Skipped the control {POSITION!r}: all rows are at the same position.")
        else:
            self.of_text[POSITION] = token_identity(goal.codes, places, *masks) == goal.codes
        self._labels = {SHUFFLED: _shuffled(goal, groups, self._tested, seed)}
        if (paths := histories(rows)) is None:
            self.notes.append(f"Skipped the controls {BAG!r} and {CONTROL_TASK!r}: {why_no_histories(rows)}")
            return
        bag = torch.from_numpy(bags(paths)).double()[None]
        self.of_text[BAG] = _right("logistic", bag, goal, groups, *masks)
        if (types := contexts(paths)) is None:
            self.notes.append(f"Skipped the control {CONTROL_TASK!r}: the contexts have too few types.")
            return
        draws = [replace(goal, codes=control_labels(types[0], goal.codes, seed + draw)) for draw in range(DRAWS)]
        self._labels[CONTROL_TASK] = draws

    def add(self, x: torch.Tensor, right: np.ndarray, untrained: np.ndarray | None) -> None:
        """Mutates: the gains of one cell, whose rows are x [1, rows, width] and were read correctly or not [rows]."""
        split, found = Split("", *self._masks, self._groups), dict[str, np.ndarray](self.of_text)
        for name, goals in self._labels.items():
            found[name] = _right_across(self._estimator, x, goals, split, self._groups).mean(0)
        if untrained is not None:
            blank = torch.from_numpy(untrained).double()[None]
            found[UNTRAINED] = _right(self._estimator, blank, self._goal, self._groups, *self._masks)
        self.right.append(right.astype(float))
        for name, each in found.items():
            self.gains.setdefault(name, []).append((right.astype(float) - each)[self._tested])


CHANCE = "chance"


def _guess(goal: Goal, tested: np.ndarray) -> np.ndarray:
    """[tested rows]: whether the most frequent class of the tested rows is right."""
    codes = goal.codes[tested]
    return np.asarray(codes == np.bincount(codes).argmax(), dtype=float)


def _judged(
    scores: list[dict[str, Any]], gains: dict[str, list[np.ndarray]], chance: np.ndarray, against_chance: np.ndarray | None,
    cells: Sequence[Cell], way: str, groups: np.ndarray, seed: int, folds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each cell has above each control, with intervals that hold for all cells jointly. Mutates the scores of the cells:
    adds the verdict, for which a cell has to be above chance and above every control.

    chance          [cells, rows]: what each row has above chance
    against_chance  the same of the opposite class, which a fit on other rows of the same labels is not biased towards; None if
                    there are more than two classes
    """
    lines, against = [], [list[tuple[float, float, float, float, str]]() for _ in cells]
    for name, each in [(CHANCE, list(chance)), *gains.items()]:
        found = family([(np.stack(each), groups)], folds=folds, seed=seed)
        for i, (cell, gain) in enumerate(zip(cells, each, strict=True)):
            lead = difference_over_groups(gain, groups, folds=folds, level=found.level)
            error = error_of(lead, len(np.unique(groups)))
            against[i].append((float(found.p[i]), lead.value, lead.high, error, name))
            size: dict[str, Any] = {"roots": scores[i]["roots"], "groups": scores[i]["groups"], "p_family": float(found.p[i])}
            if name != CHANCE:
                what = f"{cell}: {way} minus {name}"
                lines.append(score_line(what, "difference", lead, len(gain), cell, majority=None, **size))
    # the opposite of what a probe says; of more than two classes it would be none of them
    opposite = np.ones(len(cells)) if against_chance is None else family([(against_chance, groups)], folds=folds, sides=2).p
    for score, each, p in zip(scores, against, opposite, strict=True):
        verdict = with_controls(each, float(score["groups"]), len(cells))
        if verdict.outcome != SHOWN and p <= ERROR:
            verdict = Conclusion(INVERTED, verdict.bound, None, CHANCE)
        score |= {"p_family": max(one[0] for one in each), **verdict.columns}
    return lines


def _require_both(accepted: np.ndarray, position: str, labelled: str = "") -> None:
    if accepted.all() or not accepted.any():
        advice = "Give another label or position." if labelled else "Dump with a drafter that makes readable errors."
        raise BadRows(
            f"Transfer needs labelled rows of accepted and of rejected branches, but of rows{labelled} after the prompt, at "
            f"{position!r}, {accepted.sum()} are accepted and {(~accepted).sum()} rejected. {advice}"
        )


def _side(accepted: np.ndarray, name: str) -> np.ndarray:
    return accepted if name == "accepted" else ~accepted


def _right(estimator: str, x: torch.Tensor, goal: Goal, groups: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """[rows] bool: whether each tested row is predicted correctly."""
    goal.check(train)
    right: np.ndarray = held_out(estimator, x, [goal], train, test, groups=groups).predicted[0, 0] == goal.codes
    return right


def _line(
    what: str, cell: Cell | None, goal: Goal, rows: ProbeRows, right: np.ndarray, masks: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    tested = np.asarray(masks[1].any(0))
    score = ratio_over_groups(right[tested][None], np.ones(tested.sum()), groups_of(rows)[tested], folds=len(masks[1]))[0]
    size: dict[str, Any] = dict(majority=majority(goal.codes, *masks), **sizes(rows, tested))
    return score_line(what, "accuracy", score, int(tested.sum()), cell, **size)


def _say(lines: list[dict[str, Any]], label: str) -> list[str]:
    """The lines of the best cell, and the verdict."""
    named, way = {line["what"]: line for line in lines}, "accepted to rejected"
    best = _leading(lines)
    cell = best["what"].removesuffix(f": {way}")
    said = []
    for line in lines:
        if line["what"].split(": ")[0] not in (cell, *ALL_CONTROLS) or " minus " in line["what"]:
            continue
        extra = "" if line["majority"] is None else f", majority {100 * line['majority']:.1f} %, {line['rows']} rows"
        said.append(f"{line['what']}: {percent(line['accuracy'], line['low'], line['high'])}{extra}.")
    known = [name for name in ALL_CONTROLS if f"{cell}: {way} minus {name}" in named]
    for name in known:
        gain = named[f"{cell}: {way} minus {name}"]
        said.append(f"{cell}: above {name} by {percent(gain['accuracy'], gain['low'], gain['high'])}.")
    missing = [name for name in ALL_CONTROLS if name not in known]
    against = f"{len(known)} of {len(ALL_CONTROLS)} controls" + (f" (without: {', '.join(missing)})" if missing else "")
    verdict = of_line(best)
    if verdict.outcome != SHOWN:
        against += f"; decided by {verdict.decided_by}"
    what = f"a probe of {label!r} fitted on accepted rows reads rejected ones, best at {cell}"
    return [*said, f"{verdict}: {what}, against {against}, {p_over(best, sum('verdict' in line for line in lines))}."]


def _leading(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of the best cell: one that is shown if any is, then inverted, then with the smallest p."""
    rank = {SHOWN: 0, INVERTED: 1}
    every = [line for line in lines if "verdict" in line]
    return min(every, key=lambda line: (rank.get(line["verdict"], 2), line["p_family"], -line["accuracy"]))


# ---- across ----------------------------------------------------------------------------------------------------------
# `transfer_across`: does a probe of one task, prompt style or run read another's rows?


def transfer_across(
    rows: ProbeRows,
    label: str,
    *,
    fit_on: str,
    test_on: str,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "query",
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Balanced accuracy of probes from one part of joined rows on another, on prompts that they were not fitted on.

    The parts may be of different tasks (`ProbeRows.join(coin=a, coins=b)`) that share the label. Controls: the same way with
    labels exchanged between prompts of the first part, and the row's token alone; ceilings: each part on itself. A direction
    counts as common if, at some cell, the transfer is above chance and above both controls; the intervals of the differences
    hold for all cells jointly.
    """
    folds, seed = folds_and_seed(folds, seed)
    here, goal, part, notes = _labelled(rows, label, position, fit_on, test_on)
    groups = groups_of(here)
    inside = np.arange(folds)[:, None] == fold_of_groups(groups, folds, seed)
    ways = {(a, b): (~inside & (part == a), inside & (part == b)) for a in (fit_on, test_on) for b in (fit_on, test_on)}
    splits = {way: Split(f"{way[0]} to {way[1]}", *masks, here.roots).check(here) for way, masks in ways.items()}
    main = splits[fit_on, test_on]
    for split in splits.values():
        goal.check(split.train)
    tested = part == test_on
    lines: list[dict[str, Any]] = []
    gains: dict[str, list[np.ndarray]] = {name: [] for name in CONTROLS if name != TOKEN or here.has_tokens}
    if here.has_tokens:
        token = token_identity(goal.codes, here.frame["token"].to_numpy(), main.train, main.test) == goal.codes
        lines.append(_line_across(f"{TOKEN}, {fit_on} to {test_on}", None, here, goal, token, tested, folds))
    else:
        notes.append(f"Skipped the control {TOKEN!r}: these rows have no tokens.")
    cells, chance = here.cells(sites, layers), list[np.ndarray]()
    for cell in cells:
        x = torch.from_numpy(here.matrix(cell.site, cell.layer)).double()[None]
        for (a, b), split in splits.items():
            right, own = _right_across(estimator, x, [goal], split, groups)[0], part == b
            lines.append(_line_across(f"{cell}: {a} to {b}", cell, here, goal, right, own, folds))
            if (a, b) == (fit_on, test_on):
                codes = goal.codes[own]
                said = np.where(right[own], codes, -1)[None]
                chance.append(contributions("balanced_accuracy", said, np.empty(0), codes)[0] - 1 / len(np.unique(codes)))
                mixed = _right_across(estimator, x, _shuffled(goal, groups, tested, seed), split, groups).mean(0)
                gains[SHUFFLED].append((right - mixed)[tested])
                if here.has_tokens:
                    gains[TOKEN].append((right.astype(float) - token)[tested])
    score = [next(line for line in lines if line["what"] == f"{cell}: {fit_on} to {test_on}") for cell in cells]
    opposite = -np.stack(chance) if len(goal.classes) == 2 else None
    lines += _judged(score, gains, np.stack(chance), opposite, cells, f"{fit_on} to {test_on}", groups[tested], seed, folds)
    settings = dict(label=label, fit_on=fit_on, test_on=test_on, position=position, estimator=estimator, folds=folds, seed=seed)
    return Report(
        "transfer_across", lines, about_rows(here), settings, notes, _say_across(lines, f"{fit_on} to {test_on}", label)
    )


def _labelled(
    rows: ProbeRows, label: str, position: str, fit_on: str, test_on: str
) -> tuple[ProbeRows, Goal, np.ndarray, list[str]]:
    """Accepted rows of both parts with a class that both have, their goal, the part of each, and notes."""
    known = sorted(set(rows.frame.get("part", [])))
    if fit_on not in known or test_on not in known or fit_on == test_on:
        there = ", ".join(known) or "none; see ProbeRows.join"
        raise ProbeError(f"No transfer from {fit_on!r} to {test_on!r}. Give two of the parts of these rows: {there}.")
    chosen = independent(rows.accepted().at(position))
    here, notes = chosen.rows, [chosen.note] if chosen.note else []
    target, part = here.target(label), here.frame["part"].to_numpy()
    if target.kind != "class":
        raise BadRows(_NUMBER.format(label))
    sides = [set(target.values[target.present & (part == name)]) for name in (fit_on, test_on)]
    if len(sides[0] & sides[1]) < 2:
        there = ", ".join(sorted(map(str, sides[0] & sides[1]))) or "none"
        raise BadRows(f"Label {label!r} at {position} has the common classes {there} in both parts. It needs at least two.")
    keep = target.present & np.isin(target.values, sorted(sides[0] & sides[1])) & np.isin(part, [fit_on, test_on])
    return here.where(keep), make_goal(target[keep]), part[keep], notes


def _shuffled(goal: Goal, roots: np.ndarray, tested: np.ndarray, seed: int) -> list[Goal]:
    """The goal with labels of the fitted part exchanged between its roots, several times. Tested rows keep theirs."""
    fitted = np.flatnonzero(~tested)
    found = []
    for order in group_permutations(goal.codes[fitted], roots[fitted], _DRAWS, seed + 1):
        codes = goal.codes.copy()
        codes[fitted] = goal.codes[fitted][order]
        found.append(replace(goal, codes=codes))
    return found


def _right_across(estimator: str, x: torch.Tensor, goals: list[Goal], split: Split, groups: np.ndarray) -> np.ndarray:
    """[goals, rows]: whether each row is predicted correctly; rows that are not tested count for nothing."""
    predicted = held_out(estimator, x, goals, split.train, split.test, groups=groups).predicted[0]
    return np.stack([said == goal.codes for said, goal in zip(predicted, goals, strict=True)])


def _line_across(
    what: str, cell: Cell | None, rows: ProbeRows, goal: Goal, right: np.ndarray, side: np.ndarray, folds: int
) -> dict[str, Any]:
    """Balanced accuracy on the rows of a side [rows] bool."""
    codes = goal.codes[side]
    score = balanced_accuracy(right[side], codes, groups_of(rows)[side], folds=folds)
    more: dict[str, Any] = dict(chance=1 / len(np.unique(codes)), **sizes(rows, side))
    return score_line(what, "balanced accuracy", score, len(codes), cell, **more)


def _say_across(lines: list[dict[str, Any]], way: str, label: str) -> list[str]:
    best = _leading(lines)
    cell = best["what"].removesuffix(f": {way}")
    said = [
        f"{line['what']}: {percent(line['accuracy'], line['low'], line['high'])}."
        for line in lines
        if line["what"].startswith((f"{cell}: ", "token alone"))
    ]
    what = f"a probe of {label!r} reads {way}, best at {cell} (chance {100 * best['chance']:.1f} %)"
    decided = "" if best["verdict"] == SHOWN else f", decided by {best['decided_by']}"
    return [*said, f"{of_line(best)}: {what}{decided}, {p_over(best, sum('verdict' in line for line in lines))}."]
