"""`with_features`: features of a sparse autoencoder as one more site of rows."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from replaylens.engine.dump.features import StoredFeatures, named, to_rows
from replaylens.engine.errors import UnknownSite
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.features.rows import FeatureRows, Ids, feature_ids
from replaylens.engine.model.sites import by_letter
from replaylens.engine.request.values import instance
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.data.sources import LETTERS, DumpSource, JoinedSource, RowSource
from replaylens.probes.errors import BadRows, CutFeatures

_RENAMED = {".attn.hook_z": ".attn.o.hook_in", ".mlp.hook_post": ".mlp.out.hook_in", ".hook_resid_mid": ".ln2.hook_in"}
"""older names of sites, which dumps and runs store under their names in TransformerLens 4"""


def with_features(
    rows: ProbeRows, features: SparseFeatures | str, columns: Ids | None = None, *, name: str = "features"
) -> ProbeRows:
    """The same rows with one more site, `name`: the activations of chosen features, encoded when a probe asks for them.

    rows     of a dump, a run or arrays that hold the site of the features. What the stream leaving block l is called there
             (S at layer l + 1, hook_resid_post) makes no difference
    features a sparse autoencoder; or the name of features that the dump stores, of which the strongest of each row are known
    columns  the features to keep, in this order; default: all, [rows, number of features]
    name     of the new site

    Raises UnknownSite if the rows lack the site, BadRows for a name that they already have.
    """
    rows = ProbeRows.of(instance("rows", rows, ProbeRows, "ProbeRows; of a dump or a run: ProbeRows.of(...)"))
    stored = named(_planned(rows.source), features) if isinstance(features, str) else None
    if stored is None:
        features = instance(
            "features", features, SparseFeatures, "the result of SparseFeatures.load, or the name of stored ones"
        )
    width = len(features) if stored is None else stored.width
    chosen = list(range(width)) if columns is None else feature_ids("columns", columns, width)
    if not chosen:
        raise BadRows("No features were chosen. Give at least one in columns.")
    if name in (*rows.source.sites(), *LETTERS, "Z"):
        raise BadRows(f"The rows already have a site {name!r}. Give another name.")
    source: WiderSource
    if stored is not None:
        source = StoredFeatureSource(rows.source, stored, chosen, name)
    else:
        assert isinstance(features, SparseFeatures)
        source = FeatureSource(rows.source, features, chosen, name)
    wider = None if rows.wider is None else replace(rows.wider, source=source)
    return replace(rows, source=source, wider=wider)


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
            warnings.warn(
                f"The dump keeps {indices.shape[1]} features a row, but {int(cut.sum())} of {len(cut)} rows have more (up to "
                f"{int(counts.max())}). The rest reads as 0. Give the weights instead of a name, or dump with a larger keep.",
                CutFeatures,
                stacklevel=3,
            )
        return to_rows(self.stored, indices, values).columns(self.chosen)


def _planned(source: RowSource) -> tuple[StoredFeatures, ...]:
    """The features that the dump of a source stores; of joined dumps, those that all of them store alike."""
    if isinstance(source, DumpSource):
        return source.dump.manifest.plan.features
    if isinstance(source, JoinedSource):
        first, *others = map(_planned, source.sources)
        return tuple(each for each in first if all(each in other for other in others))
    inner = getattr(source, "source", None)  # of a subset, or of rows with other features
    return () if inner is None else _planned(inner)


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
