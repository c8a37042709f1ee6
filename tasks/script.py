"""Script: a task's grammar, written as a generator, and the one reader that runs it.

A script yields the literal pieces that may come next and receives the one that the text has. No offered piece is a
prefix of another, so the reader never looks ahead: its state after n characters depends on those n alone.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise

from replaylens.tasks.errors import BadTask, UnreadableText
from replaylens.tasks.reading import NEXT_ACTION, SHUFFLED, Event, Label, Reading, ReadingMark, Step

Script = Generator[Sequence[str], str, None]


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


def read_script(scene: Scene, text: str, task: str, shuffled: Label = None, known: Reading | None = None) -> Reading:
    """Run the scene's script over the text as far as it fits. Raises UnreadableText if the first piece does not fit.

    known  the reading of a text by an equal scene: what both texts begin with is not matched and labelled again
    """
    script = scene.script()
    offered: Sequence[str] = next(script)
    starts: list[int] = []
    steps: list[Step] = []
    marks = [ReadingMark(0, scene.labels(), scene.next_action_open(), 0)]
    position, told = 0, scene.told
    for piece, mark in _shared(known, text):
        starts.append(position)
        position = mark.read
        offered = _send(script, piece)
        marks.append(mark)
    if known is not None:
        steps += known.steps[: marks[-1].steps]
    while offered and position < len(text):
        for piece in offered:
            if text.startswith(piece, position):
                break
        else:
            break
        if not piece:  # fits everywhere and reads nothing: it could be read for ever
            raise BadTask(f"The script of {task} offers an empty piece after {text[:position]!r}. Leave it out.")
        starts.append(position)
        position += len(piece)
        offered = _send(script, piece)
        if len(told) > len(steps):
            steps.append(_step(scene, text, starts, position))
        marks.append(ReadingMark(position, scene.labels(), scene.next_action_open(), len(steps)))
    until = position + max((_common(piece, text, position) for piece in offered), default=0)
    if not starts and until < len(text):
        raise UnreadableText(task, text, offered)
    names = (*scene.label_names, NEXT_ACTION, SHUFFLED)
    return Reading(text, tuple(marks), tuple(steps), until, not offered, names, shuffled)


def _shared(known: Reading | None, text: str) -> Iterator[tuple[str, ReadingMark]]:
    """The known pieces that the text begins with, and the marks at their ends."""
    if known is not None:
        for before, mark in pairwise(known.marks):
            piece = known.text[before.read : mark.read]
            if not text.startswith(piece, before.read):
                return
            yield piece, mark


def _send(script: Script, piece: str) -> Sequence[str]:
    try:
        return script.send(piece)
    except StopIteration:
        return ()


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
