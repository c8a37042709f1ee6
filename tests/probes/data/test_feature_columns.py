"""Features as one more site of rows from dumps, runs and arrays: the columns that encoding the rows gives, to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnknownSite
from replaylens.engine.features.features import SparseFeatures
from replaylens.probes.errors import BadRows
from replaylens.probes.rows import ProbeRows, with_features
from replaylens.probes.sweeps import sweep
from tests.engine.features.tiny import COUNT, write

D = 128
"""width of the coin model"""


def load(folder: Path, hook: str) -> SparseFeatures:
    return SparseFeatures.load(write(folder, "standard", d_in=D, hook=hook))


def test_columns_of_a_dump(coin_dump: Dump, tmp_path: Path) -> None:
    """The stream leaving block 1 is S at layer 2. Narrowing keeps the site. Negative control: another layer differs."""
    rows = ProbeRows.of(coin_dump)
    made = with_features(rows, load(tmp_path, "blocks.1.hook_resid_post"), [7, 3])
    expected = load(tmp_path, "blocks.1.hook_resid_post").encode(torch.from_numpy(rows.matrix("S", 2))).columns([7, 3])
    assert np.array_equal(made.matrix("features"), expected.numpy()) and made.source.sites() == [
        "S",
        *rows.source.sites()[1:],
        "features",
    ]
    few = made.at("query")
    assert np.array_equal(few.matrix("features"), expected.numpy()[few.numbers])
    assert np.array_equal(few.matrix("S", 1), rows.at("query").matrix("S", 1))
    other = with_features(rows, load(tmp_path, "blocks.2.hook_resid_post"), [7, 3])
    assert not np.array_equal(other.matrix("features"), made.matrix("features"))
    assert made.about.digest != rows.about.digest != "" and made.about.digest.startswith(rows.about.digest)


def test_a_sweep_over_features(coin_dump: Dump, tmp_path: Path) -> None:
    """Features of random directions keep enough of the stream that a probe finds the coin's face in them."""
    rows = with_features(ProbeRows.of(coin_dump), load(tmp_path, "blocks.3.hook_resid_post"))
    table = sweep(rows, "face", sites="features", positions="query", estimators="ridge").table
    table = table[table["label"] == "face"]
    assert list(table["site"]) == ["features"] and float(table["accuracy"].iloc[0]) > float(table["majority"].iloc[0])
    assert rows.matrix("features").shape[1] == COUNT


def test_columns_of_a_run_and_of_arrays(engine: Engine, tmp_path: Path) -> None:
    """A site by its older name, and arrays under the hook's own name."""
    run = engine.replay(tasks.get("coin")(flips=2).examples(3), sites=["blocks.1.mlp.hook_post", "C"])
    rows = ProbeRows.of(run)
    features = SparseFeatures.load(write(tmp_path / "c", "standard", d_in=D, hook="blocks.1.hook_mlp_out"))
    expected = features.encode(torch.from_numpy(rows.matrix("C", 1))).dense().numpy()
    assert np.array_equal(with_features(rows, features).matrix("features"), expected)
    post = rows.matrix("blocks.1.mlp.out.hook_in")
    wide = SparseFeatures.load(write(tmp_path / "post", "standard", d_in=post.shape[1], hook="blocks.1.mlp.hook_post"))
    assert np.array_equal(with_features(rows, wide).matrix("features"), wide.encode(torch.from_numpy(post)).dense().numpy())
    arrays = ProbeRows.of_arrays({"blocks.1.hook_mlp_out": rows.matrix("C", 1)}, rows.roots, rows.roots)
    assert np.array_equal(with_features(arrays, features, name="sae").matrix("sae"), expected)


def test_what_is_refused(coin_dump: Dump, tmp_path: Path) -> None:
    rows = ProbeRows.of(coin_dump)
    features = load(tmp_path / "a", "blocks.1.hook_resid_post")
    with pytest.raises(UnknownSite, match=r"do not hold blocks.1.hook_mlp_out.*They hold S"):
        with_features(rows, load(tmp_path / "b", "blocks.1.hook_mlp_out"))
    for name in ("S", "Z.kl"):
        with pytest.raises(BadRows, match="already have a site"):
            with_features(rows, features, name=name)
    with pytest.raises(BadRows, match="No features were chosen"):
        with_features(rows, features, [])
    with pytest.raises(BadRequest, match="between 0 and 47"):
        with_features(rows, features, [48])
    with pytest.raises(BadRequest, match="ProbeRows"):
        with_features(coin_dump, features)  # type: ignore[arg-type]
    with pytest.raises(UnknownSite, match="has no layers"):
        with_features(rows, features).matrix("features", 2)
