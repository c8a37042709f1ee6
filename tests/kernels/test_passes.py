"""A pass in a CUDA device's arithmetic, kernel by kernel: the model's function, with rows and keys in the right place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder, Mixture
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes import graphs
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps, FastHeadOps, HeadOps, device_rows
from replaylens.engine.proof import doctor_cuda
from replaylens.engine.proof.doctor import Finding
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.assembly import replay_on_devices
from replaylens.engine.serving.branch import Branch
from replaylens.extras import ranks as ranks_file
from replaylens.extras.ranks import Follower, Ranks, SplitWeight
from replaylens.weights.loading import load
from tests.devices import swept
from tests.engine.passes.packed import alone
from tests.engine.reference import decoder, same_bits
from tests.families import HYBRIDS, MORE, hugging_face
from tests.kernels.interpreted import DEVICES, served
from tests.mixtures import ROUTINGS, mixture_model
from tests.toy_model import random_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, rotary_dim=8)
PATHS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8]]


def whole(model: Decoder, path: list[int]) -> torch.Tensor:
    """The residual stream of a path in plain PyTorch: [tokens, d_model]."""
    return model(torch.tensor(path, device=DEVICE), torch.arange(len(path), device=DEVICE), SequenceOps([len(path)]))


@pytest.mark.slow
def test_prefill_then_one_row_each():
    """Three branches on pages of two positions: first all tokens but the last of each, then the last ones together."""
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(DEVICE)
    pool = PagePool(16, 2)
    cache = KVCache(CONFIG, pool, torch.float32, DEVICE)
    cache.data = torch.zeros(2, 2, 34, 2, 8, device=DEVICE)  # the device's layout, also in the interpreter
    tables = [PageTable() for _ in PATHS]
    for table, path in zip(reversed(tables), reversed(PATHS), strict=True):  # page numbers out of order
        pool.reserve(table, 0, len(path))

    def run(segments: list[Segment]) -> torch.Tensor:
        batch = Batch(segments, pool, DEVICE)
        ops = CanonicalCudaOps(cache, device_rows(batch, cache))
        return model(batch.tokens, batch.positions, ops)[: batch.num_rows]

    first = run([Segment(table, 0, path[:-1]) for table, path in zip(tables, PATHS, strict=True)])
    last = run([Segment(table, len(path) - 1, path[-1:]) for table, path in zip(tables, PATHS, strict=True)])
    truth = [whole(model, path) for path in PATHS]
    torch.testing.assert_close(first, torch.cat([rows[:-1] for rows in truth]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, torch.stack([rows[-1] for rows in truth]), rtol=1e-4, atol=1e-5)
    held = {slot for table, path in zip(tables, PATHS, strict=True) for slot in pool.slots(table, 0, len(path))}
    assert {i for i in range(34) if cache.data[:, :, i].any()} == held, "keys and values went elsewhere"


# ---- families ---------------------------------------------------------------------------------------------------------
# The wirings of all families in a CUDA device's arithmetic: the same decoder with other ops gives the model's function.

PATH = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


def logits(name: str, path: list[int] = PATH) -> torch.Tensor:
    """The logits of all but the last token in one pass, and of the last in another, on pages of two positions."""
    model = load(hugging_face(name)).to(DEVICE)
    config, pool, table = model.config, PagePool(8, 2), PageTable()
    cache = KVCache(config, pool, torch.float32, DEVICE, kernels=True)
    pool.reserve(table, 0, len(path))
    rows = []
    for start, end in ((0, len(path) - 1), (len(path) - 1, len(path))):
        batch = Batch([Segment(table, start, path[start:end])], pool, DEVICE)
        ops = CanonicalCudaOps(cache, device_rows(batch, cache))
        rows.append(model.logits(model(batch.tokens, batch.positions, ops)[: batch.num_rows], ops))
    return torch.cat(rows).cpu()


PLAIN = [name for name in MORE if name not in HYBRIDS]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_a_pass_gives_hugging_faces_logits(name: str) -> None:
    """The path is longer than the windows of seven positions."""
    (theirs,) = alone(hugging_face(name), [torch.tensor(PATH)])
    torch.testing.assert_close(logits(name), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "qwen3-next" else pytest.param(n, marks=pytest.mark.slow) for n in HYBRIDS])
@torch.no_grad()
def test_a_hybrid_has_the_bits_of_a_cpu(name: str, same: Callable[[Tensor, Tensor], None]) -> None:
    path = PATH[:5]
    same(logits(name, path), Engine(load(hugging_face(name))).prompt(path).logits(range(len(path))))


@pytest.mark.slow
def test_states_of_recurrent_layers_are_shown_but_not_edited(same: Callable[[Tensor, Tensor], None]) -> None:
    engine, site, paths = served(DEVICE, decoder("mamba2")), "blocks.0.mixer.hook_state", [PATH[:6], PATH[2:5]]
    expected = Engine(decoder("mamba2")).prompts(paths, sites=[site])
    for ours, theirs in zip(engine.prompts(paths, sites=[site]), expected, strict=True):
        same(ours.activations[site].cpu(), theirs.activations[site])
        same(ours.state(0, 1).cpu(), theirs.state(0, 1))
    with pytest.raises(BadEdit, match="on CUDA: recurrent states are not made there"):
        engine.prompt(PATH[:3], edits=[Edit(site, "zero")])


# ---- mixtures of experts ----------------------------------------------------------------------------------------------
# Passes with mixtures of experts in a CUDA device's arithmetic: the model's function, whatever runs beside a row.

TWO_PATHS = [[3, 1, 4], [6, 5]]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ROUTINGS])
def test_a_path_alone_and_in_company(name: str) -> None:
    """The bits are the same, also when every site of the mixture is captured; the function is plain PyTorch's."""
    model = mixture_model(name, device=DEVICE)
    whole = passed(model, TWO_PATHS)
    tap = PassTap(router_sites(model))
    assert torch.equal(passed(model, TWO_PATHS, tap), whole), "capture moved bits"
    chosen = [value for site, value in tap.values.items() if site.endswith("expert_indices")]
    assert len(torch.cat(chosen).unique(dim=0)) > 1, "all rows go to the same experts: nothing is shown"
    start = 0
    for path in TWO_PATHS:
        end = start + len(path)
        assert torch.equal(passed(model, [path]), whole[start:end])
        meant = model(torch.tensor(path, device=DEVICE), torch.arange(len(path), device=DEVICE), SequenceOps([len(path)]))
        torch.testing.assert_close(whole[start:end], meant, rtol=2e-4, atol=2e-5)
        start = end
    torch.testing.assert_close(passed(model, TWO_PATHS, exact=False), whole, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_the_doctor_examines_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of a mixture is compared, and products whose depth is split differ. A product that depends on the rows fails."""
    monkeypatch.setattr(doctor_cuda, "ROWS", (1, 3))
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


@pytest.mark.slow
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
    found = served(device, model).prompt(TWO_PATHS[1], sites=[chosen, weights], edits=edits).activations
    meant = (
        Engine(mixture_model("softmax of the chosen")).prompt(TWO_PATHS[1], sites=[chosen, weights], edits=edits).activations
    )
    assert torch.equal(found[chosen], meant[chosen]) and 5 in found[chosen][0] and 5 not in found[chosen][1]
    assert 4 not in found[chosen][0]
    torch.testing.assert_close(found[weights], meant[weights], rtol=1e-4, atol=1e-6)
    nothing = [Edit(router, "forbid", experts=experts, positions=1) for experts in ([0, 1, 2, 3], [4, 5])]
    left = served(device, model).prompt(TWO_PATHS[1], sites=[weights], edits=nothing).activations[weights]
    assert bool((left[1] == 0).all()) and bool((left[0] > 0).any())


# ---- latent attention -------------------------------------------------------------------------------------------------
# Passes with latent attention and with sinks in a CUDA device's arithmetic: company, edits, keys that are shown.

ATTN = "blocks.1.attn."
SHORT_PATH = [3, 14, 15, 92]
SHOWN = {"deepseek-v3": [ATTN + "hook_k", ATTN + "hook_v", ATTN + "hook_kv_latent"], "gpt-oss": []}
EDITS = {
    "deepseek-v3": [
        Edit(ATTN + "hook_kv_latent", "add", torch.ones(13), [1]),
        Edit(ATTN + "hook_rot_k", "zero", positions=[2]),
        Edit(ATTN + "hook_pattern", "mask", positions=[3], keys=[0, 2], heads=[1, 4]),
    ],
    "gpt-oss": [Edit(ATTN + "hook_pattern", "zero", positions=[3], keys=[0, 2], heads=[1, 4])],
}


def agree(a: Branch, b: Branch) -> bool:
    """Whether tokens, KV and captured rows have the same bits."""
    rows = (torch.equal(a.activations[site], b.activations[site]) for site in a.activations.sites())
    return a.tokens == b.tokens and torch.equal(a.kv(), b.kv()) and all(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", swept(["deepseek-v3", "gpt-oss"], "gpt-oss"))
def test_edits_and_company(name: str, device: str) -> None:
    """Edits of latents, rotated keys and edges: what a CPU computes, with the same bits beside other requests."""
    sites, edits = ["S", *SHOWN[name]], EDITS[name]
    engine = served(device, decoder(name))
    alone = engine.prompt(SHORT_PATH, sites=sites, edits=edits)
    engine.prefix.clear()
    beside = engine.prompts([SHORT_PATH[::-1], SHORT_PATH], sites=sites, edits=edits)[1]
    assert agree(alone, beside)
    meant = Engine(decoder(name)).prompt(SHORT_PATH, sites=sites, edits=edits)
    plain = Engine(decoder(name)).prompt(SHORT_PATH, sites=sites)
    for site in meant.activations.sites():
        torch.testing.assert_close(alone.activations[site], meant.activations[site], rtol=1e-4, atol=2e-5)
    last = "blocks.1.hook_out"
    assert not torch.allclose(meant.activations[last], plain.activations[last], atol=1e-3), "control: the edits matter"
    assert torch.equal(alone.kv().cpu()[1, 1, 0, 0, :13], alone.activations[SHOWN[name][2]][1]) if SHOWN[name] else True


@pytest.mark.slow
@torch.no_grad()
def test_the_doctor_examines_products_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways round, with a control that differs. A product that depends on the rows fails."""
    monkeypatch.setattr(doctor_cuda, "ROWS", (1, 3))
    model = decoder("deepseek-v3")
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    found: list[Finding] = []
    doctor_cuda._by_head(model, random, found)
    assert all(f.passed for f in found) and len({f.shape for f in found if not f.control}) == 3
    assert any(f.control and not f.equal for f in found), "the control has no teeth"
    honest = doctor_cuda.HeadOps.by_head
    monkeypatch.setattr(doctor_cuda.HeadOps, "by_head", lambda self, x, weight: honest(self, x, weight) * (1 + 1e-6 * len(x)))
    found.clear()
    doctor_cuda._by_head(model, random, found)
    assert any(not f.passed for f in found)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_through_latents(device: str) -> None:
    """The CPU's numbers, through the keys and values that products by head show."""
    sites = ["S", "blocks.0.attn.hook_kv_latent"]
    engine = served(device, decoder("deepseek-v3"))
    found, truth = (each.prompt(SHORT_PATH).gradients((3, 8), sites) for each in (engine, Engine(decoder("deepseek-v3"))))
    assert found.certified
    for site in truth:
        torch.testing.assert_close(found[site], truth[site], rtol=1e-3, atol=1e-4 * float(truth[site].abs().max()))


# ---- ranks ------------------------------------------------------------------------------------------------------------
# Products divided over ranks in a CUDA device's arithmetic. The ranks are in this process: what they compute is the same.


class Near(Follower):
    """A follower that is asked directly."""

    def __init__(self, device: str) -> None:
        super().__init__(None, torch.device(device))
        self.given: list[Tensor] = []

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self.given.pop(0)
        assert found.shape == shape and found.dtype == dtype
        return found


class NearRanks(Ranks):
    """Ranks within this process."""

    def _start(self) -> None:
        self.near = [Near(str(self.device)) for _ in range(self.size)]

    def ask(
        self,
        words: list[int],
        tensors: list[Tensor],
        split: SplitWeight,
        leading: tuple[int, ...] | None,
        dtype: torch.dtype,
        own: Callable[[], Tensor] | None,
        activated: bool = False,
        only: int | None = None,
    ) -> dict[int, Tensor]:
        found = {} if own is None else {0: own()}
        for rank in [only] if only is not None else [r for r in range(1, self.size) if split.columns(r)]:
            self.near[rank].given = [x.cpu() for x in tensors]
            found[rank] = self.near[rank]._computed(words).cpu()
            assert leading is None or (*leading, split.columns(rank, activated)) == found[rank].shape
            self.answers += 1
        return found


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [None, "softmax of all, a shared expert with a gate"])
def test_products_over_ranks_have_the_bits_of_one(kind: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "UNIT", 4)
    monkeypatch.setattr(ranks_file, "row_ops", lambda device, fast: FastHeadOps() if fast else HeadOps())
    model = random_model() if kind is None else mixture_model(kind)
    ranks = NearRanks(3, device, torch.float32)
    engines = [served(device, made) for made in (model, ranks.take(load(model)))]
    branches = [engine.prompt(PATHS[1], sites="ST").generate(1, window=1) for engine in engines]
    assert ranks.answers > 30 and branches[0].tokens == branches[1].tokens
    assert torch.equal(branches[0].kv(), branches[1].kv())
    for site, rows in branches[0].activations.items():
        assert same_bits(rows, branches[1].activations[site])


# ---- devices ----------------------------------------------------------------------------------------------------------
# Layers over devices as graphs, one per device. A stand-in for CUDA's graphs launches the same again.


class Again:
    """A recorded step: a replay launches it again, into the tensors that it returned first."""

    replays = 0

    def __init__(self, step: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> None:
        self.step, self.found = step, step()

    def replay(self) -> None:
        type(self).replays += 1
        residual, values = self.step()
        self.found[0].copy_(residual)
        for site, value in values.items():
            self.found[1][site].copy_(value)

    def pool(self) -> None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax of all, a shared expert with a gate", None])
def test_graphs_of_layers_on_devices(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rows and an edit, at a shape that occurs again."""
    monkeypatch.setattr(graphs, "recorded", lambda step, *_: (again := Again(step), again.found))
    model = random_model() if kind is None else mixture_model(kind)
    edits = [Edit("blocks.1.hook_in", "add", torch.linspace(-1, 1, model.config.d_model), [1])]
    found = []
    for stages in (False, True):
        engine = served("cpu", load(model, device=("cpu", "cpu")) if stages else model)
        if stages:
            engine.runner.cache = engine.runner._cache(engine.runner.pool, kernels=True)
            replay_on_devices(engine.runner)
            assert isinstance(engine.runner.graphs, graphs.PlacedGraphs)
            for part in engine.runner.graphs.parts:
                part.worth = 1
        branches = [engine.prompt(path, sites="ST", edits=edits).generate(1, window=1) for path in (PATHS[1], PATHS[1][::-1])]
        found.append(
            [x for b in branches for x in (torch.tensor(b.tokens), b.kv(), *(b.activations[s] for s in b.activations))]
        )
    assert Again.replays >= 8
    assert all(same_bits(ours, theirs) for ours, theirs in zip(*found, strict=True))
