"""Placing edits: an `Edit` on a branch of known length becomes `PlacedEdit`s of its sites, or a BadEdit that says why not."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from replaylens import boundary
from replaylens.engine.errors import BadEdit, Caveat, InternalError, UnknownSite
from replaylens.engine.model import modes
from replaylens.engine.model.config import BARRED, MixtureConfig, ModelConfig
from replaylens.engine.model.sites import (
    BY_SLOT,
    CHOICE_SITE,
    LETTERS,
    STATE,
    WEIGHTS_SITE,
    SiteTable,
    by_layer,
    layer_of,
    numbered,
)
from replaylens.engine.request.edits import Edit, finite_float32, listed, span
from replaylens.engine.request.placed import PATTERN, PLACED_OPS, Op, PlacedEdit
from replaylens.engine.request.values import as_instance

# ---- pattern edits ---------------------------------------------------------------------------------------------------
# Placing edits of attention patterns: which edges change, and the weights that they are set to.

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
    if edit.keep_norm or edit.match_norm or edit.when is not None or (edit.value is not None and edit.op != "set"):
        raise BadEdit(f"Edits of {name} take neither keep_norm, match_norm nor when, and only 'set' takes a value.")
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


# ---- routing edits ---------------------------------------------------------------------------------------------------
# Edits of routing: experts that are forced, forbidden or reweighted become edits of the sites of their router.
#
# Forcing and forbidding change what experts are chosen by, not the logits that their weights follow from. So a forced
# expert has the weight that its own logit gives it, and the weights of a softmax over all experts stay as they are.

_MOVED = {"force": -2 * BARRED, "forbid": 2 * BARRED}
"""the scores for the choice of experts that are forced or forbidden: beyond any other score"""


def on_router(edit: Edit, name: str, table: SiteTable, where: tuple[int, int | None, tuple[int, ...]]) -> list[PlacedEdit]:
    """The op force, forbid or reweight on one router; BadEdit if it does not fit.

    The scores of forced and forbidden experts are multiplied by 0 before the new ones are added, so that of several edits of
    an expert the last one counts.
    """
    start, stop, picks = where
    layer, mixture = layer_of(name), table.config.mixture
    if mixture is None or layer is None or not table.config.sparse(layer) or ".mlp.gate." not in name:
        raise BadEdit(
            f"The op {edit.op!r} is for the router of a mixture of experts, not for {name}. Edit blocks.N.mlp.gate.hook_out "
            "of a layer that has one."
        )
    given = {"value": edit.value, "heads": edit.heads, "keys": edit.keys, "when": edit.when}
    if extra := [option for option, value in given.items() if value is not None]:
        raise BadEdit(f"The op {edit.op!r} takes no {extra[0]}. Give experts, and a factor for 'reweight'.")
    experts = _experts(edit, mixture.num_experts)
    if edit.op == "force":
        _require_places(experts, mixture)
    if edit.op == "forbid":
        _require_enough(experts, mixture)
    begin = f"blocks.{layer}."
    kept = torch.ones(mixture.num_experts, dtype=torch.float32)
    kept[experts] = edit.factor if edit.op == "reweight" else 0.0
    if edit.op == "reweight":
        return [PlacedEdit(begin + WEIGHTS_SITE, "reweight", kept, start, stop, picks, 1.0, 0)]
    value = torch.zeros(mixture.num_experts, dtype=torch.float32)
    value[experts] = _MOVED[edit.op]
    steps: tuple[tuple[Op, torch.Tensor], ...] = (("reweight", kept), ("add", value))
    return [PlacedEdit(begin + CHOICE_SITE, op, numbers, start, stop, picks, 1.0, 0) for op, numbers in steps]


def require_places(edits: Sequence[PlacedEdit], config: ModelConfig) -> None:
    """Raise BadEdit if several edits of a branch together force more experts on a position than a row goes to."""
    routers: dict[str, list[PlacedEdit]] = {}
    for edit in edits:
        if edit.site.endswith(CHOICE_SITE):
            routers.setdefault(edit.site, []).append(edit)
    for site, own in routers.items():
        if config.mixture is None or sum(_forces(edit) for edit in own) < 2:
            continue
        ends = {end for edit in own for end in (edit.start, edit.stop) if end is not None}
        ends |= {end for edit in own for pick in edit.picks for end in (pick, pick + 1)}
        tokens = sorted({token for edit in own for token in edit.tokens})
        for position, token in product(sorted(ends), [-1, *tokens]):  # -1: any other token
            experts = _forced([edit for edit in own if edit.edited(position, [token])])
            try:
                _require_places(experts, config.mixture)
            except BadEdit as error:
                at = f"{site.removesuffix('.' + CHOICE_SITE)}, position {position}"
                raise BadEdit(f"The edits together force the experts {experts} at {at}: {error}") from None


def _forces(edit: PlacedEdit) -> bool:
    return edit.op == "add" and edit.value is not None and bool((edit.value == _MOVED["force"]).any())


def _forced(edits: Sequence[PlacedEdit]) -> list[int]:
    """The experts that edits of one position leave forced. Of several edits of an expert, the last one counts."""
    forced: set[int] = set()
    for edit in edits:
        if edit.value is None:
            continue
        if edit.op == "reweight":
            forced -= set((edit.value == 0).nonzero().flatten().tolist())
        elif edit.op == "add":
            forced |= set((edit.value == _MOVED["force"]).nonzero().flatten().tolist())
    return sorted(forced)


def _require_places(experts: list[int], mixture: MixtureConfig) -> None:
    """Raise BadEdit if a row cannot go to all of these experts."""
    top, chosen_groups = mixture.routing.top, mixture.routing.chosen_groups
    if len(experts) > top:
        raise BadEdit(f"{len(experts)} experts are forced, but a row goes to {top}. Force at most {top}.")
    groups = {expert // (mixture.num_experts // mixture.routing.groups) for expert in experts}
    if len(groups) > chosen_groups:
        raise BadEdit(
            f"The forced experts {experts} are in {len(groups)} groups, but a row goes to {chosen_groups}. "
            "Force those of fewer groups."
        )


def _require_enough(experts: list[int], mixture: MixtureConfig) -> None:
    """Raise BadEdit if a row may have to go to one of these experts.

    Groups without other experts are chosen last, so the fewest are left where the smallest of the others are chosen.
    """
    routing, width = mixture.routing, mixture.num_experts // mixture.routing.groups
    if mixture.num_experts - len(experts) < routing.top:
        raise BadEdit(
            f"{len(experts)} of {mixture.num_experts} experts are forbidden, but a row goes to {routing.top}. Forbid fewer."
        )
    left = [width - sum(expert // width == group for expert in experts) for group in range(routing.groups)]
    fewest = sum(sorted(count for count in left if count)[: routing.chosen_groups])
    if fewest < routing.top:
        raise BadEdit(
            f"Without the experts {experts}, the chosen groups of a row ({routing.chosen_groups} of {routing.groups}) may "
            f"leave {fewest} of the {routing.top} experts that a row goes to. Forbid fewer, or all experts of a group."
        )


def _experts(edit: Edit, count: int) -> list[int]:
    experts = list(edit.experts or ())
    if not experts or len(set(experts)) < len(experts):
        raise BadEdit(f"The op {edit.op!r} needs experts, each only once. Given: {experts}.")
    if bad := [expert for expert in experts if not 0 <= expert < count]:
        raise BadEdit(f"No expert {bad[0]}. The router has experts 0 to {count - 1}.")
    return experts


# ---- placing ---------------------------------------------------------------------------------------------------------

_ROUTING = ("force", "forbid", "reweight")
_NOT_EDITABLE = ("ln_final.hook_out", "unembed.hook_out")


def place_all(edits: Iterable[Edit], table: SiteTable, length: int) -> tuple[PlacedEdit, ...]:
    """Several edits on a branch of `length` tokens, in their order."""
    placed = tuple(placed for edit in listed(edits) for placed in place(edit, table, length))
    require_places(placed, table.config)
    return placed


def place(edit: Edit, table: SiteTable, length: int, later: bool = False) -> list[PlacedEdit]:
    """Resolve an edit on a branch of `length` tokens into placed edits of its sites; BadEdit if it does not fit.

    later  numbers may name positions that the branch does not have yet
    """
    edit = as_instance("edits", edit, Edit, "a list of Edits", BadEdit).plain()
    start, stop, picks = span(edit.positions, length)
    edit = replace(edit, value=_in_order(edit, length))
    if picks and picks[0] >= length and not later:
        raise BadEdit(
            f"positions={edit.positions} changes nothing: the branch has {length} tokens, at positions 0 to {length - 1}. "
            f"To edit tokens that are still to come, give a slice, such as slice({picks[0]}, {picks[-1] + 1})."
        )
    placed = []
    for name in _names(edit, table):
        if name.endswith(_NOT_EDITABLE):
            raise BadEdit(f"{name} can be captured but not edited. Edit the residual stream (hook_in, hook_out) instead.")
        if name.endswith(STATE) and edit.tokens is not None:
            raise BadEdit(f"Edits of {name} take no tokens: later passes make the state again from positions. Give positions.")
        shape = table.sites[name].shape
        heads = () if edit.op in _ROUTING else _heads(edit, name, shape)
        if edit.op in _ROUTING:
            steps = on_router(edit, name, table, (start, stop, picks))
        elif name.endswith(PATTERN):
            window = table.config.window(layer_of(name) or 0)
            steps = [on_pattern(edit, name, shape[0], window, heads, (start, stop, picks), length)]
        else:
            steps = [_on_rows(edit, name, shape, heads, (start, stop, picks))]
        placed += [replace(made, tokens=_tokens(edit, made, len(shape))).keyed() for made in steps]
    return placed


def warn_of_no_match(edits: Sequence[tuple[PlacedEdit, ...]], paths: Sequence[Sequence[int]]) -> None:
    """Caveat for edits of tokens that no path holds where they apply.

    edits  of each path: the same ones, placed on it
    """
    for same in zip(*edits, strict=True):
        if same[0].tokens and not any(edit.edited(0, path) for edit, path in zip(same, paths, strict=True)):
            texts = "the text" if len(paths) == 1 else f"{len(paths)} texts"
            boundary.warn(
                f"The edit of {same[0].site} is for tokens {[*same[0].tokens]}, and no edited position of {texts} holds one, "
                "so it changes nothing there. Mind the leading space of words.",
                Caveat,
            )
            return  # once, not for every layer


def require_fit(edit: PlacedEdit, table: SiteTable) -> PlacedEdit:
    """A placed edit that came from elsewhere, for this model; BadEdit if the model has no such place or shape."""
    table.editable(edit.site)
    shape = table.sites[table.resolve(edit.site)].shape
    numbers = [edit.start, *([] if edit.stop is None else [edit.stop]), *edit.picks, *edit.keys, *edit.heads, *edit.tokens]
    if edit.op not in PLACED_OPS or any(type(number) is not int or number < 0 for number in numbers):
        raise BadEdit(f"An edit of {edit.site} has an unknown op or a position below 0. The file it comes from is damaged.")
    if bad := [head for head in edit.heads if head >= shape[0]]:
        raise BadEdit(
            f"An edit of {edit.site} names head {bad[0]}; this model has {shape[0]}. Replay on the model it was made with."
        )
    shape = (shape[0], len(edit.keys)) if edit.on_pattern else shape
    tensors = [x for x in (edit.value, edit.when) if x is not None]
    if any(tuple(x.shape[x.dim() - len(shape) :]) != shape for x in tensors):
        raise BadEdit(
            f"An edit of {edit.site} is for rows of another shape than {shape}. Replay on the model it was made with."
        )
    return edit


def _on_rows(
    edit: Edit, name: str, shape: tuple[int, ...], heads: tuple[int, ...], where: tuple[int, int | None, tuple[int, ...]]
) -> PlacedEdit:
    start, stop, picks = where
    if edit.op == "mask" or edit.keys is not None:
        raise BadEdit(f"The op 'mask' and keys are for attention patterns, not for {name}. Edit blocks.N.{PATTERN}.")
    when = None if edit.when is None else edit.when.to("cpu", torch.float32).clone()
    if when is not None and (tuple(when.shape) != shape or len(shape) != 1 or not bool(when.isfinite().all())):
        raise BadEdit(f"when for {name} has shape {tuple(when.shape)}. Give one finite direction, for a site with vectors.")
    value, op = edit.value, edit.op
    if op == "scale":
        value, op = _factors(edit, name, shape), "reweight"
    if heads and op == "zero" and value is None:
        value, op = torch.zeros(shape, dtype=torch.float32), "set"  # so that a GPU has a vector to take the heads from
    if heads and value is not None and op != "reweight":
        value = _of_heads(value, name, shape, list(edit.heads or ()))
    count = len(picks) or (stop - start if stop is not None else None)
    value = _check_value(op, value, name, shape, count)
    if edit.match_norm and value is not None and not bool(_edited_lengths(value, heads).all()):
        raise BadEdit(f"The value for {name} is zero, which no factor scales to the length of a row. Leave match_norm out.")
    more = dict(heads=heads, keep_norm=edit.keep_norm, when=when, match_norm=edit.match_norm, above=edit.above)
    factor = 1.0 if op == "reweight" else edit.factor  # it is in the value
    return PlacedEdit(name, op, value, start, stop, picks, factor, edit.seed, **more)  # type: ignore[arg-type]


def _edited_lengths(value: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The lengths of the vectors of a value, of edited heads only."""
    found = torch.linalg.vector_norm(value.double(), dim=-1)
    return found[..., list(heads)] if heads else found


def _factors(edit: Edit, name: str, shape: tuple[int, ...]) -> Tensor:
    """What the op 'scale' multiplies a row by."""
    if edit.value is not None:
        raise BadEdit(f"The op 'scale' of {name} takes no value. Give what to multiply by as factor, such as factor=0.5.")
    return torch.full(shape, edit.factor, dtype=torch.float32)


def _names(edit: Edit, table: SiteTable) -> list[str]:
    if edit.site not in ("S", "T", "C"):
        if "*" in edit.site:
            return _matching(edit, table)
        if edit.site == "Z":
            raise BadEdit(
                "Z, the logit lens, is computed outside the pass, so editing it would change nothing. Edit what it reads: "
                "the residual stream, S, or its directions, such as Edit('S', 'project_out', vector)."
            )
        if edit.site and set(edit.site) <= set(LETTERS):
            raise BadEdit(f"An edit is at one site, and {edit.site!r} names several. Give one Edit for each of its letters.")
        if edit.layers is not None:
            raise BadEdit(
                f"layers was given, but {edit.site!r} is not S, T or C. Give one of these letters, a pattern such as "
                "blocks.*.hook_out, or no layers."
            )
        return [table.editable(edit.site)]
    names = by_layer(table.per_layer(edit.site))
    layers = names if edit.layers is None else edit.layers
    if bad := [layer for layer in layers if layer not in names]:
        raise BadEdit(f"No layer {bad[0]}. {edit.site} has layers {numbered(names)}.")
    return [names[layer] for layer in layers]


def _matching(edit: Edit, table: SiteTable) -> list[str]:
    """The sites whose name or legacy name matches a pattern, in the order of a pass. A star stands for one part of a name."""
    found = {table.editable(name) for name in table.matching(edit.site)}
    if edit.layers is not None:
        there = {layer_of(name) for name in found}
        if unknown := [layer for layer in edit.layers if layer not in there]:
            raise BadEdit(
                f"No site that matches {edit.site!r} is at layer {unknown[0]}. Layers count from 0, never from the end."
            )
        found = {name for name in found if layer_of(name) in edit.layers}
    if not found:
        raise UnknownSite(f"No site matches {edit.site!r} at layers {list(edit.layers or ())}. engine.sites lists the sites.")
    return [name for name in table.in_order() if name in found]


def _in_order(edit: Edit, length: int) -> Tensor | None:
    """The value with its rows, one for each of several positions, in the order of the positions."""
    value, given = edit.value, edit.positions
    if value is None or isinstance(given, slice) or not isinstance(given, Sequence) or edit.op not in ("add", "set"):
        return value
    places = [p + length if p < 0 else p for p in given]
    if value.dim() < 2 or len(value) != len(places) or places == sorted(set(places)):
        return value
    if len(set(places)) < len(places):
        raise BadEdit(f"positions={list(given)} names a position twice, with a row for each. Give each position once.")
    return value[sorted(range(len(places)), key=places.__getitem__)]


def _tokens(edit: Edit, made: PlacedEdit, dimensions: int) -> tuple[int, ...]:
    """The token ids that an edit is for, in order; empty: all."""
    if edit.tokens is None:
        return ()
    ids = [token for token in edit.tokens if isinstance(token, int)]  # type: ignore[union-attr]
    if len(ids) < len(edit.tokens):  # type: ignore[arg-type]
        raise InternalError("The tokens of an edit are still text. `Engine.placed` turns them into ids.")
    if made.op in ("add", "set") and made.value is not None and made.value.dim() > dimensions:
        raise BadEdit(
            f"tokens was given with a value that has one row per position of {made.site}. Give one row for all positions."
        )
    return tuple(sorted(set(ids)))


def _heads(edit: Edit, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The edited heads, in order; empty: all."""
    if edit.heads is None:
        return ()
    if (len(shape) != 2 and not name.endswith(STATE)) or name.endswith(BY_SLOT):
        raise BadEdit(f"heads was given, but {name} has no heads. Edit attn.hook_z, hook_q, hook_k or hook_v instead.")
    if not edit.heads or len(set(edit.heads)) < len(edit.heads):
        raise BadEdit(f"Invalid heads={list(edit.heads)}. Give at least one, and each only once.")
    if bad := [head for head in edit.heads if not 0 <= head < shape[0]]:
        raise BadEdit(f"No head {bad[0]}. {name} has heads 0 to {shape[0] - 1}.")
    return tuple(sorted(edit.heads))


def _of_heads(value: Tensor, name: str, shape: tuple[int, ...], heads: list[int]) -> Tensor:
    """A value of some heads, or of all, as one of all heads with zeros for the others: [..., heads, d_head], or of states."""
    value, first, chosen = value.to("cpu", torch.float32), -len(shape), torch.tensor(heads)
    if tuple(value.shape[first:]) == shape:
        value = value.index_select(first, chosen)
    if tuple(value.shape[first:]) != (wanted := (len(heads), *shape[1:])):
        raise BadEdit(
            f"The value for {name} has shape {tuple(value.shape)}; it must end with {wanted} for the edited heads, or with "
            f"{shape} for all."
        )
    return value.new_zeros(*value.shape[:first], *shape).index_copy(first, chosen, value)


def _check_value(op: str, value: Tensor | None, name: str, shape: tuple[int, ...], count: int | None) -> Tensor | None:
    if op == "zero":
        if value is not None:
            raise BadEdit("The op 'zero' takes no value.")
        return None
    if value is None:
        raise BadEdit(f"The op {op!r} needs a value.")
    value = finite_float32(value, name)
    if op == "project_out" and len(shape) != 1:
        raise BadEdit(
            f"project_out is for sites with one vector per row; those of {name} have shape {shape}. Edit such a site."
        )
    if op in ("project_out", "resample"):
        fits = value.shape[-1:] == shape if op == "project_out" else value.dim() and tuple(value.shape[1:]) == shape
        if not fits or not value.numel():
            number = "directions" if op == "project_out" else "rows"
            wanted = f"({', '.join(map(str, (number, *shape)))})"
            raise BadEdit(f"The value for {name} has shape {tuple(value.shape)}; expected {wanted}, at least one of them.")
        return _orthonormal(value.reshape(-1, *shape)) if op == "project_out" else value
    several = (count, *shape) if count else shape
    if tuple(value.shape) not in (shape, several):
        if count is None and tuple(value.shape[1:]) == shape:
            raise BadEdit(
                f"The value for {name} has shape {tuple(value.shape)}, one row per position, but no positions were given. "
                f"Give positions, such as range({len(value)}), or one row for all."
            )
        wanted = " or ".join(str(each) for each in dict.fromkeys([shape, several]))
        raise BadEdit(f"The value for {name} has shape {tuple(value.shape)}; expected {wanted}.")
    return value


def _orthonormal(directions: Tensor) -> Tensor:
    """Directions [n, d] of length 1, each without its part along earlier ones."""
    found: list[np.ndarray] = []
    with modes.arithmetic():
        largest = max(math.sqrt(math.fsum(row * row)) for row in directions.double().numpy())
        for row in directions.double().numpy():  # Gram and Schmidt, by sums that are exact: the same on every machine
            for earlier in (*found, *found):
                row = row - math.fsum(row * earlier) * earlier
            length = math.sqrt(math.fsum(row * row))
            if length <= 1e-8 * largest:
                raise BadEdit("The directions to project out are zero or linearly dependent. Give independent ones.")
            found.append(row / length)
    return torch.from_numpy(np.stack(found)).float()
