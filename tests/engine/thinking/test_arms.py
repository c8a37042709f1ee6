"""The arms of the case `thinking-texts-gpu`: every recipe is sound, tested texts fit, and models made by hand think as told."""

from dataclasses import replace

import pytest
import torch

from benchmarks.thinking_latency import EOS, PAD, TINY_SHAPES, by_hand, triggered
from benchmarks.thinking_plans import CHANGES, TEXT_TASKS, TINY_SIZE, Arm, ablations, methods
from replaylens.engine.errors import NonFinite
from replaylens.engine.thinking import blocks
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.model import ThinkingConfig
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training.thinking import METHODS, ChunkedText, Method, chunked
from replaylens.tasks import WordTokenizer
from tests.engine.thinking.reference import SHAPES, random_prompt, thinking_model


def texts(task: str, steps: int, config: ThinkingConfig, method: Method) -> list[ChunkedText]:
    words = WordTokenizer(TEXT_TASKS[task].vocabulary)
    return [chunked(e, words, config, method) for e in zoo.held_out(TEXT_TASKS[task].table.part, steps, 8)]


def test_arms_have_names_and_recipes_of_their_own() -> None:
    arms = [*methods(tuple(TEXT_TASKS), (0, 1)), *ablations(tuple(TEXT_TASKS), CHANGES, TINY_SIZE.layers, (0,))]
    different = dict.fromkeys(arms)
    assert len({arm.name for arm in different}) == len({TINY_SIZE.recipe(arm).to_json() for arm in different}) == len(different)
    assert {arm.method for arm in arms} == set(METHODS)
    assert replace(arms[0], seed=1).kind == arms[0].kind and Arm("hops", chunk=2).kind != Arm("hops").kind


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_tested_texts_fit_at_trained_positions(task: str) -> None:
    """With every chunk size of the ablation; a chain of thought is the longest. No thought is longer than its limit."""
    given = TEXT_TASKS[task]
    for chunk in (given.table.chunk, *given.chunks):
        config = TINY_SIZE.recipe(Arm(task, chunk=chunk)).thinking
        for text in texts(task, max(given.tested), config, "cot"):
            assert len(text.prompt) + len(text.completion) <= given.width and given.width % chunk == 0
        sizes = {len(thought) for text in texts(task, max(given.tested), config, "thinking") for thought in text.thoughts}
        assert max(sizes) <= given.max_thought(chunk)  # `chunked` also refuses longer ones


@pytest.mark.parametrize(("task", "chunk"), [("hops", 4), ("counts", 8)])
def test_a_model_made_by_hand_thinks_where_the_text_does(task: str, chunk: int) -> None:
    (config,) = TINY_SHAPES.values()
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, max_thought=TEXT_TASKS[task].max_thought(chunk))
    pairs = list(zip(texts(task, 4, thinks, "thinking"), texts(task, 4, thinks, "cot"), strict=True))
    sizes = sorted({len(t) - 1 for text, _ in pairs for t in text.thoughts if len(t) > 1})
    engine = ThinkingEngine(by_hand(config, thinks, sizes, "cpu"))
    for pair in pairs[:3]:
        load = triggered(thinks, sizes, *pair)
        branch = engine.prompt(load.prompt)
        assert [len(t.tokens) for t in branch.thoughts.chunks] == [len(t) for t in pair[0].thoughts]
        assert load.written == load.said + sum(len(t) - 1 for t in pair[0].thoughts) + 1


def test_distributions_are_read_on_demand_with_the_bits_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = TINY_SHAPES.values()
    engine = ThinkingEngine(by_hand(config, ThinkingConfig.for_backbone(config, 4, EOS, PAD, max_thought=4), [2], "cpu"))
    prompt, reads = [2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2, 3], []
    plain = type(engine.prefiller.blocks)._distribution
    monkeypatch.setattr(
        type(engine.prefiller.blocks), "_distribution", lambda self, *given: (reads.append(1), plain(self, *given))[1]
    )
    unread, kept = engine.prompt(prompt).thoughts, engine.prompt(prompt, sites="Z")
    captured = len(reads)
    assert captured == len(kept.thoughts.rounds)  # once per round, and only where they are captured
    for late, early in zip(unread.chunks, kept.thoughts.chunks, strict=True):
        assert late.distribution.keys() == early.distribution.keys() and late.tokens == early.tokens
        assert all(torch.equal(late.distribution[site], early.distribution[site]) for site in early.distribution)
        _ = late.distribution
    assert len(reads) == captured + len(unread.chunks)
    copied = unread.chunks[0].copy()
    copied.distribution["thinking.entropy"].zero_()
    assert not torch.equal(copied.distribution["thinking.entropy"], unread.chunks[0].distribution["thinking.entropy"])


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_decoding_ahead_gives_the_same_thoughts(name: str, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA device does, here on a CPU: nobody looks at a token before the next, and what follows <EOS> is dropped."""
    engine, prompt = ThinkingEngine(thinking_model(SHAPES[name])), random_prompt(25, seed=1)
    plain = engine.prompt(prompt).thoughts
    monkeypatch.setattr(blocks, "AHEAD", ahead)
    monkeypatch.setattr(blocks.ThinkingBlocks, "_decode", blocks.ThinkingBlocks._decode_ahead)
    other = engine.prompt(prompt).thoughts
    assert name != "rotary" or {thought.empty for thought in plain.chunks} == {True, False}
    assert [t.tokens for t in other.chunks] == [t.tokens for t in plain.chunks]
    for a, b in zip(other.chunks, plain.chunks, strict=True):
        assert torch.equal(a.hidden, b.hidden) and torch.equal(a.state, b.state) and torch.equal(a.compressed, b.compressed)
    monkeypatch.setattr(blocks.ThinkingBlocks, "_raw_logits", lambda self, rows: torch.full((len(rows), 40), torch.nan))
    with pytest.raises(NonFinite, match="thoughts"):
        engine.prompt(prompt)
