"""User input: scalars of every library are numbers. Anything else is refused by name and changes nothing."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import Branch, Edit, Engine, Sampling, tasks
from replaylens.engine.errors import BadEdit, BadRequest, CannotCopy, EngineError, OutOfPages, UnknownSite
from replaylens.engine.request.values import integer, real
from tests.toy_model import VOCAB, continuation, engine, toy

ROW = torch.ones(32)


@pytest.fixture(scope="module")
def served() -> Engine:
    return engine()


@pytest.fixture
def branch(served: Engine) -> Branch:
    return served.prompt([1, 2, 3], sites="S").generate(2)


def state(e: Engine, branch: Branch) -> tuple[Any, ...]:
    """Everything that a call could change."""
    kv = branch.kv()
    pool, tree = e.runner.pool, e.tree
    return (
        branch.tokens,
        branch.states,
        kv.shape,
        float(kv.double().sum()),
        pool.num_free,
        tree.roots(),
        sorted(e.loop.lanes),
        e.loop.jobs,
    )


# Numbers of other libraries


TWO = [2, np.int64(2), np.int8(2), np.uint64(2), np.array(2), torch.tensor(2), torch.tensor(2, dtype=torch.uint8)]
HALF = [0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()]
NO_NUMBERS = [True, np.bool_(True), torch.tensor(True), "2", b"2", None, [2], torch.tensor([2]), np.array([2]), 2j, {2}]


@pytest.mark.parametrize("two", TWO, ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}")
def test_whole_numbers_of_every_library_are_whole_numbers(two: Any, served: Engine) -> None:
    branch = served.prompt([1, two, 3], sites="Z", top_k=two, targets=[two])
    truth = continuation(toy(), [1, 2, 3], 4)
    assert branch.tokens == [1, 2, 3] and all(type(t) is int for t in branch.tokens)
    assert branch.generate(two, window=two, drafter="lens").generated == truth[:2]
    assert branch.force([two]).tokens[-1] == 2
    assert [len(fork.tokens) for fork in branch.fork(two, at=two)] == [2, 2]
    assert branch.rollback(torch.tensor(3)).tokens == [1, 2, 3]
    chains = {np.int64(3): [[truth[0], two]], torch.tensor(4): [torch.tensor([5, 6])]}
    assert branch.generate(3, drafter="forced", drafts=chains).generated == truth[:3]
    edited = served.prompt([1, 2, 3], edits=[Edit("S", "zero", positions=[two], layers=[np.int64(1)], seed=two)])
    assert torch.equal(edited.kv(), served.prompt([1, 2, 3], edits=[Edit("S", "zero", positions=[2], layers=[1])]).kv())
    assert Sampling(top_k=two, seed=two, stop_tokens=[two], logit_bias={two if two.__hash__ else 2: 1}).seed == 2
    assert engine(page_size=two, tree_width=two, lens_layer=two, cache_tokens=np.int64(64)).runner.pool.page_size == 2


@pytest.mark.parametrize("half", HALF, ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}")
def test_numbers_of_every_library_are_numbers(half: Any, served: Engine) -> None:
    plain = Sampling(temperature=0.5, top_p=0.5, presence_penalty=0.5, logit_bias={3: 0.5}, seed=4)
    other = Sampling(temperature=half, top_p=half, presence_penalty=half, logit_bias={3: half}, seed=4)
    assert plain == other and plain.to_json() == other.to_json() and type(other.temperature) is float
    assert served.prompt([1]).generate(5, sampling=other).tokens == served.prompt([1]).generate(5, sampling=plain).tokens
    a, b = (served.prompt([1, 2], edits=[Edit("S", "add", ROW, factor=f, layers=[0])]) for f in (half, 0.5))
    assert torch.equal(a.kv(), b.kv())


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_none(value: Any) -> None:
    assert integer(value) is None and real(value) is None
    with pytest.raises(BadRequest, match="temperature="):
        Sampling(temperature=value)


@pytest.mark.parametrize("tokens", [np.array([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int16), (1, 2, 3), range(1, 4)])
def test_arrays_tensors_tuples_and_ranges_are_tokens(tokens: Any, served: Engine) -> None:
    assert served.prompt(tokens).tokens == [1, 2, 3]
    assert served.prompt([0]).force(tokens).tokens == [0, 1, 2, 3]
    assert served.run_with_cache(tokens, "blocks.0.hook_in")[0].shape == (1, 3, VOCAB)
    assert [b.tokens for b in served.prompts(iter([tokens, tokens]))] == [[1, 2, 3]] * 2


# What is refused, with which error, and without any change

Case = tuple[Callable[[Engine, Branch], Any], type[EngineError], str]
TOKENS: dict[str, Any] = {
    "bytes": b"\x01\x02",
    "a bytearray": bytearray(b"\x01"),
    "a set": {1, 2},
    "a frozenset": frozenset({1}),
    "a dict": {1: 2},
    "keys": {1: 2}.keys(),
    "a number": 5,
    "none": None,
    "two dimensions": torch.tensor([[1, 2], [3, 4]]),
    "no dimension": torch.tensor(1),
    "floats": [1.0, 2.0],
    "floats in a tensor": torch.tensor([1.0]),
    "floats in an array": np.array([1.0]),
    "bools": [True, False],
    "bools in a tensor": torch.tensor([True]),
    "bools in an array": np.array([True]),
    "digits": ["1", "2"],
    "no values": torch.zeros(2, device="meta", dtype=torch.int64),
}
CASES: dict[str, Case] = {
    **{f"prompt {k}": (lambda e, b, v=v: e.prompt(v), BadRequest, "text=|vocabulary|token id") for k, v in TOKENS.items()},
    **{
        f"force {k}": (lambda e, b, v=v: b.force(v), BadRequest, "tokens=|vocabulary|not a token id") for k, v in TOKENS.items()
    },
    "generate words": (lambda e, b: b.generate("2"), BadRequest, "n='2'. Give a whole number of at least 1"),
    "generate yes": (lambda e, b: b.generate(True), BadRequest, "n=True. Give a whole number"),
    "sampling of nothing": (lambda e, b: b.generate(2, sampling={}), BadRequest, "sampling={}. Give a Sampling"),
    "sampling as a dict": (lambda e, b: b.generate(2, sampling={"seed": 1}), BadRequest, "sampling={'seed': 1}. Give"),
    "sampling as a dict, for all": (lambda e, b: e.generate([b], 2, sampling={}), BadRequest, "sampling={}. Give"),
    "sampling of another type, for each": (lambda e, b: e.generate([b], 2, sampling=[3]), BadRequest, "sampling=3. Give"),
    "a branch for branches": (lambda e, b: e.generate(b, 2), BadRequest, "branches=.*Give a list of branches"),
    "no branch": (lambda e, b: e.generate([b, 3], 2), BadRequest, "branch=3. Give a Branch"),
    "drafts as a list": (
        lambda e, b: b.generate(3, drafter="forced", drafts=[[1]]),
        BadRequest,
        r"drafts=\[\[1\]\]. Give a dict: position -> list of chains",
    ),
    "a chain for chains": (
        lambda e, b: b.generate(3, drafter="forced", drafts={5: [1]}),
        BadRequest,
        r"drafts\[5\]=\[1\]: one chain",
    ),
    "drafts at a word": (
        lambda e, b: b.generate(3, drafter="forced", drafts={"5": [[1]]}),
        BadRequest,
        "position of drafts='5'",
    ),
    "drafts of words": (lambda e, b: b.generate(3, drafter="forced", drafts={5: [["x"]]}), BadRequest, "Token 'x' in"),
    "drafter of none": (lambda e, b: b.generate(3, drafter=None), BadRequest, "drafter=None. Give the name of a drafter"),
    "deterministic by a word": (lambda e, b: b.generate(3, deterministic="no"), BadRequest, "deterministic='no'. Give True or"),
    "a number for sites": (lambda e, b: e.prompt([1], sites=5), BadRequest, "sites=5. Give letters such as 'STCZ'"),
    "numbers for sites": (lambda e, b: e.prompt([1], sites=[5]), UnknownSite, "Invalid site 5"),
    "top_k without Z": (lambda e, b: e.prompt([1], top_k=3), BadRequest, "Z is not captured. Ask for it, e.g. with sites='Z'"),
    "targets without Z": (lambda e, b: e.prompt([1], sites="S", targets=[3]), BadRequest, "Z is not captured"),
    "full without Z": (lambda e, b: e.prompt([1], full=True), BadRequest, "Z is not captured"),
    "a text for targets": (lambda e, b: e.prompt([1], sites="Z", targets="ab"), BadRequest, "targets='ab'. Give a list"),
    "a name for hooks": (
        lambda e, b: b.fork(hooks=["x"]),
        BadEdit,
        "Invalid hook 'x'. Give a list of .site name, function",
    ),
    "a hook that is no function": (lambda e, b: b.fork(hooks=[("blocks.0.hook_in", 3)]), BadEdit, "function"),
    "a hook at no site": (lambda e, b: b.fork(hooks=[("blocks.0.hook_inn", print)]), UnknownSite, "Nearest"),
    "hooks as a dict": (lambda e, b: e.prompt([1], hooks={"blocks.0.hook_in": print}), BadEdit, "hooks=.*Give a list"),
    "an edit for edits": (lambda e, b: b.fork(edits=Edit("S", "zero")), BadEdit, "edits=.*Give a list of Edits"),
    "a gradient": (
        lambda e, b: b.fork(edits=[Edit("S", "add", torch.ones(32, requires_grad=True))]),
        BadEdit,
        r"requires a gradient, but none flows through an engine. Give value\.detach\(\)",
    ),
    "complex numbers": (lambda e, b: b.fork(edits=[Edit("S", "add", ROW + 0j)]), BadEdit, "Give a dense real tensor"),
    "text as a value": (lambda e, b: b.fork(edits=[Edit("S", "add", np.array(["a"]))]), BadEdit, "value for S=.*Give a tensor"),
    "one layer": (lambda e, b: b.fork(edits=[Edit("S", "zero", layers=1)]), BadEdit, "layers=1. Give a list of whole numbers"),
    "a seed below 0": (
        lambda e, b: b.fork(edits=[Edit("S", "zero", seed=-1)]),
        BadEdit,
        "seed=-1. Give a whole number between",
    ),
    "a million forks": (lambda e, b: b.fork(10**6), BadRequest, "n=1000000. Give a whole number between 1 and 65536"),
    "fewer texts than branches": (lambda e, b: e.force_all([b], []), BadRequest, "0 texts for 1 branches. Give one for each"),
    "a position beyond": (lambda e, b: e.run_with_cache([1, 2], None, 2), BadRequest, "pos_slice=2. Give a whole number"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_changes_nothing(name: str, served: Engine, branch: Branch) -> None:
    call, error, saying = CASES[name]
    before = state(served, branch)
    with pytest.raises(error, match=saying):
        call(served, branch)
    after = state(served, branch)
    assert after[:4] == before[:4] and after[-1] == before[-1]
    # branches of earlier tests, which nobody holds, may be released meanwhile; none is new
    assert set(after[6]) <= set(before[6]) and set(after[5]) <= set(before[5]) and after[4] >= before[4]
    assert after == before or after[6] != before[6]
    served.check_integrity()


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"page_size": 2.5}, "page_size=2.5. Give a whole number of at least 1"),
        ({"cache_tokens": 1e13}, "cache_tokens=10000000000000.0. Give a whole number"),
        (
            {"cache_tokens": 10**13},
            r"cache_tokens=10000000000000 needs [\d,]+ GiB for KV, but there are only .*Give at most \d+",
        ),
        ({"canary": "yes"}, "canary='yes'. Give True or False"),
        ({"tokenizer": 3}, "tokenizer=3. Give a WordTokenizer"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2'. Give a WordTokenizer"),
        ({"draft_model": 3}, "draft_model=3. Give a Decoder"),
    ],
)
def test_an_engine_of_wrong_options_is_refused(options: dict[str, Any], saying: str) -> None:
    with pytest.raises(BadRequest, match=saying):
        engine(**options)


def test_an_unknown_option_is_refused(served: Engine) -> None:
    """Every signature is spelled out. The error is also Python's own kind."""
    for call in (served.prompt, served.prompts):
        with pytest.raises(TypeError, match="has no option 'site'"):
            call([[1]], site="S")  # type: ignore[operator]


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_handles_are_not_copied(copied: Callable[[Any], Any], served: Engine, branch: Branch) -> None:
    before, stream = state(served, branch), branch.fork()[0].stream(2)
    for subject, instead in (
        (served, "Load another engine from the same source"),
        (branch, r"Use branch\.fork\(\) for a branch"),
        (stream, "Fork its branch"),
    ):
        with pytest.raises(CannotCopy, match=f"cannot be copied or pickled: .* {instead}"):
            copied(subject)
    stream.close()
    assert state(served, branch)[:4] == before[:4]


def test_a_run_is_not_copied_for_its_engine(served: Engine) -> None:
    run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=1).examples(1))
    with pytest.raises(CannotCopy, match="Load another engine"):
        copy.deepcopy(run)


# Paths that never fit


def test_a_path_that_can_never_fit_says_so_and_names_the_option() -> None:
    subject = engine(page_size=4, cache_tokens=4)
    branch = subject.prompt([1, 2, 3])
    with pytest.raises(
        OutOfPages, match=r"can never fit: .*pages of 4, and the cache has 1\. Use .* cache_tokens=12 or more"
    ) as e:
        branch.generate(9)
    assert "wait" not in str(e.value) and (e.value.needed, e.value.free) == (1, 0)
    assert branch.generated == continuation(toy(), [1, 2, 3], 9)[: len(branch.generated)]
    larger = engine(page_size=4, cache_tokens=12)
    assert larger.prompt([1, 2, 3]).generate(9).generated == continuation(toy(), [1, 2, 3], 9)


# Biases


@pytest.mark.parametrize("bias", [1.7e308, -1.7e308, 1.1e9, 10**400, math.inf])
def test_a_bias_that_would_drown_the_logits_is_refused(bias: Any) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        Sampling(logit_bias={1: bias, 2: bias})
    with pytest.raises(BadRequest, match="presence_penalty"):
        Sampling(presence_penalty=bias)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.7, 1e6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_largest_biases_choose_among_the_biased_by_their_logits(temperature: float, filters: dict[str, Any]) -> None:
    """With two tokens at the largest bias, one of them is chosen, and under greedy decoding the likelier one."""
    logits = np.array([3.0, 1.0, 1.0 + 1e-3, 2.0], dtype=np.float32)
    sampling = Sampling(temperature=temperature, logit_bias={1: 1e9, 2: 1e9}, **filters)
    chosen = {Sampling(**{**sampling.to_json(), "seed": seed}).choose(logits, [0], 1) for seed in range(40)}
    assert chosen <= {1, 2} and (temperature or chosen == {2})
    ruled_out = Sampling(temperature=temperature, logit_bias={0: -1e9, 3: -1e9}, **filters)
    assert ruled_out.choose(logits, [0], 1) in (1, 2)
