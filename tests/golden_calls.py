"""The calls whose answers `tests/golden.json` holds, in groups. Each gives a dict: name -> result."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.proof.doctor import numbers
from tests.digests import _DENSE, _MORE, _sparse, model_of
from tests.golden import bits, error

rl: Any = import_module("replaylens")
"""without types: some calls are wrong on purpose"""
tasks: Any = rl.tasks
COIN = "A coin's state is {}. Alice flips. What's the state? A:"
HEADS, TAILS = COIN.format("heads"), COIN.format("tails")
LONGER = "A coin's state is tails. Bob flips. Bob flips. Alice flips. What's the state? A:"
PAIR = (" tails", " heads")
GROUPS: dict[str, Callable[[], dict[str, Any]]] = {}


def group(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    GROUPS[make.__name__.replace("_", " ").strip()] = make
    return make


def coin(**options: Any) -> Any:
    return Engine.load("coin-plain", **{"cache_tokens": 8192, **options})  # by default the machine's memory chooses


def tiny(name: str = "", **changes: Any) -> Any:
    """A tiny model that reads the words of the coin task, or takes token ids if it has another vocabulary."""
    words = None if "vocab_size" in changes else tasks.WordTokenizer(tasks.get("coin").vocabulary())
    size = {} if words is None else {"vocab_size": words.vocab_size}
    options = {key: changes.pop(key) for key in ("record", "cache_tokens", "page_size") if key in changes}
    return Engine(model_of(ModelConfig(**{**_DENSE, **(_MORE[name] if name else {}), **size, **changes})), words, **options)


def told(branch: Any) -> dict[str, Any]:
    """What a branch says of itself."""
    plain: dict[str, Any] = {
        name: getattr(branch, name) for name in ("tokens", "states", "status", "finish_reason", "statistics")
    }
    return plain | {"text": branch.generated_text, "kv": bits(branch.kv()), "certified": branch.certified, "str": str(branch)}


# ---- engine ---------------------------------------------------------------------------------------------------------------


@group
def _generate() -> dict[str, Any]:
    engine = coin()
    found: dict[str, Any] = {}
    warm = rl.Sampling(temperature=1.5, seed=5)
    options: dict[str, dict[str, Any]] = {
        "greedy": {},
        "warm": dict(sampling=warm),
        "ends on the last token": dict(n=3),
        "one less": dict(n=2),
        "stop": dict(sampling=rl.Sampling(stop=("tails",))),
        "stop over tokens": dict(sampling=rl.Sampling(temperature=3.0, seed=2, stop=("does not", "flips."))),
        "stop token": dict(sampling=rl.Sampling(stop_tokens=(engine.token_ids_of([" tails"])[0],))),
        "penalties": dict(sampling=rl.Sampling(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.5, seed=3)),
        "bias": dict(sampling=rl.Sampling(logit_bias={engine.token_ids_of([" heads"])[0]: 30.0})),
        "filters": dict(sampling=rl.Sampling(temperature=4.0, top_k=9, top_p=0.8, min_p=0.02, seed=11)),
        "lens drafts": dict(drafter="lens", window=3),
        "n-gram drafts": dict(drafter="ngram", window=4, keep_pages=True),
        "model drafts": dict(drafter="model", window=4, sampling=warm),
        "forced drafts": dict(drafter="forced", drafts={15: [[7, 8, 9]], 16: [[1, 2]]}, keep_pages=True),
        "ordinary": dict(deterministic=False),
        "final": dict(final=True),
    }
    for name, given in options.items():
        branch = engine.prompt(HEADS, sites="S", keep_rejected=True)
        found[name] = told(branch.generate(given.pop("n", 6), **given))
        found[name] |= {"rejected": [(each.tokens, each.states) for each in branch.rejected]}
        found[name]["rows"] = bits(branch.activations["blocks.2.hook_in"])
    stream = engine.prompt(TAILS).stream(4, sampling=warm)
    found["streamed"] = list(stream)
    found["integrity"], found["engine"], found["page"] = engine.check_integrity(), str(engine), engine._repr_html_()
    return found


@group
def _branches() -> dict[str, Any]:
    engine = coin(record=True)
    root = engine.prompt("A coin's state is heads. Alice flips,", sites="SZ", targets=[" heads"], top_k=3)
    right, wrong = root.fork(2)
    wrong.force(" heads").generate(6, drafter="lens", window=4)
    right.force(" tails").generate(5, sampling=rl.Sampling(temperature=1.0, repetition_penalty=3.0, seed=1))
    early = wrong.fork(at=6)[0]
    early.generate(3)
    before = told(right)
    right.rollback(to=root.length + 1).generate(5, sampling=rl.Sampling(temperature=1.0, repetition_penalty=3.0, seed=1))
    (edited,) = root.fork(edits=[rl.Edit("S", "zero", layers=[2], positions=[-1])])
    edited.generate(3)
    z = {name: wrong.activations[name] for name in sorted(wrong.activations) if name.startswith("Z")}
    logits = wrong.logits(slice(3, 8), tokens=[" tails", " heads", "."])
    tree, timeline = root.tree(), wrong.timeline()
    return {
        "right": told(right),
        "right again": before,
        "wrong": told(wrong),
        "early": told(early),
        "edited": told(edited),
        "z": z,
        "logits": logits,
        "all logits": bits(root.logits(None)),
        "tree": str(tree),
        "tree page": tree._repr_html_(),
        "timeline": str(timeline),
        "timeline page": timeline._repr_html_(),
        "board": timeline.board(),
        "page": root._repr_html_(),
        "trace": [str(event) for event in engine.trace.events][:80],
        "replayed": [told(each) for each in engine.replay_trace(engine.trace).values()],
        "integrity": engine.check_integrity(),
    }


@group
def _edits() -> dict[str, Any]:
    """Every operation, on every kind of site, by logits."""
    found: dict[str, Any] = {}
    v, w = numbers(60, 40), numbers(61, 40)
    made = {
        "zero": rl.Edit("T", "zero", layers=[1], positions=[3, -1]),
        "add": rl.Edit("S", "add", v, layers=[1], positions=slice(2, 5)),
        "add keeping the norm": rl.Edit("S", "add", v, layers=[1], keep_norm=True),
        "add matching the norm": rl.Edit("S", "add", v, layers=[1], factor=0.5, match_norm=True),
        "add when": rl.Edit("S", "add", v, layers=[1], when=w, above=0.25),
        "add at tokens": rl.Edit("S", "add", v, layers=[1], tokens=[" heads", " flips"]),
        "set": rl.Edit("C", "set", v, layers=[0], positions=4),
        "scale": rl.Edit("blocks.*.attn.hook_z", "scale", factor=0.5, heads=[1]),
        "project": rl.Edit("S", "project_out", v, layers=[0, 1]),
        "mask": rl.Edit("blocks.1.attn.hook_pattern", "mask", positions=8, keys=[3], heads=[2]),
        "pattern zero": rl.Edit("blocks.0.attn.hook_pattern", "zero", positions=[8, 9], keys=[4]),
        "pattern set": rl.Edit("blocks.0.attn.hook_pattern", "set", [0.5, 0.25], positions=9, keys=[4, 7]),
        "queries": rl.Edit("blocks.1.attn.hook_q", "set", numbers(62, 1, 12), heads=[3]),
        "negative slice": rl.Edit("S", "add", v, layers=[1], positions=slice(-9, -6)),
        "far": rl.Edit("S", "add", v, layers=[1], positions=slice(9, None)),
    }
    for name in ("", "caps, windows and second norms", "layer norms, biases, learned positions"):
        engine = tiny(name)
        for what, edit in made.items():
            branch = engine.prompt(HEADS, edits=[edit])
            found[f"{name} {what}"] = (bits(branch.logits(None)), branch.generate(3).tokens[-3:])
            found[f"{what} str"] = str(edit)
        under = engine.logits_under(HEADS, [[edit] for edit in made.values() if "slice" not in str(edit)], positions=[-2, -1])
        found[f"{name} under"] = bits(under)
    wrong = {
        "site": lambda: rl.Edit("blocks.9.hook_in", "zero"),
        "op": lambda: rl.Edit("S", "double"),
        "value": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "add", numbers(1, 39), layers=[1])]),
        "place": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "zero", layers=[1], positions=99)]),
        "layer": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "zero", layers=[7])]),
        "heads": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "zero", heads=[1])]),
        "nan": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "add", v * np.nan, layers=[1])]),
        "no value": lambda: rl.Edit("S", "add"),
        "before the text": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "add", v, layers=[1], positions=slice(-30, -6))]),
        "keys": lambda: engine.prompt(HEADS, edits=[rl.Edit("S", "zero", keys=[1])]),
    }
    return found | {f"error {name}": error(call) for name, call in wrong.items()}


@group
def _captures() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (
        "experts with a shared one",
        "a gated delta net",
        "Mamba-2",
        "latent attention",
        "sinks and clamped experts",
        "slopes",
    ):
        engine = tiny(name)
        every = [site for site in engine.sites.sites if "hook" in site]
        branch = engine.prompt(HEADS, sites=every)
        found[name] = {site: bits(branch.activations[site]) for site in every} | {"n": len(every)}
    engine = tiny()
    for where in ("prompt", "response", "last", "response[:2]", "all[::4]", "prompt[-3:]"):
        branch = engine.prompt(HEADS, sites="STC", positions=where).generate(5)
        found[where] = {site: bits(rows) for site, rows in branch.activations.items()} | {
            "shape": list(branch.activations["blocks.0.hook_in"].shape)
        }
    branch = engine.prompt(HEADS, sites="Z", full=True, targets=[" tails", 3], top_k=2)
    found["Z"] = dict(branch.generate(2).activations)
    _, cache = engine.run_with_cache(HEADS, names_filter=lambda name: "resid" in name or "hook_out" in name)
    found["cache"] = {name: cache[name] for name in cache}
    found["hooked"] = engine.run_with_hooks(HEADS, fwd_hooks=[("blocks.0.hook_in", lambda x, hook: x * 2)])
    found["loss"] = engine.run_with_hooks(HEADS, return_type="loss") if hasattr(engine, "run_with_hooks") else None
    found["tokens"] = (
        engine.to_tokens(HEADS),
        engine.to_string(engine.to_tokens(HEADS)),
        engine.to_str_tokens(TAILS),
        vars(engine.cfg),
    )
    found["errors"] = [
        error(lambda: engine.prompt(HEADS, sites="Q")),
        error(lambda: engine.prompt(HEADS, sites="blocks.0.hook_inn")),
        error(lambda: engine.prompt(HEADS, sites="S", top_k=3)),
        error(lambda: engine.prompt(HEADS, sites="S", positions="middle")),
        error(lambda: engine.prompt(HEADS, sites="S", keep="disk")),
        error(lambda: engine.prompt([1.0])),
        error(lambda: engine.prompt([])),
        error(lambda: engine.prompt([99999])),
        error(lambda: engine.prompt(HEADS).activations),
        error(lambda: engine.prompt("A zebra")),
        error(lambda: engine.prompt(HEADS).generate(-1)),
        error(lambda: engine.prompt(HEADS).generate(3, drafter="oracle")),
        error(lambda: engine.prompt(HEADS).generate(3, window=0)),
        error(lambda: engine.prompt(HEADS).fork(0)),
        error(lambda: engine.prompt(HEADS).fork(at=99)),
        error(lambda: engine.prompt(HEADS).rollback(to=3)),
        error(lambda: rl.Sampling(temperature=-1.0)),
        error(lambda: rl.Sampling(top_p=0.0)),
        error(lambda: rl.Sampling(min_p=2.0)),
        error(lambda: rl.Sampling(repetition_penalty=0.0)),
        error(lambda: engine.trace),
        error(lambda: rl.Engine.load("/nope/x.gguf")),
        error(lambda: engine.generate([engine.prompt(HEADS)], 3, temperature=1)),
    ]
    return found


@group
def _replay() -> dict[str, Any]:
    engine = coin(record=True)
    found: dict[str, Any] = {}
    task = tasks.get("coin")(flips=(2, 6), rendering="steps", seed=3)
    for drafter in ("self", "lens", "ngram", "model"):
        run = error(
            lambda drafter=drafter: engine.replay(
                task.examples(3), sites="S", drafter=drafter, window=4, seed=2, sampling=rl.Sampling(temperature=0.9)
            )
        )
        if isinstance(run, Exception):
            found[drafter] = run
            continue
        found[drafter] = {
            "str": str(run),
            "accuracy": run.accuracy,
            "acceptance": run.acceptance,
            "drafting": run.drafting,
            "tokens": [each.tokens for each in run],
            "correct": [getattr(each, "correct", None) for each in run],
            "rejected": [[(path.tokens, path.fork_position) for path in each.rejected] for each in run]
            if drafter != "self"
            else 0,
            "probabilities": run.probabilities,
            "rows": bits(*(each.activations["blocks.3.hook_in"] for each in run)),
        }
    found["tree"], found["timeline"] = str(run.tree(1)), str(run.timeline(2))
    found["page"], found["most telling"] = run._repr_html_(), str(run.most_telling())
    texts = engine.replay(
        [HEADS, TAILS], labels={"up": [True, False], "place": [list(range(15)), [None] * 15]}, sites="S", max_new=2
    )
    found["texts"] = {
        "str": str(texts),
        "labels": str(texts[0].example.labels_at([(0, 2), (5, 9)])),
        "made": [each.generated_text for each in texts],
    }
    return found


@group
def _thinking() -> dict[str, Any]:
    engine = rl.Engine.load("coin-thinking")
    task = tasks.get("coin")(flips=(2, 5), seed=1)
    run = engine.replay(task.examples(3), sites="STC", drafter="lens", window=3)
    branch = engine.prompt(task.example(4).prompt, sites="STC")
    branch.generate(4)
    names = sorted(branch.activations)
    return {
        "run": {
            "str": str(run),
            "accuracy": run.accuracy,
            "tokens": [each.tokens for each in run],
            "acceptance": run.acceptance,
        },
        "branch": told(branch),
        "sites": names,
        "rows": {name: bits(branch.activations[name]) for name in names},
        "thoughts": str(getattr(branch, "thoughts", None)),
        "picture": run.picture(0)._repr_html_(),
        "picture text": str(run.picture(1)),
        "guess": engine.guesses(),
        "page": branch._repr_html_(),
        "lens": rl.lens(engine, task.example(4).prompt),
        "errors": [error(lambda: branch.gradients(" tails", sites="S")), error(lambda: rl.dla(engine, HEADS, PAIR))],
    }


@group
def _conversation() -> dict[str, Any]:
    from tests.engine.serving.test_conversation import PLAIN, byte_tokenizer

    engine = Engine(model_of(ModelConfig(**{**_DENSE, "vocab_size": 258, "max_positions": 512})), byte_tokenizer(PLAIN))
    talk = rl.Conversation(engine, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], sites="S")
    talk.generate(6, sampling=rl.Sampling(temperature=1.0, seed=5))
    talk.append("4", role="tool").generate(5)
    found: dict[str, Any] = {"other": talk.replay(3, "5"), "early": talk.fork(2), "talk": talk}
    found = {
        name: {
            "tokens": each.tokens,
            "messages": each.messages,
            "turns": [str(turn) for turn in each.turns],
            "str": str(each),
            "states": bits(each.states("blocks.1.hook_in")),
            "rows": bits(each.activations("blocks.1.hook_in", turn=1)),
        }
        for name, each in found.items()
    }
    errors = (
        lambda: talk.append("x", role="nobody"),
        lambda: talk.fork(9),
        lambda: talk.replay(9, ""),
        lambda: talk.activations("blocks.1.hook_in", 9),
    )
    return found | {"errors": [error(call) for call in errors]}


# ---- workbench ------------------------------------------------------------------------------------------------------------


@group
def _lens() -> dict[str, Any]:
    from replaylens.workbench.lens import compare_lenses, fit_jacobian_lens

    engine, small = coin(), tiny()
    plain = rl.lens(engine, HEADS)
    token = rl.lens(engine, HEADS, token=" tails", features=[_sparse("standard"), _sparse("topk")])
    fitted = fit_jacobian_lens(small, [HEADS, TAILS])
    found: dict[str, Any] = {
        "plain": plain,
        "token": token,
        "jacobian weight": bits(fitted.weight, fitted.bias),
        "tuned": rl.lens(small, LONGER, tuned=fitted),
        "lenses": compare_lenses(small, [LONGER, TAILS], {"Jacobian": fitted}),
        "top": token.features[0].top(-1, 3),
    }
    for measure in ("probability", "entropy", "kl", "rank", "logprob", "features"):
        found[f"plot {measure}"] = token.plot(measure)
    found["errors"] = [
        error(lambda: rl.lens(engine, HEADS, token="zebra")),
        error(lambda: plain.plot("depth")),
        error(lambda: plain.plot("features")),
    ]
    return found


@group
def _patch() -> dict[str, Any]:
    engine = coin()
    two = dict(metric=PAIR)
    found: dict[str, Any] = {
        "sites": rl.patch(engine, HEADS, TAILS, **two, sites="STC"),
        "noise": rl.patch(engine, HEADS, TAILS, **two, direction="noise", layers=[0, 2], positions=[4, -1]),
        "heads": rl.patch(engine, HEADS, TAILS, metric=" tails", heads=True),
        "some heads": rl.patch(engine, HEADS, TAILS, metric=engine.prompt(TAILS), heads=[(1, 3), (2, 0)]),
        "end": rl.patch(engine, HEADS, LONGER, **two, align="end", layers=[1, 3]),
        "start": rl.patch(engine, HEADS, LONGER, **two, align="start", layers=[1]),
        "text": rl.patch(engine, HEADS, LONGER, **two, align="text: A:", layers=[0, 1]),
        "pairs of positions": rl.patch(engine, HEADS, LONGER, **two, align=[(4, 4), (-1, -1)]),
        "pairs": rl.patch(engine, [HEADS, TAILS], [TAILS, HEADS], metric=[PAIR, PAIR[::-1]], layers=[1, 2]),
        "pairs from the end": rl.patch(
            engine, [HEADS, LONGER], [TAILS, HEADS], metric=[PAIR, PAIR[::-1]], align="end", layers=[2]
        ),
        "function": rl.patch(engine, HEADS, TAILS, metric=lambda logits: logits[..., 5] - logits[..., 7] / 2, layers=[2]),
        "paths": rl.path_patch(engine, HEADS, TAILS, **two, receivers=[(2, 0), (1, 3)], into="v"),
        "paths into keys": rl.path_patch(engine, HEADS, LONGER, **two, receivers=[(2, 1)], into="k", align="end"),
        "paths to the output": rl.path_patch(engine, TAILS, HEADS, **two, receivers=[(3, 2)], into="q", direction="noise"),
    }
    found["raw"], found["grids"] = found["sites"].plot("raw"), [grid for grid in found["heads"].grids()]
    found["errors"] = [
        error(lambda: rl.patch(engine, HEADS, LONGER, **two)),
        error(lambda: rl.patch(engine, HEADS, TAILS)),
        error(lambda: rl.patch(engine, HEADS, TAILS, metric=(" tails", "zebra"))),
        error(lambda: rl.patch(engine, HEADS, TAILS, **two, align="middle")),
        error(lambda: rl.patch(engine, HEADS, TAILS, **two, direction="back")),
        error(lambda: rl.patch(engine, HEADS, TAILS, **two, heads=[(9, 9)])),
        error(lambda: rl.path_patch(engine, HEADS, TAILS, **two, receivers=[(0, 1)])),
        error(lambda: rl.path_patch(engine, HEADS, TAILS, **two, receivers=[])),
        error(lambda: rl.patch(engine, HEADS, LONGER, **two, align="text: zebra")),
    ]
    return found


@group
def _ablate_and_steer() -> dict[str, Any]:
    engine = coin()
    prompts, metric = [HEADS, TAILS, LONGER], [PAIR, PAIR[::-1], PAIR]
    contrast = ([HEADS, LONGER], [TAILS])
    mixture = tiny("experts in groups")
    return {
        "zero": rl.ablate(engine, prompts, metric=metric, heads=True, how="zero"),
        "mean": rl.ablate(engine, prompts, metric=metric, heads=[(1, 3), (2, 0), (0, 1)], how="mean", positions=[-1, 4]),
        "resample": rl.ablate(engine, prompts, metric=metric, heads=[(1, 3), (2, 0)], how="resample", seed=3),
        "neurons": rl.ablate(engine, prompts, metric=metric, neurons=[(2, 5), (3, 17)], how="mean"),
        "directions": rl.ablate(engine, prompts, metric=" tails", directions=[(2, numbers(9, 128))]),
        "experts": rl.ablate(mixture, [HEADS, TAILS], metric=PAIR, experts=[(1, 3), (0, 0)]),
        "steer": rl.steer(engine, contrast, [HEADS, TAILS], layers=[1, 3], strengths=[-2, 2], n=3, metric=PAIR),
        "steer by a vector": rl.steer(engine, numbers(10, 128), [HEADS], layers=[2], strengths=[0.5, 4], n=4),
        "errors": [
            error(lambda: rl.ablate(engine, prompts, metric=metric[:2], heads=True)),
            error(lambda: rl.ablate(engine, prompts, metric=PAIR)),
            error(lambda: rl.ablate(engine, prompts, metric=PAIR, heads=True, how="half")),
            *(
                error(rl.ablate, engine, prompts, metric=PAIR, heads=heads, layers=[1])
                for heads in ([], [(1, 3)], [0, 9], [(1,)])
            ),
            *(error(rl.ablate, engine, prompts, metric=PAIR, heads=heads) for heads in ([], [(9, 0)], [0, (1, 2)], "all")),
            error(lambda: rl.ablate(engine, prompts, metric=PAIR, experts=[(0, 0)])),
            error(lambda: rl.ablate(engine, [HEADS], metric=PAIR, heads=[(0, 1)], how="resample")),
            error(lambda: rl.steer(engine, numbers(10, 12), [HEADS], layers=[2], strengths=[1])),
            error(lambda: rl.steer(engine, ([HEADS], []), [HEADS], layers=[2], strengths=[1])),
            error(lambda: rl.steer(engine, contrast, [HEADS], layers=[12], strengths=[1])),
        ],
    }


@group
def _attribution() -> dict[str, Any]:
    engine = coin()
    found: dict[str, Any] = {}
    for by in ("layer", "head", "neuron"):
        found[f"dla {by}"] = rl.dla(engine, HEADS, PAIR, by=by)
    for name in (
        "layer norms, biases, learned positions",
        "caps, windows and second norms",
        "experts with a shared one",
        "latent attention",
    ):
        found[f"dla {name}"] = rl.dla(tiny(name), HEADS, PAIR, by="head")
    found |= {
        "patching": rl.attribution_patching(engine, HEADS, TAILS, PAIR, compare=True),
        "patching heads": rl.attribution_patching(engine, HEADS, TAILS, PAIR, heads=True),
        "patching with C": rl.attribution_patching(engine, HEADS, TAILS, " tails", "C"),
        "integrated": rl.integrated_gradients(engine, HEADS, TAILS, PAIR, steps=4),
        "from zeros": rl.integrated_gradients(engine, HEADS, None, " tails", "blocks.0.hook_in", steps=3),
    }
    found["worst"] = found["patching"].worst(3)
    branch = engine.prompt(HEADS, sites="STC")
    for name, metric in {"pair": PAIR, "token": " tails", "branch": engine.prompt(TAILS)}.items():
        gradients = branch.gradients(metric)
        found[f"gradients {name}"] = {"value": gradients.value, "certified": gradients.certified} | {
            site: bits(gradients[site]) for site in sorted(gradients)
        }
    found["times input"] = dict(gradients.times_input())
    (ablated,) = branch.fork(
        edits=[
            rl.Edit("T", "zero", layers=[1]),
            rl.Edit("S", "scale", factor=0.5, layers=[2]),
            rl.Edit("S", "project_out", numbers(4, 128), layers=[3]),
        ]
    )
    found["under edits"] = dict(ablated.gradients(PAIR, sites="S"))
    found["errors"] = [
        error(lambda: rl.dla(engine, HEADS, PAIR, by="token")),
        error(lambda: rl.dla(engine, TAILS, " heads")),
        error(lambda: branch.gradients(PAIR, sites="Z")),
        error(lambda: rl.attribution_patching(engine, HEADS, LONGER, PAIR)),
        error(lambda: rl.integrated_gradients(engine, HEADS, TAILS, PAIR, steps=0)),
    ]
    return found


@group
def _attention_routing_compare() -> dict[str, Any]:
    engine = coin()
    seen = rl.attention(engine, LONGER)
    mixture = tiny("experts with a shared one")
    routed = mixture.prompt(HEADS, sites=["blocks.1.mlp.gate.hook_out", "blocks.1.mlp.gate.hook_choice"], keep_rejected=True)
    routed.generate(5, drafter="lens", window=3)
    other = Engine(
        model_of(ModelConfig(**{**_DENSE, "vocab_size": mixture.config.vocab_size}), seed=2),
        tasks.WordTokenizer(tasks.get("coin").vocabulary()),
    )
    return {
        "attention": seen,
        "a layer": seen.plot(1),
        "a head": seen.plot(2, 1, first=False),
        "some layers": rl.attention(engine, HEADS, layers=[1, 3]).pattern,
        "windows": rl.attention(tiny("caps, windows and second norms"), HEADS),
        "routing": rl.routing(mixture, TAILS),
        "load": rl.routing(mixture, TAILS).plot_load(),
        "routing of drafts": error(lambda: rl.routing(mixture, routed)),
        "compare": rl.compare(tiny(), other, [HEADS + " tails.", TAILS + " heads.", LONGER], sites="STC"),
        "compare predictions": rl.compare(tiny(), other, [HEADS], sites=""),
        "same": rl.compare(engine, coin(), [HEADS]),
        "errors": [
            error(lambda: rl.attention(engine, HEADS, layers=[9])),
            error(lambda: seen.plot(7)),
            error(lambda: seen.plot(1, 9)),
            error(lambda: rl.routing(engine, HEADS)),
            error(lambda: rl.compare(engine, mixture, [HEADS])),
            error(lambda: rl.compare(engine, engine, [])),
            error(lambda: rl.compare(tiny(), other, ["A"])),
        ],
    }


@group
def _features() -> dict[str, Any]:
    engine = coin()
    found: dict[str, Any] = {}
    for kind in ("standard", "jumprelu", "topk"):
        sae = _sparse(kind)
        branch = engine.prompt(HEADS, sites="S")
        rows = sae.require(engine).of(branch)
        strong = rows.strongest(4)
        changed = [
            branch.fork(edits=sae.edits(branch, **given))[0]
            for given in (dict(ablate=strong[:1]), dict(scale={strong[1]: 3.0}, positions=-1), dict(set={7: 6.0}))
        ]
        found[kind] = {
            "rows": rows,
            "strongest": strong,
            "columns": rows.columns(strong),
            "counts": rows.counts,
            "row": rows.row(-2),
            "plot two": rows.plot(strong[:2]),
            "decoded": bits(sae.decode(rows)),
            "frame": rows.frame(),
            "changed": [bits(each.logits()) for each in changed],
            "held": told(sae.generate(branch, 2, set={strong[0]: 0.0})),
        }
    found["errors"] = [
        error(lambda: sae.edits(branch)),
        error(lambda: sae.edits(branch, ablate=[9999])),
        error(lambda: rows.row(99)),
        error(lambda: rows.strongest(0)),
        error(lambda: rl.SparseFeatures.load("/nope")),
        error(lambda: sae.encode(torch.zeros(2, 5))),
    ]
    return found


@group
def _graphs() -> dict[str, Any]:
    from replaylens.extras.bridges import neuronpedia
    from tests.extras.test_graph import transcoder

    engine = tiny()
    made = [
        transcoder(
            [numbers(80 + l, 40, 12) / 8, numbers(82 + l, 12) / 4, numbers(84 + l, 12, 40) / 8, numbers(86 + l, 40) / 8], l
        )
        for l in range(2)
    ]
    graph = rl.attribution_graph(engine, HEADS, made, PAIR)
    likely = rl.attribution_graph(engine, HEADS, made[:1], None, max_nodes=10)
    small = graph.prune()
    root = engine.prompt("A coin's state is")
    left, right = root.fork(2)
    left.force(" heads. Alice flips.")
    right.force(" tails. Alice flips.")
    diff = rl.attribution_graph(engine, left, made, PAIR).prune().diff(rl.attribution_graph(engine, right, made, PAIR).prune())
    return {
        "graph": graph,
        "small": small,
        "likely": likely,
        "diff": diff,
        "json": small.to_json(),
        "pruned": graph.prune(nodes=0.5, edges=0.7).edges,
        "neuronpedia": neuronpedia.graph(**small.to_json(), model="coin-plain", slug="one-flip"),
        "influence": graph.influence,
        "errors": [error(lambda: graph.prune(nodes=2.0)), error(lambda: rl.attribution_graph(engine, HEADS, [], PAIR))],
    }
