"""Fitting while capturing: rows are added to moments and dropped; the probe is that of a fit on the dump."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from replaylens.engine.dump.planning import plan_of_run
from replaylens.engine.engine import Engine
from replaylens.engine.progress import hidden
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.errors import ProbeError
from replaylens.probes.estimators.erasers import Leace
from replaylens.probes.estimators.mass_mean import MassMeanProbe
from replaylens.probes.estimators.moments import Moments, MomentStream
from replaylens.tasks import Example

FROM_MOMENTS: dict[str, Callable[[], Any]] = {
    "mass-mean": MassMeanProbe,
    "mass-mean-whitened": lambda: MassMeanProbe(whiten=True),
    "leace": Leace,
}
"""estimators that need nothing but moments"""


class StreamedMoments:
    """One `MomentStream` per cell; rows arrive in the order of their examples."""

    def __init__(self, label: str, classes: Sequence[str], sites: str | Sequence[str] = "S", position: str = "step") -> None:
        self.label, self.classes, self.sites, self.position = label, tuple(classes), sites, position
        self.streams: dict[Cell, MomentStream] = {}

    def add(self, rows: ProbeRows) -> None:
        """Mutates: adds the accepted rows at the position that have the label. Pieces of any size give the same bits."""
        rows = rows.accepted().at(self.position)
        target = rows.target(self.label, "class")
        rows, target = rows.where(target.present), target[target.present]
        for cell in rows.cells(self.sites):
            x = torch.from_numpy(rows.matrix(cell.site, cell.layer))
            if cell not in self.streams:
                self.streams[cell] = MomentStream(x.shape[1], self.classes)
            self.streams[cell].add(x, target.values)

    def moments(self) -> dict[Cell, Moments]:
        return {cell: stream.moments() for cell, stream in self.streams.items()}

    def fit(self, estimator: str) -> dict[Cell, Any]:
        """One probe or eraser per cell, bit for bit the one that `fit` gives on the dumped rows."""
        if estimator not in FROM_MOMENTS:
            raise ProbeError(f"{estimator} cannot be fitted from moments alone. Use one of {', '.join(FROM_MOMENTS)}.")
        return {cell: FROM_MOMENTS[estimator]().fit_moments(moments) for cell, moments in self.moments().items()}


def fit_streaming(
    engine: Engine,
    examples: Sequence[Example],
    label: str,
    classes: Sequence[str],
    *,
    sites: str | Sequence[str] = "S",
    position: str = "step",
    batch: int = 32,
    drafter: str = "lens",
    window: int | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
    edits: Sequence[Edit] = (),
    max_new: int | None = None,
    rejected: bool = False,
    progress: bool = False,
) -> StreamedMoments:
    """Replay examples and keep only moments: memory does not grow with their number. Options as in `Engine.replay`.

    Examples are replayed in the order of their index, as in a dump; the order in which they are given changes no bit.
    """
    examples = sorted(examples, key=lambda example: example.index)
    collected = StreamedMoments(label, classes, sites, position)
    for first in tqdm(range(0, len(examples), batch), unit="batch", disable=hidden(progress)):
        some = examples[first : first + batch]
        run = engine.replay(
            some,
            sites=sites,
            drafter=drafter,
            window=window,
            seed=seed,
            sampling=sampling,
            edits=edits,
            max_new=max_new,
            rejected=rejected,
            batch=batch,
        )
        plan = plan_of_run(engine, some[0].maker, [e.index for e in some], run.options)
        collected.add(ProbeRows.of_results(engine, plan, run.results))
    return collected
