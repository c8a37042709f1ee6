"""The wirings of all families in a CUDA device's arithmetic: the same decoder with other ops gives the model's function."""

import pytest
import torch

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.loading import load
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.cuda import CanonicalCudaOps, device_rows
from replaylens.engine.proof import doctor_cuda
from tests.engine.passes.packed import alone
from tests.families import MORE, NEW_WIRINGS, ON_CPU_ONLY, hugging_face

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATH = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


def logits(name: str) -> torch.Tensor:
    """The logits of all but the last token in one pass, and of the last in another, on pages of two positions."""
    model = load(hugging_face(name)).to(DEVICE)
    config, pool, table = model.config, PagePool(8, 2), PageTable()
    cache = KVCache(config, pool, torch.float32, DEVICE, kernels=True)
    pool.reserve(table, 0, len(PATH))
    rows = []
    for start, end in ((0, len(PATH) - 1), (len(PATH) - 1, len(PATH))):
        batch = Batch([Segment(table, start, PATH[start:end])], pool, DEVICE)
        ops = CanonicalCudaOps(cache, device_rows(batch, cache))
        rows.append(model.logits(model(batch.tokens, batch.positions, ops)[: batch.num_rows], ops))
    return torch.cat(rows).cpu()


SERVED = [name for name in MORE if name not in ON_CPU_ONLY]


@pytest.mark.parametrize("name", [n if n in NEW_WIRINGS[:3] else pytest.param(n, marks=pytest.mark.slow) for n in SERVED])
@torch.no_grad()
def test_a_pass_gives_hugging_faces_logits(name: str) -> None:
    """The path is longer than the windows of seven positions."""
    (theirs,) = alone(hugging_face(name), [torch.tensor(PATH)])
    torch.testing.assert_close(logits(name), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ON_CPU_ONLY)
@torch.no_grad()
def test_what_the_kernels_do_not_have_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="ALiBi is not supported on CUDA"):
        logits(name)
    with pytest.raises(UnsupportedModel, match="ALiBi is not supported on CUDA"):
        doctor_cuda.examine(load(hugging_face(name)))
