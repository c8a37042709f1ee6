"""Translates a Hugging Face config and its tensors into a decoder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.engine.model.check import require_same
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.families import FAMILIES, family_of
from replaylens.engine.model.family import Family, Sink, Tensors
from replaylens.engine.model.fields import require_described, require_readable
from replaylens.engine.model.filler import Filler
from replaylens.engine.model.source import HEAD, Source


def from_hugging_face(
    raw: dict[str, Any],
    source: Source,
    dtype: torch.dtype,
    reference: Callable[[], nn.Module] | None = None,
    device: str = "cpu",
    adapter: str = "",
    revision: str = "",
) -> Decoder:
    """Translate a Hugging Face config and its tensors. A tensor or field that is not used is an error, never dropped.

    reference  makes the transformers model to compare the result with
    adapter    digest of the adapter that the source merges
    revision   name@commit of a source from the hub
    """
    name = family_of(raw)
    family = FAMILIES[name]
    require_readable(raw, family)
    try:
        config = family.config(raw)
    except KeyError as e:
        raise UnsupportedModel(f"The {name} config lacks {e}.") from None
    require_described(raw, family, config)
    config = replace(_with_its_head(config, family, source), adapter=adapter, revision=revision)
    filler = Filler(config, dtype, device)
    _fill(family, config, source, filler)
    extra = family.unused(config.num_layers, source.unread())
    if extra := [name for name in extra if source.read(name).numel()]:  # a shared expert of width 0 holds nothing
        raise BadWeights(
            f"The checkpoint holds {len(extra)} tensors that a {config.family} model does not have, such as "
            f"{', '.join(extra[:4])}. Leaving them out would change what it computes. Is the config the right one?"
        )
    model = filler.finished()
    if reference is not None:
        tensors: Tensors = {}
        _fill(family, config, source, tensors)
        require_same(config, tensors, reference())
    return model


def _fill(family: Family, config: ModelConfig, source: Source, out: Sink) -> None:
    """Mutates: set all tensors of the source in `out`."""
    try:
        family.fill(config, source.get, out)
    except RuntimeError as e:  # q, k and v, or gate and up, cannot be joined
        near = ", ".join(f"{name} {shape}" for name, shape in list(source.shapes.items())[-3:])
        raise BadWeights(f"These shapes do not fit: {near} ({e}). Check that config and weights belong together.") from e
    if f"{family.names.head}.weight" != HEAD and source.find(HEAD) is not None and not config.tied_embeddings:
        out["unembed.weight"] = source.get(HEAD).T  # the table was read in its place (BLOOM)


def _with_its_head(config: ModelConfig, family: Family, source: Source) -> ModelConfig:
    """The config, untied if the source has a head that differs from the embedding, as transformers does."""
    if not config.tied_embeddings or source.find(HEAD) is None:
        return config
    if _same(source.get(HEAD), source.get(f"{family.names.embed}.weight")):
        return config
    return replace(config, tied_embeddings=False)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, also in two dtypes."""
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.shape == b.shape and torch.equal(a.to(wide), b.to(wide))
