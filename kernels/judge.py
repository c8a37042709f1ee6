"""Accept or reject drafts on the device, so that two numbers per chain go to the host instead of all rows.

Row i of a chain chooses the token after its first i drafts. A draft is accepted if all drafts before it are and the row
before it chose it. After n accepted drafts, row n gives the next token. Integers only: canonical by nature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import next_power_of_2, require, require_shape


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
