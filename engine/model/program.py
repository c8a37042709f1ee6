"""`Recorder`: writes down what a pass of a decoder asks for, step by step. Whatever has to know the wiring walks these steps.

A step is a method of `Ops`, a function of torch, or a site. So nothing is told twice: a part that somebody adds to a decoder is
among the steps, and a walk that has no rule for it refuses by name.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, count
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, ModelConfig, Routing, choice_scores
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Experts, Linear, ReadOnly, Rotary
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, Recurrence, Tap, wanted
from replaylens.engine.model.sites import layer_of, table

# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbered:
    """What a step reads: the result of an earlier one, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a pass."""

    kind: str
    """a method of `Ops`, "site", or a function of torch ("torch.add")"""
    args: tuple[Any, ...]
    """with a `Numbered` in the place of each tensor that steps made; weights and settings are themselves"""
    options: Mapping[str, Any]
    outs: tuple[int, ...]
    """the numbers of its results"""

    @property
    def site(self) -> str:
        """The name of the site. Precondition: it is one."""
        return str(self.args[1])

    @property
    def reads(self) -> list[int]:
        return [x.number for x in leaves((self.args, tuple(self.options.values()))) if isinstance(x, Numbered)]


def leaves(tree: Any) -> Iterator[Any]:
    """What is in tuples, lists, slices, and the inputs of attentions and recurrences."""
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    elif isinstance(tree, Heads | Recurrence):
        tree = tuple(getattr(tree, field.name) for field in fields(tree))
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from leaves(each)
    else:
        yield tree


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with its `leaves` replaced."""
    if isinstance(tree, slice):
        return slice(*(mapped(x, leaf) for x in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple | list):
        found = (mapped(x, leaf) for x in tree)
        return list(found) if isinstance(tree, list) else tuple(found)
    if isinstance(tree, Heads | Recurrence):
        return replace(tree, **{field.name: mapped(getattr(tree, field.name), leaf) for field in fields(tree)})
    return leaf(tree)


# ---- recorder --------------------------------------------------------------------------------------------------------


class Recorder(TorchFunctionMode):
    """Writes down the steps of what runs within it, on `ops` and `tap` of its own."""

    def __init__(
        self, model: nn.Module, sites: frozenset[str] = frozenset(), weights: bool = False, last: bool = False
    ) -> None:
        """sites  to be steps, besides those that the tap wants
        weights  what is made of weights alone is a step, too
        last  of results, a copy of the last row is kept and nothing else"""
        super().__init__()
        self.sites, self.weights, self.last, self.steps = sites, weights, last, list[Operation]()
        self.values: dict[int, Tensor] = {}
        """all results, by number"""
        self._numbers: dict[int, int] = {}
        self._fixed: dict[int, Tensor] = {id(x): x for x in model.buffers()}
        """buffers, and what is made of weights alone; by address, hence held"""
        self.inside: dict[str, tuple[int, ...]] = {}
        """sites that are shown within a step, and the shapes of their rows"""
        self._passed: set[str] = set()
        self.quiet = self._reads = False

    def number(self, x: Tensor) -> int:
        """Of a result."""
        if id(x) not in self._numbers:
            raise UnsupportedModel("The wiring of this model cannot be followed: its result comes from no site.")
        return self._numbers[id(x)]

    def passes(self, site: str) -> None:
        """Mutates: a site is reached. UnsupportedModel if it was before: an edit there would be made twice."""
        if site in self._passed:
            raise UnsupportedModel(
                f"The wiring of this model passes the site {site} twice. Give every round sites of its own, in a `Part` of a "
                "layer of its own (`ModelConfig.weights_of`)."
            )
        self._passed.add(site)

    def begins_with(self, site: str) -> bool:
        """Whether a site is the first step."""
        return bool(self.steps) and self.steps[0].kind == "site" and self.steps[0].site == site

    def ops(self, ops: Any) -> "RecordedOps":
        """Ops that do as these, and write it down."""
        return RecordedOps(self, ops)

    def tap(self, tap: Tap | None) -> "RecordedTap":
        """A tap that does as this one, and writes down every site."""
        return RecordedTap(self, tap)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        name = str(func) if isinstance(func, torch._ops.OperatorBase | torch._ops.OpOverloadPacket) else name
        given = [x for x in leaves((args, tuple((kwargs or {}).values()))) if isinstance(x, Tensor)]
        numbered = any(id(x) in self._numbers for x in given)
        if numbered and name in _LEAVES and any(x.is_floating_point() for x in given):
            raise UnsupportedModel(f"The wiring of this model takes numbers out of the pass, by {name}. Compute with torch.")
        before = list(map(_version, given))
        found = func(*args, **(kwargs or {}))
        if numbered and (name == "__set__" or list(map(_version, given)) != before):
            raise UnsupportedModel(f"The wiring of this model changes a value in place, by {name}. Make a new one instead.")
        self.keep(f"torch.{name}", args, kwargs or {}, found)
        return found

    def run(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...], options: Any, *unseen: Any) -> Any:
        """Call a function as one step. `unseen`: arguments that are no part of it"""
        if self.quiet:
            return function(*args, *unseen, **options)
        self.quiet = True
        try:
            with torch._C.DisableTorchFunction():  # what a step does inside is none: a quarter of a pass, if it were looked at
                found = function(*args, *unseen, **options)
        finally:
            self.quiet = False
        self.keep(kind, args, options, found)
        return found

    def keep(self, kind: str, args: Any, options: Mapping[str, Any], found: Any) -> None:
        """Mutates: writes down a step. None is what is made of weights alone, or returns what it was given."""
        outs = [x for x in (found if isinstance(found, tuple | list) else (found,)) if isinstance(x, Tensor)]
        if not outs or all(id(x) in self._numbers for x in outs):
            return
        if kind == "site" and id(args[0]) not in self._numbers:
            self._known(kind, args[0])
            self._new(args[0])
        self._reads, known = False, partial(self._known, kind)
        given = mapped(tuple(args), known), {name: mapped(x, known) for name, x in options.items()}
        if self._reads or self.weights:
            self.steps.append(Operation(kind, *given, tuple(map(self._new, outs))))
        else:
            self._fixed.update((id(x), x) for x in outs)

    def _new(self, x: Tensor) -> int:
        number = self._numbers[id(x)] = len(self.values) + 1
        self.values[number] = x
        if self.last:  # another tensor may have its address later
            finalize(x, self._numbers.pop, id(x), None)
            with torch._C.DisableTorchFunction():
                self.values[number] = x[-1:].clone() if x.dim() else x.clone()
        return number

    def _known(self, kind: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if (number := self._numbers.get(id(x))) is not None:
            self._reads = True
            return Numbered(number)
        weight = isinstance(x, nn.Parameter | ReadOnly) or id(x) in self._fixed
        if weight or not self.steps or not x.is_floating_point():
            return x
        raise UnsupportedModel(
            f"The wiring of this model cannot be followed: {kind} reads numbers that neither Ops nor torch made within the "
            "pass. Compute them there, with constants as buffers of the module, or use patching."
        )


_LEAVES = frozenset(("item", "tolist", "numpy", "data", "__float__", "__array__", "__complex__", "untyped_storage"))
"""functions that give out numbers which nobody follows"""


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if x.is_inference() else x._version


class RecordedOps:
    """Ops whose calls are steps. What can be done in one step or in several, to the bit, is several."""

    def __init__(self, recorder: Recorder, ops: Any) -> None:
        self._recorder, self._ops = recorder, ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._ops, name)
        return lambda *args, **options: self._recorder.run(name, function, args, options)

    def norm_heads(self, *given: Any) -> bool:
        return False

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Any:
        return self.activate(self.linear(x, linear), kind, gated)

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Any:
        mixed = self._recorder.run("combine", self._ops.combine, (outs, weights), {})
        return mixed if residual is None else self.add(residual, mixed)

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Any:
        chosen = self.choose(self.choice_scores(logits, routing, correction), routing)
        return chosen, self.weigh(logits, chosen, routing)

    def attend(self, heads: Heads, spec: Any, observe: Observer | None = None) -> Any:
        q, k = heads.q, heads.k
        if heads.norms is not None:
            q, k = self.norm_pair(q, k, *heads.norms)
        if heads.rotary is not None:
            q, k = self.rotate(q, heads.rotary), self.rotate(k, heads.rotary)
        v = k if heads.v is heads.k else heads.v
        heads = replace(heads, q=q, k=k, v=v, rotary=None, norms=None, joined=None)
        return self._recorder.run("attend", self._ops.attend, (heads, spec), {}, observe)

    def recur(self, given: Recurrence, layer: int, observe: Any = None) -> Any:
        return self._recorder.run("recur", self._ops.recur, (given, layer), {}, observe)


class RecordedTap:
    """A tap whose sites are steps. What an attention shows of its inside is none."""

    def __init__(self, recorder: Recorder, tap: Tap | None) -> None:
        self._recorder, self._tap = recorder, tap

    def wants(self, site: str) -> bool:
        return site in self._recorder.sites or wanted(self._tap, site)

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self._recorder.passes(site)
        if self._recorder.quiet:
            self._recorder.inside[site] = tuple(value.shape[1:])
        shown: Tensor = self._recorder.run("site", self._shown, (value, site), {})
        return shown

    def _shown(self, value: Tensor, site: str) -> Tensor:
        """Another tensor, as after an edit: the wiring looks whether it is the same one."""
        shown = self._tap(site, value) if self._tap is not None and self._tap.wants(site) else value
        return shown.view_as(shown) if shown is value else shown


# ---- program ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """The steps of one pass over a whole sequence with every site wanted, as a function of the config alone."""

    steps: tuple[Operation, ...]
    shapes: Mapping[int, tuple[int, ...]]
    """of every value, by number"""
    inside: Mapping[str, tuple[int, ...]]
    """sites within a step, which shows them, and the shapes of their rows"""
    names: Mapping[int, str]
    """of weights, tables and parts of the model, by address"""
    rows: int
    """of the sequence; no size of the model"""
    model: Decoder
    """holds the names"""
    embedded: int
    """the number of what leaves the embedding"""

    @classmethod
    def of(cls, kind: type[Decoder], config: ModelConfig) -> "Program":
        """Of a class of decoders. Nothing is computed."""
        return cls._recorded(kind.hollow(config))

    @classmethod
    def of_wiring(cls, model: Decoder) -> "Program":
        """Of a decoder, whoever wrote it. Nothing is computed."""
        return cls._recorded(model.hollowed())

    @classmethod
    def _recorded(cls, model: Decoder) -> "Program":
        """Of a hollow model. Mutates it."""
        config = model.config
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:  # no memory, and on the device of the tables of positions
                    module._parameters[name] = nn.Parameter(_empty(weight.shape), requires_grad=False)
        sizes = {size for weight in model.parameters() for size in weight.shape}
        rows = next(n for n in count(97) if n not in sizes)
        tokens, positions = (torch.arange(rows) % config.vocab_size for _ in range(2))
        recorder = Recorder(model, frozenset(table(config).sites), weights=True)
        ops, tap = recorder.ops(_Shapes()), recorder.tap(None)
        try:
            with torch.no_grad(), recorder:
                x = model.embedding(tokens, positions, tap)
                embedded = recorder.number(x)
                model.logits(model.run_blocks(x, positions, ops, tap, 0, config.num_layers), ops, tap)
        except RuntimeError as e:
            raise UnsupportedModel(f"The wiring of this model cannot be written down without numbers: {e}.") from e
        known = chain(model.named_modules(), model.named_parameters(), model.named_buffers())
        names = {id(each): name for name, each in (*known, ("tokens", tokens), ("positions", positions))}
        shapes = {number: tuple(x.shape) for number, x in recorder.values.items()}
        return cls(tuple(recorder.steps), shapes, recorder.inside, names, rows, model, embedded)

    @property
    def sites(self) -> dict[str, tuple[int, ...]]:
        """Name -> the shape of one row; 0 for the number of keys."""
        return {step.site: self.shapes[step.outs[0]][1:] for step in self.steps if step.kind == "site"} | dict(self.inside)

    @property
    def entries(self) -> frozenset[int]:
        """The layers where the state of a pass is the residual stream alone, so that a pass can begin there: what enters left
        the layer before (or the embedding), and nothing else that was made before is read there or later."""
        last = {number: i for i, step in enumerate(self.steps) for number in step.reads}
        left, made, found = {-1: self.embedded}, set[int](), set[int]()
        for i, step in enumerate(self.steps):
            layer = layer_of(step.site) if step.kind == "site" else None
            if layer is not None and step.site == f"blocks.{layer}.hook_in" and step.reads == [left.get(layer - 1)]:
                found |= {layer} if {number for number in made if last.get(number, -1) >= i} <= set(step.reads) else set()
            elif layer is not None and step.site == f"blocks.{layer}.hook_out":
                left[layer] = step.outs[0]
            made.update(step.outs)
        return frozenset(found)

    @property
    def digest(self) -> str:
        """Another one if the wiring is another."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """One line per step: its results and their shapes, its name, and what it reads."""
        return "\n".join(map(self._line, self.steps))

    def _line(self, step: Operation) -> str:
        outs = ", ".join(f"%{number} [{', '.join(map(self._text, self.shapes[number]))}]" for number in step.outs)
        given = [*map(self._text, step.args), *(f"{name}={self._text(x)}" for name, x in step.options.items())]
        return f"{outs} = {step.kind}({', '.join(given)})"

    def _text(self, x: Any) -> str:
        if isinstance(x, Numbered):
            return f"%{x.number}"
        if isinstance(x, Rotary):
            return self.names[id(x.table)]
        if isinstance(x, Tensor | np.ndarray) and id(x) not in self.names:  # a constant of the wiring
            held = np.ascontiguousarray(x if not isinstance(x, Tensor) or x.device.type == "cpu" else [*x.shape])
            return f"{held.dtype}{list(held.shape)} {hashlib.sha256(held.tobytes()).hexdigest()[:16]}"
        if isinstance(x, nn.Module) and id(x) not in self.names:  # one that the wiring makes
            return f"{type(x).__name__}({', '.join(map(self._text, x.state_dict().values()))})"
        if isinstance(x, Tensor | nn.Module):
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            return f"({', '.join(map(self._text, x))})"
        if isinstance(x, Heads | Recurrence):
            given = ((field.name, getattr(x, field.name)) for field in fields(x))
            return ", ".join(f"{name}={self._text(each)}" for name, each in given if each is not None)
        return "rows" if type(x) is int and x == self.rows else str(x)


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Of any size, and of no memory."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(*shape)


class _Shapes:
    """Ops whose results have shapes and nothing else; by default that of their first argument."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda x, *given, **options: _empty(x.shape)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return _empty((len(x), linear.weight.shape[1]))

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        return _empty((len(x), len(table)))

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return _empty((*x.shape[:2], weight.shape[2]))

    def norm_pair(self, q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return _empty(q.shape), _empty(k.shape)

    def norm_parts(self, x: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        return _empty((*x.shape[:-1], 1)), _empty(x.shape)

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        return _empty((*x.shape[:-1], x.shape[-1] // (2 if gated else 1)))

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        return choice_scores(logits, routing, correction)  # the very logits, where nothing is done to them

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        return _empty((len(scores), routing.top), torch.int64)

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        return _empty(chosen.shape)

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        return _empty((len(weights), experts))

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        return _empty((*chosen.shape, experts.down.shape[1]))

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        return _empty((*chosen.shape, experts.down.shape[2]))

    def combine(self, outs: Tensor, weights: Tensor) -> Tensor:
        return _empty((len(outs), outs.shape[-1]))

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        for show in () if observe is None else (observe.scores, observe.pattern):
            if show is not None:
                show(_empty((*heads.q.shape[:2], 0)))
        return _empty((*heads.q.shape[:2], heads.v.shape[-1]))

    def scaled_norms(self, q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return _empty(q.shape), _empty(k.shape)

    def rates(self, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return _empty((len(x), x.shape[1] // 2)), _empty((len(x), x.shape[1] // 2))

    def recur(self, given: Recurrence, layer: int, observe: Any = None) -> Tensor:
        if observe is not None:
            observe(_empty((*given.v.shape[:2], given.k.shape[-1], given.v.shape[-1])))
        return _empty(given.v.shape)
