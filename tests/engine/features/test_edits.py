"""Edits of features: what a hook function would do, but certified, and the same in any company."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, UnknownSite
from replaylens.engine.features.features import SparseFeatures
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.engine.features.tiny import HOOK, config, write
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
    with pytest.raises(BadEdit, match="Position 20 has no captured row"):
        features.edits(root, ablate=1, positions=20)
    with pytest.raises(BadEdit, match="selects none"):
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
