"""`Tokenizer`: what training on task texts needs of a tokenizer, be it ours or a pretrained backbone's own.

A Hugging Face tokenizer is wrapped in `PretrainedTokenizer`:

| need | taken from it |
|---|---|
| the end of thoughts, of chains of thought and of completions | its end-of-sequence token; SmolLM2: <|im_end|> |
| filling a prompt up to a chunk border | its padding token. Where that is the end-of-sequence token: the special token with the lowest number that is not, because a baseline writes its chain of thought between padding and <EOS>; SmolLM2: <|endoftext|> |
| a prompt | with the special tokens that it puts before one, as the engine does when it replays |
| thoughts and completions | without special tokens, each on its own |
"""  # noqa: E501

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from replaylens.engine.errors import BadConfig, BadRequest
from replaylens.engine.model import smollm2
from replaylens.engine.model.text import load_text
from replaylens.tasks import WordTokenizer
from replaylens.tasks.reading import Offset


class Tokenizer(Protocol):
    """Text to tokens; `WordTokenizer` is one as it is."""

    @property
    def eos_id(self) -> int:
        """Ends thoughts and completions."""
        ...

    @property
    def pad_id(self) -> int:
        """Fills prompts up to a chunk border."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        ...

    def encode(self, text: str) -> list[int]:
        """A piece of text, without special tokens."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Offset]]:
        """A prompt, and for each token the characters [start, end) it covers."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        ...

    def save(self, path: Path) -> None:
        """Write it to a model folder, as the file `path` and, where it is not ours, files beside it."""
        ...


class PretrainedTokenizer:
    """A Hugging Face tokenizer as a `Tokenizer`. BadConfig where it has no <EOS>, or does not know where its tokens stand."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise BadConfig(
                "a model that thinks needs a tokenizer with an <EOS>, and this one has none: set its eos_token and save it"
            )
        if not tokenizer.is_fast:
            raise BadConfig(
                f"a {type(tokenizer).__name__} does not say which characters its tokens cover, so thoughts cannot be put in "
                "their places; save the model with its fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.eos_id = int(tokenizer.eos_token_id)
        self.pad_id = _padding(tokenizer)
        self.vocab_size = len(tokenizer)
        self._encode = lru_cache(65536)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))  # thoughts are a handful of words, over and over

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Offset]]:
        found = self.tokenizer(text, return_offsets_mapping=True)
        return list(found["input_ids"]), [(int(start), int(end)) for start, end in found["offset_mapping"]]

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def save(self, path: Path) -> None:
        self.tokenizer.save_pretrained(path.parent)


def _padding(tokenizer: Any) -> int:
    own, eos = tokenizer.pad_token_id, int(tokenizer.eos_token_id)
    if own is not None and own != eos:
        return int(own)
    return min((int(i) for i in tokenizer.all_special_ids if i != eos), default=eos)


@lru_cache(8)
def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model folder, ours or Hugging Face's. Read once: changing the files later has no effect."""
    found = load_text(folder).tokenizer
    if found is None:
        raise BadConfig(f"{folder} holds no tokenizer: tasks are told in words, so copy the model's tokenizer files there")
    return found if isinstance(found, WordTokenizer) else PretrainedTokenizer(found)


def backbone_folder(name: str) -> Path:
    """Where a pretrained backbone lies: `smollm2`, once fetched, or a folder."""
    if name == smollm2.SHORT:
        return smollm2.fetched_folder()
    if not Path(name).is_dir():
        raise BadRequest(f"no backbone {name!r}: give {smollm2.SHORT}, or a folder with a model and its tokenizer")
    return Path(name)
