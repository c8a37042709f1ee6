"""`hugging_face`: a `LlamaForCausalLM` that computes the same function as a `Decoder`, with the same weights."""

from typing import Any

from torch import Tensor

from replaylens.engine.model.decoder import Decoder


def hugging_face(model: Decoder) -> Any:
    """On the decoder's device, in its dtype. Precondition: a decoder of the Llama family."""
    import transformers as tf

    c = model.config
    config = tf.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_mlp,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.d_head,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tied_embeddings,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    with model.embed.device:
        made = tf.AutoModelForCausalLM.from_config(config, dtype=model.embed.dtype).eval()
    made.load_state_dict(_tensors(model), strict=False)
    return made.requires_grad_(False)


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """Views of the decoder's weights, by Hugging Face name."""
    c = model.config
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.ln_final.weight}
    out["lm_head.weight"] = model.unembedding
    widths = [c.num_heads * c.d_head, c.num_kv_heads * c.d_head, c.num_kv_heads * c.d_head]
    for layer, block in enumerate(model.blocks):
        name = f"model.layers.{layer}."
        parts: dict[str, Tensor] = dict(zip("qkv", block.attn.qkv.weight.T.split(widths), strict=True))
        out |= {f"{name}self_attn.{x}_proj.weight": part for x, part in parts.items()}
        out[f"{name}self_attn.o_proj.weight"] = block.attn.o.weight.T
        gate, up = block.mlp.up.weight.T.chunk(2)
        out |= {f"{name}mlp.gate_proj.weight": gate, f"{name}mlp.up_proj.weight": up}
        out[f"{name}mlp.down_proj.weight"] = block.mlp.down.weight.T
        out[f"{name}input_layernorm.weight"] = block.ln1.weight
        out[f"{name}post_attention_layernorm.weight"] = block.ln2.weight
    return {name: x.detach() for name, x in out.items()}


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
