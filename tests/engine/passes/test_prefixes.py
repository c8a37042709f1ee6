"""Branches that share pages read them together on a CPU, with the bits that each has on pages of its own."""

from dataclasses import replace

import pytest
import torch

from bench.subjects import TINY_SHAPE, random_decoder
from replaylens.engine.engine import Engine
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels.cpu_attention import HostRows
from replaylens.weights import loading
from tests.families import hugging_face
from tests.trees import grow

PAGED = Batch.__dict__["paged"].func
WIRINGS = ("bloom", "cohere", "gpt-oss", "deepseek-v3")


def engine(name: str, page_size: int = 16, max_rows: int = 512) -> Engine:
    """A model of a family, with 256 positions, or "long", with 4096."""
    if name == "long":
        model = random_decoder(replace(TINY_SHAPE, max_positions=4096), "cpu", torch.float32)
    else:
        model = loading.load(hugging_face(name))
    return Engine(model, cache_tokens=1 << 15, page_size=page_size, max_rows=max_rows)


def one_page_too_many(batch: Batch) -> HostRows:
    """A plan in which a branch also reads the first page that it does not share with its neighbour."""
    right = PAGED(batch)
    pages = right.pages.clone()
    for i in range(1, len(pages)):
        own = (pages[i] != right.pages[i - 1]).nonzero()[:, 0].tolist()
        if own and own[0] and right.pages[i - 1, own[0]]:
            pages[i, own[0]] = right.pages[i - 1, own[0]]
    return replace(right, pages=pages)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("llama", 16),
        ("gemma2", 4),
        ("long", 24),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in [("long", 128), *((name, 16) for name in WIRINGS)]),
    ],
)
def test_random_trees_have_the_same_bits_on_any_pages_and_in_any_company(name: str, page_size: int) -> None:
    """Windows, caps, slopes, norms of each head, sinks, latents; against pages of one position and passes of 16 rows."""
    rounds = 2 if page_size == 16 else 3
    shared, apart = (grow(each, 0, rounds) for each in (engine(name, page_size), engine(name, 1, max_rows=16)))
    for a, b in zip(shared, apart, strict=True):
        assert a.tokens == b.tokens
        assert torch.equal(a.kv().view(torch.int32), b.kv().view(torch.int32))
        for site in a.activations.sites():
            assert torch.equal(a.activations[site].view(torch.int32), b.activations[site].view(torch.int32))


def test_a_page_that_is_not_shared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: which pages a row reads matters."""
    subject, how = engine("long"), Sampling(ignore_eos=True)
    root = subject.prompt([3 + i % 90 for i in range(300)])
    new = [[i, i + 1, *range(30)] for i in range(6)]
    right, wrong = root.fork(6), root.fork(6)
    for forks in (right, wrong):
        subject.force_all(forks, new)
        subject.generate(forks, 3, sampling=how)
        with pytest.MonkeyPatch.context() as patch:
            if forks is wrong:
                patch.setattr(Batch, "paged", property(one_page_too_many))
            subject.force_all(forks, [[5]] * 6)
            subject.generate(forks, 1, sampling=how)
    assert torch.equal(wrong[0].kv(), right[0].kv()), "the first has pages of its own"
    assert not torch.equal(wrong[5].kv(), right[5].kv())
