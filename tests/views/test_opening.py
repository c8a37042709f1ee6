"""The report opens with what was found; the board is a view of its own; the page's command works when it is pasted."""

import html as entities
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.replay.run import Run
from replaylens.probes.report import Report
from replaylens.probes.sweeps import sweep as run_sweep
from replaylens.views import maps
from replaylens.views import sections as opening
from replaylens.views.data import LensGuess, LensLayer, Token
from replaylens.views.report import ReportPage
from tests.views.checks import assert_harmless


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump of the embedded model, with rejected branches."""
    examples = tasks.get("coin")(flips=(1, 4), rendering="steps").examples(16)
    run = Engine.load("coin-plain").replay(examples, sites="SZ", drafter="lens", window=4)
    assert isinstance(run, Run)
    return run.save(tmp_path_factory.mktemp("coin") / "a dump")


@pytest.fixture(scope="module")
def swept(coin: Dump) -> Report:
    return run_sweep(coin, "face", sites="S", estimators="ridge", permutations=19)


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


# ---- what comes first ----------------------------------------------------------------------------------------------------


def test_findings_come_first_and_the_certificate_last(coin: Dump, swept: Report) -> None:
    page = ReportPage(coin, (swept,)).html()
    assert sections(page) == ["found", "examples", "probes", "lens", "overview", "certificate"]
    found = page.split('id="found"')[1].split("</section>")[0]
    headline = next(line for line in swept.summary() if line.startswith(("Shown", "Not shown")))
    assert headline in entities.unescape(found), "the headline"
    best = swept.best("face")
    assert f"{best['accuracy']:.3f} [{best['low']:.3f}, {best['high']:.3f}]" in found
    for control in ("majority", "token identity", "shuffled"):
        assert f"<th>{control}</th>" in found, "the best cells stand beside their controls"
    assert found.count('class="rl-tree"') == 1 and "rl-rejected" in found, "one tree, with a rejected branch"
    assert_harmless(page, 2 + page.count('class="rl-block"'))


def test_a_section_that_is_not_known_comes_before_what_the_page_rests_on() -> None:
    assert opening.rank("lens") < opening.rank("results") < opening.rank("overview") < opening.rank("certificate")


def test_probes_alone_open_with_their_findings(swept: Report) -> None:
    page = ReportPage(probes=(swept,)).html()
    assert sections(page) == ["found", "probes"] and 'class="rl-headline"' in page


# ---- how it was decoded --------------------------------------------------------------------------------------------------


def test_timelines_can_be_stepped_through_on_the_page(run: Run, dump: Dump) -> None:
    told = run.most_telling()
    page = ReportPage(dump, decoded=(told,)).html()
    assert sections(page)[:2] == ["found", "decoded"]
    assert page.count('class="rl-frame"') == len(told.frames)
    assert_harmless(page, 2 + page.count('class="rl-block"'))


def test_the_most_telling_example_has_accepted_and_rejected_drafts(run: Run) -> None:
    told = run.most_telling()
    assert told.interest == max(run.timeline(i).interest for i in range(len(run))) > 0
    assert any(0 < sum(check.accepted for check in frame.checks) < len(frame.checks) - 1 for frame in told.frames)


def test_replay_writes_a_board(tmp_path: Path) -> None:
    file = tmp_path / "out.svg"
    told = call(
        "replay", "--n", 4, "--drafter", "model", "--window", 4, "--knob", "rendering=steps", "--board", file, "--quiet"
    )
    assert told.exit_code == 0 and f"{file}: example" in told.output, told.output
    texts = [element.text for element in ElementTree.parse(file).iter() if element.tag.endswith("text")]
    assert [text for text in texts if text in ("Prefill", "Decode", "Verify", "Rollback", "Accept")][:3] == [
        "Prefill",
        "Decode",
        "Verify",
    ]
    assert "3 other requests running" in texts, "all examples were served together"


@pytest.mark.parametrize("name", ["board.png", "", "no/such/folder/board.svg"])
def test_a_board_needs_the_name_of_an_svg_file(tmp_path: Path, name: str) -> None:
    told = call("replay", "--n", 1, "--board", tmp_path / name, "--quiet")
    assert told.exit_code == 2 and "Name an SVG file" in told.output


# ---- the command on the page -----------------------------------------------------------------------------------------------


def pasted(page: Path) -> list[str]:
    """The page's own command, as a shell reads it."""
    (line,) = re.findall(r'<code id="rl-check">(.*?)</code>', page.read_text())
    name, *arguments = shlex.split(entities.unescape(line))
    assert name == "replaylens"
    return arguments


def test_the_pages_command_verifies_the_dump(coin: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the page was made, with a relative path and a space in its name."""
    monkeypatch.chdir(Path(coin.url).parent)
    assert call("report", Path(coin.url).name, "--out", tmp_path / "a.html", "--verify", 0, "--quiet").exit_code == 0
    told = call(*pasted(tmp_path / "a.html"), "--quiet")
    assert told.exit_code == 0 and "verified" in told.output, told.output


def test_the_pages_command_names_the_model_and_the_task(dump: Dump, tmp_path: Path) -> None:
    options = ("--model", "coin-plain", "--task", "coin")
    assert call("report", dump.url, "--out", tmp_path / "a.html", "--verify", 0, "--quiet", *options).exit_code == 0
    assert pasted(tmp_path / "a.html") == ["verify", dump.url, "--all", *options]


# ---- the lens ------------------------------------------------------------------------------------------------------------


def path(prompt: int, answer: int, layers: int = 3) -> tuple[Token, ...]:
    states = [TokenState.PROMPT] * prompt + [TokenState.ACCEPTED] * answer
    lens = tuple(LensLayer(f"S{i}", (LensGuess(" x", 0.1 * (i + 1)),)) for i in range(layers))
    return tuple(Token(f" {i}", i, state, lens=lens) for i, state in enumerate(states))


def test_the_grid_starts_where_the_answer_does() -> None:
    """At the row that predicts the answer's first token; the prompt's rows are folded."""
    prompt, answer = maps.example_maps(path(5, 3))
    assert prompt is not None and answer is not None
    assert (prompt.columns, answer.columns) == ((" 0", " 1", " 2", " 3"), (" 4", " 5", " 6", " 7"))
    alone, text = maps.example_maps(path(4, 0))
    assert alone is None and text is not None and len(text.columns) == 4, "a text without an answer is shown from its start"


def test_averages_start_at_the_answer_too(coin: Dump) -> None:
    from replaylens.views import examples as dumped

    for each in maps.averages(dumped.examples(coin)).maps():
        assert each.columns[:3] == ("-1", "+0", "+1")


def test_the_scale_shows_the_inner_layers(coin: Dump) -> None:
    """Before the first block the lens is far off, and the output is exact: neither decides what the others look like."""
    from replaylens.views import examples as dumped

    (emitted, _, kl) = maps.averages(dumped.examples(coin)).maps()
    first, inner = kl.cells[-1], [cell for line in kl.cells[1:-1] for cell in line]
    assert min(cell.value for cell in first if cell) > kl.high, "beyond the end of the scale"
    assert sum(kl.low <= cell.value <= kl.high for cell in inner if cell) >= 0.85 * len(inner)
    assert emitted.low > -10


def test_a_few_extreme_values_do_not_wash_out_the_others() -> None:
    values = [1.0 + i / 100 for i in range(100)] + [400.0, -400.0]
    low, high = maps.clipped(values)
    assert 0.9 < low < 1.2 and 1.8 < high < 2.1
    assert maps.clipped([2.0, 2.0]) == (2.0, 2.0) and maps.clipped([float("nan")]) == (0.0, 1.0)
