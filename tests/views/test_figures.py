"""Every public figure draws the numbers of its result, and no word of it leaves the figure's edges."""

import base64
import html
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from rich.console import Console

from replaylens.engine.engine import Engine
from replaylens.engine.memory.tree import HOOKED, ORDINARY, TokenState
from replaylens.engine.proof.trace import Trace
from replaylens.engine.serving.branch import Branch
from replaylens.probes import report
from replaylens.rollouts.plan import NO_ANSWER, OTHER
from replaylens.views import boards
from replaylens.views.data import Check, Fill, Frame, Phase, Slot
from replaylens.views.html import CHECK, INK, KINDS, LOOKS, PAGES, css_variables, kind_of, svg_style
from replaylens.views.pictures import Timeline, timeline
from replaylens.views.rollouts import FILLS, REST, colours
from replaylens.workbench import drawing
from replaylens.workbench.drawing import Grid, figure
from tests.devices import swept
from tests.drawings import (
    FIGURES,
    HIGH,
    LOW,
    MIDDLE,
    SENTENCE,
    WORDS,
    ablate_result,
    attention_result,
    attribution,
    bar_table,
    change_result,
    curve_result,
    curve_table,
    feature_rows,
    fork_result,
    importance_result,
    lens_result,
    patch_result,
    resilience_result,
    rollouts,
    routing_result,
    sibling_result,
    steer_result,
    sweep_table,
)
from tests.toy_model import VOCAB, continuation, engine, toy
from tests.views.checks import meshes


def drawn(figure: Figure) -> Figure:
    """The same figure, with everything where drawing moves it."""
    figure.draw_without_rendering()
    return figure


def outside(figure: Figure) -> list[float]:
    """How far the words and shapes of a drawn figure reach beyond its left, lower, right and upper edge, in inches."""
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return [float(-box.x0), float(-box.y0), float(box.x1 - width), float(box.y1 - height)]


WITH_A_LEGEND = {"rollouts", "curve", "resilience", "siblings", "sweep curves", "steer"}


@pytest.mark.parametrize("name", swept(FIGURES, "attention", "bars", "curve", "sweep curves"))
def test_nothing_leaves_the_figure_and_no_legend_covers_what_is_drawn(name: str) -> None:
    made = drawn(FIGURES[name]())
    assert isinstance(made, Figure) and made.get_facecolor() == (1.0, 1.0, 1.0, 1.0), "readable on a dark page, too"
    assert max(outside(made)) < 0.02 and collisions(made) == []
    assert callable(getattr(made, "_repr_png_", None)), "a notebook shows it"
    boxes = [legend.get_window_extent() for legend in made.legends]
    assert len(boxes) == 1 or name not in WITH_A_LEGEND
    if name in WITH_A_LEGEND:
        assert not [axis for axis in made.axes if axis.get_legend() or boxes[0].overlaps(axis.get_window_extent())]


def collisions(figure: Figure) -> list[str]:
    """Words on a drawn figure's axes that leave the axes, or lie on the word beside or above them, by more than a pixel."""
    found = []
    for axis in figure.axes:
        edge = axis.get_window_extent().padded(1)
        boxes = sorted([(*text.get_window_extent().extents, text.get_text()) for text in axis.texts if text.get_text()])
        found += [word for *box, word in boxes if not (edge.contains(*box[:2]) and edge.contains(*box[2:]))]
        for order in (boxes, sorted(boxes, key=lambda box: (round(box[1] + box[3]), box[0]))):
            pairs = ((a, b) for a, b in pairwise(order) if min(a[3], b[3]) - max(a[1], b[1]) > 1)
            found += [f"{a[4]} on {b[4]}" for a, b in pairs if min(a[2], b[2]) - max(a[0], b[0]) > 1]
    return found


def lettered(rows: int, columns: int, letter: str = "W") -> Figure:
    """Cells of a grid whose words are as wide as can be."""
    names = [f"a long name of row {i}" for i in range(rows)]
    words = [[letter * 9] * columns] * rows
    return figure([Grid("a grid", names, ["x"] * columns, np.zeros((rows, columns)), words)], "a label", "rows", "columns")


@pytest.mark.parametrize(
    ("rows", "columns", "letter"),
    [
        (1, 1, "W"),
        (3, 14, "i"),
        *(pytest.param(3, 14, letter, marks=pytest.mark.slow) for letter in "W\N{FULL BLOCK}"),
        *(pytest.param(*shape, "W", marks=pytest.mark.slow) for shape in ((31, 14), (10, 60), (2, 250), (200, 3))),
    ],
)
def test_the_words_of_a_grid_fit_into_its_cells(rows: int, columns: int, letter: str) -> None:
    made = drawn(lettered(rows, columns, letter))
    assert collisions(made) == []
    wide = made.axes[0].get_window_extent().width / columns
    words = [text for text in made.axes[0].texts if text.get_text()]
    assert all(text.get_window_extent().width <= wide for text in words) and bool(words) == (columns < 250 and rows < 200)


def test_cells_that_are_too_low_have_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide ones, too. Control: the smaller words, above."""
    monkeypatch.setattr(drawing, "_SIZE", 50.0)
    assert not [text for text in lettered(3, 1).axes[0].texts if text.get_text()]


def test_a_label_that_leaves_the_figure_is_found() -> None:
    """Negative control."""
    made = FIGURES["features"]()
    assert made._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    made.axes[-1].set_ylabel(SENTENCE)
    assert max(outside(drawn(made))) > 0.5
    grid = lettered(1, 14)
    grid.axes[0].texts[0].set_text("W" * 7)
    assert collisions(drawn(grid))


# ---- what is drawn --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lens_shows_the_token_that_was_asked_about() -> None:
    asked, plain = lens_result(" Paris"), lens_result()
    drawn, usual = asked.plot(), plain.plot()
    assert np.array_equal(meshes(drawn)[0], asked.logprob.numpy()) and "' Paris'" in drawn.axes[0].get_title()
    assert np.array_equal(meshes(usual)[0], plain.probability.numpy())
    for measure in ("entropy", "kl", "rank"):
        assert np.array_equal(meshes(asked.plot(measure))[0], getattr(asked, measure).numpy())
    words = ["The", "capital", "of", r"\$Fr\$a…", "is", "incom…", "⍽"]
    assert [text.get_text() for text in usual.axes[0].texts][:7] == words
    assert "&#39; Paris&#39; is more likely" in asked._repr_html_() and "rank 48" in asked._repr_html_()


def test_ranks_have_a_logarithmic_scale() -> None:
    """Rank 0, 10 and 48,000 are told apart."""
    (mesh,) = lens_result(" Paris").plot("rank").axes[0].collections
    at = [float(mesh.norm(rank)) for rank in (0, 1, 10, 100, 48_000)]
    assert at[0] == 0 and at[-1] > 0.9 and min(np.diff(at)) > 0.1


def test_lens_features_are_the_strongest() -> None:
    result, top = lens_result(), [["2", "4", "2", "1", "2", "2", "2"]]
    assert [list(line) for line in result.grid("features").words or ()] == top
    assert meshes(result.plot("features"))[0].round(3).tolist() == [[0.1, 9.0, 0.1, 5.0, 0.1, 0.1, 0.1]]
    facts = result.grid("features").facts
    assert facts is not None and facts(0, 3)[1:] == ("5\tfeature 1", "0.2\tfeature 2"), "the strongest first"


def test_features_are_listed_strongest_first() -> None:
    rows = feature_rows()
    axis = rows.plot().axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["4", "1", "2"]
    assert np.array_equal(axis.images[0].get_array(), rows.columns([4, 1, 2]).T.numpy())
    assert "<td>1: 5  2: 0.2</td>" in rows._repr_html_(), "the strongest first"


@pytest.mark.slow
@pytest.mark.parametrize("around", [None, 1.0])
def test_panels_share_one_scale_that_reaches_all_of_them(around: float | None) -> None:
    """A colour is the same number in every panel, and the bar beside them names it."""
    values = np.array([[2.0, 3.0]]), np.array([[-4.0, 2.5]]), np.array([[1.0, 9.0]])
    made = figure([Grid("", ["0"], ["a", "b"], each, around=around) for each in values], "", "", "")
    scales = {(mesh.norm.vmin, mesh.norm.vmax) for axis in made.axes[:3] for mesh in axis.collections}
    assert scales == {(-4.0, 9.0) if around is None else (-7.0, 9.0)}


@pytest.mark.slow
def test_patches_are_centred_on_what_changes_nothing() -> None:
    result = patch_result()
    for values, middle in (("effect", 0.0), ("raw", 2.0)):
        made = result.plot(values)  # type: ignore[arg-type]
        expected = getattr(result, values)
        assert [np.array_equal(a, b.numpy()) for a, b in zip(meshes(made), expected.values(), strict=True)] == [True, True]
        norm = made.axes[0].collections[0].norm
        assert (norm.vmin + norm.vmax) / 2 == pytest.approx(middle)
    assert torch.allclose(result.effect["S"], (result.raw["S"] - 2) / 2)


def test_ablations() -> None:
    heads, neurons = ablate_result("head"), ablate_result("neuron")
    effect = heads.effect.mean(1).reshape(2, 2).numpy()
    made = heads.plot()
    assert np.allclose(meshes(made)[0], effect) and made.axes[0].collections[0].norm(0.0) == pytest.approx(0.5)
    axis, frame = neurons.plot().axes[0], neurons.frame
    assert [bar.get_width() for bar in axis.patches] == pytest.approx(frame["effect"].tolist())
    assert abs(frame["effect"][0]) == frame["effect"].abs().max()
    values = neurons.effect[neurons.units.index(frame["unit"][0])].double()
    assert frame["high"][0] - frame["effect"][0] > 1.96 * float(values.std(correction=1)) / math.sqrt(3)
    (lines,) = axis.collections  # of the intervals
    ends = [[float(x) for x in segment[:, 0]] for segment in lines.get_segments()]
    assert np.allclose(ends, frame[["low", "high"]])


def test_steering_shows_effect_and_perplexity() -> None:
    left, right = steer_result().plot().axes
    for line in left.lines:
        assert line.get_xdata().tolist() == [0, 2] and line.get_ydata().tolist() == [0, 1]
    for line in right.lines:
        assert line.get_ydata().tolist() == pytest.approx([4, 20]), "geometric means of 2 and 8, and of 4 and 100"
    right.figure.draw_without_rendering()
    ticks = [label.get_text() for minor in (False, True) for label in right.get_yticklabels(minor=minor)]
    assert "10" in ticks and not [text for text in ticks if "times" in text or "^" in text]
    assert "<td>1.500</td><td>100.00</td>" in steer_result()._repr_html_()


@pytest.mark.slow
def test_attention_patterns() -> None:
    result = attention_result()
    for first in (True, False):
        found = meshes(result.plot(5, 1, first=first))[0][::-1]
        expected = np.where(np.tril(np.ones_like(found)) > 0, result.pattern[1, 1].numpy(), np.nan)
        expected[:, 0] = expected[:, 0] if first else np.nan
        assert np.array_equal(np.ma.filled(found, np.nan), expected, equal_nan=True)
    kinds = ("previous", "first", "own", "induction")
    for kind, found in zip(kinds, meshes(result.plot()), strict=True):
        assert np.allclose(found, result.frame[kind].to_numpy().reshape(2, 3))


def test_attention_view_holds_every_weight() -> None:
    result = attention_result()
    html = result._repr_html_()
    weights = np.frombuffer(base64.b64decode(html.split('data-weights="')[1].split('"')[0]), dtype=np.uint8)
    lower = np.tril_indices(len(WORDS))
    assert np.abs(weights.reshape(2, 3, -1) / 255 - result.pattern.numpy()[:, :, lower[0], lower[1]]).max() <= 0.5 / 255 + 1e-6
    assert (
        html.count('class="rl-key rl-cell"') == len(WORDS)
        and [f">L{l}H{h}<" in html for l in (1, 5) for h in range(3)] == [True] * 6
    )


def test_routing() -> None:
    result = routing_result()
    made = result.plot()
    path, draft = meshes(made)
    assert np.array_equal(path, result.path.weights.max(-1).values.numpy()) and np.array_equal(draft, path[:, :1])
    assert [text.get_text() for text in made.axes[0].texts] == ["2", "1", "2", "0", "0", "2"]
    assert meshes(result.plot_load())[0].tolist() == [[1, 1, 3, 1], [3, 1, 1, 1]]


@pytest.mark.parametrize("heads", [0, 3])
def test_attributions_of_heads_are_sums_over_positions(heads: int) -> None:
    result = attribution(heads)
    found = meshes(result.plot())
    expected = [each.sum(1) if heads else each for each in (result.estimate, result.real) if each is not None]
    assert [np.allclose(a, b.numpy()) for a, b in zip(found, expected, strict=True)] == [True, True]


def test_rollouts() -> None:
    """One bar per fork, named by its text. Rollouts without an answer are grey."""
    axis = rollouts().plot().axes[0]
    bars = {group.get_label(): group for group in axis.containers}
    assert {name: [round(bar.get_width(), 3) for bar in group] for name, group in bars.items()} == {
        "heads": [0, 1, 0.667], "tails": [0.667, 0, 0], "no answer": [0.333, 0, 0.333]}  # fmt: skip
    assert [bar.get_x() for bar in bars["no answer"]] == pytest.approx([2 / 3, 1, 2 / 3])
    colour = {name: group[0].get_facecolor() for name, group in bars.items()}
    assert colour["no answer"] == to_rgba(REST)
    assert colour["heads"] == to_rgba(FILLS[0])
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names[0].startswith("So the state of the coin") and names[0].endswith("… (4)") and names[1] == r"Bob \$waits\$. (9)"
    assert axis.get_ylim() == (2.5, -0.5), "from top to bottom"


def test_outcome_curve() -> None:
    result = curve_result()
    axis = result.plot().axes[0]
    for k, line in enumerate(axis.lines):
        assert np.array_equal(line.get_ydata(), result.value[:, k]) and line.get_xdata().tolist() == [4, 9, 15]
        ys = axis.collections[k].get_paths()[0].vertices[:, 1]
        assert {*result.low[:, k], *result.high[:, k]} == set(ys)
    assert axis.lines[1].get_color() == REST


def test_other_figures_of_forks() -> None:
    changes = change_result().plot().axes[0]
    assert [bar.get_height() for bar in changes.patches[:3]] == MIDDLE.tolist()
    assert changes.patches[3].get_x() == 0.5 and changes.patches[3].get_width() == 2
    tokens, result = fork_result().plot().axes[0], fork_result()
    ys = tokens.collections[0].get_paths()[0].vertices[:, 1]
    assert {*result.survival_low, *result.survival_high} == set(ys)
    assert [segment[0, 0] for segment in tokens.collections[1].get_segments()] == [1]
    spans, marks = importance_result().plot().axes[0].collections
    assert [tuple(segment[:, 1]) for segment in spans.get_segments()] == list(zip(LOW, HIGH, strict=True))
    assert marks.get_offsets()[:, 1].tolist() == MIDDLE.tolist() and [bool(c[3]) for c in marks.get_facecolors()] == [
        True,
        False,
        True,
    ]
    spans, marks, control = resilience_result().plot().axes[0].collections
    assert [tuple(segment[:, 1]) for segment in spans.get_segments()] == list(zip(LOW, HIGH, strict=True))
    assert marks.get_offsets()[:, 1].tolist() == MIDDLE.tolist() and control.get_offsets()[:, 1].tolist() == [0.1, 0.15, 0.2]
    siblings = sibling_result().plot().axes[0]
    assert siblings.lines[0].get_ydata().tolist() == MIDDLE.tolist() == siblings.lines[1].get_ydata().tolist()[::-1]
    assert {*LOW, *HIGH} == set(siblings.collections[0].get_paths()[0].vertices[:, 1])


def test_sweeps() -> None:
    made, table = report.heatmap(sweep_table()), sweep_table()
    for axis, site in zip(made.axes[:2], "ST", strict=True):
        own = table[table["site"] == site].pivot(index="position", columns="layer", values="accuracy")
        assert np.allclose(axis.images[0].get_array(), own.loc[["a long name of a position", "query"]])
        marks = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_marker() for line in axis.lines}
        assert len(marks) == 6 and [at for at in sorted(marks) if marks[at] == "o"] == [(2, 0), (2, 1)], (
            "others have a mark, too"
        )
    assert {text.get_text() for text in made.legends[0].get_texts()} <= {"shown", "below", "undecided"}, "marks are explained"
    curves = report.curves(sweep_table()).axes[0]
    assert curves.lines[0].get_ydata().tolist() == pytest.approx([0.55, 0.65, 0.75])
    controls = {line.get_label(): line.get_ydata().tolist() for line in curves.lines if line.get_linestyle() == "--"}
    assert controls == {"majority": [0.5] * 3, "bag of tokens": [0.3, 0.7, 0.35]}
    ends = [segment[:, 1].tolist() for segment in curves.containers[0].lines[2][0].get_segments()]
    assert np.allclose(ends, [[0.4, 0.9]] * 3)


def test_curves_of_complexity_and_bars() -> None:
    left, right = report.complexity(curve_table(), "complexity_curve").axes
    assert left.lines[0].get_xydata().tolist() == [[0.2, 0.6], [0.6, 0.8]]
    drawn = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert drawn["training rows"] == [0.7, 0.9] and drawn["exchanged labels, training rows"] == [0.2, 0.6]
    assert set(drawn["majority"]) == {0.5}
    axis = report.bars(bar_table(), "bars").axes[0]
    assert [bar.get_width() for bar in axis.patches] == [0.6, 0.8]
    assert np.allclose([segment[:, 0] for segment in axis.collections[0].get_segments()], [[0.5, 0.7], [0.7, 0.95]])


# ---- palette ---------------------------------------------------------------------------------------------------------
# Token states stay distinguishable under every common kind of colour blindness, and their text is legible.

# Machado, Oliveira and Fernandes (2009), severity 1: how linear RGB is perceived
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
APART = 0.1
"""Oklab distance; about five times the just noticeable difference"""


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def seen(colour: str, blindness: str) -> np.ndarray:
    rgb = np.clip(np.asarray(BLINDNESS[blindness]) @ linear(colour), 0, 1)
    return np.asarray(TO_OKLAB) @ np.cbrt(np.asarray(TO_CONES) @ rgb)


def distance(a: str, b: str, blindness: str) -> float:
    return float(np.linalg.norm(seen(a, blindness) - seen(b, blindness)))


def contrast(a: str, b: str) -> float:
    """Contrast as defined by the Web Content Accessibility Guidelines."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_states_keep_apart(blindness: str) -> None:
    """Pending has a pattern, so the other kinds must differ by colour."""
    fills = [look.fill for kind, look in KINDS.items() if kind != TokenState.PENDING.value]
    assert min(distance(a, b, blindness) for a, b in combinations(fills, 2)) > APART


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_outcomes_keep_apart(blindness: str) -> None:
    """The first five as token states do, all eight nearly so; the rest share a grey."""
    assert min(distance(a, b, blindness) for a, b in combinations(FILLS[:5], 2)) > APART
    assert min(distance(a, b, blindness) for a, b in combinations(FILLS, 2)) > 0.8 * APART
    assert all(contrast(INK, fill) > 4.5 for fill in (*FILLS, REST))
    assert colours("ab") == list(FILLS[:2]) and colours("abcdefghij") == [*FILLS, REST, REST]
    assert colours(["heads", NO_ANSWER, "tails"]) == [FILLS[0], REST, FILLS[1]] and colours([OTHER]) == [REST]


def test_a_careless_palette_would_fail() -> None:
    """Negative control: a medium red and green look the same to some readers."""
    assert distance("#b0402a", "#7b7018", "none") > APART > distance("#b0402a", "#7b7018", "deuteranopia")


def test_text_can_be_read() -> None:
    assert all(contrast(INK, fill) > 4.5 for fill in [*(look.fill for look in KINDS.values()), CHECK])
    for page in PAGES.values():
        assert contrast(page["text"], page["page"]) > 4.5 and contrast(page["quiet"], page["panel"]) > 4.5
        assert contrast(page["deep-ink"], page["deep"]) > 4.5


def test_no_state_is_told_by_colour_alone() -> None:
    for marks in ([look.mark for look in KINDS.values()], [look.ascii for look in KINDS.values()]):
        assert len(set(marks)) == len(TokenState) + 1 and all(len(mark) == 1 for mark in marks)
    assert all(look.ascii.isascii() for look in KINDS.values())


def test_a_terminal_has_the_colours_of_the_docs() -> None:
    """Prompt blue, accepted green, pending checkered (a terminal has no pattern), draft yellow, rejected red."""
    colours = [LOOKS[state].colour.removeprefix("bright_") for state in TokenState]
    assert colours == ["blue", "green", "white", "yellow", "red"]


def test_styles_name_every_state() -> None:
    for state in TokenState:
        assert f"--rl-{state.value}:{LOOKS[state].fill}" in css_variables("dark")
        assert f".{state.value}{{fill:{LOOKS[state].fill}}}" in svg_style()


# ---- truth -----------------------------------------------------------------------------------------------------------
# Pictures do not lie: a token of which nothing is promised is never drawn as accepted, in any view.

P = [3, 1, 4, 1, 5, 9]


def recorded() -> Engine:
    return engine(record=True)


def ordinary(subject: Engine) -> Branch:
    return subject.prompt(P).generate(6, deterministic=False)


def of_one_token(subject: Engine) -> Branch:
    return subject.prompt(P).generate(1, deterministic=False)


def continued(subject: Engine) -> Branch:
    """Verified tokens after ordinary ones read KV of the fast path."""
    return ordinary(subject).generate(9, drafter="lens", window=4)


def after_canonical_ones(subject: Engine) -> Branch:
    return subject.prompt(P).generate(4, drafter="lens", window=4).generate(5, deterministic=False)


def forked(subject: Engine) -> Branch:
    (fork,) = ordinary(subject).fork(at=9)
    return fork.generate(5)


def rolled_back(subject: Engine) -> Branch:
    return ordinary(subject).rollback(8).generate(4)


def forced(subject: Engine) -> Branch:
    return ordinary(subject).force([7, 8])


def hooked(subject: Engine) -> Branch:
    return subject.prompt(P, hooks=[("blocks.0.hook_in", lambda value, hook: value)]).generate(5, window=1)


def hooked_fork(subject: Engine) -> Branch:
    root = subject.prompt(P).generate(4)
    (fork,) = root.fork(hooks=[("blocks.0.hook_in", lambda value, hook: value)])
    return fork.generate(4, window=1)


UNCERTIFIED = [ordinary, of_one_token, continued, after_canonical_ones, forked, rolled_back, forced, hooked, hooked_fork]


def kinds_in(text: str) -> set[str]:
    """The kinds of tokens that a piece of HTML or SVG shows, legends aside."""
    body = text.split("</style>")[-1] if "<svg" in text else text
    return {kind for kind in KINDS if f'"{kind} edge"' in body or f"rl-token rl-{kind}" in body}


def first_uncertified(make: Callable[[Engine], Branch]) -> int:
    """The number of tokens after the prompt that were canonical."""
    return 4 - 1 if make is after_canonical_ones else 0


@pytest.mark.parametrize("make", UNCERTIFIED)
def test_no_uncertified_token_is_drawn_as_accepted(make: Callable[[Engine], Branch]) -> None:
    """In the tree, on every frame of the timeline, on the board and in the terminal."""
    subject = recorded()
    branch = make(subject)
    assert not branch.certified, "control"
    certified = first_uncertified(make)
    why = HOOKED if make in (hooked, hooked_fork) else ORDINARY
    tokens = branch.tree().trunk.tokens[branch.root_length :]
    assert [token.kind for token in tokens] == ["accepted"] * certified + ["ordinary"] * (len(tokens) - certified)
    told = branch.timeline()
    first = next((i for i, frame in enumerate(told.frames) if frame.phase is Phase.ORDINARY), 0) if certified else 0
    for frame in told.frames[first:]:
        generated = [slot for slot in frame.generated if slot.number >= certified]
        verified = [check.verifier for check in frame.checks if check.verifier is not None]
        assert not {"accepted", "pending"} & {slot.kind for slot in [*generated, *verified]}, frame
        assert "canonical" not in frame.caption or not generated or frame.checks, frame.caption
        assert frame.kv.accepted <= certified
    assert told.frames[-1].generated[-1].kind == "ordinary"
    if not certified:
        assert not {"accepted", "pending"} & kinds_in(told.board(told.frames))
        assert not {"accepted", "pending"} & kinds_in("".join(map(told.still, told.frames)))
        assert "rl-token rl-ordinary" in branch.tree()._repr_html_()
    assert why in branch.tree()._repr_html_() and why in str(branch.tree())
    assert any(why in frame.caption or "Not certified" in frame.caption for frame in told.frames) or make is forced


def test_certified_tokens_are_drawn_as_such() -> None:
    """Control: the same views of deterministic branches have no ordinary token, not even in the legend."""
    branch = recorded().prompt(P).generate(9, drafter="lens", window=4)
    told = branch.timeline()
    assert {slot.kind for frame in told.frames for slot in frame.generated} >= {"accepted", "pending", "draft"}
    assert "ordinary" not in branch.tree()._repr_html_().split("</style>")[1].split("<script>")[0]
    assert "ordinary" not in str(branch.tree()) + str(told)


def test_a_state_can_look_ordinary_only_where_it_would_promise_something() -> None:
    assert [kind_of(state, ORDINARY) for state in TokenState] == ["prompt", "ordinary", "ordinary", "draft", "rejected"]
    assert [kind_of(state) for state in TokenState] == ["prompt", "accepted", "pending", "draft", "rejected"]


def test_a_trace_tells_the_same_about_a_branch_that_is_gone(tmp_path: Any) -> None:
    subject = recorded()
    branch = continued(subject)
    subject.trace.save(tmp_path / "t.trace")
    told = timeline(Trace.load(tmp_path / "t.trace"), branch.id, str)
    assert [[s.kind for s in f.generated] for f in told.frames] == [
        [s.kind for s in f.generated] for f in branch.timeline().frames
    ]
    replayed = engine().replay_trace(subject.trace)[branch.id]
    assert {t.kind for t in replayed.tree().trunk.tokens[replayed.root_length :]} == {"ordinary"}


def test_the_terminal_has_a_colour_for_it() -> None:
    out = io.StringIO()
    Console(file=out, width=400, force_terminal=True, color_system="truecolor").print(ordinary(recorded()).tree())
    assert "\x1b[30;45m" in out.getvalue(), "black on magenta"
    assert "102m" not in out.getvalue(), "no green"


# ---- the protocol's pictures ---------------------------------------------------------------------------------------------


def frames_with(drafts: list[int]) -> tuple[Frame, ...]:
    branch = recorded().prompt(P)
    return branch.generate(6, drafter="forced", drafts={len(P) + 1: [drafts]}).timeline().frames


def test_t0_comes_out_of_the_prefill() -> None:
    """Green, from the canonical pass, and in no frame a draft; the cache holds the prompt alone."""
    for options in ({"drafter": "self", "window": 4}, {"window": 1}, {"drafter": "ngram", "window": 4}):
        branch = recorded().prompt(P).generate(9, **options)
        first, *others = branch.timeline().frames
        assert (first.phase, first.kv) == (Phase.PREFILL, Fill(len(P)))
        assert [(slot.name, slot.kind, slot.text) for slot in first.generated] == [
            ("T0", "accepted", f" {branch.generated[0]}")
        ]
        assert all(frame.generated[0].name == "T0" and frame.generated[0].kind == "accepted" for frame in others)


@pytest.mark.parametrize("right", [True, False])
def test_a_drafted_t0_comes_from_the_prompts_last_row(right: bool) -> None:
    """Drafters such as `lens` and `model` draft T0 as well: it is yellow until the canonical pass gives it."""
    subject = recorded()
    (t0,) = continuation(toy(), P, 1)
    chain = [t0 if right else (t0 + 1) % VOCAB]
    frames = subject.prompt(P).generate(6, drafter="forced", drafts={len(P): [chain]}).timeline().frames
    assert [frame.phase for frame in frames[:3]] == [Phase.PREFILL, Phase.DECODE, Phase.VERIFY]
    assert not frames[0].generated and (frames[1].generated[0].name, frames[1].generated[0].kind) == ("T0′", "draft")
    assert frames[2].caption.endswith("; the prompt's last row gives T0")
    said = frames[2].checks[0].verifier
    assert said is not None and (said.name, said.text, said.kind) == ("T0", f" {t0}", "accepted" if right else "pending")
    assert not any("gives T0" in frame.caption for frame in frames[3:])


def test_a_saved_trace_knows_t0_too(tmp_path: Any) -> None:
    """It is not drafted, but the event of the drafts after it names it."""
    subject = recorded()
    branch = subject.prompt(P).generate(9, window=4)
    subject.trace.save(tmp_path / "t.trace")
    told = timeline(Trace.load(tmp_path / "t.trace"), branch.id, lambda token: f" {token}")
    assert [[s.text for s in f.generated] for f in told.frames] == [
        [s.text for s in f.generated] for f in branch.timeline().frames
    ]


def test_an_arrow_leads_from_each_draft_to_the_verifiers_token() -> None:
    """From left to right, in the middle of both boxes, which stand in one row. The verifier's extra token has none."""
    drafts = tuple(Slot(f" d{i}", TokenState.DRAFT, i, drafted=True) for i in (1, 2))
    said = [Slot(f" v{i}", TokenState.ACCEPTED if i < 3 else TokenState.PENDING, i) for i in (1, 2, 3)]
    checks = tuple(map(Check, (*drafts, None), said))
    drawn = ElementTree.fromstring(boards.document([Frame(Phase.VERIFY, "", Fill(4), drafts, checks)], 8))
    arrows = [e.get("d", "") for e in drawn.iter() if e.get("class") == "line arrow" and "L" in e.get("d", "")]
    texts = {e.text: (float(e.get("x", "")), float(e.get("y", ""))) for e in drawn.iter() if e.tag.endswith("text")}
    assert len(arrows) == 2
    for arrow, name in zip(arrows, ("1", "2"), strict=True):
        start, y, end = map(float, re.findall(r"[\d.]+", arrow)[:3])
        assert texts[f" d{name}"][0] < start < end < texts[f" v{name}"][0]
        assert texts[f" d{name}"][1] == texts[f" v{name}"][1] and 0 < texts[f" d{name}"][1] - y < 8


@pytest.mark.parametrize(("drafted", "kept"), [(3, 1), (3, 0), (4, 3), (2, 2), (1, 0), (11, 6)])
def test_marks_and_brackets_of_a_verification(drafted: int, kept: int) -> None:
    """By hand: the verifier gives one token for each draft and one more. It agrees up to the first mismatch, where it replaces
    the draft. No tick stands at a rejected draft, and each mark is in the row and the bracket of the token that it is about."""
    states = [TokenState.ACCEPTED] * kept + [TokenState.PENDING] + [TokenState.REJECTED] * (drafted - kept)
    said = [Slot(f" v{i}", state, i) for i, state in enumerate(states, 1)]
    chain = tuple(Slot(f" d{i}", TokenState.DRAFT, i, drafted=True) for i in range(1, drafted + 1))
    checks = tuple(map(Check, (*chain, None), said))
    slots = (Slot(" t", TokenState.ACCEPTED, 0), *chain)
    frame = Frame(Phase.VERIFY, "", Fill(4, 0, drafted, pending=1), slots, checks)
    drawn = list(ElementTree.fromstring(boards.document([frame], 30)).iter())
    words = [(e.text or "", float(e.get("x", "")), float(e.get("y", ""))) for e in drawn if e.tag.endswith("text")]
    row = {text: round((y - 15) / boards.STEP, 3) for text, _, y in words if text in {slot.text for slot in (*said, *slots)}}
    first = row[" t"] + 1
    assert [row[f" d{i}"] for i in range(1, drafted + 1)] == [row[f" v{i}"] for i in range(1, drafted + 1)]
    marks = [(text, x, round((y - 16) / boards.STEP, 3)) for text, x, y in words if text in "✓✗"]
    assert [text for text, _, _ in marks] == ["✓"] * (kept + 1) + ["✗"] * (drafted - kept)
    assert [at for _, _, at in marks] == [first + i for i in range(drafted + 1)]
    named = {text: x + boards.SMALL * len(text) for text, x, _ in words if re.fullmatch(r"T\d+( [=≠] T\d+′)?", text)}
    assert all(x - 4 > max(named.values()) for _, x, _ in marks), "right of what they are about, and of its name"
    compared = [f"T{i} = T{i}′" for i in range(1, kept + 1)] + [f"T{kept + 1} ≠ T{kept + 1}′"] * (kept < drafted)
    assert sorted(name for name in named if "′" in name) == sorted(compared)
    ends = [re.findall(r"[\d.]+", e.get("d", "")) for e in drawn if "h4V" in e.get("d", "")]
    rows = [tuple(round((float(y) - over) / boards.STEP, 3) for y, over in ((a, 0), (b, boards.BOX))) for _, a, _, b, _ in ends]
    whole = [(first, first + kept), (first + kept + 1, first + drafted)]
    assert rows == whole[: 1 + (kept < drafted)]
    assert [text for text, _, _ in words if text in ("accepted", "rejected")] == ["accepted", "rejected"][: len(rows)]
    crosses = [float((e.get("d") or "")[1:].split("l")[0].split()[1]) for e in drawn if e.get("class") == "cross"]
    struck = sorted([*range(kept, drafted), *range(kept + 1, drafted + 1)])  # drafts from the mismatch on, what follows them
    assert sorted(round(y / boards.STEP - first, 3) for y in crosses) == struck
    width = float(next(e.get("width", "") for e in drawn))
    assert max(x + boards.SMALL * len(text) for text, x, _ in words if text in ("accepted", "rejected", "tokens")) <= width


def test_what_neighbours_decode_is_checkered_until_the_round_ends() -> None:
    """Grey prompts, then checkered tokens beside the drafts, then plain ones."""
    looks = {}
    for phase in (Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.ROLLBACK):
        drawn = list(ElementTree.fromstring(boards.document([Frame(phase, "", Fill(4), others=2)], 8)).iter())
        bars = [float(e.get("width", "")) for e in drawn if e.get("class") == "other"]
        looks[phase] = set(bars), *(sum(e.get("class") == kind for e in drawn) for kind in ("pending", "check beside"))
    plain, whole = {float(boards.PROMPT_BAR)}, {float(boards.BAR)}
    assert list(looks.values()) == [(plain, 0, 0), (whole, 2, 2), (whole, 2, 2), (whole, 0, 0)]


def rolled_back() -> tuple[list[int], Timeline]:
    """A request as in the picture of the protocol: T1 = T1′, T2 ≠ T2′, then two tokens on top of rejected drafts."""
    t, subject = continuation(toy(), P, 6), recorded()
    branch = subject.prompt(P).generate(6, drafter="forced", drafts={len(P) + 1: [[t[1], (t[2] + 1) % VOCAB, t[3]]]})
    return t, branch.timeline()


def test_a_board_has_the_words_of_the_protocol() -> None:
    """Those of the picture: what is deterministic, what the cache holds when, which tokens are accepted, what is restored. The
    verifier's own T2 counts among the accepted ones; the drafts stay drafts beside the verdicts."""
    _, told = rolled_back()
    drawn = ElementTree.fromstring(told.board(told.frames[:4]))
    texts = [e.text or "" for e in drawn.iter() if e.tag.endswith("text")]
    for words in ("deterministic request", "KV cache after prefill", "KV cache after decode", "KV cache after rollback"):
        assert texts.count(words) == 1
    assert (texts.count("accepted"), texts.count("rejected"), texts.count("tokens")) == (1, 1, 2)
    assert (texts.count("✓"), texts.count("✗"), texts.count("verifier")) == (2, 2, 1)
    assert {"T1 = T1′", "T2 ≠ T2′", "T3", "T4"} <= set(texts)
    caption = told.frames[3].caption
    assert caption.startswith("2 tokens accepted, 1 of them drafted, 2 drafts rejected; sequence and KV cache restored until")
    assert "the final accepted token (T2, whose KV is pending)" in caption and "final accepted" in " ".join(texts)
    verify = [e for e in drawn if e.get("transform")][2]
    crossed = sum(e.get("class") == "cross" for e in verify.iter())
    kinds = [e.get("class") for e in verify.iter() if e.get("height") == str(boards.BOX) and "edge" in e.get("class", "")]
    assert crossed == 4 and kinds == [f"{kind} edge" for kind in (
        "prompt", "accepted", "draft", "draft", "draft", "accepted", "pending", "rejected", "rejected"
    )]  # fmt: skip
    ordinary_one = ordinary(recorded()).timeline().board()
    assert "deterministic request" not in ordinary_one and "request, not certified" in ordinary_one


def test_time_runs_from_left_to_right() -> None:
    """In the order of the steps, whichever are chosen; in further lines where a page ends. The verifier is right of its
    drafts, one row for each token."""
    _, told = rolled_back()
    for board in (told.board(), told.board(told.frames)):
        drawn = ElementTree.fromstring(board)
        panels = [e for e in drawn if e.get("transform")]
        headings = [e.text for panel in panels for e in panel.iter() if e.get("font-size") == "17"]
        places = [tuple(map(float, re.findall(r"[\d.]+", panel.get("transform", "")))) for panel in panels]
        assert headings[:4] == ["Prefill", "Decode", "Verify", "Rollback"] and len({y for _, y in places[:4]}) == 1
        assert sorted(places, key=lambda place: place[::-1]) == places and float(drawn.get("width", "")) <= boards.WIDTH <= 830
    shuffled = told.board([told.frames[i] for i in (3, 0, 2, 1)])
    assert shuffled == told.board(told.frames[:4])


def test_a_board_says_how_many_steps_it_leaves_out() -> None:
    _, told = rolled_back()
    count = len(told.frames)
    assert count > 4 and f"… {count - 4} step" in told.board(told.frames[:4]) and "not drawn" not in told.board(told.frames)
    some = told.board([told.frames[0], told.frames[3]])
    assert some.count("not drawn") == 2 and "… 2 steps not drawn" in some and f"… {count - 4} step" in some
    default = told.first(*Phase)
    left_out = re.findall(r"… (\d+) steps?", told.board())
    assert sum(map(int, left_out)) == count - len([frame for frame in default if frame.phase is not Phase.ACCEPT])


def test_readers_who_cannot_see_a_board_are_told_of_it() -> None:
    """A title with the steps, and a description with every token, its state, and every verdict; each frame of a page, too."""
    t, told = rolled_back()
    drawn = ElementTree.fromstring(told.board(told.frames[:4]))
    title, desc = ([e.text or "" for e in drawn if e.tag.endswith(name)] for name in ("title", "desc"))
    assert title == [f"{told.title}: prefill, decode, verify, rollback"] and drawn.get("role") == "img"
    lines = desc[0].splitlines()
    assert [line.split(":")[0] for line in lines] == ["Prefill", "Decode", "Verify", "Rollback"]
    assert f"T1′ {t[1]} (draft), T2′" in lines[1] and "rejected" not in lines[1]
    assert f"verifier: T1 {t[1]} (accepted), T2 {t[2]} (accepted), T3" in lines[2]
    assert f"T1′ {t[1]} (draft), T2′" in lines[2] and lines[2].count("(draft, rejected)") == 2
    assert lines[2].count("(rejected)") == 2 and "restored until the final accepted token (T2" in lines[3]
    pages = re.findall(r'<svg role="img" aria-label="([^"]*)"', told._repr_html_())
    assert len(pages) == len(told.frames) and [html.unescape(said) for said in pages[:4]] == lines
    assert 'aria-label="3 of 8 pages in use"' in boards.cylinder(Fill(3), 8)


def test_nothing_leaves_the_edges_of_a_board() -> None:
    """With long tokens and further chains: boxes stay in their panel, and above the other requests."""
    chain = tuple(Slot(" a token of many letters", TokenState.DRAFT, i, drafted=True) for i in range(1, 10))
    checks = tuple(Check(slot, Slot(" something longer still", TokenState.ACCEPTED, slot.number)) for slot in chain)
    frames = [
        Frame(Phase.DECODE, "", Fill(4), chain),
        Frame(Phase.VERIFY, "", Fill(4), chain, checks, (chain, chain), others=3),
    ]
    drawn = ElementTree.fromstring(boards.document(frames, 8))
    for panel in (e for e in drawn if e.get("transform")):
        left, top = map(float, re.findall(r"[\d.]+", panel.get("transform", "")))
        boxes = [[float(e.get(name, "")) for name in ("x", "y", "width", "height")] for e in panel.iter() if e.get("rx") == "3"]
        assert all(left + x + wide <= float(drawn.get("width", "")) for x, _, wide, _ in boxes) and len(boxes) > 9
        bars = [top + float(e.get("y", "")) for e in panel.iter() if e.get("class") == "other"]
        assert all(top + y + high < min([float(drawn.get("height", "")), *bars]) for _, y, _, high in boxes)


def test_the_verifiers_tokens_after_the_mismatch_are_crossed_out() -> None:
    """T1 accepted, T2 instead of T2′, T3 and T4 void: what the verifier chose after the rejected drafts."""
    t = continuation(toy(), P, 4)
    wrong = (t[2] + 1) % VOCAB
    verify = next(frame for frame in frames_with([t[1], wrong, t[3]]) if frame.phase is Phase.VERIFY)
    void = [continuation(toy(), [*P, t[0], t[1], wrong, *more], 1)[0] for more in ([], [t[3]])]
    assert [(c.mark, c.verifier.name, c.verifier.kind, c.verifier.text) for c in verify.checks if c.verifier] == [
        ("✓ =", "T1", "accepted", f" {t[1]}"),
        ("✓ ≠", "T2", "pending", f" {t[2]}"),
        ("✗", "T3", "rejected", f" {void[0]}"),
        ("✗", "T4", "rejected", f" {void[1]}"),
    ]


def test_the_free_token_is_checkered() -> None:
    t = continuation(toy(), P, 5)
    verify = next(frame for frame in frames_with(t[1:4]) if frame.phase is Phase.VERIFY)
    last = verify.checks[-1]
    assert (last.mark, last.draft) == ("✓ free", None) and last.verifier is not None and last.verifier.kind == "pending"
    assert 'class="check"' in boards.document([verify], 12)


@pytest.mark.parametrize("text", [".", ":", "-", " ,"])
def test_a_crossed_out_token_can_be_read(text: str) -> None:
    """The cross comes from the corners and leaves the middle free: a line through it would make ÷ of a colon."""
    slot = Slot(text, TokenState.REJECTED, 0, drafted=True)
    drawn = ElementTree.fromstring(boards.document([Frame(Phase.DECODE, "", Fill(1), (slot,))], 2))
    (cross,) = [e for e in drawn.iter() if e.get("class") == "cross"]
    (box,) = [e for e in drawn.iter() if e.get("class") == "rejected edge"]
    x, y, wide, high = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
    strokes = [part.split("l") for part in (cross.get("d") or "").split("M")[1:]]
    starts = {tuple(map(float, start.split())) for start, _ in strokes}
    assert starts == {(round(a, 1), b) for a in (x, x + wide) for b in (y, y + high)}, "the four corners"
    assert all(abs(float(along.split()[0])) <= 0.4 * wide for _, along in strokes), "the middle is free"
    assert all(abs(float(part.split("l")[1].split()[0])) <= boards.CORNER for part in (cross.get("d") or "").split("M")[1:])
    assert "line-through" not in boards.document([Frame(Phase.DECODE, "", Fill(1), (slot,))], 2)


@pytest.mark.parametrize("state", list(TokenState))
def test_only_rejected_tokens_are_crossed_out(state: TokenState) -> None:
    drawn = boards.document([Frame(Phase.DECODE, "", Fill(1), (Slot(" a", state, 0),))], 2)
    assert ('class="cross"' in drawn) == (state is TokenState.REJECTED)


def test_a_token_of_spaces_is_no_blank_tile() -> None:
    slots = (Slot(" ", TokenState.ACCEPTED, 0), Slot("  ", TokenState.DRAFT, 1, drafted=True))
    texts = [e.text for e in ElementTree.fromstring(boards.document([Frame(Phase.DECODE, "", Fill(1), slots)], 3)).iter()]
    assert "␣" in texts and "␣␣" in texts


def test_a_void_token_that_equals_its_draft_is_not_accepted() -> None:
    draft = Slot(" 7", TokenState.REJECTED, 3, drafted=True)
    assert not Check(draft, Slot(" 7", TokenState.REJECTED, 3)).accepted
    assert Check(draft, Slot(" 7", TokenState.ACCEPTED, 3)).accepted


def test_a_rejected_draft_with_the_verifiers_text_is_not_accepted() -> None:
    """Different tokens may read the same, such as the bytes of an emoji: the verdict counts, not the text."""
    subject = recorded()
    t = continuation(toy(), P, 4)
    drafts = {len(P) + 1: [[t[1], (t[2] + 1) % VOCAB, t[3]]]}
    branch = subject.prompt(P).generate(6, drafter="forced", drafts=drafts)
    told = timeline(subject.trace, branch.id, lambda token: "\N{REPLACEMENT CHARACTER}", {branch.id: branch.tokens})
    verify = next(frame for frame in told.frames if frame.phase is Phase.VERIFY)
    assert [check.mark for check in verify.checks] == ["✓ =", "✓ ≠", "✗", "✗"]
    assert [slot.kind for slot in verify.generated if slot.drafted] == ["draft", "draft", "draft"]
    line = str(told).splitlines()[told.frames.index(verify)]
    assert line.count("✓ ≠") == 1 and line.count("✗") == 2


def test_requests_beside_it_are_on_every_frame() -> None:
    """A deterministic one beside two ordinary ones, which look ordinary from the prefill to the end; words in a terminal."""
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5]])
    streams = [branch.stream(30, deterministic=False) for branch in branches[1:]]
    told = branches[0].generate(9, window=4).timeline()
    assert {frame.others for frame in told.frames} == {2}
    assert [frame.ordinary for frame in told.frames[1:]] == [2] * (len(told.frames) - 1)
    for frame in told.frames[1:]:
        still = told.still(frame)
        assert still.count('<rect class="ordinary edge"') == 2 and 'class="other"' not in still
        assert "2 other requests running, 2 of them ordinary" in still
    assert str(told).count("2 other requests running") == len(told.frames)
    for stream in streams:
        stream.close()


def test_deterministic_requests_beside_it_are_grey() -> None:
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5], [2, 2]])
    streams = [branch.stream(30, deterministic=i == 0) for i, branch in enumerate(branches[1:])]
    told = branches[0].generate(9, window=4).timeline()
    assert {(frame.others, frame.ordinary) for frame in told.frames[1:]} == {(3, 2)}
    still = told.still(told.frames[-1])
    assert still.count('class="other"') == 1 and still.count('<rect class="ordinary edge"') == 2
    for stream in streams:
        stream.close()


def test_a_board_shows_ordinary_steps() -> None:
    told = ordinary(recorded()).timeline()
    assert Phase.ORDINARY in {frame.phase for frame in told.frames}
    headings = [e.text for e in ElementTree.fromstring(told.board()).iter() if e.get("font-size") == "17"]
    assert headings == ["Prefill", "Ordinary"]


def test_requests_that_end_or_wait_meanwhile_are_told_of() -> None:
    """The number of requests beside it drops from one frame to the next; the later frame says why."""
    subject = recorded()
    branches = subject.prompts([P, [1, 2], [3, 4, 5], [2, 2]])
    short, long = branches[1].stream(6, deterministic=False), branches[2].stream(30, deterministic=False)
    told = branches[0].generate(9, window=4).timeline()
    first, *later = told.frames
    assert (first.others, first.ended, first.waiting) == (3, 0, 0)
    assert (later[0].others, later[0].ended, later[0].waiting) == (2, 0, 1), "the fourth has only its prompt"
    assert "; 1 has its prompt and waits" in told.still(later[0])
    (drop,) = [i for i in range(2, len(told.frames)) if told.frames[i].others < told.frames[i - 1].others]
    frame = told.frames[drop]
    assert (frame.others, frame.ended, frame.waiting) == (1, 1, 0)
    assert "1 other request running, 1 of them ordinary; 1 has ended" in told.still(frame)
    assert str(told).count("; 1 has ended") == 1 and sum(frame.ended for frame in told.frames) == 1
    for stream in (short, long):
        stream.close()


# ---- numbers on the cylinder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [Fill(400, 2, 3), Fill(2, 1, 400), Fill(1, 1, 1, 1), Fill(300, 0, 1, 9), Fill(7)])
def test_every_band_has_its_number_in_it_or_beside_it(fill: Fill) -> None:
    drawn = ElementTree.fromstring(boards.document([Frame(Phase.DECODE, "", fill)], 410))
    numbers = [e for e in drawn.iter() if e.tag.endswith("text") and (e.text or "").isdigit()]
    assert [int(e.text or 0) for e in numbers] == [count for _, count in fill.by_kind()]
    beside = [float(e.get("y", 0)) for e in numbers if e.get("text-anchor") is None]
    assert all(b - a >= 11 for a, b in pairwise(beside)), "they do not overlap"
    assert all(float(e.get("x", 0)) > 112 for e in numbers if e.get("text-anchor") is None)
