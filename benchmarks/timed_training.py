"""Training of models that think against a clock: how long a step takes, and as many steps as there is time for."""

import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.chunks import ChunkedTexts
from replaylens.engine.training.thinking import Model, ThinkingRecipe


class Clock:
    """Seconds since the job began, the same in all its processes."""

    def __init__(self, begin: float) -> None:
        self.begin = begin

    def now(self) -> float:
        return time.time() - self.begin


class _TimeIsUp(Exception):
    """Training ran into the time limit."""


def seconds_per_step(recipe: ThinkingRecipe, texts: ChunkedTexts, device: str, warm: int, timed: int) -> float:
    """Of a model that is thrown away: the median of `timed` steps after `warm` others. A new shape takes a moment longer."""
    short = replace(recipe, steps=warm + timed, warmup=0)
    ticks: list[float] = []
    thinking_train.follow(
        short, texts, thinking_train.initial(short), device, after_step=lambda done, loss: ticks.append(time.time())
    )
    return median(after - before for before, after in pairwise(ticks[warm - 1 :]))


def train(recipe: ThinkingRecipe, texts: ChunkedTexts, device: str, clock: Clock, until: float) -> tuple[Model, list[float]]:
    """The model and the loss of every step it got: all of the recipe's, or as many as the clock allowed."""
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
