"""Draws the living tree in light and dark, from a real session: python docs/img/living_tree.py. Needs Chromium."""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

import replaylens as rl
from replaylens.living.explorer import Explorer

HERE = Path(__file__).parent
PROMPT = "A coin's state is heads. Alice flips. Bob doesn't flip. Carol flips."


def session() -> Explorer:
    """A few questions to a coin."""
    w = rl.explore(rl.Engine.load("coin-plain"), PROMPT)
    root = w.root.id
    w.generate(root, 12)
    w.force(root, at=6, text=" Bob", n=12)
    w.edit(root, at=15, op="attention", layer=2, n=8)
    w.edit(root, at=10, op="steer", layer=2, token=" tails", factor=1.0, n=8)
    w.resample(root, at=16, n=4, max_new=8, temperature=2.5)
    (fork,) = w.fork(root, at=20)
    w.generate(fork, 5, temperature=3.0, seed=3)
    w.rollback(fork, to=21)
    w.pin(root, 11)
    return w


def main() -> None:
    w = session()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with w.serve() as served, sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 660}, color_scheme="light")
        page.goto(served.address)
        page.wait_for_selector(".rlx-bar")
        page.evaluate("document.querySelector('.rlx-grid').scrollLeft = 560")
        page.locator(f".rlx-cell[data-b='{w.root.id}'][data-p='18']").click()
        page.wait_for_selector(".rlx-chip")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(1500)
            page.screenshot(path=HERE / f"living-tree-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
