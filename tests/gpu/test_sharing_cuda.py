"""Branches whose shared keys are read once equal branches that read their own, on a CUDA device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.subjects import TINY_SHAPE, random_decoder
from replaylens.engine.engine import Engine
from replaylens.weights import loading
from tests.families import hugging_face
from tests.trees import grow

pytestmark = pytest.mark.gpu
NEVER = 1 << 60


def engine(name: str, worth: int, **options: Any) -> Engine:
    """A model of a family, with 256 positions, or "long", with 4096."""
    if name == "long":
        model = random_decoder(replace(TINY_SHAPE, max_positions=4096), "cuda", torch.bfloat16)
    else:
        model = loading.load(hugging_face(name), torch.bfloat16).to("cuda")
    made = Engine(model, cache_tokens=1 << 15, **options)
    made.runner.cache.worth_sharing = worth
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "long", "gpt-oss", "deepseek-v3", "deepseek-v2-lite"])
def test_random_trees_have_the_same_bits_with_and_without_sharing(name: str) -> None:
    shared, apart = engine(name, 1), engine(name, NEVER)
    for served in (shared, apart):
        served.runner.graphs.worth = 2
    for seed in range(3):
        pair = [grow(served, seed) for served in (shared, apart)]
        for a, b in zip(*pair, strict=True):
            assert a.tokens == b.tokens
            assert torch.equal(a.kv(), b.kv())
            assert all(torch.equal(a.activations[site], b.activations[site]) for site in a.activations.sites())
        for branch in [*pair[0], *pair[1]]:
            branch.release()
    keys = shared.loop.bursts._graphs
    assert any(key.shared for key in keys) and any(shape.shared for shape in shared.runner.graphs.graphs), "nothing was shared"
    assert not any(key.shared for key in apart.loop.bursts._graphs)
