"""Every cell of the tables that results and pages show, against loops over the results' own numbers."""

import base64
import gzip
import json
import math
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from scipy import stats

from replaylens.dumps.verify import Verification
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import ORDINARY, TokenState
from replaylens.features.rows import FeatureRows
from replaylens.gradients.attribution import Attribution
from replaylens.probes.intervals import difference_over_groups
from replaylens.probes.report import Report
from replaylens.views import boards, examples, maps, page, report, sections
from replaylens.views import rollouts as rollout_views
from replaylens.views.data import (
    GUESSES,
    Check,
    DrawnPath,
    Fill,
    Frame,
    LensGuess,
    LensLayer,
    Paths,
    Phase,
    Readings,
    Slot,
    Token,
    capacity,
)
from replaylens.views.html import KINDS
from replaylens.views.maps import HeatmapCell
from replaylens.views.rollouts import FILLS, REST, RolloutTree
from replaylens.views.thoughts import DrawnRound, step_facts
from replaylens.workbench.compare import ComparedText, CompareResult
from replaylens.workbench.dla import DlaResult, LogitPart
from replaylens.workbench.drawing import Grid, figure, table
from replaylens.workbench.patch import PatchResult
from tests.devices import swept
from tests.drawings import (
    HIGH,
    LOW,
    MIDDLE,
    SENTENCE,
    TEXTS,
    WORDS,
    ablate_result,
    attention_result,
    attribution,
    change_result,
    curve_result,
    feature_rows,
    fork_result,
    importance_result,
    lens_result,
    numbers,
    patch_result,
    resilience_result,
    routing_result,
    sibling_result,
    sweep_table,
)
from tests.views.checks import meshes

# ---- results --------------------------------------------------------------------------------------------------------------


def lines_of(frame: Any) -> list[tuple[Any, ...]]:
    """The lines of a frame; None for what is missing, numbers to nine digits."""
    plain = lambda x: None if x is pd.NA or x != x else float(f"{x:.9g}") if isinstance(x, float | np.floating) else x  # noqa: E731
    return [tuple(plain(value) for value in line) for line in frame.itertuples(index=False)]


def agree(frame: Any, wanted: list[tuple[Any, ...]]) -> bool:
    """Line by line, in this order; numbers that are not whole to five digits."""
    pairs = [pair for lines in zip(lines_of(frame), wanted, strict=True) for pair in zip(*lines, strict=True)]
    return all(a == (pytest.approx(b, rel=1e-5, abs=1e-6) if isinstance(b, float) else b) for a, b in pairs)


def strongest_first(lines: list[tuple[Any, ...]], at: int) -> list[tuple[Any, ...]]:
    return lines_of(pd.DataFrame(sorted(lines, key=lambda line: -abs(line[at])), dtype=object))


@pytest.mark.parametrize("token", [None, " Paris"])
def test_a_table_of_the_lens(token: str | None) -> None:
    result = lens_result(token)
    assert list(result.frame.columns) == [
        "layer",
        "name",
        "position",
        "token",
        "top",
        "probability",
        "entropy",
        "kl",
        "rank",
        "logprob",
    ]
    wanted = []
    for layer, name in enumerate(result.layers):
        for at, word in enumerate(WORDS):
            known = (layer, name, at, word, word, math.exp(float(result.top_logprobs[layer, at, 0])))
            numbers = (float(getattr(result, each)[layer, at]) for each in ("entropy", "kl"))
            wanted.append((*known, *numbers, (layer * 7 + at) ** 3 * 6, float(result.logprob[layer, at])))
    assert agree(result.frame, wanted)
    about = "rank of the next token" if token is None else "rank of ' Paris'"
    assert repr(result) == f"LensResult(3 layers, 7 tokens, {about})"
    facts = result.grid("entropy").facts
    assert facts is not None and facts(1, 2) == (
        "S1 after ' of'",
        f"{math.exp(float(result.top_logprobs[1, 2, 0])):.3f}\t' of'",
        f"{math.exp(float(result.top_logprobs[1, 2, 1])):.3f}\t' no'",
        f"rank 4374\t{'the next token' if token is None else repr(token)}, log-probability {float(result.logprob[1, 2]):.3f}",
    )


def test_a_table_of_attention() -> None:
    """Means over all queries but the first. Token 1 is at 1, 3 and 5: after it came 2, and then 2 and 4."""
    result = attention_result()
    found = {(line[0], line[1]): line[2:] for line in lines_of(result.frame)}
    assert list(result.frame.columns) == ["layer", "head", "entropy", "previous", "first", "own", "induction"]
    assert list(found) == [(layer, head) for layer in (1, 5) for head in range(3)]
    for (layer, head), line in found.items():
        p = result.pattern[(1, 5).index(layer), head].double().tolist()
        spread = -sum(x * math.log(x) for q in range(1, 7) for x in p[q][: q + 1]) / 6
        sums = [
            sum(p[q][k] for q, k in places) / 6
            for places in ([(q, q - 1) for q in range(1, 7)], [(q, 0) for q in range(1, 7)], [(q, q) for q in range(1, 7)])
        ]
        assert line == pytest.approx((spread, *sums, (p[3][2] + p[5][2] + p[5][4]) / 2))
    assert repr(result) == "AttentionResult(2 layers, 3 heads, 7 tokens)"


def test_tables_of_routing() -> None:
    result = routing_result()
    wanted = []
    for draft, routed in enumerate((result.path, *result.drafts)):
        for layer in range(2):
            for at, word in enumerate(routed.tokens):
                for each in range(2):
                    place = (draft - 1, routed.start + at, word, (0, 2)[layer])
                    wanted.append((*place, int(routed.chosen[layer, at, each]), float(routed.weights[layer, at, each])))
    assert lines_of(result.frame) == lines_of(pd.DataFrame(wanted))
    assert list(result.frame.columns) == ["draft", "position", "token", "layer", "expert", "weight"]
    load = lines_of(result.load)
    assert [line[:3] for line in load] == [
        (0, 0, 1),
        (0, 1, 1),
        (0, 2, 3),
        (0, 3, 1),
        (2, 0, 3),
        (2, 1, 1),
        (2, 2, 1),
        (2, 3, 1),
    ]
    assert [line[3] for line in load] == pytest.approx([0.2, 0.6, 1.7, 0.5, 1.9, 0.1, 0.7, 0.3])
    assert lines_of(result.beside) == [
        (0, 2, 0, WORDS[3], WORDS[2], (0, 2), (2, 3), 1),
        (0, 2, 2, WORDS[3], WORDS[2], (0, 1), (0, 2), 1),
    ]
    late = replace(result, drafts=(replace(result.drafts[0], start=3), replace(result.drafts[0], start=0)))
    assert [line[:2] for line in lines_of(late.beside)] == [(1, 0), (1, 0)], "what lies behind the path has nothing beside it"
    assert repr(result) == "RoutingResult(2 layers, 4 experts, 3 tokens, 1 rejected drafts)"
    facts = result.path.grid("", result.layers, 1).facts
    assert facts is not None and facts(1, 2) == ("layer 2, position 2", "expert 2: 0.7", "expert 0: 0.3")


def test_tables_of_features() -> None:
    rows = feature_rows()
    dense = rows.dense()
    wanted = [(i, i, WORDS[i], f, float(dense[i, f])) for i in range(7) for f in range(6) if dense[i, f]]
    assert lines_of(rows.frame()) == lines_of(pd.DataFrame(wanted)) and len(wanted) == 9
    assert torch.equal(rows.columns([3, 1, 4]), dense[:, [3, 1, 4]]) and torch.equal(rows.columns(4), dense[:, [4]])
    axis = rows.plot([2, 4]).axes[0]
    assert np.array_equal(axis.images[0].get_array(), dense[:, [2, 4]].T.numpy())
    assert [label.get_text() for label in axis.get_yticklabels()] == ["2", "4"] and rows.strongest(2) == [4, 1]
    assert repr(rows) == "FeatureRows(7 rows, 6 features, 1.3 active per row)" and rows.counts.tolist() == [1, 2, 1, 2, 1, 1, 1]
    many = FeatureRows.of_dense([torch.arange(8.0).repeat(201, 1)], 8)
    html = many._repr_html_()
    assert html.count("<tr>") == 1 + 200 and "7: 7  6: 6  5: 5  4: 4  3: 3</td>" in html and "the first 200 shown" in html


def test_a_table_of_patches_and_its_mean() -> None:
    first = patch_result()
    second = replace(first, base=1.0, source=3.0, raw={site: 2 * values for site, values in first.raw.items()}, length=7)
    first = replace(first, length=7)
    effects = [{s: ((r - p.base) / (p.source - p.base)).double() for s, r in p.raw.items()} for p in (first, second)]
    for result, own in ((first, effects[:1]), (PatchResult.mean([first, second]), effects)):
        wanted = []
        for site in ("S", "heads"):
            each, raw = torch.stack([effect[site] for effect in own]), result.raw[site]
            for layer in range(2):
                for at in range(raw.shape[1]):
                    values = each[:, layer, at]
                    place = (site, layer, at if site == "S" else None, WORDS[at] if site == "S" else None)
                    known = (float(raw[layer, at]), float(values.mean()))
                    half = 12.706205 * float(values.std()) / math.sqrt(2) if len(own) > 1 else 0.0
                    ends = (known[1] - half, known[1] + half, 2) if len(own) > 1 else ()
                    wanted.append((*place, *known, *ends, None if site == "S" else at))
        frame = result.frame[[*(name for name in result.frame if name != "head"), "head"]]
        assert agree(frame, sorted(wanted, key=lambda line: -abs(line[5])))
    assert (result.base, result.source) == (1.5, 3.5) and torch.allclose(result.raw["S"], 1.5 * first.raw["S"])
    assert result.columns["S"] == WORDS and "Means over 2 pairs." in result._repr_html_() and "mean of 2 pairs" in repr(result)
    assert "1.500 unpatched, 3.500 in the source prompt." in result._repr_html_()
    other = replace(second, metric="log p", columns={**second.columns, "S": ("x", *WORDS[1:])})
    mixed = PatchResult.mean([first, other])
    assert mixed.metric == "metric" and mixed.columns["S"][1:] == WORDS[1:] and mixed.columns["S"][0] not in ("x", WORDS[0])


def test_a_table_of_ablations() -> None:
    result = ablate_result("neuron")
    effect = (result.ablated - result.plain).double()
    wanted = []
    for i, values in enumerate(effect):
        half = 4.302653 * float(values.std()) / math.sqrt(3)  # Student's t with two degrees of freedom
        middle = float(values.mean())
        wanted.append((result.units[i], "neuron", i // 2, i % 2, middle, middle - half, middle + half, 3))
    assert agree(result.frame, sorted(wanted, key=lambda line: -abs(line[4])))
    single = replace(result, plain=result.plain[:1], ablated=result.ablated[:, :1]).frame
    assert single["low"].isna().all() and single["high"].isna().all() and set(single["prompts"]) == {1}


@pytest.mark.parametrize("heads", [0, 3])
def test_a_table_of_attributions(heads: int) -> None:
    """Also of a mean over pairs, whose interval is Student's with one degree of freedom."""
    one = attribution(heads)
    assert one.real is not None
    two = replace(one, before=3.0, after=5.0, estimate=one.estimate.flip(0), real=one.real.flip(0), certified=False)
    for result, own in ((one, [one]), (Attribution.mean([one, two]), [one, two])):
        wanted = []
        for at in np.ndindex(*one.estimate.shape):
            values = [float(each.estimate[at]) for each in own]
            real, middle = np.mean([float(each.real[at]) for each in own if each.real is not None]), float(np.mean(values))
            half = 12.706205 * float(np.std(values, ddof=1)) / math.sqrt(2) if len(own) > 1 else 0.0
            ends = (middle - half, middle + half) if len(own) > 1 else ()
            wanted.append((one.sites[at[0]], at[1], WORDS[at[1]], *at[2:], middle, float(real), *ends))
        place = 3 + bool(heads)
        assert agree(result.frame, sorted(wanted, key=lambda line: -abs(line[place])))
        errors = [(*line, line[place] - line[place + 1]) for line in wanted]
        assert agree(result.worst(4), sorted(errors, key=lambda line: -abs(line[-1]))[:4])
    assert (result.before, result.after, result.certified, len(result.worst(4))) == (2.0, 3.5, False, 4)
    noisy = replace(one, real=one.real + one.estimate.flip(1))
    assert noisy.real is not None
    r = float(np.corrcoef(one.estimate.flatten(), noisy.real.flatten())[0, 1])
    assert (
        noisy.correlation == pytest.approx(r, abs=1e-6) and 0.1 < abs(r) < 0.99 and f"correlation {r:.2f} with" in repr(noisy)
    )
    size = "2 sites, 7 positions, 3 heads" if heads else "2 sites, 7 positions"
    assert repr(replace(one, real=None)) == f"Attribution(1 to 2; {size})" and f"; 2 pairs, {size}, corr" in repr(result)
    html = noisy._repr_html_()
    assert f"1.000 of the patched prompt, 2.000 of the other one. Correlation of estimates and real effects: {r:.3f}." in html
    assert html.count("<tr") == 1 + 12 and f"<td>{one.frame['estimate'][11]:.4f}</td>" in html
    with pytest.raises(BadRequest, match="Pair 1 of 2 has 6 tokens, and the first has 7"):
        Attribution.mean([one, replace(one, words=WORDS[:6])])


def test_tables_of_a_comparison() -> None:
    texts = tuple(
        ComparedText(
            WORDS[:n],
            *(torch.cat([numbers(n - 1, k).double()[:, 0].abs(), torch.full((1,), math.nan)]) for k in (1, 2)),
            numbers(n, 3).double()[:, 0].abs(),
            {"S": numbers(3, n).double(), "T": numbers(2, n).double() * 3},
        )
        for n in (4, 7)
    )
    result = CompareResult(texts)
    wanted = [
        (
            number,
            at,
            WORDS[at],
            *(float(x[at]) for x in (text.loss_a, text.loss_b, text.kl, text.difference["S"][2], text.difference["T"][1])),
        )
        for number, text in enumerate(texts)
        for at in range(len(text.tokens))
    ]
    assert lines_of(result.frame) == lines_of(pd.DataFrame(wanted))
    assert list(result.frame.columns) == ["text", "position", "token", "loss_a", "loss_b", "kl", "S", "T"]
    for (site, layer, value, low, high), place in zip(
        lines_of(result.layers), [("S", 0), ("S", 1), ("S", 2), ("T", 0), ("T", 1)], strict=True
    ):
        own = [text.difference[site][layer].numpy() for text in texts]
        found = difference_over_groups(np.concatenate(own), np.repeat([0, 1], [4, 7]), bounded=False)
        assert (site, layer) == place and (value, low, high) == pytest.approx((found.value, found.low, found.high))
    a, b = (float(torch.cat([getattr(text, name)[:-1] for text in texts]).mean()) for name in ("loss_a", "loss_b"))
    kl = float(torch.cat([text.kl for text in texts]).mean())
    said = f"2 texts: loss {a:.4g} and {b:.4g} nats per token, KL divergence {kl:.4g}"
    assert repr(result) == f"CompareResult({said})" and f"{said}." in result._repr_html_()
    shown = re.findall(r"<td class=\"rl-cell[^>]*>([^<]*)<", result._repr_html_().split("residual stream")[0])
    first = texts[0]
    assert shown == [f"{x:.2f}" for row in (first.loss_a, first.loss_b, first.kl) for x in row.tolist() if x == x], (
        "from the top down"
    )


def test_tables_of_direct_attribution() -> None:
    """The largest part first; sums over layers of what is no head and no neuron."""
    parts = (
        LogitPart("embedding", "embedding", None, None, 0.5), LogitPart("L0H0", "head", 0, 0, -2.0),
        LogitPart("L0H1", "head", 0, 1, 0.25),
        LogitPart("attention bias 0", "attention bias", 0, None, 0.125), LogitPart("MLP 0", "MLP", 0, None, 1.0),
        LogitPart("L2H0", "head", 2, 0, 2.0), LogitPart("L2H1", "head", 2, 1, -0.75), LogitPart("MLP 2", "MLP", 2, None, -3.0),
        LogitPart("rounding", "rounding", None, None, 0.0),
    )  # fmt: skip
    result = DlaResult("a - b", "head", -1.875, parts)
    assert lines_of(result.frame) == strongest_first([tuple(part) for part in parts], 4)
    assert repr(result) == "DlaResult(a - b: -1.875 in 9 parts, of which rounding 0.0e+00)"
    rest = "embedding 0.50, attention bias of all layers 0.12, MLP of all layers -2.00, rounding 0.00"
    assert f"a - b: -1.875 in all. {rest}." in result._repr_html_()
    made = result.plot()
    assert meshes(made)[0].tolist() == [[-2.0, 0.25], [2.0, -0.75]] and rest in made.get_suptitle().replace("\n", " ")
    assert [label.get_text() for label in made.axes[0].get_yticklabels()] == ["0", "2"]
    (line,) = replace(result, by="neuron")._repr_html_().split("<tbody>")[1:]
    assert re.findall(r"<td class=\"rl-cell[^>]*>([^<]*)<", line) == [f"{value:.2f}" for *_, value in result.frame.itertuples()]


def words_of(figure: Figure) -> list[list[str]]:
    """Title, labels of both axes, tick labels and legend of each panel; of a colour bar, its label."""
    found = []
    for axis in figure.axes:
        legend = [text.get_text() for text in axis.get_legend().get_texts()] if axis.get_legend() else []
        ticks = [label.get_text() for label in (*axis.get_xticklabels(), *axis.get_yticklabels())]
        names = [axis.get_title(), axis.get_xlabel(), axis.get_ylabel()]
        found.append(names[2:] if axis.get_label() == "<colorbar>" else [*names, *ticks, *legend])
    return found


def test_words_of_a_comparison() -> None:
    some = torch.cat([numbers(3), torch.full((1,), math.nan)]).double()
    text = ComparedText(
        WORDS[:4], some, some * 3, numbers(4, 1)[:, 0].double(), {"S": numbers(2, 4).double(), "C": numbers(14, 4).double()}
    )
    made = CompareResult((text, text)).plot(1)
    top, stream, mlp = (axis for axis in made.axes if axis.get_label() != "<colorbar>")
    names, layers = ["The", "capital", "of", r"\$Fr\$ance"], [str(layer) for layer in range(0, 14, 2)]
    words = [[text.strip() for text in panel] for panel in words_of(made)]
    assert words[0][:3] == ["", "", "nats"] and words[0][-2:] == ["loss of b - loss of a, next token", "KL(a || b), next token"]
    assert words[1][:3] == ["residual stream", "", "layer"] and words[1][-2:] == ["0", "1"]
    assert words[2] == ["MLP output", "", "layer", *names, *layers] and words[3:] == [["|b - a| / |a|"]] * 2
    assert made.get_suptitle() == "Text 1 of 2" and top.lines[0].get_ydata() == [0, 0] and top.get_xlim() == stream.get_xlim()
    assert [round(bar.get_x() + bar.get_width() / 2, 6) for bar in top.patches] == [i + x for x in (0.3, 0.7) for i in range(4)]
    assert mlp.get_xticks().tolist() == [0.5, 1.5, 2.5, 3.5] and stream.get_yticks().tolist() == [0.5, 1.5]
    assert [mesh.get_clim()[1] for axis in (stream, mlp) for mesh in axis.collections] == [
        float(x.max()) for x in text.difference.values()
    ]
    heights = [axis.get_position().height for axis in (top, stream, mlp)]
    assert heights[1] < heights[0] < heights[2], "room for every layer"


def test_words_of_direct_attribution() -> None:
    parts = [LogitPart("embedding", "embedding", None, None, 0.5), LogitPart("final bias", "final bias", None, None, -1.0)]
    parts[1:1] = [LogitPart(f"{kind} {i}", kind, i, None, i + 0.5) for i in range(2) for kind in ("attention", "MLP")]
    made = DlaResult("a - b", "layer", 3.5, tuple(parts)).plot()
    names = ["embedding", "0", "1", "final bias"]
    (words,) = words_of(made)
    assert words[:7] == ["", "layer", "part of the logit difference", *names] and words[-3:] == ["attention", "MLP", "others"]
    assert made.get_suptitle() == "Direct logit attribution\na - b: 3.50" and made.axes[0].lines[0].get_ydata() == [0, 0]
    bars = {group.get_label(): [(bar.get_x() + 0.2, bar.get_height()) for bar in group] for group in made.axes[0].containers}
    places = {"attention": [(0.8, 0.5), (1.8, 1.5)], "MLP": [(1.2, 0.5), (2.2, 1.5)], "others": [(0, 0.5), (3, -1.0)]}
    assert {name: np.allclose(bars[name], places[name]) for name in bars} == dict.fromkeys(places, True)
    many = DlaResult("a - b", "neuron", 1.0, tuple(LogitPart(f"L0N{i}", "neuron", 0, i, i + 1.0) for i in range(45))).plot()
    assert [bar.get_width() for bar in many.axes[0].patches] == [45.0 - i for i in range(40)], "the 40 largest"
    assert (
        many.axes[0].get_xlabel() == "part of the logit difference" and many.axes[0].get_yticklabels()[0].get_text() == "L0N44"
    )


def test_a_view_of_attention_has_what_there_is_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    result = attention_result()
    options = re.findall(r'<option value="(\d)">([^<]*)<', result._repr_html_())
    assert options == [(str(i), f"L{layer}H{head}") for i, (layer, head) in enumerate((l, h) for l in (1, 5) for h in range(3))]
    two, one = (replace(result, tokens=WORDS[:n], pattern=result.pattern[..., :n, :n], path=(3, 3)[:n]) for n in (2, 1))
    assert two.frame[["entropy", "previous", "first", "own"]].notna().all(axis=None) and two.frame["induction"].isna().all()
    assert two.frame["previous"].tolist() == pytest.approx(two.pattern[..., 1, 0].flatten().tolist())
    assert "Mean attention by kind of key" in two._repr_html_() and "Mean attention" not in one._repr_html_()
    assert "previous token" in two._repr_html_() and ">induction<" not in two._repr_html_()
    for most, shown in ((result.pattern.numel(), True), (result.pattern.numel() - 1, False)):
        monkeypatch.setattr("replaylens.workbench.attention._MAX_CELLS", most)
        assert ("data-weights" in result._repr_html_()) is shown and "Mean attention by kind" in result._repr_html_()


@pytest.mark.slow
def test_cells_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word in the middle of its cell, white on dark; in a table at most 64 columns, and it says so."""
    values, words = np.array([[0.0, 1.0, math.nan], [2.0, 3.0, 4.0]]), [["a", " b ", "n"], ["  ", "longerword", "e"]]
    grid = Grid("t", ["0", "1"], ["x", "y", "z"], values, words)
    axis = figure([grid], "label", "rows", "columns").axes[0]
    assert [text.get_position() for text in axis.texts] == [(j + 0.5, i + 0.5) for i in range(2) for j in range(3)]
    assert [text.get_text() for text in axis.texts] == ["a", "b", "n", "␣␣", "longer…", "e"]
    assert [text.get_color() for text in axis.texts] == ["white", "white", "black", "white", "black", "black"]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_xticks().tolist()) == ("columns", "rows", [0.5, 1.5, 2.5])
    monkeypatch.setattr("replaylens.workbench.drawing._MAX_WORDS", 6)
    for count, written in ((3, True), (4, False)):
        wide = Grid("t", ["0", "1"], ["x"] * count, np.zeros((2, count)), [["w"] * count] * 2)
        assert bool(figure([wide], "", "", "").axes[0].texts) is written
    for count, note in ((64, ""), (65, " The first 64 of 65 columns.")):
        made = table(Grid("t", ["0", "1"], [str(i) for i in range(count)], np.arange(2 * count).reshape(2, count)), "Note.")
        assert made.note == f"Note.{note}" and len(made.columns) == 64 and made.rows == ("1", "0"), (
            "the first row at the bottom"
        )
        assert [cell.shown for cell in made.cells[0] if cell] == [f"{count + j:.2f}" for j in range(64)]
        assert (made.low, made.high) == (0.0, 2 * count - 1) and made.cells[1][3] == HeatmapCell(3.0, "3.00", ("3",))


@pytest.mark.parametrize(
    ("values", "around", "limits", "shades"),
    [
        ([[1.0, 3.0]], None, (1.0, 3.0), [1.0, 3.0]),
        ([[1.0, 3.0]], 0.0, (-3.0, 3.0), [1.0, 3.0]),
        ([[-5.0, 3.0]], 1.0, (-5.0, 7.0), [6.0, 2.0]),
        ([[math.nan, 2.0]], 2.0, (2.0 - 1e-9, 2.0 + 1e-9), [math.nan, 0.0]),
        ([[math.inf, 2.0]], None, (2.0, 2.0), [math.inf, 2.0]),
    ],
)
def test_scales_of_a_grid(values: Any, around: float | None, limits: tuple[float, float], shades: list[float]) -> None:
    """Around its middle, a figure's scale is as wide on both sides, and a table shades by the distance from it."""
    grid = Grid("t", ["0"], ["x", "y"], np.array(values), around=around)
    assert grid.limits() == limits
    made = table(grid)
    assert [cell.value for cell in made.cells[0] if cell] == pytest.approx(shades, nan_ok=True)
    assert (made.low, made.high) == pytest.approx(limits if around is None else (0.0, limits[1] - around))
    ranks = Grid("t", ["0"], ["x", "y"], np.array([[0, 20]]), ranks=True)
    assert [cell.value for cell in table(ranks).cells[0] if cell] == pytest.approx([0.0, -math.log(21)])
    assert (table(ranks).low, table(ranks).high) == pytest.approx((-math.log(21), 0.0))


def test_tables_of_forks() -> None:
    curve = curve_result()
    wanted = [
        (curve.positions[i], TEXTS[i], curve.outcomes[k], 9, *(float(x[i, k]) for x in (curve.value, curve.low, curve.high)))
        for i in range(3)
        for k in range(2)
    ]
    assert agree(curve.frame, wanted) and repr(curve) == "OutcomeCurve(3 positions, 27 rollouts, tails, no answer)"
    assert list(curve.frame.columns) == ["position", "text", "outcome", "rollouts", "probability", "low", "high"]
    changes = change_result()
    assert (
        agree(changes.frame, [(1, 1, 2, 9, SENTENCE, 0.7, 0.4)])
        and repr(changes) == "ChangePoints(1 of 3 positions, P(any) = 0.800)"
    )
    assert not changes.shown and replace(changes, number=np.array([0.05, 0.95]), level=0.95).shown
    tokens = fork_result()
    survival = [(1 - 0.1, 1.0), (0.9 * 0.4, 0.5), (0.9 * 0.4 * 0.8, 0.5)]
    hazards = [(0.0, 0.1), (0.5, 0.6), (0.0, 0.2)]
    assert agree(tokens.frame, [(i, "abc"[i], *hazards[i], *survival[i], i == 1) for i in range(3)])
    assert repr(tokens) == "ForkingTokens(1 of 3 tokens, threshold 0.2)"
    assert re.findall(r"<td>([^<]*)</td>", tokens._repr_html_()) == ["1", "b", "0.5", "0.6", "0.36", "0.5", "True"], (
        "forks alone"
    )
    found = importance_result()
    ends = [(MIDDLE[i], MIDDLE[i], LOW[i], HIGH[i], (0.001, 0.5, 0.001)[i], (0.001, 0.9, 0.001)[i]) for i in range(3)]
    assert agree(found.frame, [((4, 9, 15)[i], TEXTS[i], *map(float, ends[i]), i != 1, True, 2, 2) for i in range(3)])
    assert repr(found) == "Importance(resampling, tv, 3 units, 2 shown)"
    few = replace(found, possible=np.array([True, False, False]), p_family=np.array([0.05, 0.0501, 1.0]))
    assert repr(few).endswith("3 units, 1 shown; 2 with too few rollouts or outcomes to be shown, whatever they say)")
    back = resilience_result()
    wanted = [
        ((4, 9, 15)[i], TEXTS[i], 9, LOW[i], MIDDLE[i], LOW[i], HIGH[i], (0.1, 0.15, 0.2)[i], 1 / (1 - MIDDLE[i]))
        for i in range(3)
    ]
    assert agree(back.frame, wanted) and repr(back) == "Resilience(3 units, 27 rollouts)"
    siblings = sibling_result()
    apart = [
        (i + 1, 3, *(x[i] for x in (MIDDLE, LOW, HIGH)), *(x[2 - i] for x in (MIDDLE, LOW, HIGH)), LOW[i], LOW[i], False)
        for i in range(3)
    ]
    assert agree(siblings.frame, apart) and repr(siblings) == "SiblingDivergence(3 depths, 0 with a gap between outcomes)"
    names = [
        "depth",
        "pairs",
        "distance",
        "distance_low",
        "distance_high",
        "gap",
        "gap_low",
        "gap_high",
        "p",
        "p_family",
        "shown",
    ]
    assert list(siblings.frame.columns) == names
    assert replace(siblings, p_family=np.array([0.05, 0.0501, 0.0])).shown.tolist() == [True, False, True]


# ---- numbers on the report page -------------------------------------------------------------------------------------------


def test_a_control_is_the_best_of_all_layers() -> None:
    table = sweep_table().assign(verdict="below")
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


def cells_of(html: str) -> list[tuple[str, ...]]:
    """(classes, share of the colour scale, tooltip, text) of every cell of a heat map that has a number."""
    return re.findall(r'<td class="(rl-cell[^"]*)" style="--v:(-?\d+%)"(?: title="([^"]*)")?>([^<]*)', html)


def test_a_heat_map_as_a_table() -> None:
    """Shares of the scale, cut off at its ends; strong from 55 % on; a line above the first control; gaps stay gaps."""
    shown = [
        [HeatmapCell(x, f"{x:g}", ("a\tb", f"{x}") if x else (), marked=x == 3, small="s" * (x == 2)) for x in line]
        for line in ([1, 2, 3.0], [3.2, 3.25, 9])
    ]
    rows = (*shown, [None, HeatmapCell(math.nan, "nan"), HeatmapCell(0, "0")])
    drawn = maps.Heatmap("T", ("x", "y", "c"), ("i", "j", "k"), tuple(map(tuple, rows)), 1.0, 5.0, "a note", controls=1)
    html = str(maps.draw(drawn))
    shares, strong = ["0%", "25%", "50%", "55%", "56%", "100%", "0%"], [False, False, False, False, True, True, False]
    found = cells_of(html)
    assert [cell[1] for cell in found] == shares and ["rl-strong" in cell[0] for cell in found] == strong
    assert ["rl-marked" in cell[0] for cell in found] == [False, False, True, False, False, False, False]
    assert (
        [cell[3] for cell in found] == ["1", "2", "3", "3.2", "3.25", "9", "0"] and found[1][2] == "a\tb\n2" and not found[6][2]
    )
    assert html.count('class="rl-none"') == 2 and "<small>s</small>" in html and '<p class="rl-quiet">a note</p>' in html
    assert re.findall(r"<th>([^<]*)</th>", html) == ["", "i", "j", "k", "x", "y", "c"]
    assert [bool(rule) for rule in re.findall(r'<tr( class="rl-rule")?><th>[xyc]<', html)] == [False, False, True]
    assert [cell[1] for cell in cells_of(str(maps.draw(replace(drawn, low=2.0, high=2.0))))] == ["0%"] * 7
    assert maps.span([2.0, math.nan, -1.0]) == (-1.0, 2.0) and maps.span([math.nan]) == (0.0, 1.0)


def test_the_ends_of_a_colour_scale() -> None:
    assert maps.clipped([*range(101), math.nan]) == (5.0, 95.0) and maps.clipped([math.nan]) == (0.0, 1.0)
    assert maps.clipped([1.0] * 50 + [3.0]) == (1.0, 3.0) and maps.clipped([2.0]) == (2.0, 2.0)


def dumped(root: str, prompt: int, z: dict[int, list[float]], width: int = 5) -> Any:
    """A dumped example with so many prompt tokens, whose rows have the number of their position, and in each layer a number."""
    tokens = [SimpleNamespace(state=TokenState.PROMPT if i < prompt else TokenState.ACCEPTED) for i in range(9)]
    rows = np.array([*z.values()], dtype=np.float32).reshape(len(z), width)
    readings = SimpleNamespace(
        row_of={at: i for i, at in enumerate(z)}, z={name: rows * k for k, name in enumerate(maps.MEASURES, 1)}
    )
    return SimpleNamespace(root=root, readings=readings, tree=SimpleNamespace(trunk=SimpleNamespace(tokens=tokens)))


def test_averages_of_the_lens_by_hand() -> None:
    """Means within roots, then over roots; offsets from the first generated token; a row with NaN does not count."""
    nan = [math.nan] * 5
    examples = [
        dumped("a", 3, {2: [1, 2, 3, 4, 5], 3: [1, 1, 1, 1, 1]}),
        dumped("a", 4, {3: [3, 4, 5, 6, 7], 4: [5, 5, 5, 5, 5], 5: nan}),
        dumped("b", 2, {0: [7, 7, 7, 7, 7], 1: [8, 9, 10, 11, 12], 2: [0, 9, 8, 7, 6]}),
    ]
    empty = SimpleNamespace(readings=None)
    made = maps.averages([*examples, empty]).maps()  # type: ignore[list-item]
    assert [each.title for each in made] == list(maps.MEASURES.values())
    for k, each in enumerate(made, 1):
        assert each.columns == ("-1", "+0") and each.rows == ("output", "S3", "S2", "S1", "S0")
        first = [
            (np.array([2, 3, 4, 5, 6]) + np.array([8, 9, 10, 11, 12])) / 2,
            (np.full(5, 3.0) + np.array([0, 9, 8, 7, 6])) / 2,
        ]
        wanted = k * np.stack(first, 1)[::-1]
        assert np.allclose([[cell.value for cell in line if cell] for line in each.cells], wanted)
        low, high = np.percentile(wanted[1:-1], (5, 95))
        assert (each.low, each.high) == pytest.approx((low, high)) and f"go from {low:.2f} to {high:.2f}" in each.note
        cell = each.cells[0][0]
        assert (
            cell is not None
            and cell.shown == f"{9 * k:.2f}"
            and cell.facts[0] == f"mean\t{9 * k:.4f}"
            and cell.facts[2] == "roots\t2"
        )
    few = maps.averages([dumped("a", 3, {2: [9, 1, -9]}, 3)]).maps()[0]
    assert (few.low, few.high) == pytest.approx(tuple(np.percentile([9, 1, -9], (5, 95)))), "of three layers none is left out"
    assert few.cells[0][0] is not None and few.cells[0][0].facts == ("mean\t-9.0000", "roots\t1")


@pytest.mark.parametrize(
    ("counts", "offsets"),
    [
        ({-3: 9, -1: 10, 0: 10, 1: 2, 2: 1}, [-1, 0, 1]),
        ({-3: 2, -2: 1, -1: 10}, [-3, -1]),
        ({at: 1 for at in range(-60, 60)}, list(range(-1, 39))),
        ({at: 1 for at in range(-60, 0)}, list(range(-40, 0))),
        ({}, []),
    ],
)
def test_columns_that_few_roots_reach_are_left_out(counts: dict[int, int], offsets: list[int]) -> None:
    assert maps._well_filled({at: [np.zeros(1)] * count for at, count in counts.items()}) == offsets


def test_the_lens_of_a_path() -> None:
    """One column per token with Z, the output on top; the prompt's map ends before the row that predicts the answer."""
    chance = lambda i, layer: (i + 1) / 20 + layer / 4  # noqa: E731
    tokens = tuple(
        Token(
            f" t{i}",
            i,
            TokenState.PROMPT if i < 3 else TokenState.ACCEPTED,
            lens=tuple(
                LensLayer(name, (LensGuess(f" g{i}{layer}", chance(i, layer)), LensGuess(" no", 0.01)))
                for layer, name in enumerate(("S0", "S1", "output"))
            ),
        )
        for i in range(6)
    )
    bare = Token(" bare", 6, TokenState.ACCEPTED)
    prompt, answer = maps.example_maps((*tokens, bare))
    assert prompt is not None and answer is not None and prompt.rows == answer.rows == ("output", "S1", "S0")
    assert prompt.columns == (" t0", " t1") and answer.columns == (" t2", " t3", " t4", " t5")
    for drawn, first in ((prompt, 0), (answer, 2)):
        wanted = [[chance(first + at, layer) for at in range(len(drawn.columns))] for layer in (2, 1, 0)]
        assert [[cell.value for cell in line if cell] for line in drawn.cells] == wanted
        assert (
            drawn.low == 0.0
            and drawn.high == pytest.approx(np.percentile(wanted, 95))
            and f"up to {drawn.high:.2f}." in drawn.note
        )
    cell = answer.cells[1][3]
    assert cell is not None and cell.shown == " g51" and cell.facts == ("S1 after position 5", "0.550\t g51", "0.010\t no")
    for some in (tokens[:3], tokens[3:]):
        none, whole = maps.example_maps(some)
        assert none is None and whole is not None and len(whole.columns) == 3
    assert maps.example_maps((bare,)) == (None, None)


def question(what: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "accuracy": 0.5, "low": 0.25, "high": 0.75, **more}


def test_lines_of_a_question_on_the_page() -> None:
    """Columns that some line has; scores with their interval on a scale from 0 to 1, beside the majority."""
    lines = [
        question("a", rows=12, share=0.123456, flag=True, majority=0.4, empty=None),
        question("b", low=-0.5, high=1.5, share=math.nan),
        question("c", low=None), question("d", accuracy=None), question("e", low=0.5, high=0.5, accuracy=1.25),
    ]  # fmt: skip
    html = str(sections._table(lines))
    assert re.findall(r"<th>([^<]*)</th>", html) == ["what", "rows", "share", "flag", "majority", "score, 95 %", ""]
    body = [re.findall(r"<td[^>]*>([^<]*)<", line) for line in html.split("<tbody>")[1].split("<tr>")[1:]]
    assert [line[:6] for line in body] == [
        ["a", "12", "0.1235", "True", "0.4", "0.500 [0.250, 0.750]"], ["b", "", "", "", "", "0.500 [-0.500, 1.500]"],
        ["c", "", "", "", "", "0.500"], ["d", "", "", "", "", ""], ["e", "", "", "", "", "1.250 [0.500, 0.500]"],
    ]  # fmt: skip
    assert re.findall(r"<i style=\"([^\"]*)\"", html) == [
        "left:25.0%;width:50.0%",
        "left:0.0%;width:100.0%",
        "left:50.0%;width:0.4%",
    ]
    assert re.findall(r"<u style=\"([^\"]*)\"", html) == ["left:40.0%"]
    assert re.findall(r"<b style=\"([^\"]*)\"", html) == ["left:50.0%", "left:50.0%", "left:100.0%"]
    many = str(sections._table([question(str(i)) for i in range(203)]))
    assert many.count("<tr>") == 201 and "and 3 more lines" in many and "more lines" not in html
    assert sections._points(["a", "  b", " c", "d"]) == ["a b c", "d"] and sections._points([" a"]) == [" a"]


def test_the_page_opens_with_the_best_cells() -> None:
    """Of each label, estimator and position, beside every control that ran; findings that are shown come first."""
    table = sweep_table().assign(shuffled=math.nan, margin=math.nan)
    lines = [
        {**line, "test": "permutation", "rows": 9, "distinct": 9, "groups": 3, "chance": 0.5}
        for line in table.to_dict("records")
    ]
    zero = [{**lines[0], "known_zero": True, "accuracy": 1.0, "p_family": math.nan}]
    named = [{**line, "label": "later", "layer": math.nan, "p_family": 0.5} for line in lines[:1]]
    found = Report("sweep", [*named, *lines, *zero], {}, {})
    html = str(sections.draw_opening([found, Report("transfer", [], {}, {}, findings=["first", "second"])], "12 examples."))
    assert [re.sub("<[^>]*>", "", each) for each in re.findall(r"(?s)<th\b[^>]*>(.*?)</th>", html)] == [
        "label",
        "position",
        "probe",
        "best at",
        "score, 95 %",
        "majority",
        "bag of tokens",
        "verdict",
    ]
    plain = re.sub(r"</?abbr[^>]*>", "", html.split("<tbody>")[1])
    body = [re.findall(r"<td>([^<]*)</td>", line) for line in plain.split("<tr>")[1:]]
    score = "balanced accuracy {} [0.400, 0.900]"
    assert body == [
        ["later", "a long name of a position", "logistic", "S", score.format("0.550"), "0.500", "0.300", "undecided"],
        ["face", "a long name of a position", "logistic", "S2", score.format("0.750"), "0.500", "0.350", "shown"],
        ["face", "query", "logistic", "S2", score.format("0.750"), "0.500", "0.350", "shown"],
    ]
    told = re.findall(r"<li>([^<]*)</li>", html)
    assert [line.split(":")[:2] for line in told] == [
        ["Shown", " face at a long name of a position (logistic)"],
        ["Undecided", " n would have to be about 130 groups"],
        ["transfer", " first"],
    ]
    assert html.startswith("<p>12 examples.</p>") and "transfer: second" not in html
    many = [{**line, "label": f"l{i}"} for i in range(13) for line in lines[:1]]
    assert str(sections.draw_opening([Report("sweep", many, {}, {})])).count("<tr>") == 1 + 12


def test_the_example_that_a_page_opens_with() -> None:
    """The first that is right and has a rejected branch; failing that, the first of all."""
    of = lambda rejected, correct: SimpleNamespace(num_rejected=rejected, correct=correct)  # noqa: E731
    plain, wrong, told, later, text = of(0, True), of(2, False), of(1, True), of(3, True), of(1, None)
    for some, chosen in (
        ([plain, wrong], plain),
        ([wrong, plain], wrong),
        ([plain, told, later], told),
        ([wrong, text, told], text),
        ([told, plain], told),
    ):
        found: Any = None
        for each in some:
            found = sections.better(found, each)  # type: ignore[arg-type]
        assert found is chosen


# ---- plain data -----------------------------------------------------------------------------------------------------------


def test_readings_of_a_path() -> None:
    """Of the model's output, which comes last; the log-probability of any token among the top k, and None of others."""
    ids, logs = numbers(2, 3, 6).argsort(-1), -numbers(2, 3, 6).abs()
    emitted = torch.tensor([[0.1, 0.2, -0.5], [0.3, 0.4, math.nan]])
    z = {"Z.entropy": numbers(2, 3), "Z.kl": numbers(2, 3), "Z.emitted": emitted, "Z.top_ids": ids, "Z.top_logprobs": logs}
    read = Readings({4: 0, 7: 1}, {name: value.numpy() for name, value in z.items()}, lambda token: f"<{token}>")
    assert [read.has(at) for at in (4, 5, 7)] == [True, False, True] and read.entropy(5) is read.emitted(5) is read.logprob(
        5, 1
    ) is None
    assert read.entropy(7) == float(z["Z.entropy"][1, 2]) and read.emitted(4) == pytest.approx(-0.5) and read.emitted(7) is None
    for place in range(6):
        assert read.logprob(7, int(ids[1, 2, place])) == float(logs[1, 2, place])
    assert read.logprob(7, 99) is None and read.layers(5) == ()
    layers = read.layers(4)
    assert [layer.site for layer in layers] == ["S0", "S1", "output"]
    for layer, found in enumerate(layers):
        shown = [(guess.token, guess.probability) for guess in found.guesses]
        pairs = zip(ids[0, layer].tolist(), logs[0, layer].tolist(), strict=True)
        assert (
            shown == [(f"<{token}>", pytest.approx(math.exp(log))) for token, log in pairs][: len(shown)]
            and len(shown) == GUESSES
        )


def test_paths_in_the_order_of_drawing() -> None:
    """Children with the latest fork first, so that no lines cross; walked in the order of creation, each with its depth."""
    token = lambda at, **more: Token(f"t{at}", at, TokenState.ACCEPTED, **more)  # noqa: E731
    trunk = DrawnPath(0, None, 0, "open", tuple(token(i) for i in range(9)))
    forks = [
        DrawnPath(1, 0, 3, "open", (token(3), token(5))),
        DrawnPath(2, 0, 6, "open", ()),
        DrawnPath(4, 1, 4, "rejected", (token(4),)),
    ]
    forks += [DrawnPath(5, 0, 1, "open", (token(1, why=ORDINARY),))]
    paths = Paths((trunk, *forks))
    assert {branch: [path.branch for path in found] for branch, found in paths.children.items()} == {
        0: [2, 1, 5],
        1: [4],
        2: [],
        4: [],
        5: [],
    }
    assert [(path.branch, depth) for path, depth in paths.walk()] == [(0, 0), (1, 1), (4, 2), (2, 1), (5, 1)]
    assert [path.end for path in paths.paths] == [9, 6, 6, 5, 2]
    assert [kind for kind in KINDS if kind not in Paths((trunk,)).kinds] == ["ordinary"] and paths.kinds == list(KINDS)
    assert [each.standing for each in (token(1, why=ORDINARY), token(1))] == [ORDINARY, "accepted"]


def test_frames_in_words() -> None:
    fill, named = Fill(6, 2, 3, 1, 5), ["prompt", "accepted", "ordinary", "pending", "draft"]
    assert fill.total == 17 and fill.by_kind() == list(zip(named, (6, 2, 1, 5, 3), strict=True))
    assert Fill(0, 1).by_kind() == [("accepted", 1)]
    frames = [Frame(Phase.DECODE, "", Fill(6, 0, 3)), Frame(Phase.VERIFY, "", Fill(6, 2)), Frame(Phase.ACCEPT, "", Fill(6))]
    assert capacity(frames) == 9 and capacity([]) == 0
    for numbers_of, said in {
        (0, 0, 0, 0): "",
        (1, 0, 0, 0): "1 other request running",
        (2, 1, 0, 0): "2 other requests running, 1 of them ordinary",
        (0, 0, 1, 0): "no other requests running; 1 has ended",
        (3, 0, 2, 1): "3 other requests running; 2 have ended; 1 has its prompt and waits",
        (0, 0, 0, 2): "no other requests running; 2 have their prompts and wait",
    }.items():
        assert Frame(Phase.DECODE, "", fill, (), (), (), *numbers_of).beside == said
    slot = lambda state, **more: Slot(" x", state, 3, **more)  # noqa: E731
    assert [slot(TokenState.DRAFT, **more).name for more in ({}, {"drafted": True}, {"label": "Z1"})] == ["T3", "T3′", "Z1"]
    draft, said_yes, said_no = slot(TokenState.DRAFT), slot(TokenState.ACCEPTED), slot(TokenState.PENDING)
    marks = {
        (draft, said_yes): "✓ =",
        (draft, said_no): "✓ ≠",
        (None, said_no): "✓ free",
        (draft, None): "✗",
        (draft, slot(TokenState.REJECTED)): "✗",
    }
    assert {pair: Check(*pair).mark for pair in marks} == marks
    assert [Check(*pair).accepted for pair in marks] == [True, False, False, False, False]


def test_a_page_links_to_its_sections_and_says_what_it_is() -> None:
    sections_of = [page.Section("one", "First", Markup("<p>a</p>")), page.Section("two", "Second", Markup("<p>b</p>"))]
    html = page.assemble("A <title>", ["A sentence.", "the lead"], sections_of, Markup("<i>data</i>"), code="let x = 1;")
    assert (
        re.findall(r'<a href="#(\w+)">(\w+)</a>', html)
        == re.findall(r'<section id="(\w+)"><h2>(\w+)</h2>', html)
        == [("one", "First"), ("two", "Second")]
    )
    assert html.startswith('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">') and '<meta name="viewport"' in html
    assert (
        "<title>A &lt;title&gt;</title>" in html
        and "<h1>A &lt;title&gt;</h1>" in html
        and '<p class="rl-first">A sentence.</p><p class="rl-quiet">the lead</p>' in html
    )
    assert f'<meta name="generator" content="{page.MADE_BY}' in html and html.count("let x = 1;") == 1 and "<i>data</i>" in html
    packed = str(page.packed_blocks(f"f{i}" for i in range(2 * page.PER_BLOCK + 1)))
    assert re.findall(r'data-count="(\d+)"', packed) == [str(page.PER_BLOCK)] * 2 + ["1"]
    assert str(page.packed_blocks(["a"] * page.PER_BLOCK)).count("<script") == 1 and str(page.packed_blocks([])) == ""


# ---- rollouts -------------------------------------------------------------------------------------------------------------

UNITS = [" own", " b", " b", " c", " own", " a", " a", " a"]
ROLLED = RolloutTree(
    texts=(" own", " next", " none"),
    outcomes=("x", "no answer", "y"),
    fork=(0, 0, 0, 0, 0, 0, 0, 0, 1, 1),
    units=(*((unit, " tail") for unit in UNITS), (" else",), ()),
    outcome=(0, 0, 2, 2, 1, 2, 2, 0, 2, 2),
    prompt="P<",
)
"""at the first fork: own twice (x, no answer), a three times (y, y, x), b twice (x, y), c once (y)"""


def test_tiles_of_rollouts_are_as_wide_as_they_are_probable() -> None:
    """The path's own branch first, with a frame; then by count, then by name. Within a tile, heights are shares of outcomes."""
    html = str(ROLLED.draw())
    columns = re.findall(r'<g [^>]*class="rl-column"[^>]*>.*?</g>|<g.*?</g>', html, re.S)
    rects = [dict(re.findall(r'([\w-]+)="([^"]*)"', rect)) for rect in re.findall(r"<rect[^>]*>", columns[0])]
    tiles = [(float(r["x"]), float(r["y"]), float(r["height"]), r["style"]) for r in rects if r["class"] == "rl-tile"]
    width = (1000 - 34) / 3
    left, wide = 34 + 0.08 * width, 0.84 * width
    starts = [left + wide * before / 8 for before in (0, 2, 5, 7)]
    places = [(0, (0, 1), (1, 1)), (1, (0, 1), (2, 2)), (2, (0, 1), (2, 1)), (3, (2, 1))]
    wanted = []
    for at, *parts in places:
        y, size = 174.0, sum(count for _, count in parts)
        for outcome, count in parts:
            wanted.append((starts[at], y, 66 * count / size, f"fill:var(--o{outcome})"))
            y += 66 * count / size
    assert len(tiles) == len(wanted)
    for found, tile in zip(tiles, wanted, strict=True):
        assert found[:3] == pytest.approx(tile[:3], abs=0.051) and found[3] == tile[3]
    (own,) = [r for r in rects if r["class"] == "rl-own"]
    assert (float(own["x"]), float(own["y"]), float(own["height"])) == pytest.approx((left, 174, 66), abs=0.051)
    assert float(own["width"]) == pytest.approx(wide / 4 - 0.6, abs=0.051)
    (hit,) = [r for r in rects if r["class"] == "rl-hit"]
    assert float(hit["width"]) == pytest.approx(width, abs=0.051) and float(hit["height"]) == 174 + 66
    many = RolloutTree((" own",), ("x",), (0,) * 20, tuple((f" u{i:02d}",) for i in range(20)), (0,) * 20)
    assert str(many.draw()).count('class="rl-tile"') == 8 + 1, "the rarest share one"


def test_facts_of_rollouts() -> None:
    html = str(ROLLED.draw())
    tips = [unescape(tip) for tip in re.findall(r'<span class="rl-unit"[^>]*data-tip="([^"]*)"', html, re.S)]
    assert tips == re_tips(html) and tips[0] == "before unit 1:  own\nx\t37.5%\t3\nno answer\t12.5%\t1\ny\t50.0%\t4"
    assert tips[1] == "before unit 2:  next\nx\t0.0%\t0\nno answer\t0.0%\t0\ny\t100.0%\t2" and "x\t0.0%\t0" in tips[2]
    assert re.findall(r"border-color:var\(--o(\d)\)", html) == ["2", "2"], "what most rollouts have; none, no colour"
    assert re.findall(r"<sup>(\d)</sup>([^<]*)", html) == [("1", " own"), ("2", " next"), ("3", " none")]
    assert re.findall(r"<b>([^<]*)</b> (\d+)", html) == [("x", "3"), ("no answer", "1"), ("y", "6")] and "P&lt;" in html
    assert 'data-first="0"' in html and ROLLED.counts().tolist() == [[3, 1, 4], [0, 0, 2], [0, 0, 0]]
    (packed,) = re.findall(r'class="rl-rollout-data">([^<]*)<|<script[^>]*rl-rollout-data[^>]*>([^<]*)<', html)
    data = json.loads(gzip.decompress(base64.b64decode("".join(packed))))
    flat = iter(data["flat"])
    assert [tuple(data["units"][next(flat)] for _ in range(n)) for n in data["lengths"]] == list(ROLLED.units)
    assert (tuple(data["fork"]), tuple(data["outcome"])) == (ROLLED.fork, ROLLED.outcome) and len(set(data["units"])) == len(
        data["units"]
    )
    assert repr(ROLLED) == "RolloutTree(10 rollouts from 3 forks, x, no answer, y)"


def re_tips(html: str) -> list[str]:
    """The same facts are on columns and on units."""
    return [unescape(tip) for tip in re.findall(r'<g [^>]*data-tip="([^"]*)"', html, re.S)]


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ([[5, 5], [5, 5], [9, 1]], 1),
        ([[5, 5], [9, 1], [1, 9], [1, 9]], 1),
        ([[9, 1], [5, 5], [6, 4]], 0),
        ([[0, 0], [4, 4], [4, 4]], 1),
        ([[9, 1], [0, 0], [1, 9]], 0),
        ([], 0),
    ],
)
def test_the_fork_that_is_open_at_first_changes_most(table: list[list[int]], first: int) -> None:
    assert rollout_views._largest_change(np.array(table, dtype=np.int64).reshape(-1, 2)) == first


def test_a_curve_of_outcomes() -> None:
    """Marks in the middle of their columns at the height of their share; bands between Jeffreys' ends; gaps stay gaps."""
    html = str(ROLLED.draw())
    width, height = (1000 - 34) / 3, lambda share: 8 + (150 - 8 - 4) * (1 - share)
    lines = [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r'<polyline points="([^"]*)"', html)
    ]
    shares = [[3 / 8, 0.0], [1 / 8, 0.0], [4 / 8, 1.0]]
    for line, own in zip(lines, shares, strict=True):
        wanted = [(34 + (i + 0.5) * width, height(share)) for i, share in enumerate(own)]
        assert np.allclose(line, wanted, atol=0.051)
    bands = [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r'<polygon points="([^"]*)"', html)
    ]
    low, high = (float(stats.beta.ppf(q, 3.5, 5.5)) for q in (0.025, 0.975))
    none = float(stats.beta.ppf(0.975, 0.5, 2.5))
    x = [34 + 0.5 * width, 34 + 1.5 * width]
    assert np.allclose(
        bands[0], [(x[0], height(high)), (x[1], height(none)), (x[1], height(0)), (x[0], height(low))], atol=0.051
    )
    assert bands[2][1][1] == pytest.approx(height(1.0)), "all of them: up to the end"
    assert html.count("<circle") == 6 and [text for text in re.findall(r'text-anchor="middle"[^>]*>([^<]*)<', html)] == [
        "1",
        "2",
        "3",
    ]
    single = str(rollout_views.curve(["a"], ["x"], *(np.array([[share]]) for share in (0.5, 0.25, 0.75))))
    (points,) = re.findall(r'<polyline points="([^"]*)"', single)
    assert points == f"{517 - 12:.1f},{height(0.5):.1f} {517 + 12:.1f},{height(0.5):.1f}"
    many = str(rollout_views.curve(["a"] * 81, ["x"], *(np.full((81, 1), 0.5) for _ in range(3))))
    assert many.count("<circle") == 0 and re.findall(r'text-anchor="middle"[^>]*>([^<]*)<', many) == [
        str(i) for i in range(1, 82, 4)
    ]
    assert rollout_views.colours(["a", "other", "b"]) == [FILLS[0], REST, FILLS[1]] and set(
        rollout_views.colours(["a"] * 9)[8:]
    ) == {REST}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(True, 1), (False, 0), (None, 0)], "3 examples, 50% answered right, with 1 rejected branch."),
        ([(None, 2), (None, 0)], "2 examples, with 2 rejected branches."),
        ([(True, 0)], "1 examples, 100% answered right, with 0 rejected branches."),
    ],
)
def test_what_was_replayed_in_words(rows: list[tuple[bool | None, int]], said: str) -> None:
    seen = report._Seen()
    seen.rows = [report.TableRow(i, "p", "g", "a", right, rejected) for i, (right, rejected) in enumerate(rows)]
    assert seen.told() == said
    assert "have a tree" not in str(report._explorer(3, 3)) and "The first 2 of 3 examples have a tree." in str(
        report._explorer(3, 2)
    )
    names = ["example", "prompt", "generated", "answer", "right", "rejected"]
    assert re.findall(r"<th[^>]*>(\w+)</th>", str(report._explorer(3, 3))) == names == list(report.TableRow._fields)


@pytest.mark.parametrize(("status", "mark"), [("verified", "✓"), ("mismatch", "✗"), ("other fingerprint", "–")])
def test_a_verdict_on_the_page(status: str, mark: str) -> None:
    html = str(report._verdict(Verification(status, ("a <file>",), None, 2, 3, ("a note",))))
    assert f'data-status="{status}"' in html and f"<b>{mark} {status}: 2 examples replayed, 3 rows compared</b>" in html
    assert re.findall(r'<p class="rl-quiet">([^<]*)</p>', html) == ["a &lt;file&gt;", "a note"]
    assert "Not replayed" in str(report._verdict(None))


# ---- dumped examples ------------------------------------------------------------------------------------------------------


def index_lines() -> pd.DataFrame:
    """An example of two prompt tokens and two answers, and a rejected branch of one token at position 3, in rows 4 to 8."""
    lines = [
        (0, 0, 0, 10, "p", "prompt", math.nan, 0.5, True, "x"), (0, 0, 1, 11, "q", "prompt", -1.0, 0.25, True, None),
        (0, 0, 2, 12, "r", "accepted", -2.0, 0.75, True, "y"), (0, 0, 3, 13, "", "accepted", -3.0, math.nan, True, "z"),
        (1, 3, 3, 14, "no", "rejected", -4.0, 1.5, False, "n"),
    ]  # fmt: skip
    names = ["branch", "fork_position", "position", "token", "text", "token_state", "logprob", "entropy", "accepted", "label"]
    return pd.DataFrame(lines, columns=names).assign(row=range(4, 9), root="the root", correct=False)


def test_an_example_of_a_dump() -> None:
    """Texts, states, numbers and labels of every token; readings of its own rows, if all of Z is there without holes."""
    z = {name: numbers(9, 2).numpy() for name in ("Z.entropy", "Z.kl", "Z.emitted")}
    z |= {"Z.top_ids": numbers(9, 2, 3).argsort(-1).numpy(), "Z.top_logprobs": -numbers(9, 2, 3).abs().numpy()}
    decode = lambda token: f"<{token}>"  # noqa: E731
    found = examples._example(7, "the answer", index_lines(), z, decode, ["label"])
    assert (found.index, found.root, found.prompt, found.generated, found.answer) == (7, "the root", "pq", "r", "the answer")
    assert (found.correct, found.num_rejected, found.tree.title) == (False, 1, "example 7, wrong")
    trunk, other = found.tree.paths
    assert [(t.text, t.position, t.state.value, t.logprob, t.entropy, t.labels) for t in (*trunk.tokens, *other.tokens)] == [
        ("p", 0, "prompt", None, 0.5, (("label", "x"),)), ("q", 1, "prompt", -1.0, 0.25, ()), ("r", 2, "accepted", -2.0,
        0.75, (("label", "y"),)),
        ("<13>", 3, "accepted", -3.0, None, (("label", "z"),)), ("no", 3, "rejected", -4.0, 1.5, (("label", "n"),)),
    ]  # fmt: skip
    assert (other.branch, other.parent, other.fork_position, other.status) == (1, 0, 3, "rejected") and trunk.parent is None
    assert found.readings is not None and found.readings.row_of == {0: 0, 1: 1, 2: 2, 3: 3}
    assert np.array_equal(found.readings.z["Z.kl"], z["Z.kl"][4:8]) and [len(t.lens) for t in trunk.tokens] == [2] * 4
    assert other.tokens[0].lens[1].guesses[0].probability == pytest.approx(math.exp(z["Z.top_logprobs"][8, 1, 0]))
    for some, lines in (
        ({}, index_lines()),
        ({name: z[name] for name in list(z)[:4]}, index_lines()),
        (z, index_lines().drop(index=1)),
    ):
        bare = examples._example(7, "", lines, some, decode, [])
        assert bare.readings is None and not any(token.lens for token in bare.tree.trunk.tokens)
    alone = examples._example(7, "", index_lines()[4:], {}, decode, [])
    assert [(path.branch, len(path.tokens)) for path in alone.tree.paths] == [(0, 0), (1, 1)] and alone.num_rejected == 1
    for correct, title in ((True, "example 7, right"), (None, "example 7")):
        assert examples._example(7, "", index_lines().assign(correct=correct), {}, decode, []).tree.title == title


def test_thoughts_of_a_dump() -> None:
    """A chunk ends at a row with a thought, whose last token ends it; its state is that of all its rows."""
    tokens = np.array([[-1, -1, -1], [5, 6, 2], [-1, -1, -1], [7, 2, -1], [-1, -1, -1]])
    likely = np.array([[math.nan] * 3, [0.5, 0.25, 1.0], [math.nan] * 3, [0.125, 1.0, math.nan], [math.nan] * 3])
    squares = np.array([9.0, 16.0, 0.0, 4.0, 1.0])
    thoughts = examples.DumpedThoughts(
        SimpleNamespace(rejected=True, drafter_settings={}), lambda t: f"<{t}>", tokens, squares, likely
    )  # type: ignore[arg-type]
    path = DrawnPath(0, None, 0, "finished", tuple(Token(text, i, TokenState.ACCEPTED) for i, text in enumerate("abcde")))
    chunks = thoughts._chunks(path, np.arange(5))
    assert [(chunk.tokens, chunk.thought, chunk.state) for chunk in chunks] == [
        (("a", "b"), ("<5>", "<6>", "<EOS>"), 5.0), (("c", "d"), ("<7>", "<EOS>"), 2.0), (("e",), (), 1.0),
    ]  # fmt: skip
    assert chunks[0].facts == step_facts([0.5, 0.25, 1.0]) and chunks[1].facts == step_facts([0.125, 1.0])
    assert (
        thoughts._chunks(path, np.array([0, 2])) == []
        and replace(thoughts, squares=None)._chunks(path, np.arange(2))[0].state is None
    )
    dropped = (chunks[1],)
    assert thoughts._rounds(chunks, {2: dropped}) == [DrawnRound(0, 1, 2, dropped), DrawnRound(1, 2, 2)]
    assert thoughts._rounds(chunks, {}) == [DrawnRound(0, 2, 2)]
    orderly = replace(thoughts, plan=SimpleNamespace(rejected=True, drafter_settings={"thoughts": "sequential"}))  # type: ignore[arg-type]
    assert orderly._rounds(chunks, {}) == [DrawnRound(0, 1, 1), DrawnRound(1, 2, 2)]
    assert replace(thoughts, plan=SimpleNamespace(rejected=False))._rounds(chunks, {}) == []  # type: ignore[arg-type]


def test_slots_that_fit_and_how_wide_they_are() -> None:
    """The last ones, and all that are drafted with the token before them."""
    slots = [Slot("x", TokenState.ACCEPTED, i) for i in range(40)]
    assert [each.number for each in boards._window(slots)] == list(range(40 - boards.MOST_TOKENS, 40))
    assert boards._window(slots[:3]) == slots[:3] and boards._window([]) == []
    drafts = [Slot("y", TokenState.DRAFT, i, drafted=True) for i in range(40, 52)]
    assert [each.number for each in boards._window([*slots, *drafts])] == list(range(39, 52))
    assert boards._width("y" * boards.LONGEST) == boards._width("y" * 99) > boards._width("y" * 9) > boards._width("") == 26.0


@pytest.mark.parametrize("count", swept([1, 2], 1))
def test_the_first_line_of_a_page(count: int) -> None:
    probes = (
        Report("judge", [], {"task": "coin"}, {}, findings=["g"]),
        Report("transfer", [question("a")], {"task": None}, {}, findings=["f"]),
    )
    html = report.ReportPage(probes=probes, results=(attention_result(),) * count, rollouts=(ROLLED,)).html()
    parts = ["judge, 0 lines", "transfer, 1 lines", "1 result" if count == 1 else "2 results", repr(ROLLED)]
    assert f'<p class="rl-quiet">{"; ".join(parts)}</p>' in html and "<title>replaylens: coin, arrays</title>" in html
    assert re.findall(r'<section id="(\w+)"', html) == ["found", "probes", "results", "rollouts", "cite"]
    assert "<title>replaylens: rollouts</title>" in report.ReportPage(rollouts=(ROLLED,)).html()
    assert "<title>mine</title>" in report.ReportPage(rollouts=(ROLLED,), title="mine").html()


def test_a_summary_of_attention_names_layers_and_heads() -> None:
    made = attention_result().plot()
    for axis in made.axes[:4]:
        assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1", "2"]
    assert [label.get_text() for label in made.axes[0].get_yticklabels()] == ["1", "5"]
