"""Traces: a fresh engine in another process reproduces every committed and rejected row, bit for bit.

Run as a program with the path of a trace, this file prints the digests of its replay.
"""

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadFile,
    BadRequest,
    EngineError,
    FingerprintMismatch,
    NonFinite,
    OutOfPages,
    ReplayMismatch,
)
from replaylens.engine.memory.path import path_digest
from replaylens.engine.proof import fingerprint
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from tests.devices import covering
from tests.engine.coin_engine import PROMPT, fresh
from tests.toy_model import Reference, continuation, engine, random_model, toy, watch_passes

HOT = Sampling(temperature=1.1, top_p=0.95, presence_penalty=0.2, logit_bias={4: 0.5}, seed=77)
SITES = ("blocks.0.hook_in", "blocks.1.mlp.hook_out")


def digest(branch: Branch) -> str:
    """The digest of a branch: tokens, their states, KV, and captured rows with their positions.

    For the branch of an ordinary request, only the tokens are promised.
    """
    lane, h = branch.lane, hashlib.sha256(repr((branch.tokens, branch.certified)).encode())
    if not branch.certified:
        return h.hexdigest()
    h.update(repr((branch.states, branch.status.value)).encode())
    h.update(branch.kv().numpy().tobytes())
    if lane.recording is not None:
        h.update(repr(lane.recording.positions()).encode())
        for site in lane.recording.sites():
            h.update(site.encode() + lane.recording[site].contiguous().numpy().tobytes())
    return h.hexdigest()


@pytest.fixture(autouse=True)
def unreleased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace does not say which branches nobody held any more. So that all can be compared, they stay open here."""
    monkeypatch.setattr(Forest, "abandon", lambda forest, lane: None)


def digests(branches: dict[int, Branch]) -> dict[str, str]:
    """The digests of all live branches."""
    return {str(number): digest(b) for number, b in sorted(branches.items()) if b.id in b.engine.loop.lanes}


def alive(subject: Engine) -> dict[int, Branch]:
    return {number: Branch(subject, lane) for number, lane in subject.loop.lanes.items()}


def story(subject: Engine) -> None:
    """A session with forks, forced tokens, rollbacks, a cancel, a continued rejected branch, draws and a release."""
    root, other = subject.prompts([[1, 2, 3, 4, 5], [6, 7, 8]], sites="STCZ", keep_rejected=True)
    subject.generate([root, other], 9, drafter="lens", window=4, keep_pages=True)
    right, wrong, gone = root.fork(3, at=8)
    right.force([10, 11]).generate(6, sampling=HOT, drafter="tree", window=4)
    wrong.force([12]).generate(8, drafter="self", window=5, final=True)
    wrong.rollback(10).generate(4, drafter="lens", window=3)
    gone.generate(3, window=2)
    stream = right.stream(30, drafter="lens", window=6)
    for _ in range(4):
        next(stream)
    (early,) = right.fork(at=9)  # while its parent is being generated
    stream.close()
    early.generate(2, drafter="tree", window=4)
    (revived,) = root.rejected[0].fork()
    revived.generate(5, sampling=HOT, drafter="lens", window=4)
    plain = subject.prompt([1, 2, 3, 4, 5, 9], sites=SITES)
    plain.generate(5, window=1, sampling=Sampling(stop_tokens=(3,)))
    ordinary = subject.prompt([20, 21]).generate(4, deterministic=False)
    ordinary.generate(2, window=1)
    gone.release()
    subject.check_integrity()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The trace of the story, and the digests of its branches."""
    subject = engine(record=True)
    story(subject)
    file = tmp_path_factory.mktemp("trace") / "story.jsonl"
    subject.trace.save(file)
    return file, digests(alive(subject))


# ---- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fresh_process_comes_to_every_row_again(told: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    file, expected = told
    env = {**os.environ, "REPLAYLENS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])}
    command = [sys.executable, "-m", "tests.engine.proof.test_trace", str(file)]
    out = subprocess.run(command, env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == expected
    assert len(expected) > 20, "rejected branches included"


@pytest.mark.parametrize("options", [{"page_size": 16, "lens_layer": 2}, {"page_size": 1, "max_rows": 32, "cache_tokens": 512}])
def test_an_engine_of_another_shape_does_too(told: tuple[Path, dict[str, str]], options: dict[str, Any]) -> None:
    """Page size, rows per pass and drafters are not in the trace, since no bit depends on them."""
    file, expected = told
    subject = engine(**options)
    subject.prompt([30, 31]).generate(2)  # the engine need not be fresh
    replayed = digests(subject.replay_trace(Trace.load(file)))
    assert replayed == expected
    subject.check_integrity()


def test_requests_that_ran_together_are_replayed_together() -> None:
    """One pass per step for all of them, as when they were recorded."""
    recorded, again = engine(record=True), engine()
    branches = recorded.prompts([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    recorded.generate(branches, 9, drafter="lens", window=4)
    passes = watch_passes(again)
    replayed = again.replay_trace(recorded.trace)
    assert [replayed[b.id].tokens for b in branches] == [b.tokens for b in branches]
    assert len(passes[0]) == len(passes[1]) == 3, "the prompts in one pass, then the requests"
    assert max(map(len, passes[2:])) > 1


def test_the_digests_have_teeth(told: tuple[Path, dict[str, str]]) -> None:
    """Negative control: the same story with the fast path as verifier gives other rows."""
    subject = engine()
    exact, fast = subject.runner.exact, subject.runner.fast

    def one_by_one(segments: list[Any], tap: Any = None, stop_at_layer: int | None = None) -> Any:
        alone = stop_at_layer is None and len(segments) == 1 and len(segments[0].tokens) == 1
        return fast(segments, tap) if alone else exact(segments, tap, stop_at_layer)

    subject.runner.exact = one_by_one
    story(subject)
    differing = [number for number, d in digests(alive(subject)).items() if told[1].get(number) != d]
    assert differing


def test_a_replay_can_capture_what_was_not_captured_then(told: tuple[Path, dict[str, str]]) -> None:
    site = "blocks.1.attn.hook_out"
    branches = engine().replay_trace(Trace.load(told[0]), sites=[site])
    seen = 0
    for branch in branches.values():
        if branch.certified and branch.id in branch.engine.loop.lanes:
            positions = branch.activations.positions()
            truth = Reference(toy(), branch.tokens, [site]).rows[site]
            assert torch.equal(branch.activations[site], truth[positions])
            seen += len(positions)
    assert seen > 100


# ---- the file --------------------------------------------------------------------------------------------------------


def test_saving_and_loading_gives_the_same_trace_and_the_same_bytes(told: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    trace = Trace.load(told[0])
    trace.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == told[0].read_bytes()
    assert Trace.load(tmp_path / "again.jsonl") == trace


def test_the_same_story_gives_the_same_bytes(told: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """The file has no times, batches or page numbers. Another page size makes no difference."""
    subject = engine(page_size=8, cache_tokens=4096, record=True)
    story(subject)
    subject.trace.save(tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_bytes() == told[0].read_bytes()


def test_a_trace_of_another_model_is_refused(told: tuple[Path, dict[str, str]]) -> None:
    subject = engine(random_model(1))
    with pytest.raises(FingerprintMismatch, match=r"weights: \w+ here, \w+ there"):
        subject.replay_trace(Trace.load(told[0]))
    assert subject.loop.lanes == {} and subject.tree.roots() == [], "before anything runs"


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


DAMAGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "empty": (lambda lines: [], "line 1: not a trace header"),
    "no header": (lambda lines: lines[1:], "line 1: not a trace header"),
    "not a trace": (lambda lines: [b"# Notes\n", b"and more\n"], "line 1: not a trace header"),
    "binary": (lambda lines: [b"\x80\x00\xff\n", *lines[1:]], "line 1: not a trace header"),
    "another format": (
        lambda lines: [lines[0].replace(b'"format":1', b'"format":9'), *lines[1:]],
        "format 9. This version reads format 1",
    ),
    "a fingerprint with a part too many": (
        lambda lines: [lines[0].replace(b'"fingerprint":{', b'"fingerprint":{"mood":"x",'), *lines[1:]],
        "line 1: not a trace header",
    ),
    "cut within a line": (lambda lines: [*lines[:6], lines[6][:9]], "line 7"),
    "cut after a line": (lambda lines: lines[:6], "line 6: not the closing line"),
    "a line that is no JSON": (lambda lines: [*lines[:4], b"{oops\n", *lines[5:]], "line 5: not an event"),
    "a line with bad bytes": (lambda lines: [*lines[:4], b'{"event":"\xff"}\n', *lines[5:]], "line 5: not an event"),
    "an unknown event": (lambda lines: [*lines[:4], b'{"branch":0,"event":"dance"}\n', *lines[5:]], "line 5: not an event"),
    "an event of no branch": (lambda lines: [*lines[:4], b'{"event":"release"}\n', *lines[5:]], "line 5: not an event"),
    "a list": (lambda lines: [*lines[:4], b"[1,2]\n", *lines[5:]], "line 5: not an event"),
    "a line too few": (lambda lines: [*lines[:4], *lines[5:]], "not the closing line"),
    "a line twice": (lambda lines: [*lines[:5], *lines[4:]], "not the closing line"),
    "something after the end": (lambda lines: [*lines, lines[4]], "not an event"),
    "Windows line ends": (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], "not the closing line"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_the_line(told: tuple[Path, dict[str, str]], tmp_path: Path, damage: str) -> None:
    change, saying = DAMAGES[damage]
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"".join(change(lines_of(told[0]))))
    with pytest.raises(BadFile, match=saying) as caught:
        Trace.load(broken)
    assert "broken.jsonl" in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_byte_of_the_file_can_change_unnoticed(
    told: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(told[0].read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    broken = tmp_path_factory.getbasetemp() / "flipped.jsonl"
    broken.write_bytes(raw)
    with pytest.raises(BadFile):
        Trace.load(broken)


# ---- tampered traces -------------------------------------------------------------------------------------------------


def first(trace: Trace, kind: str, fits: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
    return next(event for event in trace.events if event["event"] == kind and fits(event))


def bump(values: list[int]) -> None:
    values[0] = (values[0] + 1) % 50


def change_a_draft_that_stood(trace: Trace) -> None:
    verdict = first(trace, "verdict", lambda e: e["accepted"] > 0)
    before = trace.events[: trace.events.index(verdict)]
    draft = next(e for e in reversed(before) if e["event"] == "draft" and e["branch"] == verdict["branch"])
    bump(draft["chains"][verdict["chain"]])


def last_verdict(trace: Trace) -> int:
    """The number of the last verification; no other follows that it could be taken for."""
    return max(number for number, event in enumerate(trace.events) if event["event"] == "verdict")


TAMPERINGS: dict[str, Callable[[Trace], object]] = {
    "a draft that stood": change_a_draft_that_stood,
    "the number accepted": lambda t: first(t, "verdict").update(accepted=2),
    "the chain followed": lambda t: first(t, "verdict").update(chain=1),
    "the pending token": lambda t: bump(first(t, "verdict", lambda e: e["pending"])["pending"]),
    "a rejected branch forgotten": lambda t: first(t, "verdict", lambda e: e["rejected"]).update(rejected=[]),
    "a verdict forgotten": lambda t: t.events.remove(first(t, "verdict")),
    "a draft forgotten": lambda t: t.events.remove(first(t, "draft")),
    "fewer tokens": lambda t: first(t, "generate").update(n=8),
    "the seed": lambda t: first(t, "generate", lambda e: e["sampling"]["seed"])["sampling"].update(seed=78),
    "the temperature": lambda t: first(t, "generate", lambda e: e["sampling"]["seed"])["sampling"].update(temperature=-1),
    "a logit bias": lambda t: first(t, "generate", lambda e: e["sampling"]["seed"])["sampling"].update(logit_bias={"x": 1}),
    "an unknown parameter": lambda t: first(t, "generate")["sampling"].update(charm=1),
    "a token of a prompt": lambda t: bump(first(t, "plant")["tokens"]),
    "a token out of range": lambda t: first(t, "plant")["tokens"].append(10**6),
    "a forced token": lambda t: bump(first(t, "force")["tokens"]),
    "forced nothing": lambda t: first(t, "force").update(tokens="none"),
    "a fork beyond the tip": lambda t: first(t, "fork").update(at=10**6),
    "a fork of nobody": lambda t: first(t, "fork").update(branch=10**6),
    "a fork without a child": lambda t: first(t, "fork").pop("child"),
    "a rollback beyond the tip": lambda t: first(t, "rollback").update(to=10**6),
    "a rollback elsewhere": lambda t: first(t, "rollback").update(to=9),
    "generated by nobody": lambda t: first(t, "generate").update(branch=10**6),
    "no sampling": lambda t: first(t, "generate").pop("sampling"),
    "an unknown site": lambda t: first(t, "plant")["capture"]["lens"].update(sites=3),
    "the end of a path": lambda t: first(t, "finish", lambda e: e["generated"] == 5).update(path="0" * 16),
    "a verification too many": lambda t: t.events.insert(last_verdict(t), dict(t.events[last_verdict(t)])),
    "a verification too few": lambda t: t.events.pop(last_verdict(t)),
    "the length of a cancelled request": lambda t: first(t, "finish", lambda e: e["reason"] == "cancelled").update(generated=1),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_tampered_trace_is_found_out(told: tuple[Path, dict[str, str]], tampering: str) -> None:
    """The closing line protects the file. A trace changed in memory contradicts its replay."""
    trace = Trace.load(told[0])
    TAMPERINGS[tampering](trace)
    subject = engine()
    with pytest.raises((ReplayMismatch, BadFile), match="verifications recorded" if "verification" in tampering else None):
        subject.replay_trace(trace)
    subject.check_integrity()
    assert subject.loop.jobs == []
    assert subject.prompt([9, 8]).generate(4).generated == continuation(toy(), [9, 8], 4)


def test_a_recorded_path_that_ends_otherwise_is_found_out() -> None:
    """Token-by-token decoding has no verdicts to contradict. The digest of the whole path, last token included, differs."""
    for place in (-1, -2, 3, 0):
        subject = engine(record=True)
        branch = subject.prompt([1, 2, 3]).generate(5, window=1)
        other = branch.tokens
        other[place] = (other[place] + 1) % 50
        finish = first(subject.trace, "finish", lambda event: event["generated"] == 5)
        assert finish["path"] == path_digest(branch.tokens) != path_digest(other)
        assert engine().replay_trace(subject.trace)[branch.id].tokens == branch.tokens
        finish["path"] = path_digest(other)
        with pytest.raises(ReplayMismatch, match="others replayed"):
            engine().replay_trace(subject.trace)


def test_path_digests_tell_paths_apart() -> None:
    """The empty path, every prefix, a path with one changed token, and two numbers run together all have different digests."""
    path = [3, 1, 4, 1, 5, 9, 2, 6]
    others = [path[:end] for end in range(len(path) + 1)]
    others += [[*path[:i], path[i] + 1, *path[i + 1 :]] for i in range(len(path))]
    others += [[31, 4, 1, 5, 9, 2, 6], path[::-1]]
    assert len({path_digest(other) for other in others}) == len(others)
    assert path_digest(tuple(path)) == path_digest(path)


# ---- how requests end ------------------------------------------------------------------------------------------------


def assert_replays(subject: Engine, tmp_path: Path, **options: Any) -> None:
    subject.trace.save(tmp_path / "trace.jsonl")
    replayed = engine(subject.model, **options).replay_trace(Trace.load(tmp_path / "trace.jsonl"))
    assert digests(replayed) == digests(alive(subject))


@pytest.mark.parametrize("drafter", ["self", pytest.param("lens", marks=pytest.mark.slow), "tree"])
def test_requests_cancelled_anywhere(tmp_path: Path, drafter: str) -> None:
    """A cancel, not the number of tokens, cuts the last window. Its rejected part is reproduced as well."""
    subject = engine(record=True)
    for n in range(1, 6):
        branch = subject.prompt([n, 1], sites=SITES, keep_rejected=True)
        stream = branch.stream(25, drafter=drafter, window=7)
        for _ in range(n):
            next(stream)
        stream.close()
    assert_replays(subject, tmp_path)


def test_requests_that_failed(tmp_path: Path) -> None:
    """Requests that ran out of pages or became non-finite: their commits are reproduced, even if the pages now suffice."""
    subject = engine(cache_tokens=16, record=True)
    branch = subject.prompt([1, 2, 3])
    for call in (lambda: branch.generate(40, drafter="lens", window=3), lambda: branch.force([1] * 9)):
        with pytest.raises(OutOfPages):
            call()
    branch.rollback(8).generate(3)
    assert_replays(subject, tmp_path, cache_tokens=2048)

    model = random_model(norm="layer")
    model.embed[7] = 3e38
    poisoned = engine(model, record=True)
    branch = poisoned.prompt([1, 2, 3])
    with pytest.raises(NonFinite):
        branch.generate(9, window=3, sampling=Sampling(temperature=1.0, logit_bias={7: 12.0}))
    branch.rollback(3).generate(2)
    assert_replays(poisoned, tmp_path)


def test_of_tokens_that_could_not_all_be_forced_those_that_were(tmp_path: Path) -> None:
    """The pages suffice for some passes of a long force. Its replay forces no more, though its pages suffice for all."""
    subject = engine(cache_tokens=24, max_rows=16, record=True)
    branch = subject.prompt([1, 2, 3], sites=SITES)
    with pytest.raises(OutOfPages):
        branch.force([1] * 30)
    assert 3 < branch.length < 33
    assert_replays(subject, tmp_path, cache_tokens=2048)


def test_requests_side_by_side_and_refused_ones(tmp_path: Path) -> None:
    """Events of several requests interleave. A refused request leaves only its end."""
    subject = engine(record=True)
    branches = subject.prompts([[1, 2], [3, 4], [5, 6]], sites=SITES, keep_rejected=True)
    subject.generate(branches, 8, drafter="lens", window=3)
    with pytest.raises(EngineError):
        subject.generate([branches[0]], 3, sampling=Sampling(logit_bias={99: 1.0}))
    streams = [b.stream(6, drafter="tree", window=4) for b in branches]
    for stream in streams:
        list(stream)
    assert_replays(subject, tmp_path)


def test_a_trace_saved_while_a_request_runs(tmp_path: Path) -> None:
    """The replay runs the request to its end. It reproduces every row, also those not yet computed when the trace was saved."""
    subject = engine(record=True)
    branch = subject.prompt([1, 2, 3], sites=SITES)
    stream = branch.stream(12, drafter="lens", window=4)
    next(stream)
    subject.trace.save(tmp_path / "trace.jsonl")
    rest = list(stream)
    (replayed,) = engine().replay_trace(Trace.load(tmp_path / "trace.jsonl")).values()
    assert replayed.tokens == branch.tokens and rest
    assert torch.equal(replayed.kv(), branch.kv())


def test_replaying_does_not_change_the_trace(told: tuple[Path, dict[str, str]]) -> None:
    trace = Trace.load(told[0])
    before = copy.deepcopy(trace)
    engine().replay_trace(trace)
    assert trace == before


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(digests(engine().replay_trace(Trace.load(sys.argv[1])))))


@pytest.mark.parametrize(("seen", "exact"), covering([1, 2, 3], [True, False]))
def test_a_stream_closed_at_its_stop_token(exact: bool, seen: int) -> None:
    """A stream closed right after its last token has ended by that token, not by the closing; so has its replay."""
    subject = engine(record=True)
    branch = subject.prompt([1, 2, 3])
    if not exact:
        branch.generate(2, deterministic=False)
    third = branch.fork()[0].generate(3).tokens[-1]
    stream = branch.stream(6, sampling=Sampling(stop_tokens=(third,)), drafter="ngram", window=1, final=True)
    shown = [token for _, token in zip(range(seen), stream, strict=False)]
    stream.close()
    again = engine().replay_trace(subject.trace)[branch.id]
    assert branch.finish_reason == ("eos" if shown[-1] == third else None)
    assert (again.tokens, again.finish_reason) == (branch.tokens, branch.finish_reason)


# ---- requests ---------------------------------------------------------------------------------------------------------
# Requests in a trace.


@pytest.mark.parametrize("meanwhile", ["generate", "force"])
def test_a_request_that_was_refused_is_not_in_the_trace(served: Engine, meanwhile: str) -> None:
    """A refused request must not end the stream's own request in the replay."""
    branch = served.prompt(PROMPT)
    stream = branch.stream(6, drafter="ngram", window=2)
    next(stream)
    before = branch.tokens
    with pytest.raises(BadRequest, match="is busy with another request"):
        branch.generate(2) if meanwhile == "generate" else branch.force(" heads")
    assert branch.tokens == before
    list(stream)
    replayed = fresh().replay_trace(served.trace)
    assert isinstance(replayed, dict) and replayed[branch.id].tokens == branch.tokens


def test_an_engine_replays_its_own_trace_while_it_records(served: Engine) -> None:
    """The replay adds events to the trace, and ends."""
    branch = served.prompt("A coin's state is heads. Alice flips,").generate(3)
    before = len(served.trace.events)
    assert served.replay_trace(served.trace)[branch.id].tokens == branch.tokens
    assert len(served.trace.events) == 2 * before


def test_weights_are_hashed_once_and_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(fingerprint, "weights_hash", lambda model: calls.append(model) or "hash")
    made = engine(random_model())
    made.prompt([1, 2, 3], sites="S").fork()[0].generate(4)
    assert not calls
    assert made.fingerprint.weights == made.fingerprint.weights == "hash" and calls == [made.model]
