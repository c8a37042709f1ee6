"""Rows with the same path are one observation. Nothing that is tested has been seen, whichever way a split was made."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.probes import controls, groups, splits, sweeps
from replaylens.probes.controls import Goal
from replaylens.probes.errors import BadRows, ProbeError, RootOnBothSides, SharedRows, TooFewGroups
from replaylens.probes.heldout import held_out, score
from replaylens.probes.permutations import Null, why_no_exchange
from replaylens.probes.report import shown
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import Split
from replaylens.probes.sweeps import sweep
from tests.calibrate import PLAINS, Effect, Noise, Plain
from tests.probes.synthetic import labelled_rows, rows_of


@pytest.fixture(scope="module")
def coin(engine: Engine) -> ProbeRows:
    """Short prompts, many of which begin alike."""
    return ProbeRows.of(engine.replay(tasks.get("coin")(flips=2).examples(200), sites=["blocks.3.hook_in"])).accepted()


def repeated(split: Split, rows: ProbeRows, cell: str = "blocks.3.hook_in") -> float:
    """Share of tested rows that have a bit-identical fitted row."""
    x = np.ascontiguousarray(rows.matrix(cell))
    bits = x.view(f"V{x.shape[1] * x.itemsize}")[:, 0]
    return float(np.mean([np.isin(bits[test], bits[train]).mean() for train, test in split]))


@pytest.mark.parametrize("position", ["step:1", "step", "query"])
def test_no_tested_row_has_been_fitted(coin: ProbeRows, position: str) -> None:
    """Cross-validation over groups separates equal rows; over roots it does not. Distinct rows have no equals at all."""
    here = coin.at(position)
    assert repeated(splits.by_root(here), here) == 0
    alone = groups.independent(here).rows
    assert repeated(splits.by_root(alone), alone) == 0 and len(np.unique(groups.path_keys(alone))) == len(alone)
    if position != "query":  # the control: roots differ where rows are equal
        fold = splits.fold_of_groups(here.roots, 5)
        naive = Split("by root alone", np.arange(5)[:, None] != fold, np.arange(5)[:, None] == fold, here.roots)
        assert repeated(naive, here) > 0.3


def test_a_label_of_the_path_is_not_shown(coin: ProbeRows) -> None:
    """A random bit of each path can be learnt by heart from rows of the same path, and from nothing else."""
    here = coin.at("step:1")
    paths = groups.histories(here)
    assert paths is not None
    bit = [hashlib.sha256(path.tobytes()).digest()[0] % 2 for path in paths]
    labelled = replace(here, frame=here.frame.assign(bit=bit))
    report = sweep(labelled, "bit", sites=["blocks.3.hook_in"], positions="step:1", permutations=39)
    line = report.best("bit")
    assert report.text().startswith("Not shown") and line["low"] < 0.5
    assert line["distinct"] == line["groups"] < line["rows"] == len(here), "what repeats is counted, but not as evidence"


def test_groups_join_roots_that_share_a_row() -> None:
    """Roots 0 and 1 share their first row, 1 and 2 their second: all three are one group, and 3 is another."""
    x = np.zeros((1, 8, 2))
    x[0, :, 0] = [1, 2, 1, 3, 4, 3, 5, 6]
    rows = labelled_rows(x, np.repeat(np.arange(4), 2), np.arange(8) % 2, token=0)
    keys = np.array(["a", "b", "a", "c", "d", "c", "e", "f"])
    found = groups.groups_of(rows, keys)
    assert len(set(found[:6])) == 1 and found[6] == found[7] != found[0]
    assert found[0] == min(rows.roots[:6]), "named after its first root, whatever the order"


def test_shared_beginnings_are_left_out(coin: ProbeRows) -> None:
    """All prompts begin with one word, which makes one group. Without it there are enough, and the report says so."""
    here = groups.independent(coin)
    assert here.begins_at > 0 and len(np.unique(here.groups)) >= groups.MIN_GROUPS
    assert (here.rows.frame["position"] >= here.begins_at).all() and here.note is not None
    with pytest.raises(TooFewGroups, match="1 independent groups"):
        splits.by_root(coin)
    report = sweep(coin, "face", sites=["blocks.3.hook_in"], positions="all", permutations=0, controls=False)
    assert any("share the rows before token" in note for note in report.notes)
    assert groups.independent(coin.at("query")).begins_at == 0


def test_accepted_rows_stand_for_rejected_ones() -> None:
    """Of equal rows the accepted one is kept."""
    rows = rows_of(roots=10, per_root=1)
    twice = ProbeRows.join(a=rows.where(np.ones(10, dtype=bool)), b=rows)
    frame = twice.frame.assign(accepted=np.arange(20) >= 10)
    kept = groups.distinct(replace(twice, frame=frame))
    assert len(kept) == 10 and kept.frame["accepted"].all()


# Splits that leak


def by_rows(rows: ProbeRows) -> Split:
    """A split over rows that hides their roots."""
    test = np.arange(2)[:, None] == np.arange(len(rows)) % 2
    return Split("rows", ~test, test, np.arange(len(rows)).astype(str))


def test_a_split_over_rows_is_refused() -> None:
    """The rows' own roots count, not those that a split claims."""
    with pytest.raises(RootOnBothSides, match="Split 'rows', fold 0"):
        sweep(rows_of(roots=20), "face", sites="S", positions="all", split=by_rows, permutations=0)
    with pytest.raises(ProbeError, match=r"has masks \(1, 5\), but there are 40 rows"):
        sweep(
            rows_of(roots=20),
            "face",
            sites="S",
            positions="all",
            split=lambda rows: Split("short", np.eye(1, 5, dtype=bool), np.eye(1, 5, 1, dtype=bool), np.arange(5).astype(str)),
        )


def test_a_shared_row_is_named(coin: ProbeRows) -> None:
    here = coin.at("step:1")
    fit = np.isin(here.roots, np.unique(here.roots)[::2])
    with pytest.raises(SharedRows, match=r"row \d+ \(root \w+\) is fitted and row \d+ \(root \w+\) is tested"):
        splits.by_mask(here, "every second prompt", fit, ~fit)
    alone = groups.distinct(here)
    fit = np.isin(alone.roots, np.unique(alone.roots)[::2])
    assert len(splits.by_mask(alone, "distinct", fit, ~fit)) == 1, "the control: distinct rows may be split so"


# Positions and labels that cannot be probed


def test_a_position_without_values_is_skipped(coin: ProbeRows) -> None:
    """There is no next action at the query. The other position is probed, and a note says what is missing."""
    how = dict(sites=["blocks.3.hook_in"], permutations=0, controls=False)
    report = sweep(coin, "next_action", positions=("step", "query"), **how)
    assert {line["position"] for line in report.lines} == {"step"}
    assert any("label 'next_action' at position 'query'" in note for note in report.notes)
    with pytest.raises(BadRows, match="No label can be probed at any position"):
        sweep(coin, "next_action", positions="query", **how)
    both = sweep(coin, ["next_action", "face"], positions="query", **how)
    assert {line["label"] for line in both.lines} == {"face"}


# Verdicts


@pytest.mark.slow
def test_noise_is_shown_in_one_of_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small part of `make calibrate`: 60 sweeps over six cells of noise. Without new fits it errs more often."""
    noise = Noise("ridge", groups=50, width=32, estimator="ridge", permutations=39)
    found = sum(noise.found(seed) for seed in range(60))
    assert found <= 8  # 5 % of 60 is 3; more than 8 in 0.4 % of cases

    def fixed(estimator: str, x: Tensor, goal: Goal, orders: np.ndarray, split: Split, *, nuisance: None = None) -> Null:
        said = held_out(estimator, x, [goal], split.train, split.test)
        every = np.ones(len(goal.codes), dtype=bool)
        said = said.of(0, goal, every)
        scores = [score(said, replace(goal, codes=goal.codes[order]), every) for order in [np.arange(len(every)), *orders]]
        return Null(scores[0], np.stack(scores[1:]))

    monkeypatch.setattr(sweeps, "refitted", fixed)
    assert sum(noise.found(seed) for seed in range(60)) > max(found, 3)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [each for each in PLAINS if each.groups <= 60], ids=lambda plain: plain.name)
def test_plain_arrays(plain: Plain) -> None:
    """A small part of `make calibrate`: arrays and a baseline that share no code with the probes."""
    error, coverage, power = (rate.rate for rate in plain.rates(40))
    baseline = np.mean([plain.baseline(seed) for seed in range(40)])
    assert error <= 0.15 and coverage >= 0.85 and power >= baseline - 0.2


def test_power_with_controls() -> None:
    """A label that is read at 74 % from 100 groups is shown, with every control on, and noise beside it is not."""
    drawn = [Effect(1.75, 0.95).one(seed) for seed in range(4)]
    assert sum(found for found, _, _ in drawn) >= 3 and not any(other for _, other, _ in drawn)


def test_selectivity_is_part_of_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that is a function of the context is no finding, even where no other control can read it."""
    monkeypatch.setattr(controls, "token_identity", lambda codes, *others: np.zeros(len(codes)))
    monkeypatch.setattr(controls, "bags", lambda paths: np.zeros((len(paths), 1)))
    generator = np.random.default_rng(0)
    token = generator.integers(40, size=200)
    x = generator.normal(size=(40, 64))[token][None] + 0.01 * generator.normal(size=(1, 200, 64))
    rows = labelled_rows(x, np.arange(200), generator.integers(2, size=40)[token], token=token)
    table = sweep(rows, "label", sites="S", positions="all", permutations=39).table
    assert table["p_family"][0] <= 0.05 and table["accuracy"][0] > 0.9
    assert not shown(table)[0] and table["margin_over"][0] == "control_task"
    assert table["selectivity_low"][0] < table["selectivity"][0] < table["selectivity_high"][0]


# Rows as they come: documents of any length, rows that disagree, columns of any size


def arrays(x: np.ndarray, label: np.ndarray, group: np.ndarray) -> ProbeRows:
    return ProbeRows.of_arrays(x, label, group)


def test_documents_of_unequal_length() -> None:
    """Sequences of unequal length cannot be exchanged: a t test finds the label, and the notes say why there is no other."""
    generator, group = np.random.default_rng(0), np.repeat(np.arange(30), np.arange(5, 35))
    label = generator.integers(2, size=len(group))
    x = generator.normal(size=(len(group), 8)) + 5 * label[:, None]
    report = sweep(arrays(x, label, group), "label", permutations=39)
    line = report.best("label")
    assert line["test"] == "corrected t" and report.text().startswith("Shown") and line["shuffled"] < 0.7
    assert any("permutation test of 'label'" in note for note in report.notes)


def skipped_test(label: np.ndarray, group: np.ndarray) -> str:
    """The note on the permutation test that is skipped; empty if it is made."""
    x = np.random.default_rng(0).normal(size=(len(group), 4))
    report = sweep(arrays(x, label, group), "label", estimators="ridge", permutations=39)
    (line,) = [note for note in report.notes if note.startswith("Skipped the permutation test")] or [""]
    assert (report.table["test"][0] == "corrected t") == bool(line)
    return line


def test_why_labels_cannot_be_exchanged() -> None:
    """One group of both labels, and groups of different sizes: these are in the way, not labels that are alike."""
    generator = np.random.default_rng(0)
    sizes = np.array([80, *generator.integers(2, 10, size=53)])
    group = np.repeat(np.arange(54), sizes)
    label = generator.integers(2, size=54)[group]
    assert skipped_test(label[80:], group[80:]) == "", "one label per group: groups of any size exchange it"
    label[:80] = np.arange(80) % 2
    note = skipped_test(label, group)
    assert "1 of 54 groups have several labels, so that only groups with equally many rows can exchange theirs" in note
    assert "from 2 to 80 rows" in note and "a test takes 80 %" in note and "similar" not in note
    assert note.endswith("give groups of one size, or a label with one value per group. A t test is made instead.")


def test_few_groups_hold_a_label() -> None:
    """One label per group, one of them in a single long group; and six groups, of which one in six keeps its place."""
    group = np.repeat(np.arange(40), [40, *[4] * 39])
    assert "few of the 40 groups hold most rows" in why_no_exchange((group == 0).astype(int), group, 0.7)
    label = np.random.default_rng(0).integers(2, size=600)
    assert "6 groups are few" in why_no_exchange(label, np.arange(600) // 100, 0.78)
    assert why_no_exchange(np.zeros(8), np.arange(8), 0.0) == "the label has only one value"


@pytest.mark.parametrize("sizes", [[4] * 30, [2, 4, 6] * 10])
def test_labels_that_are_alike_in_all_groups(sizes: list[int]) -> None:
    """The same sequence in every group, of equal or different length: exchanging it changes nothing."""
    group = np.repeat(np.arange(30), sizes)
    note = skipped_test(np.concatenate([np.arange(size) % 2 for size in sizes]), group)
    assert "groups have similar sequences of labels" in note and "equally many rows" not in note


def test_a_label_that_goes_with_the_size_of_a_group() -> None:
    """Noise whose longer documents are of one class: exchanged labels have other frequencies, which is no finding."""
    found = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        kind = generator.integers(2, size=60)
        group = np.repeat(np.arange(60), np.where(kind == 1, 3, 1))
        rows = arrays(generator.normal(size=(len(group), 4)), kind[group], group)
        found += bool(shown(sweep(rows, "label", estimators="ridge", permutations=39, seed=seed).table).any())
    assert found <= 3


def test_rows_that_disagree_are_all_kept() -> None:
    """Thirty rows occur with both labels: no probe reads more than 63 % of the rows, whichever comes first."""
    generator = np.random.default_rng(0)
    base = generator.normal(size=(40, 8))
    x = np.vstack([base, base[:30], generator.normal(size=(10, 8)) + 3])
    label, order = np.repeat(["pos", "neg"], 40), np.arange(80)
    for way in (order, order[::-1]):
        report = sweep(arrays(x[way], label[way], order), "label", permutations=39)
        line = report.best("label")
        assert line["accuracy"] < 0.66 and (line["rows"], line["distinct"]) == (80, 50)
        assert any("60 rows share their path with a row of another label" in note for note in report.notes)


def test_columns_far_from_zero() -> None:
    """A constant of 1e8 in every column changes neither keys nor tests."""
    generator = np.random.default_rng(0)
    label = generator.integers(2, size=100)
    x = generator.normal(size=(100, 8)) + 3 * label[:, None]
    near, far = (sweep(arrays(x + c, label, np.arange(100)), "label", permutations=39).best("label") for c in (0, 1e8))
    assert near["p"] == far["p"] == 1 / 40 and near["distinct"] == far["distinct"] == 100


def test_every_letter_tells_rows_apart() -> None:
    """Rows with the same embedding differ in a deeper site of another letter."""
    generator, word = np.random.default_rng(0), np.arange(60) % 12
    sites = {("S", 0): generator.normal(size=(12, 4))[word], ("C", 5): generator.normal(size=(60, 4))}
    assert len(groups.distinct(ProbeRows.of_arrays(sites, word % 2, np.arange(60)))) == 60


def test_what_is_residualised_is_not_coded() -> None:
    """The online code reads the same rows as the probe: without the position, a label of the position costs a bit."""
    rows = rows_of(roots=60, per_root=2)
    place = np.arange(120) % 2
    rows = replace(rows, frame=rows.frame.assign(late=place))
    rows.source.tensors["blocks.0.hook_in"][:, 0] += 6 * torch.from_numpy(place)  # type: ignore[attr-defined]
    how = dict(sites="S", layers=[0], positions="all", permutations=0, controls=False, code_length=True)
    plain, clean = (sweep(rows, "late", residualise=names, **how).lines[0] for names in ((), ("position",)))
    assert plain["code_bits"] < 0.6 and clean["code_bits"] > 0.9
