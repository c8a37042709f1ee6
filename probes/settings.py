"""`SweepSettings`: everything that decides what a sweep finds, checked before anything is computed."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from replaylens.probes import registry
from replaylens.probes.errors import ProbeError
from replaylens.probes.positions import Position
from replaylens.probes.statistics import PERMUTATIONS, RESAMPLES

BRANCHES = ("accepted", "rejected", "all")
PRECISIONS = ("double", "single")


@dataclass(frozen=True)
class SweepSettings:
    """Options of `sweep`; the docstrings are their meaning."""

    labels: tuple[str, ...] = ("state",)
    """what to read off; `state` is the task's own true state"""
    sites: tuple[str, ...] = ("S", "T", "C")
    """letters, or stored site names"""
    layers: tuple[int, ...] | None = None
    """of the letters; None: all"""
    positions: tuple[str, ...] = ("step", "query")
    """see `positions`"""
    estimators: tuple[str, ...] = ("logistic",)
    """see `replaylens probe --list`"""
    split: str = "root"
    """root, length:N, depth:N, accepted-rejected, rejected-accepted, part:A:B; or the name of a split of your own"""
    folds: int = 5
    branches: str = "accepted"
    """rows of which branches: accepted, rejected or all"""
    controls: bool = True
    untrained: bool = False
    """whether the untrained model was run as a control"""
    residualise: tuple[str, ...] = ()
    """index columns (position, steps, ...) whose linear effect is taken out of the rows first"""
    code_length: bool = False
    """also the online code, for logistic probes"""
    seed: int = 0
    resamples: int = RESAMPLES
    permutations: int = PERMUTATIONS
    precision: str = "double"
    """double: agrees with scikit-learn to rounding; single: half the memory, twice as fast"""
    device: str = "cpu"

    def __post_init__(self) -> None:
        checks = {
            f"branches {self.branches!r}: choose {', '.join(BRANCHES)}": self.branches in BRANCHES,
            f"precision {self.precision!r}: choose {', '.join(PRECISIONS)}": self.precision in PRECISIONS,
            f"{self.resamples} resamples: give at least 100": self.resamples >= 100,
            f"{self.permutations} permutations: give at least 19": self.permutations >= 19,
            f"device {self.device!r} is not there: give cpu, or cuda where torch finds a GPU": _is_there(self.device),
            "give at least one label, site, position and estimator": all(
                (self.labels, self.sites, self.positions, self.estimators)
            ),
        }
        for message, fine in checks.items():
            if not fine:
                raise ProbeError(message)
        for name in self.estimators:
            if registry.get(name).swept == "no":
                raise ProbeError(f"{name} needs other input than rows of one place; see docs/probes.md")
        for position in self.positions:
            Position.parse(position)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def key(self, rows_digest: str) -> str:
        """Hash of settings and rows: parts of a sweep can be used again only under the same one."""
        return hashlib.sha256(json.dumps([self.to_json(), rows_digest], sort_keys=True).encode()).hexdigest()


def _is_there(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch raises either, by what is missing
        return False
    return True
