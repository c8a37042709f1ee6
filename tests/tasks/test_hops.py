"""Promises of the task hops: labels at every word, exact values between hops, and no shortcut past them."""

import re
from math import sqrt

import pytest

from replaylens.tasks.errors import UnreadableText
from replaylens.tasks.hops import RELATIONS, Hops
from replaylens.tasks.reading import Event
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer(Hops.vocabulary())
TEXT = "Facts: Alice trusts Bob. Bob fears Alice. Question: Alice trusts someone, who fears someone. Who is it? A: Bob."


def test_labels_at_every_word() -> None:
    reading = Hops().read(TEXT)
    # Facts : | Alice trusts Bob . | Bob fears Alice . | Question : Alice | trusts someone , who | fears someone . Who is it ? .
    assert reading.labels_at(TOKENIZER.encode_with_offsets(TEXT)[1]) == {
        "person": [None] * 13 + ["Bob"] * 4 + ["Alice"] * 11,
        "before": [None] * 13 + ["Alice"] * 4 + ["Bob"] * 11,
        "first": [None] * 12 + ["Alice"] * 16,
        "claimed": [None] * 26 + ["Bob"] * 2,
        "facts": [0] * 4 + [1] * 4 + [2] * 20,
        "actions": [0] * 13 + [1] * 4 + [2] * 11,
        "last_action": [None] * 13 + ["trusts"] * 4 + ["fears"] * 11,
        "last_name": [None] * 2 + ["Alice"] * 2 + ["Bob"] * 4 + ["Alice"] * 20,
        "repeats": [0] * 17 + [1] * 11,
        "next_action": ["trusts"] * 13 + ["fears"] * 4 + [None] * 11,
        "shuffled": [None] * 28,
    }
    assert reading.events == (
        Event("trusts", actor="Alice", objects=("Bob",)),
        Event("fears", actor="Bob", objects=("Alice",)),
    )
    assert [thought for _, thought in reading.thoughts] == [" Bob", " Alice"]


def told(example: Example) -> dict[tuple[str, str], str]:
    return {(a, r): b for a, r, b in re.findall(r"(\w+) (\w+) (\w+)\.", example.prompt.split(" Question:")[0])}


def test_the_answer_and_every_value_between_follow_from_the_facts() -> None:
    for example in Hops(hops=(1, 7), people=7, relations=3).examples(60):
        facts, question = told(example), example.prompt.split(" Question: ")[1]
        person = question.split()[0]
        reached = [person := facts[person, relation] for relation in re.findall(r"(\w+) someone", question)]
        assert [thought for _, thought in example.thoughts] == [f" {name}" for name in reached]
        assert example.answer == f" {reached[-1]}"


def test_relations_are_one_to_one_and_leave_nobody_in_place() -> None:
    for example in Hops(people=6, relations=4).examples(40):
        facts = told(example)
        for relation in RELATIONS:
            pairs = {a: b for (a, r), b in facts.items() if r == relation}
            assert len(pairs) == 6 and set(pairs) == set(pairs.values()) and all(a != b for a, b in pairs.items())


def shortcuts(example: Example) -> dict[str, str]:
    """Guesses that skip the person between."""
    facts, (first, last) = told(example), example.events
    names = list(dict.fromkeys(a for a, _ in facts))
    return {
        "the second relation of the first person": facts[first.actor, last.action],
        "the person between": first.objects[0],
        "the person named first": names[0],
        "the person named last": list(facts.values())[-1],
    }


def test_no_shortcut_answers_two_hops() -> None:
    """None is right much more often than the guess of one of the four others; two hops answer everything."""
    examples = Hops(people=5).examples(1500)
    wins = dict.fromkeys(shortcuts(examples[0]), 0)
    for example in examples:
        for name, guess in shortcuts(example).items():
            wins[name] += f" {guess}" == example.answer
    limit = 1 / 4 + 4 * sqrt(1 / 4 * 3 / 4 / len(examples))
    assert all(count / len(examples) < limit for count in wins.values()), wins


def test_what_the_first_persons_facts_rule_out_gains_little() -> None:
    """Maps are one to one, so the answer is seldom whom the first person's own facts name: 0.31 instead of 0.25 of guesses."""
    examples, hits = Hops(people=5).examples(1500), 0.0
    for example in examples:
        facts, actor = told(example), example.events[0].actor
        own = {actor, *(b for (a, _), b in facts.items() if a == actor)}
        left = [name for name in dict.fromkeys(a for a, _ in facts) if name not in own]
        hits += (example.answer.strip() in left) / len(left)
    assert 0.25 < hits / len(examples) < 0.34


def test_a_hop_without_a_fact_has_no_value() -> None:
    reading = Hops().read(TEXT.replace("trusts someone", "fears someone"))
    labels = reading.labels_after(len(reading.text))
    assert labels["person"] is None and labels["claimed"] == "Bob" and labels["actions"] == 2
    assert reading.complete and [thought for _, thought in reading.thoughts] == ["", ""]


def test_only_the_stated_grammar_is_read() -> None:
    begin = "Facts: Alice trusts Bob."
    for wrong, until in ((" Alice likes", " Alice "), (" Question: someone", " Question: "), (" someone", " ")):
        assert Hops().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with 'Facts:'"):
        Hops().read("Alice trusts Bob.")
