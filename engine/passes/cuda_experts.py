"""The arithmetic of mixtures of experts on a CUDA device. There is none yet: models with experts are refused here."""

from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, ModelConfig
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.routing import Routing


def require_supported(config: ModelConfig) -> None:
    """UnsupportedModel if the kernels cannot compute a model of this config."""
    if config.slopes:
        raise UnsupportedModel("ALiBi is not supported on CUDA: the kernel adds nothing to scores. Use device='cpu'.")
    if config.sinks:
        raise UnsupportedModel("Attention sinks are not supported on CUDA: the kernel has none. Use device='cpu'.")
    if config.mixture is not None:
        raise _refusal()


def _refusal() -> UnsupportedModel:
    return UnsupportedModel("Mixtures of experts are not supported on CUDA: there is no kernel for them. Use device='cpu'.")


class ExpertOps:
    """The part of `RowOps` that belongs to experts."""

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        raise _refusal()

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        raise _refusal()

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        raise _refusal()

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        raise _refusal()

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        raise _refusal()

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        raise _refusal()

    def combine(self, outs: Tensor, weights: Tensor) -> Tensor:
        raise _refusal()
