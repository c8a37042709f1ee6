"""`patch`: activation patching. Which activations, copied from one prompt into another, carry a behaviour over?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.attribution.patching import Prompts, each_pair, pairs_of
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.options import verb
from replaylens.engine.request.values import instance
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.logits import At
from replaylens.workbench.aligned import Align, Aligned, Direction, require_one_vocabulary
from replaylens.workbench.heads import HeadChoice, chosen_heads, chosen_layers
from replaylens.workbench.metric import Metric, RowMetric, words
from replaylens.workbench.patch_result import PatchResult

LayerCell = tuple[int, int]
"""layer, and position or head"""


@verb
def patch(
    engine: Core,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: RowMetric | list[RowMetric],
    sites: str = "S",
    layers: Sequence[int] | None = None,
    positions: At = None,
    heads: HeadChoice = False,
    direction: Direction = "denoise",
    align: Align = None,
    source: Core | None = None,
    progress: bool = False,
) -> PatchResult:
    """Copy activations of one prompt into the other, one cell of the grid at a time, and measure the next token.

    clean, corrupt  prompts with the same number of tokens, or with `align`; or lists of them, all with the same number of
                tokens unless heads are patched or align="end", which counts positions from the end: the result is the mean
                over pairs, with intervals in its frame
    metric      a pair of tokens (their logit difference), one token (its log-probability), a branch (the KL divergence from
                its distribution), or a function of logits [rows, vocab] that returns [rows]; of the last position. For lists of
                prompts also a list with one for each pair
    sites       letters: S (residual stream), T (attention output), C (MLP output); a grid of layers x positions each
    layers      those to patch; None: all
    positions   those to patch, in the prompt that is patched; None: all
    heads       True, head numbers or (layer, head) pairs: patch the outputs of single heads (hook_z) instead, each at all
                `positions` together; a grid of layers x heads
    direction   "denoise": clean activations into the corrupt prompt; "noise": corrupt ones into the clean prompt
    align       for prompts of different lengths, which positions correspond: (clean position, corrupt position) pairs;
                "start" or "end", counted from there; or "text:SUBSTRING", the tokens that end its occurrences
    source      another model with the same tokens and shapes, which the copied activations come from; the prompts may be equal
                then

    All cells share the prompt's KV and are computed together; each has the bits of its edit made alone.

    >>> from replaylens import Engine, patch
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = patch(engine, text.format("heads"), text.format("tails"), metric=(" tails", " heads"))
    >>> round(float(result.effect["S"][0].max()), 3)  # the residual stream that enters block 0 at the changed word
    1.0
    """
    if (pairs := pairs_of(clean, corrupt)) is not None:
        options: dict[str, Any] = dict(sites=sites, layers=layers, positions=positions, heads=heads, direction=direction)
        options |= dict(align=align, source=source, progress=progress)
        each = each_pair(lambda pair, own: patch(engine, *pair, metric=own, **options), pairs, metric)
        return PatchResult.mean(each, from_end=align == "end")
    one: Any = metric
    two, measure = Aligned.of(engine, clean, corrupt, direction, align, positions), Metric.of(engine, one)
    cells = _cells(engine, sites, layers, heads, two)
    names = {site: _names(engine, site) for site in cells}
    origin = engine if source is None else _other(engine, source, [names[site][at[0]] for site in cells for at in cells[site]])
    rows = activations(origin, two.source, [names[site][layer] for site in cells for layer in _first(cells[site])])
    edits = {site: [[_edit(names[site][at[0]], rows, at[1], two, site == "heads")] for at in cells[site]] for site in cells}
    with engine.variants(two.base) as base:
        read = lambda logits: measure(logits[:, 0])  # noqa: E731
        found = base.read([[], *(edit for each in edits.values() for edit in each)], [-1], read, progress)
    there = of_source(origin, two.source, measure, float(found[0]))
    pieces = found[1:].split([len(each) for each in edits.values()])
    grids = {site: _grid(cells[site], piece) for site, piece in zip(cells, pieces, strict=True)}
    text = words(engine, two.base)
    return PatchResult(
        measure.name,
        direction,
        float(found[0]),
        there,
        {site: values for site, (_, _, values) in grids.items()},
        {site: tuple(str(n) if site == "heads" else text[n] for n in numbers) for site, (_, numbers, _) in grids.items()},
        {site: numbers for site, (_, numbers, _) in grids.items()},
        {site: layers for site, (layers, _, _) in grids.items()},
        len(two.base),
    )


def _other(engine: Core, source: Any, names: Sequence[str]) -> Core:
    """The model that activations come from; BadRequest if its tokens or the shapes of the sites differ."""
    other = instance("source", source, Core, "an engine")
    require_one_vocabulary(engine, other)
    for name in names:
        shapes = [each.sites.sites[name].shape if name in each.sites.sites else None for each in (engine, other)]
        if shapes[0] != shapes[1]:
            raise BadRequest(
                f"{name} has rows of shape {shapes[0]}, and {shapes[1] or 'does not exist'} in the source model. Give layers "
                "and sites that both have, with the same shapes."
            )
    return other


def of_source(engine: Core, path: list[int], measure: Metric, base: float) -> float:
    """The metric of the source prompt; BadRequest if it is that of the base."""
    found = float(measure(engine.logits(path)[None]))
    if found == base:
        raise BadRequest(f"{measure.name} is {base:.4g} for both prompts: there is nothing to carry over. Give other prompts.")
    return found


def _cells(
    engine: Core, sites: str, layers: Sequence[int] | None, heads: HeadChoice, two: Aligned
) -> dict[str, list[LayerCell]]:
    """The cells of each grid."""
    count = engine.config.num_layers
    if heads is not False:
        return {"heads": chosen_heads(engine, heads, None if layers is None else chosen_layers(layers, count))}
    given = instance("sites", sites, str, "letters among S, T and C")
    letters = [letter for letter in given.replace(",", "").replace(" ", "")]
    if not letters or set(letters) - set("STC"):
        raise BadRequest(f"Invalid sites={sites!r}. Give letters among S, T and C, or heads=True.")
    found = {letter: chosen_layers(layers, len(_names(engine, letter))) for letter in dict.fromkeys(letters)}
    return {letter: [(layer, position) for layer in own for position in two.at] for letter, own in found.items()}


def _names(engine: Core, site: str) -> list[str]:
    """The sites of a letter, or of heads, in layer order."""
    if site != "heads":
        return engine.sites.per_layer(site)
    return [engine.sites.resolve(f"blocks.{layer}.attn.hook_z") for layer in range(engine.config.num_layers)]


def _first(cells: list[LayerCell]) -> list[int]:
    return sorted({layer for layer, _ in cells})


def activations(engine: Core, path: list[int], names: list[str]) -> dict[str, Tensor]:
    """The rows of some sites."""
    branch = engine.prompt(path, sites=names)
    try:
        return {name: branch.activations[name] for name in names}
    finally:
        branch.release()


def _edit(name: str, rows: dict[str, Tensor], number: int, two: Aligned, head: bool) -> Edit:
    """The patch of one cell."""
    if head:
        return Edit(name, "set", rows[name][two.there][:, [number]], positions=two.at, heads=[number])
    return Edit(name, "set", rows[name][dict(two.pairs)[number]], positions=number)


def _grid(cells: list[LayerCell], found: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """(layers, numbers, values [layers, numbers]); NaN where there is no cell."""
    layers, numbers = (tuple(sorted({cell[i] for cell in cells})) for i in (0, 1))
    values = torch.full((len(layers), len(numbers)), math.nan, dtype=torch.float32)
    for (layer, number), value in zip(cells, found.tolist(), strict=True):
        values[layers.index(layer), numbers.index(number)] = value
    return layers, numbers, values
