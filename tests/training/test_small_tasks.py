"""Tasks with few prompts: training and scoring end, with a named error where one side of the held-out prompts is empty."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.model.config import ModelConfig
from replaylens.tasks import TaskError
from replaylens.tasks.errors import TooFewPrompts
from replaylens.tasks.splits import Side, is_test_root
from replaylens.thinking.model import ThinkingConfig
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import thinking as chunks
from replaylens.training import trainer
from replaylens.training.recipe import Recipe, RecipePart
from tests.interrupted import OutOfTime, time_limit

ALL_TRAINED = RecipePart("coin", 1, (("rendering", "symbols"), ("start", "tails")))
"""of one step: two prompts, both on the training side"""
ALL_HELD_OUT = RecipePart("coin", 1, (("rendering", "symbols"), ("start", "heads"), ("p", 0.0)))
"""of one step: one prompt, which is held out"""
SHAPE = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=106, max_positions=64, rotary_dim=8
)  # fmt: skip
RECIPE = Recipe(config=SHAPE, parts=(ALL_HELD_OUT,), longest=1, steps=2, batch=4, lr=1e-2, seed=0, warmup=0, pool=4)


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Generous: the searches below take about a tenth of a second each."""
    with time_limit(20):
        yield


def test_the_limit_ends_a_loop() -> None:
    """Negative control of the guard."""
    with pytest.raises(OutOfTime), time_limit(0.05):
        while True:
            pass


def test_no_prompt_is_held_out() -> None:
    with pytest.raises(TooFewPrompts, match=r"No held-out .* 2 different prompts, .* Set the knob 'flips'"):
        zoo.held_out(ALL_TRAINED, 1, 3)


def test_every_prompt_is_held_out() -> None:
    with pytest.raises(TooFewPrompts, match=r"No training .* 1 different prompt,"):
        trainer.train(RECIPE)


def test_every_prompt_of_a_thinking_recipe_is_held_out() -> None:
    config = ThinkingConfig.for_backbone(SHAPE, 2, 1, 0, max_thought=3)
    with pytest.raises(TooFewPrompts, match="No training"):
        chunks.ChunkedTexts(RECIPE, config, "thinking", None, torch.device("cpu"))


def test_few_prompts_on_both_sides_are_enough() -> None:
    """The control: two prompts, one held out. Both sides repeat their prompt as often as asked."""
    part = replace(ALL_HELD_OUT, knobs=(("rendering", "symbols"), ("start", "heads")))
    assert {example.prompt for example in zoo.held_out(part, 1, 30)} == {"> H o ="}
    tokenizer = RECIPE.tokenizer()
    rows = list(trainer._rows(replace(RECIPE, parts=(part,), pool=30), part, 1, tokenizer))
    assert {tokenizer.decode(ids[:n]) for ids, n in rows} == {"> H x ="} and len(rows) == 30


def test_a_side_of_a_split_without_prompts() -> None:
    task = tasks.get("coin")(rendering="symbols", flips=1, start="heads", p=1.0)
    empty = not is_test_root(task.example(0).root)
    with pytest.raises(TooFewPrompts, match=rf"No {'test' if empty else 'training'} .* 1 different prompt,"):
        Side(task, 100_000, test=empty).examples()
    assert len(Side(task, 100, test=not empty).examples()) == 100


def test_it_is_a_task_error() -> None:
    assert issubclass(TooFewPrompts, TaskError)


@pytest.mark.parametrize("name", ["coin-draft", "coin-thinking"])
def test_the_command_names_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thinking = replace(
        thinking_zoo.recipe("coin-thinking"), config=SHAPE, parts=(ALL_HELD_OUT,), longest=1, steps=2, batch=4, pool=4,
        thinking=ThinkingConfig.for_backbone(SHAPE, 2, 1, 0, max_thought=3), warmup=0,
    )  # fmt: skip
    monkeypatch.setitem(zoo.RECIPES, "coin-draft", RECIPE)
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", thinking)
    done = CliRunner().invoke(app, ["train", name, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2 and "TooFewPrompts: No training" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
