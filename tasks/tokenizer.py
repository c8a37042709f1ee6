"""WordTokenizer: one token per word, for the small models trained from scratch.

A space belongs to the word after it (" heads" and "heads" are two tokens), each punctuation mark is a token, and nothing
is normalised: decoding an encoded text gives back the same text, character for character.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

from replaylens.tasks.errors import BadTokenizer, TaskError, UnknownWord
from replaylens.tasks.reading import Label, Offset, Reading
from replaylens.tasks.task import Example

# ---- tokenizer -------------------------------------------------------------------------------------------------------

PAD = "<pad>"
EOS = "<eos>"
SPECIALS = (PAD, EOS)

_FORMAT = "replaylens-words-1"
# A word with inner apostrophes, or one other visible character, each with at most one space before it; or one space.
_WORD = re.compile(r" ?[A-Za-z0-9]+(?:'[A-Za-z0-9]+)*| ?[^\sA-Za-z0-9]|\s")


def words_in(text: str) -> list[str]:
    """Split a text into words; joined again, they give the text."""
    return _WORD.findall(text)


def vocabulary_of(literals: Iterable[str]) -> tuple[str, ...]:
    """The sorted words of the literals. A text composed of them has no other words if each literal begins with a space
    or a punctuation mark, or begins the text."""
    return tuple(sorted({word for literal in literals for word in words_in(literal)}))


class WordTokenizer:
    """Text to token ids and back. Immutable; ids are the specials, then the words in the order given."""

    pad_id = SPECIALS.index(PAD)
    eos_id = SPECIALS.index(EOS)

    def __init__(self, words: Sequence[str]) -> None:
        self._tokens = (*SPECIALS, *words)
        self._texts = (*("" for _ in SPECIALS), *words)
        self._ids = {word: number for number, word in enumerate(self._tokens) if word not in SPECIALS}
        if len(self._ids) != len(words):
            raise BadTokenizer("A word occurs twice in the vocabulary, or is the name of a special token. Remove it.")
        for word in words:
            if words_in(word) != [word]:
                raise BadTokenizer(f"{word!r} is not one word. The tokenizer would split it into {words_in(word)}.")

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return len(self._tokens)

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary without the specials, in id order."""
        return self._tokens[len(SPECIALS) :]

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; no special token is added. Raises UnknownWord with the word and its offset."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Offset]]:
        """Token ids, and for each the characters [start, end) it covers, leading space included."""
        ids: list[int] = []
        offsets: list[Offset] = []
        end = 0
        for word in words_in(text):
            start, end = end, end + len(word)
            if word not in self._ids:
                raise UnknownWord(word, start)
            ids.append(self._ids[word])
            offsets.append((start, end))
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Special tokens have no text."""
        return "".join(self._pieces(list(ids)))

    def decode_with_offsets(self, ids: Sequence[int]) -> tuple[str, list[Offset]]:
        """The text of the ids, and for each the characters [start, end) it adds to it; special tokens add none."""
        pieces = self._pieces(ids)
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        texts, unknown = self._texts, len(self._tokens)
        if ids and not 0 <= min(ids) <= max(ids) < unknown:
            raise _outside(next(token_id for token_id in ids if not 0 <= token_id < unknown), unknown)
        return [texts[token_id] for token_id in ids]

    def token(self, token_id: int) -> str:
        """The word or special with this id."""
        if not 0 <= token_id < len(self._tokens):
            raise _outside(token_id, len(self._tokens))
        return self._tokens[token_id]

    def id(self, word: str) -> int:
        """The id of one word, leading space included. Raises UnknownWord."""
        if word not in self._ids:
            raise UnknownWord(word, 0)
        return self._ids[word]

    def to_json(self) -> str:
        """The tokenizer as JSON; equal tokenizers give equal bytes."""
        return json.dumps({"format": _FORMAT, "specials": SPECIALS, "words": self.words}, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: str) -> Self:
        """Rebuild from `to_json`. Raises BadTokenizer for any other content."""
        try:
            data = json.loads(content)
        except json.JSONDecodeError as error:
            raise BadTokenizer(f"Not a word tokenizer's file: it is not JSON ({error}).") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise BadTokenizer(f"Not a word tokenizer's file: its 'format' must be {_FORMAT!r}.")
        if data.get("specials") != list(SPECIALS):
            raise BadTokenizer(f"The special tokens must be {list(SPECIALS)}, not {data.get('specials')}.")
        words = data.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadTokenizer("'words' must be a list of strings.")
        return cls(words)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self._tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordTokenizer) and self._tokens == other._tokens

    def __hash__(self) -> int:
        return hash(self._tokens)

    def __repr__(self) -> str:
        return f"WordTokenizer({self.vocab_size} tokens)"


def _outside(token: object, size: int) -> TaskError:
    return TaskError(f"Token id {token!r} is outside the vocabulary. Use ids from 0 to {size - 1}.")


# ---- labels ----------------------------------------------------------------------------------------------------------
# Token labels for any tokenizer: labels belong to characters, offsets map them to tokens.
#
# `offsets_of` gives the offsets of a text as the tokenizer splits it. `path_offsets` gives those of a list of token ids,
# which may split the text differently (a forced token, a sampled path).

_WINDOW = 8
"""byte-level tokens that are decoded again with each of the next ones"""
_HALF = "\N{REPLACEMENT CHARACTER}"
_known: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""tokenizer -> token -> its text"""


def label_tokens(
    labelled: Reading | Example, offsets: Iterable[Offset], names: Sequence[str] | None = None
) -> dict[str, list[Label]]:
    """The value of each label (default: all of them) at every token.

    A token takes the labels in force after its last character. Tokens without characters, and those beyond the
    readable part of the text, get None. Raises TaskError.
    """
    return labelled.labels_at(offsets, names)


def offsets_of(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[Offset]:
    """Characters [start, end) of each token of the text; special tokens are (0, 0).

    Takes a WordTokenizer (which adds no special tokens) or a fast Hugging Face tokenizer. Raises BadTokenizer for a
    slow one, which has no offsets.
    """
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.encode_with_offsets(text)[1]
    if not getattr(tokenizer, "is_fast", False):
        raise BadTokenizer(
            f"{type(tokenizer).__name__} gives no offsets. Pass a WordTokenizer or a fast Hugging Face tokenizer "
            f"(AutoTokenizer.from_pretrained(..., use_fast=True)), or use path_offsets on the token ids."
        )
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def path_offsets(tokenizer: Any, ids: Sequence[int], known: Sequence[Offset] = ()) -> tuple[str, list[Offset]]:
    """The text of a token path, and the characters each token adds to it. Takes any tokenizer with `decode`.

    `known`: the offsets of the first tokens, if another path that begins with them was decoded before.

    The offsets are exact even if a token's text depends on the tokens before it: every prefix is decoded, which is
    quadratic in the length. Linear for a WordTokenizer and for byte-level tokens, whose texts are simply joined. A
    special token, or part of an incomplete character, adds nothing.
    """
    if isinstance(tokenizer, WordTokenizer) and type(tokenizer).decode is WordTokenizer.decode:
        return tokenizer.decode_with_offsets(ids)
    ends = [end for _, end in known]
    if _is_byte_level(tokenizer):
        ends += _ends(tokenizer, ids, len(known))
    else:
        ends += [len(_decode(tokenizer, ids[: count + 1])) for count in range(len(known), len(ids))]
    return _decode(tokenizer, ids), list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a path's bytes are those of its tokens, one after the other, as in GPT-2, Llama 3, Qwen and SmolLM2."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return type(decoder).__name__ == "ByteLevel"


def _ends(tokenizer: Any, ids: Sequence[int], start: int) -> list[int]:
    """Length of the text of ids[: n] for every n above `start`, from the tokens after the last complete character that is
    at least a window back."""
    ends: list[int] = []
    before = _raw(tokenizer, ids[:start])
    done, length = (start, len(before)) if before == _complete(before) else (0, 0)
    texts = _texts(tokenizer, ids[start:])
    for count in range(start + 1, len(ids) + 1):
        alone = texts[ids[count - 1]]
        if done == count - 1 and _HALF not in alone:  # whole characters after whole characters
            done, length = count, length + len(alone)
            ends.append(length)
            continue
        text = _raw(tokenizer, ids[done:count])
        whole = _complete(text)
        ends.append(length + len(whole))
        if count - done >= _WINDOW and whole == text:
            done, length = count, ends[-1]
    return ends


def _texts(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """The text of each token on its own, of these and of all that were asked for before."""
    known = _known.setdefault(tokenizer, {})
    known.update({token: _raw(tokenizer, [token]) for token in set(ids).difference(known)})
    return known


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids, without an incomplete character at its end."""
    return _complete(_raw(tokenizer, ids))


def _raw(tokenizer: Any, ids: Sequence[int]) -> str:
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.decode(ids)
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _complete(text: str) -> str:
    return text.rstrip(_HALF)
