"""What ends a request, what a step commits and rolls back, and what is kept of rejected drafts.

Stop strings are found in the end of a text, with the answers that decoding the whole text gives.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.commit import PassRows, Stops
from replaylens.engine.memory.path import PathHistory
from replaylens.engine.memory.tree import ACCEPTED, DRAFT, PENDING, BranchStatus
from replaylens.engine.memory.tree import PROMPT as PROMPT_OF_ROLLBACK
from replaylens.engine.model.text import Text
from replaylens.engine.passes import lens
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.tasks.tokenizer import SPECIALS, WordTokenizer
from tests.devices import covering
from tests.engine.canonical import SITES, assert_canonical, submit
from tests.engine.coin_engine import PROMPT
from tests.toy_model import VOCAB, Reference, continuation, engine, scripted_model, toy, watch_passes


def oracle(decode: Callable[[list[int]], str], stops: tuple[str, ...], tokens: list[int]) -> bool:
    """The definition: decode everything with and without the last token."""
    text, before = decode(tokens), decode(tokens[:-1]).rstrip("\ufffd")
    return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)


def fast(model: models.Model, decoder: decoders.Decoder) -> Text:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level() -> Text:
    """Every byte, and some longer tokens that begin or end within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("Ġ", "a"), ("å", "¥"), ("½", "å"), ("ab", "Ġ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return fast(models.BPE(vocab, merges), decoders.ByteLevel())


def byte_fallback() -> Text:
    """As Llama 2's: words with a leading space, and bytes for everything else."""
    words = ["<unk>", "▁a", "▁", "b", "▁ab", "好", "c", "a"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True), decoders.Sequence(steps))


def metaspace() -> Text:
    vocab = {word: i for i, word in enumerate(["<unk>", "▁a", "▁", "b", "▁ab", "好", "c", "a"])}
    return fast(models.WordLevel(vocab, unk_token="<unk>"), decoders.Metaspace())


def word_pieces() -> Text:
    vocab = {word: i for i, word in enumerate(["[UNK]", "a", "##b", "ab", "##abc", "c", ".", "'", "##s"])}
    return fast(models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece(cleanup=True))


def word_ends() -> Text:
    vocab = {word: i for i, word in enumerate(["<unk>", "a</w>", "b", "ab</w>", "c"])}
    return fast(models.WordLevel(vocab, unk_token="<unk>"), decoders.BPEDecoder(suffix="</w>"))


class Backwards:
    """A tokenizer of unknown kind, whose every token changes the text's beginning."""

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(97 + token) for token in reversed(ids))


KINDS: dict[str, tuple[Callable[[], Text], int]] = {
    "byte level": (byte_level, 261),
    "byte fallback": (byte_fallback, 264),
    "metaspace": (metaspace, 8),
    "word pieces": (word_pieces, 9),
    "word ends": (word_ends, 5),
    "ours": (lambda: Text(WordTokenizer(["a", " b", "ab", " ", "c"])), len(SPECIALS) + 5),
    "ids": (lambda: Text(None), 30),
    "unknown": (lambda: Text(Backwards()), 6),
}
TEXTS = {name: cache(make) for name, (make, _) in KINDS.items()}


def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    """Runs of tokens, mostly of a few ids: characters that are split, repeated and cut."""
    size = KINDS[name][1]
    few = st.lists(st.integers(0, size - 1), min_size=1, max_size=6)
    return st.lists(few, min_size=1, max_size=4).flatmap(
        lambda runs: st.lists(st.sampled_from(runs), min_size=1, max_size=70).map(
            lambda chosen: [token for run in chosen for token in run]
        )
    )


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_answers_are_those_of_the_whole_text(name: str, data: st.DataObject) -> None:
    text = TEXTS[name]()
    tokens, prompt = data.draw(tokens_of(name)), data.draw(st.lists(st.integers(0, 4), max_size=3))
    whole, stops = text.decode(tokens), []
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(max(0, len(whole) - 12), len(whole)))
        stops.append(whole[at : at + data.draw(st.integers(1, 12))] or "ab")
    finder = Stops(text)
    for end in range(max(1, len(tokens) - 3), len(tokens) + 1):
        cut = data.draw(st.integers(0, 2))  # the last tokens may not be on the branch yet
        own, tail = tokens[:end][: end - cut], tokens[:end][end - cut :] if cut else []
        past = PathHistory([*prompt, *own])
        found = finder.completed(tuple(stops), past.path(len(past.tokens), tail), len(prompt))
        assert found == oracle(text.decode, tuple(stops), tokens[:end]), (stops, tokens[:end])


def ids(text: Text, content: str) -> list[int]:
    """The tokens of single bytes."""
    tokenizer: Any = text.tokenizer
    if tokenizer.convert_tokens_to_ids("<0x61>") is not None:
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in content.encode()]
    return [tokenizer.convert_tokens_to_ids(letter) for letter in (chr(b) for b in content.encode())]


def test_a_byte_within_a_run_that_is_no_text_starts_none() -> None:
    """Half a character makes a whole run of bytes unreadable, also the letters after it. Control: the letters alone."""
    text = byte_fallback()
    letters = ids(text, "a" * 200)
    for tokens, found in ((letters, True), ([*ids(text, "好")[:1], *letters], False)):
        past = PathHistory(tokens)
        assert Stops(text).completed(("aa",), past.path(len(tokens), []), 0) is found is oracle(text.decode, ("aa",), tokens)


def test_a_byte_fallback_that_turns_a_long_run_into_characters() -> None:
    """The last byte of a character makes the whole run valid, however far back it began."""
    text = byte_fallback()
    tokens = [*ids(text, "好" * 12), *ids(text, "x" * 120)]
    for end in range(25, len(tokens)):
        past = PathHistory(tokens[:end])
        for stops in (("好",), ("xx",), ("x" * 90,), ("\ufffd",)):
            found = Stops(text).completed(stops, past.path(end), 0)
            assert found == oracle(text.decode, stops, tokens[:end]), (end, stops)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "unknown"])
def test_only_the_end_of_a_long_text_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, plain = TEXTS[name](), {"byte level": 64, "byte fallback": 3, "ours": len(SPECIALS)}.get(name, 1)
    most: list[int] = []
    decode = Text.decode

    def counted(self: Text, given: list[int]) -> str:
        most.append(len(given))
        return decode(self, given)

    monkeypatch.setattr(Text, "decode", counted)
    past = PathHistory([plain] * 5000)
    Stops(text).completed(("never said",), past.path(5000), 0)
    assert max(most) < 100
    most.clear()
    Stops(TEXTS["unknown"]()).completed(("never said",), past.path(5000), 0)
    assert max(most) == 5000, "what is known of no tokenizer is not assumed"


def test_without_the_rules_for_starts_the_answers_differ() -> None:
    """The tests above see what they should: an end that starts within a run of bytes is another text."""
    text = byte_fallback()
    finder = Stops(text)
    finder._pieces = dict.fromkeys(range(264), "x")  # as if every token could start an end
    tokens = ids(text, "好" + "x" * 60)[1:]  # without its first byte, no byte of the run is a character
    wrong = [end for end in range(1, len(tokens)) if finder.completed(("xx",), PathHistory(tokens[:end]).path(end), 0)]
    assert wrong and not any(oracle(text.decode, ("xx",), tokens[:end]) for end in wrong)


# ---- commit ----------------------------------------------------------------------------------------------------------
# The transaction that commits tokens, KV and captured rows.


@pytest.mark.parametrize("drafter", ["ngram", "lens"])
def test_where_captured_rows_cannot_be_read_nothing_is_committed(
    served: Engine, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = served.prompt(PROMPT, sites="STCZ", keep_rejected=True)
    before = branch.tokens, branch.activations.positions()
    with monkeypatch.context() as patch:
        patch.setattr(lens, "read_there", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room for Z")))
        with pytest.raises(MemoryError):
            branch.generate(4, drafter=drafter, window=4)
    assert (branch.tokens, branch.activations.positions()) == before
    served.check_integrity()
    assert branch.generate(4, drafter=drafter).tokens == served.prompt(PROMPT).generate(4).tokens


@pytest.mark.parametrize("end", [2, 3, 4])
def test_drafts_after_the_end_were_never_made(end: int) -> None:
    """They are neither counted nor kept as a rejected branch: they would depend on the window."""
    subject = engine(scripted_model({i: i + 1 for i in range(1, 9)}))
    how = Sampling(stop_tokens=(end,))
    for after in ([5, 6], [40, 41]):  # right and wrong
        branch = subject.prompt([1], sites="S", keep_rejected=True)
        drafts = {1: [[*range(2, end + 1), *after]]}
        branch.generate(7, sampling=how, drafter="forced", drafts=drafts, window=6, keep_pages=True)
        assert branch.generated == list(range(2, end + 1)) and branch.finish_reason == "eos"
        found = branch.statistics
        assert (found.drafted, found.accepted, found.tokens) == (end - 1, end - 1, end - 1)
        assert branch.rejected == [], "nothing was rejected"


def test_a_turn_that_fails_leaves_rows_and_pages_as_they_were() -> None:
    subject = engine(page_size=4)
    branch, failing = subject.prompt(list(range(1, 10)), sites="SZ"), [True]

    def fail(value: Tensor, context: object) -> None:
        if failing[0]:
            raise RuntimeError("no")

    (hooked,) = branch.fork(hooks=[("blocks.1.hook_in", fail)])
    before = hooked.lane.computed, hooked.lane.table.length, list(hooked.lane.table.pages), subject.runner.pool.num_free
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            hooked.force([3] * 9)
        lane = hooked.lane
        assert lane.computed <= before[0] and lane.table.length == lane.computed
        assert lane.table.pages == before[2][: len(lane.table.pages)] and subject.runner.pool.num_free >= before[3]
        subject.check_integrity()
    failing[0] = False
    assert torch.equal(hooked.force([3] * 9).kv(), subject.prompt([*range(1, 10), *[3] * 9]).kv())


# ---- rollback --------------------------------------------------------------------------------------------------------
# Rollbacks: what remains of rejected drafts, ends of text and interrupts.


def test_finish_reason_not_cleared_after_rollback() -> None:
    """The finish reason goes with the token that caused it, and comes back with it."""
    subject, sampling = engine(scripted_model({6: 40})), Sampling(stop_tokens=(40,))
    branch = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, window=4)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length - 1)
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN
    branch.generate(20, sampling=sampling, window=2)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length).generate(3)  # reopened in place: nothing is cut, but the finish reason is derived again
    assert branch.generated == [4, 5, 6, 40, 41, 42, 43] and branch.finish_reason is None


@pytest.mark.parametrize("chain", [[40], [5, 40], [9, 40], [5, 6, 40]])
def test_eos_inside_the_rejected_part(chain: list[int]) -> None:
    """A drafted EOS that is rejected ends nothing."""
    branch = engine(scripted_model({})).prompt([1, 2, 3])
    drafts = {4: [chain]}
    branch.generate(8, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts)
    assert branch.generated == [4, 5, 6, 7, 8, 9, 10, 11]
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_drafts_after_an_accepted_eos(window: int, final: bool) -> None:
    """Drafts after the end are rejected, even if the verifier would have said the same."""
    branch = engine(scripted_model({6: 40})).prompt([1, 2, 3], sites=SITES)
    drafts = {3: [[4, 5, 6, 40, 41, 42, 43][: window - 1]]}
    branch.generate(20, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts, final=final)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    assert branch.lane.computed == branch.length - (0 if final else 1)
    assert_canonical(branch)


def test_a_rejected_stop_string() -> None:
    """A stop string completed by a draft ends the request only if the draft is accepted. Nothing after it remains."""
    subject, sampling = engine(scripted_model({})), Sampling(stop=("7 50", "8 9"))
    branch = subject.prompt([1, 2, 3])
    branch.generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 50, 51]]})
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 7, 8, 9], "stop"), "7 50 was drafted, not said"
    right = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 8, 9, 10, 11]]})
    assert (right.generated, right.finish_reason) == (branch.generated, "stop"), "10 and 11 were right, but after the end"


def test_a_rolled_back_bonus_token_leaving_its_kv() -> None:
    """The bonus token T4 is computed and rolled back: its slot is freed, and another token at that position has its own KV."""
    branch = engine().prompt([1, 2, 3], sites=SITES)
    truth = continuation(toy(), [1, 2, 3], 6)
    branch.generate(5, drafter="forced", drafts={4: [truth[1:4]]}, final=True)
    assert branch.record.states == [PROMPT_OF_ROLLBACK] * 3 + [ACCEPTED] * 5
    branch.rollback(7)
    assert branch.lane.table.length == branch.lane.computed == 7
    assert len(branch.activations[SITES[0]]) == 7
    branch.force([(truth[4] + 1) % VOCAB])
    assert_canonical(branch)
    branch.rollback(7).generate(2)
    assert branch.generated == truth
    assert_canonical(branch)


def test_an_interrupt_leaving_drafts_behind() -> None:
    """Drafts are in the tree during a pass. If the pass is interrupted, they must not count as tokens later."""
    subject = engine()
    branch, waiting = subject.prompts([[1, 2, 3], [4, 5, 6]])
    exact = subject.runner.exact

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    subject.runner.exact = interrupted
    with pytest.raises(KeyboardInterrupt):
        subject.generate([branch, waiting], 8, window=4)
    subject.runner.exact = exact
    assert (branch.tokens, waiting.tokens) == ([1, 2, 3], [4, 5, 6])
    assert subject.loop.jobs == []
    assert branch.generate(8).generated == continuation(toy(), [1, 2, 3], 8)
    assert waiting.generate(8).generated == continuation(toy(), [4, 5, 6], 8)
    assert_canonical(branch)


def test_a_stop_string_in_forced_text_ending_the_generation() -> None:
    """Only the model's own text can stop it. A stop string may begin in forced text, but must end after it."""
    subject = engine(scripted_model({}))
    branch = subject.prompt([1, 2, 3]).force([20, 21, 22])
    branch.generate(4, sampling=Sampling(stop=("20 21",)))
    assert (branch.generated, branch.finish_reason) == ([20, 21, 22, 23, 24, 25, 26], None)
    across = subject.prompt([1, 2, 3]).force([20, 21]).generate(9, sampling=Sampling(stop=("21 22",)))
    assert (across.generated, across.finish_reason) == ([20, 21, 22], "stop")


@pytest.mark.parametrize("window", [1, 4])
def test_every_token_is_called_what_it_is(window: int) -> None:
    """Nobody verified a forced token, and nobody drafted a sampled one: none of them is "accepted". The words follow from the
    path and the calls, not from drafts."""
    branch = engine().prompt([1, 2]).generate(2, window=window).force([9, 9]).generate(2, window=window)
    words = ["prompt"] * 2 + ["generated"] * 2 + ["forced"] * 2 + ["generated", "pending"]
    assert branch.states == words
    (early,), (late,) = branch.fork(at=5), branch.fork(at=7)
    assert early.generate(2, window=window).states == [*words[:5], "generated", "pending"], "a forced span cut by a fork"
    assert late.force([9]).states == [*words[:7], "forced"] and branch.states == words
    assert branch.rollback(5).states == words[:5] and branch.generate(2).states == [*words[:5], "generated", "pending"]
    assert branch.rollback(3).force([9]).rollback(3).generate(1).states == [*words[:3], "pending"], "nothing is left of a force"


# ---- captured --------------------------------------------------------------------------------------------------------
# Z is computed for all turns of a pass together, before their ends are known.

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


# ---- kept rejected ---------------------------------------------------------------------------------------------------
# Forks of rejected drafts: tokens, KV and captured rows equal those of the same path forced on a fresh engine.

PROMPT_OF_KEPT_REJECTED = [1, 2, 3, 4, 5]


def rejected_of(subject: Engine, rows: bool, **options: Any) -> tuple[Branch, list[Branch]]:
    branch = subject.prompt(PROMPT_OF_KEPT_REJECTED, keep_rejected=rows, **options)
    branch.generate(10, drafter="tree", window=4, keep_pages=True)
    assert len(branch.rejected) > 2
    return branch, branch.rejected


def assert_like_forced(fork: Branch, at: int, sites: str) -> None:
    """Everything equals a branch on which the path up to `at` is forced and then continued."""
    fresh = engine().prompt(PROMPT_OF_KEPT_REJECTED, sites=sites)
    fresh.force(fork.tokens[len(PROMPT_OF_KEPT_REJECTED) : at]).generate(fork.length - at)
    assert fork.tokens == fresh.tokens and fork.certified
    assert torch.equal(fork.kv(), fresh.kv())
    assert fork.activations.positions() == fresh.activations.positions()
    for site in fresh.activations:
        assert torch.equal(fork.activations[site], fresh.activations[site]), site


@pytest.mark.parametrize(("sites", "rows"), covering(["STC", "SZ"], [False, True]))
def test_a_fork_of_a_kept_rejected_draft_keeps_its_capture(sites: str, rows: bool) -> None:
    """Also after the path that it was cut from went elsewhere."""
    subject = engine(canary=True)
    branch, rejected = rejected_of(subject, rows, sites=sites)
    for other in rejected[::3]:
        (whole,), (part,) = other.fork(), other.fork(at=other.length - 1)
        assert_like_forced(whole.generate(3), other.length, sites)
        assert_like_forced(part.generate(3), other.length - 1, sites)
    (fork,) = rejected[-1].fork()
    branch.rollback(len(PROMPT_OF_KEPT_REJECTED)).force([9, 9, 9])
    (later,) = rejected[-1].fork()
    for each in (fork, later):
        assert_like_forced(each.generate(2), rejected[-1].length, sites)
    subject.check_integrity()


def test_rows_that_nobody_asked_for_are_not_there() -> None:
    """Without keep_rejected at the prompt, the rejected branch has no rows; without a capture, neither has a fork of it."""
    for options, of in (({"sites": "S"}, lambda draft: draft), ({}, lambda draft: draft.fork()[0].generate(2))):
        _, rejected = rejected_of(engine(), False, **options)
        with pytest.raises(BadRequest, match="Nothing was captured"):
            _ = of(rejected[0]).activations


# ---- rejected forks --------------------------------------------------------------------------------------------------
# A fork of a rejected draft has the rows of its own path and none of the main path's.

PROMPT_OF_REJECTED_FORKS = [1, 2, 3, 4, 5]
SITES_OF_REJECTED_FORKS = ["blocks.0.hook_in", "blocks.1.hook_out", "blocks.1.mlp.hook_out"]


def assert_own_rows(branch: Branch) -> None:
    alone = Reference(toy(), branch.tokens, SITES_OF_REJECTED_FORKS)
    assert branch.activations.positions() == list(range(branch.length))
    for site in SITES_OF_REJECTED_FORKS:
        assert torch.equal(branch.activations[site], alone.rows[site]), site
    assert torch.equal(branch.kv(), alone.kv)


@pytest.mark.parametrize(("stood", "keeps_pages"), [(0, False), (1, True), (3, False)])
def test_rows_after_the_fork_are_not_the_main_paths(stood: int, keeps_pages: bool) -> None:
    """The main path is captured well beyond the position where the draft forks."""
    truth = continuation(toy(), PROMPT_OF_REJECTED_FORKS, 12)
    wrong = [*truth[:stood], *((token + 1) % VOCAB for token in truth[stood : stood + 4])]
    subject = engine()
    branch = subject.prompt(PROMPT_OF_REJECTED_FORKS, sites=SITES_OF_REJECTED_FORKS, keep_rejected=True)
    branch.generate(12, drafter="forced", drafts={len(PROMPT_OF_REJECTED_FORKS): [wrong]}, keep_pages=keeps_pages, final=True)
    (rejected,) = branch.rejected
    assert rejected.tokens == [*PROMPT_OF_REJECTED_FORKS, *wrong] and branch.activations.end > rejected.length
    (child,) = rejected.fork()
    subject.forest.compute([child.lane])
    assert_own_rows(child)
    assert_own_rows(child.generate(3, final=True))
    assert_own_rows(branch)
    for at in (len(PROMPT_OF_REJECTED_FORKS), rejected.length - 1):
        assert_own_rows(rejected.fork(at=at)[0].generate(2, final=True))
    main = branch.activations[SITES_OF_REJECTED_FORKS[1]][len(PROMPT_OF_REJECTED_FORKS) + stood : rejected.length]
    mine = child.activations[SITES_OF_REJECTED_FORKS[1]][len(PROMPT_OF_REJECTED_FORKS) + stood : rejected.length]
    assert not any(torch.equal(a, b) for a, b in zip(main, mine, strict=True)), "the control: the two paths differ there"


# ---- verify batch ----------------------------------------------------------------------------------------------------
# Which requests and how many rows a verification contains.


def test_off_by_one_lengths_of_requests_that_were_not_rolled_back() -> None:
    """Some requests of a pass lose drafts and others do not. Every length is right after every step."""
    subject = engine()
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [30, 31, 32]]
    truths = [continuation(toy(), p, 10) for p in prompts]
    branches = subject.prompts(prompts)
    jobs = []
    for i, (branch, truth) in enumerate(zip(branches, truths, strict=True)):
        at, chain = branch.length + 1, [t if i % 2 else (t + 1) % VOCAB for t in truth[1:4]]
        jobs.append(submit(branch, 10, drafter="forced", forced_drafts={at: [chain]}))
    while not all(job.done for job in jobs):
        subject.loop.step()
        for branch, prompt, truth in zip(branches, prompts, truths, strict=True):
            assert branch.tokens == (prompt + truth)[: branch.length]
            assert branch.record.states[-1] is PENDING
            assert branch.lane.computed == branch.lane.table.length == branch.length - 1
            assert_canonical(branch)
    assert [job.statistics.rejected for job in jobs] == [3, 0, 3, 0]


def test_cancelled_requests_still_in_a_verify_batch() -> None:
    """After a cancel no pass touches the request's pages, and other requests may take them."""
    subject = engine()
    gone, stays = subject.prompts([[1, 2, 3], [4, 5, 6]])
    cancelled, job = submit(gone, 20, drafter="lens", window=4), submit(stays, 20, drafter="lens", window=4)
    subject.loop.step()
    passes = watch_passes(subject)
    subject.cancel(cancelled)
    tokens, table = gone.tokens, gone.lane.table
    assert_canonical(gone)  # committed tokens stay
    subject.loop.step()
    assert passes and all(segment.table is not table for segments in passes for segment in segments)
    assert gone.tokens == tokens and DRAFT not in gone.record.states
    gone.release()
    while not job.done:
        subject.loop.step()
    assert stays.generated == continuation(toy(), [4, 5, 6], 20)
    assert_canonical(stays)


def test_preempted_requests_still_in_a_verify_batch() -> None:
    """A preempted request is in no pass until it has pages again, and is recomputed to the same bits."""
    subject = engine(cache_tokens=48)  # 12 pages; each request ends up needing 8
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    branches = subject.prompts(prompts)
    preempted: list[int] = []
    subject.loop.listeners.append(lambda e: preempted.append(e["branch"]) if e["event"] == "preempt" else None)
    jobs = [submit(branch, 28, drafter="lens", window=4) for branch in branches]
    while not all(job.done for job in jobs):
        turns = subject.loop.draft(subject.loop.admit())
        written = [slot for turn in turns for slot in subject.runner.pool.slots(turn.tables[0], turn.start, turn.end)]
        assert len(set(written)) == len(written), "no slot belongs to two requests of a pass"
        subject.loop.verify(turns, exact=True)
        subject.check_integrity()
    assert preempted, "control: the pages did run out"
    for branch, prompt in zip(branches, prompts, strict=True):
        assert branch.generated == continuation(toy(), prompt, 28)
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])


@pytest.mark.parametrize("drafter", ["self", "lens", "ngram", "tree", "forced"])
def test_more_unverified_tokens_than_the_window(drafter: str) -> None:
    """Between drafting and verifying there are at most window - 1 drafts, and never more than the request still needs."""
    subject = engine()
    branch = subject.prompt([1, 2, 1, 2, 1, 2])
    truth = continuation(toy(), branch.tokens, 7)
    given = {at: [truth[at - 6 :] + [0] * 9] for at in range(6, 13)} if drafter == "forced" else None
    job = submit(branch, 7, drafter=drafter, window=4, forced_drafts=given)
    while not job.done:
        turns = subject.loop.draft(subject.loop.admit())
        unverified = branch.record.states.count(DRAFT)
        assert unverified <= job.remaining - 1
        assert unverified <= 3 or drafter == "forced", "given chains are their own window"
        assert unverified <= turns[0].num_drafts == branch.lane.table.length - turns[0].end
        subject.loop.verify(turns, exact=True)
    assert branch.generated == truth
