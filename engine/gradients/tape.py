"""`Tape`: the forward pass of one path, as its gradients need it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.errors import NoGradient
from replaylens.engine.gradients.backward import Backward, needed_sites
from replaylens.engine.gradients.gradients import Gradients
from replaylens.engine.gradients.metric import LogitsFunction, derivative, value_of
from replaylens.engine.gradients.products import BackwardProducts, HostProducts
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
        """Of the last row: [vocab], on the host, where metrics are computed."""
        return self.forward.logits.cpu()

    def value(self, site: str) -> Tensor:
        """A copy of the value at an asked site, to the bits of a capture: [rows, ...], on the host."""
        return _in_order((site,), self.forward.values, len(self.tokens))[site]

    @classmethod
    @torch.inference_mode()
    def of(
        cls, runner: Runner, tokens: list[int], edits: tuple[PlacedEdit, ...], asked: tuple[str, ...], backward: bool = True
    ) -> "Tape":
        """Computes the path alone, in one pass. Precondition: no other thread computes on the runner.

        backward  False: only values and metrics will be read, so nothing else is kept
        """
        if runner.kernels and (inside := [site for site in asked if site.endswith(("hook_pattern", "hook_attn_scores"))]):
            raise NoGradient(f"No gradient at {inside[0]} on a GPU, whose kernels never store it. Use device='cpu'.")
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
        """The gradients of a metric at the asked sites. On one thread, so that the number of threads changes no bit.

        On a GPU, metric and edits are differentiated on the host, and everything else on the device. Results are on the host.
        """
        num_keys, asked, products = len(self.tokens), frozenset(self.asked), self._products()
        with modes.canonical(1):
            value, g = derivative(function, self.logits)
            found = Backward(self.runner.model, self.forward, self.edits, asked, products).run(g.to(self.runner.device))
            for site in self.asked:
                finite(found[site], f"gradients at {site}")
            kept = _in_order(self.asked, found, num_keys)
        values = _in_order(self.asked, self.forward.values, num_keys)
        return Gradients(value, self.tokens, certified and products.certified, values, kept, aliases)

    def _products(self) -> BackwardProducts:
        if not self.runner.kernels:
            return HostProducts()
        from replaylens.engine.gradients.cuda import KernelProducts  # needs triton

        return KernelProducts()


def _in_order(sites: tuple[str, ...], tensors: Mapping[str, Tensor], num_keys: int) -> dict[str, Tensor]:
    """Copies on the host that autograd can use, sharing no memory. Patterns have room for whole blocks of keys, cut here."""
    with torch.inference_mode(False):
        cut = {site: tensors[site][..., :num_keys] if site.endswith("hook_pattern") else tensors[site] for site in sites}
        return {site: x.to("cpu", copy=True, memory_format=torch.contiguous_format) for site, x in cut.items()}
