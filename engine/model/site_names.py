"""The names of sites, as TransformerLens 4 has them: where they are, what they are called besides, and which are one value."""

import re
import warnings

from replaylens.engine.errors import MixedExperts

SCORES = "attn.hook_attn_scores"
KEY_SITES = ("attn.hook_pattern", SCORES)
"""the ends of names of sites whose rows have one value per key"""

LAYER_SITES: dict[str, tuple[str, str | None]] = {
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
    "attn.q_a_layernorm.hook_in": ("query_rank", None),
    "attn.hook_q_latent": ("query_rank", None),
    "attn.kv_a_layernorm.hook_in": ("rank", None),
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
_MLP = ("mlp.gate.hook_out", "mlp.in.hook_out", "mlp.out.hook_in")
_MIXTURE: dict[str, tuple[str, str | None]] = {
    # the sites of a mixture of experts, in the place of those of `_MLP`; some have two aliases
    "mlp.gate.hook_out": ("experts", "mlp.router.hook_out"),
    "mlp.gate.hook_choice": ("experts", None),
    "mlp.gate.hook_expert_indices": ("top", "mlp.hook_expert_indices mlp.router.hook_expert_indices"),
    "mlp.gate.hook_expert_weights": ("experts", "mlp.hook_expert_weights mlp.router.hook_expert_weights"),
    "mlp.experts.hook_expert_post": ("top d_expert", None),
    "mlp.experts.hook_expert_out": ("top d_model", None),
    "mlp.experts.hook_out": ("d_model", None),
    "mlp.shared_expert.hook_out": ("d_model", "mlp.shared_experts.hook_out"),
    "mlp.shared_expert_gate.hook_out": ("one", None),
}
CHOICE_SITE, WEIGHTS_SITE = "mlp.gate.hook_choice", "mlp.gate.hook_expert_weights"
"""where edits force, forbid and reweight experts"""
BY_SLOT = ("mlp.experts.hook_expert_post", "mlp.experts.hook_expert_out")
"""the ends of names of sites with one row per chosen expert, in the order of `hook_expert_indices`"""
CHOSEN = "hook_expert_indices"
"""the end of every name of the site with the chosen experts"""


def layer_sites(sparse: bool, mixture: bool) -> dict[str, tuple[str, str | None]]:
    """The sites of a layer: name within the block -> (trailing shape, legacy alias).

    sparse   the layer has a mixture of experts
    mixture  some layer of the model has. As in TransformerLens, the parts of an MLP beside it have names of their own, since
             `mlp.gate` is the router
    """
    found: dict[str, tuple[str, str | None]] = {}
    for name, entry in LAYER_SITES.items():
        if name not in _MLP:
            found[name] = entry
        elif not sparse:
            found[name.replace("mlp.", "mlp.dense_") if mixture else name] = entry
        else:
            found |= _MIXTURE
    return found


SAME_VALUES = {
    # name within the block: (the site that has this value, whether an edit there is the same as well)
    "ln1.hook_in": ("hook_in", False),
    "attn.hook_in": ("ln1.hook_out", True),
    "attn.q.hook_in": ("ln1.hook_out", False),
    "attn.k.hook_in": ("ln1.hook_out", False),
    "attn.v.hook_in": ("ln1.hook_out", False),
    "attn.q_a_proj.hook_out": ("attn.q_a_layernorm.hook_in", True),
    "attn.q_a_layernorm.hook_out": ("attn.hook_q_latent", True),
    "attn.q_b_proj.hook_in": ("attn.hook_q_latent", True),
    "attn.kv_a_layernorm.hook_out": ("attn.hook_kv_latent", True),
    "attn.kv_b_proj.hook_in": ("attn.hook_kv_latent", True),
    "attn.o.hook_out": ("attn.hook_out", True),
    "ln1_post.hook_in": ("attn.hook_out", True),
    "mlp.hook_in": ("ln2.hook_out", True),
    "mlp.in.hook_in": ("ln2.hook_out", False),
    "mlp.gate.hook_in": ("ln2.hook_out", False),
    "mlp.out.hook_out": ("mlp.hook_out", True),
    "ln2_post.hook_in": ("mlp.hook_out", True),
}
"""TransformerLens has a name on either side of every module. Where nothing happens in between, both have one value"""
_SAME_IN_MIXTURE = {"mlp.gate.hook_in": ("ln2.hook_out", False), "mlp.experts.hook_in": ("ln2.hook_out", False)}


def same_values(sparse: bool, mixture: bool) -> dict[str, tuple[str, bool]]:
    """`SAME_VALUES` of a layer; see `layer_sites`."""
    own = ("mlp.in.hook_in", "mlp.gate.hook_in", "mlp.out.hook_out")
    shared = {name: same for name, same in SAME_VALUES.items() if name not in own}
    if sparse:
        return shared | _SAME_IN_MIXTURE
    return shared | {name.replace("mlp.", "mlp.dense_") if mixture else name: SAME_VALUES[name] for name in own}


READ_ONLY = ("hook_scale", "hook_normalized", "hook_attn_scores", "hook_expert_indices", "attn.hook_k", "attn.hook_v")
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


def warn_of_mixed_experts(site: str, stacklevel: int = 1) -> None:
    """MixedExperts for a site whose rows, laid flat, have a place for each chosen expert: another one in each row.

    stacklevel  as in `warnings.warn`. By default the place of the warning is here, so that a site is named once, not for
                every read of a sweep
    """
    if site.endswith((*BY_SLOT, CHOSEN)):
        what = "holds the numbers of the chosen experts" if site.endswith(CHOSEN) else "holds one vector per chosen expert"
        warnings.warn(
            f"{site} {what}, so that a column belongs to another expert in each row. Choose the rows of one expert by "
            "hook_expert_indices (docs/models.md, Probing one expert), or take hook_expert_weights, a column for each expert.",
            MixedExperts,
            stacklevel,
        )
