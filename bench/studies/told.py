"""Tasks of the studies: chains of coin flips after solved ones, boxes told from their beginning on, and stories of two people.

All read any path back into labels, rejected drafts included. In the last two, no sentence is right or wrong: what a rejected
draft says is compared with what the path says that was taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import printable
from typing import Any

from replaylens.tasks import Event, Task, get
from replaylens.tasks.boxes import Boxes
from replaylens.tasks.coin import Coin
from replaylens.tasks.reading import Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story

# ---- a task's texts, with words before them ----------------------------------------------------------------------------


class Preceded(Scene):
    """Another scene's script behind fixed words, with some labels of its own."""

    def __init__(self, inner: Scene, before: str) -> None:
        self.inner, self.before = inner, before
        super().__init__()
        self.told = inner.told
        self.label_names = inner.label_names

    def script(self) -> Script:
        if self.before:
            yield (self.before,)
        yield from self.inner.script()

    def labels(self) -> dict[str, Label]:
        return self.inner.labels()

    def thought(self) -> str:
        return self.inner.thought()

    def next_action_open(self) -> bool:
        return self.inner.next_action_open()


def solved_chains(lengths: Sequence[int] = (2, 1, 3)) -> str:
    """Solved chains of thought with names that no question has; they end in different faces."""
    made = [get("coin")(rendering="steps", flips=n, names="held-out", seed=1).example(n).text for n in lengths]
    return "\n".join(made) + "\n"


class ShownCoin(Coin):
    """Coins with chains of thought, after three solved ones: for models that were not trained on the task."""

    name = "shown-coin"

    def write(self, draws: Draws) -> Story:
        story = super().write(draws)
        return replace(story, prompt=solved_chains() + story.prompt)

    def scene(self) -> Any:  # no CoinScene
        return Preceded(super().scene(), solved_chains())


class _BoxScene(Preceded):
    """Also whether the first box is full."""

    def __init__(self, inner: Scene) -> None:
        super().__init__(inner, "")
        self.label_names = (*inner.label_names, "full.1")

    def labels(self) -> dict[str, Label]:
        labels = self.inner.labels()
        first = labels["box.1"]
        return labels | {"full.1": None if first is None else "empty" if first == "nothing" else "full"}


class ToldBoxes(Boxes):
    """Boxes whose prompt ends before the first move: the model tells the moves itself."""

    name = "told-boxes"

    def write(self, draws: Draws) -> Story:
        story = super().write(draws)
        parts = story.prompt.split(". ")
        begun = ". ".join(parts[: self.knobs.boxes]) + "."
        return replace(story, prompt=begun, completion=story.prompt[len(begun) :] + story.completion)

    def scene(self) -> Scene:
        return _BoxScene(super().scene())


# ---- stories -----------------------------------------------------------------------------------------------------------

GIRLS = ("Lily", "Mia", "Anna", "Sarah", "Emma", "Ruth", "Nora", "Clara")
BOYS = ("Tom", "Ben", "Jack", "Max", "Sam", "Leo", "Paul", "Hugo")
PLACES = ("in the garden", "by the river", "at school", "in the kitchen", "on the beach", "in the woods")
HER, HIM = ("she", "her", "hers", "herself"), ("he", "him", "his", "himself")
_CHARACTERS = (*printable, *"“”‘’—–…é")


class _StoryScene(Scene):
    """Who was mentioned last, by name or pronoun. Known one word later, so that no row is the mention itself."""

    label_names = ("who", "mentions", "actions", "words")

    def __init__(self) -> None:
        super().__init__()
        self.who: str | None = None
        self.coming: str | None = None
        self.mentions = self.words = 0
        self.word = ""

    def script(self) -> Script:
        while True:
            piece = yield _CHARACTERS
            if piece.isalpha():
                self.word += piece
            elif self.word:
                self._end()

    def _end(self) -> None:
        self.who, self.words = self.coming, self.words + 1
        heard = self.word if self.word in (*GIRLS, *BOYS) else self.word.lower()
        if heard in (*GIRLS, *HER) or heard in (*BOYS, *HIM):
            self.coming = "her" if heard in (*GIRLS, *HER) else "him"
            self.mentions += 1
            self.happen(Event(self.coming), pieces=1)
        self.word = ""

    def labels(self) -> dict[str, Label]:
        settled = self.who if self.who == self.coming else None
        return {"who": settled, "mentions": self.mentions, "actions": self.mentions, "words": self.words}

    def thought(self) -> str:
        return f" {self.coming}"


@dataclass(frozen=True, kw_only=True)
class StoryKnobs(Knobs):
    """A story has no settings but its seed."""


class TwoPeople(Task[StoryKnobs]):
    """The beginning of a story about a girl and a boy, which the model continues."""

    name = "two-people"
    description = "A story of a girl and a boy; who was mentioned last?"
    knobs_class = StoryKnobs
    length_knob = "seed"
    state_label = "who"
    claims = ("who", "who")

    def write(self, draws: Draws) -> Story:
        girl, boy = draws.pick(GIRLS, "girl"), draws.pick(BOYS, "boy")
        first, second = (girl, boy) if draws.chance(0.5, "order") else (boy, girl)
        place = draws.pick(PLACES, "place")
        begin = draws.pick(("One day", "Yesterday", "Last summer", "In the morning"), "begin")
        deed = draws.pick(("found a small box", "heard a strange noise", "had an idea", "lost a shoe", "saw a fox"), "deed")
        prompt = f"Once upon a time there were two friends, {first} and {second}. {begin}, they played {place}. {first} {deed}."
        return Story(prompt, " The end.", " The end", ())

    def scene(self) -> Scene:
        return _StoryScene()

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return tuple(sorted(f" {a}" for a in (*GIRLS, *BOYS)))

    def answers(self) -> tuple[str, ...]:
        return (" The end",)

    def next_action_chance(self) -> float:
        return 0.5
