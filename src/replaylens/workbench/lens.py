"""`lens`: what each layer predicts at each position of a text, by the logit lens, plain or tuned."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.passes.runner import LENS_ROWS
from replaylens.engine.pictures.readings import layer_name, word
from replaylens.engine.serving.core import Core
from replaylens.workbench.drawing import Grid, figure, view
from replaylens.workbench.metric import words

Measure = Literal["probability", "entropy", "kl", "rank", "logprob"]
_LABELS = {
    "probability": "probability of the likeliest token",
    "entropy": "entropy, nats",
    "kl": "KL divergence of the layer from the model's output, nats",
    "rank": "rank of the token, 0 is the likeliest",
    "logprob": "log-probability of the token",
}


@dataclass(frozen=True, eq=False)
class LensResult:
    """The logit lens of one text. Layer i reads the residual stream that enters block i; the last is the model's output."""

    tokens: tuple[str, ...]
    layers: tuple[str, ...]
    token: str | None
    """the token that `rank` and `logprob` are about; None: the one that follows in the text (NaN for the last position)"""
    top: tuple[tuple[tuple[str, ...], ...], ...]
    """[layers][positions][k]: the likeliest tokens"""
    top_ids: Tensor
    """[layers, positions, k]"""
    top_logprobs: Tensor
    """[layers, positions, k]"""
    entropy: Tensor
    """[layers, positions], in nats"""
    kl: Tensor
    """[layers, positions]: KL(model's output || layer), in nats"""
    rank: Tensor
    """[layers, positions]: how many tokens are likelier. Whole numbers if a token is given; else NaN in the last position,
    and so floats"""
    logprob: Tensor
    """[layers, positions]"""

    def __repr__(self) -> str:
        about = "the next token" if self.token is None else repr(self.token)
        return f"LensResult({len(self.layers)} layers, {len(self.tokens)} tokens, rank of {about})"

    @property
    def probability(self) -> Tensor:
        """Of the likeliest token: [layers, positions]."""
        return self.top_logprobs[..., 0].exp()

    @property
    def frame(self) -> pd.DataFrame:
        """One line per layer and position."""
        at = [(i, j) for i in range(len(self.layers)) for j in range(len(self.tokens))]
        columns = {name: getattr(self, name).flatten().numpy() for name in ("probability", "entropy", "kl", "rank", "logprob")}
        facts = [(i, self.layers[i], j, self.tokens[j], self.top[i][j][0]) for i, j in at]
        frame = pd.DataFrame(facts, columns=["layer", "name", "position", "token", "top"]).assign(**columns)
        return frame.astype({"rank": "Int64"})  # whole numbers that may be missing

    def grid(self, measure: Measure = "probability") -> Grid:
        """The numbers of one measure, with the likeliest tokens as words."""
        if measure not in _LABELS:
            raise BadRequest(f"Unknown measure {measure!r}. Known: {', '.join(_LABELS)}.")
        best = [[self.top[i][j][0] for j in range(len(self.tokens))] for i in range(len(self.layers))]
        about = f" ({self.token!r})" if self.token is not None and measure in ("rank", "logprob") else ""
        title = f"Logit lens: {_LABELS[measure]}{about}"
        return Grid(title, self.layers, self.tokens, getattr(self, measure).numpy(), best, facts=self._facts)

    def _facts(self, layer: int, position: int) -> tuple[str, ...]:
        chances = self.top_logprobs[layer, position].exp().tolist()
        guesses = [f"{p:.3f}\t{token!r}" for p, token in zip(chances, self.top[layer][position], strict=True)]
        return (f"{self.layers[layer]} after {self.tokens[position]!r}", *guesses)

    def plot(self, measure: Measure = "probability") -> Figure:
        """A heat map, layers by positions, with each layer's likeliest token in its cell."""
        return figure([self.grid(measure)], _LABELS[measure], "layer", "token")

    def _repr_html_(self) -> str:
        return view([self.grid()], note="Each cell shows the layer's likeliest next token; a stronger colour is more likely.")


def lens(
    engine: Core,
    text: str | list[int],
    *,
    token: str | int | None = None,
    tuned: TunedLens | None = None,
    top_k: int = 5,
) -> LensResult:
    """What each layer predicts at each position.

    token  the token to rank at every position; None: the one that follows in the text
    tuned  read through this tuned lens instead of the plain one
    top_k  likeliest tokens kept per cell

    >>> from replaylens import Engine, lens
    >>> result = lens(Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A:")
    >>> result.top[-1][-1][0], result.rank.shape
    (' tails', torch.Size([5, 15]))
    """
    target = None if token is None else engine.token_ids_of([token])[0]
    branch = engine.prompt(text, sites="SZ", top_k=top_k, lens=tuned)
    try:
        path, rows = branch.tokens, branch.activations
        z = {name: rows[name].transpose(0, 1) for name in ("Z.entropy", "Z.kl", "Z.top_ids", "Z.top_logprobs")}
        stacked = torch.stack([rows[site].cpu() for site in engine.sites.per_layer("S")], dim=1)  # [positions, layers, d]
    finally:
        branch.release()
    followers = [*path[1:], -1] if target is None else [target] * len(path)
    rank, logprob = engine.lock.alone(_of_token, engine, stacked, followers, tuned)
    ids = z["Z.top_ids"]
    text_of = {i: word(engine.text, i) for i in set(ids.flatten().tolist())}
    top = tuple(tuple(tuple(text_of[i] for i in cell) for cell in line) for line in ids.tolist())
    names = tuple(layer_name(layer, stacked.shape[1]) for layer in range(stacked.shape[1]))
    about = None if target is None else word(engine.text, target)
    rank = rank if target is None else rank.long()
    numbers = (ids, z["Z.top_logprobs"], z["Z.entropy"], z["Z.kl"], rank.T, logprob.T)
    return LensResult(words(engine, path), names, about, top, *numbers)


@torch.inference_mode()
def _of_token(engine: Core, stacked: Tensor, tokens: list[int], tuned: TunedLens | None) -> tuple[Tensor, Tensor]:
    """(rank, log-probability) of one token per position at every layer: [positions, layers] each. Token -1 gives NaN."""
    if tuned is not None:
        with engine.runner.canonical(stacked.shape[:2].numel()):
            stacked = tuned.translate(stacked)
    layers = stacked.shape[1]
    wanted = torch.tensor(tokens).repeat_interleave(layers)
    ranks, logprobs = np.empty(len(wanted)), np.empty(len(wanted), dtype=np.float32)
    for first in range(0, len(wanted), LENS_ROWS):
        some = slice(first, first + LENS_ROWS)
        logits = engine.runner.logits(stacked.flatten(0, 1)[some]).float().cpu()
        own = logits.gather(1, wanted[some].clamp_min(0)[:, None])
        earlier = torch.arange(logits.shape[1]) < wanted[some][:, None]  # ties go to the lowest id, as in greedy decoding
        ranks[some] = ((logits > own) | ((logits == own) & earlier)).sum(1).numpy()
        logprobs[some] = (own[:, 0] - logits.logsumexp(1)).numpy()
    missing = wanted.numpy() < 0
    ranks[missing] = logprobs[missing] = np.nan
    return tuple(torch.from_numpy(x).view(-1, layers) for x in (ranks, logprobs))  # type: ignore[return-value]
