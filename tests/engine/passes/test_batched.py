"""Batched products by NumPy are used only if they have the bits of torch's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaylens.engine.passes import products
from replaylens.engine.passes.products import batched_product, by_torch, small_by_numpy

SIZES = (1, 2, 4, 16, 64, 128)


def without_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)


@pytest.mark.parametrize("group, d_head", [(1, 8), (1, 32), (3, 64), (2, 80)])
def test_the_chosen_product_has_the_bits_of_torch(group: int, d_head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_mkl(monkeypatch)
    product = batched_product(SIZES, group, d_head)
    generator = torch.Generator().manual_seed(1)
    for rows in SIZES:
        for n in (64, 192, 256, 320):
            q, keys = (torch.randn(5, m, d_head, generator=generator) for m in (rows * group, n))
            assert torch.equal(product(q, keys.transpose(1, 2)), torch.bmm(q, keys.transpose(1, 2)))
            weights = torch.rand(5, rows * group, n, generator=generator)[..., n - 64 :]
            assert torch.equal(product(weights, keys[:, :64]), torch.bmm(weights, keys[:, :64]))


def test_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_mkl(monkeypatch)
    right: Callable[..., Any] = np.matmul

    def wrong(a: Any, b: Any, out: Any) -> None:
        right(a, b, out=out)
        if a.shape[1] == 16 and b.shape[2] == 192:
            out[-1, -1, -1] = np.nextafter(out[-1, -1, -1], np.float32(np.inf))

    monkeypatch.setattr(products.np, "matmul", wrong)
    assert batched_product((2, 4, 16), 1, 8) is by_torch
    assert batched_product((2, 4), 1, 8) is not by_torch or not numpy_agrees_here(), "control: without that size"


def numpy_agrees_here() -> bool:
    """Whether the two libraries of this machine agree at all; they need not."""
    q, keys = torch.randn(3, 4, 8), torch.randn(3, 8, 64)
    return torch.equal(small_by_numpy(q, keys), torch.bmm(q, keys))


def test_with_mkl_torch_has_batched_products_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert batched_product(SIZES, 1, 32) is by_torch


def test_large_products_and_single_rows_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("NumPy was asked")

    monkeypatch.setattr(products.np, "matmul", refused)
    for m, n in ((1, 64), (192, 64), (2, 320)):
        q, keys = torch.randn(2, m, 64), torch.randn(2, 64, n)
        assert torch.equal(small_by_numpy(q, keys), torch.bmm(q, keys))
    with pytest.raises(AssertionError, match="NumPy"):
        small_by_numpy(torch.randn(2, 2, 64), torch.randn(2, 64, 64))
