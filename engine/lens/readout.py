"""The logit lens (Z): each layer's prediction of the next token, read through the final norm and the unembedding.

Z is stored compactly: top-k ids and log-probs, entropy, KL from the model's own output, log-probs of the next token and of
chosen target tokens, and the whole distribution only on request. The last entry is the model's own distribution. Its logits
have the bits of those that the token was chosen from, because both are the same canonical function of the same row.
"""

import torch
from torch import Tensor

from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import LensSpec, Rows

_TOGETHER = 4096
"""rows times layers per step if all their logits are stored at once"""


def read(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """Z of captured residual rows, on the CPU.

    rows[site] [n, d] for every site of the spec; `emitted[i]` is the token that follows row i (-1: none yet)
    -> {"Z.entropy": [n, layers], "Z.kl": [n, layers], "Z.emitted": ..., "Z.top_ids": [n, layers, k], ...}
    """
    return {name: z.cpu() for name, z in read_there(spec, runner, rows, emitted, tuned).items()}


@torch.inference_mode()
def read_there(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """As `read`, but left on the device that computes it."""
    stacked = torch.stack([rows[site] for site in spec.sites], dim=1)  # [n, layers, d]
    with runner.canonical(stacked.shape[:2].numel()):
        if tuned is not None:
            stacked = tuned.translate(stacked.cpu())
        return _read(spec, runner, stacked, emitted)


def _read(spec: LensSpec, runner: Runner, stacked: Tensor, emitted: list[int]) -> Rows:
    n, layers, d = stacked.shape
    if runner.device == "cuda":
        from replaylens.engine.lens import cuda as cuda_lens  # its kernel needs triton

        if spec.fits_kernel:
            return cuda_lens.read(spec, runner.model, stacked, emitted)
    parts: dict[str, list[Tensor]] = {}
    step = max(1, _TOGETHER // layers)
    for first in range(0, n, step):
        block = stacked[first : first + step]
        # on the CPU, where sums over a row do not depend on the number of rows; in CUDA libraries they do
        log_p = runner.logits(block.reshape(-1, d)).float().cpu().log_softmax(-1).view(len(block), layers, -1)
        for name, value in statistics(spec, log_p, emitted[first : first + step]).items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def statistics(spec: LensSpec, log_p: Tensor, emitted: list[int]) -> Rows:
    """log_p [n, layers, vocab] -> Z, as in `read`."""
    if log_p.shape[:2].numel() == 1:  # the sum of a single row is split between threads, which gives other bits
        return {name: value[:1] for name, value in statistics(spec, log_p.repeat(2, 1, 1), emitted * 2).items()}
    p = log_p.exp()
    final = log_p[:, -1:, :]
    top = log_p.topk(min(spec.top_k, log_p.shape[-1]), dim=-1)
    next_token = torch.tensor(emitted).clamp_min(0)[:, None, None].expand(-1, log_p.shape[1], 1)
    out = {
        "Z.entropy": -(p * log_p).sum(-1),
        "Z.kl": (final.exp() * (final - log_p)).sum(-1),  # KL(final || layer)
        "Z.emitted": log_p.gather(-1, next_token).squeeze(-1),
        "Z.top_ids": top.indices.to(torch.int32),
        "Z.top_logprobs": top.values,
    }
    missing = torch.tensor(emitted) < 0
    out["Z.emitted"][missing] = float("nan")
    if spec.targets:
        out["Z.targets"] = log_p[..., list(spec.targets)]
    if spec.full:
        out["Z.full"] = log_p
    return out
