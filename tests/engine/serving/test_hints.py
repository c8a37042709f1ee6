"""Small misunderstandings: what can be meant is accepted, and every other error says what to give."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, EngineError, UnknownSite, UnsupportedModel
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
    "two letters": (lambda: Edit("ST", "zero", layers=[1]), "'ST' is not S, T or C"),
    "the lens": (lambda: Edit("Z", "zero", layers=[1]), "'Z' is not S, T or C"),
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


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M"])
def test_a_name_of_the_hub(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"[Dd]ownload it.*give the folder.*transformers model"):
        Engine.load(name)
