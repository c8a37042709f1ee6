"""Thinking States on generated text (two-hop questions, word problems) against two baselines; ablations; time per answer.

    PYTHONPATH=src:. python -m benchmarks.thinking_texts                            # everything, on one GPU
    PYTHONPATH=src:. python -m benchmarks.thinking_texts --arms methods             # three methods, two seeds
    PYTHONPATH=src:. python -m benchmarks.thinking_texts --arms ablations --no-latency
    PYTHONPATH=src:. python -m benchmarks.thinking_texts --tiny --device cpu        # smoke test

Arms (`benchmarks.thinking_arms`) with the same texts train as one `Ensemble`, and the ensembles as parallel processes. All
arms of a task take the same number of steps, unless --seconds ends them earlier. Then `benchmarks.thinking_latency` times
answers, alone on the device. Writes to $OUT (or --out): thinking-texts-gpu.json, thinking-latency-gpu.json, and with --models
the models whose answers are timed, as models.tar.
"""

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.ensemble import COMPLETION, Ensemble
from benchmarks.ensemble_steps import EnsembleSteps
from benchmarks.shared_gpu import shared_gpu
from benchmarks.side_by_side import Job, run_all
from benchmarks.table import Table
from benchmarks.thinking_arms import CHANGES, PUBLISHED, SMALL, TEXT_TASKS, TINY, Arm, Size, ablations, methods
from benchmarks.thinking_latency import measure
from benchmarks.timed_training import Clock
from replaylens.commands.train import save
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.score import score
from replaylens.engine.training.thinking import Model, ThinkingRecipe
from replaylens.engine.zoo import coin as zoo
from replaylens.tasks import Example

TESTING = 20.0
"""seconds for testing, which training leaves"""
ARMS = ("methods", "ablations", "all")
Curve = dict[int, dict[str, float]]


def grouped(arms: list[Arm], size: Size) -> list[list[Arm]]:
    """Arms that can train as one ensemble, on the same texts."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        recipe = size.recipe(arm)
        alike = replace(arm, read_layer=None, write_layer=0, completion_weight=COMPLETION, thought_loss="tokens")
        groups.setdefault(f"{alike.name} {recipe.cut}", []).append(arm)
    return list(groups.values())


def one_group(size: Size, arms: list[Arm], device: str, clock: Clock, until: float, out: Path) -> None:
    """Train and test arms as one ensemble; writes <name>.json of each, and the models whose answers are timed."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    recipes = [size.recipe(arm) for arm in arms]
    with ThreadPoolExecutor(1) as aside:
        tested = aside.submit(examples_of, size, recipes[0])  # while the device trains
        texts = thinking_train.texts_of(replace(recipes[0], completion_weight=COMPLETION), device)
        begin, taken, done = clock.now(), EnsembleSteps(Ensemble(recipes, device), texts), 0
        for done in taken.taken():  # noqa: B007 (used after the loop)
            if clock.now() > until:
                break
        trained, losses = clock.now(), taken.losses[:done].cpu()
        what = f"{arms[0].name}, {len(arms)} arms: {done} of {recipes[0].steps} steps in {trained - begin:.0f} s"
        print(f"{trained:5.0f} s  {what}", flush=True)
        for i, (arm, recipe, model) in enumerate(zip(arms, recipes, taken.ensemble.members(), strict=True)):
            if arm.name in (f"{arm.task}-thinking", f"{arm.task}-cot"):
                save(model, recipe, out / f"model-{arm.name}")
            curve = curve_of(size, recipe, model.to(device), tested.result())
            result = dict(
                name=arm.name, kind=arm.kind, arm=asdict(arm), steps=done, planned=recipe.steps, together=len(arms),
                final_loss=float(losses[-20:, i].mean()), losses=losses[::50, i].tolist(),
                weights=sum(x.numel() for x in model.parameters()), setup_seconds=begin, train_seconds=trained - begin,
                tokens_per_step=size.tokens, curve=curve, test_seconds=clock.now() - trained,
            )  # fmt: skip
            (out / f"{arm.name}.json").write_text(json.dumps(result))
            right = " ".join(f"{length}:{found['answered']:.0f}" for length, found in curve.items())
            print(f"{clock.now():5.0f} s  {arm.name}: loss {result['final_loss']:.3f}, right {right}", flush=True)


def examples_of(size: Size, recipe: ThinkingRecipe) -> list[Example]:
    """The tested examples, by number of steps."""
    part = recipe.parts[0]
    return [example for length in size.task(part.task).tested for example in zoo.held_out(part, length, size.examples)]


def curve_of(size: Size, recipe: ThinkingRecipe, model: Model, examples: list[Example]) -> Curve:
    """Percent of right answers, and of texts with every thought right, by number of steps."""
    lengths, number = size.task(recipe.parts[0].task).tested, size.examples
    found = score(model, recipe.method, recipe.thinking, recipe.tokenizer(), examples, size.tested_together, recipe.precision)
    groups = {length: found[i * number : (i + 1) * number] for i, length in enumerate(lengths)}
    return {
        length: {name: mean(100.0 * getattr(s, name) for s in group) for name in ("answered", "thought")}
        for length, group in groups.items()
    }


def collect(arms: list[Arm], size: Size, out: Path, table: Table) -> None:
    """One line per kind of arm, over its seeds."""
    files = [out / f"{arm.name}.json" for arm in arms]
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    for kind in dict.fromkeys(arm.kind for arm in arms):
        group = [run for run in runs if run["kind"] == kind]
        if group:
            table.add(kind, **_line(group, size.task(group[0]["arm"]["task"]).longest), size=asdict(size), runs=group)


def _line(group: list[dict[str, Any]], longest: int) -> dict[str, Any]:
    """Percent right up to N and beyond, of every seed and on average, with the published numbers."""
    line: dict[str, Any] = dict(seeds=len(group), N=longest, steps_taken=min(run["steps"] for run in group))
    for where, beyond in (("inside", False), ("beyond", True)):
        for kind in ("answered", "thought"):
            shares = [
                mean(share[kind] for length, share in run["curve"].items() if (int(length) > longest) == beyond)
                for run in group
            ]
            line |= {f"{where}_{kind}": mean(shares), f"{where}_{kind}_seeds": shares}
    lengths = list(group[0]["curve"])
    line["by_steps"] = [[int(length), mean(run["curve"][length]["answered"] for run in group)] for length in lengths]
    line["published"] = [f"{name}: {value}" for name, value in PUBLISHED[group[0]["arm"]["task"]].items()]
    return line


def pack(runs: Path, out: Path) -> None:
    """All saved models as one file."""
    with tarfile.open(out / "models.tar", "w") as archive:
        for folder in sorted(runs.glob("model-*")):
            archive.add(folder, folder.name)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arms", default="all", choices=ARMS)
    parser.add_argument("--tasks", nargs="+", choices=TEXT_TASKS, default=tuple(TEXT_TASKS))
    parser.add_argument("--ablated", nargs="+", choices=TEXT_TASKS, default=tuple(TEXT_TASKS), help="tasks of the ablations")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES, help="what the ablations change")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1), help="of the three methods; ablations have the first")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, for training and testing")
    parser.add_argument("--steps", type=int, help="of every arm; default: the task's")
    parser.add_argument("--tokens", type=int, help="tokens of a training step")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results/thinking")))
    parser.add_argument("--tiny", action="store_true", help="a few steps of small models, as a smoke test")
    parser.add_argument("--small", action="store_true", help="small models and texts, for one core")
    parser.add_argument("--no-mps", action="store_true", help="do not try NVIDIA's multi-process service")
    parser.add_argument("--models", action="store_true", help="also write models.tar")
    parser.add_argument("--no-latency", action="store_true", help="do not time answers")
    return parser.parse_args()


def main() -> None:
    """Parse, train, test, time."""
    options = parsed()
    size = TINY if options.tiny else SMALL if options.small else Size()
    size = replace(size, tokens=options.tokens or size.tokens, steps=options.steps or size.steps)
    tasks, seeds, device = tuple(options.tasks), tuple(options.seeds), options.device
    arms = methods(tasks, seeds) if options.arms != "ablations" else []
    arms += (
        ablations(tuple(options.ablated), tuple(options.changes), size.layers, seeds[:1]) if options.arms != "methods" else []
    )
    arms = list(dict.fromkeys(arms))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # exiting ends the child processes, too
    clock, runs, where = Clock(time.time()), Path(tempfile.mkdtemp()), "gpu" if device == "cuda" else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    groups, until = grouped(arms, size), options.seconds - TESTING
    jobs: list[Job] = [(one_group, group[0].name, (size, group, device, clock, until, runs)) for group in groups]
    with shared_gpu(device == "cuda" and not options.no_mps):
        run_all(context, jobs, runs, clock, options.seconds, len(jobs) if device == "cuda" else 1)
    on = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    table = Table(f"thinking-texts-{where}", f"percent right; {on}", out=options.out / f"thinking-texts-{where}.json")
    collect(arms, size, runs, table)
    if options.models:
        pack(runs, options.out)
    print(f"{clock.now():5.0f} s  trained and tested", flush=True)
    if not options.no_latency:
        measure(runs, device, options.out / f"thinking-latency-{where}.json", tiny=options.tiny)
    print(f"{clock.now():5.0f} s  done", flush=True)


if __name__ == "__main__":
    main()
