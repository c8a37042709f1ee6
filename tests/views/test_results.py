"""Results of the workbench on the report page: figures as shapes, text as text, equal bytes for equal results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens import (
    Engine,
    ablate,
    attention,
    attribution_patching,
    integrated_gradients,
    lens,
    patch,
    path_patch,
    report,
    steer,
)
from replaylens.engine.errors import BadRequest
from replaylens.views.report import ReportPage
from tests.views.checks import assert_harmless

COIN = "A coin's state is {}. Alice flips. What's the state? A:"
HEADS, TAILS = COIN.format("heads"), COIN.format("tails")
PAIR = (" tails", " heads")
VERBS: dict[str, Callable[[Engine], Any]] = {
    "lens": lambda engine: lens(engine, HEADS),
    "patch": lambda engine: patch(engine, HEADS, TAILS, metric=PAIR, sites="ST", positions=[4, -1]),
    "path patch": lambda engine: path_patch(engine, HEADS, TAILS, metric=PAIR, receivers=[(1, 3)]),
    "ablate": lambda engine: ablate(engine, [HEADS, TAILS], metric=PAIR, heads=[(1, 3)]),
    "ablate neurons": lambda engine: ablate(engine, [HEADS, TAILS], metric=PAIR, neurons=[(1, 3)]),
    "steer": lambda engine: steer(engine, torch.ones(128), [HEADS], layers=[2], strengths=[1], n=2),
    "attention": lambda engine: attention(engine, HEADS, layers=[1]),
    "attribution": lambda engine: attribution_patching(engine, HEADS, TAILS, PAIR, "S", compare=True),
    "integrated": lambda engine: integrated_gradients(engine, HEADS, TAILS, PAIR, steps=2),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("coin-plain")


def test_every_verb_can_be_saved(engine: Engine, tmp_path: Path) -> None:
    results = [make(engine) for make in VERBS.values()]
    path = report(tmp_path / "a.html", results=results, title="<b>mine</b>")
    html = path.read_text()
    found = assert_harmless(html, scripts=1)
    assert found.tags.count("svg") == len(VERBS) and "<b>mine" not in html
    assert {"lens", "patch", "ablate", "steer", "attention", "attribution"} <= {text.strip() for text in found.texts}
    patched = [VERBS["patch"](engine) for _ in range(2)]
    pages = [ReportPage().add(result).save(tmp_path / f"{i}.html") for i, result in enumerate([*patched, results[-2]])]
    assert pages[0].read_bytes() == pages[1].read_bytes() != pages[2].read_bytes()


def test_hostile_text_stays_text(engine: Engine) -> None:
    """Tokens of any vocabulary reach the page, also those with dollar signs, which start a formula in matplotlib."""
    from dataclasses import replace

    shown = lens(engine, HEADS)
    hostile = replace(shown, tokens=tuple("<script>alert(1)</script>$\\frac{" for _ in shown.tokens))
    html = ReportPage(results=(hostile,)).html()
    assert_harmless(html, scripts=1)
    assert "&lt;script&gt;alert" in html


def test_other_things_are_refused(engine: Engine, tmp_path: Path) -> None:
    for results in ([3], lens(engine, HEADS), "lens", [ReportPage]):
        with pytest.raises(BadRequest, match="Invalid results"):
            report(tmp_path / "a.html", results=results)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="would be empty"):
        report(tmp_path / "a.html")
    assert not list(tmp_path.iterdir())
