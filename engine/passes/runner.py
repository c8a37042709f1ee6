"""`Runner`: one model with its KV cache on one device, and the two kinds of pass over packed rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, UnsupportedModel
from replaylens.engine.memory.cache import KVCache, PlacedCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model import modes, sites
from replaylens.engine.model.decoder import Decoder, LayerStage
from replaylens.engine.model.layers import FrozenWeights, elsewhere
from replaylens.engine.model.ops import Ops, RowOps, Tap, wanted
from replaylens.engine.passes.batch import Batch, Segment, finite
from replaylens.engine.request.capture import PassTap, Rows
from replaylens.engine.request.edits import BatchHook, NamedHook
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling

if TYPE_CHECKING:
    from replaylens.engine.model.program import Recorder
    from replaylens.engine.passes.cpu import Products
    from replaylens.engine.passes.edits_cuda import EditProgram, Vectors
    from replaylens.engine.passes.graphs import PassGraphs, PlacedGraphs
    from replaylens.engine.passes.recorded import RecordedPasses
    from replaylens.engine.passes.transfer import HostCopy, PendingRows

# ---- taps ------------------------------------------------------------------------------------------------------------
# Taps that edit the sites of a pass, one segment after another. On a GPU, edits run as an `EditProgram`.


class EditTap:
    """Applies the hooks of a batch's segments, and before them the edits if asked to; then passes the value to `inner`."""

    def __init__(self, batch: Batch, inner: Tap | None, edits: bool = True) -> None:
        self.batch, self.inner, self.edits = batch, inner, edits
        self.sites = {name for s in batch.segments for name, _ in s.hooks}
        self.sites |= {edit.site for s in batch.segments for edit in s.edits if edits and not edit.inside}

    def wants(self, site: str) -> bool:
        return site in self.sites or (self.inner is not None and self.inner.wants(site))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.sites:
            value = value.clone()
            for index, segment in enumerate(self.batch.segments):
                first = self.batch.offsets[index]
                for edit in segment.edits if self.edits else ():
                    if edit.site == site:
                        positions = edit.edited(segment.start, segment.tokens)
                        rows = [first + p - segment.start for p in positions]
                        if rows:
                            value[rows] = edit.apply(value[rows], positions)
                for name, hook in segment.hooks:
                    if name == site and isinstance(hook, BatchHook):
                        self._hook_batch(site, hook, index, value)
                    elif name == site:
                        rows_now = value[first : first + len(segment.tokens)][None]  # a batch of one, as hooks expect
                        asked = hook.name if isinstance(hook, NamedHook) else site
                        changed = hook(rows_now, HookContext(asked, segment.start))
                        value[first : first + len(segment.tokens)] = _hooked(site, rows_now, changed)[0]
        return self.inner(site, value) if self.inner is not None and self.inner.wants(site) else value

    def _hook_batch(self, site: str, hook: BatchHook, index: int, value: Tensor) -> None:
        """Mutates the value: applies a hook function to all segments that share it, once, at the first of them."""
        owners = [i for i, s in enumerate(self.batch.segments) if any(own is hook for _, own in s.hooks)]
        if owners[0] != index:
            return
        segments = [self.batch.segments[i] for i in owners]
        if len({len(s.tokens) for s in segments}) > 1:  # one of them is computed in pieces
            segments = segments[:1]
        rows = [
            slice(self.batch.offsets[i], self.batch.offsets[i] + len(s.tokens)) for i, s in zip(owners, segments, strict=False)
        ]
        together = torch.stack([value[each] for each in rows])
        try:
            changed = _hooked(site, together, hook(together, HookContext(hook.name, segments[0].start)))
        except Exception as error:
            hook.errors.append(error)  # the loop repeats a failed pass branch by branch, where this is no longer a batch
            raise hook.errors[0] from None
        for each, new in zip(rows, changed, strict=True):
            value[each] = new


class HomeTap:
    """Shows the inner tap values of all devices on one."""

    def __init__(self, inner: Tap, home: torch.device) -> None:
        self.inner, self.home = inner, home

    def wants(self, site: str) -> bool:
        return self.inner.wants(site)

    def __call__(self, site: str, value: Tensor) -> Tensor:
        there = value.to(self.home)
        shown = self.inner(site, there)
        return value if shown is there else shown.to(value.device)


class PlacedTap:
    """A tap of each device."""

    def __init__(self, taps: "Mapping[torch.device, Tap | None]") -> None:
        self.taps = taps

    def wants(self, site: str) -> bool:
        return any(tap is not None and tap.wants(site) for tap in self.taps.values())

    def __call__(self, site: str, value: Tensor) -> Tensor:
        tap = self.taps[value.device]
        return value if tap is None or not tap.wants(site) else tap(site, value)


class UneditedTap:
    """Keeps the values that `inner` is about to edit at some sites."""

    def __init__(self, sites: frozenset[str], inner: Tap) -> None:
        self.sites, self.inner = sites, inner
        self.values: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return self.inner.wants(site)

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.sites:
            self.values[site] = value
        return self.inner(site, value)


def _hooked(site: str, value: Tensor, changed: Any) -> Tensor:
    """The value after a hook function. None keeps `value`, which may be changed in place. BadEdit if the shape differs."""
    if changed is None:
        return value
    if not isinstance(changed, Tensor) or changed.shape != value.shape:
        given = f"a tensor of shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else f"a {type(changed).__name__}"
        raise BadEdit(f"The hook function on {site} returned {given}. Return a tensor of shape {tuple(value.shape)}, or None.")
    return changed


@dataclass(frozen=True)
class HookContext:
    """The second argument of a hook function."""

    name: str
    """as the hook was asked for"""
    start: int
    """position of the first row in the value"""

    def layer(self) -> int:
        """The block that the site belongs to."""
        return int(self.name.split(".")[1])


# ---- runner ----------------------------------------------------------------------------------------------------------

Keep = Literal["host", "device"]
AnyCache = KVCache | PlacedCache

LENS_ROWS = 256
RING_BYTES, SMALLEST_RING = 1 << 30, 1 << 16
"""of the pinned memory through which captured rows leave a GPU: by default, and at least"""
_WHOLE_PAGE = 64
"""positions per page of a path that is computed alone"""


@dataclass
class PassResult:
    """The result of a pass."""

    batch: Batch
    residual: Tensor
    """residual stream after the last block that ran: [rows, d_model]"""
    logits: Tensor
    """of `batch.logit_rows()`, in that order: [rows, vocab]"""

    @cached_property
    def greedy(self) -> list[int]:
        """The likeliest token of every row of logits; ties go to the lowest id. Computed on the device of the logits."""
        if self.logits.device.type == "cpu":
            return list(map(int, self.logits.numpy().argmax(-1)))
        from replaylens.kernels.sample import sample_logits

        return [int(i) for i in sample_logits(self.logits)[0].tolist()]

    def choose(self, row: int, sampling: Sampling, path: Sequence[int], num_prompt: int) -> int:
        """The token after `path`, chosen from row `row` of the logits."""
        if sampling.plain_greedy:
            return self.greedy[row]
        if sampling.bare and self.logits.device.type != "cpu":
            from replaylens.engine.passes.cuda import draw

            return int(draw(self.logits[row : row + 1], [sampling], [len(path)]))
        return sampling.choose(self.logits[row].float().cpu().numpy(), path, num_prompt)


@dataclass(frozen=True, eq=False)
class WholePass:
    """A whole path, computed alone."""

    residual: Tensor
    """the residual stream after the last block: [rows, d_model]"""
    logits: Tensor
    """of the last row: [vocab]"""
    values: Rows
    """of the tapped sites, after edits"""
    unedited: Rows
    """of the edited sites, before their edits"""


class Runner:
    """Passes of one decoder over its paged cache. Prefill, verification, forced tokens and direct decode all use `exact`."""

    def __init__(
        self,
        model: Decoder,
        num_pages: int,
        page_size: int,
        canary: bool = False,
        capture_buffer: int = RING_BYTES,
        state_tokens: int | None = None,
    ) -> None:
        """
        capture_buffer  bytes of pinned memory through which captured rows leave a GPU
        state_tokens    positions of a hybrid whose entries are held at once; None: all
        """
        self.model, self.capture_buffer = model, capture_buffer
        self.pool = PagePool(num_pages, page_size)
        self.device = model.device.type
        self.kernels = self.device != "cpu"
        """whether the arithmetic is that of our kernels. Tests set it on a CPU, where Triton's interpreter runs them"""
        self._sparse: list[PendingRows] = []
        """blocks of captured rows of which few are wanted any more"""
        self.graphs: PassGraphs | PlacedGraphs | None = None
        """captured passes; None on a CPU, where every pass is launched"""
        self.cache = self._cache(self.pool, canary, state_tokens=state_tokens)
        self.weights = FrozenWeights(model)
        self.elsewhere = elsewhere(model)
        """a weight whose products are computed by other processes, too; None: no weight is"""

    @property
    def stages(self) -> tuple[LayerStage, ...]:
        """The layers by device."""
        return self.model.stages or (LayerStage(0, self.model.config.num_layers, self.model.device),)

    @property
    def one_device(self) -> bool:
        """Whether all layers are where the rest of the model is."""
        return all(stage.device == self.model.device for stage in self.stages)

    @property
    def one_cache(self) -> KVCache:
        """The cache. Precondition: the layers are not divided over devices."""
        assert isinstance(self.cache, KVCache)
        return self.cache

    @cached_property
    def entries(self) -> frozenset[int]:
        """The layers where the state of a pass is the residual stream that left the layer before, so that a pass may begin with
        it. Somebody else's wiring may carry more from block to block; of one that cannot be followed, there are none."""
        if self.model.usual:
            return frozenset(range(self.model.config.num_layers))
        from replaylens.engine.model.program import Program

        try:
            return Program.of_wiring(self.model).entries
        except UnsupportedModel:
            return frozenset()

    def _cache(self, pool: PagePool, canary: bool = False, kernels: bool = False, state_tokens: int | None = None) -> AnyCache:
        """An empty cache; the keys and values of a layer are on its device."""
        make = partial(KVCache, self.model.config, pool, self.model.dtype)
        if not self.model.stages:
            return make(self.device, canary, kernels, state_tokens)
        return PlacedCache([make(str(s.device), canary, kernels, layers=range(s.first, s.end)) for s in self.stages])

    @cached_property
    def products(self) -> "Products":
        """The products of a CPU."""
        from replaylens.engine.passes.cpu import Products  # its kernels load a compiler, which a GPU does not need

        return Products()

    @cached_property
    def recorded(self) -> "RecordedPasses | None":
        """The recorded passes of a CPU. None: other processes compute parts of them, or they need more than what
        enters."""
        if self.kernels or self.device != "cpu" or self.model.stages or self.elsewhere is not None or 0 not in self.entries:
            return None
        from replaylens.engine.passes.recorded import RecordedPasses

        return RecordedPasses(self.model, self.one_cache, self.products)

    @cached_property
    def host_copy(self) -> "HostCopy":
        """The way of captured rows to the host; made when it is first needed."""
        from replaylens.engine.passes.transfer import HostCopy

        return HostCopy(self.device, self.capture_buffer)

    def rows_in_transfer(self, captured: frozenset[str]) -> int:
        """How many rows of these sites `capture_buffer` holds; 0 if the size of a row depends on its path."""
        known = sites.table(self.model.config)
        sizes = [math.prod(known.sites[known.resolve(site)].shape) for site in captured]
        return self.capture_buffer // max(1, sum(sizes) * self.model.dtype.itemsize) if all(sizes) else 0

    @cached_property
    def vectors(self) -> "Vectors":
        """The vectors of edits on the device."""
        from replaylens.engine.passes.edits_cuda import Vectors  # its kernel needs triton

        return Vectors(self.model.dtype, self.device)

    def program(self, rows: "Sequence[tuple[int, int, tuple[PlacedEdit, ...], Sequence[int] | None]]") -> "EditProgram | None":
        """The edits of packed rows, each given as (first position, number of rows, edits, tokens). None: none to apply.

        tokens  None: not known yet. Precondition: no edit of the rows asks for them
        """
        if not any(edits for *_, edits, _ in rows):
            return None
        from replaylens.engine.passes.edits_cuda import EditedRows, EditProgram

        made = EditProgram([EditedRows(*each) for each in rows], sites.table(self.model.config))
        return made if made.stages else None

    def reserve(self, table: PageTable, start: int, end: int) -> None:
        """Make [start, end) of `table` writable and copy shared pages. Mutates table, pool and cache, or raises OutOfPages."""
        self.cache.reserve(table, start, end)

    def _held(self) -> AbstractContextManager[None]:
        """`modes.canonical` for a pass. On CUDA a pass computes nothing on the host, so it neither needs nor pays for it."""
        on_host = any(stage.device.type == "cpu" for stage in self.stages)
        return modes.canonical() if on_host else nullcontext()

    def _blocks(
        self,
        x: Tensor,
        batch: Batch,
        cache: AnyCache,
        tap: Tap | None,
        first: int = 0,
        end: int | None = None,
        rows: Tensor | None = None,
        exact: bool = True,
        through: Callable[[Ops], Ops] = lambda ops: ops,
    ) -> Tensor:
        """`Decoder.run_blocks`, each block on its device; x and the result are where the model's head is.

        through  what is computed by instead of the ops
        """
        last = self.model.config.num_layers if end is None else end
        for stage, part in zip(self.stages, cache.parts if isinstance(cache, PlacedCache) else [cache], strict=True):
            begin, stop = max(first, stage.first), min(last, stage.end)
            if begin < stop:
                here, only = batch.on(stage.device), rows if stop == last else None
                only = None if only is None else only.to(stage.device)
                with torch.cuda.device(stage.device) if stage.device.type == "cuda" else nullcontext():
                    ops = through(self.ops(here, part, exact))
                    x = self.model.run_blocks(x.to(stage.device), here.positions, ops, tap, begin, stop, only)
        return x.to(self.model.device)

    @torch.inference_mode()
    def exact(self, segments: list[Segment], tap: Tap | None = None, stop_at_layer: int | None = None) -> PassResult:
        """The canonical pass: the bits of a row depend on its own path alone. Mutates the cache at the segments' rows."""
        batch = Batch(segments, self.pool, self.device)
        with self._held():
            residual = self._replayed(batch, tap, exact=True) if stop_at_layer is None else None
            if residual is None:
                residual = self._launched(batch, self.cache, self._edited(batch, tap), stop_at_layer)
            rows, none = batch.logit_rows(), residual.new_empty(0, self.model.config.vocab_size)
            logits = self._head(residual[rows], PassTap(frozenset())) if rows else none
        return PassResult(batch, residual, finite(logits, "logits"))

    def whole(
        self, tokens: list[int], edits: tuple[PlacedEdit, ...], tap: PassTap, recorder: "Recorder | None" = None
    ) -> WholePass:
        """A whole path with its edits in one canonical pass, in a cache of its own: needs no pages and changes no branch.

        recorder  writes down the steps from the first site to the last row's logits, to the same bits
        """
        self.weights.require_unchanged()
        with torch.inference_mode(recorder is None), torch.no_grad():  # where tensors count their changes
            return self._whole(tokens, edits, tap, recorder)

    def _whole(self, tokens: list[int], edits: tuple[PlacedEdit, ...], tap: PassTap, recorder: "Recorder | None") -> WholePass:
        num_rows, pool = len(tokens), PagePool(-(-len(tokens) // _WHOLE_PAGE), _WHOLE_PAGE)
        pool.reserve(table := PageTable(), 0, num_rows)
        cache = self._cache(pool, kernels=self.kernels)
        batch = Batch([Segment(table, 0, tokens, 1, edits)], pool, self.device)
        edited = self._edited(batch, tap, recorder is not None)
        outer = None if edited is None else UneditedTap(frozenset(edit.site for edit in edits), edited)
        with self._held():
            if recorder is None:
                residual = self._launched(batch, cache, outer)
                logits = self._head(residual[-1:], PassTap(frozenset()))[0]
            else:
                with recorder:
                    x = self.model.embedding(batch.tokens, batch.positions, recorder.tap(outer))
                    residual = self._blocks(x, batch, cache, recorder.tap(outer), through=recorder.ops)
                    logits = self.model.logits(residual[-1:], recorder.ops(self.head_ops()), recorder.tap(None))[0]
            finite(logits, "logits")
        before = {} if outer is None else {site: value[:num_rows] for site, value in outer.values.items()}
        return WholePass(residual, logits, {site: value[:num_rows] for site, value in tap.values.items()}, before)

    @torch.inference_mode()
    def resumed(
        self, segments: list[Segment], entering: Tensor | None, layer: int, tap: Tap | None = None, ends: Sequence[int] = ()
    ) -> PassResult:
        """The canonical pass from block `layer` on, without logits. Mutates the cache at the segments' rows. Precondition: the
        layer is one of `entries`, or nothing enters.

        entering  the segments' rows of the residual stream that enters the block: [rows, d_model]; None: from the tokens
        ends      the packed rows whose residual stream is the result, in order. What else follows the last attention is left
                  out, unless it is tapped
        """
        batch = Batch(segments, self.pool, self.device)
        with self._held():
            tap = self._edited(batch, tap)
            if entering is None:
                x = self.model.embedding(batch.tokens, batch.positions, tap)
            else:
                x = entering.to(self.model.device, self.model.dtype)
            rows = torch.tensor(ends, dtype=torch.int64, device=x.device)
            all_rows = wanted(tap, *self.model.late_sites)
            number = self.model.config.num_layers
            residual = self._blocks(x, batch, self.cache, tap, layer, number, None if all_rows else rows)
            residual = residual[rows] if all_rows else residual
        return PassResult(batch, residual, residual.new_empty(0, self.model.config.vocab_size))

    @torch.inference_mode()
    def fast(self, segments: list[Segment], tap: Tap | None = None) -> PassResult:
        """The same function in the fastest arithmetic: for drafts, and for requests that opt out of canonical bits."""
        batch = Batch(segments, self.pool, self.device)
        residual = self._replayed(batch, tap, exact=False)
        if residual is None:
            residual = self._launched(batch, self.cache, self._edited(batch, tap), exact=False)
        rows = batch.logit_rows()
        logits = (
            self.model.logits(residual[rows], self.head_ops(exact=False))
            if rows
            else residual.new_empty(0, self.model.config.vocab_size)
        )
        return PassResult(batch, residual, finite(logits, "logits"))

    def _replayed(self, batch: Batch, tap: Tap | None, exact: bool) -> Tensor | None:
        """The residual stream after the last block, from a graph. None if the pass has no graph and must be launched."""
        if self.graphs is None or not isinstance(tap, PassTap | None) or any(s.hooks for s in batch.segments):
            return None
        if batch.cuts_edges or (tap is not None and any(site.endswith(sites.STATE) for site in tap.wanted)):
            return None
        ran = self.graphs.run(batch, tap.wanted if tap is not None else frozenset(), exact, self._program(batch))
        if ran is None:
            return None
        if tap is not None:
            tap.values.update(ran.values)
        return ran.residual

    def _launched(self, batch: Batch, cache: AnyCache, tap: Tap | None, end: int | None = None, exact: bool = True) -> Tensor:
        """A pass from the tokens up to block `end`, launched: [rows, d_model]"""
        x = self.model.embedding(batch.tokens, batch.positions, tap)
        if end is None and cache is self.cache and (ran := self._from_recording(x, batch, tap, exact)) is not None:
            return ran
        return self._blocks(x, batch, cache, tap, 0, end, exact=exact)

    def _from_recording(self, x: Tensor, batch: Batch, tap: Tap | None, exact: bool) -> Tensor | None:
        """All blocks over x by a recorded pass, as `_launched` would run them. None: there is none."""
        if self.recorded is None or batch.edits_inside:
            return None
        from replaylens.engine.passes.edits_cpu import TableTap

        edits = tap.table if isinstance(tap, TableTap) else None
        inner = tap.inner if isinstance(tap, TableTap) else tap
        if not isinstance(inner, PassTap | None):  # hook functions
            return None
        ran = self.recorded.run(x, batch, frozenset() if inner is None else inner.wanted, exact, edits)
        if ran is not None and inner is not None:
            inner.values.update(ran.values)
        return None if ran is None else ran.residual

    def ops(self, batch: Batch, cache: KVCache, exact: bool = True) -> Ops:
        """The arithmetic of a pass over a batch with pages in `cache`, on the batch's device."""
        if not self._uses_kernels(batch.tokens.device):
            from replaylens.engine.passes import cpu

            return self._kind(cpu.CpuOps, exact)(batch, cache, self.products if exact else self.products.in_one_chain())
        from replaylens.engine.passes import cuda  # its kernels need triton, which a CPU machine may lack

        rows = cuda.device_rows(batch, cache)
        kind = self._kind(cuda.CanonicalCudaOps if exact else cuda.FastCudaOps, exact)
        return kind(cache, rows, batch if batch.cuts_edges else None)

    def _kind(self, kind: Any, exact: bool) -> Any:
        """A class of ops, for the places where the model's weights are."""
        return kind if self.elsewhere is None else self.elsewhere.ops(kind, not exact)

    def _uses_kernels(self, device: torch.device) -> bool:
        return self.kernels if device.type == self.device else device.type != "cpu"

    def head_ops(self, exact: bool = True) -> RowOps:
        """Ops for rows outside a pass: norms and products, no attention."""
        if not self.kernels:
            from replaylens.engine.passes.cpu import CpuRowOps

            return self._kind(CpuRowOps, exact)(self.products if exact else self.products.in_one_chain())
        from replaylens.engine.passes import cuda

        return self._kind(cuda.HeadOps if exact else cuda.FastHeadOps, exact)()

    def logits(self, residual: Tensor) -> Tensor:
        """Canonical logits of residual rows [rows, d_model] after any layer: the model's own, or the logit lens."""
        with self._held():
            return self._head(residual, PassTap(frozenset()))

    def head(self, residual: Tensor, sites: list[str]) -> Rows:
        """The sites `ln_final.hook_out` and `unembed.hook_out` of residual rows after the last block."""
        tap = PassTap(frozenset(sites))
        pieces: dict[str, list[Tensor]] = {site: [] for site in sites}
        with self._held():
            for piece in residual.split(LENS_ROWS):
                self._head(piece, tap)
                for site in sites:
                    pieces[site].append(tap.values[site][: len(piece)])
        return {site: torch.cat(values) for site, values in pieces.items()}

    @torch.inference_mode()
    def _head(self, residual: Tensor, tap: PassTap) -> Tensor:
        ops = self.head_ops()
        out = [self.model.logits(piece, ops, tap) for piece in residual.to(self.device).split(LENS_ROWS)]
        return torch.cat(out) if len(out) > 1 else out[0]

    def _program(self, batch: Batch) -> "EditProgram | None":
        return self.program([(s.start, len(s.tokens), s.edits, s.tokens) for s in batch.segments])

    def _edited(self, batch: Batch, tap: Tap | None, by_torch: bool = False) -> Tap | None:
        """The tap, called after the edits and hooks of the batch. None if nothing is kept or edited.

        by_torch  the edits are torch's operations, which a recorder writes down
        """
        if isinstance(tap, PassTap) and not tap.wanted:
            tap = None
        if self.one_device:
            return self._edited_on(batch, tap, self.model.device, by_torch)
        inner = None if tap is None else HomeTap(tap, self.model.device)
        return PlacedTap({s.device: self._edited_on(batch, inner, s.device, by_torch) for s in self.stages})

    def _edited_on(self, batch: Batch, tap: Tap | None, device: torch.device, by_torch: bool) -> Tap | None:
        """As `_edited`, for the layers on one device."""
        if not any(s.edits or s.hooks for s in batch.segments):
            return tap
        kernels = self._uses_kernels(device)
        if by_torch and not kernels:
            return EditTap(batch, tap)
        inner = EditTap(batch, tap, edits=False) if any(s.hooks for s in batch.segments) else tap
        if not kernels:
            from replaylens.engine.passes.edits_cpu import EditTable, TableTap  # its kernels are compiled for edits only

            table = EditTable(batch, sites.table(self.model.config))
            return TableTap(table, inner) if table.sites else inner
        if (program := self._program(batch)) is None:
            return inner
        from replaylens.engine.passes.edits_cuda import ProgramTap, Vectors

        vectors = self.vectors if self.one_device else Vectors(self.model.dtype, str(device))
        edited = ProgramTap(program.shape(), batch.num_rows, vectors, inner)
        edited.load(program, batch.num_rows)
        return edited

    # ---- captured rows ------------------------------------------------------------------------------------------

    def send(self, tap: PassTap, names: Sequence[str], packed: Sequence[int], num_rows: int, keep: Keep) -> None:
        """Start the way of captured rows to where they are kept; `tap.take` then gives them out. On a CPU they are there: they
        move out of the pass's memory, all together.

        packed    the rows that are wanted, in order
        num_rows  the rows of the pass
        """
        if not names or not packed:
            return
        from replaylens.engine.passes.transfer import PendingRows

        while self._sparse:
            self._sparse.pop().compact()
        every = len(packed) == num_rows
        if self.device == "cpu":
            sent = PendingRows(tap.copied(names, packed, num_rows), 0, self._sparse.append)
        else:
            groups, index = tap.stacked(names), None if every else torch.tensor(packed).to(self.device, non_blocking=True)
            groups = [(group, x[:, :num_rows] if index is None else x.index_select(1, index)) for group, x in groups]
            sent = PendingRows(groups, 0) if keep == "device" else self.host_copy.send(groups)
        tap.sent[keep] = (sent, None if every else {row: i for i, row in enumerate(packed)})

    def kept(self, rows: Rows, keep: Keep) -> Mapping[str, Tensor]:
        """Rows -> the same where they are kept, possibly still in transfer. What the host computed is there."""
        if keep == "device":
            return {site: x.to(self.device) for site, x in rows.items()}
        if not next(iter(rows.values())).is_cuda:
            return rows
        count = len(next(iter(rows.values())))
        return self.host_copy.send([((site,), x[None]) for site, x in rows.items()]).view(rows, 0, count)
