"""Labels under other tokenizers: a byte-level BPE that splits words, and token paths that split them differently."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from replaylens import tasks
from replaylens.tasks.errors import BadTokenizer, UnknownToken
from replaylens.tasks.tokenizer import WordTokenizer, label_tokens, offsets_of, path_offsets


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
    for example in task.examples(5):
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
    with pytest.raises(UnknownToken):
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
