"""The tensors of an SAE or transcoder: `sae_weights.safetensors`, checked against its config."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replaylens.engine.errors import BadWeights
from replaylens.engine.features.config import FeatureConfig


@dataclass(frozen=True, eq=False)
class FeatureWeights:
    """In float32, by SAELens' names; `read` gives them on the CPU."""

    W_enc: Tensor
    """[d_in, d_sae]"""
    b_enc: Tensor
    """[d_sae]"""
    W_dec: Tensor
    """[d_sae, d_out]"""
    b_dec: Tensor
    """[d_out]"""
    threshold: Tensor | None = None
    """[d_sae]: of jumprelu"""

    @property
    def digest(self) -> str:
        """Hash of all tensors."""
        digest = hashlib.sha256()
        for name, value in vars(self).items():
            if value is not None:
                digest.update(f"{name} {list(value.shape)}\n".encode() + value.numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: str) -> "FeatureWeights":
        """The same weights on a device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})

    @classmethod
    def read(cls, path: Path, config: FeatureConfig) -> "FeatureWeights":
        """BadWeights for a file that cannot be read, and for a tensor that is missing, unknown, not finite or misshapen."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as problem:
            raise BadWeights(f"{path} cannot be read ({str(problem)[:100]}). Give a folder that SAELens has saved.") from None
        factor = tensors.get("scaling_factor")
        if factor is not None and bool((factor == 1).all()):  # some versions of SAELens save it although it is not used
            del tensors["scaling_factor"]
        shapes = _shapes(config)
        if missing := [name for name in shapes if name not in tensors]:
            has = ", ".join(tensors) or "none"
            raise BadWeights(f"{path} lacks the tensor {missing[0]} of a {config.architecture} architecture. It has {has}.")
        if unknown := [name for name in tensors if name not in shapes]:
            raise BadWeights(
                f"{path} has the tensor {unknown[0]}, which a {config.architecture} architecture does not use. It uses "
                f"{', '.join(shapes)}. Check the architecture in cfg.json."
            )
        return cls(**{name: _checked(name, tensors[name], shape, path) for name, shape in shapes.items()})


def _shapes(config: FeatureConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "W_enc": (config.d_in, config.d_sae),
        "b_enc": (config.d_sae,),
        "W_dec": (config.d_sae, config.d_out),
        "b_dec": (config.d_out,),
    }
    return {**shapes, "threshold": (config.d_sae,)} if config.jumps else shapes


def _checked(name: str, value: Tensor, shape: tuple[int, ...], path: Path) -> Tensor:
    if tuple(value.shape) != shape:
        raise BadWeights(f"{path}: {name} has shape {list(value.shape)}; cfg.json says {list(shape)}. Correct one of the two.")
    if not value.dtype.is_floating_point or not bool(torch.isfinite(value).all()):
        raise BadWeights(f"{path}: {name} holds NaN, infinity or {value.dtype} numbers. Give finite floats.")
    return value.to(torch.float32).contiguous()
