"""Natural mismatches: how often the fast path of a trained model differs from the verifier, and what that costs.

    PYTHONPATH=src python -m benchmarks.natural_gpu [--seconds 600] [--sections load ...] [--resume FILE] [--tiny]

SmolLM2-135M-Instruct (`replaylens fetch smollm2`) and the embedded coin models, in bfloat16 on a GPU. Stories of up to 512
tokens, drawn with one seed per request. The sections:

    first divergence    ordinary requests against deterministic ones, and against ordinary ones in batches of another size
    flipped tokens      drafts of the fast path that the verifier rejects, by batch size and temperature
    recomputed tokens   rejected drafts by window W and number G of requests that are verified together
    load                time to first token, time per token and tokens per second at 0, 10, 50 and 100 % deterministic requests
    alone               deterministic requests in all of the above against the same requests alone: 0 differences
    boards              records of first verifications, for `benchmarks/natural_boards.py`
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import natural_boards
from benchmarks.natural_load import load
from benchmarks.natural_subject import (
    TEMPERATURES,
    TINY,
    Sizes,
    Subject,
    Tally,
    first_difference,
    generated,
    in_batches,
    samplings,
    story_prompts,
    tallied,
)
from benchmarks.table import RESULTS, Table
from replaylens.engine.engine import Engine
from replaylens.engine.zoo import coin as zoo

PROMISE = "deterministic tokens in any company: differing"
DRAFTING = 8
"""window of the flips: seven drafts and a free token"""


def divergence(table: Table, subject: Subject) -> None:
    """Where ordinary stories first differ from canonical ones, and from ordinary ones in smaller batches."""
    sizes, count = subject.sizes, len(subject.prompts)
    for temperature in TEMPERATURES:
        if subject.late:
            return
        own, story = samplings(count, temperature), subject.story(temperature)
        large = in_batches(subject.engine, subject.prompts, own, subject.length, count, verified=False)
        small = in_batches(subject.engine, subject.prompts, own, subject.length, sizes.other_batch, verified=False)
        for what, a, b in (
            (f"ordinary in a batch of {count} against deterministic", large, story),
            (f"ordinary in batches of {sizes.other_batch} against {count}", small, large),
        ):
            at = [first_difference(x, y) for x, y in zip(a, b, strict=True)]
            parted = sorted(i for i in at if i is not None)
            by = {f"by_{mark}": sum(i < mark for i in parted) / count for mark in sizes.marks if mark <= subject.length}
            middle = parted[(count - 1) // 2] if len(parted) > (count - 1) // 2 else None
            never = 1 - len(parted) / count
            table.add(
                f"{subject.name}, first divergence, T={temperature:g}: {what}", **by, median=middle, never=never, requests=count
            )


def flips(table: Table, subject: Subject) -> None:
    """Rejected drafts of the fast path per 1,000, by batch size and temperature."""
    sizes = subject.sizes
    for temperature in TEMPERATURES:
        for batch in sizes.batches:
            if subject.late:
                return
            what = f"{subject.name}, flipped tokens, T={temperature:g}, batch {batch}"
            if batch <= len(subject.prompts) and what not in subject.done:
                table.add(what, **counts(drafted(subject, temperature, batch, DRAFTING)))
    batch = min(sizes.other_batch, len(subject.prompts))
    for temperature in (0.0, 1.0):
        what = f"{subject.name}, flipped tokens, T={temperature:g}, batch {batch}, logits rounded to bfloat16"
        if subject.late or what in subject.done:
            continue
        with rounded_logits(subject.engine):
            table.add(what, **counts(drafted(subject, temperature, batch, DRAFTING)))


def counts(tally: Tally) -> dict[str, float | int]:
    return {
        "per_1000": tally.per_thousand,
        "flips": tally.flips,
        "drafts": tally.accepted + tally.flips,
        "recomputed_percent": tally.recomputed,
    }


def drafted(subject: Subject, temperature: float, batch: int, window: int) -> Tally:
    """Drafts of deterministic requests, `batch` at a time. What they commit is compared with their stories."""
    count, own, sizes = len(subject.prompts), samplings(len(subject.prompts), temperature), subject.sizes
    drafts = sizes.drafts if batch > 1 else sizes.drafts // 6
    n = min(subject.length, 1 + sizes.tokens)
    with tallied(subject.engine) as tally:
        first = 0
        while first + batch <= count and tally.accepted + tally.flips < drafts and not (first and subject.late):
            end = first + batch
            tokens = generated(subject.engine, subject.prompts[first:end], own[first:end], n, window=window)
            subject.compare(temperature, tokens, first)
            first = end
    return tally


@contextmanager
def rounded_logits(engine: Engine) -> Iterator[None]:
    """The fast path rounds logits to bfloat16 before the choice, as many serving engines do. Its graphs are made anew."""
    from replaylens.engine.passes.cuda import FastHeadOps

    plain, bursts = FastHeadOps.unembed, engine.loop.bursts
    graphs = None if bursts is None else bursts._graphs

    def rounded(self: FastHeadOps, x: Tensor, table: Tensor) -> Tensor:
        return plain(self, x, table).bfloat16().float()

    FastHeadOps.unembed = rounded  # type: ignore[method-assign]
    if bursts is not None:
        bursts._graphs = {}
    try:
        yield
    finally:
        FastHeadOps.unembed = plain  # type: ignore[method-assign]
        if bursts is not None and graphs is not None:
            bursts._graphs = graphs


def windows(table: Table, subject: Subject) -> None:
    """Rejected drafts in percent of committed tokens, by window and number of requests verified together."""
    sizes = subject.sizes
    for temperature, group in [(1.0, g) for g in reversed(sizes.groups)] + [(0.0, sizes.groups[-1])]:
        for window in sizes.windows:
            if subject.late:
                return
            what = f"{subject.name}, recomputed tokens, T={temperature:g}, G={group}, W={window}"
            if what in subject.done:
                continue
            tally = drafted(subject, temperature, group, window)
            expected = tally.per_thousand / 10 * (window - 1) / 2
            table.add(what, **counts(tally), half_p_w=expected, committed=tally.committed)


def alone(table: Table, subject: Subject) -> None:
    """A few requests alone, then the verdict on every deterministic request of this run."""
    found = requests = 0
    for temperature, story in subject.stories.items():
        own = samplings(len(subject.prompts), temperature)
        for i in range(0, len(subject.prompts), max(1, len(subject.prompts) // subject.sizes.alone)):
            n = min(subject.length, subject.sizes.tokens)
            (tokens,) = generated(subject.engine, [subject.prompts[i]], [own[i]], n)
            found += tokens != story[i][: len(tokens)]
            requests += 1
    add_up(table, f"{subject.name}, requests alone against the batch: differing", found, requests)
    add_up(table, f"{subject.name}, {PROMISE}", subject.differing, subject.compared)


def add_up(table: Table, what: str, differing: int, compared: int) -> None:
    """Mutates: a line with these counts, those of an earlier run included."""
    for row in [row for row in table.rows if row["what"] == what]:
        table.rows.remove(row)
        differing, compared = differing + row["differing"], compared + row["compared"]
    table.add(what, met=not differing, differing=differing, compared=compared)


def boards(table: Table, subject: Subject, out: Path) -> None:
    """Records of first verifications, for pictures."""
    made = Engine(subject.engine.model, subject.engine.text, cache_tokens=4096, record=True)
    seconds = max(1.0, min(10.0, subject.deadline - time.perf_counter()))
    found, looked = natural_boards.record(made, subject.prompts, 1.0, seconds)
    out.write_text(json.dumps(found))
    table.add(f"{subject.name}, first verifications on record", kinds=",".join(sorted(found)), looked_at=looked)


def stories_of(sizes: Sizes, tiny: bool, deadline: float) -> Subject:
    """SmolLM2, or a coin model in its place."""
    name, length = ("coin-plain", sizes.length) if tiny else ("smollm2", sizes.length)
    room = (sizes.stories + 4) * (length + 96)
    how = _device(tiny)
    engine = Engine.load(name, cache_tokens=room, max_rows=512 if tiny else 4096, **how)
    prompts = coin_prompts("steps", sizes.stories) if tiny else story_prompts(sizes.stories)
    return Subject(engine, "SmolLM2-135M" if not tiny else name, prompts, sizes, deadline, length)


def coin_prompts(rendering: str, count: int) -> list[str]:
    """Held-out examples of the coin task."""
    return [example.prompt for example in zoo.held_out(zoo.TESTS[rendering], 6, count)]


def _device(tiny: bool) -> dict[str, Any]:
    return {"device": "cpu"} if tiny else {"device": "cuda", "dtype": torch.bfloat16}


def coins(table: Table, sizes: Sizes, tiny: bool, deadline: float, done: frozenset[str]) -> None:
    """The embedded coin models, continued past their answers."""
    for name, rendering in (("coin-plain", "steps"), ("coin-thinking", "states")):
        if time.perf_counter() > deadline:
            return
        if f"{name}, {PROMISE}" in done:
            continue
        engine = Engine.load(name, cache_tokens=(sizes.coins + 4) * 256, **_device(tiny))
        subject = Subject(engine, name, coin_prompts(rendering, sizes.coins), sizes, deadline, sizes.coin_tokens)
        for temperature in (0.0, 1.0):
            for batch in (min(8, sizes.coins), sizes.coins):
                tally = drafted(subject, temperature, batch, DRAFTING)
                table.add(f"{name}, flipped tokens, T={temperature:g}, batch {batch}", **counts(tally))
        alone(table, subject)


SECTIONS: dict[str, Callable[[Table, Subject], None]] = {
    "divergence": divergence,
    "flips": flips,
    "load": load,
    "windows": windows,
    "alone": alone,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a coin model on the CPU: shows that everything runs")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which no further cell is begun")
    parser.add_argument("--out", type=Path, default=RESULTS / "natural-gpu.json")
    parser.add_argument("--boards", type=Path, default=RESULTS / "natural-boards.json")
    parser.add_argument("--sections", nargs="*", choices=[*SECTIONS, "boards", "coins"], default=["boards", *SECTIONS, "coins"])
    parser.add_argument("--length", type=int, default=None, help="tokens of a story, if other than 512")
    parser.add_argument("--drafts", type=int, default=None, help="drafts per cell")
    parser.add_argument("--resume", type=Path, default=None, help="a file of an earlier run: its lines are kept, not measured")
    given = parser.parse_args()
    begin = time.perf_counter()
    sizes, device = (TINY, "CPU") if given.tiny else (Sizes(), torch.cuda.get_device_name())
    sizes = replace(sizes, length=given.length or sizes.length, drafts=given.drafts or sizes.drafts)
    before = [] if given.resume is None else json.loads(given.resume.read_text())["rows"]
    done = frozenset(row["what"] for row in before)
    about = f"trained models, {'float32' if given.tiny else 'bfloat16'}, {device}"
    table = Table("natural-gpu", about, before, given.out)
    failed: list[str] = []
    asked = [name for name in given.sections if name != "coins"]
    if asked:
        subject = stories_of(sizes, given.tiny, begin + (0.85 if "coins" in given.sections else 1.0) * given.seconds)
        subject.done = done
        print(f"loaded after {time.perf_counter() - begin:.1f} s", flush=True)
        parts: dict[str, Callable[[Table, Subject], None]] = {**SECTIONS, "boards": partial(boards, out=given.boards)}
        for name in asked:
            try:
                parts[name](table, subject)
            except Exception:  # the other sections still run
                failed.append(name)
                traceback.print_exc()
            print(f"-- {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    if "coins" in given.sections:
        coins(table, sizes, given.tiny, begin + given.seconds, done)
    table.save(beside=True)
    print(f"-- {time.perf_counter() - begin:.1f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
