"""Quantised checkpoints, packed here number by number from the definitions of their formats, load to exactly their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.engine.model import quantised
from replaylens.engine.model.loading import WEIGHTS_FILE, load, weights_hash
from replaylens.engine.model.quantised import dequantised
from replaylens.engine.model.source import Source
from tests.engine.model.test_adapter import trained
from tests.engine.model.test_weights import edit_json
from tests.families import hugging_face

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
    hugging_face("llama").save_pretrained(folder)
    stored = load_file(folder / WEIGHTS_FILE)
    plain = dict(stored)
    for seed, name in enumerate(sorted(plain)):
        if name.endswith("_proj.weight"):
            parts, plain[name] = pack(*stored.pop(name).shape, seed)
            stored |= {name.removesuffix(".weight") + end: x for end, x in parts.items()}
    save_file(stored, folder / WEIGHTS_FILE)
    edit_json(folder / "config.json", quantization_config=config)
    return plain


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_loads_to_the_values_that_it_stands_for(kind: str, tmp_path: Path) -> None:
    """Bit for bit the model of the plain checkpoint, in float32 and in bfloat16."""
    plain = write(tmp_path / "quantised", *FORMATS[kind])
    hugging_face("llama").save_pretrained(tmp_path / "plain")
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
    hugging_face("llama").save_pretrained(tmp_path)
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
