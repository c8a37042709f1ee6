"""Loading and saving decoders: our checkpoints, Hugging Face folders, live models, TransformerBridges, GGUF files.

Whatever the source, the tensors are checked the same way before anything runs: all there, right shapes, finite.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from replaylens.engine.config import ModelConfig
from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.engine.families import FAMILIES, Tensors, family_of
from replaylens.engine.model import Decoder

CONFIG_FILE = "replaylens.json"
WEIGHTS_FILE = "model.safetensors"


def load(source: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder from any source: a path (folder or .gguf), a transformers model, a TransformerBridge, or a Decoder.

    The result owns its weights in `dtype`, on the CPU, without gradients.
    """
    if isinstance(source, Decoder):
        return build(source.config, dict(source.state_dict()), dtype)
    if isinstance(source, str | Path):
        return _load_path(Path(source), dtype)
    if hasattr(source, "original_model"):  # a TransformerBridge keeps the Hugging Face model it wraps
        return _load_bridge(source, dtype)
    if isinstance(source, nn.Module) and hasattr(source, "config"):
        return _load_live(source, dtype)
    raise UnsupportedModel(
        f"cannot load a model from {type(source).__name__}; give a folder, a .gguf file, a transformers model, "
        "a TransformerBridge or a replaylens Decoder"
    )


def save(model: Decoder, folder: Path) -> None:
    """Write config and weights as our own checkpoint; `load(folder)` gives identical bits back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(model.config.to_json() + "\n")
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / WEIGHTS_FILE)


def weights_hash(model: Decoder) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all weights: the same weights, the same hash, on any device."""
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def build(config: ModelConfig, tensors: Tensors, dtype: torch.dtype) -> Decoder:
    """A decoder around `tensors` (our names), checked; raises BadWeights naming every tensor at fault."""
    with torch.device("meta"):
        model = Decoder(config)
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    faults = [f"{name} is missing (shape {shape})" for name, shape in wanted.items() if name not in tensors]
    faults += [f"{name} is not part of this model" for name in tensors if name not in wanted]
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            faults.append(f"{name} has shape {tuple(tensors[name].shape)}, the config asks for {shape}")
        elif name in tensors and not bool(torch.isfinite(tensors[name]).all()):
            faults.append(f"{name} holds NaN or infinity")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise BadWeights(f"weights do not fit the config: {shown}. Check that config and weights belong together.")
    model = Decoder(config).to(dtype)
    model.load_state_dict({name: x.to(dtype) for name, x in tensors.items()})
    return model.requires_grad_(False).eval()


def from_hugging_face(raw_config: dict[str, Any], source: "Source", dtype: torch.dtype) -> Decoder:
    """Translate a Hugging Face config and its tensors."""
    read_config, read_tensors = FAMILIES[family_of(raw_config)]
    try:
        config = read_config(raw_config)
    except KeyError as e:
        raise UnsupportedModel(f"the {raw_config['model_type']} config lacks {e}") from None
    return build(config, read_tensors(config, source.get), dtype)


class Source:
    """Hands out tensors by name, and names the ones that are not there."""

    def __init__(self, names: Iterable[str], read: Any, prefix: str = "") -> None:
        self.names, self.read, self.prefix = set(names), read, prefix

    def get(self, name: str) -> Tensor:
        name = self.prefix + name
        if name not in self.names:
            raise BadWeights(f"tensor {name!r} is missing from the checkpoint; is it complete, and of this architecture?")
        tensor: Tensor = self.read(name)
        return tensor.detach()


def _load_path(path: Path, dtype: torch.dtype) -> Decoder:
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype)
    if not path.is_dir():
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file")
    if (path / CONFIG_FILE).exists():
        config = ModelConfig.from_json((path / CONFIG_FILE).read_text())
        source = _safetensors(path)
        return build(config, {name: source.get(name) for name in source.names}, dtype)
    if not (path / "config.json").exists():
        raise UnsupportedModel(f"{path} holds neither {CONFIG_FILE} nor config.json")
    from transformers import AutoConfig  # normalises the many spellings of older configs

    config_object = AutoConfig.from_pretrained(path)
    raw = getattr(config_object, "text_config", config_object).to_dict()
    source = _safetensors(path)
    if f"language_model.{'model.embed_tokens.weight'}" in source.names:  # the text part of a multimodal checkpoint
        source.prefix = "language_model."
    return from_hugging_face(raw, source, dtype)


def _safetensors(folder: Path) -> Source:
    """All tensors of a folder, one file or sharded by an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if bad := [name for name in set(where.values()) if Path(name).name != name]:
            raise BadWeights(f"{index} points outside its folder: {bad}")
        files = sorted(set(where.values()))
    else:
        files = [WEIGHTS_FILE]
    owner: dict[str, Any] = {}
    for name in files:
        if not (folder / name).exists():
            raise BadWeights(f"{folder / name} is missing; only safetensors checkpoints are read (no pickle)")
        try:
            handle = safe_open(folder / name, framework="pt")
        except Exception as e:
            raise BadWeights(f"{folder / name} is not a readable safetensors file: {e}") from e
        owner.update(dict.fromkeys(handle.keys(), handle))
    return Source(owner, lambda name: owner[name].get_tensor(name))


def _load_live(model: nn.Module, dtype: torch.dtype) -> Decoder:
    state = model.state_dict()
    config: Any = model.config
    return from_hugging_face(getattr(config, "text_config", config).to_dict(), Source(state, state.__getitem__), dtype)


def _load_bridge(bridge: Any, dtype: torch.dtype) -> Decoder:
    """A bridge renames the modules of the model it wraps by nesting them under `_original_component`."""
    model = bridge.original_model
    state = {name.replace("._original_component", ""): x for name, x in model.state_dict().items()}
    return from_hugging_face(model.config.to_dict(), Source(state, state.__getitem__), dtype)


def _load_gguf(path: Path, dtype: torch.dtype) -> Decoder:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedModel("reading a GGUF file needs the package `gguf`: pip install 'replaylens[gguf]'") from None
    from transformers import AutoModelForCausalLM

    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist")
    return _load_live(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32), dtype)
