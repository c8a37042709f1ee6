"""`tasks.check` passes every task of the package and the task of the docs, and finds each kind of broken task."""

import json
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import permutations, product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.tasks import Event, conformance, splits
from replaylens.tasks.conformance import PROMISES
from replaylens.tasks.errors import BadKnob, BadSplit, BadTask, UnreadableText
from replaylens.tasks.reading import NEXT_ACTION, SHUFFLED
from replaylens.tasks.splits import Side, TaskSplit, is_test_root
from replaylens.tasks.task import AnyTask, Draws, Example, Story
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.tasks.variables import KINDS, NAMES, Variables
from replaylens.tasks.words import NAMES as NAMES_OF_GROUPS
from replaylens.tasks.words import ORDER, Group, group
from tests.interrupted import time_limit
from tests.tasks.square import file_of_page, own_registry, square_module

PAGE = square_module()
Square, SquareScene = PAGE.Square, PAGE.SquareScene


def broken(task: AnyTask, n: int = 30) -> dict[str, str]:
    """Promise -> problem, of the broken promises."""
    return {found.promise: found.problem for found in tasks.check(task, n) if not found.kept}


def test_the_tasks_of_the_package_keep_every_promise(plain_task: AnyTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text is read at every character: test_reading.py does so with every variant."""
    monkeypatch.setattr(conformance, "FEW", 1)
    found = tasks.check(plain_task, 30)
    assert [each for each in found if not each.kept] == [] and len(found) == len(PROMISES)


def test_the_task_of_the_docs_keeps_every_promise() -> None:
    assert broken(Square(), 60) == {} == broken(Square(moves=3, seed=5))


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
        done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/square.py:Square", "--n", "30"])
        assert done.exit_code == 0 and done.stdout.count("kept") == len(PROMISES) and "broken" not in done.stdout
    with own_registry():
        done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/wrong.py:Square", "--json", "--n", "30"])
        assert done.exit_code == 1
        assert [each["promise"] for each in json.loads(done.stdout) if not each["kept"]] == [
            "the next action is as predictable as declared"
        ]
    done = CliRunner().invoke(app, ["tasks", "check", f"{tmp_path}/gone.py:Square"])
    assert done.exit_code == 2 and "BadTask: " in done.stderr


# ---- known zeros -----------------------------------------------------------------------------------------------------
# Known zeros: the text does not determine them, so no guess beats the stated chance. Seeds and outcomes are fixed.

COUNT = 150
SIGMAS = 4.5
ALARM = 1e-8  # about 2,000 groups below with up to 60 values each: a true zero raises a false alarm for one seed in a thousand
FEATURES = {"no feature", "last_action", "actions", "last words", "empty boxes", SHUFFLED}


def chance_of(task: AnyTask, label: str) -> float:
    return next(zero.chance for zero in task.known_zero if zero.label == label)


def assert_at_chance(values: list[object], chance: float) -> None:
    """Exact test: no value occurs more often than one of probability `chance` could."""
    value, top = Counter(values).most_common(1)[0]
    assert binom.sf(top - 1, len(values), chance) > ALARM, (value, top, len(values), chance)


def places_of(example: Example, state: str) -> list[dict[str, object]]:
    """The labels just before the text reveals each step, with features that a cheap predictor could use."""
    places = []
    for step in example.steps:
        labels = example.reading.labels_after(step.reveals)
        words = " ".join(example.text[: step.reveals].split()[-2:])
        places.append({**labels, "last words": words, "empty boxes": str(labels[state]).count("nothing")})
    return places


def test_next_action_and_shuffled_sit_at_chance(task: AnyTask) -> None:
    """Both sit at chance, overall and within each value of a feature that a predictor could use.

    Actions are independent of each other, so every place counts. `shuffled` is drawn once per example, so one place per example
    counts.
    """
    examples = [places_of(example, task.state_label) for example in task.examples(COUNT)]
    rows = {
        NEXT_ACTION: [place for places in examples for place in places if place[NEXT_ACTION] is not None],
        SHUFFLED: [places[number % len(places)] for number, places in enumerate(examples)],
    }
    for label, found in rows.items():
        assert len(found) > COUNT / 2
        for feature in (
            "no feature",
            task.state_label,
            "last_action",
            "actions",
            "last words",
            "empty boxes",
            SHUFFLED,
        ):
            groups = defaultdict(list)
            for row in found:
                groups[row.get(feature)].append(row[label])
            for values in groups.values():
                if feature != label and len(values) >= 60:
                    assert_at_chance(values, chance_of(task, label))


@pytest.mark.slow
def test_chance_is_reached(plain_task: AnyTask) -> None:
    """The stated chance is the exact accuracy of the best guess, not just a bound."""
    if plain_task.name == "words":
        plain_task = plain_task.with_knobs(length=16)
    values = []
    for example in plain_task.examples(COUNT):
        values += [example.reading.labels_after(step.reveals)[NEXT_ACTION] for step in example.steps]
    values = [value for value in values if value is not None]
    chance = chance_of(plain_task, NEXT_ACTION)
    top = Counter(values).most_common(1)[0][1] / len(values)
    assert top >= chance - SIGMAS * sqrt(chance * (1 - chance) / len(values))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_chance_follows_p(p: float) -> None:
    assert chance_of(tasks.get("coin")(p=p), NEXT_ACTION) == max(p, 1 - p)


RESETS = [
    # p, reset, the likeliest action and its probability
    (0.5, 0.25, ("flip", "keep"), 0.375),
    (0.9, 0.1, ("flip",), 0.81),
    (0.1, 0.2, ("keep",), 0.72),
    (0.5, 0.9, ("set heads", "set tails"), 0.45),
    (0.6, 0.5, ("flip",), 0.3),
    (0.5, 1.0, ("set heads", "set tails"), 0.5),
    (0.7, 0.0, ("flip",), 0.7),
]


@pytest.mark.parametrize(("p", "reset", "likeliest", "chance"), RESETS)
def test_chance_follows_p_and_resets(p: float, reset: float, likeliest: tuple[str, ...], chance: float) -> None:
    """Chance is the probability of the likeliest of flip, keep and the two sets, and matches its frequency in the texts."""
    task = tasks.get("coin-resets")(p=p, reset=reset, flips=8)
    assert chance_of(task, NEXT_ACTION) == pytest.approx(chance)
    actions = Counter(event.action for example in task.examples(100) for event in example.events)
    assert actions.most_common(1)[0][0] in likeliest
    spread = SIGMAS * sqrt(chance * (1 - chance) / 800)
    assert all(abs(actions[action] / 800 - chance) <= spread for action in likeliest)


def test_next_action_tells_the_action_that_comes() -> None:
    for example in tasks.get("coin")(rendering="states").examples(20):
        for step in example.steps:
            assert example.reading.labels_after(step.reveals)[NEXT_ACTION] == step.event.action


def test_no_next_action_in_a_chain_of_thought() -> None:
    """In a chain of thought, the prompt has already stated the next action."""
    for example in tasks.get("coin")(rendering="steps").examples(20):
        start = example.steps[-1].reveals + 1
        assert all(example.reading.labels_after(count)[NEXT_ACTION] is None for count in range(start, len(example.text) + 1))


# ---- ground truth ----------------------------------------------------------------------------------------------------
# The answer and the running state, recomputed from the bare text without the reader.

COUNT_OF_GROUND_TRUTH = 60


def flipped(face: str, flips: int) -> str:
    return face if flips % 2 == 0 else {"heads": "tails", "tails": "heads"}[face]


@pytest.mark.parametrize("rendering", ["picture", "states", "steps"])
@pytest.mark.parametrize("phrasing", ["standard", "idle", "mixed"])
def test_coin_in_words(rendering: str, phrasing: str) -> None:
    task = tasks.get("coin")(rendering=rendering, phrasing=phrasing, distractors=1)
    for example in task.examples(COUNT_OF_GROUND_TRUTH):
        start = re.search(r"state(?: is)? (heads|tails)\.", example.prompt).group(1)
        assert example.answer == " " + flipped(start, len(re.findall(r" flips\b", example.prompt)))


def test_coin_chain_of_thought_states_every_face() -> None:
    for example in tasks.get("coin")(rendering="steps").examples(COUNT_OF_GROUND_TRUTH):
        face = re.search(r"state is (\w+)\.", example.prompt).group(1)
        for clause, stated in re.findall(r"(flips|does not flip): (\w+)\.", example.completion):
            face = flipped(face, clause == "flips")
            assert stated == face


@pytest.mark.parametrize(("verb", "flip"), [("flip", " flips the coin."), ("turn", " turns the coin over.")])
def test_coin_wei(verb: str, flip: str) -> None:
    for example in tasks.get("coin")(rendering="wei", verb=verb).examples(COUNT_OF_GROUND_TRUTH):
        start, asked = re.findall(r"(heads|tails) up", example.prompt)
        assert start == asked
        assert example.answer == (" no" if example.prompt.count(flip) % 2 else " yes")


def test_coin_symbols() -> None:
    for example in tasks.get("coin")(rendering="symbols").examples(COUNT_OF_GROUND_TRUTH):
        start, *actions = example.prompt.removeprefix("> ").removesuffix(" =").split()
        assert example.answer.strip() == (start if actions.count("x") % 2 == 0 else {"H": "T", "T": "H"}[start])


def test_coins() -> None:
    for example in tasks.get("coins")(coins=4).examples(COUNT_OF_GROUND_TRUTH):
        asked = re.search(r"state of the (\w+) coin\?", example.prompt).group(1)
        start = re.search(rf"The {asked} coin is (\w+)\.", example.prompt).group(1)
        flips = example.prompt.count(f"flips the {asked} coin")
        assert example.answer == " " + flipped(start, flips)
        last = example.reading.labels_after(len(example.prompt))
        assert last[f"touched.{asked}"] == (flips > 0)
        assert last[f"changed.{asked}"] == (flips % 2 == 1)


def test_coin_resets() -> None:
    for example in tasks.get("coin-resets")(reset=0.4).examples(COUNT_OF_GROUND_TRUTH):
        face = re.search(r"state is (\w+)\.", example.prompt).group(1)
        for action, target in re.findall(r"(flips|does not flip|sets it to (\w+))", example.prompt):
            face = target or flipped(face, action == "flips")
        assert example.answer == f" {face}"


@pytest.mark.parametrize("cups", [3, 5])
def test_shell(cups: int) -> None:
    for example in tasks.get("shell")(cups=cups).examples(COUNT_OF_GROUND_TRUTH):
        order = re.search(r"cups: ([\w, ]+)\.", example.prompt).group(1).split(", ")
        where = {ball: place for place, ball in enumerate(order, 1)}  # follow the balls, not the cups
        for i, j in re.findall(r"Swap cups (\d) and (\d)", example.prompt):
            trade = {int(i): int(j), int(j): int(i)}
            where = {ball: trade.get(place, place) for ball, place in where.items()}
        asked = int(re.search(r"under cup (\d)", example.prompt).group(1))
        assert where[example.answer.strip()] == asked
        labels = example.reading.labels_after(len(example.text))
        assert labels["state"] == " ".join(sorted(where, key=where.__getitem__))
        assert labels["first_cup"] == min(where, key=where.__getitem__)
        images = [order.index(ball) for ball in str(labels["state"]).split()]
        assert labels["permutation"] == "".join(str(image + 1) for image in images)
        assert labels["parity"] == sum(a > b for n, a in enumerate(images) for b in images[n:]) % 2


def test_words_in_a5_and_z60() -> None:
    def is_even(p: tuple[int, ...]) -> bool:
        return sum(a > b for n, a in enumerate(p) for b in p[n:]) % 2 == 0

    fives = [p for p in permutations(range(5)) if is_even(p)]
    for example in tasks.get("words")(group="A5").examples(COUNT_OF_GROUND_TRUTH):
        points = list(range(5))  # where each point has moved
        for number in re.findall(r"g(\d\d)", example.prompt):
            points = [fives[int(number)][point] for point in points]
        assert example.answer == f" g{fives.index(tuple(points)):02}"
    for example in tasks.get("words")(group="Z60").examples(COUNT_OF_GROUND_TRUTH):
        assert int(example.answer[2:]) == sum(map(int, re.findall(r"g(\d\d)", example.prompt))) % 60


def test_fork() -> None:
    for example in tasks.get("fork")(depth=(1, 6)).examples(COUNT_OF_GROUND_TRUTH):
        roads = dict.fromkeys(re.findall(r"(\w\w) to (\w\w)", example.prompt.split(". Go")[0]))
        target = re.search(r"Go to (\w\w)", example.prompt).group(1)
        path = [re.search(r"Start at (\w\w)", example.prompt).group(1), *re.findall(r"\w\w", example.completion)]
        back = {b: a for a, b in roads}
        walked = [target]
        while walked[-1] in back:
            walked.append(back[walked[-1]])
        assert path == walked[::-1] and example.answer == f" {path[1]}"
        ways = [b for a, b in roads if a == path[0]]
        assert example.reading.labels_after(len(example.prompt))["viable"] == ("first", "second")[ways.index(path[1])]


def test_boxes() -> None:
    for example in tasks.get("boxes")(boxes=5, moves=(1, 9)).examples(COUNT_OF_GROUND_TRUTH):
        where = {thing: box for box, thing in re.findall(r"Box (\d) has the (\w+)", example.prompt)}
        for verb, thing, places in re.findall(r"(Put|Move|Remove) the (\w+) ([\w ]+)\.", example.prompt):
            numbers = re.findall(r"\d", places)
            assert (thing in where) == (verb != "Put")
            assert verb == "Put" or where.pop(thing) == numbers[0]
            if verb != "Remove":
                assert numbers[-1] not in where.values()
                where[thing] = numbers[-1]
        asked = re.search(r"in box (\d)\?", example.prompt).group(1)
        assert example.answer.strip() == next((thing for thing, box in where.items() if box == asked), "nothing")
        assert example.reading.labels_after(len(example.text))["consistent"] is True


def test_variables() -> None:
    for example in tasks.get("variables")(operations=(1, 9), modulus=9).examples(COUNT_OF_GROUND_TRUTH):
        program, asked = re.search(r"^Modulo 9: (.*)\. What is (\w)\? A:$", example.prompt).groups()
        values: dict[str, int] = {}
        for target, first, sign, second in re.findall(r"(\w) = (\w)(?: ([+-]) (\w))?", program):
            left, right = (values[word] if word.isalpha() else int(word or 0) for word in (first, second))
            values[target] = left - right if sign == "-" else left + right
        assert int(example.answer) == values[asked] % 9
        labels = example.reading.labels_after(len(example.text))
        assert labels["state"] == " ".join(str(values[name] % 9) for name in "abc")


# ---- splits ----------------------------------------------------------------------------------------------------------
# Splits: the sides share no prompt, and differ exactly as documented.

coin = tasks.get("coin")

SPLITS = {
    "iid": splits.iid(coin(flips=(1, 3)), train=150, test=40),
    "length": splits.length(coin(flips=(1, 4)), train=100, test=30),
    "names": splits.names(coin(flips=(1, 4), names="all"), train=100, test=30),
    "phrasing": splits.phrasing(coin(flips=(1, 4)), train=100, test=30),
    "p_shift": splits.p_shift(coin(flips=(1, 2)), p=0.9, train=100, test=30),
    "branch_depth": splits.branch_depth(tasks.get("fork")(), train=100, test=30),
}


@pytest.mark.parametrize("split", list(SPLITS.values()), ids=lambda s: s.name)
def test_sides_are_disjoint_by_root(split: TaskSplit) -> None:
    train = {example.root for example in split.train}
    for side in split.tests.values():
        test = {example.root for example in side}
        assert len(side.examples()) == len(side) == side.count
        assert not train & test
        assert all(map(is_test_root, test)) and not any(map(is_test_root, train))


def test_equal_prompts_stay_on_one_side() -> None:
    split = splits.iid(coin(flips=3, rendering="symbols"), train=60, test=20)
    train, test = split.train.examples(), split.tests["iid"].examples()
    assert len({example.prompt for example in train}) < len(train)  # some prompts occur more than once
    assert not {example.prompt for example in train} & {example.prompt for example in test}


def test_each_split_shifts_what_it_says() -> None:
    length = SPLITS["length"]
    assert {len(e.events) for e in length.train} == {1, 2, 3, 4}
    assert {key: {len(e.events) for e in side} for key, side in length.tests.items()} == {"2N": {8}, "4N": {16}}
    names = SPLITS["names"]
    actors = [{event.actor for e in side for event in e.events} for side in (names.train, names.tests["held-out"])]
    assert not actors[0] & actors[1]
    phrasing = SPLITS["phrasing"]
    assert not any("not" in e.prompt for e in phrasing.train)
    assert any("does not flip" in e.prompt for e in phrasing.tests["standard"])
    shifted = [event.action for e in SPLITS["p_shift"].tests["p=0.9"] for event in e.events]
    assert shifted.count("flip") > 0.75 * len(shifted)
    depth = SPLITS["branch_depth"]
    assert {len(e.events) - 1 for e in depth.train} == {1, 2, 3}
    assert {len(e.events) - 1 for e in depth.tests["2x"]} == {6}


@pytest.mark.parametrize("name", tasks.names())
def test_length_split_of_every_task(name: str) -> None:
    split = splits.length(tasks.get(name)(), train=5, test=2)
    assert [len(side.examples()) for side in (split.train, *split.tests.values())] == [5, 2, 2]


def test_impossible_splits() -> None:
    with pytest.raises(BadSplit, match="knob 'names', which task 'words'"):
        splits.names(tasks.get("words")())
    with pytest.raises(BadSplit, match="'phrasing'"):
        splits.phrasing(tasks.get("coins")())
    with pytest.raises(BadSplit, match="'depth'"):
        splits.branch_depth(coin())
    with pytest.raises(BadSplit, match="nothing shifts"):
        splits.p_shift(coin(p=0.5), p=0.5)
    with pytest.raises(BadKnob):
        splits.p_shift(coin(), p=2)
    with pytest.raises(BadSplit, match=r"minimum length\. Give at least 3"):
        splits.length(coin(flips=(3, 5)), longest=2)
    with pytest.raises(BadSplit, match="minimum depth"):
        splits.branch_depth(tasks.get("fork")(depth=(2, 3)), deepest=1)
    with pytest.raises(BadSplit, match="at least one example"):
        splits.iid(coin(), test=0)


def test_a_hand_made_split_is_checked() -> None:
    train, test = Side(coin(), 3, test=False), Side(coin(), 3, test=True)
    with pytest.raises(BadSplit, match="no test side"):
        TaskSplit("mine", train, {})
    for bad in ((test, {"a": test}), (train, {"a": train}), (train, {"a": test, "b": train}), (train, {"a": train, "b": test})):
        with pytest.raises(BadSplit, match="mixes its sides"):
            TaskSplit("mine", *bad)


def test_too_few_prompts_is_an_error_not_a_hang() -> None:
    """This task has only four prompts, and all four are train roots."""
    with pytest.raises(BadSplit, match=r"No test example among 2,000 .* only 4 different prompts, .* Set the knob 'flips'"):
        Side(coin(flips=1, rendering="symbols"), 2, test=True).examples()


# ---- variables -------------------------------------------------------------------------------------------------------
# Promises of the variables task: labels at every word, correct reading of any program, and the meaning of a text's length.

TOKENIZER = WordTokenizer(Variables.vocabulary())


def test_labels_at_every_word() -> None:
    text = "Modulo 10: a = 3. b = 7. a = a + b. b = 4. What is a? A: 5."
    reading = Variables(variables=2).read(text)
    #  Modulo 10 : | a = 3 . | b = 7 . | a = a + b . | b = 4 . | What is a ? A : 5 .
    assert reading.labels_at(TOKENIZER.encode_with_offsets(text)[1]) == {
        "state": [None] * 9 + ["3 7"] * 6 + ["0 7"] * 4 + ["0 4"] * 10,
        "value": [None] * 23 + [0] * 6,
        "claimed": [None] * 27 + [5] * 2,
        "asked": [None] * 23 + ["a"] * 6,
        "target": [None] * 11 + ["a"] * 6 + ["b"] * 12,
        "result": [None] * 15 + [0] * 4 + [4] * 10,
        "actions": [0] * 15 + [1] * 4 + [2] * 10,
        "last_action": [None] * 15 + ["add"] * 4 + ["set"] * 10,
        "value.a": [None] * 5 + [3] * 10 + [0] * 14,
        "touched.a": [None] * 5 + [False] * 10 + [True] * 14,
        "value.b": [None] * 9 + [7] * 10 + [4] * 10,
        "touched.b": [None] * 9 + [False] * 10 + [True] * 10,
        "next_action": ["add"] * 13 + [None] * 2 + ["set"] * 4 + [None] * 10,
        "shuffled": [None] * 29,
    }
    assert reading.events == (Event("add", objects=("a", "b")), Event("set", objects=("b", "4")))
    assert [text[step.start : step.end] for step in reading.steps] == ["a = a + b", "b = 4"]
    assert [thought for _, thought in reading.thoughts] == [" a 0", " b 4"]


operands = st.one_of(st.integers(0, 6).map(str), st.sampled_from(NAMES[:4]))
programs = st.lists(st.tuples(st.sampled_from(NAMES[:4]), st.sampled_from(["", "+", "-"]), operands), min_size=1, max_size=12)


@settings(max_examples=35, deadline=None)
@given(start=st.tuples(*[st.integers(0, 6)] * 4), program=programs, asked=st.sampled_from(NAMES[:4]))
def test_any_program_is_read_right(start: tuple[int, ...], program: list[tuple[str, str, str]], asked: str) -> None:
    """The reader agrees with arithmetic that takes the modulus only at the end."""
    values = dict(zip(NAMES, start, strict=False))
    text = "Modulo 7:" + "".join(f" {name} = {value}." for name, value in values.items())
    thoughts = []
    for target, sign, operand in program:
        if operand == target:
            continue  # no text contains a = a or a = a + a
        number = values[operand] if operand in values else int(operand)
        values[target] = {"": lambda _, y: y, "+": operator.add, "-": operator.sub}[sign](values[target], number)
        text += f" {target} = {target} {sign} {operand}." if sign else f" {target} = {operand}."
        thoughts.append(f" {target} {values[target] % 7}")
    reading = Variables(variables=4, modulus=7).read(text if not thoughts else f"{text} What is {asked}? A: 0.")
    assert reading.complete == bool(thoughts) and reading.readable_until == len(reading.text)
    assert [thought for _, thought in reading.thoughts] == thoughts
    labels = reading.labels_after(len(reading.text))
    assert labels["state"] == " ".join(str(value % 7) for value in values.values())
    assert {name: labels[f"value.{name}"] for name in values} == {name: value % 7 for name, value in values.items()}
    assert labels["value"] == (values[asked] % 7 if thoughts else None)


@pytest.mark.parametrize("operations", [1, 6])
def test_length_counts_operations_without_the_beginning(operations: int) -> None:
    for example in Variables(operations=operations, variables=4).examples(20):
        assert len(example.events) == len(example.thoughts) == operations
        assert example.prompt.count("=") == 4 + operations


def test_kinds_operands_and_questions_cover_their_ranges() -> None:
    examples = Variables(operations=6, modulus=5).examples(200)
    events = [event for example in examples for event in example.events]
    assert {event.action for event in events} == set(KINDS)
    for kind, numbers in (("set", set("01234")), ("copy", set()), ("add", set("123")), ("subtract", set("123"))):
        told = {event.objects[1] for event in events if event.action == kind}
        assert told == numbers | (set() if kind == "set" else set("abc"))
    assert {event.objects[0] for event in events} == {example.prompt[-5] for example in examples} == set("abc")
    assert all(event.objects[0] != event.objects[1] for event in events)
    assert {example.answer for example in examples} == {f" {n}" for n in range(5)}


def test_names_values_and_thoughts_are_single_words() -> None:
    for task in (Variables(), Variables(variables=8, modulus=10, operations=20)):
        for example in task.examples(20):
            for _, thought in example.thoughts:
                assert len(TOKENIZER.encode(thought)) == 2
            assert len(TOKENIZER.encode(example.completion)) == 2


def test_only_the_stated_grammar_is_read() -> None:
    begin = "Modulo 10: a = 1. b = 2. c = 3."
    for wrong, until in ((" a = a.", " a = a"), (" a = b + c.", " a = b"), (" a = a + a.", " a = a + "), (" What", " ")):
        assert Variables().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with 'Modulo 10:'"):
        Variables().read("Modulo 7: a = 1.")


# ---- groups ----------------------------------------------------------------------------------------------------------
# The three groups satisfy the axioms and are the groups they claim to be.


def order_of(chosen: Group, a: int) -> int:
    power, count = a, 1
    while power:
        power, count = chosen.times(power, a), count + 1
    return count


@pytest.mark.parametrize("name", NAMES_OF_GROUPS)
def test_axioms(name: str) -> None:
    chosen = group(name)
    everyone = list(range(ORDER))
    assert len(set(chosen.elements)) == ORDER
    for a in everyone:
        assert chosen.times(0, a) == chosen.times(a, 0) == a
        assert sorted(chosen.table[a]) == everyone
        assert 0 in chosen.table[a]
    for a, b, c in product(everyone[::7], everyone[::5], everyone[::3]):
        assert chosen.times(chosen.times(a, b), c) == chosen.times(a, chosen.times(b, c))


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("A5", {1: 1, 2: 15, 3: 20, 5: 24}),
        ("Z60", {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 2, 10: 4, 12: 4, 15: 8, 20: 8, 30: 8, 60: 16}),
        ("A4xZ5", {1: 1, 2: 3, 3: 8, 5: 4, 10: 12, 15: 32}),
    ],
)
def test_orders_of_elements(name: str, orders: dict[int, int]) -> None:
    """The counts match the textbook. No other group of order 60 has them."""
    assert Counter(order_of(group(name), a) for a in range(ORDER)) == orders


@pytest.mark.parametrize(("people", "fits"), [(3, False), (4, True), (12, True), (13, False)])
def test_bounds_of_the_people_in_chains_of_facts(people: int, fits: bool) -> None:
    """Among three, one lookup answers half of the questions."""
    with nullcontext() if fits else pytest.raises(BadKnob, match="people"):
        assert tasks.get("hops")(people=people).example(0).prompt
