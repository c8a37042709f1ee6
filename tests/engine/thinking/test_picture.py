"""The embedded model runs the sentence of the fifth picture, and tracks stories longer than those in training."""

from functools import cache

import pytest
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine.engine import Engine
from replaylens.engine.replay.run import Run
from replaylens.engine.request.edits import Edit
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.prefill import GUESSES, Guess
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import embedded_thinking as thinking_zoo
from replaylens.engine.training.recipe import Part
from replaylens.engine.zoo import CHECKPOINTS

SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"


@cache
def engine() -> ThinkingEngine:
    loaded = Engine.load("coin-thinking")
    assert isinstance(loaded, ThinkingEngine)
    return loaded


@pytest.mark.parametrize("guess", GUESSES)
def test_the_pictures_sentence(guess: Guess) -> None:
    branch = engine().prompt(SENTENCE, guess=guess).generate(2)
    drawn = branch.picture()
    said = {"".join(chunk.tokens): chunk.thought for chunk in drawn.chunks[:-1]}
    assert said.pop(" Alice flips") == (" tails", "<EOS>")
    assert said.pop(" Bob flips") == (" heads", "<EOS>")
    assert set(said.values()) == {("<EOS>",)}
    assert branch.text == SENTENCE + " heads."
    received = ["".join(chunk.tokens) for chunk in drawn.chunks if chunk.state]
    assert received == [", then", ". What's"], "states go to the chunks after the flips, and nowhere else"
    assert len(drawn.rounds) == {"sequential": 10, "empty": 3, "drafted": 3}[guess]


def test_tree_and_timeline_strike_out_thoughts_that_were_rolled_back() -> None:
    """Round 1 guesses that nobody thinks: Alice's chunk does, so what was thought after it is rolled back."""
    recorded = Engine.load("coin-thinking", record=True)
    assert isinstance(recorded, ThinkingEngine)
    branch = recorded.prompt(SENTENCE).generate(2)
    trunk, first, _ = branch.tree().paths
    assert [token.thought for token in trunk.tokens if token.thought] == [(" tails", "<EOS>"), (" heads", "<EOS>")]
    assert [token.text for token in trunk.tokens if token.thought] == [" flips", " flips"]
    dropped = branch.thoughts.rounds[0].dropped
    assert [token.thought[0] for token in first.tokens if token.thought] == [
        recorded.text.token(said[0]) for said in dropped if len(said) > 1
    ]
    assert any(token.thought for token in first.tokens) and {t.state.value for t in first.tokens} == {"rejected"}
    html = branch.tree()._repr_html_()
    assert html.count('class="rl-said">Z  tails') >= 1 and "{Z  tails <EOS>}" in str(branch.tree())
    frames = branch.timeline().frames
    assert [frame.phase.value for frame in frames[:5]] == ["prefill", "rollback", "prefill", "rollback", "accept"]
    struck = [slot for slot in frames[1].generated if slot.state.value == "rejected"]
    assert len(struck) == len(dropped) and struck[0].name == "Z4"
    assert (frames[0].kv.draft, frames[1].kv.total) == (20, 8)
    assert 'class="cross"' in branch.timeline().still(frames[1]) and 'class="cross"' not in branch.timeline().still(frames[0])


def test_another_state_in_its_place_turns_thought_and_answer() -> None:
    """The replacement is the state after the first flip of a story that begins with tails."""
    root = engine().prompt(SENTENCE, sites="S")
    other = engine().prompt(SENTENCE.replace("heads", "tails"), sites="S")
    swapped = Edit.interchange("thinking.state", other.activations["thinking.state"][8:10], slice(8, 10))
    (turned,) = root.fork(edits=[swapped])
    words = [engine().text.decode(t.tokens) for t in turned.thoughts.chunks if not t.empty]
    assert words == [" tails", " tails"]
    assert turned.generate(2).text == SENTENCE + " tails."


@pytest.mark.parametrize(("rendering", "length"), [("picture", 8), ("picture", 12), ("states", 8)])
def test_held_out_stories(rendering: str, length: int) -> None:
    examples = zoo.held_out(Part("coin", 1, (("rendering", rendering),)), length, 12)
    run = engine().replay(examples)
    assert isinstance(run, Run) and run.accuracy == 1.0
    for result in run:
        words = [engine().text.decode(t.tokens) for t in result.thoughts.chunks if not t.empty]
        assert "".join(words) == "".join(said for _, said in result.example.thoughts)


def test_its_card_and_size() -> None:
    folder = CHECKPOINTS / "coin-thinking"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    assert "coin-thinking" in thinking_zoo.names() and engine().fingerprint.weights in (folder / "card.md").read_text()


def test_the_command_shows_the_picture() -> None:
    told = CliRunner().invoke(app, ["replay", "--model", "coin-thinking", "--n", "2", "--quiet"])
    assert told.exit_code == 0 and "2 examples, 100.0% correct" in told.output, told.output
    assert "round 1" in told.output and "|S|" in told.output
