"""One suite over all our estimators: scikit-learn's own checks, and a few promises of ours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from replaylens.extend import check
from replaylens.probes import quasi_newton, registry, solvers
from replaylens.probes.controls import Goal, make_goal
from replaylens.probes.erasers import CHUNK, Discriminant, Inlp, Leace, StreamingStatistics, moments_of
from replaylens.probes.errors import BadRows, OneClass, ProbeError
from replaylens.probes.estimators import AttentiveProbe, CcsProbe, MassMeanProbe, SparseProbe
from replaylens.probes.heldout import held_out
from replaylens.probes.intervals import ratio_over_groups
from replaylens.probes.probe import coefficients, fit_probe
from replaylens.probes.quasi_newton import Grams
from replaylens.probes.registry import ESTIMATORS, calibrated, get
from replaylens.probes.rows import ProbeRows
from replaylens.probes.solvers import Solution, one_hot, solve, solve_path
from replaylens.probes.splits import by_root
from replaylens.probes.sweeps import sweep
from tests.devices import covering, swept
from tests.probes.synthetic import direction, rows_of

GENERATOR = np.random.default_rng(0)
Y = GENERATOR.integers(2, size=200)
X = GENERATOR.normal(size=(200, 8))
X[:, 2] += 4 * (Y - 0.5)


NOT_TRIED = {"ccs": 4, "attentive": 3, "leace": 3, "inlp": 3}
"""estimators for calls with rows of their own, which no sweep fits; of ccs, scikit-learn's checks give no pairs"""
SLOW = ("logistic", "logistic-cv", "mass-mean-whitened", "mlp", "inlp", "ridge-cv", "lda", "sparse", "ridge", "attentive")
"""of the classes of others, ridge, ridge-cv, mass-mean and leace; or pipelines of scikit-learn's own classes"""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ESTIMATORS])
def test_every_estimator_keeps_its_promises(name: str) -> None:
    """scikit-learn's own checks, the same bits for the same rows, a sweep, a direction, and the places that name it."""
    found = check(name, kind="estimator")
    assert [each for each in found if each.problem] == []
    assert sum(bool(each.not_run) for each in found) == NOT_TRIED.get(name, 0)


@pytest.mark.parametrize("name", [name for name, each in ESTIMATORS.items() if name not in ("ccs", "leace", "inlp")])
@pytest.mark.parametrize("classes", swept([2, 3], 3))
def test_reads_what_is_there(name: str, classes: int) -> None:
    """Two or three text classes are predicted as text, and well-separated classes are found."""
    values = np.array(["a", "b", "c"])[GENERATOR.integers(classes, size=300)]
    rows = np.random.default_rng(1).normal(size=(300, 6)) + 5 * (values[:, None] == np.array(["a", "b", "c", "", "", ""]))
    fitted = clone(get(name).make()).fit(rows, values)
    assert np.mean(fitted.predict(rows) == values) > 0.95
    assert set(fitted.classes_) == set(values)


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": torch.from_numpy,
    "with gradients": lambda x: torch.from_numpy(x).requires_grad_(x.dtype.kind == "f"),
    "bfloat16": lambda x: torch.from_numpy(x).bfloat16() if x.dtype.kind == "f" else torch.from_numpy(x),
    "half, on a stride": lambda x: torch.from_numpy(np.repeat(x, 2, 0)).to(torch.half if x.dtype.kind == "f" else torch.int8)[
        ::2
    ],
    "list": lambda x: x.tolist(),
    "list of tensors": lambda x: list(torch.from_numpy(x)),
    "frame": lambda x: pd.DataFrame(x) if x.ndim == 2 else pd.Series(x),
}
ANSWERS = ("predict", "predict_proba", "decision_function", "transform", "attention")


@pytest.mark.parametrize(("name", "form"), covering(ESTIMATORS, FORMS))
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_takes_any_form_of_rows(name: str, form: str) -> None:
    """Tensors of any dtype, with gradients or strides, lists and frames give what the array of the same numbers gives."""
    x = torch.from_numpy(X[:80]).bfloat16().double().numpy()  # numbers that every dtype holds
    given, labels = FORMS[form](x), FORMS[form](Y[:80])
    usual, other = clone(get(name).make()).fit(x, Y[:80]), clone(get(name).make()).fit(given, labels)
    asked = [answer for answer in ANSWERS if hasattr(usual, answer) and (name, answer) != ("lda", "transform")]
    assert asked and all(hasattr(other, answer) == hasattr(usual, answer) for answer in ANSWERS)
    for answer in asked:
        assert np.allclose(getattr(other, answer)(given), getattr(usual, answer)(x), atol=1e-4), answer
    if hasattr(usual, "score"):
        assert other.score(given, labels) == usual.score(x, Y[:80])


OWN = [name for name, each in ESTIMATORS.items() if not isinstance(each.make(), Pipeline | Discriminant)]


@pytest.mark.parametrize("name", OWN)
def test_one_class_is_refused(name: str) -> None:
    with pytest.raises(OneClass):
        get(name).make().fit(X, np.zeros(len(X), dtype=int).astype(str))


def test_contrast_pairs_need_no_labels() -> None:
    """CCS finds the truth direction. Flipping the labels changes only its sign."""
    truth = GENERATOR.integers(2, size=300)
    base = GENERATOR.normal(size=(300, 10)) * 0.3
    way = np.eye(10)[4] * 3
    pairs = np.hstack([base + np.outer(truth - 0.5, way), base - np.outer(truth - 0.5, way)])
    fitted = CcsProbe(tries=3).fit(pairs, truth)
    assert np.mean(fitted.predict(pairs) == truth) > 0.98
    turned = CcsProbe(tries=3).fit(pairs, 1 - truth)
    assert np.array_equal(fitted.weight_, turned.weight_) and fitted.sign_ == -turned.sign_
    with pytest.raises(BadRows, match="two rows of equal width"):
        CcsProbe().fit(pairs[:, :-1], truth)


def test_contrast_pairs_keep_the_start_with_the_lowest_loss() -> None:
    """The loss is that of the paper's formula, and of several starts the lowest."""
    draw = np.random.default_rng(5)
    pairs, truth = draw.normal(size=(40, 12)), draw.integers(2, size=40)
    halves = pairs.reshape(40, 2, 6).swapaxes(0, 1)
    halves = (halves - halves.mean(1, keepdims=True)) / halves.std(1, ddof=1, keepdims=True)

    def loss(fitted: CcsProbe) -> float:
        p = 1 / (1 + np.exp(-(halves @ fitted.weight_.numpy() + fitted.bias_.numpy())))
        return float(((p[0] + p[1] - 1) ** 2 + p.min(0) ** 2).mean())

    losses = []
    for number in range(4):
        with pytest.MonkeyPatch.context() as patch:  # this start alone
            patch.setattr(CcsProbe, "_search", lambda self, x, _, n=number, search=CcsProbe._search: search(self, x, n))
            losses.append(loss(CcsProbe(tries=1).fit(pairs, truth)))
    best = CcsProbe(tries=4).fit(pairs, truth)
    assert losses[0] > min(losses) + 1e-4, "control: the first start is not the best"
    assert best.loss_ == pytest.approx(loss(best)) == pytest.approx(min(losses))


def test_a_sparse_probe_takes_the_steps_that_it_needs() -> None:
    """More than the hundred that scikit-learn takes by default."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=(200, 6)) * 10.0 ** np.arange(6)
    y = (x[:, 0] + 1e-3 * x[:, 3] + draw.normal(size=200) > 0).astype(int)
    fitted = SparseProbe(k=6, C=1e3).fit(x, y)
    assert 100 < fitted.n_iter_ < 1000


def test_attention_finds_the_position() -> None:
    """One of four positions holds the label, and the attention goes there. Absent positions get none."""
    x = GENERATOR.normal(size=(400, 4, 5))
    y = GENERATOR.integers(2, size=400)
    x[:, 2, 0] += 4 * (y - 0.5)
    x[:, 2, 1] += 3  # marks the position, so that attention can find it
    x[:50, 0] = 0
    fitted = AttentiveProbe(positions=4).fit(x.reshape(400, -1), y)
    weights = fitted.attention(x.reshape(400, -1))
    assert fitted.score(x.reshape(400, -1), y) > 0.9
    assert weights[:, 2].mean() > 0.6 and (weights[:50, 0] == 0).all()


def test_sparse_probe_chooses_as_transformer_lens_does() -> None:
    """Coordinates are chosen by TransformerLens's score: the absolute difference of class means."""
    chosen = SparseProbe(k=3).fit(X, Y).selected_
    score = np.abs(X[Y == 1].mean(0) - X[Y == 0].mean(0))
    assert list(chosen) == list(np.argsort(-score)[:3]) and chosen[0] == 2


@pytest.mark.slow  # importing TransformerLens takes ten seconds
def test_sparse_probe_against_transformer_lens() -> None:
    """On TransformerLens's training rows, both choose the same coordinates and give the same answers."""
    from transformer_lens.tools.analysis.sparse_probing import fit_sparse_probe

    theirs = fit_sparse_probe(torch.from_numpy(X), torch.from_numpy(Y), k=3, class_weight=None)
    train = theirs.train_indices.numpy()
    ours = SparseProbe(k=3).fit(X[train], Y[train])
    assert list(ours.selected_) == theirs.selected_features.tolist()
    said = X[:, ours.selected_] @ theirs.coefficients.numpy() + float(theirs.intercept) > 0
    assert np.mean(said == ours.predict(X).astype(bool)) > 0.98


def test_calibration_keeps_roots_together() -> None:
    """Calibrated probabilities have the right shape and sum to 1, and folds hold whole roots."""
    roots = np.repeat([f"r{i}" for i in range(50)], 4)
    fitted = calibrated("logistic", X, Y, roots)
    probabilities = fitted.predict_proba(X)
    assert probabilities.shape == (200, 2) and np.allclose(probabilities.sum(1), 1)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ProbeError, match="mass-mean"):
        get("magic")


# ---- solvers ---------------------------------------------------------------------------------------------------------
# Probes solved in one batch equal the probes that scikit-learn fits one by one.

CELLS, ROWS, WIDTH, FOLDS = 2, 300, 12, 3
SKLEARN = {
    "logistic": lambda: make_pipeline(StandardScaler(), LogisticRegression(solver="newton-cg", tol=1e-12, max_iter=10000)),
    "ridge": lambda: make_pipeline(StandardScaler(), RidgeClassifier()),
    "mass-mean": MassMeanProbe,
    "mass-mean-whitened": lambda: MassMeanProbe(whiten=True),
}


def problem(classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [cells, rows, d] with a large common mean, codes [tasks, rows], train [tasks, folds, rows] with gaps."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(CELLS, ROWS, WIDTH)) * generator.uniform(0.5, 3, size=WIDTH) + 50
    scores = (x[0] - x[0].mean(0)) @ generator.normal(size=(WIDTH, classes)) + 4 * generator.gumbel(size=(ROWS, classes))
    codes = np.stack([scores.argmax(1), generator.integers(classes, size=ROWS)])
    fold = generator.integers(FOLDS, size=ROWS)
    train = np.repeat((np.arange(FOLDS)[:, None] != fold)[None], 2, 0)
    train[1, :, generator.integers(ROWS, size=20)] = False  # some rows lack the second label
    return x, codes, train


def spread(weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients without the part common to all classes, which changes no prediction."""
    if len(weight) == 1:
        return weight, bias
    return weight - weight.mean(0), bias - bias.mean()


@pytest.mark.parametrize("kind", SKLEARN)
@pytest.mark.parametrize("classes", swept([2, 4], 2))
def test_batched_is_scikit_learn(kind: str, classes: int) -> None:
    """Coefficients are within 1e-6 of one-by-one fits, for every cell, label and fold."""
    x, codes, train = problem(classes)
    solution = solve(kind, torch.from_numpy(x), one_hot(codes, classes), train, tolerance=1e-10)
    for cell in range(CELLS):
        for task in range(2):
            for fold in range(FOLDS):
                rows = train[task, fold]
                weight, bias = spread(*coefficients(SKLEARN[kind]().fit(x[cell][rows], codes[task][rows])))
                ours = spread(solution.weight[cell, task, fold].numpy(), solution.bias[cell, task, fold].numpy())
                assert np.abs(ours[0] - weight).max() < 1e-6
                assert np.abs(ours[1] - bias).max() < 1e-6 * max(1, np.abs(bias).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_answers_on_bad_data(dtype: torch.dtype) -> None:
    """Separable classes, repeated or constant columns, and columns of very different scale: the predicted class is the same."""
    generator = np.random.default_rng(3)
    codes = generator.integers(2, size=ROWS)
    x = generator.normal(size=(1, ROWS, WIDTH))
    x[0, :, 0] += 8 * codes
    x[0, :, 3], x[0, :, 4], x[0, :, 5] = x[0, :, 0], 1.0, 1e3 * x[0, :, 5]
    train = np.ones((1, 1, ROWS), dtype=bool)
    train[0, 0, ::3] = False
    solution = solve("logistic", torch.from_numpy(x).to(dtype), one_hot(codes[None], 2), train)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)).fit(x[0][train[0, 0]], codes[train[0, 0]])
    said = solution.scores(torch.from_numpy(x).to(dtype))[0, 0, 0, :, 0].numpy() > 0
    assert np.array_equal(said, theirs.predict(x[0]) == 1)


@pytest.mark.parametrize(
    ("size", "width"), swept([(300, 60), (1500, 400), (500, 1200)], (300, 60)), ids=["small", "tall", "wide"]
)
def test_rows_far_from_those_of_the_fit(size: int, width: int) -> None:
    """Pretrained models have columns in which few rows are ten thousand times as large as the others: where these rows are
    not fitted, the mean of all is far from the fitted ones."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(size, width))
    codes = (x[:, 0] + x[:, 1] + 0.5 * generator.normal(size=size) > 0).astype(int)
    x[::20, ::3] += 40_000
    train = (np.arange(3)[:, None] != np.arange(size) % 3) & (np.arange(size) % 20 != 0)
    solution = solve("logistic", torch.from_numpy(x)[None], one_hot(codes[None], 2), train[None], tolerance=1e-9)
    near, said = np.arange(size) % 20 != 0, solution.scores(torch.from_numpy(x)[None])[0, 0, :, :, 0].numpy()
    for number, rows in enumerate(train):
        theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000, tol=1e-9)).fit(x[rows], codes[rows])
        assert np.abs(said[number] - theirs.decision_function(x))[near].max() < 1e-4


def test_cells_and_tasks_do_not_see_each_other() -> None:
    """A cell solved alone has the same bits as in a batch; a label solved alone, the same coefficients up to rounding."""
    x, codes, train = problem(2)
    targets = one_hot(codes, 2)
    both = solve("logistic", torch.from_numpy(x), targets, train, tolerance=1e-10)
    assert torch.equal(solve("logistic", torch.from_numpy(x[1:]), targets, train, tolerance=1e-10).weight[0], both.weight[1])
    alone = solve("logistic", torch.from_numpy(x[1:]), targets[:1], train[:1], tolerance=1e-10)
    assert torch.allclose(both.weight[1, 0], alone.weight[0, 0], atol=1e-8)


def test_same_call_same_bits() -> None:
    x, codes, train = problem(2)
    first, second = (solve("logistic", torch.from_numpy(x), one_hot(codes, 2), train) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)


@pytest.mark.parametrize("shape", [(3, 600, 40), (2, 60, 200)], ids=["tall", "wide"])
def test_threads_change_no_bit(shape: tuple[int, int, int]) -> None:
    """Logistic probes and their scores have the same bits with one thread and with several."""
    generator = np.random.default_rng(0)
    x, codes = torch.from_numpy(generator.normal(size=shape)), generator.integers(2, size=(2, shape[1]))
    train, before, found = np.ones((2, 1, shape[1]), dtype=bool), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            solution = solve("logistic", x, one_hot(codes, 2), train)
            found.append((solution.weight, solution.scores(x)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def gradient(x: np.ndarray, codes: np.ndarray, C: float, solution: Solution) -> float:
    """The largest entry of the gradient per row, on standardised columns: what scikit-learn's tolerance bounds."""
    scaler = StandardScaler().fit(x)
    weight, rows = solution.weight[0, 0, 0, 0].numpy() * scaler.scale_, scaler.transform(x)
    score = x @ solution.weight[0, 0, 0, 0].numpy() + float(solution.bias[0, 0, 0, 0])
    off = 1 / (1 + np.exp(-score)) - codes
    return float(max(np.abs(rows.T @ off + weight / C).max(), abs(off.sum())) / len(x))


@pytest.mark.parametrize("shape", [(40, 300), (30, 31), (200, 20)])
def test_every_strength_converges(shape: tuple[int, int]) -> None:
    """With fewer rows than columns, and weak regularisation of separable rows, the gradient still reaches the tolerance."""
    generator = np.random.default_rng(0)
    codes = generator.integers(2, size=shape[0])
    x = generator.normal(size=shape) + 2 * codes[:, None] * np.eye(1, shape[1])
    path, every = (0.01, 1.0, 10.0, 100.0), np.ones((1, 1, shape[0]), dtype=bool)
    for C, found in zip(
        path, solve_path("logistic", torch.from_numpy(x)[None], one_hot(codes, 2)[None], every, path), strict=True
    ):
        assert gradient(x, codes, C, found) < 1.1e-6


def test_steps_without_a_gram_matrix_find_the_same_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonal, Gram matrix and row space are three ways to one minimum; few problems of many columns take the first."""
    assert quasi_newton.patience(5000, 2048, 1) > 50 and quasi_newton.patience(5000, 576, 500) == 0
    generator = np.random.default_rng(0)
    codes, x = generator.integers(3, size=(1, 90)), torch.from_numpy(generator.normal(size=(1, 90, 400)))
    found = []
    for wide, steps in ((True, 0), (False, 0), (False, 10**6)):
        monkeypatch.setattr(solvers, "worth_the_row_space", lambda *_, wide=wide: wide)
        monkeypatch.setattr(quasi_newton, "patience", lambda *_, steps=steps: steps)
        found.append(solve("logistic", x, one_hot(codes, 3), np.ones((1, 1, 90), dtype=bool), tolerance=1e-9).weight)
    assert torch.allclose(found[0], found[1], atol=1e-6) and torch.allclose(found[0], found[2], atol=1e-6)


def test_atoms_add_up() -> None:
    """The second moments of overlapping sets equal those computed set by set."""
    x, _, train = problem(2)
    sets = train.reshape(-1, ROWS)
    grams = Grams(torch.from_numpy(x), sets)
    for i, rows in enumerate(sets):
        part = torch.from_numpy(x[:, rows])
        centred = part - part.mean(1, keepdim=True)
        assert torch.allclose(grams.second[:, i], centred.mT @ centred, atol=1e-8)
        assert torch.allclose(grams.scales[:, i], part.std(1, correction=0), atol=1e-10)


@pytest.mark.parametrize("rows", [88, 110, 300, 1000])
def test_a_column_that_a_fold_lacks_is_constant(rows: int) -> None:
    """Tokens of tested rows only: sums of equal numbers round, and a column over what is left of it would be all of a score."""
    x = torch.zeros(1, rows, 7, dtype=torch.float64)
    for count in range(7):
        x[0, : count + 1, count] = torch.arange(count + 1.0, 0, -1).double()
    train = np.arange(rows) >= 7
    assert not Grams(x, train[None]).deviations.any()
    whole = torch.cat([x, torch.randn(1, rows, 2, generator=torch.Generator().manual_seed(rows)).double()], 2)
    codes = (whole[0, :, -1] > 0).long().numpy()
    weight = solve("logistic", whole, one_hot(codes, 2)[None], train[None, None]).weight
    assert weight[..., :7].abs().max() < 1e-5 < weight[..., -1].abs().max()


def test_scores_are_linear() -> None:
    solution = Solution(torch.ones(1, 1, 1, 1, 3), torch.full((1, 1, 1, 1), 2.0))
    assert solution.scores(torch.ones(1, 4, 3)).flatten().tolist() == [5.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SKLEARN)
def test_gpu_gives_the_same_answers(kind: str) -> None:
    x, codes, train = problem(2)
    cpu, gpu = (solve(kind, torch.from_numpy(x).to(d), one_hot(codes, 2), train, tolerance=1e-10) for d in ("cpu", "cuda"))
    assert torch.allclose(cpu.weight, gpu.weight.cpu(), atol=1e-7)


# ---- hard rows -------------------------------------------------------------------------------------------------------
# Rows that are hard for arithmetic: rare classes, classes that a fold lacks, columns of very different scale.

ROWS_OF_HARD_ROWS, WIDTH_OF_HARD_ROWS = 2000, 16


def goal_of(codes: np.ndarray, classes: int) -> Goal:
    return Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(len(codes), dtype=bool))


def area(X: np.ndarray, y: np.ndarray) -> float:
    """AUROC on the second half of the rows of a class-balanced probe of the first half."""
    half = len(X) // 2
    probe = LogisticRegression(class_weight="balanced").fit(X[:half], y[:half])
    return float(roc_auc_score(y[half:], probe.decision_function(X[half:])))


def rare(share: float, effect: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    y = (generator.random(ROWS_OF_HARD_ROWS) < share).astype(int)
    return generator.normal(size=(ROWS_OF_HARD_ROWS, WIDTH_OF_HARD_ROWS)) + effect * np.eye(1, WIDTH_OF_HARD_ROWS) * y[
        :, None
    ], y


# ---- erasers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [None, LogisticRegression()], ids=["ridge", "logistic"])
def test_nullspace_projection_erases_a_rare_class(estimator: LogisticRegression | None) -> None:
    """With 95 : 5 labels no classifier beats the majority, yet the label is readable. It is erased all the same."""
    X, y = rare(0.05, 1.5)
    cleaner = Inlp(estimator).fit(X, y)
    assert area(X, y) > 0.8 and area(cleaner.transform(X), y) < 0.6
    assert len(cleaner.basis_) < 8, "what is left is not above chance on held-out rows, so it stops"


def test_nullspace_projection_leaves_noise() -> None:
    """Negative control: where nothing can be read from held-out rows, next to nothing is removed."""
    removed = [len(Inlp().fit(*rare(0.3, 0.0, seed)).basis_) for seed in range(6)]
    assert np.median(removed) == 0


def test_nullspace_projection_keeps_groups_together() -> None:
    """Labels that belong to groups, with noise shared by each group: only folds that split groups take it for the label."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    y = np.repeat(generator.permutation(np.arange(40) % 2), 10)
    X = np.repeat(generator.normal(size=(40, 30)), 10, 0) + 0.1 * generator.normal(size=(400, 30))
    assert len(Inlp().fit(X, y, groups=groups).basis_) < len(Inlp().fit(X, y).basis_)


def test_nullspace_projection_refuses_what_it_cannot_judge() -> None:
    X, y = rare(0.05, 1.5)
    with pytest.raises(BadRows, match="at least two"):
        Inlp().fit(X, np.arange(ROWS_OF_HARD_ROWS) == 3)
    with pytest.raises(ProbeError, match="sample_weight"):
        Inlp(NoWeights()).fit(X, y)


class NoWeights(LogisticRegression):
    def fit(self, X: np.ndarray, y: np.ndarray) -> "NoWeights":  # type: ignore[override]
        super().fit(X, y)
        return self


@pytest.mark.parametrize("orders", [0, 8, 12])
def test_erasure_does_not_depend_on_scales(orders: int) -> None:
    """Columns whose scales span `orders` of magnitude are erased as well as equal ones, by the same change of the rows."""
    generator = np.random.default_rng(0)
    y = generator.integers(2, size=ROWS_OF_HARD_ROWS)
    X = (generator.normal(size=(ROWS_OF_HARD_ROWS, WIDTH_OF_HARD_ROWS)) + y[:, None]) @ (
        np.eye(WIDTH_OF_HARD_ROWS) + 0.1 * generator.normal(size=(WIDTH_OF_HARD_ROWS, WIDTH_OF_HARD_ROWS))
    )
    scales = np.logspace(-orders / 2, orders / 2, WIDTH_OF_HARD_ROWS)
    erased = Leace().fit_transform(X * scales, y)
    standard = StandardScaler().fit_transform(erased)
    free = LogisticRegression(C=1e6, max_iter=5000).fit(standard, y)
    assert free.score(standard, y) <= max(y.mean(), 1 - y.mean()) + 1e-9
    assert np.abs(erased / scales - Leace().fit_transform(X, y)).max() < 1e-6, "erasing commutes with scaling"


def test_erasure_in_a_subspace_is_the_least_change() -> None:
    """Rows of rank 5 in 16 columns of unlike scale: on these rows the eraser is the authors', and one column is constant."""
    from concept_erasure import LeaceFitter

    generator = np.random.default_rng(1)
    y = generator.integers(3, size=400)
    X = (
        (generator.normal(size=(400, 5)) + 2 * np.eye(5)[y])
        @ generator.normal(size=(5, WIDTH_OF_HARD_ROWS))
        * np.logspace(-1, 1, WIDTH_OF_HARD_ROWS)
    )
    X[:, 7] = 3.0
    onehot = torch.nn.functional.one_hot(torch.from_numpy(y)).double()
    theirs = LeaceFitter.fit(torch.from_numpy(X), onehot, shrinkage=False, svd_tol=1e-8).eraser(torch.from_numpy(X)).numpy()
    assert np.abs(Leace().fit_transform(X, y) - theirs).max() < 1e-8


# ---- whitening --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [0.1, 1e8])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_constant_column_changes_no_prediction(constant: float, whiten: bool, classes: int) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(classes, size=600)
    X = generator.normal(size=(600, 8)) + 1.5 * np.eye(classes, 8)[y]
    wide = np.insert(X, 5, constant, axis=1)
    fitted = MassMeanProbe(whiten).fit(wide, y)
    assert np.array_equal(fitted.predict(wide), MassMeanProbe(whiten).fit(X, y).predict(X))
    train = (np.arange(600) < 300)[None]
    name = "mass-mean-whitened" if whiten else "mass-mean"
    for dtype, agreement in ((torch.float64, 1.0), (torch.float32, 0.99)):
        said, without = (
            held_out(name, torch.from_numpy(rows)[None].to(dtype), [goal_of(y, classes)], train, ~train).predicted[
                0, 0, ~train[0]
            ]
            for rows in (wide, X)
        )
        assert np.mean(said == without) >= agreement


def test_whitening_does_not_depend_on_scales() -> None:
    """The metric of the within-class covariance undoes any scaling of the columns."""
    generator = np.random.default_rng(0)
    y = generator.integers(2, size=600)
    X = generator.normal(size=(600, 8)) + np.eye(1, 8) * y[:, None]
    scaled = X * np.logspace(-4, 4, 8)
    train = (np.arange(600) < 300)[None]
    plain = MassMeanProbe(whiten=True).fit(X[:300], y[:300]).predict(X[300:])
    assert np.array_equal(MassMeanProbe(whiten=True).fit(scaled[:300], y[:300]).predict(scaled[300:]), plain)
    held = held_out("mass-mean-whitened", torch.from_numpy(scaled)[None], [goal_of(y, 2)], train, ~train)
    assert np.array_equal(held.predicted[0, 0, 300:], plain)


def test_moments_of_a_far_column() -> None:
    """A mean of 1e8 costs the covariance no digits; a constant column has variance 0."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(700, 3))
    X[:, 1] = 1e8 + X[:, 1]
    X[:, 2] = 1e8 / 3
    moments = moments_of(X, (np.arange(700) % 2).astype(str))
    assert moments.covariance[1, 1].item() == pytest.approx(np.var(X[:, 1] - 1e8), rel=1e-9)
    assert (moments.covariance[2] == 0).all() and (moments.cross[2] == 0).all() and (moments.class_means[:, 2] == 1e8 / 3).all()


# ---- information ------------------------------------------------------------------------------------------------


def unseen(classes: int = 3) -> tuple[torch.Tensor, Goal, np.ndarray]:
    """Rows of which the training half lacks the last class."""
    generator = np.random.default_rng(0)
    codes = generator.integers(classes - 1, size=200)
    codes[150:160] = classes - 1
    x = generator.normal(size=(200, 6)) + 3 * np.eye(classes, 6)[codes]
    return torch.from_numpy(x)[None], goal_of(codes, classes), (np.arange(200) < 100)[None]


@pytest.mark.parametrize("name", ["logistic", "lda", "sparse"])
def test_information_where_a_fold_lacks_a_class(name: str) -> None:
    """The loss of a class that training lacks is finite and bounded by the documented rule, for probe and frequencies alike."""
    x, goal, train = unseen()
    test = ~train[0]
    loss = held_out(name, x, [goal], train, ~train).log_loss[0, 0].astype(np.float64)
    null = registry.null_log_loss(goal.codes, train, ~train, 3)
    bound = np.log(2 * 100 + 3)
    assert loss[test].max() <= bound + 1e-6 and null[goal.codes == 2] == pytest.approx(bound)
    assert registry.v_information(loss[test], null[test]) > 0.5


def test_smoothing_is_alike_for_probe_and_frequencies() -> None:
    """A probe that answers with the frequencies of its training set has no information, whichever classes that set lacks."""
    _, goal, train = unseen()
    shares = np.bincount(goal.codes[train[0]], minlength=3) / 100
    with np.errstate(divide="ignore"):
        probe = -registry.smoothed(np.log(shares), 100)[goal.codes]
    null = registry.null_log_loss(goal.codes, train, ~train, 3)
    assert registry.v_information(probe[~train[0]], null[~train[0]]) == pytest.approx(0, abs=1e-12)
    assert np.exp(registry.smoothed(np.log(np.full((2, 3), 1 / 3)), 5)) == pytest.approx(1 / 3)


def test_online_code_of_many_classes() -> None:
    """A class that no earlier block has costs little more than under the uniform code; that does not decide the length."""
    generator = np.random.default_rng(0)
    codes = generator.integers(10, size=400)
    x = torch.from_numpy(generator.normal(size=(400, 32)) + 4 * np.eye(10, 32)[codes])[None]
    train, test = registry.code_blocks(np.arange(400).astype(str))
    assert len(np.unique(codes[train[0]])) < 10, "the first probe has not seen every class"
    loss = held_out("logistic", x, [goal_of(codes, 10)], train, test).log_loss[0, 0] / np.log(2)
    for fit, block in zip(train, test, strict=True):
        new = block & ~np.isin(codes, codes[fit])
        assert (loss[new] <= np.log2(2 * fit.sum() + 10) + 1e-6).all()
    assert loss[test[0]].mean() < np.log2(10) + 0.5, "five of its twelve rows are of classes that the probe has not seen"
    bits, compression = registry.code_length(loss * np.log(2), test.any(0), 10)
    assert bits < 1.0 and compression > 3.5


# ---- estimators -------------------------------------------------------------------------------------------------


def test_contrast_probe_says_that_it_is_not_fitted() -> None:
    for ask in ("predict", "decision_function"):
        with pytest.raises(NotFittedError):
            getattr(CcsProbe(), ask)(np.zeros((2, 4)))


# ---- moments ---------------------------------------------------------------------------------------------------------
# Streaming moments: the same bits however the rows are split into chunks, and correct against float64.

ROWS_OF_MOMENTS = torch.randn(3 * CHUNK + 17, 12, generator=torch.Generator().manual_seed(0)) + 2


def moments(pieces: list[int], rows: torch.Tensor = ROWS_OF_MOMENTS) -> tuple[torch.Tensor, torch.Tensor]:
    statistics, at = StreamingStatistics(rows.shape[1]), 0
    for piece in pieces:
        statistics.add(rows[at : at + piece])
        at += piece
    statistics.add(rows[at:])
    return statistics.moments()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_pieces_do_not_move_a_bit(pieces: list[int]) -> None:
    whole, cut = moments([]), moments(pieces)
    assert torch.equal(whole[0], cut[0]) and torch.equal(whole[1], cut[1])


def test_order_is_part_of_the_result() -> None:
    """Negative control: another order of rows gives other bits."""
    whole, flipped = moments([]), moments([], ROWS_OF_MOMENTS.flip(0))
    assert not (torch.equal(whole[0], flipped[0]) and torch.equal(whole[1], flipped[1]))


def test_moments_are_right() -> None:
    mean, covariance = moments([5, 300])
    exact = ROWS_OF_MOMENTS.double()
    assert torch.allclose(mean, exact.mean(0), atol=1e-12)
    assert torch.allclose(covariance, torch.cov(exact.T, correction=0), atol=1e-10)


def test_bad_rows_are_refused() -> None:
    with pytest.raises(BadRows, match=r"shape \[n, 3\]"):
        StreamingStatistics(3).add(torch.zeros(2, 4))
    with pytest.raises(BadRows, match="No rows were added"):
        StreamingStatistics(3).moments()


# ---- theorems --------------------------------------------------------------------------------------------------------
# Theorems as tests: what a probe must find, and what it must not.


def test_planted_direction_is_found_and_noise_is_not() -> None:
    """The layer that holds the label is shown. Noise, and the layer with that direction removed, are not."""
    names = ["logistic", "mass-mean", "ridge"]
    table = sweep(rows_of(), "face", sites="S", positions="all", estimators=names, permutations=99).table
    main = table[~table["known_zero"]]
    planted, rest = main[main["layer"] == 1], main[main["layer"] != 1]
    assert (planted["accuracy"] > 0.95).all() and (planted["p_family"] <= 0.01).all()
    assert (rest["p_family"] > 0.05).all() and (rest["low"] < 0.5).all()


@pytest.mark.parametrize("estimator", ["logistic", "mass-mean", "mass-mean-whitened", "ridge", "lda"])
def test_direction_is_the_planted_one(estimator: str) -> None:
    """The direction is the planted one up to sampling error. Negative control: labels permuted between roots give another."""
    rows = rows_of(roots=400)
    found = fit_probe(rows, "face", layer=1, position="all", estimator=estimator)
    lost = fit_probe(rows, "face", layer=1, position="all", estimator=estimator, shuffled=True)
    assert found.direction("heads", "tails") @ direction() > 0.95
    assert abs(lost.direction("heads", "tails") @ direction()) < 0.9


def inside(rows: ProbeRows, labels: list[str], chance: float, seed: int) -> list[bool]:
    """For each label, whether the interval of a cross-validated probe contains chance."""
    goals, split = [make_goal(rows.target(label)) for label in labels], by_root(rows, seed=seed)
    x = torch.from_numpy(rows.matrix("S", 0))[None]
    said = held_out("logistic", x, goals, split.train, split.test).predicted[0]
    right = np.stack([line == goal.codes for line, goal in zip(said, goals, strict=True)])
    return [chance in each for each in ratio_over_groups(right, np.ones(len(rows)), rows.roots, folds=5)]


@pytest.mark.parametrize("seeds, fewest, most", [(16, 13, 16), pytest.param(100, 90, 99, marks=pytest.mark.slow)])
def test_known_zeros_sit_at_chance(seeds: int, fewest: int, most: int) -> None:
    """In about 95 of 100 seeds the 95 % interval contains 1/2, the exact accuracy of guessing, for each of two labels."""
    labels = ["shuffled", "next_action"]
    held = [inside(rows_of(roots=150, per_root=1, seed=seed, width=32), labels, 0.5, seed) for seed in range(seeds)]
    assert all(fewest <= number <= most for number in np.sum(held, axis=0))


def test_intervals_have_teeth() -> None:
    """Negative control: where the label is present, no interval contains chance."""
    rows = rows_of(roots=150, per_root=1)
    goal, split = make_goal(rows.target("face")), by_root(rows)
    said = held_out("logistic", torch.from_numpy(rows.matrix("S", 1))[None], [goal], split.train, split.test).predicted[0, 0]
    assert 0.5 not in ratio_over_groups((said == goal.codes)[None], np.ones(len(rows)), rows.roots, folds=5)[0]


def test_erased_rows_cannot_be_learned() -> None:
    """After LEACE every class has the same mean, so no linear classifier beats the majority on these rows."""
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    erased = Leace().fit_transform(X, y)
    majority = max(np.mean(y == "heads"), np.mean(y == "tails"))
    free = dict(C=np.inf, tol=1e-10, max_iter=10000)
    assert LogisticRegression(**free).fit(erased, y).score(erased, y) <= majority + 1e-9
    assert np.abs(erased[y == "heads"].mean(0) - erased[y == "tails"].mean(0)).max() < 1e-9
    assert LogisticRegression(**free).fit(X, y).score(X, y) > 0.95, "the rows must have held the label before"


def test_leace_is_concept_erasure() -> None:
    """LEACE gives the same rows as the authors' implementation."""
    from concept_erasure import LeaceFitter

    generator = np.random.default_rng(0)
    for classes in (2, 3):
        y = generator.integers(classes, size=500)
        X = generator.normal(size=(500, 10)) @ generator.normal(size=(10, 10)) + 2 * np.eye(10)[y]
        ours = Leace().fit(X, y.astype(str)).transform(X)
        onehot = torch.nn.functional.one_hot(torch.from_numpy(y)).double()
        theirs = LeaceFitter.fit(torch.from_numpy(X), onehot, shrinkage=False, svd_tol=1e-8).eraser(torch.from_numpy(X)).numpy()
        assert np.abs(ours - theirs).max() < 1e-8


def test_leace_changes_least() -> None:
    """Projecting out the difference of means erases too, but moves the rows farther in their own metric."""
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    way = MassMeanProbe().fit(X, y).coef_[0]
    plain = X - np.outer((X - X.mean(0)) @ way, way) / (way @ way)
    whiten = np.linalg.inv(np.cov(X.T))

    def moved(other: np.ndarray) -> float:
        return float(np.einsum("nd,de,ne->", other - X, whiten, other - X))

    assert moved(Leace().fit_transform(X, y)) < moved(plain)


def test_nullspace_projection_erases_a_planted_direction() -> None:
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    cleaned = Inlp(iterations=12).fit_transform(X, y)
    assert LogisticRegression().fit(cleaned, y).score(cleaned, y) < 0.65
    assert np.linalg.matrix_rank(cleaned) < X.shape[1]


def test_nullspace_projection_takes_one_direction_less_than_classes() -> None:
    """Three classes along two directions: those two are removed and nothing else, whatever the scale of the rows."""
    generator = np.random.default_rng(0)
    y = generator.integers(3, size=600)
    for scale in (1.0, 1e5):
        X = scale * (generator.normal(size=(600, 20)) + 5 * np.eye(20)[y] * (y < 2)[:, None])
        once, cleaner = Inlp(iterations=1).fit(X, y.astype(str)), Inlp().fit(X, y.astype(str))
        assert once.basis_.shape == (2, 20) and np.allclose(once.basis_ @ once.basis_.T, np.eye(2))
        assert np.linalg.norm(once.basis_[:, :2]) > 1.35, "both lie in the plane that was planted"
        assert len(cleaner.basis_) % 2 == 0 and np.linalg.matrix_rank(cleaner.transform(X)) == 20 - len(cleaner.basis_)


def test_inlp_removes_what_a_balanced_classifier_reads() -> None:
    """One step: the direction of scikit-learn's classifier with equal weight for both classes. Control: unweighted, another."""
    generator = np.random.default_rng(2)
    y = (np.arange(120) < 18).astype(int)
    X = (
        generator.normal(size=(120, 5))
        + np.outer(y, [2.0, 1.0, 0, 0, 0])
        + np.outer(generator.normal(size=120), [0, 1.0, 1.0, 0, 0])
    )
    (found,) = Inlp(iterations=1).fit(X, y).basis_
    for weights, same in ((np.where(y == 1, 120 / 36, 120 / 204), True), (np.ones(120), False)):
        way = RidgeClassifier().fit(X, y, sample_weight=weights).coef_.reshape(-1)
        assert (abs(float(found @ way)) > (1 - 1e-9) * float(np.linalg.norm(way))) is same
    assert np.allclose(Inlp(iterations=1).fit_transform(X, y) @ found, 0.0)
