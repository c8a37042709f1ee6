"""Passes as CUDA graphs. Without one, a pass of a few hundred rows waits for the host, which launches kernels one by one.

A graph is captured for a shape (rows, sequences, pages, captured sites) once the shape has occurred often enough to pay.
Rows are padded up. Padding rows use a spare page and belong to no attention tile, and no other row attends to them. Every
kernel gives a row the same bits at any number of rows, so replayed and launched passes agree. Edits are data of a graph
(`EditProgram`); passes with hook functions or with edits of attention patterns are always launched.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PageTable, page_matrix
from replaylens.engine.model.decoder import Decoder, LayerStage
from replaylens.engine.model.sites import table
from replaylens.engine.passes.batch import Batch
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps
from replaylens.engine.passes.edits_cuda import EditProgram, EditShape, ProgramTap, Vectors
from replaylens.engine.passes.sharing import KeyLayout, LevelShape, Sharing, room, sharing_of
from replaylens.engine.request.capture import PassTap
from replaylens.engine.terminal import pause_collector
from replaylens.kernels import launch
from replaylens.kernels.gpus import gpu_of
from replaylens.kernels.shared import PagedRows, plan_tiles

# ---- recorded --------------------------------------------------------------------------------------------------------
# `recorded`: what a function launches on a CUDA device, as a graph to replay; `kept`: such graphs by key, up to a number.

T = TypeVar("T")
K = TypeVar("K")
G = TypeVar("G", bound="HasGraph")


class HasGraph(Protocol):
    """What holds a recorded graph."""

    graph: torch.cuda.CUDAGraph


def kept(graphs: OrderedDict[K, G], key: K, make: Callable[[Any], G], most: int) -> G:
    """What is kept under a key. Mutates: made at first use, `make(pool)`, in the memory of the others; beyond `most`, the least
    recently used one is dropped."""
    if key not in graphs:
        graphs[key] = make(next(iter(graphs.values())).graph.pool() if graphs else None)
        if len(graphs) > most:
            graphs.popitem(last=False)
    graphs.move_to_end(key)
    return graphs[key]


def recorded(step: Callable[[], T], runs: int, pool: Any = None, on: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `step` launches, and what it returns: tensors that every replay writes.

    runs  of the step beforehand, which compile its kernels
    pool  torch's handle to the memory of other graphs, to share
    on    the stream to record on; None: torch's own, which belongs to one device
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are being written there
    with launch.in_graph():
        with torch.cuda.stream(stream):
            for _ in range(runs):
                step()
        stream.synchronize()
        # thread_local: other threads wait for captured rows meanwhile, which a global recording would take for an error
        with pause_collector(), torch.cuda.graph(graph, pool=pool, stream=on, capture_error_mode="thread_local"):
            found = step()
    return graph, found


# ---- graphs ----------------------------------------------------------------------------------------------------------

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""possible numbers of rows of a graph; larger passes keep the device busy without one"""
LARGE = 1024
MAX_CAPTURED, SHARE = 1 << 29, 256
"""a graph of more rows than LARGE holds at most so many bytes of captured sites, and one part in SHARE of the GPU's memory:
their values stay in its memory. One of fewer rows holds four times that part"""
MAX_GRAPHS = 24
"""beyond this, the least recently used graph is dropped"""
WORTH = 8
"""number of passes after which a shape gets a graph; capturing one costs as much as about ten passes gain from it"""


@dataclass(frozen=True)
class PassShape:
    """Everything that the launches of a pass depend on."""

    rows: int
    sequences: int
    pages: int
    per_tile: int
    """rows per attention tile; 0: one tile per row"""
    sites: frozenset[str]
    exact: bool
    edits: EditShape = ()
    shared: tuple[LevelShape, ...] = ()

    @property
    def tiles(self) -> int:
        """The most tiles that any division of the rows into sequences can need."""
        return -(-self.rows // self.per_tile) + self.sequences


class PassGraph:
    """One captured pass, or the layers of one that are on a device. Its outputs are valid until the next `run` of any graph."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        shape: PassShape,
        spare: int,
        vectors: Vectors,
        pool: Any,
        stage: LayerStage | None = None,
        stream: Any = None,
    ) -> None:
        """stage  its layers; default: all. stream: as in `recorded`"""
        self.model, self.shape, self.spare, device = model, shape, spare, vectors.device
        self.layers = (0, model.config.num_layers) if stage is None else (stage.first, stage.end)
        self.edits = ProgramTap(shape.edits, shape.rows, vectors)
        zeros = lambda *size, dtype=torch.int32: torch.zeros(size, dtype=dtype, device=device)  # noqa: E731
        self.entering = zeros(shape.rows, model.config.d_model, dtype=vectors.dtype) if self.layers[0] else None
        """the residual stream that enters the first layer; None: from the tokens"""
        self.tokens = zeros(shape.rows, dtype=torch.int64)
        self.positions = zeros(shape.rows, dtype=torch.int64)
        self.sequence = torch.full((shape.rows,), shape.sequences, dtype=torch.int32, device=device)
        self.short_positions = zeros(shape.rows)
        self.pages = torch.full((shape.sequences + 1, shape.pages), spare, dtype=torch.int32, device=device)
        self.tiles = zeros(shape.tiles, 2) if shape.per_tile else None
        self.shared = room(shape.shared, shape.rows, self.pages.device) if shape.shared else None
        rows = PagedRows(
            self.sequence,
            self.short_positions,
            self.pages,
            self.tiles,
            per_tile=shape.per_tile,
            shared=self.shared,
            single=not shape.per_tile,
        )
        self.ops = (CanonicalCudaOps if shape.exact else FastCudaOps)(cache, rows)
        self.graph, (self.residual, self.values) = recorded(self._pass, 2, pool, stream)  # before, writes go to the spare page

    def _pass(self) -> tuple[Tensor, dict[str, Tensor]]:
        tap = self.edits.inner = PassTap(self.shape.sites)
        x = self.model.embedding(self.tokens, self.positions, self.edits) if self.entering is None else self.entering
        return self.model.run_blocks(x, self.positions, self.ops, self.edits, *self.layers), tap.values

    def run(
        self,
        batch: Batch,
        pages: NDArray[np.int32],
        sharing: Sharing | None,
        program: EditProgram | None,
        entering: Tensor | None = None,
    ) -> None:
        """Replay the pass on a batch of its shape. The results are in `residual` and `values`, with padding rows at the end.

        entering  what enters its first layer, with padding rows; None: the tokens do
        """
        if self.entering is not None and entering is not None:
            self.entering.copy_(entering)
        shape, filled, sequence = self.shape, batch.num_rows, batch.sequence
        for own, given, rest in (
            (self.tokens, batch.tokens, 0),
            (self.positions, batch.positions, 0),
            (self.short_positions, batch.positions, 0),
            (self.sequence, torch.from_numpy(sequence), shape.sequences),
        ):
            own[:filled].copy_(given)
            own[filled:].fill_(rest)
        self.pages.copy_(torch.from_numpy(pages))
        if sharing is not None and self.shared is not None:
            sharing.load(self.shared)
        if self.tiles is not None:
            self.tiles.copy_(plan_tiles(sequence, shape.per_tile, shape.tiles))
        if program is not None:
            self.edits.load(program, shape.rows)
        self.graph.replay()


@dataclass(frozen=True, eq=False)
class PlacedPass:
    """The results of a pass over several devices."""

    residual: Tensor
    values: dict[str, Tensor]


class PassGraphs:
    """Graphs by shape, captured when a shape occurs for the `worth`-th time."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        spare: int,
        vectors: Vectors,
        worth: int = WORTH,
        stage: LayerStage | None = None,
    ) -> None:
        """spare  a page that padding rows may write to; it belongs to the caller
        stage  the layers that the graphs are of; default: all"""
        self.stage, self._stream = stage, None
        if stage is not None and stage.device.type == "cuda":
            self._stream = torch.cuda.Stream(stage.device)
        self.model, self.cache, self.spare, self.vectors, self.worth = model, cache, spare, vectors, worth
        self._seen: Counter[PassShape] = Counter()
        self.graphs: OrderedDict[PassShape, PassGraph] = OrderedDict()
        self._share = gpu_of(torch.device(vectors.device)).memory // SHARE
        self._captured: dict[frozenset[str], int] = {}
        """bytes of a row of these sites, at most"""

    def run(
        self,
        batch: Batch,
        sites: frozenset[str],
        exact: bool,
        program: EditProgram | None = None,
        entering: Tensor | None = None,
    ) -> PassGraph | None:
        """The graph that ran the pass, or None if the pass must be launched: its shape is new, or it is too large."""
        rows = next((size for size in SIZES if size >= batch.num_rows), None)
        if rows is None or not self._fits(rows, sites):
            return None
        tables = [s.table for s in batch.segments]
        size = (launch.next_power_of_2(len(tables)) + 1, launch.next_power_of_2(max(len(table.pages) for table in tables)))
        pages = page_matrix(tables, size, self.spare)
        sharing = sharing_of(batch, pages, self.cache)
        shape = self._shape(batch, pages, sites, exact, () if program is None else program.shape(), sharing)
        self._seen[shape] += 1
        if shape not in self.graphs and self._seen[shape] < self.worth:
            return None
        more = (self.stage, self._stream)
        make = lambda pool: PassGraph(self.model, self.cache, shape, self.spare, self.vectors, pool, *more)  # noqa: E731
        graph = kept(self.graphs, shape, make, MAX_GRAPHS)
        graph.run(batch, pages, sharing, program, entering)
        return graph

    def _fits(self, rows: int, sites: frozenset[str]) -> bool:
        """Whether a graph of so many rows may capture these sites."""
        if sites not in self._captured:
            known = table(self.model.config)
            self._captured[sites] = sum(4 * math.prod(known.sites[known.resolve(site)].shape) for site in sites)
        return rows * self._captured[sites] <= (4 * self._share if rows <= LARGE else min(MAX_CAPTURED, self._share))

    def _shape(
        self,
        batch: Batch,
        pages: NDArray[np.int32],
        sites: frozenset[str],
        exact: bool,
        edits: EditShape,
        sharing: Sharing | None,
    ) -> PassShape:
        longest = max(len(s.tokens) for s in batch.segments)
        per_tile = KeyLayout.of(self.cache).rows_per_tile(longest) if longest > 1 else 0
        return PassShape(
            rows=next(size for size in SIZES if size >= batch.num_rows),
            sequences=len(pages) - 1,
            pages=pages.shape[1],
            per_tile=per_tile,
            sites=sites,
            exact=exact,
            edits=edits,
            shared=() if sharing is None else sharing.shape,
        )


class PlacedGraphs:
    """Graphs of layers on several devices, replayed one after the other. All of them meet the same passes, so that each device
    has a graph of a shape when the first has one."""

    def __init__(self, parts: Sequence[PassGraphs], spare: PageTable, home: torch.device) -> None:
        """spare  the page that padding rows write to; never freed. home: where results go"""
        self.parts, self.spare, self.home = parts, spare, home

    @torch.inference_mode()
    def run(self, batch: Batch, sites: frozenset[str], exact: bool, program: EditProgram | None = None) -> PlacedPass | None:
        """As `PassGraphs.run`."""
        x: Tensor | None = None
        values: dict[str, Tensor] = {}
        for part in self.parts:
            assert part.stage is not None
            with torch.cuda.device(part.stage.device) if part.stage.device.type == "cuda" else nullcontext():
                ran = part.run(batch, sites, exact, program, x)
            if ran is None:
                return None
            x = ran.residual
            values |= {site: value.to(self.home) for site, value in ran.values.items()}
        assert x is not None
        return PlacedPass(x.to(self.home), values)
