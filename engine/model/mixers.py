"""The recurrent parts of hybrids, instead of an attention or next to it: wiring only, as in `decoder.py`.

Each is a short convolution over the last positions; two kinds carry a state per head over all positions. What a row needs of
earlier ones is in the pages of the cache, and its arithmetic depends on its position alone (`kernels/definition.py`).
"""

from functools import partial

import torch
from torch import Tensor, nn

from replaylens.engine.model.config import MixerConfig, ModelConfig
from replaylens.engine.model.layers import Conv, Linear, Norm, Part, Rotary
from replaylens.engine.model.ops import Ops, Recurrence, Tap, tapped, wanted

UNIT_EPS = 1e-6
"""of queries and keys of length 1"""


class Mixer(Part):
    """A recurrent part up to its output product."""

    heads: int
    """of its output"""
    o: Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.mixer is not None  # `config.has("mixer", layer)` holds
        self.mixer, self.layer = config.mixer, layer
        site = f"blocks.{layer}.mixer."
        self.conv_in_site, self.conv_site = site + "conv.hook_in", site + "conv.hook_out"
        self.gate_site, self.z_site = site + "hook_gate", site + "o.hook_in"
        self.q_site, self.k_site, self.v_site = (f"{site}hook_{part}" for part in "qkv")
        self.decay_site, self.strength_site = site + "hook_log_decay", site + "hook_beta"
        self.state_site, self.read_site = site + "hook_state", site + "hook_read"
        self.conv = Conv(self.mixer.taps, self.mixer.channels, self.mixer.conv_bias)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        """x [rows, d_model], normed -> what the output product reads: [rows, width]"""
        raise NotImplementedError

    def _convolved(self, x: Tensor, ops: Ops, tap: Tap | None, activate: bool = True) -> Tensor:
        """x [rows, channels] -> likewise"""
        return tapped(
            tap, self.conv_site, ops.short_conv(tapped(tap, self.conv_in_site, x), self.conv, self.layer, silu=activate)
        )

    def _recurred(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor | None, ops: Ops, tap: Tap | None
    ) -> Tensor:
        """[rows, heads, d_value]"""
        q, k, v = tapped(tap, self.q_site, q), tapped(tap, self.k_site, k), tapped(tap, self.v_site, v)
        decay = tapped(tap, self.decay_site, decay)
        strength = None if strength is None else tapped(tap, self.strength_site, strength)
        observe = partial(tap, self.state_site) if tap is not None and wanted(tap, self.state_site) else None
        return tapped(tap, self.read_site, ops.recur(Recurrence(q, k, v, decay, strength), self.layer, observe))


class GatedConv(Mixer):
    """LFM2's: a convolution between two gates."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        width, self.heads = self.mixer.channels, 1
        self.up = Linear(config.d_model, 3 * width, self.mixer.bias)
        self.o = Linear(width, config.d_model, self.mixer.bias)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        before, after, x = ops.linear(x, self.up).chunk(3, dim=-1)
        gate = tapped(tap, self.gate_site, after)
        return tapped(tap, self.z_site, gate * self._convolved(before * x, ops, tap, activate=False))


class DeltaNet(Mixer):
    """Qwen3-Next's gated delta net."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        m, self.heads = self.mixer, self.mixer.heads
        self.values, self.keys = m.heads * m.d_value, m.key_heads * m.d_key
        self.up = Linear(config.d_model, m.channels + self.values, m.bias)  # q | k | v | gate
        self.rates = Linear(config.d_model, 2 * m.heads, m.bias)  # strengths | decays
        self.a_log = nn.Parameter(torch.empty(m.heads, dtype=torch.float32))
        self.step_bias = nn.Parameter(torch.empty(m.heads, dtype=torch.float32))
        self.unit_norm = Norm(m.d_key, "rms", UNIT_EPS / m.d_key)  # its weights are ones: sqrt(d_key) times a unit vector
        self.norm = Norm(m.d_value, "rms", m.norm_eps or config.norm_eps)
        self.o = Linear(self.values, config.d_model, m.bias)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        m, rows = self.mixer, len(x)
        mixed, gate = ops.linear(x, self.up).split([m.channels, self.values], dim=-1)
        gate = tapped(tap, self.gate_site, gate.unflatten(1, (m.heads, m.d_value)))
        strength, decay = ops.rates(ops.linear(x, self.rates), self.a_log, self.step_bias, m.beta_scale)
        q, k, v = self._convolved(mixed, ops, tap).split([self.keys, self.keys, self.values], dim=-1)
        q, k = (x.unflatten(1, (m.key_heads, m.d_key)) for x in (q, k))
        q, k = ops.scaled_norms(q, k, self.unit_norm, (1 / m.d_key, m.d_key**-0.5))  # lengths of d_key ** -0.5 and 1
        out = self._recurred(q, k, v.reshape(rows, m.heads, -1), decay, strength, ops, tap)
        return tapped(tap, self.z_site, ops.gated_norm(out, gate, self.norm)).reshape(rows, -1)


class Mamba2(Mixer):
    """Mamba-2's state space: keys are B, queries C, values the inputs times their step sizes."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        m, self.heads = self.mixer, self.mixer.heads
        self.values, self.keys = m.heads * m.d_value, m.key_heads * m.d_key
        self.up = Linear(config.d_model, self.values + m.channels + m.heads, m.bias)  # gate | x | B | C | steps
        self.a_log = nn.Parameter(torch.empty(m.heads, dtype=torch.float32))
        self.step_bias = nn.Parameter(torch.empty(m.heads, dtype=torch.float32))
        self.skip = nn.Parameter(torch.empty(m.heads, dtype=torch.float32))
        shape = (m.norm_groups, self.values // m.norm_groups) if m.norm_groups > 1 else self.values
        self.norm = Norm(shape, "rms", config.norm_eps) if m.norm_groups else None
        self.o = Linear(self.values, config.d_model, m.bias)

    def forward(self, x: Tensor, rotary: Rotary | None, ops: Ops, tap: Tap | None) -> Tensor:
        m, rows = self.mixer, len(x)
        gate, mixed, step = ops.linear(x, self.up).split([self.values, m.channels, m.heads], dim=-1)
        gate = tapped(tap, self.gate_site, gate)
        step = ops.softplus(step + self.step_bias).clamp(m.min_step, m.max_step or None)
        x, k, q = self._convolved(mixed, ops, tap).split([self.values, self.keys, self.keys], dim=-1)
        x, (q, k) = x.reshape(rows, m.heads, -1), (each.reshape(rows, m.key_heads, m.d_key) for each in (q, k))
        out = self._recurred(q, k, step[..., None] * x, -ops.exp(self.a_log) * step, None, ops, tap)
        out = (out + self.skip[:, None] * x).reshape(rows, -1)
        return tapped(tap, self.z_site, self._gated(out, gate, ops))

    def _gated(self, x: Tensor, gate: Tensor, ops: Ops) -> Tensor:
        """x [rows, heads * d_value], normed and times the activated gate, in either order"""
        norm, silu = self.norm, lambda x: ops.activate(torch.cat([gate, x], dim=-1), "silu", gated=True)
        if norm is None:
            return silu(x)
        by_group = lambda x: ops.norm(x.view(len(x), *norm.weight.shape), norm).reshape(len(x), -1)  # noqa: E731
        normed = by_group if norm.by_head else lambda x: ops.norm(x, norm)
        return normed(silu(x)) if self.mixer.gate_first else silu(normed(x))


def mixer_of(config: ModelConfig, layer: int) -> Mixer:
    """The recurrent part of a layer that has one."""
    assert isinstance(config.mixer, MixerConfig)
    kinds: dict[str, type[Mixer]] = {"conv": GatedConv, "delta": DeltaNet, "ssd": Mamba2}
    return kinds[config.mixer.kind](config, layer)
