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

    Decodes every prefix, except with a WordTokenizer: the cost is quadratic in the length, and the offsets
    are exact even if a token's text depends on the tokens before it. A special token, or part of an incomplete
    character, adds nothing.
    """
    if type(tokenizer) is WordTokenizer:  # a word's text does not depend on its neighbours
        return tokenizer.decode_with_offsets(ids)
    ends = [end for _, end in known]
    ends += [len(_decode(tokenizer, ids[: count + 1])) for count in range(len(known), len(ids))]
    return _decode(tokenizer, ids), list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.decode(ids)
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
