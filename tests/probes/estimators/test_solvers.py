"""Probes solved in one batch equal the probes that scikit-learn fits one by one."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from replaylens.probes import solvers
from replaylens.probes import solvers as quasi_newton
from replaylens.probes.estimators import MassMeanProbe
from replaylens.probes.probe import coefficients
from replaylens.probes.solvers import Grams, Solution, one_hot, solve, solve_path

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
@pytest.mark.parametrize("classes", [2, 4])
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


def test_scores_are_linear() -> None:
    solution = Solution(torch.ones(1, 1, 1, 1, 3), torch.full((1, 1, 1, 1), 2.0))
    assert solution.scores(torch.ones(1, 4, 3)).flatten().tolist() == [5.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SKLEARN)
def test_gpu_gives_the_same_answers(kind: str) -> None:
    x, codes, train = problem(2)
    cpu, gpu = (solve(kind, torch.from_numpy(x).to(d), one_hot(codes, 2), train, tolerance=1e-10) for d in ("cpu", "cuda"))
    assert torch.allclose(cpu.weight, gpu.weight.cpu(), atol=1e-7)
