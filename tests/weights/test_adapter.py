"""LoRA adapters: peft's own merge is the oracle; what is not a sum of products is refused by name."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replaylens import Engine
from replaylens.engine.errors import BadConfig, BadRequest, BadWeights, FetchFailed, UnsupportedModel
from replaylens.engine.proof.fingerprint import take, weights_hash
from replaylens.weights.loading import load, located, save
from replaylens.weights.lora import ADAPTER_FILE, WEIGHTS_FILE, Adapter, AdapterConfig, BaseModules, Lora
from replaylens.weights.source import Source
from tests.devices import swept
from tests.families import hugging_face, hugging_face_folder
from tests.weights.test_weights import edit_json

ATTENTION = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention and MLP": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION}),
    "ranks and alphas by module": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ATTENTION,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 3},
            # of the first two, no name has them as its end: they change nothing
            "alpha_pattern": {"self_attn": 90, "proj": 70, r"layers\.\d+\.self_attn\.v_proj": 5},
        },
    ),
    "rank-stabilised": ("qwen3", {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True}),
    "stored transposed": ("gpt2", {"r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused": ("neox", {"r": 4, "target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "embedding, untied": ("llama", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "head, untied": ("llama", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "modules trained as a whole": ("llama", {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
}


def trained(name: str, options: dict[str, Any], base: Path, adapter: Path, seed: int = 0) -> Any:
    """Write a base and an adapter with random weights. Returns peft's model."""
    import peft  # imports triton, whose interpreter tests/kernels asks for first

    hugging_face_folder(name, base)
    model = copy.deepcopy(hugging_face(name))
    model.name_or_path = str(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(adapter)
    return adapted


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a base and an adapter."""
    folder = tmp_path_factory.mktemp("whole")
    trained(*KINDS["attention and MLP"], folder / "base", folder / "adapter")
    return folder


@pytest.fixture
def folders(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter, to damage."""
    base, adapter = (shutil.copytree(whole / name, tmp_path / name) for name in ("base", "adapter"))
    edit_json(adapter / ADAPTER_FILE, base_model_name_or_path=str(base))
    return base, adapter


@pytest.mark.parametrize("kind", swept(KINDS, "ranks and alphas by module", "fused", "stored transposed"))
def test_the_merged_model_is_pefts(kind: str, tmp_path: Path) -> None:
    """Every weight within float32's rounding of peft's merge, and far from the base. Peft's model loads with the bits of its
    folder, by its own forward pass as the check, and stays as it is."""
    name, options = KINDS[kind]
    adapted = trained(name, {**options, "lora_dropout": 0.5}, tmp_path / "base", tmp_path / "adapter").train()
    before = {key: x.clone() for key, x in adapted.state_dict().items()}
    live, ours = load(adapted, check=True), load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert take(live) == take(ours) and live.config.adapter
    assert adapted.training and all(torch.equal(x, before[key]) for key, x in adapted.state_dict().items())
    theirs, base = load(adapted.merge_and_unload()), load(tmp_path / "base")
    assert ours.config.adapter == Adapter.read(tmp_path / "adapter").digest and not base.config.adapter
    changed = 0
    for key, x in ours.state_dict().items():
        torch.testing.assert_close(x, theirs.state_dict()[key], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(x, base.state_dict()[key])
        assert torch.equal(x, base.state_dict()[key]) == torch.equal(theirs.state_dict()[key], base.state_dict()[key]), key
    assert changed


MODULES = (
    "q_proj", "lm_head", "model.lm_head", "xq_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.q_proj_extra",
    "model.layers.1.q_proj.x",
    "model.layers.1.experts.0.q_proj", "transformer.h.1.attn.q_proj", "layers.1.q_proj", "1.q_proj",
)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head", "self_attn.q_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": r".*\.self_attn\.q_proj"},
        {"target_modules": r"model\.layers\.1"},
        {"target_modules": ["q_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 11]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 0], "layers_pattern": ["experts", "layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["model.lm_head", "self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj"], "exclude_modules": r"layers"},
    ],
    ids=str,
)
def test_modules_are_chosen_as_peft_chooses_them(fields: dict[str, Any], tmp_path: Path) -> None:
    """By name alone, whichever a model has: whole names, ends, expressions, layers and exceptions."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs, ours = (
        LoraConfig(r=4, **fields),
        AdapterConfig.of(tmp_path, {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}),
    )
    wanted = [name for name in MODULES if check_target_module_exists(theirs, name)]
    assert [name for name in MODULES if ours.targets(name) and not ours.excludes(name)] == wanted
    assert len(wanted) < len(MODULES)


@pytest.mark.parametrize("stabilised", [False, True])
def test_ranks_and_scales_are_those_of_the_first_pattern_that_fits(stabilised: bool, tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    ranks, alphas = (
        {"q_proj": 2, r"layers\.1\..*": 3, "up_proj": 9},
        {r"model\.layers\.\d\.mlp\.up_proj": 5.0, "proj": 70.0, "q_proj": 6},
    )
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["x"], "use_rslora": stabilised}
    config = AdapterConfig.of(tmp_path, {**given, "rank_pattern": ranks, "alpha_pattern": alphas})
    for name in MODULES:
        rank, alpha = ranks.get(get_pattern_key(list(ranks), name), 4), alphas.get(get_pattern_key(list(alphas), name), 8)
        assert config.scale(name) == (rank, alpha / (rank**0.5 if stabilised else rank))
    assert len({config.scale(name) for name in MODULES}) > 3


def test_a_weight_is_the_sum_rounded_once(folders: tuple[Path, Path]) -> None:
    """The definition, in float64: W + alpha / rank * B A."""
    base, adapter = folders
    tensors, plain = load_file(adapter / WEIGHTS_FILE), load(base).state_dict()["blocks.1.mlp.down.weight"]
    begin = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    product = tensors[f"{begin}B.weight"].double() @ tensors[f"{begin}A.weight"].double()
    merged = load(base, adapter=adapter).state_dict()["blocks.1.mlp.down.weight"]
    assert torch.equal(merged, (plain.double() + 6 / 4 * product.T).float())


def test_an_adapter_in_bfloat16_merges_in_float32(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    narrow = {name: x.bfloat16() for name, x in load_file(adapter / WEIGHTS_FILE).items()}
    save_file(narrow, adapter / WEIGHTS_FILE)
    from_narrow = load(base, adapter=adapter)
    save_file({name: x.float() for name, x in narrow.items()}, adapter / WEIGHTS_FILE)
    assert weights_hash(from_narrow) == weights_hash(load(base, adapter=adapter))


@pytest.mark.parametrize("target, changed", [("embed_tokens", "embed"), ("lm_head", "unembed.weight")])
def test_of_a_tied_pair_only_the_adapted_one_changes(target: str, changed: str, tmp_path: Path) -> None:
    """As the adapter was trained: embedding and head have one weight, and a change of one is added to its output alone."""
    adapted = trained("llama3", {"r": 4, "target_modules": [target]}, tmp_path / "base", tmp_path / "adapter")
    tokens = torch.tensor([[3, 14, 15, 92, 6]])
    model, base = load(tmp_path / "base", adapter=tmp_path / "adapter"), load(tmp_path / "base")
    assert base.config.tied_embeddings and not model.config.tied_embeddings
    kept = model.embed if changed != "embed" else model.unembedding
    assert torch.equal(kept, base.embed) and take(load(adapted, check=True)) == take(model)
    ours = Engine(model).prompt(tokens[0].tolist()).logits()
    torch.testing.assert_close(ours, adapted.eval()(tokens).logits[0, -1].detach(), rtol=1e-4, atol=1e-5)


def test_other_forms_of_an_adapted_model(tmp_path: Path) -> None:
    """One of several adapters is active; and transformers' own `load_adapter`."""
    adapted = trained(*KINDS["attention and MLP"], tmp_path / "base", tmp_path / "adapter")
    trained(*KINDS["attention and MLP"], tmp_path / "base", tmp_path / "other", seed=1)
    first, other = (load(tmp_path / "base", adapter=tmp_path / each) for each in ("adapter", "other"))
    adapted.load_adapter(tmp_path / "other", "other")
    assert take(load(adapted)) == take(first)
    adapted.set_adapter("other")
    assert take(load(adapted)) == take(other) != take(first)
    plain = copy.deepcopy(hugging_face("llama"))
    plain.load_adapter(str(tmp_path / "adapter"))
    assert take(load(plain, check=True)) == take(first)
    assert take(load(adapted.unload())).config == take(load(tmp_path / "base")).config, (
        "without its adapter it is a plain model"
    )


def test_a_peft_model_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    """What its tensors and config do not describe: peft computes something else. The message says what to do."""
    import peft

    def refused(model: Any, text: str) -> None:
        with pytest.raises(UnsupportedModel, match=rf"{text}.*merge_and_unload"):
            Engine.load(model)

    adapted = trained(*KINDS["attention and MLP"], tmp_path / "base", tmp_path / "adapter")
    adapted.load_adapter(tmp_path / "adapter", "second")
    adapted.base_model.set_adapter(["default", "second"])
    refused(adapted, "has 2 active adapters")
    adapted.set_adapter("default")
    with adapted.disable_adapter(), pytest.raises(UnsupportedModel, match="has a disabled adapter at") as found:
        Engine.load(adapted)
    assert "enable_adapter_layers" in str(found.value) and "merge_and_unload" not in str(found.value)
    adapted.merge_adapter()
    refused(adapted, "has merged its adapter into")
    adapted.unmerge_adapter()
    layer = next(each for each in adapted.modules() if hasattr(each, "scale_layer"))
    layer.scale_layer(2.0)
    refused(adapted, r"scales .*q_proj by 3\.0, but by 1\.5 in its config")
    for config in (
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ):
        model = peft.get_peft_model(copy.deepcopy(hugging_face("llama")), config)
        refused(model, "The adapter PeftModelForCausalLM has (use_dora|peft_type) = ")
    with pytest.raises(BadRequest, match="adapter= goes with the folder"):
        Engine.load(adapted, adapter=tmp_path / "adapter")


def test_an_adapter_folder_loads_by_itself_if_its_base_is_here(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    assert weights_hash(load(adapter)) == weights_hash(load(base, adapter=adapter))
    (link := adapter.parent / "link").symlink_to(adapter)
    for same in (adapter, link, adapter / ".." / adapter.name):  # the folder that holds it is no second adapter
        assert located(adapter, same).adapter == same
    edit_json(adapter / ADAPTER_FILE, base_model_name_or_path="someone/some-model")
    with pytest.raises(FetchFailed, match=r"base model 'someone/some-model'.*Engine.load\(base, adapter="):
        load(adapter)
    assert load(base, adapter=adapter).config.adapter


def test_the_digest_covers_all_that_changes_weights() -> None:
    """Each part alone: the fingerprint's weights would tell most of them apart, the digest must by itself."""

    def digest(name: str = "q", embeds: bool = False, scale: float = 1.5, whole: str = "norm.weight", **changed: Tensor) -> str:
        given = {"a": torch.ones(2, 3), "b": torch.ones(4, 2), "x": torch.ones(5), **changed}
        lora = Lora(given["a"], given["b"], scale, embeds)
        return Adapter(Path("a"), {name: lora}, {whole: given["x"]}, None).digest  # type: ignore[arg-type]

    others = [
        digest(scale=1.5000001),
        digest(scale=-1.5),
        digest(name="v"),
        digest(embeds=True),
        digest(whole="other.weight"),
        digest(a=torch.tensor([[1.0, 1, 1], [1, 1, 2]])),
        digest(b=torch.cat([torch.ones(3, 2), torch.tensor([[1.0, 2]])])),
        digest(x=torch.tensor([1.0, 1, 1, 1, 2])),
        digest(x=torch.ones(5, dtype=torch.bfloat16)),
        digest(a=torch.ones(1, 6)),
    ]
    assert len({digest(), *others}) == 1 + len(others) and digest() == digest()


def test_the_fingerprint_tells_adapters_apart(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Another adapter, another scale or none: another fingerprint, even if no weight changes."""
    base, adapter = folders
    plain, merged = take(load(base)), take(load(base, adapter=adapter))
    assert merged == Engine.load(adapter).fingerprint, "as the engine has it"
    other = tmp_path / "other"
    trained(*KINDS["attention and MLP"], base, other, seed=1)
    scaled = shutil.copytree(adapter, tmp_path / "scaled")
    edit_json(scaled / ADAPTER_FILE, lora_alpha=7)
    zero = shutil.copytree(adapter, tmp_path / "zero")
    save_file({name: x * ("lora_A" in name) for name, x in load_file(zero / WEIGHTS_FILE).items()}, zero / WEIGHTS_FILE)
    prints = [plain, merged, *(take(load(base, adapter=each)) for each in (other, scaled, zero))]
    assert len({each.digest for each in prints}) == 5
    assert prints[-1].weights == plain.weights and prints[-1].config != plain.config
    edit_json(adapter / ADAPTER_FILE, lora_dropout=0.3, peft_version="9")  # the control: what changes no weight
    assert take(load(base, adapter=adapter)) == merged


def test_a_saved_model_keeps_the_digest(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    merged = load(base, adapter=adapter)
    save(merged, tmp_path / "own")
    assert load(tmp_path / "own").config == merged.config
    with pytest.raises(UnsupportedModel, match="checkpoint of replaylens"):
        load(tmp_path / "own", adapter=adapter)


def test_a_checked_load_checks_the_base(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    assert weights_hash(load(base, check=True, adapter=adapter)) == weights_hash(load(base, adapter=adapter))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora = True"),
    "biases": ({"bias": "lora_only"}, "bias = 'lora_only'"),
    "another method": ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    "a base that is changed": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    "what nobody knows yet": ({"use_new_idea": 0.5}, "use_new_idea = 0.5"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_a_sum_of_products_is_named(kind: str, folders: tuple[Path, Path]) -> None:
    changes, text = REFUSED[kind]
    base, adapter = folders
    load(base, adapter=adapter)
    edit_json(adapter / ADAPTER_FILE, **changes)
    with pytest.raises(UnsupportedModel, match=rf"{text}.* not supported.*merge_and_unload"):
        load(base, adapter=adapter)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
DAMAGED: dict[str, tuple[Any, str]] = {
    "half of a pair": (lambda t: t.pop(f"{Q}.lora_B.weight"), r"lacks lora_B of model\.layers\.0\.self_attn\.q_proj"),
    "another rank": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(3, 32)}), r"lora_A \(3, 32\).*but rank 4"),
    "another width": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 31)}), r"changes a weight \(32, 31\)"),
    "NaN": (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), "NaN or infinity"),
    "another model": (
        lambda t: t.update({x.replace("layers.0", "layers.9"): t.pop(x) for x in list(t)}),
        r"layers\.9\..*which the base lacks",
    ),
    "an unknown tensor": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}), "lora_magnitude_vector"),
    "another vocabulary": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(99, 32)}),
        r"unembed\.weight has shape \(32, 99\)",
    ),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_weights_are_named(fault: str, folders: tuple[Path, Path]) -> None:
    change, text = DAMAGED[fault]
    base, adapter = folders
    tensors: dict[str, Tensor] = load_file(adapter / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises((BadWeights, UnsupportedModel), match=text):
        load(base, adapter=adapter)


def test_other_sources_and_missing_files_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    with pytest.raises(BadRequest, match="goes with the folder of a base"):
        load(hugging_face("llama"), adapter=adapter)
    with pytest.raises(BadRequest, match="not with coin-plain"):
        Engine.load("coin-plain", adapter=adapter)
    with pytest.raises(UnsupportedModel, match=r"holds no adapter: adapter_config\.json is missing"):
        load(base, adapter=tmp_path)
    with pytest.raises(UnsupportedModel, match="Only one can be merged"):
        load(adapter, adapter=shutil.copytree(adapter, tmp_path / "second"))
    (adapter / ADAPTER_FILE).write_text(json.dumps([1]))
    with pytest.raises(BadConfig, match="not a JSON object"):
        load(base, adapter=adapter)
    (adapter / ADAPTER_FILE).write_text("{")
    with pytest.raises(BadConfig, match="not valid JSON"):
        load(base, adapter=adapter)
    for fields, text in {
        '{"peft_type": "LORA", "r": "many", "lora_alpha": 3}': "r = 'many'",
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 3, "rank_pattern": {"(": 3}}': "rank_pattern.*cannot be read",
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 3, "alpha_pattern": [3]}': "alpha_pattern.*must be an object",
    }.items():
        (adapter / ADAPTER_FILE).write_text(fields)
        with pytest.raises(BadConfig, match=text):
            load(base, adapter=adapter)
    edit_json(adapter / ADAPTER_FILE, alpha_pattern={}, target_modules=["q_proj"])
    (adapter / WEIGHTS_FILE).unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(BadWeights, match="no pickle"):
        load(base, adapter=adapter)


# ---- adapter complete ------------------------------------------------------------------------------------------------
# An adapter is whole or refused: what its config asks for is in its file. What peft writes loads, however it names modules.

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
    "excluded by a whole name": (
        "llama",
        {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
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


CHOSEN = (
    "an expression", "all products but some", "excluded by a whole name", "excluded by an expression", "one layer",
    "layers of GPT-2", "router of PhiMoE",
)  # fmt: skip
"""ways to choose modules, which `test_modules_are_chosen_as_peft_chooses_them` tries by name; a third router"""


@pytest.mark.parametrize("kind", swept(WRITTEN, "ends of names", "all products"))
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


def test_layers_after_the_last_are_no_modules_of_a_base() -> None:
    """DeepSeek's checkpoints have layers that predict further tokens. Without a number of layers, all are such."""
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)]
    for count, raw in ((0, {}), (1, {"num_hidden_layers": 1}), (2, {"num_hidden_layers": 2})):
        found = BaseModules(Source(names, lambda _: torch.zeros(1)), {"model_type": "deepseek_v3", **raw}).names
        assert found == names[:count]
