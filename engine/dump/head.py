"""`Head`: plan.json, the first file of an unfinished dump. It holds plan and fingerprint, so that other writers can join."""

import json
from dataclasses import asdict

from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, OtherFingerprint, OtherPlan
from replaylens.engine.proof.fingerprint import Fingerprint

HEAD = "plan.json"
_MAX_BYTES = 1 << 28


class Head:
    """Plan and fingerprint of one writer, and their comparison with those in the folder."""

    def __init__(self, store: Store, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.plan, self.fingerprint = store, plan, fingerprint

    def create(self) -> bool:
        """Write plan.json if the folder has none. Returns whether it was written."""
        return self.store.create(HEAD, self._bytes(None))

    def rewrite(self, digest: str) -> None:
        """Mutates: record the digest of a damaged dump, which its repair must reproduce."""
        self.store.write(HEAD, self._bytes(digest))

    def _bytes(self, digest: str | None) -> bytes:
        head = {"fingerprint": asdict(self.fingerprint), "plan": self.plan.to_json(), "digest": digest}
        return json.dumps(head, indent=1).encode()

    def check(self) -> None:
        """Raise OtherPlan or OtherFingerprint if the folder holds a dump that this writer cannot resume."""
        plan, fingerprint, _ = self._read()
        self.require(plan, fingerprint)

    @property
    def digest(self) -> str | None:
        """The digest of a damaged dump before it was reopened; None for a new dump."""
        return self._read()[2]

    def _read(self) -> tuple[DumpPlan, Fingerprint, str | None]:
        try:
            raw = json.loads(self.store.read(HEAD, _MAX_BYTES))
            return DumpPlan.from_json(raw["plan"]), Fingerprint(**raw["fingerprint"]), raw.get("digest")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDump(f"{self.store.url}/{HEAD} is damaged ({error}). Delete the folder and start again.") from None

    def require(self, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        """Raise OtherPlan or OtherFingerprint if these differ from the writer's own."""
        if differences := self.plan.differences(plan):
            raise OtherPlan(
                f"{self.store.url} was started with other options: {'; '.join(differences)}. Resume it with those options, "
                f"choose another folder, or delete this one."
            )
        if differences := self.fingerprint.differences(fingerprint):
            raise OtherFingerprint(
                f"{self.store.url} was started under another fingerprint: {'; '.join(differences)}. Resume it there, or choose "
                f"another folder."
            )
