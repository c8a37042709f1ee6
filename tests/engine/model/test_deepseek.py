"""DeepSeek's published configs and checkpoints: every field and every tensor has its place."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadWeights, UnsupportedModel
from replaylens.engine.model.config import BARRED, Latent, ModelConfig, Routing, choose
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.families import FAMILIES
from replaylens.engine.model.loading import load, require_described, require_readable, weights_hash
from replaylens.engine.request.edits import Edit
from tests.engine.reference import decoder
from tests.families import hugging_face

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
COMMON: dict[str, Any] = dict(
    attention_bias=False,
    aux_loss_alpha=0.001,
    hidden_act="silu",
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_layer_freq=1,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    seq_aux=True,
    tie_word_embeddings=False,
    v_head_dim=128,
)
LITE: dict[str, Any] = COMMON | dict(
    model_type="deepseek_v2",
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_group=1,
    topk_method="greedy",
    vocab_size=102400,
)
V2: dict[str, Any] = LITE | dict(
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_group=8,
    n_routed_experts=160,
    num_attention_heads=128,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    routed_scaling_factor=16.0,
    topk_group=3,
    topk_method="group_limited_greedy",
)
V3: dict[str, Any] = COMMON | dict(
    model_type="deepseek_v3",
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
)
PUBLISHED = {"DeepSeek-V2-Lite": LITE, "DeepSeek-V2": V2, "DeepSeek-V3": V3}


def read(raw: dict[str, Any], folder: Path) -> tuple[ModelConfig, Any]:
    """Our config and that of transformers, from a config file."""
    (folder / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(folder)
    family, fields = FAMILIES[raw["model_type"]], theirs.to_dict()
    require_readable(fields, family)
    config = family.config(fields)
    require_described(fields, family, config)
    return config, theirs


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_every_tensor_its_place(name: str, tmp_path: Path) -> None:
    """Of the first sparse layer and those before it, without memory for the weights."""
    raw = PUBLISHED[name]
    config, theirs = read(raw | {"num_hidden_layers": raw["first_k_dense_replace"] + 1}, tmp_path)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(theirs).state_dict()
        wanted = {name: x.shape for name, x in Decoder(config).state_dict().items()}
    read_names: set[str] = set()
    get = lambda name: (read_names.add(name), state[name])[1]  # noqa: E731
    made = FAMILIES[config.family].tensors(config, get)
    assert {name: x.shape for name, x in made.items()} == wanted
    assert read_names == set(state)


def test_the_published_sizes(tmp_path: Path) -> None:
    lite, _ = read(LITE, tmp_path)
    assert lite.latent == Latent(rank=512, d_value=128, query_rank=0) and lite.kv_shape == (1, 1, 576)
    assert lite.d_head == 192 and lite.rotary_dim == 64
    grown = 0.1 * 0.707 * 3.6888794541139363 + 1  # ln 40
    assert lite.scale == pytest.approx(192**-0.5 * grown**2) and lite.rope.attention_factor == 1.0
    big, _ = read(V3, tmp_path)
    assert big.mixture is not None and big.mixture.layers == (False,) * 3 + (True,) * 58
    routing = big.mixture.routing
    assert (routing.kind, routing.groups, routing.chosen_groups, routing.group_best) == ("sigmoid", 8, 4, 2)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
    ],
)
def test_what_transformers_would_ignore_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        read(LITE | changes, tmp_path)


def test_the_layer_that_guesses_further_tokens_is_left_out(tmp_path: Path) -> None:
    """As in transformers. Any other tensor that is not read is an error."""
    model = hugging_face("deepseek-v3-groups")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    later = {"model.layers.2.eh_proj.weight": torch.ones(2, 2), "model.layers.2.mlp.gate.weight": torch.ones(2, 2)}
    save_file(weights | later, tmp_path / "model.safetensors", {"format": "pt"})
    assert weights_hash(load(tmp_path)) == weights_hash(load(model))
    save_file(weights | {"model.layers.1.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadWeights, match=r"such as model.layers.1.eh_proj.weight"):
        load(tmp_path)


# ---- routing in groups ---------------------------------------------------------------------------------------------------

ROUTER = "blocks.1.mlp.gate."


@pytest.mark.parametrize("name", ["deepseek-v2-groups", "deepseek-v3-groups"])
def test_forced_experts_bring_their_groups_along(name: str) -> None:
    """Eight experts in four groups, two of which are chosen; three experts a row."""
    engine = Engine(decoder(name))
    for experts in ([7], [0, 1], [2, 5]):
        edit = Edit(ROUTER + "hook_out", "force", experts=experts)
        chosen = engine.prompt(range(3, 30), sites=[ROUTER + "hook_expert_indices"], edits=[edit])
        rows = chosen.activations[ROUTER + "hook_expert_indices"]
        assert all(bool((rows == expert).any(-1).all()) for expert in experts)
        assert all(len({int(each) // 2 for each in row}) <= 2 for row in rows)


@pytest.mark.parametrize("name", ["deepseek-v2-groups", "deepseek-v3-groups"])
def test_no_forbidden_expert_is_chosen_in_any_group(name: str) -> None:
    """Every set of forbidden experts that is not refused, also by two edits, leaves enough in whatever groups are chosen."""
    engine, taken = Engine(decoder(name)), 0
    for experts in (each for count in range(1, 6) for each in combinations(range(8), count)):
        left = [2 - sum(expert // 2 == group for expert in experts) for group in range(4)]
        edits = [Edit(ROUTER + "hook_out", "forbid", experts=list(experts))]
        if sum(sorted(count for count in left if count)[:2]) < 3:
            with pytest.raises(BadEdit, match=r"may leave \d of the 3 experts that a row goes to"):
                engine.prompt(range(3, 9), edits=edits)
            continue
        taken += 1
        if len(experts) > 2:
            edits = [Edit(ROUTER + "hook_out", "forbid", experts=[each]) for each in experts]
        found = engine.prompt(range(3, 23), sites=[ROUTER + "hook_expert_indices"], edits=edits)
        assert not set(found.activations[ROUTER + "hook_expert_indices"].flatten().tolist()) & set(experts)
    assert taken == 8 + 4 + 24 + 6 + 24  # one expert; a group, and one of another; two groups, and one of another


def test_a_group_with_one_expert_left_counts_with_its_score() -> None:
    """Its score is that of the one that is left, so groups are not equal for the lack of a second."""
    routing = Routing(1, "sigmoid", groups=4, chosen_groups=1, group_best=2, correction=True)
    scores = torch.tensor([[0.1, 0.2, 0.1, 0.3, 0.1, 0.9, 0.2, 0.8]])
    scores[:, ::2] += 2 * BARRED
    assert choose(scores, routing).tolist() == [[5]]
    scores[:, 5] += 2 * BARRED  # nothing is left of the best group
    assert choose(scores, routing).tolist() == [[7]]
    scores[:, 1] -= 2 * BARRED  # forced
    assert choose(scores, routing).tolist() == [[1]]


def test_experts_of_too_many_groups_cannot_be_forced() -> None:
    edit = Edit(ROUTER + "hook_out", "force", experts=[0, 2, 5])
    with pytest.raises(
        BadEdit, match=r"experts \[0, 2, 5\] are in 3 groups, but a row goes to 2. Force those of fewer groups."
    ):
        Engine(decoder("deepseek-v3-groups")).prompt([1, 2, 3], edits=[edit])
