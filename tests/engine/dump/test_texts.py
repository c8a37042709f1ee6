"""Dumps of given texts: they hold the texts, verify from the folder alone, and keep positions by name."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replaylens import Dump, Edit, Engine
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.plan import DumpPlan, ends_of
from replaylens.engine.dump.verify import verify
from replaylens.engine.errors import BadDump, BadRequest, NotCaptured, PlanMismatch
from replaylens.tasks.texts import GivenTexts
from tests.engine.dump.test_cli import run as command

TEXTS = ["A coin's state is heads. Alice flips", "A coin's state is tails.", " Alice flips. Alice flips"]
LABELS = {"up": [True, False, None], "score": [0.1, 1 / 3, 2.0], "word": [None, [None, *"bcdef"], None]}
SITE = "blocks.2.hook_in"


@pytest.fixture(scope="module")
def coin() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture(scope="module")
def texts(coin: Engine) -> GivenTexts:
    return coin.texts(TEXTS, labels=LABELS)


@pytest.fixture(scope="module")
def dump(coin: Engine, texts: GivenTexts, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    plan = make_plan(coin, texts, len(texts), sites=[SITE], examples_per_shard=2)
    made = write_dump(coin, plan, tmp_path_factory.mktemp("texts") / "d", batch=1)
    assert made is not None
    return made


def test_a_run_and_a_plan_write_the_same_dump(coin: Engine, texts: GivenTexts, dump: Dump, tmp_path: Path) -> None:
    saved = coin.replay(TEXTS, labels=LABELS, sites=[SITE], drafter="lens").save(tmp_path / "d", examples_per_shard=2)
    assert saved.digest == dump.digest and saved.manifest.plan == dump.manifest.plan
    assert dump.manifest.labels == {"up": "bool", "score": "double", "word": "string", "shuffled": "int64"}
    frame = dump.to_pandas()
    assert frame[frame["example"] == 1]["score"].tolist() == [1 / 3] * 6, "all 64 bits of a number"
    assert frame[frame["example"] == 1]["word"].tolist()[1:] == list("bcdef") and frame["correct"].isna().all()
    other = coin.replay(TEXTS, labels=LABELS | {"score": [0.1, 1 / 3 + 1e-12, 2.0]}, sites=[SITE]).save(tmp_path / "e")
    assert other.digest != dump.digest, "the control: a label that differs in its last bits"
    assert torch.equal(dump.array(SITE)[:], saved.array(SITE)[:])


def test_the_folder_alone_is_replayed(dump: Dump, tmp_path: Path) -> None:
    copy = shutil.copytree(dump.url, tmp_path / "copy")
    assert verify(copy, Engine.load("coin-plain"), sample="all")
    assert Dump.open(copy).manifest.plan.make_task().examples()[1].prompt == TEXTS[1]
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace("is tails.", "is heads."))
    with pytest.raises(BadDump, match="its seal is broken"):
        verify(copy, Engine.load("coin-plain"), sample="all")
    with pytest.raises(BadDump, match="seal"):
        Dump.open(copy)


def test_other_texts_are_another_dump(coin: Engine, dump: Dump, tmp_path: Path) -> None:
    """Under a plan with another label or another token, the rows do not verify, and the dump cannot be resumed."""
    plan = dump.manifest.plan
    raw = json.loads(json.dumps(plan.knobs))
    raw["texts"][1]["labels"]["score"] = 0.5
    other = replace(plan, knobs=raw)
    (line,) = plan.differences(other)
    assert re.fullmatch(r"knobs: .*3 texts, SHA-256 .* here, .*3 texts, SHA-256 .* there", line) and len(line) < 200
    with pytest.raises(PlanMismatch, match="3 texts"):
        write_dump(coin, other, dump.url, resume=True)
    assert DumpPlan.from_json(plan.to_json()) == plan != other


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        ("text: flips", [(0, 7), (2, 1), (2, 4)]),
        ("text:Alice flips", [(0, 7), (2, 1), (2, 4)]),
        ("text:s. A", [(0, 6), (2, 3)]),
        ("label:word", [(1, position) for position in range(1, 6)]),
        ("label:up", [(0, p) for p in range(8)] + [(1, p) for p in range(6)]),
        ("-2:", [(0, 6), (0, 7), (1, 4), (1, 5), (2, 3), (2, 4)]),
        ("1:-4", [(0, 1), (0, 2), (0, 3), (1, 1)]),
        (":1", [(0, 0), (1, 0), (2, 0)]),
        ("last", [(0, 7), (1, 5), (2, 4)]),
    ],
)
def test_positions_by_name(
    coin: Engine, texts: GivenTexts, tmp_path: Path, positions: str, kept: list[tuple[int, int]]
) -> None:
    plan = make_plan(coin, texts, len(texts), sites=[SITE], positions=positions)
    made = write_dump(coin, plan, tmp_path / "d")
    assert made is not None and list(zip(made.index["example"], made.index["position"], strict=True)) == kept
    assert verify(tmp_path / "d", coin, sample="all"), "without being told the positions again"


def test_a_dump_without_rows_says_so(coin: Engine, texts: GivenTexts, tmp_path: Path) -> None:
    plan = make_plan(coin, texts, len(texts), sites=[SITE], positions="text:nowhere")
    with pytest.warns(NotCaptured, match=r"has no rows: positions='text:nowhere' chooses none of 3 examples"):
        made = write_dump(coin, plan, tmp_path / "d")
    assert made is not None and len(made.index["example"]) == 0 and verify(tmp_path / "d", coin, sample="all")


def test_positions_that_texts_do_not_have(coin: Engine, texts: GivenTexts) -> None:
    for positions, saying in (
        ("steps", "have no steps"),
        ("label:wrod", "did you mean 'word'"),
        ("text:", "Unknown positions"),
    ):
        with pytest.raises(BadRequest, match=saying):
            make_plan(coin, texts, 3, sites="S", positions=positions)
    for examples in (len(texts) + 1, [0, len(texts)]):
        with pytest.raises(BadRequest, match=f"Text {len(texts)} was asked for, but there are only {len(texts)}"):
            make_plan(coin, texts, examples, sites="S")


def test_texts_too_large_for_a_plan(coin: Engine, texts: GivenTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaylens.engine.dump.plan.MAX_TEXT_BYTES", 100)
    with pytest.raises(BadRequest, match="Write several dumps"):
        make_plan(coin, texts, 3, sites="S")


def test_the_command(dump: Dump, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    columns = [{"q": text} | {name: LABELS[name][i] for name in LABELS} for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, columns)))
    words = ["dump", "--texts", path, "--text", "q", "--label", "up,score", "--label", "word"]
    words += ["--sites", SITE, "--shard-examples", 2, "--quiet", "--out", tmp_path / "d"]
    code, out, err = command(*words)
    assert code == 0 and f"digest {dump.digest}" in out, err
    path.unlink()
    code, out, _ = command("verify", tmp_path / "d", "--all", "--quiet")
    assert code == 0 and "3 examples replayed" in out
    code, out, _ = command("inspect", tmp_path / "d")
    assert code == 0 and "3 texts, SHA-256" in out and TEXTS[0] not in out


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (["--texts", "q.jsonl", "--task", "coin"], "Leave out --task"),
        (["--texts", "q.jsonl", "--knob", "flips=2"], "Leave out --task and --knob"),
        (["--label", "up"], "Give --texts"),
        (["--texts", "none.jsonl"], "Cannot read none.jsonl"),
        (["--texts", "q.jsonl", "--workers", "2"], "does not work with Ray"),
        (["--task", "texts"], "Give at least one text"),
    ],
)
def test_commands_that_cannot_be(words: list[str], saying: str, tmp_path: Path) -> None:
    code, _, err = command("dump", *words, "--quiet", "--out", tmp_path / "d")
    assert code == 2 and saying in " ".join(err.split())


def test_inspect_shows_the_edits_of_branches(coin: Engine, tmp_path: Path) -> None:
    root = coin.prompt(TEXTS[0])
    edits = [
        Edit("blocks.1.attn.hook_z", "zero", positions=[2, 4], heads=[3]),
        Edit("S", "add", torch.ones(128), layers=[2], positions=slice(3, None)),
    ]
    (edited,) = root.fork(edits=edits)
    coin.replay([root, edited], sites="S", edits=[Edit("T", "zero", layers=[0])]).save(tmp_path / "d")
    code, out, _ = command("inspect", tmp_path / "d")
    lines = [" ".join(line.split()) for line in out.splitlines() if line.startswith("edit")]
    assert code == 0 and lines == [
        "edit of every example zero at T, all positions, layers [0]",
        "edit of text 1 set of shape [4, 32] at blocks.1.attn.o.hook_in, positions [2, 4], heads [3]",
        "edit of text 1 add of shape [128] at blocks.2.hook_in, positions 3 to the end",
    ]


def test_a_branch_that_ended_is_not_continued(coin: Engine) -> None:
    """Replaying it with max_new generates nothing after its end; one that has not ended goes on."""
    root = coin.prompt("A coin's state is heads. Alice flips. What's the state? A:")
    (ended,), (cut,) = root.fork(), root.fork()
    ended.generate(12), cut.generate(1)
    assert ended.finish_reason == "eos" and cut.finish_reason is None
    again, longer = coin.replay([ended, cut], max_new=3)
    assert again.tokens == ended.tokens and len(longer.tokens) > cut.length


@pytest.mark.parametrize(
    ("substring", "pieces", "ends"),
    [
        ("aa", ["a", "a", "a", "b"], [1, 2]),
        ("aba", ["ab", "ab", "a"], [1, 2]),
        ("Paris", [" Par", "is", " is", " Paris"], [1, 3]),
        ("is", [" is is", " it is"], [0, 1]),
        ("x", ["a", "b"], []),
    ],
)
def test_every_occurrence_ends_at_a_token(substring: str, pieces: list[str], ends: list[int]) -> None:
    """Also where occurrences overlap; a token that ends several of them is named once."""
    assert ends_of(substring, pieces) == ends
