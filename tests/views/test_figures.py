"""Every public figure draws the numbers of its result, and no word of it leaves the figure's edges."""

import base64
import math

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from replaylens.probes import report
from replaylens.views import maps, sections
from replaylens.views.rollouts import FILLS, REST
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


def outside(figure: Figure) -> list[float]:
    """How far the words and shapes of a figure reach beyond its left, lower, right and upper edge, in inches."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return [float(-box.x0), float(-box.y0), float(box.x1 - width), float(box.y1 - height)]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_leaves_the_figure(name: str) -> None:
    made = FIGURES[name]()
    assert isinstance(made, Figure) and made.get_facecolor() == (1.0, 1.0, 1.0, 1.0), "readable on a dark page, too"
    assert max(outside(made)) < 0.02
    assert callable(getattr(made, "_repr_png_", None)), "a notebook shows it"


def test_a_label_that_leaves_the_figure_is_found() -> None:
    """Negative control."""
    made = FIGURES["features"]()
    assert made._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    made.axes[-1].set_ylabel(SENTENCE)
    assert max(outside(made)) > 0.5


@pytest.mark.parametrize("name", ["rollouts", "curve", "resilience", "siblings", "sweep curves", "steer"])
def test_no_legend_covers_what_is_drawn(name: str) -> None:
    made = FIGURES[name]()
    made.draw_without_rendering()
    (legend,) = made.legends
    box = legend.get_window_extent()
    assert not [axis for axis in made.axes if axis.get_legend() or box.overlaps(axis.get_window_extent())]


# ---- what is drawn --------------------------------------------------------------------------------------------------------


def meshes(figure: Figure) -> list[np.ndarray]:
    """The numbers of the heat maps, without those of colour bars."""
    found = [mesh for axis in figure.axes for mesh in axis.collections if hasattr(mesh, "get_coordinates") and axis.get_title()]
    return [np.asarray(mesh.get_array()) for mesh in found]


def test_lens_shows_the_token_that_was_asked_about() -> None:
    asked, plain = lens_result(" Paris"), lens_result()
    assert np.array_equal(meshes(asked.plot())[0], asked.logprob.numpy()) and "' Paris'" in asked.plot().axes[0].get_title()
    assert np.array_equal(meshes(plain.plot())[0], plain.probability.numpy())
    for measure in ("entropy", "kl", "rank", "logprob", "probability"):
        assert np.array_equal(meshes(asked.plot(measure))[0], getattr(asked, measure).numpy())
    assert [text.get_text() for text in plain.plot().axes[0].texts][:7] == [
        "The",
        "capital",
        "of",
        r"\$Fr\$an…",
        "is",
        "incomp…",
        "⍽",
    ]
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
    path, draft = meshes(result.plot())
    assert np.array_equal(path, result.path.weights.max(-1).values.numpy()) and np.array_equal(draft, path[:, :1])
    assert [text.get_text() for text in result.plot().axes[0].texts] == ["2", "1", "2", "0", "0", "2"]
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
    result, axis = curve_result(), curve_result().plot().axes[0]
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
        assert sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines) == [(2, 0), (2, 1)]
    assert ["p ≤ 0.05" in text.get_text() for text in made.legends[0].get_texts()] == [True], "the dots are explained"
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


# ---- numbers on the report page -------------------------------------------------------------------------------------------


def test_a_control_is_the_best_of_all_layers() -> None:
    table = sweep_table().assign(shown=False)
    drawn = sections._map("S", table[table["site"] == "S"], 0.0, 1.0)
    assert drawn.rows == ("S2", "S1", "S0", "majority", "bag of tokens") and drawn.controls == 2
    assert [cell.shown for cell in drawn.cells[-1] if cell] == ["0.70", "0.70"], "not the mean, 0.45"
    assert [cell.shown for cell in drawn.cells[0] if cell] == ["0.75", "0.75"]
    assert drawn.cells[0][0] is not None and drawn.cells[0][0].small == "0.40–0.90"


def test_the_interval_of_an_average_knows_how_few_roots_there_are() -> None:
    values = np.array([[1.0, 0.0], [3.0, 0.0], [8.0, 0.0]])
    cell = maps._average(values, 0)
    half = 1.96 * math.sqrt(13) / math.sqrt(3)  # the variance of 1, 3 and 8 is 26 / 2
    assert cell.facts == ("mean\t4.0000", f"95 %\t{4 - half:.4f} to {4 + half:.4f}", "roots\t3")
