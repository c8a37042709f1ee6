"""Kernels of a GPU compute float32 in portable arithmetic: the bits of `kernels/cpu.py`, in the interpreter and on a device."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens.engine.proof.doctor import numbers
from replaylens.kernels import cpu
from replaylens.kernels.attention import attention
from replaylens.kernels.cpu_attention import HostRows, attend
from replaylens.kernels.matmul import matmul
from replaylens.kernels.norm import FUNCTIONS, activation, norm, norm_scale
from replaylens.kernels.rope import rotate
from replaylens.kernels.sample import sample_logits
from replaylens.kernels.shared import PagedRows
from tests.kernels.interpreted import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)
Same = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("m, k, n", [(1, 40, 56), (7, 577, 100), (33, 64, 61)])
def test_products(device: str, m: int, k: int, n: int, same: Same) -> None:
    x, w, bias, residual = numbers(1, m, k), numbers(2, k, n), numbers(3, n), numbers(4, m, n)
    ours = matmul(x.to(device), w.to(device), bias.to(device), residual.to(device))
    same(ours.cpu(), cpu.product(x, cpu.Panels.of(w), bias, residual))
    assert not torch.equal(ours.cpu(), cpu.product(x, cpu.Panels.of(w), bias, residual, parts=1)), "the control: one chain"


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [40, 577, 5000])
def test_norms(device: str, width: int, kind: str, same: Same) -> None:
    x, weight, bias = numbers(5, 5, width), numbers(6, width), numbers(7, width) if kind == "layer" else None
    ours = norm(x.to(device), weight.to(device), None if bias is None else bias.to(device), 1e-5, kind)
    same(ours.cpu(), cpu.norm(x, weight, bias, 1e-5, kind))
    cpu.norm(x, None, None, 1e-5, kind, scale := torch.empty(5, 1))
    same(norm_scale(x.to(device), 1e-5, kind).cpu(), scale)


def test_functions(device: str, same: Same) -> None:
    x = numbers(8, 4, 256) * 4
    for kind in cpu.ACTIVATIONS:
        same(activation(x.to(device), kind, True).cpu(), cpu.activate(x, kind, True))
        if kind != "clamped_swiglu":
            same(activation(x.to(device), kind, False).cpu(), cpu.activate(x, kind, False))
    for name in FUNCTIONS:
        same(activation(x.to(device) * 8, name, False).cpu(), cpu.apply(name, x * 8))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("cap, window, sinks", [(0.0, 0, False), (5.0, 0, False), (0.0, 100, False), (5.0, 100, True)])
def test_attention(device: str, cap: float, window: int, sinks: bool, split: bool, same: Same) -> None:
    pages, position = torch.arange(44).flip(0)[None] + 1, torch.tensor([0, 5, 63, 64, 511, 512, 699])
    keys, values, q = numbers(5, 3, 720, 20), numbers(6, 3, 720, 20), numbers(7, 7, 6, 20)
    given, order = numbers(10, 6) if sinks else None, torch.arange(7)
    theirs = HostRows(torch.zeros_like(order), position, pages.contiguous(), 16, order)
    rows = PagedRows(torch.zeros(7, dtype=torch.int32, device=device), position.int().to(device), pages.int().to(device))
    there = [x.transpose(0, 1).contiguous().to(device) for x in (keys, values)]
    sink = None if given is None else given.to(device)
    ours = attention(q.to(device), *there, rows, 20**-0.5, cap, window, sinks=sink, split=split)
    same(ours.cpu(), attend(q, keys, values, theirs, 20**-0.5, cap, window, None, given))
    table = numbers(11, 800, 2, 8)
    same(rotate(q.to(device), table.to(device), rows).cpu(), cpu.rotate_(q.clone(), table, position))


def test_sampling(device: str) -> None:
    logits, temperature = numbers(12, 3, 1000), [0.7, 1.0, 2.0]
    seed, position = (torch.tensor(each, device=device) for each in ([1, 2, 3], [4, 5, 6]))
    tokens, _ = sample_logits(logits.to(device), seed, position, torch.tensor(temperature, dtype=torch.float64, device=device))
    scores = [logits[i].numpy().astype(np.float64) / temperature[i] + cpu.gumbel(i + 1, i + 4, 1000) for i in range(3)]
    assert tokens.tolist() == [int(each.argmax()) for each in scores]
