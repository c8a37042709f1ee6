"""`with_features`: features of a sparse autoencoder as one more site of rows."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from replaylens.engine.errors import UnknownSite
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.features.rows import FeatureRows, Ids, feature_ids
from replaylens.engine.model.sites import by_letter
from replaylens.engine.request.values import instance
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.data.sources import LETTERS, RowSource
from replaylens.probes.errors import BadRows

_RENAMED = {".attn.hook_z": ".attn.o.hook_in", ".mlp.hook_post": ".mlp.out.hook_in", ".hook_resid_mid": ".ln2.hook_in"}
"""older names of sites, which dumps and runs store under their names in TransformerLens 4"""


def with_features(
    rows: ProbeRows, features: SparseFeatures, columns: Ids | None = None, *, name: str = "features"
) -> ProbeRows:
    """The same rows with one more site, `name`: the activations of chosen features, encoded when a probe asks for them.

    rows     of a dump, a run or arrays that hold the site of the features. What the stream leaving block l is called there
             (S at layer l + 1, hook_resid_post) makes no difference
    columns  the features to keep, in this order; default: all, [rows, number of features]
    name     of the new site

    Raises UnknownSite if the rows lack the site, BadRows for a name that they already have.
    """
    rows = ProbeRows.of(instance("rows", rows, ProbeRows, "ProbeRows; of a dump or a run: ProbeRows.of(...)"))
    features = instance("features", features, SparseFeatures, "the result of SparseFeatures.load")
    chosen = list(range(len(features))) if columns is None else feature_ids("columns", columns, len(features))
    if not chosen:
        raise BadRows("No features were chosen. Give at least one in columns.")
    if name in (*rows.source.sites(), *LETTERS, "Z"):
        raise BadRows(f"The rows already have a site {name!r}. Give another name.")
    source = FeatureSource(rows.source, features, chosen, name)
    wider = None if rows.wider is None else replace(rows.wider, source=source)
    return replace(rows, source=source, wider=wider)


class FeatureSource:
    """A source with one more site."""

    def __init__(self, source: RowSource, features: SparseFeatures, chosen: list[int], name: str) -> None:
        self.source, self.features, self.chosen, self.name = source, features, chosen, name
        self.where = _where(source, features.config.hook)
        self._encoded = lru_cache(maxsize=4)(self._encode)  # a sweep asks for the same rows several times; kept sparse
        self.about = replace(source.about, digest="+".join(filter(None, [source.about.digest, features.digest])))

    def sites(self) -> list[str]:
        return [*self.source.sites(), self.name]

    def letters(self, letter: str) -> dict[int, str]:
        return {} if letter == self.name else self.source.letters(letter)

    def take(self, site: str, layer: int | None, numbers: np.ndarray) -> Tensor:
        if site != self.name:
            return self.source.take(site, layer, numbers)
        if layer is not None:
            raise UnknownSite(f"Site {site!r} has no layers. Leave out the layer.")
        return self._encoded(numbers.astype(np.int64).tobytes()).columns(self.chosen)

    def _encode(self, numbers: bytes) -> FeatureRows:
        return self.features.encode(self.source.take(*self.where, np.frombuffer(numbers, dtype=np.int64).copy()))


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
