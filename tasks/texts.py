"""texts: texts of your own, as token paths with labels. Nothing is written and no grammar read: the texts are the knobs.

A plan cites a task by its name and knobs. So a dump of texts holds them, and is replayed from its folder alone.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from replaylens.tasks.errors import TaskError
from replaylens.tasks.reading import SHUFFLED, GivenText, Reading, ReadingMark, Scene, as_texts, label_names_of
from replaylens.tasks.task import Draws, Example, Knobs, KnownZero, Story, Task, knob

NAME = "texts"
_NOT_POSSIBLE = "Not possible with given texts."


@dataclass(frozen=True, kw_only=True)
class TextsKnobs(Knobs):
    """The texts themselves, as `GivenText.to_json` writes them."""

    texts: tuple[dict[str, Any], ...] = knob((), "the texts: token ids with labels", convert=as_texts, wording=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        as_texts("texts", self.texts)


class GivenTexts(Task[TextsKnobs]):
    """Given texts; `engine.texts` makes them from strings, token ids, chats, tables and branches.

    Labels belong to a text or to its tokens. The only known zero is `shuffled`. There are no steps, no query and no answers:
    what asks for these raises TaskError.
    """

    name = NAME
    description = "Texts of your own, with labels of the texts or of their tokens."
    knobs_class = TextsKnobs
    length_knob = "texts"

    @classmethod
    def of(cls, texts: Iterable[GivenText], seed: int = 0) -> "GivenTexts":
        """The task of these texts. `seed` is that of the label `shuffled`."""
        return cls(texts=[text.to_json() for text in texts], seed=seed)

    @cached_property
    def given(self) -> tuple[GivenText, ...]:
        return tuple(map(GivenText.from_json, self.knobs.texts))

    def __len__(self) -> int:
        return len(self.knobs.texts)

    def example(self, index: int) -> Example:
        """The text at this index. TaskError if there are fewer."""
        text = self._text(index)
        return Example(
            task=self.name,
            knobs=json.dumps({"texts": self.digest}),
            index=index,
            prompt=text.text,
            completion=text.completion,
            answer="",
            events=(),
            maker=self,
            given=text,
        )

    def _text(self, index: int) -> GivenText:
        self._draws(index)  # checks that it is an index
        if index >= len(self):
            raise TaskError(f"There is no text {index}: {len(self)} were given. Use indices from 0 to {len(self) - 1}.")
        return self.given[index]

    def examples(self, which: int | Iterable[int] | None = None) -> list[Example]:
        """All texts, the first `which`, or those at the given indices."""
        return super().examples(len(self) if which is None else which)

    def read(self, text: str, index: int | None = None, known: Reading | None = None) -> Reading:
        """The labels of the whole text at `index`. Labels of its tokens belong to no characters: see `Example.given`."""
        labels = {} if index is None else dict(self._text(index).labels)
        shuffled = None if index is None else self.shuffled(index)
        marks = (ReadingMark(0, labels, False, 0),)
        return Reading(text, marks, (), len(text), True, (*labels, SHUFFLED), shuffled)

    def shuffled(self, index: int) -> int:
        """The label `shuffled`: a fair coin per text."""
        return self._draws(index).below(2, SHUFFLED)

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The labels of the texts, in the order in which they first occur, and `shuffled`."""
        return (*label_names_of(self.given), SHUFFLED)

    @property
    def known_zero(self) -> tuple[KnownZero, ...]:
        return (KnownZero(SHUFFLED, 0.5, "a fair coin per text, drawn independently of it"),)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of texts and seed: equal digests mean equal tasks."""
        return hashlib.sha256(self.knobs.canonical().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, GivenTexts) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"GivenTexts({len(self)} texts, labels {', '.join(self.label_names[:-1]) or 'none'})"

    # ---- what texts do not have -----------------------------------------------------------------------------------

    @property
    def state_label(self) -> str:  # type: ignore[override]
        """The label, if there is one."""
        own = self.label_names[:-1]
        if not own:
            raise TaskError(
                f"{_NOT_POSSIBLE} They have no labels, so no state. Give labels when you replay them, or name a column."
            )
        if len(own) > 1:
            raise TaskError(f"{_NOT_POSSIBLE} They have the labels {', '.join(own)}, and none of them is the state. Name one.")
        return own[0]

    @property
    def claims(self) -> tuple[str, str]:  # type: ignore[override]
        self._lack("claims to compare with a truth")

    def write(self, draws: Draws) -> Story:
        self._lack("writer")

    def scene(self) -> Scene:
        self._lack("grammar")

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        cls._lack("vocabulary")

    def answers(self) -> tuple[str, ...]:
        self._lack("right answers")

    def next_action_chance(self) -> float:
        self._lack("actions")

    @classmethod
    def _lack(cls, what: str) -> NoReturn:
        raise TaskError(
            f"{_NOT_POSSIBLE} They have no {what}. Use a task that has them: `replaylens tasks list` names all tasks."
        )


def cited(task: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs to show on a page or in a report: texts are counted, not repeated."""
    if task != NAME or not isinstance(knobs.get("texts"), list | tuple):
        return dict(knobs)
    made = GivenTexts(**knobs)
    return {**knobs, "texts": f"{len(made)} texts, SHA-256 {made.digest[:16]}"}
