"""Metrics of held-out predictions, against scikit-learn, and the scores that sweeps keep for them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from sklearn.pipeline import Pipeline

from replaylens.probes import intervals, registry
from replaylens.probes.controls import Goal
from replaylens.probes.heldout import HeldOutPredictions, held_out
from replaylens.probes.sweeps import SweepCache

SWEPT = [name for name, each in registry.ESTIMATORS.items() if each.swept != "no" and name != "mlp"]


def planted(classes: int, rows: int = 240, width: int = 5, seed: int = 0) -> tuple[torch.Tensor, Goal, np.ndarray]:
    """(x [1, rows, width], goal, train [1, rows])"""
    generator = np.random.default_rng(seed)
    codes = generator.integers(classes, size=rows)
    x = generator.normal(size=(rows, width)) + 1.5 * np.eye(classes, width)[codes]
    goal = Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(rows, bool))
    return torch.from_numpy(x)[None], goal, (np.arange(rows) < rows // 2)[None]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", SWEPT)
def test_scores_rank_as_scikit_learn(name: str, classes: int) -> None:
    """Scores of a sweep order the rows as the fitted scikit-learn estimator does, and decide as its predictions."""
    x, goal, train = planted(classes)
    held = held_out(name, x, [goal], train, ~train, groups=np.arange(len(goal.codes)))
    score, said = held.score[0, 0][~train[0]], held.predicted[0, 0][~train[0]]
    assert score.shape[1] == goal.outputs and np.isnan(held.score[0, 0][train[0]]).all()
    assert np.array_equal((score[:, 0] > 0) if classes == 2 else score.argmax(1), said)
    fitted = registry.get(name).make().fit(x[0, train[0]], goal.codes[train[0]])
    proper = hasattr(fitted[-1] if isinstance(fitted, Pipeline) else fitted, "predict_proba")
    theirs = fitted.predict_proba(x[0, ~train[0]]) if proper and classes > 2 else fitted.decision_function(x[0, ~train[0]])
    theirs = theirs.reshape(len(said), -1)
    if not proper and classes > 2:
        theirs = theirs - np.stack([np.delete(theirs, k, 1).max(1) for k in range(classes)], 1)
    for column in range(goal.outputs):
        pairs = np.sign(np.subtract.outer(score[:, column], score[:, column]))
        assert np.mean(pairs == np.sign(np.subtract.outer(theirs[:, column], theirs[:, column]))) > 0.999


def test_parts_keep_scores_and_replace_old_files(tmp_path: Path) -> None:
    """A part is read back with every array. One without scores, of an earlier version, is computed again."""
    x, goal, train = planted(3)
    made = held_out("ridge", x, [goal], train, ~train)
    SweepCache(tmp_path, "key").get("part", lambda: made)

    def never() -> HeldOutPredictions:
        raise AssertionError("the part is stored")

    kept = SweepCache(tmp_path, "key").get("part", never)
    assert np.array_equal(kept.score, made.score, equal_nan=True) and np.array_equal(kept.predicted, made.predicted)
    (file,) = tmp_path.glob("*.npz")
    np.savez(file, predicted=made.predicted, log_loss=made.log_loss, confidence=made.confidence)
    again = SweepCache(tmp_path, "key").get("part", lambda: made)
    assert again.score is made.score and SweepCache(tmp_path, "key").get("part", never).score.shape == made.score.shape


def answers(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scores [3 cells, 90 rows, outputs] with ties, predictions [3, 90], codes [90] with a rare class)"""
    generator = np.random.default_rng(seed)
    codes = generator.choice(classes, size=90, p=np.array([classes, *[1] * (classes - 1)]) / (2 * classes - 1))
    scores = (generator.normal(size=(3, 90, classes)) + np.eye(classes)[codes]).round(1)
    return (scores[..., 1:] - scores[..., :1] if classes == 2 else scores), scores.argmax(-1), codes


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_are_scikit_learns(classes: int, seed: int) -> None:
    score, said, codes = answers(classes, seed)
    average = "binary" if classes == 2 else "macro"
    areas = [np.mean([roc_auc_score(codes == k, each[:, i]) for i, k in columns(classes)]) for each in score]
    assert intervals.auroc(score, codes) == pytest.approx(areas, abs=1e-12)
    recalls = [balanced_accuracy_score(codes, each) for each in said]
    assert intervals.balanced_accuracy(said, codes) == pytest.approx(recalls, abs=1e-12)
    assert intervals.f1(said, codes, classes) == pytest.approx([f1_score(codes, each, average=average) for each in said])


def columns(classes: int) -> list[tuple[int, int]]:
    """(column of the score, class that it speaks of)"""
    return [(0, 1)] if classes == 2 else [(k, k) for k in range(classes)]


def test_macro_area_of_probabilities() -> None:
    """On probabilities, which scikit-learn insists on, its own macro average agrees."""
    score, _, codes = answers(4, 2)
    shares = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
    theirs = [roc_auc_score(codes, each, multi_class="ovr") for each in shares]
    assert intervals.auroc(np.log(shares), codes) == pytest.approx(theirs, abs=1e-12)


def test_what_is_undefined_is_nan() -> None:
    score, said, codes = answers(3, 0)
    one = np.zeros(90, dtype=int)
    assert np.isnan(intervals.auroc(score[..., :1], one)).all() and np.isnan(intervals.auroc(score, one)).all()
    assert np.isnan(intervals.balanced_accuracy(said, one)).all()
    assert (
        np.isnan(intervals.f1(np.zeros((2, 90)), one, 2)).all() and not np.isnan(intervals.f1(np.ones((2, 90)), one, 2)).any()
    )
    two = np.minimum(codes, 1)  # the third class does not occur: the mean is over the others
    assert intervals.auroc(score, two) == pytest.approx(
        intervals._mean([intervals._area(score[..., k], two == k, None) for k in (0, 1)])
    )
    assert not np.isnan(intervals.auroc(score, two)).any()
    assert np.isnan(intervals.auroc(score[..., :1], two, fold=two)).all(), "no fold has a pair of rows to compare"


def test_pooling_folds_biases_the_area() -> None:
    """On noise, AUROC within folds is 1/2 on average. Negative control: pooled over the folds, it is lower."""
    within, pooled = [], []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        codes, fold = generator.integers(2, size=60), np.arange(60) % 10
        goal = Goal("y", "label", "class", ("0", "1"), codes, np.ones(60, dtype=bool))
        test = np.arange(10)[:, None] == fold
        score = held_out("logistic", torch.from_numpy(generator.normal(size=(1, 60, 2))), [goal], ~test, test).score[:, 0]
        within.append(intervals.auroc(score, codes, fold)[0])
        pooled.append(intervals.auroc(score, codes)[0])
    error = np.std(within) / np.sqrt(60)
    assert abs(np.mean(within) - 0.5) < 3 * error
    assert np.mean(pooled) < 0.5 - 3 * error
