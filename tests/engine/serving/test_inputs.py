"""User input: scalars of every library are numbers. Anything else is refused by name and changes nothing."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replaylens as rl
from replaylens import Branch, Edit, Engine, Sampling, tasks
from replaylens.engine.errors import (
    BadEdit,
    BadRequest,
    CannotCopy,
    EngineError,
    OutOfPages,
    UnknownOption,
    UnknownSite,
    UnsupportedModel,
)
from replaylens.engine.request.values import integer, real
from replaylens.tasks.errors import BadIndex, TaskError
from tests.devices import covering
from tests.engine.coin_engine import PROMPT, fresh
from tests.engine.coin_engine import PROMPT as TEXT
from tests.families import hugging_face
from tests.toy_model import VOCAB, continuation, engine, toy

ROW = torch.ones(32)


@pytest.fixture(scope="module")
def served_of_inputs() -> Engine:
    return engine()


@pytest.fixture
def branch(served_of_inputs: Engine) -> Branch:
    return served_of_inputs.prompt([1, 2, 3], sites="S").generate(2)


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
def test_whole_numbers_of_every_library_are_whole_numbers(two: Any, served_of_inputs: Engine) -> None:
    branch = served_of_inputs.prompt([1, two, 3], sites="Z", top_k=two, targets=[two])
    truth = continuation(toy(), [1, 2, 3], 4)
    assert branch.tokens == [1, 2, 3] and all(type(t) is int for t in branch.tokens)
    assert branch.generate(two, window=two, drafter="lens").generated == truth[:2]
    assert branch.force([two]).tokens[-1] == 2
    assert [len(fork.tokens) for fork in branch.fork(two, at=two)] == [2, 2]
    assert branch.rollback(torch.tensor(3)).tokens == [1, 2, 3]
    chains = {np.int64(3): [[truth[0], two]], torch.tensor(4): [torch.tensor([5, 6])]}
    assert branch.generate(3, drafter="forced", drafts=chains).generated == truth[:3]
    edited = served_of_inputs.prompt([1, 2, 3], edits=[Edit("S", "zero", positions=[two], layers=[np.int64(1)], seed=two)])
    assert torch.equal(
        edited.kv(), served_of_inputs.prompt([1, 2, 3], edits=[Edit("S", "zero", positions=[2], layers=[1])]).kv()
    )
    assert Sampling(top_k=two, seed=two, stop_tokens=[two], logit_bias={two if two.__hash__ else 2: 1}).seed == 2
    assert engine(page_size=two, tree_width=two, lens_layer=two, cache_tokens=np.int64(64)).runner.pool.page_size == 2


@pytest.mark.parametrize("half", HALF, ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}")
def test_numbers_of_every_library_are_numbers(half: Any, served_of_inputs: Engine) -> None:
    plain = Sampling(temperature=0.5, top_p=0.5, presence_penalty=0.5, logit_bias={3: 0.5}, seed=4)
    other = Sampling(temperature=half, top_p=half, presence_penalty=half, logit_bias={3: half}, seed=4)
    assert plain == other and plain.to_json() == other.to_json() and type(other.temperature) is float
    assert (
        served_of_inputs.prompt([1]).generate(5, sampling=other).tokens
        == served_of_inputs.prompt([1]).generate(5, sampling=plain).tokens
    )
    a, b = (served_of_inputs.prompt([1, 2], edits=[Edit("S", "add", ROW, factor=f, layers=[0])]) for f in (half, 0.5))
    assert torch.equal(a.kv(), b.kv())


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_none(value: Any) -> None:
    assert integer(value) is None and real(value) is None
    with pytest.raises(BadRequest, match="temperature="):
        Sampling(temperature=value)


@pytest.mark.parametrize("tokens", [np.array([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int16), (1, 2, 3), range(1, 4)])
def test_arrays_tensors_tuples_and_ranges_are_tokens(tokens: Any, served_of_inputs: Engine) -> None:
    assert served_of_inputs.prompt(tokens).tokens == [1, 2, 3]
    assert served_of_inputs.prompt([0]).force(tokens).tokens == [0, 1, 2, 3]
    assert served_of_inputs.run_with_cache(tokens, "blocks.0.hook_in")[0].shape == (1, 3, VOCAB)
    assert [b.tokens for b in served_of_inputs.prompts(iter([tokens, tokens]))] == [[1, 2, 3]] * 2


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
def test_what_is_refused_changes_nothing(name: str, served_of_inputs: Engine, branch: Branch) -> None:
    call, error, saying = CASES[name]
    before = state(served_of_inputs, branch)
    with pytest.raises(error, match=saying):
        call(served_of_inputs, branch)
    after = state(served_of_inputs, branch)
    assert after[:4] == before[:4] and after[-1] == before[-1]
    # branches of earlier tests, which nobody holds, may be released meanwhile; none is new
    assert set(after[6]) <= set(before[6]) and set(after[5]) <= set(before[5]) and after[4] >= before[4]
    assert after == before or after[6] != before[6]
    served_of_inputs.check_integrity()


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


def test_an_unknown_option_is_refused(served_of_inputs: Engine) -> None:
    """Every signature is spelled out. The error is also Python's own kind."""
    for call in (served_of_inputs.prompt, served_of_inputs.prompts):
        with pytest.raises(TypeError, match="has no option 'site'"):
            call([[1]], site="S")  # type: ignore[operator]


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_handles_are_not_copied(copied: Callable[[Any], Any], served_of_inputs: Engine, branch: Branch) -> None:
    before, stream = state(served_of_inputs, branch), branch.fork()[0].stream(2)
    for subject, instead in (
        (served_of_inputs, "Load another engine from the same source"),
        (branch, r"Use branch\.fork\(\) for a branch"),
        (stream, "Fork its branch"),
    ):
        with pytest.raises(CannotCopy, match=f"cannot be copied or pickled: .* {instead}"):
            copied(subject)
    stream.close()
    assert state(served_of_inputs, branch)[:4] == before[:4]


def test_a_run_is_not_copied_for_its_engine(served_of_inputs: Engine) -> None:
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


# ---- options ---------------------------------------------------------------------------------------------------------
# Options of engines and requests.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "ngram", "drafts": {9: [[1]]}}, "Use drafter='forced'"),
        ({"sampling": Sampling(stop_tokens=(10**9,))}, "not in the vocabulary"),
    ],
)
def test_options_that_would_do_nothing_are_refused(served: Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        served.prompt(PROMPT).generate(2, **options)


def test_one_word_for_rows_and_another_for_pages(served: Engine) -> None:
    """`keep_rejected` of prompt keeps rows, `keep_pages` of generate keeps pages. Its old name still works, with a warning."""
    drafts: dict[str, Any] = {"drafter": "forced", "drafts": {10: [[1, 2]]}}
    assert not served.prompt(PROMPT).generate(3, **drafts).rejected
    assert served.prompt(PROMPT).generate(3, **drafts, keep_pages=True).rejected
    with pytest.warns(DeprecationWarning, match=r"keep_rejected of generate\(\) is now called keep_pages"):
        assert served.prompt(PROMPT).generate(3, **drafts, keep_rejected=True).rejected  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"keep_rejected of stream\(\)"):
        list(served.stream(served.prompt(PROMPT), 2, keep_rejected=True))  # type: ignore[call-arg]
    with pytest.raises(BadRequest, match="got keep_pages and keep_rejected, its old name"):
        served.prompt(PROMPT).generate(3, keep_pages=True, keep_rejected=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("tokens", [("heads",), 3, (True,)])
def test_stop_tokens_are_token_ids(tokens: Any) -> None:
    with pytest.raises(BadRequest, match="stop_tokens="):
        Sampling(stop_tokens=tokens)


def test_a_lens_layer_of_zero_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"lens_layer=0\. Give a whole number between 1 and 4"):
        Engine.load("coin-plain", lens_layer=0)


@pytest.mark.parametrize("top_k", [0, -1, 10**6, 2.5])
def test_how_many_tokens_z_keeps(served: Engine, top_k: Any) -> None:
    with pytest.raises(BadRequest, match=r"top_k=.* Give a whole number between 1 and"):
        served.prompt(PROMPT, sites="Z", top_k=top_k)
    assert served.loop.lanes == {}


def test_prompts_as_tensors_and_as_nothing(served: Engine) -> None:
    ids = served.prompt(PROMPT).tokens
    assert served.prompt(torch.tensor(ids)).tokens == ids
    for nothing in (None, 7):
        with pytest.raises(BadRequest, match="Give text, or token ids"):
            served.prompt(nothing)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"drafter=None\. Give the name of a drafter"):
        served.prompt(ids).generate(2, drafter=None)  # type: ignore[arg-type]


def test_captured_rows_read_like_a_dictionary(served: Engine) -> None:
    rows = served.prompt(PROMPT, sites="S").activations
    assert "blocks.0.hook_in" in rows and "blocks.9.hook_in" not in rows
    assert list(rows) == rows.keys() == served.sites.letter("S")
    assert all(torch.equal(x, rows[site]) for site, x in rows.items()) and dict(rows).keys() == set(rows)
    assert repr(rows) == f"Recording(positions 0 to 8, {len(rows.sites())} sites)"


# ---- hints -----------------------------------------------------------------------------------------------------------
# Small misunderstandings: what can be meant is accepted, and every other error says what to give.

PROMPT_OF_HINTS = [1, 2, 3, 4]
S = "blocks.1.hook_in"
V = torch.linspace(-1, 1, 32)

EDITS: dict[str, tuple[Callable[[], Edit], str]] = {
    "factor of set": (lambda: Edit(S, "set", V, factor=2.0), "factor=2.0.*op 'set'.*Only 'add'"),
    "factor of zero": (lambda: Edit(S, "zero", factor=0.5), "Only 'add'"),
    "too many directions": (lambda: Edit(S, "project_out", torch.eye(32).repeat(2, 1)), "linearly dependent"),
    "rows without positions": (lambda: Edit(S, "set", torch.zeros(4, 32)), "one row per position.*Give positions"),
    "interchange without positions": (lambda: Edit.interchange(S, torch.zeros(4, 32)), "Give positions"),
    "a small letter": (lambda: Edit("s", "zero", layers=[1]), "'s' is not S, T or C"),
    "two letters": (lambda: Edit("ST", "zero", layers=[1]), "'ST' names several"),
    "the lens": (lambda: Edit("Z", "zero", layers=[1]), "Z, the logit lens"),
    "text as a value": (lambda: Edit(S, "add", ["a"]), "Give a tensor, an array or a list"),  # type: ignore[arg-type]
    "ragged lists": (lambda: Edit(S, "add", [[1.0], [1.0, 2.0]]), "Give a tensor, an array or a list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", EDITS)
def test_edits_that_cannot_be_meant(case: str) -> None:
    make, says = EDITS[case]
    with pytest.raises(BadEdit, match=says):
        engine().prompt(PROMPT_OF_HINTS, edits=[make()])


def test_values_as_arrays_and_lists() -> None:
    subject = engine()
    made = [
        subject.prompt(PROMPT_OF_HINTS, edits=[Edit(S, "add", value)])
        for value in (V, V.numpy(), V.tolist(), V.double().numpy())
    ]
    assert all(torch.equal(branch.kv(), made[0].kv()) for branch in made)
    assert Edit(S, "add", V.numpy()).to_json() == Edit(S, "add", V).to_json()  # type: ignore[arg-type]


def test_a_batch_of_one_is_a_prompt() -> None:
    subject = engine()
    plain = subject.prompt(PROMPT_OF_HINTS)
    for given in (torch.tensor([PROMPT_OF_HINTS]), np.array([PROMPT_OF_HINTS]), [PROMPT_OF_HINTS]):
        assert subject.prompt(given).tokens == plain.tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [["a", "b"], torch.zeros(2, 3, dtype=torch.int64), [[1, 2], [3]], torch.zeros(1, 2, 3, dtype=torch.int64), []]
)
def test_several_prompts_for_one(given: Any) -> None:
    with pytest.raises(BadRequest, match=r"prompts\(\[|at least one token"):
        fresh().prompt(given)


def test_older_names_when_reading() -> None:
    rows = engine().prompt(PROMPT_OF_HINTS, sites=["blocks.1.hook_resid_pre", "blocks.0.hook_mlp_out"]).activations
    assert torch.equal(rows["blocks.1.hook_resid_pre"], rows[S])
    assert "blocks.1.hook_resid_pre" in rows and "blocks.0.hook_resid_pre" not in rows
    assert len(rows) == 2 and rows.keys() == ["blocks.0.hook_mlp_out", "blocks.1.hook_resid_pre"], "as asked for"
    found = rows.get("blocks.0.hook_mlp_out")
    assert found is not None and torch.equal(found, rows["blocks.0.mlp.hook_out"])
    assert rows.get("blocks.0.hook_in") is None
    with pytest.raises(UnknownSite, match=r"blocks.0.hook_resid_pre.*was not captured"):
        rows["blocks.0.hook_resid_pre"]


def test_older_names_on_forks_and_rejected_branches() -> None:
    branch = engine().prompt(PROMPT_OF_HINTS, sites="S", keep_rejected=True).generate(8, drafter="tree", window=4)
    for other in (branch, branch.fork(at=3)[0], branch.rejected[0], branch.rejected[0].fork()[0]):
        assert torch.equal(other.activations["blocks.1.hook_resid_pre"], other.activations[S])


def test_older_names_of_a_model_that_thinks() -> None:
    rows = Engine.load("coin-thinking").prompt(TEXT, sites="S").activations
    assert torch.equal(rows["blocks.1.hook_resid_pre"], rows[S])


def test_an_unknown_word_is_an_error_of_the_engine() -> None:
    for error in (rl.errors.UnknownPromptWord, EngineError, TaskError, rl.tasks.errors.UnknownWord, ValueError):
        with pytest.raises(error, match="zebra"):
            fresh().prompt("A zebra")
    with pytest.raises(rl.errors.UnknownPromptWord) as caught:
        fresh().prompt(TEXT).force(" zebra")
    assert caught.value.word == " zebra" and caught.value.offset == 0


def test_a_negative_number_of_examples() -> None:
    for given in (-1, True):
        with pytest.raises(BadIndex):
            rl.tasks.get("coin")().examples(given)


def test_a_bias_that_rules_a_token_out() -> None:
    with pytest.raises(BadRequest, match="-1e9 rules a token out"):
        rl.Sampling(logit_bias={3: -math.inf})


def test_models_that_are_not_the_whole_model() -> None:
    model = hugging_face("llama")
    with pytest.raises(UnsupportedModel, match=r"LlamaModel has no language-modelling head.*AutoModelForCausalLM"):
        Engine.load(model.model)
    with pytest.raises(UnsupportedModel, match=r"torch.compile.*_orig_mod"):
        Engine.load(torch.compile(model))


MESSAGES: dict[str, tuple[Callable[[Engine], object], type[Exception], str]] = {
    "a float as a token": (lambda e: e.prompt([1.0]), BadRequest, r"1\.0 is a float, not a token id\. Give text, or ids"),
    "a boolean as a token": (lambda e: e.prompt([True]), BadRequest, "True is a bool, not a token id"),
    "None as a token": (lambda e: e.prompt([3, None]), BadRequest, "None is a NoneType, not a token id"),
    "a token beyond": (
        lambda e: e.prompt([999]),
        BadRequest,
        r"Token 999 is not in the vocabulary of 61 tokens\. Give ids from 0 to 60",
    ),
    "an edit of Z": (
        lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("Z", "zero")]),
        BadEdit,
        "Z, the logit lens, .* Edit what it reads",
    ),
    "an edit of two letters": (lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("ST", "zero")]), BadEdit, "'ST' names several"),
    "one chain for several": (
        lambda e: e.prompt(PROMPT_OF_HINTS).generate(2, drafter="forced", drafts={9: [1, 2]}),  # type: ignore[dict-item]
        BadRequest,
        r"drafts\[9\]=\[1, 2\]: one chain where a list of chains goes\. Give .*\{9: \[\[5, 7\], \[6\]\]\}",
    ),
    "an unknown place": (
        lambda e: e.prompt(PROMPT_OF_HINTS).resample(2, at="words"),
        BadRequest,
        r"at='words'\. Give 'sentences', 'tokens'",
    ),
    "a value beyond float32": (
        lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("blocks.0.hook_in", "add", [1e300] * 32)]),
        BadEdit,
        r"holds 1e\+300 \(absolute\), beyond float32\. Give at most 3\.4e\+38",
    ),
    "a weight beyond float32": (
        lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("blocks.0.attn.hook_pattern", "set", -1e300, keys=[0], positions=[2])]),
        BadEdit,
        r"holds 1e\+300 \(absolute\), beyond float32",
    ),
    "a factor beyond float32": (
        lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("blocks.0.hook_in", "add", [1.0] * 32, factor=1e300)]),
        BadEdit,
        r"factor=1e\+300 is beyond float32",
    ),
    "NaN": (
        lambda e: e.prompt(PROMPT_OF_HINTS, edits=[Edit("blocks.0.hook_in", "add", [math.nan] * 32)]),
        BadEdit,
        "NaN or infinity",
    ),
    "patch without a metric": (
        lambda e: rl.patch(e, [1], [2]),
        UnknownOption,
        r"^patch\(\) needs metric\. metric: a pair of tokens",
    ),
    "patch with one prompt": (lambda e: rl.patch(e, [1]), UnknownOption, r"^patch\(\) needs corrupt and metric"),
    "patch without anything": (
        lambda _: rl.patch(),
        UnknownOption,
        r"^patch\(\) needs engine and clean and corrupt and metric",
    ),
    "patch without its engine": (
        lambda e: rl.patch([1], e, [2], metric=3),
        BadRequest,
        r"Invalid engine=\[1\] in patch\(\)\. Give an Engine",
    ),
    "patch with a slip": (
        lambda e: rl.patch(e, [1], [2], metrik=3),
        UnknownOption,
        r"no option 'metrik' \(did you mean 'metric'\?\)",
    ),
    "steer without layers": (lambda e: rl.steer(e, [1.0], ["a"]), UnknownOption, r"^steer\(\) needs layers and strengths"),
    "too many values": (lambda e: rl.lens(e, [1], 3), UnknownOption, r"lens\(\) takes only engine, text by position, .* Got 3"),
    "rollback to nowhere": (lambda e: e.prompt(PROMPT_OF_HINTS).rollback(), UnknownOption, r"rollback\(\) needs to"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_says_what_was_given_and_what_to_do(name: str) -> None:
    call, error, message = MESSAGES[name]
    with pytest.raises(error, match=message):
        call(engine())


@pytest.mark.parametrize("name", [name for name in rl.__all__ if inspect.isfunction(getattr(rl, name))])
def test_every_verb_names_its_options(name: str) -> None:
    """A slip in the name of an option, and a call without values, get our error from all verbs, not Python's TypeError."""
    function = getattr(rl, name)
    for call in (lambda: function(), lambda: function(no_such_option=1)):
        with pytest.raises(UnknownOption, match=rf"^{name}\(\)"):
            call()


# ---- positions -------------------------------------------------------------------------------------------------------
# Capture of chosen positions: the rows equal those of a full capture, and no others are kept.

TEXT_OF_POSITIONS = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
LONG = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def engine_of_positions() -> Engine:
    return Engine.load("coin-plain")


def expected(positions: str, num_prompt: int, length: int) -> list[int]:
    everything = list(range(length))
    return {
        "all": everything,
        "last": [num_prompt - 1],
        "prompt": everything[:num_prompt],
        "response": everything[num_prompt:],
        "response[:3]": everything[num_prompt : num_prompt + 3],
        "all[1::4]": everything[1::4],
    }[positions]


@pytest.mark.parametrize(
    "drafter, positions", covering(["self", "tree"], ["all", "last", "prompt", "response", "response[:3]", "all[1::4]"])
)
def test_chosen_rows_are_those_of_a_full_capture(engine_of_positions: Engine, positions: str, drafter: str) -> None:
    options = dict(sites="STCZ", keep_rejected=True)
    whole = engine_of_positions.prompt(TEXT_OF_POSITIONS, **options).generate(9, drafter=drafter, sampling=LONG, final=True)
    part = engine_of_positions.prompt(TEXT_OF_POSITIONS, positions=positions, **options)
    engine_of_positions.generate(
        [engine_of_positions.prompt("A coin's state is heads"), part], 9, drafter=drafter, sampling=LONG, final=True
    )
    kept = part.activations.positions()
    assert kept == expected(positions, part.root_length, part.length)
    for site in part.activations.sites():
        bits = part.activations[site].contiguous().view(torch.uint8)
        assert torch.equal(bits, whole.activations[site][kept].contiguous().view(torch.uint8)), site
    for mine, theirs in zip(part.rejected, whole.rejected, strict=True):
        own = [p for p in theirs.activations.positions() if p in expected(positions, part.root_length, theirs.length)]
        assert mine.activations.positions() == own
    assert part.tree() is not None
    engine_of_positions.check_integrity()


def test_forks_and_rollbacks_keep_the_choice(engine_of_positions: Engine) -> None:
    root = engine_of_positions.prompt(TEXT_OF_POSITIONS, sites="S", positions="all[::3]").generate(7, sampling=LONG, final=True)
    (fork,) = root.fork(at=root.length - 4)
    fork.generate(5, sampling=LONG, final=True)
    root.rollback(to=root.root_length + 2).generate(6, sampling=LONG, final=True)
    for branch in (root, fork):
        assert branch.activations.positions() == list(range(0, branch.length, 3))
        again = engine_of_positions.prompt(branch.tokens, sites="S")
        for site in again.activations.sites():
            assert torch.equal(branch.activations[site], again.activations[site][::3])


def test_nothing_is_stacked_where_nothing_is_kept(engine_of_positions: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.engine.request.capture import PassTap

    branch = engine_of_positions.prompt(TEXT_OF_POSITIONS, sites="STC", positions="last")
    monkeypatch.setattr(PassTap, "stacked", lambda *_: pytest.fail("rows of the response were taken"))
    branch.generate(5, sampling=LONG, drafter="ngram")
    assert branch.activations.positions() == [branch.root_length - 1]


@pytest.mark.parametrize("options", [{"positions": "some"}, {"positions": 3}, {"keep": "disk"}, {"keep": None}])
def test_bad_choices_are_refused(engine_of_positions: Engine, options: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        engine_of_positions.prompt(TEXT_OF_POSITIONS, sites="S", **options)
