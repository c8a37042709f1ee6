"""Capture, edits and lenses inside bursts and graphs on a CUDA device equal those of passes launched one by one."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.weights import loading
from tests.families import hugging_face

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "gpt2", "gemma2")
PROMPTS = [torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 10, 40, 75)]
DRAWN = Sampling(temperature=0.7, seed=5, ignore_eos=True)
GREEDY = Sampling(ignore_eos=True)


def engine(name: str, **options: Any) -> Engine:
    return Engine(loading.load(hugging_face(name), torch.bfloat16).to("cuda"), cache_tokens=8192, **options)


def launched(name: str) -> Engine:
    """Without bursts and graphs: the host launches every pass, and every token has its own pass."""
    made = engine(name)
    made.loop.bursts = made.runner.graphs = None
    return made


def found(branch: Branch) -> dict[str, Any]:
    rows = {site: branch.activations[site].cpu() for site in branch.activations.sites()}
    return {"tokens": torch.tensor(branch.tokens), "kv": branch.kv().cpu()} | rows


def same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what differs, bit for bit."""
    bits = lambda x: x.contiguous().view(torch.uint8)  # noqa: E731 (NaN marks a row without successor)
    assert a.keys() == b.keys()
    return [name for name in a if a[name].shape != b[name].shape or not torch.equal(bits(a[name]), bits(b[name]))]


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    yield launched(request.param), engine(request.param)


NORMS = "blocks.1.ln1.hook_scale,blocks.1.ln2.hook_normalized,ln_final.hook_scale,ln_final.hook_normalized"


@pytest.mark.parametrize("sites", ["S", "STC", "Z", "STCZ", "blocks.1.attn.hook_q,ln_final.hook_out,unembed.hook_out", NORMS])
def test_captured_bursts_give_the_rows_of_launched_passes(pair: tuple[Engine, Engine], sites: str) -> None:
    slow, fast = pair
    for sampling in (GREEDY, DRAWN):
        outcomes = []
        for served in (slow, fast):
            branches = served.prompts(PROMPTS, sites=sites, targets=[5, 7] if "Z" in sites else ())
            served.generate(branches, 37, sampling=sampling, final=True)
            outcomes.append([found(branch) for branch in branches])
            assert branches[0].activations.positions() == list(range(branches[0].length))
            if served is fast:
                served.check_integrity()
            for branch in branches:
                branch.release()
        assert [same(a, b) for a, b in zip(*outcomes, strict=True)] == [[]] * len(PROMPTS)
    assert fast.loop.bursts is not None
    assert any(key.sites or key.lenses for key in fast.loop.bursts._graphs), "no captured graph was used"


def test_rows_of_a_burst_are_those_of_a_prompt_pass(pair: tuple[Engine, Engine]) -> None:
    _, fast = pair
    (branch,) = fast.prompts([PROMPTS[3]], sites="STC")
    branch.generate(30, sampling=GREEDY, final=True)
    again = fast.prompt(branch.tokens, sites="STC")
    assert same(found(branch), found(again)) == []


EDITS = {
    "add": lambda d: [Edit("S", "add", torch.linspace(-1, 1, d), layers=[1], factor=0.7)],
    "set at two places": lambda d: [Edit("T", "set", torch.randn(2, d), positions=[1, 80], layers=[0])],
    "zero": lambda d: [Edit("C", "zero", positions=slice(2, None), layers=[0, 1])],
    "project": lambda d: [Edit("S", "project_out", torch.randn(2, d), layers=[0, 1])],
    "resample": lambda d: [Edit("S", "resample", torch.randn(5, d), layers=[1], seed=3)],
    "heads": lambda d: [
        Edit("blocks.*.attn.hook_z", "zero", heads=[1], positions=slice(2, None)),
        Edit("blocks.1.attn.hook_z", "zero", positions=slice(4, 70)),
        Edit("blocks.1.attn.hook_q", "zero", heads=[0, 2]),
    ],
    "lengths and conditions": lambda d: [
        Edit("S", "add", torch.randn(d), layers=[1], factor=3.0, keep_norm=True, when=torch.randn(d)),
        Edit("T", "zero", positions=slice(20, None), layers=[0], when=torch.randn(d)),
    ],
    "several": lambda d: [
        Edit("S", "add", torch.ones(d), layers=[1]),
        Edit("S", "project_out", torch.linspace(0, 1, d), layers=[1]),
        Edit("S", "set", torch.randn(d), positions=slice(60, 90), layers=[1]),
        Edit("S", "add", torch.ones(d), layers=[1], factor=-0.3),
    ],
}


@pytest.mark.parametrize("kind", EDITS)
def test_edits_in_bursts_and_graphs_give_the_bits_of_launched_passes(pair: tuple[Engine, Engine], kind: str) -> None:
    """Edited branches run beside unedited ones, with and without capture."""
    torch.manual_seed(1)
    edits = EDITS[kind](pair[0].config.d_model)
    outcomes = []
    for served in pair:
        if served.runner.graphs is not None:
            served.runner.graphs.worth = 1
        plain, edited = served.prompts(PROMPTS[3:], sites="S"), served.prompts(PROMPTS[3:], sites="S", edits=edits)
        bare = served.prompts(PROMPTS[3:], edits=edits)
        served.generate([*plain, *edited, *bare], 25, sampling=GREEDY, final=True)
        if served is pair[1]:
            served.check_integrity()
        assert [b.tokens for b in bare] == [b.tokens for b in edited]
        assert all(torch.equal(a.kv(), b.kv()) for a, b in zip(bare, edited, strict=True))
        outcomes.append([found(branch) for branch in (*plain, *edited)])
    assert [same(a, b) for a, b in zip(*outcomes, strict=True)] == [[]] * 4
    assert same(outcomes[1][0], outcomes[1][2]), "the edit changed nothing"
    assert any(key.edits for key in pair[1].loop.bursts._graphs), "no edited graph was used"


def test_the_program_on_the_host_gives_the_same_edits() -> None:
    """Edits in launched CUDA passes give the same tokens as the CPU's own implementation, in float32."""
    model = hugging_face("llama")
    edits = [Edit("S", "add", torch.linspace(-2, 2, 32), layers=[1])]
    there = Engine(loading.load(model, torch.float32).to("cuda"), cache_tokens=2048)
    here = Engine(loading.load(model, torch.float32), cache_tokens=2048)
    if here.config.d_model != 32:
        edits = [Edit("S", "add", torch.linspace(-2, 2, here.config.d_model), layers=[1])]
    both = [served.prompt(PROMPTS[4], edits=edits).generate(12, sampling=GREEDY).tokens for served in (there, here)]
    assert both[0] == both[1]


def test_variants_have_the_bits_of_their_edits_alone(pair: tuple[Engine, Engine]) -> None:
    """Cells of a grid start at their own layer, from rows that were captured."""
    _, fast = pair
    d, path = fast.config.d_model, PROMPTS[3]
    variants = [[Edit("S", "add", torch.linspace(-1, 1, d), layers=[layer], positions=p)] for layer in (0, 1) for p in (0, 17)]
    variants += [[Edit("blocks.1.attn.hook_z", "zero", heads=[head])] for head in range(2)]
    found = fast.logits_under(path, variants)
    for edits, logits in zip(variants, found, strict=True):
        assert torch.equal(logits, fast.logits(path, edits=edits))
    assert len({tuple(logits.tolist()) for logits in found}) == len(variants), "control: the edits differ"
    fast.check_integrity()


def test_rows_may_stay_on_the_device(pair: tuple[Engine, Engine]) -> None:
    _, fast = pair
    here, there = (fast.prompt(PROMPTS[4], sites="STZ", keep=keep).generate(20, sampling=GREEDY) for keep in ("host", "device"))
    assert all(there.activations[site].is_cuda and not here.activations[site].is_cuda for site in here.activations.sites())
    assert same(found(here), found(there)) == []


@pytest.mark.parametrize("positions", ["last", "prompt", "response", "response[:9]", "all[::4]", "prompt[-3:]"])
def test_only_chosen_positions_are_kept(pair: tuple[Engine, Engine], positions: str) -> None:
    _, fast = pair
    for sites in ("S", "SZ"):
        whole = fast.prompt(PROMPTS[4], sites=sites).generate(40, sampling=GREEDY, final=True)
        beside = fast.prompts(PROMPTS[:2])
        part = fast.prompt(PROMPTS[4], sites=sites, positions=positions)
        fast.generate([*beside, part], 40, sampling=GREEDY, final=True)
        kept = part.activations.positions()
        everything = list(range(whole.length))
        n = len(PROMPTS[4])
        expected = {
            "last": [n - 1], "prompt": everything[:n], "response": everything[n:], "response[:9]": everything[n : n + 9],
            "all[::4]": everything[::4], "prompt[-3:]": everything[n - 3 : n],
        }[positions]  # fmt: skip
        assert kept == expected
        for site in part.activations.sites():
            truth = whole.activations[site][kept]
            assert torch.equal(part.activations[site].view(torch.uint8), truth.contiguous().view(torch.uint8)), site


def test_a_small_buffer_makes_generation_wait_and_loses_nothing() -> None:
    small, large = engine("llama", capture_buffer=1 << 16), engine("llama")
    outcomes = []
    for served in (small, large):
        branches = served.prompts(PROMPTS, sites="STC")
        served.generate(branches, 48, sampling=GREEDY, final=True)
        outcomes.append([found(branch) for branch in branches])
    assert [same(a, b) for a, b in zip(*outcomes, strict=True)] == [[]] * len(PROMPTS)
    assert small.runner.host_copy.ring.size == 1 << 16


def test_one_long_lived_branch_does_not_keep_the_rows_of_all() -> None:
    served = engine("llama")
    branches = list(served.prompts(PROMPTS * 4, sites="S"))
    served.generate(branches, 32, sampling=GREEDY, final=True)
    kept, truth = branches.pop(), None
    truth = found(kept)
    for branch in branches:
        branch.release()
    branches.clear()
    del branch
    gc.collect()
    other = served.prompt(PROMPTS[0], sites="S").generate(20, sampling=GREEDY)
    assert other.length and same(found(kept), truth) == []
    for chunk in kept.activations.chunks:
        block = getattr(chunk.rows, "_block", None)
        assert getattr(chunk.rows, "_burst", None) is None
        assert block is None or block._live * 4 >= block.num_rows  # the rest of a prompt may have its own pass


def test_patterns_and_scores_are_refused_and_left_out(pair: tuple[Engine, Engine]) -> None:
    """The kernel never stores them. A cache without a filter has every other site."""
    _, fast = pair
    for site in ("blocks.1.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"):
        with pytest.raises(UnsupportedModel, match="patterns or scores on CUDA"):
            fast.prompt(PROMPTS[3], sites=[site])
    _, cache = fast.run_with_cache([PROMPTS[3]], return_cache_object=False)
    assert not any(name.endswith(("hook_pattern", "hook_attn_scores")) for name in cache)
    x, scale, plain = (cache[f"blocks.1.ln1.{part}"].float() for part in ("hook_in", "hook_scale", "hook_normalized"))
    assert float((plain * scale - x).std(-1).max()) < 0.05, "up to the mean, which a LayerNorm subtracts"
    fast.check_integrity()
