import numpy as np
import pytest
import torch

from replaylens.engine.loop.commit import judge as judge_on_host
from replaylens.engine.passes.cuda import Question, answers
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels import reference
from replaylens.kernels.sample import judge


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


def test_errors_say_what_is_wrong(case):
    chosen, drafts, first, length = chains(case)
    with pytest.raises(ValueError, match="chosen is"):
        judge(chosen.int(), drafts, first, length)
    with pytest.raises(ValueError, match="length has shape"):
        judge(chosen, drafts, first, length[:3])
