"""Latent attention and attention sinks on a CUDA device: the contract, the values, edits of latents and of edges, forks."""

from typing import Any

import pytest
import torch

from bench.subjects import random_decoder
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.weights import loading
from tests.families import BOTH_NAMES, LATENT_NAMES, hugging_face
from tests.gpu.test_experts_cuda import DRAWN, DTYPES, OTHERS, PROMPT, differences, engine, outcome

pytestmark = pytest.mark.gpu
LITE = ModelConfig(2, 256, 16, 16, 192, 320, 97, 2048, rotary_dim=64, latent=Latent(rank=512, d_value=128, query_rank=0))
"""DeepSeek-V2-Lite's attention"""
FULL = ModelConfig(1, 256, 128, 128, 192, 320, 97, 2048, rotary_dim=64, latent=Latent(rank=512, d_value=128, query_rank=96))
"""DeepSeek-V3's attention"""
LONG = torch.randint(1, 97, (1100,), generator=torch.Generator().manual_seed(8)).tolist()


def same(a: Any, b: Any) -> bool:
    """Whether two branches agree in tokens, KV and captured rows."""
    rows = (torch.equal(a.activations[site], b.activations[site]) for site in a.activations.sites())
    return a.tokens == b.tokens and torch.equal(a.kv(), b.kv()) and all(rows)


@DTYPES
@pytest.mark.parametrize("name", LATENT_NAMES)
def test_bits_depend_on_the_path_alone(name: str, dtype: torch.dtype) -> None:
    served = engine(name, dtype)
    assert served.certificate.certified and served.certificate.has_teeth
    assert any(f.op.endswith("by head") for f in served.certificate.findings)
    for sampling in (Sampling(), DRAWN):
        alone = outcome(served, window=1, sampling=sampling)
        assert not differences(outcome(served, OTHERS, window=1, sampling=sampling), alone)
        assert not differences(outcome(served, OTHERS, sampling=sampling), alone)
        assert not differences(outcome(served, OTHERS[:2], drafter="ngram", window=6, sampling=sampling), alone)
    small = engine(name, dtype, max_rows=17, page_size=64)
    assert not differences(outcome(small, OTHERS, sampling=DRAWN), alone)


@DTYPES
@pytest.mark.parametrize("name", [*LATENT_NAMES, *BOTH_NAMES, "gpt-oss"])
@torch.no_grad()
def test_values_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    """Attention outputs of the first layer, which no choice of experts precedes; in float32 the residual stream at the end."""
    served, sites = engine(name, dtype), ["blocks.0.attn.o.hook_in", "blocks.1.hook_out"]
    found = served.prompt(PROMPT, sites=sites).activations
    tap = PassTap(frozenset(sites))
    model = loading.load(hugging_face(name), dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), SequenceOps([len(PROMPT)]), tap)
    for site, bound in zip(sites, (2e-6, 2e-5) if dtype == torch.float32 else (2e-2, None), strict=True):
        want = tap.values[site].flatten(1)
        error = float((found[site].flatten(1).double() - want).norm() / want.norm())
        assert bound is None or error < bound, f"{site}: relative error {error:.1e}"


@DTYPES
@pytest.mark.parametrize("config", [LITE, FULL], ids=["16 heads", "128 heads"])
def test_the_widths_that_people_use(config: ModelConfig, dtype: torch.dtype) -> None:
    """512 + 64 columns, more keys than a split: alone, beside others, as forks that share keys, launched and from graphs."""
    made = lambda: Engine(random_decoder(config, "cuda", dtype), cache_tokens=1 << 14)  # noqa: E731
    served, launched = made(), made()
    assert served.certificate.certified and served.certificate.has_teeth
    served.runner.graphs.worth, launched.runner.graphs, launched.loop.bursts = 1, None, None
    served.runner.cache.worth_sharing = 1
    how = Sampling(temperature=0.8, seed=5, ignore_eos=True)
    truth = launched.prompt(LONG, sites="ST")
    launched.generate([truth], 12, sampling=how, window=1, final=True)
    mine = served.prompts([LONG[:300], LONG, LONG[:70]], sites="ST")[1]
    forks = mine.fork(4, at=mine.length)
    others = [Sampling(temperature=0.8, seed=seed, ignore_eos=True) for seed in (6, 7, 8)]
    served.generate(forks, 12, sampling=[*others, how], final=True)
    assert same(forks[3], truth) and not same(forks[1], truth)
    assert served.runner.graphs.graphs or served.loop.bursts._graphs, "no graph was used"


ATTN = "blocks.1.attn."
EDITS = {
    "latent": Edit(ATTN + "hook_kv_latent", "add", torch.ones(13), [3, 40]),
    "rotated keys": Edit(ATTN + "hook_rot_k", "zero", positions=[7]),
    "queries": Edit(ATTN + "hook_rot_q", "zero", positions=[44], heads=[2]),
    "masked edges": Edit(ATTN + "hook_pattern", "mask", positions=[44], keys=[0, 5, 40], heads=[1, 4]),
    "cut edges": Edit(ATTN + "hook_pattern", "zero", positions=[44], keys=[5, 44]),
}


CASES = [(name, kind) for name in ("deepseek-v3", "deepseek-v3-groups", "gpt-oss") for kind in EDITS]
CASES = [(name, kind) for name, kind in CASES if name != "gpt-oss" or "edges" in kind]  # it has no latents


@DTYPES
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_edits_of_attention(name: str, kind: str, dtype: torch.dtype) -> None:
    """Same bits alone and in company, another stream than without the edit, and in float32 what a CPU computes."""
    served, site, edits = engine(name, dtype), "blocks.1.hook_out", [EDITS[kind]]
    alone = served.prompt(PROMPT, sites=[site], edits=edits)
    served.prefix.clear()
    beside = served.prompts([OTHERS[4], PROMPT, PROMPT[::-1]], sites=[site], edits=edits)[1]
    served.prefix.clear()
    plain = served.prompt(PROMPT, sites=[site])
    assert same(alone, beside) and not torch.equal(alone.activations[site], plain.activations[site])
    if dtype == torch.float32:
        cpu = Engine(loading.load(hugging_face(name))).prompt(PROMPT, sites=[site], edits=edits)
        torch.testing.assert_close(alone.activations[site], cpu.activations[site], rtol=1e-3, atol=1e-4)
