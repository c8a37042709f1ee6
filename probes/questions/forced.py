"""Questions about forced paths: `text_or_truth`, `outcome_at_fork`, `viable_branch`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch

from replaylens.dumps.maker import make_plan
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes.areas import balanced_accuracy
from replaylens.probes.causal import held
from replaylens.probes.controls import Goal, make_goal, token_identity
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.groups import distinct, groups_of, independent, path_keys
from replaylens.probes.heldout import held_out, label_orders, refitted
from replaylens.probes.intervals import LEVEL, contributions, difference_over_groups, ratio_over_groups
from replaylens.probes.permutations import PERMUTATIONS
from replaylens.probes.positions import example_keys, row_paths
from replaylens.probes.registry import get
from replaylens.probes.report import Report, about_rows, percent, score_line
from replaylens.probes.rows import Cell, ProbeRows, Target, make_target
from replaylens.probes.splits import Split, apart, by_answer, by_root
from replaylens.probes.verdicts import INVERTED, SHOWN, TestFamily, family, of_line, p_over, tested
from replaylens.replay.replayer import Result, prompt_of, result_of
from replaylens.replay.run import Run
from replaylens.tasks.splits import is_test_root
from replaylens.tasks.task import Example

# ---- forced ----------------------------------------------------------------------------------------------------------
# Rows of forced paths: prompts with continuations of the user's own, right or wrong.

_BATCH = 32


def forced_rows(
    engine: Engine,
    examples: Sequence[Example],
    continuations: Sequence[str],
    *,
    sites: str | Sequence[str] = "S",
    more: Sequence[int] | int = 0,
) -> ProbeRows:
    """Force a continuation after each prompt, let the model continue, and return the rows with the labels of the whole text.

    more  number of tokens that the model may add, greedily: one for all, or one per example
    """
    if not len(examples):
        raise ProbeError("No examples given. Give at least one, with a continuation for each.")
    lengths = [more] * len(examples) if isinstance(more, int) else list(more)
    if not len(examples) == len(continuations) == len(lengths):
        raise ProbeError(
            f"{len(examples)} examples, {len(continuations)} continuations, {len(lengths)} lengths. Give one per example."
        )
    results: list[Result] = []
    for first in range(0, len(examples), _BATCH):
        chosen = slice(first, first + _BATCH)
        some, texts = examples[chosen], continuations[chosen]
        with held(list(engine.prompts([prompt_of(e) for e in some], sites=sites))) as branches:
            engine.force_all(branches, list(texts))
            for n, branch in zip(lengths[chosen], branches, strict=True):
                if n:
                    branch.generate(n, drafter="ngram", final=True)
            results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
    plan = make_plan(engine, examples[0].maker, [e.index for e in examples], sites=sites, drafter="ngram", rejected=False)
    return ProbeRows.of_results(engine, plan, results)


# ---- sizes -----------------------------------------------------------------------------------------------------------
# Sizes of the rows behind a line of a report: prompts, and groups of prompts that are independent.


def sizes(rows: ProbeRows, side: np.ndarray | None = None) -> dict[str, Any]:
    """Numbers of roots and groups among the rows of a side [rows] bool; default: all."""
    chosen = np.ones(len(rows), dtype=bool) if side is None else side
    return {"roots": len(np.unique(rows.roots[chosen])), "groups": len(np.unique(groups_of(rows)[chosen]))}


# ---- text or truth ---------------------------------------------------------------------------------------------------
# `text_or_truth`: after a forced wrong state token, does the hidden state follow the text or the truth?


def text_or_truth(
    engine: Engine,
    examples: Sequence[Example],
    *,
    lie_at: int = 1,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    estimator: str = "logistic",
    seed: int = 0,
) -> Report:
    """Force a chain of thought whose `lie_at`-th stated face is wrong, let the model continue, and probe its state.

    Examples are of the task `coin` with rendering `steps`. Probes are fitted on truthful chains of the train roots and read
    false chains of the test roots, at `position` after the lie, where truth (`face`) and text (`implied`) differ.
    """
    if lie_at < 1:
        raise ProbeError(f"lie_at={lie_at} is too small. Stated faces are counted from 1.")
    examples = [e for e in examples if len(e.events) > lie_at]
    if not examples or examples[0].task != "coin" or examples[0].maker.knobs.rendering != "steps":
        raise ProbeError("Unsuitable examples. Use the task coin with rendering='steps' and more steps than lie_at.")
    train = [e for e in examples if not is_test_root(e.root)]
    test = [e for e in examples if is_test_root(e.root)]
    if len(train) < 10 or len(test) < 5:
        raise BadRows(f"{len(train)} train roots and {len(test)} test roots are too few. Give more examples.")
    truthful = forced_rows(engine, train, [e.completion for e in train], sites=sites)
    lies = [_lied(e, lie_at) for e in test]
    room = [len(engine.text.encode(e.completion, special=False)) for e in test]
    lied = forced_rows(engine, test, lies, sites=sites, more=room)
    honest = forced_rows(engine, test, [e.completion for e in test], sites=sites)
    fitted, *read = (distinct(_after(rows).at(position)) for rows in (truthful, honest, lied))
    for rows in read:
        apart(fitted, rows)
    lines = _side_lines(fitted, read[0], read[1], fitted.cells(sites, layers), estimator, seed)
    words, notes = _own_words(lied, lie_at)
    settings = dict(lie_at=lie_at, position=position, estimator=estimator, seed=seed)
    return Report("text_or_truth", [*lines, *words], about_rows(lied), settings, notes, _say_text_or_truth(lines, words))


def _lied(example: Example, at: int) -> str:
    """The completion up to its `at`-th stated face, with that face flipped."""
    pieces = example.completion.split(".")[:at]
    head, _, face = pieces[-1].rpartition(" ")
    other = {"heads": "tails", "tails": "heads"}[face]
    return ".".join([*pieces[:-1], f"{head} {other}"]) + "."


def _after(rows: ProbeRows) -> ProbeRows:
    """The rows of the chain of thought, after the prompt."""
    return rows.where(rows.frame["since_query"] > 0)


def _side_lines(
    fitted: ProbeRows, honest: ProbeRows, lied: ProbeRows, cells: Sequence[Cell], estimator: str, seed: int
) -> list[dict[str, Any]]:
    """Three lines for each cell; those that follow the text have the verdict. Their intervals hold for all cells jointly."""
    parted = lied.where((lied.frame["face"] != lied.frame["implied"]) & lied.frame["face"].notna())
    if not len(parted):
        raise BadRows("No row at this position comes after the lie. Give a later position, such as step, or an earlier lie_at.")
    sides = [
        (name, rows.where((target := rows.target(label)).present), target[target.present])
        for name, rows, label in (
            ("truthful chains, truth", honest, "face"),
            ("after the lie, follows the text", parted, "implied"),
            ("after the lie, follows the truth", parted, "face"),
        )
    ]
    right: list[list[np.ndarray]] = []
    for cell in cells:
        probe = get(estimator).make().fit(fitted.matrix(cell.site, cell.layer), fitted.target("face").values)
        right.append([probe.predict(rows.matrix(cell.site, cell.layer)) == target.values for _, rows, target in sides])
    about = [(groups_of(rows), sizes(rows)) for _, rows, _ in sides]
    found = family([(each[1] - 0.5, about[1][0]) for each in right], sides=2, seed=seed)
    lines = []
    for cell, each in zip(cells, right, strict=True):
        for (name, *_), (groups, size), hit in zip(sides, about, each, strict=True):
            score = ratio_over_groups(hit[None], np.ones(len(hit)), groups, level=found.level)[0]
            lines.append(score_line(f"{cell}: {name}", "share", score, len(hit), cell, **size))
    tested(lines[1::3], found, null=0.5)
    return lines


def _own_words(lied: ProbeRows, lie_at: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The model's own statements: the first face after the lie, and its answer."""
    frame = lied.frame
    stated = frame["text"].isin([" heads", " tails"]) & (frame["since_query"] > 0) & frame["face"].notna()
    own = frame[stated].groupby("example")
    lines, notes = [], []
    for name, chosen in (("next face that the model states", own.nth(lie_at)), ("its answer", own.nth(-1))):
        if not len(chosen):
            notes.append(f"Skipped '{name}': the model states no face.")
            continue
        truth = (chosen["claimed"] == chosen["face"]).to_numpy(dtype=float)
        score = ratio_over_groups(1 - truth[None], np.ones(len(truth)), chosen["root"].to_numpy(dtype=str))[0]
        lines.append(score_line(f"{name}: wrong", "share", score, len(truth), roots=chosen["root"].nunique()))
    return lines, notes


def _say_text_or_truth(lines: list[dict[str, Any]], words: list[dict[str, Any]]) -> list[str]:
    sides = {SHOWN: "the text", INVERTED: "the truth"}
    said = []
    for line in (line for line in lines if "verdict" in line):
        verdict, share = of_line(line), percent(line["accuracy"], line["low"], line["high"])
        head = SHOWN.capitalize() if verdict.outcome in sides else verdict.head
        follows = sides.get(verdict.outcome, "one side more than the other")
        said.append(f"{head}: {line['what'].split(':')[0]} follows {follows}: {share} of rows agree with the text.")
    said += [f"{line['what']} in {percent(line['accuracy'], line['low'], line['high'])}." for line in words]
    return said


# ---- outcome at fork -------------------------------------------------------------------------------------------------
# `outcome_at_fork`: is the exact outcome distribution linear in the rows before the next token is drawn?


def outcome_at_fork(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Ridge regression from rows to the task's exact probability of the first outcome, on held-out roots.

    The baselines are the state alone, and state and number of steps side by side (without their product). Only a score above
    these shows that the rows hold the distribution itself. The intervals of the differences hold for all cells jointly, so
    the best cell decides.
    """
    every = ProbeRows.of(given).accepted()
    task = every.about.make_task()
    if not hasattr(task, "outcomes"):
        raise ProbeError(f"Task {task.name!r} cannot compute outcome probabilities. Use coin.")
    target = outcome_target(every, position)
    rows = every.at(position)
    rows, target = rows.where(target.present), target[target.present]
    chosen = independent(rows)
    target, rows = target[np.isin(rows.numbers, chosen.rows.numbers)], chosen.rows
    if np.ptp(target.values) == 0:
        raise BadRows(
            f"The outcome has probability {target.values[0]:g} at all {len(rows)} rows. Choose a position where it varies."
        )
    state = (rows.target("state").values == rows.target("state").classes[0]).astype(float)
    steps = pd.get_dummies(rows.frame["step"]).to_numpy(dtype=float)
    simple = {"state alone": state[:, None], "state and steps": np.column_stack([state, steps])}
    lines = explained(rows, target, simple, rows.cells(sites, layers), folds, seed)
    settings = dict(position=position, folds=folds, seed=seed)
    return Report(
        "outcome_at_fork", lines, about_rows(rows), settings, [chosen.note] if chosen.note else [], _say_outcome(lines)
    )


def explained(
    rows: ProbeRows, target: Target, simple: dict[str, np.ndarray], cells: Sequence[Cell], folds: int, seed: int
) -> list[dict[str, Any]]:
    """What every baseline and cell explains of a number, and what cells explain beyond the last baseline, with verdicts."""
    groups, size = groups_of(rows), sizes(rows)
    split, goal = by_root(rows, folds, seed), make_goal(target)
    total = (goal.codes - goal.codes.mean()) ** 2
    orders = label_orders(goal, rows.roots, groups, PERMUTATIONS, seed)
    errors: dict[str, np.ndarray] = {}
    lines: list[dict[str, Any]] = []
    for name, cell in (dict[str, Cell | None].fromkeys(simple) | {str(cell): cell for cell in cells}).items():
        X = simple[name] if cell is None else rows.matrix(cell.site, cell.layer)
        predicted = held_out("ridge", torch.from_numpy(X).double()[None], [goal], split.train, split.test).predicted[0, 0]
        errors[name] = (goal.codes - predicted) ** 2
        score = ratio_over_groups((total - errors[name])[None], total, groups, folds=folds, least=-np.inf)[0]
        p = float(refitted("ridge", torch.from_numpy(X).float()[None], goal, orders, split).p[0])
        lines.append(score_line(name, "r2", score, len(rows), cell, p=p, **size))
    known = list(simple)[-1]
    gains = np.stack([errors[known] - errors[str(cell)] for cell in cells]) / total.mean()
    found = family([(gains, groups)], folds=folds, seed=seed)
    more = []
    for cell, each in zip(cells, gains, strict=True):
        gain = difference_over_groups(each, groups, folds=folds, bounded=False, level=found.level)
        more.append(score_line(f"{cell} minus {known}", "difference of r2", gain, len(rows), cell, **size))
    tested(more, found)
    return lines + more


def outcome_target(every: ProbeRows, position: str) -> Target:
    """The exact probability of the task's first outcome at each row of a position, given the text of its path."""
    task: Any = every.about.make_task()
    here, every = every.at(position), every.whole
    wanted, words = set(here.numbers), every.frame["text"].to_numpy()
    found: dict[int, float] = {}
    for path in row_paths(every.frame):
        for end, number in enumerate(every.numbers[path.own], len(path.rows) - path.num_own):
            if number in wanted:
                if not path.whole[end]:
                    raise BadRows("Outcomes are computed from whole texts, but these have holes. Dump all positions.")
                found[int(number)] = next(iter(task.outcomes("".join(words[path.rows[: end + 1]])).values()))
    return make_target("outcome", [found[int(n)] for n in here.numbers], "number")


def _say_outcome(lines: list[dict[str, Any]]) -> list[str]:
    scores = [line for line in lines if line["metric"] == "r2"]
    said = [f"{line['what']}: r2 {line['accuracy']:.3f} [{line['low']:.3f}, {line['high']:.3f}]." for line in scores]
    gains = [line for line in lines if line["metric"] != "r2"]
    best = min(gains, key=lambda line: (line["p_family"], -line["accuracy"]))
    more = f"{best['accuracy']:+.3f} [{best['low']:+.3f}, {best['high']:+.3f}], {p_over(best, len(gains))}"
    what = f"rows explain more than state and number of steps side by side; best {best['what']}: {more}"
    return [*said, f"{of_line(best)}: {what}."]


# ---- viable branch ---------------------------------------------------------------------------------------------------
# `viable_branch`: when the model takes the wrong branch, is the right one still readable, or is the wrong one held?

CLAIM = "wrong answers, the model's own claim"
MIN_GROUPS = 5
"""of wrong answers, for a verdict"""
TOKEN, MINUS_TOKEN = ", by the answer's token", ", probe minus token"


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
    notes: list[str] = []
    asked: list[_Asked] = []
    for position in positions:
        here = rows.at(position)
        scene = _scene(here.where(here.target(truth).present), truth, claim, position, folds, seed)
        notes += scene.notes
        for cell in scene.rows.cells(sites, layers):
            asked += scene.read(cell, estimator)
    decided = [gain for each in asked if (gain := each.gain) is not None]
    found = family(decided, seed=seed) if decided else None
    lines = [each.line(LEVEL if found is None else found.level) for each in asked]
    if found is not None:
        _judge([line for line, each in zip(lines, asked, strict=True) if each.gain is not None], found)
    settings = dict(positions=list(positions), estimator=estimator, folds=folds, seed=seed, label=truth)
    return Report("viable_branch", lines, about_rows(rows), settings, notes, _say_viable(lines))


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

    def read(self, cell: Cell, estimator: str) -> "list[_Asked]":
        """What is asked of one cell."""
        x = torch.from_numpy(self.rows.matrix(cell.site, cell.layer)).double()[None]
        held = held_out(estimator, x, [self.goal], self.split.train, self.split.test, groups=groups_of(self.rows))
        said = held.predicted[0, 0].astype(int)
        wrong, codes = ~self.right, self.goal.codes
        asked = [_Asked(self, cell, "right answers", said, codes, self.right)]
        sides = [("wrong answers", codes, wrong)]
        if (known := wrong & (self.claimed >= 0)).any():
            sides.append((CLAIM, self.claimed, known))
        asked += [_Asked(self, cell, name, said, wanted, side, decides=True) for name, wanted, side in sides]
        for name, wanted, side in sides if self.by_token is not None else ():
            asked.append(_Asked(self, cell, name + TOKEN, self.by_token, wanted, side))
            asked.append(_Asked(self, cell, name + MINUS_TOKEN, said, wanted, side, decides=True, beside=self.by_token))
        return asked


@dataclass(frozen=True, eq=False)
class _Asked:
    """How often a class is said that is wanted, on the rows of a side: balanced accuracy, or its lead over another answer."""

    scene: _Scene
    cell: Cell
    name: str
    said: Any
    """[rows]: class numbers"""
    wanted: np.ndarray
    side: np.ndarray
    decides: bool = False
    """whether it is one of the tests of the call"""
    beside: np.ndarray | None = None
    """[rows]: the other answer"""

    @property
    def groups(self) -> np.ndarray:
        return np.asarray(groups_of(self.scene.rows)[self.side])

    @property
    def chance(self) -> float:
        return float(1 / len(np.unique(self.wanted[self.side])))

    @cached_property
    def values(self) -> np.ndarray:
        """[rows of the side], whose mean is the score."""
        hit, wanted = np.equal(self.said, self.wanted)[self.side], self.wanted[self.side]
        if self.beside is not None:
            return np.asarray(hit.astype(float) - np.equal(self.beside, self.wanted)[self.side])
        said = np.where(hit, wanted, -1)[None]
        return np.asarray(contributions("balanced_accuracy", said, np.empty(0), wanted)[0])

    @cached_property
    def gain(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What is tested; None if nothing is, or too few rows could tell anything: an accuracy of one class is 0 or 1 by the
        probe's bias alone."""
        if not self.decides or self.chance == 1 or len(np.unique(self.groups)) < MIN_GROUPS:
            return None
        return self.values - (self.chance if self.beside is None else 0.0), self.groups

    def line(self, level: float) -> dict[str, Any]:
        folds, metric = len(self.scene.split), "balanced accuracy"
        more: dict[str, Any] = {"chance": self.chance}
        if self.beside is None:
            hit = np.equal(self.said, self.wanted)[self.side]
            score = balanced_accuracy(hit, self.wanted[self.side], self.groups, folds=folds, level=level)
        else:
            metric, more = "difference", {}
            score = difference_over_groups(self.values, self.groups, folds=folds, level=level)
        more |= dict(position=self.scene.position, **sizes(self.scene.rows, self.side))
        what = f"{self.cell} at {self.scene.position}: {self.name}"
        return score_line(what, metric, score, int(self.side.sum()), self.cell, **more)


def _judge(lines: list[dict[str, Any]], found: TestFamily) -> None:
    """Mutates the lines: adds verdicts. What the answer's token tells as well is not shown by the probe."""
    tested(lines, found)
    named = {line["what"]: line for line in lines}
    for line in lines:
        beside = named.get(f"{line['what']}{MINUS_TOKEN}")
        if beside is not None and line["verdict"] == SHOWN and beside["verdict"] != SHOWN:
            line |= of_line(beside).columns | {"decided_by": "token"}


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


def _say_viable(lines: list[dict[str, Any]]) -> list[str]:
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
    if "verdict" not in wrong:
        few = f"{wrong['groups']} groups and {(count := round(1 / wrong['chance']))} class{'es' if count > 1 else ''}"
        return f"{place}: {scores}: No verdict: wrong answers of {few}, where {MIN_GROUPS} groups and 2 classes are needed."
    if any(name.endswith(TOKEN) for name in named):
        scores += "; the position contains the answer"
    said = []
    for line, what in (wrong, "the truth is still readable"), (claim, "the wrong branch is held"):
        if line is not None and "verdict" in line:
            more = ", no more than the answer's token tells" if line["decided_by"] == "token" else ""
            said.append(f"{of_line(line)}: {what}{more}.")
    return f"{place}: {scores}. {' '.join(said)}"


def _percent(line: dict[str, Any]) -> str:
    return percent(line["accuracy"], line["low"], line["high"])
