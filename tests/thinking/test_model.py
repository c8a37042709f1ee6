"""The Thinking-States model: what it computes, how it is initialised and saved, and what it refuses."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bench import thinking_tables
from bench.harness import RESULTS
from bench.thinking import EOS as EOS_OF_ARMS
from bench.thinking import PAD as PAD_OF_ARMS
from bench.thinking import TINY_SHAPES, by_hand, triggered
from bench.thinking_tables import (
    BACKBONE,
    PARITY,
    SMOKE,
    TEXTS,
    lines_of,
    merged,
    paper_runs,
    paper_table,
    rows_of,
    text_runs,
    text_tables,
)
from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadRecipe, BadRequest, BadWeights, NonFinite
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.request.edits import Edit
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.thinking import blocks
from replaylens.thinking import model as thinking
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import thinking as plain
from replaylens.training import thinking as thinking_of_backbone
from replaylens.training import thinking as trainer
from replaylens.training.recipe import PretrainedTokenizer, RecipePart, backbone_folder, load_tokenizer
from replaylens.training.score import along, score
from replaylens.training.thinking import METHODS, ChunkedText, Method, ThinkingRecipe, chunked
from replaylens.weights.opening import GUESSES, Guess
from replaylens.weights.zoo import CHECKPOINTS
from tests.engine.reference import random_decoder
from tests.thinking.pretrained import hugging_face_tokenizer, write_backbone
from tests.thinking.reference import BASE, EOS, PAD, SHAPES, random_prompt, thinking_model
from tests.training.test_trainer import TINY_OF_THINKING as TINY
from tests.training.test_trainer import same

CONFIG = BASE


def shape(chunk: int = 3, **others: Any) -> ThinkingConfig:
    return ThinkingConfig.for_backbone(CONFIG, chunk, EOS, PAD, **{"max_thought": 4, **others})


def text(chunks: int) -> torch.Tensor:
    return torch.tensor(random_prompt(chunks)).view(chunks, 3)


# What the model computes


def test_without_thoughts_it_is_its_backbone() -> None:
    made, tokens = thinking_model(), text(5)
    empty = torch.full((5, 4), EOS)
    states = plain.states_of(made, empty[None])
    assert torch.equal(states, torch.zeros_like(states)), "the state of an empty thought is exactly zero"
    _, last = plain.run(made, tokens[None], states)
    ops = SequenceOps([15])
    assert torch.equal(last.view(15, -1), made.backbone(tokens.flatten(), torch.arange(15), ops))


def test_texts_side_by_side_with_a_cache_think_as_each_does_alone() -> None:
    made, tokens = thinking_model(), torch.stack([text(7), text(7).flip(0)])
    thinks = torch.ones(2, 7, dtype=torch.bool)
    thoughts, last = along(made, tokens, thinks)
    for i in range(2):
        alone, _, logits = plain.sequential(made, tokens[i])
        assert any(t[0] != EOS for t in alone), "something is thought"
        assert torch.equal(thoughts[i], alone)
        again = made.backbone.logits(last[i].view(21, -1), SequenceOps([21])).view(7, 3, -1)
        assert torch.allclose(again, logits, atol=1e-4)
    first = int((thoughts[0, :, 0] != EOS).nonzero()[0])
    thinks[0, first] = False
    silenced, _ = along(made, tokens, thinks)
    assert int(silenced[0, first, 0]) == EOS and not torch.equal(silenced[0], thoughts[0])
    assert torch.equal(silenced[1], thoughts[1])


def test_a_state_reaches_the_next_chunk_and_no_earlier_one() -> None:
    made, tokens = thinking_model(), text(4)
    states = torch.zeros(1, 4, 3, CONFIG.d_model)
    _, without = plain.run(made, tokens[None], states)
    states[:, 2] = 1.0
    _, having = plain.run(made, tokens[None], states)
    assert torch.equal(having[:, :2], without[:, :2])
    assert not torch.equal(having[:, 2], without[:, 2])
    assert not torch.equal(having[:, 3], without[:, 3])


@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_a_thought_is_compressed_to_the_last_real_positions(length: int) -> None:
    """Fill tokens and batch padding change nothing: the state of a long thought comes from its own last c positions."""
    made = thinking_model(max_thought=8)
    words = torch.tensor([[*range(5, 5 + length - 1), EOS]])
    alone = plain.states_of(made, words)
    roomy = plain.states_of(made, torch.cat([words, torch.full((1, 8 - length), EOS)], dim=1))
    assert torch.allclose(alone, roomy, atol=1e-5)
    filled = torch.cat([words[0], torch.full((max(0, 3 - length),), EOS)])
    rows = made.run_compress(filled, torch.arange(len(filled)), SequenceOps([len(filled)]))
    assert torch.allclose(alone[0], rows[-3:], atol=1e-5)


def test_thoughts_are_cut_at_the_limit() -> None:
    made = thinking_model()
    with torch.no_grad():
        made.think_unembed[EOS] = -1e3 * made.think_norm.weight.sign()
        made.think_unembed[7] = 1e3 * made.think_norm.weight.sign()
    hidden = torch.ones(2, 3, CONFIG.d_model)
    found = plain.think(made, hidden, 4)
    assert found.shape == (2, 4)
    assert found[:, -1].tolist() == [EOS, EOS]


# Initialisation and saving


def test_t_starts_as_the_last_block_and_c_as_the_first() -> None:
    backbone = random_decoder(CONFIG)
    made = ThinkingDecoder.around(backbone, shape())
    for block, source in ((made.think, backbone.blocks[-1]), (made.compress, backbone.blocks[0])):
        assert all(torch.equal(x, source.state_dict()[name]) for name, x in block.state_dict().items())
    assert torch.equal(made.think_unembed, backbone.embed)
    made.think.attn.o.weight.data.add_(1.0)
    assert not torch.equal(made.think.attn.o.weight, made.backbone.blocks[-1].attn.o.weight), "copies, not ties"


def test_saved_and_loaded(tmp_path: Path) -> None:
    made = thinking_model()
    thinking.save(made, tmp_path)
    back = thinking.load(tmp_path)
    assert back.thinking == made.thinking
    assert back.config == made.config
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in made.state_dict().items())


# What the model refuses


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"max_thought": 1}, "max_thought must be at least 2"),
        ({"write_layer": 2}, "must come before read_layer"),
        ({"read_layer": 4}, "must come before read_layer"),
        ({"eos_token": 29}, "needs a tokenizer with an <EOS>"),
        ({"pad_token": -1}, "pad_token -1 is not in the vocabulary"),
    ],
)
def test_impossible_configs(changes: dict[str, int], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        replace(shape(), **changes).check(CONFIG)


def test_a_backbone_of_two_blocks_is_too_shallow() -> None:
    with pytest.raises(BadConfig, match="at least 3"):
        ThinkingConfig.for_backbone(replace(CONFIG, num_layers=2), 3, EOS, PAD)


@pytest.mark.parametrize(("part", "says"), [("think.", "thinking block T"), ("compress.", "compression block C")])
def test_a_checkpoint_without_t_or_c(tmp_path: Path, part: str, says: str) -> None:
    thinking.save(thinking_model(), tmp_path)
    file = tmp_path / thinking.WEIGHTS_FILE
    save_file({name: x for name, x in load_file(file).items() if not name.startswith(part)}, file)
    with pytest.raises(BadWeights, match=says):
        thinking.load(tmp_path)
    file.unlink()
    with pytest.raises(BadWeights, match="neither T nor C"):
        thinking.load(tmp_path)


def test_a_plain_decoder_is_no_thinking_one(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="plain decoder"):
        thinking.load(tmp_path)


# ---- backbone --------------------------------------------------------------------------------------------------------
# Thinking States around a pretrained backbone: its own tokenizer, its own precision, and the same promises.

STATES = RecipePart("coin", 1, (("rendering", "states"),))


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


Trained = Callable[[Method], trainer.Model]


@pytest.fixture(scope="module")
def trained(recipe: ThinkingRecipe) -> Trained:
    """The model of a method, trained long enough to give answers, but not always right ones."""
    return cache(lambda method: trainer.train(replace(recipe, method=method, steps=40, longest=2, precision="fp32")))


@pytest.fixture
def thinker(trained: Trained) -> ThinkingDecoder:
    model = trained("thinking")
    assert isinstance(model, ThinkingDecoder)
    return model


@pytest.mark.slow
def test_lengths_scored_together_are_scored_as_alone(recipe: ThinkingRecipe, trained: Trained) -> None:
    tests, seen = [zoo.held_out(STATES, length, 3) for length in (1, 4)], set()
    for method in METHODS:
        model = trained(method)
        alone, together = (
            [(s.answered, s.thought) for test in cut for s in score(model, method, recipe.thinking, recipe.tokenizer(), test)]
            for cut in (tests, [tests[0] + tests[1]])
        )
        assert alone == together
        seen |= set(alone)
    assert len(seen) > 1, "some are right and some are wrong, or nothing is compared"


@pytest.mark.slow
def test_scores_in_reduced_precision(recipe: ThinkingRecipe, trained: Trained) -> None:
    test = zoo.held_out(STATES, 1, 12)
    for method in METHODS:
        model = trained(method)
        exact, reduced = (
            sum(s.answered for s in score(model, method, recipe.thinking, recipe.tokenizer(), test, precision=precision))
            for precision in get_args(trainer.Precision)
        )
        assert abs(exact - reduced) <= 3


# ---- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_replayed_with_its_own_tokenizer(recipe: ThinkingRecipe, thinker: ThinkingDecoder, tmp_path: Path) -> None:
    thinking_zoo.save(thinker, recipe.tokenizer(), tmp_path)
    (example,) = zoo.held_out(STATES, 4, 1)
    path = chunked(example, recipe.tokenizer(), recipe.thinking, "thinking").prompt
    branches = []
    for guess in GUESSES:
        engine = Engine.load(tmp_path, guess=guess)
        assert isinstance(engine, ThinkingEngine)
        branches.append(engine.prompt(example.prompt, sites="STCZ").generate(3))
    plainly, _, _ = thinking_of_backbone.sequential(thinker, torch.tensor(path).view(-1, recipe.thinking.chunk))
    said = [t.tokens for t in branches[0].thoughts.chunks]
    assert [tuple(t[: len(s)].tolist()) for t, s in zip(plainly, said, strict=True)] == said
    assert any(len(tokens) > 1 for tokens in said), "something is thought"
    for branch in branches:
        assert tuple(branch.tokens[: len(path)]) == path and branch.tokens == branches[0].tokens
        assert [t.tokens for t in branch.thoughts.chunks] == said
        for site in ("thinking.state", "thinking.hook_out", "compress.hook_out", "thinking.tokens"):
            assert torch.equal(branch.activations[site], branches[0].activations[site])
    assert "<EOS>" in str(branches[0].picture())


def test_its_answers_are_judged_without_their_end(thinker: ThinkingDecoder, recipe: ThinkingRecipe) -> None:
    """A Hugging Face tokenizer has a text for <EOS>, which is not part of the answer."""
    tokenizer = recipe.tokenizer()
    assert isinstance(tokenizer, PretrainedTokenizer)
    engine = ThinkingEngine(thinker, tokenizer.tokenizer)
    stopped = 0
    for result in engine.replay(zoo.held_out(STATES, 1, 8)):
        said = engine.text.decode(result.tokens[result.num_prompt :])
        if said in (" heads.<|end|>", " tails.<|end|>"):
            assert result.correct == said.startswith(result.example.answer)
            stopped += 1
    assert stopped, "or nothing is shown"


def test_a_foreign_tokenizer_is_refused(thinker: ThinkingDecoder) -> None:
    with pytest.raises(BadConfig, match="The tokenizer's <EOS> is 0"):
        ThinkingEngine(thinker, hugging_face_tokenizer(eos_token="<|text|>"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_command(method: Method, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    monkeypatch.setattr("replaylens.commands.training.CARD_EXAMPLES", 2)
    monkeypatch.setattr("replaylens.commands.training.CARD_LENGTHS", (1,))
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
    monkeypatch.setattr("replaylens.commands.training.CARD_EXAMPLES", 2)
    options = ["--steps", "2", "--task", "shell", "--longest", "2", "--chunk", "6", "--backbone", backbone]
    result = CliRunner().invoke(app, ["train", "coin-thinking", *options, "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "chunks of 6 tokens" in (tmp_path / "card.md").read_text()


def test_the_command_without_such_a_backbone(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-thinking", "--backbone", "smollm3", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "smollm3" in f"{result.output} {result.exception}"


# ---- backbone table --------------------------------------------------------------------------------------------------
# The job behind the tables of Thinking States: it trains and tests every run around a backbone, and says which are missing.

ROOT = RESULTS.parent.parent


@pytest.mark.slow
def test_the_job(tmp_path: Path) -> None:
    backbone = str(write_backbone(tmp_path / "backbone"))
    task = replace(BACKBONE, **SMOKE, options={**BACKBONE.options, "backbone": backbone})
    lines = list(lines_of(paper_runs(task, ("none", "thinking"), (0,)), 1, "cpu"))
    assert [line.what for line in lines] == ["none-2", "thinking-cut-2"]
    for line in lines:
        (run,) = line.numbers["runs"]
        assert run["recipe"]["backbone"] == backbone and run["recipe"]["precision"] == "bf16"
        assert list(run["curve"]) == task.lengths(2) == [1, 2, 4] and run["steps"] == 4
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"rows": [{"what": line.what, **line.numbers} for line in lines]}))
    assert [row["method"] for row in merged([file])] == ["none", "thinking-cut"] and len(paper_table(merged([file]))) == 9


def test_a_run_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes out of the pool that trained it: of threads here, since a process takes seconds to start."""
    monkeypatch.setattr(thinking_tables, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))
    (run,) = paper_runs(replace(PARITY, **SMOKE), ("none",), (0,))
    with pytest.raises(BadRecipe, match="positions"):
        list(lines_of([replace(run, recipe=replace(run.recipe, width=2048))], 1, "cpu"))


def test_the_tables_of_the_docs_are_those_of_the_files() -> None:
    """Every line of the parity table in docs/notes/thinking_states.md; the word problems' numbers are on file, too."""
    page = (ROOT / "docs" / "notes" / "thinking_states.md").read_text().splitlines()
    parity = paper_table(merged([RESULTS / "thinking-parity-gpu.json", RESULTS / "thinking-parity-cut-gpu.json"]))
    assert len(parity) > 20 and [line for line in parity if line and line not in page] == []
    rows = rows_of(RESULTS / "thinking-texts-gpu.json")
    assert any("**99.8** (99.5, 100.0)" in line for line in text_tables(rows))


# ---- arms ------------------------------------------------------------------------------------------------------------
# The arms of the case `thinking-texts-gpu`: every recipe is sound, tested texts fit, and models made by hand think as told.


def texts(task: str, steps: int, config: ThinkingConfig, method: Method) -> list[ChunkedText]:
    words = WordTokenizer(TEXTS[task].vocabulary)
    return [chunked(e, words, config, method) for e in zoo.held_out(TEXTS[task].part, steps, 8)]


def test_arms_have_names_and_recipes_of_their_own() -> None:
    runs = text_runs(tuple(TEXTS), (0, 1))
    assert len({run.name for run in runs}) == len({run.recipe.to_json() for run in runs}) == len(runs) == 30
    assert {run.recipe.method for run in runs} == set(METHODS)
    assert len({run.kind for run in runs}) == 24, "seeds of one kind are averaged"


@pytest.mark.slow
@pytest.mark.parametrize("task", TEXTS)
def test_tested_texts_fit_at_trained_positions(task: str) -> None:
    """With every chunk size of the ablation; a chain of thought is the longest. No thought is longer than its limit."""
    given = TEXTS[task]
    for chunk, most in given.thoughts.items():
        config = given.recipe("thinking", 2, chunk=chunk).thinking
        for text in texts(task, max(given.beyond), config, "cot"):
            assert len(text.prompt) + len(text.completion) <= given.width and given.width % chunk == 0
        sizes = {len(thought) for text in texts(task, max(given.beyond), config, "thinking") for thought in text.thoughts}
        assert max(sizes) <= most  # `chunked` also refuses longer ones


@pytest.mark.parametrize(("task", "chunk"), [("hops", 4), ("counts", 8)])
def test_a_model_made_by_hand_thinks_where_the_text_does(task: str, chunk: int) -> None:
    (config,) = TINY_SHAPES.values()
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS_OF_ARMS, PAD_OF_ARMS, max_thought=TEXTS[task].thoughts[chunk])
    pairs = list(zip(texts(task, 4, thinks, "thinking"), texts(task, 4, thinks, "cot"), strict=True))
    sizes = sorted({len(t) - 1 for text, _ in pairs for t in text.thoughts if len(t) > 1})
    engine = ThinkingEngine(by_hand(config, thinks, sizes, "cpu"))
    for pair in pairs[:3]:
        load = triggered(thinks, sizes, *pair)
        branch = engine.prompt(load.prompt)
        assert [len(t.tokens) for t in branch.thoughts.chunks] == [len(t) for t in pair[0].thoughts]
        assert load.written == load.said + sum(len(t) - 1 for t in pair[0].thoughts) + 1


def test_distributions_are_read_on_demand_with_the_bits_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = TINY_SHAPES.values()
    engine = ThinkingEngine(
        by_hand(config, ThinkingConfig.for_backbone(config, 4, EOS_OF_ARMS, PAD_OF_ARMS, max_thought=4), [2], "cpu")
    )
    prompt, reads = [2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2, 3], []
    plain = type(engine.prefiller.blocks)._distribution
    monkeypatch.setattr(
        type(engine.prefiller.blocks), "_distribution", lambda self, *given: (reads.append(1), plain(self, *given))[1]
    )
    unread, kept = engine.prompt(prompt).thoughts, engine.prompt(prompt, sites="Z")
    captured = len(reads)
    assert captured == len(kept.thoughts.rounds)  # once per round, and only where they are captured
    for late, early in zip(unread.chunks, kept.thoughts.chunks, strict=True):
        assert late.distribution.keys() == early.distribution.keys() and late.tokens == early.tokens
        assert all(torch.equal(late.distribution[site], early.distribution[site]) for site in early.distribution)
        _ = late.distribution
    assert len(reads) == captured + len(unread.chunks)
    copied = unread.chunks[0].copy()
    copied.distribution["thinking.entropy"].zero_()
    assert not torch.equal(copied.distribution["thinking.entropy"], unread.chunks[0].distribution["thinking.entropy"])


AHEAD = [("rotary", 1), ("windows", 4)]
OTHERS = [each for each in product(SHAPES, [1, 4]) if each not in AHEAD]


@pytest.mark.parametrize(("name", "ahead"), [*AHEAD, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)])
def test_decoding_ahead_gives_the_same_thoughts(name: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA device does, here on a CPU: nobody looks at a token before the next, and what follows <EOS> is dropped."""
    engine, prompt = ThinkingEngine(thinking_model(SHAPES[name])), random_prompt(12, seed=1)
    plain = engine.prompt(prompt).thoughts
    monkeypatch.setattr(blocks, "AHEAD", ahead)
    monkeypatch.setattr(blocks.ThinkingBlocks, "_decode", blocks.ThinkingBlocks._decode_ahead)
    other = engine.prompt(prompt).thoughts
    assert name != "rotary" or {thought.empty for thought in plain.chunks} == {True, False}
    assert [t.tokens for t in other.chunks] == [t.tokens for t in plain.chunks]
    for a, b in zip(other.chunks, plain.chunks, strict=True):
        assert torch.equal(a.hidden, b.hidden) and torch.equal(a.state, b.state) and torch.equal(a.compressed, b.compressed)
    monkeypatch.setattr(blocks.ThinkingBlocks, "_raw_logits", lambda self, rows: torch.full((len(rows), 40), torch.nan))
    with pytest.raises(NonFinite, match="thoughts"):
        engine.prompt(prompt)


# ---- picture ---------------------------------------------------------------------------------------------------------
# The embedded model runs the sentence of the fifth picture, and tracks stories longer than those in training.

SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"


@cache
def engine() -> ThinkingEngine:
    loaded = Engine.load("coin-thinking")
    assert isinstance(loaded, ThinkingEngine)
    return loaded


@pytest.mark.parametrize("guess", GUESSES)
def test_the_pictures_sentence(guess: Guess) -> None:
    branch = engine().prompt(SENTENCE, guess=guess).generate(2)
    drawn = branch.picture()
    said = {"".join(chunk.tokens): chunk.thought for chunk in drawn.chunks[:-1]}
    assert said.pop(" Alice flips") == (" tails", "<EOS>")
    assert said.pop(" Bob flips") == (" heads", "<EOS>")
    assert set(said.values()) == {("<EOS>",)}
    assert branch.text == SENTENCE + " heads."
    received = ["".join(chunk.tokens) for chunk in drawn.chunks if chunk.state]
    assert received == [", then", ". What's"], "states go to the chunks after the flips, and nowhere else"
    assert len(drawn.rounds) == {"sequential": 10, "empty": 3, "drafted": 3}[guess]


def test_tree_and_timeline_strike_out_thoughts_that_were_rolled_back() -> None:
    """Round 1 guesses that nobody thinks: Alice's chunk does, so what was thought after it is rolled back."""
    recorded = Engine.load("coin-thinking", record=True)
    assert isinstance(recorded, ThinkingEngine)
    branch = recorded.prompt(SENTENCE).generate(2)
    trunk, first, _ = branch.tree().paths
    assert [token.thought for token in trunk.tokens if token.thought] == [(" tails", "<EOS>"), (" heads", "<EOS>")]
    assert [token.text for token in trunk.tokens if token.thought] == [" flips", " flips"]
    dropped = branch.thoughts.rounds[0].dropped
    assert [token.thought[0] for token in first.tokens if token.thought] == [
        recorded.text.token(said[0]) for said in dropped if len(said) > 1
    ]
    assert any(token.thought for token in first.tokens) and {t.state.value for t in first.tokens} == {"rejected"}
    html = branch.tree()._repr_html_()
    assert html.count('class="rl-said">Z  tails') >= 1 and "{Z  tails <EOS>}" in str(branch.tree())
    frames = branch.timeline().frames
    assert [frame.phase.value for frame in frames[:5]] == ["prefill", "rollback", "prefill", "rollback", "accept"]
    struck = [slot for slot in frames[1].generated if slot.state.value == "rejected"]
    assert len(struck) == len(dropped) and struck[0].name == "Z5"
    assert (frames[0].kv.draft, frames[1].kv.total) == (20, 8)
    assert 'class="cross"' in branch.timeline().still(frames[1]) and 'class="cross"' not in branch.timeline().still(frames[0])


def test_another_state_in_its_place_turns_thought_and_answer() -> None:
    """The replacement is the state after the first flip of a story that begins with tails."""
    root = engine().prompt(SENTENCE, sites="S")
    other = engine().prompt(SENTENCE.replace("heads", "tails"), sites="S")
    swapped = Edit.interchange("thinking.state", other.activations["thinking.state"][8:10], slice(8, 10))
    (turned,) = root.fork(edits=[swapped])
    words = [engine().text.decode(t.tokens) for t in turned.thoughts.chunks if not t.empty]
    assert words == [" tails", " tails"]
    assert turned.generate(2).text == SENTENCE + " tails."


@pytest.mark.slow
@pytest.mark.parametrize(("rendering", "length"), [("picture", 8), ("picture", 12), ("states", 8)])
def test_held_out_stories(rendering: str, length: int) -> None:
    examples = zoo.held_out(RecipePart("coin", 1, (("rendering", rendering),)), length, 12)
    run = engine().replay(examples)
    assert isinstance(run, Run) and run.accuracy == 1.0
    for result in run:
        words = [engine().text.decode(t.tokens) for t in result.thoughts.chunks if not t.empty]
        assert "".join(words) == "".join(said for _, said in result.example.thoughts)


def test_its_card_and_size() -> None:
    folder = CHECKPOINTS / "coin-thinking"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    assert "coin-thinking" in thinking_zoo.names() and engine().fingerprint.weights in (folder / "card.md").read_text()


def test_the_command_shows_the_picture() -> None:
    told = CliRunner().invoke(app, ["replay", "--model", "coin-thinking", "--n", "2", "--quiet"])
    assert told.exit_code == 0 and "2 examples, 100.0% correct" in told.output, told.output
    assert "round 1" in told.output and "|S|" in told.output
