"""Trees of live branches: every value that a view shows is the engine's own."""

import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup
from rich.console import Console
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.engine.display import visible, word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import BranchTree, TokenState
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.text import Text
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.replay.run import Run
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import ThinkingConfig
from replaylens.thinking.thoughts import Round, ThinkingRecording, Thought, Thoughts
from replaylens.views import boards, draw, examples, pictures
from replaylens.views.data import Check, DrawnPath, Fill, Frame, Phase, Readings, Slot, Token
from replaylens.views.draw import Placement, arrange
from replaylens.views.examples import DumpedThoughts
from replaylens.views.html import fragment, join, script_json, tag, void
from replaylens.views.pictures import Timeline, Tree, timeline
from replaylens.views.report import ReportPage
from replaylens.views.thoughts import DrawnChunk, DrawnRound, Thinking, thoughts_by_branch, with_rounds
from replaylens.views.thoughts import picture as of_thoughts
from replaylens.weights.opening import GUESSES, Guess
from tests.thinking.reference import thinking_model
from tests.toy_model import continuation, random_model, toy
from tests.toy_model import engine as toy_engine
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE, HostileTokenizer
from tests.views.test_report import blocks_of


def test_a_tree_tells_what_was_recorded(run: Run) -> None:
    """Tokens, states, log-probs, entropies and lens values match, on the accepted path and on every rejected one."""
    for index, result in enumerate(run):
        tree = run.tree(index)
        assert isinstance(tree, Tree)
        paths = {path.branch: path for path in tree.paths}
        assert set(paths) == {result.branch, *(other.branch for other in result.rejected)}
        z = result.activations
        for token in paths[result.branch].tokens:
            p = token.position
            assert token.text == word(run.engine.text, result.tokens[p])
            assert token.state is (TokenState.PROMPT if p < result.num_prompt else TokenState.ACCEPTED)
            assert token.entropy == z["Z.entropy"][p, -1].item()
            assert token.logprob == (z["Z.emitted"][p - 1, -1].item() if p else None)
            assert [layer.guesses[0].token for layer in token.lens] == [
                word(run.engine.text, i) for i in z["Z.top_ids"][p, :, 0].tolist()
            ]
        for other in result.rejected:
            own = paths[other.branch]
            assert (own.parent, own.fork_position) == (result.branch, other.fork_position)
            assert [t.text for t in own.tokens] == [word(run.engine.text, t) for t in other.tokens[other.fork_position :]]
            assert all(token.state is TokenState.REJECTED for token in own.tokens)
            assert other.activations is not None
            second = own.tokens[1:2]
            assert [t.logprob for t in second] == other.activations["Z.emitted"][: len(second), -1].tolist()


def test_a_rejected_draft_was_judged_by_the_row_before(run: Run) -> None:
    """The log-prob of its first token comes from the accepted path, and is below that of the chosen token."""
    judged = 0
    for index in range(len(run)):
        tree = run.tree(index)
        assert isinstance(tree, Tree)
        trunk, *others = tree.paths
        by_position = {token.position: token for token in trunk.tokens}
        for other in others:
            first = other.tokens[0]
            chosen = by_position.get(first.position)
            if first.logprob is not None and chosen is not None:
                assert chosen.logprob is not None and first.logprob < chosen.logprob
                judged += 1
    assert judged


def test_without_z_there_is_still_a_tree(engine: Engine) -> None:
    branch = engine.prompt("A coin's state is heads.")
    branch.generate(5, drafter="lens", window=4)
    (trunk, *_) = branch.tree().paths
    assert [t.state for t in trunk.tokens] == branch.record.states
    assert all(t.logprob is None and t.entropy is None and t.lens == () for t in trunk.tokens)
    assert Readings.of(None, str) is None
    branch.release()


def test_a_run_says_how_many_of_its_examples_are_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the run that is shown whole, below, says nothing of the kind."""
    monkeypatch.setattr("replaylens.views.summary.MAX_TREES", 1)
    assert f"and {len(run) - 1} more: run.tree(i) shows any of them" in run._repr_html_()


def test_a_fork_hangs_where_it_left(engine: Engine) -> None:
    """A fork before its parent's own first token hangs off the grandparent."""
    root = engine.prompt("A coin's state is heads.")
    (child,) = root.fork(1)
    child.force(" heads flips")
    (early,) = child.fork(1, at=root.length - 2)
    early.force(" flips")
    parents = {path.branch: (path.parent, path.fork_position) for path in root.tree().paths}
    assert parents == {root.id: (None, 0), child.id: (root.id, root.length), early.id: (root.id, root.length - 2)}
    assert child.tree().trunk.fork_position == 0, "a fork's own tree shows its whole path"
    for branch in (early, child, root):
        branch.release()


def test_nothing_is_promised_of_a_fork_of_a_hooked_prompt(engine: Engine) -> None:
    """Not even of one that leaves within the prompt, before any such token: it keeps the hooks."""
    with engine.prompt("A coin's state is heads.", hooks=[("blocks.0.hook_in", lambda value, hook: value)]) as root:
        (fork,) = root.fork(at=2)
        told = [(token.position, bool(token.why)) for token in fork.force(" flips heads").tree().trunk.tokens]
        assert not fork.certified and told == [(0, False), (1, False), (2, True), (3, True)]
        fork.release()


def test_numbers_keep_apart_where_there_is_no_tokenizer() -> None:
    """Token numbers stay separated in trees and timelines, as in the branch's own text."""
    engine = Engine(random_model(), record=True)
    branch = engine.prompt([60, 10, 9]).force([1, 19])
    assert branch.text == "60 10 9 1 19"
    assert " 60 10 9" in str(branch.tree()) and " 1 19" in str(branch.tree()) and " 1 19" in str(branch.timeline())


def test_too_many_branches_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BRANCHES", 3)
    root = engine.prompt("A coin's state is heads.")
    forks = root.fork(5)
    tree = root.tree()
    assert (len(tree.paths), tree.left_out) == (3, 3)
    assert "and 3 more branches" in str(tree) and "and 3 more branches" in draw.draw_tree(tree)
    for branch in [*forks, root]:
        branch.release()


def test_a_tree_may_be_deeper_than_the_stack_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BRANCHES", 3000)
    branches = BranchTree()
    branch = root = branches.plant([1, 2])
    for _ in range(deep := sys.getrecursionlimit() + 100):
        branch = branches.fork(branch)
    branches.append(branch, [7, 8], TokenState.DRAFT)
    branches.finish(branch, "length")
    lines = str(pictures.tree_of(branches.branch(root), {}, Text(None))).splitlines()
    assert len(lines) == deep + 1 and lines[0] == "#0 open .2  1 2" and lines[-1].endswith(f"└─ #{deep} @2 finished ?2  7 8")


def in_terminal(tree: Tree, **options: object) -> str:
    out = io.StringIO()
    Console(file=out, width=10_000, **options).print(tree)  # type: ignore[arg-type]
    return out.getvalue()


def test_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours appear where the terminal has them. Markers and counts carry the same information without colours."""
    i = next(i for i, result in enumerate(run) if result.rejected)
    tree = run.tree(i)
    plain = in_terminal(tree)
    assert plain.rstrip("\n") == str(tree) and "\x1b" not in plain
    assert f".{run[i].num_prompt} " in plain and f"@{run[i].rejected[0].fork_position} " in plain
    coloured = in_terminal(tree, force_terminal=True, color_system="truecolor")
    assert "\x1b[30;104m" in coloured and "\x1b[9;30;101m" in coloured, "prompt on blue; rejected struck out, on red"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "104m" not in in_terminal(tree, force_terminal=True)


def test_html_is_whole_and_harmless(run: Run) -> None:
    """Names decode to markup here. All of them must appear as text."""
    for i, result in enumerate(run):
        html = run.tree(i)._repr_html_()
        found = assert_harmless(html, scripts=1)
        assert "".join(found.texts).count(visible(HOSTILE[0])) >= sum(
            word(run.engine.text, token) == HOSTILE[0] for token in result.tokens
        )
    assert "&lt;script&gt;alert(1)" in html


def test_hover_tells_position_logprob_entropy_and_layers(run: Run) -> None:
    tree = run.tree(0)
    token = tree.trunk.tokens[-2]
    titles = [value or "" for name, value in parsed(draw.draw_tree(tree)).attributes if name == "title"]
    mine = next(t for t in titles if f"position\t{token.position}\n" in t and "accepted" in t)
    assert f"log-prob\t{token.logprob:.3f}" in mine and f"entropy\t{token.entropy:.3f} nats" in mine
    layers = run.engine.config.num_layers
    assert all(f"\nS{i}\t" in mine for i in range(layers)) and "\noutput\t" in mine


def test_runs_branches_and_engines_draw_themselves(run: Run, engine: Engine) -> None:
    branch = engine.prompt("A coin's state is heads.", sites="Z")
    branch.generate(4, drafter="lens", window=3)
    told = [shown._repr_html_() for shown in (run, branch, engine)]
    for html in told:
        assert_harmless(html, scripts=1)
    assert f"{run.acceptance:.1%}" in told[0] and "more: run.tree(i)" not in told[0]
    assert engine.fingerprint.digest in told[2]
    branch.release()


@pytest.mark.parametrize(
    "text, seen",
    [
        ("", "∅"),
        (" ", "␣"),
        ("   ", "␣␣␣"),
        (" a", " a"),
        ("\n", "⏎"),
        ("a\tb", "a⇥b"),
        ("\x00", "\\u0000"),
        ("\u2028", "\\u2028"),
    ],
)
def test_invisible_text_is_made_visible(text: str, seen: str) -> None:
    assert visible(text) == seen


# ---- on a page ------------------------------------------------------------------------------------------------------------


def long_tree(forks: tuple[int, ...]) -> Tree:
    """120 tokens, and rejected branches of three."""
    state = {True: TokenState.PROMPT, False: TokenState.ACCEPTED}
    trunk = tuple(Token(f" token{i}", i, state[i < 4]) for i in range(120))
    rejected = [
        DrawnPath(n, 0, at, "rejected", tuple(Token(f" w{n}", at + i, TokenState.REJECTED) for i in range(3)))
        for n, at in enumerate(forks, 1)
    ]
    return Tree((DrawnPath(0, None, 0, "open", trunk), *rejected))


@pytest.mark.parametrize("forks", [(), (5, 30, 119), tuple(range(4, 119))])
def test_a_long_path_goes_on_in_a_further_line(forks: tuple[int, ...]) -> None:
    """Every token and every fork is drawn once, and no line is wider than a page."""
    html = str(draw.draw_tree(long_tree(forks)))
    grids = html.split('class="rl-grid"')[1:]
    assert len(grids) > 5
    for grid in grids:
        columns: dict[int, int] = {}
        for column, text in re.findall(r'grid-column:(\d+)" title="[^"]*" tabindex="0">([^<]*)<', grid):
            columns[int(column)] = max(columns.get(int(column), 0), len(text))
        assert sum(7.3 * length + 15 for length in columns.values()) <= draw.MAX_WIDTH
    shown = re.findall(r'tabindex="0">([^<]*)<', html)
    assert sorted(shown) == sorted([f" token{i}" for i in range(120)] + [f" w{n}" for n in range(1, len(forks) + 1)] * 3)
    assert html.count('class="rl-line"') == len(forks)


def test_a_fork_stays_beside_the_token_that_it_follows() -> None:
    """Where a line would end between a token and the fork after it, it ends one token earlier."""
    plain = [end for _, end in draw._bands(arrange(long_tree(())), 3)]
    moved = [end for _, end in draw._bands(arrange(long_tree((plain[0],))), 3)]
    assert moved[0] == plain[0] - 1


def test_spaces_of_other_kinds_are_seen() -> None:
    assert visible("10\u00a0000") == "10⍽000" and visible("a\u2009b") == "a␣b" and visible("\u00ad") == "\\u00ad"


# ---- timeline --------------------------------------------------------------------------------------------------------
# The timeline shows what the engine did: its frames equal the engine's own state at every event.

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
    assert decode.kv == verify.kv == Fill(6, 0, 3, pending=1), "three drafts, and T0, whose KV the verifying pass computes"
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
    assert shown(verify) == [("T0", ACCEPTED), ("T1′", DRAFT), ("T2′", DRAFT), ("T3′", DRAFT)]
    said = [(check.accepted, check.void, check.verifier.text if check.verifier else None) for check in verify.checks]
    assert said[:2] == [(True, False, f" {t[1]}"), (False, False, f" {t[2]}")]
    assert [(accepted, void) for accepted, void, _ in said[2:]] == [(False, True)] * 2, "T3 and T4 follow a rejected draft"
    assert (decode.kv, rollback.kv) == (Fill(6, 0, 3, pending=1), Fill(6, 2))
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
    assert last.caption == f"3 tokens accepted; KV up to position {branch.lane.computed}"
    assert [slot.state for slot in last.generated] == list(branch.record.states)[len(P) :]


def test_siblings(t: list[int]) -> None:
    wrong = (t[1] + 1) % 61
    frames = frames_of({len(P) + 1: [[wrong, wrong], t[1:3]]}, 4)
    decode, verify, rollback = frames[1:4]
    assert (decode.kv.draft, decode.kv.pending) == (4, 1)
    assert [[slot.text for slot in c] for c in decode.siblings] == [[f" {t[1]}", f" {t[2]}"]]
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


def test_a_verification_that_accepts_some_drafts_and_rejects_others_shows_most() -> None:
    def told(kept: int) -> Timeline:
        states = [TokenState.ACCEPTED] * kept + [TokenState.REJECTED] * (3 - kept)
        slots = [(Slot(" a", TokenState.DRAFT, i, drafted=True), Slot(" a", state, i)) for i, state in enumerate(states)]
        free = Check(None, Slot(" b", TokenState.PENDING, 3))
        return Timeline((Frame(Phase.VERIFY, "", Fill(1), checks=(*(Check(*pair) for pair in slots), free)),))

    assert [told(kept).interest for kept in range(4)] == [0, 3, 3, 1]


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
    heights = {}
    for section in elements(boards.document([decode], 10)):
        if section.tag.endswith("path") and section.get("class", "").endswith(" edge"):
            d = section.get("d", "")
            heights[section.get("class")] = float(d.split("V")[1].split("A")[0]) - float(
                d.split("M")[1].split("V")[0].split()[1]
            )
    assert heights == {
        name: pytest.approx(15 * count, abs=0.2) for name, count in (("prompt edge", 6), ("pending edge", 1), ("draft edge", 3))
    }


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


# ---- layout ----------------------------------------------------------------------------------------------------------
# Branches share rows where there is room. No token covers another, and no line covers a token.


def path(branch: int, parent: int | None, fork: int, count: int) -> DrawnPath:
    tokens = tuple(Token("x", p, TokenState.ACCEPTED) for p in range(fork, fork + count))
    return DrawnPath(branch, parent, fork, "open", tokens)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Branches that fork within their parent's own tokens, as the views draw them."""
    paths = [path(0, None, 0, draw(st.integers(1, 12)))]
    for branch in range(1, draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(paths))
        fork = draw(st.integers(parent.fork_position + 1, max(parent.end, parent.fork_position + 1)))
        paths.append(path(branch, parent.branch, fork, draw(st.integers(1, 6))))
    return Tree(tuple(paths))


def tokens_by_cell(places: list[Placement]) -> dict[tuple[int, int], int]:
    cells: dict[tuple[int, int], int] = {}
    for place in places:
        for token in place.path.tokens:
            assert cells.setdefault((place.row, token.position), place.path.branch) == place.path.branch, "one on another"
    return cells


@settings(max_examples=40, deadline=None)
@given(trees())
def test_nothing_lies_on_anything_else(tree: Tree) -> None:
    places = arrange(tree)
    assert sorted(p.path.branch for p in places) == [p.branch for p in tree.paths]
    cells, rows = tokens_by_cell(places), {place.path.branch: place.row for place in places}
    for place in places[1:]:
        assert place.path.parent is not None
        assert place.parent_row == rows[place.path.parent] < place.row
        column = place.path.fork_position - 1
        on_the_way = [cells.get((row, column)) for row in range(place.parent_row + 1, place.row + 1)]
        assert on_the_way == [None] * (place.row - place.parent_row), "a line over a token"


def test_branches_share_a_row() -> None:
    """Two short branches far apart need one row. Overlapping ones need two, the later fork first."""
    far = Tree((path(0, None, 0, 20), path(1, 0, 3, 2), path(2, 0, 12, 2)))
    assert {place.path.branch: place.row for place in arrange(far)} == {0: 0, 1: 1, 2: 1}
    near = Tree((path(0, None, 0, 20), path(1, 0, 3, 9), path(2, 0, 8, 2)))
    assert {place.path.branch: place.row for place in arrange(near)} == {0: 0, 1: 2, 2: 1}


# ---- html ------------------------------------------------------------------------------------------------------------
# Everything that is not markup yet is escaped, wherever it is inserted.


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str) -> None:
    """As content, attribute and script data, text round-trips unchanged and opens no element."""
    found = parsed(tag("p", text, title=text))
    assert found.tags == ["p"] and found.attributes == [("title", text)]
    assert "".join(found.texts) == text
    block = parsed(tag("script", script_json([text]), type="application/json"))
    assert block.tags == ["script"] and json.loads(script_json([text])) == [text]


def test_escaping_is_what_does_it() -> None:
    """Negative control: text declared as markup becomes an element."""
    assert parsed(tag("p", Markup(HOSTILE[1].removeprefix('">')))).tags == ["p", "img"]
    with pytest.raises(AssertionError):
        assert_harmless(tag("p", Markup('<b onclick="x">')), 0)
    with pytest.raises(AssertionError):
        parsed("<p><b></p>")


def test_attributes() -> None:
    assert tag("p", class_="a", data_x=1, hidden=True, title=None, lang=False) == '<p class="a" data-x="1" hidden></p>'
    assert void("input", type="search") == '<input type="search">'
    assert join(["a<b", tag("b", 1), 2]) == "a&lt;b<b>1</b>2"


def test_markup_is_escaped_in_an_attribute() -> None:
    """Markup that is safe as content is not safe between quotes."""
    hostile = tag("b", "x", title='"')
    assert parsed(tag("p", title=hostile)).attributes == [("title", str(hostile))]


def test_a_fragment_stands_alone() -> None:
    found = assert_harmless(fragment(tag("p", "x")), scripts=1)
    assert found.tags.count("style") == 1


def test_data_of_a_script_is_finite() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(float("nan"))


# ---- thoughts --------------------------------------------------------------------------------------------------------
# The Thinking-States picture from plain data.

PICTURE = Thinking(
    (
        DrawnChunk(("A", " coin"), ("<EOS>",)),
        DrawnChunk((" flips", ","), (" tails", "<EOS>"), facts=("log-prob\t-0.1",)),
        DrawnChunk(HOSTILE, (HOSTILE[0], "<EOS>"), state=2.5),
    ),
    (DrawnRound(0, 2, 3), DrawnRound(2, 3, 3)),
)


def test_text_tells_thoughts_states_and_rounds() -> None:
    lines = str(PICTURE).splitlines()
    assert "no state" in lines[1] and "->   tails <EOS>" in lines[1] and "|S| 2.50" in lines[2]
    assert lines[3:] == [
        "round 1: chunks 0 to 2 at once, KV kept up to chunk 1, chunks 2 to 2 rolled back",
        "round 2: chunks 2 to 2 at once, KV kept up to chunk 2",
    ]
    assert [chunk.thinks for chunk in PICTURE.chunks] == [False, True, True]
    out = io.StringIO()
    Console(file=out, width=200).print(PICTURE)
    assert "tails <EOS>" in out.getvalue() and "2.50" in out.getvalue()


def test_the_picture_has_the_parts_of_the_papers_figure() -> None:
    """L_in and L_out at their layers, the KV cache, arrows from X to T, S added with a plus; norms do not read as sums."""
    html = replace(PICTURE, layers=(0, 2))._repr_html_().split("</style>")[1].split("<script>")[0]
    assert "L_in, after block 0" in html and "L_out, after block 2" in html and "KV cache" in html
    assert html.count('class="rl-plus">+') == 3 and html.count('class="rl-up"') == 6
    assert html.count("KV → ↑") == 2, "every chunk but the first reads the KV cache"
    assert "|S2| = 2.50" in html and "S0 = 0" in html and "+ 2.50" not in html
    assert "L_out<" in PICTURE._repr_html_(), "where the layers are not known, the names alone"


def test_numbers_agree_with_the_formula_in_the_picture() -> None:
    """Chunk i has S_i and thinks Z_(i+1), of which C makes S_(i+1), the state of the next chunk."""
    html = PICTURE._repr_html_()
    assert "Zᵢ₊₁ = T(Hᵢ)" in html and "Sᵢ₊₁ = C(Zᵢ₊₁)" in html
    assert re.findall(r'class="rl-name">(Z\d)', html) == ["Z1", "Z2", "Z3"]
    assert re.findall(r"\|?(S\d)\|? = ", html.split('class="rl-thinking"')[1]) == ["S0", "S1", "S2"]
    assert re.findall(r"↘ (S\d)", html) == ["S1", "S2", "S3"]


def test_colours_are_those_of_the_papers_figure() -> None:
    """Blocks T and C green, thoughts Z and the answer blue, the input plain."""
    with_answer = replace(PICTURE, chunks=(*PICTURE.chunks, DrawnChunk((" heads", "."), ())))
    html = with_answer._repr_html_()
    assert '<span class="rl-token rl-z"> heads</span>' in html
    assert '<span class="rl-token rl-z"> tails</span>' in html, "a thought"
    assert '<span class="rl-token rl-x"> flips</span>' in html
    rules = dict(re.findall(r"(\.rl-thinking \.rl-[xz]|\.rl-blocks b)\{[^}]*?background:([^;}]+)", html))
    assert rules == {
        ".rl-blocks b": "var(--rl-accepted)", ".rl-thinking .rl-z": "var(--rl-prompt)", ".rl-thinking .rl-x": "none",
    }  # fmt: skip


def test_html_has_a_column_a_chunk_and_a_bar_a_round() -> None:
    found = assert_harmless(PICTURE._repr_html_(), scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert sum(c.startswith("rl-chunk") for c in classes) == sum(c.startswith("rl-thought") for c in classes) == 3
    assert classes.count("rl-bar rl-accepted") == 2 and classes.count("rl-bar rl-rejected") == 1


def test_every_part_has_its_place() -> None:
    """One column per chunk after the names, rows from the thought at the top to the tokens, and one more per round."""
    html = replace(PICTURE, chunks=(*PICTURE.chunks, DrawnChunk((" heads",), ())))._repr_html_().split('class="rl-thinking"')[1]
    names = "thought|up|adds|chunk|kv|bar rl-accepted|bar rl-rejected"
    parts = rf'class="rl-({names})[^"]*" style="grid-row:(\d+);grid-column:([\d/]+)"'
    expected = [
        ("kv", "4", "2/6"),
        ("bar rl-accepted", "8", "2/4"),
        ("bar rl-rejected", "8", "4/5"),
        ("bar rl-accepted", "9", "4/5"),
    ]
    for column in "2345":
        expected += [(part, row, column) for part, row in (("up", "3"), ("adds", "5"), ("up", "6"), ("chunk", "7"))]
    expected += [("thought", "1", column) for column in "234"]  # the last chunk is the answer, which does not think
    assert sorted(re.findall(parts, html)) == sorted(expected)
    assert re.findall(r'style="grid-row:2;grid-column:(\d)"><div class="rl-blocks"', html) == ["2", "3", "4"]
    assert dict(re.findall(r'class="rl-row" style="grid-row:(\d)">([^<]*)<', html)) == {
        "1": "Z, thought", "2": "T, C", "3": "L_out", "4": "KV", "5": "L_in", "6": "", "7": "X, input",
        "8": "round 1", "9": "round 2",
    }  # fmt: skip


def thoughts_by_hand() -> Thoughts:
    """Chunks of 2 tokens: 5 6, an empty thought, 7, and a state of norm 5 that the third chunk receives. Two rounds: after the
    first, chunks 1 and 2 are rolled back, which had thought 9 and nothing."""

    def thought(*tokens: int) -> Thought:
        likely = torch.tensor([[0.5, 0.25], [0.25, 0.125], [1.0, 0.0]])[: len(tokens)]
        return Thought(
            tokens, torch.zeros(len(tokens), 2), {"thinking.top_logprobs": likely.log()}, torch.zeros(0, 2), torch.zeros(2, 2)
        )

    state = PlacedEdit("thinking.state", "add", torch.tensor([[3.0, 0.0], [0.0, 4.0]]), 4, 6, (), 1.0, 0)
    chunks = thought(5, 6, 1), thought(1), thought(7, 1)
    rounds = Round(0, 1, 3, ((9, 1), (1,))), Round(1, 3, 3)
    config = ThinkingConfig(chunk=2, read_layer=3, eos_token=1, pad_token=0, write_layer=1)
    return Thoughts(config, thought(1), chunks, {2: state}, rounds=rounds)


def test_a_picture_of_thoughts_made_by_hand() -> None:
    """Words, norms, probabilities and rounds, with the answer as a last chunk that receives the last state."""
    found = of_thoughts(Text(None), [10, 11, 12, 13, 14, 15, 16], thoughts_by_hand(), "By hand")
    first, second, third, answer = found.chunks
    assert [chunk.tokens for chunk in found.chunks] == [(" 10", " 11"), (" 12", " 13"), (" 14", " 15"), (" 16",)]
    assert [chunk.thought for chunk in found.chunks] == [(" 5", " 6", "<EOS>"), ("<EOS>",), (" 7", "<EOS>"), ()]
    assert [chunk.state for chunk in found.chunks] == [0.0, 0.0, 5.0, 0.0]
    assert first.facts == ("step 0\tp 0.500", "step 1\tp 0.250", "step 2\tp 1.000") and second.facts == ("step 0\tp 0.500",)
    assert answer.facts == () and third.facts == first.facts[:2]
    dropped = DrawnChunk((" 12", " 13"), (" 9", "<EOS>"), None), DrawnChunk((" 14", " 15"), ("<EOS>",), None)
    assert found.rounds == (DrawnRound(0, 1, 3, dropped), DrawnRound(1, 3, 3))
    assert (found.title, found.layers) == ("By hand", (1, 3))
    assert len(of_thoughts(Text(None), [10, 11, 12, 13, 14, 15], thoughts_by_hand()).chunks) == 3, "nothing was answered"


def test_thoughts_in_trees_and_timelines() -> None:
    """A thought stands at the last token of its chunk, on its branch. A timeline begins with the rounds: what was known before,
    what was kept, and what was rolled back."""
    thoughts = thoughts_by_hand()
    record: Any = SimpleNamespace(
        id=4, root_length=6, cut=[SimpleNamespace(id=7, fork_position=2), SimpleNamespace(id=8, fork_position=6)]
    )
    assert thoughts_by_branch(Text(None), record, thoughts) == {
        4: {1: (" 5", " 6", "<EOS>"), 5: (" 7", "<EOS>")},
        7: {3: (" 9", "<EOS>")},
    }
    told = Timeline((Frame(Phase.DECODE, "a token", Fill(6), others=2),))
    ran, gone, kept, last = with_rounds(told, Text(None), thoughts).frames
    known = Slot(" 5  6 <EOS>", TokenState.ACCEPTED, 0, label="Z1")
    assert ran.phase is Phase.PREFILL and ran.kv == Fill(0, draft=6) and ran.generated == ()
    assert ran.caption == "round 1: chunks 0 to 2 in one canonical pass, with guessed thoughts"
    assert gone.phase is Phase.ROLLBACK and gone.kv == Fill(2)
    assert gone.caption == "round 1: KV kept up to chunk 0; chunks 1 to 2 rolled back with their thoughts"
    rejected = [Slot(" 9 <EOS>", TokenState.REJECTED, 1, label="Z2"), Slot("<EOS>", TokenState.REJECTED, 2, label="Z3")]
    assert gone.generated == (known, *rejected)
    assert kept.phase is Phase.ACCEPT and kept.kv == Fill(6) and kept.caption == "round 2: KV kept up to chunk 2"
    assert kept.generated == (known, Slot(" 7 <EOS>", TokenState.ACCEPTED, 2, label="Z3"))
    assert last == told.frames[0] and [frame.others for frame in (ran, gone, kept)] == [2, 2, 2]


# ---- dumped thoughts -------------------------------------------------------------------------------------------------
# The report page of a Thinking-States model: the picture drawn from files equals that of the live run.

CHUNK = 3
COIN = tasks.get("coin")(flips=(1, 4), seed=3)


def thinker(guess: Guess = "empty") -> ThinkingEngine:
    words = HostileTokenizer(tasks.get("coin").vocabulary())
    shape = ModelConfig(
        num_layers=3, d_model=32, num_heads=2, num_kv_heads=2, d_head=16, d_mlp=48, vocab_size=words.vocab_size,
        max_positions=256, rotary_dim=16,
    )  # fmt: skip
    return ThinkingEngine(thinking_model(shape, chunk=CHUNK), words, guess=guess)


@cache
def replayed(guess: Guess = "empty") -> Run:
    """Tests must not change it."""
    run = thinker(guess).replay(COIN.examples(3), sites="STCZ", drafter="lens", max_new=6)
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def thinking_dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return replayed().save(tmp_path_factory.mktemp("thinking"), examples_per_shard=2)


def pictures_of_dumped_thoughts(dump: Dump, engine: ThinkingEngine) -> list[Thinking]:
    found = [example.thinking for example in examples.examples(dump, lambda token: word(engine.text, token))]
    return [picture for picture in found if picture is not None]


@pytest.mark.slow
@pytest.mark.parametrize("guess", GUESSES)
def test_a_dumped_picture_is_the_live_one(guess: Guess, tmp_path: Path) -> None:
    """Chunks, words, probabilities, states and rounds are equal, and so are the thoughts of rolled-back suffixes."""
    run = replayed(guess)
    found = pictures_of_dumped_thoughts(run.save(tmp_path), run.engine)  # type: ignore[arg-type]
    assert len(found) == len(run) and any(chunk.thinks for picture in found for chunk in picture.chunks)
    for number, (picture, result) in enumerate(zip(found, run, strict=True)):
        live = run.picture(number)
        assert isinstance(live, Thinking)
        assert [len(chunk.tokens) for chunk in picture.chunks[:-1]] == [CHUNK] * len(result.thoughts.chunks)
        for mine, other in zip(picture.chunks, live.chunks, strict=True):
            assert (mine.tokens, mine.thought, mine.facts) == (other.tokens, other.thought, other.facts)
            if mine.thought:  # an answer may be shorter than the state it receives
                assert mine.state == pytest.approx(other.state, rel=1e-6)
        without = [[replace(each, dropped=()) for each in rounds] for rounds in (picture.rounds, live.rounds)]
        assert without[0] == without[1]
        said = [[[c.thought for c in each.dropped] for each in rounds] for rounds in (picture.rounds, live.rounds)]
        assert said[0] == said[1], "the words of thoughts that were rolled back"
        rolled_back = [path for path in result.rejected if path.fork_position < result.num_prompt]
        dropped = [each for each in picture.rounds if each.dropped]
        assert bool(dropped) == (guess != "sequential")
        for each, path in zip(dropped, rolled_back, strict=True):
            assert isinstance(path.activations, ThinkingRecording)
            had = path.activations.thoughts.chunks[each.kept : each.last]
            assert [len(chunk.thought) for chunk in each.dropped] == [len(thought.tokens) for thought in had]
            first = [word(run.engine.text, t.tokens[0]) if len(t.tokens) > 1 else "<EOS>" for t in had]
            assert [chunk.thought[0] for chunk in each.dropped] == first


def test_thoughts_of_other_rows_give_another_picture(thinking_dump: Dump) -> None:
    """Negative control: thought rows shifted by one give another picture."""
    frame = thinking_dump.files.frame(0)
    rows = frame[frame["example"] == 0]
    example = next(examples.examples(thinking_dump))
    thoughts = DumpedThoughts.of(thinking_dump, 0, str)
    assert thoughts is not None
    moved = replace(thoughts, tokens=np.roll(thoughts.tokens, 1, axis=0), plan=replace(thoughts.plan, rejected=False))
    assert moved.picture(rows, example.tree).chunks != thoughts.picture(rows, example.tree).chunks


def test_the_page_shows_it(thinking_dump: Dump) -> None:
    """The page has one column per chunk, rolled-back thoughts struck through, and the tree below, whatever the words are."""
    html = ReportPage(thinking_dump).html()
    fragments = blocks_of(html)
    assert_harmless(html, 2 + html.count('class="rl-block"'))
    for example, one in zip(examples.examples(thinking_dump), fragments, strict=True):
        picture = example.thinking
        assert picture is not None
        found = assert_harmless(one, scripts=0)
        classes = [value or "" for name, value in found.attributes if name == "class"]
        dropped = sum(len(each.dropped) for each in picture.rounds)
        assert classes.count("rl-thinking") == classes.count("rl-tree") == 1
        assert classes.count("rl-chunk") == len(picture.chunks)
        asked = sum(bool(chunk.thought) for chunk in picture.chunks)  # T is not run on generated tokens
        assert classes.count("rl-blocks") == asked and 0 < len(picture.chunks) - asked <= 1
        assert sum(c.startswith("rl-thought") for c in classes) == asked + dropped
        assert dropped and "rl-bar rl-rejected" not in classes, "every rolled-back chunk tells its thought"
        tips = [value or "" for name, value in found.attributes if name == "data-tip"]
        assert any("rolled back in round 1\nstate added\t" in tip for tip in tips)


def test_a_plain_model_has_none(dump: Dump) -> None:
    assert next(examples.examples(dump)).thinking is None
    assert not any("rl-thinking" in one for one in blocks_of(ReportPage(dump, trees=2).html()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shown"),
    [({"sites": "Z"}, True), ({"rejected": False}, True), ({"sites": "S"}, False), ({"positions": "generated"}, False)],
)
def test_dumps_that_hold_less(options: dict[str, Any], shown: bool, tmp_path: Path) -> None:
    """The page says that data is missing or leaves it out, and never invents it."""
    engine = thinker()
    dump = write_dump(engine, make_plan(engine, COIN, 2, max_new=4, **options), tmp_path)
    assert dump is not None
    found = pictures_of_dumped_thoughts(dump, engine)
    assert len(found) == 2 * shown
    for picture in found:
        assert ("not kept" in str(picture)) == ("sites" in options), "states"
        assert ("S1 not kept" in picture._repr_html_()) == ("sites" in options)
        assert bool(picture.rounds) == options.get("rejected", True)


def test_rounds_are_told_with_their_thoughts(thinking_dump: Dump) -> None:
    (picture, *_) = pictures_of_dumped_thoughts(thinking_dump, thinker())
    each = next(each for each in picture.rounds if each.dropped)
    told = next(line for line in str(picture).splitlines() if line.startswith("round 1"))
    assert f"{each.kept} to {each.last - 1} rolled back, which had thought: " in told
    assert told.count("<EOS>") == len(each.dropped)
    assert picture.rounds[-1] == DrawnRound(picture.rounds[-2].kept, len(picture.chunks) - 1, len(picture.chunks) - 1)


def test_the_command(tmp_path: Path) -> None:
    """The command finds the embedded model by its weights, and the picture shows its words."""
    shell, folder, page = CliRunner(), str(tmp_path / "dump"), tmp_path / "a.html"
    made = ["dump", "--model", "coin-thinking", "--n", "1", "--knob", "rendering=picture", "--out", folder, "--quiet"]
    assert shell.invoke(app, made).exit_code == 0
    told = shell.invoke(app, ["report", folder, "--out", str(page), "--quiet", "--verify", "1"])
    assert told.exit_code == 0 and "verified" in told.output, told.output
    for one in blocks_of(page.read_text()):
        assert "rl-thinking" in one and "&lt;EOS&gt;" in one and " tails</span>" in one


def test_a_branch_in_a_notebook_is_its_picture(engine: Engine) -> None:
    branch = thinker().prompt(COIN.example(0).prompt)
    shown = branch._repr_html_()
    found = assert_harmless(shown, scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert classes.count("rl-chunk") == len(branch.picture().chunks) and "rl-tree" not in classes
    assert "certified" in found.texts and f"{branch.length}, including {branch.root_length} of the prompt" in found.texts
    with engine.prompt("A coin's state is heads.") as branch:
        plain = branch._repr_html_()
    assert 'rl-thinking"' not in plain and 'class="rl-tree"' in plain, "a branch that does not think is a tree"


def test_a_run_in_a_notebook_unfolds_its_pictures() -> None:
    run = replayed()
    found = assert_harmless(run._repr_html_(), scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert classes.count("rl-thinking") == 3 and "rl-tree" not in classes
    assert classes.count("rl-chunk") == sum(len(run.picture(i).chunks) for i in range(3))


def test_thoughts_and_runs_are_told_in_a_line() -> None:
    run = thinker().replay(COIN.examples(1), window=1)
    assert isinstance(run, Run) and repr(run).endswith("nothing drafted)")
    thoughts = run[0].thoughts
    assert thoughts is not None and repr(thoughts).startswith(f"Thoughts({len(thoughts.chunks)} chunks of {CHUNK} tokens, ")
    assert len(repr(thoughts)) < 100 and repr(thoughts.chunks[0]).endswith("state of 3 x 32)")
