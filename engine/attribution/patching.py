"""`attribution_patching`: the effects of all patches to first order, from two forward passes and one backward pass."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

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
_TOGETHER = 64
"""most forks that are computed together; changes no bit"""


def attribution_patching(
    engine: Core,
    clean: Prompt,
    corrupt: Prompt,
    metric: AnyMetric | Branch,
    sites: str | Sequence[str] = "STC",
    *,
    compare: bool = False,
    progress: bool = False,
) -> Attribution:
    """Estimate how the metric of `corrupt` changes if one row at a time is replaced by that of `clean`.

    The estimate is the gradient at the row, times the difference of the rows. It costs two forward passes and one backward
    pass for all sites and positions. To patch corrupt rows into the clean prompt, swap the two.

    clean, corrupt  prompts with the same number of tokens
    metric          as in `Branch.gradients`, of the last position
    sites           S, T and C, or site names
    compare         also patch every row, as forks of the corrupt prompt, for `real`, `correlation` and `worst`

    >>> from replaylens import Engine, attribution_patching
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> found = attribution_patching(engine, text.format("heads"), text.format("tails"), (" tails", " heads"), compare=True)
    >>> found.estimate.shape, found.certified, found.words[int(found.real[0].argmax())]
    (torch.Size([13, 15]), True, ' tails')
    """
    paths = paths_of(engine, clean, corrupt)
    names = differentiable(engine, sites)
    function, promised = metric_of(engine, metric)
    source = tape_of(engine, paths[0], (), names, backward=False)
    found = tape_of(engine, paths[1], (), names).gradients(function, engine.sites.aliases, promised)
    rows = {site: source.value(site) for site in names}
    moved = {site: rows[site] - found.activations[site] for site in names}
    estimate = torch.stack([row_sums(found.peek(site) * moved[site]) for site in names])
    real = None
    if flag("compare", compare):
        changed = {site: moved[site].flatten(1).any(1).tolist() for site in names}
        real = patch_effects(engine, paths[1], rows, changed, function, found.value, flag("progress", progress))
    words = words_of(engine, paths[1])
    return Attribution(found.value, source.measure(function), names, words, estimate, real, found.certified)


def patch_effects(
    engine: Core,
    path: list[int],
    rows: Mapping[str, Tensor],
    changed: Mapping[str, Sequence[bool]],
    function: LogitsFunction,
    before: float,
    progress: bool,
) -> Tensor:
    """The change of the metric, from `before`, under each patch of one row: [sites, positions].

    Every patch is a fork of the path. A row that is replaced by its own bits changes nothing, so only `changed` ones run.
    """
    last = f"blocks.{engine.config.num_layers - 1}.hook_out"
    cells = [(i, site, at) for i, site in enumerate(rows) for at, differs in enumerate(changed[site]) if differs]
    effects = torch.zeros(len(rows), len(path))
    pool = engine.runner.pool
    together = max(1, min(_TOGETHER, pool.num_pages * pool.page_size // len(path) - 1))
    root = engine.prompt(path, sites=[last], positions="last")
    try:
        for first in tqdm(range(0, len(cells), together), unit="batch", disable=not progress):
            some = cells[first : first + together]
            values = _measured(
                engine, root, [Edit.interchange(site, rows[site][at], at) for _, site, at in some], last, function
            )
            for (i, _, at), value in zip(some, values, strict=True):
                effects[i, at] = value - before
    finally:
        root.release()
    return effects


def _measured(engine: Core, root: Branch, edits: list[Edit], last: str, function: LogitsFunction) -> list[float]:
    """The metric of `root` under each edit, all computed together."""
    forks: list[Branch] = []
    try:
        for edit in edits:
            forks += root.fork(edits=[edit])
        engine.forest.compute([fork.lane for fork in forks])
        residual = torch.cat([fork.activations[last] for fork in forks])
        logits = engine.lock.alone(engine.runner.logits, residual).cpu()
        with modes.canonical(1):
            return [float(value_of(function, row)) for row in logits]
    finally:
        for fork in forks:
            fork.release()


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
