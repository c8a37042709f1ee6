"""Take chosen rows of chosen sites to the host without stalling the pass.

    staging[slot, site, i] = x[rows[i]]      on the pass's stream, one small kernel per site
    host[slot] = staging[slot]               on a stream of its own, into pinned memory, when the pass has ended

A ring of slots lets the next passes run while earlier copies are on their way. A slot is reused only after its reader gave
it back: the ring never overwrites what nobody has read, it says that it is full. The kernel reads the slot's number from
device memory, so one captured graph serves every slot. Rows are copied bit for bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import ceil_div, require, require_rows, require_shape

_BLOCK = 2048


@triton.jit
def _gather_kernel(
    X, ROWS, OUT, SLOT, width, stride_x, stride_slot, stride_o, ALL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = i if ALL else tl.load(ROWS + i).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * stride_x + column, mask=column < width)
    slot = tl.load(SLOT).to(tl.int64)
    tl.store(OUT + slot * stride_slot + i * stride_o + column, x, mask=column < width)


@dataclass
class Ticket:
    """One pass's rows on their way to the host."""

    slot: int
    num_rows: int
    copied: torch.cuda.Event | None
    """None on a CPU, where the copy is made at once"""


class CaptureRing:
    """Device staging and pinned host memory for `slots` passes of up to `rows` rows at `sites` sites.

    begin -> gather (once per site) -> commit gives a ticket; read gives its rows; release frees its slot.
    """

    def __init__(
        self, sites: int, rows: int, width: int, dtype: torch.dtype, device: torch.device | str, slots: int = 2
    ) -> None:
        require(
            min(sites, rows, width, slots) > 0,
            "an empty ring: sites {}, rows {}, width {}, slots {}",
            sites,
            rows,
            width,
            slots,
        )
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self.staging = torch.empty(slots, sites, rows, width, dtype=dtype, device=self.device)
        self.host = torch.empty(slots, sites, rows, width, dtype=dtype, pin_memory=self._cuda)
        self._slot = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._free = list(range(slots))
        self._open: int | None = None
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None

    def begin(self) -> None:
        """Open a slot for the pass that is about to run on the current stream."""
        require(self._open is None, "the last pass's capture was not committed")
        if not self._free:
            raise RuntimeError(
                f"all {len(self.host)} capture slots hold unread rows: read and release one, or ask for more slots"
            )
        self._open = self._free.pop(0)
        self._slot.fill_(self._open)

    def gather(self, site: int, x: Tensor, rows: Tensor | None = None) -> None:
        """Copy x[rows] (all rows when None) to line `site` of the open slot. May be part of a captured graph."""
        require(0 <= site < self.staging.shape[1], "site {} of {}", site, self.staging.shape[1])
        require_shape("x", x, (None, self.staging.shape[3]))
        require(x.dtype == self.staging.dtype, "x is {}; the ring holds {}", x.dtype, self.staging.dtype)
        require_rows("x", x)
        count = x.shape[0] if rows is None else rows.shape[0]
        require(count <= self.staging.shape[2], "{} rows do not fit a ring of {}", count, self.staging.shape[2])
        if count:
            line = self.staging[:, site]
            _gather_kernel[(count, ceil_div(x.shape[1], _BLOCK))](
                x, x if rows is None else rows, line, self._slot, x.shape[1],
                x.stride(0), line.stride(0), line.stride(1), rows is None, _BLOCK, num_warps=4,
            )  # fmt: skip

    def commit(self, num_rows: int) -> Ticket:
        """Send the first `num_rows` rows of every site to the host; returns at once."""
        require(self._open is not None, "no capture is open: call begin first")
        assert self._open is not None
        slot, self._open = self._open, None
        source, target = self.staging[slot, :, :num_rows], self.host[slot, :, :num_rows]
        if self._stream is None:
            target.copy_(source)
            return Ticket(slot, num_rows, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for site in range(source.shape[0]):  # each a plain contiguous copy: a strided one would not be asynchronous
                target[site].copy_(source[site], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Ticket(slot, num_rows, copied)

    def read(self, ticket: Ticket) -> Tensor:
        """The rows [sites, num_rows, width] in host memory; waits for the copy. Valid until `release`."""
        if ticket.copied is not None:
            ticket.copied.synchronize()
        return self.host[ticket.slot, :, : ticket.num_rows]

    def release(self, ticket: Ticket) -> None:
        """Give the slot back. The rows of the ticket may be overwritten from now on."""
        require(ticket.slot not in self._free, "slot {} was released before", ticket.slot)
        self._free.append(ticket.slot)
