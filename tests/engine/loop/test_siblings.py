"""Sibling chains: each is judged on its own path, whichever is right."""

import pytest
import torch

from replaylens.engine.request.sampling import Sampling
from tests.toy_model import VOCAB, Reference, continuation, engine, toy

PROMPTS = [[(7 * i + k) % VOCAB for i in range(5)] for k in range(6)]
PENALISED = {
    "repetition": Sampling(repetition_penalty=4.0),
    "presence": Sampling(presence_penalty=50.0),
    "drawn": Sampling(temperature=0.7, presence_penalty=50.0, seed=4),
}


@pytest.mark.parametrize("name", PENALISED)
def test_the_second_chain_is_judged_on_its_own_path(name: str) -> None:
    """Chain 0 starts with the token that is right only after chain 1's first one.

    Judged on chain 0's path, the penalty would fall on the wrong token.
    """
    sampling, told_apart = PENALISED[name], 0
    for prompt in PROMPTS:
        truth = continuation(toy(), prompt, 8, sampling)
        first, second, third = truth[:3]
        chains = [[second, first, third], [first, second, third]]
        logits = Reference(toy(), [*prompt, first]).logits[-1].numpy()
        told_apart += sampling.choose(logits, [*prompt, second], len(prompt)) != second
        branch = engine().prompt(prompt)
        branch.generate(8, sampling=sampling, drafter="forced", drafts={len(prompt): chains})
        assert branch.generated == truth
        assert branch.statistics.accepted == 3, "chain 1 was right"
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    assert told_apart, "the control: on chain 0's path another token would be chosen"


@pytest.mark.parametrize("right", [0, 1, 2])
def test_whichever_sibling_is_right_is_followed(right: int) -> None:
    """Tokens, KV and captured rows are those of the path. Wrong siblings are recorded as rejected."""
    prompt = PROMPTS[0]
    truth = continuation(toy(), prompt, 8)
    wrong = [[(truth[0] + k) % VOCAB, truth[1], truth[2]] for k in (1, 2)]
    chains = [*wrong[:right], truth[:3], *wrong[right:]]
    branch = engine().prompt(prompt, sites="S", keep_rejected=True)
    branch.generate(8, drafter="forced", drafts={len(prompt): chains}, keep_pages=True, final=True)
    assert branch.generated == truth
    assert sorted(other.tokens[len(prompt) :] for other in branch.rejected) == sorted(wrong)
    sites = branch.activations.sites()
    for each in (branch, *branch.rejected):
        alone, base = Reference(toy(), each.tokens, sites), each.activations.base
        assert torch.equal(each.kv(), alone.kv)
        assert all(torch.equal(each.activations[site], alone.rows[site][base:]) for site in sites)
