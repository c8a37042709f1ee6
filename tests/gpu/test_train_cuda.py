"""Training steps replayed from CUDA graphs are deterministic and resumable, and equal ordinarily launched steps."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import thinking as thinking_train
from replaylens.training.thinking import ThinkingRecipe
from replaylens.training.trainer import LaunchedSteps

pytestmark = pytest.mark.gpu
RECIPE = replace(thinking_zoo.recipe("coin-thinking"), steps=12, warmup=2, batch=4, pool=8, longest=4, width=96, cut=True)


def trained(recipe: ThinkingRecipe, state: Path | None = None, stop_at: int | None = None) -> list[torch.Tensor]:
    """Weights after the whole recipe, or after an interrupted run."""

    class Stop(Exception):
        pass

    def watch(done: int, loss: float) -> None:
        if done == stop_at:
            raise Stop

    model = thinking_train.initial(recipe)
    texts = thinking_train.texts_of(recipe, "cuda")
    with suppress(Stop):
        thinking_train.follow(recipe, texts, model, "cuda", state, 3, watch)
    return [x.detach().cpu() for x in model.state_dict().values()]


def test_twice_the_same_bits_and_after_a_break_too(tmp_path: Path) -> None:
    first, state = trained(RECIPE), tmp_path / "run.safetensors"
    assert all(torch.equal(a, b) for a, b in zip(first, trained(RECIPE), strict=True))
    trained(RECIPE, state, stop_at=7)
    assert state.exists()
    assert all(torch.equal(a, b) for a, b in zip(first, trained(RECIPE, state), strict=True))
    other = trained(replace(RECIPE, seed=1))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_steps_are_those_of_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal up to Adam's rounding of a learning rate that is a tensor."""
    graphed = trained(RECIPE)

    def launched(recipe, model, inputs_at, loss_of):  # type: ignore[no-untyped-def]
        return LaunchedSteps(recipe, model, lambda m, step: loss_of(m, *inputs_at(step)))

    monkeypatch.setattr(thinking_train, "GraphedSteps", launched)
    for a, b in zip(graphed, trained(RECIPE), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
