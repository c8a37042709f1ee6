"""The report page is one complete, harmless file that agrees with the dump."""

import base64
import gzip
import hashlib
import html as entities
import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread, imsave
from typer.testing import CliRunner

from replaylens import (
    ablate,
    attention,
    attribution_patching,
    integrated_gradients,
    lens,
    patch,
    path_patch,
    report,
    steer,
    tasks,
)
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import verify
from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import TokenState
from replaylens.probes.report import Report
from replaylens.probes.sweeps import sweep as run_sweep
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.training import embedded as zoo
from replaylens.views import examples, maps
from replaylens.views import sections as opening
from replaylens.views.data import LensGuess, LensLayer, Token
from replaylens.views.report import ReportPage
from tests.dumps.damage import flip_bit, forge_index
from tests.views.checks import assert_harmless, parsed
from tests.views.conftest import HOSTILE

ONE_SCRIPT_AND_THE_ROWS = 2


def blocks_of(html: str) -> list[str]:
    """The trees of a page, unpacked."""
    packed = re.findall(r'<script type="text/plain" class="rl-block" data-count="\d+">([^<]*)</script>', html)
    return [fragment for block in packed for fragment in json.loads(gzip.decompress(base64.b64decode(block)))]


def rows_of(html: str) -> list[Any]:
    return json.loads(re.search(r'<script type="application/json" id="rl-rows">(.*?)</script>', html, re.S)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def html(dump: Dump, engine: Engine) -> str:
    return ReportPage(
        dump, verdict=verify(dump.url, engine, sample="all"), decode=lambda token: word(engine.text, token)
    ).html()


def test_the_page_is_whole_and_harmless(html: str, dump: Dump) -> None:
    trees = blocks_of(html)
    assert_harmless(html, ONE_SCRIPT_AND_THE_ROWS + html.count('class="rl-block"'))
    assert len(trees) == len(dump.manifest.plan.examples)
    for tree in trees:
        assert_harmless(tree, scripts=0)


def test_only_our_own_script_may_run(html: str) -> None:
    """The content security policy names the hash of the page's only script. Nothing may be loaded."""
    (policy,) = [value or "" for name, value in parsed(html).attributes if name == "content" and "-src" in (value or "")]
    (code,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none';" in policy


def test_the_table_says_what_the_run_said(html: str, run: Run) -> None:
    for (index, prompt, generated, answer, right, rejected), result in zip(rows_of(html), run, strict=True):
        decoded = [run.engine.text.token(token) for token in result.tokens]
        assert prompt == "".join(decoded[: result.num_prompt]) and generated == "".join(decoded[result.num_prompt :])
        assert (index, answer, right) == (result.example.index, result.example.answer.strip(), result.correct)
        assert rejected == len({(other.fork_position, tuple(other.tokens)) for other in result.rejected})


def test_a_dumped_tree_is_the_live_tree(run: Run, dump: Dump) -> None:
    """Log-probs, entropies and lens values read from the files equal the live ones. Labels are added."""
    decode = lambda token: word(run.engine.text, token)  # noqa: E731
    for example, result in zip(examples.examples(dump, decode), run, strict=True):
        (mine, *_), (live, *_) = example.tree.paths, run.tree(run.results.index(result)).paths
        for stored, token in zip(mine.tokens, live.tokens, strict=True):
            assert (stored.text, stored.position, stored.state) == (token.text, token.position, token.state)
            assert stored.lens == token.lens
            assert (
                stored.logprob == pytest.approx(token.logprob, abs=1e-6)
                if token.logprob is not None
                else stored.logprob is None
            )
            assert dict(stored.labels)["start"] in ("heads", "tails") if "start" in dict(stored.labels) else True
        assert any(token.labels for token in mine.tokens)


def test_certificate(html: str, dump: Dump, engine: Engine) -> None:
    assert 'data-status="verified"' in html and "8 examples replayed" in html
    for text in (dump.digest, dump.accepted_digest, engine.fingerprint.digest, engine.fingerprint.weights):
        assert text in html
    unknown = ReportPage(dump, trees=1).html()
    assert 'data-status="none"' in unknown and 'data-status="verified"' not in unknown


def test_a_mismatch_is_shown_as_one(dump: Dump, engine: Engine, tmp_path: Path) -> None:
    """Negative control: after one flipped bit in a shard, the page shows a mismatch in red."""
    for name in dump.files.store.sizes():
        (tmp_path / name).write_bytes(Path(dump.url, name).read_bytes())
    shard = tmp_path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    html = ReportPage(Dump.open(tmp_path, check=False), verdict=verify(tmp_path, engine), trees=1).html()
    assert 'data-status="mismatch"' in html and "was changed after it was written" in html


def test_the_same_dump_gives_the_same_bytes(dump: Dump, tmp_path: Path) -> None:
    one = ReportPage(dump, trees=3).save(tmp_path / "a.html")
    again = ReportPage(Dump.open(dump.url), trees=3).save(tmp_path / "new" / "b.html")
    assert one.read_bytes() == again.read_bytes()
    assert "The first 3 of 8 examples have a tree." in one.read_text() and len(blocks_of(one.read_text())) == 3
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["a.html"], "no temporary file is left"


def test_lens_averages(run: Run, dump: Dump) -> None:
    """A cell is the mean over roots. Two examples with the same prompt count once."""
    (emitted, entropy, kl) = maps.averages(examples.examples(dump)).maps()
    column = emitted.columns.index("+0")
    by_root: dict[str, list[float]] = {}
    for result in run:
        by_root.setdefault(result.example.root, []).append(result.activations["Z.emitted"][result.num_prompt, -1].item())
    cell = emitted.cells[0][column]
    assert cell is not None and cell.value == pytest.approx(np.mean([np.mean(v) for v in by_root.values()]))
    assert f"roots\t{len(by_root)}" in cell.facts and any(fact.startswith("95 %") for fact in cell.facts)
    assert entropy.rows[0] == "output" and all(c is None or c.value == pytest.approx(0) for c in kl.cells[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sites": "S"}, {"positions": "generated"}, {"positions": "last"}, {"rejected": False}])
def test_dumps_that_hold_less(engine: Engine, tmp_path: Path, options: dict[str, Any]) -> None:
    """Without Z, prompts or rejected branches, the page shows the rest and says what is missing."""
    plan = make_plan(engine, tasks.get("coin")(flips=(1, 2)), 3, max_new=6, window=4, **options)
    dump = write_dump(engine, plan, tmp_path)
    assert dump is not None
    html = ReportPage(dump).html()
    assert_harmless(html, ONE_SCRIPT_AND_THE_ROWS + html.count('class="rl-block"'))
    assert len(blocks_of(html)) == 3
    assert ("holds no Z" in html) == (options.get("sites") == "S")


@pytest.mark.slow
def test_thousands_of_rows(engine: Engine, tmp_path: Path) -> None:
    """The page stays small: trees are packed, and the table holds only the texts."""
    plan = make_plan(engine, tasks.get("coin")(flips=(1, 2)), 30, sites="SZ", max_new=6, window=4)
    dump = write_dump(engine, plan, tmp_path)
    assert dump is not None and dump.manifest.rows > 600
    html = ReportPage(dump).html()
    assert len(rows_of(html)) == len(blocks_of(html)) == 30 and len(html) < 600_000


# ---- probes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_dump(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with an honest tokenizer: no task can read labels from markup."""
    plain = Engine(engine.model, WordTokenizer(tasks.get("coin").vocabulary()))
    plan = make_plan(plain, tasks.get("coin")(flips=(1, 3)), 24, sites="S", max_new=3, window=4)
    made = write_dump(plain, plan, tmp_path_factory.mktemp("plain"))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def sweep(plain_dump: Dump) -> Report:
    return run_sweep(plain_dump, "start", sites="S", positions=("query",), folds=3, permutations=19, estimators="ridge")


@pytest.mark.slow
def test_a_sweep_is_drawn_with_intervals_and_controls(plain_dump: Dump, sweep: Report) -> None:
    """The page shows every cell with its score and interval, every control that ran, and the report's text."""
    html = ReportPage(plain_dump, (sweep,)).html()
    found = assert_harmless(html, ONE_SCRIPT_AND_THE_ROWS + html.count('class="rl-block"'))
    texts, titles = "|".join(found.texts), [value or "" for name, value in found.attributes if name == "title"]
    main = [line for line in sweep.lines if not line["known_zero"]]
    assert main
    for line in main:
        assert f"|{line['accuracy']:.2f}|{line['low']:.2f}–{line['high']:.2f}|" in texts
        assert any(f"95 %\t{line['low']:.4f} to {line['high']:.4f}" in t and "majority\t" in t for t in titles)
    for control in ("majority", "token identity", "bag of tokens", "shuffled"):
        assert f"|{control}|" in texts
    assert "A probe shows that a label can be read off" in texts and "About other rows" not in texts


def test_a_report_about_other_rows_is_said_to_be(dump: Dump, plain_dump: Dump, sweep: Report) -> None:
    """Control: the page of the sweep's own rows, above, says nothing of the kind."""
    others = [replace(sweep, source={**sweep.source, "digest": digest}) for digest in (dump.digest, "")]
    page = ReportPage(plain_dump, others, trees=1).html()
    assert f"About other rows: digest {dump.digest}" in page and "About other rows: of a run, not of a dump" in page


def test_probes_alone(sweep: Report, tmp_path: Path) -> None:
    """A page without a dump. Hostile names in the lines of a branch question stay text."""
    told = Report(
        "transfer", [{"what": text, "accuracy": 0.5, "low": 0.4, "high": 0.7, "n": 3} for text in HOSTILE], sweep.source, {}
    )
    html = ReportPage(probes=(sweep, told)).html()
    found = assert_harmless(html, scripts=1)
    assert "transfer" in found.texts and set(HOSTILE) <= set(found.texts)
    assert found.texts.count("0.500 [0.400, 0.700]") == len(HOSTILE) and "left:40.0%;width:30.0%" in html
    assert 'id="examples"' not in html


# ---- the command ------------------------------------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments), "--quiet"])


@pytest.fixture(scope="module")
def saved_model(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model on disk, with an honest tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    zoo.save(engine.model, engine.text.tokenizer, folder)
    return folder


def test_command(saved_model: Path, tmp_path: Path) -> None:
    engine, out = Engine.load(str(saved_model)), tmp_path / "report.html"
    plan = make_plan(engine, tasks.get("coin")(flips=(1, 2)), 3, max_new=6, window=4)
    write_dump(engine, plan, tmp_path / "dump")
    done = call(tmp_path / "dump", "--out", out, "--model", saved_model, "--verify", 0.5, "--title", "<b>mine</b>")
    assert done.exit_code == 0 and "verified" in done.output, done.output
    assert "<title>&lt;b&gt;mine&lt;/b&gt;</title>" in out.read_text() and 'data-status="verified"' in out.read_text()


def test_command_on_a_mismatch(dump: Dump, saved_model: Path, tmp_path: Path) -> None:
    """Negative control: the honest tokenizer gives other texts. The page is still written, and reports the mismatch."""
    done = call(dump.url, "--out", tmp_path / "a.html", "--model", saved_model, "--trees", 1)
    assert done.exit_code == 1 and "mismatch" in done.output
    assert 'data-status="mismatch"' in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_command_with_probes(plain_dump: Dump, sweep: Report, tmp_path: Path) -> None:
    sweep.save(tmp_path / "probes", figures=False)
    alone = call(tmp_path / "probes", "--out", tmp_path / "a.html")
    assert alone.exit_code == 0 and 'id="probes"' in (tmp_path / "a.html").read_text(), alone.output
    both = call(plain_dump.url, tmp_path / "probes" / "report.json", "--out", tmp_path / "b.html", "--verify", 0, "--trees", 1)
    page = (tmp_path / "b.html").read_text()
    assert both.exit_code == 0 and 'id="probes"' in page and 'id="examples"' in page
    (tmp_path / "probes" / "report.json").write_text("{}")
    assert call(tmp_path / "probes", "--out", tmp_path / "c.html").exit_code == 2
    assert call(plain_dump.url, tmp_path, "--out", tmp_path / "c.html").exit_code == 2, "two dumps"
    assert call(tmp_path / "nothing").exit_code == 2
    unknown = call(plain_dump.url, "--out", tmp_path / "c.html")
    assert unknown.exit_code == 2 and "--model" in unknown.output and not (tmp_path / "c.html").exists()


@pytest.mark.parametrize("out", [".", "", "folder", "folder/.."])
def test_a_folder_is_no_page(dump: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    done = call(dump.url, "--verify", 0, "--out", out)
    assert done.exit_code == 2 and done.stderr.startswith("BadRequest: ") and "Name the file" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_damaged_index_is_named(dump: Dump, tmp_path: Path) -> None:
    """A damaged index is detected by its hash, and one with a corrected hash by its content."""
    copy = tmp_path / "copy"
    shutil.copytree(dump.url, copy)
    forge_index(copy, "token_state", 2, "proUpt")
    done = call(copy, "--verify", 0, "--out", tmp_path / "a.html")
    assert done.exit_code == 2 and "token_state 'proUpt'" in done.stderr
    flip_bit(copy / "index.parquet", 100)
    done = call(copy, "--verify", 0, "--out", tmp_path / "a.html")
    assert done.exit_code == 2 and "BadDump: " in done.stderr and "its SHA-256 differs" in done.stderr
    assert not (tmp_path / "a.html").exists()


# ---- opening ---------------------------------------------------------------------------------------------------------
# The report opens with what was found; the board is a view of its own; the page's command works when it is pasted.


def call_of_opening(*arguments: object) -> Any:
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
    return run_sweep(coin, "face", sites="S", layers=[0, 3], positions="query", estimators="ridge", permutations=19)


@pytest.fixture(scope="module")
def page(coin: Dump, swept: Report) -> str:
    return ReportPage(coin, (swept,), trees=3).html()


@pytest.fixture(scope="module")
def bare(coin: Dump) -> str:
    """The page of the dump without probes."""
    return ReportPage(coin, trees=1).html()


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


# ---- what comes first ----------------------------------------------------------------------------------------------------


def test_findings_come_first_and_the_certificate_last(page: str, swept: Report) -> None:
    assert sections(page) == ["found", "examples", "probes", "lens", "overview", "certificate", "cite"]
    found = page.split('id="found"')[1].split("</section>")[0]
    headline = next(line for line in swept.summary() if line.startswith(("Shown", "Undecided")))
    assert headline in entities.unescape(found), "the headline"
    best = swept.best("face")
    assert f"{best['accuracy']:.3f} [{best['low']:.3f}, {best['high']:.3f}]" in found
    for control in ("majority", "token identity", "shuffled"):
        assert f"<th>{control}</th>" in found, "the best cells stand beside their controls"
    assert found.count('class="rl-tree"') == 1 and "rl-rejected" in found, "one tree, with a rejected branch"
    assert_harmless(page, 2 + page.count('class="rl-block"'))


def test_the_first_sentence_needs_no_knowledge(page: str, bare: str, swept: Report) -> None:
    """The best cell in words, or, where nothing is shown, that it is not; without probes, what the page is about."""
    first = lambda html: re.search(r'<p class="rl-first">([^<]*)</p>', html)[1]  # type: ignore[index]  # noqa: E731
    best = swept.best("face")
    told = entities.unescape(first(page))
    assert told.startswith("The model's next answer ") and "before it is written" in told
    assert f"is right in {best['accuracy']:.0%} of cases" in told and not re.search(r"\b[STCZ]\d|\bp\b|ridge", told)
    assert first(bare) == "What a language model computed at every token of 16 texts, and which drafts it rejected."


def test_a_finding_follows_the_verdict(swept: Report) -> None:
    """Negative controls: no cell is shown; a label that is not the task's answer; a position after it."""
    assert opening.finding(replace(swept, kind="other")) == ""
    unlikely = replace(swept, lines=[{**line, "p_family": 0.9} for line in swept.lines])
    assert "may or may not be readable" in opening.finding(unlikely)
    small = replace(swept, lines=[{**line, "p_family": 0.9, "margin_high": 0.05} for line in swept.lines])
    assert "is shown to be hardly readable" in opening.finding(small)
    other = replace(swept, lines=[{**line, "label": "name", "position": "all"} for line in swept.lines])
    assert opening.finding(other).startswith("The label 'name' ") and "before" not in opening.finding(other)


def test_words_of_the_page_explain_themselves(page: str) -> None:
    words = dict(re.findall(r'<abbr title="([^"]*)" tabindex="0" class="rl-word">([^<]*)</abbr>', page))
    assert set(words.values()) == {"S", "T", "C", "Z", "control task", "shown", "below", "undecided"} and all(
        "\n" in about for about in words
    )
    assert "<th><abbr" in page.split('id="found"')[1], "also where they are used"


def transferred(verdict: str) -> Report:
    """A transfer as the probes write it, with made-up numbers."""
    says = [("token alone: accepted to rejected", None, 0.5), ("S1: accepted to accepted", "S", 0.9)]
    says += [("S1: accepted to rejected", "S", 0.8), ("S1: rejected to rejected", "S", 0.7)]
    lines = [dict(what=what, site=site, metric="accuracy", accuracy=x, low=x, high=x) for what, site, x in says]
    found = [f"{what}: {100 * x:.1f} %." for what, _, x in says]
    found.append(f"{verdict}: a probe of 'face' fitted on accepted rows reads rejected ones, best at S1.")
    return Report("transfer", lines, {"task": "coin"}, {}, [], found)


@pytest.mark.parametrize(
    ("verdict", "read"),
    [("Shown", "can be read as well"), ("Not shown", "are not shown to be readable"), ("Undecided", "are not shown")],
)
def test_the_headline_of_a_transfer_is_accepted_to_rejected(verdict: str, read: str) -> None:
    page = ReportPage(probes=(transferred(verdict),)).html()
    headline = entities.unescape(page.split('class="rl-headline"')[1].split("</li>")[0])
    assert f"transfer, accepted → rejected: {verdict}: a probe" in headline and headline.endswith(
        "S1: accepted to rejected: 80.0 %."
    )
    told = opening.finding(transferred(verdict))
    assert read in told and "right in 80% of rejected cases" in told and "right in 50%" in told


def test_the_overview_counts_what_the_dump_holds(coin: Dump, bare: str) -> None:
    """Branches, not examples that have some; rows of accepted paths beside all of them. The first lines say the same."""
    index = coin.to_pandas()
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", bare))
    branches = index[index["branch"] > 0].groupby("example")["branch"].nunique()
    right = index.groupby("example")["correct"].first()
    assert facts["rejected branches"] == str(branches.sum()) and branches.sum() > len(branches)
    assert facts["rows"] == f"{len(index)}, {int(index['accepted'].sum())} of them on accepted paths"
    assert facts["examples"] == str(len(right)) and facts["right answers"] == f"{right.sum()} ({right.mean():.1%})"
    told = f"{len(right)} examples, {right.mean():.0%} answered right, with {branches.sum()} rejected branches."
    assert f"<p>{told}</p>" in bare.split('id="found"')[1]


def test_a_section_that_is_not_known_comes_before_what_the_page_rests_on() -> None:
    assert opening.rank("lens") < opening.rank("results") < opening.rank("overview") < opening.rank("certificate")


def test_probes_alone_open_with_their_findings(swept: Report) -> None:
    page = ReportPage(probes=(swept,)).html()
    assert sections(page) == ["found", "probes", "cite"] and 'class="rl-headline"' in page


# ---- how it was decoded --------------------------------------------------------------------------------------------------


def test_timelines_can_be_stepped_through_on_the_page(run: Run, dump: Dump) -> None:
    told = run.most_telling()
    page = ReportPage(dump, decoded=(told,), trees=1).html()
    assert sections(page)[:2] == ["found", "decoded"]
    assert page.count('class="rl-frame"') == len(told.frames)
    assert_harmless(page, 2 + page.count('class="rl-block"'))


def test_the_most_telling_example_has_accepted_and_rejected_drafts(run: Run) -> None:
    told = run.most_telling()
    every = [run.timeline(i) for i in range(len(run))]
    assert told.interest == max(each.interest for each in every) > 0
    alike = {each.capacity for each in every if each.interest == told.interest}
    assert told.capacity == min(alike) < max(alike), "of equal ones, the one that shows it earliest"
    assert any(0 < sum(check.accepted for check in frame.checks) < len(frame.checks) - 1 for frame in told.frames)


def test_replay_writes_a_board(tmp_path: Path) -> None:
    file = tmp_path / "out.svg"
    told = call_of_opening(
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
    told = call_of_opening("replay", "--n", 1, "--board", tmp_path / name, "--quiet")
    assert told.exit_code == 2 and "Name an SVG file" in told.output


# ---- the command on the page -----------------------------------------------------------------------------------------------


def pasted(page: Path) -> list[str]:
    """The page's own command, as a shell reads it."""
    (line,) = re.findall(r'<code id="rl-check">(.*?)</code>', page.read_text())
    name, *arguments = shlex.split(entities.unescape(line))
    assert name == "replaylens"
    return arguments


@pytest.mark.slow
def test_the_pages_command_verifies_the_dump(coin: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the page was made, with a relative path and a space in its name."""
    monkeypatch.chdir(Path(coin.url).parent)
    assert call_of_opening("report", Path(coin.url).name, "--out", tmp_path / "a.html", "--verify", 0, "--quiet").exit_code == 0
    told = call_of_opening(*pasted(tmp_path / "a.html"), "--quiet")
    assert told.exit_code == 0 and "verified" in told.output, told.output


def test_the_pages_command_names_the_model_and_the_task(plain_dump: Dump, tmp_path: Path) -> None:
    options = ("--model", "coin-plain", "--task", "coin")
    assert call(plain_dump.url, "--out", tmp_path / "a.html", "--verify", 0, *options).exit_code == 0
    assert pasted(tmp_path / "a.html") == ["verify", plain_dump.url, "--all", *options]


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


def test_averages_start_at_the_answer_and_their_scale_shows_the_inner_layers(coin: Dump) -> None:
    """Before the first block the lens is far off, and the output is exact: neither decides what the others look like."""
    (emitted, entropy, kl) = maps.averages(examples.examples(coin)).maps()
    assert all(each.columns[:3] == ("-1", "+0", "+1") for each in (emitted, entropy, kl))
    first, inner = kl.cells[-1], [cell for line in kl.cells[1:-1] for cell in line]
    assert min(cell.value for cell in first if cell) > kl.high, "beyond the end of the scale"
    assert sum(kl.low <= cell.value <= kl.high for cell in inner if cell) >= 0.85 * len(inner)
    assert emitted.low > -10


def test_a_few_extreme_values_do_not_wash_out_the_others() -> None:
    values = [1.0 + i / 100 for i in range(100)] + [400.0, -400.0]
    low, high = maps.clipped(values)
    assert 0.9 < low < 1.2 and 1.8 < high < 2.1
    assert maps.clipped([2.0, 2.0]) == (2.0, 2.0) and maps.clipped([float("nan")]) == (0.0, 1.0)


# ---- results ---------------------------------------------------------------------------------------------------------
# Results of the workbench on the report page: figures as shapes, text as text, equal bytes for equal results.

COIN = "A coin's state is {}. A:"
HEADS, TAILS = COIN.format("heads"), COIN.format("tails")
PAIR = (" tails", " heads")
VERBS: dict[str, Callable[[Engine], Any]] = {
    "lens": lambda engine: lens(engine, "A coin"),
    "patch": lambda engine: patch(engine, HEADS, TAILS, metric=PAIR, sites="S", positions=[4, -1]),
    "path patch": lambda engine: path_patch(engine, HEADS, TAILS, metric=PAIR, receivers=[(1, 3)]),
    "ablate": lambda engine: ablate(engine, [HEADS, TAILS], metric=PAIR, heads=[(1, 3)]),
    "ablate neurons": lambda engine: ablate(engine, [HEADS, TAILS], metric=PAIR, neurons=[(1, 3)]),
    "steer": lambda engine: steer(engine, torch.ones(128), [HEADS], layers=[2], strengths=[1], n=2),
    "attention": lambda engine: attention(engine, HEADS, layers=[1]),
    "attribution": lambda engine: attribution_patching(engine, HEADS, TAILS, PAIR, "S", compare=True),
    "integrated": lambda engine: integrated_gradients(engine, HEADS, TAILS, PAIR, steps=2),
}


@pytest.fixture(scope="module")
def engine_of_results() -> Engine:
    return Engine.load("coin-plain")


@pytest.mark.slow
def test_every_verb_can_be_saved(engine_of_results: Engine, tmp_path: Path) -> None:
    results = [make(engine_of_results) for make in VERBS.values()]
    path = report(tmp_path / "a.html", results=results, title="<b>mine</b>")
    html = path.read_text()
    found = assert_harmless(html, scripts=1)
    assert found.tags.count("svg") == len(VERBS) and "<b>mine" not in html
    assert {"lens", "patch", "ablate", "steer", "attention", "attribution"} <= {text.strip() for text in found.texts}
    names = list(VERBS)
    again = VERBS["ablate neurons"](engine_of_results)
    chosen = [again, results[names.index("ablate neurons")], results[names.index("ablate")]]
    pages = [ReportPage().add(result).save(tmp_path / f"{i}.html") for i, result in enumerate(chosen)]
    assert pages[0].read_bytes() == pages[1].read_bytes() != pages[2].read_bytes()


def test_hostile_text_stays_text(engine_of_results: Engine) -> None:
    """Tokens of any vocabulary reach the page, also those with dollar signs, which start a formula in matplotlib."""
    shown = lens(engine_of_results, "A coin")
    hostile = replace(shown, tokens=tuple("<script>alert(1)</script>$\\frac{" for _ in shown.tokens))
    html = ReportPage(results=(hostile,)).html()
    assert_harmless(html, scripts=1)
    assert "&lt;script&gt;alert" in html


def test_other_things_are_refused(engine_of_results: Engine, tmp_path: Path) -> None:
    for results in ([3], lens(engine_of_results, "A coin"), "lens", [ReportPage]):
        with pytest.raises(BadRequest, match="Invalid results"):
            report(tmp_path / "a.html", results=results)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="would be empty"):
        report(tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


# ---- docs ------------------------------------------------------------------------------------------------------------
# The pictures of the docs exist; their snippets are run by tests/docs/test_pages.py.

DOCS = Path(__file__).parents[2] / "docs"


def test_pictures_are_there_in_light_and_dark() -> None:
    """Every picture stands on a page, every picture of a page is there, and a dark page shows no white one."""
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md"), *(DOCS / "notes").glob("*.md")]
    shown = set[Path]()
    for page in pages:
        text = page.read_text()
        words = re.findall(r'!\[([^\]]*)\]\(([^)]*)\)|<img alt="([^"]*)" src="([^"]*)"', text)
        assert all(alt or other for alt, _, other, _ in words), f"{page.name}: a picture without words"
        sources = [source or other for _, source, _, other in words if "://" not in source]
        dark = re.findall(r'media="\(prefers-color-scheme: dark\)" srcset="([^"]*)"', text)
        shown |= {(page.parent / source).resolve() for source in (*sources, *dark)}
        white = [
            source for source in sources if source.endswith(".png") and source.replace("-light.png", "-dark.png") not in dark
        ]
        assert not white, f"{page.name}: white on dark pages"
    drawn = {file.resolve() for file in (DOCS / "img").iterdir() if file.suffix in (".png", ".svg")}
    assert drawn <= shown and all(file.is_file() for file in shown)


def themed(picture: Path) -> float:
    """The share of a picture's edge that has the lightness of its theme."""
    pixels = imread(picture)[..., :3]
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean(-1)
    return float(((edge < 0.5) if "dark" in picture.name else (edge > 0.5)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("picture", sorted((DOCS / "img").glob("*-[dl]*[kt].png")), ids=lambda picture: picture.name)
def test_a_picture_has_the_colours_of_its_page_up_to_its_edges(picture: Path, tmp_path: Path) -> None:
    """A view on a page of the other theme would show that page at its edges, as the control does."""
    assert themed(picture) > 0.95
    pixels = imread(picture)[..., :3].copy()
    pixels[len(pixels) // 2 :] = float("dark" in picture.name)
    imsave(tmp_path / picture.name, pixels)
    assert themed(tmp_path / picture.name) < 0.8
