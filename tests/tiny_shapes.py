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


# ---- latent attention -------------------------------------------------------------------------------------------------
# Configs of tiny models with latent attention; `tests/families.py` builds them.

LATENT = dict(
    SMALL,
    num_key_value_heads=6,
    kv_lora_rank=14,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=5,
    first_k_dense_replace=2,
)
"""latent attention, no two widths equal, all layers dense"""
ODD = dict(LATENT, kv_lora_rank=13, qk_nope_head_dim=7)
"""widths with which transformers cannot compute DeepSeek-V2"""
EXPERTS = dict(ROUTED, first_k_dense_replace=0, routed_scaling_factor=1.7)
SPARSE, ODD_SPARSE = LATENT | EXPERTS, ODD | EXPERTS
GROWN = dict(YARN, mscale=0.8, mscale_all_dim=0.7)
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (config class, its fields)
    "deepseek-v2": ("DeepseekV2", dict(LATENT, mlp_bias=True, rope_parameters=GROWN)),
    "deepseek-v2-queries": ("DeepseekV2", dict(LATENT, q_lora_rank=11, attention_bias=True)),
    "deepseek-v3": ("DeepseekV3", dict(ODD, q_lora_rank=11, attention_bias=True, rope_parameters=GROWN)),
    "deepseek-v3-plain": ("DeepseekV3", dict(ODD, qk_rope_head_dim=2, tie_word_embeddings=True)),
    "minicpm3": ("MiniCPM3", dict(ODD, q_lora_rank=11, attention_bias=True, mlp_bias=True, dim_model_base=12)),
    "youtu": ("Youtu", dict(ODD, rope_parameters=GROWN, tie_word_embeddings=True)),
    "glm4-moe-lite": ("Glm4MoeLite", dict(ODD_SPARSE, q_lora_rank=11, n_group=1, topk_group=1)),
    "deepseek-v2-lite": ("DeepseekV2", dict(SPARSE, first_k_dense_replace=1, rope_parameters=GROWN)),
    "deepseek-v2-groups": (
        "DeepseekV2",
        dict(SPARSE, q_lora_rank=11, topk_method="group_limited_greedy", n_group=4, topk_group=2, mlp_bias=True),
    ),
    "deepseek-v3-groups": (
        "DeepseekV3",
        dict(ODD_SPARSE, q_lora_rank=11, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=GROWN),
    ),
    "deepseek-v3-sparse": ("DeepseekV3", dict(ODD_SPARSE, n_group=1, topk_group=1, norm_topk_prob=False)),
}


# ---- hybrids ----------------------------------------------------------------------------------------------------------
# Configs of tiny models with recurrent layers.

DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"],
)
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=9, mamba_n_groups=2, mamba_d_state=5, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16
)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (config class, its fields)
    "lfm2": ("Lfm2", dict(TWO_KV, layer_types=["conv", "full_attention"], block_multiple_of=4, conv_bias=True)),
    "lfm2-four": (
        "Lfm2",
        dict(ONE_KV, layer_types=["full_attention", "conv"], conv_L_cache=4, block_auto_adjust_ff_dim=False),
    ),
    "qwen3-next": (
        "Qwen3Next",
        dict(
            TWO_KV,
            **DELTA,
            head_dim=12,
            attention_bias=True,
            rope_parameters=rope(partial_rotary_factor=0.5),
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=14,
            shared_expert_intermediate_size=11,
        ),
    ),
    "qwen3-next-dense": ("Qwen3Next", dict(ONE_KV, **DELTA, head_dim=8, num_experts=0, tie_word_embeddings=True)),
    "qwen3-5": ("Qwen3_5Text", dict(TWO_KV, **DELTA, head_dim=12, rope_parameters=rope(partial_rotary_factor=0.5))),
    "mamba2": (
        "Mamba2",
        dict(
            vocab_size=97,
            hidden_size=36,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=9,
            n_groups=2,
            state_size=5,
            chunk_size=16,
            use_bias=True,
            pad_token_id=0,
            eos_token_id=0,
        ),
    ),
    "mamba2-limited": (
        "Mamba2",
        dict(
            vocab_size=97,
            hidden_size=36,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=9,
            n_groups=1,
            state_size=7,
            chunk_size=16,
            use_conv_bias=False,
            time_step_limit=(0.01, 0.1),
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=0,
        ),
    ),
    "bamba": (
        "Bamba",
        dict(
            {**SMALL, **MAMBA, "num_attention_heads": 3, "num_key_value_heads": 1},
            attn_layer_indices=[1],
            mamba_proj_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        dict(
            {**TWO_KV, "num_hidden_layers": 3},
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=14,
            routed_scaling_factor=1.7,
        ),
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeText",
        dict(
            TWO_KV,
            **DELTA,
            head_dim=12,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=14,
            shared_expert_intermediate_size=11,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        dict(
            {**TWO_KV, **MAMBA},
            layer_types=["linear_attention", "full_attention"],
            shared_intermediate_size=22,
            num_local_experts=5,
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            position_embedding_type="rope",
        ),
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        dict(
            {**TWO_KV, **MAMBA},
            layer_types=["linear_attention", "full_attention"],
            shared_intermediate_size=22,
            num_local_experts=0,
            attention_bias=True,
        ),
    ),
    "nemotron-h": (
        "NemotronH",
        dict(
            vocab_size=97,
            hidden_size=36,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=20,
            mlp_bias=True,
            ssm_state_size=5,
            mamba_num_heads=8,
            mamba_head_dim=9,
            n_groups=2,
            chunk_size=16,
            n_routed_experts=6,
            moe_intermediate_size=7,
            moe_shared_expert_intermediate_size=9,
            routed_scaling_factor=1.7,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "olmo-hybrid": ("OlmoHybrid", dict(TWO_KV, **DELTA, attention_bias=True, rope_parameters=rope())),
    "olmo-hybrid-plain": ("OlmoHybrid", dict(TWO_KV, **DELTA, linear_allow_neg_eigval=False, rope_parameters=None)),
    "falcon-h1": (
        "FalconH1",
        dict(
            {**TWO_KV, **MAMBA},
            mamba_d_ssm=72,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            attention_bias=True,
            mlp_bias=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            embedding_multiplier=5.6,
            lm_head_multiplier=0.3,
            key_multiplier=0.4,
            attention_in_multiplier=0.9,
            attention_out_multiplier=0.6,
            ssm_in_multiplier=1.3,
            ssm_out_multiplier=0.24,
            ssm_multipliers=[0.35, 0.25, 0.17, 0.5, 0.3],
            mlp_multipliers=[0.9, 0.4],
        ),
    ),
    "falcon-h1-plain": ("FalconH1", dict({**TWO_KV, **MAMBA}, mamba_d_ssm=72, mamba_rms_norm=False)),
}
