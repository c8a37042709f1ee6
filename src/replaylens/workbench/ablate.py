"""`ablate`: what a behaviour loses without a head, a neuron or a direction, ranked, with intervals over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.display import Citable
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.sites import numbered
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import drawn
from replaylens.engine.request.positions import Positions, chosen
from replaylens.engine.request.values import as_int, as_list, integer, short_repr, verb
from replaylens.engine.terminal import hidden
from replaylens.gradients.attribution import one_for_each
from replaylens.probes.intervals import difference_over_groups
from replaylens.probes.report import bars
from replaylens.workbench.drawing import Grid, Metric, RowMetric, figure, one_name, paragraph, view

# ---- heads -----------------------------------------------------------------------------------------------------------
# The choice of attention heads, which means the same in every verb.

HeadChoice = bool | Sequence[int] | Sequence[tuple[int, int]]
FORMS = "True (all), head numbers (in every layer), or (layer, head) pairs"


def chosen_heads(engine: Engine, heads: Any, layers: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(layer, head) pairs; BadRequest if there are none.

    heads   True: all; numbers: those heads, in every layer; or pairs
    layers  of all heads, or of the numbers; None: all
    """
    config = engine.config
    if heads is True:
        heads = range(config.num_heads)
    given = as_list("heads", heads, FORMS)
    where = config.layers_with("attn") if layers is None else layers
    if given and all(integer(each) is not None for each in given):
        numbers = [as_int("heads", each, 0, config.num_heads - 1) for each in given]
        require_attention(config, where)
        return [(layer, head) for layer in where for head in dict.fromkeys(numbers)]
    if layers is not None and given:
        raise BadRequest(f"layers was given with heads={short_repr(heads)}, which name their layers. Leave one of the two out.")
    found = [pair_of("heads", pair, config.num_layers, config.num_heads) for pair in given]
    if not found:
        raise BadRequest(f"heads is empty. Give {FORMS}.")
    require_attention(config, [layer for layer, _ in found])
    return list(dict.fromkeys(found))


def require_attention(config: ModelConfig, layers: Sequence[int]) -> None:
    """BadRequest if one of the layers has no attention heads, or if none of the model's has."""
    attends = config.layers_with("attn")
    if not attends:
        raise BadRequest(f"No layer of this {config.family} model has attention heads. Edit its mixer sites instead.")
    if bad := [layer for layer in layers if layer not in attends]:
        raise BadRequest(f"Layer {bad[0]} is recurrent and has no attention heads. Layers that have: {numbered(attends)}.")


def pair_of(name: str, pair: Any, layers: int, count: int) -> tuple[int, int]:
    """A (layer, number) pair."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadRequest(f"Invalid {name}: {short_repr(pair)} is not a pair. Give (layer, number) pairs.")
    return as_int(f"{name} (layer)", pair[0], 0, layers - 1), as_int(name, pair[1], 0, count - 1)


def chosen_layers(layers: Any, count: int) -> list[int]:
    """Layer numbers below `count`; None: all. BadRequest if there are none."""
    if layers is None:
        return list(range(count))
    found = [as_int("layers", layer, 0, count - 1) for layer in as_list("layers", layers, "a list of layers")]
    if not found:
        raise BadRequest("layers is empty. Give at least one layer, or leave it out for all.")
    return list(dict.fromkeys(found))


# ---- units -----------------------------------------------------------------------------------------------------------
# `Unit`: a head, a neuron, a direction or an expert, and the edits that take it away.

How = Literal["zero", "mean", "resample"]


@dataclass(frozen=True, eq=False)
class Unit:
    """What is ablated."""

    kind: str
    """head, neuron, direction or expert"""
    layer: int
    number: int
    name: str
    site: str
    vector: Tensor | None = None
    """of a neuron or direction: what is projected out, of length 1"""

    def edits(self, how: How, rows: dict[str, Tensor], positions: Positions, length: int, seed: int) -> list[Edit]:
        """The edits that take the unit away from a prompt of `length` tokens.

        rows  site -> those to average or to draw from; none for "zero"
        """
        if self.kind == "expert":
            return [Edit(self.site, "reweight", experts=[self.number], factor=0.0, positions=positions)]
        if self.vector is None:
            return [self._of_head(how, rows, positions, seed)]
        gone = Edit(self.site, "project_out", self.vector, positions=positions)
        if how == "zero":
            return [gone]
        parts = rows[self.site] @ self.vector  # [rows]
        if how == "mean":
            return [gone, Edit(self.site, "add", self.vector * float(parts.mean()), positions=positions)]
        at = chosen(positions, length)
        drawn_parts = parts[drawn(seed, at, len(parts))]
        return [gone, Edit(self.site, "add", drawn_parts[:, None] * self.vector, positions=at)]

    def _of_head(self, how: How, rows: dict[str, Tensor], positions: Positions, seed: int) -> Edit:
        head = [self.number]
        if how == "zero":
            return Edit(self.site, "zero", positions=positions, heads=head)
        own = rows[self.site][:, head]  # [rows, 1, d_head]
        if how == "mean":
            return Edit(self.site, "set", own.mean(0), positions=positions, heads=head)
        return Edit(self.site, "resample", own, positions=positions, heads=head, seed=seed)


def units_of(engine: Engine, heads: HeadChoice, neurons: Any, directions: Any, experts: Any) -> list[Unit]:
    """All chosen units; BadRequest if there are none, or if one does not exist."""
    config, resolve = engine.config, engine.sites.resolve
    made = []
    for layer, head in [] if heads is False else chosen_heads(engine, heads):
        made.append(Unit("head", layer, head, f"L{layer}H{head}", resolve(f"blocks.{layer}.attn.hook_z")))
    for pair in as_list("neurons", neurons, "(layer, neuron) pairs"):
        layer, neuron = pair_of("neurons", pair, config.num_layers, config.d_mlp)
        own = torch.zeros(config.d_mlp, dtype=torch.float32)
        own[neuron] = 1.0
        made.append(Unit("neuron", layer, neuron, f"L{layer}N{neuron}", resolve(f"blocks.{layer}.mlp.hook_post"), own))
    streams = engine.sites.per_layer("S")
    for number, pair in enumerate(as_list("directions", directions, "(layer, vector) pairs")):
        layer, vector = _direction(pair, len(streams), config.d_model)
        made.append(Unit("direction", layer, number, f"L{layer}D{number}", streams[layer], vector))
    made += [_expert(engine, pair) for pair in as_list("experts", experts, "(layer, expert) pairs")]
    if not made:
        raise BadRequest("Nothing to ablate. Give heads=True, or some heads, neurons, directions or experts.")
    return made


def _expert(engine: Engine, pair: Any) -> Unit:
    config = engine.config
    layer, expert = pair_of("experts", pair, config.num_layers, config.mixture.num_experts if config.mixture else 1)
    if not config.sparse(layer):
        raise BadRequest(f"Invalid experts: layer {layer} has no experts. rl.routing shows the layers that do.")
    return Unit("expert", layer, expert, f"L{layer}E{expert}", engine.sites.resolve(f"blocks.{layer}.mlp.gate.hook_out"))


def _direction(pair: Any, layers: int, width: int) -> tuple[int, Tensor]:
    """(layer, vector of length 1)"""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise BadRequest(f"Invalid directions: {short_repr(pair)} is not a pair. Give (layer, vector) pairs.")
    layer = as_int("directions (layer)", pair[0], 0, layers - 1)
    try:
        vector = torch.as_tensor(pair[1]).detach().float().cpu()
    except (TypeError, ValueError, RuntimeError):  # text, ragged lists
        raise BadRequest(f"Invalid direction {short_repr(pair[1])}. Give {width} numbers, not all zero.") from None
    length = math.sqrt(math.fsum(x * x for x in vector.flatten().tolist()))  # rounded the same everywhere
    if vector.shape != (width,) or not 0 < length < float("inf"):
        raise BadRequest(f"Invalid direction of shape {tuple(vector.shape)}. Give {width} finite numbers, not all zero.")
    return layer, vector / length


# ---- ablate ----------------------------------------------------------------------------------------------------------

MAX_BARS = 40


@dataclass(frozen=True, eq=False)
class AblateResult(Citable):
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
            return self._shown(figure([grid], f"change of {self.metric}", "layer", "head"))
        top = self.frame.head(MAX_BARS).rename(columns={"unit": "what", "effect": "accuracy"})
        made = bars(top, f"{self.how.capitalize()} ablation")
        made.axes[0].set_xlabel(f"change of {self.metric}")
        return self._shown(made)

    def _grid(self) -> Grid | None:
        if {kind for kind, _, _ in self.where} != {"head"}:
            return None
        layers, heads = (sorted({place[i] for place in self.where}) for i in (1, 2))
        values = np.full((len(layers), len(heads)), np.nan)
        for (_, layer, head), effect in zip(self.where, self.effect.mean(1).tolist(), strict=True):
            values[layers.index(layer), heads.index(head)] = effect
        mean = f", mean of {len(self.plain)} prompts" if len(self.plain) > 1 else ""
        title = f"{self.how.capitalize()} ablation of heads{mean}"
        return Grid(title, [str(l) for l in layers], [str(h) for h in heads], values, around=0.0)

    def _repr_html_(self) -> str:
        lead = paragraph(f"{self.metric}: {float(self.plain.mean()):.3f} on average over {len(self.plain)} prompts.")
        if (grid := self._grid()) is not None:
            return view([grid], lead, note=f"Mean change of {self.metric} without the head.")
        top = self.frame.head(MAX_BARS)
        table = Grid("Effects", [""], list(top["unit"]), top["effect"].to_numpy()[None], around=0.0)
        return view([table], lead)


@verb
def ablate(
    engine: Engine,
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
        raise BadRequest(f"Unknown how={short_repr(how)}. Known: zero, mean, resample.")
    paths = [
        engine.tokens_of(prompt) for prompt in as_list("prompts", prompts, "a list of prompts (texts, token ids or chats)")
    ]
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
    title = one_name(measure.name for measure in measures)
    return AblateResult(title, how, names, where, plain, ablated, made_by=(engine.fingerprint,))


def _rows(engine: Engine, paths: list[list[int]], sites: list[str]) -> dict[str, list[Tensor]]:
    """The rows of every site, prompt by prompt."""
    branches = engine.prompts(paths, sites=sites)
    try:
        return {site: [branch.activations[site].cpu().float() for branch in branches] for site in sites}
    finally:
        for branch in branches:
            branch.release()
