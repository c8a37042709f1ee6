"""The (row, head) pairs of a pass whose edges edits cut or set, for the attention of the kernels. A CPU's is in `edges.py`."""

import numpy as np
import torch

from replaylens.engine.errors import BadEdit
from replaylens.engine.model.ops import AttentionSpec
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.placed import PATTERN, PlacedEdit
from replaylens.kernels.edges import HIDDEN, REPLACED, CutPairs


class _Pair:
    """The edges of one row and head."""

    def __init__(self, first: int, position: int, most: int) -> None:
        self.seen = slice(first, position + 1)
        self.edges = np.zeros(most, dtype=np.uint8)
        self.weights = np.zeros(most, dtype=np.float32)

    def change(self, edit: PlacedEdit, keys: list[int], weights: np.ndarray | None) -> None:
        """Mutates: the later of two edits of an edge counts, except that a hidden edge stays hidden."""
        self.edges[keys] |= HIDDEN if edit.op == "mask" else REPLACED
        if edit.op != "mask":
            self.weights[keys] = 0.0 if weights is None else weights


def cut_pairs(batch: Batch, spec: AttentionSpec, heads: int) -> CutPairs | None:
    """The pairs of a layer with a changed edge to a key they see, on the batch's device; None if there are none.

    Raises BadEdit if a row sees no key.
    """
    site, most = f"blocks.{spec.layer}.{PATTERN}", max(s.end for s in batch.segments)
    found: dict[tuple[int, int], _Pair] = {}
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site != site:
                continue
            for position in edit.edited(segment.start, segment.tokens):
                first = max(0, position + 1 - spec.window) if spec.window else 0
                columns = [i for i, key in enumerate(edit.keys) if first <= key <= position]
                for head in (edit.heads or range(heads)) if columns else ():
                    pair = found.setdefault((batch.row(index, position), head), _Pair(first, position, most))
                    pair.change(edit, [edit.keys[i] for i in columns], _weights(edit, position, head, columns))
    if any((pair.edges[pair.seen] & HIDDEN).all() for pair in found.values()):
        raise BadEdit(
            f"Edits of {site} hide every key that a position sees, within its sliding window if it has one. Leave at "
            "least one, or use the op 'zero'."
        )
    return _there(found, str(batch.tokens.device)) if found else None


def _weights(edit: PlacedEdit, position: int, head: int, columns: list[int]) -> np.ndarray | None:
    """What a `set` sets these keys to; None for other ops."""
    if edit.op != "set":
        return None
    rows = edit.vectors[edit.place(position)] if edit.vectors.dim() == 3 else edit.vectors
    found: np.ndarray = rows[head, columns].numpy()
    return found


def _there(found: dict[tuple[int, int], _Pair], device: str) -> CutPairs:
    there = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)  # noqa: E731
    row, head = np.array(list(found), dtype=np.int32).T
    pairs = list(found.values())
    sets = any(pair.weights.any() for pair in pairs)
    weights = there(np.stack([pair.weights for pair in pairs])) if sets else None
    return CutPairs(there(row), there(head), there(np.stack([pair.edges for pair in pairs])), weights)
