"""`Metric`: one number per row of logits: a difference of two tokens' logits, a log-probability, or a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.pictures.readings import word
from replaylens.engine.request.values import integer, shown
from replaylens.engine.serving.core import Core

RowsFunction = Callable[[Tensor], Tensor]
MetricTokens = str | int | Sequence[str | int]
FORMS = "a pair of tokens (their logit difference), one token (its log-probability), or a function of logits [rows, vocab]"


@dataclass(frozen=True, eq=False)
class Metric:
    """A function of logits, with its name."""

    name: str
    function: RowsFunction

    @classmethod
    def of(cls, engine: Core, given: "MetricTokens | RowsFunction | Metric") -> "Metric":
        """A pair of tokens, one token, or a function of logits [rows, vocab] that returns [rows]; BadRequest for others."""
        if isinstance(given, Metric):
            return given
        if isinstance(given, str) or integer(given) is not None:
            (token,) = engine.token_ids_of([given])  # type: ignore[list-item]
            return cls(f"log p({_word(engine, token)})", lambda logits: logits.float().log_softmax(-1)[:, token])
        if isinstance(given, Sequence) and len(given) == 2:
            right, wrong = engine.token_ids_of(given)
            name = f"logit difference {_word(engine, right)} - {_word(engine, wrong)}"
            return cls(name, lambda logits: (logits[:, right] - logits[:, wrong]).float())
        if callable(given):
            return cls(getattr(given, "__name__", "metric"), given)
        raise BadRequest(f"Invalid metric={shown(given)}. Give {FORMS}.")

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [rows, vocab] -> [rows]; BadRequest if the function returns something else."""
        found: Any = self.function(logits)
        if not isinstance(found, Tensor) or found.shape != logits.shape[:1]:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise BadRequest(f"The metric {self.name} returned {got}. Return one number per row: shape ({len(logits)},).")
        return found.detach().to("cpu", torch.float32)


def _word(engine: Core, token: int) -> str:
    return repr(word(engine.text, token))


def words(engine: Core, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)
