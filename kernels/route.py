"""Routing of a mixture of experts: a router's logits -> the chosen experts of every row, and their weights.

    scores = logits, or sigmoid(logits) + correction          chosen = the `top` highest of the best groups, by index
    weights = softmax over the chosen logits, softmax over all of them, sigmoids, or sparsemixer's softmax over close logits

**Why the bits do not move.** A program has one row and sees no other. Equal scores go to the lower index: score and index are
compared as one integer. Sums of exponentials, which lie in [0, 1], are sums of integers in units of 2^-40: exact in any
order, so neither the layout of threads nor which of the steps below runs alone can move a weight.

`route` does all steps in one kernel. `choice_scores`, `choose` and `weigh` are its steps, with the same bits, for passes whose
scores or choices are edited in between.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.exact import exp
from replaylens.kernels.launch import EXACT, next_power_of_2, require, require_float, require_shape

# ---- route -----------------------------------------------------------------------------------------------------------

KINDS = ("softmax", "sigmoid", "sparsemixer")
_WARPS = 1
BARRED = tl.constexpr(-5e29)
"""an expert with a lower score is forbidden: it adds nothing to the score of its group"""


@dataclass(frozen=True)
class RouteSpec:
    """How experts are chosen and weighed."""

    top: int
    kind: str = "softmax"
    normalised: bool = True
    """the chosen weights add up to 1; for a softmax, it runs over the chosen logits"""
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    """a group's score is the sum of this many of its best"""
    jitter: float = 0.0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "Unknown routing {!r}. Use one of {}.", self.kind, ", ".join(KINDS))
        require(self.kind != "sparsemixer" or self.top == 2, "sparsemixer chooses two experts, not {}.", self.top)


@triton.jit
def _sum(x):
    """The sum of numbers in [0, 1], exact to 2^-40 each, whatever the order."""
    return (tl.sum((x.to(tl.float64) * 1099511627776.0).to(tl.int64), 0).to(tl.float64) * 9.094947017729282e-13).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def _softmax(x):
    """Of a row, -inf where there is nothing."""
    e = exp(x - tl.max(x, 0))
    return tl.div_rn(e, tl.zeros_like(e) + _sum(e))


@triton.jit
def _key(score, index):
    """An integer that is larger for a higher score, and of equal scores for the lower index. NaN counts as infinite."""
    score = tl.where(score == 0.0, 0.0, tl.where(score != score, float("inf"), score))  # -0.0 equals 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) * 4294967296 + (0x7FFFFFFF - index)


@triton.jit
def _scores(logits, correction, KIND: tl.constexpr, CORRECTED: tl.constexpr):
    score = logits
    if KIND == "sigmoid":
        score = _sigmoid(logits)
    if CORRECTED:
        score = score + correction
    return score


@triton.jit
def _best_groups(score, valid, lane, WIDTH: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, BEST: tl.constexpr,
                 G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr):  # fmt: skip
    """Whether the group of each lane is among the best. Lanes are [groups, experts of a group], both padded.

    A barred expert adds nothing to its group; a group without others comes last.
    """
    shape: tl.constexpr = (G_BLOCK, E_BLOCK)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.reshape(tl.where(valid, _key(score, lane), lowest), shape)
    values = tl.reshape(score, shape)
    total = tl.zeros((G_BLOCK,), tl.float32)
    empty = total > 0.0
    for number in tl.static_range(BEST):
        hit = key == tl.max(key, 1)[:, None]
        value = tl.sum(tl.where(hit, values, 0.0), 1)  # of one
        absent = value < BARRED
        empty = absent if number == 0 else empty
        value = tl.where(absent, 0.0, value)
        total = value if number == 0 else total + value
        key = tl.where(hit, lowest, key)
    group = tl.arange(0, G_BLOCK)
    total = tl.where(empty, float("-inf"), total)
    key = tl.where(group < GROUPS, _key(total, group), lowest)
    kept = tl.zeros((G_BLOCK,), tl.int32)
    for _ in tl.static_range(CHOSEN):
        hit = key == tl.max(key, 0)
        kept = tl.where(hit, 1, kept)
        key = tl.where(hit, lowest, key)
    return tl.reshape(tl.broadcast_to(kept[:, None], shape), (G_BLOCK * E_BLOCK,)) > 0


@triton.jit
def _sparsemixer(logits, picked, expert, valid, jitter):
    """Weights of two experts: of the better one among the logits close to it, of the other one without the first."""
    nothing = float("-inf")
    left = tl.where(valid, logits, nothing)
    key = tl.where(picked, _key(logits, expert), -0x7FFFFFFFFFFFFFFF)
    best = key == tl.max(key, 0)
    other = picked & (best == 0)
    weight = tl.zeros_like(logits)
    for number in tl.static_range(2):
        own = best if number == 0 else other
        top = tl.max(tl.where(own, logits, nothing), 0)
        far = tl.div_rn(top - logits, tl.maximum(tl.abs(logits), top)) > 2.0 * jitter
        weight = tl.where(own, _softmax(tl.where(far, nothing, left)), weight)
        left = tl.where(own, nothing, left)
    return weight


@triton.jit
def _weights(
    logits, picked, expert, valid, scale, jitter, KIND: tl.constexpr, NORMALISED: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """By lane. `picked` marks the chosen ones."""
    if KIND == "sparsemixer":
        weight = _sparsemixer(logits, picked, expert, valid, jitter)
    elif KIND == "sigmoid":
        weight = tl.where(picked, _sigmoid(logits), 0.0)
        if NORMALISED:
            weight = tl.div_rn(weight, tl.zeros_like(weight) + (_sum(weight) + 1e-20))
    elif NORMALISED:
        weight = _softmax(tl.where(picked, logits, float("-inf")))
    else:
        weight = _softmax(tl.where(valid, logits, float("-inf")))
    if SCALED:
        weight = weight * scale
    return weight


@triton.jit
def _route_kernel(
    LOGITS, CORRECTION, CHOSEN, WEIGHTS, SPREAD, stride, scale, jitter,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, KIND: tl.constexpr, NORMALISED: tl.constexpr,
    SCALED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    CORRECTED: tl.constexpr, CHOOSES: tl.constexpr, WEIGHS: tl.constexpr, G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """CHOOSES: choose by the scores of the logits and store; otherwise load what was chosen. WEIGHS: store weights."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, G_BLOCK * E_BLOCK)
    width: tl.constexpr = EXPERTS // GROUPS
    expert = lane // E_BLOCK * width + lane % E_BLOCK
    valid = (lane % E_BLOCK < width) & (lane // E_BLOCK < GROUPS)
    logits = tl.load(LOGITS + row * stride + expert, mask=valid, other=0.0).to(tl.float32)
    picked = lane < 0
    if CHOOSES:
        correction = tl.load(CORRECTION + expert, mask=valid, other=0.0).to(tl.float32) if CORRECTED else logits
        score = _scores(logits, correction, KIND, CORRECTED)
        if GROUPS > 1:
            kept = _best_groups(score, valid, lane, width, GROUPS, KEPT, BEST, G_BLOCK, E_BLOCK)
            score = tl.where(kept, score, float("-inf"))
        key = tl.where(valid, _key(score, expert), -0x7FFFFFFFFFFFFFFF)
        for _ in tl.static_range(TOP):
            hit = key == tl.max(key, 0)
            picked = picked | hit
            key = tl.where(hit, -0x7FFFFFFFFFFFFFFF, key)
        place = row * TOP + tl.cumsum(picked.to(tl.int32), 0) - 1  # ascending by index
        tl.store(CHOSEN + place, expert.to(tl.int64), mask=picked)
        if WEIGHS:
            weight = _weights(logits, picked, expert, valid, scale, jitter, KIND, NORMALISED, SCALED)
            tl.store(WEIGHTS + place, weight, mask=picked)
            tl.store(SPREAD + row * EXPERTS + expert, tl.where(picked, weight, 0.0), mask=valid)
    else:
        for slot in tl.static_range(TOP):
            picked = picked | (valid & (expert == tl.load(CHOSEN + row * TOP + slot)))
        weight = _weights(logits, picked, expert, valid, scale, jitter, KIND, NORMALISED, SCALED)
        for slot in tl.static_range(TOP):
            own = valid & (expert == tl.load(CHOSEN + row * TOP + slot))
            tl.store(WEIGHTS + row * TOP + slot, tl.sum(tl.where(own, weight, 0.0), 0))


@triton.jit
def _scores_kernel(LOGITS, CORRECTION, OUT, stride, EXPERTS: tl.constexpr, KIND: tl.constexpr, CORRECTED: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logits = tl.load(LOGITS + row * stride + expert, mask=inside, other=0.0).to(tl.float32)
    correction = tl.load(CORRECTION + expert, mask=inside, other=0.0).to(tl.float32) if CORRECTED else logits
    tl.store(OUT + row * EXPERTS + expert, _scores(logits, correction, KIND, CORRECTED), mask=inside)


def route(logits: Tensor, spec: RouteSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """logits [rows, experts] -> (chosen [rows, top] int64, ascending; weights [rows, top]; the weights of all experts).

    Computes in float32. The weights of all experts [rows, experts] are 0 for those that are not chosen.
    """
    chosen, weights = _new(logits, spec, torch.int64), _new(logits, spec, torch.float32)
    spread = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _launch(logits, correction, chosen, weights, spread, spec, chooses=True, weighs=True)
    return chosen, weights, spread


def choice_scores(logits: Tensor, spec: RouteSpec, correction: Tensor | None = None) -> Tensor:
    """What `route` chooses by: [rows, experts] float32."""
    experts = _check(logits, spec, correction)
    if spec.kind != "sigmoid" and correction is None:
        return logits.float()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        _scores_kernel[(len(logits),)](
            logits, logits if correction is None else correction, out, logits.stride(0), experts, spec.kind,
            correction is not None, next_power_of_2(experts), num_warps=_WARPS, **EXACT,
        )  # fmt: skip
    return out


def choose(scores: Tensor, spec: RouteSpec) -> Tensor:
    """The highest scores of the best groups, by index: [rows, top] int64, ascending."""
    chosen = _new(scores, spec, torch.int64)
    plain = RouteSpec(spec.top, groups=spec.groups, chosen_groups=spec.chosen_groups, group_best=spec.group_best)
    _launch(scores, None, chosen, scores, scores, plain, chooses=True, weighs=False)
    return chosen


def weigh(logits: Tensor, chosen: Tensor, spec: RouteSpec) -> Tensor:
    """The weights of any chosen experts [rows, top]: [rows, top] float32. Precondition: a row's experts differ."""
    require_shape("chosen", chosen, (len(logits), spec.top))
    require(chosen.is_contiguous() and chosen.dtype == torch.int64, "chosen must be contiguous int64, not {}.", chosen.dtype)
    weights = _new(logits, spec, torch.float32)
    _launch(logits, None, chosen, weights, weights, spec, chooses=False, weighs=True)
    return weights


def _new(logits: Tensor, spec: RouteSpec, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(logits), spec.top, dtype=dtype, device=logits.device)


def _launch(
    logits: Tensor,
    correction: Tensor | None,
    chosen: Tensor,
    weights: Tensor,
    spread: Tensor,
    spec: RouteSpec,
    chooses: bool,
    weighs: bool,
) -> None:
    experts = _check(logits, spec, correction)
    if not len(logits):
        return
    _route_kernel[(len(logits),)](
        logits, logits if correction is None else correction, chosen, weights, spread,
        logits.stride(0), spec.scale, spec.jitter,
        experts, spec.top, spec.kind, spec.normalised, spec.scale != 1.0, spec.groups, spec.chosen_groups, spec.group_best,
        correction is not None, chooses, weighs, next_power_of_2(spec.groups), next_power_of_2(experts // spec.groups),
        num_warps=_WARPS, **EXACT,
    )  # fmt: skip


def _check(logits: Tensor, spec: RouteSpec, correction: Tensor | None) -> int:
    """The number of experts. Raises ValueError if the tensors do not fit together."""
    require(logits.dim() == 2, "logits have shape {}. Expected [rows, experts].", logits.shape)
    require_float("logits", logits)
    require(logits.stride(1) == 1, "logits have strides {}. The last dimension must be contiguous.", logits.stride())
    experts = logits.shape[1]
    require(experts % spec.groups == 0, "{} experts do not divide into {} groups.", experts, spec.groups)
    most = experts // spec.groups * spec.chosen_groups
    require(spec.top <= most, "{} experts cannot be chosen among {}.", spec.top, most)
    if correction is not None:
        require_shape("correction", correction, (experts,))
        require_float("correction", correction)
    return experts


# ---- plan ------------------------------------------------------------------------------------------------------------
# Which rows go to which expert: the (row, slot) pairs of a mixture, sorted by expert and cut into tiles, on the device.
#
# A pair is numbered row * top + slot. `order` lists the pairs by expert, pairs of one expert by number. A tile is up to
# `tile_rows` neighbours in that list with the same expert. The number of tiles depends on the data, which the host never
# sees: there is room for the worst case, and the tiles past the end are empty. So a plan has static shapes, as CUDA graphs
# need.
#
# No sum of a row depends on a plan: it decides which rows are computed together, and moves no bit.

_CHUNK = 1024
"""pairs that a program looks at together"""


@dataclass(frozen=True)
class Plan:
    """The tiles of a pass, one expert each."""

    tiles: Tensor
    """[tiles, 4] int32: expert, first place in `order`, number of pairs, 0; or [pairs] int64, the expert of every pair, each
    of which is a tile of its own"""
    order: Tensor
    """[pairs] int32: pairs by expert"""
    ends: Tensor
    """[experts] int32: the place in `order` after the last pair of every expert"""
    tile_rows: int
    """the most pairs of a tile"""
    planned: bool
    """False: every pair is a tile of its own; `order` and `ends` mean nothing"""

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)


@triton.jit
def _plan_kernel(
    CHOSEN, ORDER, TILES, ENDS, pairs, capacity, EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """One program per expert. Each counts all pairs, so that none waits for another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(CHOSEN + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)  # the rest: a bin of its own
        count += tl.histogram(chosen, BINS)
    tiles = (count + ROWS - 1) // ROWS
    before = bins < expert
    first = tl.sum(tl.where(before, count, 0), 0)
    tile = tl.sum(tl.where(before, tiles, 0), 0)
    mine = tl.sum(tl.where(bins == expert, count, 0), 0)
    end = tile + (mine + ROWS - 1) // ROWS
    if expert == EXPERTS - 1:
        end = capacity  # the last expert writes the empty tiles, too
    lane = tl.arange(0, 64)
    for start in range(tile, end, 64):
        at = start + lane
        place = first + (at - tile) * ROWS
        left = tl.minimum(tl.maximum(first + mine - place, 0), ROWS)
        tl.store(TILES + at * 4, tl.zeros((64,), tl.int32) + expert, mask=at < end)
        tl.store(TILES + at * 4 + 1, place, mask=at < end)
        tl.store(TILES + at * 4 + 2, left, mask=at < end)
    tl.store(ENDS + expert, first + mine)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = tl.load(CHOSEN + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32) == expert
        hits = hit.to(tl.int32)
        tl.store(ORDER + first + tl.cumsum(hits, 0) - 1, pair, mask=hit)
        first += tl.sum(hits, 0)


def plan(chosen: Tensor, experts: int, tile_rows: int) -> Plan:
    """The tiles of chosen [rows, top] int64. A row's experts differ: with one row, every pair is a tile of its own."""
    require(chosen.dim() == 2, "chosen has shape {}. Expected [rows, top].", chosen.shape)
    require(chosen.dtype == torch.int64, "chosen is {}. Expected int64.", chosen.dtype)
    require(chosen.is_contiguous(), "chosen must be contiguous.")
    pairs = chosen.numel()
    if len(chosen) <= 1:
        return Plan(chosen.flatten(), chosen, chosen, tile_rows, planned=False)
    return sorted_plan(chosen, experts, tile_rows, worst_tiles(pairs, experts, tile_rows))


def sorted_plan(chosen: Tensor, experts: int, tile_rows: int, capacity: int) -> Plan:
    """The plan of any number of rows, with `order` and `ends`, and room for `capacity` tiles."""
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=chosen.device)  # noqa: E731
    pairs = chosen.numel()
    made = Plan(new(capacity, 4), new(pairs), new(experts), tile_rows, planned=True)
    chunk = min(_CHUNK, max(128, next_power_of_2(pairs)))
    _plan_kernel[(experts,)](
        chosen, made.order, made.tiles, made.ends, pairs, capacity, experts, tile_rows, chunk, next_power_of_2(experts + 1),
        num_warps=4,
    )  # fmt: skip
    return made


def worst_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """The most tiles that any choice can need: each expert that is chosen at all may leave one tile with a single pair."""
    return (pairs + min(pairs, experts) * (tile_rows - 1)) // tile_rows
