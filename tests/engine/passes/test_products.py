"""All variants of a canonical product give the bits of one tile on one thread. A variant that does not is not certified."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model import modes
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes import products
from replaylens.engine.passes.batch import TILE
from replaylens.engine.passes.products import Allowed, Products, tile_product
from replaylens.engine.proof import certificates, doctor
from replaylens.engine.proof import doctor as doctor_products
from tests.engine.reference import decoder

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL to pack weights")
SHAPE = (96, 80)


def linear(bias: bool) -> Linear:
    torch.manual_seed(0)
    made = Linear(*SHAPE, bias)
    made.weight.data.normal_()
    if made.bias is not None:
        made.bias.data.normal_()
    return made.requires_grad_(False)


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 64, 65, 127, 128, 129, 300])
def test_a_packed_weight_gives_the_bits_of_the_tile_at_any_row_count(rows: int, bias: bool) -> None:
    module, x = linear(bias), torch.randn(320, SHAPE[0], generator=torch.Generator().manual_seed(1))
    truth = Products({1: Allowed({SHAPE: (TILE,)})}).linear(x, module)[:rows]
    packed = Products({1: Allowed({SHAPE: (256, 128, TILE)}, frozenset({SHAPE}))})
    assert packed.tile == 1
    assert torch.equal(packed.linear(x[:rows], module), truth)
    assert torch.equal(packed.linear(x[:rows], module), truth), "and again, now that the weight is packed"


def test_a_model_with_one_unpacked_shape_is_padded_to_tiles() -> None:
    assert Products({1: Allowed({SHAPE: (TILE,), (8, 8): (TILE,)}, frozenset({SHAPE}))}).tile == TILE
    assert Products({1: Allowed({})}).tile == TILE


def test_the_tile_is_the_meaning() -> None:
    x, weight = torch.randn(48, 96), torch.randn(96, 80)
    exact = x.double() @ weight.double()
    assert (tile_product(x, weight).double() - exact).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("threads", "rows", "calls"),
    [
        (1, 112, [(64, 1), (16, 1), (16, 1), (16, 1)]),
        (2, 112, [(64, 2), (16, 1), (16, 1), (16, 1)]),  # on two threads, only 64 rows are certified
        (2, 128, [(64, 2), (64, 2)]),
        (2, 48, [(16, 1), (16, 1), (16, 1)]),
        (3, 112, [(64, 1), (16, 1), (16, 1), (16, 1)]),  # no certificate: everything runs on one thread
    ],
)
def test_only_certified_products_reach_the_library(
    threads: int, rows: int, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row counts and threads of each call, whatever bits this machine's library gives at other counts."""
    seen: list[tuple[int, int]] = []
    product = torch.mm

    def watched(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        seen.append((len(a), torch.get_num_threads()))
        return product(a, b, out=out)

    module, x = linear(bias=True), torch.randn(rows, SHAPE[0], generator=torch.Generator().manual_seed(1))
    allowed = {1: Allowed({SHAPE: (64, TILE)}), 2: Allowed({SHAPE: (64,)})}
    monkeypatch.setattr(torch, "mm", watched)
    with modes.threads(threads):
        found = Products(allowed).linear(x, module)
        assert torch.get_num_threads() == threads
    assert seen == calls
    exact = x.double() @ module.weight.double() + module.bias.double()  # type: ignore[union-attr]
    assert (found.double() - exact).abs().max() < 1e-4


@needs_mkl
def test_single_rows_of_a_certified_model_are_not_padded() -> None:
    engine = Engine(decoder("llama"))
    assert engine.certificate.packed == set(engine.certificate.row_counts)
    assert engine.loop.runner.tile == 1


@needs_mkl
def test_a_packed_weight_with_other_bits_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a library that sums single rows in another order."""
    right = products.packed_product

    def wrong(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return x[:, :half] @ weight[:half] + x[:, half:] @ weight[half:] if len(x) == 5 else right(x, packed, weight)

    monkeypatch.setattr(products, "packed_product", wrong)
    certificate = doctor.examine(decoder("llama"))
    assert certificate.certified and not certificate.packed
    assert Products(certificate.allowed).tile == TILE


@needs_mkl
def test_an_engine_that_cannot_pack_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def session() -> tuple[int, list[int], Tensor]:
        engine = Engine(decoder("qwen3"))
        branch = engine.prompt([3, 1, 4, 1, 5])
        branch.generate(9, window=4)
        return engine.loop.runner.tile, branch.tokens, branch.kv()

    tile, tokens, kv = session()
    monkeypatch.setattr(certificates, "_EXAMINED", {})
    monkeypatch.setattr(certificates, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(doctor_products, "can_pack", lambda weight: False)
    other_tile, other_tokens, other_kv = session()
    assert (tile, other_tile) == (1, TILE)
    assert tokens == other_tokens and torch.equal(kv, other_kv)
