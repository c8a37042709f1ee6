"""Placing edits: an `Edit` on a branch of known length becomes `PlacedEdit`s of its sites, or a BadEdit that says why not."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, EngineBug, NothingEdited, UnknownSite
from replaylens.engine.model import modes
from replaylens.engine.model.site_names import BY_SLOT
from replaylens.engine.model.sites import LETTERS, SiteTable, layer_of
from replaylens.engine.request.edits import Edit, finite_float32, listed, span
from replaylens.engine.request.pattern_edits import on_pattern
from replaylens.engine.request.placed import PATTERN, PLACED_OPS, PlacedEdit
from replaylens.engine.request.routing_edits import on_router, require_places
from replaylens.engine.request.values import instance

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
    edit = instance("edits", edit, Edit, "a list of Edits", BadEdit).plain()
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
    """NothingEdited for edits of tokens that no path holds where they apply.

    edits  of each path: the same ones, placed on it
    """
    for same in zip(*edits, strict=True):
        if same[0].tokens and not any(edit.edited(0, path) for edit, path in zip(same, paths, strict=True)):
            texts = "the text" if len(paths) == 1 else f"{len(paths)} texts"
            warnings.warn(
                f"The edit of {same[0].site} is for tokens {[*same[0].tokens]}, and no edited position of {texts} holds one, "
                "so it changes nothing there. Mind the leading space of words.",
                NothingEdited,
                stacklevel=3,
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
    more = dict(heads=heads, keep_norm=edit.keep_norm, when=when)
    factor = 1.0 if op == "reweight" else edit.factor  # it is in the value
    return PlacedEdit(name, op, value, start, stop, picks, factor, edit.seed, **more)  # type: ignore[arg-type]


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
                "Z, the logit lens, is computed beside the pass, so that editing it would change nothing. Edit what it reads: "
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
    names = table.per_layer(edit.site)
    layers = range(len(names)) if edit.layers is None else edit.layers
    if bad := [layer for layer in layers if not 0 <= layer < len(names)]:
        raise BadEdit(f"No layer {bad[0]}. {edit.site} has layers 0 to {len(names) - 1}.")
    return [names[layer] for layer in layers]


def _matching(edit: Edit, table: SiteTable) -> list[str]:
    """The sites whose name or legacy name matches a pattern, in the order of a pass. A star stands for one part of a name."""
    pattern = re.compile(re.escape(edit.site).replace(r"\*", "[^.]*"))
    found = {table.editable(name) for name in (*table.sites, *table.aliases) if pattern.fullmatch(name)}
    if edit.layers is not None:
        there = {layer_of(name) for name in found}
        if unknown := [layer for layer in edit.layers if layer not in there]:
            raise BadEdit(
                f"No site that matches {edit.site!r} is at layer {unknown[0]}. Layers count from 0, never from the end."
            )
        found = {name for name in found if layer_of(name) in edit.layers}
    if not found:
        at = "" if edit.layers is None else f" at layers {list(edit.layers)}"
        raise UnknownSite(f"No site matches {edit.site!r}{at}. engine.sites lists the sites.")
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
        raise EngineBug("The tokens of an edit are still text. `Core.placed` turns them into ids.")
    if made.op in ("add", "set") and made.value is not None and made.value.dim() > dimensions:
        raise BadEdit(
            f"tokens was given with a value that has one row per position of {made.site}. Give one row for all positions."
        )
    return tuple(sorted(set(ids)))


def _heads(edit: Edit, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The edited heads, in order; empty: all."""
    if edit.heads is None:
        return ()
    if len(shape) != 2 or name.endswith(BY_SLOT):
        raise BadEdit(f"heads was given, but {name} has no heads. Edit attn.hook_z, hook_q, hook_k or hook_v instead.")
    if not edit.heads or len(set(edit.heads)) < len(edit.heads):
        raise BadEdit(f"Invalid heads={list(edit.heads)}. Give at least one, and each only once.")
    if bad := [head for head in edit.heads if not 0 <= head < shape[0]]:
        raise BadEdit(f"No head {bad[0]}. {name} has heads 0 to {shape[0] - 1}.")
    return tuple(sorted(edit.heads))


def _of_heads(value: Tensor, name: str, shape: tuple[int, ...], heads: list[int]) -> Tensor:
    """A value of some heads, or of all, as one of all heads with zeros for the others: [..., heads, d_head]."""
    value = value.to("cpu", torch.float32)
    if tuple(value.shape[-2:]) == shape:
        value = value[..., heads, :]
    if tuple(value.shape[-2:]) != (len(heads), shape[1]):
        raise BadEdit(
            f"The value for {name} has shape {tuple(value.shape)}; it must end with {(len(heads), shape[1])} for the edited "
            f"heads, or with {shape} for all."
        )
    full = value.new_zeros(*value.shape[:-2], *shape)
    full[..., heads, :] = value
    return full


def _check_value(op: str, value: Tensor | None, name: str, shape: tuple[int, ...], count: int | None) -> Tensor | None:
    if op == "zero":
        if value is not None:
            raise BadEdit("The op 'zero' takes no value.")
        return None
    if value is None:
        raise BadEdit(f"The op {op!r} needs a value.")
    value = finite_float32(value, name)
    if op == "project_out":
        return _orthonormal(value.reshape(-1, *shape) if value.shape[-1:] == shape[-1:] else value, shape)
    if op == "resample" and not len(value):
        raise BadEdit(f"The value for {name} has no rows to draw from.")
    several = (len(value), *shape) if op == "resample" else (count, *shape) if count else shape
    if tuple(value.shape) not in ((several,) if op == "resample" else (shape, several)):
        if count is None and tuple(value.shape[1:]) == shape:
            raise BadEdit(
                f"The value for {name} has shape {tuple(value.shape)}, one row per position, but no positions were given. "
                f"Give positions, such as range({len(value)}), or one row for all."
            )
        wanted = " or ".join(str(each) for each in dict.fromkeys([shape, several]))
        raise BadEdit(f"The value for {name} has shape {tuple(value.shape)}; expected {wanted}.")
    return value


def _orthonormal(directions: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 1 or directions.dim() != 2:
        raise BadEdit(f"project_out needs a site with vectors; its rows have shape {shape}.")
    with modes.canonical():
        q, r = torch.linalg.qr(directions.double().T)
    too_many = len(directions) > shape[0]  # QR would drop the rest
    if too_many or bool((r.diagonal().abs() <= 1e-8 * r.abs().max()).any()):
        raise BadEdit("The directions to project out are zero or linearly dependent. Give independent ones.")
    return q.T.float().contiguous()
