"""Where are answers decided? `python docs/examples/decided.py coin-plain|coin-thinking|smollm2 [OUT] [--scale 1]`

Rollouts along coin texts, with the statistics of docs/branches.md. Writes OUT/decided-MODEL.json (default: bench/results)
and prints the tables of docs/notes/decided.md from it. --scale multiplies the number of texts. On one core: coin-plain about
two minutes, coin-thinking seconds, SmolLM2-135M (`replaylens fetch smollm2`) about two minutes.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import replaylens as rl
from replaylens.probes.intervals import Estimate, mean_over_groups
from replaylens.rollouts.plan import sentence_spans
from replaylens.rollouts.rollouts import OutcomeCounts, Rollouts
from replaylens.tasks import Example

OUT = Path(__file__).parents[2] / "bench" / "results"
OTHER = {"heads": "tails", "tails": "heads"}
FINAL = rl.Answer.regex(r"So the state is (heads|tails)")
WEI = rl.Answer.regex(r"A: (yes|no)\.")
ONE = rl.Sampling(temperature=1.0, seed=0)


def coin(rendering: str, flips: int, count: int, names: str = "train", seed: int = 0) -> list[Example]:
    """Examples with different prompts."""
    made = rl.tasks.get("coin")(rendering=rendering, flips=flips, names=names, seed=seed).examples(20 * count)
    return list({example.root: example for example in made}.values())[:count]


def shares(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


# ---- few tokens decide? (Forking Paths, on Wei's coin flips) ---------------------------------------------------------------


def tokens_that_decide(engine: rl.Engine, texts: int, n: int) -> dict[str, Any]:
    """Rollouts from before every token of Wei's texts, the question included. The model has learned whole texts, so that
    rollouts go on with actors of their own; the exact distribution is that of the task."""
    lines, held, forks = [], 0, 0
    for number, example in enumerate(coin("wei", 3, texts, seed=3)):
        whole = rl.tasks.get("coin")(rendering="wei", flips=(1, 8))
        first = example.text.index(". ") + 1
        with engine.prompt(example.text[:first]) as root:
            root.force(example.text[first:])
            asked = next(p for p, token in enumerate(root.tokens) if engine.text.decode([token]) == " A")
            at = list(range(root.root_length, asked + 1))  # from there on, rollouts do not hold "A:" any more
            rollouts = root.resample(n, at=at, max_new=70, sampling=ONE, answer=WEI)
            words = [engine.text.decode(root.tokens[p : p + 1]) for p in at]
            inside = [_inside(whole, engine.text.decode(root.tokens[:p]), example, rollouts, i) for i, p in enumerate(at)]
        counts = rollouts.outcomes()
        important, changes = rl.probes.importance(counts), rl.probes.change_points(counts)
        held, forks = held + sum(inside), forks + len(inside)
        lines.append(
            {
                "text": example.text,
                "tokens": len(at),
                "outcomes": counts.outcomes,
                "counts": counts.counts.tolist(),
                "shown": [[i, words[i]] for i in np.flatnonzero(important.shown).tolist()],
                "largest": [words[int(important.distances.value.argmax())], float(important.distances.value.max())],
                "changes": [
                    {"text": words[c.index - 1], "index": c.index, "low": c.low, "high": c.high, "size": c.size}
                    for c in changes.points
                ],
                "p_none": float(changes.number[0]),
                "number": number,
            }
        )
    return {"texts": lines, "rollouts_each": n, "exact_inside": held, "forks": forks}


def _inside(task: Any, before: str, example: Example, rollouts: Rollouts, place: int) -> bool:
    """Whether the interval at a fork holds the exact probability of "yes"."""
    counts = rollouts.outcomes()
    start = re.match(r"A coin is (heads|tails)", example.text)
    assert start is not None
    exact = task.outcomes(before)[start[1]]
    curve = rl.probes.outcome_curve(counts)
    yes = counts.outcomes.index("yes")
    return bool(curve.low[place, yes] <= exact <= curve.high[place, yes])


# ---- sentences of a chain of thought, true and false -----------------------------------------------------------------------


@dataclass
class Forks:
    """Forks before a sentence of a chain, or after a false one that takes its place."""

    chain: list[int]
    sentence: list[int]
    false: list[bool]
    stated: list[str]
    """the face that the sentence before the fork ends with; empty before the first"""
    right: list[float]
    heads: list[float]
    tokens: list[np.ndarray]
    states: list[np.ndarray]


def false_of(sentence: str) -> str:
    """The sentence with the other face."""
    return re.sub(r"(heads|tails)(?=\.)", lambda found: OTHER[found[1]], sentence)


def steps_forks(
    engine: rl.Engine, examples: Sequence[Example], before: str, layers: Sequence[int], answer: rl.Answer, n: int, new: int
) -> Forks:
    """Outcomes from before each sentence of true chains, and after each of their steps with the other face in its place."""
    forks = Forks([], [], [], [], [], [], [], [])
    sites = [f"blocks.{layer}.hook_in" for layer in layers]
    for number, example in enumerate(examples):
        sentences = [example.completion[a:b] for a, b in sentence_spans(example.completion)]
        truth = example.answer.strip(" .")
        with engine.prompt(before + example.prompt) as root:
            root.force(example.completion)
            options = {"sampling": ONE, "max_new": new, "answer": answer, "sites": sites, "keep": "fork"}
            true = root.resample(n, at="sentences", **options)
            at = list(true.plan.positions)
            wrong = root.resample(n, at=at[:-1], replace=[false_of(each) for each in sentences[:-1]], **options)
            for found, lie in ((true, False), (wrong, True)):
                heads = _heads(found.outcomes())
                for place in range(len(found.plan.positions)):
                    forks.chain.append(number)
                    forks.sentence.append(place)
                    forks.false.append(lie)
                    last = false_of(sentences[place]) if lie else sentences[place - 1] if place else ""
                    forks.stated.append(last.strip(" .").rpartition(" ")[2])
                    forks.heads.append(heads[place])
                    forks.right.append(heads[place] if truth == "heads" else 1 - heads[place])
                    forks.tokens.append(np.array(found.plan.prefix(place)))
                    rows = found[place * n].states
                    forks.states.append(np.stack([rows[site][0].float().numpy() for site in sites]))
    return forks


def _heads(counts: OutcomeCounts) -> list[float]:
    """The share of heads among answers with a face, at each position."""
    names = [name.strip() for name in counts.outcomes]
    table = counts.counts.astype(float) if counts.probabilities is None else counts.probabilities
    column = lambda face: table[:, names.index(face)] if face in names else np.zeros(len(table))  # noqa: E731
    heads, tails = column("heads"), column("tails")
    return (heads / np.maximum(heads + tails, 1e-9)).tolist()


def sentences_that_decide(forks: Forks, layers: Sequence[int], n: int) -> dict[str, Any]:
    """How often the answer is right after true and after false sentences, and what probes read at these forks."""
    chain, place, lie = np.array(forks.chain), np.array(forks.sentence), np.array(forks.false)
    right, heads = np.array(forks.right), np.array(forks.heads)
    table = {}
    for sentence in range(place.max()):
        true, false = (place == sentence + 1) & ~lie, (place == sentence) & lie
        table[f"sentence {sentence + 1}"] = {
            "before": shares(mean_over_groups(right[(place == sentence) & ~lie], chain[(place == sentence) & ~lie])),
            "after": shares(mean_over_groups(right[true], chain[true])),
            "after_false": shares(mean_over_groups(right[false], chain[false])),
        }
    weight = n if n > 1 else 100  # probabilities stand for a hundred rollouts
    counts = np.stack([np.rint(heads * weight), weight - np.rint(heads * weight)], 1).astype(np.int64)
    states = {("S", layer): np.stack([rows[i] for rows in forks.states]) for i, layer in enumerate(layers)}
    report = rl.probes.outcome_probe(states, counts, chain, tokens=forks.tokens)
    lines = report.lines
    return {"sentences": table, "chains": int(chain.max()) + 1, "forks": len(chain), "probe": str(report), "lines": lines}


def stated_face(forks: Forks, layers: Sequence[int]) -> str:
    """The same probe, asked for the face that the last sentence states, true or false."""
    at = [i for i, face in enumerate(forks.stated) if face]
    counts = np.array([[1, 0] if forks.stated[i] == "heads" else [0, 1] for i in at])
    states = {("S", layer): np.stack([forks.states[i][k] for i in at]) for k, layer in enumerate(layers)}
    return str(rl.probes.outcome_probe(states, counts, np.array(forks.chain)[at], tokens=[forks.tokens[i] for i in at]))


# ---- rejected drafts -------------------------------------------------------------------------------------------------------


def rejected_drafts(engine: rl.Engine, texts: int, n: int) -> dict[str, Any]:
    """Drafts that were rejected while the model wrote texts of its own, against resamples at the same places."""
    drafts, resamples, taken, groups = list[int](), list[list[int]](), list[int](), list[int]()
    starts = ["A coin is heads up.", "A coin is tails up."]
    for number in range(texts):
        with engine.prompt(starts[number % 2], sites="S", keep_rejected=True) as root:
            how = rl.Sampling(temperature=1.0, seed=number)
            root.generate(40, sampling=how, drafter="lens", window=4)
            found = {r.record.fork_position: r.tokens[r.record.fork_position] for r in root.rejected}
            at = sorted(found)
            if not at:
                continue
            drawn = root.resample(n, at=at, max_new=1, sampling=rl.Sampling(temperature=1.0, seed=1000 + number))
            for place, position in enumerate(at):
                drafts.append(found[position])
                resamples.append([each.tokens[0] for each in drawn.rollouts[place * n : (place + 1) * n]])
                taken.append(root.tokens[position])
                groups.append(number)
    found = rl.probes.draft_agreement(drafts, resamples, taken, np.array(groups))
    numbers = {"mass": shares(found.mass), "gain": shares(found.gain), "control": found.control, "p": found.p}
    return {"verdict": str(found), "shown": found.shown, "forks": found.forks, "texts": texts, **numbers}


# ---- a Thinking-States model -----------------------------------------------------------------------------------------


def asked_now(engine: rl.Engine, texts: int) -> dict[str, Any]:
    """The answer after each sentence if the question came now: with the text as prompt, which the model thinks about, and with
    the text forced behind the first sentence, which it does not."""
    thought, plain, group = list[float](), list[float](), list[int]()
    for number, example in enumerate(coin("wei", 4, texts, seed=3)):
        body, question = example.prompt.split(" Is ")
        starts = [end for _, end in sentence_spans(body)]
        for end in starts[1:]:
            text = body[:end] + " Is " + question
            face = _face(body[:end])
            right = " yes" if face == _face(body[: starts[0]]) else " no"
            with engine.prompt(text) as branch:
                thought.append(_share(engine, branch, right))
            with engine.prompt(body[: starts[0]]) as branch:
                branch.force(text[starts[0] :])
                plain.append(_share(engine, branch, right))
            group.append(number)
    groups = np.array(group)
    found = {"thinking": mean_over_groups(np.array(thought), groups), "forced": mean_over_groups(np.array(plain), groups)}
    return {name: shares(each) for name, each in found.items()} | {"texts": texts, "sentences": len(group)}


def _face(text: str) -> str:
    face = "heads" if "is heads" in text else "tails"
    return OTHER[face] if text.count(" flips the coin") % 2 else face


def _share(engine: rl.Engine, branch: Any, right: str) -> float:
    """Probability of the right answer among yes and no."""
    logits = branch.logits(-1, tokens=[" yes", " no"]).double().softmax(-1)
    return float(logits[0 if right == " yes" else 1])


# ---- one command per model -------------------------------------------------------------------------------------------------


def coin_plain(scale: float) -> dict[str, Any]:
    engine, layers, n = rl.Engine.load("coin-plain", cache_tokens=32768), (1, 2, 3), 6
    examples = coin("steps", 3, int(40 * scale), seed=4)
    forks = steps_forks(engine, examples, "", layers, FINAL, n, 40)
    return {
        "tokens": tokens_that_decide(engine, int(4 * scale), 24),
        "steps": sentences_that_decide(forks, layers, n),
        "stated": stated_face(forks, layers),
        "drafts": rejected_drafts(engine, int(40 * scale), 20),
    }


def coin_thinking(scale: float) -> dict[str, Any]:
    return {"asked_now": asked_now(rl.Engine.load("coin-thinking"), int(12 * scale))}


def smollm2(scale: float) -> dict[str, Any]:
    engine, layers = rl.Engine.load("smollm2", cache_tokens=16384), (6, 12, 18, 24)
    solved = [rl.tasks.get("coin")(rendering="steps", flips=k, names="held-out", seed=1).example(k) for k in (2, 1, 3)]
    before = "\n".join(example.text for example in solved) + "\n"
    asked = rl.Answer.choices([" heads", " tails"], after=" So the state is")
    examples = coin("steps", 2, int(30 * scale), seed=4)
    forks = steps_forks(engine, examples, before, layers, asked, 1, 0)
    drawn = steps_forks(engine, examples[: int(4 * scale)], before, layers[:1], FINAL, 6, 24)
    rollouts = {
        "right_after_true": float(np.mean([r for r, lie in zip(drawn.right, drawn.false, strict=True) if not lie])),
        "right_after_false": float(np.mean([r for r, lie in zip(drawn.right, drawn.false, strict=True) if lie])),
        "forks": len(drawn.right),
        "rollouts_each": 6,
    }
    return {"steps": sentences_that_decide(forks, layers, 1), "rollouts": rollouts}


MODELS = {"coin-plain": coin_plain, "coin-thinking": coin_thinking, "smollm2": smollm2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    found = MODELS[given.model](given.scale)
    file = given.out / f"decided-{given.model}.json"
    file.write_text(json.dumps({"model": given.model, "scale": given.scale, **found}, indent=1, default=float) + "\n")
    print(tables(found))


def tables(found: dict[str, Any]) -> str:
    """The tables of docs/notes/decided.md."""
    lines: list[str] = []
    if "tokens" in found:
        lines += ["| text | tokens | tokens shown to matter | change points [interval] |", "|---|---:|---|---|"]
        for text in found["tokens"]["texts"]:
            shown = ", ".join(repr(word) for _, word in text["shown"]) or "none"
            changes = ", ".join(f"{c['text']!r} [{c['low']}, {c['high']}], size {c['size']:.2f}" for c in text["changes"])
            lines.append(f"| {text['text'][:60]}... | {text['tokens']} | {shown} | {changes or 'none'} |")
        lines.append(f"exact probability inside the interval: {found['tokens']['exact_inside']} of {found['tokens']['forks']}")
    if "steps" in found:
        lines += ["| | right before it | right after it | right after it, with the other face |", "|---|---|---|---|"]
        for name, row in found["steps"]["sentences"].items():
            cells = [f"{100 * row[k]['value']:.1f} [{100 * row[k]['low']:.1f}, {100 * row[k]['high']:.1f}]" for k in row]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append(found["steps"]["probe"])
    lines += [f"{name}: {json.dumps(found[name])}" for name in ("stated", "drafts", "rollouts", "asked_now") if name in found]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
