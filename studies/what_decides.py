"""Which sentence and which token decide the answer of a short chain of thought, and how many rollouts it takes to know.

200 questions with two steps each, half of arithmetic and half of tracking a ball under cups, answered by chains of two or
three sentences at temperature 0.7. Part `stopping` draws no text: it simulates the rule of `Race`, which the other parts use.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import replaylens as rl
from replaylens.engine.resampling.plan import Race, rollout_seed
from studies.common import COLOURS, QUIET, digest, inputs, legend, picture, share

PARTS = ("stopping", "tracking", "chains", "arithmetic")
MODEL = "smollm2"
SAMPLING = rl.Sampling(temperature=0.7, seed=1)
ROLLOUTS = {"arithmetic": 4, "tracking": 6}
"""of each question; as many as the machine had time for"""
TOGETHER = 25
"""questions in one batch"""
MAX_NEW = {"arithmetic": 20, "tracking": 12}
ALPHA = 0.05
CHAINS, AGAIN, TOKEN_CHAINS, READ_CHAINS = 12, 10, 2, 4
"""chains resampled at sentences, rollouts at each; chains forked at tokens; chains whose attention is read"""
KINDS = ("arithmetic", "tracking")
ANSWERS = {"arithmetic": rl.Answer.regex(r"So (\d+)"), "tracking": rl.Answer.regex(r"So (red|blue|green)")}
FORCED = rl.Answer.choices([" red", " blue", " green"], after=" So")
NAMES = ("Tom", "Eve", "Max", "Lea", "Jon", "Amy", "Sam", "Ida", "Ben", "Zoe")
THINGS = ("hats", "coins", "books", "eggs", "keys", "balls", "plums", "rings", "cards", "shells")
SHOTS = {
    "arithmetic": "Q: Ann has 3 pens. She gets 4 more, then 2 more. How many pens?\nA: 3 + 4 = 7. 7 + 2 = 9. So 9.\n"
    "Q: Bob has 9 cups. He loses 2, then gets 5 more. How many cups?\nA: 9 - 2 = 7. 7 + 5 = 12. So 12.\n",
    "tracking": "Q: The ball is in the red cup. Ann swaps red and blue. Bob swaps blue and green. Where is the ball?\n"
    "A: First blue. Then green. So green.\n"
    "Q: The ball is in the green cup. Kim swaps red and green. Ann swaps blue and green. Where is the ball?\n"
    "A: First red. Then red. So red.\n",
}


# ---- questions -------------------------------------------------------------------------------------------------------


def questions(kind: str, count: int) -> list[tuple[str, str]]:
    """Different prompts with their right answers."""
    random = np.random.default_rng([7, KINDS.index(kind)])
    made = arithmetic if kind == "arithmetic" else tracking
    found: dict[str, str] = {}
    while len(found) < count:
        text, answer = made(random)
        found.setdefault(f"{SHOTS[kind]}Q: {text}\nA:", answer)
    return list(found.items())


def arithmetic(random: np.random.Generator) -> tuple[str, str]:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    have, one, two = (int(random.integers(a, b)) for a, b in ((4, 10), (1, 4), (1, 7)))
    losing = bool(random.integers(2))
    step = f"loses {one}" if losing else f"gets {one} more"
    total = have - one + two if losing else have + one + two
    return f"{name} has {have} {thing}. {name} {step}, then gets {two} more. How many {thing}?", str(total)


def tracking(random: np.random.Generator) -> tuple[str, str]:
    cups = ["red", "blue", "green"]
    start = where = cups[random.integers(3)]
    said = ""
    for name in random.choice(NAMES, 2, replace=False):
        one, two = (cups[i] for i in sorted(random.choice(3, 2, replace=False)))
        said += f" {name} swaps {one} and {two}."
        where = two if where == one else one if where == two else where
    return f"The ball is in the {start} cup.{said} Where is the ball?", where


# ---- a model ---------------------------------------------------------------------------------------------------------


def run(quick: bool, part: str) -> dict[str, Any]:
    if part == "stopping":
        return simulate(200 if quick else 1000, 100)
    engine = rl.Engine.load(MODEL)
    if part in KINDS:
        asked = questions(part, 4 if quick else 100)
        return {"inputs": inputs(engine, questions=digest(text for text, _ in asked)), **outcomes(engine, part, asked)}
    asked = questions("tracking", 3 if quick else CHAINS)
    chains = [chain for prompt, _ in asked if (chain := written(engine, prompt)) is not None]
    few = chains[: 2 if quick else READ_CHAINS]
    return {
        "inputs": inputs(engine, questions=digest(text for text, _ in asked)),
        "temperature": SAMPLING.temperature,
        "sentences": sentences(chains, 4 if quick else AGAIN),
        "forced": forced(chains),
        "masking": masking(engine, few),
        "receivers": receivers(engine, few),
        "tokens": tokens(engine, chains[: 1 if quick else TOKEN_CHAINS], 4 if quick else 12),
    }


def outcomes(engine: rl.Engine, kind: str, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Rollouts of every question: how often right, what adaptive stopping saves, and whether the prompt's state tells."""
    n, layer = ROLLOUTS[kind], engine.config.num_layers // 2
    states, paths, drawn = rollouts(engine, kind, [prompt for prompt, _ in asked], f"blocks.{layer}.hook_in")
    right = [float(np.mean([each == answer for each in said])) for said, (_, answer) in zip(drawn, asked, strict=True)]
    sure, saved = [], []
    for said, (_, answer) in zip(drawn, asked, strict=True):
        race = Race(ALPHA)
        stopped = next((count for count, each in enumerate(said, 1) if race.add(each) is not None), n)
        saved.append(1 - stopped / n)
        sure.append((race.settled, answer))
    names = [each or "no answer" for said in drawn for each in said]
    known = sorted(set(names))
    counts = np.array([[sum((each or "no answer") == name for each in said) for name in known] for said in drawn])
    settled = [leader == answer for leader, answer in sure if leader is not None]
    made = {
        "questions": len(asked),
        "rollouts": n,
        "temperature": SAMPLING.temperature,
        "right": share(right, range(len(right))),
        "questions_always_right": int(sum(each == 1 for each in right)),
        "questions_never_right": int(sum(each == 0 for each in right)),
        "shares_right": right,
        "settled": len(settled),
        "settled_right": int(sum(settled)),
        "saved": share(saved, range(len(saved))),
        "saved_of_100": share([simulated_saving(said) for said in drawn], range(len(drawn))),
        "rollouts_digest": digest(names),
        "leader_share": [float(row.max() / row.sum()) for row in counts],
    }
    if len(asked) >= 20:
        few = _frequent(counts)
        probe = rl.probes.outcome_probe(
            {("S", layer): np.stack(states)}, few, np.arange(len(few)), tokens=paths, estimator="logistic"
        )
        made["probe"] = {"lines": probe.lines, "findings": list(probe.findings)}
    return made


def rollouts(
    engine: rl.Engine, kind: str, prompts: Sequence[str], site: str
) -> tuple[list[Any], list[Any], list[list[str | None]]]:
    """(the last row of each prompt, its tokens, the outcomes of its rollouts).

    The rollouts are those of `resample`, seed by seed, but of many prompts in one batch, which takes half of the time.
    """
    n, states, paths, drawn = ROLLOUTS[kind], [], [], []
    shared = engine.prompt(SHOTS[kind]).force("Q:")  # computed once; kept, so that its pages are found
    for first in range(0, len(prompts), TOGETHER):
        roots = engine.prompts(prompts[first : first + TOGETHER], sites=[site], positions="last")
        states += [root.activations[site][-1].double().numpy() for root in roots]
        paths += [np.array(root.tokens) for root in roots]
        forks = [fork for root in roots for fork in root.fork(n)]
        own = [
            seeded(number).derived(seed=rollout_seed(seeded(number).seed, root.length, count))
            for number, root in enumerate(roots, first)
            for count in range(n)
        ]
        texts = [fork.generated_text for fork in engine.generate(forks, MAX_NEW[kind], sampling=own)]
        said = [None if (found := ANSWERS[kind].read(text)) is None else found.outcome for text in texts]
        drawn += [said[at : at + n] for at in range(0, len(said), n)]
        for branch in (*forks, *roots):
            branch.release()
    shared.release()
    return states, paths, drawn


def seeded(number: int) -> rl.Sampling:
    """A seed of its own for each question: equal seeds at equal positions draw with the same noise, so that questions would
    not be independent."""
    return rl.Sampling(temperature=SAMPLING.temperature, seed=1000 + number)


def simulated_saving(said: Sequence[str | None], most: int = 100, runs: int = 20) -> float:
    """What the rule would save of `most` rollouts if the shares seen were the true ones."""
    draws = np.random.default_rng(5).integers(len(said), size=(runs, most))
    drawn = 0
    for row in draws:
        race = Race(ALPHA)
        drawn += next((at for at, each in enumerate(row, 1) if race.add(said[each]) is not None), most)
    return 1 - drawn / runs / most


def _frequent(counts: np.ndarray, most: int = 5) -> np.ndarray:
    """The most frequent outcomes, and the others together."""
    order = np.argsort(-counts.sum(0), kind="stable")
    rest = counts[:, order[most:]].sum(1, keepdims=True)
    return np.concatenate([counts[:, order[:most]], rest], 1) if rest.any() else counts[:, order[:most]]


def written(engine: rl.Engine, prompt: str) -> Any:
    """The model's own chain, greedily: the answer line of the prompt. None without a chain of two sentences or more."""
    root = engine.prompt(prompt)
    text = root.fork()[0].generate(MAX_NEW["tracking"]).generated_text.split("\n")[0]
    return root.force(text) if text.count(".") >= 2 else None


# ---- sentences -------------------------------------------------------------------------------------------------------


def sentences(chains: Sequence[Any], again: int) -> dict[str, Any]:
    """Resampling importance and resilience of every sentence, and change points of whole chains."""
    lines, shown, changed, back = [], 0, 0, []
    for number, chain in enumerate(chains):
        rollouts = chain.resample(
            again, at="sentences", sampling=seeded(number), max_new=MAX_NEW["tracking"], answer=ANSWERS["tracking"]
        )
        texts = rl.probes.RolloutTexts.of(rollouts)
        if len(rollouts.plan.positions) > 1:
            found = rl.probes.importance(rollouts.outcomes())
            shown += int(found.shown.any())
            frame = found.frame
            lines += [dict(chain=number, unit=i, importance=float(v)) for i, v in enumerate(frame["importance"])]
            changed += int(rl.probes.change_points(rollouts.outcomes()).shown)
        kept = rl.probes.resilience(texts).frame
        back += [dict(chain=number, unit=i, at_once=float(v)) for i, v in enumerate(kept["at_once"])]
    return {
        "chains": len(chains),
        "rollouts": again,
        "importance": by_unit(lines, "importance"),
        "resilience": by_unit(back, "at_once"),
        "chains_with_a_shown_sentence": shown,
        "chains_with_a_change_point": changed,
    }


def by_unit(lines: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    units = sorted({line["unit"] for line in lines})
    own = [[line for line in lines if line["unit"] == unit] for unit in units]
    return [share([line[name] for line in each], [line["chain"] for line in each]) for each in own]


def forced(chains: Sequence[Any]) -> dict[str, Any]:
    """How far each sentence moves the answer that is forced right after it: exact distributions, total variation."""
    moves: list[dict[str, Any]] = []
    for number, chain in enumerate(chains):
        starts = chain.resample(1, at="sentences", max_new=0, answer=FORCED).plan.positions
        at = [*starts[:3], starts[3] if len(starts) > 3 else chain.length]
        p = chain.resample(1, at=at, max_new=0, answer=FORCED).outcomes().probabilities
        moves += [dict(chain=number, unit=i, tv=float(0.5 * abs(b - a).sum())) for i, (a, b) in enumerate(pairwise(p))]
    return {"chains": len(chains), "moved": by_unit(moves, "tv")}


def masking(engine: rl.Engine, chains: Sequence[Any]) -> dict[str, Any]:
    """Loss of a sentence's tokens, in nats a token, when they cannot attend to an earlier one, in all layers."""
    lines: list[dict[str, Any]] = []
    for number, chain in enumerate(chains):
        starts = [*chain.resample(1, at="sentences", max_new=0, answer=FORCED).plan.positions, chain.length]
        spans = list(pairwise(starts))[:3]
        path = chain.tokens
        for j, (first, end) in enumerate(spans):
            rows = slice(first - 1, end - 1)
            plain = engine.logits(path, positions=rows).double().log_softmax(-1)
            for i, (a, b) in enumerate([(1, chain.root_length), *spans[:j]]):
                cut = rl.Edit(
                    "blocks.*.attn.hook_pattern",
                    "mask",
                    positions=slice(first - 1, end - 1),
                    keys=list(range(a, min(b, first - 1))),
                )
                without = engine.logits(path, positions=rows, edits=[cut]).double().log_softmax(-1)
                own = list(range(end - first)), path[first:end]
                lines.append(dict(chain=number, unit=(i, j), nats=float((plain[own] - without[own]).mean())))
    units = sorted({line["unit"] for line in lines})
    return {
        ("question" if i == 0 else f"sentence {i}") + f" to sentence {j + 1}": share(
            [line["nats"] for line in lines if line["unit"] == (i, j)],
            [line["chain"] for line in lines if line["unit"] == (i, j)],
        )
        for i, j in units
    }


def receivers(engine: rl.Engine, chains: Sequence[Any]) -> dict[str, Any]:
    """Receiver heads, as in Thought Anchors: the kurtosis over sentences of the attention that they get from tokens at least
    four sentences later, per head; and how well the heads of one half of the chains are those of the other."""
    from scipy.stats import kurtosis, pearsonr

    from replaylens.engine.resampling.plan import offsets_of, sentence_starts

    scores = []
    for chain in chains:
        path = chain.tokens
        starts = [*sentence_starts(*offsets_of(engine.text, path)), len(path)]
        pattern = rl.attention(engine, path).pattern.double().numpy()  # [layers, heads, queries, keys]
        got = [pattern[:, :, starts[i + 4] :, starts[i] : starts[i + 1]].mean((2, 3)) for i in range(1, len(starts) - 5)]
        scores.append(kurtosis(np.stack(got), axis=0).ravel())
    one, two = np.mean(scores[::2], 0), np.mean(scores[1::2], 0)
    mean = np.mean(scores, 0)
    heads = engine.config.num_heads
    top = [dict(layer=int(i // heads), head=int(i % heads), kurtosis=float(mean[i])) for i in np.argsort(-mean)[:8]]
    return {
        "chains": len(scores),
        "split_half_correlation": float(pearsonr(one, two)[0]),
        "top": top,
        "median": float(np.median(mean)),
    }


# ---- tokens ----------------------------------------------------------------------------------------------------------


def tokens(engine: rl.Engine, chains: Sequence[Any], n: int) -> dict[str, Any]:
    """Forking tokens of some chains: where the second likeliest token has a probability of 0.15 or more, the first four."""
    found, tried = [], 0
    for chain in chains:
        forks = []
        for position in range(chain.root_length, chain.length):
            chances = chain.logits(position - 1).double().softmax(-1)
            taken = chain.tokens[position]
            other = next(token for token in chances.topk(2).indices.tolist() if token != taken)
            if chances[other] < 0.15 or len(forks) == 4:
                continue
            counts = []
            for seed, token in enumerate((taken, other)):
                sampling = rl.Sampling(temperature=SAMPLING.temperature, seed=10 + seed)
                after = chain.resample(
                    n, at=position, replace=[token], sampling=sampling, max_new=12, answer=ANSWERS["tracking"]
                )
                counts.append([sum(each.outcome == name for each in after) for name in ("red", "blue", "green", None)])
            words = [engine.text.token(token) for token in (taken, other)]
            forks.append(rl.probes.TokenFork(position, words, chances[[taken, other]].numpy(), np.array(counts)))
        if forks:
            tried += len(forks)
            frame = rl.probes.forking_tokens(forks, threshold=0.2).alternatives
            found += frame.to_dict("records")
    return {"chains": len(chains), "rollouts": n, "tokens_tried": tried, "alternatives": found}


# ---- stopping --------------------------------------------------------------------------------------------------------

TRUTHS = {
    "tie but for 0.4 points": [0.502, 0.498],
    "60 : 40": [0.6, 0.4],
    "ten answers, nearly ties": [0.1018, *[0.0998] * 9],
    "40 : ten times 6": [0.4, *[0.06] * 10],
    "80 : 20": [0.8, 0.2],
    "95 : 5": [0.95, 0.05],
}


def simulate(runs: int, most: int) -> dict[str, Any]:
    """Errors of the rule under the worst stopping, which waits for an error, and of a plain test at the same level."""
    from scipy.stats import binom

    lines = {}
    for number, (name, truth) in enumerate(TRUTHS.items()):
        draws = np.random.default_rng([3, number]).choice(len(truth), size=(runs, most), p=truth)
        wrong, stopped = 0, []
        for row in draws:
            race = Race(ALPHA)
            stopped.append(next((at for at, each in enumerate(row, 1) if race.add(str(each)) is not None), most))
            wrong += race.settled not in (None, "0")
        plain = np.zeros(runs, dtype=bool)
        for other in range(1, len(truth)):
            own, rest = (draws == other).cumsum(1), (draws == 0).cumsum(1)
            plain |= ((binom.sf(own - 1, own + rest, 0.5) <= ALPHA) & (own + rest > 0)).any(1)
        drawn = np.array(stopped)
        lines[name] = {
            "errors": wrong / runs,
            "plain_test_errors": float(plain.mean()),
            "settled": float((drawn < most).mean()),
            "drawn": float(drawn.mean()),
            "saved": float(1 - drawn.mean() / most),
        }
    return {"inputs": {}, "runs": runs, "most": most, "alpha": ALPHA, "truths": lines}


# ---- figure ----------------------------------------------------------------------------------------------------------


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    made, axes = picture(3)
    left, middle, right = axes[0]
    for number, kind in enumerate(kind for kind in KINDS if kind in parts):
        values = np.sort(parts[kind]["shares_right"])
        left.plot(np.linspace(0, 1, len(values)), values, color=COLOURS[number], label=kind)
    if "chains" in parts:
        own = {"rollouts without and with it": parts["chains"]["sentences"]["importance"]}
        own["answer forced before and after it"] = parts["chains"]["forced"]["moved"]
        for number, (label, found) in enumerate(own.items()):
            y = np.array([each["value"] for each in found[:3]])
            ends = [y - [each["low"] for each in found[:3]], np.array([each["high"] for each in found[:3]]) - y]
            at = np.arange(1, len(y) + 1) + 0.06 * number
            middle.errorbar(at, y, ends, fmt="o-", color=COLOURS[number], label=label, markersize=3)
    left.set(title="Questions, by share of right rollouts", xlabel="question (rank)", ylabel="share right")
    middle.set(
        title="How far a sentence moves the answer", xlabel="sentence of the chain", ylabel="total variation", xticks=[1, 2, 3]
    )
    for axis in (left, middle):
        if axis.has_data():
            legend(axis)
    if "stopping" in parts:
        lines = parts["stopping"]["truths"]
        at = np.arange(len(lines))
        right.barh(
            at + 0.2, [each["plain_test_errors"] for each in lines.values()], 0.4, color=QUIET, label="plain test, every draw"
        )
        right.barh(at - 0.2, [each["errors"] for each in lines.values()], 0.4, color=COLOURS[0], label="settle=0.05")
        right.axvline(parts["stopping"]["alpha"], color=COLOURS[1], linewidth=1, label="allowed")
        right.set_yticks(at, list(lines))
        right.set(title="Wrong answer ever settled", xlabel="share of simulations")
        legend(right)
    return made
