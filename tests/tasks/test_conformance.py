"""`tasks.check` passes every task of the package and the task of the docs, and finds each kind of broken task."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.tasks import Event
from replaylens.tasks.conformance import PROMISES
from replaylens.tasks.errors import BadTask
from replaylens.tasks.task import AnyTask, Draws, Story
from tests.tasks.square import file_of_page, own_registry, square_module
from tests.time_limit import time_limit

PAGE = square_module()
Square, SquareScene = PAGE.Square, PAGE.SquareScene


def broken(task: AnyTask, n: int = 30) -> dict[str, str]:
    """Promise -> problem, of the broken promises."""
    return {found.promise: found.problem for found in tasks.check(task, n) if not found.kept}


def test_the_tasks_of_the_package_keep_every_promise(plain_task: AnyTask) -> None:
    assert broken(plain_task) == {}
    assert len(tasks.check(plain_task, 2)) == len(PROMISES)


def test_the_task_of_the_docs_keeps_every_promise() -> None:
    assert broken(Square(), 200) == {} == broken(Square(moves=3, seed=5))


# Broken tasks


class Forgetful(Square):
    """Draws from something else than `draws`."""

    made = 0

    def write(self, draws: Draws) -> Story:
        Forgetful.made += 1
        return Square(seed=Forgetful.made).write(draws) if Forgetful.made % 3 else Square.write(self, Draws("other", self.made))


class Misread(Square):
    """Writes a word that the script does not know."""

    def write(self, draws: Draws) -> Story:
        story: Story = super().write(draws)
        return Story(story.prompt.replace(" Flip it.", " Turn it over."), story.completion, story.answer, story.events)


class OtherEvents(Square):
    def write(self, draws: Draws) -> Story:
        story: Story = super().write(draws)
        return Story(story.prompt, story.completion, story.answer, (Event("turn"), *story.events))


class Liar(Square):
    def write(self, draws: Draws) -> Story:
        story: Story = super().write(draws)
        other = " ABCD" if story.answer != " ABCD" else " DABC"
        return Story(story.prompt, f"{other}.", other, story.events)


class FewAnswers(Square):
    def answers(self) -> tuple[str, ...]:
        return Square.answers(self)[:4]


class Undeclared(Square):
    def scene(self) -> Any:
        class Scene(SquareScene):
            def labels(self) -> dict[str, Any]:
                return {**super().labels(), "extra": 1}

        return Scene()


class Reserved(Square):
    def scene(self) -> Any:
        class Scene(SquareScene):
            label_names = (*SquareScene.label_names, "depth")

            def labels(self) -> dict[str, Any]:
                return {**super().labels(), "depth": 1}

        return Scene()


class Seer(Square):
    """Its labels come from a scene that has read the whole text."""

    def read(self, text: str, index: int | None = None, known: Any = None) -> Any:
        class Scene(SquareScene):
            def labels(self) -> dict[str, Any]:
                return {**super().labels(), "actions": text.count(" it.")}

        return tasks.Task.read(type("Own", (Square,), {"scene": lambda self: Scene()})(), text, index)


class Wordless(Square):
    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return tuple(word for word in Square.vocabulary() if word != " Leave")


class Ambiguous(Square):
    def scene(self) -> Any:
        class Scene(SquareScene):
            def script(self) -> Iterator[Any]:
                script = super().script()
                offered = next(script)
                while True:
                    piece = yield (*offered, " Turn it") if " Turn" in offered else offered
                    try:
                        offered = script.send(piece)
                    except StopIteration:
                        return

        return Scene()


class Predictable(Square):
    def next_action_chance(self) -> float:
        return 0.9


class NoLength(Square):
    """Its length knob is not its length."""

    def write(self, draws: Draws) -> Story:
        return Square(moves=(1, 5)).write(draws)


class Failing(Square):
    def next_action_chance(self) -> float:
        raise ZeroDivisionError("of the task")


@pytest.mark.parametrize(
    ("kind", "promise", "said"),
    [
        (Forgetful, "an index always gives the same example", "Take every random choice from `draws`"),
        (Misread, "the reader finds the events in the text", "The script stops at ' over. "),
        (OtherEvents, "the reader finds the events in the text", "but its text is read as"),
        (Liar, "a true text claims the truth", "and claimed is "),
        (FewAnswers, "every answer is listed", "is not in answers()"),
        (Undeclared, "every label is declared", "labels() gives ['actions', 'claimed', 'corners', 'extra']"),
        (Reserved, "no label is the name of an index column", "The label 'depth' is the name of an index column. Rename it"),
        (Seer, "a label depends on the text before it only", "once the rest of the text is known"),
        (Wordless, "the vocabulary covers texts and thoughts", "UnknownWord: Word ' Leave'"),
        (Ambiguous, "no piece of the grammar begins another", "' Turn' and ' Turn it' are both on offer"),
        (Predictable, "the next action is as predictable as declared", "but next_action_chance() is 0.900"),
        (NoLength, "the length knob sets the number of events", "A length must fix their number"),
        (Failing, "the next action is as predictable as declared", "ZeroDivisionError: of the task"),
    ],
)
def test_a_broken_promise_is_found(kind: Any, promise: str, said: str) -> None:
    assert said in broken(kind()).get(promise, ""), broken(kind())


def test_a_task_that_makes_no_examples() -> None:
    class Mute(Square):
        def write(self, draws: Draws) -> Story:
            raise KeyError("nothing")

    assert broken(Mute()) == {"examples can be made": "KeyError: 'nothing'"}


def test_an_empty_piece_is_an_error_not_a_hang() -> None:
    """A script that offers "" for ever would be read for ever."""

    class Scene(SquareScene):
        def script(self) -> Iterator[Any]:
            yield ("The square reads",)
            while True:
                yield ("", " Turn")

    endless = type("Endless", (Square,), {"scene": lambda self: Scene()})()
    with time_limit(20), pytest.raises(BadTask, match="offers an empty piece after 'The square reads'"):
        endless.read("The square reads ABCD.")
    with time_limit(20):
        assert "BadTask" in broken(endless)["the reader finds the events in the text"]


# The command


def test_command(tmp_path: Path) -> None:
    (tmp_path / "square.py").write_text(file_of_page("square.py"))
    wrong = file_of_page("square.py").replace("return 1 / 3", "return 0.9")
    (tmp_path / "wrong.py").write_text(wrong)
    with own_registry():
        done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/square.py:Square", "--n", "60"])
        assert done.exit_code == 0 and done.stdout.count("kept") == len(PROMISES) and "broken" not in done.stdout
    with own_registry():
        done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/wrong.py:Square", "--json"])
        assert done.exit_code == 1
        assert [each["promise"] for each in json.loads(done.stdout) if not each["kept"]] == [
            "the next action is as predictable as declared"
        ]
    done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/gone.py:Square"])
    assert done.exit_code == 2 and "CannotImport: " in done.stderr
