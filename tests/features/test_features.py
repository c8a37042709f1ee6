"""Features: edits that do what a hook function would, but certified; encoding; files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadConfig,
    BadEdit,
    BadRange,
    BadRequest,
    BadWeights,
    EngineError,
    UnknownSite,
    UnsupportedModel,
)
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.features import rows as product
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import FeatureRows
from replaylens.kernels import definition
from tests.features.tiny import COUNT, HOOK, MORE, WIDTH, config, formula, tensors, write
from tests.toy_model import engine

PATH = [5, 9, 33, 2, 47, 18, 9, 60, 21, 7, 14]
LAST = "blocks.1.hook_out"


@pytest.fixture
def served() -> Engine:
    return engine()


def load(folder: Path, kind: str = "standard", **changes: Any) -> SparseFeatures:
    return SparseFeatures.load(write(folder, kind, **changes))


def hooked(features: SparseFeatures, root: Branch, feature: int, change: Any) -> Branch:
    """The fork that a hook function gives, which encodes whatever passes by: x + (change(f) - f) W_dec."""

    def function(x: Tensor, hook: Any) -> Tensor:
        now = features.encode(x.reshape(-1, features.config.d_in)).columns(feature)
        return x + ((change(now) - now) * features.decoder[feature]).reshape(x.shape)

    return root.fork(hooks=[(features.config.hook, function)])[0]


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "ablate": ({"ablate": 3}, torch.zeros_like),
    "set": ({"set": {3: 4.0}}, lambda now: torch.full_like(now, 4.0)),
    "scale": ({"scale": {3: 2.5}}, lambda now: now * 2.5),
}


@pytest.mark.parametrize("kind", ["standard", "topk rescaled", "jumprelu"])
@pytest.mark.parametrize("change", CHANGES)
def test_edits_are_what_a_hook_function_does(change: str, kind: str, tmp_path: Path, served: Engine) -> None:
    """To the bit, on all tokens that the branch has, and certified. Negative control: the unedited fork differs."""
    features, root = load(tmp_path, kind), served.prompt(PATH, sites=[HOOK, LAST])
    options, function = CHANGES[change]
    feature = features.of(root).strongest(1)[0]
    options = {name: {feature: value[3]} if isinstance(value, dict) else feature for name, value in options.items()}
    (edited,) = root.fork(edits=features.edits(root, **options))
    by_hook = hooked(features, root, feature, function)
    assert edited.certified and not by_hook.certified
    for site in (HOOK, LAST):
        assert torch.equal(edited.activations[site], by_hook.activations[site])
        assert not torch.equal(edited.activations[site], root.activations[site])


def test_the_error_term_is_kept(tmp_path: Path, served: Engine) -> None:
    """What the features do not explain of a row, x - decode(encode(x)), does not move with the edit."""
    features, root = load(tmp_path), served.prompt(PATH, sites="S")
    x, found = root.activations["blocks.1.hook_in"], features.of(root)
    feature = next(i for i in found.strongest(48) if 0 < int(found.columns(i).count_nonzero()) < len(PATH))
    (edit,) = features.edits(root, ablate=feature)
    assert edit.value is not None and isinstance(edit.positions, list)
    moved = x.clone()
    moved[edit.positions] += edit.value
    without = found.dense()
    without[:, feature] = 0
    error = x - features.decode(found)
    expected = without.double() @ features.decoder.double() + features.weights.b_dec + error
    assert torch.allclose(moved.double(), expected, atol=1e-5)
    silent = (found.columns(feature) == 0).flatten().nonzero().flatten().tolist()
    assert not set(silent) & set(edit.positions)  # rows without the feature are not touched


def test_a_branch_s_features_are_those_of_its_rows_alone(tmp_path: Path, served: Engine) -> None:
    """Beside other requests, and on a fork: the same bits; an edit before the site changes them (negative control)."""
    features = load(tmp_path)
    alone = features.of(served.prompt(PATH, sites=[HOOK]))
    others = served.prompts([PATH[:4], PATH, PATH[::-1]], sites=[HOOK])
    (fork,) = others[1].fork(at=7)
    assert torch.equal(features.of(others[1]).dense(), alone.dense())
    assert torch.equal(features.of(fork).dense(), alone.dense()[:7])
    assert alone.positions == tuple(range(11)) and alone.words is not None and alone.words[0] == " 5"
    assert list(alone.frame()) == ["row", "position", "token", "feature", "activation"]
    (edited,) = others[1].fork(edits=[Edit("blocks.0.hook_in", "zero", positions=3)])
    assert not torch.equal(features.of(edited).dense(), alone.dense())


def test_edited_forks_do_not_depend_on_company(tmp_path: Path, served: Engine) -> None:
    """Alone or in a batch of other edits, continued by any drafter: the same tokens and rows."""
    features, root = load(tmp_path), served.prompt(PATH, sites=[HOOK, LAST])
    top = features.of(root).strongest(4)
    forks = [root.fork(edits=features.edits(root, scale={feature: 3.0}))[0] for feature in top]
    served.generate(forks, 6, window=4)
    other = engine()
    root = other.prompt(PATH, sites=[HOOK, LAST])
    for feature, fork in zip(top, forks, strict=True):
        (alone,) = root.fork(edits=features.edits(root, scale={feature: 3.0}))
        alone.generate(6, window=1)
        assert alone.tokens == fork.tokens and torch.equal(alone.activations[LAST], fork.activations[LAST])


def test_transcoders_edit_their_output(tmp_path: Path, served: Engine) -> None:
    """Features are read before the MLP, the difference is added after it."""
    features, root = load(tmp_path, "transcoder"), served.prompt(PATH, sites=["blocks.1.ln2.hook_out", "C"])
    found = features.of(root)
    feature = found.strongest(1)[0]
    (edit,) = features.edits(root, ablate=[feature], positions=[-1, 2, 5])
    assert edit.site == "blocks.1.mlp.hook_out"
    (edited,) = root.fork(edits=[edit])
    wanted = -found.columns(feature) * features.decoder[feature]
    assert isinstance(edit.positions, list) and edit.value is not None
    assert set(edit.positions) <= {2, 5, 10} and torch.equal(edit.value, wanted[edit.positions])
    before, after = (branch.activations["blocks.1.mlp.hook_out"] for branch in (root, edited))
    assert torch.equal(after[edit.positions], before[edit.positions] + edit.value)


def test_heads_side_by_side(tmp_path: Path, served: Engine) -> None:
    """Features of all heads' outputs, hook_z."""
    hook = "blocks.1.attn.hook_z"
    features, root = load(tmp_path, hook=hook, reshape_activations="hook_z"), served.prompt(PATH, sites=[hook, LAST])
    feature = features.of(root).strongest(1)[0]
    (edited,) = root.fork(edits=features.edits(root, ablate=feature))
    assert torch.equal(edited.activations[LAST], hooked(features, root, feature, torch.zeros_like).activations[LAST])


def test_edits_of_several_features_add_up(tmp_path: Path, served: Engine) -> None:
    features, root = load(tmp_path), served.prompt(PATH, sites=[HOOK])
    a, b = features.of(root).strongest(2)
    (both,) = features.edits(root, ablate=[a], set={b: 1.5})
    single = [features.edits(root, ablate=[a])[0], features.edits(root, set={b: 1.5})[0]]
    total = torch.zeros(len(PATH), 32)
    for edit in single:
        total[edit.positions] += edit.value
    assert torch.allclose(total[both.positions], both.value)


def test_generated_tokens_are_edited_too(tmp_path: Path, served: Engine) -> None:
    """`generate` gives the tokens and rows of a hook function at every token; plain edits stop at the last captured one."""
    features, root = load(tmp_path), served.prompt(PATH, sites=[HOOK, LAST])
    feature, sampling = features.of(root).strongest(1)[0], Sampling(temperature=0.8, seed=3)
    held = features.generate(root, 8, set={feature: 9.0}, sampling=sampling)
    by_hook = hooked(features, root, feature, lambda now: torch.full_like(now, 9.0)).generate(8, sampling=sampling)
    assert held.certified and held.tokens == by_hook.tokens and held.length == len(PATH) + 8
    rows = by_hook.activations[LAST]
    assert torch.equal(held.activations[LAST][: len(rows)], rows)
    (plain,) = root.fork(edits=features.edits(root, set={feature: 9.0}))
    plain.generate(8, sampling=sampling)  # negative control
    assert not torch.equal(plain.activations[LAST][: len(rows)], rows)
    silent = next(i for i in range(48) if not features.of(root).columns(i).any())
    never = features.generate(root, 3, scale={silent: 1.0})
    assert never.tokens == root.fork()[0].generate(3).tokens
    served.check_integrity()


def test_edits_that_cannot_be_made(tmp_path: Path, served: Engine) -> None:
    features, root = load(tmp_path), served.prompt(PATH, sites=[HOOK])
    silent = next(i for i in range(48) if not features.of(root).columns(i).any())
    with pytest.raises(BadEdit, match=r"Nothing would change: set \d+ to 0"):
        features.edits(root, ablate=silent)
    with pytest.raises(BadEdit, match="Invalid positions=20"):
        features.edits(root, ablate=1, positions=20)
    with pytest.raises(BadEdit, match="chooses none"):
        features.edits(root, ablate=1, positions=slice(5, 5))
    with pytest.raises(BadRequest, match="No feature to change"):
        features.edits(root)
    with pytest.raises(BadRequest, match="in two ways"):
        features.edits(root, ablate=1, set={1: 3.0})
    with pytest.raises(BadRequest, match="a dict from features to numbers"):
        features.edits(root, scale=2.0)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="beyond float32"):
        features.edits(root, set={7: 1e39})
    with pytest.raises(BadRequest, match="between 0 and 47"):
        features.edits(root, ablate=48)
    last = served.prompt(PATH, sites=[HOOK], positions="last")
    with pytest.raises(BadEdit, match="Position 3 has no captured row"):
        features.edits(last, ablate=1, positions=3)


def test_the_last_generated_token_is_edited(tmp_path: Path, served: Engine) -> None:
    """It has no row until another token follows. Its edit is that of the same tokens, given as a prompt."""
    features, branch = load(tmp_path), served.prompt(PATH, sites=[HOOK, LAST]).generate(3)
    assert len(branch.activations.positions()) == branch.length - 1
    given = served.prompt(branch.tokens, sites=[HOOK, LAST])
    pages = served.runner.pool.num_free
    (mine,), (expected,) = (features.edits(each, set={5: 2.0}) for each in (branch, given))
    assert served.runner.pool.num_free == pages  # the twin is gone
    assert mine.positions == expected.positions == list(range(branch.length)) and torch.equal(mine.value, expected.value)  # type: ignore[arg-type]
    assert features.edits(branch, set={5: 2.0}, positions=-1)[0].positions == [branch.length - 1]


def test_the_stream_by_its_other_name(tmp_path: Path, served: Engine) -> None:
    """hook_resid_post of block 0 is read from S, where it enters block 1, unless an edit came in between."""
    features = load(tmp_path)
    by_letter, by_name = served.prompt(PATH, sites="S"), served.prompt(PATH, sites=[HOOK])
    assert torch.equal(by_letter.activations[HOOK], by_name.activations[HOOK])
    assert torch.equal(features.of(by_letter).dense(), features.of(by_name).dense())
    (edited,) = by_letter.fork(edits=[Edit("blocks.1.hook_in", "zero", positions=2)])
    for branch in (edited, served.prompt(PATH, sites="C")):
        with pytest.raises(UnknownSite, match=r"blocks.0.hook_out was not captured.*sites=\['blocks.0.hook_resid_post'\]"):
            features.of(branch)
    with pytest.raises(BadRequest, match="Nothing was captured"):
        features.of(served.prompt(PATH))


def test_sites_of_another_model(tmp_path: Path, served: Engine) -> None:
    cfg = config("standard")
    cfg["metadata"]["hook_name"] = "blocks.0.ln2.hook_missing"
    (write(tmp_path, "standard") / "cfg.json").write_text(json.dumps(cfg))
    with pytest.raises(UnknownSite, match=r"blocks.0.ln2.hook_missing"):
        SparseFeatures.load(tmp_path).of(served.prompt(PATH, sites="S"))


# ---- encode ----------------------------------------------------------------------------------------------------------
# Features are those of the formula, and a row's features are the same bits in any company and on any number of threads.


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
def test_encode_and_decode_are_portable(kind: str, tmp_path: Path) -> None:
    """The bits of the definition, as on every machine. Negative control: the sums of a library differ."""
    features, x = SparseFeatures.load(write(tmp_path, kind)), rows()
    found, w = features.encode(x), features.weights
    pre = definition.product((x - w.b_dec).numpy(), w.W_enc.numpy()) + w.b_enc.numpy()
    lengths = np.sqrt(np.add.accumulate(w.W_dec.double().numpy() ** 2, axis=1)[:, -1]).astype(np.float32)
    pre, decoder = (pre * lengths, w.W_dec.numpy() / lengths[:, None]) if "rescaled" in kind else (pre, w.W_dec.numpy())
    rows_of_entries, indices = found.rows_of_entries.numpy(), found.indices.numpy()
    assert np.array_equal(pre[rows_of_entries, indices], found.values.numpy())
    back = [
        definition.product(value[None].numpy(), decoder[index.numpy()])[0] for index, value in map(found.row, range(len(x)))
    ]
    decoded = features.decode(found)
    assert torch.equal(decoded, torch.from_numpy(np.stack(back)) + w.b_dec)
    assert not torch.equal(decoded, found.dense() @ torch.from_numpy(decoder) + w.b_dec)


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
    monkeypatch.setattr("replaylens.features.features._NUMBERS", 20 * COUNT)
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


def test_a_feature_at_its_threshold_is_not_active(tmp_path: Path) -> None:
    """Of rows whose products are zero, so that the biases alone decide: at, just below and just above the threshold."""
    features = SparseFeatures.load(write(tmp_path, "jumprelu"))
    w = features.weights
    w.b_enc.copy_(w.b_enc.abs() + 0.5)
    x = w.b_dec.expand(2, -1) if features.config.apply_b_dec_to_input else torch.zeros(2, WIDTH)
    for other, active in ((0.0, False), (math.inf, False), (-math.inf, True)):
        w.threshold.copy_(w.b_enc if other == 0.0 else torch.nextafter(w.b_enc, torch.full_like(w.b_enc, other)))  # type: ignore[union-attr]
        assert set(features.encode(x).counts.tolist()) == {len(features) if active else 0}


def test_a_row_with_one_of_several_features_is_edited(tmp_path: Path, served: Engine) -> None:
    features, root = load(tmp_path, "topk"), served.prompt(PATH, sites=[HOOK])
    found = features.of(root)
    active = found.dense() > 0
    pair = next(
        [i, j] for i in range(COUNT) for j in range(i) if (active[:, i] ^ active[:, j]).sum() > 0 and active[:, i].any()
    )
    (edit,) = features.edits(root, ablate=pair)
    assert edit.positions == active[:, pair].any(1).nonzero().flatten().tolist()
    (edited,) = root.fork(edits=[edit])
    assert not torch.equal(edited.activations[HOOK][edit.positions], root.activations[HOOK][edit.positions])


def test_tables_and_pictures_of_some_positions_name_these(tmp_path: Path, served: Engine) -> None:
    """Positions on the branch, not numbers of rows; the strongest features of each, with their activations."""
    features, branch = load(tmp_path, "topk"), served.prompt(PATH, sites=[HOOK], positions="all[2::4]")
    found = features.of(branch)
    lines = re.findall(r"<tr><td>(\d+)</td><td>([^<]*)</td><td>(\d+)</td><td>([^<]*)</td></tr>", found._repr_html_())
    words = [str(PATH[position]) for position in (2, 6, 10)]
    assert [(int(at), word.strip(), int(count)) for at, word, count, _ in lines] == [
        (position, word, int(count)) for position, word, count in zip((2, 6, 10), words, found.counts, strict=True)
    ]
    for i, (*_, entries) in enumerate(lines):
        own = sorted(zip(*(x.tolist() for x in found.row(i)), strict=True), key=lambda pair: -pair[1])[:5]
        assert entries == "  ".join(f"{feature}: {value:.3g}" for feature, value in own)
    frame, axis = found.frame(), found.plot().axes[0]
    assert set(zip(frame["row"], frame["position"], strict=True)) == {(0, 2), (1, 6), (2, 10)}
    strongest = found.strongest(20)
    assert np.array_equal(axis.images[0].get_array(), found.columns(strongest).T.numpy())
    assert [label.get_text() for label in axis.get_yticklabels()] == list(map(str, strongest))
    assert [label.get_text().strip() for label in axis.get_xticklabels()] == words


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


# ---- files -----------------------------------------------------------------------------------------------------------
# Files in SAELens' format: both layouts are read, and everything that is not supported is refused by name.


def test_both_layouts_are_the_same_features(tmp_path: Path) -> None:
    """Before SAELens 6, fields lie side by side, and topk is an activation."""
    new = SparseFeatures.load(write(tmp_path / "new", "topk"))
    old = {"d_in": WIDTH, "d_sae": COUNT, "hook_name": HOOK, "hook_layer": 0, "hook_head_index": None, "dtype": "float32"}
    old |= {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5}, "normalize_activations": False}
    old |= {"finetuning_scaling_factor": False, "model_from_pretrained_kwargs": {}}
    folder = write(tmp_path / "old", "topk")
    save_file({**tensors("topk"), "scaling_factor": torch.ones(COUNT)}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(old))
    assert SparseFeatures.load(folder).config == new.config and SparseFeatures.load(folder).digest == new.digest
    older = {"hook_point": old.pop("hook_name"), **old}
    (folder / "cfg.json").write_text(json.dumps(older))
    assert SparseFeatures.load(folder).digest == new.digest
    assert SparseFeatures.load(write(tmp_path / "k", "topk", k=4)).digest != new.digest  # negative control


CONFIGS: dict[str, tuple[str, dict[str, Any], type[EngineError], str]] = {
    "architecture": ("standard", {"architecture": "gated"}, UnsupportedModel, "architecture 'gated'.*standard, topk"),
    "skip": ("transcoder", {"architecture": "skip_transcoder"}, UnsupportedModel, "skip_transcoder"),
    "activation": ("standard", {"activation_fn": "tanh-relu"}, UnsupportedModel, "tanh-relu"),
    "activation of another": ("jumprelu", {"activation_fn": "topk"}, UnsupportedModel, "'topk' of the architecture 'jumprelu'"),
    "average": ("standard", {"normalize_activations": "expected_average_only_in"}, UnsupportedModel, "Fold the factor"),
    "norm": ("standard", {"normalize_activations": "constant_norm_rescale"}, UnsupportedModel, "constant_norm_rescale"),
    "layer norm": ("standard", {"normalize_activations": "layer_norm"}, UnsupportedModel, "layer_norm"),
    "reshape": ("standard", {"reshape_activations": "other"}, UnsupportedModel, "reshape_activations"),
    "head": ("standard", {"hook_head_index": 3}, UnsupportedModel, "hook_head_index 3"),
    "scaling": ("standard", {"finetuning_scaling_factor": True}, UnsupportedModel, "finetuning_scaling_factor"),
    "processed": (
        "standard",
        {"model_from_pretrained_kwargs": {"center_writing_weights": True}},
        UnsupportedModel,
        "processed weights .center_writing_weights",
    ),
    "no width": ("standard", {"d_sae": None}, BadConfig, "d_sae"),
    "width": ("standard", {"d_sae": 48.5}, BadConfig, "d_sae"),
    "no k": ("topk", {"k": None}, BadConfig, "k in"),
    "large k": ("topk", {"k": COUNT + 1}, BadConfig, "more than the 48 features"),
    "no flag": ("standard", {"apply_b_dec_to_input": "no"}, BadConfig, "apply_b_dec_to_input"),
    "bias of a transcoder": ("transcoder", {"apply_b_dec_to_input": True}, BadConfig, "belongs to another site"),
    "no hook": ("standard", {"metadata": {}}, BadConfig, "hook_name"),
    "metadata": ("standard", {"metadata": 3}, BadConfig, "metadata"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configs_that_are_refused(what: str, tmp_path: Path) -> None:
    kind, changes, error, text = CONFIGS[what]
    with pytest.raises(error, match=text):
        SparseFeatures.load(write(tmp_path, kind, **changes))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"cfg.json cannot be read"):
        SparseFeatures.load(tmp_path)
    folder = write(tmp_path, "standard")
    (folder / "cfg.json").write_text("{")
    with pytest.raises(BadConfig, match="not JSON"):
        SparseFeatures.load(folder)
    write(tmp_path, "standard")
    (folder / "sae_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(BadWeights, match="cannot be read"):
        SparseFeatures.load(folder)
    (folder / "sae_weights.safetensors").unlink()
    with pytest.raises(BadWeights, match="cannot be read"):
        SparseFeatures.load(folder)


TENSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("standard", {"b_enc": None}, "lacks the tensor b_enc"),
    "missing threshold": ("jumprelu", {"threshold": None}, "lacks the tensor threshold"),
    "unknown": ("standard", {"threshold": torch.zeros(COUNT)}, "does not use"),
    "shape": ("standard", {"W_enc": torch.zeros(COUNT, WIDTH)}, r"W_enc has shape \[48, 32\]; cfg.json says \[32, 48\]"),
    "NaN": ("standard", {"b_dec": torch.full((WIDTH,), float("nan"))}, "b_dec holds NaN"),
    "integers": ("standard", {"b_dec": torch.zeros(WIDTH, dtype=torch.int32)}, "int32"),
    "factor": ("standard", {"scaling_factor": torch.full((COUNT,), 2.0)}, "scaling_factor, which"),
    "no length": ("topk rescaled", {"W_dec": torch.zeros(COUNT, WIDTH)}, "a row of zeros"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_refused(what: str, tmp_path: Path) -> None:
    kind, changes, text = TENSORS[what]
    folder = write(tmp_path, kind)
    made = {name: value for name, value in {**tensors(kind), **changes}.items() if value is not None}
    save_file(made, folder / "sae_weights.safetensors")
    with pytest.raises(BadWeights, match=text):
        SparseFeatures.load(folder)


def test_features_of_another_model_are_refused(tmp_path: Path) -> None:
    """By site and by width. Negative control: the model's own features are accepted."""
    served = engine()
    own = SparseFeatures.load(write(tmp_path / "own", "standard"))
    assert own.require(served) is own
    with pytest.raises(UnknownSite, match=r"blocks.9.hook_resid_post.*Nearest"):
        SparseFeatures.load(write(tmp_path / "site", "standard", hook="blocks.9.hook_resid_post")).require(served)
    with pytest.raises(BadWeights, match="width 16 there and 32"):
        SparseFeatures.load(write(tmp_path / "width", "standard", d_in=16)).require(served)
    turned = config("transcoder")
    turned["metadata"] |= {"hook_name": "blocks.1.hook_mlp_out", "hook_name_out": "blocks.0.hook_mlp_out"}
    folder = write(tmp_path / "turned", "transcoder")
    (folder / "cfg.json").write_text(json.dumps(turned))
    with pytest.raises(BadConfig, match="is computed before"):
        SparseFeatures.load(folder).require(served)


def test_edits_of_some_captured_rows_are_at_their_positions(tmp_path: Path, served: Engine) -> None:
    """Rows of every fourth position from 2 on: the edit is there, not at the numbers of the rows, and is that of all rows."""
    features = load(tmp_path, "topk")
    some, whole = (served.prompt(PATH, sites=[HOOK], positions=where) for where in ("all[2::4]", "all"))
    rows = features.of(whole)
    feature = int(rows.row(6)[0][0])
    (edit,) = features.edits(some, ablate=[feature])
    active = [at for at in range(2, len(PATH), 4) if feature in rows.row(at)[0].tolist()]
    assert edit.positions == active and 6 in active and max(active) >= len(some.activations.positions())
    (same,) = features.edits(whole, ablate=[feature], positions=active)
    assert same.positions == active and torch.equal(same.value, edit.value)
    (single,) = features.edits(some, ablate=[feature], positions=6)
    assert single.positions == [6] and torch.equal(single.value[0], edit.value[active.index(6)])
