"""`StoredFeatures`: sparse features in a dump, and the tensors that hold them.

The features of a row are stored as the `keep` strongest: their numbers in ascending order, their activations, and how many
were active in all. A row with fewer is padded with the number -1 and the activation 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadDump, BadRequest, no_such
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.features.rows import FeatureRows
from replaylens.engine.records import Hash, Positive
from replaylens.engine.request.values import instance, shown, whole
from replaylens.engine.serving.core import Core

PARTS = ("indices", "values", "counts")
PREFIX = "features."
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
KEEP = 64
"""features per row, unless the caller or the k of a TopK SAE says otherwise"""


@dataclass(frozen=True)
class StoredFeatures:
    """What a plan says about one set of features."""

    name: str
    """its name in the dump"""
    site: str
    """the site that is encoded"""
    digest: Hash
    """of their config and weights"""
    width: Positive
    """the number of features"""
    keep: Positive
    """the largest number of features stored per row"""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"Invalid name of features {self.name!r:.60}. Use letters, digits, - and _.")
        if self.keep > self.width:
            raise BadRequest(f"Invalid keep={self.keep}: {self.name} has {self.width} features. Give at most that.")

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Names of the stored tensors: indices, values, counts."""
        indices, values, counts = (f"{PREFIX}{self.name}.{part}" for part in PARTS)
        return indices, values, counts


Encoders = Mapping[str, SparseFeatures]
"""name in the dump -> the features"""


def planned(engine: Core, encoders: Encoders, keep: int | None) -> tuple[StoredFeatures, ...]:
    """The plan's entries for these features. BadRequest, UnknownSite or BadWeights if they do not fit the model.

    keep  features per row; None: k of a TopK SAE, else 64
    """
    if not isinstance(encoders, Mapping):
        raise BadRequest(f"features={shown(encoders)}: give a dict from names to features, such as {{'sae': features}}.")
    made = []
    for name, features in encoders.items():
        features = instance(f"features[{name!r}]", features, SparseFeatures, "the result of SparseFeatures.load")
        site, most = features.site_in(engine), whole("keep", keep, 1) if keep is not None else features.config.k or KEEP
        made.append(StoredFeatures(str(name), site, features.digest, len(features), min(most, len(features))))
    return tuple(made)


def matched(planned: Sequence[StoredFeatures], encoders: Encoders) -> Encoders:
    """The encoders themselves. BadRequest names planned features that are missing, or that have other weights."""
    for stored in planned:
        if stored.name not in encoders:
            raise BadRequest(
                f"The features {stored.name!r} (digest {stored.digest[:12]}) of {stored.site} are planned, but a plan does not "
                f"hold their weights. Pass them: features={{{stored.name!r}: SparseFeatures.load(...)}}."
            )
        if (found := encoders[stored.name].digest) != stored.digest:
            raise BadRequest(
                f"The features {stored.name!r} have the digest {found[:12]}, but {stored.digest[:12]} in the plan. Pass those "
                "that the dump was made with."
            )
    return encoders


def named(stored: Sequence[StoredFeatures], name: str) -> StoredFeatures:
    """The features of this name; BadRequest if there are none."""
    for each in stored:
        if each.name == name:
            return each
    raise BadRequest(no_such("features", str(name)[:60], [each.name for each in stored]))


def to_tensors(stored: StoredFeatures, found: FeatureRows) -> dict[str, Tensor]:
    """The tensors of some rows: [rows, keep], [rows, keep] and [rows]. Of equal activations the first features are kept."""
    rows, indices, values = found.rows_of_entries.numpy(), found.indices.numpy(), found.values.numpy()
    order = np.lexsort((indices, -values, rows))
    kept = np.sort(order[np.arange(len(order)) - found.offsets.numpy()[rows] < stored.keep])  # back in ascending order
    place = np.arange(len(kept)) - np.searchsorted(rows[kept], rows[kept])
    numbers = np.full((len(found), stored.keep), -1, dtype=np.int32)
    amounts = np.zeros((len(found), stored.keep), dtype=np.float32)
    numbers[rows[kept], place], amounts[rows[kept], place] = indices[kept], values[kept]
    made = (torch.from_numpy(numbers), torch.from_numpy(amounts), found.counts.to(torch.int32))
    return dict(zip(stored.tensors, made, strict=True))


def to_rows(stored: StoredFeatures, indices: Tensor, values: Tensor) -> FeatureRows:
    """Inverse of `to_tensors`, up to the features that were not kept. BadDump for numbers that no feature has."""
    if len(wrong := indices[(indices < -1) | (indices >= stored.width)]):
        raise BadDump(
            f"The stored features {stored.name!r} include number {wrong[0].item()}, but there are {stored.width} features. The "
            "dump was changed after it was made: copy it again from an intact one, or make it again."
        )
    there = indices >= 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)])
    return FeatureRows(offsets, indices[there], values[there], stored.width)
