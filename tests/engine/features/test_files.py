"""Files in SAELens' format: both layouts are read, and everything that is not supported is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replaylens.engine.errors import BadConfig, BadWeights, EngineError, UnknownSite, UnsupportedModel
from replaylens.engine.features.features import SparseFeatures
from tests.engine.features.tiny import COUNT, HOOK, WIDTH, config, tensors, write
from tests.toy_model import engine


def test_both_layouts_are_the_same_features(tmp_path: Path) -> None:
    """Before SAELens 6, fields lie side by side, and topk is an activation."""
    new = SparseFeatures.load(write(tmp_path / "new", "topk"))
    old = {"d_in": WIDTH, "d_sae": COUNT, "hook_name": HOOK, "hook_layer": 0, "hook_head_index": None, "dtype": "float32"}
    old |= {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5}, "normalize_activations": False}
    old |= {"finetuning_scaling_factor": False, "model_from_pretrained_kwargs": {}}
    folder = write(tmp_path / "old", "topk")
    save_file({**tensors("topk"), "scaling_factor": torch.ones(COUNT)}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(old))
    assert SparseFeatures.load(folder).config == new.config and SparseFeatures.load(folder).digest == new.digest
    older = {"hook_point": old.pop("hook_name"), **old}
    (folder / "cfg.json").write_text(json.dumps(older))
    assert SparseFeatures.load(folder).digest == new.digest
    assert SparseFeatures.load(write(tmp_path / "k", "topk", k=4)).digest != new.digest  # negative control


CONFIGS: dict[str, tuple[str, dict[str, Any], type[EngineError], str]] = {
    "architecture": ("standard", {"architecture": "gated"}, UnsupportedModel, "architecture 'gated'.*standard, topk"),
    "skip": ("transcoder", {"architecture": "skip_transcoder"}, UnsupportedModel, "skip_transcoder"),
    "activation": ("standard", {"activation_fn": "tanh-relu"}, UnsupportedModel, "tanh-relu"),
    "activation of another": ("jumprelu", {"activation_fn": "topk"}, UnsupportedModel, "'topk' of the architecture 'jumprelu'"),
    "average": ("standard", {"normalize_activations": "expected_average_only_in"}, UnsupportedModel, "Fold the factor"),
    "norm": ("standard", {"normalize_activations": "constant_norm_rescale"}, UnsupportedModel, "constant_norm_rescale"),
    "layer norm": ("standard", {"normalize_activations": "layer_norm"}, UnsupportedModel, "layer_norm"),
    "reshape": ("standard", {"reshape_activations": "other"}, UnsupportedModel, "reshape_activations"),
    "head": ("standard", {"hook_head_index": 3}, UnsupportedModel, "hook_head_index 3"),
    "scaling": ("standard", {"finetuning_scaling_factor": True}, UnsupportedModel, "finetuning_scaling_factor"),
    "processed": (
        "standard",
        {"model_from_pretrained_kwargs": {"center_writing_weights": True}},
        UnsupportedModel,
        "processed weights .center_writing_weights",
    ),
    "no width": ("standard", {"d_sae": None}, BadConfig, "d_sae"),
    "width": ("standard", {"d_sae": 48.5}, BadConfig, "d_sae"),
    "no k": ("topk", {"k": None}, BadConfig, "k in"),
    "large k": ("topk", {"k": COUNT + 1}, BadConfig, "more than the 48 features"),
    "no flag": ("standard", {"apply_b_dec_to_input": "no"}, BadConfig, "apply_b_dec_to_input"),
    "bias of a transcoder": ("transcoder", {"apply_b_dec_to_input": True}, BadConfig, "belongs to another site"),
    "no hook": ("standard", {"metadata": {}}, BadConfig, "hook_name"),
    "metadata": ("standard", {"metadata": 3}, BadConfig, "metadata"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configs_that_are_refused(what: str, tmp_path: Path) -> None:
    kind, changes, error, text = CONFIGS[what]
    with pytest.raises(error, match=text):
        SparseFeatures.load(write(tmp_path, kind, **changes))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"cfg.json cannot be read"):
        SparseFeatures.load(tmp_path)
    folder = write(tmp_path, "standard")
    (folder / "cfg.json").write_text("{")
    with pytest.raises(BadConfig, match="not JSON"):
        SparseFeatures.load(folder)
    write(tmp_path, "standard")
    (folder / "sae_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(BadWeights, match="cannot be read"):
        SparseFeatures.load(folder)
    (folder / "sae_weights.safetensors").unlink()
    with pytest.raises(BadWeights, match="cannot be read"):
        SparseFeatures.load(folder)


TENSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("standard", {"b_enc": None}, "lacks the tensor b_enc"),
    "missing threshold": ("jumprelu", {"threshold": None}, "lacks the tensor threshold"),
    "unknown": ("standard", {"threshold": torch.zeros(COUNT)}, "does not use"),
    "shape": ("standard", {"W_enc": torch.zeros(COUNT, WIDTH)}, r"W_enc has shape \[48, 32\]; cfg.json says \[32, 48\]"),
    "NaN": ("standard", {"b_dec": torch.full((WIDTH,), float("nan"))}, "b_dec holds NaN"),
    "integers": ("standard", {"b_dec": torch.zeros(WIDTH, dtype=torch.int32)}, "int32"),
    "factor": ("standard", {"scaling_factor": torch.full((COUNT,), 2.0)}, "scaling_factor, which"),
    "no length": ("topk rescaled", {"W_dec": torch.zeros(COUNT, WIDTH)}, "a row of zeros"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_refused(what: str, tmp_path: Path) -> None:
    kind, changes, text = TENSORS[what]
    folder = write(tmp_path, kind)
    made = {name: value for name, value in {**tensors(kind), **changes}.items() if value is not None}
    save_file(made, folder / "sae_weights.safetensors")
    with pytest.raises(BadWeights, match=text):
        SparseFeatures.load(folder)


def test_features_of_another_model_are_refused(tmp_path: Path) -> None:
    """By site and by width. Negative control: the model's own features are accepted."""
    served = engine()
    own = SparseFeatures.load(write(tmp_path / "own", "standard"))
    assert own.require(served) is own
    with pytest.raises(UnknownSite, match=r"blocks.9.hook_resid_post.*Nearest"):
        SparseFeatures.load(write(tmp_path / "site", "standard", hook="blocks.9.hook_resid_post")).require(served)
    with pytest.raises(BadWeights, match="width 16 there and 32"):
        SparseFeatures.load(write(tmp_path / "width", "standard", d_in=16)).require(served)
    turned = config("transcoder")
    turned["metadata"] |= {"hook_name": "blocks.1.hook_mlp_out", "hook_name_out": "blocks.0.hook_mlp_out"}
    folder = write(tmp_path / "turned", "transcoder")
    (folder / "cfg.json").write_text(json.dumps(turned))
    with pytest.raises(BadConfig, match="is computed before"):
        SparseFeatures.load(folder).require(served)
