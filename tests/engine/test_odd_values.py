"""Odd values for every parameter of the public API: a named error or an answer, never a bare TypeError, and no harm done."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import Dump, Edit, Engine, Run, Sampling, tasks
from replaylens.engine.errors import EngineError
from replaylens.engine.request.capture import CaptureSpec
from tests.toy_model import engine, toy


class Odd:
    """Of no use to anybody."""

    def __repr__(self) -> str:
        return "Odd()"


ODD: list[Any] = [
    None,
    "",
    "x",
    "Z",
    "2",
    b"",
    b"\x01\x02",
    0,
    -1,
    2,
    1.5,
    10**30,
    -(10**30),
    math.nan,
    math.inf,
    -math.inf,
    1e13,
    True,
    False,
    [],
    (),
    {},
    set(),
    [None],
    [[]],
    [1, "2"],
    [1.5],
    [True],
    {1, 2},
    {0: 1},
    {"a": 1},
    {1: [[1]]},
    {1: 5},
    {1: [5]},
    {None: [[1]]},
    {-1: [["x"]]},
    range(3),
    slice(None),
    slice("a", 3),
    slice(0, 10, 2),
    iter([1, 2]),
    np.int64(2),
    np.float32(0.5),
    np.array([1, 2]),
    np.array([[1, 2]]),
    np.array(3),
    np.array([0.5]),
    np.array(["a"]),
    torch.tensor(2),
    torch.tensor(0.5),
    torch.tensor([1, 2]),
    torch.tensor([[1, 2]]),
    torch.tensor([1.5]),
    torch.tensor([True]),
    torch.zeros(32),
    torch.full((32,), math.nan),
    torch.zeros(32, requires_grad=True),
    torch.zeros(2, 3, 4),
    1 + 2j,
    Odd(),
    Odd,
    print,
    lambda *_: None,
    Path("nowhere"),
    Sampling(),
    [Sampling()],
    [("x", print)],
    [("blocks.0.hook_in", 3)],
    ["x"],
    [Edit("S", "zero")],
    [Edit("S", "zero", positions=[Odd()])],
    "\ud800",
    "blocks.0.hook_in",
    "S" * 1000,
]
Call = Callable[[Any], Any]


@pytest.fixture(scope="module")
def served() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def run() -> Run:
    return Engine.load("coin-plain").replay(tasks.get("coin")(flips=2).examples(3), sites="SZ", drafter="lens")


@pytest.fixture(scope="module")
def dump(run: Run) -> Dump:
    return run.save("memory://odd-values")


def engine_calls(e: Engine) -> dict[str, Call]:
    def one() -> Any:
        return e.prompt([1, 2, 3], sites="S")

    return {
        "prompt.text": lambda v: e.prompt(v),
        "prompt.texts": lambda v: e.prompts(v),
        "prompt.text among others": lambda v: e.prompts([[1], v]),
        "prompt.sites": lambda v: e.prompt([1, 2], sites=v),
        "prompt.keep_rejected": lambda v: e.prompt([1, 2], sites="S", keep_rejected=v),
        "prompt.edits": lambda v: e.prompt([1, 2], edits=v),
        "prompt.hooks": lambda v: e.prompt([1, 2], hooks=v),
        "prompt.top_k": lambda v: e.prompt([1, 2], sites="Z", top_k=v),
        "prompt.targets": lambda v: e.prompt([1, 2], sites="Z", targets=v),
        "prompt.full": lambda v: e.prompt([1, 2], sites="Z", full=v),
        "prompt.lens": lambda v: e.prompt([1, 2], sites="Z", lens=v),
        "capture_spec.sites": lambda v: e.capture_spec(v),
        "capture_spec.rejected": lambda v: e.capture_spec("S", rejected=v),
        "generate.branches": lambda v: e.generate(v, 2),
        "generate.branch among others": lambda v: e.generate([one(), v], 2),
        "generate.n": lambda v: e.generate([one()], v),
        "generate.sampling": lambda v: e.generate([one()], 2, sampling=v),
        "generate.drafter": lambda v: e.generate([one()], 2, drafter=v),
        "generate.window": lambda v: e.generate([one()], 2, window=v),
        "generate.deterministic": lambda v: e.generate([one()], 2, deterministic=v),
        "generate.keep_rejected": lambda v: e.generate([one()], 2, keep_rejected=v),
        "generate.drafts": lambda v: e.generate([one()], 2, drafter="forced", drafts=v),
        "generate.final": lambda v: e.generate([one()], 2, final=v),
        "generate.progress": lambda v: e.generate([one()], 2, progress=v),
        "stream.branch": lambda v: list(e.stream(v, 2)),
        "stream.n": lambda v: list(e.stream(one(), v)),
        "stream.sampling": lambda v: list(e.stream(one(), 2, sampling=v)),
        "force_all.branches": lambda v: e.force_all(v, [[1]]),
        "force_all.tokens": lambda v: e.force_all([one()], v),
        "cancel.job": lambda v: e.cancel(v),
        "replay.examples": lambda v: e.replay(v),
        "replay_trace.trace": lambda v: e.replay_trace(v),
        "replay_trace.sites": lambda v: e.replay_trace(engine().trace, sites=v),
        "run_with_cache.tokens": lambda v: e.run_with_cache(v),
        "run_with_cache.names_filter": lambda v: e.run_with_cache([1, 2], v),
        "run_with_cache.pos_slice": lambda v: e.run_with_cache([1, 2], None, v),
        "tokens_of.text": lambda v: e.tokens_of(v),
    }


def branch_calls(e: Engine) -> dict[str, Call]:
    def one() -> Any:
        return e.prompt([1, 2, 3], sites="S")

    return {
        "fork.n": lambda v: one().fork(v),
        "fork.at": lambda v: one().fork(at=v),
        "fork.edits": lambda v: one().fork(edits=v),
        "fork.hooks": lambda v: one().fork(hooks=v),
        "force.tokens": lambda v: one().force(v),
        "generate.n": lambda v: one().generate(v),
        "generate.sampling": lambda v: one().generate(2, sampling=v),
        "generate.drafter": lambda v: one().generate(2, drafter=v),
        "generate.window": lambda v: one().generate(2, window=v),
        "generate.drafts": lambda v: one().generate(2, drafter="forced", drafts=v),
        "generate.deterministic": lambda v: one().generate(2, deterministic=v),
        "stream.n": lambda v: list(one().stream(v)),
        "stream.drafts": lambda v: list(one().stream(2, drafter="forced", drafts=v)),
        "stream.window": lambda v: list(one().stream(2, window=v)),
        "rollback.to": lambda v: one().rollback(v),
        "activations[]": lambda v: one().activations[v],
    }


def load_calls(_: Engine) -> dict[str, Call]:
    names = ("device", "dtype", "draft_model", "cache_tokens", "page_size", "max_rows", "lens_layer", "tree_width", "canary")
    more = ("guess", "check", "tokenizer")

    def of(name: str) -> Call:
        return lambda v: Engine.load(toy(), **{name: v}).prompt([1, 2]).generate(1)

    return {"load.source": lambda v: Engine.load(v), **{f"load.{name}": of(name) for name in (*names, *more)}}


def value_calls(e: Engine) -> dict[str, Call]:
    def sampled(name: str) -> Call:
        return lambda v: e.prompt([1, 2]).generate(2, sampling=Sampling(**{name: v}))

    def edited(name: str) -> Call:
        good = {"site": "S", "op": "add", "value": torch.zeros(32)}
        return lambda v: e.prompt([1, 2, 3], edits=[Edit(**{**good, name: v})])

    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "seed", "stop")
    parts = ("site", "op", "value", "positions", "layers", "factor", "seed")
    return {
        **{f"Sampling.{name}": sampled(name) for name in (*fields, "stop_tokens", "ignore_eos")},
        **{f"Edit.{name}": edited(name) for name in parts},
        "Sampling.from_json": lambda v: Sampling.from_json(v),
        "Edit.from_json": lambda v: Edit.from_json(v),
        "Edit.interchange.site": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange(v, torch.zeros(32))]),
        "Edit.interchange.source": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange("S", v)]),
        "Edit.to_json of positions": lambda v: Edit("S", "zero", positions=v).to_json(),
    }


def check(call: Call, value: Any) -> None:
    try:
        call(value)
    except EngineError as error:
        assert str(error), "an error says what happened"


def fresh(value: Any) -> Any:
    return iter([1, 2]) if type(value) is type(iter([])) else value


KINDS: dict[str, Callable[[Engine], dict[str, Call]]] = {
    "Engine": engine_calls,
    "Branch": branch_calls,
    "load": load_calls,
    "values": value_calls,
}
NAMES = [(kind, name) for kind, calls in KINDS.items() for name in calls(None)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[f"{kind} {name}" for kind, name in NAMES])
def test_odd_values(kind: str, name: str, served: Engine) -> None:
    call = KINDS[kind](served)[name]
    for value in ODD:
        check(call, fresh(value))
    served.check_integrity()
    assert served.loop.jobs == []
    for lane in list(served.loop.lanes.values()):
        served.forest.forget(lane.branch)


def run_calls(run: Run, folder: Path) -> dict[str, Call]:
    return {
        "tree.index": lambda v: run.tree(v),
        "timeline.index": lambda v: run.timeline(v),
        "picture.index": lambda v: run.picture(v),
        "[]": lambda v: run[v],
        "save.path": lambda v: run.save(v) if not isinstance(v, str | Path) else None,
        "save.positions": lambda v: run.save(f"memory://odd-{id(v)}", positions=v),
        "save.dtype": lambda v: run.save(f"memory://odd-{id(v)}", dtype=v),
        "save.examples_per_shard": lambda v: run.save(f"memory://odd-{id(v)}", examples_per_shard=v),
        "save.resume": lambda v: run.save(folder / str(id(v)), resume=v),
        "replay.sites": lambda v: run.engine.replay([r.example for r in run], sites=v, max_new=1),
        "replay.drafter": lambda v: run.engine.replay([r.example for r in run], drafter=v, max_new=1),
        "replay.window": lambda v: run.engine.replay([r.example for r in run], window=v, max_new=1),
        "replay.seed": lambda v: run.engine.replay([r.example for r in run], seed=v, max_new=1),
        "replay.sampling": lambda v: run.engine.replay([r.example for r in run], sampling=v, max_new=1),
        "replay.edits": lambda v: run.engine.replay([r.example for r in run], edits=v, max_new=1),
        "replay.max_new": lambda v: run.engine.replay([r.example for r in run], max_new=v),
        "replay.rejected": lambda v: run.engine.replay([r.example for r in run], rejected=v, max_new=1),
        "replay.deterministic": lambda v: run.engine.replay([r.example for r in run], deterministic=v, max_new=1),
        "replay.batch": lambda v: run.engine.replay([r.example for r in run], batch=v, max_new=1),
    }


@pytest.mark.parametrize("name", run_calls(None, None))  # type: ignore[arg-type]
def test_odd_values_for_a_run(name: str, run: Run, tmp_path: Path) -> None:
    for value in ODD:
        check(run_calls(run, tmp_path)[name], fresh(value))
    run.engine.check_integrity()
    assert run.engine.loop.lanes == {} and run.engine.loop.jobs == []


def dump_calls(dump: Dump) -> dict[str, Call]:
    return {
        "open.path": lambda v: Dump.open(v),
        "open.check_files": lambda v: Dump.open("memory://odd-values", check_files=v),
        "resolve.site": lambda v: dump.resolve(v),
        "resolve.layer": lambda v: dump.resolve("S", v),
        "resolve.layer of Z": lambda v: dump.resolve("Z.kl", v),
        "where.predicate": lambda v: len(dump.where(v)),
        "where.column": lambda v: len(dump.where(token=v)),
        "where.number": lambda v: len(dump.where(position=v)),
        "where.flag": lambda v: len(dump.where(accepted=v)),
        "matrix.site": lambda v: dump.matrix(v, 0),
        "matrix.layer": lambda v: dump.matrix("S", v),
        "matrix.where": lambda v: dump.matrix("S", 0, where=v),
        "matrix.label": lambda v: dump.matrix("S", 0, label=v),
        "to_torch.site": lambda v: dump.to_torch(v),
        "to_numpy.layer": lambda v: dump.to_numpy("S", v),
        "stream.site": lambda v: list(dump.stream(v)),
        "stream.layer": lambda v: list(dump.stream("S", v)),
        "stream.batch_rows": lambda v: list(dump.stream("S", 0, v)),
        "to_activation_cache.example": lambda v: dump.to_activation_cache(v),
        "to_activation_cache.branch": lambda v: dump.to_activation_cache(0, v),
    }


@pytest.mark.parametrize("name", dump_calls(None))  # type: ignore[arg-type]
def test_odd_values_for_a_dump(name: str, dump: Dump) -> None:
    for value in ODD:
        check(dump_calls(dump)[name], fresh(value))
    assert Dump.open("memory://odd-values").digest == dump.digest


def closed_branch_calls() -> dict[str, Call]:
    return {
        "generate": lambda b: b.generate(1),
        "stream": lambda b: list(b.stream(1)),
        "force": lambda b: b.force([1]),
        "fork": lambda b: b.fork(),
        "rollback": lambda b: b.rollback(3),
        "release": lambda b: b.release(),
        "kv": lambda b: b.kv(),
        "engine.generate": lambda b: b.engine.generate([b], 1),
        "engine.force_all": lambda b: b.engine.force_all([b], [[1]]),
        "engine.stream": lambda b: list(b.engine.stream(b, 1)),
    }


@pytest.mark.parametrize("name", closed_branch_calls())
def test_a_closed_branch_is_named(name: str, served: Engine) -> None:
    closed = served.prompt([1, 2, 3])
    closed.release()
    with pytest.raises(EngineError, match="released"):
        closed_branch_calls()[name](closed)


@pytest.mark.parametrize("name", closed_branch_calls())
def test_a_branch_of_another_engine_is_named(name: str, served: Engine) -> None:
    if name.startswith("engine."):
        other = engine().prompt([1, 2, 3])
        method = getattr(served, name.removeprefix("engine."))
        arguments: dict[str, tuple[Any, ...]] = {"generate": ([other], 1), "force_all": ([other], [[1]]), "stream": (other, 1)}
        with pytest.raises(EngineError, match="another engine"):
            method(*arguments[name.removeprefix("engine.")])
        assert other.tokens == [1, 2, 3]
        other.engine.check_integrity()


_ = CaptureSpec
