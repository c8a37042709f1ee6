"""`EditTable`: the edits of a pass on a CPU as numbers, and `TableTap`, which applies them."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.model.ops import Tap
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.terminal import Later
from replaylens.kernels.threads import bits

if TYPE_CHECKING:
    from replaylens.kernels import cpu_edits
else:  # compiled for edits only
    cpu_edits = Later("replaylens.kernels.cpu_edits")


class EditTable:
    """The edits of a batch's rows, but for those inside attention or a recurrence."""

    def __init__(self, batch: Batch, table: SiteTable) -> None:
        self.batch, self._table, self._held = batch, table, list[Tensor]()
        self._edits = list[tuple[PlacedEdit, list[int], list[int]]]()
        """edits with the positions that they change, and their packed rows; those of a row in their order"""
        for index, segment in enumerate(batch.segments):
            for edit in segment.edits:
                if not edit.inside and (positions := edit.edited(segment.start, segment.tokens)):
                    shift = batch.offsets[index] - segment.start
                    self._edits.append((edit, positions, [position + shift for position in positions]))
        self.sites = tuple(sorted({edit.site for edit, *_ in self._edits}))

    @cached_property
    def numbers(self) -> Tensor:
        """As `edit_rows` reads them. The vectors that they point to live as long as the table."""
        rows, found = [list[int]() for _ in self.sites], [list[list[int]]() for _ in self.sites]
        for edit, positions, packed in self._edits:
            site = self.sites.index(edit.site)
            rows[site] += packed
            found[site] += self._of(edit, positions, self._table.sites[edit.site].shape)
        tables = [np.array(each, np.int64) for each in found]
        return cpu_edits.edit_table(list(zip(rows, tables, strict=True)), self.batch.num_rows)

    def _of(self, edit: PlacedEdit, positions: list[int], shape: tuple[int, ...]) -> list[list[int]]:
        """The numbers of an edit at each of these positions, for rows of this shape."""
        first, places = 0, [0] * len(positions)
        if edit.op != "zero":
            first = self._address(edit.vectors)
            if edit.op == "resample":
                places = edit.draws(positions)
            elif edit.op != "project_out" and edit.vectors.dim() > len(shape):  # one vector per edited position
                places = [edit.place(position) for position in positions]
        marks = torch.zeros(shape[0], dtype=torch.int64).index_fill_(0, torch.tensor(edit.heads), 1) if edit.heads else None
        rest = [
            bits(edit.factor), len(edit.vectors) if edit.op == "project_out" else 0, self._address(marks),
            self._address(edit.when), bits(edit.above), int(edit.keep_norm),
            int(edit.match_norm and edit.op in ("add", "set")),
        ]  # fmt: skip
        size = 4 * math.prod(shape)
        return [[cpu_edits.KINDS.get(edit.op, cpu_edits.SET), first + size * place, *rest] for place in places]

    def _address(self, x: Tensor | None) -> int:
        """Of a tensor as kernels read it, which stays alive."""
        if x is None:
            return 0
        self._held.append(x if x.dtype == torch.int64 else x.to("cpu", torch.float32).contiguous())
        return self._held[-1].data_ptr()


class TableTap:
    """Applies the edits of a table, then passes the edited value to `inner`."""

    def __init__(self, table: EditTable, inner: Tap | None) -> None:
        self.table, self.inner = table, inner

    def wants(self, site: str) -> bool:
        return site in self.table.sites or (self.inner is not None and self.inner.wants(site))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.table.sites:
            rows = value if value.stride(-1) == 1 else value.contiguous()
            value = cpu_edits.edit_rows(rows, self.table.numbers, self.table.sites.index(site))
        return self.inner(site, value) if self.inner is not None and self.inner.wants(site) else value
