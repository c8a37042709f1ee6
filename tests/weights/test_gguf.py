"""GGUF files, written by gguf's own writer: kinds of quantisation to the bit, architectures, keys that are read or refused."""

import copy
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import BadWeights, NotEnoughMemory, UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.tasks import WordTokenizer
from replaylens.weights import source as filler
from replaylens.weights import source as shards
from replaylens.weights.families import FAMILIES
from replaylens.weights.gguf import ARCHITECTURES, config_of
from replaylens.weights.loading import WEIGHTS_FILE, load, text_config
from replaylens.weights.source import Filler, Shards, Source
from tests.devices import swept
from tests.families import hugging_face, hugging_face_folder
from tests.tiny_shapes import SMALL
from tests.weights.test_adapter import trained
from tests.weights.test_weights import assert_same, edit

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
WIDE = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rope_parameters=ROPE,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
"""rows of 256 numbers, as blocks of K-quants have"""


def made(kind: str, **changes: Any) -> Any:
    """A random model of transformers; norms are not all ones."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def write(model: Any, file: Path, architecture: str, keys: dict[str, Any] | None = None, kind: Kind = Kind.F32) -> Path:
    """A model as llama.cpp converts it. `kind`: of products and embeddings."""
    config, own = model.config, ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(str(file), architecture)
    values = {key: getattr(config, field) for key, field in own.fields.items() if getattr(config, field, None) is not None}
    if getattr(config, "rope_parameters", None) and "rope_theta" in config.rope_parameters:
        values["rope.freq_base"] = config.rope_parameters["rope_theta"]
    for key, value in {**values, **(keys or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    arch = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    layers = values["block_count"]
    names = gguf.get_tensor_name_map(arch, layers)
    transposed = not FAMILIES[own.model_type].names.transposed
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            assert "inv_freq" in name or name.endswith(("attn.bias", "attn.masked_bias")), name
            continue
        values_there = x.detach().float().numpy()
        part = stored.split(".")[-2]
        if own.rotates_pairs and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            shape = values_there.shape
            values_there = values_there.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if own.norm_offset and part.endswith("norm"):
            values_there = values_there + np.float32(1)
        if transposed and values_there.ndim == 2 and stored.startswith("blk."):
            values_there = values_there.T
        values_there = np.ascontiguousarray(values_there)
        if kind is Kind.F32 or values_there.ndim < 2:
            writer.add_tensor(stored, values_there)
        else:
            writer.add_tensor(stored, packed(values_there, kind), raw_dtype=kind)
    finish(writer)
    return file


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(x: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of a tensor. Where gguf cannot quantise, random ones: every block with small, finite scales."""
    if kind is Kind.F16:
        return x.astype(np.float16)
    try:
        return gguf.quantize(x, kind)
    except NotImplementedError:
        pass
    rng = np.random.default_rng(x.size)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (x.size // block, size), dtype=np.uint8)
    scales = {
        Kind.Q4_K: [0, 2],
        Kind.Q5_K: [0, 2],
        Kind.Q6_K: [size - 2],
        Kind.Q3_K: [size - 2],
        Kind.Q2_K: [size - 4, size - 2],
    }
    for at in scales[kind]:
        drawn = (rng.random(len(blocks)) * 1e-3).astype(np.float16)
        blocks[:, at : at + 2] = drawn.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*x.shape[:-1], -1)


KINDS = [Kind[name] for name in ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_dequantised_to_the_bits_of_gguf(kind: Kind, tmp_path: Path) -> None:
    file = write(made("qwen2", **WIDE), tmp_path / "x.gguf", "qwen2", kind=kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

    def there(name: str) -> torch.Tensor:
        assert stored[name].tensor_type is kind
        return torch.from_numpy(np.array(gguf.dequantize(stored[name].data, kind), dtype=np.float32))

    for dtype in (torch.float32, torch.bfloat16):
        ours = load(file, dtype).state_dict()
        assert torch.equal(ours["embed"], there("token_embd.weight").to(dtype))
        assert torch.equal(ours["unembed.weight"], there("output.weight").T.to(dtype))
        joined = torch.cat([there(f"blk.0.attn_{part}.weight") for part in "qkv"])
        assert torch.equal(ours["blocks.0.attn.qkv.weight"], joined.T.to(dtype))
        assert torch.equal(ours["blocks.0.mlp.down.weight"], there("blk.0.ffn_down.weight").T.to(dtype))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_our_reader_and_that_of_transformers_agree(kind: Kind, tmp_path: Path) -> None:
    """Weights, and by `check` every layer's output."""
    file = write(made("llama", **WIDE), tmp_path / "x.gguf", "llama", {"rope.dimension_count": 64, "vocab_size": 97}, kind=kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert weights_hash(load(file)) == weights_hash(load(theirs)) == weights_hash(load(file, check=True))


SMALLER = {**SMALL, "rope_parameters": ROPE, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 97, "n_embd": 36, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 50}
GEMMA = {**SMALLER, "head_dim": 8, "sliding_window": 7}
ROPES = {"full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {**ROPE, "rope_theta": 1e4}}
EXAMPLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture: model_type, config, further keys
    "llama": ("llama", {**SMALLER, "attention_bias": False}, {"vocab_size": 97, "rope.dimension_count": 6}),
    "qwen2": ("qwen2", SMALLER, {"rope.scaling.type": "none"}),
    "qwen3": ("qwen3", {**SMALLER, "head_dim": 10}, {"attention.key_length": 10, "attention.value_length": 10}),
    "gemma": ("gemma", {**SMALLER, "head_dim": 8}, {"attention.key_length": 8, "attention.value_length": 8}),
    "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 8}, {"attention.key_length": 8}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "query_pre_attn_scalar": 8, "rope_parameters": ROPES},
        {"attention.key_length": 8, "rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ("phi3", {**SMALLER, "sliding_window": 9}, {"rope.dimension_count": 6}),
    "olmo2": ("olmo2", SMALLER, {}),
    "granite": ("granite", {**SMALLER, "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5}, {}),
    "starcoder2": ("starcoder2", SMALLER, {}),
    "gpt2": ("gpt2", GPT2, {}),
}


@pytest.mark.parametrize(
    "architecture, tied",
    swept(
        [(name, tied) for name in EXAMPLES for tied in (True, False) if tied or name not in ("gemma", "gemma2")],
        ("llama", True),
        ("llama", False),
        ("gpt2", True),
        ("gemma2", True),
        ("olmo2", True),
    ),  # always tied
)
def test_every_architecture_loads_to_the_model_that_was_written(architecture: str, tied: bool, tmp_path: Path) -> None:
    """The config, and every weight: to the bit, except norms that llama.cpp stores one higher."""
    kind, config, keys = EXAMPLES[architecture]
    model = made(kind, **config, tie_word_embeddings=tied)
    ours, theirs = load(write(model, tmp_path / "x.gguf", architecture, keys)), load(model)
    assert ours.config == theirs.config
    for name, x in ours.state_dict().items():
        if ARCHITECTURES[architecture].norm_offset and (".ln" in name or "norm" in name or "ln_final" in name):
            torch.testing.assert_close(x, theirs.state_dict()[name], rtol=0, atol=2e-7)
        else:
            assert torch.equal(x, theirs.state_dict()[name]), name


def test_every_architecture_has_an_example() -> None:
    assert EXAMPLES.keys() == ARCHITECTURES.keys()


def test_the_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    """llama.cpp stores what frequencies are divided by as a tensor, which transformers' reader ignores."""
    file = tmp_path / "x.gguf"
    model = copy.deepcopy(hugging_face("llama3"))
    width = model.config.hidden_size // model.config.num_attention_heads
    plain = 1.0 / 5000.0 ** (torch.arange(0, width, 2).float() / width)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8.0), "the control: some frequencies change"
    real = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        real(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write(model, file, "llama")
    ours, theirs = load(file), load(model)
    assert ours.config.rope.divisors and ours.config.max_positions == theirs.config.max_positions
    path = [int(token) for token in torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(0))]
    logits = [Engine(each).prompt(path).logits() for each in (ours, theirs)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


SIZES = {
    "context_length": 4096,
    "embedding_length": 5376,
    "block_count": 4,
    "feed_forward_length": 64,
    "attention.head_count": 32,
    "attention.head_count_kv": 16,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 512,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""keys of Gemma-3-27B"""


def config(architecture: str, keys: dict[str, Any], **factors: list[float]) -> ModelConfig:
    """Our config of a file with these keys, without its tensors."""
    read = (*ARCHITECTURES[architecture].fields, *keys, "attention.key_length", "attention.value_length")
    known = {key: value for key, value in {**SIZES, **keys}.items() if key in read}
    raw = text_config(config_of(architecture, known, 97, ["token_embd.weight"], factors))
    return FAMILIES[ARCHITECTURES[architecture].model_type].config(raw)


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_models_with_27_billion_weights(architecture: str, largest: int) -> None:
    """Files do not store the scale of queries: d_model / heads in the largest models, the width of a head in others."""
    for layers, scale in ((largest, (5376 // 32) ** -0.5), (largest - 1, 128**-0.5), (26, 128**-0.5)):
        assert config(architecture, {"block_count": layers}).attn_scale == pytest.approx(scale, rel=1e-12)


def test_rotations_by_kind_of_layer() -> None:
    """Gemma-3: bases of global and local layers, and a factor that only global ones have."""
    found = config("gemma3", {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert (found.rope.theta, found.rope.scaling, found.rope.factor) == (1e6, "linear", 8.0)
    assert found.local_rope is not None and (found.local_rope.theta, found.local_rope.scaling) == (10000.0, "none")
    own = config("gemma3", {"rope.freq_base": 1e6, "rope.freq_base_swa": 5e3}).local_rope
    assert own is not None and own.theta == 5e3


def test_long_factors_of_phi_3() -> None:
    """LongRoPE: the short factors divide frequencies, up to the original length; cos and sin have a factor of their own."""
    keys = {
        "context_length": 131072,
        "embedding_length": 4096,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.19,
    }
    short, long = [1.0 + i / 64 for i in range(64)], [2.0 + i for i in range(64)]
    found = config("phi3", keys, rope_factors_short=short, rope_factors_long=long)
    assert found.rope.divisors == tuple(short) and found.rope.attention_factor == 1.19 and found.max_positions == 4096
    with pytest.raises(BadWeights, match=r"(?s)GGUF file of phi3 do not fit .*length 64, got 63"):
        config("phi3", keys, rope_factors_short=short[1:], rope_factors_long=long)
    part = config("phi3", {**keys, "rope.dimension_count": 96}, rope_factors_short=short[:48], rope_factors_long=long[:48])
    assert part.rotary_dim == 96 and found.rotary_dim == 128
    llama = config("llama", {"embedding_length": 4096, "rope.scaling.attn_factor": 1.19}, rope_freqs=long)
    assert llama.rope.divisors == tuple(long) and llama.rope.attention_factor == 1.0 and llama.max_positions == 4096


@pytest.mark.parametrize("begins", [True, False])
def test_a_lone_file_brings_its_tokenizer(begins: bool, tmp_path: Path) -> None:
    """Texts can be given without any other file, and begin with the special token if the file says so."""
    model, words = made("llama", **WIDE), ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    real = gguf.GGUFWriter.write_header_to_file

    def with_words(writer: Any) -> None:
        names = words + [f"<{number}>" for number in range(len(words), model.config.vocab_size)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(names)
        writer.add_token_scores([-float(number) for number in range(len(names))])
        writer.add_token_types([2, 3, 3, *[1] * (len(names) - 3)])
        for name, number in (("bos", 1), ("eos", 2), ("unk", 0)):
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(begins)
        real(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_words)
        file = write(model, tmp_path / "model.gguf", "llama")
    tokens = Engine.load(file, check=False).prompt("ab a").tokens
    assert tokens == [1] * begins + [8, 6]
    with pytest.MonkeyPatch.context() as patch:  # somebody's own tokenizer takes the place of one that cannot be read
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: {}["no such kind"])
        with pytest.raises(UnsupportedModel, match=r"no such kind.*Give another by tokenizer="):
            Engine.load(file, check=False)
        assert Engine.load(file, check=False, tokenizer=WordTokenizer(["a", "b"])).prompt([1, 8]).length == 2


def fields(architecture: str, tensors: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """The Hugging Face fields of a file with eight heads of width 16; `__` stands for a dot. None leaves a key out."""
    sizes = {
        "context_length": 256, "embedding_length": 128, "block_count": 3, "feed_forward_length": 200, "attention.head_count": 8,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-4,
        "attention.sliding_window": 64, "attention.scale": 0.5, "embedding_scale": 3.0, "residual_scale": 0.25,
        "logit_scale": 4.0,
    }  # fmt: skip
    known = {key: value for key, value in sizes.items() if key in ARCHITECTURES[architecture].fields}
    given = known | {key.replace("__", "."): value for key, value in keys.items()}
    held = {key: value for key, value in given.items() if value is not None}
    return dict(config_of(architecture, held, 97, ["token_embd.weight", *tensors], {}).to_dict())


PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("architecture", "keys", "wanted"),
    [
        ("llama", {}, {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": PLAIN, "tie_word_embeddings": True}),
        ("llama", {"attention__head_count_kv": None}, {"num_key_value_heads": 8}),
        ("llama", {"attention__key_length": 20, "attention__value_length": 20}, {"head_dim": 20}),
        ("llama", {"rope__freq_base": 5e5}, {"rope_parameters": PLAIN | {"rope_theta": 5e5}}),
        ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"rope_parameters": {**PLAIN,
        "rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, {"rope_parameters": PLAIN}),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 2.0}, {"rope_parameters": PLAIN}),
        ("llama", {"tensors": ("output.weight",)}, {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}),
        ("llama", {"tensors": ("blk.0.attn_q.bias",)}, {"attention_bias": True, "mlp_bias": False}),
        ("llama", {"tensors": ("blk.0.ffn_up.bias",)}, {"attention_bias": False, "mlp_bias": True}),
        ("granite", {}, {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.25,
        "logits_scaling": 4.0}),
        ("gemma2", {}, {"sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16}),
        ("gemma2", {"attention__sliding_window": None, "attn_logit_softcapping": 7.0}, {"sliding_window": 4096,
        "attn_logit_softcapping": 7.0}),
        ("gemma3", {}, {"final_logit_softcapping": None, "rope_parameters": {"full_attention": PLAIN,
        "sliding_attention": PLAIN}}),
        ("phi3", {"attention__sliding_window": None}, {"sliding_window": None}),
        ("phi3", {"rope__dimension_count": 8}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
        ("starcoder2", {"tensors": ("blk.0.attn_q.bias",)}, {"use_bias": True, "norm_epsilon": 1e-4}),
        ("gpt2", {}, {"n_positions": 256, "n_inner": 200, "layer_norm_epsilon": 1e-4, "tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_keys_become_fields(architecture: str, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Also those that a file leaves out."""
    found = fields(architecture, **keys)
    assert {name: found[name] for name in wanted} == wanted and found["vocab_size"] == 97
    lacking = next(key for key in ARCHITECTURES[architecture].fields if key == "context_length")
    with pytest.raises(BadWeights, match=rf"lacks {architecture}\.{lacking}"):
        fields(architecture, **keys | {lacking: None})
    with pytest.raises(UnsupportedModel, match=r"with another .* in each layer"):
        fields(architecture, **keys | {"feed_forward_length": [200, 200, 100]})


def test_an_adapter_is_merged_into_a_gguf_file(tmp_path: Path) -> None:
    trained("llama", {"r": 4, "target_modules": ["q_proj", "down_proj"]}, tmp_path / "base", tmp_path / "adapter")
    file = write(hugging_face("llama"), tmp_path / "x.gguf", "llama")
    ours, theirs = (load(base, adapter=tmp_path / "adapter") for base in (file, tmp_path / "base"))
    assert weights_hash(ours) == weights_hash(theirs) != weights_hash(load(file))
    assert ours.config.adapter == theirs.config.adapter


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that nobody reads": ({"expert_count": 8}, r"llama with expert_count = 8 are not supported"),
    "scaling": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rotary scaling 'yarn'"),
    "part of a head": ({"rope.dimension_count": 4}, "rotate 4 of 6 dimensions"),
    "two widths": ({"attention.value_length": 5}, "keys and values of two widths"),
    "not causal": ({"attention.causal": False}, "attention.causal"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_keys_that_change_the_model_are_named(kind: str, tmp_path: Path) -> None:
    keys, text = REFUSED[kind]
    model = made("llama", **SMALLER)
    load(write(model, tmp_path / "good.gguf", "llama", {"expert_count": 0, "attention.causal": True}))
    with pytest.raises(UnsupportedModel, match=text):
        load(write(model, tmp_path / "bad.gguf", "llama", keys))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(file), "falcon")
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), dtype=np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModel, match=r"'falcon' are not supported. Supported: gemma, .*Hugging Face folder"):
        load(file)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), dtype=np.float32))
    finish(writer)
    with pytest.raises(BadWeights, match=r"lacks llama\.attention\.head_count"):
        load(file)
    writer = gguf.GGUFWriter(str(file), "llama")
    finish(writer)
    with pytest.raises(BadWeights, match="no tensor token_embd"):
        load(file)
    whole = write(made("llama", **SMALLER), tmp_path / "whole.gguf", "llama").read_bytes()
    file.write_bytes(whole[: len(whole) - 2000])
    with pytest.raises(BadWeights, match=r"x\.gguf"):
        load(file)


def test_a_tensor_that_the_family_does_not_have_is_named(tmp_path: Path) -> None:
    model = made("llama", **SMALLER)
    real = gguf.GGUFWriter.write_header_to_file

    def with_more(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(6, dtype=np.float32))
        real(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_more)
        write(model, tmp_path / "x.gguf", "llama")
    with pytest.raises(BadWeights, match=r"1 tensors that a llama model does not have, such as blk\.0\.attn_sinks\.weight"):
        load(tmp_path / "x.gguf")


# ---- shards ----------------------------------------------------------------------------------------------------------
# Weights go from files to the model one by one, in every dtype, with tied and untied heads.

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def sharded(folder: Path, name: str = "llama") -> Path:
    hugging_face(name).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def most_alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its entry is the largest number of tensors from files that were in memory at once."""
    read, alive, most = Shards.read, set[int](), [0]

    def counted(self: Shards, tensor: str) -> Tensor:
        values = read(self, tensor).clone().numpy()  # lives as long as any view of it
        key = id(values)
        alive.add(key)
        weakref.finalize(values, alive.discard, key)
        most[0] = max(most[0], len(alive))
        return torch.from_numpy(values)

    monkeypatch.setattr(Shards, "read", counted)
    return most


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2", "gemma2"])
def test_few_source_tensors_are_alive_at_a_time(name: str, tmp_path: Path, most_alive: list[int]) -> None:
    """What was read is freed before much more is read: the files are never in memory as a whole."""
    model = load(sharded(tmp_path, name))
    assert most_alive[0] <= 6, "q, k and v, and what was read before them"
    assert_same(model, load(hugging_face(name)))


def test_tensors_that_are_collected_first_are_noticed(tmp_path: Path, most_alive: list[int]) -> None:
    """The control."""
    config = load(hugging_face("gpt2")).config
    files = Shards(sharded(tmp_path, "gpt2"))
    tensors = FAMILIES["gpt2"].tensors(config, Source(files.names, files.read).get)
    assert most_alive[0] > 20 and tensors


def test_files_that_are_mapped_anew_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = shards._opened

    def counted(file: Path) -> Any:
        opened.append(file)
        return real(file)

    monkeypatch.setattr(shards, "_opened", counted)
    before = load(sharded(tmp_path))
    few = len(opened)
    monkeypatch.setattr(shards, "MAPPED_BYTES", 4096)
    assert_same(load(tmp_path), before)
    assert len(opened) - few > few, "files were opened again"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_checkpoints_load_to_the_numbers_that_they_store(stored: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = copy.deepcopy(hugging_face("llama3" if tied else "llama")).to(stored)
    model.save_pretrained(tmp_path)
    assert (HEAD in load_file(tmp_path / WEIGHTS_FILE)) is not tied
    loaded = load(tmp_path)
    assert loaded.config.tied_embeddings is tied
    assert_same(loaded, load(copy.deepcopy(model).float()))
    narrow = load(tmp_path, stored)
    for name, x in narrow.state_dict().items():
        assert x.dtype == stored and torch.equal(x.float(), loaded.state_dict()[name]), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_of_several_dtypes_loads(tied: bool, tmp_path: Path) -> None:
    """Norms in float32, one of q, k and v in another dtype, the head in a third one."""
    model = copy.deepcopy(hugging_face("llama3" if tied else "llama")).to(torch.float16).float()  # numbers of float16
    model.save_pretrained(tmp_path)
    whole = load(tmp_path)

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "q_proj" in name or "gate_proj" in name or name in (EMBED, HEAD):
                tensors[name] = tensors[name].half()
        if tied:  # a second copy of the embedding, in another dtype
            tensors[HEAD] = tensors[EMBED].double()

    edit(tmp_path, narrow)
    assert_same(load(tmp_path), whole)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].double() + 1e-9}))
    assert not load(tmp_path).config.tied_embeddings, "the control: a head that differs, if only in float64"


def test_a_copy_of_the_embedding_is_tied_and_another_head_is_not(tmp_path: Path) -> None:
    hugging_face_folder("llama3", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    assert_same(load(tmp_path), load(hugging_face("llama3")))
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED] * 2}))
    untied = load(tmp_path)
    assert not untied.config.tied_embeddings
    assert torch.equal(untied.unembedding, 2 * untied.embed)


@pytest.mark.parametrize("shape", [(3, 5), (700, 1030), (1, 1), (4, 0), (9,), (3, 4, 5)])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
def test_a_transposed_copy_has_the_numbers_of_its_source(shape: tuple[int, ...], stored: torch.dtype) -> None:
    x = torch.randn(shape).to(stored)
    for source in (x, x.transpose(-1, -len(shape)), x.transpose(-1, 0)[1:], x[::2], x.flip(0)[..., ::2]):
        copied = filler._copied(source, torch.float32, "cpu")
        assert copied.is_contiguous() and torch.equal(copied, source.float())
        assert copied.data_ptr() != source.data_ptr() or copied.numel() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found_anywhere(value: float) -> None:
    for place in (0, 511, 99_999):
        x = torch.randn(100_000)
        assert filler._finite(x) and filler._finite(x.bfloat16())
        x[place] = value
        assert not filler._finite(x) and not filler._finite(x.bfloat16())


def test_a_device_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(hugging_face("llama")).config

    def full(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    into = Filler(config, torch.float32)
    monkeypatch.setattr(filler, "_copied", full)
    with pytest.raises(NotEnoughMemory, match=r"cpu has no memory for embed in torch.float32.*9 GiB.*smaller model"):
        into["embed"] = torch.zeros(config.vocab_size, config.d_model)
    into._held = {str(i): SimpleNamespace(nbytes=400_000_000) for i in range(4)}  # type: ignore[assignment]
    with pytest.raises(NotEnoughMemory, match=r"after 1\.6 GB of weights"):
        into["embed"] = torch.zeros(config.vocab_size, config.d_model)
    monkeypatch.setattr(filler, "_copied", lambda *args: raised(RuntimeError("another fault")))
    with pytest.raises(RuntimeError, match="another fault"):
        into["embed"] = torch.zeros(config.vocab_size, config.d_model)


def raised(error: Exception) -> Tensor:
    raise error


@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_a_tensor_that_is_not_read_is_an_error_if_it_holds_a_number(numbers: int, tmp_path: Path) -> None:
    """One is enough; a tensor without any changes nothing."""
    model = hugging_face("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra": torch.zeros(numbers)}, tmp_path / "model.safetensors", {"format": "pt"})
    if numbers:
        with pytest.raises(BadWeights, match=r"1 tensors that a llama model does not have, such as model\.layers\.0\.extra"):
            load(tmp_path)
    else:
        assert weights_hash(load(tmp_path)) == weights_hash(load(model))


def test_the_engine_loads_shards_like_one_file(tmp_path: Path) -> None:
    """End to end: the fingerprint and the tokens do not depend on how the weights are stored."""
    one, many = tmp_path / "one", sharded(tmp_path / "many")
    hugging_face_folder("llama", one)
    engines = [Engine.load(folder) for folder in (one, many)]
    assert engines[0].fingerprint == engines[1].fingerprint
    assert len({tuple(engine.prompt([1, 2, 3]).generate(5).tokens) for engine in engines}) == 1
    tensors = load_file(one / WEIGHTS_FILE)
    tensors[EMBED][0, 0] += 1
    save_file(tensors, one / WEIGHTS_FILE)
    assert Engine.load(one).fingerprint != engines[1].fingerprint
    assert json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights_hash(load(many)) == engines[1].fingerprint.weights
