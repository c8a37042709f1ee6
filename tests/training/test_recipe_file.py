"""Recipes from files: strict, named errors, the same weights from the same file, and a folder that Engine.load takes."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replaylens import Engine, tasks
from replaylens.cli import app
from replaylens.commands import training as command
from replaylens.engine.errors import BadRecipe
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.tasks import registry
from replaylens.tasks.errors import TooFewPrompts
from replaylens.thinking.core import ThinkingEngine
from replaylens.training import embedded as zoo
from replaylens.training import thinking as thinking_train
from replaylens.training import trainer
from replaylens.training.recipe_file import (
    ModelRecord,
    PartRecord,
    RecipeRecord,
    ThinkingRecord,
    read_recipe,
    recipe_text,
)
from replaylens.training.thinking import ThinkingRecipe
from tests.docs.blocks import ROOT
from tests.interrupted import Interrupted
from tests.tasks.square import own_registry, square_module, write_files

SHAPE = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_mlp": 24, "max_positions": 64}
DEEPER = {**SHAPE, "num_layers": 3}
VALUES: dict[str, Any] = {
    "model": SHAPE, "parts": [{"task": "square"}], "longest": 2, "steps": 6, "batch": 8, "lr": 0.01, "pool": 8
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with own_registry():
        tasks.register(square_module().Square)
        yield


def written(folder: Path, **changes: Any) -> Path:
    """A recipe file with some fields changed; None leaves a field out."""
    values = {name: value for name, value in {**VALUES, **changes}.items() if value is not None}
    path = folder / "own.json"
    path.write_text(json.dumps(values))
    return path


TOML = """
longest = 2
steps = 6
batch = 8
lr = 0.01
pool = 8
[model]
num_layers = 2
d_model = 16
num_heads = 2
d_mlp = 24
max_positions = 64
[[parts]]
task = "square"
"""


def test_toml_and_json_give_one_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(TOML)
    recipe = read_recipe(tmp_path / "own.toml")
    assert recipe == read_recipe(str(written(tmp_path)))
    assert (recipe.seed, recipe.warmup, recipe.curriculum, recipe.init_scale) == (0, 0, 0.5, 2.0)
    config = recipe.config
    assert (config.d_head, config.num_kv_heads, config.rotary_dim) == (8, 2, 8)
    assert config.vocab_size == recipe.tokenizer().vocab_size == 2 + len(tasks.get("square").vocabulary())


def test_the_text_of_a_recipe_gives_it_again(tmp_path: Path) -> None:
    part = {"task": "coin", "weight": 3, "knobs": {"rendering": "states", "distractors": 1}}
    shape = {**SHAPE, "d_head": 4, "num_kv_heads": 1}
    recipe = read_recipe(written(tmp_path, parts=[part, {"task": "square"}], model=shape, warmup=3, seed=7, curriculum=0.25))
    (tmp_path / "again.json").write_text(recipe_text(recipe))
    assert read_recipe(tmp_path / "again.json") == recipe
    assert recipe.warmup == 3 and recipe.parts[0].knobs == (("distractors", 1), ("rendering", "states"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": None}, "missing required field `lr`"),
        ({"leraning_rate": 1}, "unknown field - at `$.leraning_rate`"),
        ({"model": {**SHAPE, "vocab_size": 9}}, "unknown field - at `$.model.vocab_size`"),
        ({"parts": [{"task": "square", "code": "x"}]}, "unknown field - at `$.parts[0].code`"),
        ({"steps": 1.5}, "Expected `int`"),
        ({"steps": "6"}, "Expected `int`"),
        ({"steps": 0}, "`int` >= 1 - at `$.steps`"),
        ({"seed": -1}, "`int` >= 0 - at `$.seed`"),
        ({"model": {**SHAPE, "d_model": True}}, "Expected `int"),
        ({"parts": []}, "parts is empty"),
        ({"parts": [{"task": "sqare"}]}, "did you mean 'square'"),
        ({"parts": [{"task": "square", "knobs": {"turns": 1}}]}, "Unknown knob 'turns'"),
        ({"parts": [{"task": "square", "knobs": {"moves": 3}}]}, "sets the knob 'moves' of task 'square', which the trainer"),
        ({"parts": [{"task": "square", "knobs": {"seed": 3}}]}, "sets the knob 'seed'"),
        ({"parts": [{"task": "square", "knobs": {"moves": {"a": 1}}}]}, "at `$.parts[0].knobs[...]`"),
        ({"parts": [{"task": "square", "weight": 0}]}, "weight of 0 or less"),
        ({"lr": -1}, "lr must be a positive number"),
        ({"warmup": 7}, "warmup must be between 0 and 6"),
        ({"longest": 101}, "Knob 'moves' cannot be 101"),
        ({"model": {**SHAPE, "num_heads": 3}}, "d_model 16 is no multiple of num_heads 3. Give d_head"),
        ({"model": {**SHAPE, "num_kv_heads": 3}}, "num_heads 2 is not a multiple of num_kv_heads 3"),
        ({"model": {**SHAPE, "d_head": 5}}, "must be even"),
        ({"thinking": {}}, "missing required field `chunk` - at `$.thinking`"),
        ({"thinking": {"chunk": 2, "method": "guess"}}, "Invalid enum value 'guess' - at `$.thinking.method`"),
        ({"thinking": {"chunk": 2, "backbone": "x"}}, "unknown field - at `$.thinking.backbone`"),
        ({"thinking": {"chunk": 2}}, "With the defaults a backbone needs at least 3 blocks"),
        (
            {"thinking": {"chunk": 2, "method": "cot", "cut": True}, "model": {**SHAPE, "num_layers": 3}},
            "The baseline 'cot' has no states",
        ),
        ({"thinking": {"chunk": 40}, "model": DEEPER}, "Chunks of 40 tokens are too large"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        read_recipe(written(tmp_path, **change))
    assert said in str(caught.value) and "own.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("own.json", "{", "is not JSON"),
        ("own.json", "[1]", "Expected `object`"),
        ("own.toml", "longest = ", "is not TOML"),
        ("own.toml", b"\xff", "is not TOML"),
        ("own.toml", TOML.replace("lr = 0.01", "lr = nan"), "lr must be a positive number"),
        ("own.toml", TOML + "weight = inf", "weight of 0 or less"),
        ("own.toml", TOML + "knobs = { moves = 2020-01-01 }", "knobs"),
        ("own.yaml", "", r"must end in .toml or .json"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadRecipe) as caught:
        read_recipe(tmp_path / name)
    assert said in str(caught.value) and name in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match=r"gone\.toml cannot be read \(No such file"):
        read_recipe(tmp_path / "gone.toml")


def test_every_field_is_documented() -> None:
    section = (ROOT / "docs/models.md").read_text(encoding="utf-8").split("### A recipe of your own")[1].split("\n### ")[0]
    names = [spec.name for kind in (RecipeRecord, PartRecord, ThinkingRecord) for spec in fields(kind) if spec.name != "model"]
    names += [f"model.{spec.name}" for spec in fields(ModelRecord)]
    assert [name for name in names if f"`{name}`" not in section] == []


# The command


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files and a tiny recipe, and small cards. The task is not registered."""
    registry._REGISTERED.clear()
    monkeypatch.setattr(command, "CARD_EXAMPLES", 6)
    write_files(tmp_path)
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *words, "--quiet"])
    return done.exit_code, " ".join(done.output.split())


def test_train_a_model_of_your_own(small: Path) -> None:
    code, said = train("own.json", "--task", "square.py:Square")
    assert code == 0, said
    model, tokenizer = zoo.load(small / "trained" / "own")
    again = trainer.train(read_recipe("own.json"))
    assert weights_hash(model) == weights_hash(again) in said, "the same recipe gives the same weights"
    card = (small / "trained/own/card.md").read_text()
    assert weights_hash(model) in card and "train own.json --task square.py:Square --steps 6 --seed 0" in card
    assert "| 1 |" in card and "| 2 |" in card and "`square` 100% of every batch" in card
    engine = Engine.load("trained/own")
    example = tasks.get("square")(moves=2).example(0)
    branch = engine.prompt(example.prompt)
    assert branch.tokens == tokenizer.encode(example.prompt)
    assert torch.equal(engine.model.embed, model.embed)


def test_the_saved_recipe_gives_the_same_weights(small: Path) -> None:
    assert train("own.json", "--task", "square.py:Square", "--steps", "4", "--seed", "3")[0] == 0
    code, said = train("trained/own/recipe.json", "--out", "again")
    assert code == 0, said
    hashes = [weights_hash(zoo.load(small / folder)[0]) for folder in ("trained/own", "again")]
    assert hashes[0] == hashes[1]
    assert train("own.json", "--out", "other", "--steps", "4", "--seed", "4")[0] == 0
    assert weights_hash(zoo.load(small / "other")[0]) != hashes[0], "the control: another seed, other weights"


def test_an_interrupted_run_resumes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(zoo, "accuracy", die)
        assert train("own.json", "--task", "square.py:Square")[0] == 1
    assert train("own.json")[0] == 2, "an unfinished run is not trained over"
    assert train("own.json", "--resume")[0] == 0
    assert weights_hash(zoo.load(small / "trained/own")[0]) == weights_hash(trainer.train(read_recipe("own.json")))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["thinking", "cot"])
def test_train_a_model_that_thinks(small: Path, method: str) -> None:
    written(small, thinking={"chunk": 2, "max_thought": 4, "method": method}, model=DEEPER)
    code, said = train("own.json", "--task", "square.py:Square")
    assert code == 0, said
    recipe = read_recipe("own.json")
    assert isinstance(recipe, ThinkingRecipe) and recipe.method == method
    assert recipe == read_recipe("trained/own/recipe.json")
    assert weights_hash(thinking_train.train(recipe)) in said
    assert f"| method | {method}; chunks of 2 tokens" in (small / "trained/own/card.md").read_text()
    assert isinstance(Engine.load("trained/own"), ThinkingEngine) == (method == "thinking")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own.json"], "BadRecipe: The recipe own.json cannot be followed. Unknown task 'square'"),
        (["gone.toml"], "BadRecipe: The recipe gone.toml cannot be read"),
        (["own.json", "--task", "gone.py:Square"], "BadTask: "),
        (["own.json", "--task", "coin"], "Unknown task 'square'"),
        (["coins.json", "--task", "square.py:Square"], "is the task 'square', but coins.json trains on coin. Leave it out."),
        (["own.json", "--chunk", "2"], "--chunk 2: not for recipe files"),
        (["own.json", "--method", "cot"], "--method cot: not for recipe files"),
    ],
)
def test_the_command_names_what_is_wrong(small: Path, words: list[str], said: str) -> None:
    (small / "coins.json").write_text(json.dumps({**VALUES, "parts": [{"task": "coin"}]}))
    code, output = train(*words)
    assert code == 2 and said in output, output
    assert not (small / "trained").exists()


@pytest.mark.slow
def test_a_length_without_held_out_prompts_has_an_empty_cell(small: Path) -> None:
    part = {"task": "coin", "knobs": {"rendering": "symbols", "start": "tails"}}
    with pytest.raises(TooFewPrompts):
        zoo.held_out(read_recipe(written(small, parts=[part])).parts[0], 1, 3)
    assert train("own.json")[0] == 0
    lines = (small / "trained/own/card.md").read_text().splitlines()
    assert "| 1 | none held out |" in lines and any(line.startswith("| 2 | ") and "% of " in line for line in lines)


@pytest.mark.slow
def test_the_recipe_of_the_docs_learns_the_symmetries_of_a_square(small: Path) -> None:
    """Trained as on the page, without smaller sizes: about 80 s on one core."""
    code, said = train("square.toml", "--task", "square.py:Square")
    assert code == 0, said
    part = read_recipe("square.toml").parts[0]
    scores = [zoo.accuracy(*zoo.load(small / "trained/square"), zoo.held_out(part, length, 200)) for length in (1, 2, 3, 4)]
    assert min(scores[:3]) >= 0.95 and scores[3] >= 0.7, scores
