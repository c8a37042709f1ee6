"""Loading and saving decoders: our checkpoints, Hugging Face folders, live models, TransformerBridges, GGUF files.

Whatever the source, the tensors are checked the same way before anything runs: all there, right shapes, finite.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel, no_such
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.families import FAMILIES, Tensors, family_of

M = TypeVar("M", bound=nn.Module)

CONFIG_FILE = "replaylens.json"
WEIGHTS_FILE = "model.safetensors"
_SPELLINGS = (("lm_head.", "embed_out."), ("model.", ""), ("transformer.", ""), ("gpt_neox.", ""))
"""other names for the same tensor: GPT-NeoX files, and files of a bare transformer without its head (GPT-2's own)"""
_NO_WEIGHT = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$|^(lm_head|embed_out)\.weight$"
)
"""constants that older checkpoints store, and the second copy of a tied embedding"""


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


def weights_hash(model: nn.Module) -> str:
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
        elif name in tensors and not bool(torch.isfinite(tensors[name].to(dtype)).all()):
            faults.append(f"{name} holds NaN or infinity as {dtype}")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise BadWeights(f"weights do not fit the config: {shown}. Check that config and weights belong together.")
    model = in_dtype(Decoder(config), dtype)
    model.load_state_dict({name: x.to(dtype) for name, x in tensors.items()})
    return model.requires_grad_(False).eval()


def in_dtype(model: M, dtype: torch.dtype) -> M:
    """Mutates the weights, not the rotary tables: their angles stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def from_hugging_face(raw_config: dict[str, Any], source: "Source", dtype: torch.dtype) -> Decoder:
    """Translate a Hugging Face config and its tensors. A tensor that nothing reads is an error, never dropped."""
    read_config, read_tensors = FAMILIES[family_of(raw_config)]
    try:
        config = read_config(raw_config)
    except KeyError as e:
        raise UnsupportedModel(f"the {raw_config['model_type']} config lacks {e}") from None
    try:
        tensors = read_tensors(config, source.get)
    except RuntimeError as e:  # q, k and v, or gate and up, that cannot be joined
        near = ", ".join(f"{name} {shape}" for name, shape in list(source.shapes.items())[-3:])
        raise BadWeights(f"these do not fit together or the config: {near}. Do config and weights match? ({e})") from e
    if extra := source.unread():
        raise BadWeights(
            f"the checkpoint holds {len(extra)} tensors that a {config.family} model does not have, such as "
            f"{', '.join(extra[:4])}; leaving them out would change what it computes. Is the config the right one?"
        )
    return build(config, tensors, dtype)


class Source:
    """Hands out tensors by name, and names the ones that are not there."""

    def __init__(self, names: Iterable[str], read: Any, prefix: str = "", holds_copies: bool = False) -> None:
        self.names, self.read, self.prefix, self.holds_copies = set(names), read, prefix, holds_copies
        self.shapes: dict[str, tuple[int, ...]] = {}
        """of every tensor handed out so far, in order"""

    def get(self, name: str) -> Tensor:
        name = self.prefix + name
        others = (new + name.removeprefix(old) for old, new in _SPELLINGS if name.startswith(old))
        found = next((known for known in (name, *others) if known in self.names), None)
        if found is None:
            raise BadWeights(f"tensor {name!r} is missing from the checkpoint; is it complete, and of this architecture?")
        tensor: Tensor = self.read(found)
        self.shapes[found] = tuple(tensor.shape)
        return tensor.detach()

    def unread(self) -> list[str]:
        """Weights that were never handed out; none are told where the source keeps copies under further names."""
        if self.holds_copies:
            return []
        mine = (name for name in self.names - set(self.shapes) if name.startswith(self.prefix))
        return sorted(name for name in mine if not _NO_WEIGHT.search(name.removeprefix(self.prefix)))


def _load_path(path: Path, dtype: torch.dtype) -> Decoder:
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype)
    if not path.is_dir():
        from replaylens.engine.model import smollm2  # they load through this file
        from replaylens.engine.zoo import coin as zoo  # they load through this file
        from replaylens.engine.zoo import thinking as thinking_zoo

        named = no_such("model", str(path), (*zoo.names(), *thinking_zoo.names(), smollm2.SHORT))
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file, and there is {named}")
    if (path / CONFIG_FILE).exists():
        config = ModelConfig.from_json((path / CONFIG_FILE).read_text())
        source = _safetensors(path)
        return build(config, {name: source.get(name) for name in source.names}, dtype)
    if not (path / "config.json").exists():
        raise UnsupportedModel(f"{path} holds neither {CONFIG_FILE} nor config.json")
    raw = _read_config(path)
    source = _safetensors(path)
    if f"language_model.{'model.embed_tokens.weight'}" in source.names:  # the text part of a multimodal checkpoint
        source.prefix = "language_model."
    return from_hugging_face(raw, source, dtype)


def _read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json in today's spelling."""
    file = folder / "config.json"
    try:
        written = json.loads(file.read_text())
    except ValueError as e:
        raise BadConfig(f"{file} is not valid JSON: {e}; copy it again from where the model comes from") from None
    if not isinstance(written, dict):
        raise BadConfig(f"{file} holds no JSON object; copy it again from where the model comes from")
    if "text_config" not in written:
        family_of(written)  # refuse by our own list, before transformers refuses by its own
    from transformers import AutoConfig  # normalises the many spellings of older configs

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as e:
        raise BadConfig(f"transformers cannot read {file}: {e}") from e
    raw: dict[str, Any] = getattr(config, "text_config", config).to_dict()
    return raw


def _safetensors(folder: Path) -> Source:
    """All tensors of a folder, one file or sharded by an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            bad = [name for name in files if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise BadWeights(f"{index} is not an index of shards ({e!r}); copy it again") from None
        if bad:
            raise BadWeights(f"{index} points outside its folder: {bad}")
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
    """A bridge nests the modules of the model it wraps under `_original_component`, and keeps more copies of them."""
    if getattr(bridge, "_weights_processed", False):  # norms folded into products, weights centred
        raise UnsupportedModel(
            "this TransformerBridge has processed its weights (enable_compatibility_mode): they are no longer the "
            "model's. Load the model before that, or call enable_compatibility_mode(no_processing=True)"
        )
    model = bridge.original_model
    state = {name.replace("._original_component", ""): x for name, x in model.state_dict().items()}
    source = Source(state, state.__getitem__, holds_copies=True)
    return from_hugging_face(model.config.to_dict(), source, dtype)


def _load_gguf(path: Path, dtype: torch.dtype) -> Decoder:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UnsupportedModel("reading a GGUF file needs the package `gguf`: pip install 'replaylens[gguf]'") from None
    from transformers import AutoModelForCausalLM

    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist")
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as e:
        raise BadWeights(f"transformers cannot read {path} as a GGUF model: {e}") from e
    return _load_live(model, dtype)
