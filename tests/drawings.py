"""Results with made-up numbers, drawn as users see them. Tests of figures read them; outdated notebooks are found by them.

`digests` names each kind of drawing by what is drawn. It changes with a word, a number, a colour or a style, not with the code.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from replaylens.engine.memory.tree import TokenState
from replaylens.features.rows import FeatureRows
from replaylens.gradients.attribution import Attribution
from replaylens.probes import report
from replaylens.probes.forks.change_points import ChangePoint, ChangePoints
from replaylens.probes.forks.distributions import Distances, OutcomeCurve
from replaylens.probes.forks.importance import Importance, Resilience
from replaylens.probes.forks.tokens import ForkingTokens, SiblingDivergence
from replaylens.probes.intervals import Estimate
from replaylens.rollouts.rollouts import Rollout, Rollouts
from replaylens.views.data import Check, DrawnPath, Fill, Frame, LensGuess, LensLayer, Phase, Slot, Token
from replaylens.views.pictures import Timeline, Tree
from replaylens.views.rollouts import RolloutTree
from replaylens.views.thoughts import DrawnChunk, DrawnRound, Thinking
from replaylens.workbench.ablate import AblateResult
from replaylens.workbench.attention import AttentionResult
from replaylens.workbench.lens import FeatureLine, LensResult
from replaylens.workbench.patch import PatchResult
from replaylens.workbench.routing import RoutedTokens, RoutingResult
from replaylens.workbench.steer import SteerResult

WORDS = (" The", " capital", " of", " $Fr$ance", " is", " incomprehensibility", "\u00a0")
SENTENCE = "So the state of the coin after all of these flips, which nobody has counted, is not known."


def numbers(*shape: int) -> torch.Tensor:
    """Different numbers from -1 to 1, the same on every machine."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) * 1.7 + len(shape)).sin().float().reshape(shape)


# ---- results --------------------------------------------------------------------------------------------------------------


def lens_result(token: str | None = None) -> LensResult:
    shape = (3, len(WORDS))
    logs = numbers(*shape, 2).abs().neg()
    top = tuple(tuple((word, " no") for word in WORDS) for _ in range(3))
    rank = torch.arange(21).reshape(shape) ** 3 * 6
    lines = (FeatureLine("blocks.1.hook_in", feature_rows()),)
    return LensResult(
        WORDS, ("S0", "S1", "output"), token, top, torch.zeros(*shape, 2, dtype=torch.int64), logs,
        numbers(*shape).abs(), numbers(*shape).abs() * 2, rank if token else rank.float(), numbers(*shape) * 3, lines,
    )  # fmt: skip


def feature_rows() -> FeatureRows:
    """Feature 4 is the strongest of all, then 1; feature 2 is the weakest."""
    dense = torch.zeros(len(WORDS), 6)
    dense[:, 2], dense[1, 4], dense[3, 1], dense[3, 2] = 0.1, 9.0, 5.0, 0.2
    rows = FeatureRows.of_dense([dense], 6)
    return FeatureRows(rows.offsets, rows.indices, rows.values, 6, tuple(range(len(WORDS))), WORDS)


def patch_result() -> PatchResult:
    raw = {"S": numbers(2, len(WORDS)) + 2, "heads": numbers(2, 4) + 2}
    columns = {"S": WORDS, "heads": tuple("0123")}
    places = {"S": tuple(range(len(WORDS))), "heads": (0, 1, 2, 3)}
    return PatchResult(
        "logit difference of ' Paris' and ' Rome'", "denoising", 2.0, 4.0, raw, columns, places, {"S": (0, 1), "heads": (0, 1)}
    )


def ablate_result(kind: str) -> AblateResult:
    where = tuple((kind, i // 2, i % 2) for i in range(4))
    return AblateResult(
        "logit difference", "zero", tuple(f"L{l}{kind}{n}" for _, l, n in where), where, numbers(3), numbers(4, 3) * 2
    )


def steer_result() -> SteerResult:
    lines = [("a", math.nan, 0.0, " x", 2.0, 0.0), ("b", math.nan, 0.0, " x", 8.0, 0.0)]
    lines += [(p, float(l), s, " y", v, e) for l in (1, 3) for p, s, v, e in (("a", 2.0, 4.0, 0.5), ("b", 2.0, 100.0, 1.5))]
    frame = pd.DataFrame(lines, columns=["prompt", "layer", "strength", "text", "perplexity", "effect"])
    return SteerResult(frame, {1: torch.ones(4), 3: torch.ones(4)})


def attention_result() -> AttentionResult:
    pattern = torch.tril(numbers(2, 3, len(WORDS), len(WORDS)).abs() + 0.01)
    return AttentionResult(WORDS, (1, 5), pattern / pattern.sum(-1, keepdim=True), (3, 1, 4, 1, 5, 1, 2))


def routing_result() -> RoutingResult:
    chosen = torch.tensor([[[0, 2], [1, 2], [2, 3]], [[0, 1], [0, 3], [0, 2]]])
    weights = torch.tensor([[[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]], [[0.9, 0.1], [0.7, 0.3], [0.3, 0.7]]])
    return RoutingResult(
        (0, 2), 4, RoutedTokens(0, WORDS[:3], chosen, weights), (RoutedTokens(2, WORDS[3:4], chosen[:, :1], weights[:, :1]),)
    )


def attribution(heads: int = 0) -> Attribution:
    shape = (2, len(WORDS), heads) if heads else (2, len(WORDS))
    kind = "attn.o.hook_in" if heads else "hook_in"
    return Attribution(
        1.0, 2.0, tuple(f"blocks.{i}.{kind}" for i in range(2)), WORDS, numbers(*shape), numbers(*shape) * 4, True
    )


def rollouts() -> Rollouts:
    outcomes = ["tails", "tails", None, "heads", "heads", "heads", "heads", None, "heads"]
    plan: Any = SimpleNamespace(n=3, positions=(4, 9, 15), texts=(SENTENCE, " Bob $waits$.", ""), answer=None, sites=())
    made = [Rollout(plan.positions[i // 3], i % 3, i, (), "", outcome, "answer") for i, outcome in enumerate(outcomes)]
    return Rollouts(plan, tuple(made))


TEXTS = [SENTENCE, " Two.", " Three."]
LOW, MIDDLE, HIGH = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4, 0.5]), np.array([0.3, 0.5, 0.9])


def curve_result() -> OutcomeCurve:
    names, value = ["tails", "no answer"], np.stack([MIDDLE, 1 - MIDDLE], 1)
    return OutcomeCurve([4, 9, 15], TEXTS, names, np.array([9, 9, 9]), value, value - 0.1, value + 0.05, LOW, 0.95, False)


def change_result() -> ChangePoints:
    return ChangePoints([4, 9, 15], TEXTS, MIDDLE, np.array([0.2, 0.8]), (ChangePoint(1, 1, 2, 9, SENTENCE, 0.7, 0.4),), 0.95)


def fork_result() -> ForkingTokens:
    alternatives = pd.DataFrame(
        {"position": [1], "token": [" x"], "weight": [0.5], "tv": [0.9], "low": [0.5], "high": [1.0], "forks": [True]}
    )
    return ForkingTokens(
        [0, 1, 2], ["a", "b", "c"], alternatives, np.array([0.0, 0.5, 0.0]), np.array([0.1, 0.6, 0.2]), 0.2, 0.95
    )


SURE = np.ones(3, dtype=bool)


def importance_result() -> Importance:
    found = Distances(MIDDLE, MIDDLE, LOW, HIGH, np.array([0.001, 0.5, 0.001]), np.zeros((3, 20)))
    counts = np.ones((3, 2), dtype=np.int64)
    return Importance("resampling", "tv", [4, 9, 15], TEXTS, found, np.array([0.001, 0.9, 0.001]), SURE, counts, counts, 0.95)


def resilience_result() -> Resilience:
    return Resilience([4, 9, 15], TEXTS, np.array([9, 9, 9]), LOW, MIDDLE, LOW, HIGH, np.array([0.1, 0.15, 0.2]))


def sibling_result() -> SiblingDivergence:
    each = [Estimate(*ends) for ends in zip(MIDDLE, LOW, HIGH, strict=True)]
    return SiblingDivergence([1, 2, 3], each, each[::-1], LOW, LOW, [3, 3, 3])


def sweep_table() -> pd.DataFrame:
    lines = [
        {"label": "face", "estimator": "logistic", "site": site, "layer": layer, "position": at, "metric": "balanced accuracy",
         "accuracy": 0.5 + 0.1 * layer + 0.05 * (site == "S"), "low": 0.4, "high": 0.9, "p_family": 0.01 if layer == 2 else 0.5,
         "majority": 0.5, "bag_of_tokens": (0.3, 0.7, 0.35)[layer], "known_zero": False}
        for site in "ST" for layer in range(3) for at in ("a long name of a position", "query")
    ]  # fmt: skip
    return pd.DataFrame(lines)


def curve_table() -> pd.DataFrame:
    scores = {"accuracy": [0.6, 0.8], "low": [0.5, 0.7], "high": [0.7, 0.9], "train": [0.7, 0.9], "majority": [0.5, 0.5]}
    return pd.DataFrame({"C": [0.01, 1.0], "complexity": [0.2, 0.6], "pareto": [True, True], **scores})


def bar_table() -> pd.DataFrame:
    return pd.DataFrame({"what": [SENTENCE, "b"], "accuracy": [0.6, 0.8], "low": [0.5, 0.7], "high": [0.7, 0.95]})


FIGURES: dict[str, Callable[[], Figure]] = {
    **{f"lens {measure}": lambda measure=measure: lens_result(" Paris").plot(measure)  # type: ignore[misc]
       for measure in ("probability", "entropy", "kl", "rank", "logprob", "features")},
    "patch": lambda: patch_result().plot(),
    "patch raw": lambda: patch_result().plot("raw"),
    "ablate heads": lambda: ablate_result("head").plot(),
    "ablate neurons": lambda: ablate_result("neuron").plot(),
    "steer": lambda: steer_result().plot(),
    "attention": lambda: attention_result().plot(),
    "attention layer": lambda: attention_result().plot(5),
    "attention head": lambda: attention_result().plot(5, 1, first=False),
    "routing": lambda: routing_result().plot(),
    "routing load": lambda: routing_result().plot_load(),
    "attribution": lambda: attribution().plot(),
    "attribution heads": lambda: attribution(3).plot(),
    "features": lambda: feature_rows().plot(),
    "rollouts": lambda: rollouts().plot(),
    "curve": lambda: curve_result().plot(),
    "changes": lambda: change_result().plot(),
    "forking tokens": lambda: fork_result().plot(),
    "importance": lambda: importance_result().plot(),
    "resilience": lambda: resilience_result().plot(),
    "siblings": lambda: sibling_result().plot(),
    "sweep heatmap": lambda: report.heatmap(sweep_table()),
    "sweep curves": lambda: report.curves(sweep_table()),
    "complexity": lambda: report.complexity(curve_table(), "complexity_curve"),
    "bars": lambda: report.bars(bar_table(), "bars"),
}  # fmt: skip


# ---- views ----------------------------------------------------------------------------------------------------------------


def tree() -> Tree:
    """Every kind of token, and a branch of a branch."""
    lens = (LensLayer("S0", (LensGuess(" heads", 0.5), LensGuess(" tails", 0.25))),)
    states = [TokenState.PROMPT] * 3 + [TokenState.ACCEPTED] * 22 + [TokenState.PENDING]
    trunk = tuple(Token(f" token{i}", i, state, -0.5, 0.25, lens, (("face", "heads"),)) for i, state in enumerate(states))
    why = Token(" fast", 6, TokenState.ACCEPTED, why="It was not verified.")
    forks = (
        DrawnPath(1, 0, 5, "rejected", (Token(" no", 5, TokenState.REJECTED), why)),
        DrawnPath(2, 1, 6, "open", (Token(" d", 6, TokenState.DRAFT),)),
    )
    return Tree((DrawnPath(0, None, 0, "open", trunk), *forks), "a tree")


def timeline() -> Timeline:
    accepted, draft, no = (
        Slot(" a", TokenState.ACCEPTED, 0),
        Slot(" b", TokenState.DRAFT, 1, True),
        Slot(" c", TokenState.REJECTED, 2, True),
    )
    said = Slot(" b", TokenState.ACCEPTED, 1), Slot(" x", TokenState.PENDING, 2)
    frames = [
        Frame(Phase.PREFILL, "6 prompt tokens", Fill(6), (accepted,), others=3, ordinary=1, ended=1),
        Frame(Phase.DECODE, "2 tokens drafted", Fill(6, 0, 3), (accepted, draft, draft), siblings=((no,),)),
        Frame(Phase.VERIFY, "one pass", Fill(6, 0, 3), (accepted, draft, no), (Check(draft, said[0]), Check(no, said[1]))),
        Frame(Phase.ORDINARY, "fast", Fill(6, 2, 0, 1), (accepted, Slot(" o", TokenState.ACCEPTED, 1, why="not verified"))),
    ]
    return Timeline(tuple(frames), "a timeline")


def thinking() -> Thinking:
    chunks = (DrawnChunk((" Alice", " flips"), (" tails", "<EOS>"), 0.0, ("chunk 0",)), DrawnChunk((" A:",), ("<EOS>",), 4.0))
    return Thinking(chunks, (DrawnRound(0, 1, 2, (chunks[1],)),), layers=(1, 3))


def rollout_tree() -> RolloutTree:
    units = ((" One.", " heads"), (" Two.", " tails"), (" One.", " tails"), ())
    return RolloutTree((" One.", " Two."), ("heads", "no answer"), (0, 0, 1, 1), units, (0, 1, 0, 0), "a title", "A prompt.")


VIEWS: dict[str, Callable[[], list[Any]]] = {
    "rl-tree": lambda: [tree()],
    "rl-timeline": lambda: [timeline()],
    "rl-thinking": lambda: [thinking()],
    "rl-rollouts": lambda: [rollout_tree()],
    "rl-attention": lambda: [attention_result()],
    "rl-figure": lambda: [
        lens_result(),
        patch_result(),
        ablate_result("head"),
        ablate_result("neuron"),
        steer_result(),
        routing_result(),
    ],
}
"""class of the element in a page -> views that have it"""


# ---- digests --------------------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """Kind of drawing -> digest of its samples. Kinds are classes of elements, or the type of a figure."""
    made = {kind: _digest([_PACKED.sub("", view._repr_html_()) for view in make()]) for kind, make in VIEWS.items()}
    return made | {"image/png": _digest([described(make()) for make in FIGURES.values()])}


_PACKED = re.compile(r'<script type="text/plain".*?</script>', re.S)
"""compressed data, whose bytes depend on the version of zlib"""


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def described(figure: Figure) -> list[Any]:
    """What a figure shows, without places on the page, which depend on versions of matplotlib."""
    found: list[Any] = [figure.get_size_inches().round(2).tolist(), to_hex(figure.get_facecolor())]
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axis in figure.axes:
        labels = [*axis.get_xticklabels(), *axis.get_yticklabels(), axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
        texts += [*labels, *(axis.get_legend().get_texts() if axis.get_legend() else [])]
        found.append([axis.get_xscale(), axis.get_yscale()])
        found += [
            [_rounded(line.get_xydata()), line.get_marker(), line.get_linestyle(), str(line.get_color())] for line in axis.lines
        ]
        found += [
            [_rounded(patch.get_extents().transformed(axis.transData.inverted()).bounds), to_hex(patch.get_facecolor())]
            for patch in axis.patches
        ]
        for each in [*axis.collections, *axis.images]:
            found.append(
                [type(each).__name__, _rounded(each.get_array()), each.get_cmap().name if each.get_array() is not None else ""]
            )
            found.append([type(each.norm).__name__ if each.get_array() is not None else ""])
    return found + [[text.get_text(), text.get_fontsize(), text.get_rotation(), str(text.get_color())] for text in texts]


def _rounded(numbers: Any) -> list[Any]:
    if numbers is None:
        return []
    flat = np.ma.filled(np.ma.asarray(numbers, dtype=float), np.nan).ravel()
    return [f"{x:.4g}" for x in flat]
