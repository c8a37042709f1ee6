"""`assemble`: the rows of replayed examples, as a dump stores them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from replaylens.dumps.content import CORE, Content, Layout, Pieces, end_to_end, joined
from replaylens.dumps.plan import PROBES, DumpPlan, ExamplePath, matched, to_tensors
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, InternalError, NotCertified, UnknownSite
from replaylens.engine.passes import lens as readout
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import RowBlock, Rows
from replaylens.engine.request.positions import Position
from replaylens.engine.request.values import as_int, short_repr
from replaylens.engine.serving.watch import scorers
from replaylens.replay.replayer import Result, own_edits
from replaylens.tasks.reading import RESERVED

# ---- rows ------------------------------------------------------------------------------------------------------------
# From replayed examples to the rows of a dump: number branches, select positions, read labels, add probabilities.
#
# Rows are ordered by (example, branch, position). Branch 0 is the accepted path. Rejected branches follow, ordered by fork
# position, then by tokens, so that the order does not depend on when the engine computed them.

_BLOCK = 4096
"""rows per lens readout"""
_PATHS = 32
"""paths that are recomputed together"""


def assemble(engine: Engine, plan: DumpPlan, results: Sequence[Result]) -> Content:
    """The rows of some examples, as a dump with this plan stores them. A pure function of plan, weights and paths."""
    paths, kept, starts, rows = _layout(engine, plan, results)
    tensors = _tensors(engine, plan, paths, rows)
    logprob, entropy = _probabilities(engine, plan, paths, starts, rows, tensors)
    columns = _columns(engine, paths, kept)
    columns["logprob"] = pa.array(logprob, pa.float32(), mask=np.isnan(logprob))
    columns["entropy"] = pa.array(entropy, pa.float32(), mask=np.full(len(rows), not plan.probabilities))
    labels = _labels(plan, paths, kept)
    return Content(tensors, pa.table({**{name: columns[name] for name in CORE.names}, **labels}))


def probabilities(engine: Engine, plan: DumpPlan, results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, entropy) [rows] float32 of the rows that `assemble` gives, bit for bit; NaN where unknown."""
    paths, _, starts, rows = _layout(engine, plan, results)
    lens = _lens_rows(engine, plan.lens, paths, torch.from_numpy(rows)) if plan.lens is not None else {}
    return _probabilities(engine, plan, paths, starts, rows, lens)


def _layout(
    engine: Engine, plan: DumpPlan, results: Sequence[Result]
) -> tuple[list[ExamplePath], list[list[int]], np.ndarray, np.ndarray]:
    """(paths, kept positions of each, the number of each path's first row among all rows of the paths, numbers of the kept)."""
    paths = [path for result in sorted(results, key=lambda r: r.example.index) for path in _paths(engine, result)]
    place = plan.place
    kept = [_chosen(engine, plan, place, path) for path in paths]
    starts = np.cumsum([0, *(len(path.tokens) - path.base for path in paths)])
    rows = np.concatenate([[], *(start + np.array(k) - p.base for start, k, p in zip(starts, kept, paths, strict=False))])
    return paths, kept, starts, rows.astype(np.int64)


def _paths(engine: Engine, result: Result) -> list[ExamplePath]:
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


def _chosen(engine: Engine, plan: DumpPlan, place: Position, path: ExamplePath) -> list[int]:
    """The positions of the path's own rows that the plan keeps."""
    own = range(path.base, len(path.tokens))
    length = len(path.tokens)
    match place.kind:
        case "last":
            return [position for position in own if position == length - 1 + place.shift]
        case "steps":
            ends, at = {step.end for step in path.reading.steps}, path.offsets  # the token of a step's last character
            return [position for position in own if any(at[position][0] < end <= at[position][1] for end in ends)]
        case "label":
            values = path.labels_at(own, [place.name])[place.name]
            return [position for position, value in zip(own, values, strict=True) if value is not None]
        case "tokens" | "text":
            there = {*place.on(length, path.num_prompt, lambda: map(engine.text.token, path.tokens))}
            return [position for position in own if position in there]
    if plan.selector is None:
        raise BadRequest(f"The function of positions {plan.positions!r} is not stored in files. Pass it again.")
    chosen = plan.selector(path)
    if not isinstance(chosen, Iterable):
        raise BadRequest(f"{plan.positions} gave {short_repr(chosen)}: a function for positions gives several of them")
    wanted = {as_int(f"a position of {plan.positions}", position) for position in chosen}
    if unknown := [position for position in wanted if not 0 <= position < length]:
        raise BadRequest(f"{plan.positions} chose position {unknown[0]} of a path with {length} tokens.")
    return [position for position in own if position in wanted]


def _columns(engine: Engine, paths: list[ExamplePath], kept: list[list[int]]) -> dict[str, pa.Array]:
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
    engine: Engine,
    plan: DumpPlan,
    paths: list[ExamplePath],
    starts: np.ndarray,
    rows: np.ndarray,
    tensors: Mapping[str, Tensor],
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
    engine: Engine, plan: DumpPlan, paths: list[ExamplePath], rows: np.ndarray, emitted: list[int]
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


def _final_rows(engine: Engine, paths: list[ExamplePath], final: str, edited: bool) -> list[Tensor]:
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


def _tensors(engine: Engine, plan: DumpPlan, paths: list[ExamplePath], rows: np.ndarray) -> Pieces:
    """The kept rows of every stored site: where passes left them if all are kept as they are."""
    chosen, found = torch.from_numpy(rows), dict[str, tuple[Sequence[Tensor], Layout]]()
    placed, layout = _placed(paths, plan.sites)
    for site, pieces in placed.items():
        if layout.rows > len(rows) or pieces[0].dtype is not getattr(torch, plan.dtype):
            found[site] = end_to_end(_cast(site, _chosen_of(pieces, layout, chosen), plan.dtype))
        else:
            found[site] = pieces, layout
    lens = _lens_rows(engine, plan.lens, paths, chosen) if plan.lens is not None else {}
    sparse = _feature_rows(plan, paths, chosen) if plan.features else {}
    scored = _probe_rows(plan, paths, chosen) if plan.probes else {}
    return Pieces(found | {name: end_to_end(x) for name, x in (lens | sparse | scored).items()})


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


def _placed(paths: list[ExamplePath], sites: Sequence[str]) -> tuple[dict[str, list[Tensor]], Layout]:
    """All rows of the paths at some sites, where passes left them."""
    found: dict[tuple[int, int], int] = {}
    blocks, runs = list[tuple[RowBlock, Mapping[str, str] | None]](), list[tuple[int, int, int]]()
    for path in paths:
        for block, names, first, count in path.recording.runs(sites):
            number = found.setdefault((id(block), id(names)), len(blocks))
            if number == len(blocks):
                blocks.append((block, names))
            runs.append((number, first, count))
    return {s: [block[s if names is None else names[s]] for block, names in blocks] for s in sites}, Layout(runs)


def _chosen_of(pieces: Sequence[Tensor], layout: Layout, chosen: Tensor) -> Tensor:
    made = joined(pieces, layout)
    every = len(chosen) == len(made) and bool((chosen.diff() == 1).all())  # of as many, all in order
    return made if every else made[chosen]


def _gather(paths: list[ExamplePath], site: str, chosen: Tensor) -> Tensor:
    """The chosen rows of all rows of the paths, in order, as a copy."""
    placed, layout = _placed(paths, [site])
    return _chosen_of(placed[site], layout, chosen)


def _lens_rows(engine: Engine, spec: LensSpec, paths: list[ExamplePath], chosen: Tensor) -> Rows:
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
