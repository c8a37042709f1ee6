"""The task of given texts: a record is checked, labels are found by position, and what texts lack is refused by name."""

import json
from typing import Any

import pytest

from replaylens import tasks
from replaylens.tasks.errors import BadIndex, BadKnob, MixedLabel, NoSuchText, NotForTexts, TaskNameTaken
from replaylens.tasks.reading import GivenText
from replaylens.tasks.registry import get, register, require_own_name
from replaylens.tasks.texts import GivenTexts, cited

RAW: dict[str, Any] = {"tokens": [5, 6, 7, 8], "text": "a b c d"}
FULL = RAW | {"prompt": 3, "completion": " d", "labels": {"x": 1, "y": None}, "spans": {"z": [[0, 1, "p"], [1, 3, "q"]]}}


def test_a_record_is_what_it_was() -> None:
    given = GivenText.from_json(FULL)
    assert given.to_json() == FULL and GivenText.from_json(RAW).to_json() == RAW
    assert given.num_prompt == 3 and GivenText.from_json(RAW).num_prompt == 4
    found = given.labels_at([0, 2, 3, 9], ("x", "y", "z", "of another text"))
    assert found == {"x": [1] * 4, "y": [None] * 4, "z": ["p", "q", None, None], "of another text": [None] * 4}


def test_the_task_is_known_by_name_but_not_listed() -> None:
    assert get("texts") is GivenTexts and "texts" not in tasks.names()
    require_own_name(GivenTexts)

    class Other(get("coin")):  # type: ignore[misc]
        name = "texts"

    with pytest.raises(TaskNameTaken, match="texts"):
        register(Other)


def test_knobs_give_the_task_again() -> None:
    task = GivenTexts.of([GivenText.from_json(FULL), GivenText.from_json(RAW)])
    again = GivenTexts(**json.loads(task.knobs.canonical()))
    assert again == task and hash(again) == hash(task) and again.examples()[0] == task.example(0)
    assert again.example(0).digest == task.example(0).digest
    assert GivenTexts(texts=[RAW, FULL]) != task and GivenTexts(texts=[FULL, RAW], seed=1) != task
    assert task.label_names == ("x", "y", "z", "shuffled")
    with pytest.raises(NotForTexts, match=r"labels x, y, z, .* Name one"):
        _ = task.state_label
    example = task.example(0)
    assert (example.prompt, example.completion, example.text, example.answer) == ("a b c d", " d", "a b c d d", "")
    assert example.reading.labels_after(3) == {"x": 1, "y": None, "shuffled": task.shuffled(0)}
    shuffled = [GivenTexts(texts=[RAW] * 200).shuffled(i) for i in range(200)]
    assert 60 < sum(shuffled) < 140 and shuffled != [GivenTexts(texts=[RAW], seed=1).shuffled(i) for i in range(200)]


def test_pages_count_texts_instead_of_repeating_them() -> None:
    task = GivenTexts(texts=[RAW] * 3)
    assert cited("texts", vars(task.knobs)) == {"seed": 0, "texts": f"3 texts, SHA-256 {task.digest[:16]}"}
    assert cited("coin", {"flips": 3, "texts": []}) == {"flips": 3, "texts": []}


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        ({"tokens": []}, "with at least one"),
        ({"tokens": [1, True]}, "whole numbers"),
        ({"tokens": [1, -1]}, "whole numbers"),
        ({"tokens": "12"}, "not of the type list"),
        ({"text": None}, "not of the type str"),
        ({"prompt": 5}, "5 of 4 tokens"),
        ({"prompt": 0}, "0 of 4 tokens"),
        ({"promt": 3}, "nothing but tokens"),
        ({"labels": {"x": [1]}}, "The label 'x' is"),
        ({"labels": {"x": 2**63}}, "numbers of 64 bits"),
        ({"labels": {"x": float("nan")}}, "numbers of 64 bits"),
        ({"labels": {"token": 1}}, "name of an index column"),
        ({"labels": {"shuffled": 1}}, "name of an index column"),
        ({"labels": {"x": 1}, "spans": {"x": [[0, 1, 1]]}}, "given for the text and for its tokens"),
        ({"spans": {"x": [[2, 2, 1]]}}, "in order, of 4 tokens"),
        ({"spans": {"x": [[0, 5, 1]]}}, "in order, of 4 tokens"),
        ({"spans": {"x": [[1, 2, 1], [0, 1, 1]]}}, "in order, of 4 tokens"),
        ({"spans": {"x": [[0, 1, None]]}}, "in order, of 4 tokens"),
        ({"spans": {"x": 3}}, "in order, of 4 tokens"),
    ],
)
def test_a_malformed_record_is_refused(change: dict[str, Any], saying: str) -> None:
    with pytest.raises(BadKnob, match=rf"texts\[1\].*{saying}"):
        GivenTexts(texts=[RAW, RAW | change])


def test_no_texts_and_mixed_labels_are_refused() -> None:
    for none in ({}, {"texts": []}, {"texts": "abc"}, {"texts": [3]}):
        with pytest.raises(BadKnob):
            GivenTexts(**none)
    with pytest.raises(MixedLabel, match="Label 'x' has values of the types bool and int"):
        GivenTexts(texts=[RAW | {"labels": {"x": 1}}, RAW | {"labels": {"x": True}}])
    with pytest.raises(NoSuchText, match="no text 2: 2 were given"):
        GivenTexts(texts=[RAW, RAW]).examples([0, 2])
    with pytest.raises(BadIndex):
        GivenTexts(texts=[RAW]).example(-1)


def test_what_texts_lack_is_refused_by_name() -> None:
    task = GivenTexts(texts=[RAW])
    for ask in (task.answers, task.scene, task.vocabulary, task.next_action_chance, lambda: task.claims):
        with pytest.raises(NotForTexts, match="They have no"):
            ask()
    with pytest.raises(NotForTexts, match="They have no labels"):
        _ = task.state_label
