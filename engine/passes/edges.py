"""Edges of attention (query, key, head) that edits cut or set, for the attention of a CPU."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.placed import PATTERN, PlacedEdit


@dataclass(frozen=True, eq=False)
class Cut:
    """The edges that are cut or set in one attention group. An edge of one query changes nothing for another."""

    site: str
    mask: Tensor
    """[pieces, query rows, heads, keys] bool: hidden from the softmax"""
    zero: Tensor
    """likewise: weights that become zero after it"""
    put: Tensor | None = None
    """likewise, in float: weights that edges are set to after it; NaN where they are not"""

    def hide_(self, scores: Tensor) -> None:
        """Mutates scores [kv_heads, pieces, query rows, heads per key head, keys]: masks; BadEdit if a query sees no key."""
        scores.masked_fill_(_by_key_heads(self.mask, len(scores)), -math.inf)
        if bool((scores.amax(-1) == -math.inf).any()):
            raise BadEdit(
                f"Edits of {self.site} hide every key that a position sees, within its sliding window if it has one. Leave at "
                "least one, or use the op 'zero'."
            )

    def weigh_(self, weights: Tensor, total: Tensor, seen: Tensor | None) -> None:
        """Mutates weights and their total, in the shape of scores: zeroes and sets weights.

        A row with a weight that is set is normalised first, so that its total is 1 and every weight is as it is shown.

        seen  if weights are set, where a query sees the key: elsewhere it has no edge
        """
        weights.masked_fill_(_by_key_heads(self.zero, len(weights)), 0.0)
        if self.put is None or seen is None:
            return
        put = _by_key_heads(self.put, len(weights)).to(weights)
        given = ~put.isnan() & seen
        rows = given.any(-1, keepdim=True)
        torch.where(rows, weights / total, weights, out=weights)
        total.masked_fill_(rows, 1.0)
        torch.where(given, put, weights, out=weights)


def _by_key_heads(edges: Tensor, kv_heads: int) -> Tensor:
    """[pieces, query rows, heads, keys] -> [kv_heads, pieces, query rows, heads per key head, keys]"""
    return edges.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)


def cuts(batch: Batch, layer: int, heads: int) -> list[Cut]:
    """The cut edges of every attention group of a layer; an empty list if no edit cuts any."""
    site = f"blocks.{layer}.{PATTERN}"
    if not any(edit.site == site for segment in batch.segments for edit in segment.edits):
        return []
    most = max(group.num_keys for group in batch.groups)
    edges = {op: torch.zeros(batch.padded + 1, heads, most, dtype=torch.bool) for op in ("mask", "zero")}
    sets = any(edit.site == site and edit.op == "set" for segment in batch.segments for edit in segment.edits)
    put = torch.full((batch.padded + 1, heads, most), math.nan, dtype=torch.float32) if sets else None
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site == site:
                positions = edit.edited(segment.start, segment.tokens)
                rows = torch.tensor([batch.row(index, position) for position in positions], dtype=torch.int64)
                at = rows[:, None, None], torch.tensor(list(edit.heads) or list(range(heads)))[:, None]
                keys = [key for key in edit.keys if key < most]
                if edit.op != "set":
                    edges[edit.op][(*at, keys)] = True
                if put is not None and edit.op != "mask":  # the later of two edits of an edge counts
                    put[(*at, keys)] = _weights(edit, positions, most) if edit.op == "set" else torch.tensor(math.nan)
                    edges["zero"][(*at, keys)] = edit.op == "zero"
    of_group = lambda edges, group: edges[group.rows][..., : group.num_keys]  # noqa: E731
    mask, zero = edges["mask"], edges["zero"]
    return [Cut(site, of_group(mask, g), of_group(zero, g), None if put is None else of_group(put, g)) for g in batch.groups]


def _weights(edit: PlacedEdit, positions: list[int], most: int) -> Tensor:
    """The weights that the edit's heads set at the positions, of the keys below `most`; NaN for keys that come later."""
    columns = [i for i, key in enumerate(edit.keys) if key < most]
    value = edit.vectors[..., list(edit.heads), :] if edit.heads else edit.vectors
    rows = value[[edit.place(p) for p in positions]] if value.dim() == 3 else value.expand(len(positions), *value.shape)
    later = torch.tensor([edit.keys[i] for i in columns]) > torch.tensor(positions, dtype=torch.int64)[:, None]
    return rows[..., columns].masked_fill(later[:, None], math.nan)
