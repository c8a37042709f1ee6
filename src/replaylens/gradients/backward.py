"""`Backward`: the steps of a forward pass walked in reverse, with one derivative for each kind of step.

The steps are those that the decoder took (`engine/model/program.py`), so the wiring is told once: a part that somebody adds to
a decoder has its gradients, or is refused by name if it asks for something that has no derivative here.

Each path is computed alone, in shapes that follow from its length: on a CPU in portable arithmetic, on a GPU with the products
of the canonical kernels. So its gradients have the same bits in any batch, after any fork and at any number of threads; those
of a CPU have them on every machine. They are float32, whatever the dtype of the weights.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import NoGradient, UnsupportedModel
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import expert_products
from replaylens.engine.model.program import Numbered, Operation, Recorder, leaves
from replaylens.engine.model.sites import STATE
from replaylens.engine.passes.batch import finite
from replaylens.engine.passes.runner import Runner, WholePass
from replaylens.engine.request.capture import HEAD_SITES, PassTap
from replaylens.engine.request.placed import PlacedEdit
from replaylens.gradients import derivatives as by
from replaylens.gradients.derivatives import BackwardProducts, HostProducts
from replaylens.gradients.gradients import Gradients, LogitsFunction, derivative, value_of
from replaylens.kernels import cpu as portable

# ---- backward --------------------------------------------------------------------------------------------------------

Flowing = Iterable[tuple[Any, Tensor]]
"""what a step read, and the gradient of it"""


class Backward:
    """Gradients of one path, from the values of all steps of its pass."""

    def __init__(
        self,
        model: Decoder,
        recorder: Recorder,
        edits: tuple[PlacedEdit, ...],
        asked: frozenset[str],
        products: BackwardProducts,
        own: bool = False,
    ) -> None:
        """asked  the sites whose gradients are kept in `found`
        own    every row's gradient is that of the row itself: nothing passes from one position to another"""
        self.model, self.recorder, self.asked, self.products, self.own = model, recorder, asked, products, own
        self.edits: dict[str, list[PlacedEdit]] = {}
        for edit in edits:
            self.edits.setdefault(edit.site, []).append(edit)
        self.found: dict[str, Tensor] = {}

    def run(self, number: int, g: Tensor) -> dict[str, Tensor]:
        """The gradients at those asked sites that it reaches, from that of a value of the pass."""
        held, left = {number: g}, set(self.asked)
        for step in reversed(self.recorder.steps):
            outs = [held.pop(out, None) for out in step.outs]
            if any(each is not None for each in outs):
                for x, more in self._through(step, outs):
                    held[x.number] = held[x.number] + more if x.number in held else more
            left.discard(step.site if step.kind == "site" else pattern_of_step(step))
            if not left:  # nothing earlier is asked for
                break
        return self.found

    def _through(self, step: Operation, outs: list[Tensor | None]) -> list[tuple[Numbered, Tensor]]:
        """What a step read, and the gradients of it. NoGradient if it has no rule, or its rule leaves something out."""
        if (rule := self.rule(step)) is None or not step.options.keys() <= {"dim", "min", "max", "gated", "silu"}:
            raise self._refused(step)
        if not step.kind.startswith("torch."):
            return [(x, g) for x, g in rule(self, step, *outs) if self._flows(x)]
        try:
            found = [(x, g) for x, g in rule(self, step, *outs) if self._flows(x)]
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:  # a form of it without a rule
            raise self._refused(step) from error
        if Counter(filter(self._flows, map(Numbered, step.reads))) != Counter(x for x, _ in found):
            raise self._refused(step)
        return found

    def rule(self, step: Operation) -> "Callable[..., Flowing] | None":
        """Its derivative. None: there is none."""
        return RULES.get(step.kind)

    def _flows(self, x: Any) -> bool:
        """Whether it has a gradient: floats that a step made, not whole numbers."""
        return isinstance(x, Numbered) and self.recorder.values[x.number].is_floating_point()

    def _refused(self, step: Operation) -> Exception:
        given = f" with {', '.join(step.options)}" if step.options else ""
        return NoGradient(f"No gradient through {step.kind}{given}, which this model's wiring asks for. Use patching.")

    def __call__(self, x: Any) -> Any:
        """What a step reads; numbers as `wide` has them."""
        found = self.recorder.values[x.number] if isinstance(x, Numbered) else x
        return self.wide(found) if isinstance(found, Tensor) and found.is_floating_point() else found

    def wide(self, x: Tensor) -> Tensor:
        return x.float()

    def site(self, step: Operation, g: Tensor) -> Flowing:
        if step.site in self.asked:  # a site that a pass comes to twice is shown as it was the last time
            self.found.setdefault(step.site, g)
        if step.site in self.edits:
            g = through_edits(g, self.recorder.values[step.args[0].number], self.edits[step.site])
        return [(step.args[0], g)]

    # ---- places --------------------------------------------------------------------------------------------------------

    def same(self, step: Operation, g: Tensor) -> Tensor:
        """Of what only has another shape, or another precision: not of numbers that are read as others."""
        before, after = (self.recorder.values[number].dtype for number in (step.args[0].number, step.outs[0]))
        if before != after and (step.kind != "torch.to" or after.is_complex or before.is_complex):
            raise self._refused(step)
        return g.reshape(self(step.args[0]).shape)

    def parts(self, step: Operation, *outs: Tensor | None) -> Flowing:
        """Of split and chunk."""
        return [(step.args[0], torch.cat(self._pieces(step, outs), _dim(step, 2)))]

    def unbind(self, step: Operation, *outs: Tensor | None) -> Flowing:
        return [(step.args[0], torch.stack(self._pieces(step, outs), _dim(step, 1)))]

    def _pieces(self, step: Operation, outs: tuple[Tensor | None, ...]) -> list[Tensor]:
        whole = zip(map(Numbered, step.outs), outs, strict=True)
        return [torch.zeros_like(self(x)) if g is None else g for x, g in whole]

    def cat(self, step: Operation, g: Tensor) -> Flowing:
        dim = _dim(step, 1)
        return zip(step.args[0], g.split([self(x).shape[dim] for x in step.args[0]], dim), strict=True)

    def stack(self, step: Operation, g: Tensor) -> Flowing:
        return zip(step.args[0], g.unbind(_dim(step, 1)), strict=True)

    def item(self, step: Operation, g: Tensor) -> Flowing:
        x, at = step.args
        whole = torch.zeros_like(self(x))
        if isinstance(at, Tensor | Numbered):
            whole.index_put_((self(at),), g, accumulate=True)
        elif all(isinstance(each, int | slice | EllipsisType | None) for each in (at if isinstance(at, tuple) else (at,))):
            whole[at] = g  # every place is read once
        else:
            raise self._refused(step)
        return [(x, whole)]

    def scattered(self, step: Operation, g: Tensor) -> Flowing:
        x, dim, index, put = step.args
        return [(x, g.scatter(dim, self(index), 0.0)), (put, g.gather(dim, self(index)))]

    def gathered(self, step: Operation, g: Tensor) -> Flowing:
        x, dim, index = map(self, step.args)
        places = list(torch.ones_like(index).nonzero(as_tuple=True))
        places[dim] = index.flatten()  # sums in one order, also on a GPU, where torch's own has none
        return [(step.args[0], torch.zeros_like(x).index_put_(tuple(places), g.flatten(), accumulate=True))]

    # ---- arithmetic ------------------------------------------------------------------------------------------------------

    def summed(self, g: Tensor, like: Tensor) -> Tensor:
        """The gradient of what was repeated over some dimensions: its sum over these."""
        for dim in range(g.dim()):
            if (own := dim - g.dim() + like.dim()) < 0 or like.shape[own] != g.shape[dim]:
                g = self.products.total(g.transpose(dim, -1)).transpose(dim, -1)
        return g.reshape(like.shape)

    def added(self, step: Operation, g: Tensor) -> Flowing:
        x, y = step.args
        return [(each, self.summed(g, self(each))) for each in (x, y) if isinstance(each, Numbered)]

    def subtracted(self, step: Operation, g: Tensor) -> Flowing:
        x, y = step.args if step.kind == "torch.sub" else step.args[::-1]
        return [(each, self.summed(way, self(each))) for each, way in ((x, g), (y, -g)) if isinstance(each, Numbered)]

    def divided(self, step: Operation, g: Tensor) -> Flowing:
        a, b = map(self, step.args)
        ways = (g / b, -g * a / (b * b) if isinstance(b, Tensor) else g)
        return [(x, self.summed(way, self(x))) for x, way in zip(step.args, ways, strict=True) if isinstance(x, Numbered)]

    def product(self, step: Operation, g: Tensor) -> Flowing:
        x, y = step.args
        pairs = ((x, y), (y, x))
        return [(x, self.summed(g * self(other), self(x))) for x, other in pairs if isinstance(x, Numbered)]

    def norms(self, step: Operation, *outs: Tensor | None) -> Flowing:
        given = zip(step.args[: len(outs)], step.args[len(outs) :], outs, strict=True)
        return [(x, by.through_norm(g, self(x), norm, self.products)) for x, norm, g in given if g is not None]

    def scaled_norms(self, step: Operation, *outs: Tensor | None) -> Flowing:
        *given, norm, scales = step.args
        every = zip(given, scales, outs, strict=True)
        return [(x, by.through_norm(g * scale, self(x), norm, self.products)) for x, scale, g in every if g is not None]

    def gated_norm(self, step: Operation, g: Tensor) -> Flowing:
        x, gate, norm = map(self, step.args)
        open_, slope = by.activation(gate, "silu", self.products)
        by_gate = g * (x * by.norm_factor(x, norm, self.products) * norm.weight) * slope
        return [(step.args[1], by_gate), (step.args[0], by.through_norm(g * open_, x, norm, self.products))]

    def by_head(self, step: Operation, g: Tensor) -> Flowing:
        weight = self(step.args[1])
        return [(step.args[0], self.products.batched(g.transpose(0, 1), weight.mT).transpose(0, 1))]

    # ---- parts of a block ------------------------------------------------------------------------------------------------

    def attend(self, step: Operation, g: Tensor) -> Flowing:
        heads, spec = step.args
        q, k, v = map(self, (heads.q, heads.k, heads.v))
        width, want = g.shape[-1], (pattern := pattern_of_step(step)) in self.asked  # of a latent, a part is the value
        given = g, q, k, v[..., :width], spec, want, self.products, self.own, heads.sinks
        dq, dk, dv, dp = by.through_attention(*given)
        if dp is not None:
            self.found.setdefault(pattern, dp)
        return [(heads.q, dq), (heads.k, dk), (heads.v, torch.nn.functional.pad(dv, (0, v.shape[-1] - width)))]

    def experts_hidden(self, step: Operation, g: Tensor) -> Flowing:
        x, chosen, experts, kind = map(self, step.args)
        bias = None if experts.up_bias is None else experts.up_bias.float()
        wide = expert_products(x, chosen, self.products.weight(experts, "up"), bias, self.products.plain)
        return self._by_experts(step, by.through_gate(g, wide, kind, experts.gated, self.products), "up")

    def experts_out(self, step: Operation, g: Tensor) -> Flowing:
        return self._by_experts(step, g, "down")

    def _by_experts(self, step: Operation, g: Tensor, name: str) -> Flowing:
        x, chosen, experts = map(self, step.args[:3])
        weight = self.products.weight(experts, name, turned=True)
        g = expert_products(g, chosen, weight, None, self.products.plain)
        return [(step.args[0], g if x.dim() == 3 else by.ordered_sum(g))]

    def combine(self, step: Operation, g: Tensor) -> Flowing:
        (outs, weights), g = map(self, step.args), g[:, None]
        return zip(step.args, (weights[..., None] * g, self.products.total(outs * g)[..., 0]), strict=True)

    def rates(self, step: Operation, by_strength: Tensor | None, by_decay: Tensor | None) -> Flowing:
        """Of scale sigmoid(strength), and of -exp(a_log) softplus(step + step_bias)."""
        x, a_log, step_bias, scale = map(self, step.args)
        strength, before = x.chunk(2, dim=-1)
        open_ = self.products.apply("sigmoid", strength)
        found = [torch.zeros_like(strength), torch.zeros_like(before)]
        if by_strength is not None:
            found[0] = by_strength * (scale * open_ * (1 - open_))
        if by_decay is not None:
            slope = self.products.apply("sigmoid", before + step_bias)
            found[1] = by_decay * (-self.products.apply("exp", a_log) * slope)
        return [(step.args[0], torch.cat(found, dim=-1))]

    def recur(self, step: Operation, g: Tensor) -> Flowing:
        given = step.args[0]
        q, k, v, decay = map(self, (given.q, given.k, given.v, given.decay))
        strength = None if given.strength is None else self(given.strength)
        return by.through_recurrence(g, given, q, k, v, strength, decay, self.own)

    def short_conv(self, step: Operation, g: Tensor) -> Flowing:
        x, conv = map(self, step.args[:2])
        return [(step.args[0], by.through_conv(g, x, conv, step.options.get("silu", False), self.products, self.own))]


def _dim(step: Operation, place: int) -> int:
    """The dimension that a function of torch was given, by name or as its argument at a place."""
    found: int = step.options.get("dim", step.args[place] if len(step.args) > place else 0)
    return found


def pattern_of_step(step: Operation) -> str:
    """The site of an attention's pattern; empty: the step is none."""
    return f"blocks.{step.args[1].layer}.attn.hook_pattern" if step.kind == "attend" else ""


def one(rule: Callable[[Backward, Operation, Tensor, Tensor], Tensor]) -> Callable[..., Flowing]:
    """A rule for the first thing that a step reads: (walk, step, that, gradient of the result) -> its gradient."""
    return lambda back, step, g: [(step.args[0], rule(back, step, back(step.args[0]), g))]


def _of_result(slope: Callable[[Tensor], Tensor]) -> Callable[..., Flowing]:
    """A rule for a function of every number, from its slope as a function of its result."""
    return one(lambda back, step, x, g: g * slope(back(Numbered(step.outs[0]))))


def _torch(*names: str) -> tuple[str, ...]:
    return tuple(f"torch.{name}" for name in names)


_SAME = _torch("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "to")
_MOVED = _torch(
    "split", "chunk", "unbind", "cat", "stack", "__getitem__", "add", "__radd__", "sub", "__rsub__", "neg", "transpose"
)
RULES: dict[str, Callable[..., Flowing]] = {
    "site": Backward.site,
    **dict.fromkeys(_SAME, one(lambda back, step, x, g: back.same(step, g))),
    "torch.transpose": one(lambda back, step, x, g: g.transpose(*step.args[1:])),
    **dict.fromkeys(_torch("split", "chunk"), Backward.parts),
    "torch.unbind": Backward.unbind,
    "torch.cat": Backward.cat,
    "torch.stack": Backward.stack,
    "torch.__getitem__": Backward.item,
    "torch.gather": Backward.gathered,
    "torch.scatter": Backward.scattered,
    "torch.masked_fill": one(lambda back, step, x, g: back.summed(g.masked_fill(back(step.args[1]), 0.0), x)),
    **dict.fromkeys(("add", "torch.add", "torch.__radd__"), Backward.added),
    **dict.fromkeys(("torch.mul", "torch.__rmul__"), Backward.product),
    "torch.neg": one(lambda back, step, x, g: -g),
    **dict.fromkeys(("torch.sub", "torch.__rsub__"), Backward.subtracted),
    **dict.fromkeys(("torch.div", "torch.__truediv__"), Backward.divided),
    "torch.clamp": one(lambda back, step, x, g: back.summed(g * (back(Numbered(step.outs[0])) == x), x)),
    "linear": one(lambda back, step, x, g: back.products.linear(g, step.args[1])),
    "linear_add": lambda back, step, g: [(step.args[0], back.products.linear(g, step.args[1])), (step.args[2], g)],
    "unembed": one(lambda back, step, x, g: back.products.plain(g, back.products.weight(*back.model.head, turned=True))),
    "by_head": Backward.by_head,
    "norm": Backward.norms,
    "norm_pair": Backward.norms,
    "scaled_norms": Backward.scaled_norms,
    "gated_norm": Backward.gated_norm,
    "rotate": one(lambda back, step, x, g: by.through_rotary(g, step.args[1])),
    "softcap": one(lambda back, step, x, g: by.through_softcap(g, back(Numbered(step.outs[0])), step.args[1])),
    "activate": one(
        lambda back, step, x, g: by.through_gate(g, x, step.args[1], step.options.get("gated", step.args[-1]), back.products)
    ),
    "sigmoid": _of_result(lambda y: y * (1 - y)),
    "exp": _of_result(lambda y: y),
    "softplus": one(lambda back, step, x, g: g * back.products.apply("sigmoid", x)),
    "spread": one(lambda back, step, x, g: g.gather(-1, back(step.args[1]))),
    "weigh": one(lambda back, step, x, g: by.through_weights(g, x, back(step.args[1]), step.args[2], back.products)),
    "experts_hidden": Backward.experts_hidden,
    "experts_out": Backward.experts_out,
    "combine": Backward.combine,
    "attend": Backward.attend,
    "rates": Backward.rates,
    "recur": Backward.recur,
    "short_conv": Backward.short_conv,
}
"""by kind"""
BY_SHAPE = frozenset(("site", "add", "linear", "linear_add", "unembed", "rotate", *_SAME, *_MOVED))
"""kinds whose rules read no value of a float, only its shape"""
BY_RESULT = frozenset(("torch.clamp", "softcap", "sigmoid", "exp"))
"""kinds whose rules read the result"""


class Held(Backward):
    """Of what is linear once the scales of norms are held: everything that enters, times its gradient, adds up to the result.

    A product of two values has no rule, nor has a function of one.
    """

    @cached_property
    def makers(self) -> dict[int, Operation]:
        """Number -> the step that it is a result of."""
        return {out: step for step in self.recorder.steps for out in step.outs}

    def logits(self, number: int) -> tuple[int, bool]:
        """The number of the logits [rows, vocab] that a pass results in, or of what their softcap reads; and whether it is
        that."""
        while (step := self.makers[number]).kind == "torch.__getitem__":  # the last row
            number = step.reads[0]
        return (step.reads[0], True) if step.kind == "softcap" else (number, False)

    def rule(self, step: Operation) -> Callable[..., Flowing] | None:
        if step.kind in _SCALED:  # by what no step made
            value = step.args[0] if step.kind in _torch("div", "__truediv__") else Numbered(step.reads[0])
            return RULES[step.kind] if len(step.reads) == 1 and isinstance(value, Numbered) else None
        if step.kind == "torch.__getitem__" and any(isinstance(x, Tensor | Numbered) for x in leaves(step.args[1])):
            return None  # rows in another order
        return None if step.kind == "torch.to" and not self._flows(step.args[0]) else HELD.get(step.kind)

    def shape(self, x: Numbered) -> tuple[int, ...]:
        """Of a gradient of it."""
        return tuple(self.recorder.values[x.number].shape)

    def _through(self, step: Operation, outs: list[Tensor | None]) -> list[tuple[Numbered, Tensor]]:
        found = super()._through(step, outs)
        if any(tuple(g.shape) != self.shape(x) for x, g in found):  # rows became columns, or another number
            raise self._refused(step)
        return found

    def enters(self, step: Operation, g: Tensor, value: Tensor) -> None:
        """Called with what a step adds that no step made, and the gradient of its result."""

    def added(self, step: Operation, g: Tensor) -> Flowing:
        found = list(RULES[step.kind](self, step, g))
        for each in step.args:
            if not isinstance(each, Numbered):
                value = self(torch.as_tensor(each))
                if value.dim() == g.dim() and len(value) > 1:  # a row of its own for each row
                    raise self._refused(step)
                left = each is step.args[0]
                self.enters(step, g, -value if step.kind == ("torch.__rsub__" if left else "torch.sub") else value)
        return found

    def linear(self, step: Operation, g: Tensor) -> Flowing:
        if (bias := step.args[1].bias) is not None:
            self.enters(step, g, self(bias))
        return RULES[step.kind](self, step, g)

    def norm(self, step: Operation, g: Tensor) -> Flowing:
        x, norm = step.args
        if norm.bias is not None:
            self.enters(step, g, self(norm.bias))
        return [(x, self.through_norm(step, g * self(norm.weight)))]

    def norm_parts(self, step: Operation, by_scale: Tensor | None, g: Tensor) -> Flowing:
        """Of the result before the weights."""
        return [(step.args[0], self.through_norm(step, g))]

    def through_norm(self, step: Operation, g: Tensor) -> Tensor:
        """The gradient of what a norm reads, from that of its result before the weights."""
        centred = g - self.products.total(g) / g.shape[-1] if step.args[1].kind == "layer" else g
        return centred * self.scale(step)

    def scale(self, step: Operation) -> Tensor:
        """What a norm multiplies rows by: [..., 1]"""
        x, norm = self.wide(self.recorder.values[step.args[0].number]), step.args[1]
        x = x - self.products.total(x) / x.shape[-1] if norm.kind == "layer" else x
        return by.norm_factor(x, norm, self.products)


_SCALED = _torch("mul", "__rmul__", "div", "__truediv__")
HELD: dict[str, Callable[..., Flowing]] = {
    **{kind: rule for kind, rule in RULES.items() if kind in BY_SHAPE - {"unembed"}},
    "by_head": RULES["by_head"],
    **dict.fromkeys(("add", *_torch("add", "__radd__", "sub", "__rsub__")), Held.added),
    **dict.fromkeys(("linear", "linear_add"), Held.linear),
    "norm": Held.norm,
    "norm_parts": Held.norm_parts,
}
"""by kind, where scales are held"""


def forget(recorder: Recorder, edited: frozenset[str]) -> None:
    """Mutates: of the values that no rule reads, only the shapes stay. edited: sites with edits, whose rule reads the value"""
    needed = set[int]()
    for step in recorder.steps:
        if step.kind not in BY_SHAPE or (step.kind == "site" and step.site in edited):
            needed.update(step.reads)
        if step.kind in BY_RESULT:
            needed.update(step.outs)
    for number, x in recorder.values.items():
        if number not in needed and x.is_floating_point():
            recorder.values[number] = x.new_empty(()).expand(x.shape)


def through_edits(g: Tensor, unedited: Tensor, edits: Sequence[PlacedEdit]) -> Tensor:
    """The gradient [rows, ...] before a site's edits. An edit works on single rows.

    Added vectors let a gradient pass, replaced rows stop it, projections project it. Computed on the host.

    unedited  the site's value before the edits
    """
    value, found = (x.to("cpu", torch.float32, copy=True) for x in (unedited, g))
    steps = []
    for edit in (_rounded(edit, unedited.dtype) for edit in edits):
        if positions := edit.positions(0, len(value)):
            steps.append((edit, positions, value[positions]))
            value[positions] = edit.apply(value[positions], positions)
    for edit, positions, rows in reversed(steps):
        found[positions] = _through_edit(found[positions], rows, edit, positions)
    return found.to(g.device)


def _through_edit(g: Tensor, rows: Tensor, edit: PlacedEdit, positions: list[int]) -> Tensor:
    """The gradient [n, ...] of rows before one edit: of those, and of those heads, that it changes.

    keep_norm:  y = e |x| / |e|, e = x + v      dx = (g - e (g . e) / |e|^2) |x| / |e| + x (g . e) / (|x| |e|)
    match_norm: y = x + e, e = c v |x| / |v|    dx = g + x (g . e) / |x|^2
    """
    marked = replace(edit, op="set", value=rows.new_full(rows.shape[1:], torch.nan), keep_norm=False, match_norm=False)
    changed = marked.apply(rows, positions).isnan()
    plain = replace(edit, keep_norm=False, when=None, heads=())
    dx = g
    if edit.op in ("reweight", "project_out"):  # linear, and symmetric
        dx = plain.apply(g, positions)
    elif edit.op != "add":
        dx = torch.zeros_like(g)
    elif edit.match_norm:
        e = plain.apply(rows, positions) - rows
        dx = g + rows * (portable.row_sums(g * e) / portable.row_sums(rows * rows))
    elif edit.keep_norm:
        e = plain.apply(rows, positions)
        old, new = (portable.apply("sqrt", portable.row_sums(x * x)) for x in (rows, e))
        along = portable.row_sums(g * e) / new
        dx = (g - e / new * along) * (old / new) + rows / old * along
    return torch.where(changed, dx, g)


def _rounded(edit: PlacedEdit, dtype: torch.dtype) -> PlacedEdit:
    """The edit with its tensors as the pass uses them: a condition must not hold here that did not hold there."""
    if dtype == torch.float32:
        return edit
    value, when = (x if x is None else x.to(dtype).float() for x in (edit.value, edit.when))
    return replace(edit, value=value, when=when)


# ---- tape ------------------------------------------------------------------------------------------------------------
# `Tape`: the forward pass of one path, as its gradients need it.


_ENTRY = "embed.hook_out"
"""the first step: what came before is no part of the path's gradients"""


@dataclass(frozen=True, eq=False)
class Tape:
    """The values of one path's pass, to the bits of committed rows. Takes as much memory as a step of training."""

    runner: Runner
    tokens: tuple[int, ...]
    edits: tuple[PlacedEdit, ...]
    asked: tuple[str, ...]
    """the sites whose gradients can be computed, in model order"""
    forward: WholePass
    """with the values of the asked sites"""
    recorder: Recorder | None
    """the steps of the pass; None: without gradients"""

    @property
    def logits(self) -> Tensor:
        """Of the last row: [vocab], on the host, where metrics are computed."""
        return self.forward.logits.cpu()

    def value(self, site: str) -> Tensor:
        """A copy of the value at an asked site, to the bits of a capture: [rows, ...], on the host."""
        return _in_order((site,), self.forward.values, len(self.tokens))[site]

    @classmethod
    @torch.inference_mode()
    def of(
        cls, runner: Runner, tokens: list[int], edits: tuple[PlacedEdit, ...], asked: tuple[str, ...], backward: bool = True
    ) -> "Tape":
        """Computes the path alone, in one pass. Precondition: no other thread computes on the runner.

        backward  False: only values and metrics will be read, so nothing else is kept
        """
        if not runner.one_device:
            raise NoGradient("No gradient through layers on several devices. Load the model on one, or with ranks.")
        if runner.kernels and runner.model.config.mixer is not None:
            raise NoGradient("No gradient through recurrent layers on a GPU. Use device='cpu'.")
        if runner.kernels and (inside := [site for site in asked if site.endswith(("hook_pattern", "hook_attn_scores"))]):
            raise NoGradient(f"No gradient at {inside[0]} on a GPU, whose kernels never store it. Use device='cpu'.")
        if fixed := [edit.site for edit in edits if edit.site.endswith(("attn.hook_pattern", STATE))]:
            rather = "mixer.hook_read or mixer.hook_v" if fixed[0].endswith(STATE) else "attn.hook_z or attn.hook_v"
            raise NoGradient(f"No gradient through an edit of {fixed[0]}. Edit {rather} instead.")
        edits = tuple(known for edit in edits if (known := edit.on_path(tokens)) is not None)
        head = [site for site in asked if site in HEAD_SITES]
        recorder = Recorder(runner.model, frozenset((*head, _ENTRY))) if backward else None
        try:
            forward = runner.whole(tokens, edits, PassTap(frozenset(asked) - frozenset(head)), recorder)
            if recorder is not None and not recorder.begins_with(_ENTRY):
                raise NoGradient(f"No gradient through a wiring that does not begin with the site {_ENTRY}. Tap it there.")
            if untold := [site for site in asked if site not in head and site not in forward.values]:
                raise NoGradient(f"No gradient at {untold[0]}, which this model's wiring does not pass. Ask for another site.")
        except UnsupportedModel as error:
            raise NoGradient(str(error)) from None
        if head:
            forward.values.update(runner.head(forward.residual, head))
        if recorder is not None:
            forget(recorder, frozenset(edit.site for edit in edits))
        return cls(runner, tuple(tokens), edits, asked, forward, recorder)

    def measure(self, function: LogitsFunction) -> float:
        """The metric alone, to the bits of `Gradients.value`."""
        with modes.canonical():
            return float(value_of(function, self.logits))

    @torch.inference_mode()
    def gradients(self, function: LogitsFunction, aliases: Mapping[str, str], certified: bool) -> Gradients:
        """The gradients of a metric at the asked sites. On a CPU in portable arithmetic.

        On a GPU, metric and edits are differentiated on the host, and everything else on the device. Results are on the host.
        """
        num_keys, products = len(self.tokens), self.products()
        with modes.canonical():
            value, g = derivative(function, self.logits)
            found = self._back(products).run(self.number(self.forward.logits), g.to(self.runner.device))
            for site in self.asked:
                found[site] = finite(self._whole(found.get(site), site), f"gradients at {site}")
            kept = _in_order(self.asked, found, num_keys)
        values = _in_order(self.asked, self.forward.values, num_keys)
        return Gradients(value, self.tokens, certified and products.certified, values, kept, aliases)

    @torch.inference_mode()
    def own_jacobians(self, picked: Sequence[int], tell: Callable[[int], object]) -> Tensor:
        """The sums over some positions of the Jacobians of the final stream by the streams at the asked sites, each at the same
        position: [sites, d_model (of the final stream), d_model], on the host. On a CPU in portable arithmetic.

        What a position does to the final stream at the same position passes through no other one. So one backward pass, in
        which rows keep to themselves, gives one line of the Jacobians of all positions and layers.

        tell  called after each line
        """
        width, device = self.runner.model.config.d_model, self.runner.device
        out, products = torch.empty(len(self.asked), width, width, dtype=torch.float32), self.products()
        with modes.canonical():
            for line in range(width):
                g = torch.zeros(self.forward.residual.shape, dtype=torch.float32, device=device)
                g[:, line] = 1.0
                found = self._back(products, own=True).run(self.number(self.forward.residual), g)
                for number, site in enumerate(self.asked):
                    rows = finite(found[site], f"Jacobians at {site}")[list(picked)].cpu()
                    out[number, line] = portable.row_sums(rows.t().contiguous())[:, 0]
                tell(line)
        return out

    def number(self, x: Tensor) -> int:
        """Of a result of the pass."""
        assert self.recorder is not None  # `of` was told to keep what gradients need
        return self.recorder.number(x)

    def _back(self, products: BackwardProducts, own: bool = False) -> Backward:
        assert self.recorder is not None
        return Backward(self.runner.model, self.recorder, self.edits, frozenset(self.asked), products, own)

    def _whole(self, g: Tensor | None, site: str) -> Tensor:
        """The gradient at a site, of all rows: zeros for those that it does not reach."""
        whole = torch.zeros_like(self.forward.values[site], dtype=torch.float32)
        if g is None or len(g) == len(whole):
            return whole if g is None else g
        whole[-len(g) :] = g
        return whole

    def products(self) -> BackwardProducts:
        """Those of a backward pass on the runner's device."""
        if not self.runner.kernels:
            return HostProducts(self.runner.products)
        from replaylens.gradients.cuda import KernelProducts  # needs triton

        return KernelProducts()


def _in_order(sites: tuple[str, ...], tensors: Mapping[str, Tensor], num_keys: int) -> dict[str, Tensor]:
    """Copies on the host that autograd can use, sharing no memory. Patterns have room for whole blocks of keys, cut here."""
    with torch.inference_mode(False):
        cut = {site: tensors[site][..., :num_keys] if site.endswith("hook_pattern") else tensors[site] for site in sites}
        return {site: x.to("cpu", copy=True, memory_format=torch.contiguous_format) for site, x in cut.items()}
