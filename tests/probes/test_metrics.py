"""Metrics of held-out predictions, against scikit-learn, and the scores that sweeps keep for them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.pipeline import Pipeline

from replaylens.probes import registry
from replaylens.probes.goals import Goal
from replaylens.probes.heldout import Held, held_out
from replaylens.probes.parts import Parts

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
    held = held_out(name, x, [goal], train, ~train)
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
    Parts(tmp_path, "key").get("part", lambda: made)

    def never() -> Held:
        raise AssertionError("the part is stored")

    kept = Parts(tmp_path, "key").get("part", never)
    assert np.array_equal(kept.score, made.score, equal_nan=True) and np.array_equal(kept.predicted, made.predicted)
    (file,) = tmp_path.glob("*.npz")
    np.savez(file, predicted=made.predicted, log_loss=made.log_loss, confidence=made.confidence)
    again = Parts(tmp_path, "key").get("part", lambda: made)
    assert again is made and Parts(tmp_path, "key").get("part", never).score.shape == made.score.shape
