"""The tables of `benchmarks.thinking_texts` as Markdown, from its result files.

PYTHONPATH=src:. python -m benchmarks.thinking_texts_table [--source FILE.json ...] [--latency FILE.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS
from benchmarks.thinking_table import NAMES

Row = dict[str, Any]


def _rows(source: Path) -> list[Row]:
    return list(json.loads(source.read_text())["rows"])


def _seeds(row: Row, where: str, kind: str) -> str:
    shares = row[f"{where}_{kind}_seeds"]
    each = f" ({', '.join(f'{share:.1f}' for share in shares)})" if len(shares) > 1 else ""
    return f"**{row[f'{where}_{kind}']:.1f}**{each}"


def accuracy(rows: list[Row]) -> list[str]:
    """One table per task: the methods and what was changed, by number of steps."""
    lines: list[str] = []
    for task in dict.fromkeys(row["runs"][0]["arm"]["task"] for row in rows):
        group = [row for row in rows if row["runs"][0]["arm"]["task"] == task]
        steps = [number for number, _ in group[0]["by_steps"]]
        lines += [f"| {task}, N = {group[0]['N']} | up to N | beyond | thoughts all right, beyond | {_spread(steps)} |"]
        lines += ["|---" * 4 + "|---:" * len(steps) + "|"]
        for row in group:
            thoughts = "" if row["runs"][0]["arm"]["method"] == "none" else _seeds(row, "beyond", "thought")
            curve = _spread([f"{share:.0f}" for _, share in row["by_steps"]])
            shares = [_seeds(row, where, "answered") for where in ("inside", "beyond")]
            lines += [f"| {_name(row)} | {' | '.join(shares)} | {thoughts} | {curve} |"]
        lines += ["", f"Steps: {min(row['steps_taken'] for row in group)} to {max(row['steps_taken'] for row in group)}.", ""]
    return lines


def _spread(cells: list[Any]) -> str:
    return " | ".join(map(str, cells))


def _name(row: Row) -> str:
    """The method, and what differs from its default."""
    method = row["runs"][0]["arm"]["method"]
    changed = row["what"].split("-", 2)[2:]
    return ", ".join([NAMES[method], *(part.replace("=", " ") for text in changed for part in text.split("-"))])


def latency(rows: list[Row]) -> list[str]:
    """One line per model and number of steps: time of a chain of thought, and of each way of guessing thoughts."""
    lines = ["| | prompt, thoughts | chain of thought | thinking: time, rounds, ratio |", "|---|---|---|---|"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["what"].split(":")[0], []).append(row)
    for what, group in groups.items():
        first = group[0]
        told = f"{first['prompt_tokens']:.0f} tokens, {first['thoughts']:.1f} of {first['chunks']:.1f} chunks"
        chain = f"{first['cot_ms']:.1f} ms for {first['written']:.0f} tokens"
        ways = "; ".join(f"{_guess(row)} {row['ms']:.1f} ms in {row['rounds']:.1f}: **{row['ratio']:.2f}**" for row in group)
        lines.append(f"| {what} | {told} | {chain} | {ways} |")
    return lines


def _guess(row: Row) -> str:
    return str(row["what"].split(": ")[1].split()[0])


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", type=Path, nargs="+", default=[RESULTS / "thinking-texts-gpu.json"])
    parser.add_argument("--latency", type=Path, default=RESULTS / "thinking-latency-gpu.json")
    options = parser.parse_args()
    for source in options.source:
        print("\n".join(accuracy(_rows(source))))
    print("\n".join(latency(_rows(options.latency))))


if __name__ == "__main__":
    main()
