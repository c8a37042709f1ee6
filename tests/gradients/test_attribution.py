"""Estimates are gradients times moves, real effects are those of edits made alone, and both keep their bits."""

import pytest
import torch
from torch import Tensor

from replaylens import Engine, attribution_patching, errors, integrated_gradients
from replaylens.engine.request.edits import Edit
from replaylens.gradients.attribution import Attribution
from replaylens.gradients.branches import tape as tape_of_branch
from tests.toy_model import VOCAB, engine, random_model

CLEAN = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()
CORRUPT = [*CLEAN[:3], 17, *CLEAN[4:]]
TEXT = "A coin's state is {}. Alice flips. What's the state? A:"


def logits(subject: Engine, tokens: list[int], edits: list[Edit]) -> Tensor:
    return tape_of_branch(subject.prompt(tokens, edits=edits), ()).logits


def coin(compare: bool = True) -> Attribution:
    return attribution_patching(
        Engine.load("coin-plain"), TEXT.format("heads"), TEXT.format("tails"), (" tails", " heads"), compare=compare
    )


def test_the_estimate_is_the_gradient_times_the_move() -> None:
    subject = engine()
    found = attribution_patching(subject, CLEAN, CORRUPT, (3, 8), ["T", "blocks.1.attn.hook_z"])
    clean, corrupt = subject.prompts([CLEAN, CORRUPT], sites=found.sites)
    gradients = corrupt.gradients((3, 8))
    for site, row in zip(found.sites, found.estimate, strict=True):
        move = clean.activations[site] - corrupt.activations[site]
        torch.testing.assert_close(row, (gradients[site] * move).flatten(1).sum(1))
    assert (found.before, found.after) == (gradients.value, clean.gradients((3, 8), "S").value)
    assert found.real is None and found.certified


def test_real_effects_are_those_of_edits_made_alone() -> None:
    """To the bit: in a batch of forks, and as a prompt with the edit in an engine of its own."""
    found = attribution_patching(engine(), CLEAN, CORRUPT, (3, 8), "STC", compare=True)
    rows = engine().prompt(CLEAN, sites="STC").activations
    assert found.real is not None and found.real.shape == (7, 9)
    for i, site in enumerate(found.sites):
        for at in range(9):
            alone = logits(engine(), CORRUPT, [Edit.interchange(site, rows[site][at], at)])
            assert torch.equal(found.real[i, at], torch.tensor(float(alone[3] - alone[8]) - found.before))
    assert not found.real[:, :3].any()  # before the first changed token, rows are the same


def test_bits() -> None:
    """In a busy engine with a small cache, the same bits."""
    expected = attribution_patching(engine(), CLEAN, CORRUPT, 4, "STC", compare=True)
    busy = engine(cache_tokens=64, max_rows=16)
    busy.prompts([CLEAN[:5], list(range(20))])
    again = attribution_patching(busy, CLEAN, CORRUPT, 4, "STC", compare=True)
    assert torch.equal(expected.estimate, again.estimate) and expected.certified and again.certified
    assert expected.real is not None and again.real is not None and torch.equal(expected.real, again.real)
    busy.check_integrity()
    other = attribution_patching(engine(random_model(seed=1)), CLEAN, CORRUPT, 4, "STC")
    assert not torch.equal(other.estimate, expected.estimate)  # negative control


def test_small_moves_are_estimated_well() -> None:
    """First order: if the prompts' embeddings differ by little, estimates and real effects agree, and worse if by more."""
    errors_of = []
    for size in (1e-3, 1.0):
        model = random_model(gain=4.0)
        model.embed[17] = model.embed[CLEAN[3]] * (1 - size) + model.embed[17] * size
        found = attribution_patching(engine(model), CLEAN, CORRUPT, (3, 8), "STC", compare=True)
        assert found.real is not None
        errors_of.append(float((found.estimate - found.real).norm() / found.real.norm()))
    assert errors_of[0] < 0.02 < errors_of[1]


def test_on_a_trained_model() -> None:
    """The grid's strongest effect is at the changed word, and estimates correlate with real effects."""
    found = coin()
    assert found.real is not None and found.correlation > 0.5
    worst = found.worst(3)
    assert len(worst) == 3 and worst["error"].abs().is_monotonic_decreasing
    assert worst["error"].abs().max() == pytest.approx(float((found.estimate - found.real).abs().max()))
    assert found.after > 0 > found.before and list(found.frame.columns) == ["site", "position", "token", "estimate", "real"]


def test_pictures() -> None:
    found = coin()
    drawn = found.plot()
    assert len(drawn.axes) == 2 * (3 + 1) and "Correlation" in found._repr_html_()
    plain = coin(compare=False)
    assert len(plain.plot().axes) == 3 + 1 and "Correlation" not in plain._repr_html_()


@pytest.mark.parametrize("site", ["embed.hook_out", "blocks.1.hook_in"])
def test_integrated_gradients_add_up(site: str) -> None:
    """To the difference of the metric, with an error that falls as the square of the number of steps."""
    model = random_model(gain=4.0)
    gaps = []
    for steps in (1, 4, 16):
        found = integrated_gradients(engine(model), CLEAN, CORRUPT, (3, 8), site, steps=steps)
        assert found.gap == pytest.approx(found.after - found.before - float(found.estimate.sum()), abs=1e-5)
        gaps.append(abs(found.gap or 0.0))
    assert gaps[2] < gaps[1] / 10 < gaps[0] / 10
    assert found.certified and found.estimate.shape == (1, 9)


def test_integrated_gradients_from_zero() -> None:
    found = integrated_gradients(engine(random_model(gain=1.0)), CLEAN, None, 5, "blocks.1.hook_in", steps=64)
    base = logits(engine(random_model(gain=1.0)), CLEAN, [Edit("blocks.1.hook_in", "zero")])
    assert found.before == pytest.approx(float(base.log_softmax(-1)[5]), abs=1e-6)
    assert float(found.estimate.sum()) == pytest.approx(found.after - found.before, rel=0.05)
    assert found.gap == pytest.approx(found.after - found.before - float(found.estimate.sum()), abs=1e-5)
    assert "miss the difference" in found._repr_html_()


def test_effects_of_single_heads() -> None:
    """They add up to the effect of the row, and the real ones are the forks' own."""
    subject, pair = engine(), (3, 8)
    found = attribution_patching(subject, CLEAN, CORRUPT, pair, heads=True, compare=True)
    rows = attribution_patching(subject, CLEAN, CORRUPT, pair, [f"blocks.{i}.attn.hook_z" for i in range(2)])
    assert found.heads == 4 and found.estimate.shape == (2, 9, 4) and found.gap is None
    torch.testing.assert_close(found.estimate.sum(-1), rows.estimate)
    site = "blocks.1.attn.hook_z"
    source = subject.prompt(CLEAN, sites=[site]).activations[site]
    edit = Edit(site, "set", source[5][[2]], positions=5, heads=[2])
    after = logits(subject, CORRUPT, [edit])
    assert found.real is not None
    assert float(found.real[1, 5, 2]) == pytest.approx(float(after[3] - after[8]) - found.before, abs=1e-6)
    assert list(found.frame.columns) == ["site", "position", "token", "head", "estimate", "real"]
    assert len(found.plot().axes) == 2 * (1 + 1) and len(found.worst(3)) == 3
    with pytest.raises(errors.BadRequest, match="without heads"):
        attribution_patching(subject, CLEAN, CORRUPT, pair, "S", heads=True)


def test_integrated_gradients_beside_patches() -> None:
    found = integrated_gradients(engine(), CLEAN, CORRUPT, (3, 8), "blocks.0.hook_in", compare=True)
    assert found.real is not None and torch.equal(found.real[0] != 0, torch.arange(9) == 3)


def test_errors() -> None:
    subject = engine()
    with pytest.raises(errors.BadRequest, match="9 and 4 tokens"):
        attribution_patching(subject, CLEAN, CORRUPT[:4], (3, 8))
    with pytest.raises(errors.BadRequest, match="compare=True"):
        attribution_patching(subject, CLEAN, CORRUPT, (3, 8)).worst()
    with pytest.raises(errors.NoGradient, match="thoughts"):
        attribution_patching(Engine.load("coin-thinking"), TEXT, TEXT, 3)
    with pytest.raises(errors.NoGradient, match="logit lens"):
        attribution_patching(subject, CLEAN, CORRUPT, 3, "Z")
    with pytest.raises(errors.BadRequest, match="one site"):
        integrated_gradients(subject, CLEAN, CORRUPT, 3, "S")
    with pytest.raises(errors.BadRequest, match="there is none"):
        integrated_gradients(subject, CLEAN, None, 3, compare=True)
    with pytest.raises(errors.BadRequest, match="steps"):
        integrated_gradients(subject, CLEAN, CORRUPT, 3, steps=0)
    assert subject.tree.roots() == [] or all(subject.tree.branch(i).status.value == "released" for i in subject.tree.roots())
