"""The baseline with the library's products and attention computes the decoder's function, as a pass and step by step."""

import torch

from benchmarks import library
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps

CONFIG = ModelConfig(2, 32, 4, 2, 16, 48, 97, 64, rotary_dim=16, tied_embeddings=False)
COUNT, LENGTH = 3, 21


def test_passes_and_steps(case):
    meant = Decoder(CONFIG).initialize(0).requires_grad_(False).double()
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(case.device, case.dtype)
    for table, own in zip(model.buffers(), Decoder(CONFIG).buffers(), strict=True):
        table.data = own.to(case.device)  # the rotary table stays in float32
    tokens = case.ints(COUNT, LENGTH, below=97, dtype=torch.int64)
    positions = torch.arange(LENGTH).repeat(COUNT)
    want = meant(tokens.cpu().flatten(), positions, SequenceOps([LENGTH] * COUNT)).unflatten(0, (COUNT, LENGTH))
    attend = {rows: next(iter(library.ways(rows, "cpu").values())) for rows in (1, LENGTH, 15)}
    cache = library.ContiguousCache(CONFIG, COUNT, LENGTH, model.embed)

    def rows(first: int, end: int) -> torch.Tensor:
        ops = library.library_cuda_ops()(cache, end - first, end, attend[end - first])
        return model(tokens[:, first:end].flatten(), ops.positions, ops).unflatten(0, (COUNT, end - first)).cpu()

    case.close(rows(0, LENGTH), want, slack=4)
    cache.data.zero_()
    case.close(rows(0, 15), want[:, :15], slack=4)
    for position in range(15, LENGTH):
        case.close(rows(position, position + 1), want[:, position : position + 1], slack=4)
    assert not cache.data[:, :, : library.PAGE].any(), "page 0 is not written"
