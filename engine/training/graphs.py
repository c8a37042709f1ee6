"""Training steps as CUDA graphs. A step of a small model is many hundred launches, which take far longer than their work.

Forward, backward, clipping and Adam of one shape are captured once and replayed on new inputs. The learning rate is a tensor,
which Adam rounds differently from a float, so graphed steps are deterministic but not bit-equal to `LaunchedSteps`.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from replaylens.engine.passes.recorded import held_collector
from replaylens.engine.training.recipe import Recipe
from replaylens.engine.training.trainer import adam, descend, lr_at

M = TypeVar("M", bound=nn.Module)
Inputs = tuple[Tensor, ...]


class GraphedSteps(Generic[M]):
    """The steps of a recipe on a CUDA device, one graph per key. Inputs of all steps have the same shapes."""

    def __init__(
        self,
        recipe: Recipe,
        model: M,
        inputs_at: Callable[[int], tuple[int, Inputs]],
        loss_of: Callable[[M, int, Inputs], Tensor],
    ) -> None:
        """`inputs_at(step)` returns a key and the inputs of a step. Whatever the key determines is captured in its graph.
        `loss_of(model, key, inputs)` must not synchronize with the device.
        """
        self.recipe, self.model, self.inputs_at, self.loss_of = recipe, model, inputs_at, loss_of
        self.lr = torch.zeros((), device="cuda")
        self.optimizer = adam(model, self.lr, capturable=True)
        self._inputs: Inputs = ()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def take(self, step: int) -> Tensor:
        """Take step number `step`. Returns its loss, which is valid until the next step."""
        key, inputs = self.inputs_at(step)
        if not self._graphs:
            self._begin(inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph, loss = self._graphs[key]
        self.lr.fill_(lr_at(self.recipe, step))
        graph.replay()
        return loss

    def _begin(self, inputs: Inputs) -> None:
        """Allocate the inputs and Adam's moments, which must not happen during a capture."""
        self._inputs = tuple(torch.empty_like(x) for x in inputs)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr  # a loaded state has its own copy
        if self.optimizer.state:
            return
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # learning rate and gradients are zero: only the step count changes
        for moments in self.optimizer.state.values():
            moments["step"].zero_()

    def _capture(self, key: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.optimizer.zero_grad()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.loss_of(self.model, key, self._inputs).backward()  # loads the kernels; the gradients are discarded
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with held_collector(), torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            loss = descend(self.model, self.optimizer, self.loss_of(self.model, key, self._inputs))
        self.optimizer.zero_grad()
        return graph, loss
