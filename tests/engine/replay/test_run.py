"""Replaying task examples: results in order, the same bits in any batch, and rejected paths with their own rows."""

import math
from typing import Any

import pytest
import torch

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NonFinite, UnknownSite
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.replay.replayer import Result, _last_word
from replaylens.engine.replay.run import Run
from replaylens.engine.request.sampling import Sampling
from replaylens.tasks import Example, WordTokenizer
from tests.toy_model import Reference, continuation, engine, random_model, scripted_model

SITES = ("blocks.0.hook_in", "blocks.1.attn.hook_out", "blocks.1.mlp.hook_out", "blocks.1.hook_out")
HOT = Sampling(temperature=1.2, top_p=0.98)


@pytest.fixture(scope="module")
def words() -> WordTokenizer:
    return WordTokenizer(rl.tasks.get("coin").vocabulary())


@pytest.fixture(scope="module")
def model(words: WordTokenizer) -> Any:
    return random_model(5, vocab_size=len(words))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(rl.tasks.get("coin")(flips=(1, 5), seed=3).examples(7))


def coin_engine(model: Any, words: WordTokenizer, **options: Any) -> Engine:
    return engine(model, tokenizer=words, **options)


def replay(model: Any, words: WordTokenizer, examples: list[Example], engine_options: Any = None, **options: Any) -> Run:
    run = coin_engine(model, words, **(engine_options or {})).replay(examples, **options)
    assert isinstance(run, Run)
    run.engine.check_integrity()
    return run


def assert_same(one: Result, other: Result) -> None:
    """Everything computed for an example is equal, except for branch numbers."""
    assert (one.example, one.tokens, one.text, one.finish_reason) == (
        other.example,
        other.tokens,
        other.text,
        other.finish_reason,
    )
    assert one.statistics == other.statistics
    recordings = [(one.recording, other.recording)]
    assert [(r.tokens, r.fork_position) for r in one.rejected] == [(r.tokens, r.fork_position) for r in other.rejected]
    recordings += [(a.activations, b.activations) for a, b in zip(one.rejected, other.rejected, strict=True)]
    for mine, yours in recordings:
        assert (mine is None) is (yours is None)
        if mine is not None and yours is not None:
            assert mine.sites() == yours.sites() and mine.positions() == yours.positions()
            for site in mine.sites():
                assert mine[site].numpy().tobytes() == yours[site].numpy().tobytes()  # Z has NaN where no token follows


def test_results_come_in_the_order_of_the_examples(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    run = replay(model, words, examples, batch=3)
    assert [r.example for r in run] == examples and len(run) == len(examples)
    for i, example in enumerate(examples):
        prompt = words.encode(example.prompt)
        n = len(words.encode(example.completion)) + 2
        expected = continuation(model, prompt, n, Sampling())
        assert run[i].num_prompt == len(prompt) and run[i].tokens[: len(prompt)] == prompt
        assert run[i].tokens[len(prompt) :] == expected[: len(run[i].tokens) - len(prompt)]
        assert run[i].text == words.decode(run[i].tokens)
        ended = words.eos_id in expected
        assert run[i].finish_reason == ("eos" if ended else None)
        assert len(run[i].tokens) == len(prompt) + (expected.index(words.eos_id) + 1 if ended else n)


@pytest.mark.parametrize(
    "drafter, sampling",
    [
        pytest.param("lens", None, id="lens-greedy"),
        pytest.param("tree", HOT, id="tree-hot"),
        *(
            pytest.param(drafter, sampling, id=f"{drafter}-{'hot' if sampling else 'greedy'}", marks=pytest.mark.slow)
            for drafter, sampling in (("lens", HOT), ("tree", None), ("ngram", None), ("ngram", HOT))
        ),
    ],
)
def test_the_batch_does_not_change_a_bit(
    model: Any, words: WordTokenizer, examples: list[Example], drafter: str, sampling: Sampling | None
) -> None:
    """One at a time, three at a time, all at once, in small passes, and with few pages."""
    options: dict[str, Any] = dict(sites="STCZ", drafter=drafter, sampling=sampling, max_new=6)
    alone = replay(model, words, examples, batch=1, **options)
    others = [
        replay(model, words, examples, batch=3, **options),
        replay(model, words, examples, {"page_size": 16, "max_rows": 64}, batch=100, **options),
        replay(model, words, examples, {"cache_tokens": 256}, batch=100, **options),
    ]
    for other in others:
        for mine, yours in zip(alone, other, strict=True):
            assert_same(mine, yours)


def test_every_row_of_every_path_is_the_one_of_the_path_alone(
    model: Any, words: WordTokenizer, examples: list[Example]
) -> None:
    run = replay(model, words, examples, sites=SITES, drafter="tree", max_new=6)
    for result in run:
        truth = Reference(model, result.tokens, SITES).rows
        assert result.activations.positions() == list(range(len(result.tokens))), "the last token's own row included"
        assert all(torch.equal(result.activations[site], truth[site]) for site in SITES)


def test_rejected_paths_carry_rows_of_their_own(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    run = replay(model, words, examples, sites=SITES, drafter="lens", max_new=6)
    assert sum(len(result.rejected) for result in run) > 5
    for result in run:
        for path in result.rejected:
            at = path.fork_position
            assert result.num_prompt <= at < len(path.tokens)
            assert path.tokens[:at] == result.tokens[:at] and path.tokens[at:] != result.tokens[at : len(path.tokens)]
            assert path.activations is not None
            truth = Reference(model, path.tokens, SITES).rows
            assert all(torch.equal(path.activations[site], truth[site][at:]) for site in SITES)


def test_rows_of_rejected_paths_only_on_request(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    run = replay(model, words, examples[:3], sites=SITES, drafter="lens", max_new=6, rejected=False)
    assert [result.rejected for result in run] == [[], [], []] and run.acceptance < 1


@pytest.mark.parametrize("drafter", ["self", "lens", "tree", "ngram"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_drafter_changes_no_result(
    model: Any, words: WordTokenizer, examples: list[Example], drafter: str, window: int | None
) -> None:
    plain = replay(model, words, examples[:4], sampling=HOT, sites=["blocks.1.hook_out"], drafter="ngram", max_new=6)
    drafted = replay(
        model, words, examples[:4], sampling=HOT, sites=["blocks.1.hook_out"], drafter=drafter, window=window, max_new=6
    )
    for mine, yours in zip(plain, drafted, strict=True):
        assert mine.tokens == yours.tokens
        assert torch.equal(mine.activations["blocks.1.hook_out"], yours.activations["blocks.1.hook_out"])


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_each_example_draws_from_its_own_stream(model: Any, words: WordTokenizer) -> None:
    """Draws depend on the index, not the place: one prompt differs under two indices, and a subset draws like the whole."""
    task = rl.tasks.get("coin")(flips=3, seed=1)
    some = [task.example(i) for i in range(5)]
    whole = replay(model, words, some, sampling=HOT, seed=9, max_new=8)
    part = replay(model, words, some[3:], sampling=HOT, seed=9, max_new=8)
    assert [r.tokens for r in whole][3:] == [r.tokens for r in part]
    for i, example in enumerate(some):
        own = Sampling(temperature=1.2, top_p=0.98, seed=9 + i, stop_tokens=(words.eos_id,))
        truth = continuation(model, words.encode(example.prompt), 8, own)
        generated = whole[i].tokens[whole[i].num_prompt :]
        assert generated == truth[: len(generated)]


def test_the_seed_matters_where_there_are_draws(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        return [r.tokens for r in replay(model, words, examples, max_new=8, **options)]

    assert tokens(sampling=Sampling(temperature=1.0, seed=1)) != tokens(sampling=Sampling(temperature=1.0, seed=2))
    assert tokens(sampling=Sampling(temperature=1.0, seed=3)) == tokens(sampling=Sampling(temperature=1.0, seed=1), seed=2)
    assert tokens(seed=1) == tokens(seed=2), "greedy: nothing is drawn"


def test_one_sampling_for_each_branch(model: Any) -> None:
    subject = engine(model)
    samplings = [Sampling(), HOT, Sampling(temperature=0.7, seed=5)]
    branches = subject.generate(subject.prompts([[5, 6]] * 3), 8, sampling=samplings)
    assert [b.generated for b in branches] == [continuation(model, [5, 6], 8, s) for s in samplings]
    with pytest.raises(BadRequest, match="3 samplings for 2 branches"):
        subject.generate(subject.prompts([[5, 6]] * 2), 8, sampling=samplings)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_accuracy_and_acceptance(words: WordTokenizer) -> None:
    """A model that always says " heads." is right where the answer is heads."""
    task = rl.tasks.get("coin")(flips=2, seed=0)
    some = list(task.examples(12))
    heads, dot = words.id(" heads"), words.id(".")
    after_prompt = words.encode(some[0].prompt)[-1]
    model = scripted_model({after_prompt: heads, heads: dot, dot: words.eos_id}, vocab=len(words), d_model=128)
    run = replay(model, words, some, drafter="self", window=4)
    right = [" heads" in example.answer for example in some]
    assert [r.correct for r in run] == right and 0 < sum(right) < 12
    assert run.accuracy == sum(right) / 12
    assert run.acceptance == 1.0
    assert all(r.finish_reason == "eos" and r.text.endswith(" heads.") for r in run)
    assert repr(run) == f"Run(12 examples, {sum(right) / 12:.1%} correct, 100.0% of drafts accepted)"


def test_statistics_of_a_run(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    run = replay(model, words, examples, drafter="lens", sites="S", max_new=6)
    for result in run:
        assert result.statistics.drafted == result.statistics.accepted + result.statistics.rejected
        assert result.statistics.tokens == len(result.tokens) - result.num_prompt
        assert result.statistics.rejected == sum(len(r.tokens) - r.fork_position for r in result.rejected)
    drafted = sum(r.statistics.drafted for r in run)
    assert run.acceptance == sum(r.statistics.accepted for r in run) / drafted


def test_an_empty_run(model: Any, words: WordTokenizer) -> None:
    run = replay(model, words, [], sites="STCZ")
    assert len(run) == 0 and list(run) == [] and math.isnan(run.accuracy) and math.isnan(run.acceptance)


def test_the_tree_shows_a_path_and_its_rejected_drafts(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    run = replay(model, words, examples[:3], drafter="lens", max_new=6, sites="S")
    for i, result in enumerate(run):
        lines = str(run.tree(i)).splitlines()
        assert lines[0].startswith(f"#{result.branch} ") and f".{result.num_prompt}" in lines[0]
        assert len(lines) == 1 + len(result.rejected)
        assert all(
            f"@{path.fork_position}" in line and "x" in line for path, line in zip(result.rejected, lines[1:], strict=True)
        )


# ---- what a run leaves behind and refuses ----------------------------------------------------------------------------


def test_a_run_gives_all_its_pages_back(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    """The results keep their rows. The engine keeps no branches, and no pages except for its prefix index."""
    run = replay(model, words, examples, drafter="tree", sites="S", max_new=6)
    subject = run.engine
    assert subject.loop.lanes == {}
    subject.prefix.clear()
    assert subject.runner.pool.num_free == subject.runner.pool.num_pages
    assert all(subject.tree.branch(r.branch).status is BranchStatus.RELEASED for r in run)


def test_a_run_that_fails_gives_its_pages_back_too(words: WordTokenizer, examples: list[Example]) -> None:
    broken = random_model(5, vocab_size=len(words))
    assert broken.unembed is not None
    broken.unembed.weight.copy_(broken.unembed.weight.sign() * 3e38)
    subject = coin_engine(broken, words)
    with pytest.raises(NonFinite):
        subject.replay(examples, sites="S")
    assert subject.loop.lanes == {} and subject.loop.jobs == []
    subject.check_integrity()


@pytest.mark.parametrize(
    ("options", "error", "saying"),
    [
        ({"batch": 0}, BadRequest, "batch=0. Give a whole number of at least 1"),
        ({"max_new": -3}, BadRequest, "max_new=-3. Give a whole number of at least 0"),
        ({"drafter": "oracle"}, BadRequest, "oracle"),
        ({"window": 0}, BadRequest, "window=0"),
        ({"seed": -1}, BadRequest, "seed=-1. Give a whole number between 0"),
        ({"sites": "X"}, UnknownSite, "X"),
    ],
)
def test_a_run_that_cannot_be(
    model: Any, words: WordTokenizer, examples: list[Example], options: dict[str, Any], error: type[Exception], saying: str
) -> None:
    subject = coin_engine(model, words)
    with pytest.raises(error, match=saying):
        subject.replay(examples, **options)
    assert subject.loop.lanes == {} and subject.loop.jobs == []
    subject.check_integrity()


def test_an_example_without_room_to_generate(words: WordTokenizer, examples: list[Example]) -> None:
    longest = max(len(words.encode(e.prompt)) for e in examples)
    short = random_model(5, vocab_size=len(words), max_positions=longest)
    subject = coin_engine(short, words)
    with pytest.raises(BadRequest, match=f"its prompt of {longest} tokens leaves no room to generate"):
        subject.replay(examples)
    assert subject.loop.lanes == {}


def test_nothing_captured_is_said_so(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    (result,) = replay(model, words, examples[:1], max_new=2)
    with pytest.raises(BadRequest, match="Replay with sites="):
        _ = result.activations


@pytest.mark.usefixtures("watched")
def test_the_progress_bar_counts_examples(
    model: Any, words: WordTokenizer, examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    replay(model, words, examples, batch=3, max_new=2, progress=True)
    assert "7/7" in capsys.readouterr().err


def test_an_answer_in_capitals_counts() -> None:
    assert _last_word(" So the state is Heads.") == _last_word(" heads.") == "heads"
    assert _last_word(" tails.") != "heads" and _last_word("...") == ""


@pytest.mark.parametrize("drafter", ["lens", "ngram", "tree"])
def test_a_batch_of_any_lengths_is_generated_together(
    model: Any, words: WordTokenizer, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for answers of several lengths. Tokens, rejected branches and rows are those of each example alone."""
    mixed = list(rl.tasks.get("coin")(rendering="steps", flips=(1, 4), seed=2).examples(5))
    lengths = {len(words.encode(example.completion)) for example in mixed}
    served, together = coin_engine(model, words), list[int]()
    original = served.serve

    def counting(branches: Any, requests: Any, *rest: Any) -> Any:
        together.append(len({request.n for request in requests}))
        return original(branches, requests, *rest)

    monkeypatch.setattr(served, "serve", counting)
    run = served.replay(mixed, sites=SITES, drafter=drafter, batch=5)
    assert together == [len(lengths)] and len(lengths) > 1
    assert any(result.rejected for result in run)
    for i, example in enumerate(mixed):
        assert_same(run[i], replay(model, words, [example], sites=SITES, drafter=drafter)[0])
