"""`Stage`: changes rows of prompts and reads the answers again, every variant on the same cached prefix.

A variant is a function from a subject to the change that is added to its rows. It becomes an edit of a fork: the KV cache
before the first changed position is shared with the base branch, everything after it comes from the canonical pass.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from replaylens.probes.checks import example_list
from replaylens.probes.data.positions import Position, add_places
from replaylens.probes.errors import BadPosition, MissingLabel, ProbeError
from replaylens.tasks import Example, path_offsets

_BATCH = 32


@dataclass(frozen=True, eq=False)
class Subject:
    """One prompt with the rows to change."""

    example: Example
    tokens: list[int]
    positions: list[int]
    """positions of the rows to change, ascending"""
    rows: Tensor
    """[positions, d]: before the change"""
    classes: list[str]
    """the label at each of these positions"""
    logits: Tensor
    """[answers]: logits of the task's answers after the prompt"""

    @property
    def answer(self) -> int:
        """The number of the model's own answer."""
        return int(self.logits.argmax())


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of a variant, per subject."""

    flipped: np.ndarray
    """1 if the most likely answer is no longer the model's own, else 0"""
    pull: np.ndarray
    """decrease in nats of the margin of the model's own answer over the best other one"""


Variant = Callable[[Subject], np.ndarray]
"""a subject -> [positions, d], to be added to its rows"""


class Stage:
    """Prompts of one task on one engine; rows at one site and position."""

    def __init__(self, engine: Engine, examples: Sequence[Example], site: str, label: str, position: str = "query") -> None:
        self.engine, self.site, self.label = engine, engine.sites.resolve(site), label
        self.final = engine.sites.per_layer("S")[-1]
        self.position = Position.parse(position)
        examples = example_list(examples)
        self.answers = _single_tokens(engine, examples[0].maker.answers())
        self.subjects: list[Subject] = []
        for first in range(0, len(examples), _BATCH):
            self.subjects += self._look(examples[first : first + _BATCH])

    @property
    def roots(self) -> np.ndarray:
        return np.array([subject.example.root for subject in self.subjects])

    @property
    def groups(self) -> np.ndarray:
        """The beginning of each prompt up to its last changed row: prompts that begin alike have the same rows there."""
        begun = [np.array(subject.tokens[: subject.positions[-1] + 1]).tobytes() for subject in self.subjects]
        return np.array([hashlib.sha256(tokens).hexdigest()[:16] for tokens in begun])

    def play(self, variants: Sequence[Variant]) -> list[Effect]:
        """Apply every variant to every subject and read the answers again."""
        flipped, pull = np.zeros((2, len(variants), len(self.subjects)))
        with closing(self._forks(variants, [self.final])) as played:
            for number, subject, _, forks in played:
                for v, fork in enumerate(forks):
                    after = self._answer_logits(fork, len(subject.tokens))
                    flipped[v, number] = int(after.argmax()) != subject.answer
                    pull[v, number] = _margin(subject.logits, subject.answer) - _margin(after, subject.answer)
        return [Effect(flipped[v], pull[v]) for v in range(len(variants))]

    def ask(self, variants: Sequence[Variant]) -> list[Effect]:
        """Apply every variant; what follows the prompt, over the whole vocabulary?

        Here an effect is flipped where the most likely token is not the first of the right answer, and its pull is the
        divergence of the model's own distribution from the changed one: KL(own || changed), in nats.
        """
        flipped, pull = np.zeros((2, len(variants), len(self.subjects)))
        with closing(self._forks(variants, [self.final])) as played:
            for number, subject, base, forks in played:
                right = self.engine.text.encode(subject.example.answer, special=False)[0]
                own = self._logits(base, len(subject.tokens)).log_softmax(-1)
                for v, fork in enumerate(forks):
                    after = self._logits(fork, len(subject.tokens)).log_softmax(-1)
                    flipped[v, number] = int(after.argmax()) != right
                    pull[v, number] = float((own.exp() * (own - after)).sum())
        return [Effect(flipped[v], pull[v]) for v in range(len(variants))]

    def answers_to(self, paths: Sequence[list[int]]) -> list[int]:
        """The number of the model's answer to each of these prompts of tokens."""
        found = []
        for first in range(0, len(paths), _BATCH):
            with held(list(self.engine.prompts(paths[first : first + _BATCH], sites=[self.final]))) as branches:
                found += [int(self._answer_logits(branch, branch.length).argmax()) for branch in branches]
        return found

    def last_rows(self, variants: Sequence[Variant], site: str) -> list[np.ndarray]:
        """For each variant, the prompts' last rows [subjects, d] of a site after the change."""
        found: list[list[Tensor]] = [[] for _ in variants]
        with closing(self._forks(variants, [site])) as played:
            for _, subject, _, forks in played:
                for rows, fork in zip(found, forks, strict=True):
                    rows.append(fork.activations.peek(site)[len(subject.tokens) - 1])
        return [torch.stack(rows).double().numpy() for rows in found]

    def _forks(
        self, variants: Sequence[Variant], sites: list[str]
    ) -> Generator[tuple[int, Subject, Branch, "list[Branch]"], None, None]:
        """(number, subject, its branch, one computed fork per variant); forks share the KV cache of their subject's prompt.

        Close the generator: the branches of a batch live until the next batch.
        """
        for first in range(0, len(self.subjects), _BATCH):
            some = self.subjects[first : first + _BATCH]
            edits = [[self._edit(subject, variant) for variant in variants] for subject in some]
            with held(list(self.engine.prompts([s.tokens for s in some], sites=sites))) as bases, held([]) as forks:
                for base, own in zip(bases, edits, strict=True):
                    for edit in own:
                        forks += base.fork(1, edits=[edit])
                self.engine.forest.compute([fork.lane for fork in forks])
                for i, subject in enumerate(some):
                    yield first + i, subject, bases[i], forks[i * len(variants) : (i + 1) * len(variants)]

    def _edit(self, subject: Subject, variant: Variant) -> Edit:
        value = torch.as_tensor(np.asarray(variant(subject)), dtype=torch.float32)
        return Edit(self.site, "add", value, positions=subject.positions)

    def _look(self, examples: Sequence[Example]) -> list[Subject]:
        found = []
        with held(list(self.engine.prompts([e.prompt for e in examples], sites=[self.final, self.site]))) as branches:
            for example, branch in zip(examples, branches, strict=True):
                positions, classes = self._places(example, branch.tokens)
                if positions:
                    rows = branch.activations[self.site][positions]
                    logits = self._answer_logits(branch, branch.length)
                    found.append(Subject(example, branch.tokens, positions, rows, classes, logits))
        if not found:
            raise BadPosition(f"No prompt has label {self.label!r} at position {self.position.spec!r}. Choose another.")
        return found

    def _answer_logits(self, branch: Branch, length: int) -> Tensor:
        return self._logits(branch, length)[self.answers]

    def _logits(self, branch: Branch, length: int) -> Tensor:
        """[vocabulary]: after the token at the end of this length."""
        row = branch.activations.peek(self.final)[length - 1 : length]
        return self.engine.lock.alone(self.engine.runner.logits, row)[0].double().cpu()

    def _places(self, example: Example, tokens: list[int]) -> tuple[list[int], list[str]]:
        """Positions of the prompt that the spec selects, with the label at each."""
        text, offsets = path_offsets(self.engine.text.tokenizer, tokens)
        labels = example.maker.read(text, example.index).labels_at(offsets)
        name = example.maker.state_label if self.label == "state" and "state" not in labels else self.label
        if name not in labels:
            raise MissingLabel(f"Unknown label {self.label!r}. The task has {', '.join(labels)}.")
        frame = pd.DataFrame({key: pd.Series(values, dtype=object) for key, values in labels.items()})
        frame = frame.assign(example=0, branch=0, fork_position=0, position=range(len(tokens)), token_state="prompt")
        mask = self.position.mask(add_places(frame, knows_steps=True)) & frame[name].notna().to_numpy()
        chosen = np.flatnonzero(mask)
        return [int(p) for p in chosen], [str(labels[name][p]) for p in chosen]


@contextmanager
def held(branches: "list[Branch]") -> "Iterator[list[Branch]]":
    """Release the branches at the end, also after an error. More may be appended in between."""
    try:
        yield branches
    finally:
        for branch in branches:
            branch.release()


def _single_tokens(engine: Engine, words: Sequence[str]) -> list[int]:
    """Token ids of the answers. Raises ProbeError unless there are at least two, of one token each."""
    ids = [engine.text.encode(word, special=False) for word in words]
    if len(ids) < 2 or any(len(each) != 1 for each in ids):
        raise ProbeError(f"Cannot compare answers {list(words[:4])}. Use a task with at least two answers of one token each.")
    return [each[0] for each in ids]


def _margin(logits: Tensor, answer: int) -> float:
    """The margin of an answer over the best other one, in nats."""
    others = logits.clone()
    others[answer] = -torch.inf
    return float(logits[answer] - others.max())
