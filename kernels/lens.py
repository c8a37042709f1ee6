"""The logit lens (Z): the predictions of every layer's residual stream (S), without a [rows, vocab] tensor.

    z = unembed(norm(S))  (softcapped)      log_sum_exp, entropy, KL(p_final || p), top-k, log-probs of given tokens

**Vocabulary tiles.** A tile of z lives in registers only. Each (row, tile) is reduced to four float32 numbers:
m = max z, s = sum e^(z - m), t = sum e^(z - m) (z - m), c = sum q (z - m), where q = e^(f - n), f is the final layer's logit
and n its maximum in the tile. Rows are then merged over tiles. With w_i = e^(m_i - M), W = sum w_i s_i, and for the final
layer v_i = e^(n_i - N), V = sum v_i s'_i,

    log_sum_exp = M + log W        entropy = log W - (sum w_i (t_i + (m_i - M) s_i)) / W
    kl = log W - (sum v_i (c_i + (m_i - M) s'_i)) / V - entropy of the final layer

The sums of kl are float64: they nearly cancel if a layer agrees with the final one.

**KL needs the final layer beside each tile.** The vocabulary is processed in strips. q of one strip at a time is written to a
scratch tensor small enough for the second-level cache (`launch.strip_width`). The exponentials of the final layer are thus
computed once instead of once per layer, and its own numbers come from there, too.

**Top-k.** The k largest logits of a row lie in the k tiles with the largest maxima. Only those (row, tile) pairs are multiplied
again, grouped by tile. This is about k / tiles of the work, and the logits have the same bits because the product is canonical.

**Canonical.** The sums over a tile use `tl.sum`, so the launch shape is the same at any number of rows (`launch.lens_shape`),
and so is the shape of the merge. Logits are unrounded float32 accumulators, like those that tokens are sampled from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.kernels.launch import (
    LensShape,
    ceil_div,
    lens_shape,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)
from replaylens.kernels.lens_stats import merge, stats
from replaylens.kernels.lens_top import target_log_probs, top
from replaylens.kernels.norm import norm


@dataclass(frozen=True)
class LensStats:
    """Statistics of the lens distributions. The leading dimensions are [layers, rows]."""

    log_sum_exp: Tensor
    """[layers, rows] float32"""
    entropy: Tensor
    """[layers, rows] float32, in nats"""
    kl: Tensor | None
    """[layers, rows] float32, in nats: KL(final || layer)"""
    top_ids: Tensor
    """[layers, rows, k] int64, largest first; ties: smallest id first"""
    top_log_probs: Tensor
    """[layers, rows, k] float32"""
    target_log_probs: Tensor | None
    """[layers, rows, targets] float32"""


def lens(
    x: Tensor,
    w: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    kind: str = "rms",
    final: int | None = None,
    targets: Tensor | None = None,
    k: int = 8,
    softcap: float = 0.0,
    logits: Tensor | None = None,
    shape: LensShape | None = None,
) -> LensStats:
    """Lens statistics of residual streams x [layers, rows, d] through the final norm and w [d, vocab].

    final    index of the layer with the final distribution, usually the last; None: no KL
    targets  [rows, n] int32 or int64, tokens whose log-probs are computed at every layer of a row
    logits   [rows, vocab] float32: those of the final layer before softcap, if they are known already
    shape    canonical; only tests pass other values
    """
    layers, rows = _check_lens(x, w, final, targets, k)
    if logits is not None:
        require(final is not None, "logits are those of the final layer, but final is {}.", final)
        require_shape("logits", logits, (rows, w.shape[1]))
    vocab = w.shape[1]
    h = norm(x.reshape(layers * rows, -1), norm_weight, norm_bias, eps, kind)
    shape = shape or lens_shape(x.dtype)
    tiles = ceil_div(vocab, shape.vocab_tile)
    k_tiles = min(k, tiles)
    log_sum_exp, entropy, kl, top_tiles = merge(stats(h, w, rows, final, softcap, logits, shape), k_tiles, rows, final)
    top_ids, top_log_probs = top(h, w, top_tiles, log_sum_exp, k, softcap, shape)
    picked = None if targets is None else target_log_probs(h, w, targets, log_sum_exp, layers, softcap)
    return LensStats(
        log_sum_exp.view(layers, rows),
        entropy.view(layers, rows),
        kl.view(layers, rows) if final is not None else None,
        top_ids.view(layers, rows, k),
        top_log_probs.view(layers, rows, k),
        picked.view(layers, rows, -1) if picked is not None else None,
    )


def _check_lens(x: Tensor, w: Tensor, final: int | None, targets: Tensor | None, k: int) -> tuple[int, int]:
    """(layers, rows). Raises ValueError if the arguments do not fit together."""
    require(x.dim() == 3, "x has shape {}. Expected [layers, rows, d].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (x.shape[2], None))
    require_same("w", w, x)
    layers, rows = x.shape[:2]
    require(layers * rows > 0, "x has shape {}. It must not be empty.", x.shape)
    require(final is None or 0 <= final < layers, "The final layer {} is not one of the {} layers of x.", final, layers)
    require(0 < k <= min(32, w.shape[1]), "k is {}. Use 1 to {}.", k, min(32, w.shape[1]))
    if targets is not None:
        require_shape("targets", targets, (rows, None))
        require(targets.dtype in (torch.int32, torch.int64), "targets are {}. Expected int32 or int64.", targets.dtype)
        require(0 < targets.shape[1] <= 64, "There are {} targets per row. Give 1 to 64.", targets.shape[1])
    return layers, rows
