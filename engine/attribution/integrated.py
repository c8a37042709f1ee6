"""`integrated_gradients`: effects of rows from gradients along the way from a baseline to a prompt."""

from __future__ import annotations

import torch

from replaylens.engine.attribution.effects import Attribution
from replaylens.engine.attribution.patching import patch_effects, paths_of, words_of
from replaylens.engine.errors import BadRequest
from replaylens.engine.gradients.gradients import row_sums
from replaylens.engine.gradients.metric import AnyMetric
from replaylens.engine.gradients.tape import Tape
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.options import verb
from replaylens.engine.request.placing import place_all
from replaylens.engine.request.values import flag, whole
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.differentiable import differentiable, metric_of, tape_of


@verb
def integrated_gradients(
    engine: Core,
    text: Prompt,
    baseline: Prompt | None,
    metric: AnyMetric | Branch,
    site: str = "embed.hook_out",
    *,
    steps: int = 16,
    compare: bool = False,
) -> Attribution:
    """Attribute the difference of the metric between a prompt and a baseline to the rows of one site.

    All rows of the site move together on a straight line from the baseline's to the prompt's. The attribution of a row is its
    move times its gradient, averaged over `steps` points of the line (the midpoint rule). At a site that everything
    passes, such as the embedding or S of a layer, the attributions add up to `after - before`, up to the error of the rule,
    which is `gap`. From rows of zeros, `before` is the metric of the prompt with these rows set to zero.

    text      a prompt; its metric is `after`
    baseline  a prompt with as many tokens, whose metric is `before`; None: rows of zeros
    metric    as in `Branch.gradients`, of the last position
    steps     forward and backward passes
    compare   also replace every row of the baseline alone, for `real`. Needs a prompt as the baseline
    """
    steps, compare = whole("steps", steps, 1), flag("compare", compare)
    if compare and baseline is None:
        raise BadRequest("compare=True patches rows into the baseline prompt, but there is none. Give one.")
    path, base = paths_of(engine, text, text if baseline is None else baseline)
    names = differentiable(engine, [site])
    if len(names) != 1:
        raise BadRequest(f"Invalid site={site!r}. Give the name of one site, e.g. 'embed.hook_out' or 'blocks.0.hook_in'.")
    (name,) = names
    function, promised = metric_of(engine, metric)
    end = tape_of(engine, path, (), names, backward=False)
    start = end if baseline is None else tape_of(engine, base, (), names, backward=False)
    there = end.value(name)
    here = torch.zeros_like(there) if baseline is None else start.value(name)

    def moved(share: float) -> Tape:
        """The path with the site's rows this far from the baseline."""
        edit = Edit(name, "set", here + (there - here) * share, range(len(path)))
        return tape_of(engine, path, place_all([edit], engine.sites, len(path)), names)

    mean = torch.zeros_like(there, dtype=torch.float32)
    for step in range(steps):
        mean += moved((step + 0.5) / steps).gradients(function, engine.sites.aliases, promised)[name]
    estimate = row_sums((there - here) * (mean / steps))[None]
    before, after = (moved(0.0) if baseline is None else start).measure(function), end.measure(function)
    real = None
    if compare:
        changed = {name: (there - here).flatten(1).any(1)}
        real = patch_effects(engine, base, {name: there}, changed, function, before, progress=False)
    gap = after - before - float(estimate.double().sum())
    return Attribution(before, after, names, words_of(engine, path), estimate, real, promised, gap)
