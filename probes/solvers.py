"""Many linear probes solved together: cells (site, layer) x tasks (labels, controls) x folds.

All tasks and folds of a cell have the same rows x [n, d], so they share the products with x: one matrix product instead of
many matrix-vector products. Columns are standardised within each training set by algebra, without copying the rows:
w . (x - m) / s = x . (w / s) - m . (w / s).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import no_such
from replaylens.engine.model.modes import threads
from replaylens.probes.errors import ProbeError
from replaylens.probes.estimators import whitened
from replaylens.probes.quasi_newton import Grams, QuasiNewton, RowSpace, worth_the_row_space

# ---- solvers ---------------------------------------------------------------------------------------------------------

KINDS = ("logistic", "ridge", "regression", "mass-mean", "mass-mean-whitened")


@dataclass(frozen=True, eq=False)
class Solution:
    """Linear probes in the coordinates of the given rows."""

    weight: Tensor
    """[cells, tasks, folds, k, d]"""
    bias: Tensor
    """[cells, tasks, folds, k]"""

    def scores(self, x: Tensor) -> Tensor:
        """x [cells, n, d] -> [cells, tasks, folds, n, k]"""
        with threads(1):
            return torch.einsum("bnd,btfkd->btfnk", x, self.weight) + self.bias[:, :, :, None]


def one_hot(codes: np.ndarray, classes: int) -> np.ndarray:
    """Class numbers [..., n] (-1: none) as targets [..., n, k]: k = 1 for two classes, else one column per class."""
    if classes == 2:
        return (codes == 1).astype(np.float64)[..., None]
    return (codes[..., None] == np.arange(classes)).astype(np.float64)


def solve(
    kind: str,
    x: Tensor,
    targets: np.ndarray,
    train: np.ndarray,
    *,
    C: float = 1.0,
    alpha: float = 1.0,
    tolerance: float | None = None,
) -> Solution:
    """Fit one kind of probe to every cell, task and fold.

    x          [cells, n, d]
    targets    [tasks, n, k], see `one_hot`; for the kind `regression` any numbers
    train      [tasks, folds, n] bool
    tolerance  logistic only: stop when the largest entry of the gradient, per row, is below it; default: 1e-6 in double
               precision, 1e-4 (scikit-learn's) in single

    Raises ProbeError for another kind than logistic, ridge, regression, mass-mean and mass-mean-whitened.

    >>> import numpy as np, torch
    >>> from replaylens.probes import one_hot
    >>> codes = np.arange(40) % 2
    >>> x = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0)).double() + 4 * torch.from_numpy(codes)[:, None]
    >>> found = solve("ridge", x, one_hot(codes, 2)[None], np.ones((1, 1, 40), dtype=bool))
    >>> found.weight.shape, ((found.scores(x)[..., 0] > 0) == torch.from_numpy(codes == 1)).all().item()
    (torch.Size([3, 1, 1, 1, 8]), True)
    """
    return solve_path(kind, x, targets, train, [C if kind == "logistic" else 1 / alpha], tolerance=tolerance)[0]


def solve_path(
    kind: str, x: Tensor, targets: np.ndarray, train: np.ndarray, path: Sequence[float], *, tolerance: float | None = None
) -> list[Solution]:
    """As `solve`, for several strengths of regularisation, which share everything but the last step.

    path  values of C, best in ascending order: each logistic fit starts from the one before. For ridge, alpha = 1 / C
    """
    if not x.is_cuda:  # one thread works on one cell: sums have one order, so that their number changes no bit
        solve_one = partial(_solve_cells, kind, targets=targets, train=train, path=path, tolerance=tolerance)
        if (count := min(len(x), torch.get_num_threads())) > 1:
            with ThreadPoolExecutor(count) as pool:
                parts = list(pool.map(solve_one, x.split(1)))
        else:
            parts = [solve_one(cell) for cell in x.split(1)]
        return [_joined([part[step] for part in parts]) for step in range(len(path))]
    return _solve_cells(kind, x, targets, train, path, tolerance)


def _solve_cells(
    kind: str, x: Tensor, targets: np.ndarray, train: np.ndarray, path: Sequence[float], tolerance: float | None
) -> list[Solution]:
    """As `solve_path`, for all cells together, in the calling thread alone."""
    with threads(1):
        return _solved(kind, x, targets, train, path, tolerance)


def _solved(
    kind: str, x: Tensor, targets: np.ndarray, train: np.ndarray, path: Sequence[float], tolerance: float | None
) -> list[Solution]:
    tasks, folds, n = train.shape
    sets, which = _different(train.reshape(tasks * folds, n))
    grams = Grams(x, sets)
    y = torch.as_tensor(targets, dtype=x.dtype, device=x.device)
    where = torch.as_tensor(which.reshape(tasks, folds), device=x.device)
    match kind:
        case "ridge":
            found = _ridge(grams, 2 * y - 1, where, [1 / C for C in path])  # classes are -1 and 1, as in scikit-learn
        case "regression":
            found = _ridge(grams, y, where, [1 / C for C in path])
        case "mass-mean" | "mass-mean-whitened":
            found = [_mass_mean(grams, y, where, whiten=kind.endswith("whitened"))] * len(path)
        case "logistic":
            found = _logistic(grams, y, where, path, tolerance or (1e-6 if x.dtype == torch.float64 else 1e-4))
        case _:
            raise ProbeError(no_such("kind of probe", kind, KINDS))
    return [Solution(weight, bias - torch.einsum("btfkd,bd->btfk", weight, grams.shift)) for weight, bias in found]


def _joined(parts: list[Solution]) -> Solution:
    return Solution(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))


def _different(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct masks among [m, n], in order of appearance; the number of each mask among them [m])"""
    seen: dict[bytes, int] = {}
    which = np.array([seen.setdefault(mask.tobytes(), len(seen)) for mask in masks])
    return masks[[int(np.argmax(which == i)) for i in range(len(seen))]], which


def _logistic(grams: Grams, y: Tensor, where: Tensor, path: Sequence[float], tolerance: float) -> list[tuple[Tensor, Tensor]]:
    rows, columns, problems = int(grams.counts.max()), grams.x.shape[2], where.numel() * y.shape[-1]
    weak = max(path) > 1  # then rows that can be separated take hundreds of steps in the space of the columns
    if rows <= (columns if weak else columns // 4) and worth_the_row_space(
        rows, columns, problems * len(path), len(grams.sets)
    ):
        return _few_rows(grams, y, where, path, tolerance)
    solver = QuasiNewton(grams, y, where, tolerance)
    return [solver.in_rows(at) for at in solver.along(path)]


def _few_rows(grams: Grams, y: Tensor, where: Tensor, path: Sequence[float], tolerance: float) -> list[tuple[Tensor, Tensor]]:
    """The same in the space of the rows, set by set, where there are fewer of them than columns."""
    shape = (len(grams.x), *where.shape, y.shape[-1])
    found = [(grams.x.new_empty(*shape, grams.x.shape[2]), grams.x.new_empty(shape)) for _ in path]
    for number in range(len(grams.sets)):
        own, space = where == number, RowSpace(grams, number)
        tasks = own.nonzero()[:, 0]
        strict = tolerance / len(space.rows) ** 0.5  # no entry of the gradient is larger than its length
        solver = QuasiNewton(space, y[tasks][:, space.rows], torch.zeros_like(tasks)[:, None], strict)
        for (weight, bias), at in zip(found, solver.along(path), strict=True):
            scaled = space.back(at[..., :-1])[:, :, 0] / grams.scales[:, number, None, None]  # [b, pairs, k, d]
            weight[:, own] = scaled
            bias[:, own] = at[:, :, 0, :, -1] - torch.einsum("bpkd,bd->bpk", scaled, grams.means[:, number])
    return found


def _ridge(grams: Grams, y: Tensor, where: Tensor, alphas: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """Least squares with a penalty on standardised columns. Tasks with the same training set share a factorisation."""
    train = grams.sets[where].to(y.dtype)  # [tasks, folds, n]
    mean_y = torch.einsum("tfn,tnk->tfk", train, y) / train.sum(-1, keepdim=True)
    centred = train[..., None] * (y[:, None] - mean_y[:, :, None])  # [tasks, folds, n, k]
    scales, means = grams.scales[:, where], grams.means[:, where]  # [cells, tasks, folds, d]
    right = torch.einsum("bnd,tfnk->btfkd", grams.x, centred) / scales[..., None, :]
    solved = [torch.empty_like(right) for _ in alphas]
    eye = torch.eye(right.shape[-1], dtype=y.dtype, device=y.device)
    for number in range(len(grams.sets)):
        own, scale = where == number, grams.scales[:, number]
        left = grams.second[:, number] / (scale[:, :, None] * scale[:, None, :])
        aim = right[:, own]  # [cells, pairs of task and fold, k, d]
        for weight, alpha in zip(solved, alphas, strict=True):
            factor = torch.linalg.cholesky(left + alpha * eye)
            weight[:, own] = torch.cholesky_solve(aim.flatten(1, 2).mT, factor).mT.reshape(aim.shape)
    weights = [weight / scales[..., None, :] for weight in solved]
    return [(weight, mean_y - torch.einsum("btfkd,btfd->btfk", weight, means)) for weight in weights]


def _mass_mean(grams: Grams, y: Tensor, where: Tensor, whiten: bool) -> tuple[Tensor, Tensor]:
    """Nearest class mean: the probes of `MassMeanProbe`."""
    onehot = torch.cat([1 - y, y], -1) if y.shape[-1] == 1 else y
    train = grams.sets[where].to(y.dtype)
    members = train[..., None] * onehot[:, None]  # [tasks, folds, n, k]
    counts = members.sum(2)
    means = torch.einsum("bnd,tfnk->btfkd", grams.x, members) / counts.clamp_min(1)[..., None]
    weight = means
    if whiten:
        parts = [_whitened(grams, means[:, t], counts[t], sets) for t, sets in enumerate(where)]  # one by one bounds memory
        weight = torch.stack(parts, 1)
    bias = torch.where(counts > 0, -0.5 * (weight * means).sum(-1), -torch.inf)  # a class without rows is never nearest
    if y.shape[-1] == 1:
        weight, bias = weight[..., 1:, :] - weight[..., :1, :], bias[..., 1:] - bias[..., :1]
    return weight, bias


def _whitened(grams: Grams, means: Tensor, counts: Tensor, sets: Tensor) -> Tensor:
    """Weights [cells, folds, k, d] of one task, from its class means, rows per class [folds, k] and training sets [folds]."""
    from_mean = means - grams.means[:, sets][:, :, None]
    between = torch.einsum("fk,bfkd,bfke->bfde", counts, from_mean, from_mean)
    within = (grams.second[:, sets] - between) / counts.sum(-1)[:, None, None]
    return whitened(means, within, grams.deviations[:, sets])
