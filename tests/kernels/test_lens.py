from dataclasses import fields, replace

import pytest
import torch

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes import cuda as cuda_lens
from replaylens.engine.passes import lens as host_lens
from replaylens.engine.records import LensSpec
from replaylens.kernels import reference
from replaylens.kernels.launch import lens_shape
from replaylens.kernels.lens import LensStats, lens

K = 4


def problem(case):
    layers, rows, width, vocab = (5, 150, 512, 5000) if case.gpu else (3, 5, 40, 200)
    x = case.randn(layers, rows, width)
    w = case.randn(width, vocab, seed=1, scale=2 * width**-0.5)
    return x, w, case.randn(width, seed=2, scale=0.3) + 1, case.ints(rows, 3, below=vocab, seed=3)


def check(case, got: LensStats, x, w, weight, targets, final, softcap):
    """Compares with float64, from the normalised rows that the kernel used (the norm has its own test of rounding)."""
    layers, rows = x.shape[:2]
    h = reference.norm(x.double(), weight.double(), None, 1e-5, "rms").to(case.dtype).double()
    z = (h @ w.double()).view(layers * rows, -1)
    z = torch.tanh(z / softcap) * softcap if softcap else z
    want = reference.lens(z, z.view(layers, rows, -1)[final].repeat(layers, 1), targets.repeat(layers, 1), K)
    for name in ("log_sum_exp", "entropy", "kl", "top_log_probs", "target_log_probs"):
        found = getattr(got, name).double().flatten()
        torch.testing.assert_close(found, want[name].flatten(), rtol=1e-4, atol=2e-2 if case.dtype != torch.float32 else 2e-4)
    # neighbours may swap where float64 and float32 logits disagree; the sets' log-probs above may not
    agree = (got.top_ids.view(-1, K) == want["top_ids"]).float().mean()
    assert agree > (0.97 if case.gpu else 0.999)


@pytest.mark.parametrize(("final", "softcap"), [(2, 0.0), (0, 3.0)])
def test_agrees_with_float64(case, final, softcap):
    x, w, weight, targets = problem(case)
    check(case, lens(x, w, weight, final=final, targets=targets, k=K, softcap=softcap), x, w, weight, targets, final, softcap)
    transposed = lens(x, w.T.contiguous().T, weight, final=final, targets=targets, k=K, softcap=softcap)
    check(case, transposed, x, w, weight, targets, final, softcap)


def test_a_row_does_not_know_its_batch(case, same):
    x, w, weight, targets = problem(case)
    full = lens(x, w, weight, final=1, targets=targets, k=K)
    rows = x.shape[1]
    for start, count in ((0, 1), (rows - 1, 1), (2, 3), *([(5, 129)] if case.gpu else [])):
        piece = slice(start, start + count)
        part = lens(x[:, piece].contiguous(), w, weight, final=1, targets=targets[piece].contiguous(), k=K)
        for field in fields(LensStats):
            same(getattr(part, field.name), getattr(full, field.name)[:, piece])


@pytest.mark.slow
def test_a_layer_does_not_know_the_others(case, same):
    x, w, weight, targets = problem(case)
    full = lens(x, w, weight, final=1, targets=targets, k=K)
    two = lens(x[1:3].contiguous(), w, weight, final=0, targets=targets, k=K)
    for field in fields(LensStats):
        same(getattr(two, field.name), getattr(full, field.name)[1:3])
    alone = lens(x[2:3].contiguous(), w, weight, k=K)
    same(alone.entropy, full.entropy[2:3])
    assert alone.kl is None and alone.target_log_probs is None
    assert not full.kl[1].any(), "the final layer is no distance from itself"


def test_ties_are_in_order_of_token(case, same):
    x, w, weight, _ = problem(case)
    w = torch.cat([w[:, :40]] * 5, dim=1).contiguous()  # every logit occurs five times, in different tiles
    ids = lens(x, w, weight, k=K).top_ids
    same(ids[..., 1:], ids[..., :1] + 40 * torch.arange(1, K, device=case.device))


def test_the_vocabulary_tile_matters(case):
    """Negative control: partial sums over other tiles give other bits."""
    x, w, weight, _ = problem(case)
    shape = lens_shape(case.dtype)
    smaller = replace(shape, columns=shape.columns // 2, warps=4)
    assert not torch.equal(lens(x, w, weight, k=K, shape=smaller).log_sum_exp, lens(x, w, weight, k=K).log_sum_exp)


def test_errors_say_what_is_wrong(case):
    x, w, weight, targets = problem(case)
    with pytest.raises(ValueError, match="not one of the"):
        lens(x, w, weight, final=9)
    with pytest.raises(ValueError, match="k is 99"):
        lens(x, w, weight, k=99)
    with pytest.raises(ValueError, match="targets has shape"):
        lens(x, w, weight, targets=targets[:1])


def test_known_logits_give_the_same_bits(case, same):
    from replaylens.kernels.matmul import matmul
    from replaylens.kernels.norm import norm

    x, w, weight, targets = problem(case)
    known = matmul(norm(x[2], weight, None, 1e-5, "rms"), w, out_dtype=torch.float32)
    plain, given = (lens(x, w, weight, final=2, targets=targets, k=K, logits=logits) for logits in (None, known))
    for field in fields(LensStats):
        same(getattr(given, field.name), getattr(plain, field.name))
    with pytest.raises(ValueError, match="final layer"):
        lens(x, w, weight, targets=targets, k=K, logits=known)


# ---- as the engine calls it -------------------------------------------------------------------------------------------
# Z from the lens kernel, called as the engine calls it, equals the same numbers from whole distributions.

CONFIG = ModelConfig(2, 32, 2, 2, 16, 64, 97, 64, rotary_dim=16)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [(), (3, 96)])
def test_z_is_that_of_whole_distributions(targets):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(device)
    stacked = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).to(device)
    emitted, spec = [4, 0, -1, 50, 96], LensSpec(("a", "b", "c"), top_k=4, targets=targets)
    found = cuda_lens.read_lens(spec, model, stacked, emitted)
    logits = model.logits(stacked.reshape(15, 32), SequenceOps([15])).cpu()
    want = host_lens.statistics(spec, logits.log_softmax(-1).view(5, 3, -1), emitted)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype and found[name].is_contiguous()
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not found["Z.kl"][:, -1].any()
    there = cuda_lens.read_lens(spec, model, stacked.cpu(), emitted)  # rows that were captured lie on the host
    assert all(torch.equal(there[name].nan_to_num(9.0), found[name].nan_to_num(9.0)) for name in found)
