"""Layout of a tree: the row of each branch. Columns are positions, so branches can share a row."""

from dataclasses import dataclass

from replaylens.engine.pictures.paths import DrawnPath, Paths


@dataclass(frozen=True)
class Placement:
    """The place of a branch: its tokens are in `row`, from its fork position on; its line starts at `parent_row`."""

    path: DrawnPath
    row: int
    parent_row: int


def arrange(tree: Paths) -> list[Placement]:
    """Put the trunk in row 0, and every branch below its parent in the first row with room for it and its line.

    A branch takes the columns from the one before its fork, where its line is, to its last token.
    """
    taken: dict[int, list[tuple[int, int]]] = {0: [(0, tree.trunk.end)]}  # half-open columns by row
    places = [Placement(tree.trunk, 0, 0)]
    stack = [(child, 0) for child in reversed(tree.children[tree.trunk.branch])]
    while stack:
        path, parent_row = stack.pop()
        line, row = max(0, path.fork_position - 1), parent_row + 1
        while _hits(taken.get(row, []), line, path.end + 1):  # one empty column after it
            row += 1
        for between in range(parent_row + 1, row):
            taken.setdefault(between, []).append((line, line + 1))
        taken.setdefault(row, []).append((line, path.end + 1))
        places.append(Placement(path, row, parent_row))
        stack += [(child, row) for child in reversed(tree.children[path.branch])]
    return places


def _hits(intervals: list[tuple[int, int]], start: int, end: int) -> bool:
    return any(start < other_end and other_start < end for other_start, other_end in intervals)
