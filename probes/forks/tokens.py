"""`forking_tokens`: tokens where another choice leads to another outcome (Forking Paths, arXiv 2412.07961).

At each token of a path, rollouts continue from each of the likeliest next tokens. A token is a fork if an alternative leads to
an outcome distribution farther than a threshold from that of the token taken. The survival curve is the probability that
no token drawn so far was such an alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.engine.display import Citable
from replaylens.probes.checks import as_draws, same_length
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.distributions import RESAMPLES, distances, variation_low
from replaylens.probes.intervals import LEVEL, Estimate, difference_over_groups, mean_over_groups
from replaylens.probes.permutations import PERMUTATIONS, Null, max_statistic
from replaylens.probes.verdicts import decide, error_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- forking tokens --------------------------------------------------------------------------------------------------

THRESHOLD = 0.3
"""total variation beyond which an alternative counts as another outcome"""
_PERMUTATIONS = 199


@dataclass(frozen=True, eq=False)
class TokenFork:
    """The alternatives at one token. Raises BadRows for counts or weights that do not fit."""

    position: int
    tokens: list[str]
    """the token taken comes first"""
    weights: np.ndarray
    """[alternatives]: probability of each token at this place; what is missing to 1 belongs to tokens without rollouts"""
    counts: np.ndarray
    """int64 [alternatives, outcomes]: outcomes of rollouts that continue from each token"""

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or not len(self.tokens) == len(self.weights) == len(self.counts):
            raise BadRows(
                f"Position {self.position}: {len(self.tokens)} tokens, {len(self.weights)} weights and counts of shape "
                f"{list(self.counts.shape)}. Give one weight and one row of counts per token."
            )
        if (self.weights < 0).any() or self.weights.sum() > 1 + 1e-6:
            raise BadRows(f"Position {self.position}: the weights sum to {self.weights.sum():.4f}. Give probabilities.")


@dataclass(frozen=True, eq=False)
class ForkingTokens(Citable):
    """Which tokens decide. Bounds hold for all alternatives of all tokens at once."""

    positions: list[int]
    tokens: list[str]
    """the tokens taken"""
    alternatives: pd.DataFrame
    """one line per alternative: position, token, weight, tv (total variation from the token taken), low, high, forks"""
    hazard: np.ndarray
    """[positions]: probability of drawing an alternative that surely leads elsewhere (its low bound is above the threshold)"""
    hazard_high: np.ndarray
    """[positions]: the same for every alternative that may lead elsewhere, tokens without rollouts included"""
    threshold: float
    level: float

    def __repr__(self) -> str:
        return f"ForkingTokens({int(self.forks.sum())} of {len(self.positions)} tokens, threshold {self.threshold})"

    @property
    def forks(self) -> np.ndarray:
        """[positions] bool: an alternative surely leads elsewhere; a false one among all has probability 1 - level at most."""
        return self.hazard > 0

    @property
    def survival_low(self) -> np.ndarray:
        """[positions]: lower bound of the probability that no token up to this one leads elsewhere."""
        return np.cumprod(1 - self.hazard_high)

    @property
    def survival_high(self) -> np.ndarray:
        """[positions]: upper bound of the same."""
        return np.cumprod(1 - self.hazard)

    @property
    def frame(self) -> pd.DataFrame:
        """One line per token of the path."""
        columns = {name: getattr(self, name) for name in ("hazard", "hazard_high", "survival_low", "survival_high", "forks")}
        return pd.DataFrame({"position": self.positions, "token": self.tokens, **columns})

    def plot(self) -> "Figure":
        """The survival curve between its bounds, with forking tokens as lines."""
        from replaylens.engine.display import picture

        figure = picture(min(0.12 * len(self.positions), 18) + 4, 3.0)
        axes = figure.subplots()
        axes.fill_between(self.positions, self.survival_low, self.survival_high, step="post", alpha=0.35, color="#0b4f8f")
        axes.vlines(np.array(self.positions)[self.forks], 0, 1, color="#ee8a72", linewidth=1)
        axes.set(xlabel="position", ylabel="P(no other outcome so far)", ylim=(0, 1.02))
        return self._shown(figure)

    def _repr_html_(self) -> str:
        table: str = self.frame[self.forks].round(3).to_html(index=False)
        return table


def forking_tokens(
    forks: Sequence[TokenFork], *, threshold: float = THRESHOLD, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> ForkingTokens:
    """Find the tokens where an alternative leads to another outcome distribution.

    The low bounds come from an exact test (`distributions.variation_low`), at a level for all alternatives of all tokens.

    threshold  total variation from the token taken beyond which an alternative counts as leading elsewhere
    """
    if not forks:
        raise BadRows("There are no tokens. Give the alternatives of at least one.")
    if not 0 <= threshold < 1:
        raise ProbeError(f"threshold={threshold} is no total variation. Give a number from 0 to below 1.")
    taken = np.concatenate([np.repeat(fork.counts[:1], len(fork.tokens) - 1, 0) for fork in forks])
    others = np.concatenate([fork.counts[1:] for fork in forks])
    joint = 1 - (1 - level) / max(len(others), 1)
    found = distances(taken, others, "tv", level=joint, permutations=_PERMUTATIONS, resamples=resamples, seed=seed)
    low = np.array([variation_low(a, b, threshold, joint) for a, b in zip(taken, others, strict=True)])
    table = pd.DataFrame(
        {
            "position": np.repeat([fork.position for fork in forks], [len(fork.tokens) - 1 for fork in forks]),
            "token": [token for fork in forks for token in fork.tokens[1:]],
            "weight": np.concatenate([fork.weights[1:] for fork in forks]),
            "tv": found.value,
            "low": low,
            "high": np.maximum(found.high, low),
            "forks": low > threshold,
        }
    )
    at = np.repeat(np.arange(len(forks)), [len(fork.tokens) - 1 for fork in forks])
    sure, maybe = (np.bincount(at, table["weight"] * (table[end] > threshold), len(forks)) for end in ("low", "high"))
    unseen = np.array([max(1 - fork.weights.sum(), 0.0) for fork in forks])
    names = [fork.position for fork in forks], [fork.tokens[0] for fork in forks]
    return ForkingTokens(*names, table, sure, np.minimum(maybe + unseen, 1.0), threshold, level)


# ---- siblings --------------------------------------------------------------------------------------------------------
# `sibling_divergence`: how far the states of siblings are apart, depth by depth, and whether the outcome shows in it.


@dataclass(frozen=True, eq=False)
class SiblingDivergence(Citable):
    """Distances of siblings' states at each depth, relative to the mean norm there; intervals over groups of forks."""

    depths: list[int]
    """tokens after the fork"""
    distance: list[Estimate]
    """mean over pairs of siblings"""
    gap: list[Estimate]
    """mean of pairs with different outcomes minus that of pairs with the same, within each fork"""
    p: np.ndarray
    """[depths]: one-sided; siblings of a fork exchange their outcomes"""
    p_family: np.ndarray
    """[depths]: of the largest gap over all depths"""
    pairs: list[int]
    """pairs of siblings at each depth"""

    def __repr__(self) -> str:
        return f"SiblingDivergence({len(self.depths)} depths, {int(self.shown.sum())} with a gap between outcomes)"

    @property
    def shown(self) -> np.ndarray:
        """[depths] bool: siblings with different outcomes are farther apart; 5 % family-wise."""
        return self.p_family <= 1 - LEVEL

    @property
    def frame(self) -> pd.DataFrame:
        """One line per depth."""
        ends = {
            f"{name}{end}": [getattr(each, end or "value") for each in found] for name, found in self._each() for end in _ENDS
        }
        renamed = {name.replace("low", "_low").replace("high", "_high"): values for name, values in ends.items()}
        return pd.DataFrame(
            {"depth": self.depths, "pairs": self.pairs, **renamed, "p": self.p, "p_family": self.p_family, "shown": self.shown}
        )

    def _each(self) -> list[tuple[str, list[Estimate]]]:
        return [("distance", self.distance), ("gap", self.gap)]

    def plot(self) -> "Figure":
        """Distance and gap by depth, with intervals."""
        from replaylens.engine.display import picture

        figure = picture(6, 3.4)
        axes = figure.subplots()
        for (name, found), colour in zip(self._each(), ("#59636e", "#0b4f8f"), strict=True):
            axes.plot(self.depths, [each.value for each in found], marker="o", markersize=3, color=colour, label=name)
            axes.fill_between(
                self.depths, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.2, linewidth=0
            )
        axes.axhline(0, color="#8a949e", linewidth=0.8)
        axes.set(xlabel="tokens after the fork", ylabel="relative distance of states")
        figure.legend(loc="outside right upper", fontsize=8)
        return self._shown(figure)

    def _repr_html_(self) -> str:
        table: str = self.frame.round(4).to_html(index=False)
        return table


_ENDS = ("", "low", "high")


def sibling_divergence(
    states: np.ndarray,
    forks: np.ndarray,
    depths: np.ndarray,
    outcomes: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> SiblingDivergence:
    """Compare the states of siblings, which share a fork, at equal depths.

    states    [rows, d]
    forks     [rows]: what siblings share
    depths    [rows]: tokens after the fork; at most one row per sibling and depth
    outcomes  [rows]: the outcome of the sibling that the row belongs to
    groups    [rows]: forks that are not independent, such as those of one root; default: each fork is its own group
    """
    permutations = as_draws("permutations", permutations, 19)
    same_length(states=states.T, forks=forks, depths=depths, outcomes=outcomes)
    groups = forks if groups is None else groups
    generator = np.random.default_rng([seed, 0x51B5])
    kept, distance, gap, pairs, nulls = [], [], [], [], []
    for depth in np.unique(depths).tolist():
        rows = np.flatnonzero(depths == depth)
        found = _Depth.of(states[rows], forks[rows], outcomes[rows], groups[rows])
        if len(found.mixed) < 2 or len(np.unique(found.groups)) < 2:
            continue
        kept.append(depth)
        pairs.append(found.pairs)
        distance.append(difference_over_groups(found.mean, found.groups, bounded=False))
        gap.append(difference_over_groups(found.gaps()[0], found.groups[found.mixed], bounded=False))
        drawn = found.gaps(generator, permutations).mean(1, keepdims=True)
        nulls.append(Null(np.array([gap[-1].value]), drawn))
    if not kept:
        raise BadRows("No depth has two forks with siblings of different outcomes. Give more forks, or more siblings of each.")
    family = np.concatenate(max_statistic(nulls))
    return SiblingDivergence(kept, distance, gap, np.concatenate([null.p for null in nulls]), family, pairs)


@dataclass(frozen=True, eq=False)
class _Depth:
    """Distances within each fork at one depth."""

    tables: list[np.ndarray]
    """[siblings, siblings] of each fork with at least two"""
    outcomes: list[np.ndarray]
    mean: np.ndarray
    """[forks]: over pairs"""
    groups: np.ndarray
    mixed: np.ndarray
    """forks with pairs of equal and of different outcomes"""

    @property
    def pairs(self) -> int:
        return sum(len(table) * (len(table) - 1) // 2 for table in self.tables)

    @classmethod
    def of(cls, states: np.ndarray, forks: np.ndarray, outcomes: np.ndarray, groups: np.ndarray) -> "_Depth":
        states = np.asarray(states, dtype=np.float64)
        scale = np.linalg.norm(states, axis=1).mean()
        tables, names, mean, group = [], [], [], []
        for fork in np.unique(forks):
            rows = np.flatnonzero(forks == fork)
            if len(rows) < 2:
                continue
            apart = np.linalg.norm(states[rows][:, None] - states[rows][None], axis=-1) / (scale or 1.0)
            tables.append(apart)
            names.append(np.unique(outcomes[rows], return_inverse=True)[1])
            mean.append(apart[np.triu_indices(len(rows), 1)].mean())
            group.append(groups[rows[0]])
        mixed = [i for i, own in enumerate(names) if 1 < len(np.unique(own)) < len(own)]
        return cls(tables, names, np.array(mean), np.array(group), np.array(mixed, dtype=np.int64))

    def gaps(self, generator: np.random.Generator | None = None, draws: int = 1) -> np.ndarray:
        """[draws, mixed forks]: different minus equal outcomes; a generator exchanges outcomes between siblings first."""
        out = np.empty((draws, len(self.mixed)))
        for i, fork in enumerate(self.mixed):
            own = np.tile(self.outcomes[fork], (draws, 1))
            own = own if generator is None else generator.permuted(own, axis=1)
            upper = np.triu_indices(own.shape[1], 1)
            apart = self.tables[fork][upper]
            same = own[:, upper[0]] == own[:, upper[1]]  # [draws, pairs]
            out[:, i] = (~same @ apart) / (~same).sum(1) - (same @ apart) / same.sum(1)
        return out


# ---- drafts ----------------------------------------------------------------------------------------------------------
# `draft_agreement`: are rejected drafts what resampling would have said instead?
#
# At a fork the engine has rejected a draft, and resampling has drawn continuations of which one, or none, was taken. If
# drafts are guesses at what the model might say, they come up among the resamples not taken more often than drafts of other
# forks do.

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
        error = error_of(self.gain, self.forks)
        verdict = decide(0.0 if self.shown else 1.0, self.gain.value, self.gain.high, error, self.forks)
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
    permutations = as_draws("permutations", permutations, 19)
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
