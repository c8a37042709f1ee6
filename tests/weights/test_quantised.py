"""Quantised checkpoints, packed here number by number from the definitions of their formats, load to exactly their values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import BadConfig, BadWeights, EngineError, UnsupportedModel
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.weights import quantised
from replaylens.weights.loading import WEIGHTS_FILE, load
from replaylens.weights.quantised import dequantised, from_mxfp4
from replaylens.weights.source import Source
from tests.devices import swept
from tests.families import hugging_face, hugging_face_folder
from tests.weights.test_adapter import trained
from tests.weights.test_weights import edit_json

Packed = tuple[dict[str, Tensor], Tensor]
"""the tensors of one weight by the ends of their names, and the weight that they stand for [outputs, inputs]"""


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(rows: list[list[int]], bits: int) -> Tensor:
    """Whole numbers, 32 / bits a word, lowest bits first."""
    count = 32 // bits
    out = [[sum(row[i + j] << (bits * j) for j in range(count)) for i in range(0, len(row), count)] for row in rows]
    return torch.from_numpy(np.array(out, dtype=np.uint32).view(np.int32))


def grouped(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> Tensor:
    """(number - zero) * scale in exact arithmetic; numbers [inputs, outputs]."""
    exact = (numbers - zeros[group]).astype(np.float64) * scales.astype(np.float64)[group]
    assert (exact == exact.astype(np.float32)).all(), "the product fits into float32"
    return torch.from_numpy(exact.astype(np.float32)).T.contiguous()


def pack_gptq(
    outputs: int, inputs: int, seed: int, bits: int = 4, size: int = 16, v2: bool = False, act: bool = False
) -> Packed:
    rng, top = random(seed), 1 << bits
    groups = -(-inputs // size)
    numbers = rng.integers(0, top, (inputs, outputs))
    zeros = rng.integers(0 if v2 else 1, top, (groups, outputs))
    scales = (rng.random((groups, outputs)) * 0.01 + 1e-3).astype(np.float16)
    group = rng.permutation(np.arange(inputs) // size) if act else np.arange(inputs) // size
    parts = {
        ".qweight": words(numbers.T.tolist(), bits).T.contiguous(),
        ".qzeros": words((zeros - (0 if v2 else 1)).tolist(), bits),
        ".scales": torch.from_numpy(scales),
        ".g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    return parts, grouped(numbers, zeros, scales, group)


def pack_awq(outputs: int, inputs: int, seed: int, size: int = 16) -> Packed:
    """Within a word, the lowest bits hold columns 0, 2, 4, 6, then 1, 3, 5, 7."""
    rng = random(seed)
    numbers, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (inputs // size, outputs))
    scales = (rng.random((inputs // size, outputs)) * 0.01 + 1e-3).astype(np.float16)
    order = [8 * i + j for i in range(outputs // 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]
    parts = {
        ".qweight": words(numbers[:, order].tolist(), 4),
        ".qzeros": words(zeros[:, order].tolist(), 4),
        ".scales": torch.from_numpy(scales),
    }
    return parts, grouped(numbers, zeros, scales, np.arange(inputs) // size)


def pack_fp8(
    outputs: int, inputs: int, seed: int, scale: str = "block", block: int = 16, name: str = "weight_scale_inv"
) -> Packed:
    rng = random(seed)
    weight = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
    shape = {"block": (-(-outputs // block), -(-inputs // block)), "tensor": (), "row": (outputs, 1)}[scale]
    scales = torch.from_numpy(np.asarray(rng.random(shape) * 0.01 + 1e-3, dtype=np.float32))
    row, column = np.arange(outputs)[:, None], np.arange(inputs)
    each = {
        "block": lambda: scales[row // block, column // block],
        "tensor": lambda: scales,
        "row": lambda: scales[row, 0],
    }
    value = weight.float() * each[scale]()
    return {".weight": weight, f".{name}": scales}, value


def pack_int8(outputs: int, inputs: int, seed: int) -> Packed:
    rng = random(seed)
    weight = torch.from_numpy(rng.integers(-128, 128, (outputs, inputs)).astype(np.int8))
    scale = torch.from_numpy(rng.random((outputs, 1)).astype(np.float32)).bfloat16()
    return {".weight": weight, ".weight_scale": scale}, weight.float() * scale.float()


def pack_int4(outputs: int, inputs: int, seed: int, size: int = 16) -> Packed:
    """compressed-tensors: numbers from -8 to 7 are stored 8 higher."""
    rng = random(seed)
    numbers, groups = rng.integers(-8, 8, (outputs, inputs)), -(-inputs // size)
    scale = torch.from_numpy(rng.random((outputs, groups)).astype(np.float32)).bfloat16()
    filled = np.pad(numbers + 8, ((0, 0), (0, -inputs % 8)))
    value = torch.from_numpy(numbers).float() * scale.float()[:, np.arange(inputs) // size]
    parts = {".weight_packed": words(filled.tolist(), 4), ".weight_scale": scale}
    return {**parts, ".weight_shape": torch.tensor([outputs, inputs])}, value


def compressed(form: str, **kind: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "symmetric": True, "strategy": "channel", **kind}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int, int], Packed]]] = {
    "gptq": (GPTQ, pack_gptq),
    "gptq, act order": ({**GPTQ, "desc_act": True}, lambda n, k, seed: pack_gptq(n, k, seed, act=True)),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, lambda n, k, seed: pack_gptq(n, k, seed, bits=8)),
    "gptq, 2 bits": ({**GPTQ, "bits": 2}, lambda n, k, seed: pack_gptq(n, k, seed, bits=2)),
    "gptq, second format": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda n, k, seed: pack_gptq(n, k, seed, v2=True),
    ),
    "gptq, one group": ({**GPTQ, "group_size": -1}, lambda n, k, seed: pack_gptq(n, k, seed, size=k)),
    "awq": (AWQ, pack_awq),
    "fp8, blocks": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, pack_fp8),
    "fp8, blocks that do not divide": (
        {"quant_method": "fp8", "weight_block_size": [24, 24]},
        lambda n, k, seed: pack_fp8(n, k, seed, block=24),
    ),
    "fp8, one scale": ({"quant_method": "fp8"}, lambda n, k, seed: pack_fp8(n, k, seed, "tensor")),
    "fp8, one scale, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda n, k, seed: pack_fp8(n, k, seed, "tensor", name="weight_scale"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda n, k, seed: pack_fp8(n, k, seed, "row", name="weight_scale")),
    "compressed fp8": (
        compressed("float-quantized", type="float"),
        lambda n, k, seed: pack_fp8(n, k, seed, "row", name="weight_scale"),
    ),
    "compressed int8": (compressed("int-quantized", type="int"), pack_int8),
    "compressed int4": (compressed("pack-quantized", type="int", num_bits=4, group_size=16), pack_int4),
}


def write(folder: Path, config: dict[str, Any], pack: Callable[[int, int, int], Packed]) -> dict[str, Tensor]:
    """A Llama whose products are quantised. Returns the plain tensors that it stands for."""
    hugging_face_folder("llama", folder)
    stored = load_file(folder / WEIGHTS_FILE)
    plain = dict(stored)
    for seed, name in enumerate(sorted(plain)):
        if name.endswith("_proj.weight"):
            parts, plain[name] = pack(*stored.pop(name).shape, seed)
            stored |= {name.removesuffix(".weight") + end: x for end, x in parts.items()}
    save_file(stored, folder / WEIGHTS_FILE)
    edit_json(folder / "config.json", quantization_config=config)
    return plain


@pytest.mark.parametrize(
    "kind", swept(FORMATS, "gptq, act order", "awq", "fp8, blocks", "fbgemm", "compressed int4", "compressed int8")
)
def test_a_checkpoint_loads_to_the_values_that_it_stands_for(kind: str, tmp_path: Path) -> None:
    """Bit for bit the model of the plain checkpoint, in float32 and in bfloat16."""
    plain = write(tmp_path / "quantised", *FORMATS[kind])
    hugging_face_folder("llama", tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / WEIGHTS_FILE)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = load(tmp_path / "quantised", dtype), load(tmp_path / "plain", dtype)
        assert ours.config == theirs.config and weights_hash(ours) == weights_hash(theirs)
    assert weights_hash(ours) != weights_hash(load(hugging_face("llama"), dtype)), "the control: these are other weights"


@pytest.mark.parametrize("pack", [pack_gptq, pack_awq, pack_int4], ids=["gptq", "awq", "int4"])
def test_one_changed_number_is_one_changed_weight(pack: Callable[[int, int, int], Packed]) -> None:
    config = {pack_gptq: GPTQ, pack_awq: AWQ, pack_int4: FORMATS["compressed int4"][0]}[pack]
    parts, value = pack(32, 64, 0)

    def decoded() -> Tensor:
        names = {f"x{end}": x for end, x in parts.items()}
        return dequantised(Source(names, names.__getitem__), config).get("x.weight")

    assert torch.equal(decoded(), value)
    main = parts[".weight_packed" if pack is pack_int4 else ".qweight"]
    main[3, 2] ^= 1 << 8
    assert int((decoded() != value).sum()) == 1


def test_serving_a_quantised_folder(tmp_path: Path) -> None:
    """End to end, with tensors that only quantise activations beside the weights."""
    plain = write(tmp_path, *FORMATS["fp8, one scale, static"])
    stored = load_file(tmp_path / WEIGHTS_FILE)
    stored["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor(0.5)
    stored["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(stored, tmp_path / WEIGHTS_FILE)
    engine = Engine.load(tmp_path)
    assert torch.equal(engine.model.state_dict()["blocks.0.mlp.down.weight"], plain["model.layers.0.mlp.down_proj.weight"].T)
    assert engine.prompt([1, 2, 3]).generate(4).certified


def test_an_adapter_is_merged_into_the_values_of_its_base(tmp_path: Path) -> None:
    trained("llama", {"r": 4, "target_modules": ["q_proj", "down_proj"]}, tmp_path / "base", tmp_path / "adapter")
    plain = write(tmp_path / "quantised", *FORMATS["gptq"])
    save_file(plain, tmp_path / "base" / WEIGHTS_FILE)
    ours, theirs = (load(tmp_path / name, adapter=tmp_path / "adapter") for name in ("quantised", "base"))
    assert ours.config == theirs.config and weights_hash(ours) == weights_hash(theirs)
    assert weights_hash(ours) != weights_hash(load(tmp_path / "quantised"))


def test_mxfp4_blocks_are_the_values_of_their_bits() -> None:
    """gpt-oss: two numbers a byte, the lower four bits first; a scale is an exponent."""
    rng = random(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(110, 135, (2, 6, 3)).astype(np.uint8))
    values = np.zeros((2, 6, 96), dtype=np.float64)
    for expert, row, group, byte in np.ndindex(2, 6, 3, 16):
        for half in range(2):
            bits = (int(blocks[expert, row, group, byte]) >> (4 * half)) & 15
            exponent, mantissa = (bits >> 1) & 3, bits & 1
            size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            power = 2.0 ** (int(scales[expert, row, group]) - 127)
            values[expert, row, 32 * group + 2 * byte + half] = (-size if bits & 8 else size) * power
    names = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}
    got = dequantised(Source(names, names.__getitem__), {"quant_method": "mxfp4"}).get("e.gate_up_proj")
    assert got.dtype == torch.bfloat16 and got.shape == (2, 96, 6)
    assert torch.equal(got.double(), torch.from_numpy(values).transpose(1, 2))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "'bitsandbytes' are not supported.*awq, comp",
    ),
    "no method": ({"bits": 4}, "quantised by 'None'"),
    "three bits": ({**GPTQ, "bits": 3}, "'gptq' with bits = 3"),
    "bits by module": ({**GPTQ, "dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic"),
    "another layout of GPTQ": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    "another layout of AWQ": ({**AWQ, "version": "gemv"}, "version = 'gemv'"),
    "zero points": (compressed("int-quantized", symmetric=False), "symmetric = False"),
    "sparse": (compressed("sparse-24-bitmask"), "format = 'sparse-24-bitmask'"),
    "no weights": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "0 groups of weights"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_supported_is_named(kind: str, tmp_path: Path) -> None:
    config, text = REFUSED[kind]
    write(tmp_path, *FORMATS["gptq"])
    load(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(UnsupportedModel, match=text):
        load(tmp_path)


def test_plain_weights_under_a_quantised_config_are_named(tmp_path: Path) -> None:
    hugging_face_folder("llama", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match=r"no weight is stored that way. Remove quantization_config"):
        load(tmp_path)


PROJECTION = "model.layers.1.self_attn.v_proj"
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "a part is missing": ("gptq", lambda t: t.pop(f"{PROJECTION}.scales"), r"v_proj\.scales is missing"),
    "groups that do not cover": ("awq", lambda t: t.update({f"{PROJECTION}.scales": torch.ones(3, 16)}), "3 groups of 16"),
    "a group that is not there": ("gptq", lambda t: t[f"{PROJECTION}.g_idx"].fill_(9), "v_proj does not hold weights"),
    "a zero point of two meanings": ("gptq", lambda t: t[f"{PROJECTION}.qzeros"].fill_(-1), "take for two things"),
    "other blocks": (
        "fp8, blocks",
        lambda t: t.update({f"{PROJECTION}.weight_scale_inv": torch.ones(5, 5)}),
        "the scale has another shape",
    ),
    "a plain weight": ("fp8, blocks", lambda t: t.update({f"{PROJECTION}.weight": torch.ones(16, 32)}), "not in float8"),
    "a zero": (
        "compressed int8",
        lambda t: t.update({f"{PROJECTION}.weight_zero_point": torch.ones(16, 1, dtype=torch.int8)}),
        "zero points of a symmetric scheme",
    ),
    "a packed zero": (
        "compressed int4",
        lambda t: t.update({f"{PROJECTION}.weight_zero_point": torch.ones(2, 2, dtype=torch.int32)}),
        "zero points of a symmetric scheme",
    ),
    "another packed scale": (
        "compressed int4",
        lambda t: t.update({f"{PROJECTION}.weight_scale": torch.ones(16, 9)}),
        "the scale has another shape",
    ),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_weights_are_named(fault: str, tmp_path: Path) -> None:
    kind, change, text = DAMAGED[fault]
    write(tmp_path, *FORMATS[kind])
    stored = load_file(tmp_path / WEIGHTS_FILE)
    change(stored)
    save_file(stored, tmp_path / WEIGHTS_FILE)
    with pytest.raises(BadWeights, match=text):
        load(tmp_path)


@pytest.mark.parametrize(("kind", "zero"), [("compressed int8", torch.int8), ("compressed int4", torch.int32)])
def test_zero_points_of_0_change_nothing(kind: str, zero: torch.dtype, tmp_path: Path) -> None:
    """Some writers store them for symmetric weights, too."""
    write(tmp_path, *FORMATS[kind])
    before, stored = weights_hash(load(tmp_path)), load_file(tmp_path / WEIGHTS_FILE)
    save_file({**stored, f"{PROJECTION}.weight_zero_point": torch.zeros(2, 2, dtype=zero)}, tmp_path / WEIGHTS_FILE)
    assert weights_hash(load(tmp_path)) == before


def test_words_of_all_bits_unpack() -> None:
    """The sign bit of a word belongs to its last number."""
    assert quantised.unpacked(torch.tensor([[-1]], dtype=torch.int32), 4, 1).tolist() == [[15] * 8]
    assert quantised.unpacked(torch.tensor([[-(1 << 31)]], dtype=torch.int32), 8, 0).tolist() == [[0], [0], [0], [128]]


# ---- quantised faults ------------------------------------------------------------------------------------------------
# A quantised checkpoint whose config or groups cannot be meant as they are written is refused by name, never guessed.

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


# ---- quantised mixtures ----------------------------------------------------------------------------------------------
# Quantised mixtures: fp8 by block as DeepSeek-V3 and Qwen3 store it, and MXFP4 as gpt-oss does.

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
MIXTURE = dict(SHAPE, moe_intermediate_size=24, num_experts_per_tok=2, max_position_embeddings=64)
LATENT = dict(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
Tensors = dict[str, Tensor]


def fp8(stored: Tensors, plain: Tensors) -> None:
    for seed, name in enumerate(sorted(plain)):
        if name.endswith("_proj.weight"):
            parts, value = pack_fp8(*stored.pop(name).shape, seed)
            plain[name] = value.contiguous()
            stored |= {name.removesuffix(".weight") + end: x for end, x in parts.items()}


def mxfp4(stored: Tensors, plain: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in sorted(plain):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = stored.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(115, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = from_mxfp4(blocks, scales).contiguous()


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors, Tensors], None]]] = {
    "qwen3_moe": (dict(MIXTURE, num_experts=4, num_key_value_heads=2, head_dim=8), FP8, fp8),
    "deepseek_v3": (
        dict(MIXTURE, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4),
        FP8,
        fp8,
    ),
    "gpt_oss": (
        dict(SHAPE, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8),
        {"quant_method": "mxfp4"},
        mxfp4,
    ),
}


@pytest.mark.parametrize("name", swept(MODELS, "qwen3_moe"))
def test_a_quantised_mixture_loads_to_the_values_that_it_stands_for(name: str, tmp_path: Path) -> None:
    config, quantisation, pack = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config))
    plain_folder, folder = tmp_path / "plain", tmp_path / "quantised"
    model.save_pretrained(plain_folder)
    stored = load_file(plain_folder / WEIGHTS_FILE)
    plain = dict(stored)
    pack(stored, plain)
    save_file(plain, plain_folder / WEIGHTS_FILE)
    folder.mkdir()
    save_file(stored, folder / WEIGHTS_FILE)
    raw = json.loads((plain_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantisation}))
    ours, theirs = load(folder), load(plain_folder)
    assert ours.config == theirs.config and weights_hash(ours) == weights_hash(theirs)
    assert weights_hash(ours) != weights_hash(load(model)), "the control: these are other weights"
