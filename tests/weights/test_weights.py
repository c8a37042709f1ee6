"""Every source loads to the same bits. Every fault of a source is named, with what to do."""

import copy
import json
import operator
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from replaylens import Engine
from replaylens.engine.errors import BadConfig, BadWeights, EngineError, UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof import fingerprint
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.thinking.core import ThinkingEngine
from replaylens.weights.loading import CONFIG_FILE, WEIGHTS_FILE, build, load, save
from replaylens.weights.opening import load_text
from tests.devices import swept
from tests.engine.passes.packed import logits, sequences
from tests.families import NAMES, core, hugging_face, hugging_face_folder
from tests.mixtures import MIXTURES
from tests.replay.bridges import bridge, saved_tokenizer

families = pytest.mark.parametrize("name", core(NAMES))


def assert_same(a: Decoder, b: Decoder) -> None:
    """Same config, same bits in every tensor, same hash, same bits in the logits."""
    assert a.config == b.config
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    assert weights_hash(a) == weights_hash(b)
    for x, y in zip(logits(a, sequences((3, 12))), logits(b, sequences((3, 12))), strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Hugging Face folder, to damage."""
    return hugging_face_folder("llama", tmp_path / "llama")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One of our checkpoints, to damage."""
    save(load(hugging_face("llama")), tmp_path / "ours")
    return tmp_path / "ours"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the folder's weights after `change` is applied to the dictionary of tensors."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Good sources


@families
def test_own_checkpoint_round_trips_to_identical_bits(name: str, tmp_path: Path) -> None:
    """save then load is the identity, and saving again writes the same bytes."""
    model = load(hugging_face(name))
    save(model, tmp_path / "a")
    again = load(tmp_path / "a")
    assert_same(model, again)
    save(again, tmp_path / "b")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_round_trip_keeps_the_bits_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """A model in another dtype is saved in that dtype and loads in it."""
    model = load(hugging_face("qwen3"), dtype)
    save(model, tmp_path)
    assert_same(model, load(tmp_path, dtype))


@families
def test_folder_is_the_live_model(name: str, tmp_path: Path) -> None:
    """A Hugging Face folder, in one file or several, gives the bits of the model that wrote it."""
    live = load(hugging_face(name))
    hugging_face_folder(name, tmp_path / "one")
    hugging_face(name).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same(load(tmp_path / "one"), live)
    assert_same(load(str(tmp_path / "many")), live)


@pytest.mark.parametrize("name", swept(["gpt2", "llama3", "gemma2", "gemma3"], "gpt2"))
def test_folder_of_a_bare_transformer_loads(name: str, tmp_path: Path) -> None:
    """Tied models are often published without the head, and their tensors without its prefix (GPT-2's own files)."""
    copy.deepcopy(hugging_face(name)).base_model.save_pretrained(tmp_path)  # writes into the shared config
    assert_same(load(tmp_path), load(hugging_face(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4-moe", "dots1"])
def test_no_shared_experts_are_tensors_without_values(name: str, tmp_path: Path) -> None:
    """transformers makes a shared expert of width 0, whose tensors hold nothing. One that holds something is refused."""
    import transformers as tf

    kind, fields = MIXTURES[name]
    torch.manual_seed(1)
    config = getattr(tf, f"{kind}Config")(**{**fields, "n_shared_experts": 0})
    live = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    live.config._experts_implementation = "eager"  # the faster one needs rows of a multiple of 16 bytes
    tokens = torch.tensor([[3, 14, 15, 92, 6]])
    ours = Engine.load(live, check=False).prompt(tokens[0].tolist()).logits()
    torch.testing.assert_close(ours, live(tokens).logits[0, -1].detach(), rtol=1e-4, atol=1e-5)
    live.save_pretrained(tmp_path)
    assert_same(load(tmp_path), load(live))
    down = "model.layers.1.mlp.shared_experts.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({down: torch.ones(tensors[down].shape[0], 1)}))
    with pytest.raises(BadWeights, match=rf"holds 1 tensors .* such as {re.escape(down)}\."):
        load(tmp_path)


def test_constants_of_older_checkpoints_are_no_weights(tmp_path: Path) -> None:
    """Causal masks and rotary tables stored by old versions are ignored without complaint."""
    hugging_face_folder("gpt2", tmp_path)
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.ones(())}
    edit(tmp_path, lambda tensors: tensors.update(masks))
    assert_same(load(tmp_path), load(hugging_face("gpt2")))


def refuse(*given: Any, **options: Any) -> Any:
    raise AssertionError("transformers was asked to read a config")


def test_a_config_is_normalised_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes import torch's compiler. What is kept is that of an equal file; a damaged copy is not read."""
    from transformers import AutoConfig

    monkeypatch.setenv("REPLAYLENS_CACHE", str(tmp_path / "cache"))
    before = load(llama)
    with monkeypatch.context() as patched:
        patched.setattr(AutoConfig, "from_pretrained", refuse)
        assert_same(load(llama), before)
        edit_json(llama / "config.json", rms_norm_eps=0.125)
        with pytest.raises(BadConfig, match="was asked to read"):
            load(llama)
    assert load(llama).config.norm_eps == 0.125
    for kept in (tmp_path / "cache" / "configs").iterdir():
        kept.write_text(kept.read_text().replace("0.125", "0.25"))
    assert load(llama).config.norm_eps == 0.125


def test_a_tokenizer_is_that_of_transformers_without_its_config(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    theirs = saved_tokenizer(str(llama))
    with monkeypatch.context() as patched:
        patched.setattr(AutoConfig, "from_pretrained", refuse)
        ours = load_text(llama).tokenizer
        assert type(ours) is type(theirs) and ours.encode("w5 w7") == theirs.encode("w5 w7") == [5, 7]
        assert ours.eos_token_id == theirs.eos_token_id and ours.get_vocab() == theirs.get_vocab()
        edit_json(llama / "tokenizer_config.json", tokenizer_class=None)
        with pytest.raises(AssertionError, match="was asked to read"):
            load_text(llama)
    assert load_text(llama).encode("w5 w7") == [5, 7]


def test_a_decoder_is_a_source_and_is_copied() -> None:
    """Loading from a decoder gives an equal model with its own weights."""
    first = load(hugging_face("llama"))
    second = load(first)
    assert_same(first, second)
    second.embed.zero_()
    assert not torch.equal(first.embed, second.embed)
    assert all(not p.requires_grad for p in second.parameters())


def test_loading_copies_the_live_model() -> None:
    """Changes to the loaded model do not reach the Hugging Face model."""
    model = load(hugging_face("gpt2"))
    for parameter in model.parameters():
        parameter.zero_()
    assert bool(hugging_face("gpt2").transformer.wte.weight.any())
    assert weights_hash(load(hugging_face("gpt2"))) != weights_hash(model)


@families
def test_bridge_is_the_live_model(name: str) -> None:
    """A TransformerBridge gives the bits of the wrapped model."""
    assert_same(load(bridge(name)), load(hugging_face(name)))


def test_bridge_with_processed_weights_is_refused() -> None:
    """With norms folded into products, the weights are another model's: they are refused."""
    processed = bridge.__wrapped__("gpt2")  # a separate bridge, since the test modifies it
    processed.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(UnsupportedModel, match="no_processing=True"):
        load(processed)
    unprocessed = bridge.__wrapped__("gpt2")
    unprocessed.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert weights_hash(load(unprocessed)) == weights_hash(load(hugging_face("gpt2")))


def test_hash_tells_any_difference() -> None:
    """One changed bit of one weight, or another dtype, gives another hash."""
    model = load(hugging_face("llama"))
    before = weights_hash(model)
    model.embed[0, 0] = torch.nextafter(model.embed[0, 0], torch.tensor(9.0))
    assert weights_hash(model) != before
    assert weights_hash(load(hugging_face("llama"), torch.bfloat16)) != before


# GGUF

GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write_gguf(model: Any, file: Path) -> None:
    """A Llama as llama.cpp stores it: q and k with each head's halves interleaved."""
    from gguf import GGUFWriter

    config, state = model.config, {name: x.detach().numpy() for name, x in model.state_dict().items()}
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, hf in GGUF_NAMES.items():
            x = state[f"model.layers.{layer}.{hf}.weight"]
            if n := heads.get(theirs):
                x = x.reshape(n, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(x))
    for theirs, hf in {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}.items():
        writer.add_tensor(f"{theirs}.weight", state[f"{hf}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_is_made_ahead_may_lie_in_two_places_in_turn() -> None:
    """As the slabs through which weights leave a GPU: none is written again before it has been read."""

    def made() -> Iterator[list[int]]:
        places: list[list[int]] = [[], []]
        for number in range(50):
            places[number % 2][:] = [number]
            yield places[number % 2]

    def read(items: Iterator[list[int]]) -> Iterator[int]:
        for item in items:
            time.sleep(0.002)  # by now the next one has been made
            yield item[0]

    assert list(read(fingerprint._ahead(made()))) == list(range(50))


def test_gguf_is_the_live_model(tmp_path: Path) -> None:
    """A GGUF file in float32 gives the bits of the model it was written from."""
    write_gguf(hugging_face("llama"), tmp_path / "tiny.gguf")
    loaded, live = load(tmp_path / "tiny.gguf"), load(hugging_face("llama"))
    assert weights_hash(loaded) == weights_hash(live)


def test_gguf_that_is_none_is_named(tmp_path: Path) -> None:
    """A missing file, and a file that is not GGUF."""
    with pytest.raises(UnsupportedModel, match=r"none\.gguf does not exist"):
        load(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all" * 10)
    with pytest.raises(BadWeights, match=r"bad\.gguf"):
        load(tmp_path / "bad.gguf")


def test_gguf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where only the core was copied."""
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match="pip install gguf"):
        load(tmp_path / "x.gguf")


# Bad sources: tensors

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"
WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(UP), UP),
    "extra": (lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}), "o_proj.bias"),
    "wrong shape": (lambda t: t.update({NORM: torch.ones(31)}), r"blocks\.2\.ln1\.weight has shape \(31,\)"),
    "cannot be joined": (lambda t: t.update({UP: torch.ones(64, 31)}), UP),
    "NaN": (lambda t: t[NORM].__setitem__(3, float("nan")), r"blocks\.2\.ln1\.weight holds NaN"),
    "infinity": (lambda t: t[UP].__setitem__((3, 3), float("inf")), r"blocks\.1\.mlp\.up\.weight holds NaN or inf"),
}


@pytest.mark.parametrize("fault", WRONG_TENSORS)
def test_wrong_tensor_in_a_folder_is_named(fault: str, llama: Path) -> None:
    """Each fault in a Hugging Face folder's tensors raises BadWeights with the tensor's name and a hint."""
    change, text = WRONG_TENSORS[fault]
    load(llama)  # the control: the undamaged folder loads
    edit(llama, change)
    with pytest.raises(BadWeights, match=text) as caught:
        load(llama)
    assert "?" in str(caught.value) or "Check" in str(caught.value)


OWN_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("embed"), r"embed is missing \(shape \(97, 32\)\)"),
    "extra": (lambda t: t.update(more=torch.ones(2)), "more is not part of this model"),
    "wrong shape": (lambda t: t.update(embed=torch.ones(97, 31)), r"embed has shape \(97, 31\)"),
    "NaN": (lambda t: t["embed"].__setitem__((0, 0), float("nan")), "embed holds NaN"),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_wrong_tensor_in_a_checkpoint_is_named(fault: str, checkpoint: Path) -> None:
    """The same for one of our checkpoints."""
    change, text = OWN_FAULTS[fault]
    load(checkpoint)
    edit(checkpoint, change)
    with pytest.raises(BadWeights, match=text):
        load(checkpoint)


def test_all_faults_are_told_at_once(checkpoint: Path) -> None:
    """One run names all faulty tensors, so that they can be fixed together."""
    edit(checkpoint, lambda t: (t.pop("embed"), t.pop("ln_final.weight"), t.update(more=torch.ones(1))))
    with pytest.raises(BadWeights) as caught:
        load(checkpoint)
    assert all(word in str(caught.value) for word in ("embed is missing", "ln_final.weight is missing", "more is not"))


def test_overflow_of_a_narrow_dtype_is_named(checkpoint: Path) -> None:
    """A weight that float32 holds and float16 does not is refused in float16, and only there."""
    edit(checkpoint, lambda t: t["embed"].__setitem__((0, 0), 1e6))
    load(checkpoint)
    load(checkpoint, torch.bfloat16)
    with pytest.raises(BadWeights, match="embed holds NaN or infinity"):
        load(checkpoint, torch.float16)


# Bad sources: files


@pytest.mark.parametrize("kind", ["llama", "checkpoint"])
def test_truncated_weights_are_named(kind: str, request: pytest.FixtureRequest) -> None:
    """Half a safetensors file, as after an interrupted copy."""
    file = request.getfixturevalue(kind) / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BadWeights, match=rf"{WEIGHTS_FILE} is not a readable safetensors file"):
        load(file.parent)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A sharded folder with one file missing."""
    hugging_face("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadWeights, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("where", ["../llama/model.safetensors", "/etc/hostname", "sub/model.safetensors", ".."])
def test_index_may_not_point_outside_its_folder(where: str, llama: Path, tmp_path: Path) -> None:
    """An index is untrusted data: it reaches only files beside it, even if the target would fit."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(llama / "config.json", folder)
    weight_map = dict.fromkeys(load_file(llama / WEIGHTS_FILE), where)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadWeights, match=r"outside its folder|not a readable safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_broken_index_is_named(text: str, llama: Path) -> None:
    """A file that is not an index."""
    (llama / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadWeights, match=r"model\.safetensors\.index\.json"):
        load(llama)


class Explodes:
    """Unpickling it fails the test."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return pytest.fail, ("a pickle was opened",)


def test_pickles_are_never_opened(llama: Path) -> None:
    """A folder whose weights are only a pickle is refused, and the pickle is not opened."""
    (llama / WEIGHTS_FILE).unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Explodes()))
    with pytest.raises(BadWeights, match="Only safetensors checkpoints are read"):
        load(llama)


# Bad sources: configs and kinds


@pytest.mark.parametrize("text", ["{", "", "[1]", "null"])
def test_corrupt_hugging_face_config_is_named(text: str, llama: Path) -> None:
    """A config.json that is not a JSON object."""
    (llama / "config.json").write_text(text)
    with pytest.raises(BadConfig, match=r"config\.json.*Copy it again"):
        load(llama)


def test_config_of_wrong_types_is_named(llama: Path) -> None:
    """Valid JSON with a word in place of a number."""
    edit_json(llama / "config.json", hidden_size="wide")
    with pytest.raises(EngineError, match=r"config\.json"):
        load(llama)


def test_config_of_another_size_is_named(llama: Path) -> None:
    """A config that belongs to other weights: the error gives both shapes."""
    edit_json(llama / "config.json", vocab_size=98)
    with pytest.raises(BadWeights, match=r"embed has shape \(97, 32\), the config asks for \(98, 32\)"):
        load(llama)


OWN_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown field": (lambda raw: raw.update(widht=3), "widht"),
    "missing field": (lambda raw: raw.pop("d_model"), "d_model"),
    "unknown rotary field": (lambda raw: raw["rope"].update(thta=3), "thta"),
    "no layers": (lambda raw: raw.update(num_layers=0), "num_layers must be at least 1, not 0"),
    "a word for a number": (lambda raw: raw.update(d_mlp="wide"), "malformed"),
    "odd rotary": (lambda raw: raw.update(rotary_dim=7), "rotary_dim 7 must be even"),
    "uneven groups": (lambda raw: raw.update(num_kv_heads=3), "not a multiple of num_kv_heads 3"),
    "windows for other layers": (lambda raw: raw.update(windows=[7]), "windows has 1 entries for 3 layers"),
}


@pytest.mark.parametrize("fault", OWN_CONFIGS)
def test_wrong_own_config_is_named(fault: str, checkpoint: Path) -> None:
    """Each fault of our own config file is a BadConfig with the field's name."""
    change, text = OWN_CONFIGS[fault]
    raw = json.loads((checkpoint / CONFIG_FILE).read_text())
    change(raw)
    (checkpoint / CONFIG_FILE).write_text(json.dumps(raw))
    with pytest.raises(BadConfig, match=text):
        load(checkpoint)


@pytest.mark.parametrize("text", ["{", "", "[1]", "null"])
def test_corrupt_own_config_is_named(text: str, checkpoint: Path) -> None:
    """Our config file is not a JSON object."""
    (checkpoint / CONFIG_FILE).write_text(text)
    with pytest.raises(BadConfig, match="not a JSON object"):
        load(checkpoint)


@families
def test_config_text_round_trips(name: str) -> None:
    """to_json and from_json are inverse for every family's config."""
    config = load(hugging_face(name)).config
    assert ModelConfig.from_json(config.to_json()) == config
    assert ModelConfig.from_json(config.to_json()).to_json() == config.to_json()


@pytest.mark.parametrize(
    "model_type, why",
    [
        ("dbrx", "It needs a table for its mixture of experts. Closest: cohere."),
        ("t5", "It needs an encoder next to the decoder. Closest: gemma."),
        ("olmo4", "Closest by name: olmo, olmoe, olmo3."),
        ("no-such-model", "No family has a similar name."),
    ],
)
def test_unsupported_architecture_is_named(model_type: str, why: str, llama: Path) -> None:
    """An unsupported architecture: the error says what it lacks, what comes closest, and which are supported."""
    edit_json(llama / "config.json", model_type=model_type)
    with pytest.raises(UnsupportedModel, match=rf"'{model_type}' is not supported. {re.escape(why)} Known: arcee, .*qwen3"):
        load(llama)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"num_experts": 8}, r"asks for a mixture of experts \(num_experts = 8\). Closest by name: llama"),
        (
            {"kv_lora_rank": 16, "n_routed_experts": 4},
            r"asks for latent attention .*\(kv_lora_rank = 16\), and a mixture of experts \(n_routed_experts = 4\)",
        ),
        ({"state_size": 16, "auto_map": {"AutoModel": "m.M"}}, r"recurrent states .*code comes with the checkpoint"),
        ({"is_encoder_decoder": True}, r"asks for an encoder next to the decoder"),
        ({"is_encoder_decoder": False, "num_experts": 0}, r"'llama9' is not supported. Closest by name: llama"),
    ],
)
def test_the_config_of_an_unknown_architecture_tells_what_it_needs(fields: dict[str, Any], text: str, llama: Path) -> None:
    edit_json(llama / "config.json", model_type="llama9", **fields)
    with pytest.raises(UnsupportedModel, match=text):
        load(llama)


def test_unsupported_live_model_is_named() -> None:
    """The same for a model in memory."""
    import transformers

    config = transformers.XGLMConfig(d_model=16, num_layers=1, attention_heads=2, vocab_size=11, ffn_dim=8)
    with pytest.raises(UnsupportedModel, match=r"'xglm' is not supported. It needs sinusoidal positions. Closest: opt"):
        load(transformers.XGLMForCausalLM(config))


FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "mish"}, "activation 'mish'"),
    "rotary": ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rotary scaling 'axial'"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_unsupported_feature_is_named(feature: str, llama: Path) -> None:
    """A supported architecture with an unsupported part."""
    changes, text = FEATURES[feature]
    edit_json(llama / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=text):
        load(llama)


@pytest.mark.parametrize("source", [3, None, nn.Linear(2, 2), {"model_type": "llama"}], ids=lambda x: type(x).__name__)
def test_other_objects_are_refused(source: object) -> None:
    """The error lists what can be loaded."""
    with pytest.raises(UnsupportedModel, match=r"Give a name .* folder"):
        load(source)


def test_paths_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    """A missing folder, and a folder without a model."""
    with pytest.raises(UnsupportedModel, match="none does not exist"):
        load(tmp_path / "none")
    with pytest.raises(UnsupportedModel, match=r"holds neither replaylens\.json nor config\.json"):
        load(tmp_path)


def test_build_moves_the_tensors_out_so_that_weights_are_in_memory_once() -> None:
    source = load(hugging_face("llama"))
    tensors = dict(source.state_dict())
    built = build(source.config, tensors, torch.float32)
    assert tensors == {}
    assert_same(built, source)
    theirs = {x.data_ptr() for x in source.state_dict().values()}
    assert all(x.is_contiguous() and x.data_ptr() not in theirs for x in built.state_dict().values())


MEMORY = """
import sys
from pathlib import Path
from bench.harness import memory_mb
from replaylens import Engine
tiny, large = (Path(sys.argv[2]) / name for name in ("tiny", "large"))
if sys.argv[1] == "memory":
    from transformers import LlamaConfig, LlamaForCausalLM
    tiny, large = (LlamaForCausalLM(LlamaConfig.from_pretrained(folder)) for folder in (tiny, large))
first = Engine.load(tiny, cache_tokens=256)  # imports
before = memory_mb("VmRSS")
engine = Engine.load(large, cache_tokens=256)
print(memory_mb("VmRSS") - before)
engine.prompt([1, 2, 3]).generate(8)
print(memory_mb("VmHWM") - before)
print(sum(x.nbytes for x in engine.model.state_dict().values()) / 1e6)
"""


@pytest.mark.parametrize("source", ["folder", "memory"])
def test_a_load_holds_weights_once(source: str, tmp_path: Path) -> None:
    """And needs little more at its peak, eight tokens included. A model in memory is compared, too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=8, vocab_size=4096)
    for name, layers in (("tiny", 1), ("large", 5)):
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)).save_pretrained(tmp_path / name)
        Engine.load(tmp_path / name)  # the other process finds its config and what was examined
    command = [sys.executable, "-c", MEMORY, source, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    held, most, weights = map(float, done.stdout.split())
    assert weights > 64 and held < 1.15 * weights and most < 1.4 * weights, (held, most, weights)


def test_a_checked_load_leaves_the_source_and_owns_its_weights() -> None:
    model = copy.deepcopy(hugging_face("llama"))
    loaded = load(model, check=True)
    before = weights_hash(loaded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert weights_hash(loaded) == before


# ---- weights of an engine --------------------------------------------------------------------------------------------
# They cannot be changed: neither silently, nor with the old fingerprint.

CHANGES: dict[str, Callable[[Decoder], object]] = {
    "data of a packed weight": lambda model: model.blocks[0].mlp.up.weight.data.add_(1),
    "a packed weight": lambda model: model.blocks[0].mlp.up.weight.zero_(),
    "a row of a packed weight": lambda model: model.blocks[0].mlp.up.weight[0].zero_(),
    "an entry of a packed weight": lambda model: operator.setitem(model.blocks[0].attn.o.weight, (0, 0), 1.0),
    "as the output of an op": lambda model: torch.add(model.embed, 1, out=model.embed),
    "the table": lambda model: model.embed.data.mul_(2),
    "data of a norm": lambda model: model.ln_final.weight.data.mul_(2),
    "data that is replaced": lambda model: setattr(model.ln_final.weight, "data", torch.ones(model.config.d_model)),
    "a norm": lambda model: model.ln_final.weight.mul_(2),
    "a view of a norm": lambda model: model.state_dict()["ln_final.weight"].mul_(2),
    "a packed weight that is replaced": lambda model: setattr(model.blocks[0].mlp.up, "weight", nn.Parameter(torch.ones(2, 2))),
    "a norm that is replaced": lambda model: setattr(model.ln_final, "weight", nn.Parameter(torch.ones(model.config.d_model))),
    "a state dict": lambda model: model.load_state_dict(load(hugging_face("llama")).state_dict()),
    "a part of one": lambda model: model.load_state_dict({"blocks.0.mlp.up.weight": torch.zeros(1)}, strict=False),
    "another dtype": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_of_an_engine_are_refused(change: str) -> None:
    """Where they are changed, or at the next request, before a cached prompt is used."""
    engine = Engine.load(load(hugging_face("llama")))
    engine.prompt([1, 2, 3]).generate(1)
    with pytest.raises(BadWeights, match="weights of an engine were changed"):
        CHANGES[change](engine.model)
        engine.prompt([1, 2, 3]).generate(1)


@pytest.mark.parametrize("name", ["coin-plain", "coin-thinking"])
def test_changed_weights_get_no_fingerprint(name: str, tmp_path: Path) -> None:
    """They are hashed when somebody first asks, and rows computed before must not be named after others. Those of T and C
    count as well."""
    engine = Engine.load(name)
    run = engine.replay([[1, 2, 3, 4]], sites="S")
    with torch.no_grad():
        changed = engine.thinker.think.ln1.weight if isinstance(engine, ThinkingEngine) else next(engine.model.parameters())
        changed.mul_(2)
    for asks in (lambda: engine.fingerprint, lambda: run.save(tmp_path / "dump"), run.cite):
        with pytest.raises(BadWeights, match="weights of an engine were changed"):
            asks()


@pytest.mark.parametrize("hook", ["module", "before", "forward", "everywhere"])
def test_hooks_on_a_model_of_an_engine_are_refused(hook: str) -> None:
    """They would change what is computed under the same fingerprint. Once they are gone, the engine goes on."""
    engine = Engine.load(load(hugging_face("llama")))
    expected = engine.prompt([1, 2, 3]).generate(2).tokens
    mlp = engine.model.blocks[0].mlp
    if hook == "forward":
        mlp.forward = lambda *_: 0.0
    add = {
        "module": lambda: mlp.register_forward_hook(lambda m, x, y: y),
        "before": lambda: mlp.register_forward_pre_hook(lambda m, x: None),
        "everywhere": lambda: nn.modules.module.register_module_forward_hook(lambda m, x, y: y),
        "forward": lambda: None,
    }
    handle = add[hook]()
    try:
        with pytest.raises(BadWeights, match="use edits"):
            engine.prompt([1, 2, 3, 4])
    finally:
        mlp.__dict__.pop("forward", None) if handle is None else handle.remove()
    assert engine.prompt([1, 2, 3]).generate(2).tokens == expected


def test_weights_of_an_engine_made_from_a_decoder_are_watched() -> None:
    """Its caller holds them. Negative control: what changes no weight is not refused."""
    model = load(hugging_face("llama"))
    engine = Engine(model)
    model.eval().requires_grad_(False).to("cpu")
    engine.prompt([1, 2, 3]).generate(1)
    model.blocks[0].mlp.up.weight.add_(1)
    with pytest.raises(BadWeights, match="call Engine"):
        engine.prompt([1, 2, 3])


@pytest.mark.parametrize("name", swept(["llama", "gpt2", "mixtral"], "llama"))
def test_weights_of_an_engine_are_the_models(name: str) -> None:
    """Packed or not, all of them are counted, read and hashed; reading gives ordinary tensors."""
    theirs = hugging_face(name)
    plain, engine = load(theirs), Engine.load(theirs)
    assert_same(engine.model, plain)
    ours = dict(engine.model.named_parameters())
    assert ours.keys() == dict(plain.named_parameters()).keys() and engine.fingerprint.weights == weights_hash(plain)
    assert all(torch.equal(ours[key], x) and ours[key].shape == x.shape for key, x in plain.named_parameters())
    assert sum(x.numel() for x in engine.model.parameters()) == sum(x.numel() for x in plain.parameters())
    assert type(engine.model.blocks[0].attn.o.weight + 1) is Tensor
    engine.model.eval().to("cpu")
    assert engine.prompt([1, 2, 3]).generate(1).tokens == Engine(plain).prompt([1, 2, 3]).generate(1).tokens
    again = Engine.load(engine.model)
    assert again.fingerprint == engine.fingerprint and again.model is not engine.model
