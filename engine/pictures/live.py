"""Trees of live branches, with their captured rows."""

from collections.abc import Mapping
from functools import partial

from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.model.text import Text
from replaylens.engine.pictures.paths import DrawnPath, Token
from replaylens.engine.pictures.readings import Readings, word
from replaylens.engine.pictures.tree import Tree
from replaylens.engine.request.recording import Recording

MAX_BRANCHES = 200
"""limit per tree"""


ThoughtsByBranch = Mapping[int, Mapping[int, tuple[str, ...]]]


def tree_of(
    trunk: BranchRecord,
    recordings: Mapping[int, Recording | None],
    text: Text,
    title: str = "",
    thoughts: ThoughtsByBranch | None = None,
) -> Tree:
    """A branch as the trunk, with all forks and rejected drafts below it.

    recordings  captured rows by branch
    thoughts    words thought after a position, by branch
    """
    every = _below(trunk)
    shown = {record.id: record for record in every[:MAX_BRANCHES]}
    readings = {i: Readings.of(recordings.get(i), partial(word, text)) for i in shown}
    said = thoughts or {}
    paths = [_path(record, shown, trunk.id, readings, text, said.get(record.id, {})) for record in shown.values()]
    return Tree(tuple(paths), title or f"branch {trunk.id}", len(every) - len(shown))


def _below(trunk: BranchRecord) -> list[BranchRecord]:
    """The branch and all below it, level by level, so that a limit drops the deepest first."""
    found, level = [], [trunk]
    while level:
        found += level
        level = [child for parent in level for child in parent.children]
    return found


def _path(
    record: BranchRecord,
    shown: Mapping[int, BranchRecord],
    trunk: int,
    readings: Mapping[int, Readings | None],
    text: Text,
    thoughts: Mapping[int, tuple[str, ...]],
) -> DrawnPath:
    """One branch as it is drawn: its own tokens, from where it leaves its drawn parent."""
    own = 0 if record.id == trunk else record.fork_position
    parent = None if record.id == trunk else _drawn_parent(record, shown, trunk)
    before = readings.get(parent) if parent is not None else None
    reading = readings[record.id]
    tokens = []
    for position in range(own, len(record.tokens)):
        logprob = reading.emitted(position - 1) if reading else None
        if logprob is None and position == own and before is not None:  # predicted by the last row before the fork
            logprob = before.logprob(position - 1, record.tokens[position])
        entropy, lens = (reading.entropy(position), reading.layers(position)) if reading else (None, ())
        shown_as = word(text, record.tokens[position])
        promised = record.uncertified_from is None or position < record.uncertified_from
        why = "" if promised else record.uncertified_why
        tokens.append(
            Token(
                shown_as, position, record.states[position], logprob, entropy, lens, why=why, thought=thoughts.get(position, ())
            )
        )
    return DrawnPath(record.id, parent, own, record.status.value, tuple(tokens))


def _drawn_parent(record: BranchRecord, shown: Mapping[int, BranchRecord], trunk: int) -> int:
    """The branch that owns the token before the fork: the parent, or an ancestor if the fork lies before the parent's."""
    parent = record.parent
    assert parent is not None
    while (
        parent != trunk and record.fork_position <= shown[parent].fork_position
    ):  # parents are on higher levels, so they are shown
        above = shown[parent].parent
        assert above is not None
        parent = above
    return parent
