"""The meaning of every kernel, in plain PyTorch. Slow; every function computes in the dtype of its inputs.

Tests pass float64 inputs and compare a kernel's output with the result. Only the integer hash of `sample` is compared bit
for bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# matmul, activation


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x @ w + bias + residual"""
    y = x @ w
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def activation(x: Tensor, kind: str, gated: bool) -> Tensor:
    """f(x), or f(gate) * up for x = [gate | up]"""
    if gated:
        gate, up = x.chunk(2, dim=-1)
        if kind == "clamped_swiglu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return activation(gate, kind, False) * up
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
    raise ValueError(f"Unknown activation {kind!r}.")


# route, grouped


def choose(scores: Tensor, top: int, groups: int = 1, chosen_groups: int = 1, group_best: int = 1) -> Tensor:
    """The highest scores [rows, experts] of the best groups, by index: [rows, top], ascending. Ties: the lower index.

    A score below -5e29 bars an expert: it adds nothing to its group, and a group without others comes last.
    """
    best = lambda x, n: torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :n]  # noqa: E731
    rows = scores.unflatten(1, (groups, -1))
    highest = rows.sort(dim=-1, descending=True).values[..., :group_best]
    worth = torch.where(highest < -5e29, 0.0, highest).sum(-1).masked_fill((rows < -5e29).all(-1), -torch.inf)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best(worth, chosen_groups), True)
    return best(rows.masked_fill(~kept[..., None], -torch.inf).flatten(1), top).sort(dim=-1).values


def weigh(logits: Tensor, chosen: Tensor, kind: str, normalised: bool, scale: float = 1.0, jitter: float = 0.0) -> Tensor:
    """The weights of the chosen experts [rows, top]"""
    own = logits.gather(1, chosen)
    if kind == "sparsemixer":
        weights, left = torch.empty_like(own), logits.clone()
        for places in chosen.gather(1, own.sort(dim=1, descending=True, stable=True).indices).T:
            place = places[:, None]
            top = logits.gather(1, place)
            far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter
            weight = left.masked_fill(far, -torch.inf).softmax(1).gather(1, place)
            weights = torch.where(chosen == place, weight, weights)
            left = left.scatter(1, place, -torch.inf)
        return weights * scale
    if kind == "sigmoid":
        weights = own.sigmoid()
        return (weights / weights.sum(1, keepdim=True) if normalised else weights) * scale
    return (own.softmax(1) if normalised else logits.softmax(1).gather(1, chosen)) * scale


def grouped_matmul(x: Tensor, w: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """x [rows, K] or [rows, top, K] times the weights w [experts, K, N] of the chosen experts [rows, top]: [rows, top, N]"""
    x = x if x.dim() == 3 else x[:, None].expand(-1, chosen.shape[1], -1)
    y = torch.einsum("rtk,rtkn->rtn", x, w[chosen])
    return y if bias is None else y + bias[chosen]


def combine(y: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """The weighted sum over the chosen experts: y [rows, top, width], weights [rows, top]"""
    total = (y * weights[..., None]).sum(1)
    return total if residual is None else residual + total


# norm


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension"""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def norm_scale(x: Tensor, eps: float, kind: str) -> Tensor:
    """What `norm` divides by: [..., 1]"""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


# rope


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """x [rows, heads, d_head] rotated by table [positions, 2, rotary / 2]; dimensions past `rotary` are unchanged"""
    half = table.shape[-1]
    cos, sin = table[positions.long()].to(x.dtype).unbind(1)
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)


def slots(sequence: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """The cache slot of each row's key: [rows] int64"""
    page = page_table[sequence.long(), positions.long() // page_size].long()
    return page * page_size + positions.long() % page_size


# attention


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sequence: Tensor,
    positions: Tensor,
    page_table: Tensor,
    page_size: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    hidden: Tensor | None = None,
    replaced: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, d_head] over the keys 0..position of each row's sequence -> [rows, heads, width of values]

    hidden    [rows, heads, keys] bool: edges hidden from the softmax
    replaced  [rows, heads, keys]: weights that edges have after it; NaN: those of the softmax
    sinks     [heads]: scores that take part in the softmax and belong to no key
    slopes    [heads]: what is added to a score for each position of its key
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    group = q.shape[1] // k_cache.shape[1]
    for i, (s, position) in enumerate(zip(sequence.tolist(), positions.tolist(), strict=True)):
        first = max(0, position + 1 - window) if window else 0
        keys = torch.arange(first, position + 1, device=q.device)
        slot = slots(torch.full_like(keys, s), keys, page_table, page_size)
        k = k_cache[slot].repeat_interleave(group, dim=1)  # [keys, heads, d_head]
        v = v_cache[slot].repeat_interleave(group, dim=1)
        score = torch.einsum("hd,khd->hk", q[i], k) * scale
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        if slopes is not None:
            score = score + slopes[:, None] * keys
        if hidden is not None:
            score = score.masked_fill(hidden[i][:, keys], -torch.inf)
        weight = score.softmax(-1) if sinks is None else torch.cat([score, sinks[:, None]], 1).softmax(-1)[:, :-1]
        if replaced is not None:
            weight = torch.where(replaced[i][:, keys].isnan(), weight, replaced[i][:, keys])
        out[i] = torch.einsum("hk,khd->hd", weight, v)
    return out


# edit


def keep_lengths(before: Tensor, after: Tensor, kept: Tensor, heads: int) -> Tensor:
    """Rows of `after` [rows, heads * width] with `kept` scaled to the lengths of the vectors in `before`"""
    x, y = before.unflatten(1, (heads, -1)), after.unflatten(1, (heads, -1))
    scaled = (y * (x.norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True))).flatten(1)
    return torch.where(kept.bool()[:, None], scaled, after)


# sample

_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # 0xbf58476d1ce4e5b9, 0x94d049bb133111eb as int64
_GOLDEN = -7046029254386353131  # 0x9e3779b97f4a7c15


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser, a bijection of 64-bit integers (stored as int64)"""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def hash64(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """64 well-mixed bits of (seed, position, token id), broadcast; int64"""
    row = mix64(mix64(seed.long() + _GOLDEN) + position.long() * _GOLDEN)
    return mix64(row + token.long() * _GOLDEN)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """-log(-log u) in float64, u uniform on the 2^52 midpoints of (0, 1)"""
    u = (_shift(hash64(seed, position, token), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(u))


def sample(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor) -> Tensor:
    """Gumbel-max over [rows, vocab]: [rows] int64. Temperature 0: the largest logit. Ties: the smallest token id."""
    token = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(seed[:, None], position[:, None], token[None, :])
    t = temperature.double()[:, None]
    score = torch.where(t > 0, logits.double() / torch.where(t > 0, t, 1.0) + noise, logits.double())
    best = score.max(-1, keepdim=True).values
    return torch.where(score == best, token, logits.shape[1]).min(-1).values


# judge


def judge(chosen: Tensor, drafts: Tensor, first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts and the next token of every chain. A chain ends at the first draft that its row did not choose."""
    accepted, tokens = [], []
    for row, chain, count in zip(first.tolist(), drafts.tolist(), length.tolist(), strict=True):
        choices = chosen[row : row + count + 1].tolist()
        num_accepted = next((i for i in range(count) if choices[i] != chain[i]), count)
        accepted.append(num_accepted)
        tokens.append(choices[num_accepted])
    return torch.tensor(accepted, device=first.device), torch.tensor(tokens, device=first.device)


# lens


def lens(logits: Tensor, final_logits: Tensor | None, targets: Tensor, k: int) -> dict[str, Tensor]:
    """Statistics of softmax(logits) [rows, vocab].

    log_sum_exp, entropy, kl (from softmax(`final_logits`), if given) [rows]; top_ids, top_log_probs [rows, k], largest
    first, ties by smallest id; target_log_probs like `targets` [rows, n].
    """
    log_sum_exp = logits.logsumexp(-1)
    log_p = logits - log_sum_exp[:, None]
    p = log_p.exp()
    found = {"log_sum_exp": log_sum_exp, "entropy": -(p * log_p).sum(-1)}
    if final_logits is not None:
        final = final_logits.log_softmax(-1)
        found["kl"] = (final.exp() * (final - log_p)).sum(-1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    found["top_ids"], found["top_log_probs"] = order, log_p.gather(1, order)
    found["target_log_probs"] = log_p.gather(1, targets.long())
    return found
