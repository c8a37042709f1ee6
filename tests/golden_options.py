"""Calls of `tests/golden.json` with rarely combined options, and the bridges to evaluation frameworks."""

import asyncio
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from replaylens.engine.proof.doctor import numbers
from tests.extras.stand_ins import Done, Message, Options, Said, Tool, installed
from tests.golden import bits, error
from tests.golden_calls import HEADS, LONGER, TAILS, coin, group, rl, tasks, tiny, told
from tests.golden_more import coin_run, report
from tests.golden_rest import GROUPS

__all__ = ["GROUPS"]


def asked(*arguments: Any) -> Any:
    """A request of lm-eval."""
    return SimpleNamespace(args=arguments)


@group
def _evaluation() -> dict[str, Any]:
    """lm-eval's and Inspect's models, over stand-ins for both packages."""
    with installed():
        return {"lm-eval": _lm_eval(), "inspect": _inspect()}


def _lm_eval() -> dict[str, Any]:
    from replaylens.extras.bridges.lm_eval_model import ReplayLM

    edit = rl.Edit("S", "zero", positions=-1, layers=[3])
    engine = coin()
    made = {
        "plain": ReplayLM(engine, batch_size=3),
        "short": ReplayLM(engine, max_length=9, max_gen_toks=4, batch_size="2", seed=5),
        "steered": ReplayLM("coin-plain", edits=[edit], batch_size="auto:4", max_batch_size=7, dtype="float32"),
    }
    found: dict[str, Any] = {}
    for name, model in made.items():
        free = {"max_gen_toks": 4} if name != "short" else {}
        found[name] = {
            "likelihoods": model.loglikelihood(
                [asked(HEADS, " tails"), asked(TAILS, " tails."), asked("", "A coin's state")], True
            ),
            "rolling": model.loglikelihood_rolling([asked(LONGER), asked("A coin's state")], True),
            "written": model.generate_until(
                [
                    asked(HEADS, free),
                    asked(LONGER, {"until": "tails", "max_gen_toks": 3}),
                    asked(TAILS, {**free, "temperature": 3.0, "do_sample": True}),
                    asked(TAILS, {"until": [".", ""], "max_gen_toks": 3, "num_beams": 1}),
                ],
                disable_tqdm=True,
            ),
            "cached": model.cached,
            "numbers": [model.batch_size, model.max_length, model.max_gen_toks, model.seed, model.eot_token_id],
            "names": [model.prefix_token_id, model.tokenizer_name, model.tok_encode(HEADS), str(model.tokenizer)],
            "info": {key: str(value)[:20] for key, value in model.get_model_info().items() if key.startswith(("model_d", "e"))},
        }
    plain: Any = made["plain"]
    return found | {
        "errors": [
            error(ReplayLM, engine, dtype="float16"),
            error(ReplayLM, engine, max_length=0),
            error(ReplayLM, engine, batch_size=0),
            error(ReplayLM, engine, batch_size=4, max_batch_size=0),
            error(plain.generate_until, [asked(HEADS, {"max_gen_toks": plain.max_length})], True),
            error(plain.generate_until, [asked(HEADS, {"num_beams": 2})], True),
            error(plain.generate_until, [asked(HEADS, {"typical_p": 0.5})], True),
            error(plain._loglikelihood_tokens, [(None, [3], [4]), (None, [3], [])], True),
            error(plain._loglikelihood_tokens, [(None, [], [4, 5])], True),
            error(plain.apply_chat_template, [{"role": "user", "content": "x"}]),
        ]
    }


def _inspect() -> dict[str, Any]:
    from replaylens.extras.bridges.inspect_provider import ReplayAPI, tool_calls
    from tests.extras.test_evaluation import CALLS, TEMPLATE, letters

    folder, engine, chatting = Path(mkdtemp()), coin(), letters(TEMPLATE)
    probe = rl.probes.fit_probe(coin_run(), "face", layer=3, position="query", estimator="mass-mean")
    edit = rl.Edit("S", "zero", positions=-1, layers=[3])

    def answer(api: Any, *messages: Any, tools: Any = (), choice: str = "auto", **config: Any) -> Any:
        made = error(lambda: asyncio.run(api.generate(list(messages), list(tools), choice, Options(**config))))
        return made if isinstance(made, Exception) else (made.metadata["replaylens"].pop("version") and made)

    plain = ReplayAPI("coin", engine=engine, chat=False)
    seen = ReplayAPI("coin", engine=engine, chat=False, sites="S", positions="all", activations=folder / "rows")
    watched = ReplayAPI("coin", "url", "key", engine=engine, chat=False, probes={"face": probe}, edits=[edit])
    chat, ask = ReplayAPI("letters", engine=chatting), Message(HEADS)
    warm = dict(temperature=4.0, max_tokens=3, num_choices=2, seed=3)
    call = SimpleNamespace(id="c1", function="add", arguments={"x": 1})
    turns = [Message("Add."), Said("", "assistant", tool_calls=[call]), Done("42", "tool", function="add", tool_call_id="c1")]
    short = dict(max_tokens=5, stop_seqs=["7", "q"])
    found = {
        "plain": answer(plain, ask, max_tokens=3, logprobs=True, top_logprobs=2, prompt_logprobs=1),
        "no tops": answer(plain, Message("A coin's state is heads."), max_tokens=2, logprobs=True),
        "warm": [answer(plain, ask, **warm), answer(plain, ask, **warm), answer(plain, Message(TAILS), **warm)],
        "stopped": answer(plain, ask, max_tokens=6, stop_seqs=["tails"], prompt_logprobs=0),
        "own edits": answer(plain, ask, max_tokens=2, extra_body={"edits": [edit.to_json()]}),
        "seen": answer(seen, ask, max_tokens=2, logit_bias={"5": 40}),
        "watched": answer(watched, ask, max_tokens=2),
        "chat": answer(chat, ask, **short),
        "tools": answer(chat, *turns, tools=[Tool("add", "Add two numbers.")], **short),
        "no tools": answer(chat, *turns, tools=[Tool("add")], choice="none", **short),
        "full": [answer(plain, Message(" flips" * n), logprobs=True) for n in (509, 511)],
        "files": sorted(each.name for each in (folder / "rows").iterdir()),
        "about": [watched.about[:3], plain.max_tokens(), plain.max_connections(), plain.collapse_user_messages()],
        "calls": [tool_calls(text, "a") for text in CALLS],
        "errors": [
            answer(plain, ask, tools=[Tool("add")]),
            answer(plain, *turns),
            answer(chat, ask, tools=[Tool("add")], choice="any"),
            answer(chat, ask, best_of=2, frequency_penalty=1.0),
            answer(chat, ask, extra_body={"probes": []}),
            answer(ReplayAPI("l", engine=letters("{{ messages[0].content }}")), ask, tools=[Tool("add")]),
            error(ReplayAPI, "coin", engine=engine, activations=folder),
            error(ReplayAPI, "coin", engine=engine, sites="Q"),
            error(ReplayAPI, "coin", engine=engine, chat="no"),
        ],
    }
    return found


# ---- statistics and probes ------------------------------------------------------------------------------------------------


def uneven(groups: int = 9) -> np.ndarray:
    """Groups of one to four rows, not in order."""
    found = np.repeat(np.arange(groups), np.arange(groups) % 4 + 1)
    return found[np.argsort(np.sin(np.arange(len(found)) * 1.7), kind="stable")]


TABLE = np.array([[9, 3, 0], [7, 5, 1], [2, 11, 0], [1, 4, 8]])


@cache
def outcome_counts() -> Any:
    from replaylens.rollouts.rollouts import OutcomeCounts

    return OutcomeCounts([0, 4, 9, 11], ["a", "b", "no answer"], TABLE, ["One.", " Two.", " Three.", " Four."])


@cache
def rollout_texts() -> Any:
    return rl.probes.RolloutTexts(
        positions=[3, 8, 12],
        texts=["One and two.", " Three.", " Four five."],
        outcomes=["a", "b", "c"],
        fork=np.array([0, 0, 0, 1, 1, 1, 1, 2, 2]),
        units=[(" Three.", " x"), (" Other.",), (), (" four five.",), (" Six.", " a"), (" Four five.",), (" y",), (" z",), ()],
        outcome=["a", "b", "a", "b", "b", "c", "a", "a", "c"],
    )


@group
def _statistics_with_options() -> dict[str, Any]:
    groups = uneven()
    n, p = len(groups), rl.probes
    x = numbers(33, n).double().numpy()
    ties, three = np.round(x * 2), np.arange(n) * 5 % 3
    good, few = np.sin(np.arange(n) * 2.1) > 0.1, np.arange(n) < 2
    counts, drawn = outcome_counts(), rollout_texts()
    forks = [
        p.TokenFork(7, [" a", " b"], np.array([0.5, 0.5]), np.array([[9, 1, 0], [1, 9, 0]])),
        p.TokenFork(3, [" c"], np.array([0.7]), np.array([[3, 3, 4]])),
        p.TokenFork(9, [" d", " e", " f"], np.array([0.2, 0.1, 0.6]), np.array([[5, 5, 0], [4, 6, 0], [0, 0, 10]])),
    ]
    small = dict(permutations=29, resamples=99, seed=3)
    codes = np.arange(30)
    alike: Any = lambda a, b: a.strip()[:1].lower() == b.strip()[:1].lower()  # noqa: E731
    states, others = numbers(34, 30, 4).double().numpy(), numbers(35, 30, 7).double().numpy()  # no two cells tie
    made: dict[str, Any] = {
        "ratio": lambda: p.ratio_over_groups(np.stack([x, ties]), np.abs(x) + 0.5, groups, level=0.8, folds=4, least=0.1),
        "ratio of zeros": lambda: p.ratio_over_groups(x * 0, np.abs(x), groups, level=0.5),
        "ratio of ones": lambda: p.ratio_over_groups(np.ones((1, n)), np.ones(n), groups, folds=3),
        "means": lambda: p.means_over_groups(np.stack([x, ties, good]), groups, seed=2, folds=3),
        "one group": lambda: p.mean_over_groups(x, groups * 0),
        "two groups": lambda: p.mean_over_groups(x, groups % 2, folds=2),
        "area of ties": lambda: p.area(ties, good, groups, level=0.8),
        "area by strata": lambda: p.area(ties, good, groups, strata=three, folds=3, level=0.9),
        "area of few": lambda: p.area(x, few, groups),
        "area of one class": lambda: p.area(x, good | True, groups),
        "area that is perfect": lambda: p.area(good * 1.0, good, groups),
        "balanced": lambda: p.balanced_accuracy(good, three, groups, folds=3, level=0.7),
        "balanced of one": lambda: p.balanced_accuracy(good, three * 0, groups),
        "discovery": lambda: p.false_discovery(np.array([0.04, 0.01, 0.04, 1.0, 0.0005])),
        "discovery of one": lambda: p.false_discovery(np.array([0.3])),
        "near": lambda: p.near_duplicates(np.stack([x, x + 0.05, -x, x * 1.02]), tolerance=0.05),
        "curve": lambda: p.outcome_curve(counts, level=0.5, joint=True),
        "importance": lambda: p.importance(counts, measure="kl", level=0.8, **small),
        "changes": lambda: p.change_points(counts, most=2, level=0.5, prior=2.0),
        "resilience": lambda: p.resilience(drawn, similar=alike, level=0.7),
        "counterfactual": lambda: p.counterfactual_importance(drawn, similar=alike, level=0.8, **small),
        "counterfactual by kl": lambda: p.counterfactual_importance(drawn, measure="kl", **small),
        "tokens": lambda: p.forking_tokens(forks, threshold=0.5, level=0.8, resamples=99, seed=2),
        "siblings": lambda: p.sibling_divergence(
            states, codes // 5, codes // 5 % 2, codes % 5 % 2, groups=codes // 10, permutations=19, seed=4
        ),
        "agreement": lambda: p.draft_agreement(
            ["a", "b", "a", "c", "b"],
            [["a", "a"], ["a"], ["b", "a", "c"], ["c"], ["b", "a"]],
            ["a", "a", "b", "c", "b"],
            np.array([0, 1, 1, 2, 3]),
            permutations=19,
            seed=5,
        ),
        "probe": lambda: report(
            p.outcome_probe(
                {("S", 1): states, "own": others[:, :3]},
                np.stack([codes % 4, 6 - codes % 4, codes % 2], 1),
                codes // 3,
                tokens=[np.array([i // 3, i % 3]) for i in range(30)],
                untrained={("S", 1): others[:, 3:], "own": others[:, :2]},
                estimator="logistic",
                folds=4,
                seed=2,
            )
        ),
        "folds": lambda: [p.fold_of_groups(groups, k, seed=k) for k in (2, 3, 9)],
        "too many folds": lambda: p.fold_of_groups(groups, 10),
    }
    return {name: error(call) for name, call in made.items()}


@group
def _probes_with_options() -> dict[str, Any]:
    p, found = rl.probes, dict[str, Any]()
    groups = uneven(20)
    n = len(groups)
    code = (groups * 7 % 3).astype(int)
    x = numbers(41, n, 5).double().numpy() + np.eye(3, 5)[code]
    odd = np.array([None if each % 11 == 3 else f"k{each}" for each in code + np.arange(n) % 11 // 10], dtype=object)
    labels = {"kind": code, "odd": odd, "size": np.round(x[:, 0] + code, 2), "flag": code > 0}
    rows = p.ProbeRows.of_arrays(
        {("S", 0): x, ("S", 1): x * 2 + 1, "own": x[:, :2]},
        labels,
        groups=groups,
        prompts=np.arange(n),
        positions=np.arange(n) % 4,
    )
    cross = {
        "balanced": dict(y=code, metric="balanced_accuracy", estimator="lda", folds=4, seed=2),
        "auroc of three": dict(y=code, metric="auroc", estimator="mass-mean", folds=3),
        "auroc": dict(y=code > 0, metric="auroc", estimator="ridge", folds=3, seed=1),
        "number": dict(y=labels["size"], estimator="ridge", folds=3),
        "chosen number": dict(y=code, kind="number", estimator="ridge-cv", folds=3),
        "chosen": dict(y=[str(each) for each in code], estimator="ridge-cv", folds=3),
        "keys": dict(y=code, keys=groups * 4 + np.arange(n) % 2, estimator="mass-mean-whitened", folds=3),
        "a classifier of numbers": dict(y=labels["size"], estimator="lda"),
        "a metric of classes": dict(y=labels["size"], estimator="ridge", metric="auroc"),
        "too many": dict(y=code, folds=21),
    }
    for name, given in cross.items():
        found[name] = error(p.cross_validate, x, groups=groups, **given)
    for name, given in {
        "test of a number": dict(label="size", estimator="ridge", layer=0),
        "test of auroc": dict(label="flag", estimator="ridge", layer=1, metric="auroc", seed=3),
        "test of three": dict(label="kind", estimator="mass-mean", site="own", metric="balanced_accuracy"),
        "test of holes": dict(label="odd", estimator="ridge", layer=0),
        "no permutations": dict(label="odd", permutations=0),
    }.items():
        found[name] = error(p.permutation_test, rows, **{"position": "all", "permutations": 9, "folds": 3, **given})
    for name, given in {
        "a few": dict(label=["kind", "odd"], estimators="ridge", folds=3, seed=2, permutations=19),
        "sites": dict(label="flag", sites=["own", "S"], layers=[1], estimators=["mass-mean", "sparse"], permutations=0),
        "numbers": dict(label="size", estimators=["ridge", "ridge-cv"], layers=[0], permutations=19, residualise=["position"]),
        "codes": dict(label="odd", estimators="logistic", layers=[1], code_length=True, permutations=0, folds=4),
        "three by auroc": dict(label="kind", estimators="lda", layers=[0], metric="auroc", permutations=19),
        "a function": dict(label="kind", estimators="ridge", positions=[lambda frame: frame.index % 3 > 0], permutations=0),
        "groups": dict(label="kind", estimators="ridge", layers=[0], groups=groups // 2, permutations=0, folds=3),
    }.items():
        made = error(p.sweep, rows, **given)
        found[name] = made if isinstance(made, Exception) else report(made)
        found[f"{name} figures"] = [error(getattr(made, each)) for each in ("heatmap", "curves", "plot") if hasattr(made, each)]
    for name in ("logistic-cv", "ridge-cv", "sparse", "mlp"):
        fitted = error(p.fit_probe, rows, "flag", layer=0, position="all", estimator=name)
        found[f"fitted {name}"] = fitted if isinstance(fitted, Exception) else (fitted.weight, fitted.bias, fitted.source)
    holes = p.fit_probe(rows, "odd", layer=1, position="all", estimator="lda")
    again = p.LinearProbe.load(holes.save(Path(mkdtemp()) / "holes.json"))
    found["holes"] = (holes.means, holes.classes, holes.roots, again.source == holes.source, again.roots == holes.roots)
    curve = p.complexity_curve(rows, "kind", layer=0, position="all", estimator="ridge", C=(0.1, 10.0), folds=4, seed=2)
    found["curve"], found["curve figure"] = curve.table, curve.plot() if hasattr(curve, "plot") else ""
    found["directions"] = _directions()
    return found


def _directions() -> Any:
    """`find_direction` over a stand-in for the search, which it gives pairs, positions and answers."""
    given: dict[str, Any] = {}

    def fit_das(bridge: Any, name: str, base: Any, source: Any, answers: Any, read: Any, **options: Any) -> Any:
        given.update(options | {"name": name, "base": base, "source": source, "answers": answers, "read": read(base)})
        return SimpleNamespace(basis=torch.eye(128, options["rank"]))

    engine, examples = coin(), tasks.get("coin")(flips=2, p=1.0).examples(8)
    search = ModuleType("transformer_lens.tools.analysis.interchange")
    vars(search)["fit_das"] = fit_das
    names = ("transformer_lens", "transformer_lens.tools", "transformer_lens.tools.analysis")
    with patch.dict(sys.modules, {**{name: ModuleType(name) for name in names}, search.__name__: search}):
        bridge: Any = lambda tokens: numbers(5, *tokens.shape, engine.config.vocab_size)  # noqa: E731
        options: dict[str, Any] = dict(layer=2, rank=2, epochs=3, lr=0.5, seed=4)
        found = rl.probes.find_direction(engine, bridge, examples, "face", **options)
        several = rl.probes.find_direction(engine, bridge, examples, "name", layer=1, position="step:1")
        saved = rl.probes.LinearProbe.load(found.save(Path(mkdtemp()) / "das"))
        return {
            "given": given,
            "found": [(each.weight, each.bias, each.means, each.classes, each.basis) for each in (found, several)],
            "about": [(each.site, each.position, each.estimator, each.roots, each.cell) for each in (found, several)],
            "of the engine": [saved.source == found.source, error(saved.require, tiny()), error(saved.require, engine)],
            "errors": [
                error(rl.probes.find_direction, engine, bridge, examples, "face", layer=2, rank=0),
                error(rl.probes.find_direction, engine, bridge, examples, "face", layer=9),
                error(rl.probes.find_direction, engine, bridge, examples, "face", layer=2, position="step"),
                error(rl.probes.find_direction, engine, bridge, tasks.get("coin")().examples(8), "face", layer=2),
            ],
        }


# ---- engine ---------------------------------------------------------------------------------------------------------------


@group
def _engine_with_options() -> dict[str, Any]:
    engine, found = tiny(record=True), dict[str, Any]()
    branches = engine.prompts([HEADS, LONGER, "A coin's"], sites="STZ", top_k=2, targets=[" heads", 4], positions="all[::2]")
    branches.append(engine.prompt(TAILS, sites=["blocks.1.attn.hook_pattern", "blocks.0.hook_resid_post"], positions="last"))
    engine.force_all(branches, [" tails", [5, 6, 7], " state is heads. Alice", [9]])
    cold, warm = rl.Sampling(), rl.Sampling(temperature=2.0, seed=9, top_k=4, stop=("flips",))
    engine.generate(branches, 5, sampling=[cold, warm, warm.derived(seed=1), cold], drafter="ngram", window=3)
    found["branches"] = [told(each) for each in branches]
    found["rows"] = [{site: bits(x) for site, x in rows.items()} for rows in engine.activations(branches)]
    one = branches[1]
    found["logits"] = [
        error(lambda given=given: bits(one.logits(*given[0], **given[1])))
        for given in (
            [([3, -1, 5],), {}],
            [(slice(-6, None, 2),), {"tokens": [" heads", 7]}],
            [(0,), {"tokens": []}],
            [(None,), {"tokens": [3]}],
            [(99,), {}],
            [([],), {}],
            [(slice(3, 3),), {}],
        )
    ]
    v = numbers(12, 40)
    edits = [
        rl.Edit("S", "add", v, layers=[1], positions=[2, -3], factor=0.5),
        rl.Edit("blocks.*.attn.hook_z", "zero", heads=[0, 2], positions=slice(1, None)),
        rl.Edit("blocks.1.attn.hook_pattern", "set", [0.5, 0.5], positions=6, keys=[1, 2], heads=[1]),
        rl.Edit("C", "add", v, layers=[0], when=numbers(13, 40), above=-0.5, tokens=[" flips"]),
        rl.Edit("S", "project_out", v, layers=[1]),
        rl.Edit.interchange("blocks.1.hook_in", numbers(14, 2, 40), positions=[3, 5]),
    ]
    found["edits"] = [
        (str(rl.Edit.from_json(each.to_json())), error(each.to_json), error(lambda e=each: e.plain())) for each in edits
    ]
    found["edited"] = [
        bits(engine.logits(HEADS, edits=edits[:1], positions=[4, -1], tokens=[" heads", " tails"])),
        bits(
            engine.logits_under(LONGER, [edits[:1], [], edits[1:3]], edits=edits[3:], positions=slice(-4, None), tokens=[3, 4])
        ),
        [
            bits(each.activations["blocks.1.hook_in"])
            for each in engine.prompts([HEADS, TAILS + " heads."], sites="S", edits=edits)
        ],
    ]
    found["replayed"] = [
        (each.tokens, sorted(each.activations)) for each in engine.replay_trace(engine.trace, sites="S").values()
    ]
    double: Any = ("blocks.0.hook_in", lambda x, hook: x * 2)
    found["hooked"] = [error(lambda: bits(engine.prompt(HEADS, hooks=[double]).logits())), bits(one.fork(hooks=[])[0].logits())]
    between = ["blocks.0.hook_out", "blocks.1.hook_in", "blocks.1.hook_out", "blocks.2.hook_in"]
    between = [site for site in between if site in engine.sites.sites]
    for name, given in {
        "": {},
        " edited": {"edits": edits[:1]},
        " hooked": {"hooks": [("blocks.1.hook_in", double[1])]},
    }.items():
        root = engine.prompt(HEADS, sites=between, **given)
        (fork,) = engine.prompt(HEADS, sites=between).fork(at=9, **given)
        for what, each in {"root": root, "fork": fork}.items():
            found[f"between blocks{name} {what}"] = [bits(each.activations[site]) for site in between]
        for site in between[:2]:  # one of the two, read by the name of the other
            held = engine.prompt(HEADS, sites=[site], **given).activations
            found[f"only {site}{name}"] = [error(lambda held=held, other=other: bits(held[other])) for other in between[:2]]
    found["dtypes"] = [error(coin, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    return found


@group
def _sampling_with_options() -> dict[str, Any]:
    """What is chosen from logits with ties, near ends of distributions, after paths with repetitions."""
    logits = numbers(15, 40).numpy() * 3
    logits[[3, 7, 11]] = logits.max() + 1
    logits[[0, 39]] = -np.inf
    path = [3, 3, 7, 20, 21, 20, 11]
    options: dict[str, dict[str, Any]] = {
        "greedy": {},
        "repeated": dict(repetition_penalty=1.3),
        "rewarded": dict(repetition_penalty=0.5),
        "present": dict(presence_penalty=4.0),
        "absent": dict(presence_penalty=-4.0, temperature=0.5),
        "both": dict(presence_penalty=1.0, repetition_penalty=2.0, temperature=2.0),
        "bias": dict(logit_bias={20: 100.0, 3: -100.0}),
        "no bias": dict(logit_bias={0: 5.0}, temperature=1.0),
        "top k within ties": dict(temperature=1.0, top_k=2),
        "top k of all": dict(temperature=1.0, top_k=400),
        "top p": dict(temperature=1.0, top_p=0.3),
        "top p of one": dict(temperature=1.0, top_p=1e-6),
        "min p": dict(temperature=3.0, min_p=0.2),
        "min p of all": dict(temperature=3.0, min_p=1.0),
        "all": dict(temperature=5.0, top_k=12, top_p=0.9, min_p=0.1, presence_penalty=0.5, logit_bias={12: 2.0}),
        "hot": dict(temperature=50.0),
    }
    found: dict[str, Any] = {}
    for name, given in options.items():
        each = rl.Sampling(**given)
        chosen = [
            error(each.derived(seed=seed).choose, logits, path[:length], prompt)
            for seed in range(6)
            for length, prompt in ((7, 3), (7, 7), (4, 0), (1, 1))
        ]
        found[name] = (chosen, each.to_json(), rl.Sampling.from_json(each.to_json()) == each)
    found["errors"] = [
        error(lambda given=given: rl.Sampling(**given))
        for given in (
            dict(temperature=float("nan")),
            dict(top_k=-1),
            dict(top_p=1.5),
            dict(min_p=-0.1),
            dict(seed=-1),
            dict(stop=("",)),
            dict(stop="."),
            dict(stop_tokens=(-1,)),
            dict(logit_bias={-1: 1.0}),
            dict(logit_bias={1: float("nan")}),
            dict(presence_penalty=float("inf")),
            dict(repetition_penalty=-1.0),
        )
    ]
    return found


@group
def _dumps_with_options() -> dict[str, Any]:
    engine, folder, found = coin(), Path(mkdtemp()), dict[str, Any]()
    examples = tasks.get("coin")(flips=(1, 4), rendering="steps", seed=6).examples(4)
    run = engine.replay(examples, sites="SCZ", drafter="ngram", window=3, sampling=rl.Sampling(temperature=1.5), seed=4)
    for name, given in {
        "plain": dict(examples_per_shard=2),
        "half": dict(stored_dtype="bfloat16", probabilities=False, positions="steps"),
        "made": dict(positions="generated", examples_per_shard=1),
        "last": dict(positions="last"),
        "words": dict(positions="text: flips"),
        "labels": dict(positions="label:face"),
        "end": dict(positions="-2:"),
        "span": dict(positions="3:7"),
        "nowhere": dict(positions="middle"),
        "of no dtype": dict(stored_dtype="int8"),
        "of no size": dict(examples_per_shard=0),
        "again": dict(resume=True, examples_per_shard=2),
    }.items():
        made = error(run.save, folder / ("plain" if name == "again" else name), **given)
        found[name] = made if isinstance(made, Exception) else (made.digest, made.accepted_digest, made.index, str(made))
    dump = rl.Dump.open(folder / "plain", check_files=False)
    odd = dump.where(lambda frame: frame["position"] % 2 == 1)
    found["views"] = {
        "pandas": dump.to_pandas(),
        "resolved": [error(dump.resolve, *each) for each in (("S", 1), ("blocks.1.hook_in",), ("S",), ("C", 9), ("Z.kl",))],
        "all": [sorted(error(dump.resolve_all, each)) for each in ("S", ["C", ("S", 2)], None)],
        "matrix": [
            error(
                lambda given=given: [bits(torch.as_tensor(dump.matrix("S", 2, **given)[0])), *dump.matrix("S", 2, **given)[1:]]
            )
            for given in (
                dict(label="face", where={"accepted": True}),
                dict(where=lambda frame: frame["depth"] == 1),
                dict(label="face", where={"face": ["heads", "tails"], "position": range(9)}),
            )
        ],
        "odd": [bits(odd.to_torch("C", 1)), odd.to_numpy("Z.kl"), odd.statistics("C", 0), str(odd), odd.take([-1, 0], "S")],
        "stream": [(bits(x), list(lines["position"])) for x, lines in odd.stream("C", 1, batch_rows=7)],
        "arrays": [
            error(lambda at=at: bits(torch.as_tensor(odd.array("S", 1)[at]))) for at in (-1, slice(None, None, 5), [2, 2], 99)
        ],
        "cache": {name: bits(x) for name, x in dump.to_activation_cache(3, 1).items()},
        "feed": [
            [batch["row"].tolist() for batch in odd.feed("S", **given)]
            for given in (
                dict(batch_size=40, drop_last=True, seed=5),
                dict(batch_size=30, shuffle="blocks", epochs=2),
                dict(batch_size=25, shuffle=None),
            )
        ],
        "errors": [
            error(dump.matrix, "S", 2, label="face", where={"mood": 1}),
            error(dump.to_activation_cache, 99),
            error(dump.to_activation_cache, 0, 9),
            error(dump.take, [0.5]),
            error(dump.statistics, "S"),
            error(dump.cite, 10**6),
        ],
    }
    return found
