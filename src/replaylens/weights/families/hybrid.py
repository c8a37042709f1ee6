"""The tables of hybrids: families with recurrent layers, short convolutions among them. `docs/extending.md` adds one."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import MixerConfig, MixtureConfig, ModelConfig, Rope, Routing
from replaylens.weights.families.llama import BIASES, LLAMA, LLAMA_NAMES, OLMO2, PARTIAL, names_of, reads_of
from replaylens.weights.families.moe import COUNTS, GRANITEMOE, QWEN2_MOE, qwen2_mixture, sigmoids_in_groups
from replaylens.weights.family import Arrange, ExpertNames, Names, Raw, ReadField, main_rope, rotary_width

ATTENTION, MIXER = "attn mlp", "mixer mlp"


def layers(**kinds: str) -> ReadField:
    """The parts of each layer, by the words of `layer_types`."""

    def read(raw: Raw) -> tuple[str, ...]:
        if unknown := set(raw["layer_types"]) - set(kinds):
            raise UnsupportedModel(f"The layer kinds {sorted(unknown)} are not supported. Known: {', '.join(kinds)}.")
        return tuple(kinds[kind] for kind in raw["layer_types"])

    return read


def _taps(config: ModelConfig, x: Tensor) -> Tensor:
    """[channels, 1, taps] -> [taps, channels]"""
    return x[:, 0].T


def by_group(config: ModelConfig, x: Tensor) -> Tensor:
    """The weights of a norm of each group"""
    assert config.mixer is not None
    return x.view(config.mixer.norm_groups, -1) if config.mixer.norm_groups > 1 else x


CONV: dict[str, Arrange] = {"mixer.conv.weight": _taps}

# ---- LFM2 ----------------------------------------------------------------------------------------------------------------


def _lfm2(raw: Raw) -> MixerConfig | None:
    bias = raw["conv_bias"]
    mixer = MixerConfig("conv", raw["conv_L_cache"], raw["hidden_size"], conv_bias=bias, bias=bias)
    return mixer if "conv" in raw["layer_types"] else None


def _lfm2_mlp(raw: Raw) -> int:
    """The width of the MLP, which the config may adjust."""
    width: int = raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if raw["block_ffn_dim_multiplier"] is not None:
            multiple = raw["block_multiple_of"]
            width = -(-int(raw["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    return width


LFM2 = replace(
    LLAMA,
    names=replace(
        names_of(
            LLAMA_NAMES,
            ln1="operator_norm",
            ln2="ffn_norm",
            attn__o="self_attn.out_proj",
            attn__q_norm="self_attn.q_layernorm",
            attn__k_norm="self_attn.k_layernorm",
            mixer__up="conv.in_proj",
            mixer__conv__weight="conv.conv.weight",
            mixer__conv__bias="conv.conv.bias",
            mixer__o="conv.out_proj",
            mlp__up=("feed_forward.w1", "feed_forward.w3"),
            mlp__down="feed_forward.w2",
        ),
        final_norm="model.embedding_norm",
    ),
    reads=reads_of(
        LLAMA,
        without=("qkv_bias", "out_bias", "mlp_bias", "activation"),
        norm_eps="norm_eps",
        d_mlp=_lfm2_mlp,
        mixer=_lfm2,
        parts=layers(conv=MIXER, full_attention=ATTENTION),
    ),
    fixed={"qk_norm": True},
    arrange=CONV,
    layer_types=True,
)


def _lfm2_mixture(raw: Raw) -> MixtureConfig:
    routing = Routing(
        raw["num_experts_per_tok"],
        "sigmoid",
        normalised=raw["norm_topk_prob"],
        scale=raw["routed_scaling_factor"],
        correction=raw["use_expert_bias"],
        floor=1e-6,
    )
    sparse = tuple(layer >= raw["num_dense_layers"] for layer in range(raw["num_hidden_layers"]))
    return MixtureConfig(raw["num_experts"], raw["moe_intermediate_size"], routing, () if all(sparse) else sparse)


LFM2_MOE = replace(
    LFM2,
    names=replace(
        names_of(LFM2.names, mlp__router="feed_forward.gate", mlp__correction="feed_forward.expert_bias"),
        experts=ExpertNames(
            stacked={"up": "feed_forward.experts.gate_up_proj", "down": "feed_forward.experts.down_proj"},
            each={"up": ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"), "down": ("feed_forward.experts.{}.w2",)},
        ),
    ),
    reads=reads_of(LFM2, d_mlp="intermediate_size", mixture=_lfm2_mixture),
    uses=COUNTS,
)

# ---- Qwen3-Next, Qwen3.5 -------------------------------------------------------------------------------------------------


def _delta(raw: Raw) -> MixerConfig | None:
    heads, key_heads = raw["linear_num_value_heads"], raw["linear_num_key_heads"]
    d_key, d_value, taps = raw["linear_key_head_dim"], raw["linear_value_head_dim"], raw["linear_conv_kernel_dim"]
    channels = 2 * key_heads * d_key + heads * d_value
    mixer = MixerConfig("delta", taps, channels, heads, key_heads, d_key, d_value)
    return mixer if "linear_attention" in raw["layer_types"] else None


def _qwen3_next(raw: Raw) -> MixtureConfig | None:
    mixture = qwen2_mixture(raw) if raw["num_experts"] else None
    return mixture if mixture is None or not mixture.layers or any(mixture.layers) else None


def _gates_last(config: ModelConfig, x: Tensor) -> Tensor:
    """q and gate of each head, then k and v -> q | k | v | gates"""
    turned = 2 * config.num_heads * config.d_head
    both = rearrange(x[:turned], "(heads two d) ... -> two (heads d) ...", two=2, d=config.d_head)
    return torch.cat([both[0], x[turned:], both[1]])


def _by_part(config: ModelConfig, x: Tensor) -> Tensor:
    """q, k, v and gate of each key head -> those of all key heads, one after the other"""
    m = config.mixer
    assert m is not None
    values = m.heads // m.key_heads * m.d_value
    each = rearrange(x, "(heads d) ... -> heads d ...", heads=m.key_heads).split([m.d_key, m.d_key, values, values], dim=1)
    return torch.cat([part.flatten(0, 1) for part in each])


def _by_rate(config: ModelConfig, x: Tensor) -> Tensor:
    """strengths and decays of each key head -> strengths of all, then decays"""
    assert config.mixer is not None
    return rearrange(x, "(heads two group) ... -> (two heads group) ...", heads=config.mixer.key_heads, two=2)


QWEN3_NEXT = replace(
    QWEN2_MOE,
    names=names_of(
        QWEN2_MOE.names,
        mixer__up="linear_attn.in_proj_qkvz",
        mixer__rates="linear_attn.in_proj_ba",
        mixer__a_log="linear_attn.A_log",
        mixer__step_bias="linear_attn.dt_bias",
        mixer__conv__weight="linear_attn.conv1d.weight",
        mixer__unit_norm="",
        mixer__norm="linear_attn.norm",
        mixer__o="linear_attn.out_proj",
    ),
    reads={
        **reads_of(QWEN2_MOE, without=("windows",), mixture=_qwen3_next, mixer=_delta),
        **BIASES,
        "parts": layers(linear_attention=MIXER, full_attention=ATTENTION),
    },
    fixed={"qk_norm": True, "attn_gate": True},
    uses=COUNTS | PARTIAL,
    only={"hidden_act": ("silu",)},
    norm_offset=1.0,
    plain_norms=frozenset({"mixer.norm"}),
    arrange={**CONV, "attn.qkv": _gates_last, "mixer.up": _by_part, "mixer.rates": _by_rate},
    left_out=("mtp.",),
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    names=names_of(
        QWEN3_NEXT.names,
        mixer__up=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        mixer__rates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    reads=reads_of(QWEN3_NEXT, without=("mixture",)),
    uses=PARTIAL | {"mrope_section", "mrope_interleaved"},  # of pictures: the positions of a text are the same in all sections
    arrange={**CONV, "attn.qkv": _gates_last},
)


def _qwen3_5_mixture(raw: Raw) -> MixtureConfig:
    routing, shared = Routing(raw["num_experts_per_tok"]), raw["shared_expert_intermediate_size"]
    return MixtureConfig(raw["num_experts"], raw["moe_intermediate_size"], routing, d_shared=shared, shared_gate=True)


QWEN3_5_MOE = replace(
    QWEN3_5,
    reads=reads_of(QWEN3_5, mixture=_qwen3_5_mixture, d_mlp="moe_intermediate_size"),
    uses=QWEN3_5.uses | COUNTS,
)

# ---- OLMo-Hybrid ---------------------------------------------------------------------------------------------------------


def _turns(raw: Raw) -> bool:
    return (raw.get("rope_parameters") or {}).get("rope_theta") is not None


def _olmo(raw: Raw) -> MixerConfig | None:
    mixer, scale = _delta(raw), 2.0 if raw["linear_allow_neg_eigval"] else 1.0
    return None if mixer is None else replace(mixer, beta_scale=scale, norm_eps=1e-5, norms_before=True)


OLMO_HYBRID = replace(
    OLMO2,
    names=replace(
        names_of(
            OLMO2.names,
            mixer__up=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"),
            mixer__rates=("linear_attn.b_proj", "linear_attn.a_proj"),
            mixer__a_log="linear_attn.A_log",
            mixer__step_bias="linear_attn.dt_bias",
            mixer__conv__weight=("linear_attn.conv1d.weight", *(f"linear_attn.{part}_conv1d.weight" for part in "qkv")),
            mixer__unit_norm="",
            mixer__norm="linear_attn.o_norm",
            mixer__o="linear_attn.o_proj",
        ),
        spellings=(("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")),
    ),
    reads=reads_of(
        OLMO2,
        rotary_dim=lambda raw: rotary_width(raw) if _turns(raw) else 0,
        rope=lambda raw: main_rope(raw) if _turns(raw) else Rope(),
        mixer=_olmo,
        parts=layers(linear_attention=MIXER, full_attention=ATTENTION),
    ),
    uses=frozenset(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
    only={"hidden_act": ("silu",)},
    arrange=CONV,
    layer_types=True,
)

# ---- Mamba-2 and its hybrids ---------------------------------------------------------------------------------------------


def _ssd(
    heads: str, d_value: str, groups: str, d_key: str, taps: str, conv_bias: str, bias: str
) -> Callable[[Raw], MixerConfig]:
    """Mamba-2, by the names of the config's fields."""

    def read(raw: Raw) -> MixerConfig:
        low, high = raw.get("time_step_limit") or (0.0, math.inf)
        channels = raw[heads] * raw[d_value] + 2 * raw[groups] * raw[d_key]
        mixer = MixerConfig("ssd", raw[taps], channels, raw[heads], raw[groups], raw[d_key], raw[d_value])
        return replace(
            mixer, conv_bias=raw[conv_bias], bias=raw[bias], min_step=low, max_step=0.0 if high == math.inf else high
        )

    return read


SSD_NAMES: dict[str, str] = {
    "mixer.up": "in_proj",
    "mixer.conv.weight": "conv1d.weight",
    "mixer.conv.bias": "conv1d.bias",
    "mixer.a_log": "A_log",
    "mixer.step_bias": "dt_bias",
    "mixer.skip": "D",
    "mixer.norm": "norm",
    "mixer.o": "out_proj",
}
_SILU = {"hidden_act": ("silu",)}
_STEPS = frozenset({"time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"})
"""of the initialisation"""


def ssd_names(names: Names, begin: str) -> Names:
    """The names of a family with those of its Mamba-2 mixers, which begin alike."""
    return replace(names, parts={**names.parts, **{ours: begin + theirs for ours, theirs in SSD_NAMES.items()}})


MAMBA2 = replace(
    LLAMA,
    names=ssd_names(
        Names(embed="backbone.embeddings", final_norm="backbone.norm_f", block="backbone.layers.{}.", parts={"ln1": "norm"}),
        "mixer.",
    ),
    reads={
        "num_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "num_heads": "num_heads",
        "num_kv_heads": "num_heads",
        "d_head": "head_dim",
        "vocab_size": "vocab_size",
        "tied_embeddings": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "mixer": _ssd("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"),
        "parts": lambda raw: ("mixer",) * raw["num_hidden_layers"],
    },
    fixed={"d_mlp": 1, "max_positions": 1 << 20},  # it has no MLP, and no bound on positions
    uses=_STEPS | {"expand", "residual_in_fp32", "chunk_size"},
    only=_SILU,
    arrange=CONV,
    layer_types=True,
)


def _bamba_layers(raw: Raw) -> tuple[str, ...]:
    attention = raw.get("attn_layer_indices") or ()
    return tuple(ATTENTION if layer in attention else MIXER for layer in range(raw["num_hidden_layers"]))


_mamba = _ssd(
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")
)
BAMBA = replace(
    LLAMA,
    names=replace(
        ssd_names(
            names_of(
                LLAMA_NAMES,
                ln2="pre_ff_layernorm",
                mlp__up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                mlp__down="feed_forward.down_proj",
            ),
            "mamba.",
        ),
        final_norm="model.final_layernorm",
    ),
    reads=reads_of(LLAMA, mixer=_mamba, parts=_bamba_layers),
    uses=PARTIAL | {"mamba_expand", "mamba_chunk_size", "z_loss_coefficient", "layers_block_type"},
    only=_SILU,
    arrange=CONV,
)

# ---- Granite-4 -----------------------------------------------------------------------------------------------------------


def _granite_mixture(raw: Raw) -> MixtureConfig | None:
    count, shared = raw["num_local_experts"], raw["shared_intermediate_size"]
    routing = Routing(raw["num_experts_per_tok"])
    return MixtureConfig(count, raw["intermediate_size"], routing, d_shared=shared) if count else None


GRANITE_HYBRID = replace(
    GRANITEMOE,
    names=ssd_names(
        names_of(
            GRANITEMOE.names,
            mlp__shared__up="shared_mlp.input_linear",
            mlp__shared__down="shared_mlp.output_linear",
            mlp__up="shared_mlp.input_linear",
            mlp__down="shared_mlp.output_linear",
        ),
        "mamba.",
    ),
    reads=reads_of(
        GRANITEMOE,
        mixture=_granite_mixture,
        d_mlp="shared_intermediate_size",
        rotary_dim=lambda raw: rotary_width(raw) if raw["position_embedding_type"] == "rope" else 0,
        mixer=lambda raw: _mamba(raw) if "linear_attention" in raw["layer_types"] else None,
        parts=layers(linear_attention=MIXER, full_attention=ATTENTION),
    ),
    uses=GRANITEMOE.uses | {"mamba_expand", "mamba_chunk_size", "layers_block_type", "position_embedding_type"},
    only=_SILU,
    arrange=CONV,
    layer_types=True,
)

# ---- Nemotron-H ----------------------------------------------------------------------------------------------------------

_PARTS = {"linear_attention": "mixer", "full_attention": "attn", "mlp": "mlp", "moe": "mlp"}


def _nemotron(raw: Raw) -> MixerConfig | None:
    read = _ssd("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias")
    mixer = replace(read(raw), norm_groups=raw["n_groups"], min_step=raw["time_step_min"], max_step=0.0)
    return mixer if "linear_attention" in raw["layers_block_type"] else None


def _nemotron_mixture(raw: Raw) -> MixtureConfig | None:
    kinds = raw["layers_block_type"]
    shared, width = raw["moe_shared_expert_intermediate_size"], raw["moe_intermediate_size"]
    routing, sparse = sigmoids_in_groups(raw), tuple(kind == "moe" for kind in kinds)
    return MixtureConfig(raw["n_routed_experts"], width, routing, sparse, d_shared=shared) if any(sparse) else None


NEMOTRON_H = replace(
    LLAMA,
    names=replace(
        ssd_names(
            names_of(
                LLAMA_NAMES,
                ln1="norm",
                ln2="norm",
                attn__qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
                attn__o="mixer.o_proj",
                mlp__up="mixer.up_proj",
                mlp__down="mixer.down_proj",
                mlp__router="mixer.gate",
                mlp__correction="mixer.gate.e_score_correction_bias",
                mlp__shared__up="mixer.shared_experts.up_proj",
                mlp__shared__down="mixer.shared_experts.down_proj",
            ),
            "mixer.",
        ),
        embed="model.embeddings",
        final_norm="model.norm_f",
        experts=ExpertNames(
            stacked={"up": "mixer.experts.up_proj", "down": "mixer.experts.down_proj"},
            each={"up": ("mixer.experts.{}.up_proj",), "down": ("mixer.experts.{}.down_proj",)},
        ),
        spellings=(("model.", "backbone."),),
    ),
    reads=reads_of(
        LLAMA,
        without=("rotary_dim", "rope", "qkv_bias", "out_bias"),
        num_layers=lambda raw: len(raw["layers_block_type"]),
        max_positions="max_position_embeddings",
        norm_eps="layer_norm_epsilon",
        activation="mlp_hidden_act",
        mixture=_nemotron_mixture,
        mixer=_nemotron,
        parts=lambda raw: tuple(_PARTS[kind] for kind in raw["layers_block_type"]),
    ),
    fixed={"gated_mlp": False},
    uses=_STEPS
    | COUNTS
    | {"expand", "residual_in_fp32", "chunk_size", "num_hidden_layers", "layer_types", "use_mamba_kernels"},
    only={"mamba_hidden_act": ("silu",), "moe_latent_size": (None,), "sliding_window": (None,)},
    arrange={**CONV, "mixer.norm": by_group},
    layer_types=True,
    left_out=("mtp.",),
)

# ---- Falcon-H1 -----------------------------------------------------------------------------------------------------------
# Attention and Mamba-2 in every layer. Factors on products are multiplied into their weights.

_FACTORS = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    *("ssm_multipliers", "mlp_multipliers"),
)


def _falcon(raw: Raw) -> MixerConfig:
    groups = raw["mamba_n_groups"] if raw["mamba_rms_norm"] else 0
    return replace(_mamba(raw), norm_groups=groups, gate_first=not raw["mamba_norm_before_gate"])


def _factors(raw: Raw) -> tuple[tuple[str, tuple[float, ...]], ...]:
    listed = {name: raw[name] if isinstance(raw[name], list | tuple) else (raw[name],) for name in _FACTORS}
    return tuple((name, tuple(map(float, each))) for name, each in listed.items())


def _times(x: Tensor, outputs: list[tuple[int, float]], inputs: float = 1.0) -> Tensor:
    """A weight [outputs, inputs] or a bias [outputs], each part of the outputs times its factor; a weight also times that of
    its inputs."""
    factor = torch.cat([torch.full((count,), each, dtype=torch.float32) for count, each in outputs])
    return x.float() * factor if x.dim() == 1 else x.float() * (factor * inputs)[:, None]


def _falcon_up(config: ModelConfig, x: Tensor) -> Tensor:
    by, m = dict(config.factors), config.mixer
    assert m is not None
    sizes = (m.heads * m.d_value,) * 2 + (m.key_heads * m.d_key,) * 2 + (m.heads,)  # gate, x, B, C, steps
    return _times(x, list(zip(sizes, by["ssm_multipliers"], strict=True)), by["ssm_in_multiplier"][0])


def _falcon_qkv(config: ModelConfig, x: Tensor) -> Tensor:
    by, kv = dict(config.factors), config.num_kv_heads * config.d_head
    parts = [(config.num_heads * config.d_head, 1.0), (kv, by["key_multiplier"][0]), (kv, 1.0)]
    return _times(x, parts, by["attention_in_multiplier"][0])


def _scaled(name: str, index: int = 0, gated: bool = False) -> Arrange:
    """All outputs, or the first half of them, times a factor of the config."""

    def arranged(config: ModelConfig, x: Tensor) -> Tensor:
        factor, half = dict(config.factors)[name][index], len(x) // 2
        return _times(x, [(half, factor), (half, 1.0)] if gated else [(len(x), factor)])

    return arranged


FALCON_H1 = replace(
    BAMBA,
    reads=reads_of(
        BAMBA,
        mixer=_falcon,
        parts=lambda raw: ("mixer attn mlp",) * raw["num_hidden_layers"],
        factors=_factors,
        embed_scale="embedding_multiplier",
        logit_scale="lm_head_multiplier",
    ),
    uses=frozenset({"mamba_expand", "mamba_d_ssm", "mamba_chunk_size", "layers_block_type"}),
    same={"projectors_bias": "mamba_proj_bias"},
    arrange={
        **CONV,
        "mixer.norm": by_group,
        "mixer.up": _falcon_up,
        "mixer.o": _scaled("ssm_out_multiplier"),
        "attn.qkv": _falcon_qkv,
        "attn.o": _scaled("attention_out_multiplier"),
        "mlp.up": _scaled("mlp_multipliers", 0, gated=True),
        "mlp.down": _scaled("mlp_multipliers", 1),
    },
)
