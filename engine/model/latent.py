"""`LatentAttention`: multi-head latent attention (DeepSeek-V2 and V3), whose cache holds one short vector per position.

All heads' keys and values are products of one latent per position, l = norm(x W_a): k_h = [l K_h ; r] and v_h = l V_h, with
one rotated part r that all heads share. Only [l ; r] is kept. Since q_h . (l K_h) = (q_h K_h^T) . l, queries are multiplied
with K_h^T instead of keys with K_h ("absorbed"), and values are made after the weighted sum: sum_j p_j (l_j V_h) =
(sum_j p_j l_j) V_h. So the attention itself is that of many query heads over one key head [l ; r], which is also the value.
"""

import torch
from torch import Tensor, nn

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.layers import HeadLinear, Linear, Norm
from replaylens.engine.model.ops import AttentionSpec, Heads, Ops
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.model.tap import Tap, observer, tapped, wanted

NORM_EPS = 1e-6
"""of the norms of latents, whatever the config says of the other norms"""


class LatentAttention(nn.Module):
    """Latent attention up to its output product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.latent is not None
        latent, heads, turned = config.latent, config.num_heads, config.rotary_dim
        self.heads, self.width, self.rank, self.turned = heads, latent.d_value, latent.rank, turned
        self.plain = config.d_head - turned
        """dimensions of queries and keys that are not rotated"""
        site = f"blocks.{layer}.attn."
        self.q_a_site, self.kv_a_site = site + "q_a_layernorm.hook_in", site + "kv_a_layernorm.hook_in"
        self.q_latent_site, self.latent_site = site + "hook_q_latent", site + "hook_kv_latent"
        self.rotated_q_site, self.rotated_k_site = site + "hook_rot_q", site + "hook_rot_k"
        self.q_site, self.k_site, self.v_site = (f"{site}hook_{part}" for part in "qkv")
        self.pattern_site, self.scores_site = site + "hook_pattern", site + "hook_attn_scores"
        self.z_site = site + "o.hook_in"
        self.spec = AttentionSpec.of(config, layer)
        rank = latent.query_rank
        self.q_a = Linear(config.d_model, rank, config.qkv_bias) if rank else None
        self.q_a_norm = Norm(rank, "rms", NORM_EPS) if rank else None
        self.q = Linear(rank or config.d_model, heads * config.d_head, bias=False)
        self.kv_a = Linear(config.d_model, latent.rank + turned, config.qkv_bias)
        self.kv_a_norm = Norm(latent.rank, "rms", NORM_EPS)
        self.k = HeadLinear(heads, latent.rank, self.plain)
        self.v = HeadLinear(heads, latent.rank, latent.d_value)
        self.o = Linear(heads * latent.d_value, config.d_model, config.out_bias)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        """x [rows, d_model], normed -> the heads' outputs, [rows, heads * d_value]"""
        assert rotary is not None
        plain, turned = self._queries(x, ops, tap).split([self.plain, self.turned], dim=-1)
        turned = tapped(tap, self.rotated_q_site, ops.rotate(turned, rotary))
        latent, shared = ops.linear(x, self.kv_a).split([self.rank, self.turned], dim=-1)
        latent = tapped(tap, self.latent_site, ops.norm(tapped(tap, self.kv_a_site, latent), self.kv_a_norm))
        shared = tapped(tap, self.rotated_k_site, ops.rotate(shared[:, None], rotary))  # [rows, 1, turned]
        if wanted(tap, self.q_site):
            q = tapped(tap, self.q_site, torch.cat([plain, turned], dim=-1))
            plain, turned = q.split([self.plain, self.turned], dim=-1)
        self._show(latent, shared, ops, tap)
        absorbed = torch.cat([ops.by_head(plain, self.k.weight.transpose(1, 2)), turned], dim=-1)
        key = torch.cat([latent[:, None], shared], dim=-1)  # [rows, 1, rank + turned]
        seen = ops.attend(Heads(absorbed, key, key), self.spec, observer(tap, self.pattern_site, self.scores_site))
        z = ops.by_head(seen[..., : self.rank], self.v.weight)
        return tapped(tap, self.z_site, z).reshape(x.shape[0], -1)

    def _queries(self, x: Tensor, ops: Ops, tap: Tap | None) -> Tensor:
        """[rows, heads, d_head], before the rotation"""
        if self.q_a is not None and self.q_a_norm is not None:
            x = tapped(tap, self.q_a_site, ops.linear(x, self.q_a))
            x = tapped(tap, self.q_latent_site, ops.norm(x, self.q_a_norm))
        return ops.linear(x, self.q).view(len(x), self.heads, -1)

    def _show(self, latent: Tensor, shared: Tensor, ops: Ops, tap: Tap | None) -> None:
        """Each head's keys and values, computed beside the pass, and only if the tap wants them."""
        if not wanted(tap, self.k_site, self.v_site):
            return
        every = latent[:, None].expand(-1, self.heads, -1)
        if wanted(tap, self.k_site):
            keys = ops.by_head(every, self.k.weight)
            tapped(tap, self.k_site, torch.cat([keys, shared.expand(-1, self.heads, -1)], dim=-1))
        if wanted(tap, self.v_site):
            tapped(tap, self.v_site, ops.by_head(every, self.v.weight))
