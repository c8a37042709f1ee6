"""Sources of rows: a dump, tensors in memory, arrays, several sources joined, a subset of one, one with features."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from replaylens import boundary, tasks
from replaylens.dumps.plan import StoredFeatures, to_rows
from replaylens.dumps.reader import Dump
from replaylens.engine.errors import Caveat, UnknownSite, no_such
from replaylens.engine.model.sites import at_layer, by_layer, by_letter
from replaylens.engine.records import Fingerprint
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import FeatureRows
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.tasks.errors import TaskError
from replaylens.tasks.registry import get as get_task
from replaylens.tasks.task import AnyTask, Task
from replaylens.tasks.texts import NAME as TEXTS
from replaylens.tasks.texts import cited

# ---- sources ---------------------------------------------------------------------------------------------------------

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
    def step_label(self) -> str:
        """The label that counts steps. Of a task that is unknown here, the usual one."""
        try:
            return (self.maker or get_task(self.task or "")).step_label
        except TaskError:
            return Task.step_label

    @property
    def cited_knobs(self) -> dict[str, Any]:
        """The knobs as a report shows them: given texts are counted, not repeated."""
        return self.knobs if self.task is None else cited(self.task, self.knobs)

    @property
    def of_texts(self) -> bool:
        """Whether these are rows of given texts, which have neither steps nor a query."""
        return self.task == TEXTS

    def make_task(self) -> AnyTask:
        """The task of the rows. Raises ProbeError for rows from arrays, or of several tasks.

        UnknownTask if no task of a dump's name is registered.
        """
        if self.task is None:
            raise ProbeError("These rows come from arrays and have no task. Give a dump or a run, or ask what needs no task.")
        if self.several:
            raise ProbeError(f"These rows come from several tasks ({self.task}). Ask this of the rows of one of them.")
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
        return by_layer(name for name in self._letters.get(letter, []) if name in self.tensors)

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


# ---- arrays ----------------------------------------------------------------------------------------------------------
# `ArraySource`: activations computed elsewhere, as NumPy arrays or tensors, one per site.
#
# Arrays are neither copied nor converted as a whole: only the rows that a probe asks for are, so a memory-mapped file or a
# tensor on a GPU stays where it is. Do not change an array while its rows are in use.

SITE = "X"
"""the site of an array that is given without a name"""
_ROWS = 8192
"""read at once while an array is checked; bounds memory"""
Array = np.ndarray | Tensor


class ArraySource:
    """Rows of arrays [rows, d] by site name."""

    def __init__(self, arrays: dict[str, Array], layered: dict[str, dict[int, str]], digest: str) -> None:
        self.arrays, self.layered = arrays, layered
        self.about = About(None, {}, digest, None)

    def sites(self) -> list[str]:
        covered = {name for layers in self.layered.values() for name in layers.values()}
        return [*self.layered, *(name for name in self.arrays if name not in covered)]

    def letters(self, letter: str) -> dict[int, str]:
        return self.layered.get(letter, {})

    def widths(self) -> dict[str, int]:
        """The number of columns of each array."""
        return {name: int(array.shape[1]) for name, array in self.arrays.items()}

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        stored = self.letters(site)
        name = at_layer(site, stored, layer) if stored else site
        if name not in self.arrays:
            raise UnknownSite(no_such("site", name, self.sites()))
        if layer is not None and not stored:
            raise UnknownSite(f"Site {name!r} has no layers. Leave out the layer.")
        return _rows(self.arrays[name], numbers)

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return {}


def read_arrays(X: Any, post_norms: bool = False) -> ArraySource:
    """Check one array [rows, d], or several by site: a name, or (site, layer).

    TransformerLens names are also S, T and C at their layers; see `engine.model.sites.by_letter` for the rule and `post_norms`.

    Raises BadRows for anything but finite numbers in rows of equal width, at least one, as many in every array.
    """
    given = dict(X) if isinstance(X, Mapping) else {SITE: X}
    if not given:
        raise BadRows("No activations given: the dict is empty. Give at least one site.")
    arrays: dict[str, Array] = {}
    layered: dict[str, dict[int, str]] = {}
    for key, value in given.items():
        site, layer = _key(key)
        name = site if layer is None else f"{site}{layer}"
        if name in arrays:
            raise BadRows(f"Two arrays have the name {name!r}. Give every site its own name.")
        arrays[name] = _array(name, value)
        if layer is not None:
            layered.setdefault(site, {})[layer] = name
    for letter, names in by_letter(arrays, post_norms).items():
        if letter not in layered:  # keys such as ("S", 3) say themselves what the letters are
            layered[letter] = names
    if both := sorted(set(layered) & set(arrays)):
        raise BadRows(f"Site {both[0]!r} is given with and without layers. Give it as (site, layer) throughout.")
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BadRows(f"The sites have different numbers of rows: {listed}. Row i of every site must be the same observation.")
    return ArraySource(arrays, {site: dict(sorted(at.items())) for site, at in layered.items()}, _checked_digest(arrays))


def _key(key: Any) -> tuple[str, int | None]:
    """(site, layer) of a key."""
    site, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if not isinstance(site, str) or not site or not (layer is None or _is_layer(layer)):
        raise BadRows(
            f"Unknown site {key!r}. Give a name, such as 'blocks.3.hook_resid_post', or (site, layer), such as ('S', 3)."
        )
    if layer is None and set(site) <= set(LETTERS):
        raise BadRows(f"Site {site!r} stands for letters, which need a layer. Give ({site[0]!r}, 3), or another name.")
    return site, None if layer is None else int(layer)


def _is_layer(layer: Any) -> bool:
    return isinstance(layer, int | np.integer) and not isinstance(layer, bool) and int(layer) >= 0


def _array(name: str, given: Any) -> Array:
    """A tensor or array [rows, d] of numbers, neither copied nor converted."""
    array: Array
    if isinstance(given, Tensor):
        array, kind = given.detach(), str(given.dtype if given.layout is torch.strided else given.layout)
        known = given.layout is torch.strided and not given.is_complex() and not given.is_quantized
    else:
        try:
            array = np.asarray(given)
        except (ValueError, TypeError) as error:
            raise BadRows(f"Site {name!r} is no array ({error}). Give an array or tensor [rows, d].") from None
        known, kind = array.dtype.kind in "fiub", str(array.dtype)
    if not known:
        hint = " Rows of different lengths make such an array." if kind == "object" else ""
        raise BadRows(f"Site {name!r} holds {kind}, not numbers.{hint} Give a dense array of floats [rows, d].")
    if array.ndim != 2:
        more = (
            "For [batch, positions, d] use ProbeRows.of_cache; else reshape(len(X), -1)."
            if array.ndim > 2
            else "Give [rows, d]."
        )
        raise BadRows(f"Site {name!r} has shape {list(array.shape)}, but a row must be one line of numbers. {more}")
    if 0 in array.shape:
        raise BadRows(
            f"Site {name!r} has shape {list(array.shape)}: there is nothing to probe. Give at least one row and column."
        )
    return array


def _rows(array: Array, numbers: np.ndarray | slice) -> Tensor:
    """Some rows as floats on the CPU. Integers of 8 and 16 bits become float32, wider ones float64."""
    if isinstance(array, Tensor):
        chosen = numbers if isinstance(numbers, slice) else torch.from_numpy(numbers).to(array.device)
        x = array[chosen].cpu()
    else:
        chosen_rows = np.array(array[numbers])
        if chosen_rows.dtype.itemsize > 8 or (chosen_rows.dtype.kind == "u" and chosen_rows.dtype.itemsize > 1):
            chosen_rows = chosen_rows.astype(np.float64)  # torch lacks long doubles, and computes with few unsigned types
        x = torch.from_numpy(chosen_rows.astype(chosen_rows.dtype.newbyteorder("="), copy=False))
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return x
    return x.to(torch.float32 if x.element_size() <= 2 else torch.float64)


def _checked_digest(arrays: dict[str, Array]) -> str:
    """Hash of names, shapes and values. Raises BadRows at the first row that is not finite."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        for start, part in _parts(arrays[name]):
            bad = ~torch.isfinite(part).all(1)
            if bool(bad.any()):
                row = start + int(bad.nonzero()[0])
                raise BadRows(f"Site {name!r}: row {row} contains NaN or infinity. Leave out such rows, or compute them again.")
            if not start:
                digest.update(f"{name} {part.dtype} {list(arrays[name].shape)}\n".encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(array: Array) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(array), _ROWS):
        yield start, _rows(array, slice(start, start + _ROWS))


# ---- features --------------------------------------------------------------------------------------------------------
# Sources with one more site: the features of a sparse autoencoder, encoded on demand or stored by a dump.

_RENAMED = {".attn.hook_z": ".attn.o.hook_in", ".mlp.hook_post": ".mlp.out.hook_in", ".hook_resid_mid": ".ln2.hook_in"}
"""older names of sites, which dumps and runs store under their names in TransformerLens 4"""


class WiderSource(ABC):
    """A source with one more site, without layers."""

    def __init__(self, source: RowSource, name: str) -> None:
        self.source, self.name, self.about = source, name, source.about

    def sites(self) -> list[str]:
        return [*self.source.sites(), self.name]

    def letters(self, letter: str) -> dict[int, str]:
        return {} if letter == self.name else self.source.letters(letter)

    def later(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        return self.source.later(numbers)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        if site != self.name:
            return self.source.take(site, layer, numbers)
        if layer is not None:
            raise UnknownSite(f"Site {site!r} has no layers. Leave out the layer.")
        return self.columns(numbers)

    @abstractmethod
    def columns(self, numbers: np.ndarray) -> Tensor:
        """The values of the further site in these rows: [rows, columns]."""


class FeatureSource(WiderSource):
    """A source with the features of a sparse autoencoder."""

    def __init__(self, source: RowSource, features: SparseFeatures, chosen: list[int], name: str) -> None:
        super().__init__(source, name)
        self.features, self.chosen, self.where = features, chosen, _where(source, features.config.hook)
        self._encoded = lru_cache(maxsize=4)(self._encode)  # a sweep asks for the same rows several times; kept sparse
        self.about = replace(source.about, digest="+".join(filter(None, [source.about.digest, features.digest])))

    def columns(self, numbers: np.ndarray) -> Tensor:
        return self._encoded(numbers.astype(np.int64).tobytes()).columns(self.chosen)

    def _encode(self, numbers: bytes) -> FeatureRows:
        return self.features.encode(self.source.take(*self.where, np.frombuffer(numbers, dtype=np.int64).copy()))


class StoredFeatureSource(WiderSource):
    """A source with the features that its dump stores."""

    def __init__(self, source: RowSource, stored: StoredFeatures, chosen: list[int], name: str) -> None:
        super().__init__(source, name)
        self.stored, self.chosen = stored, chosen

    def columns(self, numbers: np.ndarray) -> Tensor:
        indices, values, counts = (self.source.take(tensor, None, numbers) for tensor in self.stored.tensors)
        if int((cut := counts > indices.shape[1]).sum()):
            boundary.warn(
                f"The dump keeps {indices.shape[1]} features a row, but {int(cut.sum())} of {len(cut)} rows have more (up to "
                f"{int(counts.max())}). The rest reads as 0. Give the weights instead of a name, or dump with a larger keep.",
                Caveat,
            )
        return to_rows(self.stored, indices, values).columns(self.chosen)


def planned_features(source: RowSource) -> tuple[StoredFeatures, ...]:
    """The features that the dump of a source stores; of joined dumps, those that all of them store alike."""
    if isinstance(source, DumpSource):
        return source.dump.manifest.plan.features
    if isinstance(source, JoinedSource):
        first, *others = map(planned_features, source.sources)
        return tuple(each for each in first if all(each in other for other in others))
    inner = getattr(source, "source", None)  # of a subset, or of rows with other features
    return () if inner is None else planned_features(inner)


def _where(source: RowSource, hook: str) -> tuple[str, int | None]:
    """(site, layer) under which a source stores a hook."""
    stored = {letter: source.letters(letter) for letter in LETTERS}
    for letter, layers in stored.items():
        for layer, own in layers.items():
            if own == hook:
                return letter, layer
    older = next((old for old in _RENAMED if hook.endswith(old)), "")
    for name in (hook, hook.removesuffix(older) + _RENAMED.get(older, "")):
        if name in source.sites():
            return name, None
    if not hook.endswith(("attn.hook_out", "mlp.hook_out")):  # with norms after them, T and C are something else
        for letter, layers in by_letter([hook]).items():
            if (layer := next(iter(layers))) in stored[letter]:
                return letter, layer
    raise UnknownSite(
        f"The rows do not hold {hook}, the site of the features. They hold {', '.join(source.sites()) or 'nothing'}. "
        "Capture it: sites=[...] of replay or dump takes its name."
    )
