"""`ShardMaker`: replays the examples of a shard on an engine and returns their rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from replaylens.engine.dump.content import CORE, Content, Pieces, pieces_of
from replaylens.engine.dump.manifest import SiteEntry
from replaylens.engine.dump.plan import (
    CUSTOM,
    FORMS,
    POSITIONS,
    PREFIX,
    PROBES,
    DumpPlan,
    Encoders,
    ExamplePath,
    NamedPosition,
    Selector,
    check_texts,
    compact,
    ends_of,
    matched,
    plain,
    planned,
    to_tensors,
)
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.writer import DumpWriter, WorkerPart
from replaylens.engine.errors import BadRequest, InternalError, NotCertified, UnknownSite, no_such
from replaylens.engine.lens import lens as readout
from replaylens.engine.lens.lens import TunedLens
from replaylens.engine.loop.admission import FIXED_WINDOW
from replaylens.engine.model import modes
from replaylens.engine.model.sites import layer_of
from replaylens.engine.records import LensSpec
from replaylens.engine.replay.replayer import ReplayOptions, Result, own_edits, replay_examples
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int, defines, short_repr, verb
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.watch import Watch, scorers
from replaylens.tasks.reading import RESERVED
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
    dtype: str | None
    examples_per_shard: int
    top_k: int
    targets: Sequence[str | int]
    full: bool
    probabilities: bool


@defines(ReplayKeywords, PlanKeywords)
@verb
def make_plan(
    engine: Core,
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
    dtype: str | None = None,
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
    """A plan for this engine, with every name resolved. It cites the task by name; TaskNameTaken if another task is
    registered under it.

    examples   number of examples, from index 0 on; or their indices, in any order
    edits      edits of every example, as in `Engine.replay`
    positions  rows to keep: "all", "generated", "last" (of each branch), "steps" (tokens that end a step of the task), a
               place such as "text:Paris", "label:subject" or "3:7" (see `places`), or a function from an `ExamplePath` to
               positions
    dtype      "float32", "bfloat16" or "float16"; default: that of the model
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
    _check_positions(task, positions, indices)
    spec = engine.capture_spec(sites, rejected=rejected, top_k=top_k, targets=targets, full=full, lens=lens)
    stored = planned(engine, features, keep)
    watched = () if watch is None else as_instance("watch", watch, Watch, "the result of engine.watch").records
    if not spec.sites and not spec.thoughts and spec.lens is None and not stored and not watched:
        raise BadRequest(f"sites={sites!r} stores nothing. Give letters of STCZ, or site names.")
    _check_widths(engine, spec.sites)
    drafter = as_instance("drafter", drafter, str, "the name of a drafter")
    return DumpPlan(
        task=task.name,
        knobs=plain(dict(vars(task.knobs))),
        examples=indices,
        sites=spec.sites + spec.thoughts,
        lens=spec.lens,
        drafter=drafter,
        drafter_settings=drafter_settings(engine, drafter),
        window=_window(engine, drafter, None if window is None else as_int("window", window, 1)),
        sampling=as_instance("sampling", Sampling() if sampling is None else sampling, Sampling, "a Sampling"),
        max_new=None if max_new is None else as_int("max_new", max_new, 0),
        rejected=rejected,
        positions=positions if isinstance(positions, str) else CUSTOM + getattr(positions, "__qualname__", "function"),
        dtype=str(engine.model.dtype).removeprefix("torch.") if dtype is None else dtype,
        examples_per_shard=as_int("examples_per_shard", examples_per_shard, 1),
        edits=tuple(edit.to_json() for edit in edits),
        probabilities=as_bool("probabilities", probabilities),
        features=stored,
        probes=watched,
        end=engine.text.foreign_end,
        selector=None if isinstance(positions, str) else positions,
        encoders=dict(features),
    )


def _check_widths(engine: Core, sites: Sequence[str]) -> None:
    """Raise BadRequest for a site whose rows differ in width."""
    for name in sites:
        if 0 in engine.sites.sites[name].shape:
            raise BadRequest(
                f"{name} cannot be dumped: its width is the number of keys, and a dump holds rows of one width. Leave it out."
            )


def _check_positions(task: AnyTask, positions: str | Selector, indices: Sequence[int]) -> None:
    """Raise BadRequest if there are no such positions, or if given texts lack them."""
    if not isinstance(positions, str) and (not callable(positions) or isinstance(positions, type)):
        raise BadRequest(
            f"positions={short_repr(positions)}: give one of {', '.join(POSITIONS)}, {FORMS}, or a function of a path"
        )
    if isinstance(task, GivenTexts):
        check_texts(task, positions, indices)


def plan_of_run(engine: Core, task: AnyTask, indices: Iterable[int], options: ReplayOptions, **stored: Any) -> DumpPlan:
    """The plan that would reproduce a run: the same task and the same options, and more of `make_plan`."""
    replayed = {name: value for name, value in vars(options).items() if name != "deterministic"}
    return make_plan(engine, task, indices, **replayed | {"sites": options.sites or ()}, **stored)


def drafter_settings(engine: Core, name: str) -> dict[str, Any]:
    """What drafts depend on besides the path: the drafter's exit layer, width and weights, and how a Thinking-States model
    guesses thoughts."""
    if name not in engine.loop.drafters:
        raise BadRequest(no_such("drafter", name, engine.loop.drafters))
    return engine.loop.drafters[name].settings() | engine.guesses()


def _window(engine: Core, name: str, window: int | None) -> int | None:
    """The window as a number, so that a version with another default gives the same rejected branches."""
    drafter = engine.loop.drafters[name]
    if window is not None or not drafter.reproducible:
        return window
    return min(FIXED_WINDOW, engine.loop.max_rows // drafter.width)


# ---- rows ------------------------------------------------------------------------------------------------------------
# From replayed examples to the rows of a dump: number branches, select positions, read labels, add probabilities.
#
# Rows are ordered by (example, branch, position). Branch 0 is the accepted path. Rejected branches follow, ordered by fork
# position, then by tokens, so that the order does not depend on when the engine computed them.

_BLOCK = 4096
"""rows per lens readout"""
_PATHS = 32
"""paths that are recomputed together"""


def assemble(engine: Core, plan: DumpPlan, results: Sequence[Result]) -> Content:
    """The rows of some examples, as a dump with this plan stores them. A pure function of plan, weights and paths."""
    paths, kept, starts, rows = _layout(engine, plan, results)
    tensors = _tensors(engine, plan, paths, rows)
    logprob, entropy = _probabilities(engine, plan, paths, starts, rows, tensors)
    columns = _columns(engine, paths, kept)
    columns["logprob"] = pa.array(logprob, pa.float32(), mask=np.isnan(logprob))
    columns["entropy"] = pa.array(entropy, pa.float32(), mask=np.full(len(rows), not plan.probabilities))
    labels = _labels(plan, paths, kept)
    return Content(tensors, pa.table({**{name: columns[name] for name in CORE.names}, **labels}))


def probabilities(engine: Core, plan: DumpPlan, results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, entropy) [rows] float32 of the rows that `assemble` gives, bit for bit; NaN where unknown."""
    paths, _, starts, rows = _layout(engine, plan, results)
    lens = _lens_rows(engine, plan.lens, paths, torch.from_numpy(rows)) if plan.lens is not None else {}
    return _probabilities(engine, plan, paths, starts, rows, lens)


def _layout(
    engine: Core, plan: DumpPlan, results: Sequence[Result]
) -> tuple[list[ExamplePath], list[list[int]], np.ndarray, np.ndarray]:
    """(paths, kept positions of each, the number of each path's first row among all rows of the paths, numbers of the kept)."""
    paths = [path for result in sorted(results, key=lambda r: r.example.index) for path in _paths(engine, result)]
    kept = [_chosen(engine, plan, path) for path in paths]
    starts = np.cumsum([0, *(len(path.tokens) - path.base for path in paths)])
    rows = np.concatenate([[], *(start + np.array(k) - p.base for start, k, p in zip(starts, kept, paths, strict=False))])
    return paths, kept, starts, rows.astype(np.int64)


def _paths(engine: Core, result: Result) -> list[ExamplePath]:
    """The accepted path of an example, then its rejected ones in canonical order, equal ones once. NotCertified if its bits are
    not promised."""
    if not result.certified:
        raise NotCertified(
            f"Example {result.example.index} was computed on the fast path or with hook functions, so its bits cannot be "
            f"reproduced. Replay it with deterministic=True, and with edits instead of hooks."
        )
    distinct = {(other.fork_position, tuple(other.tokens)): other for other in result.rejected}
    found = [(0, result.tokens, result.activations)]
    for _, other in sorted(distinct.items(), key=lambda item: item[0]):
        if other.activations is not None:
            found.append((other.fork_position, other.tokens, other.activations))
    paths: list[ExamplePath] = []
    for number, (base, tokens, recording) in enumerate(found):
        if recording.positions() != list(range(base, len(tokens))):
            raise InternalError(f"Captured rows do not cover the tokens of branch {number} of example {result.example.index}.")
        paths.append(
            ExamplePath(
                result.example,
                number,
                tokens,
                result.num_prompt,
                base,
                result.correct,
                recording,
                engine.text.tokenizer,
                paths[0] if paths else None,
            )
        )
    return paths


def _chosen(engine: Core, plan: DumpPlan, path: ExamplePath) -> list[int]:
    """The positions of the path's own rows that the plan keeps."""
    own = range(path.base, len(path.tokens))
    match plan.positions:
        case "all":
            return list(own)
        case "generated":
            return [position for position in own if position >= path.num_prompt]
        case "last":
            return list(own[-1:])
        case "steps":
            ends = {step.end for step in path.reading.steps}
            return [position for position in own if _ends_step(path.offsets[position], ends)]
    if (place := NamedPosition.parse(plan.positions)) is not None:
        there = _placed(engine, place, path)
        return [position for position in own if position in there]
    if plan.selector is None:
        raise BadRequest(f"The function of positions {plan.positions!r} is not stored in files. Pass it again.")
    chosen = plan.selector(path)
    if not isinstance(chosen, Iterable):
        raise BadRequest(f"{plan.positions} gave {short_repr(chosen)}: a function for positions gives several of them")
    wanted = {as_int(f"a position of {plan.positions}", position) for position in chosen}
    if unknown := [position for position in wanted if not 0 <= position < len(path.tokens)]:
        raise BadRequest(f"{plan.positions} chose position {unknown[0]} of a path with {len(path.tokens)} tokens.")
    return [position for position in own if position in wanted]


def _placed(engine: Core, place: NamedPosition, path: ExamplePath) -> Container[int]:
    """The positions of a path at a place."""
    match place.kind:
        case "text":
            return set(ends_of(place.name, [engine.text.token(token) for token in path.tokens]))
        case "label":
            values = path.labels_at(range(len(path.tokens)), [place.name])[place.name]
            return {position for position, value in enumerate(values) if value is not None}
    start, stop = place.span(path.num_prompt)
    return range(max(start, 0), int(min(stop, len(path.tokens))))


def _ends_step(offset: tuple[int, int], ends: set[int]) -> bool:
    """Whether the token contains the last character of a step."""
    return any(offset[0] < end <= offset[1] for end in ends)


def _columns(engine: Core, paths: list[ExamplePath], kept: list[list[int]]) -> dict[str, pa.Array]:
    """Index columns that follow from paths and positions alone."""
    counts = np.array([len(positions) for positions in kept])
    position = np.concatenate([np.asarray(positions, dtype=np.int32) for positions in kept])
    token = np.concatenate([np.asarray(p.tokens, dtype=np.int32)[k] for p, k in zip(paths, kept, strict=True)])
    branch = np.repeat([path.branch for path in paths], counts)
    states = np.where(branch > 0, 2, position >= np.repeat([path.num_prompt for path in paths], counts))
    known, place = np.unique(token, return_inverse=True)
    columns = {
        "example": pa.array(np.repeat([path.example.index for path in paths], counts)),
        "root": pa.array([path.example.root for path in paths]).take(pa.array(np.repeat(np.arange(len(paths)), counts))),
        "branch": pa.array(branch),
        "parent": pa.array(np.zeros(len(branch), dtype=np.int32), mask=branch == 0),
        "fork_position": pa.array(np.repeat([path.base for path in paths], counts)),
        "position": pa.array(position),
        "token": pa.array(token),
        "text": pa.array([engine.text.token(int(word)) for word in known], pa.string()).take(pa.array(place)),
        "token_state": pa.array(["prompt", "accepted", "rejected"]).take(pa.array(states)),
        "accepted": pa.array(branch == 0),
        "correct": pa.array(np.repeat(np.array([path.correct for path in paths], dtype=object), counts), pa.bool_()),
    }
    return {name: column.cast(CORE.field(name).type) for name, column in columns.items()}


def _labels(plan: DumpPlan, paths: list[ExamplePath], kept: list[list[int]]) -> dict[str, pa.Array]:
    """The task's labels at every kept row, one column per label."""
    names = paths[0].example.maker.label_names
    if clash := set(names) & set(RESERVED):
        raise BadRequest(f"Labels {sorted(clash)} of task {plan.task!r} are names of index columns. Rename them.")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for path, positions in zip(paths, kept, strict=True):
        for name, values in path.labels_at(positions, names).items():
            columns[name] += values
    return {name: _label_array(name, values) for name, values in columns.items()}


def _label_array(name: str, values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    types = {str: pa.string(), int: pa.int64(), bool: pa.bool_(), float: pa.float64()}
    if len(kinds) > 1 or not kinds <= set(types):
        raise BadRequest(
            f"Label {name!r} has values of types {sorted(k.__name__ for k in kinds)}. Use one of str, int, float, bool."
        )
    return pa.array(values, types[kinds.pop()] if kinds else pa.null())


def _probabilities(
    engine: Core, plan: DumpPlan, paths: list[ExamplePath], starts: np.ndarray, rows: np.ndarray, tensors: Mapping[str, Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of the token, entropy of the distribution over the next one) for each kept row; NaN where unknown.

    A token's log-probability is read off the row before it. For the first token of a rejected branch, that row is on the
    accepted path. The first token of a prompt has none.
    """
    total = int(starts[-1])
    next_logprob, entropy = (np.full(total, np.nan, dtype=np.float32) for _ in range(2))
    logprob = np.full(len(rows), np.nan, dtype=np.float32)
    if not plan.probabilities:
        return logprob, logprob
    begins = np.isin(rows, starts)
    forks = [i for i in np.searchsorted(starts, rows[begins]).tolist() if paths[i].base]
    judges = [int(starts[i - paths[i].branch]) + paths[i].base - 1 for i in forks]
    asked = np.unique(np.concatenate([rows, rows[~begins] - 1]))
    if plan.lens is not None and len(rows) == total and engine.runner.device == "cpu":
        # Z has these numbers already: its last layer is the model's own output
        next_logprob, entropy = (tensors[name][:, -1].numpy() for name in ("Z.emitted", "Z.entropy"))
        asked = asked[:0]
    follows = np.concatenate([[*path.tokens[path.base + 1 :], -1] for path in paths])
    emitted = [*follows[asked].tolist(), *(paths[i].tokens[paths[i].base] for i in forks)]
    read, spread = _read_final(engine, plan, paths, np.concatenate([asked, judges]).astype(np.int64), emitted)
    next_logprob[asked], entropy[asked] = read[: len(asked)], spread[: len(asked)]
    logprob[~begins] = next_logprob[rows[~begins] - 1]
    logprob[np.searchsorted(rows, starts[forks])] = read[len(asked) :]
    return logprob, entropy[rows]


def _read_final(
    engine: Core, plan: DumpPlan, paths: list[ExamplePath], rows: np.ndarray, emitted: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of the token that follows, entropy) at some rows of the paths."""
    if not len(rows):
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float32)
    final = engine.sites.per_layer("S")[-1]
    if all(final in path.recording.sites() for path in paths):
        residual = _gather(paths, final, torch.from_numpy(rows))
    else:
        residual = torch.cat(_final_rows(engine, paths, final, bool(plan.edits)))[torch.from_numpy(rows)]
    read = [
        engine.lock.alone(readout.next_token, engine.runner, residual[i : i + _BLOCK], emitted[i : i + _BLOCK])
        for i in range(0, len(rows), _BLOCK)
    ]
    return torch.cat([part[0] for part in read]).numpy(), torch.cat([part[1] for part in read]).numpy()


def _final_rows(engine: Core, paths: list[ExamplePath], final: str, edited: bool) -> list[Tensor]:
    """The final residual stream of each path; where it was not captured, recomputed with the same bits, many paths a pass."""
    missing = [path for path in paths if final not in path.recording.sites()]
    if missing and (engine.guesses() or edited):  # the tokens alone do not determine states and edits
        raise BadRequest(
            f"{final} was not captured, and edited paths and Thinking-States models need it for log-probabilities. Capture S, "
            "too."
        )
    spec = engine.capture_spec([final])
    found: dict[int, Tensor] = {}
    for i in range(0, len(missing), _PATHS):
        some = missing[i : i + _PATHS]
        edits = [own_edits(path.example, engine.sites) for path in some]
        branches = engine.planted([path.tokens for path in some], spec, edits)
        try:
            for path, branch in zip(some, branches, strict=True):
                found[id(path)] = branch.activations.peek(final)[path.base :]
        finally:
            for branch in branches:
                branch.release()
    return [found[id(path)] if id(path) in found else path.recording.peek(final) for path in paths]


def _tensors(engine: Core, plan: DumpPlan, paths: list[ExamplePath], rows: np.ndarray) -> Pieces:
    """The kept rows of every stored site."""
    chosen = torch.from_numpy(rows)
    found = {site: [_cast(site, piece, plan.dtype) for piece in _pieces(paths, site, chosen)] for site in plan.sites}
    lens = _lens_rows(engine, plan.lens, paths, chosen) if plan.lens is not None else {}
    sparse = _feature_rows(plan, paths, chosen) if plan.features else {}
    scored = _probe_rows(plan, paths, chosen) if plan.probes else {}
    return Pieces(found | {name: [x] for name, x in (lens | sparse | scored).items()})


def _feature_rows(plan: DumpPlan, paths: list[ExamplePath], chosen: Tensor) -> Rows:
    """The features of the kept rows, encoded from the rows as they were captured."""
    encoders, made = matched(plan.features, plan.encoders), Rows()
    for stored in plan.features:
        site = _captured(plan, paths, stored.site)
        rows = _gather(paths, site, chosen if len(chosen) else torch.tensor([0]))
        made |= {name: x[: len(chosen)] for name, x in to_tensors(stored, encoders[stored.name].encode(rows)).items()}
    return made


def _probe_rows(plan: DumpPlan, paths: list[ExamplePath], chosen: Tensor) -> Rows:
    """The scores of the kept rows, from the rows as they were captured."""
    made = Rows()
    for site, score in scorers(plan.probes).items():
        rows = _gather(paths, _captured(plan, paths, site), chosen if len(chosen) else torch.tensor([0]))
        made |= {f"{PROBES}{name}": x[: len(chosen)] for name, x in score(rows).items()}
    return made


def _captured(plan: DumpPlan, paths: list[ExamplePath], site: str) -> str:
    """The captured site that holds the rows of `site`: itself, or the stream entering the next block if nothing edits it."""
    there = set.intersection(*(set(path.recording.sites()) for path in paths))
    leaves = re.fullmatch(r"blocks\.(\d+)\.hook_out", site)
    following = "" if leaves is None else f"blocks.{int(leaves[1]) + 1}.hook_in"
    if site in there:
        return site
    if following in there and not plan.edits and not any(p.example.given and p.example.given.edits for p in paths):
        return following
    raise UnknownSite(
        f"{site}, the site of features or probes, was not captured. Ask for it: replay(..., sites=[..., {site!r}])."
    )


def _pieces(paths: list[ExamplePath], site: str, chosen: Tensor) -> list[Tensor]:
    """The chosen rows of all rows of the paths, in the given order. As captured, without a copy, if all are chosen in order."""
    pieces = [piece for path in paths for piece in path.recording.pieces(site)]
    alike = len({piece.shape[1:] for piece in pieces}) == 1
    if (
        alike and sum(piece.shape[0] for piece in pieces) == len(chosen) and bool((chosen.diff() == 1).all())
    ):  # of as many, all in order
        return pieces
    return [torch.cat(pieces)[chosen]]


def _gather(paths: list[ExamplePath], site: str, chosen: Tensor) -> Tensor:
    """The same rows as one tensor."""
    pieces = _pieces(paths, site, chosen)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _lens_rows(engine: Core, spec: LensSpec, paths: list[ExamplePath], chosen: Tensor) -> Rows:
    """Z as recorded, or read off the recorded residual streams; the bits are the same."""
    if recorded := [site for site in paths[0].recording.sites() if site.startswith("Z.")]:
        return {site: _gather(paths, site, chosen) for site in recorded}
    rows = chosen if len(chosen) else torch.tensor([0])  # without rows, read one for the shapes and drop it
    follows = torch.tensor([token for path in paths for token in [*path.tokens[path.base + 1 :], -1]])[rows]
    streams = {site: _gather(paths, site, rows) for site in spec.sites}
    tuned = engine.lenses.of(spec)
    read: list[Rows] = []
    for i in range(0, len(rows), _BLOCK):
        block = {site: x[i : i + _BLOCK] for site, x in streams.items()}
        read.append(engine.lock.alone(readout.read, spec, engine.runner, block, follows[i : i + _BLOCK].tolist(), tuned))
    return {name: torch.cat([part[name] for part in read])[: len(chosen)] for name in read[0]}


def _cast(site: str, x: Tensor, dtype: str) -> Tensor:
    """Round to nearest even, the same on every machine. BadRequest if a value overflows."""
    if x.dtype is getattr(torch, dtype) or not x.is_floating_point():
        return x
    cast = x.to(getattr(torch, dtype))
    if not bool(torch.isfinite(cast).all()):
        raise BadRequest(f"{site} has values up to {float(x.abs().max()):.3g}, too large for {dtype}. Use bfloat16 or float32.")
    return cast


# ---- maker -----------------------------------------------------------------------------------------------------------


class ShardMaker:
    """Makes the content of any shard of a plan. Leaves no branches or trace events on the engine; clears its prefix index.

    task  required if the plan's task is not registered
    """

    def __init__(self, engine: Core, plan: DumpPlan, batch: int = 32, task: AnyTask | None = None) -> None:
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


def describe_sites(engine: Core, content: Content) -> dict[str, SiteEntry]:
    """The manifest entry of each stored tensor."""
    letters = {name: letter for letter in "STC" for name in engine.sites.per_layer(letter)}
    found = {}
    for name in content.tensors:
        x = pieces_of(content.tensors, name)[0]
        aliases = () if name.startswith(("Z.", PREFIX, PROBES)) else engine.sites.sites[name].aliases
        letter = "Z" if name.startswith("Z.") else letters.get(name)
        dtype = str(x.dtype).removeprefix("torch.")
        found[name] = SiteEntry(dtype, tuple(x.shape[1:]), layer_of(name), letter, aliases)
    return found


@modes.plainly
def write_dump(
    engine: Core,
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
    maker = ShardMaker(engine, plan, batch)
    writers = as_int("writers", writers, 1)
    writer = DumpWriter(path, plan, engine.fingerprint)
    return writer.write(maker.make, maker.sites, maker.expect, resume=resume, part=part, progress=progress, writers=writers)
