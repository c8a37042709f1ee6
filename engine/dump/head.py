"""`Head`: plan.json, the first file of an unfinished dump. It holds plan and fingerprint, so that other writers can join."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, EngineError, OtherFingerprint, OtherPlan, ReplayMismatch, UnfinishedDump
from replaylens.engine.proof.fingerprint import Fingerprint
from replaylens.engine.records import Hash, parse, read

HEAD = "plan.json"
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class _HeadRecord:
    """The content of plan.json."""

    fingerprint: Fingerprint
    plan: dict[str, Any]
    digest: Hash | None = None
    shards: dict[int, Hash] = field(default_factory=dict)


class Head:
    """Plan and fingerprint of one writer, and their comparison with those in the folder."""

    def __init__(self, store: Store, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.plan, self.fingerprint = store, plan, fingerprint

    def create(self) -> bool:
        """Write plan.json if the folder has none. Returns whether it was written."""
        return self.store.create(HEAD, self._bytes())

    def rewrite(self, digest: str | None = None, shards: dict[int, str] | None = None) -> None:
        """Mutates: record the digests of a damaged dump, of all of it and of its shards. Its repair must reproduce them."""
        self.store.write(HEAD, self._bytes(digest, shards))

    def _bytes(self, digest: str | None = None, shards: dict[int, str] | None = None) -> bytes:
        record = asdict(_HeadRecord(self.fingerprint, self.plan.to_json(), digest, shards or {}))
        return json.dumps(record | {"fingerprint": self.fingerprint.parts()}, indent=1).encode()

    def check(self) -> None:
        """Raise OtherPlan or OtherFingerprint if this writer cannot resume the folder's dump, BadDump if it is none."""
        found = self.read()
        try:
            plan = DumpPlan.from_json(found.plan)
        except EngineError as error:
            raise self._damaged(error) from None
        self.require(plan, found.fingerprint)

    @property
    def digest(self) -> str | None:
        """The digest of a damaged dump before it was reopened; None for a new dump."""
        return self.read().digest

    def check_digest(self, number: int, digest: str) -> None:
        """Raise ReplayMismatch if shard `number` had another digest before the dump was damaged."""
        before = self.read().shards.get(number) if self.store.exists(HEAD) else None
        if before not in (None, digest):
            raise ReplayMismatch(
                f"{self.store.url}: shard {number} has digest {digest} after its repair; before, it was {before}. It was not "
                f"written. Run `replaylens doctor`, then resume."
            )

    def read(self) -> _HeadRecord:
        """The content of plan.json; BadDump if it is damaged, or not that of a dump."""
        try:
            return read(_HeadRecord, self.store.read(HEAD, _MAX_BYTES), f"{self.store.url}/{HEAD}", BadDump)
        except BadDump as error:
            raise self._damaged(error) from None

    def _damaged(self, error: EngineError) -> BadDump:
        return BadDump(f"{self.store.url}/{HEAD} is damaged, or not that of a dump: {error} Choose another folder.")

    def require(self, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        """Raise OtherPlan or OtherFingerprint if these differ from the writer's own."""
        if differences := self.plan.differences(plan):
            raise OtherPlan(
                f"{self.store.url} was started with other options: {'; '.join(differences)}. Resume it with those options, "
                f"or choose another folder."
            )
        if differences := self.fingerprint.differences(fingerprint):
            raise OtherFingerprint(
                f"{self.store.url} was started under another fingerprint: {'; '.join(differences)}. Resume it there, or choose "
                f"another folder."
            )


def without_manifest(store: Store, path: str) -> BadDump:
    """The error for a folder with plan.json and no manifest: an unfinished dump, or rollouts, whose plan has the same name."""
    try:
        raw = parse(store.read(HEAD, _MAX_BYTES), HEAD, BadDump)
    except BadDump:  # a damaged plan: resuming says so
        raw = None
    if isinstance(raw, dict) and "wave" in raw:
        return BadDump(
            f"{path} holds rollouts, not a dump. To make a dump of their rows, draw them with `replaylens resample --sites S "
            f"--dump FOLDER` and give that FOLDER; in Python, read rollouts with `Rollouts.load`."
        )
    return UnfinishedDump(f"{path} is not finished. Resume the dump.")
