"""Features encoded by the kernels: the CPU's numbers, the same bits for a row in any company, and edits of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import KernelProduct
from tests.features.tiny import WIDTH, write
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model

KINDS = ("standard", "topk rescaled", "jumprelu")


def by_kernels(folder: Path, device: str) -> SparseFeatures:
    """Features whose product is the kernel's, in the interpreter as well."""
    features = SparseFeatures.load(folder, device)
    if device == "cpu":
        features._product = KernelProduct(features.weights.W_enc)
    return features


def rows(n: int = 21) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_features_of_the_cpu_and_the_same_bits_alone(kind: str, device: str, tmp_path: Path) -> None:
    folder, x = write(tmp_path, kind), rows()
    features = by_kernels(folder, device)
    together = features.encode(x.to(device))
    assert not together.values.is_cuda and together.values.dtype == torch.float32
    torch.testing.assert_close(together.dense(), SparseFeatures.load(folder).encode(x).dense(), rtol=1e-5, atol=1e-5)
    for i in (0, 7, 20):
        alone = features.encode(x[i : i + 1])  # rows of the host go to the device
        assert all(torch.equal(a, b) for a, b in zip(alone.row(0), together.row(i), strict=True))
    assert torch.equal(features.encode(x.flip(0)).dense().flip(0), together.dense())
    assert features.digest == SparseFeatures.load(folder).digest


@pytest.mark.parametrize("device", DEVICES)
def test_an_edit_of_a_feature(device: str, tmp_path: Path) -> None:
    """The feature is gone from the fork's rows, and the fork is certified."""
    engine, features = served(device, random_model(num_layers=1)), by_kernels(write(tmp_path, "standard"), device)
    branch = engine.prompt([3, 1, 4, 1, 5], sites="S")
    found = features.of(branch)
    (top,) = found.strongest(1)
    (fork,) = branch.fork(edits=features.edits(branch, ablate=[top]))
    engine.forest.compute([fork.lane])
    before, after = found.columns([top]), features.of(fork).columns([top])
    assert fork.certified and float(before.max()) > 0.1
    target = branch.activations["blocks.0.hook_out"].cpu() - before * features.decoder[top]
    torch.testing.assert_close(fork.activations["blocks.0.hook_out"].cpu(), target, rtol=1e-4, atol=1e-4)
    assert not torch.equal(before, after), "control: the edit changes the feature"


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_that_depends_on_company_is_refused(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the product of single rows has other bits."""
    from replaylens.kernels import matmul as kernel

    honest = kernel.matmul
    monkeypatch.setattr(kernel, "matmul", lambda x, w, **more: honest(x, w, **more) * (1 + 1e-6 * (len(x) == 1)))
    with pytest.raises(NotCertified, match="other bits"):
        by_kernels(write(tmp_path, "standard"), device).encode(rows())


def test_an_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="No device 'gpu' found"):
        SparseFeatures.load(write(tmp_path, "standard"), device="gpu")
