"""The tensors of an SAE or transcoder: `sae_weights.safetensors`, checked against its config."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel
from replaylens.engine.request.values import as_instance, as_int, short_repr

# ---- config ----------------------------------------------------------------------------------------------------------
# `FeatureConfig`: the `cfg.json` of a sparse autoencoder or transcoder in SAELens' format, read strictly.
#
# SAELens has two layouts. From version 6 on, what the model is lies under `metadata`; before, all fields lie side by side.
# Fields that change the arithmetic are checked and must be supported. All others are kept in `metadata` and not used.

ARCHITECTURES = ("standard", "topk", "jumprelu", "transcoder", "jumprelu_transcoder")
_PROCESSING = ("center_writing_weights", "fold_value_biases", "refactor_factored_attn_matrices")
"""options of TransformerLens that change activations; the engine computes those of the original weights"""
_OLDER = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "activation_fn_str": "activation_fn"}
"""names of fields before SAELens 3 -> their later names"""


@dataclass(frozen=True)
class FeatureConfig:
    """What the arithmetic of an SAE or transcoder depends on."""

    architecture: str
    """one of `ARCHITECTURES`"""
    d_in: int
    d_sae: int
    """the number of features"""
    d_out: int
    """d_in, unless it is a transcoder"""
    hook: str
    """the site that is encoded, by the name that the file gives it"""
    hook_out: str
    """the site that is decoded to: `hook`, unless it is a transcoder"""
    apply_b_dec_to_input: bool
    k: int | None = None
    """of topk: the largest number of active features"""
    rescale_acts_by_decoder_norm: bool = False
    """of topk: whether features are chosen, and given, in units of their decoder row's length"""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def transcodes(self) -> bool:
        return self.architecture.endswith("transcoder")

    @property
    def jumps(self) -> bool:
        """Whether features have thresholds."""
        return self.architecture.startswith("jumprelu")

    @classmethod
    def of_json(cls, raw: Any, what: str) -> "FeatureConfig":
        """From the content of a `cfg.json`; `what` names the file in errors.

        Raises BadConfig for a missing or invalid field, UnsupportedModel for arithmetic that is not supported.
        """
        given = as_instance(what, raw, dict, "a JSON object", BadConfig)
        cfg: dict[str, Any] = {_OLDER.get(str(name), str(name)): value for name, value in given.items()}
        metadata = as_instance(f"metadata of {what}", cfg.get("metadata", {}), dict, "a JSON object", BadConfig)
        cfg = {**metadata, **cfg}  # in files before SAELens 6, the fields lie side by side
        architecture, k = _architecture(cfg, what)
        _require_supported(cfg, what)
        sizes = {name: _size(cfg, name, what) for name in ("d_in", "d_sae")}
        transcodes = architecture.endswith("transcoder")
        hook, hooks = _hook(cfg, "hook_name", what), ("hook_name_out" if transcodes else "hook_name")
        made = cls(
            architecture,
            **sizes,
            d_out=_size(cfg, "d_out", what) if transcodes else sizes["d_in"],
            hook=hook,
            hook_out=_hook(cfg, hooks, what),
            apply_b_dec_to_input=_flag(cfg, "apply_b_dec_to_input", True, what),
            k=k,
            rescale_acts_by_decoder_norm=architecture == "topk" and _flag(cfg, "rescale_acts_by_decoder_norm", False, what),
            metadata={name: value for name, value in cfg.items() if name != "metadata"},
        )
        if transcodes and made.apply_b_dec_to_input:
            raise BadConfig(
                f"{what}: apply_b_dec_to_input is true for a {architecture}, whose b_dec belongs to another site than its "
                "input. Set it to false if the transcoder was trained so."
            )
        if k is not None and k > made.d_sae:
            raise BadConfig(f"{what}: k={k} is more than the {made.d_sae} features. Give a k of at most that.")
        return made


def _architecture(cfg: dict[str, Any], what: str) -> tuple[str, int | None]:
    """(architecture, k of topk)"""
    activation, more = cfg.get("activation_fn", "relu"), cfg.get("activation_fn_kwargs") or {}
    name = cfg.get("architecture", "standard")  # files before SAELens 3 do not name it
    if activation == "topk" and name == "standard":  # before SAELens 6, topk was an activation of a standard SAE
        name = "topk"
    elif activation != ("topk" if name == "topk" else "relu") and "activation_fn" in cfg:
        raise UnsupportedModel(
            f"{what}: activation_fn {short_repr(activation)} of the architecture {short_repr(name)} is not supported. "
            "Supported: 'relu', and 'topk' of the architectures 'standard' and 'topk'."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{what}: architecture {short_repr(name)} is not supported. Supported: {', '.join(ARCHITECTURES)}."
        )
    if name != "topk":
        return name, None
    if "k" in cfg:
        return name, as_int(f"k in {what}", cfg["k"], 1, error=BadConfig)
    more = as_instance(f"activation_fn_kwargs in {what}", more, dict, "a JSON object with k", BadConfig)
    return name, as_int(f"k in {what}", more.get("k"), 1, error=BadConfig)


def _require_supported(cfg: dict[str, Any], what: str) -> None:
    """UnsupportedModel for arithmetic that `SparseFeatures` does not do."""
    normalize = cfg.get("normalize_activations") or "none"
    if normalize != "none":
        fold = " Fold the factor into the weights first (fold_activation_norm_scaling_factor)."
        hint = fold if normalize == "expected_average_only_in" else ""
        raise UnsupportedModel(f"{what}: normalize_activations {short_repr(normalize)} is not supported, only 'none'.{hint}")
    if (shape := cfg.get("reshape_activations") or "none") not in ("none", "hook_z"):
        raise UnsupportedModel(f"{what}: reshape_activations {short_repr(shape)} is not supported, only 'none' and 'hook_z'.")
    for name in ("hook_head_index", "hook_head_index_out"):
        if cfg.get(name) is not None:
            raise UnsupportedModel(
                f"{what}: {name} {short_repr(cfg[name])} is not supported: features of one head. Use all heads."
            )
    if cfg.get("finetuning_scaling_factor"):
        raise UnsupportedModel(f"{what}: finetuning_scaling_factor is not supported. Fold the factor into the weights.")
    loaded = cfg.get("model_from_pretrained_kwargs") or {}
    if processed := [name for name in _PROCESSING if isinstance(loaded, dict) and loaded.get(name)]:
        raise UnsupportedModel(
            f"{what}: it was trained on activations of a model with processed weights ({', '.join(processed)}), which are not "
            "those of the original weights that the engine computes. Use one trained without processing."
        )


def _size(cfg: dict[str, Any], name: str, what: str) -> int:
    if name not in cfg:
        raise BadConfig(f"{what} has no {name}. Add it: the width of a site, or the number of features.")
    return as_int(f"{name} in {what}", cfg[name], 1, error=BadConfig)


def _hook(cfg: dict[str, Any], name: str, what: str) -> str:
    if not isinstance(hook := cfg.get(name), str) or not hook:
        raise BadConfig(
            f"{what} has no {name} ({short_repr(hook)}). Add the name of the site, such as 'blocks.3.hook_resid_post'."
        )
    return hook


def _flag(cfg: dict[str, Any], name: str, default: bool, what: str) -> bool:
    if not isinstance(value := cfg.get(name, default), bool):
        raise BadConfig(f"{what}: invalid {name}={short_repr(value)}. Give true or false.")
    return value


# ---- weights ---------------------------------------------------------------------------------------------------------


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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value.dtype != torch.float32:
                raise BadWeights(f"{name} of the features is {value.dtype}. Give float32, such as {name}.float().")
            if value is not None and not bool(torch.isfinite(value).all()):
                raise BadWeights(f"{name} of the features holds NaN or infinity. Give finite numbers.")

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
    made = value.to(torch.float32).contiguous()
    if not value.dtype.is_floating_point or not bool(torch.isfinite(made).all()):
        raise BadWeights(f"{path}: {name} holds NaN, infinity, numbers beyond float32 or {value.dtype}. Give finite floats.")
    return made
