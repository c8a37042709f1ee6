"""Timed training of models that think: the time per step, and as many steps as the time allows."""

import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.thinking import ChunkedTexts, Model, ThinkingRecipe


class Clock:
    """Seconds since the job began, the same in all its processes."""

    def __init__(self, begin: float) -> None:
        self.begin = begin

    def now(self) -> float:
        return time.time() - self.begin


class _TimeIsUp(Exception):
    """Training ran into the time limit."""


def seconds_per_step(recipe: ThinkingRecipe, texts: ChunkedTexts, device: str, warm: int, timed: int) -> float:
    """Median of `timed` steps after `warm` others, on a model that is discarded; the first step of a new shape takes longer."""
    short = replace(recipe, steps=warm + timed, warmup=0)
    ticks: list[float] = []
    thinking_train.follow(
        short, texts, thinking_train.initial(short), device, after_step=lambda done, loss: ticks.append(time.time())
    )
    return median(after - before for before, after in pairwise(ticks[warm - 1 :]))


def train(recipe: ThinkingRecipe, texts: ChunkedTexts, device: str, clock: Clock, until: float) -> tuple[Model, list[float]]:
    """The model and the loss of every step: all steps of the recipe, or as many as the time allowed."""
    model, losses = thinking_train.initial(recipe), []

    def watch(done: int, loss: float) -> None:
        losses.append(loss)
        if clock.now() > until and done < recipe.steps:
            raise _TimeIsUp

    try:
        thinking_train.follow(recipe, texts, model, device, after_step=watch)
    except _TimeIsUp:
        model.requires_grad_(False)
    return model, losses
