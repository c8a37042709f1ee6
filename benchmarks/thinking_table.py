"""A table of the paper and its curves from a finished `benchmarks.thinking_gpu` run, as Markdown and as a figure.

PYTHONPATH=src:. python -m benchmarks.thinking_table [--task variables] [--source FILE.json ...] [--image FILE.png]
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.table import RESULTS
from benchmarks.thinking_tasks import TASKS

NAMES = {
    "none": "no chain of thought",
    "cot": "chain of thought",
    "thinking": "Thinking States",
    "thinking-cut": "Thinking States with `cut`",
}
COLOURS = {"none": "tab:gray", "cot": "tab:orange", "thinking": "tab:cyan", "thinking-cut": "tab:blue"}
LENGTHS = (20, 30, 40, 50, 60, 70, 80, 90, 100)
Run = dict[str, Any]


def by_length(runs: list[Run], method: str, n: int) -> dict[int, list[float]]:
    """Percent right of every seed, by length."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if (run["method"], run["N"]) == (method, n):
            for length, share in run["curve"].items():
                found.setdefault(int(length), []).append(share["answered"])
    return dict(sorted(found.items()))


def table(body: dict[str, Any]) -> list[str]:
    """Mean over seeds, each seed in brackets, beside the published number."""
    lines = ["| | N | up to N | beyond, up to 100 | published | thoughts all right, beyond |", "|---|---:|---|---|---:|---|"]
    for row in body["table"]:
        runs = [r for r in body["runs"] if (r["method"], r["N"]) == (row["method"], row["N"])]
        inside, beyond, thoughts = ([_share(r, kind, far) for r in runs] for kind, far in _COLUMNS)
        told = _seeds(thoughts) if row["method"] != "none" else ""
        published = "" if row["published"] is None else f"{row['published']:.2f}"  # the paper has three N
        cells = [NAMES[row["method"]], str(row["N"]), _seeds(inside), _seeds(beyond), published, told]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_COLUMNS = (("answered", False), ("answered", True), ("thought", True))


def _share(run: Run, kind: str, beyond: bool) -> float:
    return mean(share[kind] for length, share in run["curve"].items() if (int(length) > run["N"]) == beyond)


def _seeds(shares: list[float]) -> str:
    return f"**{mean(shares):.1f}** ({', '.join(f'{share:.1f}' for share in shares)})"


def curves(body: dict[str, Any]) -> list[str]:
    """Mean over seeds by length."""
    lines = [f"| | N | {' | '.join(map(str, LENGTHS))} |", "|---|---:" + "|---:" * len(LENGTHS) + "|"]
    for row in body["table"]:
        found = by_length(body["runs"], row["method"], row["N"])
        cells = [f"{mean(found[length]):.0f}" if length in found else "" for length in LENGTHS]
        lines.append(f"| {NAMES[row['method']]} | {row['N']} | {' | '.join(cells)} |")
    return lines


def draw(body: dict[str, Any], path: Path) -> None:
    """One panel per N: the mean of the seeds as a line, every seed as a dot."""
    from matplotlib.figure import Figure

    longest = body["plan"]["longest"]
    figure = Figure(figsize=(3.4 * len(longest), 3.0), layout="constrained")
    for panel, n in zip(figure.subplots(1, len(longest), sharey=True), longest, strict=True):
        for method, colour in COLOURS.items():
            found = by_length(body["runs"], method, n)
            if not found:
                continue
            panel.plot(
                list(found), [mean(shares) for shares in found.values()], color=colour, label=NAMES[method].replace("`", "")
            )
            dots = [(length, share) for length, shares in found.items() for share in shares]
            panel.scatter(*zip(*dots, strict=True), color=colour, s=6, alpha=0.5)
        panel.axvline(n, color="black", linewidth=0.6, linestyle=":")
        panel.set(title=f"trained on up to {n}", xlabel="operations", ylim=(0, 103))
    figure.axes[0].set_ylabel("right answers, %")
    figure.axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def merged(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge several results; each cell (method, N) takes its row and runs from the last one that has it. Thinking States with
    `cut`, which is not in the paper, is a method of its own."""
    cells: dict[tuple[str, int], tuple[dict[str, Any], list[Run]]] = {}
    for body in bodies:
        for row in body["table"]:
            mine = [run for run in body["runs"] if (run["method"], run["N"]) == (row["method"], row["N"])]
            cut = row["method"] == "thinking" and body["plan"].get("cut", False)
            name = {"method": "thinking-cut" if cut else row["method"]}
            cells[name["method"], row["N"]] = ({**row, **name}, [{**run, **name} for run in mine])
    ordered = sorted(cells, key=lambda cell: (list(NAMES).index(cell[0]), cell[1]))
    runs = [run for cell in ordered for run in cells[cell][1]]
    return {"table": [cells[cell][0] for cell in ordered], "runs": runs, "plan": {"longest": sorted({n for _, n in cells})}}


def main() -> None:
    """Parse, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", default="parity", choices=TASKS)
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        help="later files replace cells; default: results/thinking-TASK-gpu.json",
    )
    parser.add_argument("--image", type=Path, help="default: docs/img/thinking-TASK.png")
    options = parser.parse_args()
    sources = options.source or [RESULTS / f"thinking-{options.task}-gpu.json"]
    body = merged([json.loads(source.read_text()) for source in sources])
    print("\n".join([*table(body), "", *curves(body)]))
    draw(body, options.image or Path(f"docs/img/thinking-{options.task}.png"))


if __name__ == "__main__":
    main()
