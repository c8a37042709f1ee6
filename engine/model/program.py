"""`Recorder`: writes down what a pass of a decoder asks for, step by step. Whatever has to know the wiring walks these steps.

A step is a method of `Ops`, a function of torch, or a site. So nothing is told twice: a part that somebody adds to a decoder is
among the steps, and a walk that has no rule for it refuses by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, Routing
from replaylens.engine.model.layers import Linear, ReadOnly
from replaylens.engine.model.ops import Heads, Observer, Recurrence, Tap, wanted

# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """What a step reads: the result of an earlier one, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a pass."""

    kind: str
    """a method of `Ops`, "site", or a function of torch ("torch.add")"""
    args: tuple[Any, ...]
    """with a `Value` in the place of each tensor that steps made; weights and settings are themselves"""
    options: Mapping[str, Any]
    outs: tuple[int, ...]
    """the numbers of its results"""

    @property
    def site(self) -> str:
        """The name of the site. Precondition: it is one."""
        return str(self.args[1])

    @property
    def reads(self) -> list[int]:
        return [x.number for x in leaves((self.args, tuple(self.options.values()))) if isinstance(x, Value)]


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
        return tuple(mapped(x, leaf) for x in tree)
    if isinstance(tree, Heads | Recurrence):
        return replace(tree, **{field.name: mapped(getattr(tree, field.name), leaf) for field in fields(tree)})
    return leaf(tree)


# ---- recorder --------------------------------------------------------------------------------------------------------


class Recorder(TorchFunctionMode):
    """Writes down the steps of what runs within it, on `ops` and `tap` of its own."""

    def __init__(self, model: nn.Module, sites: frozenset[str] = frozenset()) -> None:
        """sites  to be steps, besides those that the tap wants"""
        super().__init__()
        self.sites, self.steps = sites, list[Operation]()
        self.values: dict[int, Tensor] = {}
        """all results, by number"""
        self._numbers: dict[int, int] = {}
        self._fixed: dict[int, Tensor] = {id(x): x for x in model.buffers()}
        """buffers, and what is made of weights alone; by address, hence held"""
        self._quiet = self._reads = False

    def number(self, x: Tensor) -> int:
        """Of a result."""
        return self._numbers[id(x)]

    def ops(self, ops: Any) -> "RecordedOps":
        """Ops that do as these, and write it down."""
        return RecordedOps(self, ops)

    def tap(self, tap: Tap | None) -> "RecordedTap":
        """A tap that does as this one, and writes down every site."""
        return RecordedTap(self, tap)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        if _changes(name) and id(args[0]) in self._numbers:
            raise UnsupportedModel(f"The wiring of this model changes a value in place, by {name}. Make a new one instead.")
        self.keep(f"torch.{name}", args, kwargs or {}, found)
        return found

    def run(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...], options: Any, *unseen: Any) -> Any:
        """Call a function as one step. `unseen`: arguments that are no part of it"""
        if self._quiet:
            return function(*args, *unseen, **options)
        self._quiet = True
        try:
            with torch._C.DisableTorchFunction():  # what a step does inside is none: a quarter of a pass, if it were looked at
                found = function(*args, *unseen, **options)
        finally:
            self._quiet = False
        self.keep(kind, args, options, found)
        return found

    def keep(self, kind: str, args: Any, options: Mapping[str, Any], found: Any) -> None:
        """Mutates: writes down a step. None is what is made of weights alone, or before the first site, or returns what it was
        given."""
        outs = [x for x in (found if isinstance(found, tuple | list) else (found,)) if isinstance(x, Tensor)]
        if not outs or all(id(x) in self._numbers for x in outs):
            return
        if kind == "site" and id(args[0]) not in self._numbers:
            self._new(args[0])
        self._reads, known = False, partial(self._known, kind)
        given = mapped(tuple(args), known), {name: mapped(x, known) for name, x in options.items()}
        if self._reads:
            self.steps.append(Operation(kind, *given, tuple(map(self._new, outs))))
        else:
            self._fixed.update((id(x), x) for x in outs)

    def _new(self, x: Tensor) -> int:
        number = self._numbers[id(x)] = len(self._numbers) + 1
        self.values[number] = x
        return number

    def _known(self, kind: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if (number := self._numbers.get(id(x))) is not None:
            self._reads = True
            return Value(number)
        weight = isinstance(x, nn.Parameter | ReadOnly) or id(x) in self._fixed
        if weight or not self.steps or not x.is_floating_point():
            return x
        raise UnsupportedModel(
            f"The wiring of this model cannot be followed: {kind} reads numbers that neither Ops nor torch made within the "
            "pass. Compute them there, or use patching."
        )


def _changes(name: str) -> bool:
    """Whether a function of torch changes its first argument."""
    return name == "__setitem__" or (name.startswith("__i") and name != "__invert__") or (name[-1] == "_" and name[-2] != "_")


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
        shown: Tensor = self._recorder.run("site", self._shown, (value, site), {})
        return shown

    def _shown(self, value: Tensor, site: str) -> Tensor:
        """Another tensor, as after an edit: the wiring looks whether it is the same one."""
        shown = self._tap(site, value) if self._tap is not None and self._tap.wants(site) else value
        return shown.view_as(shown) if shown is value else shown
