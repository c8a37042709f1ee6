"""The tables of docs/natural.md, from the numbers of `benchmarks/natural_gpu.py`.

    python -m benchmarks.natural_table [--results benchmarks/results/natural-gpu.json] [--page docs/natural.md]

With `--page`, the tables between the marks `<!-- table: NAME -->` and `<!-- end -->` are written anew.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS

STORY = "SmolLM2-135M"
DRAFTING = 8
"""window of the flips"""
PAPER_RECOMPUTED = {16: 3.9, 32: 8.2, 64: 16.6}
"""LLM-42, 8B: percent of tokens computed again, by W"""
PAPER_LOAD = {10: (0.71, 0.97), 50: (0.56, 0.94), 100: (0.46, 0.90)}
"""LLM-42, 8B: throughput of its own without determinism, by percent of deterministic requests; worst and best of four loads"""

Rows = dict[str, dict[str, Any]]


def read(file: Path) -> Rows:
    """The lines of a result file by name."""
    return {row["what"]: row for row in json.loads(file.read_text())["rows"]}


def divergence(rows: Rows) -> list[list[str]]:
    found = [["", "by 100 tokens", "by 256", "by 512", "median", "never"]]
    for what, row in rows.items():
        if match := re.fullmatch(rf"{STORY}, first divergence, T=(\S+): (.*)", what):
            shares = [f"{100 * row[f'by_{mark}']:.0f} %" if f"by_{mark}" in row else "" for mark in (100, 256, 512)]
            middle = "after 512" if row["median"] is None else str(row["median"])
            found.append([f"T = {match[1]}, {match[2]}", *shares, middle, f"{100 * row['never']:.0f} %"])
    return [*found, ["LLM-42, 8B, greedy, under different loads", "", "", "", "187", "20 %"]]


def flips(rows: Rows) -> list[list[str]]:
    cells = {
        (f"{match[1]}, {match[3]}", match[2]): row
        for what, row in rows.items()
        if (match := re.fullmatch(r"(\S+), flipped tokens, T=(\S+), (batch .*)", what))
    }
    temperatures = sorted({t for _, t in cells}, key=float)
    found = [["flipped tokens per 1,000", *(f"T = {t}" for t in temperatures)]]
    for name in dict.fromkeys(name for name, _ in cells):
        found.append([name, *(_flips(cells.get((name, t))) for t in temperatures)])
    return [*found, ["LLM-42, 8B and 70B", "4 to 5", *[""] * (len(temperatures) - 1)]]


def _flips(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['per_1000']:.1f} ({row['flips']} of {row['drafts']:,})"


def recomputed(rows: Rows) -> list[list[str]]:
    cells: dict[tuple[str, int, int], float] = {}
    for what, row in rows.items():  # cells of the flips have a window, too
        if match := re.fullmatch(rf"{STORY}, flipped tokens, T=(\S+), batch (\d+)", what):
            cells[match[1], int(match[2]), DRAFTING] = row["recomputed_percent"]
        if match := re.fullmatch(rf"{STORY}, recomputed tokens, T=(\S+), G=(\d+), W=(\d+)", what):
            cells[match[1], int(match[2]), int(match[3])] = row["recomputed_percent"]
    windows = sorted({w for *_, w in cells} | set(PAPER_RECOMPUTED))
    found = [["recomputed, % of committed tokens", *(f"W = {w}" for w in windows)]]
    for temperature, group in dict.fromkeys((t, g) for t, g, _ in cells):
        mine = [cells.get((temperature, group, w)) for w in windows]
        found.append([f"T = {temperature}, G = {group}", *("" if x is None else f"{x:.1f}" for x in mine)])
    return [*found, ["LLM-42, 8B", *(f"{PAPER_RECOMPUTED[w]}" if w in PAPER_RECOMPUTED else "" for w in windows)]]


def load(rows: Rows) -> list[list[str]]:
    head = ["deterministic requests", "tokens/s", "of 0 %", "first token, ms", "per token, ms"]
    found = [head]
    for what, row in rows.items():
        if match := re.fullmatch(rf"{STORY}, load, (.*), (\S+) % deterministic", what):
            found.append(
                [
                    f"{match[2]} %, {match[1]}",
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['ratio']:.2f}",
                    _by_kind(row, "first_ms", 0),
                    _by_kind(row, "token_ms", 2),
                ]
            )
    if found == [head]:
        found.append(["ours: not measured", "", "", "", ""])
    return [*found, *([f"{k} %, LLM-42, 8B", "", f"{a:.2f} to {b:.2f}", "", ""] for k, (a, b) in PAPER_LOAD.items())]


def _by_kind(row: dict[str, Any], name: str, digits: int) -> str:
    some = [(kind, row.get(f"{kind}_{name}")) for kind in ("deterministic", "ordinary")]
    return " / ".join("-" if x is None else f"{x:.{digits}f}" for _, x in some)


def equal(rows: Rows) -> list[list[str]]:
    found = [["", "differing", "compared"]]
    return found + [[what, str(r["differing"]), f"{r['compared']:,}"] for what, r in rows.items() if "differing" in what]


TABLES = {"divergence": divergence, "flips": flips, "recomputed": recomputed, "load": load, "equal": equal}


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *rest])


def rewritten(page: str, rows: Rows) -> str:
    """The page with its tables made from these numbers."""
    for name, make in TABLES.items():
        mark = f"<!-- table: {name} -->"
        page = re.sub(
            rf"{mark}.*?<!-- end -->", lambda _, m=mark, f=make: f"{m}\n{markdown(f(rows))}\n<!-- end -->", page, flags=re.S
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=RESULTS / "natural-gpu.json")
    parser.add_argument("--page", type=Path, default=None)
    given = parser.parse_args()
    rows = read(given.results)
    if given.page is None:
        print(*(f"{name}\n{markdown(make(rows))}\n" for name, make in TABLES.items()), sep="\n")
    else:
        given.page.write_text(rewritten(given.page.read_text(), rows))


if __name__ == "__main__":
    main()
