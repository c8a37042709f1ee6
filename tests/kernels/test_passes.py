"""A pass in a CUDA device's arithmetic, kernel by kernel: the model's function, with rows and keys in the right place."""

import torch

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.cuda import CanonicalCudaOps, device_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, rotary_dim=8)
PATHS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8]]


def whole(model: Decoder, path: list[int]) -> torch.Tensor:
    """The residual stream of a path in plain PyTorch: [tokens, d_model]."""
    return model(torch.tensor(path, device=DEVICE), torch.arange(len(path), device=DEVICE), SequenceOps([len(path)]))


def test_prefill_then_one_row_each():
    """Three branches on pages of two positions: first all tokens but the last of each, then the last ones together."""
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(DEVICE)
    pool = PagePool(16, 2)
    cache = KVCache(CONFIG, pool, torch.float32, DEVICE)
    cache.data = torch.zeros(2, 2, 34, 2, 8, device=DEVICE)  # the device's layout, also in the interpreter
    tables = [PageTable() for _ in PATHS]
    for table, path in zip(reversed(tables), reversed(PATHS), strict=True):  # page numbers out of order
        pool.reserve(table, 0, len(path))

    def run(segments: list[Segment]) -> torch.Tensor:
        batch = Batch(segments, pool, DEVICE)
        ops = CanonicalCudaOps(cache, device_rows(batch, cache))
        return model(batch.tokens, batch.positions, ops)[: batch.num_rows]

    first = run([Segment(table, 0, path[:-1]) for table, path in zip(tables, PATHS, strict=True)])
    last = run([Segment(table, len(path) - 1, path[-1:]) for table, path in zip(tables, PATHS, strict=True)])
    truth = [whole(model, path) for path in PATHS]
    torch.testing.assert_close(first, torch.cat([rows[:-1] for rows in truth]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, torch.stack([rows[-1] for rows in truth]), rtol=1e-4, atol=1e-5)
    held = {slot for table, path in zip(tables, PATHS, strict=True) for slot in pool.slots(table, 0, len(path))}
    assert {i for i in range(34) if cache.data[:, :, i].any()} == held, "keys and values went elsewhere"
