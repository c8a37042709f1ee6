"""`EditProgram`: the edits of packed rows as tables of numbers, so that a CUDA graph can apply any of them.

A site has stages: stage j holds the j-th edit of every row. Adding, setting, zeroing and resampling are one launch per stage
(`kernels/edit.py`). Projecting out takes one product per direction.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.model.decoder import Tap
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.request.placed import PlacedEdit, without_direction
from replaylens.kernels.edit import ADD, KEEP, SET, ZERO, edit_rows
from replaylens.kernels.launch import next_power_of_2

_MAX_TABLES = 256
"""edits whose vectors stay on the device"""


@dataclass(frozen=True)
class EditedRows:
    """Consecutive packed rows of one branch, and its edits."""

    start: int
    """position of the first row"""
    count: int
    edits: tuple[PlacedEdit, ...]


@dataclass
class EditStage:
    """The j-th edit at a site of every packed row."""

    width: int
    codes: np.ndarray
    """[rows] int32"""
    index: np.ndarray
    """[rows] int32: row of the table, where the code needs one"""
    tables: list[PlacedEdit] = field(default_factory=list)
    """the edits whose vectors make up the table, in order"""
    num_heads: int = 1
    """heads of the site's rows"""
    projections: list[tuple[PlacedEdit, np.ndarray]] = field(default_factory=list)
    """edits that project out, with the rows they apply to: [rows] bool"""

    @property
    def num_vectors(self) -> int:
        return sum(self.count(edit) for edit in self.tables)

    def count(self, edit: PlacedEdit) -> int:
        """The vectors of an edit in the table."""
        return edit.vectors.numel() // self.width

    @property
    def by_head(self) -> bool:
        """Whether an edit changes only some heads."""
        return any(edit.heads for edit in self.tables)

    def columns(self) -> np.ndarray:
        """The columns that each vector of the table changes: [vectors, width] bool."""
        out = np.ones((self.num_vectors, self.num_heads, self.width // self.num_heads), dtype=bool)
        first = 0
        for edit in self.tables:
            count = self.count(edit)
            if edit.heads:
                out[first : first + count] = False
                out[first : first + count, list(edit.heads)] = True
            first += count
        return out.reshape(-1, self.width)


EditShape = tuple[tuple[str, tuple[tuple[int, int, tuple[int, ...], bool], ...]], ...]
"""what the launches of a program depend on: for each site, for each stage, its width, the room for vectors, the number of
directions of each projection, and whether vectors change only some heads"""


class EditProgram:
    """The edits of a pass. Rows without edits keep their bits."""

    def __init__(self, rows: Sequence[EditedRows], table: SiteTable) -> None:
        self.num_rows = sum(each.count for each in rows)
        self.stages: dict[str, list[EditStage]] = {}
        first = 0
        for each in rows:
            seen: dict[str, int] = {}
            for edit in each.edits:
                if positions := edit.positions(each.start, each.start + each.count):
                    number = seen.get(edit.site, 0)
                    seen[edit.site] = number + 1
                    stage = self._stage(edit.site, number, table)
                    _enter(stage, edit, positions, first - each.start, len(table.sites[edit.site].shape))
            first += each.count

    def _stage(self, site: str, number: int, table: SiteTable) -> EditStage:
        stages = self.stages.setdefault(site, [])
        if number == len(stages):
            zeros = lambda: np.zeros(self.num_rows, dtype=np.int32)  # noqa: E731
            shape = table.sites[site].shape
            heads = shape[0] if len(shape) > 1 else 1
            stages.append(EditStage(int(np.prod(shape)), zeros(), zeros(), num_heads=heads))
        return stages[number]

    def shape(self) -> EditShape:
        return tuple((site, tuple(_stage_shape(stage) for stage in stages)) for site, stages in sorted(self.stages.items()))


def _stage_shape(stage: EditStage) -> tuple[int, int, tuple[int, ...], bool]:
    used = stage.tables or bool((stage.codes != KEEP).any())
    directions = tuple(len(edit.vectors) for edit, _ in stage.projections)
    return stage.width, next_power_of_2(max(1, stage.num_vectors)) if used else 0, directions, stage.by_head


def _enter(stage: EditStage, edit: PlacedEdit, positions: list[int], shift: int, rank: int) -> None:
    """Mutates: adds an edit to the stage, at rows position + shift."""
    rows = np.asarray(positions) + shift
    if edit.op == "project_out":
        known = next((mask for other, mask in stage.projections if other.key == edit.key), None)
        if known is None:
            known = np.zeros(len(stage.codes), dtype=bool)
            stage.projections.append((edit, known))
        known[rows] = True
        return
    stage.codes[rows] = {"add": ADD, "zero": ZERO}.get(edit.op, SET)
    if edit.op == "zero":
        return
    first = 0
    for other in stage.tables:
        if other.key == edit.key:
            break
        first += stage.count(other)
    else:
        stage.tables.append(edit)
    if edit.op == "resample":
        stage.index[rows] = [first + draw for draw in edit.draws(positions)]
    elif edit.vectors.dim() > rank:  # one vector per edited position
        stage.index[rows] = [first + edit.place(p) for p in positions]
    else:
        stage.index[rows] = first


class Vectors:
    """Vectors of edits on the device, in the model's dtype, by the edits' keys."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()

    def of(self, edit: PlacedEdit, width: int) -> Tensor:
        """[vectors, width]; of an `add`, times its factor."""
        if edit.key not in self._known:
            value = edit.vectors.reshape(-1, width).to(self.device, self.dtype)
            self._known[edit.key] = value * edit.factor if edit.op == "add" else value
            if len(self._known) > _MAX_TABLES:
                self._known.popitem(last=False)
        self._known.move_to_end(edit.key)
        return self._known[edit.key]


class _Loaded:
    """The tensors of one stage."""

    def __init__(self, width: int, room: int, directions: tuple[int, ...], by_head: bool, rows: int, vectors: Vectors) -> None:
        make = lambda *size, dtype=torch.int32: torch.zeros(size, dtype=dtype, device=vectors.device)  # noqa: E731
        self.width, self.vectors = width, vectors
        self.numbers = make(2, rows)
        """codes and index"""
        self.table = make(room, width, dtype=vectors.dtype) if room else None
        self.columns = make(room, width, dtype=torch.bool) if by_head else None
        """which columns each vector changes; None: all of them"""
        self.directions = [make(count, width, dtype=vectors.dtype) for count in directions]
        self.masks = make(len(directions), rows, dtype=torch.bool)
        self._keys: tuple[bytes, ...] = ()

    def load(self, stage: EditStage) -> None:
        """Mutates: takes the vectors of a stage of the same shape. Its codes come by `point`."""
        keys = tuple(edit.key for edit in [*stage.tables, *(edit for edit, _ in stage.projections)])
        if keys == self._keys:
            return
        if self.table is not None and stage.tables:
            together = torch.cat([self.vectors.of(edit, self.width) for edit in stage.tables])
            self.table[: len(together)] = together
            if self.columns is not None:
                self.columns[: len(together)] = torch.from_numpy(stage.columns()).to(self.columns.device)
        for target, (edit, _) in zip(self.directions, stage.projections, strict=True):
            target.copy_(self.vectors.of(edit, self.width))
        self._keys = keys

    def apply(self, x: Tensor) -> Tensor:
        """x [rows, width]"""
        if self.table is not None:
            edited = edit_rows(x, self.numbers[0], self.numbers[1], self.table)
            if self.columns is not None:  # a row that is zeroed as a whole has no vector, hence no columns
                changed = self.columns.index_select(0, self.numbers[1]) | (self.numbers[0] == ZERO)[:, None]
                edited = torch.where(changed, edited, x)
            x = edited
        for directions, mask in zip(self.directions, self.masks, strict=True):
            for direction in directions:
                x = torch.where(mask[:, None], without_direction(x, direction), x)
        return x


class ProgramTap:
    """Applies a program of a given shape, then passes the edited value to `inner`. Its tensors stay where they are."""

    def __init__(self, shape: EditShape, rows: int, vectors: Vectors, inner: Tap | None = None) -> None:
        self.inner, self._device = inner, vectors.device
        self._stages = {site: [_Loaded(*stage, rows, vectors) for stage in stages] for site, stages in shape}

    def load(self, program: EditProgram, rows: int) -> None:
        """Mutates: takes a program of the same shape, padded to `rows` rows."""
        self.load_vectors(program)
        numbers, masks = (torch.from_numpy(x).to(self._device, non_blocking=True) for x in rows_of(program, rows))
        self.point(numbers, masks)

    def load_vectors(self, program: EditProgram) -> None:
        """Mutates: takes the vectors of a program of the same shape."""
        for site, stages in program.stages.items():
            for loaded, stage in zip(self._stages[site], stages, strict=True):
                loaded.load(stage)

    def point(self, numbers: Tensor, masks: Tensor) -> None:
        """Mutates: takes what the rows do. numbers [stages, 2, rows], masks [projections, rows], as `rows_of` lists them."""
        stage = projection = 0
        for stages in self._stages.values():
            for loaded in stages:
                loaded.numbers.copy_(numbers[stage])
                stage += 1
                if count := len(loaded.directions):
                    loaded.masks.copy_(masks[projection : projection + count])
                    projection += count

    def wants(self, site: str) -> bool:
        return site in self._stages or (self.inner is not None and self.inner.wants(site))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if stages := self._stages.get(site):
            x = value.reshape(len(value), -1)
            for stage in stages:
                x = stage.apply(x)
            value = x.view(value.shape)
        return self.inner(site, value) if self.inner is not None and self.inner.wants(site) else value


def rows_of(program: EditProgram, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [stages, 2, rows] int32, masks [projections, rows] bool), padded with rows that are kept."""
    stages = [stage for _, stages in sorted(program.stages.items()) for stage in stages]
    numbers = np.zeros((len(stages), 2, rows), dtype=np.int32)
    for target, stage in zip(numbers, stages, strict=True):
        target[0, : program.num_rows], target[1, : program.num_rows] = stage.codes, stage.index
    found = [mask for stage in stages for _, mask in stage.projections]
    masks = np.zeros((len(found), rows), dtype=bool)
    for target, mask in zip(masks, found, strict=True):
        target[: program.num_rows] = mask
    return numbers, masks
