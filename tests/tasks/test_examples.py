"""Examples are pure functions of (task, knobs, seed, index): the same everywhere and in any order."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from itertools import product
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens import tasks
from replaylens.tasks.coin import ALL, Coin, Telling, p_even, tell
from replaylens.tasks.counts import ITEMS, KINDS, LEAST, Counts
from replaylens.tasks.errors import TaskError, UnreadableText
from replaylens.tasks.hops import RELATIONS, Hops
from replaylens.tasks.reading import Event
from replaylens.tasks.task import AnyTask, Draws, Example
from replaylens.tasks.tokenizer import WordTokenizer
from tests.tasks.conftest import Wander

# Digests over the whole example, labels included. A change here changes every dump and checkpoint made with the task: never
# repin without an entry in the change log.
PINNED: dict[str, list[str]] = {
    "coin": ["9928d666e7e8adff", "9b9e956b9f7de294", "0fce40d840827097"],
    "coins": ["f41b321f83f641f2", "6ee526eec30b1d7c", "6b48f24ecfd69c3c"],
    "coin-resets": ["56d4db57cafe4870", "a1b5da04e5c179df", "c0c726463d9778ab"],
    "shell": ["012365d266728fcf", "6be709b144e29fa5", "a0111fa3f6e0fbf4"],
    "words": ["2f06d52fffffe7a1", "1d4997f784ebd869", "7e408d25c6640153"],
    "fork": ["2a289830ddd71f2c", "449a600a5bb7c32a", "81edc9140208f7b8"],
    "boxes": ["7ea0227e35829c0e", "10300b3fe7be4ed7", "74cedecec3fa4169"],
    "variables": ["a09e31deb2f2110b", "51065c53f96a8616", "81426e668fbabb83"],
    "hops": ["e00be4955d1ab4fb", "87ef5b4ef175e7a5", "678cd99936d0099d"],
    "counts": ["9c6bd8a9d6a3b8f3", "c41345ff1b99ade3", "5dae5a716ba7e8cb"],
    "coin states": ["37375ded7d35e5e0", "9a1f9640ee01e428", "59f89a27ea3d4125"],
    "coin wei": ["58e075f3a150ee23", "8eeb2fca6a1c4bb6", "152ce79f6e7310c9"],
    "coin symbols": ["6811a46c28fd37c6", "2f5a2c1241f573b6", "4ffd419dc75f0e38"],
    "coin steps": ["9a616c25443f8d37", "83df70f4baa2f51f", "ce523ed6de67b8a3"],
}

# Likewise of the variants of `conftest.py`: more examples, and texts that lie.
VARIANTS: dict[str, str] = {
    "coin": "5f3a5afcebf1978f",
    "coin-distractors=2-phrasing=mixed-names=all-p=0.3": "2b5896238241593b",
    "coin-rendering=states-distractors=1": "1b365281e3266d37",
    "coin-rendering=states-phrasing=idle-names=held-out": "074d471a08415bdb",
    "coin-rendering=wei": "c6450be686ed64c5",
    "coin-rendering=wei-verb=turn-phrasing=mixed-start=tails": "7a64ed3641acaaba",
    "coin-rendering=symbols-flips=12": "ddafe476a04edbae",
    "coin-rendering=steps-distractors=1": "02b6881dac0a88df",
    "coins": "b955382105678add",
    "coins-coins=6-names=held-out-p=0.8": "7c6391ab832df7ea",
    "coin-resets": "1464662c54d82f03",
    "coin-resets-reset=0.6": "187936605c9f27ff",
    "shell": "74113f3860b55314",
    "shell-cups=5-start=fixed-p=0.6": "446b945365321c21",
    "words": "a6135c3ad0f93188",
    "words-group=Z60-seed=3": "b319cbbed910c351",
    "words-group=A4xZ5-length=6": "480054c0d535032a",
    "fork": "01e247b4d3e25240",
    "fork-depth=8": "04771621052651c6",
    "boxes-boxes=7": "d37017207f5e65e9",
    "boxes-boxes=3-moves=10": "da46d33a70e3e677",
    "variables": "571fc656430eb50d",
    "variables-variables=8-modulus=7-operations=12": "ff94b37e81398b16",
    "variables-variables=2-modulus=2-seed=5": "b8306ce7dcb61ae3",
    "hops": "759bfc5d1086d65d",
    "hops-hops=(1, 6)-people=12-relations=4": "020aa40419c8dc4c",
    "counts": "08c581396462edc2",
    "counts-people=4-operations=(2, 12)-most=99-change=9": "6df9f723299ba0b7",
}

SCRIPT = """
import json
from replaylens import tasks
print(json.dumps({n: [tasks.get(n)().example(i).digest for i in (12345, 1, 0)] for n in reversed(tasks.names())}))
"""


@pytest.mark.parametrize("pinned", PINNED)
def test_digests_are_pinned(pinned: str) -> None:
    name, *rendering = pinned.split()
    task = tasks.get(name)(**{"rendering": rendering[0]} if rendering else {})
    assert [task.example(index).digest[:16] for index in (0, 1, 12345)] == PINNED[pinned]


def test_variants_are_pinned(task: AnyTask, wander: Wander, request: pytest.FixtureRequest) -> None:
    """Examples of every variant, and readings of texts that its grammar allows and that mostly lie; chances and answers."""
    dice = random.Random(11)
    told = [wander(task, dice.choice, 40) for _ in range(12)]
    read = [task.read(text, 5) for text in told]
    spans = [[(span.start, span.end, dict(span.labels)) for span in reading.spans] for reading in read]
    steps = [[(step.start, step.end, step.reveals, step.thought) for step in reading.steps] for reading in read]
    zeros = [tuple(zero) for zero in task.known_zero]
    facts = [task.answers(), task.next_action_chance(), zeros, task.label_names, task.vocabulary(), told, spans, steps]
    digests = [example.digest for example in task.examples(12)]
    found = sha256(json.dumps([digests, facts]).encode()).hexdigest()[:16]
    assert found == VARIANTS[request.node.callspec.id]


def test_every_task_is_pinned() -> None:
    assert set(tasks.names()) <= set(PINNED)


def test_another_process_with_another_hash_seed_makes_the_same_examples() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    for name, digests in json.loads(run.stdout).items():
        assert [digest[:16] for digest in digests] == PINNED[name][::-1]


def test_order_of_asking_does_not_matter(task: AnyTask) -> None:
    forward = [example.digest for example in task.examples(6)]
    again = task.with_knobs()
    assert [again.example(index).digest for index in (5, 3, 1, 4, 2, 0)] == [forward[i] for i in (5, 3, 1, 4, 2, 0)]


def test_seed_and_knobs_change_the_examples(plain_task: AnyTask) -> None:
    other = plain_task.with_knobs(seed=1)
    assert [e.text for e in plain_task.examples(20)] != [e.text for e in other.examples(20)]


def test_reading_gives_back_the_events(task: AnyTask) -> None:
    for example in task.examples(40):
        reading = example.reading
        assert reading.events == example.events
        assert reading.complete and reading.readable_until == len(example.text)
        assert example.answer in task.answers()
        assert example.completion.rstrip(".").endswith(example.answer) or example.task == "fork"


def test_a_true_text_claims_the_truth(task: AnyTask) -> None:
    truth, claim = task.claims
    for example in task.examples(40):
        labels = example.reading.labels_after(len(example.text))
        assert labels[truth] == labels[claim] is not None


def test_every_label_is_given(task: AnyTask) -> None:
    for example in task.examples(3):
        for span in example.spans:
            assert tuple(span.labels) == task.label_names
        assert [span.start for span in example.spans[1:]] == [span.end for span in example.spans[:-1]]
        assert (example.spans[0].start, example.spans[-1].end) == (0, len(example.text))


def test_steps_lie_in_order_and_cover_their_words(task: AnyTask) -> None:
    for example in task.examples(10):
        end = 0
        for step in example.steps:
            assert end <= step.start < step.end and step.start - 1 <= step.reveals < step.end
            assert example.text[step.end - 1] not in " .,"
            end = step.end
        assert task.thoughts(example) == [(step.end, step.thought) for step in example.steps]


def test_same_story_in_every_rendering() -> None:
    told = {
        rendering: [
            [event.action for event in example.events]
            for example in tasks.get("coin")(rendering=rendering, flips=(1, 9)).examples(20)
        ]
        for rendering in ("picture", "states", "wei", "symbols", "steps")
    }
    assert all(actions == told["picture"] for actions in told.values())


def test_equal_prompts_share_a_root() -> None:
    examples = tasks.get("coin")(rendering="symbols", flips=1).examples(30)
    assert len({example.root for example in examples}) == len({example.prompt for example in examples}) == 4


@pytest.mark.parametrize("index", [-1, 1.0, True, "0"])
def test_bad_index(index: object) -> None:
    with pytest.raises(TaskError, match="an integer of at least 0"):
        tasks.get("coin")().example(index)
    with pytest.raises(TaskError, match="an integer of at least 0"):
        tasks.get("coin")().read("A coin's state is heads.", index)


def test_more_examples_than_there_is_memory_for_are_refused_first() -> None:
    """A number, or any collection that knows its length: in one sentence, before the first is made."""
    task = tasks.get("coin")()
    for many in (10**12, range(10**12), range(10**30)):
        with pytest.raises(TaskError, match=r"^examples=\d+ takes about .* of memory, and there are .*\. Give less\.$"):
            task.examples(many)
    assert [each.index for each in task.examples(range(10**12, 10**12 + 2))] == [10**12, 10**12 + 1], "control"


def test_examples_can_be_sent_to_another_process(task: AnyTask) -> None:
    example = task.example(3)
    sent = pickle.loads(pickle.dumps(example))  # noqa: S301
    assert sent == example and sent.digest == example.digest


def test_tasks_with_equal_knobs_are_equal() -> None:
    coin = tasks.get("coin")
    assert coin(flips=3) == coin(flips=(3, 3)) != coin(flips=4)
    assert len({coin(flips=3), coin(flips=(3, 3)), coin(flips=4)}) == 2
    assert "flips=(3, 3)" in repr(coin(flips=3))


# ---- coin ------------------------------------------------------------------------------------------------------------
# Promises of the coin task: exact outcome probabilities, the majority rate, and a reader for any path.

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


@settings(max_examples=35, deadline=None)
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


# ---- counts ----------------------------------------------------------------------------------------------------------
# Promises of the task counts: labels at every word, equations that hold, and counts within their bounds.

TOKENIZER = WordTokenizer(Counts.vocabulary())


def test_labels_at_every_word() -> None:
    text = "Emma has 15 pens. Emma sells 4 of them. Emma doubles that number. How many pens does Emma have? A: 20."
    reading = Counts().read(text)
    #  Emma has | 15 pens . Emma sells | 4 of them . Emma | doubles that number . How many pens does | Emma have ? A : | 20 .
    labels = reading.labels_at(TOKENIZER.encode_with_offsets(text)[1])
    assert labels == {
        "state": [None] * 2 + ["15"] * 5 + ["11"] * 5 + ["22"] * 15,
        "count": [None] * 20 + [22] * 7,
        "claimed": [None] * 25 + [20] * 2,
        "asked": [None] * 20 + ["Emma"] * 7,
        "actor": [None] * 5 + ["Emma"] * 22,
        "result": [None] * 7 + [11] * 5 + [22] * 15,
        "operand": [None] * 7 + [15] * 5 + [11] * 15,
        "actions": [0] * 7 + [1] * 5 + [2] * 15,
        "last_action": [None] * 7 + ["subtract"] * 5 + ["double"] * 15,
        "consistent": [True] * 27,
        "count.1": [None] * 2 + [15] * 5 + [11] * 5 + [22] * 15,
        "touched.1": [None] * 2 + [False] * 5 + [True] * 20,
        "next_action": [None] * 2 + ["subtract"] * 4 + [None] * 21,  # 11 cannot lose two, so the second kind is half known
        "shuffled": [None] * 27,
    }
    assert reading.events == (Event("subtract", actor="Emma", objects=("4",)), Event("double", actor="Emma"))
    assert [thought for _, thought in reading.thoughts] == [" Emma 15 - 4 = 11", " Emma 11 * 2 = 22"]


@pytest.mark.parametrize(
    ("told", "consistent"),
    [
        ("Emma loses 3 pens. Bob buys 2 more.", True),
        ("Emma loses 9 pens. Bob buys 2 more.", False),
        ("Bob loses 9 pens. Emma buys 2 more.", False),
        ("Emma loses 9 pens. Bob loses 9 pens.", False),
        ("Emma doubles that number. Bob buys 2 more.", False),
        ("Emma loses 9 pens. Emma buys 9 more.", True),
    ],
)
def test_one_count_out_of_bounds_is_enough(told: str, consistent: bool) -> None:
    reading = Counts(people=2, most=30).read(f"Emma has 17 pens. Bob has 15 pens. {told} How many pens does Bob have? A: 10.")
    assert reading.labels_after(len(reading.text))["consistent"] is consistent


def test_an_action_is_open_only_if_everyone_could_do_anything() -> None:
    """Before a person is named, all must be able to add, subtract and double; afterwards, the one named."""
    begin = "Emma has 17 pens. Bob has 15 pens. Emma buys 2 more."  # 19 cannot be doubled within 30
    task = Counts(people=2, most=30)
    is_open = [task.read(begin + more).marks[-1].next_action_open for more in ("", " Bob", " Emma")]
    assert is_open == [False, True, False]


steps = st.lists(st.tuples(st.sampled_from(["Emma", "Bob"]), st.sampled_from(KINDS), st.integers(2, 9)), min_size=1, max_size=9)
SENTENCES = {
    "add": ["buys {} more.", "finds {} more pens.", "gets {} pens as a gift."],
    "subtract": ["loses {} pens.", "sells {} of them.", "gives {} away."],
    "double": ["doubles that number.", "now has twice as many."],
}


@settings(max_examples=30, deadline=None)
@given(start=st.tuples(*[st.integers(LEAST, 99)] * 2), told=steps, wording=st.integers(0, 5))
def test_any_story_is_read_right(start: tuple[int, int], told: list[tuple[str, str, int]], wording: int) -> None:
    """Any order of any sentences, also where a count leaves its bounds; `consistent` says so."""
    held = dict(zip(("Emma", "Bob"), start, strict=True))
    text = ". ".join(f"{name} has {number} pens" for name, number in held.items()) + "."
    inside = True
    for actor, kind, number in told:
        forms = SENTENCES[kind]
        text += f" {actor} " + forms[wording % len(forms)].format(number)
        held[actor] = {"add": held[actor] + number, "subtract": held[actor] - number, "double": 2 * held[actor]}[kind]
        inside = all(LEAST <= count <= 99 for count in held.values())
    reading = Counts(people=2, most=99).read(f"{text} How many pens does Bob have? A: 10.")
    assert reading.complete and len(reading.steps) == len(told)
    labels = reading.labels_after(len(reading.text))
    assert (labels["count"], labels["claimed"], labels["consistent"]) == (held["Bob"], 10, inside)
    assert labels["state"] == f"{held['Emma']} {held['Bob']}" and labels["count.1"] == held["Emma"]


@pytest.mark.parametrize("knobs", [{}, {"people": 4, "most": 99, "change": 9, "operations": (1, 12)}, {"most": 30}])
def test_equations_hold_and_counts_stay_within_their_bounds(knobs: dict[str, object]) -> None:
    task = Counts(**knobs)
    seen, ends = set(), {sign: set[int]() for sign in "+-*"}
    for example in task.examples(150):
        held = {name: int(number) for name, number in re.findall(r"(\w+) has (\d+) ", example.prompt)}
        for _, thought in example.thoughts:
            name, old, sign, number, new = re.fullmatch(r" (\w+) (\d+) ([-+*]) (\d) = (\d+)", thought).groups()  # type: ignore[union-attr]
            assert held[name] == int(old)
            held[name] = {"+": int(old) + int(number), "-": int(old) - int(number), "*": int(old) * int(number)}[sign]
            assert held[name] == int(new) and LEAST <= int(new) <= task.knobs.most
            seen.add(sign)
            ends[sign].add(int(new))
        asked = re.search(r"does (\w+) have", example.prompt).group(1)  # type: ignore[union-attr]
        assert example.answer == f" {held[asked]}" and set(example.prompt.replace(".", "").split()) & set(ITEMS)
    assert seen == {"+", "-", "*"}
    if task.knobs.most == 30:  # bounds that are met often: every operation may lead right up to its own
        assert max(ends["+"]) == max(ends["*"]) == 30 and min(ends["-"]) == LEAST


def test_counts_and_thoughts_are_words_of_one_token() -> None:
    for example in Counts(people=3, most=99, change=9).examples(30):
        assert len(TOKENIZER.encode(example.completion)) == 2
        assert all(len(TOKENIZER.encode(thought)) == 6 for _, thought in example.thoughts)


def test_only_the_stated_grammar_is_read() -> None:
    begin = "Emma has 15 pens."
    for wrong, until in ((" Bob sells", " "), (" Emma eats", " Emma "), (" Emma sells 1 of", " Emma sells "), (" How", " ")):
        assert Counts().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with"):
        Counts().read("A girl has 15 pens.")


# ---- hops ------------------------------------------------------------------------------------------------------------
# Promises of the task hops: labels at every word, exact values between hops, and no shortcut past them.

TOKENIZER_OF_HOPS = WordTokenizer(Hops.vocabulary())
TEXT = "Facts: Alice trusts Bob. Bob fears Alice. Question: Alice trusts someone, who fears someone. Who is it? A: Bob."


def test_labels_at_every_word_of_hops() -> None:
    reading = Hops().read(TEXT)
    # Facts : | Alice trusts Bob . | Bob fears Alice . | Question : Alice | trusts someone , who | fears someone . Who is it ? .
    assert reading.labels_at(TOKENIZER_OF_HOPS.encode_with_offsets(TEXT)[1]) == {
        "person": [None] * 13 + ["Bob"] * 4 + ["Alice"] * 11,
        "before": [None] * 13 + ["Alice"] * 4 + ["Bob"] * 11,
        "first": [None] * 12 + ["Alice"] * 16,
        "claimed": [None] * 26 + ["Bob"] * 2,
        "facts": [0] * 4 + [1] * 4 + [2] * 20,
        "actions": [0] * 13 + [1] * 4 + [2] * 11,
        "last_action": [None] * 13 + ["trusts"] * 4 + ["fears"] * 11,
        "last_name": [None] * 2 + ["Alice"] * 2 + ["Bob"] * 4 + ["Alice"] * 20,
        "repeats": [0] * 17 + [1] * 11,
        "next_action": ["trusts"] * 13 + ["fears"] * 4 + [None] * 11,
        "shuffled": [None] * 28,
    }
    assert reading.events == (
        Event("trusts", actor="Alice", objects=("Bob",)),
        Event("fears", actor="Bob", objects=("Alice",)),
    )
    assert [thought for _, thought in reading.thoughts] == [" Bob", " Alice"]


def told(example: Example) -> dict[tuple[str, str], str]:
    return {(a, r): b for a, r, b in re.findall(r"(\w+) (\w+) (\w+)\.", example.prompt.split(" Question:")[0])}


def test_the_answer_and_every_value_between_follow_from_the_facts() -> None:
    for example in Hops(hops=(1, 7), people=7, relations=3).examples(60):
        facts, question = told(example), example.prompt.split(" Question: ")[1]
        person = question.split()[0]
        reached = [person := facts[person, relation] for relation in re.findall(r"(\w+) someone", question)]
        assert [thought for _, thought in example.thoughts] == [f" {name}" for name in reached]
        assert example.answer == f" {reached[-1]}"


def test_relations_are_one_to_one_and_leave_nobody_in_place() -> None:
    for example in Hops(people=6, relations=4).examples(40):
        facts = told(example)
        for relation in RELATIONS:
            pairs = {a: b for (a, r), b in facts.items() if r == relation}
            assert len(pairs) == 6 and set(pairs) == set(pairs.values()) and all(a != b for a, b in pairs.items())


def shortcuts(example: Example) -> dict[str, str]:
    """Guesses that skip the person between."""
    facts, (first, last) = told(example), example.events
    names = list(dict.fromkeys(a for a, _ in facts))
    return {
        "the second relation of the first person": facts[first.actor, last.action],
        "the person between": first.objects[0],
        "the person named first": names[0],
        "the person named last": list(facts.values())[-1],
    }


def test_no_shortcut_answers_two_hops() -> None:
    """None is right much more often than the guess of one of the four others; two hops answer everything."""
    examples = Hops(people=5).examples(1500)
    wins = dict.fromkeys(shortcuts(examples[0]), 0)
    for example in examples:
        for name, guess in shortcuts(example).items():
            wins[name] += f" {guess}" == example.answer
    limit = 1 / 4 + 4 * sqrt(1 / 4 * 3 / 4 / len(examples))
    assert all(count / len(examples) < limit for count in wins.values()), wins


def test_what_the_first_persons_facts_rule_out_gains_little() -> None:
    """Maps are one to one, so the answer is seldom whom the first person's own facts name: 0.31 instead of 0.25 of guesses."""
    examples, hits = Hops(people=5).examples(1500), 0.0
    for example in examples:
        facts, actor = told(example), example.events[0].actor
        own = {actor, *(b for (a, _), b in facts.items() if a == actor)}
        left = [name for name in dict.fromkeys(a for a, _ in facts) if name not in own]
        hits += (example.answer.strip() in left) / len(left)
    assert 0.25 < hits / len(examples) < 0.34


def test_a_hop_without_a_fact_has_no_value() -> None:
    reading = Hops().read(TEXT.replace("trusts someone", "fears someone"))
    labels = reading.labels_after(len(reading.text))
    assert labels["person"] is None and labels["claimed"] == "Bob" and labels["actions"] == 2
    assert reading.complete and [thought for _, thought in reading.thoughts] == ["", ""]


def test_only_the_stated_grammar_is_read_of_hops() -> None:
    begin = "Facts: Alice trusts Bob."
    for wrong, until in ((" Alice likes", " Alice "), (" Question: someone", " Question: "), (" someone", " ")):
        assert Hops().read(begin + wrong).readable_until == len(begin + until)
    with pytest.raises(UnreadableText, match="must begin with 'Facts:'"):
        Hops().read("Alice trusts Bob.")


# ---- draws -----------------------------------------------------------------------------------------------------------
# Draws are pure, pinned, uniform and independent of each other.

PINNED_BITS = [6872651907919724493, 6787158988321881170, 14198632120367806709]
PINNED_ORDER = list("cafebd")


def test_pinned() -> None:
    draws = Draws("key", 7)
    assert [draws.bits("purpose", place) for place in range(3)] == PINNED_BITS
    assert draws.order("abcdef", "order") == PINNED_ORDER


def test_key_index_purpose_and_place_all_matter() -> None:
    drawn = {
        Draws(key, index).bits(purpose, place)
        for key in ("a", "b")
        for index in (1, 11)
        for purpose in ("x", "y")
        for place in (0, 1, 11)
    }
    assert len(drawn) == 24


def test_even() -> None:
    counts = Counter(Draws("even", index).below(6, "die") for index in range(6000))
    assert set(counts) == set(range(6)) and all(870 < count < 1130 for count in counts.values())
    pairs = Counter((Draws("k", i).below(2, "a", 0), Draws("k", i).below(2, "a", 1)) for i in range(4000))
    assert all(870 < count < 1130 for count in pairs.values())


def test_chance_between_and_order() -> None:
    assert not any(Draws("k", i).chance(0, "c") for i in range(500))
    assert all(Draws("k", i).chance(1, "c") for i in range(500))
    assert 80 < sum(Draws("k", i).chance(0.1, "c") for i in range(1000)) < 125
    assert {Draws("k", i).between((3, 5), "b") for i in range(100)} == {3, 4, 5}
    orders = Counter(tuple(Draws("k", i).order("abc", "o")) for i in range(1200))
    assert len(orders) == 6 and all(140 < count < 260 for count in orders.values())
