"""What capture adds to decoding and to prompts, through the public API: rows left on the device, and rows on the host.

Rows on the host are what `Branch.activations` gives. Rows left on the device are the same rows before their transfer: the
price of taking them, without that of the way to the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.subject import ENDLESS, Subject
from replaylens.engine.request.capture import PassTap, Recording
from replaylens.engine.serving.branch import Branch

ARMS: dict[str, tuple[str | None, bool]] = {
    "no capture": (None, False),
    "S, on the device": ("S", True),
    "S, on the host": ("S", False),
    "S, T, C, on the device": ("STC", True),
    "S, T, C, on the host": ("STC", False),
}
"""sites, and whether their rows stay on the device"""


@contextmanager
def rows_stay(on_device: bool) -> Iterator[None]:
    """Within this, captured rows are stacked where they are, without the transfer to the host."""
    before = PassTap._stack

    def stack(self: PassTap, sites: tuple[str, ...]) -> list[tuple[list[str], Tensor]]:
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for site in sites:
            groups.setdefault((self.values[site].shape, self.values[site].dtype), []).append(site)
        return [(group, torch.stack([self.values[site] for site in group])) for group in groups.values()]

    PassTap._stack = stack if on_device else before  # type: ignore[method-assign]
    try:
        yield
    finally:
        PassTap._stack = before  # type: ignore[method-assign]


def capture_prices(subject: Subject) -> None:
    for count in subject.sizes.capture_branches:
        _decode(subject, count)
        subject.clear()
    _prompts(subject, *subject.sizes.capture_prompts)
    subject.clear()


def _decode(subject: Subject, count: int) -> None:
    """Tokens generated on all branches together; every round cuts them back and generates them again."""
    engine, tokens = subject.engine, subject.sizes.capture_tokens
    paths = subject.prompts(count, subject.sizes.contexts[0])
    made: dict[str, list[Branch]] = {}
    for arm, (sites, on_device) in ARMS.items():
        with rows_stay(on_device):
            made[arm] = engine.prompts(paths, sites=sites)

    def work(arm: str) -> None:
        with rows_stay(ARMS[arm][1]):
            for branch in made[arm]:
                branch.rollback(to=len(paths[0]))
            engine.generate(made[arm], tokens, sampling=ENDLESS)

    for arm in ARMS:
        work(arm)
    _check({arm: _found(branches[-1]) for arm, branches in made.items()})
    times = subject.in_turns(*(lambda arm=arm: work(arm) for arm in ARMS), rounds=3, warm=1)
    _tell(subject, f"decode of {count} branches", times, tokens, count)
    for branches in made.values():
        for branch in branches:
            branch.release()


def _prompts(subject: Subject, count: int, length: int) -> None:
    engine, paths = subject.engine, subject.prompts(count, length)

    def work(arm: str, some: int = count) -> dict[str, Tensor]:
        sites, on_device = ARMS[arm]
        with rows_stay(on_device):
            branches = engine.prompts(paths[:some], sites=sites)
        found = _found(branches[-1]) if some < count else {}
        for branch in branches:
            branch.release()
        engine.prefix.clear()
        return found

    _check({arm: work(arm, some=2) for arm in ARMS})
    times = subject.in_turns(*(lambda arm=arm: work(arm) for arm in ARMS), rounds=2, warm=0)
    _tell(subject, f"prompts, {count} x {length} tokens", times, 1, count * length)


def _found(branch: Branch) -> dict[str, Tensor]:
    """Tokens and captured rows, on the host."""
    rows = {site: x.cpu() for site, x in (branch.lane.recording or Recording()).items()}
    return rows | {"tokens": torch.tensor(branch.tokens)}


def _check(found: dict[str, dict[str, Tensor]]) -> None:
    """Capture moves no token, and the rows are the same wherever they lie."""
    most = found["S, T, C, on the host"]
    for arm, rows in found.items():
        assert all(torch.equal(x, most[name]) for name, x in rows.items()), f"{arm}: other tokens or rows"
    assert len(found["no capture"]) == 1 < len(found["S, on the device"]) < len(most)


def _tell(subject: Subject, what: str, times: list[float], steps: int, rows: int) -> None:
    bare = times[0]
    for arm, taken in zip(ARMS, times, strict=True):
        numbers: dict[str, Any] = dict(ms=taken / steps, rows_per_s=1e3 * rows * steps / taken)
        if arm != "no capture":
            numbers["extra"] = taken / bare - 1
        subject.table.add(f"{what}: {arm}", ratio=taken / bare, **numbers)
