"""The logit lens: the next token predicted from each layer's residual stream, without the blocks after it."""

import torch
from torch import Tensor

from replaylens.engine.model import sites
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.torch_ops import SequenceOps
from replaylens.engine.pictures.readings import LensGuess, LensLayer
from replaylens.tasks import WordTokenizer


@torch.no_grad()
def next_token_by_layer(model: Decoder, tokenizer: WordTokenizer, prompt: str, k: int = 3) -> list[LensLayer]:
    """The k most likely next tokens after the prompt, at every residual stream: before each block, and after the last.

    The last entry is the model's prediction.
    """
    ids = tokenizer.encode(prompt)
    ops, kept = SequenceOps([len(ids)]), _LastRows(sites.table(model.config).per_layer("S"))
    model(torch.tensor(ids), torch.arange(len(ids)), ops, kept)
    best = model.logits(torch.stack(list(kept.rows.values())), ops).softmax(-1).topk(k)
    return [
        LensLayer(site, tuple(LensGuess(tokenizer.token(i), p) for i, p in zip(tokens, shares, strict=True)))
        for site, tokens, shares in zip(kept.rows, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class _LastRows:
    """A tap that keeps the last row of each wanted site, in order of the pass."""

    def __init__(self, names: list[str]) -> None:
        self.names = frozenset(names)
        self.rows: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return site in self.names

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.rows[site] = value[-1]
        return value
