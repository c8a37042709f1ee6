"""`ablate`: what a behaviour loses without a head, a neuron or a direction, ranked, with intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.edits import Edit, Positions
from replaylens.engine.request.values import items, whole
from replaylens.engine.serving.core import Core
from replaylens.probes.reports.figures import bars
from replaylens.probes.scoring.statistics import difference_over_groups
from replaylens.workbench.drawing import Grid, figure, paragraph, view
from replaylens.workbench.metric import FORMS, Metric, MetricTokens, RowsFunction

How = Literal["zero", "mean", "resample"]
MAX_BARS = 40


@dataclass(frozen=True, eq=False)
class AblateResult:
    """The metric of every prompt, as it is and without each unit."""

    metric: str
    how: How
    units: tuple[str, ...]
    where: tuple[tuple[str, int, int], ...]
    """of each unit: "head", "neuron" or "direction", its layer and its number"""
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


@dataclass(frozen=True, eq=False)
class _Unit:
    kind: str
    layer: int
    number: int
    name: str
    site: str
    vector: Tensor | None = None
    """of a neuron or direction: what is projected out, of length 1"""


def ablate(
    engine: Core,
    prompts: Sequence[str | list[int]],
    *,
    metric: MetricTokens | RowsFunction | Sequence[MetricTokens],
    heads: bool | Sequence[tuple[int, int]] = False,
    neurons: Sequence[tuple[int, int]] = (),
    directions: Sequence[tuple[int, Tensor]] = (),
    how: How = "zero",
    positions: Positions = None,
    seed: int = 0,
    progress: bool = False,
) -> AblateResult:
    """Take single units away, one at a time, and measure the next token of every prompt.

    metric      as in `patch`: a pair of tokens, one token, or a function of logits; or a list with a pair (as a tuple) or a
                function for each prompt
    heads       True: all; or (layer, head) pairs: the outputs of attention heads (hook_z)
    neurons     (layer, neuron) pairs: activations of the MLP (hook_post)
    directions  (layer, vector) pairs: directions of the residual stream (S)
    how         "zero"; "mean": by the mean over all prompts and positions; "resample", heads only: by rows of other prompts,
                drawn by `seed` and position
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
    if how not in ("zero", "mean", "resample"):
        raise BadRequest(f"Unknown how={how!r}. Known: zero, mean, resample.")
    paths = [engine.tokens_of(prompt) for prompt in items("prompts", prompts, "a list of prompts")]
    units = _units(engine, heads, neurons, directions)
    measures = _metrics(engine, metric, len(paths))
    if how == "resample" and (len(paths) < 2 or any(unit.kind != "head" for unit in units)):
        raise BadRequest(
            "Resampling takes rows of other prompts and is for heads only. Give 2 prompts or more, or another how."
        )
    rows = {} if how == "zero" else _rows(engine, paths, sorted({unit.site for unit in units}))
    plain, ablated = torch.empty(len(paths)), torch.empty(len(units), len(paths))
    for number, path in enumerate(tqdm(paths, unit="prompt", disable=not progress)):
        kept = [i for i in range(len(paths)) if how == "mean" or i != number]
        others = {site: torch.cat([each[i] for i in kept]) for site, each in rows.items()}
        edits = [[], *(_edits(unit, how, others, positions, seed) for unit in units)]
        with engine.variants(path) as base:
            found = base.read(edits, [-1], lambda logits, measure=measures[number]: measure(logits[:, 0]))  # type: ignore[misc]
        plain[number], ablated[:, number] = found[0], found[1:]
    names, where = tuple(unit.name for unit in units), tuple((unit.kind, unit.layer, unit.number) for unit in units)
    title = measures[0].name if len({measure.name for measure in measures}) == 1 else "metric"
    return AblateResult(title, how, names, where, plain, ablated)


def _units(
    engine: Core,
    heads: bool | Sequence[tuple[int, int]],
    neurons: Sequence[tuple[int, int]],
    directions: Sequence[tuple[int, Tensor]],
) -> list[_Unit]:
    config, resolve = engine.config, engine.sites.resolve
    if heads is True:
        heads = [(layer, head) for layer in range(config.num_layers) for head in range(config.num_heads)]
    made = []
    for pair in heads or ():
        layer, head = _pair("heads", pair, config.num_layers, config.num_heads)
        made.append(_Unit("head", layer, head, f"L{layer}H{head}", resolve(f"blocks.{layer}.attn.hook_z")))
    for pair in neurons:
        layer, neuron = _pair("neurons", pair, config.num_layers, config.d_mlp)
        unit = torch.zeros(config.d_mlp)
        unit[neuron] = 1.0
        made.append(_Unit("neuron", layer, neuron, f"L{layer}N{neuron}", resolve(f"blocks.{layer}.mlp.hook_post"), unit))
    streams = engine.sites.per_layer("S")
    for number, (at, vector) in enumerate(directions):
        layer, vector = whole("directions", at, 0, len(streams) - 1), torch.as_tensor(vector).detach().float().cpu()
        if vector.shape != (config.d_model,) or not float(vector.norm()) > 0:
            raise BadRequest(f"Invalid direction of shape {tuple(vector.shape)}. Give {config.d_model} numbers, not all zero.")
        made.append(_Unit("direction", layer, number, f"L{layer}D{number}", streams[layer], vector / vector.norm()))
    if not made:
        raise BadRequest("Nothing to ablate. Give heads=True, or some heads, neurons or directions.")
    return made


def _pair(name: str, pair: Any, layers: int, count: int) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise BadRequest(f"Invalid {name}: {pair!r} is not a pair. Give (layer, number) pairs.")
    return whole(f"{name} (layer)", pair[0], 0, layers - 1), whole(name, pair[1], 0, count - 1)


def _metrics(engine: Core, metric: Any, prompts: int) -> list[Metric]:
    own = isinstance(metric, list) and all(isinstance(each, tuple | Metric) or callable(each) for each in metric)
    if own and len(metric) != prompts:
        raise BadRequest(f"Got {len(metric)} metrics for {prompts} prompts. Give one for each, or {FORMS}.")
    return [Metric.of(engine, each) for each in metric] if own else [Metric.of(engine, metric)] * prompts


def _rows(engine: Core, paths: list[list[int]], sites: list[str]) -> dict[str, list[Tensor]]:
    """The rows of every site, prompt by prompt."""
    branches = engine.prompts(paths, sites=sites)
    try:
        return {site: [branch.activations[site].cpu().float() for branch in branches] for site in sites}
    finally:
        for branch in branches:
            branch.release()


def _edits(unit: _Unit, how: How, rows: dict[str, Tensor], positions: Positions, seed: int) -> list[Edit]:
    """The edits that take a unit away."""
    if unit.vector is None:
        head = [unit.number]
        if how == "zero":
            return [Edit(unit.site, "zero", positions=positions, heads=head)]
        own = rows[unit.site][:, head]  # [rows, 1, d_head]
        if how == "mean":
            return [Edit(unit.site, "set", own.mean(0), positions=positions, heads=head)]
        return [Edit(unit.site, "resample", own, positions=positions, heads=head, seed=seed)]
    gone = Edit(unit.site, "project_out", unit.vector, positions=positions)
    if how == "zero":
        return [gone]
    return [gone, Edit(unit.site, "add", unit.vector * float((rows[unit.site] @ unit.vector).mean()), positions=positions)]
