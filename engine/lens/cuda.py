"""The logit lens (Z) on a CUDA device. The kernel goes over the vocabulary in tiles and never stores the logits."""

import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.request.capture import LensSpec, Rows
from replaylens.kernels.lens import lens

MAX_TOP, MAX_TARGETS = 32, 63
"""limits of the kernel per row; the emitted token takes one more target"""
_TOGETHER = 32768
"""rows times layers per launch; does not affect the bits"""


def serves(spec: LensSpec) -> bool:
    """Whether the kernel can compute the spec. It cannot give whole distributions or long lists."""
    return not spec.full and spec.top_k <= MAX_TOP and len(spec.targets) <= MAX_TARGETS


def read(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    """Z of residual rows [n, layers, d], in the form of `readout.read`, on the CPU."""
    step = max(1, _TOGETHER // stacked.shape[1])
    blocks = [
        _block(spec, model, stacked[first : first + step], emitted[first : first + step])
        for first in range(0, len(stacked), step)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def _block(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    """Z of the rows of one launch: views of one tensor on the CPU."""
    norm, table = model.ln_final, model.unembedding.t()  # [d, vocab]
    x = stacked.to(table).transpose(0, 1).contiguous()  # [layers, n, d]
    chosen = torch.tensor(spec.targets, dtype=torch.int64).expand(len(emitted), -1)
    targets = torch.cat([torch.tensor(emitted).clamp_min(0)[:, None], chosen], dim=1)
    found = lens(
        x,
        table,
        norm.weight,
        norm.bias,
        norm.eps,
        norm.kind,
        final=len(x) - 1,
        targets=targets.to(table.device, non_blocking=True),
        k=min(spec.top_k, table.shape[1]),
        softcap=model.config.logit_softcap,
    )
    assert found.kl is not None and found.target_log_probs is not None  # `final` and `targets` were given
    columns = {
        "Z.entropy": found.entropy,
        "Z.kl": found.kl,
        "Z.emitted": found.target_log_probs[..., 0],
        "Z.top_ids": found.top_ids.to(torch.int32).view(torch.float32),
        "Z.top_logprobs": found.top_log_probs,
    }
    if spec.targets:
        columns["Z.targets"] = found.target_log_probs[..., 1:]
    turned = [column.transpose(0, 1) for column in columns.values()]  # [n, layers, ...]
    sent = torch.cat([x.flatten() for x in turned]).cpu()  # one copy, so that the host waits once
    pieces = sent.split([x.numel() for x in turned])
    rows = {name: piece.view(x.shape) for name, piece, x in zip(columns, pieces, turned, strict=True)}
    rows["Z.top_ids"] = rows["Z.top_ids"].view(torch.int32)
    rows["Z.emitted"][torch.tensor(emitted) < 0] = float("nan")
    return rows
