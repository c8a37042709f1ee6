"""`text_or_truth`: after a forced wrong state token, does the hidden state follow the text or the truth?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from replaylens.engine.engine import Engine
from replaylens.probes.data.groups import distinct, groups_of
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.design.unseen import apart
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.fitting.registry import get
from replaylens.probes.questions.forced import forced_rows
from replaylens.probes.questions.sizes import sizes
from replaylens.probes.reports.report import Report, about_rows, percent, score_line
from replaylens.probes.scoring.statistics import ratio_over_groups
from replaylens.tasks import Example
from replaylens.tasks.splits import is_test_root


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
    lines: list[dict[str, Any]] = []
    for cell in fitted.cells(sites, layers):
        lines += _cell_lines(cell, fitted, read[0], read[1], estimator)
    words, notes = _own_words(lied, lie_at, seed)
    settings = dict(lie_at=lie_at, position=position, estimator=estimator, seed=seed)
    return Report("text_or_truth", [*lines, *words], about_rows(lied), settings, notes, _say(lines, words))


def _lied(example: Example, at: int) -> str:
    """The completion up to its `at`-th stated face, with that face flipped."""
    pieces = example.completion.split(".")[:at]
    head, _, face = pieces[-1].rpartition(" ")
    other = {"heads": "tails", "tails": "heads"}[face]
    return ".".join([*pieces[:-1], f"{head} {other}"]) + "."


def _after(rows: ProbeRows) -> ProbeRows:
    """The rows of the chain of thought, after the prompt."""
    return rows.where(rows.frame["since_query"] > 0)


def _cell_lines(cell: Cell, fitted: ProbeRows, honest: ProbeRows, lied: ProbeRows, estimator: str) -> list[dict[str, Any]]:
    probe = get(estimator).make().fit(fitted.matrix(cell.site, cell.layer), fitted.target("face").values)
    found = []
    parted = lied.where((lied.frame["face"] != lied.frame["implied"]) & lied.frame["face"].notna())
    for name, rows, label in (
        ("truthful chains, truth", honest, "face"),
        ("after the lie, follows the text", parted, "implied"),
        ("after the lie, follows the truth", parted, "face"),
    ):
        target = rows.target(label)
        rows, target = rows.where(target.present), target[target.present]
        right = probe.predict(rows.matrix(cell.site, cell.layer)) == target.values
        score = ratio_over_groups(right[None], np.ones(len(right)), groups_of(rows))[0]
        found.append(score_line(f"{cell}: {name}", "share", score, len(right), cell, **sizes(rows)))
    return found


def _own_words(lied: ProbeRows, lie_at: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
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


def _say(lines: list[dict[str, Any]], words: list[dict[str, Any]]) -> list[str]:
    texts = [line for line in lines if line["what"].endswith("follows the text")]
    said = []
    for line in texts:
        verdict = "the text" if line["low"] > 0.5 else "the truth" if line["high"] < 0.5 else "neither clearly"
        share = percent(line["accuracy"], line["low"], line["high"])
        said.append(f"{line['what'].split(':')[0]} follows {verdict}: {share} of rows agree with the text.")
    said += [f"{line['what']} in {percent(line['accuracy'], line['low'], line['high'])}." for line in words]
    return said
