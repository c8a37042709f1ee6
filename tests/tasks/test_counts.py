"""Promises of the task counts: labels at every word, equations that hold, and counts within their bounds."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.tasks.counts import ITEMS, KINDS, LEAST, Counts
from replaylens.tasks.errors import UnreadableText
from replaylens.tasks.reading import Event
from replaylens.tasks.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer(Counts.vocabulary())


def test_labels_at_every_word() -> None:
    text = "Emma has 15 pens. Emma sells 4 of them. Emma doubles that number. How many pens does Emma have? A: 20."
    reading = Counts().read(text)
    #  Emma has | 15 pens . Emma sells | 4 of them . Emma | doubles that number . How many pens does | Emma have ? A : | 20 .
    labels = reading.labels_at(TOKENIZER.encode_with_offsets(text)[1])
    assert labels == {
        "state": [None] * 2 + ["15"] * 5 + ["11"] * 5 + ["22"] * 15,
        "count": [None] * 20 + [22] * 7,
        "claimed": [None] * 25 + [20] * 2,
        "asked": [None] * 20 + ["Emma"] * 7,
        "actor": [None] * 5 + ["Emma"] * 22,
        "result": [None] * 7 + [11] * 5 + [22] * 15,
        "operand": [None] * 7 + [15] * 5 + [11] * 15,
        "actions": [0] * 7 + [1] * 5 + [2] * 15,
        "last_action": [None] * 7 + ["subtract"] * 5 + ["double"] * 15,
        "consistent": [True] * 27,
        "count.1": [None] * 2 + [15] * 5 + [11] * 5 + [22] * 15,
        "touched.1": [None] * 2 + [False] * 5 + [True] * 20,
        "next_action": [None] * 2 + ["subtract"] * 4 + [None] * 21,  # 11 cannot lose two, so the second kind is half known
        "shuffled": [None] * 27,
    }
    assert reading.events == (Event("subtract", actor="Emma", objects=("4",)), Event("double", actor="Emma"))
    assert [thought for _, thought in reading.thoughts] == [" Emma 15 - 4 = 11", " Emma 11 * 2 = 22"]


@pytest.mark.parametrize(
    ("told", "consistent"),
    [
        ("Emma loses 3 pens. Bob buys 2 more.", True),
        ("Emma loses 9 pens. Bob buys 2 more.", False),
        ("Bob loses 9 pens. Emma buys 2 more.", False),
        ("Emma loses 9 pens. Bob loses 9 pens.", False),
        ("Emma doubles that number. Bob buys 2 more.", False),
        ("Emma loses 9 pens. Emma buys 9 more.", True),
    ],
)
def test_one_count_out_of_bounds_is_enough(told: str, consistent: bool) -> None:
    reading = Counts(people=2, most=30).read(f"Emma has 17 pens. Bob has 15 pens. {told} How many pens does Bob have? A: 10.")
    assert reading.labels_after(len(reading.text))["consistent"] is consistent


def test_an_action_is_open_only_if_everyone_could_do_anything() -> None:
    """Before a person is named, all must be able to add, subtract and double; afterwards, the one named."""
    begin = "Emma has 17 pens. Bob has 15 pens. Emma buys 2 more."  # 19 cannot be doubled within 30
    task = Counts(people=2, most=30)
    is_open = [task.read(begin + more).marks[-1].next_action_open for more in ("", " Bob", " Emma")]
    assert is_open == [False, True, False]


steps = st.lists(st.tuples(st.sampled_from(["Emma", "Bob"]), st.sampled_from(KINDS), st.integers(2, 9)), min_size=1, max_size=9)
SENTENCES = {
    "add": ["buys {} more.", "finds {} more pens.", "gets {} pens as a gift."],
    "subtract": ["loses {} pens.", "sells {} of them.", "gives {} away."],
    "double": ["doubles that number.", "now has twice as many."],
}


@settings(max_examples=60, deadline=None)
@given(start=st.tuples(*[st.integers(LEAST, 99)] * 2), told=steps, wording=st.integers(0, 5))
def test_any_story_is_read_right(start: tuple[int, int], told: list[tuple[str, str, int]], wording: int) -> None:
    """Any order of any sentences, also where a count leaves its bounds; `consistent` says so."""
    held = dict(zip(("Emma", "Bob"), start, strict=True))
    text = ". ".join(f"{name} has {number} pens" for name, number in held.items()) + "."
    inside = True
    for actor, kind, number in told:
        forms = SENTENCES[kind]
        text += f" {actor} " + forms[wording % len(forms)].format(number)
        held[actor] = {"add": held[actor] + number, "subtract": held[actor] - number, "double": 2 * held[actor]}[kind]
        inside = all(LEAST <= count <= 99 for count in held.values())
    reading = Counts(people=2, most=99).read(f"{text} How many pens does Bob have? A: 10.")
    assert reading.complete and len(reading.steps) == len(told)
    labels = reading.labels_after(len(reading.text))
    assert (labels["count"], labels["claimed"], labels["consistent"]) == (held["Bob"], 10, inside)
    assert labels["state"] == f"{held['Emma']} {held['Bob']}" and labels["count.1"] == held["Emma"]


@pytest.mark.parametrize("knobs", [{}, {"people": 4, "most": 99, "change": 9, "operations": (1, 12)}, {"most": 30}])
def test_equations_hold_and_counts_stay_within_their_bounds(knobs: dict[str, object]) -> None:
    task = Counts(**knobs)
    seen = set()
    for example in task.examples(150):
        held = {name: int(number) for name, number in re.findall(r"(\w+) has (\d+) ", example.prompt)}
        for _, thought in example.thoughts:
            name, old, sign, number, new = re.fullmatch(r" (\w+) (\d+) ([-+*]) (\d) = (\d+)", thought).groups()  # type: ignore[union-attr]
            assert held[name] == int(old)
            held[name] = {"+": int(old) + int(number), "-": int(old) - int(number), "*": int(old) * int(number)}[sign]
            assert held[name] == int(new) and LEAST <= int(new) <= task.knobs.most
            seen.add(sign)
        asked = re.search(r"does (\w+) have", example.prompt).group(1)  # type: ignore[union-attr]
        assert example.answer == f" {held[asked]}" and set(example.prompt.replace(".", "").split()) & set(ITEMS)
    assert seen == {"+", "-", "*"}


def test_counts_and_thoughts_are_words_of_one_token() -> None:
    for example in Counts(people=3, most=99, change=9).examples(30):
        assert len(TOKENIZER.encode(example.completion)) == 2
        assert all(len(TOKENIZER.encode(thought)) == 6 for _, thought in example.thoughts)


def test_only_the_stated_grammar_is_read() -> None:
    begin = "Emma has 15 pens."
    for wrong, until in ((" Bob sells", " "), (" Emma eats", " Emma "), (" Emma sells 1 of", " Emma sells "), (" How", " ")):
        assert Counts().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with"):
        Counts().read("A girl has 15 pens.")
