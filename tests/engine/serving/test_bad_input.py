"""Bad input raises a named error that says what to do. Nothing committed is lost, and the engine stays usable."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens import Dump, Edit, Run, tasks
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadRange,
    BadRequest,
    BadRollback,
    ClosedBranch,
    EngineError,
    NonFinite,
    OutOfPages,
    UnknownSite,
)
from replaylens.engine.loop.lane import Job
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.tasks.errors import TaskError
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, scripted_model, toy


class Subject:
    """An engine with some work done, which no later request may change."""

    def __init__(self, **options: Any) -> None:
        self.engine: Engine = engine(**options)
        self.branch = self.engine.prompt([1, 2, 3], sites="S", keep_rejected=True)
        self.branch.generate(6, drafter="lens", window=4, keep_pages=True)
        self.released = self.engine.prompt([4, 5])
        self.released.release()
        self.finished = self.engine.prompt([6, 7]).generate(3, sampling=Sampling(stop_tokens=tuple(range(VOCAB))))
        self.rejected = self.branch.rejected[0]
        self.tokens, self.kv = self.branch.tokens, self.branch.kv()
        self.rows = self.branch.activations["blocks.1.hook_in"].clone()

    def assert_unharmed(self) -> None:
        subject, branch = self.engine, self.branch
        subject.check_integrity()
        assert subject.loop.jobs == []
        assert branch.tokens == self.tokens and torch.equal(branch.kv(), self.kv)
        assert torch.equal(branch.activations["blocks.1.hook_in"], self.rows)
        other = subject.prompt([9, 8, 7]).generate(5, drafter="lens", window=3)
        assert other.generated == continuation(subject.model, [9, 8, 7], 5)
        assert torch.equal(other.kv(), Reference(subject.model, other.tokens).kv[: other.lane.computed])
        other.release()
        (fork,) = branch.fork()
        assert fork.generate(3).generated == continuation(subject.model, [1, 2, 3], 9), "it can go on where it stood"
        fork.release()
        subject.check_integrity()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject()


@contextmanager
def refused(error: type[EngineError], saying: str) -> Iterator[None]:
    with pytest.raises(error, match=saying) as caught:
        yield
    assert isinstance(caught.value, EngineError)


Call = Callable[[Subject], Any]
PROMPTS: dict[str, tuple[Call, type[EngineError], str]] = {
    "empty": (lambda s: s.engine.prompt([]), BadRequest, "prompt is empty"),
    "empty among others": (lambda s: s.engine.prompts([[1], []]), BadRequest, "prompt is empty"),
    "too long": (lambda s: s.engine.prompt([1] * 257), BadRequest, "257 tokens exceed the model's 256 positions"),
    "id too large": (lambda s: s.engine.prompt([1, VOCAB]), BadRequest, f"Token {VOCAB} is not in the vocabulary of {VOCAB}"),
    "id negative": (lambda s: s.engine.prompt([-1]), BadRequest, "Token -1 is not in the vocabulary"),
    "float": (lambda s: s.engine.prompt([1.0]), BadRequest, "1.0 is a float, not a token id"),
    "none": (lambda s: s.engine.prompt([1, None]), BadRequest, "None is a NoneType, not a token id"),
    "bool": (lambda s: s.engine.prompt([True, 2]), BadRequest, "True is a bool, not a token id"),
    "a string among ids": (lambda s: s.engine.prompt([1, "2"]), BadRequest, "'2' is a str, not a token id"),
    "text without a tokenizer": (lambda s: s.engine.prompt("heads"), BadRequest, "no tokenizer. Give token ids"),
    "unknown letter": (lambda s: s.engine.prompt([1], sites="SQ"), UnknownSite, "SQ"),
    "unknown site": (lambda s: s.engine.prompt([1], sites=["blocks.7.hook_in"]), UnknownSite, "blocks"),
    "misspelt site": (lambda s: s.engine.prompt([1], sites=["blocks.0.hook_inn"]), UnknownSite, "blocks.0.hook_in"),
    "unknown target": (lambda s: s.engine.prompt([1], sites="Z", targets=[VOCAB]), BadRequest, "not in the vocabulary"),
}
GENERATES: dict[str, tuple[Call, type[EngineError], str]] = {
    "none": (lambda s: s.branch.generate(0), BadRequest, "at least 1"),
    "fewer than none": (lambda s: s.branch.generate(-2), BadRequest, "at least 1"),
    "half a token": (lambda s: s.branch.generate(2.5), BadRequest, "whole number"),
    "nan tokens": (lambda s: s.branch.generate(math.nan), BadRequest, "whole number"),
    "too many": (lambda s: s.branch.generate(248), BadRequest, "9 tokens and 248 more exceed the model's 256 positions"),
    "window 0": (lambda s: s.branch.generate(3, window=0), BadRequest, "window=0. Give a whole number of at least 1"),
    "window -1": (lambda s: s.branch.generate(3, window=-1), BadRequest, "window=-1"),
    "window 1.5": (lambda s: s.branch.generate(3, window=1.5), BadRequest, "whole number"),
    "window beyond a pass": (
        lambda s: Subject(max_rows=16).branch.generate(40, window=17),
        BadRequest,
        "window of 17 rows does not fit into a pass of 16",
    ),
    "siblings beyond a pass": (
        lambda s: Subject(max_rows=16).branch.generate(40, window=6, drafter="tree"),
        BadRequest,
        "window of 18 rows does not fit into a pass of 16",
    ),
    "drafts beyond a pass": (
        lambda s: Subject(max_rows=16).branch.generate(40, drafter="forced", drafts={9: [[1] * 16]}),
        BadRequest,
        "window of 17 rows does not fit into a pass of 16",
    ),
    "unknown drafter": (
        lambda s: s.branch.generate(3, drafter="oracle"),
        BadRequest,
        "Unknown drafter 'oracle'. Known: .*self.*tree",
    ),
    "no draft model": (lambda s: s.branch.generate(3, drafter="model"), BadRequest, "draft_model="),
    "bias out of range": (lambda s: s.branch.generate(3, sampling=Sampling(logit_bias={VOCAB: 1.0})), BadRequest, "vocabulary"),
    "bias negative": (
        lambda s: s.branch.generate(3, window=1, sampling=Sampling(logit_bias={-1: 1.0})),
        BadRequest,
        "Token -1",
    ),
    "draft out of range": (
        lambda s: s.branch.generate(3, drafter="forced", drafts={9: [[1, VOCAB]]}),
        BadRequest,
        "drafts is not in the vocabulary",
    ),
    "draft of a bool": (lambda s: s.branch.generate(3, drafter="forced", drafts={9: [[True]]}), BadRequest, "vocabulary"),
    "twice the same branch": (lambda s: s.engine.generate([*s.engine.prompts([[5]]) * 2], 3), BadRequest, "given 2 times"),
    "stream of none": (lambda s: s.branch.stream(0), BadRequest, "at least 1"),
    "a finished branch": (lambda s: s.finished.generate(2), ClosedBranch, "finished. Roll it back or fork it"),
    "a released branch": (lambda s: s.released.generate(2), ClosedBranch, "released"),
    "a rejected branch": (lambda s: s.rejected.generate(2), ClosedBranch, "is rejected. Fork it"),
    "an empty branch": (lambda s: s.branch.fork(at=0)[0].generate(2), BadRequest, "no tokens. Force at least one"),
}
BRANCHES: dict[str, tuple[Call, type[EngineError], str]] = {
    "fork 0": (lambda s: s.branch.fork(0), BadRequest, "n=0. Give a whole number between 1 and"),
    "fork -1": (lambda s: s.branch.fork(-1), BadRequest, "n=-1. Give a whole number between 1 and"),
    "fork 1.5": (lambda s: s.branch.fork(1.5), BadRequest, "n=1.5. Give a whole number"),
    "fork beyond the tip": (lambda s: s.branch.fork(at=10), BadRange, "9 tokens. Cannot fork it at 10"),
    "fork at -1": (lambda s: s.branch.fork(at=-1), BadRange, "Cannot fork it at -1"),
    "fork at half": (lambda s: s.branch.fork(at=1.5), BadRequest, "at=1.5. Give a whole number"),
    "fork of a released branch": (lambda s: s.released.fork(), ClosedBranch, "released"),
    "rollback below the root": (lambda s: s.branch.rollback(2), BadRollback, "Use 3 .* to 9"),
    "rollback beyond the tip": (lambda s: s.branch.rollback(10), BadRollback, "cannot roll back to 10"),
    "rollback to -1": (lambda s: s.branch.rollback(-1), BadRollback, "cannot roll back to -1"),
    "rollback to half": (lambda s: s.branch.rollback(4.5), BadRequest, "whole number"),
    "rollback of a released branch": (lambda s: s.released.rollback(2), ClosedBranch, "released"),
    "rollback of a rejected branch": (lambda s: s.rejected.rollback(3), ClosedBranch, "rejected"),
    "force of nothing": (lambda s: s.branch.force([]), BadRequest, "at least one token"),
    "force out of range": (lambda s: s.branch.force([1, VOCAB]), BadRequest, "vocabulary"),
    "force of text": (lambda s: s.branch.force(" heads"), BadRequest, "no tokenizer"),
    "force beyond the last position": (lambda s: s.branch.force([1] * 248), BadRequest, "257 tokens exceed"),
    "force on a finished branch": (lambda s: s.finished.force([1]), ClosedBranch, "finished"),
    "force on a released branch": (lambda s: s.released.force([1]), ClosedBranch, "released"),
    "force on a rejected branch": (lambda s: s.rejected.force([1]), ClosedBranch, "rejected"),
    "release twice": (lambda s: s.released.release(), ClosedBranch, "released"),
    "kv of a released branch": (lambda s: s.released.kv(), ClosedBranch, "released"),
    "activations of a branch without": (lambda s: s.finished.activations, BadRequest, "Nothing was captured"),
    "activations of another site": (lambda s: s.branch.activations["blocks.0.mlp.hook_out"], UnknownSite, "was not captured"),
}
FILLS: dict[str, dict[str, Any]] = {
    "a window": {"window": 16},
    "siblings": {"window": 5, "drafter": "tree"},
    "drafts": {"drafter": "forced", "drafts": {9: [[1] * 15]}},
    "chains of drafts": {"drafter": "forced", "drafts": {9: [[1] * 7, [2] * 7]}},
}


@pytest.mark.parametrize("fills", FILLS)
def test_a_window_that_fills_a_pass_is_served(fills: str) -> None:
    """The largest that is not refused (see `GENERATES`)."""
    branch = Subject(max_rows=16).branch
    before = branch.tokens
    assert branch.generate(20, **FILLS[fills]).generated[-20:] == continuation(toy(), before, 20)


KINDS = {"prompt": PROMPTS, "generate": GENERATES, "branch": BRANCHES}
CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_call_is_refused_and_harms_nothing(subject: Subject, name: str) -> None:
    call, error, saying = CASES[name]
    with refused(error, saying):
        call(subject)
    subject.engine.check_integrity()
    assert subject.engine.loop.jobs == []
    assert subject.branch.tokens == subject.tokens and torch.equal(subject.branch.kv(), subject.kv)


@settings(max_examples=15, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=6))
def test_after_any_bad_calls_the_engine_gives_the_same_bits(subject: Subject, names: list[str]) -> None:
    for name in names:
        call, error, saying = CASES[name]
        with refused(error, saying):
            call(subject)
    subject.assert_unharmed()


# ---- impossible engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"cache_tokens": 0}, "cache_tokens=0. Give a whole number of at least 4"),
        ({"cache_tokens": 3}, "cache_tokens=3. Give a whole number of at least 4"),
        ({"page_size": 0}, "page_size=0. Give a whole number of at least 1"),
        ({"page_size": -4}, "page_size=-4"),
        ({"max_rows": 15}, "max_rows=15. Give a whole number of at least 16"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"lens_layer": 3}, "lens_layer=3. Give a whole number between 1 and 2"),
        ({"lens_layer": -1}, "lens_layer=-1"),
        ({"tree_width": 1}, "tree_width=1. Give a whole number of at least 2"),
        (
            {"draft_model": random_model(1, vocab_size=VOCAB + 1)},
            f"{VOCAB + 1} tokens, the model one of {VOCAB}.*same tokenizer",
        ),
    ],
)
def test_an_engine_that_cannot_be(options: dict[str, Any], saying: str) -> None:
    with refused(BadRequest, saying):
        engine(**options)


# ---- sampling --------------------------------------------------------------------------------------------------------

NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
NOT_A_NUMBER = st.sampled_from(["1", None, [1.0]])
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
BAD_SAMPLING = st.one_of(
    st.tuples(st.sampled_from(FLOATS), NOT_FINITE | NOT_A_NUMBER),
    st.tuples(st.just("logit_bias"), st.dictionaries(st.integers(0, 9), NOT_FINITE | NOT_A_NUMBER, min_size=1)),
    st.tuples(st.just("logit_bias"), st.sampled_from([None, [1.0], "3"])),
    st.tuples(st.just("temperature"), st.floats(max_value=-1e-9) | st.floats(1e-300, 1e-7)),
    st.tuples(st.just("top_k"), st.integers(max_value=-1) | st.sampled_from([1.0, "2", None, True])),
    st.tuples(st.just("top_p"), st.floats(max_value=0) | st.floats(1.001)),
    st.tuples(st.just("min_p"), st.floats(max_value=-1e-9) | st.floats(1.001)),
    st.tuples(st.just("repetition_penalty"), st.floats(max_value=0)),
    st.tuples(st.just("seed"), st.integers(max_value=-1) | st.integers(2**64) | st.sampled_from([1.0, "2", None, True])),
    st.tuples(st.just("stop"), st.sampled_from(["", "end", ("",), ("a", ""), (1,), None, 3])),
)


@given(BAD_SAMPLING)
def test_a_sampling_parameter_that_cannot_be(bad: tuple[str, Any]) -> None:
    name, value = bad
    with refused(BadRequest, name.split("_")[0]):
        Sampling(**{name: value})


@given(
    temperature=st.just(0.0) | st.floats(1e-6, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    penalty=st.floats(1e-6, 1e6),
    bias=st.floats(-1e9, 1e9),
)
def test_a_sampling_parameter_that_can_be_draws_a_token(
    temperature: float, top_p: float, min_p: float, seed: int, penalty: float, bias: float
) -> None:
    """Up to the limits of the allowed range, a token is drawn without a warning."""
    sampling = Sampling(temperature, 3, top_p, min_p, penalty, bias, {0: bias}, seed)
    logits = torch.tensor([3e38, -3e38, 0.0, 1.0]).numpy()
    assert 0 <= sampling.choose(logits, [1, 2, 3], 1) < 4


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_into_the_cache() -> None:
    subject = engine(cache_tokens=16)
    with pytest.raises(
        OutOfPages,
        match=r"A path of 20 tokens can never fit: it takes 5 pages of 4, and the cache has 4\. Use .*cache_tokens=20",
    ) as caught:
        subject.prompt([1] * 20)
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert subject.prompt([1, 2, 3]).generate(9).generated == continuation(toy(), [1, 2, 3], 9)
    subject.check_integrity()


def test_a_prompt_that_failed_leaves_nothing_behind() -> None:
    subject = engine(cache_tokens=16)
    with pytest.raises(OutOfPages):
        subject.prompts([[1, 2, 3], [1] * 20])
    assert subject.loop.lanes == {} and subject.tree.roots() == []


@pytest.mark.parametrize("drafter", ["self", "lens", "tree"])
def test_a_request_that_outgrows_the_cache_keeps_what_it_had(drafter: str) -> None:
    """The request gets as far as the pages allow. Its committed tokens are right and stay; then an error gives the numbers."""
    subject = engine(cache_tokens=16)
    branch = subject.prompt([1, 2, 3])
    with refused(OutOfPages, r"A path of 17 tokens can never fit: .* the cache has 4\. Use .* cache_tokens=44 or more"):
        branch.generate(40, drafter=drafter, window=4)
    truth = continuation(toy(), [1, 2, 3], 40)
    assert len(branch.generated) >= 13 and branch.generated == truth[: len(branch.generated)]
    assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    subject.check_integrity()
    branch.rollback(5)
    assert branch.generate(6, drafter=drafter).generated == truth[:8]


def test_forced_tokens_that_do_not_fit_are_taken_back() -> None:
    subject = engine(cache_tokens=16)
    branch = subject.prompt([1, 2, 3]).generate(2)
    before = branch.tokens
    with refused(OutOfPages, "can never fit"):
        branch.force([4] * 20)
    assert branch.tokens == before
    assert branch.generate(4).generated == continuation(toy(), [1, 2, 3], 6)
    subject.check_integrity()


def test_one_request_that_cannot_fit_does_not_stop_the_others() -> None:
    subject = engine(cache_tokens=24)
    small, large = subject.prompts([[1, 2, 3], [4, 5, 6]])
    truth = continuation(toy(), [1, 2, 3], 8)
    with refused(OutOfPages, "can never fit.*the cache has 6"):
        subject.forest.wait(jobs := [_submitted(small, 8), _submitted(large, 60)])
    assert jobs[0].error is None and small.generated == truth
    assert large.generated == continuation(toy(), [4, 5, 6], 60)[: len(large.generated)]
    subject.check_integrity()


def _submitted(branch: Branch, n: int) -> Job:
    branch.engine.loop.submit(job := Job(branch.lane, n))
    return job


# ---- busy branches ---------------------------------------------------------------------------------------------------


def test_a_branch_that_is_being_streamed_is_left_alone() -> None:
    """Cutting, forcing or generating on it elsewhere is refused. Forking is allowed. Closing the stream frees it."""
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    stream = branch.stream(20, window=4)
    first = [next(stream) for _ in range(5)]
    tokens = branch.tokens
    for call in (lambda: branch.rollback(3), lambda: branch.force([1]), lambda: branch.generate(2)):
        with refused(BadRequest, "is busy with another request. Finish it or close its stream"):
            call()
        assert branch.tokens == tokens
    (fork,) = branch.fork(at=5)
    truth = continuation(toy(), [1, 2, 3], 20)
    assert first + list(stream) == truth
    assert fork.generate(3).generated == truth[:5]
    assert branch.rollback(4).length == 4


def test_releasing_a_streamed_branch_ends_its_stream() -> None:
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    stream = branch.stream(20, window=4)
    next(stream)
    branch.release()
    list(stream)
    assert subject.loop.jobs == [] and branch.id not in subject.loop.lanes
    subject.check_integrity()


# ---- numbers that overflow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["self", "lens", "tree", "ngram"])
@pytest.mark.parametrize("window", [1, 4])
def test_logits_that_overflow(drafter: str, window: int) -> None:
    """Raises NonFinite. The branch does not change, and what needs no logits still works."""
    model = random_model()
    assert model.unembed is not None
    model.unembed.weight.copy_(model.unembed.weight.sign() * 3e38)
    subject = engine(model)
    branch = subject.prompt([1, 2, 3, 1, 2], sites="S")
    with refused(NonFinite, "Nothing of this pass was committed"):
        branch.generate(4, drafter=drafter, window=window)
    assert branch.tokens == [1, 2, 3, 1, 2] and subject.loop.jobs == []
    branch.force([7, 8])
    assert torch.equal(branch.kv(), Reference(random_model(), branch.tokens).kv), "the blocks are those of the healthy model"
    subject.check_integrity()


def test_weights_that_are_not_finite() -> None:
    model = random_model()
    model.blocks[1].mlp.down.weight[0, 0] = math.nan
    subject = engine(model)
    with refused(NonFinite, "Check edits and weights"):
        subject.prompt([1, 2, 3])
    subject.check_integrity()
    assert len(subject.prefix) == 0 and subject.loop.jobs == []


def test_one_token_that_overflows_leaves_the_engine_usable() -> None:
    """Layer norm of a huge embedding is NaN. Only the request with that token fails, and can be rolled back and continued."""
    model = scripted_model({8: 30}, norm="layer")
    model.embed[30] = 3e38
    subject = engine(model)
    bad, good = subject.prompts([[5, 6], [40, 41]], sites="S")
    with refused(NonFinite, "Nothing of this pass"):
        subject.generate([bad, good], 6, window=3)
    assert bad.generated == [7, 8, 30] and good.generated == [42, 43, 44, 45, 46, 47]
    assert len(bad.activations["blocks.0.hook_in"]) == 4
    bad.rollback(4).force([9]).generate(2)
    assert bad.generated == [7, 8, 9, 10, 11]
    for branch in (bad, good):
        assert torch.equal(branch.kv(), Reference(model, branch.tokens[: branch.lane.computed]).kv)
    subject.check_integrity()


# ---- odd values ------------------------------------------------------------------------------------------------------
# Odd values for every parameter of the public API give a named error or an answer, never a bare error, and do no harm.


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
CallOfOddValues = Callable[[Any], Any]


def asked(call: CallOfOddValues) -> int:
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
    return Engine.load("coin-plain").replay(tasks.get("coin")(flips=1).examples(2), sites="SZ", drafter="lens")


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


def engine_calls(e: Engine) -> dict[str, CallOfOddValues]:
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


def _given(call: Callable[..., Any], name: str) -> CallOfOddValues:
    return lambda v: call(**{name: v})


def value_calls(e: Engine) -> dict[str, CallOfOddValues]:
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


def thinking_calls(e: Any) -> dict[str, CallOfOddValues]:
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


def run_calls(run: Run, folder: Path) -> dict[str, CallOfOddValues]:
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


def dump_calls(dump: Dump) -> dict[str, CallOfOddValues]:
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


CLOSED: dict[str, CallOfOddValues] = {
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


@pytest.mark.parametrize("name", ["model", "draft_model"])
def test_weights_without_numbers_are_refused(name: str) -> None:
    given = {"model": random_model(), "draft_model": random_model()}
    given[name] = given[name].to("meta")
    with pytest.raises(BadRequest, match=r"on the device 'meta'.*Load the model on 'cpu'"):
        Engine(**given)


def test_all_positions_of_a_model_can_be_filled() -> None:
    served = Engine(random_model(num_layers=1, max_positions=12), page_size=4)
    full = [1 + i % 5 for i in range(12)]
    assert served.prompt(full).tokens == full == served.prompt(full[:2]).force(full[2:]).tokens
    branch = served.prompt([1, 2, 3])
    with pytest.raises(BadRequest, match="3 tokens and 10 more exceed the model's 12 positions"):
        branch.generate(10)
    assert branch.generate(9, sampling=Sampling(ignore_eos=True)).length == 12
    for more in lambda: branch.generate(1), lambda: branch.force([1]):
        with pytest.raises(BadRequest, match="12 positions"):
            more()


def test_an_empty_fork_can_be_forced(subject: Subject) -> None:
    """A fork of no token becomes any path: with the bits of a prompt, also after a rollback to nothing."""
    wanted = subject.engine.prompt([1, 2, 3], sites="S").generate(4)
    (fork,) = subject.branch.fork(at=0)
    for tokens in ([[1, 2, 3]], [[1], [2, 3]]):
        for more in tokens:
            fork.force(more)
        fork.generate(4)
        assert fork.tokens == wanted.tokens and fork.certified and torch.equal(fork.kv(), wanted.kv())
        (site,) = {*fork.activations} & {"blocks.1.hook_in"}
        assert torch.equal(fork.activations[site], wanted.activations[site])
        fork.rollback(to=0)
    assert fork.length == 0
    with pytest.raises(BadRequest, match="Force at least one"):
        fork.generate(1)
    for each in (fork, wanted):
        each.release()
    subject.assert_unharmed()
