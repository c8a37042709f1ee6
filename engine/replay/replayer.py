"""Replays a trace: reproduces every committed and rejected row, bit for bit, in any process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replaylens.engine.errors import BadTrace, ReplayMismatch
from replaylens.engine.loop.lane import Lane
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


class _Replayer:
    def __init__(self, engine: Core, trace: Trace, sites: str | Sequence[str] | None) -> None:
        self.engine, self.trace = engine, trace
        self.capture = None if sites is None else engine.capture_spec(sites, rejected=True)
        self.branches: dict[int, Branch] = {}
        self.left_out: set[int] = set()
        self.lanes: list[Lane] = []
        """all lanes made so far; if the replay fails, they are released"""

    def run(self) -> dict[int, Branch]:
        with self.engine.forest.made() as self.lanes:
            for number, event in enumerate(self.trace.events):
                try:
                    self._apply(number, event)
                except BadTrace:
                    raise
                except (KeyError, TypeError, ValueError, AttributeError) as e:
                    raise BadTrace(f"Event {number} ({event['event']}) does not fit the events before it: {e!r}.") from e
        return self.branches

    def _apply(self, number: int, event: dict[str, Any]) -> None:
        branch = self.branches.get(event["branch"])
        if event["branch"] in self.left_out:
            self.left_out.update([event["child"]] if event["event"] == "fork" else event.get("rejected", ()))
            return
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
            self.engine.forest.compute([lane])
        return Branch(self.engine, lane)

    def _failure(self, number: int, branch: int) -> dict[str, Any] | None:
        """The finish event of the work that event `number` started, if it ended with an error."""
        return next((e for e in self._own_events(number, branch) if e["event"] == "finish" and e["reason"] == "error"), None)

    def _generate(self, number: int, event: dict[str, Any]) -> None:
        """Replay one request: the recorded drafts are verified again, with the same outcome."""
        branch = self.branches[event["branch"]]
        mine = self._own_events(number, event["branch"])
        end = next((e for e in mine if e["event"] == "finish"), None)
        if end is not None and "tokens" in end:  # fast-path tokens: they cannot be verified, so the recorded ones are taken
            branch.lane.exact = False
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
        request = Request(event["n"], sampling, "forced", keep_rejected=keep, drafts=drafts, final=final)
        generated, verdicts = self._again(branch, request, stop)
        self._compare(mine, verdicts)
        if end is not None and (end["generated"], end["path"]) != (generated, path_digest(branch.tokens)):
            raise ReplayMismatch(f"Branch {event['branch']}: {end['generated']} tokens recorded, others replayed: {branch}.")

    def _again(self, branch: Branch, request: Request, stop: int | None) -> tuple[int, list[dict[str, Any]]]:
        """Run a request to its end, or to its `stop` tokens with unchanged windows. Returns the number of generated tokens and
        the verdicts."""
        verdicts: list[dict[str, Any]] = []

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "verdict" and event["branch"] == branch.id:
                verdicts.append(event)

        listeners, alone = self.engine.loop.listeners, self.engine.lock.alone
        alone(listeners.append, listen)
        try:
            (job,) = self.engine.forest.serve(lambda: [replace(self.engine._job(branch, request), cancel_at=stop)])
        finally:
            alone(listeners.remove, listen)
        return job.generated, verdicts

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
