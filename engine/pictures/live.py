"""Trees of an engine's own branches, with what was captured on them."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from replaylens.engine.memory.tree import Branch as Record
from replaylens.engine.pictures.readings import Readings, word
from replaylens.engine.pictures.tree import Path, Token, Tree
from replaylens.engine.request.capture import Recording

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.engine.run import Result

MOST_BRANCHES = 200
"""drawn in one tree"""


def tree_of(engine: "Engine", branch: int, recordings: Mapping[int, Recording | None] | None = None, title: str = "") -> Tree:
    """A branch as the trunk, and everything that was forked or cut from it.

    recordings  captured rows by branch, where the branches themselves were released
    """
    lanes = engine.loop.lanes
    kept = {i: lane.recording for i, lane in lanes.items()} | dict(recordings or {})
    ids = _below(engine, branch)
    shown = ids[:MOST_BRANCHES]
    readings = {i: Readings.of(kept.get(i), partial(word, engine.text)) for i in shown}
    paths = [_path(engine, i, branch, readings) for i in shown]
    return Tree(tuple(paths), title or f"branch {branch}", len(ids) - len(shown))


def tree_of_result(engine: "Engine", result: "Result") -> Tree:
    """The path of a replayed example, and its rejected drafts."""
    recordings = {result.branch: result.recording} | {path.branch: path.activations for path in result.rejected}
    outcome = "right" if result.correct else "wrong"
    return tree_of(engine, result.branch, recordings, f"example {result.example.index}, {outcome}")


def _below(engine: "Engine", branch: int) -> list[int]:
    """The branch and all below it, level by level: what is left out first is what lies deepest."""
    found, level = [], [branch]
    while level:
        found += level
        level = [child for parent in level for child in engine.tree.children(parent)]
    return found


def _path(engine: "Engine", branch: int, trunk: int, readings: Mapping[int, Readings | None]) -> Path:
    record = engine.tree.branch(branch)
    own = 0 if branch == trunk else record.fork_position
    parent = None if branch == trunk else _drawn_parent(engine, record, trunk)
    before = readings.get(parent) if parent is not None else None
    reading = readings[branch]
    tokens = []
    for position in range(own, len(record.tokens)):
        logprob = reading.emitted(position - 1) if reading else None
        if logprob is None and position == own and before is not None:  # judged by the path that it left
            logprob = before.logprob(position - 1, record.tokens[position])
        text = word(engine.text, record.tokens[position])
        entropy, lens = (reading.entropy(position), reading.layers(position)) if reading else (None, ())
        tokens.append(Token(text, position, record.states[position], logprob, entropy, lens))
    return Path(branch, parent, own, record.status.value, tuple(tokens))


def _drawn_parent(engine: "Engine", record: Record, trunk: int) -> int:
    """The branch whose own tokens reach up to where this one leaves: its parent, or further up if it left before that."""
    parent = record.parent
    assert parent is not None
    while parent != trunk and record.fork_position <= engine.tree.branch(parent).fork_position:
        above = engine.tree.branch(parent).parent
        assert above is not None
        parent = above
    return parent
