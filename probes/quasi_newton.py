"""Logistic regression for every cell, task and fold at once, and the second moments that it and closed-form probes need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

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
        mean = (x.new_full((1, x.shape[1]), 1 / x.shape[1]) @ x)[:, 0]  # a product: three times as fast as x.mean(1)
        self.shift = torch.where(_constant(x), x[:, 0], mean)  # [cells, d]; a constant's mean may round, but must be 0
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
        eps = torch.finfo(self.x.dtype).eps * squares
        constant = variance <= 10 * eps
        maybe = variance <= 4 * weights.shape[1] * eps  # as far as sums of equal numbers may round: these are looked at
        for number, rows in enumerate(self.sets):
            if bool((columns := maybe[:, number].any(0)).any()):
                x = self.x[:, :, columns][:, rows]
                constant[:, number, columns] |= (x == x[:, :1]).all(1)
        return torch.where(constant, torch.zeros_like(variance), variance.sqrt())

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
# A Gram matrix costs as much as tens of gradients, although single precision is enough for it. So the first steps take its
# largest eigenvalues in its place, which two products with a random matrix find, until they have cost twice as much as the
# matrix (`patience`): few problems rarely need it, many problems have it from the start, and none pays more than three times.
#
# Products wait for memory, so rows in double precision are first descended in single, which reads half as much. Double
# precision looks at where that stops, and goes on from there if the gradient is not yet within the tolerance.

_STEPS, _MEMORY, _SEARCHES = 500, 10, 10
_ROWS_PER_COLUMN = 8
"""rows per column to build a preconditioner from; more would cost more than they save"""
_LARGE = 2**19
"""entries of a cell from which on products wait for memory"""
_ROUGH = 1e-5
"""the tolerance that gradients in single precision are good for"""
_RANK = 64
"""eigenvalues to take out before a Gram matrix is worth its cost"""
_SEEN = 16
"""rows for each of them"""
_BLOCK = 128
"""columns of a Gram matrix computed together"""
_Key = tuple[float, ...]
"""a training set's number, and the row weight in each cell"""


@dataclass(frozen=True, eq=False)
class Stage:
    """The training rows in one precision. b cells, t tasks, f folds, n rows, k outputs (1 for two classes), d columns.

    Points, steps and gradients are one tensor [b, t, f, k, d + 1]: weights on standardised columns and, in the last column,
    biases.
    """

    x: Tensor
    """[b, n, d]"""
    y: Tensor
    """[1, t, 1, k, n]"""
    train: Tensor
    """[1, t, f, 1, n]"""
    scale: Tensor
    """[b, t, f, 1, d]"""
    mean: Tensor
    """[b, t, f, d, 1]"""
    tolerance: float

    @classmethod
    def of(cls, grams: "Grams | RowSpace", y: Tensor, where: Tensor, tolerance: float) -> "Stage":
        """y [t, n, k]; where [t, f]: the set of `grams` that each fold trains on."""
        train = grams.sets[where].to(y.dtype)[None, :, :, None]
        mean, scale = grams.means[:, where, :, None], grams.scales[:, where, None]
        return cls(grams.x, y.mT[None, :, None].contiguous(), train, scale, mean, tolerance)

    def single(self) -> "Stage":
        """The same in single precision; columns are centred and scaled before, so that none leaves its range, and none is lost
        beside its mean."""
        unit, middle = self.scale[:, 0, 0], self.mean[:, 0, 0]  # [b, 1, d], [b, d, 1]
        scale, mean = self.scale / unit[:, None, None], (self.mean - middle[:, None, None]) / unit.mT[:, None, None]
        x = (self.x - middle.mT).div_(unit).float()
        y, train = self.y.float(), self.train.float()
        return Stage(x, y, train, scale.float(), mean.float(), max(0.9 * self.tolerance, _ROUGH))

    def forward(self, at: Tensor) -> Tensor:
        """Scores of all rows [b, t, f, k, n]: one product for all tasks and folds."""
        u = at[..., :-1] / self.scale
        b, t, f, k, d = u.shape
        z = (u.view(b, t * f * k, d) @ self.x.mT).view(b, t, f, k, -1)
        return z + (at[..., -1:] - u @ self.mean)

    def backward(self, r: Tensor) -> Tensor:
        """The adjoint of `forward`, for r [b, t, f, k, n]."""
        b, t, f, k, n = r.shape
        sums = r.sum(-1, keepdim=True)
        raw = (r.reshape(b, t * f * k, n) @ self.x).view(b, t, f, k, -1)
        return torch.cat([(raw - sums * self.mean.mT) / self.scale, sums], -1)

    def probabilities(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) if self.y.shape[3] == 1 else z.softmax(3)

    def look(self, at: Tensor, z: Tensor, q: Tensor, penalty: float) -> "Point":
        gradient = self.backward(self.train * (q - self.y))
        gradient[..., :-1] += penalty * at[..., :-1]
        return Point(at, z, q, gradient)


@dataclass(frozen=True, eq=False)
class Point:
    """A point with its scores, probabilities and gradient."""

    at: Tensor
    z: Tensor
    """scores [b, t, f, k, n]"""
    q: Tensor
    """probabilities, of the same shape"""
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Past:
    """The last steps of every problem, oldest first, and the changes of the gradient along them; 0 where one did not move."""

    ways: Tensor
    """[b, t, f, m, k * (d + 1)]"""
    bends: Tensor

    def after(self, here: Point, there: Point) -> "Past":
        """The same with one more step."""
        way, bend = ((b - a).flatten(3) for a, b in ((here.at, there.at), (here.gradient, there.gradient)))
        moved = (way * bend).sum(-1, keepdim=True) > torch.finfo(way.dtype).tiny
        kept = [
            torch.cat([old[..., 1 - _MEMORY :, :], torch.where(moved, new, 0.0)[..., None, :]], 3)
            for old, new in ((self.ways, way), (self.bends, bend))
        ]
        return Past(*kept)

    def to(self, dtype: torch.dtype) -> "Past":
        return Past(self.ways.to(dtype), self.bends.to(dtype))

    def step(self, gradient: Tensor, inverse: Callable[[Tensor], Tensor]) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient, for all problems together.

        The two loops of L-BFGS are two triangular systems: with R_ij = s_i . y_j for steps s and changes y, j not older than i,
        a = R^-1 S g,  r = H (g - Y^T a),  R^T c = diag(R) a - Y r,  step = -(r + S^T c). So they take few products.
        """
        if not self.ways.shape[3]:
            return -inverse(gradient)
        along = (self.ways @ self.bends.mT).triu()  # [b, t, f, m, m]
        size = along.diagonal(dim1=-2, dim2=-1)
        size += size == 0  # a step that is 0 has no share
        rest = gradient.flatten(3)
        share = torch.linalg.solve_triangular(along, self.ways @ rest[..., None], upper=True)  # [b, t, f, m, 1]
        rest = inverse((rest - (share.mT @ self.bends)[..., 0, :]).view_as(gradient)).flatten(3)
        aim = size[..., None] * share - self.bends @ rest[..., None]
        back = torch.linalg.solve_triangular(along.mT, aim, upper=False)
        return -(rest + (back.mT @ self.ways)[..., 0, :]).view_as(gradient)


class QuasiNewton:
    """`run` finds the minimiser."""

    def __init__(self, grams: "Grams | RowSpace", y: Tensor, where: Tensor, tolerance: float) -> None:
        """y [t, n, k]; where [t, f]: the set of `grams` that each fold trains on."""
        fine = Stage.of(grams, y, where, tolerance)
        self.stages = [fine.single(), fine] if y.dtype == torch.float64 and fine.x[0].numel() >= _LARGE else [fine]
        self.counts = fine.train.sum((3, 4))  # [1, t, f]
        self.set_of = where[:, 0].tolist()  # the folds of a task share a preconditioner: their rows are mostly the same
        self.patience = patience(fine.x.shape[1], fine.x.shape[2], where.numel() * y.shape[-1])
        self.grams: dict[int, Tensor] = {}
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}
        self.tasks = {number: [t for t, own in enumerate(self.set_of) if own == number] for number in self.set_of}

    def run(self, penalty: float, start: Tensor | None = None) -> Tensor:
        """The minimiser on standardised columns; `start`: that of another penalty, from which few steps are left.

        Mutates: the penalty and the preconditioner.
        """
        self.penalty = penalty
        b, t, f, _, d = self.stages[-1].scale.shape
        k = self.stages[-1].y.shape[3]
        self.curvature = self.counts.new_full((b, t), torch.inf)  # mean row weight of each factor
        self.factors: dict[_Key, tuple[Tensor, Tensor]] = {}
        at = self.counts.new_zeros(b, t, f, k, d + 1) if start is None else start
        past = Past(*[at.new_zeros(b, t, f, 0, k * (d + 1))] * 2)
        for stage in self.stages:
            at, past = self._descend(stage, at.to(stage.x.dtype), past.to(stage.x.dtype))
        return at

    def _descend(self, stage: Stage, at: Tensor, past: Past) -> tuple[Tensor, Past]:
        """(the minimiser to the precision of a stage, the last steps)"""
        z = stage.forward(at)
        here = stage.look(at, z, stage.probabilities(z), self.penalty)
        for _ in range(_STEPS):
            active = here.gradient.abs().amax((3, 4)) > stage.tolerance * self.counts  # scikit-learn's stopping rule
            if not bool(active.any()):
                break
            step = past.step(here.gradient, self._inverse(stage, here.q, past))
            slope = (here.gradient * step).sum((3, 4))
            active = active & (-slope > torch.finfo(slope.dtype).eps * self.counts)  # below this, only rounding is left
            if not bool(active.any()):
                break
            length, z, q = self._search(stage, here, step, stage.forward(step), slope, active)
            there = stage.look(here.at + length[..., None, None] * step, z, q, self.penalty)
            past = past.after(here, there)
            here = there
        return here.at, past

    def along(self, path: Sequence[float]) -> Iterator[Tensor]:
        """The minimisers for values of C, each from the one before."""
        at = None
        for C in path:
            at = self.run(1 / C, at)
            yield at

    def in_rows(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """(weight [b, t, f, k, d], bias [b, t, f, k]) in the Grams' coordinates."""
        weight = at[..., :-1] / self.stages[-1].scale
        return weight, at[..., -1] - (weight @ self.stages[-1].mean)[..., 0]

    def _search(
        self, stage: Stage, here: Point, step: Tensor, change: Tensor, slope: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(lengths [b, t, f] at which the slope is at most half the initial one, scores and probabilities there).

        Newton's method in one variable: it needs no product with the rows, and the first guess is mostly enough. Problems that
        are done stay where they are.
        """
        moving = step[..., :-1]
        cross, square = (here.at[..., :-1] * moving).sum((3, 4)), moving.square().sum((3, 4))
        change = torch.where(active[..., None, None], change, 0.0)
        pull = stage.train * change
        length = active.to(slope.dtype)
        z = here.z + change
        q = stage.probabilities(z)
        for _ in range(_SEARCHES):
            now = ((q - stage.y) * pull).sum((3, 4)) + self.penalty * (cross + length * square)
            far = active & (now.abs() > 0.5 * slope.abs())
            if not bool(far.any()):
                break
            bent = q * (1 - q) * change if len(q[0, 0, 0]) == 1 else q * (change - (q * change).sum(3, True))
            curve = (bent * pull).sum((3, 4)) + self.penalty * square
            aim = length - now / curve.clamp_min(torch.finfo(curve.dtype).tiny)
            length = torch.where(far, torch.minimum(torch.maximum(aim, length / 8), 8 * length), length)
            z = here.z + length[..., None, None] * change
            q = stage.probabilities(z)
        return length, z, q

    def _inverse(self, stage: Stage, q: Tensor, past: Past) -> Callable[[Tensor], Tensor]:
        """Approximate inverse of the Hessian: by its largest eigenvalues, or, once patience is spent, by Gram matrices."""
        spread = (stage.train * (q * (1 - q))).sum((3, 4)) / q.shape[3]  # [b, t, f]: sum over the rows
        if self.patience:
            self.patience -= 1
            return self._thin(stage, spread, past)
        if not self.grams:
            self.grams = {number: _correlation(stage, tasks[0]) for number, tasks in self.tasks.items()}
        return self._preconditioner(spread)

    def _thin(self, stage: Stage, spread: Tensor, past: Past) -> Callable[[Tensor], Tensor]:
        """The inverse by few eigenvalues and the mean of the others, scaled to the curvature along the last step."""
        if not self.largest:
            self.largest = {number: _largest(stage, tasks[0]) for number, tasks in self.tasks.items()}
        weight = spread[..., None, None]
        parts = []
        for number, tasks in self.tasks.items():
            values, ways = (each.to(stage.x.dtype) for each in self.largest[number])
            own = slice(None) if len(self.tasks) == 1 else tasks
            inverse = 1 / (weight[:, own] * values[:, None, None, None] + self.penalty)  # [b, t, f, 1, 1 + r]
            inverse = torch.cat([inverse, 1 / weight[:, own].clamp_min(1e-6)], -1)  # of the bias
            parts.append((own, ways, inverse[..., :1], inverse[..., 1:] - inverse[..., :1]))

        def apply(vector: Tensor) -> Tensor:
            solved = torch.empty_like(vector)
            for own, ways, flat, lead in parts:
                mine = vector[:, own]
                along = lead * (mine.flatten(1, 3) @ ways).view(*mine.shape[:4], -1)
                solved[:, own] = flat * mine + (along.flatten(1, 3) @ ways.mT).view_as(mine)
            return solved

        if not past.ways.shape[3]:
            return apply
        way, bend = past.ways[..., -1, :], past.bends[..., -1, :]
        along, size = (way * bend).sum(-1), (bend * apply(bend.unflatten(-1, (-1, ways.shape[1]))).flatten(3)).sum(-1)
        scale = torch.where((along > 0) & (size > 0), along / size, 1.0)[..., None, None]
        parts = [(own, ways, scale[:, own] * flat, scale[:, own] * lead) for own, ways, flat, lead in parts]
        return apply

    def _preconditioner(self, spread: Tensor) -> Callable[[Tensor], Tensor]:
        """Approximate inverse of the Hessian, factored again only when the mean row weight has fallen to a quarter.

        Each cell and task decides separately, so that no problem's path depends on its neighbours. Tasks that have the same
        factor, such as permuted labels before the first such fall, share it.
        """
        mean = (spread / self.counts).mean(2)  # [b, t]
        fallen = mean < 0.25 * self.curvature
        if bool(fallen.any()):
            self.curvature = torch.where(fallen, mean.to(self.curvature.dtype), self.curvature)
            self.factors = self._factored(self.curvature * self.counts.mean(2))
        bias_weight = spread.clamp_min(1e-6)[..., None]

        def apply(vector: Tensor) -> Tensor:
            solved = torch.empty_like(vector)
            for tasks, factor in self.factors.values():
                own = vector[:, tasks, ..., :-1]
                aim = own.flatten(1, 3).mT.to(factor.dtype)
                solved[:, tasks, ..., :-1] = torch.cholesky_solve(aim, factor).mT.reshape(own.shape).to(own.dtype)
            solved[..., -1] = vector[..., -1] / bias_weight
            return solved

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
                most = float((row[..., 0] * gram.diagonal(dim1=1, dim2=2)).max())
                factor = torch.linalg.cholesky(row * gram + max(self.penalty, 1e-6 * most) * eye)
            found[key] = (tasks, factor)
        return found


def patience(rows: int, columns: int, problems: int) -> int:
    """How many steps to take before a Gram matrix with its factor. Sizes decide, never a clock.

    Counted in operations of a product of matrices. A gradient of few problems waits for memory, 25 of them for each entry, and
    a step has an overhead of its own. A matrix that costs less than a dozen steps is worth it at once, another one after twice
    its cost.
    """
    gram = min(rows, _ROWS_PER_COLUMN * columns) * columns**2 + columns**3
    steps = int(gram // (rows * columns * (10 + 15 * problems) + 2**24))
    return 2 * steps if steps >= 12 else 0


def worth_the_row_space(rows: int, columns: int, problems: int, sets: int) -> bool:
    """Whether the coordinates of `RowSpace`, fewer than the columns, cost less than some 40 gradients of each problem."""
    return 40 * rows * columns * (10 + 15 * problems) >= sets * (2 * rows**2 * columns + 20 * rows**3)


def _sample(stage: Stage, task: int, count: int) -> Tensor:
    """[b, rows, d]: about `count` evenly spaced rows of a task, of all its folds, centred, in single precision."""
    rows = stage.train[0, task].amax((0, 1)).nonzero()[:, 0]
    rows = rows[:: max(1, round(len(rows) / count))]
    x = stage.x if len(rows) == stage.x.shape[1] else stage.x[:, rows]
    return (x - x.new_full((1, len(rows)), 1 / len(rows)) @ x).float()


def _correlation(stage: Stage, task: int) -> Tensor:
    """[b, d, d]: second moments of the columns, in units of a task's first fold: about their correlation. Above its diagonal,
    which no factorisation reads, it is wrong."""
    x = _sample(stage, task, _ROWS_PER_COLUMN * stage.x.shape[2])
    b, n, d = x.shape
    gram = x.new_zeros(b, d, d)
    for first in range(0, d, _BLOCK):
        block = slice(first, first + _BLOCK)
        gram[:, first:, block] = x[:, :, first:].mT @ x[:, :, block]
    scale = stage.scale[:, task, 0].float()  # [b, 1, d]
    return gram / n / (scale.mT @ scale)


def _largest(stage: Stage, task: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the columns' correlation [b, 1 + r]: the mean of the others, then the r largest; with the eigenvectors of
    these and, last, the bias [b, d + 1, r + 1].

    By two products with a random matrix: Nystroem's approximation (Frangella, Tropp and Udell 2023).
    """
    d = stage.x.shape[2]
    rank = max(1, min(_RANK, d // 12))
    x = _sample(stage, task, _SEEN * rank)
    n = x.shape[1]
    standard = x / stage.scale[:, task, 0].float()
    total = standard.square().sum((1, 2))[:, None] / n
    drawn = torch.randn(d, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(standard)
    seen = standard @ drawn  # [b, n, r]
    inner = seen.mT @ seen
    inner += (
        1e-6 * inner.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] * torch.eye(rank, dtype=inner.dtype, device=inner.device)
    )
    factor = torch.linalg.cholesky(inner)
    half = torch.linalg.solve_triangular(factor, seen.mT @ standard, upper=False).mT / n**0.5  # half @ half.mT: about the
    values, turn = torch.linalg.eigh((half.mT @ half).double())  # correlation
    values = values.clamp_min(1e-4 * float(values.max()))
    ways = torch.nn.functional.pad(half @ (turn / values.sqrt()[:, None]).to(half), (0, 1, 0, 1))
    ways[:, -1, -1] = 1
    rest = ((total - values.sum(1, keepdim=True)) / (d - rank)).clamp_min(1e-3)
    return torch.cat([rest, values], 1).to(half), ways


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
