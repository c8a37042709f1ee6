"""Studies: each runs end to end on coin-plain, and every committed record says where it comes from."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.studies import common, rejected_branches, state_tracking
from bench.studies.__main__ import STUDIES
from bench.studies.told import ShownCoin, ToldBoxes, TwoPeople
from replaylens.tasks.conformance import check

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
    assert told["branches"] > 20 and told["transfer"]["verdict"].startswith("Shown")
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


@pytest.mark.parametrize("name", STUDIES)
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
