"""`compare`, and patches from one model into another: the numbers of both models' own passes."""

from typing import Any

import numpy as np
import pytest
import torch

from replaylens import Edit, Engine, compare, patch
from replaylens.engine.display import visible
from replaylens.engine.errors import BadRequest
from replaylens.engine.model import loading
from replaylens.probes.intervals import difference_over_groups
from tests.engine.reference import perturbed
from tests.families import hugging_face
from tests.toy_model import random_model

COIN = "A coin's state is {}. Alice flips. What's the state? A:"
TEXTS = [COIN.format("heads") + " tails.", "A coin's state is tails. Bob flips. Alice flips. What's the state? A: tails."]
PAIR = (" tails", " heads")


@pytest.fixture(scope="module")
def coins() -> tuple[Engine, Engine]:
    """A model, and the same one with other weights."""
    first = Engine.load("coin-plain")
    return first, Engine(perturbed(Engine.load("coin-plain").model, 0.02), tokenizer=first.text.tokenizer)


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
