"""Many linear probes solved together: cells (site, layer) x tasks (labels, controls) x folds.

All tasks and folds of a cell have the same rows x [n, d], so they share the products with x: one matrix product instead of
many matrix-vector products. Columns are standardised within each training set by algebra, without copying the rows:
w . (x - m) / s = x . (w / s) - m . (w / s).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import no_such
from replaylens.engine.model.modes import threads
from replaylens.probes.errors import UnknownEstimator
from replaylens.probes.estimators import whitened

# ---- grams -----------------------------------------------------------------------------------------------------------
# `Grams`: second moments of many subsets of the same rows, at the cost of one.
#
# Folds and labels with missing values give many training sets over the same rows. Rows that belong to the same sets form an
# atom; each atom is summed once, and a set is the sum of its atoms.

_ROWS = 512
"""squared at a time"""


class Grams:
    """Statistics of x [cells, rows, d] over sets [sets, rows] (bool): everything that closed-form probes need.

    Rows are first centred on their overall mean (`shift`), so that a large common mean costs no precision.
    """

    def __init__(self, x: Tensor, sets: np.ndarray) -> None:
        self.sets = torch.as_tensor(sets, device=x.device)
        self.shift = torch.where(_constant(x), x[:, 0], x.mean(1))  # [cells, d]; a constant's mean may round, but must be 0
        self.x = x - self.shift[:, None]
        self.counts = self.sets.sum(1).to(x.dtype)  # [sets]
        weights = self.sets.to(x.dtype)
        self.means = torch.einsum("sn,bnd->bsd", weights, self.x) / self.counts[:, None]
        self._sets = sets

    @cached_property
    def second(self) -> Tensor:
        """[cells, sets, d, d]: sum of x^T x about each set's own mean."""
        b, _, d = self.x.shape
        total = self.x.new_zeros(b, len(self.sets), d, d)
        for rows, members in _atoms(self._sets):
            part = self.x[:, torch.as_tensor(rows, device=self.x.device)]
            total[:, torch.as_tensor(members, device=self.x.device)] += (part.mT @ part)[:, None]
        return total - torch.einsum("s,bsd,bse->bsde", self.counts, self.means, self.means)

    @cached_property
    def deviations(self) -> Tensor:
        """[cells, sets, d]: standard deviation of each column in each set; 0 for a constant column."""
        weights = self.sets.to(self.x.dtype)
        squares = self.x.new_zeros(len(self.x), *weights.shape[:1], self.x.shape[2])
        for first in range(0, weights.shape[1], _ROWS):  # the squares of all rows at once would be a second copy of them
            squares += weights[:, first : first + _ROWS] @ self.x[:, first : first + _ROWS].square()
        squares /= self.counts[:, None]
        variance = (squares - self.means.square()).clamp_min(0)
        floor = torch.finfo(self.x.dtype).eps * 10 * squares
        return torch.where(variance > floor, variance.sqrt(), torch.zeros_like(variance))

    @cached_property
    def scales(self) -> Tensor:
        """[cells, sets, d]: the same, with 1 for a constant column: what columns are divided by."""
        return torch.where(self.deviations > 0, self.deviations, torch.ones_like(self.deviations))


def _constant(x: Tensor) -> Tensor:
    """[cells, d]: whether all rows of a column are equal; most columns are ruled out by two rows."""
    constant = x[:, 0] == x[:, -1]
    maybe = constant.any(0)
    if bool(maybe.any()):
        constant[:, maybe] = (x[:, :, maybe] == x[:, :1, maybe]).all(1)
    return constant


def _atoms(sets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows, sets that contain them) for every distinct membership; rows in no set are left out."""
    packed = np.ascontiguousarray(np.packbits(sets, axis=0).T)  # [rows, bytes]: a row's membership as one key
    keys = packed.view(f"V{packed.shape[1]}")[:, 0]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return [(np.flatnonzero(place == i), np.flatnonzero(sets[:, row])) for i, row in enumerate(first) if sets[:, row].any()]


# ---- quasi newton ----------------------------------------------------------------------------------------------------
# `QuasiNewton`: logistic regression for every cell, task and fold at once.
#
# Minimises  sum of log-losses over the training rows + penalty / 2 |w|^2  with w on standardised columns and the bias
# unpenalised: scikit-learn's LogisticRegression(C = 1 / penalty) after a StandardScaler. The method is L-BFGS,
# preconditioned by the Hessian with its row weights replaced by their mean. That is a Gram matrix, known in advance, and
# close enough that ten to twenty gradients suffice. A gradient costs two products with the rows, shared by all tasks and
# folds of a cell. Newton's method with conjugate gradients needs three to five times as many products.
#
# A Gram matrix costs as much as tens of gradients, although single precision is enough for it. So the first steps take the
# diagonal in its place, as scikit-learn does, until they have cost as much as the matrix (`patience`): few easy problems
# never need it, many problems have it from the start, and none pays more than twice.

_STEPS, _MEMORY, _SEARCHES = 500, 10, 10
_ROWS_PER_COLUMN = 4
"""rows per column to build a preconditioner from; more would cost more than they save"""
_Key = tuple[float, ...]
"""a training set's number, and the row weight in each cell"""


@dataclass(frozen=True, eq=False)
class Pair:
    """Weights [b, t, f, k, d] and biases [b, t, f, k], or anything else of their shape: a gradient, a step."""

    w: Tensor
    c: Tensor

    def plus(self, length: Tensor, other: "Pair") -> "Pair":
        """self + length * other, with one length per problem [b, t, f]."""
        return Pair(self.w + length[..., None, None] * other.w, self.c + length[..., None] * other.c)

    def dot(self, other: "Pair") -> Tensor:
        """[b, t, f]"""
        return (self.w * other.w).sum((3, 4)) + (self.c * other.c).sum(3)

    def largest(self) -> Tensor:
        """[b, t, f]: the largest entry in absolute value."""
        return torch.maximum(self.w.abs().amax((3, 4)), self.c.abs().amax(3))


@dataclass(frozen=True, eq=False)
class Point:
    """A point with its scores, probabilities and gradient."""

    at: Pair
    z: Tensor
    """scores [b, t, f, k, n]"""
    q: Tensor
    """probabilities, of the same shape"""
    gradient: Pair


@dataclass(frozen=True, eq=False)
class Move:
    """One step and the change of the gradient along it; weight 0 for a problem that did not move."""

    way: Pair
    bend: Pair
    weight: Tensor
    """[b, t, f]: 1 / (way . bend)"""

    @classmethod
    def between(cls, here: Point, there: Point) -> "Move":
        back = -torch.ones_like(here.z[..., 0, 0])
        way, bend = there.at.plus(back, here.at), there.gradient.plus(back, here.gradient)
        size = way.dot(bend)
        return cls(way, bend, torch.where(size > torch.finfo(size.dtype).tiny, 1 / size, 0.0))


class QuasiNewton:
    """`run` finds the minimiser. b cells, t tasks, f folds, n rows, k outputs (1 for two classes), d columns."""

    def __init__(self, grams: "Grams | RowSpace", y: Tensor, where: Tensor, tolerance: float) -> None:
        """y [t, n, k]; where [t, f]: the set of `grams` that each fold trains on."""
        self.x, self.y, self.tolerance = grams.x, y.mT[None, :, None], tolerance
        self.binary = y.shape[-1] == 1
        self.train = grams.sets[where].to(y.dtype)[None, :, :, None]  # [1, t, f, 1, n]
        self.counts = self.train.sum((3, 4))  # [1, t, f]
        self.scale, self.mean = grams.scales[:, where], grams.means[:, where]  # [b, t, f, d]
        self.set_of = where[:, 0].tolist()  # the folds of a task share a preconditioner: their rows are mostly the same
        self.patience = patience(self.x.shape[1], self.x.shape[2], where.numel() * y.shape[-1])
        self.rows, self.grams = grams, dict[int, Tensor]()

    def run(self, penalty: float, start: Pair | None = None) -> Pair:
        """The minimiser on standardised columns; `start`: that of another penalty, from which few steps are left.

        Mutates: the penalty and the preconditioner.
        """
        self.penalty = penalty
        (b, t, f, d), k = self.scale.shape, self.y.shape[3]
        self.curvature = self.x.new_full((b, t), torch.inf)  # mean row weight of each factor
        self.factors: dict[_Key, tuple[Tensor, Tensor]] = {}
        start = start or Pair(self.x.new_zeros(b, t, f, k, d), self.x.new_zeros(b, t, f, k))
        here = self._look(start, self._forward(start))
        past: deque[Move] = deque(maxlen=_MEMORY)
        for _ in range(_STEPS):
            active = here.gradient.largest() > self.tolerance * self.counts  # scikit-learn's stopping rule
            if not bool(active.any()):
                break
            step = self._step(here, past)
            slope = here.gradient.dot(step)
            active = active & (-slope > torch.finfo(slope.dtype).eps * self.counts)  # below this, only rounding is left
            if not bool(active.any()):
                break
            change = self._forward(step)
            length = self._length(here, step, change, slope, active)
            there = self._look(here.at.plus(length, step), here.z + length[..., None, None] * change)
            past.append(Move.between(here, there))
            here = there
        return here.at

    def along(self, path: Sequence[float]) -> Iterator[Pair]:
        """The minimisers for values of C, each from the one before."""
        at = None
        for C in path:
            at = self.run(1 / C, at)
            yield at

    def in_rows(self, at: Pair) -> tuple[Tensor, Tensor]:
        """(weight [b, t, f, k, d], bias [b, t, f, k]) in the Grams' coordinates."""
        weight = at.w / self.scale[:, :, :, None]
        return weight, at.c - torch.einsum("btfkd,btfd->btfk", weight, self.mean)

    def _step(self, here: Point, past: "deque[Move]") -> Pair:
        """Minus the approximate inverse Hessian times the gradient: the two loops of L-BFGS, for all problems together."""
        rest, taken = here.gradient, []
        for move in reversed(past):
            share = move.weight * move.way.dot(rest)
            rest = rest.plus(-share, move.bend)
            taken.append(share)
        if not self.patience and not self.grams:
            self.grams = {number: _correlation(self.rows, number) for number in set(self.set_of)}  # each [b, d, d]
        self.patience -= self.patience > 0
        rest = self._preconditioner(here.q)(rest) if self.grams else self._diagonal(here.q, past)(rest)
        for move, share in zip(past, reversed(taken), strict=True):
            rest = rest.plus(share - move.weight * move.bend.dot(rest), move.way)
        return Pair(-rest.w, -rest.c)

    def _forward(self, pair: Pair) -> Tensor:
        """Scores of all rows [b, t, f, k, n]: one product for all tasks and folds."""
        u = pair.w / self.scale[:, :, :, None]
        b, t, f, k, d = u.shape
        z = (u.view(b, t * f * k, d) @ self.x.mT).view(b, t, f, k, -1)
        return z + (pair.c - torch.einsum("btfkd,btfd->btfk", u, self.mean))[..., None]

    def _backward(self, r: Tensor) -> Pair:
        """The adjoint of `_forward`, for r [b, t, f, k, n]."""
        b, t, f, k, n = r.shape
        sums = r.sum(-1)
        raw = (r.reshape(b, t * f * k, n) @ self.x).view(b, t, f, k, -1)
        return Pair((raw - sums[..., None] * self.mean[:, :, :, None]) / self.scale[:, :, :, None], sums)

    def _look(self, at: Pair, z: Tensor) -> Point:
        q = self._probabilities(z)
        fit = self._backward(self.train * (q - self.y))
        return Point(at, z, q, Pair(fit.w + self.penalty * at.w, fit.c))

    def _probabilities(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) if self.binary else z.softmax(3)

    def _length(self, here: Point, step: Pair, change: Tensor, slope: Tensor, active: Tensor) -> Tensor:
        """Step lengths [b, t, f] at which the slope is at most half the initial one; 0 for problems that are done.

        Newton's method in one variable: it needs no product with the rows, and the first guess is mostly enough.
        """
        cross, square = (here.at.w * step.w).sum((3, 4)), step.w.square().sum((3, 4))
        length = torch.ones_like(slope)
        for _ in range(_SEARCHES):
            q = self._probabilities(here.z + length[..., None, None] * change)
            pull = self.train * change
            now = ((q - self.y) * pull).sum((3, 4)) + self.penalty * (cross + length * square)
            far = active & (now.abs() > 0.5 * slope.abs())
            if not bool(far.any()):
                break
            bent = q * (1 - q) * change if self.binary else q * (change - (q * change).sum(3, True))
            curve = (bent * pull).sum((3, 4)) + self.penalty * square
            aim = length - now / curve.clamp_min(torch.finfo(curve.dtype).tiny)
            length = torch.where(far, torch.minimum(torch.maximum(aim, length / 8), 8 * length), length)
        return torch.where(active, length, 0.0)

    def _diagonal(self, q: Tensor, past: "deque[Move]") -> Callable[[Pair], Pair]:
        """Inverse of the Hessian's diagonal, scaled to the curvature along the last step."""
        spread = (self.train * q * (1 - q)).sum((3, 4)) / q.shape[3]
        across, down = (spread + self.penalty)[..., None, None], spread.clamp_min(1e-6)[..., None]
        scale = torch.ones_like(spread)
        if past:
            bend = past[-1].bend
            size = (bend.w * bend.w / across).sum((3, 4)) + (bend.c * bend.c / down).sum(3)
            fine = (past[-1].weight > 0) & (size > 0)
            scale = torch.where(fine, 1 / (past[-1].weight * size).clamp_min(torch.finfo(size.dtype).tiny), scale)
        return lambda pair: Pair(scale[..., None, None] * pair.w / across, scale[..., None] * pair.c / down)

    def _preconditioner(self, q: Tensor) -> Callable[[Pair], Pair]:
        """Approximate inverse of the Hessian, factored again only when the mean row weight has fallen to a quarter.

        Each cell and task decides separately, so that no problem's path depends on its neighbours. Tasks that have the same
        factor, such as permuted labels before the first such fall, share it.
        """
        spread = (self.train * q * (1 - q)).sum((3, 4)) / q.shape[3]  # [b, t, f]: sum over the rows
        mean = (spread / self.counts).mean(2)  # [b, t]
        fallen = mean < 0.25 * self.curvature
        if bool(fallen.any()):
            self.curvature = torch.where(fallen, mean, self.curvature)
            self.factors = self._factored(self.curvature * self.counts.mean(2))
        bias_weight = spread.clamp_min(1e-6)[..., None]

        def apply(pair: Pair) -> Pair:
            solved = torch.empty_like(pair.w)
            for tasks, factor in self.factors.values():
                own = pair.w[:, tasks]
                aim = own.flatten(1, 3).mT.to(factor.dtype)
                solved[:, tasks] = torch.cholesky_solve(aim, factor).mT.reshape(own.shape).to(own.dtype)
            return Pair(solved, pair.c / bias_weight)

        return apply

    def _factored(self, weight: Tensor) -> "dict[_Key, tuple[Tensor, Tensor]]":
        """(tasks, factor [b, d, d]) by training set and row weight [b, t]; factors that are there already are kept."""
        keys = [(number, *column) for number, column in zip(self.set_of, weight.mT.tolist(), strict=True)]
        found = {}
        for key in dict.fromkeys(keys):
            tasks = torch.tensor([t for t, own in enumerate(keys) if own == key], device=weight.device)
            if key in self.factors:
                factor = self.factors[key][1]
            else:
                gram = self.grams[key[0]]
                eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
                row = weight[:, tasks[0], None, None].to(gram.dtype)
                factor = torch.linalg.cholesky(row * gram + max(self.penalty, 1e-6 * float(row.max())) * eye)
            found[key] = (tasks, factor)
        return found


def patience(rows: int, columns: int, problems: int) -> int:
    """How many steps cost as much as a Gram matrix with its factor. Sizes decide, never a clock.

    Counted in operations of a product of matrices. A gradient of few problems waits for memory, 25 of them for each entry, and
    a step has an overhead of its own. A matrix that costs less than a dozen steps is worth it at once.
    """
    gram = 2 * min(rows, _ROWS_PER_COLUMN * columns) * columns**2 + columns**3
    steps = int(gram // (rows * columns * (10 + 15 * problems) + 2**24))
    return steps if steps >= 12 else 0


def worth_the_row_space(rows: int, columns: int, problems: int, sets: int) -> bool:
    """Whether the coordinates of `RowSpace`, fewer than the columns, cost less than some 40 gradients of each problem."""
    return 40 * rows * columns * (10 + 15 * problems) >= sets * (2 * rows**2 * columns + 20 * rows**3)


def _correlation(grams: "Grams | RowSpace", number: int) -> Tensor:
    """[b, d, d]: correlation of one set's columns, estimated from evenly spaced rows."""
    rows = grams.sets[number].nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // (_ROWS_PER_COLUMN * grams.x.shape[2]))]
    standard = ((grams.x[:, rows] - grams.means[:, number, None]) / grams.scales[:, number, None]).float()
    return standard.mT @ standard / len(rows)


class RowSpace:
    """One set of few rows in as many coordinates, which hold all that a penalised probe of many columns can use.

    The minimiser is a combination of the (standardised) rows, so turning these by the eigenvectors of their products leaves
    every loss and every penalty as it is. It has the attributes of `Grams` that `QuasiNewton` reads.
    """

    def __init__(self, grams: Grams, number: int) -> None:
        self.rows = grams.sets[number].nonzero()[:, 0]
        self.standard = (grams.x[:, self.rows] - grams.means[:, number, None]) / grams.scales[:, number, None]
        b, n, _ = self.standard.shape
        values, self.turn = torch.linalg.eigh(self.standard.double() @ self.standard.double().mT)  # [b, n], [b, n, n]
        kept = values > n * torch.finfo(values.dtype).eps * values.amax(1, keepdim=True)
        self.root = torch.where(kept, values.clamp_min(0).sqrt(), 0.0)
        self.x = (self.turn * self.root[:, None]).to(grams.x.dtype)
        self.sets = torch.ones(1, n, dtype=torch.bool, device=self.x.device)
        self.means, self.scales = self.x.new_zeros(b, 1, n), self.x.new_ones(b, 1, n)

    def back(self, w: Tensor) -> Tensor:
        """w [b, t, f, k, n] -> weights on standardised columns [b, t, f, k, d]."""
        shares = w.double() / torch.where(self.root > 0, self.root, torch.inf)[:, None, None, None]
        mixed = torch.einsum("bnm,btfkm->btfkn", self.turn, shares).to(w.dtype)
        return torch.einsum("btfkn,bnd->btfkd", mixed, self.standard)


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

    Raises UnknownEstimator for another kind than logistic, ridge, regression, mass-mean and mass-mean-whitened.

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
            raise UnknownEstimator(no_such("kind of probe", kind, KINDS))
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
            scaled = space.back(at.w)[:, :, 0] / grams.scales[:, number, None, None]  # [b, pairs, k, d]
            weight[:, own] = scaled
            bias[:, own] = at.c[:, :, 0] - torch.einsum("bpkd,bd->bpk", scaled, grams.means[:, number])
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
    """Nearest class mean: the probes of `mass_mean`."""
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
