"""The tables of families with Llama's tensor names that rotate neighbouring dimensions: Cohere, GLM, Helium, ERNIE."""

from dataclasses import replace

import torch
from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.family import Arrange, Field
from replaylens.engine.model.raw_fields import layer_windows
from replaylens.engine.model.tables_llama import LLAMA, LLAMA_NAMES, PARTIAL, names_of, reads_of, rotates_windows


def _order(config: ModelConfig) -> Tensor:
    """The dimensions of a head: first and second of all pairs, then those that are not rotated."""
    turned = torch.arange(config.rotary_dim)
    return torch.cat([turned[::2], turned[1::2], torch.arange(config.rotary_dim, config.d_head)])


def pairs_apart(config: ModelConfig, x: Tensor) -> Tensor:
    """q, k and v with the pairs of q and k apart, as we rotate them. q.k does not depend on the order."""
    turned = (config.num_heads + config.num_kv_heads) * config.d_head
    heads = x[:turned].view(-1, config.d_head, *x.shape[1:])[:, _order(config)]
    return torch.cat([heads.reshape(turned, *x.shape[1:]), x[turned:]])


def _norm_apart(config: ModelConfig, x: Tensor) -> Tensor:
    return x[..., _order(config)]


PAIRS: dict[str, Arrange] = {"attn.qkv": pairs_apart, "attn.q_norm": _norm_apart, "attn.k_norm": _norm_apart}
COHERE = replace(
    LLAMA,
    reads=reads_of(
        LLAMA,
        without=("mlp_bias",),
        norm_eps="layer_norm_eps",
        logit_scale="logit_scale",
        qk_norm=Field("use_qk_norm", False),
    ),
    fixed={
        "norm": "layer",
        "norm_bias": False,
        "qk_norm_kind": "layer",
        "qk_norm_span": "each",
        "parallel_residual": True,
        "shared_norm": True,
    },
    arrange=PAIRS,
)
COHERE2 = replace(
    COHERE,
    reads=reads_of(COHERE, without=("qk_norm",), windows=layer_windows, rotary_layers=rotates_windows),
    uses=frozenset({"sliding_window"}),
    layer_types=True,
)
GLM = replace(
    LLAMA,
    names=names_of(LLAMA_NAMES, mlp__up="mlp.gate_up_proj"),
    reads=reads_of(LLAMA, without=("out_bias", "mlp_bias")),
    uses=PARTIAL,
    arrange=PAIRS,
)
GLM4 = replace(
    GLM,
    names=names_of(GLM.names, ln1_post="post_self_attn_layernorm", ln2_post="post_mlp_layernorm"),
    fixed={"post_norms": True},
)
HELIUM = replace(LLAMA, reads=reads_of(LLAMA, without=("out_bias",)), arrange=PAIRS)
ERNIE = replace(
    LLAMA,
    reads=reads_of(LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    arrange=PAIRS,
)
