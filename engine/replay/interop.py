"""TransformerLens' `run_with_cache` on an engine, and the part of a model that an `ActivationCache` needs."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import integer, items, whole
from replaylens.engine.serving.core import Core

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


def run_with_cache(
    engine: Core,
    tokens: str | Sequence[int] | Sequence[Sequence[int]] | Tensor,
    names_filter: NamesFilter = None,
    pos_slice: slice | int | None = None,
) -> tuple[Tensor, Any]:
    """Logits [batch, positions, vocab] and a TransformerLens `ActivationCache` of the named sites.

    names_filter  a name, several, or a function of the name, as in TransformerLens; None: every site
    pos_slice     positions in the cache; the logits cover all positions

    Every value is canonical: it has the same bits as in a replay, a fork or a dump.
    """
    from transformer_lens import ActivationCache

    paths, names = _paths(engine, tokens), _chosen(engine, names_filter)
    where = _where(pos_slice, len(paths[0]))
    last = f"blocks.{engine.config.num_layers - 1}.hook_out"
    branches = engine.prompts(paths, sites=[*names, last])
    try:
        logits = torch.stack([engine.lock.alone(engine.runner.logits, branch.activations[last]) for branch in branches])
        values = {
            name: torch.stack([_rows(name, branch.activations[name], len(paths[0])) for branch in branches]) for name in names
        }
    finally:
        for branch in branches:
            branch.release()
    cache: dict[str, Tensor] = {}
    for name, value in values.items():
        value = value[:, where]
        if name.endswith("hook_pattern"):
            value = value.transpose(1, 2)  # [batch, heads, queries, keys], as in TransformerLens
        for alias in (name, *engine.sites.sites[name].aliases):
            cache[alias] = value
    return logits, ActivationCache(cache, CacheModel(engine))


def _paths(engine: Core, tokens: str | Sequence[int] | Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    if isinstance(tokens, str):
        return [engine.tokens_of(tokens)]
    rows = items("tokens", tokens, "text, token ids, or several lists of them of one length")
    several = rows and all(isinstance(row, Sequence | np.ndarray | Tensor) and integer(row) is None for row in rows)
    paths = [engine.tokens_of(row) for row in rows] if several else [engine.tokens_of(rows)]
    if len({len(path) for path in paths}) != 1:
        raise BadRequest(
            "The sequences differ in length, but run_with_cache returns one tensor per site. Use prompts() instead."
        )
    return paths


def _where(pos_slice: slice | int | None, length: int) -> slice:
    """The positions as a slice. A single position keeps its dimension."""
    if pos_slice is None:
        return slice(None)
    if not isinstance(pos_slice, slice):
        at = whole("pos_slice", pos_slice, -length, length - 1)
        return slice(at, at + 1 or None)
    start, stop = (None if end is None else whole("pos_slice", end) for end in (pos_slice.start, pos_slice.stop))
    step = 1 if pos_slice.step is None else whole("pos_slice.step", pos_slice.step, 1)
    return slice(*slice(start, stop, step).indices(length))


def _chosen(engine: Core, names_filter: NamesFilter) -> list[str]:
    every = engine.sites.in_order()
    if names_filter is None:
        return every
    if callable(names_filter):
        return [name for name in every if any(names_filter(n) for n in (name, *engine.sites.sites[name].aliases))]
    wanted = (
        [names_filter] if isinstance(names_filter, str) else items("names_filter", names_filter, "a name, names or a function")
    )
    return sorted({engine.sites.resolve(name) for name in wanted}, key=every.index)


def _rows(name: str, value: Tensor, length: int) -> Tensor:
    """Rows cut to the sequence: attention patterns have room for whole blocks of keys. Other sites are unchanged."""
    return value[..., :length] if name.endswith("hook_pattern") else value


class CacheModel:
    """The part of a model that the methods of `ActivationCache` use."""

    def __init__(self, engine: Core) -> None:
        c = engine.config
        self._engine = engine
        self.cfg = SimpleNamespace(
            n_layers=c.num_layers,
            n_heads=c.num_heads,
            d_model=c.d_model,
            d_mlp=c.d_mlp,
            d_head=c.d_head,
            attn_only=False,
            normalization_type="RMS" if c.norm == "rms" else "LN",
            device="cpu",
        )
        self.ln_final = engine.model.ln_final
        self.blocks = engine.model.blocks

    @property
    def unembed_matrix(self) -> Tensor:
        """[d_model, vocab]"""
        return self._engine.model.unembedding.t()

    def to_single_token(self, text: str) -> int:
        return self._engine._target(text)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The unembedding columns of tokens."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        columns = self.unembed_matrix.t()[tokens]
        return columns
