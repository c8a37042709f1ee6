"""The report page is one complete, harmless file that agrees with the dump."""

import base64
import gzip
import hashlib
import json
import re
import shutil
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
from replaylens.engine.dump.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.replay.run import Run
from replaylens.engine.training import embedded as zoo
from replaylens.probes.report import Report
from replaylens.probes.sweeps import sweep as sweep_rows
from replaylens.tasks import WordTokenizer
from replaylens.views import examples, maps
from replaylens.views.report import ReportPage
from tests.engine.dump.damage import flip_bit, forge_index
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
    assert 'data-status="verified"' in html and "12 examples replayed" in html
    for text in (dump.digest, dump.accepted_digest, engine.fingerprint.digest, engine.fingerprint.weights):
        assert text in html
    unknown = ReportPage(dump).html()
    assert 'data-status="none"' in unknown and 'data-status="verified"' not in unknown


def test_a_mismatch_is_shown_as_one(dump: Dump, engine: Engine, tmp_path: Path) -> None:
    """Negative control: after one flipped bit in a shard, the page shows a mismatch in red."""
    for name in dump.files.store.sizes():
        (tmp_path / name).write_bytes(Path(dump.url, name).read_bytes())
    shard = tmp_path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    html = ReportPage(Dump.open(tmp_path, check=False), verdict=verify(tmp_path, engine)).html()
    assert 'data-status="mismatch"' in html and "was changed after it was written" in html


def test_the_same_dump_gives_the_same_bytes(dump: Dump, tmp_path: Path) -> None:
    one = ReportPage(dump, trees=3).save(tmp_path / "a.html")
    again = ReportPage(Dump.open(dump.url), trees=3).save(tmp_path / "new" / "b.html")
    assert one.read_bytes() == again.read_bytes()
    assert "The first 3 of 12 examples have a tree." in one.read_text() and len(blocks_of(one.read_text())) == 3
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


def test_thousands_of_rows(engine: Engine, tmp_path: Path) -> None:
    """The page stays small: trees are packed, and the table holds only the texts."""
    plan = make_plan(engine, tasks.get("coin")(flips=(1, 2)), 60, sites="SZ", max_new=6, window=4)
    dump = write_dump(engine, plan, tmp_path)
    assert dump is not None and dump.manifest.rows > 1200
    html = ReportPage(dump).html()
    assert len(rows_of(html)) == len(blocks_of(html)) == 60 and len(html) < 1_200_000


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
    return sweep_rows(plain_dump, "start", sites="S", positions=("query",), folds=3, permutations=19)


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
    assert f"About other rows: digest {plain_dump.digest}" in ReportPage(dump, (sweep,)).html()
    of_a_run = replace(sweep, source={**sweep.source, "digest": ""})
    assert "About other rows: of a run, not of a dump" in ReportPage(dump, (of_a_run,)).html()


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
    done = call(dump.url, "--out", tmp_path / "a.html", "--model", saved_model)
    assert done.exit_code == 1 and "mismatch" in done.output
    assert 'data-status="mismatch"' in (tmp_path / "a.html").read_text()


def test_command_with_probes(dump: Dump, sweep: Report, tmp_path: Path) -> None:
    sweep.save(tmp_path / "probes", figures=False)
    alone = call(tmp_path / "probes", "--out", tmp_path / "a.html")
    assert alone.exit_code == 0 and 'id="probes"' in (tmp_path / "a.html").read_text(), alone.output
    both = call(dump.url, tmp_path / "probes" / "report.json", "--out", tmp_path / "b.html", "--verify", 0)
    page = (tmp_path / "b.html").read_text()
    assert both.exit_code == 0 and 'id="probes"' in page and 'id="examples"' in page
    (tmp_path / "probes" / "report.json").write_text("{}")
    assert call(tmp_path / "probes", "--out", tmp_path / "c.html").exit_code == 2
    assert call(dump.url, tmp_path, "--out", tmp_path / "c.html").exit_code == 2, "two dumps"


def test_command_refuses_what_it_cannot_do(dump: Dump, tmp_path: Path) -> None:
    assert call(tmp_path / "nothing").exit_code == 2
    unknown = call(dump.url, "--out", tmp_path / "a.html")
    assert unknown.exit_code == 2 and "--model" in unknown.output and not (tmp_path / "a.html").exists()
    assert call(dump.url, "--out", tmp_path / "a.html", "--verify", 0).exit_code == 0


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
