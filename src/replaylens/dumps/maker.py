"""Makes dumps: what a dump is to hold (`make_plan`), the rows of its shards (`ShardMaker`), and all of them (`write_dump`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import torch

from replaylens.dumps.content import Content, pieces_of
from replaylens.dumps.manifest import SiteEntry
from replaylens.dumps.plan import (
    KINDS,
    PREFIX,
    PROBES,
    DumpPlan,
    Encoders,
    Selector,
    check_texts,
    compact,
    plain,
    planned,
)
from replaylens.dumps.reader import Dump
from replaylens.dumps.rows import assemble
from replaylens.dumps.store import Store
from replaylens.dumps.writer import DumpWriter, WorkerPart
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, no_such
from replaylens.engine.loop.admission import FIXED_WINDOW
from replaylens.engine.machine import require_room
from replaylens.engine.model.sites import layer_of
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.positions import Position
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int, as_processes, defines, renamed, verb
from replaylens.engine.serving.watch import Watch
from replaylens.replay.replayer import ReplayOptions, Result, bytes_of_example, replay_examples
from replaylens.tasks.registry import require_own_name
from replaylens.tasks.task import AnyTask, Example
from replaylens.tasks.texts import GivenTexts

# ---- planning --------------------------------------------------------------------------------------------------------
# `make_plan`: from a user's options to a `DumpPlan` with every name resolved.


class ReplayKeywords(TypedDict, total=False):
    """How examples are replayed. `Engine.replay` documents it."""

    window: int | None
    sampling: Sampling | None
    edits: Sequence[Edit]
    max_new: int | None


class PlanKeywords(ReplayKeywords, total=False):
    """What a dump holds, as far as it can be sent to workers. `make_plan` documents it."""

    sites: str | Sequence[str]
    drafter: str
    rejected: bool
    positions: str | Selector
    stored_dtype: str | None
    examples_per_shard: int
    top_k: int
    targets: Sequence[str | int]
    full: bool
    probabilities: bool


@defines(ReplayKeywords, PlanKeywords)
@renamed(dtype="stored_dtype")
@verb
def make_plan(
    engine: Engine,
    task: AnyTask,
    examples: int | Iterable[int],
    *,
    sites: str | Sequence[str] = "STCZ",
    drafter: str = "lens",
    window: int | None = None,
    sampling: Sampling | None = None,
    edits: Sequence[Edit] = (),
    max_new: int | None = None,
    rejected: bool = True,
    positions: str | Selector = "all",
    stored_dtype: str | None = None,
    examples_per_shard: int = 128,
    top_k: int = 8,
    targets: Sequence[str | int] = (),
    full: bool = False,
    lens: TunedLens | None = None,
    probabilities: bool = True,
    features: Encoders = MappingProxyType({}),
    keep: int | None = None,
    watch: Watch | None = None,
) -> DumpPlan:
    """A plan for this engine, with every name resolved. It cites the task by name; BadTask if another task is
    registered under it.

    examples   number of examples, from index 0 on; or their indices, in any order
    edits      edits of every example, as in `Engine.replay`
    positions  rows to keep: "all", "generated", "last" (of each branch), "steps" (tokens that end a step of the task), another
               form of `engine.request.positions` such as "text:Paris", "label:subject" or "3:7", or a function from an
               `ExamplePath` to positions
    stored_dtype
               what rows are stored in: "float32", "bfloat16" or "float16"; default: what the model computes in
    top_k, targets, full, lens
               how Z is stored, as in `Engine.capture_spec`
    probabilities
               whether to store log-probability and entropy of every row, which takes the unembedding of all of them
    features   sparse features to store, name -> `SparseFeatures`; sites="" stores nothing else
    keep       the largest number of features per row, the strongest; default: k of a TopK SAE, else 64
    watch      of `engine.watch`: also store the scores of its probes, as tensors probes.NAME. The plan holds their weights
    """
    require_own_name(type(task))
    edits, indices = engine.tokenized(edits), compact(examples)
    where = Position.parse(positions, KINDS)
    if isinstance(task, GivenTexts):
        check_texts(task, where, indices)
    spec = engine.capture_spec(sites, rejected=rejected, top_k=top_k, targets=targets, full=full, lens=lens)
    stored = planned(engine, features, keep)
    watched = () if watch is None else as_instance("watch", watch, Watch, "the result of engine.watch").records
    if not spec.sites and not spec.thoughts and spec.lens is None and not stored and not watched:
        raise BadRequest(f"sites={sites!r} stores nothing. Give letters of STCZ, or site names.")
    _check_widths(engine, spec.sites)
    drafter = as_instance("drafter", drafter, str, "the name of a drafter")
    window = None if window is None else engine.require_positions("window", as_int("window", window, 1))
    return DumpPlan(
        task=task.name,
        knobs=plain(dict(vars(task.knobs))),
        examples=indices,
        sites=spec.sites + spec.thoughts,
        lens=spec.lens,
        drafter=drafter,
        drafter_settings=drafter_settings(engine, drafter),
        window=_window(engine, drafter, window),
        sampling=as_instance("sampling", Sampling() if sampling is None else sampling, Sampling, "a Sampling"),
        max_new=None if max_new is None else engine.require_positions("max_new", as_int("max_new", max_new, 0)),
        rejected=rejected,
        positions=positions if isinstance(positions, str) else where.spec,
        dtype=str(engine.model.dtype).removeprefix("torch.") if stored_dtype is None else stored_dtype,
        examples_per_shard=as_int("examples_per_shard", examples_per_shard, 1),
        edits=tuple(edit.to_json() for edit in edits),
        probabilities=as_bool("probabilities", probabilities),
        features=stored,
        probes=watched,
        end=engine.text.foreign_end,
        selector=where.function,
        encoders=dict(features),
    )


def _check_widths(engine: Engine, sites: Sequence[str]) -> None:
    """Raise BadRequest for a site whose rows differ in width."""
    for name in sites:
        if 0 in engine.sites.sites[name].shape:
            raise BadRequest(
                f"{name} cannot be dumped: its width is the number of keys, and a dump holds rows of one width. Leave it out."
            )


def plan_of_run(engine: Engine, task: AnyTask, indices: Iterable[int], options: ReplayOptions, **stored: Any) -> DumpPlan:
    """The plan that would reproduce a run: the same task and the same options, and more of `make_plan`."""
    replayed = {name: value for name, value in vars(options).items() if name != "deterministic"}
    return make_plan(engine, task, indices, **replayed | {"sites": options.sites or ()}, **stored)


def drafter_settings(engine: Engine, name: str) -> dict[str, Any]:
    """What drafts depend on besides the path: the drafter's exit layer, width and weights, and how a Thinking-States model
    guesses thoughts."""
    if name not in engine.loop.drafters:
        raise BadRequest(no_such("drafter", name, engine.loop.drafters))
    return engine.loop.drafters[name].settings() | engine.guesses()


def _window(engine: Engine, name: str, window: int | None) -> int | None:
    """The window as a number, so that a version with another default gives the same rejected branches."""
    drafter = engine.loop.drafters[name]
    if window is not None or not drafter.reproducible:
        return window
    return min(FIXED_WINDOW, engine.loop.max_rows // drafter.width)


# ---- maker -----------------------------------------------------------------------------------------------------------


class ShardMaker:
    """Makes the content of any shard of a plan. Leaves no branches or trace events on the engine; clears its prefix index.

    task  required if the plan's task is not registered
    """

    def __init__(self, engine: Engine, plan: DumpPlan, batch: int = 32, task: AnyTask | None = None) -> None:
        if batch < 1:
            raise BadRequest(f"Invalid batch {batch}. Give at least 1.")
        self.engine, self.plan, self.batch = engine, plan, batch
        self.task = task or plan.make_task()
        self._coming: dict[int, None] = {}
        """examples of the shards to make, in order, that were not replayed yet"""
        self._ahead: dict[int, Result] = {}

    def expect(self, numbers: Iterable[int]) -> None:
        """These shards will be made, in this order: where a batch has room, their examples are replayed ahead."""
        self._coming = dict.fromkeys(index for number in numbers for index in self.plan.indices(number))

    def make(self, number: int, done: Callable[[int], object] = lambda count: None) -> Content:
        """The content of one shard. Calls `done` with the number of examples just finished."""
        return self.rows_of(self.plan.indices(number), done)

    def rows_of(
        self,
        indices: Sequence[int],
        done: Callable[[int], object] = lambda count: None,
        change: Callable[[Result], Result] = lambda result: result,
    ) -> Content:
        """The rows of any examples of the plan. `change` may replace a result before its rows are read."""
        with self.engine.forest.quiet():  # the dump is its own record, and a trace must not grow with it
            while missing := [index for index in indices if index not in self._ahead]:
                count = self._replay_some(missing[: self.batch])
                # captured rows are always computed, so cached prefixes of their prompts would never be used
                self.engine.lock.alone(self.engine.prefix.clear)
                done(count)
            return assemble(self.engine, self.plan, [change(self._ahead.pop(index)) for index in indices])

    def _replay_some(self, own: list[int]) -> int:
        """Mutates: replays these examples, and as many of those that come next as a batch has room for. Returns how many."""
        for index in own:
            self._coming.pop(index, None)
        more = list(islice(self._coming, self.batch - len(own)))
        try:
            found = self._replay([self.task.example(index) for index in (*own, *more)])
        except Exception:  # if it is that of a later example, its own shard says so
            if not more:
                raise
            more, found = [], self._replay([self.task.example(index) for index in own])
        self._ahead |= zip((*own, *more), found, strict=True)
        for index in more:
            del self._coming[index]
        return len(own) + len(more)

    @property
    def wanted(self) -> list[str]:
        """The sites to capture: the stored ones, those that the lens reads, and the model's output for probabilities."""
        streams = self.plan.lens.sites if self.plan.lens is not None else ()
        final = self.engine.sites.per_layer("S")[-1:] if self.plan.probabilities else []
        encoded = [*(stored.site for stored in self.plan.features), *(probe.site for probe in self.plan.probes)]
        return [*self.plan.sites, *streams, *final, *encoded]

    @property
    def edits(self) -> list[Edit]:
        """The plan's edits, to apply to each prompt."""
        return [Edit.from_json(edit) for edit in self.plan.edits]

    def _replay(self, examples: list[Example]) -> list[Result]:
        plan = self.plan
        return replay_examples(
            self.engine,
            examples,
            ReplayOptions(
                sites=self.wanted,
                drafter=plan.drafter,
                window=plan.window,
                sampling=plan.sampling,
                edits=self.edits,
                max_new=plan.max_new,
                rejected=plan.rejected,
            ),
            self.batch,
        )

    def sites(self, content: Content) -> dict[str, SiteEntry]:
        return describe_sites(self.engine, content)


def describe_sites(engine: Engine, content: Content) -> dict[str, SiteEntry]:
    """The manifest entry of each stored tensor."""
    letters = {name: letter for letter in "STC" for name in engine.sites.per_layer(letter)}
    found = {}
    for name in content.tensors:
        x = pieces_of(content.tensors, name)[0][0]
        aliases = () if name.startswith(("Z.", PREFIX, PROBES)) else engine.sites.sites[name].aliases
        letter = "Z" if name.startswith("Z.") else letters.get(name)
        dtype = str(x.dtype).removeprefix("torch.")
        found[name] = SiteEntry(dtype, tuple(x.shape[1:]), layer_of(name), letter, aliases)
    return found


def _require_room(maker: ShardMaker, path: str | Path) -> None:
    """BadRequest if a shard exceeds the memory or the dump a local disk, by a few of the examples' prompts."""
    engine, plan = maker.engine, maker.plan
    if len(plan.examples) <= maker.batch:
        return
    each, count = bytes_of_example(engine, maker.task, plan.examples, maker.wanted), len(plan.examples)
    shard = min(count, plan.examples_per_shard)
    require_room(f"examples_per_shard={plan.examples_per_shard}", memory=shard * each)
    if plan.positions == "all" and (store := Store(path)).local:
        stored = bytes_of_example(engine, maker.task, plan.examples, list(plan.sites)) if plan.sites else 0
        dtype: torch.dtype = getattr(torch, plan.dtype)
        stored = stored * dtype.itemsize // engine.model.dtype.itemsize
        require_room(f"examples={count}", disk=count * stored, path=store.root)


def write_dump(
    engine: Engine,
    plan: DumpPlan,
    path: str | Path,
    *,
    batch: int = 32,
    resume: bool = False,
    part: WorkerPart = (0, 1),
    progress: bool = False,
    writers: int = 1,
) -> Dump | None:
    """Replay the plan's examples into a dump. Returns the finished dump, or None while shards of other writers are missing.

    batch    number of examples replayed together; changes no bit
    resume   continue an unfinished dump; shards with the recorded hash are kept
    part     (i, n): write only every n-th shard, from number i on; n such calls, in any processes, complete the dump
    writers  number of threads that hash and write shards during the replay; each holds one shard in memory
    """
    writers = as_processes("writers", writers)
    Store(path).require_writable()
    maker = ShardMaker(engine, plan, batch)
    if not resume:
        _require_room(maker, path)
    writer = DumpWriter(path, plan, engine.fingerprint)
    return writer.write(maker.make, maker.sites, maker.expect, resume=resume, part=part, progress=progress, writers=writers)
