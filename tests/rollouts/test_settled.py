"""`settle=`: rollouts stop once the likeliest answer is settled. Its error holds at any time, which a plain test's does not."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.sampling import Sampling
from replaylens.rollouts.plan import Answer, Race, evidence

ALPHA, DRAWS, RUNS = 0.1, 60, 500
DISTRIBUTIONS = {
    "two answers, nearly a tie": [0.502, 0.498],
    "two answers": [0.6, 0.4],
    "ten answers, nearly ties": [0.1018, *[0.0998] * 9],
    "the likeliest is rare at first": [0.4, *[0.06] * 10],
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("coin-plain")


@pytest.mark.parametrize("own, other", [(0, 0), (1, 0), (0, 3), (9, 2), (40, 37)])
def test_evidence_is_the_integral(own: int, other: int) -> None:
    found = integrate.quad(lambda t: 2 * (2 * t) ** own * (2 - 2 * t) ** other, 0.5, 1, epsabs=0, epsrel=1e-12)[0]
    assert float(evidence(own, other)) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("other", [0, 1, 4, 11])
def test_evidence_of_the_next_draw_is_what_it_is_now(other: int) -> None:
    """Under a tie the evidence is a martingale, in whole numbers; it falls with the other's draws."""
    for own in range(12):
        assert (evidence(own + 1, other) + evidence(own, other + 1)) / 2 == evidence(own, other)
        assert evidence(own, other + 1) < evidence(own, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "tie" in name else pytest.mark.slow) for name in DISTRIBUTIONS]
)
def test_errors_at_any_time_are_rarer_than_alpha(name: str) -> None:
    """The worst rule of stopping, which waits for an error, finds one in at most alpha of the runs."""
    p = np.array(DISTRIBUTIONS[name])
    errors = sum(settled not in (None, "0") for settled in settled_in(p, seed=1))
    assert errors / RUNS <= ALPHA + 2 * np.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def settled_in(p: np.ndarray, seed: int) -> list[str | None]:
    draws = np.random.default_rng(seed).choice(len(p), size=(RUNS, DRAWS), p=p)
    found = []
    for run in draws:
        race = Race(ALPHA)
        for each in run:
            if race.add(str(each)) is not None:
                break
        found.append(race.settled)
    return found


def test_a_plain_test_after_every_draw_errs_more_often() -> None:
    """Negative control: a binomial test at the same level, asked after every draw, settles the wrong one of two too often."""
    draws = np.random.default_rng(1).choice(2, size=(RUNS, DRAWS), p=DISTRIBUTIONS["two answers, nearly a tie"])
    wrong = draws.cumsum(1)
    n = np.arange(1, DRAWS + 1)
    assert (stats.binom.sf(wrong - 1, n, 0.5) <= ALPHA).any(1).mean() > 2 * ALPHA


def test_clear_answers_are_settled() -> None:
    """Power: without it, a rule that never stops would pass."""
    found = Counter(settled_in(np.array([0.9, 0.05, 0.05]), seed=2))
    assert found["0"] / RUNS > 0.99


@pytest.mark.slow
def test_rollouts_are_the_first_of_the_plan(engine: Engine) -> None:
    """A position with one answer stops early, one with a fair coin goes on; what is drawn has the bits of the full call."""
    chain = engine.prompt("A coin's state is heads.").force(" Alice flips. What's the state? A: tails.")
    answer, at = Answer.regex("heads|tails"), [6, chain.length - 2]
    options = dict(at=at, max_new=16, answer=answer, sampling=Sampling(temperature=1.0, seed=3), sites="S")
    full, few = chain.resample(40, **options), chain.resample(40, settle=0.05, **options)  # type: ignore[arg-type]
    kept = Counter(each.position for each in few)
    assert kept[at[1]] == 16 and kept[at[1]] < len(full) / 2
    same = [each for each in full if each.number < kept[each.position]]
    assert [each.digest for each in few] == [each.digest for each in same]
    assert few.settled()[at[1]] == "tails" and full.settled()[at[1]] == "tails"
    assert few.outcomes().counts.sum(1).tolist() == [kept[at[0]], kept[at[1]]]
    site = next(iter(few.states))
    assert len(few.states[site]) == len(few.index) and torch.isfinite(few.states[site]).all()
    assert "at most 40" in repr(few) and repr(full).startswith("Rollouts(40 at each")


def test_a_rollout_without_an_answer_says_nothing() -> None:
    race = Race(0.05)
    for each in [None, "a"] * 8:
        race.add(each)
    assert race.settled is None and race.add("a") == "a"


@pytest.mark.parametrize("alpha", [0, 1, -0.1, "a", float("nan")])
def test_bad_levels_are_named(engine: Engine, alpha: float) -> None:
    with pytest.raises(BadRequest, match="settle"):
        engine.prompt("A coin's state is heads.").resample(4, max_new=2, answer=Answer.regex("heads"), settle=alpha)


def test_settle_needs_an_answer_and_no_folder(engine: Engine, tmp_path: object) -> None:
    root = engine.prompt("A coin's state is heads.")
    with pytest.raises(BadRequest, match="Give answer="):
        root.resample(4, max_new=2, settle=0.05)
    with pytest.raises(BadRequest, match="Leave one of the two out"):
        root.resample(4, max_new=2, answer=Answer.regex("heads"), settle=0.05, folder=str(tmp_path))


def test_evidence_is_exact() -> None:
    assert evidence(8, 0) == Fraction(511, 9)


def test_the_last_wave_at_a_position_ends_with_the_plan(engine: Engine) -> None:
    """Seven in waves of three, where nothing settles: the first seven of the plan at each position, each once."""
    chain = engine.prompt("A coin's state is heads.").force(" Alice flips.")
    at = [chain.root_length, chain.length]
    found = chain.resample(7, at=at, max_new=2, answer=Answer.regex("zebra"), settle=0.05, wave=3)
    assert [(each.position, each.number) for each in found] == [(position, number) for position in at for number in range(7)]


def test_texts_of_settled_rollouts_have_their_own_paths() -> None:
    """Positions may have drawn different numbers of rollouts."""
    engine = Engine.load("coin-plain")
    chain = engine.prompt("A coin's state is heads.").force(" Alice flips. Bob flips. What's the state? A:")
    hot, answer = Sampling(temperature=1.2, seed=5), Answer.regex("(heads|tails)")
    drawn = chain.resample(40, at="sentences", max_new=10, answer=answer, sampling=hot, settle=0.05)
    counts = Counter(each.position for each in drawn)
    assert len(set(counts.values())) > 1, "control: positions differ in their numbers"
    texts = engine.texts(drawn).examples(len(drawn))
    told = [(*chain.tokens[: each.position], *each.tokens) for each in drawn]
    assert [example.given.tokens for example in texts] == told
