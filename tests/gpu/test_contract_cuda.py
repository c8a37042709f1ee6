"""The engine's contract on a CUDA device: a request gives the same bits however it is run."""

from itertools import product
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from replaylens.weights import loading
from tests.families import NAMES, hugging_face

pytestmark = pytest.mark.gpu
PROMPT = torch.randint(1, 97, (75,), generator=torch.Generator().manual_seed(5)).tolist()
OTHERS = [torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 10, 40, 130)]
FILTERED, DRAWN = Sampling(temperature=0.8, top_k=40, seed=11), Sampling(temperature=0.7, seed=2**64 - 3)
"""the host draws the first, for which it needs the whole distribution; the device draws the second"""
Outcome = tuple[list[int], torch.Tensor, dict[str, torch.Tensor]]


def engine(name: str, dtype: torch.dtype, **options: Any) -> Engine:
    model = loading.load(hugging_face(name), dtype).to("cuda")
    draft = loading.load(hugging_face("llama"), dtype).to("cuda")
    return Engine(model, draft_model=draft, cache_tokens=8192, **options)


def outcome(served: Engine, beside: list[list[int]] = (), **options: Any) -> Outcome:
    """Tokens, KV and captured rows of one request that runs beside others."""
    branches = served.prompts([*beside, PROMPT], sites="STCZ", keep_rejected=True)
    served.generate(branches, 24, final=True, **options)
    mine = branches[-1]
    rows = {site: mine.activations[site] for site in mine.activations.sites()}
    found = mine.tokens, mine.kv().cpu(), rows
    served.check_integrity()
    for branch in branches:
        branch.release()
    return found


def differences(a: Outcome, b: Outcome) -> list[str]:
    """What differs, bit for bit."""
    bits = lambda x: x.contiguous().view(torch.uint8)  # noqa: E731 (NaN marks a row without successor)
    found = [site for site in a[2] if not torch.equal(bits(a[2][site]), bits(b[2][site]))]
    return ["tokens"] * (a[0] != b[0]) + ["kv"] * (not torch.equal(a[1], b[1])) + found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_the_path_alone(name: str, dtype: torch.dtype) -> None:
    """Batch, chunking, page size, drafter and window do not change a bit."""
    served = engine(name, dtype)
    assert served.certificate.certified
    for sampling in (Sampling(), FILTERED, DRAWN):
        reference = outcome(served, window=1, sampling=sampling)
        assert not differences(outcome(served, OTHERS, window=1, sampling=sampling), reference)
        for drafter in ("self", "lens", "tree", "ngram", "model"):
            assert not differences(outcome(served, OTHERS[:2], drafter=drafter, window=6, sampling=sampling), reference), (
                drafter
            )
        assert not differences(outcome(engine(name, dtype, max_rows=17, page_size=64), OTHERS, sampling=sampling), reference)


def test_the_fast_path_would_fail_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the library's products instead of the canonical ones, other requests in the batch change bits."""
    from replaylens.engine.model.config import ModelConfig
    from replaylens.engine.model.decoder import Decoder
    from replaylens.engine.passes.runner import Runner

    config = ModelConfig(2, 4096, 32, 8, 128, 14336, 97, 512, rotary_dim=128)
    model = loading.build(config, dict(Decoder(config).initialize(0).state_dict()), torch.bfloat16).to("cuda")
    served = Engine(model, cache_tokens=4096)
    honest = outcome(served, window=1)
    assert not differences(outcome(served, OTHERS, window=1), honest)
    monkeypatch.setattr(Runner, "exact", lambda self, segments, tap=None, stop_at_layer=None: self.fast(segments, tap))
    assert differences(outcome(served, OTHERS, window=1), outcome(served, window=1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_bursts_give_the_bits_of_single_passes(name: str) -> None:
    """Decode steps replayed as CUDA graphs on the device equal one ordinary pass per token."""
    served = engine(name, torch.bfloat16)
    for sampling, beside in product((Sampling(), DRAWN), ([], OTHERS)):
        tokens, kv, _ = outcome(served, window=1, sampling=sampling)
        branches = served.prompts([*beside, PROMPT])
        served.generate(branches, 24, final=True, sampling=sampling)
        assert served.loop.bursts is not None and served.loop.bursts._graphs, "no graph was used"
        assert branches[-1].tokens == tokens and torch.equal(branches[-1].kv().cpu(), kv)
        served.check_integrity()
        for branch in branches:
            branch.release()
        served.prefix.clear()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_passes_replayed_as_graphs_give_the_bits_of_launched_ones(name: str) -> None:
    """Prefills and windows, with and without capture. A shape is replayed from its second use on, so everything runs thrice."""
    launched = engine(name, torch.bfloat16)
    launched.runner.graphs = None
    served = engine(name, torch.bfloat16)
    assert served.runner.graphs is not None
    served.runner.graphs.worth = 2
    for options in ({"window": 1}, {"drafter": "lens", "window": 6}):
        truth = outcome(launched, OTHERS, **options)
        for _ in range(3):
            assert not differences(outcome(served, OTHERS, **options), truth)
            served.prefix.clear()
    assert served.runner.graphs.graphs, "no graph was used"
