"""Many linear probes solved together: cells (site, layer) x tasks (labels, controls) x folds.

All tasks and folds of a cell have the same rows x [n, d], so they share the products with x: one matrix product instead of
many matrix-vector products. Columns are standardised within each training set by algebra, without copying the rows:
w . (x - m) / s = x . (w / s) - m . (w / s).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import no_such
from replaylens.probes.errors import UnknownEstimator
from replaylens.probes.grams import Grams
from replaylens.probes.quasi_newton import QuasiNewton

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

    Raises UnknownEstimator for another kind than logistic, ridge, regression, mass-mean and mass-mean-whitened.

    >>> import numpy as np, torch
    >>> from replaylens.probes import one_hot
    >>> codes = np.arange(40) % 2
    >>> x = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0)).double() + 4 * torch.from_numpy(codes)[:, None]
    >>> found = solve("ridge", x, one_hot(codes, 2)[None], np.ones((1, 1, 40), dtype=bool))
    >>> found.weight.shape, ((found.scores(x)[..., 0] > 0) == torch.from_numpy(codes == 1)).all().item()
    (torch.Size([3, 1, 1, 1, 8]), True)
    """
    if len(x) > 1 and not x.is_cuda:  # a CPU works on one cell at a time anyway; apart, no cell waits for another
        parts = [solve(kind, x[i : i + 1], targets, train, C=C, alpha=alpha, tolerance=tolerance) for i in range(len(x))]
        return Solution(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
    tasks, folds, n = train.shape
    sets, which = _different(train.reshape(tasks * folds, n))
    grams = Grams(x, sets)
    y = torch.as_tensor(targets, dtype=x.dtype, device=x.device)
    where = torch.as_tensor(which.reshape(tasks, folds), device=x.device)
    match kind:
        case "ridge":
            weight, bias = _ridge(grams, y, where, alpha, sign=True)
        case "regression":
            weight, bias = _ridge(grams, y, where, alpha, sign=False)
        case "mass-mean" | "mass-mean-whitened":
            weight, bias = _mass_mean(grams, y, where, whiten=kind.endswith("whitened"))
        case "logistic":
            small = tolerance or (1e-6 if x.dtype == torch.float64 else 1e-4)
            weight, bias = QuasiNewton(grams, y, where, 1.0 / C, small).run()
        case _:
            raise UnknownEstimator(no_such("kind of probe", kind, KINDS))
    return Solution(weight, bias - torch.einsum("btfkd,bd->btfk", weight, grams.shift))


def _different(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct masks among [m, n], in order of appearance; the number of each mask among them [m])"""
    seen: dict[bytes, int] = {}
    which = np.array([seen.setdefault(mask.tobytes(), len(seen)) for mask in masks])
    return masks[[int(np.argmax(which == i)) for i in range(len(seen))]], which


def _ridge(grams: Grams, y: Tensor, where: Tensor, alpha: float, sign: bool) -> tuple[Tensor, Tensor]:
    """Least squares with a penalty on standardised columns; classes are targets of -1 and 1, as in scikit-learn."""
    y = 2 * y - 1 if sign else y
    train = grams.sets[where].to(y.dtype)  # [tasks, folds, n]
    mean_y = torch.einsum("tfn,tnk->tfk", train, y) / train.sum(-1, keepdim=True)
    centred = train[..., None] * (y[:, None] - mean_y[:, :, None])  # [tasks, folds, n, k]
    scales, means = grams.scales[:, where], grams.means[:, where]  # [cells, tasks, folds, d]
    right = torch.einsum("bnd,tfnk->btfdk", grams.x, centred) / scales[..., None]
    left = grams.second / (grams.scales[:, :, :, None] * grams.scales[:, :, None, :])
    eye = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    factors = torch.linalg.cholesky(left + alpha * eye)  # [cells, sets, d, d]
    solved = torch.cholesky_solve(right, factors[:, where])
    weight = (solved / scales[..., None]).mT  # [cells, tasks, folds, k, d]
    return weight, mean_y - torch.einsum("btfkd,btfd->btfk", weight, means)


def _mass_mean(grams: Grams, y: Tensor, where: Tensor, whiten: bool) -> tuple[Tensor, Tensor]:
    """Nearest class mean: the probes of `mass_mean`."""
    onehot = torch.cat([1 - y, y], -1) if y.shape[-1] == 1 else y
    train = grams.sets[where].to(y.dtype)
    members = train[..., None] * onehot[:, None]  # [tasks, folds, n, k]
    counts = members.sum(2)
    means = torch.einsum("bnd,tfnk->btfkd", grams.x, members) / counts.clamp_min(1)[..., None]
    weight = means
    if whiten:
        from_mean = means - grams.means[:, where][:, :, :, None]
        between = torch.einsum("tfk,btfkd,btfke->btfde", counts, from_mean, from_mean)
        within = (grams.second[:, where] - between) / train.sum(-1)[:, :, None, None]
        scale = within.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(y.dtype).tiny)
        eye = torch.eye(within.shape[-1], dtype=y.dtype, device=y.device)
        weight = torch.linalg.solve(within + 1e-6 * scale[..., None, None] * eye, means.mT).mT
    bias = torch.where(counts > 0, -0.5 * (weight * means).sum(-1), -torch.inf)  # a class without rows is never nearest
    if y.shape[-1] == 1:
        weight, bias = weight[..., 1:, :] - weight[..., :1, :], bias[..., 1:] - bias[..., :1]
    return weight, bias
