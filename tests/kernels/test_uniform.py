"""Tensors of one shape reach kernels that sum over a tile as one kind, whatever they are views of."""

import json
import os
import subprocess
import sys

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


# ---- layouts ----------------------------------------------------------------------------------------------------------
# The sum over a head has one thread layout, in every kernel that norms: compiled for a GPU, without one.

SCRIPT = r"""
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from replaylens.kernels import norm, rope
from replaylens.kernels.launch import norm_shape

INTS = ("SEQUENCE", "POSITION", "PAGES")

def layouts(kernel, dtype, loose, warps, constants):
    '''The layouts of all sums in the compiled kernel, by the type of what is summed.'''
    kinds = {n: "constexpr" if n in constants else "fp32" if n == "eps" else "*fp32" if n == "TABLE" else "*i32" if n in INTS
             else dtype if n.isupper() else "i32" for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
               if kinds[n] not in ("constexpr", "fp32") and n not in loose}
    source = ASTSource(kernel, kinds, constants, aligned)
    options = dict(num_warps=warps, enable_fp_fusion=False)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    named = dict(re.findall(r"(#\w+) = (#ttg\.[^\n]*)", text))
    found = re.findall(r"\}\) : \(tensor<(\w+), (#\w+)>\) -> tensor<", text)
    assert found
    return sorted({f"{shape} {named[name]}" for shape, name in found})

same = {}
for dtype in ("*bf16", "*fp32"):
    for width in (64, 128, 256):
        shape = norm_shape(width)
        plain = dict(ROWS=shape.rows, BLOCK=shape.block, LAYER=False, HAS_BIAS=False)
        fused = dict(QUERY_HEADS=32, KV_HEADS=4, HALF=width // 2, PAGE=16, HEADS=shape.rows, LAYER=False)
        a, b = (layouts(norm._norm_kernel, dtype, ("rows", "inner"), shape.warps, {**plain, "FIRST": n}) for n in (0, 8))
        c = layouts(rope._norm_rope_kernel, dtype, ("stride_p",), shape.warps, fused)
        d = layouts(rope._norm_rope_kernel, dtype, ("stride_p",), 2 * shape.warps, fused)
        same[f"{dtype} {width}"] = [a == b == c, a == d]
    shape = norm_shape(36)  # rows of another kind, which `uniform` keeps away from the kernel, are summed in another order
    plain = dict(ROWS=shape.rows, BLOCK=shape.block, LAYER=False, HAS_BIAS=False, FIRST=0)
    e, f = (layouts(norm._norm_kernel, dtype, ("rows", "inner", "width", "stride_o", *odd), shape.warps, plain)
            for odd in (("stride_xo",), ()))
    same[f"{dtype} of another kind"] = [True, e == f]
print(json.dumps(same))
"""


@pytest.mark.slow
def test_kernels_that_norm_heads_sum_in_one_order() -> None:
    """Negative controls: twice the warps give another layout somewhere, and so do rows at addresses of another kind."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(same for same, _ in found.values()), found
    assert not all(control for name, (_, control) in found.items() if "kind" not in name), found
    assert not any(control for name, (_, control) in found.items() if "kind" in name), found
