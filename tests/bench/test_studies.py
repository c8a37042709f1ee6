"""Studies: each runs end to end on coin-plain, and every committed record says where it comes from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.studies import common, rejected_branches, state_tracking
from bench.studies import what_decides as study
from bench.studies.__main__ import STUDIES
from bench.studies.told import ShownCoin, ToldBoxes, TwoPeople
from replaylens.tasks.conformance import check
from tests.devices import swept

RECORDS = sorted((common.HERE / "results").glob("*.json"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


def run(name: str, out: Path) -> dict[str, Any]:
    common.execute(name, ["coin-plain"], quick=True, out=out)
    return dict(json.loads((out / "results" / f"{name}.json").read_text())["parts"]["coin-plain"])


@pytest.mark.slow
def test_rejected_branches_quick(out: Path) -> None:
    part = run("rejected_branches", out)
    told = part["drafters"]["model"]
    assert told["branches"] > 20 and told["transfer"]["verdict"].startswith("Shown:")
    foreseen = told["foreseen"]
    assert foreseen["rejected"] == told["branches"]
    assert foreseen["drafts"] - foreseen["rejected"] == round(told["accepted"] * told["drafted"]), "tokens that nobody drafted"
    assert told["transfer"]["layers"]["S1"]["above"]["bag of tokens"]["low"] > 0
    areas = foreseen["areas"]
    assert areas["behind the likeliest"]["value"] == 1.0 == areas[foreseen["best baseline"]]["value"], (
        "the greedy verdict itself"
    )
    assert areas["log-probability"]["value"] > 0.9 and areas["before S1"]["value"] < areas["log-probability"]["value"]
    assert all(gain["value"] <= 0 for gain in foreseen["gains over the best"].values())
    assert part["quick"] and set(part["exchange"]) == {"pairs", "usable", "follows", "paired"}
    follows, gains = part["exchange"]["follows"], part["exchange"]["paired"]
    for way, layers in gains.items():
        into, _, placebo = way.partition(": minus ")
        ours, theirs = (follows[f"{into}: {each}"]["S1"] for each in (rejected_branches.OTHER, placebo))
        if ours["n"] == theirs["n"]:  # some pairs have no placebo of a kind
            assert abs(layers["S1"]["value"] - (ours["value"] - theirs["value"])) < 2e-5


@pytest.mark.slow
def test_state_tracking_quick(out: Path) -> None:
    part = run("state_tracking", out)
    table = part["knock_out"]
    assert table["intact"]["value"] == 1.0
    assert table["question sees only the last step"]["value"] < 0.8, "the last step does not hold the state"
    last = "its last token sees only the last step"
    assert table[f"matched placebo: {last}"]["value"] == 1.0 and part["paired"][last]["minus matched placebo"]["value"] < 0
    names = part["patching"]["other names"]
    assert all(found["value"] == 0 for place in names.values() for found in place.values()), "the placebo turns nothing"
    assert part["patching"]["other face"]["query"]["S3"]["value"] > 0.8


@pytest.mark.parametrize("name", swept(STUDIES, "what_decides", "reproduce"))
def test_the_figure_follows_the_viewers_scheme_and_says_what_it_shows(name: str, tmp_path: Path) -> None:
    text = (common.HERE / "figures" / f"{name}.svg").read_text()
    assert "prefers-color-scheme:dark" in text and "var(--text)" in text and "#000000" not in text
    title, panels = re.search("<title>(.+)</title><desc>(.+)</desc><style>", text).groups()  # type: ignore[union-attr]
    assert 'role="img"' in text and len(title) > 50 and len(panels) > 30
    parts = json.loads((common.HERE / "results" / f"{name}.json").read_text())["parts"]
    drawn = common.save_figure(name, parts, tmp_path).read_text()
    assert (title, panels) == re.search("<title>(.+)</title><desc>(.+)</desc>", drawn).groups()  # type: ignore[union-attr]


@pytest.mark.parametrize("file", RECORDS, ids=[file.stem for file in RECORDS])
def test_a_record_says_where_it_comes_from(file: Path) -> None:
    record = json.loads(file.read_text())
    for part in record["parts"].values():
        assert len(part["commit"].removesuffix("+changes")) == 40 and part["date"] and not part["quick"]
        assert part["machine"]["cpu"] and part["versions"]["torch"]
        assert all(len(each) == 64 for each in part["inputs"].values())
        assert {"weights", "prompts"} <= part["inputs"].keys() or file.stem in ("reproduce", "what_decides")
    page = common.HERE / f"{file.stem}.md"
    words = [word for word in page.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= 600 and (common.HERE / "figures" / f"{file.stem}.svg").exists()


PROMISES = {
    "an index always gives the same example",
    "every label is declared",
    "no label is the name of an index column",
    "a label depends on the text before it only",
    "no piece of the grammar begins another",
}
"""what rows of any path rest on"""


@pytest.mark.slow
@pytest.mark.parametrize("task", [ShownCoin(rendering="steps", flips=(1, 3)), ToldBoxes(boxes=3, moves=(1, 3)), TwoPeople()])
def test_tasks_keep_what_rows_of_any_path_rest_on(task: Any) -> None:
    found = {each.promise: each.problem for each in check(task, 4)}
    assert {promise: found[promise] for promise in PROMISES} == dict.fromkeys(PROMISES, "")


def test_a_random_knock_out_has_as_many_edges() -> None:
    edges = state_tracking.hidden(range(6, 10), range(2, 8))
    drawn = state_tracking.at_random(edges, 12, np.random.default_rng(0))
    assert sum(map(len, drawn.values())) == sum(map(len, edges.values())) == 4 + 5 + 6 + 6
    assert all(0 < key < position for position, keys in drawn.items() for key in keys)
    twin = state_tracking.matched(edges, range(1, 7), np.random.default_rng(0))
    assert {p: len(keys) for p, keys in twin.items()} == {p: len(keys) for p, keys in edges.items()}
    assert twin[8] == twin[9] and set(twin[9]) == set(range(1, 7))
    assert state_tracking.rows_before({8: [2, 6], 9: [2, 6]}) == {6: [2], 7: [2, 6]}


def test_every_sentence_of_the_boxes_is_one_span() -> None:
    """Also behind a token that is no part of the prompt, such as Gemma's <bos>."""
    story = next(each for each in map(state_tracking.Moved.of, range(100)) if each is not None)
    words = ["<bos>", *re.findall(r" ?\w+|\W", state_tracking.SOLVED + story.prompt)]
    engine: Any = SimpleNamespace(tokens_of=lambda _: range(len(words)), text=SimpleNamespace(token=words.__getitem__))
    spans = story.spans(engine)
    told = ["".join(words[p] for p in each) for each in (*spans.sentences, spans.question)]
    assert "".join(told) == story.prompt
    assert all(each.endswith(".") and each.count(".") == 1 for each in told[:-1]) and told[-1].startswith(" What")


def test_noise_foresees_nothing() -> None:
    """Negative control of (d): held-out areas of pure noise cover 1/2 in most draws."""
    random, covered = np.random.default_rng(0), 0
    for _ in range(20):
        bad, roots = random.random(120) < 0.3, np.repeat(np.arange(30), 4).astype(str)
        fold = np.repeat(np.arange(30) % rejected_branches.FOLDS, 4)
        found = rejected_branches._area(rejected_branches._scores(random.normal(size=(120, 4)), bad, fold), bad, roots, fold)
        covered += found["low"] <= 0.5 <= found["high"]
    assert covered >= 17


def test_a_difference_of_shares_stays_within_its_bounds() -> None:
    """With few groups the t interval reaches far beyond what a difference of shares can be; nats have no such end."""
    few = common.paired([1, 1, 0], [0, 0, 1], ["a", "a", "b"])
    assert few["value"] == pytest.approx(1 / 3) and (few["low"], few["high"]) == (-1.0, 1.0)
    nats = common.paired([2.0, 0.5, 0.1], [0.0, 0.0, 0.0], ["a", "a", "b"])
    assert nats["low"] < -1 and nats["high"] > 2


# ---- what decides ----------------------------------------------------------------------------------------------------
# Its questions have right answers, and its simulation of stopping errs as rarely as promised.


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


@pytest.mark.slow
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
