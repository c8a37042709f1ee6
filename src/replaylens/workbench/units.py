"""`Unit`: a head, a neuron, a direction or an expert, and the edits that take it away."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.edits import Edit, Positions
from replaylens.engine.request.placed import drawn
from replaylens.engine.request.values import items, shown, whole
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.logits import chosen
from replaylens.workbench.heads import HeadChoice, chosen_heads, pair_of

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


def units_of(engine: Core, heads: HeadChoice, neurons: Any, directions: Any, experts: Any) -> list[Unit]:
    """All chosen units; BadRequest if there are none, or if one does not exist."""
    config, resolve = engine.config, engine.sites.resolve
    made = []
    for layer, head in [] if heads is False else chosen_heads(engine, heads):
        made.append(Unit("head", layer, head, f"L{layer}H{head}", resolve(f"blocks.{layer}.attn.hook_z")))
    for pair in items("neurons", neurons, "(layer, neuron) pairs"):
        layer, neuron = pair_of("neurons", pair, config.num_layers, config.d_mlp)
        own = torch.zeros(config.d_mlp, dtype=torch.float32)
        own[neuron] = 1.0
        made.append(Unit("neuron", layer, neuron, f"L{layer}N{neuron}", resolve(f"blocks.{layer}.mlp.hook_post"), own))
    streams = engine.sites.per_layer("S")
    for number, pair in enumerate(items("directions", directions, "(layer, vector) pairs")):
        layer, vector = _direction(pair, len(streams), config.d_model)
        made.append(Unit("direction", layer, number, f"L{layer}D{number}", streams[layer], vector))
    made += [_expert(engine, pair) for pair in items("experts", experts, "(layer, expert) pairs")]
    if not made:
        raise BadRequest("Nothing to ablate. Give heads=True, or some heads, neurons, directions or experts.")
    return made


def _expert(engine: Core, pair: Any) -> Unit:
    config = engine.config
    layer, expert = pair_of("experts", pair, config.num_layers, config.mixture.num_experts if config.mixture else 1)
    if not config.sparse(layer):
        raise BadRequest(f"Invalid experts: layer {layer} has no experts. rl.routing shows the layers that do.")
    return Unit("expert", layer, expert, f"L{layer}E{expert}", engine.sites.resolve(f"blocks.{layer}.mlp.gate.hook_out"))


def _direction(pair: Any, layers: int, width: int) -> tuple[int, Tensor]:
    """(layer, vector of length 1)"""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise BadRequest(f"Invalid directions: {shown(pair)} is not a pair. Give (layer, vector) pairs.")
    layer = whole("directions (layer)", pair[0], 0, layers - 1)
    try:
        vector = torch.as_tensor(pair[1]).detach().float().cpu()
    except (TypeError, ValueError, RuntimeError):  # text, ragged lists
        raise BadRequest(f"Invalid direction {shown(pair[1])}. Give {width} numbers, not all zero.") from None
    length = float(vector.norm())
    if vector.shape != (width,) or not 0 < length < float("inf"):
        raise BadRequest(f"Invalid direction of shape {tuple(vector.shape)}. Give {width} finite numbers, not all zero.")
    return layer, vector / length
