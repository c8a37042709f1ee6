"""Training and testing the runs of a table as parallel processes on one device: `trained` returns what each of them found."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from threading import BrokenBarrierError
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.thinking_plans import Run
from replaylens.commands.train import save
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.score import score
from replaylens.engine.training.thinking import ChunkedTexts, Model, ThinkingRecipe

TESTED_TOGETHER = 256
"""texts of a batch in the test"""
Result = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Time and place of a job."""

    seconds: float
    """after this the job ends, finished or not"""
    device: str
    at_once: int | None = None
    """parallel runs; None: all, which then agree on a number of steps"""
    warm: int = 15
    timed: int = 25
    """warm-up and timed steps, by which the runs agree"""
    begin: float = 0.0

    @property
    def train_until(self) -> float:
        """Seconds after which training stops; the rest is for testing. If runs take turns, most are tested by then."""
        return (0.75 if self.at_once is None else 0.9) * self.seconds

    def now(self) -> float:
        """Seconds since the job began, the same in all its processes."""
        return time.time() - self.begin


# One run


class _TimeIsUp(Exception):
    """Training ran into the time limit."""


def follow(recipe: ThinkingRecipe, texts: ChunkedTexts, limits: Limits) -> tuple[Model, list[float]]:
    """The model and the loss of every step: all steps of the recipe, or as many as the time allowed."""
    model, losses = thinking_train.initial(recipe), []

    def watch(done: int, loss: float) -> None:
        losses.append(loss)
        if limits.now() > limits.train_until and done < recipe.steps:
            raise _TimeIsUp

    try:
        thinking_train.follow(recipe, texts, model, limits.device, after_step=watch)
    except _TimeIsUp:
        model.requires_grad_(False)
    return model, losses


def curve_of(run: Run, model: Model) -> dict[int, dict[str, float]]:
    """Percent of right answers, and of texts with every thought right, by number of steps."""
    recipe, number = run.recipe, run.examples
    examples = [example for length in run.lengths for example in zoo.held_out(recipe.parts[0], length, number)]
    found = score(model, recipe.method, recipe.thinking, recipe.tokenizer(), examples, TESTED_TOGETHER, recipe.precision)
    groups = {length: found[i * number : (i + 1) * number] for i, length in enumerate(run.lengths)}
    return {
        length: {name: mean(100.0 * getattr(s, name) for s in group) for name in ("answered", "thought")}
        for length, group in groups.items()
    }


def one_run(run: Run, number: int, meeting: "Meeting | None", limits: Limits, out: Path) -> None:
    """Train and test one model; writes NAME.json, and model-NAME if it is to be kept."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = run.recipe.backbone is None
    texts = thinking_train.texts_of(run.recipe, limits.device)
    steps = run.recipe.steps if meeting is None else meeting.steps(number, run.recipe, texts, limits)
    recipe = replace(run.recipe, steps=steps, warmup=min(100, steps // 10))
    begin = limits.now()
    model, losses = follow(recipe, texts, limits)
    trained = limits.now()
    if run.keep:
        save(model.cpu(), recipe, out / f"model-{run.name}")
    result: Result = dict(
        name=run.name, kind=run.kind, **run.arm, steps=len(losses), planned=steps, final_loss=mean(losses[-20:]),
        losses=losses[::50], weights=sum(x.numel() for x in model.parameters()), setup_seconds=begin,
        train_seconds=trained - begin, tokens_per_step=recipe.batch * (recipe.width or 0), recipe=json.loads(recipe.to_json()),
        curve=curve_of(run, model.to(limits.device)), test_seconds=limits.now() - trained,
    )  # fmt: skip
    (out / f"{run.name}.json").write_text(json.dumps(result))
    right = " ".join(f"{length}:{found['answered']:.0f}" for length, found in result["curve"].items())
    print(f"{limits.now():5.0f} s  {run.name}: {len(losses)} steps, loss {losses[-1]:.3f}, right {right}", flush=True)


def _guarded(run: Run, *given: Any) -> None:
    try:
        one_run(run, *given)
    except Exception:
        print(f"FAILED {run.name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.exit(1)


# All runs


class Meeting:
    """What the runs of a job agree on: a number of steps that the slowest can reach. Made before the processes start."""

    def __init__(self, context: Any, runs: int) -> None:
        self.rates, self.barrier = context.Array("d", runs), context.Barrier(runs)

    def steps(self, number: int, recipe: ThinkingRecipe, texts: ChunkedTexts, limits: Limits) -> int:
        """The number of steps that all runs can take in time; called by run `number`."""
        self._meet()  # so that the pace is measured while all run
        self.rates[number] = seconds_per_step(recipe, texts, limits)
        self._meet()
        return max(20, min(recipe.steps, int(0.9 * (limits.train_until - limits.now()) / max(self.rates))))

    def _meet(self) -> None:
        """Wait for the other runs, with a timeout, and not for failed ones."""
        try:
            self.barrier.wait(timeout=150)
        except BrokenBarrierError:
            print("a run is missing; the others continue", flush=True)


def seconds_per_step(recipe: ThinkingRecipe, texts: ChunkedTexts, limits: Limits) -> float:
    """Median of some steps after others, on a model that is discarded; the first step of a new shape takes longer."""
    short = replace(recipe, steps=limits.warm + limits.timed, warmup=0)
    ticks: list[float] = []
    model = thinking_train.initial(short)
    thinking_train.follow(short, texts, model, limits.device, after_step=lambda done, loss: ticks.append(time.time()))
    return median(after - before for before, after in pairwise(ticks[limits.warm - 1 :]))


def trained(runs: Sequence[Run], limits: Limits, models: Path | None = None) -> list[Result]:
    """Train and test all runs, up to `at_once` in parallel, until they end or the time is up. Runs that failed or did not end
    are missing in the result, and said. models: a folder for the models that runs keep."""
    limits = replace(limits, begin=time.time())
    context = mp.get_context("spawn")
    meeting = Meeting(context, len(runs)) if limits.at_once is None and len(runs) > 1 else None
    with tempfile.TemporaryDirectory() as name, shared_gpu(limits.device == "cuda"):
        out = Path(name)
        waiting = [
            context.Process(target=_guarded, args=(run, number, meeting, limits, out), name=run.name, daemon=True)
            for number, run in enumerate(runs)
        ]
        running: list[Any] = []
        while (waiting or running) and limits.now() < limits.seconds:
            while waiting and len(running) < (limits.at_once or len(runs)):
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.1)
            running = [process for process in running if process.is_alive()]
        for process in running:
            print(f"{limits.now():5.0f} s  {process.name} did not end in time", flush=True)
            process.terminate()
        for folder in out.glob("model-*") if models is not None else ():
            shutil.copytree(folder, Path(models or out) / folder.name, dirs_exist_ok=True)
        files = [out / f"{run.name}.json" for run in runs]
        return [json.loads(file.read_text()) for file in files if file.exists()]


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[None]:
    """Processes run concurrently on the GPU if NVIDIA's multi-process service works, or take turns. Prints which."""
    control, folder = shutil.which("nvidia-cuda-mps-control"), Path(tempfile.gettempdir()) / "mps"
    if not wanted or control is None:
        print("no multi-process service: runs on a GPU take turns", flush=True)
        yield
        return
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in settings.values():
        Path(path).mkdir(exist_ok=True, parents=True)
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
