"""What capture, steering and the lens add to decoding and to prompts, through the public API.

Rows on the host are what `Branch.activations` gives; a round ends when the last of them is there. Rows on the device are those
of `keep="device"`.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.baselines.subject import ENDLESS, Subject
from replaylens.engine.request.capture import Recording
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch


@dataclass(frozen=True)
class Arm:
    """What a request asks for."""

    sites: str | None = None
    keep: Literal["host", "device"] = "host"
    steered: bool = False

    def prompts(self, subject: Subject, paths: list[list[int]]) -> list[Branch]:
        middle = subject.engine.config.num_layers // 2
        sites = f"blocks.{middle}.hook_in" if self.sites == "one" else self.sites
        width = subject.engine.config.d_model
        edits = [Edit("S", "add", torch.linspace(-0.1, 0.1, width), layers=[middle])] if self.steered else []
        return list(subject.engine.prompts(paths, sites=sites, keep=self.keep, edits=edits))


ARMS = {
    "no capture": Arm(),
    "one layer, on the host": Arm("one"),
    "S, on the host": Arm("S"),
    "S, on the device": Arm("S", "device"),
    "S, T, C, on the host": Arm("STC"),
    "S, T, C, on the device": Arm("STC", "device"),
    "steering": Arm(steered=True),
    "lens": Arm("Z"),
}


def capture_prices(subject: Subject) -> None:
    for count, tokens in subject.sizes.captured:
        _decode(subject, count, tokens)
        subject.clear()
    _prompts(subject, *subject.sizes.capture_prompts)
    subject.clear()


def _decode(subject: Subject, count: int, tokens: int) -> None:
    """Tokens generated on all branches together; every round cuts them back and generates them again."""
    engine = subject.engine
    paths = subject.prompts(count, subject.sizes.capture_context)
    made = {name: arm.prompts(subject, paths) for name, arm in ARMS.items()}

    def cut(name: str) -> None:
        for branch in made[name]:
            branch.rollback(to=len(paths[0]))

    def work(name: str) -> None:
        engine.generate(made[name], tokens, sampling=ENDLESS)
        engine.runner.ferry.wait()

    for name in ARMS:
        cut(name)
        work(name)
    _check({name: _found(branches[-1]) for name, branches in made.items()})
    times = _in_turns(subject, list(ARMS), cut, work, rounds=4)
    _tell(subject, f"decode of {count} branches, {tokens} tokens", list(ARMS), times, tokens, count)
    for branches in made.values():
        for branch in branches:
            branch.release()


def _prompts(subject: Subject, count: int, length: int) -> None:
    engine, paths = subject.engine, subject.prompts(count, length)
    arms = [name for name, arm in ARMS.items() if not arm.steered and arm.sites != "Z"]

    made: list[Branch] = []

    def cut(name: str) -> None:
        while made:
            made.pop().release()
        engine.prefix.clear()

    def work(name: str, some: int = count) -> None:
        made.extend(ARMS[name].prompts(subject, paths[:some]))
        engine.runner.ferry.wait()

    found = {}
    for name in arms:
        cut(name)
        work(name, some=2)
        found[name] = _found(made[-1])
    _check(found)
    times = _in_turns(subject, arms, cut, work, rounds=3)
    cut("")
    _tell(subject, f"prompts, {count} x {length} tokens", arms, times, 1, count * length)


def _in_turns(
    subject: Subject, arms: list[str], before: Callable[[str], None], work: Callable[[str], None], rounds: int
) -> list[float]:
    """Median milliseconds of each arm. Freeing what the round before kept is not timed."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for place in range(len(arms)):
            name = arms[(number + place) % len(arms)]
            before(name)
            times[name].append(1e3 * subject.seconds(partial(work, name)))
    return [statistics.median(times[name]) for name in arms]


def _found(branch: Branch) -> dict[str, Tensor]:
    """Tokens and captured rows, on the host."""
    rows = {site: x.cpu() for site, x in (branch.lane.recording or Recording()).items()}
    return rows | {"tokens": torch.tensor(branch.tokens)}


def _check(found: dict[str, dict[str, Tensor]]) -> None:
    """Capture moves no token, and the rows are the same wherever they are kept."""
    most = found["S, T, C, on the host"]
    for name, rows in found.items():
        if not ARMS[name].steered:
            shared = {site: x for site, x in rows.items() if not site.startswith("Z.")}
            assert all(torch.equal(x, most[site]) for site, x in shared.items()), f"{name}: other tokens or rows"
    assert len(found["no capture"]) == 1 < len(found["S, on the device"]) < len(most)


def _tell(subject: Subject, what: str, arms: list[str], times: list[float], steps: int, rows: int) -> None:
    bare = times[0]
    for name, taken in zip(arms, times, strict=True):
        numbers: dict[str, Any] = dict(ms=taken / steps, rows_per_s=1e3 * rows * steps / taken, speed=bare / taken)
        subject.table.add(f"{what}: {name}", ratio=taken / bare, **numbers)
