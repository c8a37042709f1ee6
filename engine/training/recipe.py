"""`Recipe`: everything that determines a trained model, except the machine."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from replaylens import tasks
from replaylens.engine.errors import BadRecipe
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.training.tokenizer import Tokenizer
from replaylens.tasks import Task, TaskError, WordTokenizer


@dataclass(frozen=True)
class Part:
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
    parts: tuple[Part, ...]
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


def words_of(parts: Iterable[Part]) -> WordTokenizer:
    """A tokenizer of the words of all tasks of these parts, for any knobs."""
    words = chain.from_iterable(tasks.get(part.task).vocabulary() for part in parts)
    return WordTokenizer(sorted(set(words)))


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise BadRecipe(otherwise)
