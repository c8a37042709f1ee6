"""Sources of rows: a dump on disk, tensors in memory, several sources joined, or a subset of one."""

from collections.abc import Callable, Iterable, Sequence
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
from replaylens.probes.errors import NoTask, SeveralTasks
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import NAME as TEXTS
from replaylens.tasks.texts import cited

LETTERS = ("S", "T", "C")
"""sites with one activation per layer: residual stream, attention output, MLP output"""


@dataclass(frozen=True)
class About:
    """The origin of rows, as a report cites it."""

    task: str | None
    """None for rows from arrays"""
    knobs: dict[str, Any]
    digest: str
    """of the dump, or of the arrays; empty for the rows of a run"""
    fingerprint: Fingerprint | None
    maker: AnyTask | None = field(default=None, compare=False, repr=False)
    """the task itself, which the rows of a run have; a dump knows its task by name only"""

    @property
    def several(self) -> bool:
        """Whether the rows are joined from different tasks, whose names `task` then lists."""
        return self.task is not None and "+" in self.task

    @property
    def cited_knobs(self) -> dict[str, Any]:
        """The knobs as a report shows them: given texts are counted, not repeated."""
        return self.knobs if self.task is None else cited(self.task, self.knobs)

    @property
    def of_texts(self) -> bool:
        """Whether these are rows of given texts, which have neither steps nor a query."""
        return self.task == TEXTS

    def make_task(self) -> AnyTask:
        """The task of the rows. Raises NoTask for rows from arrays, SeveralTasks for joined ones of different tasks.

        UnknownTask if no task of a dump's name is registered.
        """
        if self.task is None:
            raise NoTask("These rows come from arrays and have no task. Give a dump or a run, or ask what needs no task.")
        if self.several:
            raise SeveralTasks(f"These rows come from several tasks ({self.task}). Ask this of the rows of one of them.")
        return tasks.get(self.task)(**self.knobs) if self.maker is None else self.maker


class RowSource(Protocol):
    """A source of rows."""

    about: About

    def sites(self) -> list[str]:
        """Every stored site: letters and other sites with layers once, the others by name."""
        ...

    def letters(self, letter: str) -> dict[int, str]:
        """Stored sites of a letter (or of a site with layers), by layer; empty for any other name."""
        ...

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        """Rows [n, d] by their numbers, ascending."""
        ...

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of the index that are computed when they are asked for, at these rows; empty if the index is complete."""
        ...


class DumpSource:
    """Rows on disk. Only the requested rows are read."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        plan = dump.manifest.plan
        self.about = About(plan.task, plan.knobs, dump.digest, dump.manifest.fingerprint)

    def sites(self) -> list[str]:
        return _listed(self, self.dump.sites)

    def letters(self, letter: str) -> dict[int, str]:
        return self.dump.manifest.layers(letter) if letter in LETTERS else {}

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        return _flat(self.dump.array(site, layer)[numbers])

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {}


class MemorySource:
    """Rows in memory, by site name.

    later  gives the columns of the index that it lacks, for all rows
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        letters: dict[str, list[str]],
        about: About,
        later: Callable[[], dict[str, np.ndarray]] = dict,
    ) -> None:
        self.tensors, self._letters, self.about, self._later = tensors, letters, about, later

    def sites(self) -> list[str]:
        return _listed(self, self.tensors)

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

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[numbers] for name, column in self._later().items()}


def _listed(source: RowSource, names: Iterable[str]) -> list[str]:
    """The letters that a source stores, then the names that no letter covers."""
    stored = {letter: source.letters(letter) for letter in LETTERS}
    covered = {name for layers in stored.values() for name in layers.values()}
    return [*(letter for letter, layers in stored.items() if layers), *(name for name in names if name not in covered)]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1)


class JoinedSource:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[RowSource], sizes: Sequence[int]) -> None:
        self.sources, self.starts = list(sources), np.cumsum([0, *sizes])
        digests = {source.about.digest for source in sources}
        names = sorted({source.about.task for source in sources if source.about.task is not None})
        self.about = replace(sources[0].about, digest="+".join(sorted(digests)))
        if len(names) > 1:
            self.about = replace(self.about, task="+".join(names), knobs={}, maker=None)

    def sites(self) -> list[str]:
        return self.sources[0].sites()

    def letters(self, letter: str) -> dict[int, str]:
        return self.sources[0].letters(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        pieces = []
        for source, first, end in zip(self.sources, self.starts[:-1], self.starts[1:], strict=True):
            own = numbers[(numbers >= first) & (numbers < end)] - first
            if len(own):
                pieces.append(source.take(site, layer, own))
        return torch.cat(pieces)

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        owns = [numbers[(numbers >= a) & (numbers < b)] - a for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
        parts = [source.later(own) for source, own in zip(self.sources, owns, strict=True)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Subset:
    """Some rows of a source, numbered from 0."""

    def __init__(self, source: RowSource, numbers: np.ndarray) -> None:
        self.source, self.numbers, self.about = source, numbers, source.about

    def sites(self) -> list[str]:
        return self.source.sites()

    def letters(self, letter: str) -> dict[int, str]:
        return self.source.letters(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        return self.source.take(site, layer, self.numbers[numbers])

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return self.source.later(self.numbers[numbers])
