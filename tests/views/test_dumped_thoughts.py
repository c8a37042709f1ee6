"""The report page of a Thinking-States model: the picture drawn from files equals that of the live run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.display import word
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.replay.run import Run
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.prefill import GUESSES, Guess
from replaylens.engine.thinking.thoughts import ThinkingRecording
from replaylens.views import examples
from replaylens.views.examples import DumpedThoughts
from replaylens.views.report import ReportPage
from replaylens.views.thoughts import DrawnRound, Thinking
from tests.engine.thinking.reference import thinking_model
from tests.views.checks import assert_harmless
from tests.views.conftest import HostileTokenizer
from tests.views.test_report import blocks_of

CHUNK = 3
COIN = tasks.get("coin")(flips=(1, 4), seed=3)


def thinker(guess: Guess = "empty") -> ThinkingEngine:
    words = HostileTokenizer(tasks.get("coin").vocabulary())
    shape = ModelConfig(
        num_layers=3, d_model=32, num_heads=2, num_kv_heads=2, d_head=16, d_mlp=48, vocab_size=words.vocab_size,
        max_positions=256, rotary_dim=16,
    )  # fmt: skip
    return ThinkingEngine(thinking_model(shape, chunk=CHUNK), words, guess=guess)


def replayed(guess: Guess = "empty") -> Run:
    run = thinker(guess).replay(COIN.examples(4), sites="STCZ", drafter="lens", max_new=6)
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def thinking_dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return replayed().save(tmp_path_factory.mktemp("thinking"), examples_per_shard=3)


def pictures(dump: Dump, engine: ThinkingEngine) -> list[Thinking]:
    found = [example.thinking for example in examples.examples(dump, lambda token: word(engine.text, token))]
    return [picture for picture in found if picture is not None]


@pytest.mark.parametrize("guess", GUESSES)
def test_a_dumped_picture_is_the_live_one(guess: Guess, tmp_path: Path) -> None:
    """Chunks, words, probabilities, states and rounds are equal, and so are the thoughts of rolled-back suffixes."""
    run = replayed(guess)
    found = pictures(run.save(tmp_path), run.engine)  # type: ignore[arg-type]
    assert len(found) == len(run) and any(chunk.thinks for picture in found for chunk in picture.chunks)
    for number, (picture, result) in enumerate(zip(found, run, strict=True)):
        live = run.picture(number)
        assert isinstance(live, Thinking)
        assert [len(chunk.tokens) for chunk in picture.chunks[:-1]] == [CHUNK] * len(result.thoughts.chunks)
        for mine, other in zip(picture.chunks, live.chunks, strict=True):
            assert (mine.tokens, mine.thought, mine.facts) == (other.tokens, other.thought, other.facts)
            if mine.thought:  # an answer may be shorter than the state it receives
                assert mine.state == pytest.approx(other.state, rel=1e-6)
        without = [[replace(each, dropped=()) for each in rounds] for rounds in (picture.rounds, live.rounds)]
        assert without[0] == without[1]
        said = [[[c.thought for c in each.dropped] for each in rounds] for rounds in (picture.rounds, live.rounds)]
        assert said[0] == said[1], "the words of thoughts that were rolled back"
        rolled_back = [path for path in result.rejected if path.fork_position < result.num_prompt]
        dropped = [each for each in picture.rounds if each.dropped]
        assert bool(dropped) == (guess != "sequential")
        for each, path in zip(dropped, rolled_back, strict=True):
            assert isinstance(path.activations, ThinkingRecording)
            had = path.activations.thoughts.chunks[each.kept : each.last]
            assert [len(chunk.thought) for chunk in each.dropped] == [len(thought.tokens) for thought in had]
            first = [word(run.engine.text, t.tokens[0]) if len(t.tokens) > 1 else "<EOS>" for t in had]
            assert [chunk.thought[0] for chunk in each.dropped] == first


def test_thoughts_of_other_rows_give_another_picture(thinking_dump: Dump) -> None:
    """Negative control: thought rows shifted by one give another picture."""
    frame = thinking_dump.files.frame(0)
    rows = frame[frame["example"] == 0]
    example = next(examples.examples(thinking_dump))
    thoughts = DumpedThoughts.of(thinking_dump, 0, str)
    assert thoughts is not None
    moved = replace(thoughts, tokens=np.roll(thoughts.tokens, 1, axis=0), plan=replace(thoughts.plan, rejected=False))
    assert moved.picture(rows, example.tree).chunks != thoughts.picture(rows, example.tree).chunks


def test_the_page_shows_it(thinking_dump: Dump) -> None:
    """The page has one column per chunk, rolled-back thoughts struck through, and the tree below, whatever the words are."""
    html = ReportPage(thinking_dump).html()
    fragments = blocks_of(html)
    assert_harmless(html, 2 + html.count('class="rl-block"'))
    for example, fragment in zip(examples.examples(thinking_dump), fragments, strict=True):
        picture = example.thinking
        assert picture is not None
        found = assert_harmless(fragment, scripts=0)
        classes = [value or "" for name, value in found.attributes if name == "class"]
        dropped = sum(len(each.dropped) for each in picture.rounds)
        assert classes.count("rl-thinking") == classes.count("rl-tree") == 1
        assert classes.count("rl-chunk") == len(picture.chunks)
        asked = sum(bool(chunk.thought) for chunk in picture.chunks)  # T is not run on generated tokens
        assert classes.count("rl-blocks") == asked and 0 < len(picture.chunks) - asked <= 1
        assert sum(c.startswith("rl-thought") for c in classes) == asked + dropped
        assert dropped and "rl-bar rl-rejected" not in classes, "every rolled-back chunk tells its thought"
        tips = [value or "" for name, value in found.attributes if name == "data-tip"]
        assert any("rolled back in round 1\nstate added\t" in tip for tip in tips)


def test_a_plain_model_has_none(dump: Dump) -> None:
    assert all(example.thinking is None for example in examples.examples(dump))
    assert not any("rl-thinking" in fragment for fragment in blocks_of(ReportPage(dump).html()))


@pytest.mark.parametrize(
    ("options", "shown"),
    [({"sites": "Z"}, True), ({"rejected": False}, True), ({"sites": "S"}, False), ({"positions": "generated"}, False)],
)
def test_dumps_that_hold_less(options: dict[str, Any], shown: bool, tmp_path: Path) -> None:
    """The page says that data is missing or leaves it out, and never invents it."""
    engine = thinker()
    dump = write_dump(engine, make_plan(engine, COIN, 2, max_new=4, **options), tmp_path)
    assert dump is not None
    found = pictures(dump, engine)
    assert len(found) == 2 * shown
    for picture in found:
        assert ("not kept" in str(picture)) == ("sites" in options), "states"
        assert ("S1 not kept" in picture._repr_html_()) == ("sites" in options)
        assert bool(picture.rounds) == options.get("rejected", True)


def test_rounds_are_told_with_their_thoughts(thinking_dump: Dump) -> None:
    (picture, *_) = pictures(thinking_dump, thinker())
    each = next(each for each in picture.rounds if each.dropped)
    told = next(line for line in str(picture).splitlines() if line.startswith("round 1"))
    assert f"{each.kept} to {each.last - 1} rolled back, which had thought: " in told
    assert told.count("<EOS>") == len(each.dropped)
    assert picture.rounds[-1] == DrawnRound(picture.rounds[-2].kept, len(picture.chunks) - 1, len(picture.chunks) - 1)


def test_the_command(tmp_path: Path) -> None:
    """The command finds the embedded model by its weights, and the picture shows its words."""
    shell, folder, page = CliRunner(), str(tmp_path / "dump"), tmp_path / "a.html"
    made = ["dump", "--model", "coin-thinking", "--n", "2", "--knob", "rendering=picture", "--out", folder, "--quiet"]
    assert shell.invoke(app, made).exit_code == 0
    told = shell.invoke(app, ["report", folder, "--out", str(page), "--quiet", "--verify", "1"])
    assert told.exit_code == 0 and "verified" in told.output, told.output
    for fragment in blocks_of(page.read_text()):
        assert "rl-thinking" in fragment and "&lt;EOS&gt;" in fragment and " tails</span>" in fragment


def test_a_branch_in_a_notebook_is_its_picture() -> None:
    engine = thinker()
    branch = engine.prompt(COIN.example(0).prompt)
    shown = branch._repr_html_()
    found = assert_harmless(shown, scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert classes.count("rl-chunk") == len(branch.picture().chunks) and "rl-tree" not in classes
    assert "certified" in found.texts and f"{branch.length}, including {branch.root_length} of the prompt" in found.texts
    plain = Engine.load("coin-plain").prompt("A coin's state is heads.")._repr_html_()
    assert 'rl-thinking"' not in plain and 'class="rl-tree"' in plain, "a branch that does not think is a tree"


def test_a_run_in_a_notebook_unfolds_its_pictures() -> None:
    run = thinker().replay(COIN.examples(3), sites="STCZ")
    found = assert_harmless(run._repr_html_(), scripts=1)
    classes = [value or "" for name, value in found.attributes if name == "class"]
    assert classes.count("rl-thinking") == 3 and "rl-tree" not in classes
    assert classes.count("rl-chunk") == sum(len(run.picture(i).chunks) for i in range(3))


def test_thoughts_and_runs_are_told_in_a_line() -> None:
    run = thinker().replay(COIN.examples(2), window=1)
    assert isinstance(run, Run) and repr(run).endswith("nothing drafted)")
    thoughts = run[0].thoughts
    assert thoughts is not None and repr(thoughts).startswith(f"Thoughts({len(thoughts.chunks)} chunks of {CHUNK} tokens, ")
    assert len(repr(thoughts)) < 100 and repr(thoughts.chunks[0]).endswith("state of 3 x 32)")
