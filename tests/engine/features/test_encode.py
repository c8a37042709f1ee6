"""Features are those of the formula, and a row's features are the same bits in any company and on any number of threads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from replaylens.engine.errors import BadRange, BadRequest
from replaylens.engine.features import rows as product
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.features.rows import FeatureRows
from tests.engine.features.tiny import COUNT, MORE, WIDTH, formula, tensors, write


def rows(n: int = 37) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1))


def same(a: FeatureRows, b: FeatureRows) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("offsets", "indices", "values"))


@pytest.mark.parametrize("kind", MORE)
def test_encode_and_decode_are_the_formula(kind: str, tmp_path: Path) -> None:
    """Negative control: a formula with another encoder bias is not met."""
    folder = write(tmp_path, kind)
    features = SparseFeatures.load(folder)
    found = features.encode(rows())
    acts, back = formula(folder, rows())
    assert 1 < float(found.counts.float().mean()) < COUNT / 1.5
    assert torch.allclose(found.dense().double(), acts, rtol=1e-5, atol=1e-5)
    assert torch.allclose(features.decode(found).double(), back, rtol=1e-5, atol=1e-5)
    features.weights.b_enc.add_(1e-3)
    assert not torch.allclose(features.encode(rows()).dense().double(), acts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["standard", "topk rescaled", "jumprelu"])
def test_a_row_is_encoded_alike_alone_and_with_others(kind: str, tmp_path: Path) -> None:
    """Together, one at a time, in another order, as a view at an odd offset, and on two threads."""
    features, x = SparseFeatures.load(write(tmp_path, kind)), rows()
    together = features.encode(x)
    back = features.decode(together)
    for i in range(len(x)):
        alone = features.encode(x[i : i + 1])
        assert all(torch.equal(a, b) for a, b in zip(alone.row(0), together.row(i), strict=True))
        assert torch.equal(features.decode(alone)[0], back[i])
    assert same(features.encode(torch.cat([rows(3), x])[3:]), together)
    assert torch.equal(features.encode(x.flip(0)).dense().flip(0), together.dense())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert same(features.encode(x), together) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_plain_product_would_not_be_alike() -> None:
    """Negative control: the library's own product gives a row other bits alone than with others, and the check finds it."""
    weight, x = torch.randn(577, 1031, generator=torch.Generator().manual_seed(2)), torch.randn(37, 577)
    assert not torch.equal(torch.stack([row @ weight for row in x]), x @ weight)
    own = product.RowProduct(weight)
    assert torch.equal(torch.cat([own(row[None]) for row in x]), own(x))


def test_modes_of_the_caller_do_not_matter(tmp_path: Path) -> None:
    """Nothing flushes tiny numbers to zero. The caller's modes are restored."""
    features, threads = SparseFeatures.load(write(tmp_path, "standard")), torch.get_num_threads()

    features.weights.b_dec.zero_()
    tiny = torch.tensor([1e-39, 2e-39])
    faint = FeatureRows(torch.tensor([0, 2]), torch.tensor([3, 9], dtype=torch.int32), tiny, COUNT)
    expected = features.decode(faint)
    assert bool(expected.any())
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    try:
        found = features.decode(faint)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(found, expected)


def test_steps_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are encoded some at a time, to bound the memory."""
    features = SparseFeatures.load(write(tmp_path, "standard"))
    whole = features.encode(rows(100))
    monkeypatch.setattr("replaylens.engine.features.features._NUMBERS", 20 * COUNT)
    assert same(features.encode(rows(100)), whole)


def test_equal_features_of_topk_are_chosen_by_number(tmp_path: Path) -> None:
    """All features are equal: the first k are kept, in every row."""
    made = SparseFeatures.load(write(tmp_path, "topk"))
    made.weights.W_enc.fill_(0.25)
    made.weights.b_enc.fill_(40.0)
    features = SparseFeatures(made.config, made.weights)
    assert features.encode(rows(4)).indices.tolist() == [0, 1, 2, 3, 4] * 4


def test_rows_of_lower_precision_and_of_heads(tmp_path: Path) -> None:
    """bfloat16 rows are those of their float32 values; heads are laid side by side."""
    features, x = SparseFeatures.load(write(tmp_path, "standard")), rows(5)
    assert same(features.encode(x.bfloat16()), features.encode(x.bfloat16().float()))
    assert same(features.encode(x.view(5, 4, 8)), features.encode(x))


def test_no_rows_and_no_features(tmp_path: Path) -> None:
    features = SparseFeatures.load(write(tmp_path, "jumprelu"))
    features.weights.threshold.fill_(1e6)  # type: ignore[union-attr]
    silent = features.encode(rows(3))
    assert silent.counts.tolist() == [0, 0, 0] and silent.strongest(5) == []
    assert torch.equal(features.decode(silent), features.weights.b_dec.expand(3, -1))
    assert len(features.encode(rows(0))) == 0 and features.decode(features.encode(rows(0))).shape == (0, WIDTH)
    with pytest.raises(BadRequest, match="nothing to plot"):
        silent.plot()


def test_feature_rows_read(tmp_path: Path) -> None:
    """Rows, columns, frame and pictures hold the same numbers."""
    found = SparseFeatures.load(write(tmp_path, "topk")).encode(rows(6))
    dense = found.dense()
    assert torch.equal(found.columns([7, 3]), dense[:, [7, 3]]) and torch.equal(found.columns(7), dense[:, [7]])
    indices, values = found.row(-1)
    assert torch.equal(dense[-1, indices.long()], values) and len(values) <= 5
    frame = found.frame()
    assert frame["activation"].sum() == pytest.approx(float(dense.sum())) and list(frame) == ["row", "feature", "activation"]
    assert found.strongest(1) == [int(dense.max(0).values.argmax())]
    assert "strongest features" in found._repr_html_() and repr(found).startswith("FeatureRows(6 rows, 48 features")
    assert len(found.plot().axes) == 2
    for wrong in (48, -1, [1, 1], "7"):
        with pytest.raises(BadRequest):
            found.columns(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRange, match="There are 6 rows"):
        found.row(6)


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    features = SparseFeatures.load(write(tmp_path, "standard"))
    for wrong in (rows()[:, :-1], rows()[0], [[0.0] * WIDTH]):
        with pytest.raises(BadRequest, match=r"Give a tensor \[n, 32\]"):
            features.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="NaN"):
        features.encode(rows() / 0)
    with pytest.raises(BadRequest, match="features, not 48"):
        features.decode(FeatureRows(torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int32), torch.empty(0), 3))


def test_lower_precision_of_weights(tmp_path: Path) -> None:
    """Weights of bfloat16 are read as their float32 values."""
    halves = {name: value.bfloat16() for name, value in tensors("standard").items()}
    folder = write(tmp_path, "standard")
    save_file(halves, folder / "sae_weights.safetensors")
    assert torch.equal(SparseFeatures.load(folder).weights.W_enc, halves["W_enc"].float())
