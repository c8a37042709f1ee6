"""Short convolutions and recurrences have the bits of `kernels/definition.py`, however a path is cut into passes."""

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens.engine.proof.doctor import numbers
from replaylens.kernels import definition, threads
from replaylens.kernels.cpu_attention import HostRows
from replaylens.kernels.cpu_recurrent import LayerMemory, Piece, recur, short_conv
from replaylens.kernels.definition import CHUNK
from tests.devices import swept
from tests.hostile import divide_everything
from tests.kernels.test_cpu import same

LENGTH, KEY_HEADS, HEADS, D, WIDTH, CHANNELS = 135, 2, 4, 5, 10, 3
AT = (CHANNELS, CHANNELS + KEY_HEADS * D, CHANNELS + KEY_HEADS * D + HEADS * WIDTH)

STATES = (0, 63, 80)
"""positions whose states are compared"""


@cache
def inputs(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decays and beta: decays from almost none to almost all"""
    q, k = (numbers(seed + i, length, KEY_HEADS, D) / 8 for i in (1, 2))
    g = -((numbers(seed + 4, length, HEADS).abs() / 4) ** 4)
    return q, k, numbers(seed + 3, length, HEADS, WIDTH), g, numbers(seed + 5, length, HEADS).abs() / 4


@cache
def defined(delta: bool) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [rows, heads, width] and states [rows, heads, d, width]"""
    q, k, v, g, beta = (x.numpy() for x in inputs())
    out, states = np.zeros(v.shape, np.float32), np.zeros((LENGTH, HEADS, D, WIDTH), np.float32)
    for head in range(HEADS):
        key = head // (HEADS // KEY_HEADS)
        given = q[:, key], k[:, key], v[:, head], g[:, head], beta[:, head] if delta else None
        out[:, head], states[-1, head] = definition.gated_delta(*given)
        for t in STATES if head == 3 else ():
            states[t, head] = definition.gated_delta(*(x if x is None else x[: t + 1] for x in given))[1]
    return out, states


class Layer:
    """One layer's memory with one sequence, whose pages lie in any order."""

    def __init__(self, page_size: int, delta: bool) -> None:
        count = -(-LENGTH // page_size)
        order = random.Random(page_size).sample(range(1, count + 1), count)
        self.pages, self.page_size, self.delta = torch.tensor([order]), page_size, delta
        self.memory = LayerMemory(
            torch.zeros((count + 1) * page_size, AT[-1] + HEADS), torch.zeros(count + 1, HEADS, D, WIDTH), AT, KEY_HEADS
        )

    def add(self, start: int, end: int, given: tuple[Tensor, ...]) -> Tensor:
        q, k, v, g, beta = (x[start:end].contiguous() for x in given)
        at = torch.arange(start, end)
        slots = self.pages[0, at // self.page_size] * self.page_size + at % self.page_size
        self.memory.entries[slots, AT[0] : AT[1]] = k.flatten(1)
        self.memory.entries[slots, AT[2] :] = g
        piece = Piece(0, 0, start, end - start, start - start % CHUNK)
        out = recur(q, v, beta if self.delta else None, self.memory, [piece], self.pages, self.pages, self.page_size)
        assert out is not None
        return out

    def state(self, at: int) -> Tensor:
        """after position `at`"""
        found = torch.empty(HEADS, D, WIDTH)
        q, _, v, _, beta = (x[:0].contiguous() for x in inputs())
        piece = Piece(0, 0, at + 1, 0, at - at % CHUNK, final=found)
        recur(q, v, beta if self.delta else None, self.memory, [piece], self.pages, self.pages, self.page_size)
        return found


@pytest.mark.parametrize("delta", swept([True, False], True))
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_any_cut_and_any_rollback_has_the_defined_bits(delta: bool, page_size: int) -> None:
    """Passes of any size, and drafts that are rejected, also across the end of a chunk."""
    expected, states = defined(delta)
    draw, wrong = random.Random(page_size), inputs(50)
    for _ in range(2):
        layer, done = Layer(page_size, delta), 0
        while done < LENGTH:
            end = min(LENGTH, done + draw.choice([1, 1, 2, 7, 63, 64, 65, 130]))
            assert same(layer.add(done, end, inputs()), expected[done:end])
            layer.add(end, min(LENGTH, end + draw.choice([0, 1, 5, 70])), wrong)
            done = end
        assert same(layer.state(LENGTH - 1), states[-1])
        assert all(same(layer.state(t)[3], states[t, 3]) for t in STATES)


def test_the_definition_is_the_recurrence() -> None:
    """In float64, one position after the other. The order of sums within a chunk matters little, also with strong decays."""
    q, k, v, g, beta = (x.double().numpy() for x in inputs())
    for delta in (True, False):
        state, expected = np.zeros((D, WIDTH)), []
        for t in range(LENGTH):
            state = np.exp(g[t, 3]) * state
            u = beta[t, 3] * (v[t, 3] - state.T @ k[t, 1]) if delta else v[t, 3]
            state = state + np.outer(k[t, 1], u)
            expected.append(state.T @ q[t, 1])
        assert np.abs(defined(delta)[0][:, 3] - expected).max() < 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("count", [2, 3])
def test_threads_move_no_bit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    with threads.within(count):
        assert same(Layer(16, True).add(0, LENGTH, inputs()), defined(True)[0])


def test_an_update_that_is_not_finite_is_told() -> None:
    q, k, v, g, beta = (x.clone() for x in inputs())
    v[3, 1, 2] = np.inf
    layer = Layer(16, True)
    with pytest.raises(AssertionError):
        layer.add(0, 5, (q, k, v, g, beta))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_short_convolutions(page_size: int, bias: bool) -> None:
    x, weight, more = numbers(20, 9, 7), numbers(21, 4, 7), numbers(22, 7) if bias else None
    pages = torch.arange(9).flip(0)[None].contiguous() + 1
    entries, at = torch.full((160, 11), torch.nan), torch.arange(9)
    entries[pages[0, at // page_size] * page_size + at % page_size, :7] = x
    rows = HostRows(torch.zeros_like(at), at, pages, page_size, at)
    expected = [definition.short_conv(x[: t + 1].numpy(), weight.numpy(), None if more is None else more.numpy()) for t in at]
    assert same(short_conv(entries, weight, more, rows), np.stack(expected))


# ---- controls --------------------------------------------------------------------------------------------------------


def moved_boundary(layer: Layer, start: int, end: int) -> Tensor:
    """Chunks that begin with the pass: the state before it, then its rows."""
    q, _, v, _, beta = (x[start:end].contiguous() for x in inputs())
    piece = Piece(0, 0, start, end - start, start, initial=layer.state(start - 1))
    out = recur(q, v, beta, layer.memory, [piece], layer.pages, layer.pages, layer.page_size)
    assert out is not None
    return out


def stale_state(layer: Layer, start: int, end: int) -> Tensor:
    """A state that is carried over a rollback: rejected drafts complete a chunk, and the state of their chunk stays."""
    layer.add(start, 70, inputs(50))
    kept = layer.memory.states.clone()
    layer.add(start, CHUNK, inputs())
    layer.memory.states.copy_(kept)
    return layer.add(CHUNK, end, inputs())


@pytest.mark.parametrize("fault, start, first", [(moved_boundary, 40, 40), (stale_state, 40, CHUNK)])
def test_control(fault: Callable[[Layer, int, int], Tensor], start: int, first: int) -> None:
    layer = Layer(16, True)
    layer.add(0, start, inputs())
    assert not same(fault(layer, start, 90), defined(True)[0][first:90])


def test_control_other_chunks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "CHUNK", 32)
    q, k, v, g, beta = (x.numpy() for x in inputs())
    other, _ = definition.gated_delta(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0])
    assert not same(other, defined(True)[0][:, 0])
