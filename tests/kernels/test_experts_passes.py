"""Passes with mixtures of experts in a CUDA device's arithmetic: the model's function, whatever runs beside a row."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.decoder import Decoder, Mixture
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps, device_rows
from replaylens.engine.proof import doctor_cuda
from replaylens.engine.proof.doctor import Finding
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.edits import Edit
from tests.kernels.interpreted import DEVICES, served
from tests.tiny_mixtures import MIXTURES, mixture_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = [[3, 1, 4], [6, 5]]
QUICK = "sigmoids in groups"


def passed(model: Decoder, paths: list[list[int]], tap: PassTap | None = None, exact: bool = True) -> torch.Tensor:
    """The residual stream of some paths in one pass: [rows, d_model]."""
    pool, tables = PagePool(32, 2), [PageTable() for _ in paths]
    cache = KVCache(model.config, pool, torch.float32, DEVICE)
    cache.data = torch.zeros(model.config.num_layers, 2, 66, model.config.num_kv_heads, model.config.d_head, device=DEVICE)
    for table, path in zip(tables, paths, strict=True):
        pool.reserve(table, 0, len(path))
    segments = [Segment(table, 0, path) for table, path in zip(tables, paths, strict=True)]
    batch = Batch(segments, pool, DEVICE)
    ops = (CanonicalCudaOps if exact else FastCudaOps)(cache, device_rows(batch, cache))
    return model(batch.tokens, batch.positions, ops, tap)[: batch.num_rows]


def router_sites(model: Decoder) -> frozenset[str]:
    return frozenset(s for block in model.blocks if isinstance(block.mlp, Mixture) for s in block.mlp.own_sites)


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MIXTURES])
def test_a_path_alone_and_in_company(name: str) -> None:
    """The bits are the same, also when every site of the mixture is captured; the function is plain PyTorch's."""
    model = mixture_model(name, device=DEVICE)
    whole = passed(model, PATHS)
    tap = PassTap(router_sites(model))
    assert torch.equal(passed(model, PATHS, tap), whole), "capture moved bits"
    chosen = [value for site, value in tap.values.items() if site.endswith("expert_indices")]
    assert len(torch.cat(chosen).unique(dim=0)) > 1, "all rows go to the same experts: nothing is shown"
    start = 0
    for path in PATHS:
        end = start + len(path)
        assert torch.equal(passed(model, [path]), whole[start:end])
        meant = model(torch.tensor(path, device=DEVICE), torch.arange(len(path), device=DEVICE), SequenceOps([len(path)]))
        torch.testing.assert_close(whole[start:end], meant, rtol=2e-4, atol=2e-5)
        start = end
    torch.testing.assert_close(passed(model, PATHS, exact=False), whole, rtol=2e-4, atol=2e-5)


def test_the_doctor_examines_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of a mixture is compared, and products whose depth is split differ. A product that depends on the rows fails."""
    for module in (doctor_cuda, doctor_cuda):
        monkeypatch.setattr(module, "ROWS", (1, 3))
    model = mixture_model("softmax of the chosen", device=DEVICE)
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)  # noqa: E731
    found: list[Finding] = []
    doctor_cuda.examine_experts(model, random, found)
    assert all(f.passed for f in found) and len({f.op for f in found}) == 5
    assert any(f.control and not f.equal for f in found), "the control has no teeth"
    honest = CanonicalCudaOps.experts_hidden

    def split(self: CanonicalCudaOps, x: torch.Tensor, *rest: object) -> torch.Tensor:
        out = honest(self, x, *rest)  # type: ignore[arg-type]
        return out * (1 + 1e-7) if len(x) == 1 else out  # as if one row took another path

    monkeypatch.setattr("replaylens.engine.passes.cuda.HeadOps.experts_hidden", split)
    found.clear()
    doctor_cuda.examine_experts(model, random, found)
    assert any(not f.passed for f in found)


@pytest.mark.parametrize("device", DEVICES)
def test_edits_of_routing(device: str) -> None:
    """Forced, forbidden and reweighted experts, as on a CPU. Of two edits of an expert the last one counts."""
    model = mixture_model("softmax of the chosen", device=device)
    router, chosen, weights = (
        f"blocks.1.mlp.{part}" for part in ("gate.hook_out", "hook_expert_indices", "hook_expert_weights")
    )
    edits = [
        Edit(router, "forbid", experts=[5]),
        Edit(router, "force", experts=[4, 5], positions=0),
        Edit(router, "forbid", experts=[4], positions=0),
        Edit(router, "reweight", experts=[5], factor=0.25, positions=0),
    ]
    found = served(device, model).prompt(PATHS[1], sites=[chosen, weights], edits=edits).activations
    meant = Engine(mixture_model("softmax of the chosen")).prompt(PATHS[1], sites=[chosen, weights], edits=edits).activations
    assert torch.equal(found[chosen], meant[chosen]) and 5 in found[chosen][0] and 5 not in found[chosen][1]
    assert 4 not in found[chosen][0]
    torch.testing.assert_close(found[weights], meant[weights], rtol=1e-4, atol=1e-6)
    nothing = [Edit(router, "forbid", experts=experts, positions=1) for experts in ([0, 1, 2, 3], [4, 5])]
    left = served(device, model).prompt(PATHS[1], sites=[weights], edits=nothing).activations[weights]
    assert bool((left[1] == 0).all()) and bool((left[0] > 0).any())
