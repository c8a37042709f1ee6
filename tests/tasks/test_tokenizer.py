"""The word tokenizer is lossless, covers all task texts, and is checked on load."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens import tasks
from replaylens.tasks.errors import BadTokenizer, UnknownToken, UnknownWord
from replaylens.tasks.task import AnyTask
from replaylens.tasks.tokenizer import WordTokenizer, words_in


def test_vocabulary_closes_over_500_examples(plain_task: AnyTask) -> None:
    tokenizer = WordTokenizer(plain_task.vocabulary())
    for example in plain_task.examples(500):
        ids, offsets = tokenizer.encode_with_offsets(example.text)
        assert tokenizer.decode(ids) == example.text
        assert [example.text[start:end] for start, end in offsets] == [tokenizer.token(token) for token in ids]
        prompt = tokenizer.encode(example.prompt)
        assert ids[: len(prompt)] == prompt  # the prompt ends at a token boundary


def test_vocabulary_closes_over_every_variant(task: AnyTask, wander) -> None:
    """The vocabulary covers all knobs and all paths of the grammar, including thoughts and answers."""
    dice = random.Random(1)
    tokenizer = WordTokenizer(task.vocabulary())
    for example in task.examples(60):
        for text in (example.text, *(thought for _, thought in example.thoughts), *task.answers()):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(example.answer)) == 1
    for _ in range(30):
        tokenizer.encode(wander(task, dice.choice, 40))


def test_vocabulary_is_the_same_for_all_knobs_and_sorted(task: AnyTask) -> None:
    words = task.vocabulary()
    assert words == type(task).vocabulary() == tuple(sorted(set(words)))


def test_words_keep_their_space_and_punctuation_stands_alone() -> None:
    assert words_in("A coin's state is heads. A: heads?") == [
        "A", " coin's", " state", " is", " heads", ".", " A", ":", " heads", "?",
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
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
        with pytest.raises(UnknownToken, match="ids from 0"):
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
