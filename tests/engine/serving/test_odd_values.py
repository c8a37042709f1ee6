"""Odd values for every parameter of the public API give a named error or an answer, never a bare error, and do no harm."""

import contextlib
import io
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import Branch, Dump, Edit, Engine, Run, Sampling, tasks
from replaylens.engine.errors import EngineError
from replaylens.tasks.errors import TaskError
from tests.toy_model import engine, toy


class Odd:
    """An object that no parameter accepts."""

    def __repr__(self) -> str:
        return "Odd()"


NUMBERS: list[Any] = [0, -1, 2, 1.5, 10**30, -(10**30), math.nan, math.inf, 1e13, True, 1 + 2j, np.int64(2), np.float32(0.5)]
TEXTS: list[Any] = ["", "x", "Z", "2", "\ud800", "blocks.0.hook_in", "S" * 1000, b"", b"\x01\x02", Path("nowhere")]
CONTAINERS: list[Any] = [
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
    {1: [5]},
    {None: [[1]]},
    {-1: [["x"]]},
    range(3),
    slice(None),
    slice("a", 3),
    slice(0, 10, 2),
    np.array([1, 2]),
    np.array([[1, 2]]),
    np.array(3),
    np.array(["a"]),
    torch.tensor(2),
    torch.tensor(0.5),
    torch.tensor([1, 2]),
    torch.tensor([[1, 2]]),
    torch.tensor([True]),
    torch.full((32,), math.nan),
    torch.zeros(32, requires_grad=True),
    torch.zeros(2, 3, 4),
    torch.zeros(3, dtype=torch.complex64),
    torch.zeros(3, device="meta"),
]
OBJECTS: list[Any] = [
    None,
    Odd(),
    print,
    lambda *_: None,
    Sampling(),
    [Sampling()],
    [("x", print)],
    [("blocks.0.hook_in", 3)],
    [Edit("S", "zero")],
    [Edit("S", "zero", positions=[Odd()])],  # type: ignore[list-item]
]
ODD = [*NUMBERS, *TEXTS, *CONTAINERS, *OBJECTS]
Call = Callable[[Any], Any]


def asked(call: Call) -> int:
    """Call it with every odd value and with an iterator. Returns how many were refused."""
    refused = 0
    for value in (*ODD, iter([1, 2])):
        with contextlib.redirect_stdout(io.StringIO()):  # print is among the values
            try:
                call(value)
            except (EngineError, TaskError) as error:
                refused += 1
                assert str(error), "an error says what happened"
    return refused


@pytest.fixture(scope="module")
def served() -> Engine:
    return engine(cache_tokens=8192)


@pytest.fixture(scope="module")
def thinking() -> Engine:
    return Engine.load("coin-thinking")


@pytest.fixture(scope="module")
def run() -> Run:
    return Engine.load("coin-plain").replay(tasks.get("coin")(flips=2).examples(3), sites="SZ", drafter="lens")


@pytest.fixture(scope="module")
def dump(run: Run) -> Dump:
    return run.save("memory://odd-values")


def assert_unharmed(subject: Engine) -> None:
    """Checks the engine, and drops the branches that the calls made."""
    subject.check_integrity()
    assert subject.loop.jobs == []
    for branch in list(subject.loop.lanes):
        if branch in subject.loop.lanes:  # rejected drafts go with their parent branch
            subject.forest.release(subject.loop.lanes[branch])
    assert subject.loop.lanes == {} and subject.check_integrity()


OPTIONS = ("sampling", "window", "deterministic", "keep_pages", "final", "drafter")


def engine_calls(e: Engine) -> dict[str, Call]:
    root = cache(lambda: e.prompt([1, 2, 3], sites="S"))

    def one() -> Branch:
        return root().fork()[0]

    prompted = {f"prompt.{name}": _given(lambda **o: e.prompt([1, 2], **o), name) for name in ("sites", "edits", "hooks")}
    prompted |= {
        f"prompt.{name}": _given(lambda **o: e.prompt([1, 2], sites="Z", **o), name)
        for name in ("keep_rejected", "top_k", "targets", "full", "lens")
    }
    generated = {f"generate.{name}": _given(lambda **o: e.generate([one()], 2, **o), name) for name in (*OPTIONS, "progress")}
    generated |= {
        f"Branch.generate.{name}": _given(lambda **o: one().generate(2, **o), name) for name in (*OPTIONS, "progress")
    }
    streamed = {f"stream.{name}": _given(lambda **o: list(e.stream(one(), 2, **o)), name) for name in OPTIONS}
    streamed |= {f"Branch.stream.{name}": _given(lambda **o: list(one().stream(2, **o)), name) for name in OPTIONS}
    return {
        **prompted,
        **generated,
        **streamed,
        "prompt.text": lambda v: e.prompt(v),
        "prompts.texts": lambda v: e.prompts(v),
        "prompts.text among others": lambda v: e.prompts([[1], v]),
        "tokens_of.text": lambda v: e.tokens_of(v),
        "capture_spec.sites": lambda v: e.capture_spec(v),
        "capture_spec.rejected": lambda v: e.capture_spec("S", rejected=v),
        "generate.branches": lambda v: e.generate(v, 2),
        "generate.branch among others": lambda v: e.generate([one(), v], 2),
        "generate.n": lambda v: e.generate([one()], v),
        "generate.drafts": lambda v: e.generate([one()], 2, drafter="forced", drafts=v),
        "stream.branch": lambda v: list(e.stream(v, 2)),
        "stream.n": lambda v: list(e.stream(one(), v)),
        "stream.drafts": lambda v: list(e.stream(one(), 2, drafter="forced", drafts=v)),
        "force_all.branches": lambda v: e.force_all(v, [[1]]),
        "force_all.tokens": lambda v: e.force_all([one()], v),
        "cancel.job": lambda v: e.cancel(v),
        "replay.examples": lambda v: e.replay(v),
        "replay_trace.trace": lambda v: e.replay_trace(v),
        "replay_trace.sites": lambda v: e.replay_trace(engine(record=True).trace, sites=v),
        "run_with_cache.tokens": lambda v: e.run_with_cache(v),
        "run_with_cache.names_filter": lambda v: e.run_with_cache([1, 2], v),
        "run_with_cache.pos_slice": lambda v: e.run_with_cache([1, 2], "blocks.0.hook_in", v),
        "run_with_cache.remove_batch_dim": lambda v: e.run_with_cache([1, 2], "blocks.0.hook_in", remove_batch_dim=v),
        "run_with_cache.stop_at_layer": lambda v: e.run_with_cache([1, 2], "embed.hook_out", stop_at_layer=v),
        "engine.tokens": lambda v: e(v),
        "engine.return_type": lambda v: e([1, 2], v),
        "engine.prepend_bos": lambda v: e([1, 2], prepend_bos=v),
        "engine.loss_per_token": lambda v: e([1, 2], "loss", loss_per_token=v),
        "run_with_hooks.fwd_hooks": lambda v: e.run_with_hooks([1, 2], v),
        "run_with_hooks.fwd_hooks, a pair": lambda v: e.run_with_hooks([1, 2], [(v, print)]),
        "run_with_hooks.fwd_hooks, a function": lambda v: e.run_with_hooks([1, 2], [("blocks.0.hook_in", v)]),
        "hooks.fwd_hooks": lambda v: e.hooks(v).__enter__(),
        "to_tokens.input": lambda v: e.to_tokens(v),
        "to_string.tokens": lambda v: e.to_string(v),
        "to_str_tokens.input": lambda v: e.to_str_tokens(v),
        "to_single_token.string": lambda v: e.to_single_token(v),
        "Branch.generate.n": lambda v: one().generate(v),
        "Branch.generate.drafts": lambda v: one().generate(2, drafter="forced", drafts=v),
        "Branch.fork.n": lambda v: one().fork(v),
        "Branch.fork.at": lambda v: one().fork(at=v),
        "Branch.fork.edits": lambda v: one().fork(edits=v),
        "Branch.fork.hooks": lambda v: one().fork(hooks=v),
        "Branch.force.tokens": lambda v: one().force(v),
        "Branch.rollback.to": lambda v: one().rollback(v),
        "Branch.activations[]": lambda v: one().activations[v],
    }


def _given(call: Callable[..., Any], name: str) -> Call:
    return lambda v: call(**{name: v})


def value_calls(e: Engine) -> dict[str, Call]:
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "seed", "stop")
    good: dict[str, Any] = {"site": "S", "op": "add", "value": torch.zeros(32)}
    return {
        **{
            f"Sampling.{name}": _given(lambda **o: e.prompt([1, 2]).generate(2, sampling=Sampling(**o)), name)
            for name in (*fields, "stop_tokens", "ignore_eos")
        },
        **{
            f"Edit.{name}": _given(lambda **o: e.prompt([1, 2, 3], edits=[Edit(**{**good, **o})]), name)
            for name in ("site", "op", "value", "positions", "layers", "factor", "seed")
        },
        **{
            f"Edit.to_json of {name}": _given(lambda **o: Edit(**{**good, **o}).to_json(), name)
            for name in ("site", "op", "value", "positions", "layers", "factor", "seed")
        },
        "Edit.interchange.site": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange(v, torch.zeros(32))]),
        "Edit.interchange.source": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange("S", v)]),
        "Edit.from_json": lambda v: Edit.from_json(v),
        "Sampling.from_json": lambda v: Sampling.from_json(v),
    }


def in_other_words(name: str) -> bool:
    """Whether `Engine.generate` takes the same option, through the same checks."""
    verb, _, option = name.rpartition(".")
    return verb in ("stream", "Branch.generate", "Branch.stream") and option in OPTIONS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if in_other_words(name) else name
        for name in engine_calls(None)  # type: ignore[arg-type]
    ],
)
def test_odd_values_for_an_engine_and_its_branches(name: str, served: Engine) -> None:
    assert asked(engine_calls(served)[name]) > 20
    assert_unharmed(served)


@pytest.mark.parametrize("name", value_calls(None))  # type: ignore[arg-type]
def test_odd_values_within_a_sampling_or_an_edit(name: str, served: Engine) -> None:
    assert asked(value_calls(served)[name]) > 20
    assert_unharmed(served)


LOADED = ("device", "dtype", "draft_model", "cache_tokens", "page_size", "max_rows", "lens_layer", "tree_width", "canary")


@pytest.mark.parametrize("name", [*LOADED, "guess", "check", "tokenizer", "record"])
def test_odd_values_for_loading(name: str) -> None:
    assert asked(lambda v: Engine.load(toy(), **{name: v})) > 20


def test_odd_sources() -> None:
    assert asked(lambda v: Engine.load(v)) == len(ODD) + 1
    assert asked(lambda v: Engine(v)) == len(ODD) + 1


def thinking_calls(e: Any) -> dict[str, Call]:
    text = "A coin's state is heads. Alice flips."
    root = cache(lambda: e.prompt(text))
    return {
        "prompt.text": lambda v: e.prompt(v),
        "prompt.guess": lambda v: e.prompt(text, guess=v),
        "prompt.drafts": lambda v: e.prompt(text, guess="drafted", drafts=v),
        "prompt.edits": lambda v: e.prompt(text, edits=v),
        "prompt.hooks": lambda v: e.prompt(text, hooks=v),
        "prompt.sites": lambda v: e.prompt(text, sites=v),
        "Branch.fork.n": lambda v: root().fork(v),
        "Branch.fork.at": lambda v: root().fork(at=v),
        "Branch.fork.edits": lambda v: root().fork(edits=v),
        "Branch.fork.hooks": lambda v: root().fork(hooks=v),
        "Branch.extend.text": lambda v: root().extend(v),
        "Branch.extend.guess": lambda v: root().extend(" Bob flips.", v),
        "thought_place.site": lambda v: e.thought_place(v, 0),
        "thought_place.chunk": lambda v: e.thought_place("thinking.hook_out", v),
        "thought_place.step": lambda v: e.thought_place("thinking.hook_out", 0, v),
        "run_with_cache.tokens": lambda v: e.run_with_cache(v),
    }


@pytest.mark.parametrize("name", thinking_calls(None))
def test_odd_values_for_a_model_that_thinks(name: str, thinking: Engine) -> None:
    assert asked(thinking_calls(thinking)[name]) > 20
    assert_unharmed(thinking)


def run_calls(run: Run, folder: Path) -> dict[str, Call]:
    """Leaves out `run[i]`, which raises what a list raises, as a sequence must."""
    names = ("sites", "drafter", "window", "seed", "sampling", "edits", "rejected", "deterministic", "batch", "progress")
    replayed: Callable[..., Run] = lambda **o: run.engine.replay([r.example for r in run], **{"max_new": 1, **o})  # type: ignore[attr-defined]  # noqa: E731
    return {
        **{f"replay.{name}": _given(replayed, name) for name in (*names, "max_new")},
        "tree.index": lambda v: run.tree(v),
        "timeline.index": lambda v: run.timeline(v),
        "picture.index": lambda v: run.picture(v),
        "save.path": lambda v: None if isinstance(v, str | Path) and str(v) else run.save(v),  # any other is a valid folder
        "save.positions": lambda v: run.save(f"memory://odd-{id(v)}", positions=v),
        "save.dtype": lambda v: run.save(f"memory://odd-{id(v)}", dtype=v),
        "save.examples_per_shard": lambda v: run.save(f"memory://odd-{id(v)}", examples_per_shard=v),
        "save.resume": lambda v: run.save(folder / str(id(v)), resume=v),
    }


@pytest.mark.parametrize("name", run_calls(None, None))  # type: ignore[arg-type]
def test_odd_values_for_a_run(name: str, run: Run, tmp_path: Path) -> None:
    assert asked(run_calls(run, tmp_path)[name]) > 20
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
        "where.token": lambda v: len(dump.where(token=v)),
        "where.position": lambda v: len(dump.where(position=v)),
        "where.accepted": lambda v: len(dump.where(accepted=v)),
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
    refused = asked(dump_calls(dump)[name])
    assert refused > 0 if name.startswith("where") else refused > 20
    assert Dump.open("memory://odd-values").digest == dump.digest


CLOSED: dict[str, Call] = {
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


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_branch_is_named(name: str, served: Engine) -> None:
    closed = served.prompt([1, 2, 3])
    closed.release()
    with pytest.raises(EngineError, match="released"):
        CLOSED[name](closed)
    assert_unharmed(served)


def test_the_net_is_not_too_wide(served: Engine) -> None:
    """Negative control: a bare error passes through, and valid values are served."""
    with pytest.raises(ZeroDivisionError):
        asked(lambda v: 1 / 0)
    assert asked(lambda v: v) == 0
    assert served.prompt(np.array([1, 2])).generate(np.int64(2)).length == 4
    assert_unharmed(served)
