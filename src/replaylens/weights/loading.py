"""Loads and saves decoders: our checkpoints, Hugging Face folders, models in memory, TransformerBridges, GGUF files.

Config and tensors of every source are checked before anything runs: no unsupported field that changes the model, no tensor
missing, right dtypes and shapes, finite values.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save as safetensors_of
from torch import Tensor, nn

from replaylens.engine.errors import BadConfig, BadRequest, BadWeights, EngineError, FetchFailed, UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.sites import own_wiring
from replaylens.engine.terminal import Later
from replaylens.weights.source import (
    ADAPTER_FILE,
    HEAD,
    WEIGHTS_FILE,
    Divider,
    Filler,
    HubOptions,
    Shards,
    Source,
    Where,
    is_hub_name,
    return_freed_memory,
)

if TYPE_CHECKING:
    from replaylens.weights import families, hub, lora
    from replaylens.weights.family import Family, Sink, Tensors
else:
    families, hub, lora = (Later(f"replaylens.weights.{name}") for name in ("families", "hub", "lora"))

# ---- translated ------------------------------------------------------------------------------------------------------
# Translates a Hugging Face config and its tensors into a decoder.


def from_hugging_face(
    raw: dict[str, Any],
    source: Source,
    dtype: torch.dtype,
    reference: Callable[[], nn.Module] | None = None,
    device: Where = "cpu",
    adapter: str = "",
    revision: str = "",
    packed: bool | Divider = False,
) -> Decoder:
    """Translate a Hugging Face config and its tensors. A tensor or field that is not used is an error, never dropped.

    reference  makes the transformers model to compare the result with
    adapter    digest of the adapter that the source merges
    revision   name@commit of a source from the hub
    packed     as in `load`
    """
    from replaylens.weights.family import require_described, require_readable

    name = families.family_of(raw)
    family = families.FAMILIES[name]
    require_readable(raw, family)
    try:
        config = family.config(raw)
    except KeyError as e:
        raise UnsupportedModel(f"The {name} config lacks {e}.") from None
    require_described(raw, family, config)
    config = replace(_with_its_head(config, family, source), adapter=adapter, revision=revision)
    filler = Filler(config, dtype, device, packed)
    _fill(family, config, source, filler)
    extra = family.unused(config.num_layers, source.unread())
    if extra := [name for name in extra if source.read(name).numel()]:  # a shared expert of width 0 holds nothing
        raise BadWeights(
            f"The checkpoint holds {len(extra)} tensors that a {config.family} model does not have, such as "
            f"{', '.join(extra[:4])}. Leaving them out would change what it computes. Is the config the right one?"
        )
    model = filler.finished()
    if reference is not None:
        from replaylens.weights.check import require_same

        require_same(config, partial(_fill, family, config, source), reference())
        return_freed_memory()
    return model


def _fill(family: Family, config: ModelConfig, source: Source, out: Sink) -> None:
    """Mutates: set all tensors of the source in `out`."""
    try:
        family.fill(config, source.get, out)
    except RuntimeError as e:  # q, k and v, or gate and up, cannot be joined
        near = ", ".join(f"{name} {shape}" for name, shape in list(source.shapes.items())[-3:])
        raise BadWeights(f"These shapes do not fit: {near} ({e}). Check that config and weights belong together.") from e
    if f"{family.names.head}.weight" != HEAD and source.find(HEAD) is not None and not config.tied_embeddings:
        out["unembed.weight"] = source.get(HEAD).T  # the table was read in its place (BLOOM)


def _with_its_head(config: ModelConfig, family: Family, source: Source) -> ModelConfig:
    """The config, untied if the source has a head that differs from the embedding, as transformers does."""
    if not config.tied_embeddings or source.find(HEAD) is None:
        return config
    if _same(source.get(HEAD), source.get(f"{family.names.embed}.weight")):
        return config
    return replace(config, tied_embeddings=False)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, also in two dtypes."""
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.shape == b.shape and torch.equal(a.to(wide), b.to(wide))


# ---- folders ---------------------------------------------------------------------------------------------------------
# Models on disk: folders of Hugging Face, checkpoints of our own, adapters, GGUF files.

CONFIG_FILE = "replaylens.json"


def load_path(
    path: Path,
    dtype: torch.dtype,
    check: bool,
    device: Where,
    adapter: str | Path | None,
    revision: str = "",
    packed: bool | Divider = False,
) -> Decoder:
    """A decoder from a folder or a .gguf file, with an adapter merged into its weights.

    revision  name@commit of a model from the hub
    """
    found = located(path, adapter)
    path, adapter, revision = found.path, found.adapter, revision or found.revision
    if not path.exists():
        raise UnsupportedModel(f"{path} does not exist. Give the path of a folder or a .gguf file.")
    if path.suffix == ".gguf" and not path.is_dir():
        from replaylens.weights.gguf import GgufFile

        file = GgufFile(path)
        return _translated(path, file.config, file.source(), dtype, check, device, adapter, packed=packed)
    if not path.is_dir():
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file.")
    if (path / CONFIG_FILE).exists():
        return _own(path, dtype, check, device, adapter, revision, packed)
    if not (path / "config.json").exists():
        raise UnsupportedModel(f"{path} holds neither {CONFIG_FILE} nor config.json.")
    raw, shards = _read_config(path), Shards(path)
    source = Source(shards.names, shards.read)
    if quantisation := raw.pop("quantization_config", None):
        from replaylens.weights.quantised import dequantised

        source = dequantised(source, quantisation)
    return _translated(path, raw, source, dtype, check, device, adapter, revision, packed)


def config_of(path: Path) -> ModelConfig:
    """The config of a folder or a .gguf file, without its weights. Whether the head is tied is what the config says."""
    if (path / CONFIG_FILE).exists():
        return ModelConfig.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
    if not exists(path if path.suffix == ".gguf" else path / "config.json"):
        raise UnsupportedModel(f"{path} does not exist, or holds no model. Give the path of a folder or a .gguf file.")
    if path.suffix == ".gguf":
        from replaylens.weights.gguf import GgufFile

        raw = dict(GgufFile(path).config)
    else:
        raw = _read_config(path)
    raw.pop("quantization_config", None)
    return families.FAMILIES[families.family_of(raw)].config(raw)


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
        snapshot = hub.fetch_snapshot(str(source), options)
        path, revision, options = snapshot.folder, snapshot.revision, replace(options, revision=None)
    else:
        options.require_unused(source)
    if given is None:
        return _base_of(path, options) if exists(path / ADAPTER_FILE) else LocatedModel(path, None, revision)
    adapter = Path(given)
    if not exists(adapter) and is_hub_name(given):
        adapter = hub.fetch_snapshot(str(given), options).folder
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
    fields = lora.read_fields(folder)
    named, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if isinstance(named, str) and Path(named).is_dir() and Path(named).resolve() != folder.resolve():
        return LocatedModel(Path(named), folder)
    kind: type[EngineError] = UnsupportedModel
    problem = "It is neither a folder here nor a name on the Hugging Face hub."
    if is_hub_name(named):
        try:
            snapshot = hub.fetch_snapshot(f"{named}@{revision}" if revision else str(named), options)
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
    device: Where,
    folder: Path | None,
    revision: str = "",
    packed: bool | Divider = False,
) -> Decoder:
    reference = (lambda: _reference(path)) if check else None
    if folder is None:
        return from_hugging_face(raw, source, dtype, reference, device, revision=revision, packed=packed)
    if reference is not None:  # transformers has the base, so the base is compared
        from_hugging_face(raw, source, dtype, reference)
    adapter = lora.Adapter.read(folder)
    return from_hugging_face(raw, adapter.merged(source, raw), dtype, None, device, adapter.digest, revision, packed)


def _own(
    path: Path, dtype: torch.dtype, check: bool, device: Where, adapter: Path | None, revision: str, packed: bool | Divider
) -> Decoder:
    """A checkpoint of our own."""
    require_unchecked(check, f"the checkpoint {path}")
    if adapter is not None:
        raise UnsupportedModel(
            f"{path} is a checkpoint of replaylens, whose weights have other names than those of the adapter {adapter}. "
            "Give the Hugging Face folder of the base model."
        )
    shards = Shards(path)
    source = Source(shards.names, shards.read)
    config = ModelConfig.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
    filler = Filler(replace(config, revision=revision or config.revision), dtype, device, packed)
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
    text = file.read_text(encoding="utf-8")
    try:
        written = json.loads(text)
    except ValueError as e:
        raise BadConfig(f"{file} is not valid JSON: {e}. Copy it again from the model's source.") from None
    if not isinstance(written, dict):
        raise BadConfig(f"{file} is not a JSON object. Copy it again from the model's source.")
    if "text_config" not in written:
        families.family_of(written)  # an unknown family fails with our list, not with that of transformers
    return _kept_config(text) or _normalised(folder, text)


def _normalised(folder: Path, text: str) -> dict[str, Any]:
    """A config as transformers reads it, kept for later processes: its configs import torch's compiler, which takes two
    seconds."""
    from transformers import AutoConfig  # normalises the field names of older configs

    try:
        found = json.dumps(text_config(AutoConfig.from_pretrained(folder)))
    except Exception as e:
        raise BadConfig(f"transformers cannot read {folder / 'config.json'}: {e}") from e
    file = _config_file(text)
    with suppress(OSError):  # with a read-only cache folder, the next process reads it again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(f"{hashlib.sha256(found.encode()).hexdigest()}\n{found}", encoding="utf-8")
        temporary.replace(file)
    return dict(json.loads(found))


def _kept_config(text: str) -> dict[str, Any] | None:
    """What `_normalised` kept of an equal file; None if that is missing or damaged."""
    try:
        digest, _, found = _config_file(text).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeError):
        return None
    return json.loads(found) if digest == hashlib.sha256(found.encode()).hexdigest() else None


def _config_file(text: str) -> Path:
    key = hashlib.sha256(f"{version('transformers')}\n{text}".encode()).hexdigest()
    from replaylens.engine.files import cache_folder

    return cache_folder() / "configs" / f"{key[:32]}.json"


def text_config(config: Any) -> dict[str, Any]:
    """The config of a model, or of the text part of a multimodal one. Fields about the head come from the whole."""
    whole: dict[str, Any] = config.to_dict()
    if not hasattr(config, "text_config"):
        return whole
    shared = {name: whole[name] for name in ("tie_word_embeddings", "quantization_config") if name in whole}
    return {**config.text_config.to_dict(), **shared}


# ---- weights ---------------------------------------------------------------------------------------------------------

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
]

M = TypeVar("M", bound=nn.Module)


def load(
    source: Any,
    dtype: torch.dtype = torch.float32,
    check: bool = False,
    device: Where = "cpu",
    adapter: str | Path | None = None,
    revision: str = "",
    packed: bool | Divider = False,
) -> Decoder:
    """A decoder from any source: a path (folder or .gguf), a transformers model, a TransformerBridge, or a Decoder.

    check    compare it with transformers on a few tokens; ModelMismatch names the first part that differs. BadRequest if
             transformers has no such model: for a Decoder, or a checkpoint of our own
    adapter  of a path: the folder of a LoRA adapter in peft's format, which is merged into the weights
    revision of a path: name@commit, if it is a snapshot of the hub
    packed   hold the weights of products as products read them, from the start

    The result owns its weights, in `dtype`, on `device`, without gradients. Weights in files go there one by one, so the
    host holds no second copy of them.
    """
    if isinstance(source, str | Path):
        return load_path(Path(source), dtype, check, device, adapter, revision, packed)
    if adapter is not None:
        raise BadRequest(
            f"adapter= goes with the folder of a base model, not with {type(source).__name__}. Give the folder, or merge the "
            "adapter first (peft: model.merge_and_unload())."
        )
    if isinstance(source, Decoder):
        require_unchecked(check, "a Decoder")
        if (own := own_wiring(source)) is not None:
            raise UnsupportedModel(
                f"This decoder has a wiring of its own ({own.__name__}), which a loaded one would not have. Give it to Engine "
                "itself: Engine(model)."
            )
        return build(source.config, dict(source.state_dict()), dtype, device, packed)
    if hasattr(source, "original_model"):  # a TransformerBridge keeps the Hugging Face model it wraps
        return _load_bridge(source, dtype, check, device, packed)
    if is_live(source):
        return _load_live(source, dtype, check, device, packed)
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
    """Write config and weights as our own checkpoint; `load(folder)` restores identical bits. Raises as `write_model`."""
    write_model(folder, files_of(model))


def files_of(model: Decoder) -> dict[str, bytes]:
    """The files of our own checkpoint, by name: the config first, and the weights last."""
    weights = safetensors_of({name: x.contiguous() for name, x in model.state_dict().items()})
    return {CONFIG_FILE: f"{model.config.to_json()}\n".encode(), WEIGHTS_FILE: weights}


def write_model(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a model together, the last one last, over an older model of the same config only: so that wherever a
    writer is stopped, no config is read with the weights of another. BadRequest, and nothing is written, if the folder has
    files of these names and no such config.
    """
    from replaylens.engine.files import require_own, write_together

    config = folder / CONFIG_FILE
    require_own(config, _is_config)
    if config.exists() and config.read_bytes() != files[CONFIG_FILE]:
        raise BadRequest(f"{str(folder)[:200]} holds a model of another config. Give another folder.")
    for name in files:
        require_own(folder / name, lambda content: config.exists())
    write_together({folder / name: content for name, content in files.items()})


def _is_config(content: bytes) -> bool:
    """Whether a file is a config that we wrote."""
    try:
        return bool(ModelConfig.from_json(content.decode()))
    except (BadConfig, UnicodeError):
        return False


def build(
    config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: Where = "cpu", packed: bool | Divider = False
) -> Decoder:
    """A decoder with these tensors (our names), checked; BadWeights names the tensors at fault.

    Mutates: takes each tensor out of `tensors` as it is copied, so that the weights are in memory only once.
    """
    filler = Filler(config, dtype, device, packed)
    for name in list(tensors):
        filler[name] = tensors.pop(name)
    return filler.finished()


def in_dtype(model: M, dtype: torch.dtype) -> M:
    """Mutates: converts the weights, but not the rotary tables, which stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _load_live(model: nn.Module, dtype: torch.dtype, check: bool, device: Where, packed: bool | Divider) -> Decoder:
    headless = getattr(model, "get_output_embeddings", lambda: model)() is None
    if headless and not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has no language-modelling head. Give the whole model, as "
            "AutoModelForCausalLM.from_pretrained returns it."
        )
    if lora.is_adapted(model):
        return _load_adapted(model, dtype, check, device, packed)
    state = model.state_dict()
    source = Source(state, state.__getitem__)
    reference = (lambda: model) if check else None
    return from_hugging_face(text_config(model.config), source, dtype, reference, device, packed=packed)


def _load_adapted(model: Any, dtype: torch.dtype, check: bool, device: Where, packed: bool | Divider) -> Decoder:
    """A model that holds a LoRA adapter in addition to its weights, merged with the bits of `adapter=`."""
    adapter = lora.Adapter.of_model(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    state, raw = lora.base_tensors(base), text_config(base.config)
    source = adapter.merged(Source(state, state.__getitem__), raw)
    return from_hugging_face(raw, source, dtype, (lambda: base) if check else None, device, adapter.digest, packed=packed)


def _load_bridge(bridge: Any, dtype: torch.dtype, check: bool, device: Where, packed: bool | Divider) -> Decoder:
    """A bridge nests the modules of its model under `_original_component` and keeps further copies of them."""
    if getattr(bridge, "_weights_processed", False):  # norms folded into products, weights centred
        raise UnsupportedModel(
            "This TransformerBridge has processed its weights (enable_compatibility_mode), so they are no longer the "
            "model's. Load the model before that, or call enable_compatibility_mode(no_processing=True)."
        )
    model = bridge.original_model
    state = {name.replace("._original_component", ""): x for name, x in model.state_dict().items()}
    source = Source(state, state.__getitem__, holds_copies=True)
    reference = (lambda: model) if check else None
    return from_hugging_face(text_config(model.config), source, dtype, reference, device, packed=packed)


# ---- bridge ----------------------------------------------------------------------------------------------------------
# The way back: a decoder as a Hugging Face model, and as a TransformerBridge, for what TransformerLens computes (DAS).


def hugging_face(model: Decoder) -> Any:
    """A `LlamaForCausalLM` with the decoder's weights, device and dtype. Precondition: a decoder of the Llama family."""
    import transformers as tf

    c = model.config
    if c.family not in ("llama", "replaylens"):
        raise BadRequest(f"Only the llama family can be converted; this one is {c.family}. Load it with transformers.")
    config = tf.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_mlp, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.d_head,
        max_position_embeddings=c.max_positions, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=c.tied_embeddings,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with model.embed.device:
        made = tf.AutoModelForCausalLM.from_config(config, dtype=model.embed.dtype).eval()
    made.load_state_dict(_tensors(model), strict=False)
    return made.requires_grad_(False)


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """Views of the decoder's weights, by Hugging Face name."""
    c = model.config
    out: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.ln_final.weight}
    out["lm_head.weight"] = model.unembedding
    widths = [c.num_heads * c.d_head, c.num_kv_heads * c.d_head, c.num_kv_heads * c.d_head]
    blocks: Any = model.blocks
    for layer, block in enumerate(blocks):
        name = f"model.layers.{layer}."
        parts: dict[str, Tensor] = dict(zip("qkv", block.attn.qkv.weight.T.split(widths), strict=True))
        out |= {f"{name}self_attn.{x}_proj.weight": part for x, part in parts.items()}
        out[f"{name}self_attn.o_proj.weight"] = block.attn.o.weight.T
        gate, up = block.mlp.up.weight.T.chunk(2)
        out |= {f"{name}mlp.gate_proj.weight": gate, f"{name}mlp.up_proj.weight": up}
        out[f"{name}mlp.down_proj.weight"] = block.mlp.down.weight.T
        out[f"{name}input_layernorm.weight"] = block.ln1.weight
        out[f"{name}post_attention_layernorm.weight"] = block.ln2.weight
    return {name: x.detach() for name, x in out.items()}


def bridge(model: Any) -> Any:
    """TransformerLens around a copy of the Hugging Face model."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        named = dict(eos_token="<eos>", bos_token="<pad>", pad_token="<pad>", unk_token="<pad>")
        PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return TransformerBridge.boot_transformers(
            folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
        )
