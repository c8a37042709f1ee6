"""The families that load, by the `model_type` of transformers. `docs/extending.md` adds one."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from replaylens.engine.errors import UnsupportedModel
from replaylens.weights.families import gpt, hybrid, llama, moe
from replaylens.weights.family import Family, Raw

# ---- refusals --------------------------------------------------------------------------------------------------------
# Model types that do not load, what they lack, and which families come closest.

EXPERTS = "a table for its mixture of experts"
S6 = "Mamba-1's recurrence, whose decay differs in every channel"
ENCODER = "an encoder next to the decoder"

REFUSED: dict[str, tuple[str, str]] = {
    # model_type: (what is missing here, the closest families)
    "afmoe": (EXPERTS, "gemma2"),
    "apertus": ("an activation with trained parameters (xIELU)", "arcee qwen3"),
    "bart": (ENCODER, "opt"),
    "bitnet": ("products with ternary weights, and norms within attention and MLP", "llama"),
    "codegen": ("its order of queries, keys and values", "gptj"),
    "cohere2_moe": (EXPERTS, "cohere2"),
    "dbrx": (EXPERTS, "cohere"),
    "diffllama": ("differential attention", "llama"),
    "ernie4_5_moe": (EXPERTS, "ernie4_5"),
    "exaone_moe": (EXPERTS, "exaone4"),
    "falcon_mamba": (S6, "mamba2"),
    "gemma3n_text": ("embeddings of each layer and several residual streams", "gemma3_text"),
    "gemma4_text": ("embeddings of each layer, heads of two widths and layers that share their KV", "gemma3_text"),
    "hunyuan_v1_moe": (EXPERTS, "hunyuan_v1_dense"),
    "jamba": (S6 + ", and " + EXPERTS, "bamba"),
    "jetmoe": (EXPERTS, "llama"),
    "kimi_linear": ("decays of every channel of a key (Kimi Delta Attention)", "qwen3_next deepseek_v3"),
    "llama4_text": (EXPERTS + ", and attention in chunks", "llama"),
    "mamba": (S6, "mamba2"),
    "recurrent_gemma": ("its gated linear recurrence", "gemma mamba2"),
    "rwkv": ("its recurrence", "gpt2 mamba2"),
    "t5": (ENCODER, "gemma"),
    "xglm": ("sinusoidal positions", "opt"),
    "zamba2": ("attention that several layers share, with adapters of their own", "bamba"),
}


_SIGNS: dict[str, tuple[str, ...]] = {
    # what a model needs: config fields that tell
    "an encoder next to the decoder": ("is_encoder_decoder", "encoder_layers"),
    "latent attention with a compressed KV cache": ("kv_lora_rank",),
    "a mixture of experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "layers with recurrent states or convolutions": (
        "mamba_d_state",
        "ssm_state_size",
        "state_size",
        "conv_L_cache",
        "linear_num_key_heads",
        "attn_type_list",
    ),
    "attention to both sides": ("type_vocab_size",),
}


def refusal(model_type: str, known: Iterable[str], config: Mapping[str, Any] | None = None) -> str:
    """Why a model type does not load, and what comes closest. Of a type that is not listed, its config tells."""
    families = sorted(known)
    if model_type in REFUSED:
        missing, closest = REFUSED[model_type]
        why = f"It needs {missing}. Closest: {closest.replace(' ', ', ')}."
    else:
        near = difflib.get_close_matches(model_type, families, n=3)
        why = f"Closest by name: {', '.join(near)}." if near else "No family has a similar name."
        why = f"{_told(config or {})}{why}"
    return f"The model_type {model_type!r} is not supported. {why} Known: {', '.join(families)}."


def _told(config: Mapping[str, Any]) -> str:
    """What an unknown model needs, as far as its config tells."""
    found = {what: next((name for name in names if config.get(name)), "") for what, names in _SIGNS.items()}
    needs = [f"{what} ({name} = {config[name]!r})" for what, name in found.items() if name]
    told = f"Its config asks for {', and '.join(needs)}. " if needs else ""
    return told + ("Its code comes with the checkpoint, and is not run. " if config.get("auto_map") else "")


# ---- families --------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "ministral": llama.MINISTRAL,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "gemma": llama.GEMMA,
    "gemma2": llama.GEMMA2,
    "gemma3_text": llama.GEMMA3,
    "vaultgemma": llama.VAULTGEMMA,
    "phi": llama.PHI,
    "phi3": llama.PHI3,
    "olmo": llama.OLMO,
    "olmo2": llama.OLMO2,
    "olmo3": llama.OLMO3,
    "smollm3": llama.SMOLLM3,
    "granite": llama.GRANITE,
    "stablelm": llama.STABLELM,
    "starcoder2": llama.STARCODER2,
    "cohere": llama.COHERE,
    "cohere2": llama.COHERE2,
    "glm": llama.GLM,
    "glm4": llama.GLM4,
    "nemotron": llama.NEMOTRON,
    "arcee": llama.ARCEE,
    "exaone4": llama.EXAONE4,
    "hunyuan_v1_dense": llama.HUNYUAN,
    "helium": llama.HELIUM,
    "ernie4_5": llama.ERNIE,
    "seed_oss": llama.SEED_OSS,
    "cwm": llama.CWM,
    "deepseek_v2": moe.DEEPSEEK_V2,
    "deepseek_v3": moe.DEEPSEEK_V3,
    "glm4_moe_lite": moe.GLM4_MOE_LITE,
    "minicpm3": moe.MINICPM3,
    "youtu": moe.YOUTU,
    "gpt2": gpt.GPT2,
    "gpt_bigcode": gpt.GPT_BIGCODE,
    "persimmon": gpt.PERSIMMON,
    "gpt_neo": gpt.GPT_NEO,
    "gpt_neox": gpt.NEOX,
    "gptj": gpt.GPTJ,
    "opt": gpt.OPT,
    "falcon": gpt.FALCON,
    "bloom": gpt.BLOOM,
    "mpt": gpt.MPT,
    "mixtral": moe.MIXTRAL,
    "phimoe": moe.PHIMOE,
    "granitemoe": moe.GRANITEMOE,
    "qwen2_moe": moe.QWEN2_MOE,
    "qwen3_moe": moe.QWEN3_MOE,
    "olmoe": moe.OLMOE,
    "gpt_oss": moe.GPT_OSS,
    "flex_olmo": moe.FLEX_OLMO,
    "dots1": moe.DOTS1,
    "glm4_moe": moe.GLM4_MOE,
    "lfm2": hybrid.LFM2,
    "qwen3_next": hybrid.QWEN3_NEXT,
    "qwen3_5_text": hybrid.QWEN3_5,
    "mamba2": hybrid.MAMBA2,
    "bamba": hybrid.BAMBA,
    "lfm2_moe": hybrid.LFM2_MOE,
    "qwen3_5_moe_text": hybrid.QWEN3_5_MOE,
    "granitemoehybrid": hybrid.GRANITE_HYBRID,
    "nemotron_h": hybrid.NEMOTRON_H,
    "olmo_hybrid": hybrid.OLMO_HYBRID,
    "falcon_h1": hybrid.FALCON_H1,
}


def family_of(raw: Raw) -> str:
    """The family of a Hugging Face config; UnsupportedModel says what an unknown one lacks, and what comes closest."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(refusal(name, FAMILIES, raw))
    return name
