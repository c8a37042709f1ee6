"""An adapter is whole or refused: what its config asks for is in its file. What peft writes loads, however it names modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import BadConfig, BadRequest, BadWeights, UnsupportedModel
from replaylens.engine.model.loading import load, weights_hash
from replaylens.engine.model.lora import ADAPTER_FILE, WEIGHTS_FILE
from replaylens.engine.proof.trace import take
from tests.engine.model.test_adapter import trained
from tests.engine.model.test_weights import edit_json

Tensors = dict[str, Tensor]
R4 = {"r": 4, "lora_alpha": 6}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "ends of names": ("llama", {"target_modules": ["q_proj", "mlp.down_proj"]}),
    "a name that the base lacks": ("llama", {"target_modules": ["q_proj", "c_attn"], "modules_to_save": ["lm_head", "score"]}),
    "an expression": ("llama", {"target_modules": r".*layers\.[02]\.self_attn\.(q|v)_proj"}),
    "all products": ("llama", {"target_modules": "all-linear"}),
    "all products, stored transposed": ("gpt2", {"target_modules": "all-linear", "fan_in_fan_out": True}),
    "all products but some": (
        "llama",
        {"target_modules": "all-linear", "exclude_modules": ["down_proj", "layers.1.mlp.up_proj"]},
    ),
    "excluded by an expression": ("llama", {"target_modules": ["q_proj"], "exclude_modules": r"model\.layers\.0\..*"}),
    "one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": 1}),
    "layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "layers of GPT-2": ("gpt2", {"target_modules": ["c_fc"], "layers_to_transform": [1], "fan_in_fan_out": True}),
    "norms as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "a block's part as a whole": ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["layers.1.mlp"]}),
    "head and embedding as a whole, tied": (
        "llama3",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "head of GPT-NeoX": ("neox", {"target_modules": ["query_key_value", "embed_out"]}),
    "only modules as a whole": ("llama", {"target_modules": "dummy-target-modules", "modules_to_save": ["lm_head"]}),
    "router of Mixtral": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
    "router of PhiMoE": ("phimoe-plain", {"target_modules": ["q_proj"], "modules_to_save": ["router"]}),
    "router of GraniteMoE": ("granite-moe", {"target_modules": ["q_proj"], "modules_to_save": ["router"]}),
    "a mixture's shared expert": ("qwen2-moe", {"target_modules": ["shared_expert_gate", "up_proj"]}),
    "latent attention": ("deepseek-v3", {"target_modules": ["kv_b_proj", "o_proj"]}),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_peft_writes_loads_to_what_peft_computes(kind: str, tmp_path: Path) -> None:
    name, options = WRITTEN[kind]
    adapted = trained(name, {**R4, **options}, tmp_path / "base", tmp_path / "adapter")
    tokens = torch.tensor([[3, 14, 15, 92, 6]])
    engines = [Engine.load(tmp_path / "base", adapter=adapter) for adapter in (tmp_path / "adapter", None)]
    ours, base = (engine.prompt(tokens[0].tolist()).logits() for engine in engines)
    theirs = adapted.eval()(tokens).logits[0, -1].detach()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, base, rtol=1e-3, atol=1e-3), "the control: the adapter changes the model"
    assert take(load(adapted)) == engines[0].fingerprint, "the model in memory has the same bits"


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_embeddings_that_are_saved_in_all_their_copies(name: str, tmp_path: Path) -> None:
    """save_embedding_layers=True writes what was trained twice, and beside it the base's own, which is not used."""
    options, adapter = {**R4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, tmp_path / "adapter"
    adapted = trained(name, options, tmp_path / "base", adapter)
    plain = weights_hash(load(tmp_path / "base", adapter=adapter))
    adapted.save_pretrained(adapter, save_embedding_layers=True)
    begin = "base_model.model.model.embed_tokens"
    stored = load_file(adapter / WEIGHTS_FILE)
    assert {f"{begin}{own}.weight" for own in ("", ".modules_to_save", ".original_module")} <= stored.keys()
    assert weights_hash(load(tmp_path / "base", adapter=adapter)) == plain
    other = {**stored, f"{begin}.modules_to_save.weight": stored[f"{begin}.weight"] + 1}
    save_file(other, adapter / WEIGHTS_FILE)
    with pytest.raises(BadWeights, match=r"holds model\.embed_tokens\.weight twice, with different values"):
        load(tmp_path / "base", adapter=adapter)
    untrained = {key: x for key, x in stored.items() if key not in (f"{begin}.weight", f"{begin}.modules_to_save.weight")}
    save_file(untrained, adapter / WEIGHTS_FILE)
    with pytest.raises(BadWeights, match=r"original_module"):
        load(tmp_path / "base", adapter=adapter)


@pytest.mark.parametrize("name, transposed", [("llama", False), ("gpt2", True)])
def test_all_linear_may_stay_a_word(name: str, transposed: bool, tmp_path: Path) -> None:
    """peft writes names in its place, and reads both."""
    options = {**R4, "target_modules": "all-linear", "fan_in_fan_out": transposed}
    trained(name, options, tmp_path / "base", tmp_path / "adapter")
    by_name = weights_hash(load(tmp_path / "base", adapter=tmp_path / "adapter"))
    edit_json(tmp_path / "adapter" / ADAPTER_FILE, target_modules="all-linear")
    assert weights_hash(load(tmp_path / "base", adapter=tmp_path / "adapter")) == by_name


RENAMED = {"without its head": ("gpt2", "transformer.", ""), "a part of a larger model": ("llama", "", "language_model.")}


@pytest.mark.parametrize("kind", RENAMED)
def test_a_base_whose_file_names_its_tensors_otherwise(kind: str, tmp_path: Path) -> None:
    """The adapter knows the names in memory. It is looked for under both; other parts of the file do not count."""
    name, begin, instead = RENAMED[kind]
    target = {"gpt2": "transformer.h.1.attn.c_attn", "llama": "model.layers.1.self_attn.q_proj"}[name]
    options = {**R4, "target_modules": rf".*{target}|.*\.2\.mlp\..*(proj|c_fc)", "fan_in_fan_out": name == "gpt2"}
    trained(name, options, tmp_path / "base", tmp_path / "adapter")
    plain = weights_hash(load(tmp_path / "base", adapter=tmp_path / "adapter"))
    file, weights = tmp_path / "base" / "model.safetensors", tmp_path / "adapter" / WEIGHTS_FILE
    stored = {instead + key.removeprefix(begin): x for key, x in load_file(file).items()}
    if instead:
        stored["vision_tower.layers.2.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(stored, file)
    assert weights_hash(load(tmp_path / "base", adapter=tmp_path / "adapter")) == plain
    save_file(without(target)(load_file(weights)), weights)
    with pytest.raises(BadWeights, match=rf"asks for {instead}{target.removeprefix(begin)} \(target_modules\)"):
        load(tmp_path / "base", adapter=tmp_path / "adapter")


def test_experts_that_were_trained_as_a_whole_are_refused_for_that_reason(tmp_path: Path) -> None:
    trained(
        "mixtral", {**R4, "target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, tmp_path / "base", tmp_path / "adapter"
    )
    text = r"trains the experts model\.layers\.0\.mlp\.experts\.\w+ as a whole \(modules_to_save\).*one by one"
    with pytest.raises(UnsupportedModel, match=text):
        load(tmp_path / "base", adapter=tmp_path / "adapter")


def test_experts_that_are_stored_one_by_one_are_all_there_or_none(tmp_path: Path) -> None:
    """Adapters of older versions, which hold each expert as modules. Newer ones adapt the attention of the same base alone."""
    trained("mixtral", {**R4, "target_modules": ["q_proj"]}, tmp_path / "base", tmp_path / "adapter")
    stored, file = load_file(tmp_path / "base" / "model.safetensors"), tmp_path / "adapter" / WEIGHTS_FILE
    plain, tensors = load(tmp_path / "base", adapter=tmp_path / "adapter"), load_file(file)
    for name in [name for name in stored if name.endswith(".w1.weight")]:
        begin, (outputs, inputs) = "base_model.model." + name.removesuffix(".weight"), stored[name].shape
        tensors |= {f"{begin}.lora_A.weight": torch.ones(4, inputs), f"{begin}.lora_B.weight": torch.ones(outputs, 4)}
    edit_json(tmp_path / "adapter" / ADAPTER_FILE, target_modules=["q_proj", "w1"])
    save_file(tensors, file)
    up = "blocks.0.mlp.experts.up"
    changed = load(tmp_path / "base", adapter=tmp_path / "adapter").state_dict()[up]
    assert not torch.equal(changed, plain.state_dict()[up])
    save_file(without("layers.1.", "experts.2.")(tensors), file)
    with pytest.raises(BadWeights, match=r"asks for model\.layers\.1\.block_sparse_moe\.experts\.2\.w1 \(target_modules\)"):
        load(tmp_path / "base", adapter=tmp_path / "adapter")


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: x for name, x in tensors.items() if not all(part in name for part in parts)}


def cast(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(x) for name, x in tensors.items()}


def same(tensors: Tensors) -> Tensors:
    return tensors


def pair(module: str, outputs: int = 1, inputs: int = 1) -> Tensors:
    """The tensors of one module."""
    begin = f"base_model.model.{module}"
    return {f"{begin}.lora_A.weight": torch.ones(4, inputs), f"{begin}.lora_B.weight": torch.ones(outputs, 4)}


def every_product(tensors: Tensors) -> Tensors:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return {k: x for layer in range(3) for part in parts for k, x in pair(f"model.layers.{layer}.{part}").items()}


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], type[Exception], str]] = {
    "no tensors": ({}, lambda tensors: {}, BadWeights, r"adapter_model\.safetensors holds no tensors.*[Cc]opy it again"),
    "one layer is missing": ({}, without("layers.1."), BadWeights, r"asks for model\.layers\.1\.mlp\.down_proj.*lacks"),
    "one module is missing": ({}, without("layers.2.", "q_proj"), BadWeights, r"asks for model\.layers\.2\.self_attn\.q_proj"),
    "half of a module": ({}, without("layers.2.", "q_proj.lora_B"), BadWeights, r"lacks lora_B of model\.layers\.2\.self_attn"),
    "another module": (
        {"target_modules": ["q_proj", "o_proj"]},
        same,
        BadWeights,
        r"asks for model\.layers\.0\.self_attn\.o_proj",
    ),
    "another module, by an expression": (
        {"target_modules": r".*\.[qo]_proj"},
        same,
        BadWeights,
        r"asks for .*\.0\.self_attn\.o_proj",
    ),
    "all products": ({"target_modules": "all-linear"}, same, BadWeights, r"asks for model\.layers\.0\.mlp\.gate_proj"),
    "the head": ({"modules_to_save": ["lm_head"]}, same, BadWeights, r"asks for lm_head\.weight \(modules_to_save\).*lacks"),
    "norms": (
        {"modules_to_save": ["input_layernorm"]},
        same,
        BadWeights,
        r"asks for model\.layers\.0\.input_layernorm\.weight",
    ),
    "another module is left out": (
        {"target_modules": ["q_proj"]},
        same,
        BadWeights,
        r"changes model\.layers\.0\.mlp\.down_proj\.weight, which its config does not ask for .*'q_proj'",
    ),
    "another layer": (
        {"layers_to_transform": [0, 2]},
        same,
        BadWeights,
        r"changes model\.layers\.1\.mlp\.down_proj\.weight, which its config does not ask for",
    ),
    "excluded": ({"exclude_modules": ["down_proj"]}, same, BadWeights, r"down_proj\.weight, which its config does not ask for"),
    "a norm that nobody saved": (
        {},
        lambda tensors: {**tensors, "base_model.model.model.norm.weight": torch.ones(1)},
        BadWeights,
        r"changes model\.norm\.weight, which its config does not ask for .*modules_to_save = \[\]",
    ),
    "a norm among all products": (
        {"target_modules": "all-linear"},
        lambda tensors: every_product(tensors) | pair("model.norm"),
        BadWeights,
        r"changes model\.norm\.weight, which its config does not ask for",
    ),
    "int8": ({}, cast(lambda x: (x * 100).to(torch.int8)), BadWeights, r"holds torch\.int8 for model\.layers\.0\..*float"),
    "bool": ({}, cast(lambda x: x > 0), BadWeights, r"holds torch\.bool for"),
    "float8": ({}, cast(lambda x: x.to(torch.float8_e4m3fn)), BadWeights, r"holds torch\.float8_e4m3fn for"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter that nobody changes."""
    folder = tmp_path_factory.mktemp("adapter")
    trained("llama", {**R4, "target_modules": ["q_proj", "down_proj"]}, folder / "base", folder / "adapter")
    return folder / "base", folder / "adapter"


def changed(written: tuple[Path, Path], to: Path, fields: dict[str, Any], change: Callable[[Tensors], Tensors] = same) -> Path:
    (to / ADAPTER_FILE).write_bytes((written[1] / ADAPTER_FILE).read_bytes())
    edit_json(to / ADAPTER_FILE, **fields)
    save_file(change(load_file(written[1] / WEIGHTS_FILE)), to / WEIGHTS_FILE)
    return to


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_missing_or_no_number_is_named(fault: str, written: tuple[Path, Path], tmp_path: Path) -> None:
    fields, change, error, text = FAULTS[fault]
    with pytest.raises(error, match=text):
        load(written[0], adapter=changed(written, tmp_path, fields, change))


FIELDS: dict[str, list[Any]] = {
    "modules_to_save": ["lm_head", 3, [3], [""]],
    "use_rslora": ["false", 1],
    "lora_alpha": [True, "16", float("nan"), float("inf"), None],
    "r": [True, 0, "many", 4.0, None],
    "rank_pattern": [["q"], {"q(": 3}, {"q_proj": True}, {"q_proj": "4"}],
    "alpha_pattern": [["q"], {"q(": 3}, {"q_proj": True}],
    "target_modules": [3, None, "", [3], "q("],
    "exclude_modules": [3, [3], "q("],
    "layers_to_transform": ["1", [1.5], True],
    "layers_pattern": [3, ["("]],
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_is_named(field: str, written: tuple[Path, Path], tmp_path: Path) -> None:
    assert load(written[0], adapter=changed(written, tmp_path, {})).config.adapter, "the control"
    for value in FIELDS[field]:
        with pytest.raises(BadConfig, match=rf"adapter_config\.json has {field}.* = .*\. It must be "):
            load(written[0], adapter=changed(written, tmp_path, {field: value}))


def test_a_config_without_its_method_is_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = changed(written, tmp_path, {})
    text = (adapter / ADAPTER_FILE).read_text()
    (adapter / ADAPTER_FILE).write_text(text.replace('"peft_type"', '"auto_mapping"'))
    with pytest.raises(BadConfig, match=r"has peft_type = None\. It must be 'LORA'"):
        load(written[0], adapter=adapter)


def test_an_adapter_that_is_no_folder_is_named(written: tuple[Path, Path]) -> None:
    for reader in (load, Engine.load):
        with pytest.raises(BadRequest, match=r"adapter must be the path of a folder, or a name on the hub, not 3"):
            reader(written[0], adapter=3)  # type: ignore[operator]
