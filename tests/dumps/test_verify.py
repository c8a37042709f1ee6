"""`verify` finds every tampering and claims no mismatch if it cannot decide. `diff` names the first differing row."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from replaylens import tasks
from replaylens.dumps import verify as dump_verify
from replaylens.dumps.content import Content, Difference, combine, first_difference
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.manifest import SiteEntry
from replaylens.dumps.plan import DumpPlan, PlanRecord
from replaylens.dumps.reader import Dump
from replaylens.dumps.rows import assemble
from replaylens.dumps.verify import (
    MISMATCH,
    OTHER,
    VERIFIED,
    Comparison,
    Verification,
    diff,
    labels_differ,
    sites_differ,
    verify,
)
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest, NotCertified, UnfinishedDump
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.records import BEFORE_PORTABLE
from replaylens.engine.request.sampling import Sampling
from replaylens.replay.replayer import Result
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.devices import swept
from tests.dumps.conftest import EXAMPLES, NEW, PER_SHARD, written
from tests.dumps.damage import edit_manifest, flip_bit, forge_digests, forge_index, forge_shard

Planned = Callable[..., DumpPlan]


def test_a_good_dump(engine: Engine, reference: Dump) -> None:
    before = len(engine.tree), len(engine.loop.lanes), len(engine.trace.events)
    whole = verify(reference.url, engine, sample="all")
    assert whole and (whole.status, whole.examples, whole.rows) == (VERIFIED, EXAMPLES, reference.manifest.rows)
    some = verify(reference.url, engine, sample=0.4)
    assert some and some.examples == 3 and 0 < some.rows < whole.rows
    assert verify(reference.url, engine, sample=0.0001).examples == 1, "at least one"
    after = len(engine.tree), len(engine.loop.lanes), len(engine.trace.events)
    assert after == before, "the engine is left as it was"


def test_the_sample_is_drawn_by_its_seed(engine: Engine, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [dump_verify._sampled(reference.manifest, 0.3, seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn))) > 1


@pytest.mark.slow
def test_a_sample_of_rows(engine: Engine, reference: Dump) -> None:
    """As many rows as asked for, of many examples, accepted and rejected ones; the verdict says how many of how many."""
    some, total = verify(reference.url, engine, sample=30), reference.manifest.rows
    assert some and (some.rows, some.of_rows, some.of_examples) == (30, total, EXAMPLES) and some.examples > 2
    said, *told = str(some).splitlines()
    assert said == f"verified: {some.examples} of {EXAMPLES} examples replayed, 30 of {total} rows compared"
    assert f"taken on trust: {total - 30} of {total} rows: only their hashes were checked" in told
    assert verify(reference.url, engine, sample=np.int64(1)).rows == 1
    every = verify(reference.url, engine, sample=total + 1)
    assert (every.rows, every.examples) == (total, EXAMPLES), "no more than there are"


def test_what_no_row_shows_is_said_to_be_trusted(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, tmp_path: Path
) -> None:
    """A drafter that was edited, and sealed again: no row contradicts it, so the verdict says that it is the dump's word."""
    whole = verify(reference.url, engine)
    given = {field.name for field in fields(DumpPlan)} - {"selector", "encoders", "examples_per_shard", "end"}
    assert whole and set(whole.reproduced) == given and {"drafter", "window", "rejected"} <= given
    assert not any("drafter" in line for line in whole.trusted), "control: the drafts are those of this drafter"
    edit_manifest(copy, lambda raw: raw["plan"].update(drafter="unheard-of", window=77))
    edited = verify(copy, engine)
    assert edited and not {"drafter", "drafter_settings", "window", "rejected"} & set(edited.reproduced)
    assert set(edited.reproduced) == given - {"drafter", "drafter_settings", "window", "rejected"}
    said = r"taken on trust: drafter, drafter_settings, window, rejected of the plan.*unheard-of was not run: .* stored tokens"
    assert re.search(said, str(edited))
    plain = written(engine, planned(rejected=False, examples=2), tmp_path / "plain")
    edit_manifest(tmp_path / "plain", lambda raw: raw["plan"].update(drafter="ngram"))
    silent = verify(plain.url, engine)
    assert silent and "drafter" not in silent.reproduced and "accepted rows do not depend on them" in str(silent)
    assert any(line.startswith("device, replaylens, torch, triton of the fingerprint") for line in silent.trusted)
    for verdict in (whole, edited, silent):
        assert told_parts(str(verdict)) == sorted(field.name for field in fields(PlanRecord)), verdict


def told_parts(verdict: str) -> list[str]:
    """The parts of a plan that a verdict names, under either word."""
    lines = re.findall(r"^(?:reproduced: |taken on trust: (?=.* of the plan))(.*)$", verdict, re.MULTILINE)
    return sorted(name for line in lines for name in line.split(" of the plan")[0].split(", "))


def drawn_rows(dump: Dump, count: int, seed: int) -> set[tuple[int, int, int]]:
    drawn = dump_verify._drawn(dump.files, count, seed, False)
    return {(*key, position) for key, positions in drawn.items() for position in positions}


def test_rows_are_drawn_by_digest_and_seed(reference: Dump, copy: Path) -> None:
    drawn = [drawn_rows(reference, 6, seed) for seed in (0, 0, *range(1, 20))]
    assert drawn[0] == drawn[1] and len(set(map(frozenset, drawn))) > 1 and {len(some) for some in drawn} == {6}
    assert {branch > 0 for some in drawn for _, branch, _ in some} == {False, True}, "rejected rows, too"
    edit_manifest(copy, lambda raw: raw["fingerprint"].update(torch="2.99"))
    assert drawn_rows(Dump.open(copy), 6, 0) == drawn[0], "the same rows on every machine"
    forge_shard(copy, 0, change_one_bit)
    forge_digests(copy)
    assert any(drawn_rows(Dump.open(copy), 6, seed) != drawn_rows(reference, 6, seed) for seed in range(3))


def test_a_flipped_bit_in_a_sampled_row(engine: Engine, copy: Path) -> None:
    """Found where the row is sampled. Where it is not, no replay finds it if all digests are forged; else the hashes do."""
    flip_bit(copy / "shard-00000.safetensors")
    assert "shard-00000.safetensors was changed" in verify(copy, engine, sample=1).problems[0]
    flip_bit(copy / "shard-00000.safetensors")
    assert verify(copy, engine, sample=1), "the control"
    forge_shard(copy, 0, change_one_bit)
    assert {verify(copy, engine, sample=3, seed=seed).status for seed in range(4)} >= {MISMATCH}, "digests of replayed shards"
    forge_digests(copy)
    dump = Dump.open(copy)
    line = dump.where(shard=0, row=9).index.iloc[0]
    place = int(line["example"]), int(line["branch"]), int(line["position"])
    has = {place in drawn_rows(dump, 40, seed): seed for seed in range(40)}
    assert verify(copy, engine, sample=40, seed=has[False])
    found = verify(copy, engine, sample=40, seed=has[True])
    assert found.status == MISMATCH and found.difference is not None and found.difference.what == "blocks.0.mlp.hook_out[1]"
    assert (found.difference.example, found.difference.branch, found.difference.position) == place


@pytest.mark.parametrize("drafter", swept(["self", "tree", "model"], "tree"))
def test_rejected_branches_are_checked_whoever_drafted(
    engine: Engine, model: Decoder, tokenizer: WordTokenizer, planned: Planned, tmp_path: Path, drafter: str
) -> None:
    """Drafts that cannot be reproduced (timed windows, or an engine without that drafter) are taken from the dump as paths."""
    write_dump(engine, planned(drafter=drafter, window=5, examples=4), tmp_path)
    other = Engine(model, tokenizer, tree_width=2)
    for judge in (engine, other):
        verdict = verify(tmp_path, judge, sample="all")
        assert verdict and verdict.rows == Dump.open(tmp_path).manifest.rows and not verdict.notes
    assert verify(tmp_path, other, sample=20).rows == 20
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


CARELESS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda f: flip_bit(f / "shard-00001.safetensors"), "shard-00001.safetensors was changed"),
    "a flipped bit in the index": (lambda f: flip_bit(f / "index.parquet", 300), "index.parquet was changed"),
    "a missing shard": (lambda f: (f / "shard-00002.safetensors").unlink(), "shard-00002.safetensors is missing"),
    "a cut shard": (lambda f: os.truncate(f / "shard-00000.safetensors", 999), "has 999 bytes, not"),
}


@pytest.mark.parametrize("damage", CARELESS)
def test_damaged_files(engine: Engine, copy: Path, damage: str) -> None:
    """Hashes come first: nothing is replayed."""
    change, said = CARELESS[damage]
    change(copy)
    verdict = verify(copy, engine)
    assert verdict.status == MISMATCH and said in verdict.problems[0] and verdict.examples == 0


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


# ---- other fingerprints ---------------------------------------------------------------------------------------------


def test_weights_that_differ_by_one_bit(model: Decoder, tokenizer: WordTokenizer, reference: Dump) -> None:
    other = Decoder(model.config).requires_grad_(False)
    other.load_state_dict(model.state_dict())
    other.blocks[1].mlp.down.weight.view(-1).view(torch.int32)[11] ^= 1
    verdict = verify(reference.url, Engine(other, tokenizer), sample="all")
    assert verdict.status == OTHER and not verdict and verdict.problems[1].startswith("weights:")


def test_another_machine(engine: Engine, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable arithmetic has the same bits on every machine and with every version of torch."""
    monkeypatch.setattr(engine, "fingerprint", replace(engine.fingerprint, torch="2.99.0", device="another processor"))
    assert verify(reference.url, engine, sample="all").status == VERIFIED


def test_a_dump_of_earlier_arithmetic(engine: Engine, copy: Path) -> None:
    """No mismatch is claimed: equal bits are not promised. The verdict says who could replay it."""
    edit_manifest(copy, lambda raw: raw["fingerprint"].update(canonical="1:tile16:block64", device="a Xeon", torch="2.11"))
    verdict = verify(copy, engine, sample="all")
    assert verdict.status == OTHER and "canonical: portable-1 here, 1:tile16:block64 there" in verdict.problems
    assert f"0.1.0 up to commit {BEFORE_PORTABLE}, before portable-1, on a Xeon with torch 2.11 could" in verdict.problems[-1]
    assert verdict.difference is None and "mismatch" not in str(verdict)


def test_files_are_checked_under_any_fingerprint(engine: Engine, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_bit(copy / "shard-00001.safetensors")
    monkeypatch.setattr(engine, "fingerprint", replace(engine.fingerprint, torch="2.99.0"))
    assert verify(copy, engine).status == MISMATCH


@pytest.mark.parametrize("sample", [0, -1, 1.5, 200.0, "some", "200", True, None, float("nan"), [5], np.ones(2)])
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
    recut = written(engine, planned(examples_per_shard=4), tmp_path / "recut")
    found = diff(reference, recut)
    assert found and found.remarks == ("plan: examples_per_shard: 3 here, 4 there",)
    assert recut.digest != reference.digest and len(recut.manifest.shards) == 2, "the shard size is part of the digest"


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
    edit_manifest(copy, lambda raw: raw["fingerprint"].update(canonical="cuda3"))
    found = diff(reference, copy)
    assert found and "fingerprint: canonical: portable-1 here, cuda3 there" in found.remarks
    assert "\narithmetic: portable-1 here, cuda3 (float32 on " in str(found) and " and triton none) there\n" in str(found)
    assert "\narithmetic: portable-1 on both sides" in str(diff(reference, reference))
    assert diff(copy, reference).arithmetic == found.arithmetic[::-1]
    forge_index(copy, "face", 8, "sideways")
    forge_digests(copy)
    assert diff(reference, copy).difference is not None and diff(reference, copy).remarks == found.remarks


def test_diff_between_two_kinds_of_gpus(reference: Dump, copy: Path) -> None:
    """It says that bits of bfloat16 may differ there, and what to compare instead; not of one kind, nor in float32."""

    def made_on(device: str, canonical: str = "cuda3:block64:split512") -> Dump:
        dump = Dump.open(copy)
        fingerprint = replace(dump.manifest.fingerprint, device=device, canonical=canonical, dtype="bfloat16")
        dump.manifest = replace(dump.manifest, fingerprint=fingerprint)
        return dump

    found = diff(made_on("NVIDIA H200"), made_on("NVIDIA A100"))
    said = (
        "bits in bfloat16 hold on one kind of GPU, and these are of NVIDIA H200 here, NVIDIA A100 there; to compare what they "
    )
    assert f"\n{said}compute, make both in float32" in str(found)
    for other in (made_on("NVIDIA H200"), reference):
        assert "kind of GPU" not in str(diff(made_on("NVIDIA H200"), other))


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
    other = written(engine, planned(drafter="tree"), tmp_path)
    assert not diff(reference, other) and diff(reference, other, accepted=True)


def test_diff_of_other_examples_and_sites(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    fewer = written(engine, planned(examples=4), tmp_path / "fewer")
    found = diff(reference, fewer).difference
    assert found is not None and (found.example, found.here, found.there) == (4, "present", "missing")
    bare = written(engine, planned(sites="ST"), tmp_path / "bare")
    found = diff(reference, bare).difference
    assert found is not None and found.what == "sites" and "blocks.0.mlp.hook_out" in found.here


# ---- content ---------------------------------------------------------------------------------------------------------
# What the digest covers, what it does not, and where two contents differ.


@pytest.fixture
def content(reference: Dump) -> Content:
    return reference.files.content(0)


@pytest.mark.parametrize("kind", [pa.float32(), pa.int64(), pa.string(), pa.bool_()])
def test_a_missing_value_is_not_an_empty_one(kind: pa.DataType) -> None:
    empty = {pa.float32(): 0.0, pa.int64(): 0, pa.string(): "", pa.bool_(): False}[kind]
    keys = {"accepted": [True] * 2, "example": [0] * 2, "branch": [0] * 2, "position": [0, 1]}
    there, gone = (Content({}, pa.table({**keys, "label": pa.array([empty, value], kind)})) for value in (empty, None))
    assert there.digests() != gone.digests()
    found = first_difference(there, gone)
    assert found is not None and (found.what, found.position, found.here, found.there) == ("label", 1, str(empty), "None")


def test_minus_zero_is_not_zero() -> None:
    index = pa.table({"accepted": [True], "example": [0], "branch": [0], "position": [0]})
    plus, minus = (Content({"x": torch.tensor([[value]])}, index) for value in (0.0, -0.0))
    assert plus.digests() != minus.digests()
    found = first_difference(plus, minus)
    assert found is not None and (found.here, found.there) == ("0", "-0")


@pytest.mark.parametrize(
    "values",
    [
        ([0, None, 3], [0, 0, 3], [None, 0, 3]),
        ([False, None, True], [False, False, True], [None, False, True]),
        (["a", None, ""], ["a", "", ""], [None, "a", ""], ["a", "", None]),
        ([0.0, None, 1.5], [0.0, 0.0, 1.5], [None, 0.0, 1.5]),
    ],
    ids=["whole", "flag", "text", "number"],
)
def test_a_missing_value_is_none_that_is_there(values: tuple[list[object], ...]) -> None:
    """A missing value differs from zero and from an empty text, and its position matters."""
    keys = {"accepted": [True] * 3, "example": [0] * 3, "branch": [0] * 3, "position": [0, 1, 2]}
    contents = [Content({}, pa.table({**keys, "label": pa.array(column)})) for column in values]
    assert len({content.digests() for content in contents}) == len(contents)
    for other in contents[1:]:
        found = first_difference(contents[0], other)
        assert found is not None and found.what == "label"


def test_nan_equals_itself(content: Content) -> None:
    assert content.tensors["Z.emitted"].isnan().any()
    assert first_difference(content, Content({k: x.clone() for k, x in content.tensors.items()}, content.index)) is None


def test_order_counts(content: Content) -> None:
    swapped = content.select(np.array([1, 0, *range(2, len(content))]))
    assert swapped.digests() != content.digests()
    assert first_difference(content, swapped) is not None


def test_names_dtypes_and_shapes_count(content: Content) -> None:
    x = content.tensors["blocks.0.hook_in"]
    rest = {name: y for name, y in content.tensors.items() if name != "blocks.0.hook_in"}
    for changed in ({"renamed": x}, {"blocks.0.hook_in": x.view(torch.int32)}, {"blocks.0.hook_in": x.view(len(x), 2, -1)}):
        other = Content({**rest, **changed}, content.index)
        assert other.digests() != content.digests()
        assert first_difference(content, other) is not None


def test_a_column_without_values_is_of_no_kind() -> None:
    """Text in the same column of another shard must not change this shard's digest."""
    rest = {"accepted": [True, False], "example": [0, 0], "branch": [0, 1], "position": [0, 1]}
    digests = {
        Content({}, pa.table({**rest, "label": pa.array([None, None], kind)})).digests()
        for kind in (pa.null(), pa.string(), pa.int64(), pa.bool_())
    }
    assert len(digests) == 1
    assert Content({}, pa.table({**rest, "label": ["", None]})).digests() not in digests


def test_combined_digest_is_of_all_in_order() -> None:
    assert len({combine(["a", "b"]), combine(["b", "a"]), combine(["a"]), combine(["ab"])}) == 4


# ---- digest ----------------------------------------------------------------------------------------------------------
# One plan gives one digest, whatever the batch, the order of arrival, the drafter, the engine's history or the store.


@pytest.mark.parametrize("batch", [1, pytest.param(7, marks=pytest.mark.slow), 64])
def test_batch_changes_nothing(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, batch: int) -> None:
    """No byte of any file changes: shards are cut by example, not by arrival."""
    dump = written(engine, planned(), tmp_path / "d", batch=batch)
    assert (dump.digest, dump.accepted_digest) == (reference.digest, reference.accepted_digest)
    for name in reference.files.store.sizes():
        assert (tmp_path / "d" / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_arrival_order_changes_nothing(engine: Engine, coin: AnyTask, reference: Dump, tmp_path: Path) -> None:
    """A run whose examples arrive shuffled is saved as the same dump as one streamed in order."""
    examples = coin.examples(EXAMPLES)
    random.Random(5).shuffle(examples)
    run = engine.replay(examples, sites="STCZ", drafter="lens", max_new=NEW, batch=3)
    assert isinstance(run, Run)
    assert run.save(tmp_path / "d", examples_per_shard=PER_SHARD).digest == reference.digest


def test_engine_and_its_past_change_nothing(
    model: Decoder, tokenizer: WordTokenizer, planned: Planned, reference: Dump, tmp_path: Path
) -> None:
    """Other page sizes, a cache so small that requests are preempted, and live branches from earlier work."""
    engine = Engine(model, tokenizer, page_size=4, cache_tokens=160, max_rows=48, record=True)
    kept = engine.prompt("A coin's state is heads. Alice flips.", sites="S").fork(2)
    kept[0].generate(9, drafter="tree")
    dump = written(engine, planned(engine=engine), tmp_path / "d", batch=5)
    assert dump.digest == reference.digest
    assert len(kept[0].tokens) == len(kept[1].tokens) + 9, "earlier branches are not touched"
    ours = {event["branch"] for event in engine.trace.events}
    assert ours and ours <= {*engine.tree.roots(), *(branch.id for branch in kept)}, "nor is their trace"


@pytest.mark.parametrize(
    "drafter", ["self", "tree", "model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "forced"))]
)
def test_accepted_rows_do_not_depend_on_the_drafter(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, drafter: str
) -> None:
    """Rejected branches depend on the drafter. Accepted rows, their labels and probabilities do not."""
    dump = written(engine, planned(drafter=drafter, window=5), tmp_path / "d")
    assert dump.accepted_digest == reference.accepted_digest
    assert dump.manifest.accepted_rows == reference.manifest.accepted_rows
    if drafter in ("tree", "model"):
        assert dump.digest != reference.digest, "another drafter was rejected otherwise"
    again = written(engine, planned(drafter=drafter, window=5), tmp_path / "again", batch=2)
    if drafter != "self":
        assert again.digest == dump.digest, "a reproducible drafter's rejected branches come out again"


def test_without_rejected_branches(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    dump = written(engine, planned(rejected=False), tmp_path / "d")
    assert dump.accepted_digest == reference.accepted_digest
    assert dump.manifest.rows == dump.manifest.accepted_rows == reference.manifest.accepted_rows


def test_sampled_paths(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Seeded draws are as reproducible as greedy decoding. Another seed gives another dump."""
    hot = {"sampling": Sampling(temperature=1.5, seed=4), "sites": "S"}
    one = written(engine, planned(**hot), tmp_path / "a", batch=1)
    two = written(engine, planned(**hot), tmp_path / "b", batch=9)
    other = written(engine, planned(sampling=Sampling(temperature=1.5, seed=5), sites="S"), tmp_path / "c")
    assert one.digest == two.digest != other.digest


def test_memory_store(engine: Engine, planned: Planned, reference: Dump) -> None:
    """Any fsspec store gives the same digest and the same bytes, and can be read."""
    dump = written(engine, planned(), "memory://dumps/digest")
    assert dump.digest == reference.digest
    assert dump.files.store.sizes() == reference.files.store.sizes()
    ours, theirs = (d.where(accepted=True).matrix("S", 1, label="face") for d in (dump, reference))
    assert (ours.X == theirs.X).all() and (ours.y == theirs.y).all()


def test_indices_need_not_be_a_range(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Any set of examples in any order. Each example's rows equal those in a dump of all examples."""
    dump = written(engine, planned(examples=[6, 1, 5, 2]), tmp_path / "d")
    assert list(dump.manifest.plan.examples) == [1, 2, 5, 6]
    for site in reference.sites:
        assert torch.equal(dump.to_torch(site).nan_to_num(), reference.where(example={1, 2, 5, 6}).to_torch(site).nan_to_num())


@pytest.mark.parametrize("name", swept(tasks.names(), "coin", "hops"))
def test_every_task(tmp_path: Path, name: str) -> None:
    """The labels and knobs of each task survive a round trip through a dump."""
    from tests.toy_model import random_model

    task = tasks.get(name)()
    words = WordTokenizer(task.vocabulary())
    engine = Engine(random_model(vocab_size=words.vocab_size, max_positions=512), words)
    plan = make_plan(engine, task, 3, sites="S", max_new=3, drafter="ngram")
    dump = written(engine, plan, tmp_path / "d")
    assert DumpPlan.from_json(plan.to_json()) == plan and dump.manifest.plan == plan
    assert dump.manifest.plan.make_task() == task
    assert set(dump.labels) == set(task.label_names)
    index = dump.where(token_state="prompt", example=1).index
    expected = task.example(1).read("").labels_at(words.encode_with_offsets(task.example(1).prompt)[1])
    for label in set(task.label_names) - {"next_action"}:  # the label looks ahead, into the model's output
        found = [None if missing else value for value, missing in zip(index[label], index[label].isna(), strict=True)]
        assert found == expected[label], label


def test_fast_path_is_refused(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    """Negative control: rows from non-canonical arithmetic never enter a dump."""
    run = engine.replay(coin.examples(2), sites="S", max_new=3, deterministic=False)
    assert isinstance(run, Run) and not any(result.certified for result in run)
    with pytest.raises(NotCertified, match="fast path"):
        run.save(tmp_path / "d")
    assert not list((tmp_path / "d").glob("shard-*"))


def test_runs_that_cannot_be_saved(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    bare = engine.replay(coin.examples(2), max_new=2)
    assert isinstance(bare, Run)
    with pytest.raises(BadRequest, match="Nothing was captured"):
        bare.save(tmp_path / "a")
    mixed = engine.replay([*coin.examples(1), *coin.with_knobs(seed=3).examples(1)], sites="S", max_new=2)
    assert isinstance(mixed, Run)
    with pytest.raises(BadRequest, match="one task"):
        mixed.save(tmp_path / "b")


def test_run_that_kept_only_z(engine: Engine, planned: Planned, coin: AnyTask, tmp_path: Path) -> None:
    """What the index needs and the run lacks is recomputed, to the same bits."""
    run = engine.replay(coin.examples(4), sites="Z", drafter="lens", max_new=NEW)
    assert isinstance(run, Run)
    saved = run.save(tmp_path / "a")
    assert saved.digest == written(engine, planned(sites="Z", examples=4, examples_per_shard=128), tmp_path / "b").digest


@pytest.mark.slow
def test_coin_plain(tmp_path: Path) -> None:
    """The embedded model: the same digest for two batch sizes, and for the accepted rows of every drafter."""
    engine = Engine.load("coin-plain")
    task = tasks.get("coin")()
    dumps = {
        drafter: written(engine, make_plan(engine, task, 3, drafter=drafter, examples_per_shard=2), tmp_path / drafter)
        for drafter in engine.loop.drafters
    }
    assert len({dump.accepted_digest for dump in dumps.values()}) == 1
    again = written(engine, make_plan(engine, task, 3, drafter="lens", examples_per_shard=2), tmp_path / "again", batch=1)
    assert again.digest == dumps["lens"].digest


# ---- order -----------------------------------------------------------------------------------------------------------
# The order of branches in a dump follows from their tokens, not from the order in which the engine found them.

OPTIONS: dict[str, Any] = dict(sites="SZ", drafter="tree", window=4, max_new=NEW, rejected=True)


@pytest.fixture(scope="module")
def run(engine: Engine, coin: AnyTask) -> Run:
    """A run with the tree drafter: several siblings are rejected at one position."""
    return engine.replay(coin.examples(6), **OPTIONS)


def crowded(run: Run) -> Result:
    """A result with at least three rejected branches, two of which fork at the same position."""
    for result in run:
        forks = Counter(path.fork_position for path in result.rejected)
        if len(result.rejected) >= 3 and max(forks.values(), default=0) >= 2:
            return result
    raise AssertionError("no example has siblings that were rejected together")


def test_the_order_of_arrival_does_not_show(engine: Engine, coin: AnyTask, run: Run) -> None:
    """Any order of the rejected branches, and a branch reported twice, give the same content."""
    result = crowded(run)
    plan = make_plan(engine, coin, [result.example.index], **OPTIONS)
    digests = {
        assemble(engine, plan, [replace(result, rejected=list(order))]).digests()
        for order in [*permutations(result.rejected[:4]), [*result.rejected[:4], result.rejected[0]]]
    }
    assert len(digests) == 1
    fewer = assemble(engine, plan, [replace(result, rejected=result.rejected[1:4])]).digests()
    assert fewer not in digests and fewer[1] in {accepted for _, accepted in digests}, "the control: content is told apart"


def test_branches_are_numbered_by_fork_and_tokens(engine: Engine, coin: AnyTask, run: Run) -> None:
    result = crowded(run)
    plan = make_plan(engine, coin, [result.example.index], **OPTIONS)
    frame = assemble(engine, plan, [replace(result, rejected=result.rejected[::-1])]).index.to_pandas()
    numbered = [
        (int(rows["fork_position"].iloc[0]), tuple(rows["token"]))
        for branch, rows in frame.groupby("branch", sort=True)
        if branch > 0
    ]
    assert numbered == sorted({(path.fork_position, tuple(path.tokens[path.fork_position :])) for path in result.rejected})


class Numbers:
    """A tokenizer from elsewhere, whose end of a text is a setting."""

    def __init__(self, end: int) -> None:
        self.eos_token_id = end

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def test_another_end_of_texts_is_named(engine: Engine, tmp_path: Path) -> None:
    """Versions of a tokenizer can end a generation elsewhere: same weights, other dumps. The plan says where it ended."""
    prompt, new = [1, 2, 3, 4], engine.prompt([1, 2, 3, 4]).generate(6, sampling=Sampling(ignore_eos=True)).generated
    never = next(i for i in range(engine.config.vocab_size) if i not in new)
    here, there = (Engine.load(engine.model, tokenizer=Numbers(end)) for end in (new[2], never))
    dumps = []
    for name, each in (("here", here), ("there", there)):
        made = write_dump(
            each, make_plan(each, each.texts([prompt]), 1, sites="S", drafter="ngram", max_new=6), tmp_path / name
        )
        assert made is not None
        dumps.append(made)
    assert dumps[0].manifest.plan.end == new[2] and dumps[0].manifest.digest != dumps[1].manifest.digest
    assert verify(tmp_path / "here", here).status == VERIFIED
    found = verify(tmp_path / "here", there)
    assert found.status == OTHER and f"end of a text: token {never} here, {new[2]} there" in found.problems
    assert f"plan: end: {new[2]} here, {never} there" in diff(tmp_path / "here", tmp_path / "there").remarks
    assert make_plan(engine, tasks.get("coin")(), 1).end is None, "our own tokenizer has one end"


def test_probabilities_do_not_depend_on_the_rows_that_are_kept(engine: Engine, tmp_path: Path) -> None:
    """As many rows are read for probabilities as there are: not all of them, and not in order."""

    def but_the_last(path: Any) -> range:
        return range(path.base, len(path.tokens) - (path.branch == 0))

    def read(name: str, per: int, **kept: Any) -> dict[tuple[int, ...], tuple[float, float]]:
        plan = make_plan(engine, tasks.get("coin")(), 3, sites="S", drafter="ngram", examples_per_shard=per, **kept)
        dump = written(engine, plan, tmp_path / name)
        frame = pd.concat([dump.files.lines(i, COLUMNS).to_pandas() for i in range(len(dump.manifest.shards))])
        return {tuple(row[:3]): tuple(row[3:]) for row in frame.fillna(9.0).itertuples(index=False)}

    truth = read("all", 3)
    for per in (1, 2, 3):
        found = read(f"some{per}", per, positions=but_the_last)
        assert len(found) < len(truth) and all(truth[key] == value for key, value in found.items())


COLUMNS = ["example", "branch", "position", "logprob", "entropy"]


def test_rows_that_are_not_sampled_have_the_cited_digest(engine: Engine, copy: Path, reference: Dump) -> None:
    """Changed shards with corrected hashes of files, and the digest that others cite: found by any sample, and by diff."""
    for number in range(1, len(reference.manifest.shards)):
        forge_shard(copy, number, change_one_bit)
    found = verify(copy, engine, sample=1)
    assert found.status == MISMATCH and "do not have the digest in the manifest" in str(found)
    assert not diff(copy, reference.url)


def test_a_sample_of_all_rows_is_all(engine: Engine, copy: Path, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn sample would not miss rows that the dump lacks, nor find those that its plan does not have."""
    monkeypatch.setattr(dump_verify, "_drawn", None)
    found = verify(copy, engine, sample=10**9)
    assert found and found.rows == reference.manifest.rows and found.examples == len(reference.manifest.plan.examples)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((3, 1, 7, "S", 2), "example 3, branch 1, position 7: S (layer 2): 1 here, 2 there"),
        ((0, 0, 0, "token", 0), "example 0, branch 0, position 0: token (layer 0): 1 here, 2 there"),
        ((None, None, None, "site S", None), "site S: 1 here, 2 there"),
        ((4, None, None, "rows", None), "example 4: rows: 1 here, 2 there"),
    ],
)
def test_a_difference_in_words(given: tuple[Any, ...], said: str) -> None:
    """Numbers that are 0 are named; what is not known is not."""
    found = Difference(*given, "1", "2")
    assert str(found) == said
    assert (
        str(Comparison(found, ("plan: n",), ("portable-1", "cuda-1")))
        == f"{said}\narithmetic: portable-1 here, cuda-1 there\nplan: n"
    )
    assert str(Comparison(None, (), ("portable-1",) * 2)) == "the same content\narithmetic: portable-1 on both sides"
    part = Verification(MISMATCH, ("a file",), found, 3, 20, ("a note",), 9, 21)
    assert str(part) == f"mismatch: 3 of 9 examples replayed, 20 of 21 rows compared\na file\n{said}\na note" and not part
    assert str(Verification(VERIFIED, (), None, 9, 21, (), 9, 21)) == "verified: 9 examples replayed, 21 rows compared"


def test_sites_and_labels_that_differ_are_named() -> None:
    """The first by name, whatever the order; `accepted` forgives labels that only rejected rows have."""
    one, other = SiteEntry("float32", (4,), 0, "S", ()), SiteEntry("float32", (5,), 0, "S", ())
    assert sites_differ({"b": one, "a": one}, {"a": one, "b": one}) is None
    assert str(sites_differ({"a": one, "b": one}, {"a": one})) == "site b: present here, missing there"
    assert str(sites_differ({"a": one}, {"a": one, "b": one})) == "site b: missing here, present there"
    assert str(sites_differ({"a": other, "b": one}, {"a": one})) == "site a, shape: [5] here, [4] there"
    types = {"face": "string", "step": "int64"}
    assert labels_differ(types, dict(reversed(types.items())), False) is None
    assert str(labels_differ(types, {"face": "string"}, True)) == "label step: int64 here, missing there"
    for accepted in (False, True):
        found = labels_differ(types, {**types, "face": "null"}, accepted)
        assert (found is None) is accepted and (accepted or str(found) == "label face: string here, null there")
