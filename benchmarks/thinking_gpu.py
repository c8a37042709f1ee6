"""The paper's parity table from scratch, and the embedded model `coin-thinking`: one job for one GPU.

    PYTHONPATH=src:. python -m benchmarks.thinking_gpu                     # about 8 minutes on an H200 with 16 cores
    PYTHONPATH=src:. python -m benchmarks.thinking_gpu --tiny --device cpu # does it run at all

Train on texts of up to N = 10, 20, 40 operations, test on lengths up to 100: no chain of thought, chain of thought, Thinking
States, three seeds each. All runs go side by side, a process each; they agree on the number of steps that the slowest of
them can do in the time there is. Everything goes to $OUT (or --out), each run as it ends.

Positions: every training row is filled with texts up to 768 tokens, so all methods are trained at all positions and distances
that the test has; only the length of a single text is new in the test. Test texts stand alone and begin at position 0.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from threading import BrokenBarrierError
from typing import Any

import torch
import torch.multiprocessing as mp

from replaylens.commands.train_thinking import CARD_FILE, card
from replaylens.engine import thinking, thinking_train, thinking_zoo, weights, zoo
from replaylens.engine.config import ModelConfig
from replaylens.engine.model import Decoder
from replaylens.engine.thinking import ThinkingConfig
from replaylens.engine.thinking_score import score
from replaylens.engine.thinking_texts import METHODS, ChunkedTexts, Method
from replaylens.engine.thinking_train import Model, ThinkingRecipe
from replaylens.engine.train import Part
from replaylens.tasks import WordTokenizer

EMBEDDED = "coin-thinking"
PARITY = Part("coin", 1.0, (("rendering", "states"),))
"""the paper's own text: The coin starts at state heads. Alice doesn't flip the coin. ..."""
CHUNK = 6
"""an operation has 5 or 6 words and signs, so every chunk between the first and the last decides one or two"""
PUBLISHED = {("none", 10): 54.67, ("none", 20): 57.50, ("none", 40): 59.60, ("cot", 10): 12.35, ("cot", 20): 38.12,
             ("cot", 40): 64.38, ("thinking", 10): 98.37, ("thinking", 20): 99.02, ("thinking", 40): 100.0}  # fmt: skip
"""percent on lengths beyond N up to 100, Qwen2.5-0.5B"""
WARM, TIMED = 15, 25
"""steps before the clock, and on it, when the runs agree on a number of steps"""


@dataclass(frozen=True)
class Plan:
    """How large the job is."""

    seconds: float
    """after this the job ends, whatever is done"""
    device: str
    methods: tuple[Method, ...] = METHODS
    longest: tuple[int, ...] = (10, 20, 40)
    seeds: tuple[int, ...] = (0, 1, 2)
    d_model: int = 64
    width: int = 768
    batch: int = 8
    texts: int = 10240
    """training texts of a run, over all lengths"""
    most_steps: int = 8000
    examples: int = 100
    """per tested length"""
    beyond: tuple[int, ...] = (20, 30, 40, 50, 60, 70, 80, 90, 100)
    cut: bool = False
    """train Thinking States with `ThinkingRecipe.cut`"""
    embedded: bool = True
    """train the embedded model, too"""
    embedded_steps: int = 3000
    embedded_pool: int = 4096

    @property
    def train_until(self) -> float:
        """Seconds after which nothing trains any more: the rest is for testing."""
        return 0.75 * self.seconds

    def runs(self) -> list[tuple[Method, int, int]]:
        return [(method, n, seed) for seed in self.seeds for n in self.longest for method in self.methods]

    def lengths(self, n: int) -> list[int]:
        """Tested lengths of a run: five up to N, then those beyond."""
        return sorted({max(1, n * k // 5) for k in range(1, 6)} | {length for length in self.beyond if length > n})

    def recipe(self, method: Method, n: int, seed: int) -> ThinkingRecipe:
        config = ModelConfig(
            num_layers=4, d_model=self.d_model, num_heads=self.d_model // 32, num_kv_heads=self.d_model // 32, d_head=32,
            d_mlp=3 * self.d_model, vocab_size=106, max_positions=1024, rotary_dim=32,
        )  # fmt: skip
        words = WordTokenizer
        return ThinkingRecipe(
            config=config,
            thinking=ThinkingConfig.for_backbone(config, CHUNK, words.eos_id, words.pad_id, max_thought=4),
            method=method,
            width=self.width,
            cut=self.cut and method == "thinking",
            parts=(PARITY,),
            longest=n,
            steps=self.most_steps,
            batch=self.batch,
            lr=1e-3,
            seed=seed,
            warmup=min(100, self.most_steps // 10),
            pool=max(1, self.texts // n),
        )


class TimeIsUp(Exception):
    """Training ran into the time limit."""


class Clock:
    """Seconds since the job began, the same in all its processes."""

    def __init__(self, begin: float) -> None:
        self.begin = begin

    def now(self) -> float:
        return time.time() - self.begin


def one_run(plan: Plan, run: tuple[Method, int, int], clock: Clock, out: Path, rates: Any, number: int, meeting: Any) -> None:
    """Train and test one cell of the table; writes <method>-<N>-<seed>.json, and again after each tested length."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    method, n, seed = run
    recipe = plan.recipe(method, n, seed)
    texts = thinking_train.texts_of(recipe, plan.device)
    built = clock.now()
    rates[number] = _seconds_per_step(recipe, texts, plan, meeting)
    _meet(meeting)
    left, slowest = plan.train_until - clock.now(), max(rates)
    steps = max(20, min(plan.most_steps, int(0.9 * left / slowest)))
    recipe = replace(recipe, steps=steps, warmup=min(100, steps // 10))
    begin = clock.now()
    model, done, loss = _train(recipe, texts, plan, clock)
    result = dict(method=method, N=n, seed=seed, steps=done, planned=steps, final_loss=loss, train_seconds=clock.now() - begin,
                  setup_seconds=built, tokens_per_step=recipe.batch * plan.width, curve={})  # fmt: skip
    if method == "thinking" or (seed == plan.seeds[0] and n in (plan.longest[0], plan.longest[-1])):
        _save(model, recipe, out / f"model-{method}-{n}{f'-{seed}' if seed else ''}")
    model.to(plan.device)
    for length in plan.lengths(n):
        scores = score(model, method, recipe.thinking, recipe.tokenizer(), zoo.held_out(PARITY, length, plan.examples))
        right = [mean(100.0 * getattr(s, name) for s in scores) for name in ("answered", "thought")]
        result["curve"][length] = dict(zip(("answered", "thought"), right, strict=True)) | {"rounds": scores[0].rounds}
        (out / f"{method}-{n}-{seed}.json").write_text(json.dumps(result))
    print(
        f"{clock.now():5.0f} s  {method:8s} N={n:<3d} seed {seed}  {done} steps  loss {loss:.3f}  {_summary(result)}",
        flush=True,
    )


def _meet(meeting: Any) -> None:
    """Wait for the other runs; not for ever, and not for one that failed."""
    try:
        meeting.wait(timeout=150)
    except BrokenBarrierError:
        print("a run is missing; the others go on", flush=True)


def _seconds_per_step(recipe: ThinkingRecipe, texts: ChunkedTexts, plan: Plan, meeting: Any) -> float:
    """Of a model that is thrown away, while all other runs do the same."""
    short = replace(recipe, steps=WARM + TIMED, warmup=0)
    ticks: list[float] = []
    _meet(meeting)
    thinking_train.follow(
        short, texts, thinking_train.initial(short), plan.device, after_step=lambda done, loss: ticks.append(time.time())
    )
    return (ticks[-1] - ticks[WARM - 1]) / TIMED


def _train(recipe: ThinkingRecipe, texts: ChunkedTexts, plan: Plan, clock: Clock) -> tuple[Model, int, float]:
    """The model, the steps it got, and its last loss; cut short when the time is up."""
    model, last = thinking_train.initial(recipe), (0, 0.0)

    def watch(done: int, loss: float) -> None:
        nonlocal last
        last = (done, loss)
        if clock.now() > plan.train_until:
            raise TimeIsUp

    try:
        thinking_train.follow(recipe, texts, model, plan.device, after_step=watch)
    except TimeIsUp:
        model.requires_grad_(False)
    return model, *last


def _save(model: Model, recipe: ThinkingRecipe, folder: Path) -> None:
    model = model.cpu()
    (weights.save if isinstance(model, Decoder) else thinking.save)(model, folder)  # type: ignore[arg-type]
    recipe.tokenizer().save(folder / zoo.TOKENIZER_FILE)


def embedded(plan: Plan, clock: Clock, out: Path) -> None:
    """Train the embedded model exactly as `replaylens train coin-thinking` does. If time is short, its card says so."""
    torch.set_num_threads(1)
    steps = plan.embedded_steps
    recipe = replace(thinking_zoo.recipe(EMBEDDED), steps=steps, warmup=min(100, steps // 10), pool=plan.embedded_pool)
    begin, model, last = clock.now(), thinking_train.initial(recipe), 0
    texts = thinking_train.texts_of(recipe, plan.device)

    def watch(done: int, loss: float) -> None:
        nonlocal last
        last = done
        if done % 500 == 0:
            print(f"{clock.now():5.0f} s  {EMBEDDED} {done} steps, loss {loss:.4f}", flush=True)
        if clock.now() > plan.train_until:
            raise TimeIsUp

    try:
        thinking_train.follow(recipe, texts, model, plan.device, after_step=watch)
    except TimeIsUp:
        model.requires_grad_(False)
    model = model.cpu()
    assert not isinstance(model, Decoder)
    thinking_zoo.save(model, recipe.tokenizer(), out / EMBEDDED)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "a CPU"
    cut = "" if last == recipe.steps else f", CUT SHORT after {last} steps"
    command = f"replaylens train {EMBEDDED} --device {plan.device}"
    beside = f"{name} beside {len(plan.runs())} other runs, torch {torch.__version__}{cut}"
    made = f"`{command}`, {clock.now() - begin:.0f} s on {beside}"
    (out / EMBEDDED / CARD_FILE).write_text(card(EMBEDDED, recipe, model.to(plan.device), made, plan.examples))
    print(f"{clock.now():5.0f} s  {EMBEDDED} done: {last} steps\n" + (out / EMBEDDED / CARD_FILE).read_text(), flush=True)


def _guarded(work: Any, name: str, out: Path, arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except Exception:
        (out / f"failed-{name}.txt").write_text(traceback.format_exc())
        print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def _summary(result: dict[str, Any]) -> str:
    inside = [v["answered"] for k, v in result["curve"].items() if int(k) <= result["N"]]
    beyond = [v["answered"] for k, v in result["curve"].items() if int(k) > result["N"]]
    return f"in distribution {mean(inside):.1f}  beyond {mean(beyond) if beyond else float('nan'):.1f}"


def collect(plan: Plan, out: Path, clock: Clock) -> None:
    """One table from all runs that left a file: thinking.json, and on the screen."""
    files = [out / f"{method}-{n}-{seed}.json" for method, n, seed in plan.runs()]
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    rows = [_row(method, n, runs) for method in reversed(METHODS) if method in plan.methods for n in plan.longest]
    for row in rows:
        shown = {k: "-" if row[k] is None else f"{row[k][0]:6.2f} ± {row[k][1]:.2f}" for k in ("inside", "beyond")}
        what = f"{row['method']:9s} N={row['N']:<3d} seeds {row['seeds']}"
        print(f"{what}  in distribution {shown['inside']}  beyond {shown['beyond']}  published {row['published']}")
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "cpu"
    body = dict(device=device, torch=torch.__version__, seconds=clock.now(), plan=plan.__dict__, table=rows, runs=runs)
    (out / "thinking.json").write_text(json.dumps(body, indent=1))


def _row(method: Method, n: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds of a cell's accuracy, up to N and beyond."""
    group = [r for r in runs if (r["method"], r["N"]) == (method, n)]
    row: dict[str, Any] = dict(method=method, N=n, seeds=len(group), steps=[r["steps"] for r in group])
    row["published"] = PUBLISHED.get((method, n))
    for where, beyond in (("inside", False), ("beyond", True)):
        curves = [[v["answered"] for k, v in r["curve"].items() if (int(k) > n) == beyond] for r in group]
        means = [mean(curve) for curve in curves if curve]
        row[where] = [mean(means), pstdev(means)] if means else None
    return row


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[None]:
    """NVIDIA's multi-process service, where it is there and works: else the processes take turns on the GPU. Says which."""
    control, folder = shutil.which("nvidia-cuda-mps-control"), Path("/tmp/mps")
    if not wanted or control is None:
        print("no multi-process service: the runs take turns", flush=True)
        yield
        return
    folder.mkdir(exist_ok=True)
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in settings.values():
        Path(path).mkdir(exist_ok=True)
    os.environ |= settings
    probe = [sys.executable, "-c", "import torch; x = torch.ones(64, 64, device='cuda'); assert float((x @ x).sum()) == 64**3"]
    try:
        subprocess.run([control, "-d"], check=True, timeout=20)
        subprocess.run(probe, check=True, timeout=60)
        print("multi-process service is on", flush=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"the multi-process service does not work here ({error}): the runs take turns", flush=True)
        _quit(control, settings)
    try:
        yield
    finally:
        if os.environ.keys() >= settings.keys():
            _quit(control, settings)


def _quit(control: str, settings: dict[str, str]) -> None:
    try:
        subprocess.run([control], input=b"quit\n", timeout=20, check=False)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not end the multi-process service: {error}", flush=True)
    for name in settings:
        del os.environ[name]


def work(plan: Plan, out: Path, clock: Clock) -> None:
    """All runs side by side, until they end or the time is up."""
    context = mp.get_context("spawn")
    runs = plan.runs()
    rates, meeting = context.Array("d", len(runs)), context.Barrier(len(runs))
    jobs: list[tuple[Any, str, tuple[Any, ...]]] = [(embedded, EMBEDDED, (plan, clock, out))] if plan.embedded else []
    jobs += [(one_run, "-".join(map(str, r)), (plan, r, clock, out, rates, i, meeting)) for i, r in enumerate(runs)]
    started = [context.Process(target=_guarded, args=(f, name, out, arguments), daemon=True) for f, name, arguments in jobs]
    for process in started:
        process.start()
    for process in started:
        process.join(max(0.1, plan.seconds - clock.now()))
    for process, (_, name, _) in zip(started, jobs, strict=True):
        if process.is_alive():
            print(f"{clock.now():5.0f} s  {name} did not end in time", flush=True)
            process.terminate()


TINY = dict(
    longest=(2, 3),
    seeds=(0,),
    d_model=32,
    width=96,
    batch=2,
    texts=24,
    most_steps=30,
    examples=4,
    beyond=(4, 6),
    embedded_steps=8,
    embedded_pool=8,
)


def main() -> None:
    """Parse, run, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=455.0, help="after this the job ends, whatever is done")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results/thinking")))
    parser.add_argument("--tiny", action="store_true", help="a few steps of small models: does it run at all")
    parser.add_argument("--no-mps", action="store_true", help="do not try NVIDIA's multi-process service")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="fewer of them get more steps each")
    parser.add_argument("--cut", action="store_true", help="train Thinking States to go on from its state alone, too")
    parser.add_argument("--table-only", action="store_true", help="do not train the embedded model")
    options = parser.parse_args()
    size: dict[str, Any] = {"embedded": not options.table_only, "methods": tuple(options.methods)} | (
        TINY if options.tiny else {}
    )
    plan = Plan(options.seconds, options.device, **size)
    clock = Clock(time.time())
    options.out.mkdir(parents=True, exist_ok=True)
    with shared_gpu(options.device == "cuda" and not options.no_mps):
        work(plan, options.out, clock)
    collect(plan, options.out, clock)


if __name__ == "__main__":
    main()
