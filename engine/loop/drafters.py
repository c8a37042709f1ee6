"""Drafters: they guess the next tokens. No drafter can change the output, only how fast it comes.

Every drafter except `self` is reproducible: its drafts, and so the rejected branches, are a function of the path.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from replaylens.engine.errors import BadRequest, EngineError, OutOfPages
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.path import Mark, PathView
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import PassResult, Runner
from replaylens.engine.request.edits import Hook
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling, gumbel
from replaylens.engine.request.values import as_int

Chains = list[list[int]]


@dataclass
class DraftCall:
    """A request for drafts after `path`. The row of the path's last token is not computed yet."""

    path: PathView
    """a view of the branch's tokens, valid while `propose` runs"""
    num_prompt: int
    count: int
    sampling: Sampling
    tables: list[PageTable]
    """one per sibling chain, with private room for the last token and `count` drafts"""
    branch: int
    """the branch's id, the key of drafters with a cache of their own"""
    recorded: Chains | None = None
    edits: tuple[PlacedEdit, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def segment(self, table: int, start: int, tokens: list[int]) -> Segment:
        """Rows of this branch for a draft pass that returns the last row's logits."""
        return Segment(self.tables[table], start, tokens, 1, self.edits, self.hooks)

    def ends(self, chain: list[int]) -> bool:
        """Whether nothing can follow the chain."""
        return bool(chain) and chain[-1] in self.sampling.stop_tokens


class Drafter(Protocol):
    """Proposes chains of tokens. May write KV at and after the last token's position, never before."""

    width: int
    """the number of sibling chains it proposes"""
    reproducible: bool
    """whether the drafts are a function of the path alone"""

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        """For each call, up to `width` chains of up to `count` tokens. Their first tokens differ."""
        ...

    def settings(self) -> dict[str, str | int]:
        """What its drafts depend on besides the path."""
        ...


REPEATED = 8
"""tokens of a path that must have occurred before, in this order, to take their continuation for granted"""


class SelfDrafter:
    """The model's own fast path: matrix-vector products, one token at a time. A path that repeats itself needs none.

    Its drafts come from the fast batch of the loop, one per step: see `Window`.
    """

    width = 1
    reproducible = False

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        """The drafts that the calls' windows have collected."""
        return [call.recorded or [[]] for call in calls]

    def settings(self) -> dict[str, str | int]:
        return {}


class LensDrafter:
    """Early exit: the logit lens on the residual stream that enters `layer`. The first layers run canonically."""

    width = 1
    reproducible = True

    def __init__(self, runner: Runner, layer: int) -> None:
        layers = runner.model.config.num_layers
        self.runner, self.layer = runner, as_int("lens_layer", layer, 1, layers)

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        return [[chain] for chain in extend_together(calls, [0] * len(calls), [[] for _ in calls], self.step)]

    def step(self, segments: list[Segment]) -> PassResult:
        return self.runner.exact(segments, stop_at_layer=self.layer)

    def settings(self) -> dict[str, str | int]:
        return {"layer": self.layer}


class TreeDrafter:
    """The `width` likeliest next tokens by an early exit, with the request's own noise. Each is continued as `lens` does."""

    reproducible = True

    def __init__(self, runner: Runner, layer: int, width: int) -> None:
        self.lens, self.width = LensDrafter(runner, layer), as_int("tree_width", width, 2)

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        segments = [call.segment(0, len(call.path) - 1, [call.path[-1]]) for call in calls]
        firsts = self.lens.step(segments).logits.float().cpu().numpy()
        flat, tables, chains = [], [], []
        for call, logits in zip(calls, firsts, strict=True):
            for i, token in enumerate(self._best(call, logits)):
                flat.append(call)
                tables.append(i)
                chains.append([token])
        grown = iter(extend_together(flat, tables, chains, self.lens.step))
        return [[next(grown) for _ in range(min(self.width, len(logits)))] for logits in firsts]

    def _best(self, call: DraftCall, logits: "np.ndarray") -> list[int]:
        scores = logits.astype(np.float64)
        if call.sampling.temperature:
            scores = scores / call.sampling.temperature + gumbel(call.sampling.seed, len(call.path), len(scores))
        return [int(t) for t in np.argsort(-scores, kind="stable")[: self.width]]

    def settings(self) -> dict[str, str | int]:
        return self.lens.settings() | {"width": self.width}


def extend_together(
    calls: list[DraftCall], table: list[int], chains: Chains, step: Callable[[list[Segment]], PassResult]
) -> Chains:
    """Grow every call's chain to its `count`, one packed step at a time for all that still grow.

    `table[i]` is the index of the call's table that chain i uses. The first step also runs the path's last token.
    """
    started = [False] * len(calls)
    while True:
        growing = [i for i, call in enumerate(calls) if len(chains[i]) < call.count and not call.ends(chains[i])]
        if not growing:
            return chains
        segments = []
        for i in growing:
            call, last = calls[i], len(calls[i].path) - 1
            tokens = chains[i][-1:] if started[i] else [call.path[-1], *chains[i]]
            start = last + len(chains[i]) if started[i] else last
            segments.append(call.segment(table[i], start, tokens))
            started[i] = True
        result = step(segments)
        for row, i in enumerate(growing):
            call = calls[i]
            chains[i].append(result.choose(row, call.sampling, call.path.then(chains[i]), call.num_prompt))


class NgramDrafter:
    """Repeats what followed the latest earlier occurrence of the path's last tokens."""

    width = 1
    reproducible = True

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        return [[self._continue(call.path, call.count)] for call in calls]

    def _continue(self, path: PathView, count: int) -> list[int]:
        for size in range(min(self.longest, len(path) - 1), 0, -1):
            found = path.continuation(size, count)
            if found is not None:
                return found
        return []

    def settings(self) -> dict[str, str | int]:
        return {}


class ModelDrafter:
    """A smaller model with a KV cache of its own, which catches up with each branch's path."""

    width = 1
    reproducible = True

    def __init__(self, runner: Runner, vocab_size: int, weights: Callable[[], str]) -> None:
        """
        weights  the hash of the draft model's weights
        """
        if runner.model.config.vocab_size != vocab_size:
            raise BadRequest(
                f"The draft model has a vocabulary of {runner.model.config.vocab_size} tokens, the model one of {vocab_size}. "
                "Use a draft model with the same tokenizer."
            )
        self.runner, self.weights = runner, weights
        self._known: dict[int, tuple[PageTable, Mark]] = {}  # branch -> its KV here, and the path it holds

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        """Drafts in groups that fit into the draft model's pages. Its branches share no pages, so fewer may fit at once."""
        proposals: list[Chains] = []
        while len(proposals) < len(calls):
            mine = self._next_group(calls[len(proposals) :])
            proposals += [[c] for c in extend_together(mine, [0] * len(mine), [[] for _ in mine], self._step)]
        return proposals

    def _next_group(self, calls: list[DraftCall]) -> list[DraftCall]:
        """The first calls, with tables of this cache. A path too long for this model or its pages gets no drafts."""
        group: list[DraftCall] = []
        for call in calls:
            room = self.runner.model.config.max_positions + 1 - len(call.path)  # the last draft's own row is never run
            own = replace(call, count=max(0, min(call.count, room)), edits=(), hooks=())  # edits name the large model's sites
            table = self._catch_up(own, {other.branch for other in group}) if own.count else None
            if table is None and group:
                break
            group.append(replace(own, tables=[table]) if table else replace(own, count=0))
        return group

    def _step(self, segments: list[Segment]) -> PassResult:
        return self.runner.exact(segments)

    def _catch_up(self, call: DraftCall, busy: set[int]) -> PageTable | None:
        """The branch's table, with KV for the path except its last token, and room for the drafts. None: no pages left."""
        pool, needed, path = self.runner.pool, len(call.path) + call.count, call.path
        table, held = self._known.pop(call.branch, (PageTable(), path.past.mark(0)))
        common = min(held.common(path), len(path) - 1)
        pool.truncate(table, common)
        try:
            while pool.num_needed(table, common, needed) > pool.num_free and self._drop_oldest(busy):
                pass
            self.runner.reserve(table, common, needed)
            if common < len(path) - 1:
                self.runner.exact([Segment(table, common, path[common:-1])])
        except EngineError as error:
            pool.release(table)
            if isinstance(error, OutOfPages):
                return None
            raise
        self._known[call.branch] = (table, path.past.mark(len(path) - 1))
        return table

    def _drop_oldest(self, busy: set[int]) -> bool:
        """Forget the least recently drafted branch. False: all that are left are busy."""
        victim = next((branch for branch in self._known if branch not in busy), None)
        if victim is not None:
            self.runner.pool.release(self._known.pop(victim)[0])
        return victim is not None

    def settings(self) -> dict[str, str | int]:
        return {"weights": self.weights()}


class ForcedDrafter:
    """Proposes given tokens: a user's, or those that a trace recorded."""

    width = 1
    reproducible = True

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        return [[chain[: call.count] for chain in call.recorded or [[]]] for call in calls]

    def settings(self) -> dict[str, str | int]:
        return {}
