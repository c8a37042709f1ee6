"""Z from the lens kernel, called as the engine calls it, equals the same numbers from whole distributions."""

import pytest
import torch

from replaylens.engine.lens import cuda as cuda_lens
from replaylens.engine.lens import lens
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.records import LensSpec

CONFIG = ModelConfig(2, 32, 2, 2, 16, 64, 97, 64, rotary_dim=16)


@pytest.mark.parametrize("targets", [(), (3, 96)])
def test_z_is_that_of_whole_distributions(targets):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(device)
    stacked = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).to(device)
    emitted, spec = [4, 0, -1, 50, 96], LensSpec(("a", "b", "c"), top_k=4, targets=targets)
    found = cuda_lens.read(spec, model, stacked, emitted)
    logits = model.logits(stacked.reshape(15, 32), SequenceOps([15])).cpu()
    want = lens.statistics(spec, logits.log_softmax(-1).view(5, 3, -1), emitted)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype and found[name].is_contiguous()
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not found["Z.kl"][:, -1].any()
    there = cuda_lens.read(spec, model, stacked.cpu(), emitted)  # rows that were captured lie on the host
    assert all(torch.equal(there[name].nan_to_num(9.0), found[name].nan_to_num(9.0)) for name in found)
