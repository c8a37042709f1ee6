"""Tiny random Hugging Face models of every supported family, built on demand."""

import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tests.devices import swept
from tests.mixtures import MIXTURES
from tests.tiny_shapes import HYBRIDS, LATENT_MODELS, LONG, ONE_KV, SMALL, TWO_KV, TYPES, YARN, rope

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
)
GROUPED = dict(SHAPE, num_key_value_heads=2)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

ALIKE = ("llama3", "mistral", "qwen2", "neox-sequential")
"""families that compute what others do, with other angles, windows, biases or order; slow where arithmetic is the subject"""
CORE = (
    "llama", "mistral", "qwen3", "gpt2", "gemma2", "phi", "bloom", "cohere", "gpt-oss", "deepseek-v2", "deepseek-v3-groups",
    "lfm2", "qwen3-next", "mamba2",
)  # fmt: skip
"""one of each mechanism: windows, norms of heads, learned positions, caps, parallel blocks, biases by distance, factors, sinks
with experts, latent attention, experts in groups, and the kinds of recurrent layers"""
NAMES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "neox", "neox-sequential", "gemma2", "gemma3")

FALCON = dict(
    vocab_size=97,
    hidden_size=36,
    ffn_hidden_size=52,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=0,
)

BLOOM = dict(vocab_size=97, n_layer=2, bos_token_id=0, eos_token_id=0)
MPT = dict(vocab_size=97, d_model=36, n_layers=2, max_seq_len=256)
BIGCODE = dict(
    vocab_size=97, n_embd=36, n_layer=2, n_head=6, n_positions=256, n_inner=52, bos_token_id=0, eos_token_id=0, pad_token_id=0
)

NEW_WIRINGS = ("cohere", "hunyuan", "olmo2", "bloom", "mpt", "arcee", "granite", "lfm2", "qwen3-next", "mamba2", "bamba")
"""what the first families do not have and the kernels do: norms of each head or over all, norms after the rotation, no norm
before a product, ALiBi, relu2, factors on stream and logits, recurrent layers"""
LATENT_NAMES = ("deepseek-v2", "deepseek-v2-queries", "deepseek-v3", "deepseek-v3-plain", "minicpm3", "youtu")
"""models with latent attention and without mixtures"""
BOTH_NAMES = ("deepseek-v2-lite", "deepseek-v2-groups", "deepseek-v3-groups", "deepseek-v3-sparse", "glm4-moe-lite")
"""models with both"""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (config class, its fields). A second model of a family has a suffix
    "gemma": ("Gemma", dict(ONE_KV, head_dim=10, attention_bias=True)),
    "gpt2-by-layer": (
        "GPT2",
        dict(
            vocab_size=97,
            n_embd=36,
            n_layer=2,
            n_head=6,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=0,
            scale_attn_by_inverse_layer_idx=True,
            scale_attn_weights=False,
            n_inner=52,
            tie_word_embeddings=False,
        ),
    ),
    "ministral": ("Ministral", dict(TWO_KV, head_dim=10, sliding_window=7, layer_types=TYPES)),
    "seed-oss": ("SeedOss", dict(TWO_KV, head_dim=10, attention_bias=True, attention_out_bias=True, mlp_bias=True)),
    "arcee": ("Arcee", dict(ONE_KV, head_dim=10, attention_bias=True, mlp_bias=True, rope_parameters=YARN)),
    "nemotron": (
        "Nemotron",
        dict(TWO_KV, head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)),
    ),
    "starcoder2": ("Starcoder2", dict(TWO_KV, sliding_window=7, use_bias=True)),
    "starcoder2-plain": ("Starcoder2", dict(ONE_KV, sliding_window=None, use_bias=False, tie_word_embeddings=False)),
    "phi": ("Phi", dict(TWO_KV, rope_parameters=rope(partial_rotary_factor=0.67), qk_layernorm=True)),
    "phi-plain": ("Phi", dict(SMALL, rope_parameters=rope(partial_rotary_factor=0.34))),
    "phi3": ("Phi3", dict(ONE_KV, rope_parameters=LONG, original_max_position_embeddings=128, sliding_window=7)),
    "phi4-mini": (
        "Phi3",
        dict(TWO_KV, rope_parameters=rope(partial_rotary_factor=0.67), tie_word_embeddings=True, sliding_window=None),
    ),
    "stablelm": (
        "StableLm",
        dict(TWO_KV, rope_parameters=rope(partial_rotary_factor=0.34), use_qkv_bias=True, qk_layernorm=True),
    ),
    "stablelm-parallel": (
        "StableLm",
        dict(SMALL, num_key_value_heads=6, rope_parameters=rope(partial_rotary_factor=1.0), use_parallel_residual=True),
    ),
    "smollm3": (
        "SmolLM3",
        dict(
            TWO_KV,
            no_rope_layers=[1, 0],
            use_sliding_window=True,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention"],
            attention_bias=True,
        ),
    ),
    "granite": (
        "Granite",
        dict(
            ONE_KV,
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "olmo": ("Olmo", dict(TWO_KV, clip_qkv=0.3, attention_bias=True)),
    "olmo-plain": ("Olmo", dict(SMALL, num_key_value_heads=6, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", dict(TWO_KV, attention_bias=True)),
    "olmo3": (
        "Olmo3",
        dict(
            ONE_KV, sliding_window=7, layer_types=TYPES, rope_parameters={"sliding_attention": rope(), "full_attention": YARN}
        ),
    ),
    "exaone4": ("Exaone4", dict(TWO_KV, sliding_window=7, layer_types=TYPES)),
    "exaone4-global": ("Exaone4", dict(ONE_KV, sliding_window=None, layer_types=["full_attention"] * 2)),
    "hunyuan": (
        "HunYuanDenseV1",
        dict(
            TWO_KV,
            head_dim=10,
            attention_bias=True,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        ),
    ),
    "cohere": ("Cohere", dict(TWO_KV, use_qk_norm=True, logit_scale=0.0625, attention_bias=True)),
    "cohere-plain": (
        "Cohere",
        dict(ONE_KV, logit_scale=0.3, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ),
    "cohere2": ("Cohere2", dict(TWO_KV, sliding_window=7, layer_types=TYPES)),
    "glm": ("Glm", dict(ONE_KV, head_dim=12, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5))),
    "glm4": ("Glm4", dict(TWO_KV, head_dim=12, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5))),
    "helium": ("Helium", dict(ONE_KV, head_dim=6, attention_bias=True, mlp_bias=True)),
    "ernie": ("Ernie4_5", dict(ONE_KV, head_dim=10, use_bias=True)),
    **LATENT_MODELS,
    "gptj": (
        "GPTJ",
        dict(vocab_size=97, n_embd=36, n_layer=2, n_head=6, n_positions=256, rotary_dim=4, bos_token_id=0, eos_token_id=0),
    ),
    "gpt-neo": (
        "GPTNeo",
        dict(
            vocab_size=97,
            hidden_size=36,
            num_layers=2,
            num_heads=6,
            max_position_embeddings=256,
            intermediate_size=52,
            attention_types=[[["local", "global"], 1]],
            window_size=7,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "opt": (
        "OPT",
        dict(
            vocab_size=97,
            hidden_size=36,
            ffn_dim=52,
            num_hidden_layers=2,
            num_attention_heads=6,
            max_position_embeddings=256,
            word_embed_proj_dim=36,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "gpt-bigcode": ("GPTBigCode", dict(BIGCODE)),
    "gpt-bigcode-heads": ("GPTBigCode", dict(BIGCODE, multi_query=False, tie_word_embeddings=False)),
    "persimmon": ("Persimmon", dict(SMALL, rope_parameters=rope(partial_rotary_factor=0.67))),
    "vaultgemma": (
        "VaultGemma",
        dict(
            ONE_KV,
            head_dim=10,
            sliding_window=7,
            layer_types=TYPES,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "cwm": ("Cwm", dict(TWO_KV, head_dim=10, sliding_window=7, layer_types=TYPES, rope_parameters=LLAMA3, mlp_bias=True)),
    "bloom": ("Bloom", dict(BLOOM, hidden_size=36, n_head=6, seq_length=256)),
    "bloom-eight": ("Bloom", dict(BLOOM, hidden_size=80, n_head=8)),
    "mpt": ("Mpt", dict(MPT, n_heads=6, attn_config={"clip_qkv": 0.3, "softmax_scale": 0.2})),
    "mpt-four": ("Mpt", dict(MPT, n_heads=4, tie_word_embeddings=False)),
    "falcon": ("Falcon", dict(FALCON, bias=True)),
    "falcon-new": ("Falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-new-one-norm": ("Falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1)),
    "falcon-sequential": (
        "Falcon",
        dict(FALCON, multi_query=False, parallel_attn=False, tie_word_embeddings=False, activation="gelu_pytorch_tanh"),
    ),
    **MIXTURES,
    **HYBRIDS,
}


def core(names: Iterable[str]) -> list[Any]:
    """Names of families for `parametrize`: those outside CORE are slow."""
    names = tuple(names)
    return swept(names, *(name for name in CORE if name in names))


def hugging_face_folder(name: str, to: Path) -> Path:
    """That model's folder, as `save_pretrained` writes it: a copy, to damage."""
    return shutil.copytree(_saved(name), to, dirs_exist_ok=True)


@cache
def _saved(name: str) -> Path:
    folder = Path(mkdtemp())
    hugging_face(name).save_pretrained(folder)
    return folder


@cache
def hugging_face(name: str) -> Any:
    """The model of that name in float32, with weights that make every part matter."""
    import transformers as tf

    configs = {
        **{each: lambda kind=kind, own=own: getattr(tf, f"{kind}Config")(**own) for each, (kind, own) in MORE.items()},
        "llama": lambda: tf.LlamaConfig(**GROUPED),
        "llama3": lambda: tf.LlamaConfig(
            **GROUPED, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "mistral": lambda: tf.MistralConfig(**GROUPED, head_dim=16, sliding_window=7),
        "qwen2": lambda: tf.Qwen2Config(**GROUPED),
        "qwen3": lambda: tf.Qwen3Config(**GROUPED, head_dim=16),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=0
        ),
        "neox": lambda: tf.GPTNeoXConfig(**SHAPE, bos_token_id=0, eos_token_id=0),
        "neox-sequential": lambda: tf.GPTNeoXConfig(**SHAPE, use_parallel_residual=False, bos_token_id=0, eos_token_id=0),
        "gemma2": lambda: tf.Gemma2Config(
            **GROUPED,
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,  # the default of 50 would have no effect at the size of these scores
            final_logit_softcapping=3.0,
        ),
        "gemma3": lambda: tf.Gemma3TextConfig(
            **GROUPED,
            head_dim=16,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }
    torch.manual_seed(sum(map(ord, name)))
    model = tf.AutoModelForCausalLM.from_config(configs[name](), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # default initialisation leaves biases and norms at their trivial values
            parameter.add_(torch.randn_like(parameter) * 0.08)
        for name_of_buffer, buffer in model.named_buffers():
            if name_of_buffer.endswith("e_score_correction_bias"):  # a trained one, which transformers keeps as a buffer
                buffer.add_(torch.randn_like(buffer) * 0.4)
    model.config._experts_implementation = "eager"  # the faster one needs rows of a multiple of 16 bytes
    model.config.architectures = [type(model).__name__]
    return model
