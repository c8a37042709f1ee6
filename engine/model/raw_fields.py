"""Values of `ModelConfig` that a Hugging Face config says in several fields: widths, rotary embeddings, windows."""

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
    return read_rope(_ropes(raw)[0])


def local_rope(raw: Raw) -> Rope | None:
    """The rotary embedding of layers with a window, if the config has one of its own."""
    local = _ropes(raw)[1]
    return None if local is None else read_rope(local)


def _ropes(raw: Raw) -> tuple[Raw, Raw | None]:
    ropes = raw["rope_parameters"]
    return (ropes["full_attention"], ropes["sliding_attention"]) if "full_attention" in ropes else (ropes, None)


def read_rope(raw: dict[str, Any]) -> Rope:
    """A Hugging Face `rope_parameters` entry."""
    kind = raw.get("rope_type", "default")
    if kind == "default":
        return Rope(theta=raw["rope_theta"])
    if kind == "linear":
        return Rope(theta=raw["rope_theta"], scaling="linear", factor=raw["factor"])
    if kind == "llama3":
        return Rope(
            theta=raw["rope_theta"],
            scaling="llama3",
            factor=raw["factor"],
            low_freq_factor=raw["low_freq_factor"],
            high_freq_factor=raw["high_freq_factor"],
            original_positions=raw["original_max_position_embeddings"],
        )
    raise UnsupportedModel(f"The rotary scaling {kind!r} is not supported. Known: default, linear, llama3.")


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
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()
