"""The KV cache takes memory for the slots that were written, not for those that may be."""

from pathlib import Path

import torch

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool
from tests.toy_model import toy

PAGES = 1 << 17
"""about 1 GiB of KV in the toy model"""


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def test_slots_that_nobody_writes_take_no_memory() -> None:
    before = resident()
    cache = KVCache(toy().config, PagePool(PAGES, 16), torch.float32)
    assert cache.num_bytes > 1 << 28
    assert resident() - before < cache.num_bytes / 16
    data = cache.data[0, 0, 0]
    data.fill_(1.0)
    assert resident() - before > data.numel() * 4 * 0.9, "control: written slots do"


def test_a_new_cache_holds_zeros_and_can_be_written() -> None:
    cache = KVCache(toy().config, PagePool(4, 16), torch.float32)
    assert cache.data.is_contiguous() and not cache.data.any()
    k = torch.randn(3, cache.data.shape[2], cache.data.shape[4])
    cache.write(0, torch.tensor([17, 18, 40]), torch.cat([k, -k], dim=1))
    assert torch.equal(cache.rows([17, 18, 40])[:, 0, 0], k)
    assert torch.equal(cache.rows([17, 18, 40])[:, 0, 1], -k)
