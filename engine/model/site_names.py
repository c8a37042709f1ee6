"""The names of sites, as TransformerLens 4 has them: where they are, what they are called besides, and which are one value."""

import re

SCORES = "attn.hook_attn_scores"
KEY_SITES = ("attn.hook_pattern", SCORES)
"""the ends of names of sites whose rows have one value per key"""

LAYER_SITES = {
    # name within the block: (trailing shape, legacy alias)
    "hook_in": ("d_model", "hook_resid_pre"),
    "ln1.hook_scale": ("one", None),
    "ln1.hook_normalized": ("d_model", None),
    "ln1.hook_out": ("d_model", None),
    "attn.q.hook_out": ("heads d_head", "attn.hook_q"),
    "attn.k.hook_out": ("kv_heads d_head", "attn.hook_k"),
    "attn.v.hook_out": ("kv_heads d_head", "attn.hook_v"),
    "attn.q_norm.hook_out": ("heads d_head", "attn.hook_q_normed"),
    "attn.k_norm.hook_out": ("kv_heads d_head", "attn.hook_k_normed"),
    "attn.hook_q_latent": ("query_rank", None),
    "attn.hook_kv_latent": ("rank", None),
    "attn.hook_rot_q": ("heads d_turned", None),
    "attn.hook_rot_k": ("turned_heads d_turned", None),
    "attn.hook_q": ("heads d_head", None),
    "attn.hook_k": ("kv_heads d_head", None),
    "attn.hook_v": ("kv_heads d_value", None),
    "attn.hook_attn_scores": ("heads keys", None),
    "attn.hook_pattern": ("heads keys", None),
    "attn.o.hook_in": ("heads d_value", "attn.hook_z"),
    "attn.hook_out": ("d_model", "hook_attn_out"),
    "ln1_post.hook_scale": ("one", None),
    "ln1_post.hook_normalized": ("d_model", None),
    "ln1_post.hook_out": ("d_model", "hook_attn_out"),
    "ln2.hook_in": ("d_model", "hook_resid_mid"),
    "ln2.hook_scale": ("one", None),
    "ln2.hook_normalized": ("d_model", None),
    "ln2.hook_out": ("d_model", None),
    "mlp.gate.hook_out": ("d_mlp", "mlp.hook_pre"),
    "mlp.in.hook_out": ("d_mlp", "mlp.hook_pre"),
    "mlp.out.hook_in": ("d_mlp", "mlp.hook_post"),
    "mlp.hook_out": ("d_model", "hook_mlp_out"),
    "ln2_post.hook_scale": ("one", None),
    "ln2_post.hook_normalized": ("d_model", None),
    "ln2_post.hook_out": ("d_model", "hook_mlp_out"),
    "hook_out": ("d_model", "hook_resid_post"),
}
SAME_VALUES = {
    # name within the block: (the site that has this value, whether an edit there is the same as well)
    "ln1.hook_in": ("hook_in", False),
    "attn.hook_in": ("ln1.hook_out", True),
    "attn.q.hook_in": ("ln1.hook_out", False),
    "attn.k.hook_in": ("ln1.hook_out", False),
    "attn.v.hook_in": ("ln1.hook_out", False),
    "attn.o.hook_out": ("attn.hook_out", True),
    "ln1_post.hook_in": ("attn.hook_out", True),
    "mlp.hook_in": ("ln2.hook_out", True),
    "mlp.in.hook_in": ("ln2.hook_out", False),
    "mlp.gate.hook_in": ("ln2.hook_out", False),
    "mlp.out.hook_out": ("mlp.hook_out", True),
    "ln2_post.hook_in": ("mlp.hook_out", True),
}
"""TransformerLens has a name on either side of every module. Where nothing happens in between, both have one value"""
READ_ONLY = ("hook_scale", "hook_normalized", "hook_attn_scores", "attn.hook_k", "attn.hook_v")
"""the ends of names of sites that are computed beside the pass. Keys and values have these names with latent attention only,
which computes with neither"""
GLOBAL_SITES = {
    "embed.hook_out": ("d_model", "hook_embed"),
    "pos_embed.hook_out": ("d_model", "hook_pos_embed"),
    "ln_final.hook_scale": ("one", None),
    "ln_final.hook_normalized": ("d_model", None),
    "ln_final.hook_out": ("d_model", None),
    "unembed.hook_out": ("vocab", "hook_unembed"),
}


def same_value(name: str) -> str | None:
    """The site that has the value of this name in every model; None: the name is of no such kind."""
    block = re.match(r"(blocks\.\d+\.)(.+)", name)
    found = SAME_VALUES.get(block[2]) if block else None
    return f"{block[1]}{found[0]}" if block and found else None
