"""The paper's tables: the benchmark's promises on its texts, rows and published numbers, for every task."""

from dataclasses import replace

import pytest

from bench.thinking_tables import PAPER, SMOKE, paper_runs
from replaylens.training import embedded as zoo
from replaylens.training import thinking as thinking_train
from replaylens.training.thinking import METHODS, chunked

pytestmark = pytest.mark.parametrize("task", PAPER)


@pytest.mark.slow
def test_a_hundred_operations_fit_at_trained_positions(task: str) -> None:
    """They fit also for the chain of thought, which is the longest."""
    plan = PAPER[task]
    recipe = plan.recipe("cot", 10)
    examples = zoo.held_out(plan.part, max(plan.beyond), 20)
    texts = [chunked(example, recipe.tokenizer(), recipe.thinking, "cot") for example in examples]
    assert all(len(text.prompt) + len(text.completion) <= plan.width for text in texts)


def test_most_chunks_have_a_thought(task: str) -> None:
    plan = PAPER[task]
    recipe = plan.recipe("thinking", 10)
    examples = zoo.held_out(plan.part, 40, 20)
    texts = [chunked(example, recipe.tokenizer(), recipe.thinking, "thinking") for example in examples]
    sizes = [len(thought) for text in texts for thought in text.thoughts]
    assert max(sizes) <= recipe.thinking.max_thought
    assert sum(size > 1 for size in sizes) > 0.7 * len(sizes)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_has_the_same_shapes(task: str, method: str) -> None:
    recipe = replace(PAPER[task], **{**SMOKE, "width": 96, "steps": 30}).recipe(method, 3)  # type: ignore[arg-type]
    texts = thinking_train.texts_of(recipe, "cpu")
    shapes = {tuple(tuple(x.shape) for x in vars(texts.batch(step)).values()) for step in (0, 7, recipe.steps - 1)}
    assert len(shapes) == 1
    loose = thinking_train.texts_of(replace(recipe, width=None), "cpu")  # without a fixed width they differ
    assert len({loose.batch(step).tokens.shape for step in range(recipe.steps)}) > 1


def test_published_numbers_are_there_for_every_cell(task: str) -> None:
    runs = paper_runs(PAPER[task])
    assert set(PAPER[task].published) == {(run.arm["method"], run.arm["N"]) for run in runs}
    assert len({run.name for run in runs}) == 27
