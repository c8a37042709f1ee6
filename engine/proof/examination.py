"""`Examination`: the findings of a doctor, on one thread and on more."""

from collections.abc import Callable

import torch
from torch import Tensor

from replaylens.engine.model import modes
from replaylens.engine.passes.certificate import Finding


class Examination:
    """Findings for one model. Runs within `modes.canonical(1)`: one thread gives the reference."""

    def __init__(self, threads: tuple[int, ...]) -> None:
        self.findings: list[Finding] = []
        self.more = [count for count in threads if count > 1]
        """numbers of threads on which no op has differed so far"""
        self.generator = torch.Generator().manual_seed(2024)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def note(self, op: str, shape: str, check: str, equal: bool, control: bool = False) -> None:
        self.findings.append(Finding(op, shape, check, equal, control))

    def on_more_threads(self, op: str, shape: str, same: Callable[[], bool]) -> None:
        """Check `same` on every number of threads in `more`, and remove those on which it does not hold."""
        for count in list(self.more):
            if not self.on(count, op, shape, same):
                self.more.remove(count)

    def on(self, count: int, op: str, shape: str, same: Callable[[], bool]) -> bool:
        """Record and return whether `same` holds on `count` threads."""
        with modes.canonical(count):
            equal = torch.get_num_threads() == count and same()
        self.findings.append(Finding(op, shape, f"on {count} threads", equal, threads=count))
        return equal
