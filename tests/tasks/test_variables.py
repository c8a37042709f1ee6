"""Promises of the variables task: labels at every word, correct reading of any program, and the meaning of a text's length."""

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.tasks.errors import UnreadableText
from replaylens.tasks.reading import Event
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.tasks.variables import KINDS, NAMES, Variables

TOKENIZER = WordTokenizer(Variables.vocabulary())


def test_labels_at_every_word() -> None:
    text = "Modulo 10: a = 3. b = 7. a = a + b. b = 4. What is a? A: 5."
    reading = Variables(variables=2).read(text)
    #  Modulo 10 : | a = 3 . | b = 7 . | a = a + b . | b = 4 . | What is a ? A : 5 .
    assert reading.labels_at(TOKENIZER.encode_with_offsets(text)[1]) == {
        "state": [None] * 9 + ["3 7"] * 6 + ["0 7"] * 4 + ["0 4"] * 10,
        "value": [None] * 23 + [0] * 6,
        "claimed": [None] * 27 + [5] * 2,
        "asked": [None] * 23 + ["a"] * 6,
        "target": [None] * 11 + ["a"] * 6 + ["b"] * 12,
        "result": [None] * 15 + [0] * 4 + [4] * 10,
        "actions": [0] * 15 + [1] * 4 + [2] * 10,
        "last_action": [None] * 15 + ["add"] * 4 + ["set"] * 10,
        "value.a": [None] * 5 + [3] * 10 + [0] * 14,
        "touched.a": [None] * 5 + [False] * 10 + [True] * 14,
        "value.b": [None] * 9 + [7] * 10 + [4] * 10,
        "touched.b": [None] * 9 + [False] * 10 + [True] * 10,
        "next_action": ["add"] * 13 + [None] * 2 + ["set"] * 4 + [None] * 10,
        "shuffled": [None] * 29,
    }
    assert reading.events == (Event("add", objects=("a", "b")), Event("set", objects=("b", "4")))
    assert [text[step.start : step.end] for step in reading.steps] == ["a = a + b", "b = 4"]
    assert [thought for _, thought in reading.thoughts] == [" a 0", " b 4"]


operands = st.one_of(st.integers(0, 6).map(str), st.sampled_from(NAMES[:4]))
programs = st.lists(st.tuples(st.sampled_from(NAMES[:4]), st.sampled_from(["", "+", "-"]), operands), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(start=st.tuples(*[st.integers(0, 6)] * 4), program=programs, asked=st.sampled_from(NAMES[:4]))
def test_any_program_is_read_right(start: tuple[int, ...], program: list[tuple[str, str, str]], asked: str) -> None:
    """The reader agrees with arithmetic that takes the modulus only at the end."""
    values = dict(zip(NAMES, start, strict=False))
    text = "Modulo 7:" + "".join(f" {name} = {value}." for name, value in values.items())
    thoughts = []
    for target, sign, operand in program:
        if operand == target:
            continue  # no text contains a = a or a = a + a
        number = values[operand] if operand in values else int(operand)
        values[target] = {"": lambda _, y: y, "+": operator.add, "-": operator.sub}[sign](values[target], number)
        text += f" {target} = {target} {sign} {operand}." if sign else f" {target} = {operand}."
        thoughts.append(f" {target} {values[target] % 7}")
    reading = Variables(variables=4, modulus=7).read(text if not thoughts else f"{text} What is {asked}? A: 0.")
    assert reading.complete == bool(thoughts) and reading.readable_until == len(reading.text)
    assert [thought for _, thought in reading.thoughts] == thoughts
    labels = reading.labels_after(len(reading.text))
    assert labels["state"] == " ".join(str(value % 7) for value in values.values())
    assert {name: labels[f"value.{name}"] for name in values} == {name: value % 7 for name, value in values.items()}
    assert labels["value"] == (values[asked] % 7 if thoughts else None)


@pytest.mark.parametrize("operations", [1, 6])
def test_length_counts_operations_without_the_beginning(operations: int) -> None:
    for example in Variables(operations=operations, variables=4).examples(20):
        assert len(example.events) == len(example.thoughts) == operations
        assert example.prompt.count("=") == 4 + operations


def test_kinds_operands_and_questions_cover_their_ranges() -> None:
    examples = Variables(operations=6, modulus=5).examples(200)
    events = [event for example in examples for event in example.events]
    assert {event.action for event in events} == set(KINDS)
    for kind, numbers in (("set", set("01234")), ("copy", set()), ("add", set("123")), ("subtract", set("123"))):
        told = {event.objects[1] for event in events if event.action == kind}
        assert told == numbers | (set() if kind == "set" else set("abc"))
    assert {event.objects[0] for event in events} == {example.prompt[-5] for example in examples} == set("abc")
    assert all(event.objects[0] != event.objects[1] for event in events)
    assert {example.answer for example in examples} == {f" {n}" for n in range(5)}


def test_names_values_and_thoughts_are_single_words() -> None:
    for task in (Variables(), Variables(variables=8, modulus=10, operations=20)):
        for example in task.examples(20):
            for _, thought in example.thoughts:
                assert len(TOKENIZER.encode(thought)) == 2
            assert len(TOKENIZER.encode(example.completion)) == 2


def test_only_the_stated_grammar_is_read() -> None:
    begin = "Modulo 10: a = 1. b = 2. c = 3."
    for wrong, until in ((" a = a.", " a = a"), (" a = b + c.", " a = b"), (" a = a + a.", " a = a + "), (" What", " ")):
        assert Variables().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with 'Modulo 10:'"):
        Variables().read("Modulo 7: a = 1.")
