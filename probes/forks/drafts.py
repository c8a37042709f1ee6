"""`draft_agreement`: are rejected drafts what resampling would have said instead?

At a fork the engine has rejected a draft, and resampling has drawn continuations of which one, or none, was taken. If drafts
are guesses at what the model might say, they come up among the resamples not taken more often than drafts of other forks do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replaylens.engine.request.values import whole
from replaylens.probes.checks import same_length
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.scoring.permutations import PERMUTATIONS
from replaylens.probes.scoring.statistics import LEVEL, Estimate, difference_over_groups, mean_over_groups

DraftUnit = str | int
"""a text or a token"""


@dataclass(frozen=True)
class DraftAgreement:
    """How rejected drafts and resamples not taken agree."""

    found: Estimate
    """share of rejected drafts that occur among the resamples not taken at their fork"""
    mass: Estimate
    """mean share of the resamples not taken that equal the draft"""
    control: float
    """the same mean with drafts of other forks"""
    gain: Estimate
    """mass minus that of other forks' drafts, fork by fork"""
    p: float
    """one-sided: drafts are exchanged between groups of forks"""
    forks: int

    @property
    def shown(self) -> bool:
        """Drafts agree with resamples beyond chance, at 5 %."""
        return self.p <= 1 - LEVEL and self.gain.low > 0

    def __str__(self) -> str:
        verdict = "Shown" if self.shown else "Not shown"
        return (
            f"{verdict}: rejected drafts are among the resamples not taken. {self.forks} forks; found {self.found}, share of "
            f"resamples {self.mass}, other forks' drafts {self.control:.3f}, p = {self.p:.3f}."
        )


def draft_agreement(
    drafts: Sequence[DraftUnit],
    resamples: Sequence[Sequence[DraftUnit]],
    taken: Sequence[DraftUnit],
    groups: np.ndarray,
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> DraftAgreement:
    """Compare the rejected draft of each fork with the resamples there.

    drafts     [forks]: first token (or unit) of the rejected draft
    resamples  [forks][n]: first tokens (or units) of the resamples
    taken      [forks]: what the path went on with; resamples equal to it do not count
    groups     [forks]: forks of one root are one group
    """
    permutations = whole("permutations", permutations, 19, error=ProbeError)
    same_length(drafts=np.arange(len(drafts)), resamples=np.arange(len(resamples)), taken=np.arange(len(taken)), groups=groups)
    left = [[unit for unit in drawn if unit != own] for drawn, own in zip(resamples, taken, strict=True)]
    keep = [i for i, others in enumerate(left) if others]
    if len(keep) < 2:
        raise BadRows(f"{len(keep)} forks have resamples that were not taken. Give more forks, or a higher temperature.")
    names = {unit: k for k, unit in enumerate(dict.fromkeys([*drafts, *(unit for others in left for unit in others)]))}
    share = np.zeros((len(keep), len(names)))
    for line, i in zip(share, keep, strict=True):
        np.add.at(line, [names[unit] for unit in left[i]], 1 / len(left[i]))
    draft, group = np.array([names[drafts[i]] for i in keep]), np.asarray(groups)[keep]
    at = np.arange(len(keep))
    mass = share[at, draft]
    elsewhere = group[:, None] != group[None]  # [fork, fork that lends its draft]
    if not elsewhere.any(1).all():
        raise BadRows("All forks are of one group. Give forks of several roots.")
    control = (share[:, draft] * elsewhere).sum(1) / elsewhere.sum(1)
    generator, blocks = np.random.default_rng([seed, 0xD4AF]), _blocks(group)
    drawn = np.array([share[at, draft[_exchanged(blocks, generator)]].mean() for _ in range(permutations)])
    p = (1 + (drawn >= mass.mean() - 1e-12).sum()) / (1 + permutations)
    found = mean_over_groups((mass > 0).astype(np.float64), group)
    gain = difference_over_groups(mass - control, group)
    own = difference_over_groups(mass, group)
    share_of = Estimate(own.value, max(own.low, 0.0), min(own.high, 1.0))
    return DraftAgreement(found, share_of, float(control.mean()), gain, float(p), len(keep))


def _blocks(group: np.ndarray) -> list[np.ndarray]:
    """[groups of one size, forks of each], for every size of a group."""
    members = [np.flatnonzero(group == name) for name in np.unique(group)]
    sizes = sorted({len(rows) for rows in members})
    return [np.stack([rows for rows in members if len(rows) == size]) for size in sizes]


def _exchanged(blocks: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """[forks]: the fork whose draft each fork takes; whole groups of equal size are exchanged."""
    out = np.empty(sum(block.size for block in blocks), dtype=np.int64)
    for block in blocks:
        out[block] = block[generator.permutation(len(block))]
    return out
