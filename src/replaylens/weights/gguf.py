"""`GgufFile`: the config and the tensors of a GGUF file, dequantised one by one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.weights.families import FAMILIES
from replaylens.weights.source import HEAD, Source

# ---- gguf metadata ---------------------------------------------------------------------------------------------------
# What the metadata of a GGUF file says about its model, as a Hugging Face config.
#
# A key that changes what the model computes is read or refused, never ignored.

Metadata = Mapping[str, Any]
"""the values of a file's keys, without the architecture before them"""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_LAYER_NORM = {
    **{key: field for key, field in _SIZES.items() if "rms" not in key},
    "attention.layer_norm_epsilon": "norm_epsilon",
}
_NEUTRAL: tuple[Any, ...] = (None, 0, False, "none", "")
_READ = frozenset(
    {
        "vocab_size",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "tensor_data_layout",
    }
)
"""keys that `config_of` reads for every architecture, or that change nothing"""


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture` of llama.cpp."""

    model_type: str
    fields: Mapping[str, str]
    """key -> field of the Hugging Face config; all must be there unless `otherwise` has them"""
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    """key -> its value if the file lacks it"""
    rotates_pairs: bool = False
    """q and k are stored with the two halves of each head interleaved"""
    norm_offset: float = 0.0
    """what llama.cpp adds to the weights of norms when it stores them"""
    biases: Mapping[str, str] = field(default_factory=dict)
    """fields that say whether products have biases -> a tensor that tells"""


_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _SIZES, rotates_pairs=True, biases=_BIASES),
    "qwen2": Architecture("qwen2", _SIZES),
    "qwen3": Architecture("qwen3", _SIZES, biases={"attention_bias": "attn_q.bias"}),
    "gemma": Architecture("gemma", _SIZES, norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        {**_SIZES, **_WINDOW, **_CAPS},
        norm_offset=1.0,
        otherwise={"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_SIZES, **_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
        norm_offset=1.0,
        otherwise={"final_logit_softcapping": None},
    ),
    "phi3": Architecture("phi3", {**_SIZES, **_WINDOW}, otherwise={"attention.sliding_window": None}),
    "olmo2": Architecture("olmo2", _SIZES),
    "granite": Architecture(
        "granite",
        {
            **_SIZES,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        rotates_pairs=True,
        biases=_BIASES,
    ),
    "starcoder2": Architecture("starcoder2", _LAYER_NORM, biases={"use_bias": "attn_q.bias"}),
    "gpt2": Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
    ),
}
_PARTIAL = frozenset({"phi3"})
"""architectures that may rotate a part of each head"""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""layers of the models of 27 billion weights, whose queries are scaled by d_model / heads instead of the width of a head"""


def architecture_of(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF files of the architecture {name!r} are not supported. Supported: {', '.join(sorted(ARCHITECTURES))}. "
            "Give the model's Hugging Face folder."
        )
    return ARCHITECTURES[name]


def config_of(name: str, metadata: Metadata, vocab_size: int, tensors: Collection[str], factors: Mapping[str, Any]) -> Any:
    """The Hugging Face config of a file. UnsupportedModel or BadWeights names a key.

    tensors  their names
    factors  rotary factors that the file stores as tensors, by the tensors' names
    """
    architecture = architecture_of(name)
    for key, value in metadata.items():
        neutral = (True,) if key == "attention.causal" else _NEUTRAL
        if key not in architecture.fields and key not in _READ and value not in neutral:
            raise UnsupportedModel(f"GGUF files of {name} with {key} = {value!r} are not supported.")
    if missing := architecture.fields.keys() - metadata.keys() - architecture.otherwise.keys() - {"attention.head_count_kv"}:
        raise BadWeights(f"The GGUF file lacks {name}.{min(missing)}. Is it complete?")
    fields = {field: metadata.get(key, architecture.otherwise.get(key)) for key, field in architecture.fields.items()}
    fields |= {"vocab_size": vocab_size, "tie_word_embeddings": "output.weight" not in tensors}
    fields |= {name: f"blk.0.{tensor}" in tensors for name, tensor in architecture.biases.items()}
    if lists := [field for field, value in fields.items() if isinstance(value, list)]:
        raise UnsupportedModel(f"GGUF files of {name} with another {lists[0]} in each layer are not supported.")
    if "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_key_value_heads"] or fields["num_attention_heads"]
        fields |= _heads(name, metadata, fields, factors)
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(architecture.model_type, **fields)
    except Exception as e:  # of the checks in transformers
        raise BadWeights(f"The keys of the GGUF file of {name} do not fit together: {e}. Copy it again from its source.") from e


def _heads(name: str, metadata: Metadata, fields: dict[str, Any], factors: Mapping[str, Any]) -> dict[str, Any]:
    """The fields about the width of heads and their rotation."""
    split = fields["hidden_size"] // fields["num_attention_heads"]
    width = metadata.get("attention.key_length", split)
    if metadata.get("attention.value_length", width) != width:
        raise UnsupportedModel(f"GGUF files of {name} with keys and values of two widths are not supported.")
    rope = {"rope_theta": float(metadata.get("rope.freq_base", 10000.0)), "rope_type": "default"}
    rope |= _scaling(name, metadata, fields["max_position_embeddings"], factors)
    turned = metadata.get("rope.dimension_count", width)
    if turned != width and name not in _PARTIAL:
        raise UnsupportedModel(f"GGUF files of {name} that rotate {turned} of {width} dimensions are not supported.")
    out: dict[str, Any] = {"head_dim": width} if width != split or name in ("qwen3", "gemma", "gemma2", "gemma3") else {}
    if turned != width:
        rope["partial_rotary_factor"] = turned / width
    if "original_max_position_embeddings" in rope and name == "phi3":
        out["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if name in _LARGEST:
        out["query_pre_attn_scalar"] = split if fields["num_hidden_layers"] == _LARGEST[name] else width
    if name == "gemma3":
        local = {"rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0)), "rope_type": "default"}
        return {**out, "rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {**out, "rope_parameters": rope}


def _scaling(name: str, metadata: Metadata, longest: int, factors: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `rope_parameters`."""
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor", 1.0)
    original = metadata.get("rope.scaling.original_context_length", longest)
    attention = metadata.get("rope.scaling.attn_factor", 1.0)
    if "rope_freqs" in factors:  # what Llama-3's frequencies are divided by
        own = {"short_factor": factors["rope_freqs"], "long_factor": factors["rope_freqs"]}
        return {"rope_type": "longrope", **own, "original_max_position_embeddings": longest, "attention_factor": 1.0}
    if "rope_factors_short" in factors:
        own = {"short_factor": factors["rope_factors_short"], "long_factor": factors["rope_factors_long"]}
        return {"rope_type": "longrope", **own, "original_max_position_embeddings": original, "attention_factor": attention}
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": float(factor)}
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"GGUF files of {name} with the rotary scaling {kind!r} are not supported.")
    return {}


# ---- gguf ------------------------------------------------------------------------------------------------------------

_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


class GgufFile:
    """A model as llama.cpp stores it. UnsupportedModel or BadWeights names what cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError:
            raise UnsupportedModel("Reading a GGUF file needs the package `gguf`. Run pip install gguf.") from None
        if not path.exists():
            raise UnsupportedModel(f"{path} does not exist.")
        self._gguf = gguf
        try:
            self._reader = gguf.GGUFReader(path)
            fields = {name: _value(field) for name, field in self._reader.fields.items() if "tokenizer" not in name}
        except Exception as e:
            raise BadWeights(f"{path} is not a readable GGUF file: {e}") from e
        self.architecture = str(fields.get("general.architecture"))
        begin = self.architecture + "."
        self.metadata = {name.removeprefix(begin): x for name, x in fields.items() if name.startswith(begin)}
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if fields.get("split.count", 0) > 1:
            count = fields["split.count"]
            raise UnsupportedModel(f"{path} is one of {count} parts. Join them first (llama-gguf-split --merge).")
        if self._reader.byte_order != "I":
            raise UnsupportedModel(f"{path} is written for machines of the other byte order.")
        if "token_embd.weight" not in self.tensors:
            raise BadWeights(f"{path} has no tensor token_embd.weight. Is it a language model?")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The file's config, in the fields of Hugging Face."""
        made = config_of(
            self.architecture,
            self.metadata,
            vocab_size=int(self.tensors["token_embd.weight"].shape[1]),  # shapes are stored in reverse
            tensors=self.tensors,
            factors={name: self._read(f"{name}.weight").tolist() for name in _FACTORS if f"{name}.weight" in self.tensors},
        )
        return dict(made.to_dict())

    def source(self) -> Source:
        """The tensors by their Hugging Face names. BadWeights names those that the family does not have."""
        family = FAMILIES[architecture_of(self.architecture).model_type]
        config, names = family.config(self.config), family.names
        theirs = [names.embed, names.final_norm, names.pos_embed, HEAD.removesuffix(".weight")]
        for layer in range(config.num_layers):
            for part in {**names.parts, **family.renamed(config)}.values():
                theirs += [names.block.format(layer) + each for each in ((part,) if isinstance(part, str) else part) if each]
        found: dict[str, str] = {}
        for name in theirs:
            stored = self._names(config.num_layers).get(name)
            found |= {name + end: f"{stored}{end}" for end in (".weight", ".bias") if f"{stored}{end}" in self.tensors}
        if extra := sorted(self.tensors.keys() - set(found.values()) - {f"{name}.weight" for name in _FACTORS}):
            raise BadWeights(
                f"{self.path} holds {len(extra)} tensors that a {config.family} model does not have, such as "
                f"{', '.join(extra[:4])}. Leaving them out would change what it computes."
            )
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        return Source(found, lambda name: self._as_there(found[name], heads, not names.transposed))

    def tokenizer(self) -> Any:
        """The file's tokenizer as transformers reads it, None if it has none.

        transformers forgets that texts begin with a special token (of Gemma, for one), which the file says.
        """
        fields = self._reader.fields
        if "tokenizer.ggml.tokens" not in fields:
            return None
        from tokenizers.processors import TemplateProcessing
        from transformers import AutoTokenizer

        try:
            found: Any = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except (NotImplementedError, KeyError, ValueError, OSError) as e:
            raise UnsupportedModel(
                f"transformers cannot read the tokenizer in {self.path}: {e}. Give another by tokenizer=, or convert the file "
                "to a Hugging Face folder."
            ) from e
        begins = (field := fields.get("tokenizer.ggml.add_bos_token")) is not None and bool(field.contents())
        if begins and found("a").input_ids[:1] != [found.bos_token_id]:
            begin = found.bos_token
            found.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, found.bos_token_id)]
            )
        return found

    def _names(self, num_layers: int) -> dict[str, str]:
        """Names of modules, in all spellings that llama.cpp knows -> names in the file."""
        kinds = {name: kind for kind, name in self._gguf.MODEL_ARCH_NAMES.items()}
        mapping = self._gguf.get_tensor_name_map(kinds[self.architecture], num_layers).mapping
        return {name: stored for name, (_, stored) in mapping.items()}

    def _as_there(self, name: str, heads: dict[str, int], products_transposed: bool) -> Tensor:
        """A tensor in the layout of transformers."""
        x, own = self._read(name), architecture_of(self.architecture)
        part = name.split(".")[-2]
        if own.rotates_pairs and part in heads:
            return rearrange(x, "(heads pairs two) ... -> (heads two pairs) ...", heads=heads[part], two=2)
        if own.norm_offset and part.endswith("norm"):
            return x - own.norm_offset
        is_product = x.dim() == 2 and name.startswith("blk.")
        return x.T if products_transposed and is_product else x

    def _read(self, name: str) -> Tensor:
        """A tensor in float32. It is read from the file, not mapped, so that the process does not keep its pages."""
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        raw = np.fromfile(self.path, np.uint8, count=tensor.n_bytes, offset=int(tensor.data_offset))
        kind = tensor.tensor_type
        try:
            data = raw.reshape(self._gguf.quant_shape_to_byte_shape(shape, kind))
            out = self._gguf.dequantize(data, kind)
        except NotImplementedError as e:
            raise UnsupportedModel(f"{self.path} stores {name} as {kind.name}, which the package gguf cannot read: {e}") from e
        except ValueError as e:
            raise BadWeights(f"{self.path} is cut off within {name}: {e}. Copy it again.") from e
        return torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32)).view(shape)


def _value(field: Any) -> Any:
    """A number of float32 as the shortest decimal that means it: 1e-06, as the model's own config says."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) and field.types[0].name == "FLOAT32" else value
