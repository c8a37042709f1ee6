"""The doctor on a CUDA device, for mixtures of experts: routing, products and sum of a row, alone and in batches.

Other rows of a batch choose other experts, so that an expert has a row, a few, or all of them.
"""

from functools import partial

import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.mixture import Mixture
from replaylens.engine.passes.certificate import Finding
from replaylens.engine.passes.cuda import HeadOps
from replaylens.engine.proof.comparison import ROWS, Random, compare
from replaylens.kernels.grouped import grouped_matmul
from replaylens.kernels.launch import grouped_rows
from replaylens.kernels.plan import plan


def examine_experts(model: Decoder, random: Random, findings: list[Finding]) -> None:
    """Mutates `findings`: one mixture of every shape."""
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, Mixture) and (shape := tuple(module.experts.up.shape)) not in seen:
            seen.add(shape)
            x = random(max(ROWS), model.config.d_model)
            for part in (_routing, _hidden, _outputs, _mixed):
                compare(f"{name}{part.__name__.replace('_', ' ')}", x, partial(part, module), findings)
            _company(name, module, x, findings)
            _control(name, module, x[:64], findings)


def _routed(mixture: Mixture, x: Tensor) -> tuple[HeadOps, Tensor, Tensor]:
    ops = HeadOps()
    return ops, *ops.route(ops.linear(x, mixture.router), mixture.routing, mixture.correction)


def _routing(mixture: Mixture, x: Tensor) -> Tensor:
    _, chosen, weights = _routed(mixture, x)
    return torch.cat([chosen.double(), weights.double()], dim=-1)


def _hidden(mixture: Mixture, x: Tensor) -> Tensor:
    ops, chosen, _ = _routed(mixture, x)
    return ops.experts_hidden(x, chosen, mixture.experts, mixture.kind)


def _outputs(mixture: Mixture, x: Tensor) -> Tensor:
    ops, chosen, _ = _routed(mixture, x)
    return ops.experts_out(ops.experts_hidden(x, chosen, mixture.experts, mixture.kind), chosen, mixture.experts)


def _mixed(mixture: Mixture, x: Tensor) -> Tensor:
    return mixture(x, HeadOps(), None, x if mixture.adds(None) else None)


def _company(name: str, mixture: Mixture, x: Tensor, findings: list[Finding]) -> None:
    """The first row, alone and among rows that all go to its experts."""
    ops, chosen, _ = _routed(mixture, x[:1])
    crowd = chosen.expand(len(x), -1).contiguous()
    alone = ops.experts_hidden(x[:1], chosen, mixture.experts, mixture.kind)
    among = ops.experts_hidden(x, crowd, mixture.experts, mixture.kind)
    shape = str(list(mixture.experts.up.shape))
    findings.append(Finding(name, shape, f"alone against {len(x)} rows of the same experts", torch.equal(alone, among[:1])))


def _control(name: str, mixture: Mixture, x: Tensor, findings: list[Finding]) -> None:
    """The depth in two halves, as libraries split it at few rows."""
    _, chosen, _ = _routed(mixture, x)
    weight, top = mixture.experts.up, chosen.shape[1]
    made = plan(chosen, len(weight), grouped_rows(chosen.numel(), len(weight), x.dtype))
    half = x.shape[1] // 2
    whole = grouped_matmul(x, weight, None, made, top)
    first, second = (grouped_matmul(x[:, s], weight[:, s], None, made, top) for s in (slice(half), slice(half, None)))
    equal = torch.equal((first.float() + second.float()).to(x.dtype), whole)
    findings.append(Finding(name, str(list(weight.shape)), "control: the depth in two halves", equal, control=True))
