"""The explorer without a browser: its branches have the bits of the API's, undo takes back, errors are sentences."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import replaylens as rl
from replaylens.cli import app
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.serving.branch import Branch
from replaylens.living import readings
from replaylens.living.explorer import Explorer
from replaylens.living.served import ServedPage
from tests.living.conftest import PROMPT


def same(one: Branch, other: Branch) -> bool:
    return (
        one.tokens == other.tokens and torch.equal(one.kv(), other.kv()) and torch.equal(one.logits(None), other.logits(None))
    )


def unpacked(packed: dict[str, Any], steps: int = 255, kind: Any = np.uint8) -> np.ndarray:
    import base64

    return np.frombuffer(base64.b64decode(packed["data"]), dtype=kind).astype(float) / steps * packed["most"]


def test_actions_have_the_bits_of_the_api(coin: Engine, explorer: Explorer) -> None:
    """Each action beside the call that it stands for, on an engine of its own."""
    root = explorer.root.id
    other = Engine.load("coin-plain")
    mine = other.prompt(PROMPT)
    explorer.generate(root, 12)
    mine.generate(12)
    assert same(explorer.root, mine)

    (forced,) = explorer.force(root, 6, text=" Bob", n=5)
    assert same(explorer.branch(forced), mine.fork(at=6)[0].force(" Bob").generate(5))
    (by_id,) = explorer.force(root, 6, token=coin.token_ids_of([" Carol"])[0])
    assert same(explorer.branch(by_id), mine.fork(at=6)[0].force(" Carol"))

    (ablated,) = explorer.edit(root, 10, op="mlp", layer=1, n=4)
    edit = rl.Edit("C", "zero", positions=10, layers=[1])
    assert same(explorer.branch(ablated), mine.fork(at=11, edits=[edit])[0].generate(4))
    (steered,) = explorer.edit(root, 10, op="steer", layer=2, token=" tails", factor=2.0, n=4)
    vector = other.W_U[:, other.token_ids_of([" tails"])[0]]
    edit = rl.Edit("S", "add", vector, slice(10, None), layers=[2], factor=2.0, match_norm=True)
    assert same(explorer.branch(steered), mine.fork(at=11, edits=[edit])[0].generate(4))
    assert not same(explorer.branch(steered), explorer.branch(ablated)), "the control: edits change bits"
    explorer.edits["mine"] = rl.Edit("T", "scale", factor=0.5, layers=[0])
    (named,) = explorer.edit(root, 10, name="mine", n=3)
    assert same(explorer.branch(named), mine.fork(at=11, edits=[explorer.edits["mine"]])[0].generate(3))

    drawn = explorer.resample(root, 16, n=5, max_new=11, temperature=2.0, seed=3)
    wanted = mine.resample(5, at=[16], max_new=11, sampling=rl.Sampling(temperature=2.0, seed=3))
    own = [explorer.branch(number).tokens[16:] for number in drawn["branches"]]
    assert own == [list(each.tokens) for each in wanted]
    first = next(p for p in range(12) if len({tuple(path[p : p + 1]) for path in own}) > 1)
    assert drawn["parts"] == 16 + first and sum(count for _, count in drawn["counts"]) == 5

    explorer.rollback(root, to=18)
    assert same(explorer.root, mine.rollback(to=18))


def test_the_python_does_the_same(explorer: Explorer) -> None:
    root = explorer.root.id
    explorer.generate(root, 6, temperature=1.5, seed=4)
    (fork,) = explorer.force(root, 9, text=" turns")
    explorer.generate(fork, 3)
    (edited,) = explorer.edit(fork, 10, op="attention", layer=0, n=2)
    explorer.rollback(fork, to=11)
    explorer.fork(root, at=4)
    explorer.undo()
    names: dict[str, Any] = {}
    exec(explorer.python(), names)
    for number in (root, fork, edited):
        assert same(names[f"b{number}"], explorer.branch(number))
    assert explorer.python().count("fork") == 2, "what was undone is left out"


def test_undo_leaves_what_was_there(explorer: Explorer) -> None:
    """Every action, then its undo: the branches are as before, with their bits, and the engine's books are right."""
    root, engine = explorer.root.id, explorer.engine
    explorer.generate(root, 12)
    before, tokens, logits = explorer.shape(), explorer.root.tokens, explorer.root.logits(None)
    assert explorer.root.finish_reason == "eos"
    actions: list[Any] = [
        lambda: explorer.fork(root, 7, n=3),
        lambda: explorer.force(root, 7, text=" Bob", n=3),
        lambda: explorer.edit(root, 9, op="attention", layer=3, n=2),
        lambda: explorer.resample(root, 16, n=3, max_new=3),
        lambda: explorer.rollback(root, to=17),
    ]
    for action in actions:
        action()
        assert explorer.shape() != before
        while explorer.shape() != before and explorer.undo():
            pass
        assert explorer.shape() == before and explorer.root.tokens == tokens
        assert torch.equal(explorer.root.logits(None), logits) and explorer.root.states.count("generated") == len(tokens) - 17
    assert explorer.undo() == "generate" and explorer.root.length == 16 and explorer.undo() == ""
    engine.check_integrity()


def test_an_undo_that_would_take_more_is_refused(explorer: Explorer) -> None:
    explorer.generate(explorer.root.id, 3)
    explorer.root.generate(2)  # in Python, behind its back
    reply = explorer.handle({"id": 1, "do": "undo"})
    assert "It was changed since" in reply["error"] and explorer.root.length == 21


def test_readings_are_those_of_the_rows(coin: Engine, explorer: Explorer) -> None:
    """Quantised readings beside those of a capture, at every position; a fork with an edit has its own."""
    root = explorer.root.id
    explorer.generate(root, 6)
    (fork,) = explorer.edit(root, 8, op="mlp", layer=2, n=3)
    other = Engine.load("coin-plain")
    wanted = other.prompt(PROMPT, sites="Z").generate(6)
    edited = wanted.fork(at=9, edits=[rl.Edit("C", "zero", positions=8, layers=[2])])[0].generate(3)
    for number, branch, start in ((root, wanted, 0), (fork, edited, 9)):
        z = branch.activations
        (block,) = explorer.read(number, 0, 99)["blocks"]
        count = block["count"] - 1  # the last token's row is not captured yet
        assert block["first"] == start and block["count"] == branch.length - start
        entropy, emitted = z["Z.entropy"][start:, -1].numpy(), z["Z.emitted"][:, -1].numpy()
        assert np.abs(unpacked(block["entropy"])[:count] - entropy[:count]).max() <= block["entropy"]["most"] / 509
        first = max(start, 1)
        surprise = unpacked(block["surprise"])[first - start :]
        assert np.abs(surprise + emitted[first - 1 : first - 1 + len(surprise)]).max() <= block["surprise"]["most"] / 509
        ids = np.frombuffer(__import__("base64").b64decode(block["ids"]), "<u4").reshape(count + 1, 5, -1)
        assert (ids[:count] == z["Z.top_ids"][start : start + count, :, : ids.shape[2]].numpy()).all()
    look = explorer.look(root, 8, layer=1)
    assert [token for token, _ in look["next"]] == wanted.activations["Z.top_ids"][8, -1].tolist()[:10] + [
        token for token, _ in look["next"]
    ][wanted.activations["Z.top_ids"].shape[2] :]
    row = other.run_with_cache(wanted.tokens[:9])[1]["blocks.1.attn.hook_pattern"][0, :, 8, :9]
    shown = unpacked(look["attention"]).reshape(row.shape)
    assert np.abs(shown - row.numpy()).max() <= look["attention"]["most"] / 509
    values = explorer.values(root, 8, "blocks.1.hook_attn_out")
    exact = other.prompt(PROMPT, sites=["blocks.1.hook_attn_out"]).activations["blocks.1.hook_attn_out"][8]
    assert np.abs(unpacked(values, 127, np.int8) - exact.numpy()).max() <= values["most"] / 253


def test_compare_finds_the_first_token_and_layer(explorer: Explorer) -> None:
    root = explorer.root.id
    (edited,) = explorer.edit(root, 8, op="mlp", layer=2)
    explorer.branch(edited).force(explorer.root.tokens[9:])
    found = explorer.compare(root, edited)
    assert found["token"] is None, "the same tokens"
    assert (found["row"]["position"], found["row"]["site"]) == (8, "blocks.2.mlp.hook_out")
    assert found["row"]["sizes"][:3] == [0.0, 0.0, 0.0] and found["row"]["sizes"][3] > 0
    (forced,) = explorer.force(root, 6, text=" Bob")
    found = explorer.compare(root, forced)
    assert found["token"]["position"] == 6 and (found["row"]["position"], found["row"]["site"]) == (6, "blocks.0.hook_in")
    (twin,) = explorer.fork(root, at=12)
    found = explorer.compare(root, twin)
    assert found["row"] is None and found["token"]["ids"][1] is None


class Line:
    """A probe."""

    weight, bias = np.linspace(-1, 1, 128, dtype=np.float32)[None], np.array([0.25], dtype=np.float32)
    classes, label, site = ("no", "yes"), "up", "blocks.2.hook_in"


def test_probes_thresholds_and_edits(coin: Engine) -> None:
    """A probe's scores under tokens are those of `Watch.scores`; what is given by name can be chosen."""
    branch = coin.prompt(PROMPT, sites="S")
    edits = {"half": rl.Edit("T", "scale", factor=0.5, layers=[0])}
    exact = coin.watch({"up": Line()}).scores(branch)["up"].numpy()
    made = branch.explore(probes={"up": Line()}, thresholds={"up": 0.5}, edits=edits)
    for explorer in (made, rl.explore(coin, PROMPT, probes={"up": Line()}, thresholds={"up": 0.5}, edits=edits)):
        (block,) = explorer.read(explorer.root.id, 0, 16)["blocks"]
        assert np.abs(unpacked(block["scores"]["up"], 127, np.int8) - exact).max() <= block["scores"]["up"]["most"] / 253
        assert explorer.tree()["probes"] == {"up": 0.5} and explorer.tree()["edits"] == ["half"]
        (edited,) = explorer.edit(explorer.root.id, 3, name="half")
        assert explorer.branch(edited).length == 4
    with pytest.raises(BadRequest, match="down"):
        branch.explore(probes={"up": Line()}, thresholds={"down": 0.5})
    with pytest.raises(BadRequest, match="edits"):
        branch.explore(edits={"x": 3})  # type: ignore[dict-item]
    branch.release()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`replaylens explore` serves at the host and port that it is told, and saves at the end."""
    asked = list[str]()

    def wait(served: ServedPage) -> None:
        asked.append(served.address)
        served.explorer.generate(served.explorer.root.id, 3)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(ServedPage, "wait", wait)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["explore", "coin-plain", PROMPT, "--port", str(port), "--host", "localhost", "--save", str(tmp_path / "t.html")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert asked[0].startswith(f"http://localhost:{port}/") and asked[0] in done.output and "ended" in done.output
    found = rl.replay_page(tmp_path / "t.html")
    assert found.same and [len(branch.tokens) for branch in found.branches.values()] == [19]


def test_errors_are_one_sentence_and_change_nothing(explorer: Explorer) -> None:
    before = explorer.shape()
    bad: list[Any] = [
        None,
        7,
        [],
        {},
        {"do": "save"},
        {"do": "__init__"},
        {"do": "root"},
        {"do": "fork"},
        {"do": "fork", "branch": "x", "at": 3},
        {"do": "fork", "branch": explorer.root.id, "at": 99},
        {"do": "fork", "branch": 999, "at": 1},
        {"do": "fork", "branch": -1, "at": 1},
        {"do": "rollback", "branch": explorer.root.id, "to": 3},
        {"do": "force", "branch": explorer.root.id, "at": 4, "text": "xyzzy"},
        {"do": "edit", "branch": explorer.root.id, "at": 4, "op": "melt"},
        {"do": "edit", "branch": explorer.root.id, "at": 4, "name": "x"},
        {"do": "read", "branch": 999, "first": 0, "end": 2},
        {"do": "look", "branch": explorer.root.id, "position": 99},
        {"do": "values", "branch": explorer.root.id, "position": 1, "site": "nowhere"},
        {"do": "find", "text": 3},
        {"do": "select", "branches": [999], "position": 0},
        {"do": "rows", "branch": None, "first": 0, "end": 1},
    ]
    for message in bad:
        reply = explorer.handle(message)
        assert isinstance(reply["error"], str) and "\n" not in reply["error"] and len(reply["error"]) > 20, message
        assert not reply["error"].startswith("Unexpected"), reply
        json.dumps(reply)
    assert explorer.shape() == before


def test_streaming_pauses_and_stops(explorer: Explorer) -> None:
    """A generation in a thread: paused, looked at meanwhile, stopped; what was yielded is what the API generates."""
    root, events, ended = explorer.root.id, list[dict[str, Any]](), threading.Event()
    seen = threading.Event()

    def hear(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "grown" and not seen.is_set():
            explorer.pause()
            seen.set()
        if event["event"] == "done":
            ended.set()

    unlisten = explorer.listen(hear)
    (branch,) = explorer.force(root, 8, text=" turns")
    assert explorer.handle({"id": "a", "do": "generate", "branch": branch, "n": 40, "temperature": 3.0}) == {
        "id": "a",
        "started": "generate",
    }
    assert seen.wait(30)
    time.sleep(0.2)
    there = explorer.work.done if explorer.work else -1
    time.sleep(0.3)
    assert explorer.work is not None and explorer.work.done == there < 40, "paused"
    assert "still running" in explorer.handle({"do": "undo"})["error"]
    assert explorer.handle({"do": "look", "branch": root, "position": 3})["reply"]["position"] == 3
    explorer.handle({"do": "stop"})
    assert ended.wait(30) and explorer.work is None
    mine = Engine.load("coin-plain").prompt(PROMPT).fork(at=8)[0].force(" turns")
    mine.generate(there, sampling=rl.Sampling(temperature=3.0))
    assert same(mine, explorer.branch(branch)) and explorer.branch(branch).length == 9 + there
    unlisten()
    count = len(events)
    explorer.undo()
    assert len(events) == count and explorer.branch(branch).length == 9


def test_what_python_does_shows(explorer: Explorer) -> None:
    events = list[dict[str, Any]]()
    explorer.listen(events.append)
    explorer.tree()
    explorer.refresh()
    assert events == []
    mine = explorer.root.fork(at=5)[0].force(" Bob")
    explorer.refresh()
    assert [line["id"] for line in events[-1]["tree"]["branches"]] == [explorer.root.id, mine.id]
    explorer.select([mine.id], 5)
    assert isinstance(explorer.selection, Branch) and explorer.selection.id == mine.id
    explorer.select([mine.id, explorer.root.id], 5)
    assert [each.id for each in explorer.selection] == [mine.id, explorer.root.id]  # type: ignore[union-attr]
    assert explorer.pin(mine.id, 5, "here") and explorer.pins[0].branch is not None and explorer.pins[0].token == " Bob"
    number = mine.id
    mine.release()
    del mine
    assert number not in {line["id"] for line in explorer.shape()}, "the explorer holds only branches that it has made"
    assert not explorer.pin(number, 5) and explorer.pins == []


def test_rows_repair_split_characters() -> None:
    """Bytes of one character over three tokens: the first shows it, the others nothing; a stray byte stays as it is."""

    class Bytes:
        eos_id = None
        tokenizer = None

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

        token = lambda self, token: self.decode([token])  # noqa: E731

    text: Any = Bytes()
    text.tokenizer = text
    ids = [65, *"€".encode(), 66, 0xE2, 67, *"é".encode()]
    assert readings.repaired(text, ids, 10) == {"11": "€", "12": "", "13": "", "17": "é", "18": ""}


def test_children_of_a_branch_that_was_rolled_back(explorer: Explorer) -> None:
    """A fork beyond a rollback stands where the paths still agree; with the tokens that its parent lost as its own."""
    root = explorer.root.id
    explorer.generate(root, 6)
    (fork,) = explorer.fork(root, at=20)
    explorer.rollback(root, to=17)
    line = next(line for line in explorer.shape() if line["id"] == fork)
    assert (line["start"], line["end"], line["parent"]) == (17, 20, root)
    rows = explorer.rows(fork, 17, 20)
    assert rows["states"] == "ggg"
    gone = next(line for line in explorer.shape() if line["id"] < 0)
    assert explorer.rows(gone["id"], gone["start"], gone["end"])["states"] == "r" * 5


def test_import_is_lazy() -> None:
    """Neither `import replaylens` nor an explorer loads anywidget; without it, the widget names what to install."""
    import subprocess
    import sys

    code = """
import sys, replaylens as rl
assert "anywidget" not in sys.modules
w = rl.explore(rl.Engine.load("coin-plain"), "A coin's state is heads.")
w.read(w.root.id, 0, 4)
assert "anywidget" not in sys.modules
sys.modules["anywidget"] = None
try:
    w._repr_mimebundle_()
except rl.errors.MissingPackage as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "replaylens[notebooks]" in done.stdout and "serve()" in done.stdout
