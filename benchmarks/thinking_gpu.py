"""The paper's tables from scratch, parity or variables, and the embedded model `coin-thinking`: one job for one GPU.

    PYTHONPATH=src:. python -m benchmarks.thinking_gpu                     # parity: about 8 minutes on an H200 with 16 cores
    PYTHONPATH=src:. python -m benchmarks.thinking_gpu --task variables
    PYTHONPATH=src:. python -m benchmarks.thinking_gpu --tiny --device cpu # smoke test

Train on texts of up to N = 10, 20, 40 operations, test on lengths up to 100: no chain of thought, chain of thought, Thinking
States, three seeds each. All runs are parallel processes, which agree on a number of steps that the slowest can reach in the
given time. Each run is written when it ends, to $OUT (or --out), in a folder named after the task; the table of all runs is
thinking-TASK-gpu.json there. For the size of the job, and why it is fair, see `benchmarks.thinking_plan`.
"""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks import timed_training
from benchmarks.shared_gpu import shared_gpu
from benchmarks.side_by_side import Job, Meeting, run_all
from benchmarks.thinking_plan import TINY, Plan, Run
from benchmarks.thinking_tasks import TASKS
from benchmarks.timed_training import Clock
from replaylens.commands.train import CARD_FILE, thinking_card
from replaylens.engine.model import loading
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.thinking import model as thinking
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.score import Score, score
from replaylens.engine.training.thinking import METHODS, Method, Model, ThinkingRecipe
from replaylens.engine.zoo import coin as zoo
from replaylens.engine.zoo import thinking as thinking_zoo

EMBEDDED = "coin-thinking"


def one_run(plan: Plan, run: Run, clock: Clock, out: Path, number: int, meeting: Meeting) -> None:
    """Train and test one cell of the table; writes <method>-<N>-<seed>.json."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    method, n, seed = run
    recipe = plan.recipe(method, n, seed)
    texts = thinking_train.texts_of(recipe, plan.device)
    built = clock.now()
    steps = plan.steps or meeting.steps(number, recipe, texts, plan.device, clock, plan.train_until, plan.most_steps)
    recipe = replace(recipe, steps=steps, warmup=min(100, steps // 10))
    begin = clock.now()
    model, losses = timed_training.train(recipe, texts, plan.device, clock, plan.train_until)
    trained, done, loss = clock.now(), len(losses), losses[-1]
    if method == "thinking" or (seed == plan.seeds[0] and n in (plan.longest[0], plan.longest[-1])):
        _save(model, recipe, out / f"model-{method}-{n}{f'-{seed}' if seed else ''}")
    result: dict[str, Any] = dict(
        method=method, N=n, seed=seed, steps=done, planned=steps, final_loss=loss, setup_seconds=built,
        train_seconds=trained - begin, tokens_per_step=recipe.batch * plan.width,
        curve=curve_of(plan, recipe, model.to(plan.device)), test_seconds=clock.now() - trained,
    )  # fmt: skip
    (out / f"{method}-{n}-{seed}.json").write_text(json.dumps(result))
    done_line = f"{method:8s} N={n:<3d} seed {seed}  {done} steps  loss {loss:.3f}  {_summary(result)}"
    print(f"{clock.now():5.0f} s  {done_line}", flush=True)


def curve_of(plan: Plan, recipe: ThinkingRecipe, model: Model) -> dict[int, dict[str, float]]:
    """Percent of right answers and right thoughts by length; all lengths in few batches."""
    lengths, number = plan.lengths(recipe.longest), plan.examples
    examples = [example for length in lengths for example in zoo.held_out(recipe.parts[0], length, number)]
    scores = score(model, recipe.method, recipe.thinking, recipe.tokenizer(), examples, plan.tested_together, recipe.precision)
    return {length: _shares(scores[i * number : (i + 1) * number]) for i, length in enumerate(lengths)}


def _shares(scores: list[Score]) -> dict[str, float]:
    return {name: mean(100.0 * getattr(s, name) for s in scores) for name in ("answered", "thought")}


def _save(model: Model, recipe: ThinkingRecipe, folder: Path) -> None:
    model = model.cpu()
    (loading.save if isinstance(model, Decoder) else thinking.save)(model, folder)  # type: ignore[arg-type]
    recipe.tokenizer().save(folder / zoo.TOKENIZER_FILE)


def embedded(plan: Plan, clock: Clock, out: Path) -> None:
    """Train the embedded model exactly as `replaylens train coin-thinking` does. If time is short, its card says so."""
    torch.set_num_threads(1)
    steps = plan.embedded_steps
    recipe = replace(thinking_zoo.recipe(EMBEDDED), steps=steps, warmup=min(100, steps // 10), pool=plan.embedded_pool)
    begin, texts = clock.now(), thinking_train.texts_of(recipe, plan.device)
    model, losses = timed_training.train(recipe, texts, plan.device, clock, plan.train_until)
    model = model.cpu()
    assert not isinstance(model, Decoder)
    thinking_zoo.save(model, recipe.tokenizer(), out / EMBEDDED)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "a CPU"
    cut = "" if len(losses) == recipe.steps else f", CUT SHORT after {len(losses)} steps"
    command = f"replaylens train {EMBEDDED} --device {plan.device}"
    beside = f"{name} beside {len(plan.runs())} other runs, torch {torch.__version__}{cut}"
    made = f"`{command}`, {clock.now() - begin:.0f} s on {beside}"
    (out / EMBEDDED / CARD_FILE).write_text(thinking_card(EMBEDDED, recipe, model.to(plan.device), made, plan.examples))
    print(
        f"{clock.now():5.0f} s  {EMBEDDED} done: {len(losses)} steps\n" + (out / EMBEDDED / CARD_FILE).read_text(), flush=True
    )


def _summary(result: dict[str, Any]) -> str:
    inside = [v["answered"] for k, v in result["curve"].items() if int(k) <= result["N"]]
    beyond = [v["answered"] for k, v in result["curve"].items() if int(k) > result["N"]]
    return f"in distribution {mean(inside):.1f}  beyond {mean(beyond) if beyond else float('nan'):.1f}"


def collect(plan: Plan, out: Path, clock: Clock) -> None:
    """One table from all runs that left a file, as JSON and printed."""
    files = [out / f"{method}-{n}-{seed}.json" for method, n, seed in plan.runs()]
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    rows = [_row(plan, method, n, runs) for method in reversed(METHODS) if method in plan.methods for n in plan.longest]
    for row in rows:
        shown = {k: "-" if row[k] is None else f"{row[k][0]:6.2f} ± {row[k][1]:.2f}" for k in ("inside", "beyond")}
        what = f"{row['method']:9s} N={row['N']:<3d} seeds {row['seeds']}"
        print(f"{what}  in distribution {shown['inside']}  beyond {shown['beyond']}  published {row['published']}")
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "cpu"
    body = dict(device=device, torch=torch.__version__, seconds=clock.now(), plan=plan.__dict__, table=rows, runs=runs)
    (out / plan.result_file).write_text(json.dumps(body, indent=1))


def _row(plan: Plan, method: Method, n: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of a cell's accuracy, up to N and beyond."""
    group = [r for r in runs if (r["method"], r["N"]) == (method, n)]
    row: dict[str, Any] = dict(method=method, N=n, seeds=len(group), steps=[r["steps"] for r in group])
    row["published"] = plan.table_task.published.get((method, n))
    for where, beyond in (("inside", False), ("beyond", True)):
        curves = [[v["answered"] for k, v in r["curve"].items() if (int(k) > n) == beyond] for r in group]
        means = [mean(curve) for curve in curves if curve]
        row[where] = [mean(means), pstdev(means)] if means else None
    return row


def work(plan: Plan, out: Path, clock: Clock) -> None:
    """All runs, some in parallel, until they end or the time is up."""
    context = mp.get_context("spawn")
    runs = plan.runs()
    meeting = Meeting(context, len(runs))
    jobs: list[Job] = [(embedded, EMBEDDED, (plan, clock, out))] if plan.embedded else []
    jobs += [(one_run, "-".join(map(str, r)), (plan, r, clock, out, i, meeting)) for i, r in enumerate(runs)]
    run_all(context, jobs, out, clock, plan.seconds, plan.at_once or len(jobs))


def main() -> None:
    """Parse, run, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", default="parity", choices=TASKS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=455.0, help="after this the job ends, finished or not")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results/thinking")))
    parser.add_argument("--tiny", action="store_true", help="a few steps of small models, as a smoke test")
    parser.add_argument("--no-mps", action="store_true", help="do not try NVIDIA's multi-process service")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, help="with fewer of them, each gets more steps"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="with fewer of them, each gets more steps")
    parser.add_argument("--longest", nargs="+", type=int, help="N: maximum number of operations of a training text")
    parser.add_argument("--beyond", nargs="+", type=int, help="tested numbers of operations; those above N count as beyond")
    parser.add_argument("--width", type=int, help="tokens per training row; the longest tested text must fit")
    parser.add_argument("--batch", type=int, help="training rows per step")
    parser.add_argument("--steps", type=int, help="steps of every run; default: as many as all can reach in the given time")
    parser.add_argument("--at-once", type=int, help="parallel runs; default: all. Needs --steps")
    parser.add_argument("--cut", action="store_true", help="also train Thinking States to continue from its state alone")
    parser.add_argument("--table-only", action="store_true", help="parity without the embedded model")
    options = parser.parse_args()
    if options.at_once and not options.steps:
        parser.error("--at-once needs --steps: runs that do not run together cannot agree on a number")
    given: dict[str, Any] = {
        name: tuple(getattr(options, name)) for name in ("seeds", "longest", "beyond") if getattr(options, name)
    }
    given |= {name: getattr(options, name) for name in ("width", "batch") if getattr(options, name)}
    size = (TINY if options.tiny else {}) | given
    plan = Plan(
        options.seconds,
        options.device,
        options.task,
        tuple(options.methods),
        cut=options.cut,
        embedded=options.task == "parity" and not options.table_only,
        steps=options.steps,
        at_once=options.at_once,
        **size,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # exiting ends the child processes, too
    clock, out = Clock(time.time()), options.out / plan.task
    out.mkdir(parents=True, exist_ok=True)
    with shared_gpu(options.device == "cuda" and not options.no_mps):
        work(plan, out, clock)
    collect(plan, out, clock)


if __name__ == "__main__":
    main()
