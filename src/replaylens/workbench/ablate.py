"""`ablate`: what a behaviour loses without a head, a neuron or a direction, ranked, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.attribution.patching import one_for_each
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.progress import hidden
from replaylens.engine.request.edits import Positions
from replaylens.engine.request.options import verb
from replaylens.engine.request.values import items, shown
from replaylens.engine.serving.core import Core
from replaylens.probes.reports.figures import bars
from replaylens.probes.scoring.statistics import difference_over_groups
from replaylens.workbench.drawing import Grid, figure, paragraph, view
from replaylens.workbench.heads import HeadChoice
from replaylens.workbench.metric import Metric, RowMetric
from replaylens.workbench.units import How, units_of

MAX_BARS = 40


@dataclass(frozen=True, eq=False)
class AblateResult:
    """The metric of every prompt, as it is and without each unit."""

    metric: str
    how: How
    units: tuple[str, ...]
    where: tuple[tuple[str, int, int], ...]
    """of each unit: "head", "neuron", "direction" or "expert", its layer and its number"""
    plain: Tensor
    """[prompts]: nothing ablated"""
    ablated: Tensor
    """[units, prompts]"""

    def __repr__(self) -> str:
        return f"AblateResult({self.metric}, {self.how}: {len(self.units)} units, {len(self.plain)} prompts)"

    @property
    def effect(self) -> Tensor:
        """ablated - plain: [units, prompts]; negative if the metric needs the unit."""
        return self.ablated - self.plain

    @property
    def frame(self) -> pd.DataFrame:
        """One line per unit, the largest mean effect first, with its 95 % interval over prompts (NaN for a single prompt)."""
        lines = []
        for (kind, layer, number), unit, values in zip(self.where, self.units, self.effect.double().numpy(), strict=True):
            low = high = float("nan")
            if len(values) > 1:
                found = difference_over_groups(values, np.arange(len(values)), bounded=False)
                low, high = found.low, found.high
            known = {"unit": unit, "kind": kind, "layer": layer, "number": number, "effect": values.mean()}
            lines.append(known | {"low": low, "high": high, "prompts": len(values)})
        return pd.DataFrame(lines).sort_values("effect", ascending=False, key=abs, kind="stable", ignore_index=True)

    def plot(self) -> Figure:
        """Heads: a heat map of mean effects, layers by heads. Others: bars with their intervals, the largest first."""
        if (grid := self._grid()) is not None:
            return figure([grid], f"change of {self.metric}", "layer", "head")
        top = self.frame.head(MAX_BARS).rename(columns={"unit": "what", "effect": "accuracy"})
        made = bars(top, f"{self.how} ablation")
        made.axes[0].set_xlabel(f"change of {self.metric}")
        return made

    def _grid(self) -> Grid | None:
        if {kind for kind, _, _ in self.where} != {"head"}:
            return None
        layers, heads = (sorted({place[i] for place in self.where}) for i in (1, 2))
        values = np.full((len(layers), len(heads)), np.nan)
        for (_, layer, head), effect in zip(self.where, self.effect.mean(1).tolist(), strict=True):
            values[layers.index(layer), heads.index(head)] = effect
        return Grid(f"{self.how} ablation of heads", [str(l) for l in layers], [str(h) for h in heads], values, around=0.0)

    def _repr_html_(self) -> str:
        lead = paragraph(f"{self.metric}: {float(self.plain.mean()):.3f} on average over {len(self.plain)} prompts.")
        if (grid := self._grid()) is not None:
            return view([grid], lead, note=f"Mean change of {self.metric} without the head.")
        top = self.frame.head(MAX_BARS)
        table = Grid("Effects", [""], list(top["unit"]), top["effect"].to_numpy()[None], around=0.0)
        return view([table], lead)


@verb
def ablate(
    engine: Core,
    prompts: Sequence[Prompt],
    *,
    metric: RowMetric | Sequence[RowMetric],
    heads: HeadChoice = False,
    neurons: Sequence[tuple[int, int]] = (),
    directions: Sequence[tuple[int, Tensor]] = (),
    experts: Sequence[tuple[int, int]] = (),
    how: How = "zero",
    positions: Positions = None,
    seed: int = 0,
    progress: bool = False,
) -> AblateResult:
    """Take single units away, one at a time, and measure the next token of every prompt.

    metric      as in `patch`: a pair of tokens, one token, a branch, or a function of logits; or a list with one for each
                prompt: pairs as tuples, tokens (of two prompts as tuples of one, since a list of two tokens is a pair),
                branches or functions
    heads       True (all), head numbers or (layer, head) pairs, as in `patch`: the outputs of attention heads (hook_z)
    neurons     (layer, neuron) pairs: activations of the MLP (hook_post)
    directions  (layer, vector) pairs: directions of the residual stream (S)
    experts     (layer, expert) pairs of a mixture of experts: their weights become 0, while the others keep theirs
    how         "zero"; "mean": by the mean over all prompts and positions; "resample": by rows of other prompts, drawn by
                `seed` and position
    positions   where, as in `Edit`; None: everywhere

    The units of a prompt are computed together; each has the bits of its edits made alone.

    >>> from replaylens import Engine, ablate
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = ablate(
    ...     engine,
    ...     [text.format("heads"), text.format("tails")],
    ...     metric=[(" tails", " heads"), (" heads", " tails")],
    ...     heads=True,
    ... )
    >>> result.ablated.shape, bool(result.frame["effect"][0] < 0)  # [heads of all layers, prompts]; the largest one hurts
    (torch.Size([16, 2]), True)
    """
    if not isinstance(how, str) or how not in ("zero", "mean", "resample"):
        raise BadRequest(f"Unknown how={shown(how)}. Known: zero, mean, resample.")
    paths = [engine.tokens_of(prompt) for prompt in items("prompts", prompts, "a list of prompts (texts, token ids or chats)")]
    if not paths:
        raise BadRequest("No prompts. Give at least one.")
    units = units_of(engine, heads, neurons, directions, experts)
    if how != "zero" and any(unit.kind == "expert" for unit in units):
        raise BadRequest(f"how={how!r} is not for experts, which a token may not go to at all. Ablate experts with how='zero'.")
    measures = [Metric.of(engine, own) for own in one_for_each(metric, len(paths), "prompts")]
    if how == "resample" and len(paths) < 2:
        raise BadRequest("Resampling takes rows of other prompts. Give 2 prompts or more, or another how.")
    rows = {} if how == "zero" else _rows(engine, paths, sorted({unit.site for unit in units}))
    plain, ablated = torch.empty(len(paths), dtype=torch.float32), torch.empty(len(units), len(paths), dtype=torch.float32)
    for number, path in enumerate(tqdm(paths, unit="prompt", disable=hidden(progress))):
        kept = [i for i in range(len(paths)) if how == "mean" or i != number]
        others = {site: torch.cat([each[i] for i in kept]) for site, each in rows.items()}
        edits = [[], *(unit.edits(how, others, positions, len(path), seed) for unit in units)]
        with engine.variants(path) as base:
            found = base.read(edits, [-1], lambda logits, measure=measures[number]: measure(logits[:, 0]))  # type: ignore[misc]
        plain[number], ablated[:, number] = found[0], found[1:]
    names, where = tuple(unit.name for unit in units), tuple((unit.kind, unit.layer, unit.number) for unit in units)
    title = measures[0].name if len({measure.name for measure in measures}) == 1 else "metric"
    return AblateResult(title, how, names, where, plain, ablated)


def _rows(engine: Core, paths: list[list[int]], sites: list[str]) -> dict[str, list[Tensor]]:
    """The rows of every site, prompt by prompt."""
    branches = engine.prompts(paths, sites=sites)
    try:
        return {site: [branch.activations[site].cpu().float() for branch in branches] for site in sites}
    finally:
        for branch in branches:
            branch.release()
