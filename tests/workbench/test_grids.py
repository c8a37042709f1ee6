"""`patch`, `ablate` and `lens`: the numbers of hook functions, and in every cell the bits of its edit made alone."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens import (
    Edit,
    Engine,
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
from replaylens.engine.errors import BadRequest, Caveat, UnknownPromptWord
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.passes.lens import TunedLens, _ranks, unembed_hash
from replaylens.features.features import SparseFeatures
from replaylens.probes.intervals import difference_over_groups
from replaylens.views.sections import Reportable
from replaylens.weights import loading
from tests.devices import covering
from tests.families import hugging_face
from tests.features.tiny import write
from tests.replay.bridges import bridge
from tests.toy_model import random_model

CLEAN = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
CORRUPT = [*CLEAN[:3], *torch.randint(3, 97, (2,), generator=torch.Generator().manual_seed(8)).tolist(), *CLEAN[5:]]
PAIR = (11, 40)
COIN = "A coin's state is {}. Alice flips. What's the state? A:"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Any]]:
    name = request.param
    yield Engine(loading.load(hugging_face(name), torch.float32), page_size=4), bridge(name)


def difference(logits: Tensor) -> float:
    return float(logits[0, -1, PAIR[0]] - logits[0, -1, PAIR[1]])


def hooked(model: Any, path: list[int], site: str, change: Any) -> float:
    with torch.no_grad():
        return difference(model.run_with_hooks(torch.tensor([path]), fwd_hooks=[(site, change)]))


SITES = {"S": "hook_resid_pre", "T": "hook_attn_out", "C": "hook_mlp_out"}


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_patching_is_what_transformer_lens_hooks_do(family: tuple[Engine, Any], direction: Any) -> None:
    served, model = family
    result = patch(served, CLEAN, CORRUPT, metric=PAIR, sites="STC", direction=direction)
    into, origin = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    with torch.no_grad():
        logits, cache = model.run_with_cache(torch.tensor([origin]))
    assert result.source == pytest.approx(difference(logits), rel=1e-4, abs=1e-4)
    for letter, own in SITES.items():
        for layer in range(3):
            for position in (3, 8):
                name = f"blocks.{layer}.{own}"

                def put(value: Tensor, hook: Any, name: str = name, at: int = position) -> Tensor:
                    value = value.clone()
                    value[:, at] = cache[name][:, at]
                    return value

                theirs = hooked(model, into, name, put)
                assert float(result.raw[letter][layer, position]) == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_heads_are_what_transformer_lens_hooks_do(family: tuple[Engine, Any]) -> None:
    served, model = family
    patched = patch(served, CLEAN, CORRUPT, metric=PAIR, heads=True)
    ablated = ablate(served, [CLEAN], metric=PAIR, heads=True)
    with torch.no_grad():
        _, cache = model.run_with_cache(torch.tensor([CLEAN]))
    for layer, head in ((0, 1), (2, 3)):
        name = f"blocks.{layer}.attn.hook_z"

        def put(value: Tensor, hook: Any, name: str = name, head: int = head) -> Tensor:
            value = value.clone()
            value[:, :, head] = cache[name][:, :, head]
            return value

        def zero(value: Tensor, hook: Any, head: int = head) -> Tensor:
            value = value.clone()
            value[:, :, head] = 0
            return value

        ours = float(patched.raw["heads"][layer, head])
        assert ours == pytest.approx(hooked(model, CORRUPT, name, put), rel=1e-4, abs=1e-4)
        unit = ablated.units.index(f"L{layer}H{head}")
        assert float(ablated.ablated[unit, 0]) == pytest.approx(hooked(model, CLEAN, name, zero), rel=1e-4, abs=1e-4)


def test_a_cell_has_the_bits_of_its_edit_alone() -> None:
    """Control: neighbouring cells differ."""
    served, alone = Engine.load("coin-plain"), Engine.load("coin-plain")
    clean, corrupt = COIN.format("heads"), COIN.format("tails")
    tokens = (" tails", " heads")
    result = patch(served, clean, corrupt, metric=tokens, sites="ST")
    heads = patch(served, clean, corrupt, metric=tokens, heads=[1, 3], positions=slice(4, 9))
    source = alone.prompt(clean, sites=["S", "T", "blocks.1.attn.hook_z"]).activations
    for layer, position in ((0, 4), (1, 7), (3, 14)):
        site = f"blocks.{layer}.hook_in"
        logits = alone.logits(corrupt, edits=[Edit(site, "set", source[site][position], positions=position)], tokens=tokens)
        assert torch.equal(result.raw["S"][layer, position], logits[0] - logits[1])
    at = list(range(4, 9))
    edit = Edit("blocks.1.attn.hook_z", "set", source["blocks.1.attn.hook_z"][at], positions=at, heads=[3])
    logits = alone.logits(corrupt, edits=[edit], tokens=tokens)
    assert torch.equal(heads.raw["heads"][1, 1], logits[0] - logits[1])
    assert heads.raw["heads"][1, 0] != heads.raw["heads"][1, 1]


def test_denoising_the_changed_word_restores_everything() -> None:
    served = Engine.load("coin-plain")
    result = patch(served, COIN.format("heads"), COIN.format("tails"), metric=(" tails", " heads"))
    assert result.base < 0 < result.source
    assert result.effect["S"][0, 4] == 1.0 and result.effect["S"][-1, -1] == 1.0
    assert not result.effect["S"][0, :4].any() and not result.effect["S"][1:, 0].any()
    first = result.frame.iloc[0]
    assert first["site"] == "S" and abs(first["effect"]) == result.effect["S"].abs().max()
    assert "residual stream" in result._repr_html_()


def test_a_function_is_a_metric() -> None:
    served = Engine.load("coin-plain")
    tails = served.token_ids_of([" tails"])[0]

    def probability(logits: Tensor) -> Tensor:
        return logits.softmax(-1)[:, tails]

    result = patch(served, COIN.format("heads"), COIN.format("tails"), metric=probability, positions=[4, -1])
    one = patch(served, COIN.format("heads"), COIN.format("tails"), metric=" tails", positions=[4, -1])
    assert result.metric == "probability" and result.raw["S"].shape == (5, 2)
    torch.testing.assert_close(one.raw["S"].exp(), result.raw["S"])
    with pytest.raises(BadRequest, match="one number per row"):
        patch(served, COIN.format("heads"), COIN.format("tails"), metric=lambda logits: logits)


LONGER = "A coin's state is tails. Bob flips. Bob flips. Alice flips. What's the state? A:"


def test_prompts_of_different_lengths_are_aligned() -> None:
    """Each cell is its edit made alone: the row of the counterpart, put at the position of the patched prompt."""
    served, clean, pair = Engine.load("coin-plain"), COIN.format("heads"), (" tails", " heads")
    lengths = len(served.tokens_of(clean)), len(served.tokens_of(LONGER))
    assert lengths[0] < lengths[1]
    rows = served.prompt(clean, sites="S").activations["blocks.1.hook_in"]
    by_end = patch(served, clean, LONGER, metric=pair, align="end", layers=[1], positions=[-1, -4])
    for column, back in enumerate((4, 1)):
        edit = Edit("blocks.1.hook_in", "set", rows[-back], positions=lengths[1] - back)
        logits = served.logits(LONGER, edits=[edit], tokens=pair)
        assert torch.equal(by_end.raw["S"][0, column], logits[0] - logits[1])
    by_pairs = patch(served, clean, LONGER, metric=pair, align=[(-1, -1), (-4, -4)], layers=[1])
    assert torch.equal(by_pairs.raw["S"], by_end.raw["S"]) and by_pairs.numbers == by_end.numbers
    by_text = patch(served, clean, LONGER, metric=pair, align="text:A:", layers=[1])
    assert torch.equal(by_text.raw["S"], by_end.raw["S"][:, 1:])
    noised = patch(served, LONGER, clean, metric=pair, align="start", layers=[1], direction="noise", positions=[4])
    logits = served.logits(LONGER, edits=[Edit("blocks.1.hook_in", "set", rows[4], positions=4)], tokens=pair)
    assert torch.equal(noised.raw["S"][0, 0], logits[0] - logits[1])
    heads = patch(served, clean, LONGER, metric=pair, align="end", heads=[(1, 3)])
    z = served.prompt(clean, sites=["blocks.1.attn.hook_z"]).activations["blocks.1.attn.hook_z"][:, [3]]
    at = range(lengths[1] - lengths[0], lengths[1])
    logits = served.logits(LONGER, edits=[Edit("blocks.1.attn.hook_z", "set", z, positions=at, heads=[3])], tokens=pair)
    assert torch.equal(heads.raw["heads"][0, 0], logits[0] - logits[1])


def test_layers_and_heads_choose_cells() -> None:
    served, texts = Engine.load("coin-plain"), (COIN.format("heads"), COIN.format("tails"))
    every = patch(served, *texts, metric=(" tails", " heads"), sites="ST")
    some = patch(served, *texts, metric=(" tails", " heads"), sites="ST", layers=[3, 1])
    assert some.layers == {"S": (1, 3), "T": (1, 3)} and torch.equal(some.raw["T"], every.raw["T"][[1, 3]])
    assert set(some.frame["layer"]) == {1, 3}
    heads = patch(served, *texts, metric=(" tails", " heads"), heads=True)
    pairs = patch(served, *texts, metric=(" tails", " heads"), heads=[(1, 3), (2, 0)])
    assert pairs.raw["heads"].shape == (2, 2) and pairs.raw["heads"].isnan().sum() == 2 and len(pairs.frame) == 2
    assert pairs.raw["heads"][0, 1] == heads.raw["heads"][1, 3] and isinstance(pairs.plot(), Figure)
    assert "2" in pairs._repr_html_()
    numbers = patch(served, *texts, metric=(" tails", " heads"), heads=[3], layers=[1, 2])
    assert torch.equal(numbers.raw["heads"][:, 0], heads.raw["heads"][1:3, 3])
    ablated = ablate(served, texts, metric=(" tails", " heads"), heads=[3])
    assert ablated.units == ("L0H3", "L1H3", "L2H3", "L3H3")


def test_a_branch_is_a_metric() -> None:
    served = Engine.load("coin-plain")
    other = served.prompt(COIN.format("heads"))
    result = patch(served, COIN.format("heads"), COIN.format("tails"), metric=other, positions=[4])
    assert result.source == pytest.approx(0, abs=1e-6) and result.base > 1 and result.effect["S"][0, 0] == 1.0


def test_patches_that_mean_nothing_are_refused() -> None:
    served = Engine.load("coin-plain")
    clean = COIN.format("heads")
    for options, message in (
        (dict(corrupt="A coin's state is tails."), "same number of tokens"),
        (dict(corrupt=clean), "nothing to carry over"),
        (dict(corrupt=COIN.format("tails"), sites="SZ"), "letters among S, T and C"),
        (dict(corrupt=COIN.format("tails"), direction="sideways"), "denoise, noise"),
        (dict(corrupt=COIN.format("tails"), heads=[9]), "heads=9"),
        (dict(corrupt=COIN.format("tails"), heads=[]), "heads is empty"),
        (dict(corrupt=COIN.format("tails"), heads=None), "Invalid heads"),
        (dict(corrupt=COIN.format("tails"), heads=[(1, 2)], layers=[1]), "Leave one of the two out"),
        (dict(corrupt=COIN.format("tails"), sites=5), "Invalid sites"),
        (dict(corrupt=COIN.format("tails"), layers=[]), "layers is empty"),
        (dict(corrupt=COIN.format("tails"), layers=1), "Invalid layers"),
        (dict(corrupt=COIN.format("tails"), layers=[4], sites="T"), "layers=4"),
        (dict(corrupt=COIN.format("tails"), metric=lambda logits: logits[:, 0] * float("nan")), "NaN or infinite"),
        (dict(corrupt="A coin's state is tails.", align="middle"), "Unknown align"),
        (dict(corrupt="A coin's state is tails.", align=[(1, 2), (1, 3)]), "only once"),
        (dict(corrupt="A coin's state is tails.", align=[3]), "not a pair"),
        (dict(corrupt="A coin's state is tails.", align=[(1, 40)]), "align=40"),
        (dict(corrupt="A coin's state is tails.", align="text:flips"), "occurs 1 times in the clean prompt and 0 times"),
    ):
        with pytest.raises(BadRequest, match=message):
            patch(served, clean, **{"metric": (" tails", " heads"), **options})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"Invalid metric=3\.5.* function of logits \[rows, vocab\] that returns \[rows\]"):
        patch(served, clean, COIN.format("tails"), metric=3.5)  # type: ignore[arg-type]
    for call in (patch, attribution_patching):
        with pytest.raises(BadRequest, match=r"No prompts.*Give at least one pair"):
            call(served, [], [], metric=(" tails", " heads"))
    served.check_integrity()


PROMPTS = [COIN.format(state) for state in ("heads", "tails")] + [
    "A coin's state is heads. Bob flips. Alice flips. What's the state? A:"
]
METRICS = [(" tails", " heads"), (" heads", " tails"), (" heads", " tails")]


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_ablations_are_their_edits_made_alone(how: Any) -> None:
    served, alone, site = Engine.load("coin-plain"), Engine.load("coin-plain"), "blocks.1.attn.hook_z"
    result = ablate(served, PROMPTS, metric=METRICS, heads=[(1, 3), (0, 2)], how=how, seed=7)
    rows = [branch.activations[site] for branch in alone.prompts(PROMPTS, sites=[site])]
    for number, (prompt, pair) in enumerate(zip(PROMPTS, METRICS, strict=True)):
        edit = {
            "zero": Edit(site, "zero", heads=[3]),
            "mean": Edit(site, "set", torch.cat(rows)[:, [3]].mean(0), heads=[3]),
            "resample": Edit(site, "resample", torch.cat(rows[:number] + rows[number + 1 :])[:, [3]], heads=[3], seed=7),
        }[how]
        logits = alone.logits(prompt, edits=[edit], tokens=pair)
        assert torch.equal(result.ablated[0, number], logits[0] - logits[1])
    assert list(result.frame["unit"]) == ["L1H3", "L0H2"], "ranked by the size of the mean effect"
    assert (result.frame["low"] <= result.frame["effect"]).all() and (result.frame["effect"] <= result.frame["high"]).all()


def test_neurons_and_directions_are_resampled() -> None:
    """A neuron takes the values that the same draws give a head; a direction takes the rows' parts along it."""
    served, post, pair = Engine.load("coin-plain"), "blocks.2.mlp.out.hook_in", METRICS[0]
    units: Any = dict(neurons=[(2, 5)], directions=[(1, torch.eye(128)[7])])
    result = ablate(served, PROMPTS, metric=METRICS, how="resample", seed=7, **units)
    rows, other, third = (branch.activations[post] for branch in served.prompts(PROMPTS, sites=[post]))
    pool = torch.cat([other, third])
    (placed,) = served.placed([Edit(post, "resample", pool, seed=7)], len(rows))
    rows[:, 5] = pool[placed.draws(list(range(len(rows)))), 5]
    logits = served.logits(PROMPTS[0], edits=[Edit(post, "set", rows, positions=range(len(rows)))], tokens=pair)
    assert torch.equal(result.ablated[0, 0], logits[0] - logits[1])
    zero = ablate(served, PROMPTS, metric=METRICS, **units)
    assert not torch.equal(result.ablated[1], zero.ablated[1])


def test_a_metric_for_each_prompt_in_any_form() -> None:
    served = Engine.load("coin-plain")
    tails, heads = served.token_ids_of([" tails", " heads"])
    functions = [lambda x: x[:, tails] - x[:, heads], lambda x: x[:, heads] - x[:, tails], (" heads", " tails")]
    wanted = ablate(served, PROMPTS, metric=METRICS, heads=[(1, 3)])
    assert torch.equal(ablate(served, PROMPTS, metric=functions, heads=[(1, 3)]).ablated, wanted.ablated)
    tokens = ablate(served, PROMPTS, metric=[" tails", heads, " heads"], heads=[(1, 3)])
    single = ablate(served, PROMPTS[1:2], metric=" heads", heads=[(1, 3)])
    assert torch.equal(tokens.ablated[:, 1], single.ablated[:, 0])
    two = ablate(served, PROMPTS[1:], metric=[(" heads",), (heads,)], heads=[(1, 3)])
    assert torch.equal(two.ablated[:, 0], single.ablated[:, 0])


def test_neurons_and_directions() -> None:
    """Zero ablation sets a neuron to zero, and mean ablation to its mean; a direction has no component left."""
    served, post = Engine.load("coin-plain"), "blocks.2.mlp.out.hook_in"
    direction = torch.randn(128, generator=torch.Generator().manual_seed(3))
    zero = ablate(served, PROMPTS, metric=METRICS, neurons=[(2, 5)], directions=[(1, direction)])
    rows = served.prompt(PROMPTS[0], sites=[post]).activations[post]
    rows[:, 5] = 0
    logits = served.logits(PROMPTS[0], edits=[Edit(post, "set", rows, positions=range(len(rows)))], tokens=METRICS[0])
    assert torch.equal(zero.ablated[0, 0], logits[0] - logits[1])
    logits = served.logits(PROMPTS[0], edits=[Edit("S", "project_out", direction, layers=[1])], tokens=METRICS[0])
    torch.testing.assert_close(zero.ablated[1, 0], logits[0] - logits[1])
    mean = ablate(served, PROMPTS, metric=METRICS, neurons=[(2, 5)], directions=[(1, direction)], how="mean")
    assert mean.units == ("L2N5", "L1D0") and not torch.equal(mean.ablated, zero.ablated)
    assert isinstance(mean.plot(), Figure) and "L2N5" in mean._repr_html_()


def test_ablations_that_mean_nothing_are_refused() -> None:
    served = Engine.load("coin-plain")
    for options, message in (
        (dict(), "Nothing to ablate"),
        (dict(heads=[(9, 0)]), "heads"),
        (dict(heads=True, how="median"), "Known: zero, mean, resample"),
        (dict(heads=[]), "heads is empty"),
        (dict(heads="01"), "Invalid heads"),
        (dict(heads=3), "Invalid heads"),
        (dict(heads=[(1, 2, 3)]), "not a pair"),
        (dict(heads=[0, (1, 2)]), "not a pair"),
        (dict(neurons=5), "Invalid neurons"),
        (dict(directions=[3]), "not a pair"),
        (dict(directions=[(0, "text")]), "Invalid direction"),
        (dict(heads=True, prompts=[]), "No prompts"),
        (dict(heads=True, prompts=PROMPTS[:1], metric=METRICS[0], how="resample"), "2 prompts or more"),
        (dict(directions=[(0, torch.zeros(128))]), "not all zero"),
        (dict(heads=True, metric=METRICS[:2]), "2 metrics for 3 prompts"),
    ):
        with pytest.raises(BadRequest, match=message):
            ablate(served, **{"prompts": PROMPTS, "metric": METRICS, **options})  # type: ignore[arg-type]
    single = ablate(served, PROMPTS[:1], metric=METRICS[0], heads=True)
    assert single.frame["low"].isna().all() and isinstance(single.plot(), Figure) and "Zero ablation" in single._repr_html_()


# ---- lens -------------------------------------------------------------------------------------------------------------


def test_the_lens_is_the_unembedded_residual_stream() -> None:
    """Every layer's distribution computed directly: the last is the model's own, with its bits."""
    served = Engine.load("coin-plain")
    text = COIN.format("heads")
    result = lens(served, text, token=" tails")
    (tails,) = served.token_ids_of([" tails"])
    streams = served.prompt(text, sites="S").activations
    for layer, site in enumerate(served.sites.per_layer("S")):
        log_p = served.runner.logits(streams[site]).log_softmax(-1)
        torch.testing.assert_close(result.entropy[layer], -(log_p.exp() * log_p).sum(-1))
        torch.testing.assert_close(result.logprob[layer], log_p[:, tails])
        assert torch.equal(result.top_ids[layer, :, 0].long(), log_p.argmax(-1))
        assert result.rank[layer].tolist() == [int((row > row[tails]).sum()) for row in log_p]
    assert result.rank.dtype == torch.int64
    assert torch.equal(result.top_ids[-1, :, 0].long(), served.logits(text, positions=None).argmax(-1))
    assert not result.kl[-1].any() and (result.kl[0] > 0).any()
    assert result.top[-1][-1][0] == " tails" and result.rank[-1, -1] == 0


def test_the_lens_of_the_next_token_and_its_pictures() -> None:
    served = Engine.load("coin-plain")
    result = lens(served, COIN.format("heads"))
    assert result.rank[:, -1].isnan().all() and not result.rank[:, :-1].isnan().any()
    frame = result.frame
    assert len(frame) == 5 * 15 and frame.iloc[-1]["top"] == " tails"
    assert str(frame["rank"].dtype) == "Int64" and frame["rank"].isna().sum() == 5
    assert isinstance(result.plot("rank"), Figure) and " tails" in result._repr_html_(), "also of ranks that are missing"
    with pytest.raises(BadRequest, match="Unknown measure"):
        result.plot("surprise")  # type: ignore[arg-type]
    assert served.runner.pool.num_free + len(served.prefix) == served.runner.pool.num_pages, "nothing is left behind"


def test_the_lens_unembeds_every_row_once_with_the_bits_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    served, text = Engine.load("coin-plain"), COIN.format("heads")
    captured = served.prompt(text, sites="Z").activations
    rows: list[int] = []
    head = served.runner._head
    monkeypatch.setattr(served.runner, "_head", lambda x, tap: (rows.append(len(x)), head(x, tap))[1])
    result = lens(served, text, top_k=8)
    assert sum(rows) == 5 * 15
    for name, found in (("Z.entropy", result.entropy), ("Z.kl", result.kl), ("Z.top_ids", result.top_ids)):
        assert torch.equal(found.transpose(0, 1), captured[name])
    assert torch.equal(result.logprob.T[:-1], captured["Z.emitted"][:-1])


def test_ranks_of_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    assert [int(_ranks(logits, [token])) for token in range(5)] == [3, 0, 1, 2, 4] and _ranks(logits, [-1]).isnan().all()


def test_features_are_a_line_of_the_lens(tmp_path: Path) -> None:
    """Those of the branch itself, in the view and as a figure. Control: without features there is no such line."""
    served, text = Engine.load("coin-plain"), COIN.format("heads")
    first = SparseFeatures.load(write(tmp_path / "a", "topk", d_in=128, hook="blocks.1.hook_resid_post"))
    second = SparseFeatures.load(write(tmp_path / "b", "standard", d_in=128, hook="blocks.2.hook_mlp_out"))
    result = lens(served, text, features=[first, second])
    branch = served.prompt(text, sites=["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"])
    for line, sae in zip(result.features, (first, second), strict=True):
        assert line.name == sae.config.hook and torch.equal(line.rows.dense(), sae.of(branch).dense())
    strongest = result.features[0].top(4)
    assert strongest[0][1] == float(first.of(branch).dense()[4].max()) and len(strongest) == 5
    grid = result.grid("features")
    assert grid.words is not None and grid.words[0][4] == str(strongest[0][0]) and grid.values.shape == (2, 15)
    assert isinstance(result.plot("features"), Figure) and "Sparse features" in result._repr_html_()
    plain = lens(served, text)
    assert torch.equal(plain.top_ids, result.top_ids) and "Sparse features" not in plain._repr_html_()
    assert lens(served, text, features=first).features[0].name == first.config.hook
    with pytest.raises(BadRequest, match="has no features"):
        plain.plot("features")
    with pytest.raises(BadRequest, match=r"SparseFeatures\.load"):
        lens(served, text, features=[3])  # type: ignore[list-item]


def test_a_tuned_lens_that_does_nothing_is_the_plain_one() -> None:
    served = Engine.load("coin-plain")
    c = served.config
    nothing = torch.zeros(c.num_layers, c.d_model, c.d_model), torch.zeros(c.num_layers, c.d_model)
    made, other = (TunedLens(nothing[0], bias, unembed_hash(served.model)) for bias in (nothing[1], nothing[1] + 1))
    plain, tuned = lens(served, COIN.format("heads")), lens(served, COIN.format("heads"), tuned=made)
    assert torch.equal(plain.top_ids, tuned.top_ids) and torch.equal(plain.rank.nan_to_num(), tuned.rank.nan_to_num())
    assert not torch.equal(lens(served, COIN.format("heads"), tuned=other).rank[:, :-1], plain.rank[:, :-1]), "control"


# Several pairs


FIRST, SECOND = (COIN.format("heads"), COIN.format("tails")), ("A coin's state is {}. Bob flips. What's the state? A:",) * 2
PAIRS = [FIRST, tuple(text.format(state) for text, state in zip(SECOND, ("tails", "heads"), strict=True))]
OWN = [(" tails", " heads"), (" heads", " tails")]


def test_patches_of_several_pairs_are_means_with_intervals() -> None:
    served = Engine.load("coin-plain")
    pairs = [*PAIRS, FIRST[::-1]]
    metrics = [*OWN, OWN[1]]
    clean, corrupt = map(list, zip(*pairs, strict=True))
    result = patch(served, clean, corrupt, metric=metrics, sites="ST", positions=[4, -1])
    alone = [patch(served, *pair, metric=own, sites="ST", positions=[4, -1]) for pair, own in zip(pairs, metrics, strict=True)]
    for site in "ST":
        assert all(torch.equal(mine.raw[site], other.raw[site]) for mine, other in zip(result.pairs, alone, strict=True))
        effects = torch.stack([each.effect[site] for each in alone]).double()
        torch.testing.assert_close(result.effect[site].double(), effects.mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(result.raw[site], torch.stack([each.raw[site] for each in alone]).mean(0))
    assert result.base == pytest.approx(sum(each.base for each in alone) / 3) and result.metric == "metric"
    line = result.frame.query("site == 'S' and layer == 1 and position == 4").iloc[0]
    values = torch.stack([each.effect["S"][1, 0] for each in alone]).double().numpy()
    wanted = difference_over_groups(values, np.arange(3), bounded=False)
    assert (line["low"], line["high"], line["pairs"]) == pytest.approx((wanted.low, wanted.high, 3)) and values.std() > 0
    assert line["token"] == " tails/ heads" and "mean of 3 pairs" in repr(result)
    made = result.plot()
    assert "logit difference, mean of 3 pairs" in made.get_suptitle()
    mesh: Any = made.axes[0].collections[0]
    assert np.array_equal(np.asarray(mesh.get_array()), result.effect["S"].numpy()) and "3 pairs" in result._repr_html_()


def test_pairs_with_different_lengths_are_averaged_from_their_ends() -> None:
    """Columns are the positions that all pairs have, counted from the end, and each is that of its pair alone."""
    served, longer = Engine.load("coin-plain"), COIN.replace(". What", ". Bob flips. What")
    pairs = [FIRST, (longer.format("heads"), longer.format("tails"))]
    clean, corrupt = map(list, zip(*pairs, strict=True))
    for positions, columns in ((None, range(-15, 0)), ([-4, -1], (-4, -1))):
        options: dict[str, Any] = dict(sites="ST", align="end", positions=positions, layers=[2])
        result = patch(served, clean, corrupt, metric=OWN, **options)
        alone = [patch(served, *pair, metric=own, **options) for pair, own in zip(pairs, OWN, strict=True)]
        for site in "ST":
            each = [one.effect[site][:, -len(columns) :] for one in alone]
            assert torch.equal(result.effect[site], torch.stack(each).double().mean(0).float())
            assert result.numbers[site] == tuple(columns) and len(result.columns[site]) == len(columns)
        assert set(result.frame["position"]) == set(columns) and result.frame["pairs"].eq(2).all()
    for align in (None, "start"):
        with pytest.raises(BadRequest, match=r"the same number of tokens, or align='end'"):
            patch(served, clean, corrupt, metric=OWN, align=align)
    with pytest.raises(UnknownPromptWord, match="Pair 1 of 2: Word 'Zork'"):
        patch(served, [FIRST[0], "Zork"], [FIRST[1], "Zork"], metric=OWN)


def test_heads_of_pairs_with_different_lengths_are_averaged() -> None:
    served, longer = Engine.load("coin-plain"), "A coin's state is {}. Bob flips. Alice flips. What's the state? A:"
    pairs = [FIRST, (longer.format("heads"), longer.format("tails"))]
    clean, corrupt = map(list, zip(*pairs, strict=True))
    result = patch(served, clean, corrupt, metric=OWN, heads=[(1, 3)])
    alone = [patch(served, *pair, metric=own, heads=[(1, 3)]).effect["heads"] for pair, own in zip(pairs, OWN, strict=True)]
    assert float(result.effect["heads"]) == pytest.approx(float(sum(alone)) / 2)
    with pytest.raises(BadRequest, match="Pair 1 of 2 has 18 tokens, and the first has 15"):
        patch(served, clean, corrupt, metric=OWN)


@pytest.mark.parametrize(
    ("clean", "corrupt", "metric", "message"),
    [
        ([FIRST[0]], FIRST[1], OWN[0], "One side is a list of prompts and the other one prompt"),
        ([FIRST[0]], [FIRST[1], FIRST[1]], OWN[0], "Got 1 clean prompts and 2 corrupt ones"),
        ([FIRST[0]] * 2, [FIRST[1], "A coin's state is tails."], OWN[0], "Pair 1 of 2: The prompts have 15 .* and 6"),
        ([FIRST[0]] * 2, [FIRST[1], FIRST[0]], OWN[0], "Pair 1 of 2: .*nothing to carry over"),
        ([FIRST[0]] * 2, [FIRST[1]] * 2, [OWN[0]] * 3, "3 metrics for 2 pairs"),
    ],
)
def test_pairs_that_cannot_be_patched_are_named(clean: Any, corrupt: Any, metric: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        patch(Engine.load("coin-plain"), clean, corrupt, metric=metric)


def test_attributions_of_several_pairs_are_means_with_intervals() -> None:
    served = Engine.load("coin-plain")
    clean, corrupt = map(list, zip(*PAIRS, strict=True))
    result = attribution_patching(served, clean, corrupt, OWN, "S", compare=True)
    alone = [attribution_patching(served, *pair, own, "S", compare=True) for pair, own in zip(PAIRS, OWN, strict=True)]
    estimates = torch.stack([each.estimate for each in alone])
    torch.testing.assert_close(result.estimate, estimates.mean(0))
    assert result.real is not None and alone[0].real is not None and alone[1].real is not None
    torch.testing.assert_close(result.real, (alone[0].real + alone[1].real) / 2)
    assert result.before == pytest.approx((alone[0].before + alone[1].before) / 2) and result.certified
    line = result.frame.query("site == 'blocks.1.hook_in' and position == 4").iloc[0]
    at = result.sites.index("blocks.1.hook_in")
    wanted = difference_over_groups(estimates[:, at, 4].double().numpy(), np.arange(2), bounded=False)
    assert (line["low"], line["high"]) == pytest.approx((wanted.low, wanted.high))
    assert "2 pairs" in repr(result) and isinstance(result.plot(), Figure) and "low" not in alone[0].frame
    single = attribution_patching(served, clean[:1], corrupt[:1], OWN[0], "S")
    assert single.frame["low"].isna().all() and torch.equal(single.estimate, alone[0].estimate)
    with pytest.raises(BadRequest, match="Pair 1 of 2"):
        attribution_patching(served, clean, [corrupt[0], "A coin's state is tails."], OWN[0])


# ---- path patch ------------------------------------------------------------------------------------------------------
# `path_patch`: the numbers of TransformerLens' hooks, with frozen heads written out, and the bits of edits made alone.

CLEAN_TEXT, CORRUPT_TEXT = COIN.format("heads"), COIN.format("tails")


def z(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_z"


def put(rows: Tensor, head: int | None = None) -> Any:
    def change(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, :, slice(None) if head is None else head] = rows[:, :, slice(None) if head is None else head]
        return value

    return change


@pytest.mark.parametrize("name, into", covering(["llama", "gpt2"], ["q", "v"]))
def test_paths_are_what_transformer_lens_hooks_do(name: str, into: Any) -> None:
    served, model = Engine(loading.load(hugging_face(name), torch.float32), page_size=4), bridge(name)
    result = path_patch(served, CLEAN, CORRUPT, metric=PAIR, receivers=[(2, 3)], into=into)
    direct = path_patch(served, CLEAN, CORRUPT, metric=PAIR)
    assert result.raw["heads"].shape == (2, 4) and direct.raw["heads"].shape == (3, 4)
    clean, corrupt = torch.tensor([CLEAN]), torch.tensor([CORRUPT])
    head = 3 if into == "q" else 3 // (served.config.num_heads // served.config.num_kv_heads)
    arrives = f"blocks.2.attn.hook_{into}"
    with torch.no_grad():
        _, source = model.run_with_cache(clean)
        _, base = model.run_with_cache(corrupt)
        source, base = ({z(l): each[z(l)].clone() for l in range(3)} for each in (source, base))
        for layer, sender in ((0, 1), (1, 2)):
            hooks = [(z(layer), put(source[z(layer)], sender)), *((z(l), put(base[z(l)])) for l in range(layer + 1, 3))]
            seen: dict[str, Tensor] = {}
            keep = (arrives, lambda value, hook, seen=seen: seen.update(there=value.clone()))
            logits = model.run_with_hooks(corrupt, fwd_hooks=[*hooks, keep])
            assert float(direct.raw["heads"][layer, sender]) == pytest.approx(difference(logits), rel=1e-4, abs=1e-4)
            logits = model.run_with_hooks(corrupt, fwd_hooks=[(arrives, put(seen["there"], head))])
            assert float(result.raw["heads"][layer, sender]) == pytest.approx(difference(logits), rel=1e-4, abs=1e-4)


def test_a_path_has_the_bits_of_its_edits_alone() -> None:
    served, alone = Engine.load("coin-plain"), Engine.load("coin-plain")
    clean, corrupt, tokens = CLEAN_TEXT, CORRUPT_TEXT, (" tails", " heads")
    result = path_patch(served, clean, corrupt, metric=tokens, receivers=[(2, 0), (3, 1)], into="k")
    keys = ["blocks.2.attn.k.hook_out", "blocks.3.attn.k.hook_out"]
    source, base = (alone.prompt(text, sites=[z(l) for l in range(3)]).activations for text in (clean, corrupt))
    where = range(15)
    sent = [Edit(z(0), "set", source[z(0)], where, heads=[3]), *(Edit(z(l), "set", base[z(l)], where) for l in (1, 2))]
    arrived = alone.prompt(corrupt, sites=keys, edits=sent).activations
    edits = [Edit(site, "set", arrived[site], where, heads=[head]) for site, head in zip(keys, (0, 1), strict=True)]
    logits = alone.logits(corrupt, edits=edits, tokens=tokens)
    assert torch.equal(result.raw["heads"][0, 3], logits[0] - logits[1])
    assert not torch.equal(result.raw["heads"][0, 3], result.raw["heads"][0, 0]), "control: another sender, another value"


@pytest.mark.parametrize("corrupt", [LONGER, CORRUPT_TEXT], ids=["longer", "as long"])
def test_the_sender_takes_the_rows_of_its_counterparts(corrupt: str) -> None:
    """Into the values of a later head, where every position counts. Control: each alignment gives another number."""
    served, tokens, arrives = Engine.load("coin-plain"), (" tails", " heads"), "blocks.2.attn.v.hook_out"
    base = served.prompt(corrupt, sites=[z(1)])
    rows = served.prompt(CLEAN_TEXT, sites=[z(0)]).activations[z(0)]
    short, long = len(rows), base.length
    aligned: dict[Any, list[tuple[int, int]]] = {"end": [(i, i + long - short) for i in range(short)]}
    aligned |= {"start": [(i, i) for i in range(short)]} if long > short else {}
    found = []
    for align, pairs in (*aligned.items(), ([(4, 6), (-1, -2)], [(4, 6), (short - 1, long - 2)])):
        result = path_patch(served, CLEAN_TEXT, corrupt, metric=tokens, receivers=[(2, 0)], align=align)
        here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        sent = [Edit(z(0), "set", rows[here], there, heads=[3]), Edit(z(1), "set", base.activations[z(1)], range(long))]
        values = served.prompt(corrupt, sites=[arrives], edits=sent).activations[arrives]
        logits = served.logits(corrupt, edits=[Edit(arrives, "set", values, range(long), heads=[0])], tokens=tokens)
        found.append(float(result.raw["heads"][0, 3]))
        assert found[-1] == float(logits[0] - logits[1])
    assert len(set(found)) == len(found)


def test_paths_that_do_not_exist_are_refused() -> None:
    served = Engine.load("coin-plain")
    for receivers, into, message in (
        ([(0, 1)], "v", "layer"),
        ([(1, 9)], "v", "receivers=9"),
        ([], "v", "No receivers"),
        ([(1, 1)], "z", "q, k, v"),
    ):
        with pytest.raises(BadRequest, match=message):
            path_patch(served, CLEAN_TEXT, CORRUPT_TEXT, metric=" tails", receivers=receivers, into=into)  # type: ignore[arg-type]


@pytest.mark.parametrize("receivers", ["x", [(1,)], [5]])
def test_receivers_that_are_none(receivers: Any) -> None:
    with pytest.raises(BadRequest, match=r"receiver"):
        path_patch(Engine.load("coin-plain"), CLEAN_TEXT, CORRUPT_TEXT, metric=(" heads", " tails"), receivers=receivers)


# ---- routing ---------------------------------------------------------------------------------------------------------
# `routing`: what it shows is what branches capture, with rejected drafts beside the path.

matplotlib.use("Agg")
PROMPT = [(5 * i * i + 2) % 61 for i in range(9)]
INDICES, WEIGHTS = "blocks.{}.mlp.hook_expert_indices", "blocks.{}.mlp.hook_expert_weights"
SITES_OF_ROUTING = [name.format(layer) for layer in (0, 2) for name in (INDICES, WEIGHTS)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_model(num_layers=3, mixture=MixtureConfig(6, 20, Routing(2), layers=(True, False, True))))


def test_the_path_is_what_a_branch_captures(engine: Engine) -> None:
    result = routing(engine, PROMPT)
    branch = engine.prompt(PROMPT, sites=SITES_OF_ROUTING)
    assert result.layers == (0, 2) and result.drafts == () and isinstance(result, Reportable)
    for at, layer in enumerate(result.layers):
        chosen = branch.activations[INDICES.format(layer)]
        assert torch.equal(result.path.chosen[at], chosen)
        assert torch.equal(result.path.weights[at], branch.activations[WEIGHTS.format(layer)].gather(-1, chosen))
    frame = result.frame
    assert len(frame) == 2 * 9 * 2 and set(frame["draft"]) == {-1}
    assert frame.groupby(["layer", "position"])["weight"].sum().between(0.999, 1.001).all()
    load = result.load
    assert len(load) == 2 * 6 and (load.groupby("layer")["tokens"].sum() == 18).all()
    assert load["weight"].sum() == pytest.approx(18)


def test_rejected_drafts_stand_beside_the_accepted_tokens(engine: Engine) -> None:
    branch = engine.prompt(PROMPT, sites=SITES_OF_ROUTING, keep_rejected=True)
    branch.generate(4, drafter="forced", drafts={9: [[1, 2]], 10: [[3]]}, final=True)
    result = routing(engine, branch)
    assert [(draft.start, len(draft.tokens)) for draft in result.drafts] == [(9, 2), (10, 1)]
    beside = result.beside
    assert len(beside) == 3 * 2 and set(beside["position"]) == {9, 10}
    line = beside[(beside["draft"] == 0) & (beside["position"] == 9) & (beside["layer"] == 2)].iloc[0]
    alone = engine.prompt([*PROMPT, 1], sites=SITES_OF_ROUTING).activations[INDICES.format(2)][9].tolist()
    accepted = engine.prompt(branch.tokens[:10], sites=SITES_OF_ROUTING).activations[INDICES.format(2)][9].tolist()
    assert list(line["rejected_experts"]) == alone and list(line["accepted_experts"]) == accepted
    assert line["shared"] == len(set(alone) & set(accepted))
    assert {0, 1} <= set(result.frame["draft"]) and "rejected at 9" in result._repr_html_()


def test_drafts_without_rows_are_not_left_out_silently(engine: Engine) -> None:
    branch = engine.prompt(PROMPT, sites=SITES_OF_ROUTING)
    branch.generate(4, drafter="forced", drafts={9: [[1, 2]]}, final=True, keep_pages=True)
    assert branch.rejected
    with pytest.warns(Caveat, match="1 rejected drafts .* keep_rejected=True"):
        assert routing(engine, branch).drafts == ()


def test_it_draws_itself(engine: Engine) -> None:
    result = routing(engine, PROMPT, layers=[2])
    assert result.layers == (2,) and isinstance(result.plot(), Figure) and isinstance(result.plot_load(), Figure)
    assert "heaviest first" in result._repr_html_() and repr(result) == (
        "RoutingResult(1 layers, 6 experts, 9 tokens, 0 rejected drafts)"
    )


def test_what_cannot_be_shown_is_refused(engine: Engine) -> None:
    with pytest.raises(BadRequest, match=r"Layer 1 has an MLP. Give layers with a mixture of experts: 0, 2"):
        routing(engine, PROMPT, layers=[1])
    with pytest.raises(BadRequest, match="layers is empty"):
        routing(engine, PROMPT, layers=[])
    with pytest.raises(BadRequest, match=r"does not capture blocks.0.mlp.gate.hook_expert_indices"):
        routing(engine, engine.prompt(PROMPT, sites="S"))
    with pytest.raises(BadRequest, match="has no experts"):
        routing(Engine(random_model()), PROMPT)


def test_experts_are_ablated_one_at_a_time(engine: Engine) -> None:
    """Their weights become 0 and the others keep theirs, as under the edit made alone."""
    last = [(2, 5), (0, 1), (2, 0)]
    result = ablate(engine, [PROMPT, PROMPT[:5]], metric=(3, 8), experts=last)
    assert result.units == ("L2E5", "L0E1", "L2E0") and result.where[0] == ("expert", 2, 5)
    for number, prompt in enumerate((PROMPT, PROMPT[:5])):
        for unit, (layer, expert) in enumerate(last):
            edit = Edit(f"blocks.{layer}.mlp.gate.hook_out", "reweight", experts=[expert], factor=0.0)
            logits = engine.logits(prompt, edits=[edit], tokens=(3, 8))
            assert torch.equal(result.ablated[unit, number], logits[0] - logits[1])
    assert len(set(result.effect.flatten().tolist())) > 3


# ---- all -------------------------------------------------------------------------------------------------------------

TWO = (COIN.format("heads"), COIN.format("tails"))
PAIRED = {"metric": (" tails", " heads")}
attended = cache(lambda engine: attention(engine, TWO[0], layers=[1]))
compared = cache(lambda engine: compare(engine, engine, TWO))
AT_THE_BOUND: list[tuple[str, str, Callable[[Engine, int], Any], int, int]] = [
    ("coin", "ablate heads", lambda e, i: ablate(e, TWO, **PAIRED, heads=[i]), 3, 0),
    ("coin", "ablate pair", lambda e, i: ablate(e, TWO, **PAIRED, heads=[(0, i)]), 3, 0),
    ("coin", "ablate layer", lambda e, i: ablate(e, TWO, **PAIRED, heads=[(i, 0)]), 3, 0),
    ("coin", "ablate neuron", lambda e, i: ablate(e, TWO, **PAIRED, neurons=[(0, i)]), 383, 0),
    ("coin", "ablate direction", lambda e, i: ablate(e, TWO, **PAIRED, directions=[(i, torch.ones(128))]), 4, 0),
    ("mixture", "ablate expert", lambda e, i: ablate(e, [PROMPT], metric=5, experts=[(2, i)]), 5, 0),
    ("mixture", "routing", lambda e, i: routing(e, PROMPT, layers=[i]), 2, 0),
    ("coin", "attention", lambda e, i: attention(e, TWO[0], layers=[i]), 3, 0),
    ("coin", "attention plot", lambda e, i: attended(e).plot(1, i), 3, 0),
    ("coin", "patch S", lambda e, i: patch(e, *TWO, **PAIRED, layers=[i], positions=[4]), 4, 0),
    ("coin", "patch T", lambda e, i: patch(e, *TWO, **PAIRED, sites="T", layers=[i], positions=[4]), 3, 0),
    ("coin", "patch heads", lambda e, i: patch(e, *TWO, **PAIRED, heads=[i], layers=[3]), 3, 0),
    ("coin", "patch heads of layers", lambda e, i: patch(e, *TWO, **PAIRED, heads=[0], layers=[i]), 3, 0),
    ("coin", "patch positions", lambda e, i: patch(e, *TWO, **PAIRED, layers=[1], positions=[i]), 14, -15),
    ("coin", "align clean", lambda e, i: patch(e, *TWO, **PAIRED, layers=[1], align=[(i, 4)]), 14, -15),
    ("coin", "align corrupt", lambda e, i: patch(e, *TWO, **PAIRED, layers=[1], align=[(4, i)]), 14, -15),
    ("coin", "receiver layer", lambda e, i: path_patch(e, *TWO, **PAIRED, receivers=[(i, 0)]), 3, 1),
    ("coin", "receiver head", lambda e, i: path_patch(e, *TWO, **PAIRED, receivers=[(1, i)]), 3, 0),
    ("coin", "steer", lambda e, i: steer(e, torch.ones(128), TWO[:1], layers=[i], strengths=[1], n=1), 4, 0),
    ("coin", "compare plot", lambda e, i: compared(e).plot(i), 1, 0),
    ("coin", "dla token", lambda e, i: dla(e, TWO[0], (i, 5)), 105, 0),
    ("coin", "attribution token", lambda e, i: attribution_patching(e, *TWO, i, "S", compare=True), 105, 0),
    ("coin", "lens token", lambda e, i: lens(e, TWO[0], token=i), 105, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "call", "most", "least"),
    [
        pytest.param(kind, *rest, id=said, marks=() if i % 3 == 0 else pytest.mark.slow)
        for i, (kind, said, *rest) in enumerate(AT_THE_BOUND)
    ],
)
def test_numbers_are_taken_up_to_their_bounds(
    kind: str, call: Callable[[Engine, int], Any], most: int, least: int, engine: Engine
) -> None:
    """The last number is taken, and the first one beyond it refused, on both sides. No branch stays, done or refused."""
    served = engine if kind == "mixture" else coin()
    for number in (most, least):
        call(served, number)
    for number in (most + 1, least - 1):
        with pytest.raises(BadRequest):
            call(served, number)
    assert not served.loop.lanes, "what verbs make, they release"


@cache
def coin() -> Engine:
    return Engine.load("coin-plain")


def test_a_title_names_the_metric_if_it_is_one() -> None:
    made = [ablate(coin(), TWO, metric=metric, heads=[(0, 0)]) for metric in ((" tails", " heads"), [(" tails", " heads"), 5])]
    assert [each.metric for each in made] == ["logit difference ' tails' - ' heads'", "metric"]
    assert repr(made[1]) == "AblateResult(metric, zero: 1 units, 2 prompts)"


def test_experts_are_only_zeroed(engine: Engine) -> None:
    for how in ("mean", "resample"):
        with pytest.raises(BadRequest, match="is not for experts"):
            ablate(engine, [PROMPT, PROMPT[:5]], metric=5, experts=[(0, 1)], heads=[(0, 0)], how=how)  # type: ignore[arg-type]
    for where, message in (((1, 0), "layer 1 has no experts"), ((3, 0), "experts")):
        with pytest.raises(BadRequest, match=message):
            ablate(engine, [PROMPT], metric=5, experts=[where])
    with pytest.raises(BadRequest, match="not a pair"):
        ablate(engine, [PROMPT], metric=5, directions=[(0, [1.0], 2)])  # type: ignore[list-item]
