"""The report and the notebook views in a real browser, without requests, errors or foreign scripts."""

import base64
import gzip
import json
import os
import random
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import TokenState
from replaylens.probes.forks.distributions import RolloutTexts
from replaylens.replay.run import Run
from replaylens.views.data import DrawnPath, LensGuess, LensLayer, Token
from replaylens.views.pictures import Tree
from replaylens.views.report import ReportPage
from replaylens.views.rollouts import RolloutTree
from replaylens.workbench.attention import AttentionResult
from tests.drawings import VIEWS, timeline
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def lacks(what: str) -> None:
    """Skips on a user's machine and fails in CI, which installs a browser so that these tests run."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(what)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright import sync_api as playwright
    except ImportError:
        lacks("The package playwright is not installed. Install the extra `dev`.")
    if CHROMIUM is None:
        lacks("No Chromium found. Install it (Debian: apt-get install chromium).")
    with playwright.sync_playwright() as runner:
        running = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize(("ci", "outcome"), [("true", "Failed"), ("", "Skipped")])
def test_ci_fails_without_a_browser(ci: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(BaseException, match="No Chromium found") as caught:
        lacks("No Chromium found.")
    assert type(caught.value).__name__ == outcome


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that must see no error, no dialogue, and no request except for the page itself."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, color_scheme="light")
    page, faults, requests = context.new_page(), [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    yield page
    context.close()
    assert faults == []
    assert [url for url in requests if not url.startswith("file://")] == [] and len(requests) == 1


@pytest.fixture(scope="module")
def report(dump: Dump, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    return ReportPage(dump, decode=lambda token: word(engine.text, token)).save(path)


def test_report(tab: Any, report: Path, run: Run) -> None:
    tab.goto(report.as_uri())
    explorer = tab.locator("#rl-explorer")
    tab.wait_for_selector("#rl-explorer[data-example='0'] .rl-token")
    assert tab.locator("#rl-table tr").count() == len(run)

    tab.click("#rl-table tr[data-row='3'] button")
    tab.wait_for_selector("#rl-explorer[data-example='3']")
    shown = explorer.locator(".rl-tree .rl-token[tabindex]").count()
    assert shown == len(run[3].tokens) + sum(len(r.tokens) - r.fork_position for r in run[3].rejected)

    tab.select_option("#rl-kind", "rejected")
    assert tab.locator("#rl-table tr").count() == sum(bool(result.rejected) for result in run)
    tab.fill("#rl-search", "no such words")
    assert tab.locator("#rl-table tr").count() == 0 and tab.inner_text("#rl-shown") == "nothing found"
    tab.fill("#rl-search", "<script>")
    assert tab.locator("#rl-table tr").count() > 0, "markup is text to be searched"


@pytest.mark.slow
def test_cards(tab: Any, report: Path) -> None:
    """Hovering over a token or a heatmap cell shows its card. Leaving hides it, and so does Escape after Tab."""
    tab.goto(report.as_uri())
    tab.wait_for_selector("#rl-explorer .rl-token")
    tab.locator("#rl-explorer .rl-grid .rl-accepted").first.hover()
    card = tab.inner_text(".rl-tip")
    assert all(part in card for part in ("position", "log-prob", "entropy", "S0", "output"))
    tab.mouse.move(1, 1)
    tab.locator("#lens .rl-cell").first.hover()
    assert "95 %" in tab.inner_text(".rl-tip") and tab.locator(".rl-tip").count() == 1
    tab.locator("#rl-explorer .rl-token[tabindex]").first.focus()
    assert "position" in tab.inner_text(".rl-tip")
    tab.keyboard.press("Escape")
    assert tab.locator(".rl-tip").count() == 0


@pytest.mark.slow
def test_a_resting_mouse_leaves_the_keyboard_alone(tab: Any, report: Path) -> None:
    """Focus scrolls the page under a resting mouse. The element now under the mouse gets its card only when the mouse moves."""
    tab.goto(report.as_uri())
    tab.wait_for_selector("#rl-explorer .rl-token")
    tab.locator("#lens .rl-cell").first.hover()
    focused = tab.locator("#rl-explorer .rl-token[tabindex]").first
    focused.focus()
    box = focused.bounding_box()
    tab.wait_for_timeout(300)
    card = tab.locator(".rl-tip").bounding_box()
    assert abs(card["x"] - box["x"]) < 2, "still the card of what has the focus"
    tab.keyboard.press("Escape")
    tab.wait_for_timeout(300)
    assert tab.locator(".rl-tip").count() == 0
    tab.locator("#lens .rl-cell").first.hover()
    assert "95 %" in tab.inner_text(".rl-tip")


@pytest.mark.slow
def test_light_and_dark(tab: Any, report: Path) -> None:
    tab.goto(report.as_uri())
    colour = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(colour)
    tab.click("#rl-theme")
    dark = tab.evaluate(colour)
    tab.click("#rl-theme")
    assert light == tab.evaluate(colour) == "rgb(255, 255, 255)" and dark == "rgb(20, 23, 26)"
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate("document.body.dataset.theme") == "light", "a choice outlives the system's"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_thoughts(tab: Any, tmp_path: Path, theme: str) -> None:
    """The picture of a Thinking-States model, in the explorer: thoughts have cards, including rolled-back ones."""
    engine = Engine.load("coin-thinking")
    made = engine.replay(tasks.get("coin")(rendering="picture", flips=3).examples(2), sites="SZ", drafter="lens")
    assert isinstance(made, Run)
    page = ReportPage(made.save(tmp_path / "dump")).save(tmp_path / "report.html")
    tab.emulate_media(color_scheme=theme)
    tab.goto(page.as_uri() + "#example-1")
    tab.wait_for_selector("#rl-explorer[data-example='1'] .rl-thinking")
    thoughts = tab.locator("#rl-explorer .rl-thought")
    assert "<EOS>" in thoughts.first.inner_text()
    thoughts.first.hover()
    assert "chunk 0" in tab.inner_text(".rl-tip") and "p " in tab.inner_text(".rl-tip")
    tab.locator("#rl-explorer .rl-thought .rl-rejected").first.hover()
    assert "rolled back in round 1" in tab.inner_text(".rl-tip") and "state added" in tab.inner_text(".rl-tip")
    columns = tab.locator("#rl-explorer .rl-chunk").evaluate_all("all => all.map((e) => e.getBoundingClientRect().x)")
    assert len(columns) == len(made.picture(1).chunks) and columns == sorted(columns)


@pytest.mark.slow
def test_a_place_in_the_report_can_be_linked(tab: Any, report: Path) -> None:
    tab.goto(report.as_uri() + "#example-7")
    tab.wait_for_selector("#rl-explorer[data-example='7'] .rl-token")


@pytest.mark.slow
def test_timeline_steps(tab: Any, run: Run, tmp_path: Path) -> None:
    """Buttons, slider and play show one frame at a time. A second copy of the script is harmless."""
    told = run.timeline(next(i for i, result in enumerate(run) if result.rejected))
    page = tmp_path / "timeline.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8>{told._repr_html_()}{run.tree(0)._repr_html_()}")
    tab.goto(page.as_uri())
    visible = tab.locator(".rl-frame:visible")
    assert visible.count() == 1 and visible.get_attribute("data-phase") == "prefill"
    tab.click("[aria-label=next]")
    assert visible.get_attribute("data-phase") == told.frames[1].phase.value
    tab.locator("[aria-label=step]").fill(str(len(told.frames) - 1))
    assert visible.get_attribute("data-phase") == told.frames[-1].phase.value
    assert tab.locator("[aria-label=next]").is_disabled()
    tab.click("[aria-label=play]")
    tab.wait_for_function("document.querySelector('.rl-count').textContent.startsWith('2 /')")
    tab.click("[aria-label=play]")
    assert tab.locator(".rl-steps").count() == 1
    box = tab.locator(".rl-frame:visible svg").bounding_box()
    assert box["width"] > 300 and box["height"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("light, page", [("true", "rgb(255, 255, 255)"), ("false", "rgb(20, 23, 26)")])
def test_a_notebook_decides_on_light_and_dark(tab: Any, run: Run, tmp_path: Path, light: str, page: str) -> None:
    """Jupyter's theme takes precedence over the system's. Its styles for tables and lists do not apply inside the view."""
    style = "<style>.nb td,.nb th{text-align:right}.nb tbody tr:nth-child(odd){background:red}.nb dl{display:block}</style>"
    file = tmp_path / "notebook.html"
    inside = f"<div class=nb style='transform:translateX(40px);contain:layout'>{run._repr_html_()}</div>"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8>{style}<body data-jp-theme-light={light}>{inside}")
    tab.goto(file.as_uri())
    looks = "s => { const c = getComputedStyle(document.querySelector(s)); return [c.backgroundColor, c.textAlign, c.display] }"
    assert tab.evaluate(looks, ".rl-view")[0] == page and tab.evaluate(looks, ".rl-facts")[2] == "grid"
    tab.click("summary")
    token = tab.locator(".rl-grid .rl-accepted:visible").first
    token.hover()
    assert tab.evaluate(looks, ".rl-tip td")[1] == "left" and tab.evaluate(looks, ".rl-tip tr")[0] == "rgba(0, 0, 0, 0)"
    card, box = tab.locator(".rl-tip").bounding_box(), token.bounding_box()
    assert abs(card["x"] - box["x"]) < 2 and 0 < card["y"] - box["y"] - box["height"] < 12, "below its token, in any container"


def test_without_scripts_everything_is_there(browser: Any, run: Run, tmp_path: Path) -> None:
    """If a page strips scripts, all frames are listed in order and titles replace the cards."""
    told = run.timeline(0)
    page = tmp_path / "still.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8>{told._repr_html_()}{run.tree(0)._repr_html_()}")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert tab.locator(".rl-frame").count() == len(told.frames)
    assert "position" in (tab.locator(".rl-token[tabindex]").first.get_attribute("title") or "")
    context.close()


def test_a_script_that_slipped_through_would_not_run(browser: Any, report: Path, tmp_path: Path) -> None:
    """Negative control of the policy: a planted handler and script do not run, and the browser reports them."""
    planted = report.read_text().replace("<main>", "<main><script>document.title='owned'</script><b onclick=\"x()\">y</b>", 1)
    (tmp_path / "planted.html").write_text(planted)
    tab, refused = browser.new_page(), []
    tab.on("console", lambda message: refused.append(message.text))
    tab.goto((tmp_path / "planted.html").as_uri())
    tab.click("main b")
    assert tab.title() != "owned" and any("Content Security Policy" in text for text in refused)
    tab.close()


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "height"), [(48, 600), (30, 800), (4, 800)])
def test_cards_stay_on_the_screen(browser: Any, tmp_path: Path, layers: int, height: int) -> None:
    """A card with a line per layer, of tokens at the top, in the middle and at the bottom of the window."""
    lens = tuple(LensLayer(f"S{i}", (LensGuess(" heads", 0.5), LensGuess(" tails", 0.3))) for i in range(layers))
    tokens = tuple(Token(f" t{i}", i, TokenState.ACCEPTED, -0.1, 0.2, lens) for i in range(3))
    view = str(Tree((DrawnPath(0, None, 0, "open", tokens),))._repr_html_())
    space = f"<div style='height:{(height - 270) // 2}px'></div>"
    (tmp_path / "a.html").write_text(f"<!DOCTYPE html><meta charset='utf-8'>{view}{space}{view}{space}{view}")
    tab = browser.new_page(viewport={"width": 1100, "height": height})
    tab.goto((tmp_path / "a.html").as_uri())
    for token in (0, 4, 8):
        tab.locator(".rl-grid .rl-token").nth(token).hover()
        box = tab.locator(".rl-tip").bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height and box["x"] + box["width"] <= 1100
        assert tab.locator(".rl-tip tr").last.bounding_box()["y"] < height - 8, "its last line, too"
        tab.mouse.move(1090, height - 2)
    tab.close()


@pytest.mark.slow
def test_attention_is_read_token_by_token(tab: Any, tmp_path: Path) -> None:
    """The token under the mouse shades what the chosen head attends to from there; the first token can be hidden."""
    pattern = torch.tensor([[[[1.0, 0, 0], [0.8, 0.2, 0], [0.6, 0.3, 0.1]], [[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6]]]])
    view = AttentionResult((" a", " b", " c"), (4,), pattern, (1, 2, 3))._repr_html_()
    (tmp_path / "a.html").write_text(f"<!DOCTYPE html><meta charset=utf-8>{view}")
    tab.goto((tmp_path / "a.html").as_uri())
    shades = lambda: tab.eval_on_selector_all(".rl-key", "all => all.map((e) => e.style.getPropertyValue('--v'))")  # noqa: E731
    assert shades() == ["60%", "30%", "10%"], "the last token's, at first"
    tab.select_option("select", label="L4H1")
    assert shades() == ["20%", "20%", "60%"]
    tab.locator(".rl-key").nth(1).hover()
    assert shades() == ["50%", "50%", "0%"] and "0.50" in tab.inner_text(".rl-tip")
    tab.locator(".rl-sink").check()
    assert shades() == ["0%", "100%", "0%"]


@pytest.mark.slow
def test_a_long_tree_stays_on_the_page(tab: Any, tmp_path: Path) -> None:
    tokens = tuple(Token(f" word{i}", i, TokenState.ACCEPTED) for i in range(150))
    (tmp_path / "a.html").write_text(f"<!DOCTYPE html>{Tree((DrawnPath(0, None, 0, 'open', tokens),))._repr_html_()}")
    tab.goto((tmp_path / "a.html").as_uri())
    assert tab.locator(".rl-grid .rl-token").count() == 150
    hidden = "all => all.filter((e) => e.scrollWidth > e.clientWidth).length"
    assert tab.eval_on_selector_all(".rl-scroll", hidden) == 0


# ---- rollout tree ----------------------------------------------------------------------------------------------------
# The tree of rollouts: a harmless, small page of thousands of rollouts that can be opened and clicked.

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


# ---- what leaves its canvas ------------------------------------------------------------------------------------------

OUTSIDE = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
    const canvas = svg.getBoundingClientRect();
    return canvas.width ? [...svg.querySelectorAll('text')].filter(text => {
        const box = text.getBoundingClientRect();
        const beyond = [canvas.left - box.left, box.right - canvas.right, canvas.top - box.top, box.bottom - canvas.bottom];
        return Math.max(...beyond) > 1;
    }).map(text => text.textContent) : [];
})"""
"""words of a drawing beyond its edges"""


@pytest.mark.slow
def test_every_word_of_a_drawing_lies_inside_its_canvas(tab: Any, tmp_path: Path) -> None:
    """All views of tests/drawings.py, each frame of the timeline, and the boards of the docs; a narrow board is found."""
    boards = {file.name: file.read_text() for file in (ROOT / "docs/img").glob("*.svg")}
    views = [view._repr_html_() for make in VIEWS.values() for view in make()]
    frames = timeline().frames
    boards |= {"all": timeline().board(frames), **{f"{i}": timeline().still(frame) for i, frame in enumerate(frames)}}
    body = "".join(f"<div id='{name}'>{board}</div>" for name, board in boards.items())
    (tmp_path / "x.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{body}{''.join(views)}")
    tab.goto((tmp_path / "x.html").as_uri())
    assert len(boards) > 10 and tab.locator("svg text").count() > 100 and tab.evaluate(OUTSIDE) == []
    tab.evaluate("document.getElementById('all').firstChild.setAttribute('width', '400')")
    tab.evaluate("document.getElementById('all').firstChild.setAttribute('viewBox', '0 0 400 600')")
    assert tab.evaluate(OUTSIDE)


@pytest.mark.slow
def test_a_picture_shows_what_would_scroll(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:
    """Before a picture of a page is taken, its trees and rows are as high and as wide as they are."""
    unfold, page = runpy.run_path(str(ROOT / "docs/img/draw.py"))["unfold"], rollouts.tree().save(tmp_path / "x.html")
    tab.goto(page.as_uri())
    tab.wait_for_selector(".rl-node")
    tab.evaluate("document.querySelector('.rl-canvas').style.height = '90px'")
    tab.evaluate("document.querySelector('.rl-canvas').style.width = '300px'")
    with pytest.raises(AssertionError, match=r"cut off.*rl-canvas"):
        unfold(tab)
    tab.evaluate("document.querySelector('.rl-canvas').style.width = ''")
    unfold(tab)
    canvas = "(() => { const e = document.querySelector('.rl-canvas'); return e.scrollHeight - e.clientHeight; })()"
    assert tab.evaluate(canvas) == 0 and tab.locator(".rl-canvas").bounding_box()["height"] > 100


# ---- in a browser -----------------------------------------------------------------------------------------------------


class Lens:
    """Stands for the lens of a rollout."""

    def _repr_html_(self) -> str:
        return "<div class='rl-view'><b>the lens of this rollout</b></div>"


@pytest.mark.slow
def test_click_through_a_tree(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_more_branches_unfold(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:
    """Rare branches are folded into one; a click puts them in its place, and no rollout is lost."""
    tab.goto(rollouts.tree().save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-node")
    before = tab.locator(".rl-node").count()
    tab.locator(".rl-node", has_text="more branches").click()
    tab.wait_for_selector(".rl-list tr")
    assert tab.locator(".rl-node").count() > before and tab.locator(".rl-node", has_text="more branches").count() == 0
    counts = [int(n) for n in tab.locator(".rl-node").evaluate_all("all => all.map((e) => e.dataset.count)")]
    assert sum(counts[1:]) == counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_text_wraps_and_keyboard_works(tab: Any, rollouts: RolloutTexts, tmp_path: Path, theme: str) -> None:
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


def test_markup_in_a_browser(tab: Any, hostile: RolloutTree, tmp_path: Path) -> None:
    """No script of a text runs: the fixture fails on dialogues, requests and errors."""
    tab.goto(hostile.save(tmp_path / "x.html").as_uri())
    tab.wait_for_selector(".rl-node")
    tab.locator(".rl-node").last.click()
    tab.locator(".rl-list tr button").first.click()
    assert HOSTILE[0] in tab.inner_text(".rl-one")


@pytest.mark.slow
def test_two_trees_in_the_report(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:
    """They work side by side, each with its own selection."""
    page = ReportPage(rollouts=(rollouts.tree("one"), rollouts.tree("two"))).save(tmp_path / "report.html")
    tab.goto(page.as_uri())
    tab.wait_for_selector(".rl-node")
    second = tab.locator(".rl-rollouts").nth(1)
    second.locator(".rl-unit").first.click()
    second.locator(".rl-fork[data-number='0'] .rl-node").first.wait_for()
    assert tab.locator(".rl-rollouts").first.locator(".rl-fork").get_attribute("data-number") == "3"


@pytest.mark.slow
def test_a_notebook_output_runs_twice(tab: Any, rollouts: RolloutTexts, tmp_path: Path) -> None:
    """Each output brings the script along; a tree is prepared once."""
    cell = rollouts.tree()._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{cell}{cell}</body>")
    tab.goto((tmp_path / "notebook.html").as_uri())
    tab.wait_for_selector(".rl-node")
    tab.wait_for_function("document.querySelectorAll('.rl-fork .rl-canvas').length === 2")


@pytest.mark.slow
def test_five_thousand_rollouts_open_quickly(tab: Any, tmp_path: Path) -> None:
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
