"""`QuasiNewton`: logistic regression for every cell, task and fold at once.

Minimises  sum of log-losses over the training rows + penalty / 2 |w|^2  with w on standardised columns and the bias
unpenalised: scikit-learn's LogisticRegression(C = 1 / penalty) after a StandardScaler. The method is L-BFGS, preconditioned
by the Hessian with its row weights replaced by their mean. That is a Gram matrix, known in advance, and close enough that ten
to twenty gradients suffice. A gradient costs two products with the rows, shared by all tasks and folds of a cell. Newton's
method with conjugate gradients needs three to five times as many products.
"""

from collections import deque
from collections.abc import Callable
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

    def __init__(self, grams: Grams, y: Tensor, where: Tensor, tolerance: float) -> None:
        """y [t, n, k]; where [t, f]: the set of `grams` that each fold trains on."""
        self.x, self.y, self.tolerance = grams.x, y.mT[None, :, None], tolerance
        self.binary = y.shape[-1] == 1
        self.train = grams.sets[where].to(y.dtype)[None, :, :, None]  # [1, t, f, 1, n]
        self.counts = self.train.sum((3, 4))  # [1, t, f]
        self.scale, self.mean = grams.scales[:, where], grams.means[:, where]  # [b, t, f, d]
        self.set_of = where[:, 0].tolist()  # the folds of a task share a preconditioner: their rows are mostly the same
        self.grams = {number: _correlation(grams, number) for number in set(self.set_of)}  # each [b, d, d]

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
        rest = self._preconditioner(here.q)(rest)
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
                solved[:, tasks] = torch.cholesky_solve(own.flatten(1, 3).mT, factor).mT.reshape(own.shape)
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
                factor = torch.linalg.cholesky(weight[:, tasks[0], None, None] * gram + self.penalty * eye)
            found[key] = (tasks, factor)
        return found


def _correlation(grams: Grams, number: int) -> Tensor:
    """[b, d, d]: correlation of one set's columns, estimated from evenly spaced rows."""
    rows = grams.sets[number].nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // (_ROWS_PER_COLUMN * grams.x.shape[2]))]
    standard = (grams.x[:, rows] - grams.means[:, number, None]) / grams.scales[:, number, None]
    return standard.mT @ standard / len(rows)
