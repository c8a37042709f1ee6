"""Sampling is a pure function of logits, path and parameters, so a rollback has nothing to restore."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from replaylens.engine.errors import ClosedBranch
from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.request.sampling import Sampling, gumbel, hash_bits
from replaylens.kernels import cpu_noise
from replaylens.kernels import reference as kernels
from tests.devices import swept
from tests.toy_model import VOCAB, continuation, engine, scripted_model, toy

EVERYTHING = Sampling(
    temperature=1.3,
    top_k=20,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    logit_bias={3: 0.5, 17: -2.0},
    seed=11,
)


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / math.fsum(weights) for w in weights]


# ---- greedy ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5000001]), min_size=1, max_size=40))
def test_greedy_takes_the_largest_and_among_equals_the_lowest_id(values: list[float]) -> None:
    logits = np.asarray(values, dtype=np.float32)
    expected = min(i for i, x in enumerate(logits) if x == max(logits))
    assert Sampling().choose(logits, [0], 1) == expected


def test_the_logits_are_not_changed() -> None:
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32)
    before = logits.copy()
    EVERYTHING.choose(logits, [1, 2, 3, 1], 2)
    assert np.array_equal(logits, before)


# ---- the noise -------------------------------------------------------------------------------------------------------


def test_hash_bits_are_pinned() -> None:
    """Integer arithmetic: a platform where these bits differ would draw other tokens from the same seed."""
    ids = np.arange(3, dtype=np.uint64)
    assert [hex(x) for x in hash_bits(0, 0, ids)] == ["0x33fe8bd4f9c57863", "0x568a9b0b1a2c05ec", "0x44e5b8b147ef718b"]
    assert [hex(x) for x in hash_bits(2**64 - 1, 12345, ids)] == [
        "0x64345ab7d06a86d",
        "0x694fb16d33ee6a35",
        "0xce026cb9740570ff",
    ]


def test_draws_are_pinned() -> None:
    logits = np.linspace(-1, 1, 11, dtype=np.float32)
    drawn = [Sampling(temperature=1.0, seed=5).choose(logits, [0] * length, 0) for length in range(24)]
    assert drawn == [7, 9, 3, 10, 9, 7, 8, 2, 4, 6, 8, 8, 5, 5, 4, 10, 4, 10, 10, 8, 3, 9, 8, 8]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6))
def test_the_noise_is_that_of_the_kernels(seed: int, position: int) -> None:
    """The same hash, and u at the same midpoints: a GPU and a CPU make the same draw."""
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    theirs = kernels.hash64(signed, torch.tensor([position]), torch.arange(9))
    mine = hash_bits(seed, position, np.arange(9, dtype=np.uint64))
    assert [x % 2**64 for x in theirs.tolist()] == mine.tolist()
    noise = kernels.gumbel(signed, torch.tensor([position]), torch.arange(9)).numpy()
    np.testing.assert_allclose(gumbel(seed, position, 9), noise, rtol=1e-12, atol=1e-15)  # the two libraries' logarithms differ


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6))
def test_the_noise_of_a_token_depends_on_seed_position_and_id_alone(seed: int, position: int) -> None:
    """The noise does not depend on the vocabulary size, nor on the token's place in a sorted or filtered list."""
    assert np.array_equal(gumbel(seed, position, 50)[:7], gumbel(seed, position, 7))
    assert not np.array_equal(gumbel(seed, position, 7), gumbel(seed, position + 1, 7))
    assert not np.array_equal(gumbel(seed, position, 7), gumbel((seed + 1) % 2**64, position, 7))
    assert len(set(gumbel(seed, position, 50))) == 50


HASHES = [
    0,
    1,
    2**12 - 1,
    2**12,
    2**64 - 1,
    *(near for n in range(12, 64) for near in (2**n, 2**n - 1, ~(2**n) % 2**64, -(2**n) % 2**64)),
]


@pytest.mark.parametrize("per_bit, enough", [(cpu_noise.PER_BIT, True), (math.log(2) * (1 - 1e-9), False)])
def test_the_noise_is_finite_and_bounded_whatever_the_hash(per_bit: float, enough: bool) -> None:
    """u = 0 or u = 1 would give infinity, and an infinite score wins whatever the logits. The bound is nearly reached: u
    closest to 1 exceeds one that is a little too small."""
    both = cpu_noise._noise, lambda h: cpu_noise._most_noise(h, per_bit)
    noise, most = (np.array([f(np.uint64(h)) for h in HASHES]) for f in both)
    assert np.isfinite(noise).all()
    assert (noise <= most).all() == enough


def drawn_plainly(scores: "np.ndarray", seed: int, position: int) -> int:
    return int((scores + gumbel(seed, position, len(scores))).argmax())


def many_scores() -> list["np.ndarray"]:
    """Flat, peaked, sloping, filtered, tied."""
    random = np.random.default_rng(0)
    flat = random.normal(size=3000)
    filtered = np.where(random.random(3000) < 0.99, -np.inf, flat)
    return [
        flat,
        flat * 8,
        np.sort(flat * 3),
        np.sort(-flat * 3)[::-1],
        filtered,
        np.zeros(3000),
        np.full(9, -np.inf),
        flat[:1],
    ]


def test_a_draw_that_bounds_the_noise_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same token for every seed; a bound that is too small gives another one."""
    wrong = 0
    for seed, scores in product(range(100), many_scores()):
        expected = drawn_plainly(scores, seed, seed % 7)
        assert cpu_noise.draw(scores, seed, seed % 7) == expected
        with monkeypatch.context() as patched:
            patched.setattr(cpu_noise, "PER_BIT", cpu_noise.PER_BIT * 0.7)
            wrong += cpu_noise.draw(scores, seed, seed % 7) != expected
    assert wrong > 50
    odd = [np.array(x) for x in ([0.0, np.nan, np.inf], [np.inf, 1.0, np.inf, np.nan], [1e308, 1e308], [3.0, np.inf, np.inf])]
    assert all(cpu_noise.draw(scores, seed, 3) == drawn_plainly(scores, seed, 3) for scores in odd for seed in range(9))


@given(data=st.data())
def test_near_ties_may_swap_ranks_without_changing_the_draw(data: st.DataObject) -> None:
    """Only the winner's margin matters: swaps among other tokens change nothing."""
    logits = np.asarray(data.draw(st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=12)), dtype=np.float32)
    sampling, path = Sampling(temperature=0.9, seed=data.draw(st.integers(0, 1000))), [0] * data.draw(st.integers(1, 50))
    drawn = sampling.choose(logits, path, 1)
    losers = [i for i in range(len(logits)) if i != drawn]
    lowered = logits.copy()
    for i in data.draw(st.lists(st.sampled_from(losers), unique=True)):
        lowered[i] -= np.float32(data.draw(st.floats(0, 2, width=32)))
    assert sampling.choose(lowered, path, 1) == drawn


@pytest.mark.slow
@pytest.mark.parametrize("temperature", swept([0.5, 1.0, 2.0], 0.5))
def test_draws_are_distributed_like_the_softmax(temperature: float) -> None:
    """Over positions of one seed, and over seeds of one position. The seeds are fixed, so the p-value is a constant."""
    logits = np.asarray([0.3, -1.0, 1.2, 0.0, 0.9, -0.4], dtype=np.float32)
    expected = np.asarray(softmax([float(x) for x in logits], temperature)) * 4000
    over_positions = Counter(Sampling(temperature=temperature, seed=3).choose(logits, [0] * n, 0) for n in range(4000))
    over_seeds = Counter(Sampling(temperature=temperature, seed=s).choose(logits, [0] * 9, 0) for s in range(4000))
    for counts in (over_positions, over_seeds):
        assert chisquare([counts[i] for i in range(6)], expected).pvalue > 0.01
    control = np.roll(expected, 1)
    assert chisquare([over_seeds[i] for i in range(6)], control).pvalue < 1e-9


def test_successive_draws_are_independent() -> None:
    """Pairs of neighbouring positions fill the unit square evenly."""
    logits = np.zeros(4, dtype=np.float32)
    drawn = [Sampling(temperature=1.0, seed=8).choose(logits, [0] * n, 0) for n in range(4001)]
    pairs = Counter(pairwise(drawn))
    assert chisquare([pairs[a, b] for a in range(4) for b in range(4)]).pvalue > 0.01


# ---- filters and penalties, against plain code -----------------------------------------------------------------------


def plain_choice(s: Sampling, logits: Sequence[float], path: Sequence[int], num_prompt: int) -> int:
    """The definition of `Sampling.choose`, one token at a time."""
    scores = [float(x) for x in logits]
    for token in set(path):
        if s.repetition_penalty != 1.0:
            factor = s.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(path[num_prompt:]):
        scores[token] -= s.presence_penalty
    for token, bias in s.logit_bias.items():
        scores[token] += bias
    if s.temperature == 0:
        return scores.index(max(scores))
    probabilities = softmax(scores, s.temperature)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = order[: s.top_k] if s.top_k else order
    kept = [token for token in kept if probabilities[token] >= s.min_p * probabilities[order[0]]]
    nucleus: list[int] = []
    for token in kept:  # until they reach top_p of the mass that the other filters leave
        if nucleus and math.fsum(probabilities[t] for t in nucleus) >= s.top_p * math.fsum(probabilities[t] for t in kept):
            break
        nucleus.append(token)
    noise = gumbel(s.seed, len(path), len(scores))
    return max(nucleus, key=lambda token: (scores[token] / s.temperature + noise[token], -token))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_parameter_means_what_it_says(data: st.DataObject) -> None:
    """Random parameters on random logits with ties, against the plain code above."""
    vocab = data.draw(st.integers(2, 12))
    grid = st.sampled_from([x / 4 for x in range(-12, 13)])
    logits = np.asarray(data.draw(st.lists(grid, min_size=vocab, max_size=vocab)), dtype=np.float32)
    path = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=10))
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.37, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 5, 100])),
        top_p=data.draw(st.sampled_from([0.03, 0.41, 0.77, 0.93, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.13, 0.55])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.9])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.6, -0.6])),
        logit_bias=data.draw(st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-1e9, -0.9, 0.9]), max_size=3)),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    num_prompt = data.draw(st.integers(0, len(path)))
    expected = plain_choice(sampling, logits.tolist(), path, num_prompt)
    assert sampling.choose(logits, path, num_prompt) == expected


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    logits, path = np.array([1.0, 0.9, 0.8], dtype=np.float32), [0, 1]
    assert Sampling(repetition_penalty=5.0).choose(logits, path, 1) == 2
    assert Sampling(presence_penalty=5.0).choose(logits, path, 1) == 0


def drawable(sampling: Sampling, logits: Sequence[float]) -> set[int]:
    """All tokens that are drawn by some seed."""
    values = np.asarray(logits, dtype=np.float32)
    seeds = range(300)
    return {Sampling(**{**vars(sampling), "seed": seed}).choose(values, [0], 1) for seed in seeds}


CHANGES = {
    "top_k": 2, "top_p": 0.5, "min_p": 0.4, "repetition_penalty": 5.0, "presence_penalty": 5.0, "logit_bias": {1: 9.0},
    "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_a_draw_and_says_so(name: str) -> None:
    """A draw that needs only logits, seed and position (`bare`) may be made elsewhere, without the filters and penalties."""
    logits, path = np.array([2.0, 1.5, 1.0, 0.5, 0.0], dtype=np.float32), [0, 3, 0]
    plain, changed = (
        [
            Sampling(temperature=1.5, **{"seed": seed, **more}).choose(logits, path[: 1 + at], 1)
            for seed in range(40)
            for at in range(3)
        ]
        for more in ({}, {name: CHANGES[name]})
    )
    assert plain != changed
    assert Sampling(temperature=1.5).bare and Sampling(temperature=1.5, **{name: CHANGES[name]}).bare == (name == "seed")
    filters = ("top_k", "top_p", "min_p")  # of a draw: the likeliest token is always kept
    assert Sampling(**{name: CHANGES[name]}).plain_greedy == (name in (*filters, "seed"))


def test_filters_keep_exactly_what_they_should() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    assert drawable(Sampling(temperature=1.0), logits) == {0, 1, 2, 3, 4}
    assert drawable(Sampling(temperature=1.0, top_k=2), logits) == {0, 1}
    assert drawable(Sampling(temperature=1.0, top_p=0.5), logits) == {0, 1}
    assert drawable(Sampling(temperature=1.0, top_p=0.39), logits) == {0}
    assert drawable(Sampling(temperature=1.0, min_p=0.45), logits) == {0, 1, 2}
    assert drawable(Sampling(temperature=1.0, logit_bias={0: -1e9, 1: -1e9}), logits) == {2, 3, 4}
    assert drawable(Sampling(temperature=1.0, top_k=2), [1.0, 1.0, 1.0]) == {0, 1}, "ties in rank go to the lower id"


def test_top_p_is_a_share_of_what_the_other_filters_left() -> None:
    """Of 0.4, 0.3, ... the first two are left: 4/7 and 3/7. The first alone reaches half of that."""
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    assert drawable(Sampling(temperature=1.0, top_k=2, top_p=0.5), logits) == {0}
    assert drawable(Sampling(temperature=1.0, top_k=2, top_p=0.6), logits) == {0, 1}
    assert drawable(Sampling(temperature=1.0, min_p=0.7, top_p=0.5), logits) == {0}
    assert drawable(Sampling(temperature=1.0, min_p=0.7, top_p=0.6), logits) == {0, 1}
    assert drawable(Sampling(temperature=1.0, top_p=0.5), logits) == {0, 1}, "the control: of all tokens it is the first two"


# ---- on branches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=4), EVERYTHING], ids=["greedy", "plain", "all"]
)
def test_generation_follows_choose_and_survives_rollback(sampling: Sampling) -> None:
    """Generate, roll back and generate again, in other steps and with other drafters: the same tokens."""
    truth = continuation(toy(), [5, 6, 7], 12, sampling)
    subject = engine()
    branch = subject.prompt([5, 6, 7])
    for to, drafter, window in ((3, "self", 4), (3, "lens", 3), (8, "ngram", None), (14, "tree", 4), (4, "self", 1)):
        branch.rollback(to) if branch.length > 3 else None
        branch.generate(15 - branch.length, sampling=sampling, drafter=drafter, window=window)
        assert branch.generated == truth
    (fork,) = branch.fork(at=7)
    while fork.length < 15:
        fork.generate(1, sampling=sampling)
    assert fork.generated == truth
    subject.check_integrity()


def test_another_seed_gives_another_continuation() -> None:
    """Negative control: draws depend on the seed."""
    hot = [continuation(toy(), [5, 6, 7], 12, Sampling(temperature=1.0, seed=s)) for s in range(4)]
    assert len({tuple(tokens) for tokens in hot}) == 4


# ---- ends ------------------------------------------------------------------------------------------------------------


class Pieces:
    """A byte-level tokenizer: token i is a piece of bytes, which need not be whole characters."""

    eos_token_id = 9

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return b"".join(self.pieces[i % len(self.pieces)] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize(
    ("stop", "generated"),
    [
        (("bc",), [1, 2]),  # over two tokens
        (("xyz", "bcde"), [1, 2, 3]),  # over three, and the second of two strings
        (("é",), [1, 2, 3, 4, 5]),  # a character whose bytes are two tokens
        (("ed", "ef"), [1, 2, 3, 4, 5, 6, 7, 8]),  # never
    ],
)
def test_stop_strings_across_token_boundaries(stop: tuple[str, ...], generated: list[int], window: int) -> None:
    """0 1 2 ... reads "ab cd e é ...": the branch ends with the token that completes a stop string, not before."""
    text = Pieces(b"?", b"ab", b"cd", b"e", "é".encode()[:1], "é".encode()[1:], b"g", b"h", b"i")
    subject = engine(scripted_model({}), tokenizer=text)
    branch = subject.prompt([0]).generate(8, sampling=Sampling(stop=stop), window=window)
    assert branch.generated == generated
    assert branch.finish_reason == ("stop" if len(generated) < 8 else None)
    if branch.finish_reason:
        with pytest.raises(ClosedBranch, match="Roll it back or fork it"):
            branch.generate(1)
        before = branch.length
        branch.rollback(before - 1)
        assert branch.generate(8, sampling=Sampling(stop=stop)).generated == generated, "and again after a rollback"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    text = Pieces(b"?", b"ab", b"cd", b"e")
    subject = engine(scripted_model({}), tokenizer=text)
    branch = subject.prompt([1, 2]).generate(3, sampling=Sampling(stop=("bc", "de")))
    assert (branch.text[:4], branch.generated, branch.finish_reason) == ("abcd", [3, 4, 5], None), "de lies half in the prompt"


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("stop", ["d", "cd", "bcd", "abcd"])
def test_a_stop_string_that_ends_with_forced_text_does_not_count(stop: str, window: int) -> None:
    """The model has generated no part of such a stop string. With one generated character more, the string counts."""
    subject = engine(scripted_model({}), tokenizer=Pieces(b"?", b"ab", b"cd", b"e", b"f", b"g", b"h"))
    branch = subject.prompt([0]).force([1, 2]).generate(3, sampling=Sampling(stop=(stop,)), window=window)
    assert (branch.text, branch.finish_reason) == ("?abcdefg", None)
    said = subject.prompt([0]).force([1, 2]).generate(3, sampling=Sampling(stop=(stop[1:] + "e",)), window=window)
    assert (said.text, said.finish_reason) == ("?abcde", "stop")


@pytest.mark.parametrize("window", [1, 4])
def test_eos_ends_a_branch_unless_it_is_ignored(window: int) -> None:
    subject = engine(scripted_model({}), tokenizer=Pieces(b"a", b"b"))
    branch = subject.prompt([5, 6]).generate(8, window=window)
    assert (branch.generated, branch.finish_reason, branch.status) == ([7, 8, 9], "eos", BranchStatus.FINISHED)
    through = subject.prompt([5, 6]).generate(8, window=window, sampling=Sampling(ignore_eos=True))
    assert (through.generated, through.finish_reason) == ([7, 8, 9, 10, 11, 12, 13, 14], None)
    own = subject.prompt([5, 6]).generate(8, window=window, sampling=Sampling(stop_tokens=(12,), ignore_eos=True))
    assert (own.generated, own.finish_reason) == ([7, 8, 9, 10, 11, 12], "eos")


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("drafter", ["self", "ngram"])
def test_an_end_on_exactly_the_last_token_counts(window: int, drafter: str) -> None:
    """The n-th of n tokens ends the branch as any other does; one token less leaves it open."""
    subject = engine(scripted_model({}), tokenizer=Pieces(b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"i"))
    ends = ((Sampling(), 3, "eos"), (Sampling(stop=("hi",)), 2, "stop"), (Sampling(stop_tokens=(8,)), 2, "eos"))
    for sampling, n, reason in ends:
        branch = subject.prompt([5, 6]).generate(n, sampling=sampling, window=window, drafter=drafter)
        assert (branch.finish_reason, branch.status) == (reason, BranchStatus.FINISHED), sampling
        with pytest.raises(ClosedBranch):
            branch.generate(1)
        short = subject.prompt([5, 6]).generate(n - 1, sampling=sampling, window=window, drafter=drafter)
        assert (short.generated, short.finish_reason) == (branch.generated[:-1], None)


@pytest.mark.parametrize("window", [1, 4])
def test_an_answer_is_looked_for_in_what_the_job_generated(window: int) -> None:
    """`until` gets the job's own tokens: none of the prompt, of forced tokens or of an earlier job."""
    subject = engine(scripted_model({}))
    branch = subject.prompt([1, 2]).force([3]).generate(2)
    for n, wanted, reason in ((4, [6, 7], "answer"), (2, [8, 9], "answer"), (2, [10, 11], "length")):
        asked = list[list[int]]()

        def until(tokens: Sequence[int], asked: list[list[int]] = asked, end: list[int] = wanted, why: str = reason) -> bool:
            asked.append(list(tokens))
            return why == "answer" and list(tokens) == end

        job = Job(branch.lane, n, window=window, until=until)
        subject.forest.serve(lambda job=job: [job])  # type: ignore[misc]
        assert job.finish_reason == reason and branch.tokens[-len(wanted) :] == wanted
        assert asked == [wanted[: i + 1] for i in range(len(wanted))] and branch.finish_reason is None


@pytest.mark.parametrize("penalty", [{"presence_penalty": 100.0}, {"repetition_penalty": 1e6}])
def test_penalties_forget_a_token_that_was_rolled_back(penalty: dict[str, float]) -> None:
    """Token 30 is the favourite, once. After a rollback and other tokens in its place, it is the favourite again."""
    sampling, subject = Sampling(logit_bias={30: 60.0}, **penalty), engine()  # type: ignore[arg-type]
    for generated, forced in product(range(1, 5), range(1, 5)):
        branch, others = subject.prompt([5, 6, 7]).generate(generated, sampling=sampling), [40, 41, 42, 43][:forced]
        assert branch.generated[0] == 30 and 30 not in branch.generated[1:], "the control: the penalty holds"
        (fork,) = branch.fork(at=3)
        branch.rollback(3).force(others)
        assert branch.generate(1, sampling=sampling).generated[-1] == 30, (generated, forced)
        assert fork.force(others).generate(1, sampling=sampling).generated[-1] == 30, "and on a fork from before it"
