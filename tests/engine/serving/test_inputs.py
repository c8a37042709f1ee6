"""User input: scalars of every library are numbers. Anything else is refused by name and changes nothing."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import replaylens as rl
from replaylens import Branch, Edit, Engine, Sampling, tasks
from replaylens.engine.errors import (
    BadRequest,
    CannotCopy,
    EngineError,
    UnknownOption,
    UnknownSite,
    UnsupportedModel,
)
from replaylens.engine.request.positions import CAPTURED, Position
from replaylens.engine.request.values import integer, real
from replaylens.tasks.errors import TaskError
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
    assert served_of_inputs.run_with_cache(tokens, "blocks.0.hook_in", return_cache_object=False)[0].shape == (1, 3, VOCAB)
    assert [b.tokens for b in served_of_inputs.prompts(iter([tokens, tokens]))] == [[1, 2, 3]] * 2


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
        with pytest.raises(TaskError):
            rl.tasks.get("coin")().examples(given)


class Compiled(torch.nn.Module):
    """As torch.compile wraps a model, which takes it seconds."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize("wrap", [Compiled, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_models_that_are_not_the_whole_model(wrap: Callable[[Any], Any]) -> None:
    model = hugging_face("llama")
    with pytest.raises(UnsupportedModel, match=r"LlamaModel has no language-modelling head.*AutoModelForCausalLM"):
        Engine.load(model.model)
    with pytest.raises(UnsupportedModel, match=r"torch.compile.*_orig_mod"):
        Engine.load(wrap(model))


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


def expected(positions: str, num_prompt: int, length: int) -> Sequence[int]:
    return Position.parse(positions, CAPTURED).on(length, num_prompt, list)


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
    assert kept == list(expected(positions, part.root_length, part.length))
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
    for name in ("stacked", "copied"):
        monkeypatch.setattr(PassTap, name, lambda *_: pytest.fail("rows of the response were taken"))
    branch.generate(5, sampling=LONG, drafter="ngram")
    assert branch.activations.positions() == [branch.root_length - 1]


@pytest.mark.parametrize("options", [{"positions": "some"}, {"positions": 3.5}, {"keep": "disk"}, {"keep": None}])
def test_bad_choices_are_refused(engine_of_positions: Engine, options: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        engine_of_positions.prompt(TEXT_OF_POSITIONS, sites="S", **options)
