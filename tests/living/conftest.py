"""Fixtures for the living tree: the hostile model of the views' tests, and a tree on an embedded one."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.serving.branch import Branch
from replaylens.living.explorer import Explorer
from tests.views import conftest as views
from tests.views.test_browser import CHROMIUM, lacks

PROMPT = "A coin's state is heads. Alice flips. Bob doesn't flip. Carol flips."


@pytest.fixture(scope="session")
def coin() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture
def root(coin: Engine) -> Iterator[Branch]:
    with coin.prompt(PROMPT) as branch:
        yield branch


@pytest.fixture
def explorer(root: Branch) -> Explorer:
    return Explorer(root, model="coin-plain")


hostile = pytest.fixture(scope="session", name="hostile")(views.engine.__wrapped__)  # type: ignore[attr-defined]


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


def large(positions: int, branches: int, layers: int = 0) -> dict[str, Any]:
    """The data of a made-up page: a trunk, and branches that leave it or each other anywhere and end anywhere."""
    import numpy as np

    from replaylens.living.readings import packed

    draw, rng = random.Random(0), np.random.default_rng(0)
    shape = [{"id": 0, "parent": None, "start": 0, "end": positions}]
    for number in range(1, branches):
        parent = draw.choice(shape[:40])
        start = draw.randint(parent["start"] + 1, max(parent["start"] + 1, parent["end"] - 1))
        shape.append(
            {"id": number, "parent": parent["id"], "start": start, "end": positions - draw.randint(0, (positions - start) // 2)}
        )
    rows = {}
    for line in shape:
        line |= {"key": 0, "status": "open", "root": 8, "finish": "", "edits": [], "spans": []}
        count = line["end"] - line["start"]
        ids = rng.integers(0, 900, count, dtype=np.uint32)
        rows[str(line["id"])] = {
            "branch": line["id"],
            "first": line["start"],
            "ids": packed(ids),
            "states": "g" * count,
            "repaired": {},
        }
    tree = {"branches": shape, "root": 0, "title": "made up", "layers": layers or 4, "blocks": 4, "attention": [], "sites": []}
    tree |= {"probes": {}, "edits": [], "pins": [], "selected": [0], "position": 0, "undo": [], "work": None}
    words = {str(i): f" word{i}" for i in range(900)}
    return {"tree": tree, "rows": rows, "read": {}, "looks": {}, "words": words}
