"""Gradients by PyTorch's autograd: through Hugging Face's model, and through our decoder in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.request.placed import PlacedEdit
from replaylens.gradients.gradients import LogitsFunction


class Keeping:
    """A tap that applies edits, and keeps every value after them and its gradient."""

    def __init__(self, edits: Sequence[PlacedEdit] = ()) -> None:
        self.edits = edits
        self.values: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return True

    def __call__(self, site: str, value: Tensor) -> Tensor:
        for edit in self.edits:
            if edit.site == site:
                value, positions = value.clone(), edit.positions(0, len(value))
                value[positions] = edit.apply(value[positions], positions)
        if value.requires_grad:  # indices of experts have no gradient
            value = value.clone()  # a tensor of its own: what follows is computed from it
            value.retain_grad()
        self.values[site] = value
        return value


def of_decoder(
    model: Decoder, tokens: list[int], metric: LogitsFunction, edits: Sequence[PlacedEdit] = ()
) -> dict[str, Tensor]:
    """Every site but patterns, which the reference ops only show. Precondition: a float64 model of its own."""
    model.requires_grad_(False).embed.requires_grad_(True)
    if model.pos_embed is not None:
        model.pos_embed.requires_grad_(True)
    kept, ops = Keeping(edits), SequenceOps([len(tokens)])
    rows = model(torch.tensor(tokens), torch.arange(len(tokens)), ops, kept)
    metric(model.logits(rows, ops, kept)[-1]).backward()
    return {site: value.grad for site, value in kept.values.items() if value.grad is not None}


def of_hugging_face(model: Any, tokens: list[int], metric: LogitsFunction) -> dict[str, Tensor]:
    """S, T, C and the attention patterns of a model in memory, by our letters and the layer: "T2"."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _given: Any, out: Any) -> None:
            kept[name] = out[0] if isinstance(out, tuple) else out
            kept[name].retain_grad()

        return hook

    def keep_input(name: str) -> Any:
        def hook(_module: Any, given: Any, named: Any) -> None:
            kept[name] = given[0] if given else named["hidden_states"]
            kept[name].retain_grad()

        return hook

    handles = []
    layers = _layers(model)
    for i, layer in enumerate(layers):
        attention, mlp = _parts(layer)
        handles += [
            layer.register_forward_pre_hook(keep_input(f"S{i}"), with_kwargs=True),
            attention.register_forward_hook(keep(f"T{i}")),
            mlp.register_forward_hook(keep(f"C{i}")),
        ]
    handles.append(layers[-1].register_forward_hook(keep(f"S{len(layers)}")))
    try:
        out = model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
        for i, pattern in enumerate(out.attentions):
            pattern.retain_grad()
            kept[f"P{i}"] = pattern
        metric(out.logits[0, -1]).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    found: dict[str, Tensor] = {}
    for name, value in kept.items():
        assert value.grad is not None
        found[name] = value.grad[0] if name[0] != "P" else (value.grad * (value > 0))[0].transpose(0, 1)
    return found


def _layers(model: Any) -> Any:
    for path in (("model", "layers"), ("transformer", "h"), ("gpt_neox", "layers")):
        if hasattr(model, path[0]):
            return getattr(getattr(model, path[0]), path[1])
    raise AssertionError("unknown family")


def _parts(layer: Any) -> tuple[Any, Any]:
    """What writes T and C to the residual stream: the norms after attention and MLP, where there are any."""
    if hasattr(layer, "post_feedforward_layernorm"):
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm
    attention = next(getattr(layer, name) for name in ("self_attn", "attn", "attention") if hasattr(layer, name))
    return attention, layer.mlp


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
