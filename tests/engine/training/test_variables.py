"""`replaylens train coin-thinking --task variables`: a task other than the recipe's own, with every method."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import embedded_thinking as thinking_zoo
from replaylens.engine.training import thinking as trainer
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe

SHAPE = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=31, max_positions=256, rotary_dim=8
)  # fmt: skip
TINY = ThinkingRecipe(
    config=SHAPE,
    thinking=ThinkingConfig.for_backbone(SHAPE, 4, 1, 0, max_thought=3),
    parts=(Part("variables", 1),),
    longest=2,
    steps=30,
    batch=8,
    lr=1e-2,
    seed=3,
    warmup=2,
    pool=16,
)


def test_no_chunk_of_four_words_ends_two_operations() -> None:
    """A chunk has a thought of two words or none, so each operation can continue from the thoughts of all earlier ones."""
    table = trainer.texts_of(replace(TINY, longest=12), "cpu").table
    tokens, _, thoughts, thinks, _ = table.columns
    assert thoughts.shape[1] == 3 and tokens.shape[1] == 4
    sizes = (thoughts[thinks] != 1).sum(1)
    assert set(sizes.tolist()) == {0, 2}


def test_it_learns_tokens_and_thoughts() -> None:
    texts = trainer.texts_of(TINY, "cpu")
    before, after = trainer.initial(TINY), trainer.train(TINY)
    with torch.no_grad():
        assert trainer.loss(after, texts.batch(99)) < 0.6 * trainer.loss(before, texts.batch(99))


@pytest.mark.parametrize("method", METHODS)
def test_the_command(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY)
    monkeypatch.setattr("replaylens.commands.train.CARD_EXAMPLES", 2)
    options = ["--task", "variables", "--longest", "2", "--method", method, "--steps", "3"]
    result = CliRunner().invoke(app, ["train", "coin-thinking", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "card.md").read_text()
    assert "--task variables" in card and "| steps | variables |" in card
    _, tokenizer = (thinking_zoo.load if method == "thinking" else zoo.load)(tmp_path)
    assert tokenizer.encode(" a 0") == [tokenizer.id(" a"), tokenizer.id(" 0")]
