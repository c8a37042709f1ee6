"""`EditProgram`: the edits of packed rows as tables of numbers, so that a CUDA graph can apply any of them.

A site has stages: stage j holds the j-th edit of every row. Adding, setting, zeroing and resampling are one launch per stage
(`kernels/edit.py`), keeping lengths another. Projecting out takes one product per direction, and the conditions of a stage
take one together.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, InternalError
from replaylens.engine.model.ops import Tap
from replaylens.engine.model.sites import CHOICE_SITE, WEIGHTS_SITE, SiteTable
from replaylens.engine.request.placed import PlacedEdit, without_direction
from replaylens.kernels.edit import ADD, KEEP, SET, ZERO, edit_rows, keep_lengths
from replaylens.kernels.launch import next_power_of_2
from replaylens.kernels.matmul import matmul

_MAX_TABLES = 256
"""edits whose vectors stay on the device"""
NUMBERS = 6
"""of a row in a stage: its code, its vector, whether it keeps its lengths, its condition, whether it is multiplied, and the
bits of the factor of a vector that is scaled to the row's lengths"""


@dataclass(frozen=True)
class EditedRows:
    """Consecutive packed rows of one branch, and its edits."""

    start: int
    """position of the first row"""
    count: int
    edits: tuple[PlacedEdit, ...]
    tokens: Sequence[int] | None = None
    """of the rows; None: not known, and no edit of them asks for tokens"""

    def edited(self, edit: PlacedEdit) -> list[int]:
        """The positions that one of the edits changes."""
        if self.tokens is not None:
            return edit.edited(self.start, self.tokens)
        found = edit.positions(self.start, self.start + self.count)
        if found and edit.tokens:
            raise InternalError(f"An edit of {edit.site} at chosen tokens is applied to rows whose tokens are not known.")
        return found


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
    wide: bool = False
    """whether the site's values are float32 whatever the model's dtype"""
    projections: list[tuple[PlacedEdit, np.ndarray]] = field(default_factory=list)
    """edits that project out, with the rows they apply to: [rows] bool"""
    conditions: list[PlacedEdit] = field(default_factory=list)
    """edits with `when`, in order"""

    def __post_init__(self) -> None:
        self.kept = np.zeros_like(self.codes)
        """[rows] int32: whether the row's vectors keep their lengths"""
        self.when = np.zeros_like(self.codes)
        """[rows] int32: 0, or the number of the row's condition, from 1 on"""
        self.multiplied = np.zeros_like(self.codes)
        """[rows] int32: whether the row is multiplied by its vector; the code keeps it then"""
        self.matched = np.zeros_like(self.codes)
        """[rows] int32: bits of the float32 that the row's vector, scaled to the row's lengths, is multiplied by before it is
        added; 0: it is not. The code keeps the row then"""
        self.num_vectors = 0
        """of all tables"""
        self._firsts: dict[bytes, int] = {}

    def first_vector(self, edit: PlacedEdit) -> int:
        """The row of the table where an edit's vectors begin. Mutates: enters the edit if it is new."""
        if edit.key not in self._firsts:
            self._firsts[edit.key] = self.num_vectors
            self.tables.append(edit)
            self.num_vectors += self.count(edit)
        return self._firsts[edit.key]

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


class StageShape(NamedTuple):
    """What the launches of a stage depend on."""

    width: int
    room: int
    """for vectors; 0: nothing is added, set or zeroed"""
    directions: tuple[int, ...]
    """of each projection"""
    by_head: bool
    """whether vectors change only some heads"""
    lengths: int
    """vectors of a row that keep their lengths; 0: no row does"""
    conditions: int
    """room for directions of conditions; 0: there are none"""
    wide: bool
    multiplied: bool
    """whether some rows are multiplied by their vectors"""
    matched: int = 0
    """vectors of a row that are scaled to its own; 0: those of no row are"""


EditShape = tuple[tuple[str, tuple[StageShape, ...]], ...]
"""what the launches of a program depend on: for each site, for each stage, its shape"""


class EditProgram:
    """The edits of a pass. Rows without edits keep their bits."""

    def __init__(self, rows: Sequence[EditedRows], table: SiteTable) -> None:
        self.num_rows = sum(each.count for each in rows)
        self.stages: dict[str, list[EditStage]] = {}
        first = 0
        for each in rows:
            seen: dict[str, int] = {}
            for edit in each.edits:
                if edit.on_pattern:  # attention applies it
                    continue
                if edit.inside:
                    raise BadEdit(f"Cannot edit {edit.site} on CUDA: recurrent states are not made there. Use device='cpu'.")
                if positions := each.edited(edit):
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
            wide = site.endswith((CHOICE_SITE, WEIGHTS_SITE))
            stages.append(EditStage(int(np.prod(shape)), zeros(), zeros(), num_heads=heads, wide=wide))
        return stages[number]

    def shape(self) -> EditShape:
        return tuple((site, tuple(_stage_shape(stage) for stage in stages)) for site, stages in sorted(self.stages.items()))


def _stage_shape(stage: EditStage) -> StageShape:
    used = stage.tables or bool((stage.codes != KEEP).any())
    return StageShape(
        stage.width,
        next_power_of_2(max(1, stage.num_vectors)) if used else 0,
        tuple(len(edit.vectors) for edit, _ in stage.projections),
        stage.by_head,
        stage.num_heads if stage.kept.any() else 0,
        next_power_of_2(len(stage.conditions)) if stage.conditions else 0,
        stage.wide,
        bool(stage.multiplied.any()),
        stage.num_heads if stage.matched.any() else 0,
    )


def _enter(stage: EditStage, edit: PlacedEdit, positions: list[int], shift: int, rank: int) -> None:
    """Mutates: adds an edit to the stage, at rows position + shift."""
    rows = np.asarray(positions) + shift
    stage.kept[rows] = edit.keep_norm
    if edit.when is not None:
        keys = [other.key for other in stage.conditions]
        if edit.key not in keys:
            stage.conditions.append(edit)
        stage.when[rows] = 1 + (keys.index(edit.key) if edit.key in keys else len(keys))
    if edit.op == "project_out":
        known = next((mask for other, mask in stage.projections if other.key == edit.key), None)
        if known is None:
            known = np.zeros(len(stage.codes), dtype=bool)
            stage.projections.append((edit, known))
        known[rows] = True
        return
    stage.multiplied[rows] = edit.op == "reweight"
    stage.codes[rows] = KEEP if edit.match_norm else {"add": ADD, "zero": ZERO, "reweight": KEEP}.get(edit.op, SET)
    stage.matched[rows] = np.float32(edit.factor).view(np.int32) if edit.match_norm else 0
    if edit.op != "zero":
        stage.index[rows] = _vector_rows(stage, edit, positions, rank)


def _vector_rows(stage: EditStage, edit: PlacedEdit, positions: list[int], rank: int) -> list[int]:
    """The rows of the table with an edit's vectors, one per position. Mutates: enters the edit if it is new."""
    first = stage.first_vector(edit)
    if edit.op == "resample":
        return [first + draw for draw in edit.draws(positions)]
    if edit.vectors.dim() > rank:  # one vector per edited position
        return [first + edit.place(p) for p in positions]
    return [first] * len(positions)


class Vectors:
    """Vectors of edits on the device, in the model's dtype or in float32, by the edits' keys."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()

    def of(self, edit: PlacedEdit, width: int, dtype: torch.dtype) -> Tensor:
        """[vectors, width]; of an `add`, times its factor."""
        factor = edit.factor if edit.op == "add" and not edit.match_norm else 1.0
        return self._there(edit.key, edit.vectors.reshape(-1, width), factor, dtype)

    def condition(self, edit: PlacedEdit) -> Tensor:
        """[1, width]: the direction of an edit with `when`."""
        assert edit.when is not None
        return self._there(edit.key + b"when", edit.when.reshape(1, -1), 1.0, self.dtype)

    def _there(self, key: bytes, value: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        if dtype != self.dtype:
            key += str(dtype).encode()
        if key not in self._known:
            there = value.to(self.device, dtype)
            self._known[key] = there if factor == 1.0 else there * factor
            if len(self._known) > _MAX_TABLES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


class _Loaded:
    """The tensors of one stage."""

    def __init__(self, shape: StageShape, rows: int, vectors: Vectors) -> None:
        make = lambda *size, dtype=torch.int32: torch.zeros(size, dtype=dtype, device=vectors.device)  # noqa: E731
        self.shape, self.vectors, width = shape, vectors, shape.width
        self.dtype = torch.float32 if shape.wide else vectors.dtype
        self.numbers = make(NUMBERS, rows)
        """codes, index, whether lengths are kept, number of the condition, whether the row is multiplied"""
        self.table = make(shape.room, width, dtype=self.dtype) if shape.room else None
        self.columns = make(shape.room, width, dtype=torch.bool) if shape.by_head else None
        """which columns each vector changes; None: all of them"""
        self.directions = [make(count, width, dtype=self.dtype) for count in shape.directions]
        self.masks = make(len(shape.directions), rows, dtype=torch.bool)
        self.conditions = make(width, shape.conditions, dtype=self.dtype)
        self.above = make(shape.conditions, dtype=torch.float32)
        """what a projection must be greater than, for each condition"""
        self._keys: tuple[bytes, ...] = ()

    def load(self, stage: EditStage) -> None:
        """Mutates: takes the vectors of a stage of the same shape. Its codes come by `point`."""
        keys = tuple(edit.key for edit in [*stage.tables, *(edit for edit, _ in stage.projections), *stage.conditions])
        if keys == self._keys:
            return
        if self.table is not None and stage.tables:
            together = torch.cat([self.vectors.of(edit, self.shape.width, self.dtype) for edit in stage.tables])
            self.table[: len(together)] = together
            if self.columns is not None:
                self.columns[: len(together)] = torch.from_numpy(stage.columns()).to(self.columns.device)
        for target, (edit, _) in zip(self.directions, stage.projections, strict=True):
            target.copy_(self.vectors.of(edit, self.shape.width, self.dtype))
        if stage.conditions:
            together = torch.cat([self.vectors.condition(edit) for edit in stage.conditions])
            self.conditions[:, : len(together)] = together.t()
            above = torch.tensor([edit.above for edit in stage.conditions], dtype=torch.float32)
            self.above[: len(together)] = above.to(self.above.device)
        self._keys = keys

    def apply(self, x: Tensor) -> Tensor:
        """x [rows, width]. In the order of `PlacedEdit.apply`."""
        codes, index, kept, when, multiplied, matched = self.numbers
        edited = x if self.table is None else edit_rows(x, codes, index, self.table)
        if self.shape.multiplied and self.table is not None:
            edited = torch.where(multiplied[:, None] > 0, x * self.table.index_select(0, index), edited)
        if self.shape.matched and self.table is not None:
            vectors = keep_lengths(x, self.table.index_select(0, index), (matched != 0).to(torch.int32), self.shape.matched)
            factor = matched.view(torch.float32).to(x.dtype)[:, None]
            edited = torch.where(matched[:, None] != 0, x + vectors * factor, edited)
        for directions, mask in zip(self.directions, self.masks, strict=True):
            for direction in directions:
                edited = torch.where(mask[:, None], without_direction(edited, direction), edited)
        if self.shape.lengths:
            edited = keep_lengths(x, edited, kept, self.shape.lengths)
        if self.shape.conditions:  # all directions in one product: a column's bits do not depend on the others
            dots = matmul(x, self.conditions, out_dtype=torch.float32)
            which = (when.long() - 1).clamp(min=0)
            holds = dots.gather(1, which[:, None]) > self.above[which][:, None]
            edited = torch.where(holds | (when == 0)[:, None], edited, x)
        if self.columns is not None:  # a row that is zeroed as a whole has no vector, hence no columns
            changed = self.columns.index_select(0, index) | (codes == ZERO)[:, None]
            edited = torch.where(changed, edited, x)
        return edited


class ProgramTap:
    """Applies a program of a given shape, then passes the edited value to `inner`. Its tensors stay where they are."""

    def __init__(self, shape: EditShape, rows: int, vectors: Vectors, inner: Tap | None = None) -> None:
        self.inner, self._device = inner, vectors.device
        self._stages = {site: [_Loaded(stage, rows, vectors) for stage in stages] for site, stages in shape}

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
        """Mutates: takes what the rows do, as `rows_of` lists it. numbers [stages, NUMBERS, rows], masks [projections, rows]"""
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
    """(numbers [stages, NUMBERS, rows] int32, masks [projections, rows] bool), padded with rows that are kept."""
    stages = [stage for _, stages in sorted(program.stages.items()) for stage in stages]
    numbers = np.zeros((len(stages), NUMBERS, rows), dtype=np.int32)
    for target, stage in zip(numbers, stages, strict=True):
        target[:, : program.num_rows] = stage.codes, stage.index, stage.kept, stage.when, stage.multiplied, stage.matched
    found = [mask for stage in stages for _, mask in stage.projections]
    masks = np.zeros((len(found), rows), dtype=bool)
    for target, mask in zip(masks, found, strict=True):
        target[: program.num_rows] = mask
    return numbers, masks
