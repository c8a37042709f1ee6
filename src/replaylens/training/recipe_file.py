"""Recipes in files: TOML or JSON, read strictly. A file names tasks and holds numbers; it never names code to run."""

import json
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadConfig, BadRecipe
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.records import Natural, Positive, build, parse
from replaylens.tasks.errors import TaskError
from replaylens.thinking.model import ThinkingConfig
from replaylens.training.recipe import Recipe, RecipePart, words_of
from replaylens.training.thinking import Method, ThinkingRecipe, ThoughtLoss

SUFFIXES = (".toml", ".json")
Plain = str | bool | int | float
_OWN = ("method", "width", "cut", "thought_loss")
"""fields of `ThinkingRecipe` that the table `thinking` spells by the same names"""


@dataclass(frozen=True)
class ModelRecord:
    """The table `model`: the shape of a decoder with rotary positions, RMSNorm, gated MLP and tied embeddings."""

    num_layers: Positive
    d_model: Positive
    num_heads: Positive
    d_mlp: Positive
    max_positions: Positive
    num_kv_heads: Positive | None = None
    """default: `num_heads`"""
    d_head: Positive | None = None
    """default: `d_model / num_heads`"""


@dataclass(frozen=True)
class PartRecord:
    """One of the tables `parts`: a task by its registered name."""

    task: str
    weight: float = 1.0
    knobs: dict[str, Plain | list[Plain]] | None = None


@dataclass(frozen=True)
class ThinkingRecord:
    """The table `thinking`: the model is one that thinks, or a baseline of it. Fields of `ThinkingRecipe` and its config."""

    chunk: Positive
    max_thought: Positive = ThinkingConfig.max_thought
    method: Method = ThinkingRecipe.method
    width: Positive | None = None
    cut: bool = False
    thought_loss: ThoughtLoss = ThinkingRecipe.thought_loss
    write_layer: Natural = ThinkingConfig.write_layer
    read_layer: Natural | None = None
    """default: the second to last block"""


@dataclass(frozen=True)
class RecipeRecord:
    """A recipe as a file spells it. The fields are those of `Recipe`; the vocabulary follows from the tasks."""

    model: ModelRecord
    parts: tuple[PartRecord, ...]
    longest: Positive
    steps: Positive
    batch: Positive
    lr: float
    seed: Natural = 0
    warmup: Natural | None = None
    """default: that of `Recipe`, but at most a tenth of the steps"""
    curriculum: float = Recipe.curriculum
    completion_weight: float = Recipe.completion_weight
    init_scale: float = Recipe.init_scale
    pool: Positive = Recipe.pool
    thinking: ThinkingRecord | None = None


def read_recipe(path: str | Path) -> Recipe:
    """The recipe of a .toml or .json file. BadRecipe names the file, and the field that is missing, unknown or wrong.

    Its tasks must be registered. Equal files give equal recipes, and so equal weights on one machine.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise BadRecipe(f"{path} is no recipe: its name must end in {' or '.join(SUFFIXES)}.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadRecipe(f"The recipe {path} cannot be read ({error.strerror}). Give the path of a recipe file.") from error
    record = build(RecipeRecord, _values(path, content), f"The recipe {path}", BadRecipe)
    try:
        return recipe_of(record)
    except (BadRecipe, BadConfig, TaskError) as error:
        raise BadRecipe(f"The recipe {path} cannot be followed. {error}") from error


def _values(path: Path, content: bytes) -> Any:
    if path.suffix == ".json":
        return parse(content, str(path), BadRecipe)
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecipe(f"{path} is not TOML ({error}).") from error


def recipe_of(record: RecipeRecord) -> Recipe:
    """The recipe of a record, with defaults filled in and checked; a `ThinkingRecipe` if it has the table `thinking`."""
    parts = tuple(RecipePart(part.task, part.weight, _knobs(part)) for part in record.parts)
    given = {spec.name: getattr(record, spec.name) for spec in fields(record)}
    del given["model"], given["thinking"]
    if record.warmup is None:
        given["warmup"] = min(Recipe.warmup, record.steps // 10)
    config, words = _config(record.model, parts), words_of(parts)
    given |= {"parts": parts, "config": config}
    if (thinks := record.thinking) is None:
        return Recipe(**given)
    read = config.num_layers - 2 if thinks.read_layer is None else thinks.read_layer
    how = ThinkingConfig(thinks.chunk, read, words.eos_id, words.pad_id, thinks.write_layer, thinks.max_thought).check(config)
    given |= {name: getattr(thinks, name) for name in _OWN}
    return ThinkingRecipe(**given, thinking=how)


def _knobs(part: PartRecord) -> tuple[tuple[str, Any], ...]:
    """By name, so that the order in the file makes no other recipe."""
    given = (part.knobs or {}).items()
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in given))


def _config(model: ModelRecord, parts: tuple[RecipePart, ...]) -> ModelConfig:
    if model.d_head is None and model.d_model % model.num_heads:
        raise BadRecipe(f"d_model {model.d_model} is no multiple of num_heads {model.num_heads}. Give d_head, too.")
    d_head = model.d_head or model.d_model // model.num_heads
    shape = {**asdict(model), "d_head": d_head, "num_kv_heads": model.num_kv_heads or model.num_heads, "rotary_dim": d_head}
    return ModelConfig(**shape, vocab_size=words_of(parts).vocab_size)


def recipe_text(recipe: Recipe) -> str:
    """The JSON file of a recipe that `read_recipe` gave: reading it gives the recipe again."""
    shape = {spec.name: getattr(recipe.config, spec.name) for spec in fields(ModelRecord)}
    parts = [{"task": part.task, "weight": part.weight, "knobs": dict(part.knobs)} for part in recipe.parts]
    tables: dict[str, Any] = {"model": shape, "parts": parts}
    if isinstance(recipe, ThinkingRecipe):
        how = {name: getattr(recipe.thinking, name) for name in ("chunk", "max_thought", "write_layer", "read_layer")}
        tables["thinking"] = {**how, **{name: getattr(recipe, name) for name in _OWN}}
    plain = {spec.name for spec in fields(RecipeRecord)} & {spec.name for spec in fields(Recipe)} - {"parts"}
    return json.dumps({**tables, **{name: getattr(recipe, name) for name in sorted(plain)}}, indent=1) + "\n"
