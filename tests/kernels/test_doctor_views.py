"""The doctor gives norms the views that the engine gives them: columns of a wider product."""

import pytest
import torch
from torch import Tensor

from replaylens.engine.model.layers import Norm
from replaylens.engine.proof import doctor_cuda
from replaylens.engine.proof import doctor_cuda as comparison
from tests.engine.reference import decoder

CHECK = "rows of a wider product"


@pytest.mark.parametrize("sees_strides", [False, True])
@torch.no_grad()
def test_a_norm_that_sees_what_its_rows_are_views_of_is_found(sees_strides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = doctor_cuda.HeadOps.norm

    def norm(self: doctor_cuda.HeadOps, x: Tensor, norm: Norm) -> Tensor:
        return honest(self, x, norm) * (1 + 1e-6 * (sees_strides and x.stride(0) % 16 == 0))

    for module in (comparison, doctor_cuda):
        monkeypatch.setattr(module, "ROWS", (1, 9))
    monkeypatch.setattr(doctor_cuda.HeadOps, "norm", norm)
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    model, found = decoder("olmoe-normalised"), []
    doctor_cuda._rowwise(model, random, found)
    seen = {finding.shape: finding.equal for finding in found if finding.check == CHECK}
    assert "[36]" in seen and all(same != sees_strides for shape, same in seen.items() if shape == "[36]")
    assert all(finding.equal for finding in found if finding.check != CHECK)
