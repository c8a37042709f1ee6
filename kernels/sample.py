"""Seeded sampling by Gumbel-max over vocabulary tiles. The noise is never stored.

    token = argmax_v  logit[v] / temperature + g(seed, position, v),      g = -log(-log u),   u = hash64(...) mapped to (0, 1)

**The noise is keyed by token id**, never by rank, tile or row. A token's noise does not depend on neighbouring tokens, on
the tiling of the vocabulary or on the drafter. `hash64` is integer arithmetic, so its bits are the same on every device
(`reference.hash64`). u takes the 2^52 midpoints of (0, 1), exact in float64. Logarithms and scores are float64: the far tail
of the noise is kept, which 24-bit uniforms cut off, and ties are all but impossible. If they occur (greedy rows), the
smallest id wins. A maximum is the same in any order, so the choice is canonical.

Logits are the float32 accumulators of the canonical product, not rounded to the storage dtype: rounding to bf16 makes ties
common.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.exact import log64
from replaylens.kernels.launch import EXACT, ceil_div, next_power_of_2, require, require_float, require_rows, require_shape

# ---- sample ----------------------------------------------------------------------------------------------------------

_LOGIT_TILE = 4096


@triton.jit
def mix64(x):
    """splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def hash64(seed, position, token):
    """64 well-mixed bits of three integers."""
    row = mix64(mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return mix64(row + token.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _noise(bits):
    """Gumbel noise from 64 hashed bits, in float64."""
    u = (bits >> 12).to(tl.float64)
    return -log64(-log64((u + 0.5) * 2.220446049250313e-16))


@triton.jit
def _rough_noise(bits):
    """The same in float32, to about 1e-5. For u near 1, where the noise is large, it uses 1 - u, which does not cancel."""
    n = bits >> 12
    u = n.to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    v = (n ^ 0xFFFFFFFFFFFFF).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16  # 1 - u
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * 0.25)))  # -log(1 - v)
    return -tl.log(tl.where(v < 0.05, series, -tl.log(tl.minimum(u, 0.96))))


@triton.jit
def _exact_scores(z, bits, t):
    return tl.where(t > 0, z.to(tl.float64) / tl.where(t > 0, t, 1.0) + _noise(bits), z.to(tl.float64))


@triton.jit
def _best(z, row, column, mask, SEED, POSITION, TEMPERATURE, M, NOISY: tl.constexpr):
    """The winner of each row of a tile of logits z: (float64 score, token, logit).

    float64 logarithms of a whole tile cost more than its product. Scores are therefore screened in float32 first. Only if
    two lie within the error of the screen is the whole tile scored in float64. The winner is the float64 one either way.
    """
    none = 2147483647
    if NOISY:
        seed = tl.load(SEED + row, mask=row < M, other=0)
        position = tl.load(POSITION + row, mask=row < M, other=0)
        t = tl.load(TEMPERATURE + row, mask=row < M, other=1.0)
        bits = hash64(seed[:, None], position[:, None], column[None, :])
        warm = z * (1.0 / tl.where(t > 0, t, 1.0)).to(tl.float32)[:, None] + _rough_noise(bits)
        rough = tl.where(mask, tl.where(t[:, None] > 0, warm, z), float("-inf"))
        top = tl.max(rough, 1)
        near = rough >= (top - (2e-4 + 4e-6 * tl.abs(top)))[:, None]
        token = tl.min(tl.where(near & mask, column[None, :], none), 1)
        rival = tl.max(tl.where(near & mask, column[None, :], -1), 1)
        if tl.max((rival > token).to(tl.int32), 0) > 0:
            score = tl.where(mask, _exact_scores(z, bits, t[:, None]), float("-inf"))
            token = tl.min(tl.where((score == tl.max(score, 1)[:, None]) & mask, column[None, :], none), 1)
        logit = tl.max(tl.where(column[None, :] == token[:, None], z, float("-inf")), 1)
        best = _exact_scores(logit, hash64(seed, position, token), t)
    else:
        logit = tl.max(tl.where(mask, z, float("-inf")), 1)
        token = tl.min(tl.where((z == logit[:, None]) & mask, column[None, :], none), 1)
        best = logit.to(tl.float64)
    return best, token, logit


@triton.jit(do_not_specialize=["M"])
def _sample_logits_kernel(
    Z, SEED, POSITION, TEMPERATURE, SCORE, TOKEN, LOGIT, M, N, stride_z, tiles,
    COLUMNS: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row[:, None] < M) & (column[None, :] < N)
    z = tl.load(Z + row.to(tl.int64)[:, None] * stride_z + column[None, :], mask=mask, other=0.0).to(tl.float32)
    best, token, logit = _best(z, row, column, mask, SEED, POSITION, TEMPERATURE, M, NOISY)
    at = row.to(tl.int64) * tiles + tl.program_id(1)
    tl.store(SCORE + at, best)
    tl.store(TOKEN + at, token)
    tl.store(LOGIT + at, logit)


@triton.jit
def _pick_kernel(SCORE, TOKEN, LOGIT, OUT_TOKEN, OUT_LOGIT, tiles, BLOCK: tl.constexpr):
    """The winner among the tiles of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(SCORE + row * tiles + i, mask=i < tiles, other=float("-inf"))
    token = tl.load(TOKEN + row * tiles + i, mask=i < tiles, other=2147483647)
    token = tl.where(score == tl.max(score, 0), token, 2147483647)
    best = tl.min(token, 0)
    logit = tl.load(LOGIT + row * tiles + i, mask=i < tiles, other=float("-inf"))
    tl.store(OUT_TOKEN + row, best.to(tl.int64))
    tl.store(OUT_LOGIT + row, tl.max(tl.where(token == best, logit, float("-inf")), 0))


def sample_logits(
    logits: Tensor, seed: Tensor | None = None, position: Tensor | None = None, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens [rows] int64, their logits [rows] float32).

    logits [rows, vocab]; seed [rows] int64; position [rows] int32 or int64, of the drawn token; temperature [rows] float64,
    0 for greedy. If all three are None, every row is greedy.
    """
    require(logits.dim() == 2, "logits have shape {}. Expected [rows, vocab].", logits.shape)
    require_float("logits", logits)
    require_rows("logits", logits)
    noisy = _check_noise(logits.shape[0], seed, position, temperature)
    rows, columns = logits.shape
    width = min(_LOGIT_TILE, next_power_of_2(columns))
    tiles = ceil_div(columns, width)
    found = _partials(rows, tiles, logits.device)
    noise = (seed, position, temperature) if noisy else (logits, logits, logits)
    if rows:
        _sample_logits_kernel[(rows, tiles)](
            logits, *noise, *found, rows, columns, logits.stride(0), tiles, width, noisy, num_warps=8, **EXACT
        )
    return _pick(rows, tiles, found)


def _check_noise(rows: int, seed: Tensor | None, position: Tensor | None, temperature: Tensor | None) -> bool:
    """Whether rows are sampled with noise. ValueError if the three arguments do not fit together."""
    given = [x is not None for x in (seed, position, temperature)]
    require(all(given) or not any(given), "seed, position and temperature go together. Omit all three for greedy decoding.")
    if seed is None or position is None or temperature is None:
        return False
    require(seed.dtype == torch.int64, "seed is {}. Expected int64.", seed.dtype)
    require(position.dtype in (torch.int32, torch.int64), "position is {}. Expected int32 or int64.", position.dtype)
    require(temperature.dtype == torch.float64, "temperature is {}. Expected float64.", temperature.dtype)
    for name, x in (("seed", seed), ("position", position), ("temperature", temperature)):
        require_shape(name, x, (rows,))
        require(x.is_contiguous(), "{} must be contiguous.", name)
    return True


def _partials(rows: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the score, token and logit of every tile's winner."""
    make = lambda dtype: torch.empty(rows, tiles, dtype=dtype, device=device)  # noqa: E731
    return make(torch.float64), make(torch.int32), make(torch.float32)


def _pick(rows: int, tiles: int, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(rows, dtype=torch.int64, device=found[0].device)
    logits = torch.empty(rows, dtype=torch.float32, device=found[0].device)
    if rows:
        _pick_kernel[(rows,)](*found, tokens, logits, tiles, next_power_of_2(tiles), num_warps=4, **EXACT)
    return tokens, logits


# ---- judge -----------------------------------------------------------------------------------------------------------
# Accept or reject drafts on the device, so that two numbers per chain go to the host instead of all rows.
#
# Row i of a chain chooses the token after its first i drafts. A draft is accepted if all drafts before it are and the row
# before it chose it. After n accepted drafts, row n gives the next token. Integers only: canonical by nature.


@triton.jit
def _judge_kernel(CHOSEN, DRAFTS, FIRST, LENGTH, ACCEPTED, TOKEN, stride_d, BLOCK: tl.constexpr):
    """One chain."""
    chain = tl.program_id(0)
    first, length = tl.load(FIRST + chain), tl.load(LENGTH + chain)
    i = tl.arange(0, BLOCK)
    drafted = i < length
    chosen = tl.load(CHOSEN + first + i, mask=drafted, other=-1)
    draft = tl.load(DRAFTS + chain * stride_d + i, mask=drafted, other=-1)
    accepted = tl.min(tl.where(drafted & (chosen != draft), i, length), 0)
    tl.store(ACCEPTED + chain, accepted)
    tl.store(TOKEN + chain, tl.load(CHOSEN + first + accepted))


def judge(chosen: Tensor, drafts: Tensor, first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(number of accepted drafts, next token) of every chain, both [chains] int64.

    chosen [rows]: the token that each row chose to come next. drafts [chains, longest]. Chain c has the drafts
    drafts[c, :length[c]] and the rows first[c] to first[c] + length[c] of `chosen`. All tensors are int64.
    """
    chains = len(drafts)
    require(drafts.dim() == 2, "drafts have shape {}. Expected [chains, longest].", drafts.shape)
    for name, x, shape in (("chosen", chosen, (None,)), ("first", first, (chains,)), ("length", length, (chains,))):
        require_shape(name, x, shape)
        require(x.dtype == torch.int64, "{} is {}. Expected int64.", name, x.dtype)
        require(x.is_contiguous(), "{} must be contiguous.", name)
    require(drafts.dtype == torch.int64 and drafts.is_contiguous(), "drafts are {}. Expected contiguous int64.", drafts.dtype)
    accepted, token = torch.empty_like(first), torch.empty_like(first)
    if chains:
        block = next_power_of_2(max(1, drafts.shape[1]))
        _judge_kernel[(chains,)](chosen, drafts, first, length, accepted, token, drafts.stride(0), block, num_warps=1)
    return accepted, token
