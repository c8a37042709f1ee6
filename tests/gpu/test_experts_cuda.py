"""Mixtures of experts on a CUDA device: the contract, router sites, edits of routing, bursts and graphs."""

from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model import weights
from replaylens.engine.model.mixture import Mixture
from replaylens.engine.request.sampling import Sampling
from tests.families import hugging_face
from tests.mixtures import MIXTURES
from tests.tiny_mixtures import MIXTURES as TINY
from tests.tiny_mixtures import mixture_model

pytestmark = pytest.mark.gpu
PROMPT = torch.randint(1, 61, (45,), generator=torch.Generator().manual_seed(5)).tolist()
OTHERS = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 10, 40, 130)]
DRAWN = Sampling(temperature=0.7, seed=2**64 - 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def engine(name: str, dtype: torch.dtype, **options: Any) -> Engine:
    if name in TINY:
        return Engine(mixture_model(name, dtype, "cuda"), cache_tokens=8192, **options)
    return Engine(weights.load(hugging_face(name), dtype).to("cuda"), cache_tokens=8192, **options)


def router_sites(served: Engine) -> list[str]:
    mixtures = [block.mlp for block in served.model.blocks if isinstance(block.mlp, Mixture)]
    return [site for mixture in mixtures for site in mixture.own_sites if site in served.sites.sites]


Outcome = tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]


def outcome(served: Engine, beside: list[list[int]] = (), **options: Any) -> Outcome:
    """Tokens, KV and captured rows of one request that runs beside others."""
    sites = [*served.sites.select("STC")[0], *router_sites(served)]
    branches = served.prompts([*beside, PROMPT], sites=sites)
    served.generate(branches, 16, final=True, **options)
    mine = branches[-1]
    found = mine.tokens, mine.kv().cpu(), {site: mine.activations[site] for site in mine.activations.sites()}
    served.check_integrity()
    for branch in branches:
        branch.release()
    served.prefix.clear()
    return found


def differences(a: Outcome, b: Outcome) -> list[str]:
    """What differs, bit for bit."""
    found = [site for site in a[2] if not torch.equal(a[2][site], b[2][site])]
    return ["tokens"] * (a[0] != b[0]) + ["kv"] * (not torch.equal(a[1], b[1])) + found


@DTYPES
@pytest.mark.parametrize("name", [*MIXTURES, *TINY])
def test_bits_depend_on_the_path_alone(name: str, dtype: torch.dtype) -> None:
    """Alone, in company, in a burst, verified from drafts, in chunks of a few rows: the same bits, router sites included."""
    served = engine(name, dtype)
    assert served.certificate.certified and served.certificate.has_teeth
    for sampling in (Sampling(), DRAWN):
        alone = outcome(served, window=1, sampling=sampling)
        assert any(site.endswith("hook_expert_indices") for site in alone[2])
        assert not differences(outcome(served, OTHERS, window=1, sampling=sampling), alone)
        assert not differences(outcome(served, OTHERS, sampling=sampling), alone)
        assert not differences(outcome(served, OTHERS[:2], drafter="ngram", window=6, sampling=sampling), alone)
    small = engine(name, dtype, max_rows=17, page_size=64)
    assert not differences(outcome(small, OTHERS, sampling=DRAWN), alone)


@pytest.mark.parametrize("name", ["qwen3-moe", "sigmoids in groups"])
def test_graphs_and_bursts_are_used_and_move_no_bit(name: str) -> None:
    served = engine(name, torch.bfloat16)
    served.runner.graphs.worth = 2
    launched = engine(name, torch.bfloat16)
    launched.runner.graphs = None
    truth = outcome(launched, OTHERS, window=1)
    for _ in range(3):
        assert not differences(outcome(served, OTHERS, drafter="ngram", window=4), truth)
        assert not differences(outcome(served, OTHERS), truth)
    assert served.runner.graphs.graphs, "no graph was used"
    assert served.loop.bursts is not None and served.loop.bursts._graphs, "no burst was used"


def test_capture_of_router_sites_moves_no_bit() -> None:
    served = engine("qwen3-moe", torch.bfloat16)
    tokens, kv, _ = outcome(served)
    plain = served.prompts([PROMPT])
    served.generate(plain, 16, final=True)
    assert plain[0].tokens == tokens and torch.equal(plain[0].kv().cpu(), kv)
