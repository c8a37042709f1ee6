"""On a CPU, branches whose shared keys are gathered once equal branches that gather their own."""

from dataclasses import replace

import pytest
import torch

from benchmarks.subjects import TINY_SHAPE, random_decoder
from replaylens.engine.engine import Engine
from replaylens.engine.model import loading
from replaylens.engine.passes import cpu
from replaylens.engine.passes import cpu as prefixes
from replaylens.engine.request.sampling import Sampling
from tests.families import hugging_face
from tests.trees import grow

NEVER = 1 << 60


def engine(name: str, worth: int, page_size: int = 16) -> Engine:
    """A model of a family, with 256 positions, or "long", with 4096."""
    if name == "long":
        model = random_decoder(replace(TINY_SHAPE, max_positions=4096), "cpu", torch.float32)
    else:
        model = loading.load(hugging_face(name))
    made = Engine(model, cache_tokens=1 << 15, page_size=page_size)
    made.runner.cache.worth_sharing = worth
    return made


@pytest.mark.parametrize(("name", "page_size"), [("llama", 16), ("gemma2", 4), ("long", 16), ("long", 128)])
def test_random_trees_have_the_same_bits_with_and_without_sharing(
    name: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = cpu.attend_prefixes
    monkeypatch.setattr(cpu, "attend_prefixes", lambda *given: (used.append(1), real(*given))[1])
    shared, apart = (grow(engine(name, worth, page_size), 0, rounds=3) for worth in (1, NEVER))
    for a, b in zip(shared, apart, strict=True):
        assert a.tokens == b.tokens
        assert torch.equal(a.kv().view(torch.int32), b.kv().view(torch.int32))
        for site in a.activations.sites():
            assert torch.equal(a.activations[site].view(torch.int32), b.activations[site].view(torch.int32))
    assert used, "nothing was shared"


def test_sharing_that_drops_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the sums of the shared keys matter."""
    subject = engine("long", 1)
    root = subject.prompt([3 + i % 90 for i in range(300)])
    right = root.fork(6)
    subject.generate(right, 3, sampling=Sampling(ignore_eos=True))
    real = prefixes._Scores._added
    monkeypatch.setattr(
        prefixes._Scores, "_added", lambda self, w, total, out, start, product: real(self, w, total, out, start + 64, product)
    )
    wrong = root.fork(6)
    subject.generate(wrong, 3, sampling=Sampling(ignore_eos=True))
    assert not torch.equal(wrong[0].kv(), right[0].kv())


@pytest.mark.parametrize("name", ["bloom", "gptj", "cohere", "gpt-oss", "deepseek-v3"])
def test_other_wirings_have_the_same_bits_with_and_without_sharing(name: str) -> None:
    """ALiBi, whose bias shared keys do not have, so nothing is shared; narrow heads; norms of each head; sinks; latents."""
    shared, apart = (grow(engine(name, worth), 0, rounds=2) for worth in (1, NEVER))
    for a, b in zip(shared, apart, strict=True):
        assert a.tokens == b.tokens and torch.equal(a.kv().view(torch.int32), b.kv().view(torch.int32))
