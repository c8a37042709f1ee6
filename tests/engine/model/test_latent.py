"""Latent attention: what it holds, shows and refuses. `test_families.py` compares its logits with Hugging Face's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import VERIFIED, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit
from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.loading import load
from replaylens.engine.passes.products import Products
from replaylens.engine.replay.run import Run
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from replaylens.engine.training.score import generate
from replaylens.tasks import WordTokenizer, get
from tests.engine.model.models_page import NO_BRIDGE
from tests.engine.passes.packed import relative, sequences
from tests.engine.reference import decoder, random_decoder
from tests.engine.replay.bridges import bridge
from tests.families import LATENT_NAMES, hugging_face

LAYER = "blocks.1.attn."
INNER = ("hook_kv_latent", "hook_rot_q", "hook_rot_k", "hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern")
TOKENS = sequences((29,), seed=5)[0].tolist()
WIDE = ModelConfig(
    num_layers=2,
    d_model=128,
    num_heads=4,
    num_kv_heads=4,
    d_head=48,
    d_mlp=160,
    vocab_size=97,
    max_positions=128,
    rotary_dim=16,
    latent=Latent(rank=96, d_value=40, query_rank=64),
)
"""products that are long enough to round differently in another order"""

each = pytest.mark.parametrize(
    "name", [n if n in ("deepseek-v2", "deepseek-v3") else pytest.param(n, marks=pytest.mark.slow) for n in LATENT_NAMES]
)


def captured(name: str, *sites: str) -> Branch:
    return Engine(decoder(name)).prompt(TOKENS, sites=[LAYER + site for site in sites])


# ---- the cache -----------------------------------------------------------------------------------------------------------


@each
def test_the_cache_holds_the_latent_and_the_rotated_part_of_the_keys(name: str) -> None:
    branch = captured(name, "hook_kv_latent", "hook_rot_k")
    config, kv = branch.engine.config, branch.kv()
    assert config.latent is not None
    width = config.latent.rank + config.rotary_dim
    assert kv.shape == (len(TOKENS), 2, *config.kv_shape) == (len(TOKENS), 2, 1, 1, width)
    rows = branch.activations
    both = torch.cat([rows[LAYER + "hook_kv_latent"], rows[LAYER + "hook_rot_k"][:, 0]], dim=-1)
    assert torch.equal(kv[:, 1, 0, 0], both)


def test_the_cache_is_smaller_than_one_of_keys_and_values() -> None:
    cache = Engine(decoder("deepseek-v3"), cache_tokens=256).runner.cache
    slots = cache.data.shape[3]
    assert cache.num_bytes == 2 * slots * (13 + 6) * 4
    expanded = 2 * slots * 6 * (13 + 5) * 4  # six heads, keys of 13 dimensions, values of 5
    assert cache.num_bytes < expanded / 5


# ---- sites ---------------------------------------------------------------------------------------------------------------


@each
def test_keys_and_values_give_the_pattern_and_the_output(name: str) -> None:
    """What is shown of each head, put together as the plain form of attention, is what the absorbed form computes."""
    branch = captured(name, *INNER, "o.hook_in")
    q, k, v, scores, pattern, z = (
        branch.activations[LAYER + site]
        for site in ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "o.hook_in")
    )
    config = branch.engine.config
    assert q.shape == k.shape == (len(TOKENS), 6, config.d_head) and v.shape == z.shape == (len(TOKENS), 6, 5)
    plain = torch.einsum("ihd,jhd->ihj", q, k) * config.scale
    hidden = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)[:, None]
    assert relative(plain.masked_fill(hidden, 0), scores.masked_fill(hidden, 0)) < 2e-6
    weights = plain.masked_fill(hidden, float("-inf")).softmax(-1)
    assert relative(weights, pattern) < 2e-6
    assert relative(torch.einsum("ihj,jhd->ihd", weights, v), z) < 2e-6
    shared = branch.activations[LAYER + "hook_rot_k"]
    assert torch.equal(k[..., -config.rotary_dim :], shared.expand(-1, 6, -1))
    assert torch.equal(q[..., -config.rotary_dim :], branch.activations[LAYER + "hook_rot_q"])


@each
@torch.no_grad()
def test_latents_and_pattern_are_hugging_faces(name: str) -> None:
    model, seen = hugging_face(name), dict[str, Tensor]()
    attention = model.model.layers[1].self_attn
    keep = lambda site: lambda _, __, out: seen.__setitem__(site, out[0])  # noqa: E731
    norms = {"hook_kv_latent": attention.kv_a_layernorm, "hook_q_latent": attention.q_a_layernorm}
    hooks = [module.register_forward_hook(keep(site)) for site, module in norms.items() if module is not None]
    seen["hook_pattern"] = model(torch.tensor([TOKENS]), output_attentions=True).attentions[1][0].transpose(0, 1)
    for hook in hooks:
        hook.remove()
    branch = captured(name, *seen)
    assert ("hook_q_latent" in seen) == (branch.engine.config.latent.query_rank > 0)  # type: ignore[union-attr]
    assert {site: relative(branch.activations[LAYER + site], value) < 2e-6 for site, value in seen.items()} == {
        site: True for site in seen
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LATENT_NAMES if name not in NO_BRIDGE])
@torch.no_grad()
def test_names_and_values_are_the_bridges(name: str) -> None:
    """By TransformerLens' verb, in its layout. Its hook_z takes the width of values for the number of heads, and DeepSeek-V2's
    bridge has the pairs of rotated dimensions side by side, V3's and ours apart."""
    names = [LAYER + site for site in INNER]
    names += [LAYER + "kv_a_layernorm.hook_out", LAYER + "kv_b_proj.hook_in", LAYER + "hook_z", LAYER + "hook_out"]
    theirs = bridge(name).run_with_cache(torch.tensor([TOKENS]))[1]
    ours = Engine(decoder(name)).run_with_cache(TOKENS, names_filter=names, return_cache_object=False)[1]
    for site in names:
        if name.startswith("deepseek-v2") and site.endswith(("rot_q", "rot_k", "hook_q", "hook_k")):
            continue
        other = theirs[site].reshape(ours[site].shape) if site.endswith("hook_z") else theirs[site]
        seen = ours[site] > torch.finfo(torch.float32).min
        assert ours[site].shape == other.shape and relative(ours[site][seen], other[seen]) < 3e-6, site


# ---- edits ---------------------------------------------------------------------------------------------------------------

WIDTHS = {
    "q_a_layernorm.hook_in": (11,),
    "q_b_proj.hook_in": (11,),
    "hook_q_latent": (11,),
    "kv_a_layernorm.hook_in": (13,),
    "hook_kv_latent": (13,),
    "hook_rot_q": (6, 6),
    "hook_rot_k": (1, 6),
    "hook_q": (6, 13),
}


@pytest.mark.parametrize("site", [*WIDTHS, "hook_z"])
def test_edits_reach_what_follows_and_have_the_same_bits_in_a_fork(site: str) -> None:
    engine = Engine(decoder("deepseek-v3"))
    value = torch.randn(WIDTHS.get(site, (6, 5)), generator=torch.Generator().manual_seed(1))
    edit = Edit(LAYER.replace("1", "0") + site, "add", value, positions=slice(17, 18))
    plain, edited = engine.prompt(TOKENS, sites="STC"), engine.prompt(TOKENS, sites="STC", edits=[edit])
    (fork,) = plain.fork(at=17, edits=[edit])
    fork.force(TOKENS[17:])
    assert torch.equal(fork.kv(), edited.kv())
    changed = (edited.kv() != plain.kv()).flatten(2).any(-1)  # [positions, layers]
    assert not changed[:17].any() and changed[17, 1]
    assert bool(changed[17, 0]) == (site in ("kv_a_layernorm.hook_in", "hook_kv_latent", "hook_rot_k"))
    for name in edited.activations.sites():
        assert torch.equal(fork.activations[name], edited.activations[name])


@pytest.mark.parametrize("site", ["hook_k", "hook_v"])
def test_keys_and_values_of_heads_are_shown_and_not_edited(site: str) -> None:
    """Attention computes with neither, so that an edit would change nothing."""
    with pytest.raises(BadEdit, match=f"{site} can be captured but not edited. It is computed beside the pass"):
        Engine(decoder("deepseek-v3")).prompt(TOKENS, edits=[Edit(LAYER + site, "zero")])


def test_what_is_shown_changes_no_bit() -> None:
    shown, plain = captured("deepseek-v3", *INNER), Engine(decoder("deepseek-v3")).prompt(TOKENS)
    assert torch.equal(shown.generate(4).kv(), plain.generate(4).kv())


def test_an_edge_can_be_cut() -> None:
    engine = Engine(decoder("deepseek-v2"))
    cut = [Edit(LAYER + "hook_pattern", "zero", positions=[20], keys=[3, 4], heads=[2])]
    branch = engine.prompt(TOKENS, edits=cut, sites=[LAYER + "hook_pattern"])
    pattern = branch.activations[LAYER + "hook_pattern"]
    assert not pattern[20, 2, 3:5].any() and pattern[20, 1, 3:5].all() and pattern[19, 2, 3:5].all()


def test_plain_decoding_for_training_writes_the_same_tokens() -> None:
    model = decoder("deepseek-v3")
    assert generate(model, [TOKENS, TOKENS[:7]], 6)[0] == Engine(model).prompt(TOKENS).generate(6).generated


# ---- dumps ---------------------------------------------------------------------------------------------------------------


def test_a_dump_with_latents_is_verified(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(get("coin").vocabulary())
    model = random_decoder(replace(WIDE, vocab_size=len(tokenizer)))
    engine = Engine(model, tokenizer)
    run = engine.replay(get("coin")(flips=(1, 2)).examples(3), sites=["S", LAYER + "hook_kv_latent"], max_new=3)
    assert isinstance(run, Run)
    dump = run.save(tmp_path / "dump")
    assert Dump.open(dump.url).manifest.sites[LAYER + "hook_kv_latent"]
    assert verify(dump.url, Engine(model, tokenizer, page_size=4), sample="all").status == VERIFIED


# ---- products by head ----------------------------------------------------------------------------------------------------


def test_another_order_of_sums_by_head_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: KV shows it if the products of a single row differ from those of many."""
    model, right = random_decoder(WIDE), Products.by_head

    def in_halves(self: Products, x: Tensor, weight: Tensor) -> Tensor:
        if len(x) > 1:
            return right(self, x, weight)
        half = weight.shape[1] // 2
        return right(self, x[..., :half], weight[:, :half]) + right(self, x[..., half:], weight[:, half:])

    kv = lambda cuts: _in_pieces(Engine(model), TOKENS, cuts).kv()  # noqa: E731
    assert torch.equal(kv([29]), kv([1] * 29))
    monkeypatch.setattr(Products, "by_head", in_halves)
    assert not torch.equal(kv([29]), kv([1] * 29))


def _in_pieces(engine: Engine, tokens: list[int], cuts: list[int]) -> Branch:
    branch, done = engine.prompt(tokens[: cuts[0]]), cuts[0]
    for count in cuts[1:]:
        branch.force(tokens[done : done + count])
        done += count
    return branch


def test_a_weight_and_its_transpose_are_packed_apart() -> None:
    """Both lie at one address."""
    weight, products = torch.arange(9.0).view(3, 3), Products()
    for each in (weight, weight.t(), weight[:2, :2]):
        assert torch.equal(products.product(torch.eye(len(each)), each), each)


# ---- configs -------------------------------------------------------------------------------------------------------------


def test_the_config_survives_its_text() -> None:
    assert ModelConfig.from_json(WIDE.to_json()) == WIDE
    assert '"latent"' not in replace(WIDE, latent=None).to_json()


def test_shared_parts_are_read_from_one_tensor() -> None:
    """Keys and values of `kv_b_proj` are stored apart, by head."""
    theirs = hugging_face("deepseek-v3").model.layers[0].self_attn.kv_b_proj.weight.view(6, 7 + 5, 13)
    state = load(hugging_face("deepseek-v3")).state_dict()
    assert torch.equal(state["blocks.0.attn.k.weight"], theirs[:, :7].transpose(1, 2))
    assert torch.equal(state["blocks.0.attn.v.weight"], theirs[:, 7:].transpose(1, 2))
