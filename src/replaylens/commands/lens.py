"""The logit lens: what each layer's residual stream would predict if the blocks after it were left out."""

import torch
from torch import Tensor

from replaylens.engine.model import sites
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.pictures.readings import LensGuess, LensLayer
from replaylens.tasks import WordTokenizer


@torch.no_grad()
def next_token_by_layer(model: Decoder, tokenizer: WordTokenizer, prompt: str, k: int = 3) -> list[LensLayer]:
    """The k likeliest next tokens after the prompt, at every S site: entering each block, and leaving the last.

    The last entry is the model's own prediction.
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
    """A tap that keeps the last row of each wanted site, in the order of the pass."""

    def __init__(self, names: list[str]) -> None:
        self.names = frozenset(names)
        self.rows: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return site in self.names

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.rows[site] = value[-1]
        return value
