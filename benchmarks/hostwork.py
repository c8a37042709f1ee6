"""The host's work per committed token of 64 branches, at 1,000 to 64,000 positions: it must not grow with the path.

    python -m benchmarks.hostwork

A stand-in for the runner skips the model's arithmetic, which reads all keys and so grows on any engine, and keeps every other
step: admission, page tables, batches, sampling, commits, captures, streams. The branches fork from one prompt. CPU seconds
(`time.process_time`), the best of several rounds, the lengths in turns.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import Tap
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.runner import PassResult
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

LENGTHS = (1_000, 8_000, 32_000, 64_000)
BRANCHES, STEPS, VOCAB = 64, 16, 61
MAX_GROWTH = 1.2


class Letters:
    """A tokenizer of one letter per token, of the kind whose text `Stops` may decode from the end."""

    is_fast, eos_token_id = True, None

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(65 + token) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(65 + token)


def host_engine(max_positions: int, cache_tokens: int) -> Engine:
    """An engine without arithmetic: the token at position p is a function of p, and every captured row is zero."""
    config = ModelConfig(
        num_layers=1,
        d_model=8,
        num_heads=1,
        num_kv_heads=1,
        d_head=8,
        d_mlp=8,
        vocab_size=VOCAB,
        max_positions=max_positions,
        rotary_dim=8,
    )
    engine = Engine(Decoder(config).initialize(0).requires_grad_(False), Letters(), cache_tokens=cache_tokens, max_rows=4096)
    runner = engine.runner

    def exact(segments: list[Segment], tap: Tap | None = None, stop_at_layer: int | None = None) -> PassResult:
        batch = Batch(segments, runner.pool, runner.certificate.query_rows, runner.tile, runner.device)
        _ = batch.write_slots
        residual = torch.zeros(batch.padded, config.d_model)
        for site in getattr(tap, "wanted", ()):
            assert tap is not None
            tap(site, residual)
        rows = batch.logit_rows()
        logits = torch.zeros(len(rows), VOCAB)
        logits[torch.arange(len(rows)), (batch.positions[rows] * 17 + 5) % VOCAB] = 3.0
        return PassResult(batch, residual, logits)

    runner.exact = runner.fast = exact  # type: ignore[method-assign, assignment]
    return engine


def branches(engine: Engine, length: int, count: int, sites: str | None = None) -> list[Branch]:
    """Forks of one path of `length` tokens, of which all but the first eight count as generated."""
    path = [(i * i) % VOCAB for i in range(length)]
    root = engine.prompt(path[:8], sites=sites).force(path[8:])
    forks = root.fork(count)
    root.release()
    return forks


def generate(engine: Engine, given: list[Branch], **options: Any) -> int:
    """Steps of all branches together, without drafts by default. Returns the number of tokens."""
    engine.generate(given, STEPS, **{"window": 1, **options})
    return STEPS * len(given)


def one_by_one(engine: Engine, given: list[Branch]) -> int:
    """A request per token."""
    for _ in range(STEPS):
        engine.generate(given, 1)
    return STEPS * len(given)


def streamed(engine: Engine, given: list[Branch]) -> int:
    """All branches as streams, read in turns."""
    streams = [branch.stream(STEPS, window=1) for branch in given]
    return sum(1 for _ in range(STEPS) for stream in streams if next(stream) is not None)


HARSH = Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.5)
WAYS: dict[str, tuple[Callable[[Engine, list[Branch]], int], str | None]] = {
    "greedy": (lambda engine, given: generate(engine, given), None),
    "sampled with penalties": (lambda engine, given: generate(engine, given, sampling=HARSH), None),
    "stop strings": (lambda engine, given: generate(engine, given, sampling=Sampling(stop=("never", "<end>"))), None),
    "one request per token": (one_by_one, None),
    "streams": (streamed, None),
    "S captured": (lambda engine, given: generate(engine, given), "S"),
    "drafter ngram": (lambda engine, given: generate(engine, given, drafter="ngram", window=4), None),
}
"""name -> what to do with the branches, and the sites captured on them"""


def microseconds(name: str, lengths: tuple[int, ...], count: int, rounds: int) -> dict[int, float]:
    """CPU time of the host per token, by length."""
    work, sites = WAYS[name]
    best = dict.fromkeys(lengths, float("inf"))
    engine = host_engine(max(lengths) + 4096, 2 * max(lengths) + 64 * count)
    for _ in range(rounds):
        for length in lengths:
            given = branches(engine, length, count, sites)
            generate(engine, given)  # the first step copies shared pages and makes what later steps extend
            work(engine, given)
            begin = time.process_time()
            tokens = work(engine, given)
            best[length] = min(best[length], 1e6 * (time.process_time() - begin) / tokens)
            for branch in given:
                branch.release()
            engine.prefix.clear()
    return best


def key_slots(lengths: tuple[int, ...], count: int) -> dict[int, float]:
    """The index of the attention's keys on a CPU: one entry per key, part of the gather that the arithmetic needs."""
    engine, best = host_engine(max(lengths) + 4096, 2 * max(lengths) + 64 * count), {}
    for length in lengths:
        given = branches(engine, length, count)
        times = []
        for _ in range(3):
            batch = Batch([Segment(b.lane.table, length - 1, [0]) for b in given], engine.runner.pool, (1,))
            begin = time.process_time()
            _ = batch.groups
            times.append(time.process_time() - begin)
        best[length] = 1e6 * min(times) / count
        for branch in given:
            branch.release()
    return best


def main(rounds: int, only: str) -> None:
    torch.set_num_threads(1)
    table = Table("hostwork-cpu", f"host work per token of {BRANCHES} branches, without the model's arithmetic, CPU time")
    for name in [name for name in WAYS if only in name]:
        best = microseconds(name, LENGTHS, BRANCHES, rounds)
        growth = best[LENGTHS[-1]] / best[LENGTHS[0]]
        shown = {f"us_at_{length}": us for length, us in best.items()}
        table.add(name, ratio=growth, aim=f"<= {MAX_GROWTH}", met=growth <= MAX_GROWTH, **shown)
        table.save(beside=True)
    if not only:
        shown = {f"us_at_{length}": us for length, us in key_slots(LENGTHS, BRANCHES).items()}
        table.add("the attention's index of keys (part of the arithmetic)", **shown)
        table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of a line's name")
    given = parser.parse_args()
    main(given.rounds, given.only)
