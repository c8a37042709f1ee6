"""Which sentence and which token decide the answer of a short chain of thought, and how many rollouts it takes to know.

Questions of arithmetic and of tracking a ball under cups, answered by chains of one sentence per step and one that states the
answer, at temperature 0.7: two steps for SmolLM2, four for Qwen2.5-Coder-1.5B. Part `stopping` draws no text: it simulates the
rule of `Race`, which the other parts use.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import replaylens as rl
from bench.studies.common import COLOURS, QUIET, Place, digest, inputs, legend, paired, picture, share
from replaylens.rollouts.plan import Race, rollout_seed

SAMPLING = rl.Sampling(temperature=0.7, seed=1)
TOGETHER = 25
"""questions in one batch"""
ALPHA = 0.05
KINDS = ("arithmetic", "tracking")


@dataclass(frozen=True)
class Setting:
    """One model on one kind of question."""

    model: str
    kind: str
    ask: str
    """outcomes: many rollouts of many questions; chains: which sentence and token decides; masking: which sentence others must
    see; heads: who attends to sentences"""
    count: int
    """questions"""
    rollouts: int
    """of each question, or before each sentence of each chain"""
    max_new: int
    steps: int = 2
    cache: int = 8192
    """tokens in the engine's cache"""
    forked: int = 2
    """chains whose tokens are forked"""
    read: int = 4
    """chains whose attention is cut or read"""


def _qwen(kind: str, ask: str, count: int, rollouts: int) -> Setting:
    return Setting("qwen", kind, ask, count, rollouts, 72 if kind == "arithmetic" else 40, 4, 1 << 17, 12, 20)


SETTINGS = {
    "tracking": Setting("smollm2", "tracking", "outcomes", 100, 6, 12),
    "chains": Setting("smollm2", "tracking", "chains", 12, 10, 12),
    "arithmetic": Setting("smollm2", "arithmetic", "outcomes", 60, 4, 28),
    **{f"qwen, {kind}": _qwen(kind, "outcomes", 200, 40) for kind in KINDS},
    "masking": Setting("smollm2", "tracking", "masking", 12, 0, 12, read=12),
    **{f"qwen, {kind} chains": _qwen(kind, "chains", 40, 30) for kind in KINDS},
    **{f"qwen, {kind} masking": replace(_qwen(kind, "masking", 40, 0), read=40) for kind in KINDS},
    "qwen, heads": _qwen("tracking", "heads", 8, 0),
}
"""by part; rollouts of SmolLM2 are as many as one CPU thread had time for, and `heads` needs a CPU, where patterns are kept"""
PARTS = ("stopping", *SETTINGS)
ANSWERS = {"arithmetic": rl.Answer.regex(r"So (\d+)"), "tracking": rl.Answer.regex(r"So (red|blue|green)")}
FORCED = {
    "arithmetic": rl.Answer.choices([*"0123456789"], after=" So "),  # the first digit
    "tracking": rl.Answer.choices([" red", " blue", " green"], after=" So"),
}
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


def questions(kind: str, count: int, steps: int = 2) -> list[tuple[str, str]]:
    """Different prompts with their right answers, each after two solved ones."""
    random = np.random.default_rng([7, KINDS.index(kind)] + ([] if steps == 2 else [steps]))
    shots = SHOTS[kind]
    if steps != 2:  # solved ones with different answers, and both with losses
        drawn = [longer(kind, random, steps) for _ in range(50)]
        first, *others = (each for each in drawn if kind == "tracking" or each[0].count("loses") > 1)
        second = next(each for each in others if each[2] != first[2])
        shots = "".join(f"Q: {text}\nA:{chain}\n" for text, chain, _ in (first, second))
    found: dict[str, str] = {}
    while len(found) < count:
        if steps != 2:
            text, _, answer = longer(kind, random, steps)
        else:
            text, answer = arithmetic(random) if kind == "arithmetic" else tracking(random)
        found.setdefault(f"{shots}Q: {text}\nA:", answer)
    return list(found.items())


def longer(kind: str, random: np.random.Generator, steps: int) -> tuple[str, str, str]:
    """A question of any number of steps, its chain of thought and its answer. Numbers have two digits, mostly."""
    said, chain = [], ""
    if kind == "arithmetic":
        name, thing = random.choice(NAMES), random.choice(THINGS)
        have = total = int(random.integers(10, 60))
        for _ in range(steps):
            change = int(random.integers(3, 60))
            losing = bool(random.integers(2)) and change < total
            said.append(f"loses {change}" if losing else f"gets {change} more")
            after = total - change if losing else total + change
            chain += f" {total} {'-' if losing else '+'} {change} = {after}."
            total = after
        text = f"{name} has {have} {thing}. {name} {', then '.join(said)}. How many {thing}?"
        return text, f"{chain} So {total}.", str(total)
    cups = ["red", "blue", "green"]
    start = where = cups[random.integers(3)]
    for name in random.choice(NAMES, steps, replace=False):
        one, two = (cups[i] for i in sorted(random.choice(3, 2, replace=False)))
        said.append(f" {name} swaps {one} and {two}.")
        where = two if where == one else one if where == two else where
        chain += f" Swap {one} and {two}: {where}."  # without the swap, Qwen does not track at all
    return f"The ball is in the {start} cup.{''.join(said)} Where is the ball?", f"{chain} So {where}.", where


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


def run(quick: bool, part: str, place: Place) -> dict[str, Any]:
    if part == "stopping":
        return simulate(200 if quick else 1000, 100)
    setting = SETTINGS[part]
    if quick:
        setting = replace(setting, count=3, rollouts=4, forked=1, read=2)
    engine = place.load(setting.model, cache_tokens=setting.cache)
    asked = questions(setting.kind, setting.count, setting.steps)
    check_room(asked[0][0], setting, lambda text: len(engine.text.encode(text, special=False)))
    known = {"inputs": inputs(engine, questions=digest(text for text, _ in asked)), "temperature": SAMPLING.temperature}
    if setting.ask == "outcomes":
        return known | outcomes(engine, setting, asked)
    chains = [chain for prompt, answer in asked if (chain := Chain.written(engine, setting, prompt, answer)) is not None]
    few, right = chains[: setting.read], [chain.right for chain in chains]
    if setting.ask == "masking":
        return known | {"steps": setting.steps, "masking": masking(engine, few)}
    heads = {"receivers": receivers(engine, few)} if place.device == "cpu" else {}
    if setting.ask == "heads":
        return known | heads
    return known | {
        "steps": setting.steps,
        "right": share(right, range(len(right))),
        "sentences": sentences(chains, setting),
        "forced": forced(chains, setting),
        "tokens": tokens(engine, chains[: setting.forked], setting),
        **heads,
    }


def check_room(prompt: str, setting: Setting, length: Callable[[str], int]) -> None:
    """ValueError if a chain like the prompt's solved ones would be cut off before its answer; other numbers may be longer."""
    needed = max(map(length, re.findall(r"\nA:(.+)", prompt))) + (2 * setting.steps if setting.kind == "arithmetic" else 0)
    if needed > setting.max_new:
        raise ValueError(f"Chains need up to {needed} tokens, but max_new is {setting.max_new}. Give at least {needed}.")


def outcomes(engine: rl.Engine, setting: Setting, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Rollouts of every question: how often right, what adaptive stopping saves, and whether the prompt's state tells."""
    n, layer = setting.rollouts, engine.config.num_layers // 2
    states, paths, drawn = rollouts(engine, setting, [prompt for prompt, _ in asked], f"blocks.{layer}.hook_in")
    right = [float(np.mean([each == answer for each in said])) for said, (_, answer) in zip(drawn, asked, strict=True)]
    sure, saved = [], []
    for said, (_, answer) in zip(drawn, asked, strict=True):
        race = Race(ALPHA)
        stopped = next((count for count, each in enumerate(said, 1) if race.add(each) is not None), n)
        saved.append(1 - stopped / n)
        most = max(set(said), key=lambda each: (said.count(each), str(each)))
        sure.append((race.settled, answer, most))
    names = [each or "no answer" for said in drawn for each in said]
    known = sorted(set(names))
    counts = np.array([[sum((each or "no answer") == name for each in said) for name in known] for said in drawn])
    settled = [(leader == answer, leader == most) for leader, answer, most in sure if leader is not None]
    made = {
        "questions": len(asked),
        "steps": setting.steps,
        "rollouts": n,
        "right": share(right, range(len(right))),
        "questions_always_right": int(sum(each == 1 for each in right)),
        "questions_never_right": int(sum(each == 0 for each in right)),
        "shares_right": right,
        "settled": len(settled),
        "settled_right": sum(right for right, _ in settled),
        "settled_as_all_rollouts": sum(same for _, same in settled),
        "saved": share(saved, range(len(saved))),
        "saved_of_100": share([simulated_saving(said) for said in drawn], range(len(drawn))),
        "rollouts_digest": digest(names),
        "leader_share": [float(row.max() / row.sum()) for row in counts],
    }
    if len(asked) >= 20:
        good = np.rint(n * np.array(right)).astype(int)
        few = _frequent(counts) if setting.kind == "tracking" else np.stack([good, n - good], 1)
        probe = rl.probes.outcome_probe(
            {("S", layer): np.stack(states)}, few, np.arange(len(few)), tokens=paths, estimator="logistic"
        )
        made["probe"] = {"lines": probe.lines, "findings": list(probe.findings)}
    return made


def rollouts(
    engine: rl.Engine, setting: Setting, prompts: Sequence[str], site: str
) -> tuple[list[Any], list[Any], list[list[str | None]]]:
    """(the last row of each prompt, its tokens, the outcomes of its rollouts).

    The rollouts are those of `resample`, seed by seed, but of many prompts in one batch, which takes half of the time.
    """
    n, states, paths, drawn = setting.rollouts, [], [], []
    shots = prompts[0].rpartition("Q:")[0]
    shared = engine.prompt(shots).force("Q:")  # computed once; kept, so that its pages are found
    for first in range(0, len(prompts), TOGETHER):
        roots = engine.prompts(prompts[first : first + TOGETHER], sites=[site], positions="last")
        states += [root.activations[site][-1].cpu().double().numpy() for root in roots]
        paths += [np.array(root.tokens) for root in roots]
        forks = [fork for root in roots for fork in root.fork(n)]
        own = [
            seeded(number).derived(seed=rollout_seed(seeded(number).seed, root.length, count))
            for number, root in enumerate(roots, first)
            for count in range(n)
        ]
        texts = [fork.generated_text for fork in engine.generate(forks, setting.max_new, sampling=own)]
        said = [None if (found := ANSWERS[setting.kind].read(text)) is None else found.outcome for text in texts]
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


# ---- sentences -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A question's chain of thought, which the model wrote greedily."""

    branch: Any
    answer: str
    """the right one"""
    right: bool
    asked: int
    """the first token of the question, behind the solved ones"""
    sentences: list[int]
    """the first token of each sentence, one per step and one that states the answer, and the end"""

    @classmethod
    def written(cls, engine: rl.Engine, setting: Setting, prompt: str, answer: str) -> "Chain | None":
        """None: the answer line does not have all sentences, or no answer."""
        root = engine.prompt(prompt)
        text = root.fork()[0].generate(setting.max_new).generated_text.split("\n")[0]
        branch = root.force(text)
        starts = branch.resample(1, at="sentences", max_new=0, answer=FORCED[setting.kind]).plan.positions
        ends = [*starts, branch.length][: setting.steps + 2]
        said = ANSWERS[setting.kind].read(text)
        if said is None or len(ends) < setting.steps + 2:
            return None
        return cls(branch, answer, said.outcome == answer, asked_at(engine, prompt), ends)


def asked_at(engine: rl.Engine, prompt: str) -> int:
    """The first token of a prompt's last question."""
    path, rest = engine.tokens_of(prompt), len(prompt) - prompt.rindex("Q:")
    behind = np.cumsum([len(engine.text.token(token)) for token in reversed(path)])  # from the end: a <bos> is not counted
    return len(path) - int(np.searchsorted(behind, rest)) - 1


def sentences(chains: Sequence[Chain], setting: Setting) -> dict[str, Any]:
    """Resampling importance and resilience of every sentence, and change points of whole chains."""
    lines, shown, changed, back = [], 0, 0, []
    for number, chain in enumerate(chains):
        rollouts = chain.branch.resample(
            setting.rollouts,
            at="sentences",
            sampling=seeded(number),
            max_new=setting.max_new,
            answer=ANSWERS[setting.kind],
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
        "rollouts": setting.rollouts,
        "importance": by_unit(lines, "importance"),
        "resilience": by_unit(back, "at_once"),
        "chains_with_a_shown_sentence": shown,
        "chains_with_a_change_point": changed,
    }


def by_unit(lines: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    units = sorted({line["unit"] for line in lines})
    own = [[line for line in lines if line["unit"] == unit] for unit in units]
    return [share([line[name] for line in each], [line["chain"] for line in each]) for each in own]


def forced(chains: Sequence[Chain], setting: Setting) -> dict[str, Any]:
    """How far each sentence moves the answer that is forced right after it: exact distributions, total variation. Of numbers
    only the first digit is known."""
    moves: list[dict[str, Any]] = []
    for number, chain in enumerate(chains):
        p = chain.branch.resample(1, at=chain.sentences, max_new=0, answer=FORCED[setting.kind]).outcomes().probabilities
        moves += [dict(chain=number, unit=i, tv=float(0.5 * abs(b - a).sum())) for i, (a, b) in enumerate(pairwise(p))]
    return {"chains": len(chains), "moved": by_unit(moves, "tv")}


def masking(engine: rl.Engine, chains: Sequence[Chain]) -> dict[str, Any]:
    """Loss of a sentence's tokens, in nats a token, when they cannot attend to something earlier, in all layers; and how much
    more they lose without the sentence before them than without as many tokens of the solved questions, chain by chain."""
    lost: dict[str, list[tuple[float, int]]] = {}
    for number, chain in enumerate(chains):
        path, random = chain.branch.tokens, np.random.default_rng(number)
        for j, (first, end) in enumerate(pairwise(chain.sentences)):
            rows, own = slice(first - 1, end - 1), (list(range(end - first)), path[first:end])
            keys = masked(chain, j, random)
            cuts = [rl.Edit("blocks.*.attn.hook_pattern", "mask", positions=rows, keys=each) for each in keys.values()]
            plain, *others = engine.logits_under(path, [[], *([cut] for cut in cuts)], positions=rows).double().log_softmax(-1)
            for name, without in zip(keys, others, strict=True):
                lost.setdefault(name, []).append((float((plain[own] - without[own]).mean()), number))
    found: dict[str, Any] = {name: share(*zip(*each, strict=True)) for name, each in lost.items()}
    for name in [name for name in lost if name.startswith(PLACEBO)]:
        j = int(name.rpartition(" ")[2])
        (ours, chain_of), (theirs, _) = (zip(*lost[each], strict=True) for each in (f"sentence {j - 1} to sentence {j}", name))
        found[f"sentence {j - 1} minus its placebo, to sentence {j}"] = paired(ours, theirs, chain_of)
    return found


PLACEBO = "as many tokens of the solved ones"


def masked(chain: Chain, j: int, random: np.random.Generator) -> dict[str, list[int]]:
    """What is hidden from sentence j + 1: never the first token, and not the one that predicts the sentence's first."""
    spans, last = list(pairwise(chain.sentences))[:j], chain.sentences[j] - 1
    found = {"prompt": (1, chain.branch.root_length), "solved ones": (1, chain.asked)}
    found |= {"question": (chain.asked, chain.branch.root_length)}
    found |= {f"sentence {i + 1}": span for i, span in enumerate(spans)}
    if j > 1:
        found["all before the sentence before"] = (spans[0][0], spans[-1][0])
    if j > 0:
        length = min(spans[-1][1], last) - spans[-1][0]
        begin = int(random.integers(1, chain.asked - length + 1))
        found[PLACEBO] = (begin, begin + length)
    return {f"{name} to sentence {j + 1}": list(range(a, min(b, last))) for name, (a, b) in found.items()}


def receivers(engine: rl.Engine, chains: Sequence[Chain]) -> dict[str, Any]:
    """Receiver heads, as in Thought Anchors: the kurtosis over sentences of the attention that they get from tokens at least
    four sentences later, per head; and how well the heads of one half of the chains are those of the other."""
    from scipy.stats import kurtosis, pearsonr

    from replaylens.rollouts.plan import offsets_of, sentence_starts

    scores = []
    for chain in chains:
        path = chain.branch.tokens
        starts = [*sentence_starts(*offsets_of(engine.text, path)), len(path)]
        pattern = rl.attention(engine, path).pattern.cpu().double().numpy()  # [layers, heads, queries, keys]
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


def tokens(engine: rl.Engine, chains: Sequence[Chain], setting: Setting) -> dict[str, Any]:
    """Forking tokens of some chains: where the second likeliest token has a probability of 0.15 or more, the first four."""
    found, tried, n = [], 0, setting.rollouts
    for chain, answer in ((each.branch, each.answer) for each in chains):
        forks: list[rl.probes.TokenFork] = []
        names = (answer, None) if setting.kind == "arithmetic" else ("red", "blue", "green", None)
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
                    n, at=position, replace=[token], sampling=sampling, max_new=setting.max_new, answer=ANSWERS[setting.kind]
                )
                own = [sum(each.outcome == name for each in after) for name in names]
                counts.append([*own, n - sum(own)] if setting.kind == "arithmetic" else own)
            words = [engine.text.token(token) for token in (taken, other)]
            forks.append(rl.probes.TokenFork(position, words, chances[[taken, other]].cpu().numpy(), np.array(counts)))
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
    colours = dict(
        zip(("smollm2, tracking", "smollm2, arithmetic", "qwen, arithmetic", "qwen, tracking"), COLOURS, strict=False)
    )
    asked = {("" if "," in part else "smollm2, ") + part: found for part, found in parts.items()}
    for name, found in asked.items():
        if "shares_right" in found:
            values = np.sort(found["shares_right"])
            left.plot(np.linspace(0, 1, len(values)), values, color=colours[name], label=name)
    moved = {name.replace(", chains", ", tracking").removesuffix(" chains"): f for name, f in asked.items() if "forced" in f}
    for number, (name, found) in enumerate(moved.items()):
        ways = {"without and with it": found["sentences"]["importance"], "forced before and after it": found["forced"]["moved"]}
        for dashed, (label, lines) in enumerate(ways.items()):
            kept = [each for each in lines[: found.get("steps", 2) + 1] if each["value"] is not None]
            y, low, high = (np.array([each[key] for each in kept]) for key in ("value", "low", "high"))
            at = np.arange(1, len(y) + 1) + 0.06 * (2 * number + dashed)
            style = "o--" if dashed else "o-"
            middle.errorbar(at, y, [y - low, high - y], fmt=style, color=colours[name], markersize=3)
            if not number:  # the left panel tells the colours
                middle.plot([], [], style[1:], color=QUIET, label=label)
    left.set(title="Questions, by share of right rollouts", xlabel="question (rank)", ylabel="share right")
    middle.set(
        title="How far a sentence moves the answer",
        xlabel="sentence of the chain",
        ylabel="total variation",
        xticks=[1, 2, 3, 4, 5],
        ylim=(-0.06, 1.25),
    )
    for axis in (left, middle):
        if axis.get_legend_handles_labels()[0]:
            legend(axis)
    if "stopping" in parts:
        lines = parts["stopping"]["truths"]
        places = np.arange(len(lines))
        right.barh(
            places + 0.2,
            [each["plain_test_errors"] for each in lines.values()],
            0.4,
            color=QUIET,
            label="plain test, every draw",
        )
        right.barh(places - 0.2, [each["errors"] for each in lines.values()], 0.4, color=COLOURS[0], label="settle=0.05")
        right.axvline(parts["stopping"]["alpha"], color=COLOURS[1], linewidth=1, label="allowed")
        right.set_yticks(places, list(lines))
        right.set(title="Wrong answer ever settled", xlabel="share of simulations")
        legend(right)
    return made
