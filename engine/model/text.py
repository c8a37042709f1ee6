"""`Text`: the engine's interface to a tokenizer."""

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any, TypeGuard

from torch import Tensor

from replaylens.engine.errors import BadRequest, BadTexts, MissingPackage, UnknownPromptWord
from replaylens.tasks import errors as tasks

Chat = Sequence[Mapping[str, str]]
"""messages, each {"role": ..., "content": ...}"""
Prompt = str | Sequence[int] | Tensor | Chat
"""whatever is turned into the tokens of one path: a text, token ids or a chat"""
_KEYS = ("role", "content")
_MESSAGES = "a list of messages {'role': ..., 'content': ...}, both texts"


def is_chat(prompt: Any) -> TypeGuard[Chat]:
    """Whether this is meant as one chat: a list in which some entry is a mapping, however malformed it may be."""
    if not isinstance(prompt, list | tuple) or set(map(type, prompt)) == {int}:  # token ids may be many
        return False
    return any(isinstance(each, Mapping) for each in prompt)


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
    def foreign_end(self) -> int | None:
        """`eos_id` of a tokenizer that is not our own."""
        return None if self._ours else self.eos_id

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

    def written(self, chat: Chat) -> str:
        """A chat as the tokenizer's template writes it, special tokens included. If its last message is the assistant's, the
        text ends within it, to be continued; else it ends with the words that begin an answer."""
        messages = [_message(number, each) for number, each in enumerate(chat)]
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        return self.templated(messages, add_generation_prompt=not goes_on, continue_final_message=goes_on)

    def templated(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Messages as the tokenizer's template writes them. `options`: those of `apply_chat_template`, such as tools."""
        if self.tokenizer is None:
            raise BadRequest("This engine has no tokenizer. Give token ids instead of a chat, or load it with a tokenizer.")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise BadTexts(
                f"A chat was given, but the tokenizer {type(self.tokenizer).__name__} has no chat template. Load a model that "
                "was trained on chats, set the tokenizer's chat_template, or give the text as the model was trained to read it."
            )
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except ImportError as error:
            raise MissingPackage(f"Chat templates need a package that is missing: {error}") from None
        except Exception as error:  # templates are programs, and raise what they like
            raise BadRequest(f"The chat template refused {shown(messages)}: {error}") from error

    def encode(self, text: str | Chat, special: bool = True) -> list[int]:
        """The token ids of a text or a chat. `special` adds what the tokenizer puts before a prompt; a chat's template has
        written it already."""
        if not isinstance(text, str):
            text, special = self.written(text), False
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


def _message(number: int, given: Any) -> dict[str, str]:
    """One message of a chat; BadRequest says what is wrong with it."""
    if not isinstance(given, Mapping):
        raise BadRequest(f"Message {number} of the chat is {shown(given)}. Give {_MESSAGES}.")
    if missing := [key for key in _KEYS if key not in given]:
        raise BadRequest(f"Message {number} of the chat, {shown(dict(given))}, has no {missing[0]!r}. Give {_MESSAGES}.")
    if more := [key for key in given if key not in _KEYS]:
        raise BadRequest(
            f"Message {number} of the chat has the unknown key {more[0]!r}. Give {_MESSAGES}; for tools and other fields, give "
            "the token ids that the tokenizer's apply_chat_template returns."
        )
    if wrong := [key for key in _KEYS if not isinstance(given[key], str)]:
        raise BadRequest(f"The {wrong[0]} of message {number} of the chat is {shown(given[wrong[0]])}. Give a text.")
    return {key: given[key] for key in _KEYS}
