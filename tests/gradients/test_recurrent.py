"""Gradients through the recurrent layers of hybrids: against float64, the same bits anywhere, wrong derivatives found."""

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import Engine, attribution_patching, errors
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from replaylens.gradients.backward import RULES
from replaylens.gradients.gradients import Gradients
from replaylens.kernels import cpu_recurrent, threads
from replaylens.weights.loading import load
from replaylens.workbench.lens import fit_jacobian_lens
from tests.engine.passes.packed import sequences
from tests.engine.reference import decoder
from tests.families import HYBRIDS, hugging_face
from tests.gradients.reference import difference, of_decoder
from tests.hostile import divide_everything
from tests.workbench.test_jacobian import own_jacobians

KINDS = ("lfm2", "qwen3-next", "mamba2")
"""gated convolutions, a gated delta net with gated attention and experts, Mamba-2"""
MIXER = "blocks.0.mixer."
EDITED = {"lfm2": "conv.hook_out", "qwen3-next-dense": "hook_v", "mamba2": "hook_v"}
"""a model of each kind, and a site of its mixer"""


def metric(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[5] - 0.3 * logits[7]


def tokens(length: int, seed: int = 3) -> list[int]:
    return sequences((length,), seed=seed)[0].tolist()


def errors_of(name: str, path: list[int], edits: list[Edit] | None = None) -> dict[str, float]:
    """The relative error at every site that has a gradient, against autograd through our decoder in float64."""
    subject = Engine.load(hugging_face(name), check=False)
    without = ("hook_pattern", "hook_state", "hook_choice")
    sites = [s for s in subject.sites.in_order() if s not in subject.sites.read_only and not s.endswith(without)]
    ours = subject.prompt(path, edits=edits or []).gradients(metric, sites)
    truth = of_decoder(load(hugging_face(name)).double(), path, metric, place_all(edits or [], subject.sites, len(path)))
    assert set(ours) == set(truth) == set(sites)
    assert all(not ours[site].any() for site in sites if not truth[site].any())
    return {site: difference(ours[site], truth[site]) for site in sites if truth[site].any()}


@pytest.mark.parametrize("name", HYBRIDS)
def test_agrees_with_float64_at_every_site(name: str) -> None:
    """Layers with a mixer and an attention, without an MLP, of an MLP alone; norms before and after; steps with bounds."""
    assert max(errors_of(name, tokens(23)).values()) < 1e-5


@pytest.mark.parametrize("length", [1, 2, 64, 65, 140])
@pytest.mark.parametrize("name", KINDS)
def test_agrees_over_several_chunks(name: str, length: int) -> None:
    assert max(errors_of(name, tokens(length)).values()) < 2e-5


@pytest.mark.parametrize("name", EDITED)
def test_edits_agree_with_autograd(name: str) -> None:
    """Rows that are set pass nothing on, scaled ones their share, from then on and for later rows."""
    given = Engine(decoder(name)).prompt([3], sites=[MIXER + "conv.hook_in"]).activations[MIXER + "conv.hook_in"]
    edits = [
        Edit(MIXER + EDITED[name], "scale", factor=0.5, positions=slice(2, 5)),
        Edit(MIXER + "conv.hook_in", "set", torch.linspace(-1, 1, given.shape[-1]), positions=7),
        Edit(MIXER + "hook_gate", "scale", factor=-1.5, positions=slice(9, None)),
    ]
    assert max(errors_of(name, tokens(20), edits).values()) < 1e-5


def _only_its_own(real: Any) -> Any:
    def changed(back: Any, step: Any, *g: Any) -> Any:
        alone = copy(back)
        alone.own = True
        return real(alone, step, *g)

    return changed


def _gate_closed(real: Any) -> Any:
    def changed(back: Any, step: Any, g: Any) -> Any:
        ((x, found),) = real(back, step, g)
        gate, up = found.chunk(2, dim=-1)
        return [(x, torch.cat([torch.zeros_like(gate), up], dim=-1))]

    return changed


WRONG = {
    # what is wrong: (model, kind of step, its rule from the real one)
    "a convolution of one tap": ("lfm2", "short_conv", _only_its_own),
    "nothing through the states of a delta net": ("qwen3-next", "recur", _only_its_own),
    "nothing through the states of Mamba-2": ("mamba2", "recur", _only_its_own),
    "rates that are constant": ("qwen3-next", "rates", lambda real: lambda *given: ()),
    "a gate that is constant": ("mamba2", "activate", _gate_closed),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_derivative_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kind, wrong = WRONG[what]
    monkeypatch.setitem(RULES, kind, wrong(RULES[kind]))
    assert max(errors_of(name, tokens(23)).values()) > 1e-3


# ---- bits ------------------------------------------------------------------------------------------------------------


def same(a: Gradients, b: Gradients) -> bool:
    return a.value == b.value and set(a) == set(b) and all(torch.equal(a[site], b[site]) for site in a)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_in_any_batch_and_after_forks(name: str) -> None:
    path, sites = tokens(140), ["S", "T", MIXER + "conv.hook_in"]
    alone = Engine(decoder(name)).prompt(path).gradients((3, 8), sites)
    assert alone.certified and all(g.any() for g in alone.values())
    subject = Engine(decoder(name), page_size=16, max_rows=32)
    mine, _ = subject.prompts([path[:70], tokens(50, seed=8)])
    first = mine.fork(1)[0].force(path[70:90])
    mine.generate(5)
    assert same(first.force(path[90:]).gradients((3, 8), sites), alone)
    first.generate(3)
    assert same(first.rollback(140).gradients((3, 8), sites), alone)


@pytest.mark.parametrize("name", KINDS[1:])
def test_the_same_bits_on_any_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    branch, found = Engine(decoder(name)).prompt(tokens(80)), []
    for count in (1, 3):
        with threads.within(count):
            found.append(branch.gradients(5, ["S", MIXER + "hook_k"]))
    assert same(*found)


def test_a_row_of_its_own_ignores_the_others() -> None:
    """`own`: the gradients of the last rows are those of a path on which only they have one."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(9, 2, n, generator=draw) for n in (5, 5, 3, 3))
    beta, decay = torch.rand(9, 2, generator=draw), -torch.rand(9, 2, generator=draw)
    one, all_ = (cpu_recurrent.recur_back(q, k, v, beta, decay, g, own) for own in (True, False))
    last = cpu_recurrent.recur_back(q, k, v, beta, decay, torch.cat([torch.zeros_like(g[:8]), g[8:]]), True)
    for part in ("q", "k", "v", "beta", "decay"):
        of_one, of_all, of_last = (getattr(each, part)[8] for each in (one, all_, last))
        assert torch.equal(of_one, of_last) and torch.equal(of_one, of_all) and not getattr(last, part)[:8].any()
        assert part == "q" or not torch.equal(getattr(one, part)[:8], getattr(all_, part)[:8]), "control"


# ---- what is built on them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_jacobian_lens(name: str) -> None:
    texts = [[3, 1, 4, 1, 5], [2, 6, 5]]
    fitted = fit_jacobian_lens(Engine(decoder(name)), texts, centred=False)
    exact = load(hugging_face(name)).double()
    truth = torch.cat([own_jacobians(exact, path, 0)[1:] for path in texts]).mean(0)
    eye = torch.eye(len(truth), dtype=torch.float64)
    assert (fitted.weight[0].double() + eye - truth).norm() / truth.norm() < 1e-5 and (truth - eye).norm() > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_attribution_patching_estimates_patches(name: str) -> None:
    clean, corrupt = tokens(12), tokens(12)
    corrupt[4] = (clean[4] + 1) % 97
    found = attribution_patching(Engine(decoder(name)), clean, corrupt, (3, 8), MIXER + "hook_out", compare=True)
    assert found.certified and found.correlation > 0.7
    assert not found.estimate[:, :4].any(), "rows before the difference are the same"


def test_what_has_no_gradient() -> None:
    subject = Engine(decoder("qwen3-next"))
    with pytest.raises(errors.NoGradient, match=r"mixer\.hook_state has no gradient here"):
        subject.prompt(tokens(9)).gradients((3, 4), [MIXER + "hook_state"])
    branch = subject.prompt(tokens(9), sites=[MIXER + "hook_state", "blocks.0.hook_in"])
    assert list(branch.gradients((3, 4))) == ["blocks.0.hook_in"], "a captured state is left out"
    edited = subject.prompt(tokens(9), edits=[Edit(MIXER + "hook_state", "zero", positions=4)])
    with pytest.raises(errors.NoGradient, match=r"an edit of blocks\.0\.mixer\.hook_state. Edit mixer\.hook_read"):
        edited.gradients((3, 4), "S")
