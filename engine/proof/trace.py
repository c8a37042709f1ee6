"""`Trace`: every event of an engine, enough to reproduce each committed and rejected row bit for bit.

One JSON object per line. The first line holds the format version and the fingerprint. Each following line holds one event:
plant, fork, force, generate, draft, verdict, finish, rollback, release. The last line holds the number of events and the
hash of all bytes before it. Timings, batches and page numbers are not recorded: nothing depends on them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadFile, EngineError, FingerprintMismatch
from replaylens.engine.files import write_file
from replaylens.engine.records import Count, Fingerprint, PlacedEditRecord, Positive, build, parse
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_path

# ---- events ----------------------------------------------------------------------------------------------------------
# The events of a trace, as they are written: one dataclass per kind, with the fields of its line.

TokenIds = tuple[Count, ...]


@dataclass(frozen=True)
class _Event:
    event: str
    branch: Count


@dataclass(frozen=True)
class _Plant(_Event):
    tokens: TokenIds
    capture: CaptureSpec | None
    edits: tuple[PlacedEditRecord, ...] = ()
    hooks: Count = 0


@dataclass(frozen=True)
class _Fork(_Event):
    child: Count
    at: Count
    edits: tuple[PlacedEditRecord, ...] = ()
    hooks: Count = 0


@dataclass(frozen=True)
class _Force(_Event):
    tokens: TokenIds


@dataclass(frozen=True)
class _Generate(_Event):
    n: Positive
    sampling: Sampling
    keep_rejected: bool
    final: bool
    deterministic: bool = True


@dataclass(frozen=True)
class _Draft(_Event):
    at: Count
    chains: tuple[TokenIds, ...]
    after: Count | None = None


@dataclass(frozen=True)
class _Verdict(_Event):
    chain: Count
    accepted: Count
    pending: TokenIds
    rejected: TokenIds
    overruled: TokenIds = ()


@dataclass(frozen=True)
class _Finish(_Event):
    reason: str | None
    generated: Count
    path: str
    length: Count = 0
    tokens: TokenIds = ()
    ended: str | None = None


@dataclass(frozen=True)
class _Rollback(_Event):
    to: Count
    pending: bool = False


_KINDS: dict[str, type[_Event]] = {
    "plant": _Plant,
    "fork": _Fork,
    "force": _Force,
    "generate": _Generate,
    "draft": _Draft,
    "verdict": _Verdict,
    "finish": _Finish,
    "rollback": _Rollback,
    "release": _Event,
}
EVENTS = tuple(_KINDS)


def check_event(raw: Any, what: str) -> dict[str, Any]:
    """The event itself, if its kind is known and each of its fields has its type. Otherwise BadFile names the field."""
    kind = raw.get("event") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(f"{what}: not an event of a trace. Events are {', '.join(EVENTS)}.")
    build(_KINDS[kind], raw, f"{what}: not an event of a trace: {kind!r}", BadFile)
    return dict(raw)


# ---- trace -----------------------------------------------------------------------------------------------------------

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
        """Write the trace, as a whole or not at all, over an older trace only. Equal traces give equal bytes."""
        head = {"format": FORMAT, "fingerprint": self.fingerprint.parts()}
        body = "".join(_line(x) for x in [head, *self.events]).encode()
        write_file(path, body + _line(_closing(len(self.events), body)).encode(), is_trace)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read and check a trace. Raises BadFile with the first bad line."""
        try:
            raw = as_path("path", path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte
            if isinstance(error, EngineError):
                raise
            raise BadFile(f"Cannot read {str(path)[:200]!r}: {getattr(error, 'strerror', None) or error}.") from error
        lines = raw.splitlines(keepends=True)
        what = f"{path}, line 1: not a trace header: it"
        head = parse(lines[0] if lines else b"", what, BadFile)
        if isinstance(head, dict) and type(head.get("format")) is int and head["format"] != FORMAT:
            raise BadFile(f"{path} has trace format {head['format']}. This version reads format {FORMAT}.")
        trace = cls(build(_Head, head, what, BadFile).fingerprint)
        for number, line in enumerate(lines[1:-1], start=2):
            what = f"{path}, line {number}"
            trace.events.append(check_event(parse(line, f"{what}: not an event of a trace: it", BadFile), what))
        body = b"".join(lines[:-1])
        if lines[-1] != _line(_closing(len(trace.events), body)).encode():
            raise BadFile(f"{path}, line {len(lines)}: not the closing line of this trace. The file was truncated or changed.")
        return trace

    def require(self, fingerprint: Fingerprint) -> None:
        """Raise FingerprintMismatch if the trace is from another model, device or version: its bits cannot be reproduced."""
        if differences := fingerprint.differences(self.fingerprint):
            raise FingerprintMismatch(f"The trace was recorded under another fingerprint: {'; '.join(differences)}.")


def is_trace(content: bytes) -> bool:
    """Whether a file begins as `Trace.save` writes it, of any format."""
    return content.startswith(b'{"fingerprint":{') and b'"format":' in content.split(b"\n", 1)[0]


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n"


def _closing(num_events: int, body: bytes) -> dict[str, Any]:
    return {"events": num_events, "sha256": hashlib.sha256(body).hexdigest()}
