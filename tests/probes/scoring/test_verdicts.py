"""Verdicts: three outcomes, one family, one correction; and which texts are one group."""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import calibrate_verbs
from replaylens.probes import verdicts
from replaylens.probes.groups import shared_beginnings
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sweeps import sweep
from replaylens.probes.verdicts import BELOW, INVERTED, SHOWN, UNDECIDED, Conclusion, decide, family, needed, of_line

# ---- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "upper", "inverted", "outcome"),
    [
        (0.05, 0.05, 1.0, SHOWN),
        (0.0501, 0.0999, 1.0, BELOW),
        (0.0501, 0.1, 1.0, UNDECIDED),
        (0.9, -0.2, 0.05, INVERTED),
        (0.9, -0.2, 0.0501, BELOW),
    ],
)
def test_outcomes_at_their_bounds(p: float, upper: float, inverted: float, outcome: str) -> None:
    assert decide(p, 0.02, upper, 0.05, 30, inverted=inverted).outcome == outcome


def test_an_outcome_has_the_same_words_everywhere() -> None:
    """Text, table and JSON: a line holds the verdict, and the head is made of it. Lines of earlier versions are undecided."""
    found = decide(0.2, 0.0, 0.2, 0.1, 30)
    assert (
        of_line({"accuracy": 0.5, **found.columns}) == found
        and found.head == f"Undecided: n would have to be about {found.needed}"
    )
    assert Conclusion(BELOW, 0.05).head == "Shown to be below 0.05" and Conclusion(SHOWN).head == "Shown"
    assert of_line({"verdict": "readable"}) == of_line({"verdict": "not shown"}) == of_line({}) == Conclusion(UNDECIDED)
    assert set(verdicts.LOOKS) == {SHOWN, BELOW, UNDECIDED, INVERTED}


def test_how_many_groups_decide() -> None:
    """By simulation: with that many groups, an effect of the bound is shown in about 80 %, and fewer groups show it less."""
    assert needed(0.0, 0.1, 25, bound=0.1) == 160 and needed(0.05, 0.1, 25, bound=0.1) == 620
    assert needed(0.05, 0.1, 25, cells=10) > needed(0.05, 0.1, 25) > 25 and needed(math.nan, 0.1, 25) is None
    random, shown = np.random.default_rng(0), []
    for count in (155, 40):
        gains = 0.1 + 0.5 * random.normal(size=(300, count))
        found = [family([(each, np.arange(count))]).p[0] <= 0.05 for each in gains]
        shown.append(np.mean(found))
    assert abs(shown[0] - 0.8) < 0.07 and shown[1] < 0.5


# ---- families ---------------------------------------------------------------------------------------------------------


def test_the_family_is_that_of_all_signs() -> None:
    """Against every sign by hand, for cells of which one has no rows of some groups."""
    random = np.random.default_rng(3)
    one, two = random.normal(0.5, 1, size=(2, 8)), random.normal(0.8, 1, size=5)
    found = family([(one, np.arange(8)), (two, np.arange(5) + 3)])
    sums = np.vstack([one, np.concatenate([np.zeros(3), two])])
    sums /= np.sqrt((sums**2).sum(1, keepdims=True))
    every = np.array(
        [[(-1.0 if k in flipped else 1.0) for k in range(8)] for n in range(9) for flipped in combinations(range(8), n)]
    )
    most = (every @ sums.T).max(1)
    wanted = [(most >= own - 1e-9).mean() for own in sums.sum(1)]
    assert found.p == pytest.approx(wanted) and found.cells == 3
    assert 0.95 < found.level <= 1 - 0.05 / 3, "between one cell's level and Bonferroni's"


def test_a_family_of_noise_is_shown_in_one_of_twenty() -> None:
    """Cells that have most in common are corrected for what they have not: Bonferroni's correction would show far fewer."""
    random, found = np.random.default_rng(1), []
    for _ in range(400):
        common = random.normal(size=(1, 20))
        found.append((family([(common + 0.3 * random.normal(size=(30, 20)), np.arange(20))]).p <= 0.05).any())
    assert 0.025 < np.mean(found) < 0.08


def test_folds_and_sides_cost_power() -> None:
    gains = [(np.random.default_rng(5).normal(0.6, 1, size=30), np.arange(30))]
    plain, crossed, both = family(gains), family(gains, folds=5), family(gains, sides=2)
    assert plain.p[0] < both.p[0] == 2 * plain.p[0] and plain.p[0] < crossed.p[0] and both.inverted[0] == 1


@pytest.mark.parametrize("number", [10, 11, 12])
def test_a_fast_part_of_the_calibration(number: int) -> None:
    """Steering and erasing, whose simulations take milliseconds: error and power of 40 calls each."""
    verb = calibrate_verbs.verbs()[number]
    null, planted = (calibrate_verbs.chunk(number, 0, 40, effect, None)[0] for effect in (0.0, verb.effect))
    assert null[:, 0].mean() <= 0.15, verb.name
    assert planted[:, 1].mean() > 0.3, verb.name


# ---- texts that begin alike --------------------------------------------------------------------------------------------


def linked(paths: list[np.ndarray], share: float) -> list[int]:
    """By hand: every pair of texts."""

    def common(one: np.ndarray, two: np.ndarray) -> int:
        size = min(len(one), len(two))
        return next((i for i in range(size) if one[i] != two[i]), size)

    root = min(common(one, two) for one, two in combinations(paths, 2))
    group = list(range(len(paths)))
    for i, j in combinations(range(len(paths)), 2):
        one, two = paths[i], paths[j]
        if common(one, two) >= root + max(share * (min(len(one), len(two)) - root), 1):
            group = [min(group[i], group[j]) if each in (group[i], group[j]) else each for each in group]
    return group


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_those_of_every_pair(seed: int) -> None:
    random = np.random.default_rng(seed)
    for share in (0.2, 1 / 3, 0.8):
        paths = [random.integers(2, size=random.integers(1, 9)) for _ in range(14)]
        assert shared_beginnings(paths, share).tolist() == linked(paths, share)


def test_a_template_makes_no_group() -> None:
    """What all texts begin with says nothing about which of them are alike."""
    random = np.random.default_rng(0)
    texts = [np.concatenate([np.arange(30), random.permutation(50)[:6] + 40]) for _ in range(40)]
    assert len(np.unique(shared_beginnings(texts))) > 30


def beginnings(random: np.random.Generator) -> ProbeRows:
    """24 beginnings with four endings each, a coin for each, and rows that hold the beginning and nothing of the coin."""
    begin = np.repeat(np.arange(24), 4)
    tokens = np.concatenate([random.integers(99, size=(24, 4))[begin], random.integers(99, size=(96, 2))], 1)
    x = np.zeros((96, 6, 16))
    x[:, -1] = random.normal(size=(24, 16))[begin] + 0.3 * random.normal(size=(96, 16))
    return ProbeRows.of_cache({"blocks.0.hook_in": torch.from_numpy(x)}, tokens, {"coin": random.integers(2, size=24)[begin]})


def test_endings_of_one_beginning_are_one_observation() -> None:
    """A coin for each beginning is read off its other endings, unless they are one group, as they are by default. The control,
    texts taken as independent, says so in the verdict."""
    how: dict[str, Any] = dict(positions="last", estimators="ridge", permutations=39, controls=False)
    found = []
    for seed in range(5, 13):
        rows = beginnings(np.random.default_rng(seed))
        found.append([sweep(rows, "coin", groups=groups, **how) for groups in (None, "independent")])
    alike, apart = zip(*found, strict=True)
    assert sum(report.lines[0]["verdict"] == SHOWN for report in alike) <= 2
    assert sum(report.lines[0]["verdict"] == SHOWN for report in apart) >= 6, "the leak itself"
    assert {report.lines[0]["groups"] for report in alike} == {24} and "96 texts in 24 groups" in alike[0].text()
    assert "taken as independent on request" in apart[0].text()


# ---- input ------------------------------------------------------------------------------------------------------------


def test_input_that_no_verdict_can_be_made_of() -> None:
    """Named errors, and no NaN: rows whose squares overflow, a constant number; and one missing value changes no kind."""
    from replaylens.probes.errors import BadRows, OneClass
    from replaylens.probes.probe import cross_validate
    from replaylens.probes.rows import make_target

    random = np.random.default_rng(0)
    X, y = random.normal(size=(40, 4)), np.arange(40) % 2
    with pytest.raises(BadRows, match="leave double precision"):
        cross_validate(X * 1e300, y, np.arange(40))
    with pytest.raises(OneClass, match=r"is 0\.5 at every row"):
        cross_validate(X, np.full(40, 0.5), np.arange(40), estimator="ridge")
    whole = (np.arange(40) % 3).astype(float)
    kinds = {make_target("y", values).kind for values in (whole, np.where(np.arange(40) == 7, np.nan, whole))}
    assert kinds == {"number"} and make_target("y", whole.astype(int)).kind == "class"


def test_an_estimator_that_is_not_fitted_again_has_no_p() -> None:
    random = np.random.default_rng(0)
    y = np.arange(40) % 2
    rows = ProbeRows.of_arrays(random.normal(size=(40, 4)) + 4 * y[:, None], y, np.arange(40))
    how: dict[str, Any] = dict(controls=False, permutations=19)
    again, without = (sweep(rows, "label", estimators=name, **how) for name in ("lda", "ridge-cv"))
    assert again.lines[0]["test"] == "refitted permutation" and again.lines[0]["verdict"] == SHOWN
    line = without.lines[0]
    assert line["p"] is line["p_family"] is line["test"] is None and line["verdict"] == UNDECIDED and "no p" in without.text()


# ---- monitors -----------------------------------------------------------------------------------------------------------


def texts(random: np.random.Generator, count: int, bump: float = 0.0) -> list[np.ndarray]:
    """Scores of the tokens of texts of 10 to 40 tokens, of which one is higher."""
    found = [random.normal(size=random.integers(10, 40)) for _ in range(count)]
    for each in found:
        each[random.integers(len(each))] += bump
    return found


def test_an_alarm_is_one_of_a_whole_text(tmp_path: Path) -> None:
    """One token tells: the maximum is chosen, on training texts alone. Texts without cause give an alarm at the promised rate,
    and its interval holds what fresh texts show."""
    from replaylens.probes.probe import LinearProbe, fit_probe, make_alarm

    random, rates = np.random.default_rng(0), []
    for _ in range(40):
        alarm = make_alarm([*texts(random, 20), *texts(random, 20, 6.0)], [False] * 20 + [True] * 20, texts(random, 99), 0.05)
        fresh = np.mean([alarm.score(each) > alarm.threshold for each in texts(random, 400)])
        rates.append((fresh, alarm.low <= fresh <= alarm.high))
        assert alarm.pooling == "max" and alarm.rate == 0.05 and np.isclose(alarm.low, 0.0165, atol=1e-3)
    means, held = np.mean(rates, axis=0)
    assert 0.035 < means < 0.065 and held > 0.85
    assert str(alarm).endswith("as in 5.0 % of texts without cause [1.7, 10.0], by 99 held out")
    y = np.arange(40) % 2
    plain = fit_probe(
        ProbeRows.of_arrays(random.normal(size=(40, 4)) + 4 * y[:, None], y, np.arange(40)), "label", site="X", position="all"
    )
    for each in (plain, replace(plain, alarm=alarm)):
        assert LinearProbe.load(each.save(tmp_path / "probe")).alarm == each.alarm, "a saved probe has its alarm"
    shifted = [each + 1.0 for each in texts(random, 20)]
    assert make_alarm([*texts(random, 20), *shifted], [False] * 20 + [True] * 20, texts(random, 99)).pooling == "mean"


def test_alarms_that_cannot_be_set() -> None:
    from replaylens.probes.errors import BadRows, OneClass, ProbeError
    from replaylens.probes.probe import make_alarm

    random = np.random.default_rng(0)
    known, kinds = texts(random, 4), [True, False, True, False]
    with pytest.raises(BadRows, match=r"10 held-out texts cannot show a rate of 0\.05. Give at least 19"):
        make_alarm(known, kinds, texts(random, 10))
    with pytest.raises(OneClass, match="Give texts of both kinds"):
        make_alarm(known, [True] * 4, texts(random, 30))
    with pytest.raises(ProbeError, match=r"rate=1\.5 is no share"):
        make_alarm(known, kinds, texts(random, 30), 1.5)
    with pytest.raises(BadRows, match="scores of negatives has NaN"):
        make_alarm(known, kinds, [np.array([np.nan])])
    with pytest.raises(BadRows, match="no scores of texts"):
        make_alarm(known, kinds, [np.zeros((3, 2))])


def test_a_sink_does_not_flatten_the_picture() -> None:
    from replaylens.probes.probe import TokenScores

    scores = np.array([80.0, 1.0, -1.0, 0.5])
    low, high = TokenScores("face", ("a", "b"), [list("wxyz")], [scores]).plot().axes[0].get_ylim()
    assert -2 < low < high < 2
    low, high = TokenScores("face", ("a", "b"), [list("wxyz")], [scores.clip(max=3)]).plot().axes[0].get_ylim()
    assert high > 3, "negative control: a first token like others is drawn"


def test_groups_that_are_given_are_all_that_there_are() -> None:
    """Every beginning with every ending: by beginning and ending, all texts would be one group. Control: by default they are
    grouped by their beginnings."""
    begins, ends, each = 6, 6, 4
    begin, end = np.repeat(np.arange(begins), ends), np.tile(np.arange(ends), begins)
    tokens = np.stack([np.full(36, 1), 10 + begin, 20 + begin, 30 + end], 1).ravel()
    X = np.random.default_rng(0).normal(size=(len(tokens), 3))
    rows = ProbeRows.of_arrays(
        X, {"late": np.repeat(end % 2, each), "ending": np.repeat(end, each)}, np.repeat(np.arange(36), each),
        tokens=tokens, positions=np.tile(np.arange(each), 36),
    )  # fmt: skip
    for groups, wanted in (("ending", ends), (None, begins)):
        report = sweep(rows, "late", positions="last", controls=False, permutations=0, folds=2, groups=groups)
        assert report.lines[0]["groups"] == wanted, groups
