"""Boards of natural verifications: recorded on a GPU as JSON, drawn anywhere without the model.

    python -m benchmarks.natural_boards [--record benchmarks/results/natural-boards.json] [--to docs/img]

A record holds the trace of a few requests, their tokens, and the text of each token. Deterministic requests draft three tokens
by the fast path and verify them (a window of four rows); two ordinary requests run beside them.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.natural_subject import released, tallied
from benchmarks.table import RESULTS
from replaylens.engine.engine import Engine
from replaylens.engine.pictures.data import Phase, word
from replaylens.engine.pictures.pictures import Timeline, timeline
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.request import Request

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
        texts = [prompts[(seed + i) % len(prompts)] for i in range(GROUP)]
        own = [Sampling(temperature=temperature, seed=seed + i, ignore_eos=True) for i in range(GROUP)]
        seed += GROUP
        with tallied(engine):
            branches = engine.prompts(texts)
            some = [i >= ORDINARY for i in range(GROUP)]
            asked = [
                Request(TOKENS, each, window=WINDOW, deterministic=promised) for each, promised in zip(own, some, strict=True)
            ]
            engine.serve(branches, asked)
        known = {branch.id: list(branch.tokens) for branch in branches}
        for branch in branches[ORDINARY:]:
            verdict = next(e for e in engine.trace.events if e["event"] == "verdict" and e["branch"] == branch.id)
            looked += 1
            kind = KINDS[verdict["accepted"]]
            if kind not in found:
                found[kind] = _kept(engine, branch.id, known)
        released(branches)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, default=RESULTS / "natural-boards.json")
    parser.add_argument("--to", type=Path, default=Path("docs/img"))
    given = parser.parse_args()
    for kind, kept in json.loads(given.record.read_text()).items():
        file = given.to / f"natural-{kind}.svg"
        file.write_text(first_round(told(kept, kind)), encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
