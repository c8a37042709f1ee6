"""`Tokenizer`: the protocol that training on task texts needs, for word tokenizers and those of pretrained backbones.

A Hugging Face tokenizer is wrapped in `PretrainedTokenizer`:

| use | taken from it |
|---|---|
| end of thoughts, chains of thought and completions | its end-of-sequence token; SmolLM2: <|im_end|> |
| padding of a prompt to a chunk border | its padding token. If that is the end-of-sequence token, the other special token with the lowest id, because a baseline writes its chain of thought between padding and <EOS>; SmolLM2: <|endoftext|> |
| prompts | with its leading special tokens, as in a replay by the engine |
| thoughts and completions | without special tokens, each encoded separately |
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
    """Text to tokens. `WordTokenizer` satisfies it."""

    @property
    def eos_id(self) -> int:
        """The id that ends thoughts and completions."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that pads prompts to a chunk border."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Offset]]:
        """The ids of a prompt, and the characters [start, end) of each token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        ...

    def save(self, path: Path) -> None:
        """Write it to a model folder, as the file `path`; a Hugging Face tokenizer adds files beside it."""
        ...


class PretrainedTokenizer:
    """A Hugging Face tokenizer as a `Tokenizer`. BadConfig if it has no <EOS>, or gives no offsets."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise BadConfig("The tokenizer has no <EOS>, which a model that thinks needs. Set its eos_token and save it.")
        if not tokenizer.is_fast:
            raise BadConfig(
                f"{type(tokenizer).__name__} gives no character offsets, which thoughts need. Save the model with its fast "
                "tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.eos_id = int(tokenizer.eos_token_id)
        self.pad_id = _padding(tokenizer)
        self.vocab_size = len(tokenizer)
        self._encode = lru_cache(65536)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))  # cached: thoughts repeat a handful of words

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
    """The tokenizer in a model folder, a `WordTokenizer` or Hugging Face's. Cached: later changes to the files are ignored."""
    found = load_text(folder).tokenizer
    if found is None:
        raise BadConfig(f"{folder} has no tokenizer. Copy the model's tokenizer files there.")
    return found if isinstance(found, WordTokenizer) else PretrainedTokenizer(found)


def backbone_folder(name: str) -> Path:
    """The folder of a pretrained backbone: `smollm2`, if fetched, or a folder."""
    if name == smollm2.SHORT:
        return smollm2.fetched_folder()
    if not Path(name).is_dir():
        raise BadRequest(f"No backbone {name!r}. Give {smollm2.SHORT}, or a folder with a model and its tokenizer.")
    return Path(name)
