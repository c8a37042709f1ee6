"""Sources of rows: a dump on disk, tensors in memory, several sources joined, or a subset of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import UnknownSite
from replaylens.engine.model.sites import at_layer
from replaylens.engine.proof.fingerprint import Fingerprint
from replaylens.probes.errors import SeveralTasks
from replaylens.tasks.task import AnyTask

LETTERS = ("S", "T", "C")
"""sites with one activation per layer: residual stream, attention output, MLP output"""


@dataclass(frozen=True)
class About:
    """The origin of rows, as a report cites it."""

    task: str
    knobs: dict[str, Any]
    digest: str
    """of the dump; empty for the rows of a run"""
    fingerprint: Fingerprint | None
    maker: AnyTask | None = field(default=None, compare=False, repr=False)
    """the task itself, which the rows of a run have; a dump knows its task by name only"""

    def make_task(self) -> AnyTask:
        """The task of the rows. UnknownTask if they are of a dump, and no task of its name is registered.

        Raises SeveralTasks for joined rows of different tasks.
        """
        if "+" in (self.task or ""):
            raise SeveralTasks(f"These rows come from several tasks ({self.task}). Ask this of the rows of one of them.")
        return tasks.get(self.task)(**self.knobs) if self.maker is None else self.maker


class RowSource(Protocol):
    """A source of rows."""

    about: About

    def letters(self, letter: str) -> dict[int, str]:
        """Stored sites of a letter, by layer."""
        ...

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        """Rows [n, d] by their numbers, ascending."""
        ...


class DumpSource:
    """Rows on disk. Only the requested rows are read."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        plan = dump.manifest.plan
        self.about = About(plan.task, plan.knobs, dump.digest, dump.manifest.fingerprint)

    def letters(self, letter: str) -> dict[int, str]:
        return self.dump.manifest.layers(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        return _flat(self.dump.array(site, layer)[numbers])


class MemorySource:
    """Rows in memory, by site name."""

    def __init__(self, tensors: dict[str, Tensor], letters: dict[str, list[str]], about: About) -> None:
        self.tensors, self._letters, self.about = tensors, letters, about

    def letters(self, letter: str) -> dict[int, str]:
        return {layer: name for layer, name in enumerate(self._letters.get(letter, [])) if name in self.tensors}

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        stored = self.letters(site)
        name = at_layer(site, stored, layer) if stored else site
        if name not in self.tensors:
            raise UnknownSite(f"Site {name!r} was not captured. Captured: {', '.join(self.tensors)}.")
        x = self.tensors[name][torch.from_numpy(numbers)]
        if layer is None or stored:
            return _flat(x)
        if not name.startswith("Z."):
            raise UnknownSite(f"{name} is a site of one layer. Leave out the layer, or give a letter to choose one.")
        if not -x.shape[1] <= layer < x.shape[1]:
            raise UnknownSite(f"{name} is stored at layers 0 to {x.shape[1] - 1}, not {layer}. Give one of these.")
        return _flat(x[:, layer])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1)


class JoinedSource:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[RowSource], sizes: Sequence[int]) -> None:
        self.sources, self.starts = list(sources), np.cumsum([0, *sizes])
        digests = {source.about.digest for source in sources}
        names = sorted({source.about.task for source in sources})
        self.about = replace(sources[0].about, digest="+".join(sorted(digests)))
        if len(names) > 1:
            self.about = replace(self.about, task="+".join(names), knobs={}, maker=None)

    def letters(self, letter: str) -> dict[int, str]:
        return self.sources[0].letters(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        pieces = []
        for source, first, end in zip(self.sources, self.starts[:-1], self.starts[1:], strict=True):
            own = numbers[(numbers >= first) & (numbers < end)] - first
            if len(own):
                pieces.append(source.take(site, layer, own))
        return torch.cat(pieces)


class Subset:
    """Some rows of a source, numbered from 0."""

    def __init__(self, source: RowSource, numbers: np.ndarray) -> None:
        self.source, self.numbers, self.about = source, numbers, source.about

    def letters(self, letter: str) -> dict[int, str]:
        return self.source.letters(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        return self.source.take(site, layer, self.numbers[numbers])
