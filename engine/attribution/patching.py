"""`attribution_patching`: the effects of all patches to first order, from two forward passes and one backward pass."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.attribution.effects import Attribution
from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.gradients.gradients import row_sums
from replaylens.engine.gradients.metric import AnyMetric, LogitsFunction, value_of
from replaylens.engine.model import modes
from replaylens.engine.pictures.readings import word
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import flag
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.differentiable import differentiable, metric_of, tape_of
from replaylens.engine.thinking.core import ThinkingCore

Prompt = str | Sequence[int]


def attribution_patching(
    engine: Core,
    clean: Prompt,
    corrupt: Prompt,
    metric: AnyMetric | Branch,
    sites: str | Sequence[str] | None = None,
    *,
    heads: bool = False,
    compare: bool = False,
    progress: bool = False,
) -> Attribution:
    """Estimate how the metric of `corrupt` changes if one row at a time is replaced by that of `clean`.

    The estimate is the gradient at the row, times the difference of the rows. It costs two forward passes and one backward
    pass for all sites and positions. To patch corrupt rows into the clean prompt, swap the two.

    clean, corrupt  prompts with the same number of tokens
    metric          as in `Branch.gradients`, of the last position
    sites           S, T and C, or site names; default: "STC", or attn.hook_z of every layer with `heads`
    heads           one effect for each head of sites with heads, instead of one for all of a row together
    compare         also patch every row, as forks of the corrupt prompt, for `real`, `correlation` and `worst`

    >>> from replaylens import Engine, attribution_patching
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> found = attribution_patching(engine, text.format("heads"), text.format("tails"), (" tails", " heads"), compare=True)
    >>> found.estimate.shape, found.certified, found.words[int(found.real[0].argmax())]
    (torch.Size([13, 15]), True, ' tails')
    """
    paths, heads = paths_of(engine, clean, corrupt), flag("heads", heads)
    names = _sites(engine, sites, heads)
    function, promised = metric_of(engine, metric)
    source = tape_of(engine, paths[0], (), names, backward=False)
    found = tape_of(engine, paths[1], (), names).gradients(function, engine.sites.aliases, promised)
    rows = {site: source.value(site) for site in names}
    moved = {site: rows[site] - found.activations[site] for site in names}
    estimate = torch.stack([_sums(found.peek(site) * moved[site], heads) for site in names])
    real = None
    if flag("compare", compare):
        changed = {site: (moved[site] if heads else moved[site].flatten(1)).any(-1) for site in names}
        real = patch_effects(engine, paths[1], rows, changed, function, found.value, flag("progress", progress))
    words = words_of(engine, paths[1])
    return Attribution(found.value, source.measure(function), names, words, estimate, real, found.certified)


def _sites(engine: Core, sites: str | Sequence[str] | None, heads: bool) -> tuple[str, ...]:
    """The names of the sites; BadRequest if effects of heads are asked for and they have none, or not equally many."""
    if sites is None:
        sites = [f"blocks.{layer}.attn.hook_z" for layer in range(engine.config.num_layers)] if heads else "STC"
    names = differentiable(engine, sites)
    shapes = {engine.sites.sites[name].shape for name in names}
    if heads and (len(shapes) > 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes))):
        raise BadRequest(
            "heads=True was given for sites without heads, or with different ones. Give e.g. 'blocks.0.attn.hook_z'."
        )
    return names


def _sums(x: Tensor, heads: bool) -> Tensor:
    """[rows, ...] -> [rows]; with heads, [rows, heads, width] -> [rows, heads]"""
    return row_sums(x.flatten(0, 1)).view(x.shape[:2]) if heads else row_sums(x)


def patch_effects(
    engine: Core,
    path: list[int],
    rows: Mapping[str, Tensor],
    changed: Mapping[str, Tensor],
    function: LogitsFunction,
    before: float,
    progress: bool,
) -> Tensor:
    """The change of the metric, from `before`, under each patch of one row, or of one head of a row.

    changed  site -> bool [positions], or [positions, heads]. What is replaced by its own bits changes nothing, so only what
             changed is computed, as forks of the path
    -> [sites, positions], or [sites, positions, heads]
    """
    cells = [(i, site, at) for i, site in enumerate(rows) for at in changed[site].nonzero().tolist()]
    effects = torch.zeros(len(rows), *next(iter(changed.values())).shape, dtype=torch.float32)
    with engine.variants(path) as base:
        edits = [[_patch(site, rows[site], *at)] for _, site, at in cells]
        values = base.read(edits, [-1], partial(_measured, function), progress).tolist() if edits else []
    for (i, _, at), value in zip(cells, values, strict=True):
        effects[(i, *at)] = value - before
    return effects


def _patch(site: str, rows: Tensor, at: int, head: int | None = None) -> Edit:
    if head is None:
        return Edit.interchange(site, rows[at], at)
    return Edit(site, "set", rows[at][[head]], at, heads=[head])


def _measured(function: LogitsFunction, logits: Tensor) -> Tensor:
    """The metric of each of several rows [rows, 1, vocab]: [rows], in double precision."""
    with modes.canonical(1):
        return torch.tensor([float(value_of(function, row)) for row in logits[:, 0]], dtype=torch.float64)


def paths_of(engine: Core, *prompts: Prompt) -> list[list[int]]:
    """The tokens of prompts of one length; BadRequest if they differ, NoGradient if the model thinks."""
    if isinstance(engine, ThinkingCore):
        raise NoGradient("No gradient flows through thoughts. Use a plain model.")
    paths = [engine.tokens_of(prompt) for prompt in prompts]
    if len({len(path) for path in paths}) > 1:
        counts = " and ".join(str(len(path)) for path in paths)
        raise BadRequest(f"The prompts have {counts} tokens. Rows are exchanged position by position: give equal lengths.")
    return paths


def words_of(engine: Core, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)
