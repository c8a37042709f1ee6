"""Splits: the sides share no prompt, and differ exactly as documented."""

import pytest

from replaylens import tasks
from replaylens.tasks import splits
from replaylens.tasks.errors import BadKnob, BadSplit
from replaylens.tasks.splits import Side, TaskSplit, is_test_root

coin = tasks.get("coin")

SPLITS = {
    "iid": splits.iid(coin(flips=(1, 3)), train=150, test=40),
    "length": splits.length(coin(flips=(1, 4)), train=100, test=30),
    "names": splits.names(coin(flips=(1, 4), names="all"), train=100, test=30),
    "phrasing": splits.phrasing(coin(flips=(1, 4)), train=100, test=30),
    "p_shift": splits.p_shift(coin(flips=(1, 2)), p=0.9, train=100, test=30),
    "branch_depth": splits.branch_depth(tasks.get("fork")(), train=100, test=30),
}


@pytest.mark.parametrize("split", list(SPLITS.values()), ids=lambda s: s.name)
def test_sides_are_disjoint_by_root(split: TaskSplit) -> None:
    train = {example.root for example in split.train}
    for side in split.tests.values():
        test = {example.root for example in side}
        assert len(side.examples()) == len(side) == side.count
        assert not train & test
        assert all(map(is_test_root, test)) and not any(map(is_test_root, train))


def test_equal_prompts_stay_on_one_side() -> None:
    split = splits.iid(coin(flips=3, rendering="symbols"), train=60, test=20)
    train, test = split.train.examples(), split.tests["iid"].examples()
    assert len({example.prompt for example in train}) < len(train)  # some prompts occur more than once
    assert not {example.prompt for example in train} & {example.prompt for example in test}


def test_each_split_shifts_what_it_says() -> None:
    length = SPLITS["length"]
    assert {len(e.events) for e in length.train} == {1, 2, 3, 4}
    assert {key: {len(e.events) for e in side} for key, side in length.tests.items()} == {"2N": {8}, "4N": {16}}
    names = SPLITS["names"]
    actors = [{event.actor for e in side for event in e.events} for side in (names.train, names.tests["held-out"])]
    assert not actors[0] & actors[1]
    phrasing = SPLITS["phrasing"]
    assert not any("not" in e.prompt for e in phrasing.train)
    assert any("does not flip" in e.prompt for e in phrasing.tests["standard"])
    shifted = [event.action for e in SPLITS["p_shift"].tests["p=0.9"] for event in e.events]
    assert shifted.count("flip") > 0.75 * len(shifted)
    depth = SPLITS["branch_depth"]
    assert {len(e.events) - 1 for e in depth.train} == {1, 2, 3}
    assert {len(e.events) - 1 for e in depth.tests["2x"]} == {6}


@pytest.mark.parametrize("name", tasks.names())
def test_length_split_of_every_task(name: str) -> None:
    split = splits.length(tasks.get(name)(), train=5, test=2)
    assert [len(side.examples()) for side in (split.train, *split.tests.values())] == [5, 2, 2]


def test_impossible_splits() -> None:
    with pytest.raises(BadSplit, match="knob 'names', which task 'words'"):
        splits.names(tasks.get("words")())
    with pytest.raises(BadSplit, match="'phrasing'"):
        splits.phrasing(tasks.get("coins")())
    with pytest.raises(BadSplit, match="'depth'"):
        splits.branch_depth(coin())
    with pytest.raises(BadSplit, match="nothing shifts"):
        splits.p_shift(coin(p=0.5), p=0.5)
    with pytest.raises(BadKnob):
        splits.p_shift(coin(), p=2)
    with pytest.raises(BadSplit, match=r"minimum length\. Give at least 3"):
        splits.length(coin(flips=(3, 5)), longest=2)
    with pytest.raises(BadSplit, match="minimum depth"):
        splits.branch_depth(tasks.get("fork")(depth=(2, 3)), deepest=1)
    with pytest.raises(BadSplit, match="at least one example"):
        splits.iid(coin(), test=0)


def test_a_hand_made_split_is_checked() -> None:
    train, test = Side(coin(), 3, test=False), Side(coin(), 3, test=True)
    with pytest.raises(BadSplit, match="no test side"):
        TaskSplit("mine", train, {})
    for bad in ((test, {"a": test}), (train, {"a": train})):
        with pytest.raises(BadSplit, match="mixes its sides"):
            TaskSplit("mine", *bad)


def test_too_few_prompts_is_an_error_not_a_hang() -> None:
    """This task has only four prompts, and all four are train roots."""
    with pytest.raises(BadSplit, match=r"No test example among 2,000 .* only 4 different prompts, .* Set the knob 'flips'"):
        Side(coin(flips=1, rendering="symbols"), 2, test=True).examples()
