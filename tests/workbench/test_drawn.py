"""What figures draw and what views write: the numbers of the results, read back from the meshes, bars, lines and cells."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replaylens import Engine, ablate, attention, attribution_patching, lens, patch, path_patch, routing, steer
from replaylens.engine.display import short, visible
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.probes.intervals import difference_over_groups
from tests.engine.features.tiny import write
from tests.toy_model import random_model

COIN = "A coin's state is {}. Alice flips. What's the state? A:"
HEADS, TAILS = COIN.format("heads"), COIN.format("tails")
PAIR = (" tails", " heads")


@pytest.fixture(scope="module")
def served() -> Engine:
    return Engine.load("coin-plain")


def panels(figure: Figure) -> list[Axes]:
    """Without colour bars."""
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]


def mesh(axis: Axes) -> tuple[np.ndarray, tuple[float, float]]:
    """The numbers of a heat map, with NaN where nothing is drawn, and the ends of its colours."""
    drawn: Any = axis.collections[0]
    values = np.ma.filled(drawn.get_array().astype(float), np.nan)
    return values.reshape(len(axis.get_yticks()), len(axis.get_xticks())), drawn.get_clim()


def same(drawn: np.ndarray, wanted: Any) -> bool:
    return np.array_equal(drawn, np.asarray(wanted, dtype=drawn.dtype), equal_nan=True)


def texts(ticks: Any) -> list[str]:
    return [tick.get_text() for tick in ticks]


def cells(html: str, caption: str) -> list[list[tuple[float, str]]]:
    """(share of the colour scale in percent, text) of every cell of the table below a caption, from the top down."""
    (table,) = re.findall(rf"<figcaption>{re.escape(caption)}.*?</table>", html, re.S)
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", table.split("<tbody>")[1], re.S)
    cell = re.compile(r'<td class="rl-cell[^>]*--v:(\d+)%[^>]*>([^<]*)<', re.S)
    return [[(float(share), text) for share, text in cell.findall(line)] for line in found]


# Patching


@pytest.mark.parametrize("values", ["effect", "raw"])
def test_a_grid_of_patches(served: Engine, values: Any) -> None:
    """Colours are centred on a patch that changes nothing: effect 0, or the metric of the unpatched prompt."""
    result = patch(served, HEADS, TAILS, metric=PAIR, sites="ST", positions=[4, 7, -1])
    middle = 0.0 if values == "effect" else result.base
    axes = panels(result.plot(values))
    for axis, (site, wanted) in zip(axes, getattr(result, values).items(), strict=True):
        drawn, (low, high) = mesh(axis)
        assert same(drawn, wanted) and (low + high) / 2 == pytest.approx(middle, abs=1e-6)
        everything = torch.cat([each.flatten() for each in getattr(result, values).values()])
        assert high - middle == pytest.approx(float((everything - middle).abs().max()))
        assert axis.get_title() == {"S": "residual stream", "T": "attention output"}[site]
        assert len(texts(axis.get_xticklabels())) == 3 and axis.collections[0].get_cmap().name == "RdBu_r"
    assert result.base != 0 and texts(axes[0].get_yticklabels()) == [str(layer) for layer in range(5)]


def test_a_table_of_patches(served: Engine) -> None:
    """The first layer at the bottom; shades grow with the size of the effect."""
    result = patch(served, HEADS, TAILS, metric=PAIR, positions=[4, -1])
    table = cells(result._repr_html_(), "residual stream")
    wanted = result.effect["S"].flip(0)
    assert [[text for _, text in line] for line in table] == [[f"{value:.2f}" for value in row] for row in wanted.tolist()]
    shares = torch.tensor([[share for share, _ in line] for line in table])
    assert torch.allclose(shares, 100 * wanted.abs() / wanted.abs().max(), atol=0.51)


def test_paths_are_drawn_by_their_senders(served: Engine) -> None:
    result = path_patch(served, HEADS, TAILS, metric=PAIR, receivers=[(2, 0)])
    (axis,) = panels(result.plot())
    assert same(mesh(axis)[0], result.effect["heads"]) and axis.get_xlabel() == "head"
    assert texts(axis.get_xticklabels()) == ["0", "1", "2", "3"] and texts(axis.get_yticklabels()) == ["0", "1"]


# Ablation


PROMPTS = [HEADS, TAILS, "A coin's state is heads. Bob flips. Alice flips. What's the state? A:"]
METRICS = [PAIR, PAIR[::-1], PAIR[::-1]]


def test_ablated_heads(served: Engine) -> None:
    result = ablate(served, PROMPTS, metric=METRICS, heads=[(1, 3), (0, 2), (1, 2)])
    (axis,) = panels(result.plot())
    effect = (result.ablated - result.plain).double().mean(1)
    drawn, (low, high) = mesh(axis)
    wanted = [[float(effect[1]), math.nan], [float(effect[2]), float(effect[0])]]
    assert np.allclose(drawn, wanted, equal_nan=True) and low == -high == pytest.approx(-float(effect.abs().max()))
    assert texts(axis.get_xticklabels()) == ["2", "3"] and texts(axis.get_yticklabels()) == ["0", "1"]
    assert f"{float(result.plain.mean()):.3f} on average over 3 prompts" in result._repr_html_()


def test_ablated_neurons_with_their_intervals(served: Engine) -> None:
    result = ablate(served, PROMPTS, metric=METRICS, neurons=[(2, 5), (3, 17), (2, 111)])
    axis = result.plot().axes[0]
    effects = result.effect.double().numpy()
    order = sorted(range(3), key=lambda unit: -abs(effects[unit].mean()))
    assert texts(axis.get_yticklabels()) == [result.units[unit] for unit in order]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([effects[unit].mean() for unit in order])
    (errors,) = [lines for lines in axis.collections if len(lines.get_segments()) == 3]
    for unit, segment in zip(order, errors.get_segments(), strict=True):
        found = difference_over_groups(effects[unit], np.arange(3), bounded=False)
        assert segment[:, 0].tolist() == pytest.approx([found.low, found.high])
    (line,) = cells(result._repr_html_(), "Effects")
    assert [text for _, text in line] == [f"{effects[unit].mean():.2f}" for unit in order]


# Attribution


def test_attributed_heads_are_sums_over_positions(served: Engine) -> None:
    """Control: means would be other numbers."""
    found = attribution_patching(served, HEADS, TAILS, PAIR, heads=True, compare=True)
    estimate, real = panels(found.plot())
    for axis, values in ((estimate, found.estimate), (real, found.real)):
        assert values is not None
        drawn, (low, high) = mesh(axis)
        assert same(drawn, values.sum(1)) and not np.allclose(drawn, values.mean(1)) and -low == high == abs(drawn).max()


def test_attributed_rows(served: Engine) -> None:
    """The stream that leaves the last block is above those that enter blocks. Each line of panels has its own scale."""
    found = attribution_patching(served, HEADS, TAILS, PAIR, "STC", compare=True)
    axes = panels(found.plot())
    of = {"residual stream": "hook_in", "attention output": "attn.hook_out", "MLP output": "mlp.hook_out"}
    for axis, values in zip(axes, [found.estimate] * 3 + [found.real] * 3, strict=True):
        assert values is not None
        names = [f"blocks.{layer}.{of[axis.get_title()]}" for layer in range(4)]
        names += ["blocks.3.hook_out"] if axis.get_title() == "residual stream" else []
        drawn, (low, high) = mesh(axis)
        assert same(drawn, values[[found.sites.index(name) for name in names]])
        assert -low == high == pytest.approx(float(values.abs().max()))
    assert texts(axes[0].get_xticklabels()) == list(found.words)


# The lens


def test_every_measure_of_the_lens(served: Engine) -> None:
    result = lens(served, HEADS, token=" tails")
    for measure in ("probability", "entropy", "kl", "rank", "logprob"):
        (axis,) = panels(result.plot(measure))  # type: ignore[arg-type]
        drawn, _ = mesh(axis)
        assert np.allclose(drawn, getattr(result, measure).double().numpy(), rtol=1e-6)
        words = [short(visible(cell[0]).strip(), 7) for line in result.top for cell in line]
        assert [text.get_text() for text in axis.texts] == words
    assert torch.equal(result.probability, result.top_logprobs[..., 0].exp())


def test_the_strongest_features_come_first(served: Engine, tmp_path: Path) -> None:
    """In the lens, in its figure and tooltips, and in the view and the figure of feature rows."""
    sae = SparseFeatures.load(write(tmp_path / "a", "topk", d_in=128, hook="blocks.1.hook_resid_post"))
    result = lens(served, HEADS, features=sae)
    (line,) = result.features
    dense = line.rows.dense()
    for position in range(len(result.tokens)):
        top = line.top(position)
        order = dense[position].argsort(descending=True, stable=True)[: len(top)]
        assert [feature for feature, _ in top] == order.tolist() and len(top) == 5
        assert [value for _, value in top] == dense[position][order].tolist()
    (axis,) = panels(result.plot("features"))
    assert same(mesh(axis)[0], dense.max(1).values[None])
    assert [text.get_text() for text in axis.texts] == [str(int(row.argmax())) for row in dense]
    rows = line.rows
    html = rows._repr_html_()
    for position in range(3):
        entries = "  ".join(f"{feature}: {value:.3g}" for feature, value in line.top(position))
        assert entries in html
    strongest = dense.max(0).values.argsort(descending=True, stable=True)
    chosen = rows.strongest(20)
    assert chosen == strongest[: len(chosen)].tolist()
    image = rows.plot().axes[0].images[0]
    assert same(np.asarray(image.get_array()), dense[:, chosen].T) and image.get_clim()[0] == 0.0


# Attention, routing and steering


def test_attention_patterns_are_drawn_as_they_are(served: Engine) -> None:
    """Queries from top to bottom; the summary is the table's numbers, layers by heads."""
    result = attention(served, HEADS, layers=[1, 3])
    (axis,) = panels(result.plot(3, 2))
    seen = torch.ones(15, 15).tril().bool()
    assert same(mesh(axis)[0], result.pattern[1, 2].masked_fill(~seen, math.nan).flip(0))
    summary = panels(result.plot())
    for axis, kind in zip(summary, ("previous", "first", "own", "induction"), strict=False):
        assert np.allclose(mesh(axis)[0], result.frame[kind].to_numpy(dtype=float).reshape(2, 4), equal_nan=True)


def test_routing_shows_the_heaviest_expert() -> None:
    mixture = MixtureConfig(6, 20, Routing(2), layers=(True, False, True))
    result = routing(Engine(random_model(num_layers=3, mixture=mixture)), [(5 * i * i + 2) % 61 for i in range(9)])
    (axis,) = panels(result.plot())
    heaviest, where = result.path.weights.max(-1)
    assert same(mesh(axis)[0], heaviest)
    wanted = result.path.chosen.gather(-1, where[..., None]).flatten().tolist()
    assert [text.get_text() for text in axis.texts] == [str(expert) for expert in wanted]
    (axis,) = panels(result.plot_load())
    counts = [[int((result.path.chosen[at] == expert).sum()) for expert in range(6)] for at in range(2)]
    assert same(mesh(axis)[0], counts)


def test_steering_draws_geometric_means(served: Engine) -> None:
    """Of the perplexities over prompts. Control: their arithmetic mean is another number."""
    result = steer(served, ([HEADS], [TAILS]), [HEADS, TAILS], layers=[1, 3], strengths=[-2, 2], n=3)
    (axis,) = [axis for axis in result.plot().axes if "perplexity" in axis.get_ylabel()]
    lines = {line.get_label(): line for line in axis.get_lines()}
    frame = result.frame
    for layer in (1, 3):
        drawn = lines[f"layer {layer}"]
        own = frame[(frame["layer"] == layer) | (frame["strength"] == 0)]
        for strength, value in zip(drawn.get_xdata(), drawn.get_ydata(), strict=True):
            values = own[own["strength"] == strength]["perplexity"]
            assert len(values) == 2 and value == pytest.approx(math.exp(np.log(values).mean()))
        assert list(drawn.get_xdata()) == [-2, 0, 2]
    apart = frame.groupby(["layer", "strength"], dropna=False)["perplexity"].agg(["mean", lambda x: math.exp(np.log(x).mean())])
    assert not np.allclose(apart.iloc[:, 0], apart.iloc[:, 1])
