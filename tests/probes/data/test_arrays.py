"""Rows from arrays computed elsewhere: the scores of the dump path, every constructor, every refusal, and no task."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import EngineError, MissingPackage, UnknownSite
from replaylens.probes import splits
from replaylens.probes.errors import (
    BadPosition,
    BadRows,
    MissingLabel,
    PlanMismatch,
    ProbeError,
    SharedRows,
    TooFewGroups,
)
from replaylens.probes.groups import independent, near_duplicates
from replaylens.probes.probe import LinearProbe, cross_validate, fit_probe
from replaylens.probes.questions.forced import outcome_at_fork, viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer, transfer_across
from replaylens.probes.report import Report
from replaylens.probes.rows import Cell, ProbeRows, sequences
from replaylens.probes.solvers import solve
from replaylens.probes.sources import ArraySource
from replaylens.probes.sweeps import sweep
from replaylens.views.report import ReportPage

QUICK: dict[str, Any] = dict(permutations=19)
GROUPS, EACH, WIDTH = 40, 3, 6
N = GROUPS * EACH
RANDOM = np.random.default_rng(0)
Y = RANDOM.integers(2, size=N)
G = np.repeat(np.arange(GROUPS), EACH)
X = RANDOM.normal(size=(N, WIDTH)).astype(np.float32)
X[:, 1] += 5 * Y
P = np.tile(np.arange(EACH), GROUPS)
TOKENS = RANDOM.integers(20, size=N)


def of_arrays(x: Any = X, labels: Any = Y, groups: Any = G, **more: Any) -> ProbeRows:
    return ProbeRows.of_arrays(x, labels, groups, **more)


# ---- the same rows as a dump and as arrays ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumped(coin_dump: Dump) -> ProbeRows:
    return ProbeRows.of(coin_dump).accepted().renumbered()


def arrays_of(rows: ProbeRows, **changed: Any) -> ProbeRows:
    """What another program would hand over: activations, labels, and where each row belongs."""
    frame = rows.frame
    given: dict[str, Any] = dict(
        X={("S", layer): rows.matrix("S", layer) for layer in (0, 3)},
        labels={"face": frame["face"].to_numpy(), "actions": frame["actions"]},
        groups=rows.roots,
        prompts=frame["example"],
        positions=frame["position"],
        tokens=torch.from_numpy(frame["token"].to_numpy()),
    )
    return ProbeRows.of_arrays(**given | changed)


def scores(report: Report) -> list[dict[str, Any]]:
    return [line for line in report.lines if not line["known_zero"]]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return pd.DataFrame(one).equals(pd.DataFrame(other))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["all", "12"])
def test_arrays_score_as_the_dump_does(dumped: ProbeRows, position: str) -> None:
    """Scores, intervals, p-values and controls by tokens are equal bit for bit. Only known zeros need the task."""
    how: dict[str, Any] = dict(positions=position, estimators=["ridge", "mass-mean"], layers=[0, 3], **QUICK)
    one, other = sweep(dumped, "face", sites="S", **how), sweep(arrays_of(dumped), "face", **how)
    assert same(scores(one), scores(other)) and len(scores(one)) == 4
    assert all(line["token_identity"] is not None for line in scores(other))
    assert [note for note in other.notes if "known zeros" in note] == [
        f"Skipped known zeros at position '{position}': rows from arrays have no task."
    ]
    assert other.source["task"] is None and other.source["rows"] == one.source["rows"]


def test_controls_by_tokens_need_the_whole_prompts(dumped: ProbeRows) -> None:
    """At position 12 the bag of tokens reads the other rows of the prompt. Without them it is skipped, and so it is named."""
    how: dict[str, Any] = dict(positions="12", estimators="mass-mean", layers=[3], **QUICK)
    (line,) = scores(sweep(arrays_of(dumped), "face", **how))
    assert line["bag_of_tokens"] is not None and line["control_task"] is not None
    report = sweep(arrays_of(dumped.at("12")), "face", **how)
    assert scores(report)[0]["bag_of_tokens"] is None and "not every token of the prompts is there" in report.text()
    report = sweep(arrays_of(dumped, tokens=None), "face", **how)
    assert scores(report)[0]["token_identity"] is None and "these rows have no tokens" in report.text()


def test_the_comparison_sees_other_rows(dumped: ProbeRows) -> None:
    """Negative control: other groups, other labels or other activations give other lines."""
    how: dict[str, Any] = dict(positions="12", estimators="mass-mean", layers=[0, 3], **QUICK)
    true = scores(sweep(arrays_of(dumped), "face", **how))
    swapped = {("S", 0): dumped.matrix("S", 3), ("S", 3): dumped.matrix("S", 0)}
    face = dumped.frame["face"].to_numpy().copy()
    place = np.flatnonzero((dumped.frame["position"] == 12) & dumped.frame["face"].notna())[0]
    face[place] = "tails" if face[place] == "heads" else "heads"
    for changed in ({"X": swapped}, {"labels": face}, {"groups": dumped.frame["example"]}):
        label = "label" if "labels" in changed else "face"
        other = scores(sweep(arrays_of(dumped, **changed), label, **how))
        assert not same(true, [{**line, "label": "face"} for line in other]), changed


def test_fitted_probes_are_the_dumps(dumped: ProbeRows, tmp_path: Path) -> None:
    how: dict[str, Any] = dict(layer=3, position="12", estimator="logistic")
    one, other = fit_probe(dumped, "face", **how), fit_probe(arrays_of(dumped), "face", **how)
    assert np.array_equal(one.weight, other.weight) and np.array_equal(one.bias, other.bias) and one.roots == other.roots
    other.save(tmp_path / "face")
    again = LinearProbe.load(tmp_path / "face")
    assert again.source["task"] is None and np.array_equal(again.weight, other.weight)
    with pytest.raises(BadRows, match="NaN"):
        again.predict(np.full((2, again.weight.shape[1]), np.nan))


def test_cross_validation_is_one_cell_of_a_sweep(dumped: ProbeRows) -> None:
    here = dumped.at("12")
    (line,) = scores(sweep(here, "face", sites="S", layers=[3], positions="all", controls=False, permutations=19))
    found = cross_validate(here.matrix("S", 3), here.frame["face"], here.roots)
    assert (found.score.value, found.score.low, found.score.high) == (line["accuracy"], line["low"], line["high"])
    assert found.metric == line["metric"] and (found.predicted == here.frame["face"]).mean() == line["accuracy"]


# ---- what may be given ------------------------------------------------------------------------------------------------


def stored(kind: str, folder: Path) -> Any:
    match kind:
        case "memory map":
            np.save(folder / "x.npy", X)
            return np.load(folder / "x.npy", mmap_mode="r")
        case "Fortran order":
            return np.asfortranarray(X)
        case "big endian":
            return X.astype(">f4")
        case "view":
            return np.repeat(X, 2, axis=0)[::2]
        case "lists":
            return [list(map(np.float32, line)) for line in X]
        case "gradient":
            return torch.from_numpy(X).clone().requires_grad_()
    return torch.from_numpy(X)


@pytest.mark.parametrize("kind", ["tensor", "gradient", "memory map", "Fortran order", "big endian", "view", "lists"])
def test_one_array_however_it_is_stored(kind: str, tmp_path: Path) -> None:
    """The same values give the same matrix, the same digest and no warning."""
    rows = of_arrays(stored(kind, tmp_path))
    assert np.array_equal(rows.matrix("X"), X) and rows.matrix("X").dtype == np.float32
    assert rows.about.digest == of_arrays().about.digest
    assert np.array_equal(rows.where(Y == 1).matrix("X"), X[Y == 1])


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    """Values are exact in float32, or in float64 where float32 could not hold them."""
    x = torch.from_numpy(X).to(dtype)
    found = of_arrays(x).matrix("X")
    assert found.dtype == (np.float64 if dtype in (torch.float64, torch.int32) else np.float32)
    assert np.array_equal(found, x.double().numpy())


@pytest.mark.parametrize("dtype", [np.uint16, np.uint64, np.longdouble, np.int64])
def test_number_types_that_torch_lacks(dtype: Any) -> None:
    x = np.abs(10 * X).astype(dtype)
    assert np.array_equal(of_arrays(x).matrix("X"), x.astype(np.float64))


def test_digest_names_the_arrays() -> None:
    """One changed bit, another name or another shape is another digest, so parts of a sweep are never mixed up."""
    other = X.copy()
    other[5, 1] = np.nextafter(other[5, 1], np.float32(9))
    given: list[Any] = [X, other, {"Y": X}, X[:, :-1], torch.from_numpy(X).double(), {"a": X, "b": X}, {"a": X, "b": other}]
    assert len({of_arrays(x).about.digest for x in given}) == len(given)


def test_a_sweep_resumes_only_on_the_same_arrays(tmp_path: Path) -> None:
    how: dict[str, Any] = dict(estimators="ridge", resume=tmp_path, **QUICK)
    first = sweep(of_arrays(), "label", **how)
    assert sweep(of_arrays(torch.from_numpy(X)), "label", **how).lines == first.lines
    with pytest.raises(PlanMismatch):
        sweep(of_arrays(X + 1), "label", **how)


def test_sites_by_name_and_layer() -> None:
    """Letters and other sites with layers are grids; TransformerLens names are also letters; others are cells of their own."""
    names = {"blocks.0.hook_resid_pre": X, "blocks.0.hook_resid_post": X + 1, "blocks.0.hook_mlp_out": X + 2, "neurons": X + 3}
    rows = of_arrays(names)
    assert rows.source.sites() == ["S", "C", "neurons"]
    assert [str(cell) for cell in rows.cells(rows.default_sites)] == ["S0", "S1", "C0", "neurons"]
    assert np.array_equal(rows.matrix("S", 1), X + 1) and np.array_equal(rows.matrix("blocks.0.hook_resid_post"), X + 1)
    rows = of_arrays({("resid", 9): X + 1, ("resid", 2): X, "extra": X})
    assert rows.cells(rows.default_sites) == [Cell("resid", 2), Cell("resid", 9), Cell("extra", None)]
    assert np.array_equal(rows.matrix("resid", 9), X + 1)
    report = sweep(rows, "label", estimators="mass-mean", layers=[9], **QUICK)
    assert [(line["site"], line["layer"]) for line in scores(report)] == [("resid", 9), ("extra", None)]
    for site, layer, said in (("resid", 3, "2, 9"), ("extra", 1, "no layers"), ("extr", None, "did you mean 'extra'")):
        with pytest.raises(UnknownSite, match=said):
            rows.matrix(site, layer)
    with pytest.raises(UnknownSite, match="resid, extra"):
        rows.cells("S")


LABELS = {
    "array": (Y, "label", "class"),
    "tensor": (torch.from_numpy(Y), "label", "class"),
    "bfloat16": (torch.from_numpy(Y).bfloat16(), "label", "number"),
    "floats": (Y + 0.5, "label", "number"),
    "list": (["ab"[y] for y in Y], "label", "class"),
    "whole numbers with holes": ([None, *Y.tolist()[1:]], "label", "class"),
    "booleans with holes": ([None, *(Y > 0).tolist()[1:]], "label", "class"),
    "dict": ({"a": Y, "b": X[:, 0]}, "b", "number"),
    "frame": (pd.DataFrame({"a": Y, "b": X[:, 0]}, index=range(N, 0, -1)), "a", "class"),
    "series": (pd.Series(Y, name="face", index=range(N, 0, -1)), "face", "class"),
    "categories": (pd.Categorical(Y), "label", "class"),
}


@pytest.mark.parametrize("given", LABELS)
def test_labels(given: str) -> None:
    """Kinds survive missing values, and pandas' index does not reorder rows."""
    labels, name, kind = LABELS[given]
    target = of_arrays(labels=labels).target(name)
    holes = "holes" in given
    assert target.kind == kind and target.present.tolist() == [not holes] + [True] * (N - 1)
    wanted = X[:, 0] if name == "b" else Y + 0.5 if given == "floats" else Y
    names = {"list": ["a", "b"], "booleans with holes": ["False", "True"]}.get(given, ["0", "1"])
    seen = target.values if kind == "number" else np.array([names.index(value) for value in target.values[holes:]])
    assert np.array_equal(seen, wanted[holes:] if kind == "class" else wanted)


def test_positions_of_arrays() -> None:
    rows = of_arrays(positions=P, tokens=[f" w{t}" for t in TOKENS])
    assert np.array_equal(rows.at("last").frame["position"], np.full(GROUPS, EACH - 1))
    assert np.array_equal(rows.at("last-1").matrix("X"), X[P == 1]) and len(rows.at(0)) == GROUPS
    assert rows.frame["text"].tolist() == [f" w{t}" for t in TOKENS] and rows.has_tokens
    both, _, roots = sequences(rows, "label", "X", None, ["last-1", "last"])
    assert np.array_equal(both, np.concatenate([X[P == 1], X[P == 2]], 1)) and len(roots) == GROUPS
    absent, _, _ = sequences(rows, "label", "X", None, ["last-9", "last"])  # a position that no example has
    assert np.array_equal(absent, np.concatenate([0 * X[P == 2], X[P == 2]], 1))
    assert rows.default_positions == ("all",)


# ---- tables and caches ------------------------------------------------------------------------------------------------


def table() -> pd.DataFrame:
    wide = pd.DataFrame(X, columns=[f"x{i}" for i in range(WIDTH)])
    more = {"face": Y, "prompt": G, "place": P, "token": TOKENS, "id": np.arange(N), "vector": list(X)}
    return wide.assign(**more, index=range(N)).set_index("index")


NUMBERS = [f"x{i}" for i in range(WIDTH)]
MORE: dict[str, Any] = dict(position="place", token="token", key="id")


@pytest.mark.parametrize(
    "features", [NUMBERS, "vector", {("S", 2): "vector", "half": NUMBERS[:3]}], ids=["columns", "vectors", "sites"]
)
@pytest.mark.parametrize("kind", ["pandas", "datasets"])
def test_tables(kind: str, features: Any) -> None:
    """A pandas frame and a Hugging Face dataset give the rows that their columns give as arrays."""
    x = {("S", 2): X, "half": X[:, :3]} if isinstance(features, dict) else X
    wanted = ProbeRows.of_arrays(x, {"face": Y}, G, positions=P, tokens=TOKENS, keys=range(N))
    if kind == "pandas":
        rows = ProbeRows.of_pandas(table(), features, ["face"], "prompt", **MORE)
    else:
        import datasets

        rows = ProbeRows.of_dataset(datasets.Dataset.from_pandas(table()), features, "face", "prompt", **MORE)
    assert rows.about.digest == wanted.about.digest and isinstance(rows.source, ArraySource)
    pd.testing.assert_frame_equal(rows.frame, wanted.frame)


def test_datasets_keep_their_precision_order_and_class_names() -> None:
    """float64 stays float64, selected rows keep their order, and class labels are read as names."""
    import datasets

    kinds = datasets.Features(
        vector=datasets.List(datasets.Value("float64")),
        face=datasets.ClassLabel(names=["heads", "tails"]),
        group=datasets.Value("int64"),
    )
    fine = X.astype(np.float64) + 1e-12
    whole = datasets.Dataset.from_dict({"vector": fine.tolist(), "face": Y.tolist(), "group": G.tolist()}, features=kinds)
    rows = ProbeRows.of_dataset(whole.select(range(N - 1, -1, -1)), "vector", "face", "group")
    assert np.array_equal(rows.matrix("X"), fine[::-1]) and rows.target("face").classes.tolist() == ["heads", "tails"]
    assert np.array_equal(rows.target("face").values == "tails", Y[::-1] == 1)
    with pytest.raises(BadRows, match="'train', 'test'"):
        ProbeRows.of_dataset(datasets.DatasetDict(train=whole, test=whole), "vector", "face", "group")  # type: ignore[arg-type]
    with pytest.raises(BadRows, match="IterableDataset"):
        ProbeRows.of_dataset(whole.to_iterable_dataset(), "vector", "face", "group")  # type: ignore[arg-type]


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackage, match="pip install datasets"):
        ProbeRows.of_dataset(None, "vector", "face", "group")  # type: ignore[arg-type]


class Cache(SimpleNamespace):
    """What `of_cache` uses of TransformerLens' ActivationCache; the notebook uses the real one."""


def a_cache(batch: int = 4, length: int = 5, batched: bool = True, **cfg: Any) -> tuple[Cache, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(batch, length, *shape, generator=generator)  # noqa: E731
    values = {f"blocks.{layer}.{name}": draw(6) for layer in (0, 1) for name in ("hook_in", "attn.hook_out", "mlp.hook_out")}
    values["blocks.1.hook_out"], values["blocks.1.attn.hook_z"] = draw(6), draw(2, 3)
    values["blocks.0.attn.hook_pattern"] = torch.randn(batch, 2, length, length, generator=generator)
    tokens = torch.randint(50, (batch, length), generator=generator)
    if not batched:
        values, tokens = {name: value[0] for name, value in values.items()}, tokens[0]
    return Cache(cache_dict=values, has_batch_dim=batched, model=SimpleNamespace(cfg=SimpleNamespace(**cfg))), tokens


def test_cache() -> None:
    """One row per token; labels of a prompt or of a token; letters as far as the cache has them; heads side by side."""
    cache, tokens = a_cache()
    rows = ProbeRows.of_cache(cache, tokens, {"odd": [0, 1, 0, 1], "big": tokens > 25})
    assert [str(cell) for cell in rows.cells(rows.default_sites)] == ["S0", "S1", "S2", "T0", "T1", "C0", "C1"]
    assert np.array_equal(rows.matrix("S", 2), cache.cache_dict["blocks.1.hook_out"].reshape(20, 6))
    assert rows.target("odd").values.tolist() == [str(i % 2) for i in range(4) for _ in range(5)]
    assert np.array_equal(rows.target("big").values == "True", (tokens > 25).reshape(-1))
    assert rows.frame["position"].tolist() == list(range(5)) * 4 and rows.frame["token"].tolist() == tokens.reshape(-1).tolist()
    assert len(np.unique(rows.roots)) == 4
    assert len(ProbeRows.of_cache(cache, tokens, pd.Series([0, 1, 0, 1], name="odd")).target("odd").values) == 20
    rows = ProbeRows.of_cache(cache, tokens, [0, 1, 0, 1], [7, 7, 8, 8], sites="C,blocks.1.attn.hook_z")
    assert rows.source.sites() == ["C", "blocks.1.attn.hook_z"] and rows.matrix("blocks.1.attn.hook_z").shape == (20, 6)
    assert sorted(set(rows.roots)) == ["7", "8"] and rows.frame["example"].nunique() == 4


def test_cache_with_padding() -> None:
    """Padding gives no rows, and positions count from the first token that counts."""
    cache, tokens = a_cache()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rows = ProbeRows.of_cache(cache, tokens, [0, 1, 0, 1], mask=mask)
    assert rows.frame["position"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert np.array_equal(rows.at("last").frame["token"], [tokens[0, 4], tokens[1, 4], tokens[2, 4], tokens[3, 2]])
    assert np.array_equal(rows.matrix("S", 1), cache.cache_dict["blocks.1.hook_in"][mask.bool()])


def test_cache_without_a_batch_and_as_a_dict() -> None:
    cache, tokens = a_cache(batched=False)
    one = ProbeRows.of_cache(cache, tokens, (tokens > 25)[None])
    other = ProbeRows.of_cache(cache.cache_dict, tokens, (tokens > 25)[None])
    assert len(one) == 5 and one.about.digest == other.about.digest and len(set(one.roots)) == 1


def test_cache_of_a_model_with_norms_after_attention() -> None:
    """T and C would be the wrong tensors there: they are left to their names."""
    cache, tokens = a_cache(use_normalization_before_and_after=True)
    assert ProbeRows.of_cache(cache, tokens, [0, 1, 0, 1]).source.sites() == ["S"]
    named = ProbeRows.of_cache(cache, tokens, [0, 1, 0, 1], sites=["blocks.0.attn.hook_out"])
    assert named.source.sites() == ["blocks.0.attn.hook_out"]


# ---- refusals ---------------------------------------------------------------------------------------------------------


def spoilt(value: float) -> np.ndarray:
    x = X.copy()
    x[7, 2] = value
    return x


CACHE, CACHED = a_cache()
REFUSED: dict[str, tuple[Callable[[], Any], type[EngineError], str]] = {
    "no groups": (lambda: ProbeRows.of_arrays(X, Y), BadRows, "not independent.*Give groups="),
    "NaN": (lambda: of_arrays(spoilt(np.nan)), BadRows, "'X': row 7 contains NaN or infinity"),
    "infinity": (lambda: of_arrays({("S", 1): spoilt(np.inf)}), BadRows, "'S1': row 7"),
    "NaN in another site": (lambda: of_arrays({"a": X, "b": spoilt(np.nan)}), BadRows, "'b': row 7"),
    "one dimension": (lambda: of_arrays(X[:, 0]), BadRows, r"shape \[120\]"),
    "three dimensions": (lambda: of_arrays(X[:, None]), BadRows, "of_cache"),
    "scalar": (lambda: of_arrays(3.0), BadRows, r"shape \[\]"),
    "objects": (lambda: of_arrays(X.astype(object)), BadRows, "holds object"),
    "ragged": (lambda: of_arrays([[1.0], [1.0, 2.0]]), BadRows, "is no array"),
    "text": (lambda: of_arrays(X.astype(str)), BadRows, "not numbers"),
    "complex": (lambda: of_arrays(torch.from_numpy(X) * 1j), BadRows, "complex"),
    "sparse": (lambda: of_arrays(torch.from_numpy(X).to_sparse()), BadRows, "sparse"),
    "no rows": (lambda: of_arrays(X[:0], Y[:0], G[:0]), BadRows, r"shape \[0, 6\].*nothing to probe"),
    "no columns": (lambda: of_arrays(X[:, :0]), BadRows, "nothing to probe"),
    "no sites": (lambda: of_arrays({}), BadRows, "the dict is empty"),
    "sites of other lengths": (lambda: of_arrays({"a": X, "b": X[1:]}), BadRows, "a 120, b 119"),
    "two sites of one name": (lambda: of_arrays({("a", 1): X, "a1": X}), BadRows, "Two arrays have the name 'a1'"),
    "with and without layers": (lambda: of_arrays({("a", 1): X, "a": X}), BadRows, "with and without layers"),
    "a letter without a layer": (lambda: of_arrays({"S": X}), BadRows, r"Give \('S', 3\)"),
    "a site that is no name": (lambda: of_arrays({3: X}), BadRows, "Unknown site 3"),
    "a negative layer": (lambda: of_arrays({("S", -1): X}), BadRows, "Unknown site"),
    "too few labels": (lambda: of_arrays(labels=Y[1:]), BadRows, "'label' has 119 values for 120 rows"),
    "labels of two dimensions": (lambda: of_arrays(labels=X), BadRows, "several labels as a dict"),
    "labels of several kinds": (lambda: of_arrays(labels=[*Y[1:].tolist(), "x"]), BadRows, "mixes text and whole numbers"),
    "labels of no kind": (lambda: of_arrays(labels=[{}] * N), BadRows, "type dict"),
    "infinite labels": (lambda: of_arrays(labels=spoilt(np.inf)[:, 2]), BadRows, "infinite"),
    "no labels": (lambda: of_arrays(labels={}), BadRows, "No labels given"),
    "a label like a column": (lambda: of_arrays(labels={"root": Y}), BadRows, "'root' is taken"),
    "a label without a name": (lambda: of_arrays(labels={1: Y}), BadRows, "is no text"),
    "one text as labels": (lambda: of_arrays(labels="face"), BadRows, "must be an array"),
    "two labels of one name": (
        lambda: of_arrays(labels=pd.DataFrame([Y, Y], index=["a", "a"]).T),
        BadRows,
        "Two label columns have the name 'a'",
    ),
    "too few groups": (lambda: of_arrays(groups=G[1:]), BadRows, "groups have 119 values"),
    "a row without a group": (lambda: of_arrays(groups=[None, *G[1:]]), BadRows, "groups lack a value at row 0"),
    "a prompt in two groups": (lambda: of_arrays(prompts=np.zeros(N)), BadRows, r"group '0' and in group '1' \(row 3\)"),
    "a position twice": (lambda: of_arrays(positions=P // 2), BadRows, "Rows 0 and 1 are both position 0.*prompts="),
    "a negative position": (lambda: of_arrays(positions=P - 1), BadRows, "row 0 has .*-1"),
    "half a position": (lambda: of_arrays(positions=P + 0.5), BadRows, "whole numbers from 0 on"),
    "a missing token": (lambda: of_arrays(tokens=[None, *TOKENS[1:]]), BadRows, "tokens must be whole numbers"),
    "a missing key": (lambda: of_arrays(keys=[None] * N), BadRows, "keys lack a value"),
    "an unknown column": (lambda: ProbeRows.of_pandas(table(), "vectr", "face", "prompt"), BadRows, "did you mean 'vector'"),
    "a table without groups": (lambda: ProbeRows.of_pandas(table(), "vector", "face"), BadRows, "not independent"),
    "a column of no numbers": (
        lambda: ProbeRows.of_pandas(table().astype({"x1": str}), NUMBERS, "face", "prompt"),
        BadRows,
        "'x1' holds",
    ),
    "a hole in a column": (
        lambda: ProbeRows.of_pandas(table().replace({"x1": X[5, 1]}, np.nan), NUMBERS, "face", "prompt"),
        BadRows,
        "row 5 contains NaN",
    ),
    "no columns given": (lambda: ProbeRows.of_pandas(table(), [], "face", "prompt"), BadRows, "No feature columns"),
    "a column given twice": (lambda: ProbeRows.of_pandas(table(), ["x1", "x1"], "face", "prompt"), BadRows, "given twice"),
    "a column there twice": (
        lambda: ProbeRows.of_pandas(pd.concat([table(), table()[["face"]]], axis=1), "vector", "face", "prompt"),
        BadRows,
        "Two columns have the name 'face'",
    ),
    "vectors of other lengths": (
        lambda: ProbeRows.of_pandas(table().assign(vector=[X[i, : 1 + i % 2] for i in range(N)]), "vector", "face", "prompt"),
        BadRows,
        "vectors of one length",
    ),
    "no cache": (lambda: ProbeRows.of_cache(X, CACHED, Y), BadRows, "Give an ActivationCache"),
    "a pattern": (
        lambda: ProbeRows.of_cache(CACHE, CACHED, [0, 1, 0, 1], sites=["blocks.0.attn.hook_pattern"]),
        BadRows,
        r"\[batch, positions, ...\]",
    ),
    "an unknown hook": (
        lambda: ProbeRows.of_cache(CACHE, CACHED, [0] * 4, sites="blocks.0.hook_im"),
        UnknownSite,
        "did you mean",
    ),
    "a letter that is not there": (
        lambda: ProbeRows.of_cache({"blocks.0.hook_in": torch.ones(4, 5, 2)}, CACHED, [0] * 4, sites="T"),
        UnknownSite,
        "no site of T",
    ),
    "nothing with a letter": (
        lambda: ProbeRows.of_cache({"ln": torch.ones(4, 5, 2)}, CACHED, [0] * 4),
        UnknownSite,
        "Give sites",
    ),
    "other tokens": (lambda: ProbeRows.of_cache(CACHE, CACHED[:, 1:], [0] * 4), BadRows, r"the tokens \[4, 4\]"),
    "text as tokens": (lambda: ProbeRows.of_cache(CACHE, [["a"] * 5] * 4, [0] * 4), BadRows, "Give whole numbers"),
    "ragged tokens": (lambda: ProbeRows.of_cache(CACHE, [[1, 2], [1]], [0] * 4), BadRows, "give a mask"),
    "another mask": (lambda: ProbeRows.of_cache(CACHE, CACHED, [0] * 4, mask=CACHED[:, 1:]), BadRows, "The mask has shape"),
    "an empty mask": (lambda: ProbeRows.of_cache(CACHE, CACHED, [0] * 4, mask=CACHED * 0), BadRows, "leaves out every token"),
    "labels of other prompts": (lambda: ProbeRows.of_cache(CACHE, CACHED, [0] * 5), BadRows, r"one value per prompt \[4\]"),
    "arrays without rows": (lambda: sweep(X, "label"), ProbeError, "ProbeRows.of_arrays"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """A named error that says what was given and what to do."""
    make, error, said = REFUSED[case]
    with pytest.raises(error, match=said) as caught:
        make()
    assert re.search(r"\. [A-Z]", str(caught.value)), "a second sentence says what to do"


# ---- without a task ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_natural_call(tmp_path: Path) -> None:
    """No site, no position: every site at every row. What needs a task or tokens is skipped by name."""
    report = sweep(of_arrays({("S", 0): RANDOM.normal(size=(N, 4)), ("S", 1): X[:, :4]}), "label", **QUICK)
    assert report.best("label")["layer"] == 1 and report.best("label")["accuracy"] > 0.95
    assert {line["position"] for line in report.lines} == {"all"} and not any(line["known_zero"] for line in report.lines)
    said = report.text()
    for part in (
        "Shown: label at all",
        "Controls not run: token_identity",
        "bag_of_tokens",
        "Skipped known zeros",
        "have no tokens",
    ):
        assert part in said
    again = Report.load(report.save(tmp_path / "report"))
    assert again.lines == report.to_json()["rows"] and again.source["task"] is None
    assert "replaylens: arrays" in ReportPage(probes=[again]).html()


NEEDS: dict[str, tuple[Callable[[ProbeRows], Any], type[ProbeError], str]] = {
    "state": (lambda rows: sweep(rows), MissingLabel, "Known: label. The state is a task's"),
    "another label": (lambda rows: rows.target("lable"), MissingLabel, "did you mean 'label'"),
    "query": (lambda rows: rows.at("query"), BadPosition, "Unknown position of given texts or arrays 'query'. Use all, "),
    "step": (
        lambda rows: fit_probe(rows, "label", site="X", position="step:2"),
        BadPosition,
        "position of given texts or arrays 'step:2'",
    ),
    "a number": (lambda rows: rows.at(3), BadPosition, "give positions="),
    "last": (lambda rows: rows.at("last"), BadPosition, "give positions="),
    "judge": (lambda rows: judge(rows, draft_layer=0), ProbeError, "have no task"),
    "outcome at fork": (outcome_at_fork, ProbeError, "have no task"),
    "viable branch": (viable_branch, ProbeError, "have no task"),
    "transfer": (lambda rows: transfer(rows, "label"), ProbeError, "arrays have none"),
    "by answer": (splits.by_answer, MissingLabel, "No row has 'correct'.*labels"),
    "by length": (lambda rows: splits.by_length(rows, 3), MissingLabel, "No row has 'steps'"),
    "by phrase": (lambda rows: splits.by_phrase(rows, " not"), BadRows, "holes"),
    "by acceptance": (splits.by_acceptance, TooFewGroups, "0 to test"),
}


@pytest.mark.parametrize("case", NEEDS)
def test_what_needs_a_task_says_so(case: str) -> None:
    ask, error, said = NEEDS[case]
    with pytest.raises(error, match=said):
        ask(of_arrays())


def test_untrained_model(engine: Engine, tmp_path: Path) -> None:
    """Its rows are given, since no engine made these. They count as the control, and other rows are refused."""
    how: dict[str, Any] = dict(estimators="ridge", resume=tmp_path, **QUICK)
    blank = of_arrays(np.random.default_rng(5).normal(size=(N, 4)))
    known, unknown = (
        sweep(of_arrays(), "label", untrained=blank, **how),
        sweep(of_arrays(), "label", untrained=of_arrays(), **QUICK),
    )
    assert known.best("label")["untrained"] < 0.7 and "Shown" in known.text() and "not run: token_identity" in known.text()
    assert (
        unknown.best("label")["untrained"] == unknown.best("label")["accuracy"] and unknown.best("label")["verdict"] != "shown"
    )
    with pytest.raises(PlanMismatch):
        sweep(of_arrays(), "label", untrained=of_arrays(), **how)
    for other in (of_arrays(groups=G[::-1]), of_arrays(X[:-1], Y[:-1], G[:-1]), of_arrays(positions=P), blank.where(Y == 1)):
        with pytest.raises(BadRows, match="not the 120 rows to probe"):
            sweep(of_arrays(), "label", untrained=other)
    with pytest.raises(ProbeError, match="Leave out the engine"):
        sweep(of_arrays(), "label", engine=engine)
    with pytest.raises(ProbeError, match="Give one of them"):
        sweep(of_arrays(), "label", engine=engine, untrained=blank)


def test_rows_of_a_task_and_of_arrays_are_not_joined(dumped: ProbeRows) -> None:
    with pytest.raises(ProbeError, match="Some of the rows come from arrays"):
        ProbeRows.join(a=dumped, b=of_arrays())


def test_rows_of_a_task_end_with_the_query(dumped: ProbeRows) -> None:
    with pytest.raises(BadPosition, match=r"Unknown position of a task 'last'\. .* query, "):
        dumped.at("last")


def test_unknown_kind_of_probe() -> None:
    with pytest.raises(ProbeError, match="did you mean 'logistic'"):
        solve("logistc", torch.from_numpy(X)[None], np.ones((1, N, 1)), np.ones((1, 1, N), dtype=bool))


def test_splits_of_arrays() -> None:
    """Labels that name what a dump would know make its splits work; joined parts are split by group."""
    rows = of_arrays(labels={"label": Y, "correct": G % 2 == 0, "steps": G % 5})
    for split in (splits.by_answer(rows), splits.by_length(rows, 2), splits.by_root(rows)):
        for train, test in split:
            assert not set(rows.roots[train]) & set(rows.roots[test]) and test.any()
    joined = ProbeRows.join(a=of_arrays(groups=[f"doc {g}" for g in G]), b=of_arrays(X + 1, groups=[f"doc {g}" for g in G]))
    ((train, test),) = splits.by_part(joined, "a", "b")
    assert not set(joined.roots[train]) & set(joined.roots[test])
    assert np.array_equal(joined.where(test).matrix("X"), np.concatenate([X, X + 1])[test])
    report = sweep(joined, "label", split="part:a:b", estimators="ridge", **QUICK)
    assert report.best("label")["accuracy"] > 0.9


def test_rows_that_are_the_same_observation() -> None:
    """By key; by path, whatever the last bits; else by the bits of all sites. Their groups are one, and one of them counts."""
    fresh = independent(of_arrays({"a": X, "b": X[:, :1]}))
    assert len(fresh.rows) == N and len(np.unique(fresh.groups)) == GROUPS
    copied = X.copy()
    copied[EACH] = copied[0]  # the first row of group 1 is that of group 0
    for rows in (
        of_arrays(copied),
        of_arrays(X, keys=[0 if i == EACH else i for i in range(N)]),
        of_arrays(X, positions=P, tokens=np.where(np.arange(N) == EACH, 1, np.arange(N) + 1)),
    ):
        found = independent(rows)
        assert found.rows.numbers.tolist() == [i for i in range(N) if i != EACH]
        assert len(np.unique(found.groups)) == GROUPS - 1
        for train, test in splits.by_root(rows):
            assert train[0] == train[EACH] and test[0] == test[EACH]
        with pytest.raises(SharedRows, match=r"row 0 .* row 3 "):
            splits.by_mask(rows, "leak", G == 0, G == 1)
    assert len(independent(of_arrays({"a": copied, "b": X})).rows) == N, "without S, T and C, any site tells them apart"
    agree = np.where(np.arange(N) == EACH, Y[0], Y)
    assert cross_validate(copied, agree, G).rows.tolist() == [i for i in range(N) if i != EACH]
    torn = np.where(np.arange(N) == EACH, 1 - Y[0], Y)
    assert len(cross_validate(copied, torn, G).rows) == N, "rows that disagree are all kept, in one group"


def test_parts_of_different_models_are_different_observations() -> None:
    """The same texts through two models: equal paths, other activations. They are one group, whatever the groups are called."""
    told: dict[str, Any] = dict(positions=P, tokens=np.arange(N))
    joined = ProbeRows.join(a=of_arrays(X, **told), b=of_arrays(X + 1, **told))
    assert len(independent(joined).rows) == 2 * N and len(np.unique(independent(joined).groups)) == GROUPS
    named = ProbeRows.join(a=of_arrays(X, **told), b=of_arrays(X + 1, groups=G + 1000, **told))
    assert len(independent(named).rows) == 2 * N and len(np.unique(independent(named).groups)) == GROUPS
    with pytest.raises(ProbeError, match="only some parts have keys"):
        ProbeRows.join(a=of_arrays(keys=range(N)), b=of_arrays(X + 1))


@pytest.mark.slow
@pytest.mark.parametrize("words", [False, True], ids=["cache", "text"])
def test_the_same_prompts_in_two_parts_leak_nothing(words: bool) -> None:
    """Coin tosses for prompts that come in two parts, in another order: a probe that saw a prompt in one part is never tested
    on it in the other. With keys that tell the parts apart, it knew 90 % of the tosses."""
    generator = np.random.default_rng(0)
    tokens, x = generator.integers(20, 50, size=(100, 4)), generator.normal(size=(100, 4, 64))
    toss, order = generator.integers(2, size=100), np.random.default_rng(1).permutation(100)

    def part(chosen: np.ndarray) -> ProbeRows:
        if not words:
            return ProbeRows.of_cache({"blocks.0.hook_in": x[chosen]}, tokens[chosen], {"toss": toss[chosen]})
        flat = x[chosen].reshape(-1, 64) + 1e-3 * generator.normal(size=(4 * len(chosen), 64))  # as another batch rounds
        text = [f"w{token}" for token in tokens[chosen].ravel()]
        ids = [f"{chosen[0]}:{i}" for i in np.repeat(np.arange(len(chosen)), 4)]
        where = dict(positions=np.tile(np.arange(4), len(chosen)), tokens=text)
        return ProbeRows.of_arrays({("S", 0): flat}, {"toss": np.repeat(toss[chosen], 4)}, ids, **where)

    joined = ProbeRows.join(a=part(np.arange(100)), b=part(order[:90]))
    report = transfer_across(joined, "toss", fit_on="a", test_on="b", position="last")
    reads = next(line for line in report.lines if line["what"] == "S0: a to b")
    assert reads["verdict"] != "shown" and reads["low"] < 0.5 and (reads["rows"], reads["groups"]) == (90, 90)
    found = sweep(joined, "toss", positions="last", **QUICK).best("toss")
    assert found["low"] < 0.5 and (found["rows"], found["distinct"], found["groups"]) == (190, 100, 100)
    here = joined.at("last")
    with pytest.raises(SharedRows):
        splits.by_mask(here, "parts", *(here.frame["part"] == name for name in "ab"))


def test_tokens_are_named_alike_in_all_parts() -> None:
    with pytest.raises(BadRows, match="Part 'a' has its tokens as text, part 'b' as ids"):
        ProbeRows.join(a=of_arrays(tokens=[f"w{i}" for i in range(N)]), b=of_arrays(tokens=range(N)))


def test_the_deepest_site_is_the_key_of_arrays() -> None:
    """A text that comes twice has two rows, and one deepest stream. What else is given with it does not tell them apart."""
    twice, noise = np.vstack([X, X]), np.random.default_rng(2).normal(size=(2 * N, 2))
    for other in (("S", 1), ("C", 2), ("T", 2), "notes"):
        rows = of_arrays({("S", 3): twice, other: noise}, np.tile(Y, 2), range(2 * N))
        assert len(independent(rows).rows) == N, other
    rows = of_arrays({("S", 3): twice, ("C", 3): noise}, np.tile(Y, 2), range(2 * N))
    assert len(independent(rows).rows) == 2 * N, "the negative control: the MLP of a layer comes after its stream"


def test_near_duplicates_are_one_observation() -> None:
    """Texts that come twice, with noise as of another batch, are not independent. Keys say so; without them a probe learns
    coin tosses by heart."""
    generator = np.random.default_rng(0)
    x, toss = generator.normal(size=(60, 128)), np.tile(generator.integers(2, size=60), 2)
    twice = np.vstack([x, x + 1e-6 * generator.normal(size=x.shape)]).astype(np.float32)
    keys = near_duplicates(torch.from_numpy(twice))
    assert keys.tolist() == [*range(60), *range(60)]
    plain, keyed = (cross_validate(twice, toss, range(120), keys=given) for given in (None, keys))
    assert plain.score.value > 0.8 and len(keyed.rows) == 60 and keyed.score.low < 0.5
    assert len(np.unique(near_duplicates(x))) == 60 and len(np.unique(near_duplicates(twice, 0))) == 120
    chain = np.array([[0.0], [0.4], [0.8], [60.0], [-60.0], [90.0], [-90.0]])
    assert near_duplicates(chain).tolist() == [0, 0, 0, 1, 2, 3, 4], "by way of the row between them"
    with pytest.raises(BadRows, match="tolerance=2 is no share"):
        near_duplicates(x, 2)


def test_groups_are_what_makes_a_score_honest() -> None:
    """Negative control: noise that the rows of a document share, and a label of the document, look like knowledge to a probe
    that saw other rows of it. With the documents as groups nothing is found; with every row on its own, everything is."""
    generator = np.random.default_rng(1)
    noise = np.repeat(generator.normal(size=(GROUPS, 64)), EACH, 0) + 0.1 * generator.normal(size=(N, 64))
    label = np.repeat(generator.integers(2, size=GROUPS), EACH)
    honest, leaky = (sweep(of_arrays(noise, label, groups), "label", **QUICK) for groups in (G, range(N)))
    assert honest.best("label")["verdict"] != "shown" and honest.best("label")["accuracy"] < 0.7
    assert leaky.best("label")["accuracy"] > 0.9
