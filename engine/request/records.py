"""How edits are written in files: by `Edit.to_json` in dump plans, and by `PlacedEdit.to_json` in traces."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from replaylens.engine.records import Count, Natural


@dataclass(frozen=True)
class SliceRecord:
    """Positions [start, stop)."""

    start: int | None
    stop: int | None


@dataclass(frozen=True)
class TensorRecord:
    """float32, in base64."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data: str


@dataclass(frozen=True)
class EditRecord:
    """An edit as it was asked for."""

    site: str
    op: str
    positions: int | tuple[int, ...] | SliceRecord | None
    layers: tuple[int, ...] | None
    factor: float
    seed: Natural
    value: TensorRecord | UnsetType = UNSET
    heads: tuple[Count, ...] | UnsetType = UNSET
    keys: int | tuple[int, ...] | SliceRecord | UnsetType = UNSET
    keep_norm: bool | UnsetType = UNSET
    when: TensorRecord | UnsetType = UNSET
    tokens: tuple[str | Count, ...] | UnsetType = UNSET
    experts: tuple[Count, ...] | UnsetType = UNSET


@dataclass(frozen=True)
class PlacedEditRecord:
    """An edit at one site, with positions counted from 0."""

    site: str
    op: str
    start: Count
    stop: Count | None
    picks: tuple[Count, ...]
    factor: float
    seed: Natural
    needs: Count = 0
    value: TensorRecord | UnsetType = UNSET
    heads: tuple[Count, ...] = ()
    keys: tuple[Count, ...] = ()
    keep_norm: bool = False
    when: TensorRecord | UnsetType = UNSET
    tokens: tuple[Count, ...] = ()
