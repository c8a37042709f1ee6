"""`Rollout`: one continuation of a path, with its seed, its outcome, and its rows at chosen places."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.request.recording import with_keys

Row = tuple[str, int]
"""the name of a place, and the position of its token on the path"""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One rollout. `tokens` and `text` are what was generated, without the path before it."""

    position: int
    """the fork position"""
    number: int
    """its number among the rollouts at this position"""
    seed: int
    tokens: tuple[int, ...]
    text: str
    """without the end-of-sequence token"""
    outcome: str | None
    """None: no answer was found"""
    stopped: str
    """answer, eos, stop or length"""
    probabilities: tuple[float, ...] = ()
    """with choice tokens: the probability of each choice, then that of all other tokens"""
    rows: tuple[Row, ...] = ()
    """the rows that are kept, in order"""
    states: Mapping[str, Tensor] = field(default_factory=dict)
    """site -> [rows, ...]"""

    def to_json(self) -> dict[str, Any]:
        """Plain values of everything but the states."""
        raw = {name: value for name, value in vars(self).items() if name != "states"}
        plain: dict[str, Any] = json.loads(json.dumps(raw))
        return plain

    @property
    def digest(self) -> str:
        """SHA-256 of everything, states included."""
        found = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode())
        for site in sorted(self.states):
            rows = self.states[site].detach().cpu().contiguous()
            found.update(f"{site} {rows.dtype} {tuple(rows.shape)}".encode())
            found.update(rows.view(torch.uint8).numpy().data if rows.numel() else b"")
        return found.hexdigest()


def joined(site: str, rows: Sequence[Tensor]) -> Tensor:
    """The rows of a site of several rollouts, one after another: [rows, ...]. Those of a site with keys, of which each rollout
    has as many as its path has tokens, get as many as the longest."""
    longest = max(each.shape[-1] for each in rows)
    return torch.cat([with_keys(site, each, longest) for each in rows])
