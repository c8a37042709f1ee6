"""Values of `ModelConfig` that a Hugging Face config says in several fields: widths, rotary embeddings, windows."""

import math
from typing import Any

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Rope
from replaylens.engine.model.family import Raw


def head_width(raw: Raw) -> int:
    """The width of a head, which may differ from d_model / heads."""
    return raw.get("head_dim") or split_width(raw)


def split_width(raw: Raw) -> int:
    """The width of a head in a family that divides d_model between its heads."""
    width: int = raw["hidden_size"] // raw["num_attention_heads"]
    return width


def rotary_width(raw: Raw) -> int:
    """The number of rotated dimensions per head."""
    return int(head_width(raw) * _ropes(raw)[0].get("partial_rotary_factor", 1.0))


def main_rope(raw: Raw) -> Rope:
    """The rotary embedding of layers that see all positions."""
    return read_rope(_ropes(raw)[0], raw["max_position_embeddings"])


def local_rope(raw: Raw) -> Rope | None:
    """The rotary embedding of layers with a window, if the config has one of its own."""
    local = _ropes(raw)[1]
    return None if local is None else read_rope(local, raw["max_position_embeddings"])


def _ropes(raw: Raw) -> tuple[Raw, Raw | None]:
    ropes = raw.get("rope_parameters") or {}
    return (ropes["full_attention"], ropes["sliding_attention"]) if "full_attention" in ropes else (ropes, None)


def positions(raw: Raw) -> int:
    """The longest sequence. With LongRoPE, that of the short factors: longer ones would turn every earlier key anew."""
    longest: int = raw["max_position_embeddings"]
    ropes = [rope for rope in _ropes(raw) if rope is not None]
    short = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min([longest, *short])


def read_rope(raw: dict[str, Any], longest: int = 0) -> Rope:
    """A Hugging Face `rope_parameters` entry. `longest`: the config's number of positions."""
    kind, theta = raw.get("rope_type", "default"), raw["rope_theta"]
    match kind:
        case "default" | "dynamic":  # dynamic scaling starts beyond the longest sequence, where nothing is computed here
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, scaling="linear", factor=raw["factor"])
        case "llama3":
            return Rope(
                theta=theta,
                scaling="llama3",
                factor=raw["factor"],
                low_freq_factor=raw["low_freq_factor"],
                high_freq_factor=raw["high_freq_factor"],
                original_positions=raw["original_max_position_embeddings"],
            )
        case "yarn":
            return _yarn(raw, longest)
        case "longrope":
            return _longrope(raw, longest)
    known = "default, dynamic, linear, llama3, longrope, yarn"
    raise UnsupportedModel(f"The rotary scaling {kind!r} is not supported. Known: {known}.")


def alpha_rope(raw: Raw) -> Rope:
    """HunYuan's: dynamic scaling with an `alpha` is a larger base at every length."""
    rope = raw["rope_parameters"]
    if rope.get("rope_type") != "dynamic" or not rope.get("alpha"):
        return main_rope(raw)
    width = head_width(raw)
    return Rope(theta=rope["rope_theta"] * rope["alpha"] ** (width / (width - 2)))


def grown_by_yarn(factor: float, by: float) -> float:
    """What YaRN multiplies queries and keys with, for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _yarn(raw: dict[str, Any], longest: int) -> Rope:
    original = raw["original_max_position_embeddings"]
    factor = longest / original if raw["factor"] is None else raw["factor"]
    by, by_all = raw.get("mscale"), raw.get("mscale_all_dim")
    usual = grown_by_yarn(factor, by) / grown_by_yarn(factor, by_all) if by and by_all else grown_by_yarn(factor, 1)
    truncate = raw.get("truncate")
    return Rope(
        theta=raw["rope_theta"],
        scaling="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        truncate=True if truncate is None else truncate,
        attention_factor=usual if raw.get("attention_factor") is None else raw["attention_factor"],
    )


def _longrope(raw: dict[str, Any], longest: int) -> Rope:
    original = raw["original_max_position_embeddings"]
    factor = longest / original if raw.get("factor") is None else raw["factor"]
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    given = raw.get("attention_factor")
    divisors = tuple(float(x) for x in raw["short_factor"])
    return Rope(
        theta=raw["rope_theta"],
        scaling="divided",
        divisors=divisors,
        original_positions=original,
        attention_factor=usual if given is None else given,
    )


def one_window(raw: Raw) -> tuple[int, ...]:
    """One window for all layers."""
    window = raw.get("sliding_window") or 0
    return (window,) * raw["num_hidden_layers"] if window else ()


def layer_windows(raw: Raw) -> tuple[int, ...]:
    """A window for each layer that `layer_types` says has one."""
    window = raw.get("sliding_window") or 0
    kinds = raw.get("layer_types")
    if kinds is None:
        return one_window(raw)
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"The attention kinds {sorted(unknown)} are not supported.")
    if not window and (local := [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]):
        raise UnsupportedModel(
            f"layer_types has sliding_attention at layers {local}, but sliding_window is {raw.get('sliding_window')!r}. "
            "Set the window, or layer_types to full_attention."
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def clip_qkv(raw: Raw) -> float:
    """The bound of q, k and v; 0: none. transformers takes every number for a bound, also 0."""
    value = raw.get("clip_qkv")
    if value is not None and not value > 0:
        raise UnsupportedModel(
            f"{raw.get('model_type')} with clip_qkv = {value!r} is not supported. Supported: None, and numbers above 0."
        )
    return value or 0.0
