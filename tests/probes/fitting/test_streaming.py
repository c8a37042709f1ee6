"""Probes fitted during capture equal those fitted from the dump, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes.erasers import Leace, Moments, MomentStream, moments_of
from replaylens.probes.errors import OneClass, ProbeError
from replaylens.probes.estimators import MassMeanProbe
from replaylens.probes.probe import fit_streaming
from replaylens.probes.rows import Cell, ProbeRows

X = torch.randn(700, 6, generator=torch.Generator().manual_seed(0)).double()
Y = np.where(np.random.default_rng(0).integers(2, size=700) == 1, "b", "a")


def streamed(cuts: list[int], rows: torch.Tensor = X, values: np.ndarray = Y) -> Moments:
    stream, at = MomentStream(6, ["a", "b"]), 0
    for cut in [*cuts, len(rows)]:
        stream.add(rows[at : at + cut], values[at : at + cut])
        at += cut
    return stream.moments()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 300), max_size=6))
def test_pieces_do_not_move_a_bit(cuts: list[int]) -> None:
    whole, cut = moments_of(X, Y), streamed(cuts)
    for name in ("mean", "covariance", "cross", "shares"):
        assert torch.equal(getattr(whole, name), getattr(cut, name))


def test_order_is_part_of_the_bits() -> None:
    """Negative control: another order of rows gives other bits."""
    assert not torch.equal(streamed([]).covariance, streamed([], X.flip(0), Y[::-1]).covariance)


def test_moments_are_right() -> None:
    """Class means and within-class covariance match numpy in double precision."""
    moments = streamed([100, 33])
    rows = X.numpy()
    means = np.stack([rows[name == Y].mean(0) for name in "ab"])
    assert np.allclose(moments.class_means.numpy(), means, atol=1e-12)
    within = np.cov((rows - means[(Y == "b").astype(int)]).T, bias=True)
    assert np.allclose(moments.within.numpy(), within, atol=1e-12)


@pytest.mark.parametrize("batch, backwards", [(7, False), (80, False), (32, True)])
def test_fitted_while_capturing(engine: Engine, coin_dump: Dump, batch: int, backwards: bool) -> None:
    """Mass-mean, whitened and LEACE fits have the same bits from a replay, in any batches and any order, and from the dump."""
    examples = tasks.get("coin")(flips=(2, 5)).examples(80)
    if backwards:
        examples = examples[::-1]
    collected = fit_streaming(engine, examples, "face", ["heads", "tails"], sites="S", batch=batch)
    rows = ProbeRows.of(coin_dump).accepted().at("step")
    for layer in (0, 2, 4):
        X, y = rows.matrix("S", layer), rows.target("face").values
        for whiten in (False, True):
            ours = collected.fit("mass-mean-whitened" if whiten else "mass-mean")[Cell("S", layer)]
            theirs = MassMeanProbe(whiten).fit(X, y)
            assert np.array_equal(ours.coef_, theirs.coef_) and np.array_equal(ours.intercept_, theirs.intercept_)
            assert np.array_equal(ours.predict(X), theirs.predict(X))
        assert np.array_equal(collected.fit("leace")[Cell("S", layer)].projection_, Leace().fit(X, y).projection_)


def test_what_moments_cannot_do(engine: Engine) -> None:
    with pytest.raises(OneClass, match="at least two"):
        MomentStream(3, ["a"])
    with pytest.raises(OneClass, match="No row of class b"):
        streamed([], X, np.full(len(X), "a"))
    with pytest.raises(ProbeError, match="Name all classes"):
        streamed([], X, np.full(len(X), "c"))
    few = fit_streaming(engine, tasks.get("coin")(flips=2).examples(8), "face", ["heads", "tails"], sites=["blocks.1.hook_in"])
    with pytest.raises(ProbeError, match="Use one of mass-mean"):
        few.fit("mlp")
