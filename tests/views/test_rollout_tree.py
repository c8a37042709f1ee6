"""The tree of rollouts: a harmless, small page of thousands of rollouts that can be opened and clicked."""

import base64
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylens.engine.errors import BadRequest
from replaylens.probes.forks.distributions import RolloutTexts
from replaylens.views.report import ReportPage
from replaylens.views.rollouts import RolloutTree
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE
from tests.views.test_browser import browser, tab  # noqa: F401

ITS_DATA_AND_SCRIPT = 2
WORDS = ("the", "coin", "is", "flipped", "so", "we", "count", "again", "and", "wait", "while", "heads", "or", "tails", "follow")


def rollouts_of(forks: int, each: int, depth: int = 5, seed: int = 0) -> RolloutTexts:
    """Rollouts that keep the path's unit half of the time, and that change their outcome at the middle fork."""
    generator = random.Random(seed)

    def unit() -> str:
        return f" {' '.join(generator.choice(WORDS) for _ in range(10))}."

    texts = [unit() for _ in range(forks)]
    pool = [[text, *(unit() for _ in range(9))] for text in [*texts, *(unit() for _ in range(depth))]]
    fork = np.repeat(np.arange(forks), each)
    units, outcome = [], []
    for f in fork.tolist():
        own = [pool[f + d][0 if generator.random() < 0.5 else generator.randrange(10)] for d in range(depth)]
        units.append((*own, unit()))
        outcome.append("even" if generator.random() < (0.9 if f > forks // 2 else 0.3) else "odd")
    return RolloutTexts(list(range(forks)), texts, ["even", "odd"], fork, units, outcome)


@pytest.fixture(scope="module")
def rollouts() -> RolloutTexts:
    return rollouts_of(6, 40)


@pytest.fixture(scope="module")
def hostile() -> RolloutTree:
    """Texts, outcomes and titles that are markup."""
    count = len(HOSTILE)
    return RolloutTree(
        HOSTILE, HOSTILE, tuple(range(count)), tuple((text, text) for text in HOSTILE), tuple(range(count)), *HOSTILE[:2]
    )


def data_of(html: str) -> dict[str, Any]:
    (packed,) = re.findall(r'<script type="text/plain" class="rl-rollout-data">([^<]*)</script>', html)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


# ---- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_rollout_once(rollouts: RolloutTexts, tmp_path: Path) -> None:
    """Texts come back from the page's table, in which each different unit occurs once; equal input gives equal bytes."""
    tree = rollouts.tree("a title", prompt="The prompt.")
    html = tree.save(tmp_path / "new" / "x.html").read_text()
    assert html == tree.save(tmp_path / "y.html").read_text() and not list(tmp_path.glob("*.tmp"))
    found = assert_harmless(html, ITS_DATA_AND_SCRIPT)
    assert {"a title", "The prompt.", *rollouts.texts} <= set(found.texts)
    data, at = data_of(html), 0
    assert len(data["units"]) == len(set(data["units"])) == len({unit for units in rollouts.units for unit in units})
    for units, length in zip(rollouts.units, data["lengths"], strict=True):
        assert tuple(data["units"][i] for i in data["flat"][at : at + length]) == units
        at += length
    assert data["fork"] == rollouts.fork.tolist() and [rollouts.outcomes[k] for k in data["outcome"]] == rollouts.outcome


def test_tiles_are_as_wide_as_their_branches_are_probable(rollouts: RolloutTexts) -> None:
    """In each column, tiles of one outcome have the area of its share; the path's own branch has a frame of its width."""
    html = rollouts.tree().draw()
    counts = rollouts.counts().counts
    columns = re.findall(r'<g data-fork="(\d+)".*?</g>', html, re.S)
    assert len(columns) == 6
    for fork, column in enumerate(re.findall(r"<g data-fork=.*?</g>", html, re.S)):
        boxes = re.findall(r'width="([\d.]+)" height="([\d.]+)" style="fill:var\(--o(\d)\)" class="rl-tile"', column)
        area = np.bincount([int(k) for *_, k in boxes], [float(w) * float(h) for w, h, _ in boxes])
        assert area / area.sum() == pytest.approx(counts[fork] / counts[fork].sum(), abs=0.04)
        own = sum(
            f == fork and units[0] == rollouts.texts[fork] for f, units in zip(rollouts.fork, rollouts.units, strict=True)
        )
        (frame,) = re.findall(r'width="([\d.]+)" height="66\.0" class="rl-own"', column)
        assert float(frame) == pytest.approx(0.84 * 966 / 6 * own / 40, abs=1)


def test_markup_stays_text(hostile: RolloutTree, tmp_path: Path) -> None:
    html = hostile.save(tmp_path / "x.html").read_text()
    found = assert_harmless(html, ITS_DATA_AND_SCRIPT)
    assert set(HOSTILE) <= set(found.texts) and data_of(html)["units"] == list(HOSTILE)
    parsed(hostile._repr_html_())


def test_a_section_of_the_report(rollouts: RolloutTexts) -> None:
    html = ReportPage(rollouts=(rollouts.tree("first"), rollouts.tree("second"))).html()
    found = assert_harmless(html, 1 + 2)
    assert {"Rollouts", "first", "second", "replaylens: rollouts"} <= set(found.texts)
    with pytest.raises(BadRequest, match="would be empty"):
        ReportPage(title="none").html()


def test_five_thousand_rollouts_are_small(tmp_path: Path) -> None:
    file = rollouts_of(50, 100, depth=8).tree().save(tmp_path / "x.html")
    assert file.stat().st_size < 2_000_000 and file.read_text().count("<rect") < 4000


def test_trees_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="1 forks, 2 texts, 1 outcomes"):
        RolloutTree(("a",), ("x",), (0,), (("b",), ("c",)), (0,))
    with pytest.raises(BadRequest, match="outcome go from 0 to 0; given: 1 to 1"):
        RolloutTree(("a",), ("x",), (0,), (("b",),), (1,))
    with pytest.raises(BadRequest, match="is a folder"):
        RolloutTree(("a",), ("x",), (), (), ()).save(tmp_path)
    assert parsed(RolloutTree(("a",), ("x",), (), (), ())._repr_html_()), "no rollouts: an empty picture"


# ---- in a browser -----------------------------------------------------------------------------------------------------


class Lens:
    """Stands for the lens of a rollout."""

    def _repr_html_(self) -> str:
        return "<div class='rl-view'><b>the lens of this rollout</b></div>"


def test_click_through_a_tree(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:  # noqa: F811
    """Column, branch, rollout, lens: each click shows what the counts say."""
    chosen = next(i for i, f in enumerate(rollouts.fork) if f == 1)
    tree = RolloutTree(**{**vars(rollouts.tree("clicks")), "lenses": {chosen: Lens()}})
    tab.goto(tree.save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-fork[data-number='3'] .rl-node")  # the unit after which the outcome changes
    tab.click(".rl-column[data-fork='1'] .rl-hit")
    tab.wait_for_selector(".rl-fork[data-number='1'] .rl-node")
    assert tab.locator(".rl-unit[data-chosen]").get_attribute("data-fork") == "1"
    counts = [int(n) for n in tab.locator(".rl-node").evaluate_all("all => all.map((e) => e.dataset.count)")]
    assert counts[0] == 40 == sum(counts[1:]), "the branches hold all rollouts of the fork"
    assert counts[1:-1] == sorted(counts[1:-1], reverse=True)
    own = tab.locator(".rl-node[data-own]")
    kept = sum(f == 1 and units[0] == rollouts.texts[1] for f, units in zip(rollouts.fork, rollouts.units, strict=True))
    assert int(own.get_attribute("data-count")) == kept

    own.click()
    tab.wait_for_selector(f".rl-list[data-count='{kept}'] tr")
    assert tab.locator(".rl-list tr").count() == min(kept, 12) and tab.locator(".rl-node").count() > len(counts)
    tab.locator(".rl-node").first.click()
    tab.wait_for_selector(".rl-list[data-count='40'] tr")
    tab.get_by_role("button", name="next").click()
    assert "13 to 24 of 40" in tab.inner_text(".rl-list")
    tab.get_by_role("button", name="previous").click()
    tab.click(f".rl-list tr[data-rollout='{chosen}'] button")
    tab.wait_for_selector(".rl-one .rl-lens")
    assert "the lens of this rollout" in tab.inner_text(".rl-one")
    assert tab.inner_text(".rl-one p").strip() == "".join(rollouts.units[chosen]).strip()


def test_more_branches_unfold(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:  # noqa: F811
    """Rare branches are folded into one; a click puts them in its place, and no rollout is lost."""
    tab.goto(rollouts.tree().save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-node")
    before = tab.locator(".rl-node").count()
    tab.locator(".rl-node", has_text="more branches").click()
    tab.wait_for_selector(".rl-list tr")
    assert tab.locator(".rl-node").count() > before and tab.locator(".rl-node", has_text="more branches").count() == 0
    counts = [int(n) for n in tab.locator(".rl-node").evaluate_all("all => all.map((e) => e.dataset.count)")]
    assert sum(counts[1:]) == counts[0]


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_text_wraps_and_keyboard_works(tab: Any, rollouts: RolloutTexts, tmp_path: Path, theme: str) -> None:  # noqa: F811
    """A narrow window: nothing but the tree's own canvas scrolls sideways. Enter opens a unit; hovering shows its counts."""
    tab.emulate_media(color_scheme=theme)
    tab.set_viewport_size({"width": 480, "height": 700})
    tab.goto(rollouts.tree().save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-node")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(colour) == ("rgb(255, 255, 255)" if theme == "light" else "rgb(20, 23, 26)")
    tab.locator(".rl-unit").nth(4).focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".rl-fork[data-number='4'] .rl-node")
    tab.locator(".rl-unit").nth(2).hover()
    counts = rollouts.counts().counts[2]
    assert str(counts[0]) in tab.inner_text(".rl-tip") and "before unit 3" in tab.inner_text(".rl-tip")
    tab.click(".rl-theme")
    assert tab.evaluate(colour) == ("rgb(20, 23, 26)" if theme == "light" else "rgb(255, 255, 255)")


def test_markup_in_a_browser(tab: Any, hostile: RolloutTree, tmp_path: Path) -> None:  # noqa: F811
    """No script of a text runs: the fixture fails on dialogues, requests and errors."""
    tab.goto(hostile.save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-node")
    tab.locator(".rl-node").last.click()
    tab.locator(".rl-list tr button").first.click()
    assert HOSTILE[0] in tab.inner_text(".rl-one")


def test_two_trees_in_the_report(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:  # noqa: F811
    """They work side by side, each with its own selection."""
    page = ReportPage(rollouts=(rollouts.tree("one"), rollouts.tree("two"))).save(tmp_path / "report.html")
    tab.goto(page.as_uri())
    tab.wait_for_selector(".rl-node")
    second = tab.locator(".rl-rollouts").nth(1)
    second.locator(".rl-unit").first.click()
    second.locator(".rl-fork[data-number='0'] .rl-node").first.wait_for()
    assert tab.locator(".rl-rollouts").first.locator(".rl-fork").get_attribute("data-number") == "3"


def test_a_notebook_output_runs_twice(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:  # noqa: F811
    """Each output brings the script along; a tree is prepared once."""
    cell = rollouts.tree()._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{cell}{cell}</body>")
    tab.goto((tmp_path / "notebook.html").as_uri())
    tab.wait_for_selector(".rl-node")
    tab.wait_for_function("document.querySelectorAll('.rl-fork .rl-canvas').length === 2")


def test_five_thousand_rollouts_open_quickly(tab: Any, tmp_path: Path) -> None:  # noqa: F811
    """The largest tree that is promised: its fork opens in less than three seconds on a busy machine."""
    page = rollouts_of(50, 100, depth=8).tree().save(tmp_path / "x.html")
    tab.goto(page.as_uri())
    tab.wait_for_selector(".rl-node")
    taken = tab.evaluate(
        """async () => {
          const start = performance.now();
          document.querySelector(".rl-unit[data-fork='40']").click();
          while (!document.querySelector(".rl-fork[data-number='40'] .rl-node")) await new Promise((go) => setTimeout(go, 5));
          return performance.now() - start;
        }"""
    )
    assert taken < 3000
