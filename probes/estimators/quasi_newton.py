"""`QuasiNewton`: logistic regression for every cell, task and fold at once.

Minimises  sum of log-losses over the training rows + penalty / 2 |w|^2  with w on standardised columns and the bias
unpenalised: scikit-learn's LogisticRegression(C = 1 / penalty) after a StandardScaler. The method is L-BFGS, preconditioned
by the Hessian with its row weights replaced by their mean. That is a Gram matrix, known in advance, and close enough that ten
to twenty gradients suffice. A gradient costs two products with the rows, shared by all tasks and folds of a cell. Newton's
method with conjugate gradients needs three to five times as many products.

A Gram matrix costs as much as tens of gradients, although single precision is enough for it. So the first steps take the
diagonal in its place, as scikit-learn does, until they have cost as much as the matrix (`patience`): few easy problems never
need it, many problems have it from the start, and none pays more than twice.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.probes.estimators.grams import Grams

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
