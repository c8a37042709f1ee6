"""Kernels of a GPU compute float32 in portable arithmetic: the bits of `kernels/cpu.py`, in the interpreter and on a device."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens.engine.proof.doctor import numbers
from replaylens.kernels import cpu, cpu_noise, cpu_recurrent, parts, recurrent, recurrent_rows
from replaylens.kernels.attention import attention
from replaylens.kernels.cpu_attention import HostRows, attend
from replaylens.kernels.launch import GemmTile
from replaylens.kernels.matmul import matmul
from replaylens.kernels.norm import FUNCTIONS, activation, norm, norm_pair, norm_scale
from replaylens.kernels.recurrent import rates, recur, short_conv
from replaylens.kernels.recurrent_rows import RecurrentMemory
from replaylens.kernels.rope import rotate
from replaylens.kernels.sample import sample_logits
from replaylens.kernels.shared import PagedRows
from tests.devices import covering, swept
from tests.kernels.interpreted import DEVICES
from tests.kernels.test_recurrent import AT, CHANNELS, LENGTH, Layer, inputs

pytestmark = pytest.mark.parametrize("device", DEVICES)
Same = Callable[[Tensor, Tensor], None]
ENDS = (1, 60, 63, 64, 65)
"""of passes, around the end of a chunk"""


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, k, n", swept([(1, 40, 56), (3, 128, 64), (9, 136, 40), (70, 72, 36)], (1, 40, 56), (9, 136, 40)))
def test_products(device: str, m: int, k: int, n: int, stored: torch.dtype, same: Same) -> None:
    x, w, bias, residual = numbers(1, m, k), numbers(2, k, n).to(stored), numbers(3, n), numbers(4, m, n)
    given = x.to(device), w.to(device), bias.to(device), residual.to(device)
    ours, w = matmul(*given), w.float()
    same(ours.cpu(), cpu.product(x, cpu.Panels.of(w), bias, residual))
    for tile in (GemmTile(4, 64, 32, 4, 2), GemmTile(16, 32, 16, 4, 2), GemmTile(64, 64, 32, 4, 2)):
        same(matmul(*given, tile=tile), ours)
    same(matmul(given[0], given[1].t().contiguous().t(), *given[2:]), ours)
    assert not torch.equal(ours.cpu(), cpu.product(x, cpu.Panels.of(w), bias, residual, parts=1)), "the control: one chain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, k, n", [(1, 40, 3), (9, 136, 33), (5, 256, 32)])
def test_lines_of_several_products(device: str, m: int, k: int, n: int, dtype: torch.dtype, same: Same) -> None:
    """Each product has the bits that its rows have as float32 on a host, alone and beside others."""
    x, w, bias = numbers(1, 3, m, k).to(dtype), numbers(2, 3, k, n), numbers(3, 3, n)
    found = parts.lines(x.to(device), w.to(device), bias.to(device))
    for i in range(3):
        same(found[i].cpu(), cpu.product(x[i].float(), cpu.Panels.of(w[i]), bias[i]))
    row = parts.lines(x[1:2, m // 2 : m // 2 + 1].to(device), w[1:2].to(device), bias[1:2].to(device))
    same(row[0, 0], found[1, m // 2])
    chain = cpu.product(x[0].float(), cpu.Panels.of(w[0]), bias[0], parts=1)
    assert not torch.equal(found[0].cpu(), chain), "the control: one chain"
    with pytest.raises(ValueError, match="w has shape"):
        parts.lines(x.to(device), w[:2].to(device), bias.to(device))


def test_weights_are_widened_in_pieces(device: str, same: Same, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = numbers(1, 66, 72).to(device), numbers(2, 72, 280).bfloat16().to(device), numbers(3, 280).to(device)
    whole = matmul(x, w, bias)
    monkeypatch.setattr(parts, "_WIDENED", 128 * 72)
    same(matmul(x, w, bias), whole)


@pytest.mark.parametrize("m, k", [(1, 40), (9, 40), (9, 128)])
def test_a_sum_that_underflows_keeps_its_sign(device: str, m: int, k: int) -> None:
    x, w = torch.full((m, k), -1e-30), torch.full((k, 5), 1e-30)
    theirs = cpu.product(x, cpu.Panels.of(w))
    assert torch.signbit(theirs).all() and not theirs.any()
    assert torch.signbit(matmul(x.to(device), w.to(device))).all()


@pytest.mark.parametrize("kind, width", covering(["rms", "layer"], [40, 577, 5000]))
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


@pytest.mark.parametrize(
    "split, cap, window, more",
    covering([False, True], [(0.0, 0, ""), (5.0, 0, "slopes"), (0.0, 100, "slopes"), (5.0, 100, "sinks")]),
)
def test_attention(device: str, cap: float, window: int, more: str, split: bool, same: Same) -> None:
    pages, position = torch.arange(44).flip(0)[None] + 1, torch.tensor([0, 5, 63, 64, 511, 512, 699])
    keys, values, q = numbers(5, 3, 720, 20), numbers(6, 3, 720, 20), numbers(7, 7, 6, 20)
    order, known = torch.arange(7), {"sinks": numbers(10, 6), "slopes": numbers(10, 6) / 64}
    given = {more: known[more]} if more else {}
    theirs = HostRows(torch.zeros_like(order), position, pages.contiguous(), 16, order)
    rows = PagedRows(torch.zeros(7, dtype=torch.int32, device=device), position.int().to(device), pages.int().to(device))
    there = [x.transpose(0, 1).contiguous().to(device) for x in (keys, values)]
    on_device = {name: x.to(device) for name, x in given.items()}
    ours = attention(q.to(device), *there, rows, 20**-0.5, cap, window, split=split, **on_device)
    same(ours.cpu(), attend(q, keys, values, theirs, 20**-0.5, cap, window, given.get("slopes"), given.get("sinks")))
    table = numbers(11, 800, 2, 8)
    same(rotate(q.to(device), table.to(device), rows).cpu(), cpu.rotate_(q.clone(), table, position))


@pytest.mark.parametrize(
    "delta, depth, many, ends",
    swept(
        [
            (False, 4, 0, (1, 64, 65)),
            (True, 4, 1024, (1, 60, 66)),
            *((*each, ENDS) for each in product([True, False], [32], [1024, 0])),
        ],
        (False, 4, 0, (1, 64, 65)),
    ),
)
def test_recurrences(
    device: str, delta: bool, depth: int, many: int, ends: tuple[int, ...], same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that end within a chunk, at its end and beyond it, and single rows, beside the padding of a graph."""
    depth = depth if device == "cpu" else max(16, depth)  # products of a dot on the device
    for module, tile in ((recurrent, "WALK"), (recurrent_rows, "FEW"), (recurrent_rows, "WEIGH")):
        monkeypatch.setattr(module, tile, replace(getattr(module, tile), depth=depth))
    monkeypatch.setattr(recurrent_rows, "MANY", many)
    theirs, ours, given, done = Layer(16, delta), Layer(16, delta), inputs(), 0
    length = 70 if device == "cpu" else LENGTH
    whole, found = theirs.add(0, length, given), []
    entries, states = ours.memory.entries.to(device), ours.memory.states.to(device)
    entries, states = (torch.cat([x, torch.zeros_like(x[: len(x) // len(states)])]) for x in (entries, states))  # a spare page
    table = torch.cat([ours.pages, torch.full_like(ours.pages, len(states) - 1)]).int().to(device)
    rooms = torch.randperm(len(states), generator=torch.Generator().manual_seed(0)).int()  # of pages: any will do
    entries = entries.view(len(states), 16, -1)[rooms.argsort()].flatten(0, 1)
    memory = RecurrentMemory(entries, states, AT, rooms.to(device), torch.arange(len(states), device=device).int(), 16)
    for end in (*(ENDS if device == "cuda" else ends), length):
        q, k, v, g, beta = (torch.cat([x[done:end], x[:2]]).to(device) for x in given)
        sequence = torch.tensor([0] * (end - done) + [1, 1], dtype=torch.int32, device=device)
        position = torch.tensor([*range(done, end), 0, 0], dtype=torch.int32, device=device)
        rows = PagedRows(sequence, position, table, single=end - done == 1)
        out = recur(q, k, v, g, beta if delta else None, memory, rows)
        found.append(out[:-2].cpu())
        done = end
    same(torch.cat(found), whole)
    same(entries.view(len(states), 16, -1)[rooms.long()].flatten(0, 1)[:-16].cpu(), theirs.memory.entries)
    same(states[:-1].cpu(), theirs.memory.states)


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolutions(device: str, bias: bool, same: Same) -> None:
    layer, x, weight, more = Layer(3, True), numbers(20, 9, CHANNELS), numbers(21, 4, CHANNELS), numbers(22, CHANNELS)
    at, given = torch.arange(9), more if bias else None
    layer.memory.entries[layer.pages[0, at // 3] * 3 + at % 3, :CHANNELS] = x
    theirs = cpu_recurrent.short_conv(layer.memory.entries, weight, given, HostRows(0 * at, at, layer.pages, 3, at))
    rows = PagedRows((0 * at).int().to(device), at.int().to(device), layer.pages.int().to(device))
    entries, pages = torch.zeros_like(layer.memory.entries).to(device), torch.arange(len(layer.memory.states)).int().to(device)
    memory = RecurrentMemory(entries, layer.memory.states.to(device), AT, pages, pages, 3)
    there, found = None if given is None else given.to(device), []
    for part in (slice(0, 2), slice(2, 3), slice(3, 9)):  # a row finds the rows before it in its pass, or in the entries
        some = PagedRows(rows.sequence[part], rows.position[part], rows.page_table)
        found.append(short_conv(x[part].to(device), memory, weight.to(device), there, some).cpu())
    same(torch.cat(found), theirs)
    same(entries.cpu(), layer.memory.entries)
    activated = short_conv(x.to(device), memory, weight.to(device), there, rows, silu=True)
    same(activated.cpu(), cpu.activate(theirs, "silu", False))


def test_parts_of_a_delta_net(device: str, same: Same) -> None:
    """Norms with factors and gates, strengths and decays: one launch has the bits of several."""
    x, gate, weight, ones = numbers(1, 3, 4, 40), numbers(2, 3, 4, 40), numbers(3, 40), torch.ones(40)
    there = lambda x: x.to(device)  # noqa: E731
    normed = cpu.norm(x.flatten(0, 1), weight, None, 1e-5, "rms")
    expected = cpu.activate(torch.cat([gate.flatten(0, 1), normed], dim=-1), "silu", True)
    same(norm(there(x), there(weight), None, 1e-5, "rms", gate=there(gate)).cpu().flatten(0, 1), expected)
    pair = norm_pair(there(x), 1, (there(ones), there(ones)), 1e-5, "rms", (0.3, 0.7)).cpu()
    plain = cpu.norm(x.flatten(0, 1), ones, None, 1e-5, "rms").view(x.shape)
    same(pair, torch.cat([plain[:, :1] * 0.3, plain[:, 1:] * 0.7], dim=1))
    given, a_log, bias = numbers(4, 5, 12) * 4, numbers(5, 6), numbers(6, 6)
    strength, decay = rates(there(given), there(a_log), there(bias), 2.0)
    same(strength.cpu(), cpu.apply("sigmoid", given[:, :6].contiguous()) * 2.0)
    same(decay.cpu(), -cpu.apply("exp", a_log) * cpu.apply("softplus", given[:, 6:] + bias))


def test_sampling(device: str) -> None:
    logits, temperature = numbers(12, 3, 1000), [0.7, 1.0, 2.0]
    seed, position = (torch.tensor(each, device=device) for each in ([1, 2, 3], [4, 5, 6]))
    tokens, _ = sample_logits(logits.to(device), seed, position, torch.tensor(temperature, dtype=torch.float64, device=device))
    scores = [logits[i].numpy().astype(np.float64) / temperature[i] + cpu_noise.gumbel(i + 1, i + 4, 1000) for i in range(3)]
    assert tokens.tolist() == [int(each.argmax()) for each in scores]
