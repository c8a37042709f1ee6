"""Replays a trace: reproduces every committed and rejected row, bit for bit, in any process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from replaylens.engine.errors import BadTrace, ReplayMismatch
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import ORDINARY
from replaylens.engine.proof.trace import Trace, path_digest
from replaylens.engine.request.capture import CaptureSpec, LensSpec
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.positions import Where
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import instance
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.request import Request


def replay_trace(engine: Core, trace: Trace, sites: str | Sequence[str] | None = None) -> dict[int, Branch]:
    """The trace's branches by their recorded ids, including rejected ones that kept rows or pages.

    sites  capture these instead of the recorded sites

    Branches that are not certified get their recorded tokens. Their rejected drafts, and forks of these, are left out: nothing
    is promised about them. A request that was still running when the trace was taken is replayed to its end.
    Raises OtherFingerprint before anything runs, and ReplayMismatch if a verification differs from the recorded one.
    """
    instance("trace", trace, Trace, "a Trace; replay(...) takes examples").require(engine.fingerprint)
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

    def __init__(self, engine: Core, trace: Trace, sites: str | Sequence[str] | None) -> None:
        self.engine, self.trace = engine, trace
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
                for number, event in enumerate(self.trace.events):
                    kind = event["event"]
                    self._apply(number, event)
                self._serve()
            except BadTrace:
                raise
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                raise BadTrace(f"Event {number} ({kind}) or one before it does not fit the others: {e!r}.") from e
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
                raise BadTrace(f"Event {number} ({other}) names branch {event['branch']}, which does not exist.")

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
        for event in self.trace.events[number + 1 :]:
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
        raise BadTrace(
            f"Branch {event['branch']} had hook functions, which a trace cannot hold. Use edits to make it replayable."
        )
    return tuple(PlacedEdit.from_json(raw) for raw in event.get("edits", ()))


def _capture(raw: dict[str, Any] | None) -> CaptureSpec | None:
    if raw is None:
        return None
    lens = None if raw["lens"] is None else LensSpec.from_json(raw["lens"])
    where = Where(**raw["positions"]) if "positions" in raw else Where()
    thoughts = tuple(raw.get("thoughts", ()))
    return CaptureSpec(tuple(raw["sites"]), lens, raw["rejected"], raw["last"], thoughts, where, raw.get("keep", "host"))
