"""Script: a task's grammar, written as a generator, and the one reader that runs it.

A script yields the literal pieces that may come next and receives the one that the text has. No offered piece is a
prefix of another, so the reader never looks ahead: its state after n characters depends on those n alone.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from replaylens.tasks.errors import UnreadableText
from replaylens.tasks.reading import Event, Label, Reading, Span, Step

Script = Generator[Sequence[str], str, None]

NEXT_ACTION = "next_action"
SHUFFLED = "shuffled"


class Scene:
    """The state of the world after the text so far. A subclass keeps the state, writes the script and gives the labels."""

    label_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.told: list[tuple[Event, int, int]] = []

    def script(self) -> Script:
        """The grammar. Changes the scene as pieces come in."""
        raise NotImplementedError

    def labels(self) -> dict[str, Label]:
        """Every label of `label_names` as of now."""
        raise NotImplementedError

    def thought(self) -> str:
        """The state now, in words of the vocabulary, with a leading space."""
        raise NotImplementedError

    def next_action_open(self) -> bool:
        """Whether the next action is still fully unpredictable from what has been read."""
        return True

    def happen(self, event: Event, *, pieces: int, telling: int = 1) -> None:
        """Record an event stated by the last `pieces` pieces; the last `telling` of them determine the action."""
        self.told.append((event, pieces, telling))


class Mark(NamedTuple):
    """The scene after `read` characters, at the end of a piece."""

    read: int
    labels: dict[str, Label]
    next_action_open: bool
    steps: int


def read_script(scene: Scene, text: str, task: str, shuffled: Label = None) -> Reading:
    """Run the scene's script over the text as far as it fits. Raises UnreadableText if the first piece does not fit."""
    script = scene.script()
    offered: Sequence[str] = next(script)
    starts: list[int] = []
    steps: list[Step] = []
    marks = [_mark(scene, 0, 0)]
    position = 0
    while offered and position < len(text):
        piece = next((piece for piece in offered if text.startswith(piece, position)), None)
        if piece is None:
            break
        starts.append(position)
        position += len(piece)
        offered = _send(script, piece)
        if len(scene.told) > len(steps):
            steps.append(_step(scene, text, starts, position))
        marks.append(_mark(scene, position, len(steps)))
    until = position + max((_common(piece, text, position) for piece in offered), default=0)
    if not starts and until < len(text):
        raise UnreadableText(task, text, offered)
    names = (*scene.label_names, NEXT_ACTION, SHUFFLED)
    return Reading(text, _spans(marks, steps, until, shuffled), tuple(steps), until, not offered, names)


def _send(script: Script, piece: str) -> Sequence[str]:
    try:
        return script.send(piece)
    except StopIteration:
        return ()


def _mark(scene: Scene, read: int, steps: int) -> Mark:
    return Mark(read, scene.labels(), scene.next_action_open(), steps)


def _step(scene: Scene, text: str, starts: list[int], end: int) -> Step:
    event, pieces, telling = scene.told[-1]
    start = starts[-pieces]
    return Step(start + (text[start] == " "), starts[-telling], end, event, scene.thought())


def _common(piece: str, text: str, position: int) -> int:
    """Length of the common prefix of the piece and the text at `position`: the readable part of a truncated word."""
    count = 0
    while count < len(piece) and position + count < len(text) and piece[count] == text[position + count]:
        count += 1
    return count


def _spans(marks: list[Mark], steps: list[Step], until: int, shuffled: Label) -> tuple[Span, ...]:
    """Labels after the n-th character belong to character n - 1, so a mark's span begins one character early.

    `next_action` has a value only before the first word that reveals it; from there on it is None.
    """
    spans: list[Span] = []
    for here, after in zip(marks, [*marks[1:], None], strict=True):
        start = max(here.read - 1, 0)
        end = until if after is None else after.read - 1
        upcoming = steps[here.steps] if here.steps < len(steps) else None
        hidden = min(max(upcoming.reveals, start), end) if upcoming and here.next_action_open else start
        action = upcoming.event.action if upcoming else None
        for begin, stop, ahead in ((start, hidden, action), (hidden, end, None)):
            if begin < stop:
                spans.append(Span(begin, stop, {**here.labels, NEXT_ACTION: ahead, SHUFFLED: shuffled}))
    return tuple(spans)
