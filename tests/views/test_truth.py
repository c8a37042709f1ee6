"""Pictures do not lie: a token of which nothing is promised is never drawn as accepted, in any view."""

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from replaylens.engine.engine import Engine
from replaylens.engine.memory.tree import HOOKED, ORDINARY, TokenState
from replaylens.engine.proof.trace import Trace
from replaylens.engine.serving.branch import Branch
from replaylens.views import draw
from replaylens.views.data import Check, Fill, Frame, Phase, Slot
from replaylens.views.html import KINDS, kind_of
from replaylens.views.pictures import timeline
from tests.toy_model import VOCAB, continuation, engine, toy

P = [3, 1, 4, 1, 5, 9]


def recorded() -> Engine:
    return engine(record=True)


def ordinary(subject: Engine) -> Branch:
    return subject.prompt(P).generate(6, deterministic=False)


def of_one_token(subject: Engine) -> Branch:
    return subject.prompt(P).generate(1, deterministic=False)


def continued(subject: Engine) -> Branch:
    """Verified tokens after ordinary ones read KV of the fast path."""
    return ordinary(subject).generate(9, drafter="lens", window=4)


def after_canonical_ones(subject: Engine) -> Branch:
    return subject.prompt(P).generate(4, drafter="lens", window=4).generate(5, deterministic=False)


def forked(subject: Engine) -> Branch:
    (fork,) = ordinary(subject).fork(at=9)
    return fork.generate(5)


def rolled_back(subject: Engine) -> Branch:
    return ordinary(subject).rollback(8).generate(4)


def forced(subject: Engine) -> Branch:
    return ordinary(subject).force([7, 8])


def hooked(subject: Engine) -> Branch:
    return subject.prompt(P, hooks=[("blocks.0.hook_in", lambda value, hook: value)]).generate(5, window=1)


def hooked_fork(subject: Engine) -> Branch:
    root = subject.prompt(P).generate(4)
    (fork,) = root.fork(hooks=[("blocks.0.hook_in", lambda value, hook: value)])
    return fork.generate(4, window=1)


UNCERTIFIED = [ordinary, of_one_token, continued, after_canonical_ones, forked, rolled_back, forced, hooked, hooked_fork]


def kinds_in(text: str) -> set[str]:
    """The kinds of tokens that a piece of HTML or SVG shows, legends aside."""
    body = text.split("</style>")[-1] if "<svg" in text else text
    return {kind for kind in KINDS if f'"{kind} edge"' in body or f"rl-token rl-{kind}" in body}


def first_uncertified(make: Callable[[Engine], Branch]) -> int:
    """The number of tokens after the prompt that were canonical."""
    return 4 - 1 if make is after_canonical_ones else 0


@pytest.mark.parametrize("make", UNCERTIFIED)
def test_no_uncertified_token_is_drawn_as_accepted(make: Callable[[Engine], Branch]) -> None:
    """In the tree, on every frame of the timeline, on the board and in the terminal."""
    subject = recorded()
    branch = make(subject)
    assert not branch.certified, "control"
    certified = first_uncertified(make)
    why = HOOKED if make in (hooked, hooked_fork) else ORDINARY
    tokens = branch.tree().trunk.tokens[branch.root_length :]
    assert [token.kind for token in tokens] == ["accepted"] * certified + ["ordinary"] * (len(tokens) - certified)
    told = branch.timeline()
    first = next((i for i, frame in enumerate(told.frames) if frame.phase is Phase.ORDINARY), 0) if certified else 0
    for frame in told.frames[first:]:
        generated = [slot for slot in frame.generated if slot.number >= certified]
        verified = [check.verifier for check in frame.checks if check.verifier is not None]
        assert not {"accepted", "pending"} & {slot.kind for slot in [*generated, *verified]}, frame
        assert "canonical" not in frame.caption or not generated or frame.checks, frame.caption
        assert frame.kv.accepted <= certified
    assert told.frames[-1].generated[-1].kind == "ordinary"
    if not certified:
        assert not {"accepted", "pending"} & kinds_in(told.board(told.frames))
        assert not {"accepted", "pending"} & kinds_in("".join(map(told.still, told.frames)))
        assert "rl-token rl-ordinary" in branch.tree()._repr_html_()
    assert why in branch.tree()._repr_html_() and why in str(branch.tree())
    assert any(why in frame.caption or "Not certified" in frame.caption for frame in told.frames) or make is forced


def test_certified_tokens_are_drawn_as_such() -> None:
    """Control: the same views of deterministic branches have no ordinary token, not even in the legend."""
    branch = recorded().prompt(P).generate(9, drafter="lens", window=4)
    told = branch.timeline()
    assert {slot.kind for frame in told.frames for slot in frame.generated} >= {"accepted", "pending", "draft"}
    assert "ordinary" not in branch.tree()._repr_html_().split("</style>")[1].split("<script>")[0]
    assert "ordinary" not in str(branch.tree()) + str(told)


def test_a_state_can_look_ordinary_only_where_it_would_promise_something() -> None:
    assert [kind_of(state, ORDINARY) for state in TokenState] == ["prompt", "ordinary", "ordinary", "draft", "rejected"]
    assert [kind_of(state) for state in TokenState] == ["prompt", "accepted", "pending", "draft", "rejected"]


def test_a_trace_tells_the_same_about_a_branch_that_is_gone(tmp_path: Any) -> None:
    subject = recorded()
    branch = continued(subject)
    subject.trace.save(tmp_path / "t.trace")
    told = timeline(Trace.load(tmp_path / "t.trace"), branch.id, str)
    assert [[s.kind for s in f.generated] for f in told.frames] == [
        [s.kind for s in f.generated] for f in branch.timeline().frames
    ]
    replayed = engine().replay_trace(subject.trace)[branch.id]
    assert {t.kind for t in replayed.tree().trunk.tokens[replayed.root_length :]} == {"ordinary"}


def test_the_terminal_has_a_colour_for_it() -> None:
    out = io.StringIO()
    Console(file=out, width=400, force_terminal=True, color_system="truecolor").print(ordinary(recorded()).tree())
    assert "\x1b[30;45m" in out.getvalue(), "black on magenta"
    assert "102m" not in out.getvalue(), "no green"


# ---- the protocol's pictures ---------------------------------------------------------------------------------------------


def frames_with(drafts: list[int]) -> tuple[Frame, ...]:
    branch = recorded().prompt(P)
    return branch.generate(6, drafter="forced", drafts={len(P) + 1: [drafts]}).timeline().frames


def test_t0_comes_out_of_the_prefill() -> None:
    """Green, from the canonical pass, and in no frame a draft; the cache holds the prompt alone."""
    for options in ({"drafter": "self", "window": 4}, {"window": 1}, {"drafter": "ngram", "window": 4}):
        branch = recorded().prompt(P).generate(9, **options)
        first, *others = branch.timeline().frames
        assert (first.phase, first.kv) == (Phase.PREFILL, Fill(len(P)))
        assert [(slot.name, slot.kind, slot.text) for slot in first.generated] == [
            ("T0", "accepted", f" {branch.generated[0]}")
        ]
        assert all(frame.generated[0].name == "T0" and frame.generated[0].kind == "accepted" for frame in others)


@pytest.mark.parametrize("right", [True, False])
def test_a_drafted_t0_comes_from_the_prompts_last_row(right: bool) -> None:
    """Drafters such as `lens` and `model` draft T0 as well: it is yellow until the canonical pass gives it."""
    subject = recorded()
    (t0,) = continuation(toy(), P, 1)
    chain = [t0 if right else (t0 + 1) % VOCAB]
    frames = subject.prompt(P).generate(6, drafter="forced", drafts={len(P): [chain]}).timeline().frames
    assert [frame.phase for frame in frames[:3]] == [Phase.PREFILL, Phase.DECODE, Phase.VERIFY]
    assert not frames[0].generated and (frames[1].generated[0].name, frames[1].generated[0].kind) == ("T0′", "draft")
    assert frames[2].caption.endswith("; the prompt's last row gives T0")
    said = frames[2].checks[0].verifier
    assert said is not None and (said.name, said.text, said.kind) == ("T0", f" {t0}", "accepted" if right else "pending")
    assert not any("gives T0" in frame.caption for frame in frames[3:])


def test_a_saved_trace_knows_t0_too(tmp_path: Any) -> None:
    """It is not drafted, but the event of the drafts after it names it."""
    subject = recorded()
    branch = subject.prompt(P).generate(9, window=4)
    subject.trace.save(tmp_path / "t.trace")
    told = timeline(Trace.load(tmp_path / "t.trace"), branch.id, lambda token: f" {token}")
    assert [[s.text for s in f.generated] for f in told.frames] == [
        [s.text for s in f.generated] for f in branch.timeline().frames
    ]


def test_the_verifiers_tokens_after_the_mismatch_are_crossed_out() -> None:
    """T1 accepted, T2 instead of T2′, T3 and T4 void: what the verifier chose after the rejected drafts."""
    t = continuation(toy(), P, 4)
    wrong = (t[2] + 1) % VOCAB
    verify = next(frame for frame in frames_with([t[1], wrong, t[3]]) if frame.phase is Phase.VERIFY)
    void = [continuation(toy(), [*P, t[0], t[1], wrong, *more], 1)[0] for more in ([], [t[3]])]
    assert [(c.mark, c.verifier.name, c.verifier.kind, c.verifier.text) for c in verify.checks if c.verifier] == [
        ("✓ =", "T1", "accepted", f" {t[1]}"),
        ("✓ ≠", "T2", "pending", f" {t[2]}"),
        ("✗", "T3", "rejected", f" {void[0]}"),
        ("✗", "T4", "rejected", f" {void[1]}"),
    ]
    drawn = draw.document([verify], 12)
    assert sum(e.get("class") == "cross" for e in ElementTree.fromstring(drawn).iter()) == 4
    assert drawn.count("✗") == 2 and drawn.count("✓") == 2


def test_the_free_token_is_checkered() -> None:
    t = continuation(toy(), P, 5)
    verify = next(frame for frame in frames_with(t[1:4]) if frame.phase is Phase.VERIFY)
    last = verify.checks[-1]
    assert (last.mark, last.draft) == ("✓ free", None) and last.verifier is not None and last.verifier.kind == "pending"
    assert 'class="check"' in draw.document([verify], 12)


@pytest.mark.parametrize("text", [".", ":", "-", " ,"])
def test_a_crossed_out_token_can_be_read(text: str) -> None:
    """The cross comes from the corners and leaves the middle free: a line through it would make ÷ of a colon."""
    slot = Slot(text, TokenState.REJECTED, 0, drafted=True)
    drawn = ElementTree.fromstring(draw.document([Frame(Phase.DECODE, "", Fill(1), (slot,))], 2))
    (cross,) = [e for e in drawn.iter() if e.get("class") == "cross"]
    (box,) = [e for e in drawn.iter() if e.get("class") == "rejected edge"]
    x, y, wide, high = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
    strokes = [part.split("l") for part in (cross.get("d") or "").split("M")[1:]]
    starts = {tuple(map(float, start.split())) for start, _ in strokes}
    assert starts == {(round(a, 1), b) for a in (x, x + wide) for b in (y, y + high)}, "the four corners"
    assert all(abs(float(along.split()[0])) <= 0.4 * wide for _, along in strokes), "the middle is free"
    assert "line-through" not in draw.document([Frame(Phase.DECODE, "", Fill(1), (slot,))], 2)


@pytest.mark.parametrize("state", list(TokenState))
def test_only_rejected_tokens_are_crossed_out(state: TokenState) -> None:
    drawn = draw.document([Frame(Phase.DECODE, "", Fill(1), (Slot(" a", state, 0),))], 2)
    assert ('class="cross"' in drawn) == (state is TokenState.REJECTED)


def test_a_token_of_spaces_is_no_blank_tile() -> None:
    slots = (Slot(" ", TokenState.ACCEPTED, 0), Slot("  ", TokenState.DRAFT, 1, drafted=True))
    texts = [e.text for e in ElementTree.fromstring(draw.document([Frame(Phase.DECODE, "", Fill(1), slots)], 3)).iter()]
    assert "␣" in texts and "␣␣" in texts


def test_a_void_token_that_equals_its_draft_is_not_accepted() -> None:
    draft = Slot(" 7", TokenState.REJECTED, 3, drafted=True)
    assert not Check(draft, Slot(" 7", TokenState.REJECTED, 3)).accepted
    assert Check(draft, Slot(" 7", TokenState.ACCEPTED, 3)).accepted


def test_a_rejected_draft_with_the_verifiers_text_is_not_accepted() -> None:
    """Different tokens may read the same, such as the bytes of an emoji: the verdict counts, not the text."""
    subject = recorded()
    t = continuation(toy(), P, 4)
    drafts = {len(P) + 1: [[t[1], (t[2] + 1) % VOCAB, t[3]]]}
    branch = subject.prompt(P).generate(6, drafter="forced", drafts=drafts)
    told = timeline(subject.trace, branch.id, lambda token: "\N{REPLACEMENT CHARACTER}", {branch.id: branch.tokens})
    verify = next(frame for frame in told.frames if frame.phase is Phase.VERIFY)
    assert [check.mark for check in verify.checks] == ["✓ =", "✓ ≠", "✗", "✗"]
    assert [slot.kind for slot in verify.generated if slot.drafted] == ["draft", "rejected", "rejected"]
    line = str(told).splitlines()[told.frames.index(verify)]
    assert line.count("✓ ≠") == 1 and line.count("✗") == 2


def test_requests_beside_it_are_on_every_frame() -> None:
    """A deterministic one beside two ordinary ones, which look ordinary from the prefill to the end; words in a terminal."""
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5]])
    streams = [branch.stream(30, deterministic=False) for branch in branches[1:]]
    told = branches[0].generate(9, window=4).timeline()
    assert {frame.others for frame in told.frames} == {2}
    assert [frame.ordinary for frame in told.frames[1:]] == [2] * (len(told.frames) - 1)
    for frame in told.frames[1:]:
        still = told.still(frame)
        assert still.count('<rect class="ordinary edge"') == 2 and 'class="other"' not in still
        assert "2 other requests running, 2 of them ordinary" in still
    assert str(told).count("2 other requests running") == len(told.frames)
    for stream in streams:
        stream.close()


def test_deterministic_requests_beside_it_are_grey() -> None:
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5], [2, 2]])
    streams = [branch.stream(30, deterministic=i == 0) for i, branch in enumerate(branches[1:])]
    told = branches[0].generate(9, window=4).timeline()
    assert {(frame.others, frame.ordinary) for frame in told.frames[1:]} == {(3, 2)}
    still = told.still(told.frames[-1])
    assert still.count('class="other"') == 1 and still.count('<rect class="ordinary edge"') == 2
    for stream in streams:
        stream.close()


def test_a_board_shows_ordinary_steps() -> None:
    told = ordinary(recorded()).timeline()
    assert Phase.ORDINARY in {frame.phase for frame in told.frames}
    headings = [e.text for e in ElementTree.fromstring(told.board()).iter() if e.get("font-size") == "17"]
    assert headings == ["Prefill", "Ordinary"]


def test_requests_that_end_or_wait_meanwhile_are_told_of() -> None:
    """The number of requests beside it drops from one frame to the next; the later frame says why."""
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5], [2, 2]])
    short, long = branches[1].stream(6, deterministic=False), branches[2].stream(30, deterministic=False)
    told = branches[0].generate(9, window=4).timeline()
    first, *later = told.frames
    assert (first.others, first.ended, first.waiting) == (3, 0, 0)
    assert (later[0].others, later[0].ended, later[0].waiting) == (2, 0, 1), "the fourth has only its prompt"
    assert "; 1 has its prompt and waits" in told.still(later[0])
    (drop,) = [i for i in range(2, len(told.frames)) if told.frames[i].others < told.frames[i - 1].others]
    frame = told.frames[drop]
    assert (frame.others, frame.ended, frame.waiting) == (1, 1, 0)
    assert "1 other request running, 1 of them ordinary; 1 has ended" in told.still(frame)
    assert str(told).count("; 1 has ended") == 1 and sum(frame.ended for frame in told.frames) == 1
    for stream in (short, long):
        stream.close()


# ---- numbers on the cylinder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [Fill(400, 2, 3), Fill(2, 1, 400), Fill(1, 1, 1, 1), Fill(300, 0, 1, 9), Fill(7)])
def test_every_band_has_its_number_in_it_or_beside_it(fill: Fill) -> None:
    drawn = ElementTree.fromstring(draw.document([Frame(Phase.DECODE, "", fill)], 410))
    numbers = [e for e in drawn.iter() if e.tag.endswith("text") and (e.text or "").isdigit()]
    assert [int(e.text or 0) for e in numbers] == [count for _, count in fill.by_kind()]
    beside = [float(e.get("y", 0)) for e in numbers if e.get("text-anchor") is None]
    assert all(b - a >= 11 for a, b in pairwise(beside)), "they do not overlap"
    assert all(float(e.get("x", 0)) > 112 for e in numbers if e.get("text-anchor") is None)
