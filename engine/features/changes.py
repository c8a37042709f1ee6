"""`FeatureChanges`: what becomes of some features, and the difference that this makes to rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.features.rows import FeatureRows, Ids, feature_ids
from replaylens.engine.request.edits import Positions
from replaylens.engine.request.values import integer, items, number, shown, whole

_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FeatureChanges:
    """The new activation of some features: a value, or a multiple of the present one."""

    ops: tuple[tuple[int, Literal["set", "scale"], float], ...]
    """(feature, op, amount), by ascending feature"""

    @classmethod
    def of(cls, width: int, ablate: Ids, values: Mapping[int, float], factors: Mapping[int, float]) -> "FeatureChanges":
        """From the arguments of `SparseFeatures.edits`. Raises BadRequest for an unknown feature, or one given twice."""
        ops: list[tuple[int, Literal["set", "scale"], float]] = []
        ops += [(feature, "set", 0.0) for feature in feature_ids("ablate", ablate, width)]
        ops += [(feature, "set", amount) for feature, amount in _amounts("set", values, width)]
        ops += [(feature, "scale", amount) for feature, amount in _amounts("scale", factors, width)]
        features = [feature for feature, _, _ in ops]
        if twice := [feature for feature in features if features.count(feature) > 1]:
            raise BadRequest(f"Feature {twice[0]} is changed in two ways. Give it to one of ablate, set and scale.")
        if not ops:
            raise BadRequest("No feature to change. Give ablate=[7], set={7: 4.0} or scale={7: 2.0}.")
        return cls(tuple(sorted(ops)))

    @property
    def features(self) -> list[int]:
        return [feature for feature, _, _ in self.ops]

    def differences(self, found: FeatureRows) -> Tensor:
        """New activations minus those found: [rows, changed features]."""
        now, new = found.columns(self.features), []
        for i, (_, op, amount) in enumerate(self.ops):
            new.append(now[:, i] * amount if op == "scale" else torch.full((len(now),), amount, dtype=torch.float32))
        return torch.stack(new, 1) - now

    def __str__(self) -> str:
        return ", ".join(f"{op} {feature} {'by' if op == 'scale' else 'to'} {amount:g}" for feature, op, amount in self.ops)


def _amounts(name: str, given: Mapping[int, float], width: int) -> list[tuple[int, float]]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"Invalid {name}={shown(given)}. Give a dict from features to numbers, such as {{7: 2.0}}.")
    ids = feature_ids(name, list(given), width)
    found = [(feature, number(name, amount)) for feature, amount in zip(ids, given.values(), strict=True)]
    if large := [amount for _, amount in found if abs(amount) > _MAX]:
        raise BadRequest(f"Invalid {name}={shown(given)}. {large[0]:.3g} is beyond float32, which ends at {_MAX:.3g}.")
    return found


def rows_at(positions: Positions, captured: list[int], length: int) -> list[int]:
    """The numbers of the captured rows at these positions of a branch of `length` tokens; BadEdit if one was not captured."""
    if positions is None:
        return list(range(len(captured)))
    if isinstance(positions, slice):
        wanted = list(range(*positions.indices(length)))
    else:
        single = integer(positions)
        listed = [single] if single is not None else items("positions", positions, "whole numbers, or a slice", BadEdit)
        numbers = [whole("positions", p, -length, error=BadEdit) for p in listed]
        wanted = sorted({p + length if p < 0 else p for p in numbers})
    place = {position: row for row, position in enumerate(captured)}
    if missing := [p for p in wanted if p not in place]:
        raise BadEdit(
            f"Position {missing[0]} has no captured row on this branch of {length} tokens, so its features are not known. "
            "Give other positions, or capture it."
        )
    if not wanted:
        raise BadEdit(f"positions={shown(positions)} selects none of {length} tokens. Give at least one.")
    return [place[p] for p in wanted]
