"""Models by their names on the hub: from a cache laid out as the hub's, and from a small hub on the loopback."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
import torch

from replaylens import Engine, tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.errors import BadRequest, FetchFailed, UnsupportedModel
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.records import Fingerprint
from replaylens.thinking.core import ThinkingEngine
from replaylens.weights import hub, zoo
from replaylens.weights.hub import HubOptions, fetch_snapshot
from replaylens.weights.loading import load, save
from tests.dumps.test_cli import run
from tests.families import hugging_face, hugging_face_folder
from tests.weights.test_adapter import KINDS, trained

COMMIT, OLDER = "1" * 40, "2" * 40
NAME = "org/tiny"


def put(cache: Path, name: str, commit: str, files: Path, **refs: str) -> Path:
    """Lay a model out as the hub's cache does: blobs by their hashes, snapshots of links to them, refs with commits."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    for ref, at in refs.items():
        (root / "refs" / ref).write_text(at)
    return snapshot


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a model and of another one."""
    folder = tmp_path_factory.mktemp("models")
    hugging_face_folder("llama", folder / "llama")
    hugging_face("gpt2").save_pretrained(folder / "gpt2", max_shard_size="20kB")
    return folder


@pytest.fixture
def cache(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of org/tiny, which are two models, and gpt2 in shards; no folder of their names here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    put(tmp_path / "hub", NAME, COMMIT, models / "llama", main=COMMIT)
    put(tmp_path / "hub", NAME, OLDER, models / "gpt2", old=OLDER)
    put(tmp_path / "hub", "gpt2", COMMIT, models / "gpt2", main=COMMIT)
    return tmp_path / "hub"


# Names, revisions and what the fingerprint says


def test_a_name_loads_the_snapshot_of_its_main_branch(cache: Path, models: Path) -> None:
    """Equal weights and config as from the folder; the fingerprint names the commit beside them."""
    named, folder = Engine.load(NAME), Engine.load(models / "llama")
    assert named.fingerprint.revision == f"{NAME}@{COMMIT}"
    assert named.fingerprint.weights == folder.fingerprint.weights and named.fingerprint.config == folder.fingerprint.config
    assert named.fingerprint.digest != folder.fingerprint.digest
    assert named.fingerprint.differences(folder.fingerprint) == [f"revision: {NAME}@{COMMIT} here,  there"]
    assert torch.equal(named.logits([[1, 2, 3]])[0], folder.logits([[1, 2, 3]])[0])
    assert Engine.load("gpt2").fingerprint.revision == f"gpt2@{COMMIT}"


@pytest.mark.parametrize("revision", [OLDER, "old"])
def test_a_revision_is_a_commit_or_a_branch(cache: Path, models: Path, revision: str) -> None:
    older = weights_hash(load(models / "gpt2"))
    for engine in (Engine.load(NAME, revision=revision), Engine.load(f"{NAME}@{revision}")):
        assert engine.fingerprint.weights == older and engine.fingerprint.revision == f"{NAME}@{OLDER}"


def test_fingerprints_of_other_models_have_no_revision(models: Path) -> None:
    """Their bytes are those of versions without revisions, and such bytes can be read."""
    found = Engine.load(models / "llama").fingerprint
    assert "revision" not in found.to_json() and Fingerprint(**json.loads(found.to_json())) == found


def test_a_difference_counts_if_either_side_is_bound_to_it(models: Path) -> None:
    """Portable arithmetic is not bound to a version of torch, other arithmetic is. Control: two portable ones do not differ."""
    portable = Engine.load(models / "llama").fingerprint
    assert portable.differences(replace(portable, torch="0.1")) == []
    bound = replace(portable, canonical="another", torch="0.1")
    for one, two in ((portable, bound), (bound, portable)):
        assert sorted(line.split(":")[0] for line in one.differences(two)) == ["canonical", "torch"]


def test_dumps_and_traces_and_checkpoints_keep_the_commit(cache: Path, tmp_path: Path) -> None:
    engine = Engine.load(NAME, record=True)
    dump = engine.replay([[1, 2, 3], [4, 5]], sites="S").save(tmp_path / "dump")
    assert json.loads((tmp_path / "dump" / "manifest.json").read_bytes())["fingerprint"]["revision"] == f"{NAME}@{COMMIT}"
    assert Dump.open(tmp_path / "dump").manifest.fingerprint == engine.fingerprint and len(dump) == 5
    save(engine.model, tmp_path / "own")
    assert Engine.load(tmp_path / "own").fingerprint == engine.fingerprint
    engine.trace.save(tmp_path / "trace")
    assert type(engine.trace).load(tmp_path / "trace").fingerprint == engine.fingerprint


def test_a_path_comes_before_a_name(cache: Path, models: Path) -> None:
    """As in transformers; options of the hub are then refused, since they would be ignored."""
    shutil.copytree(models / "llama", "gpt2")
    assert Engine.load("gpt2").fingerprint == Engine.load(models / "llama").fingerprint
    with pytest.raises(BadRequest, match=r"revision= goes with the name of a model on the Hugging Face hub, not with 'gpt2'"):
        Engine.load("gpt2", revision="main")
    with pytest.raises(BadRequest, match="cache_dir= goes with the name"):
        Engine.load("coin-plain", cache_dir="x")
    with pytest.raises(BadRequest, match="local_files_only= goes with the name"):
        Engine.load(hugging_face("llama"), local_files_only=True)


def test_a_cache_of_ones_own(cache: Path, models: Path, tmp_path: Path) -> None:
    put(tmp_path / "other", "org/b", COMMIT, models / "llama", main=COMMIT)
    assert Engine.load("org/b", cache_dir=tmp_path / "other").fingerprint.revision == f"org/b@{COMMIT}"
    assert Engine.load(NAME, draft_model=NAME).fingerprint.revision == f"{NAME}@{COMMIT}"


def test_adapters_and_their_bases_by_name(cache: Path, models: Path, tmp_path: Path) -> None:
    trained(*KINDS["attention and MLP"], tmp_path / "base", tmp_path / "adapter")
    merged = load(tmp_path / "base", adapter=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for revision in (None, COMMIT):
        changed = {**config, "base_model_name_or_path": NAME, "revision": revision}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(changed))
        alone = Engine.load(tmp_path / "adapter")
        assert weights_hash(alone.model) == weights_hash(merged) and alone.fingerprint.revision == f"{NAME}@{COMMIT}"
    put(cache, "org/lora", COMMIT, tmp_path / "adapter", main=COMMIT)
    for both in (Engine.load("org/lora"), Engine.load(NAME, adapter="org/lora")):
        assert both.fingerprint == alone.fingerprint


@pytest.mark.slow
def test_commands_take_names(cache: Path, tmp_path: Path) -> None:
    """A dump is made and verified by name, also without naming the model again; what is not in the cache is not fetched."""
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4, 5]}\n')
    made = ["--texts", tmp_path / "texts.jsonl", "--text", "tokens", "--sites", "S", "--quiet"]
    code, out, err = run("dump", "--model", f"{NAME}@old", "--out", tmp_path / "dump", *made)
    assert code == 0, err
    assert f"{NAME}@{OLDER}" in run("inspect", tmp_path / "dump")[1]
    assert run("verify", tmp_path / "dump", "--all", "--quiet")[1].startswith("verified")
    code, out, _ = run("verify", tmp_path / "dump", "--all", "--quiet", "--model", NAME)
    assert code == 2 and "other fingerprint" in out
    shutil.rmtree(cache)
    code, out, _ = run("verify", tmp_path / "dump", "--all", "--quiet")
    assert code == 2 and f"Fetch it with --model {NAME}@{OLDER}" in out


def test_a_thinking_states_model_by_name_thinks(cache: Path, tmp_path: Path) -> None:
    """As from its folder, with the commit beside it: not as its backbone, which is a checkpoint, too. A dump finds it again."""
    name, prompt = "org/thinks", "A coin's state is heads. Alice flips. Bob flips. What's the state? A:"
    put(cache, name, COMMIT, zoo.CHECKPOINTS / "coin-thinking", main=COMMIT)
    named, folder = Engine.load(name, guess="sequential"), Engine.load(zoo.CHECKPOINTS / "coin-thinking")
    assert isinstance(named, ThinkingEngine) and named.guess == "sequential"
    assert named.fingerprint == replace(folder.fingerprint, revision=f"{name}@{COMMIT}")
    one, other = (engine.prompt(prompt) for engine in (named, folder))
    assert [t.tokens for t in one.thoughts.chunks] == [t.tokens for t in other.thoughts.chunks] and one.thoughts.chunks[
        0
    ].tokens
    assert torch.equal(one.logits(), other.logits())
    Engine.load(name).replay(tasks.get("coin")(flips=2).examples(2), sites="S", drafter="ngram").save(tmp_path / "dump")
    assert run("verify", tmp_path / "dump", "--all", "--quiet")[1].startswith("verified")
    with pytest.raises(BadRequest, match="adapter= goes with the folder of a base model, not with a Thinking-States model"):
        Engine.load(name, adapter=tmp_path)


def test_half_of_a_thinking_states_model_is_refused(cache: Path) -> None:
    """T and C are weights that the snapshot needs: without them, a backbone would answer in the model's name."""
    snapshot = put(cache, "org/thinks", COMMIT, zoo.CHECKPOINTS / "coin-thinking", main=COMMIT)
    (snapshot / "thinking.safetensors").unlink()
    with pytest.raises(FetchFailed, match=r"The snapshot of org/thinks at .* is incomplete, and offline mode forbids"):
        Engine.load("org/thinks")


# What is refused


@pytest.mark.parametrize(
    ("source", "options", "error", "text"),
    [
        ("org/none", {}, FetchFailed, "org/none is neither a path here nor in the cache .* offline mode forbids asking"),
        (NAME, {"revision": "v9"}, FetchFailed, f"no revision 'v9' of {NAME} .it has main, old, {COMMIT}, {OLDER}"),
        (NAME, {"revision": "3" * 40}, FetchFailed, "no revision '3333"),
        (f"{NAME}@main", {"revision": "old"}, BadRequest, "names a revision, and revision='old' another"),
        (NAME, {"revision": 3}, BadRequest, "Invalid revision=3"),
        (NAME, {"token": ["s3cret"]}, BadRequest, "Invalid token=list"),
        (NAME, {"local_files_only": 1}, BadRequest, "Invalid local_files_only=1"),
        ("a--b", {}, UnsupportedModel, "nor a name on the Hugging Face hub"),
        ("/nope/x.gguf", {}, UnsupportedModel, r"/nope/x\.gguf does not exist"),
        ("x.gguf", {}, UnsupportedModel, r"x\.gguf does not exist"),
        ("./gpt2", {}, UnsupportedModel, "gpt2 does not exist"),
        (Path("gpt2"), {}, UnsupportedModel, "gpt2 does not exist"),
        ("coin-plian", {}, UnsupportedModel, "did you mean 'coin-plain'"),
        ("SmolLM2", {}, UnsupportedModel, "did you mean 'smollm2'"),
        (
            "banana",
            {},
            FetchFailed,
            r"banana is neither a path.*Models of replaylens: coin-plain, .*smollm2, gemma3-270m\.",
        ),
        ("", {}, UnsupportedModel, r"'' does not exist.*Known: coin-plain"),
        (None, {}, UnsupportedModel, r"None \(NoneType\).*a name such as 'smollm2' or 'gpt2', a folder"),
        ("coin-plain", {"revision": "x"}, BadRequest, "not with 'coin-plain', which is a model of replaylens"),
        ("coin-thinking", {"revision": "x"}, BadRequest, "which is a model of replaylens"),
        ("smollm2", {"revision": "x"}, BadRequest, "not with 'smollm2', which is a model of replaylens"),
    ],
)
def test_what_is_not_there_is_named(cache: Path, source: str, options: dict[str, object], error: type, text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        Engine.load(source, **options)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("missing", ["config.json", "model-00002", "index.json"])
def test_a_part_of_a_snapshot_is_refused(cache: Path, missing: str) -> None:
    """By huggingface_hub, which keeps a list of a commit's files, and by us in caches without one."""
    snapshot = cache / "models--gpt2" / "snapshots" / COMMIT
    whole = sorted(file.name for file in snapshot.iterdir())
    for file in snapshot.glob(f"*{missing}*"):
        file.unlink()
    with pytest.raises(FetchFailed, match=r"The snapshot of gpt2 at .* is incomplete, and offline mode forbids"):
        Engine.load("gpt2")
    assert hub._Repository("gpt2", HubOptions(COMMIT)).cached() is None and len(whole) > 4


def test_a_repository_without_safetensors_is_refused(cache: Path) -> None:
    snapshot = cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=f"{NAME}@{COMMIT} has no model.safetensors: it holds pytorch_model.bin"):
        Engine.load(NAME)
    (snapshot / "pytorch_model.bin").unlink()  # as a library that looked for it leaves the cache
    marker = snapshot.parents[1] / ".no_exist" / COMMIT / "model.safetensors"
    marker.parent.mkdir(parents=True)
    marker.touch()
    with pytest.raises(UnsupportedModel, match="it holds no weights"):
        Engine.load(NAME)


# A hub that answers


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses. Counts what is asked."""

    repositories: ClassVar[dict[str, Path]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        name = next((known for known in self.repositories if known in path), "")
        if not name:
            gated = "gated" in path
            return self._send(403 if gated else 404, b"{}", {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"})
        folder, last = self.repositories[name], path.rpartition("/")[2]
        if "/revision/" in path and last != "main":
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if "/revision/" in path:
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            return self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file)} for file in folder.iterdir()
            ]
            return self._send(200, json.dumps(tree).encode(), {}, body)
        content = (folder / last).read_bytes()
        return self._send(200, content, {"ETag": f'"{_oid(folder / last)}"', "X-Repo-Commit": COMMIT}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def server(models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    """A hub on the loopback with the model org/new, and an empty cache."""
    shutil.rmtree(cache)
    _Hub.repositories, _Hub.asked = {"org/new": models / "gpt2"}, []
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    online(monkeypatch, listening.server_port)
    yield _Hub
    listening.shutdown()
    listening.server_close()


def online(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let huggingface_hub ask the hub at this port of the loopback."""
    address, known = f"http://127.0.0.1:{port}", huggingface_hub.constants
    monkeypatch.setattr(known, "ENDPOINT", address)
    monkeypatch.setattr(known, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(known, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def test_a_name_that_is_here_is_not_asked_for(server: type[_Hub], models: Path, cache: Path) -> None:
    put(cache, "org/new", COMMIT, models / "gpt2", main=COMMIT)
    Engine.load("org/new", local_files_only=True)
    assert server.asked == []
    Engine.load("org/new")
    assert server.asked, "control: a branch may have moved"


@pytest.mark.slow
def test_a_name_is_downloaded_once(server: type[_Hub], models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, a commit is not asked for at all; offline, the branch is as it was."""
    (extra := models / "gpt2" / "pytorch_model.bin").write_bytes(b"a pickle")
    try:
        engine = Engine.load("org/new")
    finally:
        extra.unlink()
    assert engine.fingerprint.revision == f"org/new@{COMMIT}"
    assert engine.fingerprint.weights == weights_hash(load(models / "gpt2"))
    assert not any("pytorch_model.bin" in each for each in server.asked), "pickles are not downloaded"
    server.asked.clear()
    assert fetch_snapshot(f"org/new@{COMMIT}").revision == engine.fingerprint.revision and server.asked == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch_snapshot("org/new", HubOptions(local_files_only=True)).revision == engine.fingerprint.revision
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    (weights := next(cache.rglob("snapshots/*/model-00002*"))).unlink()
    server.asked.clear()
    assert fetch_snapshot("org/new").folder == weights.parent and weights.exists(), "a part that is missing is downloaded"
    assert sum("GET" in each and "resolve" in each for each in server.asked) <= 1


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("org/unknown", UnsupportedModel, "org/unknown is neither a path here nor a model on the Hugging Face hub"),
        ("org/gated", FetchFailed, "org/gated is gated.*HF_TOKEN"),
        ("org/new@v9", BadRequest, "org/new has no revision 'v9' on the Hugging Face hub"),
    ],
)
def test_answers_of_the_hub_are_named(server: type[_Hub], source: str, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Engine.load(source)


def test_weights_are_not_downloaded_in_vain(server: type[_Hub], models: Path, tmp_path: Path) -> None:
    """A family that is not supported, and a repository without safetensors, are refused before."""
    shutil.copytree(models / "gpt2", tmp_path / "rwkv")
    (tmp_path / "rwkv" / "config.json").write_text('{"model_type": "rwkv"}')
    shutil.copytree(models / "llama", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    server.repositories = {"org/rwkv": tmp_path / "rwkv", "org/pickled": tmp_path / "pickled"}
    with pytest.raises(UnsupportedModel, match="rwkv"):
        Engine.load("org/rwkv")
    with pytest.raises(UnsupportedModel, match=r"has no model\.safetensors: it holds pytorch_model\.bin"):
        Engine.load("org/pickled")
    assert not any(each.endswith((".safetensors", ".bin")) for each in server.asked)


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port in place of the hub: what is in the cache loads, the rest is refused with the reason."""
    online(monkeypatch, 9)
    assert Engine.load(NAME).fingerprint.revision == f"{NAME}@{COMMIT}"
    with pytest.raises(FetchFailed, match=r"org/none .* the hub cannot be reached \(.*refused.*\). Check the network"):
        Engine.load("org/none")


@pytest.mark.parametrize("ref", [b"\xff\xfe", b"../../outside", b"main"])
def test_a_ref_that_is_no_commit(cache: Path, models: Path, ref: bytes) -> None:
    """A damaged or forged ref leads to no folder, in the cache or outside of it."""
    root = cache / "models--org--tiny"
    (root / "refs" / "main").write_bytes(ref)
    for place in (root / "snapshots" / "main", cache / "outside"):
        shutil.copytree(models / "llama", place)
    with pytest.raises(FetchFailed, match="The hub's cache of org/tiny is damaged"):
        Engine.load(NAME)


@pytest.mark.parametrize("revision", ["../snapshots/x", "/etc", "a/../b"])
def test_revisions_stay_in_the_cache(cache: Path, revision: str) -> None:
    with pytest.raises(BadRequest, match="is no revision of"):
        Engine.load(NAME, revision=revision)
