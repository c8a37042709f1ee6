"""`Gradients`: of a scalar of the logits, at the sites of one path."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, UnknownSite
from replaylens.engine.model import modes
from replaylens.engine.request.values import integer, short_repr
from replaylens.kernels import cpu as portable

# ---- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Gradients(Mapping[str, Tensor]):
    """Site -> the gradient of the metric at every position of the path, [positions, *site shape].

    A site's gradient is that of its value after the branch's edits, as captures show it. A pattern has as many keys as the
    path has positions, and gradient 0 at the keys that a row does not see.
    """

    value: float
    """the metric itself"""
    tokens: tuple[int, ...]
    """the path"""
    certified: bool
    """whether the bits are promised: a canonical path, and a metric that is data rather than a function"""
    activations: Mapping[str, Tensor]
    """the values at the same sites, to the bits that captures have"""
    _found: Mapping[str, Tensor] = field(repr=False)
    _aliases: Mapping[str, str] = field(repr=False)

    def __repr__(self) -> str:
        promised = "certified" if self.certified else "not certified"
        return f"Gradients(of {self.value:.4g} at {len(self._found)} sites, {len(self.tokens)} positions, {promised})"

    def __getitem__(self, site: str) -> Tensor:
        """A copy of a site's gradient, by its name or a legacy name."""
        return self.peek(site).clone()

    def peek(self, site: str) -> Tensor:
        """As `gradients[site]`, but without a copy. The caller must not change it."""
        name = self._aliases.get(site, site)
        if name not in self._found:
            raise UnknownSite(f"No gradient at site {site!r:.60}. There are: {', '.join(self._found)}.")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def times_input(self) -> dict[str, Tensor]:
        """Gradient times input, summed over features: site -> [positions]. To first order, the effect of zeroing a row,
        with the opposite sign."""
        return {site: row_sums(g * self.activations[site]) for site, g in self._found.items()}


def row_sums(x: Tensor) -> Tensor:
    """[rows, ...] -> [rows]"""
    with modes.canonical():
        return portable.row_sums(x.flatten(1))[:, 0]


# ---- metric ----------------------------------------------------------------------------------------------------------
# Metrics: scalars of the logits that follow a path, and their derivative.

LogitsFunction = Callable[[Tensor], Tensor]
"""the last row's logits [vocab] -> a scalar"""
TokenId = Callable[[str | int], int]
"""a token, as text or id -> its id"""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """A named metric and its derivative, in portable arithmetic on the host."""

    value: LogitsFunction
    """[..., vocab] -> [...]"""
    slope: LogitsFunction
    """[vocab] -> [vocab]"""

    def __call__(self, logits: Tensor) -> Tensor:
        return self.value(logits)


def _log_softmax(logits: Tensor) -> Tensor:
    """A copy on the host, in float32."""
    return portable.log_softmax_(logits.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format))


def _one_hot(token: int, like: Tensor) -> Tensor:
    return (torch.arange(len(like)) == token).to(torch.float32)


def _exp(x: Tensor) -> Tensor:
    return portable.apply("exp", x)


@dataclass(frozen=True)
class LogitDifference:
    """The logit of `right` minus that of `wrong`; tokens as text or ids."""

    right: str | int
    wrong: str | int

    def function(self, target: TokenId) -> ClosedForm:
        """The metric as a function of the logits."""
        right, wrong = target(self.right), target(self.wrong)
        return ClosedForm(lambda x: x[..., right] - x[..., wrong], lambda x: _one_hot(right, x) - _one_hot(wrong, x))


@dataclass(frozen=True)
class LogProbability:
    """The log-probability of a token, as text or id."""

    token: str | int

    def function(self, target: TokenId) -> ClosedForm:
        """The metric as a function of the logits."""
        token = target(self.token)
        return ClosedForm(lambda x: _log_softmax(x)[..., token], lambda x: _one_hot(token, x) - _exp(_log_softmax(x)))


@dataclass(frozen=True, eq=False)
class Divergence:
    """KL(other || this): how far the distribution of the next token is from another one.

    other  a branch of the same engine, or logits [vocab]
    """

    other: Any

    def function(self, target: TokenId) -> ClosedForm:
        """The metric as a function of the logits. Precondition: `other` is a tensor; `Branch.gradients` replaces branches."""
        if not isinstance(self.other, Tensor) or self.other.dim() != 1:
            raise BadRequest(f"Invalid Divergence({short_repr(self.other)}). Give a branch, or a tensor of logits [vocab].")
        expected = _log_softmax(self.other)
        weights = _exp(expected)

        def divergence(logits: Tensor) -> Tensor:
            if logits.shape[-1:] != expected.shape:
                raise BadRequest(f"Divergence from {len(expected)} logits, but the model has {logits.shape[-1]}. Give as many.")
            return portable.row_sums(weights * (expected - _log_softmax(logits)))[..., 0]

        return ClosedForm(divergence, lambda x: _exp(_log_softmax(x)) - weights)


Named = LogitDifference | LogProbability | Divergence
AnyMetric = Named | str | int | Sequence[str | int] | LogitsFunction
FORMS = (
    "a pair of tokens (their logit difference), one token (its log-probability), another branch (the KL divergence from its "
    "distribution), or a function of "
)


def named(metric: Any, function: str = "the last row's logits [vocab]") -> Named | LogitsFunction:
    """A metric in any of its forms; BadRequest lists them.

    function  what functions take and return, for the message
    """
    if isinstance(metric, Named):
        return metric
    if isinstance(metric, str) or integer(metric) is not None:
        return LogProbability(metric)
    if isinstance(metric, Sequence) and len(metric) == 2:
        return LogitDifference(*metric)
    if not callable(metric) or isinstance(metric, type):
        raise BadRequest(f"Invalid metric={short_repr(metric)}. Give {FORMS}{function}.")
    found: LogitsFunction = metric
    return found


def function_of(metric: Named | LogitsFunction, target: TokenId) -> LogitsFunction:
    """The metric as a function of the logits [vocab]."""
    return metric.function(target) if isinstance(metric, Named) else metric


def value_of(function: LogitsFunction, logits: Tensor) -> Tensor:
    """The metric of logits [vocab], as a scalar tensor; BadRequest if it is none."""
    value = function(logits)
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else short_repr(value)
        raise BadRequest(f"The metric returned {given}. Return a tensor with one number, computed from the logits.")
    if not bool(torch.isfinite(value.detach())):
        raise BadRequest(f"The metric is {float(value.detach())}. Return a finite number.")
    return value.reshape(())


def derivative(function: LogitsFunction, logits: Tensor) -> tuple[float, Tensor]:
    """The metric of logits [vocab] and its derivative [vocab]. Logits are data here: their own history is ignored."""
    if isinstance(function, ClosedForm):
        return float(value_of(function, logits)), function.slope(logits)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = logits.clone().requires_grad_()
        value = value_of(function, leaf)
        if not value.requires_grad:
            raise BadRequest("The metric does not depend on the logits, or detaches them. Compute it from them with torch.")
        (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
    if found is None:
        raise BadRequest("The metric does not depend on the logits. Compute it from them with torch.")
    return float(value.detach()), found
