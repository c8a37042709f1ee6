"""Reading: the labels of a task's text, character by character.

A token takes the labels in force after its LAST character. So a label holds what can be inferred from the text up to
and including the token. The one exception is `next_action`, which looks ahead on purpose.
"""

from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from replaylens.tasks.errors import BadKnob, BadTask, TaskError, UnreadableText, unknown

# ---- reading ---------------------------------------------------------------------------------------------------------

Label = str | int | float | bool | None
Offset = tuple[int, int]

NEXT_ACTION = "next_action"
SHUFFLED = "shuffled"
RESERVED = (
    *("example", "root", "branch", "parent", "fork_position", "position", "token", "text", "token_state", "accepted"),
    *("correct", "logprob", "entropy", "shard", "row", "depth"),
    *("step", "since_step", "until_step", "since_query", "steps", "since_last", "part", "key", "group"),
)
"""columns of dumps and of rows to probe, which no label may be named after"""


@dataclass(frozen=True)
class Event:
    """An event of the text. The labels last_action and next_action show its `action`."""

    action: str
    actor: str = ""
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """An event at characters [start, end). It can be fully inferred once `end` characters are read.

    `reveals`: start of the first word that reveals anything about the action. `thought`: the state after the step, in
    words of the task's vocabulary.
    """

    start: int
    reveals: int
    end: int
    event: Event
    thought: str


@dataclass(frozen=True)
class Span:
    """Characters [start, end) under the same labels."""

    start: int
    end: int
    labels: Mapping[str, Label]


class ReadingMark(NamedTuple):
    """What holds once `read` characters are read: the end of a piece of the grammar."""

    read: int
    labels: Mapping[str, Label]
    """without `next_action` and `shuffled`"""
    next_action_open: bool
    """whether nothing read so far reveals anything about the next action"""
    steps: int
    """number of steps so far"""


@dataclass(frozen=True)
class Reading:
    """A text with its labels. From character `readable_until` on, it breaks the task's grammar and has no labels.

    `marks`: what holds at the start and after each piece of the grammar. `complete`: the text reaches the end of the
    grammar (answer and full stop).
    """

    text: str
    marks: tuple[ReadingMark, ...] = field(repr=False)
    steps: tuple[Step, ...]
    readable_until: int
    complete: bool
    label_names: tuple[str, ...] = field(repr=False)
    shuffled: Label = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the text, in order."""
        return tuple(step.event for step in self.steps)

    @property
    def thoughts(self) -> list[tuple[int, str]]:
        """For each step: the character count after which the new state can be inferred, and that state in words."""
        return [(step.end, step.thought) for step in self.steps]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The readable characters, in runs of equal labels and no longer than a piece of the grammar.

        Labels after the n-th character belong to character n - 1, so a mark's span begins one character early.
        """
        spans: list[Span] = []
        for here, after in zip(self.marks, [*self.marks[1:], None], strict=True):
            start = max(here.read - 1, 0)
            end = self.readable_until if after is None else after.read - 1
            ahead = self._upcoming(here)
            hidden = start if ahead is None else min(max(ahead.reveals, start), end)
            spans += [Span(a, b, self.labels_after(a + 1)) for a, b in ((start, hidden), (hidden, end)) if a < b]
        return tuple(spans)

    @cached_property
    def _reads(self) -> list[int]:
        return [mark.read for mark in self.marks]

    def _mark(self, count: int) -> ReadingMark | None:
        """The last mark within the first `count` characters; None at 0 and past `readable_until`."""
        if not 0 < count <= self.readable_until:
            return None
        return self.marks[bisect_right(self._reads, count) - 1]

    def _upcoming(self, mark: ReadingMark) -> Step | None:
        """The step whose action is `next_action` at a mark, up to the first word that reveals it."""
        return self.steps[mark.steps] if mark.next_action_open and mark.steps < len(self.steps) else None

    def _next_action(self, mark: ReadingMark | None, count: int) -> Label:
        """It has a value only before the first word that reveals it; from there on it is None."""
        ahead = None if mark is None else self._upcoming(mark)
        return ahead.event.action if ahead is not None and count <= ahead.reveals else None

    def labels_after(self, count: int) -> Mapping[str, Label]:
        """Labels in force once `count` characters are read; all None at 0 and past `readable_until`."""
        return {name: values[0] for name, values in self.labels_at([(0, count)]).items()}

    def labels_at(self, offsets: Iterable[Offset], names: Sequence[str] | None = None) -> dict[str, list[Label]]:
        """Labels per token, from each token's (start, end). An empty token (a special one) has no labels."""
        wanted = self.label_names if names is None else tuple(names)
        for name in wanted:
            if name not in self.label_names:
                raise TaskError(unknown("label", name, self.label_names))
        ends = [end if end > start else 0 for start, end in offsets]
        marks, none = [self._mark(end) for end in ends], dict.fromkeys(self.label_names)
        rows = [none if mark is None else mark.labels for mark in marks]
        found: dict[str, list[Label]] = {}
        for name in wanted:
            if name == NEXT_ACTION:
                found[name] = [self._next_action(mark, end) for mark, end in zip(marks, ends, strict=True)]
            elif name == SHUFFLED:
                found[name] = [None if mark is None else self.shuffled for mark in marks]
            else:
                found[name] = [row[name] for row in rows]
        return found


# ---- given -----------------------------------------------------------------------------------------------------------
# `GivenText`: a text that somebody gave, as the tokens that a model reads, with labels of the text or of its tokens.

NOT_LABELS = (*RESERVED, SHUFFLED, NEXT_ACTION, "")
"""what no label of given texts may be called"""
TokenSpan = tuple[int, int, Label]
"""the tokens [start, end) and the value of a label there"""
_FIELDS = {"tokens": list, "prompt": int, "text": str, "completion": str, "labels": dict, "spans": dict, "edits": list}


@dataclass(frozen=True, eq=False)
class GivenText:
    """A token path. Its first `num_prompt` tokens are the prompt; those after it were generated or forced by its maker."""

    tokens: tuple[int, ...]
    num_prompt: int
    text: str
    """of the prompt, as given"""
    completion: str = ""
    """the text after the prompt"""
    labels: Mapping[str, Label] = field(default_factory=dict)
    """labels of the whole text: every token has them, also those that a model generates after it"""
    spans: Mapping[str, tuple[TokenSpan, ...]] = field(default_factory=dict)
    """labels of some tokens, in order and without overlaps"""
    edits: tuple[dict[str, Any], ...] = ()
    """interventions on this text alone, as the engine writes them"""

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        spans = {name: [list(span) for span in own] for name, own in self.spans.items()}
        rest: dict[str, Any] = {
            "completion": self.completion,
            "labels": dict(self.labels),
            "spans": spans,
            "edits": list(self.edits),
        }
        if self.num_prompt < len(self.tokens):
            rest["prompt"] = self.num_prompt
        return {"tokens": list(self.tokens), "text": self.text} | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "GivenText":
        """Inverse of `to_json`, for values that `as_texts` has checked."""
        spans = {name: tuple((a, b, value) for a, b, value in own) for name, own in raw.get("spans", {}).items()}
        tokens = tuple(raw["tokens"])
        rest = (raw.get("completion", ""), raw.get("labels", {}), spans, tuple(raw.get("edits", ())))
        return cls(tokens, raw.get("prompt", len(tokens)), raw["text"], *rest)

    def labels_at(self, positions: Sequence[int], names: Iterable[str]) -> dict[str, list[Label]]:
        """The values of labels at some positions of a path that begins with these tokens; None where there is none."""
        return {name: self._values(name, positions) for name in names}

    def _values(self, name: str, positions: Sequence[int]) -> list[Label]:
        if name not in self.spans:
            return [self.labels.get(name)] * len(positions)
        dense = self._dense[name]
        return [dense[position] if position < len(dense) else None for position in positions]

    @cached_property
    def _dense(self) -> dict[str, list[Label]]:
        """The value of each label of tokens at every token."""
        found: dict[str, list[Label]] = {}
        for name, spans in self.spans.items():
            found[name] = [None] * len(self.tokens)
            for start, end, value in spans:
                found[name][start:end] = [value] * (end - start)
        return found


def as_texts(knob: str, value: Any) -> tuple[dict[str, Any], ...]:
    """The records of given texts, checked; BadKnob names the first that is wrong. Takes what `GivenText.to_json` writes."""
    if not isinstance(value, list | tuple) or not value:
        raise BadKnob(knob, value, "Give at least one text: engine.texts(...) makes this task, and --texts a dump of it.")
    for number, raw in enumerate(value):
        if problem := _problem(raw):
            raise BadKnob(f"{knob}[{number}]", str(raw)[:60], problem)
    for name, kinds in _kinds(value).items():
        if len(kinds) > 1:
            types = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise TaskError(f"Label {name!r} has values of the types {types}. Give values of one type.")
    return tuple(value)


def _problem(raw: Any) -> str | None:
    """What is wrong with a record, or None."""
    if not isinstance(raw, dict) or not {"tokens", "text"} <= raw.keys() <= _FIELDS.keys():
        return f"Give a record with tokens and text, and nothing but {', '.join(_FIELDS)}."
    for name, kind in _FIELDS.items():
        if name in raw and type(raw[name]) is not kind:
            return f"Its {name!r} is not of the type {kind.__name__}."
    tokens = raw["tokens"]
    if not tokens or any(type(token) is not int or token < 0 for token in tokens):
        return "Its tokens are not a list of whole numbers from 0 on, with at least one."
    if not 1 <= raw.get("prompt", 1) <= len(tokens):
        return f"Its prompt has {raw['prompt']} of {len(tokens)} tokens."
    return _label_problem(raw, len(tokens))


def _label_problem(raw: dict[str, Any], length: int) -> str | None:
    labels, spans = raw.get("labels", {}), raw.get("spans", {})
    for name in (*labels, *spans):
        if name in NOT_LABELS:
            return f"The label {name!r} has the name of an index column. Rename it."
    if both := labels.keys() & spans.keys():
        return f"The label {min(both)!r} is given for the text and for its tokens. Give it once."
    for name, value in labels.items():
        if not _is_label(value) and value is not None:
            return f"The label {name!r} is {value!r:.40}. Use text, numbers of 64 bits, True, False or None."
    for name, own in spans.items():
        last, listed = 0, [*own] if isinstance(own, list) else [own]
        for span in listed:
            fits = isinstance(span, list | tuple) and len(span) == 3 and type(span[0]) is int and type(span[1]) is int
            if not fits or not last <= span[0] < span[1] <= length or not _is_label(span[2]):
                return f"The label {name!r} has the span {span!r:.40}. Give [start, end, value], in order, of {length} tokens."
            last = span[1]
    return None


def _is_label(value: Any) -> bool:
    """Whether a value can be stored: text, a finite number of 64 bits, True or False."""
    return isinstance(value, str | bool) or (isinstance(value, int | float) and -(2**63) <= value < 2**63)


def _kinds(records: Sequence[dict[str, Any]]) -> dict[str, set[type]]:
    """The types of each label's values, over all texts."""
    kinds: dict[str, set[type]] = {}
    for raw in records:
        for name, value in raw.get("labels", {}).items():
            kinds.setdefault(name, set()).update({type(value)} - {type(None)})
        for name, own in raw.get("spans", {}).items():
            kinds.setdefault(name, set()).update(type(span[2]) for span in own)
    return kinds


def label_names_of(records: Iterable[GivenText]) -> tuple[str, ...]:
    """Every label of the texts, in the order in which they first occur."""
    return tuple(dict.fromkeys(name for text in records for name in (*text.labels, *text.spans)))


# ---- script ----------------------------------------------------------------------------------------------------------
# Script: a task's grammar, written as a generator, and the one reader that runs it.
#
# A script yields the literal pieces that may come next and receives the one that the text has. No offered piece is a
# prefix of another, so the reader never looks ahead: its state after n characters depends on those n alone.

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
