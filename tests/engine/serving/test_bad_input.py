"""Bad input raises a named error that says what to do. Nothing committed is lost, and the engine stays usable."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
