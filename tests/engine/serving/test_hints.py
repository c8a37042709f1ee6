"""Small misunderstandings: what can be meant is accepted, and every other error says what to give."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, EngineError, UnknownOption, UnknownSite, UnsupportedModel
from replaylens.engine.request.edits import Edit
from replaylens.tasks.errors import BadIndex, TaskError
from tests.engine.coin_engine import PROMPT as TEXT
from tests.engine.coin_engine import fresh
from tests.families import hugging_face
from tests.toy_model import engine

PROMPT = [1, 2, 3, 4]
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
        engine().prompt(PROMPT, edits=[make()])


def test_values_as_arrays_and_lists() -> None:
    subject = engine()
    made = [subject.prompt(PROMPT, edits=[Edit(S, "add", value)]) for value in (V, V.numpy(), V.tolist(), V.double().numpy())]
    assert all(torch.equal(branch.kv(), made[0].kv()) for branch in made)
    assert Edit(S, "add", V.numpy()).to_json() == Edit(S, "add", V).to_json()  # type: ignore[arg-type]


def test_a_batch_of_one_is_a_prompt() -> None:
    subject = engine()
    plain = subject.prompt(PROMPT)
    for given in (torch.tensor([PROMPT]), np.array([PROMPT]), [PROMPT]):
        assert subject.prompt(given).tokens == plain.tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [["a", "b"], torch.zeros(2, 3, dtype=torch.int64), [[1, 2], [3]], torch.zeros(1, 2, 3, dtype=torch.int64), []]
)
def test_several_prompts_for_one(given: Any) -> None:
    with pytest.raises(BadRequest, match=r"prompts\(\[|at least one token"):
        fresh().prompt(given)


def test_older_names_when_reading() -> None:
    rows = engine().prompt(PROMPT, sites=["blocks.1.hook_resid_pre", "blocks.0.hook_mlp_out"]).activations
    assert torch.equal(rows["blocks.1.hook_resid_pre"], rows[S])
    assert "blocks.1.hook_resid_pre" in rows and "blocks.0.hook_resid_pre" not in rows
    assert len(rows) == 2 and rows.keys() == ["blocks.0.hook_mlp_out", "blocks.1.hook_resid_pre"], "as asked for"
    found = rows.get("blocks.0.hook_mlp_out")
    assert found is not None and torch.equal(found, rows["blocks.0.mlp.hook_out"])
    assert rows.get("blocks.0.hook_in") is None
    with pytest.raises(UnknownSite, match=r"blocks.0.hook_resid_pre.*was not captured"):
        rows["blocks.0.hook_resid_pre"]


def test_older_names_on_forks_and_rejected_branches() -> None:
    branch = engine().prompt(PROMPT, sites="S", keep_rejected=True).generate(8, drafter="tree", window=4)
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
        lambda e: e.prompt(PROMPT, edits=[Edit("Z", "zero")]),
        BadEdit,
        "Z, the logit lens, .* Edit what it reads",
    ),
    "an edit of two letters": (lambda e: e.prompt(PROMPT, edits=[Edit("ST", "zero")]), BadEdit, "'ST' names several"),
    "one chain for several": (
        lambda e: e.prompt(PROMPT).generate(2, drafter="forced", drafts={9: [1, 2]}),  # type: ignore[dict-item]
        BadRequest,
        r"drafts\[9\]=\[1, 2\]: one chain where a list of chains goes\. Give .*\{9: \[\[5, 7\], \[6\]\]\}",
    ),
    "an unknown place": (
        lambda e: e.prompt(PROMPT).resample(2, at="words"),
        BadRequest,
        r"at='words'\. Give 'sentences', 'tokens'",
    ),
    "a value beyond float32": (
        lambda e: e.prompt(PROMPT, edits=[Edit("blocks.0.hook_in", "add", [1e300] * 32)]),
        BadEdit,
        r"holds 1e\+300 \(absolute\), beyond float32\. Give at most 3\.4e\+38",
    ),
    "a weight beyond float32": (
        lambda e: e.prompt(PROMPT, edits=[Edit("blocks.0.attn.hook_pattern", "set", -1e300, keys=[0], positions=[2])]),
        BadEdit,
        r"holds 1e\+300 \(absolute\), beyond float32",
    ),
    "a factor beyond float32": (
        lambda e: e.prompt(PROMPT, edits=[Edit("blocks.0.hook_in", "add", [1.0] * 32, factor=1e300)]),
        BadEdit,
        r"factor=1e\+300 is beyond float32",
    ),
    "NaN": (lambda e: e.prompt(PROMPT, edits=[Edit("blocks.0.hook_in", "add", [math.nan] * 32)]), BadEdit, "NaN or infinity"),
    "patch without a metric": (lambda e: rl.patch(e, [1], [2]), UnknownOption, r"^patch\(\) needs metric\. Give a value"),
    "patch with one prompt": (lambda e: rl.patch(e, [1]), UnknownOption, r"^patch\(\) needs corrupt and metric"),
    "patch without anything": (
        lambda _: rl.patch(),
        UnknownOption,
        r"^patch\(\) needs engine and clean and corrupt and metric",
    ),
    "patch with a slip": (
        lambda e: rl.patch(e, [1], [2], metrik=3),
        UnknownOption,
        r"no option 'metrik' \(did you mean 'metric'\?\)",
    ),
    "steer without layers": (lambda e: rl.steer(e, [1.0], ["a"]), UnknownOption, r"^steer\(\) needs layers and strengths"),
    "too many values": (lambda e: rl.lens(e, [1], 3), UnknownOption, r"lens\(\) takes only engine, text by position, .* Got 3"),
    "rollback to nowhere": (lambda e: e.prompt(PROMPT).rollback(), UnknownOption, r"rollback\(\) needs to"),
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
