"""Training of Thinking-States models is deterministic and resumable for all methods, and the models learn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine.errors import BadRecipe
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import embedded_thinking as thinking_zoo
from replaylens.engine.training import thinking as trainer
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.score import generate, score
from replaylens.engine.training.thinking import METHODS, ChunkBatch, Method, ThinkingRecipe
from tests.interrupted import Interrupted, interrupt_at

SHAPE = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=106, max_positions=256, rotary_dim=8
)  # fmt: skip
PICTURE = Part("coin", 1, (("rendering", "picture"),))
TINY = ThinkingRecipe(
    config=SHAPE,
    thinking=ThinkingConfig.for_backbone(SHAPE, 2, 1, 0, max_thought=3),
    parts=(PICTURE, Part("coin", 1, (("rendering", "states"),))),
    longest=2,
    steps=12,
    batch=8,
    lr=1e-2,
    seed=3,
    warmup=2,
    pool=8,
)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_same_bits_twice_and_after_an_interruption(method: Method, tmp_path: Path) -> None:
    recipe, state = replace(TINY, method=method, width=64), tmp_path / "training.safetensors"
    once = trainer.train(recipe)
    assert isinstance(once, ThinkingDecoder if method == "thinking" else Decoder)
    with pytest.raises(Interrupted):
        trainer.train(recipe, state=state, save_every=3, after_step=interrupt_at(8))
    assert same(trainer.train(recipe, state=state), once)
    assert not same(trainer.train(replace(recipe, seed=4)), once)


def test_it_learns_tokens_and_thoughts() -> None:
    texts = trainer.texts_of(TINY, "cpu")
    before, after = trainer.initial(TINY), trainer.train(replace(TINY, steps=30))
    with torch.no_grad():
        assert trainer.loss(after, texts.batch(99)) < 0.6 * trainer.loss(before, texts.batch(99))


def test_every_part_gets_a_gradient() -> None:
    model = trainer.initial(TINY)
    trainer.loss(model, trainer.texts_of(TINY, "cpu").batch(0)).backward()
    assert all(bool(x.grad is not None and x.grad.abs().sum() > 0) for x in model.parameters())


def test_the_published_thought_loss_sums_over_the_chunks_of_a_text() -> None:
    """On texts of the same length, and thoughts of the same size, it is the mean over tokens times the chunks of a text."""
    model, batch = trainer.initial(TINY), trainer.texts_of(TINY, "cpu").batch(0)
    chunks = int(batch.thinks.sum(1).min())
    even = ChunkBatch(**{name: x[:, :chunks].clone() for name, x in vars(batch).items()})
    even.thoughts[..., 0], even.thoughts[..., 1:] = 7, TINY.thinking.eos_token
    with torch.no_grad():
        hidden = torch.randn(*even.tokens.shape, TINY.config.d_model, generator=torch.Generator().manual_seed(0))
        by_token, by_chunk = (trainer.thought_loss(model, hidden, even, over) for over in ("tokens", "chunks"))
    torch.testing.assert_close(by_chunk, chunks * by_token)
    assert chunks > 1 and by_chunk > 1.5 * by_token


def test_a_batch_without_a_prompt_chunk_has_no_thought_loss() -> None:
    """`cut` may leave nothing but answers: short prompts in large chunks."""
    model, batch = trainer.initial(TINY), trainer.texts_of(TINY, "cpu").batch(0)
    batch.thinks[:] = False
    hidden = torch.randn(*batch.tokens.shape, TINY.config.d_model)
    with torch.no_grad():
        assert [float(trainer.thought_loss(model, hidden, batch, over)) for over in ("tokens", "chunks")] == [0.0, 0.0]


def test_the_thought_loss_is_part_of_the_recipe() -> None:
    published = replace(TINY, thought_loss="chunks")
    assert not same(trainer.train(TINY), trainer.train(published))
    assert "thought_loss" in published.to_json() and "thought_loss" not in TINY.to_json()
    with pytest.raises(BadRecipe, match=r"Unknown thought_loss 'words'\. Use one of tokens, chunks"):
        replace(TINY, thought_loss="words")


def test_a_cut_text_goes_on_from_its_state() -> None:
    """Skipped chunks affect the loss only through their states."""
    recipe = replace(TINY, width=64, cut=True)
    assert {trainer.left_out(step, 32) > 0 for step in range(0, 40, 2)} == {False}
    assert all(0 < trainer.left_out(step, 32) <= 16 for step in range(1, 40, 2))
    model, batch = trainer.initial(recipe), trainer.texts_of(recipe, "cpu").batch(1)
    first = 3 + int(batch.continues[0, 3:].nonzero()[0])  # a chunk that continues the one before it
    one, other = (replace(batch, **{name: x.clone()}) for name, x in (("tokens", batch.tokens), ("thoughts", batch.thoughts)))
    one.tokens[:, :first] = 5
    other.thoughts[:, first - 1] = torch.tensor([7, 1])[: other.thoughts.shape[-1]]
    with torch.no_grad():
        whole = trainer.loss(model, batch, first)
        assert trainer.loss(model, one, first) == whole
        assert trainer.loss(model, other, first) != whole
    assert not same(trainer.train(recipe), trainer.train(replace(recipe, cut=False)))
    with pytest.raises(BadRecipe, match="has no states"):
        replace(TINY, method="cot", cut=True)


def test_from_a_trained_backbone() -> None:
    backbone, _ = zoo.load_embedded("coin-plain")
    recipe = replace(TINY, config=backbone.config)
    model = trainer.initial(recipe, backbone)
    assert isinstance(model, ThinkingDecoder)
    assert same(model.backbone, backbone)
    with pytest.raises(BadRecipe, match="config differs from the recipe's"):
        trainer.initial(TINY, backbone)


def test_scores_count_only_what_the_model_itself_says() -> None:
    """An untrained model scores 0 on its thoughts, whatever gold thoughts the scoring starts from."""
    examples = zoo.held_out(PICTURE, 2, 6)
    found = score(trainer.initial(TINY), "thinking", TINY.thinking, TINY.tokenizer(), examples)  # type: ignore[arg-type]
    assert not any(s.thought for s in found)
    assert all(s.rounds > 1 for s in found)


def test_greedy_continuations_are_those_of_whole_passes() -> None:
    backbone, tokenizer = zoo.load_embedded("coin-draft")
    prompts = [tokenizer.encode(example.prompt) for n in (1, 4, 2) for example in zoo.held_out(PICTURE, n, 1)]
    from replaylens.engine.model.ops import SequenceOps

    for prompt, new in zip(prompts, generate(backbone, prompts, 6), strict=True):
        path = list(prompt)
        for token in new:
            ops = SequenceOps([len(path)])
            residual = backbone(torch.tensor(path), torch.arange(len(path)), ops)
            assert token == int(backbone.logits(residual[-1:], ops).argmax())
            path.append(token)


def test_a_recipe_for_another_task() -> None:
    recipe = thinking_zoo.for_task(TINY, "shell", 2, chunk=4, max_thought=8)
    model = trainer.train(replace(recipe, steps=2, warmup=0))
    assert isinstance(model, ThinkingDecoder)


@pytest.mark.parametrize("method", METHODS)
def test_the_command(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    monkeypatch.setattr("replaylens.commands.train.CARD_EXAMPLES", 2)
    monkeypatch.setattr("replaylens.commands.train.CARD_LENGTHS", (1,))
    arguments = ["train", "coin-thinking", "--steps", "3", "--method", method, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"--method {method}" in (tmp_path / "card.md").read_text()
    (thinking_zoo.load if method == "thinking" else zoo.load)(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["coin-thinking", "--method", "magic"], "Unknown method"),
        (["coin-plain", "--method", "cot"], "only for Thinking-States models"),
        (["coin-thinking", "--steps", "2", "--chunk", "1000"], "a text takes at least two"),
        (["coin-thinking", "--steps", "2", "--longest", "60"], "In chunks of 2 tokens, the longest row has"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    result = CliRunner().invoke(app, ["train", *arguments, "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert says in result.output
