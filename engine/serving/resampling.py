"""`Resampled`: resampling as a verb of a branch. The rollouts themselves are drawn by `Waves`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.progress import hidden
from replaylens.engine.proof.fingerprint import Fingerprint
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.options import named_options
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import flag, instance, integer, items, shown, token_ids, whole
from replaylens.engine.resampling.answers import Answer
from replaylens.engine.resampling.folder import WaveFolder
from replaylens.engine.resampling.plan import (
    MAX_ROLLOUTS,
    ForkPositions,
    KeptPlaces,
    ResamplePlan,
    places_kept,
    positions_of,
    unit_texts,
)
from replaylens.engine.resampling.rollout import Rollout
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.serving.request import SAMPLING
from replaylens.engine.serving.waves import Served, Waves

MAX_WAVE = 1024
"""rollouts drawn together by default: more do not make a pass quicker"""
MAX_BYTES = 4 << 30
"""bytes of captured rows of a wave, about, by default"""
REPLACE = "a text or token ids, or a list of texts with one for each position"
Replacement = str | Sequence[int] | Sequence[str] | None


class Resampler(Served, Protocol):
    """What resampling needs from the branch's engine."""

    fingerprint: Fingerprint
    sites: SiteTable

    def capture_spec(self, sites: str | Sequence[str]) -> CaptureSpec:
        """What to capture."""
        ...

    def _check_tokens(self, ids: list[int], before: int = 0) -> list[int]:
        """The ids, checked."""
        ...


class Resampled:
    """A path that can be resampled."""

    engine: Any
    lane: Lane
    record: BranchRecord

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
        progress: bool = False,
    ) -> Rollouts:
        """Draw `n` continuations at each of some positions of this path. The branch itself is not changed.

        at        where: "sentences" (the start of each sentence after the prompt), "tokens" (each token after it), a position,
                  several, or a function of position and token text. A rollout at position p keeps the first p tokens. Default:
                  the end of the path
        sampling  default: temperature 1. Each rollout has a seed of its own, made from this seed, position and number
        max_new   maximal number of tokens; 0 with choices: they are read right at the fork
        answer    how outcomes are read: `Answer.regex`, `Answer.choices` or `Answer.function`
        sites     what to capture, such as "S"; rows are kept at the places that `keep` names
        keep      "fork" (the last token before the rollout), "sentences" (the last token of each sentence), "answer", "last",
                  "all", or numbers of generated tokens; one or several
        replace   what comes at each position instead of the path's own tokens: a text, token ids, or a list of texts with one
                  for each position. The rollout goes on from there
        wave      rollouts drawn together, which bounds memory; default: as many as the KV cache has room for, at most 1024.
                  Changes no bit
        folder    where finished waves are kept. The same call goes on with a folder that was left unfinished
        progress  show a bar

        A rollout is the same, bit for bit, whatever `n`, `wave` and its company are.

        >>> from replaylens import Answer, Engine
        >>> root = Engine.load("coin-plain").prompt("A coin's state is heads. Alice flips. What's the state? A:")
        >>> root.resample(20, max_new=2, answer=Answer.regex("heads|tails")).outcomes().outcomes
        ['tails']
        """
        plan, wave = self.plan_rollouts(n, at, sampling, max_new, answer, sites, keep, replace, wave)
        found = list(self._stream(self._held_path(), plan, wave, folder, flag("progress", progress)))
        return Rollouts(plan, tuple(found))

    @named_options
    def stream_rollouts(
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
        progress: bool = False,
    ) -> Iterator[Rollout]:
        """Yield the rollouts of `resample` in their order, wave by wave. What is not yielded yet is not drawn, and what is not
        held is not kept. With a `folder`, those of finished waves are yielded again, from their files."""
        plan, wave = self.plan_rollouts(n, at, sampling, max_new, answer, sites, keep, replace, wave)
        return self._stream(self._held_path(), plan, wave, folder, flag("progress", progress))

    def plan_rollouts(
        self,
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
        if not self.lane.certified:
            raise NotCertified(
                f"Branch {self.record.id} was computed by the fast path or hook functions. Resample a certified one."
            )
        engine, tokens = self.engine, tuple(self.record.tokens)
        n, max_new = whole("n", n, 1, MAX_ROLLOUTS), whole("max_new", max_new, 0)
        sampling = instance("sampling", Sampling(temperature=1.0) if sampling is None else sampling, Sampling, SAMPLING)
        if answer is not None:
            instance("answer", answer, Answer, "an Answer, such as Answer.regex(...)")
            engine.token_ids_of(answer.tokens)
        if n > 1 and max_new and not sampling.temperature:
            raise BadRequest(f"Greedy rollouts are all the same, and n={n} were asked for. Give a temperature, or n=1.")
        if not max_new and (answer is None or not answer.tokens or n > 1):
            raise BadRequest("max_new=0 draws nothing. Give more, or Answer.choices and n=1 to read choices right at the fork.")
        positions = positions_of(at, tokens, self.record.root_length, engine.text)
        if len(positions) * n > MAX_ROLLOUTS:
            raise BadRequest(f"{len(positions)} positions with {n} rollouts each are more than {MAX_ROLLOUTS}. Ask for fewer.")
        names = () if sites is None else (sites,) if isinstance(sites, str) else tuple(items("sites", sites, "names of sites"))
        plan = ResamplePlan(
            engine.fingerprint.digest,
            tokens,
            self.record.root_length,
            positions,
            unit_texts(positions, tokens, engine.text),
            n,
            max_new,
            sampling,
            answer,
            tuple(name for name in names if name),
            places_kept(keep),
            self._replacements(replace, len(positions)),
            self._edits(positions),
        )
        return plan, wave_of(engine, plan) if wave is None else whole("wave", wave, 1)

    def _replacements(self, replace: Replacement, count: int) -> tuple[tuple[int, ...], ...]:
        """Token ids for each position; empty: nothing is replaced."""
        if replace is None:
            return ()
        encode: Callable[[str], list[int]] = lambda text: self.engine.text.encode(text, special=False)  # noqa: E731
        if isinstance(replace, str):
            found = [encode(replace)] * count
        elif all(integer(each) is not None for each in replace):
            found = [token_ids("replace", replace)] * count
        else:
            texts = items("replace", replace, REPLACE)
            found = [encode(instance("replace", each, str, REPLACE)) for each in texts]
        if [] in found:
            empty = replace if len(replace) == 0 else ""
            raise BadRequest(f"replace={shown(empty)} has no tokens. Give {REPLACE}, or None to replace nothing.")
        if len(found) != count:
            raise BadRequest(f"Got {len(found)} replacements for {count} positions. Give one for all, or one for each.")
        return tuple(tuple(self.engine._check_tokens(ids)) for ids in found)

    def _edits(self, positions: Sequence[int]) -> tuple[tuple[dict[str, Any], ...], ...]:
        edits = self.lane.edits
        return tuple(tuple(edit.to_json() for edit in edits if edit.needs <= at) for at in positions) if edits else ()

    def _held_path(self) -> Any:
        """A fork that stays on this path while rollouts are drawn, whatever becomes of the branch."""
        branch: Any = self
        with self.engine.forest.quiet():
            return branch.fork()[0]

    def _stream(self, path: Any, plan: ResamplePlan, wave: int, folder: str | Path | None, progress: bool) -> Iterator[Rollout]:
        with path:
            yield from self._drawn(path, plan, wave, folder, progress)

    def _drawn(self, path: Any, plan: ResamplePlan, wave: int, folder: str | Path | None, progress: bool) -> Iterator[Rollout]:
        waves = waves_of(self.engine, path, plan)
        files = None if folder is None else WaveFolder.create(folder, plan, wave)
        wave = wave if files is None else files.wave
        missing = set() if files is None else set(files.missing())
        with tqdm(total=len(plan), unit="rollout", disable=hidden(progress)) as bar:
            for number in range(-(-len(plan) // wave)):
                indices = range(number * wave, min((number + 1) * wave, len(plan)))
                if files is None:
                    found = waves.draw(indices)
                else:
                    found = files.write(number, waves.draw(indices)) if number in missing else files.read(number)
                bar.update(len(found))
                yield from found


def waves_of(engine: Resampler, branch: Any, plan: ResamplePlan) -> Waves:
    """What draws the rollouts of a plan on a branch with its path."""
    return Waves(engine, branch, plan, _capture_of(engine, plan))


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
    width = 0 if capture is None else _row_size(engine, plan, capture) * runner.model.embed.element_size()
    return max(1, min(free // own, MAX_BYTES // ((plan.max_new + 1) * width) if width else MAX_WAVE, MAX_WAVE))


def _row_size(engine: Resampler, plan: ResamplePlan, capture: CaptureSpec) -> int:
    """How many values are captured per token, at most. Of a pattern, each head has one per token of the path."""
    longest = max(plan.length(place * plan.n, plan.max_new) for place in range(len(plan.positions)))
    table, d_model = engine.sites.sites, engine.config.d_model
    shapes = [table[site].shape if site in table else (d_model,) for site in capture.needed() | set(capture.sites)]
    return sum(prod(size or longest for size in shape) for shape in shapes)
