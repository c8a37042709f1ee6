"""Z is computed for all turns of a pass together, before their ends are known."""

import torch

from replaylens.engine.engine import Engine
from replaylens.engine.loop.commit import PassRows
from replaylens.engine.request.sampling import Sampling

TEXT = "A coin's state is heads. Alice flips. What's the state? A:"


def test_a_path_that_ends_at_a_draft_has_no_next_token() -> None:
    """A forced chain goes beyond the end: Z of the last row, computed as if a draft followed, is recomputed."""
    engine = Engine.load("coin-plain")
    free = engine.prompt(TEXT).generate(6, sampling=Sampling(ignore_eos=True)).generated
    end = free[2]
    branch = engine.prompt(TEXT, sites="Z")
    ended = Sampling(stop_tokens=(end,), ignore_eos=True)
    branch.generate(6, sampling=ended, drafter="forced", drafts={branch.length: [free]}, final=True)
    assert branch.generated == free[:3] and branch.finish_reason == "eos"
    emitted = branch.activations["Z.emitted"][:, -1]
    assert torch.isnan(emitted[-1]) and not torch.isnan(emitted[:-1]).any()
    alone = engine.prompt(branch.tokens, sites="Z")
    other = alone.activations["Z.emitted"][: branch.length - 1, -1]
    assert torch.equal(emitted[: len(other)], other)


def test_the_lens_is_read_once_for_all_turns(monkeypatch) -> None:
    engine = Engine.load("coin-plain")
    branches = engine.prompts([TEXT, TEXT[:24], "A coin's state is tails. Alice flips."], sites="Z")
    calls, read = [], PassRows._read
    monkeypatch.setattr(PassRows, "_read", lambda self, *args: (calls.append(args), read(self, *args))[1])
    engine.generate(branches, 1, window=1)
    assert len(calls) == 1
