"""The complexity-accuracy curve: a label that is read is accurate before a probe can memorise, a label that is not never is."""

from pathlib import Path

import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from replaylens.probes.errors import ProbeError
from replaylens.probes.report import Report
from replaylens.probes.splits import by_root
from replaylens.probes.sweeps import complexity_curve
from tests.probes.synthetic import rows_of

ROWS = rows_of(roots=60, width=24)
PATH = [1e-4, 1e-2, 1.0, 100.0]


def test_curve_of_a_planted_label(tmp_path: Path) -> None:
    """Complexity rises with C, the planted label is read, noise never is; the report has its figure."""
    planted = complexity_curve(ROWS, "face", layer=1, position="all", C=PATH)
    noise = complexity_curve(ROWS, "face", layer=0, position="all", C=PATH).table
    table = planted.table
    assert table["C"].tolist() == PATH and table["norm"].is_monotonic_increasing
    assert table["complexity"].iloc[0] + 0.1 < table["complexity"].iloc[-1]
    assert table["complexity"].iloc[-1] > 0.65, "at the weak end a probe memorises exchanged labels"
    assert (table["accuracy"].iloc[1:] > 0.9).all() and (table["auroc"].iloc[1:] > 0.95).all()
    assert (noise["low"] < 0.5).all() and noise["train"].iloc[-1] > 0.65
    assert table["p_worse"].iloc[0] < 0.05 < table["p_worse"].iloc[2] and "not worse (p > 0.05) is C = 1:" in planted.text()
    planted.complexity()
    planted.save(tmp_path)
    assert (tmp_path / "complexity_curve.png").exists() and Report.load(tmp_path).lines == planted.to_json()["rows"]


@pytest.mark.parametrize("estimator", ["logistic", "ridge"])
def test_points_are_those_of_single_fits(estimator: str) -> None:
    """Every accuracy is that of a fit at this C alone, on the same folds; equal input gives equal lines."""
    report = complexity_curve(ROWS, "face", layer=1, position="all", estimator=estimator, C=[1.0, 0.01])
    assert report.lines == complexity_curve(ROWS, "face", layer=1, position="all", estimator=estimator, C=[0.01, 1.0]).lines
    if estimator == "logistic":
        split, X, y = by_root(ROWS), ROWS.matrix("S", 1), ROWS.target("face").values
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, tol=1e-10))
        right = sum(int((probe.fit(X[fit], y[fit]).predict(X[held]) == y[held]).sum()) for fit, held in split)
        assert report.lines[0]["accuracy"] == pytest.approx(right / len(y))


def test_pareto_front_is_not_dominated() -> None:
    table = complexity_curve(ROWS, "face", layer=0, position="all", C=PATH).table
    for line in table.itertuples():
        others = table[(table["accuracy"] >= line.accuracy) & (table["complexity"] <= line.complexity)]
        better = others[(others["accuracy"] > line.accuracy) | (others["complexity"] < line.complexity)]
        assert line.pareto == (len(better) == 0)
    assert table.loc[table["accuracy"].idxmax(), "p_worse"] == 1, "the best is not worse than itself"


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ProbeError, match="Use logistic or ridge"):
        complexity_curve(ROWS, "face", layer=1, position="all", estimator="lda")
    with pytest.raises(ProbeError, match="above 0"):
        complexity_curve(ROWS, "face", layer=1, position="all", C=[0.0, 1.0])
