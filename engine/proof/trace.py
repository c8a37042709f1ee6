"""`Trace`: every event of an engine, enough to reproduce each committed and rejected row bit for bit.

One JSON object per line. The first line holds the format version and the fingerprint. Each following line holds one event:
plant, fork, force, generate, draft, verdict, finish, rollback, release. The last line holds the number of events and the
hash of all bytes before it. Timings, batches and page numbers are not recorded: nothing depends on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadTrace, OtherFingerprint
from replaylens.engine.proof.events import check_event
from replaylens.engine.proof.fingerprint import Fingerprint
from replaylens.engine.records import build, parse

FORMAT = 1


@dataclass(frozen=True)
class _Head:
    """The first line."""

    format: int
    fingerprint: Fingerprint


@dataclass
class Trace:
    """Events in the order in which they happened."""

    fingerprint: Fingerprint
    events: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: str, **details: Any) -> None:
        """Append an event. Mutates the trace."""
        self.events.append({"event": event, **details})

    def save(self, path: str | Path) -> None:
        """Write the trace. Equal traces give equal bytes."""
        head = {"format": FORMAT, "fingerprint": self.fingerprint.parts()}
        body = "".join(_line(x) for x in [head, *self.events]).encode()
        Path(path).write_bytes(body + _line(_closing(len(self.events), body)).encode())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read and check a trace. Raises BadTrace with the first bad line."""
        raw = Path(path).read_bytes()
        lines = raw.splitlines(keepends=True)
        what = f"{path}, line 1: not a trace header: it"
        head = parse(lines[0] if lines else b"", what, BadTrace)
        if isinstance(head, dict) and type(head.get("format")) is int and head["format"] != FORMAT:
            raise BadTrace(f"{path} has trace format {head['format']}. This version reads format {FORMAT}.")
        trace = cls(build(_Head, head, what, BadTrace).fingerprint)
        for number, line in enumerate(lines[1:-1], start=2):
            what = f"{path}, line {number}"
            trace.events.append(check_event(parse(line, f"{what}: not an event of a trace: it", BadTrace), what))
        body = b"".join(lines[:-1])
        if lines[-1] != _line(_closing(len(trace.events), body)).encode():
            raise BadTrace(f"{path}, line {len(lines)}: not the closing line of this trace. The file was truncated or changed.")
        return trace

    def require(self, fingerprint: Fingerprint) -> None:
        """Raise OtherFingerprint if the trace is from another model, device or version: its bits cannot be reproduced."""
        if differences := fingerprint.differences(self.fingerprint):
            raise OtherFingerprint(f"The trace was recorded under another fingerprint: {'; '.join(differences)}.")


def path_digest(tokens: Sequence[int]) -> str:
    """A short hash of a token path."""
    return hashlib.blake2b(json.dumps(list(tokens)).encode(), digest_size=8).hexdigest()


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n"


def _closing(num_events: int, body: bytes) -> dict[str, Any]:
    return {"events": num_events, "sha256": hashlib.sha256(body).hexdigest()}
