"""`Ensemble`: models that train together become what they become alone."""

from dataclasses import replace

import pytest
import torch

from benchmarks.ensemble import Ensemble
from benchmarks.ensemble_steps import EnsembleSteps
from benchmarks.thinking_arms import CHANGES, TINY, Arm, ablations, methods
from benchmarks.thinking_texts import grouped
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.thinking import Model, ThinkingRecipe

BASE = Arm("counts")
MIXED = [BASE, replace(BASE, read_layer=3), replace(BASE, write_layer=1, completion_weight=1.0, thought_loss="chunks")]


def alone(recipe: ThinkingRecipe) -> tuple[Model, list[float]]:
    losses: list[float] = []
    texts, model = thinking_train.texts_of(recipe, "cpu"), thinking_train.initial(recipe)
    return thinking_train.follow(recipe, texts, model, after_step=lambda done, loss: losses.append(loss)), losses


@pytest.mark.parametrize(
    "arms", [MIXED, [Arm("hops", "cot"), Arm("hops", "cot", completion_weight=1.0)]], ids=["thinking", "cot"]
)
def test_members_train_as_they_do_alone(arms: list[Arm]) -> None:
    """All steps of the recipe, among them steps under `cut`. Batched products round differently, so bits may differ."""
    recipes = [replace(TINY, tokens=384).recipe(arm) for arm in arms]
    steps = EnsembleSteps(Ensemble(recipes, "cpu"), thinking_train.texts_of(recipes[0], "cpu"))
    assert list(steps.taken()) == [recipes[0].steps]
    for i, (recipe, member) in enumerate(zip(recipes, steps.ensemble.members(), strict=True)):
        model, losses = alone(recipe)
        torch.testing.assert_close(steps.losses[:, i], torch.tensor(losses), rtol=1e-5, atol=0)
        for mine, its in zip(member.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=2e-5)
    assert not torch.allclose(steps.losses[:, 0], steps.losses[:, 1], rtol=1e-4)  # what members differ in has an effect


def test_groups_share_texts_and_shapes() -> None:
    arms = list(dict.fromkeys([*methods(("counts",), (0, 1)), *ablations(("counts",), CHANGES, TINY.layers, (0,))]))
    groups = grouped(arms, TINY)
    assert sorted(arm.name for group in groups for arm in group) == sorted(arm.name for arm in arms)
    assert sorted(map(len, groups)) == [1] * 9 + [6]  # two seeds of three methods, three chunk sizes, without `cut`
    for group in groups:
        assert len({(arm.method, arm.chunk, arm.seed) for arm in group}) == 1
    with pytest.raises(AssertionError):
        Ensemble([TINY.recipe(BASE), TINY.recipe(replace(BASE, chunk=2))], "cpu")
