"""Wrong input is refused by name: the error says what was given and what to do, and nothing is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnknownSite
from replaylens.probes import area, balanced_accuracy, checks, complexity_curve, fit_probe, steer, sweep, transfer_across
from replaylens.probes.arrays import OWN
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, ProbeError
from replaylens.probes.intervals import ratio_over_groups
from replaylens.probes.questions.erasure import amnesic
from replaylens.probes.questions.forced import viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import Split, by_mask, by_root
from replaylens.tasks.reading import RESERVED
from tests.probes.synthetic import rows_of

FEW: dict[str, Any] = dict(layers=[1], positions="step", estimators="ridge", permutations=0, controls=False)
N = 40
Y, GROUPS, NAMES = np.arange(N) % 2, np.arange(N), np.arange(N).astype(str)
X = np.random.default_rng(0).normal(size=(N, 4))
ROWS = rows_of(roots=N, per_root=1)
Case = tuple[Callable[[], Any], type[ProbeError], str]


def swept(label: Any = "face", **given: Any) -> Callable[[], Report]:
    return lambda: sweep(ROWS, label, **{"sites": "S", **FEW, **given})


def of_arrays(x: np.ndarray = X, **given: Any) -> ProbeRows:
    return ProbeRows.of_arrays(x, {"label": Y, "size": np.linspace(0, 1, N)}, GROUPS, **given)


def cached(groups: Any) -> ProbeRows:
    cache = {"blocks.0.hook_resid_post": np.zeros((4, 3, 2))}
    return ProbeRows.of_cache(cache, np.zeros((4, 3), dtype=int), np.arange(4) % 2, groups)


def of_pandas(features: Any) -> ProbeRows:
    frame = pd.DataFrame(X, columns=list("abcd")).assign(y=Y, group=GROUPS)
    return ProbeRows.of_pandas(frame, features, "y", "group")


CASES: dict[str, Case] = {
    # ---- options of a sweep
    "label=3": (swept(3), ProbeError, "label=3"),
    "values whose squares leave single precision": (
        lambda: sweep(of_arrays(X * 1e22), "label", **{**FEW, "layers": None, "positions": None}, precision="single"),
        BadRows,
        "precision='double'",
    ),
    "label twice": (swept(["face", "face"]), ProbeError, "label has 'face' 2 times"),
    "permutations='10'": (swept(permutations="10"), ProbeError, "permutations='10'. Give a whole number"),
    "permutations=1.5": (swept(permutations=1.5), ProbeError, "permutations=1.5. Give a whole number"),
    "permutations=5": (swept(permutations=5), ProbeError, "5 permutations are too few"),
    "folds=None": (swept(folds=None), ProbeError, "folds=None"),
    "folds=2.5": (swept(folds=2.5), ProbeError, "folds=2.5"),
    "seed=-1": (swept(seed=-1), ProbeError, "seed=-1"),
    "seed='a'": (swept(seed="a"), ProbeError, "seed='a'"),
    "jobs=0": (swept(jobs=0), ProbeError, "jobs=0"),
    "jobs='a'": (swept(jobs="a"), ProbeError, "jobs='a'"),
    "backend": (swept(backend="foo"), ProbeError, "Unknown backend 'foo'"),
    "estimator object": (swept(estimators=[LogisticRegression()]), ProbeError, "is a LogisticRegression"),
    "one estimator object": (swept(estimators=LogisticRegression()), ProbeError, "LogisticRegression"),
    "estimators twice": (swept(estimators=["ridge", "ridge"]), ProbeError, "'ridge' 2 times"),
    "positions twice": (swept(positions=["step", "step"]), ProbeError, "positions has 'step' 2 times"),
    "layers of a name": (swept(sites=["blocks.1.hook_in"], layers=[0]), UnknownSite, "layers=[0] are of letters"),
    "sites twice": (swept(sites="SS"), ProbeError, "S1 is named twice"),
    "residualised label": (
        lambda: sweep(of_arrays(), "size", estimators="ridge", residualise=["size"]),
        ProbeError,
        "'size' is both probed and residualised",
    ),
    "residualise on arrays": (
        lambda: sweep(of_arrays(), "label", residualise=["foo"], controls=False),
        MissingLabel,
        "Known: example, label, size.",
    ),
    "resume on a file": (swept(resume=__file__), ProbeError, "it is a file"),
    "save on a file": (lambda: swept()().save(__file__), ProbeError, "it is a file"),
    "fit_probe with an object": (
        lambda: fit_probe(ROWS, "face", layer=1, position="step", estimator=LogisticRegression()),  # type: ignore[arg-type]
        ProbeError,
        "is a LogisticRegression",
    ),
    # ---- splits and masks
    "split of None": (swept(split=lambda rows: None), ProbeError, "returned None"),
    "split of a tuple": (swept(split=lambda rows: (1, 2)), ProbeError, "returned (1, 2)"),
    "split=3": (swept(split=3), ProbeError, "split=3"),
    "split of lists": (lambda: Split("own", [[True]], [[False]], NAMES), ProbeError, "masks"),  # type: ignore[arg-type]
    "mask of another length": (lambda: by_mask(ROWS, "own", Y[:9] > 0, Y[:9] < 1), BadRows, "[9], but there are 40 rows"),
    "mask of numbers": (lambda: by_mask(ROWS, "own", np.arange(N), Y < 1), BadRows, "one boolean per row"),
    "where of another length": (lambda: ROWS.where(Y[:9] > 0), BadRows, "[9], but there are 40 rows"),
    "where of numbers": (lambda: ROWS.where(np.arange(N)), BadRows, "np.isin(np.arange(40), numbers)"),
    "folds of a split": (lambda: by_root(ROWS, folds="a"), ProbeError, "folds='a'"),  # type: ignore[arg-type]
    # ---- questions
    "transfer without rejected rows": (lambda: transfer(ROWS, "face"), BadRows, "0 rejected"),
    "transfer of arrays": (lambda: transfer(of_arrays(), "label"), ProbeError, "arrays"),
    "curve of numbers": (
        lambda: complexity_curve(of_arrays(), "size", site="X", position="all"),
        BadRows,
        "'size' is a number",
    ),
    "transfer of numbers": (
        lambda: transfer_across(
            ProbeRows.join(a=of_arrays(), b=of_arrays(X + 1)), "size", fit_on="a", test_on="b", sites="X", position="all"
        ),
        BadRows,
        "'size' is a number",
    ),
    # ---- arrays
    "ratio_over_groups": (
        lambda: ratio_over_groups(np.ones((1, 9)), np.ones(9), np.arange(8)),
        BadRows,
        "top 9, bottom 9, groups 8",
    ),
    "area of NaN": (lambda: area(np.full(N, np.nan), Y > 0, NAMES), BadRows, "NaN in 40 of 40"),
    "area of unequal lengths": (lambda: area(X[:9, 0], Y > 0, NAMES), BadRows, "score 9, good 40, groups 40"),
    "balanced accuracy": (lambda: balanced_accuracy(Y[:9], Y, NAMES), BadRows, "right 9, codes 40, groups 40"),
    "label among the features": (lambda: of_pandas(["a", "y"]), BadRows, "'y' is a label"),
    "group among the features": (lambda: of_pandas({"site": ["a", "group"]}), BadRows, "'group' is the group"),
    "groups per token": (lambda: cached(np.zeros((4, 3))), BadRows, "Give one value per prompt [4]"),
    "joined widths": (
        lambda: ProbeRows.join(a=of_arrays(), b=of_arrays(X[:, :3])),
        BadRows,
        "X has 4 columns in 'a', 3 in 'b'",
    ),
    "nothing joined": (lambda: ProbeRows.join(), ProbeError, "Nothing to join"),
    "positions as text": (lambda: of_arrays(positions=NAMES), BadRows, "row 0 has '0'"),
    "negative position": (lambda: of_arrays(positions=np.arange(N) - 1), BadRows, "row 0 has -1."),
    "groups of another length": (lambda: ProbeRows.of_arrays(X, Y, GROUPS[:9]), BadRows, "The groups have 9 values for 40"),
    "position -1 of arrays": (lambda: of_arrays().at(-1), BadPosition, "-1. Use all, prompt, "),
}


def test_reserved_names_are_the_columns_of_the_index() -> None:
    """`tasks check` and the docs list what a dump and its rows refuse."""
    assert set(RESERVED) == set(OWN) and len(RESERVED) == len(OWN)
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    assert all(f"`{name}`" in page for name in RESERVED)


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused_by_name(case: str) -> None:
    call, error, text = CASES[case]
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value) and not str(raised.value).endswith(" ")


def test_right_input_is_not() -> None:
    """The negative control: what the cases vary is accepted, also as NumPy's numbers and with masks of booleans."""
    report = swept(folds=np.int64(4), seed=np.int64(1), permutations=np.int64(0), resume=None)()
    assert report.settings["folds"] == 4 and report.to_json()
    assert len(ROWS.where(pd.Series(Y > 0, dtype="boolean"))) == len(ROWS.where((Y > 0).tolist())) == N // 2
    assert len(by_mask(ROWS, "own", Y > 0, Y < 1)) == 1
    assert len(ProbeRows.join(a=of_arrays(), b=of_arrays(X + 1))) == 2 * N
    assert len(cached([0, 0, 1, 1])) == 12 and len(of_pandas(["a", "b"])) == N


@pytest.mark.parametrize("given", ["prompts", ["a prompt"], [], 3])
def test_prompts_must_be_examples(given: Any, engine: Engine, coin_dump: Dump) -> None:
    probe = fit_probe(coin_dump, "face", layer=3, position="query", estimator="mass-mean")
    for call in (lambda: amnesic(engine, coin_dump, given, "face", layers=[3]), lambda: steer(engine, probe, given)):
        with pytest.raises(ProbeError, match=r"[Ee]xamples.*Give"):
            call()


@pytest.mark.parametrize(
    "option, text",
    [
        (dict(layers=3), "layers=3"),
        (dict(erasers="lace"), "Unknown eraser 'lace' (did you mean 'leace'?). Known: leace, inlp."),
        (dict(erasers=[]), "No erasers"),
        (dict(placebos=0), "placebos=0. Give a whole number of at least 1"),
        (dict(seed=-1), "seed=-1"),
    ],
)
def test_amnesic_names_the_option(option: dict[str, Any], text: str, engine: Engine, coin_dump: Dump) -> None:
    examples = tasks.get("coin")().examples(2)
    with pytest.raises(ProbeError) as raised:
        amnesic(engine, coin_dump, examples, "face", **{"layers": [3], **option})
    assert text in str(raised.value)


def test_amnesic_takes_the_name_of_one_eraser(engine: Engine, coin_dump: Dump) -> None:
    examples = tasks.get("coin")(flips=(2, 5)).examples(range(100, 112))
    report = amnesic(engine, coin_dump, examples, "face", layers=[3], erasers="leace", placebos=1)
    assert report.settings["erasers"] == ["leace"]


def test_amnesic_needs_rows_of_the_engine(engine: Engine) -> None:
    with pytest.raises(ProbeError, match="Give a dump or a run of the engine"):
        amnesic(engine, of_arrays(), tasks.get("coin")().examples(2), "label", layers=[0])


def answered(wrong: np.ndarray, truth: np.ndarray) -> ProbeRows:
    """Prompts with a right or wrong answer; the rows hold neither."""
    word = np.array(["heads", "tails"])
    columns = dict(face=word[truth], correct=~wrong, claimed=word[np.where(wrong, 1 - truth, truth)])
    return rows_of(roots=N, per_root=1, **columns)


@pytest.mark.parametrize(
    "wrong, few",
    [
        (np.arange(N) < 2, "2 groups and 2 classes"),
        (np.arange(N) < 4, "4 groups and 2 classes"),
        ((np.arange(N) < 20) & (Y == 0), "10 groups and 1 class"),
        (np.arange(N) < 5, ""),
        (np.arange(N) < 20, ""),
    ],
)
def test_few_wrong_answers_give_no_verdict(wrong: np.ndarray, few: str) -> None:
    (said,) = viable_branch(answered(wrong, Y), layers=[0]).findings
    assert (f"No verdict: wrong answers of {few}, where 5 groups and 2 classes are needed." in said) == bool(few), said


@pytest.mark.parametrize("layer", [9, -1, "a", 1.5])
def test_judge_needs_a_stored_layer(layer: Any, coin_dump: Dump) -> None:
    with pytest.raises(ProbeError, match=r"draft_layer=.* between 0 and \d"):
        judge(coin_dump, draft_layer=layer)


def test_a_sweep_takes_the_captured_sites(coin_dump: Dump) -> None:
    """The dump has S and Z. T and C, which it does not have, are not asked for unless they are named."""
    report = sweep(coin_dump, "face", layers=[1], positions="query", estimators="ridge", permutations=0, controls=False)
    assert {line["site"] for line in report.lines} == {"S"}


def test_the_command_takes_permutations(coin_dump: Dump) -> None:
    """Without --sites it takes the stored ones, too."""
    where = ("--label", "face", "--positions", "query", "--layers", "3", "--estimators", "ridge", "--no-controls", "--quiet")
    done = CliRunner().invoke(app, ["probe", coin_dump.url, *where, "--permutations", "19", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"]["permutations"] == 19


@pytest.mark.parametrize("empty", [[None] * 60, [float("nan")] * 60, ["one"] * 60])
def test_a_label_without_values_is_skipped_and_the_others_are_probed(empty: list[Any]) -> None:
    """A sweep says what it skips. Alone, the label is a named error, also for a single probe."""
    draw = np.random.default_rng(0)
    values, side = draw.normal(size=(60, 4)).astype(np.float32), draw.integers(0, 2, 60)
    rows = ProbeRows.of_arrays({"X": values}, {"side": side, "empty": empty}, groups=np.arange(60))
    how: dict[str, Any] = {"estimators": "ridge", "permutations": 0}
    report = sweep(rows, ["empty", "side"], **how)
    assert {line["label"] for line in report.lines} == {"side"}
    assert any(note.startswith("Skipped label 'empty'") for note in report.notes)
    alone = sweep(rows, "side", **how)
    assert report.best("side")["accuracy"] == alone.best("side")["accuracy"]
    for call in (lambda: sweep(rows, "empty", **how), lambda: fit_probe(rows, "empty", site="X", position="all")):
        with pytest.raises(ProbeError, match="'empty'"):
            call()


def test_names_stand_between_commas_or_spaces() -> None:
    assert checks.names("labels", "a, b c,,d") == checks.names("labels", ["a", "b", "c", "d"]) == ("a", "b", "c", "d")
    for given, text in (("a b a", "'a' 2 times"), (["a", 3], "3 is a int, not a name")):
        with pytest.raises(ProbeError, match=text):
            checks.names("labels", given)
    for lengths, text in (((2, 3), "x 2, y 3"), ((0, 0), "x and y have no rows")):
        with pytest.raises(BadRows, match=text):
            checks.same_length(x=np.zeros(lengths[0]), y=np.zeros((4, lengths[1])))
    checks.same_length(x=np.zeros(3), y=np.zeros((4, 3)))
