"""`dla`: direct logit attribution. What does each part of the model write towards one token and away from another?"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable, picture, wrapped
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.engine.model.decoder import Attention, Decoder, LatentAttention, Mlp
from replaylens.engine.model.layers import Linear
from replaylens.engine.model.mixers import Mixer
from replaylens.engine.model.program import Numbered, Operation, Recorder
from replaylens.engine.model.sites import layer_of
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.values import short_repr, verb
from replaylens.gradients.backward import Flowing, Held
from replaylens.gradients.gradients import LogitDifference
from replaylens.probes.report import bars
from replaylens.workbench.drawing import Grid, Metric, MetricTokens, figure, paragraph, plain, view

By = Literal["layer", "head", "neuron"]
MAX_BARS = 40


class LogitPart(NamedTuple):
    """A part of the model, and what it adds to the logit difference."""

    name: str
    kind: str
    """embedding, positions, attention, mixer, MLP, head, mixer head, neuron, final bias or rounding; a bias, such as attention
    bias; other, which is named by the operation that makes it"""
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
            own: dict[str, float] = {}
            for part in self.parts:
                if kind == (part.kind if part.kind in colours else "others"):
                    own[place(part)] = own.get(place(part), 0.0) + part.value
            width = 0.8 / max(2, len(kinds))
            shift = 0.0 if kind == "others" else (kinds.index(kind) - (len(kinds) - 1) / 2) * width
            at = [names.index(name) + shift for name in own]
            axis.bar(at, list(own.values()), width, color=colours.get(kind, "0.5"), label=kind)
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
            layers = [str(part.layer) for part in found if part.number == 0]
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

    Parts are found by walking back over the steps of the pass, so that whatever a model's wiring adds to the stream is one.
    Raises UnsupportedModel for a step that cannot be followed, and for a model whose parts miss the total by more than rounding
    can explain.

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
    measure = Metric.of(engine, difference)
    right, wrong = engine._target(difference.right), engine._target(difference.wrong)
    tokens, named = engine.tokens_of(prompt), filter(re.compile(f"{_STREAM}|{_SITE}").fullmatch, engine.sites.sites)
    recorder = Recorder(engine.model, frozenset(named), last=True)
    whole = engine.lock.alone(lambda: engine.runner.whole(tokens, (), PassTap(frozenset()), recorder))
    with torch.inference_mode():
        walk = _Writes(engine.model, recorder, by, right, wrong)
        number, capped = walk.logits(recorder.number(whole.logits))
        total = float(measure(recorder.values[number]))
        parts = walk.split(number)
    lost = total - math.fsum(part.value for part in parts)
    if not abs(lost) <= walk.bound():
        raise UnsupportedModel(
            f"The parts of {measure.name} miss it by {lost:.3g} of {total:.4g}, and rounding can explain {walk.bound():.1g} at "
            "most. Use patching or ablation."
        )
    parts.append(LogitPart("rounding", "rounding", None, None, lost))
    name = measure.name + (", before the softcap" if capped else "")
    return DlaResult(name, by, total, tuple(parts), made_by=(engine.fingerprint,))


_PARTS = {"attn": "attention", "mixer": "mixer", "mlp": "MLP", "embed": "embedding", "pos_embed": "positions"}
"""part of a site's name -> kind of what is written there"""
_STREAM, _SITE = r"blocks\.\d+\.hook_(?:in|out)", rf"(?:blocks\.(\d+)\.)?({'|'.join(_PARTS)})\.hook_out"
_ENTRY = "embed.hook_out"


class _Float64:
    """Sums and products of the walk."""

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        return g @ _wide(linear.weight).mT

    def total(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def apply(self, name: str, x: Tensor) -> Tensor:
        found: Tensor = getattr(torch, name)(x)
        return found


class _Writes(Held):
    """The walk back along the residual stream, from the last row's logits to the embedding.

    The stream is what is linear in the embedding without a product with weights. What is added to it is a part, whatever made
    it; of a product, each input may be one.
    """

    def __init__(self, model: Decoder, recorder: Recorder, by: By, right: int, wrong: int) -> None:
        if not recorder.begins_with(_ENTRY):
            raise UnsupportedModel(f"This model's wiring does not begin with the site {_ENTRY}. Tap it there.")
        super().__init__(model, recorder, (), frozenset((_ENTRY,)), _Float64())  # type: ignore[arg-type]
        self.tokens = [right, wrong]
        self.layer: int | None = None
        self.stream = set(recorder.steps[0].outs)
        for step in recorder.steps:
            if any(x.number in self.stream for x in self._carried(step)):
                self.stream.update(out for out in step.outs if self._flows(Numbered(out)))
        modules = list(model.modules())
        self.linears = [each for each in modules if isinstance(each, Linear)]
        self.cuts = {each.down: 0 for each in modules if by == "neuron" and isinstance(each, Mlp)}
        """products whose inputs are divided -> into how many heads; 0: into neurons"""
        if by == "head":  # a gated convolution has none
            writers = (each for each in modules if isinstance(each, Attention | LatentAttention | Mixer))
            self.cuts |= {each.o: each.heads for each in writers if not isinstance(each, Mixer) or each.heads > 1}
        self.listed: list[LogitPart] = []
        """from the last to the first"""
        self.writes, self.constant = 0, 0.0
        """what biases add"""
        self.size = self.head_size = 0.0
        """sums of the sizes of all terms: of what is written to the stream, and of the two logits"""

    def split(self, number: int) -> list[LogitPart]:
        """In the order of a pass. number: of the logits, or of what their softcap reads"""
        if number not in self.stream:
            raise self._refused(self._end(number))
        g = torch.zeros(self.recorder.values[number].shape, dtype=torch.float64)
        g[..., self.tokens] = torch.tensor([1.0, -1.0], dtype=torch.float64)
        self.run(number, g)
        seen, named, last = Counter[str](), list[LogitPart](), 0.0
        for part in reversed(self.listed):
            seen[part.name] += 1
            if part.layer is None and part.kind == "bias":
                last += part.value
            else:  # what writes twice is two parts
                named.append(part if seen[part.name] == 1 else part._replace(name=f"{part.name} ({seen[part.name]})"))
        return [*named, LogitPart("final bias", "final bias", None, None, last)]

    def bound(self) -> float:
        """The most that rounding can remove, after `split`: each sum of n terms is off by at most n roundings of the sizes of
        its terms, whatever its order."""
        config, numbers = self.model.config, torch.finfo(torch.float32).eps
        stored = torch.finfo(self.model.dtype).eps
        widest = max(config.d_model, config.d_mlp, *(each.shape_of("weight")[0] for each in self.linears))
        of_stream, of_logits = stored * (self.writes + 4) + numbers * 2 * widest, stored * 2 + numbers * widest
        return of_stream * self.size + of_logits * self.head_size

    # ---- stream --------------------------------------------------------------------------------------------------------

    def _carried(self, step: Operation) -> list[Numbered]:
        """What its results are linear in, without a product with weights."""
        if step.kind in ("linear", "by_head", "rotate") or self.rule(step) is None:
            return []
        return [step.args[2]] if step.kind == "linear_add" else list(map(Numbered, step.reads))

    def _end(self, number: int) -> Operation:
        """The step that ends the stream: the first of those that the logits are made of."""
        numbers, ends = [number], list[Operation]()
        while numbers:
            step = self.makers[numbers.pop()]
            numbers += [x.number for x in self._carried(step) if x.number in self.makers]
            ends += [] if self._carried(step) else [step]
        return min(ends, key=lambda step: step.outs[0])

    def _refused(self, step: Operation) -> Exception:
        return UnsupportedModel(
            f"Direct logit attribution does not follow {step.kind}, which this model's residual stream passes. Use patching."
        )

    def wide(self, x: Tensor) -> Tensor:
        return _wide(x)

    def rule(self, step: Operation) -> Any:
        return _Writes.unembed if step.kind == "unembed" else super().rule(step)

    def unembed(self, step: Operation, g: Tensor) -> Flowing:
        """Mutates: counts the sizes of the logits."""
        table, g = _wide(self.model.unembedding[self.tokens]), g[..., self.tokens]
        self.head_size += float((self(step.args[0]).abs() @ table.abs().mT * g.abs()).sum())
        return [(step.args[0], g @ table)]

    def enters(self, step: Operation, g: Tensor, value: Tensor) -> None:
        self.constant += float((g * value).sum())

    def _taken(self) -> float:
        """Mutates: what biases have added since the last time."""
        found, self.constant = self.constant, 0.0
        return found

    def _through(self, step: Operation, outs: list[Tensor | None]) -> list[tuple[Numbered, Tensor]]:
        if step.kind == "site":
            self.layer = layer_of(step.site)
        found = super()._through(step, outs)
        constant = self._taken()
        if step.kind == "linear_add":  # what it writes was no value of its own
            (x, by_input), *found = found
            assert outs[0] is not None
            self._append(step.kind, "other", float(self._terms(step, x, by_input, outs[0]).sum()) + constant)
        elif constant:
            self._append("bias", "bias", constant)
        for x, g in found:
            if x.number not in self.stream:
                self._written(step.site if step.kind == "site" else "", x, g)
        return [(x, g) for x, g in found if x.number in self.stream]

    def _append(self, what: str, kind: str, value: float) -> None:
        """Mutates: a part without a site of its own."""
        self.listed.append(LogitPart(what if self.layer is None else f"L{self.layer} {what}", kind, self.layer, None, value))

    def _written(self, site: str, x: Numbered, g: Tensor) -> None:
        """Mutates: the part, or parts, of a value that is added to the stream."""
        value, towards, made = self(x), g, self.makers.get(x.number)
        step, self.writes = made, self.writes + 1
        while step is not None and step.kind != "linear" and len(self._carried(step)) == 1:
            site = site or (step.site if step.kind == "site" else "")
            ((x, g),) = super()._through(step, [g if out == x.number else None for out in step.outs])
            step = self.makers.get(x.number)
        constant, known = self._taken(), re.fullmatch(_SITE, site)
        if known is None or step is None or step.kind != "linear" or step.args[1] not in self.cuts:
            self.size += float((value.abs() * towards.abs()).sum())
            if known is None:
                assert made is not None  # only the embedding has no step
                return self._append(made.kind, "other", float((value * towards).sum()))
            layer, kind = int(known[1]) if known[1] else None, _PARTS[known[2]]
            name = kind if layer is None else f"L{layer} {kind}"
            return self.listed.append(LogitPart(name, kind, layer, None, float((value * towards).sum())))
        ((x, by_input),) = super()._through(step, [g])
        self._divided(step, int(known[1]), _PARTS[known[2]], self._terms(step, x, by_input, g), constant + self._taken())

    def _terms(self, step: Operation, x: Numbered, by_input: Tensor, g: Tensor) -> Tensor:
        """What each input of a product adds. Mutates: counts their sizes."""
        value = self(x)
        self.size += float((value.abs() * (g.abs() @ _wide(step.args[1].weight).abs().mT)).sum())
        return (value * by_input).flatten()

    def _divided(self, step: Operation, layer: int, what: str, terms: Tensor, constant: float) -> None:
        """Mutates: parts of a product, and its bias."""
        heads = self.cuts[step.args[1]]
        kind = "neuron" if not heads else "head" if what == "attention" else f"{what} head"
        each = terms.view(heads or len(terms), -1).sum(1).tolist()
        letter = {"neuron": "N", "head": "H"}.get(kind, "M")
        if step.args[1].bias is not None or constant:
            self.listed.append(LogitPart(f"L{layer} {what} bias", f"{what} bias", layer, None, constant))
        for i, value in reversed(list(enumerate(each))):
            self.listed.append(LogitPart(f"L{layer}{letter}{i}", kind, layer, i, value))


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().cpu().double()
