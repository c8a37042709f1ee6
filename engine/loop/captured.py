"""Captured rows on their way from a pass or a burst into the recordings of branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.lens import readout
from replaylens.engine.lens.known import KnownLenses
from replaylens.engine.loop.lane import Lane
from replaylens.engine.loop.turn import Turn
from replaylens.engine.loop.verify import Verdict
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes.runner import Keep, PassResult, Runner
from replaylens.engine.request.capture import HEAD_SITES, LensSpec, PassTap
from replaylens.engine.request.recording import Chunk, Joined, RowSlice

SiteRows = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Ahead:
    """Z of many rows of a pass."""

    row_of: dict[int, int]
    """packed row -> row of Z"""
    emitted: list[int]
    rows: SiteRows


class PassRows:
    """The captured rows of one pass. They are sent on and read through the lens for all turns together."""

    def __init__(self, runner: Runner, tree: BranchTree, lenses: KnownLenses, tap: PassTap, result: PassResult) -> None:
        self.runner, self.tree, self.lenses, self.tap, self.result = runner, tree, lenses, tap, result
        self._ahead: dict[tuple[LensSpec, Keep], _Ahead] = {}

    def send(self, turns: Sequence[Turn]) -> None:
        """Start the way of all rows that turns may keep to where they are kept."""
        batch = self.result.batch
        for keep in ("host", "device"):
            packed: list[int] = []
            names: dict[str, None] = {}
            for turn in turns:
                spec = turn.job.lane.capture
                if spec is not None and spec.keep == keep and turn.job.lane.recording is not None:
                    segments = [(i, batch.segments[i]) for i in turn.segments]
                    found = [row for i, s in segments for row in self._packed(turn.job.lane, i, s.start, s.end)]
                    packed += found
                    names |= dict.fromkeys(site for site in spec.sites if site not in HEAD_SITES and found)
            self.runner.send(self.tap, tuple(names), packed, batch.num_rows, keep)

    def read_ahead(self, turns: Sequence[Turn], verdicts: Mapping[Turn, Verdict]) -> None:
        """Read the rows that turns will commit through the lens, all together."""
        asked: dict[tuple[LensSpec, Keep], tuple[list[int], list[int]]] = {}
        for turn in turns:
            spec = turn.job.lane.capture
            if spec is not None and spec.lens is not None and turn.job.lane.recording is not None:
                packed, emitted = asked.setdefault((spec.lens, spec.keep), ([], []))
                for chain in range(len(turn.segments)):
                    rows, follows = self._following(turn, chain, verdicts.get(turn))
                    packed += rows
                    emitted += follows
        for (lens, keep), (packed, emitted) in asked.items():
            if packed:
                z = self._read(lens, keep, packed, emitted)
                self._ahead[lens, keep] = _Ahead({row: i for i, row in enumerate(packed)}, emitted, z)

    def chunk(self, lane: Lane, segment: int, start: int, emitted: Sequence[int]) -> Chunk:
        """Rows of a segment from position `start` on; emitted[i] is the token after the i-th of them, -1: none yet."""
        spec, end = lane.capture, start + len(emitted)
        assert spec is not None
        positions = self._kept(lane, start, end)
        if not positions:
            return Chunk(start, end, positions, {})
        packed = self._packed(lane, segment, start, end)
        parts = [self.tap.take(tuple(site for site in spec.sites if site not in HEAD_SITES), packed, spec.keep)]
        if head := [site for site in spec.sites if site in HEAD_SITES]:
            parts.append(self.runner.kept(self.runner.head(self._values(spec.last, packed), head), spec.keep))
        if spec.lens is not None:
            parts.append(self._z(spec.lens, spec.keep, packed, [emitted[p - start] for p in positions]))
        return Chunk(start, end, positions, parts[0] if len(parts) == 1 else Joined(parts))

    def _z(self, lens: LensSpec, keep: Keep, packed: Sequence[int], emitted: list[int]) -> SiteRows:
        """Z of some rows; read again if they do not end as foreseen, such as at a stop string."""
        ahead = self._ahead.get((lens, keep))
        first = ahead.row_of.get(packed[0], -1) if ahead is not None else -1
        if ahead is None or first < 0 or ahead.emitted[first : first + len(packed)] != emitted:
            return self._read(lens, keep, packed, emitted)
        part = RowSlice(ahead.rows, first, first + len(packed))
        if isinstance(ahead.rows, dict):  # a copy, so that a long-lived branch does not keep the whole pass alive
            return {name: z.clone() for name, z in part.items()}
        return part

    def _read(self, lens: LensSpec, keep: Keep, packed: Sequence[int], emitted: list[int]) -> SiteRows:
        residuals = {site: self._values(site, packed) for site in lens.sites}
        return self.runner.kept(readout.read_there(lens, self.runner, residuals, emitted, self.lenses.of(lens)), keep)

    def _values(self, site: str, packed: Sequence[int]) -> Tensor:
        """Rows of a site, where the pass computed them."""
        value = self.tap.values[site]
        if packed[-1] - packed[0] == len(packed) - 1:
            return value[packed[0] : packed[-1] + 1]
        return value[torch.tensor(packed).to(value.device, non_blocking=True)]

    def _kept(self, lane: Lane, start: int, end: int) -> Sequence[int]:
        assert lane.capture is not None
        return lane.capture.positions.kept(start, end, self.tree.branch(lane.branch).root_length)

    def _packed(self, lane: Lane, segment: int, start: int, end: int) -> Sequence[int]:
        """The packed rows of the positions of [start, end) that the lane keeps."""
        shift = self.result.batch.row(segment, start) - start
        kept = self._kept(lane, start, end)
        return range(kept.start + shift, kept.stop + shift, kept.step) if isinstance(kept, range) else [p + shift for p in kept]

    def _following(self, turn: Turn, chain: int, verdict: Verdict | None) -> tuple[Sequence[int], list[int]]:
        """(packed rows of one chain that may be committed, the token after each)."""
        lane, drafts = turn.job.lane, turn.chains[chain]
        tokens, segment = [*turn.rows, *drafts], turn.segments[chain]
        follows = [*tokens[1:], -1]
        if not turn.complete:
            follows[-1] = self.tree.branch(lane.branch).tokens[turn.end]
        if verdict is not None and chain == verdict.chain:
            follows[len(turn.rows) - 1 + verdict.num_accepted] = verdict.token
        assert lane.recording is not None and lane.capture is not None
        start = max(turn.start, lane.recording.end - lane.recording.open_end)
        end = turn.start + len(tokens)
        if not lane.capture.rejected and verdict is not None:
            end = turn.end + verdict.num_accepted if chain == verdict.chain else start
        kept = self._kept(lane, start, max(start, end))
        return self._packed(lane, segment, start, max(start, end)), [follows[p - turn.start] for p in kept]
