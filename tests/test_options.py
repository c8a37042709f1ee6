"""Every public keyword and every flag has an effect, which a test predicts.

`EFFECTS` gives two values to an option and says how the results differ; `tests/options.json` names the tests of the others (see
`tests.options`). An option that is in neither fails here.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine.proof.doctor import numbers
from replaylens.probes.controls import make_goal
from tests import options
from tests.digests import _sparse
from tests.golden import Walk, answers_of
from tests.golden_calls import HEADS, PAIR, TAILS, coin, rl, tasks
from tests.golden_more import coin_run, steps_dump
from tests.golden_options import TABLE, outcome_counts, rollout_texts
from tests.options import ignored, reason

p: Any = rl.probes
Values = tuple[Any, Any, Callable[..., bool]]
EFFECTS: dict[tuple[str, str], tuple[Callable[..., Any], Values]] = {}


def effects(name: str, call: Callable[..., Any], **given: Values) -> None:
    """call: gives the result for options of the public call with this name. given: option -> two values, and whether the
    results for them are as they should be; `...` is for none, whose result all options of the call share"""
    EFFECTS.update({(name, option): (call, values) for option, values in given.items()})


# ---- how results differ ---------------------------------------------------------------------------------------------------


def told(result: Any) -> str:
    """All that a result says."""
    return json.dumps([Walk(each).leaf() for _, each in answers_of("", result)])


def differ(a: Any, b: Any) -> bool:
    """For seeds and the like: nothing can be said but that they differ."""
    return told(a) != told(b)


def bounds(result: Any) -> tuple[np.ndarray, np.ndarray]:
    """All low and high ends of a result's intervals."""
    low, high = [], []

    def walk(each: Any) -> None:
        if isinstance(each, list | tuple):
            for one in each:
                walk(one)
        elif is_dataclass(each):
            for field in fields(each):
                value = getattr(each, field.name)
                if field.name.endswith("low"):
                    low.append(np.ravel(value))
                elif field.name.endswith("high"):
                    high.append(np.ravel(value))
                else:
                    walk(value)

    walk(result)
    return np.concatenate(low).astype(float), np.concatenate(high).astype(float)


def narrower(a: Any, b: Any) -> bool:
    """The first intervals lie within the second ones, and some are shorter."""
    (low, high), (lower, higher) = bounds(a), bounds(b)
    known = ~np.isnan(low) & ~np.isnan(lower)
    return bool(
        (low[known] >= lower[known] - 1e-12).all()
        and (high[known] <= higher[known] + 1e-12).all()
        and ((high - low)[known].sum() < (higher - lower)[known].sum())
    )


def wider(a: Any, b: Any) -> bool:
    return narrower(b, a)


def counted(one: int, other: int) -> Callable[[Any, Any], bool]:
    """p-values are whole multiples of 1 / (draws + 1)."""

    def whole(result: Any, draws: int) -> bool:
        values = np.ravel(
            getattr(result, "p_family", result if isinstance(result, np.ndarray) else getattr(result, "p", None))
        ).astype(float)
        values = values[~np.isnan(values)] * (draws + 1)
        return bool(len(values) and np.allclose(values, values.round()) and (values >= 0.999).all())

    return lambda a, b: whole(a, one) and whole(b, other)


def lines_of(report: Any, column: str) -> list[Any]:
    return list(report.table[column].dropna()) if column in report.table else []


def only(column: str, one: Any, other: Any) -> Callable[[Any, Any], bool]:
    """A column of the report's table holds this value, and no other."""
    return lambda a, b: set(lines_of(a, column)) == {one} and set(lines_of(b, column)) == {other}


def better(a: Any, b: Any) -> bool:
    """The second is far more accurate."""
    return float(np.max(score(b))) > float(np.max(score(a))) + 0.15


def score(result: Any) -> Any:
    if isinstance(result, float):
        return result
    return result.observed if hasattr(result, "observed") else lines_of(result, "accuracy")


# ---- statistics of rollouts -----------------------------------------------------------------------------------------------


def of_fork(**given: Any) -> Any:
    forks = [
        p.TokenFork(7, [" a", " b"], np.array([0.5, 0.5]), np.array([[9, 1, 0], [1, 9, 0]])),
        p.TokenFork(9, [" d", " e", " f"], np.array([0.2, 0.1, 0.6]), np.array([[5, 5, 0], [4, 6, 0], [0, 0, 10]])),
    ]
    return p.forking_tokens(forks, **{"resamples": 99, **given})


SMALL = dict(permutations=29, resamples=99)
CODES = np.arange(30)
STATES = numbers(34, 30, 4).double().numpy()


def divergence(**given: Any) -> Any:
    fixed: dict[str, Any] = dict(groups=CODES // 10, permutations=19)
    return p.sibling_divergence(STATES, CODES // 5, CODES // 5 % 2, CODES * 7 % 5 % 2, **{**fixed, **given})


def agreement(**given: Any) -> Any:
    drafts, taken, *resamples = np.array(["a", "b", "c"])[np.random.default_rng(0).integers(3, size=(6, 40))].tolist()
    return p.draft_agreement(drafts, list(zip(*resamples, strict=True)), taken, np.arange(40) // 2, **given)


def total_variation(a: Any, b: Any) -> bool:
    """The plain estimates are those of the formulas, of shares of outcomes before and after each unit."""
    q = TABLE / TABLE.sum(1, keepdims=True)
    tv = [0.5 * np.abs(x - y).sum() for x, y in pairwise(q)]
    return np.allclose(a.distances.plug_in, tv) and not np.allclose(b.distances.plug_in, tv)


effects(
    "rl.probes.importance",
    lambda **o: p.importance(outcome_counts(), **{**SMALL, **o}),
    level=(0.5, ..., narrower),
    seed=(..., 2, differ),
    measure=("tv", "kl", total_variation),
    permutations=(29, 49, counted(29, 49)),
    resamples=(..., 199, differ),
)
effects(
    "rl.probes.counterfactual_importance",
    lambda **o: p.counterfactual_importance(rollout_texts(), **{**SMALL, **o}),
    level=(0.5, ..., narrower),
    seed=(..., 2, differ),
    measure=("tv", "kl", differ),
    permutations=(29, 49, counted(29, 49)),
    resamples=(..., 199, differ),
    similar=(lambda x, y: x.strip()[:1].lower() == y.strip()[:1].lower(), lambda x, y: x == y, differ),
)
effects(
    "rl.probes.outcome_curve",
    lambda **o: p.outcome_curve(outcome_counts(), **o),
    level=(0.5, ..., narrower),
    joint=(False, True, narrower),
)
effects(
    "rl.probes.change_points",
    lambda **o: p.change_points(outcome_counts(), **o),
    level=(0.5, ..., narrower),
    prior=(0.5, 4.0, lambda a, b: a.number.tolist() != b.number.tolist()),
    most=(1, 3, lambda a, b: len(a.number) < len(b.number)),
)
effects(
    "rl.probes.resilience",
    lambda **o: p.resilience(rollout_texts(), **o),
    level=(0.5, ..., narrower),
    similar=(lambda x, y: True, lambda x, y: False, differ),
)
effects(
    "rl.probes.forking_tokens",
    of_fork,
    level=(0.5, 0.95, differ),
    resamples=(..., 199, differ),
    seed=(..., 2, differ),
    threshold=(0.3, 0.9, differ),
)
effects(
    "rl.probes.sibling_divergence",
    divergence,
    groups=(CODES // 20, CODES // 5, differ),
    permutations=(..., 39, differ),
    seed=(..., 2, differ),
)
effects("rl.probes.draft_agreement", agreement, permutations=(..., 39, differ), seed=(..., 2, differ))
X = numbers(33, 30).double().numpy()
effects(
    "rl.probes.ratio_over_groups",
    lambda **o: p.ratio_over_groups(np.abs(X)[None], np.abs(X) + 0.5, CODES // 3, **o),
    level=(0.5, ..., narrower),
    least=(-math.inf, 0.0, differ),
)
effects(
    "rl.probes.Estimate",
    lambda **o: p.Estimate(0.5, 0.4, 0.6, **o),
    level=(0.5, 0.9, lambda a, b: (a.level, b.level) == (0.5, 0.9)),
)
effects(
    "rl.probes.RolloutTexts.of_frame",
    lambda **o: p.RolloutTexts.of_frame(
        pd.DataFrame(
            {"position": [1, 1, 4], "outcome": ["b", "b", "a"], "units": [(" x",), (), (" y",)], "text": ["p q", "", "r"]}
        ),
        ["one", "two"],
        **o,
    ),
    outcomes=(["a", "b"], ["b", "a"], lambda a, b: (a.outcomes, b.outcomes) == (["a", "b"], ["b", "a"])),
    split=(str.split, list, lambda a, b: (a.units[0], b.units[0]) == (("p", "q"), ("p", " ", "q"))),
)


# ---- probes ---------------------------------------------------------------------------------------------------------------


@cache
def rows() -> Any:
    """Layer 1 shows `topic`, layer 0 shows nothing."""
    x, y = numbers(40, 120, 6).double().numpy(), np.arange(120) // 3 % 2
    labels = {"topic": np.array(["c0", "c1"])[y], "other": np.arange(120) // 3 * 7 % 5 > 2}
    sites = {("S", 0): x, ("S", 1): x + 2 * y[:, None]}
    return p.ProbeRows.of_arrays(
        sites, labels, groups=np.arange(120) // 3, positions=np.arange(120) % 3, tokens=np.arange(120) * 5 % 7
    )


def permuted(**given: Any) -> Any:
    fixed: dict[str, Any] = dict(label="topic", layer=1, position="all", permutations=19, folds=3, estimator="ridge")
    return p.permutation_test(rows(), **{**fixed, **given})


effects(
    "rl.probes.permutation_test",
    permuted,
    label=("other", "topic", better),
    permutations=(19, 29, lambda a, b: (len(a.drawn), len(b.drawn)) == (19, 29)),
    layer=(0, 1, better),
    folds=(..., 5, differ),
    seed=(..., 2, differ),
    estimator=(..., "mass-mean", differ),
    metric=("accuracy", "auroc", differ),
    position=("all", "1", lambda a, b: differ(a, b)),
)


def crossed(**given: Any) -> Any:
    here = rows()
    x, y = here.matrix("S", 1), np.array([each == "c1" for each in here.target("topic").values]).astype(int)
    return p.cross_validate(x, y, groups=here.roots, **{"estimator": "mass-mean", **given})


def is_discriminant(a: Any, b: Any) -> bool:
    """lda predicts what scikit-learn's does, fitted on the same folds."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    here = rows()
    x, y = here.matrix("S", 1).astype(float), np.array([int(each == "c1") for each in here.target("topic").values])
    said = np.empty(len(y), dtype=int)
    for k in range(b.fold.max() + 1):
        out = b.fold == k
        said[out] = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(x[~out], y[~out]).predict(x[out])
    return bool((b.predicted.astype(int) == said).mean() > 0.97 and differ(a, b))


effects(
    "rl.probes.cross_validate",
    crossed,
    folds=(3, 6, lambda a, b: (a.fold.max(), b.fold.max()) == (2, 5)),
    seed=(1, 2, lambda a, b: a.fold.tolist() != b.fold.tolist()),
    estimator=("mass-mean", "lda", is_discriminant),
)
effects(
    "rl.probes.cross_validate",
    lambda **o: crossed(estimator="ridge", **o),
    kind=("class", "number", lambda a, b: (a.metric, b.metric) == ("accuracy", "r2")),
)
effects(
    "rl.probes.cross_validate",
    crossed,
    metric=("accuracy", "auroc", lambda a, b: (a.metric, b.metric) == ("accuracy", "auroc")),
)


def curve(**given: Any) -> Any:
    return p.complexity_curve(rows(), **{"label": "topic", "layer": 1, "position": "all", "C": (0.1,), "folds": 3, **given})


effects(
    "rl.probes.complexity_curve",
    curve,
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    label=("other", "topic", differ),
    layer=(0, 1, better),
    C=(..., (0.1, 1.0), lambda a, b: len(a.table) < len(b.table)),
    estimator=(..., "ridge", differ),
    position=(..., "1", differ),
)


def small_run() -> Any:
    return p.ProbeRows.of(coin_run())


@cache
def sparse_wide() -> Any:
    """Two sites: "own" shows the label, S does not."""
    x, y = numbers(41, 90, 6).double().numpy(), np.arange(90) // 3 % 2
    return p.ProbeRows.of_arrays(
        {("S", 0): x, "own": x + 3 * y[:, None]}, {"kind": y}, groups=np.arange(90) // 3, positions=np.arange(90) % 3
    )


effects(
    "rl.probes.permutation_test",
    lambda **o: p.permutation_test(
        sparse_wide(),
        "kind",
        estimator="ridge",
        position="all",
        permutations=9,
        folds=3,
        layer=0 if o.get("site", "S") == "S" else None,
        **o,
    ),
    site=("S", "own", better),
)
effects(
    "rl.probes.complexity_curve",
    lambda **o: p.complexity_curve(
        sparse_wide(), "kind", position="all", C=(0.1,), folds=3, layer=0 if o.get("site", "S") == "S" else None, **o
    ),
    site=("S", "own", better),
)
effects(
    "rl.probes.placebo_probes",
    lambda **o: p.placebo_probes(rows(), p.fit_probe(rows(), "topic", layer=1, position="all"), **o),
    count=(2, 3, lambda a, b: (len(a), len(b)) == (2, 3)),
    seed=(..., 2, differ),
)


def classes(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(count) % 2
    return numbers(50, count, 8).double().numpy() + y[:, None], y


effects(
    "rl.probes.SparseProbe",
    lambda **o: p.SparseProbe(**{"k": 3, **o}).fit(*classes()),
    k=(2, 5, lambda a, b: (len(a.selected_), len(b.selected_)) == (2, 5)),
    C=(0.01, 10.0, lambda a, b: np.abs(a.coef_).sum() < np.abs(b.coef_).sum()),
)


def attentive(**given: Any) -> np.ndarray:
    x, y = classes(40)
    return np.asarray(p.AttentiveProbe(**{"positions": 2, "steps": 30, **given}).fit(x, y).predict_proba(x)[:, 1] - 0.5)


effects(
    "rl.probes.AttentiveProbe",
    attentive,
    C=(0.001, 10.0, lambda a, b: np.abs(a).mean() < np.abs(b).mean()),
    steps=(1, 60, differ),
    random_state=(1, 2, differ),
)


def pairs(**given: Any) -> np.ndarray:
    x, y = classes(40)
    return np.asarray(p.CcsProbe(**{"tries": 1, "steps": 5, **given}).fit(np.concatenate([x, -x + 0.1], 1), y).weight_)


effects("rl.probes.CcsProbe", pairs, tries=(1, 8, differ), steps=(1, 60, differ), random_state=(1, 2, differ))
effects(
    "rl.probes.calibrated",
    lambda **o: p.calibrated("logistic", *classes(), np.arange(60) // 2, **o).predict_proba(classes()[0]),
    folds=(..., 6, differ),
    seed=(..., 2, differ),
)


def armed(**given: Any) -> float:
    scores = [np.random.default_rng(i).normal(size=8) for i in range(60)]
    probe = p.fit_probe(rows(), "topic", layer=1, position="all", estimator="ridge")
    return probe.with_alarm(scores[:20], [i % 2 == 0 for i in range(20)], scores[20:], **given).alarm.threshold


effects("rl.probes.LinearProbe.with_alarm", armed, rate=(..., 0.3, lambda a, b: b < a))


def outcomes(**given: Any) -> Any:
    given = {"tokens": [np.array([i // 3, i % 3]) for i in range(30)], "estimator": "logistic", "folds": 3, **given}
    return p.outcome_probe({("S", 1): STATES}, np.stack([CODES % 4, 6 - CODES % 4], 1), CODES // 3, **given)


effects(
    "rl.probes.outcome_probe",
    outcomes,
    tokens=(..., [np.array([i // 3, i % 3, i % 2]) for i in range(30)], differ),
    folds=(..., 5, differ),
    seed=(..., 2, differ),
    untrained=(
        None,
        {("S", 1): numbers(36, 30, 4).double().numpy()},
        lambda a, b: (
            not any("untrained" in each for each in a.table["what"]) and any("untrained" in each for each in b.table["what"])
        ),
    ),
)


def coded(**given: Any) -> Any:
    here = rows()
    x = torch.from_numpy(here.matrix("S", 1)).double()[None]
    return p.online_codes(x, make_goal(here.target("topic")), [], here.roots, **given)


effects("rl.probes.online_codes", coded, seed=(..., 2, differ), nuisance=(None, np.arange(120)[:, None] % 3 / 1.0, differ))


# ---- questions ------------------------------------------------------------------------------------------------------------


def gone_to(site: str) -> Any:
    return lambda a, b: set(a.table["site"]) != set(b.table["site"]) and site in set(b.table["site"])


@cache
def wrong_run() -> Any:
    """Some answers are wrong, since they are drawn at a high temperature."""
    return coin().replay(
        tasks.get("coin")(flips=(1, 4)).examples(40), sites="SC", sampling=rl.Sampling(temperature=3.0), seed=2
    )


@cache
def steps_rows() -> Any:
    return p.ProbeRows.of(steps_dump())


effects(
    "rl.probes.viable_branch",
    lambda **o: p.viable_branch(wrong_run(), **{"layers": [3], "folds": 3, "estimator": "ridge", "sites": "S", **o}),
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    estimator=(..., "lda", differ),
    sites=(..., "C", differ),
)


# ---- engine ---------------------------------------------------------------------------------------------------------------


@cache
def dump() -> Any:
    return coin().replay(tasks.get("coin")(flips=(1, 2)).examples(5), sites="SZ").save(Path(mkdtemp()) / "d")


def layer(call: Callable[[Any, int | None], Any]) -> Values:
    """Layers 1 and 2 of S are the sites that have these names."""
    names = ("blocks.1.hook_in", "blocks.2.hook_in")
    return 1, 2, lambda a, b: told([a, b]) == told([call(dump(), name) for name in names]) and differ(a, b)


for name in ("statistics", "to_torch", "to_numpy"):
    effects(
        f"rl.Dump.{name}",
        lambda name=name, **o: getattr(dump(), name)("S", **o),
        layer=layer(lambda d, site, name=name: getattr(d, name)(site)),
    )
effects(
    "rl.Dump.stream",
    lambda **o: [x for x, _ in dump().stream("S", **{"layer": 1, **o})],
    layer=(1, 2, lambda a, b: torch.equal(torch.cat(b), dump().to_torch("blocks.2.hook_in")) and differ(a, b)),
    batch_rows=(7, 9, lambda a, b: (len(a[0]), len(b[0])) == (7, 9)),
)
effects(
    "rl.Dump.take",
    lambda **o: dump().take([3, 1], **o),
    sites=(
        [("S", 1)],
        ["blocks.2.hook_in", "Z.kl"],
        lambda a, b: (sorted(a), sorted(b)) == (["blocks.1.hook_in"], ["Z.kl", "blocks.2.hook_in"]),
    ),
)
effects(
    "rl.Sampling.derived",
    lambda **o: rl.Sampling(seed=3, temperature=1.0).derived(**o),
    fields=({"seed": 4}, {"top_k": 2}, lambda a, b: (a.seed, a.top_k, b.seed, b.top_k) == (4, 0, 3, 2)),
)


def grown(**given: Any) -> Any:
    return coin().prompt(HEADS, sites="SZ", **given)


CAPTURE: dict[str, Values] = {
    "top_k": (2, 3, lambda a, b: (a["Z.top_ids"].shape[-1], b["Z.top_ids"].shape[-1]) == (2, 3)),
    "targets": ([" heads"], [" tails", 5], lambda a, b: (a["Z.targets"].shape[-1], b["Z.targets"].shape[-1]) == (1, 2)),
    "full": (
        False,
        True,
        lambda a, b: "Z.full" not in a and torch.equal(b["Z.full"].max(-1).values, a["Z.top_logprobs"][..., 0]),
    ),
    "positions": (
        "all",
        "last",
        lambda a, b: torch.equal(a["blocks.1.hook_in"][-1:], b["blocks.1.hook_in"]) and len(b["blocks.1.hook_in"]) == 1,
    ),
}
effects("rl.Engine.prompts", lambda **o: coin().prompts([HEADS], sites="SZ", **o)[0].activations, **CAPTURE)
effects("rl.Engine.prompt", lambda **o: grown(**o).activations, **CAPTURE)


def rejected(**given: Any) -> Any:
    """Drafts that a conversation keeps, of which one is not the next token."""
    held = talk(**given)
    held.generate(3, drafter="forced", drafts={held.branch.length: [[7, 8]]})
    return held.branch.rejected


def talk(**given: Any) -> Any:
    from tests.engine.serving.test_conversation import FIRST, byte_tokenizer

    template = "{{ tools or '' }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    config = dict(num_layers=2, d_model=40, num_heads=4, num_kv_heads=2, d_head=12, d_mlp=56, vocab_size=258, max_positions=512)
    from replaylens.engine.model.config import ModelConfig
    from tests.digests import model_of

    engine = rl.Engine(model_of(ModelConfig(**config)), byte_tokenizer(template))
    return rl.Conversation(engine, FIRST, **{"sites": "SZ", **given})


effects(
    "rl.Conversation", lambda **o: talk(**o).branch.activations, **{**CAPTURE, "targets": ([3], [4, 5], CAPTURE["targets"][2])}
)
effects("rl.Conversation", talk, tools=(None, [{"name": "add"}], lambda a, b: b.branch.length > a.branch.length))
effects(
    "rl.Conversation",
    rejected,
    keep_rejected=(False, True, lambda a, b: (len(a), len(b)) == (0, 1)),
)


def steered(**given: Any) -> Any:
    fixed: dict[str, Any] = dict(layers=[1], strengths=[1.0], n=2, metric=PAIR)
    return rl.steer(coin(), ([HEADS], [TAILS]), [HEADS], **{**fixed, **given})


effects(
    "rl.steer",
    steered,
    layers=(..., [2, 3], lambda a, b: (set(a.frame["layer"].dropna()), set(b.frame["layer"].dropna())) == ({1}, {2, 3})),
    strengths=(..., [1.0, 3.0], lambda a, b: len(b.frame) > len(a.frame)),
    sampling=(..., rl.Sampling(temperature=5.0, seed=3), differ),
    n=(..., 4, differ),
)
effects(
    "rl.path_patch",
    lambda **o: rl.path_patch(coin(), HEADS, TAILS, metric=PAIR, receivers=[(2, 0)], into="v", **o),
    direction=("denoise", "noise", differ),
)
effects("rl.attribution_graph", lambda **o: rl.attribution_graph(*graphed(), **o), metric=(PAIR, " tails", differ))


@cache
def graphed() -> Any:
    from tests.extras.test_graph import transcoder
    from tests.golden_calls import tiny

    sizes = ((80, 40, 12), (82, 12), (84, 12, 40), (86, 40))
    return (
        tiny(),
        HEADS,
        [transcoder([numbers(*sizes[0]) / 8, numbers(*sizes[1]) / 4, numbers(*sizes[2]) / 8, numbers(*sizes[3]) / 8], 0)],
    )


def sparse() -> Any:
    return _sparse("topk")


# ---- more of probes ---------------------------------------------------------------------------------------------------------


@cache
def framed() -> pd.DataFrame:
    x = numbers(60, 12, 2).double().numpy()
    plain: dict[str, Any] = {"x": list(x), "y": np.arange(12) % 2, "near": np.arange(12) // 4, "far": np.arange(12) // 6}
    return pd.DataFrame(
        plain
        | {"early": 3 - np.arange(12) % 4, "late": np.arange(12) % 4, "word": np.arange(12) % 5, "two": np.arange(12) // 2}
    )


def of_pandas(**given: Any) -> Any:
    return p.ProbeRows.of_pandas(framed(), "x", "y", **{"group": "near", **given}).frame


def of_dataset(**given: Any) -> Any:
    from datasets import Dataset

    return p.ProbeRows.of_dataset(Dataset.from_pandas(framed()), "x", "y", **{"group": "near", **given}).frame


def column(name: str, one: str, other: str) -> Values:
    """The frame's column has the numbers of the column that was named, or as many different ones."""

    def same(frame: pd.DataFrame, given: str) -> bool:
        if name == "position":
            return bool(frame[name].tolist() == framed()[given].tolist())
        found, wanted = pd.factorize(frame[name])[0].tolist(), pd.factorize(framed()[given])[0].tolist()
        return found == wanted

    return one, other, lambda a, b: same(a, one) and same(b, other) and not same(a, other)


for kind, call in {"of_pandas": of_pandas, "of_dataset": of_dataset}.items():
    effects(
        f"rl.probes.ProbeRows.{kind}",
        call,
        group=column("root", "near", "far"),
        position=column("position", "early", "late"),
        token=column("token", "word", "late"),
        key=column("key", "word", "late"),
        prompt=column("example", "two", "near"),
    )


def shown_lines(figure: Any) -> list[Any]:
    return [axis.get_title() for axis in figure.axes] + [line.get_label() for axis in figure.axes for line in axis.lines]


@cache
def two_labels() -> Any:
    return p.sweep(
        rows(), ["topic", "other"], layers=[0, 1], positions="all", estimators=["ridge", "mass-mean"], permutations=0
    )


@cache
def one_cell() -> Any:
    """The least report: its figures are drawn soonest."""
    return p.sweep(rows(), "topic", layers=[1], positions="all", estimators="ridge", permutations=0, controls=False)


for kind in ("curves", "heatmap"):
    effects(
        f"rl.probes.Report.{kind}",
        lambda kind=kind, **o: getattr(two_labels(), kind)(**{"label": "topic", "estimator": "ridge", **o}),
        label=("topic", "other", differ),
        estimator=(..., "mass-mean", differ),
    )


def streamed(**given: Any) -> Any:
    """Sums of the rows that were streamed."""
    fixed: dict[str, Any] = dict(position="all", sites="S", max_new=3)
    task = tasks.get("coin")(flips=(1, 3))
    moments = p.fit_streaming(coin(), task.examples(4), "face", ["heads", "tails"], **{**fixed, **given}).moments()
    return {str(cell): each for cell, each in moments.items()}


zero = rl.Edit("S", "zero", layers=[1])
effects(
    "rl.probes.fit_streaming",
    streamed,
    edits=(..., (zero,), differ),
    max_new=(1, ..., differ),
    sampling=(..., rl.Sampling(temperature=6.0), differ),
    seed=(1, 1, lambda a, b: told(a) == told(b)),
)
effects("rl.probes.fit_streaming", lambda **o: streamed(sampling=rl.Sampling(temperature=6.0), **o), seed=(..., 2, differ))


@cache
def probe_of(layer: int = 3) -> Any:
    return p.fit_probe(coin_run(), "face", layer=layer, position="query", estimator="mass-mean")


@cache
def others() -> Any:
    return tasks.get("coin")(flips=(1, 4)).examples(range(100, 106))


for kind in ("ablate", "interchange"):
    effects(
        f"rl.probes.{kind}",
        lambda kind=kind, **o: getattr(p, kind)(coin(), probe_of(), others(), **{"placebos": 2, **o}),
        position=(..., "step", differ),
        seed=(..., 2, differ),
    )


def placebos(kind: str) -> Callable[..., Any]:
    def call(untrained: int = 0) -> Any:
        given = {"untrained": p.placebo_probes(coin_run(), probe_of(), untrained)} if untrained else {}
        return getattr(p, kind)(coin(), probe_of(), others(), placebos=2, **given)

    return call


for kind in ("ablate", "interchange", "steer"):
    effects(f"rl.probes.{kind}", placebos(kind), untrained=(0, 2, lambda a, b: len(b.table) > len(a.table) or differ(a, b)))


def three_flips() -> Any:
    return tasks.get("coin")(flips=(3, 3)).examples(range(100, 104))


def reach(**given: Any) -> Any:
    fixed: dict[str, Any] = dict(label="face", layers=[3], placebos=1, site="S")
    return p.steering_reach(coin(), sites_run(), three_flips(), **{**fixed, **given})


effects(
    "rl.probes.steering_reach",
    reach,
    factor=(0.0, 2.0, differ),
    estimator=(..., "ridge", differ),
    layers=(..., [2], differ),
    site=(..., "C", differ),
    label=(..., "parity", differ),
    placebos=(..., 3, differ),
    seed=(..., 2, differ),
)


def chosen(**given: Any) -> np.ndarray:
    """Layer 3 of the untrained model, at the rows of a run."""
    return np.asarray(p.untrained_rows(small_run().renumbered(), coin(), ["S"], **given).matrix("S", 3))


effects("rl.probes.untrained_rows", chosen, seed=(1, 2, lambda a, b: a.shape == b.shape and not np.array_equal(a, b)))


@cache
def later_run() -> Any:
    return coin().replay(tasks.get("coin")(flips=(1, 3), seed=9).examples(range(200, 230)), sites="S")


def across(**given: Any) -> Any:
    joined = p.ProbeRows.join(a=small_run().at("query"), b=steps_rows().at("query"), c=p.ProbeRows.of(later_run()).at("query"))
    return p.transfer_across(joined, "face", **{"fit_on": "a", "test_on": "b", "layers": [3], "folds": 3, **given})


effects(
    "rl.probes.transfer_across",
    across,
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    estimator=(..., "lda", differ),
    layers=(..., [2], differ),
    fit_on=(..., "c", differ),
    test_on=(..., "c", differ),
    position=(..., "all", differ),
)


def lied(**given: Any) -> Any:
    task = tasks.get("coin")(flips=(2, 4), rendering="steps")
    return p.text_or_truth(coin(), task.examples(40), **{"layers": [3], "estimator": "ridge", **given})


effects(
    "rl.probes.text_or_truth",
    lied,
    estimator=(..., "mass-mean", differ),
    seed=(..., 2, differ),
    sites=("S", "C", differ),
    position=("step", "all", differ),
    layers=(..., [2], differ),
    lie_at=(1, 2, differ),
)


def found_direction(**given: Any) -> tuple[Any, dict[str, Any]]:
    """The probe, and what the search was given, over a stand-in for it."""

    asked: dict[str, Any] = {}

    def fit_das(bridge: Any, name: str, base: Any, source: Any, answers: Any, read: Any, **more: Any) -> Any:
        asked.update(more | {"name": name, "base": base, "source": source, "answers": answers})
        return SimpleNamespace(basis=torch.eye(128, more["rank"]))

    search = ModuleType("transformer_lens.tools.analysis.interchange")
    vars(search)["fit_das"] = fit_das
    names = ("transformer_lens", "transformer_lens.tools", "transformer_lens.tools.analysis")
    with patch.dict(sys.modules, {**{name: ModuleType(name) for name in names}, search.__name__: search}):
        bridge: Any = lambda tokens: numbers(5, *tokens.shape, coin().config.vocab_size)  # noqa: E731
        examples = tasks.get("coin")(flips=2, p=1.0).examples(8)
        return p.find_direction(coin(), bridge, examples, **{"label": "face", "layer": 2, **given}), asked


def passed(name: str, one: Any, other: Any) -> Values:
    return one, other, lambda a, b: (a[1][name], b[1][name]) == (one, other)


effects(
    "rl.probes.find_direction",
    found_direction,
    rank=passed("rank", 1, 3),
    epochs=passed("epochs", 2, 5),
    lr=passed("lr", 0.1, 0.5),
    seed=passed("seed", 1, 4),
    layer=(1, 2, lambda a, b: a[1]["name"].startswith("blocks.1.") and b[1]["name"].startswith("blocks.2.")),
    site=("S", "C", lambda a, b: a[1]["name"] != b[1]["name"]),
    label=("face", "name", lambda a, b: (a[0].label, b[0].label) == ("face", "name")),
    position=("query", "step:1", lambda a, b: (a[0].position, b[0].position) == ("query", "step:1")),
)


# ---- more of the engine -----------------------------------------------------------------------------------------------------


def hooked(**given: Any) -> Any:
    halved = [("blocks.1.hook_in", lambda x, hook: x * 0.5)]
    return coin().run_with_hooks(HEADS, fwd_hooks=halved, return_type="both", **given)


effects(
    "rl.Engine.run_with_hooks",
    hooked,
    loss_per_token=(False, True, lambda a, b: a[1].ndim == 0 and b[1].shape == (1, b[0].shape[1] - 1)),
)
effects(
    "rl.Engine.run_with_hooks",
    lambda **o: coin().run_with_hooks(HEADS, **o),
    stop_at_layer=(1, 2, lambda a, b: a.shape == b.shape and a.shape[-1] == 128 and not torch.equal(a, b)),
)
effects(
    "rl.Dump.where",
    lambda **o: len(dump().where(**o)),
    conditions=({"branch": 0}, {"example": 1}, lambda a, b: b < a == len(dump())),
)


def added(**details: Any) -> dict[str, Any]:
    trace = rl.Trace(coin().fingerprint)
    trace.add("e", **details)
    return dict(trace.events[-1])


effects(
    "rl.Trace.add",
    added,
    details=(
        {"branch": 1},
        {"tokens": [3]},
        lambda a, b: (a, b) == ({"event": "e", "branch": 1}, {"event": "e", "tokens": [3]}),
    ),
)
effects(
    "rl.Trace",
    lambda **o: rl.Trace(coin().fingerprint, **o),
    events=([], [{"event": "x"}], lambda a, b: (a.events, b.events) == ([], [{"event": "x"}])),
)
effects(
    "rl.SparseFeatures.generate",
    lambda **o: held(**o),
    ablate=([3], list(range(48)), differ),
    scale=({3: 1.0}, {i: 9.0 for i in range(48)}, differ),
)


def held(**given: Any) -> Any:
    branch = coin().prompt(HEADS, sites="S")
    made = sparse().generate(branch, 2, **given)
    return (made if made is not None else branch).logits()


def saved(**given: Any) -> Any:
    run = coin().replay(tasks.get("coin")(flips=(1, 2)).examples(2), sites="S")
    return run.save(Path(mkdtemp()) / "d", features={"sae": sparse()}, **given)


effects(
    "rl.Run.save", saved, keep=(2, 3, lambda a, b: (max(a.features("sae").counts), max(b.features("sae").counts)) == (2, 3))
)


effects(
    "rl.Dump.where",
    lambda predicate=None: len(dump().where(predicate)),
    predicate=(lambda f: f["position"] < 3, lambda f: f["position"] >= 0, lambda a, b: (a, b) == (3 * 5, len(dump()))),
)


def carried(**given: Any) -> dict[str, Any]:
    """The options with which a conversation makes its prompt."""

    asked: dict[str, Any] = {}

    def prompt(self: Any, tokens: list[int], **more: Any) -> Any:
        asked.update(more)
        return SimpleNamespace(tokens=tokens, length=len(tokens))

    with patch.object(rl.Engine, "prompt", prompt):
        talk(**given)
    return {key: str(each) for key, each in asked.items()}


carries = lambda a, b: set(a.values()) >= {"first"} and set(b.values()) >= {"second"}  # noqa: E731
unread = ("first", "second", carries)
effects("rl.Conversation", carried, hooks=unread, lens=unread, watch=unread, keep=unread)


def continued(**given: Any) -> list[list[int]]:
    branch = coin().prompt("A coin's state is heads.").force(" Alice flips. Bob flips. What's the state? A: heads.")
    return [each.tokens for each in branch.stream_rollouts(3, at=[9, 12], max_new=8, **given)]


effects("rl.Branch.stream_rollouts", continued, replace=(None, " Carol does not flip.", differ))


def scored(watch: bool = False) -> Any:
    engine = coin()
    given = {"watch": engine.watch({"face": probe_of()})} if watch else {}
    return engine.capture_spec("S", **given).scored


effects("rl.Engine.capture_spec", scored, watch=(False, True, lambda a, b: a == () and len(b) == 1))


def with_a_start(**given: Any) -> int:
    """Tokens of two bytes, with the token that begins texts."""
    engine = talk().engine
    return len(engine.run_with_hooks("ab", **given)[0])


effects("rl.Engine.run_with_hooks", with_a_start, prepend_bos=(False, True, lambda a, b: (a, b) == (2, 3)))


def of_results(**given: Any) -> Any:
    from replaylens.dumps.maker import plan_of_run

    run = coin_run()
    plan = plan_of_run(coin(), run[0].example.maker, [0], run.options)
    return p.ProbeRows.of_results(coin(), plan, run.results[:1], **given).frame["logprob"].dropna().nunique()


constant = lambda: (np.full(400, 0.25, dtype=np.float32),) * 2  # noqa: E731
effects("rl.probes.ProbeRows.of_results", of_results, probabilities=(None, constant, lambda a, b: b == 1 < a))


@cache
def sites_dump() -> Any:
    """Chains of thought with rejected drafts, S and C."""
    task = tasks.get("coin")(flips=(2, 4), rendering="steps", seed=2)
    return coin().replay(task.examples(30), sites="SCZ", drafter="ngram", window=4).save(Path(mkdtemp()) / "sites")


def stepped() -> Any:
    return steps_rows().at("step")


effects(
    "rl.probes.by_acceptance",
    lambda **o: (p.by_acceptance(stepped(), folds=3, **o), stepped().frame["accepted"].to_numpy(dtype=bool)),
    fit_on=("accepted", "rejected", lambda a, b: a[1][a[0].train.any(0)].all() and not b[1][b[0].train.any(0)].any()),
)


@cache
def sites_run() -> Any:
    return coin().replay(tasks.get("coin")(flips=(1, 4)).examples(30), sites="SC")


# ---- generating -----------------------------------------------------------------------------------------------------------


def by_branch(branch: Any, n: int, **given: Any) -> Any:
    return branch.generate(n, **given)


def by_engine(branch: Any, n: int, **given: Any) -> Any:
    return branch.engine.generate([branch], n, **given)[0]


def by_stream(branch: Any, n: int, **given: Any) -> Any:
    list(branch.stream(n, **given))
    return branch


def by_streams(branch: Any, n: int, **given: Any) -> Any:
    list(branch.engine.stream(branch, n, **given))
    return branch


HOT = rl.Sampling(temperature=50.0, seed=3)
WRONG = {15: [[7, 8]]}


def from_prompt(grow: Callable[..., Any]) -> Callable[..., Any]:
    def grown_by(n: int = 2, **given: Any) -> Any:
        branch = coin().prompt(HEADS, sites="S", keep_rejected=True)
        return grow(branch, n, **given)

    return grown_by


def pages(branch: Any) -> int:
    """Pages in use: a rejected branch that keeps its own takes one more."""
    return int(re.findall(r"(\d+) of \d+ KV pages", repr(branch.engine))[0])


for kind, grow in {
    "rl.Branch.generate": by_branch,
    "rl.Engine.generate": by_engine,
    "rl.Branch.stream": by_stream,
    "rl.Engine.stream": by_streams,
}.items():
    call = from_prompt(grow)
    effects(
        kind,
        call,
        sampling=(..., HOT, lambda a, b: a.generated != b.generated),
        drafter=(
            "model",
            "ngram",
            lambda a, b: (a.statistics.passes, a.statistics.drafted) != (b.statistics.passes, b.statistics.drafted),
        ),
        deterministic=(..., False, lambda a, b: (a.certified, b.certified) == (True, False)),
        final=(
            ...,
            True,
            lambda a, b: (
                (len(a.activations["blocks.1.hook_in"]), len(b.activations["blocks.1.hook_in"])) == (a.length - 1, b.length)
            ),
        ),
    )
    effects(
        kind,
        lambda call=call, **o: call(n=4, **{"drafter": "forced", "drafts": WRONG, **o}),
        drafts=(WRONG, {15: [[7]]}, lambda a, b: (a.statistics.drafted, b.statistics.drafted) == (2, 1)),
        keep_pages=(False, True, lambda a, b: pages(b) > pages(a)),
    )
    effects(
        kind,
        lambda call=call, **o: call(**{"drafter": "lens", **o}).statistics.drafted,
        window=(1, 4, lambda a, b: a == 0 < b),
    )


def talked(**given: Any) -> Any:
    held = talk(sites="S", keep_rejected=True)
    held.generate(3, **given)
    return held.branch


effects(
    "rl.Conversation.generate",
    talked,
    sampling=(..., HOT, lambda a, b: a.generated != b.generated),
    drafter=(
        "lens",
        "ngram",
        lambda a, b: a.statistics.drafted != b.statistics.drafted or a.statistics.passes != b.statistics.passes,
    ),
    deterministic=(..., False, lambda a, b: (a.certified, b.certified) == (True, False)),
)
effects(
    "rl.Conversation.fork",
    lambda **o: talk().fork(**{"at": 1, **o}).branch,
    at=(1, 2, lambda a, b: a.length < b.length),
    edits=(..., [rl.Edit("S", "zero", layers=[1])], lambda a, b: not torch.equal(a.logits(), b.logits())),
)
effects(
    "rl.Conversation",
    lambda **o: talk(**o).branch.logits(),
    edits=(..., [rl.Edit("S", "zero", layers=[1])], lambda a, b: not torch.equal(a, b)),
)
effects(
    "rl.Conversation.replay",
    lambda **o: talk().replay(1, "3?", **o).branch.logits(),
    edits=(..., [rl.Edit("S", "zero", layers=[1])], lambda a, b: not torch.equal(a, b)),
)
effects(
    "rl.Engine.prompt",
    lambda **o: grown(**o).logits(),
    edits=(..., [rl.Edit("S", "zero", layers=[1])], lambda a, b: not torch.equal(a, b)),
)
effects("rl.Branch.fork", lambda **o: coin().prompt(HEADS).fork(**o), n=(2, 3, lambda a, b: (len(a), len(b)) == (2, 3)))


# ---- commands -------------------------------------------------------------------------------------------------------------


def said(*words: str) -> str:

    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(words))
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def with_flags(*words: str) -> Callable[..., str]:
    """A value that is a bool is a flag without a value."""

    def call(**given: Any) -> str:
        more = [
            part
            for flag, value in given.items()
            for part in ([flag] if value is True else [] if value is False else [flag, str(value)])
        ]
        return said(*words, *more)

    return call


def dumped(**given: Any) -> Any:
    folder = mkdtemp() + "/d"
    with_flags("dump", "--out", folder, "--task", "coin", "--knob", "flips=2,4", "--knob", "rendering=steps", "--quiet")(
        **{"--n": 2, "--sites": "S", "--drafter": "ngram", "--window": 3, **given}
    )
    return rl.Dump.open(folder)


def flagged(name: str, call: Callable[..., Any], **given: Values) -> None:
    effects(f"$ {name}", call, **{f"--{flag.replace('_', '-')}": values for flag, values in given.items()})


flagged("tasks show", with_flags("tasks", "show", "coin"), n=(1, 3, lambda a, b: len(a) < len(b)))
flagged(
    "dump",
    dumped,
    n=(1, ..., lambda a, b: (a.index["example"].nunique(), b.index["example"].nunique()) == (1, 2)),
    sites=(
        ...,
        "TC",
        lambda a, b: (
            {each.rsplit(".", 1)[0] for each in a.sites}.isdisjoint({each.rsplit(".", 1)[0] for each in b.sites})
            or set(a.sites) != set(b.sites)
        ),
    ),
)


def unflagged(flag: str) -> Callable[..., Any]:
    """The command without `--no-flag`, and with it."""
    return lambda **o: dumped(**({} if o[f"--{flag}"] else {f"--no-{flag}": True}))


flagged(
    "dump", unflagged("rejected"), rejected=(True, False, lambda a, b: a.index["branch"].max() > 0 == b.index["branch"].max())
)
flagged(
    "dump",
    unflagged("probabilities"),
    probabilities=(True, False, lambda a, b: a.index["logprob"].notna().sum() > 0 == b.index["logprob"].notna().sum()),
)
flagged(
    "dump",
    lambda **o: dumped(**{"--temperature": 9.0, **o}),
    seed=(1, 2, lambda a, b: a.index["token"].tolist() != b.index["token"].tolist()),
)
flagged(
    "dump",
    dumped,
    model=(..., "coin-draft", lambda a, b: a.manifest.fingerprint.weights != b.manifest.fingerprint.weights),
)


# ---- results that are kept --------------------------------------------------------------------------------------------------


def stored(**given: Any) -> Any:
    run = coin().replay(tasks.get("coin")(flips=(1, 2)).examples(2), sites="S")
    return run.save(Path(mkdtemp()) / "d", **given)


effects(
    "rl.Run.save",
    stored,
    stored_dtype=(
        None,
        "bfloat16",
        lambda a, b: (a.to_torch("S", 1).dtype, b.to_torch("S", 1).dtype) == (torch.float32, torch.bfloat16),
    ),
    positions=("all", "last", lambda a, b: len(b) == 2 < len(a)),
    probabilities=(True, False, lambda a, b: a.index["logprob"].notna().any() and not b.index["logprob"].notna().any()),
)
effects(
    "rl.Dump.feed",
    lambda **o: [
        each["row"].tolist()
        for each in dump().feed("blocks.1.hook_in", **{"batch_size": 9, "epochs": 1, "drop_last": False, **o})
    ],
    batch_size=(7, 8, lambda a, b: (len(a[0]), len(b[0])) == (7, 8)),
    seed=(1, 2, lambda a, b: a != b and sorted(np.concatenate(a)) == sorted(np.concatenate(b))),
    drop_last=(False, True, lambda a, b: 0 < len(a[-1]) < 9 and {len(each) for each in b} == {9}),
)


def filtered(filters: dict[str, Any]) -> int:
    return len(rl.Dump(dump().files, filters=dump().where(**filters).filters))


effects("rl.Dump", filtered, filters=({}, {"example": 1}, lambda a, b: b < a))
effects(
    "rl.Sampling",
    lambda **o: rl.Sampling(**o).choose(np.array([0.0, 1.0, 0.9]), [1, 1], 1),
    presence_penalty=(0.0, 0.5, lambda a, b: (a, b) == (1, 2)),
)
effects(
    "rl.Sampling",
    lambda **o: rl.Sampling(**o).stop_tokens,
    stop_tokens=((3,), (4, 5), lambda a, b: (tuple(a), tuple(b)) == ((3,), (4, 5))),
)
effects(
    "rl.Engine.logits_under",
    lambda **o: coin().logits_under(HEADS, [[]], **o),
    tokens=([" heads"], [" tails", " heads"], lambda a, b: a.shape[-1] == 1 and torch.equal(a[..., 0], b[..., 1])),
)
effects(
    "rl.integrated_gradients",
    lambda **o: rl.integrated_gradients(coin(), HEADS, TAILS, PAIR, steps=2, **o).sites,
    site=("blocks.0.hook_in", "blocks.1.hook_in", lambda a, b: (a, b) == (("blocks.0.hook_in",), ("blocks.1.hook_in",))),
)
effects("rl.patch", lambda **o: rl.patch(coin(), HEADS, TAILS, layers=[1], positions=[4], **o), metric=(PAIR, " tails", differ))
effects(
    "rl.path_patch",
    lambda **o: rl.path_patch(coin(), HEADS, TAILS, receivers=[(2, 0)], into="v", **o),
    metric=(PAIR, " tails", differ),
)
effects(
    "rl.ablate",
    lambda **o: rl.ablate(coin(), [HEADS, TAILS], metric=[PAIR, PAIR[::-1]], heads=[(1, 3)], **o).ablated,
    positions=([-1], [4], lambda a, b: not torch.equal(a, b)),
)
effects(
    "rl.SparseFeatures.generate",
    lambda **o: held(**{"scale": dict.fromkeys(range(48), 9.0), **o}),
    positions=([2], [4], differ),
)


def read_back(**given: Any) -> list[int]:
    branch = coin().prompt(HEADS, sites="S")
    return list(sparse().generate(branch, 3, ablate=[3], **given).generated)


effects("rl.SparseFeatures.generate", read_back, sampling=(..., HOT, lambda a, b: a != b))
effects(
    "rl.Edit",
    lambda **o: coin().logits(HEADS, edits=[rl.Edit("S", "add", numbers(3, 128) * 5, layers=[1], positions=[4], **o)]),
    keep_norm=(False, True, lambda a, b: not torch.equal(a, b)),
)
effects(
    "rl.probes.ratio_over_groups",
    lambda **o: p.ratio_over_groups(np.abs(X)[None] / 3, np.abs(X) + 0.5, CODES // 3, least=-9.0, **o),
    folds=(1, 5, narrower),
)
effects("rl.Rollouts.settled", lambda **o: of_rollouts().settled(**o), alpha=(0.001, 0.9, differ))


@cache
def of_rollouts() -> Any:
    chain = coin().prompt("A coin's state is heads.").force(" Alice flips. Bob flips. What's the state? A: heads.")
    return chain.resample(12, at=[9, 12], max_new=8, answer=rl.Answer.regex("heads|tails"))


# ---- the rest ---------------------------------------------------------------------------------------------------------------

effects(
    "rl.Conversation.generate",
    lambda **o: generated(**{"drafter": "lens", **o}).statistics.drafted,
    window=(1, 4, lambda a, b: a == 0 < b),
)
effects("rl.Conversation.generate", lambda **o: generated(drafter="forced", **o), drafts=({13: [[7]]}, {13: [[7, 8]]}, differ))


def generated(**given: Any) -> Any:
    held = talk(sites="S", keep_rejected=True)
    if "drafts" in given:
        given["drafts"] = {held.branch.length: next(iter(given["drafts"].values()))}
    held.generate(4, **given)
    return held.branch


effects(
    "rl.Conversation.generate",
    lambda **o: pages(generated(drafter="forced", drafts={0: [[7, 8]]}, **o)),
    keep_pages=(False, True, lambda a, b: b > a),
)


def question(name: str, **fixed: Any) -> Callable[..., Any]:
    return lambda **o: getattr(p, name)(sites_dump(), **{**fixed, **o})


effects(
    "rl.probes.transfer",
    question("transfer", label="face", layers=[3], folds=3, estimator="ridge", sites="S"),
    layers=(..., [2], differ),
    estimator=(..., "lda", differ),
    label=(..., "parity", differ),
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    sites=(..., "C", lambda a, b: "S" in set(a.table["site"]) and set(b.table["site"].dropna()) == {"C"}),
)
effects(
    "rl.probes.judge",
    question("judge", draft_layer=2, layers=[2], folds=3, sites="S"),
    draft_layer=(..., 3, differ),
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    sites=(..., "C", differ),
)
effects(
    "rl.probes.outcome_at_fork",
    question("outcome_at_fork", layers=[3], folds=3, sites="S", position="step"),
    folds=(..., 4, differ),
    seed=(..., 2, differ),
    sites=(..., "C", differ),
    position=(..., "step:1", differ),
)
effects(
    "rl.probes.amnesic",
    lambda **o: p.amnesic(
        coin(), sites_run(), others(), **{"label": "face", "layers": [3], "erasers": "leace", "placebos": 1, "site": "S", **o}
    ),
    site=(..., "C", differ),
    position=("query", "step", differ),
    layers=(..., [2], differ),
    placebos=(..., 3, differ),
    label=(..., "parity", differ),
)
effects(
    "rl.probes.steer",
    lambda **o: p.steer(coin(), probe_of(), others(), **{"placebos": 1, **o}),
    placebos=(..., 3, differ),
    seed=(..., 2, differ),
    position=(..., "step", differ),
)
effects("rl.probes.ablate", lambda **o: p.ablate(coin(), probe_of(), others(), **o), placebos=(..., 3, differ))
effects(
    "rl.probes.fit_probe",
    lambda **o: p.fit_probe(rows(), **{"label": "topic", "layer": 1, "position": "all", "estimator": "ridge", **o}).weight,
    estimator=(..., "mass-mean", differ),
    position=(..., "1", differ),
)
effects(
    "rl.probes.fit_probe",
    lambda **o: p.fit_probe(rows(), "topic", layer=1, position="all", shuffled=True, **o).weight,
    seed=(..., 2, differ),
)
effects(
    "rl.probes.fit_streaming",
    streamed,
    position=("all", "query", differ),
    sites=("S", "C", lambda a, b: all(key[0] != other[0] for key in a for other in b) or set(a).isdisjoint(b)),
)
effects(
    "rl.probes.forced_rows",
    lambda **o: p.forced_rows(coin(), others(), [" heads."] * 6, **o).frame,
    more=(0, 2, lambda a, b: len(a) < len(b)),
)
effects(
    "rl.probes.forced_rows",
    lambda **o: p.forced_rows(coin(), others(), [" heads."] * 6, **o).source.sites(),
    sites=("S", "C", lambda a, b: (list(a), list(b)) == (["S"], ["C"])),
)
effects(
    "rl.probes.with_features",
    lambda **o: p.with_features(small_run(), sparse(), **o).matrix("features", None).shape[1],
    columns=([1], [1, 5], lambda a, b: (a, b) == (1, 2)),
)
effects(
    "rl.probes.ProbeRows.target",
    lambda **o: sized().target("size", **o).kind,
    kind=("class", "number", lambda a, b: (a, b) == ("class", "number")),
)
effects(
    "rl.probes.ProbeRows.of_arrays",
    lambda **o: (
        p.ProbeRows.of_arrays(np.zeros((6, 2)), {"y": np.arange(6) % 2}, groups=np.arange(6) // 3, **o)
        .frame["example"]
        .nunique()
    ),
    prompts=(np.arange(6) // 3, np.arange(6), lambda a, b: (a, b) == (2, 6)),
)
effects(
    "rl.probes.Report.best",
    lambda **o: two_labels().best("topic", **o)["estimator"],
    where=({"estimator": "ridge"}, {"estimator": "mass-mean"}, lambda a, b: (a, b) == ("ridge", "mass-mean")),
)
effects(
    "rl.probes.Report.save",
    lambda **o: len(list(one_cell().save(Path(mkdtemp()) / "r", **o).iterdir())),
    figures=(False, True, lambda a, b: a < b),
)


def sized() -> Any:
    return p.ProbeRows.of_arrays(np.zeros((6, 2)), {"size": np.arange(6) % 3}, groups=np.arange(6))


def swept(**given: Any) -> Any:
    fixed: dict[str, Any] = dict(layers=[1], positions="all", estimators="ridge", permutations=0, folds=3)
    return p.sweep(rows(), "topic", **{**fixed, **given})


effects(
    "rl.probes.sweep",
    swept,
    estimators=(
        "ridge",
        "mass-mean",
        lambda a, b: (set(a.table["estimator"]), set(b.table["estimator"])) == ({"ridge"}, {"mass-mean"}),
    ),
    permutations=(..., 39, differ),
)
effects(
    "rl.Engine.run_with_cache",
    lambda **o: sorted(coin().run_with_cache(HEADS, **o)[1].keys()),
    names_filter=(
        "blocks.1.hook_in",
        "blocks.2.hook_in",
        lambda a, b: "blocks.1.hook_in" in a and "blocks.1.hook_in" not in b and "blocks.2.hook_in" in b,
    ),
)
effects(
    "rl.Engine.run_with_cache",
    lambda **o: coin().run_with_cache(HEADS, names_filter="blocks.1.hook_in", return_type="loss", **o)[0],
    loss_per_token=(False, True, lambda a, b: (a.ndim, b.ndim) == (0, 2)),
)
effects(
    "rl.Engine.run_with_cache",
    lambda **o: talk().engine.run_with_cache("ab", names_filter="blocks.1.hook_in", **o)[0].shape[1],
    prepend_bos=(False, True, lambda a, b: (a, b) == (2, 3)),
)
effects(
    "rl.Engine.run_with_hooks",
    lambda **o: coin().run_with_hooks(HEADS, **o),
    return_type=("logits", "loss", lambda a, b: (a.ndim, b.ndim) == (3, 0)),
)
effects(
    "rl.Engine.prompts",
    lambda **o: coin().prompts([HEADS], **o)[0],
    hooks=((), [("blocks.1.hook_in", lambda x, hook: x * 0)], lambda a, b: (a.certified, b.certified) == (True, False)),
)
effects(
    "rl.Answer.function",
    lambda **o: rl.Answer.function(len, **o),
    stop=(False, True, lambda a, b: (a.stop, b.stop) == (False, True)),
)


# ---- captures, lenses and hooks ---------------------------------------------------------------------------------------------


@cache
def translated() -> Any:
    """A tuned lens that reads nothing of layer 1 but a bias towards one token."""
    from replaylens.engine.passes.lens import TunedLens, unembed_hash

    c = coin().config
    weight, bias = torch.zeros(c.num_layers, c.d_model, c.d_model), torch.zeros(c.num_layers, c.d_model)
    weight[1], bias[1] = -torch.eye(c.d_model), coin().model.embed[7].float()
    return TunedLens(weight, bias, unembed_hash(coin().model))


def given_late(**made: Callable[[], Any]) -> Callable[..., dict[str, Any]]:
    """Options that are not made before they are needed: True stands for them, False for none."""
    return lambda **o: {key: made[key]() if value is True and key in made else value for key, value in o.items() if value}


late = given_late(lens=translated, probes=lambda: [one_cell()], dump=lambda: dump())


def alike(z: torch.Tensor) -> bool:
    """Whether layer 1 reads all rows in one way."""
    return float((z[:, 1] - z[0, 1]).abs().max()) < 1e-6


effects(
    "rl.Engine.prompts",
    lambda **o: coin().prompts([HEADS], sites="Z", **late(**o))[0].activations["Z.entropy"],
    lens=(False, True, lambda a, b: alike(b) and not alike(a)),
)
effects(
    "rl.Engine.prompts",
    lambda **o: coin().prompts([HEADS], sites="S", **o)[0].generate(3, drafter="forced", drafts={15: [[7, 8]]}).rejected,
    keep_rejected=(False, True, lambda a, b: (len(a), len(b)) == (0, 1)),
)


def captured(sites: str = "Z") -> Callable[..., Any]:
    return lambda **o: coin().capture_spec(sites, **late(**o))


effects(
    "rl.Engine.capture_spec",
    captured(),
    full=(False, True, lambda a, b: (a.lens.full, b.lens.full) == (False, True)),
    lens=(False, True, lambda a, b: (a.lens.tuned, b.lens.tuned) == (None, translated().digest)),
    targets=([" heads"], [" tails", 5], lambda a, b: (len(a.lens.targets), b.lens.targets[1:]) == (1, (5,))),
    top_k=(2, 3, lambda a, b: (a.lens.top_k, b.lens.top_k) == (2, 3)),
)
effects(
    "rl.Engine.capture_spec",
    captured("S"),
    keep=("host", "device", lambda a, b: (a.keep, b.keep) == ("host", "device")),
    positions=(
        "all",
        "response[:32]",
        lambda a, b: (a.positions.part, a.positions.stop, b.positions.part, b.positions.stop) == ("all", None, "response", 32),
    ),
    rejected=(False, True, lambda a, b: (a.rejected, b.rejected) == (False, True)),
)


def hooks_around(fwd_hooks: Any) -> torch.Tensor:
    engine = coin()
    with engine.hooks(fwd_hooks=fwd_hooks):
        return torch.as_tensor(engine.run_with_cache(HEADS, names_filter="blocks.2.hook_in")[1]["blocks.2.hook_in"])


effects(
    "rl.Engine.hooks",
    hooks_around,
    fwd_hooks=(
        [("blocks.2.hook_in", lambda x, hook: x * 0)],
        [("blocks.2.hook_in", lambda x, hook: x * 0 + 3)],
        lambda a, b: not a.any() and bool((b == 3).all()),
    ),
)


def drafted_at(load: Callable[..., Any]) -> Callable[..., Any]:
    """Rejected drafts of the lens, on a text whose layers disagree."""
    return lambda **o: load(**o).prompt("A coin's state is").generate(12, drafter="lens", window=4).statistics.rejected


as_the_model_itself: Values = 1, 4, lambda a, b: a > 0 == b
"""the last layer drafts what the model says, so that nothing is rejected"""
effects(
    "rl.Engine",
    drafted_at(lambda **o: rl.Engine(coin().model, coin().text.tokenizer, cache_tokens=2048, **o)),
    lens_layer=as_the_model_itself,
)
effects("rl.Engine.load", drafted_at(coin), lens_layer=as_the_model_itself)


# ---- estimators and rows ----------------------------------------------------------------------------------------------------


def by_scikit_learn(a: Any, b: Any) -> bool:
    """Both are scikit-learn's classifiers at the C that was chosen, on standardised columns."""
    x, y = classes()
    z = (x - x.mean(0)) / x.std(0)
    logistic = LogisticRegression(C=a.C_, tol=1e-10, max_iter=5000).fit(z, y).coef_[0]
    ridge = Ridge(alpha=1 / b.C_).fit(z, 2.0 * y - 1).coef_
    angle = lambda u, v: float(u @ v / np.linalg.norm(u) / np.linalg.norm(v))  # noqa: E731
    same = lambda fit, one: angle(np.ravel(fit.coef_) * x.std(0), one) > 1 - 1e-6  # noqa: E731
    return same(a, logistic) and same(b, ridge) and not same(b, logistic)


effects("rl.probes.ChosenProbe", lambda **o: p.ChosenProbe(**o).fit(*classes()), kind=("logistic", "ridge", by_scikit_learn))


def first_erased(**given: Any) -> tuple[Any, Any]:
    """The classifier, fitted alone, and what one step of erasure leaves of its direction."""
    from sklearn.base import clone

    x, y = classes()
    x = x + 8 * y[:, None] * [1, 0.5, 0, 0, 0, 0, 0, 2]
    alone = clone(given.get("estimator") or RidgeClassifier()).fit(x, y)
    left = p.Inlp(iterations=1, **given).fit(x, y).transform(x)
    direction = np.ravel(alone.coef_)
    return direction, np.ptp(left @ direction) / np.ptp(x @ direction)


def erases_its_own(a: Any, b: Any) -> bool:
    return a[1] < 1e-6 and b[1] < 1e-6 and not np.allclose(a[0] / np.linalg.norm(a[0]), b[0] / np.linalg.norm(b[0]))


effects(
    "rl.probes.Inlp",
    first_erased,
    estimator=(RidgeClassifier(), LogisticRegression(C=0.01), erases_its_own),
)


def of_cache(**given: Any) -> Any:
    cache = {"blocks.0.hook_resid_pre": numbers(61, 6, 3, 4)}
    tokens = torch.arange(18).reshape(6, 3)
    return p.ProbeRows.of_cache(cache, tokens, {"y": np.arange(6) % 2}, **given).frame["root"].nunique()


effects("rl.probes.ProbeRows.of_cache", of_cache, groups=(np.arange(6) // 3, np.arange(6) // 2, lambda a, b: (a, b) == (2, 3)))
effects(
    "rl.probes.sweep",
    lambda **o: swept(permutations=0, **o),
    controls=(True, False, lambda a, b: bool(lines_of(a, "shuffled")) and not lines_of(b, "shuffled")),
)


def regressed(**given: Any) -> float:
    """How well a number is predicted that is one direction of the rows, and noise."""
    x = numbers(40, 120, 6).double().numpy()
    size = x @ np.arange(6) + numbers(41, 120).double().numpy()
    made = p.ProbeRows.of_arrays({("S", 1): x}, {"size": size}, groups=np.arange(120) // 3)
    return float(
        p.sweep(made, "size", estimators="ridge", permutations=0, folds=3, controls=False, **given).table["accuracy"][0]
    )


effects("rl.probes.sweep", regressed, precision=("double", "single", lambda a, b: 0 < abs(a - b) < 1e-5))


def of_branches(**given: Any) -> int:
    fixed: dict[str, Any] = dict(sites="S", layers=[3], positions="all", estimators="ridge", permutations=0, controls=False)
    return max(lines_of(p.sweep(steps_dump(), "face", **fixed, **given), "rows"))


def rejected_rows(a: int, b: int) -> bool:
    """As many more as rejected drafts have a label."""
    index = steps_dump().index
    return b - a == int((index["face"].notna() & ~index["accepted"]).sum()) > 0


effects("rl.probes.sweep", of_branches, branches=("accepted", "all", rejected_rows))


# ---- pages ------------------------------------------------------------------------------------------------------------------


def page(**given: Any) -> str:
    results = [p.outcome_curve(outcome_counts())]
    return rl.report(Path(mkdtemp()) / "page.html", **{"results": results, **late(**given)}).read_text()


effects(
    "rl.report",
    page,
    title=(..., "A title of its own", lambda a, b: "A title of its own" not in a and "A title of its own" in b),
    probes=(..., True, lambda a, b: "topic" not in a and "topic" in b),
    dump=(..., True, lambda a, b: 'class="rl-tree"' not in a and 'class="rl-tree"' in b),
)


def saved_twice(**given: Any) -> Any:
    """The dump that the second call returns; None where it refuses the folder."""
    from replaylens.engine.errors import FolderExists

    run, folder = coin().replay(tasks.get("coin")(flips=(1, 2)).examples(1), sites="S"), Path(mkdtemp()) / "d"
    made = run.save(folder)
    try:
        return made.digest == run.save(folder, **given).digest
    except FolderExists:
        return None


effects("rl.Run.save", saved_twice, resume=(False, True, lambda a, b: (a, b) == (None, True)))


def recurrent(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A state, and the captured rows of its site."""
    from tests.engine.reference import decoder

    branch = rl.Engine(decoder("mamba2"), cache_tokens=512).prompt(list(range(2, 12)), sites=["blocks.0.mixer.hook_state"])
    return branch.state(0, **given), branch.activations["blocks.0.mixer.hook_state"]


effects(
    "rl.Branch.state",
    recurrent,
    position=(3, 7, lambda a, b: torch.equal(a[0], a[1][3]) and torch.equal(b[0], b[1][7]) and not torch.equal(a[0], b[0])),
)


# ---- what commands pass on -------------------------------------------------------------------------------------------------


def status(*words: str) -> int:

    return CliRunner(env={"COLUMNS": "300"}).invoke(app, list(words)).exit_code


def flag_words(given: dict[str, Any]) -> list[str]:
    """A bool is a flag without a value, or `--no-flag`."""
    words = []
    for flag, value in given.items():
        words += [flag, str(value)] if not isinstance(value, bool) else [flag if value else f"--no-{flag[2:]}"]
    return words


def probed(**given: Any) -> Any:
    fixed: dict[str, Any] = {"--label": "face", "--estimators": "ridge", "--positions": "query", "--layers": "3"}
    fixed |= {"--permutations": "0", "--sites": "S", "--controls": False}
    out, save = mkdtemp() + "/report", p.Report.save
    with patch.object(p.Report, "save", lambda report, folder: save(report, folder, figures=False)):  # they take seconds
        said("probe", str(sites_dump().url), *flag_words({**fixed, "--out": out, **given}), "--quiet")
    return p.Report.load(out)


flagged(
    "probe",
    probed,
    sites=(..., "C", lambda a, b: ({*a.table["site"]}, {*b.table["site"]}) == ({"S"}, {"C"})),
    folds=(3, 4, lambda a, b: a.table["p"][0] != b.table["p"][0] and a.table["rows"][0] == b.table["rows"][0]),
    controls=(True, ..., lambda a, b: bool(lines_of(a, "shuffled")) and not lines_of(b, "shuffled")),
)


@cache
def damaged() -> str:
    """A dump of which one bit was changed, which no index tells."""
    from tests.dumps.damage import flip_bit

    made = coin().replay(tasks.get("coin")(flips=(1, 4)).examples(30), sites="S").save(Path(mkdtemp()) / "damaged")
    (shard,) = Path(made.url).rglob("*.safetensors")
    flip_bit(shard, -3)
    return str(made.url)


def on_damage(*words: str) -> Callable[..., int]:
    return lambda **o: status(words[0], damaged(), *words[1:], *flag_words(o))


read_in_spite: Values = True, False, lambda a, b: a != 0 == b
flagged(
    "probe",
    on_damage("probe", "--label", "face", "--estimators", "ridge", "--positions", "query", "--permutations", "0", "--quiet"),
    check=read_in_spite,
)
STEER = ("--label", "face", "--layer", "3", "--n", "4", "--placebos", "1")
flagged("steer", on_damage("steer", *STEER), check=read_in_spite)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


as_data: Values = False, True, lambda a, b: is_json(b) and not is_json(a)
flagged("steer", lambda **o: with_flags("steer", str(sites_dump().url), *STEER)(**o), json=as_data)


def of_nothing(**given: Any) -> str:
    """What is said of no promises: they take seconds to try."""

    with patch("replaylens.extend.check", return_value=[]):
        return with_flags("extend", "check", "ridge")(**given)


flagged("extend check", of_nothing, json=as_data)


def reported(**given: Any) -> str:
    page = mkdtemp() + "/page.html"
    with_flags("report", str(dump().url), "--out", page, "--verify", "0", "--quiet")(**given)
    return Path(page).read_text()


def trees_of(**given: Any) -> int:
    from tests.views.test_report import blocks_of

    return len(blocks_of(reported(**given)))


flagged("report", trees_of, trees=(1, 3, lambda a, b: (a, b) == (1, 3)))
flagged(
    "verify",
    lambda **o: status("verify", str(dump().url), "--quiet", *flag_words(o)),
    model=("coin-plain", "coin-draft", lambda a, b: a == 0 != b),
)
flagged(
    "verify",
    lambda **o: status("verify", str(dump().url), "--sample", "1", "--quiet", *(f for f, on in o.items() if on)),
    all=(False, True, lambda a, b: (a, b) == (0, 2)),
)


def is_written(*words: str) -> Callable[..., bool]:
    """Whether the files are in the folder that was named."""

    def call(**given: Any) -> bool:
        folder = Path(mkdtemp()) / given["--out"]
        said(*words, "--out", str(folder), "--quiet")
        return folder.is_dir() and any(folder.iterdir())

    return call


both: Values = "one", "other", lambda a, b: a and b
flagged("dump", is_written("dump", "--task", "coin", "--n", "1", "--sites", "S"), out=both)
flagged("resample", is_written("resample", "--prompt", HEADS, "--n", "2", "--max-new", "1"), out=both)


def passed_to(where: str, *words: str, exits: tuple[int, ...] = (0,)) -> Callable[..., Any]:
    """What a command gives to the function that does its work, which does nothing here."""

    def call(**given: Any) -> Any:

        with patch(where, return_value=[]) as work:
            assert (
                status(*words, *(part for f, v in given.items() for part in ([f] * bool(v) if v in (True, False) else [f, v])))
                in exits
            )
        return [*work.call_args.args, *work.call_args.kwargs.values()]

    return call


flagged(
    "tasks check",
    passed_to("replaylens.tasks.check", "tasks", "check", "coin"),
    n=("5", "7", lambda a, b: (a[1], b[1]) == (5, 7)),
    knob=("flips=2,4", "flips=1,6", lambda a, b: (a[0].knobs.flips, b[0].knobs.flips) == ((2, 4), (1, 6))),
)
flagged(
    "train",
    passed_to("replaylens.commands.training.train", "train", "coin-thinking"),
    out=("one", "other", lambda a, b: (a[1], b[1]) == (Path("one"), Path("other"))),
    steps=("3", "4", lambda a, b: (a[2], b[2]) == (3, 4)),
    longest=("5", "6", lambda a, b: (a[6].longest, b[6].longest) == (5, 6)),
)
flagged(
    "fetch",
    passed_to("replaylens.weights.hub.fetch", "fetch", "smollm2"),
    accept_terms=(False, True, lambda a, b: (a[2], b[2]) == (False, True)),
)


def demonstrated(**given: Any) -> list[Any]:
    """The number of stories that the demo replays, and the folder that it writes to; no further."""

    from replaylens.commands import demo
    from replaylens.engine.errors import BadRequest

    class Stories(list[int]):
        accuracy = acceptance = 1.0

        def save(self, folder: Path, **_: Any) -> None:
            seen.append(folder)
            raise BadRequest("That is enough.")

    seen = list[Any]()
    with (
        patch.object(demo, "_accuracy", lambda *_: 1.0),
        patch.object(demo, "_replay", lambda engine, n: seen.append(n) or Stories()),
    ):
        status("demo", *flag_words({"--out": mkdtemp(), **given}))
    return seen


flagged("demo", demonstrated, examples=(20, 30, lambda a, b: (a[0], b[0]) == (20, 30)))
flagged(
    "demo",
    lambda **o: demonstrated(**{key: f"{mkdtemp()}/{value}" for key, value in o.items()})[1].parent.name,
    out=("one", "other", lambda a, b: (a, b) == ("one", "other")),
)


# ---- tests ----------------------------------------------------------------------------------------------------------------


def made(name: str, option: str, value: Any) -> Any:
    """What the call gives with this value; `...` is for none."""
    call = EFFECTS[name, option][0]
    if value is ... and not ignores:
        return usual(call)
    kind = option in ("fields", "conditions", "details", "where")
    return call(**({} if value is ... else value if kind else {option: value}))


ignores = list[tuple[str, str]]()
"""the option that is ignored now"""


@cache
def usual(call: Callable[..., Any]) -> Any:
    """What a call gives without options: several are held against it."""
    return call()


def noticed(name: str, option: str, first: Any) -> bool:
    """Whether the prediction fails where the option is ignored: in the second call, or else in both.

    first: what the first call gave when nothing was ignored
    """
    one, other, as_it_should = EFFECTS[name, option][1]
    with ignored(name, option):
        ignores.append((name, option))
        try:
            second = made(name, option, other)
            return not as_it_should(first, second) or not as_it_should(made(name, option, one), second)
        except Exception as error:
            return not isinstance(error, NameError | ImportError)
        finally:
            ignores.clear()


LONG = {f"rl.probes.{name}" for name in (
    "steering_reach", "text_or_truth", "transfer", "transfer_across", "ablate", "judge", "amnesic", "interchange", "steer",
    "outcome_at_fork", "find_direction", "viable_branch", "untrained_rows", "AttentiveProbe", "Report.save", "by_acceptance",
    "CcsProbe", "fit_streaming", "outcome_probe", "ProbeRows.of_results", "sweep", "forced_rows", "sibling_divergence",
    "Report.curves", "forking_tokens", "with_features", "placebo_probes", "Report.heatmap", "complexity_curve",
    "counterfactual_importance", "importance", "resilience", "ChosenProbe",
)} | {
    "rl.attribution_graph", "rl.path_patch", "rl.patch", "rl.steer", "rl.report", "rl.Branch.state", "rl.Run.save", "rl.ablate",
    "rl.Branch.stream_rollouts", "rl.integrated_gradients", "rl.Engine", "rl.Engine.load", "rl.SparseFeatures.generate",
    "rl.Dump.statistics", "rl.Rollouts.settled", "$ probe", "$ dump", "$ steer", "$ report", "$ resample", "$ verify",
}  # fmt: skip
"""calls that take a third of a second"""


@pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair[0] in LONG else (), id=" ".join(pair)) for pair in EFFECTS],
)
def test_an_option_does_what_it_should(name: str, option: str) -> None:
    """And what is predicted does not hold where the option is ignored."""
    one, other, as_it_should = EFFECTS[name, option][1]
    first = made(name, option, one)
    assert as_it_should(first, made(name, option, other))
    assert noticed(name, option, first), "the prediction holds without the option too"


def test_no_option_is_missing() -> None:
    """Each is in one place: in the table above, among the tests that notice it, or among the reasons."""
    known, there = options.read(), {(name, option) for name, given in options.options().items() for option in given}
    named = {(name, option) for name, own in known.items() for option in own}
    for pair in there:
        assert pair in EFFECTS or pair in named or reason(*pair) is not None, f"{' '.join(pair)}: see tests.options"
    assert EFFECTS.keys() | named <= there and not EFFECTS.keys() & named
    unknown = [f"{name} {option}" for name, own in known.items() for option, test in own.items() if test is None]
    assert not unknown, f"no test notices {', '.join(unknown)}: write one"


def test_the_tests_of_options_are_there() -> None:
    """They exist and are not slow. Parsing all tests would take seconds: between two empty lines is one test."""
    named, there = {test for own in options.read().values() for test in own.values() if test}, set[str]()
    for file in {test.partition("::")[0] for test in named}:
        for block in (options.ROOT / file).read_text().split("\n\n\n"):
            marks, _, test = f"\n{block}".partition("\ndef test_")
            if test and "\n@pytest.mark.slow" not in marks:
                there.add(f"{file}::test_{test.partition('(')[0]}")
    assert named <= there and len(there) > 2 * len(named)


def test_what_is_ignored_is_noticed_and_the_detour_is_not() -> None:
    """Negative control of the way in which options are ignored."""
    noticed = {}
    for does in (True, False):
        with ignored("rl.Sampling", "seed", does):
            noticed[does] = rl.Sampling(seed=3).seed != 3
    assert noticed == {True: True, False: False}
