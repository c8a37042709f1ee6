"""`ModelConfig`: everything that distinguishes one decoder from another, except its weights."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from replaylens.engine.errors import BadConfig

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of layer."""

    theta: float = 10000.0
    """base of the geometric series of wavelengths"""
    scaling: Literal["none", "linear", "llama3"] = "none"
    """how the wavelengths are stretched for contexts longer than the trained one"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


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
        if self.windows and len(self.windows) != self.num_layers:
            raise BadConfig(f"windows has {len(self.windows)} entries for {self.num_layers} layers.")

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.attn_scale or self.d_head**-0.5

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int:
        """The number of positions that a row of `layer` sees, including its own; 0: all."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of `layer`."""
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def to_json(self) -> str:
        """A stable text form: the same config gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
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
                    raw[name] = Rope(**raw[name])
            if "windows" in raw:
                raw["windows"] = tuple(raw["windows"])
            return cls(**raw)
        except TypeError as e:
            raise BadConfig(f"The model config is incomplete or malformed: {e}.") from None
