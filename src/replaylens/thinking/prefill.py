"""`Prefiller`: computes prompts of a Thinking-States model, in rounds of guess, canonical pass, verification and rollback.

A round guesses the thoughts of the remaining chunks, adds the states that follow from them, and computes all these chunks in
one canonical pass. Then T decodes what each chunk really thinks. Chunks up to and including the first wrong guess are settled,
because their own states were right. The KV after them is rolled back, and the suffix becomes a rejected branch.

| guess      | guessed thoughts of the remaining chunks         | rounds                                               |
|------------|--------------------------------------------------|------------------------------------------------------|
| sequential | none: one chunk per round                        | number of chunks                                     |
| empty      | all empty                                        | 1 + chunks with a thought, without the last chunk    |
| drafted    | given ones, then those of the last round         | 1 if they are right; at most the number of chunks    |

All three settle the same tokens, KV, states and thoughts, to the bit: states are edits, and KV depends on path and edits alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.path import path_digest
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.model import modes
from replaylens.engine.passes import lens
from replaylens.engine.passes.lens import KnownLenses
from replaylens.engine.request.capture import CaptureSpec, Recording, Rows
from replaylens.engine.request.placed import PlacedEdit, added
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import changing
from replaylens.thinking.blocks import ThinkingBlocks, Tokens
from replaylens.thinking.model import STATE_SITE, ChunkStates
from replaylens.thinking.thoughts import (
    DISTRIBUTION_SITES,
    FULL_SITE,
    LETTERS,
    Round,
    ThinkingRecording,
    Thought,
    Thoughts,
)
from replaylens.weights.opening import Guess


@dataclass(eq=False)
class Prefill:
    """One prompt in progress. Between rounds, `lane` ends after the `settled` chunks; within a round it has more tokens."""

    lane: Lane
    path: list[int]
    """the whole prompt, in whole chunks"""
    guess: Guess
    capture: CaptureSpec | None
    """what the user captures"""
    edits: tuple[PlacedEdit, ...] = ()
    """interventions on the backbone"""
    inner: tuple[PlacedEdit, ...] = ()
    """interventions on S, T and C"""
    drafts: dict[int, Tokens] = field(default_factory=dict)
    """guessed thoughts by chunk; others are guessed to be empty"""
    thoughts: list[Thought] = field(default_factory=list)
    """those of the settled chunks"""
    states: dict[int, PlacedEdit] = field(default_factory=dict)
    """received by the settled chunks, and by the one after them"""
    rounds: list[Round] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    """branches of suffixes after a wrong guess"""
    kept: Recording | None = None
    """rows captured before, if the prompt extends a branch"""
    planted: bool = True
    """whether the lane is new; otherwise the trace records its release and plants it again"""

    @property
    def settled(self) -> int:
        return len(self.thoughts)


class Prefiller:
    """Computes prompts on the lanes of a forest."""

    def __init__(self, forest: Forest, blocks: ThinkingBlocks, lenses: KnownLenses) -> None:
        self.forest, self.blocks, self.config, self.lenses = forest, blocks, blocks.config, lenses
        self.lock = forest.lock

    def run(self, prefills: Sequence[Prefill]) -> None:
        """Settle all chunks of all prompts, together. Mutates tree, lanes, pages and trace. If one fails, all are released and
        the error is raised."""
        try:
            self._begin_all(prefills)
            while open_ := [p for p in prefills if p.settled < self._num_chunks(p)]:
                self._round(open_)
            self._end_all(prefills)
        except BaseException:
            for prefill in prefills:  # no caller has a handle on them
                self._forget(prefill)
            raise

    @changing
    def _begin_all(self, prefills: Sequence[Prefill]) -> None:
        for prefill in prefills:
            self._begin(prefill)

    @changing
    def _end_all(self, prefills: Sequence[Prefill]) -> None:
        for prefill in prefills:
            self._end(prefill)

    @changing
    def _forget(self, p: Prefill) -> None:
        """Mutates: releases a prompt; only its events in the trace remain."""
        if p.planted:
            self._trace(p.lane, None, "error")
        p.lane.rejected = [*p.rejected]
        self.forest.release(p.lane)

    def _num_chunks(self, p: Prefill) -> int:
        return len(p.path) // self.config.chunk

    def _begin(self, p: Prefill) -> None:
        """Capture what T reads, too. Z needs the next tokens, so it is read at the end."""
        spec = p.capture or CaptureSpec(())
        streams = spec.lens.sites if spec.lens else ()
        sites = tuple(dict.fromkeys([*spec.sites, *streams, self.config.read_site]))
        p.kept = p.lane.recording
        p.lane.capture = replace(spec, sites=sites, lens=None)
        known = p.settled * self.config.chunk if p.kept is None else p.kept.end - p.kept.open_end
        p.lane.recording = Recording(base=known)
        self._hand_on(p)

    # ---- one round ----------------------------------------------------------------------------------------------

    def _round(self, prefills: list[Prefill]) -> None:
        guesses = [self._guessed(p) for p in prefills]
        self._speculate_all(prefills, guesses)
        self.forest.compute([p.lane for p in prefills])
        self._judge_all(prefills, guesses)

    @changing
    def _speculate_all(self, prefills: list[Prefill], guesses: list[list[Tokens]]) -> None:
        for p, guessed in zip(prefills, guesses, strict=True):
            self._speculate(p, guessed)

    @changing
    def _judge_all(self, prefills: list[Prefill], guesses: list[list[Tokens]]) -> None:
        """Decode the actual thoughts and keep the confirmed chunks. Within the lock: all threads share the cache of T and C."""
        chunks = [chunk for p, guessed in zip(prefills, guesses, strict=True) for chunk in self._chunks(p, len(guessed))]
        wanted = {site for p in prefills if p.capture for site in p.capture.thoughts}
        found = iter(self.blocks.think(chunks, not wanted.isdisjoint(DISTRIBUTION_SITES), FULL_SITE in wanted))
        for p, guessed in zip(prefills, guesses, strict=True):
            self._judge(p, guessed, [next(found) for _ in guessed])

    def _guessed(self, p: Prefill) -> list[Tokens]:
        """The guessed thoughts of this round's chunks. The last one is not used."""
        last = p.settled + 1 if p.guess == "sequential" else self._num_chunks(p)
        return [p.drafts.get(i, (self.config.eos_token,)) for i in range(p.settled, last)]

    def _speculate(self, p: Prefill, guessed: list[Tokens]) -> None:
        """Mutates: gives the lane the round's tokens, and the states that follow from the guesses."""
        first, tree, states = p.settled, self.forest.tree, dict(p.states)
        for number, thought in enumerate(guessed[:-1], first):
            if state := self._received(p, number + 1, self.blocks.state(self.blocks.compressed(thought, number, p.inner))):
                states[number + 1] = state
        p.lane.edits = (*states.values(), *p.edits)
        end = (first + len(guessed)) * self.config.chunk
        tree.append(p.lane.branch, p.path[len(p.lane.record.tokens) : end], TokenState.DRAFT)

    def _received(self, p: Prefill, chunk: int, state: Tensor | None) -> PlacedEdit | None:
        """The edit that adds a state [c, d_model] to a chunk, after the edits on S; None: it is zero."""
        first, width = chunk * self.config.chunk, self.blocks.model.config.d_model
        rows = (
            torch.zeros(self.config.chunk, width, dtype=torch.float32) if state is None else state.to(torch.float32, copy=True)
        )
        for edit in (edit for edit in p.inner if edit.site == STATE_SITE):
            if places := edit.positions(first, first + len(rows)):
                picks = [place - first for place in places]
                with modes.canonical():
                    rows[picks] = edit.apply(rows[picks], places)
        return added(self.config.write_site, first, rows) if bool(rows.any()) else None

    def _chunks(self, p: Prefill, count: int) -> list[ChunkStates]:
        """The rows of the next `count` chunks that T reads."""
        assert p.lane.recording is not None
        c, rows = self.config.chunk, p.lane.recording.peek(self.config.read_site)
        first = p.settled * c - p.lane.recording.base
        states = rows[first : first + count * c].split(c)
        return [ChunkStates(p.settled + i, hidden, p.inner) for i, hidden in enumerate(states)]

    def _judge(self, p: Prefill, guessed: list[Tokens], found: list[Thought]) -> None:
        """Mutates: settles the chunks up to and including the first wrong guess, and rejects the rest."""
        first, count = p.settled, len(guessed)
        wrong = (i for i in range(count - 1) if found[i].tokens != guessed[i])
        kept = next(wrong, count - 1) + 1
        if kept < count:
            self._reject(p, first + kept, found)
        p.thoughts += found[:kept]
        self._cut(p)
        if p.guess == "drafted":
            p.drafts |= {first + i: thought.tokens for i, thought in enumerate(found)}
        p.states = self._used(p)
        self._hand_on(p)
        p.rounds.append(Round(first, first + kept, first + count, tuple(thought.tokens for thought in found[kept:])))

    def _hand_on(self, p: Prefill) -> None:
        """Mutates: gives the first unsettled chunk the state of the last settled thought."""
        p.states = {i: edit for i, edit in p.states.items() if i < p.settled}
        if state := self._received(p, p.settled, p.thoughts[-1].state if p.thoughts else None):
            p.states[p.settled] = state

    def _used(self, p: Prefill) -> dict[int, PlacedEdit]:
        """The states of the last pass, by chunk."""
        states = p.lane.edits[: len(p.lane.edits) - len(p.edits)]
        return {edit.start // self.config.chunk: edit for edit in states}

    def _cut(self, p: Prefill) -> None:
        """Mutates: cuts the lane to its settled chunks and marks their tokens as prompt."""
        lane, tree, pool = p.lane, self.forest.tree, self.forest.runner.pool
        record, end = lane.record, p.settled * self.config.chunk
        tree.rollback(lane.branch, record.root_length)
        tree.append(lane.branch, p.path[record.root_length : end], TokenState.PROMPT)
        pool.truncate(lane.table, min(lane.table.length, end))
        lane.computed = min(lane.computed, end)
        self.forest.loop.reservations.note(lane)
        assert lane.recording is not None
        lane.recording.truncate(end)

    def _reject(self, p: Prefill, chunk: int, found: list[Thought]) -> None:
        """Mutates: makes the positions from `chunk` on a rejected branch, with their rows and thoughts."""
        lane, tree, start = p.lane, self.forest.tree, chunk * self.config.chunk
        branch = tree.rollback(lane.branch, start, keep=True)
        assert branch is not None and lane.recording is not None
        p.rejected.append(branch)
        thoughts = Thoughts(self.config, found[0], (*p.thoughts, *found), self._used(p), p.inner)
        other = Lane(tree.branch(branch), PageTable(), exact=lane.exact, edits=lane.edits, hooks=lane.hooks, carried=thoughts)
        other.traced = lane.traced
        if p.capture is not None and p.capture.rejected:
            tokens = tree.path(branch)
            other.capture = p.capture
            other.recording = ThinkingRecording(thoughts, p.capture.thoughts, base=start)
            other.recording.aliases = self.forest.aliases
            other.recording.append(start, self._rows(p.capture, lane.recording, start, tokens, len(tokens)))
            self.forest.loop.lanes[branch] = other
        self._trace(other, p.capture)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _end(self, p: Prefill) -> None:
        """Mutates: puts the lane into the state of any lane after its prompt."""
        lane, raw, spec = p.lane, p.lane.recording, p.capture
        assert raw is not None
        lane.edits = (*p.states.values(), *p.edits)
        thoughts = lane.carried = Thoughts(self.config, p.thoughts[0], tuple(p.thoughts), p.states, p.inner, tuple(p.rounds))
        lane.capture, lane.recording = spec, None
        if spec is not None:
            lane.recording = ThinkingRecording(thoughts, spec.thoughts)
            lane.recording.aliases = self.forest.aliases
            if p.kept is not None:
                lane.recording.take_over(p.kept)
            if raw.chunks:
                rows = self._rows(spec, raw, raw.base, p.path, len(p.path))
                lane.recording.append(raw.base, rows, open_end=spec.lag > 0)
        lane.rejected = [branch for branch in p.rejected if branch in self.forest.loop.lanes]
        if not p.planted:
            self.forest.note(lane, "release")
        self._trace(lane, spec)

    def _rows(self, spec: CaptureSpec, raw: Recording, start: int, tokens: list[int], end: int) -> Rows:
        """The rows [start, end) that the user captures, with Z, which can be read now that the next tokens are known."""
        first, stop = start - raw.base, end - raw.base
        rows = {site: raw[site][first:stop] for site in spec.sites}
        rows |= {each.name: raw.scores(each.name)[first:stop] for each in spec.scored}
        if spec.lens is not None:
            streams = {site: raw[site][first:stop] for site in spec.lens.sites}
            follows = [*tokens[start + 1 : end + 1], -1][: end - start]
            rows |= lens.read(spec.lens, self.forest.runner, streams, follows, self.lenses.of(spec.lens))
        return rows

    def _trace(self, lane: Lane, capture: CaptureSpec | None, reason: str | None = None) -> None:
        """Trace the lane with its states as edits, so that a replay needs no thoughts to get the same bits."""
        tokens, kept = self.forest.tree.path(lane.branch), capture.traced() if capture else None
        self.forest.note(lane, "plant", lane.edits, lane.hooks, tokens=tokens, capture=kept)
        self.forest.note(lane, "finish", reason=reason, generated=0, length=len(tokens), path=path_digest(tokens))


def split(edits: Sequence[PlacedEdit]) -> tuple[tuple[PlacedEdit, ...], tuple[PlacedEdit, ...]]:
    """(edits of the backbone, edits of thoughts)"""
    return tuple(e for e in edits if e.site not in LETTERS), tuple(e for e in edits if e.site in LETTERS)
