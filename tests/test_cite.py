"""Identifiers: a changed bit changes them, the order of metadata and the machine do not; `verify` finds what they name."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

import replaylens as rl
from replaylens import Answer, Dump, Edit, Engine, Run, Sampling, tasks
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.engine.display import Citable, picture, stamp_of, stamped
from replaylens.engine.errors import BadDump, BadFile, BadRequest, FingerprintMismatch
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.records import Citation, Identifier, digest_of
from replaylens.probes.report import Report
from replaylens.rollouts.drawing import redrawn
from replaylens.rollouts.plan import ResamplePlanRecord
from replaylens.rollouts.rollouts import Rollouts, WaveFolder
from replaylens.views.report import ReportPage
from replaylens.workbench.lens import compare_lenses, fit_jacobian_lens
from tests.dumps.damage import flip_bit
from tests.dumps.test_verify import told_parts
from tests.test_files import KINDS, SWEEP, a_probe

ROOT = Path(__file__).parents[1]
PROMPT = "A coin's state is heads. Alice flips. What's the state? A:"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture(scope="module")
def run(engine: Engine) -> Run:
    return engine.replay(tasks.get("coin")(flips=2).examples(3), sites="S", drafter="lens")


@pytest.fixture(scope="module")
def folder(engine: Engine, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump, rollouts, a report and a figure."""
    made = tmp_path_factory.mktemp("results")
    run.save(made / "dump")
    with engine.prompt(PROMPT) as root:
        answer = Answer.regex("heads|tails")
        root.resample(4, max_new=3, answer=answer, sites="S", keep="last", folder=made / "rollouts")
    made_report(run).save(made / "report")
    return made


def made_report(run: Run) -> Report:
    lines = [{"what": "a_b", "accuracy": 0.75, "low": 0.5, "high": 1.0, "rows": 4}]
    source = {"task": "coin", "digest": run.digest, "rows": 4, **run.engine.fingerprint.cited}
    return Report("transfer", lines, source, {"folds": 5}, [], ["said"])


def called(*words: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout + done.stderr


# ---- one definition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [None, (3, 0, 17)])
def test_an_identifier_is_read_as_it_is_written(place: tuple[int, int, int] | None) -> None:
    one = Identifier("ab" * 32, place)
    assert Identifier.parse(str(one)) == one


@pytest.mark.parametrize("text", ["", "ab" * 32, "replaylens:sha256:AB", f"replaylens:sha256:{'a' * 64}#1.2", "sha256:x"])
def test_other_texts_are_no_identifier(text: str) -> None:
    with pytest.raises(BadRequest, match="Give replaylens:sha256:"):
        Identifier.parse(text)


def test_order_of_keys_does_not_count_and_a_value_does() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})


def test_citations_say_what_is_needed(run: Run, folder: Path) -> None:
    """Version, model, arithmetic, and a BibTeX entry whose braces match and whose special characters are escaped."""
    dump = Dump.open(folder / "dump")
    rollouts = Rollouts.load(folder / "rollouts")
    for cited in (dump.cite(), dump.cite(row=3), run.cite(), rollouts.cite(), made_report(run).cite()):
        assert all(word in cited.text for word in ("replaylens 0.1.0", "portable-1", run.engine.fingerprint.weights))
        assert str(Identifier.parse(cited.identifier)) in str(cited)
        assert cited.bibtex.count("{") - cited.bibtex.count(r"\{") == cited.bibtex.count("}") - cited.bibtex.count(r"\}")
        assert cited.bibtex.startswith(f"@misc{{replaylens-{Identifier.parse(cited.identifier).digest[:12]},")
    hard = Citation(str(Identifier("0" * 64)), "50 % of a_b {c} \\d #1", "check").bibtex
    assert r"{50 \% of a\_b \{c\} \textbackslash{}d \#1}" in hard and "computed elsewhere" in hard


# ---- what an identifier covers --------------------------------------------------------------------------------------------


def test_a_run_has_the_identifier_of_its_dump(run: Run, folder: Path) -> None:
    assert run.cite().identifier == Dump.open(folder / "dump").cite().identifier == str(Identifier(run.digest))


def test_a_changed_bit_of_a_row_changes_its_identifier_and_no_other(folder: Path) -> None:
    content = Dump.open(folder / "dump").files.content(0)
    names = sorted(content.tensors, reverse=True)  # another order of the sites
    tensors = {name: content.tensors[name].clone() for name in names}
    same = replace(content, tensors=tensors)
    assert [same.row_identifier(row) for row in (0, 5)] == [content.row_identifier(row) for row in (0, 5)]
    tensors[names[0]][5].view(torch.int32)[7] ^= 1
    assert same.row_identifier(0) == content.row_identifier(0) and same.row_identifier(5) != content.row_identifier(5)
    moved = replace(content, index=content.index.select(sorted(content.index.column_names)))
    assert moved.row_identifier(5) == content.row_identifier(5)


def test_a_filtered_dump_cites_its_rows(folder: Path) -> None:
    dump = Dump.open(folder / "dump")
    some = dump.where(position=2)
    place = Identifier.parse(some.cite(row=1).identifier).row
    assert place is not None and place[2] == 2
    with pytest.raises(BadRequest, match="A view has no identifier of its own"):
        some.cite()
    number = dump.index.query("position == 2").index[1]
    assert dump.cite(row=int(number)).identifier == some.cite(row=1).identifier


def test_a_report_has_its_digest(run: Run, tmp_path: Path) -> None:
    report = made_report(run)
    again = Report.load(report.save(tmp_path / "a"))
    assert again.digest == report.digest
    assert replace(report, source=dict(reversed(report.source.items())) | {"replaylens": "9"}).digest == report.digest
    assert replace(report, lines=[report.lines[0] | {"accuracy": 0.7500000001}]).digest != report.digest
    file = tmp_path / "a" / "report.json"
    file.write_text(file.read_text().replace("0.75", "0.76"))
    with pytest.raises(BadFile, match="digest"):
        Report.load(file)


def test_reports_without_a_digest_are_read(run: Run, tmp_path: Path) -> None:
    """Older versions wrote none."""
    file = made_report(run).save(tmp_path, figures=False) / "report.json"
    raw = json.loads(file.read_text())
    del raw["digest"]
    file.write_text(json.dumps(raw))
    assert Report.load(file).digest == made_report(run).digest


# ---- results of the workbench ---------------------------------------------------------------------------------------------


def answers(engine: Engine, jacobian: TunedLens) -> dict[str, Citable]:
    """A result of each verb that answers with one."""
    other, metric = PROMPT.replace("heads", "tails"), (" tails", " heads")
    return {
        "lens": rl.lens(engine, PROMPT),
        "lens of a token": rl.lens(engine, PROMPT, token=" tails", tuned=jacobian),
        "lenses": compare_lenses(engine, [other], {"Jacobian": jacobian}),
        "attention": rl.attention(engine, PROMPT),
        "dla": rl.dla(engine, PROMPT, metric, by="head"),
        "patch": rl.patch(engine, PROMPT, other, metric=metric, sites="T", layers=[1]),
        "pairs": rl.patch(engine, [PROMPT, other], [other, PROMPT], metric=metric, sites="S", layers=[1]),
        "path": rl.path_patch(engine, PROMPT, other, metric=metric, receivers=[(1, 3)]),
        "ablate": rl.ablate(engine, [PROMPT, other], metric=metric, heads=[(0, 1)]),
        "steer": rl.steer(engine, torch.ones(128), [PROMPT], layers=[2], strengths=[0.0, 1.0], n=2),
        "compare": rl.compare(engine, engine, [PROMPT]),
        "attribution": rl.attribution_patching(engine, PROMPT, other, metric, "S"),
        "integrated": rl.integrated_gradients(engine, PROMPT, None, metric, steps=2),
        **of_forks(engine),
    }


def of_forks(engine: Engine) -> dict[str, Citable]:
    with engine.prompt("A coin's state is heads.") as root:
        root.force(" Alice flips. Bob flips. What's the state? A:")
        drawn = root.resample(4, at="sentences", max_new=12, answer=Answer.regex("heads|tails"))
    counts = drawn.outcomes()
    return {
        "curve": rl.probes.outcome_curve(counts),
        "importance": rl.probes.importance(counts),
        "change points": rl.probes.change_points(counts),
        "resilience": rl.probes.resilience(rl.probes.RolloutTexts.of(drawn)),
    }


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_result_is_cited(engine: Engine, drawn: bool, tmp_path: Path) -> None:
    """Its digest is that of another engine, in another order, with other branches around; figures name what they show."""
    jacobian, fresh = fit_jacobian_lens(engine, ["A coin's state"]), Engine.load("coin-plain", max_rows=64)
    made = answers(engine, jacobian)
    with fresh.prompt("A coin", sites="S") as beside:
        beside.generate(2)
        again = answers(fresh, jacobian)
    assert len({each.digest for each in made.values()}) == len(made)
    for name, result in made.items():
        cited = result.cite()
        assert cited.identifier == again[name].cite().identifier == str(Identifier(result.digest)), name
        assert all(word in cited.text for word in ("replaylens 0.1.0", "portable-1", engine.fingerprint.weights)), name
        assert cited.bibtex.startswith("@misc{replaylens-")
    for kind, result in {type(each): each for each in made.values() if drawn}.items():  # takes longest
        result.plot().savefig(tmp_path / "drawn.svg")  # type: ignore[attr-defined]
        stamp = stamp_of((tmp_path / "drawn.svg").read_bytes())
        assert stamp is not None and stamp.intact and stamp.source == result.cite().identifier, kind


@dataclass(frozen=True, eq=False)
class Odd(Citable):
    """A result of everything that fields hold."""

    values: Any


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.tensor([0.0, torch.nan])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)),
        (np.float32(1), np.float32(2)),
        (np.array(["a", "b"]), np.array(["ab"])),
        (float("nan"), float("inf")),
        ({1, 2}, {1, 3}),
        ({"a": (1, None)}, {"a": (1, 0)}),
        (pd.DataFrame({"a": [1.0, None]}), pd.DataFrame({"a": [1.0, 2.0]})),
    ],
)
def test_every_value_of_a_result_counts(one: Any, two: Any) -> None:
    copy = one.clone() if isinstance(one, torch.Tensor) else one
    assert Odd(one).digest == Odd(copy).digest != Odd(two).digest
    assert "computed elsewhere" in Odd(one).cite().text


def test_all_nans_are_one() -> None:
    bits = torch.tensor([0x7FC00000, 0xFFC00001 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    assert Odd(bits[:1]).digest == Odd(bits[1:]).digest


# ---- figures --------------------------------------------------------------------------------------------------------------


def drawn(height: float = 1.0) -> Any:
    figure = picture(2, 2)
    figure.subplots().plot([0, height])
    return figure


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_figure_carries_its_digest(tmp_path: Path, kind: str) -> None:
    files = [tmp_path / f"{name}.{kind}" for name in "abc"]
    for file, height in zip(files, (1, 1, 1.5), strict=True):
        drawn(height).savefig(file)
    one, two, other = (stamp_of(file.read_bytes()) for file in files)
    assert one is not None and one == two != other and one.intact and one.source == ""
    damaged = bytearray(files[0].read_bytes())
    damaged[-20] ^= 1
    found = stamp_of(bytes(damaged))
    assert found is not None and found.identifier == one.identifier and not found.intact


def test_a_png_is_still_a_png(tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawn().savefig(tmp_path / "a.png", dpi=50)
    assert imread(tmp_path / "a.png").shape == (100, 100, 4) and drawn()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(BadRequest, match="cut off"):
        stamp_of((tmp_path / "a.png").read_bytes()[:50])
    with pytest.raises(BadRequest, match="neither"):
        stamped(b"%PDF")
    drawn().savefig(tmp_path / "a.pdf")
    assert stamp_of((tmp_path / "a.pdf").read_bytes()) is None


def test_a_report_page_names_its_dump_and_how_to_make_it_again(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["report", folder / "dump", folder / "report", "--out", tmp_path / "page.html", "--verify", 0, "--quiet"]
    assert called(*words)[0] == 0
    page = (tmp_path / "page.html").read_bytes()
    stamp = stamp_of(page)
    assert stamp is not None and stamp.intact
    assert stamp.sources == [Dump.open(folder / "dump").cite().identifier, made_report(run).cite().identifier]
    line = re.search(r'id="rl-again">(.*?)</code>', page.decode())
    assert line is not None and line[1].split()[:2] == ["replaylens", "report"]
    assert called(*line[1].split()[1:], "--quiet")[0] == 0 and (tmp_path / "page.html").read_bytes() == page
    assert made_report(run).cite().identifier in page.decode() and "@misc" in page.decode()
    assert not stamp_of(page.replace(b"coin", b"cent", 1)).intact  # type: ignore[union-attr]
    assert "rl-again" not in ReportPage(probes=(made_report(run),)).html()


def test_a_page_names_all_that_it_shows(engine: Engine, run: Run, folder: Path, tmp_path: Path) -> None:
    """Dump and reports are given as they are, or by path; whatever is shown is found by its identifier."""
    found, result = Rollouts.load(folder / "rollouts"), rl.lens(engine, PROMPT)
    every = [Dump.open(folder / "dump"), made_report(run), result, found]
    shown = {"dump": folder / "dump", "probes": str(folder / "report"), "results": [result, found]}
    given = {"dump": every[0], "probes": every[1], "results": every[2:]}
    for name, parts in (("paths", shown), ("given", given), ("listed", {**given, "probes": [folder / "report"]})):
        page = rl.report(tmp_path / f"{name}.html", **parts)
        code, out = called("verify", page)
        assert code == 0 and out.startswith("verified: page"), out
        assert re.findall("it shows (.*)", out) == [each.cite().identifier for each in every], name
        assert all(each.cite().identifier in page.read_text().partition('id="cite"')[2] for each in every)
    assert (tmp_path / "paths.html").read_bytes() == (tmp_path / "given.html").read_bytes()
    code, out = called("verify", result.cite().identifier, "--in", tmp_path)
    assert code == 2 and re.search(r"(given|listed|paths)\.html shows it", out.replace("\n", " ")), out
    tree = rl.probes.RolloutTexts.of(found).tree()
    tree.save(tmp_path / "tree.html")
    assert f"it shows {tree.source}" in called("verify", tmp_path / "tree.html")[1]
    assert stamp_of(ReportPage(rollouts=(tree,)).html().encode()).sources == [tree.source]  # type: ignore[union-attr]
    for wrong in ({"probes": 5}, {"probes": [5]}, {"probes": every[0]}, {"dump": 5}, {"dump": every[1]}):
        with pytest.raises(BadRequest, match=r"or (its|their) path"):
            rl.report(tmp_path / "no.html", **wrong)
    for absent in ({"probes": "gone"}, {"probes": ["gone"]}, {"dump": str(tmp_path / "gone")}):
        with pytest.raises((BadFile, BadDump), match="gone"):
            rl.report(tmp_path / "no.html", **absent)


# ---- verify ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_finds_each_kind(run: Run, folder: Path) -> None:
    dump = Dump.open(folder / "dump")
    figure = stamp_of((folder / "report" / "transfer.png").read_bytes())
    assert figure is not None and figure.source == made_report(run).cite().identifier
    wanted = {
        dump.cite().identifier: "examples replayed",
        dump.cite(row=2).identifier: "1 of",
        Rollouts.load(folder / "rollouts").cite().identifier: "rollouts drawn again",
        made_report(run).cite().identifier: "report",
        figure.identifier: "it shows replaylens:sha256:",
    }
    for identifier, said in wanted.items():
        code, out = called("verify", identifier, "--in", folder, "--quiet", "--sample", 1)
        assert code == 0 and out.startswith("verified") and said in out, out


def test_every_file_that_we_write_is_verified_or_leads_to_its_folder(folder: Path, tmp_path: Path) -> None:
    """Probes by file, by the name that both files share, and by folder; a part of something larger names that."""
    for name, kind in (KINDS | {"sweep": SWEEP}).items():
        (tmp_path / name).mkdir()
        kind.save(tmp_path / name, 1)
    for file in [*folder.rglob("*"), *tmp_path.rglob("*")]:
        code, out = called("verify", file, "--quiet")
        out = out.replace("\n", " ")
        if code == 0:
            assert out.startswith("verified: "), out
            continue
        assert code == 2 and "manifest.json." not in out and str(file) in out, out
        instead = re.search(r"replaylens verify (\S+)\.", out)
        assert instead is None or instead[1] == str(file.parent), out
        others = "bundle", "trace", "model", "state", "page", "tree", "board", "figure"
        assert instead or file.name in others or (file.parent.name in others[:4] and "replaylens verif" not in out), out
    for path in ("probe/probe", "probe/probe.json", "probe/probe.safetensors", "probe"):
        code, out = called("verify", tmp_path / path)
        assert code == 0 and "LinearProbe(face at S0" in out, out
    flip_bit(tmp_path / "probe" / "probe.safetensors", -9)
    for path in ("probe/probe", "probe"):
        code, out = called("verify", tmp_path / path)
        assert code == 1 and "probe.safetensors was changed" in out, out
    for path in ("model", "model/replaylens.json", "model/model.safetensors", "state/training.safetensors"):
        assert "replaylens doctor" in called("verify", tmp_path / path)[1]


@pytest.mark.slow
def test_a_result_without_a_file_says_how_it_is_made_again(engine: Engine, tmp_path: Path) -> None:
    """With a figure of it there, its name, too."""
    result = rl.lens(engine, PROMPT)
    for said in (("has no file", "reproduce NAME"), ("lens.svg shows it", "has no file")):
        code, out = called("verify", result.cite().identifier, "--in", tmp_path)
        assert code == 2 and all(each in out.replace("\n", " ") for each in said), out
        result.plot().savefig(tmp_path / "lens.svg")
    assert called("verify", tmp_path / "lens.svg")[0] == 0
    a_probe(1).save(tmp_path / "probe")
    assert "has no file" in called("verify", result.cite().identifier, "--in", tmp_path / "probe.json")[1]


def test_an_identifier_of_nothing(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        ([Identifier("0" * 64), "--in", folder], "in none of 4 results"),
        ([Identifier("0" * 64, (0, 0, 0)), "--in", folder], "in none of"),
        ([Identifier("0" * 64), "--in", tmp_path / "gone"], "does not exist"),
        ([folder / "dump", "--in", folder], "is a path"),
        (["replaylens:sha256:12"], "Invalid identifier"),
    ):
        code, out = called("verify", *words)
        assert code == 2 and said in out.replace("\n", " "), out


def test_verify_names_damage(folder: Path, tmp_path: Path) -> None:
    drawn().savefig(tmp_path / "plain.svg")
    code, out = called("verify", tmp_path / "plain.svg")
    assert code == 0 and "verified: figure" in out
    text = (tmp_path / "plain.svg").read_text()
    (tmp_path / "plain.svg").write_text(text.replace("stroke", "strake", 1))
    assert called("verify", tmp_path / "plain.svg")[0] == 1
    (tmp_path / "foreign.svg").write_text("<svg></svg>")
    code, out = called("verify", tmp_path / "foreign.svg")
    assert code == 2 and "carries no identifier" in out
    good = json.loads((folder / "report" / "report.json").read_text())
    odd = [good | {"rows": 3}, good | {"source": []}, good | {"kind": None}, good | {"notes": [float("nan")]}, {}, []]
    for content in (*(json.dumps(each).encode() for each in odd), b"\x80\x04}.", b"[" * 100_000, b""):
        (tmp_path / "other.json").write_bytes(content)
        code, out = called("verify", tmp_path / "other.json")
        assert code == 2 and "BadFile" in out and "is not a report" in out.replace("\n", " "), out


def test_a_changed_summary_is_a_mismatch(run: Run, tmp_path: Path) -> None:
    """Readers look at the verdict in words."""
    made_report(run).save(tmp_path)
    assert called("verify", tmp_path)[0] == 0
    raw = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(raw | {"summary": ["Shown: everything."]}))
    code, out = called("verify", tmp_path)
    assert code == 1 and "the summary in report.json is not that of its numbers" in out, out
    (tmp_path / "report.json").write_text(json.dumps(raw | {"findings": ["Shown: everything."]}))
    assert called("verify", tmp_path)[0] == 1


def test_rollouts_are_drawn_again(engine: Engine, folder: Path, tmp_path: Path) -> None:
    code, out = called("verify", folder / "rollouts", "--sample", "50%")
    assert code == 0 and "2 of 4 rollouts drawn again" in out and "trust: 2 of 4 rollouts: only their hashes" in out, out
    assert told_parts(out) == sorted(each.name for each in fields(ResamplePlanRecord)), out
    found = Rollouts.load(folder / "rollouts")
    state = {site: rows.clone() for site, rows in found[2].states.items()}
    next(iter(state.values())).view(torch.int32)[0, 0] ^= 1
    assert redrawn(engine, found, [2, 0])[0].digest == found[2].digest != replace(found[2], states=state).digest
    for file in (folder / "rollouts").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    flip_bit(next(tmp_path.glob("*.safetensors")), 200)
    code, out = called("verify", tmp_path)
    assert code == 1 and out.startswith("mismatch: rollouts") and "was changed" in out, out
    for wrong in ("-3", "0.0", "nan", "inf"):
        code, out = called("verify", folder / "rollouts", f"--sample={wrong}")
        assert code == 2 and "Invalid --sample" in out, out


def test_other_texts_of_rollouts_are_a_mismatch(folder: Path, tmp_path: Path) -> None:
    """Whoever writes a folder seals it: texts that are not those of the plan's tokens are noticed all the same."""
    found = Rollouts.load(folder / "rollouts")
    for texts, code in (((*found.plan.texts[:-1], "other"), 1), (found.plan.texts, 0)):
        forged = WaveFolder.create(tmp_path / str(code), replace(found.plan, texts=texts), len(found), found.made_by)
        forged.write(0, found.rollouts)
        done, out = called("verify", tmp_path / str(code))
        assert done == code and ("the texts of the plan are not those of its tokens" in out) == bool(code), out


def test_the_identifier_of_rollouts_covers_model_and_prompt(engine: Engine) -> None:
    """Also where their tokens and texts are the same."""
    made = []
    for served, name in ((engine, "Alice"), (engine, "Bob"), (Engine.load("coin-draft"), "Alice")):
        with served.prompt(f"A coin's state is heads. {name} flips. What's the state? A:") as root:
            made.append(root.resample(5, max_new=2))
    assert len({each.digest for each in made}) == 1, "control: the rollouts themselves are the same"
    assert len({each.cite().identifier for each in made}) == 3


def test_rollouts_under_edits_are_drawn_again(engine: Engine) -> None:
    edit = Edit("S", "scale", layers=[2], factor=3.0, positions=slice(3, None))
    with engine.prompt(PROMPT) as root:
        found = root.fork(edits=[edit])[0].resample(3, max_new=4, sampling=Sampling(temperature=1.5), sites="S")
        plain = root.resample(3, max_new=4, sampling=Sampling(temperature=1.5), sites="S")
    assert [each.digest for each in redrawn(engine, found, range(3))] == [each.digest for each in found]
    assert plain.digest != found.digest


def test_no_command_is_cited_that_cannot_run(engine: Engine, folder: Path, tmp_path: Path) -> None:
    """A function of the reader's is in no file, and settled rollouts have no folder; a dump of a function's choice needs it."""
    with engine.prompt(PROMPT) as root:
        by_function = root.resample(2, max_new=2, answer=Answer.function(lambda text: "heads"), folder=tmp_path / "by")
        settled = root.resample(90, max_new=2, answer=Answer.regex("heads|tails"), settle=0.2)
    assert len(settled) < 90
    for found in (by_function, Rollouts.load(tmp_path / "by"), settled):
        assert "replaylens verify" not in str(found.cite()) and "the same call of resample in Python" in found.cite().check
    assert "needs the function" in by_function.cite().check and "function" not in settled.cite().check
    code, out = called("verify", tmp_path / "by")
    assert code == 2 and "Draw them again in Python" in out.replace("\n", " "), out
    shown = Rollouts.load(folder / "rollouts").cite().check.replace("FOLDER,", f"{folder},").split(",")[0].split()
    assert shown[:2] == ["replaylens", "verify"] and called(*shown[1:])[0] == 0, "control"
    chosen = write_dump(
        engine, make_plan(engine, tasks.get("coin")(), 1, sites="S", positions=lambda path: {0}), tmp_path / "chosen"
    )
    assert chosen is not None
    page = ReportPage(chosen, ()).save(tmp_path / "page.html", progress=False).read_text()
    for said in (chosen.cite().check, page, called("inspect", chosen.url)[1]):
        assert "replaylens verify" not in said and "selector=" in said


def test_rollouts_that_cannot_be_drawn_again(engine: Engine, folder: Path, tmp_path: Path) -> None:
    found = Rollouts.load(folder / "rollouts")
    with pytest.raises(BadRequest, match="function"):
        redrawn(engine, replace(found, plan=replace(found.plan, answer=None)), [0])
    other: Any = SimpleNamespace(fingerprint=replace(engine.fingerprint, dtype="bfloat16"))
    with pytest.raises(FingerprintMismatch):
        redrawn(other, found, [0])
    for file in (folder / "rollouts").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert raw["made_by"]["canonical"] == "portable-1"
    raw["made_by"]["dtype"] = "bfloat16"
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(BadFile, match="made_by"):
        Rollouts.load(tmp_path)
    del raw["made_by"]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    assert Rollouts.load(tmp_path).digest == found.digest
    code, out = called("verify", tmp_path)
    assert code == 2 and "--model" in out
    assert called("verify", tmp_path, "--model", "coin-plain")[0] == 0


# ---- CITATION.cff ---------------------------------------------------------------------------------------------------------


def test_the_citation_file_is_valid_and_current() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found) and found["cff-version"] == "1.2.0"
    assert found["version"] == rl.__version__ and found["type"] == "software" and found["authors"]
