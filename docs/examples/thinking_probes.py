"""What is in S, T and C of a Thinking-States model, does it matter, and what do rolled-back suffixes know?

python docs/examples/thinking_probes.py OUT [EXAMPLES]

Four reports, each with its controls, in OUT: content, reading, causes, suffixes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import replaylens as rl
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.probes import ProbeRows
from replaylens.probes.report import Report
from replaylens.tasks import Example
from replaylens.thinking.core import ThinkingBranch, ThinkingEngine

FLIPS = (2, 8)
LABELS = ["face", "flips", "name", "start", "last_action"]
OTHER = {" heads": " tails", " tails": " heads"}


def load() -> ThinkingEngine:
    engine = rl.Engine.load("coin-thinking")
    assert isinstance(engine, ThinkingEngine)
    return engine


# ---- what is in S, T and C --------------------------------------------------------------------------------------------


def content(dump: Dump, out: Path, eos: int) -> list[str]:
    """Probes of the face, and of what else there might be, at the chunks that thought and at those that received a state."""
    rows = ProbeRows.of(dump).accepted()
    state = rows.matrix("thinking.state")
    thought = rows.matrix("thinking.tokens")[:, 0]
    places = {
        "received": (state.any(1), ["thinking.state"]),
        "thought": ((thought >= 0) & (thought != eos), ["thinking.hook_out", "compress.hook_out"]),
    }
    lines = []
    for name, (mask, sites) in places.items():
        report = rl.probes.sweep(rows.where(mask), LABELS, sites=sites, positions=["all"])
        report.save(out / name, figures=False)
        lines += _table(report, name)
    distinct = len(np.unique(state[state.any(1)], axis=0))
    words = sorted({tuple(t) for t in rows.matrix("thinking.tokens").astype(int).tolist() if t[0] not in (-1, eos)})
    lines.append(f"{int(state.any(1).sum())} rows received a state; {distinct} different vectors, from {len(words)} thoughts")
    return lines + _by_step(rows.where(state.any(1)))


def _table(report: Report, name: str) -> list[str]:
    """The labels' own lines; those of known-zero labels are in the report."""
    table, columns = report.table, ["site", "label", "accuracy", "low", "high", "majority", "selectivity"]
    shown = table[table["label"].isin(LABELS)][[c for c in columns if c in table]]
    return [f"--- {name}", shown.round(3).to_string(index=False)]


def _by_step(rows: ProbeRows) -> list[str]:
    """From which step on S tells the face: a line is drawn through S on even examples, and read on odd ones, by step."""
    x, y, steps = rows.matrix("thinking.state"), rows.target("face").values, rows.frame["actions"].to_numpy()
    fit = rows.frame["example"].to_numpy() % 2 == 0
    direction = x[fit & (y == "heads")].mean(0) - x[fit & (y == "tails")].mean(0)
    middle = (x[fit & (y == "heads")].mean(0) + x[fit & (y == "tails")].mean(0)) @ direction / 2
    right = ((x @ direction > middle) == (y == "heads")) & ~fit
    shares = {int(k): float(right[~fit & (steps == k)].mean()) for k in np.unique(steps[~fit])}
    return [f"face read off S by a mean-difference line, by steps so far: {shares}"]


# ---- does it matter ---------------------------------------------------------------------------------------------------


def causes(engine: ThinkingEngine, examples: Sequence[Example]) -> pd.DataFrame:
    """Exchange one state for the other face's, for the same face's, or for noise of the same size; then think on."""
    lines: list[dict[str, Any]] = []
    for example in examples:
        root = engine.prompt(example.prompt)
        received = [i for i in sorted(root.thoughts.states) if i < len(root.thoughts.chunks)]
        for which, chunk in (("first", received[0]), ("last", received[-1])):
            for kind, state in _states(engine, root, chunk).items():
                lines.append({"state": which, "put in": kind, **_outcome(engine, root, chunk, state)})
        root.release()
    return pd.DataFrame(lines).groupby(["state", "put in"]).mean().round(3)


def _states(engine: ThinkingEngine, root: ThinkingBranch, chunk: int) -> dict[str, torch.Tensor]:
    blocks, token = engine.prefiller.blocks, engine.text.tokenizer
    said = root.thoughts.chunks[chunk - 1]
    swapped = (*(token.id(OTHER[token.token(t)]) for t in said.tokens[:-1]), said.tokens[-1])
    noise = torch.randn(said.state.shape, generator=torch.Generator().manual_seed(root.id))
    other = blocks.state(blocks.compressed(swapped))
    step = (other - said.state).norm()
    return {
        "the other face's": other,
        "the same face's": blocks.state(blocks.compressed(said.tokens)),
        "itself + noise as large as the difference": said.state + noise / noise.norm() * step,
        "nothing": torch.zeros_like(said.state),
    }


def _outcome(engine: ThinkingEngine, root: ThinkingBranch, chunk: int, state: torch.Tensor) -> dict[str, float]:
    """Shares of later thoughts that are turned and that are changed at all, and whether the answer is."""
    c = engine.thinking.chunk
    (fork,) = root.fork(edits=[rl.Edit.interchange("thinking.state", state, slice(chunk * c, (chunk + 1) * c))])
    (plain,) = root.fork()
    rl.Engine.generate(engine, [fork, plain], 2)
    before, after = ([_words(engine, t.tokens) for t in b.thoughts.chunks[chunk:]] for b in (root, fork))
    thinking = [(b, a) for b, a in zip(before, after, strict=True) if b]
    answers = [engine.text.decode(b.generated).strip(" .") for b in (plain, fork)]
    for branch in (fork, plain):
        branch.release()
    return {
        "later thoughts turned": float(np.mean([a == [OTHER[w] for w in b] for b, a in thinking])) if thinking else np.nan,
        "later thoughts changed": float(np.mean([a != b for b, a in thinking])) if thinking else np.nan,
        "answer turned": float({answers[0], answers[1]} == {"heads", "tails"}),
    }


def _words(engine: ThinkingEngine, tokens: Sequence[int]) -> list[str]:
    return [engine.text.token(t) for t in tokens[:-1]]


# ---- what rolled-back suffixes know -----------------------------------------------------------------------------------


def suffixes(engine: ThinkingEngine, examples: Sequence[Example]) -> pd.DataFrame:
    """What T says in a suffix whose states were guessed to be empty, by how many thoughts it was denied."""
    lines = []
    for example in examples:
        branch = engine.prompt(example.prompt, sites="S", keep_rejected=True)
        for suffix in branch.rejected:
            start = suffix.activations.base // engine.thinking.chunk
            denied = 1
            for true, found in zip(branch.thoughts.chunks[start:], suffix.thoughts.chunks[start:], strict=True):
                if not true.empty:
                    right, silent = found.tokens == true.tokens, found.empty
                    lines.append({"thoughts denied": denied, "T is right": right, "T is silent": silent, "n": 1})
                    denied += 1
            suffix.release()
        branch.release()
    frame = pd.DataFrame(lines).groupby("thoughts denied")
    return frame[["T is right", "T is silent"]].mean().round(3).assign(n=frame["n"].sum())


def main(out: Path, examples: int = 200) -> None:
    engine, task = load(), rl.tasks.get("coin")(flips=FLIPS)
    fresh = task.examples(range(examples, examples + max(20, examples // 4)))
    plan = make_plan(engine, task, examples, sites="STCZ")
    dump = write_dump(engine, plan, out / "dump", resume=True)
    assert dump is not None
    print("\n".join(content(dump, out, engine.thinking.eos_token)), flush=True)

    # probes of the face, fitted on accepted rows alone, on rows of rolled-back suffixes of other roots
    for split in ("root", "accepted-rejected"):
        report = rl.probes.sweep(dump, "face", sites="S", positions=["step", "step+2"], split=split)
        report.save(out / f"reading-{split}", figures=False)
        shown = report.table[report.table["label"] == "face"][["layer", "position", "accuracy", "low", "high", "majority"]]
        print(f"--- face, {split}\n{shown.round(3).to_string(index=False)}", flush=True)

    for name, table in (("causes", causes(engine, fresh)), ("suffixes", suffixes(engine, fresh))):
        print(f"--- {name}\n{table.to_string()}", flush=True)
        (out / f"{name}.json").write_text(json.dumps(table.reset_index().to_dict("records"), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
