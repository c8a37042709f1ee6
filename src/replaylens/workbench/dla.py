"""`dla`: direct logit attribution. What does each part of the model write towards one token and away from another?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import reduce
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable, picture, wrapped
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.engine.model.config import handled, require_handled
from replaylens.engine.model.decoder import Attention, Block, LatentAttention, Mlp
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.mixers import Mixer
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import short_repr, verb
from replaylens.gradients.gradients import LogitDifference
from replaylens.probes.report import bars
from replaylens.workbench.drawing import Grid, Metric, MetricTokens, figure, paragraph, plain, view

HANDLED = handled(
    ModelConfig="norm norm_eps norm_bias pre_norms post_norms shared_norm parallel_residual learned_positions rotary_dim rope "
    "rotary_layers local_rope windows slopes attn_scale scale_by_layer attn_softcap logit_softcap qk_norm qk_norm_kind "
    "qk_norm_span qk_norm_rotated qkv_bias out_bias mlp_bias gated_mlp activation embed_scale residual_scale logit_scale "
    "tied_embeddings unembed_bias mixture clip_qkv latent sinks mixer parts attn_gate",
    Rope="*",
    Latent="*",
    MixtureConfig="*",
    Routing="*",
    MixerConfig="*",
)
"""the wiring that it follows: what parts write is read, however it is computed"""

By = Literal["layer", "head", "neuron"]
MAX_BARS = 40


class LogitPart(NamedTuple):
    """A part of the model, and what it adds to the logit difference."""

    name: str
    kind: str
    """embedding, positions, attention, MLP, head, neuron, attention bias, MLP bias, final bias or rounding"""
    layer: int | None
    number: int | None
    """of a head or neuron"""
    value: float


@dataclass(frozen=True, eq=False)
class DlaResult(Citable):
    """What each part adds to a logit difference, in the order of a pass. The parts sum to `total`."""

    metric: str
    by: By
    total: float
    """the logit difference of the model"""
    parts: tuple[LogitPart, ...]
    """all of them; the last is what rounding to float32 or bfloat16 removed, and no larger than rounding can make it"""

    def __repr__(self) -> str:
        lost = self.parts[-1].value
        return f"DlaResult({self.metric}: {self.total:.4g} in {len(self.parts)} parts, of which rounding {lost:.1e})"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per part, the largest first."""
        made = pd.DataFrame(self.parts, columns=["part", "kind", "layer", "number", "value"])
        made = made.astype({"layer": "Int64", "number": "Int64"})
        return made.sort_values("value", ascending=False, key=abs, kind="stable", ignore_index=True)

    def plot(self) -> Figure:
        """Layers: bars in the order of a pass. Heads: a heat map, layers by heads. Neurons: the largest parts."""
        title = f"Direct logit attribution\n{plain(self.metric)}: {self.total:.2f}"
        if self.by == "head":
            made = figure(self._grids(), "part of the logit difference", "layer", "head")
            title = f"{title}\n{wrapped(self._rest(), made.get_figwidth(), 9)}"
        elif self.by == "layer":
            made = self._bars()
        else:
            top = self.frame.head(MAX_BARS).rename(columns={"part": "what", "value": "accuracy"})
            made = bars(top.assign(low=math.nan, high=math.nan), "")
            made.axes[0].set_xlabel("part of the logit difference")
        made.suptitle(title, fontsize=9)
        return self._shown(made)

    def _bars(self) -> Figure:
        """One place for each layer, and for each part of none."""
        place = lambda part: part.name if part.layer is None else str(part.layer)  # noqa: E731
        names = list(dict.fromkeys(map(place, self.parts)))
        made = picture(min(2.5 + 0.32 * len(names), 24), 3.6)
        axis = made.subplots()
        colours = {"mixer": "tab:green", "attention": "tab:blue", "MLP": "tab:orange"}
        kinds = [kind for kind in colours if any(part.kind == kind for part in self.parts)]
        for kind in (*kinds, "others"):
            own = [part for part in self.parts if (part.layer is None if kind == "others" else part.kind == kind)]
            width = 0.8 / max(2, len(kinds))
            shift = 0.0 if kind == "others" else (kinds.index(kind) - (len(kinds) - 1) / 2) * width
            at = [names.index(place(part)) + shift for part in own]
            axis.bar(at, [part.value for part in own], width, color=colours.get(kind, "0.5"), label=kind)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(ylabel="part of the logit difference", xlabel="layer", xticks=range(len(names)))
        axis.set_xticklabels(names, rotation=90, fontsize=7)
        axis.legend(fontsize=7)
        return made

    def _grids(self) -> list[Grid]:
        """The heads, layers by heads; of a hybrid those of its recurrent layers, too."""
        grids = []
        for kind, title in (("head", "attention heads"), ("mixer head", "heads of recurrent layers")):
            found = [part for part in self.parts if part.kind == kind]
            layers = list(dict.fromkeys(str(part.layer) for part in found))
            if found:
                values = np.array([part.value for part in found]).reshape(len(layers), -1)
                grids.append(Grid(title, layers, [str(head) for head in range(values.shape[1])], values, around=0.0))
        return grids

    def _rest(self) -> str:
        """All parts but heads and neurons: those of no layer, and sums over layers of the others."""
        sums: dict[str, float] = {}
        for part in self.parts:
            if part.number is None:
                name = part.name if part.layer is None else f"{part.kind} of all layers"
                sums[name] = sums.get(name, 0.0) + part.value
        return ", ".join(f"{name} {value:.2f}" for name, value in sums.items())

    def _repr_html_(self) -> str:
        lead = paragraph(f"{self.metric}: {self.total:.3f} in all. {self._rest()}.")
        if self.by == "head":
            return view(self._grids(), lead)
        top = self.frame.head(MAX_BARS)
        return view([Grid("Largest parts", [""], list(top["part"]), top["value"].to_numpy()[None], around=0.0)], lead)


@verb
def dla(engine: Engine, prompt: Prompt, metric: MetricTokens | LogitDifference, *, by: By = "layer") -> DlaResult:
    """Split the logit difference after a prompt into what each part of the model writes to the residual stream.

    metric  a pair of tokens: the logit of the first minus that of the second
    by      "layer": attention and MLP of each layer; "head": heads instead of attention; "neuron": neurons instead of MLPs. Of
            a hybrid, recurrent parts ("mixer") and their heads (L0M3) are parts as well

    The embedding, biases and the rounding of the model's dtype are parts too, so that the parts sum to `total`. Norms are
    linear here: the scale that they divide by is held at that of the row, and their weights and biases are included. Of a
    model with a softcap on its logits, what is split is the difference before the softcap. Parts are computed in float64.

    Raises UnsupportedModel for a model whose parts do not add up: what is missing is more than rounding can explain, as where
    something else writes to the stream.

    >>> from replaylens import Engine, dla
    >>> engine = Engine.load("coin-plain")
    >>> found = dla(engine, "A coin's state is heads. Alice flips. What's the state? A:", (" tails", " heads"), by="head")
    >>> abs(sum(part.value for part in found.parts) - found.total) < 1e-9, abs(found.parts[-1].value) < 1e-4
    (True, True)
    """
    if not isinstance(by, str) or by not in ("layer", "head", "neuron"):
        raise BadRequest(f"Unknown by={short_repr(by)}. Known: layer, head, neuron.")
    if not engine.plain:
        raise BadRequest("The logits of a Thinking-States model are not a sum over its layers. Use a plain model, or patch.")
    if by == "neuron" and engine.config.mixture is not None:
        raise BadRequest("by='neuron' was given for a mixture of experts, whose rows go to different neurons. Use by='layer'.")
    difference = LogitDifference(*metric) if isinstance(metric, list | tuple) and len(metric) == 2 else metric
    if not isinstance(difference, LogitDifference):
        raise BadRequest(
            f"Invalid metric={short_repr(metric)}. Only logit differences are sums over parts: give a pair of tokens."
        )
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(each, str | list | tuple) for each in prompt):
        raise BadRequest(f"{len(prompt)} prompts were given, but dla takes one at a time. Call it for each of them.")
    require_handled(engine.config, HANDLED, "Direct logit attribution", "Use patching or ablation.", UnsupportedModel)
    measure, read = Metric.of(engine, difference), _Read(engine, by)
    branch = engine.prompt(prompt, sites=list(read.sites), positions="last")
    try:
        row = lambda site: branch.activations[site][-1].double().cpu()  # noqa: E731
        logits = branch.logits()
        if engine.config.logit_softcap:
            logits = row("unembed.hook_out").to(logits.dtype) * engine.config.logit_scale
        rows = {site: row(site) for site in read.sites}
    finally:
        branch.release()
    total = float(measure(logits[None]))
    parts = list(read.parts(rows, engine._target(difference.right), engine._target(difference.wrong)))
    lost = total - math.fsum(part.value for part in parts)
    if not abs(lost) <= read.bound():
        raise UnsupportedModel(
            f"The parts of {measure.name} miss it by {lost:.3g} of {total:.4g}, and rounding can explain {read.bound():.1g} at "
            "most: this model writes to its stream what no attention, MLP or mixer does. Use patching or ablation."
        )
    parts.append(LogitPart("rounding", "rounding", None, None, lost))
    name = measure.name + (", before the softcap" if engine.config.logit_softcap else "")
    return DlaResult(name, by, total, tuple(parts), made_by=(engine.fingerprint,))


class _Read:
    """The sites to read, and the parts that their rows make."""

    def __init__(self, engine: Engine, by: By) -> None:
        self.model, self.by = engine.model, by
        self.blocks = [block for block in engine.model.blocks if isinstance(block, Block)]
        self._size = self._head_size = 0.0
        """sums of the sizes of all terms: of what is written to the stream, and of the two logits"""

    def bound(self) -> float:
        """The most that rounding can remove, after `parts`: each sum of n terms is off by at most n roundings of the sizes of
        its terms, whatever its order."""
        config, numbers = self.model.config, torch.finfo(torch.float32).eps
        stored = torch.finfo(self.model.dtype).eps
        widest = max(config.d_model, config.d_mlp, config.num_heads * config.d_value, *(_inputs(b) for b in self.blocks))
        writes = 2 + sum(len(block.writers) + (block.mlp is not None) for block in self.blocks)
        return (stored * (writes + 4) + numbers * 2 * widest) * self._size + (stored * 2 + numbers * widest) * self._head_size

    def _added(self, row: Tensor, stream: Tensor, reach: Tensor | None = None) -> float:
        """The part of a row. Mutates: counts its size. `reach`: of the terms that `stream` is the sum of"""
        self._size += float(row.abs() @ (stream.abs() if reach is None else reach))
        return float(row @ stream)

    @property
    def sites(self) -> Iterator[str]:
        yield "embed.hook_out"
        if self.model.pos_embed is not None:
            yield "pos_embed.hook_out"
        for block in self.blocks:
            yield from self._attention_sites(block)
            yield from self._mlp_sites(block)
        yield self.blocks[-1].out_site
        if self.model.config.logit_softcap:
            yield "unembed.hook_out"

    def _attention_sites(self, block: Block) -> Iterator[str]:
        for part, sites in block.writers:
            yield from _sites(sites, block.ln1_post, part.z_site if self._by_head(part) else None)

    def _by_head(self, part: Attention | LatentAttention | Mixer) -> bool:
        """Whether the part is divided into its heads. A gated convolution has none."""
        return self.by == "head" and (not isinstance(part, Mixer) or part.heads > 1)

    def _mlp_sites(self, block: Block) -> Iterator[str]:
        if block.mlp is None:
            return iter(())
        inner = block.mlp.post_site if self.by == "neuron" and isinstance(block.mlp, Mlp) else None
        return _sites(block.mlp_sites, block.ln2_post, inner)

    @torch.inference_mode()
    def parts(self, rows: dict[str, Tensor], right: int, wrong: int) -> Iterator[LogitPart]:
        """rows  by site, in float64"""
        model, table = self.model, self.model.unembedding.detach()
        scale = model.config.logit_scale
        towards = (_wide(table[right]) - _wide(table[wrong])) * scale  # [d_model]: of the normed stream
        last = rows[self.blocks[-1].out_site]
        stream, constant = _before(model.ln_final, last, towards)
        for token in (right, wrong):
            one, bias = _before(model.ln_final, last, _wide(table[token]) * scale)
            self._head_size += float(last.abs() @ one.abs()) + abs(bias)
        yield LogitPart("embedding", "embedding", None, None, self._added(rows["embed.hook_out"], stream))
        if model.pos_embed is not None:
            yield LogitPart("positions", "positions", None, None, self._added(rows["pos_embed.hook_out"], stream))
        for layer, block in enumerate(self.blocks):
            yield from self._attention(rows, layer, block, stream)
            yield from self._mlp(rows, layer, block, stream)
        if model.unembed_bias is not None:
            constant += float(_wide(model.unembed_bias[right]) - _wide(model.unembed_bias[wrong])) * scale
        yield LogitPart("final bias", "final bias", None, None, constant)

    def _attention(self, rows: dict[str, Tensor], layer: int, block: Block, stream: Tensor) -> Iterator[LogitPart]:
        for part, written in block.writers:
            what = "mixer" if part is block.mixer else "attention"
            sites = list(_sites(written, block.ln1_post, part.z_site if self._by_head(part) else None))
            if not self._by_head(part):
                yield LogitPart(f"L{layer} {what}", what, layer, None, self._added(rows[sites[0]], stream))
                continue
            own, reach, constant = _within(part.o, block.ln1_post, block.scale, rows[sites[-1]], stream)
            self._added(rows[sites[0]].flatten(), own, reach)
            each = reduce(rows[sites[0]].flatten() * own, "(heads d) -> heads", "sum", heads=part.heads)
            head, kind = ("M", "mixer head") if part is block.mixer else ("H", "head")
            yield from (LogitPart(f"L{layer}{head}{i}", kind, layer, i, value) for i, value in enumerate(each.tolist()))
            if part.o.bias is not None or constant:
                yield LogitPart(f"L{layer} {what} bias", f"{what} bias", layer, None, constant)

    def _mlp(self, rows: dict[str, Tensor], layer: int, block: Block, stream: Tensor) -> Iterator[LogitPart]:
        sites = list(self._mlp_sites(block))
        if block.mlp is None:
            return
        if self.by != "neuron" or not isinstance(block.mlp, Mlp):
            yield LogitPart(f"L{layer} MLP", "MLP", layer, None, self._added(rows[sites[0]], stream))
            return
        own, reach, constant = _within(block.mlp.down, block.ln2_post, block.scale, rows[sites[-1]], stream)
        self._added(rows[sites[0]], own, reach)
        each = (rows[sites[0]] * own).tolist()
        yield from (LogitPart(f"L{layer}N{i}", "neuron", layer, i, value) for i, value in enumerate(each))
        if block.mlp.down.bias is not None or constant:
            yield LogitPart(f"L{layer} MLP bias", "MLP bias", layer, None, constant)


def _sites(sites: tuple[str, tuple[str, str, str]], post: Norm | None, inner: str | None) -> Iterator[str]:
    """What is written to the stream; or the input of the product that writes, and what a norm after the product reads."""
    out, (_, _, normed) = sites
    if inner is None:
        yield out if post is None else normed
        return
    yield inner
    if post is not None:
        yield out


def _within(linear: Linear, post: Norm | None, scale: float, out: Tensor, stream: Tensor) -> tuple[Tensor, Tensor, float]:
    """A direction of the stream [d_model] as one of the input of a product that writes to it [inputs], the sums of the sizes of
    its terms, and what biases add.

    out  the product's row, if `post` norms it
    """
    constant = 0.0
    if post is not None:
        stream, constant = _before(post, out, stream)
    stream = stream * scale
    if linear.bias is not None:
        constant += float(_wide(linear.bias) @ stream)
    weight = _wide(linear.weight)
    return weight @ stream, weight.abs() @ stream.abs(), constant


def _inputs(block: Block) -> int:
    """The most terms of a product that writes to the stream."""
    return max((part.o.weight.shape[0] for part, _ in block.writers), default=0)


def _before(norm: Norm, row: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """A direction after a norm [width] as one before it, with the norm's scale held at the row's; and what its bias adds."""
    centred = row - row.mean() if norm.kind == "layer" else row
    found = _wide(norm.weight) * direction / (centred.square().mean() + norm.eps).sqrt()
    constant = 0.0 if norm.bias is None else float(_wide(norm.bias) @ direction)
    return found - found.mean() if norm.kind == "layer" else found, constant


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().cpu().double()
