import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from replaylens.engine.loop.commit import judge as judge_on_host
from replaylens.engine.passes.cuda import Question, answers
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels import reference
from replaylens.kernels import sample as module
from replaylens.kernels.sample import hash64, judge, sample_logits


@triton.jit
def _hash_kernel(SEED, POSITION, TOKEN, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    found = hash64(tl.load(SEED + i), tl.load(POSITION + i), tl.load(TOKEN + i))
    tl.store(OUT + i, found.to(tl.int64, bitcast=True))


def noise(case, rows):
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.7] * rows, dtype=torch.float64)[:rows].to(case.device)
    seed = case.ints(rows, below=2**62, seed=1, dtype=torch.int64) * 2 - 2**62
    return seed, case.ints(rows, below=5000, seed=2), temperature


def problem(case):
    rows, vocab = (129, 5003) if case.gpu else (9, 300)
    return case.randn(rows, vocab, scale=2.0).float()


def test_hash_bits_are_the_references(case, same):
    seed = case.ints(64, below=2**62, seed=1, dtype=torch.int64) * 2 - 2**62
    position, token = case.ints(64, below=9000, seed=2), case.ints(64, below=200_000, seed=3)
    out = torch.zeros(64, dtype=torch.int64, device=case.device)
    _hash_kernel[(1,)](seed, position, token, out, 64)
    same(out, reference.hash64(seed, position, token))
    assert reference.hash64(*torch.tensor([1, 2, 3])).item() == 8566811186491711777, "the noise of stored runs would change"


def test_draws_the_references_tokens(case, same):
    logits = problem(case)
    given = noise(case, len(logits))
    want = reference.sample(logits, *given)
    tokens, chosen = sample_logits(logits, *given)
    same(tokens, want)
    same(chosen, logits.gather(1, want[:, None])[:, 0])


def test_a_row_does_not_know_its_batch_or_tile(case, same, monkeypatch):
    logits = problem(case)
    given = noise(case, len(logits))
    tokens, chosen = sample_logits(logits, *given)
    for i in (0, 3, 8):
        same(sample_logits(logits[i : i + 1], *(y[i : i + 1].clone() for y in given))[0], tokens[i : i + 1])
    for width in (32, 128):
        monkeypatch.setattr(module, "_LOGIT_TILE", width)
        for got, want in zip(sample_logits(logits, *given), (tokens, chosen), strict=True):
            same(got, want)


def test_greedy_takes_the_largest_and_the_smallest_id_of_a_tie(case, same, monkeypatch):
    logits = problem(case)
    same(sample_logits(logits)[0], logits.argmax(1))
    twice = torch.cat([logits[:, :40], logits[:, :40]], dim=1).contiguous()
    assert (sample_logits(twice)[0] < 40).all()
    monkeypatch.setattr(module, "_LOGIT_TILE", 32)  # the tied tokens are in different tiles
    assert (sample_logits(twice)[0] < 40).all()


def test_frequencies_are_the_softmax(case):
    """Draws from a known distribution are within five standard errors. The interpreter draws with the reference."""
    rows, vocab = 4096, 16
    logits = torch.linspace(-2, 1, vocab).expand(rows, vocab).contiguous().to(case.device)
    seed, position = torch.arange(rows, device=case.device), case.tensor([7] * rows)
    noise = (seed, position, torch.ones(rows, device=case.device, dtype=torch.float64))
    tokens = sample_logits(logits, *noise)[0] if case.gpu else reference.sample(logits, *noise)
    p = logits[0].softmax(0).cpu()
    seen = torch.bincount(tokens.cpu(), minlength=vocab) / rows
    assert ((seen - p).abs() <= 5 * (p * (1 - p) / rows).sqrt()).all()


def test_errors_say_what_is_wrong(case):
    logits = problem(case)
    seed, position, temperature = noise(case, len(logits))
    with pytest.raises(ValueError, match="go together"):
        sample_logits(logits, seed)
    with pytest.raises(ValueError, match=r"seed is torch\.int32\. Expected int64"):
        sample_logits(logits, seed.int(), position, temperature)
    with pytest.raises(ValueError, match="temperature has shape"):
        sample_logits(logits, seed, position, temperature[:1])


def test_near_ties_are_settled_in_float64(case, same):
    """Logits that cancel the noise: all scores agree up to rounding, so the float32 screen cannot separate them."""
    rows, vocab = (64, 3000) if case.gpu else (5, 60)
    seed, position = torch.arange(rows, device=case.device), case.ints(rows, below=100)
    logits = -reference.gumbel(seed[:, None], position[:, None], torch.arange(vocab, device=case.device)).float()
    ones = torch.ones(rows, device=case.device, dtype=torch.float64)
    same(sample_logits(logits, seed, position, ones)[0], reference.sample(logits, seed, position, ones))


# ---- judge ------------------------------------------------------------------------------------------------------------


def chains(case, seed=0):
    """Chains of 0 to 7 drafts over few tokens, so that some drafts are accepted."""
    length = case.ints(40, below=8, seed=seed, dtype=torch.int64)
    first = torch.cat([length.new_zeros(1), (length + 1).cumsum(0)[:-1]])
    chosen = case.ints(int((length + 1).sum()), below=2, seed=seed + 1, dtype=torch.int64)
    return chosen, case.ints(40, 7, below=2, seed=seed + 2, dtype=torch.int64), first, length


def test_agrees_with_the_reference(case, same):
    for seed in range(3):
        given = chains(case, seed)
        for got, want in zip(judge(*given), reference.judge(*given), strict=True):
            same(got, want)


def test_a_chain_does_not_know_the_others(case, same):
    chosen, drafts, first, length = chains(case)
    accepted, token = judge(chosen, drafts, first, length)
    assert len(accepted.unique()) > 3
    for i in (0, 17, 39):
        one = slice(i, i + 1)
        alone = judge(chosen, drafts[one].contiguous(), first[one].clone(), length[one].clone())
        same(alone[0], accepted[one])
        same(alone[1], token[one])


def test_the_device_judges_as_the_host_does(case):
    """Greedy and sampled chains in one batch match the host's choices from the same logits."""
    vocab, samplings = 50, [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.3, seed=2**64 - 5)]
    questions, row = [], 0
    logits = case.randn(40, vocab, scale=3.0).float()
    host = [logits[i].cpu().numpy() for i in range(len(logits))]
    for i, drafts in enumerate(([], [4, 4], [7], [1, 2, 3, 4], [], [9] * 5)):
        sampling = samplings[i % 3]
        right = [sampling.choose(host[row + j], [0] * (20 + i + j), 20) for j in range(len(drafts))]
        drafts = [*right[: i % 3], *drafts[i % 3 :]]  # some are accepted
        questions.append(Question(row, drafts, sampling, 20 + i))
        row += len(drafts) + 1
    found = answers(logits, questions)
    for q, (accepted, token) in zip(questions, found, strict=True):
        verdict = judge_on_host(
            [q.drafts], lambda _, j, q=q: q.sampling.choose(host[q.row + j], [0] * (q.position + j), q.position)
        )
        assert (accepted, token) == (verdict.num_accepted, verdict.token)
    assert any(accepted for accepted, _ in found)


@pytest.mark.slow
def test_temperature_is_the_hosts_number(case):
    """0.7 is not a float32. Between two nearly equal tokens, a rounded temperature would draw the other one."""
    rows = 64
    noise = reference.gumbel(torch.arange(rows)[:, None], torch.tensor([[5]]), torch.arange(2)).numpy()
    logits = np.stack([np.zeros(rows), (noise[:, 0] - noise[:, 1]) * 0.7], axis=1).astype(np.float32)
    samplings = [Sampling(temperature=0.7, seed=seed) for seed in range(rows)]
    rounded = [Sampling(temperature=float(np.float32(0.7)), seed=seed) for seed in range(rows)]
    path = [0] * 5
    want = [sampling.choose(row, path, 5) for row, sampling in zip(logits, samplings, strict=True)]
    assert want != [sampling.choose(row, path, 5) for row, sampling in zip(logits, rounded, strict=True)]
    questions = [Question(i, [], sampling, 5) for i, sampling in enumerate(samplings)]
    assert [token for _, token in answers(torch.from_numpy(logits).to(case.device), questions)] == want


def test_errors_of_judging(case):
    chosen, drafts, first, length = chains(case)
    with pytest.raises(ValueError, match="chosen is"):
        judge(chosen.int(), drafts, first, length)
    with pytest.raises(ValueError, match="length has shape"):
        judge(chosen, drafts, first, length[:3])
