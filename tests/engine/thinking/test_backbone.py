"""Thinking States around a pretrained backbone: its own tokenizer, its own precision, and the same promises."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadRecipe, BadRequest
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.model import ThinkingDecoder
from replaylens.engine.thinking.prefill import GUESSES
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import embedded_thinking as thinking_zoo
from replaylens.engine.training import thinking
from replaylens.engine.training import thinking as trainer
from replaylens.engine.training.recipe import Part, PretrainedTokenizer, backbone_folder, load_tokenizer
from replaylens.engine.training.score import score
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe, chunked
from replaylens.engine.zoo import CHECKPOINTS
from tests.engine.thinking.pretrained import hugging_face_tokenizer, write_backbone
from tests.engine.training.test_thinking import TINY, same

STATES = Part("coin", 1, (("rendering", "states"),))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_backbone(tmp_path_factory.mktemp("backbone")))


@pytest.fixture(scope="module")
def recipe(backbone: str) -> ThinkingRecipe:
    made = thinking_zoo.around(replace(TINY, parts=(STATES,)), backbone, chunk=8, max_thought=8)
    return replace(made, lr=1e-2, batch=4, steps=8, width=96)


# ---- the tokenizer ----------------------------------------------------------------------------------------------------


def test_ends_and_paddings() -> None:
    usual = PretrainedTokenizer(hugging_face_tokenizer())
    assert (usual.eos_id, usual.pad_id) == (2, 0), "padding that is <EOS> gives way to another special token"
    assert PretrainedTokenizer(hugging_face_tokenizer(pad_token="<|begin|>")).pad_id == 1
    with pytest.raises(BadConfig, match="The tokenizer has no <EOS>"):
        PretrainedTokenizer(hugging_face_tokenizer(eos_token=None))
    with pytest.raises(BadConfig, match="gives no character offsets"):
        PretrainedTokenizer(SimpleNamespace(eos_token_id=2, is_fast=False))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_thought_stands_where_the_token_ends_that_decides_it(begins: bool, chunk: int, recipe: ThinkingRecipe) -> None:
    theirs = hugging_face_tokenizer(begins)
    tokenizer, config = PretrainedTokenizer(theirs), replace(recipe.thinking, chunk=chunk, max_thought=32)
    pieces = 0
    for example in tasks.get("coin")(rendering="states").examples(10):
        text = chunked(example, tokenizer, config, "thinking")
        said = [tokenizer.decode(list(thought[:-1])) for thought in text.thoughts]
        assert "".join(said) == "".join(words for _, words in example.thoughts)
        if chunk == 1:
            ends = [len(tokenizer.decode(list(text.prompt[begins : i + 1]))) for i in range(len(text.prompt))]
            decided = [end for end, words in zip(ends, said, strict=True) if words]
            assert decided == [read for read, _ in example.thoughts]
        else:
            starts = [len(tokenizer.decode(list(text.prompt[begins : i * chunk]))) for i in range(len(said))]
            for start, end, words in zip(starts, [*starts[1:], len(example.prompt)], said, strict=True):
                assert words == "".join(told for read, told in example.thoughts if start < read <= end)
        whole = list(text.prompt[begins:])
        assert tokenizer.decode([i for i in whole if i != config.pad_token]) == example.prompt
        assert (text.prompt[0] == theirs.bos_token_id) == begins
        pieces += len(whole) - len(example.prompt.split())
    assert pieces > 50, "words are cut, or nothing is shown"


def test_an_answer_that_is_joined_with_what_follows(recipe: ThinkingRecipe) -> None:
    class Joining(PretrainedTokenizer):
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    with pytest.raises(BadRequest, match="joins the answer"):
        chunked(zoo.held_out(STATES, 1, 1)[0], Joining(hugging_face_tokenizer()), recipe.thinking, "none")


# ---- the recipe -------------------------------------------------------------------------------------------------------


def test_the_recipe_says_its_backbone_and_precision(recipe: ThinkingRecipe, backbone: str) -> None:
    said = json.loads(recipe.to_json())
    assert (said["backbone"], said["precision"]) == (backbone, "bf16")
    assert recipe.tokenizer().vocab_size == recipe.config.vocab_size != TINY.config.vocab_size
    embedded = json.loads(thinking_zoo.recipe("coin-thinking").to_json())
    assert not {"backbone", "precision"} & embedded.keys(), "older than the fields"


def test_impossible_recipes(recipe: ThinkingRecipe, tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="vocab_size"):
        replace(recipe, config=TINY.config)
    with pytest.raises(BadRecipe, match="the tokenizer's <EOS> is 2"):
        replace(recipe, thinking=replace(recipe.thinking, eos_token=5))
    with pytest.raises(BadRecipe, match="Unknown precision 'fp8'"):
        replace(recipe, precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="Give smollm2, or a folder"):
        backbone_folder("smollm3")
    with pytest.raises(BadConfig, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_backbone_of_ours_keeps_the_recipe() -> None:
    folder = str(CHECKPOINTS / "coin-plain")
    made = thinking_zoo.around(TINY, folder, TINY.thinking.chunk, TINY.thinking.max_thought)
    assert (made.lr, made.precision, made.thinking.read_layer) == (TINY.lr, "fp32", 2)
    model = trainer.initial(made)
    assert isinstance(model, ThinkingDecoder) and same(model.backbone, zoo.load_embedded("coin-plain")[0])


# ---- training and scoring ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_reduced_precision_is_repeatable_and_leaves_the_weights_in_float32(recipe: ThinkingRecipe, method: Method) -> None:
    recipe = replace(recipe, method=method)
    once = trainer.train(recipe)
    assert same(trainer.train(recipe), once)
    assert not same(trainer.train(replace(recipe, precision="fp32")), once), "or it was float32 all along"
    assert {x.dtype for x in once.parameters()} == {torch.float32}


def test_both_precisions_agree_on_the_loss(recipe: ThinkingRecipe) -> None:
    model, batch = trainer.initial(recipe), trainer.texts_of(recipe, "cpu").batch(0)
    with torch.no_grad():
        exact = trainer.loss(model, batch)
        with trainer.arithmetic("bf16", "cpu"):
            reduced = trainer.loss(model, batch)
    assert reduced.dtype == torch.float32 and reduced != exact
    assert abs(reduced - exact) < 0.01 * exact


@pytest.fixture(scope="module")
def trained(recipe: ThinkingRecipe) -> dict[Method, trainer.Model]:
    """Trained long enough to give answers, but not always right ones."""
    recipe = replace(recipe, steps=100, longest=2, precision="fp32")
    return {method: trainer.train(replace(recipe, method=method)) for method in METHODS}


def test_lengths_scored_together_are_scored_as_alone(recipe: ThinkingRecipe, trained: dict[Method, trainer.Model]) -> None:
    tests, seen = [zoo.held_out(STATES, length, 6) for length in (1, 4)], set()
    for method, model in trained.items():
        alone, together = (
            [(s.answered, s.thought) for test in cut for s in score(model, method, recipe.thinking, recipe.tokenizer(), test)]
            for cut in (tests, [tests[0] + tests[1]])
        )
        assert alone == together
        seen |= set(alone)
    assert len(seen) > 1, "some are right and some are wrong, or nothing is compared"


def test_scores_in_reduced_precision(recipe: ThinkingRecipe, trained: dict[Method, trainer.Model]) -> None:
    test = zoo.held_out(STATES, 1, 12)
    for method, model in trained.items():
        exact, reduced = (
            sum(s.answered for s in score(model, method, recipe.thinking, recipe.tokenizer(), test, precision=precision))
            for precision in get_args(trainer.Precision)
        )
        assert abs(exact - reduced) <= 3


# ---- replay -----------------------------------------------------------------------------------------------------------


def test_it_is_replayed_with_its_own_tokenizer(
    recipe: ThinkingRecipe, trained: dict[Method, trainer.Model], tmp_path: Path
) -> None:
    model = trained["thinking"]
    assert isinstance(model, ThinkingDecoder)
    thinking_zoo.save(model, recipe.tokenizer(), tmp_path)
    (example,) = zoo.held_out(STATES, 4, 1)
    path = chunked(example, recipe.tokenizer(), recipe.thinking, "thinking").prompt
    branches = []
    for guess in GUESSES:
        engine = Engine.load(tmp_path, guess=guess)
        assert isinstance(engine, ThinkingEngine)
        branches.append(engine.prompt(example.prompt, sites="STCZ").generate(3))
    plainly, _, _ = thinking.sequential(model, torch.tensor(path).view(-1, recipe.thinking.chunk))
    said = [t.tokens for t in branches[0].thoughts.chunks]
    assert [tuple(t[: len(s)].tolist()) for t, s in zip(plainly, said, strict=True)] == said
    assert any(len(tokens) > 1 for tokens in said), "something is thought"
    for branch in branches:
        assert tuple(branch.tokens[: len(path)]) == path and branch.tokens == branches[0].tokens
        assert [t.tokens for t in branch.thoughts.chunks] == said
        for site in ("thinking.state", "thinking.hook_out", "compress.hook_out", "thinking.tokens"):
            assert torch.equal(branch.activations[site], branches[0].activations[site])
    assert "<EOS>" in str(branches[0].picture())


def test_its_answers_are_judged_without_their_end(trained: dict[Method, trainer.Model], recipe: ThinkingRecipe) -> None:
    """A Hugging Face tokenizer has a text for <EOS>, which is not part of the answer."""
    model, tokenizer = trained["thinking"], recipe.tokenizer()
    assert isinstance(model, ThinkingDecoder) and isinstance(tokenizer, PretrainedTokenizer)
    engine = ThinkingEngine(model, tokenizer.tokenizer)
    stopped = 0
    for result in engine.replay(zoo.held_out(STATES, 1, 8)):
        said = engine.text.decode(result.tokens[result.num_prompt :])
        if said in (" heads.<|end|>", " tails.<|end|>"):
            assert result.correct == said.startswith(result.example.answer)
            stopped += 1
    assert stopped, "or nothing is shown"


def test_a_foreign_tokenizer_is_refused(trained: dict[Method, trainer.Model]) -> None:
    model = trained["thinking"]
    assert isinstance(model, ThinkingDecoder)
    with pytest.raises(BadConfig, match="The tokenizer's <EOS> is 0"):
        ThinkingEngine(model, hugging_face_tokenizer(eos_token="<|text|>"))


@pytest.mark.parametrize("method", [*(pytest.param(method, marks=pytest.mark.slow) for method in METHODS[:2]), METHODS[2]])
def test_the_command(method: Method, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    monkeypatch.setattr("replaylens.commands.train.CARD_EXAMPLES", 2)
    monkeypatch.setattr("replaylens.commands.train.CARD_LENGTHS", (1,))
    options = ["--steps", "2", "--method", method, "--backbone", backbone, "--out", str(tmp_path), "--quiet"]
    result = CliRunner().invoke(app, ["train", "coin-thinking", *options])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "card.md").read_text()
    assert f"pretrained: `{backbone}`" in card and "bf16" in card and "chunks of 8 tokens" in card
    engine = Engine.load(tmp_path)
    assert isinstance(engine, ThinkingEngine) == (method == "thinking")
    assert engine.prompt("The coin starts at state heads.").generate(1).tokens


@pytest.mark.slow
def test_the_command_for_another_task(backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    monkeypatch.setattr("replaylens.commands.train.CARD_EXAMPLES", 2)
    options = ["--steps", "2", "--task", "shell", "--longest", "2", "--chunk", "6", "--backbone", backbone]
    result = CliRunner().invoke(app, ["train", "coin-thinking", *options, "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "chunks of 6 tokens" in (tmp_path / "card.md").read_text()


def test_the_command_without_such_a_backbone(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-thinking", "--backbone", "smollm3", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "smollm3" in f"{result.output} {result.exception}"
