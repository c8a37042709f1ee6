"""The answer and the running state, recomputed from the bare text without the reader."""

import re
from itertools import permutations

import pytest

from replaylens import tasks

COUNT = 60


def flipped(face: str, flips: int) -> str:
    return face if flips % 2 == 0 else {"heads": "tails", "tails": "heads"}[face]


@pytest.mark.parametrize("rendering", ["picture", "states", "steps"])
@pytest.mark.parametrize("phrasing", ["standard", "idle", "mixed"])
def test_coin_in_words(rendering: str, phrasing: str) -> None:
    task = tasks.get("coin")(rendering=rendering, phrasing=phrasing, distractors=1)
    for example in task.examples(COUNT):
        start = re.search(r"state(?: is)? (heads|tails)\.", example.prompt).group(1)
        assert example.answer == " " + flipped(start, len(re.findall(r" flips\b", example.prompt)))


def test_coin_chain_of_thought_states_every_face() -> None:
    for example in tasks.get("coin")(rendering="steps").examples(COUNT):
        face = re.search(r"state is (\w+)\.", example.prompt).group(1)
        for clause, stated in re.findall(r"(flips|does not flip): (\w+)\.", example.completion):
            face = flipped(face, clause == "flips")
            assert stated == face


@pytest.mark.parametrize(("verb", "flip"), [("flip", " flips the coin."), ("turn", " turns the coin over.")])
def test_coin_wei(verb: str, flip: str) -> None:
    for example in tasks.get("coin")(rendering="wei", verb=verb).examples(COUNT):
        start, asked = re.findall(r"(heads|tails) up", example.prompt)
        assert start == asked
        assert example.answer == (" no" if example.prompt.count(flip) % 2 else " yes")


def test_coin_symbols() -> None:
    for example in tasks.get("coin")(rendering="symbols").examples(COUNT):
        start, *actions = example.prompt.removeprefix("> ").removesuffix(" =").split()
        assert example.answer.strip() == (start if actions.count("x") % 2 == 0 else {"H": "T", "T": "H"}[start])


def test_coins() -> None:
    for example in tasks.get("coins")(coins=4).examples(COUNT):
        asked = re.search(r"state of the (\w+) coin\?", example.prompt).group(1)
        start = re.search(rf"The {asked} coin is (\w+)\.", example.prompt).group(1)
        flips = example.prompt.count(f"flips the {asked} coin")
        assert example.answer == " " + flipped(start, flips)
        last = example.reading.labels_after(len(example.prompt))
        assert last[f"touched.{asked}"] == (flips > 0)
        assert last[f"changed.{asked}"] == (flips % 2 == 1)


def test_coin_resets() -> None:
    for example in tasks.get("coin-resets")(reset=0.4).examples(COUNT):
        face = re.search(r"state is (\w+)\.", example.prompt).group(1)
        for action, target in re.findall(r"(flips|does not flip|sets it to (\w+))", example.prompt):
            face = target or flipped(face, action == "flips")
        assert example.answer == f" {face}"


@pytest.mark.parametrize("cups", [3, 5])
def test_shell(cups: int) -> None:
    for example in tasks.get("shell")(cups=cups).examples(COUNT):
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
    for example in tasks.get("words")(group="A5").examples(COUNT):
        points = list(range(5))  # where each point has moved
        for number in re.findall(r"g(\d\d)", example.prompt):
            points = [fives[int(number)][point] for point in points]
        assert example.answer == f" g{fives.index(tuple(points)):02}"
    for example in tasks.get("words")(group="Z60").examples(COUNT):
        assert int(example.answer[2:]) == sum(map(int, re.findall(r"g(\d\d)", example.prompt))) % 60


def test_fork() -> None:
    for example in tasks.get("fork")(depth=(1, 6)).examples(COUNT):
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
    for example in tasks.get("boxes")(boxes=5, moves=(1, 9)).examples(COUNT):
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
    for example in tasks.get("variables")(operations=(1, 9), modulus=9).examples(COUNT):
        program, asked = re.search(r"^Modulo 9: (.*)\. What is (\w)\? A:$", example.prompt).groups()
        values: dict[str, int] = {}
        for target, first, sign, second in re.findall(r"(\w) = (\w)(?: ([+-]) (\w))?", program):
            left, right = (values[word] if word.isalpha() else int(word or 0) for word in (first, second))
            values[target] = left - right if sign == "-" else left + right
        assert int(example.answer) == values[asked] % 9
        labels = example.reading.labels_after(len(example.text))
        assert labels["state"] == " ".join(str(values[name] % 9) for name in "abc")
