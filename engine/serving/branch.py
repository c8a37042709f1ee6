"""`Branch`: the user's handle on one path in the tree."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from torch import Tensor

from replaylens.engine.errors import BadRequest, ClosedBranch
from replaylens.engine.loop.lane import Lane, Statistics
from replaylens.engine.memory.tree import BranchRecord, BranchStatus
from replaylens.engine.model.sites import STATE, layer_of, numbered
from replaylens.engine.request.capture import Recording
from replaylens.engine.request.edits import Edit, Hook, resolve_hooks
from replaylens.engine.request.placing import require_places, warn_of_no_match
from replaylens.engine.request.positions import At, chosen
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_instance, as_int, defines, hides, integer, named_options, renamed
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, changing, reading
from replaylens.engine.serving.request import GenerateKeywords, NotCopyable, Request, Stream, logits_of
from replaylens.engine.terminal import defer_interrupt

if TYPE_CHECKING:
    from pathlib import Path

    from replaylens.engine.engine import Engine
    from replaylens.gradients.gradients import AnyMetric, Gradients
    from replaylens.living.explorer import Explorer
    from replaylens.rollouts.drawing import Replacement
    from replaylens.rollouts.plan import Answer, ForkPositions, KeptPlaces
    from replaylens.rollouts.rollouts import Rollout, Rollouts
    from replaylens.views.pictures import Timeline, Tree

# ---- lifetime --------------------------------------------------------------------------------------------------------
# `Lifetime`: what all handles on one branch share. When the last of them is gone, the branch is released.
#
# Python may run finalizers in any thread and within any allocation, also within a step of the engine. So a finalizer only
# leaves a note; the engine reads it before its next call.


class Lifetime:
    """Keeps a branch open while something refers to it."""

    __slots__ = ("__weakref__",)


def lifetime_of(forest: Forest, lane: Lane) -> Lifetime | None:
    """The lifetime of a lane, made at its first use. A rejected branch lives as long as the branch that it was cut from, so its
    handles hold that one. None: nothing would be released."""
    if lane.branch not in forest.loop.lanes:
        return None
    parent = lane.record.parent
    main = None if parent is None else forest.loop.lanes.get(parent)
    if main is not None and lane.branch in main.rejected:
        lane = main
    held = None if lane.lifetime is None else lane.lifetime()
    if not isinstance(held, Lifetime):
        held = Lifetime()
        lane.lifetime = weakref.ref(held)
        weakref.finalize(held, forest.lock.later, partial(_abandon, weakref.ref(forest), weakref.ref(lane))).atexit = False
    return held


def _abandon(forest: weakref.ref[Forest], lane: weakref.ref[Lane]) -> None:
    """Release a lane. Only the engine's next call reads the note: one that held the engine, as the thoughts of a lane do, would
    keep it from being freed."""
    of, found = forest(), lane()
    if of is not None and found is not None:
        of.abandon(found)


def _reopened(engine: weakref.ref[Engine], lane: weakref.ref[Lane]) -> Branch | None:
    """A handle on a lane; None if it was released."""
    of, found = engine(), lane()
    return of.handle(found) if of is not None and found is not None and found.branch in of.loop.lanes else None


# ---- branch ----------------------------------------------------------------------------------------------------------

MAX_FORKS = 1 << 16
"""per call: more is likely a mistake, and takes minutes"""


class ResampleKeywords(TypedDict, total=False):
    """How rollouts are drawn. `Branch.resample` documents it."""

    at: ForkPositions
    sampling: Sampling | None
    max_new: int
    answer: Answer | None
    sites: str | Sequence[str] | None
    keep: KeptPlaces
    replace: Replacement
    wave: int | None


@hides("lifetime", "lane", "lock", "record")
class Branch(NotCopyable):
    """One token path with its KV. Forks share pages; a page is copied only when it is written.

    A branch is released by `release`, at the end of a `with` block, or once nothing refers to it. Its forks stay open.

    >>> from replaylens import Engine
    >>> root = Engine.load("coin-plain").prompt("A coin's state is heads. Alice flips")
    >>> right, wrong = root.fork(2)
    >>> wrong.force(", heads, then Bob flips").length - root.length
    6
    >>> wrong.rollback(to=root.length).tokens == right.tokens
    True
    """

    _instead = "Use branch.fork() for a branch with the same path; branch.tokens, .kv() and .activations return copies."
    _process_ends = staticmethod(sys.is_finalizing)
    """bound here: at the end of the process, modules lose their names before a generator's `with` block ends"""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self.engine: Engine = engine
        self.lane = lane
        self.id = lane.branch
        self.lock: EngineLock = engine.lock
        self.lifetime = lifetime_of(engine.forest, lane)
        """shared by all handles on the branch; once the last one is gone, the branch is released"""

    def __repr__(self) -> str:
        return f"Branch({self.id}, {self.length} tokens, {self.status.value}, {self.text[-40:]!r})"

    @property
    def record(self) -> BranchRecord:
        """Its record in the tree, which outlives its release."""
        return self.lane.record

    # ---- reading ------------------------------------------------------------------------------------------------

    @reading
    def _path(self) -> list[int]:
        return list(self.lane.record.tokens)

    @property
    def tokens(self) -> list[int]:
        """The whole path, prompt included. A copy."""
        return self._path()

    @property
    @reading
    def length(self) -> int:
        """The number of tokens, prompt included."""
        return len(self.lane.record.tokens)

    @property
    def root_length(self) -> int:
        """The number of prompt tokens."""
        return self.lane.record.root_length

    @property
    def text(self) -> str:
        """The text of the whole path, prompt included."""
        return self.engine.text.decode(self._path())

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self._path()[self.lane.record.root_length :]

    @property
    def generated_text(self) -> str:
        """The text of the tokens after the prompt, without the end-of-sequence token that may end it."""
        tokens = self.generated
        return self.engine.text.decode(tokens[:-1] if tokens and tokens[-1] == self.engine.text.eos_id else tokens)

    @property
    @reading
    def states(self) -> list[str]:
        """What each token is: "prompt", "forced", "generated" (sampled, or drafted and then accepted), "pending" (generated,
        its row not computed yet), "draft" (not verified yet) or "rejected"."""
        return self.lane.record.words()

    @property
    def status(self) -> BranchStatus:
        """Whether it can grow (open), has ended (finished), was cut off (rejected), or is closed (released)."""
        return self.lane.record.status

    @property
    def finish_reason(self) -> str | None:
        """ "eos" or "stop" if the branch ended; None if it can continue."""
        return self.lane.record.finish_reason

    @property
    def statistics(self) -> Statistics:
        """Counts of drafted, accepted and rejected tokens, over all requests that ended."""
        return self.lane.statistics

    @property
    def certified(self) -> bool:
        """Whether every token, KV entry and captured row of the branch is canonical."""
        return self.lane.certified

    @property
    def activations(self) -> Recording:
        """Captured rows by site, in order of position: one for each committed token. A pending token has none yet.

        Missing rows, such as those of a fork with edits that has generated nothing yet, are computed, to the bits that a
        request would give them. Z.emitted is NaN in a last row that no token follows.
        """
        if self.lane.recording is None:
            raise BadRequest(
                "Nothing was captured on this branch. Ask for sites when you make it, e.g. prompt(..., sites='STC'); for the "
                "rows of rejected drafts, prompt(..., sites='STC', keep_rejected=True)."
            )
        self.engine.forest.complete_rows(self.lane)
        self.lane.recording.require_here()
        return self.lane.recording

    def logits(self, positions: At = -1, *, tokens: Sequence[str | int] | None = None) -> Tensor:
        """The logits after the tokens at `positions`: [vocab] for one position, else [positions, vocab].

        positions  a number, several, a slice, or a form such as "last" or "text: flips"; None: all. A pending token has logits
                   too
        tokens     only of these, as text or ids: [..., tokens]

        Rows that were not captured are computed, to the bits that they have in a capture.
        """
        self._check_open()
        at = chosen(positions, self.length, self.root_length, lambda: map(self.engine.text.token, self.tokens))
        columns = None if tokens is None else self.engine.token_ids_of(tokens)
        runner, first = self.engine.loop.runner, min(at)
        last = f"blocks.{runner.model.config.num_layers - 1}.hook_out"
        (rows,) = self.engine.forest.final_rows([self.lane], [first], last)
        found = self.lock.alone(logits_of, runner, rows[[p - first for p in at]], columns)
        return found[0] if integer(positions) is not None else found

    @property
    def rejected(self) -> list[Self]:
        """The rejected branches of this branch that keep rows or pages, in order.

        They keep rows if the branch was made with `prompt(..., sites=..., keep_rejected=True)`, and pages, to be forked, after
        `generate(..., keep_pages=True)`. Without either, the list is empty.
        """
        return [type(self)(self.engine, lane) for lane in self._rejected_lanes()]

    @reading
    def _rejected_lanes(self) -> list[Lane]:
        lanes = self.engine.loop.lanes
        return [lanes[i] for i in self.lane.rejected if i in lanes]

    def kv(self) -> Tensor:
        """A copy of the committed KV: [positions, layers, 2, kv_heads, d_head]. A pending token has none yet.

        With latent attention it is what the cache holds, one vector per position and layer: the normed latent, then the rotated
        part that the keys of all heads share, [positions, layers, 1, 1, rank + rotary_dim]. `config.kv_shape` says which.

        A hybrid has KV of its layers with attention only, in their order; `state` gives those of its recurrent layers.

        If the branch gave up its pages to others, the KV is computed again, to the same bits.
        """
        self._check_open()
        return self.engine.forest.kv(self.lane)

    def state(self, layer: int, position: int = -1) -> Tensor:
        """The recurrent state of a hybrid's layer after the token at `position`: [heads, d_key, d_value].

        It is a row of `blocks.{layer}.mixer.hook_state`, with the bits that it has in a capture. An edit of that site patches
        it into another branch.
        """
        self._check_open()
        site, table = (
            f"blocks.{as_int('layer', layer, 0, self.engine.sites.config.num_layers - 1)}.{STATE}",
            self.engine.sites.sites,
        )
        if site not in table:
            own = numbered(layer_of(each) or 0 for each in table if each.endswith(STATE))
            raise BadRequest(f"Layer {layer} has no recurrent state; layers that have: {own}. Keys and values are in kv().")
        at = as_int("position", position, -self.length, self.length - 1) % self.length
        (rows,) = self.engine.forest.final_rows([self.lane], [at], site)
        return rows[0]

    @reading
    def tree(self) -> Tree:
        """This branch with its forks and rejected branches. Draws itself in a notebook; `print` it elsewhere."""
        from replaylens.views.pictures import tree_of

        recordings = {i: lane.recording for i, lane in self.engine.loop.lanes.items()}
        forest, lane = weakref.ref(self.engine), weakref.ref(self.lane)
        return replace(tree_of(self.record, recordings, self.engine.text), live=partial(_reopened, forest, lane))

    @named_options
    def explore(
        self,
        *,
        probes: Any = None,
        thresholds: Mapping[str, float] | None = None,
        edits: Mapping[str, Edit] | None = None,
    ) -> Explorer:
        """The living tree of this branch and all below it. Options as in `rl.explore`."""
        from replaylens.living.explorer import Explorer

        return Explorer(self, probes=probes, thresholds=thresholds, edits=edits)

    @reading
    def timeline(self) -> Timeline:
        """The branch's history step by step: prefill, decode, verify, rollback, and the contents of the KV cache."""
        from replaylens.engine.display import word
        from replaylens.views.pictures import timeline

        return timeline(self.engine.trace, self.id, partial(word, self.engine.text), {self.id: self.tokens})

    def _repr_html_(self) -> str:
        from replaylens.views.summary import one_picture

        return one_picture(self._facts(), self.tree())

    def _facts(self) -> dict[str, str]:
        return {
            "status": self.status.value + (f" ({self.finish_reason})" if self.finish_reason else ""),
            "tokens": f"{self.length}, including {self.root_length} of the prompt",
            "certified": "yes" if self.certified else "no: fast path or hook functions",
        }

    # ---- changing -----------------------------------------------------------------------------------------------

    @named_options
    def fork(self, n: int = 1, at: int | None = None, *, edits: Sequence[Edit] = (), hooks: Sequence[Hook] = ()) -> list[Self]:
        """`n` new branches with this path, or its first `at` tokens. They share pages. A fork that nobody holds is released.

        edits  added to this branch's edits; KV is shared up to the first edited position
        hooks  TransformerLens-style (site, function) pairs; such a branch shares nothing and is not certified
        """
        n = as_int("n", n, 1, MAX_FORKS)
        self._check_open()
        at, sites, forest = self.length if at is None else as_int("at", at), self.engine.sites, self.engine.forest
        placed, resolved = self.engine.placed(edits, at), resolve_hooks(hooks, sites)
        require_places([*(edit for edit in self.lane.edits if edit.needs <= at), *placed], sites.config)
        if placed:
            warn_of_no_match([placed], [self.record.tokens[:at]])
        with forest.made() as lanes, defer_interrupt():
            lanes += self.lock.alone(lambda: [forest.fork(self.lane, at, placed, resolved) for _ in range(n)])
        return [type(self)(self.engine, lane) for lane in lanes]

    @named_options
    def force(self, tokens: str | Sequence[int]) -> Self:
        """Append given tokens, however unlikely, and compute their rows. Returns self."""
        self.engine.force_all([self], [tokens])
        return self

    @renamed(keep_rejected="keep_pages")
    @named_options
    def generate(
        self, n: int, *, sampling: Sampling | None = None, progress: bool = False, **options: Unpack[GenerateKeywords]
    ) -> Self:
        """Generate up to `n` tokens; options as in `Engine.generate`. Returns self."""
        self.engine.serve([self], [Request(n, Sampling() if sampling is None else sampling, **options)], progress)
        return self

    @renamed(keep_rejected="keep_pages")
    @named_options
    def stream(self, n: int, *, sampling: Sampling | None = None, **options: Unpack[GenerateKeywords]) -> Stream:
        """Generate up to `n` tokens and yield each one once it is committed. Options as in `Engine.generate`.

        The engine may be several tokens ahead of the stream, depending on the clock. Closing the stream early, by `close()`,
        by garbage collection or by Ctrl-C, cancels the rest and rolls the branch back to the yielded tokens: it is as after
        generating just these. Until the stream has yielded all its tokens or is closed, the branch takes no other request.
        """
        return self.engine.open_stream(self, Request(n, Sampling() if sampling is None else sampling, **options))

    @named_options
    @changing
    def rollback(self, to: int) -> Self:
        """Cut the path back to its first `to` tokens, with KV, captured rows and finish state. Returns self."""
        self._check_idle()
        self.engine.forest.rollback(self.lane, as_int("to", to))
        return self

    @changing
    def release(self) -> None:
        """Free the branch's pages and close it, together with its rejected branches. Its forks stay open."""
        self._check_open()
        self.engine.forest.release(self.lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the branch, unless it is released already, or the process ends."""
        if not self._process_ends() and self.status is not BranchStatus.RELEASED:
            self.release()

    # ---- gradients and rollouts ---------------------------------------------------------------------------------

    def gradients(self, metric: AnyMetric | Branch, sites: str | Sequence[str] | None = None) -> Gradients:
        """The gradient of a metric of the next token's logits, at every position of the path.

        metric  a pair of tokens (their logit difference), one token (its log-probability), another branch (the KL divergence
                from its distribution), or a function of the last row's logits [vocab] that returns a scalar tensor. With a
                function, the result is not certified
        sites   S, T and C, or site names; default: those that the branch captures

        The path is computed again, alone, in one canonical forward and one backward pass. So the bits depend on weights, path
        and edits only. Gradients are those of the values after edits: added vectors let them pass, replaced rows stop them.
        """
        from replaylens.gradients.branches import gradients

        return gradients(self, metric, sites)

    @defines(ResampleKeywords)
    @named_options
    def resample(
        self,
        n: int,
        *,
        at: ForkPositions = None,
        sampling: Sampling | None = None,
        max_new: int = 64,
        answer: Answer | None = None,
        sites: str | Sequence[str] | None = None,
        keep: KeptPlaces = "last",
        replace: Replacement = None,
        wave: int | None = None,
        folder: str | Path | None = None,
        settle: float | None = None,
        progress: bool = False,
    ) -> Rollouts:
        """Draw `n` continuations at each of some positions of this path. The branch itself is not changed.

        at        where, as `engine.request.positions` says: "sentences", "tokens", a number, several, or a function of position
                  and token text. A rollout at position p keeps the first p tokens. Default: the end of the path
        sampling  default: temperature 1. Each rollout has a seed of its own, made from this seed, position and number. Paths
                  that are resampled at the same position share their noise: give each a seed where they must be independent
        max_new   maximal number of tokens; 0 with choices: they are read right at the fork
        answer    how outcomes are read: `Answer.regex`, `Answer.choices` or `Answer.function`
        sites     what to capture, such as "S"; rows are kept at the places that `keep` names
        keep      "fork" (the last token before the rollout), "sentences" (the last token of each sentence), "answer", "last",
                  "all", or numbers of generated tokens; one or several
        replace   what comes at each position instead of the path's own tokens: a text, token ids, or a list of texts with one
                  for each position. The rollout continues from there
        wave      rollouts drawn together, which bounds memory; default: as many as the KV cache has room for, at most 1024.
                  Changes no bit
        folder    where finished waves are kept. The same call continues an unfinished folder
        settle    stop at a position once its likeliest answer is settled, with this probability of an error; `n` is then the
                  most that are drawn, in waves of 8 by default. `Rollouts.settled` names the answers. Not with a folder
        progress  show a bar

        A rollout has the same bits for any `n` and `wave`, drawn alone or with others.

        >>> from replaylens import Answer, Engine
        >>> root = Engine.load("coin-plain").prompt("A coin's state is heads. Alice flips. What's the state? A:")
        >>> root.resample(20, max_new=2, answer=Answer.regex("heads|tails")).outcomes().outcomes
        ['tails']
        """
        from replaylens.rollouts.drawing import drawn, drawn_until_settled, plan_rollouts
        from replaylens.rollouts.rollouts import Rollouts

        plan, most = plan_rollouts(self, n, at, sampling, max_new, answer, sites, keep, replace, wave)
        if settle is not None:
            if folder is not None:
                raise BadRequest("A folder holds all rollouts of its plan, and settle= draws fewer. Leave one of the two out.")
            every = tuple(drawn_until_settled(self, plan, None if wave is None else most, settle, progress))
        else:
            every = tuple(drawn(self, plan, most, folder, progress, ahead=True))
        return Rollouts(plan, every, self.engine.fingerprint)

    @named_options
    def stream_rollouts(
        self, n: int, *, folder: str | Path | None = None, progress: bool = False, **options: Unpack[ResampleKeywords]
    ) -> Iterator[Rollout]:
        """Yield the rollouts of `resample` in their order, wave by wave. What is not yielded yet is not drawn, and what is not
        held is not kept. With a `folder`, those of finished waves are yielded again, from their files, and one more wave is
        drawn: the last one is written meanwhile."""
        from replaylens.rollouts.drawing import drawn, plan_rollouts

        plan, wave = plan_rollouts(self, n, **options)
        return drawn(self, plan, wave, folder, progress, ahead=folder is not None)

    def _check_open(self) -> None:
        if self.status is BranchStatus.RELEASED:
            raise ClosedBranch(f"Branch {self.id} was released. Use a live branch, or prompt again.")

    def _check_idle(self) -> None:
        """Precondition: within the lock."""
        self._check_open()
        self.lock.tidy()
        if self.lane.unread or self.lane.queued:
            raise BadRequest(f"Branch {self.id} is busy with another request. Finish it or close its stream first.")


def own_branch(engine: Engine, branch: Branch) -> Branch:
    """The branch; BadRequest if it is not a Branch of this engine."""
    as_instance("branch", branch, Branch, "a Branch, such as prompt(...) returns")
    if branch.engine is not engine:
        raise BadRequest(f"Branch {branch.id} belongs to another engine. Prompt this engine with its tokens.")
    return branch
