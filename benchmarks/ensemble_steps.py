"""`EnsembleSteps`: the training steps of an `Ensemble` without work of the host between them.

Texts, the chunks of every step's batch and the learning rates lie on the device, and a counter there says which step it is. On
a CUDA device a step is one graph, or a few under `cut`, whose steps have several shapes.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.ensemble import COMPLETION, Ensemble
from replaylens.engine.training.thinking import ChunkedTexts, left_out
from replaylens.engine.training.trainer import BETAS, GRADIENT_NORM, WEIGHT_DECAY, lr_at

AHEAD = 128
"""steps whose batches are drawn at a time, while the device works on those before"""


class EnsembleSteps:
    """Mutates an ensemble, by `steps` steps of its recipes."""

    def __init__(self, ensemble: Ensemble, texts: ChunkedTexts) -> None:
        """Precondition: texts of the recipes' width, with completions of weight COMPLETION."""
        self.ensemble, self.texts = ensemble, texts
        self.recipe = ensemble.recipes[0]
        assert self.recipe.width is not None and texts.recipe.completion_weight == COMPLETION
        self.graphed = ensemble.device != "cpu"
        device, steps = ensemble.device, self.recipe.steps
        chunks = self.recipe.width // self.recipe.thinking.chunk
        self.chunks = torch.zeros(steps, self.recipe.batch, chunks, dtype=torch.int32, device=device)
        self.losses = torch.zeros(steps, len(ensemble.recipes), device=device)
        self.rates = torch.tensor([lr_at(self.recipe, step) for step in range(steps)], device=device)
        self.at, self.rate = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros((), device=device)
        self.weights = ensemble.weights
        self.optimizer = torch.optim.AdamW(
            [self.weights], lr=self.rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True, capturable=self.graphed
        )
        self.weights.grad = torch.zeros_like(self.weights)
        self.optimizer.step()  # makes the moments; learning rate and gradient are zero
        next(iter(self.optimizer.state.values()))["step"].zero_()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def taken(self) -> Iterator[int]:
        """Take all steps; yields the number of steps done after each `AHEAD`, on the device."""
        steps = self.recipe.steps
        self._draw(0)
        for begin in range(0, steps, AHEAD):
            for step in range(begin, min(begin + AHEAD, steps)):
                self._take(left_out(step, self.chunks.shape[-1]) if self.recipe.cut else 0)
            if begin + AHEAD < steps:
                self._draw(begin + AHEAD)
            self._wait()
            yield min(begin + AHEAD, steps)

    def _wait(self) -> None:
        if self.graphed:
            torch.cuda.synchronize()

    def _draw(self, begin: int) -> None:
        """Write the chunks of the next batches."""
        end = min(begin + AHEAD, self.recipe.steps)
        drawn = np.stack([self.texts.numbers(step) for step in range(begin, end)]).astype(np.int32)
        self.chunks[begin:end] = torch.from_numpy(drawn).to(self.chunks.device, non_blocking=True)

    def _take(self, first: int) -> None:
        if not self.graphed:
            self._step(first)
            return
        if first not in self._graphs:
            self._graphs[first] = self._captured(first)
        self._graphs[first].replay()

    def _captured(self, first: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._gradients(first)  # loads the kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=next(iter(self._graphs.values())).pool() if self._graphs else None):
            self._step(first)
        return graph

    def _gradients(self, first: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        batch = self.texts.table.batch(self.chunks.index_select(0, self.at)[0])
        losses = self.ensemble.losses(batch, first)
        return losses, torch.autograd.grad(losses.sum(), self.ensemble.leaves)

    def _step(self, first: int) -> None:
        """One step of every member, with its gradient clipped to the norm of `trainer.descend`."""
        losses, gradients = self._gradients(first)
        self.losses.index_copy_(0, self.at, losses.detach()[None])
        together = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
        scale = (GRADIENT_NORM / (together.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        assert self.weights.grad is not None
        torch.mul(together, scale, out=self.weights.grad)
        self.rate.copy_(self.rates.index_select(0, self.at)[0])
        self.optimizer.step()
        self.at += 1
