"""Loads and saves decoders: our checkpoints, Hugging Face folders, models in memory, TransformerBridges, GGUF files.

Config and tensors of every source are checked before anything runs: no unsupported field that changes the model, no tensor
missing, right dtypes and shapes, finite values.
"""

import hashlib
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.engine.model.adapter import Adapter, base_tensors, is_adapted
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.family import Tensors
from replaylens.engine.model.filler import Filler
from replaylens.engine.model.folders import CONFIG_FILE, exists, load_path, located, require_unchecked, text_config
from replaylens.engine.model.shards import WEIGHTS_FILE
from replaylens.engine.model.source import Source
from replaylens.engine.model.translated import from_hugging_face

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "build",
    "exists",
    "from_hugging_face",
    "in_dtype",
    "is_live",
    "load",
    "located",
    "require_unchecked",
    "save",
    "weights_hash",
]

M = TypeVar("M", bound=nn.Module)


def load(
    source: Any,
    dtype: torch.dtype = torch.float32,
    check: bool = False,
    device: str = "cpu",
    adapter: str | Path | None = None,
    revision: str = "",
) -> Decoder:
    """A decoder from any source: a path (folder or .gguf), a transformers model, a TransformerBridge, or a Decoder.

    check    compare it with transformers on a few tokens; OtherModel names the first part that differs. BadRequest if
             transformers has no such model: for a Decoder, or a checkpoint of our own
    adapter  of a path: the folder of a LoRA adapter in peft's format, which is merged into the weights
    revision of a path: name@commit, if it is a snapshot of the hub

    The result owns its weights, in `dtype`, on `device`, without gradients. Weights in files go there one by one, so the
    host holds no second copy of them.
    """
    if isinstance(source, str | Path):
        return load_path(Path(source), dtype, check, device, adapter, revision)
    if adapter is not None:
        raise BadRequest(
            f"adapter= goes with the folder of a base model, not with {type(source).__name__}. Give the folder, or merge the "
            "adapter first (peft: model.merge_and_unload())."
        )
    if isinstance(source, Decoder):
        require_unchecked(check, "a Decoder")
        return build(source.config, dict(source.state_dict()), dtype, device)
    if hasattr(source, "original_model"):  # a TransformerBridge keeps the Hugging Face model it wraps
        return _load_bridge(source, dtype, check, device)
    if is_live(source):
        return _load_live(source, dtype, check, device)
    raise UnsupportedModel(
        f"Cannot load a model from {shown(source)} ({type(source).__name__}). Give a name such as 'smollm2' or 'gpt2', a "
        "folder, a .gguf file, a transformers model, a TransformerBridge or a replaylens Decoder."
    )


def is_live(source: Any) -> bool:
    """Whether the source is a transformers model or a TransformerBridge in memory."""
    if isinstance(source, Decoder):
        return False
    if isinstance(source, nn.Module) and hasattr(source, "_orig_mod"):
        raise UnsupportedModel("This model is wrapped by torch.compile. Give the model within: model._orig_mod.")
    return hasattr(source, "original_model") or (isinstance(source, nn.Module) and hasattr(source, "config"))


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


def build(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """A decoder with these tensors (our names), checked; BadWeights names the tensors at fault.

    Mutates: takes each tensor out of `tensors` as it is copied, so that the weights are in memory only once.
    """
    filler = Filler(config, dtype, device)
    for name in list(tensors):
        filler[name] = tensors.pop(name)
    return filler.finished()


def in_dtype(model: M, dtype: torch.dtype) -> M:
    """Mutates: converts the weights, but not the rotary tables, which stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _load_live(model: nn.Module, dtype: torch.dtype, check: bool, device: str) -> Decoder:
    headless = getattr(model, "get_output_embeddings", lambda: model)() is None
    if headless and not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has no language-modelling head. Give the whole model, as "
            "AutoModelForCausalLM.from_pretrained returns it."
        )
    if is_adapted(model):
        return _load_adapted(model, dtype, check, device)
    state = model.state_dict()
    source = Source(state, state.__getitem__)
    return from_hugging_face(text_config(model.config), source, dtype, (lambda: model) if check else None, device)


def _load_adapted(model: Any, dtype: torch.dtype, check: bool, device: str) -> Decoder:
    """A model that holds a LoRA adapter beside its weights, merged with the bits of `adapter=`."""
    adapter = Adapter.of_model(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    state, raw = base_tensors(base), text_config(base.config)
    source = adapter.merged(Source(state, state.__getitem__), raw)
    return from_hugging_face(raw, source, dtype, (lambda: base) if check else None, device, adapter.digest)


def _load_bridge(bridge: Any, dtype: torch.dtype, check: bool, device: str) -> Decoder:
    """A bridge nests the modules of its model under `_original_component` and keeps further copies of them."""
    if getattr(bridge, "_weights_processed", False):  # norms folded into products, weights centred
        raise UnsupportedModel(
            "This TransformerBridge has processed its weights (enable_compatibility_mode), so they are no longer the "
            "model's. Load the model before that, or call enable_compatibility_mode(no_processing=True)."
        )
    model = bridge.original_model
    state = {name.replace("._original_component", ""): x for name, x in model.state_dict().items()}
    source = Source(state, state.__getitem__, holds_copies=True)
    return from_hugging_face(text_config(model.config), source, dtype, (lambda: model) if check else None, device)
