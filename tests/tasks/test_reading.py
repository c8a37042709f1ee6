"""The reader: labels at every token, for texts that lie, break off or turn into nonsense; and causality."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from replaylens import tasks
from replaylens.tasks.errors import (
    BadKnob,
    BadTask,
    BadTokenizer,
    TaskError,
    UnknownWord,
    UnreadableText,
)
from replaylens.tasks.reading import NEXT_ACTION, Event, GivenText, Reading
from replaylens.tasks.registry import get, register, require_own_name
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import GivenTexts, cited
from replaylens.tasks.tokenizer import WordTokenizer, label_tokens, offsets_of, path_offsets, words_in


def column(task: AnyTask, reading: Reading, label: str) -> list[object]:
    """The values of one label at every word token of the readable part."""
    tokenizer = tasks.WordTokenizer(task.vocabulary())
    return reading.labels_at(tasks.offsets_of(tokenizer, reading.text), [label])[label]


def last(reading: Reading) -> dict[str, object]:
    return dict(reading.labels_after(reading.readable_until))


def test_labels_at_every_token_of_a_sentence() -> None:
    task = tasks.get("coin")()
    text = "A coin's state is heads. Alice flips, then Bob does not flip. What's the state? A: tails."
    #    A coin's state is heads .  Alice flips , then Bob does not flip . What's the state ? A : tails .
    expected = {
        "face": [None] * 4 + ["heads"] * 3 + ["tails"] * 16,
        "final": [None] * 4 + ["heads"] * 3 + ["tails"] * 16,
        "start": [None] * 4 + ["heads"] * 19,
        "parity": [None] * 4 + [0] * 3 + [1] * 16,
        "flips": [None] * 4 + [0] * 3 + [1] * 16,
        "actions": [None] * 4 + [0] * 3 + [1] * 4 + [2] * 12,
        "last_action": [None] * 7 + ["flip"] * 4 + ["keep"] * 12,
        "name": [None] * 6 + ["Alice"] * 4 + ["Bob"] * 13,
        "claimed": [None] * 4 + ["heads"] * 17 + ["tails"] * 2,
        "implied": [None] * 4 + ["heads"] * 3 + ["tails"] * 16,
        "next_action": ["flip"] * 7 + ["keep"] * 4 + [None] * 12,
        "shuffled": [None] * 23,
    }
    reading = task.read(text)
    assert {label: column(task, reading, label) for label in task.label_names} == expected
    assert reading.events == (Event("flip", "Alice"), Event("keep", "Bob"))
    assert [text[step.start : step.end] for step in reading.steps] == ["Alice flips", "Bob does"]
    assert reading.thoughts == [(text.index(" flips") + 6, " tails"), (text.index(" does") + 5, " tails")]
    assert set(column(task, task.read(text, index=4), "shuffled")) in ({0}, {1})


def test_a_token_takes_the_labels_after_its_last_character() -> None:
    text = "A coin's state is heads. Alice flips,"
    reading = tasks.get("coin")().read(text + " then Bob flips.")
    cut = text.index("flips")
    faces = reading.labels_at([(cut - 1, cut + 2), (cut + 2, cut + 4), (cut + 4, cut + 6), (0, 0), (cut, cut)], ["face"])[
        "face"
    ]
    assert faces == ["heads", "heads", "tails", None, None]  # " fl", "ip", "s,", special tokens before and within the text


def test_next_action_is_hidden_inside_the_words_that_tell_it() -> None:
    text = "A coin's state is heads. Alice flips. What's"
    reading = tasks.get("coin")().read(text)
    verb = text.index(" flips")
    assert [reading.labels_after(verb + k)[NEXT_ACTION] for k in range(8)] == ["flip"] + [None] * 7


def test_forced_wrong_face_in_the_prompt() -> None:
    task = tasks.get("coin")()
    lie = task.read("A coin's state is heads. Alice flips, heads, then Bob does not flip. What's the state? A:")
    assert (last(lie)["face"], last(lie)["claimed"], last(lie)["implied"]) == ("tails", "heads", "heads")
    carried = task.read("A coin's state is heads. Alice flips, heads, then Bob flips")
    assert (last(carried)["face"], last(carried)["claimed"], last(carried)["implied"]) == ("heads", "heads", "tails")
    honest = task.read("A coin's state is heads. Alice flips, tails")
    assert (last(honest)["face"], last(honest)["claimed"], last(honest)["implied"]) == ("tails",) * 3


def test_forced_wrong_answers() -> None:
    coin = tasks.get("coin")
    wei = coin(rendering="wei").read("A coin is tails up. Ka flips the coin. Is the coin still tails up? A: yes")
    assert (last(wei)["face"], last(wei)["claimed"]) == ("heads", "tails")
    turned = coin(rendering="wei").read("A coin is tails up. Ka flips the coin. Is the coin still heads up? A: yes")
    assert (last(turned)["face"], last(turned)["claimed"]) == ("heads", "heads")
    bare = coin(rendering="symbols").read("> H x o = H")
    assert (last(bare)["face"], last(bare)["claimed"]) == ("tails", "heads")
    states = coin(rendering="states").read(
        "The coin starts at state heads. Alice doesn't flip the coin. The final state of the coin is tails."
    )
    assert (last(states)["face"], last(states)["claimed"]) == ("heads", "tails")


def test_wrong_chain_of_thought() -> None:
    task = tasks.get("coin")(rendering="steps")
    prompt = "A coin's state is heads. Alice flips, then Bob does not flip. What's the state, step by step? A:"
    wrong = task.read(prompt + " Alice flips: heads. Bob does not flip: heads. So the state is heads.")
    assert wrong.complete and len(wrong.steps) == 2
    cut = len(prompt)
    assert wrong.labels_after(cut)["face"] == "tails"
    at_alice = wrong.labels_after(cut + len(" Alice"))
    assert (at_alice["face"], at_alice["final"], at_alice["actions"]) == ("heads", "tails", 0)
    after = wrong.labels_after(cut + len(" Alice flips: heads"))
    assert (after["face"], after["claimed"], after["implied"]) == ("tails", "heads", "heads")
    assert (last(wrong)["face"], last(wrong)["claimed"]) == ("tails", "heads")
    invented = task.read(prompt + " Alice flips: tails. Bob flips: heads. Zoe flips")
    assert (last(invented)["face"], last(invented)["implied"], last(invented)["actions"]) == ("tails", "tails", 2)


def test_lies_in_the_other_tasks() -> None:
    coins = tasks.get("coins")(coins=2).read(
        "The red coin is heads. The blue coin is tails. Bob flips the red coin. What's the state of the red coin? A: heads."
    )
    assert (last(coins)["face"], last(coins)["claimed"], last(coins)["touched.blue"]) == ("tails", "heads", False)
    resets = tasks.get("coin-resets")().read("A coin's state is heads. Bob sets it to tails, heads, then Zoe flips")
    assert (last(resets)["face"], last(resets)["claimed"], last(resets)["implied"]) == ("heads", "heads", "tails")
    shell = tasks.get("shell")().read("Under the cups: red, blue, green. Swap cups 3 and 1. What is under cup 1? A: red.")
    assert (last(shell)["held"], last(shell)["claimed"], last(shell)["state"]) == ("green", "red", "green blue red")
    words = tasks.get("words")(group="Z60").read("> g59 g02 = g03")
    assert (last(words)["product"], last(words)["claimed"]) == ("g01", "g03")
    variables = tasks.get("variables")(variables=2).read("Modulo 10: a = 1. b = 2. a = a - b. What is a? A: 8.")
    assert (last(variables)["value"], last(variables)["claimed"], last(variables)["state"]) == (9, 8, "9 2")


def test_wrong_branch_in_the_fork() -> None:
    task = tasks.get("fork")()
    prompt = "Start at ba. Roads: ba to ko, ko to du, ba to mi, mi to re. Go to re. Path: ba,"
    right, wrong, off = (task.read(prompt + path) for path in (" mi, re.", " ko, du.", " re."))
    assert (last(right)["viable"], last(right)["chosen"], last(right)["on_track"]) == ("second", "second", True)
    assert (last(wrong)["viable"], last(wrong)["chosen"], last(wrong)["on_track"]) == ("second", "first", False)
    assert last(wrong)["valid"] is True and last(off)["valid"] is False and last(off)["chosen"] == "neither"


def test_impossible_moves_of_boxes() -> None:
    task = tasks.get("boxes")(boxes=3)
    boxes = "Box 1 has the key. Box 2 is empty. Box 3 has the egg."
    moved = task.read(boxes + " Move the key from box 3 to box 2.")
    assert (last(moved)["state"], last(moved)["consistent"]) == ("nothing key egg", False)
    full = task.read(boxes + " Move the key from box 1 to box 3.")
    assert (last(full)["state"], last(full)["consistent"]) == ("nothing nothing key", False), "the right box, into a full one"
    fine = task.read(boxes + " Move the key from box 1 to box 2.")
    assert (last(fine)["state"], last(fine)["consistent"]) == ("nothing key egg", True)
    twice = task.read(boxes + " Put the egg into box 2")
    assert last(twice)["consistent"] is False, "it is in box 3"
    elsewhere = task.read(boxes + " Remove the egg from box 1.")
    assert last(elsewhere)["consistent"] is False
    put = task.read(boxes + " Put the rope into box 3")
    assert (last(put)["state"], last(put)["consistent"]) == ("key nothing rope", False)
    removed = task.read(boxes + " Remove the spoon from box 1.")
    assert (last(removed)["state"], last(removed)["consistent"]) == ("key nothing egg", False)
    assert removed.thoughts[0][1] == " nothing"
    wrong = task.read(boxes + " Remove the egg from box 3. What is in box 1? A: egg.")
    assert (last(wrong)["held"], last(wrong)["claimed"], last(wrong)["consistent"]) == ("key", "egg", True)


def test_babble_is_labelled_up_to_where_it_begins() -> None:
    task = tasks.get("coin")()
    good = "A coin's state is heads. Alice flips,"
    reading = task.read(good + " thus the moon is made of cheese.")
    assert reading.readable_until == len(good + " th") and not reading.complete
    assert reading.labels_after(len(good))["face"] == "tails"
    assert set(reading.labels_after(len(good) + 6).values()) == {None}
    after_the_end = task.read("A coin's state is heads. Alice flips. What's the state? A: tails. And so on")
    assert after_the_end.complete and after_the_end.text[after_the_end.readable_until :] == " And so on"


@pytest.mark.parametrize("text", ["Once upon a time", "A coin is heads up.", "a coin's state is", " A coin's"])
def test_a_text_of_another_kind(text: str) -> None:
    with pytest.raises(UnreadableText, match=r"must begin with \"A coin's state is\""):
        tasks.get("coin")().read(text)


def test_unknown_label() -> None:
    with pytest.raises(TaskError, match="did you mean 'face'"):
        tasks.get("coin")().example(0).labels_at([(0, 1)], ["fase"])


def assert_causal(task: AnyTask, text: str) -> None:
    """Text after a character changes no label at that character, except for the label that looks ahead. Of long texts, every
    few characters."""

    def known(reading: Reading, count: int) -> dict[str, object]:
        return {name: value for name, value in reading.labels_after(count).items() if name != NEXT_ACTION}

    whole = task.read(text, 0)
    seen = [known(whole, count) for count in range(len(text) + 1)]
    for cut in range(0, len(text) + 1, 1 + len(text) // 150):
        part = task.read(text[:cut], 0)
        assert part.readable_until == cut
        assert part.steps == tuple(step for step in whole.steps if step.end <= cut)
        for count in {cut, cut - 1, cut // 2}:
            assert known(part, count) == (seen[count] if count > 0 else dict.fromkeys(known(part, count)))


def test_cut_anywhere_labels_agree_with_the_whole(task: AnyTask) -> None:
    assert_causal(task, task.example(2).text)


def test_any_path_of_the_grammar_is_readable_and_causal(task: AnyTask, wander) -> None:
    dice = random.Random(5)
    for _ in range(8):
        text = wander(task, dice.choice, 25)
        assert task.read(text).readable_until == len(text)
    assert_causal(task, wander(task, dice.choice, 18))


def test_a_known_beginning_changes_nothing(task: AnyTask, wander) -> None:
    """A text read on from where it leaves another one, at any character, has the reading of a text read from the start."""
    dice = random.Random(7)
    known = task.read(wander(task, dice.choice, 20), 3)

    def read(text: str, *known: Reading) -> Reading | str:
        try:
            return task.read(text, 3, *known)
        except UnreadableText as error:
            return str(error)

    for cut in range(0, len(known.text) + 1, 3):
        for rest in ("", " moon", known.text[cut + 1 :], wander(task, dice.choice, 20)[cut:]):
            assert read(known.text[:cut] + rest, known) == read(known.text[:cut] + rest)


def test_a_known_beginning_is_not_read_again() -> None:
    """Else the test above would compare a reading with itself: labels that are wrong in the known one are found again."""
    task, text = tasks.get("coin")(), "A coin's state is heads. Alice flips. What's the state? A: tails."
    known = task.read(text)
    wrong = replace(known, marks=tuple(mark._replace(labels={**mark.labels, "face": "edge"}) for mark in known.marks))
    again = task.read(text.replace("A: tails", "A: heads"), known=wrong)
    assert again.labels_after(text.index("What"))["face"] == "edge"
    assert again.labels_after(len(text))["face"] == "tails" and again.labels_after(len(text))["claimed"] == "heads"


def test_spans_have_the_labels_of_their_characters(task: AnyTask) -> None:
    reading = task.example(1).reading
    assert [span.start for span in reading.spans] == [0, *(span.end for span in reading.spans[:-1])]
    assert reading.spans[-1].end == reading.readable_until
    for span in reading.spans:
        assert all(reading.labels_after(at + 1) == span.labels for at in range(span.start, span.end))


def test_no_piece_on_offer_is_a_prefix_of_another(task: AnyTask, wander) -> None:
    dice = random.Random(6)

    def checked(offered):
        ordered = sorted(offered)
        assert all(not b.startswith(a) for a, b in pairwise(ordered)), offered
        return dice.choice(ordered)

    for _ in range(20):
        wander(task, checked, 40)


# ---- texts -----------------------------------------------------------------------------------------------------------
# The task of given texts: a record is checked, labels are found by position, and what texts lack is refused by name.

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

    with pytest.raises(BadTask, match="texts"):
        register(Other)


def test_knobs_give_the_task_again() -> None:
    task = GivenTexts.of([GivenText.from_json(FULL), GivenText.from_json(RAW)])
    again = GivenTexts(**json.loads(task.knobs.canonical()))
    assert again == task and hash(again) == hash(task) and again.examples()[0] == task.example(0)
    assert again.example(0).digest == task.example(0).digest
    assert GivenTexts(texts=[RAW, FULL]) != task and GivenTexts(texts=[FULL, RAW], seed=1) != task
    assert task.label_names == ("x", "y", "z", "shuffled")
    with pytest.raises(TaskError, match=r"labels x, y, z, .* Name one"):
        _ = task.state_label
    example = task.example(0)
    assert (example.prompt, example.completion, example.text, example.answer) == ("a b c d", " d", "a b c d d", "")
    assert example.reading.labels_after(3) == {"x": 1, "y": None, "shuffled": task.shuffled(0)}
    many, otherwise = GivenTexts(texts=[RAW] * 200), GivenTexts(texts=[RAW], seed=1)
    shuffled = [many.shuffled(i) for i in range(200)]
    assert 60 < sum(shuffled) < 140 and shuffled != [otherwise.shuffled(i) for i in range(200)]


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
    with pytest.raises(TaskError, match="Label 'x' has values of the types bool and int"):
        GivenTexts(texts=[RAW | {"labels": {"x": 1}}, RAW | {"labels": {"x": True}}])
    some = [RAW | {"labels": {"x": value}} for value in (None, "a", None)]
    assert len(GivenTexts(texts=some).examples(3)) == 3, "a missing value is of no type"
    with pytest.raises(TaskError, match="'x' has values of the types int and str"):
        GivenTexts(texts=[*some, RAW | {"spans": {"x": [[0, 1, 2]]}}])
    with pytest.raises(TaskError, match="no text 2: 2 were given"):
        GivenTexts(texts=[RAW, RAW]).examples([0, 2])
    with pytest.raises(TaskError):
        GivenTexts(texts=[RAW]).example(-1)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"prompt": 1}, True), ({"prompt": 3}, True), ({"prompt": 0}, False), ({"prompt": 4}, False), ({"tokens": [0, 1, 2]},
        True),
        ({"tokens": []}, False), ({"tokens": [1, -1, 2]}, False), ({"tokens": [1, 2.0, 3]}, False), ({"tokens": [True, 1,
        2]}, False),
        ({"labels": {"x": 2**63 - 1}}, True), ({"labels": {"x": 2**63}}, False), ({"labels": {"x": -(2**63)}}, True),
        ({"labels": {"x": float("nan")}}, False), ({"labels": {"x": None}}, True), ({"labels": {"x": [1]}}, False),
        ({"spans": {"x": [[0, 3, "a"]]}}, True), ({"spans": {"x": [[0, 4, "a"]]}}, False), ({"spans": {"x": [[1, 1, "a"]]}},
        False),
        ({"spans": {"x": [[0, 1, "a"], [1, 2, "b"]]}}, True), ({"spans": {"x": [[0, 2, "a"], [1, 3, "b"]]}}, False),
        ({"spans": {"x": [[1, 2, "a"], [0, 1, "b"]]}}, False), ({"spans": {"x": [[0, 1, None]]}}, False),
        ({"labels": {"x": 1}, "spans": {"x": [[0, 1, 2]]}}, False), ({"labels": {"position": 1}}, False), ({"more": 1}, False),
    ],
)  # fmt: skip
def test_records_of_texts_at_their_bounds(change: dict[str, Any], fits: bool) -> None:
    record = {"tokens": [5, 6, 7], "text": "a b c"} | change
    if fits:
        assert GivenTexts(texts=[record]).example(0).given is not None
    else:
        with pytest.raises(BadKnob):
            GivenTexts(texts=[record])


def test_what_texts_lack_is_refused_by_name() -> None:
    task = GivenTexts(texts=[RAW])
    for ask in (task.answers, task.scene, task.vocabulary, task.next_action_chance, lambda: task.claims):
        with pytest.raises(TaskError, match="They have no"):
            ask()
    with pytest.raises(TaskError, match="They have no labels"):
        _ = task.state_label


# ---- tokenizer -------------------------------------------------------------------------------------------------------
# The word tokenizer is lossless, covers all task texts, and is checked on load.


def test_vocabulary_closes_over_a_hundred_examples(plain_task: AnyTask) -> None:
    tokenizer = WordTokenizer(plain_task.vocabulary())
    for example in plain_task.examples(100):
        ids, offsets = tokenizer.encode_with_offsets(example.text)
        assert tokenizer.decode(ids) == example.text
        assert [example.text[start:end] for start, end in offsets] == [tokenizer.token(token) for token in ids]
        prompt = tokenizer.encode(example.prompt)
        assert ids[: len(prompt)] == prompt  # the prompt ends at a token boundary


def test_vocabulary_closes_over_every_variant(task: AnyTask, wander) -> None:
    """The vocabulary covers all knobs and all paths of the grammar, including thoughts and answers."""
    dice = random.Random(1)
    tokenizer = WordTokenizer(task.vocabulary())
    for example in task.examples(20):
        for text in (example.text, *(thought for _, thought in example.thoughts), *task.answers()):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(example.answer)) == 1
    for _ in range(15):
        tokenizer.encode(wander(task, dice.choice, 40))


def test_vocabulary_is_the_same_for_all_knobs_and_sorted(task: AnyTask) -> None:
    words = task.vocabulary()
    assert words == type(task).vocabulary() == tuple(sorted(set(words)))


def test_words_keep_their_space_and_punctuation_stands_alone() -> None:
    assert words_in("A coin's state is heads. A: heads?") == [
        "A", " coin's", " state", " is", " heads", ".", " A", ":", " heads", "?",
    ]  # fmt: skip


any_character = st.one_of(st.sampled_from(" \n.:'aÄ0_\N{NO-BREAK SPACE}"), st.integers(0, 0x10FFFF).map(chr))


@settings(max_examples=25, deadline=None)
@given(st.lists(any_character, max_size=40).map("".join))
def test_cutting_loses_nothing(text: str) -> None:
    assert "".join(words_in(text)) == text


def test_specials() -> None:
    tokenizer = WordTokenizer(["heads", " heads"])
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size, len(tokenizer)) == (0, 1, 4, 4)
    assert [tokenizer.token(k) for k in range(4)] == ["<pad>", "<eos>", "heads", " heads"]
    assert tokenizer.encode("heads heads") == [2, 3]
    assert tokenizer.decode([2, 3, 1, 0, 0]) == "heads heads"
    assert tokenizer.id(" heads") == 3


def test_unknown_words_and_ids_are_named() -> None:
    tokenizer = WordTokenizer(tasks.get("coin").vocabulary())
    with pytest.raises(UnknownWord, match=r"' nickel' at character 1 ") as caught:
        tokenizer.encode("A nickel's state"[:8])
    assert (caught.value.word, caught.value.offset) == (" nickel", 1)
    with pytest.raises(UnknownWord):
        tokenizer.encode("<eos>")
    with pytest.raises(UnknownWord):
        tokenizer.id("heads ")
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(TaskError, match="ids from 0"):
            tokenizer.token(token)


def test_save_and_load(tmp_path) -> None:
    tokenizer = WordTokenizer(tasks.get("boxes").vocabulary())
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = WordTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded == tokenizer and hash(loaded) == hash(tokenizer) and loaded.words == tokenizer.words
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "'format' must be"),
        ({"specials": ["<eos>"]}, "special tokens must be"),
        ({"words": "abc"}, "list of strings"),
        ({"words": ["a", 1]}, "list of strings"),
        ({"words": ["a", "a"]}, "occurs twice"),
        ({"words": ["<pad>"]}, "special token"),
        ({"words": ["two words"]}, "not one word"),
        ({"words": [""]}, "not one word"),
    ],
)
def test_a_broken_file_is_refused(change: dict[str, object], message: str) -> None:
    content = json.loads(WordTokenizer(["a"]).to_json())
    with pytest.raises(BadTokenizer, match=message):
        WordTokenizer.from_json(json.dumps(content | change))


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_file_of_another_kind_is_refused(content: str) -> None:
    with pytest.raises(BadTokenizer):
        WordTokenizer.from_json(content)


# ---- labels ----------------------------------------------------------------------------------------------------------
# Labels under other tokenizers: a byte-level BPE that splits words, and token paths that split them differently.


@pytest.fixture(scope="module")
def bpe():
    """A small byte-level BPE trained here, with a start token like Llama's."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    core.train_from_iterator(["A coin's state is heads. Alice flips the coin, then"] * 3, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def test_labels_of_a_fast_tokenizer_agree_with_the_characters(bpe, task) -> None:
    for example in task.examples(2):
        offsets = offsets_of(bpe, example.text)
        assert len(offsets) == len(bpe(example.text, add_special_tokens=False)["input_ids"])
        assert "".join(example.text[start:end] for start, end in offsets) == example.text
        labels = label_tokens(example, offsets)
        for place, (_, end) in enumerate(offsets):
            row = {name: values[place] for name, values in labels.items()}
            assert row == dict(example.reading.labels_after(end))


def test_a_word_in_pieces_changes_the_label_at_its_last_piece(bpe) -> None:
    example = tasks.get("coin")(flips=1, p=1, names="held-out").example(0)
    offsets = offsets_of(bpe, example.text)
    faces = label_tokens(example, offsets, ["face"])["face"]
    verb = example.text.index(" flips") + len(" flips")
    before = [face for face, (_, end) in zip(faces, offsets, strict=True) if end < verb and face]
    after = [face for face, (_, end) in zip(faces, offsets, strict=True) if end >= verb]
    assert len(set(before)) == len(set(after)) == 1 and before[0] != after[0]


def test_special_tokens_have_no_labels(bpe) -> None:
    example = tasks.get("coin")().example(0)
    plain, special = offsets_of(bpe, example.text), offsets_of(bpe, example.text, add_special_tokens=True)
    assert special == [(0, 0), *plain]
    labels = label_tokens(example, special)
    assert all(values[0] is None for values in labels.values())
    assert {name: values[1:] for name, values in labels.items()} == label_tokens(example, plain)


def test_path_offsets_of_a_path_cut_otherwise(bpe) -> None:
    text = "A coin's state is heads. Alice flips."
    usual = bpe(text, add_special_tokens=False)["input_ids"]
    bytewise = [bpe.convert_tokens_to_ids(piece) for piece in text.replace(" ", "\u0120")]
    for ids in (usual, bytewise, [bpe.bos_token_id, *bytewise]):
        decoded, offsets = path_offsets(bpe, ids)
        assert decoded == text and len(offsets) == len(ids)
        assert label_tokens(tasks.get("coin")().read(decoded), offsets, ["face"])["face"][-1] is not None
    assert path_offsets(bpe, usual)[1] == offsets_of(bpe, text)
    assert path_offsets(bpe, [bpe.bos_token_id, *usual])[1][0] == (0, 0)


def test_a_character_in_pieces_is_there_with_its_last_one(bpe) -> None:
    """A token path may end, or be read, in the middle of a character. An incomplete character adds nothing."""
    ids = [bpe.convert_tokens_to_ids(piece) for piece in bpe.tokenize("Zoé’s")]
    text, offsets = path_offsets(bpe, ids)
    assert text == "Zoé’s" and len(ids) > len(text), "the control: characters are in pieces"
    ends = [end for _, end in offsets]
    assert ends == sorted(ends) and ends[-1] == len(text)
    for count, end in enumerate(ends, 1):
        whole = bytes_of(bpe, ids[:count]).decode(errors="ignore")
        assert text[:end] == whole == path_offsets(bpe, ids[:count])[0]


def bytes_of(bpe, ids) -> bytes:
    """The bytes of a path, token by token: byte-level tokens spell each byte as a letter."""
    spelled = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(spelled[letter] for token in ids for letter in bpe.convert_ids_to_tokens(token))


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's alphabet: printable bytes stand for themselves, all others for the letters from 256 on, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def test_path_offsets_of_the_word_tokenizer() -> None:
    tokenizer = tasks.WordTokenizer(tasks.get("coin").vocabulary())
    example = tasks.get("coin")().example(0)
    ids = tokenizer.encode(example.text)
    text, offsets = path_offsets(tokenizer, [*ids, tokenizer.eos_id])
    assert text == example.text
    assert offsets == [*offsets_of(tokenizer, text), (len(text), len(text))]
    assert path_offsets(tokenizer, []) == ("", [])


def test_a_slow_tokenizer_is_refused() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(BadTokenizer, match=r"SlowTokenizer gives no offsets.*path_offsets"):
        offsets_of(SlowTokenizer(), "A coin's")


def test_offsets_of_a_path_of_words_are_those_of_its_prefixes() -> None:
    """Known from the words alone; compared with decoding every prefix, special tokens included."""
    words = tasks.WordTokenizer(tasks.get("coin").vocabulary())
    ids = [words.pad_id, *words.encode(tasks.get("coin")().example(3).text), words.eos_id, words.encode(" heads")[0]]
    ends = [len(words.decode(ids[: count + 1])) for count in range(len(ids))]
    assert path_offsets(words, ids) == (words.decode(ids), list(zip([0, *ends[:-1]], ends, strict=True)))
    assert path_offsets(words, []) == ("", [])
    with pytest.raises(TaskError):
        path_offsets(words, [3, len(words)])


def test_known_offsets_are_taken_over(bpe) -> None:
    ids = bpe(tasks.get("coin")().example(3).text)["input_ids"]
    text, offsets = path_offsets(bpe, ids)
    assert path_offsets(bpe, ids, offsets[:7]) == (text, offsets)
    assert path_offsets(bpe, ids, [*offsets[:6], (0, 0)])[1] != offsets


def test_byte_level_offsets_are_those_of_all_prefixes(bpe, monkeypatch) -> None:
    """Read in windows, from any known beginning: whole texts, texts in many bytes a character, and bytes in any order."""
    dice = random.Random(3)
    paths = [bpe(example.text)["input_ids"] for example in tasks.get("coin")().examples(2)]
    paths += [bpe("Ä" * 9 + " heads \N{ROCKET}\N{CJK UNIFIED IDEOGRAPH-4E00}x" * 5)["input_ids"]]
    paths += [[dice.randrange(len(bpe)) for _ in range(60)] for _ in range(20)]
    fast = [[path_offsets(bpe, ids, path_offsets(bpe, ids)[1][:known]) for known in (0, 1, 9, 23)] for ids in paths]
    monkeypatch.setattr("replaylens.tasks.tokenizer._is_byte_level", lambda tokenizer: False)
    assert fast == [[path_offsets(bpe, ids)] * 4 for ids in paths]
    assert any(text.count("\N{REPLACEMENT CHARACTER}") for ((text, _), *_) in fast), "no bytes out of order"


def test_the_cost_of_byte_level_offsets_is_linear(bpe, monkeypatch) -> None:
    """Tokens decoded per token of the path; every prefix of the longer one would be 200."""
    decoded: list[int] = []
    original = type(bpe).decode
    monkeypatch.setattr(type(bpe), "decode", lambda self, ids, **how: decoded.append(len(ids)) or original(self, ids, **how))
    for count in (40, 400):
        decoded.clear()
        path_offsets(bpe, bpe(" heads" * count)["input_ids"][:count])
        assert sum(decoded) < 7 * count


def test_offsets_of_a_tokenizer_that_extends_words_are_linear_unless_it_decodes_otherwise(monkeypatch) -> None:
    class Named(WordTokenizer):
        pass

    class Loud(WordTokenizer):
        def decode(self, ids):
            return super().decode(ids).upper() + "!"

    words = ("The", " coin", " flips", ".")
    ids = WordTokenizer(words).encode("The coin flips.")
    assert path_offsets(Loud(words), ids) == ("THE COIN FLIPS.!", [(0, 4), (4, 9), (9, 15), (15, 16)])
    monkeypatch.setattr(WordTokenizer, "token", None)  # decoding prefix by prefix asks for every token again
    assert path_offsets(Named(words), ids) == ("The coin flips.", [(0, 3), (3, 8), (8, 14), (14, 15)])
