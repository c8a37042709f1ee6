"""`Backward`: from the gradient of the logits to the gradients at the sites, block by block. Mirrors `Decoder`'s wiring.

Each path is computed alone, in shapes that follow from its length: on a CPU in portable arithmetic, on a GPU with the products
of the canonical kernels. So its gradients have the same bits in any batch, after any fork and at any number of threads; those
of a CPU have them on every machine. They are float32, whatever the dtype of the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import NoGradient
from replaylens.engine.model import modes
from replaylens.engine.model.config import ModelConfig, handled, require_handled
from replaylens.engine.model.decoder import Attention, Block, Decoder, LatentAttention, Mixture, Mlp, NormSites
from replaylens.engine.model.layers import Norm
from replaylens.engine.model.mixers import Mixer
from replaylens.engine.model.sites import STATE, layer_of
from replaylens.engine.passes.batch import finite
from replaylens.engine.passes.runner import Runner, WholePass
from replaylens.engine.request.capture import HEAD_SITES, PassTap
from replaylens.engine.request.placed import PlacedEdit
from replaylens.gradients.derivatives import (
    NEEDED_LATENT,
    NEEDED_MIXTURE,
    NEEDED_SHARED,
    BackwardProducts,
    HostProducts,
    activation,
    attention_of,
    through_attention,
    through_latent,
    through_mixture,
    through_norm,
    through_rotary,
    through_softcap,
)
from replaylens.gradients.gradients import Gradients, LogitsFunction, derivative, value_of
from replaylens.gradients.mixers import needed_mixer, through_mixer
from replaylens.kernels import cpu as portable

# ---- backward --------------------------------------------------------------------------------------------------------


HANDLED = handled(
    ModelConfig="norm norm_eps norm_bias pre_norms post_norms shared_norm parallel_residual learned_positions rotary_dim rope "
    "rotary_layers local_rope windows slopes attn_scale scale_by_layer attn_softcap logit_softcap qk_norm qk_norm_kind "
    "qk_norm_span qk_norm_rotated qkv_bias out_bias mlp_bias gated_mlp activation embed_scale residual_scale logit_scale "
    "tied_embeddings unembed_bias mixture clip_qkv latent sinks mixer parts attn_gate",
    Rope="theta scaling factor low_freq_factor high_freq_factor original_positions beta_fast beta_slow truncate divisors "
    "attention_factor",
    Latent="rank d_value query_rank",
    MixtureConfig="num_experts d_expert routing layers bias router_bias d_shared shared_gate",
    Routing="top kind normalised scale groups chosen_groups group_best correction jitter floor",
    MixerConfig="kind taps channels heads key_heads d_key d_value conv_bias bias min_step max_step norm_groups gate_first "
    "beta_scale norm_eps norms_before",
)
"""the wiring that `Backward` mirrors"""


def needed_sites(config: ModelConfig) -> frozenset[str]:
    """The sites whose values `Backward` reads: the inputs of everything that is not linear. NoGradient for a model whose wiring
    it does not mirror."""
    require_handled(config, HANDLED, "The backward pass", "Use patching, or a model without it.", NoGradient)
    found = set[str]()
    for layer in range(config.num_layers):
        names, (before, after) = ["hook_in"], config.norms(layer)
        for part in ("attn", "mixer", "mlp"):
            names += [f"{part}.hook_out"] if after and config.has(part, layer) else []
        if config.has("attn", layer):
            names += _of_attention(config, layer)
        if config.has("mixer", layer):
            names += [*(["ln1.hook_out"] if before else []), *needed_mixer(config)]
        if config.has("mlp", layer):
            names += [*([] if config.parallel_residual else ["ln2.hook_in"]), *_of_mlp(config, layer)]
        found |= {f"blocks.{layer}.{name}" for name in names}
    return frozenset(found)


def _of_attention(config: ModelConfig, layer: int) -> list[str]:
    """The sites of an attention, within the block."""
    if config.latent is not None:
        return [*NEEDED_LATENT, *(["attn.q_a_layernorm.hook_in"] if config.latent.query_rank else [])]
    sites = [*attended(config, layer), *(_normed(config, layer) if config.qk_norm else ())]
    names = [site.partition(f"blocks.{layer}.")[2] for site in sites] + ["attn.v.hook_out"]
    names += [f"attn.{part}{'_norm' if config.qk_norm else ''}.hook_out" for part in "qk"] if config.clip_qkv else []
    return names + (["attn.hook_gate"] if config.attn_gate else [])


def _of_mlp(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The sites of an MLP or a mixture, within the block."""
    if config.mixture is None or not config.sparse(layer):
        begin = "mlp." if config.mixture is None else "mlp.dense_"
        return (f"{begin}in.hook_out", *([f"{begin}gate.hook_out"] if config.gated_mlp else []))
    shared = NEEDED_SHARED[: 2 if config.mixture.shared_gate else 1] if config.mixture.d_shared else ()
    before, _ = config.norms(layer)
    if before and not config.shared_norm:
        read = "ln2.hook_out"
    else:
        read = ("ln1.hook_out" if before else "hook_in") if config.parallel_residual else "ln2.hook_in"
    return (read, *(f"mlp.{name}" for name in (*NEEDED_MIXTURE, *shared)))


def attended(config: ModelConfig, layer: int) -> tuple[str, str]:
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
        own: bool = False,
    ) -> None:
        """forward  with the values of `needed_sites`
        asked    the sites whose gradients are kept in `found`
        own      every row's gradient is that of the row itself: nothing passes from one position to another"""
        self.own = own
        self.model, self.forward, self.asked, self.products = model, forward, asked, products
        self.num_rows = num_rows = len(forward.residual)
        self.edits: dict[str, list[PlacedEdit]] = {}
        for edit in edits:
            self.edits.setdefault(edit.site, []).append(edit)
        self.rotary = model.rotary(torch.arange(num_rows, device=model.device))
        self.found: dict[str, Tensor] = {}

    def run(self, g: Tensor) -> dict[str, Tensor]:
        """The gradients at the asked sites, from that of the last row's logits, g [vocab]."""
        return self.through_blocks(self._logits(g))

    def through_blocks(self, x: Tensor) -> dict[str, Tensor]:
        """The gradients at the asked sites, from that of the stream after the last block, x [rows, d_model]."""
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
        g = through_softcap(g, logits, cap)
        if (scale := model.config.logit_scale) != 1.0:
            g = g * scale
        g = self._last_row("unembed.hook_out", g[None])
        g = self._last_row("ln_final.hook_out", self.products.plain(g, self.products.weight(*model.head, turned=True)))
        out = residual.new_zeros(residual.shape)
        out[-1:] = through_norm(g, residual[-1:], model.ln_final, self.products)
        return out

    def _block(self, layer: int, g: Tensor) -> Tensor:
        """The gradient of the stream that leaves the block -> of the stream that enters it."""
        block: Block = self.model.blocks[layer]  # type: ignore[assignment]
        g = self._at(block.out_site, g)
        from_mlp = None if block.mlp is None else self._by_mlp(block, block.mlp, g)
        shares = block.parallel and block.ln2 is None  # the MLP reads what attention reads
        middle = g if from_mlp is None or block.parallel else self._at(block.middle_site, g + from_mlp)
        entering = middle
        if block.writers:
            entering = middle + self._by_writers(block, middle, layer, from_mlp if shares else None)
        if from_mlp is not None and block.parallel and not shares:
            entering = entering + from_mlp
        return self._at(block.in_site, entering)

    def _by_mlp(self, block: Block, mlp: Mlp | Mixture, g: Tensor) -> Tensor:
        """The gradient of the stream that leaves the block -> of what the MLP, or the norm before it, reads."""
        g = self._added(g, block.ln2_post, block.mlp_sites, block)
        if isinstance(mlp, Mixture):
            g = self._mixture(block, mlp, g)
        else:
            g = self._mlp(mlp, self.products.linear(g, mlp.down))
        if block.ln2 is None:
            return g
        read = self._value(block.in_site if block.parallel else block.middle_site)
        return through_norm(self._at(block.ln2_sites[2], g), read, block.ln2, self.products)

    def _by_writers(self, block: Block, middle: Tensor, layer: int, shared: Tensor | None) -> Tensor:
        """The gradient of the stream after attention and mixer -> of the stream that they, or the norm before them, read.

        shared  what else reaches the normed stream
        """
        found = []
        for part, sites in block.writers:
            g = self.products.linear(self._added(middle, block.ln1_post, sites, block), part.o)
            if isinstance(part, Mixer):
                read = self._value(block.in_site if block.ln1 is None else block.ln1_sites[2])
                found.append(through_mixer(part, g, read, self._value, self._at, self.products, self.own))
            else:
                found.append(self._attention(part, g, layer))
        g = reduce(torch.add, found if shared is None else [*found, shared])
        if block.ln1 is None:
            return g
        return through_norm(self._at(block.ln1_sites[2], g), self._value(block.in_site), block.ln1, self.products)

    def _added(self, g: Tensor, post: Norm | None, sites: tuple[str, NormSites], block: Block) -> Tensor:
        """The gradient of the stream -> of what is added to it, before the post-norm and the factor."""
        site, (*_, post_site) = sites
        if post is not None:
            g = through_norm(self._at(post_site, g), self._value(site), post, self.products)
        g = self._at(site, g)
        return g if block.scale == 1.0 else g * block.scale

    def _mixture(self, block: Block, mixture: Mixture, g: Tensor) -> Tensor:
        """[rows, d_model] -> the gradient of what the mixture reads, [rows, d_model]"""
        if block.ln2 is not None:
            read = block.ln2_sites[2]
        else:
            read = (block.in_site if block.ln1 is None else block.ln1_sites[2]) if block.parallel else block.middle_site
        return through_mixture(mixture, g, self._value(read), self._value, self._at, self.products)

    def _mlp(self, mlp: Mlp, g: Tensor) -> Tensor:
        """[rows, d_mlp] -> the gradient of the normed stream, [rows, d_model]"""
        g = self._at(mlp.post_site, g)
        up = self._value(mlp.up_site)
        if not mlp.gated:
            by_up = self._at(mlp.up_site, g * activation(up, mlp.kind, self.products)[1])
            return self.products.linear(by_up, mlp.up)
        found, slope = activation(self._value(mlp.gate_site), mlp.kind, self.products)
        by_gate, by_up = self._at(mlp.gate_site, g * up * slope), self._at(mlp.up_site, g * found)
        return self.products.linear(torch.cat([by_gate, by_up], dim=-1), mlp.up)

    def _attention(self, attn: Attention | LatentAttention, g: Tensor, layer: int) -> Tensor:
        """[rows, heads * width of values] -> the gradient of the normed stream, [rows, d_model]"""
        g = self._at(attn.z_site, rearrange(g, "rows (heads d) -> rows heads d", heads=attn.heads))
        rotary, config, want_pattern = self.rotary[layer], self.model.config, attn.pattern_site in self.asked
        if isinstance(attn, LatentAttention):
            assert rotary is not None
            out, pattern = through_latent(attn, g, rotary, self._value, self._at, want_pattern, self.products, self.own)
            if pattern is not None:
                self.found[attn.pattern_site] = pattern
            return out
        q, k, v = (self._value(site) for site in (*attended(config, layer), attn.v_site))
        by_gate = None
        if attn.gated:
            open_ = self.products.apply("sigmoid", self._value(attn.gate_site))
            seen = attention_of(q, k, v, attn.spec, self.products, attn.sinks)
            by_gate, g = self._at(attn.gate_site, g * seen * (open_ * (1 - open_))), g * open_
        dq, dk, dv, pattern = through_attention(g, q, k, v, attn.spec, want_pattern, self.products, self.own, attn.sinks)
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
        if attn.clip and attn.q_norm is not None:
            dv = self._unclipped(attn, dv, attn.v_site)
        joined = torch.cat([dq, dk, dv], dim=1)
        if attn.clip and attn.q_norm is None:
            joined = self._unclipped(attn, joined, attn.q_site, attn.k_site, attn.v_site)
        joined = joined if by_gate is None else torch.cat([joined, by_gate], dim=1)
        return self.products.linear(rearrange(joined, "rows heads d -> rows (heads d)"), attn.qkv)

    def _unclipped(self, attn: Attention, g: Tensor, *sites: str) -> Tensor:
        """The gradient before clipping, from the clipped values: what was cut off does not pass."""
        before = {**self.forward.values, **self.forward.unedited}
        return g * (torch.cat([before[site].float() for site in sites], dim=1).abs() < attn.clip)

    def _qk_norms(self, attn: Attention, dq: Tensor, dk: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Through the norms of queries and keys, if there are any."""
        if attn.q_norm is None or attn.k_norm is None:
            return dq, dk
        dq, dk = self._at(attn.normed_q_site, dq), self._at(attn.normed_k_site, dk)
        if attn.clip:
            dq, dk = self._unclipped(attn, dq, attn.normed_q_site), self._unclipped(attn, dk, attn.normed_k_site)
        q, k = (self._value(site) for site in _normed(self.model.config, layer))
        if not attn.norm_spans_heads:
            return through_norm(dq, q, attn.q_norm, self.products), through_norm(dk, k, attn.k_norm, self.products)
        back = lambda g, x, norm: through_norm(g.flatten(1), x.flatten(1), norm, self.products).view(x.shape)  # noqa: E731
        return back(dq, q, attn.q_norm), back(dk, k, attn.k_norm)


def through_edits(g: Tensor, unedited: Tensor, edits: Sequence[PlacedEdit]) -> Tensor:
    """The gradient [rows, ...] before a site's edits. An edit works on single rows.

    Added vectors let a gradient pass, replaced rows stop it, projections project it. Computed on the host.

    unedited  the site's value before the edits
    """
    value, found = (x.to("cpu", torch.float32, copy=True) for x in (unedited, g))
    steps = []
    for edit in (_rounded(edit, unedited.dtype) for edit in edits):
        if positions := edit.positions(0, len(value)):
            steps.append((edit, positions, value[positions]))
            value[positions] = edit.apply(value[positions], positions)
    for edit, positions, rows in reversed(steps):
        found[positions] = _through_edit(found[positions], rows, edit, positions)
    return found.to(g.device)


def _through_edit(g: Tensor, rows: Tensor, edit: PlacedEdit, positions: list[int]) -> Tensor:
    """The gradient [n, ...] of rows before one edit: of those, and of those heads, that it changes.

    keep_norm:  y = e |x| / |e|, e = x + v      dx = (g - e (g . e) / |e|^2) |x| / |e| + x (g . e) / (|x| |e|)
    match_norm: y = x + e, e = c v |x| / |v|    dx = g + x (g . e) / |x|^2
    """
    marked = replace(edit, op="set", value=rows.new_full(rows.shape[1:], torch.nan), keep_norm=False, match_norm=False)
    changed = marked.apply(rows, positions).isnan()
    plain = replace(edit, keep_norm=False, when=None, heads=())
    dx = g
    if edit.op in ("reweight", "project_out"):  # linear, and symmetric
        dx = plain.apply(g, positions)
    elif edit.op != "add":
        dx = torch.zeros_like(g)
    elif edit.match_norm:
        e = plain.apply(rows, positions) - rows
        dx = g + rows * (portable.row_sums(g * e) / portable.row_sums(rows * rows))
    elif edit.keep_norm:
        e = plain.apply(rows, positions)
        old, new = (portable.apply("sqrt", portable.row_sums(x * x)) for x in (rows, e))
        along = portable.row_sums(g * e) / new
        dx = (g - e / new * along) * (old / new) + rows / old * along
    return torch.where(changed, dx, g)


def _rounded(edit: PlacedEdit, dtype: torch.dtype) -> PlacedEdit:
    """The edit with its tensors as the pass uses them: a condition must not hold here that did not hold there."""
    if dtype == torch.float32:
        return edit
    value, when = (x if x is None else x.to(dtype).float() for x in (edit.value, edit.when))
    return replace(edit, value=value, when=when)


# ---- tape ------------------------------------------------------------------------------------------------------------
# `Tape`: the forward pass of one path, as its gradients need it.


@dataclass(frozen=True, eq=False)
class Tape:
    """The values of one path's pass, to the bits of committed rows. Takes as much memory as a step of training."""

    runner: Runner
    tokens: tuple[int, ...]
    edits: tuple[PlacedEdit, ...]
    asked: tuple[str, ...]
    """the sites whose gradients can be computed, in model order"""
    forward: WholePass
    """with the values of the asked sites, and of those that the backward pass reads"""

    @property
    def logits(self) -> Tensor:
        """Of the last row: [vocab], on the host, where metrics are computed."""
        return self.forward.logits.cpu()

    def value(self, site: str) -> Tensor:
        """A copy of the value at an asked site, to the bits of a capture: [rows, ...], on the host."""
        return _in_order((site,), self.forward.values, len(self.tokens))[site]

    @classmethod
    @torch.inference_mode()
    def of(
        cls, runner: Runner, tokens: list[int], edits: tuple[PlacedEdit, ...], asked: tuple[str, ...], backward: bool = True
    ) -> "Tape":
        """Computes the path alone, in one pass. Precondition: no other thread computes on the runner.

        backward  False: only values and metrics will be read, so nothing else is kept
        """
        if not runner.one_device:
            raise NoGradient("No gradient through layers on several devices. Load the model on one, or with ranks.")
        if runner.kernels and runner.model.config.mixer is not None:
            raise NoGradient("No gradient through recurrent layers on a GPU. Use device='cpu'.")
        if runner.kernels and (inside := [site for site in asked if site.endswith(("hook_pattern", "hook_attn_scores"))]):
            raise NoGradient(f"No gradient at {inside[0]} on a GPU, whose kernels never store it. Use device='cpu'.")
        if fixed := [edit.site for edit in edits if edit.site.endswith(("attn.hook_pattern", STATE))]:
            rather = "mixer.hook_read or mixer.hook_v" if fixed[0].endswith(STATE) else "attn.hook_z or attn.hook_v"
            raise NoGradient(f"No gradient through an edit of {fixed[0]}. Edit {rather} instead.")
        edits = tuple(known for edit in edits if (known := edit.on_path(tokens)) is not None)
        head = [site for site in asked if site in HEAD_SITES]
        needed = needed_sites(runner.model.config) if backward else frozenset()
        tap = PassTap(needed | (frozenset(asked) - frozenset(head)))
        forward = runner.whole(tokens, edits, tap)
        if head:
            forward.values.update(runner.head(forward.residual, head))
        return cls(runner, tuple(tokens), edits, asked, forward)

    def measure(self, function: LogitsFunction) -> float:
        """The metric alone, to the bits of `Gradients.value`."""
        with modes.canonical():
            return float(value_of(function, self.logits))

    @torch.inference_mode()
    def gradients(self, function: LogitsFunction, aliases: Mapping[str, str], certified: bool) -> Gradients:
        """The gradients of a metric at the asked sites. On a CPU in portable arithmetic.

        On a GPU, metric and edits are differentiated on the host, and everything else on the device. Results are on the host.
        """
        num_keys, asked, products = len(self.tokens), frozenset(self.asked), self.products()
        with modes.canonical():
            value, g = derivative(function, self.logits)
            found = Backward(self.runner.model, self.forward, self.edits, asked, products).run(g.to(self.runner.device))
            for site in self.asked:
                finite(found[site], f"gradients at {site}")
            kept = _in_order(self.asked, found, num_keys)
        values = _in_order(self.asked, self.forward.values, num_keys)
        return Gradients(value, self.tokens, certified and products.certified, values, kept, aliases)

    @torch.inference_mode()
    def own_jacobians(self, picked: Sequence[int], tell: Callable[[int], object]) -> Tensor:
        """The sums over some positions of the Jacobians of the final stream by the streams at the asked sites, each at the same
        position: [sites, d_model (of the final stream), d_model], on the host. On a CPU in portable arithmetic.

        What a position does to the final stream at the same position passes through no other one. So one backward pass, in
        which rows keep to themselves, gives one line of the Jacobians of all positions and layers.

        tell  called after each line
        """
        width, device = self.runner.model.config.d_model, self.runner.device
        out, products = torch.empty(len(self.asked), width, width, dtype=torch.float32), self.products()
        with modes.canonical():
            for line in range(width):
                g = torch.zeros(self.forward.residual.shape, dtype=torch.float32, device=device)
                g[:, line] = 1.0
                backward = Backward(self.runner.model, self.forward, self.edits, frozenset(self.asked), products, own=True)
                found = backward.through_blocks(g)
                for number, site in enumerate(self.asked):
                    rows = finite(found[site], f"Jacobians at {site}")[list(picked)].cpu()
                    out[number, line] = portable.row_sums(rows.t().contiguous())[:, 0]
                tell(line)
        return out

    def products(self) -> BackwardProducts:
        """Those of a backward pass on the runner's device."""
        if not self.runner.kernels:
            return HostProducts(self.runner.products)
        from replaylens.gradients.cuda import KernelProducts  # needs triton

        return KernelProducts()


def _in_order(sites: tuple[str, ...], tensors: Mapping[str, Tensor], num_keys: int) -> dict[str, Tensor]:
    """Copies on the host that autograd can use, sharing no memory. Patterns have room for whole blocks of keys, cut here."""
    with torch.inference_mode(False):
        cut = {site: tensors[site][..., :num_keys] if site.endswith("hook_pattern") else tensors[site] for site in sites}
        return {site: x.to("cpu", copy=True, memory_format=torch.contiguous_format) for site, x in cut.items()}
