"""A dump that was written when schema 1 was new: it opens, its hashes and digests hold, for ever."""

import shutil
from pathlib import Path

import pytest

from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import MISMATCH, OTHER, VERIFIED, diff, verify
from replaylens.engine.engine import Engine
from tests.engine.dump.damage import flip_bit

OLD = Path(__file__).parent / "data" / "schema-1"
DIGEST = "5c21a05a9c3a2a755d0f2e218c8d7e63a996367ded44ec34fb23eb7fe66051e9"
ACCEPTED = "c5dd25a54d20492516ced4f5138905fb53205e36d66d39a7115495ffb6c32ab3"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, so that nothing can change the committed files."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_it_opens_with_its_digests(old: Path) -> None:
    dump = Dump.open(old)
    assert (dump.digest, dump.accepted_digest) == (DIGEST, ACCEPTED)
    assert not dump.files.problems()
    for number, entry in enumerate(dump.manifest.shards):
        assert dump.files.content(number).digests() == entry.digests
    assert len(dump) == 87 and dump.manifest.accepted_rows == 75 and dump.manifest.plan.probabilities
    assert dump.index["logprob"].notna().any() and dump.index["entropy"].notna().all()


def test_it_is_verified_or_of_another_fingerprint(old: Path, engine: Engine) -> None:
    """Its model is the one of these tests. On a machine like the one it was made on, every bit is computed again."""
    found = verify(old, engine, sample="all")
    same = not engine.fingerprint.differences(Dump.open(old).manifest.fingerprint)
    assert found.status == (VERIFIED if same else OTHER), str(found)
    assert found.rows == (87 if same else 0)


def test_damage_is_seen(old: Path, engine: Engine) -> None:
    flip_bit(old / "shard-00000.safetensors")
    assert Dump.open(old, check_files=False).files.problems()
    assert verify(old, engine, sample="all").status == MISMATCH


def test_it_can_be_compared(old: Path) -> None:
    assert diff(old, OLD)
