"""The trainer is deterministic and resumable, trains on nothing held out, and names what is wrong with a recipe."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.commands import train as command
from replaylens.engine.errors import BadRecipe
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.loading import weights_hash
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.terminal import defer_interrupt
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import trainer
from replaylens.engine.training.recipe import Part, Recipe
from replaylens.engine.training.trainer import Texts
from tests.interrupted import Interrupted, interrupt_at

PICTURE = Part("coin", 3, (("rendering", "picture"),))
STEPS = Part("coin", 1, (("rendering", "steps"),))
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


@pytest.mark.parametrize("stop", [1, 5, 6, 11, 12])
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


def test_interrupted_twice(trained: Decoder, tmp_path: Path) -> None:
    state = tmp_path / "training.safetensors"
    for stop in (4, 9):
        with pytest.raises(Interrupted):
            trainer.train(TINY, state=state, save_every=2, after_step=interrupt_at(stop))
    assert_same(trainer.train(TINY, state=state), trained)


def test_a_crash_while_saving_leaves_the_older_save(trained: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        trainer.train(TINY, state=state, save_every=4, after_step=interrupt_at(4))
    kept = state.read_bytes()

    def half_a_file(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(trainer, "save_file", half_a_file)
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
        (dict(parts=(Part("coim", 1),)), "did you mean 'coin'"),
        (dict(parts=(Part("coin", 1, (("rendering", "song"),)),)), "Knob 'rendering'"),
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
    assert result.exit_code == 2 and "RunExists: " in result.stderr and "holds a trained model" in _flat(result.stderr)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_command_names_the_models(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-plane", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "UnknownModel: " in result.stderr and "coin-plain, coin-draft, coin-thinking" in _flat(result.stderr)


@pytest.mark.usefixtures("small_command")
def test_command_refuses_a_device_it_does_not_have(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "coin-draft", "--device", "tpu", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "Use cpu or cuda" in _flat(result.output)


def _flat(output: str) -> str:
    """The text of an error box, without its frame and line breaks."""
    return " ".join(output.replace("│", " ").split())
