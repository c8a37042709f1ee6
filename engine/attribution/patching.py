"""`attribution_patching`: the effects of all patches to first order, from two forward passes and one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from replaylens.engine.attribution.effects import Attribution
from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.gradients.gradients import row_sums
from replaylens.engine.gradients.metric import AnyMetric, LogitsFunction, value_of
from replaylens.engine.model import modes
from replaylens.engine.model.text import Prompt
from replaylens.engine.pictures.readings import word
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.options import verb
from replaylens.engine.request.values import flag, integer
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.differentiable import differentiable, metric_of, tape_of
from replaylens.engine.thinking.core import ThinkingCore

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]
"""one, or a list of them"""


@verb
def attribution_patching(
    engine: Core,
    clean: Prompts,
    corrupt: Prompts,
    metric: AnyMetric | Branch | list[AnyMetric | Branch],
    sites: str | Sequence[str] | None = None,
    *,
    heads: bool = False,
    compare: bool = False,
    progress: bool = False,
) -> Attribution:
    """Estimate how the metric of `corrupt` changes if one row at a time is replaced by that of `clean`.

    The estimate is the gradient at the row, times the difference of the rows. It costs two forward passes and one backward
    pass for all sites and positions. To patch corrupt rows into the clean prompt, swap the two.

    clean, corrupt  prompts with the same number of tokens; or lists of them, all with the same number: the result is the mean
                    over pairs, with intervals in its frame
    metric          as in `Branch.gradients`, of the last position; for lists also a list with one for each pair
    sites           S, T and C, or site names; default: "STC", or attn.hook_z of every layer with `heads`
    heads           one effect for each head of sites with heads, instead of one for all of a row together
    compare         also patch every row, as forks of the corrupt prompt, for `real`, `correlation` and `worst`

    >>> from replaylens import Engine, attribution_patching
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> found = attribution_patching(engine, text.format("heads"), text.format("tails"), (" tails", " heads"), compare=True)
    >>> found.estimate.shape, found.certified, found.words[int(found.real[0].argmax())]
    (torch.Size([13, 15]), True, ' tails')
    """
    options: dict[str, Any] = dict(sites=sites, heads=flag("heads", heads), compare=compare, progress=progress)
    if (pairs := pairs_of(clean, corrupt)) is not None:
        return Attribution.mean(each_pair(lambda pair, own: _attributed(engine, *pair, own, **options), pairs, metric))
    return _attributed(engine, clean, corrupt, metric, **options)


def _attributed(
    engine: Core, clean: Any, corrupt: Any, metric: Any, *, sites: Any, heads: bool, compare: bool, progress: bool
) -> Attribution:
    """One pair of prompts."""
    paths = paths_of(engine, clean, corrupt)
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


def pairs_of(clean: Any, corrupt: Any) -> list[tuple[Any, Any]] | None:
    """The pairs of two lists of prompts; None for two single prompts. BadRequest if their numbers differ."""
    listed = [
        isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(each, str | list | tuple) for each in given)
        for given in (clean, corrupt)
    ]
    if not any(listed):
        if all(isinstance(given, list | tuple) and not given for given in (clean, corrupt)):
            raise BadRequest("No prompts: clean and corrupt are empty. Give at least one pair.")
        return None
    counts = [len(given) if many else 1 for given, many in zip((clean, corrupt), listed, strict=True)]
    if not all(listed):
        raise BadRequest("One side is a list of prompts and the other one prompt. Give two prompts, or two lists of them.")
    if counts[0] != counts[1]:
        raise BadRequest(f"Got {counts[0]} clean prompts and {counts[1]} corrupt ones. Give two lists of the same length.")
    return list(zip(clean, corrupt, strict=True))


def each_pair(run: Callable[[tuple[Any, Any], Any], T], pairs: list[tuple[Any, Any]], metric: Any) -> list[T]:
    """What `run` makes of each pair and its metric; BadRequest names the pair that is refused."""
    found = []
    for number, (pair, own) in enumerate(zip(pairs, one_for_each(metric, len(pairs), "pairs"), strict=True)):
        try:
            found.append(run(pair, own))
        except BadRequest as error:
            error.args = (f"Pair {number} of {len(pairs)}: {error}",)
            raise
    return found


def one_for_each(metric: Any, count: int, what: str) -> list[Any]:
    """A metric for each of several prompts or pairs, from one for all or from a list with one for each.

    A list of two tokens is a pair of tokens, for all. In a list, a token may be a tuple of one.
    """
    is_token = lambda value: isinstance(value, str) or integer(value) is not None  # noqa: E731
    if not isinstance(metric, list) or (len(metric) == 2 and all(map(is_token, metric))):
        return [metric] * count
    if len(metric) != count:
        raise BadRequest(f"Got {len(metric)} metrics for {count} {what}. Give one for each, or one for all.")
    return [each[0] if isinstance(each, tuple) and len(each) == 1 else each for each in metric]


def words_of(engine: Core, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)
