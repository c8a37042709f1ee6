"""`DumpedThoughts`: the Thinking-States picture of a dumped example, from its stored rows, without a model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.pictures.paths import DrawnPath
from replaylens.engine.pictures.readings import Decode
from replaylens.engine.pictures.thoughts import END, DrawnChunk, DrawnRound, Thinking, step_facts
from replaylens.engine.pictures.tree import Tree
from replaylens.engine.thinking.model import STATE_SITE
from replaylens.engine.thinking.thoughts import TOKENS_SITE

if TYPE_CHECKING:
    import pandas as pd

_NOTHING = -1
"""marks the absence of a token"""


@dataclass(frozen=True, eq=False)
class DumpedThoughts:
    """The thoughts of a shard, by row; see `engine.thinking.thoughts`."""

    plan: DumpPlan
    decode: Decode
    tokens: np.ndarray
    """[rows, steps]; only the last row of a chunk holds a thought"""
    squares: np.ndarray | None
    """squared norm of the added state: [rows]"""
    likely: np.ndarray | None
    """probability of each step's most likely token, NaN for missing steps: [rows, steps]"""

    @classmethod
    def of(cls, dump: Dump, number: int, decode: Decode) -> "DumpedThoughts | None":
        """The thoughts of one shard; None if the model does not think, or the dump lacks thoughts or positions."""
        plan, shard = dump.manifest.plan, dump.files.shard(number)
        if TOKENS_SITE not in dump.sites or plan.positions != "all":
            return None
        rows = {
            name: shard.rows(name, slice(0, shard.entry.rows))
            for name in (TOKENS_SITE, STATE_SITE, "thinking.top_ids", "thinking.top_logprobs")
            if name in dump.sites
        }
        squares = rows[STATE_SITE].float().square().sum(1).numpy() if STATE_SITE in rows else None
        likely = None
        if {"thinking.top_ids", "thinking.top_logprobs"} <= rows.keys():
            ids, logprobs = rows["thinking.top_ids"][:, :, 0], rows["thinking.top_logprobs"][:, :, 0]
            likely = np.where(ids.numpy() == _NOTHING, np.nan, logprobs.float().exp().numpy())
        return cls(plan, decode, rows[TOKENS_SITE].numpy(), squares, likely)

    def picture(self, rows: "pd.DataFrame", tree: Tree) -> Thinking:
        """The picture of the example with these index lines."""
        accepted, *others = [self._chunks(path, rows["row"][rows["branch"] == path.branch].to_numpy()) for path in tree.paths]
        forks = [path.fork_position for path in tree.paths[1:]]
        suffixes = {fork: tuple(chunks) for fork, chunks in zip(forks, others, strict=True) if chunks}
        return Thinking(tuple(accepted), tuple(self._rounds(accepted, suffixes)))

    def _chunks(self, path: DrawnPath, rows: np.ndarray) -> list[DrawnChunk]:
        """The chunks of one branch. Each ends at a row with a thought; the rest after the last one is the answer. Empty
        without thoughts, as in rejected drafts of an answer."""
        ends = np.flatnonzero(self.tokens[rows, 0] != _NOTHING) + 1
        pieces = np.split(np.arange(len(rows)), ends) if len(ends) else []
        return [self._chunk([path.tokens[i].text for i in piece], rows[piece]) for piece in pieces if len(piece)]

    def _chunk(self, texts: list[str], rows: np.ndarray) -> DrawnChunk:
        said = [int(token) for token in self.tokens[rows[-1]] if token != _NOTHING]
        thought = (*map(self.decode, said[:-1]), END) if said else ()
        state = None if self.squares is None else float(np.sqrt(self.squares[rows].sum()))
        likely = [] if self.likely is None else [p for p in self.likely[rows[-1]].tolist() if p == p]
        return DrawnChunk(tuple(texts), thought, state, step_facts(likely))

    def _rounds(self, accepted: list[DrawnChunk], suffixes: dict[int, tuple[DrawnChunk, ...]]) -> list[DrawnRound]:
        """The rounds, from the forks of the rolled-back suffixes; empty if the dump lacks rejected branches."""
        count = sum(bool(chunk.thought) for chunk in accepted)
        if not self.plan.rejected:
            return []
        if self.plan.drafter_settings.get("thoughts") == "sequential":
            return [DrawnRound(i, i + 1, i + 1) for i in range(count)]
        ends = np.cumsum([len(chunk.tokens) for chunk in accepted]).tolist()
        rounds, first = [], 0
        for fork, dropped in sorted(suffixes.items()):
            kept = ends.index(fork) + 1
            rounds.append(DrawnRound(first, kept, kept + len(dropped), dropped))
            first = kept
        return [*rounds, DrawnRound(first, count, count)]
