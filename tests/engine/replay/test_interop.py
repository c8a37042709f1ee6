"""TransformerLens's methods on our engine against TransformerLens itself; and the tuned lens."""

from pathlib import Path

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadWeights, FingerprintMismatch, UnknownSite
from replaylens.engine.lens import lens as tuned_lens
from replaylens.engine.lens.lens import TunedLens
from replaylens.engine.model import loading
from replaylens.engine.model.sites import KEY_SITES
from tests.engine.replay.bridges import bridge
from tests.families import hugging_face

TOKENS = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def served() -> Engine:
    return Engine(loading.load(hugging_face("llama")))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_run_with_cache_gives_transformer_lens_values_and_names(name: str) -> None:
    logits, cache = Engine(loading.load(hugging_face(name))).run_with_cache(TOKENS)
    with torch.no_grad():
        their_logits, their_cache = bridge(name).run_with_cache(TOKENS)
    assert torch.allclose(logits, their_logits, atol=2e-5)
    checked = 0
    for key, value in cache.items():
        if key in their_cache.cache_dict:
            assert value.shape == their_cache[key].shape, key
            assert torch.allclose(value, their_cache[key], atol=1e-4), key
            checked += 1
    assert checked > 40


def test_cached_decode_has_the_bits_of_a_full_forward_here_and_not_there() -> None:
    """The residual stream and the logits of a path are equal token by token over the KV cache and in one pass.

    In TransformerLens they differ: the bits of the library's products depend on the number of rows.
    """
    path, sites = TOKENS[:1], ["blocks.2.hook_out", "unembed.hook_out"]
    lens, seen = bridge("llama"), []
    with torch.no_grad(), lens.hooks(fwd_hooks=[(sites[0], lambda x, hook: seen.append(x))]):
        full, past, steps = lens(path), None, []
        for token in path.T:
            logits, past = lens(token[None], return_type="logits_and_cache", use_cache=True, past_key_values=past)
            steps.append(logits)
    theirs = {sites[0]: (seen[0], torch.cat(seen[1:], dim=1)), sites[1]: (full, torch.cat(steps, dim=1))}
    served = Engine(loading.load(hugging_face("llama")))
    whole, stepped = (served.prompt(tokens.tolist(), sites=sites) for tokens in (path[0], path[0, :1]))
    for token in path[0, 1:].tolist():
        stepped.force([token])
    for site in sites:
        one, other = theirs[site]
        assert one.shape == other.shape and 0 < float((one - other).abs().max()) < 1e-4, "the same function, other bits"
        assert torch.equal(whole.activations[site], stepped.activations[site])
        assert torch.allclose(whole.activations[site], one[0], atol=2e-5), "and ours is that function"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_every_site_has_the_shape_that_transformer_lens_gives_it(name: str) -> None:
    """Prompts of one token and more, shorter and longer than a head's width (8 or 16) and a block of keys."""
    subject = Engine(loading.load(hugging_face(name)))
    for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 32, 40):
        tokens = torch.arange(length)[None] % 90 + 3
        _, cache = subject.run_with_cache(tokens)
        with torch.no_grad():
            _, theirs = bridge(name).run_with_cache(tokens)
        both = [key for key, _ in cache.items() if key in theirs.cache_dict]
        assert len(both) > 40
        assert {key: cache[key].shape for key in both} == {key: theirs[key].shape for key in both}, length
        for key, site in subject.sites.sites.items():  # including sites that TransformerLens lacks
            keys = [subject.config.num_heads, length, length] if key.endswith(KEY_SITES) else [length, *site.shape]
            assert list(cache[key].shape) == [1, *keys], key


def test_cache_methods_work(served: Engine) -> None:
    _, cache = served.run_with_cache(TOKENS)
    assert torch.equal(cache["resid_post", 2], cache["blocks.2.hook_out"])
    assert cache.accumulated_resid(layer=2).shape == (3, 2, 21, 32) or cache.accumulated_resid(layer=2).shape[1:] == (2, 21, 32)
    assert torch.allclose(cache["pattern", 0].sum(-1), torch.ones(2, 4, 21), atol=1e-6)


def test_filters_and_slices(served: Engine) -> None:
    _, one = served.run_with_cache(TOKENS[0], "blocks.1.hook_resid_pre")
    assert set(one.keys()) == {"blocks.1.hook_in", "blocks.1.hook_resid_pre"}
    _, some = served.run_with_cache(TOKENS, lambda n: n.endswith("mlp_out"), pos_slice=slice(3, 9))
    assert all(v.shape == (2, 6, 32) for v in some.values()) and len(some) == 3
    _, last = served.run_with_cache(TOKENS, ["blocks.0.hook_in"], pos_slice=-1)
    assert last["blocks.0.hook_in"].shape == (2, 1, 32)
    with pytest.raises(UnknownSite, match="Nearest"):
        served.run_with_cache(TOKENS, "blocks.0.hook_on")
    with pytest.raises(BadRequest, match="differ in length"):
        served.run_with_cache([[1, 2], [3]])


def test_cached_values_are_the_committed_ones(served: Engine) -> None:
    """`run_with_cache`, a replayed path and a fork give the same bits."""
    branch = served.prompt(TOKENS[0, :9].tolist(), sites="STC")
    branch.generate(8, final=True)
    _, cache = served.run_with_cache(branch.tokens)
    for site in branch.activations.sites():
        assert torch.equal(cache[site][0], branch.activations[site])


def test_last_lens_is_the_model_itself(served: Engine) -> None:
    """Identity check of the logit lens, on bits: the last entry of Z is the distribution that tokens are drawn from."""
    branch = served.prompt(TOKENS[0].tolist(), sites=["Z", "unembed.hook_out"], full=True)
    own = tuned_lens.log_softmax(branch.activations["unembed.hook_out"])
    z = branch.activations["Z.full"]
    assert torch.equal(z[:, -1], own[: len(z)])
    assert not torch.equal(z[:, 0], own[: len(z)])


@pytest.fixture(scope="module")
def trained(served: Engine) -> tuple[torch.Tensor, TunedLens]:
    branch = served.prompt(TOKENS[1].tolist(), sites="S")
    rows = torch.stack([branch.activations[s] for s in served.sites.letter("S")], dim=1)
    return rows, tuned_lens.train(served.model, rows, steps=80, lr=3e-3)


def test_tuned_lens_brings_layers_nearer_and_keeps_the_last(served: Engine, trained: tuple[torch.Tensor, TunedLens]) -> None:
    plain = served.prompt(TOKENS[1].tolist(), sites="Z").activations
    tuned = served.prompt(TOKENS[1].tolist(), sites="Z", lens=trained[1]).activations
    assert bool((tuned["Z.kl"][:, :-1].mean(0) < plain["Z.kl"][:, :-1].mean(0)).all())
    for name in ("Z.kl", "Z.entropy", "Z.top_ids"):
        assert torch.equal(tuned[name][:, -1], plain[name][:, -1])


def test_tuned_lens_is_a_function_of_its_rows_and_of_each_row_alone(
    served: Engine, trained: tuple[torch.Tensor, TunedLens]
) -> None:
    rows, lens = trained
    again = tuned_lens.train(served.model, rows, steps=80, lr=3e-3)
    assert again.digest == lens.digest
    whole = lens.translate(rows)
    assert all(torch.equal(lens.translate(rows[i : i + 1])[0], whole[i]) for i in range(len(rows)))


def test_tuned_lens_is_saved_with_its_unembedding(
    served: Engine, trained: tuple[torch.Tensor, TunedLens], tmp_path: Path
) -> None:
    trained[1].save(tmp_path / "lens.safetensors")
    loaded = TunedLens.load(tmp_path / "lens.safetensors")
    assert loaded.digest == trained[1].digest and loaded.require(served.model) is loaded
    with pytest.raises(FingerprintMismatch, match="another unembedding"):
        loaded.require(loading.load(hugging_face("qwen3")))
    about = tmp_path / "lens.json"
    about.write_text(about.read_text().replace(loaded.digest, "0" * 64))
    with pytest.raises(BadWeights, match="do not match"):
        TunedLens.load(tmp_path / "lens.safetensors")
