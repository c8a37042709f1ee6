"""Rows that say nothing about given prompts: what to fit on before the prompts are changed or read."""

from collections.abc import Sequence

import numpy as np

from replaylens.engine.engine import Engine
from replaylens.probes.data.groups import histories, path_keys
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.errors import BadRows, SharedRows
from replaylens.tasks import Example


def unseen(rows: ProbeRows, engine: Engine, examples: Sequence[Example]) -> tuple[ProbeRows, list[str]]:
    """(the rows whose path begins none of the prompts, notes on what was left out).

    A row depends on its path alone, so a row of another prompt with the same beginning is the same row. Raises BadRows if
    nothing is left.
    """
    mine = {example.root for example in examples}
    keep = ~np.isin(rows.roots, list(mine))
    paths = histories(rows)
    if paths is None:
        notes = [
            "Cannot check that rows share no beginning with the prompts: the paths have holes. Whole prompts are kept apart."
        ]
    else:
        begun = {
            tuple(tokens[: n + 1]) for e in examples for tokens in [engine.text.encode(e.prompt)] for n in range(len(tokens))
        }
        keep &= np.array([tuple(path.tolist()) not in begun for path in paths], dtype=bool)
        notes = []
    if not keep.all():
        notes.append(f"Left out {int((~keep).sum())} of {len(rows)} rows to fit on: their paths begin one of the prompts.")
    if not keep.any():
        raise BadRows(f"All {len(rows)} rows to fit on begin one of the prompts. Give other prompts, or more rows.")
    return rows.where(keep), notes


def apart(fitted: ProbeRows, tested: ProbeRows) -> None:
    """Raise SharedRows, which names two rows, if a tested row is one that was fitted on."""
    keys = path_keys(fitted), path_keys(tested)
    both = np.intersect1d(*keys)
    if len(both):
        ends = [
            f"row {int(np.flatnonzero(each == both[0])[0])} (root {rows.roots[each == both[0]][0]})"
            for each, rows in zip(keys, (fitted, tested), strict=True)
        ]
        raise SharedRows(
            f"{ends[0]} is fitted on and {ends[1]} is read, but they have the same path and so the same activation; "
            f"{len(both) - 1} more are like them. Give other prompts to read."
        )
