"""What the workbench asks of a CUDA device: conditional and norm-preserving edits, cut edges of attention, gradients, features.

Alone and in company everything has the same bits. In float32, numbers are the CPU's within a tolerance, and tokens are equal.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.engine.model.layers import Linear
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.features.features import SparseFeatures
from replaylens.gradients.attribution import attribution_patching
from replaylens.gradients.gradients import Gradients
from replaylens.probes.questions.transfer import transfer
from replaylens.weights import loading
from tests.families import hugging_face
from tests.features.tiny import write

pytestmark = pytest.mark.gpu
WIDTH = 32
PATH = torch.randint(1, 97, (75,), generator=torch.Generator().manual_seed(5)).tolist()
OTHERS = [torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40)]
VECTOR, PLANE = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
GREEDY = Sampling(ignore_eos=True)
PATTERN = "blocks.1.attn.hook_pattern"
EDITS = {
    "keep_norm": [Edit("S", "add", VECTOR, layers=[1], factor=4.0, keep_norm=True)],
    "when": [
        Edit("S", "add", VECTOR, layers=[1], factor=4.0, when=PLANE),
        Edit("S", "zero", layers=[1], positions=slice(70, 80), when=-PLANE),
        Edit("T", "add", PLANE, layers=[0], keep_norm=True, when=VECTOR),
    ],
    "edges": [
        Edit(PATTERN, "mask", positions=slice(60, None), keys=slice(0, 55), heads=[1, 2]),
        Edit(PATTERN, "zero", positions=[72, 73, 74], keys=[71, 72], heads=[0]),
        Edit("blocks.*.attn.hook_pattern", "zero", positions=74, keys=73),
    ],
    "weights": [Edit(PATTERN, "set", torch.tensor([0.4, 0.1]), positions=slice(60, None), keys=[58, 59], heads=[0, 1])],
    "tokens": [
        Edit("S", "add", VECTOR, layers=[1], factor=4.0, tokens=PATH[20:40], keep_norm=True),
        Edit(PATTERN, "mask", keys=[1, 2], positions=slice(9, None), tokens=PATH[30:50]),
    ],
    "all": [
        Edit(PATTERN, "mask", positions=[74], keys=[1, 70]),
        Edit("S", "add", VECTOR, layers=[1], keep_norm=True, when=PLANE),
        Edit("blocks.1.attn.hook_z", "zero", heads=[3]),
    ],
}


@cache
def engine(name: str, device: str, dtype: torch.dtype) -> Engine:
    return Engine(loading.load(hugging_face(name), dtype).to(device), cache_tokens=8192)


def launched(name: str, dtype: torch.dtype) -> Engine:
    """Without bursts and graphs: the host launches every pass."""
    made = Engine(loading.load(hugging_face(name), dtype).to("cuda"), cache_tokens=8192)
    made.loop.bursts = made.runner.graphs = None
    return made


def found(branch: Branch) -> dict[str, Tensor]:
    rows = {site: branch.activations[site].cpu() for site in branch.activations.sites()}
    return {"tokens": torch.tensor(branch.tokens), "kv": branch.kv().cpu()} | rows


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-30))


# ---- edits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_edits_alone_in_company_and_launched(name: str) -> None:
    """A prompt alone, launched pass by pass; the same edits of forks, beside each other and beside plain branches."""
    slow, fast = launched(name, torch.bfloat16), engine(name, "cuda", torch.bfloat16)
    assert fast.runner.graphs is not None
    fast.runner.graphs.worth = 1
    truth = {}
    for kind, edits in EDITS.items():
        branch = slow.prompt(PATH, sites="S", edits=edits).generate(12, sampling=GREEDY, final=True)
        assert branch.certified
        truth[kind] = found(branch)
        branch.release()
    plain, *others = fast.prompts([PATH, *OTHERS], sites="S")
    forks = {kind: plain.fork(edits=edits)[0] for kind, edits in EDITS.items()}
    whole = {kind: fast.prompt(PATH, sites="S", edits=edits) for kind, edits in EDITS.items()}
    fast.generate([plain, *others, *forks.values(), *whole.values()], 12, sampling=GREEDY, final=True)
    fast.check_integrity()
    for kind in EDITS:
        assert differing(truth[kind], found(forks[kind])) == [], kind
        assert differing(truth[kind], found(whole[kind])) == [], kind
        assert differing(truth[kind], found(plain)), f"control: {kind} changes nothing"
    assert fast.loop.bursts is not None
    assert any(key.edits for key in fast.loop.bursts._graphs), "conditions and lengths are part of decode graphs"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_edits_give_the_tokens_of_the_cpu(name: str) -> None:
    there, here = engine(name, "cuda", torch.float32), engine(name, "cpu", torch.float32)
    for kind, edits in EDITS.items():
        a, b = (
            served.prompt(PATH, sites="S", edits=edits).generate(8, sampling=GREEDY, final=True) for served in (there, here)
        )
        assert a.tokens == b.tokens, kind
        assert max(apart(a.activations[site], b.activations[site]) for site in b.activations.sites()) < 1e-4, kind


def test_cells_of_a_grid_with_cut_edges() -> None:
    """Variants start at their own layer, in one pass, with the bits of each edit alone."""
    served = engine("llama", "cuda", torch.bfloat16)
    cells = [(f"blocks.{layer}.attn.hook_pattern", head) for layer in (0, 2) for head in (0, 3)]
    variants = [[Edit(site, "mask", positions=74, keys=slice(0, 60), heads=[head])] for site, head in cells]
    variants += [EDITS["keep_norm"], EDITS["when"]]
    logits = served.logits_under(PATH, variants)
    for edits, row in zip(variants, logits, strict=True):
        assert torch.equal(row, served.logits(PATH, edits=edits))
    assert len({tuple(row.tolist()) for row in logits}) == len(variants), "control: the edits differ"


# ---- gradients ----------------------------------------------------------------------------------------------------------


def gradients(branch: Branch, metric: Any = (3, 8)) -> Gradients:
    within = "blocks.1.mlp.hook_post" if branch.engine.config.mixture is None else "blocks.1.mlp.gate.hook_out"
    return branch.gradients(metric, ["S", "T", "C", "blocks.1.attn.hook_q", "blocks.1.attn.hook_z", within])


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma2", "qwen3", "gpt-oss"])
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    """In float32 within 1e-4; the same bits in company and after a fork."""
    there, here = engine(name, "cuda", torch.float32), engine(name, "cpu", torch.float32)
    mine, truth = gradients(there.prompt(PATH)), gradients(here.prompt(PATH))
    assert mine.certified and abs(mine.value - truth.value) < 1e-4
    assert {site: apart(mine[site], truth[site]) for site in truth if apart(mine[site], truth[site]) > 1e-4} == {}
    for branch in (there.prompts([*OTHERS, PATH])[-1], there.prompt([*PATH, 5, 6]).fork(at=len(PATH))[0]):
        again = gradients(branch)
        assert again.value == mine.value and all(torch.equal(again[site], mine[site]) for site in mine)


def test_gradients_in_bfloat16() -> None:
    """The same bits in company; the direction of the CPU's gradients for the same rounded weights."""
    served = engine("llama", "cuda", torch.bfloat16)
    rounded = Engine(loading.load(hugging_face("llama"), torch.bfloat16).float(), cache_tokens=2048)
    edits = [Edit("S", "add", VECTOR, layers=[1], keep_norm=True), Edit("T", "zero", positions=slice(9, 12), layers=[0])]
    for own in ([], edits):
        mine, truth = gradients(served.prompt(PATH, edits=own)), gradients(rounded.prompt(PATH, edits=own))
        (fork,) = served.prompts([*OTHERS, PATH])[-1].fork(edits=own)
        again = gradients(fork)
        assert mine.certified and all(torch.equal(again[site], mine[site]) for site in mine)
        likeness = {site: torch.cosine_similarity(mine[site].flatten(), truth[site].flatten(), 0) for site in truth}
        assert min(map(float, likeness.values())) > 0.95, likeness


def test_rows_of_a_backward_product_do_not_depend_on_company() -> None:
    """At the shape of a large model. Control: the library's product of one row has other bits."""
    from replaylens.gradients.cuda import KernelProducts  # needs triton, which tests/kernels must import first

    linear = Linear(4096, 14336, bias=False).to("cuda", torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        linear.weight.normal_(0, 0.02, generator=generator)
        g = torch.randn(300, 14336, generator=generator, device="cuda")
        products = KernelProducts()
        together = products.linear(g, linear)
        assert products.certified and together.dtype == torch.float32
        for some in (slice(0, 1), slice(7, 40), slice(3, 132)):
            assert torch.equal(products.linear(g[some], linear), together[some])
        library = g.bfloat16() @ linear.weight.t()
        assert not torch.equal(g[:1].bfloat16() @ linear.weight.t(), library[:1])
    assert apart(together, library) < 0.05


def test_attribution_and_its_real_effects() -> None:
    clean, corrupt = PATH[:20], [*PATH[:7], 11, *PATH[8:20]]
    there, here = (engine("llama", device, torch.float32) for device in ("cuda", "cpu"))
    mine, truth = (attribution_patching(e, clean, corrupt, (3, 8), "S", compare=True) for e in (there, here))
    assert mine.certified and apart(mine.estimate, truth.estimate) < 1e-3
    assert mine.real is not None and truth.real is not None and apart(mine.real, truth.real) < 1e-3


# ---- features -----------------------------------------------------------------------------------------------------------


def test_features_of_branches(tmp_path: Path) -> None:
    """Of rows kept on the host or on the device; edits and generation with a feature held at zero."""
    served = engine("llama", "cuda", torch.bfloat16)
    folder = write(tmp_path, "standard", hook="blocks.1.hook_resid_post")
    features, host = SparseFeatures.load(folder, device="cuda"), SparseFeatures.load(folder)
    a, b = (served.prompt(PATH, sites=["blocks.1.hook_resid_post"], keep=keep) for keep in ("host", "device"))
    mine, other = features.of(a), features.of(b)
    assert torch.equal(mine.values, other.values) and torch.equal(mine.indices, other.indices)
    torch.testing.assert_close(mine.dense(), host.of(a).dense(), rtol=1e-4, atol=1e-4)
    assert torch.equal(features.encode(b.activations["blocks.1.hook_resid_post"][30:31]).dense()[0], mine.dense()[30])
    (top,) = mine.strongest(1)
    (fork,) = b.fork(edits=features.edits(b, ablate=[top]))
    held = features.generate(a, 3, set={top: 0.0}, sampling=GREEDY)
    assert fork.certified and held.certified and held.length == len(PATH) + 3
    served.forest.compute([fork.lane])
    before, after = mine.columns([top]), features.of(fork).columns([top])
    assert float(after.norm()) != float(before.norm()), "control: the edit changes the feature"
    served.check_integrity()


def test_the_untrained_control_runs_beside_a_model_in_bfloat16() -> None:
    """Its rotary tables stay in float32."""
    engine = Engine.load("coin-plain", device="cuda")
    run = engine.replay(tasks.get("coin")(rendering="steps", flips=(2, 4)).examples(24), sites="S", drafter="ngram")
    report = transfer(run, "implied", layers=[1], engine=engine)
    assert any(line["what"].endswith("minus untrained model") for line in report.lines)
