"""The order of branches in a dump follows from their tokens, not from the order in which the engine found them."""

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from replaylens import Engine
from replaylens.engine.dump.maker import assemble, make_plan
from replaylens.engine.replay.replayer import Result
from replaylens.engine.replay.run import Run
from replaylens.tasks.task import AnyTask
from tests.engine.dump.conftest import NEW

OPTIONS: dict[str, Any] = dict(sites="SZ", drafter="tree", window=4, max_new=NEW, rejected=True)


@pytest.fixture(scope="module")
def run(engine: Engine, coin: AnyTask) -> Run:
    """A run with the tree drafter: several siblings are rejected at one position."""
    return engine.replay(coin.examples(6), **OPTIONS)


def crowded(run: Run) -> Result:
    """A result with at least three rejected branches, two of which fork at the same position."""
    for result in run:
        forks = Counter(path.fork_position for path in result.rejected)
        if len(result.rejected) >= 3 and max(forks.values(), default=0) >= 2:
            return result
    raise AssertionError("no example has siblings that were rejected together")


def test_the_order_of_arrival_does_not_show(engine: Engine, coin: AnyTask, run: Run) -> None:
    """Any order of the rejected branches, and a branch reported twice, give the same content."""
    result = crowded(run)
    plan = make_plan(engine, coin, [result.example.index], **OPTIONS)
    digests = {
        assemble(engine, plan, [replace(result, rejected=list(order))]).digests()
        for order in [*permutations(result.rejected[:4]), [*result.rejected[:4], result.rejected[0]]]
    }
    assert len(digests) == 1
    fewer = assemble(engine, plan, [replace(result, rejected=result.rejected[1:4])]).digests()
    assert fewer not in digests and fewer[1] in {accepted for _, accepted in digests}, "the control: content is told apart"


def test_branches_are_numbered_by_fork_and_tokens(engine: Engine, coin: AnyTask, run: Run) -> None:
    result = crowded(run)
    plan = make_plan(engine, coin, [result.example.index], **OPTIONS)
    frame = assemble(engine, plan, [replace(result, rejected=result.rejected[::-1])]).index.to_pandas()
    numbered = [
        (int(rows["fork_position"].iloc[0]), tuple(rows["token"]))
        for branch, rows in frame.groupby("branch", sort=True)
        if branch > 0
    ]
    assert numbered == sorted({(path.fork_position, tuple(path.tokens[path.fork_position :])) for path in result.rejected})
