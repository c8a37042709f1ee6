"""What a TransformerLens user types, with TransformerLens' own answers beside it."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import Edit, tasks
from replaylens.engine import transformer_lens
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, Caveat, UnknownSite
from replaylens.engine.model.sites import KEY_SITES
from replaylens.engine.passes import lens as tuned_lens
from replaylens.engine.passes.lens import TunedLens
from replaylens.weights import loading
from tests.families import hugging_face
from tests.replay.bridges import bridge

TOKENS = torch.randint(4, 97, (2, 21), generator=torch.Generator().manual_seed(4))
NAMES = ["llama", "gpt2"]
MORE = [*NAMES, "gemma2", "qwen3", "neox"]
CLOSE = 1e-4


def engine(name: str) -> Engine:
    return Engine(loading.load(hugging_face(name)), tokenizer=bridge(name).tokenizer)


@pytest.fixture(scope="module")
def llama() -> Engine:
    return engine("llama")


def near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=CLOSE), float((ours - theirs).abs().max())


# Names


def test_a_name_that_goes_in_comes_out(llama: Engine) -> None:
    """Under each name that was asked for, also in lists, forks and rejected branches; letters give sites their own names."""
    path = TOKENS[0].tolist()
    asked = ["blocks.1.hook_resid_post", "blocks.0.attn.o.hook_out", "blocks.2.hook_in", "blocks.2.hook_resid_pre"]
    branch = llama.prompt(path, sites=asked)
    (fork,) = branch.fork(at=9)
    fork.generate(6, drafter="ngram", final=True)
    own = ["blocks.1.hook_out", "blocks.0.attn.hook_out", "blocks.2.hook_in"]
    truth = llama.prompt(path, sites=own).activations
    for each in (branch, fork):
        rows = each.activations
        assert sorted(rows) == sorted(rows.keys()) == sorted(asked) == sorted(dict(rows.items())) and len(rows) == 4
        for name, site in zip(asked, [*own, own[2]], strict=True):
            assert name in rows and site in rows
            assert torch.equal(rows[name][:9], truth[site][:9]) and torch.equal(rows[name], rows[site])
    assert "blocks.0.hook_in" not in branch.activations
    with pytest.raises(UnknownSite, match=r"Captured: blocks\.0\.attn\.o\.hook_out, blocks\.1\.hook_resid_post"):
        branch.activations["blocks.0.hook_in"]
    assert llama.prompt(path, sites=["S", "blocks.1.hook_resid_pre"]).activations.keys()[1:3] == [
        "blocks.1.hook_in",
        "blocks.1.hook_resid_pre",
    ]


def test_a_dump_is_read_by_the_names_it_was_asked_for(tmp_path: Path) -> None:
    coin = Engine.load("coin-plain")
    asked = ["blocks.1.hook_resid_post", "blocks.1.attn.o.hook_out", "blocks.1.mlp.in.hook_in", "blocks.2.ln1.hook_scale"]
    run = coin.replay(tasks.get("coin")(flips=2).examples(2), sites=asked)
    dump = run.save(tmp_path / "dump")
    assert set(run[0].activations) == set(asked)
    for name in asked:
        assert torch.equal(dump.to_torch(name)[: len(run[0].tokens)], run[0].activations[name]), name
    with pytest.raises(UnknownSite):
        dump.to_torch("blocks.1.attn.hook_in")


def test_the_stream_between_blocks_has_two_names_until_it_is_changed_there(llama: Engine) -> None:
    path = TOKENS[0].tolist()
    root = llama.prompt(path, sites="S")
    truth = llama.prompt(path, sites=["blocks.0.hook_resid_post"]).activations
    assert torch.equal(root.activations["blocks.0.hook_resid_post"], truth["blocks.0.hook_out"])
    shift = [Edit("blocks.1.hook_in", "add", torch.ones(32))]
    edited = [root.fork(edits=shift)[0], llama.prompt(path, sites="S", edits=shift)]
    hooked = llama.prompt(path, sites="S", hooks=[("blocks.1.hook_in", lambda value, hook: value + 1)])
    for branch in (*edited, hooked):
        assert "blocks.0.hook_out" not in branch.activations and "blocks.1.hook_out" in branch.activations
        with pytest.raises(UnknownSite):
            branch.activations["blocks.0.hook_resid_post"]


def test_patterns_are_as_long_as_their_keys(llama: Engine) -> None:
    """One key per position, however many a pass leaves room for, and whichever pass a row is from."""
    sites = ["blocks.1.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"]
    path = (TOKENS.flatten().tolist() * 2)[:80]
    whole, stepped = llama.prompt(path, sites=sites), llama.prompt(path[:7], sites=sites)
    assert stepped.activations[sites[0]].shape == (7, 4, 7)
    stepped.force(path[7:30]).force(path[30:])
    for site in sites:
        assert torch.equal(whole.activations[site], stepped.activations[site])
        assert whole.activations[site].shape == (80, 4, 80)
        assert torch.equal(whole.fork(at=20)[0].activations[site], stepped.activations[site][:20, :, :20])
    scores = whole.activations[sites[1]]
    assert torch.allclose(scores.softmax(-1), whole.activations[sites[0]], atol=1e-6)
    assert bool((scores[3, :, 4:] == torch.finfo(torch.float32).min).all()) and bool((scores[3, :, :4] > -99).all())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "neox"])
def test_new_sites_have_the_same_bits_alone_and_in_company(name: str) -> None:
    """Also token by token. They change no other bit: S and the logits are those of a run that does not ask for them."""
    served = engine(name)
    table = served.sites
    new = [site for site in table.sites if site.endswith(("hook_scale", "hook_normalized", "attn_scores", "_norm.hook_out"))]
    assert len(new) >= 5 * 3 + 2
    kept = ["S", "unembed.hook_out"]
    path = TOKENS[0].tolist()
    alone = served.prompt(path, sites=[*new, *kept]).activations
    company = served.prompts([TOKENS[1].tolist(), path, path[:5]], sites=[*new, *kept])[1].activations
    stepped = served.prompt(path[:4], sites=[*new, *kept])
    for token in path[4:]:
        stepped.force([token])
    plain = served.prompt(path, sites=kept).activations
    for site in alone:
        assert torch.equal(alone[site], company[site]) and torch.equal(alone[site], stepped.activations[site]), site
    assert all(torch.equal(plain[site], alone[site]) for site in plain)
    for norm in ("blocks.1.ln1", "blocks.2.ln2", "ln_final"):
        rows, weight = alone[norm + ".hook_normalized"], dict(served.model.named_parameters())[norm + ".weight"]
        bias = dict(served.model.named_parameters()).get(norm + ".bias", 0)
        assert torch.allclose(
            rows * weight + bias, served.prompt(path, sites=[norm + ".hook_out"]).activations[norm + ".hook_out"], atol=1e-5
        )


def test_what_can_only_be_read_is_not_changed(llama: Engine) -> None:
    path, seen = TOKENS[0].tolist(), []
    root = llama.prompt(path, sites="S")
    for name in ("blocks.1.attn.q.hook_in", "blocks.1.ln1.hook_scale", "blocks.1.attn.hook_attn_scores"):
        with pytest.raises(BadEdit, match="can be captured but not edited"):
            root.fork(edits=[Edit(name, "zero")])
        hooked = llama.prompt(path, sites="S", hooks=[(name, lambda value, hook: seen.append(value))])
        assert all(torch.equal(hooked.activations[site], root.activations[site]) for site in root.activations)
        with pytest.raises(BadEdit, match="can be read but not changed"):
            llama.prompt(path, hooks=[(name, lambda value, hook: value + 1)])
        with pytest.raises(BadEdit, match="can be read but not changed"):
            llama.prompt(path, hooks=[(name, lambda value, hook: value.zero_())])
    assert len(seen) == 3
    assert root.fork(edits=[Edit("blocks.1.attn.o.hook_out", "zero")])[0].certified
    with pytest.raises(BadEdit, match="never called"):
        llama.prompt(path, hooks=[("ln_final.hook_scale", lambda value, hook: value)])
    llama.check_integrity()


# run_with_cache


@pytest.mark.parametrize("name", MORE)
@torch.no_grad()
def test_every_name_of_the_cache(name: str) -> None:
    """The cache without a filter has the bridge's names and values; what it lacks is in the docs."""
    out, cache = engine(name).run_with_cache(TOKENS)
    theirs_out, theirs = bridge(name).run_with_cache(TOKENS)
    near(out, theirs_out)
    absent = {key for key in theirs.cache_dict if key not in cache.cache_dict}
    assert {key.rsplit(".", 2)[-1] for key in absent if "_norm." not in key and "rotary" not in key} <= {
        "hook_cos",
        "hook_sin",
        "hook_hidden_states",
    }
    for key in set(cache.keys()) & set(theirs.keys()):
        near(cache[key].float(), theirs[key].float())


@torch.no_grad()
def test_options_of_run_with_cache(llama: Engine) -> None:
    theirs = bridge("llama")
    names = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_pattern", "blocks.0.attn.q.hook_in"]
    one = TOKENS[:1]
    (out, cache), (wanted, want) = (m.run_with_cache(one, names_filter=names, remove_batch_dim=True) for m in (llama, theirs))
    near(out, wanted)
    for key in names:
        near(cache[key], want[key])
    for kind in ("loss", "both", None):
        ours, other = (m.run_with_cache(TOKENS, names_filter=names, return_type=kind)[0] for m in (llama, theirs))
        for a, b in zip(ours, other, strict=True) if kind == "both" else [(ours, other)] if kind else []:
            near(a, b)
        assert kind or ours is None
    for stop in (0, 1, 2, -1):
        (out, cache), (wanted, want) = (m.run_with_cache(TOKENS, stop_at_layer=stop) for m in (llama, theirs))
        near(out, wanted)
        assert {key.split(".")[1] for key in cache if key.startswith("blocks")} == set(map(str, range(stop % 3)))
    near(llama(TOKENS, stop_at_layer=3), llama.run_with_cache(TOKENS, "blocks.2.hook_out")[1]["blocks.2.hook_out"])
    plain = llama.run_with_cache(TOKENS, "blocks.0.hook_in", return_cache_object=False)[1]
    assert type(plain) is dict and plain["blocks.0.hook_in"].shape == (2, 21, 32)
    near(llama(TOKENS, return_type="loss", loss_per_token=True), theirs(TOKENS, return_type="loss", loss_per_token=True))
    assert torch.equal(llama(TOKENS), llama.run_with_cache(TOKENS, "blocks.0.hook_in")[0])


@pytest.mark.parametrize(
    "options, says",
    [
        ({"remove_batch_dim": True}, "for 2 sequences. Give one"),
        ({"return_type": "logit"}, "Give 'logits', 'loss', 'both' or None"),
        ({"stop_at_layer": 4}, "between -3 and 3"),
        ({"stop_at_layer": 1, "names_filter": ["blocks.1.hook_in"]}, "not computed with stop_at_layer=1"),
        ({"stop_at_layer": 1, "return_type": "loss"}, "needs the whole model"),
        ({"prepend_bos": True}, "is for text"),
    ],
)
def test_options_that_do_not_fit(llama: Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        llama.run_with_cache(TOKENS, **options)


@torch.no_grad()
def test_texts(llama: Engine) -> None:
    """Strings, lists of them, and what comes before them. Padding on the right changes nothing before it."""
    theirs, texts = bridge("llama"), ["w51 w52 w43", "w40 w50 w60 w61", "w70"]
    for bos in (True, False):
        assert torch.equal(
            llama.to_tokens(texts, prepend_bos=bos), theirs.to_tokens(texts, prepend_bos=bos, padding_side="right")
        )
        near(llama(texts[0], prepend_bos=bos), theirs(texts[0], prepend_bos=bos))
    assert torch.equal(llama.to_tokens(texts[0]), torch.tensor([llama.prompt(texts[0]).tokens]))
    logits, cache = llama.run_with_cache(texts, "blocks.2.hook_out")
    for i, text in enumerate(texts):
        own, rows = llama.run_with_cache(text, "blocks.2.hook_out")
        assert torch.equal(logits[i, : own.shape[1]], own[0])
        assert torch.equal(cache["blocks.2.hook_out"][i, : own.shape[1]], rows["blocks.2.hook_out"][0])
    for given in (TOKENS, TOKENS[0], TOKENS[0, 1]):  # several paths, one, a single token
        assert llama.to_string(given) == theirs.to_string(given)
    assert llama.to_str_tokens(texts[0], prepend_bos=False) == theirs.to_str_tokens(texts[0], prepend_bos=False)
    assert llama.to_single_token("w7") == 7 and llama.to_tokens(texts).shape == (3, 5)
    with pytest.raises(BadRequest, match="one token each"):
        llama.to_single_token("w7 w8")
    with pytest.raises(BadRequest, match="no tokenizer"):
        Engine(loading.load(hugging_face("llama"))).to_tokens("w7")


# The cache's own methods


@pytest.mark.parametrize("name", MORE)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::replaylens.engine.errors.Caveat")
def test_methods_of_the_cache(name: str) -> None:
    _, ours = engine(name).run_with_cache(TOKENS)
    _, theirs = bridge(name).run_with_cache(TOKENS)
    token, other = TOKENS[:, -1], TOKENS[:, 3]
    calls = {
        "accumulated_resid": lambda c: c.accumulated_resid(apply_ln=True),
        "accumulated_resid at a layer": lambda c: c.accumulated_resid(layer=1, apply_ln=True, pos_slice=-1),
        "decompose_resid": lambda c: c.decompose_resid(apply_ln=True),
        "apply_ln_to_stack": lambda c: c.apply_ln_to_stack(c.decompose_resid(layer=2), layer=2),
        "logit_attrs": lambda c: c.logit_attrs(c.decompose_resid(), tokens=token, incorrect_tokens=other),
        "logit_attrs of a number": lambda c: c.logit_attrs(c.decompose_resid(), tokens=5),
        "logit_attrs of a word": lambda c: c.logit_attrs(c.decompose_resid(), tokens="w5"),
        "stack_head_results": lambda c: c.stack_head_results(apply_ln=True, incl_remainder=True),
        "stack_neuron_results": lambda c: c.stack_neuron_results(layer=1, pos_slice=-1),
        "get_neuron_results": lambda c: c.get_neuron_results(1, neuron_slice=[1, 5]),
        "get_full_resid_decomposition": lambda c: c.get_full_resid_decomposition(layer=2, pos_slice=-1, apply_ln=True),
        "folded": lambda c: c.get_full_resid_decomposition(expand_neurons=False, pos_slice=-1),
        "before an MLP": lambda c: c.get_full_resid_decomposition(layer=1, mlp_input=True, pos_slice=-1),
    }
    for said, call in calls.items():
        try:
            wanted = call(theirs)
        except KeyError:  # a parallel block has no stream between attention and MLP, for the bridge as for us
            with pytest.raises(KeyError):
                call(ours)
            continue
        assert torch.allclose(call(ours), wanted, atol=2e-4), said
    stack = ours.accumulated_resid(apply_ln=True)
    assert torch.equal(stack[-1], ours["ln_final.hook_out"]), "the final norm has canonical bits"


@torch.no_grad()
def test_a_cache_of_chosen_names_is_decomposed(llama: Engine) -> None:
    """By either name of a site; a name that was left out is named. Control: what was left out has no other name."""
    wanted = llama.run_with_cache(TOKENS)[1].decompose_resid(apply_ln=True)
    for ends in (("hook_embed", "_out", "hook_scale"), ("embed.hook_out", "attn.hook_out", "mlp.hook_out", "hook_scale")):
        _, cache = llama.run_with_cache(TOKENS, names_filter=lambda name, ends=ends: name.endswith(ends))
        assert torch.equal(cache.decompose_resid(apply_ln=True), wanted) and len(wanted) == 1 + 2 * 3
    _, cache = llama.run_with_cache(TOKENS, names_filter=lambda name: name.endswith(("embed", "attn_out")))
    with pytest.raises(
        UnknownSite, match=r"blocks\.0\.hook_mlp_out is not in this cache, which holds hook_embed, .*names_filter"
    ):
        cache.decompose_resid()
    assert "hook_mlp_out" not in cache.cache_dict and cache.cache_dict.get("blocks.0.attn.hook_out") is not None
    with pytest.raises(KeyError, match="not in this cache"):
        cache["blocks.9.hook_mlp_out"]


def test_attributions_without_the_final_norm_are_warned_of(llama: Engine) -> None:
    """With TransformerLens' way, which leaves the weight out. Control: a model whose weight is one."""
    plain = loading.load(hugging_face("llama"))
    with torch.no_grad():
        plain.ln_final.weight.fill_(1.0)
    folded = Engine(plain)
    for served in (llama, folded):
        _, cache = served.run_with_cache(TOKENS[:1])
        stack, pair = cache.decompose_resid(), dict(tokens=5, incorrect_tokens=7)
        logits = served(TOKENS[:1])[0, -1]
        if served is llama:
            with pytest.warns(Caveat, match=r"rl\.dla"):
                found = cache.logit_attrs(stack, **pair)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = cache.logit_attrs(stack, **pair)
        missed = abs(float(found[:, 0, -1].sum() - (logits[5] - logits[7])))
        assert (missed > 0.01) == (served is llama)


# Hooks


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_run_with_hooks(name: str) -> None:
    """Hook functions see and change the whole batch; filters of names, contexts and in-place changes too."""
    ours, theirs, shapes = engine(name), bridge(name), ([], [])
    _, clean = theirs.run_with_cache(TOKENS.flip(0))

    def patch(value: Tensor, hook: Any) -> Tensor:
        value[:, 7] = clean[hook.name][:, 7]
        return value

    def scale(value: Tensor, hook: Any) -> Tensor:
        return value * torch.tensor([0.5, 2.0])[:, None, None]

    hooks = [("blocks.1.hook_in", patch), (lambda n: n.endswith("mlp.hook_out"), scale)]
    with torch.no_grad():
        near(ours.run_with_hooks(TOKENS, fwd_hooks=hooks), theirs.run_with_hooks(TOKENS, fwd_hooks=hooks))
        assert not torch.allclose(ours(TOKENS), ours.run_with_hooks(TOKENS, fwd_hooks=hooks), atol=CLOSE)
        for model, seen in zip((ours, theirs), shapes, strict=True):
            for site in ("attn.hook_pattern", "attn.hook_attn_scores", "attn.q.hook_in", "attn.hook_z"):
                look = [(f"blocks.1.{site}", lambda value, hook, seen=seen: seen.append(value.clone()))]
                model.run_with_hooks(TOKENS, fwd_hooks=look)
        for a, b in zip(*shapes, strict=True):
            near(a, b)
        with theirs.hooks(fwd_hooks=hooks):
            wanted, _ = theirs.run_with_cache(TOKENS, return_type="loss")
        with ours.hooks(fwd_hooks=hooks[:1]), ours.hooks(fwd_hooks=hooks[1:]) as same:
            assert same is ours
            loss, _ = ours.run_with_cache(TOKENS, "blocks.0.hook_in", return_type="loss")
            near(loss, wanted)
            assert torch.equal(engine(name)(TOKENS), theirs_plain := engine(name)(TOKENS)), "another engine has no hooks"
        assert torch.equal(ours(TOKENS), theirs_plain), "and none are left"


def test_a_hook_sees_the_name_that_was_asked_for(llama: Engine) -> None:
    """On batches and on branches; a function of the name chooses among the sites' own names."""
    asked = ["blocks.1.hook_mlp_out", "blocks.1.mlp.hook_out", "blocks.1.hook_resid_pre", "blocks.1.attn.hook_pattern"]
    seen: list[str] = []

    def note(value: Tensor, hook: Any) -> None:
        seen.append(hook.name)

    llama.run_with_hooks(TOKENS, fwd_hooks=[(name, note) for name in asked])
    assert sorted(seen) == sorted(asked)
    seen.clear()
    llama.prompt(TOKENS[0].tolist(), hooks=[(name, note) for name in asked])
    assert sorted(set(seen)) == sorted(asked)


def test_hooks_that_are_kept(llama: Engine) -> None:
    """Until they are reset, for TransformerLens' verbs only."""
    plain, ours = llama(TOKENS), engine("llama")
    with torch.no_grad():
        halve = ("blocks.1.hook_mlp_out", lambda value, hook: value / 2)
        ours.add_hook(*halve)
        wanted = llama.run_with_hooks(TOKENS, fwd_hooks=[halve])
        assert torch.equal(ours(TOKENS), wanted) and torch.equal(ours.run_with_cache(TOKENS, "blocks.0.hook_in")[0], wanted)
        assert torch.equal(ours.logits(TOKENS[0].tolist()), plain[0, -1]), "a branch has hooks of its own"
        ours.reset_hooks()
        assert torch.equal(ours(TOKENS), plain) and not torch.equal(wanted, plain)
    with pytest.raises(UnknownSite, match="Nearest"):
        ours.add_hook("blocks.9.hook_in", halve[1])
    with pytest.raises(BadRequest, match="Invalid hook"):
        ours.add_hook("blocks.0.hook_in", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_attributes_of_a_model(name: str) -> None:
    ours, theirs = engine(name), bridge(name)
    for size in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx"):
        assert getattr(ours.cfg, size) == getattr(theirs.cfg, size)
    near(ours.W_U, theirs.W_U.detach())
    near(ours.W_E, theirs.W_E.detach())
    assert ours.tokenizer is theirs.tokenizer


def test_texts_are_padded_with_the_end_where_there_is_no_padding() -> None:
    coin = Engine.load("coin-plain")
    texts = ["A coin's state is heads. Alice flips.", "A coin's state is heads."]
    tokens, short = coin.to_tokens(texts), coin.tokens_of(texts[1])
    assert coin.text.eos_id and tokens[1].tolist() == short + [coin.text.eos_id] * (tokens.shape[1] - len(short))


def test_padding_does_not_count_in_a_loss() -> None:
    """The mean over all real tokens of the batch, each predicted as in its text alone."""
    ours = Engine.load("coin-plain")
    texts = ["A coin's state is heads. Alice flips.", "A coin's state is tails. Bob flips. Alice flips."]
    alone = [ours(text, "loss", loss_per_token=True)[0] for text in texts]
    for given in (texts, ours.to_tokens(texts)):
        together = ours(given, "loss", loss_per_token=True)
        assert torch.equal(together[0, : len(alone[0])], alone[0]) and torch.equal(together[1], alone[1])
        assert not together[0, len(alone[0]) :].any()
        torch.testing.assert_close(ours(given, "loss"), torch.cat(alone).mean())
    assert len(alone[0]) < len(alone[1]), "control: there is padding"


def test_a_function_of_names_gets_the_names_it_accepts(llama: Engine) -> None:
    _, cache = llama.run_with_cache(TOKENS, lambda name: name.endswith("hook_resid_post"), return_cache_object=False)
    assert list(cache) == [f"blocks.{layer}.hook_resid_post" for layer in range(3)]
    _, by_name = llama.run_with_cache(TOKENS, ["blocks.1.hook_resid_post"], return_cache_object=False)
    assert set(by_name) == {"blocks.1.hook_resid_post", "blocks.1.hook_out"}
    assert torch.equal(by_name["blocks.1.hook_out"], cache["blocks.1.hook_resid_post"])


def test_hooks_that_do_not_fit(llama: Engine) -> None:
    small = Engine(loading.load(hugging_face("llama")), max_rows=16)
    with pytest.raises(BadRequest, match="max_rows=42 or more"):
        small.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_in", lambda value, hook: value)])
    assert small(TOKENS).shape == (2, 21, 97), "without hooks a batch may take several passes"
    with pytest.raises(BadEdit, match="returned a tensor of shape"):
        llama.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_in", lambda value, hook: value[:, :3])])
    with pytest.raises(BadRequest, match="Invalid hook"):
        llama.run_with_hooks(TOKENS, fwd_hooks=["blocks.1.hook_in"])
    with pytest.raises(UnknownSite, match="Nearest"):
        llama.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_im", lambda value, hook: value)])
    for each in (llama, small):
        assert len(each.check_integrity()) > 0 and len(each.loop.jobs) == 0


# ---- interop ---------------------------------------------------------------------------------------------------------
# TransformerLens's methods on our engine against TransformerLens itself; and the tuned lens.

TOKENS_OF_INTEROP = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def served() -> Engine:
    return Engine(loading.load(hugging_face("llama")))


def test_cached_decode_has_the_bits_of_a_full_forward_here_and_not_there() -> None:
    """The residual stream and the logits of a path are equal token by token over the KV cache and in one pass.

    In TransformerLens they differ: the bits of the library's products depend on the number of rows.
    """
    path, sites = TOKENS_OF_INTEROP[:1], ["blocks.2.hook_out", "unembed.hook_out"]
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


@pytest.mark.slow
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


def test_filters_and_slices(served: Engine) -> None:
    _, one = served.run_with_cache(TOKENS_OF_INTEROP[0], "blocks.1.hook_resid_pre")
    assert set(one.keys()) == {"blocks.1.hook_in", "blocks.1.hook_resid_pre"}
    _, some = served.run_with_cache(TOKENS_OF_INTEROP, lambda n: n.endswith("mlp_out"), pos_slice=slice(3, 9))
    assert all(v.shape == (2, 6, 32) for v in some.values()) and len(some) == 3
    _, last = served.run_with_cache(TOKENS_OF_INTEROP, ["blocks.0.hook_in"], pos_slice=-1)
    assert last["blocks.0.hook_in"].shape == (2, 1, 32)
    with pytest.raises(UnknownSite, match="Nearest"):
        served.run_with_cache(TOKENS_OF_INTEROP, "blocks.0.hook_on")
    with pytest.raises(BadRequest, match="differ in length"):
        served.run_with_cache([[1, 2], [3]])


def test_cached_values_are_the_committed_ones(served: Engine) -> None:
    """`run_with_cache`, a replayed path and a fork give the same bits."""
    branch = served.prompt(TOKENS_OF_INTEROP[0, :9].tolist(), sites="STC")
    branch.generate(8, final=True)
    _, cache = served.run_with_cache(branch.tokens)
    for site in branch.activations.sites():
        assert torch.equal(cache[site][0], branch.activations[site])


def test_last_lens_is_the_model_itself(served: Engine) -> None:
    """Identity check of the logit lens, on bits: the last entry of Z is the distribution that tokens are drawn from."""
    branch = served.prompt(TOKENS_OF_INTEROP[0].tolist(), sites=["Z", "unembed.hook_out"], full=True)
    own = tuned_lens.log_softmax(branch.activations["unembed.hook_out"])
    z = branch.activations["Z.full"]
    assert torch.equal(z[:, -1], own[: len(z)])
    assert not torch.equal(z[:, 0], own[: len(z)])


@pytest.fixture(scope="module")
def trained(served: Engine) -> tuple[torch.Tensor, TunedLens]:
    branch = served.prompt(TOKENS_OF_INTEROP[1].tolist(), sites="S")
    rows = torch.stack([branch.activations[s] for s in served.sites.letter("S")], dim=1)
    return rows, tuned_lens.train(served.model, rows, steps=80, lr=3e-3)


def test_tuned_lens_brings_layers_nearer_and_keeps_the_last(served: Engine, trained: tuple[torch.Tensor, TunedLens]) -> None:
    plain = served.prompt(TOKENS_OF_INTEROP[1].tolist(), sites="Z").activations
    tuned = served.prompt(TOKENS_OF_INTEROP[1].tolist(), sites="Z", lens=trained[1]).activations
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


# ---- numbers ---------------------------------------------------------------------------------------------------------
# Positions, layers, padding and losses at their bounds, against lists and plain loops.


def test_positions_of_a_slice_are_those_of_a_list() -> None:
    """A single position keeps its dimension; others are Python's, within the sequence and beyond it."""
    items, ends = list(range(7)), (None, -9, -7, -2, 0, 3, 6, 7, 9)
    for at in range(-7, 7):
        assert items[transformer_lens.slice_of(at, 7)] == [items[at]]
    for where in [slice(a, b, step) for a in ends for b in ends for step in (None, 1, 2, 9)]:
        assert items[transformer_lens.slice_of(where, 7)] == items[where], where
    assert items[transformer_lens.slice_of(None, 7)] == items
    for bad in (7, -8, slice(0, 3, 0), slice(0, 3, -1), 1.5):
        with pytest.raises(BadRequest, match="pos_slice"):
            transformer_lens.slice_of(bad, 7)  # type: ignore[arg-type]


def test_a_run_stops_where_a_list_of_blocks_would(llama: Engine) -> None:
    """Of the blocks, those before the stop; at all of them, the stream that leaves the last, and no logits."""
    count, sites = llama.config.num_layers, llama.sites.in_order()
    for stop in range(-count, count + 1):
        at = transformer_lens.layer_number(llama, stop)
        assert at == (stop if stop >= 0 else count + stop)
        wanted = f"blocks.{count - 1}.hook_out" if at == count else f"blocks.{at}.hook_in"
        assert transformer_lens.residual_site(llama, at) == wanted
        run = [site for site in sites if transformer_lens._runs(site, at)]
        layers = {int(site.split(".")[1]) for site in run if site.startswith("blocks.")}
        assert layers == set(range(count)[:stop]) and not any(site.startswith(("ln_final", "unembed")) for site in run)
        assert any(site.startswith("embed") for site in run)
    assert transformer_lens.layer_number(llama, None) is None and all(transformer_lens._runs(site, None) for site in sites)
    assert transformer_lens.residual_site(llama, None) == f"blocks.{count - 1}.hook_out"
    for bad in (count + 1, -count - 1):
        with pytest.raises(BadRequest, match="stop_at_layer"):
            transformer_lens.layer_number(llama, bad)


def test_padding_is_what_ends_a_sequence_of_several() -> None:
    """Not what is within, not the last token that is left, and none of a single sequence."""
    subject = SimpleNamespace(text=SimpleNamespace(pad_id=0))
    for paths, lengths in (
        ([[1, 0, 2, 0, 0], [3, 4, 5, 6, 7]], [3, 5]),
        ([[0, 0, 0], [0, 0, 1]], [1, 3]),
        ([[1, 0, 0]], [3]),
        ([[1, 2, 0], [1, 0, 0]], [2, 1]),
    ):
        assert transformer_lens.path_lengths(subject, paths) == lengths  # type: ignore[arg-type]
    subject.text.pad_id = None
    assert transformer_lens.path_lengths(subject, [[1, 0], [1, 1]]) == [2, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[4, 4], [4, 3], [2, 4], [4, 1]])
def test_a_loss_by_hand(lengths: list[int]) -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    paths = [[1, 2, 3, 4], [4, 3, 0, 1]]
    single = torch.zeros(2, 3)
    for i, path in enumerate(paths):
        for at in range(lengths[i] - 1):
            single[i, at] = -logits[i, at].log_softmax(-1)[path[at + 1]]
    assert torch.allclose(transformer_lens._loss(logits, paths, lengths, True), single, atol=1e-6)
    mean = single.sum() / (sum(lengths) - 2)
    assert transformer_lens._loss(logits, paths, lengths, False) == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize(
    ("bos", "ids", "prepend", "wanted"),
    [
        (1, [1, 5], None, "text"), (1, [1, 5], True, [1, 5]), (1, [1, 5], False, [5]), (1, [5, 1], True, [1, 5, 1]),
        (1, [5, 1], False, [5, 1]), (None, [5, 1], False, [5, 1]), (1, [], True, [1]), (0, [0, 5], False, [5]), (0, [5],
        True, [0, 5]),
    ],
)  # fmt: skip
def test_what_a_text_begins_with(bos: int | None, ids: list[int], prepend: bool | None, wanted: Any) -> None:
    subject = SimpleNamespace(text=SimpleNamespace(bos_id=bos, encode=lambda text: list(ids)))
    assert transformer_lens._with_bos(subject, "text", prepend) == wanted  # type: ignore[arg-type]
    subject.text.bos_id = None
    with pytest.raises(BadRequest, match="no beginning-of-sequence token"):
        transformer_lens._with_bos(subject, "text", True)  # type: ignore[arg-type]
