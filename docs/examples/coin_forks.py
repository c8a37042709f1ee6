"""Where is the face of a coin decided? `python docs/examples/coin_forks.py OUT [ROLLOUTS]`

coin-plain has learned whole texts, so that rollouts from before each clause of a text go on with actions of their own. Their
outcomes are compared with the exact distribution of the task. Writes OUT/tree.html and prints the rest.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import replaylens as rl
from replaylens.probes import RolloutTexts

TEXT = (
    "A coin's state is heads. Alice flips, then David does not flip, then Victor flips, then Maria flips. "
    "What's the state? A: tails."
)
OUTCOMES = ["heads", "tails", "no answer"]
TOGETHER = 32
"""rollouts that the engine serves side by side"""


def units_of(text: str) -> tuple[str, ...]:
    """Clauses: they end with a full stop, a comma, a colon or a question mark."""
    return tuple(unit for unit in re.split(r"(?<=[.,:?])(?= )", text) if unit)


def outcome_of(text: str) -> str:
    """The face that the answer ends with."""
    found = re.search(r"\b(heads|tails)\.?$", text.partition("A:")[2])
    return found[1] if found else "no answer"


def rollouts_from(engine: rl.Engine, path: tuple[str, ...], rollouts: int) -> RolloutTexts:
    """Rollouts from before each clause but the first."""
    forks, units, outcomes = [], [], []
    with ThreadPoolExecutor(TOGETHER) as pool:
        for fork in range(1, len(path)):
            root = engine.prompt(before := "".join(path[:fork]))
            branches = root.fork(rollouts)
            samplings = [rl.Sampling(temperature=1.0, seed=fork * rollouts + i) for i in range(rollouts)]
            list(pool.map(lambda branch, sampling: branch.generate(90, sampling=sampling), branches, samplings))
            for branch in branches:
                forks.append(fork - 1)
                units.append(units_of(branch.text.removeprefix(before)))
                outcomes.append(outcome_of(branch.text))
                branch.release()
            root.release()
    positions = [len("".join(path[:fork]).split()) for fork in range(1, len(path))]
    return RolloutTexts(positions, list(path[1:]), OUTCOMES, np.array(forks), units, outcomes)


def main() -> None:
    out, rollouts = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    engine, path = rl.Engine.load("coin-plain"), units_of(TEXT)
    drawn = rollouts_from(engine, path, rollouts)
    task, counts = rl.tasks.get("coin")(flips=(1, 8)), drawn.counts()
    curve = rl.probes.outcome_curve(counts)
    for i, text in enumerate(drawn.texts):
        exact = task.outcomes("".join(path[: i + 1]))["heads"]
        print(
            f"{text:26} heads {curve.value[i, 0]:.2f} [{curve.low[i, 0]:.2f}, {curve.high[i, 0]:.2f}], of the task {exact:.2f}"
        )
    print(rl.probes.importance(counts).frame[["text", "importance", "low", "high", "p_family"]].round(3).to_string(index=False))
    print(rl.probes.change_points(counts).frame[["text", "low", "high", "probability", "size"]].round(3).to_string(index=False))
    tree = drawn.tree("Where is the face decided? (coin-plain)", prompt=path[0])
    print(tree.save(out / "tree.html"))


if __name__ == "__main__":
    main()
