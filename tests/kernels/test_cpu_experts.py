"""Mixtures of experts on a CPU: choices, weights and products have the bits of their plain forms, at any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replaylens.engine.model import config
from replaylens.engine.model.config import BARRED, Functions, Routing
from replaylens.engine.model.layers import expert_products
from replaylens.engine.model.ops import TorchOps
from replaylens.kernels import cpu, cpu_experts, threads
from tests.engine.reference import same_bits
from tests.hostile import divide_everything


def exact_sums(x: Tensor) -> Tensor:
    """The sums of numbers in [0, 1] over the last dimension, as whole numbers in units of 2^-40: exact in any order."""
    return ((x.double() * 2.0**40).long().sum(-1, keepdim=True).double() * 2.0**-40).float()


PLAIN = Functions(lambda x: cpu.apply("exp", x), lambda x: cpu.apply("sigmoid", x), exact_sums)


def logits(rows: int, experts: int) -> Tensor:
    """Some of them equal, some of them zeros of both signs, some of them of experts that are forbidden."""
    x = 3 * torch.randn(rows, experts, generator=torch.Generator().manual_seed(experts))
    x[:, ::3] = x[:, :1]
    for row, value in zip(x[1:], (0.0, -0.0, -1e30, -torch.inf), strict=False):
        row[::2] = value
    return x


@pytest.mark.parametrize("groups, chosen, best", [(1, 1, 1), (4, 2, 1), (4, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("experts", [4, 8, 60])
def test_choices(experts: int, groups: int, chosen: int, best: int) -> None:
    routing = Routing(min(4, experts // groups * chosen), "sigmoid", True, 1.0, groups, chosen, min(best, experts // groups))
    for rows in (1, 33):
        x = logits(rows, experts)
        found = cpu_experts.choose(x, routing.top, groups, chosen, routing.group_best, BARRED)
        assert torch.equal(found, config.choose(x, routing))


@pytest.mark.parametrize("kind", cpu_experts.KINDS)
@pytest.mark.parametrize("normalised", [True, False])
def test_weights(kind: str, normalised: bool) -> None:
    for experts in (3, 8, 60):
        routing = Routing(2, kind, normalised, 2.5 if normalised else 1.0, jitter=0.1)  # type: ignore[arg-type]
        x = logits(33, experts)[:, : experts - 1 + (experts > 3)]
        picked = config.choose(x, routing)
        found = cpu_experts.weigh(x, picked, kind, normalised, routing.scale, routing.floor, routing.jitter)
        expected = config.weigh(x, picked, routing, PLAIN)
        assert torch.equal(found.isnan(), expected.isnan()) and same_bits(found.nan_to_num(), expected.nan_to_num())


def some_products(run: Callable[..., Tensor]) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(1), list[Tensor]()
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    for rows, top, experts, inputs, outputs, short in (
        (1, 2, 5, 7, 9, False),
        (40, 2, 3, 64, 100, True),
        (200, 3, 16, 48, 97, False),
    ):
        weight = draw(experts, inputs, outputs)
        panels = cpu.Panels.of(weight.bfloat16().float() if short else weight)
        chosen = torch.stack([torch.randperm(experts, generator=generator)[:top].sort().values for _ in range(rows)])
        for x in (draw(rows, inputs + 3)[:, :inputs], draw(rows, top, inputs)):
            found += [run(x, chosen, panels, bias, parts) for bias in (None, draw(experts, outputs)) for parts in (8, 1)]
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_products(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice divides the panels otherwise: none is left out, whatever the number of threads."""
    divide_everything(monkeypatch)
    plain = lambda x, chosen, panels, bias, parts: expert_products(  # noqa: E731
        x, chosen, panels, bias, lambda some, weight: cpu.product(some, weight, parts=parts)
    )
    with threads.within(count):
        assert all(map(same_bits, some_products(cpu_experts.expert_products), some_products(plain)))


def test_sums_and_weights_by_expert() -> None:
    generator, plain = torch.Generator().manual_seed(2), TorchOps()
    outs, residual = torch.randn(9, 3, 21, generator=generator), torch.randn(9, 21, generator=generator)
    weights, chosen = torch.rand(9, 3, generator=generator), torch.tensor([[0, 3, 4]]).repeat(9, 1)
    for more in (None, residual):
        assert same_bits(cpu_experts.combine(outs, weights, more), plain.combine(outs, weights, more))
    wide = cpu_experts.spread(weights, chosen, 5)
    assert torch.equal(wide, plain.spread(weights, chosen, 5)) and torch.equal(cpu_experts.gathered(wide, chosen), weights)
