"""Replaying task examples: results in order, the same bits in any batch, and rejected paths with their own rows."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import replaylens as rl
from replaylens import Edit, tasks
from replaylens.dumps.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadTexts, NonFinite, NotCertified, UnknownSite
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.request.positions import PositionSlice
from replaylens.engine.request.sampling import Sampling
from replaylens.probes.rows import ProbeRows
from replaylens.replay import replayer, texts
from replaylens.replay.replayer import Result, _last_word
from replaylens.replay.run import Run
from replaylens.tasks import Example, WordTokenizer
from replaylens.tasks.reading import GivenText
from replaylens.tasks.texts import GivenTexts
from tests.toy_model import Reference, continuation, engine, random_model, scripted_model
from tests.toy_model import engine as toy_engine

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


@pytest.fixture(scope="module")
def drafted(model: Any, words: WordTokenizer, examples: list[Example]) -> Run:
    """Captured, with wrong drafts."""
    return replay(model, words, examples, sites=SITES, drafter="lens", max_new=6)


def test_every_row_of_every_path_is_the_one_of_the_path_alone(model: Any, drafted: Run) -> None:
    """Also of rejected paths, from where they left the accepted one."""
    assert sum(len(result.rejected) for result in drafted) > 5
    for result in drafted:
        truth = Reference(model, result.tokens, SITES).rows
        assert result.activations.positions() == list(range(len(result.tokens))), "the last token's own row included"
        assert all(torch.equal(result.activations[site], truth[site]) for site in SITES)
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


def test_the_drafter_changes_no_result(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    how: dict[str, Any] = dict(sampling=HOT, sites=["blocks.1.hook_out"], max_new=6)
    plain = replay(model, words, examples[:4], drafter="ngram", window=1, **how)
    for drafter, window in (("self", None), ("lens", 1), ("tree", 3), ("ngram", None)):
        drafted = replay(model, words, examples[:4], drafter=drafter, window=window, **how)
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


def test_statistics_of_a_run(drafted: Run) -> None:
    for result in drafted:
        assert result.statistics.drafted == result.statistics.accepted + result.statistics.rejected
        assert result.statistics.tokens == len(result.tokens) - result.num_prompt
        assert result.statistics.rejected == sum(len(r.tokens) - r.fork_position for r in result.rejected)
    number = sum(r.statistics.drafted for r in drafted)
    assert drafted.acceptance == sum(r.statistics.accepted for r in drafted) / number


def test_an_empty_run(model: Any, words: WordTokenizer) -> None:
    run = replay(model, words, [], sites="STCZ")
    assert len(run) == 0 and list(run) == [] and math.isnan(run.accuracy) and math.isnan(run.acceptance)


def test_the_tree_shows_a_path_and_its_rejected_drafts(drafted: Run) -> None:
    for i, result in enumerate(drafted):
        lines = str(drafted.tree(i)).splitlines()
        assert lines[0].startswith(f"#{result.branch} ") and f".{result.num_prompt}" in lines[0]
        assert len(lines) == 1 + len(result.rejected)
        assert all(
            f"@{path.fork_position}" in line and "x" in line for path, line in zip(result.rejected, lines[1:], strict=True)
        )


# ---- what a run leaves behind and refuses ----------------------------------------------------------------------------


def test_a_run_gives_all_its_pages_back(drafted: Run) -> None:
    """The results keep their rows. The engine keeps no branches, and no pages except for its prefix index."""
    subject = drafted.engine
    assert subject.loop.lanes == {}
    subject.prefix.clear()
    assert subject.runner.pool.num_free == subject.runner.pool.num_pages
    assert all(subject.tree.branch(r.branch).status is BranchStatus.RELEASED for r in drafted)


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


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["tree", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("lens", "ngram"))])
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


# ---- texts -----------------------------------------------------------------------------------------------------------
# Texts of one's own: every form of a text gives the same path, labels sit on the right tokens, branches keep their bits.

HEADS, TAILS = "A coin's state is heads. Alice flips", "A coin's state is tails."
SITE = "blocks.2.hook_in"


@pytest.fixture(scope="module")
def coin() -> Engine:
    return Engine.load("coin-plain")


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Any:
    """A byte-level tokenizer with a chat template, whose special tokens are no part of any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<s>": 0, "<e>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<e>")
    made.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    return made


@pytest.fixture(scope="module")
def of_bytes(bytes_tokenizer: Any) -> Engine:
    from tests.toy_model import random_model

    return toy_engine(random_model(2, vocab_size=258), tokenizer=bytes_tokenizer)


def labelled(engine: Engine, texts: Any, **labels: Any) -> dict[str, list[Any]]:
    """The labels at every token of the first text."""
    task = engine.texts(texts, labels={name: [value] for name, value in labels.items()})
    given = task.given[0]
    return given.labels_at(range(len(given.tokens)), task.label_names[:-1])


# Forms


def test_every_form_of_a_text_gives_the_same_task(coin: Engine, tmp_path: Path) -> None:
    import pandas as pd
    from datasets import Dataset

    texts, labels = [HEADS, TAILS], {"up": ["yes", "no"], "n": [1, None]}
    records = [{"q": text, "up": up, "n": n} for text, up, n in zip(texts, *labels.values(), strict=True)]
    frame = pd.DataFrame(records)
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    wanted = coin.texts(texts, labels=labels)
    dataset = Dataset.from_list(records)
    tables = (frame, path, str(path), dataset, dataset.to_iterable_dataset(), records, frame.to_dict("list"))
    assert all(coin.texts(table, text="q", labels=["up", "n"]) == wanted for table in tables)
    assert coin.texts(frame, text="q", labels="up") != wanted, "the control: without one of the labels, another task"
    assert wanted.label_names == ("up", "n", "shuffled") and wanted.knobs.texts[0]["labels"] == {"up": "yes", "n": 1}
    ids = [coin.tokens_of(text) for text in texts]
    given = [ids, [np.array(each) for each in ids], [torch.tensor([each]) for each in ids], (each for each in ids)]
    for form in given:
        assert coin.texts(form, labels=labels) == wanted
    assert isinstance(coin.replay(given[0]), Run) and [r.tokens for r in coin.replay(wanted)] == ids


def test_nothing_is_generated_unless_asked_for(coin: Engine) -> None:
    run = coin.replay([HEADS, TAILS], sites="SZ")
    assert [r.tokens for r in run] == [coin.tokens_of(HEADS), coin.tokens_of(TAILS)]
    assert all(r.activations.positions() == list(range(len(r.tokens))) and r.correct is None for r in run), "the last row, too"
    assert "correct" not in repr(run) and run.accuracy != run.accuracy
    alone = coin.prompt(TAILS, sites="S").activations
    assert all(torch.equal(run[1].activations[site], alone[site]) for site in alone)
    longer = coin.replay([HEADS], max_new=3)[0]
    assert (
        longer.text == HEADS + longer.generated_text and len(longer.generated) == 3 and longer.num_prompt == len(run[0].tokens)
    )
    branch = coin.prompt(HEADS).generate(3)
    assert (branch.generated, branch.generated_text) == (longer.generated, longer.generated_text)
    examples = tasks.get("coin")(flips=2).examples(2)
    none = coin.replay(examples, max_new=0)
    assert [r.text for r in none] == [e.prompt for e in examples] and none.accuracy == 0


def test_generated_text_leaves_out_the_end_of_the_sequence(of_bytes: Engine) -> None:
    branch = of_bytes.prompt("a").force([70, 71, 1])
    assert branch.text.endswith("<e>") and branch.generated_text == of_bytes.text.decode([70, 71])
    assert of_bytes.replay([branch])[0].generated_text == branch.generated_text and branch.rollback(1).generated_text == ""


QUESTION = [{"role": "user", "content": "2+2?"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "4"}]
WRITTEN = {
    "a question": (QUESTION, "<s>user:2+2?<e><s>assistant:"),
    "an answer begun": (BEGUN, "<s>user:2+2?<e><s>assistant:4"),
}


@pytest.mark.parametrize(("chat", "text"), WRITTEN.values(), ids=WRITTEN)
def test_chats_are_written_by_the_template(of_bytes: Engine, bytes_tokenizer: Any, chat: Any, text: str) -> None:
    """An open answer is continued, not closed. What the template wrote gets no special tokens once more."""
    tokens = bytes_tokenizer.encode(text, add_special_tokens=False)
    assert of_bytes.tokens_of(chat) == tokens == of_bytes.tokens_of(tuple(chat)) and tokens[:2] != [0, 0]
    options = {"add_generation_prompt": chat is QUESTION, "continue_final_message": chat is BEGUN}
    assert tokens == list(bytes_tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **options))
    (given,) = of_bytes.texts([chat]).given
    assert (given.text, list(given.tokens)) == (text, tokens)
    at = text.index("2+2?")
    found = labelled(of_bytes, [chat], piece=[{"start": at, "end": at + 4, "value": "content"}])["piece"]
    assert [bytes_tokenizer.decode([t]) for t, v in zip(tokens, found, strict=True) if v] == list("2+2?")


def test_a_chat_goes_wherever_a_prompt_goes(of_bytes: Engine) -> None:
    """Every verb computes for a chat what it computes for the tokens of its template."""
    chat, other = QUESTION, [{"role": "user", "content": "2+3?"}]
    ids, others = of_bytes.tokens_of(chat), of_bytes.tokens_of(other)
    with of_bytes.prompt(chat, sites="S") as branch:
        assert branch.tokens == ids and branch.root_length == len(ids)
        drawn = [list(r.tokens) for r in branch.resample(3, max_new=2)]
    with of_bytes.prompt(ids) as same:
        assert drawn == [list(r.tokens) for r in same.resample(3, max_new=2)]
    assert [b.tokens for b in of_bytes.prompts([chat, "a", BEGUN])] == [ids, of_bytes.tokens_of("a"), of_bytes.tokens_of(BEGUN)]
    assert [r.tokens for r in of_bytes.replay([chat, ids, other])] == [ids, ids, others]
    assert torch.equal(of_bytes.logits(chat), of_bytes.logits(ids))
    edits = [[Edit(SITE.replace("2", "1"), "zero", positions=[1])]]
    assert torch.equal(of_bytes.logits_under(chat, edits), of_bytes.logits_under(ids, edits))
    metric = (3, 4)
    results = [
        (
            rl.lens(of_bytes, one).entropy,
            rl.attention(of_bytes, one).pattern,
            rl.patch(of_bytes, one, two, metric=metric).raw["S"],
            rl.path_patch(of_bytes, one, two, metric=metric).raw["heads"],
            rl.ablate(of_bytes, [one, two], metric=metric, heads=[0]).ablated,
            rl.attribution_patching(of_bytes, one, two, metric).estimate,
            rl.integrated_gradients(of_bytes, one, two, metric, steps=2).estimate,
            of_bytes(one),
            of_bytes([one, two]),
            of_bytes.to_tokens([one, two]) if one is chat else torch.tensor([one, two]),
            of_bytes.run_with_cache(one, "blocks.0.hook_in", return_cache_object=False)[1]["blocks.0.hook_in"],
        )
        for one, two in ((chat, other), (ids, others))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    steered = [
        rl.steer(of_bytes, ([one], [two]), [one], layers=[1], strengths=[2.0], n=2).frame
        for one, two in ((chat, other), (ids, others))
    ]
    assert steered[0].equals(steered[1]) and steered[0]["prompt"][0] == of_bytes.text.written(chat)


MALFORMED = {
    "no role": ([{"content": "Hi"}], "Message 0 of the chat, .*, has no 'role'"),
    "no content": ([*QUESTION, {"role": "user"}], "Message 1 of the chat, .*, has no 'content'"),
    "an unknown key": ([{"role": "user", "content": "Hi", "nmae": "A"}], "Message 0 of the chat has the unknown key 'nmae'"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], "The content of message 0 of the chat is .* Give a text"),
    "a number as role": ([{"role": 1, "content": "Hi"}], "The role of message 0 of the chat is 1"),
    "a text among messages": ([*QUESTION, "Hi"], "Message 1 of the chat is 'Hi'"),
    "one message": (QUESTION[0], "not a prompt. A chat is a list of messages"),
    "several chats": ([QUESTION], r"Give one prompt: .* For several, use prompts"),
}


@pytest.mark.parametrize(("given", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_chat_is_named(of_bytes: Engine, given: Any, message: str) -> None:
    for call in (of_bytes.prompt, of_bytes.logits, of_bytes.tokens_of):
        with pytest.raises(BadRequest, match=message):
            call(given)


def test_one_chat_is_not_several_prompts(of_bytes: Engine, tmp_path: Path) -> None:
    """Its messages are no prompts, so that a forgotten pair of brackets is found. A batch of one chat is a batch."""
    for call in (of_bytes.prompts, of_bytes.replay):
        with pytest.raises(BadRequest, match="a list of"):
            call(QUESTION)
    with pytest.raises(BadRequest, match="where several prompts go, give a list of chats"):
        rl.ablate(of_bytes, QUESTION, metric=(3, 4), heads=[0])
    with pytest.raises(BadRequest, match="one or more in each"):
        rl.steer(of_bytes, (QUESTION, [QUESTION]), ["a"], layers=[1], strengths=[1.0])
    assert torch.equal(of_bytes([QUESTION]), of_bytes(QUESTION)) and len(of_bytes.prompts([QUESTION])) == 1
    with pytest.raises(BadRequest, match="with a chat, whose template decides"):
        of_bytes.to_tokens(QUESTION, prepend_bos=True)


def test_a_chat_without_a_template_is_refused(coin: Engine, of_bytes: Engine) -> None:
    with pytest.raises(
        BadTexts, match=r"Text 1: A chat was given, but the tokenizer WordTokenizer has no chat template\. Load"
    ):
        coin.texts([HEADS, QUESTION])
    with pytest.raises(BadTexts, match=r"^A chat was given, but the tokenizer WordTokenizer has no chat template"):
        rl.lens(coin, QUESTION)
    with pytest.raises(BadRequest, match=r"This engine has no tokenizer\. Give token ids instead of a chat"):
        toy_engine().prompt(QUESTION)
    of_bytes.text.tokenizer.chat_template, kept = "{{ raise_exception('no such role') }}", of_bytes.text.tokenizer.chat_template
    with pytest.raises(BadTexts, match=r"The chat template refused .* no such role"):
        of_bytes.texts([[{"role": "?", "content": "Hi"}]])
    of_bytes.text.tokenizer.chat_template = kept


# Labels


def test_labels_of_a_text_of_tokens_and_of_characters(coin: Engine) -> None:
    tokens = coin.tokens_of(TAILS)
    start = TAILS.index("tails")
    found = labelled(
        coin,
        [TAILS],
        mood="good",
        number=list(range(len(tokens))),
        gaps=[None, 1.5, *[float("nan")] * (len(tokens) - 2)],
        face=[{"start": start, "end": start + 5, "value": "down"}],
        nowhere=[],
    )
    assert found["mood"] == ["good"] * len(tokens) and found["number"] == list(range(len(tokens)))
    assert found["gaps"] == [None, 1.5, *[None] * (len(tokens) - 2)] and found["nowhere"] == [None] * len(tokens)
    words = [coin.text.token(token) for token in tokens]
    assert found["face"] == ["down" if word == " tails" else None for word in words], "a space before the word changes nothing"


def test_a_token_takes_the_span_of_its_last_character(coin: Engine) -> None:
    """Spans may begin and end within tokens. None of them is lost."""
    spans = [{"start": 0, "end": 4, "value": "a"}, {"start": 4, "end": 6, "value": "b"}]  # " coin's" is [1, 8)
    assert labelled(coin, [TAILS], piece=spans)["piece"][:2] == ["a", "b"]
    assert labelled(coin, [TAILS], piece=spans[::-1])["piece"][:2] == ["a", "a"], "neither ends it: the last one given"
    spans[1] = {"start": 6, "end": 8, "value": "b"}
    assert labelled(coin, [TAILS], piece=spans[::-1])["piece"][:2] == ["a", "b"], "the one that ends it"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([1.0, 2.0], [1.0, 2.0]),  # fractions that happen to be whole, such as scores
        ([1.0, float("nan")], [1, None]),  # whole numbers of which some are missing, as pandas writes them
        ([1.5, float("nan")], [1.5, None]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, None], [True, None]),
    ],
)
def test_numbers_of_one_label_are_of_one_type(coin: Engine, given: list[Any], kept: list[Any]) -> None:
    found = [
        text.labels["up"] for text in map(GivenText.from_json, coin.texts([TAILS, HEADS], labels={"up": given}).knobs.texts)
    ]
    assert found == kept and list(map(type, found)) == list(map(type, kept))


def test_bytes_of_one_character_share_its_span(of_bytes: Engine) -> None:
    text = "hé🙂!"
    found = labelled(of_bytes, [text], piece=[{"start": 2, "end": 3, "value": 1}])["piece"]
    assert len(found) == 8 and found == [None] * 3 + [1] * 4 + [None]


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("Hello", {}, "Invalid texts='Hello'. Give a list of strings"),
    (5, {}, "Invalid texts=5"),
    ({"A coin"}, {}, "Invalid texts="),
    ([None], {}, "Text 0 is None"),
    ([TAILS, 2.5], {}, "Text 1 is 2.5"),
    (tasks.get("coin"), {}, r"Give examples of it: engine\.replay\(task\(\)\.examples"),
    (tasks.get("coin")(), {}, r"Give examples of it: engine\.replay\(task\.examples"),
    ([TAILS], {"labels": {"up": [1, 2]}}, "Label 'up' has 2 values for 1 texts"),
    ([TAILS], {"labels": ["up"]}, "Give a dict from label to values"),
    ([TAILS], {"labels": {"up": [[1, 2]]}}, "label 'up' has 2 values for 6 tokens. Give one value, a list"),
    ([TAILS], {"labels": {"up": [object()]}}, "a value is text, a finite number"),
    ([TAILS], {"labels": {"up": [float("inf")]}}, "a value is text, a finite number"),
    ([TAILS], {"labels": {"up": [[{"start": 3, "end": 2, "value": 1}]]}}, "0 <= start < end"),
    ([TAILS], {"labels": {"up": [[{"start": 3, "stop": 5, "value": 1}]]}}, "{'start', 'end', 'value'}"),
    ([TAILS], {"labels": {"up": [[{"start": 90, "end": 95, "value": 1}]]}}, r"\[90, 95\) are in no token"),
    ([TAILS], {"labels": {"up": [[{"start": 2, "end": 9, "value": 1}] * 2]}}, "two spans cover"),
    ([TAILS, "Hello"], {}, "Text 1: Word 'Hello' at character 0 is not in the vocabulary"),
    ([TAILS, []], {}, "Text 1: The prompt is empty"),
    ([[3, 10**6]], {}, "Text 0: Token 1000000 is not in the vocabulary"),
    ("no.jsonl", {"text": "q"}, "Cannot read no.jsonl"),
    ([{"q": TAILS}], {"text": "question"}, "Unknown column 'question'"),
    ([{"q": TAILS}, 3], {"text": "q"}, "record 1 is 3"),
    ([{"q": TAILS}], {"text": "q", "labels": {"up": [1]}}, "Give the names of the label columns"),
    ([{"q": TAILS}], {"text": "q", "labels": ["up"]}, "Unknown column 'up'"),
    ([{"q": None}], {"text": "q"}, "Text 0 is None"),
    ([], {"text": "q"}, "Unknown column 'q'"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "options", "saying"), BAD, ids=[saying[:30] for _, _, saying in BAD])
def test_what_is_no_text_is_refused_by_name(coin: Engine, texts: Any, options: dict[str, Any], saying: str) -> None:
    with pytest.raises(BadTexts, match=saying.replace("(", r"\(").replace("{", r"\{") if "\\" not in saying else saying):
        coin.replay(texts, **options)


def test_a_line_that_is_not_json_is_named(coin: Engine, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"q": "A coin"}\n{"q": \n')
    with pytest.raises(BadTexts, match=r"q\.jsonl, line 2 is not JSON"):
        coin.texts(path, text="q")
    path.write_text("\n")
    with pytest.raises(BadTexts, match="has no lines"):
        coin.texts(path, text="q")


def test_a_data_frame_needs_its_column_and_examples_take_no_labels(coin: Engine) -> None:
    import pandas as pd
    from datasets import Dataset, DatasetDict

    frame = pd.DataFrame({"q": [TAILS]})
    with pytest.raises(BadTexts, match="with text="):
        coin.replay(frame)
    with pytest.raises(BadTexts, match="has the splits train"):
        coin.replay(DatasetDict({"train": Dataset.from_pandas(frame)}), text="q")
    with pytest.raises(BadTexts, match="examples of a task were given"):
        coin.replay(tasks.get("coin")().examples(2), labels={"up": [1, 2]})
    with pytest.raises(BadRequest, match=r"Invalid texts='Hello'\. Give a list of prompts"):
        coin.prompts("Hello")


def test_one_label_of_several_types_and_reserved_names_are_refused(coin: Engine) -> None:
    with pytest.raises(tasks.TaskError, match="'up' has values of the types int and str"):
        coin.texts([HEADS, TAILS], labels={"up": [1, "no"]})
    for name in ("token", "shuffled", "next_action", ""):
        with pytest.raises(BadTexts, match=f"Label '{name}' has the name of an index column"):
            coin.texts([HEADS], labels={name: [1]})
    assert coin.texts([HEADS, TAILS], labels={"x": [1, 2.5]}).given[0].labels == {"x": 1.0}, "numbers are one type"


# Branches


def test_branches_replay_to_the_same_bits(coin: Engine) -> None:
    """Forks, forced and generated tokens, edits: the rows that the branches captured, and those of a pending token."""
    root = coin.prompt(HEADS, sites="S")
    plain, (edited,), (earlier,) = (
        root.fork()[0],
        root.fork(edits=[Edit("S", "zero", positions=3, layers=[1])]),
        root.fork(at=4),
    )
    coin.generate([plain, edited], 4)
    edited.fork()
    earlier.force(" is tails.")
    branches = [root, plain, edited, earlier]
    run = coin.replay(branches, labels={"kind": ["root", "plain", "edited", "cut"]}, sites="S")
    for result, branch in zip(run, branches, strict=True):
        rows = branch.activations
        assert result.tokens == branch.tokens and result.num_prompt == branch.root_length
        for site in rows:
            assert torch.equal(result.activations[site][: len(rows.positions())], rows[site]), (branch, site)
        assert result.activations.positions() == list(range(branch.length))
        assert result.generated_text == branch.generated_text
    unedited = coin.replay([edited.tokens], sites="S")[0]
    assert not torch.equal(unedited.activations[SITE], run[2].activations[SITE]), "the control: without its edits, other bits"
    alone = coin.replay([edited], sites="S")[0]
    assert torch.equal(alone.activations[SITE], run[2].activations[SITE]), "in any company"


def test_a_tree_is_dumped_verified_and_probed(coin: Engine, tmp_path: Path) -> None:
    """Only one early site is captured, so that the dump computes probabilities from paths and edits."""
    root = coin.prompt(HEADS)
    forks = [*root.fork(2), *root.fork(2, edits=[Edit("S", "zero", positions=slice(2, 5), layers=[1])])]
    coin.generate(forks, 5)
    run = coin.replay(forks, labels={"edited": [0, 0, 1, 1]}, sites=[SITE], drafter="lens")
    dump = run.save(tmp_path / "tree")
    fresh = Engine.load("coin-plain")
    assert verify(tmp_path / "tree", fresh, sample="all")
    frame = ProbeRows.of(dump).frame
    assert frame["root"].nunique() == 1, "forks of one prompt are never on both sides of a split"
    assert set(frame["token_state"]) == {"prompt", "accepted"} and frame["edited"].mean() == 0.5
    lied = GivenTexts(texts=[{**raw, "edits": []} if "edits" in raw else raw for raw in run[0].example.maker.knobs.texts])
    honest = coin.replay(lied, sites=[SITE])
    assert not torch.equal(honest[2].activations[SITE], run[2].activations[SITE]), "the control: the edits are what differs"


def test_edited_texts_go_on_to_generate_and_verify_by_path(coin: Engine, tmp_path: Path) -> None:
    """Drafts of the drafter `self` depend on timing, so that rejected paths are replayed by their tokens, under the edits."""
    (edited,) = coin.prompt(HEADS).fork(edits=[Edit("S", "zero", positions=3, layers=[1])])
    run = coin.replay([edited, coin.prompt(TAILS)], sites="S", max_new=12)
    run.save(tmp_path / "more")
    assert verify(tmp_path / "more", coin, sample="all")
    (same,) = coin.prompt(HEADS).fork(edits=[Edit("S", "zero", positions=3, layers=[1])])
    assert same.generate(12).tokens == run[0].tokens and run[0].example.given is not None


def test_what_cannot_be_reproduced_is_refused(coin: Engine) -> None:
    fast = coin.prompt(HEADS).generate(2, deterministic=False)
    (hooked,) = coin.prompt(HEADS).fork(hooks=[(SITE, lambda x, hook: x)])
    for branch in (fast, hooked):
        with pytest.raises(NotCertified, match="fast path or hook functions"):
            coin.replay([branch])
    with pytest.raises(BadRequest, match="belongs to another engine"):
        Engine.load("coin-plain").replay([coin.prompt(HEADS)])
    thinking = Engine.load("coin-thinking")
    with pytest.raises(BadRequest, match="Thinking-States model"):
        thinking.replay([thinking.prompt(HEADS)])
    assert thinking.replay([HEADS], sites="S")[0].thoughts is not None, "but its texts can be"


def test_damaged_edits_are_refused_by_name(coin: Engine) -> None:
    task = GivenTexts(texts=[{"tokens": coin.tokens_of(TAILS), "text": TAILS, "edits": [{"site": "S"}]}])
    with pytest.raises(BadRequest, match="Text 0 has edits that cannot be read"):
        coin.replay(task)


def test_what_an_example_generates() -> None:
    """Two tokens more than its answer has, or as many as asked for, within all positions; seeds by index, modulo 2^64."""
    encoded: list[tuple[str, bool]] = []
    text = SimpleNamespace(encode=lambda words, special: (encoded.append((words, special)), [1, 2, 3])[1], eos_id=9)
    subject = SimpleNamespace(text=text, config=SimpleNamespace(max_positions=20))
    example = SimpleNamespace(index=3, completion=" tails.", given=None)

    def asked(length: int = 5, of: Any = example, **options: Any) -> Any:
        branch = SimpleNamespace(length=length, root_length=5)
        return replayer._request(subject, of, branch, replayer.ReplayOptions(**options))  # type: ignore[arg-type]

    assert asked().n == 5 and encoded == [(" tails.", False)] and asked(max_new=7).n == 7 and asked(max_new=0) is None
    assert [asked(length, max_new=7).n for length in (13, 14, 19)] == [7, 6, 1]
    with pytest.raises(BadRequest, match="prompt of 20 tokens leaves no room"):
        asked(20)
    for seed, own in ((0, 3), (7, 10), (2**64 - 3, 0), (2**64 - 1, 2)):
        assert asked(sampling=Sampling(seed=seed)).sampling.seed == own
    request = asked(drafter="lens", window=3, deterministic=False)
    assert (request.drafter, request.window, request.deterministic, request.final) == ("lens", 3, False, True)
    for tokens, prompt, n in (((1, 2), 2, 4), ((1, 2, 9), 2, None), ((1, 2, 9), 3, 4), ((1, 9, 2), 2, 4)):
        given = SimpleNamespace(index=0, given=SimpleNamespace(tokens=tokens, num_prompt=prompt))
        found = asked(of=given, max_new=4)
        assert (found if found is None else found.n) == n and asked(of=given) is None, "a text that ended generates nothing"


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        (["a", "a", "b"], ((0, 2, "a"), (2, 3, "b"))),
        ([None, "a", None, "a"], ((1, 2, "a"), (3, 4, "a"))),
        ([1, True, 1.0, 1.0], ((0, 1, 1), (1, 2, True), (2, 4, 1.0))),
        ([0, False, None], ((0, 1, 0), (1, 2, False))),
        ([], ()),
    ],
)
def test_runs_of_equal_labels(values: list[Any], runs: tuple[tuple[int, int, Any], ...]) -> None:
    """Equal and of one type: True is not 1."""
    found = texts._runs(values)
    assert found == runs and [type(run[2]) for run in found] == [type(run[2]) for run in runs]


@pytest.mark.parametrize(
    ("spans", "values"),
    [
        ([(0, 3, "a")], ["a", None, None]),
        ([(0, 4, "a")], ["a", "a", None]),
        ([(2, 4, "a")], ["a", "a", None]),
        ([(3, 6, "a"), (6, 9, "b")], [None, "a", "b"]),
        ([(0, 5, "a"), (5, 9, "b")], ["a", "b", "b"]),
        ([(4, 9, "b"), (0, 4, "a")], ["a", "b", "b"]),
        ([(4, 5, "a"), (3, 4, "b")], [None, "b", None]),
    ],
)
def test_spans_of_characters_at_tokens(spans: list[tuple[int, int, str]], values: list[str | None]) -> None:
    """Of three tokens with three characters each: else the last span that overlaps it."""
    given = [{"start": start, "end": end, "value": value} for start, end, value in spans]
    assert texts._at_tokens(given, [(0, 3), (3, 6), (6, 9)], "here") == values
    with pytest.raises(BadTexts, match=r"the characters \[9, 11\) are in no token"):
        texts._at_tokens([{"start": 9, "end": 11, "value": "x"}], [(0, 3), (3, 6), (6, 9)], "here")


def test_an_example_twice_is_not_saved(tmp_path: Path) -> None:
    """Two lines of one example would have the same place in the dump."""
    subject = Engine.load("coin-plain")
    examples = tasks.get("coin")(flips=1).examples(2)
    run = subject.replay([examples[0], examples[1], examples[0]], sites="S")
    with pytest.raises(BadRequest, match="some occur twice"):
        run.save(tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"rejected": True}, {"positions": "response[2:9:3]"}, {"positions": "last"}, {"keep": "device"},
        {"sites": "SZ", "top_k": 3, "targets": [1, 2], "full": True},
        {"sites": ["unembed.hook_out", "Z"], "positions": "prompt[-2:]"},
    ],
)  # fmt: skip
def test_a_trace_tells_what_was_captured(options: dict[str, Any]) -> None:
    """Every option comes back from its JSON, as an event of a trace holds it; older ones lack some."""
    spec = toy_engine().capture_spec(**{"sites": "S", **options})
    raw = json.loads(json.dumps(asdict(spec)))
    assert replayer._capture(raw) == spec
    assert replayer._capture(raw | {"thoughts": ["thinking.tokens"]}) == replace(spec, thoughts=("thinking.tokens",))
    older = {name: value for name, value in raw.items() if name not in ("positions", "keep", "thoughts")}
    assert replayer._capture(older) == replace(spec, positions=PositionSlice(), keep="host") and replayer._capture(None) is None


def test_probabilities_of_a_run_of_one(model: Any, words: WordTokenizer, examples: list[Example]) -> None:
    one, two = (replay(model, words, examples[:count], sites="S", max_new=3).probabilities[0] for count in (1, 2))
    assert len(one) and np.array_equal(one, two[: len(one)], equal_nan=True)
