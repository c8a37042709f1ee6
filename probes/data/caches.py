"""Rows from a TransformerLens cache: activations [batch, positions, ...] by hook name, with the tokens they belong to."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from replaylens.engine.errors import UnknownSite, no_such
from replaylens.engine.model.sites import by_letter
from replaylens.probes.data.arrays import ArraySource, read_arrays
from replaylens.probes.data.columns import LABEL, make_index
from replaylens.probes.data.sources import LETTERS
from replaylens.probes.errors import BadRows


def read_cache(
    cache: Any, tokens: Any, labels: Any, groups: Any, *, sites: str | Sequence[str] | None, mask: Any
) -> tuple[pd.DataFrame, ArraySource]:
    """(index, activations). Arguments as in `ProbeRows.of_cache`."""
    values = getattr(cache, "cache_dict", cache)
    if not isinstance(values, Mapping):
        raise BadRows(f"Cannot read a {type(cache).__name__}. Give an ActivationCache, or a dict of tensors by hook name.")
    ids = _grid("tokens", tokens)
    kept = np.ones(ids.shape, dtype=bool) if mask is None else _grid("mask", mask).astype(bool)
    if kept.shape != ids.shape:
        raise BadRows(f"The mask has shape {list(kept.shape)}, the tokens {list(ids.shape)}. Give one value per token.")
    if not kept.any():
        raise BadRows("The mask leaves out every token. Give True where a token counts.")
    post_norms = bool(_config(cache, "use_normalization_before_and_after"))
    names = _chosen(list(values), sites, post_norms)
    batched = bool(getattr(cache, "has_batch_dim", _is_batched(tokens)))
    arrays = {name: _rows(name, values[name], ids.shape, torch.from_numpy(kept), batched) for name in names}
    line, column = np.nonzero(kept)
    place = kept.cumsum(1)[line, column] - 1  # from the first token that counts
    one_per_row = {name: _spread(name, each, kept) for name, each in _named(labels).items()}
    group = _by_tokens(ids, kept)[line] if groups is None else _of_prompts(groups, kept)
    known: dict[str, Any] = dict(prompts=line, positions=place, tokens=ids[kept], keys=None)
    return make_index(len(line), one_per_row, group, **known), read_arrays(arrays, post_norms)


def _chosen(there: list[str], sites: str | Sequence[str] | None, post_norms: bool) -> list[str]:
    """Names in the cache: those of S, T and C, or those of the given letters and names."""
    letters = by_letter([name for name in there if isinstance(name, str)], post_norms)
    words = list(letters) if sites is None else re.split(r"[,\s]+", sites.strip()) if isinstance(sites, str) else list(sites)
    found: list[str] = []
    for word in words:
        if word in there:
            found.append(word)
            continue
        if not isinstance(word, str) or not word or not set(word) <= set(LETTERS):
            raise UnknownSite(no_such("site", str(word), there[:40]))
        for letter in word:
            if letter not in letters:
                raise UnknownSite(f"The cache has no site of {letter}. It has {', '.join(there[:40])}.")
            found += letters[letter].values()
    if not found:
        raise UnknownSite(
            f"The cache has no residual stream, attention or MLP output. Give sites=, of {', '.join(there[:40])}."
        )
    return list(dict.fromkeys(found))


def _rows(name: str, value: Any, shape: tuple[int, ...], kept: Tensor, batched: bool) -> Tensor:
    """[rows, d] of one site; more dimensions, such as heads, are laid side by side."""
    x = torch.as_tensor(value).detach()
    x = x if batched else x[None]
    if x.ndim < 3 or tuple(x.shape[:2]) != shape:
        raise BadRows(
            f"Site {name!r} has shape {list(x.shape)}, the tokens {list(shape)}. Give a site of [batch, positions, ...], and "
            f"the tokens of just these positions."
        )
    flat = x.reshape(shape[0] * shape[1], -1)
    return flat if bool(kept.all()) else flat[kept.reshape(-1).to(flat.device)]


def _named(labels: Any) -> dict[Any, Any]:
    if isinstance(labels, pd.DataFrame):
        return {name: labels[name] for name in labels.columns}
    if isinstance(labels, Mapping):
        return dict(labels)
    return {labels.name if isinstance(labels, pd.Series) and labels.name is not None else LABEL: labels}


def _spread(what: str, values: Any, kept: np.ndarray) -> np.ndarray:
    """One value per kept token, from [batch] (the same at every position) or [batch, positions]."""
    given = _grid(what, values, lines=False)
    if given.shape == kept.shape[:1]:
        given = np.repeat(given[:, None], kept.shape[1], axis=1)
    if given.shape != kept.shape:
        raise BadRows(
            f"{what!r} has shape {list(given.shape)}. Give one value per prompt {list(kept.shape[:1])}, or one per token "
            f"{list(kept.shape)}."
        )
    return given[kept]


def _of_prompts(groups: Any, kept: np.ndarray) -> np.ndarray:
    """The group of each kept token, from [batch]: tokens of one prompt are never independent."""
    given = _grid("groups", groups, lines=False)
    if given.shape != kept.shape[:1]:
        raise BadRows(
            f"The groups have shape {list(given.shape)}. Give one value per prompt {list(kept.shape[:1])}: the tokens of a "
            f"prompt are not independent."
        )
    return _spread("groups", given, kept)


def _by_tokens(ids: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[batch] str: the group of each prompt is named after its tokens, so that it is the same one in every batch and part."""
    lines = (ids[i, kept[i]].astype(np.int64).tobytes() for i in range(len(ids)))
    return np.array([blake2b(line, digest_size=8).hexdigest() for line in lines], dtype=object)


def _grid(what: str, values: Any, lines: bool = True) -> np.ndarray:
    """An array; with `lines`, of [batch, positions], also from one line."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    listed = isinstance(values, list | tuple)
    try:  # lists keep their kinds of values: None beside whole numbers would make fractions of them
        array = np.array(values, dtype=object) if listed and not lines else np.asarray(values)
    except ValueError as error:
        raise BadRows(f"The {what} have lines of different lengths ({error}). Pad them, and give a mask.") from None
    array = array[None] if lines and array.ndim == 1 else array
    if lines and (array.ndim != 2 or array.dtype.kind not in "iub"):
        raise BadRows(
            f"The {what} have shape {list(array.shape)} and type {array.dtype}. Give whole numbers [batch, positions]."
        )
    return array


def _is_batched(tokens: Any) -> bool:
    return np.ndim(tokens.cpu() if isinstance(tokens, Tensor) else tokens) > 1


def _config(cache: Any, name: str) -> Any:
    """A setting of the model that a cache belongs to; None if it is unknown."""
    return getattr(getattr(getattr(cache, "model", None), "cfg", None), name, None)
