"""The events of a trace, as they are written: one dataclass per kind, with the fields of its line."""

from dataclasses import dataclass
from typing import Any

from replaylens.engine.errors import BadTrace
from replaylens.engine.records import Count, Positive, build
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.records import PlacedEditRecord
from replaylens.engine.request.sampling import Sampling

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
    """The event itself, if its kind is known and each of its fields has its type. Otherwise BadTrace names the field."""
    kind = raw.get("event") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadTrace(f"{what}: not an event of a trace. Events are {', '.join(EVENTS)}.")
    build(_KINDS[kind], raw, f"{what}: not an event of a trace: {kind!r}", BadTrace)
    return dict(raw)
