"""Answers: by regular expression, by choice tokens, by a function; early stops; places; options that are refused."""

import re

import numpy as np
import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling.plan import Answer, FoundAnswer, rollout_seed
from replaylens.engine.resampling.rollouts import OutcomeCounts
from replaylens.engine.serving.branch import Branch
from tests.toy_model import engine

CHAIN = " Alice flips. Bob flips. What's the state? A: heads."
FACE = Answer.regex("A: (heads|tails)")


@pytest.fixture(scope="module")
def coin() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture
def chain(coin: Engine) -> Branch:
    return coin.prompt("A coin's state is heads.").force(CHAIN)


# ---- reading a text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, text, found",
    [
        (r"is (\d+)", "it is 42", FoundAnswer("42", 8)),
        (r"is (\d+)", "it is", None),
        (r"yes|no", "so no, yes", FoundAnswer("no", 5)),
        (r"a (x)|b (y)", "b y", FoundAnswer("y", 3)),
        (r"= *(.*)", "x =  3 \nrest", FoundAnswer("3", 7)),
        (r"is (\w+)", "is ja\ufffd", FoundAnswer("ja", 5)),  # half a character is no text yet
    ],
)
def test_regular_expressions(pattern: str, text: str, found: FoundAnswer | None) -> None:
    assert Answer.regex(pattern).read(text) == found


def test_an_answer_that_may_grow_is_not_certain() -> None:
    answer = Answer.regex(r"is (\d+)")
    assert [answer.certain(text) for text in ("is", "is 4", "is 42", "is 42.")] == [False, False, False, True]


def test_json() -> None:
    for answer in (FACE, Answer.regex("a", stop=False), Answer.choices([" heads", 3], after="A:")):
        assert Answer.from_json(answer.to_json()) == answer
    with pytest.raises(BadRequest, match="function"):
        Answer.from_json(Answer.function(str.upper).to_json())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Answer.regex("("),
        lambda: Answer.regex(3),  # type: ignore[arg-type]
        lambda: Answer.choices(["a"]),
        lambda: Answer.choices(["a", "a"]),
        lambda: Answer.choices("ab"),
        lambda: Answer.function("f"),  # type: ignore[arg-type]
        lambda: Answer.regex("a", stop=1),  # type: ignore[arg-type]
    ],
)
def test_bad_answers(make: object) -> None:
    with pytest.raises(BadRequest):
        make()  # type: ignore[operator]


# ---- rollouts ----------------------------------------------------------------------------------------------------------


def test_outcomes_at_sentences(chain: Branch) -> None:
    """Positions, texts and counts. Once two flips are told, nearly every rollout says heads."""
    found = chain.resample(12, at="sentences", max_new=16, answer=FACE, sites="S", keep=["sentences", "answer"])
    counts = found.outcomes()
    assert counts.positions == [6, 9, 12, 16]
    assert counts.texts == [" Alice flips.", " Bob flips.", " What's the state?", " A: heads."]
    assert counts.counts.sum(1).tolist() == [12] * 4 and counts.counts.dtype == np.int64
    assert counts.shares[3, counts.outcomes.index("heads")] > 0.9
    assert list(found.frame.columns) == ["position", "number", "seed", "tokens", "text", "outcome", "stopped"]
    for each in found:
        match = re.search("A: (heads|tails)", each.text)
        assert each.outcome == (match and match[1])
        assert each.seed == rollout_seed(0, each.position, each.number)
    for line in found.index[found.index["place"] == "answer"].itertuples():
        rollout = found[counts.positions.index(line.position) * 12 + line.number]
        token = rollout.tokens[line.token - line.position]
        assert chain.engine.text.token(token).strip() == rollout.outcome
    assert len(found.states["blocks.0.hook_in"]) == len(found.index)
    assert "<table>" in found._repr_html_() and "Rollouts(12 at each of 4" in repr(found)


def test_an_early_stop_changes_no_token(chain: Branch) -> None:
    """The tokens up to the stop are those of the rollout that goes on, and so is the outcome."""
    stopped = chain.resample(10, at=[9, 12], max_new=16, answer=FACE)
    longer = chain.resample(10, at=[9, 12], max_new=16, answer=Answer.regex("A: (heads|tails)", stop=False))
    assert {each.stopped for each in stopped} >= {"answer"}
    assert any(len(a.tokens) < len(b.tokens) for a, b in zip(stopped, longer, strict=True)), "something was saved"
    for short, long in zip(stopped, longer, strict=True):
        assert long.tokens[: len(short.tokens)] == short.tokens and long.outcome == short.outcome


def test_functions(chain: Branch) -> None:
    def last_word(text: str) -> str | None:
        return "flip" if text.endswith(("flip", "flips")) else None

    ended = chain.resample(6, at=9, max_new=9, answer=Answer.function(last_word))
    stopped = chain.resample(6, at=9, max_new=9, answer=Answer.function(last_word, stop=True))
    assert {each.stopped for each in ended} <= {"length", "eos"}
    assert all(each.outcome == last_word(each.text) for each in (*ended, *stopped))
    assert all(each.text.endswith("flips") or each.text.endswith("flip") for each in stopped if each.stopped == "answer")


def test_choices_are_read_from_the_logits(chain: Branch) -> None:
    """At the fork itself, and after rollouts: the probabilities are those of the model's own next token."""
    answer = Answer.choices([" heads", " tails"], after=" What's the state? A:")
    found = chain.resample(1, at=[9, 12], max_new=0, answer=answer).outcomes()
    assert found.outcomes == [" heads", " tails", "other"] and found.probabilities is not None
    for row, prompt in zip(found.probabilities, (" Alice flips.", " Alice flips. Bob flips."), strict=True):
        logits = chain.engine.prompt(f"A coin's state is heads.{prompt} What's the state? A:").logits().double()
        ids = chain.engine.token_ids_of([" heads", " tails"])
        assert row[:2].tolist() == logits.softmax(-1)[ids].tolist() and abs(row.sum() - 1) < 1e-12
    drawn = chain.resample(4, at=9, max_new=3, answer=answer, sites="S")
    each = np.array([rollout.probabilities for rollout in drawn])
    assert np.array_equal(drawn.outcomes().probabilities[0], each.mean(0))
    assert list(drawn.frame.columns[-3:]) == ["p( heads)", "p( tails)", "p(other)"]
    alone = chain.resample(4, at=9, max_new=3, answer=answer, wave=1)
    assert [a.probabilities for a in alone] == [b.probabilities for b in drawn]


def test_choices_after_the_end_of_the_text(coin: Engine) -> None:
    """A rollout that ends by itself is asked before its end token."""
    branch = coin.prompt("A coin's state is heads. Alice flips. What's the state? A:")
    found = branch.resample(3, max_new=6, answer=Answer.choices([" heads", " tails"], after=" What's the state? A:"))
    assert {each.stopped for each in found} == {"eos"} and all(each.probabilities for each in found)


def test_streams_draw_what_is_asked_for(chain: Branch) -> None:
    every = chain.resample(4, at=[9, 12], max_new=5)
    stream = chain.stream_rollouts(4, at=[9, 12], max_new=5, wave=2)
    passes = chain.engine.runner.exact
    calls: list[int] = []
    chain.engine.runner.exact = lambda *args: (calls.append(1), passes(*args))[1]  # type: ignore[method-assign]
    try:
        assert not calls, "nothing is drawn before it is asked for"
        first = next(stream)
        seen = len(calls)
        assert first.tokens == every[0].tokens and seen
        assert next(stream).tokens == every[1].tokens and len(calls) == seen
        assert [each.tokens for each in stream] == [each.tokens for each in every][2:]
    finally:
        del chain.engine.runner.exact
    assert list(chain.engine.loop.lanes) == [chain.id]


def test_positions(chain: Branch) -> None:
    def of(at: object) -> list[int]:
        return chain.resample(1, at=at, max_new=1).outcomes().positions  # type: ignore[arg-type]

    assert of(None) == [20] and of(3) == [3] and of([12, 9, 12]) == [9, 12] and of(torch.tensor([4])) == [4]
    assert of("tokens") == list(range(6, 20))
    assert of(lambda position, text: text == " flips") == [7, 10]


def test_replaced_sentences(chain: Branch) -> None:
    """One replacement for all positions, or one for each. The choices follow it as they follow the same prompt."""
    asked, others = " What's the state? A:", [" Alice does not flip.", " Bob flips."]
    answer = Answer.choices([" heads", " tails"], after=asked)
    first = chain.resample(1, at="sentences", max_new=0, answer=answer, replace=others[0]).outcomes()
    each = chain.resample(1, at=[6, 9], max_new=0, answer=answer, replace=others).outcomes()
    for row, before in (
        (first.shares[0], others[0]),
        (each.shares[0], others[0]),
        (each.shares[1], " Alice flips." + others[1]),
    ):
        logits = chain.engine.prompt(f"A coin's state is heads.{before}{asked}").logits().double()
        assert row[:2].tolist() == logits.softmax(-1)[chain.engine.token_ids_of([" heads", " tails"])].tolist()
    assert len(first.positions) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n": 0}, "n=0"),
        ({"at": "words"}, "Invalid at='words'"),
        ({"at": 0}, "at=0"),
        ({"at": 99}, "at=99"),
        ({"at": []}, "no position"),
        ({"at": lambda position, text: False}, "no position"),
        ({"sampling": Sampling()}, "Greedy"),
        ({"max_new": 0}, "max_new=0"),
        ({"answer": "heads"}, "Answer"),
        ({"answer": Answer.choices([" heads", "no such word"])}, "no such|word"),
        ({"sites": "S", "keep": "first"}, "keep='first'"),
        ({"sites": "S", "keep": []}, "keep is empty"),
        ({"at": [6, 9], "replace": [" Alice flips."]}, "1 replacements for 2"),
        ({"replace": ""}, r"replace='' has no tokens\. Give .* or None"),
        ({"replace": []}, r"replace=\[\] has no tokens"),
        ({"at": [6, 9], "replace": [" Alice flips.", ""]}, r"replace='' has no tokens"),
        ({"wave": 0}, "wave=0"),
        ({"max_new": 1000}, "positions"),
        ({"nn": 3}, "no option 'nn'"),
        ({"sites": "Q"}, "Q"),
    ],
)
def test_bad_options(chain: Branch, options: dict[str, object], message: str) -> None:
    before = set(chain.engine.loop.lanes)
    with pytest.raises((BadRequest, KeyError), match=message):
        chain.resample(**{"n": 2, **options})  # type: ignore[arg-type]
    assert set(chain.engine.loop.lanes) <= before


def test_what_cannot_be_resampled() -> None:
    subject = engine()
    with pytest.raises(BadRequest, match="after the prompt, and there are none"):
        subject.prompt([1, 2]).resample(2, at="sentences")
    with pytest.raises(BadRequest, match="Without a tokenizer"):
        subject.prompt([1, 2]).force([3]).resample(2, at="sentences")
    with pytest.raises(NotCertified):
        subject.prompt([1, 2]).generate(2, deterministic=False).resample(2)


def test_counts_are_checked() -> None:
    with pytest.raises(BadRequest, match="shape"):
        OutcomeCounts([1], ["a", "b"], np.zeros((1, 1), dtype=np.int64), [""])
    with pytest.raises(BadRequest, match="texts"):
        OutcomeCounts([1], ["a"], np.zeros((1, 1), dtype=np.int64), [])
