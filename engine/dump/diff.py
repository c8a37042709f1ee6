"""`diff`: the first row in which two dumps differ; if there is none, the first site or label that they describe differently."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from replaylens.engine.dump.content import Content, concatenate
from replaylens.engine.dump.described import index_problems, labels_differ, sites_differ
from replaylens.engine.dump.difference import Difference, first_difference
from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import BadDump
from replaylens.engine.progress import hidden


@dataclass(frozen=True)
class Comparison:
    """The result of `diff`."""

    difference: Difference | None
    """the first row, site or label that differs; None: the content is the same"""
    remarks: tuple[str, ...]
    """differences between fingerprints and plans; the content can still be the same"""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        return "\n".join([str(self.difference) if self.difference else "the same content", *self.remarks])


def diff(a: str | Path | Dump, b: str | Path | Dump, *, accepted: bool = False, progress: bool = False) -> Comparison:
    """Compare two dumps row by row, whatever their shard sizes. `accepted`: ignore rejected branches.

    Hashes all files first and raises BadDump, with their names, if any are damaged, or if index and manifest contradict each
    other.
    """
    mine, yours = (given if isinstance(given, Dump) else Dump.open(given) for given in (a, b))
    for dump in {mine.url: mine, yours.url: yours}.values():
        if problems := dump.files.problems(progress):
            raise BadDump(f"{dump.url} is damaged: {'; '.join(problems)}. Resume the dump to repair it.")
        if problems := index_problems(dump.files):
            raise BadDump(f"{dump.url} contradicts itself: {'; '.join(problems)}. Copy it again from an intact dump.")
    remarks = [f"fingerprint: {line}" for line in mine.manifest.fingerprint.differences(yours.manifest.fingerprint)]
    remarks += [f"plan: {line}" for line in mine.manifest.plan.differences(yours.manifest.plan)]
    every = sorted({*mine.manifest.plan.examples, *yours.manifest.plan.examples})
    step = mine.manifest.plan.examples_per_shard
    for first in tqdm(range(0, len(every), step), unit="shard", desc="diff", disable=hidden(progress)):
        some = every[first : first + step]
        if _same_shard(mine, yours, some, accepted):
            continue
        here, there = _load(mine, some, accepted), _load(yours, some, accepted)
        if found := first_difference(here, there):
            return Comparison(found, tuple(remarks))
    ours, others = mine.manifest, yours.manifest
    described = sites_differ(ours.sites, others.sites) or labels_differ(ours.labels, others.labels, accepted)
    return Comparison(described, tuple(remarks))


def _same_shard(a: Dump, b: Dump, indices: Sequence[int], accepted: bool) -> bool:
    """Whether both dumps store these examples as one shard with the same digest; if so, no row needs to be read."""
    found = []
    for dump in (a, b):
        number = dump.files.shard_of(indices[0]) if indices[0] in dump.manifest.plan.examples else None
        if number is None or list(dump.manifest.plan.indices(number)) != list(indices):
            return False
        found.append(dump.manifest.shards[number].digests[1 if accepted else 0])
    return found[0] == found[1]


def _load(dump: Dump, indices: Iterable[int], accepted: bool) -> Content:
    """The rows of the given examples, from all shards that hold them. Examples that the dump lacks have no rows."""
    there = [index for index in indices if index in dump.manifest.plan.examples]
    pieces = [dump.files.content(number).of_examples(some) for number, some in dump.files.by_shard(there).items()]
    pieces = pieces or [dump.files.content(0).select(np.zeros(0, dtype=np.int64))]
    tensors = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in pieces[0].tensors}
    content = Content(tensors, concatenate([piece.index for piece in pieces]))
    return content.accepted() if accepted else content
