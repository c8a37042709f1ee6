"""A quantised checkpoint whose config or groups cannot be meant as they are written is refused by name, never guessed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens.engine.errors import BadConfig, BadWeights, EngineError, UnsupportedModel
from replaylens.engine.model.loading import WEIGHTS_FILE, load
from replaylens.engine.model.quantised import dequantised
from replaylens.engine.model.source import Source
from tests.engine.model.test_quantised import AWQ, FORMATS, GPTQ, Packed, compressed, pack_awq, pack_fp8, pack_gptq, write

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
CT = compressed("float-quantized", block_structure=[16, 16], strategy="block")
Damage = Callable[[dict[str, Tensor]], object]


def decoded(config: dict[str, Any], packed: Packed, damage: Damage = lambda parts: None) -> Tensor:
    parts = dict(packed[0])
    damage(parts)
    names = {f"x{end}": part for end, part in parts.items()}
    return dequantised(Source(names, names.__getitem__), config).get("x.weight")


def without_g_idx(parts: dict[str, Tensor]) -> None:
    parts.pop(".g_idx")


GROUPS: dict[str, tuple[dict[str, Any], Damage, str]] = {
    "act order without its groups": (
        {**GPTQ, "desc_act": True},
        without_g_idx,
        r"x is quantised with desc_act = True, but x\.g_idx is missing.*complete",
    ),
    "a group below 0": (GPTQ, lambda t: t[".g_idx"].sub_(2), r"g_idx holds -2 to 1, but there are 4 groups"),
    "a group beyond the last": (GPTQ, lambda t: t[".g_idx"].add_(9), r"g_idx holds 9 to 12, but there are 4 groups"),
    "more scales than groups": (
        GPTQ,
        lambda t: t.update({".scales": torch.cat([t[".scales"]] * 2)}),
        "8 groups of 16 do not cover 64 inputs",
    ),
    "groups that are no whole numbers": (GPTQ, lambda t: t.update({".g_idx": t[".g_idx"].float()}), "g_idx is not of whole"),
}


@pytest.mark.parametrize("fault", GROUPS)
def test_groups_that_cannot_be_meant_are_named(fault: str) -> None:
    config, damage, text = GROUPS[fault]
    packed = pack_gptq(32, 64, 0)
    assert torch.equal(decoded(config, packed), packed[1]), "the control"
    with pytest.raises(BadWeights, match=text):
        decoded(config, packed, damage)


def test_groups_in_order_need_no_g_idx() -> None:
    packed = pack_gptq(32, 64, 0)
    assert torch.equal(decoded(GPTQ, packed, without_g_idx), packed[1])


FIELDS: dict[str, tuple[dict[str, Any], Packed, str, list[Any]]] = {
    "GPTQ groups": (GPTQ, pack_gptq(32, 64, 0), "group_size", [0, "8", 7.5, -2, True]),
    "AWQ groups": (AWQ, pack_awq(32, 64, 0), "group_size", [0, "8", 7.5, -2, True]),
    "act order": (GPTQ, pack_gptq(32, 64, 0), "desc_act", ["false", 3]),
    "fp8 blocks": (
        FP8,
        pack_fp8(32, 64, 0),
        "weight_block_size",
        [[16], [0, 16], "16", 16, [16, 16, 16], [-16, 16], [16.0, 16]],
    ),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_or_size_is_named(field: str) -> None:
    config, packed, name, values = FIELDS[field]
    assert torch.equal(decoded(config, packed), packed[1]), "the control"
    for value in values:
        with pytest.raises(BadConfig, match=rf"{name} = .*\. It must be "):
            decoded({**config, name: value}, packed)


UNMEANT = {
    "by its name": ["lm_head", "x"],
    "by a module that contains it": ["layers.0"],
    "by an expression": [r"layers\.\d+\.mlp"],
    "by its end": ["up_proj"],
}


@pytest.mark.parametrize("how", UNMEANT)
def test_a_quantised_weight_that_the_config_excludes_is_refused(how: str) -> None:
    """transformers would take its numbers for the weight and leave out the scales."""
    parts, value = pack_fp8(32, 64, 0)
    module = "x" if how == "by its name" else "layers.0.mlp.up_proj"
    names = {f"{module}{end}": part for end, part in parts.items()}
    read = lambda skipped: dequantised(  # noqa: E731
        Source(names, names.__getitem__), {**FP8, "modules_to_not_convert": skipped}
    ).get(f"{module}.weight")
    for fine in (None, [], ["lm_head", "layers.01", "layers.0.mlp.up", "y"]):
        assert torch.equal(read(fine), value), "the control"
    with pytest.raises(BadConfig, match=rf"modules_to_not_convert .* that {module} is not quantised, but its weight is stored"):
        read(UNMEANT[how])


@pytest.mark.parametrize("value", ["lm_head", [3], [""], ["("]])
def test_excluded_modules_are_a_list_of_names(value: Any) -> None:
    with pytest.raises(BadConfig, match=r"modules_to_not_convert = .*\. It must be a list of names"):
        decoded({**FP8, "modules_to_not_convert": value}, pack_fp8(32, 64, 0))


def kinds(weights: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"group_0": {"weights": weights}}}


COMPRESSED: dict[str, tuple[dict[str, Any], type[EngineError], str]] = {
    "weights that are no object": (kinds("x"), BadConfig, r"weights = 'x'. It must be an object"),
    "groups that are no object": ({**CT, "config_groups": ["x"]}, BadConfig, r"config_groups = \['x'\]. It must be an object"),
    "half a block": (
        compressed("float-quantized", block_structure=[16]),
        BadConfig,
        r"block_structure = \[16\]. It must be two whole numbers",
    ),
    "a group of no size": (compressed("pack-quantized", num_bits=4, group_size=0), BadConfig, r"group_size = 0. It must be"),
    "rotations": (
        {**CT, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        UnsupportedModel,
        "transform_config = .*hadamard.* are not supported",
    ),
}


@pytest.mark.parametrize("fault", COMPRESSED)
def test_compressed_tensors_with_more_or_less_than_weights_are_named(fault: str) -> None:
    config, error, text = COMPRESSED[fault]
    parts, value = pack_fp8(32, 64, 0)
    packed = {end.replace("_inv", ""): part for end, part in parts.items()}, value
    for same in (CT, {**CT, "transform_config": {}}, {**CT, "transform_config": None}):
        assert torch.equal(decoded(same, packed), value), "the control"
    with pytest.raises(error, match=text):
        decoded(config, packed)


def test_a_folder_with_such_a_fault_is_refused(tmp_path: Path) -> None:
    """The same through files: the fault of one weight of many."""
    write(tmp_path, *FORMATS["gptq, act order"])
    load(tmp_path)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    save_file(
        {name: x for name, x in stored.items() if not name.endswith("layers.1.mlp.up_proj.g_idx")}, tmp_path / WEIGHTS_FILE
    )
    with pytest.raises(BadWeights, match=r"model\.layers\.1\.mlp\.up_proj\.g_idx is missing"):
        load(tmp_path)
