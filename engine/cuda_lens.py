"""Z on a CUDA device: the lens kernel goes over the vocabulary in tiles, so no logits are ever held."""

import torch
from torch import Tensor

from replaylens.engine.capture import LensSpec, Rows
from replaylens.engine.model import Decoder
from replaylens.kernels.lens import lens

MOST_TOP, MOST_TARGETS = 32, 63
"""what the kernel can keep of a row; the emitted token is a target too"""
_TOGETHER = 32768
"""rows times layers of one launch; no influence on any bit"""


def serves(spec: LensSpec) -> bool:
    """Whether the kernel gives all that is asked for: whole distributions and long lists it does not."""
    return not spec.full and spec.top_k <= MOST_TOP and len(spec.targets) <= MOST_TARGETS


def read(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    """Z of residual rows [n, layers, d], as `readout.read` describes it; on the CPU."""
    step = max(1, _TOGETHER // stacked.shape[1])
    parts: dict[str, list[Tensor]] = {}
    for first in range(0, len(stacked), step):
        piece = _block(spec, model, stacked[first : first + step], emitted[first : first + step])
        for name, value in piece.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def _block(spec: LensSpec, model: Decoder, stacked: Tensor, emitted: list[int]) -> Rows:
    norm, table = model.ln_final, model.embed.t() if model.unembed is None else model.unembed.weight  # [d, vocab]
    x = stacked.to(table).transpose(0, 1).contiguous()  # [layers, n, d]
    targets = torch.tensor([[max(token, 0), *spec.targets] for token in emitted], device=table.device)
    found = lens(
        x,
        table,
        norm.weight,
        norm.bias,
        norm.eps,
        norm.kind,
        final=len(x) - 1,
        targets=targets,
        k=min(spec.top_k, table.shape[1]),
        softcap=model.config.logit_softcap,
    )
    assert found.kl is not None and found.target_log_probs is not None  # both were asked for
    out = {
        "Z.entropy": found.entropy,
        "Z.kl": found.kl,
        "Z.emitted": found.target_log_probs[..., 0],
        "Z.top_ids": found.top_ids.to(torch.int32),
        "Z.top_logprobs": found.top_log_probs,
    }
    if spec.targets:
        out["Z.targets"] = found.target_log_probs[..., 1:]
    rows = {name: value.transpose(0, 1).contiguous().cpu() for name, value in out.items()}
    rows["Z.emitted"][torch.tensor(emitted) < 0] = float("nan")
    return rows
