"""Areas under the ROC curve and balanced accuracy: their values, and intervals that cover the truth with few groups."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from replaylens.probes.areas import area, area_gains, balanced_accuracy
from replaylens.probes.errors import OneClass, TooFewGroups


def names(groups: int, rows: int = 1) -> np.ndarray:
    return np.repeat(np.arange(groups), rows).astype(str)


def test_values_are_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    score, good = generator.integers(20, size=300) / 7, generator.random(300) < 0.4
    assert area(score, good, names(100, 3)).value == pytest.approx(roc_auc_score(good, score), abs=1e-12)
    codes, said = generator.integers(4, size=(2, 300))
    assert balanced_accuracy(said == codes, codes, names(100, 3)).value == pytest.approx(balanced_accuracy_score(codes, said))


def test_strata_are_compared_within() -> None:
    """A shift of a whole fold changes nothing; the value is the mean over folds, weighted by their pairs."""
    generator = np.random.default_rng(4)
    score, good, fold = generator.normal(size=120), generator.random(120) < 0.4, np.repeat(np.arange(4), 30)
    found = area(score, good, names(60, 2), strata=fold)
    assert found == area(score + 10.0 * fold, good, names(60, 2), strata=fold)
    pairs = np.array([good[fold == each].sum() * (~good[fold == each]).sum() for each in range(4)])
    apart = [roc_auc_score(good[fold == each], score[fold == each]) for each in range(4)]
    assert found.value == pytest.approx(np.average(apart, weights=pairs), abs=1e-12)
    assert area(score, good, names(60, 2), strata=np.zeros(120)) == area(score, good, names(60, 2))
    with pytest.raises(OneClass, match="No stratum"):
        area(score, good, names(60, 2), strata=good)


def test_no_interval_has_width_zero() -> None:
    """A perfect score, or a useless one, leaves doubt: less with more groups, not with more copies of the same rows."""
    good = np.tile([True, False], 10)
    score = good.astype(float)
    perfect, more = area(score, good, names(20)), area(np.tile(score, 5), np.tile(good, 5), names(100))
    assert perfect.high == 1 and perfect.low < more.low < 1
    copies = area(np.repeat(score, 5), np.repeat(good, 5), names(20, 5))
    assert copies.low == pytest.approx(perfect.low), "copies of rows are no evidence"
    assert area(-score, good, names(20)).low == 0 < area(-score, good, names(20)).high
    (gain,) = area_gains([score], score, good, names(20))
    assert gain.value == 0 and gain.low < 0 < gain.high
    for right in (np.zeros(20), np.ones(20)):
        found = balanced_accuracy(right, good.astype(int), names(20))
        assert found.low < found.high and found.value in (found.low, found.high)
        several = balanced_accuracy(np.repeat(right, 5), np.repeat(good.astype(int), 5), names(20, 5))
        assert (several.low, several.high) == pytest.approx((found.low, found.high))


@pytest.mark.parametrize("groups, truth", [(10, 0.985), (20, 0.9), (20, 0.985), (50, 0.985)])
def test_areas_cover_the_truth(groups: int, truth: float) -> None:
    """Three rows per group that share most of their score; the standard error of a coverage of 95 % is 1.8 %."""
    generator, found = np.random.default_rng(1), []
    while len(found) < 150:
        good = np.repeat(generator.random(groups) < 0.4, 3)
        if good.sum() in (0, 3, len(good) - 3, len(good)):
            continue
        noise = np.sqrt([0.6, 0.4]) @ [np.repeat(generator.normal(size=groups), 3), generator.normal(size=3 * groups)]
        found.append(area(noise + np.sqrt(2) * stats.norm.ppf(truth) * good, good, names(groups, 3)))
    assert 0.9 <= np.mean([truth in each for each in found]) <= 1
    assert np.mean([each.high - each.low for each in found]) < 2.5 / np.sqrt(groups), "not by being endless"


def test_gains_cover_zero() -> None:
    """Three scores as good as the baseline: in 95 of 100 simulations no interval lies beyond zero."""
    generator, held = np.random.default_rng(2), 0
    for _ in range(100):
        good = generator.random(40) < 0.5
        common = generator.normal(size=40) + 2 * good
        base, *scores = (common + generator.normal(size=40) for _ in range(4))
        held += all(0 in gain for gain in area_gains(scores, base, good, names(20, 2)))
    assert held >= 90


@pytest.mark.parametrize("classes, share, per_group", [(2, 0.97, 1), (2, 0.5, 3), (8, 0.125, 1), (8, 0.9, 3)])
def test_balanced_accuracy_covers_the_truth(classes: int, share: float, per_group: int) -> None:
    """Twenty groups whose rows have one class and mostly stand or fall together; classes of unequal size."""
    generator, held, done = np.random.default_rng(3), 0, 0
    often = 0.6 ** np.arange(classes) if classes == 2 else np.ones(classes)
    while done < 150:
        codes = np.repeat(generator.choice(classes, 20, p=often / often.sum()), per_group)
        if len(np.unique(codes)) < classes:
            continue
        shared, own = np.repeat(generator.random(20), per_group), generator.random(len(codes))
        right = np.where(generator.random(len(codes)) < 0.7, shared, own) < share
        held, done = held + (share in balanced_accuracy(right, codes, names(20, per_group))), done + 1
    assert held / done >= 0.9


def test_what_has_no_interval() -> None:
    with pytest.raises(OneClass, match="All 4 rows are good"):
        area(np.arange(4.0), np.ones(4), names(4))
    with pytest.raises(TooFewGroups, match="one group"):
        area(np.arange(4.0), np.array([1, 0, 1, 0]), names(1, 4))
    with pytest.raises(TooFewGroups, match="1 groups"):
        balanced_accuracy(np.ones(4), np.zeros(4, dtype=int), names(1, 4))
