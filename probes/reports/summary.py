"""A sweep's table in words: what is shown, what is not, and known zeros."""

from collections.abc import Iterator

import pandas as pd

CONTROLS = ("majority", "token_identity", "bag_of_tokens", "shuffled", "control_task", "untrained")
OF_TEXT = ("token_identity", "bag_of_tokens", "control_task")
"""controls that need the tokens of the paths; where they are missing, a verdict says so"""
LEVEL = 0.05


def shown(table: pd.DataFrame) -> pd.Series:
    """Which lines count as shown: more than chance over the whole grid, and more than every control that was run.

    Chance is tested by permutation (`p_family`), which keeps the frequencies of the classes, so that the majority needs no
    further test. Other controls are tested as paired differences: `margin` is the smallest lower bound over them, at an
    error that holds for the whole grid.
    """
    fine = table["p_family"].astype(float) <= LEVEL
    if "majority" in table:
        fine &= (table["accuracy"] > table["majority"].astype(float)) | table["majority"].isna()
    if "margin" in table:
        fine &= (table["margin"].astype(float) > 0) | table["margin"].isna()
    return fine


def summarise(table: pd.DataFrame) -> list[str]:
    """Lines of text for a sweep's table."""
    if table.empty or "p_family" not in table:
        return ["No lines."]
    main, zeros = table[~table["known_zero"].astype(bool)], table[table["known_zero"].astype(bool)]
    lines = list(_labels(main))
    lines += list(_zeros(zeros))
    missing = [name for name in CONTROLS if name not in main or main[name].isna().all()]
    if missing:
        lines.append(f"Controls not run: {', '.join(missing)}.")
    lines.append("A probe shows that a label can be read off, not that the model uses it. Test the direction causally.")
    return lines


def _labels(main: pd.DataFrame) -> Iterator[str]:
    """Per label, estimator and position: the best cell, and how many cells are shown."""
    for (label, estimator, position), part in main.groupby(["label", "estimator", "position"], sort=False):
        fine = part[shown(part)]
        best = part.loc[part["accuracy"].idxmax()]
        where = f"{best['site']}{'' if pd.isna(best['layer']) else int(best['layer'])}"
        controls = [(float(best[name]), name.replace("_", " ")) for name in CONTROLS if pd.notna(best.get(name))]
        against = "best control {:.3f} ({})".format(*max(controls)) if controls else "no controls"
        without = [name.replace("_", " ") for name in OF_TEXT if pd.isna(best.get(name))]
        if without and pd.notna(best.get("majority")):
            against += f", without {' and '.join(without)}"
        score = f"{best['metric']} {best['accuracy']:.3f} [{best['low']:.3f}, {best['high']:.3f}] at {where}, {against}"
        head = f"{label} at {position} ({estimator})"
        if len(fine):
            yield f"Shown: {head}: {len(fine)} of {len(part)} cells; best {score}, {_p(best)}."
        else:
            yield f"Not shown: {head}: none of {len(part)} cells; best {score}, {_p(best)}."
        if pd.notna(best.get("selectivity")):
            interval = f"[{best['selectivity_low']:.3f}, {best['selectivity_high']:.3f}]"
            yield f"  selectivity there {best['selectivity']:.3f} {interval} (control task {best['control_task']:.3f})."


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
