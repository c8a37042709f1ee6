"""`Recipe`: everything that determines a trained model, except the machine."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from replaylens import tasks
from replaylens.engine.errors import BadConfig, BadRecipe, BadRequest
from replaylens.engine.model.config import ModelConfig
from replaylens.tasks.errors import TaskError
from replaylens.tasks.reading import Offset
from replaylens.tasks.task import Task
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.weights import hub
from replaylens.weights.opening import load_text
from replaylens.weights.zoo import TOKENIZER_FILE

# ---- tokenizer -------------------------------------------------------------------------------------------------------
# `Tokenizer`: the protocol that training on task texts needs, for word tokenizers and those of pretrained backbones.
#
# A Hugging Face tokenizer is wrapped in `PretrainedTokenizer`:
#
# | use | taken from it |
# |---|---|
# | end of thoughts, chains of thought and completions | its end-of-sequence token; SmolLM2: <|im_end|> |
# | padding of a prompt to a chunk border | its padding token, or the other special token with the lowest id (below) |
# | prompts | with its leading special tokens, as in a replay by the engine |
# | thoughts and completions | without special tokens, each encoded separately |
#
# SmolLM2 pads with <|endoftext|>. Where the padding token is the end-of-sequence token, another one is taken, because a
# baseline writes its chain of thought between padding and <EOS>.


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
        """Write it to a model folder, as the file `path`; a Hugging Face tokenizer adds files next to it."""
        ...


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer in a model's folder, by name."""
    if isinstance(tokenizer, WordTokenizer):
        return {TOKENIZER_FILE: tokenizer.to_json().encode()}
    with TemporaryDirectory() as folder:  # only what wrote it knows its files
        tokenizer.save(Path(folder) / TOKENIZER_FILE)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


class PretrainedTokenizer:
    """A Hugging Face tokenizer as a `Tokenizer`. BadConfig if it has no <EOS>, or gives no offsets."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise BadConfig("The tokenizer has no <EOS>, which a Thinking-States model needs. Set its eos_token and save it.")
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
    if name == hub.SMOLLM2:
        return hub.fetched_folder()
    if not Path(name).is_dir():
        raise BadRequest(f"No backbone {name!r}. Give {hub.SMOLLM2}, or a folder with a model and its tokenizer.")
    return Path(name)


# ---- recipe ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecipePart:
    """One part of the training texts: a task with some of its knobs set. The trainer sets its length knob."""

    task: str
    weight: float
    """this part's share of every batch, relative to the other parts"""
    knobs: tuple[tuple[str, Any], ...] = ()

    def of_length(self, length: int, seed: int) -> Task[Any]:
        """The task with examples of exactly `length` steps. BadRecipe if the part itself sets length or seed."""
        kind = tasks.get(self.task)
        for name in (kind.length_knob, "seed"):
            if name in dict(self.knobs):
                raise BadRecipe(f"A part sets the knob {name!r} of task {self.task!r}, which the trainer sets. Leave it out.")
        return kind(**dict(self.knobs), **{kind.length_knob: length}, seed=seed)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model, except the machine. Immutable; checked on creation."""

    config: ModelConfig
    parts: tuple[RecipePart, ...]
    longest: int
    """training texts have 1 to this many steps"""
    steps: int
    batch: int
    lr: float
    """peak learning rate"""
    seed: int
    warmup: int = 100
    """number of steps in which the learning rate rises from 0"""
    curriculum: float = 0.5
    """share of the run in which the longest text grows from 1 step to `longest`; after that, all lengths are drawn"""
    completion_weight: float = 10.0
    """weight of a completion's tokens in the loss; a prompt's tokens, mostly names that cannot be predicted, have weight 1"""
    init_scale: float = 2.0
    """factor on the initial matrices; with 1, chains of thought take more than twice as many steps to learn as with 2"""
    pool: int = 4096
    """examples per part and length; batches are drawn from these with replacement"""

    def __post_init__(self) -> None:
        for name in ("longest", "steps", "batch", "pool"):
            _demand(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("lr", "completion_weight", "init_scale"):
            value = getattr(self, name)
            _demand(math.isfinite(value) and value > 0, f"{name} must be a positive number, not {value}.")
        _demand(0 <= self.curriculum <= 1, f"curriculum must be a share of the run, from 0 to 1, not {self.curriculum}.")
        _demand(0 <= self.warmup <= self.steps, f"warmup must be between 0 and {self.steps} steps, not {self.warmup}.")
        _demand(self.seed >= 0, f"seed must be an integer from 0 up, not {self.seed}.")
        self._check_parts()

    def _check_parts(self) -> None:
        _demand(bool(self.parts), "parts is empty. Give at least one task to train on.")
        _demand(
            all(math.isfinite(part.weight) and part.weight > 0 for part in self.parts),
            "A part has a weight of 0 or less. Give a weight above 0, or leave it out.",
        )
        _demand(min(self.sequences()) >= 1, f"A batch of {self.batch} gives some part no sequence: {self.sequences()}.")
        try:
            for part in self.parts:
                for length in (1, self.longest):
                    part.of_length(length, self.seed)
        except TaskError as error:
            raise BadRecipe(f"A part of the recipe is not a valid task: {error}") from error
        words = self.tokenizer().vocab_size
        _demand(
            self.config.vocab_size == words,
            f"The config's vocab_size is {self.config.vocab_size}, but the tokenizer has {words} tokens.",
        )

    def sequences(self) -> list[int]:
        """Number of sequences of each part in a batch; the sum is `batch`."""
        whole, ends = sum(part.weight for part in self.parts), [0.0]
        for part in self.parts:
            ends.append(ends[-1] + part.weight)
        cuts = [round(end / whole * self.batch) for end in ends]
        return [cuts[i + 1] - cuts[i] for i in range(len(self.parts))]

    def tokenizer(self) -> Tokenizer:
        """A tokenizer of the words of all tasks of the recipe, for any knobs."""
        return words_of(self.parts)

    def to_json(self) -> str:
        """A stable text form; equal recipes give equal bytes."""
        return json.dumps(asdict(self), sort_keys=True)


def words_of(parts: Iterable[RecipePart]) -> WordTokenizer:
    """A tokenizer of the words of all tasks of these parts, for any knobs."""
    words = chain.from_iterable(tasks.get(part.task).vocabulary() for part in parts)
    return WordTokenizer(sorted(set(words)))


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise BadRecipe(otherwise)
