"""What figures draw and what views write: the numbers of the results, read back from the meshes, bars, lines and cells."""

import base64
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from replaylens import (
    Edit,
    Engine,
    Sampling,
    ablate,
    attention,
    attribution_patching,
    compare,
    dla,
    lens,
    patch,
    path_patch,
    routing,
    steer,
)
from replaylens.engine.display import short, visible
from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.model.decoder import Decoder, Mlp
from replaylens.engine.model.ops import SequenceOps
from replaylens.features.features import SparseFeatures
from replaylens.probes.intervals import difference_over_groups
from replaylens.probes.probe import LinearProbe
from replaylens.probes.rows import Cell
from replaylens.weights import loading
from replaylens.workbench.dla import DlaResult
from replaylens.workbench.drawing import Grid
from replaylens.workbench.drawing import figure as figure_of
from tests.engine.reference import perturbed
from tests.families import core, hugging_face
from tests.features.tiny import write
from tests.replay.bridges import bridge
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


# Lens


def test_the_embedding_does_not_set_the_colours_of_a_lens(served: Engine) -> None:
    """Its numbers lie far from those of all layers, whose differences would no longer be seen."""
    result = lens(served, HEADS, token=" tails")
    for measure, values in (("logprob", result.logprob.numpy()), ("kl", result.kl.numpy())):
        drawn, ends = mesh(panels(result.plot(measure))[0])  # type: ignore[arg-type]
        assert same(drawn, values) and ends == pytest.approx((values[1:].min(), values[1:].max()))
    assert result.kl[0].max() > ends[1], "control: the embedding lies beyond them"
    assert panels(result.plot())[0].get_title() == "Logit lens: log-probability of ' tails'"


@pytest.mark.parametrize(
    ("first", "ends"), [((2.0, 3.0), "neither"), ((0.0, 3.0), "min"), ((2.0, 9.0), "max"), ((0.0, 9.0), "both")]
)
def test_a_colour_bar_points_beyond_its_ends(first: tuple[float, float], ends: str) -> None:
    """Where the row that does not set them lies outside of them."""
    drawn = figure_of(
        [Grid("one", ["0", "1"], ["a", "b"], np.array([first, (1.0, 4.0)]), off_scale=1)], "value", "layer", "token"
    )
    bar: Any = drawn.axes[0].collections[0].colorbar
    assert bar.extend == ends and drawn.axes[0].collections[0].get_clim() == (1.0, 4.0)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_notebook_starts_with_the_first_head_and_its_last_query(served: Engine) -> None:
    """Without scripts that is all; the script reads the weights of all heads, below and on the diagonal, from the page."""
    result = attention(served, HEADS, layers=[1, 3])
    html = result._repr_html_().split('class="rl-beside"')[0]
    shown = re.findall(r'class="rl-key rl-cell" style="--v:(\d+%)"', html)
    assert shown == [f"{weight:.0%}" for weight in result.pattern[0, 0, -1].tolist()]
    (packed,) = re.findall(r'data-weights="([^"]*)"', html)
    rows, columns = np.tril_indices(15)
    wanted = np.rint(result.pattern.numpy().reshape(8, 15, 15)[:, rows, columns] * 255)
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), dtype=np.uint8).reshape(8, -1), wanted)


def test_the_load_of_an_expert_is_the_sum_over_its_tokens() -> None:
    mixture = MixtureConfig(6, 20, Routing(2), layers=(True, False, True))
    result = routing(Engine(random_model(num_layers=3, mixture=mixture)), [(5 * i * i + 2) % 61 for i in range(9)])
    load = result.load.set_index(["layer", "expert"])
    found = result.frame.groupby(["layer", "expert"])["weight"].agg(["count", "sum"]).reindex(load.index, fill_value=0)
    assert load["tokens"].tolist() == found["count"].tolist() and load["tokens"].max() > 1
    assert np.allclose(load["weight"], found["sum"], rtol=1e-6)


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


# ---- views -----------------------------------------------------------------------------------------------------------
# `steer` and `attention`: what they generate and show is what branches and captures give.


@pytest.mark.slow
def test_steering_is_generating_under_an_edit() -> None:
    served, alone = Engine.load("coin-plain"), Engine.load("coin-plain")
    result = steer(served, ([HEADS], [TAILS]), [HEADS, TAILS], layers=[1, 3], strengths=[-2, 2], n=3)
    streams = alone.sites.per_layer("S")
    rows = [alone.prompt(text, sites=[streams[3]]).activations[streams[3]][-1] for text in (HEADS, TAILS)]
    assert torch.equal(result.vectors[3], rows[0] - rows[1])
    length = len(alone.tokens_of(TAILS))
    edit = Edit(streams[3], "add", result.vectors[3], slice(length - 1, None), factor=2.0)
    line = result.frame.query("prompt == @TAILS and layer == 3 and strength == 2").iloc[0]
    branch = alone.prompt(TAILS, edits=[edit]).generate(3)
    assert line["text"] == alone.text.decode(branch.generated)
    log_p = alone.logits(branch.tokens, positions=slice(length - 1, -1)).log_softmax(-1)
    surprise = -float(log_p[range(len(branch.generated)), branch.generated].double().mean())
    assert line["perplexity"] == pytest.approx(math.exp(surprise), rel=1e-5)
    steered = branch.logits(slice(length - 1, -1)).double().log_softmax(-1)
    apart = (steered.exp() * (steered - log_p.double())).sum(-1).mean()
    assert line["effect"] == pytest.approx(float(apart), rel=1e-4) and line["effect"] > 0
    assert result.frame.query("strength == 0")["effect"].tolist() == [0.0, 0.0]
    plain = result.frame.query("strength == 0")
    assert len(plain) == 2 and plain.iloc[1]["text"] == alone.text.decode(alone.prompt(TAILS).generate(3).generated)
    assert line["text"].split()[0] == "tails." or line["text"] != plain.iloc[1]["text"], "the vector of the other answer wins"
    assert isinstance(result.plot(), Figure) and "continuation" in result._repr_html_()
    served.check_integrity()


def test_a_model_that_thinks_can_be_steered() -> None:
    """Continuations of any length; their perplexity is that of the tokens forced after the prompt."""
    served = Engine.load("coin-thinking")
    result = steer(served, torch.ones(served.config.d_model), [HEADS], layers=[1], strengths=[0.5], n=3)
    assert result.frame["perplexity"].notna().all() and len(result.frame) == 2
    root = served.prompt(HEADS)
    plain = root.fork()[0].generate(3)
    forced = root.fork()[0].force(plain.generated)
    log_p = forced.logits(slice(root.length - 1, -1)).log_softmax(-1)[range(len(plain.generated)), plain.generated]
    assert result.frame["perplexity"][0] == pytest.approx(math.exp(-float(log_p.double().mean())), rel=1e-5)


def test_prompts_given_twice_are_steered_twice() -> None:
    served = Engine.load("coin-plain")
    result = steer(served, torch.ones(128), [HEADS, HEADS], layers=[2], strengths=[1], n=2)
    assert len(result.frame) == 4 and result.frame["text"][0] == result.frame["text"][2]


def test_options_of_steering() -> None:
    served = Engine.load("coin-plain")
    vector = torch.randn(128, generator=torch.Generator().manual_seed(2))
    drawn = steer(served, vector, [HEADS], layers=[2], strengths=[4], n=4, sampling=Sampling(temperature=1.0, seed=3))
    kept = steer(served, vector, [HEADS], layers=[2], strengths=[4], n=4, keep_norm=True, whole_prompt=True)
    assert len(drawn.frame) == len(kept.frame) == 2 and torch.equal(drawn.vectors[2], vector)
    for bad, message in (
        (torch.zeros(3), "shape"),
        (([], [HEADS]), "one or more"),
        ("text", "Give a vector"),
        ((1, 2), "Give a vector"),
    ):
        with pytest.raises(BadRequest, match=message):
            steer(served, bad, [HEADS], layers=[2], strengths=[1])  # type: ignore[arg-type]
    for options, message in (
        (dict(layers=[]), "layers is empty"),
        (dict(layers=2), "Invalid layers"),
        (dict(strengths=[]), "nothing to steer"),
        (dict(prompts=[]), "nothing to steer"),
        (dict(prompts=[3]), "Invalid text=3"),
    ):
        with pytest.raises(BadRequest, match=message):
            steer(served, vector, **{"prompts": [HEADS], "layers": [2], "strengths": [1], **options})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="layers=9"):
        steer(served, vector, [HEADS], layers=[9], strengths=[1])


def test_a_probe_steers_from_its_first_class_to_its_second(served: Engine) -> None:
    """By the distance of their means at strength 1: that is the vector given by itself."""
    weight, means = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).double().numpy(), np.zeros((2, 128))
    means[1, 3] = -5.0
    probe = LinearProbe(weight, np.zeros(1), means, ("a", "b"), "face", "blocks.1.hook_in", Cell("S", 1), "query", "ridge", {})
    found = steer(served, probe, [HEADS], layers=[1], strengths=[1.0], n=2)
    vector = torch.from_numpy(5.0 * weight[0] / np.linalg.norm(weight[0])).float()
    assert torch.allclose(found.vectors[1], vector, atol=1e-6)
    same = steer(served, found.vectors[1], [HEADS], layers=[1], strengths=[1.0], n=2)
    assert found.frame["text"].tolist() == same.frame["text"].tolist() and found.frame["effect"][1] == same.frame["effect"][1]
    with pytest.raises(BadRequest, match="The probe has 3 classes"):
        steer(served, replace(probe, classes=("a", "b", "c")), [HEADS], layers=[1], strengths=[1.0])


def test_whole_prompts_and_kept_norms(served: Engine) -> None:
    """Each option is its edit, alone and with the other."""
    vector = torch.randn(128, generator=torch.Generator().manual_seed(2))
    length, site = len(served.tokens_of(HEADS)), served.sites.per_layer("S")[2]
    for whole in (False, True):
        for keep in (False, True):
            found = steer(
                served, vector, [HEADS], layers=[2], strengths=[8], n=2, keep_norm=keep, whole_prompt=whole
            ).frame.iloc[1]
            where = slice(None if whole else length - 1, None)
            branch = served.prompt(HEADS, edits=[Edit(site, "add", vector, where, factor=8.0, keep_norm=keep)]).generate(2)
            assert found["text"] == served.text.decode(branch.generated)
            steered = branch.logits(slice(length - 1, -1)).double().log_softmax(-1)
            plain = served.logits(branch.tokens, positions=slice(length - 1, -1)).double().log_softmax(-1)
            assert found["effect"] == pytest.approx(float((steered.exp() * (steered - plain)).sum(-1).mean()), rel=1e-4)


def test_refused_steering_leaves_no_branch() -> None:
    served = Engine.load("coin-plain")
    with pytest.raises(BadEdit, match="NaN"):
        steer(served, torch.full((128,), math.nan), [HEADS], layers=[2], strengths=[4], n=4)
    with pytest.raises(BadRequest, match="contrast"):
        steer(served, (HEADS, TAILS), [HEADS], layers=[2], strengths=[4], n=4)  # type: ignore[arg-type]
    assert not served.loop.lanes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_patterns_are_those_of_transformer_lens(name: str) -> None:
    served = Engine(loading.load(hugging_face(name), torch.float32))
    path = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        _, cache = bridge(name).run_with_cache(torch.tensor([path]))
    result = attention(served, path)
    for layer in range(3):
        torch.testing.assert_close(result.pattern[layer], cache[f"blocks.{layer}.attn.hook_pattern"][0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_summary_of_heads() -> None:
    served = Engine.load("coin-plain")
    result = attention(served, HEADS, layers=[1, 3])
    assert result.layers == (1, 3) and result.pattern.shape == (2, 4, 15, 15)
    frame, p = result.frame.set_index(["layer", "head"]), result.pattern[1, 2].double()
    assert frame.loc[(3, 2), "previous"] == pytest.approx(float(p.diagonal(-1).mean()))
    assert frame.loc[(3, 2), "first"] == pytest.approx(float(p[1:, 0].mean()))
    repeats = [(q, k + 1) for q in range(15) for k in range(q) if result.path[q] == result.path[k] and k + 1 < q]
    by_query = {q: sum(float(p[a, b]) for a, b in repeats if a == q) for q, _ in repeats}
    assert frame.loc[(3, 2), "induction"] == pytest.approx(np.mean(list(by_query.values())))
    for path in [5, 9, 6], [5, 5, 6]:  # nothing came after an earlier one but the token itself
        assert attention(served, path).frame["induction"].isna().all()
    assert isinstance(result.plot(3), Figure) and "L3H2" in result._repr_html_()
    with pytest.raises(BadRequest, match="head=7"):
        result.plot(3, 7)
    with pytest.raises(BadRequest, match="has layers 1, 3"):
        result.plot(2, 0)
    with pytest.raises(BadRequest, match="layers is empty"):
        attention(served, HEADS, layers=[])
    single = attention(served, [5])
    with pytest.raises(BadRequest, match="longer text"):
        single.plot()
    assert isinstance(single.plot(0), Figure) and "L0H0" in single._repr_html_()


# ---- compare ---------------------------------------------------------------------------------------------------------
# `compare`, and patches from one model into another: the numbers of both models' own passes.

TEXTS = [COIN.format("heads") + " tails.", "A coin's state is tails. Bob flips. Alice flips. What's the state? A: tails."]


@pytest.fixture(scope="module")
def coins() -> tuple[Engine, Engine]:
    """A model, and the same one with other weights."""
    first = Engine.load("coin-plain")
    return first, Engine(perturbed(loading.load(first.model), 0.02), tokenizer=first.text.tokenizer)


def test_losses_and_divergences_are_those_of_the_logits(coins: tuple[Engine, Engine]) -> None:
    result = compare(*coins, TEXTS, sites="STC")
    for text, found in zip(TEXTS, result.texts, strict=True):
        path = coins[0].tokens_of(text)
        a, b = (engine.logits(path, positions=None).double().log_softmax(-1) for engine in coins)
        for loss, log_p in ((found.loss_a, a), (found.loss_b, b)):
            assert torch.equal(loss[:-1], -log_p[range(len(path) - 1), path[1:]]) and loss[-1].isnan()
        torch.testing.assert_close(found.kl, torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1))
        rows = [engine.prompt(path, sites="STC").activations for engine in coins]
        for letter in "STC":
            for layer, site in enumerate(coins[0].sites.per_layer(letter)):
                mine, other = rows[0][site].double(), rows[1][site].double()
                torch.testing.assert_close(found.difference[letter][layer], (other - mine).norm(dim=1) / mine.norm(dim=1))
    assert all((found.kl > 0).all() and not torch.equal(found.loss_a[:-1], found.loss_b[:-1]) for found in result.texts)


def test_a_model_is_no_different_from_itself(coins: tuple[Engine, Engine]) -> None:
    (found,) = compare(coins[0], coins[0], TEXTS[:1], sites="STC").texts
    assert not found.kl.any() and all(not values.any() for values in found.difference.values())
    assert torch.equal(found.loss_a[:-1], found.loss_b[:-1])


def test_tables_and_intervals(coins: tuple[Engine, Engine]) -> None:
    result = compare(*coins, TEXTS, sites="ST")
    change = [(text.loss_b - text.loss_a)[:-1] for text in result.texts]
    groups = np.repeat([0, 1], [len(each) for each in change])
    assert result.loss_change == difference_over_groups(torch.cat(change).numpy(), groups, bounded=False)
    line = result.layers.query("site == 'T' and layer == 2").iloc[0]
    assert line["difference"] == pytest.approx(float(torch.cat([text.difference["T"][2] for text in result.texts]).mean()))
    assert line["low"] < line["difference"] < line["high"] and len(result.layers) == 5 + 4
    frame = result.frame
    assert len(frame) == sum(len(text.tokens) for text in result.texts) and frame["kl"][3] == float(result.texts[0].kl[3])
    for site in "ST":  # those of the last layer
        assert frame[site].tolist() == torch.cat([text.difference[site][-1] for text in result.texts]).tolist()
    assert np.isnan(compare(*coins, TEXTS[:1]).loss_change.low) and f"{frame['loss_a'].mean():.4g} and" in repr(result)


def test_the_figure_shows_them(coins: tuple[Engine, Engine]) -> None:
    result = compare(*coins, TEXTS, sites="SC")
    figure, chosen = result.plot(1), result.texts[1]
    top, stream, mlp = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    bars, count = [bar.get_height() for bar in top.patches], len(chosen.tokens)
    assert np.array_equal(bars[:count], (chosen.loss_b - chosen.loss_a).numpy(), equal_nan=True)
    assert np.array_equal(bars[count:], chosen.kl.numpy())
    for axis, letter in ((stream, "S"), (mlp, "C")):
        mesh: Any = axis.collections[0]
        assert np.array_equal(np.asarray(mesh.get_array()), chosen.difference[letter].numpy()) and mesh.get_clim()[0] == 0.0
    assert [tick.get_text() for tick in mlp.get_xticklabels()] == [visible(token) for token in chosen.tokens]
    assert f"{float(result.texts[0].kl[2]):.2f}" in result._repr_html_() and "MLP output" in result._repr_html_()


def test_activations_of_another_model_are_patched_in(coins: tuple[Engine, Engine]) -> None:
    """Each cell is an edit made alone, with the other model's row. Control: the model's own rows change nothing."""
    a, b = coins
    text = COIN.format("heads")
    result = patch(b, text, text, metric=PAIR, sites="ST", source=a, positions=[4, -1])
    rows = a.prompt(text, sites="ST").activations
    for letter, layer, at in (("S", 1, 4), ("T", 2, 14), ("S", 4, 14)):
        site = a.sites.per_layer(letter)[layer]
        logits = b.logits(text, edits=[Edit(site, "set", rows[site][at], positions=at)], tokens=PAIR)
        assert torch.equal(result.raw[letter][layer, [4, 14].index(at)], logits[0] - logits[1])
    own, other = (float(x[0] - x[1]) for x in (engine.logits(text, tokens=PAIR) for engine in (b, a)))
    assert (result.base, result.source) == (own, other) and result.raw["S"][0, 0] != result.base
    heads = patch(b, text, text, metric=PAIR, heads=[(1, 3)], source=a)
    z = a.prompt(text, sites=["blocks.1.attn.hook_z"]).activations["blocks.1.attn.hook_z"][:, [3]]
    edit = Edit("blocks.1.attn.hook_z", "set", z, positions=range(15), heads=[3])
    logits = b.logits(text, edits=[edit], tokens=PAIR)
    assert torch.equal(heads.raw["heads"][0, 0], logits[0] - logits[1])
    with pytest.raises(BadRequest, match="nothing to carry over"):
        patch(b, text, text, metric=PAIR, source=b)


def test_colours_start_at_zero_where_nothing_differs(coins: tuple[Engine, Engine]) -> None:
    found = compare(coins[0], coins[0], TEXTS[:1], sites="ST")
    meshes = [each for axis in found.plot().axes for each in axis.collections if each.get_array() is not None]
    drawn = [mesh for mesh in meshes if mesh.get_array().size == found.texts[0].difference["S"].numel()]
    assert drawn and all(mesh.get_clim()[0] == 0 < mesh.get_clim()[1] for mesh in drawn)


def test_a_model_without_a_tokenizer_takes_the_tokens_of_the_other(coins: tuple[Engine, Engine]) -> None:
    """As a model in memory has none. The control: two without one cannot read a text."""
    named, bare = coins[0], Engine.load(coins[0].model)
    for pair in ((named, bare), (bare, named)):
        assert compare(*pair, TEXTS[:1]).digest == compare(named, named, TEXTS[:1]).digest
    with pytest.raises(BadRequest, match="has no tokenizer"):
        compare(bare, bare, TEXTS[:1])


def test_models_that_cannot_be_compared_are_refused(coins: tuple[Engine, Engine]) -> None:
    coin, text = coins[0], TEXTS[0]
    ids = coin.tokens_of(text)
    wide = Engine(random_model(vocab_size=coin.config.vocab_size))
    small, llama = Engine(random_model()), Engine(loading.load(hugging_face("llama"), torch.float32))
    words = Engine(coin.model, tokenizer=Other(coin.text.tokenizer))
    for calls, message in (
        (lambda: compare(coin, small, [ids]), r"vocabularies of \d+ and \d+ tokens"),
        (lambda: compare(coin, words, [text]), "tokenizers differ, first in token 5"),
        (lambda: compare(coin, wide, [ids]), r"\(layers, d_model\) \(4, 128\) and .* sites=''"),
        (lambda: compare(coin, coin, []), "No texts"),
        (lambda: compare(coin, coin, [ids[:1]]), "Text 0 has one token"),
        (lambda: compare(coin, coin, [text], sites="Z"), "letters among S, T and C"),
        (lambda: compare(coin, 3, [text]), "Invalid engine_b=3"),  # type: ignore[arg-type]
        (lambda: patch(coin, ids, ids, metric=(5, 6), source=wide), r"blocks\.0\.hook_in has rows of shape \(128,\)"),
        (lambda: patch(coin, text, text, metric=PAIR, source=llama), "vocabularies"),
        (lambda: patch(coin, text, text, metric=PAIR, source=words), "tokenizers differ"),
        (lambda: patch(coin, text, text, metric=PAIR, source="b"), "Invalid source='b'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequest, match=message):
            calls()
    assert not compare(coin, wide, [ids], sites="").texts[0].difference and not coin.loop.lanes


class Other:
    """A tokenizer that names one token otherwise."""

    def __init__(self, known: Any) -> None:
        self.known = known

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known, name)

    def decode(self, ids: Any) -> str:
        return "another" if list(ids) == [5] else str(self.known.decode(ids))


# ---- dla -------------------------------------------------------------------------------------------------------------
# `dla`: its parts are those of a float64 reference, and sum to the logit difference.

PATH = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
PAIR_OF_DLA = (11, 40)
CLOSE = 5e-6
COIN_OF_DLA = "A coin's state is heads. Alice flips. What's the state? A:"
FAMILIES = {
    "gpt2": "LayerNorm with bias, learned positions",
    "llama3": "RMSNorm, biases in attention and MLP",
    "gemma": "(1 + w) norm, scaled embedding",
    "gemma2": "sandwich norms, softcap",
    "gemma3": "sandwich norms",
    "olmo2": "norms after products only",
    "neox": "parallel blocks",
    "phi-plain": "parallel blocks, one norm, biased unembedding",
    "cohere": "LayerNorm without bias, scaled logits",
    "granite": "scaled writes",
    "minicpm3": "latent attention",
}


class Values:
    """A tap that keeps the last row of every site."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return not site.endswith(("hook_pattern", "hook_attn_scores"))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.rows[site] = value[-1]
        return value


class Reference:
    """The model in float64, and every part as a vector that goes forward through the norms, their scales frozen."""

    def __init__(self, model: Decoder) -> None:
        self.model, tap, ops = model.double(), Values(), SequenceOps([len(PATH)])
        with torch.no_grad():
            stream = model(torch.tensor(PATH), torch.arange(len(PATH)), ops, tap)
            model.logits(stream[-1:], ops, tap)
        self.rows, self.stream = tap.rows, stream[-1]
        self.total = self.of_logits(tap.rows["unembed.hook_out"])

    def of_logits(self, logits: Tensor) -> float:
        return float(logits[PAIR_OF_DLA[0]] - logits[PAIR_OF_DLA[1]]) * self.model.config.logit_scale

    def through(self, norm: Any, part: Tensor, row: Tensor) -> Tensor:
        """Without the norm's bias."""
        middle = (lambda x: x - x.mean()) if norm.kind == "layer" else (lambda x: x)
        return middle(part) / (middle(row).square().mean() + norm.eps).sqrt() * norm.weight

    @torch.no_grad()
    def value(self, part: Tensor) -> float:
        """Of a vector that is added to the stream."""
        return self.of_logits(self.model.unembedding @ self.through(self.model.ln_final, part, self.stream))

    @torch.no_grad()
    def written(self, layer: int, mlp: bool, part: Tensor) -> float:
        """Of a vector that attention or MLP computes, before its post-norm."""
        block: Any = self.model.blocks[layer]
        post, (site, _) = (block.ln2_post, block.mlp_sites) if mlp else (block.ln1_post, block.attn_sites)
        part = part * block.scale
        return self.value(part if post is None else self.through(post, part, self.rows[site]))


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) < CLOSE


@pytest.mark.parametrize("name", core(FAMILIES))
def test_parts_are_those_of_a_float64_reference(name: str) -> None:
    theirs = hugging_face(name)
    served, reference = Engine(loading.load(theirs, torch.float32), page_size=4), Reference(loading.load(theirs))
    found = {by: dla(served, PATH, PAIR_OF_DLA, by=by) for by in ("layer", "head", "neuron")}  # type: ignore[arg-type]
    for result in found.values():
        assert close(result.total, reference.total) and abs(result.total) > 100 * CLOSE
        assert sum(part.value for part in result.parts) == pytest.approx(result.total, abs=1e-12)
        assert result.parts[-1].name == "rounding" and abs(result.parts[-1].value) < CLOSE
    for part in found["layer"].parts:
        if part.kind in ("embedding", "positions"):
            site = {"embedding": "embed", "positions": "pos_embed"}[part.kind] + ".hook_out"
            assert close(part.value, reference.value(reference.rows[site]))
        if part.layer is not None:
            block: Any = reference.model.blocks[part.layer]
            post, sites = (block.ln2_post, block.mlp_sites) if part.kind == "MLP" else (block.ln1_post, block.attn_sites)
            assert close(part.value, reference.value(reference.rows[sites[0] if post is None else sites[1][2]]))
    heads = [part for part in found["head"].parts if part.kind == "head"]
    assert len(heads) == served.config.num_layers * served.config.num_heads
    for part in heads:
        block = reference.model.blocks[part.layer]
        own = block.attn.o.weight.view(block.attn.heads, block.attn.width, -1)[part.number]
        assert close(part.value, reference.written(part.layer, False, reference.rows[block.attn.z_site][part.number] @ own))
    neurons = [part for part in found["neuron"].parts if part.kind == "neuron"]
    assert len(neurons) == served.config.num_layers * served.config.d_mlp
    for part in neurons[::17]:
        block = reference.model.blocks[part.layer]
        assert isinstance(block.mlp, Mlp)
        written = reference.rows[block.mlp.post_site][part.number] * block.mlp.down.weight[part.number]
        assert close(part.value, reference.written(part.layer, True, written))


def test_the_final_bias_is_that_of_norm_and_unembedding() -> None:
    """Control: without the norm's bias, the number is another."""
    theirs = hugging_face("phi-plain")
    model = loading.load(theirs).double()
    assert model.unembed_bias is not None and model.ln_final.bias is not None
    part = dla(Engine(loading.load(theirs, torch.float32)), PATH, PAIR_OF_DLA).parts[-2]
    logits = model.unembedding @ model.ln_final.bias
    own, other = (
        logits[PAIR_OF_DLA[0]] - logits[PAIR_OF_DLA[1]],
        model.unembed_bias[PAIR_OF_DLA[0]] - model.unembed_bias[PAIR_OF_DLA[1]],
    )
    assert part.name == "final bias" and close(part.value, float(own + other)) and not close(part.value, float(other))


def test_a_softcap_is_named() -> None:
    """What is split is the difference before it, which is another than the model's. Control: a model without one."""
    served = Engine(loading.load(hugging_face("gemma2"), torch.float32))
    result, logits = dla(served, PATH, PAIR_OF_DLA), served.logits(PATH, tokens=PAIR_OF_DLA)
    assert "before the softcap" in result.metric and not close(result.total, float(logits[0] - logits[1]))
    plain = Engine(loading.load(hugging_face("llama"), torch.float32))
    logits = plain.logits(PATH, tokens=PAIR_OF_DLA)
    assert (
        dla(plain, PATH, PAIR_OF_DLA).total == float(logits[0] - logits[1])
        and "softcap" not in dla(plain, PATH, PAIR_OF_DLA).metric
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v2-lite"])
def test_mixtures_split_into_layers_and_heads(name: str) -> None:
    served = Engine(loading.load(hugging_face(name), torch.float32))
    for by in ("layer", "head"):
        result = dla(served, PATH, PAIR_OF_DLA, by=by)  # type: ignore[arg-type]
        assert (
            abs(result.parts[-1].value) < CLOSE and sum(part.kind == "MLP" for part in result.parts) == served.config.num_layers
        )
    with pytest.raises(BadRequest, match="mixture of experts"):
        dla(served, PATH, PAIR_OF_DLA, by="neuron")


def test_what_cannot_be_split_is_refused() -> None:
    served = Engine.load("coin-plain")
    for metric, by, message in (
        (" tails", "layer", "give a pair of tokens"),
        (lambda logits: logits[0], "layer", "give a pair of tokens"),
        ((" tails", " heads", " flips"), "layer", r"Only logit differences are sums over parts.*give a pair of tokens"),
        ((" tails", " heads"), "expert", "Known: layer, head, neuron"),
    ):
        with pytest.raises(BadRequest, match=message):
            dla(served, COIN_OF_DLA, metric, by=by)  # type: ignore[arg-type]
    for prompt, message in (
        ([COIN_OF_DLA, COIN_OF_DLA], "2 prompts.*dla takes one at a time"),
        (served.prompt(COIN_OF_DLA), r"Give branch\.tokens"),
    ):
        with pytest.raises(BadRequest, match=message):
            dla(served, prompt, (" tails", " heads"))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="Thinking-States"):
        dla(Engine.load("coin-thinking"), COIN_OF_DLA, (" tails", " heads"))


# What is drawn


def of_coin(by: Any) -> DlaResult:
    return dla(Engine.load("coin-plain"), COIN_OF_DLA, (" tails", " heads"), by=by)


def test_the_table_names_the_largest_part_first() -> None:
    result = of_coin("head")
    values = result.frame["value"]
    assert (values.abs().diff().dropna() <= 0).all() and len(values) == len(result.parts)
    first = max(result.parts, key=lambda part: abs(part.value))
    assert result.frame.iloc[0]["part"] == first.name and f"{result.total:.4g}" in repr(result)


def test_figures_show_the_parts() -> None:
    by_layer = of_coin("layer")
    axis = by_layer.plot().axes[0]
    names, drawn = [tick.get_text() for tick in axis.get_xticklabels()], {}
    for bar in axis.patches:
        drawn[round(bar.get_x() + bar.get_width() / 2, 6)] = bar.get_height()
    shifts = {"attention": -0.2, "MLP": 0.2}
    for part in by_layer.parts:
        at = names.index(part.name if part.layer is None else str(part.layer)) + shifts.get(part.kind, 0.0)
        assert drawn[round(at, 6)] == part.value
    by_head = of_coin("head")
    picture = by_head.plot()
    mesh = picture.axes[0].collections[0]
    wanted = np.array([part.value for part in by_head.parts if part.kind == "head"]).reshape(4, 4)
    assert np.array_equal(mesh.get_array(), wanted) and mesh.get_clim() == (-abs(wanted).max(), abs(wanted).max())
    mlps = sum(part.value for part in by_head.parts if part.kind == "MLP")
    assert f"MLP of all layers {mlps:.2f}" in picture.get_suptitle() and f"{mlps:.2f}" in by_head._repr_html_()
    by_neuron = of_coin("neuron")
    axis = by_neuron.plot().axes[0]
    top = by_neuron.frame.head(40)
    assert [bar.get_width() for bar in axis.patches] == list(top["value"])
    assert [tick.get_text() for tick in axis.get_yticklabels()] == list(top["part"])
    assert str(top["part"][0]) in by_neuron._repr_html_()
