"""The cost of `fork` and `release` off prefixes of 1,000 to 32,000 tokens: it must not grow with the prefix.

    python -m benchmarks.forks

A stand-in for the runner skips the model's arithmetic (`benchmarks/hostwork.py`); forks themselves compute nothing. CPU seconds
(`time.process_time`), the best of several rounds, the lengths in turns.
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.hostwork import VOCAB, host_engine
from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch

LENGTHS = (1_000, 8_000, 32_000)
FORKS = 32
MAX_GROWTH = 1.5


def one_by_one(root: Branch) -> int:
    """A fork that is released before the next one."""
    for _ in range(FORKS):
        root.fork()[0].release()
    return FORKS


def together(root: Branch) -> int:
    """Many forks by one call, then released."""
    for fork in root.fork(FORKS):
        fork.release()
    return FORKS


def within(root: Branch) -> int:
    """Forks within the path, half a page further left each."""
    for number in range(FORKS):
        root.fork(at=root.length - 8 * number)[0].release()
    return FORKS


def of_forks(root: Branch) -> int:
    """A fork of a fork of a fork, each a token longer."""
    made = [root]
    for number in range(FORKS):
        (fork,) = made[-1].fork()
        made.append(fork.force([number % VOCAB]))
    for fork in made[1:]:
        fork.release()
    return FORKS


def edited(root: Branch) -> int:
    """Forks with an edit of the last position."""
    edit = Edit("blocks.0.hook_in", "zero", positions=root.length - 1)
    for fork in root.fork(FORKS, edits=[edit]):
        fork.release()
    return FORKS


WAYS: dict[str, tuple[Callable[[Branch], int], str | None]] = {
    "fork and release": (one_by_one, None),
    "32 forks by one call, and their releases": (together, None),
    "forks within the path": (within, None),
    "forks of forks, a token each": (of_forks, None),
    "forks with an edit": (edited, None),
    "forks of a path with S captured": (one_by_one, "S"),
}
"""name -> what to do with a branch, and the sites captured on it"""


def planted(engine: Engine, length: int, sites: str | None) -> Branch:
    path = [(i * i) % VOCAB for i in range(length)]
    return engine.prompt(path[:8], sites=sites).force(path[8:])


def microseconds(engine: Engine, name: str, rounds: int) -> dict[int, float]:
    """CPU time of a fork with its release, by length of the prefix."""
    work, sites = WAYS[name]
    roots = {length: planted(engine, length, sites) for length in LENGTHS}
    best = dict.fromkeys(LENGTHS, float("inf"))
    for _ in range(rounds + 1):  # the first fork makes what later ones share
        for length, root in roots.items():
            begin = time.process_time()
            count = work(root)
            best[length] = min(best[length], 1e6 * (time.process_time() - begin) / count)
    for root in roots.values():
        root.release()
    engine.prefix.clear()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("forks-cpu", "a fork with its release, microseconds of CPU time, without the model's arithmetic")
    engine = host_engine(max(LENGTHS) + 4096, 8 * max(LENGTHS))
    for name in WAYS:
        best = microseconds(engine, name, given.rounds)
        growth = best[LENGTHS[-1]] / best[LENGTHS[0]]
        shown = {f"us_at_{length}": us for length, us in best.items()}
        table.add(name, ratio=growth, aim=f"<= {MAX_GROWTH}", met=growth <= MAX_GROWTH, **shown)
    table.save()


if __name__ == "__main__":
    main()
