"""`ReplacementModel`: the pass of one path made linear, and where a direction in it comes from.

Attention patterns, the scales of norms and the outputs of MLPs are held at their values in the pass. What is left is linear in
what enters the residual stream: embeddings, MLP outputs, edits and biases. So the projection of any row on any direction is a
sum over these, each times its gradient. A row depends on earlier positions only, and is computed from them alone: its sum has
the same bits on every path that begins with the same tokens, and with any other directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.model.config import ModelConfig, handled, require_handled
from replaylens.engine.model.decoder import FINAL_NORM, Attention, Block, Decoder
from replaylens.engine.model.layers import Norm
from replaylens.gradients.backward import Tape
from replaylens.gradients.derivatives import HostProducts, norm_factor, pattern_of


class Entering(NamedTuple):
    """What enters the residual stream at a site, and the gradient of some directions there."""

    kind: Literal["embedding", "write", "edit", "bias"]
    site: str
    first: int
    """the number of the first direction that `gradient` is about"""
    gradient: Tensor
    """[directions, rows, ...]"""
    value: Tensor
    """[rows, ...]; of a bias [...], the same in every row"""


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm whose scale is held."""

    norm: Norm
    factor: Tensor
    """[rows, 1]"""
    site: str
    """of its result"""
    normalized: str
    """of its result before the weights"""

    def back(self, g: Tensor, rows: slice, products: HostProducts, weighted: bool = True) -> Tensor:
        """The gradient of its input, from that of its result [directions, rows, d]; not weighted: before its weights."""
        h = g * self.norm.weight if weighted else g
        if self.norm.kind == "layer":
            h = h - products.total(h) / h.shape[-1]
        return h * self.factor[rows]


@dataclass(frozen=True, eq=False)
class FrozenLayer:
    """What a block does to the residual stream, with patterns and scales held."""

    block: Block
    attn: Attention
    pattern: Tensor
    """[kv_heads, group, rows, keys]"""
    values: Any
    """the product that makes values, turned, as `HostProducts.plain` takes it: [kv_heads d_head, d_model]"""
    value_bias: Tensor | None
    """[kv_heads, d_head]"""
    ln1: FrozenNorm | None
    ln1_post: FrozenNorm | None
    ln2_post: FrozenNorm | None
    reads: FrozenNorm | None
    """the norm of what the MLP reads"""
    write: str
    """the site where what the MLP writes is taken as given"""


HANDLED = handled(
    ModelConfig="norm norm_eps norm_bias pre_norms post_norms shared_norm parallel_residual learned_positions rotary_dim rope "
    "rotary_layers local_rope windows slopes attn_scale scale_by_layer attn_softcap logit_softcap qk_norm qk_norm_kind "
    "qk_norm_span qk_norm_rotated qkv_bias out_bias mlp_bias gated_mlp activation embed_scale residual_scale logit_scale "
    "tied_embeddings unembed_bias mixture",
    Rope="*",
    MixtureConfig="*",
    Routing="*",
)
"""the wiring that it follows. Rotated queries and keys are read as values, and what MLPs and mixtures write is held, however it
is computed"""


def require_linear(config: ModelConfig) -> None:
    """NoGradient for a model whose attention is not linear in its values, once its pattern is held, or not implemented."""
    instead = "Use patching, or a model with plain attention."
    require_handled(config, HANDLED, "The replacement model of an attribution graph", instead, NoGradient)


def attended(attn: Attention, turned: bool) -> tuple[str, str]:
    """The sites of the queries and keys that attention compares. turned: they are rotated"""
    if attn.q_norm is not None and (attn.norm_is_last or not turned):
        return attn.normed_q_site, attn.normed_k_site
    return (attn.rotated_q_site, attn.rotated_k_site) if turned else (attn.q_site, attn.k_site)


def read_site(block: Block) -> str:
    """The site that the MLP reads."""
    norm = block.ln2 is not None, block.parallel and block.ln1 is not None
    stream = block.in_site if block.parallel else block.middle_site
    return block.ln2_sites[2] if norm[0] else block.ln1_sites[2] if norm[1] else stream


def write_sites(block: Block) -> tuple[str, ...]:
    """The sites of what the MLP adds to the stream, the one next to the stream first."""
    site, (*_, post) = block.mlp_sites
    return (site,) if block.ln2_post is None else (post, site)


def needed_values(model: Decoder) -> set[str]:
    """The sites whose values a `ReplacementModel` reads. NoGradient for models that it does not support."""
    require_linear(model.config)
    found = set[str]()
    for layer, block in enumerate(blocks_of(model)):
        assert isinstance(block.attn, Attention)  # `require_linear` holds
        found |= {block.in_site, *attended(block.attn, model.config.rotates(layer)), *write_sites(block)}
        found |= set() if block.parallel else {block.middle_site}
        found |= {block.attn_sites[0]} if block.ln1_post is not None else set()
    return found


def blocks_of(model: Decoder) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def edited_sites(model: Decoder) -> set[str]:
    """The sites that gradients pass, where an edit enters the stream as itself. Edits elsewhere show in what is held."""
    found = set[str]()
    for block in blocks_of(model):
        assert isinstance(block.attn, Attention)
        found |= {block.in_site, block.out_site, block.middle_site, block.ln1_sites[2], block.ln2_sites[2], *write_sites(block)}
        found |= {block.attn_sites[0], block.attn_sites[1][2], block.attn.z_site, block.attn.v_site}
    return found


class ReplacementModel:
    """The linear replacement of one path's pass."""

    def __init__(self, tape: Tape, reads: Mapping[int, str], writes: Mapping[int, str]) -> None:
        """
        tape    with the values of `needed_values`, of `reads`, and of edited sites
        reads   layer -> the site that directions of this layer are about: what its MLP reads, before or after its norm
        writes  layer -> the site of what its MLP writes; default: as it is added to the stream
        """
        products = tape.products()
        if not isinstance(products, HostProducts):
            raise NoGradient("The replacement model is computed on a CPU only. Load the engine with device='cpu'.")
        self.model, self.products, self.reads = tape.runner.model, products, dict(reads)
        self._values, self._unedited, self.num_rows = tape.forward.values, tape.forward.unedited, len(tape.tokens)
        self._residual = tape.forward.residual.float()
        self.width = max(self._residual.shape[1], self.model.config.num_heads * self.model.config.d_head)
        """numbers of the widest gradient of a row"""
        passes = edited_sites(self.model) & {edit.site for edit in tape.edits}
        self.edits = {site: self.value(site) - self._unedited[site].float() for site in sorted(passes)}
        """site -> what edits add there: [rows, ...]"""
        self.layers = [self._frozen(i, block, writes) for i, block in enumerate(blocks_of(self.model))]
        self._final = self._norm(self._residual, self.model.ln_final, FINAL_NORM)
        self.logits = tape.forward.logits.float()
        """of the last row, before the softcap: [vocab]"""
        if self.model.config.logit_softcap:
            (before,) = tape.runner.head(tape.forward.residual[-1:], ["unembed.hook_out"])["unembed.hook_out"].float()
            self.logits = before * self.model.config.logit_scale

    def value(self, site: str) -> Tensor:
        """The value at a site, after edits, in float32."""
        return self._values[site].float()

    def written(self, site: str) -> Tensor:
        """As `value`, before edits."""
        return self._unedited[site].float() if site in self._unedited else self.value(site)

    def _frozen(self, layer: int, block: Block, writes: Mapping[int, str]) -> FrozenLayer:
        attn = block.attn
        assert isinstance(attn, Attention)  # `require_linear` holds
        kv = slice((attn.heads + attn.kv_heads) * attn.width, (attn.heads + 2 * attn.kv_heads) * attn.width)
        q, k = (self.value(site) for site in attended(attn, self.model.config.rotates(layer)))
        x = self.value(block.in_site)
        stream = x if block.parallel else self.value(block.middle_site)
        frozen = lambda norm, x, sites: None if norm is None else self._norm(x, norm, sites)  # noqa: E731
        ln1, ln2 = frozen(block.ln1, x, block.ln1_sites), frozen(block.ln2, stream, block.ln2_sites)
        ln1_post, ln2_post = (
            None if norm is None else self._norm(self.value(site), norm, sites)
            for norm, (site, sites) in ((block.ln1_post, block.attn_sites), (block.ln2_post, block.mlp_sites))
        )
        bias = attn.qkv.bias
        return FrozenLayer(
            block,
            attn,
            pattern_of(q, k, attn.spec, self.products),
            self.products.packed(attn.qkv.weight[:, kv].detach().mT),
            None if bias is None else bias[kv].view(attn.kv_heads, attn.width),
            ln1,
            ln1_post,
            ln2_post,
            ln1 if block.parallel and ln2 is None else ln2,
            writes.get(layer, write_sites(block)[0]),
        )

    def _norm(self, x: Tensor, norm: Norm, sites: Sequence[str]) -> FrozenNorm:
        x = x - self.products.total(x) / x.shape[-1] if norm.kind == "layer" else x
        return FrozenNorm(norm, norm_factor(x, norm, self.products), sites[2], sites[1])

    def towards(self, right: Sequence[int], wrong: Sequence[int | None]) -> tuple[Tensor, Tensor]:
        """Differences of logits before their softcap as directions of ln_final.hook_out [n, d_model], and what the biases of
        the unembedding add: [n]

        wrong  the token whose logit is subtracted; None: the mean of all
        """
        bias = self.model.unembed_bias
        vectors = _differences(self.model.unembedding.detach().float(), right, wrong) * self.model.config.logit_scale
        if bias is None:
            return vectors, vectors.new_zeros(len(vectors))
        return vectors, _differences(bias.detach().float()[:, None], right, wrong)[:, 0] * self.model.config.logit_scale

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def pull(self, position: int, layers: Sequence[int], directions: Tensor) -> Iterator[Entering]:
        """All that a row's projections on some directions are sums of: the value of each times its gradient.

        position    of the row
        layers      of each direction, descending; the number of layers: ln_final.hook_out, else `reads` of the layer
        directions  [n, d]
        """
        rows, count, last = position + 1, len(layers), len(self.layers)
        g, done = self._residual.new_zeros(count, rows, self._residual.shape[1]), layers.count(last) if count else 0
        yield from self._read(self._final, FINAL_NORM[2], g[:done], directions[:done], 0)
        for layer in reversed(range(last)):
            own, end = self.layers[layer], done + sum(each == layer for each in layers)
            block, joins = own.block, (own.reads, self.reads.get(layer, ""), g[done:end], directions[done:end], done)
            if done:
                yield from self._edited(block.out_site, g[:done])
                yield from self._mlp(own, g[:done])
            if block.parallel:
                yield from self._attention(own, g[:done]) if done else ()
                yield from self._read(*joins)
            else:
                yield from self._read(*joins)
                yield from self._edited(block.middle_site, g[:end])
                yield from self._attention(own, g[:end]) if end else ()
            yield from self._edited(block.in_site, g[:end])
            done = end
        first = self.layers[0].block.in_site
        yield Entering("embedding", first, 0, g, self.written(first)[:rows])

    def _edited(self, site: str, g: Tensor, first: int = 0) -> Iterator[Entering]:
        if site in self.edits and len(g):
            yield Entering("edit", site, first, g, self.edits[site][: g.shape[1]])

    def _read(self, norm: FrozenNorm | None, site: str, g: Tensor, directions: Tensor, first: int) -> Iterator[Entering]:
        """Mutates: g [n, rows, d_model] begins with directions of what is read in its last row."""
        if not len(g):
            return
        at, last = slice(g.shape[1] - 1, g.shape[1]), directions[:, None]
        if norm is not None and site in (norm.site, norm.normalized):
            if site == norm.site:
                spread = torch.zeros_like(g)
                spread[:, at] = last
                yield from self._edited(site, spread, first)
                yield from self._bias(norm.norm.bias, site, spread, first)
            last = norm.back(last, at, self.products, weighted=site == norm.site)
        g[:, at] = last

    def _bias(self, bias: Tensor | None, site: str, g: Tensor, first: int = 0) -> Iterator[Entering]:
        if bias is not None:
            yield Entering("bias", site, first, g, bias.float())

    def _post(self, norm: FrozenNorm | None, g: Tensor) -> Iterator[Entering]:
        """Of a norm after attention or MLP: what enters at its result."""
        if norm is not None:
            yield from self._edited(norm.site, g)
            yield from self._bias(norm.norm.bias, norm.site, g)

    def _mlp(self, own: FrozenLayer, g: Tensor) -> Iterator[Entering]:
        """What the MLP writes. Nothing passes further: its output is held."""
        site, rows = own.block.mlp_sites[0], slice(0, g.shape[1])
        if own.ln2_post is not None and own.write == site:
            yield from self._post(own.ln2_post, g)
            g = own.ln2_post.back(g, rows, self.products)
        yield from self._edited(own.write, g)
        yield Entering("write", own.write, 0, g, self.written(own.write)[rows])

    def _attention(self, own: FrozenLayer, g: Tensor) -> Iterator[Entering]:
        """Mutates: to g [n, rows, d_model], of the stream, is added what passes through the values of attention."""
        count, rows, _ = g.shape
        block, attn, every, back = own.block, own.attn, slice(0, rows), g
        if own.ln1_post is not None:
            yield from self._post(own.ln1_post, g)
            back = own.ln1_post.back(g, every, self.products)
        yield from self._edited(block.attn_sites[0], back)
        back = back if block.scale == 1.0 else back * block.scale
        yield from self._bias(attn.o.bias, block.attn_sites[0], back)
        z = self.products.linear(back.flatten(0, 1), attn.o).view(count, rows, attn.heads, attn.width)
        yield from self._edited(attn.z_site, z)
        values = self._through_pattern(own.pattern[:, :, :rows, :rows], z)
        yield from self._edited(attn.v_site, values)
        yield from self._bias(own.value_bias, attn.v_site, values)
        back = self.products.plain(values.flatten(0, 1).flatten(1), own.values).view(g.shape)
        if own.ln1 is not None:
            yield from self._edited(own.ln1.site, back)
            yield from self._bias(own.ln1.norm.bias, own.ln1.site, back)
            back = own.ln1.back(back, every, self.products)
        g += back

    def _through_pattern(self, pattern: Tensor, z: Tensor) -> Tensor:
        """z [n, rows, heads, d], of the heads' outputs -> of values [n, keys, kv_heads, d]. A sum over rows, and over the
        heads of a group."""
        weights = rearrange(pattern, "kv group rows keys -> kv (group rows) keys")
        of_rows = rearrange(z, "n rows (kv group) d -> kv (n d) (group rows)", kv=len(weights))
        found = [self.products.plain(x.contiguous(), self.products.packed(w)) for x, w in zip(of_rows, weights, strict=True)]
        return rearrange(torch.stack(found), "kv (n d) keys -> n keys kv d", n=len(z)).contiguous()


def _differences(table: Tensor, right: Sequence[int], wrong: Sequence[int | None]) -> Tensor:
    """Rows of a table [rows, d] minus others; None: minus the mean of all, summed in float64 from first to last"""
    mean = table.new_zeros(table.shape[1])
    if None in wrong:
        total = torch.zeros(table.shape[1], dtype=torch.float64)
        for piece in table.split(4096):  # numpy adds rows of this order one by one
            total += torch.from_numpy(piece.numpy().astype("float64", order="C").sum(0))
        mean = (total / len(table)).float()
    return torch.stack([table[a] - (mean if b is None else table[b]) for a, b in zip(right, wrong, strict=True)])


def require_place(block: Block, layer: int, reads: str | None, writes: str | None) -> None:
    """BadRequest unless a transcoder of this layer reads what its MLP reads, and writes what its MLP writes."""
    norm = block.ln2_sites if block.ln2 is not None else block.ln1_sites
    stream = block.in_site if block.parallel else block.middle_site
    known = {stream, read_site(block), *([norm[1]] if read_site(block) != stream else [])}
    if reads is not None and reads not in known:
        raise BadRequest(
            f"A transcoder reads {reads}, but the MLP of layer {layer} reads {', '.join(sorted(known))}. Use these."
        )
    if writes is not None and writes not in write_sites(block):
        raise BadRequest(
            f"A transcoder writes {writes}, but the MLP of layer {layer} writes {' or '.join(write_sites(block))}."
        )
