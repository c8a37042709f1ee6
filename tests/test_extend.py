"""`replaylens extend check`: what the package has keeps its promises, and a fault planted in a new part is found."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Perceptron, RidgeClassifier
from sklearn.neighbors import KNeighborsRegressor, NearestCentroid
from sklearn.svm import LinearSVC
from typer.testing import CliRunner

import replaylens as rl
from replaylens import tasks
from replaylens.cli import app
from replaylens.engine.display import Citable
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.extend import check
from replaylens.extend import checks as extend
from replaylens.probes.errors import BadPosition, ProbeError
from replaylens.probes.registry import ESTIMATORS, Estimator
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sweeps import sweep
from replaylens.tasks.coin import Coin
from replaylens.tasks.errors import BadTask
from replaylens.weights.families import FAMILIES
from replaylens.workbench.patch import PatchResult
from tests.devices import swept
from tests.families import hugging_face


def broken(name: str, **how: Any) -> dict[str, str]:
    return {each.promise: each.problem for each in check(name, **how) if each.problem}


def not_run(name: str, **how: Any) -> dict[str, str]:
    return {each.promise: each.not_run for each in check(name, **how) if each.not_run}


@pytest.fixture(autouse=True)
def few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of a task is asked for its lines alone: 99 permutations take seconds where each fold is a fit of its own."""
    few = {"permutations": 19, "folds": 2}
    monkeypatch.setattr("replaylens.probes.sweeps.sweep", lambda *given, **how: sweep(*given, **{**few, **how}))


@pytest.mark.parametrize("name", ["llama", "gpt2", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES)])
def test_a_family_keeps_its_promises(name: str) -> None:
    """Families whose tiny model takes more than sizes say so."""
    if name in ("gpt_neo", "dots1", "mamba2", "lfm2_moe"):
        with pytest.raises(BadRequest, match="Give one with model="):
            extend.tiny(name)
    else:
        assert broken(name) == {}


@pytest.mark.parametrize("name", ["hook_in", "attn.o.hook_in", "attn.hook_pattern", "ln_final.hook_out"])
def test_a_site_keeps_its_promises(name: str) -> None:
    assert broken(name) == {}


@pytest.mark.parametrize("name", [pytest.param("coin", marks=pytest.mark.slow), "fork"])  # the coin: see places, too
def test_a_task_keeps_its_promises(name: str) -> None:
    assert broken(name) == {}


def test_views_have_a_table_and_a_picture() -> None:
    assert broken("PatchResult") == {}
    assert set(broken("GraphDiff")) == {"a table, `frame`", "a picture, `plot`", "tests/drawings.py names it"}


# ---- families --------------------------------------------------------------------------------------------------------

LLAMA = FAMILIES["llama"]
TABLES: dict[str, tuple[Callable[[], Any], str, str]] = {
    # what is wrong: (the table, the promise that it breaks, words of the problem)
    "a field that is not read": (
        lambda: replace(LLAMA, reads={ours: read for ours, read in LLAMA.reads.items() if ours != "norm_eps"}),
        "no config field is overlooked",
        "rms_norm_eps",
    ),
    "another activation": (
        lambda: replace(LLAMA, reads={**LLAMA.reads, "activation": lambda raw: "gelu"}),
        "a model loads and computes what transformers computes",
        "ModelMismatch",
    ),
    "a misspelt part in arrange": (
        lambda: replace(LLAMA, arrange={"attn.qvk": lambda config, x: x}),
        "a model loads and computes what transformers computes",
        "Unknown part 'attn.qvk' (did you mean 'attn.qkv'?)",
    ),
    "a misspelt norm": (
        lambda: replace(LLAMA, plain_norms=frozenset({"ln3"})),
        "a model loads and computes what transformers computes",
        "Unknown part 'ln3'",
    ),
    "a part that is missing": (
        lambda: replace(LLAMA, names=replace(LLAMA.names, parts={k: v for k, v in LLAMA.names.parts.items() if k != "mlp.up"})),
        "a model loads and computes what transformers computes",
        "UnsupportedModel: The table of the family 'llama': Unknown part 'mlp.up'",
    ),
}


@pytest.mark.parametrize("fault", TABLES)
def test_a_fault_in_a_table_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, promise, words = TABLES[fault]
    source = extend.tiny("llama")
    monkeypatch.setitem(FAMILIES, "llama", table())
    assert words in broken("llama", model=source)[promise]


def test_a_field_of_a_table_that_no_model_has_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'norm_epz'"):
        replace(LLAMA, reads={**LLAMA.reads, "norm_epz": "rms_norm_eps"})
    with pytest.raises(UnsupportedModel, match="'gated'"):
        replace(LLAMA, fixed={"gated": True})


def test_wrong_gradients_and_wrong_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a hundredth off, and a cache that is off in one row."""
    real = Engine.prompt
    source = hugging_face("llama")

    def off(self: Any, given: Any, **how: Any) -> Any:
        branch = real(self, given, **how)
        if len(given) > 1 and (captured := branch.lane.recording) is not None:
            captured.chunks[0].rows[next(iter(captured.chunks[0].rows))][0] += 1e-3
        return branch

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "prompt", off)
        assert "has other bits" in broken("llama", model=source)["every site has the bits of its row alone"]
    found = type(real(Engine.load(source, check=False), [1, 2])).gradients

    def wrong(self: Any, *given: Any, **how: Any) -> Any:
        return {site: 1.01 * value for site, value in found(self, *given, **how).items()}

    monkeypatch.setattr(rl.Branch, "gradients", wrong)
    assert "off autograd's" in broken("llama", model=source)["gradients are those of autograd in float64"]
    assert "difference quotient" in broken("hook_in")["its gradient is a difference quotient in float64"]


# ---- estimators ------------------------------------------------------------------------------------------------------


class Nearest(ClassifierMixin, BaseEstimator):
    """The class of the nearest mean, with the faults that a test plants: none of scikit-learn's checks of its input."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def fit(self, X: Any, y: Any) -> "Nearest":
        self.classes_ = np.unique(y)
        noise = np.random.default_rng().normal(size=X.shape) if self.fault == "luck" else 0.0
        if self.fault == "narrow" and X.shape[1] > 6:
            raise ValueError("more than six columns")
        if self.fault == "input":
            X -= X.mean(0)
        self.means_ = np.stack([(X + 99 * noise)[y == name].mean(0) for name in self.classes_])
        return self

    def predict(self, X: Any) -> Any:
        return self.classes_[((X[:, None] - self.means_) ** 2).sum(-1).argmin(1)]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    def add(make: Callable[[], Any], linear: bool = False, name: str = "mine") -> str:
        monkeypatch.setitem(ESTIMATORS, name, Estimator(name, "an estimator of one's own", make, "apart", linear=linear))
        return name

    yield add


OTHERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "no probabilities": (partial(LinearSVC, random_state=0), True),
    "a margin": (RidgeClassifier, True),
    "a margin for each class": (partial(Perceptron, random_state=0), True),
    "predictions only": (NearestCentroid, False),
    "numbers": (KNeighborsRegressor, False),
}


@pytest.mark.parametrize("what", swept(OTHERS, "predictions only"))
def test_whatever_follows_scikit_learns_contract_is_a_probe(what: str, registered: Callable[..., str]) -> None:
    assert broken(registered(*OTHERS[what])) == {}


def test_scores_of_an_estimator_without_probabilities(registered: Callable[..., str]) -> None:
    """The area under the curve is that of scikit-learn's own margins, fold by fold; without probabilities there is no loss."""
    from sklearn.metrics import roc_auc_score

    generator = np.random.default_rng(0)
    y = generator.integers(2, size=120)
    X = generator.normal(size=(120, 5)) + 0.8 * np.eye(5)[y]
    rows = ProbeRows.of_arrays(X, {"label": np.array(["a", "b"])[y]}, groups=np.arange(120) // 3)
    (line,) = sweep(
        rows, "label", positions="all", estimators=registered(RidgeClassifier), permutations=0, controls=False
    ).lines
    (same,) = sweep(rows, "label", positions="all", estimators="ridge", permutations=0, controls=False).lines
    assert abs(line["auroc"] - roc_auc_score(y, RidgeClassifier().fit(X, y).decision_function(X))) < 0.15
    assert line["calibration_error"] is None and line["v_information"] is None
    assert abs(line["accuracy"] - same["accuracy"]) < 0.05  # standardised or not, a ridge


def test_a_regressor_takes_numbers_and_a_classifier_classes(registered: Callable[..., str]) -> None:
    generator = np.random.default_rng(0)
    rows = ProbeRows.of_arrays(
        generator.normal(size=(40, 3)), {"word": np.array(["a", "b"] * 20), "size": np.arange(40.0)}, groups=np.arange(40)
    )
    with pytest.raises(ProbeError, match="mine is a regressor, but label 'word' has classes"):
        sweep(rows, "word", positions="all", estimators=registered(KNeighborsRegressor))
    with pytest.raises(ProbeError, match="mine is a classifier, but label 'size' is a number"):
        sweep(rows, "size", positions="all", estimators=registered(LinearSVC))


def test_a_default_sweep_leaves_out_known_zeros_of_another_kind(registered: Callable[..., str]) -> None:
    """A regressor has no line for a known zero with classes, and the notes say so; classifiers beside it keep theirs."""
    run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(1, 3)).examples(40), sites="S")
    name = registered(KNeighborsRegressor)
    report = sweep(run, "steps", layers=[3], estimators=[name, "ridge"], positions="step", permutations=0)
    assert [(line["label"], line["estimator"]) for line in report.lines] == [
        ("steps", name),
        ("steps", "ridge"),
        ("next_action", "ridge"),
        ("shuffled", "ridge"),
    ]
    for zero in ("next_action", "shuffled"):
        said = f"Skipped known zero {zero!r} with {name} at position 'step': the label has classes, and it is a regressor."
        assert said in report.notes


class Restless(Nearest):
    """Warns in each fit, twice that it did not converge and once of something else."""

    def fit(self, X: Any, y: Any) -> "Restless":
        for _ in range(2):
            warnings.warn("not yet", ConvergenceWarning, stacklevel=2)
        warnings.warn("something else", UserWarning, stacklevel=2)
        super().fit(X, y)
        return self


@pytest.mark.parametrize(
    "how",
    [{}, {"jobs": 2, "backend": "threading"}, pytest.param({"jobs": 2, "backend": "loky"}, marks=pytest.mark.slow)],
    ids=["one by one", "threads", "processes"],
)
def test_fits_that_do_not_converge_are_counted_in_one_line(how: dict[str, Any], registered: Callable[..., str]) -> None:
    """By hand: 3 cells x (two labels, each also with its values exchanged) x 5 folds are 60 fits."""
    generator = np.random.default_rng(0)
    X, y = {f"blocks.{i}.hook_in": generator.normal(size=(60, 3)) for i in range(3)}, np.array(["a", "b"] * 30)
    rows = ProbeRows.of_arrays(X, {"label": y, "other": generator.permutation(y)}, groups=np.arange(60))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sweep(rows, ["label", "other"], positions="all", estimators=registered(Restless), permutations=0, **how)
    said = [str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning)]
    assert said == ["60 of 60 fits of mine did not converge. Scale the rows, or make it with more iterations (max_iter)."]
    other = [each for each in caught if str(each.message) == "something else"]
    assert len(other) == (0 if how.get("backend") == "loky" else 60), "those of another process are shown there"


@pytest.mark.slow
def test_what_makes_an_estimator_is_no_estimator(registered: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"make of the estimator 'mine' is NearestCentroid\(\), an estimator instead of"):
        registered(NearestCentroid())
    (tmp_path / "own.py").write_text(
        "from sklearn.neighbors import NearestCentroid\n"
        "from replaylens.probes.registry import ESTIMATORS, Estimator\n"
        "ESTIMATORS['own'] = Estimator('own', 'nearest mean', NearestCentroid(), 'apart', linear=False)\n"
    )
    said = CliRunner().invoke(app, ["extend", "check", f"{tmp_path}/own.py:own"])
    assert said.exit_code == 2 and "Give its class, or a function without arguments." in said.stderr, said.stderr
    promise, one = "`make` gives a new estimator at each call", NearestCentroid()
    assert "gives the same object twice" in broken(registered(lambda: one))[promise]
    assert "cannot be fitted" in broken(registered(lambda: NearestCentroid))[promise]


@pytest.mark.slow
def test_promises_that_are_not_tried_say_why(registered: Callable[..., str]) -> None:
    """What is not run is neither kept nor broken, and the command succeeds."""
    assert not_run(registered(NearestCentroid)) == {
        "scikit-learn's own checks pass": "NearestCentroid is a class of scikit-learn, which has tests of its own",
        "its direction can be read": "it is registered as linear=False",
        "the files of a checkout name it": "the estimator is not part of replaylens",
    }
    assert set(not_run("leace")) == {
        "a sweep fits it, and it finds classes that are far apart",
        "a sweep of a task runs, with its controls and known zeros",
        "its direction can be read",
    }
    assert set(not_run("attn.hook_pattern")) == {
        "it has the bits of its row alone",
        "an edit there changes the logits",
        "its gradient is a difference quotient in float64",
    }
    assert not_run("ln1.hook_scale")["an edit there changes the logits"].endswith("is read only")
    said = CliRunner().invoke(app, ["extend", "check", "leace"])
    assert said.exit_code == 0 and "not run: its direction can be read, because it is registered as linear=False" in said.output


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("", "scikit-learn's own checks pass"),
        ("luck", "the same rows give the same bits, and stay as they are"),
        ("input", "the same rows give the same bits, and stay as they are"),
        ("narrow", "a sweep of a task runs, with its controls and known zeros"),
    ],
)
def test_a_fault_in_an_estimator_is_found(fault: str, promise: str, registered: Callable[..., str]) -> None:
    assert promise in broken(registered(partial(Nearest, fault)))


@pytest.mark.slow
def test_an_estimator_without_coefficients_is_not_linear(registered: Callable[..., str]) -> None:
    assert "has no coefficients" in broken(registered(NearestCentroid, linear=True))["its direction can be read"]


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_steps_are_counted_by_the_label_that_a_task_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose label is neither `actions` nor `hops` has steps as soon as it names it; before, the error says how."""

    class Scene(type(Coin().scene())):  # type: ignore[misc]
        label_names = tuple("told" if name == "actions" else name for name in Coin().scene().label_names)

        def labels(self) -> Any:
            return {"told" if name == "actions" else name: value for name, value in super().labels().items()}

    class Told(Coin):
        name = "told-coin"

        def scene(self) -> Any:
            made: Any = Coin.scene(self)
            made.__class__ = Scene
            return made

    monkeypatch.setattr("replaylens.tasks.registry._REGISTERED", {})
    engine, examples = Engine.load("coin-plain"), Told(flips=2).examples(4)
    with pytest.raises(BadPosition, match="set `step_label` in the task's class"):
        ProbeRows.of(engine.replay(examples, sites="S")).at("step")
    Told.step_label = "told"
    wanted = ProbeRows.of(engine.replay(Coin(flips=2).examples(4), sites="S")).at("step")
    found = ProbeRows.of(engine.replay(Told(flips=2).examples(4), sites="S")).at("step")
    assert len(found) == len(wanted) == 8
    Told.step_label = "tolled"
    with pytest.raises(BadTask, match="names the label 'tolled'"):
        tasks.register(Told)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_view_that_can_change_is_found() -> None:
    @dataclass(frozen=False, eq=False)
    class Loose:
        frame: int = 0

    class Loosely(Citable):
        pass

    assert set(broken("Loosely")) == {
        "a frozen dataclass, so that its digest covers every field",
        "a table, `frame`",
        "a picture, `plot`",
    }
    assert PatchResult in extend.views().values() and Loosely in extend.views().values()


@pytest.mark.slow
def test_code_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "from sklearn.neighbors import NearestCentroid\n"
        "from replaylens.probes.registry import ESTIMATORS, Estimator\n"
        "ESTIMATORS['centroid'] = Estimator('centroid', 'nearest mean', NearestCentroid, 'apart', linear=False)\n"
    )
    monkeypatch.setattr("replaylens.extend.checks.ESTIMATORS", ESTIMATORS)
    try:
        said = CliRunner().invoke(app, ["extend", "check", f"{tmp_path}/own.py:centroid"])
        assert said.exit_code == 0 and "kept    a sweep fits it" in said.output
    finally:
        del ESTIMATORS["centroid"]


@pytest.mark.slow
def test_places_that_lack_a_name_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checkout's own files, without the task in one of them."""
    for file in extend.PLACES["task"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((extend.ROOT / file).read_text().replace("## coin\n", "## coins\n"))
    monkeypatch.setattr(extend, "ROOT", tmp_path)
    assert broken("coin") == {"docs/tasks.md names it": "## coin is missing there."}


def test_names_are_listed() -> None:
    """Every name that the list gives is one that the check knows."""
    said = json.loads(CliRunner().invoke(app, ["extend", "check", "--list", "--json"]).stdout)
    assert said == {kind: list(each) for kind, each in extend.names().items()} and set(said) == set(extend.KINDS)
    assert "hook_in" in said["site"] and "PatchResult" in said["view"] and set(FAMILIES) == set(said["family"])
    plain = CliRunner().invoke(app, ["extend", "check", "--list"]).stdout.splitlines()
    assert [line.split() for line in plain] == [[kind, *each] for kind, each in said.items()]


def test_names_that_cannot_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYLENS_CACHE", str(tmp_path))
    for given, words in (
        (["nonsense"], "No task, family, estimator, site or view is called"),
        (["coin", "--kind", "verb"], "Unknown kind 'verb'"),
        (["lda", "--model", "x"], "'lda' is an estimator"),
        (["no/such.py:x"], "Cannot import"),
        (["own.py"], "own.py names a file and no part of it. Give own.py:NAME"),
        (["hook_inn"], "(did you mean the site 'hook_in'?). `replaylens extend check --list` lists all"),
        (["blocks.0.hook_in"], "did you mean the site 'hook_in'?"),
        (["PatchResults"], "did you mean the view 'PatchResult'?"),
        (["ridge", "--kind", "view"], "'ridge' is an estimator, not a view. Leave out --kind view"),
        (["llama", "--model", "/nope"], "/nope is not the folder of a transformers model: it has no config.json"),
        (["llama", "--model", "coin-plain"], "coin-plain is an embedded model, which transformers does not have"),
        (["llama", "--model", "smollm2"], "smollm2 is not in the cache. Run `replaylens fetch smollm2`"),
        (["llama", "--list"], "has no effect with --list"),
        ([], "No part given. Name one; --list says which there are."),
    ):
        said = CliRunner().invoke(app, ["extend", "check", *given])
        assert said.exit_code == 2 and words in " ".join(said.stderr.split()), said.stderr
