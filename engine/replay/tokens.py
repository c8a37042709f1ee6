"""Texts and token ids, as TransformerLens' verbs take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Chat, Prompt, is_chat
from replaylens.engine.request.values import integer, items, token_ids
from replaylens.engine.serving.core import Core

TokenInput = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Chat]
"""one prompt, or several"""
TextInput = str | Chat | Sequence[str] | Sequence[Chat]
INPUTS = ("embed.hook_in", "pos_embed.hook_in")
"""names of what goes in: token ids and positions. A cache has them; as sites of a branch, see `tokens`"""


def inputs(name: str, paths: list[list[int]]) -> Tensor:
    """The token ids [batch, positions], or the positions [1, positions]."""
    return torch.tensor(paths) if name == "embed.hook_in" else torch.arange(len(paths[0]))[None]


def paths(engine: Core, tokens: TokenInput, prepend_bos: bool | None = None) -> list[list[int]]:
    """Checked token ids of sequences of one length."""
    if isinstance(tokens, str) or is_chat(tokens):
        return encoded(engine, tokens, prepend_bos)
    rows = items("tokens", tokens, "text, a chat, several of these, token ids, or several lists of them of one length")
    if rows and all(isinstance(row, str) or is_chat(row) for row in rows):
        return encoded(engine, rows, prepend_bos)
    if prepend_bos is not None:
        raise BadRequest(f"prepend_bos={prepend_bos} was given with token ids. It is for text: leave it out.")
    several = rows and all(isinstance(row, Sequence | np.ndarray | Tensor) and integer(row) is None for row in rows)
    found = [engine.tokens_of(row) for row in rows] if several else [engine.tokens_of(rows)]
    if len({len(path) for path in found}) != 1:
        raise BadRequest(
            "The sequences differ in length, but run_with_cache returns one tensor per site. Use prompts() instead."
        )
    return found


def one(engine: Core, tokens: TokenInput, prepend_bos: bool | None = None) -> list[list[int]]:
    """As `paths`, of one sequence."""
    found = paths(engine, tokens, prepend_bos)
    if len(found) != 1:
        raise BadRequest(f"Got {len(found)} sequences. Give one text, or the token ids of one.")
    return found


def encoded(engine: Core, texts: TextInput, prepend_bos: bool | None) -> list[list[int]]:
    """The token ids of texts and chats, padded on the right to the longest: a row depends on no later token."""
    accepted = "a text or a chat, or a list of these"
    listed = [texts] if isinstance(texts, str) or is_chat(texts) else items("input", texts, accepted)
    if not listed or not all(isinstance(each, str) or is_chat(each) for each in listed):
        raise BadRequest(f"Invalid input={texts!r:.60}. Give {accepted}.")
    found = [engine.tokens_of(_with_bos(engine, each, prepend_bos)) for each in listed]
    longest = max(map(len, found))
    if len(set(map(len, found))) == 1:
        return found
    pad = engine.text.pad_id
    if pad is None:
        raise BadRequest("The texts differ in length, and the tokenizer has no padding token. Use prompts() instead.")
    return [path + [pad] * (longest - len(path)) for path in found]


def lengths(engine: Core, paths: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of each sequence of a batch without the padding tokens at its end. A single sequence has none."""
    pad = engine.text.pad_id
    found = [len(path) for path in paths]
    for number, path in enumerate(paths if len(paths) > 1 and pad is not None else ()):
        while found[number] > 1 and path[found[number] - 1] == pad:
            found[number] -= 1
    return found


def _with_bos(engine: Core, text: str | Chat, prepend_bos: bool | None) -> Any:
    """What to prompt with: the text itself if its tokenizer decides, or token ids that begin as asked for."""
    if prepend_bos is None:
        return text
    if not isinstance(text, str):
        raise BadRequest(f"prepend_bos={prepend_bos} was given with a chat, whose template decides. Leave it out.")
    if not isinstance(prepend_bos, bool):
        raise BadRequest(f"Invalid prepend_bos={prepend_bos!r:.60}. Give True, False or None.")
    ids, bos = engine.text.encode(text), engine.text.bos_id
    if bos is None and prepend_bos:
        raise BadRequest("prepend_bos=True was given, but the tokenizer has no beginning-of-sequence token. Leave it out.")
    begins = bos is not None and ids[:1] == [bos]
    return ids[1:] if begins and not prepend_bos else ids if begins or not prepend_bos else [bos, *ids]


def decoded(engine: Core, tokens: TokenInput) -> str | list[str]:
    """The text of token ids; of a batch, one for each."""
    rows = items("tokens", tokens, "token ids, or several lists of them")
    if rows and all(isinstance(row, Sequence | np.ndarray | Tensor) and integer(row) is None for row in rows):
        return [engine.text.decode(engine._check_tokens(token_ids("tokens", row))) for row in rows]
    return engine.text.decode(engine._check_tokens(token_ids("tokens", rows)))
