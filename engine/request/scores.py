"""Scores of linear probes: `Scorer`, the probes of one site, and `score`, which adds the scores of its rows to a pass.

A score is computed from one row, on its own, in portable arithmetic: eight chains over the row, added as a tree, whatever the
model's dtype and device. So it is a function of weights, path and edits, as the row is: of any batch, drafter, fork or replay.
Within a pass, scores are one more site of the rows that are recorded, and a CUDA graph holds their product.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.records import ProbeRecord, digest_of
from replaylens.engine.request.placed import tensor_from_json
from replaylens.kernels import cpu

SCORED = "scores:"
"""begins the names of scores among the sites of a pass; recordings do not list them"""
Scores = dict[str, Tensor]
"""name of a probe -> its score: [] for two classes (positive: the second), else [classes]; with several rows, [rows, ...]"""


class Scorer:
    """The probes of one site, as one product. Adding a probe changes no bit of the others: a column is summed on its own."""

    def __init__(self, records: Sequence[ProbeRecord]) -> None:
        self.records, self.site = tuple(records), records[0].site
        weights = [tensor_from_json(vars(each.weight)) for each in records]
        self.weight = torch.cat(weights).t()  # [d, lines]
        self.bias = torch.cat([tensor_from_json(vars(each.bias)) for each in records])
        self._panels = cpu.Panels.of(self.weight)
        self._counts = [len(each) for each in weights]
        self._there: dict[tuple[torch.device, tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    @cached_property
    def name(self) -> str:
        """Its scores' name among the sites of a pass. Scorers of the same name compute the same."""
        return SCORED + digest_of([each.digest for each in self.records])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scorer) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def columns(self, rows: Tensor) -> Tensor:
        """rows [n, ...] of the site, in any dtype and on any device -> all lines of all probes [n, lines], on the host."""
        rows, first = rows.reshape(len(rows), -1), self.records[0]
        if rows.shape[1] != first.weight.shape[1]:
            raise BadRequest(
                f"Rows of {first.site} have {rows.shape[1]} numbers, such as some for each step of a thought, and the probe "
                f"{first.name!r} reads {first.weight.shape[1]}. Watch a site with one vector for each token, such as of S."
            )
        if rows.is_cuda:
            return scored_there([self], [rows])[0].cpu()
        return cpu.product(rows.to("cpu", torch.float32).contiguous(), self._panels, self.bias)

    def split(self, columns: Tensor) -> Scores:
        """Columns [n, lines] by probe: [n] or [n, classes]."""
        if len(self._counts) == columns.shape[1]:  # one line each
            return dict(zip([each.name for each in self.records], columns.unbind(1), strict=True))
        parts = columns.split(self._counts, dim=1)
        return {each.name: x.squeeze(1) if x.shape[1] == 1 else x for each, x in zip(self.records, parts, strict=True)}

    def __call__(self, rows: Tensor) -> Scores:
        """As `columns`, by probe: [n] or [n, classes]."""
        return self.split(self.columns(rows))

    def stacked(self, others: Sequence["Scorer"], device: torch.device) -> tuple[Tensor, Tensor]:
        """Weights [scorers, d, lines] and biases [scorers, lines] of this and other scorers, filled up with zeros. They stay: a
        graph reads them at every replay."""
        every, key = (self, *others), (device, tuple(each.name for each in others))
        if key not in self._there:
            lines = max(len(each.bias) for each in every)
            pad = lambda x: torch.nn.functional.pad(x, (0, lines - x.shape[-1]))  # noqa: E731
            with torch.inference_mode(False):
                self._there[key] = (
                    torch.stack([pad(each.weight) for each in every]).contiguous().to(device),
                    torch.stack([pad(each.bias) for each in every]).contiguous().to(device),
                )
        return self._there[key]


def scorers(records: Sequence[ProbeRecord]) -> dict[str, Scorer]:
    """One scorer for each site."""
    return {site: Scorer([each for each in records if each.site == site]) for site in dict.fromkeys(r.site for r in records)}


def scored_there(scored: Sequence[Scorer], rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows [n, ...] of each scorer's site on a device, of one width -> its columns [n, lines] there, in one launch."""
    from replaylens.kernels.parts import lines  # needs triton, as everything on the device does

    x = torch.stack([each.reshape(len(each), -1) for each in rows])
    found = lines(x, *scored[0].stacked(scored[1:], x.device))
    return [each[:, : len(scorer.bias)] for scorer, each in zip(scored, found, strict=True)]


def score(values: dict[str, Tensor], scored: Sequence[Scorer], kernels: bool) -> None:
    """Mutates: the values of a pass, by site, have the scores of its rows, by the scorers' names. Waits for nothing, so
    that a graph can hold it.

    kernels  whether our kernels computed the pass
    """
    if not kernels:
        values |= {each.name: each.columns(values[each.site]) for each in scored}
        return
    groups: dict[tuple[int, torch.dtype], list[Scorer]] = {}
    for each in scored:
        groups.setdefault((len(each.weight), values[each.site].dtype), []).append(each)
    for some in groups.values():
        found = scored_there(some, [values[each.site] for each in some])
        values |= {each.name: columns for each, columns in zip(some, found, strict=True)}
