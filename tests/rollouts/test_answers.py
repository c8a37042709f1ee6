"""Answers: by regular expression, by choice tokens, by a function; early stops; places; options that are refused."""

import json
import random
import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.model.ops import MASKED
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.rollouts import drawing
from replaylens.rollouts.drawing import places, plan_rollouts, waves_of
from replaylens.rollouts.plan import (
    Answer,
    FoundAnswer,
    OutcomeCounts,
    ResamplePlan,
    positions_of,
    rollout_seed,
    sentence_ends,
    sentence_spans,
    sentence_starts,
)
from replaylens.rollouts.rollouts import Rollout, Rollouts
from tests.devices import covering
from tests.toy_model import VOCAB, engine

CHAIN = " Alice flips. Bob flips. What's the state? A: heads."
FACE = Answer.regex("A: (heads|tails)")
REST: Any = (("last",), (), ())
"""what a plan keeps, replaces and edits: nothing of its own"""


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
        assert np.allclose(row[:2], logits.softmax(-1)[ids], rtol=1e-6, atol=0) and abs(row.sum() - 1) < 1e-12
    drawn = chain.resample(4, at=9, max_new=3, answer=answer, sites="S")
    each = np.array([rollout.probabilities for rollout in drawn])
    assert np.array_equal(drawn.outcomes().probabilities[0], each.mean(0))
    assert list(drawn.frame.columns[-3:]) == ["p( heads)", "p( tails)", "p(other)"]
    alone = chain.resample(4, at=9, max_new=3, answer=answer, wave=1)
    assert [a.probabilities for a in alone] == [b.probabilities for b in drawn]


def test_choices_after_the_end_of_the_text(coin: Engine) -> None:
    """A rollout that ends by itself is asked before its end token; one that a stop string ends, after it."""
    branch = coin.prompt("A coin's state is heads. Alice flips. What's the state? A:")
    answer, ids = Answer.choices([" heads", " tails"], after=" What's the state? A:"), coin.token_ids_of([" heads", " tails"])
    for options, stopped in ({}, "eos"), ({"sampling": Sampling(temperature=1.0, stop=(".",))}, "stop"):
        found = branch.resample(3, max_new=6, answer=answer, **options)  # type: ignore[arg-type]
        assert {each.stopped for each in found} == {stopped}
        for each in found:
            said = list(each.tokens[:-1] if stopped == "eos" else each.tokens)
            asked = coin.logits([*branch.tokens, *said, *coin.text.encode(answer.after)]).double()
            assert np.allclose(each.probabilities[:2], asked.softmax(-1)[ids], rtol=1e-6, atol=0)


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


def test_an_interrupt_does_not_wait_for_the_wave(chain: Branch) -> None:
    """Ctrl-C ends a wave after the current step, and releases its forks."""
    passes, calls = chain.engine.runner.exact, list[int]()

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return passes(*given)

    chain.engine.runner.exact = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            chain.resample(4, at=[9, 12], max_new=5, sites="S")
    finally:
        signal.signal(signal.SIGINT, before)
        del chain.engine.runner.exact
    assert len(calls) == 2 and list(chain.engine.loop.lanes) == [chain.id]


def test_positions(chain: Branch) -> None:
    def of(at: object) -> list[int]:
        return chain.resample(1, at=at, max_new=1).outcomes().positions  # type: ignore[arg-type]

    assert of(None) == [20] and of(3) == [3] and of([12, 9, 12]) == [9, 12] and of(torch.tensor([4])) == [4]
    assert of("tokens") == list(range(6, 20))
    assert of(lambda position, text: text == " flips") == [7, 10]


def test_numbers_of_generated_tokens_count_from_both_ends(chain: Branch) -> None:
    """Those that a rollout does not have are left out, and a place that is named twice is kept once."""
    hot, keep = Sampling(temperature=1.0, ignore_eos=True), [0, -4, 3, -1, 4, -5, 0]
    found = chain.resample(2, at=9, max_new=4, sites="S", keep=keep, sampling=hot)
    places = [("0", 9), ("-4", 9), ("3", 12), ("-1", 12)]
    assert [tuple(line) for line in found.index[["place", "token"]].itertuples(index=False)] == places * 2
    rows = found.states["blocks.1.hook_in"].view(2, 4, -1)
    assert (
        torch.equal(rows[:, 0], rows[:, 1]) and torch.equal(rows[:, 2], rows[:, 3]) and not torch.equal(rows[:, 0], rows[:, 2])
    )


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
        assert np.allclose(row[:2], logits.softmax(-1)[chain.engine.token_ids_of([" heads", " tails"])], rtol=1e-6, atol=0)
    assert len(first.positions) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n": 0}, "n=0"),
        ({"at": "words"}, "Unknown at 'words'"),
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
    with pytest.raises(BadRequest, match="there are none after the prompt"):
        subject.prompt([1, 2]).resample(2, at="sentences")
    with pytest.raises(BadRequest, match="Without a tokenizer"):
        subject.prompt([1, 2]).force([3]).resample(2, at="sentences")
    with pytest.raises(NotCertified):
        subject.prompt([1, 2]).generate(2, deterministic=False).resample(2)


def test_a_plan_holds_the_edits_of_its_forks() -> None:
    """States of a Thinking-States model among them, which forks have from the tokens on that the thought was made from."""
    thinker = Engine.load("coin-thinking")
    branch = thinker.prompt("A coin's state is heads. Alice flips. Bob flips. Carol flips. What's the state? A:")
    places = sorted({edit.needs for edit in branch.lane.edits if edit.needs < branch.length})
    plan = branch.resample(1, at=[at + more for at in places for more in (-1, 0)], max_new=1).plan
    for at, edits in zip(plan.positions, plan.edits, strict=True):
        (fork,) = branch.fork(at=at)
        assert list(edits) == json.loads(json.dumps([edit.to_json() for edit in fork.lane.edits]))
    assert len({len(edits) for edits in plan.edits}) > 1


def test_counts_are_checked() -> None:
    with pytest.raises(BadRequest, match="shape"):
        OutcomeCounts([1], ["a", "b"], np.zeros((1, 1), dtype=np.int64), [""])
    with pytest.raises(BadRequest, match="texts"):
        OutcomeCounts([1], ["a"], np.zeros((1, 1), dtype=np.int64), [])


def test_tables_of_rollouts_by_hand() -> None:
    """Made-up rollouts of three positions: every cell of frame, index and counts, with and without choices."""
    plan = ResamplePlan(
        "f", tuple(range(12)), 3, (4, 7, 12), (" a<b", " c", ""), 2, 5, Sampling(temperature=1.0), None, ("S",), *REST
    )
    outcomes, stops = ["x", None, "a", "x", None, None], ["answer", "length", "eos", "answer", "stop", "length"]
    made = [
        Rollout(
            plan.positions[i // 2],
            i % 2,
            10 + i,
            tuple(range(i)),
            f"t{i}",
            outcomes[i],
            stops[i],
            rows=((("last", 20 + i),) * (i % 3)),
        )
        for i in range(6)
    ]
    made = [
        replace(each, states={"s": torch.full((len(each.rows), 2), float(i))} if each.rows else {})
        for i, each in enumerate(made)
    ]
    found = Rollouts(plan, tuple(made))
    names = ["position", "number", "seed", "tokens", "text", "outcome", "stopped"]
    assert list(found.frame.columns) == names
    assert found.frame.to_numpy().tolist() == [[getattr(each, name) for name in names] for each in made]
    kept = [(4, 1, 21), (7, 0, 22), (7, 0, 22), (12, 0, 24), (12, 1, 25), (12, 1, 25)]
    assert found.index.to_numpy().tolist() == [[position, number, "last", token] for position, number, token in kept]
    assert (
        found.states["s"][:, 0].tolist() == [1, 2, 2, 4, 5, 5]
        and repr(found) == "Rollouts(2 at each of 3 positions, 6 rows of 1 sites)"
    )
    counts = found.outcomes()
    assert counts.outcomes == ["a", "x", "no answer"] and counts.counts.tolist() == [[0, 1, 1], [1, 1, 0], [0, 0, 2]]
    assert (counts.positions, counts.texts, counts.probabilities) == ([4, 7, 12], [" a<b", " c", ""], None)
    html = found._repr_html_()
    assert (
        "<th>a</th><th>x</th><th>no answer</th>" in html
        and "<td>4</td><td>a&lt;b</td><td>0.00</td><td>0.50</td><td>0.50</td>" in html
    )
    chosen = replace(plan, answer=Answer.choices(["a", 7]), sites=())
    shares = [(0.1 * i, 0.3, 0.7 - 0.1 * i) for i in range(6)]
    found = Rollouts(chosen, tuple(replace(each, outcome="a7"[i % 2], probabilities=shares[i]) for i, each in enumerate(made)))
    assert [found.frame[f"p({name})"].tolist() for name in ("a", "7", "other")] == [
        list(column) for column in zip(*shares, strict=True)
    ]
    counts = found.outcomes()
    assert counts.outcomes == ["a", "7", "other"] and counts.counts.tolist() == [[1, 1, 0]] * 3
    assert np.allclose(counts.shares, [[0.05, 0.3, 0.65], [0.25, 0.3, 0.45], [0.45, 0.3, 0.25]])
    assert repr(found) == "Rollouts(2 at each of 3 positions)"


def test_a_plan_counts_tokens_and_rollouts() -> None:
    sampling = Sampling(temperature=1.0, seed=8)
    plan = ResamplePlan("f", tuple(range(9)), 3, (4, 7), ("", ""), 3, 5, sampling, None, (), *REST)
    assert len(plan) == 6 and [plan.rollout(i) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert plan.prefix(1) == list(range(7)) and [plan.length(i, 2) for i in (2, 3)] == [6, 9]
    assert plan.sampling_of(4) == replace(plan.sampling, seed=rollout_seed(8, 7, 1))
    other = replace(plan, replace=((50, 51), (52,)))
    assert other.prefix(0) == [0, 1, 2, 3, 50, 51] and [other.length(i, 2) for i in (2, 3)] == [8, 10]
    assert plan.differences(other.to_json()) == ["replace=[[50, 51], [52]], not []"] and plan.digest != other.digest
    changed = {"n": 4, "max_new": 6, "keep": ("fork",), "sites": ("T",), "texts": ("", "x"), "answer": FACE, "num_prompt": 2}
    for name, value in changed.items():
        (said,) = plan.differences(replace(plan, **{name: value}).to_json())
        assert said.startswith(f"{name}=")


@pytest.mark.parametrize(
    ("keep", "rows"),
    [
        (("fork", "last"), [("fork", 5), ("last", 14)]),
        (("last", "fork"), [("fork", 5), ("last", 14)]),
        (("sentences",), [("sentences", 8), ("sentences", 12), ("sentences", 13)]),
        (("answer",), [("answer", 11)]),
        (("all",), [("all", at) for at in range(6, 15)]),
        ((-9, 8, -10, 9, -1), [("-9", 6), ("8", 14), ("-1", 14)]),
    ],
)
def test_places_of_a_rollout(coin: Engine, keep: tuple[str | int, ...], rows: list[tuple[str, int]]) -> None:
    """From position 6 on. The answer ends before the full stop; the end token is the last row, and in no sentence."""
    plan = ResamplePlan("f", tuple(range(6)), 3, (6,), ("",), 1, 9, Sampling(temperature=1.0), FACE, ("S",), keep, (), ())
    own = coin.text.encode(" Bob flips. A: tails. Alice", special=False)
    answer = FACE.read(coin.text.decode(own))
    assert [coin.text.token(each) for each in own] == [" Bob", " flips", ".", " A", ":", " tails", ".", " Alice"]
    assert places(plan, coin.text, 6, own, answer, len(own) + 1) == rows
    assert places(plan, coin.text, 6, own, None, 9) == [row for row in rows if row[0] != "answer"]


@pytest.mark.parametrize(
    ("at", "found"),
    [(1, (1,)), (9, (9,)), ([9, 1, 9], (1, 9)), ("tokens", (3, 4, 5, 6, 7, 8)), (None, (9,)), ("text:.", (5, 8)), (":2", (1,))],
)
def test_positions_up_to_the_bounds(coin: Engine, at: Any, found: tuple[int, ...]) -> None:
    tokens = coin.text.encode("A coin's state is heads. Alice flips.")
    assert len(tokens) == 9 and positions_of(at, tokens, 3, coin.text) == found
    for beyond in (0, 10, [1, 10], [0, 9]):
        with pytest.raises(BadRequest, match="at="):
            positions_of(beyond, tokens, 3, coin.text)
    for at in ("tokens", "sentences", lambda position, text: True):
        with pytest.raises(BadRequest, match="there are none"):
            positions_of(at, tokens, 9, coin.text)
        assert positions_of(at, tokens, 8, coin.text) == (8,)
    seen: list[tuple[int, str]] = []
    assert positions_of(lambda position, text: seen.append((position, text)) or position % 2 == 0, tokens, 0, coin.text) == (
        2,
        4,
        6,
        8,
    )
    assert seen == [(i, coin.text.token(tokens[i])) for i in range(1, 9)]


# ---- keys ------------------------------------------------------------------------------------------------------------
# Rows with one value per key, of rollouts that end at different lengths: padded as on one path, whatever the waves.

PATTERN, SCORES = "blocks.1.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"
SITES = [PATTERN, SCORES, "blocks.1.hook_in"]
HOT = Sampling(temperature=1.2, seed=5, stop_tokens=range(VOCAB - 8, VOCAB))
ANSWER = Answer.regex(r"\b(1\d)\b")
TOKENS, AT = [1, 2, 3, 4, 5, 6, 7], [4, 6]


def path() -> Branch:
    return engine().prompt(TOKENS[:3]).force(TOKENS[3:])


def drawn(wave: int | None = None, folder: Path | None = None, replace: list[str] | list[int] | None = None) -> Rollouts:
    keep = ["fork", "all", -1]
    return path().resample(
        6, at=AT, sampling=HOT, max_new=7, answer=ANSWER, sites=SITES, keep=keep, wave=wave, folder=folder, replace=replace
    )


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    return drawn()


def test_the_rollouts_end_differently(reference: Rollouts) -> None:
    assert {each.stopped for each in reference} == {"answer", "eos", "length"}
    assert len({each.position + len(each.tokens) for each in reference}) > 3


def test_rows_are_those_of_the_path_alone(reference: Rollouts) -> None:
    """One column per token of the rollout's own path, and in `states` one per token of the longest."""
    longest, first = max(each.position + len(each.tokens) for each in reference), 0
    for each in reference:
        whole = [*TOKENS[: each.position], *each.tokens]
        alone = engine().prompt(whole, sites=SITES).activations
        at, end = [position for _, position in each.rows], first + len(each.rows)
        for site, rest in ((PATTERN, 0.0), (SCORES, MASKED)):
            assert torch.equal(each.states[site], alone[site][at])
            joined = reference.states[site][first:end]
            assert joined.shape[-1] == longest and torch.equal(joined[..., : len(whole)], alone[site][at])
            assert (joined[..., len(whole) :] == rest).all()
        assert torch.equal(reference.states[SITES[2]][first:end], alone[SITES[2]][at])
        first = end
    assert first == len(reference.index) == len(reference.states[PATTERN])


@pytest.mark.slow
@pytest.mark.parametrize("wave, replace", covering([1, 4, 100], [None, [8, 9]]))
def test_waves_and_folders_change_no_bit(wave: int, replace: list[int] | None, tmp_path: Path, reference: Rollouts) -> None:
    whole = drawn(replace=replace) if replace else reference
    found = [
        drawn(wave, replace=replace),
        drawn(wave, tmp_path, replace),
        drawn(wave, tmp_path, replace),
        Rollouts.load(tmp_path),
    ]
    for each in found:
        assert each.digest == whole.digest
        assert all(torch.equal(each.states[site], whole.states[site]) for site in SITES)


def test_the_bytes_of_a_wave_count_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a pattern has heads x keys values, one of the logits the vocabulary and, in its pass, the stream before it."""
    monkeypatch.setattr(drawing, "MAX_BYTES", 30_000)
    wave = lambda site: plan_rollouts(path(), 50, AT, HOT, 7, sites=site)[1]  # noqa: E731
    assert wave(SITES[2]) == 30_000 // (8 * 32 * 4)
    assert wave(PATTERN) == 30_000 // (8 * 4 * (6 + 7) * 4)
    assert wave("unembed.hook_out") == 30_000 // (8 * (32 + VOCAB) * 4)


# ---- sentences -------------------------------------------------------------------------------------------------------
# The rule of sentences, on characters and on tokens.

CASES = {
    "": [],
    "  ": ["  "],
    "No end": ["No end"],
    "One. Two! Three? Four… five": ["One.", " Two!", " Three?", " Four…", " five"],
    "Pi is 3.14. So": ["Pi is 3.14.", " So"],
    'He said "yes." She (too.) left?!': ['He said "yes."', " She (too.)", " left?!"],
    "See e.g. this, i.e. that. J. Smith and Dr. Lee vs. me.": ["See e.g. this, i.e. that.", " J. Smith and Dr. Lee vs. me."],
    "List:\n1. one\n 12. two. Three\n": ["List:\n", "1. one\n", " 12. two.", " Three\n"],
    "A thought.\n\nAnother one. \n \nEnd.": ["A thought.\n\n", "Another one. \n \n", "End."],
    "\n\nStart. End": ["\n\nStart.", " End"],
    "x = a.b(c) + f.g. Done": ["x = a.b(c) + f.g.", " Done"],
}


@pytest.mark.parametrize("text", CASES)
def test_spans(text: str) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == CASES[text]


def test_spans_cover_any_text() -> None:
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choice('aB1. \n!?)"e.g') for _ in range(draw.randrange(30)))
        spans = sentence_spans(text)
        assert "".join(text[start:end] for start, end in spans) == text
        assert len(spans) <= 1 or all(text[start:end].strip() for start, end in spans)


def test_tokens() -> None:
    """A sentence begins with the first token that starts in it. One that starts in no token of its own begins nowhere."""
    pieces = ["One", ".", " Two", ".\n\n", "3", "!", " a. b", ". c"]
    text = "".join(pieces)
    ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    assert sentence_starts(text, offsets) == [0, 2, 4, 6, 7]
    assert sentence_ends(text, offsets) == [1, 3, 5, 6, 7]
    assert sentence_starts("", []) == [] == sentence_ends("", [])


def test_a_token_that_ends_a_sentence_and_begins_the_next_belongs_to_the_first() -> None:
    text, offsets = "Go. We stop. I do.", [(0, 2), (2, 5), (5, 11), (11, 14), (14, 18)]  # "Go", ". W", "e stop", ". I", " do."
    assert sentence_starts(text, offsets) == [0, 2, 4] and sentence_ends(text, offsets) == [1, 3, 4]


def test_tokens_without_characters() -> None:
    """A special token belongs to what comes before it."""
    assert sentence_starts("A b. C", [(0, 1), (1, 4), (4, 4), (4, 6)]) == [0, 3]


# ---- bits ------------------------------------------------------------------------------------------------------------
# A rollout's bits depend on its number alone: not on how many are drawn, in which waves, beside whom, or after what.

PATH, NEW, N = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], 12, 5
AT_OF_BITS = [7, 16, 19]
HOT_OF_BITS = Sampling(temperature=1.2, seed=11, ignore_eos=True)
EDITS = [Edit("blocks.1.hook_in", "add", torch.linspace(-1, 1, 32), positions=[2, 3])]
EVERYTHING = ["fork", "last", "all", 0, -2]


def path_of(subject: Engine, edited: bool = False) -> Branch:
    return subject.prompt(PATH[:5], edits=EDITS if edited else []).force(PATH[5:])


def drawn_of_bits(branch: Branch, n: int = N, wave: int | None = None, at: object = AT_OF_BITS, **more: object) -> Rollouts:
    return branch.resample(n, at=at, sampling=HOT_OF_BITS, max_new=NEW, sites="SZ", keep=EVERYTHING, wave=wave, **more)  # type: ignore[arg-type]


def same(left: Rollout, right: Rollout) -> bool:
    return left.to_json() == right.to_json() and all(
        torch.equal(left.states[site].nan_to_num(7.0), right.states[site].nan_to_num(7.0)) for site in left.states
    )


@pytest.fixture(scope="module")
def reference_of_bits() -> Rollouts:
    return drawn_of_bits(path_of(engine()))


def alone(edited: bool, position: int, number: int) -> tuple[list[int], dict[str, Tensor], Tensor]:
    """One rollout by hand, on an engine of its own: tokens, rows from the fork on, and KV."""
    root = engine().prompt(PATH[:5], sites="S", edits=EDITS if edited else []).force(PATH[5:])
    (fork,) = root.fork(at=position)
    fork.generate(NEW, sampling=replace(HOT_OF_BITS, seed=rollout_seed(HOT_OF_BITS.seed, position, number)), final=True)
    return fork.tokens[position:], {site: rows[position - 1 :] for site, rows in fork.activations.items()}, fork.kv()


@pytest.mark.parametrize("edited", [False, True])
def test_as_one_branch_alone(edited: bool) -> None:
    """Tokens, captured rows and KV of a rollout in company are those of a fork that is computed by hand, alone."""
    subject = engine()
    branch = path_of(subject, edited)
    plan, _ = plan_rollouts(branch, N, AT_OF_BITS, HOT_OF_BITS, NEW, None, "S", EVERYTHING)
    indices = range(len(plan))
    with ExitStack() as opened:
        waves = waves_of(subject, branch, plan)
        forks = waves.forked(indices, opened)
        waves.generated(forks, indices)
        for index in (0, 6, 14):
            place, number = plan.rollout(index)
            tokens, rows, kv = alone(edited, AT_OF_BITS[place], number)
            fork = forks[index]
            assert isinstance(fork, Branch) and fork.tokens[AT_OF_BITS[place] :] == tokens
            assert torch.equal(fork.kv(), kv)
            for site in rows:
                assert torch.equal(fork.activations[site], rows[site]), site
    assert list(subject.loop.lanes) == [branch.id]
    subject.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("wave", [1, pytest.param(4, marks=pytest.mark.slow), 7, pytest.param(100, marks=pytest.mark.slow)])
def test_waves(reference_of_bits: Rollouts, wave: int) -> None:
    assert drawn_of_bits(path_of(engine()), wave=wave).digest == reference_of_bits.digest


def test_company(reference_of_bits: Rollouts) -> None:
    """Fewer rollouts, fewer positions, other requests beside them: the ones in common are the same."""
    subject = engine()
    other = subject.prompt([9, 9, 9])
    stream = other.stream(40)
    next(stream)
    few = drawn_of_bits(path_of(subject), n=2, at=[16])
    assert [same(mine, reference_of_bits[N + i]) for i, mine in enumerate(few)] == [True, True]
    next(stream)


def test_preemption(reference_of_bits: Rollouts) -> None:
    """In a cache with room for a few rollouts only, all at once: they take pages from each other and compute them again."""
    subject, preempted = engine(cache_tokens=160, page_size=4), []
    subject.loop.listeners.append(lambda event: preempted.append(event) if event["event"] == "preempt" else None)
    found = drawn_of_bits(path_of(subject), wave=len(reference_of_bits))
    assert found.digest == reference_of_bits.digest and preempted
    subject.check_integrity()


def test_waves_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default fits into the KV cache, so that nothing is preempted, and into a number of bytes."""
    subject, preempted = engine(cache_tokens=160, page_size=4), []
    subject.loop.listeners.append(lambda event: preempted.append(event) if event["event"] == "preempt" else None)
    branch = path_of(subject)
    _, wave = plan_rollouts(branch, N, AT_OF_BITS, HOT_OF_BITS, NEW)
    assert (
        wave == (40 - 5) // 4
        and branch.resample(N, at=AT_OF_BITS, sampling=HOT_OF_BITS, max_new=NEW).plan.n == N
        and not preempted
    )
    monkeypatch.setattr(drawing, "MAX_BYTES", 10_000)
    assert plan_rollouts(branch, N, AT_OF_BITS, HOT_OF_BITS, NEW, sites="S")[1] == 10_000 // (13 * 3 * 32 * 4) < wave


@pytest.mark.parametrize("options", [{"max_rows": 16}, {"page_size": 1}, {"page_size": 5, "max_rows": 20}])
def test_other_engines(reference_of_bits: Rollouts, options: dict[str, int]) -> None:
    assert drawn_of_bits(path_of(engine(**options))).digest == reference_of_bits.digest


def test_captures_change_no_token(reference_of_bits: Rollouts) -> None:
    plain = path_of(engine()).resample(N, at=AT_OF_BITS, sampling=HOT_OF_BITS, max_new=NEW)
    assert [each.tokens for each in plain] == [each.tokens for each in reference_of_bits]
    captured = engine().prompt(PATH[:5], sites="STC", keep_rejected=True).force(PATH[5:])
    assert drawn_of_bits(captured).digest == reference_of_bits.digest, "what the branch itself captures does not matter"


def test_negative_control(reference_of_bits: Rollouts) -> None:
    """Another seed, another edit and another path have other bits; rollouts differ from each other."""
    branch = path_of(engine())
    other = branch.resample(N, at=AT_OF_BITS, sampling=replace(HOT_OF_BITS, seed=12), max_new=NEW, sites="SZ", keep=EVERYTHING)
    assert other.digest != reference_of_bits.digest
    assert drawn_of_bits(path_of(engine(), edited=True)).digest != reference_of_bits.digest
    assert len({each.tokens for each in reference_of_bits}) > N
    assert len({each.seed for each in reference_of_bits}) == len(reference_of_bits)
    changed = replace(
        reference_of_bits[0],
        states={**reference_of_bits[0].states, "blocks.0.hook_in": reference_of_bits[1].states["blocks.0.hook_in"]},
    )
    assert changed.digest != reference_of_bits[0].digest, "the digest covers the rows"


def test_replacement() -> None:
    """A replaced sentence is forced, and the rollout goes on from it, as by hand."""
    branch = path_of(engine())
    found = branch.resample(3, at=[7, 16], sampling=HOT_OF_BITS, max_new=6, replace=[4, 4, 2], sites="S", keep=["fork", "last"])
    (fork,) = engine().prompt(PATH[:5], sites="S").force(PATH[5:]).fork(at=16)
    fork.force([4, 4, 2]).generate(6, sampling=replace(HOT_OF_BITS, seed=rollout_seed(11, 16, 2)), final=True)
    assert list(found[5].tokens) == fork.tokens[19:]
    assert found[5].rows == (("fork", 18), ("last", 24))
    rows = fork.activations["blocks.0.hook_in"]
    assert torch.equal(found[5].states["blocks.0.hook_in"], rows[[18, 24]])
    again = branch.resample(
        3, at=[7, 16], sampling=HOT_OF_BITS, max_new=6, replace=[4, 4, 2], sites="S", keep=["fork", "last"], wave=1
    )
    assert again.digest == found.digest
    assert (
        found.digest != branch.resample(3, at=[7, 16], sampling=HOT_OF_BITS, max_new=6, sites="S", keep=["fork", "last"]).digest
    )


def test_a_stream_stays_on_its_path_when_the_branch_moves_on() -> None:
    """Waves that are drawn later belong to the path of the call, not to what the branch has become."""
    engine = Engine.load("coin-plain")
    start = "A coin's state is heads."
    chain = engine.prompt(start).force(" Alice flips. Bob flips. What's the state? A:")
    wanted = chain.resample(3, at="sentences", max_new=6, wave=2)
    stream = chain.stream_rollouts(3, at="sentences", max_new=6, wave=2)
    first = next(stream)
    chain.rollback(engine.prompt(start).length)
    chain.force(" Bob does not flip. Carol flips. What's the state? A:")
    chain.release()
    assert [each.digest for each in (first, *stream)] == [each.digest for each in wanted.rollouts]
