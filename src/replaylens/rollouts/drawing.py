"""Rollouts drawn on a branch: the plan that a call means, and `Waves`, which draws them some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest, FingerprintMismatch, NotCertified
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.model.text import Prompt, Text
from replaylens.engine.records import Fingerprint
from replaylens.engine.request.capture import CaptureSpec, Recording, picked
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int, as_list, integer, short_repr, token_ids
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.request import SAMPLING, Request, logits_of
from replaylens.engine.terminal import hidden, pause_collector
from replaylens.kernels import cpu as portable
from replaylens.rollouts.plan import (
    MAX_ROLLOUTS,
    Answer,
    ForkPositions,
    FoundAnswer,
    KeptPlaces,
    Race,
    ResamplePlan,
    offsets_of,
    places_kept,
    positions_of,
    sentence_ends,
    unit_texts,
)
from replaylens.rollouts.rollouts import Rollout, Rollouts, Row, WaveFolder

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.engine.serving.branch import Branch

# ---- waves -----------------------------------------------------------------------------------------------------------
# `Waves`: rollouts of a plan, some at a time, as forks of one branch that are computed together.


class Forked(Protocol):
    """What rollouts need from a branch."""

    engine: Any
    lane: Lane

    @property
    def record(self) -> BranchRecord: ...

    def fork(self, n: int = 1, at: int | None = None) -> list[Self]: ...

    def force(self, tokens: str | Sequence[int]) -> Self: ...

    def rollback(self, to: int) -> Self: ...

    def release(self) -> None: ...


class Served(Protocol):
    """What rollouts need from the engine."""

    text: Text
    config: ModelConfig
    forest: Forest

    def _job(self, branch: Any, request: Request) -> Job:
        """The request as a job on a branch."""
        ...

    def token_ids_of(self, tokens: Sequence[str | int]) -> list[int]:
        """Ids of single tokens, given as text or ids."""
        ...

    def force_all(self, branches: Sequence[Any], tokens: Sequence[str | Sequence[int]]) -> list[Any]:
        """Append given tokens to each branch."""
        ...


@dataclass(frozen=True)
class Continuation:
    """A rollout that was generated and not read yet. It needs no branch any more."""

    index: int
    tokens: list[int]
    stopped: str
    recording: Recording | None
    answer: FoundAnswer | None = None
    outcome: str | None = None
    probabilities: tuple[float, ...] = ()


class Waves:
    """Draws rollouts. Which are drawn together changes no bit of them."""

    def __init__(self, engine: Served, branch: Forked, plan: ResamplePlan, capture: CaptureSpec | None) -> None:
        self.engine, self.branch, self.plan, self.capture = engine, branch, plan, capture

    def draw(self, indices: Sequence[int]) -> list[Rollout]:
        """The rollouts with these indices, in this order."""
        return self.read(self.generate(indices))

    def generate(self, indices: Sequence[int]) -> list[Continuation]:
        """The continuations with these indices, in this order. Answers are read here, in the caller's thread: its function may
        expect that."""
        with ExitStack() as open_branches, self.engine.forest.quiet():
            forks = self.forked(indices, open_branches)
            reasons = self.generated(forks, indices)
            found = [self._taken(fork, index, why) for fork, index, why in zip(forks, indices, reasons, strict=True)]
            if self.plan.answer is not None and self.plan.answer.tokens:
                found = self._with_choices(forks, found)
        return found

    def read(self, found: Sequence[Continuation], together: bool = False) -> list[Rollout]:
        """The rollouts, with their texts and kept rows. Touches no branch: a thread may read a wave while the next one is
        generated.

        together  their rows share memory, so that each keeps those of all
        """
        said = [self._own(each) for each in found]
        rows = [self._kept(each, own) for each, own in zip(found, said, strict=True)]
        recordings = [each.recording for each in found]
        states = picked(recordings, [[position for _, position in own] for own in rows], together)
        return [self._rollout(*each) for each in zip(found, said, rows, states, strict=True)]

    def forked(self, indices: Sequence[int], open_branches: ExitStack) -> list[Forked]:
        """One fork per rollout, which `open_branches` releases. Forks at one place share pages, replaced tokens included."""
        places: dict[int, list[int]] = {}
        for index in indices:
            places.setdefault(self.plan.rollout(index)[0], []).append(index)
        forks: dict[int, Forked] = {}
        open_branches.callback(lambda: self.engine.forest.release_all([fork.lane for fork in forks.values()]))
        for place, own in places.items():
            start, at = self.branch, self.plan.positions[place]
            if self.plan.replace:
                (start,) = self.branch.fork(at=at)
                open_branches.callback(start.release)
                start.force(self.plan.replace[place])
                at = len(start.record.tokens)
            with pause_collector():  # they are many objects, which live as long as the wave
                made = start.fork(len(own), at=at)
            forks |= zip(own, made, strict=True)
            for fork in made:
                self._capture(fork.lane, at - 1)
        return [forks[index] for index in indices]

    def _capture(self, lane: Lane, first: int) -> None:
        """Mutates: the lane records what the plan keeps, from position `first` on, and nothing else."""
        lane.capture, lane.recording, lane.template = self.capture, None, None
        if self.capture is not None:
            lane.recording = Recording(first)
            lane.recording.aliases, lane.recording.twins = self.engine.forest.aliases, self.engine.forest.twins(lane)

    def generated(self, forks: Sequence[Forked], indices: Sequence[int]) -> list[str]:
        """Generate on all forks together. Returns why each stopped."""
        plan, forest = self.plan, self.engine.forest
        if not plan.max_new:
            if plan.sites:
                forest.compute([fork.lane for fork in forks])
            return ["length"] * len(forks)

        def jobs() -> list[Job]:
            made = []
            for fork, index in zip(forks, indices, strict=True):
                job = self.engine._job(fork, Request(plan.max_new, plan.sampling_of(index), final=bool(plan.sites)))
                job.until = self._answered if plan.answer is not None and plan.answer.stop else None
                made.append(job)
            return made

        return [job.finish_reason or "length" for job in forest.serve(jobs)]

    def _answered(self, tokens: Sequence[int]) -> bool:
        assert self.plan.answer is not None
        return self.plan.answer.certain(self.engine.text.decode(tokens))

    def _taken(self, fork: Forked, index: int, why: str) -> Continuation:
        answer = self.plan.answer
        made = Continuation(index, fork.record.tokens[self.plan.length(index, 0) :], why, fork.lane.recording)
        if answer is None or answer.tokens:
            return made
        own = self._own(made)
        return replace(made, answer=answer.read(self.engine.text.decode(own) if own else ""))

    def _own(self, found: Continuation) -> list[int]:
        """The tokens of its text: without the end-of-sequence token."""
        ended = found.stopped == "eos" and found.tokens[-1] == self.engine.text.eos_id
        return found.tokens[:-1] if ended else found.tokens

    def _kept(self, found: Continuation, own: list[int]) -> list[Row]:
        """The rows of the plan's places."""
        if found.recording is None:
            return []
        start = self.plan.length(found.index, 0)
        return places(self.plan, self.engine.text, start, own, found.answer, len(found.tokens))

    def _rollout(self, found: Continuation, own: list[int], rows: list[Row], states: Mapping[str, Tensor]) -> Rollout:
        place, number = self.plan.rollout(found.index)
        return Rollout(
            self.plan.positions[place],
            number,
            self.plan.seed_of(found.index),
            tuple(found.tokens),
            self.engine.text.decode(own) if own else "",
            found.outcome if found.answer is None else found.answer.outcome,
            found.stopped,
            found.probabilities,
            tuple(rows),
            states,
        )

    def _with_choices(self, forks: Sequence[Forked], found: list[Continuation]) -> list[Continuation]:
        """The rollouts with the probabilities of the choices as the token after them, and after the forced text."""
        answer, forest = self.plan.answer, self.engine.forest
        assert answer is not None
        for fork, rollout in zip(forks, found, strict=True):
            fork.lane.capture = fork.lane.recording = None
            if rollout.stopped in ("eos", "stop"):  # a finished branch takes no tokens, and the choice comes before the end
                fork.rollback(len(fork.record.tokens) - (rollout.stopped == "eos"))
        if answer.after:
            self.engine.force_all(forks, [answer.after] * len(forks))
        last = f"blocks.{self.engine.config.num_layers - 1}.hook_out"
        tips = [len(fork.record.tokens) - 1 for fork in forks]
        rows = forest.final_rows([fork.lane for fork in forks], tips, last)
        columns = self.engine.token_ids_of(answer.tokens)
        names = [*map(str, answer.tokens)]
        made = []
        for rollout, row in zip(found, rows, strict=True):
            logits = forest.lock.alone(logits_of, forest.runner, row, None)[0].float()
            each = portable.apply("exp", logits - logits.max()).tolist()
            total = fsum(each)  # correctly rounded, so that every machine has the same bits
            shares = [each[column] / total for column in columns]
            outcome = names[max(range(len(shares)), key=shares.__getitem__)]
            made.append(replace(rollout, outcome=outcome, probabilities=(*shares, max(0.0, 1.0 - sum(shares)))))
        return made


def places(plan: ResamplePlan, text: Text, start: int, own: list[int], answer: FoundAnswer | None, count: int) -> list[Row]:
    """The kept places of a rollout whose `count` tokens start at `start`, in order. A place that it lacks has no row."""
    found: list[Row] = []
    for place in plan.keep:
        if place == "fork":
            found.append(("fork", start - 1))
        elif place == "sentences":
            said, offsets = offsets_of(text, own) if own else ("", [])
            found += [("sentences", start + token) for token in sentence_ends(said, offsets)]
        elif place == "answer" and answer is not None:
            offsets = offsets_of(text, own)[1]
            token = next((i for i, (_, end) in enumerate(offsets) if end >= answer.end), len(offsets) - 1)
            found.append(("answer", start + token))
        elif place == "last":
            found.append(("last", start + count - 1))
        elif place == "all":
            found += [("all", start + token) for token in range(count)]
        elif isinstance(place, int) and -count <= place < count:
            found.append((str(place), start + place % count))
    return sorted(found, key=lambda row: row[1])


# ---- resampling ------------------------------------------------------------------------------------------------------

MAX_WAVE = 1024
"""rollouts drawn together by default: more do not make a pass quicker"""
SMALL_WAVE = 8
"""rollouts drawn between two looks at whether the answer is settled, by default: nine that agree settle it at 0.05"""
MAX_BYTES = 4 << 30
"""bytes of captured rows of a wave, about, by default"""
REPLACE = "a text or token ids, or a list of texts with one for each position"
Replacement = str | Sequence[int] | Sequence[str] | None


class Resampler(Served, Protocol):
    """What resampling needs from the branch's engine."""

    sites: SiteTable

    @property
    def fingerprint(self) -> Fingerprint: ...

    def capture_spec(self, sites: str | Sequence[str]) -> CaptureSpec:
        """What to capture."""
        ...

    def _check_tokens(self, ids: list[int], before: int = 0) -> list[int]:
        """The ids, checked."""
        ...


def plan_rollouts(
    branch: Forked,
    n: int,
    at: ForkPositions = None,
    sampling: Sampling | None = None,
    max_new: int = 64,
    answer: Answer | None = None,
    sites: str | Sequence[str] | None = None,
    keep: KeptPlaces = "last",
    replace: Replacement = None,
    wave: int | None = None,
) -> tuple[ResamplePlan, int]:
    """The plan and the size of its waves. BadRequest names the option that is invalid, before anything is drawn."""
    if not branch.lane.certified:
        raise NotCertified(
            f"Branch {branch.record.id} was computed by the fast path or hook functions. Resample a certified one."
        )
    engine, tokens = branch.engine, tuple(branch.record.tokens)
    n, max_new = as_int("n", n, 1, MAX_ROLLOUTS), as_int("max_new", max_new, 0)
    sampling = as_instance("sampling", Sampling(temperature=1.0) if sampling is None else sampling, Sampling, SAMPLING)
    if answer is not None:
        as_instance("answer", answer, Answer, "an Answer, such as Answer.regex(...)")
        engine.token_ids_of(answer.tokens)
    if n > 1 and max_new and not sampling.temperature:
        raise BadRequest(f"Greedy rollouts are all the same, and n={n} were asked for. Give a temperature, or n=1.")
    if not max_new and (answer is None or not answer.tokens or n > 1):
        raise BadRequest("max_new=0 draws nothing. Give more, or Answer.choices and n=1 to read choices right at the fork.")
    positions = positions_of(at, tokens, branch.record.root_length, engine.text)
    if len(positions) * n > MAX_ROLLOUTS:
        raise BadRequest(f"{len(positions)} positions with {n} rollouts each are more than {MAX_ROLLOUTS}. Ask for fewer.")
    names = () if sites is None else (sites,) if isinstance(sites, str) else tuple(as_list("sites", sites, "names of sites"))
    plan = ResamplePlan(
        engine.fingerprint.digest,
        tokens,
        branch.record.root_length,
        positions,
        unit_texts(positions, tokens, engine.text),
        n,
        max_new,
        sampling,
        answer,
        tuple(name for name in names if name),
        places_kept(keep),
        _replacements(engine, replace, len(positions)),
        _edits(branch.lane, positions),
    )
    return plan, wave_of(engine, plan) if wave is None else as_int("wave", wave, 1)


def _replacements(engine: Any, replace: Replacement, count: int) -> tuple[tuple[int, ...], ...]:
    """Token ids for each position; empty: nothing is replaced."""
    if replace is None:
        return ()
    encode: Callable[[str], list[int]] = lambda text: engine.text.encode(text, special=False)  # noqa: E731
    if not isinstance(replace, str):
        replace = as_list("replace", replace, REPLACE)
    if isinstance(replace, str):
        found = [encode(replace)] * count
    elif all(integer(each) is not None for each in replace):
        found = [token_ids("replace", replace)] * count
    else:
        found = [encode(as_instance("replace", each, str, REPLACE)) for each in replace]
    if [] in found:
        empty = replace if len(replace) == 0 else ""
        raise BadRequest(f"replace={short_repr(empty)} has no tokens. Give {REPLACE}, or None to replace nothing.")
    if len(found) != count:
        raise BadRequest(f"Got {len(found)} replacements for {count} positions. Give one for all, or one for each.")
    return tuple(tuple(engine._check_tokens(ids)) for ids in found)


def _edits(lane: Lane, positions: Sequence[int]) -> tuple[tuple[dict[str, Any], ...], ...]:
    edits = lane.edits
    return tuple(tuple(edit.to_json() for edit in edits if edit.needs <= at) for at in positions) if edits else ()


def drawn(
    branch: Forked, plan: ResamplePlan, wave: int, folder: str | Path | None, progress: bool, ahead: bool
) -> Iterator[Rollout]:
    """The rollouts of a plan, drawn when they are read, on a fork that stays on the path, whatever becomes of the branch.

    ahead  a wave is read and written while the next one is generated, so that this one is not lazy
    """
    with branch.engine.forest.quiet():
        (path,) = branch.fork()
    return _drawn(path, plan, wave, folder, as_bool("progress", progress), ahead)


def _drawn(
    path: Any, plan: ResamplePlan, wave: int, folder: str | Path | None, progress: bool, ahead: bool
) -> Iterator[Rollout]:
    with path, ExitStack() as threads:
        waves = waves_of(path.engine, path, plan)
        files = None if folder is None else WaveFolder.create(folder, plan, wave, path.engine.fingerprint)
        wave = wave if files is None else files.wave
        finished = set[int]() if files is None else files.finished()
        pool = threads.enter_context(ThreadPoolExecutor(1, "rollouts")) if ahead else None
        bar = threads.enter_context(tqdm(total=len(plan), unit="rollout", disable=hidden(progress)))

        def finish(number: int, found: Sequence[Continuation]) -> list[Rollout]:
            read = waves.read(found, together=files is not None)
            return read if files is None else files.write(number, read)

        generated, finishing = dict[int, list[Continuation]](), dict[int, Future[list[Rollout]]]()

        def start(wanted: int | None = None) -> None:
            """A thread finishes a wave that was generated; None: all of them."""
            for number in [each for each in generated if wanted in (None, each)]:
                assert pool is not None
                finishing[number] = pool.submit(finish, number, generated.pop(number))

        threads.callback(start)  # also if nobody reads on: what was generated is not lost

        def result(number: int) -> list[Rollout]:
            start(number)
            return finishing.pop(number).result()

        def begin(number: int) -> Callable[[], list[Rollout]]:
            """Generates a wave, and starts to finish the one before while the device is busy. Returns what waits for it."""
            if files is not None and number in finished:
                return partial(files.read, number)
            with path.engine.forest.meanwhile(start):
                found = waves.generate(range(number * wave, min((number + 1) * wave, len(plan))))
            if pool is None:
                return partial(finish, number, found)
            generated[number] = found
            return partial(result, number)

        waiting: list[Callable[[], list[Rollout]]] = []
        for number in range(-(-len(plan) // wave)):
            waiting.append(begin(number))
            while len(waiting) > ahead:
                yield from _counted(bar, waiting.pop(0)())
        for rest in waiting:
            yield from _counted(bar, rest())


def drawn_until_settled(
    branch: Forked, plan: ResamplePlan, wave: int | None, alpha: float, progress: bool
) -> Iterator[Rollout]:
    """At each position, the first rollouts of the plan: wave by wave until the likeliest answer is settled, or all.

    wave  None: SMALL_WAVE. The number drawn depends on it, since waves are drawn whole; no rollout does
    """
    if plan.answer is None:
        raise BadRequest("settle= stops once an answer is settled, and none is read. Give answer=, such as Answer.regex(...).")
    step = min(SMALL_WAVE, plan.n) if wave is None else wave
    races = [Race(alpha) for _ in plan.positions]
    path: Any
    with branch.engine.forest.quiet():
        (path,) = branch.fork()
    with path, tqdm(total=len(plan), unit="rollout", disable=hidden(as_bool("progress", progress))) as bar:
        waves = waves_of(path.engine, path, plan)
        for place, race in enumerate(races):
            for first in range(place * plan.n, (place + 1) * plan.n, step):
                if race.settled is not None:
                    break
                found = waves.draw(range(first, min(first + step, (place + 1) * plan.n)))
                for each in found:
                    race.add(each.outcome)
                yield from _counted(bar, found)


def _counted(bar: Any, found: list[Rollout]) -> list[Rollout]:
    bar.update(len(found))
    return found


def waves_of(engine: Resampler, branch: Any, plan: ResamplePlan) -> Waves:
    """What draws the rollouts of a plan on a branch with its path."""
    return Waves(engine, branch, plan, _capture_of(engine, plan))


def redrawn(engine: Any, found: Rollouts, indices: Sequence[int]) -> list[Rollout]:
    """Rollouts of a plan, drawn again from its path, to be compared with those that were found.

    FingerprintMismatch if the engine would compute other bits, BadRequest if a function read the answers: no file holds it.
    """
    plan = found.plan
    if plan.fingerprint != engine.fingerprint.digest:
        raise FingerprintMismatch("The rollouts were drawn under another fingerprint. Load the engine that drew them.")
    if plan.answer is None and found.read_by_function:
        raise BadRequest(
            "A function read the answers of these rollouts, and no file holds it. Draw them again in Python, by the same call, "
            "and compare the identifiers."
        )
    made = dict[int, Rollout]()
    for place in sorted({plan.rollout(index)[0] for index in indices}):
        own = [index for index in indices if plan.rollout(index)[0] == place]
        with _path_of(engine, plan, place) as branch:
            made |= zip(own, waves_of(engine, branch, plan).draw(own), strict=True)
    return [made[index] for index in indices]


def _path_of(engine: Any, plan: ResamplePlan, place: int) -> Any:
    """A branch with the path of a plan, under the edits that its rollouts at one position have."""
    if plan.edits:  # they may need tokens that follow the prompt
        return engine.planted([list(plan.tokens)], None, [tuple(PlacedEdit.from_json(raw) for raw in plan.edits[place])])[0]
    branch = engine.prompt(plan.tokens[: plan.num_prompt])
    return branch.force(plan.tokens[plan.num_prompt :]) if len(plan.tokens) > plan.num_prompt else branch


def _capture_of(engine: Resampler, plan: ResamplePlan) -> CaptureSpec | None:
    sites = plan.sites[0] if len(plan.sites) == 1 else plan.sites
    return engine.capture_spec(sites) if plan.sites else None


def wave_of(engine: Resampler, plan: ResamplePlan) -> int:
    """How many rollouts the KV cache has room for, besides their path: each has its new tokens, and a copy of the page that
    they begin on. Fewer if their captured rows, of which the wave's last step still holds all, would take too much memory."""
    pool, answer = engine.forest.runner.pool, plan.answer
    more = len(engine.text.encode(answer.after, special=False)) if answer is not None and answer.after else 0
    own = -(-(plan.max_new + more + max(map(len, plan.replace), default=0)) // pool.page_size) + 1
    free = pool.num_pages - -(-len(plan.tokens) // pool.page_size)
    capture, runner = _capture_of(engine, plan), engine.forest.runner
    width = 0 if capture is None else _row_size(engine, plan, capture) * runner.model.dtype.itemsize
    return max(1, min(free // own, MAX_BYTES // ((plan.max_new + 1) * width) if width else MAX_WAVE, MAX_WAVE))


def _row_size(engine: Resampler, plan: ResamplePlan, capture: CaptureSpec) -> int:
    """How many values are captured per token, at most. Of a pattern, each head has one per token of the path."""
    longest = max(plan.length(place * plan.n, plan.max_new) for place in range(len(plan.positions)))
    table, d_model = engine.sites.sites, engine.config.d_model
    shapes = [table[site].shape if site in table else (d_model,) for site in capture.needed() | set(capture.sites)]
    return sum(prod(size or longest for size in shape) for shape in shapes)


def chain_of(engine: Engine, prompt: Prompt, chain: str | Sequence[int] = "") -> Branch:
    """A branch with a prompt (text, token ids or a chat) and, after it, a chain to resample."""
    branch: Branch = engine.prompt(prompt)
    return branch.force(chain) if chain else branch
