"""SmolLM2-135M end to end: what it answers to coin flips, what its states know, and where they follow text or truth.

python docs/examples/smollm2.py OUT [SCALE]     (fetch the model first: `replaylens fetch smollm2`; or `make smollm2`)

SCALE multiplies the number of examples; 1 takes about ten minutes on two cores. Everything is replayable: the dumps in
OUT carry digests and are verified here, the tables and reports are functions of them. OUT/summary.md holds what is printed.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import replaylens as rl
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import verify
from replaylens.engine.display import word
from replaylens.probes import ProbeRows, untrained_rows
from replaylens.probes.intervals import ratio_over_groups
from replaylens.probes.questions.forced import forced_rows
from replaylens.probes.registry import get
from replaylens.probes.report import Report, about_rows, percent
from replaylens.probes.splits import fold_of_groups
from replaylens.tasks import Example
from replaylens.views.report import ReportPage
from replaylens.weights import hub

LENGTHS = (1, 2, 3, 4)
LAYERS = (0, 6, 12, 18, 24, 29)
"""of thirty, for probes: all of them at every token would be gigabytes"""
SITES = [f"blocks.{layer}.{name}" for layer in LAYERS for name in ("hook_in", "attn.hook_out", "mlp.hook_out")]
STREAM = [site for site in SITES if site.endswith("hook_in")]
ANSWERS = (" yes", " no")
FOLDS = 5
OTHER = {"heads": "tails", "tails": "heads"}
Say = Callable[[str], None]


def load() -> rl.Engine:
    if not hub.is_fetched():
        raise SystemExit("SmolLM2-135M is not in the cache. Run `replaylens fetch smollm2` to download it.")
    return rl.Engine.load(hub.model_folder(), cache_tokens=16384)


def questions(verb: str, flips: Any, names: str = "train", seed: int = 0) -> Any:
    """Wei et al.'s question. To a pretrained model "flips the coin" may be a random toss; "turns the coin over" is not."""
    return rl.tasks.get("coin")(rendering="wei", verb=verb, flips=flips, names=names, seed=seed)


def only(engine: rl.Engine, words: Sequence[str]) -> rl.Sampling:
    """The likeliest of these words, whatever else the model would rather say."""
    return rl.Sampling(logit_bias={engine.text.encode(w, special=False)[0]: 1e4 for w in words})


def shots(verb: str, number: int = 4) -> str:
    """Solved questions with other names to put before a question; as many answers are yes as no."""
    made, wanted = [], [" yes", " no"] * (number // 2)
    for example in questions(verb, (1, 4), names="held-out", seed=1).examples(200):
        if wanted and example.answer == wanted[0]:
            made.append(example.text)
            wanted.pop(0)
    return "\n".join(made) + "\n"


# ---- what it answers --------------------------------------------------------------------------------------------------


def behaviour(engine: rl.Engine, n: int, say: Say) -> None:
    """Accuracy by number of actors: forced to yes or no, and how often it says either of itself."""
    say("| prompt | actors | right | 95 % | says yes | answers by itself |\n|---|---:|---:|---|---:|---:|")
    for frame in ("flips", "turns over", "flips, 4 shots", "turns over, 4 shots"):
        verb = "turn" if frame.startswith("turns") else "flip"
        before = shots(verb) if "shots" in frame else ""
        for length in LENGTHS:
            asked = [replace(e, prompt=before + e.prompt) for e in balanced(questions(verb, length), n)]
            free = _said(engine.replay(asked, max_new=1))
            forced = _said(engine.replay(asked, max_new=1, sampling=only(engine, (*ANSWERS, " Yes", " No"))))
            right = np.mean([said == e.answer for said, e in zip(forced, asked, strict=True)])
            yes, alone = np.mean([said == " yes" for said in forced]), np.mean([said in ANSWERS for said in free])
            say(f"| {frame} | {length} | {row(float(right), n)} | {yes:.0%} | {alone:.0%} |")


def _said(run: rl.Run) -> list[str]:
    """The one word that each example was answered with, in lower case."""
    return [run.engine.text.decode(r.tokens[r.num_prompt :]).lower() for r in run]


def balanced(task: Any, n: int) -> list[Example]:
    """Examples with different prompts, as many yes as no: a model that always says one of them is right half the time."""
    found: dict[str, list[Example]] = {" yes": [], " no": []}
    seen: set[str] = set()
    for example in task.examples(40 * n):
        if example.root not in seen and len(found[example.answer]) < n // 2:
            found[example.answer].append(example)
            seen.add(example.root)
    return [e for pair in zip(*found.values(), strict=True) for e in pair]


def chains(engine: rl.Engine, n: int, say: Say) -> None:
    """Accuracy by number of actors when the model writes every state, after three solved chains."""
    solved = [rl.tasks.get("coin")(rendering="steps", flips=k, names="held-out", seed=1).example(k) for k in (2, 1, 3)]
    before = "\n".join(e.text for e in solved) + "\n"
    say("| actors | right | 95 % | chains in the form |\n|---:|---:|---|---:|")
    for length in LENGTHS:
        task = rl.tasks.get("coin")(rendering="steps", flips=length)
        examples = [replace(e, prompt=before + e.prompt) for e in task.examples(n)]
        run = engine.replay(examples, drafter="ngram", sampling=rl.Sampling(stop=("\n",)))
        written = [r.text[len(r.example.prompt) :] for r in run]
        formed = np.mean([" So the state is" in text for text in written])
        say(f"| {length} | {row(run.accuracy, n)} | {formed:.0%} |")


def row(share: float, n: int) -> str:
    """A share and its Wilson interval, as two cells."""
    z, p = 1.96, share
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + (z / n / 2) ** 2)
    return f"{p:.1%} | {middle - half:.0%} to {middle + half:.0%}"


# ---- what its states know ---------------------------------------------------------------------------------------------


def write(engine: rl.Engine, task: Any, n: int, where: Path, say: Say, **how: Any) -> Dump:
    """A dump with the answer forced to yes or no, resumed where it was cut short, and a tenth of it replayed."""
    plan = make_plan(
        engine, task, n, sampling=only(engine, ANSWERS), max_new=1, stored_dtype="bfloat16", examples_per_shard=32, **how
    )
    dump = write_dump(engine, plan, where, resume=True, progress=True)
    assert dump is not None
    verdict = verify(dump.url, engine, sample=0.1)
    say(f"`{where.name}`: {n} examples, {dump.manifest.rows} rows, digest `{dump.digest}`. {verdict}.")
    if not verdict:
        raise SystemExit(1)
    return dump


def probes(engine: rl.Engine, dump: Dump, out: Path, say: Say) -> list[Report]:
    """Parity and face with all controls; the outcome's distribution; and does steering turn answers?"""
    how: dict[str, Any] = dict(positions=["step:1", "step:2", "step:3", "query"], estimators="ridge", engine=engine)
    swept = rl.probes.sweep(dump, ["parity", "face"], sites=SITES, resume=out / "parts", progress=True, **how)
    best = swept.best("parity", position="query")
    probe = rl.probes.fit_probe(dump, "parity", site=best["site"], position="query", estimator="mass-mean")
    seen = set(dump.index["root"])
    fresh = [e for e in questions("turn", (2, 4), seed=2).examples(60) if e.root not in seen][:40]
    reports = {
        "probes": swept,
        "outcome": rl.probes.outcome_at_fork(dump, sites=STREAM),
        "steer": rl.probes.steer(engine, probe, fresh, untrained=rl.probes.placebo_probes(dump, probe)),
    }
    for name, report in reports.items():
        report.save(out / name, figures=False)
        say(f"{name}:\n\n" + "\n".join(f"* {line}" for line in report.summary()))
    return list(reports.values())


def lens(engine: rl.Engine, dump: Dump, say: Say) -> None:
    """Z where the answer is read: how often each layer's own distribution prefers the right one of yes and no."""
    right = dump.where(accepted=True, token_state="prompt")
    frame, z = right.index, right.to_numpy("Z.targets")  # [rows, layers + 1, 2]
    last = frame.groupby("example")["position"].transform("max") == frame["position"]
    truth = [ANSWERS.index(questions("turn", (1, 4)).example(int(e)).answer) for e in frame["example"][last]]
    prefers = z[last.to_numpy()].argmax(-1)  # [examples, layers + 1]
    shares = (prefers == np.array(truth)[:, None]).mean(0)
    shown = ", ".join(f"{layer}: {float(shares[layer]):.0%}" for layer in (*LAYERS, len(shares) - 1))
    say(f"Lens at the query, right one of yes and no by layer ({len(truth)} prompts): {shown}.")


# ---- forks of a chain of thought --------------------------------------------------------------------------------------


def forks(engine: rl.Engine, n: int, out: Path, say: Say) -> Report:
    """Each chain forks at its first stated face, true or turned over, and is cut where the second face is due.

    Does the face that the model would state next, and the one that a probe of truthful forks reads, follow text or truth?
    """
    examples = rl.tasks.get("coin")(rendering="steps", flips=(2, 4)).examples(n)
    sites = [*STREAM, engine.sites.per_layer("S")[-1]]
    paths = {lie: forced_rows(engine, examples, [opening(e, lie) for e in examples], sites=sites) for lie in (False, True)}
    truthful, lied, blank = map(last, (paths[False], paths[True], untrained_rows(paths[False], engine, STREAM)))
    lines = [line(what, right, lied.roots) for what, right in own_words(engine, truthful, lied).items()]
    lines += [line(what, right, lied.roots, FOLDS) for what, right in readings(truthful, lied, blank).items()]
    shown = [f"{each['what']}: {percent(each['accuracy'], each['low'], each['high'])}." for each in lines]
    report = Report("forks", lines, about_rows(lied), {"examples": n, "estimator": "ridge"}, [], shown)
    report.save(out / "forks", figures=False)
    say("\n".join(f"* {each}" for each in report.summary()))
    return report


def own_words(engine: rl.Engine, truthful: ProbeRows, lied: ProbeRows) -> dict[str, np.ndarray]:
    """About the likelier one of heads and tails where a face is due."""
    truth, final = lied.target("face").values, engine.sites.per_layer("S")[-1]
    faces = np.array(list(OTHER))
    ids = [engine.text.encode(f" {face}", special=False)[0] for face in faces]
    right, wrong = (
        faces[engine.runner.logits(rows.source.take(final, None, rows.numbers))[:, ids].argmax(1).numpy()]
        for rows in (truthful, lied)
    )
    return {
        "truthful fork: the model's next face is right": right == truth,
        "truthful fork: it repeats the face just stated": right == truthful.target("claimed").values,
        "lied fork: the model's next face follows the text": wrong != truth,
        "lied fork: it repeats the lie": wrong == lied.target("claimed").values,
        "both forks end in the same next face": right == wrong,
    }


def readings(truthful: ProbeRows, lied: ProbeRows, blank: ProbeRows) -> dict[str, np.ndarray]:
    """About what probes of truthful forks read; `blank`: the same forks through a model with random weights."""
    truth, found = lied.target("face").values, {}
    for site in STREAM:
        found[f"{site}: a probe reads the truth in truthful forks"] = held_out_faces(truthful, truthful, site) == truth
        found[f"{site}: it follows the text in lied forks"] = held_out_faces(truthful, lied, site) != truth
        found[f"{site}: untrained model, truthful forks"] = held_out_faces(blank, blank, site) == truth
    return found


def opening(example: Example, lie: bool) -> str:
    """The chain up to the colon where its second face is due; with `lie`, the first face turned over."""
    first, second = example.completion.split(".")[:2]
    head, _, face = first.rpartition(" ")
    return f"{head} {OTHER[face] if lie else face}.{second[: second.index(':') + 1]}"


def last(rows: ProbeRows) -> ProbeRows:
    """The row of each path's last token."""
    position = rows.frame.groupby("example")["position"]
    return rows.where((position.transform("max") == rows.frame["position"]).to_numpy())


def held_out_faces(truthful: ProbeRows, rows: ProbeRows, site: str) -> np.ndarray:
    """What ridge probes, fitted on truthful forks of other roots, read off these rows."""
    fold, read = fold_of_groups(rows.roots, FOLDS, 0), np.empty(len(rows), dtype=object)
    for f in range(FOLDS):
        X, y = truthful.matrix(site)[fold != f], truthful.target("face").values[fold != f]
        read[fold == f] = get("ridge").make().fit(X, y).predict(rows.matrix(site)[fold == f])
    return read


def line(what: str, right: np.ndarray, roots: np.ndarray, folds: int = 1) -> dict[str, Any]:
    """A share with its interval over roots, as reports have it; wider where folds helped to predict each other."""
    score = ratio_over_groups(right.astype(float)[None], np.ones(len(right)), roots, folds=folds)[0]
    return {"what": what, "metric": "share", "accuracy": score.value, "low": score.low, "high": score.high, "rows": len(right)}


def main(out: Path, scale: float = 1.0) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    began = time.monotonic()

    def say(line: str) -> None:
        lines.append(line)
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    def sized(n: int) -> int:
        return max(2, round(n * scale) // 2 * 2)

    engine, task = load(), questions("turn", (1, 4))
    behaviour(engine, sized(40), say)
    chains(engine, sized(16), say)
    states = write(engine, task, sized(240), out / "states", say, sites=SITES, drafter="ngram")
    reports = probes(engine, states, out, say)
    looked = write(engine, task, sized(12), out / "look", say, sites="STCZ", drafter="lens", targets=ANSWERS)
    lens(engine, looked, say)
    reports.append(forks(engine, max(20, sized(120)), out, say))
    verdict = verify(looked.url, engine, sample="all")
    page = ReportPage(looked, tuple(reports), verdict, lambda token: word(engine.text, token), title="SmolLM2-135M, coin flips")
    say(f"{page.save(out / 'report.html')}; {time.monotonic() - began:.0f} s in all.")
    (out / "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
