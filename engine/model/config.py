"""`ModelConfig`: everything that distinguishes one decoder from another, except its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from replaylens.engine.errors import BadConfig
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

# ---- routing ---------------------------------------------------------------------------------------------------------
# `Routing`: how a router's logits become chosen experts and their weights, and the plain form of that arithmetic.
#
# Everything here computes a row from that row alone. Ties go to the lower index, and sums run in the order of the index.

RoutingKind = Literal["softmax", "sigmoid", "sparsemixer"]
BARRED = -5e29
"""an expert with a lower score for the choice is forbidden: if it is chosen all the same, because too few are left, it gets the
weight of a logit of minus infinity, which is 0"""


@dataclass(frozen=True)
class Routing:
    """Which experts a row goes to, and with what weights."""

    top: int
    """number of chosen experts"""
    kind: RoutingKind = "softmax"
    """"sparsemixer": each of two weights is a softmax over the logits close to the chosen one (PhiMoE)"""
    normalised: bool = True
    """the weights of the chosen experts add up to 1. For a softmax, it then runs over the chosen logits alone"""
    scale: float = 1.0
    """factor on the weights (DeepSeek)"""
    groups: int = 1
    """experts are chosen within the best groups of neighbours only (DeepSeek); 1: among all"""
    chosen_groups: int = 1
    group_best: int = 1
    """a group's score is the sum of this many of its best experts"""
    correction: bool = False
    """a trained bias per expert, added to the scores for the choice alone (DeepSeek-V3)"""
    jitter: float = 0.0
    """sparsemixer: logits further below the chosen one than twice this part of it are left out"""
    floor: float = 1e-20
    """what is added to the sum of sigmoids that weights are divided by"""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise BadConfig(f"A row goes to {self.top} experts (num_experts_per_tok). It must go to at least 1.")
        if not 1 <= self.chosen_groups <= self.groups:
            raise BadConfig(
                f"A row goes to {self.chosen_groups} of {self.groups} groups (topk_group, n_group). It must go to at least 1, "
                "and to at most all of them."
            )
        if self.group_best < 1:
            raise BadConfig(f"group_best is {self.group_best}. It must be at least 1.")
        if self.kind == "sparsemixer" and self.top != 2:
            raise BadConfig(f"sparsemixer chooses two experts, not {self.top}.")


def sigmoid(x: Tensor) -> Tensor:
    """From exp, which gives an element the same bits at any index; the library's sigmoid need not."""
    return 1 / ((-x).exp() + 1)


class Functions(NamedTuple):
    """What routing is made of. torch's can be differentiated; an engine's are those of its arithmetic."""

    exp: Callable[[Tensor], Tensor] = lambda x: x.exp()
    sigmoid: Callable[[Tensor], Tensor] = sigmoid
    row_sums: Callable[[Tensor], Tensor] = lambda x: x.sum(-1, keepdim=True)
    """over the last dimension: [..., 1]"""


TORCH = Functions()


def choice_scores(logits: Tensor, routing: Routing, correction: Tensor | None = None, by: Functions = TORCH) -> Tensor:
    """What experts are chosen by: [rows, experts]. A softmax keeps the order of logits, so it is left out here."""
    scores = by.sigmoid(logits) if routing.kind == "sigmoid" else logits
    return scores if correction is None else scores + correction


def choose(scores: Tensor, routing: Routing) -> Tensor:
    """The experts with the highest scores, by index: [rows, top] int64, ascending. Scores that are equal: the lower index."""
    if routing.groups > 1:
        scores = _best_groups(scores, routing)
    return _highest(scores, routing.top).sort(dim=-1).values


def barred(scores: Tensor, chosen: Tensor) -> Tensor:
    """Which chosen experts the scores for the choice forbid: [rows, top] bool."""
    return scores.gather(-1, chosen) < BARRED


def without_barred(logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The logits [rows, experts], minus infinity for chosen experts that the scores for the choice forbid."""
    own = logits.gather(-1, chosen).masked_fill(barred(scores, chosen), float("-inf"))
    return logits.scatter(-1, chosen, own)


def weigh(logits: Tensor, chosen: Tensor, routing: Routing, by: Functions = TORCH) -> Tensor:
    """The weights of the chosen experts: [rows, top] float32, from logits [rows, experts]."""
    if routing.kind == "sparsemixer":
        return _sparsemixer(logits, chosen, routing, by)
    if routing.kind == "sigmoid":
        weights = by.sigmoid(logits.gather(-1, chosen))
        if routing.normalised:
            weights = weights / (by.row_sums(weights) + routing.floor)
    elif routing.normalised:
        exponents = _exponents(logits.gather(-1, chosen), by)
        weights = exponents / by.row_sums(exponents)
    else:
        weights = _softmax(logits, by).gather(-1, chosen)
    return weights if routing.scale == 1.0 else weights * routing.scale


def ordered_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, from its first element to its last: [..., 1]. This order defines the bits."""
    total = x[..., :1]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i : i + 1]
    return total


def _softmax(x: Tensor, by: Functions) -> Tensor:
    """Over the experts, which are too many to be added one by one."""
    exponents = _exponents(x, by)
    return exponents / by.row_sums(exponents)


def _exponents(x: Tensor, by: Functions) -> Tensor:
    return by.exp(x - x.amax(-1, keepdim=True))


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the highest scores [..., n], highest first; ties go to the lower index: [..., count]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores, -inf outside the best groups. A barred expert adds nothing to its group; one without others comes last."""
    rows = scores.view(len(scores), routing.groups, -1)
    best = rows.sort(dim=-1, descending=True).values[..., : routing.group_best]
    absent = best < BARRED
    worth = ordered_sum(best.masked_fill(absent, 0.0)).masked_fill(absent[..., :1], float("-inf"))
    groups = _highest(worth.squeeze(-1), routing.chosen_groups)
    kept = torch.zeros(rows.shape[:2], dtype=torch.bool, device=scores.device).scatter(-1, groups, True)
    return rows.masked_fill(~kept[..., None], float("-inf")).view(scores.shape)


def _sparsemixer(logits: Tensor, chosen: Tensor, routing: Routing, by: Functions) -> Tensor:
    """The better of two experts first, then the other without it. Each weight: a softmax over the logits close to it."""
    own = logits.gather(-1, chosen)  # [rows, 2], by index
    first = own[:, 1:] > own[:, :1]  # whether the second is the better one
    places = torch.where(first, chosen.flip(-1), chosen)
    weights, left = [], logits
    for place in (places[:, :1], places[:, 1:]):
        top = logits.gather(-1, place)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * routing.jitter
        weights.append(_softmax(left.masked_fill(far, float("-inf")), by).gather(-1, place))
        left = left.scatter(-1, place, float("-inf"))
    mixed = torch.cat(weights, dim=-1)
    return torch.where(first, mixed.flip(-1), mixed)


# ---- config ----------------------------------------------------------------------------------------------------------

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
"""clamped_swiglu: gated only, with gate and up clamped at `SWIGLU_LIMIT` (GPT-OSS)"""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
QkSpan = Literal["head", "each", "all"]


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of layer."""

    theta: float = 10000.0
    """base of the geometric series of wavelengths"""
    scaling: Literal["none", "linear", "llama3", "yarn", "divided"] = "none"
    """how the wavelengths are stretched for contexts longer than the trained one"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """whole numbers as the bounds of YaRN's ramp"""
    divisors: tuple[float, ...] = ()
    """what each frequency is divided by (LongRoPE's short factors)"""
    attention_factor: float = 1.0
    """factor on cos and sin (YaRN, LongRoPE)"""


@dataclass(frozen=True)
class Latent:
    """Latent attention: the keys and values of all heads are products of one latent vector per position (DeepSeek-V2)."""

    rank: int
    """width of that vector, which the KV cache holds together with the rotated part of the keys"""
    d_value: int
    """width of a head's values"""
    query_rank: int = 0
    """width of the latent that queries are a product of; 0: they are a product of the stream"""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.d_value < 1 or self.query_rank < 0:
            raise BadConfig(f"Invalid latent attention {self}: rank and d_value must be at least 1, query_rank at least 0.")


@dataclass(frozen=True)
class MixtureConfig:
    """The mixtures of experts that stand in the place of MLPs."""

    num_experts: int
    d_expert: int
    """width of an expert's hidden layer"""
    routing: Routing
    layers: tuple[bool, ...] = ()
    """per layer, whether it has a mixture; the others have an MLP. Empty: all layers"""
    bias: bool = False
    """the experts' products have biases (GPT-OSS)"""
    router_bias: bool = False
    d_shared: int = 0
    """width of the hidden layer of the shared expert, which every row goes to; 0: none"""
    shared_gate: bool = False
    """the shared expert's output is multiplied by a sigmoid of the row (Qwen2-MoE)"""

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.d_expert < 1:
            raise BadConfig(f"A mixture needs experts: num_experts {self.num_experts}, d_expert {self.d_expert}.")
        groups, top = self.routing.groups, self.routing.top
        if self.num_experts % groups or self.routing.group_best > self.num_experts // groups:
            raise BadConfig(f"{self.num_experts} experts do not divide into {groups} groups of equal size.")
        if top > self.num_experts // groups * self.routing.chosen_groups:
            raise BadConfig(f"{top} experts cannot be chosen among {self.num_experts} in {self.routing.chosen_groups} groups.")
        if self.shared_gate and not self.d_shared:
            raise BadConfig("shared_gate needs a shared expert: d_shared is 0.")


MixerKind = Literal["conv", "delta", "ssd"]


@dataclass(frozen=True)
class MixerConfig:
    """The recurrent layers of a hybrid: a short convolution, and in two kinds a state [d_key, d_value] of each head."""

    kind: MixerKind
    """"conv": a gated convolution (LFM2); "delta": a gated delta net (Qwen3-Next); "ssd": Mamba-2"""
    taps: int
    """positions that the convolution reads, the row's own included"""
    channels: int
    """width of what is convolved"""
    heads: int = 0
    key_heads: int = 0
    """heads that share queries and keys have the same (Mamba-2: groups)"""
    d_key: int = 0
    d_value: int = 0
    conv_bias: bool = False
    bias: bool = False
    """the products have biases"""
    min_step: float = 0.0
    max_step: float = 0.0
    """bounds of Mamba-2's step sizes; 0: none above"""
    norm_groups: int = 1
    """parts of a Mamba-2 row that are normed on their own; 0: no norm"""
    gate_first: bool = True
    """Mamba-2: the gate is applied before the norm"""
    beta_scale: float = 1.0
    """factor on a delta net's strengths of update; 2 allows negative eigenvalues"""
    norm_eps: float = 0.0
    """of the norm of a delta net's output; 0: as in the other norms"""
    norms_before: bool = False
    """layers with a mixer have norms before their parts, whatever the others have (OLMo-Hybrid)"""

    def __post_init__(self) -> None:
        if self.taps < 1 or self.channels < 1:
            raise BadConfig(f"A mixer needs taps and channels: {self.taps} and {self.channels}.")
        sizes = self.heads, self.key_heads, self.d_key, self.d_value
        if self.kind != "conv" and (min(sizes) < 1 or self.heads % self.key_heads):
            raise BadConfig(f"Invalid heads of a mixer: {self}. Heads must be a multiple of key_heads; all sizes at least 1.")
        if self.kind != "conv" and self.channels != 2 * self.key_heads * self.d_key + self.heads * self.d_value:
            raise BadConfig(f"channels {self.channels} of a mixer are not those of its queries, keys and values: {self}.")
        if self.norm_groups and self.heads * self.d_value % self.norm_groups:
            raise BadConfig(f"{self.heads * self.d_value} values of a mixer do not divide into {self.norm_groups} groups.")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one position's state; empty of a convolution."""
        return self.heads, self.d_key, self.d_value

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """What the cache holds of a position: inputs of the convolution, keys, updates and log decays. Where each ends."""
        keys = self.channels + self.key_heads * self.d_key
        updates = keys + self.heads * self.d_value
        return self.channels, keys, updates, updates + self.heads


BlockPart = Literal["attn", "mixer", "mlp"]


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and arithmetic of a decoder. Immutable; checked at construction."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_mlp: int
    vocab_size: int
    max_positions: int
    """the longest sequence, prompt and generated tokens together"""
    family: str = "replaylens"
    """where the weights come from; informative only, not used by the arithmetic"""
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    post_norms: bool = False
    """a second norm on the outputs of attention and MLP (Gemma-2, Gemma-3)"""
    parallel_residual: bool = False
    """attention and MLP both read the block's input (GPT-NeoX)"""
    learned_positions: bool = False
    """a table of position vectors added to the embedding (GPT-2)"""
    rotary_dim: int = 0
    """the number of rotated dimensions per head; 0: none"""
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None
    """the rotary embedding of layers with a window, if it differs (Gemma-3)"""
    windows: tuple[int, ...] = ()
    """per layer, the number of positions that a row sees, including its own; 0: all. Empty: all layers see all"""
    attn_scale: float = 0.0
    """factor on q.k; 0 means d_head ** -0.5"""
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    """RMSNorm on every head's q and k before rotation (Qwen3, Gemma-3)"""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: Activation = "silu"
    embed_scale: float = 1.0
    tied_embeddings: bool = True
    norm_bias: bool = True
    """LayerNorms have a bias; RMSNorms never do"""
    pre_norms: bool = True
    """norms before attention and MLP; False: both read the residual stream itself (OLMo-2)"""
    shared_norm: bool = False
    """the MLP of a parallel block reads what attention reads, so there is no second norm (Phi, GPT-J)"""
    rotary_layers: tuple[bool, ...] = ()
    """per layer, whether queries and keys are rotated. Empty: all layers, if `rotary_dim` is not 0"""
    qk_norm_kind: NormKind = "rms"
    qk_norm_span: QkSpan = "head"
    """"head": one weight for all heads; "each": one for each head (Cohere); "all": one norm over all heads (OLMo-2)"""
    qk_norm_rotated: bool = False
    """the norm comes after the rotation (HunYuan)"""
    clip_qkv: float = 0.0
    """bound on the size of q, k and v; 0: none (OLMo). With norms of q and k, it is applied after them (OLMoE)"""
    adapter: str = ""
    """SHA-256 of the LoRA adapter that was merged into the weights; empty: none. Informative, as `family`"""
    scale_by_layer: bool = False
    """q.k is divided by the number of the layer, counted from 1 (GPT-2)"""
    residual_scale: float = 1.0
    """factor on the outputs of attention and MLP before they are added to the residual stream (Granite)"""
    logit_scale: float = 1.0
    unembed_bias: bool = False
    slopes: tuple[float, ...] = ()
    """per head, what is added to a score for each position of its key (ALiBi); empty: nothing"""
    latent: Latent | None = None
    """latent attention; `rotary_dim` of the `d_head` dimensions of a key are then rotated and the same for all heads"""
    mixture: MixtureConfig | None = None
    """the mixtures of experts; None: every layer has an MLP"""
    sinks: bool = False
    """each head has a trained score that takes part in its softmax and belongs to no key (GPT-OSS)"""
    revision: str = ""
    """name@commit on the Hugging Face hub; empty: from elsewhere. Informative, as `family`"""
    mixer: MixerConfig | None = None
    """the recurrent layers of a hybrid; None: it has none"""
    parts: tuple[str, ...] = ()
    """per layer, its parts: "attn", "mixer" and "mlp", with spaces between. Empty: "attn mlp" everywhere"""
    attn_gate: bool = False
    """attention outputs are multiplied by a sigmoid of the row (Qwen3-Next)"""
    factors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """factors that were multiplied into weights when they were loaded, by the fields of the source (Falcon-H1). Informative,
    as `family`"""
    weights_of: tuple[int, ...] = ()
    """per layer, the layer that holds its weights: itself, or an earlier one. (0, 1, 2, 1, 2, 1, 2, 7) goes three times through
    two layers, between a first and a last one. Empty: each layer holds its own"""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "d_model",
            "num_heads",
            "num_kv_heads",
            "d_head",
            "d_mlp",
            "vocab_size",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise BadConfig(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.rotary_dim % 2 or self.rotary_dim > self.d_head:
            raise BadConfig(f"rotary_dim {self.rotary_dim} must be even and at most d_head {self.d_head}.")
        for name in ("windows", "rotary_layers", "parts", "weights_of"):
            if (given := getattr(self, name)) and len(given) != self.num_layers:
                raise BadConfig(f"{name} has {len(given)} entries for {self.num_layers} layers.")
        if not isinstance(self.weights_of, tuple) or any(type(held) is not int for held in self.weights_of):
            raise BadConfig(f"weights_of is {self.weights_of!r}. Give a tuple with the number of a layer for each layer.")
        for layer, held in enumerate(self.weights_of):
            if not (0 <= held <= layer and self.weights_of[held] == held):
                raise BadConfig(f"weights_of says that layer {held} holds the weights of layer {layer}. Name layers up to it.")
        if self.mixture is not None and self.mixture.layers and len(self.mixture.layers) != self.num_layers:
            raise BadConfig(f"mixture.layers has {len(self.mixture.layers)} entries for {self.num_layers} layers.")
        if self.activation == "clamped_swiglu" and not self.gated_mlp:
            raise BadConfig("clamped_swiglu needs a gated MLP.")
        if self.slopes and len(self.slopes) != self.num_heads:
            raise BadConfig(f"slopes has {len(self.slopes)} entries for {self.num_heads} heads.")
        if self.shared_norm and not (self.parallel_residual and self.pre_norms):
            raise BadConfig("shared_norm needs parallel_residual and pre_norms.")
        if self.post_norms and self.residual_scale != 1.0:
            raise BadConfig(f"residual_scale {self.residual_scale} with post_norms is not supported.")
        if self.latent is not None:
            self._check_latent()
        if (self.mixer is not None) != any(self.has("mixer", layer) for layer in range(self.num_layers)):
            raise BadConfig(f"The layers {self.parts} do not fit the mixer {self.mixer}.")

    def _check_latent(self) -> None:
        if self.num_kv_heads != self.num_heads:
            raise BadConfig(f"Latent attention needs as many key heads as heads, not {self.num_kv_heads} of {self.num_heads}.")
        if not 0 < self.rotary_dim < self.d_head or self.rotary_layers:
            raise BadConfig(f"Latent attention rotates part of every head, not {self.rotary_dim} of {self.d_head} dimensions.")
        if self.qk_norm or self.clip_qkv or self.slopes or self.sinks or self.attn_gate:
            raise BadConfig("Latent attention with qk_norm, clip_qkv, slopes, sinks or attn_gate is not supported.")

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.attn_scale or self.d_head**-0.5

    @property
    def plain_logits(self) -> bool:
        """Whether logits are the product with the unembedding, times a power of two at most: what a GPU's lens computes."""
        return not self.unembed_bias and math.frexp(self.logit_scale)[0] == 0.5

    @property
    def d_value(self) -> int:
        """The width of a head's values, and so of its output."""
        return self.d_head if self.latent is None else self.latent.d_value

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What the KV cache holds per position and layer: keys and values of each key head, (2, heads, d_head); with latent
        attention one vector, the normed latent and the rotated part of the keys, (1, 1, rank + rotary_dim)."""
        if self.latent is None:
            return 2, self.num_kv_heads, self.d_head
        return 1, 1, self.latent.rank + self.rotary_dim

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int:
        """The number of positions that a row of `layer` sees, including its own; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has(self, part: BlockPart, layer: int) -> bool:
        """Whether `layer` has this part."""
        return part in (self.parts[layer].split() if self.parts else ("attn", "mlp"))

    def norms(self, layer: int) -> tuple[bool, bool]:
        """Whether there are norms before, and after, the parts of `layer`."""
        before = self.mixer is not None and self.mixer.norms_before and self.has("mixer", layer)
        return self.pre_norms or before, self.post_norms and not before

    def holder(self, layer: int) -> int:
        """The layer that holds the weights of `layer`."""
        return self.weights_of[layer] if self.weights_of else layer

    @property
    def holders(self) -> list[int]:
        """The layers that hold weights."""
        return sorted({self.holder(layer) for layer in range(self.num_layers)})

    def layers_with(self, part: BlockPart) -> list[int]:
        return [layer for layer in range(self.num_layers) if self.has(part, layer)]

    def sparse(self, layer: int) -> bool:
        """Whether `layer` has a mixture of experts in the place of its MLP."""
        return self.mixture is not None and (self.mixture.layers[layer] if self.mixture.layers else True)

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of `layer` are rotated."""
        return self.rotary_dim > 0 and (self.rotary_layers[layer] if self.rotary_layers else True)

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of `layer`."""
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def to_json(self) -> str:
        """A stable text form: the same config gives the same bytes, also in versions that know fewer fields.

        So the fields of `_LATER` are written only if they differ from their defaults.
        """
        raw = _without_defaults(self, asdict(self))
        for name in ("rope", "local_rope"):
            if (rope := getattr(self, name)) is not None:
                raw[name] = _without_defaults(rope, raw[name])
        if self.mixture is not None and self.mixture.routing.floor == Routing.floor:
            del raw["mixture"]["routing"]["floor"]
        return json.dumps(raw, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Inverse of `to_json`; an unknown or missing field is an error."""
        try:
            raw: dict[str, Any] = dict(json.loads(text))
        except (ValueError, TypeError) as e:
            raise BadConfig(f"The model config is not a JSON object: {e}.") from None
        known = {f.name for f in fields(cls)}
        if unknown := set(raw) - known:
            raise BadConfig(f"Unknown config fields {sorted(unknown)}. Known: {', '.join(sorted(known))}.")
        try:
            for name in ("rope", "local_rope"):
                if isinstance(raw.get(name), dict):
                    raw[name] = Rope(**_with_tuples(raw[name], "divisors"))
            if isinstance(raw.get("latent"), dict):
                raw["latent"] = Latent(**raw["latent"])
            if isinstance(mixture := raw.get("mixture"), dict):
                parts = {**_with_tuples(mixture, "layers"), "routing": Routing(**mixture["routing"])}
                raw["mixture"] = MixtureConfig(**parts)
            if isinstance(raw.get("mixer"), dict):
                raw["mixer"] = MixerConfig(**raw["mixer"])
            raw["factors"] = tuple((name, tuple(each)) for name, each in raw.get("factors", ()))
            raw = _with_tuples(raw, "windows", "rotary_layers", "slopes", "parts", "weights_of")
            return cls(**raw)
        except (TypeError, KeyError) as e:
            raise BadConfig(f"The model config is incomplete or malformed: {e}.") from None


_LATER = frozenset(
    f.name
    for part, last in ((ModelConfig, "tied_embeddings"), (Rope, "original_positions"))
    for f in fields(part)[[f.name for f in fields(part)].index(last) + 1 :]
)
"""fields that came after the first checkpoints and certificates"""


def _without_defaults(config: ModelConfig | Rope, raw: dict[str, Any]) -> dict[str, Any]:
    unset = {f.name for f in fields(config) if f.name in _LATER and getattr(config, f.name) == f.default}
    return {name: value for name, value in raw.items() if name not in unset}


def _with_tuples(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in raw.items()}
