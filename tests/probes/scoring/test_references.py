"""Statistics against slow references of the same definitions: loops over pairs, rows and groups, and numerical derivatives."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from replaylens.probes import areas, intervals
from replaylens.probes.forks.importance import exact, overlap, step_down
from replaylens.probes.intervals import (
    RESAMPLES,
    contributions,
    cross_validation,
    group_weights,
    means_over_groups,
    one_sided_bounds,
)
from tests.probes.synthetic import rows_of

ROWS = 24


def drawn(seed: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(scores [1, rows, outputs] with ties, codes, folds, groups of unequal size)"""
    generator = np.random.default_rng(seed)
    score = generator.integers(6, size=(1, ROWS, 1 if classes == 2 else classes)).astype(float)
    codes = np.arange(ROWS) % classes
    return score, codes, generator.integers(3, size=ROWS), np.sort(generator.integers(7, size=ROWS))


# ---- parts of metrics ------------------------------------------------------------------------------------------------


def pairs_won(score: np.ndarray, good: np.ndarray, fold: np.ndarray, weight: np.ndarray) -> float:
    """The area, pair by pair; a row counts as often as its weight says."""
    won = total = 0.0
    for i in np.flatnonzero(good):
        for j in np.flatnonzero(~good & (fold == fold[i])):
            total += weight[i] * weight[j]
            won += weight[i] * weight[j] * (float(score[i] > score[j]) + 0.5 * float(score[i] == score[j]))
    return won / total


def area_by_pairs(score: np.ndarray, codes: np.ndarray, fold: np.ndarray, weight: np.ndarray) -> float:
    if score.shape[1] == 1:
        return pairs_won(score[:, 0], codes == 1, fold, weight)
    return float(np.mean([pairs_won(score[:, k], codes == k, fold, weight) for k in range(score.shape[1])]))


def recall_by_rows(predicted: np.ndarray, codes: np.ndarray, weight: np.ndarray) -> float:
    right = [sum(weight[i] for i in range(ROWS) if codes[i] == k == predicted[i]) for k in np.unique(codes)]
    return float(np.mean([r / weight[codes == k].sum() for k, r in zip(np.unique(codes), right, strict=True)]))


def influence(metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """The value, plus its derivative by the weight of each row times the number of rows."""
    out, plain = np.empty(ROWS), metric(np.ones(ROWS))
    for row in range(ROWS):
        more, less = np.ones(ROWS), np.ones(ROWS)
        more[row], less[row] = 1 + 1e-5, 1 - 1e-5
        out[row] = plain + ROWS * (metric(more) - metric(less)) / 2e-5
    return out


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("folds", [False, True])
def test_contributions_are_influences(classes: int, folds: bool) -> None:
    """Of every row on the area, within folds or over all rows, and on the balanced accuracy."""
    score, codes, fold, _ = drawn(classes, classes)
    said = score[0].argmax(1) if classes > 2 else (score[0, :, 0] > 2).astype(int)
    own = fold if folds else np.zeros(ROWS, dtype=int)
    found = contributions("auroc", said[None], score, codes, own if folds else None)[0]
    assert found == pytest.approx(influence(lambda w: area_by_pairs(score[0], codes, own, w)), abs=1e-6)
    assert intervals.auroc(score, codes, own if folds else None)[0] == pytest.approx(found.mean())
    found = contributions("balanced_accuracy", said[None], score, codes)[0]
    assert found == pytest.approx(influence(lambda w: recall_by_rows(said, codes, w)), abs=1e-6)
    assert intervals.balanced_accuracy(said[None], codes)[0] == pytest.approx(found.mean())
    counts = [((said == k) & (codes == k), (said == k), (codes == k)) for k in ([1] if classes == 2 else range(3))]
    by_hand = np.mean([2 * both.sum() / (says.sum() + is_.sum()) for both, says, is_ in counts])
    assert intervals.f1(said[None], codes, classes)[0] == pytest.approx(by_hand)


def test_an_area_of_folds_with_one_class_each_is_nan() -> None:
    """As many parts as rows, none of them a number: no pair of rows can be compared."""
    score, codes = np.zeros((2, 4, 1)), np.array([0, 0, 1, 1])
    found = contributions("auroc", codes[None], score, codes, codes)
    assert found.shape == (2, 4) and np.isnan(found).all()
    assert np.isnan(intervals.auroc(score, codes, codes)).all()


# ---- intervals for several cells -------------------------------------------------------------------------------------


def group_means(values: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[resamples, cells]: means over rows, each as often as its group is drawn."""
    place = np.searchsorted(np.unique(groups), groups)
    return np.array([[np.average(line, weights=times[place]) for line in values] for times in weights])


def standard_errors(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
    """(standard error of each line's mean, by sums over groups; number of groups of equal size that say as much)"""
    names = np.unique(groups)
    sizes = np.array([(groups == name).sum() for name in names])
    count = max(sizes.sum() ** 2 / (sizes**2).sum(), 1.5)
    apart = np.array([[(line - line.mean())[groups == name].sum() for name in names] for line in values]) / len(groups)
    return np.sqrt(count / (count - 1) * (apart**2).sum(1)), float(count)


@pytest.mark.parametrize("folds", [1, 5])
def test_intervals_of_several_cells_by_their_definition(folds: int) -> None:
    generator, (*_, groups) = np.random.default_rng(3), drawn(3)
    values = generator.normal(size=(4, ROWS)) * np.array([[1.0], [2.0], [0.5], [1.0]])
    means = group_means(values, groups, group_weights(len(np.unique(groups)), RESAMPLES, 7))
    errors, count = standard_errors(values, groups)
    spread, widened = means.std(0), cross_validation(folds)
    farthest = (np.abs(means - values.mean(1)) / spread).max(1)
    joint = np.quantile(farthest, 0.95) * stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975)
    for cell, found in enumerate(means_over_groups(values, groups, seed=7, folds=folds)):
        half = joint * widened * spread[cell]
        assert (found.value, found.low, found.high) == pytest.approx(
            (values[cell].mean(), values[cell].mean() - half, values[cell].mean() + half)
        )
    extra = np.array([0.0, 0.3, 0.0, 0.1])
    above = ((means - values.mean(1)) / spread).max(1)
    one_sided = np.quantile(above, 0.9) * stats.t.ppf(0.9, count - 1) / stats.norm.ppf(0.9)
    found = one_sided_bounds(values, groups, level=0.9, seed=7, folds=folds, extra=extra)
    value, low = found.value, found.low
    assert value == pytest.approx(values.mean(1))
    assert low == pytest.approx(values.mean(1) - one_sided * np.sqrt((widened * errors) ** 2 + extra))
    shown = (widened**2 - 1) * errors**2
    assert intervals.variance_of_fits(values, groups, folds) == pytest.approx(shown)
    t = values.mean(1) / (widened * errors)
    assert intervals.corrected_p(values, groups, folds) == pytest.approx(np.maximum(stats.t.sf(t, count - 1), 0.5**count))


# ---- areas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strata", [False, True])
def test_areas_by_pairs(strata: bool) -> None:
    """Value, the influence of every group on it, corrected for its share, and how many groups each kind is worth."""
    score, codes, fold, groups = drawn(11)
    own, good = (fold if strata else np.zeros(ROWS, dtype=int)), codes == 1
    found = areas.auroc_of(score[0, :, 0], good, groups, fold if strata else None)
    ones = np.ones(ROWS)
    assert found.value == pytest.approx(pairs_won(score[0, :, 0], good, own, ones))
    rows = (influence(lambda w: pairs_won(score[0, :, 0], good, own, w)) - found.value) / ROWS
    parts, sizes = [], []
    for kind in (good, ~good):
        share = np.array([(kind & (groups == name)).sum() / kind.sum() for name in np.unique(groups)])
        moved = np.array([rows[kind & (groups == name)].sum() for name in np.unique(groups)])
        parts.append(moved / np.sqrt(np.maximum(1 - share, 0.5)))
        sizes.append(1 / (share**2).sum())
    assert found.parts == pytest.approx(parts[0] + parts[1], abs=1e-6) and found.sizes == pytest.approx(tuple(sizes))
    assert found.variance == pytest.approx(((parts[0] + parts[1]) ** 2).sum(), abs=1e-6)


def test_every_option_of_areas_counts() -> None:
    """More folds and a higher level widen, strata and the seed change; the mean of classes is that of their areas."""
    score, codes, fold, groups = drawn(5, 3)
    good, columns = codes == 1, [score[0, :, k] for k in range(3)]
    wide = lambda found: found.high - found.low  # noqa: E731
    plain = areas.area(columns[0], good, groups)
    assert (
        wide(areas.area(columns[0], good, groups, folds=5))
        > wide(plain)
        > wide(areas.area(columns[0], good, groups, level=0.8))
    )
    assert areas.area(columns[0], good, groups, strata=fold).value != plain.value
    gains = areas.area_gains(columns[1:], columns[0], good, groups)
    for name, other in (("folds", 5), ("level", 0.99)):
        more = areas.area_gains(columns[1:], columns[0], good, groups, **{name: other})  # type: ignore[arg-type]
        assert all(wide(a) > wide(b) for a, b in zip(more, gains, strict=True)), name
    for gain, column in zip(gains, columns[1:], strict=True):
        assert gain.value == pytest.approx(areas.area(column, good, groups).value - plain.value)
    assert areas.area_gains(columns[1:], columns[0], good, groups, strata=fold)[0].value != gains[0].value
    of_classes = areas.area_of_classes(score[0], codes, groups)
    each = [areas.auroc_of(column, codes == k, groups) for k, column in enumerate(columns)]
    assert of_classes is not None and of_classes.value == pytest.approx(np.mean([area.value for area in each]))
    folded = areas.area_of_classes(score[0], codes, groups, folds=5)
    assert folded is not None and wide(folded) > wide(of_classes)
    right = codes == score[0].argmax(1)
    balanced = areas.balanced_accuracy(right, codes, groups)
    assert wide(areas.balanced_accuracy(right, codes, groups, folds=5)) > wide(balanced)
    assert wide(areas.balanced_accuracy(right, codes, groups, level=0.5)) < wide(balanced)


# ---- units and positions ---------------------------------------------------------------------------------------------


def test_words_are_compared_by_their_number() -> None:
    """A word that occurs twice in both counts twice."""
    texts = ["no no no yes", "no yes", "no no no", "yes", "", "no no yes yes", "No, no: YES."]
    for one in texts:
        for other in texts:
            a, b = ("".join(c for c in text.lower() if c.isalpha() or c == " ").split() for text in (one, other))
            common, left = 0, list(b)
            for word in a:
                if word in left:
                    left.remove(word)
                    common += 1
            for least in (0.4, 0.6, 0.8, 1.0):
                same = 2 * common >= least * (len(a) + len(b)) if a or b else True
                assert overlap(least)(one, other) == same, (one, other, least)
            assert exact(one, other) == (a == b)


def test_step_down_by_loops() -> None:
    """Westfall and Young: each unit against the largest of its own and all smaller ones; never below a larger unit's."""
    scaled = np.abs(np.random.default_rng(2).normal(size=(6, 40)))
    order, least, expected = sorted(range(6), key=lambda unit: -scaled[unit, 0]), 0.0, {}
    for place, unit in enumerate(order):
        beaten = sum(max(scaled[other, draw] for other in order[place:]) >= scaled[unit, 0] for draw in range(1, 40))
        least = expected[unit] = max(least, (1 + beaten) / 40)
    assert step_down(scaled) == pytest.approx([expected[unit] for unit in range(6)])


def test_text_is_not_found_across_a_gap() -> None:
    """Rows of a path that lacks a token in between do not spell a text; its neighbours do."""
    rows = rows_of(roots=4, per_root=4)
    rows = type(rows)(rows.frame.assign(text=[" a", " b", " c", " d"] * 4), rows.source, rows.numbers)
    assert rows.at("text: b c").frame["position"].tolist() == [2] * 4
    holes = rows.where(rows.frame["position"] != 2).renumbered()
    assert len(holes.at("text: b d")) == 0 and holes.at("text: a b").frame["position"].tolist() == [1] * 4
