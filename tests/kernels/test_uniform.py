"""Tensors of one shape reach kernels that sum over a tile as one kind, whatever they are views of."""

import pytest
import torch
from torch import Tensor

from replaylens.kernels import norm as norms
from replaylens.kernels.launch import uniform

WIDTHS = [1, 6, 8, 36, 40, 48, 64]


def kind(x: Tensor) -> tuple[bool, ...]:
    """What Triton compiles a kernel for: whether address and strides are multiples of 16, and which strides are 1."""
    strides = x.stride()[:-1]
    return x.data_ptr() % 16 == 0, *(s % 16 == 0 for s in strides), *(s == 1 for s in strides)


def views(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows of this width: of their own, packed with others, at an odd start, and one alone."""
    own = torch.randn(5, width).to(dtype)
    packed = [torch.randn(5, width + more).to(dtype) for more in (1, 12, 16, 48 - width % 16)]
    found = [own, *(x[:, :width] for x in packed), packed[0][:, 1:]]
    return [*found, *(x[1:2] for x in found), *(x[1:2].reshape(1, width) for x in found)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kind_for_all_views(width: int, dtype: torch.dtype) -> None:
    for x in views(width, dtype):
        assert torch.equal(uniform(x), x)
        assert kind(uniform(x)) == kind(torch.empty(5, width, dtype=dtype))
    heads = torch.randn(5, 7, width).to(dtype)
    for x in (heads, heads[:, 1:4], heads[1:2, 1:4], heads[:, :1]):
        assert torch.equal(uniform(x), x) and kind(uniform(x)) == kind(torch.empty(9, *x.shape[1:], dtype=dtype))


def test_a_plain_tensor_is_not_copied() -> None:
    packed = torch.randn(5, 64 + 16)
    assert all(uniform(x) is x for x in (packed, packed[:, :64], packed[:1]))


@pytest.mark.parametrize("mechanism", [True, False])
def test_norms_launch_one_kind(mechanism: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without `uniform`, views of one width reach the kernels as several kinds."""
    seen: set[tuple[bool, ...]] = set()

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> "Launched":
            return self

        def __call__(self, x: Tensor, *rest: object, **options: object) -> None:
            seen.add(kind(x))

    for name in ("_norm_kernel", "_scale_kernel"):
        monkeypatch.setattr(norms, name, Launched())
    if not mechanism:
        monkeypatch.setattr(norms, "uniform", lambda x: x)
    for x in views(36, torch.float32):
        norms.norm(x, torch.ones(36))
        norms.norm_scale(x)
    assert (len(seen) == 1) == mechanism
