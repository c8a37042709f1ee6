"""`Trace`: every event of an engine, enough to reproduce each committed and rejected row bit for bit.

One JSON object per line. The first line holds the format version and the fingerprint; each other line one event:
plant, fork, force, generate, draft, verdict, finish, rollback, release. Timings, batches and page numbers are not in
it: nothing depends on them.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadTrace, OtherFingerprint
from replaylens.engine.fingerprint import Fingerprint

FORMAT = 1
EVENTS = ("plant", "fork", "force", "generate", "draft", "verdict", "finish", "rollback", "release")


@dataclass
class Trace:
    """Events in the order in which they happened."""

    fingerprint: Fingerprint
    events: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: str, **details: Any) -> None:
        """Mutates: one more event."""
        self.events.append({"event": event, **details})

    def save(self, path: str | Path) -> None:
        """Write the trace; the same trace gives the same bytes."""
        head = {"format": FORMAT, "fingerprint": asdict(self.fingerprint)}
        lines = [json.dumps(x, separators=(",", ":"), sort_keys=True) for x in [head, *self.events]]
        Path(path).write_text("\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read and check a trace; BadTrace says which line is wrong."""
        lines = Path(path).read_text().splitlines()
        try:
            head = json.loads(lines[0])
            if head["format"] != FORMAT:
                raise BadTrace(f"{path} has trace format {head['format']}; this version reads {FORMAT}")
            trace = cls(Fingerprint(**head["fingerprint"]))
        except (IndexError, KeyError, TypeError, json.JSONDecodeError) as e:
            raise BadTrace(f"{path}: the first line is not a trace header: {e}") from None
        for number, line in enumerate(lines[1:], start=2):
            try:
                event = json.loads(line)
                known = event["event"] in EVENTS and isinstance(event["branch"], int)
            except (KeyError, TypeError, json.JSONDecodeError):
                known = False
            if not known:
                raise BadTrace(f"{path}, line {number}: not an event of a trace")
            trace.events.append(event)
        return trace

    def require(self, fingerprint: Fingerprint) -> None:
        """Refuse a trace that another model, device or version made: its bits could not come out."""
        if differences := fingerprint.differences(self.fingerprint):
            raise OtherFingerprint("the trace was made under another fingerprint: " + "; ".join(differences))
