"""`Text`: the engine's interface to a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadRequest, UnknownPromptWord
from replaylens.tasks import errors as tasks
from replaylens.tasks.tokenizer import WordTokenizer


class Text:
    """Wraps our `WordTokenizer` or a Hugging Face tokenizer. Without one, only token ids are accepted."""

    def __init__(self, tokenizer: Any | None) -> None:
        known = hasattr(tokenizer, "decode") and not isinstance(tokenizer, bytes | bytearray | type)
        if tokenizer is not None and not known:
            raise BadRequest(f"Invalid tokenizer={tokenizer!r:.60}. Give a WordTokenizer, a Hugging Face tokenizer, or None.")
        self.tokenizer = tokenizer
        self._ours = tokenizer is not None and hasattr(tokenizer, "encode_with_offsets")

    @property
    def eos_id(self) -> int | None:
        if self.tokenizer is None:
            return None
        found = self.tokenizer.eos_id if self._ours else getattr(self.tokenizer, "eos_token_id", None)
        return None if found is None else int(found)

    @property
    def bos_id(self) -> int | None:
        """What a tokenizer may put before a prompt."""
        found = None if self.tokenizer is None or self._ours else getattr(self.tokenizer, "bos_token_id", None)
        return None if found is None else int(found)

    @property
    def pad_id(self) -> int | None:
        """The token that fills short texts of a batch: the padding token, or else that of the end."""
        found = None if self.tokenizer is None or self._ours else getattr(self.tokenizer, "pad_token_id", None)
        return self.eos_id if found is None else int(found)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text. `special` adds what the tokenizer puts before a prompt."""
        if self.tokenizer is None:
            raise BadRequest("This engine has no tokenizer. Give token ids instead of text, or load it with a tokenizer.")
        if self._ours:
            try:
                return list(self.tokenizer.encode(text))
            except tasks.UnknownWord as e:
                raise UnknownPromptWord(e.word, e.offset) from None
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=special))
        except (TypeError, UnicodeError) as e:  # half a surrogate pair
            raise BadRequest(f"The tokenizer cannot encode {text[:60]!r}: {e}.") from e

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; without a tokenizer, the ids themselves."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        if self._ours:
            return str(self.tokenizer.decode(ids))
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str:
        """The text of one token."""
        return self.decode([token_id])

    @property
    def local(self) -> bool:
        """Whether the text of a token depends on its neighbours alone: our tokenizer, token ids, and Hugging Face's library."""
        return self.tokenizer is None or self._ours or getattr(self.tokenizer, "is_fast", False) is True

    def name(self, token_id: int) -> str:
        """The tokenizer's own name of a token, such as "<0x0A>" for a byte; its text if it has no names."""
        names = None if self.tokenizer is None or self._ours else getattr(self.tokenizer, "convert_ids_to_tokens", None)
        return self.token(token_id) if names is None else str(names(token_id))


def load_text(folder: Path) -> Text:
    """The tokenizer in a model folder, if any."""
    ours, theirs = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if theirs.exists():
        from transformers import AutoTokenizer

        return Text(AutoTokenizer.from_pretrained(folder))
    if ours.exists():
        return Text(WordTokenizer.load(ours))
    return Text(None)
