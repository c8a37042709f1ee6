"""What docs/notes/natural.md shows: tables from the numbers of `natural-gpu`, and boards of natural verifications.

    python -m bench.natural_pages         # rewrites the tables of docs/notes/natural.md and docs/img/natural-*.svg

A table stands between the marks `<!-- table: NAME -->` and `<!-- end -->`. Boards are recorded on a GPU as JSON and drawn
anywhere without the model: a record holds the trace of a few requests, their tokens, and the text of each token. Deterministic
requests draft three tokens by the fast path and verify them (a window of four rows); two ordinary requests run beside them.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Line, case
from bench.natural import DECLARED, DRAFTING, stories, tallied
from bench.subjects import released, seeded
from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.proof.trace import Trace
from replaylens.engine.serving.request import Request
from replaylens.views.data import Phase
from replaylens.views.pictures import Timeline, timeline

DOCS = RESULTS.parent.parent / "docs"
STORY = "SmolLM2-135M"
PAPER_RECOMPUTED = {16: 3.9, 32: 8.2, 64: 16.6}
"""LLM-42, 8B: percent of tokens computed again, by W"""
PAPER_LOAD = {10: (0.71, 0.97), 50: (0.56, 0.94), 100: (0.46, 0.90)}
"""LLM-42, 8B: throughput of its own without determinism, by percent of deterministic requests; worst and best of four loads"""

Rows = dict[str, dict[str, Any]]


def read(file: Path) -> Rows:
    """The lines of a result file by name."""
    return {row["what"]: row for row in json.loads(file.read_text())["rows"]}


def matching(rows: Rows, pattern: str) -> Iterator[tuple[re.Match[str], dict[str, Any]]]:
    """The lines whose whole name matches."""
    return ((match, row) for what, row in rows.items() if (match := re.fullmatch(pattern, what)))


def divergence(rows: Rows) -> list[list[str]]:
    found = [["", "by 100 tokens", "by 256", "by 512", "median", "never"]]
    for match, row in matching(rows, rf"{STORY}, first divergence, T=(\S+): (.*)"):
        shares = [f"{100 * row[f'by_{mark}']:.0f} %" if f"by_{mark}" in row else "" for mark in (100, 256, 512)]
        middle = "after 512" if row["median"] is None else str(row["median"])
        found.append([f"T = {match[1]}, {match[2]}", *shares, middle, f"{100 * row['never']:.0f} %"])
    return [*found, ["LLM-42, 8B, greedy, under different loads", "", "", "", "187", "20 %"]]


def flips(rows: Rows) -> list[list[str]]:
    cells = {
        (f"{match[1]}, {match[3]}", match[2]): f"{row['per_1000']:.1f} ({row['flips']} of {row['drafts']:,})"
        for match, row in matching(rows, r"(\S+), flipped tokens, T=(\S+), (batch .*)")
    }
    temperatures = sorted({t for _, t in cells}, key=float)
    found = [["flipped tokens per 1,000", *(f"T = {t}" for t in temperatures)]]
    found += [[name, *(cells.get((name, t), "") for t in temperatures)] for name in dict.fromkeys(name for name, _ in cells)]
    return [*found, ["LLM-42, 8B and 70B", "4 to 5", *[""] * (len(temperatures) - 1)]]


def recomputed(rows: Rows) -> list[list[str]]:
    flipped = matching(rows, rf"{STORY}, flipped tokens, T=(\S+), batch (\d+)")  # they have a window, too
    cells = {(match[1], int(match[2]), DRAFTING): row["recomputed_percent"] for match, row in flipped}
    for match, row in matching(rows, rf"{STORY}, recomputed tokens, T=(\S+), G=(\d+), W=(\d+)"):
        cells[match[1], int(match[2]), int(match[3])] = row["recomputed_percent"]
    windows = sorted({w for *_, w in cells} | set(PAPER_RECOMPUTED))
    found = [["recomputed, % of committed tokens", *(f"W = {w}" for w in windows)]]
    for temperature, group in dict.fromkeys((t, g) for t, g, _ in cells):
        mine = [cells.get((temperature, group, w)) for w in windows]
        found.append([f"T = {temperature}, G = {group}", *("" if x is None else f"{x:.1f}" for x in mine)])
    return [*found, ["LLM-42, 8B", *(str(PAPER_RECOMPUTED.get(w, "")) for w in windows)]]


def load(rows: Rows) -> list[list[str]]:
    found = [["deterministic requests", "tokens/s", "of 0 %", "first token, ms", "per token, ms"]]
    for match, row in matching(rows, rf"{STORY}, load, (.*), (\S+) % deterministic"):
        times = [_by_kind(row, "first_ms", 0), _by_kind(row, "token_ms", 2)]
        found.append([f"{match[2]} %, {match[1]}", f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}", *times])
    return [*found, *([f"{k} %, LLM-42, 8B", "", f"{a:.2f} to {b:.2f}", "", ""] for k, (a, b) in PAPER_LOAD.items())]


def _by_kind(row: dict[str, Any], name: str, digits: int) -> str:
    some = [row.get(f"{kind}_{name}") for kind in ("deterministic", "ordinary")]
    return " / ".join("-" if x is None else f"{x:.{digits}f}" for x in some)


def equal(rows: Rows) -> list[list[str]]:
    found = [[what, str(r["differing"]), f"{r['compared']:,}"] for what, r in rows.items() if "differing" in what]
    return [["", "differing", "compared"], *found]


TABLES = {"divergence": divergence, "flips": flips, "recomputed": recomputed, "load": load, "equal": equal}


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *rest])


def rewritten(page: str, rows: Rows) -> str:
    """The page with its tables made from these numbers."""
    for name, make in TABLES.items():
        mark = f"<!-- table: {name} -->"
        made = f"{mark}\n{markdown(make(rows))}\n<!-- end -->"
        page = re.sub(rf"{mark}.*?<!-- end -->", lambda _, made=made: made, page, flags=re.S)
    return page


# Boards

ACCEPT = "accept"
KINDS = {0: "rollback-first", 1: "rollback-second", 2: "rollback-third", 3: ACCEPT}
"""by the number of accepted drafts, of three"""
GROUP, ORDINARY, WINDOW, TOKENS = 8, 2, 4, 5
"""requests beside each other, ordinary ones among them; T0 and one full window"""


def record(engine: Engine, prompts: Sequence[str], temperature: float, seconds: float) -> tuple[dict[str, Any], int]:
    """(a record for each kind of first verification that occurred, the number of verifications looked at).

    Runs groups of requests until all kinds occurred or the time is up. engine: records a trace
    """
    found: dict[str, Any] = {}
    end, seed, looked = time.perf_counter() + seconds, 0, 0
    while len(found) < len(KINDS) and time.perf_counter() < end:
        engine.trace.events.clear()
        own = seeded(seed + GROUP, temperature)[seed:]
        with tallied(engine):  # so that drafts come from the fast path alone
            branches = engine.prompts([prompts[(seed + i) % len(prompts)] for i in range(GROUP)])
            asked = [Request(TOKENS, each, window=WINDOW, deterministic=i >= ORDINARY) for i, each in enumerate(own)]
            engine.serve(branches, asked)
        known = {branch.id: list(branch.tokens) for branch in branches}
        for branch in branches[ORDINARY:]:
            verdict = next(e for e in engine.trace.events if e["event"] == "verdict" and e["branch"] == branch.id)
            looked += 1
            kind = KINDS[verdict["accepted"]]
            if kind not in found:
                found[kind] = _kept(engine, branch.id, known)
        released(engine, branches)
        seed += GROUP
    return found, looked


def _kept(engine: Engine, branch: int, known: dict[int, list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine.trace.save(file := Path(folder) / "trace")
        trace = file.read_text()
    events = engine.trace.events
    drafted = [t for e in events if e["event"] == "draft" for chain in e["chains"] for t in chain]
    void = [t for e in events if e["event"] == "verdict" for t in [*e["pending"], *e.get("overruled", ())]]
    tokens = sorted({*(t for path in known.values() for t in path), *drafted, *void})
    return {"branch": branch, "known": known, "words": {t: word(engine.text, t) for t in tokens}, "trace": trace}


def told(kept: dict[str, Any], title: str) -> Timeline:
    """The timeline of a record as it was read from JSON."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "trace").write_text(kept["trace"])
        trace = Trace.load(file)
    words = {int(token): text for token, text in kept["words"].items()}
    known = {int(branch): tokens for branch, tokens in kept["known"].items()}
    return timeline(trace, kept["branch"], words.__getitem__, known, title)


def first_round(told: Timeline) -> str:
    """The board of the first verification: prefill, decode, verify, and accept or rollback."""
    frames = list(told.frames)
    verify = next(i for i, frame in enumerate(frames) if frame.phase is Phase.VERIFY)
    return told.board([frames[0], *frames[verify - 1 : verify + 2]])


@case("natural-gpu.boards", **DECLARED)
def boards(tiny: bool = False) -> Iterator[Line]:
    """Records of first verifications, for pictures, in results/natural-boards.json; with `tiny` they are not kept."""
    subject = stories(tiny)
    made = Engine(subject.engine.model, subject.engine.text, cache_tokens=4096, record=True)
    found, looked = record(made, subject.prompts, 1.0, 1.0 if tiny else 10.0)
    if not tiny:
        (RESULTS / "natural-boards.json").write_text(json.dumps(found))
    numbers = {"kinds": ",".join(sorted(found)), "looked_at": looked}
    yield Line(f"{subject.name}, first verifications on record", numbers=numbers)


def main() -> None:
    page = DOCS / "notes" / "natural.md"
    page.write_text(rewritten(page.read_text(), read(RESULTS / "natural-gpu.json")))
    for kind, kept in json.loads((RESULTS / "natural-boards.json").read_text()).items():
        (DOCS / "img" / f"natural-{kind}.svg").write_text(first_round(told(kept, kind)), encoding="utf-8")


if __name__ == "__main__":
    main()
