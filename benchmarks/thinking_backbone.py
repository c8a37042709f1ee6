"""The paper's table with SmolLM2-135M as the pretrained backbone: one job for one GPU.

    PYTHONPATH=src:. python -m benchmarks.thinking_backbone                            # N = 10, 20, 40, three methods, seed 0
    PYTHONPATH=src:. python -m benchmarks.thinking_backbone --seeds 1 2 --methods thinking --side-by-side 2
    PYTHONPATH=src:. python -m benchmarks.thinking_backbone --tiny --device cpu        # smoke test
    PYTHONPATH=src:. python -m benchmarks.thinking_backbone --pack trained/smollm2     # the backbone in pieces, for transfer
    PYTHONPATH=src:. python -m benchmarks.thinking_backbone --backbone trained/smollm2 # from pieces, or from any model folder

Texts, tested lengths and table are those of `benchmarks.thinking_gpu`, in the backbone's tokens: an operation has 6 or 7,
sometimes 8, so a chunk of 8 decides one or two. Rows are packed with texts up to 832 tokens, the length of the longest test
with its chain of thought. Runs go one after another, or in several parallel rows; all train for the same number of steps, as
many as the time allows. Training and tests use bfloat16 with float32 weights. Every run is written when it is done, to
thinking-backbone/ under $OUT (or --out); the table of all runs is thinking-backbone.json.
"""

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks import timed_training
from benchmarks.packed_backbone import pack, unpack
from benchmarks.thinking_gpu import collect, curve_of
from benchmarks.thinking_plan import Plan, Run
from benchmarks.thinking_tasks import TASKS
from benchmarks.timed_training import Clock
from replaylens.engine.model import hub, loading
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.recipe import backbone_folder, load_tokenizer
from replaylens.engine.training.thinking import METHODS, Method, ThinkingRecipe
from replaylens.engine.zoo import coin as zoo

NAME = "thinking-backbone"
CHUNK, MAX_THOUGHT = 8, 8


@dataclass(frozen=True, kw_only=True)
class BackbonePlan(Plan):
    """The size of the job."""

    backbone: str
    """smollm2, or a model folder"""
    seeds: tuple[int, ...] = (0,)
    width: int = 832
    texts: int = 5120
    most_steps: int = 2000
    examples: int = 50
    lr: float = 2e-4
    completion_weight: float = 20.0
    aside: float = 30.0
    """seconds per run for its texts and its test"""

    @property
    def result_file(self) -> str:
        return f"{NAME}.json"

    def recipe(self, method: Method, n: int, seed: int) -> ThinkingRecipe:
        config, tokenizer = _config(self.backbone), load_tokenizer(backbone_folder(self.backbone))
        thinks = ThinkingConfig.for_backbone(config, CHUNK, tokenizer.eos_id, tokenizer.pad_id, max_thought=MAX_THOUGHT)
        return ThinkingRecipe(
            config=config,
            thinking=thinks,
            backbone=self.backbone,
            precision="bf16",
            method=method,
            width=self.width,
            cut=self.cut and method == "thinking",
            parts=(self.table_task.part,),
            longest=n,
            steps=self.most_steps,
            batch=self.batch,
            lr=self.lr,
            seed=seed,
            warmup=min(100, self.most_steps // 10),
            curriculum=0.0,
            completion_weight=self.completion_weight,
            pool=max(1, self.texts // n),
        )


@lru_cache(1)
def _config(backbone: str) -> ModelConfig:
    return loading.load(backbone_folder(backbone)).config


class Agreement:
    """All rows of runs train for the same number of steps, which the slowest can reach."""

    def __init__(self, rows: int) -> None:
        context = mp.get_context("spawn")
        self.offers, self.meeting = context.Array("q", rows), context.Barrier(rows)

    def least(self, row: int, steps: int) -> int:
        """The smallest value, once all have given theirs."""
        self.offers[row] = steps
        self.meeting.wait(timeout=200)
        return min(self.offers[:])


def row_of_runs(plan: BackbonePlan, runs: list[Run], row: int, agreement: Agreement, clock: Clock, out: Path) -> None:
    """Runs one after another. A failing run prints its traceback, and the others continue."""
    pace = {method: _pace(plan, method) for method in sorted({method for method, _, _ in runs})}
    time_left = plan.seconds - clock.now() - plan.aside * len(runs)
    steps = agreement.least(row, max(2, min(plan.most_steps, int(time_left / sum(pace[method] for method, _, _ in runs)))))
    for run in runs:
        name = "-".join(map(str, run))
        if clock.now() > plan.seconds - plan.aside:
            print(f"{clock.now():5.0f} s  no time left for {name}", flush=True)
            continue
        try:
            one_run(plan, run, steps, clock, out)
        except Exception:
            (out / f"failed-{name}.txt").write_text(traceback.format_exc())
            print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def _pace(plan: BackbonePlan, method: Method) -> float:
    """Seconds per step, while other rows of runs measure the same. Rows are full, so the lengths of texts do not matter."""
    recipe = replace(plan.recipe(method, plan.longest[0], 0), pool=8)
    warm, timed = (8, 12) if plan.device == "cuda" else (1, 2)
    return timed_training.seconds_per_step(recipe, thinking_train.texts_of(recipe, plan.device), plan.device, warm, timed)


def one_run(plan: BackbonePlan, run: Run, steps: int, clock: Clock, out: Path) -> None:
    """Train and test one cell of the table; writes <method>-<N>-<seed>.json. Stops when the job's time is up."""
    method, n, seed = run
    begin, recipe = clock.now(), replace(plan.recipe(method, n, seed), steps=steps, warmup=min(100, steps // 10))
    texts = thinking_train.texts_of(recipe, plan.device)
    ready = clock.now()
    model, losses = timed_training.train(recipe, texts, plan.device, clock, plan.seconds - plan.aside)
    trained = clock.now()
    curve = curve_of(plan, recipe, model.to(plan.device))
    result = dict(
        method=method, N=n, seed=seed, steps=len(losses), planned=steps, final_loss=losses[-1], losses=losses[::25],
        setup_seconds=ready - begin, train_seconds=trained - ready, test_seconds=clock.now() - trained,
        tokens_per_step=recipe.batch * plan.width, recipe=json.loads(recipe.to_json()), curve=curve,
    )  # fmt: skip
    (out / f"{method}-{n}-{seed}.json").write_text(json.dumps(result))
    shown = " ".join(f"{length}:{share['answered']:.0f}" for length, share in curve.items())
    print(f"{clock.now():5.0f} s  {method:8s} N={n:<3d} seed {seed}  {len(losses)} steps in {trained - ready:.0f} s, tested in "
          f"{clock.now() - trained:.0f} s  loss {losses[-1]:.3f}  {shown}", flush=True)  # fmt: skip


def work(plan: BackbonePlan, rows: int, clock: Clock, out: Path) -> None:
    """All runs, in parallel rows with one process each."""
    agreement = Agreement(rows)
    jobs = [(plan, plan.runs()[row::rows], row, agreement, clock, out) for row in range(rows)]
    if rows == 1:
        row_of_runs(*jobs[0])
        return
    started = [mp.get_context("spawn").Process(target=row_of_runs, args=job) for job in jobs]
    for process in started:
        process.start()
    for process in started:
        process.join()


TINY: dict[str, Any] = dict(
    longest=(2, 3), beyond=(4, 6), width=112, batch=2, texts=24, most_steps=4, examples=4, tested_together=64, aside=2.0
)  # fmt: skip
"""a few steps of a small model, as a smoke test"""


def tiny_backbone(tokenizer_of: Path, folder: Path) -> Path:
    """Three random layers with the tokens of a real model."""
    tokenizer = load_tokenizer(tokenizer_of)
    config = ModelConfig(
        num_layers=3, d_model=64, num_heads=2, num_kv_heads=1, d_head=32, d_mlp=96, vocab_size=tokenizer.vocab_size,
        max_positions=1024, rotary_dim=32,
    )  # fmt: skip
    loading.save(Decoder(config).initialize(0), folder)
    tokenizer.save(folder / zoo.TOKENIZER_FILE)
    return folder


def main() -> None:
    """Parse, run, collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", default="parity", choices=TASKS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=1500.0, help="time for all runs together")
    parser.add_argument("--steps", type=int, help="maximum number of steps per run; fewer if time is short")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmarks/results")))
    parser.add_argument("--backbone", default=hub.SHORT, help="smollm2, a model folder, or a folder of --pack")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--longest", nargs="+", type=int, help="N: maximum number of operations of a training text")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--side-by-side", type=int, default=1, help="parallel rows of runs")
    parser.add_argument("--cut", action="store_true", help="also train Thinking States to continue from its state alone")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model, as a smoke test")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write SmolLM2 there in pieces, and do nothing else")
    options = parser.parse_args()
    if options.pack is not None:
        for piece in pack(hub.fetched_folder(), options.pack):
            print(f"{piece}  {piece.stat().st_size:,} bytes")
        return
    out, backbone = options.out / NAME, options.backbone
    out.mkdir(parents=True, exist_ok=True)
    if backbone != hub.SHORT:
        unpack(backbone_folder(backbone))
    if options.tiny:
        backbone = str(tiny_backbone(backbone_folder(backbone), out / "backbone"))
    given = dict(longest=options.longest, seeds=options.seeds, most_steps=options.steps, lr=options.lr)
    size = (TINY if options.tiny else {}) | {
        k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None
    }
    plan = BackbonePlan(
        seconds=options.seconds, device=options.device, task=options.task, methods=tuple(options.methods), backbone=backbone,
        cut=options.cut, embedded=False, **size,
    )  # fmt: skip
    clock = Clock(time.time())
    work(plan, options.side_by_side, clock, out)
    collect(plan, out, clock)
    (out / plan.result_file).replace(options.out / plan.result_file)


if __name__ == "__main__":
    main()
