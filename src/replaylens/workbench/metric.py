"""`Metric`: one number per row of logits, from the metrics that gradients know, or from a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadMetric
from replaylens.engine.gradients.metric import Divergence, LogitDifference, LogProbability, Named, named
from replaylens.engine.pictures.readings import word
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core

RowsFunction = Callable[[Tensor], Tensor]
MetricTokens = str | int | Sequence[str | int]
RowMetric = MetricTokens | RowsFunction | Named | Branch


@dataclass(frozen=True, eq=False)
class Metric:
    """A function of logits, with its name."""

    name: str
    function: RowsFunction

    @classmethod
    def of(cls, engine: Core, given: "RowMetric | Metric") -> "Metric":
        """A metric in any of its forms; BadMetric for others."""
        if isinstance(given, Metric):
            return given
        forms = "logits [rows, vocab] that returns [rows]"
        found = named(Divergence(given.logits()) if isinstance(given, Branch) else given, forms)
        if not isinstance(found, Named):
            return cls(getattr(found, "__name__", "metric"), found)
        function = found.function(engine._target)
        exact = isinstance(found, LogitDifference)  # a difference needs no more digits than its logits have
        return cls(_name(engine, found), function if exact else lambda logits: function(logits.float()))

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [rows, vocab] -> [rows]; BadMetric if the function returns something else, or numbers that are not finite."""
        found: Any = self.function(logits)
        if not isinstance(found, Tensor) or found.shape != logits.shape[:1]:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise BadMetric(f"The metric {self.name} returned {got}. Return one number per row: shape ({len(logits)},).")
        values = found.detach().to("cpu", torch.float32)
        if bad := int((~values.isfinite()).sum()):
            raise BadMetric(f"The metric {self.name} is NaN or infinite in {bad} of {len(values)} rows. Return finite numbers.")
        return values


def _name(engine: Core, metric: Named) -> str:
    shown = lambda token: repr(word(engine.text, engine._target(token)))  # noqa: E731
    match metric:
        case LogitDifference():
            return f"logit difference {shown(metric.right)} - {shown(metric.wrong)}"
        case LogProbability():
            return f"log p({shown(metric.token)})"
    return "KL divergence"


def words(engine: Core, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)
