"""Stop strings are found in the end of a text, with the answers that decoding the whole text gives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replaylens.engine.loop.commit import Stops
from replaylens.engine.memory.path import PathHistory
from replaylens.engine.model.text import Text
from replaylens.tasks.tokenizer import SPECIALS, WordTokenizer


def oracle(decode: Callable[[list[int]], str], stops: tuple[str, ...], tokens: list[int]) -> bool:
    """The definition: decode everything with and without the last token."""
    text, before = decode(tokens), decode(tokens[:-1]).rstrip("\ufffd")
    return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)


def fast(model: models.Model, decoder: decoders.Decoder) -> Text:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level() -> Text:
    """Every byte, and some longer tokens that begin or end within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("Ġ", "a"), ("å", "¥"), ("½", "å"), ("ab", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return fast(models.BPE(vocab, merges), decoders.ByteLevel())


def byte_fallback() -> Text:
    """As Llama 2's: words with a leading space, and bytes for everything else."""
    words = ["<unk>", "▁a", "▁", "b", "▁ab", "好", "c", "a"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True), decoders.Sequence(steps))


def metaspace() -> Text:
    vocab = {word: i for i, word in enumerate(["<unk>", "▁a", "▁", "b", "▁ab", "好", "c", "a"])}
    return fast(models.WordLevel(vocab, unk_token="<unk>"), decoders.Metaspace())


def word_pieces() -> Text:
    vocab = {word: i for i, word in enumerate(["[UNK]", "a", "##b", "ab", "##abc", "c", ".", "'", "##s"])}
    return fast(models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece(cleanup=True))


def word_ends() -> Text:
    vocab = {word: i for i, word in enumerate(["<unk>", "a</w>", "b", "ab</w>", "c"])}
    return fast(models.WordLevel(vocab, unk_token="<unk>"), decoders.BPEDecoder(suffix="</w>"))


class Backwards:
    """A tokenizer of unknown kind, whose every token changes the text's beginning."""

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(97 + token) for token in reversed(ids))


KINDS: dict[str, tuple[Callable[[], Text], int]] = {
    "byte level": (byte_level, 261),
    "byte fallback": (byte_fallback, 264),
    "metaspace": (metaspace, 8),
    "word pieces": (word_pieces, 9),
    "word ends": (word_ends, 5),
    "ours": (lambda: Text(WordTokenizer(["a", " b", "ab", " ", "c"])), len(SPECIALS) + 5),
    "ids": (lambda: Text(None), 30),
    "unknown": (lambda: Text(Backwards()), 6),
}
TEXTS = {name: cache(make) for name, (make, _) in KINDS.items()}


def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    """Runs of tokens, mostly of a few ids: characters that are split, repeated and cut."""
    size = KINDS[name][1]
    few = st.lists(st.integers(0, size - 1), min_size=1, max_size=6)
    return st.lists(few, min_size=1, max_size=4).flatmap(
        lambda runs: st.lists(st.sampled_from(runs), min_size=1, max_size=70).map(
            lambda chosen: [token for run in chosen for token in run]
        )
    )


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_answers_are_those_of_the_whole_text(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]()
    tokens, prompt = data.draw(tokens_of(name)), data.draw(st.lists(st.integers(0, 4), max_size=3))
    whole, stops = text.decode(tokens), []
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(max(0, len(whole) - 12), len(whole)))
        stops.append(whole[at : at + data.draw(st.integers(1, 12))] or "ab")
    finder = Stops(text)
    for end in range(max(1, len(tokens) - 3), len(tokens) + 1):
        cut = data.draw(st.integers(0, 2))  # the last tokens may not be on the branch yet
        own, tail = tokens[:end][: end - cut], tokens[:end][end - cut :] if cut else []
        past = PathHistory([*prompt, *own])
        found = finder.completed(tuple(stops), past.path(len(past.tokens), tail), len(prompt))
        assert found == oracle(text.decode, tuple(stops), tokens[:end]), (stops, tokens[:end])


def ids(text: Text, content: str) -> list[int]:
    """The tokens of single bytes."""
    tokenizer: Any = text.tokenizer
    if tokenizer.convert_tokens_to_ids("<0x61>") is not None:
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in content.encode()]
    return [tokenizer.convert_tokens_to_ids(letter) for letter in (chr(b) for b in content.encode())]


def test_a_byte_fallback_that_turns_a_long_run_into_characters() -> None:
    """The last byte of a character makes the whole run valid, however far back it began."""
    text = byte_fallback()
    tokens = [*ids(text, "好" * 40), *ids(text, "x" * 200)]
    for end in range(1, len(tokens)):
        past = PathHistory(tokens[:end])
        for stops in (("好",), ("xx",), ("x" * 90,), ("\ufffd",)):
            found = Stops(text).completed(stops, past.path(end), 0)
            assert found == oracle(text.decode, stops, tokens[:end]), (end, stops)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "unknown"])
def test_only_the_end_of_a_long_text_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, plain = TEXTS[name](), {"byte level": 64, "byte fallback": 3, "ours": len(SPECIALS)}.get(name, 1)
    most: list[int] = []
    decode = Text.decode

    def counted(self: Text, given: list[int]) -> str:
        most.append(len(given))
        return decode(self, given)

    monkeypatch.setattr(Text, "decode", counted)
    past = PathHistory([plain] * 5000)
    Stops(text).completed(("never said",), past.path(5000), 0)
    assert max(most) < 100
    most.clear()
    Stops(TEXTS["unknown"]()).completed(("never said",), past.path(5000), 0)
    assert max(most) == 5000, "what is known of no tokenizer is not assumed"


def test_without_the_rules_for_starts_the_answers_differ() -> None:
    """The tests above see what they should: an end that starts within a run of bytes is another text."""
    text = byte_fallback()
    finder = Stops(text)
    finder._pieces = dict.fromkeys(range(264), "x")  # as if every token could start an end
    tokens = ids(text, "好" + "x" * 60)[1:]  # without its first byte, no byte of the run is a character
    wrong = [end for end in range(1, len(tokens)) if finder.completed(("xx",), PathHistory(tokens[:end]).path(end), 0)]
    assert wrong and not any(oracle(text.decode, ("xx",), tokens[:end]) for end in wrong)
