"""`Decoder`: one config-driven transformer over packed rows. Wiring only: the arithmetic is in `Ops`."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import ModelConfig, barred, without_barred
from replaylens.engine.model.layers import (
    Experts,
    FrozenWeight,
    HeadLinear,
    Linear,
    Narrow,
    Norm,
    Packable,
    Part,
    Rotary,
    refuse_change,
    rotary_table,
)
from replaylens.engine.model.ops import AttentionSpec, Heads, Ops, RowOps, Tap, observer, tapped, wanted
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    from replaylens.engine.model import mixers
else:  # most models have none
    mixers = Later("replaylens.engine.model.mixers")

# ---- latent ----------------------------------------------------------------------------------------------------------
# `LatentAttention`: multi-head latent attention (DeepSeek-V2 and V3), whose cache holds one short vector per position.
#
# All heads' keys and values are products of one latent per position, l = norm(x W_a): k_h = [l K_h ; r] and v_h = l V_h, with
# one rotated part r that all heads share. Only [l ; r] is kept. Since q_h . (l K_h) = (q_h K_h^T) . l, queries are multiplied
# with K_h^T instead of keys with K_h ("absorbed"), and values are made after the weighted sum: sum_j p_j (l_j V_h) =
# (sum_j p_j l_j) V_h. So the attention itself is that of many query heads over one key head [l ; r], which is also the value.

NORM_EPS = 1e-6
"""of the norms of latents, whatever the config says of the other norms"""


class LatentAttention(Part):
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
        """Each head's keys and values, computed outside the pass, and only if the tap wants them."""
        if not wanted(tap, self.k_site, self.v_site):
            return
        every = latent[:, None].expand(-1, self.heads, -1)
        if wanted(tap, self.k_site):
            keys = ops.by_head(every, self.k.weight)
            tapped(tap, self.k_site, torch.cat([keys, shared.expand(-1, self.heads, -1)], dim=-1))
        if wanted(tap, self.v_site):
            tapped(tap, self.v_site, ops.by_head(every, self.v.weight))


# ---- mixture ---------------------------------------------------------------------------------------------------------
# `Mixture`: a mixture of experts in the place of an MLP, with its router and its shared expert.


class SharedExpert(nn.Module):
    """An MLP that every row goes to, in addition to its chosen experts."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gated, self.kind = config.gated_mlp, config.activation
        self.up = Linear(config.d_model, width * (2 if config.gated_mlp else 1), config.mlp_bias)
        self.down = Linear(width, config.d_model, config.mlp_bias)

    def forward(self, x: Tensor, ops: RowOps) -> Tensor:
        """x [rows, d_model] -> [rows, d_model]"""
        return ops.linear(ops.linear_activate(x, self.up, self.kind, self.gated), self.down)


class Mixture(Part):
    """Router, experts and shared expert: each row goes to a few experts, whose weighted outputs are added."""

    correction: Tensor | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mixture = config.mixture
        assert mixture is not None  # `config.sparse(layer)` holds
        self.routing, self.kind, self.num_experts = mixture.routing, config.activation, mixture.num_experts
        site = f"blocks.{layer}.mlp."
        self.logits_site, self.choice_site = site + "gate.hook_out", site + "gate.hook_choice"
        self.chosen_site, self.weights_site = site + "gate.hook_expert_indices", site + "gate.hook_expert_weights"
        self.post_site, self.each_site = site + "experts.hook_expert_post", site + "experts.hook_expert_out"
        self.experts_site = site + "experts.hook_out"
        self.shared_site, self.shared_gate_site = site + "shared_expert.hook_out", site + "shared_expert_gate.hook_out"
        self.router = Linear(config.d_model, mixture.num_experts, mixture.router_bias)
        self.correction = (
            nn.Parameter(torch.empty(mixture.num_experts, dtype=torch.float32)) if mixture.routing.correction else None
        )
        self.experts = Experts(mixture.num_experts, config.d_model, mixture.d_expert, config.gated_mlp, mixture.bias)
        self.shared = SharedExpert(config, mixture.d_shared) if mixture.d_shared else None
        self.shared_gate = Linear(config.d_model, 1, bias=False) if mixture.shared_gate else None

    @property
    def own_sites(self) -> tuple[str, ...]:
        """All sites within it."""
        router = (self.logits_site, self.choice_site, self.chosen_site, self.weights_site)
        return (*router, self.post_site, self.each_site, self.experts_site, self.shared_site, self.shared_gate_site)

    def adds(self, tap: Tap | None) -> bool:
        """Whether `forward` can add the residual stream itself: nobody wants the sum of the experts without it."""
        return self.shared is None and not wanted(tap, self.experts_site)

    def forward(self, x: Tensor, ops: RowOps, tap: Tap | None, residual: Tensor | None = None) -> Tensor:
        """x [rows, d_model], normed -> [rows, d_model]

        residual  the residual stream, to add; only if `adds`
        """
        chosen, weights = self._route(x, ops, tap)
        hidden = tapped(tap, self.post_site, ops.experts_hidden(x, chosen, self.experts, self.kind))
        outs = tapped(tap, self.each_site, ops.experts_out(hidden, chosen, self.experts))
        mixed = tapped(tap, self.experts_site, ops.combine(outs, weights, residual))
        if self.shared is None:
            return mixed
        shared = tapped(tap, self.shared_site, self.shared(x, ops))
        if self.shared_gate is not None:
            shared = shared * ops.sigmoid(tapped(tap, self.shared_gate_site, ops.linear(x, self.shared_gate)))
        return mixed + shared

    def _route(self, x: Tensor, ops: RowOps, tap: Tap | None) -> tuple[Tensor, Tensor]:
        """The chosen experts and their weights: [rows, top] each."""
        logits = tapped(tap, self.logits_site, ops.linear(x, self.router))
        if not wanted(tap, self.choice_site):
            chosen, weights = ops.route(logits, self.routing, self.correction)
        else:
            scores = tapped(tap, self.choice_site, ops.choice_scores(logits, self.routing, self.correction))
            chosen = ops.choose(scores, self.routing)
            weights = ops.weigh(without_barred(logits, scores, chosen), chosen, self.routing)
            weights = weights.masked_fill(barred(scores, chosen), 0.0)  # a softmax over nothing else is not a number
        tapped(tap, self.chosen_site, chosen)
        if wanted(tap, self.weights_site):
            spread = ops.spread(weights, chosen, self.num_experts)
            edited = tapped(tap, self.weights_site, spread)
            weights = weights if edited is spread else edited.gather(-1, chosen)
        return chosen, weights


# ---- decoder ---------------------------------------------------------------------------------------------------------

NormSites = tuple[str, str, str]
"""the sites of a norm: what it divides by, its result before the weights, its result"""


def norm_sites(name: str) -> NormSites:
    return name + ".hook_scale", name + ".hook_normalized", name + ".hook_out"


FINAL_NORM = norm_sites("ln_final")


def normed(x: Tensor, norm: Norm, sites: NormSites, ops: RowOps, tap: Tap | None) -> Tensor:
    """The norm of x. Its scale and its result before the weights are computed only if the tap wants them."""
    if tap is None:
        return ops.norm(x, norm)
    scale_site, normalized_site, out_site = sites
    if wanted(tap, scale_site, normalized_site):
        scale, normalized = ops.norm_parts(x, norm)
        tapped(tap, scale_site, scale)
        tapped(tap, normalized_site, normalized)
    return tapped(tap, out_site, ops.norm(x, norm))


class Attention(Part):
    """Grouped-query attention up to its output product; q, k and v come from one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.d_head
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        site = f"blocks.{layer}.attn."
        self.q_site, self.k_site, self.v_site = (f"{site}{part}.hook_out" for part in "qkv")
        self.rotated_q_site, self.rotated_k_site = site + "hook_rot_q", site + "hook_rot_k"
        self.normed_q_site, self.normed_k_site = site + "q_norm.hook_out", site + "k_norm.hook_out"
        self.pattern_site, self.scores_site = site + "hook_pattern", site + "hook_attn_scores"
        self.z_site = site + "o.hook_in"
        self.spec = AttentionSpec.of(config, layer)
        self.gate_site, self.gated = site + "hook_gate", config.attn_gate
        gates = heads if config.attn_gate else 0
        self.qkv = Linear(config.d_model, (heads + 2 * kv_heads + gates) * width, config.qkv_bias)
        self.o = Linear(heads * width, config.d_model, config.out_bias)
        self.q_norm = _qk_norm(config, heads) if config.qk_norm else None
        self.k_norm = _qk_norm(config, kv_heads) if config.qk_norm else None
        self.norm_spans_heads, self.norm_is_last = config.qk_norm_span == "all", config.qk_norm_rotated
        self.clip = config.clip_qkv
        self.sinks = nn.Parameter(torch.empty(heads, dtype=torch.float32)) if config.sinks else None

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        """x [rows, d_model], normed -> the heads' outputs, [rows, heads * d_head]"""
        qkv = ops.linear(x, self.qkv).view(len(x), -1, self.width)  # [rows, heads + 2 kv_heads (+ heads), d_head]
        gate = tapped(tap, self.gate_site, qkv[:, -self.heads :]) if self.gated else None
        qkv = qkv if gate is None else qkv[:, : -self.heads]
        if self.clip and self.q_norm is None:
            qkv = self._clipped(qkv)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        v = self._clipped(v) if self.clip and self.q_norm is not None else v
        joined: Tensor | None = qkv
        if wanted(tap, self.q_site, self.k_site, self.v_site):
            q, k, v = tapped(tap, self.q_site, q), tapped(tap, self.k_site, k), tapped(tap, self.v_site, v)
            joined = None
        norms = self._left_to_attention(rotary, ops, tap)
        if self.q_norm is not None and self.k_norm is not None and not self.norm_is_last and norms is None:
            (q, k), joined = self._normed(q, k, self.q_norm, self.k_norm, ops), None
            q, k = tapped(tap, self.normed_q_site, q), tapped(tap, self.normed_k_site, k)
        if rotary is not None and (self.norm_is_last or wanted(tap, self.rotated_q_site, self.rotated_k_site)):
            q = tapped(tap, self.rotated_q_site, ops.rotate(q, rotary))
            k = tapped(tap, self.rotated_k_site, ops.rotate(k, rotary))
            rotary = joined = None
        if self.q_norm is not None and self.k_norm is not None and self.norm_is_last:
            (q, k), joined = self._normed(q, k, self.q_norm, self.k_norm, ops), None
            q, k = tapped(tap, self.normed_q_site, q), tapped(tap, self.normed_k_site, k)
        observe = observer(tap, self.pattern_site, self.scores_site)
        z = ops.attend(Heads(q, k, v, rotary, joined, self.sinks, norms), self.spec, observe)
        z = z if gate is None else z * ops.sigmoid(gate)
        return tapped(tap, self.z_site, z).reshape(x.shape[0], -1)

    def _clipped(self, x: Tensor) -> Tensor:
        return x.clamp(-self.clip, self.clip)

    def _left_to_attention(self, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> tuple[Norm, Norm] | None:
        """The norms of q and k if they are applied with the rotation: nobody wants what lies between."""
        if rotary is None or self.q_norm is None or self.k_norm is None:
            return None
        if self.norm_is_last or self.norm_spans_heads or self.clip:
            return None
        if wanted(tap, self.normed_q_site, self.normed_k_site, self.rotated_q_site, self.rotated_k_site):
            return None
        return (self.q_norm, self.k_norm) if ops.norm_heads(self.q_norm, self.k_norm, rotary) else None

    def _normed(self, q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, ops: Ops) -> tuple[Tensor, Tensor]:
        """The norms of q and k [rows, heads, d_head], of each head or over all of them. Clipping comes after them."""
        if not self.norm_spans_heads:
            q, k = ops.norm_pair(q, k, q_norm, k_norm)
        else:
            q, k = ops.norm(q.flatten(1), q_norm).view(q.shape), ops.norm(k.flatten(1), k_norm).view(k.shape)
        return (self._clipped(q), self._clipped(k)) if self.clip else (q, k)


def _qk_norm(config: ModelConfig, heads: int) -> Norm:
    width = config.d_head
    shape = (heads, width) if config.qk_norm_span == "each" else heads * width if config.qk_norm_span == "all" else width
    return Norm(shape, config.qk_norm_kind, config.norm_eps, config.norm_bias and config.qk_norm_span == "head")


class Mlp(Part):
    """Gated or plain MLP up to its output product; gate and up come from one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.gated, self.kind, self.d_mlp = config.gated_mlp, config.activation, config.d_mlp
        site = f"blocks.{layer}.mlp.{'' if config.mixture is None else 'dense_'}"  # `gate` is the router of other layers
        self.gate_site, self.up_site, self.post_site = site + "gate.hook_out", site + "in.hook_out", site + "out.hook_in"
        self.up = Linear(config.d_model, config.d_mlp * (2 if config.gated_mlp else 1), config.mlp_bias)
        self.down = Linear(config.d_mlp, config.d_model, config.mlp_bias)

    @property
    def own_sites(self) -> tuple[str, ...]:
        """All sites within it."""
        return self.gate_site, self.up_site, self.post_site

    def forward(self, x: Tensor, ops: RowOps, tap: Tap | None) -> Tensor:
        """x [rows, d_model], normed -> [rows, d_mlp]"""
        if not wanted(tap, self.gate_site, self.up_site):
            post = ops.linear_activate(x, self.up, self.kind, self.gated)
        elif self.gated:
            gate, up = ops.linear(x, self.up).split(self.d_mlp, dim=-1)
            pre = torch.cat([tapped(tap, self.gate_site, gate), tapped(tap, self.up_site, up)], dim=-1)
            post = ops.activate(pre, self.kind, gated=True)
        else:
            post = ops.activate(tapped(tap, self.up_site, ops.linear(x, self.up)), self.kind, gated=False)
        return tapped(tap, self.post_site, post)


class Block(Part):
    """One layer: the outputs of attention and MLP are added to the residual stream. A hybrid's layers may have a recurrent part
    (`mixer`) instead of an attention or next to it, or may lack a part."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        norm = lambda: Norm(config.d_model, config.norm, config.norm_eps, config.norm_bias)  # noqa: E731
        self.parallel, self.scale = config.parallel_residual, config.residual_scale
        site = f"blocks.{layer}."
        self.in_site, self.middle_site, self.out_site = site + "hook_in", site + "ln2.hook_in", site + "hook_out"
        self.ln1_sites, self.ln2_sites = norm_sites(site + "ln1"), norm_sites(site + "ln2")
        self.attn_sites = site + "attn.hook_out", norm_sites(site + "ln1_post")
        self.mixer_sites = site + "mixer.hook_out", norm_sites(site + "ln1_post")
        self.mlp_sites = site + "mlp.hook_out", norm_sites(site + "ln2_post")
        attends, recurs, has_mlp = (config.has(part, layer) for part in ("attn", "mixer", "mlp"))
        before, after = config.norms(layer)
        self.ln1 = norm() if before and (attends or recurs) else None
        kind = Attention if config.latent is None else LatentAttention
        self.attn: Attention | LatentAttention | None = kind(config, layer) if attends else None
        self.mixer = mixers.mixer_of(config, layer) if recurs else None
        self.ln2 = norm() if before and not config.shared_norm and has_mlp else None
        sparse = config.sparse(layer)
        self.mlp: Mlp | Mixture | None = (Mixture if sparse else Mlp)(config, layer) if has_mlp else None
        self.ln1_post = norm() if after and (attends or recurs) else None
        self.ln2_post = norm() if after and has_mlp else None

    @property
    def writers(self) -> "list[tuple[Attention | LatentAttention | mixers.Mixer, tuple[str, NormSites]]]":
        """The parts that read other positions, in the order in which they write to the stream, with the sites of what they
        write."""
        parts = (self.mixer, self.mixer_sites), (self.attn, self.attn_sites)
        return [(part, sites) for part, sites in parts if part is not None]

    @property
    def late_sites(self) -> tuple[str, ...]:
        """The sites after attention, where a row no longer depends on others."""
        (attn, attn_norm), (mlp, mlp_norm) = self.attn_sites, self.mlp_sites
        within = () if self.mlp is None else self.mlp.own_sites
        own = (attn, self.mixer_sites[0], *attn_norm, self.middle_site, *self.ln2_sites, *within)
        return (*own, mlp, *mlp_norm, self.out_site)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None, rows: Tensor | None = None) -> Tensor:
        """rows  the only rows to compute after attention; None: all. The tap must not want `late_sites` then"""
        return tapped(tap, self.out_site, self.write(x, rotary, ops, tap, rows))

    def write(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None, rows: Tensor | None) -> Tensor:
        """The stream with what all parts write to it."""
        x = tapped(tap, self.in_site, x)
        read = x if self.ln1 is None else normed(x, self.ln1, self.ln1_sites, ops, tap)
        wrote = [(part(read, rotary, ops, tap), part.o, sites) for part, sites in self.writers]
        if rows is not None:
            x, read, wrote = x[rows], read[rows], [(z[rows], o, sites) for z, o, sites in wrote]
        middle = x
        for z, o, sites in wrote:
            middle = self._write(middle, z, o, self.ln1_post, sites, ops, tap)
        if self.mlp is None:
            return middle
        if not self.parallel:
            middle = x = read = tapped(tap, self.middle_site, middle)
        if self.ln2 is not None:  # None: the MLP reads what attention reads, or the stream itself
            read = normed(x, self.ln2, self.ln2_sites, ops, tap)
        if isinstance(self.mlp, Mixture):
            return self._mix(middle, read, self.mlp, ops, tap)
        return self._write(middle, self.mlp(read, ops, tap), self.mlp.down, self.ln2_post, self.mlp_sites, ops, tap)

    def _mix(self, residual: Tensor, read: Tensor, mixture: Mixture, ops: RowOps, tap: Tap | None) -> Tensor:
        """The residual stream plus the output of the experts, in one step if nobody looks at it before."""
        if self.ln2_post is None and self.scale == 1.0 and not wanted(tap, self.mlp_sites[0]) and mixture.adds(tap):
            out: Tensor = mixture(read, ops, tap, residual)
            return out
        return self._add(residual, mixture(read, ops, tap), self.ln2_post, self.mlp_sites, ops, tap)

    def _write(
        self,
        residual: Tensor,
        x: Tensor,
        linear: Linear,
        post: Norm | None,
        sites: tuple[str, NormSites],
        ops: RowOps,
        tap: Tap | None,
    ) -> Tensor:
        """The residual stream [rows, d_model] plus the product of x, normed if `post` is given. `sites`: of both."""
        if post is None and self.scale == 1.0 and not wanted(tap, sites[0]):
            return ops.linear_add(x, linear, residual)
        return self._add(residual, ops.linear(x, linear), post, sites, ops, tap)

    def _add(
        self, residual: Tensor, wrote: Tensor, post: Norm | None, sites: tuple[str, NormSites], ops: RowOps, tap: Tap | None
    ) -> Tensor:
        """The residual stream plus an output of attention or MLP [rows, d_model], normed if `post` is given."""
        site, post_sites = sites
        wrote = tapped(tap, site, wrote if self.scale == 1.0 else wrote * self.scale)
        if post is not None:
            wrote = normed(wrote, post, post_sites, ops, tap)
        return ops.add(residual, wrote)


@dataclass(frozen=True)
class LayerStage:
    """Consecutive layers on one device."""

    first: int
    end: int
    device: torch.device


def scaled_logits(x: Tensor, config: ModelConfig, ops: RowOps) -> Tensor:
    """What leaves the unembedding [rows, vocab] -> logits."""
    return ops.softcap(x if config.logit_scale == 1.0 else x * config.logit_scale, config.logit_softcap)


class Decoder(Packable):
    """Embedding, blocks, final norm, unembedding. A decoder with other blocks is a subclass that names their class."""

    turned = ("embed",)
    block: type[Block] = Block
    """of the blocks"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stages: tuple[LayerStage, ...] = ()
        """the devices of the layers; empty: all are where the rest is"""
        self._tables: dict[tuple[int, torch.device], Tensor] = {}
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=torch.float32))
        self.pos_embed = (
            nn.Parameter(torch.empty(config.max_positions, config.d_model, dtype=torch.float32))
            if config.learned_positions
            else None
        )
        blocks = [self.block(config, layer) for layer in range(config.num_layers)]
        for layer, held in enumerate(config.weights_of):
            if held != layer:
                blocks[layer].share(blocks[held])
        self.blocks = nn.ModuleList(blocks)
        self.ln_final = Norm(config.d_model, config.norm, config.norm_eps, config.norm_bias)
        self.unembed = None if config.tied_embeddings else Linear(config.d_model, config.vocab_size, bias=False)
        self.unembed_bias = nn.Parameter(torch.empty(config.vocab_size, dtype=torch.float32)) if config.unembed_bias else None
        ropes = [config.rope_of(layer) if config.rotates(layer) else None for layer in range(config.num_layers)]
        self._ropes = sorted({rope for rope in ropes if rope is not None}, key=repr)
        self._rope_index = [None if rope is None else self._ropes.index(rope) for rope in ropes]
        self._tabulate()

    def _tabulate(self) -> None:
        """Mutates: makes the rotary tables."""
        for i, rope in enumerate(self._ropes):
            table = rotary_table(rope, self.config.rotary_dim, self.config.max_positions)
            self.register_buffer(f"rotary_{i}", table, persistent=False)

    @classmethod
    def hollow(cls, config: ModelConfig) -> "Decoder":
        """A decoder without weights: they have shapes, and are on the device "meta"."""
        with torch.device("meta"):
            model = cls.__new__(cls)
            unwrap(cls.__init__)(model, config)  # a call would leave the meta device, and take memory
        return model

    @property
    def usual(self) -> bool:
        """Whether its config says all of its wiring: no module is somebody else's."""
        return all(type(module).__module__.startswith(("replaylens.", "torch.nn.")) for module in self.modules())

    def hollowed(self) -> "Decoder":
        """A copy without weights, with this wiring, whoever wrote it."""
        if self.usual:
            return Decoder.hollow(self.config)
        known: dict[int, Any] = {id(self.config): self.config, id(self.stages): (), id(self._tables): {}}
        for module in self.modules():
            shapes = {name: None if x is None else x.shape for name, x in module._parameters.items()}
            if isinstance(module, Packable):
                shapes |= {name: torch.Size(module.stored_shape(name)) for name in module.panels}
                known[id(module.panels)] = {}
            known[id(module._parameters)] = {
                name: None if shape is None else nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
                for name, shape in shapes.items()
            }
        try:
            model = deepcopy(self, known)
        except (TypeError, RuntimeError) as e:
            raise UnsupportedModel(f"This wiring cannot be copied ({e}). Keep in its modules what copy.deepcopy takes.") from e
        model._tabulate()
        return model

    @property
    def dtype(self) -> torch.dtype:
        return self.ln_final.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.ln_final.weight.device

    def packable(self, device: str) -> dict[str, tuple[Packable, str]]:
        """The weights that an engine holds as products read them, by their names: (module, name within it).

        A table that is tied is held only once on a CPU; on a GPU it stays as it is, since rows of it are looked up. Products by
        head stay as they are: they are few, and read from both sides.
        """
        found: dict[str, tuple[Packable, str]] = {}
        for path, module in self.named_modules():
            leaves = ("weight",) if isinstance(module, Linear) else ("up", "down") if isinstance(module, Experts) else ()
            found |= {f"{path}.{leaf}": (module, leaf) for leaf in leaves if isinstance(module, Packable)}
        return found if self.unembed is not None or device != "cpu" else found | {"embed": (self, "embed")}

    def held(self) -> Iterator[nn.Parameter]:
        """The weights that are not packed."""
        return (x for module in self.modules() for x in module._parameters.values() if x is not None)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights; packed ones come last, as copies that cannot be changed."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for path, module in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
            for name in module.panels if isinstance(module, Packable) else ():
                yield f"{path}.{name}".removeprefix("."), getattr(module, name)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """As in torch. BadWeights if the model belongs to an engine."""
        if isinstance(self.ln_final.weight, FrozenWeight):
            refuse_change()
        return super().load_state_dict(*args, **options)

    @property
    def late_sites(self) -> tuple[str, ...]:
        """The sites of the last block after its attention."""
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last.late_sites

    def embedding(self, tokens: Tensor, positions: Tensor, tap: Tap | None = None) -> Tensor:
        """tokens, positions [rows] -> the residual stream entering block 0 [rows, d_model]"""
        x = self.panels["embed"].columns(tokens) if "embed" in self.panels else self.embed[tokens]
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        x = tapped(tap, "embed.hook_out", x)
        if self.pos_embed is not None:
            x = x + tapped(tap, "pos_embed.hook_out", self.pos_embed[positions])
        return x

    def forward(
        self, tokens: Tensor, positions: Tensor, ops: Ops, tap: Tap | None = None, stop_at_layer: int | None = None
    ) -> Tensor:
        """The residual stream after the last block (or entering block `stop_at_layer`): [rows, d_model]."""
        end = self.config.num_layers if stop_at_layer is None else stop_at_layer
        if not 0 <= end <= self.config.num_layers:
            raise ValueError(f"stop_at_layer {end} is not between 0 and {self.config.num_layers}.")
        return self.run_blocks(self.embedding(tokens, positions, tap), positions, ops, tap, 0, end)

    def run_blocks(
        self, x: Tensor, positions: Tensor, ops: Ops, tap: Tap | None, first: int, end: int, rows: Tensor | None = None
    ) -> Tensor:
        """Blocks [first, end) over rows x [rows, d_model] at `positions` [rows].

        rows  the only rows of the result; None: all. The tap must not want the `late_sites` of the last of these blocks then
        """
        rotary = self.rotary(positions)
        for layer in range(first, end):
            x = self.blocks[layer](x, rotary[layer], ops, tap, rows if layer == end - 1 else None)
        return x

    def rotary(self, positions: Tensor) -> list[Rotary | None]:
        """The rotation of rows at `positions` [rows], by layer; None: none. Layers with the same angles share one."""
        made = [Rotary(self._table(i, positions.device), positions) for i in range(len(self._ropes))]
        return [None if i is None else made[i] for i in self._rope_index]

    def _table(self, i: int, device: torch.device) -> Tensor:
        """A rotary table on a device of the layers; copied there once."""
        own: Tensor = getattr(self, f"rotary_{i}")
        if own.device == device:
            return own
        if (i, device) not in self._tables:
            self._tables[i, device] = own.to(device)
        return self._tables[i, device]

    @property
    def unembedding(self) -> Tensor:
        """[vocab, d_model]: the embedding itself if the two are tied, else a view of `unembed`'s weight; a copy of what is
        packed."""
        return self.embed if self.unembed is None else self.unembed.weight.t()

    @property
    def head(self) -> tuple[Packable, str]:
        """The module that holds the unembedding, and its name there."""
        return (self, "embed") if self.unembed is None else (self.unembed, "weight")

    @property
    def stored_unembedding(self) -> Any:
        """`unembedding` as products read it."""
        module, name = self.head
        held = module.panels.get(name)
        if held is None:
            return self.unembedding
        return held.tensor.t() if isinstance(held, Narrow) else held

    def logits(self, x: Tensor, ops: RowOps, tap: Tap | None = None) -> Tensor:
        """Residual stream [rows, d_model] -> logits [rows, vocab]. On an earlier layer's stream, this is the logit lens."""
        x = normed(x, self.ln_final, FINAL_NORM, ops, tap)
        out = tapped(tap, "unembed.hook_out", self.with_bias(ops.unembed(x, self.stored_unembedding)))
        return scaled_logits(out, self.config, ops)

    def with_bias(self, logits: Tensor) -> Tensor:
        """The product with the unembedding [rows, vocab], plus its bias if it has one."""
        return logits if self.unembed_bias is None else logits + self.unembed_bias

    @torch.no_grad()
    def initialize(self, seed: int) -> "Decoder":
        """Set random weights for training from scratch, a function of seed and config. Returns self."""
        generator = torch.Generator().manual_seed(seed)
        writes = 2 * self.config.num_layers
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln" in name or "_norm" in name or name.startswith("ln_final"):
                parameter.fill_(1.0)
            else:
                spread = 0.02 / math.sqrt(writes) if name.endswith((".o.weight", "down.weight", "experts.down")) else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * spread)
        return self
