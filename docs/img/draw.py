"""Draws every picture in docs/img anew, each from a real run of the embedded model: `make pictures`.

The SVG files come from the engine's own trace and need nothing else; the PNG files are screenshots and need Chromium.
"""

import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import replaylens as rl
from replaylens.dumps.verify import verify
from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.probes.sweeps import sweep
from replaylens.replay.run import Run
from replaylens.thinking.core import ThinkingEngine
from replaylens.views.data import Frame, Phase
from replaylens.views.pictures import Timeline
from replaylens.views.report import ReportPage

HERE = Path(__file__).parent
EXAMPLES = 64
_BODY = "<style>body{margin:0;background:#fff}@media (prefers-color-scheme:dark){body{background:#14171a}}</style>"
"""the page around a view: a card may reach beyond the view's edge"""


def main() -> None:
    engine = Engine.load("coin-plain", record=True)
    task = rl.tasks.get("coin")(flips=(2, 4), rendering="steps")
    run = engine.replay(task.examples(EXAMPLES), sites="STCZ", drafter="model", window=4)
    assert isinstance(run, Run)
    boards = engine.replay(task.examples(EXAMPLES), drafter="ngram", window=4)  # T0 is no draft
    assert isinstance(boards, Run)
    for ending in (Phase.ACCEPT, Phase.ROLLBACK):
        told, frames = _telling(boards, ending)
        (HERE / f"{ending.value}.svg").write_text(told.board(frames))
    with tempfile.TemporaryDirectory() as folder:
        pages = _pages(run, told, Path(folder))
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if chromium is None:
            sys.exit("no Chromium here: the SVG files are new, the PNG files are not (Debian: apt-get install chromium)")
        _screenshots(pages, chromium)


def _round(told: Timeline, ending: Phase) -> list[Frame]:
    """Prefill, then the first round with this ending after accepted drafts, as in the protocol's two pictures."""
    for i, frame in enumerate(told.frames):
        checks = told.frames[i - 1].checks if frame.phase is ending else ()
        last_of_all = checks and checks[-1].void is (ending is Phase.ROLLBACK) and checks[-1].draft is None
        if last_of_all and checks[0].accepted:
            return [told.frames[0], *told.frames[i - 2 : i + 1]]
    return []


def _telling(run: Run, ending: Phase) -> tuple[Timeline, list[Frame]]:
    """The shortest timeline that has such a round, and the round."""
    found = [(told, frames) for i in range(len(run)) if (frames := _round(told := run.timeline(i), ending))]
    if not found:
        sys.exit(f"no example has a {ending.value} to show: take more examples")
    return min(found, key=lambda pair: pair[0].capacity)


def _pages(run: Run, told: Timeline, folder: Path) -> dict[str, Path]:
    """HTML files by name."""
    thinking = Engine.load("coin-thinking")
    assert isinstance(thinking, ThinkingEngine)
    thought = thinking.prompt("A coin's state is heads. Alice flips, then Bob flips. What's the state? A:").generate(2)
    pages = {"thoughts": folder / "thoughts.html"}
    pages["thoughts"].write_text(f"<!DOCTYPE html><meta charset='utf-8'>{_BODY}{thought.picture()._repr_html_()}")
    dump = run.save(folder / "coin")
    found = sweep(dump, ("face", "parity"), positions=("step", "step+1", "query"))
    verdict = verify(dump.url, run.engine, sample="all")
    page = ReportPage(dump, (found,), verdict, lambda token: word(run.engine.text, token), decoded=(told,))
    pages["report"] = page.save(folder / "report.html")
    pages["rollouts"] = _rollouts(run.engine, folder)
    return pages


def _rollouts(engine: Engine, folder: Path) -> Path:
    """The tree of docs/examples/coin_forks.py."""
    example = runpy.run_path(str(HERE.parent / "examples" / "coin_forks.py"))
    drawn = example["rollouts_from"](engine, path := example["units_of"](example["TEXT"]), 100)
    page: Path = drawn.tree("Where is the face of a coin decided?", prompt=path[0]).save(folder / "rollouts.html")
    return page


def _screenshots(pages: dict[str, Path], chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": 1180, "height": 760}, color_scheme=theme)
            _sections(tab, pages["report"], theme)
            tab.goto(pages["rollouts"].as_uri())
            tab.locator(".rl-node").nth(1).click()
            unfold(tab)
            tab.screenshot(path=HERE / f"rollouts-{theme}.png", full_page=True)  # with the page's padding
            _thoughts(tab, pages["thoughts"], HERE / f"thoughts-{theme}.png")
            tab.close()
        browser.close()


def _thoughts(tab: Any, page: Path, out: Path) -> None:
    tab.goto(page.as_uri())
    unfold(tab)
    tab.locator(".rl-view").screenshot(path=out)


_SCROLLED = """part => [...document.querySelectorAll(part + ' *')].filter(e =>
    /auto|scroll/.test(getComputedStyle(e).overflow) && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight))"""


def unfold(tab: Any, part: str = ".rl-view") -> None:
    """Show as much as there is: what scrolls is cut off in a picture."""
    beyond = tab.evaluate(f"Math.max(0, ...({_SCROLLED})('{part}').map(e => e.scrollWidth - e.clientWidth))")
    tab.set_viewport_size({"width": tab.viewport_size["width"] + beyond, "height": tab.viewport_size["height"]})
    whole = "e.style.maxHeight = 'none'; e.style.height = e.scrollHeight + 'px'"
    tab.evaluate(f"({_SCROLLED})('{part}').forEach(e => {{ {whole} }})")
    assert not (left := tab.evaluate(f"({_SCROLLED})('{part}').map(e => e.className)")), f"cut off: {left}"


def _sections(tab: Any, page: Path, theme: str) -> None:
    tab.goto(f"{page.as_uri()}#example-6")
    tab.wait_for_selector("#rl-explorer .rl-token")
    unfold(tab, "#found")
    tab.locator("#found").screenshot(path=HERE / f"report-found-{theme}.png")


if __name__ == "__main__":
    main()
