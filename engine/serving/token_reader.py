"""`TokenReader`: texts and ids as checked token ids of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.text import Prompt, Text, is_chat
from replaylens.engine.request.edits import Edit, listed
from replaylens.engine.request.values import items, one_path, shown, token_ids


class TokenReader:
    """A tokenizer, and a model whose vocabulary and positions bound what it reads."""

    text: Text
    config: ModelConfig

    def tokens_of(self, text: Prompt) -> list[int]:
        """The token ids of a prompt: a text, token ids, or a chat, which the tokenizer's own template writes.

        BadRequest if it is empty, too long, or has ids outside the vocabulary; NoChatTemplate if there is no template."""
        return self._check_tokens(self._ids(text))

    def _ids(self, prompt: Prompt, special: bool = True) -> list[Any]:
        """The one place where a prompt becomes token ids, which are not checked yet."""
        return self.text.encode(prompt, special) if isinstance(prompt, str) or is_chat(prompt) else one_path(prompt)

    def token_ids_of(self, tokens: Sequence[str | int]) -> list[int]:
        """Ids of single tokens, given as text or ids; BadRequest names one that is several tokens."""
        return [self._target(token) for token in items("tokens", tokens, "a list of tokens, as text or ids")]

    def tokenized(self, edits: Sequence[Edit]) -> list[Edit]:
        """The edits with the ids of their tokens; BadEdit names a text that is several tokens."""
        return [self._tokenized(edit) for edit in listed(edits)]

    def _tokenized(self, edit: Edit) -> Edit:
        if edit.tokens is None:
            return edit
        try:
            return replace(edit, tokens=self.token_ids_of(edit.plain().tokens))  # type: ignore[arg-type]
        except BadRequest as error:
            raise BadEdit(f"Invalid tokens of an edit at {edit.site}. {error}") from error

    def _check_tokens(self, ids: list[int], before: int = 0) -> list[int]:
        """The ids; BadRequest if there are none, too many, or some outside the vocabulary."""
        if not ids:
            raise BadRequest("The prompt is empty. Give at least one token.")
        usual = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.config.vocab_size
        wrong = lambda t: isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < self.config.vocab_size  # noqa: E731
        if bad := [] if usual else [t for t in ids if wrong(t)]:
            if isinstance(bad[0], bool) or not isinstance(bad[0], int):
                raise BadRequest(
                    f"{shown(bad[0])} is a {type(bad[0]).__name__}, not a token id. Give text, or ids as whole numbers."
                )
            last = self.config.vocab_size - 1
            raise BadRequest(f"Token {bad[0]} is not in the vocabulary of {last + 1} tokens. Give ids from 0 to {last}.")
        if before + len(ids) > self.config.max_positions:
            raise BadRequest(f"{before + len(ids)} tokens exceed the model's {self.config.max_positions} positions.")
        return ids

    def _target(self, target: str | int) -> int:
        if not isinstance(target, str):
            return self._check_tokens(token_ids("targets", [target]))[0]
        ids = self.text.encode(target, special=False)
        if len(ids) != 1:
            raise BadRequest(f"Target {target!r} is {len(ids)} tokens. Give targets of one token each.")
        return ids[0]
