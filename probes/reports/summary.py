"""A sweep's table in words: what is shown, what is not, and known zeros."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

CONTROLS = ("majority", "token_identity", "position_only", "bag_of_tokens", "shuffled", "control_task", "untrained")
OF_TEXT = ("token_identity", "bag_of_tokens", "control_task")
"""controls that need the tokens of the paths; where they are missing, a verdict says so"""
LEVEL = 0.05


SHOWN, READABLE, NOT_SHOWN = "shown", "readable", "not shown"
"""verdicts; readable: more than chance and every other control, but not separable from the control task"""
_HEADS = {SHOWN: "Shown", READABLE: "Readable, not separable from the control task", NOT_SHOWN: "Not shown"}


def verdict_of(line: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(verdict on one line of a sweep, what decided); None for known zeros.

    A label is shown if it scores more than chance over the whole grid, and more than every control that was run. Chance is
    tested by permutation (`p_family`), which keeps the frequencies of the classes, so that the majority needs no further test.
    Other controls are tested as paired differences: `margin` is the smallest lower bound over them, at an error that holds
    for the whole grid. The control task alone asks another question, how much the probe can memorise: a label that fails only
    there is readable.
    """
    p, margin = line.get("p_family"), line.get("margin")
    if p is None or p != p:
        return None, None
    if p > LEVEL:
        return NOT_SHOWN, "p_family"
    guess = line.get("majority")
    if guess is not None and line["accuracy"] <= guess:
        return NOT_SHOWN, "majority"
    if margin is None or margin != margin:
        return SHOWN, "p_family"
    if margin > 0:
        return SHOWN, line.get("margin_over")
    rest = line.get("margin_without_task")
    if line.get("margin_over") == "control_task" and (rest is None or rest != rest or rest > 0):
        return READABLE, "control_task"
    return NOT_SHOWN, line.get("margin_over")


def verdicts(table: pd.DataFrame) -> pd.Series:
    """The verdict on each line; see `verdict_of`."""
    return pd.Series([verdict_of(line)[0] for line in table.to_dict("records")], index=table.index, dtype=object)


def shown(table: pd.DataFrame) -> pd.Series:
    """Which lines count as shown; see `verdict_of`."""
    return verdicts(table) == SHOWN


def best_of(table: pd.DataFrame) -> pd.Series:
    """The line with the highest score among those that are shown; if none is, among the readable ones, then among all."""
    said = verdicts(table)
    for kind in (SHOWN, READABLE):
        if (said == kind).any():
            table = table[said == kind]
            break
    return table.loc[table["accuracy"].astype(float).idxmax()]


def summarise(table: pd.DataFrame, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Lines of text for a sweep's table."""
    if table.empty or "p_family" not in table:
        return ["No lines."]
    main, zeros = table[~table["known_zero"].astype(bool)], table[table["known_zero"].astype(bool)]
    lines = list(_labels(main))
    lines += list(_zeros(zeros))
    missing = [name for name in CONTROLS if name not in main or main[name].isna().all()]
    if missing:
        lines.append(f"Controls not run: {', '.join(missing)}.")
    lines.append(_method(main, settings or {}))
    lines.append("A probe shows that a label can be read off, not that the model uses it. Test the direction causally.")
    return lines


def _labels(main: pd.DataFrame) -> Iterator[str]:
    """Per label, estimator and position: the best cell, how many cells are shown, and what decided."""
    for (label, estimator, position), part in main.groupby(["label", "estimator", "position"], sort=False):
        best = best_of(part)
        verdict, decided = verdict_of(best)
        same = int((verdicts(part) == verdict).sum())
        where = f"{best['site']}{'' if pd.isna(best['layer']) else int(best['layer'])}"
        controls = [(float(best[name]), name.replace("_", " ")) for name in CONTROLS if pd.notna(best.get(name))]
        against = "best control {:.3f} ({})".format(*max(controls)) if controls else "no controls"
        without = [name.replace("_", " ") for name in OF_TEXT if pd.isna(best.get(name))]
        if without and pd.notna(best.get("majority")):
            against += f", without {' and '.join(without)}"
        score = f"{best['metric'].replace('auroc', 'AUROC').replace('_', ' ')} {best['accuracy']:.3f}"
        score += f" [{best['low']:.3f}, {best['high']:.3f}] at {where}, {against}"
        count = f"none of {len(part)}" if verdict == NOT_SHOWN else f"{same} of {len(part)}"
        head = f"{_HEADS[str(verdict)]}: {label} at {position} ({estimator})"
        yield f"{head}: {count} cells; best {score}, {_p(best)}."
        yield f"  decided by {_decision(best, str(decided))}."
        if pd.notna(best.get("selectivity")):
            interval = f"[{best['selectivity_low']:.3f}, {best['selectivity_high']:.3f}]"
            yield f"  selectivity there {best['selectivity']:.3f} {interval} (control task {best['control_task']:.3f})."
        if best["metric"] == "accuracy" and pd.notna(best.get("auroc_low")):
            yield f"  AUROC there {best['auroc']:.3f} [{best['auroc_low']:.3f}, {best['auroc_high']:.3f}]."
        if verdict == READABLE:
            yield "  The probe learns a random class per context as well. Hold out contexts to tell them apart: sweep(groups=)."


def _decision(line: pd.Series, decided: str) -> str:
    if decided == "p_family":
        side = ">" if float(line["p_family"]) > LEVEL else "<="
        return f"p over the grid {side} {LEVEL}"
    if decided == "majority":
        return "the majority, which scores as well"
    side = "above" if float(line["margin"]) > 0 else "not above"
    return f"the margin over {decided.replace('_', ' ')}: lower bound {float(line['margin']):+.3f}, {side} 0"


def _method(main: pd.DataFrame, settings: Mapping[str, Any]) -> str:
    """The grid, the tests and their correction, and the smallest p that they can give."""
    axes = (("site", "sites"), ("layer", "layers"), ("position", "positions"), ("label", "labels"), ("estimator", "estimators"))
    sizes = ", ".join(f"{count} {names if count > 1 else name}" for name, names in axes if (count := main[name].nunique()))
    tests = list(dict.fromkeys(main["test"].dropna()))
    count = settings.get("permutations")
    said = []
    if any("permutation" in test for test in tests):
        floor = f" ({count} permutations: no p is below {1 / (count + 1):.3f})" if count else ""
        said.append(f"permutation{floor}, corrected by the maximum statistic over the grid")
    if "corrected t" in tests:
        said.append("corrected t, with Bonferroni's correction over the grid")
    margin = "; margins over controls: one-sided, 5 % over the grid" if main.get("margin", pd.Series()).notna().any() else ""
    return f"Grid of {len(main)} cells ({sizes}). Tests: {'; '.join(said) or 'none'}{margin}."


def _p(line: pd.Series) -> str:
    p = float(line["p_family"])
    return f"p {'< 0.001' if p < 0.001 else f'= {p:.3f}'} over the grid ({line['test']}; {_sizes(line)})"


def _sizes(line: pd.Series) -> str:
    """How many rows, different ones, and independent groups a line rests on."""
    same = "" if line["rows"] == line["distinct"] else f", {line['distinct']} distinct"
    return f"{line['rows']} rows{same} of {line['groups']} groups"


def _zeros(zeros: pd.DataFrame) -> Iterator[str]:
    """Known zeros: how many intervals contain the exact chance."""
    for (label, position), part in zeros.groupby(["label", "position"], sort=False):
        inside = ((part["low"] <= part["chance"]) & (part["chance"] <= part["high"])).sum()
        worst = part.loc[(part["accuracy"] - part["chance"]).abs().idxmax()]
        yield (
            f"Known zero {label} at {position}: chance {worst['chance']:.3f} inside {inside} of {len(part)} intervals "
            f"(at 95 %, about one in twenty falls outside); farthest {worst['accuracy']:.3f}."
        )
