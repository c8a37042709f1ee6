"""`verify` finds every tampering and claims no mismatch if it cannot decide. `diff` names the first differing row."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens.engine.dump import verify as dump_verify
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import MISMATCH, OTHER, VERIFIED, diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest, UnfinishedDump
from replaylens.engine.model.decoder import Decoder
from replaylens.tasks import WordTokenizer
from tests.engine.dump.conftest import EXAMPLES
from tests.engine.dump.damage import edit_manifest, flip_bit, forge_digests, forge_index, forge_shard

Planned = Callable[..., DumpPlan]


def test_a_good_dump(engine: Engine, reference: Dump) -> None:
    before = len(engine.tree), len(engine.loop.lanes), len(engine.trace.events)
    whole = verify(reference.url, engine, sample="all")
    assert whole and (whole.status, whole.examples, whole.rows) == (VERIFIED, EXAMPLES, reference.manifest.rows)
    some = verify(reference.url, engine, sample=0.3)
    assert some and some.examples == 3 and 0 < some.rows < whole.rows
    assert verify(reference.url, engine, sample=0.0001).examples == 1, "at least one"
    after = len(engine.tree), len(engine.loop.lanes), len(engine.trace.events)
    assert after == before, "the engine is left as it was"


def test_the_sample_is_drawn_by_its_seed(engine: Engine, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [dump_verify._sampled(reference.manifest, 0.3, seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn))) > 1


@pytest.mark.parametrize("drafter", ["self", "tree", "model"])
def test_rejected_branches_are_checked_whoever_drafted(
    engine: Engine, model: Decoder, tokenizer: WordTokenizer, planned: Planned, tmp_path: Path, drafter: str
) -> None:
    """Drafts that cannot be reproduced (timed windows, or an engine without that drafter) are taken from the dump as paths."""
    write_dump(engine, planned(drafter=drafter, window=5, examples=4), tmp_path)
    other = Engine(model, tokenizer, tree_width=2)
    for judge in (engine, other):
        verdict = verify(tmp_path, judge, sample="all")
        assert verdict and verdict.rows == Dump.open(tmp_path).manifest.rows and not verdict.notes
    rejected = Dump.open(tmp_path).where(accepted=False, shard=0).index
    if len(rejected):
        row = int(rejected["row"].iloc[-1])
        forge_shard(tmp_path, 0, lambda tensors: tensors["blocks.1.attn.hook_out"].view(torch.int32)[row, 3].bitwise_xor_(1))
        forge_digests(tmp_path)
        found = verify(tmp_path, other, sample="all").difference
        assert found is not None and (found.what, found.layer) == ("blocks.1.attn.hook_out[3]", 1)
    elif drafter != "self":
        pytest.fail("the test needs rejected rows")


# ---- tampering ------------------------------------------------------------------------------------------------------


def test_one_flipped_bit(engine: Engine, copy: Path) -> None:
    flip_bit(copy / "shard-00001.safetensors")
    verdict = verify(copy, engine)
    assert verdict.status == MISMATCH and "shard-00001.safetensors was changed" in verdict.problems[0]
    assert verdict.examples == 0, "hashes come first"


def test_one_flipped_bit_in_the_index(engine: Engine, copy: Path) -> None:
    flip_bit(copy / "index.parquet", 300)
    verdict = verify(copy, engine)
    assert verdict.status == MISMATCH and "index.parquet was changed" in verdict.problems[0]


def test_a_missing_shard(engine: Engine, copy: Path) -> None:
    (copy / "shard-00002.safetensors").unlink()
    assert verify(copy, engine).problems == ("shard-00002.safetensors is missing",)


def test_a_cut_shard(engine: Engine, copy: Path) -> None:
    path = copy / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "bytes, not" in verify(copy, engine).problems[0]


def test_an_edited_manifest(engine: Engine, copy: Path) -> None:
    edit_manifest(copy, lambda raw: raw["plan"]["knobs"].update(p=0.25), sealed=False)
    with pytest.raises(BadDump, match="its seal is broken"):
        verify(copy, engine)


def test_an_edited_and_sealed_manifest(engine: Engine, copy: Path) -> None:
    """The manifest has other knobs than the run: its examples contradict the rows."""
    edit_manifest(copy, lambda raw: raw["plan"]["knobs"].update(seed=1))
    verdict = verify(copy, engine, sample="all")
    assert verdict.status == MISMATCH and verdict.difference is not None and verdict.difference.example == 0


def swap_rows(tensors: dict[str, torch.Tensor]) -> None:
    for x in tensors.values():
        x[[3, 4]] = x[[4, 3]]


def change_one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["blocks.0.mlp.hook_out"].view(torch.int32)[9, 1] ^= 1


FORGERIES: dict[str, tuple[Callable[[Path], object], str, int | None]] = {
    "a swapped row": (lambda f: forge_shard(f, 0, swap_rows), "blocks.0.hook_in", 3),
    "one bit": (lambda f: forge_shard(f, 0, change_one_bit), "blocks.0.mlp.hook_out[1]", 9),
    "a label": (lambda f: forge_index(f, "face", 8, "sideways"), "face", 8),
    "a log-probability": (lambda f: forge_index(f, "logprob", 2, -0.5), "logprob", 2),
    "a token": (lambda f: forge_index(f, "token", 4, 9), "token", 4),
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("careful", [False, True])
def test_forged_content(engine: Engine, copy: Path, name: str, careful: bool) -> None:
    """With corrected hashes the files look untouched, but digests differ. With corrected digests, the replay finds the row."""
    forge, what, row = FORGERIES[name]
    forge(copy)
    if not careful:
        verdict = verify(copy, engine, sample="all")
        assert verdict.status == MISMATCH and "digest in the manifest" in verdict.problems[0]
        return
    forge_digests(copy)
    verdict = verify(copy, engine, sample="all")
    found = verdict.difference
    assert verdict.status == MISMATCH and found is not None and found.what.startswith(what)
    assert (found.example, found.branch, found.position) == (0, 0, row), "the first row of the first example is position 0"


def test_a_forged_rejected_row_that_is_not_replayed(engine: Engine, copy: Path) -> None:
    """The sample includes another example of the shard but not the forged one: the shard's digest covers rejected rows too."""
    dump = Dump.open(copy)
    rejected = dump.where(accepted=False, shard=0).index
    row, example = int(rejected["row"].iloc[0]), int(rejected["example"].iloc[0])
    drawn = {seed: dump_verify._sampled(dump.manifest, 0.01, seed)[0] for seed in range(100)}
    seed = next(seed for seed, one in drawn.items() if dump.files.shard_of(one) == 0 and one != example)
    assert verify(copy, engine, sample=0.01, seed=seed), "the control"
    forge_shard(copy, 0, lambda tensors: tensors["blocks.1.attn.hook_out"].view(torch.int32)[row, 3].bitwise_xor_(1))
    verdict = verify(copy, engine, sample=0.01, seed=seed)
    assert verdict.status == MISMATCH and "digest in the manifest" in verdict.problems[0]


def test_no_dump_is_no_mismatch(engine: Engine, copy: Path, tmp_path: Path) -> None:
    """A missing folder, an empty one, one without a manifest and an unfinished dump leave nothing to verify."""
    (tmp_path / "empty").mkdir()
    (copy / "manifest.json").unlink()
    for path in (tmp_path / "empty", copy):
        with pytest.raises(BadDump, match=r"not a dump: it has no manifest\.json"):
            verify(path, engine)
    with pytest.raises(BadDump, match="nowhere does not exist"):
        verify(tmp_path / "nowhere", engine)
    (copy / "plan.json").write_text("{}")
    with pytest.raises(UnfinishedDump, match="Resume the dump"):
        verify(copy, engine)


def test_a_manifest_that_is_cut(engine: Engine, copy: Path) -> None:
    """Nothing is left to compare with: it is refused, as by everything that opens a dump."""
    whole = (copy / "manifest.json").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        (copy / "manifest.json").write_bytes(damaged)
        with pytest.raises(BadDump, match="is not JSON"):
            verify(copy, engine)


def test_an_extra_row(engine: Engine, copy: Path) -> None:
    edit_manifest(copy, lambda raw: raw["shards"][0].update(rows=raw["shards"][0]["rows"] + 1))
    with pytest.raises(BadDump, match="is invalid"):
        verify(copy, engine)


# ---- other fingerprints ---------------------------------------------------------------------------------------------


def test_weights_that_differ_by_one_bit(model: Decoder, tokenizer: WordTokenizer, reference: Dump) -> None:
    other = Decoder(model.config).requires_grad_(False)
    other.load_state_dict(model.state_dict())
    other.blocks[1].mlp.down.weight.view(-1).view(torch.int32)[11] ^= 1
    verdict = verify(reference.url, Engine(other, tokenizer), sample="all")
    assert verdict.status == OTHER and not verdict and verdict.problems[1].startswith("weights:")


def test_another_torch_version(engine: Engine, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mismatch is claimed: equal bits are not promised across versions."""
    monkeypatch.setattr(engine, "fingerprint", replace(engine.fingerprint, torch="2.99.0"))
    verdict = verify(reference.url, engine, sample="all")
    assert verdict.status == OTHER and verdict.problems[1] == f"torch: 2.99.0 here, {torch.__version__} there"
    assert verdict.difference is None and "mismatch" not in str(verdict)


def test_files_are_checked_under_any_fingerprint(engine: Engine, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_bit(copy / "shard-00001.safetensors")
    monkeypatch.setattr(engine, "fingerprint", replace(engine.fingerprint, torch="2.99.0"))
    assert verify(copy, engine).status == MISMATCH


@pytest.mark.parametrize("sample", [0, -1, 1.5, "some"])
def test_impossible_samples(engine: Engine, reference: Dump, sample: Any) -> None:
    with pytest.raises(BadRequest, match="sample"):
        verify(reference.url, engine, sample=sample)


def test_custom_positions_need_their_function(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    def every_third(path: Any) -> list[int]:
        return list(range(0, len(path.tokens), 3))

    write_dump(engine, planned(positions=every_third, examples=4), tmp_path)
    with pytest.raises(BadRequest, match="every_third"):
        verify(tmp_path, engine)
    assert verify(tmp_path, engine, sample="all", selector=every_third)


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_diff_of_equal_dumps(engine: Engine, planned: Planned, reference: Dump, copy: Path, tmp_path: Path) -> None:
    """Dumps with equal content are equal, whatever their shard size. Differences between plans are remarks."""
    assert diff(reference, copy) and diff(reference, copy).remarks == ()
    recut = write_dump(engine, planned(examples_per_shard=3), tmp_path / "recut")
    assert recut is not None
    found = diff(reference, recut)
    assert found and found.remarks == ("plan: examples_per_shard: 4 here, 3 there",)


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "index.parquet"])
def test_diff_of_a_damaged_dump(reference: Dump, copy: Path, name: str) -> None:
    """The manifest of a damaged dump still has the original digests: these alone do not make it equal."""
    flip_bit(copy / name)
    for pair in ((reference, copy), (copy, reference), (copy, copy)):
        with pytest.raises(BadDump, match=f"copy is damaged: {name} was changed"):
            diff(*pair)


def test_a_damaged_index_is_not_read(copy: Path) -> None:
    flip_bit(copy / "index.parquet", 200)
    with pytest.raises(BadDump, match="its SHA-256 differs"):
        Dump.open(copy).matrix("S", 0)
    with pytest.raises(BadDump, match="its SHA-256 differs"):
        _ = Dump.open(copy).index


def test_diff_across_fingerprints(reference: Dump, copy: Path) -> None:
    """The report names the differing fingerprints, and still finds the first differing row."""
    edit_manifest(copy, lambda raw: raw["fingerprint"].update(torch="2.99.0"))
    found = diff(reference, copy)
    assert found and found.remarks == (f"fingerprint: torch: {torch.__version__} here, 2.99.0 there",)
    forge_index(copy, "face", 8, "sideways")
    forge_digests(copy)
    assert diff(reference, copy).difference is not None and diff(reference, copy).remarks == found.remarks


def test_diff_names_row_site_and_layer(reference: Dump, copy: Path) -> None:
    forge_shard(copy, 1, lambda tensors: tensors["blocks.1.mlp.hook_out"].view(torch.int32)[6, 2].bitwise_xor_(1))
    forge_digests(copy)
    found = diff(reference.url, copy).difference
    assert found is not None and (found.what, found.layer) == ("blocks.1.mlp.hook_out[2]", 1)
    line = reference.where(shard=1, row=6).index.iloc[0]
    assert (found.example, found.branch, found.position) == (line["example"], line["branch"], line["position"])


def test_diff_in_z_names_the_layer(reference: Dump, copy: Path) -> None:
    forge_shard(copy, 0, lambda tensors: tensors["Z.top_logprobs"].view(torch.int32)[2, 1, 4].bitwise_xor_(1))
    forge_digests(copy)
    found = diff(reference, copy).difference
    assert found is not None and (found.what, found.layer) == ("Z.top_logprobs[1, 4]", 1)


def test_diff_of_accepted_rows(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Dumps of two drafters differ only in rejected rows."""
    other = write_dump(engine, planned(drafter="tree"), tmp_path)
    assert other is not None
    assert not diff(reference, other) and diff(reference, other, accepted=True)


def test_diff_of_other_examples_and_sites(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    fewer = write_dump(engine, planned(examples=7), tmp_path / "fewer")
    assert fewer is not None
    found = diff(reference, fewer).difference
    assert found is not None and (found.example, found.here, found.there) == (7, "present", "missing")
    bare = write_dump(engine, planned(sites="ST"), tmp_path / "bare")
    assert bare is not None
    found = diff(reference, bare).difference
    assert found is not None and found.what == "sites" and "blocks.0.mlp.hook_out" in found.here
