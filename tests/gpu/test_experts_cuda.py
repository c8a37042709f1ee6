"""Mixtures of experts on a CUDA device: the contract, router sites, edits of routing, bursts and graphs."""

from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Mixture
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.weights import loading
from tests.families import BOTH_NAMES, hugging_face
from tests.mixtures import MIXTURES, ROUTINGS, mixture_model

pytestmark = pytest.mark.gpu
PROMPT = torch.randint(1, 61, (45,), generator=torch.Generator().manual_seed(5)).tolist()
OTHERS = [torch.randint(1, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 10, 40, 130)]
NEW = 16
DRAWN = Sampling(temperature=0.7, seed=2**64 - 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def engine(name: str, dtype: torch.dtype, **options: Any) -> Engine:
    if name in ROUTINGS:
        return Engine(mixture_model(name, dtype, "cuda"), cache_tokens=8192, **options)
    return Engine(loading.load(hugging_face(name), dtype).to("cuda"), cache_tokens=8192, **options)


def router_sites(served: Engine) -> list[str]:
    mixtures = [block.mlp for block in served.model.blocks if isinstance(block.mlp, Mixture)]
    return [site for mixture in mixtures for site in mixture.own_sites if site in served.sites.sites]


Outcome = tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]


def outcome(served: Engine, beside: list[list[int]] = (), **options: Any) -> Outcome:
    """Tokens, KV and captured rows of one request that runs beside others."""
    sites = [*served.sites.select("STC")[0], *router_sites(served)]
    room = served.config.max_positions - NEW
    branches = served.prompts([prompt[:room] for prompt in [*beside, PROMPT]], sites=sites)
    served.generate(branches, NEW, final=True, **options)
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
@pytest.mark.parametrize("name", [*MIXTURES, *BOTH_NAMES, *ROUTINGS])
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


@pytest.mark.parametrize("name", ["qwen3-moe", "sigmoids in groups", "gpt-oss", "deepseek-v3-groups"])
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


ROUTER, CHOSEN = "blocks.1.mlp.gate.hook_out", "blocks.1.mlp.gate.hook_expert_indices"
WEIGHTS = "blocks.1.mlp.gate.hook_expert_weights"


@DTYPES
@pytest.mark.parametrize("op", ["force", "forbid", "reweight"])
def test_edits_of_routing_move_no_other_row(op: Any, dtype: torch.dtype) -> None:
    """An edited request has the same bits alone and beside others, and a fork without edits beside it keeps its own."""
    served = engine("mixtral", dtype)
    sites = [*served.sites.select("S")[0], CHOSEN, WEIGHTS]
    plain = served.prompt(PROMPT, sites=sites)
    counts = plain.activations[CHOSEN].flatten().bincount(minlength=5)
    expert = int(counts.argmin() if op == "force" else counts.argmax())
    edits = [Edit(ROUTER, op, experts=[expert], factor=0.3 if op == "reweight" else 1.0)]
    alone, beside = (
        served.prompt(PROMPT, sites=sites, edits=edits),
        served.prompts([PROMPT, OTHERS[4]], sites=sites, edits=edits)[0],
    )
    assert not [site for site in sites if not torch.equal(alone.activations[site], beside.activations[site])]
    assert not torch.equal(alone.activations[sites[-3]], plain.activations[sites[-3]])
    hit = (alone.activations[CHOSEN] == expert).any(-1)
    want = plain.activations[WEIGHTS].clone()
    want[:, expert] *= 0.3
    assert {"force": bool(hit.all()), "forbid": not hit.any(), "reweight": torch.equal(alone.activations[WEIGHTS], want)}[op]
    (single,), (changed,), (kept,) = (plain.fork(), plain.fork(edits=edits), plain.fork())
    served.generate([single], 8, final=True)
    served.generate([changed, kept], 8, final=True)
    assert single.tokens == kept.tokens and torch.equal(single.kv(), kept.kv())
