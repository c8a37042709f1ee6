"""The doctor's examination of products: which variants give the one-thread bits of the 16-row tile, on how many threads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.layers import HeadLinear, Linear
from replaylens.engine.passes.batch import TILE
from replaylens.engine.passes.products import Allowed, Products, Shape, can_pack
from replaylens.engine.proof.examination import Examination

_COUNTS = (512, 256, 128, 64, 32)
_TOTALS = (16, 32, 48, 80, 112, 176, 336, 496)
"""numbers of rows that combine several counts"""
_PACKED_TOTALS = (*range(1, 18), 31, 33, 48, 63, 64, 65, 97, 128)
_FEW = (8, 4, 2)
"""row counts below the tile: an expert often gets a few rows only"""
_EXPERT_TOTALS = (*range(1, 18), 31, 33, 47, 65)
"""numbers of rows that an expert may get"""
_LARGE = 8e6
"""number of weights from which fewer rows are compared"""


@dataclass(frozen=True)
class _Subject:
    """One product of the model and its shape."""

    name: str
    shape: Shape
    product: Callable[[Tensor, Products], Tensor]
    weight: Tensor
    """[inputs, outputs]"""
    of_expert: bool = False
    """whether any number of rows is multiplied with it"""

    @property
    def num_rows(self) -> int:
        """The number of rows to compare."""
        return 512 if self.weight.numel() < _LARGE else 128


def examine_products(model: Decoder, seen: Examination) -> dict[int, Allowed]:
    """The variants with canonical bits by number of threads. Checks that a row's bits do not depend on the rest of its tile."""
    found = {count: Allowed({}) for count in (1, *seen.more)}
    examined: set[Shape] = set()
    for subject in _subjects(model):
        x = seen.random(subject.num_rows, subject.shape[0])
        reference = _examine_tile(subject, x, seen)
        one = _on_one_thread(subject, x, reference, seen)
        for count, allowed in found.items():
            some = one if count == 1 else _on_more_threads(count, subject, x, reference, one, seen)
            found[count] = _also(allowed, some, subject.shape if subject.shape in examined else None)
        examined.add(subject.shape)
    return found


def _also(allowed: Allowed, some: Allowed, again: Shape | None) -> Allowed:
    """What is allowed for more shapes. `again`: a shape that another product has, with other strides; both must agree."""
    if again is None:
        return Allowed(allowed.row_counts | some.row_counts, allowed.packed | some.packed)
    counts = tuple(count for count in allowed.row_counts.get(again, ()) if count in some.row_counts.get(again, ()))
    return Allowed({**allowed.row_counts, again: counts}, allowed.packed - ({again} - some.packed))


def _subjects(model: Decoder) -> list[_Subject]:
    """One product of every shape; of the products by head, one of every shape and order in memory."""
    found: dict[Shape, _Subject] = {}
    by_head: dict[tuple[Shape, bool], _Subject] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shape = (module.weight.shape[0], module.weight.shape[1])
            found.setdefault(shape, _Subject(name, shape, partial(_linear, module), module.weight))
        elif isinstance(module, Experts):
            for part, weight in (("up", module.up[-1]), ("down", module.down[-1])):  # the last: it may begin anywhere
                shape = (weight.shape[0], weight.shape[1])
                found[shape] = _Subject(f"{name}.{part}", shape, partial(_expert, weight), weight, of_expert=True)
        elif isinstance(module, HeadLinear):
            for turned, weight in ((False, module.weight), (True, module.weight.transpose(1, 2))):
                shape, which = (weight.shape[1], weight.shape[2]), f"{name} by head{', transposed' if turned else ''}"
                by_head.setdefault((shape, turned), _Subject(which, shape, partial(_by_head, weight), weight[0]))
    table = model.unembedding
    shape = (table.shape[1], len(table))
    found[shape] = _Subject("unembed", shape, partial(_unembed, table), table.t())
    return [*found.values(), *by_head.values()]


def _by_head(weight: Tensor, x: Tensor, products: Products) -> Tensor:
    """Of the first of two heads; more would take longer and show nothing new, since each is a product of its own."""
    return products.by_head(x[:, None].expand(-1, len(weight[:2]), -1), weight[:2])[:, 0]


def _linear(linear: Linear, x: Tensor, products: Products) -> Tensor:
    return products.linear(x, linear)


def _expert(weight: Tensor, x: Tensor, products: Products) -> Tensor:
    return products.few(x, weight)


def _unembed(table: Tensor, x: Tensor, products: Products) -> Tensor:
    return products.unembed(x, table)


def _examine_tile(subject: _Subject, x: Tensor, seen: Examination) -> Tensor:
    """The product of x tile by tile, on one thread. Records whether a row's place in the tile or its neighbours matter."""
    shape, only_tile = subject.shape, Products({1: Allowed({subject.shape: (TILE,)})})
    product = lambda rows: subject.product(rows, only_tile)  # noqa: E731
    reference = product(x)
    note = partial(seen.note, subject.name, str([*shape]))
    order = torch.randperm(TILE, generator=seen.generator)
    note("row at another offset of the tile", torch.equal(product(x[:TILE][order]), reference[:TILE][order]))
    alone = torch.zeros(TILE, shape[0], dtype=x.dtype)
    alone[0] = x[3]
    note("row alone in a zero-padded tile", torch.equal(product(alone)[0], reference[3]))
    fast = torch.mv(subject.weight.t(), x[0])
    note("control: matrix-vector product", torch.equal(fast, torch.mm(x[:TILE], subject.weight)[0]), control=True)
    if subject.of_expert:
        library = all(torch.equal(x[:n] @ subject.weight, reference[:n]) for n in _EXPERT_TOTALS)
        note("control: the library's product of an expert's rows", library, control=True)
    return reference


def _on_one_thread(subject: _Subject, x: Tensor, reference: Tensor, seen: Examination) -> Allowed:
    """The row counts that agree with the tile, and the packed variant if it agrees."""
    shape, same = subject.shape, partial(_same, subject, x, reference)
    counts = tuple(c for c in _COUNTS if c <= subject.num_rows and same({1: Allowed({shape: (c, TILE)})}, [c]))
    few = tuple(c for c in _FEW if subject.of_expert and same({1: Allowed({shape: (c,)})}, [subject.num_rows]))
    tiles = Allowed({shape: (*counts, TILE, *few)})
    equal = same({1: tiles}, _TOTALS)
    seen.note(subject.name, str([*shape]), "any number of rows", equal)
    if subject.of_expert:
        seen.note(subject.name, str([*shape]), "any number of an expert's rows", same({1: tiles}, _EXPERT_TOTALS))
    packed = Allowed(tiles.row_counts, frozenset({shape}))
    return packed if can_pack(subject.weight) and same({1: packed}, _PACKED_TOTALS) else tiles


def _on_more_threads(count: int, subject: _Subject, x: Tensor, reference: Tensor, one: Allowed, seen: Examination) -> Allowed:
    """The variants in `one` that agree on `count` threads, alone and mixed with rows that run on one thread."""
    shape, some = subject.shape, Allowed({})

    def all_agree() -> bool:
        nonlocal some
        same = lambda allowed, totals: _same(subject, x, reference, {1: one, count: allowed}, totals)  # noqa: E731
        counts = tuple(c for c in one.row_counts[shape] if same(Allowed({shape: (c,)}), (c, 4 * c)))
        some = Allowed({shape: counts})
        packed = Allowed({shape: counts}, frozenset({shape}))
        if one.packed and same(packed, _PACKED_TOTALS):
            some = packed
        if not same(some, (*_TOTALS, *_EXPERT_TOTALS) if subject.of_expert else _TOTALS):
            some = Allowed({})
        return some == one

    seen.on(count, subject.name, str([*shape]), all_agree)
    return some


def _same(subject: _Subject, x: Tensor, reference: Tensor, allowed: dict[int, Allowed], totals: Iterable[int]) -> bool:
    """Whether the first n rows have the bits of the reference, for every n in `totals` up to len(x)."""
    products = Products(allowed)
    return all(torch.equal(subject.product(x[:n], products), reference[:n]) for n in totals if n <= len(x))
