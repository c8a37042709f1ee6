"""`Watch`: fitted probes that read every token while it is generated. Scores are streamed, stop requests and condition edits.

A score is a function of its row, in portable arithmetic (`engine/request/scores.py`). On a branch that is prompted with a
watch, the pass that computes the row records it, on a GPU within the graph of a decode step; on other branches it is computed
from the captured rows when it is read, with the same bits. A row that is rolled back takes its score with it, a rejected draft
has the scores of its own rows, and a pending token, which has no row yet, has no score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, no_such
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.model.sites import STATE, table
from replaylens.engine.records import ProbeRecord, TensorRecord
from replaylens.engine.request.capture import HEAD_SITES, Recording
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import Op, tensor_from_json, tensor_to_json
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.scores import Scorer, Scores, scorers
from replaylens.engine.request.values import as_bool, as_float, as_instance, as_list, hides, named_options, short_repr
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import GenerateKeywords, Request, Stream

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine

Rule = float | tuple[str, float] | str
Stop = Rule | Mapping[str, Rule] | Callable[[Scores], bool]
"""a rule of the only probe; rules by name, any of which ends a request at the first token that meets it; or a function of
the scores. A rule is a threshold that a score is above, ("above", 2.0), ("below", -2.0), or "alarm": the threshold of the
probe's own alarm, whose rate of false alarms is that of whole texts"""
_RULE = 'a number, ("above", 2.0), ("below", -2.0) or "alarm"'
_STOP = (
    f"a rule if there is one probe ({_RULE}), a dict from names of probes to rules, or a function of the scores of one token"
)


class Probe(Protocol):
    """What is watched: a linear probe, such as `fit_probe` returns."""

    @property
    def weight(self) -> np.ndarray:
        """[k, d]"""

    @property
    def bias(self) -> np.ndarray:
        """[k]"""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def label(self) -> str: ...

    @property
    def site(self) -> str: ...


class Scored(NamedTuple):
    """A generated token with its scores."""

    token: int
    position: int
    scores: Scores


# ---- scoring ---------------------------------------------------------------------------------------------------------


def probe_record(name: str, probe: Probe, site: str) -> ProbeRecord:
    """A probe as dumps name it, in float32."""
    tensors = (tensor_to_json(torch.from_numpy(np.ascontiguousarray(x))) for x in (probe.weight, probe.bias))
    weight, bias = (TensorRecord(tuple(raw["shape"]), raw["data"]) for raw in tensors)
    return ProbeRecord(name, site, probe.label, tuple(map(str, probe.classes)), weight, bias)


def _check_lines(name: str, probe: Probe) -> None:
    """Raise BadRequest if weight and bias are not finite in float32, or do not fit each other and the classes."""
    for what, dims in (("weight", 2), ("bias", 1)):
        given = getattr(probe, what)
        if not isinstance(given, np.ndarray) or given.dtype.kind not in "fiu" or given.ndim != dims:
            raise BadRequest(
                f"Invalid {what} of the probe {name!r}: {short_repr(given)}. Give a NumPy array of {dims} dimensions."
            )
        with np.errstate(over="ignore"):
            finite = np.isfinite(given.astype(np.float32)).all()
        if not finite:
            raise BadRequest(f"The {what} of the probe {name!r} has NaN, infinite or too large numbers. Fit it again.")
    lines, classes = len(probe.weight), len(probe.classes)
    if classes < 2 or lines != (1 if classes == 2 else classes) or len(probe.bias) != lines:
        raise BadRequest(
            f"The probe {name!r} has {classes} classes, {lines} lines of weights and {len(probe.bias)} of bias. Two classes "
            "take one line of each, more classes as many lines as classes."
        )


# ---- watch -----------------------------------------------------------------------------------------------------------


@hides("records", "scored", "unscored")
class Watch:
    """Probes on an engine. Make one with `engine.watch`. Immutable, and holds no rows."""

    def __init__(self, engine: Engine, probes: Probe | Mapping[str, Probe]) -> None:
        if isinstance(probes, list | tuple | set):
            raise BadRequest(f"Invalid probes={short_repr(probes)}. Give a dict from names to probes, or a single probe.")
        given = probes if isinstance(probes, Mapping) else {getattr(probes, "label", "probe"): probes}
        if not given:
            raise BadRequest("No probes to watch. Give a fitted probe, or a dict from names to probes.")
        self.engine = engine
        self.alarms_of = {
            str(name): found for name, each in given.items() if (found := getattr(each, "alarm", None)) is not None
        }
        self.records = tuple(
            self._record(as_instance("name of a probe", name, str, "text"), probe) for name, probe in given.items()
        )

    def _record(self, name: str, probe: Any) -> ProbeRecord:
        missing = [each for each in ("weight", "bias", "classes", "label", "site") if not hasattr(probe, each)]
        if missing:
            raise BadRequest(f"{short_repr(probe)} is no linear probe: it has no {missing[0]}. Give one, such as of fit_probe.")
        if hasattr(probe, "require"):
            probe.require(self.engine)  # FingerprintMismatch if it was fitted on another engine's rows
        _check_lines(name, probe)
        site = self.engine.sites.resolve(probe.site)
        width = prod(self.engine.sites.sites[site].shape)
        if width == 0:
            raise BadRequest(
                f"Rows of {site} grow with the path, so that the probe {name!r} cannot read them. Watch another site."
            )
        if probe.weight.shape[1] != width:
            raise BadRequest(f"The probe {name!r} reads {probe.weight.shape[1]} numbers, and a row of {site} has {width}.")
        return probe_record(name, probe, site)

    def __repr__(self) -> str:
        return f"Watch({', '.join(f'{each.name} at {each.site}' for each in self.records)})"

    @property
    def sites(self) -> tuple[str, ...]:
        """What a branch must capture to be watched."""
        return tuple(self._scorers)

    @cached_property
    def _scorers(self) -> dict[str, Scorer]:
        return scorers(self.records)

    @cached_property
    def scored(self) -> tuple[Scorer, ...]:
        """Those whose scores passes record. Rows of thoughts, of recurrent states and after the last block come later."""
        own = table(self.engine.config).sites
        every = self._scorers.values()
        return tuple(x for x in every if x.site in own and x.site not in HEAD_SITES and not x.site.endswith(STATE))

    @property
    def unscored(self) -> tuple[str, ...]:
        """The sites whose rows a branch must capture, so that they can be scored later."""
        return tuple(site for site in self.sites if site not in {each.site for each in self.scored})

    def prompt(self, text: Any, *, sites: str | Sequence[str] | None = (), **options: Any) -> Branch:
        """A root branch that can be watched, and so can its forks. It records the scores, and the rows that the probes read;
        `engine.prompt(text, watch=self)` and `engine.prompts` keep the scores only.

        sites  what to capture besides
        """
        more = [sites] if isinstance(sites, str) else list(sites or ())
        return self.engine.prompt(text, sites=[*more, *self.sites], watch=self, **options)

    def scores(self, branch: Branch) -> Scores:
        """The scores of all captured rows of a branch, in the order of `branch.activations.positions()`: [rows, ...]."""
        return self._of(self.engine._own(branch).activations)

    def alarms(self, branch: Branch) -> list[str]:
        """A line for each probe whose alarm the captured text of a branch gives: with its score, its threshold, and how often
        texts without cause give one. Probes without an alarm say nothing."""
        found = []
        for name, scores in self.scores(branch).items():
            alarm = self.alarms_of.get(name)
            if alarm is not None and (score := alarm.score(scores.numpy())) > alarm.threshold:
                found.append(f"{name}: alarm at {score:.4g}: {alarm}")
        return found

    def edit(self, name: str, op: Op, value: Any = None, *, above: float = 0.0, **options: Any) -> Edit:
        """An edit of the rows that a probe of two classes scores greater than `above`, at the probe's own site.

        options  of `Edit`, such as factor, positions or match_norm

        Whether a row is edited is decided on the row as it is before the edit, in the pass itself: also on tokens to come.
        """
        record = self._named(name)
        weight, bias = tensor_from_json(vars(record.weight)), tensor_from_json(vars(record.bias))
        if len(weight) != 1:
            raise BadRequest(f"The probe {name!r} has {len(record.classes)} classes. A condition takes a probe of two.")
        limit = float(np.float32(as_float("above", above)) - np.float32(bias[0]))
        return Edit(record.site, op, value, when=weight[0], above=limit, **options)

    # ---- generating ---------------------------------------------------------------------------------------------

    @named_options
    def stream(
        self,
        branch: Branch,
        n: int,
        *,
        sampling: Sampling | None = None,
        stop: Stop | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> WatchStream:
        """Generate up to `n` tokens and yield each with its scores, once its row is computed. Options as in `Branch.stream`.

        stop  ends the stream after the first token that meets it; the branch ends with that token

        As with `Branch.stream`, closing early rolls the branch back to the tokens that were yielded.
        """
        test = self._test(stop)
        self._require(branch)
        return WatchStream(self, branch, branch.stream(n, sampling=sampling, **options | {"final": True}), test)

    @named_options
    def generate(
        self,
        branches: Sequence[Branch],
        n: int,
        *,
        stop: Stop,
        sampling: Sampling | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Scored | None]:
        """Generate up to `n` tokens on all branches together, each up to the first token that meets `stop`. Returns that token
        of each branch, with its scores; None: no token met it. To watch without stopping, generate as usual and read `scores`.
        """
        test = self._test(stop)
        given = as_list("branches", branches, "a list of branches")
        for branch in given:
            self._require(branch)
        starts = [branch.length for branch in given]
        request = Request(n, Sampling() if sampling is None else sampling, **options | {"final": True})
        assert test is not None
        looking = _Looking(self, [(branch.lane, start) for branch, start in zip(given, starts, strict=True)], test)

        def jobs() -> list[Job]:
            made = [self.engine._job(branch, request) for branch in given]
            for job in made:
                job.until = partial(looking.met, job.lane)
            return made

        self.engine.forest.serve(jobs)
        found = [self._first(branch, start, test) for branch, start in zip(given, starts, strict=True)]
        for branch, hit in zip(given, found, strict=True):
            if hit is not None and branch.length > hit.position + 1:
                branch.rollback(to=hit.position + 1)
        return found

    def _first(self, branch: Branch, start: int, test: Callable[[Scores], bool]) -> Scored | None:
        """The first generated token that meets the condition, whatever the passes were."""
        tokens, part = branch.tokens, _part(branch.activations, start, branch.length)
        if isinstance(test, _Limits) and part.positions():
            columns = {scorer: _columns(part, scorer) for scorer in self._scorers.values()}
            over = [_met(columns[scorer], limit) for scorer in columns if (limit := test.of(scorer)) is not None]
            hits = torch.stack(over).any(0).nonzero()
            if not len(hits):
                return None
            first = int(hits[0])
            rows = {scorer: scorer.split(own[first : first + 1]) for scorer, own in columns.items()}
            found = {name: x[0] for each in rows.values() for name, x in each.items()}
            at = part.positions()[first]
            return Scored(tokens[at], at, {each.name: found[each.name] for each in self.records})
        for position, scores in self._since(part, start, len(tokens)):
            if test(scores):
                return Scored(tokens[position], position, scores)
        return None

    def _since(self, recording: Recording, start: int, end: int) -> list[tuple[int, Scores]]:
        """The scores of each captured position of [start, end)."""
        part = _part(recording, start, end)
        positions = part.positions()
        if not positions:
            return []
        every = {name: x.unbind() for name, x in self._of(part).items()}
        return [(at, {name: x[i] for name, x in every.items()}) for i, at in enumerate(positions)]

    def _of(self, recording: Recording) -> Scores:
        found: Scores = {}
        for scorer in self._scorers.values():
            found |= scorer.split(_columns(recording, scorer))
        return {each.name: found[each.name] for each in self.records}

    def _test(self, stop: Stop | None) -> Callable[[Scores], bool] | None:
        if stop is None:
            return None
        if callable(stop):
            return _AskedRule(stop)
        if isinstance(stop, int | float | tuple | str) and not isinstance(stop, bool) and len(self.records) == 1:
            stop = {self.records[0].name: stop}
        if not isinstance(stop, Mapping) or not stop:
            raise BadRequest(f"Invalid stop={short_repr(stop)}. Give {_STOP}.")
        limits = {name: self._range(name, rule) for name, rule in stop.items()}
        if several := [name for name in limits if len(self._named(name).classes) != 2]:
            raise BadRequest(f"The probe {several[0]!r} has more than two classes. Give stop as a function of the scores.")
        return _Limits(limits)

    def _range(self, name: str, rule: Rule) -> tuple[float, float]:
        """(low, high) of the scores that do not stop."""
        self._named(name)
        if isinstance(rule, str) and rule == "alarm":
            alarm = self.alarms_of.get(name)
            if alarm is None:
                raise BadRequest(f"The probe {name!r} has no alarm. Give one with probe.with_alarm, or a threshold.")
            if alarm.pooling != "max":
                raise BadRequest(
                    f"The alarm of the probe {name!r} takes the {alarm.pooling} of a text's scores, which no single token "
                    "tells. Generate to the end and read watch.alarms, or give a threshold."
                )
            return -np.inf, float(alarm.threshold)
        if isinstance(rule, tuple):
            if len(rule) != 2 or rule[0] not in ("above", "below"):
                raise BadRequest(f"Invalid stop[{name!r}]={short_repr(rule)}. Give {_RULE}.")
            limit = as_float(f"stop[{name!r}]", rule[1])
            return (-np.inf, limit) if rule[0] == "above" else (limit, np.inf)
        return -np.inf, as_float(f"stop[{name!r}]", rule, hint=f" A rule is {_RULE}.")

    def _named(self, name: str) -> ProbeRecord:
        for each in self.records:
            if each.name == name:
                return each
        raise BadRequest(no_such("probe", str(name)[:60], [each.name for each in self.records]))

    def _require(self, branch: Branch) -> None:
        """Raise BadRequest if it is no branch of this engine, or does not capture what the probes read at each new token."""
        self.engine._own(branch)
        capture = branch.lane.capture
        kept = capture is not None and len(capture.positions.kept(branch.length, branch.length + 2, branch.root_length)) == 2
        own = {*self.scored}
        there = set() if capture is None else {*capture.sites, *(each.site for each in capture.scored if each in own)}
        twins = branch.lane.recording.twins if branch.lane.recording is not None else {}
        if not kept or any(site not in there and twins.get(site) not in there for site in self.sites):
            raise BadRequest(
                f"Branch {branch.id} does not capture {', '.join(self.sites)} at all tokens. Make it with watch.prompt(...)."
            )


@dataclass(frozen=True)
class _AskedRule:
    """A stop condition as a function, whose result must be a bool; a tensor or array of one is, such as of a comparison."""

    function: Callable[[Scores], Any]

    def __call__(self, scores: Scores) -> bool:
        said = self.function(scores)
        plain = said.item() if isinstance(said, Tensor | np.ndarray) and said.ndim == 0 else said
        return as_bool(f"result of the stop function {getattr(self.function, '__name__', 'given')}", plain)


@dataclass(frozen=True)
class _Limits:
    """A stop condition by thresholds."""

    limits: Mapping[str, tuple[float, float]]
    """name -> ends of the scores that do not stop"""

    def __call__(self, scores: Scores) -> bool:
        return any(not low <= float(scores[name]) <= high for name, (low, high) in self.limits.items())

    def of(self, scorer: Scorer) -> Tensor | None:
        """The ends of each line of a scorer [2, lines], without end for others; None: it has none."""
        if not any(each.name in self.limits for each in scorer.records):
            return None
        every = (-torch.inf, torch.inf)
        ends = [self.limits.get(each.name, every) for each in scorer.records for _ in range(each.weight.shape[0])]
        return torch.tensor(ends, dtype=torch.float32).T


def _met(columns: Tensor, ends: Tensor) -> Tensor:
    """[rows] bool: whether any line of scores [rows, lines] leaves its ends [2, lines]."""
    return ((columns < ends[0]) | (columns > ends[1])).any(1)


def _columns(recording: Recording, scorer: Scorer) -> Tensor:
    """The scores of all rows [rows, lines], on the host: a copy of what was recorded, or computed from the rows."""
    if recording.has_scores(scorer.name):
        return recording.scores(scorer.name).to("cpu", copy=True)
    return scorer.columns(recording.peek(scorer.site))


def _part(recording: Recording, start: int, end: int) -> Recording:
    """The rows of positions [start, end)."""
    chunks = list[Any]()
    for chunk in reversed(recording.chunks):
        if chunk.end <= start:
            break
        if chunk.start < end:
            chunks.append((chunk.since(start) if chunk.start < start else chunk).upto(end))
    return recording.like(start, reversed(chunks))


class _Looking:
    """Whether some committed row of a job meets the condition: it ends the job early. What counts is decided afterwards.

    The new rows of all jobs are scored together, when the first of them asks.
    """

    def __init__(self, watch: Watch, lanes: Sequence[tuple[Lane, int]], test: Callable[[Scores], bool]) -> None:
        self.watch, self.test = watch, test
        self.seen = {lane.branch: start for lane, start in lanes}
        self.lanes = [lane for lane, _ in lanes]
        self.hit = set[int]()
        self.limits = [
            (scorer, limit)
            for scorer in watch._scorers.values()
            if isinstance(test, _Limits) and (limit := test.of(scorer)) is not None
        ]

    def met(self, lane: Lane, tokens: Sequence[int]) -> bool:
        if lane.recording is not None and lane.recording.end > self.seen[lane.branch]:
            self._look()
        return lane.branch in self.hit

    def _look(self) -> None:
        new = list[tuple[int, Recording]]()
        for lane in self.lanes:
            recording, seen = lane.recording, self.seen[lane.branch]
            if recording is not None and recording.end > seen:
                self.seen[lane.branch] = recording.end
                new.append((lane.branch, _part(recording, seen, recording.end)))
        if not isinstance(self.test, _Limits):
            for branch, part in new:
                if any(self.test(scores) for _, scores in self.watch._since(part, part.base, part.end)):
                    self.hit.add(branch)
            return
        for scorer, limit in self.limits:
            if all(part.has_scores(scorer.name) for _, part in new):
                columns = [part.scores(scorer.name).cpu() for _, part in new]
            else:
                rows = [part.peek(scorer.site) for _, part in new]
                columns = scorer.columns(torch.cat(rows)).split([len(each) for each in rows])
            over = _met(torch.cat(columns), limit).split([len(each) for each in columns])
            self.hit |= {branch for (branch, _), own in zip(new, over, strict=True) if bool(own.any())}


class WatchStream(Iterator[Scored]):
    """Yields every token of a request with its scores. `stopped` says whether the stop condition ended it."""

    def __init__(self, watch: Watch, branch: Branch, stream: Stream, test: Callable[[Scores], bool] | None) -> None:
        self.branch, self.stopped = branch, False
        self._watch, self._stream, self._test = watch, stream, test
        self._at = self._taken = branch.length
        """the next position to yield, and the next one to take from the stream"""
        self._ready: list[Scored] = []
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Scored:
        if self._closed:
            raise StopIteration
        while not self._ready:
            try:
                next(self._stream)
                self._taken += 1
            except StopIteration:
                self._ready = self._watch.engine.lock.alone(self._scored)
                if not self._ready:
                    self._closed = True
                    raise
            else:
                self._ready = self._watch.engine.lock.alone(self._scored)
        found = self._ready.pop(0)
        try:
            self.stopped = self._test is not None and self._test(found.scores)
        except BaseException:  # the token was not yielded
            self.close()
            raise
        self._at = found.position + 1
        if self.stopped:
            self.close()
        return found

    def _scored(self) -> list[Scored]:
        """The taken tokens whose rows are computed."""
        recording, tokens = self.branch.lane.recording, self.branch.record.tokens
        assert recording is not None
        return [Scored(tokens[at], at, scores) for at, scores in self._watch._since(recording, self._at, self._taken)]

    def close(self) -> None:
        """Stop the request, and cut the branch back to the tokens that were yielded."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            if self.branch.length > self._at:
                self.branch.rollback(to=self._at)
            self._watch.engine.forest.compute([self.branch.lane])  # the last token's row, which it was yielded with
