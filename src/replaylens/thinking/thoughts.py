"""The thoughts of a Thinking-States model: their record, their captured rows, and the sites that these have."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from replaylens.engine.loop.lane import Lane
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.sites import Site, SiteTable
from replaylens.engine.request.capture import Recording, RowRun, Rows
from replaylens.engine.request.placed import PlacedEdit
from replaylens.thinking.model import COMPRESS_SITE, STATE_SITE, THINK_SITE, ThinkingConfig

# ---- thoughts --------------------------------------------------------------------------------------------------------
# `Thought` and `Thoughts`: the thoughts of a model on a prompt, and their captured rows, by position like all others.
#
# | site | letter | row at token position p |
# |---|---|---|
# | thinking.state | S | the state added at p: [d_model]; zero if the thought before its chunk is empty |
# | thinking.hook_out | T | T's rows of the chunk that ends at p, by thought step: [max_thought, d_model] |
# | compress.hook_out | C | C's rows of the same thought, by place in the thought: [max(max_thought, c), d_model] |
# | thinking.tokens | Z | the thought's tokens: [max_thought], padded with -1 |
# | thinking.entropy, .top_ids, .top_logprobs, .full | Z | the distribution that each token was chosen from, by thought step |
#
# If no chunk ends at p, or the thought has no such step, rows are zero (ids -1).

TOP_K = 8
"""number of the likeliest tokens kept of each step's distribution"""
TOKENS_SITE, FULL_SITE = "thinking.tokens", "thinking.full"
LETTERS = {
    STATE_SITE: "S",
    THINK_SITE: "T",
    COMPRESS_SITE: "C",
    TOKENS_SITE: "Z",
    "thinking.entropy": "Z",
    "thinking.top_ids": "Z",
    "thinking.top_logprobs": "Z",
    FULL_SITE: "Z",
}
"""all sites of thoughts"""
DISTRIBUTION_SITES = tuple(site for site, letter in LETTERS.items() if letter == "Z" and site != TOKENS_SITE)


@dataclass(frozen=True, eq=False)
class Thought:
    """The thought after one chunk."""

    tokens: tuple[int, ...]
    """including <EOS>; <EOS> alone is the empty thought"""
    hidden: Tensor
    """T's rows that the tokens are read from: [steps, d_model]; a thought cut off at the limit has one step less than tokens"""
    source: Rows | Callable[[Tensor], Rows]
    """the distribution of each step, or what reads it from `hidden`"""
    compressed: Tensor
    """C's rows: [rows, d_model]; none for an empty thought"""
    state: Tensor
    """the state for the next chunk: [c, d_model]"""

    def __repr__(self) -> str:
        return f"Thought(tokens={self.tokens}, state of {' x '.join(map(str, self.state.shape))})"

    @property
    def empty(self) -> bool:
        return len(self.tokens) == 1

    @cached_property
    def distribution(self) -> Rows:
        """The distribution that each step's token was chosen from: by site, [steps, ...]. Read on first use."""
        return self.source(self.hidden) if callable(self.source) else self.source

    def copy(self) -> "Thought":
        """A copy with its own tensors."""
        known = self.source if callable(self.source) and "distribution" not in vars(self) else self.distribution
        source = known if callable(known) else {site: x.clone() for site, x in known.items()}
        return Thought(self.tokens, self.hidden.clone(), source, self.compressed.clone(), self.state.clone())


@dataclass(frozen=True)
class Round:
    """One round of a prefill: chunks [first, last) ran together, [first, kept) were accepted, the rest was rolled back."""

    first: int
    kept: int
    last: int
    dropped: tuple[tuple[int, ...], ...] = ()
    """the thoughts of chunks [kept, last), which were rolled back with them"""


@dataclass(frozen=True, eq=False)
class Thoughts:
    """The thoughts of a prompt's chunks in order, and the states that its chunks received."""

    config: ThinkingConfig
    blank: Thought
    """any thought of the model, for the shapes of empty rows"""
    chunks: tuple[Thought, ...] = ()
    states: Mapping[int, PlacedEdit] = field(default_factory=dict)
    """by the chunk that receives it; other chunks receive nothing"""
    inner: tuple[PlacedEdit, ...] = ()
    """the interventions on S, T and C that applied"""
    rounds: tuple[Round, ...] = ()

    def __repr__(self) -> str:
        chunks = f"{len(self.chunks)} chunks of {self.config.chunk} tokens"
        return f"Thoughts({chunks}, {sum(not t.empty for t in self.chunks)} with a thought, {len(self.rounds)} rounds)"

    def copy(self) -> "Thoughts":
        """A copy with its own tensors, which the caller may change without affecting the engine."""
        states = {i: edit if edit.value is None else replace(edit, value=edit.value.clone()) for i, edit in self.states.items()}
        chunks = tuple(thought.copy() for thought in self.chunks)
        return Thoughts(self.config, self.blank.copy(), chunks, states, self.inner, self.rounds)

    def until(self, length: int) -> "Thoughts":
        """The part that depends only on the first `length` tokens: thoughts of whole chunks, and the states they produce."""
        whole = length // self.config.chunk
        states = {i: edit for i, edit in self.states.items() if i <= whole}
        return Thoughts(self.config, self.blank, self.chunks[:whole], states, self.inner)

    def others(self, edits: Iterable[PlacedEdit]) -> tuple[PlacedEdit, ...]:
        """The lane's edits that are interventions, not these states."""
        mine = {id(edit) for edit in self.states.values()}
        return tuple(edit for edit in edits if id(edit) not in mine)

    def rows(self, site: str, start: int, end: int) -> Tensor:
        """The site's rows at token positions [start, end)."""
        if site == STATE_SITE:
            return self._states(start, end)
        rows = _blank(self, site, end - start)
        for number, thought in enumerate(self.chunks):
            place = (number + 1) * self.config.chunk - 1 - start
            if 0 <= place < end - start:
                value = _values(site, thought)
                rows[place, : len(value)] = value
        return rows

    def _states(self, start: int, end: int) -> Tensor:
        rows = torch.zeros(end - start, self.blank.hidden.shape[1], dtype=torch.float32)
        for edit in self.states.values():
            for position in edit.positions(start, end):
                assert edit.value is not None
                rows[position - start] = edit.value[position - edit.start]
        return rows


def thoughts_of(lane: Lane) -> Thoughts | None:
    """The thoughts on a lane's prompt; None: its model does not think."""
    return lane.carried if isinstance(lane.carried, Thoughts) else None


def _values(site: str, thought: Thought) -> Tensor:
    """The values of one thought at a site, by step or place: [steps, ...]"""
    if site == TOKENS_SITE:
        return torch.tensor(thought.tokens, dtype=torch.int32)
    blocks = {THINK_SITE: thought.hidden, COMPRESS_SITE: thought.compressed}
    return blocks[site] if site in blocks else thought.distribution.get(site, torch.empty(0, dtype=torch.float32))


def _blank(thoughts: Thoughts, site: str, count: int) -> Tensor:
    """Rows of a site without a thought."""
    like = _values(site, thoughts.blank)
    steps = thoughts.config.compressed if site == COMPRESS_SITE else thoughts.config.max_thought
    nothing = -1 if like.dtype == torch.int32 else 0
    return torch.full((count, steps, *like.shape[1:]), nothing, dtype=like.dtype)


class ThinkingRecording(Recording):
    """Captured rows of a branch that thinks. Rows of thoughts are made on demand."""

    def __init__(self, thoughts: Thoughts, wanted: tuple[str, ...], base: int = 0) -> None:
        super().__init__(base)
        self.thoughts, self.wanted = thoughts, wanted

    def _empty(self, base: int) -> "ThinkingRecording":
        return ThinkingRecording(self.thoughts, self.wanted, base)

    def _captured(self) -> Collection[str]:
        return [*super()._captured(), *self.wanted] if self.chunks else []

    def pieces(self, site: str) -> list[Tensor]:
        return [self.thoughts.rows(site, self.base, self.end)] if site in self.wanted else super().pieces(site)

    def runs(self, sites: Sequence[str]) -> list[RowRun]:
        made = any(site in self.wanted for site in sites)
        return [({s: self.peek(s) for s in sites}, None, 0, self.end - self.base)] if made else super().runs(sites)


# ---- sites -----------------------------------------------------------------------------------------------------------
# The sites of a Thinking-States model: those of its backbone and those of its thoughts.


class ThinkingSites(SiteTable):
    """S, T, C and Z also select the sites of thoughts, except whole distributions, which are selected by name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for name in LETTERS:
            self.sites[name] = Site(name, None, (config.d_model,), ())

    def letter(self, letter: str) -> list[str]:
        thoughts = [name for name, own in LETTERS.items() if own == letter and name != FULL_SITE]
        return [*super().letter(letter), *thoughts]

    def in_order(self) -> list[str]:
        return [*super().in_order(), *LETTERS]
