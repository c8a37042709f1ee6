"""Metrics, what they return, and the errors of everything that has no gradient."""

from typing import Any

import pytest
import torch

from replaylens import Edit, Engine, errors
from replaylens.engine.gradients.branches import tape as tape_of_branch
from replaylens.engine.gradients.gradients import Divergence, LogitDifference, LogProbability, derivative
from tests.toy_model import VOCAB, engine

PATH = list(range(1, 12))


def test_metrics_are_what_their_names_say() -> None:
    subject = engine()
    a, b = subject.prompts([PATH, PATH[:4]])
    mine, other = tape_of_branch(a, ()).logits, tape_of_branch(b, ()).logits
    p, q = other.softmax(-1), mine.softmax(-1)
    expected = {
        LogitDifference(3, 8): mine[3] - mine[8],
        LogProbability(5): mine.log_softmax(-1)[5],
        (3, 8): mine[3] - mine[8],
        5: mine.log_softmax(-1)[5],
        b: (p * (p.log() - q.log())).sum(),
        Divergence(other): (p * (p.log() - q.log())).sum(),
    }
    for metric, value in expected.items():
        assert a.gradients(metric, "S").value == pytest.approx(float(value), rel=1e-5)


def test_derivatives_in_closed_form() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    other = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    one = torch.nn.functional.one_hot(torch.tensor([3, 8]), VOCAB).float()
    expected = {
        LogitDifference(3, 8): one[0] - one[1],
        LogProbability(3): one[0] - logits.softmax(-1),
        Divergence(other): logits.softmax(-1) - other.softmax(-1),
    }
    for metric, slope in expected.items():
        torch.testing.assert_close(derivative(metric.function(int), logits)[1], slope)


def test_divergence_from_itself_has_no_slope() -> None:
    branch = engine().prompt(PATH)
    found = branch.gradients(branch.fork()[0], "S")
    assert found.value == pytest.approx(0.0, abs=1e-6) and max(float(g.abs().max()) for g in found.values()) < 1e-5


def test_tokens_as_text() -> None:
    subject = Engine.load("coin-plain")
    branch = subject.prompt("A coin's state is heads. Alice flips. What's the state? A:", sites="S")
    found = branch.gradients((" tails", " heads"))
    ids = [subject.text.encode(word, special=False)[0] for word in (" tails", " heads")]
    assert torch.equal(found["blocks.0.hook_in"], branch.gradients(LogitDifference(*ids))["blocks.0.hook_in"])
    assert found.value > 0 and list(found) == subject.sites.per_layer("S")


def test_the_mapping() -> None:
    branch = engine().prompt(PATH)
    found = branch.gradients(LogitDifference(3, 8), ["blocks.1.hook_resid_pre", "blocks.0.attn.hook_pattern"])
    assert list(found) == ["blocks.0.attn.hook_pattern", "blocks.1.hook_in"] and found.tokens == tuple(PATH)
    assert torch.equal(found["blocks.1.hook_resid_pre"], found["blocks.1.hook_in"])
    assert found["blocks.0.attn.hook_pattern"].shape == (11, 4, 11)
    expected = (found["blocks.1.hook_in"] * found.activations["blocks.1.hook_in"]).sum(-1)
    torch.testing.assert_close(found.times_input()["blocks.1.hook_in"], expected)
    found["blocks.1.hook_in"].zero_()  # a copy
    assert found["blocks.1.hook_in"].any()
    with pytest.raises(errors.UnknownSite, match=r"No gradient at site 'blocks\.0\.hook_in'"):
        found["blocks.0.hook_in"]


def test_certified() -> None:
    subject = engine()
    branch = subject.prompt(PATH)
    fast = subject.prompt(PATH).generate(2, deterministic=False)
    assert branch.gradients(LogProbability(3), "S").certified
    assert not branch.gradients(lambda logits: logits[3], "S").certified
    assert not fast.gradients(LogProbability(3), "S").certified
    assert not branch.gradients(fast, "S").certified


def test_within_inference_mode() -> None:
    branch = engine().prompt(PATH)
    expected = branch.gradients(LogProbability(3), "S")
    with torch.inference_mode():
        inside = branch.gradients(LogProbability(3), "S")
    assert all(torch.equal(inside[site], expected[site]) for site in expected)
    assert not any(x.is_inference() or x.requires_grad for x in inside.values())


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "three tokens": ((1, 2, 3), "S", errors.BadMetric, "a pair of tokens"),
    "nothing": (None, "S", errors.BadMetric, "Invalid metric=None"),
    "a class": (LogProbability, "S", errors.BadMetric, "Invalid metric="),
    "a vector": (lambda logits: logits, "S", errors.BadMetric, r"shape \(61,\)"),
    "a number": (lambda logits: 1.0, "S", errors.BadMetric, "returned 1.0"),
    "detached": (lambda logits: logits[3].detach(), "S", errors.BadMetric, "does not depend on the logits"),
    "not finite": (lambda logits: logits[3] / 0, "S", errors.BadMetric, "inf"),
    "other logits": (Divergence(torch.zeros(5)), "S", errors.BadMetric, "5 logits, but the model has 61"),
    "not logits": (Divergence("heads"), "S", errors.BadMetric, "Give a branch"),
    "an unknown token": (LogProbability(99), "S", errors.BadRequest, "Token 99"),
    "Z": (LogProbability(3), "SZ", errors.NoGradient, "logit lens"),
    "a value beside the pass": (LogProbability(3), ["blocks.0.ln1.hook_scale"], errors.NoGradient, "hook_scale"),
    "one reader of several": (LogProbability(3), ["blocks.0.attn.q.hook_in"], errors.NoGradient, "q.hook_in"),
    "no sites": (LogProbability(3), None, errors.BadRequest, "Name some"),
    "a number of sites": (LogProbability(3), 5, errors.BadRequest, "Invalid sites=5"),
    "an unknown site": (LogProbability(3), "blocks.7.hook_in", errors.UnknownSite, "Nearest"),
}


@pytest.mark.parametrize("what", BAD)
def test_errors(what: str) -> None:
    metric, sites, error, text = BAD[what]
    with pytest.raises(error, match=text):
        engine().prompt(PATH).gradients(metric, sites)


def test_the_other_branch_of_a_divergence_is_only_read() -> None:
    """It may have hook functions and edited patterns."""
    subject = engine()
    branch, halved = subject.prompt(PATH), ("blocks.0.hook_in", lambda value, hook: value / 2)
    cut = Edit("blocks.0.attn.hook_pattern", "mask", positions=5, keys=2)
    for other, certified in (
        (subject.prompt(PATH, edits=[cut]), True),
        (subject.prompt(PATH, hooks=[halved]), False),
        (subject.prompt(PATH[::-1]), True),
    ):
        found = branch.gradients(other, "S")
        wanted = branch.gradients(Divergence(other.logits()), "S")
        assert found.value > 0 and found.certified is certified
        assert all(torch.equal(found[site], wanted[site]) for site in wanted)


def test_captured_sites_without_a_gradient_are_left_out() -> None:
    branch = engine().prompt(PATH, sites=["blocks.0.ln1.hook_scale", "blocks.1.hook_in"])
    assert list(branch.gradients(LogProbability(3))) == ["blocks.1.hook_in"]


def test_what_has_no_gradient() -> None:
    """Hook functions, Thinking-States models, released branches, and calls from within a pass."""
    subject = engine()
    hooked = subject.prompt(PATH, hooks=[("blocks.0.hook_in", lambda value, hook: value)])
    with pytest.raises(errors.NoGradient, match="hook functions"):
        hooked.gradients(LogProbability(3), "S")
    thinking = Engine.load("coin-thinking").prompt("A coin's state is heads. Alice flips.")
    with pytest.raises(errors.NoGradient, match="thoughts"):
        thinking.gradients(LogProbability(3), "S")
    released = subject.prompt(PATH)
    released.release()
    with pytest.raises(errors.ClosedBranch):
        released.gradients(LogProbability(3), "S")


def test_within_a_pass() -> None:
    subject = engine()
    branch = subject.prompt(PATH)

    def hook(value: Any, context: Any) -> None:
        branch.gradients(LogProbability(3), "S")

    with pytest.raises(errors.BadRequest, match="during a pass"):
        subject.prompt(PATH, hooks=[("blocks.0.hook_in", hook)])


def test_a_name_that_goes_in_comes_out() -> None:
    found = engine().prompt(PATH).gradients((3, 8), ["blocks.1.attn.hook_in", "blocks.0.hook_resid_post"])
    assert torch.equal(found["blocks.1.attn.hook_in"], found["blocks.1.ln1.hook_out"])
    assert found["blocks.0.hook_resid_post"].shape == (len(PATH), 32) and "2 sites" in repr(found)
