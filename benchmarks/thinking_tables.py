"""The tables of Thinking States in notes/thinking_states.md: cases that train and test their runs, and the tables as Markdown.

    python -m benchmarks run thinking-parity-gpu --set seconds=375
    python -m benchmarks.thinking_tables FILE.json ... [--image FILE.png]     # later files replace cells

A case trains every run of its table in a process of its own and has one line per kind of run, over its seeds, with the runs
themselves. `--set models="FOLDER"` keeps the models that other measurements need.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import Line, case
from benchmarks.thinking_jobs import Limits, Result, trained
from benchmarks.thinking_plans import CHANGES, TEXT_TASKS, TINY_PLAN, TINY_SIZE, Plan, Run, Size, ablations, methods
from replaylens.engine.training.thinking import METHODS

NAMES = {
    "none": "no chain of thought",
    "cot": "chain of thought",
    "thinking": "Thinking States",
    "thinking-cut": "Thinking States with `cut`",
}
COLOURS = {"none": "tab:gray", "cot": "tab:orange", "thinking": "tab:cyan", "thinking-cut": "tab:blue"}
LENGTHS = (20, 30, 40, 50, 60, 70, 80, 90, 100)
Row = dict[str, Any]


# The cases


def lines_of(runs: list[Run], limits: Limits, models: str | None) -> Iterator[Line]:
    """One line per kind: percent right up to N and beyond, of every seed and on average."""
    found = trained(runs, limits, None if models is None else Path(models))
    published = {run.kind: run.published for run in runs}
    for kind in published:
        if group := [result for result in found if result["kind"] == kind]:
            first = group[0]
            numbers: Row = {"method": first["method"], "N": first["N"], "seeds": len(group), "published": published[kind]}
            numbers |= {"steps_taken": min(result["steps"] for result in group)}
            for where, kinds in (("inside", False), ("beyond", True)):
                for what in ("answered", "thought"):
                    shares = [share(result, what, kinds) for result in group]
                    numbers |= {f"{where}_{what}": mean(shares), f"{where}_{what}_seeds": shares}
            yield Line(kind, numbers={**numbers, "runs": group})
    if missing := len(runs) - len(found):
        raise RuntimeError(f"{missing} of {len(runs)} runs failed or did not end in time; the lines above are of the others")


def share(result: Result, kind: str, beyond: bool) -> float:
    """Mean percent over the tested numbers of steps up to N, or beyond."""
    return mean(found[kind] for steps, found in result["curve"].items() if (int(steps) > result["N"]) == beyond)


def planned(plan: Plan, tiny: bool, seconds: float, at_once: int | None, models: str | None) -> Iterator[Line]:
    if tiny:
        small = dict(methods=("none", "thinking"), longest=(2,), beyond=(4,), task=plan.task, cut=plan.cut, steps=4)
        plan = replace(TINY_PLAN, **small)
    limits = Limits(seconds, "cpu" if tiny else "cuda", at_once=1 if tiny else at_once)
    yield from lines_of(plan.runs(), limits, models)


@case("thinking-parity-gpu", needs="gpu", clock="wall", quick={"tiny": True})
def parity(
    tiny: bool = False, seconds: float = 455.0, methods: tuple[Any, ...] = METHODS, seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 8000, at_once: int | None = None, cut: bool = False, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """The paper's parity table from scratch: trained on texts of up to N = 10, 20, 40 operations, tested on lengths up to 100.
    Unless `at_once` is given, all runs train together and agree on a number of steps that the slowest can reach in time."""
    yield from planned(Plan(methods=methods, seeds=seeds, steps=steps, cut=cut), tiny, seconds, at_once, models)


@case("thinking-variables-gpu", needs="gpu", clock="wall", quick={"tiny": True})
def variables(
    tiny: bool = False, seconds: float = 520.0, methods: tuple[Any, ...] = METHODS, seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 6000, batch: int = 4, at_once: int | None = 14, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """The table of variables from scratch, Thinking States with `cut`."""
    plan = Plan("variables", methods=methods, seeds=seeds, steps=steps, batch=batch, cut=True)
    yield from planned(plan, tiny, seconds, at_once, models)


@case("thinking-backbone", needs="gpu", clock="wall")
def backbone(
    backbone: str = "smollm2", seconds: float = 1500.0, methods: tuple[Any, ...] = METHODS,
    longest: tuple[int, ...] = (10, 20, 40), seeds: tuple[int, ...] = (0,), steps: int = 514, at_once: int = 2,
    cut: bool = True,
) -> Iterator[Line]:  # fmt: skip
    """The parity table around SmolLM2-135M: rows of 832 tokens, the length of the longest test with its chain of thought, in
    bfloat16 with float32 weights, Thinking States with `cut`."""
    size = dict(width=832, texts=5120, examples=50)
    plan = Plan(methods=methods, longest=longest, seeds=seeds, steps=steps, cut=cut, backbone=backbone, **size)
    yield from lines_of(plan.runs(), Limits(seconds, "cuda", at_once=at_once), None)


@case("thinking-texts-gpu", needs="gpu", clock="wall", quick={"tiny": True})
def texts(
    tiny: bool = False, seconds: float = 1800.0, tasks: tuple[str, ...] = tuple(TEXT_TASKS), seeds: tuple[int, ...] = (0, 1),
    changes: tuple[str, ...] = CHANGES, at_once: int | None = 30, models: str | None = None,
) -> Iterator[Line]:  # fmt: skip
    """Two-hop questions and word problems: three methods with two seeds, and Thinking States with one thing changed. All runs
    of a task take the same number of steps, unless `seconds` ends them earlier."""
    size = TINY_SIZE if tiny else Size()
    arms = methods(tasks, seeds) + ablations(tasks, changes, size.layers, seeds[:1])
    runs = [size.run(arm) for arm in dict.fromkeys(arms)]
    if tiny:
        runs, at_once = runs[:3], 1
    yield from lines_of(runs, Limits(seconds, "cpu" if tiny else "cuda", at_once=at_once), models)


# Markdown


def rows_of(file: Path) -> list[Row]:
    """The lines of a result file, also of one that was written before the harness. Thinking States with `cut`, which is not in
    the paper, is a method of its own."""
    body = json.loads(file.read_text())
    if "table" in body:
        cut = body["plan"].get("cut", False)
        rows = [
            {**row, "runs": [run for run in body["runs"] if (run["method"], run["N"]) == (row["method"], row["N"])]}
            for row in body["table"]
        ]
        return [{**row, "method": "thinking-cut"} if cut and row["method"] == "thinking" else row for row in rows]
    is_cut = lambda row: "task" not in arm_of(row) and arm_of(row).get("cut", False)  # noqa: E731 (texts have it by task)
    return [{**row, "method": "thinking-cut"} if is_cut(row) else row for row in body["rows"]]


def merged(files: list[Path]) -> list[Row]:
    """Each cell (method, N) from the last file that has it, in the order of the docs."""
    cells = {(row["method"], row["N"]): row for file in files for row in rows_of(file)}
    return [cells[cell] for cell in sorted(cells, key=lambda cell: (list(NAMES).index(cell[0]), cell[1]))]


def seeds_of(shares: list[float]) -> str:
    return f"**{mean(shares):.1f}** ({', '.join(f'{each:.1f}' for each in shares)})" if len(shares) > 1 else f"{shares[0]:.1f}"


def by_length(row: Row) -> dict[int, list[float]]:
    """Percent right of every seed, by length."""
    found: dict[int, list[float]] = {}
    for run in row["runs"]:
        for length, each in run["curve"].items():
            found.setdefault(int(length), []).append(each["answered"])
    return dict(sorted(found.items()))


def paper_table(rows: list[Row]) -> list[str]:
    """Mean over seeds, each seed in brackets, beside the published number; then the mean by length."""
    lines = ["| | N | up to N | beyond, up to 100 | published | thoughts all right, beyond |", "|---|---:|---|---|---:|---|"]
    for row in rows:
        columns = (("answered", False), ("answered", True), ("thought", True))
        cells = [seeds_of([share(run, kind, beyond) for run in row["runs"]]) for kind, beyond in columns]
        published = "" if row["published"] is None else f"{row['published']:.2f}"  # the paper has three N
        thoughts = "" if row["method"] == "none" else cells[2]
        lines.append(f"| {NAMES[row['method']]} | {row['N']} | {cells[0]} | {cells[1]} | {published} | {thoughts} |")
    lines += ["", f"| | N | {' | '.join(map(str, LENGTHS))} |", "|---|---:" + "|---:" * len(LENGTHS) + "|"]
    for row in rows:
        found = by_length(row)
        shown = [f"{mean(found[length]):.0f}" if length in found else "" for length in LENGTHS]
        lines.append(f"| {NAMES[row['method']]} | {row['N']} | {' | '.join(shown)} |")
    return lines


def arm_of(row: Row) -> Row:
    """What the first run says about itself; files that were written before the harness hold it apart."""
    first: Row = row["runs"][0]
    found: Row = first.get("arm", first)
    return found


def text_tables(rows: list[Row]) -> list[str]:
    """One table per task: the methods and what was changed, by number of steps."""
    lines: list[str] = []
    for task in dict.fromkeys(arm_of(row)["task"] for row in rows):
        group = [row for row in rows if arm_of(row)["task"] == task]
        steps = list(by_length({"runs": group[0]["runs"]}))
        head = ["up to N", "beyond", "thoughts all right, beyond", *map(str, steps)]
        lines += [f"| {task}, N = {group[0]['N']} | {' | '.join(head)} |", "|---" * 4 + "|---:" * len(steps) + "|"]
        for row in group:
            method, changed = arm_of(row)["method"], row["what"].split("-", 2)[2:]
            name = ", ".join([NAMES[method], *(part.replace("=", " ") for text in changed for part in text.split("-"))])
            cells = [seeds_of(row[f"{where}_seeds"]) for where in ("inside_answered", "beyond_answered", "beyond_thought")]
            cells[2] = "" if method == "none" else cells[2]
            lines.append(f"| {' | '.join([name, *cells, *(f'{mean(each):.0f}' for each in by_length(row).values())])} |")
        lines += ["", f"Steps: {min(row['steps_taken'] for row in group)} to {max(row['steps_taken'] for row in group)}.", ""]
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """One panel per N: the mean of the seeds as a line, every seed as a dot."""
    from matplotlib.figure import Figure

    longest = sorted({row["N"] for row in rows})
    figure = Figure(figsize=(3.4 * len(longest), 3.0), layout="constrained")
    for panel, n in zip(figure.subplots(1, len(longest), sharey=True, squeeze=False)[0], longest, strict=True):
        for row in [row for row in rows if row["N"] == n]:
            found, colour = by_length(row), COLOURS[row["method"]]
            label = NAMES[row["method"]].replace("`", "")
            panel.plot(list(found), [mean(shares) for shares in found.values()], color=colour, label=label)
            dots = [(length, each) for length, shares in found.items() for each in shares]
            panel.scatter(*zip(*dots, strict=True), color=colour, s=6, alpha=0.5)
        panel.axvline(n, color="black", linewidth=0.6, linestyle=":")
        panel.set(title=f"trained on up to {n}", xlabel="operations", ylim=(0, 103))
    figure.axes[0].set_ylabel("right answers, %")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--image", type=Path, help="also draw accuracy by length")
    given = parser.parse_args()
    found = [row for file in given.files for row in rows_of(file)]
    if "task" in arm_of(found[0]):
        print("\n".join(text_tables(found)))
        return
    rows = merged(given.files)
    print("\n".join(paper_table(rows)))
    if given.image is not None:
        draw(rows, given.image)


if __name__ == "__main__":
    main()
