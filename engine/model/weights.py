"""Loads and saves decoders: our checkpoints, Hugging Face folders, models in memory, TransformerBridges, GGUF files.

Config and tensors of every source are checked before anything runs: no unsupported field that changes the model, no tensor
missing, right dtypes and shapes, finite values.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from replaylens.engine.errors import BadConfig, BadRequest, BadWeights, UnsupportedModel
from replaylens.engine.model.check import require_same
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.families import FAMILIES, family_of
from replaylens.engine.model.family import Tensors
from replaylens.engine.model.fields import require_described, require_readable
from replaylens.engine.model.source import HEAD, WEIGHTS_FILE, Source, safetensors

M = TypeVar("M", bound=nn.Module)

CONFIG_FILE = "replaylens.json"
ADAPTER_FILE = "adapter_config.json"
"""written by peft; transformers applies the adapter when it loads the folder"""


def load(source: Any, dtype: torch.dtype = torch.float32, check: bool = False) -> Decoder:
    """A decoder from any source: a path (folder or .gguf), a transformers model, a TransformerBridge, or a Decoder.

    check  compare it with transformers on a few tokens; OtherModel names the first part that differs. BadRequest if
           transformers has no such model: for a Decoder, or a checkpoint of our own

    The result owns its weights, in `dtype`, on the CPU, without gradients.
    """
    if isinstance(source, Decoder):
        require_unchecked(check, "a Decoder")
        return build(source.config, dict(source.state_dict()), dtype)
    if isinstance(source, str | Path):
        return _load_path(Path(source), dtype, check)
    if hasattr(source, "original_model"):  # a TransformerBridge keeps the Hugging Face model it wraps
        return _load_bridge(source, dtype, check)
    if is_live(source):
        return _load_live(source, dtype, check)
    raise UnsupportedModel(
        f"Cannot load a model from {type(source).__name__}. Give a folder, a .gguf file, a transformers model, "
        "a TransformerBridge or a replaylens Decoder."
    )


def is_live(source: Any) -> bool:
    """Whether the source is a transformers model or a TransformerBridge in memory."""
    if isinstance(source, Decoder):
        return False
    if isinstance(source, nn.Module) and hasattr(source, "_orig_mod"):
        raise UnsupportedModel("This model is wrapped by torch.compile. Give the model within: model._orig_mod.")
    return hasattr(source, "original_model") or (isinstance(source, nn.Module) and hasattr(source, "config"))


def require_unchecked(check: bool, what: str) -> None:
    """BadRequest if a check is asked for a source that transformers does not have."""
    if check:
        raise BadRequest(f"check=True compares with transformers, which has no counterpart of {what}. Leave check out.")


def save(model: Decoder, folder: Path) -> None:
    """Write config and weights as our own checkpoint; `load(folder)` restores identical bits."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(model.config.to_json() + "\n")
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / WEIGHTS_FILE)


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all weights. The same weights have the same hash on any device."""
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def build(config: ModelConfig, tensors: Tensors, dtype: torch.dtype) -> Decoder:
    """A decoder with these tensors (our names), checked; BadWeights names the tensors at fault.

    Mutates: takes each tensor out of `tensors` as it is copied, so that the weights are in memory only once.
    """
    with torch.device("meta"):
        model = Decoder(config)
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    faults = [f"{name} is missing (shape {shape})" for name, shape in wanted.items() if name not in tensors]
    faults += [f"{name} is not part of this model" for name in tensors if name not in wanted]
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            faults.append(f"{name} has shape {tuple(tensors[name].shape)}, the config asks for {shape}")
        elif name in tensors and not tensors[name].is_floating_point():
            faults.append(f"{name} holds {tensors[name].dtype}, not floating-point numbers")
        elif name in tensors and not bool(torch.isfinite(tensors[name].to(dtype)).all()):
            faults.append(f"{name} holds NaN or infinity as {dtype}")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise BadWeights(f"The weights do not fit the config: {shown}. Check that config and weights belong together.")
    model.load_state_dict({name: _owned(tensors.pop(name), dtype) for name in wanted}, assign=True)
    return model.requires_grad_(False).eval()


def _owned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the CPU: the source may be a file or a model that changes later."""
    return x.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def in_dtype(model: M, dtype: torch.dtype) -> M:
    """Mutates: converts the weights, but not the rotary tables, which stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def from_hugging_face(
    raw: dict[str, Any], source: Source, dtype: torch.dtype, reference: Callable[[], nn.Module] | None = None
) -> Decoder:
    """Translate a Hugging Face config and its tensors. A tensor or field that is not used is an error, never dropped.

    reference  makes the transformers model to compare the result with
    """
    name = family_of(raw)
    family = FAMILIES[name]
    require_readable(raw, family)
    try:
        config = family.config(raw)
    except KeyError as e:
        raise UnsupportedModel(f"The {name} config lacks {e}.") from None
    require_described(raw, family, config)
    try:
        tensors = family.tensors(config, source.get)
    except RuntimeError as e:  # q, k and v, or gate and up, cannot be joined
        near = ", ".join(f"{name} {shape}" for name, shape in list(source.shapes.items())[-3:])
        raise BadWeights(f"These shapes do not fit: {near} ({e}). Check that config and weights belong together.") from e
    config = _with_its_head(config, tensors, source)
    if extra := family.unused(config, source.unread()):
        raise BadWeights(
            f"The checkpoint holds {len(extra)} tensors that a {config.family} model does not have, such as "
            f"{', '.join(extra[:4])}. Leaving them out would change what it computes. Is the config the right one?"
        )
    model = build(config, tensors if reference is None else dict(tensors), dtype)
    if reference is not None:
        require_same(config, tensors, reference())
    return model


def _with_its_head(config: ModelConfig, tensors: Tensors, source: Source) -> ModelConfig:
    """The config, untied if the source has a head that differs from the embedding, as transformers does.

    Mutates `tensors`: adds the head.
    """
    found = source.find(HEAD)
    if found is None or found in source.shapes:
        return config
    head = source.get(HEAD)
    if not config.tied_embeddings:  # the table was read in its place (BLOOM)
        tensors["unembed.weight"] = head.T
        return config
    if torch.equal(head, tensors["embed"]):
        return config
    tensors["unembed.weight"] = head.T
    return replace(config, tied_embeddings=False)


def _load_path(path: Path, dtype: torch.dtype, check: bool) -> Decoder:
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, check)
    if not path.is_dir():
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file.")
    if (path / CONFIG_FILE).exists():
        require_unchecked(check, f"the checkpoint {path}")
        config = ModelConfig.from_json((path / CONFIG_FILE).read_text())
        source = safetensors(path)
        return build(config, {name: source.get(name) for name in source.names}, dtype)
    if not (path / "config.json").exists():
        raise UnsupportedModel(f"{path} holds neither {CONFIG_FILE} nor config.json.")
    if (path / ADAPTER_FILE).exists():
        raise UnsupportedModel(f"{path} holds an adapter ({ADAPTER_FILE}). Merge it into the weights, or remove it.")
    return from_hugging_face(_read_config(path), safetensors(path), dtype, (lambda: _reference(path)) if check else None)


def _reference(folder: Path) -> nn.Module:
    """The folder's model in transformers, in its stored dtypes."""
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, local_files_only=True
        )
    except Exception as e:
        raise BadRequest(f"transformers cannot load {folder} to check it: {type(e).__name__}: {e}. Use check=False.") from e
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
    return _text_config(config)


def _text_config(config: Any) -> dict[str, Any]:
    """The config of a model, or of the text part of a multimodal one. Fields about the head come from the whole."""
    whole: dict[str, Any] = config.to_dict()
    if not hasattr(config, "text_config"):
        return whole
    shared = {name: whole[name] for name in ("tie_word_embeddings", "quantization_config") if name in whole}
    return {**config.text_config.to_dict(), **shared}


def _load_live(model: nn.Module, dtype: torch.dtype, check: bool) -> Decoder:
    headless = getattr(model, "get_output_embeddings", lambda: model)() is None
    if headless and not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has no language-modelling head. Give the whole model, as "
            "AutoModelForCausalLM.from_pretrained returns it."
        )
    state = model.state_dict()
    source = Source(state, state.__getitem__)
    return from_hugging_face(_text_config(model.config), source, dtype, (lambda: model) if check else None)


def _load_bridge(bridge: Any, dtype: torch.dtype, check: bool) -> Decoder:
    """A bridge nests the modules of its model under `_original_component` and keeps further copies of them."""
    if getattr(bridge, "_weights_processed", False):  # norms folded into products, weights centred
        raise UnsupportedModel(
            "This TransformerBridge has processed its weights (enable_compatibility_mode), so they are no longer the "
            "model's. Load the model before that, or call enable_compatibility_mode(no_processing=True)."
        )
    model = bridge.original_model
    state = {name.replace("._original_component", ""): x for name, x in model.state_dict().items()}
    source = Source(state, state.__getitem__, holds_copies=True)
    return from_hugging_face(_text_config(model.config), source, dtype, (lambda: model) if check else None)


def _load_gguf(path: Path, dtype: torch.dtype, check: bool) -> Decoder:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedModel("Reading a GGUF file needs the package `gguf`. Run pip install 'replaylens[gguf]'.") from None
    from transformers import AutoModelForCausalLM

    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist.")
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as e:
        raise BadWeights(f"transformers cannot read {path} as a GGUF model: {e}") from e
    return _load_live(model, dtype, check)
