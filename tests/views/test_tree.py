"""Trees of live branches: every value that a view shows is the engine's own."""

import io
import re

import pytest
from rich.console import Console

from replaylens.engine.display import visible, word
from replaylens.engine.engine import Engine
from replaylens.engine.memory.tree import BranchTree, TokenState
from replaylens.engine.model.text import Text
from replaylens.engine.replay.run import Run
from replaylens.views import draw, pictures
from replaylens.views.data import DrawnPath, Readings, Token
from replaylens.views.draw import arrange
from replaylens.views.pictures import Tree
from tests.toy_model import random_model
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE


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
    for _ in range(2000):
        branch = branches.fork(branch)
    branches.append(branch, [7, 8], TokenState.DRAFT)
    branches.finish(branch, "length")
    lines = str(pictures.tree_of(branches.branch(root), {}, Text(None))).splitlines()
    assert len(lines) == 2001 and lines[0] == "#0 open .2  1 2" and lines[-1].endswith("└─ #2000 @2 finished ?2  7 8")


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
    for shown in (run, branch, engine):
        assert_harmless(shown._repr_html_(), scripts=1)
    assert f"{run.acceptance:.1%}" in run._repr_html_()
    assert engine.fingerprint.digest in engine._repr_html_()
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
