"""`Head`: plan.json, the first file of a dump that is being written. It says what the dump will be, so that others can join."""

import json
from dataclasses import asdict

from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, OtherFingerprint, OtherPlan
from replaylens.engine.proof.fingerprint import Fingerprint

HEAD = "plan.json"
_MAX_BYTES = 1 << 28


class Head:
    """The plan and fingerprint of one writer, held against those that lie in the folder."""

    def __init__(self, store: Store, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.plan, self.fingerprint = store, plan, fingerprint

    def create(self) -> bool:
        """Write it, if nobody has: whether it was us."""
        return self.store.create(HEAD, self._bytes(None))

    def rewrite(self, digest: str) -> None:
        """Mutates: the dump was whole once, with this digest, and must have it again."""
        self.store.write(HEAD, self._bytes(digest))

    def _bytes(self, digest: str | None) -> bytes:
        head = {"fingerprint": asdict(self.fingerprint), "plan": self.plan.to_json(), "digest": digest}
        return json.dumps(head, indent=1).encode()

    def check(self) -> None:
        """OtherPlan or OtherFingerprint, unless what lies there is ours to go on with."""
        plan, fingerprint, _ = self._read()
        self.require(plan, fingerprint)

    @property
    def digest(self) -> str | None:
        """What a damaged dump had before it was reopened; None: it is a new one."""
        return self._read()[2]

    def _read(self) -> tuple[DumpPlan, Fingerprint, str | None]:
        try:
            raw = json.loads(self.store.read(HEAD, _MAX_BYTES))
            return DumpPlan.from_json(raw["plan"]), Fingerprint(**raw["fingerprint"]), raw.get("digest")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDump(f"{self.store.url}/{HEAD} is damaged ({error}): delete the folder and begin again") from None

    def require(self, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        """OtherPlan or OtherFingerprint, unless these are ours."""
        if differences := self.plan.differences(plan):
            raise OtherPlan(
                f"{self.store.url} was begun with other options: {'; '.join(differences)}. Resume it with its own, write "
                f"elsewhere, or delete the folder"
            )
        if differences := self.fingerprint.differences(fingerprint):
            raise OtherFingerprint(f"{self.store.url} was begun under another fingerprint: {'; '.join(differences)}")
