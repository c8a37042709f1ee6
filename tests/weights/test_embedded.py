"""The embedded models ship, are small, and are as good as their cards say; and the lens on them."""

from functools import cache
from pathlib import Path

import pytest
import torch

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.tasks import Example, WordTokenizer
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking
from replaylens.weights.zoo import CHECKPOINTS, PLAIN, THINKING
from tests.devices import covering

NAMES = ("coin-plain", "coin-draft")
FACES = ("picture, from heads", "picture, from tails")


@cache
def embedded(name: str) -> tuple[Decoder, WordTokenizer]:
    return zoo.load_embedded(name)


@cache
def examples(test: str, length: int, number: int) -> list[Example]:
    return zoo.held_out(zoo.TESTS[test], length, number)


def accuracy(name: str, test: str, lengths: range, number: int) -> float:
    """Accuracy over `number` examples of each length."""
    return zoo.accuracy(*embedded(name), [x for length in lengths for x in examples(test, length, number)])


# What ships


def test_names() -> None:
    assert zoo.names() == NAMES


def test_the_names_of_the_zoo_are_those_of_recipes_and_folders() -> None:
    """The engine looks models up in `PLAIN` and `THINKING` without loading a recipe, so the three lists must agree."""
    assert (zoo.names(), embedded_thinking.names()) == (PLAIN, THINKING)
    assert sorted(PLAIN + THINKING) == sorted(folder.name for folder in CHECKPOINTS.iterdir() if folder.is_dir())
    thinking = {folder.parent.name for folder in CHECKPOINTS.glob("*/thinking.json")}
    assert set(THINKING) == thinking  # a plain model in THINKING would load as another kind


@pytest.mark.parametrize("ask", [zoo.recipe, zoo.load_embedded])
def test_an_unknown_name_lists_the_known(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(zoo.UnsupportedModel, match=r"Unknown embedded model 'gpt-5'\. Known: coin-plain, coin-draft"):
        ask("gpt-5")


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_is_whole_and_small(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (CHECKPOINTS / name).iterdir()}
    assert sorted(files) == ["card.md", "model.safetensors", "replaylens.json", "tokenizer.json"]
    assert sum(files.values()) < 4_000_000


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_is_of_the_recipe(name: str) -> None:
    """Fails if the task's words change: the models must then be retrained."""
    model, tokenizer = embedded(name)
    assert model.config == zoo.recipe(name).config
    assert tokenizer == zoo.recipe(name).tokenizer()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_both_models_have_one_tokenizer() -> None:
    assert embedded("coin-plain")[1] == embedded("coin-draft")[1]


# Accuracy


@pytest.mark.parametrize("test", FACES)
def test_plain_answers(test: str) -> None:
    assert accuracy("coin-plain", test, range(1, 9), 25) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("test", ["steps", "states", "wei"])
def test_plain_knows_the_other_renderings(test: str) -> None:
    assert accuracy("coin-plain", test, range(1, 9), 8) >= 0.98


def test_draft_is_clearly_worse() -> None:
    for test in FACES:
        assert accuracy("coin-draft", test, range(1, 3), 25) >= 0.98, "easy questions it can answer"
        assert accuracy("coin-draft", test, range(5, 9), 50) < 0.9
    assert accuracy("coin-draft", "steps", range(3, 9), 8) < 0.1


@pytest.mark.parametrize("test", zoo.TESTS)
def test_draft_agrees_on_most_tokens(test: str) -> None:
    """A drafter that disagrees on most tokens would be useless."""
    same = torch.cat([_greedy(embedded("coin-plain"), x) == _greedy(embedded("coin-draft"), x) for x in examples(test, 4, 15)])
    assert same.float().mean() > 0.7


def _greedy(embedded: tuple[Decoder, WordTokenizer], example: Example) -> torch.Tensor:
    """The most likely next token at every position of the completion."""
    model, tokenizer = embedded
    ids = tokenizer.encode(example.text)
    ops = SequenceOps([len(ids)])
    best = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), ops), ops).argmax(-1)
    return best[len(tokenizer.encode(example.prompt)) - 1 :]


@pytest.mark.parametrize("name, test", covering(NAMES, ["picture, from tails", "steps", "wei"]))
def test_solved_is_what_greedy_decoding_gives(name: str, test: str) -> None:
    """`solved` reads one pass over the right text; here every token is fed back. 5 actors, and 9, which are too many."""
    model, tokenizer = embedded(name)
    some = [*examples(test, 5, 1), *examples(test, 9, 1)]
    decoded = []
    for example in some:
        ids, wanted = tokenizer.encode(example.prompt), tokenizer.encode(zoo.up_to_answer(example))
        while len(ids) < len(wanted):
            ops = SequenceOps([len(ids)])
            residual = model(torch.tensor(ids), torch.arange(len(ids)), ops)
            ids.append(int(model.logits(residual[-1:], ops).argmax()))
        decoded.append(ids == wanted)
    assert zoo.solved(model, tokenizer, some, batch=4) == decoded


# Cards


def card(name: str) -> str:
    return (CHECKPOINTS / name / "card.md").read_text(encoding="utf-8")


def card_accuracy(name: str, test: str, length: int) -> float:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card(name).splitlines() if line[:1] == "|"]
    header = next(row for row in rows if row[0] == "actors")
    row = next(row for row in rows if row[0] == str(length))
    return float(row[header.index(test)].rstrip("%")) / 100


@pytest.mark.parametrize("name", NAMES)
def test_card_is_of_these_weights_and_this_recipe(name: str) -> None:
    recipe = zoo.recipe(name)
    assert weights_hash(embedded(name)[0]) in card(name)
    assert f"replaylens train {name} --steps {recipe.steps} --seed {recipe.seed} --device" in card(name)
    assert f"1 to {recipe.longest} actors" in card(name)


@pytest.mark.parametrize("test", FACES)
def test_card_promises_enough(test: str) -> None:
    assert all(card_accuracy("coin-plain", test, length) >= 0.99 for length in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "test", "length"),
    [
        ("coin-plain", "picture, from tails", 8),
        ("coin-plain", "picture, from heads", 12),
        ("coin-draft", "picture, from heads", 7),
        ("coin-draft", "wei", 5),
    ],
)
def test_card_numbers_can_be_measured_again(name: str, test: str, length: int) -> None:
    """On the same 500 examples. Rounding on another machine may change a tie, so two examples may differ."""
    measured = zoo.accuracy(*embedded(name), examples(test, length, 500))
    assert abs(measured - card_accuracy(name, test, length)) <= 2 / 500 + 1e-9


def test_checkpoints_are_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    zoo.load_embedded("coin-draft")
