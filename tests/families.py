"""Tiny random Hugging Face models of every supported family, built on demand."""

from functools import cache
from typing import Any

import torch

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

NAMES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "neox", "neox-sequential", "gemma2", "gemma3")


@cache
def hugging_face(name: str) -> Any:
    """The model of that name in float32, with weights that make every part matter."""
    import transformers as tf

    configs = {
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
    model.config.architectures = [type(model).__name__]
    return model
