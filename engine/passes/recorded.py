"""`RecordedPasses`: passes of a CPU whose kernels are recorded once and then run in one compiled call.

Between two kernels of a decode step Python took as long as both: 30 layers of SmolLM2 at one row took 16 ms on 16 threads,
where the kernels need 4. A pass of few rows is therefore recorded while the decoder runs it: which kernels it asks for, with
which arguments. Later passes of the same shape run this list with their own inputs. What is recorded are the same kernels with
the same arguments, so that no bit moves; a pass with anything else in it, such as a hook function, runs as ever.

A recording is a list of works and of the memory between them: each tensor that was made on the way has a place in one arena,
which it shares with those that are not needed at the same time. Inputs and arena are named by bases, to which arguments are
relative. All torch operations that move or compute numbers are kernels here, too; one that is not in `_TASKS` ends a recording.
"""

import math
import mmap
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from replaylens.engine.errors import InternalError
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.batch import TOLD, Batch, not_finite
from replaylens.engine.passes.cpu import CpuOps, Products
from replaylens.engine.passes.edits_cpu import EditTable, TableTap
from replaylens.engine.request.capture import PassTap
from replaylens.kernels import threads
from replaylens.kernels.cpu import pointwise

MAX_ROWS = 128
"""rows of a pass that is recorded: above, Python is a small part of it"""
WORTH = 3
"""passes of a shape before it is recorded"""
MAX_RECORDINGS = 64
MAX_SEEN = 1 << 12
"""shapes that are counted before they are recorded"""
_NO_ADDRESS = 1 << 32
"""strides, lengths and the bits of a float32 are smaller"""
_LINE = 64
"""bytes that places in the arena are multiples of"""

Ints = NDArray[np.int64]

_aten = torch.ops.aten
_MAKES = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default)


class RecordedShape(NamedTuple):
    """What a recording depends on."""

    rows: int
    pages: int
    """of a sequence's table, padded"""
    sites: frozenset[str]
    exact: bool
    sequences: int = 0
    """of a hybrid: a recurrent layer walks over each"""
    edited: tuple[str, ...] = ()
    """the sites of edits"""


class _Watch(TorchDispatchMode):
    """Sees the torch operations of a pass. Those that make tensors or views run; others are done by kernels."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to mark the class for torch's compiler, torch would load it, 130 MiB and three seconds of a first pass."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        """all alive, so that no two lie in the same place"""

    def __torch_dispatch__(self, function: Any, _types: Any, given: Any = (), more: Any = None) -> Any:
        if function in _MAKES:
            self.made.append(_high(function(*given, **(more or {}))))
            return self.made[-1]
        if function.is_view or function is _aten.detach.default:
            out = function(*given, **(more or {}))
            found = out if isinstance(out, list | tuple) else (out,)
            if {x.untyped_storage().data_ptr() for x in found} == {given[0].untyped_storage().data_ptr()}:
                return out
            # in inference mode `contiguous` and `reshape` come here, which say that they are views and may copy
            if len(found) == 1 and _float(given[0], out.view(-1)) and (whole := _clone(given[0])) is not None:
                self.made.append(whole)
                return whole.view(out.shape)
        elif (kernel := _TASKS.get(function)) is not None and (out := kernel(*given, **(more or {}))) is not None:
            self.made.append(out)  # made here, where nobody watches
            return out
        raise NotImplementedError(str(function))


class _Unread(TorchFunctionMode):
    """Nothing takes numbers out of torch, such as positions that somebody else's wiring computes with in Python: those of the
    recorded pass would be in all later ones. `item` is one of torch's operations, which `_Watch` sees."""

    def __torch_function__(self, function: Any, _types: Any, given: Any = (), more: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("tolist", "numpy", "__array__"):
            raise NotImplementedError(function.__name__)
        return function(*given, **(more or {}))


def _high(x: Tensor) -> Tensor:
    """Mutates: moves x to mapped memory, whose addresses are above `_NO_ADDRESS`, and returns it. The heap of a Python that is
    not position-independent, such as Debian's own, lies below; nothing was recorded there, a step took 15 ms, not 7."""
    if x.nbytes:
        y = x.contiguous()
        memory = torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=torch.uint8).copy_(y.view(-1).view(torch.uint8))
        x.set_(memory.untyped_storage(), 0, y.shape, y.stride())
    return x


def _made_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    return _high(torch.empty(x.shape if shape is None else shape, dtype=x.dtype))


def _float(*tensors: Any) -> bool:
    """Whether these are tensors as kernels read them."""
    return all(
        isinstance(x, Tensor) and x.dtype is torch.float32 and 0 < x.dim() <= 3 and (x.stride(-1) == 1 or x.shape[-1] == 1)
        for x in tensors
    )


def _of_two(kind: str, x: Any, y: Any) -> Tensor | None:
    """Either may have fewer numbers, which are then the same along a dimension."""
    if not _float(x, y):
        return None
    shape = torch.broadcast_shapes(x.shape, y.shape)
    x, y = (x, y) if x.shape == shape else (y, x)  # which of them comes first moves no bit
    return pointwise(kind, x, y, _made_like(x)) if x.shape == shape else None


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor | None:
    return _of_two("add", x, y) if alpha == 1 else None


def _mul(x: Any, y: Any) -> Tensor | None:
    if isinstance(y, float | int):
        return pointwise("scale", x, None, _made_like(x), float(y)) if _float(x) else None
    return _of_two("mul", x, y)


def _neg(x: Any) -> Tensor | None:
    return _mul(x, -1.0)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Tensor | None:
    if not _float(x) or not all(each is None or isinstance(each, float | int) for each in (low, high)):
        return None
    least, most = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return pointwise("clamp", x, None, _made_like(x), most, least)


def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Tensor | None:
    from replaylens.kernels.cpu_experts import gathered

    fits = _float(x) and x.dim() == 2 and dim in (-1, 1) and index.dtype is torch.int64 and index.is_contiguous()
    return gathered(x, index) if fits else None


def _clone(x: Any, *, memory_format: Any = None) -> Tensor | None:
    return pointwise("copy", x, None, _made_like(x)) if _float(x) else None


def _copy(target: Any, x: Any, non_blocking: bool = False) -> Tensor | None:
    return pointwise("copy", x, None, target) if _float(target, x) and target.shape == x.shape else None


def _cat(parts: Any, dim: int = 0) -> Tensor | None:
    if not _float(*parts):
        return None
    dim, shape = dim % parts[0].dim(), list(parts[0].shape)
    shape[dim], done = sum(x.shape[dim] for x in parts), 0
    out = _made_like(parts[0], shape)
    for x in parts:
        pointwise("copy", x, None, out.narrow(dim, done, x.shape[dim]))
        done += x.shape[dim]
    return out


_TASKS: dict[Any, Callable[..., Tensor | None]] = {
    _aten.add.Tensor: _add,
    _aten.mul.Tensor: _mul,
    _aten.mul.Scalar: _mul,
    _aten.neg.default: _neg,
    _aten.gather.default: _gather,
    _aten.clamp.default: _clamp,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy,
    _aten.cat.default: _cat,
}
"""torch's operations that kernels do with the same bits; None: not of these tensors"""


@dataclass(frozen=True)
class Extent:
    """Some memory that arguments point into."""

    first: int
    """address while it was recorded"""
    size: int
    at: int = 0
    """where it begins, relative to its base"""

    @classmethod
    def of(cls, x: Tensor) -> "Extent":
        return cls(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())

    def within(self, given: Ints) -> NDArray[np.intp]:
        """Which of these arguments point into it. Numbers that are no addresses are below `_NO_ADDRESS`."""
        return np.flatnonzero((given >= self.first) & (given < self.first + self.size))


@dataclass(frozen=True)
class _Group:
    """Results of equal shape, one after another."""

    at: int
    count: int
    size: int
    """bytes of each"""
    shape: torch.Size
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Sequence[Tensor]:
        return memory[self.at : self.at + self.count * self.size].view(self.dtype).view(self.count, *self.shape).unbind()


class WorkList:
    """The works of a pass, with addresses relative to the arena and to the inputs."""

    def __init__(
        self,
        works: list[threads.Work],
        inputs: Sequence[Tensor],
        made: list[Tensor],
        residual: Tensor,
        values: Mapping[str, Tensor],
    ) -> None:
        """inputs   what differs between passes of this shape; the first is the residual stream that enters
        made             tensors that were made on the way, all of them alive
        residual, values  what is read afterwards"""
        self.works, self.names = works, list(values)
        self._starts = np.cumsum([0, *(len(work.given) for work in works)])[:-1]
        self.given: Ints = np.concatenate([np.frombuffer(work.given, np.int64) for work in works])
        self.groups, self.results, places = self._left([residual, *values.values()], inputs[0], set(map(Extent.of, made)))
        self.left = max((place.at + _lines(place.size) for place in places), default=0)
        """bytes at the arena's beginning that are read afterwards"""
        taken = {place.first for place in places}
        others = [place for place in dict.fromkeys(map(Extent.of, made)) if place.size and place.first not in taken]
        arranged, self.arena = _arranged(others, self.given, self._starts, self.left)
        bases = [places + arranged, *([Extent(x.data_ptr(), x.nbytes)] for x in inputs)]
        if min(extent.first for each in bases for extent in each) < _NO_ADDRESS:
            raise NotImplementedError("Addresses that could be numbers.")
        self._patches = [_patch(self.given, each) for each in bases]
        self._latest: list[int | None] = [None] * len(bases)
        self.weights: list[Tensor] = []
        """held, since works have their addresses: a weight that somebody replaces is not freed under them"""
        self._table: tuple[int, Ints] = 0, self.given

    def _left(
        self, results: list[Tensor], entering: Tensor, made: set[Extent]
    ) -> tuple[list["_Group"], list[tuple[int, int] | None], list[Extent]]:
        """Results side by side: groups of equal shape, the group and number of each result, and their places. None: what enters
        the first block."""
        groups, numbers, places, at = list[_Group](), dict[int, tuple[int, int]](), list[Extent](), 0
        for index, (shape, dtype) in enumerate(dict.fromkeys((x.shape, x.dtype) for x in results)):
            alike = [x for x in results if (x.shape, x.dtype) == (shape, dtype) and x.data_ptr() != entering.data_ptr()]
            own = {x.data_ptr(): Extent.of(x) for x in alike}
            size = dtype.itemsize * shape.numel()
            for number, (first, place) in enumerate(own.items()):
                if place not in made or place.first != first or place.size != size or first in numbers:
                    raise NotImplementedError("A site that is no tensor of its own.")
                numbers[first] = index, number
                places.append(Extent(first, size, at + number * size))
            groups.append(_Group(at, len(own), size, shape, dtype))
            at += _lines(len(own) * size)
        return groups, [numbers.get(x.data_ptr()) for x in results], places

    def run(self, bases: Sequence[int]) -> None:
        """Run all works, with the arena and the inputs at these addresses."""
        for i, ((index, relative), base) in enumerate(zip(self._patches, bases, strict=True)):
            if base != self._latest[i]:
                self._latest[i] = None  # an interrupt may come between
                self.given[index] = relative + base
                self._latest[i] = base
        if self._table[0] != threads.allowed():
            counts = [threads.threads_for(work.cost, work.pieces) for work in self.works]
            functions = np.array([work.function.address for work in self.works], np.int64)
            self._table = threads.allowed(), np.stack([functions, self._starts, np.array(counts)], 1)
        threads.run_list(self._table[1], self.given)


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _patch(given: Ints, places: list[Extent]) -> tuple[NDArray[np.intp], Ints]:
    """The arguments that point into these places, and what they are relative to their base."""
    found = [(place.within(given), place.at - place.first) for place in places]
    index = np.concatenate([where for where, _ in found])
    return index, given[index] + np.concatenate([np.full(len(where), by, np.int64) for where, by in found])


def _arranged(made: list[Extent], given: Ints, starts: Ints, begin: int) -> tuple[list[Extent], int]:
    """The places of tensors in an arena, from a byte on: those that are not needed at the same time one over the other. And
    where it ends.

    given  the arguments of all works, those of work i from starts[i] on
    """
    spans = list[tuple[int, int, Extent]]()
    for place in made:
        used = np.searchsorted(starts, place.within(given), side="right") - 1
        if len(used):
            spans.append((int(used[0]), int(used[-1]), place))
    arranged, size = list[Extent](), begin
    busy = list[tuple[int, int, int]]()  # from, to, and the last work that needs it
    for first, last, place in sorted(spans, key=lambda span: span[0]):
        busy = sorted(each for each in busy if each[2] >= first)
        at = begin
        for start, end, _ in busy:
            if start - at >= place.size:
                break
            at = max(at, end)
        busy.append((at, at + _lines(place.size), last))
        arranged.append(replace(place, at=at))
        size = max(size, at + _lines(place.size))
    return arranged, size


@dataclass(frozen=True, eq=False)
class RanPass:
    """What a pass leaves."""

    residual: Tensor
    """after the last block: [rows, d_model]"""
    values: dict[str, Tensor]
    """of the tapped sites"""


class RecordedPasses:
    """The recordings of one model on a CPU, by shape."""

    def __init__(self, model: Decoder, cache: KVCache, products: Products) -> None:
        self.model, self.cache, self.recurs = model, cache, bool(cache.mixed)
        self.products = {True: products, False: products.in_one_chain()}
        self.told = torch.zeros(1, dtype=torch.int64)
        """where kernels say that keys or values are not finite"""
        self.recordings: OrderedDict[RecordedShape, WorkList] = OrderedDict()
        self.unrecordable: dict[tuple[frozenset[str], bool, tuple[str, ...]], str] = {}
        """what passes with these sites, and edits of these, do that no kernel does"""
        self._seen: Counter[RecordedShape] = Counter()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def run(
        self, x: Tensor, batch: Batch, sites: frozenset[str], exact: bool, edits: EditTable | None = None
    ) -> RanPass | None:
        """All blocks over x [rows, d_model]. None: no pass of this shape is recorded, and it must be run as ever.

        edits  of the rows. Precondition: no other edit or hook function touches them
        """
        edited, sequences = () if edits is None else edits.sites, len(batch.segments) * self.recurs
        shape = RecordedShape(batch.num_rows, batch.paged.pages.shape[1], sites, exact, sequences, edited)
        if shape.rows > MAX_ROWS or (sites, exact, edited) in self.unrecordable:
            return None
        if shape not in self.recordings and self._seen[shape] + 1 < WORTH:
            if len(self._seen) > MAX_SEEN:
                self._seen.clear()
            self._seen[shape] += 1
            return None
        ops = CpuOps(batch, self.cache, self.products[exact], self.told)
        inputs = [x, batch.positions, batch.write_slots, batch.paged.sequence, batch.paged.pages, batch.paged.order, self.told]
        inputs += ops.mixed.inputs if self.recurs else []
        inputs += [] if edits is None else [edits.numbers]
        if shape in self.recordings:
            self.recordings.move_to_end(shape)
            return self._replayed(self.recordings[shape], inputs)
        return self._recorded(shape, batch, ops, inputs, edits)

    def _replayed(self, recording: WorkList, inputs: list[Tensor]) -> RanPass:
        if recording.arena > len(self._arena):
            self._arena = torch.empty(recording.arena, dtype=torch.uint8)
        self.told.zero_()
        recording.run([self._arena.data_ptr(), *(each.data_ptr() for each in inputs)])
        if told := int(self.told):
            raise not_finite(TOLD[told])
        left = self._arena[: recording.left].clone()
        found = [group.of(left) for group in recording.groups]
        residual, *values = (inputs[0] if where is None else found[where[0]][where[1]] for where in recording.results)
        return RanPass(residual, dict(zip(recording.names, values, strict=True)))

    def _recorded(
        self, shape: RecordedShape, batch: Batch, ops: CpuOps, inputs: list[Tensor], edits: EditTable | None
    ) -> RanPass | None:
        """Run a pass and record it. None if something in it is no kernel."""
        tap = PassTap(shape.sites)
        edited = tap if edits is None else TableTap(edits, tap)
        assert batch.paged.keys_seen  # a sum that must not be part of the recording
        self.told.zero_()
        for each in inputs:
            _high(each)
        try:
            with threads.written() as works, _Watch() as watch, _Unread():
                residual = self.model.run_blocks(inputs[0], batch.positions, ops, edited, 0, self.model.config.num_layers)
                own = {Extent.of(x) for x in (inputs[0], *watch.made)}
                values = {site: x if Extent(x.data_ptr(), x.nbytes) in own else x.clone() for site, x in tap.values.items()}
            recording = WorkList(works, inputs, watch.made, residual, values)
            recording.weights = [x for module in self.model.modules() for x in module._parameters.values() if x is not None]
        except NotImplementedError as error:
            self.unrecordable[shape.sites, shape.exact, shape.edited] = str(error)
            return None
        truth = RanPass(residual, tap.values)
        found = self._replayed(recording, inputs)
        for name, x in (("residual", truth.residual), *truth.values.items()):
            again = found.residual if name == "residual" else found.values[name]
            if not torch.equal(again.view(torch.int32), x.contiguous().view(torch.int32)):  # NaN is told later, as ever
                raise InternalError(f"A recorded pass of {shape.rows} rows has another {name} than the pass itself.")
        self.recordings[shape] = recording
        while len(self.recordings) > MAX_RECORDINGS:
            self.recordings.popitem(last=False)
        return truth
