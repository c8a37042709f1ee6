"""`check`: does a task keep the promises that labels, probes and training rest on? Tried on examples; nothing is proved."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from replaylens.tasks.reading import NEXT_ACTION, RESERVED
from replaylens.tasks.task import AnyTask, Example
from replaylens.tasks.tokenizer import WordTokenizer

FEW = 3
"""examples that are cut at every character"""
SIGMA = 5
"""standard errors by which the share of the most frequent next action may miss its declared chance"""
Test = Callable[[AnyTask, Sequence[Example]], Iterator[str]]


@dataclass(frozen=True)
class BrokenPromise:
    """One promise, and the first problem with it; empty if it is kept, or was not tried."""

    promise: str
    problem: str
    not_run: str = ""
    """why it was not tried"""

    @property
    def kept(self) -> bool:
        return not self.problem and not self.not_run


def check(task: AnyTask, n: int = 200) -> list[BrokenPromise]:
    """Try every promise on the first `n` examples. An error that the task raises is a problem, too."""
    try:
        examples = task.examples(n)
    except Exception as error:  # the task's code is what is on trial, here and below
        return [BrokenPromise("examples can be made", f"{type(error).__name__}: {error}")]
    return [BrokenPromise(promise, _first_problem(test, task, examples)) for promise, test in PROMISES.items()]


def _first_problem(test: Test, task: AnyTask, examples: Sequence[Example]) -> str:
    try:
        return next(test(task, examples), "")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _repeats(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    again = task.with_knobs()
    for example in reversed(examples):
        if again.example(example.index).digest != example.digest:
            yield f"Example {example.index} differs when it is made again. Take every random choice from `draws`."


def _cites_knobs(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    if type(task)(**json.loads(task.knobs.canonical())) != task:
        yield f"The knobs {task.knobs.canonical()} do not give this task again. Use numbers, text and pairs, with `convert`."


def _reads_back(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    for example in examples:
        if not example.reading.complete:
            at = example.reading.readable_until
            yield f"The script stops at {example.text[at:][:20]!r} (character {at}) of {example.text!r}."
        elif example.reading.events != example.events:
            yield f"Example {example.index} has {example.events}, but its text is read as {example.reading.events}."


def _tells_the_truth(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    truth, claim = task.claims
    for example in examples:
        labels = example.reading.labels_after(len(example.text))
        if labels[truth] is None or labels[truth] != labels[claim]:
            yield f"At the end of {example.text!r}, {truth} is {labels[truth]!r} and {claim} is {labels[claim]!r}."


def _lists_answers(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    answers = task.answers()
    if len(set(answers)) != len(answers) or len(answers) < 2:
        yield f"answers() gives {answers}. Give at least two different answers."
    for example in examples:
        if example.answer not in answers or example.answer not in example.completion:
            yield f"The answer {example.answer!r} is not in answers(), or not in the completion {example.completion!r}."


def _labels_everything(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    for example in examples:
        for labels in (mark.labels for mark in example.reading.marks):
            if set(labels) != set(task.scene().label_names):
                yield f"labels() gives {sorted(labels)}, but label_names are {sorted(task.scene().label_names)}."
            for name, value in labels.items():
                if not isinstance(value, str | int | None):
                    yield f"The label {name!r} is {value!r}. Use text, whole numbers, True, False or None."


def _leaves_reserved_names(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    for name in task.label_names:
        if name in RESERVED:
            yield f"The label {name!r} is the name of an index column. Rename it. Reserved: {', '.join(RESERVED)}."


def _never_looks_ahead(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    for example in examples[:FEW]:
        for cut in range(1, len(example.text)):
            before, whole = task.read(example.text[:cut], example.index).labels_after(cut), example.reading.labels_after(cut)
            if other := [name for name in whole if name != NEXT_ACTION and before[name] != whole[name]]:
                was, now = before[other[0]], whole[other[0]]
                yield f"After {example.text[:cut]!r}, {other[0]} is {was!r}, but {now!r} once the rest of the text is known."


def _has_words(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    words = task.vocabulary()
    if list(words) != sorted(set(words)):
        yield "vocabulary() is not sorted, or names a word twice. Use vocabulary_of."
    tokenizer = WordTokenizer(words)
    for example in examples:
        for text in (example.text, *(thought for _, thought in example.thoughts)):
            if tokenizer.decode(tokenizer.encode(text)) != text:
                yield f"The words of {text!r} do not give the text again."


def _reads_without_looking_ahead(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    for example in examples[:FEW]:
        script, read = task.scene().script(), 0
        offered = next(script)
        while read < len(example.text):
            if "" in offered:
                yield f"After {example.text[:read]!r}, an empty piece is on offer. Leave it out."
                return
            for piece in offered:
                if others := [other for other in offered if other is not piece and other.startswith(piece)]:
                    yield f"After {example.text[:read]!r}, {piece!r} and {others[0]!r} are both on offer. Split the longer one."
            piece = next(piece for piece in offered if example.text.startswith(piece, read))
            read += len(piece)
            try:
                offered = script.send(piece)
            except StopIteration:
                break


def _hides_next_action(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    chance = task.next_action_chance()
    marks = ((example.reading, mark.read) for example in examples for mark in example.reading.marks)
    first: dict[int, object] = {}
    for reading, read in marks:
        value = reading.labels_after(read)[NEXT_ACTION]
        if value is not None:
            first.setdefault(id(reading), value)
    if not first:
        yield "next_action never has a value. Record events with `happen`, and leave it open with `next_action_open`."
        return
    action, count = Counter(first.values()).most_common(1)[0]
    error = (max(chance * (1 - chance), 0.25 / len(first)) / len(first)) ** 0.5
    if abs(count / len(first) - chance) > SIGMA * error:
        yield f"{action!r} comes next in {count} of {len(first)} texts, but next_action_chance() is {chance:.3f}."


def _has_a_length(task: AnyTask, examples: Sequence[Example]) -> Iterator[str]:
    least, most = getattr(task.knobs, task.length_knob)
    lengths = [
        {len(example.events) for example in task.with_knobs(**{task.length_knob: steps}).examples(20)}
        for steps in dict.fromkeys((least, most))
    ]
    if any(len(found) != 1 for found in lengths) or (len(lengths) == 2 and min(lengths[0]) >= min(lengths[1])):
        told = " and ".join(str(sorted(found)) for found in lengths)
        yield f"With {task.length_knob} = {least} and {most}, texts have {told} events. A length must fix their number."


PROMISES: dict[str, Test] = {
    "an index always gives the same example": _repeats,
    "the knobs can be stored as JSON": _cites_knobs,
    "the reader finds the events in the text": _reads_back,
    "a true text claims the truth": _tells_the_truth,
    "every answer is listed": _lists_answers,
    "every label is declared": _labels_everything,
    "no label is the name of an index column": _leaves_reserved_names,
    "a label depends on the text before it only": _never_looks_ahead,
    "the vocabulary covers texts and thoughts": _has_words,
    "no piece of the grammar begins another": _reads_without_looking_ahead,
    "the next action is as predictable as declared": _hides_next_action,
    "the length knob sets the number of events": _has_a_length,
}
"""what is promised -> a generator of problems with it"""
