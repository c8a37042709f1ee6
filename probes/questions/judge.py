"""`judge`: does a linear judge of draft tokens know more than draft-target divergence, entropy and log-probability?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from replaylens.dumps.reader import Dump
from replaylens.engine.errors import UnknownSite
from replaylens.engine.request.values import as_int
from replaylens.probes.areas import area, area_gains
from replaylens.probes.checks import folds_and_seed
from replaylens.probes.controls import Goal, make_goal
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.groups import groups_of, independent
from replaylens.probes.intervals import contributions
from replaylens.probes.positions import row_paths
from replaylens.probes.questions.forced import sizes
from replaylens.probes.report import Report, about_rows, score_line
from replaylens.probes.rows import ProbeRows, make_target
from replaylens.probes.solvers import one_hot, solve
from replaylens.probes.splits import Split, by_root
from replaylens.probes.verdicts import family, of_line, p_over, tested
from replaylens.replay.run import Run

BASELINES = ("kl", "entropy", "logprob")
MINUS = ", minus the three and the token"
THREE, FOUR = "kl, entropy, logprob", "kl, entropy, logprob, token"


def judge(
    given: Dump | Run | ProbeRows,
    *,
    draft_layer: int,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Area under the ROC curve for separating good draft tokens from bad ones, on held-out roots.

    A draft token is an accepted generated token, or the first of a rejected branch. It is good if the path up to it is
    still a text of the task whose claim is true. A rejected token can be good; a judge would save it.

    The judge is compared with the three numbers and the token itself together, since a judge that only knows which tokens
    tend to be good reads nothing of the path.

    given        rows with the logit lens (Z), which holds the divergence: dump or replay with sites such as "SZ"
    draft_layer  layer that the lens drafter reads; the divergence is that between its distribution and the model's
    """
    folds, seed = folds_and_seed(folds, seed)
    every = ProbeRows.of(given)
    truth, claim = every.about.make_task().claims
    table = _drafts(every, draft_layer)
    drafts = every.where(table["chosen"])
    chosen = independent(drafts)
    rows, kept = chosen.rows, np.isin(drafts.numbers, chosen.rows.numbers)
    simple = np.column_stack([table[name][table["chosen"]][kept] for name in BASELINES])
    frame = rows.frame
    good = (frame[truth].notna() & (frame[truth] == frame[claim])).fillna(False).to_numpy(dtype=bool)
    if good.all() or not good.any():
        raise BadRows(f"All {len(good)} draft tokens are {'good' if good.any() else 'bad'}. Give rows with both kinds.")
    split, goal = by_root(rows, folds, seed), make_goal(make_target("good", good))
    scores = {f"{name} alone": simple[:, i] * (1 if name == "logprob" else -1) for i, name in enumerate(BASELINES)}
    token = pd.get_dummies(frame["token"]).to_numpy(dtype=np.float64)
    scores[THREE] = _held_scores(simple, goal, split)
    scores[FOUR] = _held_scores(np.column_stack([simple, token]), goal, split)
    for cell in rows.cells(sites, layers):
        X = rows.matrix(cell.site, cell.layer).astype(np.float64)
        scores[f"judge at {cell}"] = _held_scores(X, goal, split)
        scores[f"judge at {cell} and the three"] = _held_scores(np.column_stack([X, simple]), goal, split)
    lines = _lines(scores, good, rows, split, seed)
    settings = dict(draft_layer=draft_layer, folds=folds, seed=seed)
    return Report("judge", lines, about_rows(rows), settings, [chosen.note] if chosen.note else [], _say(lines, good, rows))


def _drafts(every: ProbeRows, draft_layer: int) -> dict[str, np.ndarray]:
    """Which rows are draft tokens, the divergence and entropy of the row before each, and its log-probability."""
    frame = every.frame
    try:
        every_layer = every.source.take("Z.kl", None, every.numbers)
    except UnknownSite:
        raise BadRows("The divergence is part of Z, which was not captured. Dump or replay with sites such as 'SZ'.") from None
    kl = every_layer[:, as_int("draft_layer", draft_layer, 0, every_layer.shape[1] - 1, ProbeError)].double().numpy()
    before = _rows_before(frame)
    state, depth = frame["token_state"].to_numpy(dtype=str), frame["depth"].to_numpy()
    chosen = ((state == "accepted") | ((state == "rejected") & (depth == 1))) & (before >= 0)
    entropy = frame["entropy"].to_numpy(dtype=np.float64)
    logprob = frame["logprob"].to_numpy(dtype=np.float64)
    return {"chosen": chosen, "kl": kl[before], "entropy": entropy[before], "logprob": logprob}


def _rows_before(frame: pd.DataFrame) -> np.ndarray:
    """For each row, the number of the row before it on its path; -1 if there is none."""
    before = np.full(len(frame), -1, dtype=np.int64)
    position = frame["position"].to_numpy()
    for path in row_paths(frame):
        follows = np.flatnonzero(np.diff(position[path.rows]) == 1) + 1
        own = follows[follows >= len(path.rows) - path.num_own]
        before[path.rows[own]] = path.rows[own - 1]
    return before


def _held_scores(X: np.ndarray, goal: Goal, split: Split) -> np.ndarray:
    """Log-odds of being good, for each row by the probe that did not see its root."""
    x = torch.from_numpy(X)[None]
    solution = solve("logistic", x, one_hot(goal.codes, 2)[None], split.train[None])
    scores = solution.scores(x)[0, 0, :, :, 0].numpy()  # [folds, rows]
    return (scores * split.test).sum(0)


def _lines(scores: dict[str, np.ndarray], good: np.ndarray, rows: ProbeRows, split: Split, seed: int) -> list[dict[str, Any]]:
    """Areas with intervals over groups; differences from the joint baselines, whose intervals hold for all cells jointly."""
    count, groups, size = len(rows), groups_of(rows), sizes(rows)
    folds, fold = len(split), split.test.argmax(0)  # rows are ranked within a fold: another fold has another probe
    found = {
        name: area(score, good, groups) if name.endswith("alone") else area(score, good, groups, strata=fold, folds=folds)
        for name, score in scores.items()
    }
    lines = [score_line(name, "auc", each, count, **size) for name, each in found.items()]
    joint = [name for name in scores if name.endswith("and the three")]
    every = np.stack([scores[FOUR], *(scores[name] for name in joint)])[..., None]
    parts = contributions("auroc", np.empty(0), every, good.astype(int), fold)
    tests = family([(parts[1:] - parts[0], groups)], folds=folds, seed=seed)
    gains = area_gains([scores[name] for name in joint], scores[FOUR], good, groups, strata=fold, folds=folds, seed=seed)
    first = len(lines)
    for name, gain in zip(joint, gains, strict=True):
        lines.append(score_line(f"{name}{MINUS}", "difference of auc", gain, count, **size))
    tested(lines[first:], tests)
    return lines


def _say(lines: list[dict[str, Any]], good: np.ndarray, rows: ProbeRows) -> list[str]:
    rejected = ~rows.frame["accepted"].to_numpy(dtype=bool)
    said = [
        f"{len(good)} draft tokens, {good.mean():.1%} good; of {rejected.sum()} rejected ones {good[rejected].mean():.1%} good."
    ]
    said += [f"{line['what']}: {line['accuracy']:.3f} [{line['low']:.3f}, {line['high']:.3f}]." for line in lines]
    gains = [line for line in lines if line["what"].endswith(MINUS)]
    best = min(gains, key=lambda line: (line["p_family"], -line["accuracy"]))
    where = f"{best['what'].removesuffix(MINUS)}, {p_over(best, len(gains))}"
    what = "a linear judge knows more than divergence, entropy, log-probability and token"
    return [*said, f"{of_line(best)}: {what} ({where})."]
