"""`Tape`: the forward pass of one path, as its gradients need it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.errors import NoGradient
from replaylens.engine.gradients.backward import Backward, needed_sites
from replaylens.engine.gradients.gradients import Gradients
from replaylens.engine.gradients.metric import LogitsFunction, derivative, value_of
from replaylens.engine.model import modes
from replaylens.engine.passes.finite import finite
from replaylens.engine.passes.runner import Runner, WholePass
from replaylens.engine.request.capture import HEAD_SITES, PassTap
from replaylens.engine.request.placed import PlacedEdit


@dataclass(frozen=True, eq=False)
class Tape:
    """The values of one path's pass, to the bits of committed rows. Takes as much memory as a step of training."""

    runner: Runner
    tokens: tuple[int, ...]
    edits: tuple[PlacedEdit, ...]
    asked: tuple[str, ...]
    """the sites whose gradients can be computed, in model order"""
    forward: WholePass
    """with the values of the asked sites, and of those that the backward pass reads"""

    @property
    def logits(self) -> Tensor:
        """Of the last row: [vocab]."""
        return self.forward.logits

    def value(self, site: str) -> Tensor:
        """A copy of the value at an asked site, to the bits of a capture: [rows, ...]."""
        return _in_order((site,), self.forward.values, len(self.tokens))[site]

    @classmethod
    @torch.inference_mode()
    def of(
        cls, runner: Runner, tokens: list[int], edits: tuple[PlacedEdit, ...], asked: tuple[str, ...], backward: bool = True
    ) -> "Tape":
        """Computes the path alone, in one pass. Precondition: no other thread computes on the runner.

        backward  False: only values and metrics will be read, so nothing else is kept
        """
        if runner.device != "cpu":
            raise NoGradient("Gradients are computed on a CPU only. Load the model with device='cpu'.")
        if fixed := [edit.site for edit in edits if edit.site.endswith("attn.hook_pattern")]:
            raise NoGradient(f"No gradient through an edit of {fixed[0]}. Edit attn.hook_z or attn.hook_v instead.")
        edits = tuple(known for edit in edits if (known := edit.on_path(tokens)) is not None)
        head = [site for site in asked if site in HEAD_SITES]
        needed = needed_sites(runner.model.config) if backward else frozenset()
        tap = PassTap(needed | (frozenset(asked) - frozenset(head)))
        forward = runner.whole(tokens, edits, tap)
        if head:
            forward.values.update(runner.head(forward.residual, head))
        return cls(runner, tuple(tokens), edits, asked, forward)

    def measure(self, function: LogitsFunction) -> float:
        """The metric alone, to the bits of `Gradients.value`."""
        with modes.canonical(1):
            return float(value_of(function, self.logits))

    @torch.inference_mode()
    def gradients(self, function: LogitsFunction, aliases: Mapping[str, str], certified: bool) -> Gradients:
        """The gradients of a metric at the asked sites. On one thread, so that the number of threads changes no bit."""
        num_keys, asked = len(self.tokens), frozenset(self.asked)
        with modes.canonical(1):
            value, g = derivative(function, self.logits)
            found = Backward(self.runner.model, self.forward, self.edits, asked).run(g)
            kept = _in_order(self.asked, found, num_keys)
        for site, gradient in kept.items():
            finite(gradient, f"gradients at {site}")
        values = _in_order(self.asked, self.forward.values, num_keys)
        return Gradients(value, self.tokens, certified, values, kept, aliases)


def _in_order(sites: tuple[str, ...], tensors: Mapping[str, Tensor], num_keys: int) -> dict[str, Tensor]:
    """Copies that autograd can use and that share no memory. Patterns have room for whole blocks of keys, cut here."""
    with torch.inference_mode(False):
        cut = {site: tensors[site][..., :num_keys] if site.endswith("hook_pattern") else tensors[site] for site in sites}
        return {site: x.clone(memory_format=torch.contiguous_format) for site, x in cut.items()}
