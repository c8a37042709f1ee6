"""Branches share rows where there is room. No token covers another, and no line covers a token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.engine.memory.tree import TokenState
from replaylens.views.data import DrawnPath, Token
from replaylens.views.draw import Placement, arrange
from replaylens.views.pictures import Tree


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


@settings(max_examples=150, deadline=None)
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
