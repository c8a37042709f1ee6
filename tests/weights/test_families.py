"""Every family beyond the first eight: its logits are Hugging Face's, and nothing that its config says is overlooked."""

import inspect
import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadEdit, BadWeights, NoGradient, UnsupportedModel
from replaylens.engine.model.config import BARRED, Latent, ModelConfig, Rope, Routing, choose
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.model.sites import KEY_SITES, by_layer
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.edits import Edit
from replaylens.extend.checks import overlooked
from replaylens.weights.families import FAMILIES
from replaylens.weights.families import REFUSED as REFUSALS
from replaylens.weights.family import require_described, require_readable
from replaylens.weights.loading import build, from_hugging_face, load, save
from replaylens.weights.source import Source
from tests.engine.passes.packed import alone, logits, sequences, worst
from tests.engine.reference import decoder
from tests.families import BOTH_NAMES, HYBRIDS, MORE, core, hugging_face, hugging_face_folder
from tests.gradients.reference import difference, of_decoder
from tests.mixtures import YARN
from tests.replay.bridges import bridge
from tests.weights.models_page import NO_BRIDGE, PAGE, by_family, oracle_error, page

TOLERANCE = 2e-5
"""relative, of float32 logits against Hugging Face"""
more = pytest.mark.parametrize("name", core(MORE))
NO_GRADIENTS = ("gpt-oss", *BOTH_NAMES, *HYBRIDS)
differentiable = pytest.mark.parametrize("name", core(name for name in MORE if name not in NO_GRADIENTS))


@more
def test_logits_are_hugging_faces(name: str) -> None:
    """Ragged lengths, beyond every window. The same tokens are the most likely ones; `check` compares block by block."""
    assert oracle_error(name) < TOLERANCE
    load(hugging_face(name), check=True)


@pytest.mark.slow
def test_the_page_of_models_is_up_to_date() -> None:
    """`python -m tests.weights.models_page` writes it."""
    assert PAGE.read_text() == page(PAGE.read_text())


def test_the_page_counts_the_families() -> None:
    mixtures = sum("mixture" in family.reads for family in FAMILIES.values())
    text = PAGE.read_text()
    assert f"{len(FAMILIES) - mixtures} families of dense decoders" in text and f"and {mixtures} with [mixtures of" in text


def test_every_refused_model_has_a_known_neighbour() -> None:
    for model_type, (missing, closest) in REFUSALS.items():
        assert model_type not in FAMILIES and missing and set(closest.split()) <= set(FAMILIES)


@pytest.mark.slow
@more
def test_folders_round_trip_to_the_bit(name: str, tmp_path: Path) -> None:
    """A Hugging Face folder and a checkpoint of ours give the bits of the model in memory."""
    live = load(hugging_face(name))
    hugging_face_folder(name, tmp_path / "theirs")
    save(live, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        loaded = load(tmp_path / folder)
        assert loaded.config == live.config and weights_hash(loaded) == weights_hash(live)


@more
def test_every_tensor_matters(name: str) -> None:
    """Negative control: a tensor changed by a tenth moves the logits outside the tolerance."""
    model, tokens = load(hugging_face(name)), sequences((5, 16))
    right, generator, unnoticed = logits(model, tokens), torch.Generator().manual_seed(1), []
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.clone()
        size = 1.0 if parameter_name.endswith("correction") else 0.1  # what only experts are chosen by acts by leaps
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
        if worst(logits(model, tokens), right) < TOLERANCE and bool(kept.any()):
            unnoticed.append(parameter_name)
        parameter.copy_(kept)
    assert unnoticed == []


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "a scale by layer": ("gpt2-by-layer", {"scale_by_layer": False}),
    "no scale": ("gpt2-by-layer", {"attn_scale": 0.0}),
    "relu2": ("arcee", {"activation": "relu"}),
    "yarn": ("arcee", {"rope": Rope(5000.0)}),
    "yarn's factor on cos and sin": ("arcee", {"rope": Rope(5000.0, "yarn", 4.0, original_positions=64)}),
    "part of a head": ("nemotron", {"rotary_dim": 12}),
    "a factor on logits": ("cohere", {"logit_scale": 1.0}),
    "a factor on what is added": ("granite", {"residual_scale": 1.0}),
    "a factor on scores": ("granite", {"attn_scale": 0.0}),
    "a factor on embeddings": ("granite", {"embed_scale": 1.0}),
    "layers that do not rotate": ("smollm3", {"rotary_layers": ()}),
    "layers that rotate": ("exaone4", {"rotary_layers": (False, True)}),
    "windows": ("exaone4", {"windows": ()}),
    "a bound on q, k and v": ("olmo", {"clip_qkv": 0.0}),
    "a bound on q and k after their norms": ("olmoe-clipped", {"clip_qkv": 0.0}),
    "norms after the rotation": ("hunyuan", {"qk_norm_rotated": False}),
    "a larger base": ("hunyuan", {"rope": Rope(1e4)}),
    "a kind of norm": ("phi", {"qk_norm_kind": "rms", "norm_bias": True}),
    "short factors": ("phi3", {"rope": Rope(1e4)}),
    "local layers": ("gpt-neo", {"windows": ()}),
    "ALiBi": ("bloom", {"slopes": ()}),
    "MPT's order of slopes": ("mpt", {"slopes": tuple(2.0 ** (-8 * i / 6) for i in range(1, 7))}),
    "rotary of local layers": ("olmo3", {"local_rope": None}),
    "YaRN's factor on the scores of latent attention": ("deepseek-v3", {"attn_scale": 0.0}),
    "sinks": ("gpt-oss", {"sinks": False}),
    "a clamped activation": ("gpt-oss", {"activation": "silu"}),
    "normalised weights": ("qwen3-moe", {"routing": {"normalised": False}}),
    "weights that are not normalised": ("olmoe", {"routing": {"normalised": True}}),
    "fewer experts": ("mixtral", {"routing": {"top": 1}}),
    "sparsemixer": ("phimoe", {"routing": {"kind": "softmax"}}),
    "the reach of sparsemixer": ("phimoe", {"routing": {"jitter": 0.01}}),
    "a shared expert's gate": ("qwen2-moe", {"mixture": {"shared_gate": False}}),
}


def changed(config: ModelConfig, change: dict[str, Any]) -> ModelConfig:
    """The config with other fields; those of "mixture" and "routing" are fields of these."""
    mixture = config.mixture
    if mixture is None or not change.keys() & {"mixture", "routing"}:
        return replace(config, **change)
    routing = replace(mixture.routing, **change.get("routing", {}))
    return replace(config, mixture=replace(mixture, routing=routing, **change.get("mixture", {})))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_left_out_is_noticed(feature: str) -> None:
    """Negative control: with one feature off or wrong, the logits are far outside the tolerance."""
    name, change = FEATURES[feature]
    right = load(hugging_face(name))
    config = changed(right.config, change)
    assert config != right.config
    with torch.device("meta"):
        wanted = type(right)(config).state_dict()
    wrong = build(config, {k: x for k, x in right.state_dict().items() if k in wanted}, torch.float32)
    tokens = sequences()
    assert worst(logits(wrong, tokens), alone(hugging_face(name), tokens)) > 3 * TOLERANCE


# ---- bits and gradients --------------------------------------------------------------------------------------------------


def metric(row: Tensor) -> Tensor:
    return row.log_softmax(-1)[5] - 0.3 * row[7]


@more
def test_rows_together_have_the_bits_of_rows_alone(name: str) -> None:
    """The heart of the contract at every site; `tests/engine/test_contract.py` has the rest behind the marker `slow`."""
    tokens = sequences((20,), seed=4)[0].tolist()
    together, single = (Engine(load(hugging_face(name)), page_size=size) for size in (16, 4))
    sites = [site for site in together.sites.in_order() if not site.endswith(KEY_SITES)]
    whole, row = together.prompt(tokens, sites=sites), single.prompt(tokens[:1], sites=sites)
    for token in tokens[1:]:
        row.force([token])
    assert torch.equal(whole.kv(), row.kv())
    assert [site for site in sites if not torch.equal(whole.activations[site], row.activations[site])] == []


def test_a_pattern_leaves_a_sink_its_share() -> None:
    """The weights of keys are those of a softmax with one more score, the sink's, which has no key."""
    engine = Engine.load(hugging_face("gpt-oss"), check=False)
    sites = [f"blocks.1.attn.{name}" for name in ("hook_attn_scores", "hook_pattern")]
    branch = engine.prompt([1, 2, 3, 4, 5, 6], sites=sites)
    scores, pattern = (branch.activations[site].double() for site in sites)  # [rows, heads, keys]
    sinks = engine.model.blocks[1].attn.sinks.double()[None, :, None].expand(len(scores), -1, 1)
    wanted = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    assert (pattern - wanted).abs().max() < 1e-6
    assert float(pattern.sum(-1).max()) < 0.95  # negative control: sums would be 1 without sinks


def test_choices_have_no_gradient() -> None:
    engine = Engine.load(hugging_face("mixtral"), check=False)
    site = "blocks.1.mlp.gate.hook_choice"
    with pytest.raises(NoGradient, match="experts are chosen by comparing it"):
        engine.prompt([1, 2, 3]).gradients(metric, [site])
    found = engine.prompt([1, 2, 3], sites=[site, "blocks.1.hook_in"]).gradients(metric)
    assert set(found) == {"blocks.1.hook_in"}


WITHOUT = ("hook_pattern", "hook_choice")
"""ends of names of sites whose gradients are not compared: the reference shows patterns only; choices have none"""


@differentiable
def test_gradients_are_autograds_at_every_site(name: str) -> None:
    """Against autograd through the decoder in float64, whose logits the tests above compare with Hugging Face's."""
    tokens = sequences((23,), seed=3)[0].tolist()
    subject = Engine.load(hugging_face(name), check=False)
    sites = [site for site in subject.sites.in_order() if site not in subject.sites.read_only and not site.endswith(WITHOUT)]
    ours = subject.prompt(tokens).gradients(metric, sites)
    truth = of_decoder(load(hugging_face(name)).double(), tokens, metric)
    assert set(ours) == set(truth) == set(sites)
    assert max(difference(ours[site], truth[site]) for site in sites) < 2e-5


# ---- sites ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name not in NO_BRIDGE])
@torch.no_grad()
def test_letters_are_the_bridges(name: str) -> None:
    """S, T and C of every layer, as TransformerLens names them."""
    tokens = sequences((19,))[0]
    subject = Engine.load(hugging_face(name), check=False)
    branch = subject.prompt(tokens.tolist(), sites="STC")
    theirs = bridge(name).run_with_cache(tokens[None])[1]
    mixers = ["hook_attn_out", "mixer.hook_out", "linear_attn.hook_out", "conv.hook_out"]  # as recurrent parts are called there
    config = subject.config
    for letter, legacy in (("S", ["hook_resid_pre"]), ("T", mixers), ("C", ["hook_mlp_out", "mixer.hook_out"])):
        for layer, site in by_layer(subject.sites.per_layer(letter)).items():
            found = [name for end in legacy if (name := f"blocks.{layer}.{end}") in theirs]
            assert layer == config.num_layers or found, (letter, layer)
            for name in found[:1]:  # of a recurrent part, what is there before the factor on the stream
                factor = config.residual_scale if name.endswith("mixer.hook_out") else 1.0
                assert float((branch.activations[site] - theirs[name][0] * factor).abs().max()) < 1e-5, (letter, layer)


# ---- configs -------------------------------------------------------------------------------------------------------------


def missed(family: str, names: list[str]) -> set[str]:
    return overlooked(family, [hugging_face(name) for name in names])


def test_every_family_has_a_tiny_model() -> None:
    assert set(by_family()) == set(FAMILIES)


def test_no_field_that_transformers_computes_with_is_overlooked() -> None:
    """Otherwise a checkpoint that sets the field would load as another model. The control: one table forgets a field."""
    assert {family: found for family, names in by_family().items() if (found := missed(family, names))} == {}


def test_a_forgotten_field_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    granite = FAMILIES["granite"]
    reads = {name: read for name, read in granite.reads.items() if name != "norm_eps"}
    monkeypatch.setitem(FAMILIES, "granite", replace(granite, reads=reads))
    assert missed("granite", ["granite"]) == {"rms_norm_eps"}
    monkeypatch.setitem(FAMILIES, "olmoe", replace(FAMILIES["olmoe"], only={}))
    assert missed("olmoe", ["olmoe"]) == {"sliding_window"}  # although other families refuse them anyway


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "post-norm OPT": ("opt", {"do_layer_norm_before": False}, "opt with do_layer_norm_before = False is not supported"),
    "OPT with a projection": ("opt", {"word_embed_proj_dim": 18}, "must equal hidden_size: 36"),
    "MPT with a norm of q and k": ("mpt", {"attn_config": {"qk_ln": True}}, "mpt with attn_config qk_ln = True"),
    "Falcon with ALiBi": ("falcon", {"alibi": True}, "falcon with alibi = True is not supported"),
    "a rotation that is not known": (
        "gemma",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "rotary scaling 'proportional' is not supported",
    ),
    "an alpha that is not read": (
        "gemma",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "alpha": 8.0}},
        "sets alpha to 8.0",
    ),
    "OLMoE that clips everything": ("olmoe", {"clip_qkv": 0.0}, "olmoe with clip_qkv = 0.0 is not supported"),
    "OLMo that clips everything": ("olmo", {"clip_qkv": 0.0}, "olmo with clip_qkv = 0.0 is not supported"),
    "Gemma that sees later tokens": (
        "gemma",
        {"use_bidirectional_attention": True},
        "gemma with use_bidirectional_attention = True is not supported",
    ),
    "GPT-OSS without a window": ("gpt-oss", {"sliding_window": None}, "layer_types has sliding_attention at layers [0]"),
    "Qwen2-MoE that turns its window off": (
        "qwen2-moe",
        {"sliding_window": 0, "use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window is 0",
    ),
    "GPT-OSS with another limit": ("gpt-oss", {"swiglu_limit": 5.0}, "gpt_oss with swiglu_limit = 5.0 is not supported"),
    "PhiMoE with YaRN": ("phimoe-plain", {"rope_parameters": YARN}, "phimoe with the rotary scaling 'yarn'"),
    "GPT-J that rotates the whole head": ("gptj", {"rotary_dim": None}, "rotary_dim"),
    "other pairs": ("deepseek-v3", {"rope_interleave": False}, "deepseek_v3 with rope_interleave = False is not supported"),
    "shared latent heads": ("deepseek-v2", {"num_key_value_heads": 2}, "must equal num_attention_heads: 6"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused(what: str) -> None:
    name, changes, text = REFUSED[what]
    raw = {**hugging_face(name).config.to_dict(), **changes}
    state = hugging_face(name).state_dict()
    with pytest.raises(UnsupportedModel, match=re.escape(text)):
        from_hugging_face(raw, Source(state, state.__getitem__), torch.float32)


def test_longrope_ends_where_its_short_factors_do() -> None:
    """Beyond, transformers turns every key by other factors, so that no KV entry would be a function of its path."""
    assert load(hugging_face("phi3")).config.max_positions == 128 < hugging_face("phi3").config.max_position_embeddings


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"shared_norm": True}, "shared_norm needs parallel_residual"),
        ({"rotary_layers": (True,)}, "rotary_layers has 1 entries for 2 layers"),
        ({"post_norms": True, "residual_scale": 0.5}, "residual_scale 0.5 with post_norms"),
        ({"latent": Latent(4, 6)}, "as many key heads as heads, not 2 of 4"),
        ({"latent": Latent(4, 6), "num_kv_heads": 4}, "rotates part of every head, not 0 of 8"),
        (
            {"latent": Latent(4, 6), "num_kv_heads": 4, "rotary_dim": 2, "qk_norm": True},
            "with qk_norm, clip_qkv",
        ),
    ],
)
def test_wiring_that_fits_no_family_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(text)):
        ModelConfig(2, 32, 4, **{"num_kv_heads": 2, "d_head": 8, "d_mlp": 48, "vocab_size": 61, "max_positions": 64, **changes})


def test_the_text_of_a_config_knows_no_field_that_is_not_set() -> None:
    """So the fingerprints of models from before these fields stay as they are."""
    assert "residual_scale" not in load(hugging_face("llama")).config.to_json()
    assert "residual_scale" in load(hugging_face("granite")).config.to_json()


@pytest.mark.parametrize("name", ["phi", "olmo2", "granite", "qwen2-moe"])
@torch.no_grad()
def test_a_block_of_chosen_rows_gives_these_rows(name: str) -> None:
    """The MLP reads what attention reads (Phi), or the stream itself (OLMo-2): of the chosen rows, not of all."""
    model, chosen = load(hugging_face(name)), torch.tensor([7, 2])
    x, positions = torch.randn(9, model.config.d_model, generator=torch.Generator().manual_seed(2)), torch.arange(9)
    rotary = model.rotary(positions)[0]
    block = lambda rows: model.blocks[0](x, rotary, SequenceOps([9]), None, rows)  # noqa: E731
    torch.testing.assert_close(block(chosen), block(None)[chosen])


# ---- deepseek --------------------------------------------------------------------------------------------------------
# DeepSeek's published configs and checkpoints: every field and every tensor has its place.

YARN_OF_DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
LITE: dict[str, Any] = dict(
    model_type="deepseek_v2",
    attention_bias=False,
    aux_loss_alpha=0.001,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_scaling=YARN_OF_DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="greedy",
    v_head_dim=128,
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
V3: dict[str, Any] = V2 | dict(
    model_type="deepseek_v3",
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_nextn_predict_layers=1,
    rope_scaling=YARN_OF_DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0},
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", pytest.param("DeepSeek-V2", marks=pytest.mark.slow), "DeepSeek-V3"])
def test_a_published_config_gives_every_tensor_its_place(name: str, tmp_path: Path) -> None:
    """Of the first sparse layer and those before it, without memory for the weights."""
    raw = PUBLISHED[name]
    config, theirs = read(raw | {"num_hidden_layers": raw["first_k_dense_replace"] + 1}, tmp_path)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(theirs).state_dict()
        bare = Decoder.__new__(Decoder)
        inspect.unwrap(Decoder.__init__)(bare, config)  # a call from outside leaves the meta device
        wanted = {name: x.shape for name, x in bare.state_dict().items()}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("deepseek-v2-groups", marks=pytest.mark.slow), "deepseek-v3-groups"])
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
