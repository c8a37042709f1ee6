"""Models on disk: folders of Hugging Face, checkpoints of our own, adapters, GGUF files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from replaylens.engine.errors import BadConfig, BadRequest, EngineError, FetchFailed, UnsupportedModel
from replaylens.engine.model.adapter import ADAPTER_FILE, Adapter
from replaylens.engine.model.adapter_config import read_fields
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.families import family_of
from replaylens.engine.model.filler import Filler
from replaylens.engine.model.gguf import GgufFile
from replaylens.engine.model.hub import HubOptions, fetch_snapshot, is_hub_name
from replaylens.engine.model.quantised import dequantised
from replaylens.engine.model.shards import Shards
from replaylens.engine.model.source import Source
from replaylens.engine.model.translated import from_hugging_face

CONFIG_FILE = "replaylens.json"


def load_path(
    path: Path, dtype: torch.dtype, check: bool, device: str, adapter: str | Path | None, revision: str = ""
) -> Decoder:
    """A decoder from a folder or a .gguf file, with an adapter merged into its weights.

    revision  name@commit of a model from the hub
    """
    found = located(path, adapter)
    path, adapter, revision = found.path, found.adapter, revision or found.revision
    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist. Give the path of a folder or a .gguf file.")
    if path.suffix == ".gguf" and not path.is_dir():
        file = GgufFile(path)
        return _translated(path, file.config, file.source(), dtype, check, device, adapter)
    if not path.is_dir():
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file.")
    if (path / CONFIG_FILE).exists():
        return _own(path, dtype, check, device, adapter, revision)
    if not (path / "config.json").exists():
        raise UnsupportedModel(f"{path} holds neither {CONFIG_FILE} nor config.json.")
    raw, shards = _read_config(path), Shards(path)
    source = Source(shards.names, shards.read)
    if quantisation := raw.pop("quantization_config", None):
        source = dequantised(source, quantisation)
    return _translated(path, raw, source, dtype, check, device, adapter, revision)


@dataclass(frozen=True)
class LocatedModel:
    """Where a model is."""

    path: Path
    adapter: Path | None
    revision: str = ""
    """name@commit, if the path is a snapshot of the hub"""


def located(source: str | Path, given: str | Path | None, options: HubOptions = HubOptions()) -> LocatedModel:  # noqa: B008 (frozen)
    """The base and the adapter. A folder that holds an adapter is one, as for transformers; its config names the base.

    A path that exists comes before a name on the hub. `options` are for names.
    """
    if not isinstance(given, str | Path | None):
        raise BadRequest(f"adapter must be the path of a folder, or a name on the hub, not {given!r:.120}.")
    path, revision = Path(source), ""
    if not exists(path) and is_hub_name(source):
        snapshot = fetch_snapshot(str(source), options)
        path, revision, options = snapshot.folder, snapshot.revision, replace(options, revision=None)
    else:
        options.require_unused(source)
    if given is None:
        return _base_of(path, options) if exists(path / ADAPTER_FILE) else LocatedModel(path, None, revision)
    adapter = Path(given)
    if not exists(adapter) and is_hub_name(given):
        adapter = fetch_snapshot(str(given), options).folder
    if exists(path / ADAPTER_FILE) and path.resolve() != adapter.resolve():
        raise UnsupportedModel(
            f"{path} holds an adapter, and {adapter} is another. Only one can be merged: merge the first with peft "
            "(merge_and_unload), and give the result."
        )
    return LocatedModel(path, adapter, revision)


def exists(path: Path) -> bool:
    """Whether the path exists. A name that no path can have does not."""
    try:
        return path.exists()
    except OSError:  # e.g. the name is too long
        return False


def _base_of(folder: Path, options: HubOptions) -> LocatedModel:
    """An adapter's base, if its config names a folder or a model of the hub, and the adapter."""
    fields = read_fields(folder)
    named, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if isinstance(named, str) and Path(named).is_dir() and Path(named).resolve() != folder.resolve():
        return LocatedModel(Path(named), folder)
    kind: type[EngineError] = UnsupportedModel
    problem = "It is neither a folder here nor a name on the Hugging Face hub."
    if is_hub_name(named):
        try:
            snapshot = fetch_snapshot(f"{named}@{revision}" if revision else str(named), options)
            return LocatedModel(snapshot.folder, folder, snapshot.revision)
        except (FetchFailed, UnsupportedModel) as e:
            problem, kind = str(e), type(e)
    raise kind(
        f"{folder} holds an adapter ({ADAPTER_FILE}) of the base model {named!r}. {problem} Or give both: "
        f"Engine.load(base, adapter={str(folder)!r})."
    )


def _translated(
    path: Path,
    raw: dict[str, Any],
    source: Source,
    dtype: torch.dtype,
    check: bool,
    device: str,
    folder: Path | None,
    revision: str = "",
) -> Decoder:
    reference = (lambda: _reference(path)) if check else None
    if folder is None:
        return from_hugging_face(raw, source, dtype, reference, device, revision=revision)
    if reference is not None:  # transformers has the base, so the base is compared
        from_hugging_face(raw, source, dtype, reference)
    adapter = Adapter.read(folder)
    return from_hugging_face(raw, adapter.merged(source, raw), dtype, None, device, adapter.digest, revision)


def _own(path: Path, dtype: torch.dtype, check: bool, device: str, adapter: Path | None, revision: str) -> Decoder:
    """A checkpoint of our own."""
    require_unchecked(check, f"the checkpoint {path}")
    if adapter is not None:
        raise UnsupportedModel(
            f"{path} is a checkpoint of replaylens, whose weights have other names than those of the adapter {adapter}. "
            "Give the Hugging Face folder of the base model."
        )
    shards = Shards(path)
    source = Source(shards.names, shards.read)
    config = ModelConfig.from_json((path / CONFIG_FILE).read_text())
    filler = Filler(replace(config, revision=revision or config.revision), dtype, device)
    for name in sorted(source.names):
        filler[name] = source.get(name)
    return filler.finished()


def require_unchecked(check: bool, what: str) -> None:
    """BadRequest if a check is asked for a source that transformers does not have."""
    if check:
        raise BadRequest(f"check=True compares with transformers, which has no counterpart of {what}. Leave check out.")


def _reference(path: Path) -> nn.Module:
    """The path's model in transformers, in its stored dtypes."""
    from transformers import AutoModelForCausalLM

    folder, file, dtype = (path, None, "auto") if path.is_dir() else (path.parent, path.name, torch.float32)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except Exception as e:
        raise BadRequest(f"transformers cannot load {path} to check it: {type(e).__name__}: {e}. Use check=False.") from e
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, normalised to current field names."""
    file = folder / "config.json"
    try:
        written = json.loads(file.read_text())
    except ValueError as e:
        raise BadConfig(f"{file} is not valid JSON: {e}. Copy it again from the model's source.") from None
    if not isinstance(written, dict):
        raise BadConfig(f"{file} is not a JSON object. Copy it again from the model's source.")
    if "text_config" not in written:
        family_of(written)  # an unknown family fails with our list, not with that of transformers
    from transformers import AutoConfig  # normalises the field names of older configs

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as e:
        raise BadConfig(f"transformers cannot read {file}: {e}") from e
    return text_config(config)


def text_config(config: Any) -> dict[str, Any]:
    """The config of a model, or of the text part of a multimodal one. Fields about the head come from the whole."""
    whole: dict[str, Any] = config.to_dict()
    if not hasattr(config, "text_config"):
        return whole
    shared = {name: whole[name] for name in ("tie_word_embeddings", "quantization_config") if name in whole}
    return {**config.text_config.to_dict(), **shared}
