"""The logit lens (Z): each layer's prediction of the next token, read through the final norm and the unembedding.

Z is stored compactly: top-k ids and log-probs, entropy, KL from the model's own output, log-probs of the next token and of
chosen target tokens, and the whole distribution only on request. The last entry is the model's own distribution. Its logits
have the bits of those that the token was chosen from, because both are the same canonical function of the same row.
"""

import torch
from torch import Tensor

from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.passes.runner import LENS_ROWS, Runner
from replaylens.engine.request.capture import LensSpec, Rows

_TOGETHER = 4096
"""rows times layers per step if all their logits are stored at once"""
_NUMBERS = 1 << 25
"""logits per step; bounds the memory at 128 MB a copy, and changes no bit: every row is computed on its own"""


def read(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """Z of captured residual rows, on the CPU.

    rows[site] [n, d] for every site of the spec; `emitted[i]` is the token that follows row i (-1: none yet)
    -> {"Z.entropy": [n, layers], "Z.kl": [n, layers], "Z.emitted": ..., "Z.top_ids": [n, layers, k], ...}
    """
    return {name: z.cpu() for name, z in read_there(spec, runner, rows, emitted, tuned).items()}


@torch.inference_mode()
def read_ranked(spec: LensSpec, runner: Runner, rows: Rows, tokens: list[int], tuned: TunedLens | None = None) -> Rows:
    """As `read`, with "Z.rank" [n, layers]: how many tokens are likelier than `tokens[i]`, NaN for -1. Ties go to the lowest
    id, as in greedy decoding. Every row is unembedded once."""
    stacked = torch.stack([rows[site].cpu() for site in spec.sites], dim=1)  # [n, layers, d]
    with runner.canonical(stacked.shape[:2].numel()):
        return _read(spec, runner, stacked if tuned is None else tuned.translate(stacked), tokens, ranked=True)


@torch.inference_mode()
def read_there(spec: LensSpec, runner: Runner, rows: Rows, emitted: list[int], tuned: TunedLens | None = None) -> Rows:
    """As `read`, but left on the device that computes it."""
    stacked = torch.stack([rows[site] for site in spec.sites], dim=1)  # [n, layers, d]
    with runner.canonical(stacked.shape[:2].numel()):
        if tuned is not None:
            stacked = tuned.translate(stacked.cpu())
        return _read(spec, runner, stacked, emitted)


@torch.inference_mode()
def next_token(runner: Runner, residual: Tensor, emitted: list[int]) -> tuple[Tensor, Tensor]:
    """(log-probability of the token that follows, entropy) of the model's own distribution: [n] each, on the CPU.

    residual [n, d] leaves the last block; `emitted[i]` is the token that follows row i (-1: none, NaN)

    The bits are those of "Z.emitted" and "Z.entropy" at the last layer, without the rest of Z: at most 256 rows of logits
    exist at a time, and they are overwritten.
    """
    if runner.device == "cuda":
        z = read(LensSpec(("",), top_k=1), runner, {"": residual}, emitted)
        return z["Z.emitted"][:, 0], z["Z.entropy"][:, 0]
    tokens = torch.tensor(emitted, dtype=torch.int64)
    logprob, entropy = torch.empty(len(residual), dtype=torch.float32), torch.empty(len(residual), dtype=torch.float32)
    with runner.canonical(len(residual)):
        for first in range(0, len(residual), LENS_ROWS):
            some = slice(first, first + LENS_ROWS)
            _next_token(runner.logits(residual[some]).float(), tokens[some], logprob[some], entropy[some])
    return logprob.masked_fill_(tokens < 0, float("nan")), entropy


def _next_token(logits: Tensor, tokens: Tensor, logprob: Tensor, entropy: Tensor) -> None:
    """Fill `logprob` and `entropy`. Overwrites the logits."""
    if len(logits) == 1:  # as in `statistics`
        two = torch.empty(2, 2, dtype=torch.float32)
        _next_token(logits.repeat(2, 1), tokens.repeat(2), two[0], two[1])
        logprob[0], entropy[0] = two[0, 0], two[1, 0]
        return
    log_p = logits.log_softmax(-1)
    torch.gather(log_p, 1, tokens.clamp_min(0)[:, None], out=logprob[:, None])
    p = torch.exp(log_p, out=logits)
    torch.sum(p.mul_(log_p), -1, out=entropy).neg_()


def _read(spec: LensSpec, runner: Runner, stacked: Tensor, emitted: list[int], ranked: bool = False) -> Rows:
    n, layers, d = stacked.shape
    if runner.device == "cuda" and not ranked:
        from replaylens.engine.lens import cuda as cuda_lens  # its kernel needs triton

        if spec.fits_kernel and runner.model.config.plain_logits:
            return cuda_lens.read(spec, runner.model, stacked, emitted)
    parts: dict[str, list[Tensor]] = {}
    step = max(1, min(_TOGETHER, _NUMBERS // runner.model.config.vocab_size) // layers)
    for first in range(0, n, step):
        block = stacked[first : first + step]
        # on the CPU, where sums over a row do not depend on the number of rows; in CUDA libraries they do
        logits = runner.logits(block.reshape(-1, d)).float().cpu()
        log_p = logits.log_softmax(-1).view(len(block), layers, -1)
        found = statistics(spec, log_p, emitted[first : first + step])
        if ranked:
            found["Z.rank"] = _ranks(logits.view(log_p.shape), emitted[first : first + step])
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _ranks(logits: Tensor, tokens: list[int]) -> Tensor:
    """logits [n, layers, vocab], one token per row -> how many are likelier: [n, layers] float32, NaN for -1."""
    wanted = torch.tensor(tokens)
    own = logits.gather(-1, wanted.clamp_min(0)[:, None, None].expand(-1, logits.shape[1], 1))
    above = (logits > own).sum(-1)
    for i, layer in ((logits == own).sum(-1) > 1).nonzero().tolist():
        above[i, layer] += (logits[i, layer, : int(wanted[i])] == own[i, layer]).sum()
    return above.float().masked_fill_((wanted < 0)[:, None], float("nan"))


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
