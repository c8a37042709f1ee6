"""The kernels of a CPU have the bits of `kernels/definition.py`, in any company and on any number of threads.

The last section computes the same functions as a library might. Each of them must be seen.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.proof.doctor import numbers, sum_of_products
from replaylens.kernels import cpu, definition, threads
from replaylens.kernels.cpu import Panels
from replaylens.kernels.cpu_attention import HostRows, attend, store
from tests.hostile import divide_everything

EDGES = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.625, -0.625, 4.0, 1e-45, -1e-45, 1e-38, -1e-38, 88.72283, 88.7229, -87.33654, -87.3366, -104.0,
     3e38, -3e38, math.inf, -math.inf, math.nan],
    dtype=torch.float32,
)  # fmt: skip


def same(ours: Any, theirs: Any) -> bool:
    """Bit for bit, the sign of zero included; every NaN is the same one."""
    ours, theirs = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (np.asarray(ours), np.asarray(theirs)))
    assert ours.dtype == theirs.dtype == np.float32 and ours.shape == theirs.shape
    return ours.tobytes() == theirs.tobytes()


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs, outputs", [(1, 1), (5, 3), (7, 33), (8, 16), (77, 19), (130, 40)])
@pytest.mark.parametrize("short", [False, True])
def test_products(inputs: int, outputs: int, short: bool) -> None:
    """Fewer terms than parts, odd numbers of rows and columns; weights that are stored in bfloat16."""
    x, w = numbers(1, 11, inputs), numbers(2, inputs, outputs)
    w = w.bfloat16().float() if short else w
    panels = Panels.of(w)
    assert (panels.data.dtype == torch.bfloat16) == short
    expected = definition.product(x.numpy(), w.numpy())
    assert same(cpu.product(x, panels), expected)
    assert same(cpu.product(x[:2], panels), expected[:2]), "stored weights are not widened for few rows"
    assert same(cpu.product(x, Panels.of(w.t().contiguous().t())), expected), "another layout"
    bias, residual = numbers(3, outputs), numbers(4, 11, outputs)
    assert same(cpu.product(x, panels, bias, residual), residual.numpy() + (expected + bias.numpy()))


def test_denormal_numbers_are_kept() -> None:
    x, w = numbers(3, 5, 30) * 2.0**-130, numbers(2, 30, 9)
    y = cpu.product(x, Panels.of(w))
    assert same(y, definition.product(x.numpy(), w.numpy())) and bool((y != 0).any() & (y.abs() < 2.0**-126).any())


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 63, 64, 65, 577, 4096, 4097, 8200])
def test_norms_and_log_softmax(width: int) -> None:
    """Rows up to, at and beyond the span of 4,096."""
    x, weight, bias = numbers(5, 2, width), numbers(6, width), numbers(7, width)
    for kind, b in (("rms", None), ("layer", bias), ("layer", None)):
        ours = cpu.norm(x, weight, b, 1e-5, kind)
        theirs = [definition.norm(r, weight.numpy(), None if b is None else b.numpy(), 1e-5, kind) for r in x.numpy()]
        assert same(ours, np.stack(theirs))
    assert same(cpu.log_softmax_(x.clone()), np.stack([definition.log_softmax(r) for r in x.numpy()]))
    assert same(cpu.row_sums(x)[:, 0], np.array([definition.row_sum(r) for r in x.numpy()], np.float32))


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "log", "softplus"])
@np.errstate(all="ignore")
def test_functions(name: str) -> None:
    x = torch.cat([EDGES, numbers(4, 700) * 20, numbers(8, 300)])
    if name == "log":  # of positive, finite numbers, denormal ones included
        x = x[(x > 0) & (x < math.inf)]
    if name == "erf":  # through the activation that has it
        assert same(cpu.activate(x[None], "gelu", gated=False)[0], definition.activate(x.numpy(), "gelu"))
        exact = torch.special.erf(x.double())
        assert (torch.from_numpy(definition.erf(x.numpy())).double() - exact).nan_to_num().abs().max() < 2e-7
        return
    assert same(cpu.apply(name, x), getattr(definition, name)(x.numpy()))
    exact, ours = (F.softplus if name == "softplus" else getattr(torch, name))(x.double()), cpu.apply(name, x).double()
    normal = exact.isfinite() & (exact.abs() > 2.0**-126) & (exact.abs() < 3.4e38)
    assert ((ours - exact) / exact)[normal].abs().max() < 2.5e-7, "and it is that function"


@pytest.mark.parametrize("kind", cpu.ACTIVATIONS)
@np.errstate(all="ignore")
def test_activations(kind: str) -> None:
    gate, up = torch.cat([EDGES, numbers(4, 979) * 4]), torch.cat([EDGES.flip(0), numbers(5, 979) * 4])
    both = torch.cat([gate, up])[None]
    if kind == "clamped_swiglu":
        expected = definition.clamped_swiglu(gate.numpy(), up.numpy())
    else:
        expected = definition.activate(gate.numpy(), kind) * up.numpy()
        assert same(cpu.activate(gate[None], kind, gated=False)[0], definition.activate(gate.numpy(), kind))
    assert same(cpu.activate(both, kind, gated=True)[0], expected)


def test_rotation() -> None:
    """Some dimensions of each head, at positions in any order; the rest stays."""
    x, table, places = numbers(1, 5, 3, 20), numbers(2, 9, 2, 8), torch.tensor([8, 0, 3, 3, 1])
    expected = x.clone().numpy()
    cos, sin = table.numpy()[places][:, None, 0], table.numpy()[places][:, None, 1]
    expected[..., :8], expected[..., 8:16] = definition.rotate(expected[..., :8], expected[..., 8:16].copy(), cos, sin)
    assert same(cpu.rotate_(x.clone(), table, places), expected)


# ---- attention -------------------------------------------------------------------------------------------------------

LENGTH = 600
"""nine blocks of keys and a part of one; more than one split"""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "cap": {"cap": 3.0},
    "slopes": {"slopes": numbers(9, 4) / 64},
    "sinks": {"sinks": numbers(10, 4)},
    "all": {"window": 530, "cap": 2.0, "slopes": numbers(9, 4) / 64, "sinks": numbers(10, 4)},
}


class Paths:
    """Three sequences with the same first 100 keys, then keys of their own, in pages that lie in any order."""

    def __init__(self, page_size: int, seed: int = 0) -> None:
        self.page_size, held = page_size, -(-LENGTH // page_size)
        shared = 100 // page_size
        order = torch.randperm(3 * held, generator=torch.Generator().manual_seed(seed))
        self.pages = order.view(3, held).contiguous()
        self.pages[1:, :shared] = self.pages[0, :shared]
        self.keys, self.values = numbers(5, 2, 3 * held * page_size, 12), numbers(6, 2, 3 * held * page_size, 12)
        self.sequence = torch.tensor([0, 1, 2, 2, 0, 1, 2, 0])
        self.position = torch.tensor([5, 63, 64, 99, 130, 511, 512, LENGTH - 1])
        self.q = numbers(7, 8, 4, 12)

    def rows(self, some: Tensor) -> HostRows:
        """Rows with those of equal pages side by side, as a batch orders them."""
        order = torch.argsort(self.sequence[some], stable=True)
        return HostRows(self.sequence[some], self.position[some], self.pages, self.page_size, order)

    def attend(self, some: Tensor, scale: float = 0.3, **settings: Any) -> Tensor:
        return attend(self.q[some].contiguous(), self.keys, self.values, self.rows(some), scale, **settings)

    def expected(self, row: int, head: int, **settings: Any) -> Any:
        """By the definition, from keys and values that are looked up position by position."""
        at = torch.arange(int(self.position[row]) + 1)
        slots = self.pages[self.sequence[row], at // self.page_size] * self.page_size + at % self.page_size
        one = {
            {"slopes": "slope", "sinks": "sink"}.get(k, k): v[head].item() if isinstance(v, Tensor) else v
            for k, v in settings.items()
        }
        keys, values = self.keys[head // 2, slots].numpy(), self.values[head // 2, slots].numpy()
        return definition.attention(self.q[row, head].numpy(), keys, values, int(self.position[row]), 0.3, **one)


@pytest.mark.parametrize("name", SETTINGS)
def test_attention(name: str) -> None:
    paths, settings = Paths(16), SETTINGS[name]
    ours, rows = paths.attend(torch.arange(8), **settings), [*range(8)] if name in ("plain", "all") else [2, 4, 6]
    assert same(ours[rows], np.array([[paths.expected(row, head, **settings) for head in range(4)] for row in rows]))


@pytest.mark.parametrize("page_size", [1, 4, 10, 16, 24, 64, 100])
def test_pages_and_company_move_no_bit(page_size: int) -> None:
    """A size that does not divide 64 has pages across two blocks."""
    paths = Paths(page_size)
    together = paths.attend(torch.arange(8))
    assert same(together[[4, 6], 1], np.stack([paths.expected(row, 1) for row in (4, 6)]))
    for row in range(8):
        assert same(paths.attend(torch.tensor([row])), together[row : row + 1])
    many = torch.arange(8).repeat(9)
    assert same(paths.attend(many), together[many])
    ends = torch.tensor([7, 5, 6])
    assert same(paths.attend(ends), together[ends]), "each alone with its pages, beside the others in vectors"


def test_hidden_edges_and_scores_that_are_shown() -> None:
    """Hidden keys take no part: as if the sequence did not have them. Looking moves no bit."""
    paths, some = Paths(16), torch.tensor([4])
    scores, hidden = torch.full((1, 4, LENGTH), -math.inf), torch.zeros(1, 4, LENGTH, dtype=torch.int16)
    plain = paths.attend(some)
    assert same(paths.attend(some, scores=scores), plain) and same(paths.attend(some, hidden=hidden), plain)
    assert bool((scores[..., :131] > -math.inf).all() & (scores[..., 131:] == -math.inf).all())
    hidden[0, :, :61] = 1
    assert same(paths.attend(some, hidden=hidden), paths.attend(some, window=70)), "a window hides the same keys"


META: dict[str, Callable[[Tensor], object]] = {
    "product": lambda x: cpu.product(x, Panels.of(numbers(2, 8, 8))),
    "weight": Panels.of,
    "bias": lambda x: cpu.product(numbers(1, 8, 8), Panels.of(numbers(2, 8, 8)), bias=x[0]),
    "residual": lambda x: cpu.product(numbers(1, 8, 8), Panels.of(numbers(2, 8, 8)), residual=x),
    "norm": lambda x: cpu.norm(x, None, None, 1e-6, "rms"),
    "scale": lambda x: cpu.norm(numbers(1, 8, 8), None, None, 1e-6, "rms", x),
    "activation": lambda x: cpu.activate(x, "silu", gated=False),
    "function": lambda x: cpu.apply("exp", x),
    "row sums": cpu.row_sums,
    "rotation": lambda x: cpu.rotate_(x[:, None], numbers(1, 8, 2, 4), torch.arange(8)),
    "table": lambda x: cpu.rotate_(numbers(1, 8, 1, 8), x.view(4, 2, 8), torch.arange(8)),
    "positions": lambda x: cpu.rotate_(numbers(1, 8, 1, 8), numbers(1, 8, 2, 4), x[0].long()),
    "log-softmax": cpu.log_softmax_,
    "entropies": lambda x: cpu.entropies(x[None]),
    "top": lambda x: cpu.top(x, 2),
    "keys": lambda x: store(x[None], numbers(1, 8, 8, 8), torch.zeros(1).long()),
    "cache": lambda x: store(numbers(1, 1, 1, 8), x[None], torch.zeros(1).long()),
    "sequences": lambda x: HostRows(x[0].long(), torch.arange(8), torch.zeros(1, 1).long(), 8, torch.arange(8)),
}


@pytest.mark.parametrize("k", [1, 2, 7, 33, 40])
def test_of_equal_numbers_the_first_are_the_largest(k: int) -> None:
    x = torch.randint(0, 4, (50, 33), generator=torch.Generator().manual_seed(0)).float()
    values, ids = cpu.top(x, k)
    order = x.argsort(dim=-1, descending=True, stable=True)[:, :k]
    assert torch.equal(ids, order) and torch.equal(values, x.gather(1, order))


@pytest.mark.parametrize("name", META)
def test_tensors_without_data_are_refused(name: str) -> None:
    """Their address is 0, which a kernel would read."""
    with pytest.raises(ValueError, match=r"on the CPU, not .* on meta"):
        META[name](torch.empty(8, 8, device="meta"))


# ---- rows alone, and threads -----------------------------------------------------------------------------------------

CASES: dict[str, Callable[[slice], Tensor]] = {
    "product": lambda s: cpu.product(numbers(1, 70, 577)[s], Panels.of(numbers(2, 577, 100))),
    "bfloat16": lambda s: cpu.product(numbers(1, 70, 577)[s], Panels.of(numbers(2, 577, 100).bfloat16().float())),
    "norm": lambda s: cpu.norm(numbers(1, 70, 577)[s], None, None, 1e-6, "layer"),
    "activation": lambda s: cpu.activate(numbers(1, 70, 576)[s], "gelu", gated=True),
    "log-softmax": lambda s: cpu.log_softmax_(numbers(1, 70, 4500)[s].clone()),
    "entropies": lambda s: torch.stack(cpu.entropies(cpu.log_softmax_(numbers(1, 70, 3, 200)[s].clone())), -1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_alone_and_any_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, together = CASES[name], CASES[name](slice(None))
    for some in (slice(0, 1), slice(69, 70), slice(3, 5), slice(1, 8), slice(5, 70)):
        assert same(case(some), together[some])
    divide_everything(monkeypatch)
    for count in range(1, 9):
        with threads.within(count):
            assert same(case(slice(None)), together)


def test_threads_have_memory_of_their_own() -> None:
    """In a process whose threads share one heap. numba frees an array after its last use, whatever holds its address: another
    thread had the memory then, and 2 of 5 products were wrong."""
    code = """
import torch
from replaylens.kernels import threads
from tests.kernels.test_cpu import CASES, Paths, cpu, numbers, same, Panels
threads.GRAIN, threads.processors = 1, lambda: 16
many, wide, narrow = numbers(1, 300, 577), Panels.of(numbers(2, 577, 400)), Panels.of(numbers(2, 577, 400).bfloat16().float())
paths = Paths(16)
works = dict(CASES, many=lambda rows: cpu.product(many, wide), short=lambda rows: cpu.product(many, narrow),
             attention=lambda rows: paths.attend(torch.arange(8).repeat(9)))
for name, work in works.items():
    with threads.within(1):
        expected = work(slice(None))
    for count in (3, 8):
        with threads.within(count):
            assert all(same(work(slice(None)), expected) for _ in range(20)), (name, count)
"""
    environment = dict(os.environ, MALLOC_ARENA_MAX="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [2, 3, 8])
def test_attention_on_threads(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, many = Paths(16), torch.arange(8).repeat(9)
    expected = paths.attend(many)
    divide_everything(monkeypatch)
    with threads.within(count):
        assert same(paths.attend(many), expected)


# ---- controls --------------------------------------------------------------------------------------------------------


def in_halves(x: Tensor, w: Tensor) -> Tensor:
    """k split into two, as a library does at few rows or on two threads."""
    half = len(w) // 2
    return cpu.product(x[:, :half].contiguous(), Panels.of(w[:half])) + cpu.product(
        x[:, half:].contiguous(), Panels.of(w[half:])
    )


def one_chain(x: Tensor, w: Tensor) -> Tensor:
    """Every product rounded once, in the order of k."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(len(w)):
        total = definition.fma(x.numpy()[:, k : k + 1], w.numpy()[k], total)
    return torch.from_numpy(total)


def flushed(x: Tensor, w: Tensor) -> Tensor:
    y = cpu.product(x * 2.0**-130, Panels.of(w))
    return torch.where(y.abs() < 2.0**-126, 0.0, y) * 2.0**100


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k split in two": in_halves,
    "one chain": one_chain,
    "products rounded before they are added": sum_of_products,
    "a library's": lambda x, w: (x.double() @ w.double()).float(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_control_another_product_is_seen(name: str) -> None:
    x, w = numbers(1, 9, 577), numbers(2, 577, 20)
    expected = definition.product(x.numpy(), w.numpy())
    assert same(cpu.product(x, Panels.of(w)), expected) and not same(PRODUCTS[name](x, w), expected)


def test_control_flushed_denormal_numbers_are_seen() -> None:
    x, w = numbers(3, 5, 30), numbers(2, 30, 9)
    right = definition.product((x * 2.0**-130).numpy(), w.numpy()) * np.float32(2.0**100)
    assert same(cpu.product(x * 2.0**-130, Panels.of(w)) * 2.0**100, right) and not same(flushed(x, w), right)


def test_control_other_orders_of_a_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chains added pair by pair, or one chain; spans that are not 4,096; a library's exp."""
    row = numbers(4, 9000).numpy()
    ours = cpu.row_sums(torch.from_numpy(row)[None])[0]
    lanes = np.zeros(64, np.float32)
    for first in range(0, 4096, 64):
        lanes += row[first : first + 64]
    pairs = lanes.copy()
    while len(pairs) > 1:
        pairs = pairs[::2] + pairs[1::2]
    whole = cpu.row_sums(torch.from_numpy(row[:4096])[None])[0]
    assert same(whole, np.array([definition.row_sum(row[:4096])])) and not same(whole, pairs)
    assert not same(whole, np.add.accumulate(row[:4096])[-1:])
    monkeypatch.setattr(definition, "SPAN", 8192)
    assert not same(ours, np.array([definition.row_sum(row)]))
    x = numbers(4, 1000) * 20
    assert not same(cpu.apply("exp", x), x.exp()) and not same(cpu.apply("tanh", x / 20), (x / 20).tanh())


@pytest.mark.parametrize("constant, value", [("KV_BLOCK", 32), ("KV_SPLIT", 1024)])
def test_control_other_blocks_and_splits_of_keys_are_seen(constant: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(16)
    ours = paths.attend(torch.tensor([7]))[0]
    monkeypatch.setattr(definition, constant, value)
    assert not same(ours, np.stack([paths.expected(7, head) for head in range(4)]))


# ---- kept kernels ----------------------------------------------------------------------------------------------------
# Compiled kernels are kept on disk. Whatever happens to the files, they are found or compiled again.

CHILD = """
import sys
from numba.core.caching import FunctionCache
from numba.core.event import RecordingListener, install_listener
if "nowhere" in sys.argv:
    FunctionCache._impl_class._locator_classes = []
with install_listener("numba:compile", RecordingListener()) as compiled:
    import replaylens.kernels.portable as portable
print(len(compiled.buffer) > 0, len(portable.tile.signatures))
"""


def started(folder: Path, *more: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", CHILD, *more], env=environment, stdout=-1, stderr=-1, text=True)


def said(child: "subprocess.Popen[str]") -> tuple[str, str]:
    """(whether it compiled, and its number of forms of `tile`; what it wrote to stderr)"""
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    return out.strip(), errors


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that two processes filled at the same time."""
    folder = tmp_path_factory.mktemp("kernels")
    assert [said(child)[0] for child in [started(folder), started(folder)]] == ["True 1", "True 1"]
    return folder


@pytest.mark.slow
def test_damaged_files_are_replaced(kept: Path) -> None:
    """An index, and a kernel whose index is whole."""
    indices, kernels = (sorted(kept.rglob(f"*.{ending}")) for ending in ("nbi", "nbc"))
    half = len(indices) // 2
    assert half > 0 and {file.stem for file in indices} == {file.stem.rpartition(".")[0] for file in kernels}
    names = {file.stem for file in indices[:half]}
    damaged = indices[:half] + [file for file in kernels if file.stem.rpartition(".")[0] not in names]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:100])
    assert said(started(kept))[0] == "True 1"
    assert said(started(kept))[0] == "False 1", "the control: kept kernels, old and new, are not compiled again"
    assert all(len(file.read_bytes()) > 100 for file in damaged)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """numba takes its next one. If there is none, kernels are compiled, and one warning says what that costs."""
    (tmp_path / "file").touch()
    assert said(started(tmp_path / "file" / "below"))[0].endswith(" 1")
    out, errors = said(started(tmp_path, "nowhere"))
    assert out == "True 1" and errors.count("Set NUMBA_CACHE_DIR") == 1 and not list(tmp_path.rglob("*.nb*"))


@pytest.mark.parametrize("outputs", [1, 11, 12, 13, 60, 61, 100, 320, 321])
@pytest.mark.parametrize("short", [False, True])
def test_panels_hold_the_weight(outputs: int, short: bool) -> None:
    weight = numbers(1, 7, outputs).bfloat16().float() if short else numbers(1, 7, outputs)
    panels = cpu.Panels.of(weight)
    assert torch.equal(panels.weight(), weight) and torch.equal(panels.weight(turned=True), weight.T)
    assert torch.equal(torch.cat(list(panels.pieces(turned=True))), weight.T)
    at = torch.tensor([0, outputs - 1])
    assert torch.equal(panels.columns(at), weight.T[at])
