"""The Jacobian lens against float64 autograd, row by row; and its fit gives the same bits in any company."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import Engine, lens
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes.lens import TunedLens
from replaylens.gradients import derivatives
from replaylens.workbench.lens import compare_lenses, fit_jacobian_lens
from tests.devices import swept
from tests.toy_model import random_model

TEXTS = [[3, 1, 4, 1, 5], [2, 6, 5]]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "parallel, layer norm": dict(norm="layer", parallel_residual=True),
    "a window": dict(windows=(3, 0), qk_norm=True),
}


class At:
    """Takes the stream entering a block as a leaf."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.leaf: Tensor | None = None

    def wants(self, site: str) -> bool:
        return site == self.site

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.leaf = value.detach().requires_grad_()
        return self.leaf


def own_jacobians(model: Decoder, path: list[int], layer: int) -> Tensor:
    """[positions, d, d]: of the final stream by the one entering a block, at the same position, by autograd in float64."""
    tap = At(f"blocks.{layer}.hook_in")
    final = model(torch.tensor(path), torch.arange(len(path)), SequenceOps([len(path)]), tap)
    assert tap.leaf is not None
    each = torch.eye(final.shape[1], dtype=final.dtype)
    found = []
    for position in range(len(path)):  # all lines of a Jacobian at once
        (lines,) = torch.autograd.grad(final[position], tap.leaf, each, retain_graph=True, is_grads_batched=True)
        found.append(lines[:, position])
    return torch.stack(found)


@pytest.mark.parametrize("shape", swept(SHAPES, "a window"))
def test_it_is_the_mean_of_the_jacobians(shape: str) -> None:
    changes = SHAPES[shape]
    model = random_model(1, gain=4.0, **changes)
    fitted = fit_jacobian_lens(Engine(model), TEXTS, centred=False)
    exact = random_model(1, gain=4.0, **changes).double()
    for layer in range(2):
        truth = torch.cat([own_jacobians(exact, path, layer)[1:] for path in TEXTS]).mean(0)
        mine = fitted.weight[layer].double() + torch.eye(32, dtype=torch.float64)
        assert (mine - truth).norm() / truth.norm() < 1e-5
        assert (truth - torch.eye(32, dtype=torch.float64)).norm() > 0.1, "control: the blocks do something"
    assert not fitted.bias.any()


def test_nothing_passes_between_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with what keys and values do to later rows, the lens is another one."""
    engine = Engine(random_model(1, gain=4.0))
    right = fit_jacobian_lens(engine, TEXTS)
    through = derivatives.through_attention
    monkeypatch.setattr("replaylens.gradients.derivatives.through_attention", lambda *given: through(*given[:7], own=False))
    assert not torch.equal(fit_jacobian_lens(engine, TEXTS).weight, right.weight)


@pytest.mark.slow
def test_the_means_map_to_each_other() -> None:
    engine = Engine(random_model(1, gain=4.0))
    fitted = fit_jacobian_lens(engine, TEXTS, first=0)
    streams = engine.sites.per_layer("S")
    rows = [engine.prompt(path, sites="S").activations for path in TEXTS]
    means = [torch.cat([each[site] for each in rows]).double().mean(0) for site in streams]
    for layer in range(2):
        read = means[layer] + fitted.weight[layer].double() @ means[layer] + fitted.bias[layer].double()
        assert (read - means[-1]).norm() / means[-1].norm() < 1e-5


@pytest.mark.slow
def test_the_fit_is_a_function_of_its_texts() -> None:
    """torch.equal, whatever else the engine has served. Control: another text gives another lens."""
    engine, fresh = Engine(random_model(1)), Engine(random_model(1))
    engine.generate(engine.prompts([[5, 5], [7]]), 4)
    one, two = (fit_jacobian_lens(each, TEXTS) for each in (engine, fresh))
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias) and one.digest == two.digest
    assert fit_jacobian_lens(engine, TEXTS[:1]).digest != one.digest


COIN = "A coin's state is heads. Alice flips. What's the state? A:"


@pytest.fixture(scope="module")
def coin() -> Engine:
    return Engine.load("coin-plain")


@pytest.mark.slow
def test_it_goes_where_a_tuned_lens_goes(coin: Engine, tmp_path: Any) -> None:
    """Saved and read, through Z of a capture and the workbench. It reads the output better than the plain lens does here."""
    engine, text = coin, COIN
    fitted = fit_jacobian_lens(coin, [COIN])
    fitted.save(tmp_path / "lens.safetensors")
    again = TunedLens.load(tmp_path / "lens.safetensors")
    plain, read = lens(engine, text), lens(engine, text, tuned=again)
    assert torch.equal(read.kl, lens(engine, text, tuned=fitted).kl) and torch.equal(read.kl[-1], plain.kl[-1])
    assert read.kl[1:-1, 1:].mean() < plain.kl[1:-1, 1:].mean()
    branch = engine.prompt(text, sites="Z", lens=again)
    assert torch.equal(branch.activations["Z.kl"].t(), read.kl)


@pytest.mark.slow
def test_lenses_side_by_side(coin: Engine) -> None:
    """One line per lens and layer, the model's output last; the figure has a line for each lens."""
    engine, texts, fitted = coin, [COIN, "A coin's state is tails."], fit_jacobian_lens(coin, ["A coin's state"])
    found = compare_lenses(engine, texts, {"Jacobian": fitted})
    plain = [lens(engine, text) for text in texts]
    mean = torch.cat([each.kl[:, 1:] for each in plain], dim=1).double().mean(1)
    assert found.frame["lens"].unique().tolist() == ["plain", "Jacobian"] and len(found.frame) == 10
    assert torch.allclose(torch.tensor(found.frame["kl"][:5].to_numpy()), mean) and found.frame["agreement"].iloc[4] == 1.0
    assert [line.get_label() for line in found.plot().axes[0].lines] == ["plain", "Jacobian"]
    assert "<table" in found._repr_html_() and "2 lenses" in repr(found)
    with pytest.raises(BadRequest, match="is the plain lens"):
        compare_lenses(engine, texts, {"plain": fitted})


def test_misuse_is_named() -> None:
    engine = Engine(random_model(1))
    with pytest.raises(BadRequest, match="No texts"):
        fit_jacobian_lens(engine, [])
    with pytest.raises(BadRequest, match="Text 1 has 1 tokens"):
        fit_jacobian_lens(engine, [[1, 2], [3]])
    with pytest.raises(BadRequest, match="No texts"):
        compare_lenses(engine, [], {})
    with pytest.raises(BadRequest, match="Invalid first=-1"):
        compare_lenses(engine, [[1, 2]], {}, first=-1)
    with pytest.raises(BadRequest, match="Invalid lenses="):
        compare_lenses(engine, [[1, 2]], [])  # type: ignore[arg-type]
