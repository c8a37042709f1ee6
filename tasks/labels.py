"""Token labels for any tokenizer: labels belong to characters, offsets map them to tokens.

`offsets_of` gives the offsets of a text as the tokenizer splits it. `path_offsets` gives those of a list of token ids,
which may split the text differently (a forced token, a sampled path).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from replaylens.tasks.errors import BadTokenizer
from replaylens.tasks.reading import Label, Offset, Reading
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import WordTokenizer

_WINDOW = 8
"""byte-level tokens that are decoded again with each of the next ones"""


def label_tokens(
    labelled: Reading | Example, offsets: Iterable[Offset], names: Sequence[str] | None = None
) -> dict[str, list[Label]]:
    """The value of each label (default: all of them) at every token.

    A token takes the labels in force after its last character. Tokens without characters, and those beyond the
    readable part of the text, get None. Raises UnknownLabel.
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
    for count in range(start + 1, len(ids) + 1):
        text = _raw(tokenizer, ids[done:count])
        whole = _complete(text)
        ends.append(length + len(whole))
        if count - done >= _WINDOW and whole == text:
            done, length = count, ends[-1]
    return ends


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids, without an incomplete character at its end."""
    return _complete(_raw(tokenizer, ids))


def _raw(tokenizer: Any, ids: Sequence[int]) -> str:
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.decode(ids)
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _complete(text: str) -> str:
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
