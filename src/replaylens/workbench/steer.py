"""`steer`: generate with a vector added to the residual stream, at several layers and strengths, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from replaylens.engine.display import Citable, picture, visible
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_float as finite
from replaylens.engine.request.values import as_list, verb
from replaylens.engine.serving.branch import Branch
from replaylens.gradients.attribution import one_for_each
from replaylens.probes.probe import LinearProbe
from replaylens.views.html import fragment, tag
from replaylens.workbench.ablate import chosen_layers
from replaylens.workbench.drawing import Metric, RowMetric

Contrast = tuple[Sequence[Prompt], Sequence[Prompt]]


@dataclass(frozen=True, eq=False)
class SteerResult(Citable):
    """Continuations of every prompt at every layer and strength. Strength 0 is the unsteered model, once per prompt."""

    frame: pd.DataFrame
    """prompt, layer (NaN without steering), strength, text; perplexity: of the text under the unsteered model; effect: how far
    the steered model is from the unsteered one along that text, the mean KL divergence of the next token in nats; metric: if
    given, of the first token after the prompt"""
    vectors: dict[int, Tensor]
    """layer -> the vector that strength 1 adds"""

    def __repr__(self) -> str:
        prompts, layers = self.frame["prompt"].nunique(), ", ".join(map(str, self.vectors))
        return f"SteerResult({prompts} prompts, layers {layers}, {len(self.frame)} continuations)"

    def plot(self) -> Figure:
        """Against strength, one line per layer: the effect, and the perplexity under the unsteered model.

        The effect is a mean over prompts; the perplexity a geometric one, the mean of logarithms.
        """
        made = picture(9.2, 3.4)
        left, right = made.subplots(1, 2)
        unsteered = self.frame[self.frame["strength"] == 0]
        for layer in self.vectors:
            own = pd.concat([unsteered, self.frame[self.frame["layer"] == layer]])
            logs = own.assign(log=own["perplexity"].map(math.log)).groupby("strength")
            for axis, means in ((left, logs["effect"].mean()), (right, logs["log"].mean().map(math.exp))):
                axis.plot(means.index, means, marker="o", markersize=3, label=f"layer {layer}")
        left.set(xlabel="strength", ylabel="effect: KL from the unsteered\nmodel, nats per token", ylim=(0, None))
        right.set(xlabel="strength", ylabel="perplexity of the text\nwithout steering", yscale="log")
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
        right.yaxis.set_minor_formatter(NullFormatter())
        made.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
        return self._shown(made)

    def _repr_html_(self) -> str:
        return fragment(*(self._table(prompt) for prompt in dict.fromkeys(self.frame["prompt"])))

    def _table(self, prompt: str) -> Markup:
        own = self.frame[self.frame["prompt"] == prompt]
        head = tag("tr", *(tag("th", name) for name in ("layer", "strength", "effect", "perplexity", "continuation")))
        lines = [
            tag(
                "tr",
                tag("td", "" if math.isnan(line.layer) else int(line.layer)),
                tag("td", f"{line.strength:g}"),
                tag("td", f"{line.effect:.3f}"),
                tag("td", f"{line.perplexity:.2f}"),
                tag("td", visible(line.text), style="text-align:left"),
            )
            for line in own.itertuples()
        ]
        table = tag("table", tag("thead", head), tag("tbody", *lines))
        return tag("figure", tag("figcaption", visible(prompt)), tag("div", table, class_="rl-scroll"), class_="rl-figure")


@verb
def steer(
    engine: Engine,
    vector: Tensor | Contrast | LinearProbe,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int],
    strengths: Sequence[float],
    n: int = 24,
    sampling: Sampling | None = None,
    metric: RowMetric | Sequence[RowMetric] | None = None,
    keep_norm: bool = False,
    whole_prompt: bool = False,
    progress: bool = False,
) -> SteerResult:
    """Generate `n` tokens after every prompt with strength * vector added to the residual stream.

    vector     a tensor [d_model]; a contrast (positive prompts, negative prompts): the difference of the mean residual streams
               of their last tokens, at each layer; or a probe with two classes: from the first class to the second, as far as
               their means are apart
    layers     of the residual stream (S): it enters block `layer`
    metric     as in `patch`, of the first token after the prompt, or a list with one for each prompt: what the vector does to
               a behaviour, in the column `metric`
    keep_norm  keep the length of the residual stream and change only its direction
    whole_prompt  steer all positions; else from the prompt's last token on

    All continuations are generated together.
    """
    prompts = as_list("prompts", prompts, "a list of prompts (texts, token ids or chats)")
    paths = [engine.tokens_of(prompt) for prompt in prompts]
    texts = [each if isinstance(each, str) else engine.text.decode(path) for each, path in zip(prompts, paths, strict=True)]
    streams = engine.sites.per_layer("S")
    chosen = chosen_layers(layers, len(streams))
    factors = [finite("strengths", each, BadRequest) for each in as_list("strengths", strengths, "a list of numbers")]
    if not paths or not factors:
        raise BadRequest("There is nothing to steer. Give at least one prompt and one strength.")
    vectors = _vectors(engine, vector, chosen)
    measures = None if metric is None else [Metric.of(engine, own) for own in one_for_each(metric, len(paths), "prompts")]
    made: list[Branch] = []
    try:
        roots = list(engine.prompts(paths))
        made += roots
        asked: list[tuple[int, float, float, Branch]] = []
        for number, root in enumerate(roots):
            made += (plain := root.fork())
            asked.append((number, math.nan, 0.0, plain[0]))
            where = slice(None if whole_prompt else root.length - 1, None)
            for layer in chosen:
                for factor in [factor for factor in factors if factor]:
                    edit = Edit(streams[layer], "add", vectors[layer], where, factor=factor, keep_norm=keep_norm)
                    made += (steered := root.fork(edits=[edit]))
                    asked.append((number, float(layer), factor, steered[0]))
        engine.generate([branch for *_, branch in asked], n, sampling=sampling, progress=progress)
        lines = [(texts[i], at, factor, engine.text.decode(b.generated)) for i, at, factor, b in asked]
        read = _readings(engine, roots, [(i, branch) for i, _, _, branch in asked])
        at = [roots[i].length - 1 for i, *_ in asked]
        first = [measures[i](b.logits(slice(p, p + 1))) for p, (i, *_, b) in zip(at, asked, strict=True)] if measures else []
    finally:
        for branch in made:
            branch.release()
    frame = pd.DataFrame(lines, columns=["prompt", "layer", "strength", "text"])
    frame["perplexity"], frame["effect"] = zip(*read, strict=True)
    if measures is not None:
        frame["metric"] = [float(each) for each in first]
    return SteerResult(frame, vectors, made_by=(engine.fingerprint,))


def _vectors(engine: Engine, given: Tensor | Contrast | LinearProbe, layers: list[int]) -> dict[int, Tensor]:
    """The vector of each layer."""
    width = engine.config.d_model
    if isinstance(given, LinearProbe):
        if len(given.classes) != 2:
            raise BadRequest(f"The probe has {len(given.classes)} classes. Give the vector probe.direction(origin, target).")
        first, second = given.classes
        if (length := len(given.direction(first, second))) != width:
            raise BadRequest(
                f"The probe of {given.site} has a direction of {length} numbers, and the residual stream, which is steered, "
                f"has {width}. Fit the probe on S, or add the direction where it was fitted: Edit(site, 'add', direction)."
            )
        given = torch.from_numpy(given.direction(first, second) * given.gap(first, second)).float()
    if isinstance(given, Tensor):
        if given.shape != (width,):
            raise BadRequest(f"The vector has shape {tuple(given.shape)}; expected ({width},).")
        return dict.fromkeys(layers, given.detach().float().cpu())
    if not isinstance(given, tuple) or len(given) != 2 or not all(_is_side(side) for side in given):
        raise BadRequest(
            "Give a vector, a probe, or a contrast: (positive prompts, negative prompts), with one or more in each."
        )
    positive, negative = (_last_rows(engine, list(side), layers) for side in given)
    return {layer: positive[layer].mean(0) - negative[layer].mean(0) for layer in layers}


def _is_side(side: object) -> bool:
    """Whether this is a list of texts, chats or lists of token ids, with at least one. A single chat is not."""
    return isinstance(side, list | tuple) and bool(side) and all(isinstance(each, str | list | tuple) for each in side)


def _last_rows(engine: Engine, texts: list[Prompt], layers: list[int]) -> dict[int, Tensor]:
    """The residual streams of the texts' last tokens, by layer: [texts, d_model]."""
    streams = engine.sites.per_layer("S")
    branches = engine.prompts(texts, sites=[streams[layer] for layer in layers], positions="last")
    try:
        return {l: torch.cat([b.activations[streams[l]][-1:].float().cpu() for b in branches]) for l in layers}
    finally:
        for branch in branches:
            branch.release()


def _readings(engine: Engine, roots: list[Branch], made: list[tuple[int, Branch]]) -> list[tuple[float, float]]:
    """Of each branch's generated tokens: their perplexity under the model without edits, and the mean KL divergence of the
    steered next-token distributions from those of that model. Tokens are forced after the prompt, as a Thinking-States model
    needs.

    made  (number of its prompt, branch)
    """
    forks: list[Branch] = []
    try:
        for number, _ in made:
            forks += roots[number].fork()
        engine.force_all(forks, [branch.generated for _, branch in made])
        found = []
        for fork, (_, branch) in zip(forks, made, strict=True):
            rows = slice(fork.root_length - 1, -1)
            plain, steered = (each.logits(rows).double().log_softmax(-1) for each in (fork, branch))
            surprise = -float(plain[range(len(plain)), fork.generated].mean())
            apart = (steered.exp() * (steered - plain)).sum(-1).mean()
            found.append((math.exp(surprise), float(apart)))
        return found
    finally:
        for fork in forks:
            fork.release()
