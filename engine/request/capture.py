"""`CaptureSpec`: which sites are captured, of which rows; `PassTap`: their values in one pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from replaylens.engine.request.positions import Where

HEAD_SITES = ("ln_final.hook_scale", "ln_final.hook_normalized", "ln_final.hook_out", "unembed.hook_out")
"""sites after the last block: computed for captured rows only, from the residual stream that leaves the block"""

MAX_TOP, MAX_TARGETS = 32, 63
"""limits of the lens kernel per row; the emitted token takes one more target"""

Rows = dict[str, Tensor]
"""site -> [rows, ...]"""


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of every committed row."""

    sites: tuple[str, ...]
    """resolved site names"""
    lens: "LensSpec | None" = None
    rejected: bool = False
    """also keep the rows of rejected drafts, on their branch"""

    last: str = ""
    """the residual stream that leaves the last block"""
    thoughts: tuple[str, ...] = ()
    """sites of thoughts, which a model that thinks has in addition to the rows of its passes"""

    positions: Where = field(default_factory=Where)
    """the positions that are captured"""
    keep: Literal["host", "device"] = "host"
    """where captured rows are kept: in ordinary memory, or on the model's device"""

    def needed(self) -> frozenset[str]:
        """The sites that a pass must keep."""
        shown = {self.last if site in HEAD_SITES else site for site in self.sites}
        return frozenset(shown) | (frozenset(self.lens.sites) if self.lens else frozenset())

    @property
    def on_device(self) -> bool:
        """Whether a device computes all of it without the host: a tuned lens and long lists of tokens need the host."""
        lens = self.lens
        return lens is None or (lens.fits_kernel and lens.tuned is None)

    @property
    def lag(self) -> int:
        """How many tokens beyond its own a row depends on: Z holds the log-probability of the *next* token."""
        return 1 if self.lens else 0


@dataclass(frozen=True)
class LensSpec:
    """How Z, the logit lens at every layer, is stored."""

    sites: tuple[str, ...]
    """the residual streams it reads, in layer order; the last is the model's own output"""
    top_k: int = 8
    targets: tuple[int, ...] = ()
    """token ids whose log-probs are always kept"""
    full: bool = False
    """keep whole distributions"""
    tuned: str | None = None
    """digest of the tuned lens it is read through; None: the plain lens"""

    def targets_on(self, device: torch.device) -> Tensor | None:
        """`targets` as a tensor [tokens], int64; None: there are none."""
        return torch.tensor(self.targets).to(device, non_blocking=True) if self.targets else None

    @property
    def fits_kernel(self) -> bool:
        """Whether the kernel of a GPU can compute it. It cannot give whole distributions or long lists."""
        return not self.full and self.top_k <= MAX_TOP and len(self.targets) <= MAX_TARGETS

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "LensSpec":
        """Inverse of `asdict`, with lists for tuples."""
        return cls(**{**raw, "sites": tuple(raw["sites"]), "targets": tuple(raw["targets"])})


class Sent(Protocol):
    """Rows of a pass that are on their way to where they are kept."""

    def view(self, sites: Iterable[str], first: int, end: int) -> Mapping[str, Tensor]:
        """Rows [first, end) of some sites."""
        ...


class PassTap:
    """Keeps the wanted sites of one pass by reference: the decoder never changes them in place."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.values: Rows = {}
        self.sent: dict[str, tuple[Sent, Mapping[int, int] | None]] = {}
        """where rows are kept -> rows on their way there, and packed row -> row of those; None: they are the same"""
        self._stacked: dict[tuple[str, ...], list[tuple[tuple[str, ...], Tensor]]] = {}

    def wants(self, site: str) -> bool:
        return site in self.wanted

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.values[site] = value
        return value

    def rows(self, sites: Iterable[str], start: int, end: int) -> Rows:
        """A copy of packed rows [start, end) of these sites, on the CPU."""
        return dict(self.take(tuple(sites), range(start, end)))

    def take(self, sites: tuple[str, ...], packed: Sequence[int], keep: str = "host") -> Mapping[str, Tensor]:
        """Some packed rows of these sites, in order. Precondition: if they were sent, then all of these, one after another."""
        if keep in self.sent:
            sent, row_of = self.sent[keep]
            first = packed[0] if row_of is None else row_of[packed[0]]
            return sent.view(sites, first, first + len(packed))
        if sites not in self._stacked:
            self._stacked[sites] = [(names, x.cpu()) for names, x in self.stacked(sites)]
        consecutive = len(packed) > 0 and packed[-1] - packed[0] == len(packed) - 1
        which = slice(packed[0], packed[-1] + 1) if consecutive else list(packed)
        found: Rows = {}
        for names, x in self._stacked[sites]:  # a copy, so that a long-lived branch does not keep the whole pass alive
            found.update(zip(names, (x[:, which].clone() if consecutive else x[:, which]).unbind(), strict=True))
        return {site: found[site] for site in sites}

    def stacked(self, sites: Iterable[str]) -> list[tuple[tuple[str, ...], Tensor]]:
        """Sites of equal shape together, [sites, rows, ...]: one transfer per pass, not one per site and branch."""
        groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for site in sites:
            groups.setdefault((self.values[site].shape, self.values[site].dtype), []).append(site)
        return [(tuple(names), torch.stack([self.values[site] for site in names])) for names in groups.values()]
