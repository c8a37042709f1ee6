"""Promises of the coin task: exact outcome probabilities, the majority rate, and a reader for any path."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.tasks.coin import ALL, Coin, Telling, p_even, tell
from replaylens.tasks.reading import Event
from replaylens.tasks.tokenizer import WordTokenizer

FLIP = {"heads": "tails", "tails": "heads"}


def faces_after(start: str, flips: tuple[bool, ...]) -> tuple[str, ...]:
    faces = []
    for flip in flips:
        start = FLIP[start] if flip else start
        faces.append(start)
    return tuple(faces)


def story(start: str, flips: tuple[bool, ...], rendering: str) -> str:
    events = tuple(Event("flip" if flip else "keep", "Alice") for flip in flips)
    told = Telling(start, faces_after(start, flips), events, (False,) * len(flips), ("",) * (len(flips) + 1))
    return "".join(tell(told, rendering, "flip")[:2])


@pytest.mark.parametrize("rendering", ["picture", "states", "wei", "symbols", "steps"])
@pytest.mark.parametrize(("least", "most", "p"), [(1, 3, 0.5), (1, 3, 0.3), (2, 4, 0.9), (3, 3, 0.25)])
def test_outcomes_are_exact_at_every_token(rendering: str, least: int, most: int, p: float) -> None:
    """Outcomes equal an enumeration: every story with its probability, kept if it starts with the text so far."""
    task = Coin(rendering=rendering, flips=(least, most), p=p)
    tokenizer = WordTokenizer(Coin.vocabulary())
    worlds: list[tuple[str, str, float]] = []
    for n, start in product(range(least, most + 1), ("heads", "tails")):
        for flips in product((True, False), repeat=n):
            weight = 0.5 / (most - least + 1) * p ** sum(flips) * (1 - p) ** (n - sum(flips))
            worlds.append((story(start, flips, rendering), faces_after(start, flips)[-1], weight))
    for text, _, _ in worlds[::5]:
        for _, end in [(0, 0), *tokenizer.encode_with_offsets(text)[1]]:
            possible = [(face, weight) for other, face, weight in worlds if other.startswith(text[:end])]
            heads = sum(w for face, w in possible if face == "heads") / sum(w for _, w in possible)
            assert task.outcomes(text[:end]) == pytest.approx({"heads": heads, "tails": 1 - heads}, abs=1e-12)


def test_outcomes_of_a_known_start_and_of_a_text_longer_than_the_knobs() -> None:
    assert Coin(start="heads", flips=1, p=0.25).outcomes("") == {"heads": 0.75, "tails": 0.25}
    longer = "A coin's state is heads. Bob flips, then Bob flips, then Bob flips"
    assert Coin(flips=1).outcomes(longer) == {"heads": 0.0, "tails": 1.0}


@pytest.mark.parametrize(
    ("told", "actors", "certain"),
    [
        ("Alice flips", 1, 1),
        ("Alice flips, tails", 1, 1),  # the comma introduced a face, not an actor
        ("Alice flips, heads", 1, 1),  # a wrong face does not change the truth
        ("Alice flips, tails, then", 1, 2),
        ("Alice flips, tails, then Bob", 1, 2),
        ("Alice flips, tails, then Bob flips, heads", 2, 2),
        ("Alice flips, then Bob flips, heads, then Emma", 2, 3),
    ],
)
def test_outcomes_after_a_stated_face(told: str, actors: int, certain: int) -> None:
    """A stated face does not introduce another actor. Every number of actors from `certain` on is equally likely."""
    p, most = 0.25, 3
    task = Coin(flips=(1, most), p=p)
    same = [(1 + (1 - 2 * p) ** (n - actors)) / 2 for n in range(certain, most + 1)]
    stays = sum(same) / len(same)
    now = "tails" if actors % 2 else "heads"
    wanted = {now: stays, FLIP[now]: 1 - stays}
    assert task.outcomes(f"A coin's state is heads. {told}") == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_majority_rate(p: float) -> None:
    for n in range(8):
        exact = sum(p ** sum(flips) * (1 - p) ** (n - sum(flips)) for flips in product((0, 1), repeat=n) if sum(flips) % 2 == 0)
        assert p_even(p, n) == pytest.approx(exact, abs=1e-12)


def test_p_of_0_and_1() -> None:
    assert {event.action for e in Coin(p=1).examples(50) for event in e.events} == {"flip"}
    assert {event.action for e in Coin(p=0).examples(50) for event in e.events} == {"keep"}


def test_starts_lengths_and_names_cover_their_ranges() -> None:
    examples = Coin(flips=(2, 5)).examples(300)
    assert {len(example.events) for example in examples} == {2, 3, 4, 5}
    assert 110 < sum("is heads" in example.prompt for example in examples) < 190
    train = {event.actor for example in examples for event in example.events}
    held_out = {e.actor for example in Coin(names="held-out").examples(100) for e in example.events}
    assert len(train) == 24 and len(held_out) == 12 and not train & held_out


paths = st.lists(
    st.tuples(st.sampled_from(ALL), st.sampled_from(["flips", "does not flip", "leaves it alone"]), st.sampled_from(
        [None, "heads", "tails"]
    )),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(start=st.sampled_from(["heads", "tails"]), path=paths, answer=st.sampled_from(["heads", "tails"]))
def test_reader_on_any_path(start: str, path: list[tuple[str, str, str | None]], answer: str) -> None:
    face = claimed = implied = start
    clauses = []
    expected = []
    for name, verb, stated in path:
        clauses.append(f" {name} {verb}" + (f", {stated}" if stated else ""))
        if verb == "flips":
            face, implied = FLIP[face], FLIP[implied]
        if stated:
            claimed = implied = stated
        expected.append((face, claimed, implied))
    told = ", then".join(clauses)
    text = f"A coin's state is {start}.{told}. What's the state? A: {answer}."
    reading = Coin().read(text)
    assert reading.complete and reading.readable_until == len(text)
    assert [(event.actor, event.action == "flip") for event in reading.events] == [
        (name, verb == "flips") for name, verb, _ in path
    ]
    end = len(f"A coin's state is {start}.")
    for clause, wanted in zip(clauses, expected, strict=True):
        end += len(clause)
        labels = reading.labels_after(end)
        assert (labels["face"], labels["claimed"], labels["implied"]) == wanted
        end += len(", then")
    final = reading.labels_after(len(text))
    assert (final["face"], final["claimed"]) == (face, answer)
