"""Placing edits of attention patterns: which edges change, and the weights that they are set to."""

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.request.edits import Edit, finite_float32, span
from replaylens.engine.request.placed import PlacedEdit

_MAX_KEYS = 1 << 20
PlacedSpan = tuple[int, int | None, tuple[int, ...]]
"""start, stop, single positions instead"""


def on_pattern(
    edit: Edit, name: str, num_heads: int, window: int, heads: tuple[int, ...], where: PlacedSpan, length: int
) -> PlacedEdit:
    """The placed edit of an attention pattern; BadEdit if it changes no edge.

    window  how many keys a position sees, its own included; 0: all
    """
    if edit.op not in ("mask", "zero", "set") or (edit.keys is None and edit.op != "set"):
        raise BadEdit(
            f"{name} takes the ops 'mask' (hide keys from the softmax), 'zero' (zero weights after it), both with keys, and "
            "'set', with a value: Edit(site, 'mask', positions=queries, keys=keys, heads=heads)."
        )
    if edit.keep_norm or edit.when is not None or (edit.value is not None and edit.op != "set"):
        raise BadEdit(f"Edits of {name} take neither keep_norm nor when, and only 'set' takes a value.")
    start, stop, picks = where
    value = _weights(edit, name) if edit.op == "set" else None
    keys = tuple(range(value.shape[-1])) if value is not None and edit.keys is None else _keys(edit, length)
    if picks and not any(_sees(query, key, window) for query in picks for key in keys):
        raise BadEdit(
            f"keys={edit.keys} changes nothing: they come after the edited positions, or before their sliding window, and are "
            "not attended to."
        )
    query = picks[0] if picks else start
    if edit.op == "mask" and set(range(query + 1)) <= set(keys):
        raise BadEdit(f"keys={edit.keys} hides every key from position {query}. Leave at least one, or use the op 'zero'.")
    if value is not None:
        count = len(picks) or (None if stop is None else stop - start)
        value = _placed_weights(value, name, num_heads, list(edit.heads or ()), len(keys), count)
        places = list(picks) or ([] if stop is None else list(range(start, stop)))
        if edit.keys is None:
            _require_seen(name, value, places, window)
    return PlacedEdit(name, edit.op, value, start, stop, picks, 1.0, edit.seed, heads=heads, keys=keys)


def _keys(edit: Edit, length: int) -> tuple[int, ...]:
    """The positions of the keys, in the order of the value's columns."""
    first, stop, some = span(edit.keys, length)
    if not some and stop is None:
        raise BadEdit(f"keys={edit.keys} has no end. Name the keys, such as slice({first}, {max(length, first + 1)}).")
    if not some and stop is not None and stop - first > _MAX_KEYS:
        raise BadEdit(f"keys={edit.keys} names over {_MAX_KEYS} keys. Give a shorter range.")
    if edit.op != "set" or not isinstance(edit.keys, list):
        return some or tuple(range(first, stop or first))
    places = [key + length if key < 0 else key for key in edit.keys]
    if len(set(places)) < len(places):
        raise BadEdit(f"keys={edit.keys} names a key twice, with a weight for each. Give each key once.")
    return tuple(places)


def _weights(edit: Edit, name: str) -> Tensor:
    if edit.value is None:
        raise BadEdit(f"The op 'set' needs a value: the attention weights of {name}.")
    value = finite_float32(edit.value, name)
    if value.dim() == 0 and edit.keys is not None:
        value = value[None]
    if not 1 <= value.dim() <= 3 or not value.numel():
        raise BadEdit(
            f"The value for {name} has shape {tuple(value.shape)}. Give [keys], [heads, keys] or [positions, heads, keys]."
        )
    return value


def _placed_weights(value: Tensor, name: str, num_heads: int, heads: list[int], num_keys: int, count: int | None) -> Tensor:
    """The weights as [all heads, keys], or [positions, all heads, keys], with zeros for heads that are not edited."""
    given = tuple(value.shape)
    chosen = heads or list(range(num_heads))
    if value.shape[-1] == 1 and num_keys > 1:
        value = value.expand(*value.shape[:-1], num_keys)
    if value.dim() == 1:
        value = value.expand(len(chosen), num_keys) if value.shape[-1] == num_keys else value[None]
    if heads and value.shape[-2] == num_heads:
        value = value[..., heads, :]
    wanted = (len(chosen), num_keys)
    if tuple(value.shape[-2:]) != wanted or (value.dim() == 3 and len(value) != count):
        forms = [(num_keys,), wanted, *([(count, *wanted)] if count else [])]
        hint = "" if count else " For a row per position, give positions, such as range(4)."
        raise BadEdit(f"The value for {name} has shape {given}; expected {' or '.join(map(str, forms))}.{hint}")
    full = value.new_zeros(*value.shape[:-2], num_heads, num_keys)
    full[..., chosen, :] = value
    return full


def _sees(query: int, key: int, window: int) -> bool:
    return key <= query and (not window or key > query - window)


def _require_seen(name: str, value: Tensor, places: list[int], window: int) -> None:
    """BadEdit if whole rows [(positions,) heads, keys] are too short, or give weight to keys that their position lacks."""
    count = value.shape[-1]
    if not places or max(places) >= count:
        seen = f"position {max(places)} sees {max(places) + 1}" if places else "later positions see more"
        raise BadEdit(
            f"The value for {name} has {count} keys; {seen}. Give rows that are as long as what the edited positions see, or "
            "name the keys."
        )
    unseen = torch.tensor([[not _sees(query, key, window) for key in range(count)] for query in places])
    rows = value if value.dim() == 3 else value.expand(len(places), *value.shape)
    if bool((rows.transpose(1, 2)[unseen] != 0).any()):
        raise BadEdit(
            f"The value for {name} gives weight to keys that come after their position, or before its sliding window. Set them "
            "to 0."
        )
