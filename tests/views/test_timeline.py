"""The timeline shows what the engine did: its frames equal the engine's own state at every event."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.proof.trace import Trace
from replaylens.engine.replay.run import Run
from replaylens.engine.request.sampling import Sampling
from replaylens.views import draw
from replaylens.views.data import Fill, Frame, Phase
from replaylens.views.pictures import timeline
from tests.toy_model import continuation, toy
from tests.toy_model import engine as toy_engine
from tests.views.checks import assert_harmless

ACCEPTED, PENDING, DRAFT, REJECTED = TokenState.ACCEPTED, TokenState.PENDING, TokenState.DRAFT, TokenState.REJECTED
P = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def t() -> list[int]:
    """T0, T1, ...: the tokens after the prompt."""
    return continuation(toy(), P, 8)


def frames_of(drafts: dict[int, list[list[int]]], n: int) -> tuple[Frame, ...]:
    subject = toy_engine(record=True)
    branch = subject.prompt(P)
    branch.generate(n, drafter="forced", drafts=drafts, window=4)
    return branch.timeline().frames


def shown(frame: Frame) -> list[tuple[str, TokenState]]:
    return [(slot.name, slot.state) for slot in frame.generated]


def test_all_drafts_stand(t: list[int]) -> None:
    """The picture without a rollback: T1 to T3 are accepted, and T4 is the bonus token, still pending."""
    frames = frames_of({len(P) + 1: [t[1:4]]}, 5)
    assert [frame.phase for frame in frames] == [Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.ACCEPT]
    prefill, decode, verify, accept = frames
    assert (prefill.kv, shown(prefill)) == (Fill(6), [("T0", ACCEPTED)]), "out of the canonical pass; its KV comes later"
    assert decode.kv == verify.kv == Fill(6, 0, 4), "T0 and three drafts"
    assert shown(decode) == [("T0", ACCEPTED), ("T1′", DRAFT), ("T2′", DRAFT), ("T3′", DRAFT)]
    assert [check.accepted for check in verify.checks] == [True, True, True, False]
    assert verify.checks[-1].draft is None and verify.checks[-1].verifier is not None
    assert accept.kv == Fill(6, 4)
    assert shown(accept) == [("T0", ACCEPTED), ("T1", ACCEPTED), ("T2", ACCEPTED), ("T3", ACCEPTED), ("T4", PENDING)]
    assert [slot.text for slot in accept.generated] == [f" {token}" for token in t[:5]]


def test_a_draft_is_rejected(t: list[int]) -> None:
    """The picture with a rollback: T1 is accepted, the verifier's T2 replaces the draft, and the cache is cut after T1."""
    wrong = (t[2] + 1) % 61
    frames = frames_of({len(P) + 1: [[t[1], wrong, t[3]]]}, 5)
    decode, verify, rollback = frames[1:4]
    assert [frame.phase for frame in (decode, verify, rollback)] == [Phase.DECODE, Phase.VERIFY, Phase.ROLLBACK]
    assert shown(verify) == [("T0", ACCEPTED), ("T1′", DRAFT), ("T2′", REJECTED), ("T3′", REJECTED)]
    said = [(check.accepted, check.void, check.verifier.text if check.verifier else None) for check in verify.checks]
    assert said[:2] == [(True, False, f" {t[1]}"), (False, False, f" {t[2]}")]
    assert [(accepted, void) for accepted, void, _ in said[2:]] == [(False, True)] * 2, "T3 and T4 follow a rejected draft"
    assert (decode.kv, rollback.kv) == (Fill(6, 0, 4), Fill(6, 2))
    assert shown(rollback) == [("T0", ACCEPTED), ("T1", ACCEPTED), ("T2", PENDING)]


@pytest.mark.parametrize("final", [False, True])
def test_an_accepted_draft_that_ends_the_request(t: list[int], final: bool) -> None:
    """Its row is dropped, as that of any last token, unless `final` asks for it. The picture counts what the engine holds."""
    assert t[3] not in t[:3]
    branch, stop = toy_engine(record=True).prompt(P), Sampling(stop_tokens=(t[3],))
    branch.generate(8, drafter="forced", drafts={len(P) + 1: [t[1:4]]}, window=4, final=final, sampling=stop)
    last = branch.timeline().frames[-1]
    assert branch.tokens == [*P, *t[:4]] and branch.lane.computed == len(P) + 3 + final
    assert last.kv == Fill(len(P), 3 + final)
    assert last.caption == f"3 accepted; KV up to position {branch.lane.computed}"
    assert [slot.state for slot in last.generated] == list(branch.record.states)[len(P) :]


def test_siblings(t: list[int]) -> None:
    wrong = (t[1] + 1) % 61
    frames = frames_of({len(P) + 1: [[wrong, wrong], t[1:3]]}, 4)
    decode, verify, rollback = frames[1:4]
    assert decode.kv.draft == 5 and [[slot.text for slot in c] for c in decode.siblings] == [[f" {t[1]}", f" {t[2]}"]]
    assert [[slot.state for slot in chain] for chain in verify.siblings] == [[REJECTED, REJECTED]]
    assert [slot.text for slot in verify.generated] == [f" {token}" for token in t[:3]]
    assert rollback.kv == Fill(6, 3)


def test_frames_agree_with_the_engine(engine: Engine) -> None:
    """A listener notes tokens, states and committed KV at every event. The timeline agrees, also with other requests."""
    branches = engine.prompts(["A coin's state is heads.", "A coin's state is tails. What's the state?"])
    first = branches[0]
    noted: list[tuple[str, list[int], list[TokenState], int]] = []

    def listen(event: dict[str, Any]) -> None:
        if event["branch"] == first.id and event["event"] in ("draft", "verdict"):
            noted.append((event["event"], first.tokens, list(first.record.states), first.lane.computed))

    engine.loop.listeners.append(listen)
    engine.generate(branches, 24, drafter="lens", window=5)
    engine.loop.listeners.remove(listen)
    told = first.timeline()
    after = {Phase.DECODE: "draft", Phase.ACCEPT: "verdict", Phase.ROLLBACK: "verdict"}
    rounds = [frame for frame in told.frames if frame.phase in after]
    assert len(rounds) == len(noted) > 4
    assert [told.frames[0].others, rounds[0].others] == [1, 1], "both were prefilled and drafted for together"
    for frame, (event, tokens, states, computed) in zip(rounds, noted, strict=True):
        assert after[frame.phase] == event
        own = slice(first.root_length, None)
        assert [slot.state for slot in frame.generated] == states[own]
        assert [slot.text for slot in frame.generated] == [engine.text.token(token) or "<eos>" for token in tokens[own]]
        if event == "verdict":
            assert frame.kv.prompt + frame.kv.accepted == frame.kv.total == computed
        else:
            assert frame.kv.total == len(tokens)
    for branch in branches:
        branch.release()


def test_a_trace_from_a_file_tells_the_same(run: Run, tmp_path: Path) -> None:
    run.engine.trace.save(tmp_path / "run.trace")
    trace = Trace.load(tmp_path / "run.trace")
    for index, result in enumerate(run):
        told = timeline(trace, result.branch, lambda token: run.engine.text.token(token) or "<eos>")
        mine = run.timeline(index)
        assert [(f.phase, f.kv, shown(f)) for f in told.frames] == [(f.phase, f.kv, shown(f)) for f in mine.frames]


def test_tokens_that_left_no_event_are_unknown_not_invented(t: list[int]) -> None:
    subject = toy_engine(record=True)
    branch = subject.prompt(P)
    branch.generate(3, window=1)
    told = timeline(subject.trace, branch.id, str)
    assert [slot.text for slot in told.frames[-1].generated] == ["…"] * 3
    known = timeline(subject.trace, branch.id, str, {branch.id: branch.tokens})
    assert [slot.text for slot in known.frames[-1].generated] == [str(token) for token in t[:3]]
    false = timeline(subject.trace, branch.id, str, {branch.id: [*P, 0, 0, 0]})
    assert [slot.text for slot in false.frames[-1].generated] == ["…"] * 3, "a path that the trace did not see"


def test_forks_forced_tokens_and_rollbacks() -> None:
    subject = toy_engine(record=True)
    root = subject.prompt(P)
    (child,) = root.fork(1, at=4)
    child.force([7, 8])
    child.rollback(to=5)
    frames = child.timeline().frames
    assert [frame.phase for frame in frames] == [Phase.FORK, Phase.FORCE, Phase.ROLLBACK]
    assert [frame.kv for frame in frames] == [Fill(4), Fill(4, 2), Fill(4, 1)]
    with pytest.raises(BadRequest, match="no branch 99"):
        timeline(subject.trace, 99, str)


# ---- pictures ---------------------------------------------------------------------------------------------------------


def elements(document: str) -> Sequence[ElementTree.Element]:
    """The picture as an XML parser sees it."""
    return list(ElementTree.fromstring(document).iter())


def test_stills_are_files_of_their_own(run: Run, tmp_path: Path) -> None:
    told = run.timeline(next(i for i, result in enumerate(run) if result.rejected))
    files = told.save(tmp_path)
    assert [file.suffix for file in files] == [".svg"] * len(told.frames)
    for file in files:
        found = elements(file.read_text())
        assert not [e for e in found if {"id", "href", "onload"} & set(e.attrib)]
    assert len(elements(told.board())) > len(elements(told.still(told.frames[0])))


def test_the_cylinder_shows_the_fill(t: list[int]) -> None:
    """The height of each section is the number of cached positions in that state."""
    decode = frames_of({len(P) + 1: [t[1:4]]}, 5)[1]
    sections = [e for e in elements(draw.document([decode], 10)) if e.get("class", "") in ("prompt edge", "draft edge")]
    heights = {}
    for section in sections:
        if section.tag.endswith("path"):
            d = section.get("d", "")
            heights[section.get("class")] = float(d.split("V")[1].split("A")[0]) - float(
                d.split("M")[1].split("V")[0].split()[1]
            )
    assert heights == {"prompt edge": pytest.approx(90, abs=0.2), "draft edge": pytest.approx(60, abs=0.2)}


def test_a_board_has_four_phases(run: Run) -> None:
    told = run.timeline(next(i for i, result in enumerate(run) if result.rejected))
    texts = [e.text for e in elements(told.board())]
    assert [text for text in texts if text in ("Prefill", "Decode", "Verify", "Rollback")] == [
        "Prefill",
        "Decode",
        "Verify",
        "Rollback",
    ]


def test_html_and_text(run: Run) -> None:
    told = run.timeline(0)
    found = assert_harmless(told._repr_html_(), scripts=1)
    assert [v for name, v in found.attributes if name == "data-phase"] == [frame.phase.value for frame in told.frames]
    assert len(str(told).splitlines()) == len(told.frames) and "prefill" in str(told)
