"""Quantised mixtures: fp8 by block as DeepSeek-V3 and Qwen3 store it, and MXFP4 as gpt-oss does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens.engine.model.loading import WEIGHTS_FILE, load, weights_hash
from replaylens.engine.model.quantised import from_mxfp4
from tests.engine.model.test_quantised import pack_fp8

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
MIXTURE = dict(SHAPE, moe_intermediate_size=24, num_experts_per_tok=2, max_position_embeddings=64)
LATENT = dict(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
Tensors = dict[str, Tensor]


def fp8(stored: Tensors, plain: Tensors) -> None:
    for seed, name in enumerate(sorted(plain)):
        if name.endswith("_proj.weight"):
            parts, value = pack_fp8(*stored.pop(name).shape, seed)
            plain[name] = value.contiguous()
            stored |= {name.removesuffix(".weight") + end: x for end, x in parts.items()}


def mxfp4(stored: Tensors, plain: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in sorted(plain):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = stored.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(115, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = from_mxfp4(blocks, scales).contiguous()


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors, Tensors], None]]] = {
    "qwen3_moe": (dict(MIXTURE, num_experts=4, num_key_value_heads=2, head_dim=8), FP8, fp8),
    "deepseek_v3": (
        dict(MIXTURE, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4),
        FP8,
        fp8,
    ),
    "gpt_oss": (
        dict(SHAPE, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8),
        {"quant_method": "mxfp4"},
        mxfp4,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_mixture_loads_to_the_values_that_it_stands_for(name: str, tmp_path: Path) -> None:
    config, quantisation, pack = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config))
    plain_folder, folder = tmp_path / "plain", tmp_path / "quantised"
    model.save_pretrained(plain_folder)
    stored = load_file(plain_folder / WEIGHTS_FILE)
    plain = dict(stored)
    pack(stored, plain)
    save_file(plain, plain_folder / WEIGHTS_FILE)
    folder.mkdir()
    save_file(stored, folder / WEIGHTS_FILE)
    raw = json.loads((plain_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantisation}))
    ours, theirs = load(folder), load(plain_folder)
    assert ours.config == theirs.config and weights_hash(ours) == weights_hash(theirs)
    assert weights_hash(ours) != weights_hash(load(model)), "the control: these are other weights"
