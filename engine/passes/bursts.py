"""Bursts: several direct decode steps on a CUDA device without returning to the host in between.

If the decode step itself is canonical, a token needs no verification. The step is captured once as a CUDA graph per number of
requests and replayed. The chosen tokens feed the next step on the device. Captured sites, the logit lens and scores of probes
are part of the graph: after every step their rows leave for the host, while the next step runs. The host receives the tokens at
the end and commits them like accepted drafts. A request that ends within the burst drops the tokens after its end.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.engine.errors import InternalError
from replaylens.engine.memory.pages import PageTable, page_matrix
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps, seeds, temperatures
from replaylens.engine.passes.edits_cuda import EditProgram, EditShape, ProgramTap, rows_of
from replaylens.engine.passes.graphs import kept, recorded
from replaylens.engine.passes.runner import Keep, Runner
from replaylens.engine.passes.sharing import KeyLayout, LevelShape, Sharing, find_sharing, room
from replaylens.engine.passes.transfer import PendingRows, SiteGroup
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import CaptureSpec, PassTap, Place, PlacedRows, Rows
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.scores import Scorer, score
from replaylens.kernels.launch import next_power_of_2
from replaylens.kernels.sample import sample_logits
from replaylens.kernels.shared import PagedRows

# ---- burst rows ------------------------------------------------------------------------------------------------------
# The captured rows of a burst: `BurstRows`, made of `StepBlock`s, and `StepRows` for one request.


@dataclass(frozen=True)
class StepBlock:
    """The captured rows of some requests in consecutive steps."""

    rows: PendingRows
    """[steps held, ...] of every site, step by step"""
    held: Sequence[int]
    """the requests"""
    steps: int

    def of(self, request: int) -> range:
        """The rows of one request."""
        if request not in self.held:
            return range(0)
        return range(self.held.index(request), self.steps * len(self.held), len(self.held))


class BurstRows:
    """The captured rows of a burst, in blocks of one step or several."""

    def __init__(self, num_requests: int, sparse: Callable[["BurstRows"], object]) -> None:
        self.blocks: dict[Keep, list[StepBlock]] = {"host": [], "device": []}
        self._live = self._all = num_requests
        self._views: weakref.WeakSet[StepRows] = weakref.WeakSet()
        self._sparse = sparse
        self._steps: dict[Keep, tuple[list[tuple[StepBlock, int]], bool]] = {}

    def view(self, request: int, keep: Keep, names: Mapping[str, str]) -> "StepRows":
        """The rows of one request, one per step that keeps it. names: site -> name in the blocks"""
        view = StepRows(self, request, keep, names)
        self._views.add(view)
        return view

    def steps(self, request: int, keep: Keep) -> list[tuple[StepBlock, int]]:
        """The block of each row of a request, and the number of its step there. Precondition: all steps were taken."""
        if keep not in self._steps:
            blocks = self.blocks[keep]
            every = [(block, step) for block in blocks for step in range(block.steps)]
            self._steps[keep] = every, all(block.held == blocks[0].held for block in blocks)
        every, alike = self._steps[keep]
        return every if alike else [each for each in every if request in each[0].held]

    def dropped(self) -> None:
        """Mutates: one view is gone. If few are left, they move out, so that the rest can be freed."""
        self._live -= 1
        if self._live * 4 < self._all <= (self._live + 1) * 4 and self._live:
            self._sparse(self)

    def compact(self) -> None:
        """Mutates: every view takes a copy of its rows and lets go of the burst. Lost rows stay for their readers to see."""
        if not any(block.rows.lost for blocks in self.blocks.values() for block in blocks):
            for view in list(self._views):
                view.own()


class StepRows(PlacedRows):
    """The rows of one request in a burst, stacked when somebody looks."""

    def __init__(self, burst: BurstRows, request: int, keep: Keep, names: Mapping[str, str]) -> None:
        self._burst: BurstRows | None = burst
        self._request, self._keep, self._names = request, keep, names
        self._rows: Rows = {}

    def __getitem__(self, site: str) -> Tensor:
        self.own()  # all sites together: one by one, picking rows out of every step takes longer than copying them
        return self._rows[site]

    def names(self) -> Collection[str]:
        return self._names

    def own(self) -> None:
        """Mutates: copies the rows and lets go of the burst."""
        burst = self._burst  # read once: another thread may be here, too, with the same result
        if burst is None:
            return
        found = self._joined([(block, block.of(self._request)) for block in burst.blocks[self._keep]])
        self._rows = found
        self._burst = None
        burst.dropped()

    def place(self, number: int) -> Place:
        """Where a row lies, by its number."""
        burst = self._burst
        if burst is None:
            return self._rows, number, None
        block, step = burst.steps(self._request, self._keep)[number]
        return block.rows, step * len(block.held) + block.held.index(self._request), self._names

    def _joined(self, places: Sequence[tuple[StepBlock, Sequence[int]]]) -> Rows:
        """Copies of these rows, in this order, by site."""
        wanted, found = set(self._names.values()), Rows()
        places = [(block, rows) for block, rows in places if rows] or places[:1]
        for number, (names, _) in enumerate(places[0][0].rows.groups()):
            if picked := [place for place, name in enumerate(names) if name in wanted]:
                chosen = slice(None) if len(picked) == len(names) else picked
                joined = torch.cat([block.rows.groups()[number][1][chosen][:, _index(rows)] for block, rows in places], dim=1)
                found |= {names[place]: x for place, x in zip(picked, joined, strict=True)}
        return {site: found[name] for site, name in self._names.items()}

    def __del__(self) -> None:
        if self._burst is not None:
            self._burst.dropped()


def _index(rows: Sequence[int]) -> slice | list[int]:
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)


# ---- step buffer -----------------------------------------------------------------------------------------------------
# `StepBuffer`: captured rows of consecutive decode steps, gathered on the device until they are worth a transfer.

ENOUGH = 1 << 20
"""bytes of a transfer: with fewer, events between the graphs of two steps cost more than copies"""


@dataclass
class StepBuffer:
    """The rows of some requests in consecutive steps: [sites, steps requests, ...], step by step."""

    steps: range
    held: Sequence[int]
    """the requests; a range from 0 where these are the first ones"""
    groups: list[SiteGroup] = field(default_factory=list)
    _index: Tensor | None = None

    def add(self, step: int, staged: list[SiteGroup]) -> bool:
        """Mutates: takes the step's rows out of `staged` [sites, requests, ...]. Returns whether all steps are there."""
        count = len(self.held)
        if step == self.steps[0]:
            room = count * len(self.steps)
            self.groups = [(names, x.new_empty(len(x), room, *x.shape[2:])) for names, x in staged]
            if staged and not isinstance(self.held, range):
                self._index = torch.tensor(self.held).to(staged[0][1].device, non_blocking=True)
        at = (step - self.steps[0]) * count
        for (_, x), (_, target) in zip(staged, self.groups, strict=True):
            target[:, at : at + count] = x[:, :count] if self._index is None else x.index_select(1, self._index)
        return step == self.steps[-1]


def step_buffers(held: Sequence[Sequence[int]], row_bytes: int) -> list[StepBuffer]:
    """Buffers for the requests whose rows are kept in each step: neighbours with the same ones, up to ENOUGH bytes together."""
    found: list[StepBuffer] = []
    for step, some in enumerate(held):
        if not some:
            continue
        last = found[-1] if found else None
        most = max(1, ENOUGH // max(1, row_bytes * len(some)))
        if last is not None and last.steps.stop == step and last.held == some and len(last.steps) < most:
            last.steps = range(last.steps.start, step + 1)
        else:
            found.append(StepBuffer(range(step, step + 1), some))
    return found


# ---- bursts ----------------------------------------------------------------------------------------------------------

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""numbers of requests that have their own graph; others are padded up"""

ReadLens = Callable[[LensSpec, Tensor, Tensor, Tensor | None, Tensor], Rows]
"""(spec, residual streams [layers, rows, d], tokens that follow the rows, targets, logits [rows, vocab]) -> Z by name:
[rows, layers, ...], on the device"""
LEAD = 8
"""steps that wait for the device when the host may turn to other work; launching more of them then competes with it"""
MAX_GRAPHS = 64
"""beyond this, the least recently used graph is dropped"""


@dataclass(frozen=True)
class BurstCapture:
    """What a request in a burst captures."""

    spec: CaptureSpec
    steps: Sequence[int]
    """the steps whose rows are kept, in order"""


@dataclass
class BurstRequest:
    """One request in a burst: its last token with its position, a table with room for all steps, and its sampling."""

    token: int
    position: int
    table: PageTable
    sampling: Sampling
    """`bare`: the device does not apply penalties, biases or filters"""
    edits: tuple[PlacedEdit, ...] = ()
    wanted: BurstCapture | None = None


@dataclass(frozen=True)
class GraphKey:
    """Everything that the launches of a decode step depend on."""

    size: int
    max_pages: int
    exact: bool
    drawn: bool
    sites: frozenset[str] = frozenset()
    """captured in every step"""
    lenses: tuple[LensSpec, ...] = ()
    scored: tuple[Scorer, ...] = ()
    """whose scores are computed in every step"""
    edits: EditShape = ()
    shared: tuple[LevelShape, ...] = ()


class DecodeGraph:
    """One captured decode step. The step itself advances its input tensors."""

    def __init__(self, runner: Runner, key: GraphKey, spare: int, read_lens: ReadLens, pool: Any = None) -> None:
        """pool  torch's handle to the memory of other graphs, to share: what one stages is copied before another is replayed"""
        device, size = torch.device(runner.device), key.size
        self.runner, self.key, self.spare, self.read_lens = runner, key, spare, read_lens
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(size, dtype=torch.int64, device=device)
        """before clamping: a row of NaN draws a token beyond the vocabulary, which the next step must not look up"""
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.short_positions = torch.zeros(size, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(size, dtype=torch.float64, device=device)
        self.pages = torch.full((size, key.max_pages), spare, dtype=torch.int32, device=device)
        sequence = torch.arange(size, dtype=torch.int32, device=device)
        self.shared = room(key.shared, size, device) if key.shared else None
        rows = PagedRows(sequence, self.short_positions, self.pages, shared=self.shared, single=True)
        self.ops = (CanonicalCudaOps if key.exact else FastCudaOps)(runner.one_cache, rows)
        self.edits = ProgramTap(key.edits, size, runner.vectors)
        self.targets = [lens.targets_on(device) for lens in key.lenses]
        """of each lens; the graph reads them at every replay"""
        self.staged: list[SiteGroup]
        """captured rows of the last step, [sites, requests, ...]; the next step overwrites them"""
        with torch.inference_mode():
            self.graph, self.staged = recorded(self._step, 2, pool)  # the runs before write to the spare page

    def _step(self) -> list[SiteGroup]:
        wanted = [lens.sites for lens in self.key.lenses] + [(each.site,) for each in self.key.scored]
        model, tap = self.runner.model, PassTap(self.key.sites.union(*wanted))
        self.edits.inner = tap
        self.short_positions.copy_(self.positions)
        residual = model(self.tokens, self.positions, self.ops, self.edits)
        logits = model.logits(residual, self.ops, tap)
        self.positions.add_(1)
        noise = (self.seeds, self.positions, self.temperatures) if self.key.drawn else ()
        self.chosen.copy_(sample_logits(logits, *noise)[0])
        self.tokens.copy_(self.chosen.clamp(max=model.config.vocab_size - 1))
        score(tap.values, self.key.scored, kernels=True)
        groups = tap.stacked([*sorted(self.key.sites), *(each.name for each in self.key.scored)])
        for number, spec in enumerate(self.key.lenses):
            x = torch.stack([tap.values[site] for site in spec.sites])
            read = self.read_lens(spec, x, self.tokens, self.targets[number], logits)
            groups += [((f"{number}:{name}",), z[None]) for name, z in read.items()]
        return groups

    @torch.inference_mode()
    def run(
        self,
        places: list[BurstRequest],
        steps: int,
        pages: NDArray[np.int32],
        sharing: Sharing | None,
        program: EditProgram | None,
        rows: BurstRows,
        busy: Callable[[], object],
    ) -> Tensor:
        """Tokens chosen by `steps` steps: [steps, requests], on the device. NaN logits give a token beyond the vocabulary.

        pages  of the requests: [requests, pages], on the host
        busy   is called when the device has work for a while

        Mutates `rows`: adds what the requests capture.
        """
        size, rest = self.key.size, self.key.size - len(places)
        self.tokens.copy_(torch.tensor([p.token for p in places] + [0] * rest))
        self.positions.copy_(torch.tensor([p.position for p in places] + [0] * rest))
        self.pages.fill_(self.spare)
        self.pages[: len(places)] = torch.from_numpy(pages).to(self.pages.device, non_blocking=True)
        if sharing is not None and self.shared is not None:
            sharing.load(self.shared)
        if self.key.drawn:
            samplings = [p.sampling for p in places] + [Sampling()] * rest
            self.seeds.copy_(seeds(samplings, self.seeds.device))
            self.temperatures.copy_(temperatures(samplings, self.seeds.device))
        edited, waiting = self._edited(program, len(places), steps), self._step_buffers(places, steps)
        out = torch.empty(steps, size, dtype=torch.int64, device=self.tokens.device)
        for step in range(steps):
            if rest:
                self.positions[len(places) :] = 0  # padding stays on the spare slot
            if edited is not None:
                self.edits.point(edited[0][step], edited[1][step])
            self.graph.replay()
            out[step] = self.chosen
            for keep, blocks in rows.blocks.items():
                if (buffer := waiting[keep].get(step)) is not None and buffer.add(step, self.staged):
                    blocks.append(StepBlock(self._sent(buffer.groups, keep), buffer.held, len(buffer.steps)))
            if step == min(LEAD, steps) - 1:
                busy()
        return out[:, : len(places)]

    def _edited(self, program: EditProgram | None, requests: int, steps: int) -> tuple[Tensor, Tensor] | None:
        """What the rows of every step do: numbers [steps, stages, NUMBERS, size] and masks [steps, projections, size]."""
        if program is None:
            return None
        self.edits.load_vectors(program)
        found = []
        for x in rows_of(program, program.num_rows):
            by_step = x.reshape(*x.shape[:-1], requests, steps)
            padded = torch.zeros(*x.shape[:-1], self.key.size, steps, dtype=torch.from_numpy(x[:0]).dtype)
            padded[..., :requests, :] = torch.from_numpy(by_step)
            found.append(padded.movedim(-1, 0).contiguous().to(self.tokens.device, non_blocking=True))
        return found[0], found[1]

    def _step_buffers(self, places: list[BurstRequest], steps: int) -> dict[Keep, dict[int, StepBuffer]]:
        """For every step, where its rows gather."""
        row_bytes = sum(x[:, :1].nbytes for _, x in self.staged)
        return {
            keep: {step: buffer for buffer in step_buffers(held, row_bytes) for step in buffer.steps}
            for keep, held in _held(places, steps).items()
        }

    def _sent(self, groups: list[SiteGroup], keep: Keep) -> PendingRows:
        """Rows being copied to where they are kept."""
        return PendingRows(groups, 0) if keep == "device" else self.runner.host_copy.send(groups)

    def names(self, spec: CaptureSpec) -> dict[str, str]:
        """Sites of a request -> the names under which their rows are staged."""
        own = {site: site for site in spec.recorded}
        if spec.lens is not None:
            mark = f"{self.key.lenses.index(spec.lens)}:"
            own |= {name.removeprefix(mark): name for names, _ in self.staged for name in names if name.startswith(mark)}
        return own


def _held(places: list[BurstRequest], steps: int) -> dict[Keep, list[Sequence[int]]]:
    """For every step, the requests that keep its rows; a range from 0 where these are the first ones."""
    kept: dict[Keep, list[Sequence[int]]] = {"host": [()] * steps, "device": [()] * steps}
    wanted = [(i, place.wanted) for i, place in enumerate(places) if place.wanted is not None and len(place.wanted.steps)]
    if len({each.spec.keep for _, each in wanted}) == 1 and all(each.steps == range(steps) for _, each in wanted):
        numbers = [i for i, _ in wanted]  # the usual case: all that capture keep every step
        whole: Sequence[int] = range(len(numbers)) if numbers[-1] == len(numbers) - 1 else numbers
        return kept | {wanted[0][1].spec.keep: [whole] * steps}
    found: dict[Keep, list[list[int]]] = {"host": [[] for _ in range(steps)], "device": [[] for _ in range(steps)]}
    for i, place in enumerate(places):
        if place.wanted is not None:
            own = found[place.wanted.spec.keep]
            for step in place.wanted.steps:
                own[step].append(i)
    return {
        keep: [range(len(some)) if some and some[-1] == len(some) - 1 else some for some in by_step]
        for keep, by_step in found.items()
    }


def _specs(places: list[BurstRequest]) -> dict[int, CaptureSpec]:
    """What the requests capture, by identity: branches that were prompted together share it."""
    found = (place.wanted for place in places)
    return {id(wanted.spec): wanted.spec for wanted in found if wanted is not None and wanted.steps}


class Bursts:
    """Graphs by what a step does, captured when first needed."""

    def __init__(self, runner: Runner, read_lens: ReadLens) -> None:
        self.runner, self.read_lens = runner, read_lens
        self._graphs: OrderedDict[GraphKey, DecodeGraph] = OrderedDict()
        self._sparse: list[BurstRows] = []
        spare = PageTable()
        runner.pool.reserve(spare, 0, 1)
        self.spare = spare
        """the page that padding requests write to; never freed"""
        self.meanwhile: list[Callable[[], object]] = []
        """are called in every burst when the device has work for a while; see `Forest.meanwhile`"""

    def busy(self) -> None:
        """Calls what waits for the device to have work."""
        for work in tuple(self.meanwhile):
            work()

    def run(self, places: list[BurstRequest], steps: int, exact: bool) -> tuple[list[list[int]], list[StepRows | None]]:
        """(the next `steps` tokens of each request, the rows that it captures). Precondition: the tables have room for all."""
        if not places or steps < 1:
            raise InternalError(f"A burst has {len(places)} requests and {steps} steps. It needs at least one of each.")
        while self._sparse:
            self._sparse.pop().compact()
        if len(places) > SIZES[-1]:
            tokens, views = self.run(places[: SIZES[-1]], steps, exact)
            more, others = self.run(places[SIZES[-1] :], steps, exact)
            return tokens + more, views + others
        program = self.runner.program([(place.position, steps, place.edits, None) for place in places])
        tables = [place.table for place in places]
        width = next_power_of_2(max(len(table.pages) for table in tables))
        pages = page_matrix(tables, (len(tables), width), self.spare.pages[0])
        cache, starts = self.runner.one_cache, [place.position for place in places]
        sharing = find_sharing(pages, starts, [1] * len(places), KeyLayout.of(cache), cache.worth_sharing)
        key = self._key(places, pages, sharing, exact, program)
        graph, wanted = self._graph(key), [place.wanted for place in places]
        rows = BurstRows(sum(each is not None and len(each.steps) > 0 for each in wanted), self._sparse.append)
        chosen = graph.run(places, steps, pages, sharing, program, rows, self.busy)
        names = {number: graph.names(spec) for number, spec in _specs(places).items()}
        return chosen.T.tolist(), [
            rows.view(i, each.spec.keep, names[id(each.spec)]) if each and each.steps else None for i, each in enumerate(wanted)
        ]

    def _graph(self, key: GraphKey) -> DecodeGraph:
        """The graph for this kind of step, recorded when first needed."""
        make = lambda pool: DecodeGraph(self.runner, key, self.spare.pages[0], self.read_lens, pool)  # noqa: E731
        return kept(self._graphs, key, make, MAX_GRAPHS)

    def _key(
        self,
        places: list[BurstRequest],
        pages: NDArray[np.int32],
        sharing: Sharing | None,
        exact: bool,
        program: EditProgram | None,
    ) -> GraphKey:
        specs = _specs(places).values()
        lenses = tuple(dict.fromkeys(spec.lens for spec in specs if spec.lens is not None))
        sites = {site for spec in specs for site in spec.sites}
        scored = {each.name: each for spec in specs for each in spec.scored}
        return GraphKey(
            next(size for size in SIZES if size >= len(places)),
            pages.shape[1],
            exact,
            any(place.sampling.temperature for place in places),
            frozenset(sites),
            lenses,
            tuple(scored[name] for name in sorted(scored)),
            () if program is None else program.shape(),
            () if sharing is None else sharing.shape,
        )
