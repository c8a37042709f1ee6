"""Permutation tests over groups: which labels change places, and what scores on permuted labels say about the observed ones."""

from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 99
"""of a test, by default"""
EXCHANGED = 0.7
"""share of labels that permutations must change, against a free exchange, to be a test"""
PARTNERS = 5
"""groups that exchange whole sequences with each other, at least: four of five then take another's"""


def group_permutations(
    labels: np.ndarray, roots: np.ndarray, count: int, seed: int = 0, groups: np.ndarray | None = None
) -> np.ndarray:
    """[count, rows]: for each row, the number of the row whose label it takes.

    Labels move between groups (default: roots), never within one. If every group has a single label, groups exchange labels
    freely; otherwise groups with the same number of rows exchange whole sequences of labels, which keeps what labels of a
    group have in common. `exchanged_share` says whether that is enough for a test.
    """
    generator = np.random.default_rng([seed, 0x5EED])
    place, members = _members(roots if groups is None else groups)
    out = np.empty((count, len(roots)), dtype=np.int64)
    if all((labels[rows] == labels[rows[0]]).all() for rows in members):
        first = np.array([rows[0] for rows in members])
        for number in range(count):
            out[number] = first[generator.permutation(len(first))][place]
        return out
    strata: dict[int, list[np.ndarray]] = {}
    for rows in members:
        strata.setdefault(len(rows), []).append(rows)
    for size in sorted(strata):
        block = np.stack(strata[size])  # [groups of this size, rows of each]
        for number in range(count):
            out[number, block] = block[generator.permutation(len(block))]
    return out


def with_partners(groups: np.ndarray) -> np.ndarray:
    """[rows] bool: the first rows of each group, as many as at least `PARTNERS` - 1 others have too.

    Of documents of different lengths, so few have equally many rows that hardly any sequences of labels change places. Cut to
    the length of their partners they do, and whole sequences still keep what the labels of a group have in common. Groups
    are cut at the lengths that leave out the fewest rows. Lengths alone decide, never a label.
    """
    _, members = _members(groups)
    members.sort(key=len, reverse=True)
    sizes = np.array([len(rows) for rows in members])
    totals, count = np.concatenate([[0], np.cumsum(sizes)]), len(members)
    left_out, first = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)  # of the groups before each cut
    left_out[0] = 0
    for end in range(min(PARTNERS, count), count + 1):
        for start in range(max(0, end + 1 - 2 * PARTNERS), max(0, end - PARTNERS) + 1):  # more partners are two sets of them
            cost = left_out[start] + totals[end] - totals[start] - (end - start) * sizes[end - 1]
            if cost < left_out[end]:
                left_out[end], first[end] = cost, start
    kept, end = np.zeros(len(groups), dtype=bool), count
    while end:
        for rows in members[first[end] : end]:
            kept[rows[: sizes[end - 1]]] = True
        end = first[end]
    return kept


def shuffled_order(labels: np.ndarray, roots: np.ndarray, seed: int = 0, groups: np.ndarray | None = None) -> np.ndarray:
    """[rows]: as one line of `group_permutations`, for a control that is no test: roots of any length exchange labels.

    A row takes the label of the same row of its root's partner, or of the partner's partner and so on if that root has fewer
    rows. So labels keep their place, but sequences may be torn.
    """
    _, members = _members(roots if groups is None else groups)
    if all((labels[rows] == labels[rows[0]]).all() for rows in members):
        return np.asarray(group_permutations(labels, roots, 1, seed, groups)[0])
    sequences = _members(roots)[1]
    sizes = np.array([len(rows) for rows in sequences])
    partner = np.random.default_rng([seed, 0x5EED]).permutation(len(sequences))
    out, donor = np.empty(len(roots), dtype=np.int64), partner
    for row in range(sizes.max()):
        while (short := sizes[donor] <= row)[sizes > row].any():
            donor = np.where(short, partner[donor], donor)
        for root in np.flatnonzero(sizes > row):
            out[sequences[root][row]] = sequences[donor[root]][row]
    return out


def exchanged_share(labels: np.ndarray, orders: np.ndarray) -> float:
    """How many labels the permutations change, against a free exchange of all rows: about 1, or 0 if nothing can move."""
    free = 1 - ((np.unique(labels, return_counts=True)[1] / len(labels)) ** 2).sum()
    return float((labels[orders] != labels).mean() / free) if free > 0 and len(orders) else 0.0


def why_no_exchange(labels: np.ndarray, groups: np.ndarray, share: float) -> str:
    """Why the `exchanged_share` of permutations between groups is below `EXCHANGED`, with what to do."""
    if len(np.unique(labels)) < 2:
        return "the label has only one value"
    _, members = _members(groups)
    several, sizes = sum(len(np.unique(labels[rows])) > 1 for rows in members), [len(rows) for rows in members]
    if not several:
        why, remedy = f"few of the {len(members)} groups hold most rows of a label", "more groups"
    elif _difference(labels, groups) < EXCHANGED:
        why, remedy = "groups have similar sequences of labels, row by row", "a label that differs more between groups"
    elif len(set(sizes)) == 1:
        why, remedy = f"{len(members)} groups are few for an exchange of whole sequences of labels", "more groups"
    else:
        why = (
            f"{several} of {len(members)} groups have several labels, so that only groups with equally many rows can exchange "
        )
        why += f"theirs, and groups have from {min(sizes)} to {max(sizes)} rows"
        remedy = "groups of one size, or a label with one value per group"
    return (
        f"{why}. The exchange changes only {int(100 * share)} % as many labels as a free exchange of rows would; a test takes "
        f"{int(100 * EXCHANGED)} %. For a permutation test, give {remedy}"
    )


def _difference(labels: np.ndarray, groups: np.ndarray, draws: int = 5) -> float:
    """How often labels at the same place of two groups of any size differ, against labels of any two rows."""
    orders = np.stack([shuffled_order(labels, groups, seed) for seed in range(draws)])
    moved = (groups[orders] != groups).mean()
    return exchanged_share(labels, orders) / float(moved) if moved else 0.0


def _members(units: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """(number of each row's unit, rows of each unit)"""
    different, place = np.unique(units, return_inverse=True)
    order = np.argsort(place, kind="stable")
    return place, np.split(order, np.cumsum(np.bincount(place, minlength=len(different)))[:-1])


@dataclass(frozen=True, eq=False)
class Null:
    """Scores of a family of cells, on the labels and on permuted ones, with a new fit for each."""

    observed: np.ndarray
    """[cells]"""
    drawn: np.ndarray
    """[permutations, cells]"""
    constant: np.ndarray | None = None
    """[1 + permutations]: what a constant guess scores on the labels and on permuted ones. Groups of unequal size give the
    classes other frequencies under permutation, so scores count by their lead over it"""

    def __repr__(self) -> str:
        return f"Null({len(self.observed)} cells, {len(self.drawn)} permutations, p = {np.array2string(self.p, precision=3)})"

    @property
    def leads(self) -> np.ndarray:
        """[1 + permutations, cells]: what is compared; the observed lead comes first."""
        every = np.vstack([self.observed, self.drawn])
        return every if self.constant is None else every - self.constant[:, None]

    @property
    def p(self) -> np.ndarray:
        """One-sided p-value of each cell alone."""
        leads = self.leads
        return (1 + (leads[1:] >= leads[0] - 1e-12).sum(0)) / len(leads)

    def standard(self) -> tuple[np.ndarray, np.ndarray]:
        """Observed and drawn scores in units of each cell's own spread, so that cells can be compared.

        Centre and spread include the observed score: it is one of the permutations, which keeps the test exact.
        """
        every = self.leads
        spread = every.std(0)
        known = spread > 0
        spread[known] = np.exp(_drawn_together(np.log(spread[known]), 1 / (2 * (len(every) - 1))))  # of a normal sample
        scaled = np.zeros_like(every)  # a cell that never varies is not significant
        scaled[:, known] = every[:, known] / spread[known]
        scaled[:, known] -= _drawn_together(scaled[:, known].mean(0), 1 / len(every))
        return scaled[0], scaled[1:]


def _drawn_together(values: np.ndarray, noise: float) -> np.ndarray:
    """[cells]: values without the part of their differences that comes from few draws (James and Stein 1961).

    A spread of 39 permutations is off by 11 %, a centre by a sixth of a spread, and the cell where both are smallest decides
    the maximum: in three cells, that cost 5 of 100 labels that raw scores show. Differences count as far as they exceed twice
    their noise, so that values which really differ, as of sites of different width, stay nearly as they are.

    noise  variance of a value
    """
    if len(values) < 2:
        return values
    own = max(0.0, 1 - 2 * noise / max(float(values.var(ddof=1)), np.finfo(float).tiny))
    return np.asarray(values.mean() + own * (values - values.mean()))


def max_statistic(nulls: list[Null]) -> list[np.ndarray]:
    """Family-wise p-values: how often the best of ALL cells scores as well on permuted labels. One array per Null.

    Nulls of different rows (positions) are permuted separately, which makes the maximum larger, never smaller, than a joint
    permutation would: the correction is conservative.
    """
    if not nulls:
        return []
    standard = [null.standard() for null in nulls]
    most = np.max([drawn.max(1) for _, drawn in standard], axis=0)  # [permutations]
    return [(1 + (most[:, None] >= seen[None] - 1e-12).sum(0)) / (1 + len(most)) for seen, _ in standard]
