"""Model types that do not load, what they lack, and which families come closest."""

import difflib
from collections.abc import Iterable

EXPERTS = "a mixture of experts"
LATENT = "latent attention with a compressed KV cache"
STATES = "layers with recurrent states or convolutions"
ENCODER = "an encoder beside the decoder"

REFUSED: dict[str, tuple[str, str]] = {
    # model_type: (what is missing here, the closest families)
    "afmoe": (EXPERTS, "gemma2"),
    "apertus": ("an activation with trained parameters (xIELU)", "arcee qwen3"),
    "bamba": (STATES, "llama"),
    "bart": (ENCODER, "opt"),
    "bitnet": ("products with ternary weights, and norms within attention and MLP", "llama"),
    "codegen": ("its order of queries, keys and values", "gptj"),
    "cohere2_moe": (EXPERTS, "cohere2"),
    "dbrx": (EXPERTS, "cohere"),
    "deepseek_v2": (LATENT + ", and " + EXPERTS, "llama"),
    "deepseek_v3": (LATENT + ", and " + EXPERTS, "llama"),
    "diffllama": ("differential attention", "llama"),
    "ernie4_5_moe": (EXPERTS, "ernie4_5"),
    "exaone_moe": (EXPERTS, "exaone4"),
    "falcon_h1": (STATES, "llama"),
    "falcon_mamba": (STATES, "falcon"),
    "gemma3n_text": ("embeddings of each layer and several residual streams", "gemma3_text"),
    "gemma4_text": ("embeddings of each layer, heads of two widths and layers that share their KV", "gemma3_text"),
    "granitemoehybrid": (STATES, "granite"),
    "hunyuan_v1_moe": (EXPERTS, "hunyuan_v1_dense"),
    "jamba": (STATES + ", and " + EXPERTS, "llama"),
    "jetmoe": (EXPERTS, "llama"),
    "lfm2": (STATES, "llama"),
    "llama4_text": (EXPERTS + ", and attention in chunks", "llama"),
    "mamba": (STATES, "llama"),
    "mamba2": (STATES, "llama"),
    "minicpm3": (LATENT, "llama"),
    "nemotron_h": (STATES, "nemotron"),
    "olmo_hybrid": (STATES, "olmo3"),
    "qwen3_5_text": (STATES, "qwen3"),
    "qwen3_next": (STATES + ", and " + EXPERTS, "qwen3"),
    "recurrent_gemma": (STATES, "gemma"),
    "rwkv": (STATES, "gpt2"),
    "t5": (ENCODER, "gemma"),
    "xglm": ("sinusoidal positions", "opt"),
    "zamba2": (STATES, "llama"),
}


def refusal(model_type: str, known: Iterable[str]) -> str:
    """Why a model type does not load, and what comes closest."""
    families = sorted(known)
    if model_type in REFUSED:
        missing, closest = REFUSED[model_type]
        why = f"It needs {missing}. Closest: {closest.replace(' ', ', ')}."
    else:
        near = difflib.get_close_matches(model_type, families, n=3)
        why = f"Closest by name: {', '.join(near)}." if near else "No family has a similar name."
    return f"The model_type {model_type!r} is not supported. {why} Known: {', '.join(families)}."
