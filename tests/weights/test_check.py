"""A loaded model equals its source. The check alone finds each planted silent difference."""

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from replaylens import Engine
from replaylens.engine.errors import BadRequest, BadWeights, ModelMismatch, UnsupportedModel
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.weights import check, loading
from replaylens.weights.loading import WEIGHTS_FILE, load, save
from tests.devices import covering
from tests.families import GROUPED, NAMES, core, hugging_face, hugging_face_folder
from tests.replay.bridges import bridge
from tests.weights.test_weights import edit, edit_json, write_gguf

TOKENS = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(7))
families = pytest.mark.parametrize("name", core(NAMES))


def ours(model: Decoder, tokens: Tensor = TOKENS) -> Tensor:
    ops, positions = SequenceOps([tokens.shape[1]]), torch.arange(tokens.shape[1])
    with torch.no_grad():
        return model.logits(model(tokens[0], positions, ops), ops)


def theirs(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens).logits[0]
    return logits


def own(name: str) -> Any:
    """A copy of the family's model, to modify."""
    return copy.deepcopy(hugging_face(name))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: hugging_face_folder(name, tmp_path / name)


# Correct models pass


@families
def test_every_family_is_its_source(name: str, folder: Callable[[str], Path]) -> None:
    """In memory, as a folder and behind a TransformerBridge. The bits equal those of loading without the check."""
    plain = weights_hash(load(hugging_face(name)))
    for each in (hugging_face(name), folder(name), bridge(name)):
        assert weights_hash(load(each, check=True)) == plain


def test_a_gguf_file_is_its_source(tmp_path: Path) -> None:
    write_gguf(hugging_face("llama"), tmp_path / "tiny.gguf")
    assert weights_hash(load(tmp_path / "tiny.gguf", check=True)) == weights_hash(load(hugging_face("llama")))


@pytest.mark.parametrize("dtype, name", covering([torch.bfloat16, torch.float16, torch.float64], ["llama", "gemma3", "gpt2"]))
def test_weights_in_other_types_are_compared_in_float32(name: str, dtype: torch.dtype, folder: Callable[[str], Path]) -> None:
    """Weights as `from_pretrained(dtype=...)` gives them, while the engine stores another dtype."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=dtype)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    load(model, torch.bfloat16, check=True)
    assert {x.dtype for x in model.parameters()} == {dtype}
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama3", "gpt2", "gemma2"])
def test_a_model_without_its_head_is_compared_up_to_the_final_norm(name: str) -> None:
    """The embeddings are tied, so the embedding is the head."""
    model = own(name).base_model
    assert weights_hash(load(model, check=True)) == weights_hash(load(hugging_face(name)))
    norm = next(m for key, m in model.named_modules() if key in ("norm", "ln_f"))
    norm.register_forward_hook(_double)
    with pytest.raises(ModelMismatch, match="the final norm"):
        load(model, check=True)


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_source_is_left_as_it_was(spoilt: bool) -> None:
    """Modes, attention implementation, weights and hooks of the source stay the same, whether the check passes or not."""
    model = own("gemma2").train()
    model.model.layers[1].eval()
    model.config._attn_implementation = "sdpa"
    if spoilt:
        model.model.layers[2].register_forward_hook(
            lambda _, __, out: (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2
        )
    state = {key: x.clone() for key, x in model.state_dict().items()}
    modes, hooks = [m.training for m in model.modules()], _num_hooks(model)
    if spoilt:
        with pytest.raises(ModelMismatch):
            load(model, check=True)
    else:
        load(model, check=True)
    assert [m.training for m in model.modules()] == modes and _num_hooks(model) == hooks
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


def _num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# What a live model computes beyond its weights


def _replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 97, bias=False)


def _double(_: Any, __: Any, out: Any) -> Any:
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def _rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq[1] *= 1.01


def _negate(layer: Any, name: str) -> None:
    inner = getattr(layer, name).forward
    getattr(layer, name).forward = lambda *args, **kwargs: -inner(*args, **kwargs)


LIVE: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a hook on a block": ("llama", lambda m: m.model.layers[1].register_forward_hook(_double), "block 1"),
    "a hook within a block": ("qwen3", lambda m: m.model.layers[2].mlp.register_forward_hook(_double), "block 2"),
    "a hook on the embedding": ("gpt2", lambda m: m.transformer.wte.register_forward_hook(_double), "the embedding"),
    "a hook on the head": ("gemma2", lambda m: m.lm_head.register_forward_hook(_double), "the final norm or the unembedding"),
    "another forward": ("llama", lambda m: _negate(m.model.layers[0], "mlp"), "block 0"),
    "another activation": ("neox", lambda m: setattr(m.gpt_neox.layers[1].mlp, "act", nn.SiLU()), "block 1"),
    "one GELU for the other": ("gpt2", lambda m: setattr(m.transformer.h[2].mlp, "act", nn.GELU()), "block 2"),
    "another epsilon": ("llama", lambda m: setattr(m.model.layers[2].input_layernorm, "variance_epsilon", 1e-3), "block 2"),
    "another scale": ("gemma3", lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.3), "block 0"),
    "an edited buffer": ("llama", _rotary, "the rotary frequencies"),
    "rounded frequencies": ("qwen2", lambda m: m.to(torch.bfloat16), "the rotary frequencies"),
    "a switched projection": ("mistral", lambda m: _negate(m.model.layers[1].self_attn, "v_proj"), "block 1"),
}


@pytest.mark.parametrize("plant", LIVE)
def test_what_the_weights_do_not_show_is_found(plant: str) -> None:
    """The check is the default for a model in memory. The error names the first part that differs."""
    name, change, stage = LIVE[plant]
    model = own(name)
    change(model)
    with pytest.raises(ModelMismatch, match=stage.replace("(", r"\(")) as caught:
        Engine.load(model)
    assert caught.value.stage.startswith(stage) and caught.value.difference > 1e-5
    Engine.load(model, check=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behind_a_bridge_too(dtype: torch.dtype) -> None:
    """A bridge converts inputs to its modules' dtypes: these must be the dtypes of the computation."""
    spoilt = bridge.__wrapped__("qwen2")
    frequencies = spoilt.original_model.model.rotary_emb.inv_freq.clone()
    spoilt.original_model.to(dtype)
    for module in spoilt.original_model.modules():
        if "inv_freq" in module._buffers:
            module._buffers["inv_freq"] = frequencies
    load(spoilt, check=True)
    spoilt.original_model.model.layers[1].register_forward_hook(_double)
    with pytest.raises(ModelMismatch, match="block 1"):
        Engine.load(spoilt)


# What a conversion could miss


TRANSLATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window where there is none": ("llama", {"windows": (7, 0, 0)}, "block 0"),
    "no window where there is one": ("mistral", {"windows": ()}, "block 0"),
    "another window": ("gemma2", {"windows": (7, 0, 8)}, "block 2"),
    "part of a head turned": ("qwen3", {"rotary_dim": 8}, "the rotary frequencies"),
    "another base": ("qwen2", {"rope": Rope(theta=10100.0)}, "the rotary frequencies"),
    "a scaling left out": ("llama3", {"rope": Rope(theta=5000.0)}, "the rotary frequencies"),
    "one rotary for all layers": ("gemma3", {"local_rope": None}, "the rotary frequencies"),
    "the rotaries of layers swapped": ("gemma3", {"rope": Rope(1e4), "local_rope": Rope(1e6)}, "block 0"),
    "a cap on scores": ("gemma3", {"attn_softcap": 2.0}, "block 0"),
    "no cap on scores": ("gemma2", {"attn_softcap": 0.0}, "block 0"),
    "a cap on logits": ("llama", {"logit_softcap": 30.0}, "the final norm or the unembedding"),
    "a multiplier of scores": ("llama", {"attn_scale": 0.3}, "block 0"),
    "a multiplier of embeddings": ("llama", {"embed_scale": 12.0}, "the embedding"),
    "an activation": ("gemma2", {"activation": "gelu"}, "block 0"),
    "an epsilon": ("gpt2", {"norm_eps": 1e-6}, "block 0"),
    "parallel residuals": ("neox", {"parallel_residual": False}, "block 0"),
}


@pytest.mark.parametrize("plant", TRANSLATIONS)
def test_a_wrong_translation_of_a_config_is_found(
    plant: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, changes, stage = TRANSLATIONS[plant]
    right = loading._with_its_head

    def wrong(config: ModelConfig, *rest: Any) -> ModelConfig:
        return replace(right(config, *rest), **changes)

    monkeypatch.setattr(loading, "_with_its_head", wrong)
    for each in (hugging_face(name), folder(name)):
        load(each)  # the control: no other check notices
        with pytest.raises(ModelMismatch, match=stage):
            load(each, check=True)


def test_a_head_that_is_taken_for_the_embedding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own("llama3")
    _replace_head(model)
    monkeypatch.setattr(loading, "_with_its_head", lambda config, *_: config)
    load(model)
    with pytest.raises(ModelMismatch, match="the final norm or the unembedding"):
        load(model, check=True)


def test_whole_numbers_that_are_taken_for_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of an int8 tensor, taken for weights, are off by a scale."""
    model = own("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    state = {**model.state_dict(), name: (model.state_dict()[name] * 100).round()}
    monkeypatch.setattr(model, "state_dict", lambda: state)
    load(model)
    with pytest.raises(ModelMismatch, match="block 1"):
        load(model, check=True)


# Fields that a family ignores


IGNORED: dict[str, tuple[str, dict[str, Any]]] = {
    "partial_rotary_factor": ("llama", {"partial_rotary_factor": 0.5}),
    "partial_rotary_factor of Mistral": ("mistral", {"partial_rotary_factor": 0.5}),
    "partial_rotary_factor of Qwen2": ("qwen2", {"partial_rotary_factor": 0.5}),
    "partial_rotary_factor of Qwen3": ("qwen3", {"partial_rotary_factor": 0.5}),
    "sliding_window": ("llama", {"sliding_window": 7}),
    "layer_types": ("llama", {"layer_types": ["sliding_attention"] * 3}),
    "attention_bias": ("mistral", {"attention_bias": True}),
    "mlp_bias": ("qwen3", {"mlp_bias": True}),
    "attn_logit_softcapping": ("gemma3", {"attn_logit_softcapping": 50.0}),
    "final_logit_softcapping": ("llama", {"final_logit_softcapping": 30.0}),
    "query_pre_attn_scalar": ("qwen2", {"query_pre_attn_scalar": 64}),
    "attention_multiplier": ("llama", {"attention_multiplier": 0.0625}),
    "logit_scale": ("llama", {"logit_scale": 0.25}),
    "logits_scaling": ("mistral", {"logits_scaling": 8.0}),
    "residual_multiplier": ("llama", {"residual_multiplier": 0.22}),
    "embedding_multiplier": ("qwen2", {"embedding_multiplier": 12.0}),
    "use_qk_norm": ("llama", {"use_qk_norm": True}),
    "is_causal": ("llama", {"is_causal": False}),
    "num_experts": ("llama", {"num_experts": 8}),
    "head_dim": ("neox", {"head_dim": 16}),
    "factor": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}}),
    "attention_factor": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3}},
    ),
}


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_that_is_not_computed_with_is_named(field: str, folder: Callable[[str], Path]) -> None:
    """Transformers ignores the field. A model that its config does not describe is refused."""
    name, changes = IGNORED[field]
    at = folder(name)
    load(at)
    edit_json(at / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=rf"sets {field.split()[0]} to .* does not compute with it.*Remove"):
        load(at)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("llama", "attention_multiplier", 0.0625),
        ("mistral", "layer_types", ["sliding_attention", "full_attention", "full_attention"]),
    ],
)
def test_a_field_on_a_live_model_is_named(name: str, field: str, value: Any) -> None:
    model = own(name)
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedModel, match=f"sets {field} to"):
        Engine.load(model)


NEUTRAL = {
    "llama": {"sliding_window": None, "attention_multiplier": 1.0, "use_qk_norm": False, "logit_scale": None, "unheard_of": 3},
    "mistral": {"attention_bias": False, "partial_rotary_factor": 1.0},
    "qwen2": {"attention_bias": True, "num_experts": 0, "layer_types": ["full_attention"] * 3},
    "llama3": {"sliding_window": 4096, "layer_types": ["full_attention"] * 3},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_that_says_what_is_done_anyway_is_taken(name: str, folder: Callable[[str], Path]) -> None:
    """Negative control: a config with neutral fields loads to the same bits, and the check passes."""
    at = folder(name)
    edit_json(at / "config.json", **NEUTRAL[name])
    assert weights_hash(load(at, check=True)) == weights_hash(load(hugging_face(name)))


# Heads


@pytest.mark.slow
@pytest.mark.parametrize("name", core(["llama3", "gpt2", "gemma2", "gemma3"]))
def test_a_head_of_its_own_unties_a_tied_config(name: str, folder: Callable[[str], Path]) -> None:
    """In memory and in a folder, as in transformers. A head that is the embedding stays tied."""
    import transformers

    at = folder(name)
    head = torch.randn(97, 32, generator=torch.Generator().manual_seed(1))
    embed = next(
        key for key in ("model.embed_tokens.weight", "transformer.wte.weight") if key in hugging_face(name).state_dict()
    )
    edit(at, lambda tensors: tensors.update({"lm_head.weight": tensors[embed].clone()}))
    assert load(at, check=True).config.tied_embeddings
    edit(at, lambda tensors: tensors.update({"lm_head.weight": head}))
    model = transformers.AutoModelForCausalLM.from_pretrained(at, attn_implementation="eager")
    assert torch.equal(model.lm_head.weight, head), "transformers does not tie these"
    for each in (at, model):
        loaded = load(each, check=True)
        assert not loaded.config.tied_embeddings
        assert torch.allclose(ours(loaded), theirs(model), atol=2e-5)
        assert not torch.allclose(ours(loaded), theirs(hugging_face(name)), atol=1e-2)


def test_a_replaced_head_is_the_head() -> None:
    model = own("gemma3")
    _replace_head(model)
    subject = Engine.load(model)
    logits, _ = subject.run_with_cache(TOKENS, "blocks.0.hook_in")
    assert torch.allclose(logits[0], theirs(model), atol=2e-5)


@pytest.mark.parametrize("head", [nn.Linear(32, 97, bias=True), nn.Linear(32, 5, bias=False), nn.Sequential(nn.Linear(32, 97))])
def test_a_head_of_another_kind_is_named(head: nn.Module) -> None:
    model = own("gpt2")
    model.lm_head = head
    with pytest.raises(BadWeights, match=r"lm_head|unembed\.weight has shape \(32, 5\)"):
        load(model)


# Types of tensors


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_holds_no_weights_is_named(name: str, dtype: torch.dtype, folder: Callable[[str], Path]) -> None:
    at = folder("llama")
    edit(at, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(BadWeights, match=rf"{name}.*{dtype}.*float32"):
        load(at)


def test_a_checkpoint_of_ours_with_whole_numbers_is_named(tmp_path: Path) -> None:
    save(load(hugging_face("llama")), tmp_path)
    edit(tmp_path, lambda tensors: tensors.update(embed=tensors["embed"].to(torch.int8)))
    with pytest.raises(BadWeights, match=r"embed.*int8"):
        load(tmp_path)


def test_a_model_without_values_is_named() -> None:
    import transformers

    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    with pytest.raises(BadWeights, match="no values"):
        load(empty)


# Ambiguous folders


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    """A shard left over from an earlier save: the last one read would win."""
    hugging_face("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    name, stale = next(iter(load_file(second).items()))
    save_file({**load_file(first), name: stale * 2}, first)
    with pytest.raises(BadWeights, match=rf"{re.escape(name)} .* both in"):
        load(tmp_path)


def test_one_file_beside_an_index_of_shards_is_named(tmp_path: Path) -> None:
    """Transformers reads the single file, other tools the shards: they may be two models."""
    hugging_face("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    hugging_face_folder("qwen2", tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS_FILE, tmp_path)
    with pytest.raises(BadWeights, match=r"holds both model\.safetensors and .*index\.json.*Remove"):
        load(tmp_path)


def test_an_adapter_beside_the_weights_is_named(folder: Callable[[str], Path]) -> None:
    """Transformers would apply the adapter silently."""
    at = folder("llama")
    (at / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"adapter.*give both"):
        load(at)


# Multimodal models


def multimodal(**changes: Any) -> Any:
    import transformers

    text = dict(
        GROUPED, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=96, mm_tokens_per_image=4, **changes
    )
    torch.manual_seed(5)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_the_text_part_of_a_live_multimodal_model_is_that_of_its_folder(tmp_path: Path) -> None:
    model = multimodal()
    model.save_pretrained(tmp_path)
    live, stored = load(model, check=True), load(tmp_path, check=True)
    assert live.config == stored.config and weights_hash(live) == weights_hash(stored)
    assert torch.allclose(ours(live), theirs(model), atol=2e-5)
    assert Engine.load(model).prompt([1, 2, 3]).generate(2).length == 5


def test_the_whole_says_whether_a_multimodal_head_is_tied(tmp_path: Path) -> None:
    """The text part's own flag is ignored: transformers uses that of the whole model."""
    model = multimodal(tie_word_embeddings=False)
    model.config.text_config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    for each in (model, tmp_path):
        loaded = load(each, check=True)
        assert not loaded.config.tied_embeddings and torch.allclose(ours(loaded), theirs(model), atol=2e-5)


# When the check runs


def test_folders_are_compared_when_asked(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(check, "require_same", lambda *args: compared.append(args))
    at = folder("llama")
    Engine.load(at)
    Engine.load(hugging_face("llama"), check=False)
    assert compared == []
    Engine.load(at, check=True)
    Engine.load(hugging_face("llama"))
    Engine.load(bridge("llama"))
    assert len(compared) == 3


@pytest.mark.parametrize("given", ["yes", 2, [True], float("nan")])
def test_check_is_yes_or_no(given: Any) -> None:
    with pytest.raises(BadRequest, match="check"):
        Engine.load("coin-plain", check=given)


def test_nothing_to_compare_with_is_named(tmp_path: Path) -> None:
    """Without a counterpart, the check does not pass silently."""
    model = load(hugging_face("llama"))
    save(model, tmp_path)
    for each in ("coin-plain", "coin-thinking", model, tmp_path):
        with pytest.raises(BadRequest, match="no counterpart"):
            Engine.load(each, check=True)


def test_a_model_that_cannot_run_is_named() -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    model = own("llama")
    model.model.layers[1].forward = fails
    with pytest.raises(BadRequest, match=r"cannot run this LlamaForCausalLM.*no such kernel.*check=False"):
        Engine.load(model)
