"""The logit lens (Z) on a CUDA device. The kernel goes over the vocabulary in tiles and never stores the logits."""

import torch
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import Rows
from replaylens.kernels.lens import lens

_TOGETHER = 32768
"""rows times layers per launch; does not affect the bits"""


def read(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    """Z of residual rows [n, layers, d], in the form of `lens.read`, on the device."""
    step = max(1, _TOGETHER // stacked.shape[1])
    table = model.unembedding
    targets = spec.targets_on(table.device)
    follows = torch.tensor(emitted).to(table.device, non_blocking=True)
    blocks = [
        columns(model, spec, stacked[i : i + step].to(table).transpose(0, 1).contiguous(), follows[i : i + step], targets)
        for i in range(0, len(stacked), step)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def columns(
    model: Decoder, spec: LensSpec, x: Tensor, follows: Tensor, targets: Tensor | None, logits: Tensor | None = None
) -> Rows:
    """Z of residual streams x [layers, rows, d] in one launch; `follows` [rows] are the next tokens, -1: none yet.

    targets  the spec's, on the device. A graph reads them again at every replay, so whoever records one must keep them
    logits   the model's own [rows, vocab], if they are known already
    -> name -> [rows, layers, ...]. Waits for nothing, so that a graph can hold it.
    """
    if not model.config.plain_logits:
        raise UnsupportedModel(
            f"Z of {model.config.family} inside a burst is not supported on CUDA: its unembedding has a bias, or a factor that "
            "is not a power of two. Capture S instead, or use device='cpu'."
        )
    norm, table, scale = model.ln_final, model.unembedding.t(), model.config.logit_scale  # table: [d, vocab]
    looked_up = follows.clamp_min(0)[:, None]
    if targets is not None:
        looked_up = torch.cat([looked_up, targets.expand(len(follows), -1)], dim=1)
    found = lens(
        x,
        table,
        norm.weight if scale == 1.0 else norm.weight * scale,  # a power of two: moves no bit of the logits but the exponent
        norm.bias if scale == 1.0 or norm.bias is None else norm.bias * scale,
        norm.eps,
        norm.kind,
        final=len(x) - 1,
        targets=looked_up,
        k=min(spec.top_k, table.shape[1]),
        softcap=model.config.logit_softcap,
        logits=None if model.config.logit_softcap else logits,  # the kernel caps them itself
    )
    assert found.kl is not None and found.target_log_probs is not None  # `final` and `targets` were given
    emitted = found.target_log_probs[..., 0].masked_fill(follows < 0, float("nan"))
    z = {
        "Z.entropy": found.entropy,
        "Z.kl": found.kl,
        "Z.emitted": emitted,
        "Z.top_ids": found.top_ids.to(torch.int32),
        "Z.top_logprobs": found.top_log_probs,
    }
    if targets is not None:
        z["Z.targets"] = found.target_log_probs[..., 1:]
    return {name: column.transpose(0, 1).contiguous() for name, column in z.items()}
