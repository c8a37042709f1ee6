"""The same bits alone, in company, after forks and preemption, on any number of threads and machines.

Everything by torch.equal, or by digests of all bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.gradients import derivatives
from replaylens.engine.gradients import gradients as metrics
from replaylens.engine.gradients.branches import tape as tape_of_branch
from replaylens.engine.gradients.derivatives import HostProducts
from replaylens.engine.gradients.gradients import Divergence, Gradients
from replaylens.engine.model.config import Latent, MixtureConfig, ModelConfig, Routing
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.doctor import digest, numbers
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.engine.gradients.reference import difference, of_decoder
from tests.toy_model import SHAPE, VOCAB, engine, random_model

METRIC = (3, 8)
SITES = ["S", "T", "C", "blocks.0.attn.hook_pattern", "blocks.1.attn.q.hook_out", "blocks.1.mlp.out.hook_in", "embed.hook_out"]


def path(length: int = 40, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def truth(tokens: list[int], subject: Engine | None = None, **options: Any) -> Gradients:
    """Of a prompt, alone in a fresh engine."""
    return (subject or engine()).prompt(tokens, **options).gradients(METRIC, SITES)


def same(a: Gradients, b: Gradients) -> bool:
    assert list(a) == list(b) and a.certified and b.certified
    return a.value == b.value and all(torch.equal(a[s], b[s]) and torch.equal(a.activations[s], b.activations[s]) for s in a)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_in_company_and_after_forks() -> None:
    """A prompt among others, a fork, a fork that was forced, a fork of a longer branch, and a generated path."""
    tokens, subject = path(), engine()
    expected = truth(tokens)
    alone, *others = subject.prompts([tokens, path(9, 1), path(60, 2), tokens[:30]])
    assert same(alone.gradients(METRIC, SITES), expected)
    subject.generate(others[:2], 5)
    longer = others[2].force(tokens[30:]).force(path(3, 4))
    for branch in (alone.fork()[0], others[2].fork(at=40)[0], longer.rollback(to=40), alone.fork(at=7)[0].force(tokens[7:])):
        assert same(branch.gradients(METRIC, SITES), expected)
    generated = alone.generate(6)
    assert same(generated.gradients(METRIC, SITES), truth(generated.tokens))


def test_while_other_threads_generate() -> None:
    subject, expected = engine(), truth(path())
    root = subject.prompt(path())
    others = list(subject.prompts([path(12, seed) for seed in range(4)]))
    worker = threading.Thread(target=lambda: subject.generate(others, 40))
    worker.start()
    found = [root.gradients(METRIC, SITES) for _ in range(3)]
    worker.join()
    assert all(same(each, expected) for each in found)


@pytest.mark.parametrize("options", [dict(page_size=16), dict(max_rows=16), dict(cache_tokens=64)])
def test_any_engine_options(options: dict[str, int]) -> None:
    """Also where the branch had to give up its pages to others."""
    subject = engine(**options)
    branch = subject.prompt(path())
    pushed = subject.prompt(path(60, 5)) if "cache_tokens" in options else None
    assert pushed is None or branch.lane.computed < branch.length  # preempted
    assert same(branch.gradients(METRIC, SITES), truth(path()))


def test_on_any_number_of_threads() -> None:
    """On a model and a path that are large enough for libraries to divide the work."""
    model = random_model(gain=4.0, d_model=128, d_mlp=512, d_head=32, max_positions=512)
    tokens = path(200)
    with threads(1):
        expected = truth(tokens, engine(model))
    for count in (2, 3, 4):
        with threads(count):
            assert same(truth(tokens, engine(model)), expected)
            assert torch.get_num_threads() == count


@pytest.mark.parametrize("where", ["prompt", "fork"])
def test_with_edits(where: str) -> None:
    """Edits of a prompt and of a fork, at several sites."""
    edits = [
        Edit("S", "add", torch.ones(32), [3, 9], layers=[1]),
        Edit("T", "zero", None, slice(5, 7), layers=[0]),
        Edit("C", "project_out", torch.arange(32.0), -1, layers=[0]),
    ]
    subject = engine()
    branch = subject.prompt(path(), edits=edits) if where == "prompt" else subject.prompt(path()).fork(edits=edits)[0]
    expected = truth(path(), edits=edits)
    assert same(branch.gradients(METRIC, SITES), expected)
    assert not same(truth(path()), expected)


def test_every_metric_keeps_the_promise() -> None:
    subject, other = engine(), engine()
    a, b = subject.prompts([path(), path(11, 1)])
    c, d = other.prompt(path()), other.prompt(path(11, 1))
    assert same(a.gradients(4, "S"), c.gradients(4, "S"))
    assert same(a.gradients(b, "S"), c.gradients(d.fork()[0], "S"))


def test_values_are_the_captured_rows() -> None:
    """The gradient is taken at the bits that captures, forks and dumps have."""
    branch = engine().prompt(path(), sites=[*SITES, "unembed.hook_out"], edits=[Edit("T", "zero", None, 4)])
    found = branch.gradients(METRIC)
    for site in found:
        captured = branch.activations[site]
        assert torch.equal(found.activations[site], captured[..., :40] if site.endswith("pattern") else captured)


def test_one_head() -> None:
    """Where folding heads copies nothing, the values of the pass must not change: a tape can be used again."""
    branch = engine(random_model(num_heads=1, num_kv_heads=1, d_head=32)).prompt(path(), sites=SITES)
    tape = tape_of_branch(branch, tuple(branch.gradients(METRIC)))
    first, again = (tape.gradients(lambda logits: logits[3] - logits[8], {}, True) for _ in range(2))
    assert same(first, again) and torch.equal(
        tape.value("blocks.1.attn.q.hook_out"), branch.activations["blocks.1.attn.q.hook_out"]
    )


def test_control_the_comparison_sees_rounding() -> None:
    """Negative control: autograd through the library's ops agrees to 1e-5, but has other bits."""
    ours: Gradients = truth(path())
    theirs = of_decoder(random_model(), path(), lambda logits: logits[3] - logits[8])
    site = "blocks.0.hook_in"
    assert difference(ours[site], theirs[site]) < 1e-5 and not torch.equal(ours[site], theirs[site])


def test_control_company_changes_the_bits_of_a_product() -> None:
    """Negative control: products in the company of other rows do not keep the bits, which is why a path is computed alone."""
    g = torch.randn(40, 1536, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(576, 1536, generator=torch.Generator().manual_seed(1))
    with threads(1):
        alone, together = torch.mm(weight, g[:1].t()).t(), torch.mm(weight, g.t()).t()[:1]
    assert not torch.equal(alone, together)


def test_reading_changes_nothing() -> None:
    subject = engine(record=True)
    branch: Branch = subject.prompt(path(), sites="S")
    before, events, free = branch.kv(), len(subject.trace.events), subject.runner.pool.num_free
    branch.gradients(METRIC, "STC")
    assert torch.equal(branch.kv(), before)
    assert (len(subject.trace.events), subject.runner.pool.num_free) == (events, free)
    subject.check_integrity()


LATENT = dict(latent=Latent(12, 8, query_rank=10), num_kv_heads=4, rotary_dim=4)
CAPPED: dict[str, Any] = dict(
    norm="layer", activation="gelu", gated_mlp=False, attn_softcap=5.0, logit_softcap=9.0, windows=(20, 0)
)
DIGESTS: dict[str, tuple[dict[str, Any], str]] = {
    "rms norm, silu": ({}, "059483e8e5da58fe"),
    "layer norm, gelu, soft caps, a window": (CAPPED | dict(qk_norm=True, qk_norm_span="all"), "dff1b08002a638b7"),
    "gelu by tanh, ALiBi, post-norms": (
        dict(activation="gelu_tanh", slopes=(0.5, 0.25, 0.125, 0.0625), post_norms=True),
        "46ef2da5e04e4854",
    ),
    "latent attention": (LATENT, "7973a9db7d288130"),
    "experts": (dict(mixture=MixtureConfig(6, 24, Routing(2), d_shared=16, shared_gate=True)), "7c32a19565147954"),
    "experts by a softmax over all": (
        dict(mixture=MixtureConfig(6, 24, Routing(2, normalised=False, scale=2.5))),
        "8b191c4f4cdf3c8d",
    ),
    "experts by a sigmoid": (dict(mixture=MixtureConfig(6, 24, Routing(3, kind="sigmoid"))), "accb4d6e7fb9b404"),
    "experts by sparsemixer": (
        dict(mixture=MixtureConfig(6, 24, Routing(2, kind="sparsemixer", jitter=0.1))),
        "fb4542a585203029",
    ),
}
"""a config -> the digest of its gradients, on every machine"""


def gradient_digest(**changes: Any) -> str:
    """Of a model, a path and metrics that are made of integers."""
    model = Decoder(ModelConfig(**{**SHAPE, **changes})).requires_grad_(False)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(numbers(seed, *parameter.shape) / 16)
    branch = engine(model).prompt([i * i % VOCAB for i in range(70)])
    found = [branch.gradients(metric, SITES[:4]) for metric in (METRIC, 5, Divergence(numbers(99, VOCAB)))]
    assert all(torch.isfinite(g).all() and g.any() for each in found for g in each.values())
    values = torch.tensor([each.value for each in found], dtype=torch.float32)
    return digest(torch.cat([values, *(g.flatten() for each in found for g in (*each.values(), *each.times_input().values()))]))


@pytest.mark.parametrize("what", DIGESTS)
def test_the_same_on_every_machine(what: str) -> None:
    changes, expected = DIGESTS[what]
    assert gradient_digest(**changes) == expected


LIBRARY: dict[str, tuple[Any, str, Any]] = {
    "products": (HostProducts, "linear", lambda self, g, linear: g @ linear.weight.t()),
    "batched products": (HostProducts, "batched", lambda self, x, w: x @ w),
    "sums": (HostProducts, "total", lambda self, x: x.sum(-1, keepdim=True)),
    "functions": (HostProducts, "apply", lambda self, name, x: getattr(torch, name)(x)),
    "softmax": (derivatives, "softmax", lambda x, products: x.softmax(-1)),
    "metrics": (metrics, "_log_softmax", lambda x: x.log_softmax(-1)),
}


@pytest.mark.parametrize("what", LIBRARY)
def test_the_library_gives_other_bits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(*LIBRARY[what])
    assert gradient_digest() != DIGESTS["rms norm, silu"][1]
