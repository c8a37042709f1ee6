"""Files written by earlier versions are read, and mean the same: written again, they are the same bytes."""

from pathlib import Path

from replaylens.engine.dump.manifest import Manifest, PlanFile
from replaylens.engine.dump.store import Store
from replaylens.engine.dump.writer import DumpWriter
from replaylens.engine.proof.trace import Trace

DUMP = Path(__file__).parent / "written"
PROOF = Path(__file__).parents[1] / "proof" / "written"
"""version 0.1.0, before files were read by a schema library; with edits, biases, stop strings and listed examples"""


def test_a_manifest() -> None:
    raw = (DUMP / "manifest.json").read_bytes()
    manifest = Manifest.from_bytes(raw, "here")
    assert manifest.to_bytes() == raw
    plan = manifest.plan
    assert plan.examples == (0, 2, 5) and plan.sampling.logit_bias == {4: 0.5} and plan.sampling.seed == 2**63 + 5
    assert len(plan.edits) == 2 and plan.lens is not None and plan.lens.targets == (5, 7)


def test_an_unfinished_dump() -> None:
    manifest = Manifest.from_bytes((DUMP / "manifest.json").read_bytes(), "here")
    plan_file = PlanFile(Store(DUMP), manifest.plan, manifest.fingerprint)
    plan_file.check()
    assert plan_file.digest is None
    part = DumpWriter(DUMP, manifest.plan, manifest.fingerprint).parts.entry(0)
    assert part is not None and part.shard == manifest.shards[0] and part.sites == manifest.sites


def test_a_trace(tmp_path: Path) -> None:
    trace = Trace.load(PROOF / "trace.jsonl")
    trace.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (PROOF / "trace.jsonl").read_bytes()
    assert len({event["event"] for event in trace.events}) == 9, "every kind of event"
