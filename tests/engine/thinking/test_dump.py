"""Dumps, runs and commands of Thinking-States models: thoughts are captured and stored like everything else."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.replay.run import Run
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.prefill import GUESSES
from replaylens.engine.training import embedded_thinking as thinking_zoo
from replaylens.tasks import WordTokenizer
from replaylens.views.thoughts import Thinking
from tests.engine.reference import same_bits
from tests.engine.thinking.reference import thinking_model

SHAPE = ModelConfig(
    num_layers=3, d_model=32, num_heads=2, num_kv_heads=2, d_head=16, d_mlp=48, vocab_size=106, max_positions=256, rotary_dim=16
)  # fmt: skip
COIN = tasks.get("coin")(flips=(1, 4), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the coin's vocabulary."""
    where = tmp_path_factory.mktemp("model")
    thinking_zoo.save(thinking_model(SHAPE, chunk=2), WordTokenizer(tasks.get("coin").vocabulary()), where)
    return where


def engine(folder: Path, **options: str) -> ThinkingEngine:
    loaded = Engine.load(str(folder), **options)
    assert isinstance(loaded, ThinkingEngine)
    return loaded


@pytest.fixture(scope="module")
def dump(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    made = engine(folder)
    written = write_dump(made, make_plan(made, COIN, 6, examples_per_shard=4), tmp_path_factory.mktemp("dump") / "d")
    assert written is not None
    return written


def test_thoughts_are_stored_by_chunk_and_step(dump: Dump, folder: Path) -> None:
    content, c = dump.files.content(0), 2
    index = content.index.to_pandas()
    shapes = {name: tuple(x.shape[1:]) for name, x in content.tensors.items() if name.startswith(("thinking", "compress"))}
    assert shapes == {
        "thinking.state": (32,),
        "thinking.hook_out": (4, 32),
        "compress.hook_out": (4, 32),
        "thinking.tokens": (4,),
        "thinking.entropy": (4,),
        "thinking.top_ids": (4, 8),
        "thinking.top_logprobs": (4, 8),
    }
    first = np.flatnonzero((index["example"] == 0) & (index["branch"] == 0))
    result = engine(folder).replay([COIN.example(0)], sites="STCZ", drafter="lens")[0]
    tokens = content.tensors["thinking.tokens"][torch.from_numpy(first)]
    for number, thought in enumerate(result.thoughts.chunks):
        row = tokens[(number + 1) * c - 1].tolist()
        assert row[: len(thought.tokens)] == list(thought.tokens)
        assert (tokens[number * c] == -1).all()
    states = content.tensors["thinking.state"][torch.from_numpy(first)]
    assert same_bits(states, result.activations["thinking.state"])
    assert not any(name in shapes for letter in "STCZ" for name in dump.manifest.letter(letter)), "a letter counts layers"


def test_rejected_suffixes_are_stored_and_verified(dump: Dump, folder: Path) -> None:
    rejected = dump.index[dump.index["branch"] > 0]
    assert (rejected["token_state"] == "rejected").all()
    prompts = {e.index: len(engine(folder)._chunks(e.prompt)) for e in COIN.examples(6)}
    assert any(row.fork_position < prompts[row.example] for row in rejected.itertuples())
    verdict = verify(dump.url, engine(folder), sample="all")
    assert verdict, verdict


def test_how_thoughts_are_guessed_changes_no_accepted_row(dump: Dump, folder: Path, tmp_path: Path) -> None:
    for guess in GUESSES:
        made = engine(folder, guess=guess)
        other = write_dump(made, make_plan(made, COIN, 6, examples_per_shard=4), tmp_path / guess, batch=3)
        assert other is not None and diff(dump, other, accepted=True)
        assert (guess == "empty") == (other.manifest.digest == dump.manifest.digest)
    with pytest.raises(BadRequest, match="Load the engine with it"):
        verify(dump.url, engine(folder, guess="drafted"), sample="all")


def test_a_run_is_saved_as_it_was(folder: Path, tmp_path: Path) -> None:
    run = engine(folder).replay(COIN.examples(3), sites="STCZ", drafter="lens")
    assert isinstance(run, Run)
    assert verify(run.save(tmp_path / "run").url, engine(folder), sample="all")


def test_the_tree_of_a_run_is_the_picture(folder: Path) -> None:
    run = engine(folder).replay(COIN.examples(2), sites="S", drafter="lens")
    assert isinstance(run, Run)
    picture = run.picture(1)
    assert isinstance(picture, Thinking)
    thoughts = run[1].thoughts
    assert len(picture.chunks) == len(thoughts.chunks) + 1 and len(picture.rounds) == len(thoughts.rounds)
    assert [chunk.thinks for chunk in picture.chunks[:-1]] == [not t.empty for t in thoughts.chunks]
    assert [bool(chunk.state) for chunk in picture.chunks] == [i in thoughts.states for i in range(len(picture.chunks))]
    assert "<EOS>" in str(picture) and "rl-thinking" in picture._repr_html_()


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    shell = CliRunner()
    told = shell.invoke(app, ["replay", "--model", str(folder), "--n", "2", "--quiet"])
    assert told.exit_code == 0 and "round 1" in told.output and "<EOS>" in told.output, told.output
    told = shell.invoke(app, ["replay", "--model", str(folder), "--n", "1", "--quiet", "--json"])
    assert {"chunk", "tokens", "thought"} <= set(json.loads(told.output)["examples"][0]["thoughts"][0])
    out = str(tmp_path / "dump")
    assert shell.invoke(app, ["dump", "--model", str(folder), "--n", "3", "--out", out, "--quiet"]).exit_code == 0
    assert shell.invoke(app, ["verify", out, "--model", str(folder), "--all", "--quiet"]).exit_code == 0
