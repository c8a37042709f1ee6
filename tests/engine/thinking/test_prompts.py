"""Prompts of Thinking-States models."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NonFinite
from replaylens.engine.request.edits import Edit
from replaylens.engine.thinking.core import ThinkingEngine
from tests.engine.coin_engine import PROMPT


def test_thoughts_that_fail_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    blocks = thinker.prefiller.blocks
    monkeypatch.setattr(blocks, "_logits", lambda rows: (_ for _ in ()).throw(NonFinite("planted")))
    with pytest.raises(NonFinite):
        thinker.prompt(PROMPT)
    assert blocks.pool.num_free == blocks.pool.num_pages and thinker.loop.lanes == {}


def test_a_refused_prompt_of_a_thinker_leaves_no_branch() -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    with pytest.raises(BadRequest):
        thinker.prompts([PROMPT, PROMPT], guess="drafted", drafts=[[], [(99999,)]])
    assert thinker.loop.lanes == {} and not thinker.tree.roots()


def test_a_thinker_pads_what_is_run_with_a_cache() -> None:
    thinker = Engine.load("coin-thinking")
    text = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
    logits, cache = thinker.run_with_cache(text, names_filter="blocks.0.hook_in")
    assert logits.shape[1] == cache["blocks.0.hook_in"].shape[1] == thinker.prompt(text).length


def test_asking_for_z_drops_no_row() -> None:
    """Also where a prompt is extended, which gives its last row a next token, or forked and thought along again."""
    thinker = Engine.load("coin-thinking")
    root = thinker.prompt(PROMPT, sites="SZ")
    longer, again = root.extend(" Alice flips."), root.fork(at=root.length - 1)[0]
    edited = root.fork(edits=[Edit("thinking.state", "zero", positions=-1)])[0]
    for branch in (root, longer, again, edited, longer.fork(at=root.length)[0]):
        fresh = thinker.prompt(branch.tokens, sites="SZ") if branch in (root, longer) else branch
        for site in ("blocks.0.hook_in", "Z.emitted", "Z.kl"):
            x = branch.activations[site]
            assert len(x) == branch.length
            assert torch.equal(x.nan_to_num(7.0), fresh.activations[site].nan_to_num(7.0)), site
        unknown = branch.activations["Z.emitted"].isnan().all(-1)
        assert unknown.tolist() == [False] * (branch.length - 1) + [True]
