"""The trainer is deterministic and resumable, trains on nothing held out, and names what is wrong with a recipe."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.commands import training as command
from replaylens.engine.errors import BadRecipe, BadRequest
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.terminal import defer_interrupt
from replaylens.tasks import Example, WordTokenizer
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder, padded
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import score as scoring
from replaylens.training import thinking as trainer_of_thinking
from replaylens.training import trainer
from replaylens.training.recipe import Recipe, RecipePart
from replaylens.training.score import generate, score
from replaylens.training.thinking import METHODS, ChunkBatch, ChunkedText, ChunkTable, Method, ThinkingRecipe, chunked
from replaylens.training.trainer import Texts
from tests.devices import swept
from tests.interrupted import Interrupted, interrupt_at

PICTURE = RecipePart("coin", 3, (("rendering", "picture"),))
STEPS = RecipePart("coin", 1, (("rendering", "steps"),))
TINY = Recipe(
    config=ModelConfig(
        num_layers=2, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=106, max_positions=128,
        rotary_dim=8,
    ),
    parts=(PICTURE, STEPS),
    longest=2,
    steps=12,
    batch=8,
    lr=1e-2,
    seed=3,
    warmup=2,
    pool=16,
)  # fmt: skip


def assert_same(a: Decoder, b: Decoder) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.fixture(scope="module")
def trained() -> Decoder:
    return trainer.train(TINY)


# Determinism


def test_same_recipe_same_weights(trained: Decoder) -> None:
    again = trainer.train(TINY)
    assert_same(again, trained)
    assert weights_hash(again) == weights_hash(trained)


def test_another_seed_gives_other_weights(trained: Decoder) -> None:
    assert weights_hash(trainer.train(replace(TINY, seed=4))) != weights_hash(trained)


def test_it_learns(trained: Decoder) -> None:
    batch = Texts(TINY, torch.device("cpu")).batch(TINY.steps)
    with torch.no_grad():
        before, after = trainer.weighted_loss(trainer.initial(TINY), batch), trainer.weighted_loss(trained, batch)
    assert after < 0.8 * before


@pytest.mark.parametrize("stop", swept([1, 5, 6, 12], 5))
def test_a_resumed_run_gives_the_uninterrupted_bits(trained: Decoder, tmp_path: Path, stop: int) -> None:
    """Interrupted before the first save, on a save, between two saves, and after the last step."""
    state = tmp_path / "run" / "training.safetensors"
    with pytest.raises(Interrupted):
        trainer.train(TINY, state=state, save_every=3, after_step=interrupt_at(stop))
    assert state.exists() == (stop >= 3)
    steps: list[int] = []
    resumed = trainer.train(TINY, state=state, save_every=3, after_step=lambda done, loss: steps.append(done))
    assert steps == list(range(stop // 3 * 3 + 1, TINY.steps + 1)), "it goes on from the last save"
    assert_same(resumed, trained)


def interrupted_loss(at: int) -> Callable[..., torch.Tensor]:
    """The loss function, with a Ctrl-C in the middle of step `at` (counted from 1)."""
    real, calls = trainer.weighted_loss, count(1)

    def loss(*given: Any) -> torch.Tensor:
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    return loss


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Makes Ctrl-C work as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_a_whole_step(trained: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C takes effect at the end of the step, which is saved. The resumed run has the bits of an uninterrupted one."""
    state, before = tmp_path / "training.safetensors", signal.getsignal(signal.SIGINT)
    steps: list[int] = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "weighted_loss", interrupted_loss(at=5))
        trainer.train(TINY, state=state, after_step=lambda done, loss: steps.append(done))
    assert steps == [1, 2, 3, 4, 5] and signal.getsignal(signal.SIGINT) is before
    resumed = trainer.train(TINY, state=state, after_step=lambda done, loss: steps.append(done))
    assert steps == list(range(1, TINY.steps + 1))
    assert_same(resumed, trained)


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), defer_interrupt() as came:
        signal.raise_signal(signal.SIGINT)
        assert came()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one was held back, too")


def test_a_crash_while_saving_leaves_the_older_save(trained: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        trainer.train(TINY, state=state, save_every=4, after_step=interrupt_at(4))
    kept = state.read_bytes()

    def cut_short(file: int) -> None:
        assert sorted(tmp_path.iterdir()) != [state], "nothing was begun beside the older save"
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(os, "fsync", cut_short)
        trainer.train(TINY, state=state, save_every=4)
    assert state.read_bytes() == kept
    assert_same(trainer.train(TINY, state=state), trained)


def test_the_setting_of_pytorch_is_put_back() -> None:
    with pytest.raises(Interrupted):
        trainer.train(TINY, after_step=interrupt_at(1))
    assert not torch.are_deterministic_algorithms_enabled()


# Saved runs that do not match


def test_a_save_of_another_recipe_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        trainer.train(TINY, state=state, save_every=1, after_step=interrupt_at(1))
    with pytest.raises(BadRecipe, match="another recipe"):
        trainer.train(replace(TINY, lr=2e-2), state=state)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_save_is_named(tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "training.safetensors"
    state.write_bytes(content)
    with pytest.raises(BadRecipe, match="not a saved training run"):
        trainer.train(TINY, state=state)


# Texts and loss


@pytest.mark.slow
def test_no_held_out_text_is_trained_on() -> None:
    tokenizer = TINY.tokenizer()
    for part in TINY.parts:
        prompts = {tokenizer.decode(ids[:n]) for ids, n in trainer._rows(replace(TINY, pool=500), part, 2, tokenizer)}
        examples = zoo.held_out(part, 2, 200)
        assert all(trainer.is_held_out(example) for example in examples)
        assert not prompts & {example.prompt for example in examples}


def test_held_out_is_about_an_eighth() -> None:
    share = sum(map(trainer.is_held_out, PICTURE.of_length(6, 0).examples(2000))) / 2000
    assert 0.10 < share < 0.15


def test_batches_follow_shares_and_curriculum() -> None:
    recipe = replace(TINY, longest=4, steps=40, batch=10)
    texts, tokenizer = Texts(recipe, torch.device("cpu")), recipe.tokenizer()
    then = tokenizer.id(" then")
    for step in range(40):
        (picture, _), (steps, _) = texts.batch(step)
        assert (len(picture), len(steps)) == (8, 2)  # 7.5 and 2.5, cut at the rounded running sum
        assert int((picture == then).sum(1).max()) < trainer.longest_at(recipe, step)
    assert [trainer.longest_at(recipe, step) for step in (0, 4, 5, 10, 15, 20, 39)] == [1, 1, 2, 3, 4, 4, 4]


def test_completion_tokens_weigh_more_and_padding_nothing() -> None:
    tokenizer = TINY.tokenizer()
    for tokens, weights in Texts(TINY, torch.device("cpu")).batch(11):
        ask = tokenizer.id(":")
        for row, weight in zip(tokens.tolist(), weights, strict=True):
            prompt, end = row.index(ask) + 1, row.index(tokenizer.eos_id) + 1
            assert set(row[end:]) <= {tokenizer.pad_id}
            wanted = [1.0] * prompt + [TINY.completion_weight] * (end - prompt) + [0.0] * (len(row) - end)
            assert weight.tolist() == wanted


def test_loss_is_that_of_each_text_alone() -> None:
    """Neither padding nor neighbours matter. Compared in float64 with one text at a time."""
    model = trainer.initial(TINY).double()
    batch = [(tokens, weights.double()) for tokens, weights in Texts(TINY, torch.device("cpu")).batch(11)]
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for tokens, weights in batch:
        for row, weight in zip(tokens, weights, strict=True):
            length = int((weight > 0).sum())
            ops = SequenceOps([length])
            logits = model.logits(model(row[:length], torch.arange(length), ops), ops)
            told = logits.log_softmax(-1)[torch.arange(length - 1), row[1:length]]
            total -= (told * weight[1:length]).sum()
            count += float(weight[1:length].sum())
    torch.testing.assert_close(trainer.weighted_loss(model, batch), total / count, rtol=1e-12, atol=0)


def test_learning_rate_rises_then_falls() -> None:
    recipe = replace(TINY, steps=100, warmup=10, lr=1.0)
    rates = [trainer.lr_at(recipe, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert trainer.FINAL_LR <= rates[-1] < 2 * trainer.FINAL_LR


# Recipes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(steps=0), "steps must be at least 1"),
        (dict(batch=0), "batch must be at least 1"),
        (dict(longest=0), "longest must be at least 1"),
        (dict(pool=0), "pool must be at least 1"),
        (dict(lr=0.0), "lr must be a positive number"),
        (dict(lr=float("nan")), "lr must be a positive number"),
        (dict(completion_weight=-1.0), "completion_weight must be a positive number"),
        (dict(init_scale=float("inf")), "init_scale must be a positive number"),
        (dict(curriculum=1.5), "curriculum must be a share"),
        (dict(warmup=13), "warmup must be between 0 and 12 steps, not 13"),
        (dict(seed=-1), "seed must be"),
        (dict(parts=()), "parts is empty"),
        (dict(parts=(replace(PICTURE, weight=0.0),)), "weight above 0"),
        (dict(batch=1), "gives some part no sequence"),
        (dict(parts=(RecipePart("coim", 1),)), "did you mean 'coin'"),
        (dict(parts=(RecipePart("coin", 1, (("rendering", "song"),)),)), "Knob 'rendering'"),
        (dict(config=replace(TINY.config, vocab_size=99)), "vocab_size is 99"),
    ],
)  # fmt: skip
def test_bad_recipes_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecipe, match=said):
        replace(TINY, **change)


def test_texts_longer_than_the_model_are_named() -> None:
    recipe = replace(TINY, config=replace(TINY.config, max_positions=20))
    with pytest.raises(BadRecipe, match="the config has 20 positions"):
        trainer.train(recipe)


# The command


@pytest.fixture
def small_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`replaylens train coin-draft` with a recipe and a card that take a second."""
    monkeypatch.setitem(zoo.RECIPES, "coin-draft", TINY)
    monkeypatch.setattr(command, "CARD_EXAMPLES", 4)
    monkeypatch.setattr(command, "CARD_LENGTHS", (1, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("small_command")
def test_command_trains_and_writes_a_card(trained: Decoder, tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = CliRunner().invoke(app, ["train", "coin-draft", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["card.md", "model.safetensors", "replaylens.json", "tokenizer.json"]
    model, tokenizer = zoo.load(out)
    assert_same(model, trainer.train(command.changed(TINY, None, None)))
    assert tokenizer == TINY.tokenizer()
    card = (out / "card.md").read_text()
    assert weights_hash(model) in result.output and weights_hash(model) in card
    assert "replaylens train coin-draft --steps 12 --seed 3 --device cpu" in card


@pytest.mark.usefixtures("small_command")
def test_command_resumes(tmp_path: Path) -> None:
    asked = ["train", "coin-draft", "--steps", "10", "--seed", "5", "--out", str(tmp_path)]
    recipe, state = command.changed(TINY, 10, 5), tmp_path / command.STATE_FILE
    assert "Leave out --resume" in _flat(CliRunner().invoke(app, [*asked, "--resume"]).output)
    with pytest.raises(Interrupted):
        trainer.train(recipe, state=state, save_every=4, after_step=interrupt_at(7))
    assert "Add --resume" in _flat(CliRunner().invoke(app, asked).output)
    assert CliRunner().invoke(app, [*asked, "--resume"]).exit_code == 0
    assert not state.exists()
    assert_same(zoo.load(tmp_path)[0], trainer.train(recipe))


@pytest.mark.slow
@pytest.mark.usefixtures("small_command", "ctrl_c")
def test_command_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C long before the first regular save: the run is saved, and the message says how to resume."""
    asked = ["train", "coin-draft", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "weighted_loss", interrupted_loss(at=5))
        result = CliRunner().invoke(app, asked)
    assert result.exit_code == 130 and "Interrupted. To continue, run the same command with --resume." in _flat(result.stderr)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "weighted_loss", interrupted_loss(at=12 - 5 + 1))
        assert CliRunner().invoke(app, [*asked, "--resume"]).exit_code == 0, "it goes on after step 5: no eighth step"
    assert_same(zoo.load(tmp_path / "run")[0], trainer.train(command.changed(TINY, None, None)))


@pytest.mark.usefixtures("small_command")
def test_command_interrupted_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "Texts", stop)
    result = CliRunner().invoke(app, ["train", "coin-draft", "--out", str(tmp_path / "run")])
    assert result.exit_code == 130 and "--resume" not in result.stderr and not (tmp_path / "run").exists()


@pytest.mark.usefixtures("small_command")
@pytest.mark.usefixtures("watched")
def test_command_killed_in_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights exist but the card does not: --resume writes the card without another step."""
    asked = ["train", "coin-draft", "--out", str(tmp_path)]

    def die(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(zoo, "accuracy", die)
        assert isinstance(CliRunner().invoke(app, asked).exception, Interrupted)
    before = zoo.load(tmp_path)[0]
    result = CliRunner().invoke(app, [*asked, "--resume"])
    assert result.exit_code == 0 and "scoring held-out examples" in result.stderr, result.output
    assert "for the rest of an interrupted run" in (tmp_path / "card.md").read_text()
    assert_same(zoo.load(tmp_path)[0], before)


@pytest.mark.usefixtures("small_command")
@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_command_does_not_train_over_a_model(tmp_path: Path, more: list[str]) -> None:
    asked = ["train", "coin-draft", "--steps", "2", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, [*asked, *more])
    assert result.exit_code == 2 and "FolderExists: " in result.stderr and "holds a trained model" in _flat(result.stderr)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("small_command", "watched")
def test_command_leaves_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of somebody else in the folder of an unfinished run is told before the next step; what a killed run left goes."""
    asked = ["train", "coin-draft", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(zoo, "accuracy", lambda *_: (_ for _ in ()).throw(Interrupted()))
        CliRunner().invoke(app, asked)
    for name in ("card.md", "recipe.json"):
        (tmp_path / name).write_text("# mine")
        result = CliRunner().invoke(app, [*asked, "--resume"])
        assert result.exit_code == 2 and "replaylens did not write" in _flat(result.stderr), result.output
        assert (tmp_path / name).read_text() == "# mine"
        (tmp_path / name).unlink()
    for name in (f"{command.STATE_FILE}.7-0123abcd.tmp", f"{command.STATE_FILE}.part"):
        (tmp_path / name).write_bytes(b"half")
    assert CliRunner().invoke(app, [*asked, "--resume"]).exit_code == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"card.md", "model.safetensors", "replaylens.json", "tokenizer.json"}


def test_command_names_the_models(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-plane", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "UnsupportedModel: " in result.stderr and "coin-plain, coin-draft, coin-thinking" in _flat(result.stderr)


@pytest.mark.usefixtures("small_command")
def test_command_refuses_a_device_it_does_not_have(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-draft", "--device", "tpu", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "Use cpu or cuda" in _flat(result.output)


def _flat(output: str) -> str:
    """The text of an error box, without its frame and line breaks."""
    return " ".join(output.replace("│", " ").split())


# ---- thinking --------------------------------------------------------------------------------------------------------
# Training of Thinking-States models is deterministic and resumable for all methods, and the models learn.

SHAPE = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=106, max_positions=256, rotary_dim=8
)  # fmt: skip
PICTURE_OF_THINKING = RecipePart("coin", 1, (("rendering", "picture"),))
TINY_OF_THINKING = ThinkingRecipe(
    config=SHAPE,
    thinking=ThinkingConfig.for_backbone(SHAPE, 2, 1, 0, max_thought=3),
    parts=(PICTURE_OF_THINKING, RecipePart("coin", 1, (("rendering", "states"),))),
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


@pytest.mark.parametrize("method", swept(METHODS, "thinking"))
def test_same_bits_twice_and_after_an_interruption(method: Method, tmp_path: Path) -> None:
    recipe, state = replace(TINY_OF_THINKING, method=method, width=64), tmp_path / "training.safetensors"
    once = trainer_of_thinking.train(recipe)
    assert isinstance(once, ThinkingDecoder if method == "thinking" else Decoder)
    with pytest.raises(Interrupted):
        trainer_of_thinking.train(recipe, state=state, save_every=3, after_step=interrupt_at(8))
    assert same(trainer_of_thinking.train(recipe, state=state), once)
    short = replace(recipe, steps=2)
    assert not same(trainer_of_thinking.train(replace(short, seed=4)), trainer_of_thinking.train(short))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["coin", "variables"])
def test_it_learns_tokens_and_thoughts(task: str) -> None:
    recipe = replace(TINY_OF_THINKING if task == "coin" else TINY_OF_VARIABLES, steps=30)
    batch = trainer_of_thinking.texts_of(recipe, "cpu").batch(99)
    before, after = trainer_of_thinking.initial(recipe), trainer_of_thinking.train(recipe)
    with torch.no_grad():
        assert trainer_of_thinking.loss(after, batch) < 0.6 * trainer_of_thinking.loss(before, batch)


def test_every_part_gets_a_gradient() -> None:
    model = trainer_of_thinking.initial(TINY_OF_THINKING)
    trainer_of_thinking.loss(model, trainer_of_thinking.texts_of(TINY_OF_THINKING, "cpu").batch(0)).backward()
    assert all(bool(x.grad is not None and x.grad.abs().sum() > 0) for x in model.parameters())


def test_the_published_thought_loss_sums_over_the_chunks_of_a_text() -> None:
    """On texts of the same length, and thoughts of the same size, it is the mean over tokens times the chunks of a text."""
    model, batch = trainer_of_thinking.initial(TINY_OF_THINKING), trainer_of_thinking.texts_of(TINY_OF_THINKING, "cpu").batch(0)
    chunks = int(batch.thinks.sum(1).min())
    even = ChunkBatch(**{name: x[:, :chunks].clone() for name, x in vars(batch).items()})
    even.thoughts[..., 0], even.thoughts[..., 1:] = 7, TINY_OF_THINKING.thinking.eos_token
    with torch.no_grad():
        hidden = torch.randn(*even.tokens.shape, TINY_OF_THINKING.config.d_model, generator=torch.Generator().manual_seed(0))
        by_token, by_chunk = (trainer_of_thinking.thought_loss(model, hidden, even, over) for over in ("tokens", "chunks"))
    torch.testing.assert_close(by_chunk, chunks * by_token)
    assert chunks > 1 and by_chunk > 1.5 * by_token


def test_a_batch_without_a_prompt_chunk_has_no_thought_loss() -> None:
    """`cut` may leave nothing but answers: short prompts in large chunks."""
    model, batch = trainer_of_thinking.initial(TINY_OF_THINKING), trainer_of_thinking.texts_of(TINY_OF_THINKING, "cpu").batch(0)
    batch.thinks[:] = False
    hidden = torch.randn(*batch.tokens.shape, TINY_OF_THINKING.config.d_model)
    with torch.no_grad():
        assert [float(trainer_of_thinking.thought_loss(model, hidden, batch, over)) for over in ("tokens", "chunks")] == [
            0.0,
            0.0,
        ]


def test_the_thought_loss_is_part_of_the_recipe() -> None:
    short = replace(TINY_OF_THINKING, steps=2)
    published = replace(short, thought_loss="chunks")
    assert not same(trainer_of_thinking.train(short), trainer_of_thinking.train(published))
    assert "thought_loss" in published.to_json() and "thought_loss" not in TINY_OF_THINKING.to_json()
    with pytest.raises(BadRecipe, match=r"Unknown thought_loss 'words'\. Use one of tokens, chunks"):
        replace(TINY_OF_THINKING, thought_loss="words")


def test_a_cut_text_goes_on_from_its_state() -> None:
    """Skipped chunks affect the loss only through their states."""
    recipe = replace(TINY_OF_THINKING, width=64, cut=True)
    assert {trainer_of_thinking.left_out(step, 32) > 0 for step in range(0, 40, 2)} == {False}
    assert all(0 < trainer_of_thinking.left_out(step, 32) <= 16 for step in range(1, 40, 2))
    model, batch = trainer_of_thinking.initial(recipe), trainer_of_thinking.texts_of(recipe, "cpu").batch(1)
    first = 3 + int(batch.continues[0, 3:].nonzero()[0])  # a chunk that continues the one before it
    one, other = (replace(batch, **{name: x.clone()}) for name, x in (("tokens", batch.tokens), ("thoughts", batch.thoughts)))
    one.tokens[:, :first] = 5
    other.thoughts[:, first - 1] = torch.tensor([7, 1])[: other.thoughts.shape[-1]]
    with torch.no_grad():
        whole = trainer_of_thinking.loss(model, batch, first)
        assert trainer_of_thinking.loss(model, one, first) == whole
        assert trainer_of_thinking.loss(model, other, first) != whole
    short = replace(recipe, steps=2)
    assert not same(trainer_of_thinking.train(short), trainer_of_thinking.train(replace(short, cut=False)))
    with pytest.raises(BadRecipe, match="has no states"):
        replace(TINY_OF_THINKING, method="cot", cut=True)


def test_from_a_trained_backbone() -> None:
    backbone, _ = zoo.load_embedded("coin-plain")
    recipe = replace(TINY_OF_THINKING, config=backbone.config)
    model = trainer_of_thinking.initial(recipe, backbone)
    assert isinstance(model, ThinkingDecoder)
    assert same(model.backbone, backbone)
    with pytest.raises(BadRecipe, match="config differs from the recipe's"):
        trainer_of_thinking.initial(TINY_OF_THINKING, backbone)


def test_a_chain_of_thought_has_as_much_time_beside_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on for longer than `PATIENCE` allows it is wrong, however many tokens its batch takes for others."""
    config, end = SimpleNamespace(eos_token=9), 9
    short, long = (ChunkedText((1,), (), (*[2] * count, end, 5), count + 2) for count in (3, 30))
    late = [*[4] * (len(short.completion) + scoring.PATIENCE - 2), end, 5]  # the answer is the last token that it has time for
    for said, answered in (late, True), ([4, *late], False):
        monkeypatch.setattr(scoring, "generate", lambda _, prompts, *__, said=said: [list(said) for _ in prompts])
        for company in [short], [short, long]:
            found = scoring._written(None, config, company)[0]  # type: ignore[arg-type]
            assert (found.answered, found.thought) == (answered, False)


def test_scores_count_only_what_the_model_itself_says() -> None:
    """An untrained model scores 0 on its thoughts, whatever gold thoughts the scoring starts from."""
    examples = zoo.held_out(PICTURE_OF_THINKING, 2, 6)
    found = score(
        trainer_of_thinking.initial(TINY_OF_THINKING),
        "thinking",
        TINY_OF_THINKING.thinking,
        TINY_OF_THINKING.tokenizer(),
        examples,
    )  # type: ignore[arg-type]
    assert not any(s.thought for s in found)
    assert all(s.rounds > 1 for s in found)


def test_greedy_continuations_are_those_of_whole_passes() -> None:
    backbone, tokenizer = zoo.load_embedded("coin-draft")
    prompts = [tokenizer.encode(example.prompt) for n in (1, 4, 2) for example in zoo.held_out(PICTURE_OF_THINKING, n, 1)]
    from replaylens.engine.model.ops import SequenceOps

    for prompt, new in zip(prompts, generate(backbone, prompts, 6), strict=True):
        path = list(prompt)
        for token in new:
            ops = SequenceOps([len(path)])
            residual = backbone(torch.tensor(path), torch.arange(len(path)), ops)
            assert token == int(backbone.logits(residual[-1:], ops).argmax())
            path.append(token)


def test_a_recipe_for_another_task() -> None:
    recipe = thinking_zoo.for_task(TINY_OF_THINKING, "shell", 2, chunk=4, max_thought=8)
    model = trainer_of_thinking.train(replace(recipe, steps=2, warmup=0))
    assert isinstance(model, ThinkingDecoder)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_command(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY_OF_THINKING)
    monkeypatch.setattr("replaylens.commands.training.CARD_EXAMPLES", 2)
    monkeypatch.setattr("replaylens.commands.training.CARD_LENGTHS", (1,))
    arguments = ["train", "coin-thinking", "--steps", "3", "--method", method, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"--method {method}" in (tmp_path / "card.md").read_text()
    (thinking_zoo.load if method == "thinking" else zoo.load)(tmp_path)


@pytest.mark.slow
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
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY_OF_THINKING)
    result = CliRunner().invoke(app, ["train", *arguments, "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert says in result.output


# ---- chunks ----------------------------------------------------------------------------------------------------------
# Gold thoughts belong to the chunk with the earliest token that decides them. Prompts and completions share no chunk.

PICTURE_OF_CHUNKS = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
CONFIG = ThinkingConfig(chunk=2, read_layer=2, eos_token=WordTokenizer.eos_id, pad_token=WordTokenizer.pad_id, max_thought=4)


def coin(**knobs: object) -> tuple[WordTokenizer, list[Example]]:
    task = tasks.get("coin")(**knobs)
    return WordTokenizer(task.vocabulary()), task.examples(20)


def picture() -> tuple[WordTokenizer, Example]:
    """The sentence of the fifth picture, as an example of the task."""
    task = tasks.get("coin")()
    example = replace(task.example(0), prompt=PICTURE_OF_CHUNKS, completion=" heads.", answer=" heads")
    return WordTokenizer(task.vocabulary()), example


def test_the_pictures_sentence() -> None:
    tokenizer, example = picture()
    text = chunked(example, tokenizer, CONFIG, "thinking")
    shown = {
        tokenizer.decode(text.prompt[2 * i : 2 * i + 2]): tokenizer.decode(thought)
        for i, thought in enumerate(text.thoughts)
        if len(thought) > 1
    }
    assert shown == {" Alice flips": " tails", " Bob flips": " heads"}
    assert len(text.prompt) == 20, "19 tokens and one pad"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 50])
@pytest.mark.parametrize("method", METHODS)
def test_borders_and_places(chunk: int, method: Method) -> None:
    config = replace(CONFIG, chunk=chunk, max_thought=16)
    tokenizer, examples = coin(rendering="states")
    for example in examples:
        text = chunked(example, tokenizer, config, method)
        assert len(text.prompt) % chunk == 0
        assert len(text.thoughts) == len(text.prompt) // chunk
        words = [word for thought in text.thoughts for word in thought[:-1]]
        assert tokenizer.decode(words) == "".join(words for _, words in example.thoughts)
        _, offsets = tokenizer.encode_with_offsets(example.prompt)
        for read, _ in example.thoughts:
            earliest = next(i for i, (_, end) in enumerate(offsets) if end >= read)
            assert len(text.thoughts[earliest // chunk]) > 1
        assert text.completion[text.answer - 1] == tokenizer.id(example.answer)
        if method == "cot":
            assert text.completion[: len(words) + 1] == (*words, config.eos_token)


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_with_steps_can_be_cut(name: str) -> None:
    task = tasks.get(name)()
    tokenizer = WordTokenizer(sorted(set(task.vocabulary())))
    for example in task.examples(5):
        text = chunked(example, tokenizer, replace(CONFIG, chunk=4, max_thought=64), "thinking")
        assert tokenizer.decode(text.prompt) == example.prompt


def test_a_thought_that_does_not_fit() -> None:
    tokenizer, examples = coin(rendering="states", flips=8)
    with pytest.raises(BadRequest, match="Raise max_thought, or use smaller chunks"):
        chunked(examples[0], tokenizer, replace(CONFIG, chunk=50), "thinking")


def test_packed_rows_hold_whole_texts_and_states_do_not_cross_them() -> None:
    tokenizer, examples = coin(flips=(1, 3))
    texts = [chunked(example, tokenizer, CONFIG, "thinking") for example in examples]
    table = ChunkTable(texts, CONFIG, 10.0, torch.device("cpu"))
    row = table.row(np.array([3, 5, 7, 9, 11]), 64)
    batch = table.batch(row[None])
    kept = [i for i, end in zip([3, 5, 7, 9, 11], np.cumsum(table.sizes[[3, 5, 7, 9, 11]]), strict=True) if end <= 64]
    assert kept and kept != [3, 5, 7, 9, 11]
    ids = [token for token in batch.tokens.flatten().tolist() if token not in (CONFIG.pad_token, CONFIG.eos_token)]
    assert tokenizer.decode(ids) == "".join(examples[i].text for i in kept)
    assert (~batch.continues[0]).nonzero().flatten().tolist()[: len(kept)] == np.cumsum([0, *table.sizes[kept[:-1]]]).tolist()
    assert not bool(batch.weights[0][batch.tokens[0] == CONFIG.pad_token].any())
    assert int(batch.thinks.sum()) == sum(len(texts[i].thoughts) for i in kept)


def test_padded() -> None:
    assert padded([5, 6, 7], CONFIG) == (5, 6, 7, CONFIG.pad_token)
    assert padded([5, 6], CONFIG) == (5, 6)


# ---- variables -------------------------------------------------------------------------------------------------------
# `replaylens train coin-thinking --task variables`: a task other than the recipe's own, with every method.

SHAPE_OF_VARIABLES = ModelConfig(
    num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=31, max_positions=256, rotary_dim=8
)  # fmt: skip
TINY_OF_VARIABLES = ThinkingRecipe(
    config=SHAPE_OF_VARIABLES,
    thinking=ThinkingConfig.for_backbone(SHAPE_OF_VARIABLES, 4, 1, 0, max_thought=3),
    parts=(RecipePart("variables", 1),),
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
    table = trainer_of_thinking.texts_of(replace(TINY_OF_VARIABLES, longest=12), "cpu").table
    tokens, _, thoughts, thinks, _ = table.columns
    assert thoughts.shape[1] == 3 and tokens.shape[1] == 4
    sizes = (thoughts[thinks] != 1).sum(1)
    assert set(sizes.tolist()) == {0, 2}


@pytest.mark.parametrize("method", ["thinking", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("none", "cot"))])
def test_the_command_of_variables(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking_zoo.RECIPES, "coin-thinking", TINY_OF_VARIABLES)
    monkeypatch.setattr("replaylens.commands.training.CARD_EXAMPLES", 2)
    options = ["--task", "variables", "--longest", "2", "--method", method, "--steps", "3"]
    result = CliRunner().invoke(app, ["train", "coin-thinking", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "card.md").read_text()
    assert "--task variables" in card and "| steps | variables |" in card
    _, tokenizer = (thinking_zoo.load if method == "thinking" else zoo.load)(tmp_path)
    assert tokenizer.encode(" a 0") == [tokenizer.id(" a"), tokenizer.id(" 0")]


# ---- cards and shares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "batch", "counts"),
    [
        ([1, 1], 8, [4, 4]),
        ([1, 2], 8, [3, 5]),
        ([1, 1, 1], 8, [3, 2, 3]),
        ([0.5, 0.25, 0.25], 6, [3, 1, 2]),
        ([7], 5, [5]),
        ([1, 9], 4, [0, 4]),
    ],
)
def test_shares_of_a_batch_are_rounded_and_add_up(weights: list[float], batch: int, counts: list[int]) -> None:
    """Each part ends where its share of the whole ends, to the nearest text."""
    given = SimpleNamespace(parts=[SimpleNamespace(weight=weight) for weight in weights], batch=batch)
    assert Recipe.sequences(given) == counts and sum(counts) == batch  # type: ignore[arg-type]


def test_cards_tell_every_number_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(num_layers=2, d_model=3, num_heads=4, d_head=5, d_mlp=6)
    thinking = SimpleNamespace(chunk=7, write_layer=8, read_layer=9, max_thought=10)
    parts = [
        SimpleNamespace(task="coin", knobs=(("rendering", "wei"),), weight=0.25),
        SimpleNamespace(task="boxes", knobs=(), weight=0.75),
    ]
    recipe = SimpleNamespace(
        config=config, thinking=thinking, parts=parts, backbone=None, method="states", longest=11, pool=12,
        completion_weight=13.5,
        steps=14, batch=15, seed=16, lr=0.017, precision="bf16", curriculum=0.18, warmup=19, init_scale=0.2,
    )  # fmt: skip
    model: Any = torch.nn.Linear(30, 40)
    monkeypatch.setattr(command, "weights_hash", lambda given: "hash")
    monkeypatch.setattr(command, "accuracies", lambda *given: [f"accuracies of {given[2:]}"])
    shape = "layers: 2, d_model 3, 4 heads of 5, gated MLP of 6, rotary positions, RMSNorm, tied embeddings; 1,240 weights"
    growth = "the longest text grows from 1 step to 11 over the first 18%"
    assert command.thinking_card("mine", recipe, model, "made", 21, True).splitlines() == [  # type: ignore[arg-type]
        "# mine", "", "| | |", "|---|---|",
        f"| backbone | from scratch; {shape} with T and C, float32 |",
        "| method | states; chunks of 7 tokens, state added after block 8, T reads block 9, thoughts of up to 10 tokens |",
        "| data | boxes, coin: wei 0.25, boxes 0.75; 1 to 11 steps, 12 examples per part and length |",
        "| held out | every eighth prompt, by its hash, for every seed |",
        "| loss | next token (after the prompt: weight 13.5) + tokens of the gold thoughts |",
        f"| run | 14 steps of 15 rows, seed 16; AdamW, peak rate 0.017, cosine, bf16; {growth} |",
        "| made by | made |", "| weights | `hash` |", "", "## Accuracy", "", "accuracies of (21, True)",
    ]  # fmt: skip
    betas = f"betas {trainer.BETAS[0]} and {trainer.BETAS[1]}, weight decay {trainer.WEIGHT_DECAY}"
    assert command.facts(recipe, model, "made", "the data", "flip") == [  # type: ignore[arg-type]
        "| | |", "|---|---|", f"| model | {shape}, float32 |", "| data | the data |",
        "| held out | every eighth prompt, by its hash, for every seed |",
        "| loss | next token at every position; tokens after the prompt have weight 13.5, others 1 |",
        f"| run | 14 steps of 15 texts, seed 16; {growth.replace('1 step', '1 flip')} of the steps |",
        f"| optimizer | AdamW, {betas}; peak learning rate 0.017 after 19 steps, cosine down to {trainer.FINAL_LR:.0%}; "
        "initial matrices scaled by 0.2 |",
        "| made by | made |", "| weights | `hash` |",
    ]  # fmt: skip


def test_lines_of_a_card_are_shares_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers before right thoughts; a length without held-out prompts says so."""
    recipe = SimpleNamespace(
        parts=[RecipePart("boxes", 1.0)], longest=2, tokenizer=lambda: "t", method="m", thinking="t", precision="p"
    )
    scores = [SimpleNamespace(answered=i < 3, thought=i < 1) for i in range(4)]
    monkeypatch.setattr(command, "score", lambda *given, **options: scores)
    monkeypatch.setattr(command, "tested", lambda part, length, number: [1] * number if length == 2 else [])
    said = command.accuracies(recipe, None, 4)  # type: ignore[arg-type]
    assert said[0].startswith("Percent of 4 held-out examples") and said[1] == "above 2 were never trained on."
    assert said[3:] == ["| steps | boxes |", "|---:|---:|", f"| 1 | {command.NONE_HELD_OUT} |", "| 2 | 75.0% / 25.0% |"]


def test_two_chunks_may_fill_all_positions() -> None:
    most = SHAPE.max_positions
    for chunk, fits in ((most // 2, True), (most // 2 + 1, False)):
        thinking = replace(TINY_OF_THINKING.thinking, chunk=chunk)
        if fits:
            assert replace(TINY_OF_THINKING, thinking=thinking).thinking.chunk == chunk
        else:
            with pytest.raises(BadRecipe, match=f"Chunks of {chunk} tokens are too large: .* has {most} positions"):
                replace(TINY_OF_THINKING, thinking=thinking)
