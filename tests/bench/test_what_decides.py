"""The study "what decides": its questions have right answers, and its simulation of stopping errs as rarely as promised."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.studies import what_decides as study


@pytest.mark.parametrize("steps", [2, 4])
def test_questions_are_different_and_answered_rightly(steps: int) -> None:
    """An independent reading of each question gives the answer that counts as right, of the solved ones as well."""
    for kind in study.KINDS:
        asked = study.questions(kind, 100, steps)
        assert len({text for text, _ in asked}) == 100 and asked == study.questions(kind, 100, steps)
        solved = re.findall(r"Q: (.*)\nA:.* So (\w+)\.\n", asked[0][0])
        assert len(solved) == 2
        for text, answer in (*solved, *asked):
            own = text.split("Q: ")[-1]
            if kind == "arithmetic":
                have, *changes = (int(each.replace("loses ", "-")) for each in re.findall(r"(?:loses )?\d+", own))
                assert int(answer) == have + sum(changes) and len(changes) == steps
            else:
                where = re.search(r"in the (\w+) cup", own)[1]  # type: ignore[index]
                assert own.count(" swaps ") == steps
                for a, b in re.findall(r"swaps (\w+) and (\w+)", own):
                    where = {a: b, b: a}.get(where, where)
                assert where == answer


def test_examples_of_the_prompt_are_right() -> None:
    """What the prompt shows is read by the same patterns as what the model writes."""
    for kind, text in study.SHOTS.items():
        said = study.ANSWERS[kind].read(text)
        assert said is not None and said.outcome == {"arithmetic": "9", "tracking": "green"}[kind]


def test_simulated_errors_are_rarer_than_alpha() -> None:
    lines = study.simulate(150, 60)["truths"]
    assert all(line["errors"] <= study.ALPHA + 2 * np.sqrt(study.ALPHA / 150) for line in lines.values())
    assert max(line["plain_test_errors"] for line in lines.values()) > 2 * study.ALPHA
    assert lines["95 : 5"]["saved"] > 0.7


def test_saving_follows_from_the_shares() -> None:
    assert study.simulated_saving(["a"] * 10) == 1 - 9 / 100
    assert study.simulated_saving(["a", "b"] * 5) < 0.3


def test_chains_have_room_for_their_answers() -> None:
    """Tokens as SmolLM2's: digits and the spaces before them are tokens of their own. Twenty end before the answer."""
    setting = study.SETTINGS["arithmetic"]
    prompt = study.questions("arithmetic", 1)[0][0]

    def length(text: str) -> int:
        return len(re.findall(r"\d| (?=\d)| ?[^\s\d.]+|\.", text))

    assert length(" 9 - 2 = 7. 7 + 5 = 12. So 12.") == 24
    study.check_room(prompt, setting, length)
    with pytest.raises(ValueError, match="max_new is 20"):
        study.check_room(prompt, replace(setting, max_new=20), length)


def test_what_is_hidden_from_a_sentence() -> None:
    """Solved ones and question are told apart; the placebo is as long as the sentence before, and among the solved ones."""
    prompt = study.questions("arithmetic", 1, 4)[0][0]
    words = re.findall(r"\d|\n| ?[^\s\d]+| ", prompt + " 1 + 2 = 3. 3 + 40 = 43. 43 - 1 = 42. So 42.")
    engine: Any = SimpleNamespace(tokens_of=lambda _: ["<bos>", *re.findall(r"\d|\n| ?[^\s\d]+| ", prompt)])
    engine.text = SimpleNamespace(token=str)
    asked, length = study.asked_at(engine, prompt), len(engine.tokens_of(prompt))
    path = ["<bos>", *words]
    ends = [length, *(at + 1 for at in range(length, len(path)) if path[at].endswith("."))]
    branch = SimpleNamespace(root_length=length, tokens=path)
    chain = study.Chain(branch, "42", True, asked, ends)
    hidden = study.masked(chain, 2, np.random.default_rng(0))
    said = {name.removesuffix(" to sentence 3"): "".join(path[p] for p in keys) for name, keys in hidden.items()}
    assert said["solved ones"] + said["question"] == said["prompt"] == prompt
    assert said["question"].startswith("Q:") and said["question"].count("Q:") == 1
    assert said["sentence 1"] == said["all before the sentence before"] == " 1 + 2 = 3."
    assert said["sentence 2"] == " 3 + 40 = 43", "the dot predicts the next sentence's first token"
    keys = hidden[f"{study.PLACEBO} to sentence 3"]
    assert len(keys) == len(hidden["sentence 2 to sentence 3"]) and keys[0] >= 1 and keys[-1] < asked
