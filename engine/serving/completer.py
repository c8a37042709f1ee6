"""`Completer`: what a branch lacks, computed on a twin: an untraced fork with the same path, released afterwards.

The branch itself may be busy or closed meanwhile. What is computed becomes the branch's own, if it still lacks it.
"""

from collections.abc import Sequence

from torch import Tensor

from replaylens.engine.interrupts import held_interrupt
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.recording import Recording
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import changing, reading


class Completer:
    """Completes KV and captured rows of the lanes of one forest. Its methods wait for passes."""

    def __init__(self, forest: Forest) -> None:
        self.forest, self.lock = forest, forest.lock

    def kv(self, lane: Lane) -> Tensor:
        """A copy of the KV of all committed tokens [positions, layers, *kv_shape]. Missing KV is computed on a twin,
        since the branch itself may be busy or closed. Raises OutOfPages if there is no room."""
        known, committed = self._known_kv(lane)
        if known is not None:
            return known
        with self.forest.made() as lanes, self.forest.quiet():
            with held_interrupt():
                lanes.append(twin := self.forest.fork(lane, committed))
            twin.capture = twin.recording = None
            self.forest.compute(lanes)
            return self._taken_over(lane, twin, committed)

    def complete_rows(self, lane: Lane) -> None:
        """Mutates: computes the captured rows that committed tokens lack, on a twin as `kv` does. A fork with edits lacks some
        until its first request, and so does a branch that was cut back where Z had been read. Does nothing if the lane is
        released or keeps no rows. Raises OutOfPages if there is no room."""
        committed, following = self._committed(lane)
        if committed <= (committed if lane.recording is None else lane.recording.end):
            return
        with self.forest.made() as lanes, self.forest.quiet():
            with held_interrupt():
                lanes.append(twin := self.forest.fork(lane, committed + following))
            self.forest.compute(lanes)
            self._taken_over(lane, twin, committed)

    def final_rows(self, lanes: Sequence[Lane], first: Sequence[int], site: str) -> list[Tensor]:
        """The rows of one site from position first[i] on, pending tokens included. They are computed on twins, as by `kv`."""
        with self.forest.made() as twins, self.forest.quiet():
            with held_interrupt():
                for lane, start in zip(lanes, first, strict=True):
                    twins.append(twin := self.forest.fork(lane, len(self.forest.tree.branch(lane.branch).tokens)))
                    twin.capture = CaptureSpec((site,), last=site)
                    twin.recording = Recording(start)
            self.forest.compute(twins)
            rows = [twin.recording[site] for twin in twins if twin.recording is not None]
            for twin in twins:
                self.forest.release(twin)
            return rows

    @reading
    def _committed(self, lane: Lane) -> tuple[int, bool]:
        """The number of committed tokens, none if the lane is released; and whether another token follows them."""
        if lane.branch not in self.forest.loop.lanes:
            return 0, False
        states = self.forest.tree.branch(lane.branch).states
        waiting = TokenState.PENDING in states or TokenState.DRAFT in states
        committed = states.num_committed if waiting else len(states)
        return committed, committed < len(states)

    @reading
    def _known_kv(self, lane: Lane) -> tuple[Tensor | None, int]:
        """The KV of all committed tokens, None if some is missing; and the number of these tokens."""
        committed, _ = self._committed(lane)
        return (self.forest.held_kv(lane) if lane.computed >= committed else None), committed

    @changing
    def _taken_over(self, lane: Lane, twin: Lane, length: int) -> Tensor:
        """The twin's KV of the first `length` tokens. Its pages and rows become the lane's, if the lane still lacks them.
        Releases the twin."""
        twin.computed = length
        self.forest.runner.pool.truncate(twin.table, length)
        kv, path = self.forest.held_kv(twin), len(self.forest.tree.branch(twin.branch).tokens)
        if lane.branch in self.forest.loop.lanes and self.forest.tree.common_prefix(lane.branch, twin.branch) == path:
            if lane.computed < length:
                lane.table, twin.table, lane.computed = twin.table, lane.table, length
            if twin.recording is not None and lane.recording is not None and lane.recording.end < length:
                twin.recording.truncate(length)
                lane.recording.take_over(twin.recording)
        self.forest.release(twin)
        return kv
