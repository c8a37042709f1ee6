"""`Backward`: from the gradient of the logits to the gradients at the sites, block by block. Mirrors `Decoder`'s wiring.

Each path is computed alone, in shapes that follow from its length: on a CPU on one thread, on a GPU with the products of the
canonical kernels. So its gradients have the same bits in any company, after any fork and at any number of threads. They are
float32, whatever the dtype of the weights.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from replaylens.engine.errors import NoGradient
from replaylens.engine.gradients.attention import through_attention
from replaylens.engine.gradients.products import BackwardProducts
from replaylens.engine.gradients.rowwise import activated, through_activation, through_norm, through_rotary
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Attention, Block, Decoder, Mlp
from replaylens.engine.model.ops import Linear, Norm
from replaylens.engine.model.sites import layer_of
from replaylens.engine.passes.runner import WholePass
from replaylens.engine.request.placed import PlacedEdit


def needed_sites(config: ModelConfig) -> frozenset[str]:
    """The sites whose values `Backward` reads: the inputs of everything that is not linear. NoGradient for mixtures."""
    if config.mixture is not None or config.sinks:
        what = "a mixture of experts" if config.mixture is not None else "attention sinks"
        raise NoGradient(f"This model has {what}, whose backward pass is not implemented. Use patching, or a dense model.")
    names = ["hook_in", "attn.v.hook_out", "mlp.in.hook_out"]
    names += ["attn.q.hook_out", "attn.k.hook_out"] if config.clip_qkv else []
    names += ["mlp.gate.hook_out"] if config.gated_mlp else []
    names += [] if config.parallel_residual else ["ln2.hook_in"]
    names += ["attn.hook_out", "mlp.hook_out"] if config.post_norms else []
    layers = range(config.num_layers)
    heads = {site for layer in layers for site in _attended(config, layer)}
    heads |= {site for layer in layers for site in _normed(config, layer) if config.qk_norm}
    return frozenset(f"blocks.{layer}.{name}" for layer in layers for name in names) | heads


def _attended(config: ModelConfig, layer: int) -> tuple[str, str]:
    """The sites of the queries and keys that attention compares."""
    turned = config.rotates(layer)
    if config.qk_norm and (config.qk_norm_rotated or not turned):
        return _both(layer, "{}_norm.hook_out")
    return _both(layer, "hook_rot_{}" if turned else "{}.hook_out")


def _normed(config: ModelConfig, layer: int) -> tuple[str, str]:
    """The sites of the queries and keys that their norms read; of no use in a model without them."""
    return _both(layer, "hook_rot_{}" if config.qk_norm_rotated and config.rotates(layer) else "{}.hook_out")


def _both(layer: int, name: str) -> tuple[str, str]:
    return f"blocks.{layer}.attn.{name.format('q')}", f"blocks.{layer}.attn.{name.format('k')}"


class Backward:
    """Gradients of one path."""

    def __init__(
        self,
        model: Decoder,
        forward: WholePass,
        edits: tuple[PlacedEdit, ...],
        asked: frozenset[str],
        products: BackwardProducts,
    ) -> None:
        """forward  with the values of `needed_sites`
        asked    the sites whose gradients are kept in `found`"""
        self.model, self.forward, self.asked, self.products = model, forward, asked, products
        self.num_rows = num_rows = len(forward.residual)
        self.edits: dict[str, list[PlacedEdit]] = {}
        for edit in edits:
            self.edits.setdefault(edit.site, []).append(edit)
        self.rotary = model.rotary(torch.arange(num_rows, device=model.embed.device))
        self.found: dict[str, Tensor] = {}

    def run(self, g: Tensor) -> dict[str, Tensor]:
        """The gradients at the asked sites, from that of the last row's logits, g [vocab]."""
        x = self._logits(g)
        first = min((layer_of(site) or 0 for site in self.asked - self.found.keys()), default=self.model.config.num_layers)
        for layer in reversed(range(first, self.model.config.num_layers)):
            x = self._block(layer, x)
        if first == 0:
            if self.model.pos_embed is not None:
                self._at("pos_embed.hook_out", x)
            self._at("embed.hook_out", x)
        return self.found

    def _value(self, site: str) -> Tensor:
        """The value at a site, in float32."""
        return self.forward.values[site].float()

    def _at(self, site: str, g: Tensor) -> Tensor:
        """The gradient of a site's value before its edits, from that after them, which is kept if it is asked for."""
        if site in self.asked:
            self.found[site] = g
        edits = self.edits.get(site)
        return g if edits is None else through_edits(g, self.forward.unedited[site], edits)

    def _last_row(self, site: str, row: Tensor) -> Tensor:
        """A gradient that only the last row has [1, ...]. Kept with zeros for the other rows."""
        if site in self.asked:
            self.found[site] = torch.cat([row.new_zeros(self.num_rows - 1, *row.shape[1:]), row])
        return row

    def _logits(self, g: Tensor) -> Tensor:
        """[vocab] -> the gradient of the stream after the last block, [rows, d_model]"""
        model, cap = self.model, self.model.config.logit_softcap
        residual, logits = self.forward.residual.float(), self.forward.logits
        if cap:  # logits = cap tanh(x / cap), so the slope is 1 - (logits / cap)^2
            g = g * (1 - (logits / cap).square())
        if (scale := model.config.logit_scale) != 1.0:
            g = g * scale
        g = self._last_row("unembed.hook_out", g[None])
        g = self._last_row("ln_final.hook_out", self.products.unembed(g, model.unembedding))
        out = residual.new_zeros(residual.shape)
        out[-1:] = through_norm(g, residual[-1:], model.ln_final)
        return out

    def _block(self, layer: int, g: Tensor) -> Tensor:
        """The gradient of the stream that leaves the block -> of the stream that enters it."""
        block: Block = self.model.blocks[layer]  # type: ignore[assignment]
        g = self._at(block.out_site, g)
        x = self._value(block.in_site)
        read = x if block.parallel else self._value(block.middle_site)
        assert isinstance(block.mlp, Mlp)  # `needed_sites` refuses mixtures
        from_mlp = self._mlp(block.mlp, self._written(g, block.mlp.down, block.ln2_post, block))
        shared = from_mlp if block.ln2 is None and block.parallel else None  # it reads what attention reads
        if block.ln2 is not None:
            from_mlp = through_norm(self._at(block.ln2_sites[2], from_mlp), read, block.ln2)
        middle = g if block.parallel else self._at(block.middle_site, g + from_mlp)
        from_attn = self._attention(block.attn, self._written(middle, block.attn.o, block.ln1_post, block), layer)
        if shared is not None:
            from_attn = from_attn + shared
        if block.ln1 is not None:
            from_attn = through_norm(self._at(block.ln1_sites[2], from_attn), x, block.ln1)
        entering = middle + from_attn
        return self._at(block.in_site, entering + from_mlp if block.parallel and shared is None else entering)

    def _written(self, g: Tensor, linear: Linear, post: Norm | None, block: Block) -> Tensor:
        """The gradient of the stream -> of the input of the product that is added to it."""
        site, (*_, post_site) = block.attn_sites if linear is block.attn.o else block.mlp_sites
        if post is not None:
            g = through_norm(self._at(post_site, g), self._value(site), post)
        g = self._at(site, g)
        return self.products.linear(g if block.scale == 1.0 else g * block.scale, linear)

    def _mlp(self, mlp: Mlp, g: Tensor) -> Tensor:
        """[rows, d_mlp] -> the gradient of the normed stream, [rows, d_model]"""
        g = self._at(mlp.post_site, g)
        up = self._value(mlp.up_site)
        if not mlp.gated:
            return self.products.linear(self._at(mlp.up_site, through_activation(g, up, mlp.kind)), mlp.up)
        gate = self._value(mlp.gate_site)
        by_gate = self._at(mlp.gate_site, through_activation(g * up, gate, mlp.kind))
        by_up = self._at(mlp.up_site, activated(gate, mlp.kind).mul_(g))
        return self.products.linear(torch.cat([by_gate, by_up], dim=-1), mlp.up)

    def _attention(self, attn: Attention, g: Tensor, layer: int) -> Tensor:
        """[rows, heads * d_head] -> the gradient of the normed stream, [rows, d_model]"""
        g = self._at(attn.z_site, g.view(self.num_rows, attn.heads, attn.width))
        rotary, config = self.rotary[layer], self.model.config
        q, k, v = (self._value(site) for site in (*_attended(config, layer), attn.v_site))
        dq, dk, dv, pattern = through_attention(g, q, k, v, attn.spec, attn.pattern_site in self.asked, self.products)
        if pattern is not None:
            self.found[attn.pattern_site] = pattern
        if attn.norm_is_last:
            dq, dk = self._qk_norms(attn, dq, dk, layer)
        if rotary is not None:
            dq = through_rotary(self._at(attn.rotated_q_site, dq), rotary)
            dk = through_rotary(self._at(attn.rotated_k_site, dk), rotary)
        if not attn.norm_is_last:
            dq, dk = self._qk_norms(attn, dq, dk, layer)
        dq, dk, dv = self._at(attn.q_site, dq), self._at(attn.k_site, dk), self._at(attn.v_site, dv)
        joined = torch.cat([dq, dk, dv], dim=1)
        if attn.clip:  # what was cut off does not pass
            value = torch.cat([self._value(site) for site in (attn.q_site, attn.k_site, attn.v_site)], dim=1)
            joined = joined * (value.abs() < attn.clip)
        return self.products.linear(joined.view(self.num_rows, -1), attn.qkv)

    def _qk_norms(self, attn: Attention, dq: Tensor, dk: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Through the norms of queries and keys, if there are any."""
        if attn.q_norm is None or attn.k_norm is None:
            return dq, dk
        dq, dk = self._at(attn.normed_q_site, dq), self._at(attn.normed_k_site, dk)
        q, k = (self._value(site) for site in _normed(self.model.config, layer))
        if not attn.norm_spans_heads:
            return through_norm(dq, q, attn.q_norm), through_norm(dk, k, attn.k_norm)
        back = lambda g, x, norm: through_norm(g.flatten(1), x.flatten(1), norm).view(x.shape)  # noqa: E731
        return back(dq, q, attn.q_norm), back(dk, k, attn.k_norm)


def through_edits(g: Tensor, unedited: Tensor, edits: Sequence[PlacedEdit]) -> Tensor:
    """The gradient [rows, ...] before a site's edits, by autograd: an edit works on single rows, in whatever way it likes.

    Added vectors let a gradient pass, replaced rows stop it, projections project it. Computed on the host.

    unedited  the site's value before the edits
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = unedited.to("cpu", torch.float32, copy=True).requires_grad_()
        value = leaf.clone()
        for edit in edits:
            if positions := edit.positions(0, len(value)):
                value[positions] = _rounded(edit, unedited.dtype).apply(value[positions], positions)
        (found,) = torch.autograd.grad(value, leaf, g.to("cpu", copy=True))
    return found.to(g.device)


def _rounded(edit: PlacedEdit, dtype: torch.dtype) -> PlacedEdit:
    """The edit with its tensors as the pass uses them: a condition must not hold here that did not hold there."""
    if dtype == torch.float32:
        return edit
    value, when = (x if x is None else x.to(dtype).float() for x in (edit.value, edit.when))
    return replace(edit, value=value, when=when)
