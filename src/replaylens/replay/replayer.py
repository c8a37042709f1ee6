"""Replays: of task examples and given texts, and of the recorded events of a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from tqdm.auto import tqdm

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, BadRequest, EngineError, ReplayMismatch
from replaylens.engine.loop.lane import Lane, Statistics
from replaylens.engine.machine import require_room
from replaylens.engine.memory.path import path_digest
from replaylens.engine.memory.tree import ORDINARY, BranchRecord
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.proof.trace import Trace
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.edits import Edit, listed
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import require_fit
from replaylens.engine.request.positions import PositionSlice
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import Request
from replaylens.engine.terminal import hidden
from replaylens.tasks.task import Example, Task

# ---- examples --------------------------------------------------------------------------------------------------------
# Replays task examples and given texts: prompt, generate, capture every row of the path.


@dataclass(frozen=True)
class RejectedPath:
    """Rejected drafts: the tokens from `fork_position` on, with canonical rows of their own."""

    branch: int
    tokens: list[int]
    fork_position: int
    activations: Recording | None


@dataclass(frozen=True)
class Result:
    """One example's path."""

    example: Example
    branch: int
    record: BranchRecord = field(repr=False)
    """the branch's record in the engine's tree, kept so that it can be drawn after its release"""
    tokens: list[int]
    text: str
    num_prompt: int
    finish_reason: str | None
    correct: bool | None
    """whether the generated text ends with the right answer, in upper or lower case; None for given texts, which have none"""
    statistics: Statistics
    rejected: list[RejectedPath]
    recording: Recording | None
    certified: bool = True
    """whether all its rows are canonical; only certified results can be dumped"""
    thoughts: Any = None
    """the `Thoughts` on the prompt, for a Thinking-States model"""
    generated_text: str = ""
    """the text of the tokens after the prompt, without the end-of-sequence token that may end it"""

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def activations(self) -> Recording:
        """Captured rows by site, in order of position."""
        if self.recording is None:
            raise BadRequest("Nothing was captured. Replay with sites='STCZ' or site names.")
        return self.recording


@dataclass(frozen=True)
class ReplayOptions:
    """How examples are replayed."""

    sites: str | Sequence[str] | None = None
    """what to capture: "STCZ", or site names"""
    drafter: str = "self"
    window: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """each example samples with the sum of this seed and its index; for independent runs, choose seeds further apart than the
    indices"""
    edits: Sequence[Edit] = ()
    """interventions on every example; negative positions count from the end of its prompt"""
    max_new: int | None = None
    """maximal number of tokens to generate; None: a little more than the right completion has, and none after given texts"""
    rejected: bool = True
    """keep the rows of rejected drafts"""
    deterministic: bool = True
    """False: take the fast path's tokens; the run is then not certified and cannot be saved"""

    def __post_init__(self) -> None:
        if self.max_new is not None:
            object.__setattr__(self, "max_new", as_int("max_new", self.max_new, 0))
        as_instance("sampling", self.sampling, Sampling, "a Sampling")
        object.__setattr__(self, "edits", tuple(listed(self.edits)))
        as_bool("rejected", self.rejected)


def replay_examples(
    engine: Engine, examples: list[Example], options: ReplayOptions, batch: int = 32, progress: bool = False
) -> list[Result]:
    """Prompt with each example, generate its answer and capture every row of the path.

    batch  number of examples served together; changes no bit
    """
    batch, progress = as_int("batch", batch, 1), as_bool("progress", progress)
    for example in examples:
        as_instance("examples", example, Example, "examples of a task, such as tasks.get('coin')().examples(4)")
    o, results = options, list[Result]()
    if len(examples) > batch and o.sites:
        require_captured(engine, examples, range(len(examples)), o.sites, f"A run of {len(examples)} examples")
    with tqdm(total=len(examples), unit="example", disable=hidden(progress)) as bar:
        for first in range(0, len(examples), batch):
            some = examples[first : first + batch]
            branches = prompt_examples(engine, some, o)
            try:
                _continue(engine, some, branches)
                asked = [(b, r) for e, b in zip(some, branches, strict=True) if (r := _request(engine, e, b, o)) is not None]
                engine.serve([branch for branch, _ in asked], [request for _, request in asked])
                results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
            finally:
                for branch in branches:
                    branch.release()
            bar.update(len(some))
    return results


def require_captured(
    engine: Engine, source: Task[Any] | Sequence[Example], indices: Sequence[int], sites: str | Sequence[str], what: str
) -> None:
    """BadRequest if the captured rows of these examples take more memory than there is, by a few of their prompts."""
    if indices:
        require_room(what, memory=len(indices) * bytes_of_example(engine, source, indices, sites))


def bytes_of_example(
    engine: Engine, source: Task[Any] | Sequence[Example], indices: Sequence[int], sites: str | Sequence[str]
) -> int:
    """What the rows of one prompt take at the sites, on average over a few examples."""
    few = [indices[len(indices) * i // _FEW] for i in range(_FEW)]
    prompts = [prompt_of(source[i] if isinstance(source, Sequence) else source.example(i)) for i in few]
    rows = sum(len(engine.text.encode(each) if isinstance(each, str) else each) for each in prompts)
    shapes = [engine.sites.sites[name].shape for name in engine.capture_spec(sites).sites if name in engine.sites.sites]
    return rows * sum(map(prod, shapes)) * engine.model.dtype.itemsize // _FEW


_FEW = 8
"""examples that stand for all"""


def prompt_examples(engine: Engine, examples: Sequence[Example], o: ReplayOptions) -> Sequence[Branch]:
    """Branches with the prompts of the examples, computed together. The caller must release them."""
    prompts = list(map(prompt_of, examples))
    if not any(e.given is not None and e.given.edits for e in examples):
        return engine.prompts(prompts, sites=o.sites, keep_rejected=o.rejected, edits=o.edits)
    if engine.guesses():
        raise BadRequest(
            "Texts with edits of their own are branches of a model that does not think. Replay them on that model."
        )
    paths = [engine.tokens_of(prompt) for prompt in prompts]
    edits = [
        own_edits(example, engine.sites) + engine.placed(o.edits, len(path))
        for example, path in zip(examples, paths, strict=True)
    ]
    capture = engine.capture_spec(o.sites, rejected=o.rejected) if o.sites else None
    return engine.planted(paths, capture, edits)


def prompt_of(example: Example) -> str | list[int]:
    """What an engine is prompted with: the text of a task, the tokens of a given text."""
    given = example.given
    return example.prompt if given is None else list(given.tokens[: given.num_prompt])


def own_edits(example: Example, table: SiteTable) -> tuple[PlacedEdit, ...]:
    """The edits of a branch that became a text. BadRequest if they are damaged, BadEdit if the model has no such place."""
    try:
        return tuple(require_fit(PlacedEdit.from_json(raw), table) for raw in (example.given.edits if example.given else ()))
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"Text {example.index} has edits that cannot be read: {error!r}.") from error


def _continue(engine: Engine, examples: Sequence[Example], branches: Sequence[Branch]) -> None:
    """Mutates: appends to each branch what follows the prompt of a given text."""
    more = [(b, list(e.given.tokens[b.root_length :])) for e, b in zip(examples, branches, strict=True) if e.given is not None]
    if more := [(branch, rest) for branch, rest in more if rest]:
        engine.force_all([branch for branch, _ in more], [rest for _, rest in more])


def _request(engine: Engine, example: Example, branch: Branch, options: ReplayOptions) -> Request | None:
    """The generation of one example's answer, with its own length and seed; None if nothing is generated."""
    o, n = options, options.max_new
    if n is None:
        n = 0 if example.given is not None else len(engine.text.encode(example.completion, special=False)) + 2
    if not n or _ended(engine, example):
        return None
    n = min(n, engine.config.max_positions - branch.length)
    if n < 1:
        raise BadRequest(f"Example {example.index}: its prompt of {branch.length} tokens leaves no room to generate.")
    sampling = replace(o.sampling, seed=(o.sampling.seed + example.index) % 2**64)
    return Request(n, sampling, o.drafter, o.window, o.deterministic, final=True)


def _ended(engine: Engine, example: Example) -> bool:
    """Whether a branch that became a text had generated the token that ends a sequence."""
    given = example.given
    return given is not None and len(given.tokens) > given.num_prompt and given.tokens[-1] == engine.text.eos_id


def result_of(engine: Engine, example: Example, branch: Branch) -> Result:
    """The result of an example from the branch that generated its answer. Precondition: the branch is not released."""
    thoughts = branch.lane.carried
    rejected = [
        RejectedPath(other.id, other.tokens, other.record.fork_position, other.lane.recording) for other in branch.rejected
    ]
    return Result(
        example=example,
        branch=branch.id,
        record=branch.record,
        tokens=branch.tokens,
        text=branch.text,
        num_prompt=branch.root_length,
        finish_reason=branch.finish_reason,
        correct=None if example.given is not None else _is_right(engine, example, branch.generated),
        statistics=branch.statistics,
        rejected=rejected,
        recording=branch.lane.recording,
        certified=branch.certified,
        thoughts=None if thoughts is None else thoughts.copy(),
        generated_text=branch.generated_text,
    )


def _is_right(engine: Engine, example: Example, generated: list[int]) -> bool:
    """Whether the generated tokens end with the example's answer."""
    answer = engine.text.decode([token for token in generated if token != engine.text.eos_id])
    return _last_word(answer) == _last_word(example.completion)


def _last_word(text: str) -> str:
    """The last word in lower case, without punctuation. In every rendering it is the answer."""
    words = text.lower().replace(".", " ").split()
    return words[-1] if words else ""


# ---- replayer --------------------------------------------------------------------------------------------------------
# Replays a trace: reproduces every committed and rejected row, bit for bit, in any process.


def replay_trace(engine: Engine, trace: Trace, sites: str | Sequence[str] | None = None) -> dict[int, Branch]:
    """The trace's branches by their recorded ids, including rejected ones that kept rows or pages.

    sites  capture these instead of the recorded sites

    Branches that are not certified get their recorded tokens. Their rejected drafts, and forks of these, are left out: nothing
    is promised about them. A request that was still running when the trace was taken is replayed to its end.
    Raises FingerprintMismatch before anything runs, and ReplayMismatch if a verification differs from the recorded one.
    """
    as_instance("trace", trace, Trace, "a Trace; replay(...) takes examples").require(engine.fingerprint)
    return _Replayer(engine, trace, sites).run()


@dataclass(frozen=True)
class _Waiting:
    """A recorded request that waits to be served with others."""

    branch: Branch
    request: Request
    stop: int | None
    """the number of tokens after which it was cancelled"""
    events: list[dict[str, Any]]
    """its draft, verdict and finish events"""
    end: dict[str, Any] | None


class _Replayer:
    """Applies the events in order. Prompts and requests wait until an event needs their outcome, and are computed together."""

    def __init__(self, engine: Engine, trace: Trace, sites: str | Sequence[str] | None) -> None:
        self.engine = engine
        self.events = list(trace.events)  # an engine that replays its own trace adds to it meanwhile
        self.capture = None if sites is None else engine.capture_spec(sites, rejected=True)
        self.branches: dict[int, Branch] = {}
        self.left_out: set[int] = set()
        self.lanes: list[Lane] = []
        """all lanes made so far; if the replay fails, they are released"""
        self.planted: list[Lane] = []
        """prompts to compute"""
        self.waiting: list[_Waiting] = []

    def run(self) -> dict[int, Branch]:
        with self.engine.forest.made() as self.lanes:
            number, kind = 0, "none"
            try:
                for number, event in enumerate(self.events):
                    kind = event["event"]
                    self._apply(number, event)
                self._serve()
            except BadFile:
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                raise BadFile(f"Event {number} ({kind}) or one before it does not fit the others: {e!r}.") from e
        return self.branches

    def _apply(self, number: int, event: dict[str, Any]) -> None:
        branch = self.branches.get(event["branch"])
        if event["branch"] in self.left_out:
            self.left_out.update([event["child"]] if event["event"] == "fork" else event.get("rejected", ()))
            return
        if event["event"] in ("fork", "force", "rollback", "release"):
            self._serve()
            branch = self.branches.get(event["branch"])
        match event["event"]:
            case "plant":
                self.branches[event["branch"]] = self._plant(number, event)
            case "generate":
                self._generate(number, event)
            case "fork" if branch is not None:
                self.lanes.append(fork := self.engine.forest.fork(branch.lane, event["at"], _edits(event)))
                self.branches[event["child"]] = Branch(self.engine, fork)
            case "force" if branch is not None:
                failed = self._failure(number, event["branch"])  # if it failed, force only the tokens that were committed
                if tokens := event["tokens"][: failed["length"] - branch.length if failed else None]:
                    branch.force(tokens)
            case "rollback" if branch is not None:
                self.engine.forest.rollback(branch.lane, event["to"], event.get("pending", False))
            case "release" if branch is not None:
                branch.release()
            case "draft" | "verdict" | "finish":
                pass  # replayed with their generate event
            case other:
                raise BadFile(f"Event {number} ({other}) names branch {event['branch']}, which does not exist.")

    def _plant(self, number: int, event: dict[str, Any]) -> Branch:
        capture = self.capture or _capture(event["capture"])
        lane = self.engine.forest.plant(self.engine._check_tokens(event["tokens"]), capture, _edits(event))
        self.lanes.append(lane)
        if not self._failure(number, event["branch"]):
            self.planted.append(lane)
        return Branch(self.engine, lane)

    def _failure(self, number: int, branch: int) -> dict[str, Any] | None:
        """The finish event of the work that event `number` started, if it ended with an error."""
        return next((e for e in self._own_events(number, branch) if e["event"] == "finish" and e["reason"] == "error"), None)

    def _generate(self, number: int, event: dict[str, Any]) -> None:
        """Replay one request: the recorded drafts are verified again, with the same outcome."""
        if event["branch"] not in self.branches or any(each.branch is self.branches[event["branch"]] for each in self.waiting):
            self._serve()  # its own last request, or the one that rejected it, comes first
        branch = self.branches[event["branch"]]
        mine = self._own_events(number, event["branch"])
        end = next((e for e in mine if e["event"] == "finish"), None)
        if end is not None and "tokens" in end:  # fast-path tokens: they cannot be verified, so the recorded ones are taken
            self._serve()
            branch.lane.exact = False
            self.engine.tree.uncertify(branch.id, branch.length, ORDINARY)
            if more := end["tokens"][branch.length :]:
                branch.force(more)
            if (ended := end.get("ended", end["reason"])) in ("eos", "stop"):
                self.engine.tree.finish(branch.id, ended)
            self.left_out.update(kept for e in mine if e["event"] == "verdict" for kept in e["rejected"])
            return
        stop = end["generated"] if end is not None and end["reason"] in ("cancelled", "error") else None
        if stop == 0:
            return
        drafts = {e["at"]: e["chains"] for e in mine if e["event"] == "draft"}
        sampling, keep, final = Sampling.from_json(event["sampling"]), event["keep_rejected"], event["final"]
        request = Request(event["n"], sampling, "forced", keep_pages=keep, drafts=drafts, final=final)
        self.waiting.append(_Waiting(branch, request, stop, mine, end))

    def _serve(self) -> None:
        """Compute the planted prompts, then all waiting requests, together. ReplayMismatch names one with another outcome."""
        planted, waiting, self.planted, self.waiting = self.planted, self.waiting, [], []
        if planted:
            self.engine.forest.compute(planted)
        if not waiting:
            return
        for each, (generated, verdicts) in zip(waiting, self._again(waiting), strict=True):
            self._compare(each.events, verdicts)
            end, branch = each.end, each.branch
            if end is not None and (end["generated"], end["path"]) != (generated, path_digest(branch.tokens)):
                raise ReplayMismatch(f"Branch {end['branch']}: {end['generated']} tokens recorded, others replayed: {branch}.")

    def _again(self, waiting: list[_Waiting]) -> list[tuple[int, list[dict[str, Any]]]]:
        """Run requests to their end, or to their `stop` tokens with unchanged windows. Returns, for each, the number of
        generated tokens and the verdicts."""
        verdicts: dict[int, list[dict[str, Any]]] = {each.branch.id: [] for each in waiting}

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "verdict" and event["branch"] in verdicts:
                verdicts[event["branch"]].append(event)

        listeners, alone = self.engine.loop.listeners, self.engine.lock.alone
        alone(listeners.append, listen)
        try:
            jobs = self.engine.forest.serve(
                lambda: [replace(self.engine._job(each.branch, each.request), cancel_at=each.stop) for each in waiting]
            )
        finally:
            alone(listeners.remove, listen)
        return [(job.generated, verdicts[job.lane.branch]) for job in jobs]

    def _own_events(self, number: int, branch: int) -> list[dict[str, Any]]:
        """The draft, verdict and finish events of the work that event `number` started. Other events may lie between."""
        mine = []
        for event in self.events[number + 1 :]:
            if event["branch"] == branch and event["event"] in ("draft", "verdict", "finish"):
                mine.append(event)
                if event["event"] == "finish":
                    break
        return mine

    def _compare(self, recorded: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
        then = [e for e in recorded if e["event"] == "verdict"]
        for old, new in zip(then, now, strict=False):
            if (old["chain"], old["accepted"], list(old["pending"])) != (new["chain"], new["accepted"], list(new["pending"])):
                raise ReplayMismatch(f"Branch {old['branch']}: recorded {old}, replayed {new}.")
            if len(old["rejected"]) != len(new["rejected"]):
                raise ReplayMismatch(f"Branch {old['branch']}: recorded {old}, replayed {new}.")
            for old_id, new_id in zip(old["rejected"], new["rejected"], strict=True):
                if new_id in self.engine.loop.lanes:
                    self.branches[old_id] = Branch(self.engine, self.engine.loop.lanes[new_id])
        if len(then) != len(now):
            raise ReplayMismatch(f"{len(then)} verifications recorded, {len(now)} replayed.")


def _edits(event: dict[str, Any]) -> tuple[PlacedEdit, ...]:
    if event.get("hooks"):
        raise BadFile(
            f"Branch {event['branch']} had hook functions, which a trace cannot hold. Use edits to make it replayable."
        )
    return tuple(PlacedEdit.from_json(raw) for raw in event.get("edits", ()))


def _capture(raw: dict[str, Any] | None) -> CaptureSpec | None:
    if raw is None:
        return None
    lens = None if raw["lens"] is None else LensSpec.from_json(raw["lens"])
    where = PositionSlice(**raw["positions"]) if "positions" in raw else PositionSlice()
    thoughts = tuple(raw.get("thoughts", ()))
    return CaptureSpec(tuple(raw["sites"]), lens, raw["rejected"], raw["last"], thoughts, where, raw.get("keep", "host"))
