"""Examples are pure functions of (task, knobs, seed, index): the same everywhere and in any order."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from replaylens import tasks
from replaylens.tasks.errors import BadIndex
from replaylens.tasks.task import AnyTask

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
    with pytest.raises(BadIndex, match="an integer of at least 0"):
        tasks.get("coin")().example(index)
    with pytest.raises(BadIndex, match="an integer of at least 0"):
        tasks.get("coin")().read("A coin's state is heads.", index)


def test_examples_can_be_sent_to_another_process(task: AnyTask) -> None:
    example = task.example(3)
    sent = pickle.loads(pickle.dumps(example))  # noqa: S301
    assert sent == example and sent.digest == example.digest


def test_tasks_with_equal_knobs_are_equal() -> None:
    coin = tasks.get("coin")
    assert coin(flips=3) == coin(flips=(3, 3)) != coin(flips=4)
    assert len({coin(flips=3), coin(flips=(3, 3)), coin(flips=4)}) == 2
    assert "flips=(3, 3)" in repr(coin(flips=3))
