"""The KV cache takes memory for the slots that were written, not for those that may be."""

from pathlib import Path

import torch

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool
from tests.toy_model import Reference, engine, toy

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


def test_the_canary_of_a_page_that_is_used_again_is_that_of_its_copy() -> None:
    """A fork in the middle of a page copies it into one that held another path before."""
    subject = engine(page_size=4, cache_tokens=16, canary=True)
    for first in (1, 2, 3):  # every page has held something else
        subject.prompt([first] * 12).release()
        subject.prefix.clear()
    branch = subject.prompt([5, 6, 7, 8, 9, 10])
    (fork,) = branch.fork(at=6)
    fork.force([11])  # copies the second page, and its canary
    branch.force([12])
    for one in (branch, fork):
        one.force([13])
        assert torch.equal(one.kv(), Reference(toy(), one.tokens).kv)
    subject.check_integrity()
