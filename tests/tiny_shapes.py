"""Config fields that tiny models of several families share."""

from typing import Any

SMALL: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=36,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
"""two layers, six heads, no size a power of two"""
ONE_KV = dict(SMALL, num_key_value_heads=1)
TWO_KV = dict(SMALL, num_key_value_heads=2)
TYPES = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 128,
}
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=14)
"""the experts of DeepSeek and its relatives"""


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, **more}
