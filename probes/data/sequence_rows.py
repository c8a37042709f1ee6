"""Rows of several positions side by side, for probes that read a whole path."""

from collections.abc import Sequence

import numpy as np

from replaylens.probes.data.paths import example_keys
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.data.target import Target
from replaylens.probes.errors import BadRows


def sequences(
    rows: ProbeRows, label: str, site: str, layer: int | None, positions: Sequence[str]
) -> tuple[np.ndarray, Target, np.ndarray]:
    """(X [examples, positions * d], the label at the last position, roots); an absent position is all zeros.

    Every position must select at most one row of an example's accepted path ("step:2", "query-1", "12").
    """
    rows = rows.accepted()
    last = rows.at(positions[-1])
    target = last.target(label)
    last, target = last.where(target.present), target[target.present]
    place = {key: i for i, key in enumerate(example_keys(last.frame))}
    if len(place) != len(last):
        raise BadRows(f"Position {positions[-1]!r} has several rows per example. Use one such as 'query' or 'step:3'.")
    blocks = []
    for position in positions:
        here = rows.at(position)
        here = here.where(np.array([key in place for key in example_keys(here.frame)], dtype=bool))
        if len(set(example_keys(here.frame))) != len(here):
            raise BadRows(f"Position {position!r} has several rows per example. Use one such as 'query' or 'step:3'.")
        found = here.matrix(site, layer)
        block = np.zeros((len(last), found.shape[1]), dtype=found.dtype)
        block[[place[key] for key in example_keys(here.frame)]] = found
        blocks.append(block)
    return np.concatenate(blocks, 1), target, last.roots
