"""More calls of `tests/golden.json`: probes, forks, tasks, dumps, pages and commands."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from replaylens.engine.proof.doctor import numbers
from tests.golden import bits, error
from tests.golden_calls import GROUPS, HEADS, PAIR, TAILS, coin, group, rl, tasks, told

__all__ = ["GROUPS"]


# ---- probes ---------------------------------------------------------------------------------------------------------------


def made_rows(classes: int = 2, groups: int = 30, per: int = 3, width: int = 6, layers: int = 2) -> Any:
    """Rows of arrays with a label that the second layer shows, a text and positions."""
    count = groups * per
    code = np.arange(groups) % classes if classes else np.sin(np.arange(groups) * 1.3)
    label, group = np.repeat(code, per), np.repeat(np.arange(groups), per)
    noise = numbers(90, count, width).double().numpy()
    shown = noise + np.outer(2.0 * label, np.ones(width) / width)
    x = {("S", layer): (shown if layer else noise).astype(np.float32) for layer in range(layers)}
    labels = {"topic": [f"c{each}" for each in label] if classes else label, "other": (group * 7 % 5 > 2)}
    return rl.probes.ProbeRows.of_arrays(
        x, labels, groups=group, positions=np.tile(np.arange(per), groups), tokens=(group * 3 + np.arange(count)) % 7
    )


@cache
def steps_dump() -> Any:
    """Chains of thought with rejected drafts."""
    task = tasks.get("coin")(flips=(2, 4), rendering="steps", seed=2)
    return (
        coin()
        .replay(task.examples(30), sites="SZ", drafter="ngram", window=4)
        .save(Path(mkdtemp()) / "steps", examples_per_shard=8)
    )


@cache
def coin_run() -> Any:
    return coin().replay(tasks.get("coin")(flips=(1, 4)).examples(30), sites="S", drafter="lens")


def report(made: Any) -> Any:
    """A report without what depends on versions."""
    return {
        "table": made.table,
        "summary": str(made),
        "notes": list(getattr(made, "notes", [])),
        "findings": list(getattr(made, "findings", [])),
    }


@group
def _sweeps() -> dict[str, Any]:
    rows, three, numeric = made_rows(), made_rows(3), made_rows(0)
    full = rl.probes.sweep(
        rows, ["topic", "other"], permutations=19, estimators=["logistic", "ridge", "mass-mean"], code_length=True
    )
    one = rl.probes.sweep(coin_run(), "face", layers=[1, 3], positions=["step", "query"], permutations=19, estimators="ridge")
    return {
        "two": report(full),
        "heatmap": full.heatmap(),
        "curves": full.curves(),
        "page": full._repr_html_() if hasattr(full, "_repr_html_") else "",
        "three": report(
            rl.probes.sweep(
                three, "topic", permutations=0, metric="balanced_accuracy", estimators=["lda", "mass-mean-whitened"]
            )
        ),
        "numbers": report(rl.probes.sweep(numeric, "topic", permutations=19, estimators="ridge")),
        "auroc": report(rl.probes.sweep(rows, "other", permutations=19, metric="auroc", residualise=["position"])),
        "coin": report(one),
        "coin heatmap": one.heatmap(),
        "rejected": error(
            lambda: report(
                rl.probes.sweep(steps_dump(), "face", layers=[3], positions=["step"], split="accepted-rejected", permutations=0)
            )
        ),
        "by length": report(
            rl.probes.sweep(
                coin_run(), "face", layers=[3], positions=["query"], split="length:2", permutations=0, estimators="ridge"
            )
        ),
        "curve": (curve := rl.probes.complexity_curve(rows, "topic", layer=1, position="all", C=(0.01, 1.0), folds=3)).table,
        "curve figure": curve.plot() if hasattr(curve, "plot") else "",
        "cross": [
            rl.probes.cross_validate(rows.matrix("S", 1), rows.target("topic").values, rows.roots, estimator=name, folds=3)
            for name in ("logistic", "ridge", "lda", "mass-mean", "logistic-cv", "sparse")
        ],
        "test": rl.probes.permutation_test(rows, "topic", layer=1, position="all", permutations=19, folds=3),
        "errors": [
            error(lambda: rl.probes.sweep(rows, "nothing")),
            error(lambda: rl.probes.sweep(rows, "topic", estimators="forest")),
            error(lambda: rl.probes.sweep(rows, "topic", positions=["step"])),
            error(lambda: rl.probes.sweep(rows, "topic", layers=[9])),
            error(lambda: rl.probes.sweep(rows, "topic", metric="luck")),
            error(lambda: rl.probes.sweep(rows, "topic", split="odd")),
            error(lambda: rl.probes.sweep(rows, "topic", folds=1)),
            error(lambda: rl.probes.ProbeRows.of_arrays(np.zeros((3, 2)), {"a": [1, 2]}, groups=[0, 1, 2])),
        ],
    }


@group
def _estimators() -> dict[str, Any]:
    from replaylens.probes.registry import ESTIMATORS

    rows, three = made_rows(), made_rows(3)
    found: dict[str, Any] = {}
    x, y = three.matrix("S", 1), np.array(three.target("topic").values)
    x = np.asarray(x, dtype=np.float64)
    for name, make in ESTIMATORS.items():
        found[name] = str(make)
    for name in ("logistic", "ridge", "lda", "mass-mean", "mass-mean-whitened"):
        probe = rl.probes.fit_probe(three, "topic", layer=1, position="all", estimator=name)
        found[f"fit {name}"] = {
            "weight": probe.weight,
            "bias": getattr(probe, "bias", None),
            "scores": probe.scores(x[:9]),
            "predicted": list(probe.predict(x[:9])),
            "str": str(probe),
        }
    half = y != "c2"
    for name, one in {"leace": rl.probes.Leace(), "inlp": rl.probes.Inlp()}.items():
        found[name] = one.fit(x[half], y[half]).transform(x[:6])
    pairs = np.stack([x[:30], -x[:30] + 0.1])
    found["ccs"] = (
        rl.probes.CcsProbe(tries=2, steps=20).fit(np.concatenate(pairs, 1), y[:30] == "c0").predict(np.concatenate(pairs, 1))
    )
    found["sparse"] = error(lambda: rl.probes.SparseProbe(k=2).fit(x[half], y[half]).predict(x[:9]))
    found["near"] = rl.probes.near_duplicates(np.concatenate([x[:5], x[2:4] * 1.0001]))
    found["folds"] = rl.probes.fold_of_groups(np.repeat(np.arange(11), 2), 4, seed=3)
    found["placebos"] = [
        each.weight
        for each in rl.probes.placebo_probes(rows, rl.probes.fit_probe(rows, "topic", layer=1, position="all"), count=2)
    ]
    groups = np.repeat(np.arange(12), 3)
    values = np.asarray(numbers(5, 36).double())
    found["mean"] = [rl.probes.mean_over_groups(values, groups, folds=k) for k in (1, 5)]
    found["means"] = rl.probes.means_over_groups(np.stack([values, values**2]), groups)
    found["share"] = rl.probes.mean_over_groups((values > 0.2).astype(float), groups)
    found["ratio"] = rl.probes.ratio_over_groups(np.abs(values), np.abs(values) + 1, groups)
    found["discovery"] = rl.probes.false_discovery(np.array([0.001, 0.2, 0.03, 0.04, 0.9]))
    found["area"] = [
        rl.probes.area(values, values[::-1] > 0, groups),
        rl.probes.area(values, values > 0.1, groups),
        rl.probes.area(values, values[::-1] > 0, groups, strata=groups % 2, folds=2),
    ]
    found["balanced"] = rl.probes.balanced_accuracy(values > 0, groups % 3, groups)
    applied = rl.probes.fit_probe(coin_run(), "face", layer=3, position="query").apply(coin(), [HEADS, TAILS])
    found["applied"], found["applied plot"] = applied, applied.plot(1)
    found["streamed"] = error(
        lambda: rl.probes.fit_streaming(
            coin(), tasks.get("coin")(flips=(1, 3)).examples(8), "face", ["heads", "tails"], position="query"
        )
    )
    found["splits"] = [
        error(lambda make=make: make())
        for make in (
            lambda: rl.probes.by_root(rows, 4),
            lambda: rl.probes.by_mask(rows, "half", rows.roots < "5", rows.roots >= "5"),
            lambda: rl.probes.by_length(rl.probes.ProbeRows.of(coin_run()).at("query"), 2),
            lambda: rl.probes.by_depth(rl.probes.ProbeRows.of(steps_dump()), 2),
            lambda: rl.probes.by_acceptance(rl.probes.ProbeRows.of(steps_dump())),
            lambda: rl.probes.by_answer(rl.probes.ProbeRows.of(coin_run()).at("query")),
            lambda: rl.probes.by_names(rl.probes.ProbeRows.of(coin_run()).at("step"), {"Alice", "Bob"}),
            lambda: rl.probes.by_phrase(rl.probes.ProbeRows.of(coin_run()).at("query"), "not"),
        )
    ]
    return found


@group
def _rows() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, given in {"run": coin_run(), "steps": steps_dump()}.items():
        rows = rl.probes.ProbeRows.of(given)
        found[name] = rows.frame
        for where in (
            "all",
            "7",
            "step",
            "step+1",
            "step-1",
            "step:2",
            "query",
            "query-1",
            "query+1",
            "3:7",
            "-2:",
            "text: flips",
            "label:face",
        ):
            here = error(rows.at, where)
            found[f"{name} {where}"] = (
                here
                if isinstance(here, Exception)
                else (len(here), bits(torch.as_tensor(here.matrix("S", 2))), list(here.roots[:3]))
            )
        found[f"{name} kinds"] = [len(rows.accepted()), len(rows.rejected()), str(rows)]
        found[f"{name} targets"] = {label: rows.at("step").target(label) for label in ("face", "parity", "flips", "claimed")}
    joined = rl.probes.ProbeRows.join(
        a=rl.probes.ProbeRows.of(coin_run()).at("query"), b=rl.probes.ProbeRows.of(steps_dump()).at("query")
    )
    found["joined"] = (len(joined), list(joined.frame.columns))
    own = made_rows()
    found["own"], found["own str"] = own.frame, str(own)
    return found


@group
def _questions() -> dict[str, Any]:
    engine, dump, run = coin(), steps_dump(), coin_run()
    others = tasks.get("coin")(flips=(1, 4)).examples(range(100, 112))
    probe = rl.probes.fit_probe(run, "face", layer=3, position="query", estimator="mass-mean")
    asked = {
        "transfer": lambda: rl.probes.transfer(dump, "face", layers=[3], folds=3),
        "outcome": lambda: rl.probes.outcome_at_fork(dump, layers=[3], folds=3),
        "judge": lambda: rl.probes.judge(dump, draft_layer=2, layers=[2], folds=3),
        "viable": lambda: rl.probes.viable_branch(run, layers=[3], folds=3),
        "truth": lambda: rl.probes.text_or_truth(
            engine, tasks.get("coin")(flips=(2, 4), rendering="steps").examples(40), layers=[3]
        ),
        "amnesic": lambda: rl.probes.amnesic(engine, run, others, "face", layers=[3], placebos=2),
        "reach": lambda: rl.probes.steering_reach(
            engine, run, tasks.get("coin")(flips=(3, 3)).examples(range(100, 106)), "face", layers=[3], placebos=2
        ),
        "steer": lambda: rl.probes.steer(
            engine, probe, others, placebos=2, untrained=rl.probes.placebo_probes(run, probe, 2), factor=1.5
        ),
        "ablate": lambda: rl.probes.ablate(engine, probe, others, placebos=2),
        "interchange": lambda: rl.probes.interchange(engine, probe, others, placebos=2),
    }
    found: dict[str, Any] = {}
    for name, call in asked.items():
        made = error(call)
        found[name] = made if isinstance(made, Exception) else report(made)
    return found


@group
def _monitors() -> dict[str, Any]:
    engine, run = coin(), coin_run()
    probe, early = (rl.probes.fit_probe(run, "face", layer=layer, position="query", estimator="mass-mean") for layer in (3, 2))
    watch = engine.watch({"face": probe, "early": early})
    branch = watch.prompt("A coin's state is heads. Alice flips.")
    streamed = [tuple(each) for each in watch.stream(branch, 6, stop={"face": 2.0})]
    pair = [watch.prompt(f"A coin's state is {face}. Bob flips.") for face in ("heads", "tails")]
    hits = watch.generate(pair, 6, stop={"early": 0.5})
    (steered,) = branch.fork(edits=[watch.edit("face", "add", numbers(3, 128), above=0.5)])
    names = ["Alice", "Bob", "Carol", "David", "Emma", "Frank"]
    texts = [f"A coin's state is {face}. {name} flips." for face in ("heads", "tails") for name in names]
    scored = probe.apply(engine, texts)
    alarmed = probe.with_alarm(
        scored, [i < len(names) for i in range(len(texts))], probe.apply(engine, texts[len(names) :]), rate=0.5
    )
    return {
        "alarm": (str(alarmed.alarm), [engine.watch(alarmed).alarms(engine.watch(alarmed).prompt(text)) for text in texts]),
        "str": str(watch),
        "sites": watch.sites,
        "streamed": streamed,
        "hits": hits,
        "scores": watch.scores(branch),
        "all": [watch.scores(each) for each in pair],
        "tokens": [each.tokens for each in pair],
        "steered": told(steered.generate(3)),
        "errors": [
            error(lambda: watch.generate(pair, 2, stop={"nobody": 1.0})),
            error(lambda: engine.watch({})),
            error(lambda: watch.scores(engine.prompt(HEADS))),
        ],
    }


# ---- forks and rollouts ---------------------------------------------------------------------------------------------------


@group
def _resampling() -> dict[str, Any]:
    from replaylens.rollouts.plan import sentence_spans

    engine = coin()
    chain = engine.prompt("A coin's state is heads.").force(" Alice flips. Bob flips. What's the state? A: heads.")
    regex = rl.Answer.regex("A: (heads|tails)")
    folder = Path(mkdtemp()) / "rollouts"
    made = {
        "sentences": chain.resample(
            4, at="sentences", max_new=12, answer=regex, sites="S", keep=["fork", "answer", "sentences", "last", 0, -2]
        ),
        "tokens": chain.resample(2, at="tokens", max_new=4, sampling=rl.Sampling(temperature=2.0, seed=3)),
        "choices": chain.resample(
            1, at="sentences", max_new=0, answer=rl.Answer.choices([" heads", " tails"], after=" What's the state? A:")
        ),
        "replaced": chain.resample(
            3,
            at=[9, 12],
            max_new=8,
            replace=" Carol does not flip.",
            answer=rl.Answer.regex("heads|tails", stop=False),
            wave=2,
            folder=folder,
        ),
        "function": chain.resample(
            3,
            at=lambda position, text: text == " flips",
            max_new=6,
            answer=rl.Answer.function(lambda text: "not" if "not" in text else None),
        ),
        "settled": chain.resample(24, at=[chain.length - 2], max_new=2, answer=rl.Answer.regex("heads|tails"), settle=0.1),
    }
    found: dict[str, Any] = {}
    for name, each in made.items():
        found[name] = {
            "rollouts": each,
            "outcomes": each.outcomes(),
            "settled": each.settled(0.1),
            "digest": each.digest if name != "function" else "",
            "states": {site: bits(rows) for site, rows in each.states.items()},
        }
    texts = rl.probes.RolloutTexts.of(made["sentences"])
    tree = texts.tree("Rollouts", prompt="Q: ")
    found |= {
        "loaded": rl.Rollouts.load(folder).digest == made["replaced"].digest,
        "texts": texts,
        "tree": tree._repr_html_(),
        "tree text": str(tree),
        "resilience": rl.probes.resilience(texts),
        "counterfactual": rl.probes.counterfactual_importance(texts, permutations=49, resamples=99),
        "as texts": [each.labels for each in engine.texts(made["sentences"]).given[:3]]
        if hasattr(engine.texts(made["sentences"]), "given")
        else 0,
        "spans": [
            sentence_spans(text)
            for text in ("One. Two! Is it? Dr. Who said 3.5 … then", "1. A\n2. B", "e.g. this. J. Smith came.", "")
        ],
        "errors": [
            error(lambda: chain.resample(0)),
            error(lambda: chain.resample(2, at="words")),
            error(lambda: chain.resample(2, at=99)),
            error(lambda: chain.resample(2, sampling=rl.Sampling())),
            error(lambda: chain.resample(2, keep="some", sites="S")),
            error(lambda: chain.resample(2, settle=0.1, folder=folder)),
            error(lambda: chain.resample(2, settle=2.0)),
            error(lambda: rl.Answer.choices([])),
            error(lambda: rl.Answer.regex("(")),
            error(lambda: rl.Rollouts.load("/nope")),
            error(lambda: chain.resample(2, wave=0)),
            error(lambda: chain.resample(2, at=[9, 12], replace=["a", "b", "c"])),
        ],
    }
    return found


@group
def _fork_statistics() -> dict[str, Any]:
    from replaylens.rollouts.rollouts import OutcomeCounts

    table = np.array([[52, 48, 0], [49, 49, 2], [51, 49, 0], [88, 10, 2], [90, 10, 0], [99, 1, 0]])
    texts = ["A coin shows heads.", " Alice waits.", " Bob flips it.", " Carol waits.", " So it", " shows tails."]
    counts = OutcomeCounts([0, 5, 8, 12, 15, 18], ["tails", "heads", "no answer"], table, texts)
    few = OutcomeCounts([0, 5, 8], ["a", "b"], np.array([[3, 0], [1, 2], [0, 1]]), ["x", "y", "z"])
    drawn = rl.probes.RolloutTexts(
        positions=[0, 5],
        texts=["A coin shows heads.", " Alice flips it."],
        outcomes=["tails", "heads"],
        fork=np.array([0, 0, 1, 1, 1]),
        units=[
            (" It is heads.",),
            (" Bob flips it.", " So tails."),
            (" Alice flips it.",),
            (" Alice waits.",),
            (" She waits.",),
        ],
        outcome=["heads", "tails", "tails", "heads", "heads"],
    )
    forks = [
        rl.probes.TokenFork(11, [" a", " b", " c"], np.array([0.5, 0.3, 0.1]), np.array([[30, 10], [4, 36], [20, 20]])),
        rl.probes.TokenFork(12, [" d", " e"], np.array([0.9, 0.05]), np.array([[150, 50], [60, 140]])),
    ]
    states = numbers(7, 24, 5).double().numpy()
    codes = np.arange(24)
    small = dict(permutations=99, resamples=100)
    outcomes = np.stack([10 + 5 * (codes % 3), 20 - 5 * (codes % 3)], 1)
    return {
        "curve": rl.probes.outcome_curve(counts),
        "joint": rl.probes.outcome_curve(counts, joint=True, level=0.9),
        "few": rl.probes.outcome_curve(few),
        "importance": rl.probes.importance(counts, **small),
        "kl": rl.probes.importance(counts, measure="kl", **small),
        "importance of few": rl.probes.importance(few, **small),
        "changes": rl.probes.change_points(counts),
        "one change": rl.probes.change_points(counts, most=1, prior=0.2, level=0.8),
        "changes of few": rl.probes.change_points(few),
        "resilience": rl.probes.resilience(drawn),
        "counterfactual": rl.probes.counterfactual_importance(drawn, **small),
        "tree": str(drawn.tree("t")),
        "tokens": rl.probes.forking_tokens(forks, threshold=0.2, resamples=100),
        "siblings": rl.probes.sibling_divergence(states, codes // 6, codes % 2, codes % 6 // 2 % 2, permutations=99),
        "agreement": rl.probes.draft_agreement(
            [(1, 2), (3,), (4, 5), (6,)],
            [[(1, 2), (1, 3)], [(3,), (2,)], [(4, 5), (4, 5)], [(1,)]],
            [(1, 3), (2,), (7,), (1,)],
            np.array([0, 0, 1, 2]),
            permutations=99,
        ),
        "probe": report(
            rl.probes.outcome_probe(
                {("S", 3): states},
                outcomes,
                codes // 2,
                tokens=[np.array([1, 2 + i % 4, i]) for i in range(24)],
                estimator="logistic",
                folds=3,
            )
        ),
        "errors": [
            error(lambda: rl.probes.importance(counts, measure="l2")),
            error(lambda: rl.probes.change_points(counts, most=0)),
            error(lambda: rl.probes.outcome_curve(counts, level=2.0)),
            error(lambda: rl.probes.forking_tokens([])),
            error(lambda: OutcomeCounts([0], ["a"], table, texts)),
        ],
    }


# ---- tasks ----------------------------------------------------------------------------------------------------------------


@group
def _tasks() -> dict[str, Any]:
    from replaylens.tasks import splits

    found: dict[str, Any] = {}
    knobs: dict[str, list[dict[str, Any]]] = {
        "coin": [
            {},
            {"rendering": "steps", "distractors": 2},
            {"rendering": "wei", "verb": "turn", "p": 0.8},
            {"rendering": "symbols", "start": "heads"},
            {"rendering": "states", "names": "held-out"},
            {"phrasing": "mixed", "flips": (3, 3)},
        ],
        "coins": [{}, {"coins": 5, "flips": (8, 8)}],
        "coin-resets": [{}, {"reset": 0.6}],
        "shell": [{}, {"cups": 5, "p": 0.5}],
        "words": [{}, {"group": "Z60"}, {"group": "A4xZ5"}],
        "fork": [{}, {"depth": (4, 5)}],
        "boxes": [{}, {"boxes": 6, "moves": (6, 6)}],
        "variables": [{}, {"variables": 5, "modulus": 7}],
        "hops": [{}, {"hops": (3, 3), "relations": 3, "people": 7}],
        "counts": [{}, {"people": 3, "operations": (6, 6), "most": 60, "change": 9}],
    }
    for name, choices in knobs.items():
        for each in choices:
            task = tasks.get(name)(seed=4, **each)
            for index in range(3):
                example = task.example(index)
                reading = example.reading
                places = [(i, i + 1) for i in range(len(example.text))]
                found[f"{name} {each} {index}"] = {
                    "prompt": example.prompt,
                    "labels": example.labels_at(places),
                    "rest": [
                        example.completion,
                        example.answer,
                        str(example.events),
                        example.root,
                        example.thoughts,
                        example.steps,
                        example.digest,
                        reading.readable_until,
                        [str(span) for span in example.spans],
                    ],
                }
            text = example.prompt + example.completion
            wrong = text.replace(" heads", " HEADS").replace("A: ", "A: no ")
            found[f"{name} {each} other"] = [
                getattr(read := error(task.read, cut, index=2), "readable_until", read)
                for cut in (text[: len(text) // 2], text[: len(text) // 3], wrong, "x" + text, "")
            ]
            found[f"{name} {each} about"] = (
                task.label_names,
                task.known_zero,
                task.answers(),
                task.next_action_chance(),
                len(task.vocabulary()),
                str(task),
            )
    coins = tasks.get("coin")
    made = {
        "iid": splits.iid(coins(), train=6, test=3),
        "length": splits.length(coins(), longest=3, train=6, test=3),
        "names": splits.names(coins(), train=6, test=3),
        "phrasing": splits.phrasing(coins(), train=6, test=3),
        "p": splits.p_shift(coins(), p=0.9, train=6, test=3),
        "depth": splits.branch_depth(tasks.get("fork")(), deepest=2, train=4, test=2),
    }
    for name, split in made.items():
        found[f"split {name}"] = [
            [example.prompt for example in split.train],
            {key: [example.prompt for example in test] for key, test in split.tests.items()},
        ]
    boxes = "Box 1 has the mirror. Box 2 is empty. Box 3 is empty. Box 4 has the egg. "
    impossible = {
        "boxes": boxes + "Put the bell into box 1. What is",
        "boxes 2": boxes + "Move the contents of box 1 to box 4.",
        "boxes 3": boxes + "Remove the bell from box 3.",
        "counts": "Emma has 15 pens. Emma sells 9 of them. Emma finds 3 more pens. How many pens does Emma have? A: 9.",
        "fork": "Start at ve. Roads: ve to ru, ve to bo, ru to ma, bo to lo. Go to lo. Path: ve, ru, lo.",
    }
    for name, text in impossible.items():
        task = tasks.get(name.split()[0])()
        read = error(task.read, text)
        found[f"impossible {name}"] = (
            read if isinstance(read, Exception) else (read.readable_until, [str(span) for span in read.spans])
        )
    found["outcomes"] = [coins(p=0.8).outcomes(HEADS[:n]) for n in (24, 30, 38, 55)]
    found["registry"] = [tasks.get(name).__name__ for name in knobs]
    found["tokens"] = tasks.label_tokens(
        coins().example(3),
        tasks.offsets_of(tasks.WordTokenizer(coins.vocabulary()), coins().example(3).text),
        ["face", "claimed"],
    )
    found["errors"] = [
        error(lambda: tasks.get("dice")),
        error(lambda: coins(flips=(3, 2))),
        error(lambda: coins(sides=6)),
        error(lambda: coins(p=2.0)),
        error(lambda: coins(rendering="song")),
        error(lambda: coins().example(-1)),
        error(lambda: tasks.get("boxes")(boxes=99)),
        error(lambda: splits.branch_depth(coins(), deepest=2)),
        error(lambda: coins().with_knobs(size=3)),
    ]
    return found


# ---- dumps ----------------------------------------------------------------------------------------------------------------


@group
def _dumps() -> dict[str, Any]:
    from replaylens.dumps.verify import diff, verify

    engine, dump = coin(), steps_dump()
    filtered = dump.where(accepted=True, token_state="accepted")
    lambda_view = dump.where(lambda frame: frame["position"] % 3 == 0)
    feeds = {}
    for shuffle in ("rows", "blocks", None):
        feed = dump.feed([("S", 2), "Z.kl"], batch_size=64, seed=3, shuffle=shuffle, epochs=2)
        batches = list(feed)
        feeds[str(shuffle)] = {
            "rows": [batch["row"] for batch in batches],
            "x": bits(*(batch["blocks.2.hook_in"] for batch in batches)),
            "state": feed.state_dict(),
            "str": str(feed),
        }
    x, y, groups = dump.matrix("S", 3, label="face")
    other = (
        coin()
        .replay(tasks.get("coin")(flips=(2, 4), rendering="steps", seed=2).examples(4), sites="S")
        .save(Path(mkdtemp()) / "other", positions="steps", stored_dtype="bfloat16")
    )
    manifest = dump.manifest
    return {
        "index": dump.index,
        "columns": dump.columns,
        "labels": dump.labels,
        "str": str(dump),
        "digest": dump.digest,
        "accepted": dump.accepted_digest,
        "sites": {name: str(entry) for name, entry in dump.sites.items()},
        "filtered": (len(filtered), str(filtered), bits(filtered.to_torch("S", 2))),
        "by function": lambda_view.index,
        "statistics": {f"{site}{layer}": dump.statistics(site, layer) for site, layer in (("S", 0), ("S", 4))},
        "filtered statistics": filtered.statistics("S", 1),
        "take": dump.take([7, 3, 7], [("S", 2), "Z.kl"]),
        "array": (dump.array("S", 2)[[3, 1]], dump.array("S", 2)[10:12], dump.array("S", 2).shape, str(dump.array("S", 2))),
        "stream": [(bits(rows), len(lines)) for rows, lines in dump.stream("S", 1, batch_rows=100)],
        "feeds": feeds,
        "matrix": (bits(torch.as_tensor(x)), list(y), list(groups)),
        "verified": str(verify(dump.url, engine, sample=3)),
        "other": (other.index, str(other), other.digest),
        "same": str(diff(dump.url, dump.url)),
        "differs": str(diff(dump.url, other.url)),
        "plan": str(manifest.plan.to_json() if hasattr(manifest.plan, "to_json") else manifest.plan),
        "shards": [(shard.name, shard.rows, shard.digest) for shard in manifest.shards],
        "cite row": dump.cite(row=17),
        "cache": {name: each for name, each in dump.to_activation_cache(1).items()},
        "errors": [
            error(lambda: rl.Dump.open("/nope")),
            error(lambda: dump.where(colour=1)),
            error(lambda: dump.array("S", 9)),
            error(lambda: dump.take([10**9])),
            error(lambda: dump.array("Q")),
            error(lambda: dump.feed([("S", 2)], batch_size=0)),
            error(lambda: dump.feed([("S", 2)], batch_size=4, shuffle="all")),
            error(lambda: dump.matrix("S", 3, label="mood")),
        ],
    }


@group
def _page() -> dict[str, Any]:
    from replaylens.views.report import ReportPage

    engine, dump = coin(), steps_dump()
    made = rl.probes.sweep(coin_run(), "face", layers=[3], positions=["query"], permutations=0, estimators="ridge")
    results = (
        rl.lens(engine, HEADS),
        rl.patch(engine, HEADS, TAILS, metric=PAIR, layers=[1]),
        rl.attention(engine, HEADS, layers=[1]),
    )
    html = ReportPage(dump, (made,), trees=3, title="All", results=results).html()
    packed = re.findall(r'<script type="text/plain".*?</script>', html, re.S)
    marks = [html.count(each) for each in ("<?xml", "<svg", "<g>", "<g id", "clip-path", "stroke-linejoin", "<section", "rl-")]
    tags = Counter(re.findall(r'<[a-zA-Z][^ <>/]*(?: (?:class|id)="[^"]*")*', re.sub(r"<svg.*?</svg>", "", html, flags=re.S)))
    found = {"page": _words(html), "rows": ["".join(cells) for cells in _cells(html)], "packed": packed, "marks": marks}
    return found | {"tags": sorted(tags.items())}


def _words(html: str) -> str:
    plain = re.sub(r"<(script|style|svg).*?</\1>", " ", html, flags=re.S)
    plain = re.sub(r"<[^>]+>", " ", plain)
    return re.sub(r"\s+", " ", re.sub(r"[0-9a-f]{12,}", "HASH", plain))


def _cells(html: str) -> Iterator[list[str]]:
    for line in re.findall(r"<tr.*?</tr>", html, re.S)[:400]:
        yield [re.sub(r"<[^>]+>", "", cell) + "|" for cell in re.findall(r"<t[dh].*?</t[dh]>", line, re.S)]


@group
def _shell() -> dict[str, Any]:
    """What commands print."""
    from typer.testing import CliRunner

    from replaylens.cli import app

    out, dump = Path(mkdtemp()), steps_dump()
    lines = {
        "tasks": "tasks list",
        "show": "tasks show coin --n 2 --knob flips=2,4 --labels face,parity",
        "check": "tasks check boxes --n 5",
        "inspect": f"inspect {dump.url}",
        "inspect json": f"inspect {dump.url} --json",
        "dump": f"dump --task coin --n 6 --knob flips=1,4 --sites SZ --drafter lens --out {out}/d",
        "diff": f"diff {out}/d {out}/d",
        "verify": f"verify {out}/d --all",
        "probe": f"probe {dump.url} --label face --sites S --layers 3 --positions step --estimators ridge --permutations 0",
        "probes": "probe --list",
        "replay": "replay --n 2 --drafter lens --window 3 --knob rendering=steps",
        "replay in colours": "replay --n 2 --drafter lens --window 3 --knob rendering=steps",
        "show in colours": "tasks show coin --n 2 --knob flips=2,4 --labels face,parity",
        "resample": f"resample --prompt 'A coin' --chain ' flips' --n 2 --max-new 3 --out {out}/r",
        "report": f"report {out}/d --out {out}/r.html",
        "steer": f"steer {dump.url} --label face --layer 3 --n 4 --placebos 2",
        "wrong": "dump --task dice --out x",
        "no folder": "inspect /nope",
        "reproduce": "reproduce --list",
    }
    found = {}
    for name, line in lines.items():
        colours = {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": None} if "colours" in name else {}
        done = CliRunner(env={"COLUMNS": "300", **colours}).invoke(app, shlex.split(line))
        raised = "" if done.exception is None or isinstance(done.exception, SystemExit) else str(done.exception)
        found[name] = (
            done.exit_code,
            *(re.sub(r"[\d.]+ [kM]B|\"bytes\": \d+", "SIZE", each.replace(str(out), "OUT")) for each in (done.output, raised)),
        )
    return found
