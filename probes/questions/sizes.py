"""Sizes of the rows behind a line of a report: prompts, and groups of prompts that are independent."""

from typing import Any

import numpy as np

from replaylens.probes.data.groups import groups_of
from replaylens.probes.data.rows import ProbeRows


def sizes(rows: ProbeRows, side: np.ndarray | None = None) -> dict[str, Any]:
    """Numbers of roots and groups among the rows of a side [rows] bool; default: all."""
    chosen = np.ones(len(rows), dtype=bool) if side is None else side
    return {"roots": len(np.unique(rows.roots[chosen])), "groups": len(np.unique(groups_of(rows)[chosen]))}
