"""The reader: labels at every token, for texts that lie, break off or turn into nonsense; and causality."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from replaylens import tasks
from replaylens.tasks.errors import UnknownLabel, UnreadableText
from replaylens.tasks.reading import NEXT_ACTION, Event, Reading
from replaylens.tasks.task import AnyTask


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
    faces = reading.labels_at([(cut - 1, cut + 2), (cut + 2, cut + 4), (cut + 4, cut + 6), (0, 0)], ["face"])["face"]
    assert faces == ["heads", "heads", "tails", None]  # " fl", "ip", "s,", a special token


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
    with pytest.raises(UnknownLabel, match="did you mean 'face'"):
        tasks.get("coin")().example(0).labels_at([(0, 1)], ["fase"])


def assert_causal(task: AnyTask, text: str) -> None:
    """Text after a character changes no label at that character, except for the label that looks ahead."""

    def known(reading: Reading, count: int) -> dict[str, object]:
        return {name: value for name, value in reading.labels_after(count).items() if name != NEXT_ACTION}

    whole = task.read(text, 0)
    seen = [known(whole, count) for count in range(len(text) + 1)]
    for cut in range(len(text) + 1):
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
